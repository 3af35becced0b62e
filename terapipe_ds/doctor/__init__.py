"""Examine an installation, a machine and a DeepSpeed JSON; report faults and how to fix them.

A check is a function that returns lines. It imports inside its body, so that a failed import becomes a line as well.
"""

from terapipe_ds.doctor.lines import VERDICTS as VERDICTS
from terapipe_ds.doctor.lines import Check as Check
from terapipe_ds.doctor.lines import Line as Line
from terapipe_ds.doctor.lines import look as look
