"""A checksum of the data that a rank has drawn, so that ranks which must have the same can find out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

LIMIT_BYTES = 1 << 24
"""Of each tensor so much is read: token ids and labels are far smaller, attention masks in full form need not be."""


def checksum(tensors: Iterable[Any]) -> int:
    """A number in [0, 2^62) that depends on every bit, on the order, the shapes and the dtypes of ``tensors``, and on
    texts among them.

    Cryptographic hashing instead of a sum: two samples that are swapped, or tokens that change places, show. Half a
    millisecond for 8 x 8192 token ids of int64 on a server's processor.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if isinstance(tensor, str):
            digest.update(f"{len(tensor)} {tensor};".encode(errors="surrogatepass"))
        if not torch.is_tensor(tensor):  # refused later, where it is used
            continue
        digest.update(f"{list(tensor.shape)} {tensor.dtype};".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data[:LIMIT_BYTES].numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 2


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def content_of(value: Any) -> Iterator[torch.Tensor | str]:
    """The tensors in ``value`` and texts of all else, for :func:`checksum`: in dictionaries, tuples, lists and
    dataclasses, however deep. Of an object of another kind the type alone, for its text may name an address."""
    if torch.is_tensor(value):
        yield value
        return
    yield f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{value.dtype} {value.shape} {value.tobytes()[:LIMIT_BYTES].hex()}"
    else:
        inner = list(_inner(value))
        yield str(len(inner))
        for each in inner:
            yield from content_of(each)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield each
    elif isinstance(value, (tuple, list)):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr(value, field.name)
