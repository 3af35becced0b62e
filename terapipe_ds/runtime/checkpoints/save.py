"""Save a checkpoint so that a kill at any point leaves the earlier one or this one whole.

DeepSpeed (0.19.8) writes over an older checkpoint of the same tag, and rank 0 writes `latest` before the others have
their files: a kill leaves a half that looks whole. So DeepSpeed saves in `.TAG.JOB.saving` here, where JOB is the id of
the job. The checkpoint gets its own name in one move, when every rank has written and a list of its files is there. An
older checkpoint of that tag is moved to `.TAG.replaced` for that moment, so that there is always a whole one.
"""

from __future__ import annotations

import glob
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.files.atomic import sync, write_text
from terapipe_ds.runtime.agreement import gather
from terapipe_ds.runtime.checkpoints.disks import on_each_rank, problem_of_local_storage, require_shared
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, checksum_of
from terapipe_ds.runtime.checkpoints.strict_pickles import refusal, without_numpy

logger = logging.getLogger("terapipe_ds")

T = TypeVar("T")
LATEST = "latest"  # DeepSpeed's name
OTHER_JOB_S = 300.0  # a job that wrote less long ago may still save
_CLOCK_STEP_S = 0.1  # at most, of a disk's clock
_ALONE = ("_save_checkpoint", "_save_zero_checkpoint")  # methods of the engine in which no rank waits for another
_ALONE_IN_WRITER = ("makedirs", "create", "commit")
_JOB = secrets.token_hex(4)  # the id of this process as a job; of all ranks, that of the first one counts


@dataclass(frozen=True)
class CheckpointPaths:
    """Say where the checkpoint `tag` is in `folder`: under its name, while it is saved, while another replaces it."""

    folder: Path
    tag: str
    job: str = ""  # the id of the job that saves; "": unknown, as to those that only read
    read_at_s: float = -math.inf  # since when it knows what others write: what was there before, it continues

    @property
    def final(self) -> Path:
        return self.folder / self.tag

    @property
    def saving(self) -> Path:
        return self.final.with_name(f".{self.final.name}.{self.job}.saving")

    def all_saving(self) -> list[Path]:
        """Return where jobs save this tag, or have left off, the latest first."""
        name = glob.escape(self.final.name)
        patterns = f".{name}.{'[0-9a-f]' * 8}.saving", f".{name}.saving"  # the latter of older versions
        found = [path for pattern in patterns for path in self.final.parent.glob(pattern)]
        of_tag = [path for path in found if (saved := _readable(path)) is None or saved.tag == self.tag]
        return sorted(of_tag, key=_written_at, reverse=True)

    @property
    def replaced(self) -> Path:
        return self.final.with_name(f".{self.final.name}.replaced")

    def tag_of(self, path: Path) -> str:
        """Return the tag by which DeepSpeed finds `path`."""
        return str(path.relative_to(self.folder))

    def settle(self) -> None:
        """Finish what saves that were killed have left of this tag, or remove it."""
        if self.replaced.exists() and self.final.exists():
            self._drop_replaced()
        for saving in reversed(self.all_saving()):
            saved = _readable(saving)
            if saved is not None and saved.problem(saving) is None:
                self.commit(saving)
            _remove(saving)
        if self.replaced.exists():
            self.replaced.rename(self.final)

    def commit(self, saving: Path | None = None) -> None:
        """Give what was saved its name. A kill in any line leaves one whole checkpoint of this tag."""
        if self.final.exists():
            self.final.rename(self.replaced)
        (saving or self.saving).rename(self.final)
        sync(self.final.parent)
        if self.replaced.exists():
            self._drop_replaced()

    def prepare(self) -> None:
        """Make the folder to save in: here, where all ranks learn of an error.

        Raises:
            CheckpointError: another job saves this tag, or has just done so; or the tag is a symbolic link.
        """
        if self.final.is_symlink():  # a move would take the link, and leave the checkpoint behind it without a name
            raise CheckpointError(
                f"{self.final} is a symbolic link to {os.readlink(self.final)}, and the save would replace only the "
                "link: save with another tag, or remove the link"
            )
        self.saving.mkdir(parents=True, exist_ok=True)
        self.saving.touch()
        self._refuse_other_jobs(self.saving.stat().st_mtime)  # by the clock of the disk
        self.settle()
        self.saving.mkdir()

    def _refuse_other_jobs(self, now_s: float) -> None:
        """Refuse to save where another job has written lately, and since this one has last read a checkpoint."""
        limit_s = min(OTHER_JOB_S, time.monotonic() - self.read_at_s) - _CLOCK_STEP_S
        saved, written_at_s = _readable(self.final), {path: _written_at(path) for path in self.all_saving()}
        if saved is not None and saved.job not in ("", self.job):
            written_at_s[self.final] = (self.final / MANIFEST).stat().st_mtime
        for path, at_s in written_at_s.items():
            # by the disk's own clock nothing is written in the future: what says so is older, and its clock was wrong
            if path != self.saving and -_CLOCK_STEP_S <= now_s - at_s < limit_s:
                with suppress(OSError):  # not empty: of this job, whole or not
                    self.saving.rmdir()
                raise CheckpointError(
                    f"another job has written {path} {max(now_s - at_s, 0):.0f} s ago: two jobs would replace one "
                    "another's checkpoints. Give each a folder or tags of its own. If that job has ended, load its "
                    f"checkpoint first, or save again after {OTHER_JOB_S:.0f} s"
                )

    def publish(self, is_latest: bool) -> None:
        """Give what was saved its name, and name it in `latest`."""
        self.commit()
        if is_latest:
            write_text(self.folder / LATEST, self.tag, durable=True)

    def _drop_replaced(self) -> None:
        """Remove the older checkpoint; what a user has put beside its files moves over."""
        old = _readable(self.replaced)
        listed = {MANIFEST, *(() if old is None else old.files)}
        for entry in self.replaced.iterdir():
            moved = self.final / entry.name
            if entry.name not in listed and not moved.exists():
                entry.rename(moved)
        _remove(self.replaced)


