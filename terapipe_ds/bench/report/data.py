"""Read the result file of `terapipe bench --json` strictly, and group its runs so that only equal workloads compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag, model_validator

from terapipe_ds.bench.table import counts_text
from terapipe_ds.files.strict_json import JsonError, parse_as
from terapipe_ds.timeline import Timeline

SYSTEMS = {"deepspeed": "DeepSpeed", "terapipe": "terapipe", "torch": "torch.distributed.pipelining"}
"""The systems and what prose calls them, in the order of legends."""

GIVE = "give a file of `terapipe bench --json`"


class ReportError(ValueError):
    """Report a result that makes no report; the text names the place, the value and what is expected there."""


def _read_timeline(value: object) -> Timeline | None:
    """Read the text of `Timeline.to_json`, or the same as an object."""
    if value is None or isinstance(value, Timeline):
        return value
    return Timeline.from_json(value if isinstance(value, str) else json.dumps(value))


_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PerStage = tuple[_Amount | None, ...]


class _AnyRun(BaseModel):
    """Hold the fields of every run of the benchmark, failed or not. Other keys are kept unchecked."""

    model_config = ConfigDict(frozen=True)

    system: Literal["deepspeed", "terapipe", "torch"]
    schedule: str
    accumulation: _Count
    stages: _Count
    planned: bool = False
    replayed: bool = False


class Failed(_AnyRun):
    """Describe a failed run. It may have failed before its slices were known."""

    error: str
    slices: tuple[int, ...] = ()


class Run(_AnyRun):
    """Hold a run with its figures, which docs/bench.md explains. An unknown figure is None."""

    slices: tuple[_Count, ...]
    plans: tuple[tuple[_Count, ...], ...] = ()  # one per micro-batch if they differ; then `slices` has the most
    step_s: _Seconds
    step_s_all: Annotated[tuple[_Seconds, ...], Field(min_length=1)]
    tokens_per_s: _Amount | None
    bound_s: _Seconds | None
    predicted_s: _Seconds | None
    bubble: float | None
    peak_bytes: _PerStage | None
    exposed_comm_s: _Amount | None
    loss: float | None
    ratio_to_stock: _Seconds | None = None  # this key and those below are missing in older results
    predicted_peak_bytes: _PerStage | None = None
    static_bytes: _PerStage | None = None
    drift: _Seconds | None = None
    off_core_s: _Amount | None = None
    model_flops_per_s: _Amount | None = None
    mfu: _Amount | None = None
    timeline: Annotated[Timeline | None, PlainValidator(_read_timeline)] = None

    @model_validator(mode="after")
    def _check_stages(self) -> Run:
        for key in ("peak_bytes", "predicted_peak_bytes", "static_bytes"):
            entries = getattr(self, key)
            if entries is not None and len(entries) != self.stages:
                raise ValueError(f"{len(entries)} {key} for {self.stages} stages: give one each")
        return self

    @property
    def label(self) -> str:
        """Return the run's name in tables, plots and prose: system, schedule and slices."""
        name = f"{self.system} {self.schedule}"
        if self.system == "terapipe" and self.slices:
            name += f", {self.slice_counts} slice{'s' * (len(self.slices) > 1)}"
        return name + ", planned" * self.planned + " (replayed)" * self.replayed

    @property
    def slice_counts(self) -> str:
        """Return the number of slices, or the fewest and the most of a micro-batch."""
        return counts_text(self.slices, self.plans)

    @property
    def largest_peak_bytes(self) -> float | None:
        return max((peak for peak in self.peak_bytes or () if peak is not None), default=None)

    @property
    def activation_bytes(self) -> float | None:
        """Return the largest peak of a stage without parameters, their gradients and optimizer states."""
        return _most_above(self.peak_bytes, self.static_bytes)

    @property
    def predicted_activation_bytes(self) -> float | None:
        return _most_above(self.predicted_peak_bytes, self.static_bytes)

    @property
    def prediction_error(self) -> float:
        """Return (predicted_s - step_s) / step_s: above 0, the prediction is too slow."""
        return (self.predicted_s or self.step_s) / self.step_s - 1


