"""Define models that can be trained in slices: no check may refuse them."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import allow_attention_within_slice, carry
from tests.distributed.engines import LENGTH, VOCAB_SIZE, gpt_layers, micro_batch
from tests.small_models.faulty import AddAuxiliary
from tests.small_models.parts import (
    HEADS,
    WIDTH,
    Embedding,
    Head,
    Mlp,
    Residual,
    Weighted,
    cross_entropy,
    scores_of,
    seeded,
    sliced_attention,
    using,
)
from tests.small_models.tuples import Frozen
from tests.zoo.attentions import SLICED, Sliced
from tests.zoo.backwards import Experts
from tests.zoo.members import ZOO, Member, add, adding, checkpointed, stack, update

attention = adding(lambda kind: {"layers": stack(LayerSpec(kind, 0), Mlp, LayerSpec(kind, 1))})
beside = adding(lambda kind: {"layers": stack(SLICED, kind)})

# -- attention that is sliced ----------------------------------------------------------------------------------------

attention()(Sliced)


@attention()
class Alibi(Sliced):
    """Apply ALiBi by one more number in keys and queries: softmax ignores a term that is equal for all keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = self.first_position() + torch.arange(q.shape[2], dtype=q.dtype)
        slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        far = (places * q.shape[-1] ** 0.5)[:, None].expand(*k.shape[:3], 1)
        wide = torch.cat([q, slopes], -1), torch.cat([k, far], -1), F.pad(v, (0, 1))
        return sliced_attention(*wide, self.index, scale=q.shape[-1] ** -0.5)[..., :-1]


@attention()
class GatedHeads(Sliced):
    """Use one head of keys for all queries, and a gate on the output."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k[:, :1], v[:, :1], self.index) * q.sigmoid()


@attention()
class Windows(Sliced):
    """Use a window of three tokens in one layer, and of seven in the other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k[:, :1], v[:, :1], self.index, window=3 + 4 * self.index)


@attention()
class SinksAndCaps(Sliced, sinks=(HEADS, 90)):
    """Use a learned sink per head, capped scores, and values half as wide as a key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        narrow = v[..., : v.shape[-1] // 2]
        out = sliced_attention(q, k, narrow, self.index, window=9, softcap=0.5, sinks=self.sinks)
        return torch.cat((out, out), -1)


@attention()
class TwiceSliced(Sliced):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, (self.index, 1)) - sliced_attention(k, q, v, (self.index, 2))


@attention()
class GatedByAttention(Sliced):
    """Multiply queries by attention that gets no gradient."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, self.index).detach() * q


