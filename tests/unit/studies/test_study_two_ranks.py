"""Strategies for two ranks: what the study concludes from its steps, and, in the full run, the study itself."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from studies.two_ranks import SHAPES, disagreement, main, show
from studies.two_ranks_training import Outcome, Run, Step
from terapipe_ds.planner.strategy import Cluster, rank_strategies


def run(name: str, predicted_s: float, *steps: Step, loss: float = 2.0) -> Run:
    question: Any = {"global_batch_size": 4, "sequence_length": 64}
    best = rank_strategies("mini", Cluster("cpu", 1, 2), **question)[0]
    return Run(name, best.model_dump(mode="json"), predicted_s, 0.1, list(steps), [loss] * len(steps))


def quiet(seconds: float) -> Step:
    return Step(seconds, 0.1, seconds, 0.0)


def outcome(*runs: Run) -> Outcome:
    return Outcome(SHAPES[0], {"within_bytes_per_s": 1.5e9, "within_latency_s": 5e-5}, list(runs))


def test_steps_in_which_other_programs_had_the_cores_do_not_count() -> None:
    steps = [Step(1.0, 0.1, 1.0, 0.010), Step(1.1, 0.1, 1.0, 0.022), Step(1.5, 0.1, 1.0, 0.5), Step(1.2, 0.1, 1.0, 0.2)]
    one = run("PP2", 1.0, *steps)
    assert one.undisturbed == steps[:2]
    assert one.measured_s == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("measured", "is_right"),
    [((1.0, 1.2, 1.5), True), ((1.0, 0.98, 1.5), True), ((1.0, 0.96, 1.5), False), ((1.0, 1.2, 0.9), False)],
)
def test_an_order_is_as_predicted_but_for_ties_of_three_hundredths(measured: tuple[float, ...], is_right: bool) -> None:
    runs = [run(f"{i}", 1.0 + i, quiet(seconds)) for i, seconds in enumerate(measured)]
    for given in (runs, runs[::-1]):
        assert outcome(*given).is_as_predicted is is_right
    text = show(outcome(*runs))
    assert "predicted 0 < 1 < 2; measured" in text
    assert text.endswith(": as predicted") is is_right


def test_strategies_that_learn_something_else_are_told() -> None:
    alike = [run("PP2", 1.0, quiet(1)), run("DP2", 1.0, quiet(1), loss=2.000001)]
    assert disagreement(outcome(*alike)) is None
    told = disagreement(outcome(*alike, run("TP2", 1.0, quiet(1), loss=2.1)))
    assert told is not None and "losses (2.0, 2.000001, 2.1)" in told


def test_models_are_of_different_shape() -> None:
    assert len({dataclasses.replace(shape, name="") for shape in SHAPES}) == 3
    assert all(shape.small.hidden % (2 * shape.small.heads) == 0 for shape in SHAPES)


@pytest.mark.full
def test_the_order_that_a_measured_profile_predicts_is_the_order_measured(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(SystemExit) as ended:
        main(["--json", str(tmp_path / "two_ranks.json")])
    report = json.loads((tmp_path / "two_ranks.json").read_text())
    assert [len(one["runs"]) for one in report["outcomes"]] == [3, 3, 3]
    assert ended.value.code == 0
