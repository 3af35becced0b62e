"""Choose the kernel that computes sliced attention, automatically or as forced, and log the choice once.

In order of preference:
  flash_attn  the flash-attn package, where installed: CUDA, bf16 and fp16; windows, softcaps, documents
  cudnn       cuDNN's kernel by torch: Hopper and newer, bf16 and fp16, where a first measurement finds it faster
  cuda_flash  torch's FlashAttention kernel: CUDA, bf16 and fp16, head dims that are multiples of 8 to 256; windows
  flex        torch's flex_attention, compiled: CUDA; windows, softcaps, documents, fp32
  cpu_flash   torch's fused CPU kernel: fp64, fp32, bf16, fp16; windows and documents
  reference   plain torch: everything else, softcaps on CPU and attention dropout
Sinks are merged into what a backend returns: all of them take sinks.
"""

from __future__ import annotations

import logging

import torch

from terapipe_ds.attention.backends.base import Backend, Need
from terapipe_ds.attention.backends.cudnn import Cudnn
from terapipe_ds.attention.backends.flash_attn import FlashAttn
from terapipe_ds.attention.backends.flex import Flex
from terapipe_ds.attention.backends.fused import CpuFlash, CudaFlash
from terapipe_ds.attention.backends.reference import Reference

__all__ = ["Backend", "available_backends", "backend_name", "choose_backend", "passed_over", "set_backend"]

_log = logging.getLogger("terapipe_ds")

_BACKENDS: tuple[Backend, ...] = (FlashAttn(), Cudnn(), CudaFlash(), Flex(), CpuFlash(), Reference())
_forced: Backend | None = None
_logged: set[tuple[str, str, torch.dtype, Need]] = set()


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
        names = ", ".join(backends)
        raise ValueError(f"unknown attention backend {name!r}; use one of {names}, or None for the automatic choice")
    if name is not None and not backends[name].is_available():
        available = ", ".join(available_backends())
        raise ValueError(f"attention backend {name!r} cannot run on this machine; available here: {available}")
    _forced = None if name is None else backends[name]


def backend_name(q: torch.Tensor) -> str:
    """Return the name of the backend that computes plain slices with queries like `q` ([B, H, T, D])."""
    return (_forced or _automatic_choice(q, Need())).name


def passed_over(q: torch.Tensor) -> dict[str, str]:
    """Return why each backend that is preferred to the one for plain slices like `q` does not run them."""
    why: dict[str, str] = {}
    for backend in _BACKENDS:
        reason = _why_not(backend, q, Need())
        if reason is None:
            break
        why[backend.name] = reason
    return why


def choose_backend(q: torch.Tensor, need: Need) -> Backend:
    """Return the forced backend, or the first that takes `q` and the need; log it once per device, dtype and need.

    Raises ValueError where the forced backend refuses `q` or the need.
    """
    chosen = _forced or _automatic_choice(q, need)
    if _forced is not None and (reason := _forced.refusal(q, need)) is not None:
        raise ValueError(
            f"attention backend {_forced.name!r} was forced, but {reason}; force another one, or let "
            f"set_backend(None) choose"
        )
    # each layer and slice comes by here: the log says it once
    key = (chosen.name, q.device.type, q.dtype, need)
    if key not in _logged:
        _logged.add(key)
        how = "automatic" if _forced is None else "forced"
        _log.info("sliced attention: %s backend %s for %s, %s%s", how, *key)
        if _forced is None and isinstance(chosen, Reference):
            fused = [b for b in _BACKENDS if b is not chosen and b.is_available()]
            _log.warning(
                "sliced attention falls back to plain torch, which is slow: %s",
                "; ".join(f"{b.name}: {b.refusal(q, need)}" for b in fused) or "no fused kernel is available",
            )
    return chosen


def _automatic_choice(q: torch.Tensor, need: Need) -> Backend:
    return next(b for b in _BACKENDS if _why_not(b, q, need) is None)


def _why_not(backend: Backend, q: torch.Tensor, need: Need) -> str | None:
    """Return why the automatic choice passes a backend over, None where it takes it."""
    if not backend.is_available():
        return "it cannot run on this machine"
    reason = backend.refusal(q, need)
    return backend.slower_than_flash(q, need) if reason is None and isinstance(backend, Cudnn) else reason
