"""Define the planner's errors, and check its arguments."""

from __future__ import annotations

import functools

from terapipe_ds import messages


class PlannerError(ValueError):
    """Refuse a question that the planner cannot answer; the text names the value and the fix."""


TRY_SEQ1F1B = "schedule 'seq1f1b', which keeps fewer slices live"
TRY_RECOMPUTE = "activation checkpointing"
TRY_FEWER_SEQUENCES = "a smaller micro-batch"
"""Advice of a `MemoryLimitError`, good where nobody has tried it."""


class MemoryLimitError(PlannerError):
    """Report that no plan fits in the memory limit. `need_bytes` is the least need of any plan, on `stage_id`."""

    def __init__(self, problem: str, need_bytes: int = 0, stage_id: int = 0, advice: tuple[str, ...] = ()) -> None:
        super().__init__(f"{problem}; try {', '.join(advice)}" if advice else problem)
        self._problem, self._advice = problem, advice
        self.need_bytes = need_bytes
        self.stage_id = stage_id

    def without(self, *tried: str) -> MemoryLimitError:
        """Return the error without the advice that has been tried."""
        kept = tuple(advice for advice in self._advice if advice not in tried)
        return type(self)(self._problem, self.need_bytes, self.stage_id, kept)

    def __reduce__(self) -> tuple[type[MemoryLimitError], tuple[str, int, int, tuple[str, ...]]]:
        return type(self), (self._problem, self.need_bytes, self.stage_id, self._advice)


check_count = functools.partial(messages.check_count, error=PlannerError)
"""Return a value as an int >= 1, or raise PlannerError."""
