"""Rows, the form of the JSON, the table, and what the command refuses."""

import argparse
import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.bench.cases import PLAN, PRESETS, SCHEDULES, Case, Job, all_cases, choose
from terapipe_ds.bench.metrics import Recorded, SliceMeasurements
from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload
from terapipe_ds.bench.report.data import Run, read_result
from terapipe_ds.bench.run import result_of
from terapipe_ds.bench.table import render
from terapipe_ds.bench.train_in_turns import PlannedCases
from terapipe_ds.cli import main
from terapipe_ds.commands import bench as command
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build, load, to_csv
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import Timeline

WORK = Workload(stages=2, accumulation=1, sequence_length=8, micro_batch=2, hidden=4, layers=2, heads=1)


def record(case: int, stage_id: int, name: str, slices: list[int], scale: float, loss: float | None) -> dict[str, Any]:
    """A rank's record of two steps in which every F takes ``scale`` and every B twice that, back to back."""
    schedule = build(name, 2, 1, len(slices))
    events = []
    for i, action in enumerate(schedule.orders[stage_id]):
        seconds = scale * (2 if action.kind.value == "B" else 1)
        events.append(Recorded(action.kind.value, 0, action.slice_id, 0, 10.0 * i, 10.0 * i + seconds, seconds))
    events.append(Recorded("ST", -1, -1, 0, 500.0, 500.5, 0.5))
    return {
        "case": case, "accumulation": 1, "plans": (SlicePlan(slices),),
        "seconds": [8.0 * scale, 6.0 * scale + stage_id],
        "losses": [None if loss is None else loss + 0.1, loss, loss], "events": [events, events],
        "peak_bytes": 1000 + stage_id, "static_bytes": 600, "schedule": schedule,
    }  # fmt: skip


def ranks(**changes: Any) -> list[dict[str, Any]]:
    """Stock at twice the pace of slices, and a case that could not be built."""
    found = []
    for stage_id in range(2):
        runs = [
            record(0, stage_id, "1f1b", [8], 2.0, 5.0),
            record(1, stage_id, "seq1f1b", [4, 4], 1.0, changes.get("loss", 5.0)),
            {"case": 2, "accumulation": 1, "error": "no such thing" if stage_id == 1 else None},
        ]
        found.append({"runs": runs, "measured": SliceMeasurements({}, {}, {8: 0.25, 4: 0.125})})
    return found


CASES = (Case("deepspeed", "1f1b"), Case("terapipe", "seq1f1b", 2), Case("torch", "zbv"))
MACHINE = {"cpu": "made up", "cores": 2, "date": "2000-01-01"}


def result(cases: tuple[Case, ...] = CASES, preset: str = "cpu-2stage", **options: Any) -> dict[str, Any]:
    given = {"loss": options.pop("loss", 5.0)}
    of_device = {"device": "a device", "attention": "cuda_flash"} if "device" in options else {}
    records = [{**found, **of_device} for found in ranks(**given)]
    return result_of(Job(WORK, cases, (1,), 2, **options), preset, MACHINE, records)


def test_the_json_has_the_agreed_form() -> None:
    written = json.loads(json.dumps(result()))
    assert set(written) >= {"machine", "preset", "runs"} and written["machine"] == MACHINE
    labels = [run.label for run in read_result(written).runs if isinstance(run, Run)]
    assert labels == ["deepspeed 1f1b", "terapipe seq1f1b, 2 slices"]
    *going, failed = written["runs"]
    assert [Timeline.from_json(json.dumps(row["timeline"])).num_stages for row in going] == [2, 2]
    assert failed["error"] == "no such thing" and "step_s" not in failed
    assert (failed["system"], failed["schedule"], failed["accumulation"]) == ("torch", "zbv", 1)


def test_rows_by_hand() -> None:
    stock, sliced, _ = result()["runs"]
    assert stock["step_s_all"] == [16.0, 13.0]  # the slowest rank of each step: 12 + 1
    assert sliced["step_s_all"] == [8.0, 7.0] and sliced["step_s"] == 7.5
    assert sliced["ratio_to_stock"] == pytest.approx((16 / 8 + 13 / 7) / 2)
    assert sliced["tokens_per_s"] == pytest.approx(2 * 8 / 7.5)  # two sequences of 8 tokens
    # unsliced F + B of stock: 2 + 4 seconds; bubbles of 1/2 and 1/3; half a second to close
    assert stock["bound_s"] == pytest.approx(6 / (1 - 1 / 2) + 0.5)
    assert sliced["bound_s"] == pytest.approx(6 / (1 - 1 / 3) + 0.5)
    assert sliced["ratio_to_bound"] == pytest.approx(9.5 / 7.5)
    assert sliced["peak_bytes"] == [1000, 1001] and sliced["loss"] == 5.0 and sliced["predicted_s"] is None
    # replayed: stage 0 F, stage 1 F and B, stage 0 B, a blocking message either way
    assert stock["replayed_s"] == pytest.approx(2 + 0.25 + 6 + 0.25 + 4 + 0.5)
    assert stock["off_core_s"] == 0.0 and stock["drift"] is None  # nothing was measured to drift from


