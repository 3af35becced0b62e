"""Save a checkpoint so that a kill at any point leaves the one before, or this one, whole.

DeepSpeed (0.19.8) writes under the final name, over an older checkpoint of the same tag, and rank 0 writes ``latest``
as soon as its own files are there, before the others have theirs: a kill leaves a half that nothing tells from a whole.
So DeepSpeed saves under another name here, and what it saved is named when every rank is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.files import sync, write_text
from terapipe_ds.runtime.checkpoint_manifest import LATEST, CheckpointError, Manifest, Place


def save_checkpoint(
    engine: Any,
    save: Callable[..., Any],
    save_dir: str,
    tag: str | None,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
    training: Mapping[str, Any],
) -> Any:
    """A collective over all ranks.

    Args:
        save: DeepSpeed's own ``save_checkpoint``, whose arguments these are.
        training: for the manifest.

    Raises:
        CheckpointError: on every rank, where one of them cannot go on. What was whole before is whole still.
    """
    if not save_dir or engine.checkpoint_engine.is_decoupled():  # DeepSpeed's error; files that come later
        return save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    place, leads = Place(Path(save_dir), tag), leads_its_files(engine)
    _require_one_tag(tag)
    _on_every_rank((lambda: _prepare(place)) if leads else None)
    with _recorded(engine.checkpoint_engine, place.saving) as mine:
        saved = save(save_dir, place.tag_of(place.saving), client_state, False, exclude_frozen_parameters)
    try:
        _on_every_rank(mine.raise_failure)
        sizes = {name: size for each in gathered(mine.sizes) for name, size in each.items()}
        if engine.use_node_local_storage():
            sizes = {name: size for name, size in sizes.items() if (place.saving / name).is_file()}
        manifest = Manifest(tag, int(engine.global_steps), bool(save_latest), sizes, training)
        _on_every_rank((lambda: manifest.write(place.saving)) if leads else None)
    except CheckpointError:
        if leads:  # room on a disk that may be full
            shutil.rmtree(place.saving, ignore_errors=True)
        raise
    _on_every_rank((lambda: _publish(place, save_latest)) if leads else None)
    return saved


def leads_its_files(engine: Any) -> bool:
    """Whether this rank is the one that names files: the first of all, or of its node where each has its own disk."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return int(rank) == 0


def gathered(mine: Any) -> list[Any]:
    """One object of each rank. A collective over all ranks."""
    if torch_dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, mine)
    return everyone


def _prepare(place: Place) -> None:
    place.settle()
    place.saving.mkdir(parents=True)  # here, where all ranks learn of an error


def _publish(place: Place, is_latest: bool) -> None:
    place.commit()
    if is_latest:
        write_text(place.folder / LATEST, place.tag, durable=True)


def _require_one_tag(tag: str) -> None:
    tags = sorted(set(gathered(tag)))
    if len(tags) > 1:
        raise CheckpointError(f"the ranks save under different tags, {', '.join(map(repr, tags))}; give all the same")


def _on_every_rank(act: Callable[[], None] | None) -> None:
    """Do what this rank has to do; an error is raised on every rank, so that nobody is left waiting."""
    failure: Exception | None = None
    try:
        if act is not None:
            act()
    except Exception as error:
        failure = error
    for rank, text in enumerate(gathered(None if failure is None else f"{type(failure).__name__}: {failure}")):
        if text is not None:
            raise CheckpointError(f"rank {rank} cannot save the checkpoint: {text}") from failure


@dataclass
class _Recorded:
    """What DeepSpeed's writer has done on this rank: name -> bytes of the files, and what stopped it."""

    sizes: dict[str, int] = field(default_factory=dict)
    failure: Exception | None = None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


@contextmanager
def _recorded(writer: Any, folder: Path) -> Iterator[_Recorded]:
    """The files that DeepSpeed's ``writer`` saves in ``folder``, all of them on the disk.

    A failure is kept and ends this rank's writing: raised at once, it would leave the others in DeepSpeed's barrier.
    """
    recorded, save = _Recorded(), writer.save

    def save_and_note(state_dict: Any, path: str) -> Any:
        if recorded.failure is not None:
            return None
        try:
            result = save(state_dict=state_dict, path=path)
            if Path(path).is_file():  # some writers leave a file to another rank
                sync(path)
                recorded.sizes[str(Path(path).relative_to(folder))] = Path(path).stat().st_size
            return result
        except Exception as error:
            recorded.failure = error
            return None

    before = dict(vars(writer))
    writer.save = save_and_note
    try:
        yield recorded
    finally:
        del writer.save
        if "save" in before:
            writer.save = before["save"]
