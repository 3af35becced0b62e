"""cuDNN's kernel and the windows of torch's FlashAttention: their formulas through stand-ins, shapes on `meta`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import (
    Tensor,
    forced,
    kernel_attend,
    kernel_gradients,
    largest_error,
    random_inputs,
    run_plain,
    run_sliced,
)
from reach_cases import Case, error, run_formula, run_in_slices

from terapipe_ds.attention import backends
from terapipe_ds.attention.backends import choose_backend, cudnn, fused
from terapipe_ds.attention.backends.base import Need, Queries
from terapipe_ds.attention.backends.cudnn import Cudnn
from terapipe_ds.attention.backends.fused import CudaFlash
from terapipe_ds.attention.backends.reference import Reference


class DeviceOps:
    """torch's operators for cuDNN and for windows, written out as an H100 was seen to compute them.

    cuDNN: the causal mask is aligned top-left, the log-sum-exp has a fourth dimension, one query with one key is
    refused, grouped heads are taken. FlashAttention: tensors are [B, tokens, heads, D], masks aligned bottom-right.
    """

    def __init__(self, shift_s: int = 0) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.shift = shift_s  # of the causal mask of cuDNN, to be wrong by

    def _top_left(self, q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + self.shift)
        return hidden if is_causal else None

    def _scaled_dot_product_flash_attention(self, *arguments: Any, scale: float) -> Any:
        q, k, v, p, is_causal, debug = arguments
        assert (p, is_causal, debug) == (0.0, True, False)
        out, lse = kernel_attend(q, k, v, self._window(q, k, k.shape[2], 0), scale)
        return out, lse, "cum_q", "cum_k", 0, 0, "seed", "offset", None

    def _scaled_dot_product_flash_attention_backward(self, *arguments: Any, scale: float) -> Any:
        grad, q, k, v, out, lse, *rest = arguments
        assert rest == ["cum_q", "cum_k", q.shape[2], k.shape[2], 0.0, True, "seed", "offset"]
        return kernel_gradients(grad, (q, k, v), self._window(q, k, k.shape[2], 0), out, lse, scale)

    def _window(self, q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
        assert right == 0 and left >= 0
        ago = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        return (ago < 0) | (ago > left)

    def _flash_attention_forward(
        self, *arguments: Any, scale: float, window_size_left: int, window_size_right: int
    ) -> Any:
        *inputs, cum_q, cum_k, max_q, max_k, p, is_causal, debug = arguments
        q, k, v = (x.transpose(1, 2) for x in inputs)
        assert (cum_q, cum_k, max_q, max_k, p, is_causal, debug) == (
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            True,
            False,
        )
        self.calls.append((q.shape[2], k.shape[2], True))
        out, lse = kernel_attend(q, k, v, self._window(q, k, window_size_left, window_size_right), scale)
        return out.transpose(1, 2), lse, "rng", "unused", None

    def _flash_attention_backward(
        self, *arguments: Any, scale: float, window_size_left: int, window_size_right: int
    ) -> Any:
        grad, q, k, v, out, lse, *rest = arguments
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        assert rest == [None, None, q.shape[2], k.shape[2], 0.0, True, "rng", "unused"] and lse.is_contiguous()
        hidden = self._window(q, k, window_size_left, window_size_right)
        return tuple(x.transpose(1, 2) for x in kernel_gradients(grad, (q, k, v), hidden, out, lse, scale))


class CudnnOps(DeviceOps):
    """With the operator's own arguments."""

    def _scaled_dot_product_cudnn_attention(self, *arguments: Any, scale: float) -> Any:  # type: ignore[override]
        q, k, v, bias, with_lse, p, is_causal, debug = arguments
        assert (bias, with_lse, p, debug) == (None, True, 0.0, False)
        if q.shape[2] == k.shape[2] == 1:
            raise RuntimeError("cuDNN Frontend error: s_q = s_kv = 1 is not supported.")
        self.calls.append((q.shape[2], k.shape[2], is_causal))
        out, lse = kernel_attend(q, k, v, self._top_left(q, k, is_causal), scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], "seed", "offset", None

    def _scaled_dot_product_cudnn_attention_backward(self, *arguments: Any, scale: float) -> Any:
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, is_causal = arguments
        assert (seed, offset, bias, cum_q, cum_k, max_q, max_k, p) == (
            "seed", "offset", None, None, None, q.shape[2], k.shape[2], 0.0,
        )  # fmt: skip
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        return kernel_gradients(grad, (q, k, v), self._top_left(q, k, is_causal), out, lse.squeeze(-1), scale)


@contextmanager
def _on_cpu(ops: DeviceOps, kernel: type, **replaced: Callable[..., Any]) -> Iterator[None]:
    """Have `kernel` run on the stand-ins, forced; where it needs another kernel for one token, on plain torch."""
    for cached in (cudnn._times_ms, fused.wrong_result):
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, cudnn):
            patch.setattr(module, "_aten", ops)
            patch.setattr(module, "cuda_refusal", lambda q, need: None)
            patch.setattr(module, "cuda_capability", lambda: (9, 0))
        for backend in backends._BACKENDS:
            if isinstance(backend, Cudnn):
                patch.setattr(backend, "_of_one_token", Reference())
        for name, stand_in in replaced.items():
            patch.setattr(cudnn, name, stand_in)
        with forced(kernel.name):  # type: ignore[attr-defined]
            yield
    for cached in (cudnn._times_ms, fused.wrong_result):
        cached.cache_clear()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["all heads", "grouped", "one key head"])
