"""What the figures mean, on traces that are worked by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.bench import metrics
from terapipe_ds.bench.drivers.deepspeed import of_dualpipev
from terapipe_ds.bench.drivers.torch_pipeline import of_torch
from terapipe_ds.bench.metrics import Recorded, StepTrace, ideal_bubble, replay_s
from terapipe_ds.bench.table import noise_sentences
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build, validate
from terapipe_ds.schedule.placement import loop, v_shape
from terapipe_ds.timeline import Timeline
from terapipe_ds.timeline.waits import exposed_comm_s


def event(kind: str, slice_id: int, start_s: float, end_s: float, cpu_s: float = 0.0) -> Recorded:
    return Recorded(kind, 0, slice_id, 0, start_s, end_s, cpu_s)


#            0    1    2    3    4    5    6    7    8
# stage 0    F0   F1             .    .B1  .    .B0  .      closing 8.7 to 9.0
# stage 1         .F0  .F1  B1   B0
TRACE = StepTrace([[
    event("F", 0, 100.0, 101.0, 0.9), event("F", 1, 101.0, 102.0, 0.8), event("B", 1, 104.5, 106.5, 1.9),
    event("B", 0, 106.6, 108.6, 1.8), event("ST", -1, 108.7, 109.0, 0.2),
], [
    event("F", 0, 101.1, 102.1, 1.0), event("F", 1, 102.3, 103.3, 1.0), event("B", 1, 103.3, 104.3, 0.7),
    event("B", 0, 104.3, 105.3, 0.6), event("RD", -1, 105.3, 105.4, 0.1),
]])  # fmt: skip
SCHEDULE = build("seq1f1b", 2, 1, 2)


def test_the_bubble_is_what_no_computation_fills() -> None:
    timeline = TRACE.timeline()
    assert timeline.busy_s() == pytest.approx((6.0, 4.0))
    assert timeline.bubble_fraction == pytest.approx(1 - 10.0 / (2 * 8.6))  # from 100 to 108.6, without the closing
    assert TRACE.closing_s() == pytest.approx((0.3, 0.1)) and TRACE.closing_s("cpu") == pytest.approx((0.2, 0.1))
    assert StepTrace([[], []]).timeline().bubble_fraction == 0.0


def test_exposed_communication_begins_where_stage_and_input_are_ready() -> None:
    # stage 0: B1 is computed at 104.3, starts at 104.5; B0 is computed at 105.3, but stage 0 is free at 106.5 only
    # stage 1: F0 is computed at 101.0, starts at 101.1; F1 is computed at 102.0, stage 1 is free at 102.1
    assert exposed_comm_s(TRACE.timeline(), SCHEDULE.placement) == pytest.approx((0.2 + 0.1, 0.1 + 0.2))


@pytest.mark.parametrize(("name", "stages", "m", "slices"), [
    ("1f1b", 2, 1, 1), ("1f1b", 4, 8, 1), ("gpipe", 3, 4, 1), ("terapipe", 2, 1, 8), ("seq1f1b", 4, 2, 8),
])  # fmt: skip
def test_ideal_bubbles_follow_the_formula_of_the_paper(name: str, stages: int, m: int, slices: int) -> None:
    assert ideal_bubble(build(name, stages, m, slices)) == pytest.approx((stages - 1) / (m * slices + stages - 1))


def test_unsliced_seconds_are_the_medians_of_the_fastest_system_on_each_stage() -> None:
    def step(*busy_s: float) -> Timeline:
        return StepTrace([[event("F", 0, 0.0, seconds)] for seconds in busy_s]).timeline()

    first = [step(8.0, 4.0), step(6.0, 4.2), step(6.4, 9.0)]  # medians 6.4 and 4.2
    second = [step(7.0, 4.0), step(7.0, 4.0), step(1.0, 4.0)]  # 7.0 and 4.0
    assert metrics.unsliced_s([first, second], 2) == pytest.approx((3.2, 2.0))


def test_a_replay_puts_cpu_times_and_links_in_the_schedule() -> None:
    links = {3: 0.25, 5: 0.5}
    seconds, timeline = replay_s(TRACE, SCHEDULE, (SlicePlan((5, 3)),) * SCHEDULE.num_micro_batches, links)
    # stage 1: F0 waits for 0.9 + 0.5, F1 for 1.7 + 0.25 but stage 1 is busy until 2.4; then F1, B1, B0 end at 4.7
    # stage 0: B1 waits for B1 of stage 1 (4.1) + 0.25 = 4.35, ends at 6.25; B0 is there at 4.7 + 0.5, ends at 8.05
    assert timeline.makespan_s == pytest.approx(8.05)
    assert seconds == pytest.approx(8.05 + 0.2)  # and the slowest stage's closing
    blocking, _ = replay_s(TRACE, SCHEDULE, (SlicePlan((5, 3)),) * SCHEDULE.num_micro_batches, links, blocking=True)
    # now F1 of stage 0 starts at 1.4 and is sent by 2.45: F1 of stage 1 ends at 3.45, B1 is sent by 4.4
    assert blocking == pytest.approx(4.4 + 1.9 + 1.8 + 0.2)


def test_a_replay_takes_the_mean_over_micro_batches() -> None:
    def unit(micro_batch_id: int, kind: str, cpu_s: float) -> Recorded:
        return Recorded(kind, micro_batch_id, 0, 0, 0.0, 1.0, cpu_s)

    trace = StepTrace([[unit(0, "F", 1.0), unit(0, "B", 2.0), unit(1, "F", 3.0), unit(1, "B", 6.0)]])
    seconds, _ = replay_s(trace, build("1f1b", 1, 2, 1), (SlicePlan((8,)),) * 2, {})
    assert seconds == pytest.approx(2 * (2.0 + 4.0))


@pytest.mark.parametrize(("stages", "m"), [(2, 4), (3, 9)])
def test_dualpipev_is_a_schedule_that_runs_and_idles_less(stages: int, m: int) -> None:
    schedule = of_dualpipev(stages, m)
    validate(schedule)
    assert schedule.placement == v_shape(stages)
    assert ideal_bubble(schedule) < (stages - 1) / (m + stages - 1)


def test_orders_of_torch_become_schedules() -> None:
    """Interleaved 1F1B of 2 ranks, 2 parts each, 2 micro-batches, as torch 2.13 writes it."""

    def action(text: str) -> Any:
        kind = SimpleNamespace(value=text[1])
        return SimpleNamespace(stage_index=int(text[0]), computation_type=kind, microbatch_index=int(text[2]))

    order = {
        0: ["0F0", "0F1", "2F0", "2F1", None, "2B0", None, "2B1", "0B0", "0B1"],
        1: [None, "1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1B0", "1B1"],
    }
    actions = {rank: [a and action(a) for a in mine] for rank, mine in order.items()}
    schedule = of_torch("interleaved1f1b", actions, loop(2, 2))
    validate(schedule)
    assert schedule.compute_order(0)[:4] == ["F0.0c0", "F1.0c0", "F0.0c1", "F1.0c1"]
    split = {0: [action(a) for a in ("0F0", "1F0", "1I0", "1W0", "0I0", "0W0")]}
    with_weights = of_torch("zbv", split, v_shape(1))
    validate(with_weights)
    assert with_weights.compute_order(0)[2:] == ["B0.0c1", "W0.0c1", "B0.0c0", "W0.0c0"]


def test_what_other_programs_took_of_the_cores() -> None:
    # stage 0: 0.1 + 0.2 + 0.1 + 0.2; stage 1: 0.0 + 0.0 + 0.3 + 0.4; reduce and optimizer do not count
    assert TRACE.off_core_s() == pytest.approx(0.7)
    assert StepTrace([[event("F", 0, 0.0, 1.0, 1.2)]]).off_core_s() == 0.0  # helper threads of its own


def test_drift_compares_whole_micro_batches() -> None:
    costs = [SimpleNamespace(forward_s=lambda t, p: 0.01 * t, backward_s=lambda t, p: 0.02 * t + p)] * 2
    assert metrics.drift([3.5, 3.1], costs, 100) == pytest.approx(1.1)


def _row(accumulation: int, label: str, drifted: float | None, lost_s: float | None, **more: Any) -> dict[str, Any]:
    figures = {"accumulation": accumulation, "label": label, "drift": drifted, "off_core_s": lost_s}
    return figures | {"step_s": 2.0, "replayed": False} | more


def test_only_a_machine_that_was_not_quiet_is_told_of() -> None:
    quiet = [_row(1, "a", 1.01, 0.03), _row(4, "b", 0.99, None), _row(4, "c", None, None, error="x")]
    assert noise_sentences({"runs": quiet}) == []
    slower, busy = noise_sentences({"runs": [*quiet, _row(8, "d", 1.065, 0.1), _row(9, "d", 1.065, 0.02)]})
    assert "1.010 with m = 1, 0.990 with m = 4, 1.065 with m = 8" in slower
    assert "5.0% of a step (d, m = 8)" in busy
    assert noise_sentences({"runs": [_row(1, "a", 2.0, 1.0, replayed=True)]}) == []
