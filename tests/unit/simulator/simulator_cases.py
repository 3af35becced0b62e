"""What the tests of the simulator share: costs, memory, random cases, and a second computation of the times."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from terapipe_ds.plan import JOINED_ROWS, SlicePlan, weight_groups
from terapipe_ds.schedule import Action, Kind, Schedule
from tests.unit.schedule.schedule_cases import OTHER_KINDS, schedules


class Table:
    """Costs that are different for every pair, and that count how often they are asked."""

    METHODS = {"forward_s": ("f", 1.0), "backward_s": ("b", 2.0), "weight_s": ("w", 0.6), "send_s": ("s", 1.0)}

    def __init__(self, seed: int, send: bool = True) -> None:
        self.seed, self.sends, self.asked = seed, send, []  # type: int, bool, list[Any]
        for name, (kind, _) in self.METHODS.items():
            if send or kind != "s":
                setattr(self, name, functools.partial(self._ask, kind))

    def _ask(self, *key: Any) -> float:
        assert all(type(value) is int for value in key[1:])
        assert key not in self.asked
        self.asked.append(key)
        return self.seconds(*key)

    def seconds(self, kind: str, tokens: int, prefix: int = 0) -> float:
        """Between a half and one and a half of the kind's seconds, without counting."""
        if kind == "s" and not self.sends:
            return 0.0
        key = tokens, 0 if kind == "s" else prefix
        return dict(self.METHODS.values())[kind] * (0.5 + (hash((self.seed, ord(kind), *key)) % 1009) / 1009)


FEWEST_JOINED = 5  # tokens of slices whose weight gradients are one product

MEMORY: Any = SimpleNamespace(
    offloads=False,
    host_bytes_per_s=None,
    key_of=tuple,
    process_bytes=30_000_000,
    # a stage with the first part shares a matrix
    static_bytes=lambda *part_ids: sum(1_000_000 + part_id - 17 * (0 in part_ids) for part_id in part_ids),
    gradient_bytes=lambda *part_ids: sum(200_000 + part_id - 70 * (0 in part_ids) for part_id in part_ids),
    step_bytes=lambda *part_ids: sum(2 * part_id - 3 * (0 in part_ids) for part_id in part_ids),  # below slices' needs
    whole_bytes=lambda part_id, sequence_length: 2000 * sequence_length + part_id,
    store_bytes=lambda part_id, sequence_length: 1000 * sequence_length + part_id,
    store_grad_bytes=lambda part_id, sequence_length, largest: 3000 * sequence_length + 17 * largest + part_id,
    evaluation_bytes=lambda part_id, sequence_length, largest: 800 * sequence_length + 19 * largest + part_id,
    slice_bytes=lambda part_id, tokens, prefix: 500 * tokens + prefix + part_id,
    weight_bytes=lambda part_id, tokens, prefix: 90 * tokens + prefix,
    working_bytes=lambda part_id, tokens, prefix, is_whole: 70 * tokens + 11 * prefix + part_id + 5 * is_whole,
    sent_bytes=lambda part_id, tokens: 130 * tokens + part_id,
    joined_bytes=lambda part_id, tokens: 560 * tokens + part_id,
    factor_bytes=lambda part_id, tokens: 40 * tokens + part_id,
    product_bytes=lambda part_id, span, group_tokens, is_split: (
        21 * span[0] + 5 * span[1] + 13 * group_tokens + part_id + 9000 * is_split
    ),
    weight_groups=lambda part_id, lengths: weight_groups(lengths, JOINED_ROWS / FEWEST_JOINED),
)
"""Bytes that tell all kinds of things apart."""


@dataclasses.dataclass
class Case:
    """A schedule with all that a simulation takes."""

    schedule: Schedule
    plans: list[SlicePlan]
    costs: list[Table]  # one per part
    overlap: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    other = draw(st.sampled_from([None, None, None, *OTHER_KINDS.values()]))
    schedule = other() if other else draw(schedules(max_slices=4))
    lengths = st.integers(1, 5)
    plans = [SlicePlan(draw(st.lists(lengths, min_size=n, max_size=n))) for n in schedule.num_slices]
    seeds = draw(st.lists(st.integers(0, 99), min_size=schedule.num_parts, max_size=schedule.num_parts))
    made: dict[int, Table] = {}
    costs = [made.setdefault(seed, Table(seed, send=seed % 3 > 0)) for seed in seeds]  # equal seeds: the same object
    return Case(schedule, plans, costs, draw(st.booleans()))


