"""Define a decoder-only Transformer in plain torch, as the list of layers that a DeepSpeed `PipelineModule` takes.

It has pre-norm (RMSNorm), rotary or learned positions, grouped-query attention, SwiGLU, linears without bias; two
config fields give GPT-3's LayerNorm, GELU and biases. Every layer takes one tensor and returns one. Two things let the
model work in token slices: `sliced_attention` in the place of `F.scaled_dot_product_attention`, and positions that
begin at `first_position()`. Without an active slice the same layers, with the same parameters, run whole sequences.

Shapes: B batch, T tokens of the slice (or of the sequence), H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from terapipe_ds.attention import active_slice, sliced_attention
from terapipe_ds.attention.document_edges import Starts, are_position_ids, to_device
from terapipe_ds.costs import model_sizes
from terapipe_ds.files.strict_json import STRICT, describe_error
from terapipe_ds.losses import Head, LinearCrossEntropy, hand_on, hands_on_hidden, head_of, tied_logits
from terapipe_ds.models.positions import (
    RowsOfTable,
    check_learned_positions,
    document_places,
    first_position,
    longest_run,
    rotate,
    turns_of_slice,
)

IGNORE_INDEX = -100


class GPTConfigError(ValueError):
    """Report numbers that no model can have; the message ends with the change to make."""


_Size = Annotated[int, Field(ge=1, le=2**40)]
_Rate = Annotated[float, Field(ge=0, lt=1)]


def _usual_head_dim(fields: dict[str, Any]) -> int:
    head_dim, rest = divmod(fields["hidden_size"], fields["num_heads"])
    if rest:
        problem = f"hidden_size={fields['hidden_size']} does not divide by num_heads={fields['num_heads']}"
        raise GPTConfigError(f"{problem}: change one of them or give head_dim")
    return int(head_dim)


def _usual_ffn_size(fields: dict[str, Any]) -> int:
    width = fields["hidden_size"]
    return math.ceil(8 * width / 3 / 64) * 64 if fields["gated_mlp"] else 4 * width


class GPTConfig(BaseModel):
    """Describe a model. A field that is left out, or None, has its usual value.

    Raises:
        GPTConfigError: sizes that no model can have.
    """

    model_config = STRICT | ConfigDict(frozen=True)

    vocab_size: _Size = 256
    hidden_size: _Size = 128
    num_layers: Annotated[int, Field(ge=1, le=100_000)] = 4
    num_heads: _Size = 4
    num_kv_heads: _Size = Field(default_factory=lambda fields: fields["num_heads"])  # fewer: grouped queries
    head_dim: _Size = Field(default_factory=_usual_head_dim)
    gated_mlp: bool = True  # SwiGLU; False: two matrices with GELU
    ffn_size: _Size = Field(default_factory=_usual_ffn_size)
    # a measured profile knows a layer by the text of its config: fields that change no cost of it are not in there
    max_sequence_length: _Size = Field(1024, repr=False)  # learned positions end here; rotary ones do not end
    bias: bool = False  # True: bias in each linear but the head, and LayerNorm for RMSNorm
    tied_embedding: bool = False
    positions: Literal["rope", "learned"] = "rope"
    dropout: _Rate = 0.0
    attention_dropout: _Rate = Field(default_factory=lambda fields: fields["dropout"])
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field("float32", repr=False)  # DeepSpeed casts layers
    seed: Annotated[int, Field(ge=0, lt=2**63, repr=False)] = 1234
    norm_eps: Annotated[float, Field(ge=0)] = 1e-5
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    init_std: Annotated[float, Field(ge=0, repr=False)] = 0.02

    def __init__(self, /, **fields: Any) -> None:
        usual = {name for name in type(self).model_fields if fields.get(name, 0) is None}
        try:
            super().__init__(**{name: value for name, value in fields.items() if name not in usual})
        except ValidationError as error:
            problem = describe_error(error, "the model")
            raise GPTConfigError(f"{problem}; give another value, or leave it out") from None

    @model_validator(mode="after")
    def _fit_together(self) -> GPTConfig:
        if self.num_heads % self.num_kv_heads:
            problem = f"num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}"
            divisors = [n for n in range(1, min(self.num_heads, 1000) + 1) if self.num_heads % n == 0]
            raise GPTConfigError(f"{problem}: give num_kv_heads one of {divisors}")
        if self.positions == "rope" and self.head_dim % 2:
            problem = f"head_dim={self.head_dim} is odd, and rotary positions turn pairs of numbers"
            raise GPTConfigError(f'{problem}: give an even head_dim or positions="learned"')
        return self

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> GPTConfig:
        """Return a named size of `terapipe_ds.costs.model_sizes` with some fields replaced.

        head_dim, ffn_size and num_kv_heads keep their values only if the fields they follow from are not replaced:
        `from_name("tiny", num_heads=2)` has heads of half the hidden size.

        Raises:
            ModelSizeError: no size has that name, or the size has experts, latent attention or windows.
        """
        named = model_sizes.model_size(name)
        if named.experts is not None or named.latent is not None or named.windows:
            problem = f"{named.name} has experts, latent attention or windows, which these layers lack"
            raise model_sizes.ModelSizeError(f"{problem}; build it with from_pretrained, or give another size")
        size = dataclasses.asdict(named)
        fields = {name: size[name] for name in cls.model_fields if name in size}
        sources = {"num_kv_heads": {"num_heads"}, "head_dim": {"num_heads", "hidden_size"}}
        sources["ffn_size"] = {"hidden_size", "gated_mlp"}
        # a field that follows from a replaced one is None, which means its usual value
        follow = dict.fromkeys(name for name, of in sources.items() if of & overrides.keys())
        return cls(**{**fields, **follow, **overrides})

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch object of `dtype`."""
        return getattr(torch, self.dtype)

    def generator(self, layer_id: int) -> torch.Generator:
        """Return the random generator for the initial weights of one layer.

        The weights depend on (seed, layer_id) alone: a model starts from the same weights for any number of stages, and
        whatever else a rank builds (`partition_method="parameters"` builds and counts all layers).
        """
        return torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + layer_id)