def _most_above(peaks: Sequence[float | None] | None, floors: Sequence[float | None] | None) -> float | None:
    pairs = zip(peaks or (), floors or (), strict=False)
    return max((peak - floor for peak, floor in pairs if peak is not None and floor is not None), default=None)


@dataclass(frozen=True)
class RunGroup:
    """Group the runs with the same stages and accumulation, from fast to slow, and the failed ones."""

    title: str
    runs: tuple[Run, ...]
    failed: tuple[Failed, ...]

    def fastest(self, *systems: str) -> Run | None:
        """Return the fastest run (of these systems): a measured one if there is any, else a replayed one."""
        chosen = [run for run in self.runs if not systems or run.system in systems]
        return min(chosen, key=lambda run: (run.replayed, run.step_s), default=None)

    def stock(self, replayed: bool | None = None) -> Run | None:
        """Return DeepSpeed's own 1F1B, measured or replayed as requested (None: preferably measured)."""
        stock = [run for run in self.runs if (run.system, run.schedule.lower()) == ("deepspeed", "1f1b")]
        return min((r for r in stock if replayed in (None, r.replayed)), key=lambda run: run.replayed, default=None)

    def ratio(self, run: Run) -> float | None:
        """Return how many times as fast as the stock engine a run is, or None without a stock run of its kind.

        The benchmark writes the median over the turns. For results without it, the ratio of the medians is returned.
        """
        stock = self.stock(run.replayed)
        return None if stock is None else run.ratio_to_stock or stock.step_s / run.step_s

    def activations(self) -> list[tuple[Run, float, float | None]]:
        """Return each run's bytes for its backward as a share of the stock engine's, measured and predicted."""
        stock = self.stock()
        if stock is None or not stock.activation_bytes or sum(bool(run.activation_bytes) for run in self.runs) < 2:
            return []
        floor, shares = stock.predicted_activation_bytes, []
        for run in self.runs:
            if run.activation_bytes:
                predicted = run.predicted_activation_bytes
                share = run.activation_bytes / stock.activation_bytes
                shares.append((run, share, predicted / floor if predicted and floor else None))
        return shares


def _kind_of(run: object) -> str:
    error = run.get("error") if isinstance(run, dict) else None
    return "<run>" if error is None else "<failed>"


_RunOrFailed = Annotated[Annotated[Run, Tag("<run>")] | Annotated[Failed, Tag("<failed>")], Discriminator(_kind_of)]
_MAX_RUNS = 200  # they take seconds to draw; a full benchmark has some forty


class Result(BaseModel):
    """Hold a whole benchmark. Further top-level keys (command, date, ...) are in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    machine: dict[str, Any]
    preset: str
    runs: Annotated[tuple[_RunOrFailed, ...], Field(min_length=1, max_length=_MAX_RUNS)]

    @property
    def measured(self) -> tuple[Run, ...]:
        """Return the runs that have figures."""
        return tuple(run for run in self.runs if isinstance(run, Run))

    @property
    def groups(self) -> tuple[RunGroup, ...]:
        """Return the groups by stages and accumulation, ascending; titles name the stages if they differ."""
        keys = sorted({(run.stages, run.accumulation) for run in self.runs})
        several = len({stages for stages, _ in keys}) > 1
        groups = []
        for stages, m in keys:
            alike = [run for run in self.runs if (run.stages, run.accumulation) == (stages, m)]
            runs = sorted((run for run in alike if isinstance(run, Run)), key=lambda run: (run.step_s, run.label))
            failed = tuple(run for run in alike if isinstance(run, Failed))
            groups.append(RunGroup(f"accumulation {m}" + f", {stages} stages" * several, tuple(runs), failed))
        return tuple(groups)


def read_result(data: object) -> Result:
    """Check the dict of `terapipe bench --json`, or raise `ReportError` with the run and the key that do not fit."""
    try:
        return parse_as(Result, json.dumps(data))
    except (JsonError, TypeError) as error:
        raise ReportError(f"no result of a benchmark: {error}; {GIVE}") from None
