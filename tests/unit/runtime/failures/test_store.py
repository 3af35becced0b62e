"""What one rank's watch-dog makes of the store: values that no rank has written, and ranks that fall silent."""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import distributed

from terapipe_ds.runtime.failures import store as module
from terapipe_ds.runtime.failures.report import CLOSED, OUTSIDE, Doing, PastAction, RankRecord, RankState, printable
from terapipe_ds.runtime.failures.store import Failure, WatchStore
from tests.fuzz.damage import json_files
from tests.fuzz.outcome import cases

FAILURE = Failure(1, 1, "F0.1", "ValueError: the layer is\nbroken")
STATE = RankState(1, 1, "running F0.1", (0,), recent=(PastAction("F0.0", "", 1.0, None),), stack="  here\n")
WRITTEN = {"beat/1": [7, 0.5, OUTSIDE], "state/1": dataclasses.asdict(STATE), "abort": FAILURE}


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> Iterator[WatchStore]:
    """The view of rank 0, of two ranks."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    store = WatchStore(distributed.HashStore(), RankRecord(0, 0), 2, 10.0, warnings.append)
    yield store
    store.close()


def write(watch: WatchStore, key: str, text: str | bytes) -> None:
    watch._ask(lambda store: store.set(key, text))


values = st.sampled_from(sorted(WRITTEN)).flatmap(lambda key: st.tuples(st.just(key), json_files(WRITTEN[key])))


@given(written=values)
@cases(300, 10_000)
def test_no_value_of_the_store_harms_a_rank(written: tuple[str, bytes]) -> None:
    """Whatever it is, this rank goes on, or ends for a failure that has all that a failure has."""
    warnings: list[str] = []
    with contextlib.closing(WatchStore(distributed.HashStore(), RankRecord(0, 0), 2, 10.0, warnings.append)) as watch:
        write(watch, *written)
        watch.beat()
        watch.look()
        states = watch.live_states(0.0)
        assert watch.lost_at is None and len(warnings) <= 1
        assert [state.rank for state in states.values()] == [0, 1]
        told = [str(watch.failure), *warnings, *(state.describe() for state in states.values())]
        assert all(text == printable(text, "\n\t") for text in told)
        for named in (watch.failure, *states.values()):
            assert named is None or (type(named.rank), type(named.stage_id)) == (int, int)


def test_what_ranks_write_is_taken_as_it_is(watch: WatchStore, warnings: list[str]) -> None:
    for key, value in WRITTEN.items():
        write(watch, key, json.dumps(value))
    watch.beat()
    assert watch.failure == FAILURE and warnings == []
    watch.failure = None  # which would end the look at the states
    write(watch, "abort", "")
    assert watch.live_states(0.0)[1] == dataclasses.replace(STATE, for_s=0.5, silent=True)


def test_a_failure_takes_the_place_of_what_no_rank_has_written(watch: WatchStore, warnings: list[str]) -> None:
    write(watch, "abort", b"\xff\x1b[2J nonsense")
    watch.beat()
    watch.beat()
    assert watch.failure is None
    assert len(warnings) == 1 and "'abort' in the store of the job is passed over" in warnings[0]
    watch.publish_failure(FAILURE)
    assert Failure(*json.loads(watch._ask(lambda store: store.get("abort")))) == FAILURE == watch.failure


def test_what_is_too_large_is_neither_read_nor_written(watch: WatchStore, warnings: list[str]) -> None:
    write(watch, "abort", json.dumps(FAILURE._replace(error="x" * module._MAX_BYTES)))
    watch.beat()
    assert watch.failure is None and "at most" in warnings[0]
    watch.publish_failure(FAILURE._replace(error="\ud800\U0001f600" * module._MAX_BYTES))
    assert len(watch._ask(lambda store: store.get("abort"))) <= module._MAX_BYTES
    watch.failure = None
    watch.beat()
    assert watch.failure is not None, "the others cannot read it"


def test_what_controls_a_terminal_is_not_shown(watch: WatchStore) -> None:
    write(watch, "abort", json.dumps(FAILURE._replace(action="F0\n\x1b]0;title\x07", error="a\nb\x1b[31m\u202e")))
    watch.beat()
    assert watch.failure is not None
    assert (watch.failure.action, watch.failure.error) == ("F0\ufffd\ufffd]0;title\ufffd", "a\nb\ufffd[31m\ufffd")


def test_what_another_thread_asks_meanwhile_is_no_sign_that_the_store_is_gone(
    watch: WatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch-dog's own thread beats on while the main thread asks who is alive."""
    is_asking, read = threading.Event(), watch._read

    def ask(store: object) -> None:
        is_asking.set()
        time.sleep(0.2)

    others: list[threading.Thread] = []

    def read_then_be_overtaken(kind: str, adapter: TypeAdapter[Any]) -> dict[int, Any]:
        found = read(kind, adapter)
        if kind == "state":
            others.append(threading.Thread(target=watch._ask, args=(ask,)))
            others[0].start()
            assert is_asking.wait(10.0)
        return found

    monkeypatch.setattr(watch, "_read", read_then_be_overtaken)
    assert len(watch.live_states(0.0)) == 2
    others[0].join()


