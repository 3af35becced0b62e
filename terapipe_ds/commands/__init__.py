"""The commands of ``terapipe``, a module each.

A module has ``HELP`` (one line), ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(arguments)``.
Imports of anything heavy stand inside ``run``: looking at ``--help`` loads neither torch nor numpy.
"""

from __future__ import annotations


class CommandError(ValueError):
    """What the user asked for cannot be done; the text says why and what to do."""


DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32", "fp64": "float64"}
"""Short names of device cards, and what the memory model calls them."""
