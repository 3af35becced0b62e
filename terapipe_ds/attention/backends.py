"""The kernels behind sliced attention, and the choice among them.

A backend attends with the queries of one slice, [B, H, T, D], to keys and values of all tokens up to the slice's end,
[B, H_kv, start + T, D], causally: query i sees the keys [0, start + i]. It returns the output, the log-sum-exp of the
scores [B, H, T] and a state to replay random numbers. Its backward gets them back and returns the gradients of the
queries, of the prefix [0, start) and of the slice's own keys and values.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from terapipe_ds.attention.kernels import Backend, CpuFlash, CudaFlash, FlashAttn, Reference

_log = logging.getLogger("terapipe_ds")

# In order of preference; the last one takes everything.
_BACKENDS: tuple[Backend, ...] = (FlashAttn(), CudaFlash(), CpuFlash(), Reference())
_forced: Backend | None = None
_logged: set[tuple[Any, ...]] = set()


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, in order of preference."""
    return tuple(backend.name for backend in _BACKENDS if backend.is_available())


def set_backend(name: str | None) -> None:
    """Force one backend for every later call, or choose automatically again with None.

    Raises ValueError for a name that does not exist or cannot run on this machine.
    """
    global _forced
    if name is None:
        _forced = None
        return
    found = {backend.name: backend for backend in _BACKENDS}.get(name)
    if found is None:
        raise ValueError(
            f"unknown attention backend {name!r}; use one of {', '.join(b.name for b in _BACKENDS)}, or None for automatic"
        )
    if not found.is_available():
        raise ValueError(
            f"attention backend {name!r} cannot run on this machine; available: {', '.join(available_backends())}"
        )
    _forced = found


def choose_backend(q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> Backend:
    """The forced backend, or the first one that takes these tensors; logged once per device, dtype and dropout.

    Raises ValueError where the forced backend does not take them.
    """
    if _forced is not None:
        reason = _forced.refusal(q, k, dropout_p)
        if reason is not None:
            raise ValueError(
                f"attention backend {_forced.name!r} was forced but {reason}; choose another one, or set_backend(None)"
            )
        chosen = _forced
    else:
        chosen = next(b for b in _BACKENDS if b.is_available() and b.refusal(q, k, dropout_p) is None)
    key = (chosen.name, q.device.type, q.dtype, dropout_p > 0)
    if key not in _logged:
        _logged.add(key)
        how = "forced" if _forced is not None else "chosen"
        _log.info(
            "sliced attention: backend %s (%s) for %s, %s%s",
            chosen.name, how, q.device.type, q.dtype, ", dropout" if dropout_p > 0 else "",
        )  # fmt: skip
    return chosen
