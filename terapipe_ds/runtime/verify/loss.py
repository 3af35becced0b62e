"""Compare the loss of the whole sequence, and its gradients, with the weighted sum of the slices' losses.

Training may leave the output matrix to a loss that keeps no logits. Slices then run this loss as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention import ActiveSlice, active_slice, guard_plain_attention, push_slice
from terapipe_ds.attention.plain_attention_guard import GuardCapturedNames
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, Tensors
from terapipe_ds.runtime.batch.loss_weights import slice_counts, weighted_loss, weights_of
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare, tolerance_of
from terapipe_ds.runtime.verify.layer import HALF, Forward, LayerCheck, SeesDtypes
from terapipe_ds.runtime.verify.named_layer import NamedLayer, chained
from terapipe_ds.runtime.verify.tokens import Activations, PerSlice, Slicing, TokenDim, alone

REDUCTIONS = ("mean_valid", "mean", "sum")
_CANNOT = (
    "if a token's loss depends on other tokens in any other way (labels shifted in loss_fn, the root of a mean, a "
    "contrastive loss, a statistic of the batch), shift labels in the data, or set terapipe.slices to 1"
)
_WITHOUT_LOGITS = (
    "output_head() of the last layer must describe all that its forward does after hidden states (weight, bias, scale, "
    "soft cap), and of_hidden() of loss_fn must compute the loss that loss_fn computes; to train with logits, give "
    "loss_fn an attribute needs_logits with the reason (docs/losses.md)"
)
_CANCELS, _CANCELS_IN_HALF = 1e-3, 0.1  # relative to the size of its terms: a smaller loss is mostly rounding


@dataclass(frozen=True)
class Losses:
    """Hold the weighted losses of slices, the gradients of the outputs, and the size of the losses' terms."""

    values: Tensor
    gradients: list[Tensor]
    size: float
    reported: list[dict[str, float]]  # by slice, the values that the module reports beside the loss


def joined(
    layer: NamedLayer, labels: SliceableTensors, loss_of: Callable[[Any, Any, ActiveSlice], Tensor]
) -> NamedLayer:
    """Return a layer as one with its loss; `loss_of` takes the outputs, their labels, and the active slice."""

    def loss(outputs: Any) -> Tensor:
        active = active_slice()
        assert active is not None
        return loss_of(outputs, labels.part(active.start, active.stop), active)

    return chained([layer, NamedLayer(layer.layer_id, loss)])


class LossOfHiddenCheck(LayerCheck):
    """Check a layer whose only output is its loss, which has a value when its backward has run."""

    def _compare_outputs(self, whole: Forward, parts: list[Tensors]) -> tuple[Activations, None]:
        return Activations(tuple(t.detach() for t in whole.outputs), alone, (PerSlice(()),)), None

    def _random_gradient(self, index: int, output: Tensor) -> Tensor:
        # as large as the mean's divisor: half precision keeps the gradients of single tokens
        return torch.full_like(output, self._scale * self.slicing.plan.sequence_length)

    def _backwards(self, slicing: Slicing, runs: list[Forward], of_outputs: Mapping[int, Tensor]) -> dict[str, Tensor]:
        losses = [run.outputs[0].detach() for run in runs]
        gradients = super()._backwards(slicing, runs, of_outputs)
        # scaled as gradients are, because these are divided by the scale
        return {"the loss": torch.stack(losses).double().sum()[None] * self._scale} | gradients


class LossAfterLayers(LayerCheck):
    """Compare the value of a loss that comes right after the layers of its part, as in training.

    It may read what layers leave elsewhere. `loss` is the check of the loss apart, which has found no difference.
    """

    loss: LossCheck

    def _compare_outputs(self, whole: Forward, parts: list[Tensors]) -> tuple[Activations, Difference | None]:
        expected, values = whole.outputs[0].double()[None], torch.stack([each[0].double() for each in parts])
        with torch.enable_grad():
            size = max(self.loss.losses(self.slicing.whole()).size, float(values.abs().sum()))
        difference = _compare_values(values.sum()[None], expected, size, self._dtypes(()) | self.loss.sums_in)
        return Activations((), tuple, ()), difference if bool(torch.isfinite(expected).all()) else None


