"""A plan in words: what the engine logs and ``terapipe plan`` prints."""

from __future__ import annotations

from terapipe_ds.planner.result import PlanResult


def describe(result: PlanResult, *, schedule_chosen: bool = False) -> list[str]:
    """One line each: schedule, plan, step times against unsliced and equal slices, proof, bubble, memory.

    ``schedule_chosen``: the planner chose the schedule too.
    """
    plan, lengths = result.plan, result.plan.lengths
    slices = ", ".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{lengths[0]} tokens each"
    equal = result.equal_plan.num_slices
    proof = "optimal: proven" if result.optimal else f"within {result.gap:.2%} of a time that no plan can beat"
    proven = [f"proof     {proof}"] if result.lower_bound_s > 0 else []
    return [
        f"schedule  {result.schedule}{' (chosen)' if schedule_chosen else ''}",
        f"plan      {plan.num_slices} slice{'s' * (plan.num_slices > 1)}: {slices}",
        f"step      {_time(result.predicted_s)} predicted, without reduce and optimizer",
        f"          {_time(result.unsliced_s)} unsliced ({_ratio(result.unsliced_s, result)})",
        f"          {_time(result.equal_s)} with the best equal slices, {equal} ({_ratio(result.equal_s, result)})",
        *proven,
        f"bubble    {result.bubble_fraction:.1%} of the stages' time",
        *_memory_lines(result),
    ]


def _memory_lines(result: PlanResult) -> list[str]:
    peaks, limit = result.peak_bytes, result.memory_limit_bytes
    if peaks is None:
        return []
    most, least = max(peaks), min(peaks)
    text = f"memory    {_bytes(most)} on stage {peaks.index(most)}"
    text += f", {_bytes(least)} on stage {peaks.index(least)}" if least < most else ""
    return [text + (f"; the limit is {_bytes(limit)}" if limit is not None else "")]


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _ratio(seconds: float, result: PlanResult) -> str:
    return f"{seconds / result.predicted_s:.3f}x" if result.predicted_s > 0 else "no time"
