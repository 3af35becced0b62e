"""Compare results that are equal except for rounding.

A whole sequence and its slices are summed in different orders, and fused kernels round at different places. Such
results differ by a few units of precision. A fault makes slices see other tokens, and the difference is much larger.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from terapipe_ds.runtime.verify.tokens import PerSlice, Same, Slicing, TensorLayout


class Tolerance(NamedTuple):
    """Allow ||a - b|| / max(||b||, floor) up to `relative`; `floor` is a share of the largest norm beside ||b||."""

    relative: float
    floor: float


# For a layer, and for a loss on the same outputs, which differs only in the order of the sums. fp32 allows for long
# sums and exponentials of large scores, TF32 for products with ten bits, fp16 and bf16 for a few roundings.
_TOLERANCES = {
    torch.float64: (Tolerance(1e-9, 1e-2), Tolerance(1e-6, 0.1)),
    torch.float32: (Tolerance(2e-4, 0.1), Tolerance(1e-4, 0.1)),
    "tf32": (Tolerance(1e-2, 0.1), Tolerance(1e-4, 0.1)),
    torch.float16: (Tolerance(1e-2, 0.2), Tolerance(2e-2, 0.2)),
    torch.bfloat16: (Tolerance(5e-2, 0.2), Tolerance(2e-2, 0.2)),
}
OF_PARAMETER = "gradient of "  # the name of its result begins with this
EXACT = Tolerance(0.0, 0.0)  # integers and booleans
_ROUNDINGS = 8.0  # once fp32 agrees, slices may differ by this multiple of the rounding of the whole
_SMALLEST = 1e-300
_NUMBERS = 2**22  # in fp64 at once: the whole gradient of a large weight would take several times its memory


def tolerance_of(dtypes: Iterable[torch.dtype], of_loss: bool = False, tf32: bool = False) -> Tolerance:
    """Return the tolerance of the least precise of `dtypes`; `tf32`: products of fp32 have ten bits."""
    real = [dtype.to_real() for dtype in dtypes]
    names = ["tf32" if tf32 and dtype == torch.float32 else dtype for dtype in real]
    tolerances = [_TOLERANCES[name][of_loss] for name in names if name in _TOLERANCES]
    return max(tolerances, default=_TOLERANCES[torch.float32][of_loss])


def multiplies_in_tf32() -> bool:
    """Return whether CUDA rounds fp32 in products; `allow_tf32` raises if the program has set the newer attribute."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@dataclass(frozen=True)
class Difference:
    """Describe which result differs, by how much, and in which tokens (a mask) if it has tokens."""

    what: str  # "output", "input gradient", "gradient of NAME", "the loss", "the gradient of the loss"
    largest: float
    relative: float
    allowed: float
    tokens: Tensor | None = None

    @property
    def first_token(self) -> int | None:
        return None if self.tokens is None else int(self.tokens.nonzero()[0])

    @property
    def is_of_outputs(self) -> bool:
        return self.what.startswith("output")

    def __str__(self) -> str:
        what = self.what if self.tokens is None else f"{self.what} of tokens {self.first_token}.."
        if not math.isfinite(self.largest):
            return f"{what} is not comparable (another shape, or not finite)"
        return f"{what} differs by {self.largest:.2g} (relative {self.relative:.1g}, allowed {self.allowed:.1g})"


def compare(
    what: str, a: Tensor, b: Tensor, tolerance: Tolerance, by_token: bool = False, least_norm: float = 0.0
) -> Difference | None:
    """Compare two tensors; with `by_token` each token of [tokens, ...], so that many tokens cannot hide a wrong one.

    `least_norm` replaces ||b|| if ||b|| is smaller.
    """
    if a.shape != b.shape:
        return Difference(what, math.inf, math.inf, tolerance.relative)
    apart, norms, largest = _sizes(a, b)
    if not by_token:
        apart, norms, largest = apart.norm()[None], norms.norm()[None], largest.max()[None]
    relative = apart / norms.clamp_min(max(least_norm, tolerance.floor * float(norms.max()) * by_token, _SMALLEST))
    wrong = ~(relative <= tolerance.relative)  # NaN counts as wrong
    if not bool(wrong.any()):
        return None
    sizes = float(largest[wrong].max()), float(relative[wrong].max()), tolerance.relative
    return Difference(what, *sizes, wrong.cpu() if by_token else None)


