"""What DeepSpeed's and our own options wait for within a batch, with a stand-in for a device."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.comm import comm as ds_comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.links.channel import Wire
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.refusals import problem_of_device_waits
from tests.distributed import engines
from tests.distributed.device_waits import Waits, counted_waits
from tests.distributed.harness import rank_pool

FLOPS = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 2, "detailed": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flops profiler": {"flops_profiler": FLOPS},
    "wall clock breakdown": {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1},
    "checkpointing": {"module": {"activation_checkpoint_interval": 1},
                      "activation_checkpointing": {"profile": True}},
    "half precision and ZeRO": {"dtype": "bfloat16", "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "dynamic loss scale": {"dtype": "float16", "fp16": {"enabled": True, "initial_scale_power": 8}},
    "numbers looked at, weight gradients apart": {"changes": {"check_finite": "every_step", "schedule": "seq1f1b-zb"}},
}  # fmt: skip


def job_count(dtype: str = "float32", changes: dict[str, Any] | None = None, **options: Any) -> Waits:
    """Three steps and three evaluations."""
    section = engines.section(**(changes or {}))
    with engines.engine_of(engines.gpt_layers(dtype), section, stages=2, **options) as engine:
        with counted_waits() as waits, contextlib.redirect_stdout(io.StringIO()):
            for batch in engines.batches(3):
                engine.train_batch(iter(batch))
                engine.eval_batch(iter(batch))
    return waits


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(4)
def test_no_action_waits_for_the_device(name: str) -> None:
    for waits in rank_pool(2).run(job_count, **CASES[name]):
        assert waits.actions > 100 and waits.device == waits.reads == []


class _StockProfiler(FlopsProfiler):
    """DeepSpeed's profiler behind the calls of ours."""

    def open_batch(self, training: bool) -> None:
        """Count everything."""

    def around(self, action: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self) -> None:
        self.end_profile()


def job_count_stock_hooks() -> list[str]:
    with mock.patch("terapipe_ds.runtime.engine.build.stage_flops", lambda engine: _StockProfiler(engine.module)):
        return job_count(flops_profiler=FLOPS).device


def test_the_stand_in_sees_the_profiler_of_deepspeed() -> None:
    """Its hooks wait for the device: on rank 0, whose forwards DeepSpeed profiles."""
    waits = rank_pool(2).run(job_count_stock_hooks)[0]
    assert waits and all("_time_hook" in each for each in waits)


# -- what is refused -------------------------------------------------------------------------------------------------


def wires(device: str, staged: bool = False) -> Wires:
    wire = Wire(1, "data", "control", torch.device(device), "activations to stage 1", staged)
    return Wires({(0, 0, 1, 0): (wire, dataclasses.replace(wire, name="gradients from stage 1"))})


REFUSED = {
    "synchronize_checkpoint_boundary": lambda: mock.patch.object(ds_checkpointing, "SYNCHRONIZE", True),
    "comms_logger.enabled to false": lambda: mock.patch.object(ds_comm.comms_logger, "enabled", True),
    "CUDA_LAUNCH_BLOCKING=1": lambda: mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="1"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_replaced_is_refused_where_receives_are_on_a_device(words: str) -> None:
    with REFUSED[words]():
        assert re.search(rf"{words}.*a hang", problem_of_device_waits(wires("cuda").post_on_device) or "")
        assert problem_of_device_waits(wires("cpu").post_on_device) is None
        assert problem_of_device_waits(wires("cuda", staged=True).post_on_device) is None  # receives in host memory
        assert problem_of_device_waits(Wires({}).post_on_device) is None  # one stage
    assert problem_of_device_waits(wires("cuda").post_on_device) is None


@contextlib.contextmanager
def waiting(words: str, ranks: list[int]) -> Iterator[None]:
    """What waits for the device is switched on, on some ranks, and all post on a device."""
    with mock.patch.object(Wires, "post_on_device", True):
        with REFUSED[words]() if torch_dist.get_rank() in ranks else contextlib.nullcontext():
            yield


def job_refused_batch(words: str, ranks: list[int], evaluate: bool) -> tuple[str, str]:
    """What a batch is refused with, and then it trains: nothing was begun, and nobody ended the ranks."""
    with engines.engine_of(engines.gpt_layers(), engines.section()) as engine:
        (batch,) = engines.batches(1)
        run_batch = engine.eval_batch if evaluate else engine.train_batch
        with waiting(words, ranks):
            said = engines.raised_by(lambda: run_batch(iter(batch)))
        engine.train_batch(iter(batch))
        assert engine.global_steps == 1
    return said


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize(
    ("words", "ranks"), [("synchronize_checkpoint_boundary", [0, 1]), ("CUDA_LAUNCH_BLOCKING=1", [1])]
)
def test_a_batch_is_refused_on_every_rank(words: str, ranks: list[int], evaluate: bool) -> None:
    """Whether it is on everywhere, or in the environment of one rank."""
    refusals = rank_pool(2).run(job_refused_batch, words=words, ranks=ranks, evaluate=evaluate)
    for rank, (name, said) in enumerate(refusals):
        assert words in said
        assert name == ("TeraPipeConfigError" if rank in ranks else "BatchError")
        assert rank in ranks or said.startswith("stage 1 refuses the batch: TeraPipeConfigError: ")


def job_refused_engine(words: str, ranks: list[int]) -> str:
    with waiting(words, ranks), pytest.raises(TeraPipeConfigError) as caught:
        engines.build(engines.gpt_layers(), engines.section())
    return str(caught.value)


def test_the_engine_is_refused_on_every_rank() -> None:
    for said in rank_pool(2).run(job_refused_engine, words="CUDA_LAUNCH_BLOCKING=1", ranks=[1]):
        assert said.startswith("on rank 1: CUDA_LAUNCH_BLOCKING=1 waits")
