"""Check the variables that CUDA, torch's allocator and NCCL read at the start of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from terapipe_ds.doctor.lines import Check, Line

_QUEUES, _LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def variables(environment: Mapping[str, str], on_cuda: bool) -> Iterator[Line]:
    """Report the variables that can make a pipeline hang or slow. Without a GPU nothing reads them."""
    if on_cuda:
        yield _queues(environment.get(_QUEUES, ""))
        yield _allocator(next((environment[name] for name in _ALLOCATOR if name in environment), ""))
        yield from _nccl(environment)
        yield _loading(environment.get(_LOADING, ""))
        yield from _bound_device(environment)


def _queues(value: str) -> Line:
    if value == "32":
        return Line("ok", _QUEUES, value)
    if value == "1":
        fix = f"set {_QUEUES}=32, unless Megatron's overlap of communication needs 1"
        return Line("warning", _QUEUES, "1: streams share one queue, and schedules that hang in it are refused", fix)
    text = f"{value or 'not set: 8'}: streams share queues by chance"
    return Line("note", _QUEUES, text, f"set {_QUEUES}=32; terapipe_ds.run sets it where it is not set")


def _allocator(value: str) -> Line:
    if "expandable_segments:true" in value.lower():
        return Line("ok", _ALLOCATOR[1], value)
    text = f"{value or 'not set'}: slices of many sizes split the memory, and a retry waits for all messages"
    return Line("warning", _ALLOCATOR[1], text, f"set {_ALLOCATOR[1]}=expandable_segments:True")


def _nccl(environment: Mapping[str, str]) -> Iterator[Line]:
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if environment.get(name) == "1":
            text = "1: the host waits for each message, and computations behind it begin late"
            yield Line("warning", name, text, f"unset {name}")
    if "NCCL_MAX_CTAS" in environment:
        text = f"{environment['NCCL_MAX_CTAS']}: in place of 4 blocks for a message between stages"
        yield Line("note", "NCCL_MAX_CTAS", text, "a receive that waits occupies as many multiprocessors")


def _loading(value: str) -> Line:
    if value == "EAGER":
        return Line("ok", _LOADING, "EAGER: one batch of a kind goes by way of the host")
    text = "kernels are loaded at their first launch: the first batches of a kind go by way of the host"
    return Line("note", _LOADING, text, f"{_LOADING}=EAGER starts slower, and spares two of three")


def _bound_device(environment: Mapping[str, str]) -> Iterator[Line]:
    """Report the device that DeepSpeed's `init_distributed` binds the rank's process group to (`comm/torch.py`)."""
    if (local_rank := environment.get("LOCAL_RANK", "")) != "":
        yield Line("ok", "LOCAL_RANK", f"{local_rank}: DeepSpeed binds this rank to cuda:{local_rank}")
    elif any(environment.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS")):
        text = "not set: DeepSpeed binds every rank to cuda:0, the first device that it sees"
        yield Line("warning", "LOCAL_RANK", text, "set LOCAL_RANK=$SLURM_LOCALID, unless each rank sees one device")


def checks() -> tuple[Check, ...]:
    """Return the checks of the environment."""

    def look() -> Iterator[Line]:
        from deepspeed.accelerator import get_accelerator

        return variables(os.environ, get_accelerator().device_name() == "cuda")

    return (Check("environment", look, ("torch", "deepspeed")),)
