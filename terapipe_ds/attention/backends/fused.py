"""Call torch's fused kernels of the CPU and of cuDNN, which take a slice in several calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from terapipe_ds.attention.active_slice import active_slice
from terapipe_ds.attention.backends.base import (
    AddGrads,
    Attended,
    Need,
    Queries,
    Tensor,
    fold_groups,
    unfold_groups,
)
from terapipe_ds.attention.backends.blocks import Block, BlockKernel
from terapipe_ds.attention.backends.first_use import builds_plans, wrong_kernel
from terapipe_ds.attention.backends.flash_attn import (
    NO_DROPOUT,
    NO_SOFTCAP,
    CudaFlash,
    cuda_capability,
    cuda_refusal,
)
from terapipe_ds.messages import logger

_aten = torch.ops.aten
_MOST_SHAPES = 128  # for which cuDNN builds plans: of lengths that vary, most are new


class CpuFlash(BlockKernel):
    """torch's fused CPU kernel: fp64, fp32, bf16 and fp16, any head dims, windows, no softcap and no dropout."""

    name = "cpu_flash"
    # The kernel computes 512 keys at a time and masks afterwards, so that a causal block of up to 512 tokens costs as
    # much as a full one: two smaller ones with a dense block beside them save a quarter of it.
    causal_tokens = 256
    # The gradients of a block are fresh memory. The heap hands out the same few MiB again and again, still warm; for
    # a long prefix the memory would be mapped and zeroed page by page on every call.
    prefix_bytes = 2 * 2**20
    windowed_tokens = 128  # the most queries of a call with a window

    def is_available(self) -> bool:
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")

    def refusal(self, q: Tensor, need: Need) -> str | None:
        if q.device.type != "cpu":
            return f"it runs on cpu, not on {q.device.type}"
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        if need.softcap:
            return NO_SOFTCAP
        return NO_DROPOUT if need.dropout else None

    def forward(self, queries: Queries) -> Attended:
        """Attend. With a window, a few queries at a time attend to the keys in their reach, by a mask."""
        if queries.window is None:
            return super().forward(queries)
        q, values = queries.q, queries.values
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, values.shape[3]).transpose(1, 2)
        lse = q.new_empty(batch, heads, tokens, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, _, block in self._windowed(queries, q.dtype):
            of_rows = self.attend(block)
            for target, part in ((out, of_rows.out), (lse, of_rows.lse)):
                target[:, :, rows] = unfold_groups(part, heads, rows.stop - rows.start)
        return Attended(out, lse)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ. With a window all gradients are added: calls have keys in common."""
        if queries.window is None:
            return super().backward(grad, queries, attended, add_grads)
        dtype, (heads, kv_heads) = self.backward_dtype(queries.q.dtype), (queries.q.shape[1], queries.keys.shape[1])
        dq = torch.empty_like(queries.q)
        for rows, column, block in self._windowed(queries, dtype):
            d_out, out = (fold_groups(x[:, :, rows], kv_heads).to(dtype) for x in (grad, attended.out))
            lse = attended.lse[:, :, rows].reshape(block.q.shape[:3])
            d_rows, dk, dv = self.attend_backward(d_out, block, Attended(out, lse))
            dq[:, :, rows] = unfold_groups(d_rows, heads, rows.stop - rows.start).to(dq.dtype)
            add_grads(column, dk, dv, again=True)
        return dq

    def _windowed(self, queries: Queries, dtype: torch.dtype) -> Iterator[tuple[slice, int, Block]]:
        """Yield some of the queries, the first key in their reach, and their call."""
        q, keys, values, start, scale = queries[:5]
        tokens, kv_heads, window = q.shape[2], keys.shape[1], queries.window
        assert window is not None
        # more queries in a call compute more masked scores, fewer make slow products
        size = min(self.windowed_tokens, max(64, window // 8))
        for row in range(0, tokens, size):
            rows, first = slice(row, min(row + size, tokens)), queries.first_key(row)
            mask = window_mask(rows.stop - row, start + row - first, window, dtype, q.device)
            k, v = (x[:, :, first : start + rows.stop].to(dtype) for x in (keys, values))
            folded = fold_groups(q[:, :, rows], kv_heads).to(dtype)
            yield rows, first, Block(folded, k, v, False, scale, mask.repeat(q.shape[1] // kv_heads, 1))

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for half precision, in which the kernel's backward is slower and rounds dK, dV per 64 queries."""
        return torch.float32 if dtype.itemsize < 4 else dtype

    def run(self, block: Block) -> Attended:
        q, k, v, is_causal, scale, mask = block
        return Attended(
            *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        )

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale, mask = block
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, attended.out, attended.lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv


class Cudnn(BlockKernel):
    """cuDNN's attention by torch's operators: bf16 and fp16, head dims that are multiples of 8 up to 256.

    Its causal mask is aligned top-left, so that one call cannot do a slice: a dense call for the prefix and a causal
    one for the slice's tokens are merged. Both together take about 0.6 of the time of torch's FlashAttention kernel on
    an H100 (docs/gpu.md). A slice of one token goes to that kernel: cuDNN refuses one query with one key. So do shapes
    that come after many others, or in `plans_kept`: cuDNN builds a plan for each, which takes some tenths of a second
    and stays in memory.
    """

    name = "cudnn"
    expanded = folded = staticmethod(lambda x, heads: x)  # it takes fewer key heads than query heads

    def __init__(self) -> None:
        self._flash = CudaFlash()
        self._shapes: set[tuple[object, ...]] = set()

    def is_available(self) -> bool:
        return cuda_capability() >= (9, 0) and hasattr(_aten, "_scaled_dot_product_cudnn_attention")

    def refusal(self, q: Tensor, need: Need) -> str | None:
        reasons = {
            "it knows no window": need.window,
            NO_SOFTCAP: need.softcap,
            NO_DROPOUT: need.dropout,
            "it builds a plan for each length of a document, which takes longer than the document": need.documents,
            "torch.use_deterministic_algorithms is on, and its backward is not deterministic": (
                torch.are_deterministic_algorithms_enabled()
            ),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        return reason or cuda_refusal(q, need) or wrong_kernel(self, q, need)

    def forward(self, queries: Queries) -> Attended:
        """Attend in two calls, to the prefix and to the slice's own tokens."""
        active = active_slice()
        has_backward = active is not None and active.mode != "eval"  # which has a plan of its own
        shape = queries.q.shape, queries.start, queries.keys.stride(), has_backward
        has_room = builds_plans() and len(self._shapes) < _MOST_SHAPES
        if queries.q.shape[2] > 1 and (shape in self._shapes or has_room):
            if shape not in self._shapes and len(self._shapes) == _MOST_SHAPES - 1:
                logger.info("sliced attention: cudnn has plans for %d shapes; others take cuda_flash", _MOST_SHAPES)
            self._shapes.add(shape)
            return super().forward(queries)
        attended = self._flash.forward(queries)
        return attended._replace(state=(self._flash, *attended.state))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, by the kernel that ran the forward."""
        if attended.state[0] is self._flash:
            return self._flash.backward(grad, queries, attended._replace(state=attended.state[1:]), add_grads)
        return super().backward(grad, queries, attended, add_grads)

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward; its log-sum-exp is [B, H, T, 1]."""
        q, k, v, is_causal, scale, *_ = block
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return Attended(out, lse.squeeze(-1), (seed, offset))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Call the kernel's backward. Without dropout the random state changes nothing, though torch asks for it."""
        q, k, v, is_causal, scale, *_ = block
        out, lse, (seed, offset) = attended
        tensors, sizes = (grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, offset), (q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, None, None, None, *sizes, 0.0, is_causal, scale=scale
        )
        return dq, dk, dv


@functools.lru_cache(maxsize=8)
def window_mask(tokens: int, before: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [tokens, before + tokens]: 0 where query i sees key j, which are the last `window` up to its own, or -inf.

    The first query has `before` keys before its own.
    """
    ago = (key := torch.arange(before + tokens, device=device))[before:].unsqueeze(1) - key
    hidden = (ago < 0) | (ago >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
