"""Test the benchmark of whole steps, on two ranks: every system runs, all learn the same, every figure exists."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from terapipe_ds.bench.cases import PLAN, TWO_PARTS, Case, Job, all_cases
from terapipe_ds.bench.ranks import BF16_SETTINGS, USUAL_SETTINGS, Position, Workload, gpt_config
from terapipe_ds.bench.report import write_report
from terapipe_ds.bench.report.data import Run
from terapipe_ds.bench.run import result_of, run_benchmark
from terapipe_ds.bench.table import render
from terapipe_ds.compat import installed_versions
from terapipe_ds.models.gpt import gpt_layers
from tests.conftest import FULL
from tests.distributed.engines import few_rounds
from tests.distributed.harness import RankPool

WORK = Workload(stages=2, accumulation=1, sequence_length=64, micro_batch=1, hidden=16, layers=4, heads=2)
# every schedule once, and some of them planned: halves are measured for that as well
OWN = (
    Case("terapipe", "dapple", 3, options=(("policy", "B"),)),
    Case("terapipe", "auto", PLAN),
    Case("terapipe", "search", PLAN),
)
PLANNED = tuple(
    Case("terapipe", name, PLAN) for name in (("seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq") if FULL else ("zbv",))
)
# Up to torch 2.11 its pipelines send a first message from every part to the next, of the same rank too: gloo has no
# pair for that.
SENDS_TO_ITSELF = Version(installed_versions()["torch"]).release < (2, 12)
ZBV = Case("torch", "zbv")
CASES = tuple(case for case in (*all_cases((3,)), *PLANNED, *OWN) if not (SENDS_TO_ITSELF and case == ZBV))
SECTION = {"enabled": True, "schedule": "dapple", "schedule_options": {"policy": "B"}}  # other cases have no options
JOB = Job(WORK, CASES, (4,), 1, granularity=16, ds_config={**USUAL_SETTINGS, "terapipe": SECTION})


def competition(folder: str, job: Job) -> dict[str, Any]:
    """In each rank."""
    from torch.distributed import get_rank

    from terapipe_ds.bench.train_in_turns import measure_systems

    with few_rounds():
        found, drivers = measure_systems(job, Path(folder), Position(Path(folder), get_rank()))
    for driver in drivers:
        driver.destroy()
    return found


def rows_of(job: Job, folder: Path) -> list[dict[str, Any]]:
    # a pool of its own: tensors that engines leave would change measurements of other jobs
    with contextlib.closing(RankPool(2)) as pool:
        ranks = pool.run(competition, folder=str(folder), job=job)
    runs: list[dict[str, Any]] = json.loads(json.dumps(result_of(job, "test", {}, ranks)))["runs"]
    return runs


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rows_of(JOB, tmp_path_factory.mktemp("bench"))


def test_all_systems_run_and_agree_on_the_loss(rows: list[dict[str, Any]]) -> None:
    assert [row.get("error") for row in rows] == [None] * len(CASES)
    assert {row["system"] for row in rows} == {"deepspeed", "terapipe", "torch"}
    losses = [row["loss"] for row in rows]
    assert max(losses) - min(losses) < 1e-5 * losses[0]


def test_every_row_has_every_figure(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        Run.model_validate_json(json.dumps(row), strict=True)
        assert sum(row["slices"]) == 64 and len(row["peak_bytes"]) == 2
        assert row["step_s"] > 0 and row["bound_s"] > 0 and 0 < row["bubble"] < 1
        assert all(peak > static / 2 for peak, static in zip(row["peak_bytes"], row["static_bytes"], strict=True))
        assert (row["predicted_s"] is not None) == (row["system"] == "terapipe")
        kinds = [event["kind"] for event in row["timeline"]["events"]]
        counts = [len(plan) for plan in row.get("plans", ())] or [len(row["slices"])] * 4
        units = sum(counts) * (2 if row["schedule"] in TWO_PARTS else 1)
        assert kinds.count("F") == kinds.count("B") == 2 * units
    assert [row["planned"] for row in rows] == [case.slices == PLAN for case in CASES]


def test_fewer_slices_in_flight_need_less_memory(rows: list[dict[str, Any]]) -> None:
    peaks = {row["label"]: row["peak_bytes"][0] for row in rows}
    assert peaks["terapipe seq1f1b, 3 slices"] < peaks["terapipe terapipe, 3 slices"]
    assert peaks["torch 1f1b"] < peaks["torch gpipe"]


@pytest.mark.full
def test_a_benchmark_in_processes_of_its_own(tmp_path: Path) -> None:
    cases = (Case("deepspeed", "1f1b"), Case("terapipe", "seq1f1b", PLAN), Case("torch", "1f1b"))
    job = Job(WORK, cases, (2,), 1, granularity=16, replayed=True)
    result = run_benchmark(job, "test")
    stock, planned, other = result["runs"]
    for row in (stock, planned, other):
        Run.model_validate_json(json.dumps(row), strict=True)
        assert row["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert stock["replayed"] and planned["step_s"] == planned["replayed_s"] > 0
    assert planned["predicted_s"] > 0 and sum(planned["slices"]) == 64  # costs are processor time, as replays are
    write_report(result, tmp_path / "report.html")
    assert stock["label"] in (tmp_path / "report.html").read_text() and stock["label"] in render(result)


def test_in_bf16_all_hold_the_same_bytes_and_learn_the_same(tmp_path: Path) -> None:
    """bf16 weights and gradients; beside them, in fp32, weights, sums of gradients, and two states of Adam."""
    halves = Case("torch", "interleaved1f1b") if SENDS_TO_ITSELF else ZBV
    cases = (Case("deepspeed", "1f1b"), Case("terapipe", "seq1f1b", 2), halves, Case("torch", "1f1b"))
    fast = {**BF16_SETTINGS, "optimizer": {"type": "Adam", "params": {"lr": 2e-2, "torch_adam": True, "fused": True}}}
    job = Job(WORK, cases, (4,), 3, granularity=16, ds_config=fast, gpt={"dtype": "bfloat16"}, replayed=True)
    rows = rows_of(job, tmp_path)
    assert [row.get("error") for row in rows] == [None] * len(cases)
    losses = [row["loss"] for row in rows]
    first = math.log(gpt_config(WORK).vocab_size)  # of an untrained model
    assert max(losses) < first - 0.3
    assert max(losses) - min(losses) < 0.1 * (first - max(losses))
    parameters = sum(p.numel() for layer in gpt_layers(gpt_config(WORK)) for p in layer.build().parameters())
    for row in rows:
        assert sum(row["static_bytes"]) == pytest.approx(parameters * (2 + 2 + 4 * 4), rel=0.02)  # padding, steps
