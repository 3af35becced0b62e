"""Checkpoints of saves that are killed, on disks that fail, and with damaged files. No layers."""

import collections
import errno
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from terapipe_ds.runtime.checkpoints import manifest
from terapipe_ds.runtime.checkpoints.choose import ChosenCheckpoint, find_checkpoint
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, checksum_of
from terapipe_ds.runtime.checkpoints.save import CheckpointPaths, save_checkpoint
from terapipe_ds.runtime.checkpoints.strict_pickles import PickleRefused, read_strictly, strict_loading
from tests.distributed.failing_calls import Killed

FAULTS = ("killed", "EIO", "ENOSPC", "EDQUOT", "EACCES")
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
    _save_checkpoint = _save_zero_checkpoint = None  # `_save` stands for both

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


# -- a kill in any line, and a disk that fails once ------------------------------------------------------------------


def fault_of(name: str) -> BaseException:
    return Killed() if name == "killed" else OSError(getattr(errno, name), os.strerror(getattr(errno, name)))


@contextmanager
def failing_at(number: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the `number`-th opening, write, flush, move, removal or new folder fail. Yield those that were tried."""
    tried: list[str] = []

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tried.append(name)
            if len(tried) == number + 1 or (len(tried) > number and fault == "killed"):
                raise fault_of(fault)
            return function(*args, **kwargs)

        return call

    def torn(states: Any, path: str, save: Callable[..., Any] = torch.save, **kwargs: Any) -> None:
        save(states, path, **kwargs)
        os.truncate(path, os.path.getsize(path) // (1 + (len(tried) == number)))
        failing("half of a file", lambda: None)()

    names = ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
    with monkeypatch.context() as patches:
        patches.setattr(torch, "save", torn)
        for owner, name in [*((os, name) for name in names), (io, "open"), (torch, "save")]:
            patches.setattr(owner, name, failing(name, getattr(owner, name)))
        yield tried


@pytest.mark.parametrize("tags", [("last", "last", "last"), ("a", "b", "c"), ("a", "b", "a")], ids="-".join)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(1)
def test_a_fault_at_any_moment_loses_nothing_and_no_failed_save_is_reported_as_good(
    fault: str, tags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves, the third one fails, so do the next ones after a kill, and the last one is made."""
    engine = OneRank(tmp_path / "before")
    engine.save(tags[0], 1)
    engine.save(tags[1], 2)
    for number in range(100):
        engine = OneRank(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        with failing_at(number, fault, monkeypatch) as tried:
            try:
                engine.save(tags[2], 3)
                is_reported = True
            except (CheckpointError, Killed) as error:
                is_reported = False
                assert isinstance(error, Killed) or os.strerror(getattr(errno, fault)) in str(error), tried
        steps = engine.steps()
        assert steps == 3 if is_reported else steps in (2, 3), (number, tried)
        assert not is_reported or "fsync" not in tried[number : number + 1], "a flush that fails is told"
        for other, place in (("EIO", number % 8), ("killed", number // 2)) if fault == "killed" else ():
            with suppress(Killed, CheckpointError), failing_at(place, other, monkeypatch):
                engine.save(tags[2], 4)
            assert steps <= engine.steps() <= 4, (number, tried)
        engine.save(tags[2], 5)
        assert engine.steps() == engine.steps(tags[2]) == 5
        left = {path.name for path in engine.folder.iterdir()}
        half_written = [name for name in left if name.startswith(".latest.")]  # has a random name: no writer finds it
        assert left - {*half_written} == {"latest", *tags} and len(half_written) <= 2 * (fault == "killed"), left
        if len(tried) <= number:
            break
    assert number >= 36, "four kinds of error and three orders of tags make 430 cases"


def test_the_disk_has_the_files_before_their_list_and_the_name_before_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def flush(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)
        flushed.append(re.sub(r"\.(.+)\.[0-9a-f]+\.(?:tmp|saving)", r"\1", path.name))  # without random parts
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    OneRank(tmp_path).save("a", steps=1)
    # each name is in its folder's own data: "a" is its folder during the save, "" holds the folder and `latest`
    assert flushed == [*FILES, MANIFEST, "a", "", "latest", ""]


def test_a_full_disk_is_named_although_torch_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, writes = torch.save, [torch.zeros(100_000)]
    monkeypatch.setattr(torch, "save", lambda states, path, **options: save(writes, "/dev/full", **options))
    with pytest.raises(CheckpointError, match=r"torch cannot write .*states.pt, and [\d,]+ bytes are free there: make"):
        OneRank(tmp_path).save("a", steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_another_overtakes_hears_and_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one begins to save the same tag when the files are written, and takes them for what a kill has left."""
    (engine := OneRank(tmp_path)).save("a", 1)
    write = engine._save

    def overtaken(tag: str | None, is_latest: bool) -> None:
        write(tag, is_latest)
        CheckpointPaths(tmp_path, "a", "0a1b2c3d").prepare()

    monkeypatch.setattr(engine, "_save", overtaken)
    with pytest.raises(CheckpointError, match="is missing.* does another job save under this tag"):
        engine.save("a", 2)
    assert engine.steps() == 1


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


def test_what_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Under a list, under one of an older version without checksums, without a list, and in all checkpoints."""
    monkeypatch.setattr(logging.getLogger("terapipe_ds"), "propagate", True)
    engine, bad, gone = OneRank(tmp_path), tmp_path / "2" / FILES[1], tmp_path / "gone"
    engine.save("1", 1)
    engine.save("2", 2)

    def is_refused(tag: str | None = "2", says: str = f"{bad.name} cannot be read") -> bool:
        with pytest.raises(CheckpointError, match=says):
            engine.find(tag)
        return True

    with monkeypatch.context() as patches:  # as EIO is
        patches.setattr(manifest, "checksum_of", lambda path: checksum_of(gone if path == bad else path))
        assert is_refused() and engine.find().tag == "1"
    document = json.loads((bad.parent / MANIFEST).read_text())
    (bad.parent / MANIFEST).write_text(json.dumps(document | {"checksums": {}}))
    assert engine.find().tag == "2" and "2 has no checksums" in caplog.text
    bad.write_bytes(bytes(bad.stat().st_size))
    assert is_refused() and engine.find().tag == "1"
    (bad.parent / MANIFEST).unlink()
    assert is_refused() and engine.find().tag == "1"
    shutil.copy(bad, tmp_path / "1" / FILES[1])
    assert is_refused("1", f"{bad.name} is damaged or of another") and is_refused(None, "no other whole checkpoint")


def test_only_what_deepspeed_reads_of_a_checkpoint_without_a_list_is_looked_at(tmp_path: Path) -> None:
    (engine := OneRank(tmp_path)).save("a", 1)
    (tmp_path / "a" / MANIFEST).unlink()
    (tmp_path / "a" / "zero").mkdir()
    for name in ("my_loader.pt", FILES[2], "zero/exp_avg.pt"):  # the last one of a universal checkpoint
        torch.save(Decimal(1), tmp_path / "a" / name)
        for with_optimizer in (False, True):
            is_read = "zero/" in name or (with_optimizer and name != "my_loader.pt")
            with pytest.raises(PickleRefused, match=name) if is_read else nullcontext():
                assert engine.find("a", with_optimizer=with_optimizer).pickled is None


# -- what the files hold -------------------------------------------------------------------------------------------


def test_what_a_checkpoint_of_plain_values_may_hold(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
    states = {
        "values": [1, 2.5, True, None, "a", b"b", 1j, {1, 2}, (1,), torch.bfloat16, torch.Size([2])],
        "counts": collections.Counter("aab"), "ordered": collections.OrderedDict(a=torch.ones(2)),
        "address": fragment_address(numel=2, start=1), "stage": ZeroStageEnum.gradients,
        "scalers": [LossScaler(4.0), scaler],
    }  # fmt: skip
    torch.save(states, tmp_path / "a.pt")
    known = set(torch.serialization.get_safe_globals())
    read = read_strictly(tmp_path / "a.pt")
    assert read["values"] == states["values"] and read["address"] == states["address"]
    assert read["stage"] is ZeroStageEnum.gradients and vars(read["scalers"][1]) == vars(scaler)
    assert set(torch.serialization.get_safe_globals()) == known, "nothing is left behind"
    from_numpy = torch._utils._rebuild_device_tensor_from_numpy
    for value, name in (
        (Decimal(1), "Decimal"), (Fraction(1, 2), "Fraction"), (uuid.UUID(int=1), "UUID"), (from_numpy, "from_numpy")
    ):  # fmt: skip
        torch.save({"args": value}, tmp_path / "a.pt")
        with pytest.raises(PickleRefused, match=name):
            read_strictly(tmp_path / "a.pt")


class Reduced:
    """Pickles as a call of `getattr`, as some versions of Python write a member of an enumeration."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def test_a_stage_that_an_older_python_pickled_is_read(tmp_path: Path) -> None:
    torch.save({"stage": Reduced(ZeroStageEnum, "gradients")}, tmp_path / "a.pt")
    assert read_strictly(tmp_path / "a.pt") == {"stage": ZeroStageEnum.gradients}
    for arguments in ((ZeroStageEnum, "mro"), (fragment_address, "gradients"), ({}, "clear"), (ZeroStageEnum, [])):
        torch.save({"stage": Reduced(*arguments)}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match="getattr|unhashable"):
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
    engine.save("b", 2, ds_config={"trace_dir": Decimal(1)})
    assert f"will refuse 3 of the files that were saved: {tmp_path / 'b' / FILES[0]}" in caplog.text


def test_threads_that_run_already_read_as_before(tmp_path: Path) -> None:
    torch.save(Decimal(1), tmp_path / "a.pt")
    with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as later:
        for thread, is_strict in ((before, False), (later, True)):
            read = lambda: torch.load(tmp_path / "a.pt", weights_only=False)  # noqa: E731
            before.submit(read).result()
            with strict_loading(), pytest.raises(pickle.UnpicklingError) if is_strict else nullcontext():
                thread.submit(read).result()
