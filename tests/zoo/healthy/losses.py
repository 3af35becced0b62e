"""Losses that are means over tokens, or that say what they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor

from tests.distributed.engines import IGNORE_INDEX, LENGTH, VOCAB_SIZE, MicroBatch, micro_batch
from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import cross_entropy, fixed
from tests.zoo.losses import each, labels_as_input, mean_valid, soft_targets, valid, weighted_tokens, with_own_loss
from tests.zoo.members import add, loss, losses, stack

losses(terapipe={"loss_reduction": "sum"})(
    declared_sum=lambda logits, labels: each(logits, labels).sum(),
    declared_sum_by_rows=lambda logits, labels: each(logits, labels).sum() / len(labels),
)


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
