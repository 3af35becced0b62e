"""Layers tried out where tensor-parallel ranks meet inside of them: all hear of a failure, or the job ends.

Some runs of the layers may fail and the job goes on: timing layers one by one, looking for the cause of a difference.
But a rank that fails inside a layer leaves its peers in the layer's collective, which nobody can interrupt. So after
each such trial a rank says in the store of the default group how it went. Where all have come through or failed, all
know of the first failure and do the same; where some do not come because they wait for the rank that failed, that rank
raises, and its watch-dog ends the others with the cause.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator

from terapipe_ds.runtime.watchdog import is_lost_connection

PATIENCE_S = 10.0  # at most: peers meet in the layers, so that none is far ahead of the others
_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
_numbers: dict[tuple[int, ...], Any] = {}  # of the trials of these ranks in this process; peers make the same ones


class TrialError(ValueError):
    """A trial failed on this rank, and its peers are still in the layers."""


class Failure(NamedTuple):
    """What a rank raised in a trial."""

    kind: str  # the class
    text: str
    rank: int | None = None  # a peer that raised it; None: this rank

    def __str__(self) -> str:
        return f"{'' if self.rank is None else f'rank {self.rank}: '}{self.kind}: {self.text}"


class Trials:
    """The trials of this rank and its tensor-parallel peers, which have to make the same ones in the same order.

    Args:
        ranks: all of these peers, this one among them; none or one: there is nobody to wait for.
        patience_s: how long a rank that failed waits for the others.
        store: where they tell one another; None: the store of the default group.
    """

    def __init__(
        self, ranks: Sequence[int] = (), rank: int = 0, patience_s: float = PATIENCE_S, store: Any | None = None
    ) -> None:
        self._ranks, self._rank, self._patience_s = tuple(ranks), rank, patience_s
        self._store = store

    @classmethod
    def of(cls, engine: Any) -> Trials:
        """Those of the ranks that hold parts of the same layers as this one."""
        peers = engine._groups.peers
        patience_s = min(PATIENCE_S, engine.terapipe_config.stall_timeout_s / 2)  # or they would report a stall
        return cls(() if peers is None else peers.ranks, engine.global_rank, patience_s)

    def failure(self, error: Exception | None, what: str, remedy: str = "") -> Failure | None:
        """What failed in the trial that has just ended: on this rank, or else on the first peer that failed; None where
        nothing did.

        A collective over the peers.

        Args:
            error: of this rank; None where the trial came through.
            what, remedy: which trial that was, and how to do without it, for the message of an error.

        Raises:
            TrialError: this rank failed, and a peer that waits for it in the layers does not come; or peers come from
                another trial.
            Exception: ``error`` itself where it says that a peer is gone.
        """
        if isinstance(error, TrialError):  # of a trial inside of this one
            raise error
        own = None if error is None else Failure(type(error).__name__, str(error))
        if len(self._ranks) < 2:
            return own
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            raise error
        if own is None and not get_accelerator().is_synchronized_device():
            get_accelerator().synchronize()  # where this rank waits for a peer, the host may not know of it
        told = self._told(own, error, what, remedy)
        return own or next((failure for failure in told if failure is not None), None)

    def _told(
        self, own: Failure | None, error: Exception | None, what: str, remedy: str
    ) -> list[Failure | None]:
        """What each rank has said of this trial, in their order."""
        store = self._store or torch_dist.distributed_c10d._get_default_store()
        number = next(_numbers.setdefault(self._ranks, itertools.count(1)))
        keys = {rank: f"terapipe_ds/trials/{self._ranks}/{number}/{rank}" for rank in self._ranks}
        store.set(keys[self._rank], json.dumps([own, what]))
        begin_s, look_s = time.monotonic(), _LOOK_S
        while not store.check(list(keys.values())):
            if own is not None and time.monotonic() - begin_s > self._patience_s:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                if missing:
                    raise TrialError(self._alone(own, missing, what, remedy)) from error
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        said = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
        elsewhere = {rank: other for rank, (_, other) in said.items() if other != what}
        if elsewhere:  # what failed there was no trial, or the next one here: the ranks would wait for each other
            raise TrialError(
                f"{what} ended on rank {self._rank} ({own or 'it came through'}), but its tensor-parallel peers are "
                + "; ".join(f"at {other}, on rank {rank} ({said[rank][0] or 'came through'})"
                            for rank, other in elsewhere.items())
            ) from error  # fmt: skip
        return [None if one is None else Failure(one[0], one[1], rank) for rank, (one, _) in said.items()]

    def _alone(self, own: Failure, missing: Sequence[int], what: str, remedy: str) -> str:
        waiting = f"its tensor-parallel peers, ranks {list(missing)}, have" if len(missing) > 1 else (
            f"its tensor-parallel peer, rank {missing[0]}, has"
        )  # fmt: skip
        return (
            f"{what} failed on rank {self._rank} ({own}); {waiting} not come out of the layers in {self._patience_s:g} "
            f"s after that, where each waits for all. Mend what fails on rank {self._rank}"
            + f", or {remedy}" * bool(remedy)
        )
