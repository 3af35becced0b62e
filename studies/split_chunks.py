"""Split backwards on loops and Vs next to `seq1f1b-zb`, under random costs: `python -m studies.split_chunks`.

Every case has 2, 4 or 8 stages of unequal speed, 1, 2 or 4 micro-batches of equal slices, 16 or at least 2(K - 1), W of
a fifth to a half of a backward, and attention that makes the last tokens take up to twice as long as the first. With
`--wide` it has 2 to 16 stages, 1 to 20 micro-batches and 1 to 8 slices. Links cost nothing. No stage may hold more live
tokens than `seq1f1b-zb` does; the tokens of a part count by its share of a stage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from studies.options import study_parser
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, Schedule, build
from terapipe_ds.simulator import Replay

LENGTH = 1024
NAMES = ("seq1f1b-interleaved-zb", "zbv")


@dataclass(frozen=True)
class Costs:
    """Hold the seconds of whole sequences on a stage or on a share of it."""

    forward: float
    weight: float  # share of a backward, where a token takes as long as a first one
    growth: float
    share: float = 1.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.share * self.forward * tokens / LENGTH * (1 + self.growth * prefix / LENGTH)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 2 * self.forward_s(tokens, prefix)

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.weight * 2 * self.share * self.forward * tokens / LENGTH


@dataclass(frozen=True)
class Case:
    """Hold the costs of each stage, the plan and the number of micro-batches."""

    costs: tuple[Costs, ...]
    plan: SlicePlan
    num_micro_batches: int

    @classmethod
    def random(cls, seed: int, wide: bool = False) -> Case:
        """Return the case of a seed."""
        chance = random.Random(seed)
        stages, micro_batches = chance.choice((2, 4, 8)), chance.choice((1, 2, 4))
        slices = chance.choice((16, max(2 * (stages - 1), 4)))
        if wide:
            stages, micro_batches, slices = chance.randint(2, 16), chance.randint(1, 20), chance.choice((1, 2, 4, 8))
        weight, growth = chance.uniform(0.2, 0.5), chance.random()
        costs = tuple(Costs(chance.uniform(0.08, 0.13), weight, growth) for _ in range(stages))
        return cls(costs, SlicePlan.equal(LENGTH, slices), micro_batches)

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.costs), self.num_micro_batches, self.plan.num_slices

    def seconds(self, schedule: Schedule) -> float:
        """Simulate a schedule; its parts cost their shares of a stage."""
        places = sorted((part, stage) for (stage, _), part in schedule.placement.items())
        share = schedule.num_stages / schedule.num_parts
        costs = [replace(self.costs[stage], share=share) for _, stage in places]
        return Replay(schedule).makespan(self.plan, costs)

    def live_tokens(self, schedule: Schedule) -> float:
        """Return the most tokens that a stage holds."""
        peak, share = 0.0, schedule.num_stages / schedule.num_parts
        for order in schedule.orders:
            held = 0.0
            for action in order:
                tokens = share * self.plan.lengths[action.slice_id]
                held += tokens * {Kind.FORWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
                peak = max(peak, held)
        return peak


@dataclass(frozen=True)
class Row:
    """Hold how long a schedule takes as a share of `seq1f1b-zb`."""

    seed: int
    schedule: str
    num_stages: int
    num_micro_batches: int
    num_slices: int
    max_live_slices: int
    ratio: float


def rows(seeds: Sequence[int], wide: bool = False, names: Sequence[str] = NAMES) -> Iterator[Row]:
    """Yield the rows, each with as many live slices as there are tokens for."""
    for seed in seeds:
        case = Case.random(seed, wide)
        on_a_line = build("seq1f1b-zb", *case.counts)
        least_s, most_tokens = case.seconds(on_a_line), case.live_tokens(on_a_line) * (1 + 1e-9)
        for name in names:
            limit = 2 * max(on_a_line.peak_live_slices())
            while case.live_tokens(schedule := _limited(name, case, limit)) > most_tokens:
                limit -= 1
            yield Row(seed, name, *case.counts, limit, case.seconds(schedule) / least_s)


def _limited(name: str, case: Case, limit: int) -> Schedule:
    return build(name, *case.counts, chunks_per_stage=2, max_live_slices=limit)


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each case, and the median and the worst."""
    parser = study_parser("split_chunks", __doc__)
    parser.add_argument("--seeds", type=int, default=40, metavar="N", help="cases (default: %(default)s)")
    parser.add_argument("--wide", action="store_true", help="also many stages and micro-batches, and few slices")
    options = parser.parse_args(words)
    table = list(rows(range(options.seeds), options.wide))
    if options.json:
        print(json.dumps([asdict(row) for row in table], indent=1))
        return
    for row in table:
        shape = f"K={row.num_stages} m={row.num_micro_batches} s={row.num_slices}"
        print(f"{row.seed:3} {row.schedule:23} {shape:17} max_live_slices={row.max_live_slices:3}  {row.ratio:.3f}")
    for name in NAMES:
        ratios = [row.ratio for row in table if row.schedule == name]
        print(f"{name:23} median {median(ratios):.3f}, worst {max(ratios):.3f} of the time of seq1f1b-zb")


if __name__ == "__main__":
    main()
