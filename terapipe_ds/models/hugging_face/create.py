"""Make a `HuggingFaceModule` of a config, a folder, or a model in memory."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as torch_dist
import transformers
from deepspeed.runtime.pipe.topology import ProcessTopology
from huggingface_hub import snapshot_download
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from terapipe_ds import compat
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.forward.probe import find_way
from terapipe_ds.models.hugging_face.layers import Blueprint
from terapipe_ds.models.hugging_face.module import HuggingFaceModule, Loss
from terapipe_ds.models.hugging_face.refusals import (
    OF_HUB,
    SOURCE,
    ModelRefusedError,
    check_arguments,
    check_config,
    language_model_of,
    refuse_values,
    refused_on_all_ranks,
)
from terapipe_ds.models.hugging_face.saving import finish_saving
from terapipe_ds.models.hugging_face.weights.in_memory import changes_of
from terapipe_ds.models.hugging_face.weights.quantized import ask_for, quantize, refuse_quantized
from terapipe_ds.models.hugging_face.weights.stored import (
    ADAPTER_CONFIG,
    DrawnWeights,
    HeldWeights,
    StoredWeights,
    Weights,
    object_in,
)

SMALL = 1024
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model on the hub
_OTHERS = ["consolidated*", "*/*.safetensors"]  # the same weights once more, in Mistral's form, and other models
if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from terapipe_ds.models.hugging_face.weights.adapters import Adapters

Adapter: TypeAlias = "PeftConfig | PeftModel | str | os.PathLike[str] | None"
Quantization: TypeAlias = "BitsAndBytesConfig | dict[str, Any] | None"


def from_config(
    config: PretrainedConfig,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    partition: Sequence[int] | None = None,
    loss_fn: Loss | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    adapter: Adapter = None,
    seed: int = 1234,
    **options: Any,
) -> HuggingFaceModule:
    """Return the causal language model of a config of transformers, with random weights, as a `PipelineModule`.

    Args:
        config: a config that `transformers.AutoModelForCausalLM.from_config` takes.
        num_stages: 2 by default; the ranks beyond them are data parallel.
        topology: DeepSpeed's, in the place of `num_stages`.
        partition: the first pipeline layer of each part, and the number of layers at the end. Layer 0 embeds tokens.
        loss_fn: takes logits and shifted labels; the default is the mean cross entropy over labels that are not -100.
        dtype: of the weights, or its name; the default ("auto") is the config's. torch_dtype is another name for it.
        adapter: a LoraConfig of peft, or a folder of adapters whose training continues. Adapters are trained instead
        of all weights, and `save_pretrained` writes them.
        seed: of the initial weights, which do not depend on the number of stages.
        options: other arguments of `PipelineModule`, `activation_checkpoint_interval` among them.

    Raises:
        ModelRefusedError: the model cannot be cut into stages that run token slices; the message says why.
    """
    # a misspelt argument is an error before anything is built or read
    dtype = check_arguments(dtype, options)
    if of_hub := [name for name in OF_HUB if name in options]:
        raise TypeError(f"from_config reads nothing from the hub: leave out {', '.join(of_hub)}")
    refuse_quantized(config, "drawn")
    with _family_named(config):
        outline = Outline(model_without_weights(config, dtype))
    with refused_on_all_ranks():  # adapters may be in a folder
        adapters = _adapters(adapter, config, dtype, outline, seed)
    with _family_named(config):
        blueprint = Blueprint(outline, DrawnWeights(outline, seed), adapters)
        return HuggingFaceModule(blueprint, num_stages, topology, partition, loss_fn, **options)


def from_pretrained(
    folder: str | os.PathLike[str] | PreTrainedModel | PeftModel,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    partition: Sequence[int] | None = None,
    loss_fn: Loss | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    adapter: Adapter = None,
    quantization_config: Quantization = None,
    seed: int = 1234,
    **options: Any,
) -> HuggingFaceModule:
    """Return the causal language model in a folder as a `PipelineModule`; each stage reads the weights of its layers.

    Args:
        folder: with a config and safetensors, as `save_pretrained` of transformers writes them, or a name on the hub,
            which is downloaded into its cache; or with adapters, as peft writes them, whose config names the model. Or
            a model in memory, with or without peft's adapters; then each rank holds the whole model, unless it is a
            `skeleton`. Its requires_grad, gradient checkpointing, dropout and buffers are kept, and any other change
            to it is an error.
        num_stages, topology, partition, loss_fn, dtype, adapter, seed: as in `from_config`.
        quantization_config: of transformers, with load_in_4bit: each stage quantizes the frozen weights beside the
            adapters as it reads them. A folder of quantized weights needs none.
        options: as in `from_config`; also `revision`, `token` and `local_files_only` of the hub.

    Raises:
        ModelRefusedError: the model cannot be cut into stages that run token slices, or the folder lacks weights.
    """
    dtype = check_arguments(dtype, options)
    of_hub = {name: options.pop(name) for name in OF_HUB if name in options}
    options |= {"num_stages": num_stages, "topology": topology, "partition": partition, "loss_fn": loss_fn}
    if isinstance(folder, nn.Module):
        if quantization_config:
            raise TypeError("quantization_config is for a folder: give it to skeleton, or the model's folder here")
        return _from_model(folder, dtype, adapter, seed, options)
    with refused_on_all_ranks():
        if torch_dist.get_rank() == 0:  # a save that was killed in the moment of its moves
            for source in (folder, adapter):
                if isinstance(source, str | os.PathLike):
                    finish_saving(Path(source))
    with refused_on_all_ranks():  # each may have a disk of its own
        name, folder, adapter = _folders(folder, adapter, of_hub)
        config = _config_of(name, folder, quantization_config)
        if adapter is None:
            refuse_quantized(config, "trained")
        with _family_named(config):
            outline = Outline(_empty_model(config, dtype, folder))
        # the second model holds tensors while weights are converted: the first is taken apart by now
        weights = StoredWeights(folder, model_without_weights(config, dtype), outline)
        blueprint = Blueprint(outline, weights, _adapters(adapter, config, dtype, outline, seed))
    with _family_named(config):
        return HuggingFaceModule(blueprint, **options)


def _from_model(
    model: PreTrainedModel | PeftModel, dtype: torch.dtype | None, adapter: Adapter, seed: int, options: dict[str, Any]
) -> HuggingFaceModule:
    # the owner's changes, compared with a fresh model with such adapters; each rank has a model of its own
    with refused_on_all_ranks():
        base = language_model_of(model)
        kept_dtype, has_adapters, source = dtype or base.dtype, base is not model, getattr(base, SOURCE, None)
        if source is None:
            refuse_quantized(base.config, "copied")
        whole = fresh = model_without_weights(base.config, kept_dtype)
        state = base.state_dict()
        if has_adapters:
            if adapter is not None:
                raise ModelRefusedError("the model has adapters, and others are given: leave out adapter=")
            from terapipe_ds.models.hugging_face.weights import adapters as of_peft  # which takes seconds to import

            state = of_peft.without_adapters(model)
            # adapters of a skeleton have no values yet
            adapter = model if source is None else model.peft_config["default"]
            whole = of_peft.with_adapters(model, model_without_weights(base.config, kept_dtype))
        if adapter is None:
            refuse_quantized(base.config, "trained")
        # this refuses by name everything that stages would not do like the owner's model
        changes = changes_of(model, whole, dtype)
        if (adapter is None or has_adapters) and not any(changes.requires_grad.values()):
            raise ModelRefusedError(
                "no parameter of the model requires a gradient, and nothing would be trained: call requires_grad_() on "
                "some, or load adapters by PeftModel.from_pretrained(..., is_trainable=True)"
            )
    # the layers, of a fresh model with these changes
    with _family_named(base.config):
        changes.put_onto(fresh)
        outline = Outline(fresh)
    outline.model.generation_config = base.generation_config
    with refused_on_all_ranks():  # adapters may be in a folder
        adapters = _adapters(adapter, base.config, kept_dtype, outline, seed)
        if adapters is not None and has_adapters:
            adapters.take_over(changes, keeps_dtypes=dtype is None)
        weights: Weights = HeldWeights(state, dtype)
        if source is not None:
            empty = model_without_weights(base.config, kept_dtype)
            weights = StoredWeights(source, empty, outline, changes.names)
        blueprint = Blueprint(outline, weights, adapters)
    # each decoder layer again in the backward, as transformers does; the caller may say otherwise
    if base.is_gradient_checkpointing:
        options = {"activation_checkpoint_interval": 1} | options
    with _family_named(base.config):
        return HuggingFaceModule(blueprint, **options)


def downloaded(name: str | os.PathLike[str], **of_hub: Any) -> Path:
    """Return a folder, or the hub's model of that name in the cache. Ranks of a machine wait for one another."""
    path = Path(name)
    if path.is_dir():
        return path.absolute()  # stages read it later, when the program may be in another folder
    try:
        return Path(snapshot_download(os.fspath(name), allow_patterns=_FILES, ignore_patterns=_OTHERS, **of_hub))
    except (OSError, ValueError) as error:  # the hub's errors are of these classes
        reason = str(error).strip().splitlines()[0]
        raise ModelRefusedError(
            f"{os.fspath(name)!r} is no folder, and not on the hub or in its cache: {reason}"
        ) from error