def starts_and_ends(case: Case) -> dict[tuple[int, str], tuple[float, float]]:
    """(stage, action or "send of action") -> (start, end): every edge as written down in the rules, from the back.

    A recursion over what has to end before, with none of the simulator's order, numbering or state.
    """
    schedule = case.schedule
    at = {a.key: (stage, i) for stage, order in enumerate(schedule.orders) for i, a in enumerate(order)}
    split = {(a.part_id, a.unit) for order in schedule.orders for a in order if a.kind is Kind.WEIGHT}

    def seconds(stage: int, index: int, kind: str = "") -> float:
        action = schedule.orders[stage][index]
        start, stop = case.plans[action.micro_batch_id].span(action.slice_id)
        of = functools.partial(case.costs[action.part_id].seconds, tokens=stop - start, prefix=start)
        is_split = not kind and action.kind is Kind.BACKWARD and (action.part_id, action.unit) in split
        return of("b") - of("w") if is_split else of(kind or action.kind.value.lower())

    def other(stage: int, index: int, direction: int) -> tuple[int, int] | None:
        action = schedule.orders[stage][index]
        step = {"F": 1, "B": -1, "W": 99}[action.kind.value] * direction
        return at.get((action.kind, action.part_id + step, *action.unit))

    @functools.cache
    def compute(stage: int, index: int) -> tuple[float, float]:
        befores = [0.0]
        if index > 0:
            befores.append(compute(stage, index - 1)[1])
            if not case.overlap and leaves(stage, index - 1):
                befores.append(send(stage, index - 1)[1])
        source = other(stage, index, -1)
        if source is not None:
            befores.append(send(*source)[1] if source[0] != stage else compute(*source)[1])
        return max(befores), max(befores) + seconds(stage, index)

    def leaves(stage: int, index: int) -> bool:
        target = other(stage, index, 1)
        return target is not None and target[0] != stage

    @functools.cache
    def send(stage: int, index: int) -> tuple[float, float]:
        mine, target = schedule.orders[stage][index], other(stage, index, 1)
        assert target is not None
        begin = compute(stage, index)[1]
        for earlier in range(index - 1, -1, -1):
            a, to = schedule.orders[stage][earlier], other(stage, earlier, 1)
            if (a.kind, a.part_id) == (mine.kind, mine.part_id) and to is not None and to[0] == target[0]:
                begin = max(begin, send(stage, earlier)[1])
                break
        return begin, begin + seconds(stage, index, "s")

    found: dict[tuple[int, str], tuple[float, float]] = {}
    for stage, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            found[stage, str(action)] = compute(stage, index)
            if leaves(stage, index) and case.costs[action.part_id].sends:
                found[stage, f"send of {action}"] = send(stage, index)
    return found


def joined_with(lengths: Sequence[int], slice_id: int) -> list[int]:
    """The slices that share a product with one of them: each has fewer tokens after it in the group than suffice."""
    after = [sum(lengths[i + 1 :]) for i in range(len(lengths))]
    begins = [len(lengths) - 1]  # the last slice of each group, from the end of the sequence
    for i in reversed(range(len(lengths) - 1)):
        if after[i] - after[begins[-1]] >= FEWEST_JOINED:
            begins.append(i)
    begin = min(b for b in begins if b >= slice_id)
    return [i for i in range(len(lengths)) if min((b for b in begins if b >= i), default=-1) == begin]


