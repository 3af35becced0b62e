"""Test that a failure of one rank ends the whole job: soon, with the cause on every rank, and never by hanging.

Faults that all ranks meet alike are plain exceptions, after which training can go on. The others end every process:
most run on the ranks of the pool, some under DeepSpeed's own launcher with a training script.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed
from torch.distributed.elastic.utils.distributed import get_free_port

import terapipe_ds
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.engine import build as engine_build
from tests.distributed import harness
from tests.distributed.engines import MicroBatch, raised_by
from tests.distributed.failures.faults import FAULT_MARK, LEAVES, BrokenError, Fault
from tests.distributed.failures.job import (
    ENVIRONMENT,
    MICRO_BATCHES,
    PLAN,
    Job,
    batches,
    build_engine,
    build_model,
    deepspeed_config,
    run,
    run_until_it_ends,
)
from tests.distributed.harness import RankFailure, RankReport, rank_pool
from tests.distributed.launcher import launch


class Raised(NamedTuple):
    """Hold an exception, and how long it took. `kind` is empty if nothing was raised."""

    kind: str
    text: str
    seconds: float


def provoke(act: Callable[[], Any]) -> Raised:
    start = time.monotonic()
    return Raised(*raised_by(act), time.monotonic() - start)


# -- data and calls ------------------------------------------------------------------------------------------


def suffer(stages: int, names: list[str]) -> tuple[dict[str, Raised], list[float]]:
    """Return the error of each fault of `names` on this rank, and the losses before, between and after them."""
    engine = build_engine(Job(stages=stages))
    try:
        losses = [float(engine.train_batch(batches(1)))]
        raised = {name: provoke(lambda name=name: FAULTS[name](engine)) for name in names}  # type: ignore[misc]
        assert engine.slice_store.pool.live_bytes == 0 and not engine.eval_return_logits
        losses += [float(engine.train_batch(batches(step))) for step in (2, 3)]
        losses.append(float(engine.eval_batch(batches(4))))
        return raised, losses
    finally:
        engine.destroy()


def _on(engine: PipelineEngine, stage_id: int, there: Iterator[MicroBatch], elsewhere: Iterator[MicroBatch]) -> None:
    engine.train_batch(there if engine.stage_id == stage_id else elsewhere)


def _last(engine: PipelineEngine) -> int:
    return engine.num_stages - 1


def _changed(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Iterator[Any]:
    """Return the usual micro-batches, the second one changed."""
    first, second = batches(2)
    return iter([first, change(*second)])


def _mask_of(tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    return torch.ones(rows, 1, length, length, dtype=torch.bool).tril()


def _broken_iterator() -> Iterator[MicroBatch]:
    yield next(batches(2))
    raise OSError("the disk is gone")


def _other_accumulation(engine: PipelineEngine) -> None:
    usual = engine.train_batch_size()
    try:
        if engine.is_last_stage():
            engine.set_train_batch_size(2 * usual)
        engine.train_batch(iter([*batches(2), *batches(3)]))
    finally:
        engine.set_train_batch_size(usual)


def _one_evaluates(engine: PipelineEngine) -> None:
    run_batch = engine.eval_batch if engine.is_first_stage() else engine.train_batch
    run_batch(batches(2))


FAULTS: dict[str, Callable[[PipelineEngine], Any]] = {
    "no data left": lambda engine: engine.train_batch(iter([])),
    "data for half a batch": lambda engine: engine.train_batch(iter([next(batches(2))])),
    "no data in evaluation": lambda engine: engine.eval_batch(None),
    "no data left in evaluation": lambda engine: engine.eval_batch(iter([]), return_logits=True),
    "no data left on the first stage": lambda engine: _on(engine, 0, iter([]), batches(2)),
    "no data left on the last stage": lambda engine: _on(engine, _last(engine), iter([]), batches(2)),
    "data raises on the first stage": lambda engine: _on(engine, 0, _broken_iterator(), batches(2)),
    "data raises on the last stage": lambda engine: _on(engine, _last(engine), _broken_iterator(), batches(2)),
    "data leaves the program": lambda engine: engine.train_batch(sys.exit("done") for _ in range(2)),
    "data ends here, raises there": lambda engine: _on(engine, 0, iter([]), _broken_iterator()),
    "labels on the last stage only": lambda engine: engine.train_batch(
        iter([((x, x.float()), y if engine.is_last_stage() else None) for x, y in batches(2)])
    ),
    "no rows": lambda engine: engine.train_batch(_changed(lambda x, y: (x[:0], y[:0]))),
    "a mask of all tokens": lambda engine: engine.train_batch(_changed(lambda x, y: ((x, _mask_of(x)), y))),
    "not a pair": lambda engine: engine.train_batch(_changed(lambda x, y: (x,))),
    "another length than the plan": lambda engine: engine.train_batch(  # in one replica
        batches(2, length=sum(PLAN) if engine.grid.get_data_parallel_id() else sum(PLAN) - 4)
    ),
    "other length on the last stage": lambda engine: _on(engine, _last(engine), batches(2, length=8), batches(2)),
    "one stage evaluates": _one_evaluates,
    "other number of micro-batches": lambda engine: engine.eval_batch(
        batches(2), num_micro_batches=1 if engine.is_first_stage() else MICRO_BATCHES
    ),
    "one stage accumulates more": _other_accumulation,
    "one stage sends no loss": lambda engine: engine.eval_batch(batches(2), bcast_loss=not engine.is_last_stage()),
    "one stage wants each loss": lambda engine: engine.eval_batch(
        batches(2), reduce_output="avg" if engine.is_last_stage() else None, bcast_loss=False
    ),
    "one stage computes no loss": lambda engine: engine.eval_batch(batches(2), compute_loss=engine.is_last_stage()),
}


# -- configs -------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "other slices": {"terapipe": {"enabled": True, "slices": [8, 8]}},
    "switched off": {"terapipe": {"enabled": False}},
    "absent": {"terapipe": None},
    "other accumulation": {"gradient_accumulation_steps": MICRO_BATCHES + 1},
    "misspelt": {"terapipe": {"enabled": True, "slice": PLAN}},
}


def disagree(names: list[str]) -> dict[str, Raised]:
    """Return the error that `deepspeed.initialize` raises on this rank when the last rank has another config."""
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return {
        name: provoke(lambda name=name: build_engine(Job(), CONFIGS[name] if is_last else None))  # type: ignore[misc]
        for name in names
    }


def one_rank_is_not_registered(patience_s: float) -> Raised:
    """Let the last rank build its model and then do something else: it never comes to compare configs."""
    job = Job(stall_timeout_s=patience_s)
    model = build_model(job)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        next(agreement._meetings)  # the ranks of the pool go on together
        return Raised("", "", 0.0)
    given = {"model_parameters": list(model.parameters()), "config": deepspeed_config(job)}
    with mock.patch.object(agreement, "PATIENCE_S", patience_s):
        return provoke(lambda: terapipe_ds.initialize(model=model, **given))


def one_rank_ends_at_the_start() -> None:
    """Let the last rank end while it builds its engine: the others wait for it in a collective."""
    if distributed.get_rank() == distributed.get_world_size() - 1:
        with mock.patch.object(engine_build, "require_equal_models", side_effect=BrokenError("the start is broken")):
            build_engine(Job())
    build_engine(Job())


SOON_S = 15.0  # from the fault to the end of the job; two seconds on a machine with nothing else to do
STALL_TIMEOUT_S = 1.0
ROOT = Path(__file__).parents[2]
full = pytest.mark.full


@dataclass(frozen=True)
class Ended:
    """Describe the end of a job: the output of each rank, its exit code (None if unknown), and how soon."""

    outputs: list[str]
    exit_codes: list[int | None]
    seconds_after_fault: float

    def assert_all_told(self, *causes: str, survivors: list[int]) -> None:
        """Assert that each of these ranks has reported its end, and a cause that the text has to match."""
        for rank in survivors:
            found = re.search(rf"terapipe_ds: rank {rank} \(stage \d\) ends: .*", self.outputs[rank], re.DOTALL)
            assert found, f"rank {rank} does not say that it ends:\n{self.outputs[rank]}"
            for cause in (*causes, "start the job again from its last checkpoint"):
                assert re.search(cause, found[0]), f"rank {rank} does not say {cause!r}:\n{found[0]}"

    def assert_soon(self, stall_timeout_s: float = 0.0) -> None:
        assert 0.0 <= self.seconds_after_fault - stall_timeout_s < SOON_S


def _seconds_since_fault(outputs: list[str], end: float) -> float:
    times = [float(found) for output in outputs for found in re.findall(rf"{FAULT_MARK} ([\d.]+)", output)]
    assert times, "the fault did not strike:\n" + "\n".join(outputs)
    return end - min(times)


# -- faults that every rank meets alike ----------------------------------------------------------------------


Suffered = list[tuple[dict[str, Raised], list[float]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=full)], ids="K{}".format)
def suffered(request: pytest.FixtureRequest) -> Suffered:
    """Return per rank the error of each fault, and the losses."""
    return rank_pool(request.param).run(suffer, stages=request.param, names=list(FAULTS))


ALIKE = {  # more batches that cannot be cut are in tests/unit/runtime/batch
    "no data left": ("StopIteration", "^$"),
    "data for half a batch": ("StopIteration", r"^the data end after 1 of the 2 micro-batches of a batch"),
    "no data in evaluation": ("BatchError", r"there is no data"),
    "no data left in evaluation": ("StopIteration", ""),
    "no data left on the first stage": ("BatchError", r"iterator of stage 0 is at its end.*the same micro-batches"),
    "no data left on the last stage": ("BatchError", r"iterator of stage [12] is at its end.*the same micro-batches"),
    "data raises on the first stage": ("OSError|BatchError", r"the disk is gone"),
    "data raises on the last stage": ("OSError|BatchError", r"the disk is gone"),
    "data leaves the program": ("SystemExit|BatchError", "done"),
    "data ends here, raises there": ("OSError|BatchError", r"the disk is gone"),
    "labels on the last stage only": ("BatchError", "input 1 .*features of each row"),
    "no rows": ("BatchError", r"micro-batch 1 has 0 rows \(shapes \[\[0, 16\], \[0, 16\]\]\)"),
    "a mask of all tokens": ("BatchError", r"input 1 \(bool \[2, 1, 16, 16\]\) has .* 16 in two dim.*leave it out"),
    "not a pair": ("BatchError", r"must give \(inputs, labels\), got tuple of 1 elements"),
    "another length than the plan": (".*Error", r"adds up to 16 tokens, but a sequence has 12: give"),
    "other length on the last stage": ("BatchError", r"ranks \[0\]: \[\[2, 16\].*; ranks \[[12]\]: \[\[2, 8\]"),
    "one stage evaluates": ("BatchError", r"disagree on training.*\[0\]: evaluation; ranks \[1.*: training.*same call"),
    "other number of micro-batches": ("BatchError", r"the number of micro-batches: ranks \[0\]: 1; ranks \[1.*: 2"),
    "one stage accumulates more": ("BatchError", r"the number of micro-batches: ranks \[0.*: 2; ranks \[[12]\]: 4"),
    "one stage sends no loss": ("BatchError", r"ranks \[0.*bcast_loss=True;.*bcast_loss=False.*same calls"),
    "one stage wants each loss": ("BatchError", r"ranks \[0.*reduce_output=None.*reduce_output='avg'.*same calls"),
    "one stage computes no loss": ("BatchError", r"ranks \[0.*compute_loss=False.*compute_loss=True.*same calls"),
}


class TestFaultsAlike:
    def test_every_rank_raises(self, suffered: Suffered) -> None:
        assert ALIKE.keys() == FAULTS.keys()
        for name, (kind, text) in ALIKE.items():
            for rank, (raised, _) in enumerate(suffered):
                said = f"{name}, rank {rank}: {raised[name]}"
                assert re.fullmatch(kind, raised[name].kind), said
                assert re.search(text, raised[name].text, re.DOTALL), said
                assert raised[name].seconds < SOON_S, said

    def test_a_rank_keeps_its_own_exception(self, suffered: Suffered) -> None:
        first, last = suffered[0][0], suffered[-1][0]
        assert first["data raises on the first stage"].kind == last["data raises on the last stage"].kind == "OSError"
        assert "stage 0 failed to draw its data: OSError" in last["data raises on the first stage"].text
        assert "OSError" in first["data raises on the last stage"].text

    def test_training_goes_on_as_if_nothing_had_been(self, suffered: Suffered) -> None:
        stages = len(suffered)
        undisturbed = rank_pool(stages).run(suffer, stages=stages, names=[])
        assert [losses for _, losses in suffered] == [losses for _, losses in undisturbed]

    def test_one_replica_has_other_lengths(self) -> None:
        name = "another length than the plan"
        for raised, losses in rank_pool(4).run(suffer, stages=2, names=[name]):
            assert re.search(ALIKE[name][1], raised[name].text) and len(losses) == 4


class TestDifferentConfigs:
    def test_every_rank_shows_both_sides(self) -> None:
        everyone = rank_pool(2).run(disagree, names=list(CONFIGS))
        for name in CONFIGS:
            key = "gradient_accumulation_steps" if name == "other accumulation" else "terapipe"
            for raised in (raised[name] for raised in everyone):
                assert raised.kind == "TeraPipeConfigError", f"{name}: {raised}"
                assert re.search(rf"the same one.*{key}: ranks \[0\]: .*; ranks \[1\]: ", raised.text, re.DOTALL)
                assert raised.seconds < SOON_S

    def test_a_rank_that_is_not_registered_is_named(self) -> None:
        raised, _ = rank_pool(2).run(one_rank_is_not_registered, patience_s=0.5)
        assert raised.kind == "TeraPipeConfigError"
        assert r"ranks [1] have not come" in raised.text
        assert "call terapipe_ds.register() on every rank" in raised.text

    def test_a_rank_that_ends_at_the_start_is_told_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(harness, "GRACE_S", SOON_S)
        with pytest.raises(RankFailure) as failure:
            rank_pool(2).run(one_rank_ends_at_the_start)
        first, last = failure.value.reports
        assert "BrokenError: the start is broken" in last.detail
        assert "PipelineAborted: lost the connection to another rank in deepspeed.initialize()" in first.detail
        assert "Its own output and exit code tell why" in first.detail


# -- faults that end the job, on the ranks of the pool -------------------------------------------------------


def end_pool(ranks: int, job: Job, monkeypatch: pytest.MonkeyPatch, grace_s: float = SOON_S) -> Ended:
    """Run a job that fails, and collect the output of the pool's ranks. `grace_s`: for the other ranks to end."""
    monkeypatch.setattr(harness, "LOG_TAIL_CHARS", 1_000_000)
    monkeypatch.setattr(harness, "GRACE_S", grace_s)
    with pytest.raises(RankFailure) as failure:
        rank_pool(ranks).run(run_until_it_ends, job=job)
    reports = failure.value.reports
    outputs, exit_codes = [report.output for report in reports], [_exit_code(report) for report in reports]
    end = max(report.ended_s for report, code in zip(reports, exit_codes, strict=True) if code is not None)
    return Ended(outputs, exit_codes, _seconds_since_fault(outputs, end))


