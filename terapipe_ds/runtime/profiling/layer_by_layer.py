"""Run the layers of a part one after the other, each with a graph of its own, so that each can be timed alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

Handed = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and the leaves that a layer takes in their places."""


class LayerByLayer:
    """Run layers once, each with its own graph: call it like a part, then run one backward after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]], now_s: Callable[[], float] = time.perf_counter):
        self._functions, self._now_s = tuple(functions), now_s
        self._forward_s: list[float] = []
        self._handed: list[Handed] = [[]]  # to the first layer, between the layers, and out of the last one
        self.ended_s = 0.0  # by the clock: when the last layer's outputs were handed over

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of the last layer, without the graph behind them.

        Raises:
            TypeError: a layer hands on anything but tensors in containers that torch knows.
        """
        values = _apart(inputs, self._handed[0])
        for function in self._functions:
            begin_s = self._now_s()
            outputs = function(values)
            self._forward_s.append(self._now_s() - begin_s)
            self._handed.append([])
            values = _apart(outputs, self._handed[-1])
        self.ended_s = self._now_s()
        return values

    def backward(
        self,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        after: Callable[[], Any] = lambda: None,
    ) -> list[tuple[float, float]]:
        """Return the seconds of forward and backward by layer, after the backward of the value made of the outputs.

        Each backward runs in `around()`, and before the next one `after()` is called.
        """
        seconds = []
        for forward_s in reversed(self._forward_s):
            # the leaf's gradient is the gradient of the tensor that the layer before made
            pairs = [(tensor, leaf.grad) for tensor, leaf in self._handed.pop() if tensor.requires_grad]
            pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
            with around():
                begin_s = self._now_s()
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                seconds.append((forward_s, self._now_s() - begin_s))
            after()
        return seconds[::-1]


def _apart(value: Any, handed: Handed) -> Any:
    """Return `value` with copies of leaves in place of its tensors: a layer may write its inputs in place."""

    def copy_of(item: Any) -> Any:
        if torch.is_tensor(item):
            leaf = item.detach().requires_grad_(item.requires_grad)
            handed.append((item, leaf))
            return leaf.clone()
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise TypeError(f"a layer hands on a {type(item).__name__}, which may hold tensors unseen")

    return tree_map(copy_of, value)
