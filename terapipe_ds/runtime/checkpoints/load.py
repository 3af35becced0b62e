"""Find the checkpoint to load and read its files: never an incomplete one, never another one without a note."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.agreement import gather_results
from terapipe_ds.runtime.checkpoints.save import LATEST, MANIFEST, CheckpointError, CheckpointPaths, Manifest, is_leader

logger = logging.getLogger("terapipe_ds")

_ANOTHER = "Load another checkpoint, by its tag"


@dataclass(frozen=True)
class ChosenCheckpoint:
    """Name a checkpoint to load."""

    tag: str | None  # as it was saved; None: there is none, which DeepSpeed says
    read_as: str | None  # the tag by which DeepSpeed finds its files; another one if a kill came before they were named
    manifest: Manifest | None = None  # None for checkpoints of DeepSpeed's own engine, and of its converter
    note: str | None = None  # what is unexpected about the choice


def find_checkpoint(
    engine: PipelineEngine, world: Any, load_dir: str, tag: str | None, with_optimizer: bool
) -> ChosenCheckpoint:
    """Choose a checkpoint on the ranks that name files, and take the choice of this node. A collective over all ranks.

    Raises:
        CheckpointError: on every rank: the checkpoint that is asked for is not whole, with the files that are missing.
    """
    folder, tag = Path(load_dir), None if tag is None else str(tag)

    def choose() -> ChosenCheckpoint:
        try:
            if engine.load_universal_checkpoint():
                return _universal(folder, tag)
            return choose_checkpoint(folder, tag, with_optimizer)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error

    choices = gather_results(choose if is_leader(engine) else None, world)
    tags = {choice.tag for choice in choices if choice is not None}
    if len(tags) > 1:
        raise CheckpointError(
            f"the last whole checkpoint in {folder} is not the same on every node: {', '.join(map(str, tags))}; name "
            "one that all have, as load_checkpoint's tag"
        )
    chosen = [choice for choice in choices[: engine.global_rank + 1] if choice is not None][-1]
    if chosen.note is not None and engine.global_rank == 0:
        logger.warning("%s", chosen.note)
    return chosen


def _universal(folder: Path, tag: str | None) -> ChosenCheckpoint:
    latest = folder / "latest_universal"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    return ChosenCheckpoint(tag, tag)


def choose_checkpoint(folder: Path, tag: str | None, with_optimizer: bool = True) -> ChosenCheckpoint:
    """Choose the checkpoint `tag`, or the one that `latest` names, or the newest whole one if that one is not whole.

    `latest` is believed if it names an older one: that is how people go back. Nothing changes in `folder`.

    Raises:
        CheckpointError: the checkpoint that is asked for is not whole, with the files that are missing; or none is.
    """
    if tag is not None:
        return _named(CheckpointPaths(folder, tag), with_optimizer)
    latest = folder / LATEST
    try:
        if not latest.is_file():
            raise CheckpointError(f"{latest} is missing")
        name = latest.read_text(encoding="utf-8").strip()
        if not name:
            raise CheckpointError(f"{latest} is empty")
        chosen = _named(CheckpointPaths(folder, name), with_optimizer)
        if not (folder / (chosen.read_as or "")).exists():
            raise CheckpointError(f"{latest} names {name}, which does not exist")
        return chosen
    except CheckpointError as error:
        newest = _newest(folder)
        if newest is not None:
            return replace(newest, note=f"{error}: {newest.tag} is loaded, the newest whole checkpoint there")
        if not latest.is_file():
            return ChosenCheckpoint(None, None)
        raise CheckpointError(f"{error}. There is no other whole checkpoint of this engine in {folder}") from None


def _named(paths: CheckpointPaths, with_optimizer: bool) -> ChosenCheckpoint:
    """Choose the checkpoint of a tag, or what a save that was killed has left of it; refuse one that is not whole."""
    if paths.final.exists():
        manifest = Manifest.read(paths.final)
        problem = None if manifest is None else manifest.problem(paths.final, with_optimizer)
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint {paths.final} is not whole: {problem}. Name a whole one; where another program "
                f"has saved it again since, delete its {MANIFEST}"
            )
        return ChosenCheckpoint(paths.tag, paths.tag, manifest)
    for path in (paths.saving, paths.replaced):
        manifest = Manifest.read(path)
        if manifest is not None and manifest.problem(path, with_optimizer) is None:
            note = f"a save of {paths.final} was killed before it had its name: what is loaded is in {path}"
            return ChosenCheckpoint(paths.tag, paths.tag_of(path), manifest, note)
    if paths.replaced.exists() and Manifest.read(paths.replaced) is None:  # of DeepSpeed's own engine
        note = f"a save over {paths.final} was killed: what was there before is loaded, from {paths.replaced}"
        return ChosenCheckpoint(paths.tag, paths.tag_of(paths.replaced), None, note)
    if paths.saving.exists():
        raise CheckpointError(f"the save of {paths.final} was killed before all files were written; load another one")
    return ChosenCheckpoint(paths.tag, paths.tag)


def _newest(folder: Path) -> ChosenCheckpoint | None:
    whole = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            manifest = Manifest.read(path)
            if manifest is not None and manifest.is_latest and manifest.problem(path) is None:
                age = (manifest.global_steps, not path.name.startswith("."), (path / MANIFEST).stat().st_mtime)
                whole.append((age, ChosenCheckpoint(manifest.tag, path.name, manifest)))
    return max(whole, key=lambda each: each[0])[1] if whole else None


def read_states(engine: PipelineEngine, path: Path) -> Mapping[str, Any]:
    """Read the states of a rank.

    Raises:
        CheckpointError: the file cannot be read; unpickling raises errors of any kind, without the file's name.
    """
    try:
        try:
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except RuntimeError:  # of a writer whose files cannot be mapped
            states = engine.checkpoint_engine.load(str(path), map_location=torch.device("cpu"))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}). {_ANOTHER}") from error
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not the states of a rank. {_ANOTHER}")
    return states
