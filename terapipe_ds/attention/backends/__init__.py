"""Choose the kernel that computes sliced attention, automatically or as forced, and log the choice once.

In order of preference:
  flash_attn  the flash-attn package, where installed: CUDA, bf16 and fp16
  cuda_flash  torch's FlashAttention kernel: CUDA, bf16 and fp16, head dims that are multiples of 8 up to 256
  cpu_flash   torch's fused CPU kernel: fp64, fp32, bf16, fp16
  reference   plain torch: everything else, and attention dropout
"""

from __future__ import annotations

import logging

import torch

from terapipe_ds.attention.backends.base import Backend
from terapipe_ds.attention.backends.fused import CpuFlash, CudaFlash, FlashAttn
from terapipe_ds.attention.backends.reference import Reference

__all__ = ["Backend", "available_backends", "backend_name", "choose_backend", "set_backend"]

_log = logging.getLogger("terapipe_ds")

_BACKENDS: tuple[Backend, ...] = (FlashAttn(), CudaFlash(), CpuFlash(), Reference())
_forced: Backend | None = None
_logged: set[tuple[str, str, torch.dtype, bool]] = set()


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that can run on this machine, in order of preference."""
    return tuple(backend.name for backend in _BACKENDS if backend.is_available())


def set_backend(name: str | None) -> None:
    """Force one backend for all later calls on slices; None chooses automatically again.

    Raises ValueError for a name that does not exist or cannot run on this machine.
    """
    global _forced
    backends = {backend.name: backend for backend in _BACKENDS}
    if name is not None and name not in backends:
        known = ", ".join(backends)
        raise ValueError(f"unknown attention backend {name!r}; use one of {known}, or None for the automatic choice")
    if name is not None and not backends[name].is_available():
        available = ", ".join(available_backends())
        raise ValueError(f"attention backend {name!r} cannot run on this machine; available here: {available}")
    _forced = None if name is None else backends[name]


def backend_name(q: torch.Tensor) -> str:
    """Return the name of the backend that computes slices with queries like `q` ([B, H, T, D], without dropout)."""
    return (_forced or _automatic_choice(q, 0.0)).name


def choose_backend(q: torch.Tensor, dropout_p: float) -> Backend:
    """Return the forced backend, or the first that takes `q` and dropout; log it once per device, dtype and dropout.

    Raises ValueError where the forced backend refuses `q` or dropout.
    """
    chosen = _forced or _automatic_choice(q, dropout_p)
    if _forced is not None and (reason := _forced.refusal(q, dropout_p)) is not None:
        raise ValueError(
            f"attention backend {_forced.name!r} was forced, but {reason}; force another one, or let "
            f"set_backend(None) choose"
        )
    key = (chosen.name, q.device.type, q.dtype, dropout_p > 0)
    if key not in _logged:
        _logged.add(key)
        how, dropout = "automatic" if _forced is None else "forced", ", dropout" if dropout_p > 0 else ""
        _log.info("sliced attention: %s backend %s for %s, %s%s", how, *key[:3], dropout)
        if _forced is None and isinstance(chosen, Reference):
            fused = [b for b in _BACKENDS if b is not chosen and b.is_available()]
            _log.warning(
                "sliced attention falls back to plain torch, slow and with a tensor of scores [B, H, T, P + T]: %s",
                "; ".join(f"{b.name}: {b.refusal(q, dropout_p)}" for b in fused) or "no fused kernel is available",
            )
    return chosen


def _automatic_choice(q: torch.Tensor, dropout_p: float) -> Backend:
    return next(b for b in _BACKENDS if b.refusal(q, dropout_p) is None and b.is_available())
