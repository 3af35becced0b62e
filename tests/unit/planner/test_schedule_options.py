"""Plans for a schedule with options are judged by the schedule with these options."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(("name", "options"), [
    ("dapple", {"policy": "A"}), ("dapple", {"policy": "B"}), ("zbv", {"slots": (1, 9, 1)}),
])  # fmt: skip
def test_a_plan_is_judged_with_the_options(name: str, options: dict[str, Any]) -> None:
    expected = simulate(build(name, 3, 6, 1, **options), SlicePlan((4,)), Costs()).makespan_s
    assert planned(name, **options) == pytest.approx(expected)


def test_options_make_a_difference() -> None:
    assert planned("dapple", policy="B") < planned("dapple", policy="A") == planned("dapple") == planned("1f1b")
    assert planned("zbv", slots=(1, 9, 1)) != pytest.approx(planned("zbv"))


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
