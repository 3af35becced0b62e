"""How many bytes a stage needs: what is always there, what comes with each live slice, and the peak of a schedule.

Every share is linear in tokens, so that a part is seven numbers (`PartMemory`). They are counted from model sizes
(`MemoryModel.of_model`, see ``model_memory``) or measured on a real stage. The peak of a schedule follows from its
orders alone, since which slices are live together does not depend on how long they take: ``Replay.peak_bytes``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.plan import SlicePlan
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
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None and field.name in ("whole_bytes_per_token", "weight_bytes_per_token"):
                continue
            if not (number and math.isfinite(value) and value >= 0):
                raise PlannerError(f"memory of a part: {field.name} = {value!r}: give a finite number >= 0")


@dataclass(frozen=True)
class MemoryModel:
    """The parts of a pipeline, in bytes; what the simulator and the search ask for memory.

    A sequence that is not sliced keeps its keys and values as plain attention does: without gradients that wait, but
    with the fused query/key/value product that rotary positions make it hold on to (``whole_bytes``).
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
        """Parameters, optimizer states, and gradients that the optimizer keeps between batches."""
        return math.ceil(self.parts[part_id].static_bytes)

    def gradient_bytes(self, part_id: int) -> int:
        """Gradients of the parameters that come with a batch's first backward and go with its optimizer step."""
        return math.ceil(self.parts[part_id].gradient_bytes)

    def whole_bytes(self, part_id: int, sequence_length: int) -> int:
        """What a micro-batch that is one slice keeps in the place of ``store_bytes`` and ``store_grad_bytes``."""
        rate = self.parts[part_id].whole_bytes_per_token
        if rate is None:
            return self.store_bytes(part_id, sequence_length) + self.store_grad_bytes(part_id, sequence_length)
        return math.ceil(rate * sequence_length)

    def store_bytes(self, part_id: int, sequence_length: int) -> int:
        """Keys and values of one live micro-batch, from its first F to the end of its last backward."""
        return math.ceil(self.parts[part_id].store_bytes_per_token * sequence_length)

    def store_grad_bytes(self, part_id: int, sequence_length: int) -> int:
        """Their gradients, from the B of the micro-batch's last slice to the end of that of slice 0."""
        return math.ceil(self.parts[part_id].store_grad_bytes_per_token * sequence_length)

    def slice_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """What a live slice keeps from its F to the end of its B."""
        return math.ceil(self.parts[part_id].slice_bytes_per_token * tokens)

    def weight_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """What its W needs, from its B to its W: inputs and output gradients of linear layers."""
        rate = self.parts[part_id].weight_bytes_per_token
        return self.slice_bytes(part_id, tokens, prefix) if rate is None else math.ceil(rate * tokens)

    def working_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """More, only while an F, B or W of that slice runs."""
        part = self.parts[part_id]
        per_slice = part.working_bytes_per_token * tokens + part.working_bytes_per_prefix_token * prefix
        return math.ceil(part.working_bytes + per_slice)


def fill_drain_peak_bytes(
    plan: SlicePlan, memory: MemoryModel, num_stages: int, num_micro_batches: int
) -> tuple[int, ...]:
    """The most bytes of every stage where all forwards come before all backwards (``terapipe``, ``gpipe``).

    What ``Replay.peak_bytes`` finds by a walk over the orders, without them: of all micro-batches but the one that
    comes first in backward every slice is live, and of that one the slices up to the one that runs.
    """
    peaks = []
    for part_id in range(num_stages):
        slices = [memory.slice_bytes(part_id, *span) for span in zip(plan.lengths, plan.starts, strict=True)]
        working = [memory.working_bytes(part_id, *span) for span in zip(plan.lengths, plan.starts, strict=True)]
        others = (num_micro_batches - 1) * sum(slices)
        stores = _stores(memory, part_id, plan, num_micro_batches)
        live = [total + memory.gradient_bytes(part_id) for total in itertools.accumulate(slices)]
        live[-1] = max(sum(slices), live[-1] - slices[-1])  # gradients come while what the slice kept goes
        if plan.num_slices == 1:
            live[-1] = max(sum(slices), live[-1] - memory.whole_bytes(part_id, plan.sequence_length))
        running = max(total + more for total, more in zip(live, working, strict=True))
        peaks.append(memory.static_bytes(part_id) + stores + others + running)
    return tuple(peaks)


def _stores(memory: MemoryModel, part_id: int, plan: SlicePlan, num_micro_batches: int) -> int:
    """Keys and values of all micro-batches, and the gradients of those of one."""
    if plan.num_slices == 1:
        return num_micro_batches * memory.whole_bytes(part_id, plan.sequence_length)
    one = memory.store_bytes(part_id, plan.sequence_length)
    return num_micro_batches * one + memory.store_grad_bytes(part_id, plan.sequence_length)
