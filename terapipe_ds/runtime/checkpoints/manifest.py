"""Tell whether a checkpoint is whole: by a list of its files, which is written after the last of them.

A checkpoint is saved in `.TAG.saving` and gets its own name in one move, when every rank has written and the list is
there. An older checkpoint of that tag is moved to `.TAG.replaced` for that moment, so that there is always a whole one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from terapipe_ds.files.atomic import sync, write_text

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
