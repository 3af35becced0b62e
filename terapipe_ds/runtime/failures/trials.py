"""Try out layers in which tensor-parallel ranks meet: all ranks learn of a failure, or the job ends.

Some runs of the layers may fail while the job goes on: timing layers one by one, checking them on slices. But a rank
that fails inside a layer leaves its peers in the layer's collective. So after each trial a rank writes the result to
the default store. If all ranks have finished or failed, all learn of the first failure and react alike. If some wait
for the rank that failed, that rank raises, and its watch-dog ends the others with the cause.
"""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from terapipe_ds.messages import text_of
from terapipe_ds.runtime.agreement import meet
from terapipe_ds.runtime.failures.watchdog import is_lost_connection

PATIENCE_S = 10.0  # at most: peers meet in the layers, so that none is far ahead of the others
_numbers: dict[tuple[int, ...], Any] = {}  # of the trials of these ranks in this process; peers make the same ones


class TrialError(ValueError):
    """Say that a trial failed on this rank, and that its peers are still in the layers."""


class TrialFailure(NamedTuple):
    """Describe the exception that a rank raised in a trial."""

    kind: str  # the class
    text: str
    rank: int | None = None  # the peer that raised it; None for this rank

    def __str__(self) -> str:
        return f"{'' if self.rank is None else f'rank {self.rank}: '}{self.kind}: {self.text}"


class Trials:
    """Make trials on this rank and its tensor-parallel peers, which make the same ones in the same order.

    Args:
        ranks: all of these peers, including this rank; no rank or one if there are no peers to wait for.
        stall_timeout_s: after this time a peer would report a stall. A rank that failed waits for half of it.
    """

    def __init__(self, ranks: Sequence[int] = (), rank: int = 0, stall_timeout_s: float = math.inf) -> None:
        self._ranks, self._rank = tuple(ranks), rank
        self._patience_s = min(PATIENCE_S, stall_timeout_s / 2)

    def failure(self, error: Exception | None, what: str, remedy: str = "") -> TrialFailure | None:
        """Return the failure of the trial that has just ended: on this rank, or else on the first peer. A collective.

        Args:
            error: the exception of this rank; None if the trial succeeded.
            what, remedy: the name of the trial, and the way to do without it, for the message of an error.

        Raises:
            TrialError: this rank failed, and a peer that waits for it in the layers does not come; or peers come from
                another trial.
            Exception: `error` itself if it says that a peer is gone.
        """
        if isinstance(error, TrialError):  # of a trial inside of this one
            raise error
        # A rank alone needs no peer; a lost peer cannot be reached
        own = None
        if error is not None:
            own = TrialFailure(type(error).__name__, text_of(error))
            # before torch 2.13 a failed checkpoint takes the tensors of later layers as long as its frame lives
            traceback.clear_frames(error.__traceback__)
        if len(self._ranks) < 2:
            return own
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            raise error
        if own is None:
            get_accelerator().synchronize()  # if this rank waits for a peer, the host may not know it

        # A rank that failed does not wait forever: its peers may be in the collective that it has left
        def late(waited_s: float, missing: Callable[[], list[int]]) -> None:
            if own is not None and waited_s > self._patience_s and (ranks := missing()):
                peers = f"peers, ranks {ranks}, have" if len(ranks) > 1 else f"peer, rank {ranks[0]}, has"
                raise TrialError(
                    f"{what} failed on rank {self._rank} ({own}); its tensor-parallel {peers} not come out of the "
                    f"layers in {self._patience_s:g} s after that, where each waits for all. Fix what fails on rank "
                    f"{self._rank}{f', or {remedy}' if remedy else ''}"
                ) from error

        # All peers put the same number on the same trial
        name = f"trials/{self._ranks}/{next(_numbers.setdefault(self._ranks, itertools.count(1)))}"
        texts = meet(name, self._ranks, self._rank, json.dumps([own, what]), late)
        results = {rank: json.loads(text) for rank, text in texts.items()}  # the failure (or None) and its trial
        # A peer at another trial would wait for this rank in its layers
        others = [
            f"{at}, on rank {r} ({failed or 'came through'})" for r, (failed, at) in results.items() if at != what
        ]
        if others:  # what failed there was no trial, or the next one here: the ranks would wait for each other
            raise TrialError(
                f"{what} ended on rank {self._rank} ({own or 'it came through'}), but its tensor-parallel peers are at "
                + "; ".join(others)
            ) from error
        failures = (TrialFailure(failed[0], failed[1], r) for r, (failed, _) in results.items() if failed is not None)
        return own or next(failures, None)
