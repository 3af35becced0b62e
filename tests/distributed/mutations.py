"""Broken implementations, patched into the ranks for one training run: the comparison has to notice each.

A mutation replaces names of the package. Where such a name is gone the patch fails, and with it the test:
mend the mutation then, so that it breaks the same thing in the new place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.distributed.cases import Case
from tests.distributed.compare import RankRecord

Mutation = Callable[[], contextlib.AbstractContextManager[None]]


def train_mutated(case: Case, mutation: str) -> RankRecord:
    """`train_case` by our engine, broken, and without its own check of the first batch: it would refuse wrong weights,
    and it is the comparison that is looked at. Called on every rank."""
    from terapipe_ds.runtime.verify import FirstBatchCheck
    from tests.distributed.training import train_case

    with MUTATIONS[mutation](), mock.patch.object(FirstBatchCheck, "run", lambda *arguments: None):
        return train_case(case, system="terapipe")


@contextlib.contextmanager
def backward_in_forward_order() -> Iterator[None]:
    """The backwards of a micro-batch begin with its first slice; the proof that refuses this is skipped."""
    from terapipe_ds.runtime.planning import batch_plans

    build = batch_plans.build

    def build_wrong(*args: Any, **kwargs: Any) -> Any:
        schedule = build(*args, **kwargs)
        return replace(schedule, orders=tuple(_slices_ascending(order) for order in schedule.orders))

    with mock.patch.object(batch_plans, "build", build_wrong), mock.patch.object(batch_plans, "validate"):
        yield


def _slices_ascending(order: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same order, with the backwards of each micro-batch in the order of their slices."""
    from terapipe_ds.schedule import Kind

    places: dict[int, list[int]] = {}
    for index, action in enumerate(order):
        if action.kind is Kind.BACKWARD:
            places.setdefault(action.micro_batch_id, []).append(index)
    changed = list(order)
    for indices in places.values():
        actions = sorted((order[index] for index in indices), key=lambda action: action.slice_id)
        for index, action in zip(indices, actions, strict=True):
            changed[index] = action
    return tuple(changed)


@contextlib.contextmanager
def backward_in_forward_order_unnoticed() -> Iterator[None]:
    """The same without the slice store's checks: accumulators start at zero, as is usual where nothing guards
    the order, and micro-batches are released at the end of the batch.
    """
    from terapipe_ds.attention.slice_store import SliceStore

    release, begin_backward = SliceStore.release, SliceStore.begin_backward

    def begin_with_zeros(self: Any, entry: Any, start: int, stop: int) -> None:
        fresh = entry.grads is None
        begin_backward(self, entry, start, stop)
        if fresh:
            entry.grads.zero_()

    def release_in_evaluation(self: Any, part_id: int, micro_batch_id: int) -> None:
        if all(entry.mode != "train" for entry in self._entries[part_id, micro_batch_id].values()):
            release(self, part_id, micro_batch_id)

    with (
        backward_in_forward_order(),
        mock.patch.object(SliceStore, "_check_backward"),
        mock.patch.object(SliceStore, "begin_backward", begin_with_zeros),
        mock.patch.object(SliceStore, "release", release_in_evaluation),
        mock.patch.object(SliceStore, "assert_drained", SliceStore.reset),
    ):
        yield


@contextlib.contextmanager
def missing_position_offset() -> Iterator[None]:
    """Rotary positions count from 0 in every slice."""
    from terapipe_ds.models import gpt

    with mock.patch.object(gpt, "_first_position", lambda: 0):
        yield


@contextlib.contextmanager
def dropped_kv_gradient() -> Iterator[None]:
    """What a slice gives to the gradients of its prefix's keys and values gets lost."""
    from terapipe_ds.attention.slice_store import SliceEntry

    add_grads = SliceEntry.add_grads

    def add_own_grads(self: Any, offset: int, dk: Any, dv: Any, *args: Any, **kwargs: Any) -> None:
        dk, dv = dk.clone(), dv.clone()
        for tensor in (dk, dv):
            tensor[:, :, : max(0, self.frontier - offset)] = 0  # the slice in backward begins at the frontier
        add_grads(self, offset, dk, dv, *args, **kwargs)

    with mock.patch.object(SliceEntry, "add_grads", add_own_grads):
        yield


