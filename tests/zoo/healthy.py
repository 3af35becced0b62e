"""Models that can be trained in slices: nobody may refuse them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import active_slice, allow_attention_within_slice
from tests.distributed.engines import IGNORE_INDEX, LENGTH, VOCAB_SIZE, MicroBatch, gpt_layers, micro_batch
from tests.zoo.layers import (
    HEADS,
    LONG,
    WIDTH,
    Attention,
    Embedding,
    Head,
    Mlp,
    Residual,
    cross_entropy,
    fixed,
    scores_of,
    seeded,
    sliced_attention,
    weight,
)
from tests.zoo.losses import each, labels_as_input, mean_valid, soft_targets, valid, weighted_tokens, with_own_loss
from tests.zoo.members import add, checkpointed, layer, loss, stack, updates
from tests.zoo.positions import turned
from tests.zoo.routers import Experts
from tests.zoo.shapes import ReadsMemory, reading, tuples, with_input


def first_position() -> int:
    active = active_slice()
    return 0 if active is None else active.start


# -- attention that is sliced ----------------------------------------------------------------------------------------


class Sliced(Attention):
    """Sliced attention, with positions that begin where the slice does."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(self.sliced)
        self.index = index

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = first_position() + torch.arange(q.shape[2])
        return sliced_attention(turned(q, positions), turned(k, positions), v, self.index)


class Alibi(Sliced):
    """ALiBi by one more number in keys and queries: softmax does not see what is the same for all keys."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = first_position() + torch.arange(q.shape[2], dtype=q.dtype)
        slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        far = (places * q.shape[-1] ** 0.5)[:, None].expand(*k.shape[:3], 1)
        wide = torch.cat([q, slopes], -1), torch.cat([k, far], -1), F.pad(v, (0, 1))
        return sliced_attention(*wide, self.index, scale=q.shape[-1] ** -0.5)[..., :-1]


class NormedQueries(Sliced):
    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1) * 3, v, self.index, scale=1.0)


class GatedHeads(Sliced):
    """One head of keys for all queries, and a gate on what comes out."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k[:, :1], v[:, :1], self.index) * q.sigmoid()


class TwiceSliced(Sliced):
    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, (self.index, 1)) - sliced_attention(k, q, v, (self.index, 2))


class ParallelBlock(Sliced):
    """Parallel attention and feed-forward."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mlp(F.layer_norm(x, (WIDTH,)))


for kind in (Sliced, Alibi, NormedQueries, GatedHeads, TwiceSliced):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(kind, 0), LayerSpec(Mlp), LayerSpec(kind, 1)), ())
add("ParallelBlocks", lambda: stack(LayerSpec(ParallelBlock, 0), LayerSpec(ParallelBlock, 1)), ())
add("Checkpointed", lambda: stack(LayerSpec(Sliced, 0), LayerSpec(Sliced, 1)), (), engine=checkpointed(Sliced, Mlp))
add("WholeDecoder", gpt_layers, ())
add("TiedDecoder", lambda: gpt_layers(tied_embedding=True), ())


# -- each token for itself -------------------------------------------------------------------------------------------


class GatedMlp(nn.Module):
    """SwiGLU after a norm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = seeded(nn.LayerNorm(WIDTH))
        self.gate_proj, self.up_proj = (seeded(nn.Linear(WIDTH, 20, bias=False), seed) for seed in (110, 111))
        self.down_proj = seeded(nn.Linear(20, WIDTH), 112)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class RootMeanSquare(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class InPlace(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.up
        y += 0.5
        y[:, -1:] *= 1.0
        return y.tanh_() @ self.down


class NarrowConvolution(nn.Module):
    """Convolutions of width one are linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(nn.Conv1d(WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class WideAsSlices(nn.Module):
    """Six features, as many as a slice has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = weight(WIDTH, 6, seed=113), weight(6, WIDTH, seed=114)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.down
        return x + (y - y.mean(-1, keepdim=True)).softmax(-1) @ self.up


for kind in (GatedMlp, RootMeanSquare, InPlace, NarrowConvolution, WideAsSlices, Experts):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(Sliced, 0), LayerSpec(kind)), ())


