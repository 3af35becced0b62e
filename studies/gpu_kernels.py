"""Measure on a GPU which kernels slices should call: for weight gradients into fp32 sums, and for attention.

    python -m studies.gpu_kernels [--json FILE]

Medians in milliseconds of the device's own clock. "as DeepSpeed adds" is what its BF16_Optimizer does with the gradient
of each micro-batch: it zeroes `.grad`, adds the product, casts and adds to the fp32 sum. Attention is forward and
backward of a slice in bf16: one call of torch's FlashAttention kernel, or two calls of cuDNN's.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from terapipe_ds.attention.backends.base import Queries
from terapipe_ds.attention.backends.flash_attn import CudaFlash
from terapipe_ds.attention.backends.fused import Cudnn

PRODUCTS = ((512, 4096, 14336), (1024, 4096, 14336), (2048, 4096, 14336), (4096, 4096, 14336), (1024, 4096, 4096))
"""(tokens, in, out)."""
SLICES = ((32, 8, 1024, 7168), (32, 8, 1024, 31744), (32, 8, 4096, 28672), (32, 32, 2048, 6144), (32, 8, 2048, 129024))
"""(query heads, key heads, tokens, tokens before them), heads of 128."""
_RUNS = 15


def measured_ms(run: Callable[[], object]) -> float:
    """Return the median of the device's milliseconds of `run`, after three runs to warm up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def products(tokens: int, size_in: int, size_out: int) -> dict[str, Any]:
    """Return the times of the ways to add a weight gradient to its fp32 sum."""
    inputs, rows = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (size_in, size_out))
    total, grad = (torch.zeros(size_out, size_in, device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16))
    expected = rows.double().T @ inputs.double()

    def fused() -> None:
        torch.addmm(total, rows.T, inputs, out_dtype=torch.float32, out=total)

    def as_deepspeed() -> None:
        grad.zero_()
        grad.add_(rows.T @ inputs)
        total.add_(grad.to(torch.float32))

    fused()
    error = float((total.double() - expected).norm() / expected.norm())
    ways = {
        "product alone": lambda: rows.T @ inputs,
        "one pass": fused,
        "product, then add": lambda: total.add_(rows.T @ inputs),
        "as DeepSpeed adds": as_deepspeed,
    }
    times = {name: measured_ms(run) for name, run in ways.items()}
    return {"tokens": tokens, "in": size_in, "out": size_out, "error": error, "ms": times}


def attention(heads: int, kv_heads: int, tokens: int, before: int) -> dict[str, Any]:
    """Return the times of forward and backward of a slice by each kernel."""
    q, grad = (torch.randn(1, heads, tokens, 128, device="cuda").bfloat16() for _ in range(2))
    keys, values = (torch.randn(1, kv_heads, before + tokens, 128, device="cuda").bfloat16() for _ in range(2))
    queries, times = Queries(q, keys, values, before, 128**-0.5), {}
    kernels: tuple[CudaFlash | Cudnn, ...] = (CudaFlash(), Cudnn())
    for kernel in kernels:
        backward = functools.partial(kernel.backward, grad, queries, kernel.forward(queries), _drop)
        times[kernel.name] = [measured_ms(functools.partial(kernel.forward, queries)), measured_ms(backward)]
    return {"heads": heads, "kv_heads": kv_heads, "tokens": tokens, "before": before, "ms": times}


def _drop(offset: int, dk: torch.Tensor, dv: torch.Tensor, again: bool = False) -> None:
    """Accept gradients of keys and values, and keep nothing."""


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row per measurement, and print it."""
    for sizes in PRODUCTS:
        yield products(*sizes)
    for shape in SLICES:
        yield attention(*shape)


def main() -> int:
    """Measure, print, and write the rows; 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu_kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels: torch sees no CUDA device here", file=sys.stderr)
        return 2
    found = []
    for row in rows():
        found.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
