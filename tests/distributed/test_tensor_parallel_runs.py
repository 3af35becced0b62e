"""Test what surrounds a step under tensor parallelism: evaluation, traces, and ranks that fail."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import active_slice
from terapipe_ds.cli import main
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.failures import trials, watchdog
from terapipe_ds.runtime.profiling import rounds
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer
from terapipe_ds.timeline import Timeline
from tests.distributed import engines, harness
from tests.distributed import tensor_parallel as tp
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.tensor_parallel import parallel

GRID = (2, 1, 2)


# -- evaluation --------------------------------------------------------------------------------------------------


def _evaluations(engine: PipelineEngine, data: engines.Batch) -> dict[str, Any]:
    outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None)
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    plain = engine.eval_batch(iter(data))
    own = engine.eval_batch(iter(data), bcast_loss=False)
    trained = engine.train_batch(iter(data))
    losses = [float(loss), float(plain), float(trained)]
    exact = float(own) if engine.is_last_stage() else None
    return {"losses": losses, "exact": exact, "logits": logits, "outputs": outputs}


def _evaluated() -> dict[str, Any]:
    """Return relative errors against the whole model on one rank; logits are this rank's part of the vocabulary."""
    (data,) = engines.batches(1)
    with engines.engine_of(tp.layers(), None, **parallel((1, torch.distributed.get_world_size(), 1))) as engine:
        whole = _evaluations(engine, data)
    with engines.engine_of(tp.layers(), engines.section(slices=[9, 13, 1], verify="off"), **parallel(GRID)) as engine:
        ours, rank, is_last = _evaluations(engine, data), engine.mpu.get_slice_parallel_rank(), engine.is_last_stage()

    def part(logits: torch.Tensor) -> torch.Tensor:
        return logits.chunk(2, dim=-1)[rank]

    pairs = zip(ours["losses"], whole["losses"], strict=True)
    errors: dict[str, Any] = {"losses": max(engines.relative_error(a, b) for a, b in pairs)}
    if is_last:
        errors["exact"] = engines.relative_error(ours["exact"], whole["exact"])
        errors["logits"] = engines.error_of(ours["logits"], part(whole["logits"]))
        errors["outputs"] = engines.error_of(ours["outputs"], [part(each) for each in whole["outputs"]])
    else:
        errors["elsewhere"] = [ours["logits"], ours["outputs"]]
    return errors


def test_evaluation_gives_every_rank_the_loss_and_the_last_stage_its_part_of_the_logits() -> None:
    """As with DeepSpeed's own engine, the logits are not sent to other stages."""
    first, peer, *last = rank_pool(4).run(_evaluated)
    assert first["losses"] <= engines.FP32_SCALAR and peer["losses"] <= engines.FP32_SCALAR
    assert first["elsewhere"] == peer["elsewhere"] == [None, None]
    for errors in last:
        assert errors["losses"] <= engines.FP32_SCALAR
        assert max(errors[name] for name in ("exact", "logits", "outputs")) <= engines.EXACT, errors


# -- traces ------------------------------------------------------------------------------------------------------


def _traced(folder: str) -> None:
    terapipe = engines.section(slices="auto", granularity_tokens=16, trace_dir=folder, verify="off")
    with engines.engine_of(tp.layers(), terapipe, **parallel(GRID)) as engine:
        engines.train(engine, engines.batches(2))


def test_the_timeline_is_that_of_one_tensor_parallel_rank_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_pool(4).run(engines.with_few_rounds, job=_traced, folder=str(tmp_path))
    files = {rank: tmp_path / f"timeline-step000002-rank{rank:04d}.json" for rank in range(4)}
    stages = {rank: {event.stage_id for event in Timeline.load(file).events} for rank, file in files.items()}
    assert stages == {0: {0}, 1: {0}, 2: {1}, 3: {1}}
    predicted = tmp_path / f"predicted-{engines.LENGTH}-tokens-2-micro-batches.json"
    assert main(["timeline", str(tmp_path), "--against", str(predicted)]) == 0
    said = capsys.readouterr()
    assert "F0.0" in said.out and "note: ranks 0, 2; others hold the same stages" in said.err
    picture = tmp_path / "step.svg"
    peers = [str(files[rank]) for rank in (1, 3)]
    assert main(["timeline", *peers, "--out", str(picture)]) == 0
    said = capsys.readouterr()
    assert "2 stages" in said.out and said.err == "" and picture.exists()


# -- ranks that fail -----------------------------------------------------------------------------------------------


class BrokenError(RuntimeError):
    """Be the error of the faulty layer."""


def _wait_for_ever() -> None:
    threading.Event().wait()


