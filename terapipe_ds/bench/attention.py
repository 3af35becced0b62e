"""Have all systems of a benchmark compute attention by one kernel, so that ratios do not compare kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.attention import set_backend
from terapipe_ds.attention.backends import available_backends, backend_name

_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def one_attention(device: str, dtype: torch.dtype, head_dim: int) -> Iterator[str]:
    """Have one kernel compute the attention of slices and of whole sequences inside; yield its name.

    Torch may take another kernel for whole sequences than slices have, or the flash-attn package may be there for
    slices: their ratio would compare kernels rather than slices. On CPUs there is one fused kernel. What no fused
    kernel takes for slices (fp32 on a device) is left to torch for whole sequences, and the name says so.
    """
    if device == "cpu":
        yield backend_name(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    elif dtype in _HALF and head_dim % 8 == 0 and head_dim <= 256:
        name = "cuda_flash"
        if "cudnn" in available_backends():  # and where it is the faster one
            chosen = backend_name(torch.empty(1, 16, 1, head_dim, dtype=dtype, device=device))
            name = chosen if chosen == "cudnn" else name
        set_backend(name)
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION):
                yield name
        finally:
            set_backend(None)
    else:
        yield "reference for slices, torch's choice for whole sequences"