def gpt_layers(config: GPTConfig) -> list[LayerSpec]:
    """Return the model as `PipelineModule(layers=...)` takes it: token ids [B, T] in, logits [B, T, vocab] out."""
    first, last = LayerSpec(TokenEmbedding, config), LayerSpec(LMHead, config)
    if config.tied_embedding:
        first = TiedLayerSpec("embedding", TokenEmbedding, config)
        last = TiedLayerSpec("embedding", TokenEmbedding, config, forward_fn=tied_logits)
    # DeepSpeed cuts between entries of this list, so each is a layer of its own
    positions = [LayerSpec(PositionEmbedding, config)] if config.positions == "learned" else []
    decoder = [LayerSpec(DecoderLayer, config, index) for index in range(config.num_layers)]
    return [first, *positions, *decoder, LayerSpec(FinalNorm, config), last]


def gpt_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the labels that are not `IGNORE_INDEX`, in fp32 (fp64 for fp64 logits).

    Args:
        logits: [B, T, vocab_size].
        labels: [B, T] int64, already shifted: `labels[:, t]` is the token that follows `inputs[:, t]`.
    """
    flat, target = logits.flatten(0, -2), labels.flatten()
    # `dtype` widens inside the kernel where the device can: the log-probabilities are the only wide tensor
    wide = torch.promote_types(flat.dtype, torch.float32)
    return F.nll_loss(F.log_softmax(flat, dim=-1, dtype=wide), target, ignore_index=IGNORE_INDEX)


# the engine leaves the output matrix to this one, and keeps no logits
setattr(gpt_loss, "of_hidden", LinearCrossEntropy(ignore_index=IGNORE_INDEX).of_hidden)  # noqa: B010


class RowGradients(Protocol):
    """Declare the method of the engine's `WeightGradients` that tables call."""

    def adder_of_rows(self, table: Tensor) -> Callable[[int, Tensor], None] | None: ...


class TokenEmbedding(nn.Module):
    """Token ids [B, T] int64 -> [B, T, hidden_size]. Where tied, `weight` is the output matrix as well.

    From a tuple it takes the first tensor. The second tensor holds position ids of packed rows, [B, T]. The documents
    of the active slice already carry the same information; ids that restart without documents are an error.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = _normal(shape, config, config.generator(0), config.init_std)
        self._is_learned = config.positions == "learned"
        # with learned positions, the next layer applies dropout to the sum of both embeddings
        self.dropout = 0.0 if self._is_learned else config.dropout
        self._lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding
        self._rows_count_anew: bool | None = None  # some position ids so far, of rows without documents

    def defer_weight_gradients(self, gradients: Any) -> None:
        """Let the engine make the gradient of the table, once for several slices."""
        self._lookup = gradients.lookup

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Look at position ids while they are on the host: no slice then waits for its device to read them."""
        if not isinstance(inputs, tuple) or not _are_with_ids(inputs):
            return
        counts_anew = starts is None and _count_anew(*inputs)  # which a slice refuses, and says what to set
        if starts is None:
            self._rows_count_anew = bool(self._rows_count_anew) or counts_anew
        if self._is_learned and not counts_anew:
            _require_from_0(inputs[1], starts)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        tokens, *others = (inputs,) if torch.is_tensor(inputs) else inputs
        if others:
            _check_position_ids(tokens, others, self._rows_count_anew)
            if self._is_learned and active_slice() is None:
                _require_from_0(others[0], None)
        return F.dropout(self._lookup(tokens, self.weight), self.dropout, self.training)


