"""Find out whether the machines of a job see the same checkpoints, before somebody relies on one that is in pieces.

Each rank writes the files of its own layers. If each machine has its own disk, the same folder holds a different piece
of the checkpoint on each machine. DeepSpeed (0.19.8) writes these pieces without a warning, and cannot load them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.messages import describe
from terapipe_ds.runtime.agreement import by_text, gather_results
from terapipe_ds.runtime.checkpoints.manifest import CheckpointError

T = TypeVar("T")
PATIENCE_S = 5.0  # the time until a network file system shows the files of one machine on another
_LOOK_S = 0.1
_SHARE = (
    "Give all machines one folder that they share, by its absolute path (a network file system); for a load, a copy of "
    "the whole checkpoint on each machine does as well"
)


def require_shared(folder: Path, world: Any) -> None:
    """Raise CheckpointError on every rank if some do not see a folder that rank 0 sees. A collective over all ranks.

    Ranks that do not see it retry for a while. It is also an error if a rank cannot look (no permission, stale handle).
    """
    looked = on_each_rank(world, f"look at {folder}", lambda: (str(folder.absolute()), _appears(folder)))
    paths, appears = zip(*filter(None, looked), strict=True)
    blind = {rank: path for rank, path in enumerate(paths) if not appears[rank]}
    if blind and appears[0]:
        raise CheckpointError(
            f"rank 0 sees {paths[0]}, and these ranks do not ({by_text(blind)}): they have another disk "
            f"or another working folder, and each machine would hold only a piece of the checkpoint. {_SHARE}"
        )


def share_of_files(folder: Path, world: Any) -> tuple[int, int]:
    """Return this rank's place among the ranks that see the same files in `folder`, and their number. A collective.

    Each machine may have a copy of its own, and each copy may be damaged.
    """
    everyone = on_each_rank(world, f"look at {folder}", lambda: _identity(folder))
    rank = torch_dist.get_rank()
    same = [other for other, identity in enumerate(everyone) if identity == everyone[rank]]
    return same.index(rank), len(same)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return numbers by which folders on two disks differ; None if machines have different ones for one folder."""
    status = folder.stat()
    device = f" {os.major(status.st_dev)}:{os.minor(status.st_dev)} "
    with suppress(OSError):  # object stores that are mounted by FUSE number the files of each mount anew
        if any(device in line and " - fuse" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
            return None
    return status.st_ino, status.st_mtime_ns


def on_each_rank(world: Any, what: str, act: Callable[[], T] | None) -> list[T | None]:
    """Return the result of `act` on each rank; an error of one rank is a CheckpointError on all of them.

    Every access to a file between two collectives goes through this function or `gather_results`: a rank that raises
    alone leaves the others waiting.
    """

    def attempt() -> T | None:
        try:
            return None if act is None else act()
        except Exception as error:
            raise CheckpointError(f"rank {torch_dist.get_rank()} cannot {what}: {describe(error)}") from error

    return gather_results(attempt, world)


def _appears(folder: Path) -> bool:
    """Return whether a folder exists, or appears soon."""
    until_s = time.monotonic() + PATIENCE_S
    while not folder.is_dir():
        if time.monotonic() >= until_s:
            return False
        # To list a folder, a network file system asks its server. So list the nearest folder that exists
        os.listdir(next(path for path in folder.absolute().parents if path.is_dir()))
        time.sleep(_LOOK_S)
    return True


def problem_of_local_storage(engine: PipelineEngine) -> str | None:
    """Say why checkpoints on disks of single machines cannot be loaded again; None: they are not configured.

    DeepSpeed lets one rank of each machine save the files that are of no single layer, but loads those of all stages.
    """
    if not engine.use_node_local_storage():
        return None
    return (
        "checkpoint.use_node_local_storage: DeepSpeed saves one model state per machine there, and a pipeline needs "
        "the states of all stages to load, so that no machine has a whole checkpoint. Remove the key, and save to a "
        "folder that all machines share"
    )
