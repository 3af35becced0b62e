"""Compute with torch's `flex_attention` on CUDA what no other kernel there takes: windows, caps, documents, head dims.

One compiled function serves all slices and layers: lengths are dynamic, and what else differs comes as tensors. The
backward runs the forward again, for torch's own graph of it would hold views of the slice store, which later slices
write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.attention import flex_attention as flex

from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.fused import cuda_capability

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex:
    """torch.nn.attention.flex_attention, compiled: CUDA, fp32, bf16 and fp16, head dims from 16 on."""

    name = "flex"
    takes_documents = True

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, need: Need) -> str | None:
        if q.device.type != "cuda":
            return f"it runs on cuda, not on {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        if min(q.shape[-1], need.value_dim or q.shape[-1]) < 16:
            return "it takes head dims from 16 on"
        if need.dropout:
            return "it cannot replay dropout"
        if not (need.window or need.softcap or need.documents or need.value_dim):
            return "it is only used where attention is more than plainly causal"
        return None

    def forward(self, queries: Queries) -> Attended:
        with torch.no_grad():
            return Attended(*_compiled()(*queries[:3], *_numbers(queries), queries.scale))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ. Keys that were merged into `attended` since weigh in as the share of the kernel's own output."""
        leaves = [x.detach().requires_grad_() for x in queries[:3]]
        with torch.enable_grad():
            out, lse = _compiled()(*leaves, *_numbers(queries), queries.scale)
        share = (lse.detach() - attended.lse).exp()
        delta = (grad.to(lse.dtype) * attended.out.to(lse.dtype)).sum(-1)
        d_out = (grad * share.unsqueeze(-1)).to(grad.dtype)
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (d_out, delta * (1 - share)))
        add_grads(0, dk, dv)
        return dq


def _numbers(queries: Queries) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return as tensors what differs from slice to slice: the keys before it, the first key per query, the softcap.

    As numbers they would be compiled into the kernel.
    """
    q, device = queries.q, queries.q.device
    first = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64)
    for span in queries.spans:
        first[span.rows, span.start - queries.start : span.stop - queries.start] = span.first_key
    if queries.window is not None:
        own = torch.arange(queries.start, queries.start + q.shape[2])
        first = torch.maximum(first, own - (queries.window - 1))
    softcap = None
    if queries.softcap is not None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        softcap = torch.tensor(queries.softcap, dtype=dtype).to(device, non_blocking=True)
    start = torch.tensor(queries.start).to(device, non_blocking=True)
    return start, first.to(device, non_blocking=True), softcap


def mask_of(start: Tensor, first: Tensor) -> MaskFunction:
    """Return the mask as `flex_attention` asks for it: whether a query sees a key."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + start) & (key >= first[batch, query])

    return sees


def capped_by(softcap: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return what `flex_attention` does to each score."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def attend(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, first: Tensor, softcap: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores."""
    sizes: Any = {"B": q.shape[0], "H": None, "Q_LEN": q.shape[2], "KV_LEN": k.shape[2]}
    mask = flex.create_block_mask(mask_of(start, first), **sizes, device=q.device)
    options: Any = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1], "return_lse": True}
    out, lse = flex.flex_attention(q, k, v, None if softcap is None else capped_by(softcap), mask, **options)
    return out, lse


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `attend` compiled: a few times at first, until its lengths are dynamic, then never again.

    It would compute all scores where torch gives up to compile it: `fullgraph` makes that an error. Each kind of call
    (head dims, dtype, caps, with a backward or without) counts towards torch's limit.
    """
    compiled, config = torch.compile(attend, dynamic=True, fullgraph=True), cast(Any, torch.compiler.config)

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        with config.patch(recompile_limit=64):
            return compiled(*inputs)

    return run