def _count_anew(tokens: Tensor, position_ids: Tensor) -> bool:
    """Return whether position ids count anew within a row. Ids that merely start later in the row do not."""
    offsets = position_ids - torch.arange(tokens.shape[1], device=tokens.device)
    return bool(((offsets != offsets[:, :1]) | (offsets < first_position())).any())


def _require_from_0(position_ids: Tensor, starts: Starts | None) -> None:
    """Raise GPTConfigError for a row or document that begins at another learned position; turns do not depend on it."""
    rows, length = position_ids.shape
    for ids, of_row in zip(position_ids, starts or [(0,)] * rows, strict=True):
        # each token of padding counts as a document, with any number
        begins = [start for start, stop in itertools.pairwise((*of_row, length)) if stop - start > 1]
        if (first := next(filter(None, ids[begins].tolist()), 0)) != 0:
            raise GPTConfigError(
                f"the position ids of a row or document begin at {first}, and learned positions begin at 0: leave the "
                'position ids out, or give positions="rope"'
            )


def _are_with_ids(inputs: Sequence[Any]) -> bool:
    """Return whether inputs are tokens [B, T] with position ids."""
    is_pair = len(inputs) == 2 and all(map(torch.is_tensor, inputs))
    return is_pair and inputs[0].shape == inputs[1].shape and are_position_ids(inputs[1])


def _check_position_ids(tokens: Tensor, others: Sequence[Tensor], rows_count_anew: bool | None) -> None:
    """Raise GPTConfigError unless `others`, inputs beside tokens [B, T], are position ids that layers respect.

    If no documents are known, layers count the positions of the whole row. `rows_count_anew`: whether whole rows have
    ids that do not; None: nobody has looked.
    """
    if not _are_with_ids((tokens, *others)):
        shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in others)
        problem = f"beside tokens {list(tokens.shape)} the model takes position ids, integers of that shape"
        raise GPTConfigError(f"{problem}, and no more, got {shapes}: leave other inputs out")
    active = active_slice()
    # the engine has read the documents of the same ids
    if active is not None and (active.documents is not None or active.mode == "probe"):
        return
    # numbers on a device are read only where whole rows, on the host, gave a reason
    if (active is None or rows_count_anew is not False) and _count_anew(tokens, others[0]):
        raise GPTConfigError(
            "the position ids count anew within a row, but attention would mix its documents: set terapipe.documents "
            "to the index of the position ids among the inputs (outside of the engine: run the rows within "
            "terapipe_ds.attention.documents(position_ids)), or leave the position ids out"
        )


class PositionEmbedding(nn.Module):
    """Add learned positions to [B, T, hidden_size].

    This is a separate layer: in `TokenEmbedding`, the last stage's tied copy would hold a table that it never uses.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = (config.max_sequence_length, config.hidden_size)
        self.weight = _normal(shape, config, config.generator(config.num_layers + 2), config.init_std)
        self.dropout = config.dropout
        self._gradients: RowGradients | None = None

    def defer_weight_gradients(self, gradients: RowGradients) -> None:
        """Leave the gradients of rows to `gradients`, in the backward of their slice; the engine calls this once."""
        self._gradients = gradients

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Raise GPTConfigError for a batch that needs more positions, before its first slice runs."""
        check_learned_positions(longest_run(inputs, starts), self.weight.shape[0], GPTConfigError)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = document_places()
        if positions is None:  # the usual case: rows of one document, whose positions are a range of the table
            stop = (start := first_position()) + hidden.shape[1]
        else:
            start, stop = int(positions.min()), int(positions.max()) + 1  # on the CPU
        check_learned_positions(stop, self.weight.shape[0], GPTConfigError)
        added = self._rows(start, stop)
        if positions is not None:
            added = F.embedding(to_device(positions - start, hidden.device), added)
        return F.dropout(hidden + added, self.dropout, self.training)

    def _rows(self, start: int, stop: int) -> Tensor:
        add = None if self._gradients is None else self._gradients.adder_of_rows(self.weight)
        return self.weight[start:stop] if add is None else RowsOfTable.apply(self.weight, start, stop, add)