def _config_of(name: str | os.PathLike[str], folder: Path, quantization: Quantization) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(folder)
    config.name_or_path = os.fspath(name)  # adapters and model cards say it
    ask_for(quantization, config)
    return config


def _empty_model(config: PretrainedConfig, dtype: torch.dtype | None, folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = model_without_weights(config, dtype)
    # generation settings are only handed on to what is saved; older models have them in the config
    for name, options in ((GENERATION_CONFIG_NAME, {}), (CONFIG_NAME, {"_from_model_config": True})):
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder, name, **options)
            break
    return model


def skeleton(
    name: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    quantization_config: Quantization = None,
    **options: Any,
) -> PreTrainedModel:
    """Return the model of a folder or of a name on the hub, with parameters on the device "meta".

    `from_pretrained` and the Trainers of `integrations.trainer` take it: each stage then reads its own weights.
    `dtype` is as in `from_config`, `quantization_config` as in `from_pretrained`; `options`: `revision`, `token` and
    `local_files_only` of the hub.

    Raises:
        ModelRefusedError: there is no such folder or model, or stages cannot train it.
    """
    dtype = check_arguments(dtype, options)
    if unknown := sorted(options.keys() - {*OF_HUB}):
        raise TypeError(f"skeleton takes no {', '.join(unknown)}: give it to the Trainer or to from_pretrained")
    finish_saving(Path(name))
    folder = downloaded(name, **options)
    config = _config_of(name, folder, quantization_config)
    with _family_named(config):
        model = _empty_model(config, dtype, folder)
    setattr(model, SOURCE, folder)
    model.register_load_state_dict_pre_hook(refuse_values)
    return model