def test_flops_and_mfu_by_hand() -> None:
    """Two sequences of 8 tokens on two devices; matrices 2 x (4 x 16 + 3 x 4 x 64) + 256 x 4, attention 36 pairs."""
    sequence = 3 * (2 * 8 * (2 * (4 * 16 + 3 * 4 * 64) + 256 * 4) + 2 * 4 * 4 * 36)
    _, unknown, _ = result()["runs"]
    assert unknown["model_flops_per_s"] == pytest.approx(2 * sequence / 7.5 / 2) and unknown["mfu"] is None
    known = result(peak_tflops=1e-6)
    assert known["peak_flops_per_s"] == 1e6
    assert known["runs"][1]["mfu"] == pytest.approx(sequence / 7.5 / 1e6)
    assert f"{sequence / 7.5 / 1e6:.1%}" in render(known).splitlines()[3]
    # all stages on one device, and no card of that name
    shared = result(device="cuda", share_device=True)
    assert shared["runs"][1]["model_flops_per_s"] == pytest.approx(2 * sequence / 7.5)
    assert shared["runs"][1]["mfu"] is None and "peak_flops_per_s" not in shared


@pytest.mark.parametrize("dtype", [None, "bfloat16", "torch.float16", "half", "fp16"])
def test_autocast_has_the_peak_of_its_dtype(dtype: str | None) -> None:
    section = {"enabled": True, **({} if dtype is None else {"dtype": dtype})}
    records = [{**found, "device": "NVIDIA H100 80GB HBM3", "attention": "cuda_flash"} for found in ranks()]
    peaks = [
        result_of(Job(WORK, CASES, (1,), 2, device="cuda", ds_config=config), "cpu-2stage", MACHINE, records)
        for config in ({"torch_autocast": section}, {"torch_autocast": section | {"enabled": False}})
    ]
    assert [peak["peak_flops_per_s"] for peak in peaks] == [989.4e12, 67e12]


def test_replayed_rows_say_so_and_take_the_replayed_times() -> None:
    replayed = result(replayed=True)
    stock = replayed["runs"][0]
    assert stock["replayed"] is True and stock["step_s"] == pytest.approx(13.0) == stock["replayed_s"]
    assert stock["bubble"] == pytest.approx(1 - 12 / (2 * 12.5))  # of the replayed timeline
    text = render(replayed)
    assert "deepspeed 1f1b (replayed)" in text and "fewer cores than stages" in text


def test_columns_are_as_wide_as_their_cells() -> None:
    told = result(replayed=True)
    stock, failed, _ = told["runs"]
    stock["label"], stock["spread_s"] = "terapipe seq1f1b-interleaved-zb, 8 slices", (1000.0, 2000.0)
    told["runs"][1] = failed | {"error": "no memory"}
    _, head, row, error = render(told).splitlines()[:4]
    for name, cell in {"spread": "1000.000-2000.000 s", "step": "13.000 s", "loss": f"{stock['loss']:.5f}"}.items():
        assert head.index(f" {name}") + 1 + len(name) == row.index(f" {cell}") + 1 + len(cell), f"{head}\n{row}"
    assert error.index("error: no memory") == row.index(" (replayed)") + len(" (replayed)  "), f"{row}\n{error}"


def test_on_a_device_nothing_is_replayed() -> None:
    """What the process's CPU time was says nothing of the work that it queued."""
    on_device = result(device="cuda", share_device=True)
    stock = on_device["runs"][0]
    assert stock["replayed_s"] is None and stock["off_core_s"] is None
    assert stock["step_s_all"] == [16.0, 13.0] and stock["bubble"] > 0
    assert on_device["attention"] == "cuda_flash" and on_device["workload"]["share_device"] is True
    assert "; a device, shared by all stages, attention cuda_flash, made up, 2 cores, 2000" in render(on_device)


def test_a_system_that_learned_something_else_is_an_error() -> None:
    sliced = result(loss=5.001)["runs"][1]
    assert "its loss in step 1 is 5.101000, that of deepspeed 1f1b 5.100000" in sliced["error"]
    assert "step_s" not in sliced


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_errors(loss: float) -> None:
    """JSON has no such numbers; equal ones of all systems were rows, and the command lost all that it had measured."""
    records = ranks()
    for found in records:
        for run in found["runs"]:
            run["losses"] = [known and loss for known in run.get("losses", ())]
    rows = result_of(Job(WORK, CASES, (1,), 2), "cpu-2stage", MACHINE, records)["runs"][:2]
    assert [f"its loss in step 1 is {loss}: give" in row["error"] for row in rows] == [True, True]


