"""The loss of the last stage, whole against the weighted sum of the slices' losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, guard_plain_attention, push_slice
from terapipe_ds.attention.guard import GuardCapturedNames
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.loss import slice_weights, weighted_loss
from terapipe_ds.runtime.verify.check import Differs, SawHalf, compare_tokens
from terapipe_ds.runtime.verify.compare import difference, loss_tolerance
from terapipe_ds.runtime.verify.layout import (
    ALONE,
    Layout,
    PerSlice,
    Same,
    TensorPeersOf,
    TokenDim,
    alone,
    cut,
    stand_together,
)
from terapipe_ds.runtime.verify.runner import HALF, Runner, Values

REDUCTIONS = ("mean_valid", "mean", "sum")
_NO_WEIGHT = (
    "if what it gives for a token depends on other tokens in any other way (the root of a mean, a contrastive loss, a "
    "statistic of the batch), it cannot be sliced: set terapipe.slices to 1"
)
_Loss = tuple[Tensor, list[Tensor | None]]  # and its gradients, of the outputs
_CANCELS, _CANCELS_IN_HALF = 1e-3, 0.1  # of its terms' size: a loss below has rounding of its terms and little else


class LossCheck:
    """The loss on what the last layer gives.

    Args:
        outputs, layouts: of the last layer, for the whole sequence.
        weights: of the slices' losses, as training has them; ``reduction``: how they come about.
        part_id: of the last layer, in whose name the loss runs.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], labels: SliceableTensors, plan: SlicePlan, outputs: Values,
        layouts: Sequence[Layout], weights: Sequence[float], reduction: str, ignore_index: int,
        peers: TensorPeersOf = ALONE, part_id: int = 0,
    ) -> None:  # fmt: skip
        self._runner = Runner(nn.Module(), plan, part_id)
        self._loss_fn, self._labels, self._plan, self._outputs = loss_fn, labels, plan, outputs
        self._layouts, self._weights, self._peers = layouts, weights, peers
        self._reduction, self._ignore_index = reduction, ignore_index
        self._has_weight = hasattr(loss_fn, "slice_weight")
        self.skipped = ""  # why there was nothing to compare

    @property
    def layouts(self) -> Sequence[Layout]:
        """How slices are cut from the outputs."""
        return self._layouts

    def run(self) -> tuple[Differs, str] | None:
        """What differs and why; None where the loss and its gradients agree, and where there is no loss to compare:
        ``skipped`` says why."""
        with guard_plain_attention(), GuardCapturedNames():  # as in training
            return self._run()

    def in_fp32(self) -> LossCheck | None:
        """The same check on outputs in fp32, where half precision would hide small faults in its rounding."""
        tensors = self._outputs.tensors
        if not any(t.dtype in HALF for t in tensors):
            return None
        wide = copy.copy(self)
        wide._outputs = self._outputs.with_tensors([t.float() if t.dtype in HALF else t for t in tensors])
        wide._layouts = [
            PerSlice(tuple(v.float() if v.dtype in HALF else v for v in each.values))
            if isinstance(each, PerSlice)
            else each
            for each in self._layouts
        ]
        return wide

    def runs_in_half(self) -> bool:
        """Whether ``loss_fn`` computes in half precision, whatever it is given."""
        saw = SawHalf()
        with saw:
            self._whole()
        return saw.saw

    def without_tokens(self) -> list[int]:
        """Outputs that are numbers of the whole sequence, as far as is known of them."""
        pairs = zip(self._layouts, self._outputs.tensors, strict=True)
        return [j for j, (each, t) in enumerate(pairs) if isinstance(each, Same) and t.is_floating_point()]

    def _run(self) -> tuple[Differs, str] | None:
        whole, whole_gradients = self._whole()
        if self._peers.any(not torch.isfinite(whole)):
            self.skipped = "the loss is not finite on whole sequences, so that it was not compared"
            return None
        parts = self._slices(self._weights)
        differs = self._peers.first(self._compare(whole, whole_gradients, parts))
        return None if differs is None else (differs, self._cause(whole, whole_gradients, parts))

    def _compare(self, whole: Tensor, whole_gradients: list[Tensor | None], parts: list[_Loss]) -> Differs | None:
        tolerance = loss_tolerance({t.dtype for t in self._outputs.tensors})
        total = torch.stack([loss for loss, _ in parts]).sum()
        size = self._size(whole_gradients, parts)
        cancels = _CANCELS_IN_HALF if {t.dtype for t in self._outputs.tensors} & set(HALF) else _CANCELS
        apart = difference(total, whole, size if float(whole.abs()) < cancels * size else 0.0)
        found = [Differs("the loss", apart, tolerance.relative) if apart.relative > tolerance.relative else None]
        gradients = [grads for _, grads in parts]
        for j, layout in enumerate(self._layouts):  # all: tensor-parallel ranks do the same
            if isinstance(layout, TokenDim) and whole_gradients[j] is not None:
                pair = self._gradient(j, layout, gradients, whole_gradients)
                found.append(compare_tokens("the gradient of the loss", *pair, tolerance))
        return next((each for each in found if each is not None), None)

    def _size(self, whole_gradients: list[Tensor | None], parts: list[_Loss]) -> float:
        """Of the terms that a loss adds up, which may be next to zero itself: a policy's is, with normalised
        advantages."""
        terms = [float((g.float() * x.detach().float()).nan_to_num(0.0, 0.0, 0.0).abs().sum())
                 for g, x in zip(whole_gradients, self._outputs.tensors, strict=True) if g is not None]  # fmt: skip
        return max(1e-6, float(torch.stack([loss.abs() for loss, _ in parts]).sum()), *terms)

    def _whole(self) -> _Loss:
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in self._outputs.tensors]
        return self._losses([(self._runner.whole_sequence(), leaves, 1.0)])[0]

    def _slices(self, weights: Sequence[float]) -> list[_Loss]:
        return self._losses([
            (self._runner.slice(i), [
                cut(layout, t.detach(), self._plan, i, self._peers).requires_grad_(t.is_floating_point())
                for layout, t in zip(self._layouts, self._outputs.tensors, strict=True)
            ], weight)
            for i, weight in enumerate(weights)
        ])  # fmt: skip

    def _losses(self, given: list[tuple[ActiveSlice, list[Tensor], float]]) -> list[_Loss]:
        """Forwards and then backwards in reverse, each while its slice is active, as in training."""
        losses: list[Tensor] = []
        try:
            for active, leaves, weight in given:
                packed, labels = tuple(leaf.clone() for leaf in leaves), self._labels.part(active.start, active.stop)
                with push_slice(active):
                    one = weighted_loss(
                        packed if self._outputs.is_tuple else packed[0], labels, weight, self._loss_fn
                    )
                losses.append(one if torch.is_tensor(one) else sum(one))
            for (active, *_), loss in reversed(list(zip(given, losses, strict=True))):
                if loss.requires_grad:
                    with push_slice(active.replace(mode="recompute")):
                        loss.backward()
        finally:
            self._runner.store.reset()
        return [
            (loss.detach().double().reshape(()), [leaf.grad for leaf in leaves])
            for loss, (_, leaves, _) in zip(losses, given, strict=True)
        ]

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

    def _cause(self, whole: Tensor, whole_gradients: list[Tensor | None], parts: list[_Loss]) -> str:
        lost = self._lost_tokens(whole_gradients, [grads for _, grads in parts])
        if lost:
            return (
                f"loss_fn shifts the labels itself: the last token of a slice finds no label in it, so that {lost} "
                "tokens at slice boundaries are lost (tokens "
                f"{', '.join(str(stop - 1) for _, stop in map(self._plan.span, range(self._plan.num_slices - 1)))}). "
                "Shift the labels in the data and not in loss_fn"
            )
        if self._has_weight:
            return (
                "loss_fn.slice_weight(labels), by which slices are weighted in place of terapipe.loss_reduction, must "
                f"give what loss_fn divides a sum over tokens by; {_NO_WEIGHT}"
            )
        fitting = [name for name in REDUCTIONS if name != self._reduction and self._fits(name, whole, whole_gradients)]
        if fitting:
            return (
                f"loss_fn is no {self._reduction!r} but a {fitting[0]!r}, which the loss and its gradients agree with: "
                f'set terapipe.loss_reduction to "{fitting[0]}"; or give loss_fn a method slice_weight(labels)'
            )
        return (
            f"no terapipe.loss_reduction ({', '.join(REDUCTIONS)}) agrees with loss_fn. If it is a sum over tokens "
            f"divided by something, give it a method slice_weight(labels) that returns this; {_NO_WEIGHT}"
        )

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

    def _fits(self, reduction: str, whole: Tensor, whole_gradients: list[Tensor | None]) -> bool:
        """Whether slices weighted so give the loss and the gradients of the whole."""
        weights = slice_weights(
            self._labels, self._plan, loss_reduction=reduction, ignore_index=self._ignore_index
        )
        return not self._peers.any(self._compare(whole, whole_gradients, self._slices(weights)) is not None)
