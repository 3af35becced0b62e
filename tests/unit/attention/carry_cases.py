"""What the tests of carried states share: a layer run over slices as an engine does it, and on each document alone."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_cases import slices_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import SliceStore, push_slice
from terapipe_ds.attention.document_edges import Starts

Layer = Callable[[Tensor], Tensor]

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "off": lambda function, x: function(x),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non_reentrant": functools.partial(checkpoint, use_reentrant=False),
}


def random_input(shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_parameters(layer: nn.Module) -> None:
    """Draw weights that are large enough for far tokens to matter."""
    for index, parameter in enumerate(layer.parameters()):
        with torch.no_grad():
            parameter.copy_(random_input(parameter.shape, 1000 + index) / max(1, parameter.shape[-1]) ** 0.5)


def gradients_of(layer: Any) -> list[Tensor]:
    """Take the gradients of a layer's parameters."""
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def run_sliced(
    layer: Layer,
    x: Tensor,
    grad: Tensor,
    lengths: Sequence[int],
    starts: Starts | None = None,
    recompute: str = "off",
    store: SliceStore | None = None,
) -> list[Tensor]:
    """Output, gradient of the input and of the parameters, of a layer on slices of [B, L, ...]."""
    store = store or SliceStore()
    slices = slices_of(lengths, store, starts)
    leaves = [x[:, s.start : s.stop].clone().requires_grad_() for s in slices]
    outs = []
    for active, leaf in zip(slices, leaves, strict=True):
        with push_slice(active):
            outs.append(CHECKPOINTS[recompute](layer, leaf))
    whole = torch.cat([out.detach() for out in outs], 1)
    while outs:
        active = slices[len(outs) - 1]
        with push_slice(active.replace(mode="recompute")):
            outs.pop().backward(grad[:, active.start : active.stop])
    store.release(0, 0)
    store.assert_drained()
    assert store.pool.live_bytes == 0
    return [whole, torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None], 1), *gradients_of(layer)]


def evaluate_sliced(layer: Layer, x: Tensor, lengths: Sequence[int], starts: Starts | None = None) -> Tensor:
    """Output of a layer on slices, without gradients."""
    store, outs = SliceStore(), []
    with torch.no_grad():
        for active in slices_of(lengths, store, starts):
            with push_slice(active.replace(mode="eval")):
                outs.append(layer(x[:, active.start : active.stop].clone()))
    store.release(0, 0)
    store.assert_drained()
    return torch.cat(outs, 1)


def run_alone(layer: Layer, x: Tensor, grad: Tensor, starts: Starts | None = None) -> list[Tensor]:
    """The same of each document alone, unsliced: the layer has no slice and no store."""
    leaf, outs = x.clone().requires_grad_(), []
    for row, of_row in enumerate(starts or ((0,),) * len(x)):
        spans = itertools.pairwise([*of_row, x.shape[1]])
        outs.append(torch.cat([layer(leaf[row : row + 1, start:stop]) for start, stop in spans], 1))
    out = torch.cat(outs)
    out.backward(grad)
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *gradients_of(layer)]


def largest_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of the tensors, of which the largest is the measure of small ones."""
    norms = [float(each.detach().norm()) for each in expected]
    errors = [float((a.detach() - b.detach()).norm()) for a, b in zip(results, expected, strict=True)]
    return max(error / max(norm, 1e-3 * max(norms)) for error, norm in zip(errors, norms, strict=True))
