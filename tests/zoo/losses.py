"""Define losses with another denominator than the section's default, or with none."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.losses import Head as OutputMatrix
from terapipe_ds.losses import LinearCrossEntropy, hand_on, hands_on_hidden
from tests.distributed.engines import IGNORE_INDEX, LENGTH, VOCAB_SIZE, MicroBatch, micro_batch
from tests.small_models.parts import Embedding, Head, Mlp, cross_entropy, fixed
from tests.zoo.members import add, loss, stack
from tests.zoo.shapes import FirstOf

LOSS = "loss_fn: the "
ANOTHER = 'set terapipe.loss_reduction to "'
NONE = "no terapipe.loss_reduction"
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, VOCAB_SIZE, dtype=torch.float64)


def each(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [B, T]; zero where no label counts."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return flat.view_as(labels)


def valid(labels: Tensor) -> Tensor:
    return labels != IGNORE_INDEX


def mean_valid(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).sum() / valid(labels).sum()


def weighted_tokens(seed: int) -> MicroBatch:
    """Weigh tokens as Megatron does: (labels, loss_mask)."""
    labels = micro_batch(seed, masked=False)[1]
    return micro_batch(seed)[0], (labels, fixed(2, LENGTH, seed=seed, std=1.0).abs())


# -- other denominators ----------------------------------------------------------------------------------------------


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).sum()


def mean_of_all_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return each(logits, labels).mean()


def shifting(logits: Tensor, labels: Tensor) -> Tensor:
    """Use the inputs as labels: token t is to predict t + 1."""
    return mean_valid(logits[:, :-1], labels[:, 1:])


def masked_mean(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    return (each(logits, labels[0]) * labels[1]).sum() / labels[1].sum()


def with_class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(*flat, weight=CLASS_WEIGHTS, ignore_index=IGNORE_INDEX)


loss(LOSS, ANOTHER)(
    summed=summed,
    mean_of_all_tokens=mean_of_all_tokens,
    by_rows=lambda logits, labels: each(logits, labels).sum() / len(labels),
    # Divided by the longest sequence there may be.
    by_a_constant=lambda logits, labels: each(logits, labels).sum() / (2 * LENGTH),
)
loss(LOSS, ANOTHER, terapipe={"loss_reduction": "mean"})(valid_called_mean=mean_valid)
loss(LOSS, ANOTHER, terapipe={"loss_reduction": "sum"})(valid_called_sum=mean_valid)
loss(LOSS, NONE)(
    by_root_of_count=lambda logits, labels: each(logits, labels).sum() / valid(labels).sum().sqrt(),
    class_weights=with_class_weights,
    # Small labels are ignored too.
    another_ignored_label=lambda logits, labels: mean_valid(logits, labels.masked_fill(labels < 6, IGNORE_INDEX)),
)
loss("loss_reduction", "slice_weight", data=weighted_tokens, error="TeraPipeConfigError")(
    mask_in_a_tuple=masked_mean, sum_of_a_tuple=lambda logits, labels: (each(logits, labels[0]) * labels[1]).sum()
)
loss(LOSS, NONE, data=weighted_tokens, terapipe={"loss_reduction": "mean"})(mask_in_a_tuple_called_mean=masked_mean)


PAD = 3


def padded(seed: int, rows: int = 2) -> MicroBatch:
    """Make about every second label padding, in each slice: no slice has a larger share."""
    tokens, labels = micro_batch(seed, rows=rows, masked=False)
    labels[:, ::2] = PAD
    return tokens, labels


def padded_below(seed: int) -> MicroBatch:
    """End the third row and the fourth with padding; layers do not see these rows in the check."""
    tokens, labels = micro_batch(seed, rows=4, masked=False)
    labels = labels.masked_fill(labels == PAD, PAD + 1)
    labels[2:, 9:] = PAD
    return tokens, labels


def without_padding(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@loss(data=lambda seed: padded(seed, rows=1), terapipe={"ignore_index": PAD})
def writing_to_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Ignore padding as many collators do, but late, and in the labels themselves."""
    labels[labels == PAD] = IGNORE_INDEX
    return mean_valid(logits, labels)