def _with_a_fault(kind: str, rank: int) -> None:
    forward = tp.DecoderLayer.forward

    def faulty(self: tp.DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        active = active_slice()
        if active is not None and (active.micro_batch_id, active.slice_id) == (1, 1):
            if kind == "hangs":
                _wait_for_ever()
            raise BrokenError("the layer is broken")
        return forward(self, hidden)

    watchdog.LINGER_S = 0.1  # this process ends
    if torch.distributed.get_rank() == rank:
        tp.DecoderLayer.forward = faulty  # type: ignore[method-assign]
    terapipe = engines.section(stall_timeout_s=2 if kind == "hangs" else 60, verify="off")
    with engines.engine_of(tp.layers(), terapipe, **parallel(GRID)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        engines.train(engine, engines.batches(1))


@pytest.fixture
def whole_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks the time to end by themselves, and cut nothing from their reports."""
    monkeypatch.setattr(harness, "LOG_TAIL_CHARS", 1_000_000)
    monkeypatch.setattr(harness, "GRACE_S", 20.0)


@pytest.mark.usefixtures("whole_reports")
@pytest.mark.parametrize(("kind", "rank"), [("raises", 1), ("hangs", 2)])
def test_a_tensor_parallel_rank_that_fails_ends_all(kind: str, rank: int) -> None:
    """Its peer waits inside of a layer, the other stage for a message."""
    with pytest.raises(RankFailure) as failure:
        rank_pool(4).run(_with_a_fault, kind=kind, rank=rank)
    outputs = [report.output for report in failure.value.reports]
    assert not any(report.status == "stopped" for report in failure.value.reports), "each rank ended by itself"
    for number, output in enumerate(outputs):
        who = f"rank {number} (stage {number // 2}) ends:"
        assert who in output, output
        if kind == "raises" and number != rank:
            assert f"rank {rank} (stage {rank // 2}) failed at F1.1: BrokenError: the layer is broken" in output
        if kind == "hangs":
            assert "no progress for 2 s" in output and f"rank {rank} (stage {rank // 2}): running F1.1" in output
            assert f"Stage {rank // 2} (rank {rank}) holds up the job: running F1.1" in output
    if kind == "hangs":
        assert all("in _wait_for_ever" in output for output in outputs), "each shows where that rank stands"
        peer = f"rank {rank ^ 1} (stage {rank // 2}): running F1.1, in a collective"
        assert any(peer in output for output in outputs), outputs[0]


# -- ranks that fail while layers are tried out --------------------------------------------------------------------

PEERS = (1, 1, 2)
# a quarter of a sequence: timed twice
TRIED = {"slices": "auto", "schedule": "auto", "granularity_tokens": 5, "verify": "off"}


def _broken(self: tp.DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    if self.index == 1:
        raise BrokenError("the layer is broken")
    return _forward(self, hidden)


_forward, _layer_seconds = tp.DecoderLayer.forward, SliceTimer.layer_seconds


def _layer_seconds_of_broken(self: SliceTimer, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp.DecoderLayer, "forward", _broken)
        return _layer_seconds(self, *arguments)


def _tried_with_a_fault(kind: str, ranks: list[int], patience_s: float = trials.PATIENCE_S) -> tuple[list[float], bool]:
    """Return the losses, and whether layers have their times: they are tried one by one, which fails on these ranks."""
    here, terapipe = torch.distributed.get_rank() in ranks, {**TRIED, "stall_timeout_s": 60}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "PATIENCE_S", patience_s)
        patch.setattr(watchdog, "LINGER_S", 0.1)
        for name in ("MIN_ROUNDS", "MAX_ROUNDS"):
            patch.setattr(rounds, name, 1)
        if kind == "verified":
            terapipe = {"slices": 3, "verify": "first_batch", "stall_timeout_s": 60}
            patch.setattr(tp.DecoderLayer, "forward", _broken if here else _forward)
        elif here:
            patch.setattr(SliceTimer, "layer_seconds", _layer_seconds_of_broken)
        with engines.engine_of(tp.layers(), engines.section(**terapipe), **parallel(PEERS)) as engine:
            assert isinstance(engine, TeraPipeEngine)
            losses, planner = engines.train(engine, engines.batches(1)).returned, engine._plans._planner
            profiles = () if planner is None else planner.profiles._known.values()
            return losses, any(profile.layers is not None for profile in profiles)


@pytest.mark.usefixtures("whole_reports")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("timed", "timing the layers of part 0 one by one failed on rank 1"),
        ("verified", "verifying layer 2 (DecoderLayer) failed on rank 1"),
    ],
)
def test_a_rank_that_fails_alone_in_layers_that_are_tried_ends_its_peer(kind: str, says: str) -> None:
    """The peer waits in a collective of the layer, which nothing can interrupt; without an end here, for a minute."""
    with pytest.raises(RankFailure) as failure:
        rank_pool(2).run(_tried_with_a_fault, kind=kind, ranks=[1], patience_s=1.0, timeout_s=40)
    assert [report.status for report in failure.value.reports] == ["died", "raised"]
    waiting, failed = (report.output for report in failure.value.reports)
    assert "BrokenError: the layer is broken" in failed and "rank 1 (stage 0) ends: it failed at" in failed
    assert "rank 0 (stage 0) ends: rank 1 (stage 0) failed at" in waiting and says in waiting, waiting
    assert "BrokenError: the layer is broken" in waiting
    if kind == "timed":
        assert "name a schedule in place of" in waiting and "its tensor-parallel peer, rank 0, has not come" in waiting


def test_peers_do_without_the_times_of_layers_together() -> None:
    """Check the case in which all peers fail alike."""
    undisturbed, alike = (
        rank_pool(2).run(_tried_with_a_fault, kind="timed", ranks=ranks, timeout_s=40)[0] for ranks in ([], [0, 1])
    )
    assert (undisturbed[1], alike[1]) == (True, False)
    # Other slices may be planned from other times: the same loss up to the order of its sums.
    assert alike[0] == pytest.approx(undisturbed[0], rel=1e-12)
