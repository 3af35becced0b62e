"""Run DeepSpeed's launcher in a fork of the server that has DeepSpeed already: only its ranks are new interpreters."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed.harness import ensure_server, redirect_output

TIMEOUT_S = 180.0


def launch(arguments: list[str], folder: Path, **environment: str) -> tuple[int | None, str, list[int]]:
    """Run `deepspeed ARGUMENTS` in a folder; return its exit code, its output, and what was left running, now ended."""
    ensure_server()
    log = folder / "launcher.log"
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(arguments, log, environment))
    process.start()
    process.join(TIMEOUT_S)
    assert process.pid is not None
    left = _processes_of_session(process.pid)
    for pid in left:
        os.kill(pid, 9)
    process.join()
    return process.exitcode, log.read_text(), left


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    redirect_output(str(log))
    os.chdir(log.parent)
    os.environ.update(environment)
    from deepspeed.launcher import launch, runner

    def in_this_process(command: list[str], env: dict[str, str]) -> Any:
        """Run what the command runs in another interpreter."""
        assert command[:4] == [sys.executable, "-u", "-m", launch.__name__]
        sys.argv = command[3:]
        launch.main()
        return mock.Mock(returncode=0)  # otherwise it has exited

    with mock.patch.object(runner, "subprocess", mock.Mock(Popen=in_this_process)):
        runner.main(arguments)


def _processes_of_session(session: int) -> list[int]:
    """Living processes (no zombies), read from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session_of_process = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # ended in between
            continue
        if int(session_of_process) == session and state != "Z":
            found.append(int(path.parent.name))
    return found
