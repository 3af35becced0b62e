"""Compute checksums that show whether ranks have drawn different data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import xxhash

SAMPLE = 1 << 16  # stages compare at least this many elements of labels, if there are more
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def checksum(value: Any) -> int:
    """Return a number in [0, 2^62) that depends on every bit, on the order, the shapes and the dtypes in `value`."""
    digest = xxhash.xxh3_64()
    for part in _content(value):
        digest.update(part)
    return digest.intdigest() >> 2


def contents_of(labels: Any) -> int:
    """Return a checksum of the first tensor of labels, or of a sample if it is large; 0 if it cannot be compared.

    A stage without the loss may get labels of one value in place of the labels that it does not need, and other tensors
    beside them. Whole numbers count by their values: a sample shows a shuffle as well as the whole tensor does.
    """
    tensors = [each for each in (labels if isinstance(labels, (tuple, list)) else (labels,)) if torch.is_tensor(each)]
    if not tensors or not tensors[0].numel():
        return 0
    # every n-th element, from the start to the end
    sample = tensors[0].detach().reshape(-1)[:: 1 + tensors[0].numel() // SAMPLE].cpu()
    sample = sample if sample.is_floating_point() or sample.is_complex() else sample.long()
    return 0 if bool((sample == sample[0]).all()) else checksum(sample)


def _content(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value, however deep. An object of unknown kind counts by its type: its text may vary."""
    if torch.is_tensor(value):
        yield f"{list(value.shape)} {value.dtype};".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        return
    text = f"{type(value).__module__}.{type(value).__qualname__} "
    inner: list[Any] = []
    if isinstance(value, _PLAIN):
        text += repr(value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{text}{value.dtype} {value.shape};".encode()
        yield value.tobytes()
        return
    elif isinstance(value, Mapping):
        inner = [each for item in value.items() for each in item]
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    yield f"{text} {len(inner)};".encode(errors="surrogatepass")
    for each in inner:
        yield from _content(each)
