"""Read orders of DeepSpeed and torch as schedules of ours, for replays and for the ideal bubble of bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terapipe_ds.schedule import Action, Schedule
from terapipe_ds.schedule.placement import Placement, v_shape


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
    return schedule_of("dualpipev", orders, v_shape(num_stages), (1,) * num_micro_batches)


def of_torch(name: str, pipeline_order: Mapping[int, Sequence[Any]], placement: Placement, count: int) -> Schedule:
    """Return a schedule of torch.distributed.pipelining from its `pipeline_order`: rank -> actions, None for idle."""
    codes = {"F": "F", "B": "B", "I": "B", "W": "W"}
    chunk_of = {(stage_id, part_id): chunk_id for (stage_id, chunk_id), part_id in placement.items()}
    orders = []
    for rank in sorted(pipeline_order):
        pairs = [(codes.get(a.computation_type.value), a) for a in pipeline_order[rank] if a is not None]
        orders.append([f"{code}{a.microbatch_index}.0c{chunk_of[rank, a.stage_index]}" for code, a in pairs if code])
    return schedule_of(name, orders, placement, (1,) * count)