def _written_at(folder: Path) -> float:
    """Return when a folder, or a file in it, was last written; 0 where it is gone."""
    newest = 0.0
    for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        with suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def _readable(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except CheckpointError:
        return None


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def save_checkpoint(
    engine: PipelineEngine,
    world: Any,
    save: Callable[[str | None, bool], T],
    save_dir: str,
    tag: str | None,
    save_latest: bool,
    training: Mapping[str, Any],
    allow_pickle: bool = False,
    read_at_s: float = -math.inf,
) -> T:
    """Let DeepSpeed save a checkpoint, and name it when it is whole. A collective over all ranks.

    Args:
        world: a group of all ranks on the CPU; None for a single rank.
        save: DeepSpeed's own `save_checkpoint`, as a function of `tag` and `save_latest`.
        training: for the manifest.
        allow_pickle: say nothing of files that a load reads with this permission only.
        read_at_s: when this job has begun or has last loaded. What others saved before that is no sign of a rival.

    Raises:
        CheckpointError: on every rank, where one of them cannot go on. What was whole before is whole still.
    """
    if not save_dir or engine.checkpoint_engine.is_decoupled():  # DeepSpeed raises; or files are written later
        return save(tag, save_latest)
    if (problem := problem_of_local_storage(engine)) is not None:
        raise CheckpointError(problem)
    tag, leads = f"global_step{engine.global_steps}" if tag is None else str(tag), is_leader(engine)
    told = gather((tag, _JOB), world)
    paths = CheckpointPaths(Path(save_dir), tag, told[0][1], read_at_s)
    tags = sorted({each for each, _ in told})
    if len(tags) > 1:
        raise CheckpointError(f"the ranks save under different tags, {', '.join(map(repr, tags))}; give all the same")
    _on_each_rank(world, paths.prepare if leads else None)
    try:
        require_shared(paths.saving, world)
    except CheckpointError:
        if leads:  # the others leave, too: an error here would hide theirs
            shutil.rmtree(paths.saving, ignore_errors=True)
        raise
    writer = _Writer(engine.checkpoint_engine.save, paths.saving)
    alone = [(engine, name) for name in _ALONE] + [(engine.checkpoint_engine, name) for name in _ALONE_IN_WRITER]
    calls = [(owner, name, getattr(owner, name)) for owner, name in alone]
    with ExitStack() as stack:
        for owner, name, act in (*calls, (engine.checkpoint_engine, "save", writer.save)):
            stack.enter_context(replaced(owner, name, writer.keeping(act)))
        saved = save(paths.tag_of(paths.saving), False)
    try:
        files = {name: file for of_rank in _on_each_rank(world, writer.files) for name, file in (of_rank or {}).items()}
        if engine.use_node_local_storage():
            own = _on_each_rank(world, lambda: {name for name in files if (paths.saving / name).is_file()})
            files = {name: file for name, file in files.items() if name in (own[torch_dist.get_rank(world)] or ())}
        manifest = Manifest(
            tag=tag,
            global_steps=int(engine.global_steps),
            is_latest=bool(save_latest),
            job=paths.job,
            training=dict(training),
            files={name: file.num_bytes for name, file in files.items()},
            checksums={name: file.checksum for name, file in files.items()},
        )
        _on_each_rank(world, (lambda: manifest.write(paths.saving)) if leads else None)
    except CheckpointError:
        if leads:  # to make room on a disk that may be full
            shutil.rmtree(paths.saving, ignore_errors=True)
        raise
    _on_each_rank(world, (lambda: paths.publish(save_latest)) if leads else None)
    refusals = [file.refusal.replace(str(paths.saving), str(paths.final)) for file in files.values() if file.refusal]
    if refusals and not allow_pickle and engine.global_rank == 0:  # now, not when the checkpoint is needed
        logger.warning("a load will refuse %d of the files that were saved: %s", len(refusals), refusals[0])
    return saved


def is_leader(engine: PipelineEngine) -> bool:
    """Return whether this rank names files: the first one of all, or of each node that has a disk of its own."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Make `function` the attribute `name` of one object for a while."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _on_each_rank(world: Any, act: Callable[[], T] | None) -> list[T | None]:
    return on_each_rank(world, "save the checkpoint", act)


class Written(NamedTuple):
    """Describe a file that the disk has."""

    num_bytes: int
    checksum: str
    refusal: str | None  # why a load will not read it


def flush(path: Path) -> Written:
    """Wait until the disk has a file. Meanwhile a thread reads it, from memory, for its checksum."""
    with ThreadPoolExecutor(1) as thread:
        checksum = thread.submit(checksum_of, path)
        sync(path)
        return Written(path.stat().st_size, checksum.result(), refusal(path))


class FirstError:
    """Keep the first error of some calls until all ranks can be told: raised at once, it would leave others waiting."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def keeping(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return `act` as a function that raises nothing, and does nothing after an error."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self._error is None:
                try:
                    return act(*args, **kwargs)
                except Exception as error:
                    self._error = self._error or error
            return None

        return attempt

    def raise_first(self) -> None:
        """Raise the error that was kept."""
        if self._error is not None:
            raise self._error


class _Writer(FirstError):
    """Write as DeepSpeed's writer of files does, wait for the disk, and remember what is written in `folder`."""

    def __init__(self, save: Callable[..., Any], folder: Path) -> None:
        super().__init__()
        self._save, self._folder = save, folder
        self._files: dict[str, Written] = {}

    def save(self, state_dict: Any, path: str) -> Any:
        with suppress(RecursionError):  # of lists that hold themselves
            state_dict = without_numpy(state_dict)
        result = self._save(state_dict=state_dict, path=path)
        if Path(path).is_file():  # some writers leave a file to another rank
            self._files[str(Path(path).relative_to(self._folder))] = flush(Path(path))
        return result

    def files(self) -> dict[str, Written]:
        """Return what each file is, or raise what stopped this rank."""
        self.raise_first()
        return self._files
