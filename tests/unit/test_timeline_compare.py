from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import Timeline, TimelineEvent
from terapipe_ds.timeline_compare import CompareError, Pair, compare, render


def timeline(*rows: tuple[int, str, float, float]) -> Timeline:
    events = [TimelineEvent(k, name, 0, int(name[-1]), name[0], start_s, end_s) for k, name, start_s, end_s in rows]
    return Timeline(1 + max(row[0] for row in rows), tuple(events), "made")


def predicted() -> Timeline:
    return timeline(
        (0, "F0.0", 0, 1), (0, "F0.1", 1, 2), (1, "F0.0", 1, 2), (1, "F0.1", 2, 3),
        (1, "B0.1", 3, 5), (1, "B0.0", 5, 7), (0, "B0.1", 5, 7), (0, "B0.0", 7, 9),
    )  # fmt: skip


def measured() -> Timeline:
    """The clock starts at 100; F0.1 of stage 0 takes three times as long, and stage 1 waits for it."""
    return timeline(
        (0, "F0.0", 100, 101), (0, "F0.1", 101, 104), (1, "F0.0", 101, 102), (1, "F0.1", 104, 105),
        (1, "B0.1", 105, 107), (1, "B0.0", 107, 108), (0, "B0.1", 107, 109), (0, "B0.0", 109, 111),
    )  # fmt: skip


def test_by_hand() -> None:
    result = compare(predicted(), measured())
    assert result.makespan_s == Pair(9, 11)
    assert result.bubble_fraction.predicted == pytest.approx(6 / 18)
    assert result.bubble_fraction.measured == pytest.approx(9 / 22)
    first, second = result.stages
    assert first.busy_s == {"F": Pair(2, 4), "B": Pair(4, 4)}
    assert second.busy_s == {"F": Pair(2, 2), "B": Pair(4, 3)}
    assert (first.wait_s, second.wait_s) == (Pair(3, 3), Pair(1, 3))
    assert second.bubble_fraction == Pair(pytest.approx(1 - 6 / 9), pytest.approx(1 - 5 / 11))
    worst = [(a.stage_id, a.action, a.duration_s.ratio) for a in result.worst(2)]
    assert worst == [(0, "F0.1", 3.0), (1, "B0.0", 0.5)]
    assert result.median_ratio() == 1.0
    assert (result.median_ratio("F"), result.median_ratio("B")) == (1.0, 1.0)
    assert [(a.stage_id, a.action, a.wait_s) for a in result.longest_waits()] == [(1, "F0.1", Pair(0, 2))]
    drifts = {(a.stage_id, a.action): a.start_s.measured - a.start_s.predicted for a in result.actions}
    assert set(drifts.values()) == {0, 2}
    assert result.median_drift_s() == 2
    assert result.largest_drift().start_s == Pair(2, 4)


def test_what_is_printed_names_the_places() -> None:
    text = render(compare(predicted(), measured()))
    lines = [line.split() for line in text.splitlines()]
    assert ["makespan", "s", "9", "11", "1.222"] in lines
    assert ["bubble", "%", "33.3", "40.9"] in lines
    assert ["stage", "0", "F", "s", "2", "4", "2.000"] in lines
    assert ["stage", "1", "waits", "s", "1", "3", "3.000"] in lines
    assert ["stage", "0", "F0.1", "1", "3", "3.000"] in lines
    assert "at most +2 s" in text
    data = compare(predicted(), measured()).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["makespan_s"]["ratio"] == pytest.approx(11 / 9)
    assert data["durations"]["worst"][0] == {
        "stage_id": 0, "action": "F0.1", "predicted": 1, "measured": 3, "ratio": 3.0,
    }  # fmt: skip
    assert data["start_drift_s"]["median"] == 2


def test_the_worst_are_ten() -> None:
    costs = UnitCosts(64)
    both = [simulate(build("gpipe", 2, 1, n), SlicePlan((1,) * n), costs) for n in (64, 64)]
    result = compare(*both)
    assert len(result.worst()) == 10
    assert result.longest_waits() == []
    assert "waits longer" not in render(result)


