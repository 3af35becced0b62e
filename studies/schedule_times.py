"""How long a schedule takes before anything runs: to build, prove, lower for one stage, and simulate.

python -m studies.schedule_times --stages 64 --micro-batches 256 --slices 8
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import SCHEDULE_NAMES, build, validate
from terapipe_ds.simulator import UnitCosts, simulate


def times_s(name: str, stages: int, micro_batches: int, slices: int) -> dict[str, float]:
    """Return the CPU seconds of each step, of a new schedule."""
    times, clock = {}, time.process_time
    start_s = clock()
    schedule = build(name, stages, micro_batches, slices)
    times["build"], start_s = clock() - start_s, clock()
    validate(schedule)
    times["validate"], start_s = clock() - start_s, clock()
    schedule.for_stage(stages // 2)
    times["lower"], start_s = clock() - start_s, clock()
    simulate(schedule, SlicePlan((1024,) * slices), UnitCosts(1024 * slices))
    times["simulate"] = clock() - start_s
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedule", default="seq1f1b", choices=SCHEDULE_NAMES)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=256)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many is printed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    sizes = args.stages, args.micro_batches, args.slices
    runs = [times_s(args.schedule, *sizes) for _ in range(args.repeats)]
    result: dict[str, Any] = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.schedule}, {' x '.join(map(str, sizes))}: CPU seconds, median of {args.repeats}")
    for step in runs[0]:
        print(f"  {step:8} {result[step]:.3f}")
    print(f"peak memory of the process: {result['peak_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
