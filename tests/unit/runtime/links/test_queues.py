"""Schedules that hang in the job's hardware queues are refused, or warned of."""

import functools
import logging

import pytest

from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.links import queues
from terapipe_ds.runtime.links.queues import QueueCheck, queue_count
from terapipe_ds.schedule import build

HANGS = build("chimera-seq", 2, 4, 4)
RUNS = build("terapipe", 4, 4, 4)
BY_CHANCE = build("zbv", 8, 8, 8)  # with 8 queues some mappings hang


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 8), ("1", 1), ("32", 32), ("99", 32), ("0", 1), ("many", 8), ("", 8)]
)
def test_the_number_of_queues(value: str | None, expected: int) -> None:
    assert queue_count({} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}) == expected


def test_one_queue_that_hangs_is_refused_on_every_rank() -> None:
    for warns in (True, False):
        check = QueueCheck(1, warns)
        check.check(RUNS)
        with pytest.raises(RaisedEverywhere) as caught:
            check.check(HANGS)
        text = str(caught.value.error)
        assert "'chimera-seq' with 2 stages, 4 micro-batches and 4 slices waits for itself" in text
        assert "set CUDA_DEVICE_MAX_CONNECTIONS=32, or take schedule 'seq1f1b'" in text


def test_mappings_that_hang_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    all_tries = functools.partial(queues.mappings_that_hang, limit_s=60.0)  # on a busy machine a second is too short
    monkeypatch.setattr(queues, "mappings_that_hang", all_tries)
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        QueueCheck(8, warns=False).check(BY_CHANCE)
        QueueCheck(8, warns=True).check(RUNS)
        assert caplog.messages == []
        check = QueueCheck(8, warns=True)
        check.check(BY_CHANCE)
        check.check(build("zbv", 8, 8, 8))  # another object, the same schedule
    (text,) = caplog.messages
    assert "'zbv' with 8 stages" in text and "over 8 queues of a GPU would hang; set CUDA_DEVICE" in text


def test_nothing_is_checked_where_messages_are_in_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    QueueCheck(None, warns=True).check(HANGS)
    assert caplog.messages == []
