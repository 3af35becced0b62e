"""Builds of DeepSpeed's operators: none at the start on a CPU, and a killed one is named where others would wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from torch.utils.file_baton import FileBaton

import terapipe_ds
from terapipe_ds.compat import CompatError, builds
from terapipe_ds.doctor import Check, look, machine

STOCK_WAIT = FileBaton.wait
# A stand-in for the compiler writes down that it was called: stock does, and after register() nothing does.
SCRIPT = """
import os, sys
import deepspeed, torch.distributed as dist
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.comm import comm

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
def load(self, verbose=True):
    print("BUILDS", flush=True)
    class Nothing:
        initialize = vector_kernel_level = staticmethod(lambda *_: 0)
    return Nothing()
ShareMemCommBuilder.load = load

def start(name):
    print("START", name, flush=True)
    comm.cdb = None
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

def initialize(through):
    print("START", through.__module__, flush=True)
    comm.cdb = None
    from deepspeed.pipe import LayerSpec, PipelineModule
    import torch
    start_config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    through(model=torch.nn.Linear(2, 2), config=start_config)
"""
BEFORE = """
import terapipe_ds
start("stock")
terapipe_ds.register()
start("registered")
initialize(deepspeed.initialize)
terapipe_ds.unregister()
start("unregistered")
initialize(terapipe_ds.initialize)
os.environ["TERAPIPE_BUILD_SHM_COMM"] = "1"
terapipe_ds.register()
start("asked for")
"""
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "LOCAL_RANK": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "TERAPIPE_BUILD_SHM_COMM": "",
}


@pytest.fixture
def registered() -> Iterator[None]:
    terapipe_ds.register()
    yield
    terapipe_ds.unregister()


def builds_of(tmp_path: Path, *command: str) -> dict[str, int]:
    """How often each start in a process of its own has built the operator."""
    environment = {**os.environ, **ENVIRONMENT, builds.BUILD_SHM_COMM: "", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    _, *starts = done.stdout.split("START ")
    return {start.splitlines()[0]: start.count("BUILDS") for start in starts}


def test_no_start_builds_after_register_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(SCRIPT + BEFORE)
    expected = {"stock": 1, "registered": 0, "deepspeed": 0, "unregistered": 1, "terapipe_ds": 0, "asked for": 1}
    seen = {name.split(".")[0]: count for name, count in builds_of(tmp_path, str(tmp_path / "starts.py")).items()}
    assert seen == expected


def test_no_script_under_run_builds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + 'start("script")\n')
    assert builds_of(tmp_path, "-m", "terapipe_ds.run", str(tmp_path / "train.py")) == {"script": 0}


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
        with pytest.raises(CompatError, match=rf"no process of this machine holds {lock}.*fused_adam.*rm {lock}"):
            FileBaton(str(lock)).wait()

    def test_of_a_build_just_killed_is_named_at_once_and_an_error_later(
        self, lock: Path, registered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.kill(lock, 0.0)
        monkeypatch.setattr(builds, "QUIET_S", 0.2)
        monkeypatch.setattr(builds, "_LOOK_AGAIN_S", 0.05)
        with pytest.raises(CompatError, match="a build that was killed"):
            FileBaton(str(lock)).wait()
        assert str(lock) in caplog.text

    def test_of_a_build_that_runs_is_waited_for(
        self, lock: Path, registered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """This process holds it; `QUIET_S` does not matter then."""
        monkeypatch.setattr(builds, "QUIET_S", 0.0)
        timer = threading.Timer(0.3, lock.unlink)
        timer.start()
        with caplog.at_level(logging.WARNING, "terapipe_ds"):
            FileBaton(str(lock)).wait()
        assert not lock.exists() and f"waits for process {os.getpid()}, which builds fused_adam" in caplog.text
        terapipe_ds.unregister()
        assert FileBaton.wait is STOCK_WAIT

    def test_the_doctor_names_it(self, lock: Path) -> None:
        def told() -> tuple[str, str, str]:
            (line,) = [line for line in look(Check("ops", machine.ops)) if line.name == "build lock"]
            return line.verdict, line.found, line.fix

        assert told()[0] == "note" and f"process {os.getpid()} builds fused_adam now" in told()[1]
        self.kill(lock, 0.0)
        verdict, text, fix = told()
        assert verdict == "warning" and str(lock) in text and f"rm {lock}" in fix
