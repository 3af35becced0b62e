"""The study of predictions: its cases and its arithmetic."""

from __future__ import annotations

import argparse

import pytest

from studies.predict import PlannedCase, StepTimes, cases, print_table, uneven


@pytest.mark.parametrize(("length", "granularity", "num_slices", "shrink"), [(2048, 64, 8, 0.9), (1000, 8, 5, 0.7)])
def test_uneven_plans_shrink_and_cover_the_sequence(
    length: int, granularity: int, num_slices: int, shrink: float
) -> None:
    lengths = uneven(length, granularity, num_slices, shrink)
    assert sum(lengths) == length and len(lengths) == num_slices
    assert lengths[0] > lengths[-1] >= granularity
    assert all(cut % granularity == 0 for cut in lengths[:-1])


def test_every_schedule_and_accumulation_has_every_plan() -> None:
    arguments = argparse.Namespace(
        sequence_length=1024, granularity=64, slices=[1, 4], accumulation=[1, 4], schedules=["terapipe", "seq1f1b"]
    )
    auto = {(s, m): (512, 512) for s in arguments.schedules for m in arguments.accumulation}
    found = cases(arguments, auto)
    assert len(found) == 2 * 2 * 5 and len(set(found)) == len(found)
    assert {case.name for case in found} == {"1 equal", "4 equal", "8 shrinking", "5 shrinking", "auto"}
    assert all(sum(case.lengths) == 1024 for case in found)


def test_the_table_says_how_far_predictions_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    unsliced = StepTimes(PlannedCase("1 equal", "seq1f1b", 1, (1024,)), 1.8, [2.0, 2.1, 1.9], [0.1, 0.1, 0.2])
    auto = StepTimes(PlannedCase("auto", "seq1f1b", 1, (600, 424)), 1.14, [1.2, 1.2, 1.25], [0.1, 0.1, 0.1])
    assert unsliced.predicted_s == pytest.approx(1.9) and unsliced.error == pytest.approx(-0.05)
    print_table([unsliced, auto], measuring_s=20.0)
    text = capsys.readouterr().out
    assert "worst -5.0% (seq1f1b, 1 equal)" in text and "10.0 unsliced steps" in text
    assert "auto over the best equal plan (1 equal) 0.600" in text  # the median of 1.2/2, 1.2/2.1, 1.25/1.9
