"""What ``terapipe bench --json`` wrote, read strictly: runs, grouped so that like is compared with like."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terapipe_ds.messages import show_value
from terapipe_ds.timeline import Timeline, TimelineError

SYSTEMS = {"deepspeed": "DeepSpeed", "terapipe": "terapipe", "torch": "torch.distributed.pipelining"}
"""The systems and what prose calls them, in the order of legends."""


class ReportError(ValueError):
    """A result of which no report can be made; the text names the place, the value and what belongs there."""


@dataclass(frozen=True)
class Run:
    """One row of the benchmark. Where ``error`` is not None there are no figures; a figure not known is None."""

    system: str
    schedule: str
    slices: tuple[int, ...]
    accumulation: int
    stages: int
    error: str | None = None
    step_s: float = math.nan
    step_s_all: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    bound_s: float | None = None
    ratio_to_stock: float | None = None
    predicted_s: float | None = None
    bubble: float | None = None
    peak_bytes: tuple[float | None, ...] | None = None
    predicted_peak_bytes: tuple[float | None, ...] | None = None
    static_bytes: tuple[float | None, ...] | None = None
    exposed_comm_s: float | None = None
    drift: float | None = None
    off_core_s: float | None = None
    loss: float | None = None
    planned: bool = False
    replayed: bool = False
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether it has figures."""
        return self.error is None

    @property
    def label(self) -> str:
        """System, schedule and slices in few words: what tables, plots and prose call the run."""
        name = f"{self.system} {self.schedule}"
        if self.system == "terapipe" and self.slices:
            count = f"{len(self.slices)} slice{'s' * (len(self.slices) > 1)}"
            name += f", {count}"
        return name + ", planned" * self.planned + " (replayed)" * self.replayed

    @property
    def largest_peak_bytes(self) -> float | None:
        """Of the stage that needs most, or None."""
        return max((peak for peak in self.peak_bytes or () if peak is not None), default=None)

    @property
    def activation_bytes(self) -> float | None:
        """Of the stage that needs most: the peak without parameters, their gradients and optimizer states, or None."""
        return _most_above(self.peak_bytes, self.static_bytes)

    @property
    def predicted_activation_bytes(self) -> float | None:
        """The same of the predicted peak."""
        return _most_above(self.predicted_peak_bytes, self.static_bytes)

    @property
    def prediction_error(self) -> float | None:
        """How far ``predicted_s`` is from ``step_s``, as a share of ``step_s``; above 0: predicted too slow."""
        return None if self.predicted_s is None or not self.ok else self.predicted_s / self.step_s - 1


def _most_above(peaks: Sequence[float | None] | None, floors: Sequence[float | None] | None) -> float | None:
    pairs = zip(peaks or (), floors or (), strict=False)
    return max((peak - floor for peak, floor in pairs if peak is not None and floor is not None), default=None)


@dataclass(frozen=True)
class Group:
    """The runs with the same stages and accumulation: ran ones from fast to slow, then the failed ones."""

    stages: int
    accumulation: int
    runs: tuple[Run, ...]

    def fastest(self, *systems: str) -> Run | None:
        """The fastest run (of these systems); a measured one where there is any, else a replayed one."""
        chosen = [run for run in self.runs if run.ok and (not systems or run.system in systems)]
        return min(chosen, key=lambda run: (run.replayed, run.step_s), default=None)

    def stock(self, replayed: bool) -> Run | None:
        """DeepSpeed's own 1F1B, measured or replayed as asked: what ratios are against."""
        for run in self.runs:
            if run.ok and (run.system, run.schedule.lower(), run.replayed) == ("deepspeed", "1f1b", replayed):
                return run
        return None

    def ratio(self, run: Run) -> float | None:
        """How many times as fast as the stock engine, or None: the median over the turns, as the benchmark has written
        it; of results without it, the stock engine's median over this one's."""
        stock = self.stock(run.replayed)
        if stock is None or not run.ok:
            return None
        return stock.step_s / run.step_s if run.ratio_to_stock is None else run.ratio_to_stock


@dataclass(frozen=True)
class Result:
    """A whole benchmark. ``facts``: what else stood at the top level (command, date, ...); ``raw``: all as it came."""

    machine: dict[str, Any]
    preset: str
    runs: tuple[Run, ...]
    facts: dict[str, Any]
    raw: dict[str, Any]

    @property
    def groups(self) -> tuple[Group, ...]:
        """By stages and accumulation, ascending."""
        keys = sorted({(run.stages, run.accumulation) for run in self.runs})
        return tuple(Group(*key, _ordered(run for run in self.runs if (run.stages, run.accumulation) == key))
                     for key in keys)  # fmt: skip

    def title(self, group: Group) -> str:
        """What a group is called; it names the stages where they differ between groups."""
        several = len({run.stages for run in self.runs}) > 1
        return f"accumulation {group.accumulation}" + f", {group.stages} stages" * several


