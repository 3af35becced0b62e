"""Call torch's fused kernels, on CPU and CUDA.

Attention dropout needs one call per slice, because a kernel draws its random numbers anew in each call.
"""

from __future__ import annotations

import functools

import torch

from terapipe_ds.attention.backends.bands import BandKernel
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import Block, BlockKernel, as_wide
from terapipe_ds.attention.backends.first_use import CHECKED, widest_head, wrong_kernel, wrong_result
from terapipe_ds.messages import logger

_aten = torch.ops.aten
_CHECKED_BY_CUDNN = ((1, 4, 2, 300, 0), (1, 4, 2, 40, 1000), (2, 8, 8, 128, 129), (1, 4, 1, 2, 500))
"""(batch, query heads, key heads, queries, keys before them) that are compared with plain torch at first use."""
NO_DROPOUT = "it cannot replay dropout"
NO_SOFTCAP = "it knows no softcap"
NO_WINDOW = "it knows no window"


class CpuFlash(BandKernel):
    """torch's fused CPU kernel: fp64, fp32, bf16 and fp16, any head dims, windows, no softcap and no dropout."""

    name = "cpu_flash"
    # The kernel computes 512 keys at a time and masks afterwards, so that a causal block of up to 512 tokens costs as
    # much as a full one: two smaller ones with a dense block beside them save a quarter of it.
    causal_tokens = 256
    # The gradients of a block are fresh memory. The heap hands out the same few MiB again and again, still warm; for
    # a long prefix the memory would be mapped and zeroed page by page on every call.
    prefix_bytes = 2 * 2**20

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

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for half precision, in which the kernel's backward is slower and rounds dK, dV per 64 queries."""
        return torch.float32 if dtype.itemsize < 4 else dtype

    def run(self, block: Block) -> Attended:
        q, k, v, is_causal, scale, mask, _ = block
        return Attended(
            *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        )

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale, mask, _ = block
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, attended.out, attended.lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv


