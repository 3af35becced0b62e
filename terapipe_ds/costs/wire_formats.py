"""Count the bytes of numbers on a link in the formats of `terapipe.links`, as the engine packs them."""

from __future__ import annotations

from typing import Literal, get_args

ForwardFormat = Literal["bf16", "fp8", "int8"]
BackwardFormat = Literal["bf16"]
FORMATS: tuple[str, ...] = get_args(ForwardFormat)

TILE = 128
"""Numbers that share a scale, all of one token: no token's value depends on a later one."""
SCALE_BYTES = 4
NUMBER_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}
HAS_SCALES = frozenset({"fp8", "int8"})


def is_packed(wire_format: str | None, itemsize: int) -> bool:
    """Return whether numbers of this many bytes become smaller in that format; None is exact."""
    return wire_format is not None and NUMBER_BYTES[wire_format] < itemsize


def bytes_of_token(wire_format: str | None, width: int, itemsize: int) -> int:
    """Return the bytes of a token of `width` numbers on the wire, with its scales."""
    if wire_format is None or not is_packed(wire_format, itemsize):
        return width * itemsize
    scales = -(-width // TILE) * SCALE_BYTES if wire_format in HAS_SCALES else 0
    return width * NUMBER_BYTES[wire_format] + scales
