"""Compare the loss of the whole sequence, and its gradients, with the weighted sum of the slices' losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention import guard_plain_attention, push_slice
from terapipe_ds.attention.plain_attention_guard import GuardCapturedNames
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.loss import weighted_loss, weights_of
from terapipe_ds.runtime.batch.sliceable import SliceableTensors
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_tokens, compare_values, tolerance_of
from terapipe_ds.runtime.verify.cut import Cut, choose_window, num_rows
from terapipe_ds.runtime.verify.tokens import Activations, PerSlice, Slicing, TensorLayout, TokenDim

REDUCTIONS = ("mean_valid", "mean", "sum")
_CANNOT = (
    "if a token's loss depends on other tokens in any other way (labels shifted in loss_fn, the root of a mean, a "
    "contrastive loss, a statistic of the batch), shift labels in the data, or set terapipe.slices to 1"
)
_CANCELS, _CANCELS_IN_HALF = 1e-3, 0.1  # of the size of its terms: a smaller loss is mostly rounding
_TOKENS = 64  # of the outputs that are kept for later labels
_EVEN = 0.01  # with smaller differences between the slices' shares, rounding hides which mean it is


@dataclass(frozen=True)
class Losses:
    """Hold the weighted losses of slices, the gradients of the outputs, and the size of what the losses add up."""

    values: Tensor
    gradients: list[Tensor]
    size: float
    reported: list[dict[str, float]]  # by slice what the module reports beside the loss


def _nothing() -> None:
    return None


def _reported(get_additional_losses: Callable[[], Mapping[str, Any] | None]) -> dict[str, float]:
    return {name: float(torch.as_tensor(value).detach()) for name, value in (get_additional_losses() or {}).items()}


def reported_so_far(get_additional_losses: Callable[[], Mapping[str, Any] | None]) -> dict[str, float]:
    """Return what the module reports now; nothing where it cannot, for the engine asks after each loss alone."""
    try:
        return _reported(get_additional_losses)
    except Exception:
        return {}


@dataclass
class LossCheck:
    """Check the loss on what the last layer gives; `slicing` has the weights that training gives the slices' losses.

    `get_additional_losses` is the module's. What it reports is compared as well, weighted as the losses are;
    `at_start` is what it reported before any layer ran, None where layers did not run for this check.
    """

    loss_fn: Callable[[Any, Any], Any]
    labels: SliceableTensors
    outputs: Activations
    slicing: Slicing
    config: TeraPipeConfig
    get_additional_losses: Callable[[], Mapping[str, Any] | None] = _nothing
    at_start: Mapping[str, float] | None = None
    is_finite: bool = True  # else there is nothing to compare

    def run(self) -> str | None:
        """Return what differs and which weights fit; None where the loss and its gradients agree."""
        before = reported_so_far(self.get_additional_losses)
        whole = self._losses(self.slicing.whole())
        self.is_finite = all(self.slicing.ranks.exchange(bool(torch.isfinite(whole.values).all())))
        if not self.is_finite:
            return None
        sliced = self._losses(self.slicing)
        difference = self._compare(whole, sliced)
        if difference is not None:
            return f"{difference}: {self._fitting_weights(whole)}"
        return self.slicing.ranks.first(self._problem_of_reports(before, whole, sliced))

    def _problem_of_reports(self, before: Mapping[str, float], whole: Losses, sliced: Losses) -> str | None:
        """Return what the module reports otherwise from slices, or from elsewhere than `loss_fn`."""
        weights, allowed = self.slicing.weights, self._tolerance().relative
        for name, expected in whole.reported[0].items():
            values = [of_slice[name] for of_slice in sliced.reported if name in of_slice]
            shares = [
                of_slice.get(name, 0.0) * weight for of_slice, weight in zip(sliced.reported, weights, strict=True)
            ]
            what = f"get_additional_losses() reports {name!r}"
            is_constant = self.at_start is None or repr(self.at_start.get(name)) == repr(expected)
            unchanged = {repr(value) for value in (before.get(name), *values)} == {repr(expected)}  # NaN as well
            if expected and unchanged and not is_constant:
                return (
                    f"{what}, which loss_fn does not change: what a layer leaves there is of one slice alone. Hand it "
                    "on with the layer's outputs and report it from loss_fn (docs/auxiliary_losses.md), or leave it out"
                )
            size = max(abs(expected), *map(abs, shares))
            if math.isfinite(expected) and not abs(sum(shares) - expected) <= allowed * size:
                return (
                    f"{what} as {expected:.6g} on the whole sequence, but the slices' values, each weighted as the "
                    f"slice's loss, come to {sum(shares):.6g}: report what is reduced as the loss is (a mean over the "
                    "same labels, or a sum with a sum), leave it out, or set terapipe.slices to 1"
                )
        return None

    def _fitting_weights(self, whole: Losses) -> str:
        if hasattr(self.loss_fn, "slice_weight"):
            return (
                "loss_fn.slice_weight(labels), by which slices are weighted in place of terapipe.loss_reduction, must "
                f"give what loss_fn divides a sum over tokens by; {_CANNOT}"
            )
        reduction = self.config.loss_reduction
        for name in REDUCTIONS:
            weights = weights_of(self.labels, self.slicing.plan, self.config, None, name)
            if name != reduction and self._compare(whole, self._losses(replace(self.slicing, weights=weights))) is None:
                return (
                    f"loss_fn is no {reduction!r} but a {name!r}, which the loss and its gradients agree with: set "
                    f'terapipe.loss_reduction to "{name}"; or give loss_fn a method slice_weight(labels)'
                )
        return (
            f"no terapipe.loss_reduction ({', '.join(REDUCTIONS)}) agrees with loss_fn. If it is a sum over tokens "
            f"divided by something, give it a method slice_weight(labels) that returns this; {_CANNOT}"
        )

    def _dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.outputs.tensors}

    def _tolerance(self) -> Tolerance:
        return tolerance_of(self._dtypes(), of_loss=True)

    def _compare(self, whole: Losses, sliced: Losses) -> Difference | None:
        dtypes, tolerance = self._dtypes(), self._tolerance()
        cancels = _CANCELS_IN_HALF if dtypes & {torch.float16, torch.bfloat16} else _CANCELS
        size = max(whole.size, float(sliced.values.abs().sum()))
        least = size if float(whole.values.abs()) < cancels * size else 0.0
        differences = [compare_values("the loss", sliced.values.sum()[None], whole.values, tolerance, least)]
        for layout, a, b in zip(self.outputs.layouts, sliced.gradients, whole.gradients, strict=True):
            if isinstance(layout, TokenDim):
                differences.append(compare_tokens("the gradient of the loss", a, b, tolerance))
        return self.slicing.ranks.first(next(filter(None, differences), None))

    def _losses(self, slicing: Slicing) -> Losses:
        """Run forwards and then backwards in reverse, each while its slice is active, as in training."""
        layouts, runs, size, reported = self.outputs.layouts, [], 1e-6, []
        for slice_id, weight in enumerate(slicing.weights):
            cut = (slicing.cut(*pair, slice_id) for pair in zip(layouts, self.outputs.tensors, strict=True))
            leaves = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in cut]
            copies, active = tuple(leaf.clone() for leaf in leaves), slicing.active(slice_id)
            with push_slice(active), guard_plain_attention(), GuardCapturedNames():
                labels = self.labels.part(active.start, active.stop)
                loss = weighted_loss(copies if self.outputs.is_tuple else copies[0], labels, weight, self.loss_fn)
            reported.append(_reported(self.get_additional_losses) if weight else {})
            runs.append((leaves, loss if torch.is_tensor(loss) else sum(loss)))
        gradients: list[list[Tensor]] = []
        for slice_id, (leaves, loss) in reversed(list(enumerate(runs))):
            if loss.requires_grad:
                with push_slice(slicing.active(slice_id, "recompute")):
                    loss.backward()
            gradients.insert(0, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves])
            for leaf, gradient in zip(leaves, gradients[0], strict=True):
                terms = (gradient.float() * leaf.detach().float()).nan_to_num(0.0, 0.0, 0.0)
                size = max(size, float(terms.abs().sum()))
        slicing.store.reset()
        joined = map(slicing.joined_gradients, layouts, zip(*gradients, strict=True))
        values = torch.stack([loss.detach().double().reshape(()) for _, loss in runs])
        return Losses(values, list(joined), size, reported)


def _are_even(weights: tuple[float, ...], plan: SlicePlan) -> bool:
    """Return whether the slices' losses weigh as their tokens do, in which case all reductions to a mean agree."""
    shares = (length / plan.sequence_length for length in plan.lengths)
    return all(abs(weight - share) <= _EVEN for weight, share in zip(weights, shares, strict=True))


