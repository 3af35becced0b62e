"""How long searches for strategies take: these tests look at the clock and at the memory of a process."""

from __future__ import annotations

import json

import pytest

from studies import strategy_times
from studies.strategy_times import MEMORY_LIMIT_GIB, QUESTIONS, answers

SLOW = 4  # times the limit, for slow or busy machines


def test_a_strategy_for_64_devices_takes_little_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    strategy_times.main(["--question", "small", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["cpu_s"] <= SLOW * found["limit_s"]
    assert 0 < found["started_gib"] <= found["peak_gib"] <= MEMORY_LIMIT_GIB
    assert found["ranked"] > 1 and found["gap"] >= 0


@pytest.mark.full
def test_a_strategy_for_1024_devices_takes_little_time_and_memory() -> None:
    ((question, answer),) = answers([QUESTIONS["large"]])
    assert answer.cpu_s <= SLOW * (question.limit_s or 0)
    assert answer.peak_gib <= MEMORY_LIMIT_GIB


def test_other_questions_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "mini", "--device", "v100", "--nodes", "1", "--devices-per-node", "2", "--global-batch", "4"]
    strategy_times.main([*options, "--sequence-length", "256"])
    text = capsys.readouterr().out
    assert "mini, 2 v100, 4 x 256 tokens" in text and "strategies replayed" in text and "s per step" in text
