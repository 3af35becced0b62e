"""Whether a ``.idx`` file is whole and belongs to its ``.bin`` file: megatron-core maps both and believes them.

The format (megatron/core/datasets/indexed_dataset.py, little-endian): 9 bytes of magic, version u64 = 1, code of the
token dtype u8, number of sequences n u64, number of document borders d u64; then n lengths in tokens i32, n places in
bytes i64, d first sequences of documents i64, and where there are modes, n of i8.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy

from terapipe_ds.models.megatron_data.needs import MegatronDataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # by code; 6 and 7 are floats, which no token is


def check_index(prefix: str) -> None:
    """Compare ``PREFIX.idx`` with itself and with the size of ``PREFIX.bin``.

    Raises:
        MegatronDataError: it is cut short, of another format, or of another ``.bin`` file; with what is wrong.
        OSError: a file cannot be read.
    """
    index, data_bytes = Path(f"{prefix}.idx"), Path(f"{prefix}.bin").stat().st_size
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise _refusal(prefix, "it does not begin as one")
        _, version, code, count, borders = _HEADER.unpack(head)
        if version != 1 or code not in _TOKEN_BYTES:
            raise _refusal(prefix, f"version {version} with tokens of type {code}; known are version 1, 1 to 5 and 8")
        tables = _HEADER.size + 12 * count + 8 * borders
        if size not in (tables, tables + count):
            raise _refusal(prefix, f"it has {size} bytes, {count} sequences and {borders} borders make {tables}")
        lengths, places, starts = (
            numpy.fromfile(file, dtype, number) for dtype, number in (("<i4", count), ("<i8", count), ("<i8", borders))
        )
    if len(lengths) and int(lengths.min()) < 0:
        raise _refusal(prefix, f"a sequence has {lengths.min()} tokens")
    ends = numpy.cumsum(lengths, dtype=numpy.int64) * _TOKEN_BYTES[code]
    if len(places) and (places[0] != 0 or not numpy.array_equal(places[1:], ends[:-1])):
        raise _refusal(prefix, "its sequences do not follow one another")
    total = int(ends[-1]) if len(ends) else 0
    if total != data_bytes:
        raise _refusal(prefix, f"it tells of {total} bytes, {prefix}.bin has {data_bytes}")
    if borders == 0 or starts[0] != 0 or starts[-1] != count or bool((numpy.diff(starts) < 0).any()):
        raise _refusal(prefix, f"its documents do not cover its {count} sequences")


def _refusal(prefix: str, what: str) -> MegatronDataError:
    return MegatronDataError(f"{prefix}.idx is no index of {prefix}.bin ({what}): make them anew")
