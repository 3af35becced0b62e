"""Test planned strategies for long sequences: they run as `to_deepspeed()` says, in the bytes of their plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

import terapipe_ds
from studies.memory import live_bytes
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.planner.strategy import Cluster, Strategy, plan_strategy
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from tests.distributed.harness import RankPool

SIZE = ModelSize("toy", 6, 64, 4, 4, 16, 192, 64, 4096)
LENGTH = 4096
QUESTION: dict[str, Any] = {"global_batch_size": 1, "sequence_length": LENGTH}
CASES: dict[str, dict[str, Any]] = {
    "PP2 x SP2": {"stages": 2, "sequence_parallel": 2, "offload_activations": True, "offload_optimizer": False},
    "PP2 x SP2, recomputed": {
        **{"stages": 2, "sequence_parallel": 2, "offload_activations": True, "offload_optimizer": False},
        "schedule": "seq1f1b",
        "memory_limit_gb": 0.0108,
    },
    "PP4": {
        "stages": 4,
        "schedule": "seq1f1b",
        "data_parallel": 1,
        "sequence_parallel": 1,
        "offload_activations": False,
        "offload_optimizer": False,
    },
}


def planned(case: str) -> Strategy:
    return plan_strategy(SIZE, Cluster("cpu", 1, 4), **QUESTION, **CASES[case])


def job(text: str) -> tuple[int, int, float]:
    """Return the stage of this rank, its peak in the second of two steps, and the loss."""
    strategy = Strategy.from_json(text)
    gpt = GPTConfig(
        num_layers=SIZE.num_layers, hidden_size=SIZE.hidden_size, num_heads=SIZE.num_heads,
        num_kv_heads=SIZE.num_kv_heads, head_dim=SIZE.head_dim, ffn_size=SIZE.ffn_size, vocab_size=SIZE.vocab_size,
        max_sequence_length=LENGTH, dtype="float32",
    )  # fmt: skip
    module = PipelineModule(gpt_layers(gpt), loss_fn=gpt_loss, topology=terapipe_ds.topology_of(strategy))
    ds_config = strategy.to_deepspeed()
    ds_config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled first, for minutes
    engine = terapipe_ds.initialize(model=module, model_parameters=module.parameters(), config=ds_config)[0]
    tokens = torch.randint(0, SIZE.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = [(tokens, tokens.roll(-1, 1))] * strategy.accumulation
    with MemoryPeak():  # what this step leaves counts when the next one drops it
        engine.train_batch(iter(batch))
    torch.distributed.barrier()
    engine.slice_store.drop_free()
    offload = engine._stage.offload
    on_host = 0 if offload is None else offload.buffers.reserved_bytes
    before = live_bytes() - on_host
    with MemoryPeak() as peak:
        loss = float(engine.train_batch(iter(batch)))
    stage_id = engine.stage_id
    engine.destroy()
    return stage_id, before + peak.grown_bytes, loss


_UNDER = pytest.mark.xfail(strict=True, reason="the plan is 17 to 25 % below the measured bytes")


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, marks=_UNDER) if "recomputed" in case else case for case in CASES])
def test_a_planned_strategy_runs_in_the_bytes_of_its_plan(case: str) -> None:
    strategy = planned(case)
    assert (strategy.recompute != "off") == ("recomputed" in case)
    pool = RankPool(4)  # a pool of its own: the leftovers of other tests' engines would count
    try:
        found = pool.run(job, text=strategy.to_json())
    finally:
        pool.close()
    assert len({loss for *_, loss in found}) == 1 and math.isfinite(found[0][2])
    for stage_id, measured, _ in found:
        assert strategy.memory_bytes[stage_id] == pytest.approx(measured, rel=0.1), (stage_id, strategy)
