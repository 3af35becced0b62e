"""Choose the kernel that computes sliced attention, automatically or as forced, and log the choice once.

On CUDA, for bf16 and fp16, the fastest of these that takes the call, by a short measurement at first use:
  flash_attn_4, flash_attn_3, flash_attn  the flash-attn packages, where installed: windows, softcaps, documents
  cudnn       cuDNN's kernel by torch: Hopper and newer
  cuda_flash  torch's FlashAttention kernel: head dims that are multiples of 8 to 256; windows
Attention dropout runs on flash_attn and cuda_flash. Otherwise, in order of preference:
  flex        torch's flex_attention, compiled: CUDA; windows, softcaps, documents, fp32
  cpu_flash   torch's fused CPU kernel: fp64, fp32, bf16, fp16; windows and documents
  reference   plain torch: everything else, softcaps and attention dropout on CPU
Sinks are merged into what a backend returns: all of them take sinks.
"""

from __future__ import annotations

import torch

from terapipe_ds.attention.backends.base import Backend, Need
from terapipe_ds.attention.backends.first_use import fastest, plans_kept
from terapipe_ds.attention.backends.flash_attn import CudaFlash, FlashAttn, FlashAttn3, FlashAttn4
from terapipe_ds.attention.backends.flex import Flex, is_below_autograd
from terapipe_ds.attention.backends.fused import CpuFlash, Cudnn
from terapipe_ds.attention.backends.reference import Reference
from terapipe_ds.messages import logger

__all__ = [
    "Backend", "available_backends", "backend_name", "backend_names", "choose_backend", "passed_over", "plans_kept",
    "set_backend",
]  # fmt: skip


_TIMED: tuple[Backend, ...] = (FlashAttn4(), FlashAttn3(), FlashAttn(), Cudnn(), CudaFlash())
_BACKENDS: tuple[Backend, ...] = (*_TIMED, Flex(), CpuFlash(), Reference())
_AS_FAST = 1.05
_forced: Backend | None = None
_logged: set[tuple[str, str, torch.dtype, Need]] = set()
_chosen: dict[tuple[object, ...], Backend] = {}  # by all that decides


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
    _chosen.clear()


def backend_name(q: torch.Tensor) -> str:
    """Return the name of the backend that computes plain slices with queries like `q` ([B, H, T, D])."""
    return (_forced or _automatic_choice(q, Need())[0]).name


def backend_names(q: torch.Tensor) -> str:
    """Return the names of all backends that `backend_name` may return, whichever is the fastest when it measures."""
    names = [] if _forced else [backend.name for backend in _TIMED if _takes(backend, q, Need(), {})]
    is_measured = len(names) > 1 and not torch.are_deterministic_algorithms_enabled()
    return " or ".join(names) if is_measured else backend_name(q)


def passed_over(q: torch.Tensor) -> dict[str, str]:
    """Return why each backend that is preferred to the one for plain slices like `q` does not run them."""
    return _automatic_choice(q, Need())[1]


def choose_backend(q: torch.Tensor, need: Need) -> Backend:
    """Return the forced backend, or the first that takes `q` and the need; log it once per device, dtype and need.

    Raises ValueError where the forced backend refuses `q` or the need.
    """
    # each layer and slice comes by here
    modes = torch.are_deterministic_algorithms_enabled(), is_below_autograd()
    deciding = q.device, q.dtype, q.shape[1], q.shape[-1], need, *modes
    if deciding in _chosen:
        return _chosen[deciding]
    chosen, why = (_forced, dict[str, str]()) if _forced is not None else _automatic_choice(q, need)
    if _forced is not None and (reason := _forced.refusal(q, need)) is not None:
        raise ValueError(
            f"attention backend {_forced.name!r} was forced, but {reason}; force another one, or let "
            f"set_backend(None) choose"
        )
    _chosen[deciding] = chosen
    key = (chosen.name, q.device.type, q.dtype, need)
    if key not in _logged:
        _logged.add(key)
        how = "automatic" if _forced is None else "forced"
        here = {backend.name for backend in _BACKENDS if backend.is_available()}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items() if name in here)
        logger.info("sliced attention: %s backend %s for %s, %s%s%s", how, *key, reasons and f" ({reasons})")
        if _forced is None and isinstance(chosen, Reference):
            slow = "sliced attention falls back to plain torch, which is slow: %s"
            logger.warning(slow, reasons or "no fused kernel is available")
    return chosen


def _automatic_choice(q: torch.Tensor, need: Need) -> tuple[Backend, dict[str, str]]:
    """Return the fastest backend that takes `q` and the need, and why it does not use others."""
    why: dict[str, str] = {}
    fitting = [backend for backend in _TIMED if _takes(backend, q, need, why)]
    if not fitting:
        return next(backend for backend in _BACKENDS[len(_TIMED) :] if _takes(backend, q, need, why)), why
    if need.documents:  # one call for all documents of a row, where a kernel has that
        fitting = [backend for backend in fitting if backend.takes_documents] or fitting
    # times differ from run to run: with deterministic algorithms the order decides
    if len(fitting) == 1 or torch.are_deterministic_algorithms_enabled():
        return fitting[0], why
    times = fastest(tuple(fitting), q, need)
    # times that are nearly equal would choose another kernel in each run, for which a saved profile may not hold
    chosen = next(backend for backend in fitting if times[backend.name] <= _AS_FAST * min(times.values()))
    best = f"{chosen.name} takes {times[chosen.name]:.3f} ms"
    slower = {b.name: f"it takes {times[b.name]:.3f} ms where {best}" for b in fitting if b is not chosen}
    return chosen, {**why, **slower}


def _takes(backend: Backend, q: torch.Tensor, need: Need, why: dict[str, str]) -> bool:
    """Return whether a backend can compute such a call, and add to `why` if it cannot."""
    reason = backend.refusal(q, need) if backend.is_available() else "it cannot run on this machine"
    if reason is not None:
        why[backend.name] = reason
    return reason is None
