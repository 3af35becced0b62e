"""Builds of DeepSpeed's operators: none at the start on a CPU, and a killed one is named where others would wait."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from torch.utils.file_baton import FileBaton

import terapipe_ds
from terapipe_ds.compat import CompatError, builds
from terapipe_ds.doctor import Check, look, machine
from tests.processes import run_python

STOCK_WAIT = FileBaton.wait
# Each start says whether the operator was built; a stand-in builds it.
SCRIPT = """
import os, sys
import deepspeed, torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from types import SimpleNamespace

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
built = []
nothing = SimpleNamespace(initialize=lambda *_: None, vector_kernel_level=lambda: 0)
ShareMemCommBuilder.load = lambda self, verbose=True: built.append(self) or nothing
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def start(name, initialize=None):
    comm.cdb = None
    built.clear()
    if initialize is None:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    else:
        initialize(model=torch.nn.Linear(2, 2), config=CONFIG)
    print("START", name, len(built))
"""
STARTS = """
import terapipe_ds
start("stock")
terapipe_ds.register()
start("registered")
start("deepspeed.initialize", deepspeed.initialize)
terapipe_ds.unregister()
start("unregistered")
start("terapipe_ds.initialize", terapipe_ds.initialize)
os.environ["TERAPIPE_BUILD_SHM_COMM"] = "1"
terapipe_ds.register()
start("wanted")
"""
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def registered() -> Iterator[None]:
    terapipe_ds.register()
    yield
    terapipe_ds.unregister()


def built_at(folder: Path, script: str, *options: str) -> list[str]:
    """The starts of a script in a process of its own, each with how often it has built the operator."""
    (folder / "train.py").write_text(script)
    environment = {**ENVIRONMENT, builds.BUILD_SHM_COMM: "", "TORCH_EXTENSIONS_DIR": str(folder)}
    done = run_python(*options, folder / "train.py", **environment)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("START ") for line in done.stdout.splitlines() if line.startswith("START ")]


def test_no_start_builds_after_register_unless_it_is_wanted(tmp_path: Path) -> None:
    ours = ["registered 0", "deepspeed.initialize 0", "unregistered 1", "terapipe_ds.initialize 0"]
    assert built_at(tmp_path, SCRIPT + STARTS) == ["stock 1", *ours, "wanted 1"]
    assert built_at(tmp_path, f'{SCRIPT}start("script")\n', "-m", "terapipe_ds.run") == ["script 0"]


class TestLocks:
    @pytest.fixture
    def lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        lock = tmp_path / "fused_adam" / "lock"
        lock.parent.mkdir()
        assert FileBaton(str(lock)).try_acquire()
        return lock

    def kill(self, lock: Path, age_s: float) -> None:
        """Leave the lock as a build does that was killed."""
        lock.unlink()
        lock.touch()
        os.utime(lock, (lock.stat().st_mtime - age_s,) * 2)

    def test_of_a_killed_build_is_an_error_at_once(self, lock: Path, registered: None) -> None:
        self.kill(lock, 2 * builds.QUIET_S)
        with pytest.raises(CompatError, match=rf"no process of this machine holds {lock}.*killed.*rm {lock}"):
            FileBaton(str(lock)).wait()

    def test_of_a_build_just_killed_is_named_at_once_and_an_error_later(
        self, lock: Path, registered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.kill(lock, 0.0)
        monkeypatch.setattr(builds, "QUIET_S", 0.2)
        with pytest.raises(CompatError, match="was killed"):
            FileBaton(str(lock)).wait()
        assert str(lock) in caplog.text

    def test_of_a_build_that_runs_is_waited_for(
        self, lock: Path, registered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """This process holds it; `QUIET_S` does not matter then."""
        monkeypatch.setattr(builds, "QUIET_S", 0.0)
        monkeypatch.setattr(builds.time, "sleep", lambda seconds: lock.unlink())
        with caplog.at_level(logging.WARNING, "terapipe_ds"):
            FileBaton(str(lock)).wait()
        assert not lock.exists() and f"this start waits: process {os.getpid()} builds fused_adam" in caplog.text
        terapipe_ds.unregister()
        assert FileBaton.wait is STOCK_WAIT

    def test_the_doctor_names_it(self, lock: Path) -> None:
        def told() -> tuple[str, str, str]:
            (line,) = [line for line in look(Check("ops", machine.builds)) if line.name == "build lock"]
            return line.verdict, line.found, line.fix

        assert told()[0] == "note" and f"process {os.getpid()} builds fused_adam now" in told()[1]
        self.kill(lock, 0.0)
        verdict, text, fix = told()
        assert verdict == "warning" and str(lock) in text and f"rm {lock}" in fix
