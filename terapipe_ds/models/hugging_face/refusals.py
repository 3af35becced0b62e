"""Say why a model of transformers cannot be cut into pipeline stages or run in token slices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
import transformers
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import cache_utils

from terapipe_ds import compat
from terapipe_ds.messages import closest

T = TypeVar("T")
OF_HUB = ("revision", "token", "local_files_only")
SOURCE = "_terapipe_source"  # the attribute of a skeleton with the folder of its weights

_OF_FOLDER = (
    "Each stage reads the weights of the folder: give stored adapters as adapter= of from_pretrained, or change a "
    "model in memory, which AutoModelForCausalLM.from_pretrained makes"
)

# Fields of a config that give another result in slices or stages than on the whole sequence.
_NOT_OF_SLICES = {
    "output_router_logits": "it asks for a loss over the routers of all stages. Set it to False",
    "layerdrop": "whole decoder layers would be left out at random, in one slice and not in the next. Set it to 0",
    "z_loss_coefficient": "it adds a term to the model's own loss, and stages compute the loss_fn alone. Set it to 0",
}
# Arguments of transformers, and their replacements.
_INSTEAD = {
    "attn_implementation": (
        "leave it out: sliced_attention, or the model's code with a cache, attends. A model in memory keeps a function "
        "that is registered"
    ),
    "trust_remote_code": "code from a hub is not run: AutoModelForCausalLM.register its class, and pass a model of it",
    "quantization_config": "random weights are not quantized: from_pretrained quantizes those of a folder",
    "load_in_8bit load_in_4bit": "give from_pretrained quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "cache_dir": "set HF_HUB_CACHE in the environment, or give a folder",
    "device_map max_memory offload_folder low_cpu_mem_usage tp_plan": (
        "leave it out: DeepSpeed gives each rank its device, and each stage reads only the weights of its layers"
    ),
}


class ModelRefusedError(ValueError):
    """Report a model that cannot be trained in token slices; the message names the cause, and the remedy."""

    remedy = "Write its layers as a PipelineModule (docs/models.md), or train it on one device"


class NotCausalError(ModelRefusedError):
    """Report a model whose tokens attend to later ones: slices of them cannot run one after the other."""

    remedy = 'Take a causal language model, or train this one without a "terapipe" section'


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, by rank. A collective on the CPU: ranks may have no device yet."""
    values = [value] * torch_dist.get_world_size()
    # NCCL needs a device, which DeepSpeed sets
    group = None if torch_dist.get_backend() == "gloo" else _over_gloo(torch_dist.group.WORLD)
    torch_dist.all_gather_object(values, value, group=group)
    return values


@functools.lru_cache(maxsize=1)  # to make a group connects each rank to all others
def _over_gloo(world: Any) -> Any:
    """Return a group over gloo of all ranks of `world`."""
    return torch_dist.new_group(backend="gloo")


@contextlib.contextmanager
def refused_on_all_ranks() -> Iterator[None]:
    """Raise one rank's refusal on all ranks, since the others would wait for it. A collective at its end."""
    problem, own = "", None
    try:
        yield
    except Exception as error:
        is_said = isinstance(error, (ValueError, OSError)) and str(error)
        problem, own = str(error) if is_said else f"{type(error).__name__}: {error}", error
        if torch_dist.get_world_size() == 1:
            raise
    problems = gathered(problem)
    if any(problems):
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        cause = own.__cause__ if isinstance(own, ModelRefusedError) else own  # its text is here already
        raise ModelRefusedError(text if len({*problems}) == 1 else f"on rank {rank}: {text}") from cause


def refuse_other_ranks(
    settings: Mapping[str, Any],
    what: str = "build different models",
    remedy: str = "model and the same arguments",
    gather: Callable[[Any], list[Any]] = gathered,
) -> None:
    """Raise ValueError on every rank if one has other settings than the first. A collective.

    Ranks that cut a model differently wait for one another in different groups. Tensor-parallel ranks of different
    models would be told that their layers cannot be divided. `gather` returns a value of all ranks.
    """

    def text(value: Any) -> str:
        return ", ".join(sorted(map(str, value))) if isinstance(value, set | frozenset) else type(value).__name__

    own = {key: json.dumps(value, sort_keys=True, default=text) for key, value in settings.items()}
    first, *others = gather(own)
    for rank, other in enumerate(others, 1):
        for key in first | other:
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"the ranks {what}: {key} is {first.get(key, 'absent')} on rank 0, and "
                    f"{other.get(key, 'absent')} on rank {rank}. Give every rank the same {remedy}"
                )