class DecoderLayer(nn.Module):
    """One Transformer layer, [B, T, hidden_size] -> the same; `index` counts the decoder layers from 0."""

    compile_safe = True

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        generator = config.generator(1 + index)
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(config, index, generator)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(config, generator)
        self.dropout = config.dropout

    def forward(self, hidden: Tensor) -> Tensor:
        update = self.attention(self.attention_norm(hidden))
        hidden = hidden + F.dropout(update, self.dropout, self.training)
        update = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + F.dropout(update, self.dropout, self.training)


class CausalSelfAttention(nn.Module):
    """Grouped-query self-attention of a slice to itself and its prefix, [B, T, hidden_size] -> the same."""

    def __init__(self, config: GPTConfig, index: int, generator: torch.Generator) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_base = config.rope_base if config.positions == "rope" else None
        self.dropout = config.attention_dropout
        width = config.num_heads * config.head_dim
        qkv_width = width + 2 * config.num_kv_heads * config.head_dim
        self.qkv = _linear(config, config.hidden_size, qkv_width, generator)
        self.out = _linear(config, width, config.hidden_size, generator, residual=True)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 H_kv, D]
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        if self.rope_base is not None:
            turns = turns_of_slice(self.head_dim, self.rope_base, hidden)
            q, k = rotate(q, turns), rotate(k, turns)  # new tensors: only v still holds the fused output
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = sliced_attention(q, k, v, layer=self.index, dropout_p=self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`, SwiGLU (Shazeer 2020, arXiv 2002.05202), or `down(gelu(up(x)))`."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.gated = config.gated_mlp
        width = 2 * config.ffn_size if self.gated else config.ffn_size  # gate and up are one product
        self.up = _linear(config, config.hidden_size, width, generator)
        self.down = _linear(config, config.ffn_size, config.hidden_size, generator, residual=True)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        if not self.gated:
            return self.down(F.gelu(wide, approximate="tanh"))
        gate, up = wide.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FinalNorm(nn.Module):
    """The norm before the output matrix, [B, T, hidden_size] -> the same."""

    compile_safe = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class LMHead(nn.Module):
    """[B, T, hidden_size] -> logits [B, T, vocab_size]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        without_bias = config.model_copy(update={"bias": False})
        self.out = _linear(without_bias, config.hidden_size, config.vocab_size, config.generator(config.num_layers + 1))

    def output_head(self) -> Head | str:
        """Return the output matrix for a loss that keeps no logits."""
        return head_of(self.out)

    def forward(self, hidden: Tensor) -> Tensor:
        return hand_on(hidden) if hands_on_hidden() else self.out(hidden)


def _norm(config: GPTConfig) -> nn.Module:
    kind = nn.LayerNorm if config.bias else nn.RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps, dtype=config.torch_dtype)


def _linear(
    config: GPTConfig, width_in: int, width_out: int, generator: torch.Generator, *, residual: bool = False
) -> nn.Linear:
    """Return a linear drawn as in GPT-2: 1/sqrt(2 * num_layers) scales weights that add to the residual stream."""
    std = config.init_std / math.sqrt(2 * config.num_layers) if residual else config.init_std
    linear = nn.Linear(width_in, width_out, bias=False, device="meta")  # torch's own draw is not wanted
    linear.weight = _normal((width_out, width_in), config, generator, std)
    if config.bias:
        linear.bias = nn.Parameter(torch.zeros(width_out, dtype=config.torch_dtype))
    return linear


def _normal(shape: tuple[int, int], config: GPTConfig, generator: torch.Generator, std: float) -> nn.Parameter:
    # counting parameters builds every layer on every rank: that takes no memory
    device = torch.get_default_device()
    if device.type == "meta":
        return nn.Parameter(torch.empty(shape, dtype=config.torch_dtype, device=device))
    # drawn in fp32 on the CPU whatever the dtype and the device, for the same weights everywhere
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    return nn.Parameter(drawn.to(device, config.torch_dtype))
