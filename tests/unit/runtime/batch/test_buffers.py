"""The books of a stage: which slices are live, and that nothing is left."""

from __future__ import annotations

import pytest
import torch

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import (
    BatchInFlight,
    InFlightError,
    MicroBatchInFlight,
    OrderIndex,
    SliceInFlight,
)
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Kind

PLANS = (SlicePlan((4, 2)), SlicePlan((3, 3, 1)))
ROWS = (2, 5)


def batch(training: bool = True) -> BatchInFlight:
    schedule = build("seq1f1b", 2, 2, (2, 3), forward_only=not training)
    micro_batches = [
        MicroBatchInFlight(plan, MicroBatchShape(rows, plan.sequence_length))
        for plan, rows in zip(PLANS, ROWS, strict=True)
    ]
    return BatchInFlight(schedule, 1, training, micro_batches)


def a_slice() -> SliceInFlight:
    return SliceInFlight((), torch.zeros(()))


def test_slices_are_kept_by_unit() -> None:
    books = batch()
    kept = {unit: a_slice() for unit in ((1, 0, 0), (1, 1, 2), (1, 0, 1))}
    for unit, each in kept.items():
        books.put(unit, each)
    assert all(books.get(unit) is each for unit, each in kept.items())
    books.drop((1, 1, 2))
    with pytest.raises(InFlightError, match="slice 1.2 is not live on stage 1"):
        books.get((1, 1, 2))
    with pytest.raises(InFlightError, match="slice 1.2 is not live"):
        books.drop((1, 1, 2))


def test_a_forward_that_runs_twice() -> None:
    books = batch()
    books.put((1, 0, 0), a_slice())
    with pytest.raises(InFlightError, match="F0.0 ran twice on stage 1"):
        books.put((1, 0, 0), a_slice())


def test_the_peak_of_live_slices() -> None:
    books = batch()
    for unit in ((1, 0, 0), (1, 0, 1)):
        books.put(unit, a_slice())
    books.drop((1, 0, 1))
    books.put((1, 1, 0), a_slice())
    assert books.live_peak == 2
    for unit in ((1, 0, 0), (1, 1, 0)):
        books.drop(unit)
    books.assert_done(expected_peak=2)
    for wrong in (1, 3):
        with pytest.raises(InFlightError, match=f"held 2 live slices at once, the schedule says {wrong}"):
            books.assert_done(expected_peak=wrong)


def test_what_is_left_at_the_end() -> None:
    books = batch()
    books.put((1, 1, 1), a_slice())
    books.put((1, 0, 1), a_slice())
    with pytest.raises(InFlightError, match=r"stage 1 still holds slices \[\(1, 0, 1\), \(1, 1, 1\)\]"):
        books.assert_done(expected_peak=2)


def test_places_are_those_of_the_orders() -> None:
    schedule = build("seq1f1b", 3, 2, 2)
    places = OrderIndex(schedule)
    for stage_id, order in enumerate(schedule.orders):
        found = [places.find(stage_id, action.kind, action.part_id, action.unit) for action in order]
        assert found == list(range(len(order)))
    with pytest.raises(KeyError):
        places.find(0, Kind.FORWARD, 1, (0, 0))
