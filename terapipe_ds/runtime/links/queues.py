"""Refuse or warn of schedules that hang if the streams of a GPU share its hardware queues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.schedule import Schedule
from terapipe_ds.simulator.device_queues import DEFAULT_QUEUES, mappings_that_hang

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_WARNED = 4  # schedules whose mappings are tried: a job with other lengths in each batch has many


def queue_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many hardware queues the streams of this process share."""
    try:
        return min(max(int(environment.get(QUEUES, "")), 1), 32)
    except ValueError:
        return DEFAULT_QUEUES


def loads_kernels_at_start() -> bool:
    """Return whether CUDA loads all kernels of this process at its start."""
    return os.environ.get("CUDA_MODULE_LOADING") == "EAGER"


@dataclass
class QueueCheck:
    """Check each schedule before its first batch."""

    num_queues: int | None  # of the rank with fewest, so that all ranks decide alike; None if no message is in a stream
    warns: bool  # this rank tries mappings and warns. One rank is enough, and no rank waits for it
    _checked: set[tuple[object, ...]] = field(default_factory=set)

    def check(self, schedule: Schedule) -> None:
        """Raise TeraPipeConfigError on every rank if one queue hangs; warn if some mappings to several queues do."""
        if self.num_queues is None:
            return
        if self.num_queues > 1 and (not self.warns or len(self._checked) >= _MOST_WARNED):
            return
        # only now: a hash of all orders takes long for many actions
        sizes = schedule.name, schedule.num_stages, schedule.num_slices, schedule.forward_only, hash(schedule.orders)
        if sizes in self._checked:
            return
        self._checked.add(sizes)
        count, tried = mappings_that_hang(schedule, self.num_queues)
        if not count:
            return
        what = (
            f"schedule {schedule.name!r} with {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches "
            f"and {max(schedule.num_slices)} slices"
        )
        if self.num_queues == 1:
            raise RaisedEverywhere(
                TeraPipeConfigError(
                    f"{QUEUES}=1 gives all streams of a GPU one queue, and in one queue {what} waits for itself and "
                    f"never ends: set {QUEUES}=32, or take schedule 'seq1f1b' where the overlap of tensor parallelism "
                    "needs 1"
                )
            )
        logger.warning(
            "%s: %d of %d ways to spread its streams over %d queues of a GPU would hang; set %s=32",
            *(what, count, tried, self.num_queues, QUEUES),
        )
