"""List the schedules that a search tries, with their parts per stage."""

from __future__ import annotations

import math
from typing import NamedTuple

from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.schedule.placement import LOOPED, V_SHAPED
from terapipe_ds.schedule.split_chunks import TAKE_LIMITS
from terapipe_ds.simulator.few import FILL_DRAIN


class Shape(NamedTuple):
    """Hold a schedule and the number of parts of each stage."""

    schedule: str
    chunks: int = 1

    @property
    def is_split(self) -> bool:
        return self.schedule in SPLIT_SCHEDULES

    @property
    def fills_and_drains(self) -> bool:
        """Return whether all forwards come before all backwards."""
        return self.schedule in FILL_DRAIN

    @property
    def has_own_bound(self) -> bool:
        """Return whether the bound of stages with one run of layers and whole backwards holds."""
        return self.chunks == 1 and not self.is_split

    def idle(self, num_stages: int, rounds: int, weights: float) -> tuple[float, float]:
        """Return the shares of another stage's F and B of a slice for which a stage waits.

        Args:
            rounds: slices after those of the first micro-batch; with 2 (K - 1) of them, W fills the waits for B.
            weights: the share of B that is W.
        """
        if not self.is_split:
            return 1 / self.chunks, 1 / self.chunks
        drains = max(0.0, 1 - rounds / max(1, 2 * (num_stages - 1)))
        return (1 + (self.schedule in V_SHAPED) * drains) / self.chunks, drains * (1 - weights) / self.chunks

    def is_short(self, num_stages: int, num_micro_batches: int, num_slices: int) -> bool:
        """Return whether building and replaying a whole batch takes little time."""
        computations = 2 * num_stages * self.chunks * num_micro_batches * num_slices
        return computations <= (_MOST_LISTED if self.schedule == "zbv" else _MOST)

    def waiting_slices(self, num_stages: int, stage_id: int, num_slices: int) -> float:
        """Return how many of the live slices of a long batch wait for their W, in slices of a whole stage."""
        if self.schedule in TAKE_LIMITS:  # W fills the room that F and B leave
            most = self.live_slices(num_stages, stage_id, num_slices)
            return max(0.0, most - self._looped_slices(num_stages, stage_id, num_slices))
        return float(stage_id) if self.is_split else 0.0

    def live_slices(self, num_stages: int, stage_id: int, num_slices: int) -> float:
        """Return the most live slices of a long batch, in slices of a whole stage."""
        deep = num_stages if self.schedule in SPLIT_SCHEDULES else num_stages - stage_id
        if self.schedule in TAKE_LIMITS:  # as many whole micro-batches as unsliced 1F1B on its fullest stage
            return num_stages * num_slices
        if self.chunks > 1:
            return self._looped_slices(num_stages, stage_id, num_slices)
        if self.fills_and_drains:
            return math.inf
        return deep * num_slices if self.schedule in ("1f1b", "zb-h1") else deep + num_slices - 1

    def _looped_slices(self, num_stages: int, stage_id: int, num_slices: int) -> float:
        """Return the live slices of a stage with several parts: Megatron's warm-up, and one micro-batch."""
        later = 2 * (num_stages - 1 - stage_id)
        if self.schedule == "interleaved":
            return num_slices * ((self.chunks - 1) * num_stages + later + 1) / self.chunks
        # stages take units in groups of K: those that the slices of a micro-batch touch at most
        groups = (num_slices - 1 + num_stages - math.gcd(num_slices, num_stages)) // num_stages + 1
        return ((self.chunks - 1) * groups * num_stages + later + num_slices) / self.chunks


UNSLICED = (Shape("1f1b"), Shape("gpipe"))
"""Of layers without costs of slices: little memory first, then all forwards before all backwards."""

_UNSLICED = (*UNSLICED, Shape("zb-h1"), Shape("interleaved", 2), Shape("interleaved", 4))
_SLICED = (
    *(Shape("seq1f1b"), Shape("terapipe"), Shape("seq1f1b-zb")),
    *(Shape("seq1f1b-interleaved", 2), Shape("seq1f1b-interleaved", 4)),
)
_BOTH = (Shape("zbv", 2), Shape("seq1f1b-interleaved-zb", 2), Shape("seq1f1b-interleaved-zb", 4))
_MOST = 60_000  # computations of a batch; with more units the pipeline hardly waits
_MOST_LISTED = 12_000  # for a schedule whose order is searched unit by unit

NAMES_UNSLICED = ("1f1b", "gpipe")
NAMES = tuple(dict.fromkeys(s.schedule for s in (*_UNSLICED, *_SLICED, *_BOTH)))
WHOLE = tuple(dict.fromkeys(s.schedule for s in _UNSLICED))
"""The schedules that strategies have unsliced only."""


def shapes_of(num_slices: int, schedule: str | None, chunks: int | None) -> tuple[Shape, ...]:
    """Return the shapes that the search tries with `num_slices`, under the fixed choices: little memory first."""
    known = (*(_UNSLICED if num_slices == 1 else _SLICED), *_BOTH)
    allowed = [shape for shape in known if schedule in (None, shape.schedule) and chunks in (None, shape.chunks)]
    if schedule is None and not allowed:  # another number of parts than usual
        looped = LOOPED[:1] if num_slices == 1 else LOOPED[1:]
        return tuple(Shape(name, chunks or 1) for name in looped)
    return tuple(allowed) or (Shape(str(schedule), usual_chunks(schedule, chunks)),)


def usual_chunks(schedule: str | None, chunks: int | None) -> int:
    """Return the least parts per stage under the fixed choices: the user's number, or the schedule's."""
    if schedule in V_SHAPED:  # two parts, where the config may say 1 as well
        return 2
    return chunks or (2 if schedule in LOOPED else 1)
