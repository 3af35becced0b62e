from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from hypothesis import given
from schedule_cases import GOLDEN, by_hand, even_shapes, golden_order, names, ragged_shapes, zero_bubble

from terapipe_ds.schedule import (
    CHUNKED_SCHEDULES,
    SCHEDULE_NAMES,
    SPLIT_SCHEDULES,
    Kind,
    ScheduleError,
    build,
    generate,
    render,
    validate,
)
from terapipe_ds.schedule.show import count_slots


@pytest.mark.parametrize(
    ("golden", "name", "shape"),
    [
        ("seq1f1b_p4_m2_s4", "seq1f1b", (4, 2, 4)),
        ("terapipe_p4_m2_s4", "terapipe", (4, 2, 4)),
        ("dapple_1f1b_p4_m4", "1f1b", (4, 4, 1)),
        ("dapple_1f1b_p4_m4", "dapple", (4, 4, 1)),
        ("seq1f1b_zb_p4_m2_s4", "seq1f1b-zb", (4, 2, 4)),
    ],
)
def test_orders_equal_the_published_ones(golden: str, name: str, shape: tuple[int, int, int]) -> None:
    schedule = build(name, *shape)
    assert [schedule.compute_order(stage_id) for stage_id in range(4)] == golden_order(golden)
    if "peak_live_slices" in GOLDEN[golden]:
        assert list(schedule.peak_live_slices()) == GOLDEN[golden]["peak_live_slices"]
        assert [schedule.for_stage(k).peak_live_slices for k in range(4)] == GOLDEN[golden]["peak_live_slices"]
    if "warmup" in GOLDEN[golden]:
        first_backward = [schedule.compute_order(k).index("B0.3") for k in range(4)]
        assert [index - 1 for index in first_backward] == GOLDEN[golden]["warmup"]


def deepspeed_order(num_micro_batches: int, num_stages: int, stage_id: int) -> list[str]:
    from deepspeed.runtime.pipe import schedule as stock

    schedule: Any = stock.TrainSchedule(num_micro_batches, num_stages, stage_id)
    order = []
    for step_id, commands in enumerate(schedule.steps()):
        for command in commands:
            if isinstance(command, stock.ForwardPass | stock.BackwardPass):
                micro_batch_id, is_forward = schedule._step_to_micro_batch(step_id)
                assert schedule._buffer_idx(micro_batch_id) == command.buffer_id
                assert is_forward == isinstance(command, stock.ForwardPass)
                order.append(f"{'F' if is_forward else 'B'}{micro_batch_id}")
    return order


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8])
def test_1f1b_equals_deepspeeds_schedule(num_stages: int) -> None:
    for num_micro_batches in (1, 2, 3, 4, 7, 8, 12):
        ours = build("1f1b", num_stages, num_micro_batches, 1)
        sliced = build("1f1b", num_stages, num_micro_batches, 3)
        for stage_id in range(num_stages):
            stock = deepspeed_order(num_micro_batches, num_stages, stage_id)
            assert ours.compute_order(stage_id) == [f"{unit}.0" for unit in stock]
            expanded = [f"{u}.{s}" for u in stock for s in ((0, 1, 2) if u[0] == "F" else (2, 1, 0))]
            assert sliced.compute_order(stage_id) == expanded


