"""Checkpoints on disks that fail, with damaged files, and with files of somebody who means harm. No layers."""

from __future__ import annotations

import argparse
import collections
import errno
import functools
import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import uuid
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from terapipe_ds.files import atomic
from terapipe_ds.runtime.checkpoints import manifest
from terapipe_ds.runtime.checkpoints import save as checkpoint_save
from terapipe_ds.runtime.checkpoints.load import ChosenCheckpoint, find_checkpoint
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, checksum_of
from terapipe_ds.runtime.checkpoints.save import save_checkpoint
from terapipe_ds.runtime.checkpoints.strict_pickles import PickleRefused, read_strictly, strict_loading

FILES = ("mp_rank_00_model_states.pt", "layer_00-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


class OneRank:
    """What saving and loading ask of an engine; its states are the number of its steps."""

    local_rank = global_rank = 0

    def __init__(self, folder: Path) -> None:
        self.folder, self.global_steps, self.states = folder, 0, dict[str, Any]()
        self.checkpoint_engine = TorchCheckpointEngine()
        self.checkpoint_engine.zipfile_serialization = True

    def use_node_local_storage(self) -> bool:
        return False

    load_universal_checkpoint = use_node_local_storage

    def save(self, tag: str, steps: int, **states: Any) -> None:
        self.global_steps, self.states = steps, states
        save_checkpoint(cast(PipelineEngine, self), None, self._save, str(self.folder), tag, True, {})

    def _save(self, tag: str | None, is_latest: bool) -> None:
        for index, name in enumerate(FILES):
            generator = torch.Generator().manual_seed(10 * self.global_steps + index)
            states = {"steps": self.global_steps, "weight": torch.rand(20, generator=generator), **self.states}
            self.checkpoint_engine.save(states, str(self.folder / str(tag) / name))

    def find(self, tag: str | None = None, allow_pickle: bool = False, with_optimizer: bool = True) -> ChosenCheckpoint:
        return find_checkpoint(cast(PipelineEngine, self), None, str(self.folder), tag, with_optimizer, allow_pickle)

    def steps(self, tag: str | None = None) -> int:
        """By what is in the files of the checkpoint that a load would read; all must be of one save."""
        place = self.folder / str(self.find(tag).read_as)
        (steps,) = {int(read_strictly(place / name)["steps"]) for name in FILES}
        return steps


# -- a disk that fails once ----------------------------------------------------------------------------------------


@contextmanager
def failing_at(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the `number`-th opening, write, flush, move, removal or new folder fail. Yield those that were tried."""
    tried: list[str] = []

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tried.append(name)
            if len(tried) == number + 1:
                raise OSError(code, os.strerror(code))
            return function(*args, **kwargs)

        return call

    def torn(states: Any, path: str, save: Callable[..., Any] = torch.save, **kwargs: Any) -> None:
        save(states, path, **kwargs)
        os.truncate(path, os.path.getsize(path) // (1 + (len(tried) == number)))
        failing("half of a file", lambda: None)()

    points = [(Path, name) for name in ("rename", "unlink", "rmdir", "mkdir", "write_text", "touch")]
    owners: list[tuple[Any, str]] = [(checkpoint_save, "sync"), (atomic, "sync"), (torch, "save"), (shutil, "rmtree")]
    owners += [(os, "replace"), (os, "open"), (os, "fsync")]
    with monkeypatch.context() as patches:
        patches.setattr(torch, "save", torn)
        for owner, name in [*points, *owners]:
            patches.setattr(owner, name, failing(name, getattr(owner, name)))
        yield tried


@pytest.mark.parametrize("tags", [("last", "last", "last"), ("a", "b", "c"), ("a", "b", "a")], ids="-".join)
@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT", "EACCES"])
@pytest.mark.sample(3)
def test_a_disk_that_fails_once_loses_nothing_and_no_failed_save_is_reported_as_good(
    code: str, tags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0
    for number in range(100):
        engine = OneRank(tmp_path / str(number))
        engine.save(tags[0], 1)
        engine.save(tags[1], 2)
        with failing_at(number, getattr(errno, code), monkeypatch) as tried:
            try:
                engine.save(tags[2], 3)
                is_reported = True
            except CheckpointError as error:
                is_reported = False
                assert os.strerror(getattr(errno, code)) in str(error), tried
        steps = engine.steps()
        assert steps == 3 if is_reported else steps in (2, 3), (number, tried)
        failures += len(tried) > number
        engine.save(tags[2], 4)
        assert engine.steps() == engine.steps(tags[2]) == 4
        if len(tried) <= number:
            break
    assert failures >= 40, "four kinds of fault and three orders of tags make 480 cases"


# -- damage ----------------------------------------------------------------------------------------------------------

TAGS = {1: "global_step1", 2: "global_step2", 4: "global_step4"}  # no flipped bit makes one of another


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one file, or exchange two."""
    kind = rng.choice(["flip", "flip", "cut", "swap", "mix"])
    names = [f"{tag}/{name}" for tag in TAGS.values() for name in (*FILES, MANIFEST)]
    if kind in ("flip", "cut"):
        path = folder / rng.choice([*names, "latest"])
        content = bytearray(path.read_bytes())
        place = rng.randrange(len(content))
        if kind == "flip":
            content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content if kind == "flip" else content[:place])
        return f"{kind} {path.name} at {place}"
    name, tags = rng.choice(FILES), rng.sample(list(TAGS.values()), 2)
    one, other = folder / tags[0] / name, folder / tags[1] / name
    if kind == "mix":
        other = folder / tags[0] / next(each for each in FILES if each != name)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    return f"exchanged {one} and {other}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sample(1)
def test_damage_is_refused_or_the_newest_whole_one_is_loaded(seed: int, tmp_path: Path) -> None:
    """Each seed stands for 100 cases."""
    rng, engine = random.Random(seed), OneRank(tmp_path / "saved")
    for steps, tag in TAGS.items():
        engine.save(tag, steps)
    copied = shutil.copytree(engine.folder, tmp_path / "copy")
    ends = collections.Counter[str]()
    for _ in range(100):
        what, tag = damage(engine.folder, rng), rng.choice([None, None, *TAGS.values()])
        whole = [steps for steps, tag in TAGS.items() if contents(engine.folder / tag) == contents(copied / tag)]
        try:
            chosen = engine.find(tag)
        except CheckpointError:
            ends["refused"] += 1
            assert tag is not None, f"there are whole ones: {what}"
        else:
            assert chosen.manifest is not None
            steps = chosen.manifest.global_steps
            assert contents(engine.folder / str(chosen.read_as)) == contents(copied / TAGS[steps]), what
            assert steps == max(whole) if tag is None else chosen.tag == tag, what
            ends["another" if chosen.note else "as before"] += 1
        shutil.rmtree(engine.folder)
        shutil.copytree(copied, engine.folder)
    assert min(ends["refused"], ends["another"]) > 5


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    engine = OneRank(tmp_path)
    for steps in (1, 2):
        engine.save(f"step{steps}", steps)
        path = tmp_path / f"step{steps}" / FILES[1]
        path.write_bytes(path.read_bytes()[:-9] + b"." * 9)
    for tag, says in ((None, "no other whole checkpoint"), ("step2", f"{FILES[1]} is damaged or of another")):
        with pytest.raises(CheckpointError, match=says):
            engine.find(tag)


def test_what_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Also under lists of older versions, which have no checksums."""
    monkeypatch.setattr(logging.getLogger("terapipe_ds"), "propagate", True)
    engine, bad, gone = OneRank(tmp_path), tmp_path / "2" / FILES[1], tmp_path / "gone"
    engine.save("1", 1)
    engine.save("2", 2)
    for fault in ("EIO", "torn"):
        with monkeypatch.context() as patches:
            if fault == "EIO":
                patches.setattr(manifest, "checksum_of", lambda path: checksum_of(gone if path == bad else path))
            else:
                document = json.loads((bad.parent / MANIFEST).read_text())
                (bad.parent / MANIFEST).write_text(json.dumps(document | {"checksums": {}}))
                assert engine.find().tag == "2" and "2 has no checksums" in caplog.text
                bad.write_bytes(bytes(bad.stat().st_size))
            with pytest.raises(CheckpointError, match=re.escape(f"{bad} cannot be read")):
                engine.find("2")
            assert engine.find().tag == "1"


def test_only_what_deepspeed_reads_of_a_checkpoint_without_a_list_is_looked_at(tmp_path: Path) -> None:
    (engine := OneRank(tmp_path)).save("a", 1)
    (tmp_path / "a" / MANIFEST).unlink()
    for name in ("my_loader.pt", FILES[2]):
        torch.save(Decimal(1), tmp_path / "a" / name)
    assert engine.find("a", with_optimizer=False).pickled is None
    with pytest.raises(PickleRefused, match=FILES[2]):
        engine.find("a")


# -- files that are programs ---------------------------------------------------------------------------------------


class Runs:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def in_state(value: Any) -> list[Any]:
    """Places in the states of a rank where a value may be hidden."""
    return [
        value,
        {"module": value},
        {"optimizer": {"state": {0: [value]}}},
        [torch.ones(2), (value,)],
        {1: {"a": {2: value}}},
    ]


def hostile(marker: Path) -> list[Any]:
    touch = f"open({str(marker)!r}, 'w')"
    calls = [
        Runs(os.system, f"touch {marker}"),
        Runs(eval, touch),
        Runs(exec, touch),
        Runs(subprocess.call, ["touch", str(marker)]),
        Runs(Path.touch, marker),
        Runs(functools.partial(open, str(marker), "w")),
        Runs(torch.save, 1, str(marker)),
        Runs(shutil.copy, __file__, str(marker)),
    ]
    return [state for call in calls for state in in_state(call)]


FORMS: dict[str, Callable[[Any, Path], None]] = {
    "zip": torch.save,
    "legacy": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    "protocol 4": lambda value, path: torch.save(value, path, pickle_protocol=4),
    "pickle": lambda value, path: path.write_bytes(pickle.dumps(value)),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", FORMS)
def test_no_code_of_a_file_runs(form: str, tmp_path: Path) -> None:
    """By our reader, by DeepSpeed's, and by its reader of universal checkpoints."""
    marker, folder = tmp_path / "marker", tmp_path / "saved" / "tag" / "zero"  # of a universal checkpoint
    folder.mkdir(parents=True)
    path, engine = folder / "exp_avg.pt", OneRank(tmp_path / "saved")
    states = hostile(marker)
    readers: list[Callable[[], Any]] = [
        lambda: engine.checkpoint_engine.load(str(path), map_location="cpu"),
        lambda: load_hp_checkpoint_state(argparse.Namespace(_hp_mapping=argparse.Namespace()), str(folder), 0, 1),
    ]
    for state in states:
        FORMS[form](state, path)
        marker.unlink(missing_ok=True)
        with pytest.raises(PickleRefused, match=r"allow_pickle") as caught:
            engine.find("tag")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert engine.find("tag", allow_pickle=True).pickled == str(path)
        for read in readers:
            with strict_loading(), pytest.raises(pickle.UnpicklingError):
                read()
        assert not marker.exists()
    assert len(states) == 40
    FORMS[form](states[0], path)
    if form != "pickle":
        with strict_loading(is_strict=False):
            readers[0]()
        assert marker.exists(), "there was something to run"


def test_files_that_are_none_of_ours_are_errors_of_one_line(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(50)}, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    path = tmp_path / "bad.pt"
    for content in (b"", b"1234" * 99, good[:-1], good[: len(good) // 2], b"PK\x03\x04" + b"a" * 50, good[::-1]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_strictly(path)
        assert f"{path} cannot be read" in str(caught.value) and "\n" not in str(caught.value)
    with zipfile.ZipFile(tmp_path / "good.pt") as there, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in there.namelist():
            bomb.writestr(name, bytes(10**8) if name.endswith("/data/0") else there.read(name))
    assert path.stat().st_size < 10**6
    with pytest.raises(CheckpointError, match="it is compressed"):
        read_strictly(path)


def test_what_a_checkpoint_of_plain_values_may_hold(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
    states = {
        "values": [1, 2.5, True, None, "a", b"b", 1j, {1, 2}, (1,), torch.bfloat16, torch.Size([2])],
        "counts": collections.Counter("aab"), "ordered": collections.OrderedDict(a=torch.ones(2)),
        "address": fragment_address(numel=2, start=1), "stage": ZeroStageEnum.gradients,
        "scalers": [LossScaler(4.0), scaler],
    }  # fmt: skip
    torch.save(states, tmp_path / "a.pt")
    before, known = dict(os.environ), set(torch.serialization.get_safe_globals())
    read = read_strictly(tmp_path / "a.pt")
    assert read["values"] == states["values"] and read["address"] == states["address"]
    assert read["stage"] is ZeroStageEnum.gradients and vars(read["scalers"][1]) == vars(scaler)
    assert (dict(os.environ), set(torch.serialization.get_safe_globals())) == (before, known), "nothing is left behind"
    for value in (Decimal(1), Fraction(1, 2), uuid.UUID(int=1)):
        torch.save({"args": value}, tmp_path / "a.pt")
        with pytest.raises(PickleRefused, match=type(value).__name__):
            read_strictly(tmp_path / "a.pt")


def test_numbers_of_numpy_are_saved_as_pythons_and_what_cannot_be_loaded_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("terapipe_ds"), "propagate", True)
    optimizer, engine = torch.optim.SGD([torch.ones(1)], lr=np.float64(0.5)), OneRank(tmp_path)
    states = {"optimizer": optimizer.state_dict(), "best": [(np.int32(3), np.bool_(True)), torch.float32]}
    engine.save("a", 1, **states)
    read = read_strictly(tmp_path / "a" / FILES[0])
    assert {key: read[key] for key in states} == states and not caplog.messages
    assert type(optimizer.param_groups[0]["lr"]) is np.float64, "it stays"
    engine.save("b", 2, ds_config={"trace_dir": Path("x")})
    assert f"will refuse 3 of the files that were saved: {tmp_path / 'b' / FILES[0]}" in caplog.text


def test_threads_that_run_already_read_as_before(tmp_path: Path) -> None:
    torch.save(Decimal(1), tmp_path / "a.pt")
    with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as later:
        for thread, is_strict in ((before, False), (later, True)):
            read = lambda: torch.load(tmp_path / "a.pt", weights_only=False)  # noqa: E731
            before.submit(read).result()
            with strict_loading(), pytest.raises(pickle.UnpicklingError) if is_strict else nullcontext():
                thread.submit(read).result()
