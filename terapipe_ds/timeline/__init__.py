"""Hold timelines: the actions of one step with their times, simulated or measured.

`timeline` holds the events and their sums, `export` writes other programs' formats, `picture` draws, `compare` puts two
timelines of one schedule side by side.
"""

from terapipe_ds.timeline.timeline import COMPUTE_KINDS as COMPUTE_KINDS
from terapipe_ds.timeline.timeline import CriticalStep as CriticalStep
from terapipe_ds.timeline.timeline import Timeline as Timeline
from terapipe_ds.timeline.timeline import TimelineError as TimelineError
from terapipe_ds.timeline.timeline import TimelineEvent as TimelineEvent
from terapipe_ds.timeline.timeline import parse_file_name as parse_file_name
from terapipe_ds.timeline.timeline import timeline_file_name as timeline_file_name