PADDED = f"set terapipe.ignore_index to {PAD};", f"loss_fn ignores label {PAD}, which counts by"
loss(LOSS, *PADDED, data=padded)(padding=without_padding)
loss(
    LOSS,
    "ignores label 3, by the loss and by its gradients: set terapipe.ignore_index to 3;",
    data=padded_below,
    engine={"train_micro_batch_size_per_gpu": 4},
)(padding_below=without_padding)
loss(LOSS, "loss_fn ignores label ", ", which counts by", data=padded)(
    two_kinds_of_padding=lambda logits, labels: mean_valid(logits, labels.masked_fill(labels // 2 == 1, IGNORE_INDEX))
)
loss(LOSS, "loss_fn trains on label 3, which is ignored by", data=padded, terapipe={"ignore_index": PAD})(
    ignored_that_is_trained=mean_valid
)


all_labels_zero = lambda seed: (micro_batch(seed)[0], micro_batch(seed, masked=False)[1] // 99)  # noqa: E731
loss(LOSS, data=all_labels_zero, terapipe={"ignore_index": 0})(every_label_is_ignored=cross_entropy)
loss(LOSS, NONE)(
    # A mean over each sequence, then over the sequences.
    rows_then_mean=lambda logits, labels: (each(logits, labels).sum(1) / valid(labels).sum(1).clamp(min=1)).mean(),
    # One is added to the count, lest it be zero.
    more_than_the_count=lambda logits, labels: each(logits, labels).sum() / (valid(labels).sum() + 1),
    hardest_tokens=lambda logits, labels: each(logits, labels).flatten().topk(labels.numel() // 4).values.mean(),
    shifting=shifting,
    # The first four tokens of a sequence are a prompt.
    without_the_first_tokens=lambda logits, labels: mean_valid(logits[:, 4:], labels[:, 4:]),
    smooth_in_time=lambda logits, labels: mean_valid(logits, labels) + 0.01 * logits.diff(dim=1).square().mean(),
    with_z_loss_of_all_tokens=lambda logits, labels: (
        mean_valid(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()
    ),
    mean_and_sum=lambda logits, labels: mean_valid(logits, labels) + 0.01 * logits.square().sum(),
    # A penalty that does not depend on the tokens at all.
    with_a_constant=lambda logits, labels: mean_of_all_tokens(logits, labels) + 0.5 * valid(labels).sum(),
)


# -- no weighted mean at all -----------------------------------------------------------------------------------------


@loss(LOSS, NONE)
def root_mean_square(logits: Tensor, labels: Tensor) -> Tensor:
    return (each(logits, labels).square().sum() / valid(labels).sum()).sqrt()


@loss(LOSS, NONE)
def perplexity(logits: Tensor, labels: Tensor) -> Tensor:
    return (mean_valid(logits, labels) / 4).exp()


@loss(LOSS, NONE)
def batch_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    shares = logits.softmax(-1).mean((0, 1))
    return mean_valid(logits, labels) + 0.1 * (shares * shares.log()).sum()


@loss(LOSS, NONE)
def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    """Compare each token with all other tokens of the call."""
    states = F.normalize(logits.flatten(0, 1), dim=-1)
    return mean_valid(logits, labels) + F.cross_entropy(states @ states.mT, torch.arange(len(states)))


@loss(LOSS, NONE)
def against_the_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Subtract the mean from rewards, as policy gradients do."""
    losses = each(logits, labels)
    return (losses * (losses - losses.mean()).detach()).mean()


# -- without logits ----------------------------------------------------------------------------------------------------


class CappedHead(Head):
    """Cap scaled logits, and describe them for a loss that computes none."""

    described = {"scale": 0.7, "softcap": 3.0}

    def output_head(self) -> OutputMatrix:
        return OutputMatrix(self.weight, **self.described)

    def forward(self, x: Tensor) -> Tensor:
        return hand_on(x) if hands_on_hidden() else 3.0 * torch.tanh(super().forward(x) * 0.7 / 3.0)


class ForgottenScale(CappedHead):
    described = {"softcap": 3.0}


of_hidden = LinearCrossEntropy(ignore_index=IGNORE_INDEX, label_smoothing=0.1)
DESCRIBES = "output_head() of the last layer must describe"
add("ForgottenScale", [*stack()[:-1], ForgottenScale], "loss_fn: without logits", DESCRIBES, loss_fn=of_hidden)


# -- of other labels, or where no loss_fn is --------------------------------------------------------------------------


class Declaring:
    """A loss that declares what its labels weigh."""

    def __init__(self, name: str, loss: Callable[..., Tensor], weight: Callable[[Any], Tensor | int]) -> None:
        self.__name__, self.loss, self.weight = name, loss, weight

    def __call__(self, logits: Tensor, labels: Any) -> Tensor:
        return self.loss(logits, labels)

    def slice_weight(self, labels: Any) -> float:
        return float(self.weight(labels))


# Divided by the sum of a mask, but declared to weigh as many as there are tokens.
wrong_weight = Declaring("WrongWeight", masked_mean, lambda labels: labels[0].numel())
add("WrongWeight", stack(), LOSS, "slice_weight(labels)", loss_fn=wrong_weight, data=weighted_tokens)


class Counting(nn.Module):
    """Count the loss's calls in a buffer: once for each slice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return mean_valid(logits, labels) * (1 + 0.1 * self.calls)


add("CountingLoss", stack(), LOSS, loss_fn=Counting())


def soft_targets(seed: int) -> MicroBatch:
    return micro_batch(seed)[0], fixed(2, LENGTH, VOCAB_SIZE, seed=seed, std=1.0).softmax(-1)


loss(LOSS, data=soft_targets)(
    divergence_by_rows=lambda logits, labels: F.kl_div(logits.log_softmax(-1), labels, reduction="batchmean")
)


class OwnLossHead(Head):
    """Compute (x, labels) -> the loss: the model needs no loss_fn."""

    def __init__(self, own_loss: Any) -> None:
        super().__init__()
        self.own_loss = own_loss

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]
        return self.own_loss(super().forward(inputs[0]), inputs[1])


def labels_as_input(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed, masked=False)
    return (tokens, labels), labels


def with_own_loss(own_loss: Any, inner: Any = Mlp) -> list[LayerSpec]:
    return [*(LayerSpec(FirstOf, kind) for kind in (Embedding, inner, Mlp)), LayerSpec(OwnLossHead, own_loss)]


for function in (summed, root_mean_square, perplexity):
    name = f"own_{function.__name__}"
    add(name, with_own_loss(function), "layer 3 (OwnLossHead)", loss_fn=None, data=labels_as_input)
