"""Find the changes that were made to a model in memory since transformers built it.

Stages run a fresh model with the same config. `Changes` are copied to it; any other change is an error.
"""

from __future__ import annotations

import functools
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from terapipe_ds.messages import show_value
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

Difference = tuple[str, str]  # the name of a module or tensor, and the difference
_NAMED = 5  # differences that a message names
IN_PEFT = "base_model.model."  # the prefix that peft writes before the name of a module
_OF_EVERY_MODULE = vars(nn.Module()).keys()
_HOOKS = [name for name in _OF_EVERY_MODULE if name.endswith("_hooks")]
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Models that compute alike differ in these, or other code compares them. They also differ in attributes that
# transformers sets on a whole model under names with an underscore, except for functions.
_BOOKKEEPING = """
    _gradient_checkpointing_func _is_hf_initialized all_tied_weights_keys generation_config gradient_checkpointing
    hf_device_map long_inv_freq model_tags name_or_path peft_config targeted_module_names vocab_size warnings_issued
"""
# keys of a config, and of what peft keeps in its layers
_NOT_COMPUTED = ("_name_or_path", "architectures", "device_map", "dtype", "torch_dtype", "transformers_version")
# Hooks of transformers: gradients of embedded tokens, which stages have in any case, and outputs that nobody reads.
# The last one is of a skeleton.
_WITHOUT_EFFECT = ("make_inputs_require_grads", "output_capturing_hook", "refuse_values")


