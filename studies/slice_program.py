"""Run the slice program alone: the best plan for equal stages under fill-drain, `plan_slices`'s "terapipe"."""

from __future__ import annotations

import dataclasses
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import check_count
from terapipe_ds.planner.slice_program.branch_and_bound import Objective, search_plans
from terapipe_ds.planner.slice_program.cost_table import tabulate


@dataclasses.dataclass(frozen=True)
class SliceSolution:
    """Hold a plan, its seconds and a proven lower bound."""

    plan: SlicePlan
    predicted_s: float
    optimal: bool  # no plan takes less
    lower_bound_s: float  # proven: no plan takes less than this
    sum_s: float  # forward and backward of the slices of one micro-batch
    max_forward_s: float  # of a slice with its transfer
    max_backward_s: float
    num_programs: int  # dynamic programs that were run


def solve(
    costs: Any,
    sequence_length: int,
    num_stages: int,
    num_micro_batches: int = 1,
    granularity_tokens: int = 64,
    max_slices: int | None = None,
    max_work: float | None = None,
) -> SliceSolution:
    """Return the best cut of a sequence at multiples of `granularity_tokens` for K equal stages, m micro-batches.

    `costs` has `forward_s(tokens, prefix)`, `backward_s(tokens, prefix)` and perhaps `send_s(tokens)`, in seconds; see
    `tabulate`. All forwards run, then all backwards, and the micro-batches share the plan, so that

        T = m * sum(f + b) + (K - 1) * (max f' + max b'),    f' = f + send, b' = b + send

    over the slices: the last stage works without a pause once it is reached, and the pipeline fills and drains at the
    pace of its slowest slice (Li et al., ICML 2021, section 3.3, whose t counts forward and backward together). T is
    exact where no slice's transfer takes longer than its own computation; slower links make the true time longer. The
    minimum is over *all* cuts, and proven, always up to 64 granules. Of equally good plans with the same maxima it is
    one with the fewest slices.

    `max_work` bounds the search, in array elements, so that results do not depend on the machine's speed (default: none
    up to 64 granules, else some ten seconds' worth). Past it the best plan met so far is returned, not `optimal`.

    Raises:
        PlannerError: a number is not an integer of at least 1, the granularity is larger than the sequence, or a time
            is NaN, negative or infinite.
    """
    micro_batches = check_count("num_micro_batches", num_micro_batches)
    bubble = check_count("num_stages", num_stages) - 1
    max_slices = None if max_slices is None else check_count("max_slices", max_slices)
    # each slice's cost is requested once; the search only sees arrays
    band = tabulate(costs, sequence_length, granularity_tokens).band
    search = search_plans(band, Objective(micro_batches, bubble), max_slices, max_work)
    best = search.best
    plan = SlicePlan.of_granules(best.lengths, sequence_length, granularity_tokens)
    parts = best.sum_s, best.max_forward_s, best.max_backward_s
    return SliceSolution(plan, search.best_s, search.optimal, search.lower_bound_s, *parts, search.num_programs)
