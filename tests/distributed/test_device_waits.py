"""Test which options of DeepSpeed and ours wait for the device within a batch.

A stand-in for a device that runs behind its host counts where the host waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as ds_comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch.utils._python_dispatch import TorchDispatchMode

import terapipe_ds
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.engine.batches import CLOSING
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.engine.refused_calls import problem_of_device_waits
from terapipe_ds.runtime.failures import device_memory
from terapipe_ds.runtime.links.channel import Wire
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.schedule.action import Action
from tests.distributed import engines
from tests.distributed.harness import rank_pool

_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")
"""What brings numbers to the host: `item()`, `float()` and `bool()` of a tensor, masks as indices."""


class Event:
    """An event of a stream that is always done."""

    def __init__(self, **options: Any) -> None:
        self.recorded = False

    def record(self, *stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        """Wait for the event's own stream, and no other."""
        assert self.recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.recorded and end.recorded
        return 2.0


@dataclass
class Waits:
    """Record where the host waited while receives may have been posted: the action, and the call."""

    device: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    actions: int = 0
    pinned: int = 0
    unpinned: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count for the block, in the actions of batches before their gradients are summed: receives are posted then."""
    waits, running = Waits(), [None]
    run = TeraPipeEngine._exec_action

    def run_counted(engine: TeraPipeEngine, action: Action) -> None:
        if action.kind in CLOSING:
            return run(engine, action)
        waits.actions += 1
        running[0] = action  # type: ignore[call-overload]
        try:
            with _Reads(lambda: waits.reads.append(_caller(action))):
                return run(engine, action)
        finally:
            running[0] = None

    def synchronize(*device: Any) -> None:
        if running[0] is not None:
            waits.device.append(_caller(running[0]))

    pinned: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        waits.pinned += 1
        pinned.add(tensor.data_ptr())
        return tensor

    def to_device(self: SliceableTensors, device: torch.device) -> SliceableTensors:
        if running[0] is not None:
            waits.unpinned += [str(tensor.shape) for tensor in self.tensors if tensor.data_ptr() not in pinned]
        return self

    accelerator = get_accelerator()
    stand_in = {
        "is_synchronized_device": lambda: False,
        "Event": Event,
        "current_stream": lambda *device: mock.Mock(spec_set=["synchronize", "wait_event"]),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": synchronize,
        "pin_memory": pin,
        "memory_stats": lambda *device: {"num_alloc_retries": 3},
        "range_push": waits.ranges.append,
        "range_pop": lambda: None,
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(TeraPipeEngine, "_exec_action", run_counted))
        patches.enter_context(mock.patch.object(SliceableTensors, "to", to_device))
        for name, value in stand_in.items():
            patches.enter_context(_property_patch(accelerator, name, value))
        yield waits


def _property_patch(accelerator: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """`Event` and its kind are properties of the class, the others methods."""
    if isinstance(getattr(type(accelerator), name, None), property):
        return mock.patch.object(type(accelerator), name, property(lambda self: value))
    return mock.patch.object(accelerator, name, value)


class _Reads(TorchDispatchMode):
    """Record each operation that brings numbers to the host."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in _READS and not _is_on_host():
            self._tell()
        return func(*args, **(kwargs or {}))


_ON_HOST = {"pattern_of_mask", "require_known"}
"""Functions that read host tensors everywhere, or read only on CPUs and let a GPU assert by itself."""


def _is_on_host() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in _ON_HOST:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _caller(action: Any) -> str:
    """The nearest lines that are neither torch's nor this file's."""
    frames = traceback.extract_stack(sys._getframe(1))
    lines = [f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in frames if frame.filename != __file__]
    return f"{action}: {' < '.join(lines[:-4:-1])}"


# -- the tests ----------------------------------------------------------------------------------------------------


FLOPS = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 2, "detailed": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flops profiler": {"flops_profiler": FLOPS},
    "wall clock breakdown": {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1},
    "checkpointing": {"module": {"activation_checkpoint_interval": 1},
                      "activation_checkpointing": {"profile": True}},
    "half precision and ZeRO": {"dtype": "bfloat16", "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "dynamic loss scale": {"dtype": "float16", "fp16": {"enabled": True, "initial_scale_power": 8}},
    "dropout, of attention as well": {"gpt": {"dropout": 0.1}},
    "numbers looked at, weight gradients apart": {"changes": {"check_finite": "every_step", "schedule": "seq1f1b-zb"}},
}  # fmt: skip


def job_count(
    dtype: str = "float32", changes: dict[str, Any] | None = None, gpt: dict[str, Any] | None = None, **options: Any
) -> Waits:
    """Three steps and three evaluations."""
    section = engines.unchecked(**(changes or {}))
    with engines.engine_of(engines.gpt_layers(dtype, **(gpt or {})), section, stages=2, **options) as engine:
        return counted(engine, engines.batches(3))


def counted(engine: Any, batches: list[engines.Batch]) -> Waits:
    with counted_waits() as waits, contextlib.redirect_stdout(io.StringIO()):
        for batch in batches:
            engine.train_batch(iter(batch))
            engine.eval_batch(iter(batch))
    return waits


