"""A decoder-only Transformer in plain torch, as the list of layers that a DeepSpeed ``PipelineModule`` takes.

Pre-norm (RMSNorm), rotary or learned positions, grouped-query attention, SwiGLU, linears without bias;
GPT-3's LayerNorm, GELU and biases by two fields of the config. Every layer takes one tensor and returns one.
Nothing here knows of pipelines: what lets the model work in token slices is ``sliced_attention`` in the place
of ``F.scaled_dot_product_attention``, and positions that begin at ``active_slice().start``. Without an active
slice the same layers, with the same parameters, run whole sequences.

Shapes: B batch, T tokens of the slice (or of the sequence), H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice, sliced_attention
from terapipe_ds.costs import model_sizes
from terapipe_ds.messages import show_value
from terapipe_ds.models.rotary import rotary_turns, rotate

IGNORE_INDEX = -100
_MOST_OF_ANY, _MOST = 2**40, {"num_layers": 100_000, "seed": 2**63 - 1}
_DTYPES = ("float32", "float64", "bfloat16", "float16")


class GPTConfigError(ValueError):
    """Numbers that no model can have."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What a model is made of. A field left at None gets its usual value when the object is made.

    Raises:
        GPTConfigError: sizes that no model can have; the message ends with what to change.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = None  # type: ignore[assignment]  # None: num_heads. Fewer: grouped queries
    head_dim: int = None  # type: ignore[assignment]  # None: hidden_size / num_heads
    ffn_size: int = None  # type: ignore[assignment]  # None: 8/3 (ungated: 4) times hidden_size
    max_sequence_length: int = 1024  # learned positions end here; rotary ones do not end
    gated_mlp: bool = True  # SwiGLU; False: two matrices with GELU
    bias: bool = False  # True: bias in each linear but the head, and LayerNorm for RMSNorm
    tied_embedding: bool = False
    positions: str = "rope"  # "rope" | "learned"
    dropout: float = 0.0
    attention_dropout: float = None  # type: ignore[assignment]  # None: dropout
    dtype: str = "float32"
    seed: int = 1234
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_types()
        if self.head_dim is None:
            problem = f"hidden_size={self.hidden_size} does not divide by num_heads={self.num_heads}"
            _require(self.hidden_size % self.num_heads == 0, problem, "change one of them or give head_dim")
        usual = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "ffn_size": _round_up(8 * self.hidden_size / 3, 64) if self.gated_mlp else 4 * self.hidden_size,
            "attention_dropout": self.dropout,
        }
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_derived()

    def _check_types(self) -> None:
        """Every field as it is given; None stands for the usual value where that is the default."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            kind, found = str(field.type), type(value)
            problem = f"{name}={show_value(value)}"
            if kind == "int":
                least = 0 if name == "seed" else 1
                _require(found is int and value >= least, problem, f"give a {'' if least == 0 else 'positive '}number")
                most = _MOST.get(name, _MOST_OF_ANY)
                _require(value <= most, problem, f"give at most {most}")
            elif kind == "float":
                _require(found in (int, float) and 0 <= value < math.inf, problem, "give a finite number >= 0")
            else:
                _require(found.__name__ == kind, problem, "give true or false" if kind == "bool" else "give text")

    def _check_derived(self) -> None:
        _require(self.head_dim > 0, f"head_dim={self.head_dim}", "give a positive number, or a larger hidden_size")
        problem = f"num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}"
        few = range(1, min(self.num_heads, 1000) + 1)
        divisors = [n for n in few if self.num_heads % n == 0]
        _require(self.num_heads % self.num_kv_heads == 0, problem, f"give num_kv_heads one of {divisors}")
        _require(self.rope_base > 0, f"rope_base={self.rope_base}", "give a number > 0")
        known = self.positions in ("rope", "learned")
        _require(known, f"positions={show_value(self.positions)}", 'give "rope" or "learned"')
        problem = f"head_dim={self.head_dim} is odd, and rotary positions turn pairs of numbers"
        fix = 'give an even head_dim or positions="learned"'
        _require(self.positions == "learned" or self.head_dim % 2 == 0, problem, fix)
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            _require(0.0 <= value < 1.0, f"{name}={value}", "give a number from 0 up to, not including, 1")
        _require(self.dtype in _DTYPES, f"dtype={show_value(self.dtype)}", f"give one of {', '.join(_DTYPES)}")

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> GPTConfig:
        """A named size of `terapipe_ds.costs.model_sizes`, some fields replaced.

        head_dim, ffn_size and num_kv_heads are the named ones only while what they follow from is not
        replaced: ``from_name("tiny", num_heads=2)`` has heads of half the hidden size.

        Raises:
            ModelSizeError: no size has that name.
        """
        size = dataclasses.asdict(model_sizes.model_size(name))
        fields = {field.name: size[field.name] for field in dataclasses.fields(cls) if field.name in size}
        follows = {
            "num_kv_heads": {"num_heads"},
            "head_dim": {"num_heads", "hidden_size"},
            "ffn_size": {"hidden_size", "gated_mlp"},
        }
        for derived, sources in follows.items():
            if sources & overrides.keys():
                fields[derived] = None
        return cls(**{**fields, **overrides})

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's object."""
        return getattr(torch, self.dtype)

    def generator(self, layer_id: int) -> torch.Generator:
        """The random numbers for the initial weights of one layer.

        They depend on (seed, layer_id) alone: a model starts from the same weights however many stages it is
        cut into, and whatever else a rank builds (``partition_method="parameters"`` builds and counts all).
        """
        return torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + layer_id)


