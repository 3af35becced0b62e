"""The loss of the last stage, whole against the weighted sum of the slices' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.loss import slice_weights, weighted_loss
from terapipe_ds.runtime.verify.check import Differs, compare_tokens
from terapipe_ds.runtime.verify.compare import Tolerance, difference
from terapipe_ds.runtime.verify.layout import ALONE, Layout, TensorPeersOf, TokenDim, alone, cut, stand_together
from terapipe_ds.runtime.verify.runner import Values

REDUCTIONS = ("mean_valid", "mean", "sum")


class LossCheck:
    """The loss on what the last layer gives.

    Args:
        outputs, layouts: of the last layer, for the whole sequence.
        weights: of the slices' losses, as training has them; ``reduction``: how they come about.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], labels: SliceableTensors, plan: SlicePlan, outputs: Values,
        layouts: Sequence[Layout], weights: Sequence[float], reduction: str, ignore_index: int,
        peers: TensorPeersOf = ALONE,
    ) -> None:  # fmt: skip
        self._loss_fn, self._labels, self._plan, self._outputs = loss_fn, labels, plan, outputs
        self._layouts, self._weights, self._peers = layouts, weights, peers
        self._reduction, self._ignore_index = reduction, ignore_index

    def run(self, tolerance: Tolerance) -> tuple[Differs, str] | None:
        """What differs and why; None where the loss and its gradients agree."""
        whole, whole_gradients = self._whole()
        if not torch.isfinite(whole):
            return None  # no label counts: the mean over nothing has no value
        parts = [self._slice(i, self._weights[i]) for i in range(self._plan.num_slices)]
        total = torch.stack([loss for loss, _ in parts]).sum()
        gradients = [grads for _, grads in parts]
        apart = difference(total, whole, 1e-6)
        found = [Differs("the loss", apart, tolerance.relative) if apart.relative > tolerance.relative else None]
        for j, layout in enumerate(self._layouts):
            if isinstance(layout, TokenDim) and whole_gradients[j] is not None:
                together, expected = self._gradient(j, layout, gradients, whole_gradients)
                found.append(compare_tokens("the gradient of the loss", together, expected, tolerance))
        differs = self._peers.first(next((each for each in found if each is not None), None))
        return None if differs is None else (differs, self._cause(whole, whole_gradients, gradients))

    def _whole(self) -> tuple[Tensor, list[Tensor | None]]:
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in self._outputs.tensors]
        return self._loss(leaves, self._labels.part(0, self._plan.sequence_length), 1.0)

    def _slice(self, slice_id: int, weight: float) -> tuple[Tensor, list[Tensor | None]]:
        leaves = [
            cut(layout, t.detach(), self._plan, slice_id, self._peers).requires_grad_(t.is_floating_point())
            for layout, t in zip(self._layouts, self._outputs.tensors, strict=True)
        ]
        return self._loss(leaves, self._labels.part(*self._plan.span(slice_id)), weight)

    def _loss(self, leaves: list[Tensor], labels: Any, weight: float) -> tuple[Tensor, list[Tensor | None]]:
        packed = tuple(leaf.clone() for leaf in leaves)
        loss = weighted_loss(packed if self._outputs.is_tuple else packed[0], labels, weight, self._loss_fn)
        loss = loss if torch.is_tensor(loss) else sum(loss)
        if loss.requires_grad:
            loss.backward()
        return loss.detach().double().reshape(()), [leaf.grad for leaf in leaves]

    def _gradient(
        self, j: int, layout: TokenDim, parts: list[list[Tensor | None]], whole: list[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """[tokens, numbers] of the slices together, and of the whole."""
        expected = whole[j]
        assert expected is not None
        known = []
        for i, part in enumerate(parts):
            gradient = part[j]
            if gradient is None:
                gradient = cut(layout, torch.zeros_like(expected), self._plan, i, self._peers)
            known.append(gradient)
        together = stand_together(layout, known, None, self._peers)
        return together.flatten(1), alone(layout, expected, self._peers).flatten(1)

    def _cause(self, whole: Tensor, whole_gradients: list[Tensor | None], gradients: list[list[Tensor | None]]) -> str:
        lost = self._lost_tokens(whole_gradients, gradients)
        if lost:
            return (
                f"loss_fn shifts the labels itself: the last token of a slice finds no label in it, so that {lost} "
                "tokens at slice boundaries are lost (tokens "
                f"{', '.join(str(stop - 1) for _, stop in map(self._plan.span, range(self._plan.num_slices - 1)))}). "
                "Shift the labels in the data and not in loss_fn"
            )
        fitting = [name for name in REDUCTIONS if name != self._reduction and self._fits(name, whole)]
        if fitting:
            return (
                f"the slices' losses are weighted wrongly: loss_fn is no {self._reduction!r} but a {fitting[0]!r}; set "
                f'terapipe.loss_reduction to "{fitting[0]}"'
            )
        if self._is_weight(whole_gradients, gradients):
            return (
                "the slices' losses are weighted wrongly: loss_fn divides by something else than "
                f"terapipe.loss_reduction = {self._reduction!r} says; give loss_fn a method slice_weight(labels)"
            )
        return "loss_fn mixes tokens: its value for a token depends on the other tokens of the call"

    def _lost_tokens(self, whole: list[Tensor | None], parts: list[list[Tensor | None]]) -> int:
        """Tokens at the end of slices that count in the whole loss and not in the slice's."""
        lost = 0
        for j, layout in enumerate(self._layouts):
            if not isinstance(layout, TokenDim) or whole[j] is None:
                continue
            together, expected = self._gradient(j, layout, parts, whole)
            ends = [self._plan.span(i)[1] - 1 for i in range(self._plan.num_slices - 1)]
            if bool(together[self._plan.sequence_length - 1].any()) or bool(expected[-1].any()):
                continue  # a loss that shifts has no label for the very last token
            lost += sum(1 for end in ends if not together[end].any() and expected[end].any())
        return max(self._peers.exchange(lost)) if self._peers.size > 1 else lost

    def _fits(self, reduction: str, whole: Tensor) -> bool:
        weights = slice_weights(
            self._labels, self._plan, loss_reduction=reduction, ignore_index=self._ignore_index
        )
        total = torch.stack([self._slice(i, w)[0] for i, w in enumerate(weights)]).sum()
        return difference(total, whole, 1e-6).relative < 1e-3

    def _is_weight(self, whole: list[Tensor | None], parts: list[list[Tensor | None]]) -> bool:
        """Whether each slice's gradient is the whole one's times some number."""
        for j, layout in enumerate(self._layouts):
            if not isinstance(layout, TokenDim) or whole[j] is None:
                continue
            together, expected = self._gradient(j, layout, parts, whole)
            for i in range(self._plan.num_slices):
                span = slice(*self._plan.span(i))
                a, b = together[span].double().flatten(), expected[span].double().flatten()
                if float(b.norm()) == 0.0 or float(a.norm()) == 0.0:
                    continue
                if float(a @ b / (a.norm() * b.norm())) < 0.999:
                    return False
        return True
