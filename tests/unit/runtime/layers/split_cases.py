"""Layers whose backward is split in B and W, beside copies of their parameters that torch's autograd trains."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products

Unit = tuple[int, int, int]


def unit(part_id: int, micro_batch_id: int, slice_id: int, whole: bool = False) -> AbstractContextManager[ActiveSlice]:
    """Have a slice run: half of a sequence of ten tokens, or the whole of it."""
    stop = 10 if whole else 5
    return push_slice(ActiveSlice(0, stop, 10, micro_batch_id=micro_batch_id, slice_id=slice_id, part_id=part_id))


def assert_same(ours: nn.Module, model: nn.Module) -> None:
    """Compare the gradients of all parameters."""
    for (name, own), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (own.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-12, atol=1e-12)


class Run:
    """The same slices through both. `expected` is what torch computes with the copy, where it is not its forward."""

    def __init__(
        self, layers: nn.Module, shape: Sequence[int], units: Sequence[Unit], optimizer: Any = None,
        expected: Callable[[Any, Tensor], Tensor] = lambda plain, x: plain(x), shared: object = None,
    ) -> None:  # fmt: skip
        self.layers, self.plain, self.expected = layers, copy.deepcopy(layers, {id(shared): shared}), expected
        self.inputs = {which: torch.randn(shape, dtype=torch.float64) for which in units}
        self.gradients = accumulate_in_products(layers, optimizer)
        self.gradients.open_batch(units)

    def backward(self, units: Sequence[Unit] = (), whole: bool = False, input_needs_grad: bool = True) -> None:
        """Run F and B of each slice, and compare with torch's gradient of its inputs."""
        for which in units or self.inputs:
            own, theirs = (self.inputs[which].clone().requires_grad_(input_needs_grad) for _ in range(2))
            with unit(*which, whole=whole), self.gradients.deferred(which):
                outputs = self.layers(own)
                outputs.square().sum().backward()
            expected = self.expected(self.plain, theirs)
            expected.square().sum().backward()
            torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
            if input_needs_grad:
                torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-12, atol=1e-12)

    def weights(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[int]:
        """Run the W of all slices; return how many weight gradients each had."""
        return [self.gradients.compute(which, around) for which in self.inputs]

    def assert_same(self) -> None:
        assert_same(self.layers, self.plain)

    def deferred(self) -> set[str]:
        """Return the parameters that have no gradient yet."""
        return {name for name, parameter in self.layers.named_parameters() if parameter.grad is None}