def gpt_layers(config: GPTConfig) -> list[LayerSpec]:
    """The model as ``PipelineModule(layers=...)`` takes it: token ids [B, T] in, logits [B, T, vocab] out."""
    layers: list[LayerSpec] = []
    if config.tied_embedding:
        layers.append(TiedLayerSpec("embedding", TokenEmbedding, config))
    else:
        layers.append(LayerSpec(TokenEmbedding, config))
    if config.positions == "learned":
        layers.append(LayerSpec(PositionEmbedding, config))
    layers.extend(LayerSpec(DecoderLayer, config, index) for index in range(config.num_layers))
    layers.append(LayerSpec(FinalNorm, config))
    if config.tied_embedding:
        layers.append(TiedLayerSpec("embedding", TokenEmbedding, config, forward_fn=_tied_logits))
    else:
        layers.append(LayerSpec(LMHead, config))
    return layers


def gpt_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labels that are not ``IGNORE_INDEX``, in fp32 (fp64 where the logits are).

    Args:
        logits: [B, T, vocab_size].
        labels: [B, T] int64, already shifted: ``labels[:, t]`` is the token that follows ``inputs[:, t]``.
    """
    flat, target = logits.flatten(0, -2), labels.flatten()
    # `dtype` widens inside the kernel where the device can: the log-probabilities are the only wide tensor
    wide = torch.promote_types(flat.dtype, torch.float32)
    return F.nll_loss(F.log_softmax(flat, dim=-1, dtype=wide), target, ignore_index=IGNORE_INDEX)


class TokenEmbedding(nn.Module):
    """Token ids [B, T] int64 -> [B, T, hidden_size]. Where tied, ``weight`` is the output matrix as well."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = _normal(shape, config, config.generator(0), config.init_std)
        # with learned positions the sum of both embeddings is dropped out, by the next layer
        self.dropout = config.dropout if config.positions == "rope" else 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(F.embedding(tokens, self.weight), self.dropout, self.training)


