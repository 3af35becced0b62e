"""What a profile was measured on, read off the layers and the device."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import torch

from terapipe_ds.attention.backends import backend_name
from terapipe_ds.compat import installed_versions
from terapipe_ds.costs.profile import ProfileKey
from terapipe_ds.runtime.machine import device_name
from terapipe_ds.runtime.parted import module_of, parameters_of_part


def describe_layers(module: Any) -> list[Any]:
    """The layers that a ``PipelineModule`` has here, as values that two stages share exactly when they are the same:
    [[kind, arguments, keywords] of each layer], parameters, checkpoint interval."""
    specs = module._layer_specs[module._local_start : module._local_stop]
    parameters = [[list(p.shape), str(p.dtype), p.requires_grad] for p in parameters_of_part(module)]
    return [[_describe(spec) for spec in specs], parameters, module.activation_checkpoint_interval]


def describe_each_layer(module: Any) -> list[Any]:
    """The same layers one by one, each with its parameters; joined over stages they do not tell how layers are cut."""
    specs = module._layer_specs[module._local_start : module._local_stop]
    found = []
    for spec, function in zip(specs, module.forward_funcs, strict=True):
        layer = module_of(function)
        parameters = [] if layer is None else list(layer.parameters())
        found.append([*_describe(spec), [[list(p.shape), str(p.dtype), p.requires_grad] for p in parameters]])
    return found


def kinds_of_layers(module: Any, slice_length_multiple: int) -> str:
    """``ProfileKey.model`` of a ``PipelineModule``, which every stage knows before anything is built of it."""
    return ", ".join(_counted([_describe(spec)[0] for spec in module._layer_specs], slice_length_multiple))


def _counted(names: Sequence[str], slice_length_multiple: int) -> list[str]:
    made_of = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    return made_of + [f"slices in multiples of {slice_length_multiple} tokens"] * (slice_length_multiple > 1)


def _describe(layer: Any) -> list[Any]:
    if not hasattr(layer, "typename"):  # a module or a function instead of a LayerSpec
        return [type(layer).__qualname__, [_text(layer)], ""]
    arguments = [_text(argument) for argument in layer.module_args]
    return [layer.typename.__qualname__, arguments, _text(sorted(layer.module_kwargs.items()))]


def _text(value: Any) -> str:
    """``repr`` without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def profile_key(
    layers: Sequence[Any], *, module: Any, device: torch.device, rows: int, length: int, tensor_parallel: int = 1,
    autocast: torch.dtype | None = None, slice_length_multiple: int = 1, each_layer: Sequence[Any] | None = None,
) -> ProfileKey:  # fmt: skip
    """The key of a profile of sequences of ``length`` tokens, ``rows`` of them in a micro-batch.

    Args:
        layers: ``describe_layers`` of every stage.
        module: of any stage, for the dtype.
        autocast: the dtype of ``torch.autocast`` where the layers run under it: other arithmetic, so another key.
        slice_length_multiple: of the module. Beyond 1 its layers divide tokens over ranks, and their arguments need not
            say so: with and without it the same layers move other bytes and repeat other work.
        each_layer: ``describe_each_layer`` of all stages, joined; None: not known.
    """
    parameter = next(module.parameters(), torch.empty(0))
    made_of = _counted([kind for specs, *_ in layers for kind, *_ in specs], slice_length_multiple)
    described, single = list(layers), [*(each_layer or ()), module.activation_checkpoint_interval]
    if slice_length_multiple > 1:
        described.append(made_of[-1])
        single.append(made_of[-1])
    return ProfileKey(
        model_fingerprint=_hash(described),
        model=", ".join(made_of),
        device=device_name(device),
        dtype=_name(parameter.dtype) if autocast is None else f"{_name(parameter.dtype)} (autocast {_name(autocast)})",
        micro_batch=rows,
        tensor_parallel=tensor_parallel,
        num_stages=len(layers),
        activation_checkpointing=module.activation_checkpoint_interval > 0,
        sequence_length=length,
        attention_backend=backend_name(parameter.new_empty(1, 1, 1, 8)),
        versions=installed_versions(),
        layers_fingerprint=None if each_layer is None else _hash(single),
    )


def _hash(described: list[Any]) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
