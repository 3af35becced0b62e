"""When a checkpoint is whole: a list of its files, written after the last of them, and names for what is under way.

A checkpoint is saved in ``.TAG.saving`` and gets its own name in one move, when every rank has written and the list is
there. A tag that is saved again is moved to ``.TAG.replaced`` for that moment, so that there is always a whole one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terapipe_ds.files import sync, write_text
from terapipe_ds.json_text import parse_json

MANIFEST = "terapipe_complete.json"
LATEST = "latest"  # DeepSpeed's name
_FORMAT, _VERSION = "terapipe_ds.checkpoint", 1
_OPTIMIZER_FILES = "optim_states.pt"  # how the names of files end that only optimizers need
_SHOWN = 4  # files in a message


class CheckpointError(ValueError):
    """A checkpoint that is not whole, or cannot be written."""


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint consists of, and what it was trained with.

    Args:
        files: name -> bytes. Sizes are enough: no file has its name before it is whole, and no folder before its files.
        is_latest: whether ``latest`` was to name it (``save_latest``).
        training: slices, schedule and profile of the run, as ``Plans.described`` gives them.
    """

    tag: str
    global_steps: int
    is_latest: bool
    files: Mapping[str, int]
    training: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        document = {
            "format": _FORMAT, "version": _VERSION, "tag": self.tag, "global_steps": self.global_steps,
            "is_latest": self.is_latest, "training": dict(self.training), "files": dict(self.files),
        }  # fmt: skip
        write_text(folder / MANIFEST, json.dumps(document, indent=1), durable=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None where there is none: DeepSpeed's own engine has written the checkpoint, if it is one.

        Raises:
            CheckpointError: what is there is no manifest.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            document = parse_json(path.read_bytes())
            known = document["format"] == _FORMAT and document["version"] == _VERSION
            files = {str(name): int(size) for name, size in document["files"].items()}
            training = document["training"]
            if known and isinstance(training, dict):
                tag, steps, is_latest = (document[name] for name in ("tag", "global_steps", "is_latest"))
                return cls(str(tag), int(steps), bool(is_latest), files, training)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise CheckpointError(
            f"{path} is no list of version {_VERSION} of a checkpoint's files. Where the checkpoint is known to be "
            "whole, delete that file; load another one otherwise"
        )

    def problem(self, folder: Path, with_optimizer: bool = True) -> str | None:
        """What is missing in ``folder`` or has another size; None where all is there that is to be loaded."""
        found = []
        for name, size in sorted(self.files.items()):
            if name.endswith(_OPTIMIZER_FILES) and not with_optimizer:
                continue
            path = folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != size:
                found.append(f"{name} has {path.stat().st_size:,} bytes of {size:,}")
        if not found:
            return None
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return ", ".join(found[:_SHOWN]) + more


@dataclass(frozen=True)
class Place:
    """Where the checkpoint ``tag`` is, in ``folder``, whole or under way."""

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
        """The tag by which DeepSpeed finds ``path``."""
        return str(path.relative_to(self.folder))

    def settle(self) -> None:
        """Finish what a save that was killed has left of this tag, or remove it."""
        if self.replaced.exists() and self.final.exists():
            self._drop_replaced()
        if is_whole(self.saving):
            self.commit()
        _remove(self.saving)
        if self.replaced.exists():
            self.replaced.rename(self.final)

    def commit(self) -> None:
        """Give what was saved its name. Killed in any line, one whole checkpoint of this tag is there."""
        if self.final.exists():
            self.final.rename(self.replaced)
        self.saving.rename(self.final)
        sync(self.final.parent)
        if self.replaced.exists():
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        """Remove the checkpoint that this one has replaced; what a user has put beside its files moves over."""
        try:
            old = Manifest.read(self.replaced)
        except CheckpointError:
            old = None
        of_checkpoint = {MANIFEST, *(() if old is None else old.files)}
        for entry in self.replaced.iterdir():
            moved = self.final / entry.name
            if entry.name not in of_checkpoint and not moved.exists():
                entry.rename(moved)
        _remove(self.replaced)


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` has a manifest and all that it lists."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    return manifest is not None and manifest.problem(folder) is None


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
