"""Let a disk fail, or a kill strike, at any moment of `save_pretrained` over an older export. Runs inside the ranks."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoModelForCausalLM

import terapipe_ds
from terapipe_ds.models.hugging_face import saving
from terapipe_ds.models.hugging_face.weights.stored import ADAPTER_CONFIG, INDEX, SINGLE
from tests.distributed.failing_calls import Killed, failing_at
from tests.hugging_face_families import config_of

USERS = "notes/a"  # a file that a user has put into the folder


@contextlib.contextmanager
def failing_save_at(number: int | None, fault: str) -> Iterator[list[str]]:
    """Let the `number`-th call of a save fail, writes of weights included: half of the file exists then."""
    with failing_at(number, fault) as tried:

        def torn(tensors: Any, path: Any, **kwargs: Any) -> None:
            save_file(tensors, path, **kwargs)
            if len(tried) == number:
                os.truncate(path, os.path.getsize(path) // 2)
            with open(path, "rb"):  # this counts, and fails at the chosen call
                pass

        with mock.patch.object(saving, "save_file", torn if number is not None else save_file):
            yield tried


def found_in(folder: Path) -> int | None:
    """Return the number of the save whose model transformers would read; None: no whole model. Mixed saves raise.

    transformers reads `model.safetensors`, or else the files in the index, and the config; adapters come on top.
    """
    assert not (folder / ADAPTER_CONFIG).exists() or (folder / SINGLE).exists() is False
    names = [SINGLE]
    if not (folder / SINGLE).exists():
        if not (folder / INDEX).exists():
            return None
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    numbers = {int(each.flatten()[0]) for name in names for each in load_file(folder / name).values()}
    numbers.add(json.loads((folder / "config.json").read_text())["pad_token_id"])
    (number,) = numbers
    return number


def saves(folder: str, fault: str, older: str, whose: int = 0) -> tuple[int, int, list[str]]:
    """Save over an export `older` with a fault of rank `whose` at each moment, and once more after it.

    Returns the number of moments, how often transformers would have found no model after a kill, and the problems.
    """
    rank, before, config = distributed.get_rank(), Path(folder, "before"), config_of("llama", 2)
    module = terapipe_ds.from_config(config, num_stages=distributed.get_world_size())

    def save(number: int, path: Path) -> None:
        module.config.pad_token_id = number
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(number)
        terapipe_ds.save_pretrained(SimpleNamespace(module=module), path)  # type: ignore[arg-type]

    if rank == 0:
        model = AutoModelForCausalLM.from_config(config)
        model.config.pad_token_id = 1
        for parameter in model.parameters():
            parameter.data.fill_(1)
        model.save_pretrained(before, max_shard_size="20KB" if older == "shards" else "1GB")
        (before / USERS).parent.mkdir()
        (before / USERS).write_text("mine")
    distributed.barrier()
    wrong, none_found, number, is_over = list[str](), 0, 0, [False]
    while not is_over[0]:
        path = Path(folder, str(number))
        if rank == 0:
            shutil.copytree(before, path)
        distributed.barrier()
        is_reported, said = True, ""
        with failing_save_at(number if rank == whose else None, fault) as tried:
            try:
                save(2, path)
            except (saving.SavingError, Killed) as error:
                is_reported, said = False, str(error)
        distributed.barrier()
        where = f"call {number} ({tried[number : number + 1]}) of {fault}"
        if rank == 0:
            wrong += _judged(path, where, fault, is_reported, said)
            none_found += found_in(path) is None
            with contextlib.suppress(Killed), failing_at(number % 8 if fault == "killed" else None, fault):
                saving.finish_saving(path)  # as a load does, which may be killed, too
            if fault == "killed" and number % 10 == 5:
                terapipe_ds.from_pretrained(path, num_stages=1)
            saving.finish_saving(path)
            wrong += [] if found_in(path) in (1, 2) else [f"{where}: {found_in(path)} after it was finished"]
        distributed.barrier()
        save(3, path)
        if rank == 0:
            hidden = [each.name for each in path.iterdir() if each.name.startswith(".") and each.is_dir()]
            if found_in(path) != 3 or hidden or (path / USERS).read_text() != "mine":
                wrong.append(f"{where}: then {found_in(path)} and {hidden}")
            shutil.rmtree(path)
        is_over = [len(tried) <= number]
        distributed.broadcast_object_list(is_over, src=whose)
        number += 1
    return number, none_found, wrong


def _judged(path: Path, where: str, fault: str, is_reported: bool, said: str) -> Iterator[str]:
    found = found_in(path)
    if is_reported and found != 2:
        yield f"{where}: reported as good, and {found} is there"
    is_told = is_reported or fault == "killed" or os.strerror(getattr(errno, fault)) in said
    if not is_told or (found not in (1, 2) and fault != "killed"):
        yield f"{where}: {found} is there after {said}"
