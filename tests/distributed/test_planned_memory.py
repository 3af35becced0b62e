"""Test planned strategies for long sequences: they run as `to_deepspeed()` says, in the bytes of their plans."""

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import PipelineModule

import terapipe_ds
from studies.levers import host_bytes
from studies.memory import live_bytes
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.planner import model_memory
from terapipe_ds.planner.strategy import Cluster, Strategy, plan_strategy, price_strategy
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from tests.distributed.harness import RankPool

SIZE = ModelSize("toy", 6, 64, 4, 4, 16, 192, 64, 4096)
LENGTH = 4096
BUCKET = 2_000_000  # numbers that ZeRO-1 reduces at once; a usual bucket is much larger than the toy
QUESTION: dict[str, Any] = {"global_batch_size": 1, "sequence_length": LENGTH}
SP2 = {"stages": 2, "sequence_parallel": 2, "offload_activations": True, "offload_optimizer": False}
PP4 = {
    "stages": 4,
    "schedule": "seq1f1b",
    "data_parallel": 1,
    "sequence_parallel": 1,
    "offload_activations": False,
    "offload_optimizer": False,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "PP2 x SP2": (SP2, {}),
    "PP2 x SP2, recomputed": (SP2 | {"schedule": "seq1f1b"}, {"recompute": "full", "slices": [256] * 16}),
    "PP2 x SP2, attention kept": (
        SP2 | {"schedule": "seq1f1b"},
        {"recompute": "full", "keep_attention": True, "slices": [256] * 16},
    ),
    "PP2 x SP2, optimizer offloaded": (SP2 | {"schedule": "seq1f1b", "offload_optimizer": True}, {}),
    "PP4": (PP4, {}),
    "PP4, recomputed": (PP4, {"recompute": "full", "slices": [512] * 8}),
    "PP4, two stages keep attention": (PP4, {"recompute": [0, 1], "keep_attention": True, "slices": [512] * 8}),
    "PP4, offloaded, longer": (
        PP4 | {"offload_activations": True, "sequence_length": 2 * LENGTH},
        {"recompute": [1, 3], "slices": [512] * 16},
    ),
    "PP4, whole, recomputed before W": (
        PP4 | {"schedule": "zb-h1"},
        {"recompute": "full", "slices": [LENGTH], "accumulation": 4},
    ),
}
"""The question of the planner, and changes to its answer, whose bytes it then predicts."""


def planned(case: str) -> Strategy:
    question, changes = CASES[case]
    cluster = Cluster("cpu", 1, 4)
    with mock.patch.object(model_memory, "REDUCE_BUCKET", BUCKET):
        best = plan_strategy(SIZE, cluster, **QUESTION | question)
        return price_strategy(best.model_copy(update=changes), SIZE, cluster) if changes else best


def settled(all_to_all: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the collective, which ends when gloo's threads hold its tensors no more: a free there is not recorded."""

    def call(*tensors: torch.Tensor) -> None:
        before = [x._use_count() for x in tensors]
        all_to_all(*tensors)
        deadline_s = time.monotonic() + 1.0
        while [x._use_count() for x in tensors] > before:
            assert time.monotonic() < deadline_s, "somebody else keeps the tensors of an exchange"
            time.sleep(0.0005)

    return call


def job(text: str) -> tuple[int, int, float]:
    """Return the stage of this rank, its peak in the second of two steps, and the loss."""
    strategy = Strategy.from_json(text)
    length = strategy.plans[0].sequence_length
    gpt = GPTConfig(
        num_layers=SIZE.num_layers, hidden_size=SIZE.hidden_size, num_heads=SIZE.num_heads,
        num_kv_heads=SIZE.num_kv_heads, head_dim=SIZE.head_dim, ffn_size=SIZE.ffn_size, vocab_size=SIZE.vocab_size,
        max_sequence_length=length, dtype="float32",
    )  # fmt: skip
    module = PipelineModule(gpt_layers(gpt), loss_fn=gpt_loss, topology=terapipe_ds.topology_of(strategy))
    ds_config = strategy.to_deepspeed()
    # DeepSpeed's own would be compiled first, for minutes
    ds_config["zero_force_ds_cpu_optimizer"] = False
    ds_config["optimizer"]["params"]["torch_adam"] = True
    ds_config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    engine = terapipe_ds.initialize(model=module, model_parameters=module.parameters(), config=ds_config)[0]
    tokens = torch.randint(0, SIZE.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    batch = [(tokens, tokens.roll(-1, 1))] * strategy.accumulation
    with MemoryPeak():  # what this step leaves counts when the next one drops it
        engine.train_batch(iter(batch))
    torch.distributed.barrier()
    engine.slice_store.pool.drop_free()
    before = live_bytes() - host_bytes(engine, strategy.offload_optimizer)
    sequence = engine._stage.sequence
    object.__setattr__(sequence, "all_to_all", settled(sequence.all_to_all))
    with MemoryPeak() as peak:
        loss = float(engine.train_batch(iter(batch)))
    stage_id = engine.stage_id
    engine.destroy()
    return stage_id, before + peak.grown_bytes, loss


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_planned_strategy_runs_in_the_bytes_of_its_plan(case: str) -> None:
    strategy = planned(case)
    assert (strategy.recompute != "off") == ("recompute" in CASES[case][1])
    pool = RankPool(4, 300.0)  # a pool of its own: the leftovers of other tests' engines would count
    try:
        found = pool.run(job, text=strategy.to_json())
    finally:
        pool.close()
    assert len({loss for *_, loss in found}) == 1 and math.isfinite(found[0][2])
    ratios = [strategy.memory_bytes[stage_id] / measured for stage_id, measured, _ in found]
    assert ratios == pytest.approx([1.0] * 4, abs=0.1), (ratios, strategy)
