"""How many bytes a stage needs: what is always there, what comes with each live slice, and the peak of a schedule.

Every share is linear in tokens, so that a part is seven numbers (`PartMemory`). They are counted from model sizes
(`MemoryModel.of_model`, see ``model_memory``) or measured on a real stage, and the peak follows from the order of the
schedule alone: which slices are live together does not depend on how long they take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terapipe_ds.model_sizes import ModelSize
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class PartMemory:
    """One part, in bytes; the rates are bytes per token of a slice (or sequence) with all rows of a micro-batch.

    Raises:
        PlannerError: a number that is negative or not finite.
    """

    static_bytes: int  # parameters, gradients, optimizer states
    slice_bytes_per_token: float  # what a live slice keeps for its backward
    store_bytes_per_token: float = 0  # keys and values of a live micro-batch
    store_grad_bytes_per_token: float = 0  # their gradients, while the micro-batch is in backward
    working_bytes: int = 0  # more, only while an F, B or W runs
    working_bytes_per_token: float = 0  # of the slice that runs; link buffers are in here
    working_bytes_per_prefix_token: float = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise PlannerError(f"memory of a part: {field.name} = {value!r}: give a finite number >= 0")


@dataclass(frozen=True)
class MemoryModel:
    """The parts of a pipeline, in bytes; what the simulator and the search ask for memory.

    A sequence that is not sliced keeps its keys and values in its one slice instead of in the store: the sum is the
    same, but for the fused query/key/value product that plain attention with rotary positions holds on to.
    """

    parts: tuple[PartMemory, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise PlannerError("a memory model without parts: give one PartMemory per part")

    @classmethod
    def of_model(
        cls, model_size: ModelSize, *, num_stages: int, dtype: str, micro_batch: int, tensor_parallel: int = 1,
        data_parallel: int = 1, zero_stage: int = 0, optimizer: str = "adam", activation_checkpointing: bool = False,
        sequence_parallel: bool = False, gradient_dtype: str | None = None, fused_norm: bool = True,
        layers_per_part: Sequence[int] | None = None,
    ) -> MemoryModel:  # fmt: skip
        """Counted from model sizes; every argument and what is counted: `model_memory.count_parts`."""
        from terapipe_ds.planner.model_memory import Setup, count_parts

        setup = Setup(
            model_size, num_stages, dtype, micro_batch, tensor_parallel, data_parallel, zero_stage, optimizer,
            activation_checkpointing, sequence_parallel, gradient_dtype, fused_norm,
            None if layers_per_part is None else tuple(layers_per_part),
        )  # fmt: skip
        return cls(count_parts(setup))

    @classmethod
    def measured(cls, parts: Iterable[PartMemory]) -> MemoryModel:
        """From numbers of a running pipeline, one ``PartMemory`` per part."""
        return cls(tuple(parts))

    def static_bytes(self, part_id: int) -> int:
        """Parameters, gradients and optimizer states."""
        return math.ceil(self.parts[part_id].static_bytes)

    def store_bytes(self, part_id: int, sequence_length: int) -> int:
        """Keys and values of one live micro-batch, from its first F to the end of its last backward."""
        return math.ceil(self.parts[part_id].store_bytes_per_token * sequence_length)

    def store_grad_bytes(self, part_id: int, sequence_length: int) -> int:
        """Their gradients, from the B of the micro-batch's last slice to the end of that of slice 0."""
        return math.ceil(self.parts[part_id].store_grad_bytes_per_token * sequence_length)

    def slice_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """What a live slice keeps from its F to the end of its last of B and W."""
        return math.ceil(self.parts[part_id].slice_bytes_per_token * tokens)

    def working_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """More, only while an F, B or W of that slice runs."""
        part = self.parts[part_id]
        per_slice = part.working_bytes_per_token * tokens + part.working_bytes_per_prefix_token * prefix
        return math.ceil(part.working_bytes + per_slice)


def peak_bytes(schedule: Schedule, plan: SlicePlan | Sequence[SlicePlan], memory: MemoryModel) -> tuple[int, ...]:
    """The most bytes that each stage needs at once while it runs its order; ``plan``: one, or one per micro-batch.

    Raises:
        PlannerError: plans that do not have the schedule's slices, or parts that the model does not have.
    """
    plans = [plan] * schedule.num_micro_batches if isinstance(plan, SlicePlan) else list(plan)
    if tuple(p.num_slices for p in plans) != schedule.num_slices:
        counts = [p.num_slices for p in plans]
        raise PlannerError(
            f"plans with {counts} slices for a schedule with {list(schedule.num_slices)}: give those it was built for"
        )
    if schedule.num_parts != len(memory.parts):
        raise PlannerError(
            f"a memory model of {len(memory.parts)} parts for a schedule of {schedule.num_parts}: give one per part"
        )
    tables: dict[tuple[int, tuple[int, ...]], _Table] = {}
    return tuple(_stage_peak(order, plans, memory, tables) for order in schedule.orders)


class _Table:
    """The bytes of the slices of one plan on one part."""

    def __init__(self, memory: MemoryModel, part_id: int, plan: SlicePlan) -> None:
        spans = list(zip(plan.lengths, plan.starts, strict=True))
        self.slices = [memory.slice_bytes(part_id, *span) for span in spans]
        self.working = [memory.working_bytes(part_id, *span) for span in spans]
        self.store = memory.store_bytes(part_id, plan.sequence_length)
        self.store_grad = memory.store_grad_bytes(part_id, plan.sequence_length)
        self.last = plan.num_slices - 1


def _stage_peak(
    order: tuple[Action, ...], plans: list[SlicePlan], memory: MemoryModel,
    tables: dict[tuple[int, tuple[int, ...]], _Table],
) -> int:  # fmt: skip
    """Walk an order: what an action adds counts from its start, what it frees from its end."""
    parts = {action.part_id for action in order}
    split = {(action.part_id, action.unit) for action in order if action.kind is Kind.WEIGHT}
    peak = live = sum(memory.static_bytes(part_id) for part_id in parts)
    for action in order:
        part_id, unit = action.part_id, action.unit
        key = part_id, plans[unit[0]].lengths
        table = tables.get(key) or tables.setdefault(key, _Table(memory, part_id, plans[unit[0]]))
        slice_id, freed = unit[1], 0
        if action.kind is Kind.FORWARD:
            live += table.slices[slice_id] + (table.store if slice_id == 0 else 0)
        else:
            live += table.store_grad if action.kind is Kind.BACKWARD and slice_id == table.last else 0
            ends = action.kind is Kind.WEIGHT or (part_id, unit) not in split
            freed = table.slices[slice_id] + (table.store if slice_id == 0 else 0) if ends else 0
            freed += table.store_grad if action.kind is Kind.BACKWARD and slice_id == 0 else 0
        peak = max(peak, live + table.working[slice_id])
        live -= freed
    return peak
