"""What to say where nothing fits in memory."""

from __future__ import annotations

from collections.abc import Iterable

from terapipe_ds.planner.candidates import Lengths
from terapipe_ds.planner.errors import MemoryLimitError
from terapipe_ds.planner.judge import Judge

GB = 1e9


def memory_limit_error(judge: Judge, tried: Iterable[Lengths]) -> MemoryLimitError:
    """The least need among the plans that were tried, where it is, and what would lower it."""
    assert judge.memory is not None and judge.memory_limit_bytes is not None
    least, plan_of_least = None, None
    for lengths in tried:
        peaks = judge.peak_bytes(lengths)
        assert peaks is not None
        if least is None or max(peaks) < max(least):
            least, plan_of_least = peaks, lengths
    assert least is not None and plan_of_least is not None
    need = max(least)
    stage_id = least.index(need)
    parts = {part_id for (stage, _), part_id in judge.placement.items() if stage == stage_id}
    gradient_bytes = getattr(judge.memory, "gradient_bytes", _nothing)
    static = sum(judge.memory.static_bytes(part_id) + gradient_bytes(part_id) for part_id in parts)
    count = len(plan_of_least)
    message = (
        f"no plan fits in {judge.memory_limit_bytes / GB:.4g} GB: with schedule {judge.schedule!r} the least "
        f"need found is {need / GB:.4g} GB on stage {stage_id} ({count} slice{'s' * (count > 1)}), of which "
        f"{static / GB:.4g} GB are parameters, gradients and optimizer states; {_advice(judge, static)}"
    )
    return MemoryLimitError(message, need, stage_id)


def _nothing(part_id: int) -> int:
    return 0


def _advice(judge: Judge, static_bytes: int) -> str:
    assert judge.memory_limit_bytes is not None
    smaller_model = "more stages, more tensor parallelism, ZeRO-1 with data parallelism"
    if static_bytes > judge.memory_limit_bytes:
        return f"these alone are too much: try {smaller_model}, or devices with more memory"
    schedule = "" if judge.schedule == "seq1f1b" else "schedule 'seq1f1b', which keeps fewer slices live, "
    return f"try {schedule}activation checkpointing, a smaller micro-batch, {smaller_model}"
