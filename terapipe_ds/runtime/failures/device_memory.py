"""Report how the allocator of this rank's device fares. Only the main thread may call these functions.

The allocator holds its lock while it waits for the device. Another thread that asks it then waits as well, and keeps
the interpreter's lock: a watch-dog that asks would hang with the thread that it watches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator


def allocator_retries() -> int:
    """Return how often the allocator ran out of memory, waited for all work of the device, and tried again."""
    if get_accelerator().is_synchronized_device():  # the CPU has no such allocator, and reads files of the system here
        return 0
    return int((get_accelerator().memory_stats() or {}).get("num_alloc_retries", 0))


def save_memory_snapshot(folder: Path, rank: int) -> None:
    """Write the allocator's snapshot of a GPU, for pytorch.org/memory_viz. It has blocks; calls only if recorded."""
    if get_accelerator().device_name() == "cuda":
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{rank:04d}.pickle"))


def warning_of_allocator(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if memory of a GPU that slices of many sizes have split cannot grow together again, or None."""
    settings = (environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    can_grow = any("expandable_segments:true" in value.lower() for value in settings)
    if can_grow or get_accelerator().device_name() != "cuda":
        return None
    return (
        "PYTORCH_CUDA_ALLOC_CONF has no expandable_segments:True: slices of many sizes split the memory, and an "
        "allocation that then fails waits for all messages, even for those that wait for this rank. Set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
