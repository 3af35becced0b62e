"""Put the report into words: its headline, its notes, and numbers with their units."""

# ruff: noqa: RUF001, RUF002 - signs for times, minus and dashes are meant
from __future__ import annotations

import math
from collections.abc import Iterable

from terapipe_ds.bench.report.data import Failed, Result, Run, RunGroup
from terapipe_ds.bench.table import noise_sentences

EQUAL_WITHIN = 0.005  # ratios to the stock engine that round to 1.00 and 0.99 count as equally fast
LOSS_WITHIN = 1e-3  # relative difference of losses in a group above which the report warns


def time_unit(values: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit in which these seconds read well, and its number per second."""
    largest = max((value for value in values if value is not None), default=1.0)
    return ("s", 1.0) if largest >= 1.0 else ("ms", 1e3) if largest >= 1e-3 else ("µs", 1e6)


def bytes_unit(values: Iterable[float | None]) -> tuple[str, float]:
    largest = max((value for value in values if value is not None), default=1.0)
    return ("GiB", 2.0**-30) if largest >= 2**30 else ("MiB", 2.0**-20)


def digits(value: float | None, significant: int = 4, scale: float = 1.0) -> str:
    """Return a number with its significant digits, never in the form 1e+05; a dash if it is not known."""
    if value is None:
        return "–"
    value *= scale
    if not math.isfinite(value):
        return str(value)
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0 if abs(value) >= 0.1 else -1
    return f"{value:,.{max(min(significant - whole, 5), 0)}f}"


def seconds(value: float) -> str:
    unit, scale = time_unit([value])
    return f"{digits(value, 3, scale)} {unit}"


def percent(share: float | None, form: str = ".1f") -> str:
    """Return a share in percent; a dash if it is not known."""
    return "–" if share is None else f"{100 * share:{form}} %".replace("-", "−")


def peaks(run: Run, scale: float) -> str:
    """Return the peak of each stage; of more than four stages the first and the last."""
    known = run.peak_bytes or ()
    shown = known if len(known) <= 4 else (known[0], known[-1])
    return " / ".join(digits(peak, 3, scale) for peak in shown) or "–"


def slices_text(run: Run | Failed) -> str:
    """Return `8 × 256`, or the lengths if they differ: all of up to three, of more the first and the last."""
    if not run.slices:
        return "–"
    if isinstance(run, Run) and run.plans:
        return f"{run.slice_counts} per micro-batch"
    if len(set(run.slices)) == 1:
        return f"{len(run.slices)} × {run.slices[0]}"
    shown = ", ".join(map(str, run.slices)) if len(run.slices) <= 3 else f"{run.slices[0]} … {run.slices[-1]}"
    return f"{len(run.slices)}: {shown}"


def headline(result: Result) -> str:
    """Say in one sentence how fast the best terapipe run is against the stock engine, at each accumulation."""
    *parts, last = map(_clause, result.groups)
    joined = "; ".join([*parts, f"and {last}" if parts else last])
    return f"Per training step against DeepSpeed’s stock 1F1B, terapipe is {joined}."


def _clause(group: RunGroup) -> str:
    at, best = f"at {group.title}", group.fastest("terapipe")
    if best is None:
        has_failed = any(run.system == "terapipe" for run in group.failed)
        return f"not measured {at} ({'none of its runs succeeded' if has_failed else 'it has no run there'})"
    stock, ratio = group.stock(best.replayed), group.ratio(best)
    if stock is None or ratio is None:
        return f"at {seconds(best.step_s)} a step {at}, without a stock run to compare with"
    equal = abs(ratio - 1) < EQUAL_WITHIN
    words = f"as fast ({ratio:.2f}×)" if equal else f"{ratio:.2f}× as fast" + " (slower)" * (ratio < 1)
    overlap = min(best.step_s_all) <= max(stock.step_s_all) and min(stock.step_s_all) <= max(best.step_s_all)
    note = ", replayed" * best.replayed + ", single steps overlap" * (overlap and not equal)
    return f"{words} {at} ({seconds(best.step_s)} instead of {seconds(stock.step_s)}{note})"


def torch_sentence(group: RunGroup) -> str | None:
    """Compare the best terapipe run with the best of `torch.distributed.pipelining`; None if one is missing."""
    ours, theirs = group.fastest("terapipe"), group.fastest("torch")
    if ours is None or theirs is None or ours.replayed != theirs.replayed:
        return None
    return f"{theirs.step_s / ours.step_s:.2f}× the best of torch.distributed.pipelining ({theirs.schedule})"


def notes(result: Result) -> list[str]:
    """Return the caveats to the table: replays, failures, losses that differ, noise."""
    said = []
    if any(run.replayed for run in result.runs):
        said.append(
            "Rows marked “replayed” were not timed by the wall clock: there are fewer cores than stages. The real "
            "engine ran, each action’s CPU time was taken, and the simulator replayed the schedule with these and "
            "measured link times."
        )
    failed = len(result.runs) - len(result.measured)
    if failed:
        said.append(f"{failed} of {len(result.runs)} runs could not be made; the tables say why.")
    for group in result.groups:
        losses = [run.loss for run in group.runs if run.loss is not None] or [0.0]
        low, high, are_finite = min(losses), max(losses), all(map(math.isfinite, losses))
        if not (are_finite and high - low <= LOSS_WITHIN * max(abs(high), abs(low))):
            shown = f"from {low:.6g} to {high:.6g}" if are_finite else "not all finite"
            said.append(
                f"The losses at {group.title} do not agree ({shown}): the systems did not train the same, so do not "
                "compare their times."
            )
    keys = ("label", "accumulation", "replayed", "step_s", "drift", "off_core_s")
    measured = [{key: getattr(run, key) for key in keys} for run in result.measured]
    return said + [f"{note[0].upper()}{note[1:]}." for note in noise_sentences({"runs": measured})]
