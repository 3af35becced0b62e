"""A rank that hangs or dies anywhere is named by all others, soon: by stage, by action, by place in the code."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.failures.hangs import one_rank_is_not_registered, run_until_it_hangs
from tests.distributed.failures.job import MICRO_BATCHES, PLAN, Fault, Job, run
from tests.distributed.failures.patience import listening_ports, train_among_strangers, train_with_pauses
from tests.distributed.harness import rank_pool
from tests.distributed.test_failures import Ended, end_pool
from tests.fuzz.outcome import FULL

STALL_TIMEOUT_S = 1.0
REPORT_S = 10.0  # from the timeout to the last report: what is promised


def end(job: Job, monkeypatch: pytest.MonkeyPatch) -> Ended:
    return end_pool(job.stages, job, monkeypatch, act=run_until_it_hangs)


def hanging(kind: str, stage: int, folder: Path, stages: int = 2, **fault: object) -> Job:
    return Job(
        stages=stages,
        stall_timeout_s=STALL_TIMEOUT_S,
        section={"trace_dir": str(folder), "data_timeout_s": STALL_TIMEOUT_S},
        fault=Fault(kind, stage, **fault),  # type: ignore[arg-type]
    )


def assert_named(ended: Ended, stages: int, stage: int) -> None:
    """Every rank ends, with exit code 1, and blames this stage and no other."""
    ended.assert_all_told(
        r"no progress for 1 s \(terapipe.(stall|data)_timeout_s\)",
        rf"Stage {stage} \(rank {stage}\) holds up the job",
        "in wait_for_ever",
        survivors=list(range(stages)),
    )
    for other in set(range(stages)) - {stage}:
        assert not any(f"Stage {other} (rank {other}) holds up" in output for output in ended.outputs)
    assert ended.exit_codes == [1] * stages
    assert ended.seconds_after_fault < STALL_TIMEOUT_S + REPORT_S


class TestHangs:
    @pytest.mark.parametrize(
        ("kind", "stage"),
        [
            ("hang_backward", 0),
            ("hang_data", 0),
            ("hang_reduce", 1),
            pytest.param("hang_optimizer", 1, marks=pytest.mark.full),
        ],
    )
    def test_the_stage_is_named(self, kind: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert_named(end(hanging(kind, stage, tmp_path), monkeypatch), stages=2, stage=stage)
        contents = [json.loads((tmp_path / f"last-actions-rank{rank:04d}.json").read_text()) for rank in range(2)]
        assert [content["stage_id"] for content in contents] == [0, 1]
        assert any("in wait_for_ever" in line for line in contents[stage]["stack"])
        assert all(len(content["recent"]) > 10 for content in contents)
        starts = [entry["start_s"] for entry in contents[stage]["recent"]]
        assert starts == sorted(starts)

    @pytest.mark.full
    @pytest.mark.parametrize("seed", range(20))
    def test_twenty_random_hangs(self, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        choose = random.Random(seed)
        stages = choose.choice([2, 4])
        kinds = ["hang_before_forward", "hang", "hang_backward", "hang_send", "hang_optimizer", "hang_reduce"]
        kind, stage = choose.choice([*kinds, "hang_data"]), choose.randrange(stages)
        if kind == "hang_data":
            stage = choose.choice([0, stages - 1])
        unit = (choose.randrange(MICRO_BATCHES), choose.randrange(len(PLAN)))
        job = hanging(kind, stage, tmp_path, stages, unit=unit, step=choose.choice([1, 2]))
        ended = end(job, monkeypatch)
        assert_named(ended, stages, stage)

    @pytest.mark.full
    def test_evaluation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = hanging("hang", 1, tmp_path)
        assert_named(end(replace(job, evaluate=True), monkeypatch), stages=2, stage=1)

    @pytest.mark.full
    def test_saving_a_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may take long: it is ended after six times the limit."""
        job = hanging("hang_save", 1, tmp_path / "trace")
        ended = end(replace(job, folder=str(tmp_path / "saved"), saves=(1, 2)), monkeypatch)
        ended.assert_all_told(r"Stage 1 \(rank 1\) holds up the job: .*save_checkpoint", survivors=[0, 1])
        assert ended.seconds_after_fault > 5 * STALL_TIMEOUT_S
        assert ended.exit_codes == [1, 1]


