"""Export timelines for other programs: Chrome's trace format, which ui.perfetto.dev opens, and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

from terapipe_ds.timeline.timeline import Timeline, TimelineEvent

LINK_KINDS = ("SA", "SG")


def to_chrome_trace(timeline: Timeline, title: str = "", *others: tuple[str, Timeline]) -> str:
    """Return JSON text for chrome://tracing and ui.perfetto.dev; times are microseconds from 0.

    There is a thread per stage and, in a separate process, one per link. Counters show the live slices of every stage,
    and its bytes if they are known. `others` are titled timelines in the same trace, each in separate processes.
    """
    titled = [(title, timeline), *others]
    rows = [row for index, (name, each) in enumerate(titled) for row in _rows(each, name, 2 * index)]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, indent=0, allow_nan=False)


def _rows(timeline: Timeline, title: str, first_pid: int) -> list[dict[str, Any]]:
    stages, links = first_pid, first_pid + 1  # the two processes of the trace
    zero_s = min((event.start_s for event in timeline.events), default=0.0)
    rows = [_name("thread_name", stages, k, f"stage {k}") for k in range(timeline.num_stages)]
    threads: dict[tuple[Any, ...], int] = {}
    for event in timeline.events:
        pid, thread = stages, event.stage_id
        if event.kind in LINK_KINDS:  # it runs beside computation, so it has a separate row
            _, _, peer = event.action.partition(">")
            link = event.stage_id, event.kind, event.chunk_id, peer
            if link not in threads:
                threads[link] = len(threads)
                chunk = f" chunk {event.chunk_id}" if event.chunk_id else ""
                what = "activations" if event.kind == "SA" else "gradients"
                words = f"{what}, stage {event.stage_id}{chunk} > {peer}"
                rows.append(_name("thread_name", links, threads[link], words))
            pid, thread = links, threads[link]
        unit = {key: getattr(event, key) for key in ("micro_batch_id", "slice_id", "chunk_id")}
        times = {"ts": 1e6 * (event.start_s - zero_s), "dur": 1e6 * (event.end_s - event.start_s)}
        place = {"pid": pid, "tid": thread}
        rows.append({"name": event.action, "cat": event.kind, "ph": "X", **place, **times, "args": unit})
    if threads or title:
        rows.append(_name("process_name", stages, 0, f"{title} stages".lstrip()))
    if threads:
        rows.append(_name("process_name", links, 0, f"{title} links".lstrip()))
    rows += _counters("live slices", "slices", timeline.live_slices(), zero_s, stages)
    rows += _counters("memory", "bytes", timeline.bytes_over_time or (), zero_s, stages)
    return rows


def to_csv(timeline: Timeline) -> str:
    """Return a row per event, in the order of the timeline; times in seconds, written so that they read back equal."""
    fields = [field.name for field in dataclasses.fields(TimelineEvent)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([getattr(event, field) for field in fields] for event in timeline.events)
    return text.getvalue()


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _counters(
    what: str, unit: str, stages: tuple[tuple[tuple[float, int], ...], ...], zero_s: float, pid: int
) -> list[Any]:
    return [
        {"name": f"{what}, stage {k}", "ph": "C", "pid": pid, "ts": 1e6 * (time_s - zero_s), "args": {unit: number}}
        for k, steps in enumerate(stages)
        for time_s, number in steps
    ]