@attention()
class ParallelBlock(Sliced, mlp=Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mlp(F.layer_norm(x, (WIDTH,)))


class OwnCheckpoint(Sliced):
    """Recompute its attention by torch's own checkpointing."""

    def __init__(self, index: int, reentrant: bool) -> None:
        super().__init__(index)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class AttentionOverHeads(Sliced):
    """Let heads of one token attend to each other: their number may or may not equal the tokens of a slice."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with allow_attention_within_slice():
            mixed = F.scaled_dot_product_attention(*[each.transpose(1, 2) for each in (q, k, v)])
        return super().attend(mixed.transpose(1, 2), k, v)


REACHES = stack(LayerSpec(SinksAndCaps, 0), LayerSpec(Windows, 1))
add("ReachesRecomputed", REACHES, engine=checkpointed(SinksAndCaps, Windows))
for schedule in ("seq1f1b-zb", "zbv", "chimera-seq"):
    add(f"Reaches {schedule}", REACHES, terapipe={"schedule": schedule})
add("Checkpointed", stack(SLICED, LayerSpec(Sliced, 1)), engine=checkpointed(Sliced, Mlp))
add("WholeDecoder", gpt_layers(bias=True))
add("OwnCheckpoint", stack(LayerSpec(OwnCheckpoint, 0, False), LayerSpec(OwnCheckpoint, 1, False)))
add("OwnReentrantCheckpoint", stack(LayerSpec(OwnCheckpoint, 0, True), LayerSpec(OwnCheckpoint, 1, True)))
add("AttentionOverHeads", stack(AttentionOverHeads))
add("AttentionOverHeadsRecomputed", stack(AttentionOverHeads), engine=checkpointed(AttentionOverHeads))

# -- each token for itself, whichever sizes are equal -------------------------------------------------------------

beside()(Experts=Experts, Identity=nn.Identity)


@beside()
class AddedByTokens(Experts):
    """Add a z-loss in the backward: a sum over tokens, divided by the tokens of whole sequences."""

    def forward(self, x: Tensor) -> Tensor:
        z = (x @ self.router).logsumexp(-1).square().sum() / (2 * LENGTH)
        return AddAuxiliary.apply(super().forward(x), z)


@beside()
class GatedMlp(
    Weighted,
    norm=lambda: nn.LayerNorm(WIDTH),
    gate_proj=lambda: nn.Linear(WIDTH, 20, bias=False),
    up_proj=lambda: nn.Linear(WIDTH, 20, bias=False),
    down_proj=lambda: nn.Linear(20, WIDTH),
):
    """Apply SwiGLU after a norm over features."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


@beside()
class InPlace(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y += 0.5
        y[:, -1:] *= 1.0
        return self.down(y.tanh_())


class BiasesInPlace(Weighted, up=lambda: nn.Linear(WIDTH, 20), down=lambda: nn.Linear(20, WIDTH)):
    """Use biased linear layers, and in-place operations on their outputs and on the input of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu_(self.up(x.mul_(1.25))))
        y += x
        return F.dropout(y, 0.0, self.training, inplace=True)


class RowsInPlace(BiasesInPlace):
    """Do the same on [tokens, features], by functions."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(0, 1), self.up.weight, self.up.bias).clamp_(min=0.0)
        y = torch.addmm(self.down.bias, y, self.down.weight.T)
        y += self.down(F.silu(self.up(x.flatten(0, 1)), inplace=True))
        return y.unflatten(0, x.shape[:2]).add_(x)


class StateInPlace(Weighted, inner=lambda: nn.Linear(WIDTH, WIDTH)):
    """Add to the input in place in each slice but the first, and in all slices to the output of `carry.write`."""

    def forward(self, x: Tensor) -> Tensor:
        state, before = carry.read("in place", "sum"), x.clone()
        if state is not None:
            x[:, 0] += state
        y = x.cumsum(1)
        y = carry.write("in place", "sum", y[:, -1], self.inner(y))
        y += before
        return y


beside()(BiasesInPlace=BiasesInPlace, RowsInPlace=RowsInPlace)
add("BiasesInPlaceRecomputed", stack(BiasesInPlace, RowsInPlace), engine=checkpointed(RowsInPlace))
for schedule in ("seq1f1b-zb", "zbv", "chimera-seq"):
    kinds = BiasesInPlace, RowsInPlace, BiasesInPlace
    add(f"BiasesInPlace {schedule}", stack(*kinds), terapipe={"schedule": schedule})
add("BiasesInPlaceOffloaded", stack(BiasesInPlace, RowsInPlace), terapipe={"offload_activations": True})
add("StateInPlace", [Embedding, Mlp, StateInPlace, Head])


SIDE = using(lambda it, x: (x, it.side.expand(1)), side=(1, 60))
"""x -> (x, one number); the number's gradient is a sum over all tokens that nearly cancels out."""


def scaled_by_side(it: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    x, side = inputs
    return it.inner(torch.tanh_(x * (1 + side) + x * (1 - 0.99 * side)))


add(
    "SideGradientCancelsInBf16",
    [Embedding, SIDE, using(scaled_by_side, inner=lambda: nn.Linear(WIDTH, WIDTH)), Head],
    engine={"bf16": {"enabled": True}},
    limit=0.5,  # the rest of the cancelling gradient is mostly rounding
)


beside()(
    # Convolutions of width one are linear layers.
    NarrowConvolution=using(
        lambda it, x: x + it.inner(x.transpose(1, 2)).transpose(1, 2), inner=lambda: nn.Conv1d(WIDTH, WIDTH, 1)
    ),
    # Six features, as many as a slice has tokens.
    WideAsSlices=using(
        lambda it, x: x + (x @ it.down - (x @ it.down).mean(-1, keepdim=True)).softmax(-1) @ it.up,
        down=(WIDTH, 6, 113),
        up=(6, WIDTH, 114),
    ),
    # Attention of each token to learned slots: a softmax over keys that are no tokens.
    LearnedSlots=using(lambda it, x: x + scores_of(x, it.slots).softmax(-1) @ it.slots, slots=(6, WIDTH, 124)),
    # The same weights for two layers, as ALBERT has them.
    UsedTwice=using(lambda it, x: it.mlp(it.mlp(x)), mlp=Mlp),
    NormedWeights=using(lambda it, x: x + it.inner(x), inner=lambda: weight_norm(seeded(nn.Linear(WIDTH, WIDTH)))),
)


@beside()
class FeatureConvolution(Weighted, inner=lambda: nn.Conv1d(1, 1, 3, padding=1)):
    """Apply a convolution over features, and declare that it does not mix tokens."""

    slice_safe = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.flatten(0, 1).unsqueeze(1)).view_as(x)


@update()
def own_norms(x: Tensor) -> Tensor:
    """Normalise over groups of features, one token after the other."""
    grouped = F.group_norm(x.flatten(0, 1), 3).view_as(x)
    return F.normalize(grouped - x.mean(-1, keepdim=True), dim=-1)


@update()
def over_features(x: Tensor) -> Tensor:
    """Mix features but no tokens: running sums, shifts, choices, transforms."""
    chosen = torch.zeros_like(x).scatter(-1, x.topk(3, -1).indices, 1.0)
    return x.cumsum(-1) + x.roll(1, -1) * x.softmax(-1) + chosen + torch.fft.fft(x, dim=-1).real + x.sort(-1).values


# As many features as a sequence has tokens.
add(
    "AsWideAsLong",
    stack(
        using(lambda it, x: x @ it.up, up=(WIDTH, LENGTH, 117)),
        using(lambda it, x: (x / x.norm(dim=-1, keepdim=True)) @ it.down, down=(LENGTH, WIDTH, 118)),
        using(lambda it, x: x + (x @ it.up).tanh() @ it.down, up=(WIDTH, LENGTH, 115), down=(LENGTH, WIDTH, 116)),
    ),
)
for name, rows in (("AsManyRowsAsTokens", LENGTH), ("AsManyRowsAsASlice", 6), ("OneRow", 1)):
    add(
        name,
        stack(SLICED),
        data=lambda seed, rows=rows: micro_batch(seed, rows=rows),
        engine={"train_micro_batch_size_per_gpu": rows},
    )
add("Dropped", stack(LayerSpec(Residual, nn.Dropout(0.0)), SLICED))


@beside()
class NoisyExperts(Experts):
    """Use a noisy router and noisy outputs, each token for itself."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.empty_like(x).uniform_(-1.0, 1.0)
        return F.dropout(super().forward(x) + 1e-13 * noise, 1e-13, self.training)


@beside()
class CountedTokens(Mlp):
    """Count tokens: slices together have as many as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[1]
        return super().forward(x)


@beside()
class SeededProjection(Mlp):
    """Draw from a seed of its own, and put torch's back: each call draws the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            projection = torch.randn(WIDTH, WIDTH, dtype=x.dtype)
        return super().forward(x + (x @ projection).tanh())


class AttentionInBlocks(Sliced):
    """Attend on purpose only among four neighbouring tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = [each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (q, k, v)]
        with allow_attention_within_slice():
            return F.scaled_dot_product_attention(*blocks).transpose(1, 2).flatten(2, 3)


whole_blocks = adding(lambda kind: {"layers": stack(kind, LayerSpec(Sliced, 1))})
whole_blocks(data=lambda seed: micro_batch(seed, length=24), terapipe={"granularity_tokens": 4})(
    # Four neighbouring tokens are mixed; slices hold whole blocks.
    BlocksOfFour=using(lambda it, x: x + (it.inner @ x.unflatten(1, (-1, 4))).flatten(1, 2), inner=(4, 4, 125)),
    AttentionInBlocks=AttentionInBlocks,
)

# -- other things than tensors between layers of one stage, and layers that are not in Python ---


class Both(NamedTuple):
    x: Tensor
    y: Tensor


# Within a range that is recomputed layers get what the layer before returns.
IN_ONE_RANGE: dict[str, Any] = {"pipeline": {"activation_checkpoint_interval": 3, "use_reentrant": False}}
add("OneInARange", [Embedding, lambda x: (x,), lambda one: one[0], Mlp, Mlp, Head], engine=IN_ONE_RANGE)
add(
    "NamedInARange",
    [Embedding, lambda x: Both(x, 2 * x), lambda both: both.x + both.y, Mlp, Mlp, Head],
    engine=IN_ONE_RANGE,
)


class OneHead(Head):
    """Return a tuple of one element, in the last range of a stage, which is a shorter one."""

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),)


