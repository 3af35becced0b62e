"""Print the figures of a benchmark as a table for people, and say below it how noisy the machine was."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

WORTH_SAYING = 0.02  # shares and drifts up to this are in every run

_HEAD = (
    *("m", "system", "slices", "step", "spread", "tokens/s", "TFLOP/s", "MFU"),
    *("stock/", "bound/", "predicted", "bubble", "exposed", "peak MB", "loss"),
)


def render(result: Mapping[str, Any]) -> str:
    """Return one line per run: median step, its spread, and the ratios of the stock engine and the bound to it."""
    runs = result["runs"]
    rows = [_HEAD, *map(_cells, runs)]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    lines = [_head(result)]
    for cells, row in zip(rows, [{}, *runs], strict=True):
        m, label, *figures = map(str.rjust, cells, widths)
        line = [m, label.lstrip().ljust(widths[1]), *figures]
        lines.append("  ".join([*line, f"error: {row['error']}"] if "error" in row else line))
    if any(row["replayed"] for row in runs):
        lines.append(
            "replayed: fewer cores than stages, so steps ran for their losses and memory; times are those of the "
            "schedule with each action's own CPU time and measured links"
        )
    return "\n".join([*lines, *noise_sentences(result)])


def noise_sentences(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on what a difference of a few per cent means; none if the machine was quiet."""
    rows = [row for row in result["runs"] if "error" not in row and not row["replayed"]]
    drifts = {row["accumulation"]: row["drift"] for row in rows if row.get("drift") is not None}
    sentences = []
    if any(abs(factor - 1) > WORTH_SAYING for factor in drifts.values()):
        each = ", ".join(f"{factor:.3f} with m = {m}" for m, factor in drifts.items())
        sentences.append(
            "drift: unsliced micro-batches in the turns, as multiples of their times in the measurement of costs, from "
            f"which predictions come: {each}"
        )
    lost = [row for row in rows if row.get("off_core_s") is not None]
    share, m, label = max(
        ((row["off_core_s"] / row["step_s"], row["accumulation"], row["label"]) for row in lost), default=(0.0, 0, "")
    )
    if share > WORTH_SAYING:
        sentences.append(f"busy: other programs had a core for up to {share:.1%} of a step ({label}, m = {m})")
    return sentences


def _head(result: Mapping[str, Any]) -> str:
    work, machine = result["workload"], result["machine"]
    tokens = f"{work['micro_batch']} x {work['sequence_length']} tokens"
    device = f"{machine['device']}, " if "device" in machine else ""
    device += "shared by all stages, " if work.get("share_device") else ""
    device += f"attention {result['attention']}, " if "attention" in result else ""
    return (
        f"{result['preset']}: {work['stages']} stages, {work['layers']} layers, hidden {work['hidden']}, {tokens}, "
        f"{work['pairs']} turns; {device}{machine['cpu']}, {machine['cores']} cores, {machine['date']}"
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run; only the first two if it failed."""
    head = str(row["accumulation"]), row["label"] + (" (replayed)" if row["replayed"] else "")
    if "error" in row:
        return head
    low, high = row["spread_s"]
    stages = row["peak_bytes"] if row["stages"] <= 4 else row["peak_bytes"][:: row["stages"] - 1]  # first and last
    peaks = "/".join(f"{bytes_ / 1e6:.0f}" for bytes_ in stages)
    slices, rate = counts_text(row["slices"], row.get("plans", ())), row.get("model_flops_per_s")
    tflops = _or_dash(None if rate is None else rate / 1e12, form=".3g")
    times = _seconds(step_s := row["step_s"]), _seconds(low, high), f"{row['tokens_per_s']:.0f}"
    predicted = "-" if row["predicted_s"] is None else _seconds(row["predicted_s"], beside_s=step_s)
    ratios = _or_dash(row["ratio_to_stock"]), _or_dash(row["ratio_to_bound"]), predicted
    exposed = _seconds(row["exposed_comm_s"], beside_s=step_s)
    losses = f"{row['bubble']:.1%}", exposed, peaks, _or_dash(row["loss"], form=".5f")
    return (*head, slices, *times, tflops, _or_dash(row.get("mfu"), form=".1%"), *ratios, *losses)


def counts_text(slices: Sequence[int], plans: Sequence[Sequence[int]]) -> str:
    """Return how many slices micro-batches have: "8", or "1-3" if they differ."""
    counts = [len(plan) for plan in plans] or [len(slices)]
    return str(max(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"


def _seconds(*times: float, beside_s: float = 0.0) -> str:
    """Show times in one unit, which `beside_s` chooses if it is given; accelerators need milliseconds for a layer."""
    short = (beside_s or max(times)) < 0.1
    return "-".join(f"{time_s * (1e3 if short else 1):.3f}" for time_s in times) + (" ms" if short else " s")


def _or_dash(number: float | None, form: str = ".3f") -> str:
    return "-" if number is None else f"{number:{form}}"
