"""Give the modules of a stage their weights: drawn as the family draws them, or read from a folder of safetensors."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import parse_json
from terapipe_ds.models.hugging_face.outline import Outline
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights(Protocol):
    """Where weights come from."""

    def fill(self, name: str, original: nn.Module, module: nn.Module) -> None:
        """Set all parameters of `module`, a copy of `original`, which has the name `name` in the model."""


class DrawnWeights:
    """Random weights, as the family draws them.

    They depend on the seed and a module's name alone: a model starts from the same weights however many stages it is
    cut into.
    """

    def __init__(self, outline: Outline, seed: int) -> None:
        self._outline, self._seed = outline, seed

    @torch.no_grad()
    def fill(self, name: str, original: nn.Module, module: nn.Module) -> None:
        """Draw the parameters; see `Weights`."""
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
        with torch.random.fork_rng([]):
            torch.manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))
            for each in reversed(list(module.modules())):
                self._outline.initialize(each)
        for key, parameter in module.named_parameters():
            if parameter.isnan().any():
                initial = getattr(original.get_parameter(key), "initial", None)
                if initial is None:
                    raise ModelRefusedError(f"its code does not say what {name}.{key} is before training")
                parameter.copy_(initial)


class StoredWeights:
    """The weights of a folder in the form of `save_pretrained`; a module's are read when it is built, and no others.

    Where the folder's keys are not those of the model (experts by number, fused in memory), transformers' own
    conversion goes between.

    Args:
        model: the model with parameters on the device "meta"; its modules hold the weights while they are converted.
        names: of all modules that have weights.
    """

    def __init__(self, folder: str | os.PathLike[str], model: PreTrainedModel, names: Sequence[str]) -> None:
        self._folder, self._model = Path(folder), model
        self._file_of = _files(self._folder)
        self._conversions = _conversions(model)
        self._keys_of: dict[str, list[str]] = {name: [] for name in names}
        state = model.state_dict()
        for key in self._file_of:
            target = self._conversions.target(key, state)
            owner = next((name for name in names if target.startswith(f"{name}.")), None)
            if owner is not None:
                self._keys_of[owner].append(key)

    @torch.no_grad()
    def fill(self, name: str, original: nn.Module, module: nn.Module) -> None:
        """Read the parameters and buffers; see `Weights`."""
        holder = self._model.get_submodule(name)
        meta = [(each, key, value) for each in holder.modules() for key, value in each._parameters.items()]
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}
            for key in self._keys_of[name]:
                file = self._file_of[key]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(self._folder / file, framework="pt"))
            slices = {key: opened[self._file_of[key]].get_slice(key) for key in self._keys_of[name]}
            self._conversions.load(self._model, slices)
            loaded = holder.state_dict()
            missing = sorted(key for key, value in loaded.items() if value.is_meta)
            if missing:
                raise ModelRefusedError(
                    f"{self._folder} has no weights, or none of this shape, for {name}.{missing[0]}"
                )
            for key, value in module.state_dict().items():
                value.copy_(loaded[key])  # out of the file, whose memory is mapped
        for each, key, value in meta:
            each._parameters[key] = value


class _Conversions:
    """The names of weights in files and in the model are the same, as in transformers 4."""

    def target(self, key: str, state: dict[str, torch.Tensor]) -> str:
        return key

    def load(self, model: PreTrainedModel, slices: dict[str, Any]) -> None:
        for key, each in slices.items():
            owner, _, last = key.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(each[...], False))


class _RegisteredConversions(_Conversions):
    """Those that transformers 5 has for a family: it keeps some weights in another form than files have them."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._prefix = model.base_model_prefix
        self._all = get_model_conversion_mapping(model)
        self._renamings = [each for each in self._all if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self._all if isinstance(each, WeightConverter)]

    def target(self, key: str, state: dict[str, torch.Tensor]) -> str:
        from transformers.core_model_loading import rename_source_key

        target = rename_source_key(key, self._renamings, self._converters, self._prefix, state)[0]
        return target if target in state else rename_source_key(key, [], [], self._prefix, state)[0]

    def load(self, model: PreTrainedModel, slices: dict[str, Any]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with _without_progress_bar():
            info, _ = convert_and_load_state_dict_in_model(model, slices, LoadStateDictConfig(weight_mapping=self._all))
        if info.error_msgs or info.conversion_errors:
            raise ModelRefusedError(f"its weights cannot be converted: {info.error_msgs or info.conversion_errors}")


def _conversions(model: PreTrainedModel) -> _Conversions:
    try:
        return _RegisteredConversions(model)
    except ImportError:
        return _Conversions()


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def _files(folder: Path) -> dict[str, str]:
    """Return for each key of a folder the file that has it."""
    if (folder / INDEX).is_file():
        weight_map = parse_json(read_bytes(folder / INDEX)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in weight_map.values()
        ):
            raise ModelRefusedError(f"{folder / INDEX} has no weight_map of keys to names of files in the folder")
        return weight_map
    if not (folder / SINGLE).is_file():
        raise ModelRefusedError(
            f"{folder} has neither {SINGLE} nor {INDEX}: give a folder that save_pretrained of transformers has "
            "written, with safe_serialization"
        )
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)
