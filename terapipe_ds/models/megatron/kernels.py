"""Choose the kernels that run megatron-core's layers on this machine, and stand in for missing ones.

megatron-core 0.16.1 calls `torch.cuda.current_device()` for the place of every new tensor and keeps the states of
CUDA's random numbers. On a CPU, stand-ins answer those calls. The torch norm of megatron-core refuses
sequence parallelism and zero-centred weights; its fused norm needs NVIDIA apex on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn

from terapipe_ds import compat
from terapipe_ds.messages import logger


def on_cpu() -> bool:
    """Return whether DeepSpeed's accelerator is the CPU."""
    return get_accelerator().device_name() == "cpu"


def uses_transformer_engine(config: TransformerConfig) -> bool:
    """Return whether the config asks for Transformer Engine's layers and they can run: installed, and on a GPU."""
    return config.transformer_impl == "transformer_engine" and not on_cpu() and compat.has("transformer_engine")


def norm_class(config: TransformerConfig) -> type:
    """Return the norm of all layers and of the end: Transformer Engine's, NVIDIA apex's or torch's."""
    if uses_transformer_engine(config):
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    # megatron-core takes any package named apex for NVIDIA's, so the check is made here
    if config.normalization == "LayerNorm" and not on_cpu() and compat.has("apex"):
        return FusedLayerNorm
    return TorchNorm


def describe_kernels(config: TransformerConfig) -> str:
    """Describe for the log what the layers are made of, which the config alone does not decide."""
    layers = "Transformer Engine's" if uses_transformer_engine(config) else "megatron-core's own"
    wanted = config.transformer_impl == "transformer_engine" and not uses_transformer_engine(config)
    why = " (Transformer Engine needs a GPU)" if on_cpu() else " (Transformer Engine is not installed)"
    return f"decoder layers: {layers}{why if wanted else ''}, norms: {norm_class(config).__name__}"


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_zero_centered: bool) -> Tensor:
    """Return the layer norm of the last dimension, or without a bias the RMS norm, with 1 + weight if zero-centred."""
    dtype = x.dtype
    if is_zero_centered:  # in half precision 1 + gamma would round gamma away
        wide = torch.promote_types(dtype, torch.float32)
        x, weight, bias = x.to(wide), 1 + weight.to(wide), None if bias is None else bias.to(wide)
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


class TorchNorm(nn.Module):
    """`config.normalization` over the last dimension, with megatron-core's names of parameters.

    With `sequence_parallel` on a parameter, each rank norms its own tokens, and the gradients are summed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={config.normalization!r}: give LayerNorm or RMSNorm")
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter((torch.zeros if self.zero_centered else torch.ones)(hidden_size, **options))
        self.bias = nn.Parameter(torch.zeros(hidden_size, **options)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return normed(hidden, self.weight, self.bias, self.eps, self.zero_centered)


@functools.cache
def stand_in_for_cuda() -> None:
    """Let megatron-core run on a CPU, once per process; do nothing where there is a CUDA device.

    This replaces the current CUDA device and its random state; the random state becomes torch's CPU generator's.
    """
    if not on_cpu():
        return
    # megatron-core asks it for the place of every tensor that it makes
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    logger.debug("megatron-core runs on the CPU: its CUDA calls are answered by terapipe_ds")


@functools.cache
def stand_in_for_transformer_engine() -> None:
    """Define the names that megatron-core 0.16.1 reads of Transformer Engine without checking that it is installed.

    The router of a mixture of experts asks whether a matrix product is None; `CheckpointWithoutOutput` (norms in
    `recompute_modules`) takes fp8 to be asked for whenever its argument is not None, and the default is False.
    Latent attention asks whether a layer is a `TELinear`, which is no class then.
    """
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(megatron_random, "FP8GlobalStateManager"):
        megatron_random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        megatron_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        megatron_random.fp8_autocast = lambda **_: contextlib.nullcontext()


class CpuRngTracker(megatron_random.CudaRNGStatesTracker):
    """Hold named states of torch's CPU generator in the place of CUDA's.

    Dropout that must differ between tensor-parallel ranks draws from "model-parallel-rng", all other dropout from the
    default state, which the ranks share.
    """

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise ValueError(f"the random state {name!r} exists already")
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        self._is_initialized = True

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"there is no random state {name!r}; it is made by seed_dropout()")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)
