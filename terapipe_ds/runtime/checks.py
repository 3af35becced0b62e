"""What cannot be trained in slices and shows only once the model is built."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.integrations.insertions import problem_of_insertions


def check_module(module: Any) -> None:
    """Refuse a ``PipelineModule`` whose shapes do not follow from a plan."""
    if getattr(module, "dynamic_shape", False):
        raise TeraPipeConfigError(
            "PipelineModule(dynamic_shape=True) cannot be combined with terapipe: shapes follow from the slice plan, "
            "and sequence lengths may change from batch to batch without it. Remove dynamic_shape."
        )


def check_checkpointing() -> None:
    """Refuse DeepSpeed's checkpointing options that go by the order of forward passes."""
    if ds_checkpointing.CONTIGUOUS_CHECKPOINTING or ds_checkpointing.PARTITION_ACTIVATIONS:
        raise TeraPipeConfigError(
            "activation_checkpointing.partition_activations and contiguous_memory_optimization cannot be combined with "
            "terapipe: they keep activations by the order of forward passes, which slices interleave. Set both to "
            "false."
        )


def problem_of_layers(engine: Any) -> str | None:
    """What of this stage's layers mixes tokens by more than attention; None where all is well. Stages differ in it."""
    if engine.has_moe_layers:
        return (
            "the model has deepspeed.moe layers: their capacity and their auxiliary loss count the tokens of one "
            "forward pass, which slices change. Set terapipe.enabled to false, or route without capacity in a layer of "
            "your own."
        )
    unpatched = problem_of_insertions(engine.module)
    if unpatched is not None:
        return unpatched
    slices = engine.terapipe_config.slices
    if slices == 1 or (isinstance(slices, tuple) and len(slices) == 1):
        return None
    names = [f"{name} ({type(m).__name__})" for name, m in engine.module.named_modules() if _mixes_tokens(m)]
    if not names:
        return None
    return (
        f"layers that mix the tokens of a sequence, and would see only those of a slice: {', '.join(names[:4])}"
        f"{' and more' if len(names) > 4 else ''}. Only sliced_attention may do so; set terapipe.slices to 1 to train "
        "this model."
    )


def _mixes_tokens(module: nn.Module) -> bool:
    """What can be told of torch's own layers. A convolution of width 1 is a linear layer."""
    if isinstance(module, nn.Conv1d):
        return module.kernel_size != (1,)
    return isinstance(module, (nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))
