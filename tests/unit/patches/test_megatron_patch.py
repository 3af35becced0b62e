"""The patch for Megatron-DeepSpeed: its form, and what is told when a part of it is missing."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import terapipe_ds
from terapipe_ds.runtime.checkpoints.strict_pickles import PickleRefused, read_strictly
from tests import mini_megatron

import terapipe_patch as helpers  # isort: skip
from terapipe_patch import INSERTIONS, PatchError, problem_of_insertions  # isort: skip

TEXT = mini_megatron.PATCH.read_text(encoding="utf-8")
HUNKS = mini_megatron.hunks(TEXT)  # raises for context lines, removed lines and section texts
REGISTRATION, COMPRESSION = "pretrain_gpt.py register", "megatron/training.py allow_missing_compression"
ENABLED = {"terapipe": {"enabled": True, "slices": 2, "granularity_tokens": 1}}


@pytest.fixture
def registered() -> None:
    terapipe_ds.register()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    terapipe_ds.unregister()
    sys.modules.pop("deepspeed.compression.compress", None)


def model_of(program: SimpleNamespace) -> Any:
    """A model that was not built: the insertions are told from its class."""
    model = program.gpt_model.GPTModelPipe.__new__(program.gpt_model.GPTModelPipe)
    model._megatron_batch_fn = program.pretrain_gpt.get_batch_pipe
    return model


def test_the_patch_only_inserts() -> None:
    for line in TEXT.splitlines():
        assert re.match(r"\+|--- a/|@@ -\d+,0 \+\d+(,\d+)? @@$", line), line
        assert not line.startswith("+ \t") and len(line) <= 121


def test_every_helper_that_is_called_exists() -> None:
    called = set(re.findall(r"terapipe_patch\.(\w+)", TEXT))
    assert called == {name for name in called if callable(getattr(helpers, name))}
    assert {insertion.helper for insertion in INSERTIONS} <= called


def test_every_inserted_line_compiles_in_place(tmp_path: Path) -> None:
    mini_megatron.write(tmp_path)
    for file in {hunk.file for hunk in HUNKS}:
        patched = (tmp_path / file).read_text(encoding="utf-8")
        compile(patched, file, "exec")
        for hunk in (hunk for hunk in HUNKS if hunk.file == file):
            assert "\n".join(hunk.lines) in patched


@pytest.mark.parametrize("name", ["", *(h.name for h in HUNKS if h.name not in (REGISTRATION, COMPRESSION))])
def test_the_engine_names_the_file_of_a_missing_insertion(name: str, tmp_path: Path) -> None:
    mini_megatron.write(tmp_path, without=[name] if name else [])
    with mini_megatron.imported(tmp_path, mini_megatron.arguments(8)) as program:
        problem = problem_of_insertions(model_of(program)) or ""
    file, _, _ = name.partition(" ")
    if not name:
        assert problem == ""
        return
    named = [line.split(":")[0].strip() for line in problem.splitlines() if line.startswith("  ")]
    assert named and set(named) == {file}
    assert "Apply patches/megatron_deepspeed.patch again" in problem


BATCH = {"text": torch.zeros(1, 9, dtype=torch.long), "mask": torch.ones(1, 8)}
REACHING: dict[str, Callable[[SimpleNamespace], Any]] = {
    "check_arguments": lambda program: program.gpt_model.GPTModelPipe(num_stages=1),
    "batch_mask": lambda program: program.pretrain_gpt.get_batch_pipe(BATCH),
    "slicing": lambda program: program.transformer.ParallelAttention(8, 2, 0)(torch.zeros(4, 1, 8), None),
    "keep_rotary": lambda program: program.utils.update_rotary_pos_emb(8),
}


@pytest.mark.parametrize("where", REACHING)
def test_every_other_insertion_misses_the_registration(where: str, tmp_path: Path) -> None:
    """Then DeepSpeed's own engine runs, so that ours cannot tell: each insertion asks by itself."""
    mini_megatron.write(tmp_path, without=[REGISTRATION])
    args = mini_megatron.arguments(8, deepspeed_config_dict=ENABLED)
    with mini_megatron.imported(tmp_path, args) as program, pytest.raises(PatchError, match=r"pretrain_gpt\.py"):
        REACHING[where](program)