@pytest.mark.parametrize(("autocast", "tolerance"), [
    ({"enabled": False, "dtype": "bf16"}, 1e-4), ({"enabled": True}, 3e-2),
    ({"enabled": True, "dtype": "bfloat16"}, 3e-2),
    ({"enabled": True, "dtype": "torch.half"}, 1e-2), ({"enabled": True, "dtype": "fp16"}, 1e-2),
])  # fmt: skip
def test_losses_under_autocast_agree_as_its_dtype_allows(autocast: dict[str, Any], tolerance: float) -> None:
    for share, is_error in ((0.8, False), (1.2, True)):
        row = result(loss=5.1 * (1 - share * tolerance) - 0.1, ds_config={"torch_autocast": autocast})["runs"][1]
        assert ("they must agree" in row.get("error", "")) is is_error


def test_the_table_has_a_line_per_run() -> None:
    lines = render(result()).splitlines()
    assert lines[0].startswith("cpu-2stage: 2 stages, 2 layers, hidden 4, 2 x 8 tokens, 2 turns; made up, 2 cores")
    assert [word in line for word, line in zip(("deepspeed", "seq1f1b, 2", "no such thing"), lines[2:], strict=True)]
    assert "7.500 s" in lines[3] and "1.929" in lines[3] and "7.000-8.000 s" in lines[3]


def test_peaks_are_in_millions_of_bytes_and_the_timeline_is_of_the_median_step() -> None:
    found = ranks()
    for of_rank in found:
        slow = of_rank["runs"][0]
        slow["peak_bytes"], (events, _) = 70 * 10**6, slow["events"]
        longer = [event._replace(end_s=event.end_s + 1) for event in events]
        slow["events"] = [longer, events]  # 16 and 13 seconds, whose lower median is the second step
    whole = result_of(Job(WORK, CASES, (1,), 2), "cpu-2stage", MACHINE, found)
    assert "  70/70  " in render(whole)
    drawn = Timeline.from_json(json.dumps(whole["runs"][0]["timeline"]))
    assert drawn.events[0].end_s - drawn.events[0].start_s == pytest.approx(2.0)


def test_a_row_has_one_unit_of_time() -> None:
    told = result()
    row = told["runs"][1] = told["runs"][1] | {"predicted_s": 6.75, "exposed_comm_s": 0.0125}
    assert "  6.750 s  " in render(told) and "  0.013 s  " in render(told)
    row |= {"step_s": 0.0075, "spread_s": [0.007, 0.008], "predicted_s": 0.00675}
    assert "  7.500 ms  " in render(told) and "  6.750 ms  " in render(told) and "  12.500 ms  " in render(told)


# --- what runs


def cases_of(**options: Any) -> list[str]:
    usual: dict[str, Any] = {"full": False, "systems": None, "schedules": None, "slices": None}
    return [case.label for case in choose(PRESETS["cpu-2stage"], **{**usual, **options})]


def test_the_usual_competitors() -> None:
    sliced = ["terapipe seq1f1b, 8 slices", "terapipe seq1f1b, planned, <= 8", "terapipe seq1f1b, planned"]
    labels = cases_of()
    assert labels[:5] == ["deepspeed 1f1b", "terapipe 1f1b, 1 slice", *sliced]
    assert any(label.startswith("torch") for label in labels)
    assert len(cases_of(full=True)) == len(all_cases((8, PLAN))) == 2 + 4 + 9 * 2 + 1 + 4


def test_the_help_lists_every_schedule() -> None:
    lists = " ".join(command.EXAMPLES.partition("Schedules of each system:")[2].split())
    assert all(f"{system}: {', '.join(names)}" in lists for system, names in SCHEDULES.items())


@pytest.mark.parametrize(("options", "labels"), [
    ({"systems": ["deepspeed"]}, ["deepspeed 1f1b"]),
    ({"schedules": ["terapipe"], "slices": [4, PLAN]},
     ["deepspeed 1f1b", "terapipe terapipe, 4 slices", "terapipe terapipe, planned"]),
    ({"schedules": ["zbv", "dualpipev"]},
     ["deepspeed 1f1b", "deepspeed dualpipev", "terapipe zbv, 8 slices", "terapipe zbv, planned", "torch zbv"]),
    # something unsliced, for the bound
    ({"schedules": ["terapipe"], "slices": [4], "systems": ["terapipe"]},
     ["terapipe 1f1b, 1 slice", "terapipe terapipe, 4 slices"]),
    ({"schedules": ["zbv"], "systems": ["torch"]}, ["torch gpipe", "torch zbv"]),
])  # fmt: skip
def test_options_narrow(options: dict[str, Any], labels: list[str]) -> None:
    assert cases_of(**options) == labels


