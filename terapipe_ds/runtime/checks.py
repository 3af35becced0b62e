"""What cannot be trained in slices and shows only once the model is built."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.integrations.insertions import problem_of_insertions

logger = logging.getLogger("terapipe_ds")


def check_checkpointing(in_stock_order: bool = False) -> None:
    """Refuse DeepSpeed's checkpointing options that go by the order of forward passes, where that is not DeepSpeed's
    own."""
    if in_stock_order:
        return
    if ds_checkpointing.CONTIGUOUS_CHECKPOINTING or ds_checkpointing.PARTITION_ACTIVATIONS:
        raise TeraPipeConfigError(
            "activation_checkpointing.partition_activations and contiguous_memory_optimization cannot be combined with "
            "terapipe: they keep activations by the order of forward passes, which slices interleave. Set both to "
            'false, or take DeepSpeed\'s own order: terapipe.slices 1 with terapipe.schedule "1f1b".'
        )


def check_train_call() -> None:
    """Refuse to train without gradients as DeepSpeed does, but before the batch begins: a caller may go on."""
    if not torch.is_grad_enabled():
        raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")


def check_eval_call(*args: Any, **kwargs: Any) -> None:
    """Refuse a ``reduce_output`` that DeepSpeed refuses, but on every rank: it does so on the last stage, after the
    batch, while the others wait for a loss. Takes the arguments of ``eval_batch``."""
    given = inspect.signature(PipelineEngine.eval_batch).bind(None, *args, **kwargs).arguments
    reduction = given.get("reduce_output")
    if reduction is not None and reduction.lower() != "avg":
        raise NotImplementedError(f"reduction type {reduction} not supported.")


def problem_of_layers(engine: Any) -> str | None:
    """What of this stage's layers cannot run slice by slice; None where all is well. Stages differ in it."""
    if engine.has_moe_layers:
        return (
            "the model has deepspeed.moe layers: their capacity and their auxiliary loss count the tokens of one "
            "forward pass, which slices change. Set terapipe.enabled to false, or route without capacity in a layer of "
            "your own."
        )
    unpatched = problem_of_insertions(engine.module)
    if unpatched is not None:
        return unpatched
    if _is_whole(engine.terapipe_config):
        return None
    compiled = _compiled(engine.module)
    if compiled:
        return f"layers of this stage ({', '.join(compiled[:4])}{' and more' * (len(compiled) > 4)}) {_COMPILED}"
    names = [f"{name} ({type(m).__name__})" for name, m in engine.module.named_modules() if _mixes_tokens(m)]
    if not names:
        return None
    return (
        f"layers that mix the tokens of a sequence, and would see only those of a slice: {', '.join(names[:4])}"
        f"{' and more' if len(names) > 4 else ''}. Only sliced_attention may do so; set terapipe.slices to 1 to train "
        "this model."
    )


def check_compile_call(config: TeraPipeConfig) -> None:
    """Refuse ``engine.compile()`` for the same reason as layers that are compiled already."""
    if not _is_whole(config):
        raise TeraPipeConfigError(f"with engine.compile() layers {_COMPILED}")


def _is_whole(config: TeraPipeConfig) -> bool:
    return config.slices == 1 or (isinstance(config.slices, tuple) and len(config.slices) == 1)


_COMPILED = (
    "are compiled by torch.compile, which knows nothing of slices: it compiles them again for every place of a slice "
    "in the sequence, and gives up after eight. Remove torch.compile, or set terapipe.slices to 1"
)


def _compiled(module: nn.Module) -> list[str]:
    """Names of modules and functions; without torch's compiler, which takes a second to import."""
    parts = getattr(module, "_held", (module,))  # of all chunks, where a stage holds several
    layers = [each for part in parts for each in getattr(part, "forward_funcs", ())]
    functions = [each for each in layers if not isinstance(each, nn.Module)]
    modules = [
        name or type(each).__name__ for name, each in module.named_modules()
        if type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
        or _is_compiled_function(each.forward)
    ]  # fmt: skip
    return modules + [getattr(each, "__name__", repr(each)) for each in functions if _is_compiled_function(each)]


def _is_compiled_function(function: Any) -> bool:
    """``torch.compiler.disable`` marks its functions in the same way, and one more."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return hasattr(function, "_torchdynamo_orig_callable") and not is_disabled


def slice_length_multiple(module: Any) -> int:
    """Of how many tokens every slice must be a multiple: the module's attribute of that name, 1 where it has none.

    A module sets it where its layers divide the tokens of a slice over ranks, as sequence parallelism does.

    Raises:
        TeraPipeConfigError: it is not an integer >= 1.
    """
    multiple = getattr(module, "slice_length_multiple", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise TeraPipeConfigError(
            f"slice_length_multiple = {multiple!r} of {type(module).__name__}: give an integer >= 1, the number of "
            "ranks that the tokens of a slice are divided over"
        )
    return multiple


def problem_of_lengths(what: str, lengths: Sequence[int], multiple: int) -> str | None:
    """Why slices of these lengths cannot run; None where they can. ``what`` says where they come from."""
    bad = [length for length in lengths if length % multiple]
    if not bad:
        return None
    return (
        f"{what} = {list(lengths)}: slices of {', '.join(map(str, dict.fromkeys(bad[:4])))} tokens are no multiples of "
        f"{multiple}, the model's slice_length_multiple (sequence parallelism divides the tokens of a slice over so "
        "many ranks). Give multiples of it, or switch sequence parallelism off."
    )


def problem_of_given_slices(config: TeraPipeConfig, multiple: int) -> str | None:
    """The same for the slices that the config lists."""
    if not isinstance(config.slices, tuple):
        return None
    return problem_of_lengths("terapipe.slices", config.slices, multiple)


def with_multiple(config: TeraPipeConfig, multiple: int, rank: int) -> TeraPipeConfig:
    """The config with a granularity that every slice can be cut by; listed slices are taken as they are."""
    raised = math.lcm(config.granularity_tokens, multiple)
    if raised != config.granularity_tokens and not isinstance(config.slices, tuple) and rank == 0:
        logger.info(
            "terapipe.granularity_tokens is raised from %d to %d: slices must be multiples of %d tokens, the model's "
            "slice_length_multiple", config.granularity_tokens, raised, multiple,
        )  # fmt: skip
    return config.with_multiple(multiple)


def _mixes_tokens(module: nn.Module) -> bool:
    """What can be told of torch's own layers. A convolution of width 1 is a linear layer."""
    if isinstance(module, nn.Conv1d):
        return module.kernel_size != (1,)
    return isinstance(module, (nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))