@updates()
def own_norms(x: Tensor) -> Tensor:
    """Over groups of features, one token after the other."""
    grouped = F.group_norm(x.flatten(0, 1), 3).view_as(x)
    return F.normalize(grouped - x.mean(-1, keepdim=True), dim=-1)


@updates()
def over_features(x: Tensor) -> Tensor:
    """What mixes features and no tokens: running sums, shifts, choices, transforms."""
    chosen = torch.zeros_like(x).scatter(-1, x.topk(3, -1).indices, 1.0)
    return x.cumsum(-1) + x.roll(1, -1) * x.softmax(-1) + chosen + torch.fft.fft(x, dim=-1).real + x.sort(-1).values


class WidthOfTheText(nn.Module):
    """As many features as a sequence has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight(WIDTH, LENGTH, seed=115), weight(LENGTH, WIDTH, seed=116)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up).tanh() @ self.down


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = weight(WIDTH, LENGTH, seed=117)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up


class Narrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = weight(LENGTH, WIDTH, seed=118)

    def forward(self, x: Tensor) -> Tensor:
        return (x / x.norm(dim=-1, keepdim=True)) @ self.down


add("AsWideAsLong", lambda: stack(LayerSpec(Widened), LayerSpec(Narrowed), LayerSpec(WidthOfTheText)), ())
add(
    "AsManyRowsAsTokens", lambda: stack(LayerSpec(Sliced, 0)), (),
    data=lambda seed: micro_batch(seed, rows=LENGTH), engine={"train_micro_batch_size_per_gpu": LENGTH},
)  # fmt: skip
add(
    "AsManyRowsAsASlice", lambda: stack(LayerSpec(Sliced, 0)), (),
    data=lambda seed: micro_batch(seed, rows=6), engine={"train_micro_batch_size_per_gpu": 6},
)  # fmt: skip
add(
    "OneRow", lambda: stack(LayerSpec(Sliced, 0)), (),
    data=lambda seed: micro_batch(seed, rows=1), engine={"train_micro_batch_size_per_gpu": 1},
)  # fmt: skip
add("Dropped", lambda: stack(LayerSpec(Residual, nn.Dropout(0.0)), LayerSpec(Sliced, 0)), ())


# -- layouts that change on the way ----------------------------------------------------------------------------------


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()


class ChannelMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class TokensFirst(ChannelsFirst):
    """[B, T, C] -> [T, B, C], as Megatron has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


class FlatRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class FlatHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(0, (2, -1))


def between(*kinds: type[nn.Module]) -> Any:
    return lambda: [LayerSpec(Embedding), LayerSpec(Sliced, 0), *map(LayerSpec, kinds)]


add("ChannelsFirst", between(ChannelsFirst, ChannelMlp, ChannelsFirst, Head), ())
add("TokensFirst", between(TokensFirst, Mlp, TokensFirst, Head), ())
add("FlatRows", between(FlatRows, Mlp, FlatHead), ())


class Streams(nn.Module):
    """x -> (x, a second stream)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class TwoStreams(nn.Module):
    """Reversible layers: each stream adds to the other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = Sliced(index), Mlp()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = inputs
        a = a + self.attention(b)
        return a, b + self.mlp(a)


class Joined(Head):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(inputs[0] - inputs[1])


def reversible() -> list[LayerSpec]:
    return [LayerSpec(Embedding), LayerSpec(Streams), LayerSpec(TwoStreams, 0), LayerSpec(TwoStreams, 1),
            LayerSpec(Joined)]  # fmt: skip


add("ReversibleStreams", reversible, ())


# -- further inputs --------------------------------------------------------------------------------------------------


def memory(seed: int) -> MicroBatch:
    return with_input(seed, fixed(2, 7, WIDTH, seed=seed, std=1.0))


class FusedMemory(nn.Module):
    """Attention to another text, by torch's own function: there is nothing of it in the slices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight(WIDTH, WIDTH, seed=120)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, other = inputs
        q, k = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (x @ self.inner, other))
        return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class PositionIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = weight(LONG, WIDTH, seed=121)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] + self.table[inputs[1]]


class Weighed(nn.Module):
    """(x, a number or a mask for each token)."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * inputs[1][..., None]


