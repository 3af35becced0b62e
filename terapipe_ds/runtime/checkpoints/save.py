"""Save a checkpoint so that a kill at any point leaves the earlier one or this one whole.

DeepSpeed (0.19.8) writes over an older checkpoint of the same tag, and rank 0 writes `latest` before the others have
their files: a kill leaves a half that looks whole. So DeepSpeed saves in `.TAG.saving` here. The checkpoint gets its
own name in one move, when every rank has written and a list of its files is there. An older checkpoint of that tag is
moved to `.TAG.replaced` for that moment, so that there is always a whole one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from terapipe_ds.files.atomic import sync, write_text
from terapipe_ds.runtime.agreement import gather, gather_results

T = TypeVar("T")
MANIFEST = "terapipe_complete.json"
LATEST = "latest"  # DeepSpeed's name
_OPTIMIZER_FILES = "optim_states.pt"  # how the names of files end that only optimizers need
_SHOWN = 4  # files in a message


class CheckpointError(ValueError):
    """Say that a checkpoint is not whole, or cannot be written or read."""


class Manifest(BaseModel):
    """List what a whole checkpoint consists of, and what it was trained with."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: Literal["terapipe_ds.checkpoint"] = "terapipe_ds.checkpoint"
    version: Literal[1] = 1
    tag: str
    global_steps: int
    is_latest: bool  # `latest` was to name it (`save_latest`)
    training: dict[str, Any] = Field(default_factory=dict)  # slices, schedule, profile and layout of the run
    files: dict[str, int]  # bytes, which are enough: no file has its name before it is whole

    def write(self, folder: Path) -> None:
        write_text(folder / MANIFEST, self.model_dump_json(indent=1), durable=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the list of a folder; None: there is none, as in checkpoints of DeepSpeed's own engine.

        Raises:
            CheckpointError: the file is no such list.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError:
            raise CheckpointError(
                f"{path} is no list of version 1 of a checkpoint's files. Where the checkpoint is known to be whole, "
                "delete that file; load another one otherwise"
            ) from None

    def problem(self, folder: Path, with_optimizer: bool = True) -> str | None:
        """Say which files `folder` lacks or has with another size; None: it has all that are to be loaded."""
        problems = []
        for name, size in sorted(self.files.items()):
            path = folder / name
            if not with_optimizer and name.endswith(_OPTIMIZER_FILES):
                continue
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != size:
                problems.append(f"{name} has {path.stat().st_size:,} bytes of {size:,}")
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        return ", ".join(problems[:_SHOWN]) + more if problems else None


@dataclass(frozen=True)
class CheckpointPaths:
    """Say where the checkpoint `tag` is in `folder`: under its name, while it is saved, while another replaces it."""

    folder: Path
    tag: str

    @property
    def final(self) -> Path:
        return self.folder / self.tag

    @property
    def saving(self) -> Path:
        return self.final.with_name(f".{self.final.name}.saving")

    @property
    def replaced(self) -> Path:
        return self.final.with_name(f".{self.final.name}.replaced")

    def tag_of(self, path: Path) -> str:
        """Return the tag by which DeepSpeed finds `path`."""
        return str(path.relative_to(self.folder))

    def settle(self) -> None:
        """Finish what a save that was killed has left of this tag, or remove it."""
        if self.replaced.exists() and self.final.exists():
            self._drop_replaced()
        saved = _readable(self.saving)
        if saved is not None and saved.problem(self.saving) is None:
            self.commit()
        _remove(self.saving)
        if self.replaced.exists():
            self.replaced.rename(self.final)

    def commit(self) -> None:
        """Give what was saved its name. A kill in any line leaves one whole checkpoint of this tag."""
        if self.final.exists():
            self.final.rename(self.replaced)
        self.saving.rename(self.final)
        sync(self.final.parent)
        if self.replaced.exists():
            self._drop_replaced()

    def prepare(self) -> None:
        """Make the folder to save in: here, where all ranks learn of an error."""
        self.settle()
        self.saving.mkdir(parents=True)

    def publish(self, is_latest: bool) -> None:
        """Give what was saved its name, and name it in `latest`."""
        self.commit()
        if is_latest:
            self.write_latest()

    def write_latest(self) -> None:
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
) -> T:
    """Let DeepSpeed save a checkpoint, and name it when it is whole. A collective over all ranks.

    Args:
        world: a group of all ranks on the CPU; None for a single rank.
        save: DeepSpeed's own `save_checkpoint`, as a function of `tag` and `save_latest`.
        training: for the manifest.

    Raises:
        CheckpointError: on every rank, where one of them cannot go on. What was whole before is whole still.
    """
    if not save_dir or engine.checkpoint_engine.is_decoupled():  # DeepSpeed raises; or files are written later
        return save(tag, save_latest)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    paths, leads = CheckpointPaths(Path(save_dir), tag), is_leader(engine)
    tags = sorted(set(gather(tag, world)))
    if len(tags) > 1:
        raise CheckpointError(f"the ranks save under different tags, {', '.join(map(repr, tags))}; give all the same")
    _on_each_rank(world, paths.prepare if leads else None)
    writer = _Writer(engine.checkpoint_engine.save, paths.saving)
    with replaced(engine.checkpoint_engine, "save", writer.save):
        saved = save(paths.tag_of(paths.saving), False)
    try:
        sizes = {name: size for files in _on_each_rank(world, writer.files) for name, size in (files or {}).items()}
        if engine.use_node_local_storage():
            sizes = {name: size for name, size in sizes.items() if (paths.saving / name).is_file()}
        manifest = Manifest(
            tag=tag,
            global_steps=int(engine.global_steps),
            is_latest=bool(save_latest),
            training=dict(training),
            files=sizes,
        )
        _on_each_rank(world, (lambda: manifest.write(paths.saving)) if leads else None)
    except CheckpointError:
        if leads:  # to make room on a disk that may be full
            shutil.rmtree(paths.saving, ignore_errors=True)
        raise
    _on_each_rank(world, (lambda: paths.publish(save_latest)) if leads else None)
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
    """Return what `act` gives on each rank; an error of one rank is a CheckpointError on all of them."""

    def attempt() -> T | None:
        try:
            return None if act is None else act()
        except Exception as error:
            rank, kind = torch_dist.get_rank(), type(error).__name__
            raise CheckpointError(f"rank {rank} cannot save the checkpoint: {kind}: {error}") from error

    return gather_results(attempt, world)


class _Writer:
    """Write as DeepSpeed's writer of files does, wait for the disk, and remember what is written in `folder`.

    The first failure ends this rank's writing and is kept: raised at once, it would leave the other ranks in
    DeepSpeed's barrier.
    """

    def __init__(self, save: Callable[..., Any], folder: Path) -> None:
        self._save, self._folder = save, folder
        self._sizes: dict[str, int] = {}
        self._failure: Exception | None = None

    def save(self, state_dict: Any, path: str) -> Any:
        if self._failure is not None:
            return None
        try:
            result = self._save(state_dict=state_dict, path=path)
            if Path(path).is_file():  # some writers leave a file to another rank
                sync(path)
                self._sizes[str(Path(path).relative_to(self._folder))] = Path(path).stat().st_size
            return result
        except Exception as error:
            self._failure = error
            return None

    def files(self) -> dict[str, int]:
        """Return the bytes of each file, or raise what stopped this rank."""
        if self._failure is not None:
            raise self._failure
        return self._sizes
