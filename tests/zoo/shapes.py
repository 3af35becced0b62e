"""Define masks, pooled states, flat rows and other shapes, and layers that hand tuples on."""

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import LENGTH, MicroBatch, micro_batch
from tests.small_models.parts import (
    LONG,
    WIDTH,
    Attention,
    Embedding,
    Head,
    Mlp,
    Weighted,
    fixed,
    later,
    scores_of,
    using,
)
from tests.zoo.members import EARLY, ONE_VALUE, add


class FirstOf(nn.Module):
    """Apply a layer to the first tensor of a tuple; hand the others on."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind.build() if isinstance(kind, LayerSpec) else kind()

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.inner(inputs[0]), *inputs[1:]


class OnlyFirstOf(FirstOf):
    """Apply a layer to the first tensor of a tuple; drop the others."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return super().forward(inputs)[0]


def tuples(*layers: Any) -> list[Any]:
    return [LayerSpec(FirstOf, Embedding), *layers, LayerSpec(OnlyFirstOf, Head)]


def reading(kind: Any, after: Any = Mlp) -> list[Any]:
    """Return layers in which `kind` reads the further inputs and hands on only its own output."""
    return [LayerSpec(FirstOf, Embedding), kind, after, Head]


def with_input(seed: int, extra: Tensor) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return (tokens, extra), labels


class MaskedAttention(Attention):
    """Attend by hand to (x, mask), with a mask that comes with the batch."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.mask = inputs[1]
        return super().forward(inputs[0]), *inputs[1:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask if self.mask.dim() == 4 else self.mask[:, None]
        return scores_of(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


for name, mask in (("MaskOfTokensByTokens", later(LENGTH)), ("MaskOfHeads", later(LENGTH)[None])):
    add(
        name,
        tuples(MaskedAttention, LayerSpec(FirstOf, Mlp)),
        *("input 1", "two dimensions"),
        data=lambda seed, mask=mask: with_input(seed, mask.repeat(2, *[1] * mask.dim())),
        error="BatchError",
        stops=True,
    )


PER_SEQUENCE = using(
    lambda it, inputs: inputs[0] + inputs[1].square().mean(1)[:, None, None] * it.inner, inner=(WIDTH, 90)
)
"""(x, table): every token reads the whole table [B, L], which has the length of the labels by chance."""


def reads_memory(inputs: tuple[Tensor, ...]) -> Tensor:
    """Attend in (x, memory) to another text, which by chance has the same length."""
    x, memory = inputs
    return x + scores_of(x, memory).softmax(-1) @ memory


def as_long_as_the_text(seed: int, *shape: int) -> MicroBatch:
    return with_input(seed, fixed(2, LENGTH, *shape, seed=seed, std=1.0))


table, memory = as_long_as_the_text, lambda seed: as_long_as_the_text(seed, WIDTH)
add("TableAsLongAsTheText", reading(PER_SEQUENCE), "input 1", "sliced_inputs", data=table, error="BatchError")
add("MemoryAsLongAsTheText", reading(reads_memory), EARLY, data=memory)


# -- pooled states ---------------------------------------------------------------------------------------------------


USES_STATE = using(lambda it, inputs: inputs[0] + (inputs[1] @ it.inner)[:, None], inner=(WIDTH, WIDTH, 91))


class Distances(nn.Module):
    """Compute x -> (x, the products of all tokens with all)."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x @ x.mT


class Classifier(Head):
    """Return the logits of the last token, for every token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1:].expand(-1, x.shape[1], -1)


class OneClass(Head):
    """Predict one class for a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1])


def uses_distances(inputs: tuple[Tensor, ...]) -> Tensor:
    x, products = inputs
    return x + products.masked_fill(later(x.shape[1]), float("-inf")).softmax(-1) @ x


add("PooledState", [Embedding, lambda x: (x, x.mean(1)), USES_STATE, Head], ONE_VALUE)
add("LastTokenPooled", [Embedding, lambda x: (x, x[:, -1].clone()), USES_STATE, Head], ONE_VALUE)
add("ProductsHandedOn", [Embedding, Distances, uses_distances, Head], "layer 1 (Distances)")
add("LastTokenClassifies", [Embedding, Mlp, Mlp, Classifier], "layer 3 (Classifier)", EARLY)
add(
    "OneLabelPerSequence",
    [Embedding, Mlp, Mlp, OneClass],
    "no label tensor has dimension 1",
    data=lambda seed: (micro_batch(seed)[0], micro_batch(seed)[1][:, -1].clone()),
    error="BatchError",
    stops=True,
)


# -- rows and tokens in one dimension --------------------------------------------------------------------------------


class FlatShift(Weighted, inner=(WIDTH, WIDTH, 92)):
    """Mix, in [B * T, C], each token with the one before it, also across rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, -1)) @ self.inner


class Pairs(Weighted, inner=(2 * WIDTH, 2 * WIDTH, 93)):
    """Join two tokens into one of double width, and take them apart again."""

    def forward(self, x: Tensor) -> Tensor:
        odd = x.shape[1] % 2
        wide = F.pad(x, (0, 0, odd, 0)).unflatten(1, (-1, 2)).flatten(2) @ self.inner
        return x + wide.unflatten(2, (2, -1)).flatten(1, 2)[:, odd:]


class FirstDimension(Weighted, table=(LONG, WIDTH, 94)):
    """Take (x, ids [L]): positions without rows, which are not cut."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, ids = inputs
        return x + self.table[ids[: x.shape[1]]], ids


add("FlatRowsShifted", [Embedding, lambda x: x.flatten(0, 1), FlatShift, Head], "layer 2 (FlatShift)")
add("PairsOfTokens", [Embedding, Pairs, Mlp, Head], EARLY)
add(
    "PositionIdsWithoutRows",
    tuples(FirstDimension, LayerSpec(FirstOf, Mlp)),
    "layer 1 (FirstDimension)",
    data=lambda seed: with_input(seed, torch.arange(LENGTH)),
)