class Conditioned(nn.Module):
    """(x, one vector for each row)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight(WIDTH, WIDTH, seed=122)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * (1 + inputs[1] @ self.inner)


def with_sliced(kind: type[nn.Module]) -> Any:
    return lambda: reading(kind, LayerSpec(Sliced, 0))


def position_ids(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH).flip(0).expand(2, -1).clone())


def padding(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH) < torch.tensor([[19], [23]]))


add("MemoryByHand", with_sliced(ReadsMemory), (), data=memory)
add("MemoryByTorch", with_sliced(FusedMemory), (), data=memory)
add("PositionIds", with_sliced(PositionIds), (), data=position_ids)
class Guided(nn.Module):
    """(x, position ids) -> the same: every layer adds its own positions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.positions, self.attention = PositionIds(), Sliced(index)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.attention(self.positions(inputs)), inputs[1]


add("PositionIdsForEveryLayer", lambda: tuples(LayerSpec(Guided, 0), LayerSpec(Guided, 1)), (), data=position_ids)
add("PaddingMask", with_sliced(Weighed), (), data=padding)
add("ConditionOfEachRow", with_sliced(Conditioned), (), data=lambda s: with_input(s, fixed(2, 1, WIDTH, seed=s)))
add(
    "NumberOfEachToken", with_sliced(Weighed), (), data=lambda s: with_input(s, fixed(2, LENGTH, seed=s)),
    terapipe={"sliced_inputs": [0, 1]},
)  # fmt: skip


class Projection(nn.Module):
    """Of continuous inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight(7, WIDTH, seed=123)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner


def features(seed: int) -> MicroBatch:
    return fixed(2, LENGTH, 7, seed=seed, std=1.0), micro_batch(seed)[1]


add(
    "ContinuousInputs",
    lambda: [LayerSpec(Projection), LayerSpec(Sliced, 0), LayerSpec(Mlp), LayerSpec(Head)], (), data=features,
)  # fmt: skip


# -- shared and frozen weights ---------------------------------------------------------------------------------------


def logits_of(tied: Embedding, x: Tensor) -> Tensor:
    return x @ tied.weight.T


def tied_layers() -> list[Any]:
    return [TiedLayerSpec("words", Embedding), LayerSpec(Sliced, 0), LayerSpec(Mlp),
            TiedLayerSpec("words", Embedding, forward_fn=logits_of)]  # fmt: skip


class FrozenEmbedding(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class UsedTwice(Mlp):
    """The same weights for two layers, as ALBERT has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


add("TiedEmbedding", tied_layers, ())
add("FrozenEmbedding", lambda: [LayerSpec(FrozenEmbedding), *stack(LayerSpec(Sliced, 0))[1:]], ())
add("UsedTwice", lambda: stack(LayerSpec(Sliced, 0), LayerSpec(UsedTwice)), ())


def activation(x: Tensor) -> Tensor:
    """A layer that is a plain function."""
    return F.softplus(x)


add("PlainFunctions", lambda: [LayerSpec(Embedding), activation, LayerSpec(Sliced, 0), torch.tanh, LayerSpec(Head)], ())


# -- losses ----------------------------------------------------------------------------------------------------------


@loss(terapipe={"loss_reduction": "sum"})
def declared_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).sum()


@loss(terapipe={"loss_reduction": "sum"})
def declared_sum_by_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).sum() / len(labels)


@loss(terapipe={"loss_reduction": "mean"})
def declared_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).mean()


def masked_by_three(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return tokens, labels.masked_fill(labels == IGNORE_INDEX, 3)


@loss(data=masked_by_three, terapipe={"ignore_index": 3})
def declared_ignore_index(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


@loss()
def label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=0.1)


@loss()
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = each(logits, labels)
    return ((1 - (-losses).exp()).square() * losses).sum() / valid(labels).sum()


@loss()
def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.logsumexp(-1).square() * valid(labels)
    return mean_valid(logits, labels) + 0.01 * z.sum() / valid(labels).sum()


def targets(seed: int) -> MicroBatch:
    return micro_batch(seed)[0], fixed(2, LENGTH, seed=seed, std=1.0)


@loss(data=targets)
def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits[..., 0], labels)


class MaskedLoss:
    """A mean with the weights of a mask, which it says."""

    __name__ = "MaskedLoss"

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        return (each(logits, labels[0]) * labels[1]).sum() / labels[1].sum()

    def slice_weight(self, labels: tuple[Tensor, Tensor]) -> float:
        return float(labels[1].sum())


