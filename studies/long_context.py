"""Train one long sequence on two ranks, with full attention and with a window, and find what grows faster than it.

python -m studies.long_context --sequence-length 131072 --slices 64

Two processes, each pinned to its core, train a GPT of four small layers: one step in slices, and one of the stock
engine on the same tokens. The table has seconds, the largest resident memory of a rank, and the loss. With `--growth`
the rank of the first stage counts operations and Python calls at half the length and at the whole one, both in slices
of the same length. Whatever is linear doubles; the study names the rest.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from studies.options import study_parser, write_report
from terapipe_ds.bench.ranks import (
    USUAL_SETTINGS,
    Workload,
    build_engine,
    finish_rank,
    machine,
    micro_batches,
    prepare_rank,
    spawn_ranks,
)

EXAMPLES = """  python -m studies.long_context
  python -m studies.long_context --sequence-length 16384 --slices 32 --growth"""
LINEAR = 2.5
"""Numbers may grow by this factor from half the length to the whole: linear ones double, apart from the first slices,
quadratic ones are four times as large."""
TINY = 1000  # calls: fewer decide nothing


def work_of(arguments: argparse.Namespace, length: int) -> Workload:
    """Return the model and the batch: one sequence of that length."""
    return Workload(2, 1, length, 1, arguments.hidden, 4, arguments.heads)


def section_of(slices: int) -> dict[str, Any]:
    """Return the section for equal slices."""
    return {"enabled": True, "schedule": "seq1f1b", "slices": slices, "granularity_tokens": 1, "verify": "off"}


@contextlib.contextmanager
def window(tokens: int | None) -> Iterator[None]:
    """Give all layers of the GPT a window for the block; None: full attention."""
    from terapipe_ds.attention import sliced_attention
    from terapipe_ds.models import gpt

    windowed = functools.partial(sliced_attention, window=tokens)
    with mock.patch.object(gpt, "sliced_attention", windowed) if tokens else contextlib.nullcontext():
        yield


def rank_main(
    rank: int, rendezvous: str, arguments: argparse.Namespace, system: str, span: int | None, out: str
) -> None:
    """Train one step on one of the two ranks, and leave its figures in `out`."""
    prepare_rank(rank, 2, rendezvous)
    import torch.distributed as torch_dist

    work = work_of(arguments, arguments.sequence_length)
    section = section_of(arguments.slices) if system == "slices" else None
    settings = {**USUAL_SETTINGS, **({"communication_data_type": "fp32"} if section is None else {})}
    engine, data = build_engine(section, work, ds_config=settings), micro_batches(work, 1)
    torch_dist.barrier()
    before, begin_s = _resident_bytes(), time.perf_counter()
    with window(span):
        loss = float(engine.train_batch(iter(data)))
    own = {"seconds": time.perf_counter() - begin_s, "bytes": _resident_bytes() - before, "loss": loss}
    _write(rank, own, out)
    finish_rank([engine])


def growth_main(rank: int, rendezvous: str, arguments: argparse.Namespace, span: int | None, out: str) -> None:
    """Leave in `out` what grows faster than the sequence, from half the length to the whole one."""
    prepare_rank(rank, 2, rendezvous)
    half, whole = (_counts(arguments, span, share) for share in (2, 1))
    _write(rank, grown(half, whole), out)
    finish_rank([])


def _counts(arguments: argparse.Namespace, span: int | None, share: int) -> collections.Counter[str]:
    work = work_of(arguments, arguments.sequence_length // share)
    engine, data = build_engine(section_of(arguments.slices // share), work), micro_batches(work, 1)
    with window(span):
        engine.train_batch(iter(data))
        counts = counted(lambda: engine.train_batch(iter(data)))
    engine.destroy()
    return counts


def counted(call: Any) -> collections.Counter[str]:
    """Return what `call` does, by name: calls of Python functions, and numbers that torch's operations write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: collections.Counter[str] = collections.Counter()

    class Numbers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):  # no view
                tensors = [t for t in (result if isinstance(result, tuple | list) else (result,)) if torch.is_tensor(t)]
                counts[f"numbers of {func.name()}"] += sum(t.numel() for t in tensors)
            return result

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            counts[f"calls of {code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1

    with Numbers():
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def grown(
    half: collections.Counter[str], whole: collections.Counter[str], least: int = TINY
) -> dict[str, tuple[int, int]]:
    """Return what grew by more than `LINEAR` to `least` or more, the fastest first: its numbers at both lengths."""
    found = {name: (half[name], count) for name, count in whole.items() if count > max(least, LINEAR * half[name])}
    return dict(sorted(found.items(), key=lambda item: -item[1][1] / max(1, item[1][0])))


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write(rank: int, own: dict[str, Any], out: str) -> None:
    """Gather the figures of both ranks; rank 0 writes them."""
    import torch.distributed as torch_dist

    both: list[Any] = [None, None]
    torch_dist.all_gather_object(both, own)
    if rank == 0:
        Path(out).write_text(json.dumps(both))


def run(target: Any, *arguments: Any) -> list[dict[str, Any]]:
    """Run `target` on two ranks, and return what both have written."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.json")
        spawn_ranks(target, 2, *arguments, out)
        return list(json.loads(Path(out).read_text()))


def main(argv: list[str] | None = None) -> None:
    """Train and print."""
    parser = study_parser("long_context", __doc__, writes="machine and rows", examples=EXAMPLES)
    parser.add_argument("--sequence-length", type=int, default=131072, help="tokens (default: %(default)s)")
    parser.add_argument("--slices", type=int, default=64, help="equal slices (default: %(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of the window (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=16, help="hidden size (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="attention heads (default: %(default)s)")
    parser.add_argument("--attention", choices=("both", "full", "window"), default="both", help="(default: both)")
    parser.add_argument("--no-stock", action="store_true", help="leave the stock engine out")
    parser.add_argument("--growth", action="store_true", help="count what grows faster than the length, and train not")
    arguments = parser.parse_args(argv)
    spans = {"full": None, "window": arguments.window}
    chosen = {name: span for name, span in spans.items() if arguments.attention in (name, "both")}
    rows: list[dict[str, Any]] = []
    for name, span in chosen.items():
        if arguments.growth:
            found = run(growth_main, arguments, span)[0]
            rows.append({"attention": name, "grew": found})
            print(f"{name}: grew by more than {LINEAR} from {arguments.sequence_length // 2} tokens:")
            print("\n".join(f"  {what}: {half:,} -> {whole:,}" for what, (half, whole) in found.items()) or "  nothing")
            continue
        for system in ("slices", "stock")[: 1 if arguments.no_stock else 2]:
            both = run(rank_main, arguments, system, span)
            row = {name: max(own[name] for own in both) for name in ("seconds", "bytes", "loss")}
            rows.append({"attention": name, "system": system, **row})
            figures = f"{row['seconds']:8.1f} s  {row['bytes'] / 1e6:8.0f} MB  loss {row['loss']:.7f}"
            print(f"{name:<7} {system:<7} {figures}", flush=True)
    write_report(arguments.json, machine=machine(), options=vars(arguments), rows=rows)


if __name__ == "__main__":
    main()
