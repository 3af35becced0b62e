"""Keep the results of attention for a forward that runs again in its backward.

Recomputation of a layer pays for its attention twice, and in long sequences attention is nearly all of the forward. The
first forward leaves the output and the log-sum-exp of each call here, with the random state of its kernel. The second
one takes them in place of a run of the kernel: the same numbers, so that the backward has the same bits. It computes
queries, keys and values again, because the backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention.active_slice import SliceStoreError, active_slice, push_slice

States = list[tuple[Any, ...]]


@dataclass
class KeptCalls:
    """Count the calls whose results the layers of one engine have kept, so that it can warn of none."""

    num: int = 0
    has_warned: bool = False


class KeptAttention:
    """Hold results of attention between the two runs of one checkpointed function, on one slice."""

    def __init__(self, calls: KeptCalls) -> None:
        self._calls, self._has_run = calls, False
        self._kept: dict[Hashable, tuple[Tensor, States, Tensor | None]] = {}

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, whose first run keeps results and whose later ones take them."""

        def run(*inputs: Any) -> Any:
            active = active_slice()
            # a first run with gradients has a graph, whose backward needs the tensors of a second run of all
            keeps_nothing = not self._has_run and torch.is_grad_enabled()
            if active is None or not active.keeps_attention or keeps_nothing:
                return function(*inputs)
            try:
                with push_slice(active.replace(kept=self.attend)):
                    return function(*inputs)
            finally:
                self._has_run = True

        return run

    def attend(
        self, layer: Hashable, dropout_p: float, call: Callable[[], tuple[Tensor, Tensor, States]], device: torch.device
    ) -> tuple[Tensor, Tensor, States]:
        """Return the output, log-sum-exp and states of `call`, which runs unless they are kept."""
        if self._has_run and layer in self._kept:
            token, states, random = self._kept.pop(layer)
            if random is not None:  # the layer's later draws then equal the draws of its first run
                _random(device).set_rng_state(random)
            out, lse = _unpacked(layer, token)
            return out, lse, states
        out, lse, states = call()
        if not self._has_run:
            if layer in self._kept:
                problem = f"layer {layer!r}: two calls of sliced_attention() in one checkpointed range have this name"
                raise SliceStoreError(f"{problem}, and keep_attention keeps results by name: give each its own name")
            self._calls.num += 1
            # autograd saves them as it saves all tensors, so that they go to the host with the others of the slice
            with torch.enable_grad():
                token = _Saved.apply(torch.zeros((), requires_grad=True, device="cpu"), out.detach(), lse.detach())
            self._kept[layer] = token, states, _random(device).get_rng_state() if dropout_p else None
        return out, lse, states


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        ctx.save_for_backward(out, lse)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None


def _unpacked(layer: Hashable, token: Tensor) -> tuple[Tensor, Tensor]:
    try:
        out, lse = token.grad_fn.saved_tensors  # type: ignore[union-attr]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        problem = f"layer {layer!r}: it changed the output of sliced_attention() in place, but keep_attention keeps it"
        raise SliceStoreError(f"{problem}: work on a copy (out = out * gate)") from error
    return out, lse


def _random(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)