def compare_results(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    tolerance: Tolerance,
    by_token: Container[str],
    rounding: Mapping[str, float],
    unable: list[str],
) -> list[Difference]:
    """Return the results that differ; a missing gradient counts as zero.

    Each may differ by its `rounding`, as in `allowed`. `unable` gets the results for which torch has no operator.
    """
    # compare a small gradient with the largest one of any parameter
    norms = [0.0]
    for name, gradient in (*a.items(), *b.items()):
        if name.startswith(OF_PARAMETER):
            with contextlib.suppress(NotImplementedError):
                norms.append(float(_sizes(gradient, gradient)[1].norm()))
    differences = []
    for name, result in {**b, **a}.items():
        x, y = (each.get(name, torch.zeros_like(result)) for each in (a, b))
        least_norm = tolerance.floor * max(norms) if name.startswith(OF_PARAMETER) else 0.0
        try:
            bounds = allowed(name, tolerance, rounding)
            differences.append(compare(name, x, y, bounds, by_token=name in by_token, least_norm=least_norm))
        except NotImplementedError as error:
            unable.append(f"{name} was not compared: {first_sentence(error)}")
    return list(filter(None, differences))


def compare_output(
    whole: Tensor, parts: list[Tensor], tolerance: Tolerance, slicing: Slicing, unable: list[str]
) -> tuple[TensorLayout, Difference | None]:
    """Return the layout of an output (if several are possible, one without a difference), and the difference."""
    layouts = slicing.layouts_of(whole, parts)
    try:
        pairs: list[tuple[TensorLayout, Difference | None]] = []
        for layout in layouts:  # all: tensor-parallel ranks do the same
            joined, expected = slicing.joined(layout, parts), slicing.joined(layout, [whole])
            pairs.append((layout, compare("output", joined, expected, tolerance, by_token=True)))
        # several dimensions may have the sizes of slices: a dimension without a difference is right
        if pairs:
            return next((pair for pair in pairs if pair[1] is None), pairs[0])
        if not any(compare("output", part, whole, tolerance) for part in parts):
            return Same(), None
        per_slice, has_tokens = PerSlice(tuple(parts)), any(part.shape != whole.shape for part in parts)
        joined = whole.new_empty(0) if has_tokens else slicing.joined(per_slice, parts)
        return per_slice, compare("output without tokens", joined, whole, tolerance)
    except NotImplementedError as error:
        unable.append(f"an output was not compared: {first_sentence(error)}")
        return layouts[0] if layouts else Same(), None


def allowed(what: str, tolerance: Tolerance, rounding: Mapping[str, float]) -> Tolerance:
    """Return the tolerance of one result, which may differ by as much as its measured `rounding`."""
    return tolerance._replace(relative=max(tolerance.relative, _ROUNDINGS * rounding.get(what, 0.0)))


def is_real(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are rounded: floats, or pairs of them."""
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, as real ones, in a dtype that has all operators."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in _TOLERANCES else tensor


def _sizes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||a - b||, ||b|| and the largest |a - b| of each row, in fp64. Equal infinities (masks) do not differ."""
    a, b = (each if each.dim() > 1 else each.reshape(-1, 1) for each in map(_numbers, (a, b)))
    if not a.numel():  # torch knows no largest number of none
        return (a.new_zeros(1, dtype=torch.float64),) * 3
    sizes = []
    # in pieces, because fp64 takes several times the memory
    rows = max(1, _NUMBERS // max(1, b[:1].numel()))
    for pair in zip(a.split(rows), b.split(rows), strict=True):
        x, y = (part.reshape(len(part), -1).double() for part in pair)
        apart = (x - y).masked_fill(x == y, 0.0)
        norms = y.masked_fill(~y.isfinite(), 0.0).norm(dim=1)
        sizes.append((apart.norm(dim=1), norms, apart.norm(math.inf, dim=1)))
    apart, norms, largest = (torch.cat(each) for each in zip(*sizes, strict=True))
    return apart, norms, largest


def first_sentence(error: object) -> str:
    """Return the first sentence of an error's text: torch lists all its backends after it."""
    return str(error).split("\n")[0].split(". ")[0]
