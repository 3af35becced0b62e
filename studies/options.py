"""Options and data that the studies of whole steps share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from terapipe_ds.bench.ranks import Workload, micro_batches

_USUAL = {
    "stages": (2, "pipeline stages, one process each"),
    "accumulation": (1, "micro-batches per step"),
    "sequence_length": (2048, "tokens"),
    "micro_batch": (1, "sequences per micro-batch"),
    "hidden": (512, "hidden size"),
    "layers": (8, "decoder layers"),
    "heads": (8, "attention heads"),
}


def add_workload_options(parser: argparse.ArgumentParser, known: tuple[str, ...] = (), **defaults: int) -> None:
    """Add one option for each field of `Workload` that is not `known`; `defaults` replace the usual ones."""
    for name, (usual, what) in _USUAL.items():
        if name not in known:
            default = defaults.get(name, usual)
            help_text = f"{what} (default: {default})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=help_text)


def workload_of(arguments: argparse.Namespace, **replaced: int) -> Workload:
    """Return the workload that the options describe."""
    return Workload(**{f.name: replaced.get(f.name, getattr(arguments, f.name)) for f in fields(Workload)})


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a type for options such as `--slices 1,4,8`."""
    return lambda text: [kind(part) for part in text.split(",")]


def batches(work: Workload) -> Iterator[Any]:
    """Yield the same random tokens again and again."""
    (micro_batch,) = micro_batches(work, 1)
    while True:
        yield micro_batch
