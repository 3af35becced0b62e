"""What packed messages keep, against bounds of the formats; and what travels as it is."""

import math

import pytest
import torch

from terapipe_ds.costs.wire_formats import bytes_of_token
from terapipe_ds.runtime.links.compression import Packing
from terapipe_ds.runtime.links.specs import TensorSpec

ERROR = {"bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 0.5 / 127}
"""Of a number (bf16, fp8) or of the largest of its tile (int8). fp8 numbers below 2**-6 / 448 of it lose more."""


def packed(tensor: torch.Tensor, wire_format: str) -> tuple[Packing, torch.Tensor]:
    packing = Packing.of(wire_format, (TensorSpec.of(tensor),))
    assert packing is not None
    (came,) = packing.unpack(packing.pack([tensor]).clone())
    return packing, came


@pytest.mark.parametrize("wire_format", ERROR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 100, 128, 300])
def test_numbers_arrive_within_the_error_of_their_format(wire_format: str, dtype: torch.dtype, width: int) -> None:
    if dtype.itemsize == 2 and wire_format == "bf16":
        assert Packing.of(wire_format, (TensorSpec((2, 3, width), dtype, True),)) is None
        assert bytes_of_token(wire_format, width, 2) == bytes_of_token(None, width, 2) == 2 * width
        return
    generator = torch.Generator().manual_seed(width)
    size = torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    sent = (torch.randn(2, 7, width, generator=generator, dtype=torch.float64) * size).to(dtype).requires_grad_()
    packing, came = packed(sent, wire_format)
    assert came.dtype == dtype and came.shape == sent.shape and came.is_contiguous() and not came.requires_grad
    error, tile = (came.double() - sent.double()).abs(), 128
    for start in range(0, width, tile):
        of_tile = slice(start, start + tile)
        most = sent[..., of_tile].abs().amax(-1, keepdim=True).double()
        bound = ERROR[wire_format] * (most if wire_format == "int8" else sent[..., of_tile].abs().double())
        bound = bound + (most * 2.0**-9 / 448 if wire_format == "fp8" else 0)
        slack = 1e-5 * most + (2 * torch.finfo(dtype).eps * most if dtype.itemsize == 2 else 0)
        assert (error[..., of_tile] <= bound + slack).all()
    assert packing.num_bytes <= 2 * 7 * bytes_of_token(wire_format, width, dtype.itemsize) + 16
    assert packing.num_bytes >= 2 * 7 * bytes_of_token(wire_format, width, dtype.itemsize)


@pytest.mark.parametrize("wire_format", ["fp8", "int8"])
def test_a_token_does_not_depend_on_others(wire_format: str) -> None:
    """Else a token would know of later ones, and slices would change what is trained."""
    sent = torch.randn(1, 6, 200, requires_grad=True)
    louder = sent.detach().clone()
    louder[:, 3:] *= 1000
    whole, changed = (packed(each.requires_grad_(), wire_format)[1] for each in (sent, louder))
    slices = [packed(each.detach().requires_grad_(), wire_format)[1] for each in (sent[:, :2], sent[:, 2:])]
    assert torch.equal(whole[:, :3], changed[:, :3])
    assert torch.equal(whole, torch.cat(slices, 1))


@pytest.mark.parametrize("wire_format", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(wire_format: str, bad: float) -> None:
    sent = torch.ones(1, 2, 200)
    sent[0, 1, 150] = bad
    came = packed(sent.requires_grad_(), wire_format)[1]
    assert not came[0, 1, 150].isfinite()
    assert came[0, 0].tolist() == [1.0] * 200 and came[0, 1, :128].tolist() == [1.0] * 128


@pytest.mark.parametrize("wire_format", ["fp8", "int8"])
def test_zeros_and_the_smallest_numbers(wire_format: str) -> None:
    sent = torch.zeros(1, 3, 4)
    sent[0, 1] = 1e-44
    came = packed(sent.requires_grad_(), wire_format)[1]
    assert came[0, 0].tolist() == [0.0] * 4 and came.isfinite().all() and came.abs().max() <= 1e-38


def test_only_activations_are_packed_and_all_come_in_one_buffer() -> None:
    tensors = (
        torch.randn(2, 3, 40, requires_grad=True),
        torch.tensor([[True, False, True]]),
        torch.randn(2, 3, 3),  # a mask
        torch.arange(6).reshape(2, 3).T,
        torch.randn((), dtype=torch.float64, requires_grad=True),  # a sum of losses
        torch.randn(2, 3, requires_grad=True),
        torch.zeros(0, 3, 4, requires_grad=True),
        torch.randn(3, 2, 5, dtype=torch.complex64),
    )
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
    packing = Packing.of("int8", specs)
    assert packing is not None
    buffer = packing.pack(tensors)
    assert buffer.dtype == torch.uint8 and buffer.shape == (packing.num_bytes,)
    assert packing.num_bytes < sum(spec.num_bytes for spec in specs)
    came = packing.unpack(buffer)
    assert not torch.equal(came[0], tensors[0].detach())
    memories = {each.untyped_storage().data_ptr() for each in (buffer, *came) if each.numel()}
    assert len(memories) == len(tensors), "each in memory of its own"
    for sent, arrived in zip(tensors[1:], came[1:], strict=True):
        assert arrived.dtype == sent.dtype and torch.equal(arrived, sent.detach())
    assert Packing.of("int8", specs[1:]) is None and Packing.of(None, specs) is None
    assert Packing.of("fp8", (TensorSpec((2, 3, 40), torch.float32, False),)) is None, "of an evaluation"
