"""Count the peak of tensor bytes inside a block, exactly.

On an accelerator the allocator counts. On a CPU torch's recorder of events sees each allocation, including temporaries
inside kernels; the resident set of a process would show the heap's own behaviour. The older of torch's two recorders
keeps the order of events, costs little, and writes nothing to the terminal.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd import ProfilerConfig, ProfilerState


def bytes_outside_allocator() -> int:
    """Return the bytes of this rank's GPU that torch cannot get: CUDA's context, NCCL's buffers, other processes."""
    if get_accelerator().device_name() != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class MemoryPeak:
    """Record `grown_bytes`, the largest total inside the block, and `left_bytes`, the total at its end.

    Both count from the start of the block; an older tensor that is freed inside it counts as negative. Backwards run in
    the thread of the block, as they do without an accelerator. It raises RuntimeError unless `is_available`.
    """

    def __init__(self) -> None:
        self.grown_bytes = self.left_bytes = 0
        self._before = 0

    @staticmethod
    def is_available() -> bool:
        """Return whether bytes can be counted now; a CPU's cannot while another profiler runs."""
        has_recorder = hasattr(torch.autograd, "_enable_profiler_legacy")
        return _allocator() is not None or (has_recorder and not torch.autograd._profiler_enabled())

    def __enter__(self) -> MemoryPeak:
        if not self.is_available():
            raise RuntimeError("tensor bytes cannot be recorded: end the profiler that runs, or use a tested torch")
        # an accelerator's allocator counts by itself
        if (allocator := _allocator()) is not None:
            allocator.reset_peak_memory_stats()
            self._before = int(allocator.memory_allocated())
            return self
        options = False, True, False, False, False  # input shapes, memory, stacks, flops, modules
        experimental = torch._C._profiler._ExperimentalConfig()
        torch.autograd._enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *options, experimental))
        return self

    def __exit__(self, *error: object) -> None:
        if (allocator := _allocator()) is not None:
            self.grown_bytes = int(allocator.max_memory_allocated()) - self._before
            self.left_bytes = int(allocator.memory_allocated()) - self._before
            return
        # each event has the bytes that were allocated or freed; their running total has the peak
        threads = torch.autograd._disable_profiler_legacy()
        changes = (e.cpu_memory_usage() for events in threads for e in events if str(e.kind()) == "memory_alloc")
        totals = [0, *itertools.accumulate(changes)]
        self.grown_bytes, self.left_bytes = max(totals), totals[-1]


def _allocator() -> Any:
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator
