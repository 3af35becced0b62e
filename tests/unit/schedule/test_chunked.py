"""Schedules whose stages hold several chunks: on a loop, on a V, and in both directions."""

import dataclasses
import itertools
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import GOLDEN, bidirectional, by_hand, even_shapes, golden_order, ragged_shapes, torch_order

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build, count_parts, placement_for
from terapipe_ds.schedule.placement import v_shape
from terapipe_ds.schedule.show import count_slots
from terapipe_ds.schedule.validate import replay
from terapipe_ds.simulator import UnitCosts, simulate

LOOPED = ("interleaved", "seq1f1b-interleaved", "seq1f1b-interleaved-zb")
BIDIRECTIONAL = ("chimera", "chimera-seq")
even_stages = st.integers(1, 4).map(lambda half: 2 * half)
slice_counts = st.lists(st.integers(1, 5), min_size=1, max_size=12)
fewer = settings(max_examples=settings.default.max_examples // 5)


def peaks_of_chunks(schedule: Schedule, stage_id: int) -> list[int]:
    """The most live slices of each of the two chunks of a stage."""
    live, peaks = [0, 0], [0, 0]
    for action in schedule.orders[stage_id]:
        live[action.chunk_id] += 1 if action.kind is Kind.FORWARD else -1
        peaks[action.chunk_id] = max(peaks[action.chunk_id], live[action.chunk_id])
    return peaks


# --- evaluations


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize(("num_stages", "slices"), [(4, 1), (2, 3), (3, 4)])
def test_an_evaluation_on_a_loop_has_few_slices_in_flight(name: str, num_stages: int, slices: int) -> None:
    """At most a group, which is shorter than 2K, however many chunks there are."""
    schedule = build(name, num_stages, 40, slices, chunks_per_stage=5, forward_only=True)
    for order in schedule.orders:
        changes = [(each.chunk_id == 0) - (each.chunk_id == 4) for each in order]
        assert 0 < max(itertools.accumulate(changes)) < 2 * num_stages


# --- placements


@pytest.mark.parametrize(("name", "num_stages", "chunks", "columns"), [
    ("1f1b", 3, 1, [[0, 1, 2]]),
    ("interleaved", 3, 1, [[0, 1, 2]]),
    ("seq1f1b-interleaved", 2, 3, [[0, 1], [2, 3], [4, 5]]),
    *((name, 4, given, [[0, 1, 2, 3], [3, 2, 1, 0]]) for name in BIDIRECTIONAL for given in (1, 2)),
    *(("zbv", 3, given, [[0, 1, 2], [5, 4, 3]]) for given in (1, 2)),
])  # fmt: skip
def test_where_the_parts_of_a_schedule_are(name: str, num_stages: int, chunks: int, columns: list[list[int]]) -> None:
    """Per chunk, the parts of stage 0, 1, ..."""
    placement = {(k, c): part_id for c, column in enumerate(columns) for k, part_id in enumerate(column)}
    assert placement_for(name, num_stages, chunks) == placement
    assert count_parts(name, num_stages, chunks) == len(set(placement.values()))
    for forward_only in (False, True):
        schedule = build(name, num_stages, 3, 2, chunks_per_stage=chunks, forward_only=forward_only)
        assert (schedule.placement, schedule.chunks_per_stage) == (placement, len(columns))


@pytest.mark.parametrize(("name", "num_stages", "chunks", "advice"), [
    ("gpipe", 4, 2, "chunks_per_stage is 2: .*one part per stage, leave it at 1"),
    ("zbv", 4, 3, "chunks_per_stage is 3: .*give 2"),
    ("chimera", 4, 4, "chunks_per_stage is 4: .*give 2"),
    *((name, 3, 1, "num_stages is 3: .* even number") for name in BIDIRECTIONAL),
])  # fmt: skip
def test_counts_that_no_placement_has(name: str, num_stages: int, chunks: int, advice: str) -> None:
    with pytest.raises(ScheduleError, match=advice):
        placement_for(name, num_stages, chunks)


@fewer
@given(ragged_shapes)
def test_an_evaluation_takes_what_a_pipeline_needs_to_fill(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    units = sum(num_slices)

    def slots(name: str, chunks: int, stages: int = num_stages) -> int:
        schedule = build(name, stages, len(num_slices), num_slices, forward_only=True, chunks_per_stage=chunks)
        return count_slots(schedule).num_slots

    for name in BIDIRECTIONAL:
        assert slots(name, 2, 2 * num_stages) == units + 2 * num_stages - 1
    assert slots("zbv", 2) == 2 * units + 2 * num_stages - 2
    for name in LOOPED:
        assert slots(name, 1) == units + num_stages - 1
        for chunks in (2, 3):
            assert slots(name, chunks) == chunks * max(units, num_stages) + min(units, num_stages) - 1


# --- on a loop


def test_the_published_order_of_seq1f1b_on_a_loop() -> None:
    """The order of the authors of Seq1F1B: 2 stages, 4 micro-batches, 2 slices, 2 chunks."""
    schedule = build("seq1f1b-interleaved", 2, 4, 2, chunks_per_stage=2)
    assert [schedule.compute_order(k) for k in range(2)] == golden_order("seq1f1b_i_p2_m4_s2_v2")


@pytest.mark.parametrize(("num_stages", "rounds", "chunks"), [(2, 2, 2), (4, 2, 2), (4, 1, 3), (3, 3, 2), (8, 2, 4)])
def test_interleaved_as_in_torch_where_k_divides_m(num_stages: int, rounds: int, chunks: int) -> None:
    """torch's ScheduleInterleaved1F1B, which is Megatron's order there."""
    m = num_stages * rounds
    schedule = build("interleaved", num_stages, m, 1, chunks_per_stage=chunks)
    for rank in range(num_stages):
        warm_up = min((chunks - 1) * num_stages + 2 * (num_stages - 1 - rank), m * chunks)
        assert schedule.compute_order(rank) == torch_order(num_stages, m, rank, warm_up, chunks)


@pytest.mark.parametrize(("name", "base"), list(zip(LOOPED[:2], ("1f1b", "seq1f1b"), strict=True)))
@fewer
@given(shape=ragged_shapes)
def test_one_chunk_is_the_schedule_without_chunks(name: str, base: str, shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    chunked, plain = (build(each, num_stages, len(num_slices), num_slices) for each in (name, base))
    assert (chunked.orders, chunked.placement, chunked.chunks_per_stage) == (plain.orders, plain.placement, 1)


@fewer
@given(even_shapes, st.integers(2, 4))
def test_peaks_of_live_slices_on_a_loop(shape: tuple[int, int, int], chunks: int) -> None:
    """(v - 1) G + 2 (K - 1 - i) + 1 micro-batches on stage i, of v m at most; G: what a group has."""
    num_stages, m, s = shape
    group = -(-m // max(m // num_stages, 1))
    schedule = build("interleaved", num_stages, m, s, chunks_per_stage=chunks)
    for stage_id, peak in enumerate(schedule.peak_live_slices()):
        bound = s * min((chunks - 1) * group + 2 * (num_stages - 1 - stage_id) + 1, chunks * m)
        assert peak <= bound if m % num_stages else peak == bound
    by_slices = build("seq1f1b-interleaved", num_stages, m, s, chunks_per_stage=chunks).peak_live_slices()
    group = -(-m * s // max(m * s // num_stages, 1))
    for stage_id, peak in enumerate(by_slices):
        # before the B of a micro-batch's last slice stand the forwards of the groups that it reaches into
        groups_ahead = (chunks - 1) * group * (1 + -(-(s - 1) // group))
        assert peak <= min(groups_ahead + 2 * s + 2 * (num_stages - 1 - stage_id), chunks * m * s)
        if s <= num_stages and num_stages % s == 0 and (m * s) % num_stages == 0:
            assert peak == min((chunks - 1) * num_stages + s + 2 * (num_stages - 1 - stage_id), chunks * m * s)


@fewer
@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 4), st.integers(2, 3))
def test_the_bubble_on_a_loop_is_a_vth(num_stages: int, rounds: int, s: int, chunks: int) -> None:
    """Where K divides m: (K - 1)(F + B) / v over the ideal m (F + B) (Narayanan et al., section 2.2)."""
    m = num_stages * rounds
    costs = UnitCosts(60, share=1 / chunks)
    whole = simulate(build("interleaved", num_stages, m, 1, chunks_per_stage=chunks), SlicePlan((60,)), costs)
    assert whole.makespan_s == pytest.approx(3 * m + 3 * (num_stages - 1) / chunks)
    if num_stages % s == 0:
        sliced = build("seq1f1b-interleaved", num_stages, m, s, chunks_per_stage=chunks)
        makespan_s = simulate(sliced, SlicePlan.equal(60, s), costs).makespan_s
        assert makespan_s == pytest.approx(3 * m + 3 * (num_stages - 1) / (chunks * s))


def test_forwards_run_in_groups_chunk_by_chunk() -> None:
    """5 micro-batches on 2 stages: groups of 3 and 2, never of 1, which would wait for itself."""
    schedule = build("interleaved", 2, 5, 1, chunks_per_stage=2)
    for order in schedule.orders:
        forwards = [(a.micro_batch_id, a.chunk_id) for a in order if a.kind is Kind.FORWARD]
        assert forwards == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


# --- on a V


def torch_zbv(num_stages: int, num_micro_batches: int) -> Schedule:
    """torch's ScheduleZBVZeroBubble, the order of the authors of ZB-V."""
    from torch.distributed.pipelining import schedules

    me: Any = types.SimpleNamespace(
        pp_group_size=num_stages, num_stages=2 * num_stages, _n_microbatches=num_micro_batches
    )
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    rows = []
    for rank in range(num_stages):
        actions = filter(None, schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(me, rank))
        places = [(a, f"{a.microbatch_index}.0c{int(a.stage_index >= num_stages)}") for a in actions]
        rows.append([letters[a.computation_type.name] + place for a, place in places])
    return by_hand(rows, v_shape(num_stages))


@pytest.mark.parametrize(("num_stages", "m"), [(1, 3), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (8, 24)])
def test_zbv_next_to_the_authors_order(num_stages: int, m: int) -> None:
    """At F = B = W: no longer than theirs while the pipeline fills and drains (m = K), within 5 % where they have no
    bubble but the fill, and with the same memory."""
    ours, theirs = build("zbv", num_stages, m, 1), torch_zbv(num_stages, m)
    assert max(ours.peak_live_slices()) == max(theirs.peak_live_slices()) == 2 * num_stages
    slots, their_slots = count_slots(ours).num_slots, count_slots(theirs).num_slots
    assert 6 * m + num_stages - 1 <= slots
    assert slots <= (their_slots if m <= num_stages else 1.06 * their_slots)
    if m == num_stages:
        assert slots == 6 * m + num_stages - 1, "nothing idles but the fill"


@dataclasses.dataclass(frozen=True)
class Shares(UnitCosts):
    """W has a share of the backward."""

    weight_share: float = 0.5

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.weight_share * self.backward_s(tokens, prefix)


@fewer
@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 4))
def test_a_shorter_bubble_on_a_v_than_on_a_line(num_stages: int, m: int, s: int) -> None:
    """At F = B = W than 1F1B by slices always. Where W is a half, two fifths or three tenths of a backward, no longer
    on average than its zero-bubble form but for a slot or two that a greedy order loses (five hundredths)."""
    plan = SlicePlan.equal(60, s)

    def seconds(name: str, weight_share: float) -> float:
        schedule = build(name, num_stages, m, s)
        costs = Shares(60, share=1 / schedule.chunks_per_stage, weight_share=weight_share)
        return simulate(schedule, plan, costs).makespan_s

    assert seconds("zbv", 0.5) < seconds("seq1f1b", 0.5) - 1e-9
    on_a_v, on_a_line = (sum(seconds(name, share) for share in (0.5, 0.4, 0.3)) for name in ("zbv", "seq1f1b-zb"))
    assert on_a_v <= 1.05 * on_a_line


# --- in both directions


def test_the_published_order_of_chimera() -> None:
    """Nothing starts after its published slot; a stage that need not wait starts some forwards before it."""
    schedule = build("chimera", 4, 4, 1)
    assert (schedule.orders, schedule.placement) == (bidirectional().orders, bidirectional().placement)
    published = [[int(cell.split(":")[0]) for cell in row] for row in GOLDEN["chimera_D4N4"]["devices"].values()]
    for ours, theirs in zip(replay(schedule), published, strict=True):
        assert all(slot <= given for slot, given in zip(ours, theirs, strict=True))
        assert ours[-1] == theirs[-1]


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_idle_slots_of_chimera_at_f_equal_to_b(num_stages: int, units: int) -> None:
    """K - 2 of each device (Li and Hoefler, table 2), however many basic units follow one another."""
    count = count_slots(build("chimera", num_stages, units * num_stages, 1))
    assert count.num_idle == num_stages * (num_stages - 2)
    assert count.num_slots == 2 * units * num_stages + num_stages - 2


@pytest.mark.parametrize("m", [1, 3, 4, 8])
def test_by_slices_with_one_slice_each_it_is_the_schedule_of_whole_micro_batches(m: int) -> None:
    assert build("chimera-seq", 4, m, 1).orders == build("chimera", 4, m, 1).orders


@given(even_stages, st.integers(1, 12), st.integers(1, 4))
def test_live_slices_of_chimera(num_stages: int, m: int, s: int) -> None:
    """min(K / 2, K - k) micro-batches of the direction whose stage k it is, for both directions."""
    half = num_stages // 2
    for k, peak in enumerate(build("chimera", num_stages, m, s).peak_live_slices()):
        bound = s * (min(half, num_stages - k) + min(half, k + 1))
        assert peak <= bound if m < num_stages else peak == bound


@fewer
@given(even_stages, slice_counts)
def test_live_slices_of_chimera_by_slices(num_stages: int, num_slices: list[int]) -> None:
    """2(K - k) + s - 1 of the direction whose stage k it is, for both directions; where all fit, as many as there are.

    (With one slice each it is chimera, whose peak is lower.)
    """
    schedule = build("chimera-seq", num_stages, len(num_slices), num_slices)
    s = max(num_slices)
    for stage_id in range(num_stages):
        down, up = peaks_of_chunks(schedule, stage_id)
        assert down <= 2 * (num_stages - stage_id) + s - 1
        assert up <= 2 * (stage_id + 1) + s - 1
    assert max(schedule.peak_live_slices()) <= 2 * (num_stages + s)


@pytest.mark.parametrize(("num_stages", "m", "s"), [(4, 4, 4), (4, 8, 4), (8, 4, 4), (8, 8, 4), (8, 8, 8)])
def test_slices_shorten_both_and_by_slices_takes_less_memory(num_stages: int, m: int, s: int) -> None:
    """At F = 1, B = 2: faster than seq1f1b, and than chimera without slices; at less memory than chimera with them."""
    plan, costs = SlicePlan.equal(480, s), UnitCosts(480)
    by_slices, whole, one_way = (build(name, num_stages, m, s) for name in ("chimera-seq", "chimera", "seq1f1b"))
    makespan_s = simulate(by_slices, plan, costs).makespan_s
    assert makespan_s < simulate(one_way, plan, costs).makespan_s
    assert makespan_s < simulate(build("chimera", num_stages, m, 1), SlicePlan((480,)), costs).makespan_s
    assert max(by_slices.peak_live_slices()) <= max(whole.peak_live_slices())
