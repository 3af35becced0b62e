"""Settings that are ranked beside what the search finds, whatever its bounds say."""

from __future__ import annotations

from typing import Any

import pytest

from terapipe_ds.planner import PlannerError
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.strategy import Cluster, Included, rank_strategies, size_of
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate

CLUSTER = Cluster("v100", 2, 2)
SMALL: Any = {"global_batch_size": 8, "sequence_length": 1024}
SLOW = Included(stages=4, tensor_parallel=1, data_parallel=1, micro_batch=2, slices=(500, 300, 224))


def test_a_slow_setting_is_ranked_with_its_slices() -> None:
    plain = rank_strategies("mini", CLUSTER, **SMALL)
    ranked = rank_strategies("mini", CLUSTER, **SMALL, include=[SLOW])
    assert all(strategy.slices != [500, 300, 224] for strategy in plain)
    (added,) = (strategy for strategy in ranked if strategy.slices == [500, 300, 224])
    assert [strategy for strategy in ranked if strategy is not added] == plain
    assert added.grid == {"pipe": 4, "data": 1, "model": 1}
    assert (added.micro_batch_size, added.accumulation, added.schedule) == (2, 4, "seq1f1b")
    times = [strategy.predicted_s for strategy in ranked]
    assert times == sorted(times) and added.lower_bound_s <= plain[0].predicted_s


def test_its_time_is_that_of_the_simulation() -> None:
    (added,) = (s for s in rank_strategies("mini", CLUSTER, **SMALL, include=[SLOW]) if s.slices == [500, 300, 224])
    candidate = Candidate(added.layout, 2, 4, added.zero_stage)
    priced = Priced(CountedLayers(size_of("mini"), CLUSTER), CLUSTER, 1024, candidate)
    bounds = tuple(added.partition)
    events = simulate(build("seq1f1b", 4, 4, 3), added.plan, priced.parts(bounds, (False,) * 4)).events
    done_s = [max(e.end_s for e in events if e.stage_id == k and e.kind in ("F", "B")) for k in range(4)]
    assert added.predicted_s == pytest.approx(max(d + e for d, e in zip(done_s, priced.ends_s(bounds), strict=True)))


def test_a_setting_that_the_search_has_found_is_ranked_once() -> None:
    plain = rank_strategies("mini", CLUSTER, **SMALL)
    found = next(strategy for strategy in plain if strategy.chunks_per_stage == 1)
    how = found.micro_batch_size, tuple(found.slices), found.schedule
    same = Included(found.grid["pipe"], found.grid["model"], found.grid["data"], *how)
    assert rank_strategies("mini", CLUSTER, **SMALL, include=[same, same]) == plain


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Included(3, 1, 1), "no strategy has these degrees"),
        (Included(4, 1, 1, micro_batch=3), "no strategy has these degrees"),
        (Included(4, 1, 1, slices=(512, 256)), "the sum 1024"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(setting: Included, said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        rank_strategies("mini", CLUSTER, **SMALL, include=[setting])


def test_a_setting_that_does_not_fit_is_refused() -> None:
    one = Included(1, 1, 32)
    with pytest.raises(PlannerError, match="no cut fits"):
        rank_strategies("gpt3-13b", Cluster("v100", 4, 8), global_batch_size=32, sequence_length=2048, include=[one])
