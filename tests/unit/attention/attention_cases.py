"""What the attention tests share: attention by hand, and a run over slices as an engine does it."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, set_backend, sliced_attention
from terapipe_ds.attention.document_edges import Documents, Starts
from tests.small_models.mixers import attention_by_hand

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

torch.set_num_threads(1)


class Result(NamedTuple):
    """Output and gradients over the whole sequence, [B, H, L, D] and [B, H_kv, L, D]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def random_inputs(
    shape: tuple[int, int, int, int, int] = (2, 4, 4, 20, 8), dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """q, k, v and the gradient of the output, for (B, H, H_kv, L, D)."""
    batch, heads, kv_heads, length, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, h, length, dim, dtype=torch.float64, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def kernel_attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of [B, H, T, D]; key heads are repeated for their groups. `keep` is of dropout."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT).double() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    probs = torch.softmax(scores, -1).to(v.dtype)
    return (probs if keep is None else (probs * keep).to(v.dtype)) @ v, scores.logsumexp(-1)


def kernel_gradients(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    hidden: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    keep: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return dQ, dK, dV by the kernels' formula, from `out` and `lse` as they are given."""
    (q, k, v), kv_heads = inputs, inputs[1].shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (k, v))
    scores = (q @ k.mT).double() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    probs = torch.exp(scores - lse.unsqueeze(-1)).to(q.dtype)
    keep = torch.ones_like(probs) if keep is None else keep.to(probs.dtype)
    d_scores = probs * (grad @ v.mT * keep - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (kv_heads, -1)).sum(2) for x, y in ((d_scores, q), (probs * keep, grad)))
    return d_scores @ k, dk, dv


def run_plain(inputs: Sequence[Tensor], scale: float | None = None, calls: int = 1) -> Result:
    """Output and gradients without slices, in fp64; each further call takes the output before as values."""
    *qkv, grad = (x.detach().double() for x in inputs)
    q, k, out = leaves = [x.clone().requires_grad_() for x in qkv]
    for _ in range(calls):
        out = attention_by_hand(q, k, out, scale=scale)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, grad))


def slices_of(
    lengths: Sequence[int], store: SliceStore | None, starts: Starts | None = None, **fields: Any
) -> list[ActiveSlice]:
    """The active slices of one micro-batch, in order; documents start at `starts`."""
    spans = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return [
        ActiveSlice(
            *span, sum(lengths), slice_id=i, store=store, documents=starts and Documents(starts, *span), **fields
        )
        for i, span in enumerate(spans)
    ]


class MicroBatch:
    """One micro-batch, forward and backward slice by slice, as an engine would run it."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        lengths: Sequence[int],
        store: SliceStore,
        attend: Attend | None = None,
        needs_grad: Sequence[bool] = (True, True, True),
        **fields: Any,
    ) -> None:
        self.slices = slices_of(lengths, store, **fields)
        self.attend = attend or (lambda q, k, v: sliced_attention(q, k, v, "layer"))
        self.leaves = [
            [x[:, :, s.start : s.stop].clone().requires_grad_(n) for x, n in zip(inputs, needs_grad, strict=False)]
            for s in self.slices
        ]
        self.grads = [inputs[3][:, :, s.start : s.stop] for s in self.slices]
        self.outs: list[Tensor | None] = [None] * len(lengths)
        self.store = store

    def forward(self, i: int) -> Tensor:
        with push_slice(self.slices[i]):
            out = self.attend(*self.leaves[i])
        self.outs[i] = out
        return out

    def backward(self, i: int) -> None:
        out = self.outs[i]
        assert out is not None
        with push_slice(self.slices[i].replace(mode="recompute")):
            torch.autograd.backward(out, self.grads[i])

    def forward_all(self) -> None:
        for i in range(len(self.slices)):
            self.forward(i)

    def backward_all(self) -> None:
        for i in reversed(range(len(self.slices))):
            self.backward(i)
        self.store.release(self.slices[0].part_id, self.slices[0].micro_batch_id)

    def result(self) -> Result:
        outs = torch.cat([out.detach() for out in self.outs if out is not None], dim=2)
        grads = [
            [torch.zeros_like(x) if x.grad is None else x.grad for x in xs] for xs in zip(*self.leaves, strict=True)
        ]
        return Result(outs, *(torch.cat(of_slices, dim=2) for of_slices in grads))


def run_sliced(
    inputs: Sequence[Tensor], lengths: Sequence[int], store: SliceStore | None = None, **options: Any
) -> Result:
    """Output and gradients of one micro-batch in slices; the store is drained afterwards."""
    store = store or SliceStore()
    micro_batch = MicroBatch(inputs, lengths, store, **options)
    micro_batch.forward_all()
    micro_batch.backward_all()
    store.assert_drained()
    return micro_batch.result()


def largest_error(result: Result, expected: Result) -> float:
    """The largest relative error of the four tensors, ||a - b|| / ||b||."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(result, expected, strict=True))


@contextlib.contextmanager
def forced(backend: str | None) -> Iterator[None]:
    set_backend(backend)
    try:
        yield
    finally:
        set_backend(None)
