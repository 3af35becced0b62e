"""Pack the tensors of a message into one buffer of bytes, the activations among them in fewer bits.

Only floating-point tensors that carry gradients and have a dimension of features (three dimensions or more; the last
one holds the features) are packed. Masks, indices, sums of losses, and all that an evaluation sends travel unchanged.
In fp8 (e4m3) and int8 every 128 numbers of a token share a scale in fp32, by the largest among them. A tile with a
number that is not finite arrives as NaN, so that no overflow is lost. The gradient passes back as if nothing had been
rounded (straight through).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from terapipe_ds.costs.wire_formats import HAS_SCALES, NUMBER_BYTES, SCALE_BYTES, TILE, is_packed
from terapipe_ds.runtime.links.specs import TensorSpec

_ALIGNED = 16  # each tensor begins at a multiple of this number of bytes, so that any dtype can be viewed there
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LEAST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _Segment:
    """Locate one tensor in the buffer; `scales` come right after the numbers, or not at all."""

    spec: TensorSpec
    dtype: torch.dtype  # in the buffer
    start: int
    stop: int
    scales: tuple[int, int] | None

    def numbers(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.spec.shape)

    def scales_of(self, buffer: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        of_token = -(-self.spec.shape[-1] // TILE)
        return buffer[slice(*self.scales)].view(torch.float32).view(*self.spec.shape[:-1], of_token, 1)

    def put(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write a tensor to its place, rounded if it is packed."""
        if self.scales is None:
            self.numbers(buffer).copy_(tensor)
            return
        # One scale for each tile, so that one large number spoils 128 numbers at most
        largest = _LARGEST["int8" if self.dtype == torch.int8 else "fp8"]
        tiles = _tiles(tensor.to(torch.float32))
        most = tiles.abs().amax(-1, keepdim=True)
        scales = (most / largest).clamp_min(_LEAST_SCALE)
        # A number that is not finite is 0 here, and its tile becomes NaN by its scale
        rounded = (tiles / scales).nan_to_num(0.0).clamp(-largest, largest)
        if self.dtype == torch.int8:
            rounded = rounded.round()
        width = self.spec.shape[-1]
        self.numbers(buffer).copy_(rounded.flatten(-2)[..., :width].to(self.dtype))
        self.scales_of(buffer).copy_(torch.where(most.isfinite(), scales, math.nan))

    def get(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor at its place, in its own dtype and memory."""
        if self.scales is None:
            return self.numbers(buffer).to(self.spec.dtype, copy=True)
        width = self.spec.shape[-1]
        tiles = _tiles(self.numbers(buffer).to(torch.float32)) * self.scales_of(buffer)
        return tiles.flatten(-2)[..., :width].to(self.spec.dtype, copy=True).contiguous()


def _tiles(tensor: torch.Tensor) -> torch.Tensor:
    """Return [..., tiles, TILE] of [..., features]; the last tile ends with zeros."""
    missing = -tensor.shape[-1] % TILE
    return (F.pad(tensor, (0, missing)) if missing else tensor).unflatten(-1, (-1, TILE))


class Packing:
    """Arrange the tensors of one kind of message in their buffer; `of` decides which messages are packed."""

    def __init__(self, wire_format: str, specs: Sequence[TensorSpec]) -> None:
        self._segments: list[_Segment] = []
        end = 0
        for spec in specs:
            start, count = -(-end // _ALIGNED) * _ALIGNED, math.prod(spec.shape)
            end, dtype, scales = start + spec.num_bytes, spec.dtype, None
            # Numbers first, then their scales, each from an aligned byte on
            if _carries_activations(spec, wire_format):
                dtype, end = _DTYPES[wire_format], start + count * NUMBER_BYTES[wire_format]
                if wire_format in HAS_SCALES:
                    first = -(-end // _ALIGNED) * _ALIGNED
                    end = first + math.prod(spec.shape[:-1]) * -(-spec.shape[-1] // TILE) * SCALE_BYTES
                    scales = first, end
            stop = start + count * dtype.itemsize
            self._segments.append(_Segment(spec, dtype, start, stop, scales))
        self.num_bytes = end
        self.tensors = (TensorSpec((end,), torch.uint8, False),)  # the packed message, as in a `MessageSpec`

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(wire_format: str | None, specs: tuple[TensorSpec, ...]) -> Packing | None:
        """Return how such tensors are packed; None if they travel one by one, unpacked."""
        if wire_format is None or not any(_carries_activations(spec, wire_format) for spec in specs):
            return None
        return Packing(wire_format, specs)

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the buffer to send."""
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=tensors[0].device)
        for segment, tensor in zip(self._segments, tensors, strict=True):
            segment.put(tensor.detach(), buffer)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that arrived, each in memory of its own."""
        return tuple([segment.get(buffer) for segment in self._segments])


def _carries_activations(spec: TensorSpec, wire_format: str) -> bool:
    is_wide = spec.dtype.is_floating_point and is_packed(wire_format, spec.dtype.itemsize)
    return spec.requires_grad and is_wide and len(spec.shape) >= 3 and math.prod(spec.shape) > 0
