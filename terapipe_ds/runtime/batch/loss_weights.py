"""Weight the losses of slices, so that their sum equals the result of `loss_fn` on the whole sequence.

The weights are the numbers of valid labels (`mean_valid`) or of tokens (`mean`), or all one (`sum`), or the results of
`loss_fn.slice_weight(labels)`. With `mean_of_step` `loss_fn` is a mean over valid labels as well, and the weights then
count the labels of all micro-batches and data-parallel ranks alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.messages import show_key
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, UncutLabels


class SliceLossError(ValueError):
    """Say that the losses of the slices cannot be combined into the loss of the micro-batch."""


class LossKindError(SliceLossError):
    """Say that a loss is no scalar tensor."""


def weights_of(
    labels: SliceableTensors, plan: SlicePlan, config: TeraPipeConfig, loss_fn: Any, reduction: str | None = None
) -> tuple[float, ...]:
    """Return one factor per slice of `plan`; zeros if no label counts.

    Args:
        labels: of the whole micro-batch; the first one that has the sequence decides which labels are valid.
        loss_fn: its `slice_weight`, if it has one, replaces the reduction. A slice's factor is then its weight over the
            sum of all, which is right if `loss_fn` is a sum divided by that weight.
        reduction: replaces the config's: `mean_valid` or `mean_of_step` | `mean` | `sum`.
    """
    reduction = reduction or config.loss_reduction
    has_weights = getattr(loss_fn, "slice_weight", None) is not None
    if isinstance(labels, UncutLabels):
        return (1.0,)
    if not has_weights and reduction == "sum":
        return (1.0,) * plan.num_slices
    if not has_weights and reduction == "mean":
        return plan.shares
    counts = slice_counts(labels, plan, config, loss_fn)
    total = sum(counts) or 1.0
    return tuple(count / total for count in counts)


def slice_counts(labels: SliceableTensors, plan: SlicePlan, config: TeraPipeConfig, loss_fn: Any) -> list[float]:
    """Return how much each slice's labels count, whatever the reduction: by `slice_weight`, or the valid labels."""
    slice_weight = getattr(loss_fn, "slice_weight", None)
    if slice_weight is not None:
        weights = [float(slice_weight(labels.part(*plan.span(i)))) for i in range(plan.num_slices)]
        for i, weight in enumerate(weights):
            if not 0.0 <= weight < math.inf:
                raise SliceLossError(
                    f"loss_fn.slice_weight gives {weight:g} for slice {i} (tokens {list(plan.span(i))}): it must be a "
                    "finite number >= 0, the share of the slice in the loss of the whole sequence"
                )
        return weights
    # count the valid labels of each token over all rows; in uint8 the index -100 would be the label 156
    numbers = labels.deciding if labels.deciding.is_floating_point() else labels.deciding.long()
    valid = numbers != config.ignore_index
    dims = [d for d in range(valid.dim()) if d != labels.dim % valid.dim()]
    per_token = valid.sum(dim=dims) if dims else valid.long()  # one sum and one copy to the host, whatever the slices
    return [float(part.sum()) for part in per_token.cpu().split(list(plan.lengths))]


def counts_of(labels: SliceableTensors | None, config: TeraPipeConfig, loss_fn: Any) -> float:
    """Return how much the labels of a micro-batch count, all together."""
    if labels is None or isinstance(labels, UncutLabels):
        raise SliceLossError(
            'terapipe.loss_reduction = "mean_of_step": labels without a sequence cannot be counted; set it to "mean"'
        )
    return sum(slice_counts(labels, SlicePlan((labels.length,)), config, loss_fn))


def exact_zero(outputs: Any) -> torch.Tensor:
    """Return a scalar zero that depends on `outputs`: the backward of a slice without valid labels still runs.

    Its gradient is exactly zero, whatever the outputs are: 0 * NaN would be NaN.
    """
    tensors = floating_tensors(outputs)
    nothing = functools.reduce(torch.add, [each.unsqueeze(0)[:0].sum() for each in tensors])
    return nothing.to(torch.promote_types(tensors[0].dtype, torch.float32))


