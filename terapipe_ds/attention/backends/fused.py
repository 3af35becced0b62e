"""Call torch's fused kernels, on CPU and CUDA.

Neither takes attention dropout here: several calls make up one slice, and a kernel draws its random numbers anew
in each.
"""

from __future__ import annotations

import functools
import logging
import math

import torch

from terapipe_ds.attention.backends.bands import BandKernel
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import Block, BlockKernel
from terapipe_ds.attention.backends.reference import Reference

_aten = torch.ops.aten
_log = logging.getLogger("terapipe_ds")
_NO_DROPOUT = "it cannot replay dropout"
_NO_SOFTCAP = "it knows no softcap"
_NO_WINDOW = "it knows no window"
_MOST_ERROR = 0.02  # of bf16, whose steps are 0.4 %
_CHECKED = ((1, 4, 2, 300, 0), (1, 4, 2, 40, 88), (1, 4, 2, 40, 1000), (1, 4, 2, 1, 1000), (4, 64, 16, 64, 300))
"""(batch, query heads, key heads, queries, keys before them) for each way that torch's kernel has through a slice
(set_params_splitkv, num_splits_heuristic and mha_fwd of its flash_api.cpp): the first slice, with grouped heads; keys
that fill one block; few blocks of 64 queries before several blocks of keys, which are then divided over the processors
and merged; one query, whose group takes the place of queries; and so many blocks of queries that none is divided.
"""


class CpuFlash(BandKernel):
    """torch's fused CPU kernel: fp64, fp32, bf16 and fp16, any head dims, windows, no softcap and no dropout."""

    name = "cpu_flash"
    # The kernel computes 512 keys at a time and masks afterwards, so that a causal block of up to 512 tokens costs as
    # much as a full one: two smaller ones with a dense block beside them save a quarter of it.
    causal_tokens = 256
    # The gradients of a block are fresh memory. A few MiB come from the heap again and again, still warm; those of a
    # long prefix would be mapped and zeroed page by page on every call.
    prefix_bytes = 2 * 2**20

    def is_available(self) -> bool:
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")

    def refusal(self, q: Tensor, need: Need) -> str | None:
        if q.device.type != "cpu":
            return f"it runs on cpu, not on {q.device.type}"
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        if need.softcap:
            return _NO_SOFTCAP
        return _NO_DROPOUT if need.dropout else None

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


class CudaFlash(BlockKernel):
    """torch's own FlashAttention kernel on CUDA: bf16 and fp16, head dims that are multiples of 8 up to 256.

    Its causal mask is aligned bottom-right and it knows grouped heads (torch/nn/attention/bias.py relies on the one,
    mha_fwd and mha_bwd of its flash_api.cpp check no more than that key heads divide query heads). So one call does a
    slice; where a device gives something else than plain torch, calls on blocks do it.
    """

    name = "cuda_flash"

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return _NO_WINDOW if need.window else _NO_SOFTCAP if need.softcap else cuda_refusal(q, need)

    def forward(self, queries: Queries) -> Attended:
        """Attend in one call where that gives the right result, else in blocks."""
        return self.attend(_whole_slice(queries)) if self._takes_at_once(queries) else super().forward(queries)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, by as many calls as the forward has made."""
        if not self._takes_at_once(queries):
            return super().backward(grad, queries, attended, add_grads)
        dq, dk, dv = self.attend_backward(grad, _whole_slice(queries), attended)
        add_grads(0, dk, dv)
        return dq

    def _takes_at_once(self, queries: Queries) -> bool:
        """Return whether one call computes the slice. Any kernel takes a square block with as many key heads."""
        q = queries.q
        is_square = queries.start == 0 and q.shape[1] == queries.keys.shape[1]
        return is_square or _takes_slices(self, q.device, q.dtype, max(q.shape[-1], queries.values.shape[-1]))

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward. Torch's backward needs the state even without dropout."""
        q, k, v, is_causal, scale, _ = block
        out, lse, cum_q, cum_k, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return Attended(out, lse, (cum_q, cum_k, seed, offset))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale, _ = block
        out, lse, (cum_q, cum_k, seed, offset) = attended
        tensors, sizes = (grad, q, k, v, out, lse.contiguous(), cum_q, cum_k), (q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, *sizes, 0.0, is_causal, seed, offset, scale=scale
        )
        return dq, dk, dv


def _whole_slice(queries: Queries) -> Block:
    """Return the slice as one causal block, for a kernel that aligns its mask bottom-right."""
    return Block(queries.q, queries.keys, queries.values, True, queries.scale)


@functools.cache
def _takes_slices(kernel: CudaFlash, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether one call on a slice gives the values and gradients of plain torch in all shapes of `_CHECKED`."""
    generator = torch.Generator().manual_seed(0)  # of its own: other random numbers stay as they are
    problem = None
    for batch, heads, kv_heads, tokens, start in _CHECKED:
        q_shape, k_shape = (batch, heads, tokens, head_dim), (batch, kv_heads, start + tokens, head_dim)
        inputs = [
            torch.randn(shape, generator=generator).to(device, dtype) for shape in (q_shape, q_shape, k_shape, k_shape)
        ]
        try:
            error = _error_of_one_call(kernel, inputs, start)
        except (RuntimeError, TypeError, ValueError) as raised:
            problem = str(raised).split("\n")[0]
            break
        if not error <= _MOST_ERROR:  # NaN is in no order
            problem = f"it is {error:.1%} off for {tokens} tokens after {start}, {heads} query and {kv_heads} key heads"
            break
    if problem is not None:
        says = "sliced attention: %s takes two calls per slice on %s (%s, head dim %d), for one call was tried: %s"
        _log.warning(says, kernel.name, device, dtype, head_dim, problem)
    return problem is None


def _error_of_one_call(kernel: CudaFlash, inputs: list[Tensor], start: int) -> float:
    """Return the largest relative error of output, log-sum-exp and gradients of one call, to plain torch in fp32."""
    grad, q, k, v = inputs
    queries, plain = Queries(q, k, v, start, q.shape[-1] ** -0.5), Reference()
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]

    def add(offset: int, *parts: Tensor, again: bool) -> None:
        for total, part in zip(gradients, parts, strict=True):
            total[:, :, offset : offset + part.shape[2]].add_(part)

    sliced, expected = kernel.run(_whole_slice(queries)), plain.forward(queries)
    dq = plain.backward(grad, queries, expected, add)
    one_call = (sliced.out, sliced.lse, *kernel.run_backward(grad, _whole_slice(queries), sliced))
    pairs = zip(one_call, (expected.out, expected.lse, dq, *gradients), strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs])
    return float(errors.nan_to_num(nan=math.inf).max())


@functools.cache
def cuda_capability() -> tuple[int, int]:
    """Return the compute capability of the current NVIDIA device, (0, 0) without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability()


def cuda_refusal(q: Tensor, need: Need) -> str | None:
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    dim = max(q.shape[-1], need.value_dim or 0)
    if dim % 8 or dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {dim}"
    return _NO_DROPOUT if need.dropout else None
