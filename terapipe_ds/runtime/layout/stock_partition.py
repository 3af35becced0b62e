"""Get the cuts of a `PipelineModule` from DeepSpeed's partition methods, without changing the module."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from terapipe_ds.compat.replaced import replaced

PARTITION_METHOD = "_terapipe_partition_method"  # attribute of a module: the method that cut it


def bounds_by(module: Any, method: str, num_parts: int) -> list[int]:
    """Return the first layer of every part, and the number of layers. DeepSpeed builds layers to count parameters."""
    cut = copy.copy(module)  # the module keeps its own cut
    cut.num_stages = num_parts
    is_silent = replaced(deepspeed_logger, "disabled", True)
    with is_silent, contextlib.redirect_stdout(io.StringIO()), random_states_kept():
        cut._partition_layers(method=method)
    return [int(bound) for bound in cut.parts]  # NumPy's integers are no seeds, with `seed_layers`


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy, the host and the current device at the end."""
    accelerator = get_accelerator()
    on_device, host = accelerator.get_rng_state(), torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        accelerator.set_rng_state(on_device)
