"""Which kernel computes sliced attention: chosen automatically or forced, and said once in the log.

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
    """Names of the backends that can run on this machine, in order of preference."""
    return tuple(backend.name for backend in _BACKENDS if backend.is_available())


def set_backend(name: str | None) -> None:
    """Force one backend for all later calls on slices; None chooses automatically again.

    Raises ValueError for a name that does not exist or cannot run on this machine.
    """
    global _forced
    if name is None:
        _forced = None
        return
    found = {backend.name: backend for backend in _BACKENDS}.get(name)
    if found is None:
        known = ", ".join(backend.name for backend in _BACKENDS)
        raise ValueError(f"unknown attention backend {name!r}; use one of {known}, or None for the automatic choice")
    if not found.is_available():
        available = ", ".join(available_backends())
        raise ValueError(f"attention backend {name!r} cannot run on this machine; available here: {available}")
    _forced = found


def backend_name(q: torch.Tensor) -> str:
    """Which backend slices of such queries ([B, H, T, D] without dropout) are computed by."""
    if _forced is not None:
        return _forced.name
    return next(b.name for b in _BACKENDS if b.refusal(q, 0.0) is None and b.is_available())


def choose_backend(q: torch.Tensor, dropout_p: float) -> Backend:
    """The forced backend, or the first that takes such queries; logged once per device, dtype and dropout.

    Raises ValueError where the forced backend does not take them.
    """
    if _forced is None:
        chosen = next(b for b in _BACKENDS if b.refusal(q, dropout_p) is None and b.is_available())
    else:
        chosen = _forced
        reason = chosen.refusal(q, dropout_p)
        if reason is not None:
            raise ValueError(
                f"attention backend {chosen.name!r} was forced, but {reason}; force another one, or let "
                f"set_backend(None) choose"
            )
    key = (chosen.name, q.device.type, q.dtype, dropout_p > 0)
    if key not in _logged:
        _logged.add(key)
        _log.info(
            "sliced attention: %s backend %s for %s, %s%s",
            "automatic" if _forced is None else "forced",
            *key[:3],
            ", dropout" if key[3] else "",
        )
        if _forced is None and isinstance(chosen, Reference):
            fused = [b for b in _BACKENDS if b is not chosen and b.is_available()]
            _log.warning(
                "sliced attention falls back to plain torch, slow and with a tensor of scores [B, H, T, P + T]: %s",
                "; ".join(f"{b.name}: {b.refusal(q, dropout_p)}" for b in fused) or "no fused kernel is available",
            )
    return chosen