def test_options_widen_and_are_refused() -> None:
    widened = cases_of(slices=[4, 16])
    assert {"terapipe seq1f1b, 4 slices", "terapipe seq1f1b, 16 slices", "terapipe 1f1b, 1 slice"} <= set(widened)
    assert cases_of(schedules=["gpipe"])[0] == "deepspeed 1f1b", "ratios need it"
    assert "terapipe 1f1b, 1 slice" not in cases_of(systems=["terapipe", "torch"], schedules=["gpipe"])
    case = Case("terapipe", "interleaved", (5, 3), given_chunks=3)
    assert case.label == "terapipe interleaved, 3 parts per stage, 2 given slices"
    with pytest.raises(CommandError, match=r"leave nothing to run"):
        cases_of(systems=["terapipe"], schedules=["dualpipev"])
    for more in {"systems": ["deepspeed"]}, {"slices": [8]}:
        with pytest.raises(CommandError, match="--schedules 'search': --systems and --slices leave no run of it"):
            cases_of(schedules=["1f1b", "search"], **more)
    with pytest.raises(CommandError, match=r"--systems 'megatron': known are deepspeed, terapipe, torch"):
        cases_of(systems=["megatron"])


def test_what_cannot_run_says_why() -> None:
    assert "accumulation >= 4" in (Case("deepspeed", "dualpipev").problem(WORK, 3) or "")
    assert Case("deepspeed", "dualpipev").problem(WORK, 4) is None
    assert "multiple of 2" in (Case("torch", "interleaved1f1b").problem(WORK, 5) or "")
    assert "accumulation >= 2" in (Case("torch", "1f1b").problem(WORK, 1) or "")
    assert Case("torch", "1f1b").problem(WORK, 2) is Case("torch", "interleaved1f1b").problem(WORK, 1) is None
    odd = dataclasses.replace(WORK, stages=3)
    assert "even number of stages, this is 3" in (Case("terapipe", "chimera").problem(odd, 4) or "")
    assert Case("terapipe", "seq1f1b", 8).problem(WORK, 1) is None
    assert "9 slices are more than the 8 tokens" in (Case("terapipe", "seq1f1b", 9).problem(WORK, 1) or "")
    learned = Workload(stages=4, accumulation=1, sequence_length=8, micro_batch=1, hidden=8, layers=4, heads=1)
    assert "in 8 parts, it has 7" in (Case("terapipe", "zbv", 1).problem(learned, 1) or "")
    assert Case("terapipe", "seq1f1b", 1).problem(learned, 1) is None, "in 4 parts"
    assert Case("terapipe", "zbv", 1).problem(learned, 1, {"positions": "learned"}) is None, "they are a layer"
    assert "in 6 parts, it has 5" in (Case("terapipe", "interleaved", 1, given_chunks=3).problem(WORK, 1) or "")


def arguments(*words: str) -> command.BenchOptions:
    parser = argparse.ArgumentParser()
    command.BenchOptions.add_to(parser)
    return command.BenchOptions.read(parser.parse_args(words))


def test_jobs_of_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    job = command.job_of(arguments())
    assert (job.work.stages, job.work.sequence_length, job.accumulations, job.pairs) == (2, 2048, (1, 4), 5)
    eight = command.job_of(arguments("cpu-8stage", "--accumulation", "2", "--steps", "1"))
    assert (eight.work.stages, eight.accumulations, eight.pairs) == (8, (2,), 1)
    assert eight.replayed and not job.replayed
    assert command.job_of(arguments("--full")).accumulations == (1, 4, 8)
    assert command.job_of(arguments("--accumulation", "2,1,2")).accumulations == (2, 1)  # each has its rows once
    other = command.job_of(arguments("--accumulation", "8"))
    assert any(case.system == "torch" and case.runs_at(8) for case in other.cases)


