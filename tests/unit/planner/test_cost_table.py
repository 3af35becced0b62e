"""Every slice is asked once, with the right numbers, and what cannot be a time is refused by name."""

import math
from typing import Any

import numpy as np
import pytest
from planner_cases import LinkCosts, TableCosts, random_costs

from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import CostSample
from terapipe_ds.planner import PlannerError
from terapipe_ds.planner.slice_program.cost_table import tabulate


def coded(sign: int = 1) -> TableCosts:
    """Times that say which pair they are of."""
    return TableCosts(lambda tokens, prefix: tokens + 1e-4 * prefix, lambda tokens, prefix: 2 * tokens + 1e-4 * prefix)


def test_a_table_by_hand() -> None:
    costs = LinkCosts(*(coded().forward, coded().backward))
    costs.send = lambda tokens: tokens / 100
    table = tabulate(costs, 100, 40)  # granules of 40, 40 and 20 tokens
    inf = math.inf
    assert table.forward_s.tolist() == [[40.0, 80.0, 100.0], [40.004, 60.004, inf], [20.008, inf, inf]]
    assert table.backward_s.tolist() == [[80.0, 160.0, 200.0], [80.004, 120.004, inf], [40.008, inf, inf]]
    assert table.send_s is not None and table.send_s.tolist() == [[0.4, 0.8, 1.0], [0.4, 0.6, inf], [0.2, inf, inf]]
    band = table.band
    assert (band.forward[1, 1], band.backward[0, 0], band.total[2, 0]) == (60.004 + 0.6, 80.4, 20.008 + 40.008)


class Vectorized:
    vectorized = True

    def __init__(self, length: int) -> None:
        self.length, self.calls = length, 0

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        assert (tokens + prefix <= self.length).all() and (tokens >= 1).all()
        self.calls += 1
        return tokens + 1e-4 * prefix

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return 2 * tokens + 1e-4 * prefix


@pytest.mark.parametrize("length", [64, 61])
def test_a_vectorized_object_gets_arrays_and_gives_the_same_table(length: int) -> None:
    costs = Vectorized(length)
    table, other = tabulate(costs, length, 8), tabulate(coded(), length, 8)
    assert costs.calls == 1
    np.testing.assert_array_equal(table.forward_s, other.forward_s)
    np.testing.assert_array_equal(table.backward_s, other.backward_s)


def test_a_vectorized_object_may_return_one_number_for_all_and_no_other_shape() -> None:
    costs = Vectorized(16)
    costs.backward_s = lambda tokens, prefix: 0.5  # type: ignore[method-assign]
    assert tabulate(costs, 16, 8).backward_s.tolist() == [[0.5, 0.5], [0.5, math.inf]]
    costs.backward_s = lambda tokens, prefix: np.ones(2)  # type: ignore[method-assign]
    with pytest.raises(PlannerError, match="backward_s of a vectorized costs object gave shape .*: return one time"):
        tabulate(costs, 16, 8)
    costs.backward_s = lambda tokens, prefix: 1.0 if tokens > 8 else 0.5  # type: ignore[method-assign]
    with pytest.raises(PlannerError, match="gave no array of one time per pair .*ambiguous.*: return one, or remove"):
        tabulate(costs, 16, 8)
    short = CostModel([CostSample(tokens, 0, 1.0, 2.0) for tokens in (4, 8)], part_id=3)
    with pytest.raises(PlannerError, match="^forward_s: part 3: tokens = 16: slices without prefix up to 8 tokens"):
        tabulate(short, 16, 8)  # the model's own words, without advice for arrays


def test_bad_times_of_vectorized_costs_and_of_links() -> None:
    costs = Vectorized(16)
    costs.forward_s = lambda tokens, prefix: np.where(prefix == 8, np.nan, 1.0)  # type: ignore[method-assign]
    with pytest.raises(PlannerError, match=r"forward_s\(tokens=8, prefix=8\) = nan: .* measure this slice again"):
        tabulate(costs, 16, 8)
    links = random_costs(np.random.default_rng(0), 16, 8, "random", links=True)
    links.send = lambda tokens: -1.0  # type: ignore[attr-defined]
    with pytest.raises(PlannerError, match=r"send_s\(tokens=8\) = -1.0"):
        tabulate(links, 16, 8)
    for wrong in (math.nan, -1e-9, math.inf):
        scalars = coded()
        scalars.forward = lambda tokens, prefix, wrong=wrong: wrong if prefix else 1.0  # type: ignore[misc]
        with pytest.raises(PlannerError, match=rf"forward_s\(tokens=8, prefix=8\) = {wrong}"):
            tabulate(scalars, 16, 8)
    scalars = coded()
    scalars.backward = lambda tokens, prefix: object()  # type: ignore[assignment,return-value]
    with pytest.raises(PlannerError, match=r"backward_s\(tokens=8, prefix=0\) = <object.*: times are finite seconds"):
        tabulate(scalars, 16, 8)
