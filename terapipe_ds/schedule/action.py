"""Define the words of a schedule: an `Action`, a plain value without tensor or process group, and the error."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class ScheduleError(ValueError):
    """Refuse a schedule that cannot be built, read or run.

    `reason` states the fault and the fix in one line; `picture` is the grid with the place marked, or "".
    """

    def __init__(self, reason: str, picture: str = "") -> None:
        super().__init__(f"{reason}\n{picture}" if picture else reason)
        self.reason = reason
        self.picture = picture

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[str, str]]:
        return type(self), (self.reason, self.picture)


class Kind(enum.Enum):
    """List the kinds of actions; the value is the printed code."""

    LOAD = "L"
    RECV_ACTIVATION = "RA"
    FORWARD = "F"
    SEND_ACTIVATION = "SA"
    RECV_GRAD = "RG"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_GRAD = "SG"
    REDUCE_TIED_GRADS = "RT"
    REDUCE_GRADS = "RD"
    OPTIMIZER_STEP = "ST"

    def __init__(self, code: str) -> None:
        self.code = code  # the value: Enum's own access to it goes through Python

    __hash__ = object.__hash__  # Enum's own goes through Python, and kinds are in every key of every table


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
SEND_KINDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRAD})
RECV_KINDS = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRAD})

_COMPUTE_FORM = re.compile(r"([FBW])(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(?:c(0|[1-9][0-9]{0,8}))?")


SliceKey = tuple[int, int]
"""(micro_batch_id, slice_id)."""
ComputeKey = tuple[Kind, int, int, int]
"""(kind, part_id, micro_batch_id, slice_id)."""
PlacedUnit = tuple[Kind, int, int, int]
"""(F or B or W, micro_batch_id, slice_id, chunk_id): what generators write."""


class Action(NamedTuple):
    """Hold one thing that a stage does, at the place (stage, `chunk_id`) of `part_id`.

    Ids that mean nothing for the kind are -1: `slice_id` of a load, both ids of the actions that close a batch, and
    the peer of everything but sends and receives. A receive *posts* a non-blocking receive, and the forward or
    backward of the same unit and part waits for it; a send blocks only while its link has too many in flight.
    """

    kind: Kind
    micro_batch_id: int = -1
    slice_id: int = -1
    part_id: int = 0
    chunk_id: int = 0
    peer_stage_id: int = -1
    peer_part_id: int = -1

    @property
    def unit(self) -> SliceKey:
        """Return the key under which tensors in flight are kept."""
        return self.micro_batch_id, self.slice_id

    @property
    def key(self) -> ComputeKey:
        """Return the key of a computation, unique in a schedule."""
        return self.kind, self.part_id, self.micro_batch_id, self.slice_id

    def text(self, with_chunk: bool) -> str:
        """Return the compute form, `F0.3` or, with the chunk, `F0.3c0`."""
        chunk = f"c{self.chunk_id}" if with_chunk else ""
        return f"{self.kind.code}{self.micro_batch_id}.{self.slice_id}{chunk}"

    def __str__(self) -> str:
        if self.micro_batch_id < 0 and self.kind not in COMPUTE_KINDS:
            return self.kind.code
        if self.kind is Kind.LOAD:
            return f"{self.kind.code}{self.micro_batch_id}"
        text = self.text(with_chunk=self.chunk_id > 0)
        if self.kind in SEND_KINDS:
            return f"{text}>{self.peer_stage_id}"
        return f"{text}<{self.peer_stage_id}" if self.kind in RECV_KINDS else text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the computation, of part 0, that `text` names (`F0.3`, `B1.0c1`), or raise `ScheduleError`."""
        match = _COMPUTE_FORM.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"cannot read {text[:40]!r} as a computation: write F, B or W, then micro-batch.slice, and"
                " c<chunk> where stages hold several parts, for example F0.3 or B1.0c1"
            )
        kind, micro_batch_id, slice_id, chunk_id = match.groups()
        return cls(Kind(kind), int(micro_batch_id), int(slice_id), chunk_id=int(chunk_id or 0))