@given(st.floats(0.25, 4), st.floats(-1e3, 1e3))
def test_a_slower_machine_and_another_clock(factor: float, zero_s: float) -> None:
    """All durations times a factor: every ratio is that factor, the bubble stays, and the clock does not matter."""
    schedule, plan = build("seq1f1b", 3, 2, 3), SlicePlan((4, 3, 1))
    costs = UnitCosts(8, 0.125)
    slower = SimpleNamespace(
        forward_s=lambda t, p: factor * costs.forward_s(t, p), backward_s=lambda t, p: factor * costs.backward_s(t, p),
        send_s=lambda t: factor * costs.send_s(t),
    )  # fmt: skip
    one, other = simulate(schedule, plan, costs), simulate(schedule, plan, slower)
    shifted = [dataclasses.replace(e, start_s=e.start_s + zero_s, end_s=e.end_s + zero_s) for e in other.events]
    result = compare(one, Timeline(3, tuple(shifted)))
    assert result.makespan_s.ratio == pytest.approx(factor, rel=1e-9)
    assert [a.duration_s.ratio for a in result.actions] == pytest.approx([factor] * len(result.actions), rel=1e-9)
    assert result.bubble_fraction.measured == pytest.approx(result.bubble_fraction.predicted, abs=1e-9)
    for stage in result.stages:
        assert stage.wait_s.measured == pytest.approx(factor * stage.wait_s.predicted, rel=1e-9, abs=1e-9)


def test_links_and_other_events_do_not_count() -> None:
    extra = TimelineEvent(0, "ST", -1, -1, "ST", 7.0, 30.0)
    with_more = dataclasses.replace(predicted(), events=(*predicted().events, extra))
    assert compare(with_more, predicted()) == compare(predicted(), predicted())


def test_durations_of_zero_have_no_ratio() -> None:
    one = timeline((0, "F0.0", 0, 0), (0, "F0.1", 0, 1))
    result = compare(one, timeline((0, "F0.0", 0, 1), (0, "F0.1", 1, 2)))
    assert [a.duration_s.ratio for a in result.worst()] == [None, 1.0]
    assert result.median_ratio() == 1.0
    assert json.dumps(result.to_dict(), allow_nan=False)
    assert not math.isnan(result.median_drift_s())
    assert "-" in render(result)


def cut(timeline_: Timeline, *names: str) -> Timeline:
    return dataclasses.replace(timeline_, events=tuple(e for e in timeline_.events if e.action not in names))


def test_other_schedules_are_refused() -> None:
    with pytest.raises(CompareError, match="not the same schedule: 2 stages predicted, 1 measured"):
        compare(predicted(), timeline((0, "F0.0", 0, 1)))
    few = cut(predicted(), "F0.1", "B0.1")
    with pytest.raises(
        CompareError, match=r"4 computations are only measured \(stage 0 F0.1, stage 0 B0.1, stage 1 F0.1, ...\); sim"
    ):
        compare(few, predicted())
    with pytest.raises(CompareError, match="4 computations are only predicted"):
        compare(predicted(), few)
    with pytest.raises(CompareError, match="has F0.0 on stage 0 twice: give that of one step"):
        compare(predicted(), dataclasses.replace(measured(), events=measured().events + predicted().events))
    with pytest.raises(CompareError, match="the measured timeline holds no F, B or W"):
        compare(predicted(), Timeline(2, ()))


def test_another_order_is_another_schedule() -> None:
    plan, costs = SlicePlan((1, 1)), UnitCosts(2)
    gpipe, terapipe = (simulate(build(name, 2, 2, 2), plan, costs) for name in ("gpipe", "terapipe"))
    with pytest.raises(CompareError, match="computation 4 of stage 0 is B0.1 as predicted, B1.1 as measured"):
        compare(gpipe, terapipe)
