"""Write a trained model so that `AutoModelForCausalLM.from_pretrained` reads it: a shard for each stage, one index."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as torch_dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from terapipe_ds.files.atomic import write_atomically, write_text
from terapipe_ds.models.hugging_face.module import HuggingFaceModule
from terapipe_ds.models.hugging_face.pieces import Piece
from terapipe_ds.models.hugging_face.weights import INDEX, SINGLE

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")  # transformers would put them onto the model
_TOKENIZER = re.compile(r"tokenizer.*|.*token.*\.json|vocab.*|merges\.txt|chat_template.*|.*\.model|spiece.*")


class Engine(Protocol):
    """What is asked of an engine."""

    module: HuggingFaceModule


class SavingError(RuntimeError):
    """A stage could not write its weights; raised on all ranks."""


def save_pretrained(engine: Engine, folder: str | os.PathLike[str]) -> None:
    """Write the model's weights, config, generation config and tokenizer into a folder. A collective over all ranks.

    Each stage writes its own weights, tied ones once. Weights have the dtype that the engine's module has. What the
    folder has of another model is removed after that. Of a model with adapters these are written, as peft does.

    Raises:
        SavingError: on all ranks, with what each of them could not do.
    """
    module, path = engine.module, Path(folder)
    pieces = dict(_pieces(module))
    adapters = module.blueprint.adapters
    if adapters is not None:
        adapters.save(pieces, module.source, path)
        return
    writers: dict[str, int] = {}
    for rank, names in enumerate(_gathered(list(pieces))):
        for name in names:
            writers.setdefault(name, rank)
    ranks, me = sorted(set(writers.values())), torch_dist.get_rank()
    shards = {rank: f"model-{place:05d}-of-{len(ranks):05d}.safetensors" for place, rank in enumerate(ranks, 1)}
    shards = shards if len(ranks) > 1 else {ranks[0]: SINGLE}
    sizes, problem = dict[str, int](), ""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if me in shards:
            tensors: dict[str, Tensor] = {}
            for name, state in pieces.items():
                if writers[name] == me:
                    tensors |= _as_stored(module.blueprint.outline.model, state)
            write_atomically(path / shards[me], lambda file: save_file(tensors, file, metadata={"format": "pt"}))
            sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    except Exception as error:  # so that all ranks hear of it
        problem = f"{type(error).__name__}: {error}"
    everyone = _gathered((sizes, problem))
    _raise_on_all(problem for _, problem in everyone)
    problem = ""
    if me == 0:
        try:
            _write_the_rest(module, path, {shards[rank]: everyone[rank][0] for rank in ranks})
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    _raise_on_all(_gathered(problem))


def _pieces(module: HuggingFaceModule) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the modules of this stage, by their names in the model, with parameters and saved buffers by theirs."""
    return [
        (name, {f"{name}.{key}": value for key, value in held.state_dict().items()})
        for piece in module.modules()
        if isinstance(piece, Piece)
        for name, held in zip(piece.names, piece.held, strict=True)
    ]


def _as_stored(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the keys that files have, in memory of their own on the CPU."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps weights as files have them
        stored = state
    else:
        stored = revert_weight_conversion(model, state)
    return {key: value.detach().cpu().contiguous().clone() for key, value in stored.items()}


def _write_the_rest(module: HuggingFaceModule, folder: Path, sizes_of: dict[str, dict[str, int]]) -> None:
    model, config = module.blueprint.outline.model, copy.deepcopy(module.config)
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    config.dtype = str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.") if dtypes else config.dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    if module.source is not None and module.source.resolve() != folder.resolve():
        for file in module.source.iterdir():
            if file.is_file() and _TOKENIZER.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
    if len(sizes_of) > 1:
        weight_map = {key: name for name, sizes in sizes_of.items() for key in sizes}
        total = sum(size for sizes in sizes_of.values() for size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        is_weights = file.name in (SINGLE, *_OF_ADAPTERS) or _SHARD.fullmatch(file.name)
        if is_weights and file.name not in sizes_of:
            file.unlink()


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(values, value)
    return values


def _raise_on_all(problems: Any) -> None:
    lines = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if lines:
        raise SavingError(f"the model was not saved: {'; '.join(lines)}")