@dataclass
class Changes:
    """Hold settings of a model in memory: requires_grad of each parameter; dropout, padding tokens, buffers, tensors.

    `values` has all but the first, keyed by the names of a module and its attribute.
    """

    requires_grad: dict[str, bool] = field(default_factory=dict)
    values: dict[str, dict[str, Tensor | float | None]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def names(self) -> set[str]:
        """Return the names of all in `values`, in the model."""
        return {f"{name}.{key}" for name, of_module in self.values.items() for key in of_module}

    def put_onto(self, module: nn.Module, name: str = "") -> None:
        """Apply the settings to the module with this name in the model; the model itself has the name ""."""
        for inner, part in module.named_modules(prefix=name):
            for attribute, value in self.values.get(inner, {}).items():
                setattr(part, attribute, value.detach().cpu().clone() if isinstance(value, Tensor) else value)
        for key, parameter in module.named_parameters(prefix=name):
            parameter.requires_grad_(self.requires_grad.get(key, parameter.requires_grad))


def changes_of(model: nn.Module, fresh: nn.Module, dtype: torch.dtype | None) -> Changes:
    """Return the settings of a model that differ from `fresh`, made of the same config, in `dtype` unless it is None.

    Raises ModelRefusedError if anything else differs, and names it.
    """
    changes = Changes()
    differences = [*_of_modules(changes, dtype, "", model, fresh), *_of_checkpointing(model)]
    differences = differences or list(_of_ties(model, fresh))
    if differences:
        raise ModelRefusedError(
            f"the {type(model).__name__} in memory is not what transformers makes of its config: "
            f"{_summary(differences)}. Stages run a fresh model of the config with the weights, buffers, dropout, "
            "requires_grad, gradient checkpointing and adapters of yours, and nothing else: put the change into "
            "the config, undo it, or write the layers as a PipelineModule (docs/models.md)"
        )
    return changes


def _of_modules(
    changes: Changes, dtype: torch.dtype | None, name: str, ours: nn.Module, fresh: nn.Module
) -> Iterator[Difference]:
    """Yield where two modules differ, the outermost of each branch; note the permitted differences in `changes`."""
    if isinstance(ours, nn.ModuleList) and isinstance(fresh, nn.ModuleList) and len(ours) != len(fresh):
        yield name, f"has {len(ours)} layers, in a fresh model {len(fresh)}"
        return
    # the facts of both modules, under the same names; peft puts a name of its own before them
    prefix, facts, others, inner = f"{name}." if name else "", _facts(ours), _facts(fresh), name.removeprefix(IN_PEFT)
    # settings that stages can adopt are noted, all else is a difference
    for key in sorted(facts.keys() | others.keys()):
        one, other = facts.get(key), others.get(key)
        if _form(one) == _form(other):
            continue
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
            changes.values[inner][key] = one if dtype is None else one.to(other.dtype)
        elif isinstance(one, int | float | None) and _is_carried(ours, key):
            changes.values[inner][key] = one
        else:
            yield from _of_values(f"{prefix}{key}", one, other)
    changes.requires_grad |= {key: p.requires_grad for key, p in ours.named_parameters(inner, recurse=False)}
    for key, child in ours.named_children():
        if type(child) is type(fresh._modules.get(key)):
            yield from _of_modules(changes, dtype, f"{prefix}{key}", child, fresh.get_submodule(key))


def _of_values(name: str, one: object, other: object) -> Iterator[Difference]:
    """Yield where two values differ: by key in configs, whose texts begin alike."""
    parts, others = (each.to_dict() if isinstance(each, PretrainedConfig) else each for each in (one, other))
    if isinstance(parts, Mapping) and isinstance(others, Mapping):
        for key in [key for key in {**parts, **others} if key not in _NOT_COMPUTED]:
            if (key in parts, _form(parts.get(key))) != (key in others, _form(others.get(key))):
                yield from _of_values(f"{name}.{key}", parts.get(key), others.get(key))
        return
    both = [_shown(one), _shown(other)]
    if both[0] == both[1] and isinstance(one, type):  # classes of one name
        both = [f"{each.__module__}.{text}" for each, text in zip((one, other), both, strict=True)]
    yield name, f"is {both[0]}, in a fresh model {both[1]}"


def _facts(module: nn.Module) -> dict[str, object]:
    """Return the facts of a module by name: attributes, buffers, kinds of parameters and of children, hooks."""
    own, passed_over = vars(module), {*_OF_EVERY_MODULE, *_BOOKKEEPING.split()}
    if isinstance(module, PreTrainedModel):
        passed_over |= {key for key, value in own.items() if key.startswith("_") and not callable(value)}
    # 4.57 restores the methods of a class in this way, after a forward
    passed_over |= {
        key for key, value in own.items() if getattr(value, "__func__", own) is getattr(type(module), key, 0)
    }
    hooks = [hook for name in _HOOKS for hook in own[name].values()]
    parameters = {key: member for key, member in module._parameters.items() if member is not None}
    return {
        **{key: value for key, value in own.items() if key not in passed_over},
        **module._buffers,
        **{key: [type(member).__name__, *member.shape] for key, member in parameters.items()},
        **{key: type(member) for key, member in module.named_children()},
        "(buffers that are not saved)": sorted(own["_non_persistent_buffers_set"]),
        "(hooks)": [_shown(hook) for hook in hooks if getattr(hook, "__name__", "") not in _WITHOUT_EFFECT],
        "(hooks of parameters)": [
            key for key, member in parameters.items() if any(map(member.__getattribute__, OF_TENSORS))
        ],
    }


def _is_carried(module: nn.Module, key: str) -> bool:
    """Return whether a number is a dropout rate, or the token whose embedding gets no gradient."""
    is_dropout = ("drop" in key and key != "layerdrop") or (key == "p" and "Dropout" in type(module).__name__)
    return is_dropout or key == "padding_idx"


def _form(value: object) -> object:
    """Return a form that is equal for values that let a module compute alike."""
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    is_plain = type(value).__eq__ is not object.__eq__ or callable(value) or not hasattr(value, "__dict__")
    return type(value), value if is_plain else _form(vars(value))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


_FORMS: tuple[tuple[type, Callable[..., object]], ...] = (
    (nn.Module, type),  # its contents are compared where it is a child
    (torch.device, type),
    (Tensor, lambda x: (x.dtype, x.shape, x.is_meta or _bytes(x))),
    (PretrainedConfig, lambda x: _form(x.to_dict())),
    (types.MethodType, lambda x: x.__func__),
    (functools.partial, lambda x: [_form(x.func), _form(x.args), _form(x.keywords)]),
    (Mapping, lambda x: {key: _form(entry) for key, entry in x.items() if key not in _NOT_COMPUTED}),
    (list | tuple, lambda x: [_form(entry) for entry in x]),
)  # type: ignore[assignment]


def _of_checkpointing(model: nn.Module) -> Iterator[Difference]:
    """Yield settings that `activation_checkpoint_interval`, which recomputes each decoder layer, cannot reproduce."""
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    on = [module for module in able if module.gradient_checkpointing]
    if len(on) not in (0, len(able)):
        yield "gradient checkpointing", f"is on in {len(on)} of {len(able)} modules, and must be in all or none"
    for function in {getattr(module, "_gradient_checkpointing_func", checkpoint) for module in on}:
        options = {k: v for k, v in getattr(function, "keywords", {}).items() if k != "use_reentrant"}
        if getattr(function, "func", function) is not checkpoint or options:
            yield "gradient checkpointing", f"is by {_shown(getattr(function, 'func', function))} with {options}"


def _of_ties(model: nn.Module, fresh: nn.Module) -> Iterator[Difference]:
    """Yield which parameters are one tensor in only one of the models."""
    ours, expected = _tied(model), _tied(fresh)
    for names in sorted(ours ^ expected):
        where = "in memory, and not in a fresh model" if names in ours else "in a fresh model, and not in memory"
        yield " and ".join(names), f"are one tensor {where} (tie_word_embeddings in the config ties those of tokens)"


def _tied(model: nn.Module) -> set[tuple[str, ...]]:
    owners: dict[object, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        has_memory = parameter.numel() > 0 and not parameter.is_meta
        memory = (parameter.untyped_storage().data_ptr(), parameter.storage_offset()) if has_memory else id(parameter)
        owners[memory].append(name)
    return {tuple(names) for names in owners.values() if len(names) > 1}


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    value = getattr(value, "__func__", value)  # of a bound method, whose text has the whole model in it
    value = getattr(value, "func", value)  # of a partial
    name = "missing" if value is None else getattr(value, "__qualname__", None)
    return name or show_value(value)


def _summary(differences: Sequence[Difference]) -> str:
    """Return some differences in words, with equal ones of all layers in one."""
    grouped: dict[Difference, list[str]] = defaultdict(list)
    for name, text in differences:
        grouped[re.sub(r"\b\d+\b", "*", name), text].append(name.removeprefix(IN_PEFT))
    lines = [
        f"{names[0]}{f' (and {len(names) - 1} like it)' if len(names) > 1 else ''} {text}"
        for (_, text), names in grouped.items()
    ]
    return "; ".join(lines[:_NAMED]) + (f"; and {len(lines) - _NAMED} others" if len(lines) > _NAMED else "")
