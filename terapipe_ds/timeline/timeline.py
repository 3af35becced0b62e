"""Hold a schedule with simulated or measured times: its events, their sums, and its file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import JsonError, parse_as

COMPUTE_KINDS = ("F", "B", "W")
FORMAT, VERSION = "terapipe_ds.timeline", 1
MAX_STAGES = 100_000
_MAX_S = 1e15  # sums and microseconds of such times are finite; clocks count from 1970 or from a start
_GIVE = "give a file of `terapipe simulate --timeline` or of a trace_dir"
_FILE_NAME = re.compile(r"timeline-step([0-9]{6,})-rank([0-9]{4,})\.json")

_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # larger numbers are no counts, and overflow a float
_Seconds = Annotated[float, Field(ge=-_MAX_S, le=_MAX_S)]
_Steps = tuple[tuple[_Seconds, _Int], ...]
"""From this time on, so many; times ascend."""


class TimelineError(ValueError):
    """Refuse a timeline that cannot be read, merged, drawn, or compared with another one."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Hold one action and its times, in seconds of a clock that all stages share.

    `kind` is the code of `schedule.Kind` ("F", "B", "W", "ST", ...); `action` is the action as text ("F0.3").
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    stage_id: _Int
    action: str
    micro_batch_id: _Int
    slice_id: _Int
    kind: str
    start_s: float
    end_s: float
    chunk_id: _Int = 0

    def __post_init__(self) -> None:
        if not (-_MAX_S <= self.start_s <= self.end_s <= _MAX_S):  # false for NaN
            raise TimelineError(
                f"{self.action[:40]} on stage {self.stage_id} runs from {self.start_s} s to {self.end_s} s:"
                f" give finite times of at most {_MAX_S:g} s, the end not before the start"
            )


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """Hold one event of the critical path, and the wait that ended with the end of the step before it.

    `waited_for`: "start" (nothing: the first), "stage" (its stage was busy), "dependency" (the computation whose
    result it takes), "link" (its input was on the link; for a transfer, the link was busy with the one before).
    """

    event: TimelineEvent
    waited_for: str


