"""Put adapters of peft into the modules of a stage, read them from a folder, and write them as peft does."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.functional import cast_adapter_dtype
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from terapipe_ds.files.atomic import write_atomically
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError, gathered
from terapipe_ds.models.hugging_face.weights.in_memory import IN_PEFT, Changes
from terapipe_ds.models.hugging_face.weights.quantized import is_quantized_by
from terapipe_ds.models.hugging_face.weights.stored import ADAPTER_CONFIG, checksum_of, named, object_in, opened

ADAPTER_FILE = "adapter_model.safetensors"
_NAME = "default"  # of the adapter, as peft calls the first one
_INITIAL = (True, False, "gaussian", "orthogonal")  # others change the weights beside which adapters are trained
# Options of LoraConfig: the ones that stages serve, and for some of the others an alternative.
_SERVED = """
    alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout
    megatron_config megatron_core modules_to_save modules_to_tie peft_type peft_version qalora_group_size r rank_pattern
    revision runtime_config target_modules target_modules_to_tie target_parameters task_type use_dora use_qalora
    use_rslora
"""
_INSTEAD = {
    "trainable_token_indices": 'trains some rows of the embedding: train all, by modules_to_save=["embed_tokens"]',
    "layer_replication": "has other layers than the config of the model: save a model that has them, and pass that",
    "alora_invocation_tokens": "needs token ids, and stages get hidden states: leave it out",
}


class Adapters:
    """Hold low-rank adapters beside frozen weights, in the modules that a config of peft names.

    peft decides on the whole model which parameters are trained, and under which keys they are saved. Initial values
    depend only on the seed and the name of a module.

    Args:
        adapter: peft's config; or a folder of adapters that peft has written, or a model that has adapters: the
        training of both continues.
        whole: the model with such adapters, as `with_adapters` makes it.
        outline: says which modules of the model have weights.

    Raises:
        ModelRefusedError: a target is no module of a stage, or cannot be saved; or the folder has other adapters than
            its config says.
    """

    def __init__(
        self, adapter: LoraConfig | PeftModel | str | os.PathLike[str], whole: PeftModel, outline: Outline, seed: int
    ) -> None:
        self._outline, self._seed = outline, seed
        self._changes, self._keeps_dtypes = Changes(), False
        self.beside: list[str] = []
        self.config = whole.peft_config[_NAME]
        # peft knows the keys of its files; it lists them here for the whole model, without values
        state = whole.state_dict(keep_vars=True)
        key_of = {id(value): key.removeprefix(IN_PEFT) for key, value in state.items()}
        saved = get_peft_model_state_dict(whole, state, save_embedding_layers=False)
        self._saved_as = {key_of[id(value)]: key for key, value in saved.items()}
        self._shapes = {key: value.shape for key, value in saved.items()}
        of_tokens = re.compile(rf"{IN_PEFT}({outline.embedding}|{outline.head})\.(?!original_module|.*\.{_NAME}\.)")
        matrices = {key: value.shape for key, value in state.items() if of_tokens.match(key)}
        if _is_resized(whole):  # the base model lacks the new rows, which need not be trained; peft saves them, too
            self._saved_as |= {key.removeprefix(IN_PEFT): key for key in matrices}
        # what peft may save beside adapters
        self._below = matrices | {key: value.shape for key, value in state.items() if ".base_layer." in key}
        self._trained = {key.removeprefix(IN_PEFT) for key, value in whole.named_parameters() if value.requires_grad}
        unsaved = sorted(self._trained - set(self._saved_as))
        if unsaved:
            raise ModelRefusedError(f"peft would train {named(unsaved)}, and not save it: give bias='none'")
        self._owners = {name for name in outline.names if any(key.startswith(f"{name}.") for key in self._trained)}
        if outline.tied is not None and self._owners & {outline.embedding, outline.head}:
            raise ModelRefusedError(
                "its embedding is the output matrix as well, and takes no adapter: leave both out of target_modules "
                "and modules_to_save"
            )
        self._stored = None if isinstance(adapter, PeftConfig) else self._checked(_tensors_of(adapter))
        is_read, stored = isinstance(adapter, str | os.PathLike), self._stored or {}
        self.checksum = checksum_of(each for _, each in sorted(stored.items())) if is_read else None

    def take_over(self, changes: Changes, keeps_dtypes: bool) -> None:
        """Give the adapters, and trained weights beside them, the settings of a model in memory."""
        self._changes, self._keeps_dtypes = changes, keeps_dtypes
        self.beside = [name for name, is_on in changes.requires_grad.items() if is_on and name not in self._saved_as]

    def _checked(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes = {key: value.shape for key, value in stored.items()}
        # peft also saves embedding and output matrix if they have adapters or new rows: they are read, and saved again
        self._saved_as |= {key.removeprefix(IN_PEFT): key for key in stored.keys() & self._below.keys()}
        below = self._below.items() - self._shapes.items()
        differ = sorted({key for key, _ in (shapes.items() ^ self._shapes.items()) - below})
        if differ:
            raise ModelRefusedError(
                f"the adapters and their config ({ADAPTER_CONFIG}) do not agree on {named(differ)}: give adapters that "
                "were made for this model"
            )
        return stored

    def put_into(self, name: str, module: nn.Module) -> nn.Module:
        """Return the module with frozen weights, and with adapters if the config names a part of it."""
        module.requires_grad_(False)
        if name not in self._owners:
            self._put_stored(name, module)
            self._changes.put_onto(module, name)
            return module
        # peft goes by names in the whole model, but a stage only has one module of it
        whole = module
        for part in reversed(name.split(".")):  # so that its parts have the names that the config speaks of
            whole, inner = nn.Module(), whole
            whole.add_module(part, inner)
        whole.config = self._outline.config  # type: ignore[assignment]
        whole.is_loaded_in_4bit = is_quantized_by(self._outline.model.config)  # type: ignore[assignment]
        # peft writes into the config that it injects
        config = copy.deepcopy(self.config)
        if not any(key.startswith(f"{name}.") and ".lora_" in key for key in self._trained):
            config.target_modules = DUMMY_TARGET_MODULES  # a whole module, or a bias, is trained and nothing beside it
        with torch.random.fork_rng([]):
            torch.manual_seed(self._seed * 1_000_003 + zlib.crc32(f"adapters of {name}".encode()))
            inject_adapter_in_model(config, whole)
        cast_adapter_dtype(whole, _NAME)  # 16 bits to 32, as get_peft_model does: small steps would round to nothing
        injected = whole.get_submodule(name)
        for key, parameter in injected.named_parameters():
            if parameter.requires_grad != (f"{name}.{key}" in self._trained):
                raise ModelRefusedError(f"peft trains other weights of {name} alone than of it in the model ({key})")
        self._put_stored(name, injected)
        self._changes.put_onto(injected, name)
        return injected

    def _put_stored(self, name: str, module: nn.Module) -> None:
        for key, parameter in module.named_parameters():
            if (stored := (self._stored or {}).get(self._saved_as.get(f"{name}.{key}", ""))) is not None:
                parameter.data = stored.to("cpu", stored.dtype if self._keeps_dtypes else parameter.dtype, copy=True)

    def gathered(self, pieces: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the adapters of all stages by the keys of peft. A collective over all ranks."""
        here = {
            self._saved_as[key]: value.detach().cpu().clone()
            for state in pieces.values()
            for key, value in state.items()
            if key in self._saved_as
        }
        return {key: value for stage in gathered(here) for key, value in stage.items()}

    @staticmethod
    def merged(module: nn.Module, prefix: str) -> dict[str, Tensor]:
        """Return the weights of a module with its adapters added, under `prefix` and the names without adapters."""
        module = copy.deepcopy(module)
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.merge()
        return _plain(module.state_dict(prefix=prefix), f"modules_to_save.{_NAME}.", "original_module.")

    def save(self, tensors: dict[str, Tensor], base: str | None, folder: Path) -> None:
        """Write adapters and their config, as `PeftModel.save_pretrained` does; `base` names the model."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ADAPTER_FILE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        config.base_model_name_or_path = base
        # by these names peft's AutoPeftModel classes find the model's class if the config says no task
        kind = type(self._outline.model)
        named = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else named)


def with_adapters(adapter: PeftConfig | PeftModel | str | os.PathLike[str], model: PreTrainedModel) -> PeftModel:
    """Put adapters without values into a model on the device "meta", as peft does.

    Raises ModelRefusedError if no module has such a name, or if stages do not serve such adapters.
    """
    config = copy.deepcopy(_config_of(adapter))
    check_kind(config)
    if is_quantized_by(model.config) and (config.use_dora or config.bias != "none"):
        option = "use_dora=True" if config.use_dora else f"bias={config.bias!r}"
        raise ModelRefusedError(f"LoraConfig({option}) is not served beside quantized weights: leave it out")
    config.inference_mode = False  # as saved adapters have it
    try:
        return get_peft_model(model, config, low_cpu_mem_usage=True)  # resolves "all-linear" in the config
    except ValueError as error:
        raise ModelRefusedError(str(error)) from error


def check_kind(config: PeftConfig) -> None:
    """Raise ModelRefusedError if stages do not serve adapters of such a config, whatever the model."""
    if config.peft_type != "LORA":
        raise ModelRefusedError(
            f"stages train adapters of LoraConfig, and not of {type(config).__name__}, for which peft needs the whole "
            "model: give LoraConfig, or a model into which the adapters are merged"
        )
    if config.init_lora_weights not in _INITIAL:
        raise ModelRefusedError(
            f"init_lora_weights {config.init_lora_weights!r} changes the weights that are not saved: give True"
        )
    # an option of a newer peft that stages do not serve is refused unless it has its default
    plain = vars(LoraConfig())
    for name in sorted(vars(config).keys() - {*_SERVED.split()}):
        value = getattr(config, name)
        if value != plain.get(name):
            raise ModelRefusedError(f"LoraConfig({name}={value!r}) {_INSTEAD.get(name, 'is not served: leave it out')}")


def _is_resized(model: PeftModel) -> bool:
    """Return whether a model in memory has another vocabulary than the folder that it comes from."""
    if base := model.config.name_or_path:
        with contextlib.suppress(OSError, ValueError):  # no folder, and not in the cache of the hub
            stored = AutoConfig.from_pretrained(base, local_files_only=True).get_text_config()
            return stored.vocab_size != model.config.get_text_config().vocab_size
    return False


def _config_of(adapter: PeftConfig | PeftModel | str | os.PathLike[str]) -> PeftConfig:
    if isinstance(adapter, PeftModel):
        if list(adapter.peft_config) != [_NAME]:
            raise ModelRefusedError(f"its adapters are named {list(adapter.peft_config)}: give one, named {_NAME!r}")
        if any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in adapter.modules()):
            raise ModelRefusedError("its adapters are merged into its weights: call model.unmerge_adapter() before")
        return adapter.peft_config[_NAME]
    if isinstance(adapter, PeftConfig):
        return adapter
    if not isinstance(adapter, str | os.PathLike):
        raise ModelRefusedError(f"adapters are a LoraConfig or a folder of peft, not a {type(adapter).__name__}")
    if not (Path(adapter) / ADAPTER_CONFIG).is_file():
        raise ModelRefusedError(
            f"adapter={os.fspath(adapter)!r} is no folder with {ADAPTER_CONFIG}. If it is a name on the hub, download "
            f"it and give the folder: huggingface_hub.snapshot_download({os.fspath(adapter)!r})"
        )
    object_in(path := Path(adapter) / ADAPTER_CONFIG)  # peft would not name the file
    try:
        return PeftConfig.from_pretrained(os.fspath(adapter))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelRefusedError(
            f"peft {peft.__version__} cannot read {path} ({type(error).__name__}: {error}): install the version that "
            "wrote the adapters, or make them anew by LoraConfig"
        ) from error


def _tensors_of(adapter: PeftModel | str | os.PathLike[str]) -> dict[str, Tensor]:
    if isinstance(adapter, PeftModel):
        tensors: dict[str, Tensor] = get_peft_model_state_dict(adapter, save_embedding_layers=False)
        return tensors
    file = Path(adapter) / ADAPTER_FILE
    if not file.is_file():
        raise ModelRefusedError(f"{file.parent} has no {ADAPTER_FILE}: write it by save_pretrained of peft")
    with opened(file) as stored:
        return {key: stored.get_tensor(key) for key in sorted(stored.keys())}


def without_adapters(model: PeftModel) -> dict[str, Tensor]:
    """Return the state dict of the model without the adapters that were put on it."""
    return _plain(model.get_base_model().state_dict(), "original_module.", "modules_to_save.")


def _plain(state: Mapping[str, Tensor], kept: str, dropped: str) -> dict[str, Tensor]:
    """Return the weights beside adapters, under their names without adapters; of two copies, the `kept` one."""
    return {
        key.replace(kept, "").replace("base_layer.", ""): value
        for key, value in state.items()
        if dropped not in key and ".lora_" not in f".{key}"
    }
