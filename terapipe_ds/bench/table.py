"""Print the figures of a benchmark as a table for people, and say below it how noisy the machine was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORTH_SAYING = 0.02
"""Shares and drifts up to this are in every run."""

_HEAD = (
    f"{'m':>3}  {'system':<36}{'slices':>7}{'step':>10}{'spread':>17}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}"
    f"{'stock/':>8}{'bound/':>8}{'predicted':>11}{'bubble':>8}{'exposed':>9}{'peak MB':>16}{'loss':>10}"
)


def render(result: Mapping[str, Any]) -> str:
    """Return one line per run: median step, its spread, and the ratios of the stock engine and the bound to it."""
    lines = [_head(result), _HEAD]
    lines += [_line(row) for row in result["runs"]]
    if any(row["replayed"] for row in result["runs"]):
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
    shares = {row["label"]: row["off_core_s"] / row["step_s"] for row in rows if row.get("off_core_s") is not None}
    worst = max(shares, key=shares.__getitem__, default=None)
    if worst is not None and shares[worst] > WORTH_SAYING:
        sentences.append(f"busy: other programs had a core for up to {shares[worst]:.1%} of a step ({worst})")
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


def _line(row: Mapping[str, Any]) -> str:
    label = row["label"] + (" (replayed)" if row["replayed"] else "")
    head = f"{row['accumulation']:>3}  {label:<36}"
    if "error" in row:
        return f"{head} error: {row['error']}"
    low, high = row["spread_s"]
    stages = row["peak_bytes"] if row["stages"] <= 4 else row["peak_bytes"][:: row["stages"] - 1]  # first and last
    peaks = "/".join(f"{bytes_ / 1e6:.0f}" for bytes_ in stages)
    slices = counts_text(row["slices"], row.get("plans", ()))
    return (
        f"{head}{slices:>7}{_seconds(row['step_s']):>10}{_seconds(low, high):>17}"
        f"{row['tokens_per_s']:>10.0f}{_tflops(row):>9}{_or_dash(row.get('mfu'), form='.1%'):>7}"
        f"{_or_dash(row['ratio_to_stock']):>8}{_or_dash(row['ratio_to_bound']):>8}"
        f"{_or_dash(row['predicted_s'], ' s'):>11}{row['bubble']:>8.1%}{row['exposed_comm_s']:>7.3f} s"
        f"{peaks:>16}{_or_dash(row['loss'], form='.5f'):>10}"
    )


def counts_text(slices: Sequence[int], plans: Sequence[Sequence[int]]) -> str:
    """Return how many slices micro-batches have: "8", or "1-3" if they differ."""
    counts = [len(plan) for plan in plans] or [len(slices)]
    return str(max(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"


def _seconds(*times: float) -> str:
    """Show one or several times in one unit; accelerators need milliseconds for a layer."""
    short = max(times) < 0.1
    return "-".join(f"{time_s * (1e3 if short else 1):.3f}" for time_s in times) + (" ms" if short else " s")


def _tflops(row: Mapping[str, Any]) -> str:
    rate = row.get("model_flops_per_s")
    return "-" if rate is None else f"{rate / 1e12:.3g}"


def _or_dash(number: float | None, unit: str = "", form: str = ".3f") -> str:
    return "-" if number is None else f"{number:{form}}{unit}"
