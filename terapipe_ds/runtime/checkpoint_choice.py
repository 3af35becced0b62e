"""Which checkpoint of a folder to load: never one that a kill has left half-written, never another one in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from terapipe_ds.runtime.checkpoint_manifest import LATEST, MANIFEST, CheckpointError, Manifest, Place


@dataclass(frozen=True)
class Found:
    """A checkpoint to load.

    Args:
        tag: as it was saved; None: there is none, which is for DeepSpeed to say.
        read_as: the tag by which DeepSpeed finds its files: another one where a kill came before they were named.
        manifest: None for checkpoints of DeepSpeed's own engine.
        note: what is unexpected about the choice.
    """

    tag: str | None
    read_as: str | None
    manifest: Manifest | None = None
    note: str | None = None


def choose_checkpoint(folder: Path, tag: str | None, with_optimizer: bool = True) -> Found:
    """The checkpoint ``tag``, or the one that ``latest`` names, or the newest whole one where that is not whole.

    ``latest`` is believed where it names an older one: that is how people go back. Nothing changes in ``folder``.

    Raises:
        CheckpointError: what is asked for is not whole, with the files that are missing; or nothing is.
    """
    if tag is not None:
        return _named(Place(folder, tag), with_optimizer)
    latest = folder / LATEST
    if not latest.is_file():
        newest = _newest(folder)
        if newest is None:
            return Found(None, None)
        return _instead(newest, f"{latest} is missing")
    named = latest.read_text(encoding="utf-8").strip()
    try:
        if not named:
            raise CheckpointError(f"{latest} is empty")
        found = _named(Place(folder, named), with_optimizer)
        if not Place(folder, found.read_as or "").final.exists():
            raise CheckpointError(f"{latest} names {named}, which does not exist")
        return found
    except CheckpointError as error:
        newest = _newest(folder)
        if newest is None:
            raise CheckpointError(f"{error}. There is no other whole checkpoint of this engine in {folder}") from None
        return _instead(newest, str(error))


def _instead(newest: Found, reason: str) -> Found:
    note = f"{reason}: {newest.tag} is loaded, the newest whole checkpoint there"
    return Found(newest.tag, newest.read_as, newest.manifest, note)


def _named(place: Place, with_optimizer: bool) -> Found:
    """The checkpoint of a tag, or of what a save of it has left.

    Raises:
        CheckpointError: it is not whole.
    """
    if place.final.exists():
        manifest = Manifest.read(place.final)
        problem = None if manifest is None else manifest.problem(place.final, with_optimizer)
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint {place.final} is not whole: {problem}. Name a whole one; where another program "
                f"has saved it again since, delete its {MANIFEST}"
            )
        return Found(place.tag, place.tag, manifest)
    for path in (place.saving, place.replaced):
        manifest = Manifest.read(path)
        if manifest is not None and manifest.problem(path, with_optimizer) is None:
            note = f"a save of {place.final} was killed before it had its name: what is loaded is in {path}"
            return Found(place.tag, place.tag_of(path), manifest, note)
    if place.replaced.exists() and Manifest.read(place.replaced) is None:  # of DeepSpeed's own engine
        note = f"a save over {place.final} was killed: what was there before is loaded, from {place.replaced}"
        return Found(place.tag, place.tag_of(place.replaced), None, note)
    if place.saving.exists():
        raise CheckpointError(f"the save of {place.final} was killed before all files were written; load another one")
    return Found(place.tag, place.tag)


def _newest(folder: Path) -> Found | None:
    """The whole checkpoint with most steps, of those that ``latest`` was to name."""
    found = [
        ((manifest.global_steps, not path.name.startswith("."), (path / MANIFEST).stat().st_mtime), path, manifest)
        for path, manifest in _manifests(folder)
        if manifest.is_latest and manifest.problem(path) is None
    ]  # fmt: skip
    if not found:
        return None
    _, path, manifest = max(found, key=lambda each: each[0])
    return Found(manifest.tag, path.name, manifest)


def _manifests(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            manifest = Manifest.read(path)
        except CheckpointError:
            continue
        if manifest is not None:
            yield path, manifest
