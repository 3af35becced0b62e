"""The tables of the report as HTML. Every text that came with the result is escaped here."""

# ruff: noqa: RUF001 - signs for times, minus and dashes are meant
from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from terapipe_ds.bench.report_data import SYSTEMS, Group, Run, spread
from terapipe_ds.bench.report_text import DEFINITIONS, bytes_unit, digits, percent, slices_text, time_unit

NUM_FIGURES = 11
"""Columns after the name and the slices of a run."""


def runs_table(group: Group) -> str:
    """One row per run, the fastest marked; what failed stands last with its reason."""
    ran = [run for run in group.runs if run.ok]
    time, memory = time_unit([run.step_s for run in ran]), bytes_unit([run.largest_peak_bytes for run in ran])
    heads = (
        "run", "slices", f"step<br>{time[0]}", f"fastest –<br>slowest {time[0]}", "×&nbsp;stock", "of<br>bound",
        f"predicted<br>{time[0]}", "tokens/s", "bubble", f"peak<br>{memory[0]}", f"exposed<br>comm. {time[0]}", "loss",
    )  # fmt: skip
    best = group.fastest()
    body = [_row(group, run, run is best, time[1], memory[1]) if run.ok else _failed(run) for run in group.runs]
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f'<div class="scroll"><table class="runs"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(body)}</tbody></table></div>\n"
    )


def _row(group: Group, run: Run, best: bool, per_s: float, per_byte: float) -> str:
    low, high = spread(run.step_s_all)
    ratio, error, peak = group.ratio(run), run.prediction_error, run.largest_peak_bytes
    predicted = "–" if run.predicted_s is None else f"{digits(run.predicted_s * per_s)} ({_signed(error)})"
    cells = (
        slices_text(run),
        digits(run.step_s * per_s),
        f"{digits(low * per_s)} – {digits(high * per_s)}",
        "–" if ratio is None else f"{ratio:.2f}",
        percent(None if run.bound_s is None else run.bound_s / run.step_s),
        predicted,
        digits(run.tokens_per_s, 5),
        percent(run.bubble),
        "–" if peak is None else digits(peak * per_byte, 3),
        "–" if run.exposed_comm_s is None else digits(run.exposed_comm_s * per_s, 3),
        "–" if run.loss is None else f"{run.loss:.6g}",
    )
    tags = '<span class="tag first">fastest</span>' * best + '<span class="tag">replayed</span>' * run.replayed
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    marked = ' class="best"' * best
    return f"<tr{marked}><td>{_name(run)}{tags}</td>{row}</tr>\n"


def activations_table(group: Group) -> str:
    """How much less each run keeps for its backward than the stock engine does, measured and predicted; "" where
    nothing is known of the stock engine."""
    stock = group.stock(False) or group.stock(True)
    runs = [run for run in group.runs if run.ok and run.activation_bytes]
    if stock is None or not stock.activation_bytes or len(runs) < 2:
        return ""
    unit, per_byte = bytes_unit([run.activation_bytes for run in runs])
    heads = ("run", "slices", f"activations<br>{unit}", "of&nbsp;stock", "predicted<br>of&nbsp;stock", "difference")
    body = "".join(_activations_row(run, stock, per_byte) for run in runs)
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f'<div class="scroll"><table class="runs"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _activations_row(run: Run, stock: Run, per_byte: float) -> str:
    mine, theirs = run.activation_bytes, stock.activation_bytes
    assert mine and theirs
    share = mine / theirs
    expected = None
    if run.predicted_activation_bytes and stock.predicted_activation_bytes:
        expected = run.predicted_activation_bytes / stock.predicted_activation_bytes
    cells = (
        slices_text(run), digits(mine * per_byte, 3), f"{share:.3f}", "–" if expected is None else f"{expected:.3f}",
        "–" if expected is None else _signed(expected / share - 1),
    )  # fmt: skip
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr><td>{_name(run)}</td>{row}</tr>\n"


def _failed(run: Run) -> str:
    tags = '<span class="tag">failed</span>' + '<span class="tag">replayed</span>' * run.replayed
    reason = escape(run.error or "no reason given")
    return (
        f'<tr class="failed"><td>{_name(run)}{tags}</td><td>{escape(slices_text(run))}</td>'
        f'<td class="reason" colspan="{NUM_FIGURES - 1}">{reason}</td></tr>\n'
    )


def _name(run: Run) -> str:
    planned = '<span class="tag">planned</span>' * run.planned
    return f"{_dot(run.system)}{escape(f'{run.system} {run.schedule}')}{planned}"


def _dot(system: str) -> str:
    return f'<span class="{system}"><span class="dot {system}"></span></span>'


def _signed(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %".replace("-", "−")


def definitions_table() -> str:
    """What each column means, and its key in the JSON."""
    rows = "".join(
        f'<tr><th scope="row">{escape(column)}</th><td>{escape(meaning)}'
        + f" <code>{key}</code>" * bool(key)
        + "</td></tr>\n"
        for column, key, meaning in DEFINITIONS
    )
    return f'<table class="facts"><tbody>\n{rows}</tbody></table>\n'


def facts_table(facts: dict[str, Any]) -> str:
    """Whatever is told of the machine and the run; objects inside objects get a dotted name."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>\n' for name, text in _flat(facts)
    )
    return f'<table class="facts"><tbody>\n{rows}</tbody></table>\n' if rows else ""


def _flat(facts: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "–"
        else:
            yield name, "–" if value is None else str(value)


def systems_legend() -> str:
    """The colour and mark of each system, in words."""
    return "".join(
        f'<span style="margin-right:1.2em">{_dot(key)}{escape(name)}</span>'
        for key, name in SYSTEMS.items()
    )
