"""Orders of DeepSpeed and torch as schedules of ours: the simulator replays them, bounds need their ideal bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terapipe_ds.schedule import Action, Schedule

Placement = Mapping[tuple[int, int], int]
"""(stage, chunk) -> part."""


def v_placement(num_stages: int) -> dict[tuple[int, int], int]:
    """Return two parts per stage, out and back: stage k holds part k and part 2K - 1 - k."""
    return {(k, c): k if c == 0 else 2 * num_stages - 1 - k for k in range(num_stages) for c in range(2)}


def looped_placement(num_stages: int, chunks: int) -> dict[tuple[int, int], int]:
    """Return parts dealt out in turns: stage k holds parts k, K + k, ..."""
    return {(k, c): c * num_stages + k for k in range(num_stages) for c in range(chunks)}


def schedule_of(
    name: str, orders: Sequence[Sequence[str]], placement: Placement, num_slices: Sequence[int]
) -> Schedule:
    """Return a schedule from the texts of its computations (`F0.0c1`), stage by stage."""
    actions = tuple(
        tuple(
            Action(a.kind, a.micro_batch_id, a.slice_id, placement[stage_id, a.chunk_id], a.chunk_id)
            for a in map(Action.parse, order)
        )
        for stage_id, order in enumerate(orders)
    )
    chunks = 1 + max(chunk_id for _, chunk_id in placement)
    return Schedule(name, len(orders), len(num_slices), tuple(num_slices), chunks, False, actions, dict(placement))


def of_dualpipev(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the order of DeepSpeed's DualPipeV (deepspeed/runtime/pipe/schedule.py), whose phases are chunks."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass

    codes = {ForwardPass: "F", BackwardPass: "B"}
    orders = []
    for stage_id in range(num_stages):
        steps = DualPipeVSchedule(num_micro_batches, num_stages, stage_id).steps()
        commands = [(codes[type(c)], c.kwargs) for step in steps for c in step if type(c) in codes]
        # a buffer is (phase, micro-batch), see num_pipe_buffers
        orders.append([f"{code}{k['buffer_id'] % num_micro_batches}.0c{k['phase']}" for code, k in commands])
    return schedule_of("dualpipev", orders, v_placement(num_stages), (1,) * num_micro_batches)


def of_torch(name: str, pipeline_order: Mapping[int, Sequence[Any]], placement: Placement, count: int) -> Schedule:
    """Return a schedule of torch.distributed.pipelining from its `pipeline_order`: rank -> actions, None for idle."""
    codes = {"F": "F", "B": "B", "I": "B", "W": "W"}
    chunk_of = {(stage_id, part_id): chunk_id for (stage_id, chunk_id), part_id in placement.items()}
    orders = []
    for rank in sorted(pipeline_order):
        pairs = [(codes.get(a.computation_type.value), a) for a in pipeline_order[rank] if a is not None]
        orders.append([f"{code}{a.microbatch_index}.0c{chunk_of[rank, a.stage_index]}" for code, a in pairs if code])
    return schedule_of(name, orders, placement, (1,) * count)
