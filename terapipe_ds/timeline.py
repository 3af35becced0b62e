"""A schedule with times, as simulated or as measured: kept, merged and drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terapipe_ds.files import write_text
from terapipe_ds.json_text import JsonError, parse_json
from terapipe_ds.messages import show_value

COMPUTE_KINDS = ("F", "B", "W")
FORMAT, VERSION = "terapipe_ds.timeline", 1
MAX_STAGES = 100_000
_MAX_S = 1e15  # sums and microseconds of such times are finite; clocks count from 1970 or from a start
_GIVE = "give a file of `terapipe simulate --timeline` or of a trace_dir"

_FILE_NAME = re.compile(r"timeline-step([0-9]{6,})-rank([0-9]{4,})\.json")


class TimelineError(ValueError):
    """A timeline that cannot be read, merged or drawn."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One action and when it ran, in seconds of a clock that all stages share.

    ``kind`` is the code of ``schedule.Kind`` ("F", "B", "W", "ST", ...); ``action`` is the action as text
    ("F0.3").
    """

    stage_id: int
    action: str
    micro_batch_id: int
    slice_id: int
    kind: str
    start_s: float
    end_s: float
    chunk_id: int = 0

    def __post_init__(self) -> None:
        if not (-_MAX_S <= self.start_s <= self.end_s <= _MAX_S):  # false for NaN
            raise TimelineError(
                f"{self.action[:40]} on stage {self.stage_id} runs from {self.start_s} s to {self.end_s} s:"
                f" give finite times of at most {_MAX_S:g} s, the end not before the start"
            )


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """One event of the critical path, and which wait ended with the end of the step before it.

    ``waited_for``: "start" (nothing: the first), "stage" (its stage was busy), "dependency" (the computation whose
    result it takes), "link" (its input was on the link; for a transfer, the link was busy with the one before).
    """

    event: TimelineEvent
    waited_for: str


@dataclass(frozen=True)
class Timeline:
    """The events of one step. What has one entry per stage is None where it is not known.

    ``bytes_over_time`` holds per stage (from this time on, bytes), times ascending. ``critical_path`` runs from the
    start to the last end; in a simulation each of its steps starts in the moment in which the one before it ends.
    """

    num_stages: int
    events: tuple[TimelineEvent, ...]
    name: str = ""
    peak_live_slices: tuple[int, ...] | None = None
    peak_bytes: tuple[int, ...] | None = None
    bytes_over_time: tuple[tuple[tuple[float, int], ...], ...] | None = None
    critical_path: tuple[CriticalStep, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise TimelineError(f"num_stages is {self.num_stages}: give at least 1 and at most {MAX_STAGES}")
        for event in self.events:
            if not 0 <= event.stage_id < self.num_stages:
                raise TimelineError(
                    f"{event.action[:40]} is on stage {event.stage_id} of {self.num_stages} stages:"
                    " number them from 0"
                )
        for what in ("peak_live_slices", "peak_bytes", "bytes_over_time"):
            entries = getattr(self, what)
            if entries is not None:
                object.__setattr__(self, what, tuple(entries))
                if len(entries) != self.num_stages:
                    raise TimelineError(
                        f"{what} has {len(entries)} entries for {self.num_stages} stages: give one each"
                    )

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end of F, B and W; loads, reduces and the step do not count."""
        compute = [event for event in self.events if event.kind in COMPUTE_KINDS]
        return max((e.end_s for e in compute), default=0.0) - min((e.start_s for e in compute), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Idle stage-seconds over ``num_stages * makespan_s``; 0 where nothing ran."""
        total_s = self.num_stages * self.makespan_s
        return max(1.0 - sum(self.busy_s()) / total_s, 0.0) if total_s > 0 else 0.0

    def busy_s(self) -> tuple[float, ...]:
        """Per stage, the seconds in which some F, B or W runs; overlapping events count once."""
        spans: list[list[tuple[float, float]]] = [[] for _ in range(self.num_stages)]
        for event in self.events:
            if event.kind in COMPUTE_KINDS:
                spans[event.stage_id].append((event.start_s, event.end_s))
        busy = []
        for mine in spans:
            covered_s, until = 0.0, -math.inf
            for start_s, end_s in sorted(mine):
                covered_s += max(end_s - max(start_s, until), 0.0)
                until = max(until, end_s)
            busy.append(covered_s)
        return tuple(busy)

    def bubbles(self) -> tuple[float, ...]:
        """Per stage, the share of the makespan in which no F, B or W runs; 0 where nothing ran."""
        makespan_s = self.makespan_s
        return tuple(max(1.0 - busy_s / makespan_s, 0.0) if makespan_s > 0 else 0.0 for busy_s in self.busy_s())

    def live_slices(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """Per stage, (from this time on, slices whose F has ended and whose last of B and W has not), ascending."""
        first: list[dict[tuple[int, ...], float]] = [{} for _ in range(self.num_stages)]
        last: list[dict[tuple[int, ...], float]] = [{} for _ in range(self.num_stages)]
        for event in self.events:
            if event.kind in COMPUTE_KINDS:
                of_stage = (first if event.kind == "F" else last)[event.stage_id]
                unit = event.chunk_id, event.micro_batch_id, event.slice_id
                of_stage[unit] = max(event.end_s, of_stage.get(unit, event.end_s))
        return tuple(_count_over_time(mine, last[stage_id]) for stage_id, mine in enumerate(first))

    def to_json(self) -> str:
        """As text that ``from_json`` reads back to an equal timeline."""
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
    def from_json(cls, text: str) -> Timeline:
        """Read what ``to_json`` wrote. Raises ``TimelineError`` on anything else, naming what is wrong."""
        try:
            data = parse_json(text)
        except JsonError as error:
            raise TimelineError(f"not a timeline, the text is no JSON: {error}; {_GIVE}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TimelineError(
                f'not a timeline: "format": "{FORMAT}" is not in it; {_GIVE}'
            )
        if data.get("version") != VERSION:
            raise TimelineError(
                f"the timeline has version {show_value(data.get('version'))}, this program reads {VERSION}; {_GIVE}"
            )
        known = {key: kind for key, kind in _OPTIONAL_TYPES.items() if key in data}
        _check_fields(data, "the timeline", {**_HEAD_TYPES, **known, "format": str, "version": int})
        for index, event in enumerate(data["events"]):
            _check_fields(event, f"event {index}", _EVENT_TYPES)
        for what in ("peak_live_slices", "peak_bytes"):
            if not all(_is_a(number, int) for number in data[what] or ()):
                raise TimelineError(f"{what} is {show_value(data[what])}: it holds one whole number per stage")
        events = tuple(TimelineEvent(**event) for event in data["events"])
        return cls(
            data["num_stages"], events, data["name"], data["peak_live_slices"], data["peak_bytes"],
            bytes_over_time=_read_bytes(data), critical_path=_read_path(data, events),
        )  # fmt: skip

    def to_chrome_trace(self) -> str:
        """JSON text for chrome://tracing and ui.perfetto.dev; see ``timeline_export``."""
        from terapipe_ds.timeline_export import to_chrome_trace

        return to_chrome_trace(self)

    def to_csv(self) -> str:
        """The events as CSV, a row each, times in seconds; see ``timeline_export``."""
        from terapipe_ds.timeline_export import to_csv

        return to_csv(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_json`` to a file; readers see all of it or nothing."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a file that ``save`` wrote; errors name the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except TimelineError as error:
            raise TimelineError(f"{os.fspath(path)}: {error}") from error
        except UnicodeDecodeError as error:
            raise TimelineError(f"{os.fspath(path)}: not a timeline, no text in UTF-8: {error}; {_GIVE}") from error

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """One timeline from those of the ranks of one pipeline, each with its own stage's events.

        Their clocks must agree. Peaks are the largest per stage, where all timelines have them. Raises
        ``TimelineError`` where the timelines differ in their stages, or two of them have the same stage.
        """
        parts = list(timelines)
        if not parts:
            raise TimelineError("no timelines to merge: give those of the ranks of a pipeline")
        num_stages = parts[0].num_stages
        owners: dict[int, int] = {}
        for index, part in enumerate(parts):
            if part.num_stages != num_stages:
                raise TimelineError(f"timelines of {num_stages} and of {part.num_stages} stages do not merge")
            for stage_id in {event.stage_id for event in part.events}:
                if owners.setdefault(stage_id, index) != index:
                    raise TimelineError(
                        f"two timelines have stage {stage_id}: give those of one pipeline replica"
                    )
        events = sorted((e for part in parts for e in part.events), key=lambda e: (e.start_s, e.stage_id))
        live_slices = _merge_peaks([part.peak_live_slices for part in parts])
        peak_bytes = _merge_peaks([part.peak_bytes for part in parts])
        return cls(num_stages, tuple(events), parts[0].name, live_slices, peak_bytes)

    def draw(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draw to a ``.png``, ``.svg`` or ``.pdf`` file; see ``timeline_picture.draw_many``."""
        from terapipe_ds.timeline_picture import draw_many

        draw_many([(title or self.name, self)], path)


def timeline_file_name(step: int, rank: int) -> str:
    """The name under which a rank keeps its timeline of a step in the trace directory."""
    return f"timeline-step{step:06d}-rank{rank:04d}.json"


def parse_file_name(name: str) -> tuple[int, int] | None:
    """``(step, rank)`` of a name that ``timeline_file_name`` made, None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


_HEAD_TYPES: dict[str, Any] = {
    "name": str,
    "num_stages": int,
    "peak_live_slices": (list, type(None)),
    "peak_bytes": (list, type(None)),
    "events": list,
}
_OPTIONAL_TYPES: dict[str, Any] = {"bytes_over_time": (list, type(None)), "critical_path": (list, type(None))}
"""What a simulation adds to the head; the files that ranks write do not have it."""

_EVENT_TYPES: dict[str, Any] = {
    **dict.fromkeys(("stage_id", "micro_batch_id", "slice_id", "chunk_id"), int),
    **dict.fromkeys(("action", "kind"), str),
    **dict.fromkeys(("start_s", "end_s"), (int, float)),
}


def _is_a(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_fields(data: object, where: str, types: dict[str, Any]) -> None:
    if not isinstance(data, dict):
        raise TimelineError(f"{where} is {show_value(data, 40)}: it must be an object with {', '.join(types)}")
    for key in [*types, *data]:
        if key not in types or key not in data:
            problem = "an unknown" if key not in types else "no"
            raise TimelineError(f"{where} has {problem} field {show_value(key, 40)}: it has {', '.join(types)}")
        huge = _is_a(data[key], int) and abs(data[key]) >= 2**63  # no count, and too large for a float
        if huge or not _is_a(data[key], types[key]):
            raise TimelineError(
                f"{where} has {key} = {show_value(data[key], 40)}, which is of the wrong type or size; {_GIVE}"
            )


def _read_bytes(data: dict[str, Any]) -> tuple[tuple[tuple[float, int], ...], ...] | None:
    stages = data.get("bytes_over_time")
    if stages is None:
        return None
    try:
        for step in (step for stage in stages for step in stage):
            time_s, number = step
            if not (_is_a(time_s, (int, float)) and abs(time_s) <= _MAX_S and _is_a(number, int)):
                raise ValueError(f"{show_value(step, 40)} is no step")
        return tuple(tuple((float(time_s), number) for time_s, number in stage) for stage in stages)
    except (TypeError, ValueError, OverflowError) as error:
        raise TimelineError(f"bytes_over_time holds a list of [seconds, bytes] per stage: {error}") from None


def _read_path(data: dict[str, Any], events: Sequence[TimelineEvent]) -> tuple[CriticalStep, ...] | None:
    path = data.get("critical_path")
    if path is None:
        return None
    steps = []
    for step in path:
        index, waited_for = step if isinstance(step, list) and len(step) == 2 else (-1, "")
        if not (_is_a(index, int) and 0 <= index < len(events) and isinstance(waited_for, str)):
            raise TimelineError(
                f"critical_path has {show_value(step, 40)}: give [number of an event, what it waited for]"
            )
        steps.append(CriticalStep(events[index], waited_for))
    return tuple(steps)


def _count_over_time(
    begins: dict[tuple[int, ...], float], ends: dict[tuple[int, ...], float]
) -> tuple[tuple[float, int], ...]:
    """How many of the things that begin and (maybe) end are there; what ends in a moment goes before what begins."""
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
