"""The model of hardware queues: every schedule with 1, 8 and 32 queues, and faults that it must see."""

from time import process_time

import pytest

from studies.device_queues import TABLE, main, rows
from terapipe_ds.schedule import SCHEDULE_NAMES, build
from terapipe_ds.simulator.device_queues import MOST_ACTIONS, hangs, mappings_that_hang, programs_of, shortened

CHUNKS = {name: chunks for name, chunks, _ in TABLE}
WHOLE = {name for name, _, one_slice in TABLE if one_slice}
SIZES = [(2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 8, 2)]
# in one queue each direction of a bidirectional pipeline may stand before the other, whatever is posted ahead
HANG_IN_ONE_QUEUE = {("chimera-seq", 2, 2, 4), ("chimera-seq", 2, 4, 4), ("zbv", 4, 4, 4)}

HANG_IF_CUT = {"1f1b", "dapple", "zb-h1", "interleaved", "chimera"}  # whole micro-batches go to and fro in their orders


def built(name: str, num_stages: int, num_micro_batches: int, num_slices: int):  # type: ignore[no-untyped-def]
    slices = 1 if name in WHOLE else num_slices
    return build(name, num_stages, num_micro_batches, slices, chunks_per_stage=CHUNKS.get(name, 1))


def test_the_study(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = list(rows(1, [(2, 2, 4)]))
    assert len(table) == 2 * (len(TABLE) + len(WHOLE))
    hanging = {row.schedule for row in table if row.one_receive and row.one_queue_hangs}
    assert hanging == HANG_IF_CUT | {"chimera-seq"}
    monkeypatch.setattr("studies.device_queues.rows", lambda tries: rows(tries, [(4, 4, 4)]))
    main(["--tries", "1"])
    assert "zbv                  K=4 m=4 s=4 one receive per wire  one queue hangs" in capsys.readouterr().out


def test_the_table_has_every_schedule() -> None:
    assert set(CHUNKS) == set(SCHEDULE_NAMES)


@pytest.mark.parametrize("name", sorted(CHUNKS))
@pytest.mark.parametrize("sizes", SIZES)
def test_one_receive_per_wire_runs(name: str, sizes: tuple[int, int, int]) -> None:
    programs = programs_of(built(name, *sizes))
    assert not hangs(programs, None), "with a queue for each stream nothing may hang"
    assert hangs(programs, 1) == ((name, *sizes) in HANG_IN_ONE_QUEUE)
    if name != "chimera-seq" and (name, *sizes) not in HANG_IN_ONE_QUEUE:
        assert not any(hangs(programs, queues, seed) for queues in (8, 32) for seed in range(8))


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_orders_of_whole_sequences_may_hang_with_cut_ones(name: str) -> None:
    programs = programs_of(build(name, 4, 8, 4, chunks_per_stage=CHUNKS[name]))
    assert not hangs(programs, None)
    assert hangs(programs, 1) == (name in HANG_IF_CUT)


@pytest.mark.parametrize("name", ["terapipe", "gpipe", "zbv", "chimera-seq"])
def test_all_receives_posted_ahead_hang(name: str) -> None:
    assert hangs(programs_of(built(name, 4, 8, 4), None), 1)
    assert any(hangs(programs_of(built(name, 4, 8, 4), None), 8, seed) for seed in range(20))


def test_two_receives_per_wire_hang() -> None:
    assert hangs(programs_of(built("terapipe", 4, 8, 4), 2), 1)


def test_seq1f1b_with_one_micro_batch() -> None:
    """With receives posted ahead it always hangs in one queue."""
    for num_slices in (4, 8, 16):
        schedule = build("seq1f1b", 4, 1, num_slices)
        assert hangs(programs_of(schedule, None), 1) and not hangs(programs_of(schedule), 1)


def test_waits_for_sent_messages_stand_in_queues_too() -> None:
    """As the links do: waits for consumed messages beside a receive's, and for the oldest of too many on a wire."""
    assert not hangs(programs_of(build("1f1b", 2, 4, 4), None), 3, 0), "a wait for the oldest would stand too late"
    assert hangs(programs_of(build("1f1b", 3, 4, 4), None), 8, 0), "the wait for the oldest holds a queue"


def test_a_rank_that_sends_nothing_is_waited_for() -> None:
    programs = programs_of(build("seq1f1b", 2, 2, 2))
    assert hangs([programs[0][:3], programs[1]], None)


def test_a_long_schedule_is_shortened() -> None:
    long = build("seq1f1b", 8, 256, 8)
    short = shortened(long)
    assert 16 <= short.num_micro_batches < 256 and short.name == "seq1f1b"
    assert sum(len(order) for order in short.orders) <= 1.1 * MOST_ACTIONS
    assert shortened(build("seq1f1b", 4, 8, 4)).num_micro_batches == 8
    begin_s = process_time()
    assert mappings_that_hang(long, 1) == (0, 1)
    assert process_time() - begin_s < 5


def test_tries_end_with_the_time_limit() -> None:
    assert mappings_that_hang(build("zbv", 4, 8, 4), 8, limit_s=0.0)[1] == 1
