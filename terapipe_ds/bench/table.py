"""The table of a benchmark for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terapipe_ds.bench.noise import sentences

_HEAD = (
    f"{'m':>3}  {'system':<36}{'slices':>7}{'step':>10}{'spread':>17}{'tokens/s':>10}{'stock/':>8}{'bound/':>8}"
    f"{'predicted':>11}{'bubble':>8}{'exposed':>9}{'peak MB':>16}{'loss':>10}"
)


def render(result: Mapping[str, Any]) -> str:
    """Return one line per run: median step, its spread, how many times as long the stock engine and the bound take."""
    lines = [_head(result), _HEAD]
    lines += [_line(row) for row in result["runs"]]
    if any(row["replayed"] for row in result["runs"]):
        lines.append(
            "replayed: fewer cores than stages, so steps ran for their losses and memory; times are those of the "
            "schedule with each action's own CPU time and measured links"
        )
    return "\n".join([*lines, *sentences(result)])


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
    peaks = "/".join(f"{bytes_ / 1e6:.0f}" for bytes_ in _few(row["peak_bytes"]))
    return (
        f"{head}{len(row['slices']):>7}{_seconds(row['step_s']):>10}{_seconds(low, high):>17}"
        f"{row['tokens_per_s']:>10.0f}{_or_dash(row['ratio_to_stock']):>8}{_or_dash(row['ratio_to_bound']):>8}"
        f"{_or_dash(row['predicted_s'], ' s'):>11}{row['bubble']:>8.1%}{row['exposed_comm_s']:>7.3f} s"
        f"{peaks:>16}{_or_dash(row['loss'], digits=5):>10}"
    )


def _few(peaks: list[int]) -> list[int]:
    """Return all of up to four stages; of more, the first and the last."""
    return peaks if len(peaks) <= 4 else [peaks[0], peaks[-1]]


def _seconds(*times: float) -> str:
    """Show one or several times in one unit; accelerators need milliseconds for a layer."""
    short = max(times) < 0.1
    return "-".join(f"{time_s * (1e3 if short else 1):.3f}" for time_s in times) + (" ms" if short else " s")


def _or_dash(number: float | None, unit: str = "", digits: int = 3) -> str:
    return "-" if number is None else f"{number:.{digits}f}{unit}"
