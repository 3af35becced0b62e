"""Measure what slicing costs in attention: forward and backward of all slices against one unsliced fused call.

Both sides compute the same outputs and gradients from the same inputs, laid out as a projection gives them
([B, T, H * D], viewed as [B, H, T, D]). They run in turns in one process, and the ratio is taken within each turn, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, set_backend, sliced_attention
from terapipe_ds.attention.backends import available_backends, backend_name
from terapipe_ds.plan import SlicePlan

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def one_attention(device: str, dtype: torch.dtype, head_dim: int) -> Iterator[str]:
    """Have one kernel compute the attention of slices and of whole sequences inside; yield its name.

    Torch may take another kernel for whole sequences than slices have, or the flash-attn package may be there for
    slices: their ratio would compare kernels rather than slices. On CPUs there is one fused kernel. What no fused
    kernel takes for slices (fp32 on a device) is left to torch for whole sequences, and the name says so.
    """
    if device == "cpu":
        yield backend_name(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    elif dtype in _HALF and head_dim % 8 == 0 and head_dim <= 256:
        name = "cuda_flash"
        if "cudnn" in available_backends():  # and where it is the faster one
            chosen = backend_name(torch.empty(1, 16, 1, head_dim, dtype=dtype, device=device))
            name = chosen if chosen == "cudnn" else name
        set_backend(name)
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION):
                yield name
        finally:
            set_backend(None)
    else:
        yield "reference for slices, torch's choice for whole sequences"


@dataclass(frozen=True)
class Shape:
    """The attention that is measured: batch, query heads, key/value heads, head dim, sequence length, dtype name."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence_length: int
    dtype: str


@dataclass(frozen=True)
class SlicingCost:
    """What a number of slices costs: medians over the repeats; `ratio` is that of sliced over unsliced in a turn."""

    num_slices: int
    unsliced_s: float
    sliced_s: float
    ratio: float
    store_bytes: int


class Sides:
    """Both sides with the same numbers: leaves [B, T, H * D] of q, k, v, whole and cut into slices."""

    def __init__(self, shape: Shape, num_slices: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        columns = [h * shape.head_dim for h in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)]
        *inputs, self.grad = (
            torch.randn(shape.batch, shape.sequence_length, n, generator=generator).to(device, dtype_of(shape.dtype))
            for n in columns
        )
        plan = SlicePlan.equal(shape.sequence_length, num_slices)
        self.head_dim, self.store = shape.head_dim, SliceStore()
        self.slices = [
            ActiveSlice(*plan.span(i), plan.sequence_length, slice_id=i, store=self.store) for i in range(num_slices)
        ]
        self.whole = [x.clone().requires_grad_() for x in inputs]
        self.parts = [[x[:, s.start : s.stop].clone().requires_grad_() for x in inputs] for s in self.slices]
        self.part_grads = [self.grad[:, s.start : s.stop].clone() for s in self.slices]

    def run_unsliced(self) -> tuple[Tensor, ...]:
        """Run forward and backward in one fused call; return the gradients of q, k and v."""
        q, k, v = (self._heads(x) for x in self.whole)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return torch.autograd.grad(_tokens_first(out), self.whole, self.grad)

    def run_sliced(self) -> list[tuple[Tensor, ...]]:
        """Run all forwards, then all backwards in reverse; return the gradients of each slice."""
        outs, grads = [], []
        for active, inputs in zip(self.slices, self.parts, strict=True):
            q, k, v = (self._heads(x) for x in inputs)
            with push_slice(active):
                outs.append(_tokens_first(sliced_attention(q, k, v, layer=0)))
        for i in reversed(range(len(self.slices))):
            with push_slice(self.slices[i].replace(mode="recompute")):
                grads.append(torch.autograd.grad(outs.pop(), self.parts[i], self.part_grads[i]))
        self.store.release(0, 0)
        return grads[::-1]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


def _tokens_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def measure(shape: Shape, num_slices: int, repeats: int, device: str = "cpu", clock: str = "wall") -> SlicingCost:
    """Time forward + backward of both sides in turns, after two turns to warm up."""
    sides = Sides(shape, num_slices, device)
    runs = sides.run_unsliced, sides.run_sliced
    pairs = [tuple(timed(run, device, CLOCKS[clock]) for run in runs) for _ in range(repeats + 2)][2:]
    unsliced, sliced = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(s / u for u, s in pairs)
    return SlicingCost(num_slices, unsliced, sliced, ratio, sides.store.reserved_bytes())


def timed(run: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    """Return the seconds by `clock` until the device has finished `run`."""
    begin = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin
