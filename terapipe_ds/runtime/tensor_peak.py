"""The peak of tensor bytes, exactly: every allocation and release that torch's allocator makes.

An accelerator keeps account of them. A CPU does not, and the resident set of a process has the heap's own habits in it;
but torch's recorder of events is told of each allocation, temporaries inside of kernels included. This is the older of
torch's two recorders: it keeps the order of events, costs little, and writes nothing to the terminal.
"""

from __future__ import annotations

import itertools
from types import TracebackType

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd import ProfilerConfig, ProfilerState


class TensorPeak:
    """On a CPU: ``with TensorPeak() as peak: ...`` and then ``peak.grown_bytes`` and ``peak.left_bytes``.

    Both count from what was there at the start; a tensor that is older than the block and goes inside of it counts
    as negative. Backwards run in the thread of the block, as they do without an accelerator.

    Raises:
        RuntimeError: a profiler runs already, or torch has no such recorder; see :meth:`is_available`.
    """

    def __init__(self) -> None:
        self.grown_bytes = 0  # the largest total inside of the block
        self.left_bytes = 0  # the total at its end

    @staticmethod
    def is_available() -> bool:
        """Whether torch can tell, which it cannot while another profiler runs."""
        return hasattr(torch.autograd, "_enable_profiler_legacy") and not torch.autograd._profiler_enabled()

    def __enter__(self) -> TensorPeak:
        if not self.is_available():
            raise RuntimeError("tensor bytes cannot be recorded: end the profiler that runs, or use a tested torch")
        with_memory = ProfilerConfig(
            ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
        )  # report_input_shapes, profile_memory, with_stack, with_flops, with_modules
        torch.autograd._enable_profiler_legacy(with_memory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        threads = torch.autograd._disable_profiler_legacy()
        changes = (e.cpu_memory_usage() for events in threads for e in events if str(e.kind()) == "memory_alloc")
        totals = [0, *itertools.accumulate(changes)]
        self.grown_bytes, self.left_bytes = max(totals), totals[-1]


class AcceleratorPeak:
    """The same as :class:`TensorPeak`, of the accelerator that DeepSpeed has found."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self.left_bytes = 0

    @staticmethod
    def is_available() -> bool:
        """Always: its allocator counts."""
        return True

    def __enter__(self) -> AcceleratorPeak:
        accelerator = get_accelerator()
        accelerator.reset_peak_memory_stats()
        self._before = int(accelerator.memory_allocated())
        return self

    def __exit__(self, *_: object) -> None:
        accelerator = get_accelerator()
        self.grown_bytes = int(accelerator.max_memory_allocated()) - self._before
        self.left_bytes = int(accelerator.memory_allocated()) - self._before