class TestEnds:
    def test_a_stopped_process_that_serves_the_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A question to it never comes back; the other rank reports in time all the same."""
        job = hanging("stopped", 0, tmp_path, unit=(1, 0))
        ended = end_pool(2, job, monkeypatch, grace_s=0.2, act=run_until_it_hangs)
        ended.assert_all_told(
            r"no progress for 1 s .*the store of the job does not answer. Rank 0, or the launcher", survivors=[1]
        )
        assert ended.exit_codes == [None, 1]  # the pool has to end the stopped one
        assert ended.seconds_after_fault < STALL_TIMEOUT_S + REPORT_S

    @pytest.mark.full
    def test_a_killed_rank_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = end(hanging("kill", 1, tmp_path, unit=(1, 0)), monkeypatch)
        ended.assert_all_told(
            r"lost the connection to another rank .*Rank 1 \(stage 1\): does not answer: its process is gone",
            survivors=[0],
        )
        assert ended.exit_codes == [1, -9]

    @pytest.mark.full
    def test_the_checkpoint_before_survives_sigterm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Job(steps=2, folder=str(tmp_path), saves=(1, 2), fault=Fault("terminated_in_save", 1, step=2))
        ended = end(job, monkeypatch)
        ended.assert_all_told("(?s)it was sent SIGTERM.*This rank was running save_checkpoint", survivors=[1])
        ended.assert_all_told(r"at save_checkpoint: .* Rank 1 \(stage 1\): ended by SIGTERM", survivors=[0])
        assert "Traceback" not in ended.outputs[1]
        assert ended.exit_codes == [1, 143]
        undisturbed = rank_pool(2).run(run, job=Job(steps=2))
        resumed = rank_pool(2).run(run, job=Job(steps=2, folder=str(tmp_path), resume="global_step1"))
        assert resumed == [losses[1:] for losses in undisturbed]

    @pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
    def test_an_error_of_one_rank_in_a_save(self, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Anywhere in DeepSpeed's save, while the others wait in its barriers."""
        job = Job(steps=2, folder=str(tmp_path), saves=(1, 2), fault=Fault("raise_save", stage, step=2))
        ended = end(job, monkeypatch)
        ended.assert_all_told("failed at save_checkpoint: MemoryError: none is left", survivors=[0, 1])
        assert ended.exit_codes == [1, 1]
        ended.assert_soon()
        assert {path.name for path in tmp_path.iterdir()} == {"global_step1", "latest"}


MOMENTS = ["between", "data", "before_forward", "send", "reduce", "optimizer", "save"]


class TestLosses:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("seed", range(100))
    def test_a_rank_is_killed_at_any_moment(self, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its data loader's workers live on for a while, with copies of its connections."""
        choose, workers = random.Random(seed), (seed + seed // 25) % 5
        stages, moment = choose.choice([2, 2, 3]), choose.choice(MOMENTS)
        stage = choose.choice([0, stages - 1]) if moment == "data" else choose.randrange(stages)
        unit = (choose.randrange(MICRO_BATCHES), choose.randrange(len(PLAN)))
        fault = Fault(f"kill_{moment}", stage, step=choose.choice([1, 2]), unit=unit)
        job = Job(stages, 3, fault, stall_timeout_s=2.0, folder=str(tmp_path), saves=(1, 2), workers=workers)
        ended = end(job, monkeypatch)
        survivors = [rank for rank in range(stages) if rank != stage]
        named = rf"Stage {stage} \(rank {stage}\) holds up the job: does not answer"
        named += rf"|Rank {stage} \(stage {stage}\): does not answer"
        named += rf"|lost the connection to another rank while waiting for .* stage {stage} "
        named += "|(is gone|the store of the job does not answer)" if stage == 0 else ""  # with its store
        ended.assert_all_told(named, survivors=survivors)
        assert [ended.exit_codes[rank] for rank in survivors] == [1] * len(survivors)
        assert ended.seconds_after_fault < job.stall_timeout_s + 5.0


class TestHealthyRanks:
    def test_pauses_within_the_limits_end_nothing(self) -> None:
        steps = 1000 if FULL else 12
        assert rank_pool(2).run(train_with_pauses, steps=steps, stall_timeout_s=1.0, timeout_s=900.0) == [steps] * 2

    def test_strangers_on_the_ports_change_nothing(self) -> None:
        """There are no ports but torch's; neither idle connections to them nor random bytes disturb the training."""
        undisturbed = rank_pool(2).run(run, job=Job(steps=3))
        for (before, after, losses), expected in zip(rank_pool(2).run(train_among_strangers), undisturbed, strict=True):
            assert after == before and sum(map(len, rank_pool(2).run(listening_ports))) > 0
            assert losses == expected


class TestAgreement:
    def test_a_rank_that_is_not_registered_is_named(self) -> None:
        raised, _ = rank_pool(2).run(one_rank_is_not_registered, patience_s=0.5)
        assert raised.kind == "TeraPipeConfigError"
        assert r"ranks [1] have not come" in raised.text
        assert "call terapipe_ds.register() on every rank" in raised.text
