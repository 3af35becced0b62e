"""Timelines: what ran when in one step, simulated or measured.

`timeline` holds the events and their sums, `export` writes other programs' formats, `picture` draws, `compare` puts two
timelines of one schedule side by side.
"""

from terapipe_ds.timeline.timeline import (
    COMPUTE_KINDS,
    CriticalStep,
    Timeline,
    TimelineError,
    TimelineEvent,
    parse_file_name,
    timeline_file_name,
)

__all__ = [
    "COMPUTE_KINDS",
    "CriticalStep",
    "Timeline",
    "TimelineError",
    "TimelineEvent",
    "parse_file_name",
    "timeline_file_name",
]