add("OneAtTheEnd", [Embedding, *6 * [Mlp], OneHead], engine=IN_ONE_RANGE)


class Mapped(Mlp):
    """Return a dict and nothing else, which the next layer takes."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": super().forward(x)}, None


class Scripted(nn.Module):
    """Run an MLP that torch has compiled to TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(Mlp())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


beside()(Scripted=Scripted)


def gelu_by_hand(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1 + 0.045 * x * x)))


# a function that a program's own torch.compile runs, as megatron-core's fused activations
compiled_gelu = torch.compile(gelu_by_hand, backend="eager", fullgraph=True)
beside()(
    Compiled=using(lambda it, x: x + it.inner(compiled_gelu(x)), inner=lambda: nn.Linear(WIDTH, WIDTH)),
)
add(
    "NamedTupleAndLists",
    [
        Embedding,
        lambda x: Both(x, x.tanh()),
        lambda both: [both.x, both.y],
        lambda both: sum(both.copy()),
        SLICED,
        Mlp,
        Mlp,
        using(lambda it, x: {"both": Both(x @ it.outer, x), "none": None}, outer=(WIDTH, VOCAB_SIZE, 2)),
    ],
    loss_fn=lambda held, labels: cross_entropy(held["both"].x, labels),
)
add("DictOnTheWay", [Embedding, Mapped, using(lambda it, both: both[0]["hidden"].tanh()), SLICED, Mlp, Head])

