"""What a rank has written down of itself when somebody asks."""

from __future__ import annotations

import json
from pathlib import Path

from terapipe_ds.runtime.rank_record import KEPT_ACTIONS, RankRecord
from terapipe_ds.runtime.stall import Doing, Wait


def actions(record: RankRecord) -> list[tuple[str, str]]:
    return [(past.action, past.waited_for) for past in record.state().recent]


def test_actions_in_their_order() -> None:
    record = RankRecord(2, 1)
    record.enter(Doing("the start of a batch", opening=True))
    for action in ("L0", "F0.0"):
        record.now(Doing(action))
    record.now(Doing(""))
    expected = ["outside a batch", "the start of a batch", "L0", "F0.0", "outside a batch"]
    assert actions(record) == [(action, "") for action in expected]
    assert (record.state().rank, record.state().stage_id, record.state().batch) == (2, 1, 1)


def test_an_action_that_begins_by_waiting_is_one_entry() -> None:
    record = RankRecord(0, 0)
    record.now(Doing("F0.0"))
    assert record.now_waits(Wait("the input", (1,))) == "F0.0"
    assert record.is_waiting
    assert (record.state().waits_for, record.state().waits_for_ranks) == ("the input", (1,))
    record.now(Doing("F0.0"))
    assert not record.is_waiting
    assert actions(record)[1:] == [("F0.0", "the input"), ("F0.0", "")]


def test_the_ring_is_bounded() -> None:
    record = RankRecord(0, 0)
    for index in range(10 * KEPT_ACTIONS):
        record.now(Doing(str(index)))
    assert [action for action, _ in actions(record)] == [str(9 * KEPT_ACTIONS + index) for index in range(KEPT_ACTIONS)]


def test_durations_add_up() -> None:
    record = RankRecord(0, 0)
    for index in range(5):
        record.now(Doing(str(index), since_s=record.doing.since_s + 1.0))
    recent = record.state().recent
    assert [past.duration_s for past in recent[:-1]] == [1.0] * 5
    assert recent[-1].duration_s is None
    assert abs(recent[-1].start_s - recent[0].start_s - 5.0) < 1e-3


def test_it_tells_where_the_thread_stands() -> None:
    state = RankRecord(0, 0, peers=(0, 1)).state()
    assert "test_it_tells_where_the_thread_stands" in state.stack
    assert (state.collective, state.peers) == ("", (0, 1))


def test_the_trace_directory(tmp_path: Path) -> None:
    record = RankRecord(7, 3, trace_dir=str(tmp_path))
    record.now(Doing("F0.3"))
    state = record.state()
    content = json.loads((tmp_path / "last-actions-rank0007.json").read_text())
    assert content["action"] == "F0.3" and content["stage_id"] == 3
    assert len(content["recent"]) == len(state.recent) == 2


def test_a_trace_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert RankRecord(0, 0, trace_dir=str(file / "below")).state().rank == 0
