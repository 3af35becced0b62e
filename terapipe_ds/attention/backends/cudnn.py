"""Call cuDNN's fused attention on Hopper and newer: a dense call for the prefix, a causal one for the slice's tokens.

Its causal mask is aligned top-left, so that one call cannot do a slice; `BlockKernel` merges the two. Both together
take about 0.6 of the time of torch's FlashAttention kernel on an H100 (docs/gpu.md).
"""

from __future__ import annotations

import functools
import logging
import statistics

import torch

from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import Block, BlockKernel
from terapipe_ds.attention.backends.fused import (
    NO_SOFTCAP,
    NO_WINDOW,
    CudaFlash,
    cuda_capability,
    cuda_refusal,
    random_queries,
    widest_head,
    wrong_result,
)

_aten = torch.ops.aten
_log = logging.getLogger("terapipe_ds")
_CHECKED = ((1, 4, 2, 300, 0), (1, 4, 2, 40, 1000), (2, 8, 8, 128, 129), (1, 4, 1, 2, 500))
"""(batch, query heads, key heads, queries, keys before them) that are compared with plain torch at first use."""
_TIMED_TOKENS, _MOST_TIMED_HEADS, _TIMED_RUNS = 2048, 16, 7
_TIMED_PREFIX = 7 * _TIMED_TOKENS  # long enough that the device computes while the host calls


class Cudnn(BlockKernel):
    """cuDNN's attention by torch's operators: bf16 and fp16, head dims that are multiples of 8 up to 256.

    A slice of one token goes to torch's FlashAttention kernel: cuDNN refuses one query with one key.
    """

    name = "cudnn"
    expanded = folded = staticmethod(lambda x, heads: x)  # it takes fewer key heads than query heads

    def __init__(self) -> None:
        self._of_one_token = CudaFlash()

    def is_available(self) -> bool:
        return cuda_capability() >= (9, 0) and hasattr(_aten, "_scaled_dot_product_cudnn_attention")

    def refusal(self, q: Tensor, need: Need) -> str | None:
        if need.window or need.softcap:
            return NO_WINDOW if need.window else NO_SOFTCAP
        if (problem := cuda_refusal(q, need)) is not None:
            return problem
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and its backward is not deterministic"
        return wrong_result(self.forward, self.backward, _CHECKED, q.device, q.dtype, widest_head(q, need))

    def slower_than_flash(self, q: Tensor, need: Need) -> str | None:
        """Measure briefly on first use; return the times if torch's FlashAttention kernel is faster."""
        heads = min(q.shape[1], _MOST_TIMED_HEADS)
        try:
            own_ms, other_ms = _times_ms(self, self._of_one_token, q.device, q.dtype, heads, widest_head(q, need))
        except RuntimeError as error:  # too little memory beside the model, say
            return "it could not be timed: " + str(error).split("\n")[0]
        return None if own_ms < other_ms else f"it takes {own_ms:.3f} ms where cuda_flash takes {other_ms:.3f} ms"

    def forward(self, queries: Queries) -> Attended:
        """Attend in two calls, to the prefix and to the slice's own tokens."""
        if queries.q.shape[2] == 1:
            return self._of_one_token.forward(queries)
        return super().forward(queries)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, by the kernel that ran the forward."""
        if queries.q.shape[2] == 1:
            return self._of_one_token.backward(grad, queries, attended, add_grads)
        return super().backward(grad, queries, attended, add_grads)

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward; its log-sum-exp is [B, H, T, 1]."""
        # the call returns the log-sum-exp, by which this call is merged with the other
        q, k, v, is_causal, scale, _ = block
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return Attended(out, lse.squeeze(-1), (seed, offset))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Call the kernel's backward. Without dropout the random state changes nothing, though torch asks for it."""
        q, k, v, is_causal, scale, _ = block
        out, lse, (seed, offset) = attended
        tensors, sizes = (grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, offset), (q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, None, None, None, *sizes, 0.0, is_causal, scale=scale
        )
        return dq, dk, dv


@functools.cache
def _times_ms(
    kernel: Cudnn, flash: CudaFlash, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> tuple[float, float]:
    """Return the median milliseconds of a slice's forward and backward by each, measured in turns. Log them."""
    shape = (1, heads, heads, _TIMED_TOKENS, _TIMED_PREFIX)
    grad, queries = random_queries(shape, head_dim, device, dtype)

    def once(backend: BlockKernel) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        backend.backward(grad, queries, backend.forward(queries), lambda offset, dk, dv, again=False: None)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    # in turns: the clock of a device drifts while it warms up
    pairs = [(once(kernel), once(flash)) for _ in range(2 + _TIMED_RUNS)][2:]
    own_ms, other_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    message = "sliced attention: a slice of %d tokens takes %.3f ms by %s and %.3f ms by %s (%s, %d heads of %d)"
    _log.info(message, _TIMED_TOKENS, own_ms, kernel.name, other_ms, flash.name, dtype, heads, head_dim)
    return own_ms, other_ms
