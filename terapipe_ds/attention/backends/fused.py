"""Call the fused kernels: torch's on CPU and CUDA, and the flash-attn package.

None of them takes attention dropout here: several calls make up one slice, and a kernel draws its random numbers anew
in each.
"""

from __future__ import annotations

import functools
import logging
import math

import torch

from terapipe_ds import compat
from terapipe_ds.attention.backends.base import AddGrads, Attended, Queries, Tensor
from terapipe_ds.attention.backends.blocks import Block, BlockKernel
from terapipe_ds.attention.backends.reference import Reference

_aten = torch.ops.aten
_log = logging.getLogger("terapipe_ds")
_NO_DROPOUT = "it cannot replay dropout"
_NO_EXTRAS = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
_MOST_ERROR = 0.02  # of bf16, whose steps are 0.4 %
_CHECKED = ((1, 4, 2, 300, 0), (1, 4, 2, 40, 88), (1, 4, 2, 40, 1000), (1, 4, 2, 1, 1000), (4, 64, 16, 64, 300))
"""(batch, query heads, key heads, queries, keys before them) for each way that torch's kernel has through a slice
(set_params_splitkv, num_splits_heuristic and mha_fwd of its flash_api.cpp): the first slice, with grouped heads; keys
that fill one block; few blocks of 64 queries before several blocks of keys, which are then divided over the processors
and merged; one query, whose group takes the place of queries; and so many blocks of queries that none is divided.
"""


class CpuFlash(BlockKernel):
    """torch's fused CPU kernel: fp64, fp32, bf16 and fp16, any head dim, no dropout."""

    name = "cpu_flash"
    # The kernel computes 512 keys at a time and masks afterwards, so that a causal block of up to 512 tokens costs as
    # much as a full one: two smaller ones with a dense block beside them save a quarter of it.
    causal_tokens = 256
    # The gradients of a block are fresh memory. A few MiB come from the heap again and again, still warm; those of a
    # long prefix would be mapped and zeroed page by page on every call.
    prefix_bytes = 2 * 2**20

    def is_available(self) -> bool:
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        if q.device.type != "cpu":
            return f"it runs on cpu, not on {q.device.type}"
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        return _NO_DROPOUT if dropout_p > 0 else None

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for half precision, in which the kernel's backward is slower and rounds dK, dV per 64 queries."""
        return torch.float32 if dtype.itemsize < 4 else dtype

    def run(self, block: Block) -> Attended:
        q, k, v, is_causal, scale = block
        return Attended(*_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale = block
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, attended.out, attended.lse, 0.0, is_causal, scale=scale
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
        return _cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        return _cuda_refusal(q, dropout_p)

    def forward(self, queries: Queries) -> Attended:
        """Attend in one call where that gives the right result, else in blocks."""
        return self.run(_whole_slice(queries)) if self._takes_at_once(queries) else super().forward(queries)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, by as many calls as the forward has made."""
        if not self._takes_at_once(queries):
            return super().backward(grad, queries, attended, add_grads)
        dq, dk, dv = self.run_backward(grad, _whole_slice(queries), attended)
        add_grads(0, dk, dv)
        return dq

    def _takes_at_once(self, queries: Queries) -> bool:
        """Return whether one call computes the slice. Any kernel takes a square block with as many key heads."""
        q = queries.q
        is_square = queries.start == 0 and q.shape[1] == queries.keys.shape[1]
        return is_square or _takes_slices(self, q.device, q.dtype, q.shape[-1])

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward. Torch's backward needs the state even without dropout."""
        q, k, v, is_causal, scale = block
        out, lse, cum_q, cum_k, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return Attended(out, lse, (cum_q, cum_k, seed, offset))

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, is_causal, scale = block
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
    queries, plain, gradients = Queries(q, k, v, start, q.shape[-1] ** -0.5), Reference(), list[Tensor]()
    sliced, expected = kernel.run(_whole_slice(queries)), plain.forward(queries)
    dq = plain.backward(grad, queries, expected, lambda offset, dk, dv: gradients.extend((dk, dv)))
    one_call = (sliced.out, sliced.lse, *kernel.run_backward(grad, _whole_slice(queries), sliced))
    pairs = zip(one_call, (expected.out, expected.lse, dq, *gradients), strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs])
    return float(errors.nan_to_num(nan=math.inf).max())


class FlashAttn:
    """The flash-attn package (2.7 or newer of version 2), found at run time.

    Its causal mask is aligned bottom-right and it knows grouped heads: one call does a slice.
    """

    name = "flash_attn"

    def is_available(self) -> bool:
        return _cuda_capability() >= (8, 0) and _has_flash_attn()

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        return _cuda_refusal(q, dropout_p)

    def forward(self, queries: Queries) -> Attended:
        """Attend in one call. The package takes [B, tokens, heads, D]."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        inputs = (x.transpose(1, 2) for x in queries[:3])
        out, lse, _, rng_state = _flash_attn_forward(
            *inputs, 0.0, queries.scale, causal=True, **_NO_EXTRAS, return_softmax=False
        )
        return Attended(out.transpose(1, 2), lse, (rng_state,))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        inputs = [x.transpose(1, 2) for x in (grad, *queries[:3], attended.out)]
        dq, dk, dv = gradients = tuple(x.new_empty(x.shape) for x in inputs[1:4])
        options = {"causal": True, **_NO_EXTRAS, "deterministic": False, "rng_state": attended.state[0]}
        _flash_attn_backward(*inputs, attended.lse, *gradients, 0.0, queries.scale, **options)
        add_grads(0, dk.transpose(1, 2), dv.transpose(1, 2))
        return dq.transpose(1, 2)


@functools.cache
def _cuda_capability() -> tuple[int, int]:
    """Return the compute capability of the current NVIDIA device, (0, 0) without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability()


_has_flash_attn = functools.cache(compat.has_flash_attn)


def _cuda_refusal(q: Tensor, dropout_p: float) -> str | None:
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {q.shape[-1]}"
    return _NO_DROPOUT if dropout_p > 0 else None