def scanned_bytes(case: Case, stage: int, time_s: float, times: Sequence[tuple[float, float]]) -> int:
    """Bytes of a stage in a moment, each thing by its own rule; ``times`` of the stage's computations."""
    order, memory = case.schedule.orders[stage], MEMORY
    parts = {part for (home, _), part in case.schedule.placement.items() if home == stage}

    def indices(part: int, kinds: str, *unit: int) -> list[int]:
        mine = [(i, a) for i, a in enumerate(order) if a.part_id == part and a.kind.value in kinds]
        return [i for i, a in mine if a.unit[: len(unit)] == unit]

    place = {
        (a.kind, a.part_id, a.unit): (home, i)
        for home, each in enumerate(case.schedule.orders)
        for i, a in enumerate(each)
    }

    def other_end(action: Action, step: int) -> tuple[int, int]:
        """Where what an action gives (1) or takes (-1) is on another stage; else (-1, -1)."""
        step = {Kind.FORWARD: step, Kind.BACKWARD: -step}.get(action.kind, 10**6)
        home, index = place.get((action.kind, action.part_id + step, action.unit), (stage, -1))
        return (home, index) if home != stage else (-1, -1)

    def is_sent(i: int, now: float) -> bool:
        """Whether what `i` has sent may still be here: not heard of, not waited for, and the batch runs."""
        peer, taken = other_end(order[i], 1)
        if peer < 0 or not i < now <= len(order) - 1:
            return False
        heard = [j - 1 for j, a in enumerate(order) if j > i and other_end(a, -1) > (peer, taken)]
        heard = [j for j in heard if other_end(order[j + 1], -1)[0] == peer]
        link = order[i].kind, order[i].part_id, peer
        later = [k for k, a in enumerate(order) if now > k > i and (a.kind, a.part_id, other_end(a, 1)[0]) == link]
        return not any(now > j for j in heard) and len(later) < 8

    def lent(now: int) -> tuple[int, int]:
        """Keys and values, and their gradients, of the sliced micro-batches that need them while `now` runs."""
        stores = grads = 0
        for part, (m, plan) in itertools.product(parts, enumerate(case.plans)):
            running, backward = indices(part, "FB", m), indices(part, "B", m)
            length, largest = plan.sequence_length, max(plan.lengths)
            if plan.num_slices > 1 and running and running[0] <= now <= running[-1]:
                spans = (length, largest) if case.schedule.forward_only else (length,)
                of_store = memory.evaluation_bytes if case.schedule.forward_only else memory.store_bytes
                stores += of_store(part, *spans)
            if plan.num_slices > 1 and backward and backward[0] <= now <= backward[-1]:
                grads += memory.store_grad_bytes(part, length, largest)
        return stores, grads

    pooled = sum(map(max, zip(*map(lent, range(len(order))), strict=True))) if order else 0  # a pool gives nothing back

    def held(now: float) -> int:
        """While a computation runs `now` is its index, and half more once it has run."""
        total = memory.process_bytes + memory.static_bytes(*parts) + pooled
        for i, action in enumerate(order):
            if action.kind is (Kind.FORWARD if case.schedule.forward_only else Kind.BACKWARD) and is_sent(i, now):
                start, stop = case.plans[action.micro_batch_id].span(action.slice_id)
                total += memory.sent_bytes(action.part_id + case.schedule.forward_only, stop - start)
        begun = [part for part in parts if any(now > i for i in indices(part, "B"))]
        total += memory.gradient_bytes(*begun)
        for part in parts:
            for m, plan in enumerate(case.plans):
                running = indices(part, "FB", m)
                if plan.num_slices == 1 and running and running[0] <= now <= running[-1]:
                    total += memory.whole_bytes(part, plan.sequence_length)
                for s, (start, stop) in enumerate(plan.spans()):
                    of_slice, weight = indices(part, "FB", m, s), indices(part, "W", m, s)
                    if of_slice and of_slice[0] <= now <= of_slice[-1]:
                        total += memory.slice_bytes(part, stop - start, start)
                    if weight and of_slice[-1] < now <= weight[0]:
                        total += memory.weight_bytes(part, stop - start, start)
                    # then for those whose weight gradients are in the same product
                    whole = indices(part, "B", m, s)
                    tokens = stop - start
                    size = memory.weight_bytes(part, tokens, start) if weight else memory.joined_bytes(part, tokens)
                    ends = [indices(part, "W" if weight else "B", m, other) for other in joined_with(plan.lengths, s)]
                    if whole and (weight or whole)[0] < now <= max(end for (end,) in ends):
                        total += size
        return total

    def late(action: Action) -> int:
        """By how much products of weight gradients exceed the backward, or the W, of the last slice of a group."""
        plan, s = case.plans[action.micro_batch_id], action.slice_id
        others, part = joined_with(plan.lengths, s), action.part_id
        is_split = bool(indices(part, "W", *action.unit))
        if action.kind is not (Kind.WEIGHT if is_split else Kind.BACKWARD) or len(others) == 1:
            return 0
        last = max(others, key=lambda other: indices(part, action.kind.value, action.micro_batch_id, other))
        tokens = sum(plan.lengths[other] for other in others)
        return memory.product_bytes(part, (plan.lengths[s], plan.starts[s]), tokens, is_split) if s == last else 0

    for i, action in enumerate(order):
        if times[i][0] <= time_s < times[i][1]:
            start, stop = case.plans[action.micro_batch_id].span(action.slice_id)
            working = memory.working_bytes(
                action.part_id, stop - start, start, case.plans[action.micro_batch_id].num_slices == 1
            )
            twice = memory.factor_bytes(action.part_id, stop - start)  # as factors of W, and as working bytes
            if action.kind is Kind.BACKWARD and indices(action.part_id, "W", *action.unit):
                return max(held(i), held(i + 0.5) - twice) + working
            twice *= action.kind is Kind.WEIGHT
            return max(held(i) + late(action), held(i + 0.5)) + working - twice
    ended = sum(end_s <= time_s for _, end_s in times)
    steps = ended == len(order) and not case.schedule.forward_only
    return held(ended - 0.5) + steps * memory.step_bytes(*parts)
