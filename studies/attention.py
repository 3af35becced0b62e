"""What slicing costs in attention: forward and backward of all slices against one unsliced fused call.

python -m studies.attention --slices 1 2 4 8 16
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch

from studies.options import study_parser
from terapipe_ds.attention import set_backend
from terapipe_ds.bench.attention import CLOCKS, Shape, SlicingCost, dtype_of, measure, one_attention
from terapipe_ds.runtime.profiling.key import device_name


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
            set_backend(None)  # for whoever called this from a program of their own
    if args.json:
        found = {"device": describe_device(args.device), "attention": attention, "shape": asdict(shape)}
        print(json.dumps({**found, "rows": [asdict(row) for row in rows]}))
    else:
        print_table(shape, rows, args.device, attention)


if __name__ == "__main__":
    main()
