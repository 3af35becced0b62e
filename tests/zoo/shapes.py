"""Masks, pooled states, flat rows and other shapes; layers that hand tuples on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import LENGTH, MicroBatch, micro_batch
from tests.zoo.layers import LONG, WIDTH, Attention, Calls, Embedding, Head, Mlp, Weighted, fixed, later, scores_of
from tests.zoo.members import EARLY, ONE_VALUE, add


class FirstOf(nn.Module):
    """A layer for the first of a tuple; the others go on."""

    def __init__(self, inner: LayerSpec) -> None:
        super().__init__()
        self.inner = inner.build()

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.inner(inputs[0]), *inputs[1:]


class OnlyFirstOf(FirstOf):
    """The others end here."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return super().forward(inputs)[0]


def tuples(*layers: LayerSpec) -> list[LayerSpec]:
    return [LayerSpec(FirstOf, LayerSpec(Embedding)), *layers, LayerSpec(OnlyFirstOf, LayerSpec(Head))]


def reading(kind: type[nn.Module], after: LayerSpec | None = None) -> list[LayerSpec]:
    """A layer that reads the further inputs and hands its own output on alone."""
    return [LayerSpec(FirstOf, LayerSpec(Embedding)), LayerSpec(kind), after or LayerSpec(Mlp), LayerSpec(Head)]


def with_input(seed: int, extra: Tensor) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return (tokens, extra), labels


class MaskedAttention(Attention):
    """(x, mask): attention by hand with a mask that comes with the batch."""

    def __init__(self) -> None:
        super().__init__(self.with_mask)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.mask = inputs[1]
        return super().forward(inputs[0]), *inputs[1:]

    def with_mask(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask if self.mask.dim() == 4 else self.mask[:, None]
        return scores_of(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def square_mask(seed: int) -> MicroBatch:
    return with_input(seed, later(LENGTH).expand(2, -1, -1).clone())


def square_mask_of_heads(seed: int) -> MicroBatch:
    return with_input(seed, later(LENGTH).expand(2, 1, -1, -1).clone())


MASKED = [LayerSpec(MaskedAttention), LayerSpec(FirstOf, LayerSpec(Mlp))]
add(
    "MaskOfTokensByTokens",
    lambda: tuples(*MASKED),
    ("input 1", "two dimensions"),
    data=square_mask,
    error="BatchError",
    stops=True,
)
add(
    "MaskOfHeads",
    lambda: tuples(*MASKED),
    ("input 1", "two dimensions"),
    data=square_mask_of_heads,
    error="BatchError",
    stops=True,
)


class PerSequence(Weighted, inner=(WIDTH, 90)):
    """(x, table): every token reads the whole table [B, L], which has the length of the labels by chance."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, table = inputs
        return x + table.square().mean(1)[:, None, None] * self.inner


def table(seed: int) -> MicroBatch:
    return with_input(seed, fixed(2, LENGTH, seed=seed, std=1.0))


add("TableAsLongAsTheText", lambda: reading(PerSequence), ("input 1", "sliced_inputs"), data=table, error="BatchError")


def memory_of_the_length(seed: int) -> MicroBatch:
    return with_input(seed, fixed(2, LENGTH, WIDTH, seed=seed, std=1.0))


class ReadsMemory(nn.Module):
    """(x, memory): attention to another text, which is as long by chance."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, memory = inputs
        return x + scores_of(x, memory).softmax(-1) @ memory


add("MemoryAsLongAsTheText", lambda: reading(ReadsMemory), EARLY, data=memory_of_the_length)


# -- pooled states ---------------------------------------------------------------------------------------------------


class UsesState(Weighted, inner=(WIDTH, WIDTH, 91)):
    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] + (inputs[1] @ self.inner)[:, None]


def pooled(pool: Callable[[Tensor], Tensor]) -> list[LayerSpec]:
    """x -> (x, what the function makes of all tokens) -> x."""
    return [LayerSpec(Embedding), LayerSpec(Calls, lambda x: (x, pool(x))), LayerSpec(UsesState), LayerSpec(Head)]


add("PooledState", lambda: pooled(lambda x: x.mean(1)), ONE_VALUE)
add("LastTokenPooled", lambda: pooled(lambda x: x[:, -1].clone()), ONE_VALUE)


class Distances(nn.Module):
    """x -> (x, the products of all tokens with all)."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x @ x.mT


class UsesDistances(nn.Module):
    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, products = inputs
        return x + products.masked_fill(later(x.shape[1]), float("-inf")).softmax(-1) @ x


add(
    "ProductsHandedOn",
    lambda: [LayerSpec(Embedding), LayerSpec(Distances), LayerSpec(UsesDistances), LayerSpec(Head)],
    "layer 1 (Distances)",
)


class Classifier(Head):
    """The logits of the last token, for every token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1:].expand(-1, x.shape[1], -1)


add(
    "LastTokenClassifies",
    lambda: [*[LayerSpec(Embedding), LayerSpec(Mlp), LayerSpec(Mlp)], LayerSpec(Classifier)],
    ("layer 3 (Classifier)", EARLY),
)


def class_labels(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return tokens, labels[:, -1].clone()


class OneClass(Head):
    """One class for a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1])


add(
    "OneLabelPerSequence",
    lambda: [LayerSpec(Embedding), LayerSpec(Mlp), LayerSpec(Mlp), LayerSpec(OneClass)],
    ("no label tensor has dimension 1",),
    data=class_labels,
    error="BatchError",
    stops=True,
)


# -- rows and tokens in one dimension --------------------------------------------------------------------------------


class FlatRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class FlatShift(Weighted, inner=(WIDTH, WIDTH, 92)):
    """[B * T, C]: each token and the one before it, also across rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, -1)) @ self.inner


add(
    "FlatRowsShifted",
    lambda: [
        *[LayerSpec(Embedding), LayerSpec(Calls, lambda x: x.flatten(0, 1)), LayerSpec(FlatShift)],
        LayerSpec(Head),
    ],
    "layer 2 (FlatShift)",
)


class Pairs(Weighted, inner=(2 * WIDTH, 2 * WIDTH, 93)):
    """Two tokens become one of double width, and are taken apart again."""

    def forward(self, x: Tensor) -> Tensor:
        odd = x.shape[1] % 2
        wide = F.pad(x, (0, 0, odd, 0)).unflatten(1, (-1, 2)).flatten(2) @ self.inner
        return x + wide.unflatten(2, (2, -1)).flatten(1, 2)[:, odd:]


add("PairsOfTokens", lambda: [LayerSpec(Embedding), LayerSpec(Pairs), LayerSpec(Mlp), LayerSpec(Head)], EARLY)


def positions_of_rows(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH))


class FirstDimension(Weighted, table=(LONG, WIDTH, 94)):
    """(x, ids [L]): positions without rows, which are not cut."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, ids = inputs
        return x + self.table[ids[: x.shape[1]]], ids


add(
    "PositionIdsWithoutRows",
    lambda: tuples(LayerSpec(FirstDimension), LayerSpec(FirstOf, LayerSpec(Mlp))),
    "layer 1 (FirstDimension)",
    data=positions_of_rows,
)
