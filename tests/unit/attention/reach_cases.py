"""What the tests of windows, caps, sinks, documents and head dims share: the formula, and a run over slices."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_cases import forced, run_sliced, slices_of
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, sliced_attention
from terapipe_ds.attention.backends.fused import CpuFlash
from terapipe_ds.attention.backends.reference import Reference
from terapipe_ds.attention.document_edges import Starts
from tests.small_models.mixers import attention_by_hand

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A sequence in slices, and what its attention asks."""

    lengths: tuple[int, ...] = (9, 10, 1)
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    starts: Starts | None = None
    recompute: bool = False
    reentrant: bool = False
    scale: float | None = None
    dropout_p: float = 0.0  # then values pick one key each, and the output shows the kept probabilities
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def length(self) -> int:
        """Return L."""
        return sum(self.lengths)

    def inputs(self) -> list[Tensor]:
        """q, k, v, the gradient of the output, and the sinks where there are some."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.value_dim)]
        shapes: list[tuple[int, ...]] = [(self.batch, h, self.length, d) for h, d in sizes]
        shapes += [(self.batch, self.heads, self.length, self.value_dim), *([(self.heads,)] if self.with_sinks else [])]
        inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype) for shape in shapes]
        if self.dropout_p:
            inputs[2] = torch.eye(self.length, self.value_dim, dtype=self.dtype).expand(shapes[2]).clone()
        return inputs

    def slices(self, store: SliceStore | None, mode: str = "train") -> list[ActiveSlice]:
        """The active slices of one micro-batch, in order."""
        return slices_of(self.lengths, store, self.starts, mode=mode)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Call sliced attention with the case's options."""
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap, "sinks": sinks}
        options["dropout_p"] = self.dropout_p
        return sliced_attention(q, k, v, "layer", scale=self.scale, **options)


def visible(case: Case) -> Tensor:
    """Return which keys each query sees, [B, 1, L, L]."""
    place = torch.arange(case.length)
    ago = place[:, None] - place
    sees = (ago >= 0) & (ago <= (case.length if case.window is None else case.window - 1))
    starts = case.starts or ((0,),) * case.batch
    document = torch.stack([sum(((place >= start).long() for start in row), torch.zeros_like(place)) for row in starts])
    return (sees & (document[:, :, None] == document[:, None])).unsqueeze(1)


def formula(
    case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, keep: Tensor | None = None
) -> Tensor:
    return attention_by_hand(
        q, k, v, softcap=case.softcap, sinks=sinks, scale=case.scale, visible=visible(case), keep=keep
    )


def run_formula(case: Case, keep: Tensor | None = None) -> list[Tensor]:
    """Output, dQ, dK, dV and the sinks' gradient in fp64; `keep` has the factors of dropout."""
    q, k, v, grad, *sinks = (x.double().requires_grad_() for x in case.inputs())
    out = formula(case, q, k, v, sinks[0] if sinks else None, keep)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), grad.detach())]


def run_in_slices(case: Case, store: SliceStore | None = None) -> list[Tensor]:
    """The same by sliced attention: forwards in order, backwards in reverse, layers recomputed if the case says so."""
    *inputs, sink = case.inputs() if case.with_sinks else (*case.inputs(), None)
    if sink is not None:
        sink.requires_grad_()

    def attend(*leaves: Tensor) -> Tensor:
        if case.recompute:
            return checkpoint(case.attend, *leaves, sink, use_reentrant=case.reentrant)  # type: ignore[no-any-return]
        return case.attend(*leaves, sink)

    found = run_sliced(inputs, case.lengths, store, attend=attend, starts=case.starts)
    return [*found, *([] if sink is None or sink.grad is None else [sink.grad])]


def run_whole(case: Case, active: ActiveSlice | None) -> list[Tensor]:
    """The same in one call: with a slice that is the whole sequence, or with none."""
    q, k, v, grad, *sinks = (x.requires_grad_() for x in case.inputs())
    with contextlib.nullcontext() if active is None else push_slice(active):
        out = case.attend(q, k, v, sinks[0] if sinks else None)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), grad.detach())]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error over the tensors, ||a - b|| / ||b||.

    A gradient may be 0 where its terms are not, as with a window of one token: then it counts against their size.
    """
    assert [x.shape for x in found] == [x.shape for x in expected]
    least = 0.05 * max(float(b.norm()) for b in expected)
    return max(float((a.double() - b).norm() / b.norm().clamp(least)) for a, b in zip(found, expected, strict=True))


@contextlib.contextmanager
def small_blocks(backend: str | None, tokens: int) -> Iterator[None]:
    """Force a backend and make its tiles, windowed calls and causal blocks so small that a short slice has several."""
    with forced(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "tile_tokens", tokens)
        patch.setattr(CpuFlash, "windowed_tokens", tokens)
        patch.setattr(CpuFlash, "causal_tokens", tokens)
        yield


@st.composite
def starts_of_rows(draw: st.DrawFn, batch: int, length: int) -> Starts:
    """Document starts, different ones for each row, now and then the same."""
    row = st.sets(st.integers(1, max(1, length - 1)), max_size=5).map(
        lambda starts: (0, *sorted(start for start in starts if start < length))
    )
    first = draw(row)
    return tuple(first if draw(st.booleans()) else draw(row) for _ in range(batch))


@st.composite
def cases(draw: st.DrawFn, softcap: bool = True) -> Case:
    """Any options together, over random sizes; slices of one token and more."""
    lengths = tuple(draw(st.lists(st.sampled_from((1, 1, 2, 3, 5, 8, 13, 40)), min_size=2, max_size=6)))
    batch, kv_heads, length = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2))), sum(lengths)
    return Case(
        lengths=lengths,
        batch=batch,
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from((4, 8, 5))),
        value_dim=draw(st.sampled_from((8, 4, 12))),
        window=draw(st.one_of(st.none(), st.integers(1, length + 2))),
        softcap=draw(st.sampled_from((None, 0.7, 5.0))) if softcap else None,
        with_sinks=draw(st.booleans()),
        starts=draw(st.one_of(st.none(), starts_of_rows(batch, length))),
        recompute=draw(st.booleans()),
        reentrant=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.3))),
        seed=draw(st.integers(0, 9)),
    )
