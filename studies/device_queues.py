"""Which schedules hang where the streams of a GPU share hardware queues: `python -m studies.device_queues`.

Each row tells it for receives that are all posted ahead, and for one receive per wire, as the engine has it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from studies.options import study_parser
from terapipe_ds.schedule import build
from terapipe_ds.simulator.device_queues import hangs, programs_of

TABLE = [
    ("1f1b", 1, True), ("dapple", 1, True), ("gpipe", 1, True), ("zb-h1", 1, True), ("interleaved", 2, True),
    ("terapipe", 1, False), ("seq1f1b", 1, False), ("seq1f1b-zb", 1, False), ("seq1f1b-interleaved", 2, False),
    ("seq1f1b-interleaved-zb", 2, False), ("zbv", 2, False), ("chimera", 2, True), ("chimera-seq", 2, False),
]  # fmt: skip
"""Every schedule: name, chunks per stage, whether it is made for whole sequences; it is tried with cut ones too."""
SIZES = ((2, 4, 4), (4, 8, 4), (8, 8, 8))
"""Stages, micro-batches and slices."""


@dataclass(frozen=True)
class Row:
    """Hold the result of one schedule: for 8 and 32 queues, how many of the tried mappings of streams hang."""

    schedule: str
    stages: int
    micro_batches: int
    slices: int
    one_receive: bool
    one_queue_hangs: bool
    of_8_queues: int
    of_32_queues: int


def rows(tries: int, sizes: Sequence[tuple[int, int, int]] = SIZES) -> Iterator[Row]:
    """Yield the rows of all schedules."""
    for name, chunks, is_whole in TABLE:
        for stages, micro_batches, slices in sizes:
            for num_slices, limit in itertools.product((1, slices) if is_whole else (slices,), (None, 1)):
                shape = stages, micro_batches, num_slices
                schedule = build(name, *shape, chunks_per_stage=chunks)
                programs = programs_of(schedule, limit)
                by_chance = [sum(hangs(programs, size, seed) for seed in range(tries)) for size in (8, 32)]
                yield Row(name, *shape, limit == 1, hangs(programs, 1), *by_chance)


def main(words: list[str] | None = None) -> None:
    """Print a table, or one JSON object."""
    parser = study_parser("device_queues", __doc__)
    parser.add_argument("--tries", type=int, default=60, help="mappings of streams to queues (default: %(default)s)")
    options = parser.parse_args(words)
    if options.json:
        print(json.dumps({"tries": options.tries, "rows": [asdict(row) for row in rows(options.tries)]}))
        return
    for row in rows(options.tries):
        how = "one receive per wire" if row.one_receive else "all posted ahead"
        one = "hangs" if row.one_queue_hangs else "runs"
        print(
            f"{row.schedule:20} K={row.stages} m={row.micro_batches} s={row.slices} {how:21} one queue {one:5}  "
            f"hang of {options.tries}: {row.of_8_queues:2} with 8 queues, {row.of_32_queues:2} with 32"
        )


if __name__ == "__main__":
    main()
