"""Refuse what cannot be trained in slices, where only the built model shows it."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from deepspeed.comm import comm as ds_comm
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError

logger = logging.getLogger("terapipe_ds")


def check_checkpointing(in_stock_order: bool) -> None:
    """Refuse DeepSpeed's checkpointing options that rely on its order of forward passes, where ours differs."""
    is_by_order = ds_checkpointing.CONTIGUOUS_CHECKPOINTING or ds_checkpointing.PARTITION_ACTIVATIONS
    if is_by_order and not in_stock_order:
        raise TeraPipeConfigError(
            "activation_checkpointing.partition_activations and contiguous_memory_optimization cannot be combined with "
            "terapipe: they keep activations by the order of forward passes, which slices interleave. Set both to "
            'false, or take DeepSpeed\'s own order: terapipe.slices 1 with terapipe.schedule "1f1b".'
        )


def check_eval_call(has_monitor: bool, *args: Any, **kwargs: Any) -> None:
    """Refuse a `reduce_output` on every rank, before the batch: DeepSpeed fails after it, on the last stage only."""
    bound = inspect.signature(PipelineEngine.eval_batch).bind(None, *args, **kwargs)
    bound.apply_defaults()
    reduction = bound.arguments["reduce_output"]
    if reduction is not None and reduction.lower() != "avg":
        raise NotImplementedError(f"reduction type {reduction} not supported.")
    if reduction is None and bound.arguments["compute_loss"] and (bound.arguments["bcast_loss"] or has_monitor):
        who = "a monitor that is enabled" if has_monitor else "bcast_loss=True"
        raise ValueError(
            f"eval_batch(reduce_output=None) with {who}: the losses of all micro-batches are a list, and DeepSpeed "
            "sends one number to the other stages. Set bcast_loss=False and switch monitors off: the last stage then "
            'returns the list, and the others None. Or set reduce_output="avg"'
        )


def problem_of_layers(
    module: nn.Module, config: TeraPipeConfig, has_moe_layers: bool, has_sequence_ranks: bool = False
) -> str | None:
    """Return which of this stage's layers cannot run slice by slice; None where all can. Stages may differ.

    Where sequence ranks divide the tokens, no layer sees a whole sequence, even if that is one slice.
    """
    if has_moe_layers:
        return (
            "the model has deepspeed.moe layers: their capacity and their auxiliary loss count the tokens of one "
            "forward pass, which slices change. Set terapipe.enabled to false, or route without capacity in a layer of "
            "your own."
        )
    if config.is_one_slice and not has_sequence_ranks:
        return None
    compiled = _compiled(module)
    if compiled:
        return f"layers of this stage ({first_four(compiled)}) {_COMPILED}"
    hooked = problem_of_gradient_hooks(module)
    if hooked is not None:
        return hooked
    if config.verify == "off":
        _warn_of_unchecked_hooks(module)
    names = [f"{name} ({type(layer).__name__})" for name, layer in _mixing_layers(module, "")]
    if not names:
        return None
    return (
        f"layers that mix the tokens of a sequence, and would see only those of a slice: {first_four(names)}. Only "
        "sliced_attention may do so, or a layer that hands its state on by terapipe_ds.attention.carry "
        "(docs/carried_states.md); set terapipe.slices to 1 to train this model. A layer that is right on slices (it "
        "hands its state on, or mixes features and no tokens) declares this by the class attribute slice_safe = True, "
        "which also covers its submodules."
    )


_STEPS_IN_BACKWARD = "_in_backward_optimizers"  # which torch.distributed.optim leaves at a parameter
_OF_THE_ENGINE = ("deepspeed", "terapipe_ds", "torch", "megatron")  # their hooks know what they are called for


def problem_of_gradient_hooks(module: nn.Module) -> str | None:
    """Return which trained parameters call a function of the user when their gradient is there; None where none does.

    In slices such a hook is called once for each slice, with a gradient that is not complete: an optimizer that steps
    there takes a step per slice.
    """
    hooked = [
        f"{name} ({getattr(hook, '__qualname__', type(hook).__name__)})"
        for name, parameter in module.named_parameters()
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if parameter.requires_grad and str(getattr(hook, "__module__", "")).split(".")[0] not in _OF_THE_ENGINE
    ]
    hooked += [f"{name} (an optimizer)" for name, p in module.named_parameters() if hasattr(p, _STEPS_IN_BACKWARD)]
    if not hooked:
        return None
    return (
        f"parameters with hooks by register_post_accumulate_grad_hook: {first_four(hooked)}. They are called once for "
        "each slice, with the gradient of the slices so far: an optimizer that steps there takes a step per slice. "
        "Remove them (DeepSpeed's optimizer steps once per batch), or set terapipe.slices to 1."
    )


