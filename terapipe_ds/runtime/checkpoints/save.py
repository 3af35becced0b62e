"""Save a checkpoint so that a kill at any point leaves the earlier one or this one whole.

DeepSpeed (0.19.8) writes over an older checkpoint of the same tag, and rank 0 writes `latest` before the others have
written their files. A kill leaves an incomplete checkpoint that looks whole. So a save here takes three steps:

    prepare   make `.TAG.JOB.saving`, where JOB is the id of the job; tidy up after saves of this tag that were killed
    write     DeepSpeed saves there; each rank waits for the disk and keeps the checksums of its files
    publish   write the list of the files, move an older checkpoint to `.TAG.replaced`, give the folder its name in one
              move, name it in `latest`, remove the older one
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.files.atomic import sync, write_text
from terapipe_ds.messages import logger, show_value
from terapipe_ds.runtime.agreement import gather
from terapipe_ds.runtime.checkpoints.disks import on_each_rank, problem_of_local_storage, require_shared
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, checksum_of, names_in
from terapipe_ds.runtime.checkpoints.strict_pickles import refusal, without_numpy

T = TypeVar("T")
LATEST = "latest"  # DeepSpeed's name
_ALONE = ("_save_checkpoint", "_save_zero_checkpoint")  # methods of the engine in which no rank waits for another
_ALONE_IN_WRITER = ("makedirs", "create", "commit")
_JOB = secrets.token_hex(4)  # the id of this process as a job; all ranks use the id of the first one


@dataclass(frozen=True)
class CheckpointPaths:
    """Name the paths of the checkpoint `tag` in `folder`: its own, during its save, and while another replaces it."""

    folder: Path
    tag: str
    job: str = ""  # the id of the job that saves; "" for those that only read

    @property
    def final(self) -> Path:
        return self.folder / self.tag

    @property
    def saving(self) -> Path:
        return self.final.with_name(f".{self.final.name}.{self.job}.saving")

    @property
    def replaced(self) -> Path:
        return self.final.with_name(f".{self.final.name}.replaced")

    def all_saving(self) -> list[Path]:
        """Return the folders of saves of this tag, running or killed: by steps, most first; incomplete ones last."""
        left = self.final.parent.glob(f".{glob.escape(self.final.name)}.{'[0-9a-f]' * 8}.saving")
        steps = {path: saved.global_steps if (saved := _readable(path)) else -1 for path in left}
        return sorted(steps, key=steps.__getitem__, reverse=True)

    def tag_of(self, path: Path) -> str:
        """Return the tag by which DeepSpeed finds `path`."""
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)

    def prepare(self) -> None:
        """Clean up after killed saves, and make the folder to save in.

        Raises:
            CheckpointError: the tag is a symbolic link, or names no folder of its own in `latest`.
        """
        is_taken = self.final in (self.folder, self.folder / LATEST) or self.final.is_file()
        if is_taken or ".." in Path(self.tag).parts or not self.tag.isprintable():
            raise CheckpointError(
                f"the tag {show_value(self.tag)} cannot name a folder of its own in {self.folder}: it must be "
                f"printable text, neither empty nor {LATEST!r} nor the name of a file there, and without '..'"
            )
        if self.final.is_symlink():  # a move would take the link, and leave the checkpoint behind it without a name
            raise CheckpointError(
                f"{self.final} is a symbolic link to {os.readlink(self.final)}, and the save would replace only the "
                "link: save with another tag, or remove the link"
            )
        self.settle()
        self.saving.mkdir(parents=True)

    def settle(self) -> None:
        """Finish killed saves of this tag, or remove their files."""
        if self.replaced.exists() and self.final.exists():
            self._drop_replaced()
        # A save that was killed after its list was written is whole: it only lacks its name
        for saving in reversed(self.all_saving()):
            saved = _readable(saving)
            if saved is not None and saved.problem(saving) is None:
                self.commit(saving)
            else:
                shutil.rmtree(saving)
        if self.replaced.exists():
            self.replaced.rename(self.final)

    def commit(self, saving: Path | None = None, is_latest: bool = False) -> None:
        """Give a whole checkpoint its name. A kill at any line leaves one whole checkpoint of this tag."""
        # Between these two moves the older one is set aside, and the new one is whole under its temporary name
        if self.final.exists():
            self.final.rename(self.replaced)
        (saving or self.saving).rename(self.final)
        sync(self.final.parent)
        if is_latest:
            write_text(self.folder / LATEST, self.tag, durable=True)
        if self.replaced.exists():
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        """Remove the older checkpoint, but keep the files that a user has put into it, unless they are states."""
        names = names_in(self.replaced, _readable(self.replaced))
        listed = {MANIFEST, *(Path(name).parts[0] for name in names)}
        for entry in self.replaced.iterdir():
            moved = self.final / entry.name
            if entry.name not in listed and not moved.exists():
                entry.rename(moved)
        shutil.rmtree(self.replaced)


def _readable(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except CheckpointError:
        return None


# -- the three steps, which all ranks take together --------------------------------------------------------------------


def save_checkpoint(
    engine: PipelineEngine,
    world: Any,
    save: Callable[[str, bool], T],
    save_dir: str,
    tag: str,
    save_latest: bool,
    training: Mapping[str, Any],
    allow_pickle: bool = False,
) -> T:
    """Let DeepSpeed save a checkpoint, and name it when it is whole. A collective over all ranks.

    Args:
        world: a group of all ranks on the CPU; None for a single rank.
        save: DeepSpeed's own `save_checkpoint`, as a function of `tag` and `save_latest`.
        training: for the manifest.
        allow_pickle: do not warn of files that a load reads only with this permission.

    Raises:
        CheckpointError: on every rank, if one of them cannot go on. An older checkpoint of the tag stays whole.
    """
    # DeepSpeed refuses a missing folder itself, and a decoupled writer writes the files later
    if not save_dir or engine.checkpoint_engine.is_decoupled():
        finish_decoupled(engine)
        return save(tag, save_latest)
    paths = prepare(engine, world, Path(save_dir), tag)
    saved, files = write(engine, world, paths, save)
    manifest = Manifest(
        tag=paths.tag,
        global_steps=int(engine.global_steps),
        is_latest=bool(save_latest),
        job=paths.job,
        training=dict(training),
        files={name: file.num_bytes for name, file in files.items()},
        checksums={name: file.checksum for name, file in files.items()},
    )
    publish(engine, world, paths, manifest)
    refusals = [file.refusal.replace(str(paths.saving), str(paths.final)) for file in files.values() if file.refusal]
    if refusals and not allow_pickle and engine.global_rank == 0:  # now, not when the checkpoint is needed
        logger.warning("a load will refuse %d of the files that were saved: %s", len(refusals), refusals[0])
    return saved


def finish_decoupled(engine: PipelineEngine) -> None:
    """Wait until a writer beside the training has the last save, and name it in `latest`. A collective over all ranks.

    Call it before parameters change. DeepSpeed's pipeline engine never does: its files have values of later steps.
    """
    if engine.checkpoint_engine.is_decoupled():
        engine._commit_decoupled_checkpoint()  # noqa: SLF001 - DeepSpeed has no other way


def prepare(engine: PipelineEngine, world: Any, folder: Path, tag: str) -> CheckpointPaths:
    """Agree on the folder to save in, make it, and check that every rank sees it."""
    if (problem := problem_of_local_storage(engine)) is not None:
        raise CheckpointError(problem)
    paths, leads = CheckpointPaths(folder, tag, job=gather(_JOB, world)[0]), engine.global_rank == 0
    _on_each_rank(world, paths.prepare if leads else None)
    with _removed_after_an_error(paths, world, leads):
        require_shared(paths.saving, world)
    return paths


def write(
    engine: PipelineEngine, world: Any, paths: CheckpointPaths, save: Callable[[str, bool], T]
) -> tuple[T, dict[str, Written]]:
    """Let DeepSpeed write the files of all ranks; return its result, and the files that this rank may publish."""
    # Keep an error of one rank until DeepSpeed's collectives are over: raised at once, it would leave others waiting
    writer = _Writer(engine.checkpoint_engine, paths.saving)
    with ExitStack() as stack:
        for name in _ALONE:
            stack.enter_context(replaced(engine, name, writer.keeping(getattr(engine, name))))
        stack.enter_context(replaced(engine, "checkpoint_engine", writer))
        saved = save(paths.tag_of(paths.saving), False)
    with _removed_after_an_error(paths, world, engine.global_rank == 0):
        files = {name: file for of_rank in _on_each_rank(world, writer.files) for name, file in (of_rank or {}).items()}
    return saved, files


def publish(engine: PipelineEngine, world: Any, paths: CheckpointPaths, manifest: Manifest) -> None:
    """Write the list of the files, which makes the checkpoint whole; then give it its name, and name it in `latest`."""

    def complete() -> None:
        problem = manifest.problem(paths.saving)
        if problem is not None:  # another job has begun to save this tag, and has tidied up
            raise CheckpointError(f"{problem} in {paths.saving}: does another job save under this tag?")
        manifest.write(paths.saving)

    leads = engine.global_rank == 0
    with _removed_after_an_error(paths, world, leads):
        _on_each_rank(world, complete if leads else None)
    # From here on the saved files stay even after an error: a load finds them under the other name
    _on_each_rank(world, partial(paths.commit, is_latest=manifest.is_latest) if leads else None)


@contextmanager
def _removed_after_an_error(paths: CheckpointPaths, world: Any, leads: bool) -> Iterator[None]:
    """Remove the saved files when a rank fails, to make room on a disk that may be full. All ranks leave together."""
    try:
        yield
    except CheckpointError:
        if leads:  # the others leave, too: an error here would hide theirs
            shutil.rmtree(paths.saving, ignore_errors=True)
        gather(None, world)
        raise


def _on_each_rank(world: Any, act: Callable[[], T] | None) -> list[T | None]:
    return on_each_rank(world, "save the checkpoint", act)


# -- the files of one rank ---------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """Describe a file that is on the disk."""

    num_bytes: int
    checksum: str
    refusal: str | None  # the reason why a load will not read it


def flush(path: Path) -> Written:
    """Wait until the disk has a file. At the same time a thread reads it, from memory, for its checksum."""
    with ThreadPoolExecutor(1) as thread:
        checksum = thread.submit(checksum_of, path)
        sync(path)
        return Written(path.stat().st_size, checksum.result(), refusal(path))


class FirstError:
    """Keep the first error of some calls until all ranks can learn of it."""

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
    """Replace DeepSpeed's writer of files during a save: wait for the disk, and remember the files in `folder`."""

    def __init__(self, writer: Any, folder: Path) -> None:
        super().__init__()
        self._writer, self._folder = writer, folder
        self._files: dict[str, Written] = {}
        self.save = self.keeping(self._save)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._writer, name)
        return self.keeping(value) if name in _ALONE_IN_WRITER else value

    def _save(self, state_dict: Any, path: str) -> Any:
        with suppress(RecursionError):  # of lists that hold themselves
            state_dict = without_numpy(state_dict)
        try:
            result = self._writer.save(state_dict=state_dict, path=path)
        except RuntimeError as error:
            if "inline_container" not in str(error):
                raise
            # torch's writer of files does not say what the system said, also where the disk is full
            free = f"{shutil.disk_usage(self._folder).free:,} bytes are free there"
            raise OSError(f"torch cannot write {path}, and {free}: make room, or save elsewhere ({error})") from error
        if Path(path).is_file():  # some writers leave a file to another rank
            self._files[str(Path(path).relative_to(self._folder))] = flush(Path(path))
        return result

    def files(self) -> dict[str, Written]:
        """Return the files that this rank has written, or raise the error that stopped it."""
        self.raise_first()
        return self._files
