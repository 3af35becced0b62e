"""Save a checkpoint so that a kill at any point leaves the one before, or this one, whole.

DeepSpeed (0.19.8) writes over an older checkpoint of the same tag, and rank 0 writes `latest` before the others have
their files: a kill leaves a half that looks whole. So DeepSpeed saves under another name here, and the checkpoint gets
its own name when every rank is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.files.atomic import sync, write_text
from terapipe_ds.runtime.agreement import gather, gather_results
from terapipe_ds.runtime.checkpoints.manifest import LATEST, CheckpointError, CheckpointPaths, Manifest

T = TypeVar("T")


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
    if not save_dir or engine.checkpoint_engine.is_decoupled():  # DeepSpeed's error; files that come later
        return save(tag, save_latest)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    paths, leads = CheckpointPaths(Path(save_dir), tag), names_files(engine)
    tags = sorted(set(gather(tag, world)))
    if len(tags) > 1:
        raise CheckpointError(f"the ranks save under different tags, {', '.join(map(repr, tags))}; give all the same")
    _on_each_rank(world, (lambda: _prepare(paths)) if leads else None)
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
        if leads:  # room on a disk that may be full
            shutil.rmtree(paths.saving, ignore_errors=True)
        raise
    _on_each_rank(world, (lambda: _publish(paths, save_latest)) if leads else None)
    return saved


def names_files(engine: PipelineEngine) -> bool:
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


def _prepare(paths: CheckpointPaths) -> None:
    paths.settle()
    paths.saving.mkdir(parents=True)  # here, where all ranks learn of an error


def _publish(paths: CheckpointPaths, is_latest: bool) -> None:
    paths.commit()
    if is_latest:
        write_text(paths.folder / LATEST, paths.tag, durable=True)


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
