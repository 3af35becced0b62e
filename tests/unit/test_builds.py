"""Builds of DeepSpeed's operators: none at the start on a CPU, and a killed one is named where others would wait."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch.utils.file_baton import FileBaton

import terapipe_ds
from terapipe_ds import run
from terapipe_ds.compat import CompatError, builds
from terapipe_ds.doctor import Check, look, machine
from tests.distributed.harness import RankPool

STOCK_WAIT = FileBaton.wait
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
SCRIPT = f"import {__name__}; {__name__}.start('script')"
said: list[str] = []


@pytest.fixture
def registered() -> Iterator[None]:
    terapipe_ds.register()
    yield
    terapipe_ds.unregister()


def start(name: str, initialize: Any = None) -> None:
    """Start DeepSpeed, and note how often it builds the operator; a stand-in builds it."""
    built, nothing = [], SimpleNamespace(initialize=lambda *_: None, vector_kernel_level=lambda: 0)
    with (
        mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": True}),
        mock.patch.object(ShareMemCommBuilder, "load", lambda *_, **__: built.append(name) or nothing),
        mock.patch.object(comm, "cdb", None),
    ):
        if initialize is None:
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        else:
            initialize(model=torch.nn.Linear(2, 2), config=CONFIG)
    said.append(f"{name} {len(built)}")


def starts(script: str) -> list[str]:
    """Return how often each start on this rank has built the operator."""
    said.clear()
    start("stock")
    terapipe_ds.register()
    start("registered")
    start("deepspeed.initialize", deepspeed.initialize)
    terapipe_ds.unregister()
    start("unregistered")
    start("terapipe_ds.initialize", terapipe_ds.initialize)
    with mock.patch.dict(os.environ, {builds.BUILD_SHM_COMM: "1"}):
        terapipe_ds.register()
        start("wanted")
        terapipe_ds.unregister()
    with mock.patch.object(sys, "argv", sys.argv), mock.patch.object(sys, "path", [*sys.path]):
        run.main([script])
    terapipe_ds.unregister()
    return said


def test_no_start_builds_after_register_unless_it_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ours = ["registered 0", "deepspeed.initialize 0", "unregistered 1", "terapipe_ds.initialize 0"]
    with contextlib.closing(RankPool(1)) as new:  # DeepSpeed keeps groups of earlier engines, which are closed by now
        counts = new.run(starts, script=str(tmp_path / "train.py"))
    assert counts == [["stock 1", *ours, "wanted 1", "script 0"]]


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
