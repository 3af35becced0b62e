import inspect
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from schedule_cases import (
    GOLDEN,
    by_hand,
    even_shapes,
    golden_order,
    ragged_shapes,
    schedules,
    torch_order,
    zero_bubble,
)

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import (
    CHUNKED_SCHEDULES,
    SCHEDULE_NAMES,
    Kind,
    Schedule,
    ScheduleError,
    build,
    generate,
    render,
    validate,
)
from terapipe_ds.schedule.show import count_slots
from terapipe_ds.simulator import UnitCosts, simulate


@pytest.mark.parametrize(("golden", "name", "shape"), [
    ("seq1f1b_p4_m2_s4", "seq1f1b", (4, 2, 4)),
    ("terapipe_p4_m2_s4", "terapipe", (4, 2, 4)),
    ("dapple_1f1b_p4_m4", "1f1b", (4, 4, 1)),
    ("dapple_1f1b_p4_m4", "dapple", (4, 4, 1)),
    ("seq1f1b_zb_p4_m2_s4", "seq1f1b-zb", (4, 2, 4)),
])  # fmt: skip
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


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("chimera", 2)])
@given(even_shapes)
def test_whole_micro_batches_are_expanded_to_their_slices(name: str, chunks: int, shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    num_stages *= 1 + (name == "chimera")
    whole, sliced = (build(name, num_stages, m, n, chunks_per_stage=chunks) for n in (1, s))
    for stage_id in range(num_stages):
        expected = [
            cell.replace(".0", f".{i}")
            for cell in whole.compute_order(stage_id)
            for i in (range(s) if cell[0] == "F" else reversed(range(s)))
        ]
        assert sliced.compute_order(stage_id) == expected


@given(schedules())
def test_an_evaluation_has_all_forwards_in_order(schedule: Schedule) -> None:
    shape = schedule.num_stages, schedule.num_micro_batches, schedule.num_slices
    chunks = 1 if schedule.name == "zbv" else schedule.chunks_per_stage
    evaluation = build(schedule.name, *shape, forward_only=True, chunks_per_stage=chunks)
    expected = [(Kind.FORWARD, m, s) for m, count in enumerate(schedule.num_slices) for s in range(count)]
    for part_id in range(schedule.num_parts):
        of_part = [[(a.kind, *a.unit) for a in order if a.part_id == part_id] for order in evaluation.orders]
        assert [units for units in of_part if units] == [expected]


@given(even_shapes)
def test_peaks_of_live_slices(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    stages = range(num_stages)
    assert build("gpipe", *shape).peak_live_slices() == (m * s,) * num_stages
    assert build("terapipe", *shape).peak_live_slices() == (m * s,) * num_stages
    assert count_slots(build("terapipe", *shape)).num_slots == 2 * (m * s + num_stages - 1)
    assert build("1f1b", *shape).peak_live_slices() == tuple(min(num_stages - i, m) * s for i in stages)
    assert build("seq1f1b", *shape).peak_live_slices() == tuple(min(num_stages - i + s - 1, m * s) for i in stages)


def test_a_slice_is_live_until_the_last_of_its_b_and_w() -> None:
    assert zero_bubble().peak_live_slices() == (7, 7, 7, 7), "the published rule allows stages + slices - 1"
    # The unit of part 0 has a W, that of part 1 on the same stage has none and ends with its B.
    order = "F0.0c0 F0.0c1 B0.0c1 F1.0c0 F1.0c1 B1.0c1 B0.0c0 W0.0c0 B1.0c0"
    schedule = by_hand([order.split()], {(0, 0): 0, (0, 1): 1})
    validate(schedule)
    assert schedule.peak_live_slices() == (3,)


@given(ragged_shapes)
def test_seq1f1b_with_unequal_numbers_of_slices(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    schedule = build("seq1f1b", num_stages, len(num_slices), num_slices)
    total = sum(num_slices)
    peak_of_last = schedule.peak_live_slices()[-1]
    ahead = []  # per stage, for each backward, how many forwards run before it
    for order in schedule.orders:
        backwards = [index for index, action in enumerate(order) if action.kind is Kind.BACKWARD]
        ahead.append([index - number for number, index in enumerate(backwards)])
    for stage_id, counts in enumerate(ahead):
        lead = num_stages - 1 - stage_id
        assert counts[0] == min(num_slices[0] + lead, total)
        assert counts == [min(count + lead, total) for count in ahead[-1]], "`lead` ahead of the last stage all along"
        assert schedule.peak_live_slices()[stage_id] <= min(peak_of_last + lead, total)


def test_a_longer_micro_batch_does_not_empty_the_pipeline() -> None:
    slots = {name: count_slots(build(name, 8, 6, [2, 8, 4, 6, 2, 8])).num_slots for name in ("seq1f1b", "terapipe")}
    assert slots["seq1f1b"] <= 1.15 * slots["terapipe"]


def test_the_tables_in_the_comments_are_true() -> None:
    shapes: dict[str, Any] = {name: (2 if name in CHUNKED_SCHEDULES else 3, 2, 2) for name in SCHEDULE_NAMES}
    shapes |= {"interleaved": (2, 2, 1), "seq1f1b-interleaved": (2, 1, 3)}
    shapes |= {"seq1f1b-interleaved-zb": (2, 1, 2), "zbv": (2, 2, 1)}
    for name, generator in generate.GENERATORS.items():
        source = inspect.getsource(sys.modules[generator.__module__])
        schedule = build(name, *shapes[name], chunks_per_stage=2 if name in CHUNKED_SCHEDULES else 1)
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
    with pytest.raises(ScheduleError, match=r"unknown schedule 'own.csv' \(to read a file: --from-csv"):
        build("own.csv", 2, 2, 2)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", None, True])
def test_counts_are_whole_numbers_of_at_least_one(bad: Any) -> None:
    counts = {"num_stages": (bad, 2, 2), "num_micro_batches": (2, bad, 2), "num_slices": (2, 2, bad)}
    for what, arguments in {**counts, r"num_slices\[1\]": (2, 2, [1, bad])}.items():
        with pytest.raises(ScheduleError, match=rf"{what} = .*: give an integer >= 1"):
            build("gpipe", *arguments)


def test_a_slice_count_for_every_micro_batch() -> None:
    for counts in ([1, 1, 1], []):
        with pytest.raises(
            ScheduleError,
            match=f"{len(counts)} entries: give one number of slices for each micro-batch; the step has 2",
        ):
            build("gpipe", 2, 2, counts)
    assert build("1f1b", np.int64(2), np.int32(2), np.array([2, 3])) == build("1f1b", 2, 2, [2, 3])


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_a_schedule_does_not_take_is_refused(name: str) -> None:
    if "interleaved" not in name:
        with pytest.raises(ScheduleError, match="chunks_per_stage is 3: .*leave it (at 1|out)"):
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


# --- backwards that are split in B and W


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_zb_h1_equals_torchs_order(num_stages: int) -> None:
    """That of ZB1P, from K micro-batches on. With fewer no stage is full: ours fills the waits at the end earlier."""
    for num_micro_batches in (num_stages, num_stages + 1, 2 * num_stages, 3 * num_stages + 2):
        schedule = build("zb-h1", num_stages, num_micro_batches, 1)
        for rank in range(num_stages):
            warm_up = min(num_stages - 1 - rank, num_micro_batches)
            more = {"num_1f1b_microbatches": rank, "enable_zero_bubble": True}
            assert schedule.compute_order(rank) == torch_order(num_stages, num_micro_batches, rank, warm_up, **more)


@given(even_shapes)
def test_what_is_between_f_and_w_stays_within_the_formula(shape: tuple[int, int, int]) -> None:
    num_stages, _, s = shape
    assert max(build("seq1f1b-zb", *shape).peak_live_slices()) <= num_stages + s - 1
    assert max(build("zb-h1", *shape).peak_live_slices()) <= num_stages * s
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        peak, peak_of_base = (max(build(each, *shape).peak_live_slices()) for each in (name, base))
        assert peak == peak_of_base, "stage 0 of the base has as many"


@given(ragged_shapes)
def test_f_and_b_stand_as_without_w_and_each_b_has_one_w(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        schedule, unsplit = (build(each, num_stages, len(num_slices), num_slices) for each in (name, base))
        validate(schedule)
        for order, plain in zip(schedule.orders, unsplit.orders, strict=True):
            assert [a for a in order if a.kind is not Kind.WEIGHT] == list(plain)
            backwards = [a.unit for a in order if a.kind is Kind.BACKWARD]
            assert [a.unit for a in order if a.kind is Kind.WEIGHT] == backwards, "in the order of the B"


@given(even_shapes)
def test_no_slower_and_with_waits_to_fill_faster(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    plan, costs = SlicePlan.equal(60, s), UnitCosts(60)
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        split, plain = (simulate(build(each, *shape), plan, costs).makespan_s for each in (name, base))
        assert split <= plain + 1e-9
        if num_stages > 1 and m > num_stages:
            assert split < plain - 1e-9
