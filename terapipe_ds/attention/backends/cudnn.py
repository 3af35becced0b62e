"""Call cuDNN's fused attention on Hopper and newer: a dense call for the prefix, a causal one for the slice's tokens.

Its causal mask is aligned top-left, so that one call cannot do a slice; `BlockKernel` merges the two. Both together
take about 0.6 of the time of torch's FlashAttention kernel on an H100 (docs/gpu.md).
"""

from __future__ import annotations

import torch

from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import Block, BlockKernel
from terapipe_ds.attention.backends.first_use import widest_head, wrong_result
from terapipe_ds.attention.backends.fused import (
    NO_DROPOUT,
    NO_SOFTCAP,
    NO_WINDOW,
    CudaFlash,
    cuda_capability,
    cuda_refusal,
)

_aten = torch.ops.aten
_CHECKED = ((1, 4, 2, 300, 0), (1, 4, 2, 40, 1000), (2, 8, 8, 128, 129), (1, 4, 1, 2, 500))
"""(batch, query heads, key heads, queries, keys before them) that are compared with plain torch at first use."""


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
        for is_asked, reason in ((need.window, NO_WINDOW), (need.softcap, NO_SOFTCAP), (need.dropout, NO_DROPOUT)):
            if is_asked:
                return reason
        if (problem := cuda_refusal(q, need)) is not None:
            return problem
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and its backward is not deterministic"
        return wrong_result(self.forward, self.backward, _CHECKED, q.device, q.dtype, widest_head(q, need))

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
