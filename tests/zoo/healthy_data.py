"""Define further inputs beside the tokens, inputs without tokens, and losses that are means or declare their kind."""

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import IGNORE_INDEX, LENGTH, MicroBatch, micro_batch
from tests.small_models.parts import HEADS, LONG, WIDTH, Head, Mlp, Weighted, cross_entropy, fixed, using
from tests.zoo.attentions import SLICED, Sliced
from tests.zoo.losses import (
    CLASS_WEIGHTS,
    PAD,
    CappedHead,
    Declaring,
    each,
    labels_as_input,
    masked_mean,
    mean_of_all_tokens,
    mean_valid,
    of_hidden,
    padded,
    soft_targets,
    summed,
    valid,
    weighted_tokens,
    with_class_weights,
    with_own_loss,
    without_padding,
)
from tests.zoo.members import add, loss, stack
from tests.zoo.shapes import reading, reads_memory, tuples, with_input


class FusedMemory(Weighted, inner=(WIDTH, WIDTH, 120)):
    """Attend to another text, by torch's own function: that text is not sliced."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, other = inputs
        q, k = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (x @ self.inner, other))
        return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


POSITION_IDS = using(lambda it, inputs: inputs[0] + it.table[inputs[1]], table=(LONG, WIDTH, 121))
CONDITIONED = using(lambda it, inputs: inputs[0] * (1 + inputs[1] @ it.inner), inner=(WIDTH, WIDTH, 122))
"""(x, one vector for each row)."""


def weighed(inputs: tuple[Tensor, ...]) -> Tensor:
    """Weigh (x, a number or a mask for each token)."""
    return inputs[0] * inputs[1][..., None]


class Guided(nn.Module):
    """Compute (x, position ids) -> the same: every layer adds its own positions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.positions, self.attention = POSITION_IDS.build(), Sliced(index)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.attention(self.positions(inputs)), inputs[1]


def memory(seed: int) -> MicroBatch:
    return with_input(seed, fixed(2, 7, WIDTH, seed=seed, std=1.0))


def position_ids(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH).flip(0).expand(2, -1).clone())


for name, kind, data in (
    ("MemoryByHand", reads_memory, memory),
    ("MemoryByTorch", FusedMemory, memory),
    ("PositionIds", POSITION_IDS, position_ids),
    ("PositionIdsOfOneRow", POSITION_IDS, lambda seed: with_input(seed, torch.arange(LENGTH)[None])),
    ("PaddingMask", weighed, lambda seed: with_input(seed, torch.arange(LENGTH) < torch.tensor([[19], [23]]))),
    ("ConditionOfEachRow", CONDITIONED, lambda seed: with_input(seed, fixed(2, 1, WIDTH, seed=seed))),
):
    add(name, reading(kind, SLICED), data=data)
add(
    "NumberOfEachToken",
    reading(weighed, SLICED),
    data=lambda seed: with_input(seed, fixed(2, LENGTH, seed=seed)),
    terapipe={"sliced_inputs": [0, 1]},
)
add("PositionIdsForEveryLayer", tuples(LayerSpec(Guided, 0), LayerSpec(Guided, 1)), data=position_ids)
add(
    "ContinuousInputs",
    [using(lambda it, x: x @ it.inner, inner=(7, WIDTH, 123)), SLICED, Mlp, Head],
    data=lambda seed: (fixed(2, LENGTH, 7, seed=seed, std=1.0), micro_batch(seed)[1]),
)

# -- losses ----------------------------------------------------------------------------------------------------------

loss(terapipe={"loss_reduction": "sum"})(
    declared_sum=summed, declared_sum_by_rows=lambda logits, labels: each(logits, labels).sum() / len(labels)
)
loss(terapipe={"loss_reduction": "mean"})(declared_mean=mean_of_all_tokens)
loss(data=weighted_tokens, terapipe={"loss_reduction": "sum"})(
    declared_sum_of_a_tuple=lambda logits, labels: (each(logits, labels[0]) * labels[1]).sum()
)
loss()(
    label_smoothing=lambda logits, labels: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=0.1
    )
)
loss(data=soft_targets)(
    soft_cross_entropy=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
)


def masked_by_three(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return tokens, labels.masked_fill(labels == IGNORE_INDEX, PAD)


loss(data=masked_by_three, terapipe={"ignore_index": PAD})(declared_ignore_index=without_padding)
loss(data=padded, terapipe={"ignore_index": PAD})(declared_padding=without_padding)


@loss(data=padded)
def without_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Give one label no gradient, although it counts."""
    return (each(logits, labels) * (labels != PAD)).sum() / valid(labels).sum()


@loss(limit=1e-2)
def in_bf16(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum in bf16, each slice by itself."""
    return F.cross_entropy(logits.bfloat16().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX).to(logits)


@loss()
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = each(logits, labels)
    return ((1 - (-losses).exp()).square() * losses).sum() / valid(labels).sum()


@loss()
def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.logsumexp(-1).square() * valid(labels)
    return mean_valid(logits, labels) + 0.01 * z.sum() / valid(labels).sum()


@loss(terapipe={"loss_reduction": "mean"}, data=lambda seed: micro_batch(seed, masked=False))
def advantages(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a policy's loss, whose weights cancel out over the batch: it is almost zero, but its gradients are not."""
    chosen = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    sign = torch.ones_like(chosen)
    sign[1::2] = -1
    return (sign * (chosen - chosen.detach())).mean()


loss(data=lambda seed: (micro_batch(seed)[0], fixed(2, LENGTH, seed=seed, std=1.0)))(
    squared_error=lambda logits, labels: F.mse_loss(logits[..., 0], labels)
)
masked_loss = Declaring("MaskedLoss", masked_mean, lambda labels: labels[1].sum())
class_weights = Declaring("ClassWeights", with_class_weights, lambda labels: CLASS_WEIGHTS[labels[valid(labels)]].sum())


class LossModule(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)


class Temperature(nn.Module):
    """Compute cross entropy with a temperature that is trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.log_t = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("fixed", torch.full((1,), 0.9, dtype=torch.float64))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits * self.log_t.exp() * self.fixed, labels)


def prompts_are_masked(seed: int) -> MicroBatch:
    """Leave the first slices without any label."""
    tokens, labels = micro_batch(seed)
    labels[:, :9] = IGNORE_INDEX
    return tokens, labels


add("MaskedLoss", stack(), loss_fn=masked_loss, data=weighted_tokens)
add("ClassWeights", stack(), loss_fn=class_weights)
add("LossModule", stack(), loss_fn=LossModule())
add("LossWithoutLogits", [*stack(SLICED)[:-1], CappedHead], loss_fn=of_hidden)
add("LossParameter", stack(), loss_fn=Temperature())
add("LossParameterBothWays", stack(), loss_fn=Temperature(), terapipe={"schedule": "chimera-seq"})
add("PromptsAreMasked", stack(SLICED), data=prompts_are_masked)
add("OwnLoss", with_own_loss(cross_entropy, SLICED), loss_fn=None, data=labels_as_input)
