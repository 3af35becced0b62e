"""Every schedule next to the others, simulated: rows of the table and the pictures of docs/schedules.md.

    python -m studies.schedules                             # the table, as Markdown
    python -m studies.schedules --stages 4 --json
    python -m studies.schedules --pictures docs/pictures    # a timeline of each, as SVG

A stage takes 1 s for the forward of a micro-batch and 2 s for its backward, half of it for the weight gradients; a
slice and a chunk take their share, and links cost nothing. No torch, no measurement: what the orders alone decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from studies.options import study_parser
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES, Schedule, build
from terapipe_ds.simulator import Replay, UnitCosts, simulate
from terapipe_ds.timeline.picture import draw_timelines

COLUMNS = tuple(name for name in SCHEDULE_NAMES if name not in ("terapipe", "dapple"))
"""`dapple` is `1f1b`, and `terapipe` has the memory of `gpipe` and, in slices, the time of `seq1f1b`."""
STAGES = (4, 8, 16)
COUNTS = (1, 2, 4, 8, 16)  # of micro-batches, and of slices
PICTURED = (4, 4, 2)  # stages, micro-batches, slices
_TOKENS = 240  # of a sequence: a multiple of every number of slices


@dataclass(frozen=True)
class Cell:
    """Hold one schedule of one shape; `live` counts whole micro-batches of a whole stage, whatever its parts are."""

    schedule: str
    num_stages: int
    num_micro_batches: int
    num_slices: int
    makespan_s: float
    bubble_fraction: float
    peak_live_slices: int
    live: float

    @classmethod
    def of(cls, name: str, num_stages: int, num_micro_batches: int, num_slices: int) -> Cell:
        """Simulate the schedule."""
        schedule = _built(name, num_stages, num_micro_batches, num_slices)
        share = schedule.num_stages / schedule.num_parts  # of a stage's layers, that a part holds
        costs = UnitCosts(_TOKENS, share=share)
        makespan_s = Replay(schedule).makespan(SlicePlan.equal(_TOKENS, num_slices), costs)
        peak = max(schedule.peak_live_slices())
        bubble = max(1.0 - 3.0 * num_micro_batches / makespan_s, 0.0)
        return cls(name, num_stages, num_micro_batches, num_slices, makespan_s, bubble, peak, peak * share / num_slices)

    def __str__(self) -> str:
        return f"{self.makespan_s:.2f} / {100 * self.bubble_fraction:.0f} % / {self.live:.3g}"


def rows(stages: Sequence[int] = STAGES) -> Iterator[list[Cell]]:
    """Yield one list per shape, with a cell per schedule."""
    for num_stages in stages:
        for num_micro_batches in COUNTS:
            for num_slices in COUNTS:
                yield [Cell.of(name, num_stages, num_micro_batches, num_slices) for name in COLUMNS]


def markdown(table: Sequence[Sequence[Cell]]) -> str:
    """Return the table, a line per shape; the least makespan of a line is bold."""
    lines = [f"| K | m | s | {' | '.join(COLUMNS)} |", "|" + "---|" * (3 + len(COLUMNS))]
    for cells in table:
        least_s = min(cell.makespan_s for cell in cells) * (1 + 1e-9)
        shown = [f"**{cell}**" if cell.makespan_s <= least_s else str(cell) for cell in cells]
        first = cells[0]
        shape = f"{first.num_stages} | {first.num_micro_batches} | {first.num_slices}"
        lines.append(f"| {shape} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw(directory: str | Path) -> list[Path]:
    """Draw a timeline of every schedule, `schedule-NAME.svg`; `dapple` with its policy B."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    paths = []
    for name in SCHEDULE_NAMES:
        schedule = build("dapple", *PICTURED, policy="B") if name == "dapple" else _built(name, *PICTURED)
        costs = UnitCosts(_TOKENS, share=schedule.num_stages / schedule.num_parts)
        paths.append(Path(directory) / f"schedule-{name}.svg")
        timeline = simulate(schedule, SlicePlan.equal(_TOKENS, PICTURED[2]), costs)
        draw_timelines([(timeline.name, timeline)], paths[-1])
    return paths


def _built(name: str, num_stages: int, num_micro_batches: int, num_slices: int) -> Schedule:
    chunks = 2 if name in CHUNKED_SCHEDULES else 1
    return build(name, num_stages, num_micro_batches, num_slices, chunks_per_stage=chunks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or draw."""
    parser = study_parser("schedules", __doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES, metavar="K", help="even numbers (4 8 16)")
    parser.add_argument("--pictures", metavar="DIR", help="draw a timeline of each schedule there instead")
    options = parser.parse_args(arguments)
    if options.pictures:
        print("\n".join(map(str, draw(options.pictures))))
        return
    table = list(rows(options.stages))
    if options.json:
        print(json.dumps([asdict(cell) for cells in table for cell in cells], indent=1))
    else:
        print(markdown(table))


if __name__ == "__main__":
    main()
