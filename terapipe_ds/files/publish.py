"""Replace several files of a folder together, so that a kill or an error in any line loses neither the old nor the new.

Files are written in `.JOB.saving`, inside of the folder. When all are there it becomes `.JOB.publishing` in one move:
the new files are whole from then on, and whoever comes by can finish. The old files go to `.JOB.replacing`, which
becomes `.JOB.replaced`, then the new ones come. A reader that knows nothing of this sees the old files, the new ones,
or for that moment none that make a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from terapipe_ds.files.atomic import sync


class Publisher(NamedTuple):
    """Say which files belong together."""

    heads: Collection[str]  # names of those that make a whole of the others: the first to go and the last to come
    replaces: Callable[[str, Collection[str]], bool]  # whether a file goes where files of these names come

    def publish(self, saving: Path) -> None:
        """Put the files of `saving` in the places of the old ones, once the disk has them."""
        for path in (*saving.iterdir(), saving):
            sync(path)
        self._put_in_place(saving.rename(saving.with_suffix(".publishing")))

    def finish(self, folder: Path) -> None:
        """Finish what a process that was killed has begun to put in place."""
        for publishing in folder.glob(".*.publishing"):
            self._put_in_place(publishing)

    def _put_in_place(self, publishing: Path) -> None:
        folder, replacing, replaced = publishing.parent, *map(publishing.with_suffix, (".replacing", ".replaced"))
        if not replaced.exists():
            replacing.mkdir(exist_ok=True)
            names = {path.name for path in publishing.iterdir()}
            for path in sorted(folder.iterdir(), key=lambda path: path.name not in self.heads):
                if self.replaces(path.name, names):
                    path.replace(replacing / path.name)
            replacing.rename(replaced)
        for path in sorted(publishing.iterdir(), key=lambda path: path.name in self.heads):
            path.replace(folder / path.name)
        sync(folder)
        shutil.rmtree(replaced)
        publishing.rmdir()
