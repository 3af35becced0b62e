"""What a window costs in slices: against torch's attention with a mask, and against compiled flex_attention.

python -m studies.windows --sequence-length 8192 --window 512 --slices 16
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from studies.attention import CLOCKS, describe_device, timed
from studies.options import study_parser
from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, sliced_attention
from terapipe_ds.plan import SlicePlan


class Windowed:
    """Run the same windowed attention in slices, with a mask [L, L], and by flex_attention."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        length, self.window = args.sequence_length, args.window
        self.q, self.k, self.v, self.grad = (
            torch.randn(args.batch, n, length, args.head_dim, generator=generator)
            for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        )
        self.grouped = args.heads != args.kv_heads
        self.plan = SlicePlan.equal(length, args.slices)
        self.store_bytes_per_token = 2 * args.batch * args.kv_heads * args.head_dim * 4
        self.peaks: dict[str, int] = {}
        self.stores = {mode: SliceStore() for mode in ("train", "eval")}  # as an engine keeps one from batch to batch
        place = torch.arange(length)
        ago = place[:, None] - place
        self.mask = (ago >= 0) & (ago < self.window)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key > query - args.window)

        self.block_mask = create_block_mask(sees, None, None, length, length, device="cpu")
        self.flex = torch.compile(flex_attention)

    def in_slices(self) -> list[Tensor]:
        """Run forwards in order and backwards in reverse; return the outputs."""
        return self._run("train")

    def evaluated_in_slices(self) -> list[Tensor]:
        """Run the forwards as in evaluation; return the outputs."""
        return self._run("eval")

    def _run(self, mode: str) -> list[Tensor]:
        store, outs, parts = self.stores[mode], [], []
        spans = list(self.plan.spans())
        slices = [ActiveSlice(*span, self.plan.sequence_length, mode=mode, store=store) for span in spans]
        for active in slices:
            whole = (self.q, self.k, self.v)
            q, k, v = (x[:, :, active.start : active.stop].detach().requires_grad_(mode == "train") for x in whole)
            parts.append((q, k, v))
            with push_slice(active):
                outs.append(sliced_attention(q, k, v, layer=0, window=self.window))
        for active, leaves, out in reversed(list(zip(slices, parts, outs, strict=True))):
            with push_slice(active.replace(mode="recompute")) if mode == "train" else nullcontext():
                if mode == "train":
                    torch.autograd.grad(out, leaves, self.grad[:, :, active.start : active.stop])
        self.peaks[mode] = store.pool.peak_bytes
        store.release(0, 0)
        return outs

    def masked(self) -> list[Tensor]:
        """Run forward and backward of torch's attention with a mask; return the output."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=self.grouped)
        torch.autograd.grad(out, (q, k, v), self.grad)
        return [out]

    def by_flex(self) -> list[Tensor]:
        """Run the forward of compiled flex_attention; return the output."""
        with torch.no_grad():
            return [self.flex(self.q, self.k, self.v, block_mask=self.block_mask, enable_gqa=self.grouped)]


def compare(
    ours: Callable[[], list[Tensor]], other: Callable[[], list[Tensor]], turns: int, clock: str
) -> dict[str, float]:
    """Time both in turns after one to warm up; return medians in seconds, and the median of the turns' ratios."""
    difference = (torch.cat(ours(), 2) - torch.cat(other(), 2)).detach().abs().max()
    pairs = [(timed(ours, "cpu", CLOCKS[clock]), timed(other, "cpu", CLOCKS[clock])) for _ in range(turns)]
    sliced, unsliced = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return {"sliced_s": sliced, "other_s": unsliced, "ratio": ratio, "largest_difference": float(difference)}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = study_parser("windows", __doc__)
    sizes = {
        "batch": 1,
        "heads": 4,
        "kv-heads": 4,
        "head-dim": 64,
        "sequence-length": 8192,
        "window": 512,
        "slices": 16,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu: the process's CPU time")
    parser.add_argument("--without-flex", action="store_true", help="leave out flex_attention, which needs a compiler")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    windowed = Windowed(args)
    rows = {"forward + backward over a mask": compare(windowed.in_slices, windowed.masked, args.repeats, args.clock)}
    if not args.without_flex:
        rows["forward over compiled flex_attention"] = compare(
            windowed.evaluated_in_slices, windowed.by_flex, args.repeats, args.clock
        )
    windowed.evaluated_in_slices()
    peaks = {mode: peak / windowed.store_bytes_per_token for mode, peak in windowed.peaks.items()}
    if args.json:
        print(json.dumps({"device": describe_device("cpu"), "rows": rows, "peak_tokens": peaks}))
        return
    print(describe_device("cpu"))
    print(", ".join(f"{name} {value}" for name, value in vars(args).items() if name != "json"))
    for name, row in rows.items():
        print(f"{name:<40} {row['sliced_s'] * 1e3:>9.1f} ms {row['other_s'] * 1e3:>9.1f} ms  ratio {row['ratio']:.3f}")
    for mode, tokens in peaks.items():
        print(f"keys, values and gradients at most, {mode}: those of {tokens:.0f} tokens")


if __name__ == "__main__":
    main()