def job_other_layers(kind: str) -> Waits:
    """Train layers of transformers or of megatron-core with dropout, also of attention."""
    if kind == "megatron":
        from tests.distributed import megatron_cases, megatron_models

        case = megatron_cases.Case(layout="pp2", precision="fp32", block="gelu", accumulation=2)
        rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
        data = [[megatron_models.micro_batch(case, 0, step, index) for index in range(2)] for step in range(3)]
        with megatron_models.engine_of(case, rates) as engine:
            return counted(engine, data)
    from tests.distributed.hugging_face_jobs import engine_of
    from tests.hugging_face_families import config_of

    config = config_of(kind)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.1)
    module = terapipe_ds.from_config(config, num_stages=2, dtype=torch.float32)
    with engine_of(module, engines.unchecked()) as engine:
        return counted(engine, engines.batches(3))


def assert_none(ranks: list[Waits]) -> None:
    """Assert that the host waited for no action, and that batches went to the device from pinned memory."""
    for rank, waits in enumerate(ranks):
        assert waits.actions > 100 and waits.device == waits.reads == [] and waits.unpinned == []
        assert waits.pinned == 12, "two micro-batches in each of three steps and evaluations"
        assert f"F1.2 part {rank}" in waits.ranges and f"B0.1 part {rank}" in waits.ranges


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_no_action_waits_for_the_device(name: str) -> None:
    assert_none(rank_pool(2).run(job_count, **CASES[name]))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "megatron"])
def test_layers_of_others_with_dropout_wait_neither(kind: str) -> None:
    pytest.importorskip("megatron.core" if kind == "megatron" else "transformers")
    assert_none(rank_pool(2).run(job_other_layers, kind=kind))


def job_with_position_ids() -> Waits:
    """Give position ids of whole rows beside the tokens."""
    data = [[((x, torch.arange(x.shape[1]).repeat(len(x), 1)), y) for x, y in each] for each in engines.batches(3)]
    with engines.engine_of(engines.gpt_layers("float32"), engines.unchecked(), stages=2) as engine:
        return counted(engine, data)


def test_position_ids_are_read_on_the_host() -> None:
    for waits in rank_pool(2).run(job_with_position_ids):
        assert waits.actions > 100 and waits.device == waits.reads == waits.unpinned == []


def job_profiled() -> list[str]:
    """Return the names that torch's profiler shows of a step."""
    with engines.engine_of(engines.gpt_layers("float32"), engines.unchecked(), stages=2) as engine:
        (batch,) = engines.batches(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            engine.train_batch(iter(batch))
    return [event.name for event in profiler.events() if " part " in event.name]


def test_a_profiler_shows_each_action_by_its_name() -> None:
    for rank, names in enumerate(rank_pool(2).run(job_profiled)):
        assert {f"F0.0 part {rank}", f"F1.2 part {rank}", f"B0.0 part {rank}"} <= set(names)


class _StockProfiler(FlopsProfiler):
    """DeepSpeed's profiler behind the calls of ours."""

    def open_batch(self, training: bool, tokens: int) -> None:
        """Count everything."""

    def defer(self, micro_batch_id: int, operations: int) -> None:
        """Leave out what the loss computes."""

    def around(self, action: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self) -> None:
        self.end_profile()


def job_count_stock_hooks() -> list[str]:
    with mock.patch("terapipe_ds.runtime.engine.build.stage_flops", lambda engine, _: _StockProfiler(engine.module)):
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
    "PYTORCH_NO_CUDA_MEMORY_CACHING": lambda: mock.patch.dict("os.environ", PYTORCH_NO_CUDA_MEMORY_CACHING="0"),
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
    """Switch on, on some ranks, an option that waits for the device; all ranks post on a device."""
    with mock.patch.object(Wires, "post_on_device", True):
        with REFUSED[words]() if torch_dist.get_rank() in ranks else contextlib.nullcontext():
            yield


def job_refused_batch(words: str, ranks: list[int], evaluate: bool) -> tuple[str, str]:
    """Return the refusal of a batch, then train: the refused batch began nothing, and no rank was ended."""
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
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
        assert rank in ranks or said.startswith("ranks [1]: stage 1 refuses the batch: TeraPipeConfigError: ")


def job_refused_engine(words: str, ranks: list[int]) -> str:
    with waiting(words, ranks), pytest.raises(TeraPipeConfigError) as caught:
        engines.build(engines.gpt_layers(), engines.unchecked())
    return str(caught.value)


def test_the_engine_is_refused_on_every_rank() -> None:
    for said in rank_pool(2).run(job_refused_engine, words="CUDA_LAUNCH_BLOCKING=1", ranks=[1]):
        assert said.startswith("on rank 1: CUDA_LAUNCH_BLOCKING=1 waits")


def job_warned() -> list[str]:
    cuda = mock.Mock(wraps=get_accelerator(), **{"device_name.return_value": "cuda"})
    named = mock.patch.object(device_memory, "get_accelerator", lambda: cuda)
    with mock.patch.object(Wires, "post_on_device", True), named, engines.logged() as said:
        engines.build(engines.gpt_layers("float32"), engines.unchecked()).destroy()
    return [line for line in said if "expandable_segments" in line]


def test_memory_that_slices_split_is_warned_of_at_the_start() -> None:
    assert list(map(len, rank_pool(2).run(job_warned))) == [1, 0]
