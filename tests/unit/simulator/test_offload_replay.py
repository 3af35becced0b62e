"""Offloaded activations in the replay: who is away when, the bytes that are left, and the time of copies."""

import itertools

import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel, PartMemory
from terapipe_ds.schedule import Kind, build
from terapipe_ds.simulator import Replay, simulate
from terapipe_ds.simulator.offload import LEAVES_AFTER, OFFLOAD_AHEAD, offloaded_until
from tests.unit.planner.planner_cases import TableCosts

COSTS = TableCosts(lambda tokens, prefix: 1.0 * tokens, lambda tokens, prefix: 2.0 * tokens)
PART = PartMemory(static_bytes=100, slice_bytes_per_token=10.0, store_bytes_per_token=1.0, whole_bytes_per_token=3.0)
CASES = [("gpipe", 1, 4, (2, 2)), ("seq1f1b", 3, 4, (3, 2, 1)), ("1f1b", 6, 9, (4,)), ("seq1f1b-zb", 2, 3, (2, 2, 2))]


@pytest.mark.parametrize(("name", "stages", "micro_batches", "lengths"), CASES)
def test_bytes_are_those_of_slices_there(name: str, stages: int, micro_batches: int, lengths: tuple[int, ...]) -> None:
    """Counted moment by moment: a slice is there up to one computation after its F, and from two before its B on."""
    schedule, plan = build(name, stages, micro_batches, len(lengths)), SlicePlan(lengths)
    memory = MemoryModel((PART,) * stages, offloads=True)
    rate = 10.0 + (3.0 if len(lengths) == 1 else 0.0)
    peaks, fewer = Replay.of(schedule).peak_bytes(plan, memory), []
    without = Replay.of(schedule).peak_bytes(plan, MemoryModel((PART,) * stages))
    for stage_id, order in enumerate(schedule.orders):
        first = {a.unit: i for i, a in enumerate(order) if a.kind is Kind.FORWARD}
        last = {a.unit: i for i, a in enumerate(order) if a.kind is Kind.BACKWARD}
        split = {a.unit: i for i, a in enumerate(order) if a.kind is Kind.WEIGHT}
        most = 0.0
        for now in range(len(order)):
            total = 100.0
            for unit, begin in first.items():
                is_near = now <= begin + LEAVES_AFTER or now >= last[unit] - OFFLOAD_AHEAD
                stays = last[unit] - OFFLOAD_AHEAD <= begin + LEAVES_AFTER
                if begin <= now <= last[unit] and (is_near or stays):
                    total += rate * lengths[unit[1]]
                if unit in split and last[unit] < now <= split[unit]:
                    total += 10.0 * lengths[unit[1]]
            if len(lengths) > 1:
                for micro_batch_id in range(micro_batches):
                    if first[micro_batch_id, 0] <= now <= last[micro_batch_id, 0]:
                        total += sum(lengths)
            most = max(most, total)
        assert peaks[stage_id] == pytest.approx(most, abs=2), (stage_id, peaks, most)
        fewer.append(len(offloaded_until(order)))
    assert any(fewer) and sum(peaks) < sum(without)


def test_copies_that_are_fast_take_no_time_and_slow_ones_all_of_it() -> None:
    schedule, plan = build("gpipe", 1, 6, 1), SlicePlan((2,))
    part = PartMemory(static_bytes=0, slice_bytes_per_token=10.0)

    def seconds(rate: float | None) -> float:
        timeline = simulate(schedule, plan, COSTS, memory=MemoryModel((part,), True, rate))
        # the path has no step for a copy, so that it is not known where the step waits for one
        path = timeline.critical_path
        assert (path is None) == (timeline.makespan_s > 36)
        assert path is None or (path[0].event.start_s, len(path)) == (0.0, 12)
        return timeline.makespan_s

    plain = simulate(schedule, plan, COSTS).makespan_s
    assert seconds(None) == seconds(1e9) == plain == 6 * 2 + 6 * 4
    away = len(offloaded_until(schedule.orders[0]))
    # 20 bytes a slice, out and back one after the other: at 1 byte per second they are nearly the whole step
    assert 2 * away * 20 <= seconds(1.0) <= 2 * away * 20 + plain
    assert plain < seconds(5.0) < seconds(2.0) < seconds(1.0)


@pytest.mark.parametrize("rate", [1e9, 20.0, 5.0, 1.0])
def test_a_critical_path_has_no_gaps(rate: float) -> None:
    """A computation that waits for a copy has its input before: the path must not go on with that input."""
    parts = tuple(PartMemory(static_bytes=0, slice_bytes_per_token=rate_of) for rate_of in (0, 10, 0, 0, 0, 0))
    memory = MemoryModel(parts, True, rate)
    schedule, plan = build("1f1b", 6, 9, 1), SlicePlan((2,))
    timeline, plain = simulate(schedule, plan, COSTS, memory=memory), simulate(schedule, plan, COSTS)
    path = timeline.critical_path
    assert (path is None) == (timeline.makespan_s > plain.makespan_s)
    for before, after in itertools.pairwise(path or ()):
        assert before.event.end_s == after.event.start_s


def test_a_slice_whose_backward_is_near_is_never_away() -> None:
    (order,) = build("1f1b", 1, 4, 1).orders
    assert offloaded_until(order) == {}
    # F0 F1 F2 F3 B0 ...: between its copies out and back a slice must be away for one whole computation
    (near,), (order,) = (build("gpipe", 1, m, 1).orders for m in (4, 5))
    assert offloaded_until(near) == {} and len(offloaded_until(order)) == 5
    back = {(a.part_id, a.unit): i for i, a in enumerate(order) if a.kind is Kind.BACKWARD}
    forward = {(a.part_id, a.unit): i for i, a in enumerate(order) if a.kind is Kind.FORWARD}
    for key, until in offloaded_until(order).items():
        assert forward[key] + LEAVES_AFTER < until == back[key] - OFFLOAD_AHEAD
