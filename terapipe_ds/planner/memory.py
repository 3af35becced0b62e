"""Count the bytes that a stage needs: lasting bytes, the bytes of each live slice, and the bytes of a running one.

Every share is linear in tokens, but carried states come per slice, and a window limits the kept keys and values. So a
part is some numbers (`PartMemory`), counted from model sizes or measured on a real stage. `simulator/peak_memory.py`
adds them up over the order of a stage and finds its peak (`Replay.peak_bytes`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.plan import JOINED_ROWS, weight_groups
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.model_memory import PartMemory, Setup

MEMORY_KINDS = {
    "model_states": ("static_bytes", "gradient_bytes", "tied_bytes", "tied_gradient_bytes"),
    "keys_and_values": ("store_bytes_per_token", "whole_bytes_per_token", "windowed_store_bytes_per_token"),
    "their_gradients": ("store_grad_bytes_per_token", "windowed_grad_bytes_per_token"),
    "live_slices": (
        "slice_bytes_per_token",
        "staying_bytes_per_token",
        "weight_bytes_per_token",
        "joined_bytes_per_token",
        "carried_bytes_per_slice",
    ),
    "messages": ("working_sent_bytes_per_token",),
    "context_and_nccl": ("process_bytes",),
}
"""Kinds of bytes that stay beyond a computation -> the fields of `PartMemory`, or `MemoryModel`, that count them."""

__all__ = ["MEMORY_KINDS", "MemoryModel", "PartMemory"]


@dataclass(frozen=True)
class MemoryModel:
    """Hold the parts of a pipeline, in bytes; simulator and search take memory from here."""

    parts: tuple[PartMemory, ...]
    offloads: bool = False  # the tensors that slices keep wait on the host (`simulator.offload`)
    host_bytes_per_s: float | None = None  # of a device's link to the host, one way; None: copies take no time
    process_bytes: int = 0  # of each stage, outside of torch's allocator: CUDA's context and NCCL's buffers

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise PlannerError("a memory model without parts: give one PartMemory per part")

    @classmethod
    def of_model(
        cls,
        model_size: ModelSize,
        *,
        num_stages: int,
        dtype: str,
        micro_batch: int,
        process_bytes: int = 0,
        **training: Any,
    ) -> MemoryModel:
        """Count from model sizes; `training` has more fields of `model_memory.Setup`, by name."""
        parts = Setup(model_size, num_stages, dtype, micro_batch, **training).count_parts()
        return cls(parts, process_bytes=process_bytes)

    def key_of(self, part_ids: Sequence[int]) -> tuple[object, ...]:
        """Return what decides the bytes of a stage with these parts, and of gradients that it receives."""
        last = len(self.parts) - 1
        near = sorted({near for part in part_ids for near in (part, min(part + 1, last))})
        return self.offloads, self.process_bytes, *((part, self.parts[part]) for part in near)

    def only(self, kind: str) -> MemoryModel:
        kept = MEMORY_KINDS[kind]
        parts = []
        for part in self.parts:
            others = {name for name, value in vars(part).items() if "bytes" in name and value is not None} - {*kept}
            parts.append(dataclasses.replace(part, **dict.fromkeys(others, 0)))
        process_bytes = self.process_bytes if "process_bytes" in kept else 0
        return dataclasses.replace(self, parts=tuple(parts), process_bytes=process_bytes)

    def static_bytes(self, *part_ids: int) -> int:
        """Return parameters, optimizer states, and gradients that the optimizer keeps between batches, of a stage."""
        return self._of_stage(part_ids, "static_bytes", "tied_bytes")

    def gradient_bytes(self, *part_ids: int) -> int:
        """Return gradients of the parameters of a stage, from a batch's first backward to its optimizer step."""
        return self._of_stage(part_ids, "gradient_bytes", "tied_gradient_bytes")

    def step_bytes(self, *part_ids: int) -> int:
        """Return the bytes beside gradients and states while the optimizer of a stage steps, after the batch."""
        return self._of_stage(part_ids, "step_bytes", "tied_step_bytes")

    def _of_stage(self, part_ids: Sequence[int], name: str, tied: str) -> int:
        """Return the sum over the parts of a stage, which holds a tied matrix once if it has the first and the last."""
        total, last = 0, len(self.parts) - 1
        for part_id in part_ids:
            total += math.ceil(getattr(self.parts[part_id], name))
        if last > 0 and {0, last} <= {*part_ids}:
            total -= math.floor(getattr(self.parts[last], tied))
        return total

    def whole_bytes(self, part_id: int, sequence_length: int) -> int:
        """Return the bytes that a micro-batch of one slice keeps in place of `store_bytes` and `store_grad_bytes`."""
        rate = self.parts[part_id].whole_bytes_per_token
        # nobody measured a whole sequence apart, so the store's bytes stand for it
        if rate is None:
            grads = self.store_grad_bytes(part_id, sequence_length, sequence_length)
            return self.store_bytes(part_id, sequence_length) + grads
        return math.ceil(rate * sequence_length)

    def store_bytes(self, part_id: int, sequence_length: int) -> int:
        """Return keys and values of one live micro-batch, from its first F to the end of its last backward."""
        return math.ceil(self.parts[part_id].store_bytes_per_token * sequence_length)

    def store_grad_bytes(self, part_id: int, sequence_length: int, largest: int) -> int:
        """Return their gradients, from the B of the micro-batch's last slice to the end of slice 0's B.

        With a window only keys and values in reach of one slice have them; `largest` is the tokens of the largest one.
        """
        part = self.parts[part_id]
        dropped = part.windowed_grad_bytes_per_token * self._out_of_reach(part_id, sequence_length, largest)
        return math.ceil(part.store_grad_bytes_per_token * sequence_length - dropped)

    def evaluation_bytes(self, part_id: int, sequence_length: int, largest: int) -> int:
        """Return keys and values of a micro-batch in evaluation, which drops those out of reach."""
        part = self.parts[part_id]
        dropped = part.windowed_store_bytes_per_token * self._out_of_reach(part_id, sequence_length, largest)
        return math.ceil(part.store_bytes_per_token * sequence_length - dropped)

    def _out_of_reach(self, part_id: int, sequence_length: int, largest: int) -> float:
        """Return the tokens outside a slice's window; of several windows at most the tokens outside each."""
        return max(0.0, sequence_length - self.parts[part_id].window_tokens - largest)

    def slice_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """Return the bytes of a live slice from its F to the end of its B, with the carried states that it has read."""
        part = self.parts[part_id]
        return math.ceil(part.slice_bytes_per_token * tokens + (part.carried_bytes_per_slice if prefix else 0))

    def staying_bytes(self, part_id: int, tokens: int) -> int:
        """Return the bytes of a live slice that stay on the device where slices are offloaded."""
        return math.ceil(self.parts[part_id].staying_bytes_per_token * tokens)

    def weight_bytes(self, part_id: int, tokens: int, prefix: int) -> int:
        """Return the bytes that a slice keeps from its B to its W: inputs and output gradients of linear layers."""
        rate = self.parts[part_id].weight_bytes_per_token
        return self.slice_bytes(part_id, tokens, prefix) if rate is None else math.ceil(rate * tokens)

    def weight_groups(self, part_id: int, lengths: Sequence[int]) -> list[list[int]]:
        """Return the slices whose weight gradients are one product each, in the order of backwards."""
        tokens = self.parts[part_id].joined_tokens
        return weight_groups(lengths, JOINED_ROWS / tokens) if tokens else [[i] for i in reversed(range(len(lengths)))]

    def joined_bytes(self, part_id: int, tokens: int) -> int:
        """Return the bytes that a slice whose backward is not split keeps from its B to the product of its group."""
        return math.ceil(self.parts[part_id].joined_bytes_per_token * tokens)

    def product_bytes(self, part_id: int, span: tuple[int, int], group_tokens: int, is_split: bool = False) -> int:
        """Return the bytes by which products of a group exceed the B of its last slice, of (tokens, prefix), or its W.

        The factors of all slices are copied, one weight at a time: where a B is not split, as many numbers per token as
        it works on. Nothing is copied if no factors wait.
        """
        part, working = self.parts[part_id], self.working_bytes(part_id, *span, False)
        if is_split:
            working -= self.factor_bytes(part_id, span[0])
            copies = part.working_bytes + part.working_copied_bytes_per_token * group_tokens
            return max(0, math.ceil(copies) - working)
        if not part.joined_bytes_per_token:
            return 0
        own = self.joined_bytes(part_id, span[0]) - self.slice_bytes(part_id, *span)
        return max(0, own + self.working_bytes(part_id, group_tokens, 0, False) - working)

    def factor_bytes(self, part_id: int, tokens: int) -> int:
        """Return the bytes that count twice at the end of a split B and in its W: as waiting, and as working bytes."""
        return math.floor(self.parts[part_id].working_factor_bytes_per_token * tokens)

    def sent_bytes(self, part_id: int, tokens: int) -> int:
        """Return the gradients of a slice that the part sends back, which it keeps until they have arrived."""
        return math.ceil(self.parts[part_id].working_sent_bytes_per_token * tokens)

    def working_bytes(self, part_id: int, tokens: int, prefix: int, is_whole: bool) -> int:
        """Return the bytes needed on top, only while an F, B or W of that slice, or whole sequence, runs."""
        part = self.parts[part_id]
        per_token = part.working_bytes_per_token + (part.working_whole_bytes_per_token if is_whole else 0)
        per_slice = per_token * tokens
        beside_prefix = (part.working_bytes_per_token - part.working_gone_bytes_per_token) * tokens
        per_slice = max(per_slice, beside_prefix + part.working_bytes_per_prefix_token * prefix)
        # the loss of a slice is done, and its logits gone, when the layers run
        loss = part.loss_bytes_per_token * min(tokens, part.loss_chunk_tokens)
        fixed = part.working_bytes + (part.working_whole_bytes if is_whole else 0)
        return math.ceil(fixed + max(per_slice, loss))