@pytest.mark.parametrize("lengths", [(9, 10, 1), (20,), (1, 19), (2, 18)])
def test_cudnn_takes_a_dense_call_and_a_causal_one(heads: tuple[int, int], lengths: tuple[int, ...]) -> None:
    inputs, ops = random_inputs((2, *heads, 20, 8)), CudnnOps()
    with _on_cpu(ops, Cudnn):
        run_sliced(inputs, lengths)  # with the comparison on first use
        ops.calls.clear()
        assert largest_error(run_sliced(inputs, lengths), run_plain(inputs)) <= 1e-12
    starts = [0, *itertools.accumulate(lengths)][:-1]
    several = [(n, p) for n, p in zip(lengths, starts, strict=True) if n > 1 and len(lengths) > 1]
    expected = [call for n, p in several for call in ([(n, n, True), (n, p, False)] if p else [(n, n, True)])]
    assert ops.calls == expected


def test_a_wrong_cudnn_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with _on_cpu(CudnnOps(), Cudnn):
        assert Cudnn().refusal(torch.zeros(1, 4, 2, 8), Need()) is None
    with pytest.raises(ValueError, match="'cudnn' was forced, but it is .*% off for 300 tokens after 0"):
        with _on_cpu(CudnnOps(shift_s=1), Cudnn):
            run_sliced(random_inputs((1, 4, 2, 20, 8)), (9, 11))


def test_the_faster_kernel_is_chosen_and_determinism_rules_cudnn_out() -> None:
    q = torch.zeros(1, 4, 2, 8)
    for own_ms, chosen in ((1.0, "cudnn"), (3.0, "cuda_flash")):
        with _on_cpu(CudnnOps(), Cudnn, _times_ms=lambda *key, own_ms=own_ms: (own_ms, 2.0)):
            backends.set_backend(None)
            assert choose_backend(q, Need()).name == chosen
            if chosen == "cuda_flash":
                assert backends.passed_over(q)["cudnn"] == "it takes 3.000 ms where cuda_flash takes 2.000 ms"
    with _on_cpu(CudnnOps(), Cudnn):
        torch.use_deterministic_algorithms(True)
        try:
            assert "use_deterministic_algorithms is on" in (Cudnn().refusal(q, Need()) or "")
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [
    Case((5, 6, 1), window=3), Case((5, 6, 1), window=1), Case((5, 6, 1), window=4, with_sinks=True, scale=0.3),
    Case((5, 7), starts=((0, 3, 9), (0, 6)), window=4, kv_heads=4), Case((5, 7), window=5, value_dim=4),
    Case((5, 4, 3), window=6, recompute=True, value_dim=12),
], ids=["window", "own token", "sinks", "documents", "narrow values", "wide values"])  # fmt: skip
def test_windows_of_torchs_flash_attention(case: Case) -> None:
    ops = DeviceOps()
    with _on_cpu(ops, CudaFlash):
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert ops.calls


def test_a_window_that_the_operator_lacks_is_refused() -> None:
    class Older:
        """A torch without the operator's windows."""

    with _on_cpu(CudnnOps(), CudaFlash):
        fused.wrong_result.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "_aten", Older())
            refusal = CudaFlash().refusal(torch.zeros(1, 4, 2, 8), Need(window=True))
    assert refusal is not None and "with a window it raised" in refusal


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["cudnn", "window"])
def test_shapes_on_meta(kernel: str, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    """The real operators of this torch: arguments, shapes and dtypes of first, later and two-token slices."""
    backend = Cudnn() if kernel == "cudnn" else CudaFlash()
    for start, tokens in ((0, 300), (300, 500), (998, 2)):
        q, grad = (torch.empty(2, heads[0], tokens, dim, dtype=dtype, device="meta") for _ in range(2))
        keys, values = (torch.empty(2, heads[1], 1000, dim, dtype=dtype, device="meta") for _ in range(2))
        seen = (x[:, :, : start + tokens] for x in (keys, values))
        queries = Queries(q, *seen, start, dim**-0.5, window=None if kernel == "cudnn" else 100)
        attended, pieces = backend.forward(queries), list[tuple[int, int]]()

        def add(offset: int, dk: Tensor, dv: Tensor, again: bool = False, pieces: Any = pieces) -> None:
            assert dk.shape == dv.shape == (2, heads[1], dk.shape[2], dim) and dk.dtype == dtype
            pieces.append((offset, offset + dk.shape[2]))

        dq = backend.backward(grad, queries, attended, add)
        assert attended.out.shape == q.shape == dq.shape and attended.lse.shape == q.shape[:3]
        assert attended.lse.dtype == torch.float32 and dq.dtype == dtype
        covered = [(0, start), (start, start + tokens)] if kernel == "cudnn" and start else [(0, start + tokens)]
        assert pieces == covered
