"""Describe the messages of a link: the shapes that a sender announces once, and both ends know from then on."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
_ANNOUNCEMENT_BYTES = 4096


class LinkError(RuntimeError):
    """Say that a message between two stages cannot be sent or received."""


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor for the receiver before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        is_other = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
        if is_other or tensor.dtype not in _DTYPES:
            layout = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            kind = layout if is_other else tensor.dtype
            raise LinkError(
                f"a layer hands a tensor to another stage that no message carries ({kind}): "
                "convert it in the last layer of the stage, or move the border by terapipe.partition"
            )
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MessageSpec:
    """Describe the tensors of one message; `is_tuple`: the layers hand on a tuple, not a bare tensor."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], is_tuple: bool) -> MessageSpec:
        return cls(tuple(TensorSpec.of(t) for t in tensors), is_tuple)

    @cached_property
    def gradient(self) -> MessageSpec:
        """Return the spec of the message back: one gradient for each tensor that requires one."""
        return MessageSpec(tuple(t for t in self.tensors if t.requires_grad), True)

    def encode(self) -> torch.Tensor:
        """Return the announcement of this spec: bytes of a fixed size."""
        # The size is fixed, so that the receiver can post the receive before it knows anything
        data = pickle.dumps(self)
        if len(data) > _ANNOUNCEMENT_BYTES:
            raise LinkError(
                f"a layer hands on {len(self.tensors)} tensors, more than one message can announce; pack them"
            )
        return torch.frombuffer(bytearray(data.ljust(_ANNOUNCEMENT_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def blank() -> torch.Tensor:
        """Return a tensor to receive an announcement in."""
        return torch.empty(_ANNOUNCEMENT_BYTES, dtype=torch.uint8, device="cpu")

    @staticmethod
    def decode(announcement: torch.Tensor) -> MessageSpec:
        spec: MessageSpec = pickle.loads(announcement.numpy().tobytes())
        return spec
