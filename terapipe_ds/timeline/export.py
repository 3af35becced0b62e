"""Timelines for other programs: Chrome's trace format, which ui.perfetto.dev opens, and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

from terapipe_ds.timeline.timeline import Timeline, TimelineEvent

LINK_KINDS = ("SA", "SG")
_STAGES, _LINKS = 0, 1  # the two processes of the trace


def to_chrome_trace(timeline: Timeline) -> str:
    """Return JSON text for chrome://tracing and ui.perfetto.dev; times are microseconds from 0.

    A thread per stage and, in a process of their own, one per link. Counters show the live slices of every stage,
    and its bytes if they are known.
    """
    zero_s = min((event.start_s for event in timeline.events), default=0.0)
    rows = [_name("thread_name", _STAGES, k, f"stage {k}") for k in range(timeline.num_stages)]
    threads: dict[tuple[Any, ...], int] = {}
    for event in timeline.events:
        pid, thread = _STAGES, event.stage_id
        if event.kind in LINK_KINDS:  # beside computation, so in a row of its own
            _, _, peer = event.action.partition(">")
            link = event.stage_id, event.kind, event.chunk_id, peer
            if link not in threads:
                threads[link] = len(threads)
                chunk = f" chunk {event.chunk_id}" if event.chunk_id else ""
                what = "activations" if event.kind == "SA" else "gradients"
                words = f"{what}, stage {event.stage_id}{chunk} > {peer}"
                rows.append(_name("thread_name", _LINKS, threads[link], words))
            pid, thread = _LINKS, threads[link]
        rows.append(_box(event, pid, thread, zero_s))
    if threads:
        rows += [_name("process_name", _STAGES, 0, "stages"), _name("process_name", _LINKS, 0, "links")]
    rows += _counters("live slices", "slices", timeline.live_slices(), zero_s)
    rows += _counters("memory", "bytes", timeline.bytes_over_time or (), zero_s)
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, indent=0, allow_nan=False)


def to_csv(timeline: Timeline) -> str:
    """Return a row per event, in the order of the timeline; times in seconds, written so that they read back equal."""
    fields = [field.name for field in dataclasses.fields(TimelineEvent)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([getattr(event, field) for field in fields] for event in timeline.events)
    return text.getvalue()


def _box(event: TimelineEvent, pid: int, tid: int, zero_s: float) -> dict[str, Any]:
    unit = {key: getattr(event, key) for key in ("micro_batch_id", "slice_id", "chunk_id")}
    times = {"ts": 1e6 * (event.start_s - zero_s), "dur": 1e6 * (event.end_s - event.start_s)}
    return {"name": event.action, "cat": event.kind, "ph": "X", "pid": pid, "tid": tid, **times, "args": unit}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _counters(what: str, unit: str, stages: tuple[tuple[tuple[float, int], ...], ...], zero_s: float) -> list[Any]:
    return [
        {"name": f"{what}, stage {k}", "ph": "C", "pid": _STAGES, "ts": 1e6 * (time_s - zero_s), "args": {unit: number}}
        for k, steps in enumerate(stages)
        for time_s, number in steps
    ]
