"""What megatron-core 0.16.1 takes for granted and a machine may lack: a CUDA device, Transformer Engine.

It calls ``torch.cuda.current_device()`` for the place of every new tensor and keeps the states of CUDA's random
numbers; those calls are answered for ranks on a CPU, and nothing of that runs where there is a CUDA device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils

logger = logging.getLogger("terapipe_ds")


def on_cpu() -> bool:
    """True where DeepSpeed's accelerator is the CPU."""
    return get_accelerator().device_name() == "cpu"


@functools.cache
def stand_in_for_cuda() -> None:
    """Let megatron-core run on a CPU: once per process, and not at all where there is a CUDA device.

    What is replaced fails on such a machine anyway: the current CUDA device (now the CPU) and the getter and setter of
    its random state (now those of torch's CPU generator, from which dropout draws here).
    """
    if not on_cpu():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    logger.debug("megatron-core runs on the CPU: its CUDA calls are answered by terapipe_ds")


@functools.cache
def stand_in_for_transformer_engine() -> None:
    """Define what megatron-core 0.16.1 reads of Transformer Engine without asking whether it is installed.

    The router of a mixture of experts asks whether a matrix product is None; ``CheckpointWithoutOutput`` (norms in
    ``recompute_modules``) takes fp8 to be asked for whenever its argument is not None, and the default is False.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(megatron_random, "FP8GlobalStateManager"):
        megatron_random.FP8GlobalStateManager = _NoFp8
        megatron_random.activation_recompute_forward = _no_fp8_context
        megatron_random.fp8_autocast = _no_fp8_context


class _NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _no_fp8_context(**_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class CpuRngTracker:
    """Named states of torch's CPU generator, with the interface of megatron-core's ``CudaRNGStatesTracker``.

    ``fork(name)`` draws from the named state and leaves the default one alone: dropout that must differ between
    tensor-parallel ranks draws from "model-parallel-rng", all other from the default state, which they share.
    """

    use_cudagraphable_rng = False
    is_inference_rng_tracker = False

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def reset(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise ValueError(f"the random state {name!r} exists already")
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[Any]:
        if name not in self.states_:
            raise ValueError(f"there is no random state {name!r}; it is made by seed_dropout()")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)