def floating_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the floating tensors among the outputs of the last layer, which `loss_fn` may take in any form."""
    leaves = (outputs,) if torch.is_tensor(outputs) else tree_leaves(outputs)
    return [each for each in leaves if torch.is_tensor(each) and each.is_floating_point()]


def weighted_loss(
    outputs: Any, labels: Any, weight: float, loss_fn: Callable[[Any, Any], Any] | None, takes_several: bool = False
) -> Any:
    """Return a slice's share in the loss of its micro-batch: a scalar with its graph, or a list of scalars.

    Without `loss_fn` outputs are losses. Only an evaluation that returns each loss takes several, as in the stock
    engine.

    Raises:
        LossKindError: the loss is something else.
    """
    # a mean over no labels is NaN, so the loss function is not called
    if weight == 0.0:
        if loss_fn is None:
            raise SliceLossError(
                "a slice has no valid label, and the model computes the loss itself (PipelineModule has no loss_fn): "
                "its mean over no labels is NaN. Give PipelineModule a loss_fn, so that such a slice can be left out."
            )
        return exact_zero(outputs)
    loss = outputs if loss_fn is None else loss_fn(outputs, labels)
    is_several = isinstance(loss, (tuple, list)) and all(map(torch.is_tensor, loss))
    if is_several and takes_several:
        return [share_of(part, weight) for part in loss]
    if not torch.is_tensor(loss) or loss.numel() != 1:
        raise LossKindError(_problem_of_kind(loss, loss_fn))
    return loss if weight == 1.0 else share_of(loss, weight)


def share_of(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return `loss * weight`, in fp32 at least: a loss in half precision is rounded only once, by its function."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight


def require_graph(loss: torch.Tensor, outputs: Any, loss_fn: Any) -> None:
    """Raise LossKindError if `outputs` wait for gradients that a loss without a graph cannot give."""
    if loss.requires_grad:
        return
    if any(torch.is_tensor(each) and each.requires_grad for each in tree_leaves(outputs)):
        raise LossKindError(
            f"{_named(loss_fn)} returned a tensor of {loss.dtype} without a graph, so that no layer gets a gradient: "
            "compute it from the outputs by torch's operations, without detach(), item(), no_grad() or integers"
        )


def require_scalars(losses: list[torch.Tensor], loss_fn: Any) -> None:
    """Raise LossKindError if one of several losses of a slice is no scalar: only scalars of slices add up."""
    shapes = [list(loss.shape) for loss in losses]
    if any(loss.numel() != 1 for loss in losses):
        raise LossKindError(
            f"{_named(loss_fn)} returned tensors of the shapes {shapes}, but each loss of a slice must be a scalar: "
            "reduce them, or evaluate with terapipe.slices 1"
        )


def _named(loss_fn: Any) -> str:
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    return "the last layer (PipelineModule has no loss_fn)" if loss_fn is None else f"loss_fn ({name})"


def _problem_of_kind(loss: Any, loss_fn: Any) -> str:
    given, fix = f"a {type(loss).__name__}", "return the loss to train on alone"
    if torch.is_tensor(loss):
        given, fix = f"shape {list(loss.shape)}", "reduce it in loss_fn and say how in terapipe.loss_reduction"
    elif isinstance(loss, Mapping):
        given, fix = f"{given} with {', '.join(map(show_key, loss)) or 'nothing'}", f'{fix}, such as result["loss"]'
    elif isinstance(loss, (tuple, list)):
        given, fix = f"{given} of {len(loss)}", f"{fix}, such as result[0]"
    return (
        f"{_named(loss_fn)} returned {given}, but the loss of a slice must be a scalar tensor: {fix}. Other values "
        "to log are for PipelineModule.get_additional_losses()"
    )
