"""Test `terapipe.offload_activations`: the same bits, and device memory only for the near slices."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe_ds.costs.profile import Profile
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel
from terapipe_ds.runtime.profiling.cache import memory_of
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay
from tests.distributed.engines import batches, engine_of, gpt_layers, train, unchecked, with_few_rounds
from tests.distributed.harness import rank_pool

LENGTH, MICRO_BATCHES = 64, 4
MODEL = {"hidden_size": 64, "ffn_size": 128, "vocab_size": 31}


@dataclass
class Trained:
    """Hold one engine's parameters and losses after two steps, and the peaks of a third one."""

    numbers: list[torch.Tensor]
    grown_bytes: int
    host_bytes: int


@functools.cache
def ran(schedule: str, slices: int, **changes: Any) -> list[Trained]:
    return rank_pool(2).run(job, schedule=schedule, slices=slices, folder=None, **changes)


def job(schedule: str, slices: int, folder: str | None, **changes: Any) -> Trained:
    data = batches(3, MICRO_BATCHES, length=LENGTH)
    planned = {"slices": "auto", "planner": {"cache_dir": folder}, "granularity_tokens": 16} if folder else {}
    terapipe = unchecked(**{"schedule": schedule, "slices": slices, **planned, **changes})
    with engine_of(gpt_layers(**MODEL), terapipe, gradient_accumulation_steps=MICRO_BATCHES) as engine:
        run = train(engine, data[:2])
        numbers = [parameter.detach().clone() for parameter in engine.module.parameters()]
        numbers += [torch.as_tensor(float(loss), dtype=torch.float64) for loss in run.losses]
        torch.distributed.barrier()
        engine.slice_store.pool.drop_free()
        with MemoryPeak() as peak:
            engine.train_batch(iter(data[2]))
        offload = engine._stage.offload
        host = 0 if offload is None else offload.buffers.peak_bytes
        assert offload is None or offload.buffers.live_bytes == 0
    return Trained(numbers, peak.grown_bytes, host)


CASES = [
    ("terapipe", 4, {}),
    ("seq1f1b", 4, {}),
    ("seq1f1b-zb", 2, {}),
    ("1f1b", 1, {}),
    ("zbv", 2, {}),
    ("terapipe", 4, {"recompute": "full"}),
]


@pytest.mark.parametrize(("schedule", "slices", "changes"), CASES)
@pytest.mark.sample(1)
def test_the_same_bits_in_fewer_bytes(schedule: str, slices: int, changes: dict[str, Any]) -> None:
    plain, ours = (ran(schedule, slices, offload_activations=each, **changes) for each in (False, True))
    for one, other in zip(plain, ours, strict=True):
        assert len(one.numbers) == len(other.numbers) > 5
        assert all(torch.equal(a, b) for a, b in zip(one.numbers, other.numbers, strict=True))
        assert one.host_bytes == 0
    if schedule == "terapipe" and not changes:  # elsewhere few slices are live, or little is saved
        assert all(
            other.host_bytes > 0 and other.grown_bytes < 0.8 * one.grown_bytes
            for one, other in zip(plain, ours, strict=True)
        )


def test_the_peak_is_that_of_the_slices_that_are_near(tmp_path: Path) -> None:
    """Compare with the memory that the engine measured in place, minus the bytes on the host."""
    plan, measured = SlicePlan.equal(LENGTH, 4), {"schedule": "terapipe", "slices": 4, "folder": str(tmp_path)}
    rank_pool(2).run(with_few_rounds, job=job, **measured)
    (path,) = tmp_path.iterdir()
    memory = memory_of(Profile.load(path))
    assert memory is not None
    replay = Replay.of(build("terapipe", 2, MICRO_BATCHES, 4))
    for offloads in (False, True):
        ranks = ran("terapipe", 4, offload_activations=offloads)
        peaks = replay.peak_bytes(plan, MemoryModel(memory.parts, offloads=offloads))
        for stage_id, (rank, peak) in enumerate(zip(ranks, peaks, strict=True)):
            predicted = peak - memory.static_bytes(stage_id)
            assert predicted == pytest.approx(rank.grown_bytes, rel=0.2), (offloads, stage_id)