class CudaFlash(BlockKernel):
    """torch's own FlashAttention kernel on CUDA: bf16 and fp16, head dims in multiples of 8 to 256, windows, dropout.

    Its causal mask is aligned bottom-right, and torch/nn/attention/bias.py relies on that. It knows grouped heads:
    mha_fwd and mha_bwd of its flash_api.cpp only check that key heads divide query heads. So one call does a slice;
    if the result on a device differs from plain torch, calls on blocks do it.
    """

    name = "cuda_flash"

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, need: Need) -> str | None:
        if need.softcap:
            return NO_SOFTCAP
        if (problem := cuda_refusal(q, need)) is not None or not (need.window or need.dropout):
            return problem
        if need.dropout and not _takes_slices(self, q.device, q.dtype, widest_head(q, need)):
            return "one call per slice is wrong here, and several calls cannot replay dropout"
        # a window is none for slices that it does not limit
        kinds = {need, need._replace(window=False)} if need.dropout else {need}
        return next(filter(None, (wrong_kernel(self, q, kind) for kind in kinds)), None)

    def forward(self, queries: Queries) -> Attended:
        """Attend in one call if that gives the right result, else in blocks."""
        if queries.window is not None:
            return self._forward_windowed(queries)
        return self.forward_at_once(queries) if self._takes_at_once(queries) else super().forward(queries)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, by as many calls as the forward has made."""
        if queries.window is not None:
            return self._backward_windowed(grad, queries, attended, add_grads)
        if not self._takes_at_once(queries):
            return super().backward(grad, queries, attended, add_grads)
        return self.backward_at_once(grad, queries, attended, add_grads)

    def forward_at_once(self, queries: Queries) -> Attended:
        """Attend in one call: the kernel aligns its causal mask bottom-right."""
        return self.attend(_whole_block(queries))

    def backward_at_once(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ of a forward in one call."""
        dq, dk, dv = self.attend_backward(grad, _whole_block(queries), attended)
        add_grads(0, dk, dv)
        return dq

    def _forward_windowed(self, queries: Queries) -> Attended:
        """Call the operator beneath, which takes a window; its tensors are [B, tokens, heads, D]."""
        q, k, v = (x.transpose(1, 2) for x in as_wide(*queries[:3]))
        out, lse, *state, _ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], queries.dropout_p, True, False, **_window_options(queries)
        )
        return Attended(out.transpose(1, 2)[..., : queries.values.shape[3]], lse, tuple(state))

    def _backward_windowed(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        wide_grad, q, k, v, out = (x.transpose(1, 2) for x in as_wide(grad, *queries[:3], attended.out))
        tensors, sizes = (wide_grad, q, k, v, out, attended.lse.contiguous(), None, None), (q.shape[1], k.shape[1])
        gradients = _aten._flash_attention_backward(
            *tensors, *sizes, queries.dropout_p, True, *attended.state, **_window_options(queries)
        )
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        dim, value_dim = queries.keys.shape[3], queries.values.shape[3]
        add_grads(0, dk[..., :dim], dv[..., :value_dim])
        return dq[..., :dim]

    def _takes_at_once(self, queries: Queries) -> bool:
        """Return whether one call computes the slice. Any kernel takes a square block with as many key heads."""
        q = queries.q
        is_square = queries.start == 0 and q.shape[1] == queries.keys.shape[1]
        return is_square or _takes_slices(self, q.device, q.dtype, max(q.shape[-1], queries.values.shape[-1]))

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward. Torch's backward needs the state even without dropout."""
        q, k, v, is_causal, scale, _, dropout_p = block
        out, lse, cum_q, cum_k, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )
        return Attended(out, lse, (cum_q, cum_k, seed, offset))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale, _, dropout_p = block
        out, lse, (cum_q, cum_k, seed, offset) = attended
        tensors, sizes = (grad, q, k, v, out, lse.contiguous(), cum_q, cum_k), (q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, *sizes, dropout_p, is_causal, seed, offset, scale=scale
        )
        return dq, dk, dv


class Cudnn(BlockKernel):
    """cuDNN's attention by torch's operators: bf16 and fp16, head dims that are multiples of 8 up to 256.

    Its causal mask is aligned top-left, so that one call cannot do a slice: a dense call for the prefix and a causal
    one for the slice's tokens are merged. Both together take about 0.6 of the time of torch's FlashAttention kernel on
    an H100 (docs/gpu.md). A slice of one token goes to that kernel: cuDNN refuses one query with one key.
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
        return wrong_result(self.forward, self.backward, _CHECKED_BY_CUDNN, q.device, q.dtype, widest_head(q, need))

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


@functools.cache
def _takes_slices(kernel: CudaFlash, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether one call on a slice gives the values and gradients of plain torch in all shapes of `CHECKED`."""
    problem = wrong_result(kernel.forward_at_once, kernel.backward_at_once, CHECKED, device, dtype, head_dim)
    if problem is not None:
        says = "sliced attention: %s takes two calls per slice on %s (%s, head dim %d), for one call was tried: %s"
        logger.warning(says, kernel.name, device, dtype, head_dim, problem)
    return problem is None


def _whole_block(queries: Queries) -> Block:
    return Block(*queries[:3], True, queries.scale, dropout_p=queries.dropout_p)


def _window_options(queries: Queries) -> dict[str, float | int]:
    assert queries.window is not None
    return {"scale": queries.scale, "window_size_left": queries.window - 1, "window_size_right": 0}


@functools.cache
def cuda_capability() -> tuple[int, int]:
    """Return the compute capability of the current NVIDIA device, (0, 0) without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability()


def cuda_refusal(q: Tensor, need: Need) -> str | None:
    """Return why no kernel of FlashAttention or cuDNN takes such queries, whatever else the call needs."""
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    dim = widest_head(q, need)
    if dim % 8 or dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {dim}"
    return None
