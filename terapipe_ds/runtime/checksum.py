"""A checksum of the data that a rank has drawn, so that ranks which must have the same can find out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

LIMIT_BYTES = 1 << 24
"""Of each tensor so much is read: token ids and labels are far smaller, attention masks in full form need not be."""


def checksum(tensors: Iterable[Any]) -> int:
    """A number in [0, 2^62) that depends on every bit, on the order, the shapes and the dtypes of ``tensors``.

    Cryptographic hashing instead of a sum: two samples that are swapped, or tokens that change places, show. Half a
    millisecond for 8 x 8192 token ids of int64 on a server's processor.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if not torch.is_tensor(tensor):  # refused later, where it is used
            continue
        digest.update(f"{list(tensor.shape)} {tensor.dtype};".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data[:LIMIT_BYTES].numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 2
