"""Describe a plan in words for the engine's log and the output of `terapipe plan`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from terapipe_ds.planner.result import PlanResult, Ranking


def describe(
    result: PlanResult, *, schedule_chosen: bool = False, card_bytes: float | None = None, limit_gb: float | None = None
) -> list[str]:
    """Return one line each: schedule, plan, step times against unsliced and equal slices, proof, bubble, memory.

    Beside the limit stand `limit_gb`, as the user gave it, and `card_bytes`, the memory of a device if it is known.
    """
    # a search tries all numbers of equal slices, and has a bound; given slices compare with as many
    equal = f"{'the best' if result.lower_bound_s > 0 else 'as many'} equal slices, {result.equal_plan.num_slices}"
    chunks = f", {result.chunks_per_stage} parts per stage" if result.chunks_per_stage > 1 else ""
    bound = f"lower bound {_time(result.lower_bound_s)}, gap {result.gap:.2%}"
    proof = "optimal: proven" if result.optimal else bound
    extra = "an unknown time" if result.extra_s is None else _time(result.extra_s)
    return [
        f"schedule  {result.schedule}{chunks}{' (chosen)' if schedule_chosen else ''}",
        *_plan_lines(result),
        f"step      {_time(result.predicted_s)} predicted, without reduce and optimizer",
        *([] if result.extra_s == 0 else [f"          {extra} more to sum and step the layers that two stages hold"]),
        f"          {_time(result.unsliced_s)} unsliced ({_ratio(result.unsliced_s, result)})",
        f"          {_time(result.equal_s)} with {equal} ({_ratio(result.equal_s, result)})",
        *([f"proof     {proof}"] if result.lower_bound_s > 0 else []),
        *_order_lines(result),
        f"bubble    {result.bubble_fraction:.1%} of the stages' time",
        *_memory_lines(result, card_bytes, limit_gb),
        *_recompute_lines(result),
    ]


def describe_ranking(ranking: Ranking) -> list[str]:
    """Return a table of all schedules, best first, and those that do not fit."""
    rows: list[tuple[str, ...]] = [("schedule", "chunks", "slices", "predicted", "extra", "ratio", "bubble", "memory")]
    best_s = ranking.results[0].total_s if ranking.results else 0.0
    for result in ranking.results:
        counts = str(result.chunks_per_stage), _slices(result)
        extra = "unknown" if result.extra_s is None else f"+{_time(result.extra_s)}" if result.extra_s else ""
        ratio = f"{result.total_s / best_s:.3f}x" if best_s > 0 else "no time"
        memory = "" if result.peak_bytes is None else _bytes(max(result.peak_bytes))
        times = _time(result.predicted_s), extra, ratio, f"{result.bubble_fraction:.1%}"
        rows.append((result.schedule, *counts, *times, memory))
    for refusal in ranking.refused:
        need = f"needs {_bytes(refusal.need_bytes)}"
        rows.append((refusal.schedule, str(refusal.chunks_per_stage), *"-----", need))
    # a column that is empty for every schedule is left out
    if not any(row[4] for row in rows[1:] if row[4] != "-"):  # all are makespans
        rows = [(*row[:4], *row[5:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *right)).rstrip())
    return lines


def _plan_lines(result: PlanResult) -> list[str]:
    """Return the plan, or a line for each run of micro-batches with the same one."""
    lines: list[str] = []
    first = 0
    # neighbours with the same slices share a line
    for plan, group in itertools.groupby(result.plans):
        last = first + len(list(group)) - 1
        lengths = plan.lengths
        slices = ", ".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{lengths[0]} tokens each"
        text = f"{plan.num_slices} slice{'s' * (plan.num_slices > 1)}: {slices}"
        if result.plan is None:
            which = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
            text = f"{which}: {text}"
        lines.append(f"{'' if lines else 'plan':<10}{text}")
        first = last + 1
    return lines


def _slices(result: PlanResult) -> str:
    """Return the number of slices, or the fewest and the most."""
    least, most = min(result.num_slices), max(result.num_slices)
    return str(most) if least == most else f"{least} to {most}"


def _order_lines(result: PlanResult) -> list[str]:
    if result.order is None:
        return []
    above = f"{result.predicted_s / result.order_bound_s - 1:.2%} above" if result.order_bound_s > 0 else "above"
    return [f"order     found by search; {above} {_time(result.order_bound_s)}, which no order of these slices beats"]


def _memory_lines(result: PlanResult, card_bytes: float | None, limit_gb: float | None) -> list[str]:
    peaks, limit = result.peak_bytes, result.memory_limit_bytes
    if peaks is None:
        return []
    most, least = max(peaks), min(peaks)
    text = f"memory    {_bytes(most)} on stage {peaks.index(most)}"
    text += f", {_bytes(least)} on stage {peaks.index(least)}" if least < most else ""
    shown = "" if limit is None else f"; limit {_bytes(limit)}"
    text += shown if limit_gb is None else f"{shown} ({limit_gb:g} GB)"
    share = f", {limit / card_bytes:.2g} of the card's {card_bytes / 2**30:.4g}" if limit and card_bytes else ""
    return [text + share]


def _recompute_lines(result: PlanResult) -> list[str]:
    """Return the layers that run again in their backward, one line per stage, and the share of its time."""
    if result.recompute is None or result.recompute_s is None:
        return []
    if not any(result.recompute):
        return ["recompute nothing: every stage fits without"]
    lines: list[str] = []
    for stage_id, (layers, seconds) in enumerate(zip(result.recompute, result.recompute_s, strict=True)):
        kept = ", attention kept" if result.keeps_attention else ""
        what = f"layers {shown_runs(layers)}{kept}, {_time(seconds)} more" if layers else "nothing"
        lines.append(f"{'' if lines else 'recompute':<9} stage {stage_id}: {what}")
    return lines


def shown_runs(numbers: Sequence[int]) -> str:
    """Return rising numbers in words, neighbours together: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _ratio(seconds: float, result: PlanResult) -> str:
    return f"{seconds / result.predicted_s:.3f}x" if result.predicted_s > 0 else "no time"
