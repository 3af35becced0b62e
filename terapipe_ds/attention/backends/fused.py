"""The fused kernels: torch's on CPU and CUDA, and the flash-attn package.

None of them takes attention dropout here: several calls make up one slice, and a kernel draws its random numbers anew
in each.
"""

from __future__ import annotations

import functools
import logging
import math

import torch

from terapipe_ds import compat
from terapipe_ds.attention.backends.base import AddGrads, State, Tensor
from terapipe_ds.attention.backends.blocks import BlockKernel
from terapipe_ds.attention.backends.reference import Reference

_aten = torch.ops.aten
_log = logging.getLogger("terapipe_ds")
_NO_DROPOUT = "it cannot replay dropout"
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
        """Whether this torch has the kernel."""
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        """Why it does not take such queries."""
        if q.device.type != "cpu":
            return f"it runs on cpu, not on {q.device.type}"
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        return _NO_DROPOUT if dropout_p > 0 else None

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Half precision goes through fp32: the kernel's backward is slower in half precision, whose dK, dV it rounds
        once per 64 queries."""
        return torch.float32 if dtype.itemsize < 4 else dtype

    def run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        """The kernel's forward."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse, ()

    def run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's backward."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
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
        """Whether there is an NVIDIA device of compute capability 8.0 or newer."""
        return _cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        """Why it does not take such queries."""
        return _cuda_refusal(q, dropout_p)

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        """See `Backend.forward`."""
        if self._takes_at_once(q, keys, start):
            return self.run(q, keys, values, True, scale)
        return super().forward(q, keys, values, start, scale, dropout_p)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        start: int,
        scale: float,
        dropout_p: float,
        state: State,
        add_grads: AddGrads,
    ) -> Tensor:
        """See `Backend.backward`."""
        if not self._takes_at_once(q, keys, start):
            return super().backward(grad, q, keys, values, out, lse, start, scale, dropout_p, state, add_grads)
        dq, dk, dv = self.run_backward(grad, q, keys, values, out, lse, True, scale, state)
        add_grads(0, dk, dv)
        return dq

    def _takes_at_once(self, q: Tensor, keys: Tensor, start: int) -> bool:
        """Whether one call does the slice. A square block with as many key heads is what any kernel takes."""
        is_square = start == 0 and q.shape[1] == keys.shape[1]
        return is_square or _takes_slices(self, q.device, q.dtype, q.shape[-1])

    def run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        """The kernel's forward. The state is what torch's backward asks for even without dropout."""
        out, lse, cum_q, cum_k, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return out, lse, (cum_q, cum_k, seed, offset)

    def run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's backward."""
        cum_q, cum_k, seed, offset = state
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            cum_q,
            cum_k,
            q.shape[2],
            k.shape[2],
            0.0,
            is_causal,
            seed,
            offset,
            scale=scale,
        )
        return dq, dk, dv


@functools.cache
def _takes_slices(kernel: CudaFlash, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether one call on a slice gives what plain torch gives, values and gradients, in all shapes of `_CHECKED`."""
    generator = torch.Generator().manual_seed(0)  # of its own: nobody else's random numbers change
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
        _log.warning(
            "sliced attention: %s takes two calls per slice on %s (%s, head dim %d), for one call was tried: %s",
            kernel.name,
            device,
            dtype,
            head_dim,
            problem,
        )
    return problem is None


def _error_of_one_call(kernel: CudaFlash, inputs: list[Tensor], start: int) -> float:
    """The largest relative error of output, log-sum-exp and gradients of one call, against plain torch in fp32."""
    grad, q, k, v = inputs
    scale = q.shape[-1] ** -0.5
    out, lse, state = kernel.run(q, k, v, True, scale)
    one_call = (out, lse, *kernel.run_backward(grad, q, k, v, out, lse, True, scale, state))
    plain, gradients = Reference(), list[Tensor]()
    out, lse, state = plain.forward(q, k, v, start, scale, 0.0)
    dq = plain.backward(
        grad, q, k, v, out, lse, start, scale, 0.0, state, lambda offset, dk, dv: gradients.extend((dk, dv))
    )
    pairs = zip(one_call, (out, lse, dq, *gradients), strict=True)
    errors = torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs])
    return float(errors.nan_to_num(nan=math.inf).max())


class FlashAttn:
    """The flash-attn package (2.7 or newer of version 2), found at run time.

    Its causal mask is aligned bottom-right and it knows grouped heads: one call does a slice.
    """

    name = "flash_attn"

    def is_available(self) -> bool:
        """Whether the package can be imported and there is a device for it."""
        return _cuda_capability() >= (8, 0) and _has_flash_attn()

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        """Why it does not take such queries."""
        return _cuda_refusal(q, dropout_p)

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        """See `Backend.forward`. The package takes [B, tokens, heads, D]."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, _, rng_state = _flash_attn_forward(
            *(x.transpose(1, 2) for x in (q, keys, values)),
            0.0,
            scale,
            causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out.transpose(1, 2), lse, (rng_state,)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        start: int,
        scale: float,
        dropout_p: float,
        state: State,
        add_grads: AddGrads,
    ) -> Tensor:
        """See `Backend.backward`."""
        from flash_attn.flash_attn_interface import _flash_attn_backward

        inputs = [x.transpose(1, 2) for x in (grad, q, keys, values, out)]
        dq, dk, dv = (x.new_empty(x.shape) for x in inputs[1:4])
        _flash_attn_backward(
            *inputs,
            lse,
            dq,
            dk,
            dv,
            0.0,
            scale,
            causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
            rng_state=state[0],
        )
        add_grads(0, dk.transpose(1, 2), dv.transpose(1, 2))
        return dq.transpose(1, 2)


@functools.cache
def _cuda_capability() -> tuple[int, int]:
    """The compute capability of the current NVIDIA device, (0, 0) without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability()


@functools.cache
def _has_flash_attn() -> bool:
    return compat.has_flash_attn()


def _cuda_refusal(q: Tensor, dropout_p: float) -> str | None:
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {q.shape[-1]}"
    return _NO_DROPOUT if dropout_p > 0 else None
