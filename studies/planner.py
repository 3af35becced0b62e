"""How long the slice program takes, scalar cost calls included, and whether its plan is proven to be the best.

    python -m studies.planner

Costs have a launch floor, grow with the tokens of a slice and, by attention, with its prefix. Their shapes: "b = 2f",
"b ~ 2f" (2f with 0.1% of noise), "b = 1.5f + c", and "measured" (2% of noise on f and b each: nothing is smooth).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from studies.options import study_parser
from studies.slice_program import solve
from terapipe_ds.bench.ranks import progress_bar

Result = TypeVar("Result")

SHAPES = ("b = 2f", "b ~ 2f", "b = 1.5f + c", "measured")
CASES = ((64, 32, (8,)), (256, 8, (8, 48, 96)), (2048, 64, (8, 48, 96)))  # granules, tokens each, numbers of stages


class Noisy:
    """Hold a smooth cost and a table of factors, drawn beforehand so that a call stays as cheap as a lookup."""

    def __init__(self, sequence_length: int, shape: str, seed: int = 0) -> None:
        self.length, self.shape = sequence_length, shape
        rng = random.Random(seed)
        spread = {"b ~ 2f": (0.0, 1e-3), "measured": (0.02, 0.02)}.get(shape, (0.0, 0.0))
        self.forward_factors, self.backward_factors = ([rng.gauss(1.0, s) for _ in range(4093)] for s in spread)

    def forward_s(self, tokens: int, prefix: int) -> float:
        """Return seconds: at least 0.6 ms, else 1 us per token, twice that with a prefix of the whole sequence."""
        seconds = tokens * (1.0 + (prefix + 0.5 * tokens) / self.length) * 1e-6
        return max(6e-4, seconds) * self.forward_factors[(tokens * 31 + prefix * 17) % 4093]

    def backward_s(self, tokens: int, prefix: int) -> float:
        """Return seconds, by the shape."""
        seconds = max(6e-4, tokens * (1.0 + (prefix + 0.5 * tokens) / self.length) * 1e-6)
        factor = self.backward_factors[(tokens * 31 + prefix * 17) % 4093]
        return 1.5 * seconds + 5e-4 if self.shape == "b = 1.5f + c" else 2.0 * seconds * factor


@dataclass(frozen=True)
class SolveTime:
    """Hold one line of the table: the median of the repeats, and the resulting plan."""

    granules: int
    num_stages: int
    shape: str
    calls_s: float
    seconds: float
    optimal: bool
    num_programs: int
    num_slices: int


def measure(granules: int, granularity_tokens: int, num_stages: int, shape: str, repeats: int) -> SolveTime:
    """Time `solve` with one micro-batch, and the scalar cost calls alone."""
    length = granules * granularity_tokens
    costs = Noisy(length, shape)
    calls_s, _ = _timed(lambda: _call_all(costs, length, granularity_tokens), repeats)
    seconds, solution = _timed(lambda: solve(costs, length, num_stages, 1, granularity_tokens), repeats)
    proof = solution.optimal, solution.num_programs, solution.plan.num_slices
    return SolveTime(granules, num_stages, shape, calls_s, seconds, *proof)


def _call_all(costs: Noisy, length: int, granularity_tokens: int) -> None:
    for function in (costs.forward_s, costs.backward_s):
        for prefix in range(0, length, granularity_tokens):
            for tokens in range(granularity_tokens, length - prefix + 1, granularity_tokens):
                function(tokens, prefix)


def _timed(run: Callable[[], Result], repeats: int) -> tuple[float, Result]:
    """Return the median seconds, and the result of the last run."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), result


def describe_machine() -> str:
    """Return processor and versions, as printed above the table."""
    return f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"


def print_table(rows: Sequence[SolveTime]) -> None:
    """Print the measured rows as a table for people."""
    print(describe_machine())
    print(f"{'granules':>8} {'K':>3} {'costs':<13} {'calls alone':>12} {'in all':>10}  optimal programs slices")
    for row in rows:
        print(
            f"{row.granules:>8} {row.num_stages:>3} {row.shape:<13} {row.calls_s:>10.3f} s {row.seconds:>8.3f} s  "
            f"{'yes' if row.optimal else 'no':<7} {row.num_programs:>8} {row.num_slices:>6}"
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = study_parser("planner", __doc__)
    parser.add_argument("--granules", type=int, nargs="+", default=[granules for granules, *_ in CASES])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(arguments)
    known = {granules: (tokens, stages) for granules, tokens, stages in CASES}
    cases = [(n, *known.get(n, (64, (8, 48, 96)))) for n in args.granules]
    todo = [(n, tokens, k, shape) for n, tokens, stages in cases for k in stages for shape in args.shapes]
    with progress_bar(0, len(todo), "programs") as bar:
        rows = []
        for case in todo:
            rows.append(measure(*case, args.repeats))
            bar.update()
    if args.json:
        print(json.dumps({"machine": describe_machine(), "rows": [asdict(row) for row in rows]}))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