def read_result(data: object) -> Result:
    """Check the dict that ``terapipe bench --json`` writes.

    Raises:
        ReportError: a key that must be there is not, or a value is of the wrong kind; it names the run and the key.
    """
    if not isinstance(data, dict):
        raise ReportError(f"the result is {show_value(data)}: give the object that `terapipe bench --json` writes")
    machine = _need(data, "machine", "the result", _OBJECT)
    preset = _need(data, "preset", "the result", _TEXT)
    runs = _need(data, "runs", "the result", _LIST)
    if not runs:
        raise ReportError("the result has no runs: let `terapipe bench` run at least one system")
    facts = {key: value for key, value in data.items() if key not in ("machine", "preset", "runs")}
    return Result(machine, preset, tuple(_read_run(run, f"runs[{i}]") for i, run in enumerate(runs)), facts, data)


def _ordered(runs: Any) -> tuple[Run, ...]:
    return tuple(sorted(runs, key=lambda run: (not run.ok, run.step_s if run.ok else 0.0, run.label)))


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and _is_number(value) and math.isfinite(value) and value > 0


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.words} or null", lambda value: value is None or kind.fits(value))


def _list_of(fits: Callable[[Any], bool], words: str) -> _Kind:
    return _Kind(words, lambda value: isinstance(value, list) and all(map(fits, value)))


_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = _Kind("a whole number of at least 1", _is_count)
_NUMBER = _Kind("a number", _is_number)
_AMOUNT = _Kind("a finite number of at least 0", lambda v: _is_number(v) and math.isfinite(v) and v >= 0)
_RATIO = _Kind("a ratio above 0", _is_seconds)
_SECONDS = _Kind("seconds above 0", _is_seconds)
_STEPS = _Kind("a list of times in seconds", lambda v: isinstance(v, list) and v != [] and all(map(_is_seconds, v)))
_LENGTHS = _list_of(_is_count, "a list of slice lengths in tokens")
_BYTES = _list_of(lambda v: v is None or _AMOUNT.fits(v), "a list of bytes, one per stage")

_FIGURES = {
    "step_s": _SECONDS, "step_s_all": _STEPS, "tokens_per_s": _or_null(_AMOUNT), "bound_s": _or_null(_SECONDS),
    "predicted_s": _or_null(_SECONDS), "bubble": _or_null(_NUMBER), "peak_bytes": _or_null(_BYTES),
    "exposed_comm_s": _or_null(_AMOUNT), "loss": _or_null(_NUMBER),
}  # fmt: skip
"""What every run without an error has. null: not known for this system."""

_MORE_FIGURES = {
    "ratio_to_stock": _or_null(_RATIO), "predicted_peak_bytes": _or_null(_BYTES), "static_bytes": _or_null(_BYTES),
    "drift": _or_null(_RATIO), "off_core_s": _or_null(_AMOUNT),
}  # fmt: skip
"""What may be missing: older results do not have it."""


def _need(data: dict[str, Any], key: str, where: str, kind: _Kind) -> Any:
    if key not in data:
        keys = ", ".join(map(str, data)) or "none"
        raise ReportError(f"{where} has no {key!r}: it must hold {kind.words} (keys there: {keys})")
    return _take(data, key, where, kind)


def _take(data: dict[str, Any], key: str, where: str, kind: _Kind, default: Any = None) -> Any:
    value = data.get(key, default)
    if not kind.fits(value):
        raise ReportError(f"{where} has {key} = {str(value)[:60]!r}: it must be {kind.words}")
    return value


def _read_run(data: object, where: str) -> Run:
    if not isinstance(data, dict):
        raise ReportError(f"{where} is {str(data)[:60]!r}: give an object, as `terapipe bench --json` writes")
    system = _need(data, "system", where, _TEXT)
    if system not in SYSTEMS:
        raise ReportError(f"{where} has system = {system[:60]!r}: known are {', '.join(SYSTEMS)}")
    schedule = _printable(_need(data, "schedule", where, _TEXT))
    where = f"{where} ({system} {schedule})"
    same: dict[str, Any] = {key: _need(data, key, where, _COUNT) for key in ("accumulation", "stages")}
    same |= {key: bool(_take(data, key, where, _or_null(_FLAG))) for key in ("planned", "replayed")}
    if data.get("error") is not None:
        lengths: Any = data.get("slices")  # a run that failed may not have got as far as its plan
        slices = tuple(lengths) if _LENGTHS.fits(lengths) else ()
        return Run(system, schedule, slices, error=_need(data, "error", where, _TEXT), **same)
    slices = tuple(_need(data, "slices", where, _LENGTHS))
    figures = {key: _need(data, key, where, kind) for key, kind in _FIGURES.items()}
    figures |= {key: _take(data, key, where, kind) for key, kind in _MORE_FIGURES.items()}
    for key in ("peak_bytes", "predicted_peak_bytes", "static_bytes"):
        if figures[key] is not None:
            if len(figures[key]) != same["stages"]:
                raise ReportError(f"{where} has {len(figures[key])} {key} for {same['stages']} stages: give one each")
            figures[key] = tuple(figures[key])
    figures["step_s_all"] = tuple(figures["step_s_all"])
    return Run(system, schedule, slices, timeline=_read_timeline(data.get("timeline"), where), **same, **figures)


def _read_timeline(value: object, where: str) -> Timeline | None:
    """``value``: text of ``Timeline.to_json``, the same as an object, or None."""
    if value is None:
        return None
    try:
        return Timeline.from_json(value if isinstance(value, str) else json.dumps(value))
    except TimelineError as error:
        raise ReportError(f"{where}: its timeline cannot be read: {error}") from error


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest."""
    return min(values), max(values)
