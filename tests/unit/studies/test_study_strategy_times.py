"""How long searches for strategies take: these tests look at the clock and at the memory of a process."""

import json

import pytest

from studies import strategy_times
from studies.strategy_times import MEMORY_LIMIT_GIB, QUESTIONS, Question, answers

SLOW = 4  # times the limit, for slow or busy machines


def test_a_strategy_for_8_devices_takes_little_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    strategy_times.main(["--model", "llama-3-8b", "--nodes", "1", "--global-batch", "8", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["cpu_s"] <= SLOW * 2.5
    assert 0 < found["started_gib"] <= found["peak_gib"] <= MEMORY_LIMIT_GIB
    assert found["ranked"] > 1 and found["gap"] >= 0


@pytest.mark.full
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_strategies_for_many_devices_take_little_time_and_memory(question: Question) -> None:
    ((_, answer),) = answers([question])
    assert answer.cpu_s <= SLOW * (question.limit_s or 0) and answer.peak_gib <= MEMORY_LIMIT_GIB


def test_other_questions_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "mini", "--device", "v100", "--nodes", "1", "--devices-per-node", "2", "--global-batch", "4"]
    strategy_times.main([*options, "--sequence-length", "256"])
    text = capsys.readouterr().out
    assert "mini, 2 v100, 4 x 256 tokens" in text and "strategies replayed" in text and "s per step" in text


def test_models_that_do_not_fit_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [question for question in strategy_times.TABLE if question.device != "h100"]
    assert [question.nodes * question.devices_per_node for question in refused] == [64, 256, 1024]
    for (question, answer), devices in zip(answers(refused), (128, 512, 4096), strict=True):
        assert answer.ranked == 0 and answer.cpu_s < SLOW * 0.25
        assert f"from about {devices} of these devices on it can fit" in strategy_times._row(question, answer)


def test_a_limit_ends_a_search() -> None:
    limit_s = 2.0  # the first strategy is there after a few tenths of a second
    ((question, answer),) = answers([QUESTIONS["small"]], time_limit_s=limit_s)
    assert not answer.is_complete and answer.cpu_s < SLOW * limit_s
    assert " s, stopped | " in strategy_times._row(question, answer)