def test_plans_with_a_limit() -> None:
    given = command.job_of(arguments("--schedules", "seq1f1b", "--slices", "plan:3,2,plan")).cases
    ours = {case.slices: (case.planned, case.max_slices) for case in given if case.system == "terapipe"}
    assert ours == {"plan:3": (True, 3), 2: (False, None), "plan": (True, None)}
    given = command.job_of(arguments("--sequence-length", "100", "--schedules", "seq1f1b", "--slices", "60,40,plan:8"))
    assert [case.slices for case in given.cases if case.system == "terapipe"] == [(60, 40), "plan:8"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PlannedCases:
    """Costs of two stages in which slices cost nothing but their tokens, for one rank alone."""
    monkeypatch.setattr("terapipe_ds.bench.train_in_turns.from_rank_0", lambda ask: ask())
    costs: Any = {"whole stages": [UnitCosts(2048)] * 2}
    return PlannedCases(command.job_of(arguments()), tmp_path, costs)


def test_the_limit_of_a_plan_holds(planned: PlannedCases) -> None:
    counts = [planned.plan(Case("terapipe", "seq1f1b", slices), 1).num_slices for slices in (PLAN, "plan:8", "plan:5")]
    assert counts[0] > 8 and counts[1:] == [8, 5]  # the more, the better


def test_a_config_and_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    section = {"enabled": True, "schedule": "terapipe", "slices": [40, 24], "granularity_tokens": 8}
    settings = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam"}, "terapipe": section}
    config.write_text(json.dumps(settings))
    words = ("--config", str(config), "--model", "tiny", "--sequence-length", "64")
    job = command.job_of(arguments(*words))
    assert job.gpt is not None and job.gpt["hidden_size"] == job.work.hidden
    assert job.granularity == 8 and command.job_of(arguments(*words, "--granularity", "16")).granularity == 16
    assert (job.work.micro_batch, job.work.sequence_length) == (3, 64)
    assert job.ds_config == settings and job.cases[-1] == Case("terapipe", "terapipe", (40, 24))
    assert job.cases[:4] == PRESETS["cpu-2stage"].cases[:4]
    settings |= {"gradient_accumulation_steps": 3, "pipeline": {"stages": 3}}
    settings["terapipe"] = section | {"planner": {"memory_limit_gb": 1}}
    config.write_text(json.dumps(settings))
    job = command.job_of(arguments(*words))
    assert (job.accumulations, job.work.stages) == ((3,), 3) and job.cases[-1].schedule == "terapipe"
    assert "not taken: terapipe.planner.memory_limit_gb = 1:" in capsys.readouterr().err
    job = command.job_of(arguments(*words, "--accumulation", "2", "--stages", "2"))
    assert job.accumulations == (2,) and not (job.ds_config or {})["pipeline"]  # the engine would compare its stages
    config.write_text(json.dumps(settings | {"train_batch_size": 9}))
    assert command.job_of(arguments(*words, "--micro-batch", "2")).accumulations == (3,)
    config.write_text(json.dumps({name: value for name, value in settings.items() if name != "optimizer"}))
    assert command.job_of(arguments(*words)).ds_config["optimizer"]["type"] == "Adam"  # type: ignore[index]
    assert "--config has no optimizer: all systems train with Adam" in capsys.readouterr().err
    del settings["gradient_accumulation_steps"]
    for batch, steps in ((12, (4,)), (2, ()), (10, ())):  # sequences of a step, as DeepSpeed divides them
        config.write_text(json.dumps(settings | {"train_batch_size": batch}))
        if steps:
            assert command.job_of(arguments(*words)).accumulations == steps
        else:
            with pytest.raises(CommandError, match=f"train_batch_size = {batch} in --config: no multiple of"):
                command.job_of(arguments(*words))
        assert command.job_of(arguments(*words, "--accumulation", "2")).accumulations == (2,)
    for more in (("--systems", "deepspeed"), ("--schedules", "zb-h1")):
        with pytest.raises(ValueError, match="--slices: none of these runs has slices; leave it out"):
            command.job_of(arguments("--slices", "3", *more))


def configured(tmp_path: Path, **section: Any) -> Job:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"terapipe": {"enabled": True, **section}}))
    return command.job_of(arguments("--config", str(config), "--model", "tiny", "--sequence-length", "64"))


def test_what_a_config_says_of_its_schedule_is_run(tmp_path: Path) -> None:
    dapple = configured(tmp_path, schedule="dapple", slices=8, schedule_options={"policy": "B"}).cases[-1]
    assert dapple == Case("terapipe", "dapple", 8, options=(("policy", "B"),))
    assert dict(dapple.options) == {"policy": "B"} and dapple.label == "terapipe dapple policy=B, 8 slices"
    zbv = configured(tmp_path, schedule="zbv", slices=4, chunks_per_stage=2, schedule_options={"max_live_slices": 16})
    assert dict(zbv.cases[-1].options) == {"max_live_slices": 16} and zbv.cases[-1].given_chunks is None
    looped = configured(tmp_path, schedule="interleaved", chunks_per_stage=3).cases[-1]
    assert (looped.chunks_per_stage, looped.cut, looped.slices) == (3, "3 parts per stage", PLAN)
    assert configured(tmp_path, schedule="auto").cases[-1] == Case("terapipe", "auto", PLAN)


