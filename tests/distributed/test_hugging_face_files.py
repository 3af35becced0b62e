"""Test that stages read folders of transformers, and write folders that transformers reads: bit by bit."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoModelForCausalLM

import terapipe_ds
from terapipe_ds.models.hugging_face import saving
from terapipe_ds.models.hugging_face.weights.stored import ADAPTER_CONFIG, INDEX, SINGLE
from tests.distributed import engines
from tests.distributed.failing_calls import Killed, failing_at
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_files import (
    TOKENIZER,
    change_and_move,
    changed_skeletons,
    generation_settings,
    memory_of_reading,
    more_than_the_model,
    reading,
    reads_as_transformers,
    refused_reading,
    round_trip,
    save_apart,
    saved_without_source,
)
from tests.hugging_face_families import CONFIGS, IS_4, config_of, known

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
            if fault == "killed" and number % 5 == 0:
                terapipe_ds.skeleton(path) if number % 2 else terapipe_ds.from_pretrained(path, num_stages=1)
            else:
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


SAMPLE = ("gpt2", "mixtral", "gpt_oss", "sarvam_moe")  # whose files join experts or projections
COMMON = {"config.json", "generation_config.json", *TOKENIZER}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in CONFIGS if name != "xglm"],
)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    """Read and written unchanged it is the same model; trained, it gives transformers the pipeline's evaluation."""
    for found in rank_pool(2).run(round_trip, family=family, folder=str(tmp_path)):
        assert found["read"] and found["keys"] and found["written"] and found["moved"] and found["saved"]
        assert found["evaluation"] <= 1e-5 and found["logits"] <= 1e-5 and found["generation"] == 17
        assert found["copied"][0] == "TypeError" and "copy its layers" in found["copied"][1]
        shards = {f"model-0000{stage}-of-00002.safetensors" for stage in (1, 2)}
        assert set(found["files"]) == COMMON | shards | {"model.safetensors.index.json"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma", {"terapipe": {"schedule": "zbv"}}),  # whose embedding is tied, over a stage with its both ends
        ("gpt2", {"terapipe": {"schedule": "interleaved", "chunks_per_stage": 2}}),
        ("llama", {"changes": {"bf16": {"enabled": True}, **engines.ZERO1}, "stages": 1}),  # and two replicas
        ("gpt2", {"partition": [0, 2, 8]}),
        ("llama", {"by_skeleton": True, "stages": 1}),
        # whose code asks the output matrix for its dtype
        pytest.param(
            "mamba2", {"changes": {"bf16": {"enabled": True}}, "num_layers": 2}, marks=known("mamba2")[0].marks
        ),
    ],
    ids=lambda each: str(each),
)
def test_there_and_back_with(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Several parts on a stage, two replicas, bf16 with ZeRO-1, a partition by hand, a model without weights."""
    is_bf16 = "bf16" in options.get("changes", {})
    for found in rank_pool(2).run(round_trip, family=family, folder=str(tmp_path), **{"num_layers": 4, **options}):
        assert found["read"] and found["keys"] and found["written"] and found["moved"] and found["saved"]
        assert max(found["evaluation"], found["logits"]) <= (1e-2 if is_bf16 else 1e-5)
        assert set(found["files"]) == COMMON | {"model.safetensors"} or "stages" not in options  # one file of one stage


def test_a_folder_that_is_gone_costs_no_weights(tmp_path: Path) -> None:
    for rank, (is_saved, lines) in enumerate(rank_pool(2).run(saved_without_source, folder=str(tmp_path))):
        assert is_saved and sum("saved without a tokenizer" in line for line in lines) == (rank == 0)


def test_settings_of_generation_cost_no_weights_and_stay(tmp_path: Path) -> None:
    """Older models have them in the config."""
    of_model = {"do_sample": True, "max_length": 50}
    for saved, read in rank_pool(2).run(generation_settings, folder=str(tmp_path), **of_model):
        assert saved == 0.25 and read == of_model


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "terapipe", [None, {}, {"schedule": "zbv"}, {"schedule": "interleaved", "chunks_per_stage": 2}], ids=str
)
def test_weights_are_read_once_layers_have_their_stages(terapipe: dict[str, Any] | None, tmp_path: Path) -> None:
    """Nothing before an engine is built, and then each module of the stage once; None is DeepSpeed's own engine."""
    section = None if terapipe is None else engines.section(**terapipe)
    for found in rank_pool(2).run(reading, folder=str(tmp_path), terapipe=section):
        assert found["early"] == [] and found["equal"]
        assert found["read"] == found["held"]


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight"),
        ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias"),  # a buffer
    ],
)
def test_a_tensor_that_is_changed_before_goes_with_its_layer(family: str, changed: str, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "family": family, "changed": changed}
    assert rank_pool(2).run(change_and_move, **given) == [True, True]