@dataclass(frozen=True)
class Timeline:
    """Hold the events of one step. A field with one entry per stage is None where it is not known.

    `bytes_over_time` holds per stage (from this time on, bytes), times ascending. `critical_path` runs from the
    start to the last end; in a simulation each of its steps starts in the moment in which the one before it ends.
    """

    num_stages: int
    events: tuple[TimelineEvent, ...]
    name: str = ""
    peak_live_slices: tuple[int, ...] | None = None
    peak_bytes: tuple[int, ...] | None = None
    bytes_over_time: tuple[_Steps, ...] | None = None
    critical_path: tuple[CriticalStep, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise TimelineError(f"num_stages is {self.num_stages}: give at least 1 and at most {MAX_STAGES}")
        for event in self.events:
            if not 0 <= event.stage_id < self.num_stages:
                raise TimelineError(
                    f"{event.action[:40]} is on stage {event.stage_id} of {self.num_stages} stages: number them from 0"
                )
        for what in ("peak_live_slices", "peak_bytes", "bytes_over_time"):
            if (entries := getattr(self, what)) is not None:
                object.__setattr__(self, what, tuple(entries))
                if len(entries) != self.num_stages:
                    reason = f"{what} has {len(entries)} entries for {self.num_stages} stages: give one each"
                    raise TimelineError(reason)

    def computations(self) -> list[TimelineEvent]:
        """Return the events that are F, B or W."""
        return [event for event in self.events if event.kind in COMPUTE_KINDS]

    @functools.cached_property
    def start_s(self) -> float:
        """Return the first start of F, B and W; 0 where nothing ran."""
        return min((event.start_s for event in self.computations()), default=0.0)

    @functools.cached_property
    def makespan_s(self) -> float:
        """Return seconds from the first start to the last end of F, B and W, without loads, reduces and the step."""
        return max((event.end_s for event in self.computations()), default=0.0) - self.start_s

    @property
    def bubble_fraction(self) -> float:
        """Return idle stage-seconds over `num_stages * makespan_s`; 0 where nothing ran."""
        total_s = self.num_stages * self.makespan_s
        return max(1.0 - sum(self.busy_s()) / total_s, 0.0) if total_s > 0 else 0.0

    def busy_s(self) -> tuple[float, ...]:
        """Return per stage the seconds in which some F, B or W runs; overlapping events count once."""
        busy_s, until_s = [0.0] * self.num_stages, [-math.inf] * self.num_stages
        for event in sorted(self.computations(), key=lambda event: (event.start_s, event.end_s)):
            stage_id = event.stage_id
            busy_s[stage_id] += max(event.end_s - max(event.start_s, until_s[stage_id]), 0.0)
            until_s[stage_id] = max(until_s[stage_id], event.end_s)
        return tuple(busy_s)

    def bubbles(self) -> tuple[float, ...]:
        """Return per stage the share of the makespan in which no F, B or W runs; 0 where nothing ran."""
        makespan_s = self.makespan_s
        return tuple(max(1.0 - busy_s / makespan_s, 0.0) if makespan_s > 0 else 0.0 for busy_s in self.busy_s())

    def live_slices(self) -> tuple[_Steps, ...]:
        """Return per stage pairs (from this time on, slices whose F has ended and whose last of B and W has not)."""
        first: list[dict[tuple[int, ...], float]] = [{} for _ in range(self.num_stages)]
        last: list[dict[tuple[int, ...], float]] = [{} for _ in range(self.num_stages)]
        for event in self.computations():
            of_stage = (first if event.kind == "F" else last)[event.stage_id]
            unit = event.chunk_id, event.micro_batch_id, event.slice_id
            of_stage[unit] = max(event.end_s, of_stage.get(unit, event.end_s))
        return tuple(map(_count_over_time, first, last))

    def to_json(self) -> str:
        """Return the text that `from_json` reads back to an equal timeline."""
        events = ",\n  ".join(json.dumps(dataclasses.asdict(event), allow_nan=False) for event in self.events)
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": self.name, "num_stages": self.num_stages}
        head |= {"peak_live_slices": self.peak_live_slices, "peak_bytes": self.peak_bytes}
        if self.bytes_over_time is not None:
            head["bytes_over_time"] = self.bytes_over_time
        if self.critical_path is not None:
            index = {event: i for i, event in enumerate(self.events)}
            head["critical_path"] = [[index[step.event], step.waited_for] for step in self.critical_path]
        return json.dumps(head, allow_nan=False)[:-1] + f', "events": [\n  {events}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Timeline:
        """Read what `to_json` wrote. Raise `TimelineError` on anything else, naming what is wrong."""
        try:
            file = parse_as(_TimelineFile, text)
        except JsonError as error:
            raise TimelineError(f"not a timeline: {error}; {_GIVE}") from None
        path = None
        if file.critical_path is not None:
            path = tuple(CriticalStep(file.events[index], waited_for) for index, waited_for in file.critical_path)
        fields = file.model_dump(include={"num_stages", "name", "peak_live_slices", "peak_bytes", "bytes_over_time"})
        return cls(events=file.events, critical_path=path, **fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file; readers see all of it or nothing."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a file that `save` wrote; errors name the file."""
        try:
            return cls.from_json(read_bytes(path))
        except TimelineError as error:
            raise TimelineError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Merge the timelines of the ranks of one pipeline, each with its own stage's events, into one.

        Their clocks must agree. Peaks are the largest per stage, where all timelines have them. Raise
        `TimelineError` if the timelines differ in their stages, or if two of them have the same stage.
        """
        parts = list(timelines)
        if not parts:
            raise TimelineError("no timelines to merge: give those of the ranks of a pipeline")
        num_stages = parts[0].num_stages
        owners: dict[int, int] = {}
        for index, part in enumerate(parts):
            if part.num_stages != num_stages:
                both = f"timelines of {num_stages} and of {part.num_stages} stages do not merge"
                raise TimelineError(f"{both}: give those of one run; several may have written to this folder")
            for stage_id in {event.stage_id for event in part.events}:
                if owners.setdefault(stage_id, index) != index:
                    raise TimelineError(f"two timelines have stage {stage_id}: give those of one pipeline replica")
        events = sorted((e for part in parts for e in part.events), key=lambda e: (e.start_s, e.stage_id))
        live_slices = _merge_peaks([part.peak_live_slices for part in parts])
        peak_bytes = _merge_peaks([part.peak_bytes for part in parts])
        return cls(num_stages, tuple(events), parts[0].name, live_slices, peak_bytes)


class _TimelineFile(BaseModel):
    """Describe the file of a timeline. `critical_path` holds [number of an event, its `waited_for`]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["terapipe_ds.timeline"]
    version: Literal[1]
    name: str
    num_stages: _Int
    peak_live_slices: tuple[_Int, ...] | None
    peak_bytes: tuple[_Int, ...] | None
    bytes_over_time: tuple[_Steps, ...] | None = None
    events: tuple[TimelineEvent, ...]
    critical_path: tuple[tuple[Annotated[int, Field(ge=0)], str], ...] | None = None

    @model_validator(mode="after")
    def _check_path(self) -> _TimelineFile:
        largest = max((index for index, _ in self.critical_path or ()), default=-1)
        if largest >= len(self.events):
            raise ValueError(f"critical_path has event {largest}: give numbers below {len(self.events)}")
        return self


def timeline_file_name(step: int, rank: int) -> str:
    """Return the name under which a rank keeps its timeline of a step in the trace directory."""
    return f"timeline-step{step:06d}-rank{rank:04d}.json"


def parse_file_name(name: str) -> tuple[int, int] | None:
    """Return `(step, rank)` of a name that `timeline_file_name` made, None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _count_over_time(begins: dict[tuple[int, ...], float], ends: dict[tuple[int, ...], float]) -> _Steps:
    """Count the spans that have begun and not ended; at one moment, ends come before beginnings."""
    changes = sorted([*((time_s, 1) for time_s in begins.values()), *((time_s, -1) for time_s in ends.values())])
    steps: dict[float, int] = {}
    count = 0
    for time_s, change in changes:
        count += change
        steps[time_s] = count
    return tuple(steps.items())


def _merge_peaks(peaks: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [peak for peak in peaks if peak is not None]
    return tuple(map(max, zip(*known, strict=True))) if len(known) == len(peaks) else None
