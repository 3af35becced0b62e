"""What numbers take on a link: the formats of `terapipe.links`, which the engine packs and the costs count."""

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
    """Return whether numbers of so many bytes become smaller in that format; None is exact."""
    return wire_format is not None and NUMBER_BYTES[wire_format] < itemsize


def bytes_of_token(wire_format: str | None, width: int, itemsize: int) -> int:
    """Return what a token of `width` numbers takes on the wire, with its scales."""
    if wire_format is None or not is_packed(wire_format, itemsize):
        return width * itemsize
    scales = -(-width // TILE) * SCALE_BYTES if wire_format in HAS_SCALES else 0
    return width * NUMBER_BYTES[wire_format] + scales