def _compare_values(total: Tensor, expected: Tensor, size: float, dtypes: set[torch.dtype]) -> Difference | None:
    cancels = _CANCELS_IN_HALF if dtypes & HALF else _CANCELS
    # if terms cancel out, the loss itself is mostly rounding
    least = size if float(expected.abs()) < cancels * size else 0.0
    return compare("the loss", total, expected, tolerance_of(dtypes, of_loss=True), least_norm=least)


def _reported(get_additional_losses: Callable[[], Mapping[str, Any] | None]) -> dict[str, float]:
    return {name: float(torch.as_tensor(value).detach()) for name, value in (get_additional_losses() or {}).items()}


def reported_so_far(get_additional_losses: Callable[[], Mapping[str, Any] | None]) -> dict[str, float]:
    """Return the module's present reports; none if it cannot report, since the engine asks only after each loss."""
    try:
        return _reported(get_additional_losses)
    except Exception:
        return {}


def _is_sum_in_half(result: Tensor, operands: list[Tensor]) -> bool:
    """Return whether a loss sums in half precision, where the sums of slices round otherwise."""
    # metrics beside the loss have no gradient, and views sum nothing
    is_half = result.dtype in HALF and result.requires_grad and not result._is_view()  # noqa: SLF001
    return is_half and any(each.numel() > result.numel() for each in operands)


