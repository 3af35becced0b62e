"""Show the log of the package if the program shows none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from terapipe_ds.messages import logger, show_key, text_of


def first_line(error: BaseException) -> str:
    """Return the class of the error and the first line of its text, as a terminal may show it."""
    line = "".join(text_of(error).strip().splitlines()[:1])[:300]
    return f"{type(error).__name__}: {show_key(line, 300)}"


class Diagnostic:
    """Let code that only observes a training fail without ending it: the first failure is a warning.

    Args:
        place: names the key of the config, and the folder or file to write.
    """

    def __init__(self, place: str) -> None:
        self._place, self._is_told = place, False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the block; an error ends only the block."""
        try:
            yield
        except Exception as error:
            if not self._is_told:
                remedy = "give a folder that this rank may write and that has room, or leave the key out"
                logger.warning("%s: %s. The training goes on without; %s", self._place, first_line(error), remedy)
            self._is_told = True


def show_log(rank: int) -> None:
    """Print the log of the package: information on rank 0, warnings on every rank.

    The choice of the attention kernel and the slice plan belong in a run's output. A program that configures logging
    itself keeps its own handlers and levels.
    """
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[terapipe_ds rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
