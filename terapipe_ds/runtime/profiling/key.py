"""Make the key of a profile from the layers and the device."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import PipelineModule

from terapipe_ds.attention.backends import backend_names
from terapipe_ds.compat import installed_versions
from terapipe_ds.costs.profile import ProfileKey
from terapipe_ds.runtime.layers.activation_checkpointing import kept_calls
from terapipe_ds.runtime.layout.layer_names import module_of
from terapipe_ds.runtime.layout.parted_module import parameters_of_part
from terapipe_ds.schedule.show import many


class LayersOfPart(NamedTuple):
    """Describe the layers of one part by values that two parts share exactly when their layers are the same."""

    together: list[Any]  # [[kind, arguments, keywords] of each layer], parameters, checkpoint interval
    one_by_one: list[Any]  # each layer with its parameters; the same however layers are cut into parts


def describe_part(module: PipelineModule) -> LayersOfPart:
    """Return the layers that `module` has on this rank."""
    specs = [_describe(spec) for spec in module._layer_specs[module._local_start : module._local_stop]]
    layers = [module_of(function) for function in module.forward_funcs]
    each = [[] if layer is None else _shapes(layer.parameters()) for layer in layers]
    together = [specs, _shapes(parameters_of_part(module)), module.activation_checkpoint_interval]
    return LayersOfPart(together, [[*spec, shapes] for spec, shapes in zip(specs, each, strict=True)])


def kinds_of_part(module: PipelineModule, is_first: bool, is_last: bool) -> list[str]:
    """Return a text per layer that `module` runs on this rank, the same for layers with the same costs.

    Numbers among the arguments of a layer do not count if they are positional: most layers have their own number there.
    The first layer of the model has inputs without gradients, and the times of the last one include the loss.
    """
    described = describe_part(module).one_by_one
    layers = [[kind, [a for a in arguments if not a.isdigit()], *more] for kind, arguments, *more in described]
    ends = [(is_first and index == 0, is_last and index == len(layers) - 1) for index in range(len(layers))]
    interval = module.activation_checkpoint_interval
    return [_hash([layer, interval, end]) for layer, end in zip(layers, ends, strict=True)]


def profile_key(
    parts: Sequence[LayersOfPart],
    *,
    module: PipelineModule,  # of any part, for the dtype, and for whether layers that recompute keep their attention
    device: torch.device,
    rows: int,
    length: int,
    tensor_parallel: int = 1,
    autocast: torch.dtype | None = None,  # the dtype of `torch.autocast` if the layers run under it
    slice_length_multiple: int = 1,  # beyond 1 layers divide tokens over ranks, which their arguments need not show
) -> ProfileKey:
    """Return the key of a profile of sequences of `length` tokens, `rows` of them in a micro-batch."""
    # a part may have functions alone
    parameter = next(module.parameters(), torch.empty(0, device="cpu"))
    names = [kind for part in parts for kind, *_ in part.together[0]]
    # parts that recompute have other times than parts that do not
    intervals = [part.together[2] for part in parts]  # they differ between parts if some stages recompute
    alike = len(set(intervals)) <= 1
    notes = [f"slices in multiples of {slice_length_multiple} tokens"] * (slice_length_multiple > 1)
    notes += ["attention kept"] * (max(intervals) > 0 and kept_calls(module) is not None)
    of_layers = [part.together[2] for part in parts for _ in part.one_by_one]
    layers = [layer for part in parts for layer in part.one_by_one]
    return ProfileKey(
        model_fingerprint=_hash([*(part.together for part in parts), *notes]),
        model=", ".join([*(f"{names.count(name)} {name}" for name in dict.fromkeys(names)), *notes]),
        device=device_and_threads(device),
        dtype=_arithmetic(parameter.dtype, autocast, device.type),
        micro_batch=rows,
        tensor_parallel=tensor_parallel,
        num_stages=len(parts),
        activation_checkpointing=max(intervals) > 0,
        sequence_length=length,
        attention_backend=backend_names(parameter.new_empty(1, 1, 1, 64)),  # times would give each start another key
        versions=installed_versions(),
        layers_fingerprint=_hash([*layers, intervals[0] if alike else of_layers, *notes]),
    )


def device_name(device: torch.device) -> str:
    """Return the maker's name of the device: "NVIDIA H200", "AMD EPYC 9654 96-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else device.type


def device_and_threads(device: torch.device) -> str:
    """Return the device, and of a CPU how many threads of a rank compute."""
    name, threads = device_name(device), torch.get_num_threads()
    return f"{name}, {many(threads, 'thread')}" if device.type == "cpu" else name


def _arithmetic(dtype: torch.dtype, autocast: torch.dtype | None, device: str) -> str:
    """Return the dtype of parameters, with the one of products if they differ."""
    if autocast is not None:
        return f"{_name(dtype)} (autocast {_name(autocast)})"
    # "tf32" multiplies up to eight times as fast
    is_rounded = (dtype, device) == (torch.float32, "cuda") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return f"{_name(dtype)} (products in tf32)" if is_rounded else _name(dtype)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _describe(layer: Any) -> list[Any]:
    if not hasattr(layer, "typename"):  # a module or a function instead of a LayerSpec
        return [type(layer).__qualname__, [_text(layer)], ""]
    arguments = [_text(argument) for argument in layer.module_args]
    return [layer.typename.__qualname__, arguments, _text(sorted(layer.module_kwargs.items()))]


def _shapes(parameters: Any) -> list[Any]:
    return [[list(p.shape), str(p.dtype), p.requires_grad] for p in parameters]


def _text(value: Any) -> str:
    """Return `repr` without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hash(described: list[Any]) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def parameters_of_layer(function: Any) -> tuple[int, int]:
    """Return how many parameters a layer has, and how many of them are trained."""
    module = module_of(function)
    parameters = [] if module is None else list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
