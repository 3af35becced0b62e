"""The words of the report: its headline, notes, definitions, and numbers with their units."""

# ruff: noqa: RUF001, RUF002 - signs for times, minus and dashes are meant
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from terapipe_ds.bench.noise import sentences
from terapipe_ds.bench.report_data import Group, Result, Run

EQUAL_WITHIN = 0.005
"""Ratios to the stock engine that round to 1.00 and 0.99 count as equally fast."""
LOSS_WITHIN = 1e-3
"""Relative difference of losses in a group above which the report warns."""

DEFINITIONS = (
    ("step", "step_s",
     "Median wall time of train_batch after a barrier, loading data, reduce and optimizer step included."),
    ("fastest – slowest", "step_s_all", "The shortest and the longest of the single steps."),
    ("× stock", "ratio_to_stock", "The step of DeepSpeed's stock engine (1F1B) at the same accumulation over this "
     "one's of the same turn, the median over the turns: 2 is twice as fast. Where the result does not have it, the "
     "median step over the median step. Replayed rows are compared with a replayed stock row only."),
    ("of bound", "bound_s", "bound_s over step_s. bound_s is the largest over stages of m × (unsliced forward "
     "+ backward seconds measured in this run) / (1 − the schedule's ideal bubble), plus measured reduce and optimizer "
     "seconds."),
    ("predicted", "predicted_s", "The step time that the planner's costs and the simulator give, measured reduce and "
     "optimizer included; in brackets its difference to the measured median."),
    ("tokens/s", "tokens_per_s", "Tokens of one step over its median time."),
    ("bubble", "bubble", "1 − (sum of F, B and W seconds) / (K × (last end − first start)); reduce and optimizer "
     "excluded. K is the number of stages."),
    ("peak memory", "peak_bytes", "Of the stage that needs most, in bytes of tensors: parameters, gradients, optimizer "
     "states, and the most that a step adds. All stages stand in the plot."),
    ("activations", "static_bytes", "The peak less the part that is there at any time (parameters, their gradients, "
     "optimizer states), of the stage where most is left."),
    ("exposed comm.", "exposed_comm_s", "Seconds of a step spent on transfers that computation does not hide."),
    ("loss", "loss", "All systems train the same model on the same data, so it must agree."),
)  # fmt: skip
"""Column, key in the JSON, meaning."""


def time_unit(values: Iterable[float | None]) -> tuple[str, float]:
    """The unit in which these seconds read well, and its number per second."""
    largest = max((value for value in values if value is not None), default=1.0)
    return ("s", 1.0) if largest >= 1.0 else ("ms", 1e3) if largest >= 1e-3 else ("µs", 1e6)


def bytes_unit(values: Iterable[float | None]) -> tuple[str, float]:
    """The unit in which these bytes read well, and its number per byte."""
    largest = max((value for value in values if value is not None), default=1.0)
    power = 3 if largest >= 2**30 else 2
    return ("MiB", "GiB")[power - 2], 2.0 ** (-10 * power)


def digits(value: float | None, significant: int = 4) -> str:
    """A number with as many digits as count, never in the form 1e+05; a dash where it is not known."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0 if abs(value) >= 0.1 else -1
    return f"{value:,.{max(min(significant - whole, 5), 0)}f}"


def seconds(value: float) -> str:
    """A time with its unit."""
    unit, scale = time_unit([value])
    return f"{digits(value * scale, 3)} {unit}"


def percent(value: float | None, places: int = 1) -> str:
    """A share in percent; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.{places}f} %"


def slices_text(run: Run, most: int = 3) -> str:
    """``8 × 256``, or the lengths where they differ: all of up to ``most``, of more the first and the last."""
    if not run.slices:
        return "–"
    if len(set(run.slices)) == 1:
        return f"{len(run.slices)} × {run.slices[0]}"
    shown = ", ".join(map(str, run.slices)) if len(run.slices) <= most else f"{run.slices[0]} … {run.slices[-1]}"
    return f"{len(run.slices)}: {shown}"


def ratio_words(ratio: float) -> str:
    """How fast against stock, in words that do not flatter."""
    if abs(ratio - 1) < EQUAL_WITHIN:
        return f"as fast ({ratio:.2f}×)"
    return f"{ratio:.2f}× as fast" + " (slower)" * (ratio < 1)


def headline(result: Result) -> str:
    """One sentence: how fast the best terapipe run is against the stock engine, at each accumulation."""
    return "Per training step against DeepSpeed’s stock 1F1B, terapipe is " + join(
        [_clause(result, group) for group in result.groups]
    ) + "."


def _clause(result: Result, group: Group) -> str:
    at, best = f"at {result.title(group)}", group.fastest("terapipe")
    if best is None:
        return f"not measured {at} (none of its runs succeeded)"
    stock, ratio = group.stock(best.replayed), group.ratio(best)
    if stock is None or ratio is None:
        return f"at {seconds(best.step_s)} a step {at}, without a stock run to compare with"
    overlap = min(best.step_s_all) <= max(stock.step_s_all) and min(stock.step_s_all) <= max(best.step_s_all)
    note = ", replayed" * best.replayed + ", single steps overlap" * (overlap and abs(ratio - 1) >= EQUAL_WITHIN)
    return f"{ratio_words(ratio)} {at} ({seconds(best.step_s)} instead of {seconds(stock.step_s)}{note})"


def join(parts: list[str]) -> str:
    """``a, b and c``; with semicolons, as the parts hold commas."""
    return parts[0] if len(parts) == 1 else "; ".join(parts[:-1]) + "; and " + parts[-1]


def torch_sentence(group: Group) -> str | None:
    """The best terapipe run against the best of ``torch.distributed.pipelining``, or None where one is missing."""
    ours, theirs = group.fastest("terapipe"), group.fastest("torch")
    if ours is None or theirs is None or ours.replayed != theirs.replayed:
        return None
    return f"{theirs.step_s / ours.step_s:.2f}× the best of torch.distributed.pipelining ({theirs.schedule})"


def notes(result: Result) -> list[str]:
    """What a reader must know before believing the table: replays, failures, losses that differ, a busy machine."""
    found = []
    if any(run.replayed for run in result.runs):
        found.append(
            "Rows marked “replayed” were not timed by the wall clock: there are fewer cores than stages. The real "
            "engine ran, each action’s CPU time was taken, and the simulator replayed the schedule with these and "
            "measured link times."
        )
    failed = [run for run in result.runs if not run.ok]
    if failed:
        found.append(f"{len(failed)} of {len(result.runs)} runs could not be made; the tables say why.")
    for group in result.groups:
        found.extend(_loss_note(result, group))
    return found + [f"{said[0].upper()}{said[1:]}." for said in sentences({"runs": _quietness(result)})]


def _quietness(result: Result) -> list[dict[str, Any]]:
    """The figures of a quiet machine, as the terminal's table has them."""
    keys = ("label", "accumulation", "replayed", "step_s", "drift", "off_core_s")
    return [{key: getattr(run, key) for key in keys} for run in result.runs if run.ok]


def _loss_note(result: Result, group: Group) -> list[str]:
    losses = [run.loss for run in group.runs if run.ok and run.loss is not None]
    low, high = (min(losses), max(losses)) if losses else (0.0, 0.0)
    if all(map(math.isfinite, losses)) and high - low <= LOSS_WITHIN * max(abs(high), abs(low)):
        return []
    shown = "not all finite" if not all(map(math.isfinite, losses)) else f"from {low:.6g} to {high:.6g}"
    return [
        f"The losses at {result.title(group)} do not agree ({shown}): the systems did not train the same, so do not "
        "compare their times."
    ]
