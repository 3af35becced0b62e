"""Give the modules of a stage their weights: drawn as the family draws them, or read from a folder of safetensors."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as torch_dist
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import JsonError, parse_json
from terapipe_ds.messages import logger
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.hugging_face.tensor_parallel.layers import share_of
from terapipe_ds.models.hugging_face.weights.quantized import can_take, is_quantized, take
from terapipe_ds.models.hugging_face.weights.unread import leave_unread

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_SAMPLED = 64  # a checksum reads this many tensors, and this many numbers of each
_FLOATS = ("F64", "F32", "F16", "BF16")


class DrawnWeights:
    """Draw random weights, as the family draws them.

    They depend only on the seed and a module's name: a model starts from the same weights for any number of stages.
    """

    def __init__(self, outline: Outline, seed: int) -> None:
        self._outline, self.seed = outline, seed

    @torch.no_grad()
    def fill(self, name: str, module: nn.Module) -> None:
        """Draw all parameters of `module`, a copy of the one with the name `name` in the model."""
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
        # other random numbers of the process do not change
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
            for part in reversed(list(module.modules())):
                self._outline.initialize(part)
        for key, parameter in module.named_parameters():
            if parameter.isnan().any():
                initial = getattr(self._outline.module(name).get_parameter(key), "initial", None)
                if initial is None:
                    raise ModelRefusedError(f"its code does not say what {name}.{key} is before training")
                parameter.copy_(initial)


class StoredWeights:
    """Read the weights of a folder in the form of `save_pretrained`; each stage reads the weights of its own modules.

    `fill` reads nothing yet (`unread`). If the folder's keys differ from the model's (experts by number, fused in
    memory), transformers' own conversion translates them.

    Args:
        model: the model with parameters on the device "meta"; its modules hold the weights while they are converted.
        outline: which modules have weights.
        kept: names of buffers that keep the values that the copies of modules have, instead of the stored ones.

    Raises:
        ModelRefusedError: the files do not belong to such a model. Their headers show it, before anything is read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: PreTrainedModel, outline: Outline, kept: Collection[str] = ()
    ) -> None:
        self.folder, self._model, self._kept = Path(folder), model, kept
        self._file_of = _files(self.folder, model.config)
        self._conversions = _conversions(model)
        names = [name for name in outline.names if outline.tied is None or name != outline.head]
        # headers alone: a wrong folder is refused before gigabytes are read
        state, stored = model.state_dict(keep_vars=True), _headers(self.folder, self._file_of)
        filled, without_place = set[str](), list[str]()
        targets_of = {key: self._conversions.targets(key, state) for key in stored}
        # some programs write tied weights under the name of the output matrix alone
        tied = [f"{name}.weight" for name in (outline.embedding, outline.head) if outline.tied is not None]
        stored_tied = [key for key in tied if any(key in targets for targets, _ in targets_of.values())]
        self._stored_as = {outline.embedding: outline.head} if stored_tied == tied[1:] != [] else {}
        names = [self._stored_as.get(name, name) for name in names]
        self._keys_of: dict[str, list[str]] = {name: [] for name in names}
        for key, (dtype, shape) in stored.items():
            targets, is_converted = targets_of[key]
            owner = next((name for name in names if targets[0].startswith(f"{name}.")), None)
            if targets[0] not in state or owner is None:
                without_place += [] if targets[0] in state else [key]
                continue
            like = state[targets[0]]
            _check(key, dtype, None if is_converted or is_quantized(like) else shape, like)
            self._keys_of[owner].append(key)
            filled.update(targets)
        # buffers may be missing: they have real values in the model
        missing = [key for key in state if key not in filled and key.startswith(tuple(f"{name}." for name in names))]
        ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ["$^"])
        missing = [key for key in missing if state[key].is_meta or not re.search(ignored, key)]
        if missing:
            raise ModelRefusedError(
                f"{self.folder} has no weights for {named(missing)}: give the folder of a whole model whose config is "
                "of the same sizes, or remove what they belong to from its config"
            )
        self._say_unused(without_place)
        if len(stored_tied) == 2 and torch_dist.get_rank() == 0:
            self._check_tied([key for key, (targets, _) in targets_of.items() if targets[0] in tied])
        self.checksum = checksum_of(self._some())

    def _some(self) -> Iterator[torch.Tensor]:
        """Yield the first row of some tensors, by which ranks see whether their folders have the same model."""
        keys = sorted(self._file_of)
        for key in keys[:: 1 + len(keys) // _SAMPLED]:
            with opened(self.folder / self._file_of[key]) as file:
                stored = file.get_slice(key)
                yield stored[:1] if stored.get_shape() else file.get_tensor(key)

    def fill(self, name: str, module: nn.Module) -> None:
        """Defer reading parameters and saved buffers until they are needed."""
        leave_unread(module, functools.partial(self._read, name))

    def _read(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read the stored values of the module `name` into the tensors of a copy of it."""
        stored = self._stored_as.get(name, name)
        holder, keys = self._model.get_submodule(stored), self._keys_of[stored]
        meta = [(part, key, value) for part in holder.modules() for key, value in part._parameters.items()]
        with contextlib.ExitStack() as stack:
            # the files are mapped: tensors that no stage needs are never read
            files = {
                file: stack.enter_context(opened(self.folder / file))
                for file in dict.fromkeys(self._file_of[key] for key in keys)
            }
            slices = {key: files[self._file_of[key]].get_slice(key) for key in keys}
            self._conversions.load(self._model, slices)
            loaded = holder.state_dict(keep_vars=True)
            shares = {key: share_of(value, loaded[key]) for key, value in tensors.items()}  # views: not read yet
            wrong = [key for key, value in tensors.items() if not can_take(value, shares[key])]
            if wrong:
                raise ModelRefusedError(
                    f"{self.folder} has no weights, or none of this shape, for {name}.{wrong[0]}, or no scales of "
                    "its quantized values that fit: give a folder whose config and weights are of one model"
                )
            for key, value in tensors.items():
                if f"{name}.{key}" not in self._kept:
                    take(value, shares[key])
        for part, key, value in meta:
            part._parameters[key] = value
            if is_quantized(value):
                part.quant_state = None

    def _check_tied(self, both: list[str]) -> None:
        """Raise ModelRefusedError if embedding and output matrix, stored under these keys, differ."""
        # once, by one rank: the rest holds one of the two
        with contextlib.ExitStack() as stack:
            tensors = [stack.enter_context(opened(self.folder / self._file_of[key])).get_tensor(key) for key in both]
            if not all(torch.equal(tensors[0], each) for each in tensors[1:]):
                raise ModelRefusedError(
                    f"{both[0]} and {both[1]} are stored with different values, and the config ties them: set "
                    '"tie_word_embeddings" to false in its config.json'
                )

    def _say_unused(self, keys: list[str]) -> None:
        ignored = "|".join(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ["$^"])
        unused = [key for key in keys if not re.search(ignored, key) and not key.endswith("rotary_emb.inv_freq")]
        if unused and torch_dist.get_rank() == 0:
            text = "%s has weights that the model of its config has no place for, and they are not read: %s"
            logger.warning(text, self.folder, named(unused))


class HeldWeights:
    """Hold a model's weights in memory, by their keys in its state dict. Values are copied, in a dtype or their own."""

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        self._state: Mapping[str, torch.Tensor] | None = state
        self._dtype = dtype

    def release(self) -> None:
        """Hold no more weights: from now on modules are only built to take values from another stage, or for trials."""
        self._state = None

    @torch.no_grad()
    def fill(self, name: str, module: nn.Module) -> None:
        """Copy the parameters and saved buffers; once they are released, draw small numbers for parameters."""
        if self._state is None:
            with torch.random.fork_rng([]):  # tensor-parallel ranks compare what they compute with the same numbers
                torch.manual_seed(zlib.crc32(name.encode()))
                for parameter in module.parameters():
                    parameter.normal_(0.0, 0.02)
            return
        for key, value in module.state_dict(keep_vars=True).items():
            held = self._state[f"{name}.{key}"].detach()
            value.data = held.to(value.device, held.dtype if self._dtype is None else value.dtype, copy=True)


Weights: TypeAlias = DrawnWeights | StoredWeights | HeldWeights
"""Where a stage's weights come from."""


def _check(key: str, dtype: str, shape: list[int] | None, like: torch.Tensor) -> None:
    """Raise ModelRefusedError if `like` cannot have what is stored; no shape for values that change their form."""
    if like.is_floating_point() and dtype not in _FLOATS:
        raise ModelRefusedError(
            f"{key} is stored as {dtype}, and the model computes with it in floating point: quantized weights are not "
            "trained. Give those of the original"
        )
    if shape is not None and shape != list(like.shape):
        raise ModelRefusedError(
            f"{key} is stored with the shape {shape}, and the config asks for {list(like.shape)}: give a folder whose "
            "config and weights are of one model"
        )


def _headers(folder: Path, file_of: Mapping[str, str]) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype (as safetensors names it) and shape of each key. Raises ModelRefusedError for a wrong index."""
    headers: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(set(file_of.values())):
        if not (folder / name).is_file():
            raise ModelRefusedError(f"{folder / INDEX} names {name}, which is not there: download or copy it again")
        keys = [key for key, file in file_of.items() if file == name]
        with opened(folder / name) as file:
            absent = sorted(set(keys) - set(file.keys()))
            if absent:
                raise ModelRefusedError(f"{folder / name} lacks {named(absent)}, which {INDEX} says it has")
            for key in keys:
                entry = file.get_slice(key)
                headers[key] = entry.get_dtype(), entry.get_shape()
    return headers


def opened(path: Path) -> Any:
    """Return a file of safetensors, mapped. Raises ModelRefusedError with its name."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelRefusedError(f"{path} cannot be read ({error}): download or copy it again") from error


def checksum_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the first numbers of each tensor."""
    samples = (each.flatten()[:_SAMPLED].contiguous().view(torch.uint8) for each in tensors)
    return functools.reduce(lambda checksum, each: zlib.crc32(each.numpy().tobytes(), checksum), samples, 0)


def named(keys: Sequence[str]) -> str:
    """Name the first of some keys, and how many there are."""
    return f"{keys[0]}{f' and {len(keys) - 1} others' if len(keys) > 1 else ''}"


class _Conversions:
    """Convert nothing: the names of weights in files and in the model are the same, as in transformers 4."""

    def targets(self, key: str, state: Mapping[str, torch.Tensor]) -> tuple[list[str], bool]:
        """Return the keys in the model, several if one stored tensor holds them all; and if values change form."""
        return [key], False

    def load(self, model: PreTrainedModel, slices: dict[str, Any]) -> None:
        for key, stored in slices.items():
            owner, _, last = key.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(stored[...], False))


class _RegisteredConversions(_Conversions):
    """Apply the conversions that transformers 5 has for a family, whose files store some weights in another form."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._prefix = model.base_model_prefix
        self._quantizer = getattr(model, "hf_quantizer", None)
        self._all = get_model_conversion_mapping(model, hf_quantizer=self._quantizer)
        self._renamings = [conversion for conversion in self._all if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in self._all if isinstance(conversion, WeightConverter)]
        self._converter_of = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def targets(self, key: str, state: Mapping[str, torch.Tensor]) -> tuple[list[str], bool]:
        from transformers.core_model_loading import rename_source_key

        known = dict(state)
        target, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, known)
        if target not in state:
            return [rename_source_key(key, [], [], self._prefix, known)[0]], False
        # transformers names the first of several targets
        converter = self._converter_of.get(pattern)
        first, *others = [""] if converter is None else converter.target_patterns
        return [target, *(target.replace(first, other, 1) for other in others)], pattern is not None

    def load(self, model: PreTrainedModel, slices: dict[str, Any]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        quantizing = {} if self._quantizer is None else {"hf_quantizer": self._quantizer, "dtype": model.dtype}
        how = LoadStateDictConfig(weight_mapping=self._all, **quantizing)
        was_shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # the stage shows one for all of its layers
        try:
            info, _ = convert_and_load_state_dict_in_model(model, slices, how)
        finally:
            if was_shown:
                transformers_logging.enable_progress_bar()
        if info.error_msgs or info.conversion_errors:
            raise ModelRefusedError(f"its weights cannot be converted: {info.error_msgs or info.conversion_errors}")


def _conversions(model: PreTrainedModel) -> _Conversions:
    try:
        return _RegisteredConversions(model)
    except ImportError:
        return _Conversions()


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a folder. Raises ModelRefusedError with its name."""
    try:
        content = parse_json(read_bytes(path))
    except JsonError as error:
        raise ModelRefusedError(f"{path} is no JSON ({error}): download or copy it again") from None
    if not isinstance(content, dict):
        raise ModelRefusedError(f"{path} has no JSON object: download or copy it again")
    return content


def _files(folder: Path, config: PretrainedConfig) -> dict[str, str]:
    """Return for each key of a folder the file that has it: of several sets of files those that transformers reads."""
    asked = getattr(config, "transformers_weights", None)
    name = str(asked or (SINGLE if (folder / SINGLE).is_file() else INDEX))
    if not _is_inside(name) or not (folder / name).is_file():
        lacks = f"no {name} (its config's transformers_weights)" if asked else f"neither {SINGLE} nor {INDEX}"
        raise ModelRefusedError(
            f"{folder} has {lacks}. Where its weights are in another form (pytorch_model.bin), write them anew: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    if not name.endswith(".json"):
        with opened(folder / name) as file:
            return dict.fromkeys(file.keys(), name)
    weight_map = object_in(folder / name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_inside, weight_map.values())):
        raise ModelRefusedError(f"{folder / name} has no weight_map of keys to names of files in the folder")
    return weight_map


def _is_inside(name: Any) -> bool:
    """Return whether this names a file of a folder, perhaps in a subfolder, and no other file."""
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
