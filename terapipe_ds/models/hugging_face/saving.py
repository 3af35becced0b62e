"""Write a trained model so that `AutoModelForCausalLM.from_pretrained` reads it: a shard for each stage, one index.

A kill or an error in any line loses neither the old nor the new model. The save writes files to `.JOB.saving`, inside
of the folder. When all are there, one move renames it to `.JOB.publishing`: the new files are complete from then on,
and any later process can finish the save. The old files go to `.JOB.replacing`, which becomes `.JOB.replaced`, then
the new files move in. A reader without this knowledge sees the old files, the new ones, or briefly an incomplete set.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from terapipe_ds.files.atomic import sync, write_atomically, write_text
from terapipe_ds.messages import logger
from terapipe_ds.models.hugging_face.layers import Piece
from terapipe_ds.models.hugging_face.module import HuggingFaceModule
from terapipe_ds.models.hugging_face.refusals import gathered
from terapipe_ds.models.hugging_face.tensor_parallel.layers import gathered_copy
from terapipe_ds.models.hugging_face.weights.quantized import is_quantized_by
from terapipe_ds.models.hugging_face.weights.stored import ADAPTER_CONFIG, INDEX, SINGLE, named

_TRIES = 3
_WHOLE = (INDEX, SINGLE)  # a folder with one of them has a whole model
_HEADS = (*_WHOLE, ADAPTER_CONFIG)  # they complete the set of files: the first to go and the last to come
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_ADAPTERS = (ADAPTER_CONFIG, "adapter_model.safetensors")  # transformers would put them onto the model
_TEMPLATES = "additional_chat_templates"  # a folder beside the tokenizer's files
_TOKENIZER = re.compile(
    r"tokenizer.*|.*token.*\.json|(emoji|tekken)\.json|vocab.*|merges\.txt|chat_template.*|.*\.model|spiece.*"
)
# transformers reads these beside any tokenizer: a new one without such files would get the files of the old one
_OF_ANY_TOKENIZER = ("added_tokens.json", "special_tokens_map.json", "chat_template.jinja", _TEMPLATES)


def _is_replaced(name: str, new: Collection[str]) -> bool:
    """Return whether files of these names replace another file.

    A whole model replaces all weights and adapters, and a tokenizer replaces what would change its meaning.
    """
    if name in _OF_ANY_TOKENIZER and any(map(_TOKENIZER.fullmatch, new)):
        return True
    is_whole = any(head in new for head in _WHOLE)
    return name in new or (is_whole and (name in (*_WHOLE, *_ADAPTERS) or _SHARD.fullmatch(name) is not None))


def finish_saving(folder: Path) -> None:
    """Finish the save that a killed process has begun to publish; another reader may do so at the same time."""
    for publishing in folder.glob(".*.publishing"):
        with contextlib.suppress(FileNotFoundError):
            _finish(publishing)


def _finish(publishing: Path) -> None:
    for _ in range(_TRIES):  # a reader may move some of the files meanwhile, or have moved all
        with contextlib.suppress(FileNotFoundError):
            return _put_in_place(publishing)
        if not publishing.exists():
            return None
    return _put_in_place(publishing)


def _put_in_place(publishing: Path) -> None:
    descriptor = os.open(publishing, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks of folders, such as NFS
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # else another process may set the new files aside as old ones
        _move(publishing)
    finally:
        os.close(descriptor)


def _move(publishing: Path) -> None:
    folder, replacing, replaced = publishing.parent, *map(publishing.with_suffix, (".replacing", ".replaced"))
    # else another process came as far as this, and the old files are already set aside
    if not replaced.exists():
        names = {path.name for path in publishing.iterdir()}
        replacing.mkdir(exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name not in _HEADS):
            if _is_replaced(path.name, names):
                path.replace(replacing / path.name)
        replacing.rename(replaced)
    # the file that completes the set comes last: no reader takes half a model for a whole one
    for path in sorted(publishing.iterdir(), key=lambda path: path.name in _HEADS):
        path.replace(folder / path.name)
    sync(folder)
    shutil.rmtree(replaced)
    publishing.rmdir()


class SavingError(RuntimeError):
    """Report that a stage could not write its weights; raised on all ranks."""


def save_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str], *, merge: bool = False) -> None:
    """Write the model's weights, config, generation config and tokenizer into a folder. A collective over all ranks.

    Each stage writes its own weights, tied ones once, into a hidden folder. Once all are on the disk they replace the
    files of another model in the folder. After an error the folder has the old model or the new one, complete. After a
    kill during the moves the next load or save of this package finishes them. Weights have the dtype of the engine's
    module.

    Of a model with adapters it writes only the adapters, as peft does. With `merge` it writes the whole model, with
    the adapters added to its weights.

    Raises:
        ValueError: `merge`, and the model has no adapters, or quantized weights; or without it, and weights beside the
            adapters are trained.
        SavingError: on all ranks, with the failure of each.
        RuntimeError: a batch is running, or this is not the thread that runs the batches.
    """
    _check_merge(engine.module, merge)
    # our engine refuses the call in another thread, and its watch-dog reports ranks that do not come
    with getattr(engine, "long_call", contextlib.nullcontext)("save_pretrained"):
        _save(engine.module, Path(folder), merge)


def _save(module: HuggingFaceModule, folder: Path, merge: bool) -> None:
    adapters = module.blueprint.adapters
    runs = [piece.runs for piece in module.modules() if isinstance(piece, Piece)]
    pieces = {name: held for of_piece in runs for name, held in of_piece.items()}
    # one name for all ranks, drawn by the first
    saving = folder / f".{gathered(secrets.token_hex(4))[0]}.saving"
    with _on_all_ranks(saving):
        if torch_dist.get_rank() == 0:
            finish_saving(saving.parent)
            for left in saving.parent.glob(".*.saving"):
                shutil.rmtree(left)
    if adapters is None or merge:
        _write_model(module, pieces, saving, merge)
    else:
        states = {name: gathered_copy(held).state_dict(prefix=f"{name}.") for name, held in pieces.items()}
        trained = adapters.gathered(states)
    with _on_all_ranks(saving):
        if torch_dist.get_rank() == 0:
            if adapters is not None and not merge:
                base = module.config.name_or_path or None
                adapters.save(trained, base, saving)
                is_base = base is not None and folder.resolve() == Path(base).resolve()
                if (folder / "config.json").exists() and not is_base:
                    what = "transformers puts the adapters onto it, not onto the one that they were trained with"
                    logger.warning("%s has a whole model: %s; save them in another folder", folder, what)
            for path in (*saving.rglob("*"), saving):  # the disk has all before the old files go
                sync(path)
            _finish(saving.rename(saving.with_suffix(".publishing")))


def _check_merge(module: HuggingFaceModule, merge: bool) -> None:
    adapters = module.blueprint.adapters
    if merge and adapters is None:
        raise ValueError("merge=True: the model has no adapters; save it without")
    if merge and is_quantized_by(module.config):
        raise ValueError(
            "merge=True: adapters are not added to quantized weights. Save the adapters, and let peft add them to the "
            "original weights: PeftModel.from_pretrained(model, folder).merge_and_unload()"
        )
    if adapters is not None and adapters.beside and not merge:
        raise ValueError(
            f"{named(adapters.beside)} of the model are trained beside the adapters, and adapter files cannot "
            "hold them: pass merge=True, which writes the whole model"
        )


def _write_model(module: HuggingFaceModule, pieces: dict[str, nn.Module], saving: Path, merge: bool) -> None:
    # the first rank that has tied weights or a data-parallel copy writes them
    writers: dict[str, int] = {}
    for rank, names in enumerate(gathered(list(pieces))):
        for name in names:
            writers.setdefault(name, rank)
    ranks, me = sorted(set(writers.values())), torch_dist.get_rank()
    shards = {rank: f"model-{place:05d}-of-{len(ranks):05d}.safetensors" for place, rank in enumerate(ranks, 1)}
    shards = shards if len(ranks) > 1 else {ranks[0]: SINGLE}
    sizes, absent = dict[str, int](), list[str]()
    with _on_all_ranks(saving):
        tensors: dict[str, Tensor] = {}
        adapters = module.blueprint.adapters if merge else None
        for name, held in pieces.items():  # one by one: each is whole for this moment, on all tensor-parallel ranks
            held = gathered_copy(held)
            if writers[name] == me:
                prefix = f"{name}."
                state = adapters.merged(held, prefix) if adapters else held.state_dict(prefix=prefix)
                tensors |= _as_stored(module.blueprint.outline.model, state)
        if me in shards:
            saving.mkdir(parents=True, exist_ok=True)
            save_file(tensors, saving / shards[me], metadata={"format": "pt"})
            sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
            sync(saving / shards[me])
        del tensors
    # the index names all shards, so rank 0 needs the keys of each
    sizes_of = {shards[rank]: of_rank for rank, of_rank in enumerate(gathered(sizes)) if rank in shards}
    with _on_all_ranks(saving):
        if me == 0:
            _write_the_rest(module, saving)
            if len(shards) > 1:
                _write_index(saving, sizes_of)
            absent = [name for name in shards.values() if not (saving / name).is_file()]
    if absent := gathered(absent)[0]:  # existing files stay, for there may be no other copy
        raise SavingError(
            f"the model was not saved: {saving} has no {named(absent)}: other ranks wrote into another folder of "
            f"that name. Copy their shards into it and move all of its files to {saving.parent}, or save into a folder "
            "that all machines share"
        )


@contextlib.contextmanager
def _on_all_ranks(saving: Path) -> Iterator[None]:
    """Raise the failures of some ranks on all of them; nothing is left half done then. A collective at its end."""
    problem = ""
    try:
        yield
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(gathered(problem)) if text]
    if lines:
        shutil.rmtree(saving, ignore_errors=True)
        with contextlib.suppress(OSError):  # the first error is reported
            if torch_dist.get_rank() == 0:
                finish_saving(saving.parent)
        gathered(None)  # all ranks leave together
        raise SavingError(f"the model was not saved: {'; '.join(lines)}")


def _as_stored(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the keys that files have, in memory of their own on the CPU."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps weights as files have them
        stored = state
    else:
        stored = revert_weight_conversion(model, state)
    return {key: value.detach().cpu().contiguous().clone() for key, value in stored.items()}


def _write_the_rest(module: HuggingFaceModule, folder: Path) -> None:
    model, config = module.blueprint.outline.model, copy.deepcopy(module.config)
    # the first weight's dtype, as transformers has it: adapters and the routers of some families have more bits
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    config.dtype = str(next(dtypes, config.dtype)).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    vars(config).pop("transformers_weights", None)  # the name of the files that were read
    _write_settings(config, folder / "config.json")
    if getattr(model, "generation_config", None) is not None:
        _write_settings(model.generation_config, folder / "generation_config.json")
    source = getattr(module.blueprint.weights, "folder", None)
    if source is not None and source.resolve() != folder.parent.resolve():
        for name, content in _tokenizer_in(source).items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomically(folder / name, functools.partial(Path.write_bytes, data=content))


def _tokenizer_in(source: Path) -> dict[Path, bytes]:
    """Return the files of a tokenizer by their names. A folder that is gone by now costs no weights."""
    try:
        files = [file for file in source.iterdir() if file.is_file() and _TOKENIZER.fullmatch(file.name)]
        files += (source / _TEMPLATES).glob("*.jinja")
        return {file.relative_to(source): file.read_bytes() for file in files}
    except OSError as error:
        logger.warning("the model is saved without a tokenizer, which cannot be read: %s", error)
        return {}


def _write_settings(settings: PretrainedConfig | GenerationConfig, path: Path) -> None:
    """Write a config, also with flags of generation that transformers reads but does not save: they cost no weights."""
    try:
        settings.save_pretrained(path.parent)
    except ValueError as error:
        logger.warning("%s was saved with flags that transformers does not save: %s", path.name, error)
        settings = copy.copy(settings)
        vars(settings).pop("compile_config", None)  # transformers does not save it either, and could not read it
        settings.to_json_file(path)


def _write_index(folder: Path, sizes_of: dict[str, dict[str, int]]) -> None:
    weight_map = {key: name for name, sizes in sizes_of.items() for key in sizes}
    total = sum(size for sizes in sizes_of.values() for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
