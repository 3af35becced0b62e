"""Compute with torch's `flex_attention` what no other CUDA kernel takes: caps, fp32, and options that come with them.

One compiled function serves all slices and layers: lengths are dynamic, and all other differences come as tensors. The
backward runs the forward again, because torch's own graph of it would hold views of the slice store, and later slices
write to that store.

The mask comes as blocks of 128 queries and 128 keys, built here from two rules: the keys that a query sees are one
range, and neither end of it moves back from one query to the next. So the keys that some query of a block sees are one
range, too. `create_block_mask` would look at every pair of a query and a key; compiled with dynamic lengths, torch 2.11
fails where there are as many queries as keys ("CantSplit").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.attention import flex_attention as flex

from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.first_use import without_modes
from terapipe_ds.attention.backends.flash_attn import cuda_capability
from terapipe_ds.attention.document_edges import to_device

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SpanKey = tuple[int, int, int, int, int]
"""A span of queries: its first row and their end, its first key, its first query and their end."""
_BLOCK = 128


def is_below_autograd() -> bool:
    """Return whether torch's dispatcher leaves autograd out here, as within an operator that a compiled layer calls."""
    key = torch._C.DispatchKey.AutogradFunctionality
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)  # type: ignore[no-any-return] # noqa: SLF001


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
        if is_below_autograd():
            return "its backward needs a graph of its forward, which torch does not record within a compiled layer"
        return None

    def forward(self, queries: Queries) -> Attended:
        with torch.no_grad():
            return Attended(*_compiled()(*_tensors(queries), queries.scale))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ. Keys that were merged into `attended` since then count by the share of the kernel's own output."""
        *inputs, mask, softcap = _tensors(queries)
        # the forward once more, over the keys as they are now: a graph of the first run would hold views of the store
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out, lse = _compiled()(*leaves, mask, softcap, queries.scale)
        # a sink that joined since then takes its share of the softmax: the kernel's own output counts for less
        share = (lse.detach() - attended.lse).exp()
        delta = (grad.to(lse.dtype) * attended.out.to(lse.dtype)).sum(-1)
        d_out = (grad * share.unsqueeze(-1)).to(grad.dtype)
        with without_modes():
            dq, dk, dv = torch.autograd.grad((out, lse), leaves, (d_out, delta * (1 - share)))
        add_grads(0, dk, dv)
        return dq


def _tensors(queries: Queries) -> tuple[Any, ...]:
    """Return q, k, v, the mask and the softcap. As a number the softcap would be compiled into the kernel."""
    q, k, v = queries[:3]
    softcap = None
    if queries.softcap is not None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        softcap = to_device(torch.tensor(queries.softcap, dtype=dtype, device="cpu"), q.device)
    spans = tuple((s.rows.start, s.rows.stop, s.first_key, s.start, s.stop) for s in queries.spans)
    return q, k, v, block_mask(q.shape[0], q.shape[2], queries.start, queries.window, spans, q.device), softcap


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # a mask that was first needed in inference must serve training later
def block_mask(
    batch: int, tokens: int, start: int, window: int | None, spans: tuple[SpanKey, ...], device: torch.device
) -> flex.BlockMask:
    """Return the mask of a slice; all layers with the same reach share it, forward and backward.

    A block is full where all its queries see all its keys, and masked by `mask_of` where only some pairs are seen. A
    block that sticks out counts as masked.
    """
    # from here on a query sees one range of keys, whatever option limits it
    first = first_keys(batch, tokens, start, window, spans)
    num_keys = start + tokens
    row, column = (torch.arange(0, n, _BLOCK, device="cpu") for n in (tokens, num_keys))
    row_last, column_last = (row + _BLOCK).clamp(max=tokens) - 1, (column + _BLOCK).clamp(max=num_keys) - 1
    # per block of queries: the first key that any of them sees, and the first key that all see; likewise the last
    seen_from, all_from = first[:, row, None], first[:, row_last, None]
    seen_to, all_to = (start + row_last)[:, None], (start + row)[:, None]
    seen = (column_last >= seen_from) & (column <= seen_to)
    whole = (row_last - row == _BLOCK - 1)[:, None] & (column_last - column == _BLOCK - 1)
    full = whole & (column >= all_from) & (column_last <= all_to)
    blocks = [_listed(kind.unsqueeze(1)) for kind in (seen & ~full, full)]
    mask = flex.BlockMask.from_kv_blocks(
        *blocks[0], *blocks[1], BLOCK_SIZE=_BLOCK, mask_mod=None, seq_lengths=(tokens, num_keys)
    )
    for name, value in vars(mask).items():
        if torch.is_tensor(value):  # its own method would wait for the device with each
            setattr(mask, name, to_device(value, device))
    mask.mask_mod = mask_of(to_device(torch.tensor(start, device="cpu"), device), to_device(first, device))
    return mask


def first_keys(batch: int, tokens: int, start: int, window: int | None, spans: tuple[SpanKey, ...]) -> Tensor:
    """Return the first key that each query sees, [B, T]."""
    first = torch.zeros(batch, tokens, dtype=torch.int64, device="cpu")
    for row, row_stop, first_key, span_start, span_stop in spans:
        first[row:row_stop, span_start - start : span_stop - start] = first_key
    if window is not None:
        own = torch.arange(start, start + tokens, device="cpu")
        first = torch.maximum(first, own - (window - 1))
    return first


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true entries of each row, and their places followed by the others' places, as torch asks."""
    places = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), places.to(torch.int32)


def mask_of(start: Tensor, first: Tensor) -> MaskFunction:
    """Return the mask as `flex_attention` asks for it: whether a query sees a key."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + start) & (key >= first[batch, query])

    return sees


def capped_by(softcap: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the function that `flex_attention` applies to each score."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask, softcap: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores.

    This avoids the kernel for few queries: torch 2.11 finds none that fits 99 queries of dynamic lengths.
    """
    options: Any = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1], "return_lse": True}
    options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    out, lse = flex.flex_attention(q, k, v, None if softcap is None else capped_by(softcap), mask, **options)
    return out, lse


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `attend` compiled. Torch compiles it a few times, until its lengths are dynamic, then never again.

    If torch gave up compiling it, it would compute all scores: `fullgraph` makes that an error. Each kind of call
    (head dims, dtype, caps, with a backward or without) counts towards torch's limit.
    """
    compiled, config = torch.compile(attend, dynamic=True, fullgraph=True), cast(Any, torch.compiler.config)

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        with without_modes(), config.patch(recompile_limit=64):
            return compiled(*inputs)

    return run
