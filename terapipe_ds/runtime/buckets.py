"""Many tensors in few messages: they are laid end to end in buckets, and each bucket is one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

BUCKET_BYTES = 50 * 2**20  # what a message has at most, but for a single tensor that is larger


def buckets(tensors: Iterable[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """``tensors`` in their order, those of one dtype and device together as long as they have ``limit_bytes`` at most.

    A sparse tensor, or one that is larger, is a bucket of its own.
    """
    held: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    held_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided:
            yield [tensor]
            continue
        kind, tensor_bytes = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if kind in held and held_bytes[kind] + tensor_bytes > limit_bytes:
            yield held.pop(kind)
        held_bytes[kind] = tensor_bytes + (held_bytes[kind] if kind in held else 0)
        held.setdefault(kind, []).append(tensor)
    yield from held.values()


def all_reduce(tensors: Iterable[Tensor], group: Any) -> None:
    """Sum each tensor over ``group``, in place. All ranks give tensors of the same shapes and dtypes in one order."""
    _in_place(tensors, lambda tensor: dist.all_reduce(tensor, group=group))


def broadcast(tensors: Iterable[Tensor], source: int, group: Any) -> None:
    """Give each tensor, in place, the value that it has on the global rank ``source`` of ``group``."""
    _in_place(tensors, lambda tensor: dist.broadcast(tensor, source, group=group))


@torch.no_grad()
def _in_place(tensors: Iterable[Tensor], collective: Callable[[Tensor], object]) -> None:
    for bucket in buckets(tensors, BUCKET_BYTES):
        if len(bucket) == 1 and (bucket[0].layout != torch.strided or bucket[0].is_contiguous()):
            collective(bucket[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        collective(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])
