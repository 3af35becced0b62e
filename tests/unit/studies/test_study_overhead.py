"""What a step costs besides its layers: the arithmetic of the study, and, in the full run, its claim."""

import json

import pytest

from studies import overhead
from studies.overhead import rows_of, table
from studies.overhead_ranks import ALONE, SYSTEMS, TORCH, Reading, Shape

SHAPE = Shape(micro_batches=8, fewer=2, slices=4, steps=10)


def reading(unit_s: float, rest_s: float, units: int) -> Reading:
    """What a stage reads that takes so long for an F + B, and for the rest of a step."""
    many, few = (SHAPE.steps * (rest_s + count * units * unit_s) for count in (SHAPE.micro_batches, SHAPE.fewer))
    return Reading(SHAPE.steps, many, few)


def test_what_comes_once_per_step_is_subtracted() -> None:
    own = [[reading(1e-3, 5e-3, 4), reading(3e-3, 7e-3, 4)], [reading(2e-3, 5e-3, 4)] * 2, [reading(9e-3, 1.0, 4)] * 2]
    others = [[reading(1e-3, 0.0, 1)] * 2, [reading(4e-3, 0.0, 1)] * 2, [reading(3e-3, 0.0, 1)] * 2]
    alone = [[reading(0.5e-3, 0.0, 1)] * 2] * 3
    sliced, torch_s, layers = rows_of(SHAPE, {"terapipe seq1f1b": own, TORCH: others, ALONE: alone})
    assert sliced.unit_s == pytest.approx(2e-3)  # of 2, 2 and 9 ms: means over the stages
    assert sliced.spread_s == pytest.approx((2e-3, 9e-3))
    assert sliced.stages_s == pytest.approx((2e-3, 3e-3))  # of 1, 2, 9 and of 3, 2, 9
    assert sliced.rest_s == pytest.approx(6e-3)  # of 6 ms, 5 ms and 1 s
    assert sliced.ratio == pytest.approx(2.0)  # of 2/1, 2/4 and 9/3, turn by turn
    assert sliced.own_s == pytest.approx(1.5e-3)
    assert (torch_s.ratio, layers.own_s) == (pytest.approx(1.0), pytest.approx(0.0))


def test_the_table_says_what_an_f_and_b_is_of() -> None:
    given = {system.name: [[reading(1e-3, 0.0, system.units(SHAPE))] * 2] for system in SYSTEMS}
    lines = table(rows_of(SHAPE, given)).splitlines()
    assert len(lines) == 1 + len(SYSTEMS)
    told = [("a slice" in line, "a micro-batch" in line) for line in lines[1:]]
    assert told == [(True, False)] * 2 + [(False, True)] * 4


@pytest.mark.parametrize("sizes", [["--fewer", "1"], ["--fewer", "8"]])
def test_steps_that_cannot_be_subtracted_are_refused(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.main(sizes)
    assert "at least 2, and less than --micro-batches 8" in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.full
def test_a_slice_costs_no_more_than_a_micro_batch_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth more on a busy machine is not an error: the study's own medians part by that."""
    overhead.main(["--json"])
    ratios = {row["name"]: row["ratio"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert ratios["terapipe seq1f1b"] <= 1.1
    assert ratios["deepspeed 1f1b"] > ratios["terapipe 1f1b"]
