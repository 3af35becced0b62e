"""Costs that remember: the same answers, each question once, with and without a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_search import Costs, parts_of

from terapipe_ds.planner import PlannerError, plan_slices
from terapipe_ds.planner.search import cached_costs
from terapipe_ds.planner.search.cached_costs import CachedCosts, cache_parts

PAIRS = [(4, 0), (4, 4), (3, 8), (11, 0), (8, 0), (7, 4)]  # of 11 tokens cut at multiples of 4


@pytest.mark.parametrize("with_table", [True, False])
def test_answers_are_those_of_the_object(with_table: bool) -> None:
    honest, costs = Costs(1, send_s=0.5), Costs(1, send_s=0.5)
    kept = CachedCosts(costs, 11, 4, with_table)
    tokens, prefixes = (np.array(column) for column in zip(*PAIRS, strict=True))
    for _ in range(2):
        forward, backward, send = kept.times(tokens, prefixes)
        assert forward.tolist() == [honest.forward_s(*pair) for pair in PAIRS]
        assert backward.tolist() == [honest.backward_s(*pair) for pair in PAIRS]
        assert send.tolist() == [honest.send_s(i) for i, _ in PAIRS]
        assert kept.forward_s(3, 8) == honest.forward_s(3, 8)
        assert kept.send_s(7) == honest.send_s(7)
    assert set(costs.asked.values()) == {1}
    assert kept.vectorized == with_table


def test_a_part_without_links_has_none() -> None:
    kept = CachedCosts(Costs(1), 8, 2)
    assert not hasattr(kept, "send_s")
    assert kept.times(np.array([2]), np.array([0]))[2].tolist() == [0.0]


def test_parts_that_are_one_object_share_their_answers() -> None:
    one, other = Costs(1), Costs(2)
    parts = cache_parts([one, other, one], 3, 8, 2)
    assert parts[0] is parts[2] is not parts[1]
    assert len({id(part) for part in cache_parts(one, 4, 8, 2)}) == 1


def test_tables_that_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then only the slowest part has one; the plan is as good, the bound still one, and nothing is asked twice."""
    tabulated = plan_slices(parts_of(2, 3), 20, 3, 2, 1, "seq1f1b")
    monkeypatch.setattr(cached_costs, "MAX_TABLE_ELEMENTS", 100)
    parts = parts_of(2, 3)
    assert [part.table is None for part in cache_parts(parts_of(2, 3), 3, 20, 1)] == [True, True, False]
    result = plan_slices(parts, 20, 3, 2, 1, "seq1f1b")
    assert result.predicted_s == pytest.approx(tabulated.predicted_s, rel=0.02)
    assert result.lower_bound_s <= min(tabulated.predicted_s, result.predicted_s)
    assert all(set(part.asked.values()) == {1} for part in parts)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "soon"])
def test_wrong_answers_without_a_table(wrong: Any) -> None:
    costs = Costs(1, send_s=1.0)
    costs.send_s = lambda tokens: wrong
    costs.forward_s = lambda tokens, prefix: wrong  # type: ignore[method-assign]
    with pytest.raises((PlannerError, ValueError), match=r"forward_s\(tokens=4, prefix=4\)|could not convert"):
        CachedCosts(costs, 11, 4, False).forward_s(4, 4)
    with pytest.raises((PlannerError, ValueError), match=r"send_s\(tokens=4\)|could not convert"):
        CachedCosts(costs, 11, 4, False).send_s(4)
