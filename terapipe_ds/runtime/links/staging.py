"""Send messages of an accelerator by way of pinned buffers, over a backend that can only use the host's memory.

gloo runs collectives on CUDA tensors, but sends none from one rank to another. With gloo several
stages can share one device, which NCCL refuses. That is for tests and for a first try on a small machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p

from terapipe_ds.compat.replaced import replaced

_HOST_BACKENDS = ("gloo", "mpi")


def needs_staging(group: Any, device: torch.device) -> bool:
    """Return whether the messages of `group` between two ranks for `device` must be in the host's memory."""
    if device.type == "cpu":
        return False
    group = torch_dist.group.WORLD if group is None else group
    return group._get_backend(device).name() in _HOST_BACKENDS


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host to copy from or to `device`; it is pinned if `device` is an accelerator."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, complete when this returns: the backend does not wait for the device."""
    copy = host_buffer(tuple(tensor.shape), tensor.dtype, tensor.device)
    return copy.copy_(tensor)  # not `non_blocking`: torch waits for the current stream


@contextmanager
def neighbours_staged() -> Iterator[None]:
    """Send DeepSpeed's own messages between stages by way of the host inside the context, if the backend needs it."""
    if not needs_staging(None, torch.device(get_accelerator().current_device_name())):
        yield
        return
    send, recv = p2p.send, p2p.recv

    def staged_send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
        return send(to_host(tensor.detach()), dest_stage, async_op)

    def staged_recv(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> Any:
        buffer = host_buffer(tuple(tensor.shape), tensor.dtype, tensor.device)
        result = recv(buffer, src_stage, async_op)
        tensor.detach().copy_(buffer)
        return result

    # gloo copies the broadcast values back into a CUDA tensor, which autograd refuses for a parameter
    synchronize_tied = torch.no_grad()(PipelineModule._synchronize_tied_weights)
    with (
        replaced(p2p, "send", staged_send),
        replaced(p2p, "recv", staged_recv),
        replaced(PipelineModule, "_synchronize_tied_weights", synchronize_tied),
    ):
        yield
