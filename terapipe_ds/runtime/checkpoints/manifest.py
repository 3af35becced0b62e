"""List the files of a whole checkpoint, with a checksum of each: damage shows before anything is loaded.

The checksums detect damage (a flipped bit, a file of another step). They do not protect against attackers: whoever can
write the files can write the list.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import JsonError, parse_as
from terapipe_ds.messages import in_short

MANIFEST = "terapipe_complete.json"
OPTIMIZER_FILES = "optim_states.pt"  # the end of the names of files that only optimizers need
_STATES = re.compile(r"(layer_|.*mp_rank_|loss_fn).*(model|optim)_states\.pt")  # names of files
_LAST_KEY = ',\n "checksum": '  # of a list


class CheckpointError(ValueError):
    """Say that a checkpoint is not whole, or cannot be written or read."""


def checksum_of(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return f"xxh3:{hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"  # type: ignore[type-var]


def _checksum(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    json.dumps(values, allow_nan=False)
    return values


def _within(files: dict[str, int]) -> dict[str, int]:
    if any(not name.isprintable() or Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ValueError("a name leaves the folder")
    return files


class Manifest(BaseModel):
    """List the files of a checkpoint, and the settings of its training."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["terapipe_ds.checkpoint"] = "terapipe_ds.checkpoint"
    version: Literal[1] = 1
    tag: str
    global_steps: int
    is_latest: bool  # `latest` was to name it (`save_latest`)
    job: str = ""  # the id of the job that saved it
    training: Annotated[dict[str, Any], AfterValidator(_finite)] = Field(default_factory=dict)  # slices, layout, ...
    files: Annotated[dict[str, int], AfterValidator(_within)]  # their bytes
    checksums: dict[str, str] = Field(default_factory=dict)  # by file; {} in lists of older versions of this package
    checksum: str = ""  # of the file's bytes before it, so that later versions may add fields

    def write(self, folder: Path) -> None:
        text, key, _ = self.model_dump_json(indent=1).rpartition(_LAST_KEY)
        write_text(folder / MANIFEST, f'{text}{key}"{_checksum(text.encode())}"\n}}', durable=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the list of a folder; None: there is none, as in checkpoints of DeepSpeed's own engine.

        Raises:
            CheckpointError: the file is no such list.
            OSError: it cannot be read, or is too large.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        data = read_bytes(path)
        try:
            manifest: Manifest | None = parse_as(cls, data)
        except JsonError:
            manifest = None
        own = data.rpartition(_LAST_KEY.encode())[0]
        if manifest is None or (manifest.checksums and manifest.checksum != _checksum(own)):
            raise CheckpointError(
                f"{path} is no list of version 1 of a checkpoint's files, or is damaged. Where the checkpoint is known "
                "to be whole, delete that file; load another one otherwise"
            )
        return manifest

    def problem(self, folder: Path, with_optimizer: bool = True) -> str | None:
        """Say which files `folder` lacks, has with another size, or has beside its list; None: it has those to load."""
        problems = []
        for name in names_in(folder, self, with_optimizer):
            path, size = folder / name, self.files.get(name)
            if size is None:
                problems.append(f"{name} is not in its list")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != size:
                problems.append(f"{name} has {path.stat().st_size:,} bytes of {size:,}")
        return in_short(problems)

    def damage(self, folder: Path, name: str) -> str | None:
        """Say that a file differs from the saved one; None if it is equal, or if the list does not tell."""
        expected = self.checksums.get(name)
        if expected is None or checksum_of(folder / name) == expected:
            return None
        return f"{name} is damaged or of another checkpoint (its checksum is not {expected})"


def names_in(folder: Path, manifest: Manifest | None, with_optimizer: bool = True) -> list[str]:
    """Return the files to load: those in the list, and all that DeepSpeed or its converter writes and reads."""
    # other folders may hold checkpoints of their own
    paths = [*filter(lambda path: _STATES.fullmatch(path.name), folder.glob("*.pt")), *folder.glob("zero/**/*.pt")]
    names = {str(path.relative_to(folder)) for path in paths if not path.is_dir()}
    names |= set() if manifest is None else manifest.files.keys()
    return sorted(name for name in names if with_optimizer or not name.endswith(OPTIMIZER_FILES))
