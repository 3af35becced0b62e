"""Check whether a schedule can run, time its computations, and diagnose a schedule that cannot run.

`validate` proves a schedule by arrays (`proofs`). One that is not proven goes to `diagnose`, which checks one
computation after another and names the first broken rule, in this order: the shape of the schedule, that every unit
runs exactly once, the order within each stage, the messages of each link, and that no stage waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from terapipe_ds.schedule.action import COMPUTE_KINDS, Action, ComputeKey, Kind, ScheduleError
from terapipe_ds.schedule.schedule import Schedule, message


def validate(schedule: Schedule) -> None:
    """Raise `ScheduleError`, with the grid and the offending cell marked, unless the schedule can run.

    The rules: every F and B exactly once per (part, micro-batch, slice), at one place; F before its B before its W; F
    in slice order, B in reverse slice order; each send has its receive, in the same order per link; no deadlock.
    """
    from terapipe_ds.schedule.proofs import can_run  # numpy: commands that only name schedules do without

    if can_run(schedule):
        return
    diagnose(schedule)
    raise ScheduleError(f"schedule {schedule.name!r} cannot be proven to run, and no rule that it breaks is found")


def replay(schedule: Schedule) -> list[list[int]]:
    """Return the slot in which each entry of each order starts, where each takes one; ScheduleError on a deadlock."""
    starts = schedule.nodes.slots()
    if sum(map(len, starts)) < schedule.nodes.num_nodes:
        diagnose(schedule)
    return starts


def diagnose(schedule: Schedule) -> None:
    """Raise `ScheduleError`, with the grid and the offending cell marked, for the first broken rule.

    It is slow, since it checks one computation after another. It is for schedules that are known to be wrong.
    """
    _check_shape(schedule)
    _check_once(schedule)
    for stage_id in range(schedule.num_stages):
        _check_stage_order(schedule, stage_id)
    _check_messages(schedule)
    _check_waits(schedule)


def _needs(schedule: Schedule, action: Action) -> Iterator[ComputeKey]:
    """Yield the keys of the computations whose results `action` needs."""
    part_id, (micro_batch_id, slice_id) = action.part_id, action.unit
    if action.kind is Kind.FORWARD:
        if slice_id > 0:
            yield Kind.FORWARD, part_id, micro_batch_id, slice_id - 1
        if part_id > 0:
            yield Kind.FORWARD, part_id - 1, micro_batch_id, slice_id
    elif action.kind is Kind.BACKWARD:
        yield Kind.FORWARD, part_id, micro_batch_id, slice_id
        if slice_id < schedule.num_slices[micro_batch_id] - 1:
            yield Kind.BACKWARD, part_id, micro_batch_id, slice_id + 1
        if part_id < schedule.num_parts - 1:
            yield Kind.BACKWARD, part_id + 1, micro_batch_id, slice_id
    else:
        yield Kind.BACKWARD, part_id, micro_batch_id, slice_id


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.orders) != schedule.num_stages or len(schedule.num_slices) != schedule.num_micro_batches:
        orders = f"{len(schedule.orders)} orders for {schedule.num_stages} stages"
        counts = f"{len(schedule.num_slices)} slice counts for {schedule.num_micro_batches} micro-batches"
        raise ScheduleError(f"schedule {schedule.name!r}: {orders}, {counts}; give one of each")
    places = {(s, c) for s in range(schedule.num_stages) for c in range(schedule.chunks_per_stage)}
    parts = set(schedule.placement.values())
    if set(schedule.placement) != places or parts != set(range(len(parts))):
        fix = "give every (stage, chunk) a part, and number the parts from 0 without a gap"
        raise ScheduleError(f"schedule {schedule.name!r}: the placement is {schedule.placement}; {fix}")
    for stage_id, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            if problem := _misplaced(schedule, stage_id, action):
                schedule.fail_at(f"{action} cannot stand here, {problem}", stage_id, index)


def _misplaced(schedule: Schedule, stage_id: int, action: Action) -> str:
    if action.kind not in COMPUTE_KINDS:
        return "an order holds computations (F, B, W) only and lowering adds the rest"
    if schedule.forward_only and action.kind is not Kind.FORWARD:
        return "a forward-only schedule has forwards only"
    if not 0 <= action.micro_batch_id < schedule.num_micro_batches:
        return f"there are {schedule.num_micro_batches} micro-batches"
    if not 0 <= action.slice_id < schedule.num_slices[action.micro_batch_id]:
        return f"micro-batch {action.micro_batch_id} has {schedule.num_slices[action.micro_batch_id]} slices"
    if not 0 <= action.chunk_id < schedule.chunks_per_stage:
        return f"stages have {schedule.chunks_per_stage} chunks"
    part_id = schedule.placement[stage_id, action.chunk_id]
    if action.part_id != part_id:
        return f"it names part {action.part_id} but chunk {action.chunk_id} of this stage is part {part_id}"
    return ""


def _check_once(schedule: Schedule) -> None:
    seen: set[ComputeKey] = set()
    homes: dict[tuple[int, int], tuple[int, int]] = {}  # (part, micro-batch) -> (stage, chunk)
    for stage_id, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            if action.key in seen:
                schedule.fail_at(f"{action} of part {action.part_id} runs a second time: drop it", stage_id, index)
            seen.add(action.key)
            home = homes.setdefault((action.part_id, action.micro_batch_id), (stage_id, action.chunk_id))
            if home != (stage_id, action.chunk_id):
                where = f"at stage {home[0]}, chunk {home[1]}"
                reason = f"part {action.part_id} has units of micro-batch {action.micro_batch_id} {where}"
                schedule.fail_at(f"{reason}, so {action} cannot run here: keep them at one place", stage_id, index)
    places = {part_id: place for place, part_id in reversed(schedule.placement.items())}
    kinds = [Kind.FORWARD] if schedule.forward_only else [Kind.FORWARD, Kind.BACKWARD]
    for part_id in range(schedule.num_parts):
        for micro_batch_id, count in enumerate(schedule.num_slices):
            stage_id, chunk_id = homes.get((part_id, micro_batch_id), places[part_id])
            for kind, slice_id in ((kind, slice_id) for kind in kinds for slice_id in range(count)):
                if (kind, part_id, micro_batch_id, slice_id) not in seen:
                    unit = Action(kind, micro_batch_id, slice_id, part_id, chunk_id)
                    index = _first_in_need(schedule, stage_id, unit.key)
                    schedule.fail_at(f"{unit} of part {part_id} is missing: add it before", stage_id, index)


def _first_in_need(schedule: Schedule, stage_id: int, key: ComputeKey) -> int:
    """Return the place where a stage first needs the result of a missing computation; past the end if nowhere."""
    order = schedule.orders[stage_id]
    needs = (set(_needs(schedule, action)) for action in order)
    return next((index for index, keys in enumerate(needs) if key in keys), len(order))


def _check_stage_order(schedule: Schedule, stage_id: int) -> None:
    """Check the dependencies within one part, which show as a wrong order rather than as a deadlock."""
    done: set[ComputeKey] = set()
    for index, action in enumerate(schedule.orders[stage_id]):
        for key in _needs(schedule, action):
            kind, part_id, micro_batch_id, slice_id = key
            if part_id == action.part_id and key not in done:
                first = Action(kind, micro_batch_id, slice_id, part_id, action.chunk_id)
                schedule.fail_at(f"{action} runs before {first}: {_rule(action, first)}; swap them", stage_id, index)
        done.add(action.key)


def _rule(action: Action, first: Action) -> str:
    if action.kind is not first.kind:
        return "each F comes before its B, and each B before its W"
    direction = "slice order" if action.kind is Kind.FORWARD else "reverse slice order"
    return f"within a micro-batch {action.kind.value} runs in {direction}"


def _check_messages(schedule: Schedule) -> None:
    """Check that each link carries its messages in the order in which they are awaited."""
    from terapipe_ds.schedule.proofs import senders_by_link

    nodes, actions = schedule.nodes, [action for order in schedule.orders for action in order]
    for senders in senders_by_link(nodes):
        takers = nodes.outputs[senders]
        for number, (sender, taker, next_taker) in enumerate(zip(senders, takers, sorted(takers), strict=True)):
            if taker != next_taker:
                source, stage_id = int(nodes.stage[sender]), int(nodes.stage[taker])
                sent, received = message(actions[sender], stage_id), message(actions[next_taker], source, receives=True)
                reason = f"{received} is message {number} of its link, but stage {source} sends {sent} there"
                schedule.fail_at(f"{reason}: give both the same order", stage_id, next_taker - nodes.first[stage_id])


def _check_waits(schedule: Schedule) -> None:
    """Check that no stages wait for one another for ever."""
    at = [len(starts) for starts in schedule.nodes.slots()]
    done = {action.key for order, ran in zip(schedule.orders, at, strict=True) for action in order[:ran]}
    waits = {
        stage_id: next(key for key in _needs(schedule, order[ran]) if key not in done)
        for stage_id, (order, ran) in enumerate(zip(schedule.orders, at, strict=True))
        if ran < len(order)
    }
    if not waits:
        return
    # follow the waiting stages until one comes up again, and show that circle
    homes = {action.key: stage_id for stage_id, order in enumerate(schedule.orders) for action in order}
    chain = [min(waits)]
    while chain.count(chain[-1]) < 2:
        chain.append(homes[waits[chain[-1]]])
    circle = chain[chain.index(chain[-1]) : -1]
    steps = []
    for stage_id in circle:
        kind, part_id, micro_batch_id, slice_id = waits[stage_id]
        needed = f"{kind.value}{micro_batch_id}.{slice_id} of part {part_id} (stage {homes[waits[stage_id]]})"
        steps.append(f"stage {stage_id} holds {schedule.orders[stage_id][at[stage_id]]} until {needed}")
    reason = f"deadlock, no stage can go on: {', '.join(steps)}; move one of them before what it waits for"
    schedule.fail_at(reason, circle[0], at[circle[0]])