def test_training_imports_with_a_deepspeed_without_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.compression.compress", None)  # importing it fails
    mini_megatron.write(tmp_path)
    with mini_megatron.imported(tmp_path, mini_megatron.arguments(8)):
        import megatron.training

        with pytest.raises(PatchError, match="compression_training"):
            megatron.training.init_compression(None)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "value"),
    [("reset_attention_mask", True), ("sequence_parallel", True), ("ds_sequence_parallel_size", 2),
     ("force_ds_sequence_parallel", True), ("ds_sequence_parallel_fpdt", True), ("curriculum_learning_legacy", True),
     ("data_efficiency_curriculum_learning", True), ("random_ltd", True), ("num_experts", [1, 4]),
     ("num_experts_switch", 4), ("retro_add_retriever", True), ("enable_zbh1_pipeline", True),
     ("no_pipeline_parallel", True)],
)  # fmt: skip
def test_arguments_that_slices_cannot_train_are_refused(name: str, value: Any) -> None:
    args = mini_megatron.arguments(8, deepspeed_config_dict=ENABLED, num_experts=[1], ds_sequence_parallel_size=1)
    helpers.check_arguments(args)
    setattr(args, name, value)
    with pytest.raises(PatchError, match=f"--{name.replace('_', '-')} .*cannot be combined"):
        helpers.check_arguments(args)
    args.deepspeed_config_dict = {"terapipe": {"enabled": False}}
    helpers.check_arguments(args)


class ModelType(Enum):
    """As upstream's, a member of which is among its arguments."""

    DECODER = 1


def by_name(member: ModelType, protocol: object) -> tuple[Any, ...]:
    """Pickle as Python 3.11.2 does, which Debian 12 has."""
    return getattr, (ModelType, member.name)


def by_value(member: ModelType, protocol: object) -> tuple[Any, ...]:
    return ModelType, (member.value,)


@pytest.fixture
def allowed_as_before() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.mark.usefixtures("registered", "allowed_as_before")
@pytest.mark.parametrize("reduce", [by_name, by_value])
def test_checkpoints_that_hold_the_arguments_and_random_states_can_be_loaded(
    reduce: Callable[..., tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelType, "__reduce_ex__", reduce)
    args = Namespace(**vars(mini_megatron.arguments(8, deepspeed_config_dict=ENABLED, model_type=ModelType.DECODER)))
    states, drawn = [{"np_rng_state": np.random.get_state()}], np.random.random()
    torch.save({"args": args, "rng_state": states}, tmp_path / "states.pt")
    with pytest.raises(PickleRefused, match="ModelType"):
        read_strictly(tmp_path / "states.pt")
    helpers.check_arguments(args)
    read = read_strictly(tmp_path / "states.pt")
    np.random.set_state(read["rng_state"][0]["np_rng_state"])
    assert read["args"] == args and np.random.random() == drawn


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("changes", "told"),
    [({"sequence_dim": 0}, r"sequence_dim is 0.*to 1"), ({"sliced_inputs": [0]}, r"\[0\].*\[0, 1\]"),
     ({"sliced_inputs": [0, 1, 2]}, r"\[0, 1, 2\].*\[0, 1\]"), ({"slises": 2}, "slises")],
)  # fmt: skip
def test_sections_that_cut_the_batch_wrongly_are_refused(changes: dict[str, Any], told: str) -> None:
    args = mini_megatron.arguments(8, deepspeed_config_dict={"terapipe": {**ENABLED["terapipe"], **changes}})
    with pytest.raises(ValueError, match=told):
        helpers.check_arguments(args)