def check_arguments(dtype: torch.dtype | str | None, options: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that the arguments name; None stands for the dtype of the config or of a model in memory.

    Raises TypeError for unknown arguments of `from_config` and `from_pretrained`, with the right ones.
    """
    # arguments of transformers' from_pretrained that ask for nothing
    for name in [name for name in options if not options[name] and any(name in names.split() for names in _INSTEAD)]:
        del options[name]
    dtype = options.pop("torch_dtype", None) if dtype is None else dtype
    dtype = None if dtype == "auto" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dtype={dtype!r} is no floating dtype of torch: give torch.bfloat16 or the like, or leave it out, which "
            "takes that of the config or of the model in memory"
        )
    # arguments of DeepSpeed go through to it
    arguments = inspect.signature(PipelineModule.__init__).parameters.keys() - {"self", "layers"}
    arguments |= {"num_stages", "topology", "partition", "loss_fn", "dtype", "adapter", "seed", *OF_HUB}
    for name in options:
        if name not in arguments:
            close = closest(name, arguments)
            others = f"leave it out, or set it in the config of the model; known are {', '.join(sorted(arguments))}"
            advice = others if close is None else f"did you mean {close}?"
            advice = next((text for names, text in _INSTEAD.items() if name in names.split()), advice)
            raise TypeError(f"{name} is no argument of from_pretrained or from_config: {advice}")
    return dtype


def base_of(model: nn.Module) -> Any:
    """Return the model that peft has put adapters into, or the model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def language_model_of(model: nn.Module) -> transformers.PreTrainedModel:
    """Return the causal language model of transformers that is `model`, or has its adapters; refuse any other."""
    base = base_of(model)
    if not isinstance(base, transformers.PreTrainedModel):
        raise ModelRefusedError(
            f"a {type(model).__name__} is no model of transformers: pass what AutoModelForCausalLM makes (without "
            "a wrapper of torch.compile or data parallelism), or write a PipelineModule (docs/models.md)"
        )
    # stages run the class that this mapping names, and no other
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base.config), None)
    if type(base) is not family:
        config = type(base.config).__name__
        problem = f"AutoModelForCausalLM has no class for a {config}: pass a model that decodes text alone"
        if family is not None:
            wanted = f"causal language model of a {config}, which is {family.__name__}"
            problem = f"{type(base).__name__} is not the {wanted}: pass that one"
        raise ModelRefusedError(
            f"{problem}. Or register your own class: AutoModelForCausalLM.register({config}, ..., exist_ok=True)"
        )
    is_skeleton, have_values = hasattr(base, SOURCE), [not parameter.is_meta for parameter in base.parameters()]
    if base.device.type == "meta" and not is_skeleton:
        raise ModelRefusedError("its weights are on the device meta, without values: pass the folder that has them")
    if is_skeleton and any(have_values):
        raise ModelRefusedError(f"it is a skeleton, and {sum(have_values)} of its weights have values. {_OF_FOLDER}")
    if base is model and getattr(model, "peft_config", None):
        raise ModelRefusedError("its adapters come from add_adapter: use peft's get_peft_model(model, config) instead")
    return base


def refuse_values(*_: Any) -> None:
    """Raise ModelRefusedError, as a hook of a skeleton, where a program or peft would give it values."""
    raise ModelRefusedError(f"a skeleton has no values, and loads none. {_OF_FOLDER}")


def check_config(config: Any) -> None:
    """Raise ModelRefusedError if the config alone shows that the model cannot be trained in slices."""
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(
            f"a {type(config).__name__} is no config of transformers: AutoConfig.from_pretrained reads one; a folder "
            "with weights goes to from_pretrained"
        )
    for name, reason in _NOT_OF_SLICES.items():
        if value := getattr(config.get_text_config(), name, None):
            raise ModelRefusedError(f"{name} is {value}: {reason}")
    if not getattr(config, "return_dict", True):
        raise ModelRefusedError("return_dict is False: stages read the outputs of its forward by name. Set it to True")
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    other = re.search(r"\w+(Classification|QuestionAnswering|MultipleChoice|MaskedLM)\b", str(config.architectures))
    if other:
        raise NotCausalError(f"it is a {other[0]} and no causal language model")
    # the causal models of encoder-decoders take their decoders alone
    of_both = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    is_encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and type(config) not in of_both
    if is_encoder and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        raise NotCausalError("its tokens attend to later ones, which slices of tokens have yet to compute")
    if family is None:
        raise NotCausalError(f"transformers has no causal language model of a {type(config).__name__}")
    if getattr(family, "_is_stateful", False) and not hasattr(cache_utils, "LinearAttentionCacheLayerMixin"):
        raise ModelRefusedError(
            f"transformers {transformers.__version__} has a cache of a kind of its own for the states of its layers; "
            f"{compat.TESTED_VERSIONS['transformers']} has one for all"
        )


def end_of_scaled_angles(config: Any) -> int | None:
    """Return for how many positions the rotary angles are scaled; None if none are: plain ones go on.

    Angles of kind "dynamic" are the same for all lengths up to there, and then others for each length.
    """
    most, ends = getattr(config, "max_position_embeddings", None), []
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_types = [of_type for of_type in scaling.values() if isinstance(of_type, dict)]  # one for each type of layer
    for rope in of_types or [scaling]:
        kind, factor = str(rope.get("rope_type", rope.get("type", "default"))), rope.get("factor")
        if kind in ("dynamic", "longrope") and most:
            ends.append(most)
        elif kind in ("linear", "yarn", "llama3") and factor and most:
            original = most if kind == "linear" else rope.get("original_max_position_embeddings") or most
            ends.append(max(most, int(original * factor)))
    return min(ends, default=None)