_CHANGED_IN_BACKWARD = (
    "changed in a backward: an optimizer that steps there takes a step per slice. Remove it, or set terapipe.slices to "
    "1; then begin anew or load a checkpoint, because the parameters are not as they were"
)


class WrittenParameters:
    """See which trained parameters are written to in the backward, whatever does it. Call it after each action."""

    def __init__(self, module: nn.Module) -> None:
        self._trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._versions = {(name, each._version) for name, each in self._trained.items()}
        self._written: dict[bool, set[str]] = {True: set(), False: set()}  # in forwards, in other actions

    def __call__(self, is_forward: bool) -> None:
        before, self._versions = self._versions, {(name, each._version) for name, each in self._trained.items()}
        self._written[is_forward] |= {name for name, _ in self._versions - before}

    def problem(self) -> str | None:
        """Return which parameters are. Those that forwards limit may be recomputed."""
        names = sorted(self._written[False] - self._written[True])
        return f"{first_four(names)} {_CHANGED_IN_BACKWARD}" if names else None


def _warn_of_unchecked_hooks(module: nn.Module) -> None:
    """Warn of hooks that change the gradient of a parameter, where nothing compares what they do."""
    hooked = [name for name, each in module.named_parameters() if each.requires_grad and each._backward_hooks]
    if hooked:
        logger.warning(
            "the gradients of %s pass through hooks, once for each slice. terapipe.verify is off, so that nothing "
            "checks them: a hook that clips or normalises gives other gradients than on whole sequences",
            first_four(hooked),
        )


def first_four(names: Sequence[str]) -> str:
    """Return the first names in one line, and whether there are more."""
    return ", ".join(names[:4]) + " and more" * (len(names) > 4)


def check_compile_call(config: TeraPipeConfig) -> None:
    """Refuse `engine.compile()` for the same reason as layers that are compiled already."""
    if not config.is_one_slice:
        raise TeraPipeConfigError(f"with engine.compile() layers {_COMPILED}")


_COMPILED = (
    "are compiled by torch.compile, which knows nothing of slices: it compiles them again for every place of a slice "
    "in the sequence, and gives up after eight. Remove torch.compile and set terapipe.compile to true, which compiles "
    "layers that can be compiled for all slices, or set terapipe.slices to 1"
)


def _compiled(module: nn.Module) -> list[str]:
    """Return the names of compiled modules and functions; importing torch's compiler would take a second."""
    parts = getattr(module, "held_parts", (module,))  # of all chunks, where a stage holds several
    layers = [each for part in parts for each in getattr(part, "forward_funcs", ())]
    functions = [each for each in layers if not isinstance(each, nn.Module)]
    modules = [
        name or type(each).__name__
        for name, each in module.named_modules()
        if type(each).__name__ == "OptimizedModule"
        or each._compiled_call_impl is not None
        or _is_compiled_function(each.forward)
    ]
    return modules + [getattr(each, "__name__", repr(each)) for each in functions if _is_compiled_function(each)]