def _folders(
    folder: str | os.PathLike[str], adapter: Adapter, of_hub: dict[str, Any]
) -> tuple[str | os.PathLike[str], Path, Adapter]:
    """Return the model's folder as it was named and on this machine, and the adapters.

    Raises ModelRefusedError if there is no such folder or model.

    A folder that contains adapters is read as adapters, even if it also contains a model, as transformers does.
    """
    path = downloaded(folder, **of_hub)
    if not (path / ADAPTER_CONFIG).is_file():
        return folder, path, adapter
    if adapter is not None and not (
        isinstance(adapter, str | os.PathLike) and Path(adapter).resolve() == path.resolve()
    ):
        raise ModelRefusedError(f"{path} has adapters ({ADAPTER_CONFIG}), and others are given: leave out adapter=")
    # adapters say which model they belong to, by a folder or a name on the hub; theirs there is no revision of it
    config = object_in(path / ADAPTER_CONFIG)
    of_user = of_hub.get("revision") if Path(folder).is_dir() else None
    base, of_hub = config.get("base_model_name_or_path"), {**of_hub, "revision": of_user or config.get("revision")}
    if not isinstance(base, str):
        raise ModelRefusedError(
            f"{path} has adapters, and does not say for which model: give the folder of the model, and "
            f"adapter={str(path)!r}"
        )
    return base, downloaded(base, **of_hub), path


def _adapters(
    adapter: Adapter, config: PretrainedConfig, dtype: torch.dtype | None, outline: Outline, seed: int
) -> Adapters | None:
    if adapter is None:
        return None
    from terapipe_ds.models.hugging_face.weights import adapters  # peft takes seconds to import

    whole = adapters.with_adapters(adapter, model_without_weights(config, dtype))
    return adapters.Adapters(adapter, whole, outline, seed)


@contextlib.contextmanager
def _family_named(config: PretrainedConfig) -> Iterator[None]:
    """Check the config; name the family in every error that refuses it."""
    try:
        check_config(config)
        yield
    except (ModelRefusedError, AttributeError, ImportError, KeyError, TypeError) as error:
        # an error in code of transformers may mean the family, or a version whose internals differ
        problem = _problem_of_version()
        if problem:
            raise ModelRefusedError(
                f"transformers {transformers.__version__} differs from the versions that terapipe_ds knows, so that no "
                f"model can be cut into stages, not even a Llama ({problem}): install "
                f"transformers=={compat.TESTED_VERSIONS['transformers']}, or a newer terapipe_ds"
            ) from error
        if not isinstance(error, ModelRefusedError):
            raise
        text = f"{config.model_type} cannot be trained in stages and token slices: {error}. {error.remedy}"
        raise type(error)(text) from error.__cause__


def _problem_of_version() -> str:
    """Return why not even a tiny Llama can be cut, if that fails: then the model's family is not the cause."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    try:
        llama = transformers.LlamaConfig(**sizes, vocab_size=8)
        outline = Outline(model_without_weights(llama, torch.get_default_dtype()))
        find_way(outline, 0, Blueprint(outline, DrawnWeights(outline, 0)).filled(outline.layer_name(0)))
    except Exception as error:
        return str(error) if isinstance(error, ModelRefusedError) else f"{type(error).__name__}: {error}"
    return ""


def model_without_weights(config: PretrainedConfig, dtype: torch.dtype | None) -> Any:
    """Return the model with real buffers, and with parameters on the device "meta"."""
    options = {} if dtype is None else {"dtype": dtype}
    # each parameter becomes one without memory as the model's own code registers it
    with register_module_parameter_registration_hook(_to_meta):  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    quantize(model)
    return model


def _to_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if parameter.is_meta:
        return None
    without = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    if parameter.numel() <= SMALL:  # some families set a few numbers as they build the module, and never again
        without.initial = parameter.detach()  # type: ignore[attr-defined]
    return without