def test_what_the_benchmark_cannot_run_of_a_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut long paths short
    Path("order.csv").write_text(to_csv(build("seq1f1b", 2, 1, 4)))
    with pytest.raises(ValueError, match=r"order.csv': here schedules run by name, not from files; name one"):
        configured(tmp_path, schedule="order.csv", slices=4)
    with pytest.raises(ValueError, match=r"slices has a list for each micro-batch: .* give one list, or --slices"):
        configured(tmp_path, schedule="seq1f1b", slices=[[32, 32], [64]])
    with pytest.raises(ValueError, match=r"with chunks_per_stage = 2: here it chooses among those with one part"):
        configured(tmp_path, schedule="auto", chunks_per_stage=2)
    with pytest.raises(ValueError, match=r"terapipe.strategy = 'mine.json' has sizes and an order of its own: take it"):
        configured(tmp_path, strategy="mine.json")
    Path("ds.json").write_text('{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}')
    words = ("--config", "ds.json", "--model", "tiny", "--slices", "4", "--schedules", "seq1f1b")
    with pytest.raises(ValueError, match=r'gradient_clipping, bf16.enabled = "auto": only .*Trainer fills .* set each'):
        command.job_of(arguments(*words))
    for config in ({"sequence_parallel_size": 2}, {"tensor_parallel": {"autotp_size": 2}}):
        Path("ds.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"_size = 2: here a stage is one rank; remove the key"):
            command.job_of(arguments(*words))


def test_an_error_row_says_more_than_a_heading() -> None:
    from deepspeed.compile.config import CompileConfig

    from terapipe_ds.bench.train_in_turns import first_words

    errors = (TeraPipeConfigError("one", "two"), ValueError("three\nfour"), ValueError(), ValueError("\nfive"))
    told = ["2 problems with the DeepSpeed config: - one", "three", "ValueError", "five"]
    assert list(map(first_words, errors)) == told
    with pytest.raises(ValueError) as refused:  # a section of DeepSpeed's config
        CompileConfig(enabled=True)
    assert first_words(refused.value).startswith("1 validation error for CompileConfig enabled Extra inputs are not")


def test_costs_are_those_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the config that cost time in the steps cost it where slices are measured: the plans come from there."""
    from terapipe_ds.bench import train_in_turns

    asked: list[dict[str, Any]] = []

    def note(section: dict[str, Any], *args: Any, **keywords: Any) -> None:
        asked.append(section)
        raise RuntimeError

    monkeypatch.setattr(train_in_turns, "build_engine", note)
    given = {
        "recompute": "auto",
        "links": {"forward": "bf16"},
        "partition": [0, 3, 7],
        "planner": {"memory_limit_gb": 1},
    }
    job = configured(tmp_path, schedule="seq1f1b", slices=4, trace_dir="traces", **given)
    for case in (Case("terapipe", "seq1f1b"), Case("terapipe", "interleaved")):
        with pytest.raises(RuntimeError):
            PlannedCases(job, tmp_path)._measure(case.cut, case, tmp_path / "costs")
    plain, halves = asked
    assert (plain["recompute"], plain["links"], plain["partition"]) == ("full", {"forward": "bf16"}, [0, 3, 7])
    assert plain["planner"] == {"cache_dir": str(tmp_path / "costs")} and plain["slices"] == "auto"
    assert plain["granularity_tokens"] == job.shortest
    assert "partition" not in halves and not {"trace_dir", "schedule_options"} & plain.keys()


@pytest.mark.parametrize(("compiles", "halves"), [(False, "zbv"), (True, "interleaved")])
def test_costs_of_compiled_layers_need_no_split_backwards(
    compiles: bool, halves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, str] = {}
    monkeypatch.setattr(PlannedCases, "_measure", lambda self, cut, case, folder: asked.update({cut: case.schedule}))
    job = configured(tmp_path, schedule="interleaved", chunks_per_stage=2, slices="auto", compile=compiles)
    PlannedCases.measure(job, job.cases, tmp_path, mock.Mock())
    assert asked == {"whole stages": "seq1f1b", "halves": halves}


def test_auto_is_the_best_schedule_for_the_slices_at_hand(planned: PlannedCases) -> None:
    plan = SlicePlan.equal(2048, 8)
    chosen = planned.schedule(Case("terapipe", "auto", 8), 2, plan)
    names = ("gpipe", "1f1b", "terapipe", "seq1f1b", "zb-h1", "seq1f1b-zb")
    makespans = {name: simulate(build(name, 2, 2, 8), plan, UnitCosts(2048)).makespan_s for name in names}
    assert makespans[chosen] == pytest.approx(min(makespans.values())) and makespans[chosen] < max(makespans.values())
    assert planned.schedule(Case("terapipe", "1f1b", 8), 2, plan) == "1f1b"


def test_an_order_is_found_for_the_slices_of_each_micro_batch(planned: PlannedCases) -> None:
    plans, path = planned.found(Case("terapipe", "search", "plan:4"), 4)
    order, best = load(path), planned.plan(Case("terapipe", "seq1f1b-zb", "plan:4"), 4)
    assert [plan.num_slices for plan in plans] == list(order.num_slices) and max(order.num_slices) <= 4
    planned.found(Case("terapipe", "search", "plan:8"), 4)
    assert load(path) == order, "another case has a file of its own"
    named_s = simulate(build("seq1f1b-zb", 2, 4, best.num_slices), best, UnitCosts(2048)).makespan_s
    assert simulate(order, plans, UnitCosts(2048)).makespan_s <= named_s * (1 + 1e-9)


def test_slices_that_are_given_have_no_order_to_be_found() -> None:
    assert "give plan" in (Case("terapipe", "search", 8).problem(WORK, 4) or "")
    assert Case("terapipe", "search", PLAN).problem(WORK, 4) is None
    searched = [case.slices for case in all_cases([8, PLAN]) if case.schedule == "search"]
    assert searched == [PLAN]


def test_a_row_names_the_schedule_that_auto_has_chosen() -> None:
    row = result((CASES[0], Case("terapipe", "auto", 2), CASES[2]))["runs"][1]
    assert (row["schedule"], row["label"]) == ("auto (seq1f1b)", "terapipe auto (seq1f1b), 2 slices")


def test_the_result_has_the_command_without_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("terapipe_ds.bench.run.run_benchmark", lambda job, preset: result())
    path = tmp_path / "my results.json"
    assert main(["bench", "--config=ds.json", "--schedules", "1f1b", "--json", str(path)]) == 2  # no such config
    assert main(["bench", "--schedules", "1f1b", "--systems=terapipe", "--json", str(path)]) == 0
    command_line = json.loads(path.read_text())["command"]
    assert command_line == "terapipe bench --schedules 1f1b --systems=terapipe --json 'my results.json'"
    assert command.command_line(["bench", "--html=/a/b.html", "--json", "c/d.json"]) == (
        "terapipe bench --html=b.html --json c/d.json"
    )


def test_no_success_without_a_run_of_ours() -> None:
    failed = {"system": "terapipe", "error": "no such thing"}
    command._check_success({"runs": [{"system": "terapipe"}, failed]})
    command._check_success({"runs": [{"system": "torch", "error": "no"}, {"system": "torch"}]})
    with pytest.raises(ValueError, match="no run of terapipe could be made; the first one's error: no such thing"):
        command._check_success({"runs": [{"system": "deepspeed"}, failed]})
    with pytest.raises(ValueError, match="no run could be made; the first one's error: no"):
        command._check_success({"runs": [{"system": "torch", "error": "no"}]})


@pytest.mark.parametrize(("changes", "told"), [
    ({"fp16": {"enabled": True}}, "fp16"), ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}, "grad_accum_dtype"),
    ({"zero_optimization": {"stage": 1}}, "ZeRO"), ({**BF16_SETTINGS, "zero_optimization": {"stage": 2}}, "ZeRO"),
    ({"optimizer": {"type": "Lamb"}}, "Lamb"), ({"gradient_clipping": 1.0}, "clipping"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, "pipeline.activation_checkpoint_interval"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode"),
    ({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "amsgrad": True}}}, "amsgrad"),
])  # fmt: skip
def test_torch_says_which_settings_it_has_no_counterpart_for(changes: dict[str, Any], told: str) -> None:
    from terapipe_ds.bench.drivers.torch_pipeline import adam_options

    params = {"lr": 0.5, "betas": [0.8, 0.9], "torch_adam": True, "weight_decay": 0.1}
    plain = {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 0.0, "bf16": {"enabled": False}}
    assert adam_options(plain) == {"lr": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.1, "fused": True}
    with pytest.raises(CommandError, match=told):
        adam_options({**plain, **changes})


@pytest.mark.parametrize(
    "params", [{}, {"weight_decay": 0.5, "bias_correction": True, "adam_w_mode": True, "set_grad_none": True}]
)
def test_torch_decays_weights_as_deepspeed_does_where_the_config_does_not_say(params: dict[str, Any]) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from terapipe_ds.bench.drivers.torch_pipeline import adam_options

    for more in ({}, {"torch_adam": True}):
        given = dict(params | more)
        engine = mock.Mock(zero_use_cpu_optimizer=lambda: False)
        kind, _ = DeepSpeedEngine.get_optimizer_configuration(engine, given, True)
        usual = inspect.signature(kind).parameters["weight_decay"].default
        config = {"optimizer": {"type": "Adam", "params": params | more}, "gradient_clipping": 0.0}
        assert adam_options(config)["weight_decay"] == params.get("weight_decay", usual)


def test_bf16_has_a_counterpart_in_torch() -> None:
    """Weights by hand: 256 + 1/2 is 256 in bf16, and two such steps are 257 in fp32, which bf16 rounds to even."""
    from terapipe_ds.bench.drivers.torch_pipeline import Masters, adam_options, sums_dtype

    settings = {"optimizer": {"type": "Adam"}, "gradient_clipping": 0.0, "bf16": {"enabled": True}}
    assert adam_options(settings) and adam_options(BF16_SETTINGS) and sums_dtype(settings) == torch.bfloat16
    assert sums_dtype({**settings, "data_types": {"grad_accum_dtype": "fp32"}}) == torch.float32
    assert sums_dtype({"bfloat16": {"enabled": True}}) == torch.bfloat16  # DeepSpeed's other name
    weight = torch.nn.Parameter(torch.tensor([256.0, 1.0], dtype=torch.bfloat16))
    masters = Masters([weight], True, torch.float32)
    sgd = torch.optim.SGD(masters.weights, lr=1.0)
    for expected in (256.5, 257.0, 257.5, 258.0):
        for gradient in (0.25, -0.75):
            weight.grad = torch.tensor([gradient, 0.0], dtype=torch.bfloat16)
            masters.take_gradients()
            assert weight.grad is None
        sgd.step()
        masters.give_weights()
        sgd.zero_grad()
        assert masters.weights[0].tolist() == [expected, 1.0]
        assert weight.tolist() == [256.0 if expected <= 257 else 258.0, 1.0]
    masters.take_weights()
    assert masters.weights[0].tolist() == weight.tolist()


def test_on_cuda_the_usual_run_is_in_bf16(tmp_path: Path) -> None:
    job = command.job_of(arguments("--device", "cuda"))
    assert job.gpt == {"dtype": "bfloat16"} and job.ds_config is not None
    assert job.ds_config["bf16"] == {"enabled": True} and job.cases == PRESETS["cpu-2stage"].cases
    own = command.job_of(arguments("--device", "cuda", "--model", "tiny"))
    assert own.gpt is not None and own.gpt["dtype"] == "bfloat16" and own.ds_config == job.ds_config
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam"}}))
    given = command.job_of(arguments("--device", "cuda", "--model", "tiny", "--config", str(config)))
    assert given.gpt is not None and given.gpt["dtype"] == "float32"
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"hidden_size": 64, "dtype": "float32"}))
    fp32 = command.job_of(arguments("--device", "cuda", "--model", str(model)))
    assert fp32.gpt is not None and fp32.gpt["dtype"] == "float32" and fp32.ds_config is None
    assert command.job_of(arguments()).gpt is None  # on the CPU as before


@pytest.mark.parametrize(("words", "granularity", "shortest"), [
    ("--sequence-length 64 --slices 4", 16, 16), ("--sequence-length 64 --slices 4 --granularity 32", 32, 16),
    ("--sequence-length 64 --slices plan", 64, 64), ("", 64, 64), ("--sequence-length 64 --slices 40,8,16", 64, 8),
])  # fmt: skip
def test_a_default_granularity_fits_the_slices(words: str, granularity: int, shortest: int) -> None:
    """Costs are measured for slices that are named, too: without theirs all that the run measured was lost."""
    job = command.job_of(arguments(*words.split()))
    assert (job.granularity, job.shortest) == (granularity, shortest)


@pytest.mark.parametrize(("words", "told"), [
    (["gpu-layer", "--full"], "PRESET gpu-layer: give 'cpu-2stage' or 'cpu-8stage'"),
    (["cpu-3stage"], "PRESET cpu-3stage: give 'cpu-2stage' or 'cpu-8stage'"),
    (["--slices", "many"], "--slices 'many'"),
    (["--slices", "plan8"], "--slices 'plan8'"),
    (["--slices", "plan:0"], "--slices 'plan:0'"),
    (["--slices", "8,"], "--slices ''"),
    (["--layers", "0"], "--layers 0: give a number >= 1"),
    (["--stages", "5", "--layers", "1"], "--stages 5: the model has 4 layers"),
    (["--hidden", "33", "--heads", "2"], "hidden_size=33 does not divide by num_heads=2"),
    (["--granularity", "0"], "--granularity 0: give a number >= 1"),
    (["--granularity", "-5"], "--granularity -5: give a number >= 1"),
    (["--slices", "200", "--sequence-length", "128"], "--slices 200: more slices than the 128 tokens"),
    (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: there is no such folder"),
    (["--json", "/proc/x.json"], "/proc/x.json: "),
    (["--html", "/"], "--html '/' has no file name"),
    (["--interactive"], "--interactive goes with --html only: give --html, or leave --interactive out"),
    (["--html", "/usr"], "--html /usr is a folder: give the name of a file"),
    (["--config", "ds.json"], "ds.json"),
    (["--model", "tiny", "--hidden", "64"], "--hidden does not go with --model, which has its own: leave it out"),
    (["--device", "tpu"], "--device tpu: give 'cpu' or 'cuda'"),
    (["--device", "cuda"], "need 2 CUDA devices"),
    (["--share-device"], "--device cpu has no device to share; give --device cuda and --stages 2 or more"),
    (["--share-device", "--device", "cuda", "--stages", "1"], "one stage shares with no other"),
    (["--share-device", "--device", "cuda"], "need 2 CUDA devices, here are 0; use the cpu"),
])  # fmt: skip
def test_refusals(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_stages_that_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="need 2 CUDA devices, here are 1; --share-device puts all stages on one"):
        command._check_devices(command.job_of(arguments("--device", "cuda")))
    job = command.job_of(arguments("--device", "cuda", "--share-device"))
    command._check_devices(job)
    assert [job.device_of(rank) for rank in range(2)] == ["cuda:0", "cuda:0"]
    assert [dataclasses.replace(job, share_device=False).device_of(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    cases = (
        Case("torch", "gpipe"), Case("deepspeed", "dualpipev"), Case("deepspeed", "1f1b"),
        Case("terapipe", "seq1f1b", 8), Case("terapipe", "seq1f1b", 9999),
    )  # fmt: skip
    job = dataclasses.replace(job, cases=cases)
    assert "sends from the device itself" in (job.problem(0, 1) or "")
    assert "sends from the device itself" in (job.problem(1, 8) or "")
    assert job.problem(2, 1) is None and job.problem(3, 1) is None
    assert "9999 slices are more than" in (job.problem(4, 1) or "")
