"""The slice program: where to cut a sequence so that a fill-drain pipeline takes the least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terapipe_ds.planner.equal_stages import Candidate, SliceSolution, candidates, equal_time, solve_equal
from terapipe_ds.planner.tabulate import CostTable, PlannerError, check_count, tabulate
from terapipe_ds.planner.unequal_stages import solve_unequal

__all__ = [
    "Candidate",
    "CostTable",
    "PlannerError",
    "SliceSolution",
    "candidates",
    "equal_time",
    "solve",
    "solve_equal",
    "solve_unequal",
    "tabulate",
]


def solve(
    costs: Any,
    sequence_length: int,
    num_stages: int,
    num_micro_batches: int = 1,
    granularity_tokens: int = 64,
    max_slices: int | None = None,
    max_work: float | None = None,
) -> SliceSolution:
    """The best cut of ``sequence_length`` tokens at multiples of ``granularity_tokens`` for K stages, m micro-batches.

    ``costs`` has ``forward_s(tokens, prefix)``, ``backward_s(tokens, prefix)`` and perhaps ``send_s(tokens)``, in
    seconds; each pair is asked once, with Python ints (or all pairs in one call, if ``costs.vectorized``). A list
    holds one such object per stage, first to last.

    Equal stages (one object, or the same one for every stage). All forwards run, then all backwards, and the plan is
    shared by the micro-batches, so that

        T = m * sum(f + b) + (K - 1) * (max f' + max b'),    f' = f + send, b' = b + send

    over the slices: the last stage works without a pause once it is reached, and the pipeline fills and drains at the
    pace of its slowest slice (Li et al., ICML 2021, section 3.3: the latency of one pass is the sum of all slices plus
    K - 1 times the largest; their t counts forward and backward together, which presumes that both are largest at the
    same slice). T is exact where no slice's transfer takes longer than its own computation, and links work beside the
    stages; slower links make the true time longer. The minimum is over *all* cuts, and proven: ``optimal`` is True,
    always up to 64 granules. Of equally good plans with the same maxima it is one with the fewest slices.

    Unequal stages: see `solve_unequal`.

    ``max_work`` bounds the work of the search (in array elements, so that results do not depend on the machine's
    speed; default: none up to 64 granules, else some ten seconds' worth). Past it the best plan found is returned with
    ``optimal`` False and a valid ``lower_bound_s``. ``max_slices`` (for example of a memory limit) may need more work.

    Raises:
        PlannerError: a number is not an integer of at least 1, the granularity is larger than the sequence, a list of
            costs is not as long as there are stages, or a time is NaN, negative or infinite.
    """
    num_stages = check_count("num_stages", num_stages)
    if not isinstance(costs, Sequence):
        costs = [costs] * num_stages
    if len(costs) != num_stages:
        raise PlannerError(
            f"{len(costs)} costs objects for {num_stages} stages: give one object for all stages, or a list with one "
            f"per stage"
        )
    if all(part is costs[0] for part in costs):
        table = tabulate(costs[0], sequence_length, granularity_tokens)
        return solve_equal(table, num_stages, num_micro_batches, max_slices, max_work)
    return solve_unequal(costs, sequence_length, num_micro_batches, granularity_tokens, max_slices, max_work)