class PositionEmbedding(nn.Module):
    """Adds learned positions to [B, T, hidden_size].

    A layer of its own: inside ``TokenEmbedding``, the last stage's tied copy would hold a table nobody reads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = (config.max_sequence_length, config.hidden_size)
        self.weight = _normal(shape, config, config.generator(config.num_layers + 2), config.init_std)
        self.dropout = config.dropout

    def forward(self, hidden: Tensor) -> Tensor:
        start = _first_position()
        stop, known = start + hidden.shape[1], self.weight.shape[0]
        problem = f"a sequence of at least {stop} tokens, with learned positions for {known}"
        _require(stop <= known, problem, f"give max_sequence_length >= {stop} or shorter sequences")
        return F.dropout(hidden + self.weight[start:stop], self.dropout, self.training)


class DecoderLayer(nn.Module):
    """One Transformer layer, [B, T, hidden_size] -> the same; ``index`` counts the decoder layers from 0."""

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
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.rope_base = config.rope_base if config.positions == "rope" else None
        self.dropout = config.attention_dropout
        width = config.num_heads * config.head_dim
        qkv_width = width + 2 * config.num_kv_heads * config.head_dim
        self.qkv = _linear(config.hidden_size, qkv_width, config, generator)
        self.out = _linear(width, config.hidden_size, config, generator, residual=True)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 H_kv, D]
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        if self.rope_base is not None:
            turns = rotary_turns(self.head_dim, self.rope_base, _first_position(), hidden)
            q, k = rotate(q, turns), rotate(k, turns)  # new tensors: only v still holds the fused output
        out = sliced_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            layer=self.index,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``, SwiGLU (Shazeer 2020, arXiv 2002.05202), or ``down(gelu(up(x)))``."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.gated = config.gated_mlp
        width = 2 * config.ffn_size if self.gated else config.ffn_size  # gate and up are one product
        self.up = _linear(config.hidden_size, width, config, generator)
        self.down = _linear(config.ffn_size, config.hidden_size, config, generator, residual=True)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        if not self.gated:
            return self.down(F.gelu(wide, approximate="tanh"))
        gate, up = wide.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FinalNorm(nn.Module):
    """The norm before the output matrix, [B, T, hidden_size] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class LMHead(nn.Module):
    """[B, T, hidden_size] -> logits [B, T, vocab_size]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        generator = config.generator(config.num_layers + 1)
        self.out = _linear(config.hidden_size, config.vocab_size, config, generator, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden)


def _tied_logits(embedding: TokenEmbedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def _first_position() -> int:
    active = active_slice()
    return 0 if active is None else active.start


def _norm(config: GPTConfig) -> nn.Module:
    kind = nn.LayerNorm if config.bias else nn.RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps, dtype=config.torch_dtype)


def _linear(
    width_in: int,
    width_out: int,
    config: GPTConfig,
    generator: torch.Generator,
    *,
    residual: bool = False,
    bias: bool | None = None,
) -> nn.Linear:
    """A linear drawn as in GPT-2: what adds to the residual stream is scaled by 1/sqrt(2 * num_layers)."""
    std = config.init_std / math.sqrt(2 * config.num_layers) if residual else config.init_std
    linear = nn.Linear(width_in, width_out, bias=False, device="meta")  # torch's own draw is not wanted
    linear.weight = _normal((width_out, width_in), config, generator, std)
    if config.bias if bias is None else bias:
        linear.bias = nn.Parameter(torch.zeros(width_out, dtype=config.torch_dtype))
    return linear


def _normal(shape: tuple[int, int], config: GPTConfig, generator: torch.Generator, std: float) -> nn.Parameter:
    device = torch.get_default_device()
    if device.type == "meta":
        return nn.Parameter(torch.empty(shape, dtype=config.torch_dtype, device=device))
    # drawn in fp32 on the CPU whatever the dtype and the device, for the same weights everywhere
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    return nn.Parameter(drawn.to(device, config.torch_dtype))


def _require(condition: bool, problem: str, fix: str) -> None:
    if not condition:
        raise GPTConfigError(f"{problem}: {fix}")


def _round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
