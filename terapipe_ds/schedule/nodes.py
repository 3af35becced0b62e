"""Hold a schedule as arrays of numbers, to prove, lower and replay large ones in time linear in their size.

A node is a computation. Those of a stage are in a row, in its order. `num_nodes` as a node means none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from terapipe_ds.schedule.action import Action, Kind, SliceKey
from terapipe_ds.schedule.clock import BACKWARD, CODES, FORWARD, WEIGHT

Numbers = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Nodes:
    """Hold the computations of a schedule.

    Per node: `stage`, `kind` (a value of `CODES`), `micro_batch`, `slice`, `part`, `chunk`, and `unit`, the number of
    its slice in the batch. `first[k]` is the first node of stage k, `first[-1]` the number of nodes.
    """

    def __init__(self, orders: Sequence[Sequence[Action]], num_parts: int, num_slices: Sequence[int]) -> None:
        actions = [action for order in orders for action in order]
        self.num_nodes, self.num_parts = len(actions), num_parts
        self.first: Numbers = np.cumsum([0, *map(len, orders)])
        self.stage: Numbers = np.repeat(np.arange(len(orders)), np.diff(self.first))
        self.kind = np.array([CODES.get(action.kind, -1) for action in actions], np.int64)
        self.micro_batch = np.array([action.micro_batch_id for action in actions], np.int64)
        self.slice = np.array([action.slice_id for action in actions], np.int64)
        self.part = np.array([action.part_id for action in actions], np.int64)
        self.chunk = np.array([action.chunk_id for action in actions], np.int64)
        self.slices_of: Numbers = np.asarray(num_slices, np.int64)
        self._starts: Numbers = np.cumsum([0, *num_slices])

    @cached_property
    def are_in_range(self) -> bool:
        """Return whether all ids are in the schedule's ranges; otherwise nothing below is meaningful."""
        micro_batches, parts = len(self.slices_of), self.num_parts
        if not ((self.kind >= 0) & (self.micro_batch >= 0) & (self.micro_batch < micro_batches)).all():
            return False
        slices = self.slices_of[self.micro_batch]
        return bool(((self.slice >= 0) & (self.slice < slices) & (self.part >= 0) & (self.part < parts)).all())

    @cached_property
    def unit(self) -> Numbers:
        return self._starts[self.micro_batch] + self.slice

    @cached_property
    def at(self) -> Numbers:
        """Return the nodes as an array [kinds, parts, units]."""
        found = np.full((len(CODES), self.num_parts, self._starts[-1]), self.num_nodes)
        found[self.kind, self.part, self.unit] = np.arange(self.num_nodes)
        return found

    @cached_property
    def inputs(self) -> Numbers:
        """Return per node the node of another part whose result it takes."""
        return self._of_part(np.where(self.kind == FORWARD, -1, 1))

    @cached_property
    def outputs(self) -> Numbers:
        """Return per node the node of another part that takes its result."""
        return self._of_part(np.where(self.kind == FORWARD, 1, -1))

    @cached_property
    def peers(self) -> Numbers:
        """Return per node the stage that receives its result; -1: none."""
        return self._peers(self.outputs)

    @cached_property
    def sources(self) -> Numbers:
        """Return per node the stage that sends its input; -1: none."""
        return self._peers(self.inputs)

    @cached_property
    def is_split(self) -> Bools:
        """Return per node whether the backward of its slice is split in B and W."""
        found: Bools = self.at[WEIGHT, self.part, self.unit] < self.num_nodes
        return found

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Return, per stage, the peak of live slices over all its chunks; without a backward none stops being live."""
        ends = (self.kind == WEIGHT) | (self.kind == BACKWARD) & ~self.is_split
        by_stage = np.split((self.kind == FORWARD).astype(np.int64) - ends, self.first[1:-1])
        return tuple(int(np.cumsum(changes).max(initial=0)) for changes in by_stage)

    def place(self, kind: Kind, part_id: int, unit: SliceKey) -> int:
        """Return the place of a computation, wherever it runs, in the order of its stage."""
        node = self.at[CODES[kind], part_id, self._starts[unit[0]] + unit[1]]
        return int(node - self.first[self.stage[node]])

    def run_order(self, awaited: Sequence[int] = ()) -> list[int]:
        """Return the nodes, with each stage's in its order, each after the node whose result it takes.

        With `awaited` a node is over, and its stage goes on, once the node that it awaits is over. If stages wait for
        one another for ever, the result omits the nodes behind that wait.
        """
        inputs = self.inputs.tolist()
        has_run, is_over = (bytearray(self.num_nodes) + b"\1" for _ in range(2))  # the node "none" always is
        at, ends = self.first[:-1].tolist(), self.first[1:].tolist()
        waiting: dict[tuple[bool, int], list[int]] = {}  # stages, by the node that they wait for: its run, or its end
        ready, order = list(range(len(at))), []
        while ready:
            stage_id = ready.pop()
            node = at[stage_id]
            while node < ends[stage_id]:
                if not has_run[node]:
                    if not has_run[inputs[node]]:
                        waiting.setdefault((False, inputs[node]), []).append(stage_id)
                        break
                    has_run[node] = 1
                    ready += waiting.pop((False, node), ())
                if awaited and not is_over[awaited[node]]:
                    waiting.setdefault((True, awaited[node]), []).append(stage_id)
                    break
                is_over[node] = 1
                order.append(node)
                ready += waiting.pop((True, node), ())
                node += 1
            at[stage_id] = node
        return order

    def slots(self) -> list[list[int]]:
        """Return per stage the slot in which each node starts, where each takes one. Nodes that never run have none."""
        inputs, stages = self.inputs.tolist(), self.stage.tolist()
        ends = [0] * (self.num_nodes + 1)
        starts: list[list[int]] = [[] for _ in range(len(self.first) - 1)]
        free = [0] * len(starts)
        for node in self.run_order():
            stage_id = stages[node]
            start = max(free[stage_id], ends[inputs[node]])
            starts[stage_id].append(start)
            free[stage_id] = ends[node] = start + 1
        return starts

    def _of_part(self, step: Numbers) -> Numbers:
        part = self.part + step
        exists = (self.kind != WEIGHT) & (part >= 0) & (part < self.num_parts)
        return np.where(exists, self.at[self.kind, np.where(exists, part, 0), self.unit], self.num_nodes)

    def _peers(self, others: Numbers) -> Numbers:
        stages = np.append(self.stage, -1)[others]
        return np.where(stages == self.stage, -1, stages)
