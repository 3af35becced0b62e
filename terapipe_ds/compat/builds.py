"""Skip an operator that DeepSpeed compiles when it starts on a CPU, and end the wait for a killed build.

torch compiles each operator in a separate folder with a file `lock`, which the building process holds open. A killed
build leaves the file, and torch makes every later start wait for it silently.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from terapipe_ds.compat.versions import CompatError

BUILD_SHM_COMM = "TERAPIPE_BUILD_SHM_COMM"  # environment variable; "1" lets DeepSpeed compile deepspeed_shm_comm
QUIET_S = 300.0  # a build elsewhere that has written nothing for this time is over: one file takes a minute or two
_LOOK_S = 0.25


def builds_shm_comm() -> bool:
    """Return whether DeepSpeed may load its all-reduce over shared memory; only DeepSpeed's inference uses it."""
    from deepspeed.git_version_info import installed_ops

    return os.environ.get(BUILD_SHM_COMM) == "1" or bool(installed_ops.get("deepspeed_shm_comm"))


def build_locks() -> list[Path]:
    """Return the locks of running or killed builds in the folder where torch compiles operators."""
    from torch.utils.cpp_extension import get_default_build_root

    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    return sorted(Path(own or get_default_build_root()).glob("*/lock" if own else "*/*/lock"))


def state_of(lock: Path) -> tuple[int | None, str]:
    """Return the process of this machine that holds a lock, as far as this user may see, and a description."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(link.stat(), lock.stat()):
                return int(link.parts[2]), f"process {link.parts[2]} builds {lock.parent.name} now ({lock})"
        except OSError:  # it has ended, or closed the file; or the lock is gone
            continue
    return None, (
        f"no process of this machine holds {lock}: a build of {lock.parent.name} was killed, or another machine "
        f"builds it. If no machine does, remove the lock, or every start that needs the operator waits for ever: "
        f"rm {lock}"
    )


def wait_for_build(baton: Any) -> None:
    """Wait as `torch.utils.file_baton.FileBaton.wait` does, but log the lock; raise CompatError for a killed build.

    A build was killed if no process of this machine holds its lock, and none has written in its folder for `QUIET_S`.
    """
    lock, is_told, began_s = Path(baton.lock_file_path), False, time.time()
    while lock.exists():
        pid, text = state_of(lock)
        try:
            quiet_s = time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir())
        except (OSError, ValueError):  # a file is gone: the build goes on, or is done; or the folder cannot be listed
            quiet_s = time.time() - began_s
        if pid is None and quiet_s > QUIET_S and lock.exists():  # it may have gone since the loop looked
            raise CompatError(text)
        if not is_told:
            logging.getLogger("terapipe_ds").warning("this start waits: %s", text)
        is_told = True
        time.sleep(_LOOK_S)
