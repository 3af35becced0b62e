"""No step has a race between the streams of a device, which stand-ins order on CPU ranks; see `device_streams`."""

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.runtime.layers.offload import Offloaded
from terapipe_ds.runtime.links.channel import MessageBuffers, SendChannel, Wire
from terapipe_ds.schedule import SCHEDULE_NAMES
from tests.distributed import device_streams, engines
from tests.distributed.device_streams import COPIES, ordered_streams
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.nccl_emulator import emulated_nccl

Fault = Callable[[], contextlib.AbstractContextManager[Any]]
full = pytest.mark.full


def train(
    schedule: str, fault: Fault = contextlib.nullcontext, lengths: tuple[int, ...] = (24, 24), **changes: Any
) -> dict[str, int]:
    """Train a step for each of the `lengths` in the order of a device; return the number of calls in each stream."""
    module, chunks = changes.pop("module", {}), {"chunks_per_stage": 2} if "interleaved" in schedule else {}
    section = engines.unchecked(**{"schedule": schedule, "slices": 3, "granularity_tokens": 1, **chunks, **changes})
    data = [[engines.micro_batch(index, length=length) for index in range(4)] for length in lengths]
    layers, options = engines.gpt_layers(num_layers=4), {"gradient_accumulation_steps": 4, "module": module}
    with emulated_nccl(eager=True), engines.engine_of(layers, section, **options) as engine:
        with fault(), ordered_streams() as streams:
            for batch in data:
                engine.train_batch(iter(batch))
            engine.eval_batch(iter(data[0]))
    return streams.num_calls


OFFLOADED = {"slices": 6, "offload_activations": True}
CASES: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in SCHEDULE_NAMES} | {
    f"{name}, offloaded": {"schedule": name, **OFFLOADED} for name in SCHEDULE_NAMES
} | {
    "lengths that grow": {"schedule": "seq1f1b", "lengths": (9, 24, 12)},
    "lengths that grow, offloaded": {"schedule": "gpipe", "lengths": (12, 24), **OFFLOADED},
    "recomputed": {"schedule": "seq1f1b", "module": {"activation_checkpoint_interval": 1}},
    "recomputed and offloaded": {"schedule": "gpipe", "module": {"activation_checkpoint_interval": 1}, **OFFLOADED},
    "int8 and bf16 on the wire": {"schedule": "seq1f1b-zb", "links": {"forward": "int8", "backward": "bf16"}},
    "fp8 on the wire": {"schedule": "seq1f1b", "links": {"forward": "fp8"}},
}  # fmt: skip
SAMPLE = ("seq1f1b", "lengths that grow, offloaded")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else full) for name in CASES])
def test_every_access_is_ordered(name: str) -> None:
    for calls in rank_pool(2).run(train, **CASES[name]):
        assert len([stream for stream in calls if stream.startswith("messages of")]) >= 2
        assert (COPIES in calls) == ("offloaded" in name)


# -- what the order finds ----------------------------------------------------------------------------------------------


def forget_event(work: Any) -> None:
    """Wait for a message on the host alone, as if nothing let the current stream wait."""
    if hasattr(work, "event"):
        del work.event
    work.wait()


def no_wait_for_messages() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Wire, "wait", lambda wire, work: forget_event(work))


def no_wait_for_sends() -> contextlib.AbstractContextManager[Any]:
    def wait_oldest(channel: SendChannel) -> None:
        for work in channel._in_flight.popleft()[1]:
            forget_event(work)

    return mock.patch.object(SendChannel, "_wait_oldest", wait_oldest)


def buffers_in_use() -> contextlib.AbstractContextManager[Any]:
    def take(buffers: MessageBuffers, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [each for each in buffers._storages if each.nbytes() >= num_bytes]
        if not fitting:
            buffers._storages.append(torch.empty(num_bytes, dtype=torch.uint8).untyped_storage())
        return torch.empty(0, dtype=dtype).set_((fitting or buffers._storages)[-1], 0, shape)

    return mock.patch.object(MessageBuffers, "take", take)


def memory_freed_at_once() -> contextlib.AbstractContextManager[Any]:
    leave = Offloaded.leave

    def leave_at_once(memory: Offloaded) -> None:
        memory._leaves = None
        leave(memory)

    return mock.patch.object(Offloaded, "leave", leave_at_once)


def memory_used_at_once() -> contextlib.AbstractContextManager[Any]:
    view = Offloaded.view

    def view_at_once(memory: Offloaded, *of: Any) -> Any:
        memory.come_back()
        memory._back = None
        return view(memory, *of)

    return mock.patch.object(Offloaded, "view", view_at_once)


def copies_that_begin_at_once() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(device_streams.Stream, "wait_stream", lambda stream, other: None)


MESSAGES: dict[Fault, str] = {
    no_wait_for_messages: "computations does not wait for a receive",
    no_wait_for_sends: "copy_ in the stream of computations does not wait for a send",
    buffers_in_use: "does not wait for a receive",
}
COPYING: dict[Fault, str] = {
    memory_freed_at_once: "freed memory in the stream of computations does not wait for aten::copy_",
    memory_used_at_once: "computations does not wait for aten::copy_ in that of copies",
    copies_that_begin_at_once: "aten::copy_ in the stream of copies does not wait for aten",
}


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=() if fault in (no_wait_for_sends, memory_freed_at_once) else full)
    for fault in (*MESSAGES, *COPYING)
])  # fmt: skip
def test_a_missing_wait_is_found(fault: Fault) -> None:
    job = {"schedule": "gpipe", "lengths": (24,), **OFFLOADED} if fault in COPYING else {"schedule": "seq1f1b"}
    with pytest.raises(RankFailure, match={**MESSAGES, **COPYING}[fault]):
        rank_pool(2).run(train, fault=fault, **job)
