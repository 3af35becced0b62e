"""Refuse calls and settings of DeepSpeed that do not work with slices."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable
from typing import Any

from deepspeed.comm import comm as ds_comm
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from terapipe_ds.attention.slice_store import SliceEntry
from terapipe_ds.compat.replaced import packages_of
from terapipe_ds.config.combinations import UNSPLIT, splits_backwards
from terapipe_ds.messages import logger, show_value


def problem_of_checkpointing(in_stock_order: bool) -> str | None:
    """Return an error if DeepSpeed checkpoints by its order of forward passes, and ours differs."""
    if in_stock_order or not (ds_checkpointing.CONTIGUOUS_CHECKPOINTING or ds_checkpointing.PARTITION_ACTIVATIONS):
        return None
    return (
        "activation_checkpointing.partition_activations and contiguous_memory_optimization cannot be combined with "
        "terapipe: they keep activations by the order of forward passes, which slices interleave. Set both to false, "
        'or take DeepSpeed\'s own order: terapipe.slices 1 with terapipe.schedule "1f1b".'
    )


def check_eval_call(has_monitor: bool, *args: Any, **kwargs: Any) -> tuple[bool, bool, str]:
    """Return whether the caller gets each loss, whether there is a loss to monitor, and what all ranks must pass alike.

    Refuse impossible arguments on every rank, before the batch: DeepSpeed fails after it, on the last stage only.
    """
    bound = inspect.signature(PipelineEngine.eval_batch).bind(None, *args, **kwargs)
    bound.apply_defaults()
    number = bound.arguments["num_micro_batches"]
    if number is not None and number < 1:
        raise ValueError(f"eval_batch(num_micro_batches={number}): give at least 1, or leave an empty evaluation out")
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
    has_loss = bool(bound.arguments["compute_loss"])
    sends = has_loss and bool(bound.arguments["bcast_loss"])
    return reduction is None, has_loss, f"compute_loss={has_loss}, reduce_output={reduction!r}, bcast_loss={sends}"


def problem_of_arguments(module: PipelineModule) -> str | None:
    """Return an error about an argument of `PipelineModule` that DeepSpeed takes, and that fails in a batch."""
    loss_fn, function = module.loss_fn, module.activation_checkpoint_func
    interval = module.activation_checkpoint_interval
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        is_class = isinstance(loss_fn, type)
        kind = f"the class {loss_fn.__name__}: give an object of it" if is_class else show_value(loss_fn)
        return f"PipelineModule(loss_fn=...) is {kind}; it must be a function of outputs and labels, or a module"
    if not isinstance(interval, int) or interval < 0:
        shown = f"PipelineModule(activation_checkpoint_interval={show_value(interval)})"
        return f"{shown}: it must be a number of layers, or 0, which recomputes nothing"
    if not callable(function):
        return f"PipelineModule(activation_checkpoint_func={show_value(function)}): give a function, or leave it out"
    for layer_id, spec in enumerate(module._layer_specs):
        called = (spec.forward_fn or spec) if isinstance(spec, TiedLayerSpec) else spec
        if isinstance(called, type) or not (callable(called) or isinstance(called, LayerSpec)):
            return f"layer {layer_id} is {show_value(called)}: give a module, a LayerSpec or a function"
    return None


def warn_of_checkpointable(module: PipelineModule) -> None:
    """Warn of `checkpointable_layers` that name no layer: nothing is recomputed, whatever the interval."""
    named, specs = module.checkpointable_layers, module._layer_specs
    kinds = [each.typename if isinstance(each, LayerSpec) else type(each) for each in specs]
    names = dict.fromkeys(kind.__name__ for kind in kinds)
    # DeepSpeed recomputes layers of these two by their names
    is_megatrons = type(module).__name__ in ("GPTModelPipe", "GPT2ModelPipe")
    if named and names.keys().isdisjoint(named) and not is_megatrons:
        logger.warning(
            "PipelineModule(checkpointable_layers=%s): no layer is of such a class, so that no layer is recomputed. "
            "Give names of their classes: %s",
            show_value(named),
            ", ".join(names),
        )


def warn_of_unused(told: set[Hashable], entry: SliceEntry) -> None:
    """Warn once of attention without gradients, if nothing compares its layer with whole sequences."""
    if entry.layer not in told:
        told.add(entry.layer)
        logger.warning(
            "attention %r gets no gradient in any slice. This is right only if the layer detaches its output, or the "
            "loss does not use it, on whole sequences too. terapipe.verify is off, so that nothing compares them: set "
            'it to "first_batch" once',
            entry.layer,
        )


def problem_of_split(module: object, schedule: str) -> str | None:
    """Return why the schedule may not split backwards, by the module's attribute of that name; None if it may."""
    reason: str | None = getattr(module, "split_backwards_problem", None)
    if reason is None or not splits_backwards(schedule):
        return None
    return f"terapipe.schedule = {show_value(schedule)}: {reason}, so that nothing is left for W; {UNSPLIT}"


def problem_of_instructions(engine: PipelineEngine) -> str | None:
    """Return an error if a program has replaced one of DeepSpeed's instructions: no schedule of slices runs them."""
    for kind, run in engine._INSTRUCTION_MAP.items():
        packages = packages_of(run)
        if getattr(run, "__module__", None) != PipelineEngine.__module__ or not packages <= {"deepspeed", "torch"}:
            return (
                f"PipelineEngine._INSTRUCTION_MAP[{kind.__name__}] is {getattr(run, '__qualname__', run)} of "
                f"{', '.join(sorted(packages))}, which would never be called, because schedules of slices run no "
                "instructions: leave DeepSpeed's own function there, or set terapipe.enabled to false"
            )
    return None


def problem_of_device_waits(receives_on_device: bool) -> str | None:
    """Return the options that would wait for the whole device within a batch; None if none does. Ranks may differ.

    Such a wait ends only when every receive that is posted ahead (`Wires.post_on_device`) has its message. The message
    may be a gradient that depends on the very slice that is running.
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
    (lambda: "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,  # whatever its value is
     "PYTORCH_NO_CUDA_MEMORY_CACHING waits for the device whenever a tensor is freed: unset it, or look for the error "
     "with one stage"),
)  # fmt: skip
