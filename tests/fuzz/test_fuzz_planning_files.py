"""Slice plans, profiles, schedules as CSV, timelines: the files of planning and simulation."""

import csv
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.costs.profile import CostSample, LinkSample, PartProfile, Profile, ProfileError, ProfileKey
from terapipe_ds.plan import PlanError, SlicePlan
from terapipe_ds.schedule import ScheduleError, build, from_csv, to_csv
from terapipe_ds.schedule.show import render, to_dict
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.strategy import Strategy, StrategyError
from terapipe_ds.timeline import Timeline, TimelineError
from terapipe_ds.timeline.compare import compare
from terapipe_ds.timeline.export import to_chrome_trace
from terapipe_ds.timeline.export import to_csv as events_as_csv
from tests.fuzz.damage import spoilt_bytes
from tests.fuzz.outcome import accepted, cases, files_of, no_key_twice
from tests.unit.schedule.schedule_cases import obeys_the_rules

# -- slice plans


PLAN = {"version": 1, "lengths": [512, 384, 128]}


@files_of(PLAN, PlanError, lambda path: SlicePlan.from_json(path.read_bytes()), 200, 5000, named=False)
def test_slice_plans(plan: SlicePlan, data: bytes) -> None:
    document = no_key_twice(data)
    assert list(plan.lengths) == document["lengths"]
    assert all(type(length) is int and length >= 1 for length in document["lengths"])
    assert document == json.loads(plan.to_json())
    assert SlicePlan.from_json(plan.to_json()) == plan


# -- strategies

STRATEGY = Strategy(
    axes=["data", "pipe", "model"], dims=[2, 2, 1], devices_per_node=2, partition=[0, 2, 3, 5, 7], chunks_per_stage=2,
    schedule="interleaved", slices=[512, 384, 128], micro_batch_size=2, accumulation=4, recompute=[1], zero_stage=1,
    dtype="bfloat16", predicted_s=1.5, lower_bound_s=1.25, memory_bytes=[10**9, 2 * 10**9], model="mini",
)  # fmt: skip


def read_strategy(path: Path) -> Strategy:
    return Strategy.from_json(path.read_bytes())


@files_of(json.loads(STRATEGY.to_json()), StrategyError, read_strategy, 200, 5000, named=False)
def test_strategies(strategy: Strategy, data: bytes) -> None:
    document = no_key_twice(data)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert all(json.loads(strategy.to_json())[key] == value for key, value in document.items())
    config = strategy.to_deepspeed()
    section = accepted("section of a strategy", TeraPipeConfigError, lambda: TeraPipeConfig.from_deepspeed(config))
    if section is not None:
        assert section.plan_for(sum(strategy.slices)) == strategy.plan
        again = section.recomputing_stages(strategy.grid["pipe"])
        assert again is not None and all(0 <= stage_id < strategy.grid["pipe"] for stage_id in again)
    if math.prod(strategy.dims) < 10_000:
        assert max(node for node, _ in strategy.placement.values()) + 1 == strategy.num_nodes
    assert strategy.launch_command("hosts").startswith("deepspeed --hostfile hosts ")
    assert str(strategy)


# -- profiles

KEY = ProfileKey("5f2c", "tiny, 4 layers", "cpu", "fp32", 2, 1, 2, False, 512, "cpu_flash", {"torch": "2.13.0"})
SAMPLES = tuple(
    CostSample(tokens, prefix, 1e-5 * tokens + 1e-8 * tokens * prefix, 3e-5 * tokens, 0.05, 0.04, 5)
    for tokens in (64, 128, 256)
    for prefix in (0, 128, 256)
)
PROFILE = Profile(
    KEY, (PartProfile(0, SAMPLES, step_s=0.004), PartProfile(1, SAMPLES[:4])), (LinkSample(256, 1e-4, 0, 0.1, 9),), 1
)


@files_of(json.loads(PROFILE.to_json()), ProfileError, Profile.load, 150, 5000)
def test_profiles(profile: Profile, data: bytes) -> None:
    assert Profile.from_json(profile.to_json()) == profile
    document = no_key_twice(data)
    assert all(s[key] > 0 for part in document["parts"] for s in part["samples"] for key in ("forward_s", "backward_s"))
    assert [part["part_id"] for part in json.loads(profile.to_json())["parts"]] == sorted(
        part["part_id"] for part in document["parts"]
    )
    times = sorted(float(sample["forward_s"]) for part in document["parts"] for sample in part["samples"])
    assert times == sorted(sample.forward_s for part in profile.parts for sample in part.samples)


@files_of(json.loads(PROFILE.to_json()), ProfileError, Profile.load, 60, 1500)
def test_what_is_fitted_to_a_profile(profile: Profile, data: bytes) -> None:
    """A profile that can be read can be fitted, or the fit says why not; its costs are numbers."""
    from terapipe_ds.costs.fitted import CostModel, CostModelError

    models = accepted("fit", CostModelError, lambda: CostModel.from_profile(profile))
    for model in models or ():
        for tokens, prefix in ((model.min_tokens, 0), (64, 128)):
            try:
                times = model.forward_s(tokens, prefix), model.backward_s(tokens, prefix)
            except CostModelError:
                continue
            assert all(math.isfinite(time_s) and time_s >= 0 for time_s in times)
        str(model.report)