@contextlib.contextmanager
def unweighted_losses() -> Iterator[None]:
    """The loss of a micro-batch is the plain mean of its slices' losses (of those that have a label)."""
    from terapipe_ds.runtime.engine import incoming_batch

    slice_weights = incoming_batch.slice_weights

    def equal_weights(*args: Any, **kwargs: Any) -> tuple[float, ...]:
        weights = slice_weights(*args, **kwargs)
        counted = sum(weight > 0 for weight in weights)
        return tuple(1.0 / counted if weight > 0 else 0.0 for weight in weights)

    with mock.patch.object(incoming_batch, "slice_weights", equal_weights):
        yield


@contextlib.contextmanager
def dropped_weight() -> Iterator[None]:
    """The W of one slice adds nothing to the gradients."""
    from terapipe_ds.runtime.layers.weight_gradients import WeightGradients

    compute = WeightGradients.compute

    def compute_less(self: Any, unit: tuple[int, int, int], around: Any) -> int:
        if unit[1:] == (1, 2):
            return len(self._waiting.pop(unit))
        return compute(self, unit, around)

    with mock.patch.object(WeightGradients, "compute", compute_less):
        yield


@contextlib.contextmanager
def weight_twice() -> Iterator[None]:
    """The W of one slice adds its gradients twice."""
    from terapipe_ds.runtime.layers.weight_gradients import WeightGradients

    compute = WeightGradients.compute

    def compute_more(self: Any, unit: tuple[int, int, int], around: Any) -> int:
        if unit[1:] == (1, 2):
            kept = list(self._waiting[unit])
            compute(self, unit, around)
            self._waiting[unit] = kept
        return compute(self, unit, around)

    with mock.patch.object(WeightGradients, "compute", compute_more):
        yield


@contextlib.contextmanager
def _lowered(change: Callable[[list[Any], int], list[Any]]) -> Iterator[None]:
    """The last W of every stage, at its index in what the engine runs, is changed; the proof is skipped."""
    from terapipe_ds.runtime.planning import batch_plans
    from terapipe_ds.schedule import Kind, Schedule

    for_stage = Schedule.for_stage

    def changed(self: Any, stage_id: int) -> Any:
        stage = for_stage(self, stage_id)
        actions = list(stage.actions)
        places = [index for index, action in enumerate(actions) if action.kind is Kind.WEIGHT]
        return replace(stage, actions=tuple(change(actions, places[-1]) if places else actions))

    with mock.patch.object(Schedule, "for_stage", changed), mock.patch.object(batch_plans, "validate"):
        yield


def weight_before_backward() -> contextlib.AbstractContextManager[None]:
    """A W runs before the B of its slice."""
    from terapipe_ds.schedule import Kind

    def swap(actions: list[Any], index: int) -> list[Any]:
        weight = actions.pop(index)
        backward = next(i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD and a.unit == weight.unit)
        return [*actions[:backward], weight, *actions[backward:]]

    return _lowered(swap)


def weight_runs_twice() -> contextlib.AbstractContextManager[None]:
    """A W stands twice."""
    return _lowered(lambda actions, index: [*actions[: index + 1], *actions[index:]])


def weight_never_runs() -> contextlib.AbstractContextManager[None]:
    """A W is missing."""
    return _lowered(lambda actions, index: actions[:index] + actions[index + 1 :])


MUTATIONS: dict[str, Mutation] = {
    "none": contextlib.nullcontext,
    "backward_in_forward_order": backward_in_forward_order,
    "backward_in_forward_order_unnoticed": backward_in_forward_order_unnoticed,
    "missing_position_offset": missing_position_offset,
    "dropped_kv_gradient": dropped_kv_gradient,
    "unweighted_losses": unweighted_losses,
    "dropped_weight": dropped_weight,
    "weight_twice": weight_twice,
    "weight_before_backward": weight_before_backward,
    "weight_runs_twice": weight_runs_twice,
    "weight_never_runs": weight_never_runs,
}
