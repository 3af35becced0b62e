"""Replace several files of a folder together, so that a kill or an error in any line loses neither the old nor the new.

Files are written in `.JOB.saving`, inside of the folder. When all are there and flushed it becomes `.JOB.publishing` in
one move: from then on the new files are whole, and whoever comes by can finish. First the old files go to
`.JOB.replacing`, which becomes `.JOB.replaced`, then the new ones come; all by moves within one file system. A reader
that knows nothing of this sees the old files, the new ones, or for that moment none that make a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from terapipe_ds.files.atomic import sync


class Publisher(NamedTuple):
    """Say which files of a folder belong together.

    Args:
        heads: names of the files that make a whole of the others: they are the first to go and the last to come.
        replaces: tells of the name of a file in the folder whether new files of these names take its place. Where there
            are no new files, none goes.
    """

    heads: Collection[str]
    replaces: Callable[[str, Collection[str]], bool]

    def publish(self, saving: Path) -> None:
        """Put the files of `saving`, a folder that `folder_to_save_in` has named, in the place of the old ones."""
        for path in saving.iterdir():
            sync(path)
        sync(saving)
        self._put_in_place(saving.rename(saving.with_suffix(".publishing")))

    def finish(self, folder: Path) -> None:
        """Finish what a process that was killed has begun to put in place."""
        for publishing in folder.glob(".*.publishing"):
            self._put_in_place(publishing)

    def settle(self, folder: Path) -> None:
        """Do so, and remove what such processes have only begun to write."""
        self.finish(folder)
        for saving in folder.glob(".*.saving"):
            shutil.rmtree(saving)

    def _put_in_place(self, publishing: Path) -> None:
        folder, replacing, replaced = publishing.parent, *map(publishing.with_suffix, (".replacing", ".replaced"))
        if not replaced.exists():
            replacing.mkdir(exist_ok=True)
            names = {path.name for path in publishing.iterdir()}
            for path in sorted(folder.iterdir(), key=lambda path: path.name not in self.heads):
                if self.replaces(path.name, names):
                    _move(path, replacing)
            with suppress(FileNotFoundError):
                replacing.rename(replaced)
        for path in sorted(publishing.iterdir(), key=lambda path: path.name in self.heads):
            _move(path, folder)
        sync(folder)
        shutil.rmtree(replaced)
        publishing.rmdir()


def folder_to_save_in(folder: Path, job: str) -> Path:
    """Return where the process `job` writes what is to be published in `folder`."""
    return folder / f".{job}.saving"


def _move(path: Path, folder: Path) -> None:
    """Move a file, unless another process that finishes the same has done so."""
    with suppress(FileNotFoundError):
        path.replace(folder / path.name)