# -- shared, frozen and otherwise treated weights --------------------------------------------------------------------


class SparseEmbedding(nn.Module):
    """Have a sparse gradient of the weight."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.bag = bag
        kind = (
            nn.EmbeddingBag(VOCAB_SIZE, WIDTH, mode="sum", sparse=True)
            if bag
            else nn.Embedding(VOCAB_SIZE, WIDTH, sparse=True)
        )
        self.words = seeded(kind)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens.reshape(-1, 1)).view(*tokens.shape, -1) if self.bag else self.words(tokens)


@beside()
class MaskedWeights(Mlp):
    """Keep some weights unchanged by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda grad: grad * (torch.arange(WIDTH) % 2))


@beside()
class ScaledGradient(Mlp):
    """Halve the gradient of each token."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


TIED = TiedLayerSpec("words", Embedding), TiedLayerSpec("words", Embedding, forward_fn=lambda e, x: x @ e.weight.T)
add("TiedEmbedding", [TIED[0], SLICED, Mlp, TIED[1]])
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
for bag in (False, True):
    add(f"Sparse{'Bag' * bag or 'Embedding'}", [LayerSpec(SparseEmbedding, bag), *stack(SLICED)[1:]], engine=SGD)
add("FrozenEmbedding", [LayerSpec(Frozen, LayerSpec(Embedding)), *stack(SLICED)[1:]])
# The embedding limits the length of words when it reads them (max_norm).
normed = using(
    lambda it, tokens: it.words(tokens), words=lambda: nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0, max_norm=1.2)
)
add("NormedEmbedding", [normed, *stack(SLICED)[1:]])
ZOO["PlainFunctions"] = Member(
    "PlainFunctions", [LayerSpec(Embedding), F.softplus, SLICED, torch.tanh, LayerSpec(Head)]
)

# -- layouts that change on the way ----------------------------------------------------------------------------------


class FlatHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(0, (2, -1))


class TwoStreams(nn.Module):
    """Run reversible layers: each stream adds to the other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = Sliced(index), Mlp()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = inputs
        a = a + self.attention(b)
        return a, b + self.mlp(a)


def channels_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def tokens_first(x: Tensor) -> Tensor:
    """Transpose to [T, B, C], as Megatron has it."""
    return x.transpose(0, 1).contiguous()


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)


add("NestedOnTheWay", [Embedding, nested, lambda x: torch.stack(x.unbind(0)).tanh(), SLICED, Mlp, Head])
add("SparseOnTheWay", [Embedding, lambda x: x.to_sparse(2), lambda x: x.to_dense(), SLICED, Mlp, Head])
add("ComplexOnTheWay", [Embedding, lambda x: torch.complex(x, x.tanh()), lambda x: x.real * x.imag, SLICED, Mlp, Head])
streams = LayerSpec(TwoStreams, 0), LayerSpec(TwoStreams, 1)
over_channels = using(lambda it, x: it.mlp(x.transpose(1, 2)).transpose(1, 2), mlp=Mlp)
add("ChannelsFirst", [Embedding, SLICED, channels_first, over_channels, channels_first, Head])
add("TokensFirst", [Embedding, SLICED, tokens_first, Mlp, tokens_first, Head])
add("FlatRows", [Embedding, SLICED, lambda x: x.flatten(0, 1), Mlp, FlatHead])
add("ReversibleStreams", [Embedding, lambda x: (x, x.tanh()), *streams, lambda both: both[0] - both[1], Head])
