"""What slicing costs in attention: forward and backward of all slices against one unsliced fused call.

python -m studies.attention --slices 1 2 4 8 16

Both sides compute the same outputs and gradients from the same inputs, laid out as a projection gives them
([B, T, H * D], viewed as [B, H, T, D]). They run in turns in one process, and the ratio is taken within each turn, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from studies.options import study_parser
from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, set_backend, sliced_attention
from terapipe_ds.bench.drivers.base import one_attention
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.profiling.key import device_name

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Shape:
    """Describe the measured attention: batch, query heads, key/value heads, head dim, sequence length, dtype name."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence_length: int
    dtype: str


@dataclass(frozen=True)
class SlicingCost:
    """Hold the cost of a number of slices: medians over the repeats; `ratio` is sliced over unsliced within a turn."""

    num_slices: int
    unsliced_s: float
    sliced_s: float
    ratio: float
    store_bytes: int


class Sides:
    """Hold both sides with the same numbers: leaves [B, T, H * D] of q, k, v, whole and cut into slices."""

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
    return SlicingCost(num_slices, unsliced, sliced, ratio, sides.store.pool.reserved_bytes)


def timed(run: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    """Return the seconds by `clock` until the device has finished `run`."""
    begin = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin


def describe_device(device: str) -> str:
    """Return device, threads and versions, as printed above every table."""
    name = device_name(torch.device(device))
    if device == "cpu":
        name += f" ({torch.backends.cpu.get_cpu_capability()})"
    return f"{name}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}"


def print_table(shape: Shape, rows: Sequence[SlicingCost], device: str, attention: str) -> None:
    """Print the measured rows as a table for people."""
    print(describe_device(device))
    print(
        f"forward + backward of causal attention, B={shape.batch}, H={shape.heads}, H_kv={shape.kv_heads}, "
        f"D={shape.head_dim}, L={shape.sequence_length}, {shape.dtype}; attention {attention}"
    )
    print(f"{'slices':>7} {'unsliced':>12} {'sliced':>12} {'ratio':>7} {'store':>10}")
    for row in rows:
        print(
            f"{row.num_slices:>7} {row.unsliced_s * 1e3:>9.1f} ms {row.sliced_s * 1e3:>9.1f} ms {row.ratio:>7.3f} "
            f"{row.store_bytes / 2**20:>6.1f} MiB"
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = study_parser("attention", __doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of equal slices")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--clock",
        default="wall",
        choices=sorted(CLOCKS),
        help="cpu: the process's CPU time, for a machine that is busy",
    )
    parser.add_argument("--backend", default=None, help="force a backend (default: automatic)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    shape = Shape(args.batch, args.heads, args.kv_heads or args.heads, args.head_dim, args.sequence_length, args.dtype)
    with one_attention(args.device, dtype_of(args.dtype), args.head_dim) as attention:
        try:
            if args.backend is not None:
                set_backend(args.backend)
                attention = f"{args.backend} for slices, {attention} for whole sequences"
            rows = [measure(shape, n, args.repeats, args.device, args.clock) for n in args.slices]
        finally:
            set_backend(None)  # for callers from another program
    if args.json:
        found = {"device": describe_device(args.device), "attention": attention, "shape": asdict(shape)}
        print(json.dumps({**found, "rows": [asdict(row) for row in rows]}))
    else:
        print_table(shape, rows, args.device, attention)


if __name__ == "__main__":
    main()
