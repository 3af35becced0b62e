"""The log of the package, shown where the program shows none."""

from __future__ import annotations

import logging


def first_line(error: Exception) -> str:
    """Return the class of the error and the first line of its text, for one line of the log."""
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])


def show_log(rank: int) -> None:
    """Print what the package logs: information on rank 0, warnings on every rank.

    The choice of the attention kernel and the slice plan belong in a run's output. A program that configures logging
    itself keeps its own handlers and levels.
    """
    logger = logging.getLogger("terapipe_ds")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[terapipe_ds rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