class ClassWeights:
    """A mean with a weight for each class."""

    __name__ = "ClassWeights"
    weights = torch.linspace(0.1, 2.0, VOCAB_SIZE, dtype=torch.float64)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(*flat, weight=self.weights, ignore_index=IGNORE_INDEX)

    def slice_weight(self, labels: Tensor) -> float:
        return float(self.weights[labels[labels != IGNORE_INDEX]].sum())


@loss(data=weighted_tokens, terapipe={"loss_reduction": "sum"})
def declared_sum_of_a_tuple(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    return (each(logits, labels[0]) * labels[1]).sum()


add("MaskedLoss", stack, (), loss_fn=MaskedLoss(), data=weighted_tokens)
add("ClassWeights", stack, (), loss_fn=ClassWeights())


def prompts_are_masked(seed: int) -> MicroBatch:
    """The first slices have no label at all."""
    tokens, labels = micro_batch(seed)
    labels[:, :9] = IGNORE_INDEX
    return tokens, labels


add("PromptsAreMasked", lambda: stack(LayerSpec(Sliced, 0)), (), data=prompts_are_masked)


@loss(data=soft_targets)
def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


add("OwnLoss", lambda: with_own_loss(cross_entropy, LayerSpec(Sliced, 0)), (), loss_fn=None, data=labels_as_input)


@layer()
class LearnedSlots(nn.Module):
    """Attention of each token to learned slots: a softmax over keys that are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = weight(6, WIDTH, seed=124)

    def forward(self, x: Tensor) -> Tensor:
        return x + scores_of(x, self.slots).softmax(-1) @ self.slots


# -- what else a layer may do ----------------------------------------------------------------------------------------


class NormedEmbedding(nn.Module):
    """Words are brought to a length when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = seeded(nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0, max_norm=1.2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


class OwnCheckpoint(Sliced):
    """Recomputes its attention by torch's own checkpointing."""

    def __init__(self, index: int, reentrant: bool) -> None:
        super().__init__(index)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class NormedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(seeded(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class MaskedWeights(Mlp):
    """A hook keeps some weights as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_hook(lambda grad: grad * (torch.arange(2 * WIDTH) % 2))


class ScaledGradient(Mlp):
    """The gradient of each token is halved."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


class BlocksOfFour(nn.Module):
    """Four tokens that stand together are mixed; slices hold whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight(4, 4, seed=125)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner @ x.unflatten(1, (-1, 4))).flatten(1, 2)


class AttentionInBlocks(Sliced):
    """Attention among four tokens that stand together, which is meant so."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = [each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (q, k, v)]
        with allow_attention_within_slice():
            return F.scaled_dot_product_attention(*blocks).transpose(1, 2).flatten(2, 3)


class AttentionOverHeads(Sliced):
    """Heads of one token attend to each other: there are as many as slices have tokens, or not."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with allow_attention_within_slice():
            mixed = F.scaled_dot_product_attention(*[each.transpose(1, 2) for each in (q, k, v)])
        return super().sliced(mixed.transpose(1, 2), k, v)


add("NormedEmbedding", lambda: [LayerSpec(NormedEmbedding), *stack(LayerSpec(Sliced, 0))[1:]], ())
add("OwnCheckpoint", lambda: stack(LayerSpec(OwnCheckpoint, 0, False), LayerSpec(OwnCheckpoint, 1, False)), ())
add("OwnReentrantCheckpoint", lambda: stack(LayerSpec(OwnCheckpoint, 0, True), LayerSpec(OwnCheckpoint, 1, True)), ())
for kind in (NormedWeights, MaskedWeights, ScaledGradient, nn.Identity):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(Sliced, 0), LayerSpec(kind)), ())
add("AttentionOverHeads", lambda: stack(LayerSpec(AttentionOverHeads, 0)), ())
for kind in (BlocksOfFour, AttentionInBlocks):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(kind), LayerSpec(Sliced, 1)), (),
        data=lambda seed: micro_batch(seed, length=24), terapipe={"granularity_tokens": 4})  # fmt: skip
add("PositionIdsOfOneRow", with_sliced(PositionIds), (), data=lambda seed: with_input(seed, torch.arange(LENGTH)[None]))
