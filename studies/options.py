"""Provide the command line of every study, and the common code of studies that train in ranks."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from terapipe_ds.bench.ranks import Workload, micro_batches, spawn_ranks
from terapipe_ds.files.atomic import write_text

_USUAL = {
    "stages": (2, "pipeline stages, one process each"),
    "accumulation": (1, "micro-batches per step"),
    "sequence_length": (2048, "tokens"),
    "micro_batch": (1, "sequences per micro-batch"),
    "hidden": (512, "hidden size"),
    "layers": (8, "decoder layers"),
    "heads": (8, "attention heads"),
}


def study_parser(name: str, doc: str | None, *, writes: str = "", examples: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m studies.NAME` with its option `--json`.

    Args:
        doc: the study's text; its first line describes the study, or the whole text if there are `examples`.
        writes: the content that `--json FILE` writes; empty: `--json` prints one JSON object instead of a table.
        examples: command lines, shown below the options.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{name}",
        description=doc if examples else (doc or "").partition("\n")[0],
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if writes:
        parser.add_argument("--json", metavar="FILE", help=f"write {writes} here")
    else:
        parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def add_step_options(parser: argparse.ArgumentParser, slices: list[int], granularity: int) -> None:
    """Add the options of studies that train with several schedules, plans and accumulations."""
    parser.add_argument("--accumulation", type=list_of(int), default=[1, 4], metavar="M[,M...]")
    parser.add_argument("--slices", type=list_of(int), default=slices, metavar="N[,N...]")
    parser.add_argument("--granularity", type=int, default=granularity, help="tokens (default: %(default)s)")
    defaults = {"hidden": 256, "heads": 4}
    for name, (usual, what) in _USUAL.items():
        if name != "accumulation":
            default = defaults.get(name, usual)
            help_text = f"{what} (default: {default})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=help_text)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the workload that the options describe, with one micro-batch per step."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Workload)}
    return Workload(**given | {"accumulation": 1})


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a type for options such as `--slices 1,4,8`."""
    return lambda text: [kind(part) for part in text.split(",")]


def batches(work: Workload) -> Iterator[Any]:
    """Yield the same random tokens again and again."""
    (micro_batch,) = micro_batches(work, 1)
    while True:
        yield micro_batch


def automatic_section(granularity_tokens: int, folder: Path) -> dict[str, Any]:
    """Return a section that measures into `folder` and plans by it."""
    section = {"enabled": True, "schedule": "seq1f1b", "slices": "auto", "granularity_tokens": granularity_tokens}
    return {**section, "planner": {"cache_dir": str(folder)}}


def measure_in_ranks(rank_main: Callable[..., None], work: Workload, arguments: argparse.Namespace) -> Any:
    """Run `rank_main(rank, rendezvous, work, arguments, out)` on every stage; return what rank 0 wrote to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "measured.json")
        spawn_ranks(rank_main, work.stages, work, arguments, out)
        return json.loads(Path(out).read_text())


def write_report(path: str | None, **report: Any) -> None:
    """Write the report as JSON, if there is a path."""
    if path:
        write_text(path, json.dumps(report, indent=1))
