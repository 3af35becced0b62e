"""How far two results may lie apart that are equal but for rounding.

Whole and sliced sums have other orders, and fused kernels round other intermediate results: what is equal on paper
differs by some units of the dtype's precision. A fault differs by much more, because whole slices see other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """``relative``: allowed ||a - b|| / max(||b||, floor). ``floor``: as a share of the largest norm beside it, for
    what is zero on paper (the gradient of a bias of the keys, say) and has rounding only."""

    relative: float
    floor: float


# Units of precision: 2^-53, 2^-24, 2^-11 (fp16), 2^-8 (bf16). fp64 has room to spare. fp32 allows for long sums and for
# exponentials of large scores; fp16 and bf16 for a handful of roundings in one layer.
TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-2),
    torch.float32: Tolerance(2e-4, 0.1),
    torch.float16: Tolerance(1e-2, 0.2),
    torch.bfloat16: Tolerance(5e-2, 0.2),
}
# Of a loss and its gradients, on the same outputs: only the order of the sums differs.
LOSS_TOLERANCES = {
    torch.float64: Tolerance(1e-6, 0.1),
    torch.float32: Tolerance(1e-4, 0.1),
    torch.float16: Tolerance(2e-2, 0.2),
    torch.bfloat16: Tolerance(2e-2, 0.2),
}
_ROWS = 1024
_NUMBERS = 2**22
_TF32 = Tolerance(1e-2, 0.1)  # products with ten bits


def tolerance_of(dtypes: set[torch.dtype], device: torch.device) -> Tolerance:
    """Of the least precise of ``dtypes``."""
    known = [TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES]
    if device.type == "cuda" and torch.float32 in dtypes and torch.backends.cuda.matmul.allow_tf32:
        known.append(_TF32)
    return max(known, key=lambda t: t.relative, default=TOLERANCES[torch.float32])


def loss_tolerance(dtypes: set[torch.dtype]) -> Tolerance:
    """Of the least precise of ``dtypes``, those of the outputs that the loss is computed from."""
    known = [LOSS_TOLERANCES[dtype] for dtype in dtypes if dtype in LOSS_TOLERANCES]
    return max(known, key=lambda t: t.relative, default=LOSS_TOLERANCES[torch.float32])


@dataclass(frozen=True)
class Difference:
    """Of two tensors: the largest absolute difference, and the relative one that counts."""

    largest: float
    relative: float

    def __str__(self) -> str:
        return f"{self.largest:.2g}"


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> Difference:
    """Of ``a`` from ``b``, where ``floor`` is the least norm that counts for ``b``. Infinite where only one of the two
    is finite, or shapes differ."""
    if a.shape != b.shape:
        return Difference(float("inf"), float("inf"))
    finite_a = finite_b = same = True
    largest = apart = norm = 0.0
    for x, y in zip(_in_pieces(a), _in_pieces(b), strict=True):
        finite_a, finite_b = finite_a and bool(x.isfinite().all()), finite_b and bool(y.isfinite().all())
        same = same and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        difference_of_piece = x - y
        largest = max(largest, float(difference_of_piece.abs().max()))
        apart, norm = math.hypot(apart, float(difference_of_piece.norm())), math.hypot(norm, float(y.norm()))
    if not (finite_a and finite_b):  # a mask of -inf, say
        return Difference(0.0, 0.0) if not finite_b and (same or not finite_a) else Difference(math.inf, math.inf)
    return Difference(largest, apart / max(norm, floor, 1e-300)) if apart else Difference(0.0, 0.0)


def norm_of(tensor: Tensor) -> float:
    """In fp64."""
    return math.hypot(*(float(piece.norm()) for piece in _in_pieces(tensor)))


def _in_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Its numbers in fp64, some at a time: all of a large weight's gradient would take several times its memory."""
    return (piece.double() for piece in tensor.detach().flatten().split(_NUMBERS) if piece.numel())


def worst_rows(a: Tensor, b: Tensor, tolerance: Tolerance) -> Tensor:
    """For each token, the first dimension of both: whether it differs by more than ``tolerance``. Per token, because
    one wrong token must not drown in a long sequence; with a floor, because tokens may be next to zero."""
    pieces = [
        _apart_and_norm(x, y) for x, y in zip(a.detach().split(_ROWS), b.detach().split(_ROWS), strict=True)
    ]  # in pieces: in fp64 the logits of a long sequence would take eight bytes for each number
    apart, norms = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    finite = norms[torch.isfinite(norms)]
    floor = tolerance.floor * float(finite.max()) if finite.numel() else 0.0
    wrong = apart > tolerance.relative * norms.clamp_min(max(floor, 1e-300))
    return wrong | (torch.isfinite(norms) & ~torch.isfinite(apart))


def _apart_and_norm(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """||a - b|| and ||b|| of each row."""
    rows_a, rows_b = (x.reshape(x.shape[0], -1).double() for x in (a, b))
    return (rows_a - rows_b).norm(dim=1), rows_b.norm(dim=1)