def test_a_skeleton_keeps_its_buffers_and_has_no_weights(tmp_path: Path) -> None:
    for is_kept, (kind, text) in rank_pool(2).run(changed_skeletons, folder=str(tmp_path)):
        assert is_kept and kind == "ModelRefusedError" and "1 of its weights have values" in text


# versions before 5 leave a tied embedding empty that is stored as the output matrix
TIED = ["tied, as head", "tied, twice"] if transformers.__version__.startswith("5.") else []


@pytest.mark.parametrize("how", ["beside an index", "named by config", "named by config, in a subfolder", *TIED])
def test_of_several_files_those_are_read_that_transformers_reads(how: str, tmp_path: Path) -> None:
    assert rank_pool(2).run(reads_as_transformers, folder=str(tmp_path), how=how) == [True, True]


SPOILT = {
    "missing file": "which is not there: download",
    "half a file": "cannot be read",
    "missing key": "index.json says it has",
    "no object": "index.json has no JSON object: download",
    "key in no file": "has no weights for",
    "other shape": "is stored with the shape \\[3\\]",
    "other dtype": "stored as I8.*Give those of the original",
    "other form": "pytorch_model.bin.*save_pretrained",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_one_rank", [False, True], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_folder_is_refused_on_all_ranks(how: str, on_one_rank: bool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "how": how, "on_one_rank": on_one_rank, "later": False}
    for kind, text in rank_pool(2).run(refused_reading, **given):
        assert kind == "ModelRefusedError" and re.search(SPOILT[how], text), text


@pytest.mark.parametrize(
    ("file", "what"),
    [("model-00002-of-00004", "weights"), *([("adapter_model", "adapters")] if find_spec("peft") else [])],
)
def test_another_model_in_the_folder_of_one_rank_is_refused(file: str, what: str, tmp_path: Path) -> None:
    """Its config is the same; the stages of two models would train together."""
    given = {"folder": str(tmp_path), "how": f"{file}.safetensors", "on_one_rank": True, "later": False}
    named = f"the checksum of stored {what} is [0-9]+ on rank 0, and [0-9]+ on rank 1. Give every rank the same model"
    for kind, text in rank_pool(2).run(refused_reading, **given):
        assert kind == "ValueError" and re.search(named, text), text


def test_what_the_model_has_no_place_for_is_said(tmp_path: Path) -> None:
    """transformers would not tie two matrices that differ, whatever the config says."""
    first, second = rank_pool(2).run(more_than_the_model, folder=str(tmp_path), key="model.layers.0.mlp.up_proj.bias")
    assert [line for line in first[0] if "no place for" in line and "layers.0.mlp.up_proj.bias" in line]
    assert not [line for line in second[0] if "no place for" in line] and first[1] == second[1] == ("", "")
    for _, (kind, text) in rank_pool(2).run(more_than_the_model, folder=str(tmp_path / "tied"), key="lm_head.weight"):
        assert kind == "ModelRefusedError" and '"tie_word_embeddings" to false' in text


def test_a_file_that_vanishes_later_stops_all_ranks(tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "how": "", "on_one_rank": True, "later": True}
    for kind, text in rank_pool(2).run(refused_reading, **given):
        assert kind == "ModelRefusedError" and re.match(r"on rank \d: .*cannot be read", text, re.DOTALL), text


def test_shards_in_folders_apart_are_said(tmp_path: Path) -> None:
    for kind, text in rank_pool(2).run(save_apart, folder=str(tmp_path)):
        assert kind == "SavingError" and "has no model-00002-of-00002.safetensors" in text and "Copy their" in text


def configs_in_16_bits(folder: str) -> list[str]:
    """Return the config.json that transformers writes, and the one of the stages, for a model with an fp32 router."""
    read, own, ours = (f"{folder}/{name}" for name in ("read", "own", "ours"))
    AutoModelForCausalLM.from_config(config_of("deepseek_v3"), dtype=torch.bfloat16).save_pretrained(read)
    AutoModelForCausalLM.from_pretrained(read, dtype="auto").save_pretrained(own)
    with engines.started(terapipe_ds.from_pretrained(read, num_stages=1), engines.unchecked()) as engine:
        terapipe_ds.save_pretrained(engine, ours)
    return [Path(each, "config.json").read_text() for each in (own, ours)]


@pytest.mark.skipif(IS_4, reason="4.57 makes the router in 16 bits")
def test_the_config_is_that_of_transformers(tmp_path: Path) -> None:
    [(own, ours)] = rank_pool(1).run(configs_in_16_bits, folder=str(tmp_path))
    assert ours == own


def save_in_thread(folder: str) -> tuple[tuple[str, str], list[str]]:
    """Save on one rank in another thread, then on both in the thread of the batches; return the error and the files."""
    module = terapipe_ds.from_config(config_of("llama"), dtype=torch.float32)
    with engines.started(module, engines.unchecked()) as engine:
        save, refused = lambda: terapipe_ds.save_pretrained(engine, folder), ("", "")
        if distributed.get_rank() == 1:
            refused = engines.in_thread(save)
        save()
    return refused, sorted(path.name for path in Path(folder).glob("model*"))


def test_a_save_in_another_thread_is_an_error(tmp_path: Path) -> None:
    for rank, ((kind, text), files) in enumerate(rank_pool(2).run(save_in_thread, folder=str(tmp_path))):
        assert (kind, "save_pretrained() was called in thread 'saver'" in text) == (
            ("RuntimeError", True) if rank else ("", False)
        )
        assert len(files) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8000},
        pytest.param(
            {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 4,
                "vocab_size": 16000,
                "head_dim": 512,
            },
            marks=pytest.mark.full,
        ),
    ],
    ids=["50 MB", "1 GB"],
)
def test_a_stage_reads_its_own_weights_alone(fields: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    """A rank's private memory grows by 0.75 of the model at most, over two stages, also where layers change these."""
    for grown, size in rank_pool(2).run(memory_of_reading, folder=str(tmp_path), schedule=schedule, **fields):
        assert grown <= 0.75 * size and (fields["hidden_size"] < 2048 or size > 1e9)


# -- a save over an older export, on disks that fail and through kills, as checkpoints are tested ---------------------

FAULTS = ("killed", "EIO", "ENOSPC", "EDQUOT", "EACCES")


@pytest.mark.sample(1)
@pytest.mark.parametrize("older", ["shards", "single"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_moment_loses_nothing_and_no_failed_save_is_reported_as_good(
    fault: str, older: str, tmp_path: Path
) -> None:
    """After an error the old model or the new one is there; after a kill once the next load or save has come by."""
    ((moments, without, wrong),) = rank_pool(1).run(saves, folder=str(tmp_path), fault=fault, older=older)
    assert wrong == [] and moments > 30
    assert (0 < without < moments / 2) == (fault == "killed"), "a kill between the moves leaves none for a while"


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS[1:])
@pytest.mark.parametrize(("whose", "least"), [(0, 50), (1, 4)], ids=["rank 0", "rank 1"])
def test_a_fault_of_one_rank_loses_nothing(fault: str, whose: int, least: int, tmp_path: Path) -> None:
    """Let one of two ranks fail that write shards, over older shards."""
    given = {"folder": str(tmp_path), "fault": fault, "older": "shards", "whose": whose}
    for moments, without, wrong in rank_pool(2).run(saves, **given):
        assert wrong == [] and without == 0 and moments >= least


def test_two_that_finish_a_save_at_once_lose_nothing(tmp_path: Path) -> None:
    """The first is about to set old files aside when the second has moved a new one in, or waits for the first."""
    publishing, (move, make) = tmp_path / ".a.publishing", (Path.replace, Path.mkdir)
    for folder, text in ((tmp_path, "old"), (publishing, "new")):
        folder.mkdir(exist_ok=True)
        for name in ("config.json", SINGLE):
            (folder / name).write_text(text)
    second = threading.Thread(target=saving.finish_saving, args=[tmp_path])
    has_moved, first_is_over = threading.Event(), threading.Event()

    def move_one(path: Path, target: Path) -> None:
        move(path, target)
        if threading.current_thread() is second and path.parent == publishing:
            has_moved.set()
            first_is_over.wait(10)

    def make_later(path: Path, **kwargs: Any) -> None:
        if threading.current_thread() is not second:
            second.start()
            has_moved.wait(0.3)
        make(path, **kwargs)

    with mock.patch.object(Path, "replace", move_one), mock.patch.object(Path, "mkdir", make_later):
        saving.finish_saving(tmp_path)
        first_is_over.set()
        second.join()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "new", SINGLE: "new"}
