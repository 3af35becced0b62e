"""Four ranks are killed (-9); two go on in another layout, by examples/resume_elsewhere.py, with the same losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from tests.distributed.harness import SERVER_ENVIRONMENT

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240.0
SAVE_EVERY = 2
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "terapipe": {"enabled": True, "slices": 4},
}
MODEL = """--model tiny --sequence-length 64 --max-bytes 65536 --partition-method uniform --no-pin
    --eval-every 0 --plot= --save-dir saved"""
# fp32: sums over replicas, micro-batches and slices run in another order, and Adam's first steps enlarge the difference
TOLERANCE = 1e-5

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def environment() -> dict[str, str]:
    return {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def started(folder: Path, ranks: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start train_gpt.py by `torchrun`, with what it says in `folder`; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(get_free_port()), str(EXAMPLES / "train_gpt.py"), *MODEL.split(), *options]
    with (folder / f"said-{ranks}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            for pid in ranks_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            process.kill()
            process.wait()


def ranks_of(launcher: int) -> list[int]:
    """The launcher's child processes."""
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def train(folder: Path, ranks: int, *options: str) -> dict[int, float]:
    """Train to the end; the loss of each step."""
    with started(folder, ranks, "--metrics", "metrics.jsonl", *options) as process:
        code = process.wait(timeout=TIMEOUT_S)
    assert code == 0, (folder / f"said-{ranks}.log").read_text()[-4000:]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert process.poll() is None and time.monotonic() < until_s, log.read_text()[-4000:]
        time.sleep(0.02)


def resume_elsewhere(folder: Path, *plan: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "resume_elsewhere.py"), "--save-dir", "saved", "--out", "elsewhere", "--"]
    options = ["--model", "tiny", "--device", "cpu-core", "--sequence-length", "64", *plan]
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_two_ranks_go_on_where_four_were_killed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    options = ("--deepspeed_config", "ds.json", "--pipeline-stages", "2", "--save-every", str(SAVE_EVERY))
    latest = tmp_path / "saved" / "latest"
    with started(tmp_path, 4, *options, "--steps", "100000") as process:
        wait_for(latest.is_file, process, tmp_path / "said-4.log")
        pids = ranks_of(process.pid)
        assert len(pids) == 4
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=60) != 0

    done = resume_elsewhere(tmp_path, "--devices", "2", "--stages", "2", "--tensor-parallel", "1")
    assert done.returncode == 0, done.stderr
    saved_step = int((tmp_path / "saved" / "latest_universal").read_text().removeprefix("global_step").split("_")[0])
    assert saved_step >= SAVE_EVERY
    assert f"global_step{saved_step} was saved by 2 pipe x 2 data x 1 model" in done.stdout
    assert "and 2 pipe x 1 data x 1 model will go on" in done.stdout

    last = str(saved_step + 2)
    resumed = train(tmp_path, 2, "--deepspeed_config", "elsewhere/ds.json", "--steps", last, "--resume")
    (whole := tmp_path / "whole").mkdir()
    (whole / "ds.json").write_text(json.dumps(CONFIG))
    # two replicas without stages: the same steps by the same file, and started sooner than four ranks
    never_killed = train(whole, 2, *options[:2], "--pipeline-stages", "1", "--steps", last)
    assert list(resumed) == list(never_killed) == list(range(1, int(last) + 1)), "the curve goes on where it was"
    assert resumed == pytest.approx(never_killed, rel=TOLERANCE)

    again = resume_elsewhere(tmp_path, "--devices", "2", "--stages", "2", "--tensor-parallel", "1")
    assert "as many go on: nothing to convert" in again.stdout
    written = json.loads((tmp_path / "elsewhere" / "ds.json").read_text())
    assert written["checkpoint"]["load_universal"] is False, "the universal checkpoint is older than the last one"
