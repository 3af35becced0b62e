"""What a step costs besides its layers: processor time per F + B of a slice, or of a whole micro-batch.

Two stages, a process each, train layers of almost no work with this engine, with DeepSpeed's own `PipelineEngine` and
with `Schedule1F1B` of `torch.distributed.pipelining`. All live in the same processes, each pinned to a core, and take
turns. A turn counts the processor time of the whole process, with all its threads, for steps of many micro-batches and
for steps of few. The difference over the F + B that the longer steps have more is the cost of one: the optimizer, the
start of a batch and all else that comes once per step is subtracted with the shorter ones, and shown as the rest.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from studies.options import study_parser
from studies.overhead_ranks import (
    ALONE,
    LAYERS,
    STAGES,
    SYSTEMS,
    TORCH,
    Reading,
    Shape,
    System,
    profile_main,
    rank_main,
)
from terapipe_ds.bench.ranks import machine, spawn_ranks

_EXAMPLES = """\
  python -m studies.overhead
  python -m studies.overhead --layer linear --turns 15 --json
  python -m studies.overhead --profile "terapipe seq1f1b"      # where the time goes, by function"""


@dataclass(frozen=True)
class Row:
    """Hold the figures of one system: medians over the turns, of the mean over the stages unless a stage is named."""

    name: str
    units: int
    unit_s: float
    spread_s: tuple[float, float]
    stages_s: tuple[float, ...]
    rest_s: float
    own_s: float  # the rest, without the time of the layers alone
    ratio: float  # to torch's, of the same turn

    @classmethod
    def of(cls, system: System, shape: Shape, readings: Readings) -> Row:
        """Return the row of a system among the `readings` of all, by turn and stage."""
        units = system.units(shape)
        by_turn, torch_s, alone_s = (_mean_unit_s(name, shape, readings) for name in (system.name, TORCH, ALONE))
        given = readings[system.name]
        stages = tuple(statistics.median(r.unit_s(shape, units) for r in one) for one in zip(*given, strict=True))
        rest_s = statistics.median(statistics.fmean(r.rest_s(shape, units) for r in turn) for turn in given)
        own_s = statistics.median(each - alone for each, alone in zip(by_turn, alone_s, strict=True))
        ratio = statistics.median(each / other for each, other in zip(by_turn, torch_s, strict=True))
        spread = min(by_turn), max(by_turn)
        return cls(system.name, units, statistics.median(by_turn), spread, stages, rest_s, own_s, ratio)


Readings = Mapping[str, Sequence[Sequence[Reading]]]
"""By the name of a system, turn and stage."""


def _mean_unit_s(name: str, shape: Shape, readings: Readings) -> list[float]:
    """Return the mean over the stages of each turn."""
    units = next(system for system in SYSTEMS if system.name == name).units(shape)
    return [statistics.fmean(reading.unit_s(shape, units) for reading in turn) for turn in readings[name]]


def rows_of(shape: Shape, readings: Readings) -> list[Row]:
    """Return a row per system; the rows of torch and of the layers alone must be there."""
    return [Row.of(system, shape, readings) for system in SYSTEMS if system.name in readings]


def measure(shape: Shape, names: Sequence[str], turns: int) -> dict[str, list[list[Reading]]]:
    """Return the readings of each system, by turn and stage."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(rank_main, STAGES, shape, list(names), turns, folder)
        stages = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(STAGES)]
    return {
        name: [[Reading(**one) for one in turn] for turn in zip(*(s[name] for s in stages), strict=True)]
        for name in names
    }


def profiled(shape: Shape, name: str) -> list[str]:
    """Return the functions of each stage that take most of the steps of a system."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(profile_main, STAGES, shape, name, folder)
        return [Path(folder, f"{rank}.txt").read_text() for rank in range(STAGES)]


def table(rows: Sequence[Row]) -> str:
    """Return a line per system."""
    lines = [
        f"{'system':<22}{'F + B of':>14}{'CPU each':>11}{'spread':>15}{'by stage':>17}{'rest/step':>11}{'/torch':>8}"
    ]
    for row in rows:
        what = "a slice" if row.units > 1 else "a micro-batch"
        spread = "-".join(f"{1e3 * each:.2f}" for each in row.spread_s)
        stages = " ".join(f"{1e3 * each:.3f}" for each in row.stages_s)
        lines.append(
            f"{row.name:<22}{what:>14}{1e3 * row.unit_s:>8.3f} ms{spread:>12} ms{stages:>14} ms"
            f"{1e3 * row.own_s:>9.3f} ms{1e3 * row.rest_s:>8.1f} ms{row.ratio:>8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or a profile of one system."""
    parser = study_parser("overhead", __doc__, examples=_EXAMPLES)
    for name, what in (
        ("micro_batches", "of the longer steps"),
        ("fewer", "micro-batches of the shorter steps, which are subtracted: at least 2, as many as torch needs"),
        ("slices", "of a micro-batch"),
        ("tokens", "of a micro-batch"),
        ("layers", "layers on each stage"),
        ("steps", "in a turn, of each kind"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(Shape, name)
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")
    kinds = "a product with one number per feature, or a linear layer, which the engine gives a backward of its own"
    parser.add_argument("--layer", choices=LAYERS, default=Shape.layer, help=f"{kinds} (default: {Shape.layer})")
    parser.add_argument("--turns", type=int, default=11, help="medians are over so many (default: 11)")
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--profile", metavar="SYSTEM", choices=names, help="print a profile of: " + ", ".join(names))
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in vars(Shape()) if hasattr(options, name)}
    shape = Shape(**given)
    if not STAGES <= shape.fewer < shape.micro_batches:
        parser.error(f"--fewer {shape.fewer}: at least {STAGES}, and less than --micro-batches {shape.micro_batches}")
    if options.profile:
        print("\n".join(profiled(shape, options.profile)))
        return
    about = machine()
    rows = rows_of(shape, measure(shape, names, options.turns))
    if options.json:
        shown = {
            "machine": about,
            "shape": asdict(shape),
            "turns": options.turns,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(shown))
        return
    steps = f"steps of {shape.micro_batches} micro-batches less steps of {shape.fewer}, {shape.slices} slices each"
    where = f"{about['cpu']}, {about['cores']} cores, load {about['load_before']:.1f} before, {about['date']}"
    print(f"{steps}; {options.turns} turns of {shape.steps} steps; {where}")
    print(table(rows))


if __name__ == "__main__":
    main()