@dataclass
class LossCheck:
    """Check the loss on the last layer's outputs; `slicing` has the weights that training gives the slices' losses.

    `get_additional_losses` is the module's. Its reports are compared as well, weighted like the losses. `at_start` has
    its reports from before any layer ran, or None if layers did not run for this check. If training runs the
    last layer and its loss without logits, `head` compares that loss with the loss of the whole's logits.
    """

    loss_fn: Callable[[Any, Any], Any]
    labels: SliceableTensors
    outputs: Activations
    slicing: Slicing
    config: TeraPipeConfig
    get_additional_losses: Callable[[], Mapping[str, Any] | None] = lambda: None
    at_start: Mapping[str, float] | None = None
    other_ignored: tuple[int, ...] = ()  # labels that loss_fn may ignore in place of terapipe.ignore_index
    is_finite: bool = True  # otherwise there is nothing to compare
    head: Callable[[LossCheck], Difference | None] | None = None
    sums_in: frozenset[torch.dtype] = frozenset()  # half precisions, on whole sequences

    @property
    def has_counted_labels(self) -> bool:
        return any(slice_counts(self.labels, self.slicing.plan, self.config, self.loss_fn))

    def run(self) -> str | None:
        """Return the difference and the weights that fit; None if the loss and its gradients agree."""
        # a report that does not change from here on does not come from loss_fn
        before = reported_so_far(self.get_additional_losses)
        with SeesDtypes(_is_sum_in_half) as seen:
            whole = self.losses(self.slicing.whole())
        self.sums_in = frozenset(seen.dtypes)
        self.is_finite = all(self.slicing.ranks.exchange(bool(torch.isfinite(whole.values).all())))
        if not self.is_finite:
            return None
        sliced = self.losses(self.slicing)
        difference = self._compare(whole, sliced)
        if difference is not None:
            return f"{difference}: {self._fitting_weights(whole)}"
        without_logits = None if self.head is None else self.head(self)
        if without_logits is not None:
            return f"without logits, as in training, {without_logits}: {_WITHOUT_LOGITS}"
        return self.slicing.ranks.first(self._problem_of_reports(before, whole, sliced))

    def _problem_of_reports(self, before: Mapping[str, float], whole: Losses, sliced: Losses) -> str | None:
        """Return reports of the module that differ with slices, or that do not come from `loss_fn`."""
        weights, allowed = self.slicing.weights, self._tolerance().relative
        for name, expected in whole.reported[0].items():
            values = [of_slice[name] for of_slice in sliced.reported if name in of_slice]
            shares = [
                of_slice.get(name, 0.0) * weight for of_slice, weight in zip(sliced.reported, weights, strict=True)
            ]
            what = f"get_additional_losses() reports {name!r}"
            is_constant = self.at_start is None or repr(self.at_start.get(name)) == repr(expected)
            unchanged = {repr(value) for value in (before.get(name), *values)} == {repr(expected)}  # NaN as well
            # a layer wrote it: from the last slice alone, in training
            if expected and unchanged and not is_constant:
                return (
                    f"{what}, which loss_fn does not change: what a layer leaves there is of one slice alone. Hand it "
                    "on with the layer's outputs and report it from loss_fn (docs/auxiliary_losses.md), or leave it out"
                )
            # compare values that cancel out relative to their terms
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
        reduction, index = self.config.loss_reduction, self.config.ignore_index
        pairs = [(name, index) for name in REDUCTIONS] + [("mean_valid", label) for label in self.other_ignored]
        for name, ignored in pairs:
            config = self.config.model_copy(update={"ignore_index": ignored})
            weights = weights_of(self.labels, self.slicing.plan, config, None, name)
            if self._compare(whole, self.losses(replace(self.slicing, weights=weights))) is None:
                which = f" that ignores label {ignored}" * (ignored != index)
                keys = [f'set terapipe.loss_reduction to "{name}"'] * (name != reduction)
                keys += [f"set terapipe.ignore_index to {ignored}"] * (ignored != index)
                return (
                    f"loss_fn is no {reduction!r} but a {name!r}{which}, by the loss and by its gradients: "
                    f"{' and '.join(keys)}; or give loss_fn a method slice_weight(labels)"
                )
        return (
            f"no terapipe.loss_reduction ({', '.join(REDUCTIONS)}) agrees with loss_fn. If it is a sum over tokens "
            f"divided by something, give it a method slice_weight(labels) that returns this; {_CANNOT}"
        )

    def _dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.outputs.tensors} | self.sums_in

    def _tolerance(self) -> Tolerance:
        return tolerance_of(self._dtypes(), of_loss=True)

    def _compare(self, whole: Losses, sliced: Losses) -> Difference | None:
        size, tolerance = max(whole.size, float(sliced.values.abs().sum())), self._tolerance()
        differences = [_compare_values(sliced.values.sum()[None], whole.values, size, self._dtypes())]
        for layout, a, b in zip(self.outputs.layouts, sliced.gradients, whole.gradients, strict=True):
            if isinstance(layout, TokenDim):
                differences.append(compare("the gradient of the loss", a, b, tolerance, by_token=True))
        return self.slicing.ranks.first(next(filter(None, differences), None))

    def losses(self, slicing: Slicing) -> Losses:
        """Run forwards and then backwards in reverse, each while its slice is active, as in training."""
        # all forwards before the first backward, as in training
        runs, size, reported = [], 1e-6, []
        for slice_id, weight in enumerate(slicing.weights):
            leaves = tuple(t.requires_grad_(t.is_floating_point()) for t in self.outputs.cut(slicing, slice_id))
            copies, active = tuple(leaf.clone() for leaf in leaves), slicing.active(slice_id)
            with push_slice(active), guard_plain_attention(), GuardCapturedNames():
                labels = self.labels.part(active.start, active.stop)
                loss = weighted_loss(self.outputs.formed(copies), labels, weight, self.loss_fn)
            reported.append(_reported(self.get_additional_losses) if weight else {})
            runs.append((leaves, loss))
        # backwards in reverse; a product of gradient and output tells the size of a term of the loss
        for slice_id, (leaves, loss) in reversed(list(enumerate(runs))):
            if loss.requires_grad:
                with push_slice(slicing.active(slice_id, "recompute")):
                    loss.backward()
            for leaf in (each for each in leaves if each.grad is not None):
                terms = (leaf.grad.float() * leaf.detach().float()).nan_to_num(0.0, 0.0, 0.0)
                size = max(size, float(terms.abs().sum()))
        slicing.store.reset()
        gradients = self.outputs.gradients(slicing, [leaves for leaves, _ in runs])
        values = torch.stack([loss.detach().double().reshape(()) for _, loss in runs])
        return Losses(values, gradients, size, reported)
