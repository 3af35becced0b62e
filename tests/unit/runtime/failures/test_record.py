"""What a rank has written down of itself when somebody asks."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

from terapipe_ds.runtime.failures.report import Doing, RankRecord, Wait


def actions(record: RankRecord) -> list[tuple[str, str]]:
    return [(past.action, past.waited_for) for past in record.full().recent]


def test_an_action_that_begins_by_waiting_is_one_entry() -> None:
    record = RankRecord(0, 0)
    record.now(Doing("F0.0"))
    assert record.now_waits(Wait("the input", (1,))) == "F0.0"
    assert not record.brief().is_busy
    assert (record.brief().doing, record.brief().waits_for_ranks) == ("at F0.0, waiting for the input", (1,))
    record.now(Doing("F0.0"))
    assert record.full().is_busy
    assert actions(record)[1:] == [("F0.0", "the input"), ("F0.0", "")]


COLLECTIVE = compile("def all_reduce(act):\n    return act()\n", "torch/distributed/distributed_c10d.py", "exec")


def test_a_thread_in_a_collective_waits() -> None:
    names: dict[str, Any] = {}
    exec(COLLECTIVE, names)
    assert not names["all_reduce"](RankRecord(0, 0).full).is_busy


def test_a_thread_that_waits_for_a_call_begun_earlier_waits() -> None:
    record, started, end = RankRecord(0, 0), threading.Event(), queue.SimpleQueue[None]()
    work = SimpleNamespace(wait=end.get)  # in C, as the wait of torch

    def wait() -> None:
        record.enter(Doing("F0.0"))
        started.set()
        work.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    started.wait()
    deadline = time.monotonic() + 10.0
    while record.full().is_busy:
        assert time.monotonic() < deadline
    end.put(None)
    thread.join()
