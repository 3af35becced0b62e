"""Plans for a schedule with options are judged by the schedule with these options."""

from __future__ import annotations

import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlannerError, plan_slices
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate


class Costs:
    """Links that take as long as a forward: what policy B of ``dapple`` is for."""

    def forward_s(self, tokens: int, prefix: int) -> float:
        return 1.0 * tokens

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 1.0 * tokens

    def weight_s(self, tokens: int, prefix: int) -> float:
        return 0.4 * tokens

    def send_s(self, tokens: int) -> float:
        return 1.0 * tokens


def planned(schedule: str, **options: object) -> float:
    return plan_slices(Costs(), 4, 3, 6, 4, schedule, schedule_options=options, chunks_per_stage=1).predicted_s


@pytest.mark.parametrize("policy", ["A", "B"])
def test_dapple(policy: str) -> None:
    expected = simulate(build("dapple", 3, 6, 1, policy=policy), SlicePlan((4,)), Costs()).makespan_s
    assert planned("dapple", policy=policy) == pytest.approx(expected)


def test_policies_differ() -> None:
    assert planned("dapple", policy="B") < planned("dapple", policy="A") == planned("dapple") == planned("1f1b")


def test_zbv() -> None:
    slots = (1, 9, 1)
    expected = simulate(build("zbv", 3, 6, 1, slots=slots), SlicePlan((4,)), Costs()).makespan_s
    assert planned("zbv", slots=slots) == pytest.approx(expected)
    assert planned("zbv", slots=slots) != pytest.approx(planned("zbv"))


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("auto", {"policy": "B"}, "not with 'auto'"),
        ("dapple", {"policy": "C"}, "give 'A'"),
        ("seq1f1b", {"policy": "A"}, "takes no option 'policy'"),
        ("dapple", {"forward_only": True}, "takes no option 'forward_only'"),
    ],
)
def test_refused(schedule: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        planned(schedule, **options)


def test_peaks_are_those_of_the_policy() -> None:
    """2 K - 1 micro-batches live on the first stage, of any larger number."""
    schedule = build("dapple", 3, 12, 1, policy="B")
    assert schedule.peak_live_slices()[0] == 5 == build("dapple", 3, 5, 1, policy="B").peak_live_slices()[0]
