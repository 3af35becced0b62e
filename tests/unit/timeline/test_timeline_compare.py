import dataclasses
import json
import math
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import Timeline, TimelineError, TimelineEvent
from terapipe_ds.timeline.compare import Quantity, compare


def timeline(*stages: str) -> Timeline:
    """Each text is a stage: action, start and end of each computation."""
    events = []
    for stage_id, text in enumerate(stages):
        for row in text.split(", "):
            name, start_s, end_s = row.split()
            events.append(TimelineEvent(stage_id, name, 0, int(name[-1]), name[0], float(start_s), float(end_s)))
    return Timeline(len(stages), tuple(events), "made")


def predicted() -> Timeline:
    return timeline(
        "F0.0 0 1, F0.1 1 2, B0.1 5 7, B0.0 7 9",
        "F0.0 1 2, F0.1 2 3, B0.1 3 5, B0.0 5 7",
    )  # fmt: skip


def measured() -> Timeline:
    """The clock starts at 100; F0.1 of stage 0 takes three times as long, and stage 1 waits for it."""
    return timeline(
        "F0.0 100 101, F0.1 101 104, B0.1 107 109, B0.0 109 111",
        "F0.0 101 102, F0.1 104 105, B0.1 105 107, B0.0 107 108",
    )  # fmt: skip


def values(rows: Iterable[Quantity]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """(what, stage, action or kind) -> predicted and measured."""
    return {(row.what, row.stage_id, row.action or row.kind): (row.predicted, row.measured) for row in rows}


def test_by_hand() -> None:
    result = compare(predicted(), measured())
    assert values(result.summary) == {
        ("makespan_s", None, None): (9, 11),
        ("bubble_fraction", None, None): approx((6 / 18, 9 / 22)),
        ("busy_s", 0, "F"): (2, 4),
        ("busy_s", 0, "B"): (4, 4),
        ("wait_s", 0, None): (3, 3),
        ("bubble_fraction", 0, None): approx((1 - 6 / 9, 1 - 8 / 11)),
        ("busy_s", 1, "F"): (2, 2),
        ("busy_s", 1, "B"): (4, 3),
        ("wait_s", 1, None): (1, 3),
        ("bubble_fraction", 1, None): approx((1 - 6 / 9, 1 - 5 / 11)),
    }
    sections = result.sections()
    worst = sections["durations that differ most"]
    assert [(row.stage_id, row.action, row.ratio) for row in worst[:2]] == [(0, "F0.1", 3.0), (1, "B0.0", 0.5)]
    assert values(sections["waits longer than predicted"]) == {("wait_s", 1, "F0.1"): (0, 2)}
    assert values(sections["start that differs most"]) == {("start_s", 1, "F0.1"): (2, 4)}
    assert [result.median_ratio(kind) for kind in (None, "F", "B")] == [1.0, 1.0, 1.0]
    assert {row.difference for row in result.of_actions("start_s")} == {0, 2}
    assert result.median_drift_s() == 2


def test_what_is_printed_names_the_places() -> None:
    result = compare(predicted(), measured())
    lines = [line.split() for line in result.render().splitlines()]
    expected = """\
        makespan s 9 11 1.222
        bubble % 33.3 40.9
        stage 0 F s 2 4 2.000
        stage 1 wait s 1 3 3.000
        stage 1 bubble % 33.3 54.5
        durations that differ most
        stage 0 F0.1 1 3 3.000
        waits longer than predicted
        median ratio of durations: 1.000 (F 1.000, B 1.000)
        median difference of starts: +2 s"""
    for line in expected.splitlines():
        assert line.split() in lines
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    whole = {"what": "makespan_s", "predicted": 9, "measured": 11, "ratio": 11 / 9}
    assert data["rows"][0] == whole | dict.fromkeys(("stage_id", "action", "kind"))
    assert (data["median_ratio"], data["median_start_drift_s"]) == ({"all": 1.0, "F": 1.0, "B": 1.0}, 2)


@given(st.floats(0.25, 4), st.floats(-1e3, 1e3))
def test_a_slower_machine_and_another_clock(factor: float, zero_s: float) -> None:
    """All durations times a factor: every ratio is that factor, the bubble stays, and the clock does not matter."""
    schedule, plan = build("seq1f1b", 3, 2, 3), SlicePlan((4, 3, 1))
    costs = UnitCosts(8, 0.125)
    slower = SimpleNamespace(
        forward_s=lambda t, p: factor * costs.forward_s(t, p),
        backward_s=lambda t, p: factor * costs.backward_s(t, p),
        send_s=lambda t: factor * costs.send_s(t),
    )
    one, other = simulate(schedule, plan, costs), simulate(schedule, plan, slower)
    shifted = [dataclasses.replace(e, start_s=e.start_s + zero_s, end_s=e.end_s + zero_s) for e in other.events]
    links_and_steps = TimelineEvent(0, "ST", -1, -1, "ST", 7.0, 30.0 + zero_s + 1e3)
    result = compare(one, Timeline(3, (*shifted, links_and_steps)))
    assert len(result.sections()["durations that differ most"]) == 10
    ratios = [row.ratio for row in result.of_actions("duration_s")]
    assert ratios == approx([factor] * 36, rel=1e-9)
    for row in result.summary:
        expected = row.predicted * (1.0 if row.what == "bubble_fraction" else factor)
        assert row.measured == approx(expected, rel=1e-9, abs=1e-9), row


def test_durations_of_zero_have_no_ratio() -> None:
    result = compare(timeline("F0.0 0 0, F0.1 0 1"), timeline("F0.0 0 1, F0.1 1 2"))
    assert [row.ratio for row in result.sections()["durations that differ most"]] == [None, 1.0]
    assert result.median_ratio() == 1.0
    assert json.dumps(result.to_dict(), allow_nan=False)
    assert not math.isnan(result.median_drift_s())
    assert ["stage", "0", "F0.0", "0", "1", "-"] in [line.split() for line in result.render().splitlines()]


def test_other_schedules_are_refused() -> None:
    few = dataclasses.replace(predicted(), events=tuple(e for e in predicted().events if e.slice_id == 0))
    twice = dataclasses.replace(measured(), events=measured().events + predicted().events)
    plan, costs = SlicePlan((1, 1)), UnitCosts(2)
    gpipe, terapipe = (simulate(build(name, 2, 2, 2), plan, costs) for name in ("gpipe", "terapipe"))
    only = "(stage 0 F0.1, stage 0 B0.1, stage 1 F0.1, ...)"
    for one, other, reason in (
        (predicted(), timeline("F0.0 0 1"), "not the same schedule: 2 stages predicted, 1 measured"),
        (few, predicted(), f"4 computations are only measured {only}; sim"),
        (predicted(), few, f"4 computations are only predicted {only}; sim"),
        (predicted(), twice, "the measured timeline has F0.0 on stage 0 twice: give that of one step"),
        (predicted(), Timeline(2, ()), "the measured timeline holds no F, B or W"),
        (gpipe, terapipe, "computation 4 of stage 0 is B0.1 as predicted, B1.1 as measured"),
    ):
        with pytest.raises(TimelineError, match=re.escape(reason)):
            compare(one, other)