def kept_for_later(check: LossCheck) -> LossCheck | None:
    """Return a check that waits for a batch with ignored labels, with the first tokens of the outputs.

    While every label counts, a mean over the valid labels and a mean over all tokens are the same number, so that the
    first batch cannot tell which one `loss_fn` is. Return None if it could, if nothing can be compared, or under
    tensor parallelism: ranks would have to compare together while each draws its data.
    """
    outputs, slicing = check.outputs, check.slicing
    is_settled = hasattr(check.loss_fn, "slice_weight") or check.config.loss_reduction == "sum"
    dims = [layout for layout in outputs.layouts if isinstance(layout, TokenDim)]
    if is_settled or not _are_even(slicing.weights, slicing.plan) or slicing.ranks.size > 1:
        return None
    if not dims or any(layout.rows > 1 or layout.dim > 1 for layout in dims):
        return None
    tokens = min(_TOKENS, slicing.plan.sequence_length)
    tensors = tuple(
        (tensor.narrow(layout.dim, 0, tokens) if isinstance(layout, TokenDim) else tensor).detach().clone()
        for layout, tensor in zip(outputs.layouts, outputs.tensors, strict=True)
    )
    return replace(check, outputs=replace(outputs, tensors=tensors), at_start=None)


def compare_later(kept: LossCheck, labels: SliceableTensors) -> tuple[bool, str | None]:
    """Return whether the labels of a micro-batch told the reductions apart, and what differs."""
    config = kept.config
    cut = _window(kept.outputs, labels, config) if bool((labels.deciding == config.ignore_index).any()) else None
    if cut is None:
        return False, None
    labels = cut.of(labels)
    if _are_even(weights_of(labels, cut.plan, config, None, "mean_valid"), cut.plan):
        return False, None
    slicing = replace(kept.slicing, plan=cut.plan, weights=weights_of(labels, cut.plan, config, None))
    slicing = replace(slicing, starts=None)  # of other rows
    layouts = tuple(map(partial(_in_two, cut.plan), kept.outputs.layouts, kept.outputs.tensors))
    outputs, on_device = replace(kept.outputs, layouts=layouts), labels.to(kept.outputs.tensors[0].device)
    check = replace(kept, outputs=outputs, labels=on_device, slicing=slicing)
    with torch.enable_grad():
        difference = check.run()
    return check.is_finite, difference and (
        f"labels are ignored for the first time (ignore_index {config.ignore_index}), and the slices' losses do not "
        f"give what loss_fn gives on the whole sequence: {difference}"
    )


def _in_two(plan: SlicePlan, layout: TensorLayout, whole: Tensor) -> TensorLayout:
    """Return the layout for a window of two slices; one value per call agreed so far, so it is a mean over tokens."""
    if not isinstance(layout, PerSlice):
        return layout
    first, second = (length / plan.sequence_length for length in plan.lengths)
    return PerSlice((whole * (1 + second), whole * (1 - first)))


def _window(outputs: Activations, labels: SliceableTensors, config: TeraPipeConfig) -> Cut | None:
    """Return the window that shows most; None where the labels do not fit the outputs."""
    pairs = zip(outputs.layouts, outputs.tensors, strict=True)
    dim, tensor = next((layout.dim, tensor) for layout, tensor in pairs if isinstance(layout, TokenDim))
    tokens, rows, of_rows = tensor.size(dim), tensor.size(1 - dim), num_rows(labels)
    if labels.length < tokens or tokens < 2 or of_rows < rows or not all(labels.sliced):
        return None
    first = max(1, tokens // 3)
    cut = Cut(SlicePlan((first, tokens - first)), labels.length, rows=rows if rows < of_rows else None, of_rows=of_rows)
    return choose_window(cut, labels, 1, config.ignore_index)
