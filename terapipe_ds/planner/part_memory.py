"""The memory of one part of the layers, as numbers that were counted or measured."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from terapipe_ds.planner.errors import PlannerError


@dataclass(frozen=True)
class PartMemory:
    """One part, in bytes; the rates are bytes per token of a slice (or sequence) with all rows of a micro-batch.

    Raises:
        PlannerError: a number that is negative or not finite.
    """

    static_bytes: int  # parameters, optimizer states, and gradients that an optimizer keeps between batches
    slice_bytes_per_token: float  # what a live slice keeps for its backward
    store_bytes_per_token: float = 0  # keys and values of a live micro-batch
    store_grad_bytes_per_token: float = 0  # their gradients, while the micro-batch is in backward
    working_bytes: int = 0  # more, only while an F, B or W runs
    working_bytes_per_token: float = 0  # of the slice that runs; link buffers are in here
    working_bytes_per_prefix_token: float = 0
    gradient_bytes: int = 0  # of the parameters, from a batch's first backward to its optimizer step
    whole_bytes_per_token: float | None = None  # keys and values of a sequence in one slice; None: as with the store
    weight_bytes_per_token: float | None = None  # what is left between a slice's B and W; None: as before its B

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise PlannerError(f"memory of a part: {field.name} = {value!r}: give a finite number >= 0")