@given(names, ragged_shapes)
def test_every_schedule_of_every_shape_is_valid(name: str, shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    schedule = build(name, num_stages, len(num_slices), num_slices)
    validate(schedule)  # among others: it ends, no stage waits for ever
    kinds = 3 if name in SPLIT_SCHEDULES else 2
    assert sum(map(len, schedule.orders)) == num_stages * kinds * sum(num_slices)
    assert schedule.num_slices == tuple(num_slices)


@given(names, ragged_shapes)
def test_forward_only_runs_all_forwards_in_order(name: str, shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    schedule = build(name, num_stages, len(num_slices), num_slices, forward_only=True)
    validate(schedule)
    expected = [f"F{m}.{s}" for m, count in enumerate(num_slices) for s in range(count)]
    assert all(schedule.compute_order(stage_id) == expected for stage_id in range(num_stages))


@given(even_shapes)
def test_peaks_of_live_slices(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    stages = range(num_stages)
    assert build("gpipe", *shape).peak_live_slices() == (m * s,) * num_stages
    assert build("terapipe", *shape).peak_live_slices() == (m * s,) * num_stages
    assert build("1f1b", *shape).peak_live_slices() == tuple(min(num_stages - i, m) * s for i in stages)
    assert build("seq1f1b", *shape).peak_live_slices() == tuple(min(num_stages - i + s - 1, m * s) for i in stages)


def test_a_slice_is_live_until_the_last_of_its_b_and_w() -> None:
    assert zero_bubble().peak_live_slices() == (7, 7, 7, 7), "the published rule allows stages + slices - 1"
    # The unit of part 0 has a W, that of part 1 on the same stage has none and ends with its B.
    order = "F0.0c0 F0.0c1 B0.0c1 F1.0c0 F1.0c1 B1.0c1 B0.0c0 W0.0c0 B1.0c0"
    schedule = by_hand([order.split()], {(0, 0): 0, (0, 1): 1})
    validate(schedule)
    assert schedule.peak_live_slices() == (3,)


@given(even_shapes)
def test_length_in_unit_slots(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    for name in ("gpipe", "terapipe", "1f1b"):
        assert count_slots(build(name, *shape)).num_slots >= 2 * (m * s + num_stages - 1)
    assert count_slots(build("terapipe", *shape)).num_slots == 2 * (m * s + num_stages - 1)


@given(ragged_shapes)
def test_seq1f1b_with_unequal_numbers_of_slices(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    schedule = build("seq1f1b", num_stages, len(num_slices), num_slices)
    total = sum(num_slices)
    last = [action.kind for action in schedule.orders[-1]]
    peak_of_last = schedule.peak_live_slices()[-1]
    for stage_id, order in enumerate(schedule.orders):
        kinds = [action.kind for action in order]
        lead = num_stages - 1 - stage_id
        assert kinds.index(Kind.BACKWARD) == min(num_slices[0] + lead, total)
        assert schedule.peak_live_slices()[stage_id] <= min(peak_of_last + lead, total)
        for k in range(total):  # before its k-th backward a stage is `lead` forwards ahead of the last stage
            assert _forwards_before(kinds, k) == min(_forwards_before(last, k) + lead, total)


def _forwards_before(kinds: list[Kind], backward: int) -> int:
    index = [i for i, kind in enumerate(kinds) if kind is Kind.BACKWARD][backward]
    return index - backward


def test_a_longer_micro_batch_does_not_empty_the_pipeline() -> None:
    slots = {name: count_slots(build(name, 8, 6, [2, 8, 4, 6, 2, 8])).num_slots for name in ("seq1f1b", "terapipe")}
    assert slots["seq1f1b"] <= 1.15 * slots["terapipe"]


def test_the_tables_in_the_comments_are_true() -> None:
    shapes: dict[str, Any] = dict.fromkeys(generate.GENERATORS, (3, 2, 2))
    shapes |= {"interleaved": (2, 2, 1), "seq1f1b-interleaved": (2, 1, 3), "zbv": (2, 2, 1)}
    for name, generator in {**generate.GENERATORS, **generate.CHUNKED_GENERATORS}.items():
        source = inspect.getsource(sys.modules[generator.__module__])
        schedule = build(name, *shapes.get(name, (2, 2, 2)), chunks_per_stage=2 if name in CHUNKED_SCHEDULES else 1)
        grid = [line for line in render(schedule, width=1000).splitlines() if line.startswith("stage")]
        table = "\n".join(f"# {line}" for line in grid)
        assert f"{table}\ndef {generator.__name__}(" in source


@pytest.mark.parametrize(
    ("name", "near"),
    [("seq1f1", "seq1f1b"), ("TeraPipe", "terapipe"), ("1F1B", "1f1b"), ("g_pipe", "gpipe"), ("zzz", None)],
)
def test_an_unknown_name_gets_the_nearest_known(name: str, near: str | None) -> None:
    with pytest.raises(ScheduleError, match="unknown schedule") as caught:
        build(name, 2, 2, 2)
    assert all(known in str(caught.value) for known in SCHEDULE_NAMES)
    assert (f"did you mean '{near}'" in str(caught.value)) == (near is not None)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", None, True])
def test_counts_are_whole_numbers_of_at_least_one(bad: Any) -> None:
    for what, arguments in {
        "num_stages": (bad, 2, 2),
        "num_micro_batches": (2, bad, 2),
        "num_slices": (2, 2, bad),
        r"num_slices\[1\]": (2, 2, [1, bad]),
    }.items():
        with pytest.raises(ScheduleError, match=rf"{what} = .*: give an integer >= 1"):
            build("gpipe", *arguments)


def test_numpy_counts_are_counts() -> None:
    import numpy as np

    assert build("1f1b", np.int64(2), np.int32(2), np.array([2, 3])) == build("1f1b", 2, 2, [2, 3])


def test_a_slice_count_for_every_micro_batch() -> None:
    with pytest.raises(ScheduleError, match="3 entries: give one to each of 2 micro-batches"):
        build("gpipe", 2, 2, [1, 1, 1])
    with pytest.raises(ScheduleError, match="0 entries"):
        build("gpipe", 2, 2, [])


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_a_schedule_does_not_take_is_refused(name: str) -> None:
    if "interleaved" not in name:
        with pytest.raises(ScheduleError, match="chunks_per_stage is 3: .*leave it at 1"):
            build(name, 2, 2, 2, chunks_per_stage=3)
    with pytest.raises(ScheduleError, match="takes no option 'warm_up'"):
        build(name, 2, 2, 2, warm_up=3)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_warm_ups_of_dapple(num_stages: int) -> None:
    """Forwards before the first backward: K - i by policy A, 2(K - i) - 1 by policy B (arXiv 2007.01045)."""
    for m in (1, 3, 12):
        for policy, warm_up in (("A", lambda i: num_stages - i), ("B", lambda i: 2 * (num_stages - i) - 1)):
            schedule = build("dapple", num_stages, m, 1, policy=policy)
            validate(schedule)
            for stage_id in range(num_stages):
                assert schedule.compute_order(stage_id).index("B0.0") == min(warm_up(stage_id), m)
        assert build("dapple", num_stages, m, 2).orders == build("1f1b", num_stages, m, 2).orders