def _exit_code(report: RankReport) -> int | None:
    """Return the exit code, or None if the pool had to end the rank."""
    if report.status == "raised":  # where there is no pool to catch it, the interpreter exits with 1
        return 1
    return int(report.detail.removeprefix("exit code ")) if report.status == "died" else None


SHAPE = r"SA1.2>1: LinkError: .*\(2, 4, 32\).*\(2, 4, 16\).*may depend on .* only"
PLAIN = r"F1.2: PlainAttentionError: .*slice \[8, 12\) of a sequence of 16 .*is_causal is False.*\"slices\": 1"
RAISING = [  # the stages, the fault, its stage, and the reported text
    (2, Fault("raise", "F", 0, step=1), "F1.2: BrokenError: the F is broken"),
    (2, Fault("raise", "recompute", 0), "B1.2: BrokenError: the recompute is broken"),
    (2, Fault("raise", "loss", 1), "F1.2: BrokenError: the loss is broken"),
    (2, Fault("other shape", "F", 0), SHAPE),
    (2, Fault("plain attention", "F", 0), PLAIN),
    (3, Fault("raise", "B", 1), "B1.2: BrokenError: the B is broken"),
]


class TestJobsEnd:
    @pytest.mark.parametrize(
        ("stages", "fault", "told"),
        RAISING,
        ids=lambda value: value.place if isinstance(value, Fault) else str(value).partition(":")[0],
    )
    def test_a_stage_that_raises(self, stages: int, fault: Fault, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = end_pool(stages, Job(stages, fault=fault, recompute=fault.place == "recompute"), monkeypatch)
        stage, survivors = fault.stage, [rank for rank in range(stages) if rank != fault.stage]
        ended.assert_all_told(rf"rank {stage} \(stage {stage}\) failed at {told}", survivors=survivors)
        ended.assert_all_told(f"it failed at {told}", survivors=[stage])
        assert "Traceback (most recent call last)" in ended.outputs[stage]
        assert ended.exit_codes == [1] * stages
        ended.assert_soon()

    def test_a_stage_that_makes_fewer_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = end_pool(2, Job(fault=Fault(LEAVES, "between", 1), stall_timeout_s=STALL_TIMEOUT_S), monkeypatch)
        ended.assert_all_told(
            r"lost the connection to another rank at the start of a batch.*or destroyed its engine\. "
            r"Rank 1 \(stage 1\): done with its engine.*makes fewer steps than this rank",
            survivors=[0],
        )
        assert ended.exit_codes == [1, None]
        ended.assert_soon()

    def test_a_rank_that_is_told_to_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As by a launcher, while its main thread waits in a call that no handler can interrupt."""
        ended = end_pool(3, Job(stages=3, fault=Fault("terminate others", "F", 1)), monkeypatch, grace_s=2.0)
        ended.assert_all_told("SIGTERM.*another rank has ended", "This rank was (at|running) ", survivors=[0, 2])
        assert ended.exit_codes == [143, None, 143]
        ended.assert_soon()

    @full
    def test_a_rank_that_is_told_to_end_while_it_saves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Job(steps=2, folder=str(tmp_path), saves=(1, 2), fault=Fault("SIGTERM", "save", 1))
        ended = end_pool(job.stages, job, monkeypatch)
        ended.assert_all_told("(?s)it was sent SIGTERM.*This rank was running save_checkpoint", survivors=[1])
        ended.assert_all_told(r"at save_checkpoint: .* Rank 1 \(stage 1\): ended by SIGTERM", survivors=[0])
        assert "Traceback" not in ended.outputs[1]
        assert ended.exit_codes == [1, 143]

    def test_a_fault_in_one_pipeline_ends_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = end_pool(4, Job(fault=Fault("raise", "F", stage=1, pipeline=1)), monkeypatch)
        cause = r"rank 3 \(stage 1\) failed at F1.2: BrokenError"
        ended.assert_all_told(cause, survivors=[0, 2])  # the pipelines are ranks 0, 2 and 1, 3
        assert ended.exit_codes == [1] * 4
        ended.assert_soon()


# -- faults that end the job, with the launcher --------------------------------------------------------------


def launched(ranks: int, job: Job, logs: Path) -> tuple[int | None, Ended]:
    """Start the training script by the `deepspeed` launcher. The launcher's exit code, and how the ranks ended."""
    options = ["--hostfile=", "--num_gpus", str(ranks), "--master_port", str(get_free_port())]
    script = ["--enable_each_rank_log", str(logs), str(Path(__file__).parent / "failures" / "job.py")]
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), ENVIRONMENT: job.to_json()}
    code, said, left = launch([*options, *script], logs.parent, **variables)
    end = time.time()
    assert not left, f"the launcher left processes behind: {left}"
    files = [next(iter(logs.glob(f"*_rank{rank}.log")), None) for rank in range(ranks)]
    assert all(files), f"the launcher did not start its ranks:\n{said}"
    outputs = [file.read_text() for file in files if file is not None]
    return code, Ended(outputs, [], _seconds_since_fault(outputs, end))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
class TestLaunchedJobsEnd:
    def test_a_checkpoint_survives_a_stage_that_raises(self, tmp_path: Path) -> None:
        job = Job(steps=2, folder=str(tmp_path / "checkpoint"), saves=(1,))
        code, ended = launched(2, replace(job, fault=Fault("raise", "B", 0, step=2)), tmp_path / "logs")
        ended.assert_all_told("failed at B1.2: BrokenError: the B is broken", survivors=[0, 1])
        assert "Traceback (most recent call last)" in ended.outputs[0], "the launcher has ended it too early"
        assert code == 1
        ended.assert_soon()
        resumed = rank_pool(2).run(run, job=replace(job, resume="global_step1", saves=()))
        uninterrupted = rank_pool(2).run(run, job=Job(steps=2))
        assert resumed == [losses[1:] for losses in uninterrupted]
