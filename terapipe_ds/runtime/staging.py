"""Messages of an accelerator over a backend that knows the host's memory only: by way of pinned buffers.

gloo sends no CUDA tensors from one rank to one other. With it several stages can share one device, which NCCL refuses;
that is for tests and for a first try on a small machine, not for speed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist

_HOST_BACKENDS = ("gloo", "mpi")


def needs_staging(group: Any, device: torch.device) -> bool:
    """Whether what ``group`` carries between two ranks for ``device`` must lie in the host's memory."""
    if device.type == "cpu":
        return False
    group = torch_dist.group.WORLD if group is None else group
    return group._get_backend(device).name() in _HOST_BACKENDS


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, pinned where it is copied from or to an accelerator: ``device``."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory that is complete when this returns: the backend does not wait for the device."""
    copy = host_buffer(tuple(tensor.shape), tensor.dtype, tensor.device)
    return copy.copy_(tensor)  # not ``non_blocking``: torch waits for the current stream
