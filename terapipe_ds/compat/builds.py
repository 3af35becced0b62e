"""Leave out an operator that DeepSpeed compiles when it starts on a CPU, and end the wait for a build that was killed.

torch compiles each operator in a folder of its own, with a file `lock` in it that the building process holds open. A
build that is killed leaves the file, and torch lets every later start wait for it without a word.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from terapipe_ds.compat.versions import CompatError

logger = logging.getLogger("terapipe_ds")

SHM_COMM = "deepspeed_shm_comm"
BUILD_SHM_COMM = "TERAPIPE_BUILD_SHM_COMM"  # environment variable; "1" lets DeepSpeed compile it
QUIET_S = 300.0  # a build elsewhere that has written nothing for so long is over: one file takes a minute or two
_LOOK_S, _LOOK_AGAIN_S = 0.1, 2.0


def builds_shm_comm() -> bool:
    """Return whether DeepSpeed may load its all-reduce over shared memory, which only its inference uses."""
    from deepspeed.git_version_info import installed_ops

    return os.environ.get(BUILD_SHM_COMM) == "1" or bool(installed_ops.get(SHM_COMM))


def build_locks() -> list[Path]:
    """Return the locks of builds that run or were killed, where torch compiles operators."""
    from torch.utils.cpp_extension import get_default_build_root

    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    return sorted(Path(own or get_default_build_root()).glob("*/lock" if own else "*/*/lock"))


def holder(lock: Path) -> int | None:
    """Return the process of this machine that has the file open, as far as this user may see."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(link.stat(), lock.stat()):
                return int(link.parts[2])
        except OSError:  # it has ended, or closed the file; or the lock is gone
            continue
    return None


def problem_of(lock: Path) -> str:
    """Say what a lock without a holder means, and what to do."""
    return (
        f"no process of this machine holds {lock}, the lock of a build of {lock.parent.name}: a build that was killed "
        f"leaves one, and every start that needs the operator waits for it. Remove the file (rm {lock}), unless "
        "another machine that shares the folder builds now"
    )


def wait_for_build(baton: Any) -> None:
    """Wait as `torch.utils.file_baton.FileBaton.wait` does, with a word of what for; a killed build is an error.

    Raises:
        CompatError: no process of this machine holds the lock, and nothing has been written for `QUIET_S`.
    """
    lock, is_told, look_at_s = Path(baton.lock_file_path), False, 0.0
    newest, since_s = 0.0, time.monotonic()
    while lock.exists():
        if time.monotonic() >= look_at_s:
            pid, written = holder(lock), _written_at(lock.parent)
            if written != newest or pid is not None:
                newest, since_s = written, time.monotonic()
            is_quiet = max(time.monotonic() - since_s, time.time() - newest) > QUIET_S
            if pid is None and is_quiet and lock.exists():
                raise CompatError(problem_of(lock))
            if not is_told:
                held = f"waits for process {pid}, which builds {lock.parent.name}" if pid else problem_of(lock)
                logger.warning("%s; this start goes on when %s is gone", held, lock)
            is_told, look_at_s = True, time.monotonic() + _LOOK_AGAIN_S
        time.sleep(_LOOK_S)


def _written_at(folder: Path) -> float:
    """Return when a file of the folder was last written; 0 without any."""
    newest = 0.0
    for path in folder.iterdir():
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:  # the build has removed it
            continue
    return newest