def _is_compiled_function(function: Any) -> bool:
    """Return whether a function is compiled; `torch.compiler.disable` leaves the same mark, and one more."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return hasattr(function, "_torchdynamo_orig_callable") and not is_disabled


def slice_length_multiple(module: Any) -> int:
    """Return the number that must divide every slice length: the module's attribute of this name, by default 1.

    A module sets it where its layers divide the tokens of a slice over ranks, as sequence parallelism does.
    """
    multiple = getattr(module, "slice_length_multiple", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise TeraPipeConfigError(
            f"slice_length_multiple = {multiple!r} of {type(module).__name__}: give an integer >= 1, the number of "
            "ranks that the tokens of a slice are divided over"
        )
    return multiple


def shortest_slice(module: Any) -> int:
    """Return the fewest tokens of a slice: the module's attribute of this name, by default 1.

    A module sets it where its layers take a single token for a step of generation.
    """
    return int(getattr(module, "shortest_slice", 1))


def problem_of_lengths(what: str, lengths: Sequence[int], multiple: int, shortest: int = 1) -> str | None:
    """Return why slices of these lengths cannot run; None where they can. `what` says where they come from."""
    if len(lengths) > 1 and min(lengths) < shortest:
        return (
            f"{what} = {list(lengths)}: a slice has {min(lengths)} token, which layers of the model take for a step of "
            f"generation: give slices of {shortest} tokens or more"
        )
    bad = [str(length) for length in lengths if length % multiple]
    if not bad:
        return None
    return (
        f"{what} = {list(lengths)}: slices of {', '.join(dict.fromkeys(bad[:4]))} tokens are no multiples of "
        f"{multiple}, the model's slice_length_multiple (sequence parallelism divides the tokens of a slice over so "
        "many ranks). Give multiples of it, or switch sequence parallelism off."
    )


def with_multiple(config: TeraPipeConfig, multiple: int, rank: int) -> TeraPipeConfig:
    """Return the config with a granularity that every slice can be cut by; listed slices are taken as they are."""
    raised = math.lcm(config.granularity_tokens, multiple)
    is_cut = config.slices != 1 and not isinstance(config.slices, tuple)
    if raised != config.granularity_tokens and is_cut and rank == 0:
        shorter = "" if "granularity_tokens" in config.model_fields_set else ", of fewer where sequences are short"
        logger.info(
            "terapipe.granularity_tokens is raised from %d to %d%s: slices must be multiples of %d tokens, the model's "
            "slice_length_multiple",
            config.granularity_tokens,
            raised,
            shorter,
            multiple,
        )
    return config.with_multiple(multiple)


def problem_of_device_waits(receives_on_device: bool) -> str | None:
    """Return what would wait for the whole device within a batch; None where nothing does. Ranks may differ in it.

    Such a wait ends when every receive that is posted ahead (`Wires.post_on_device`) has its message. That may be a
    gradient that follows from the very slice that is running.
    """
    reasons = [reason for is_on, reason in _DEVICE_WAITS if receives_on_device and is_on()]
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}. With several stages receives are posted ahead, and a wait for the whole device waits "
        "for messages that need what this stage has yet to compute: a hang. For times use trace_dir or "
        "wall_clock_breakdown, which wait for the current stream alone."
    )


_DEVICE_WAITS: tuple[tuple[Callable[[], bool], str], ...] = (
    (lambda: ds_checkpointing.SYNCHRONIZE,
     "activation_checkpointing.synchronize_checkpoint_boundary waits for the device at each checkpoint: set it to "
     "false"),
    (lambda: ds_comm.comms_logger.enabled,
     "comms_logger waits for the device after each operation of deepspeed.comm, those of layers among them: set "
     "comms_logger.enabled to false"),
    (lambda: os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
     "CUDA_LAUNCH_BLOCKING=1 waits for each kernel, and so for each receive where it is posted: unset it, or look for "
     "the error with one stage"),
)  # fmt: skip


def _mixing_layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules whose type mixes tokens, with names; none of a class that says it is `slice_safe`."""
    if getattr(module, "slice_safe", False) is True:
        return
    if _mixes_tokens(module):
        yield name, module
    else:
        for child, part in module.named_children():
            yield from _mixing_layers(part, f"{name}.{child}" if name else child)


def _classes_of(module: ModuleType) -> tuple[type, ...]:
    return tuple(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__)


_PADDING = _classes_of(nn.modules.padding)
_MIXING = (
    nn.RNNBase, nn.RNNCellBase, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm,
    nn.Upsample, *_classes_of(nn.modules.pooling),
)  # fmt: skip


def _mixes_tokens(module: nn.Module) -> bool:
    """Return whether a layer of torch mixes tokens. A convolution of width 1 is a linear layer."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return any(each != 1 for each in (*module.kernel_size, *module.stride))
    if isinstance(module, (nn.Unfold, nn.Fold)):
        return module.kernel_size not in (1, (1, 1)) or module.stride not in (1, (1, 1))
    if isinstance(module, _PADDING):
        return any(vars(module)["padding"][2:])  # not of the last dimension: nn.ZeroPad2d((0, 0, 1, -1)) shifts tokens
    return isinstance(module, _MIXING)