# -- schedules as CSV

CSV = [
    to_csv(build(name, stages, m, slices)).encode()
    for name, stages, m, slices in (("seq1f1b", 3, 2, 2), ("gpipe", 2, 1, 3), ("1f1b", 4, 3, 1), ("terapipe", 1, 1, 2))
]
_cells = st.sampled_from(["F0.0", "F0.1", "B0.0", "B0.1", "W0.0", "F1.0", "B1.0", "", " F0.0 ", "F00.0", "F0.0c1", "x"])
_rows = st.lists(st.lists(_cells, max_size=6), max_size=4).map(lambda rows: "\n".join(map(",".join, rows)))
_big = st.sampled_from(["F999999999.0", "F0.999999999", "F0.0c999999999", "F" + "9" * 5000 + ".0", '"', "\r", "F0,0"])


@st.composite
def csv_texts(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(CSV).flatmap(spoilt_bytes)).decode("utf-8", "replace") if draw(st.booleans()) else ""
    if draw(st.booleans()):
        cells = (text or CSV[0].decode()).split(",")
        for _ in range(draw(st.integers(0, 3))):
            a, b = (draw(st.integers(0, len(cells) - 1)) for _ in range(2))
            cells[a], cells[b] = cells[b], cells[a]
        if draw(st.booleans()):
            cells[draw(st.integers(0, len(cells) - 1))] = draw(_cells | _big)
        text = ",".join(cells)
    return text or draw(_rows)


@cases(200, 5000)
@given(csv_texts())
def test_schedules_as_csv(text: str) -> None:
    schedule = accepted("schedule CSV", ScheduleError, lambda: from_csv(text))
    if schedule is None:
        return
    rows = [[c.strip() for c in row] for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))]
    rows = [row[: max((i + 1 for i, cell in enumerate(row) if cell), default=0)] for row in rows]
    while not rows[-1]:
        rows.pop()
    written = [schedule.compute_order(stage_id) for stage_id in range(schedule.num_stages)]
    chunk = "c0" if schedule.chunks_per_stage > 1 else ""
    complete = (lambda c: c if "c" in c else c + chunk) if chunk else (lambda c: c.removesuffix("c0"))
    assert written == [[*map(complete, row)] for row in rows]
    assert obeys_the_rules(schedule), "by a run that does not use the validator"
    every = {cell for order in written for cell in order if cell[0] != "W"}
    for order in written:
        assert len(set(order)) == len(order) and {cell for cell in order if cell[0] != "W"} == every
        assert schedule.forward_only or {c[1:] for c in order if c[0] == "F"} == {c[1:] for c in order if c[0] == "B"}
    assert from_csv(to_csv(schedule)) == schedule
    render(schedule)
    to_dict(schedule)


PLACED_CSV = [to_csv(build(name, 2, 2, 2)).encode() for name in ("chimera", "chimera-seq", "zbv")]


@cases(100, 3000)
@given(st.sampled_from(PLACED_CSV).flatmap(spoilt_bytes))
def test_schedules_as_csv_with_a_placement(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    schedule = accepted("schedule CSV", ScheduleError, lambda: from_csv(text))
    if schedule is None:
        return
    first = [cell.strip() for cell in text.removeprefix("\ufeff").splitlines()[0].replace('"', "").split(",")]
    if first[0] == "placement":
        parts = [[int(part) for part in cell.split("/")] for cell in first[1:] if cell]
        assert schedule.placement == {(k, c): part for k, mine in enumerate(parts) for c, part in enumerate(mine)}
    assert from_csv(to_csv(schedule)) == schedule


# -- timelines

SIMULATED = simulate(build("seq1f1b", 2, 2, 2), SlicePlan((3, 1)), UnitCosts(4, 0.1))
MEASURED = Timeline(2, SIMULATED.events, "seq1f1b", (2, 1), (10**9, 2 * 10**9))


def check_timeline(timeline: Timeline, data: bytes) -> None:
    document = no_key_twice(data)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert json.loads(timeline.to_json())["events"] == document["events"]
    assert 0.0 <= timeline.bubble_fraction <= 1.0
    assert all(math.isfinite(number) for number in (timeline.makespan_s, *timeline.busy_s(), *timeline.bubbles()))
    json.loads(to_chrome_trace(timeline))
    assert len(list(csv.reader(io.StringIO(events_as_csv(timeline))))) == 1 + len(document["events"])
    comparison = accepted("compare", TimelineError, lambda: compare(SIMULATED, timeline))
    if comparison is not None:
        json.dumps((comparison.render(), comparison.to_dict()), allow_nan=False)


@files_of(json.loads(SIMULATED.to_json()), TimelineError, Timeline.load, 75, 2500)
def test_simulated_timelines(timeline: Timeline, data: bytes) -> None:
    check_timeline(timeline, data)


@files_of(json.loads(MEASURED.to_json()), TimelineError, Timeline.load, 75, 2500)
def test_measured_timelines(timeline: Timeline, data: bytes) -> None:
    check_timeline(timeline, data)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_files_that_cannot_be_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read the profile"):
        Profile.load(tmp_path / name)
    with pytest.raises(OSError):  # the command line names file and remedy
        Timeline.load(tmp_path / name)
