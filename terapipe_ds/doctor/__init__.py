"""Look at an installation, a machine and a DeepSpeed JSON: what is there, what is wrong, and how to mend it.

A check is a function that returns lines. Whatever it imports, it imports inside: one that fails is a line as well.
"""

from terapipe_ds.doctor.lines import VERDICTS as VERDICTS
from terapipe_ds.doctor.lines import Check as Check
from terapipe_ds.doctor.lines import Line as Line
from terapipe_ds.doctor.lines import look as look