def test_a_store_that_owes_an_answer_gets_no_further_question(
    watch: WatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, asked = threading.Event(), list[str]()

    def slow(store: object) -> None:
        asked.append("first")
        goes_on.wait(30.0)

    monkeypatch.setattr(module, "_SILENT_S", 0.01)
    assert watch._ask(slow) is None and watch._ask(lambda store: asked.append("second")) is None
    monkeypatch.setattr(module, "_SILENT_S", 30.0)
    goes_on.set()
    while watch._is_gone:
        time.sleep(0.001)
    assert watch._ask(lambda store: asked.append("third") or True) and asked == ["first", "third"]


@pytest.mark.parametrize(("beat", "places"), [
    ([1, 0.0, CLOSED], {"done": [1]}),
    ([1, 0.0, "", 1], {"in a batch": [1]}),
    ([1, 0.0, "", 0, 1, "load_checkpoint"], {"in load_checkpoint": [1]}),
    ([1, 0.0, OUTSIDE], {}),  # it may come
    ([1, 0.0, "", 0, 1, "save_checkpoint"], {}), ([1, 0.0, CLOSED, 0, 2, "save_checkpoint"], {}),  # it has come
])  # fmt: skip
def test_who_cannot_come_to_a_call(watch: WatchStore, beat: list[Any], places: dict[str, list[int]]) -> None:
    call = Doing("save_checkpoint", is_long=True)
    watch._record.enter(call)
    write(watch, "beat/1", json.dumps(beat))
    watch.look()
    assert watch.elsewhere(call) == places
    watch._record.note("F0.0")
    assert watch.elsewhere(call) == {}, "the numbers of a call that has ended may be of the next one"


class TestSilence:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The seconds that have passed, as the store sees them."""
        clock = [time.monotonic() + 1.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
        return clock

    def look(self, watch: WatchStore, clock: list[float], seconds: float, beat: str = "") -> None:
        for _ in range(round(seconds / 0.5)):
            clock[0] += 0.5
            watch.beat()
            if beat:
                write(watch, "beat/1", json.dumps([int(10 * clock[0]), 0.0, beat]))
            watch.look()

    def test_a_rank_is_silent_after_a_while_without_signs_of_life(self, watch: WatchStore, clock: list[float]) -> None:
        self.look(watch, clock, 20.0, OUTSIDE)
        assert watch.is_one(OUTSIDE) and not watch.is_one_silent(1.0)
        self.look(watch, clock, 9.0)
        assert not watch.is_one_silent(10.0)
        self.look(watch, clock, 1.5)
        assert watch.is_one_silent(10.0)
        self.look(watch, clock, 1.0, OUTSIDE)
        assert not watch.is_one_silent(1.0)

    def test_a_rank_that_has_said_that_it_ends_is_not_silent(self, watch: WatchStore, clock: list[float]) -> None:
        self.look(watch, clock, 1.0, "done with its engine")
        self.look(watch, clock, 20.0)
        assert not watch.is_one_silent(1.0)

    def test_time_in_which_this_rank_stood_still_does_not_count(self, watch: WatchStore, clock: list[float]) -> None:
        """A scheduler may stop all processes of a job for an hour, and let them go on."""
        self.look(watch, clock, 1.0, OUTSIDE)
        clock[0] += 3600.0
        self.look(watch, clock, 1.0)
        assert not watch.is_one_silent(2.0)

    def test_a_rank_that_was_quiet_once_is_waited_for(self, watch: WatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Signs of life are looked at while a batch begins; a report in the middle of it comes much later."""
        watch._quiet_s[1] = 4.0
        beats = iter(range(1, 1000))
        monkeypatch.setattr(module.time, "sleep", lambda _: self.write_beat(watch, next(beats)))
        self.write_beat(watch, 0)
        assert not watch.live_states(3.0)[1].silent

    def write_beat(self, watch: WatchStore, number: int) -> None:
        """Another one comes at every tenth look."""
        write(watch, "beat/1", json.dumps([number // 10, 0.0, OUTSIDE]))


def test_the_stack_of_a_long_call_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that has left its first collective and hangs on this rank alone must not look like one that waits."""
    record = RankRecord(0, 0)
    record.note("load_checkpoint")
    began_s = record.doing.since_s
    now_s = [began_s]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    places = iter([False, True, False])  # is_busy of each full state
    monkeypatch.setattr(record, "full", lambda: dataclasses.replace(record.brief(), is_busy=next(places)))
    with contextlib.closing(WatchStore(distributed.HashStore(), record, 1, 1.0, print)) as watch:
        seen = []
        for now_s[0] in (began_s, began_s + 1.5, began_s + 1.9, began_s + 2.5, began_s + 9.0):
            watch.beat()
            seen.append(watch._read("state", TypeAdapter(RankState))[0].is_busy)
        assert seen == [True, False, False, True, False]
