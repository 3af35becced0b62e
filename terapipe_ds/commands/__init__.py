"""The commands of `terapipe`, a module each.

A module has `HELP` (one line), `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments)`. Its options are
a class of `commands.options`. Imports of anything heavy are inside functions: `--help` loads neither torch nor numpy.
"""

from __future__ import annotations

from typing import Any


class CommandError(ValueError):
    """What the user asked for cannot be done; the text says why and what to do."""


def read_json(path: str, option: str) -> dict[str, Any]:
    """Return the object in a JSON file that `option` names.

    Raises:
        CommandError: no JSON, or no object.
        OSError: the file cannot be read.
    """
    from terapipe_ds.files.bounded import read_bytes
    from terapipe_ds.files.strict_json import JsonError, parse_json
    from terapipe_ds.messages import show_value

    try:
        content = parse_json(read_bytes(path))
    except JsonError as error:
        raise CommandError(f"{option} {path} is no JSON: {error}; give a file that holds one object") from None
    if not isinstance(content, dict):
        raise CommandError(f"{option} {path} holds {show_value(content)}: give an object")
    return content


DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32", "fp64": "float64"}
"""Short names of device cards, and what the memory model calls them."""
