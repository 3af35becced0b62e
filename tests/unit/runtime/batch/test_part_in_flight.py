"""The books of a stage: how long the memory of a slice lives (the table of `PartInFlight`), and what is left."""

from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.attention import SliceStore
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import in_flight
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Action, Kind

PLAN = SlicePlan((4, 2))
KEY = (1, 0, 0)


def part(
    schedule: str = "seq1f1b", training: bool = True, is_first: bool = False, is_last: bool = False, sends: bool = True
) -> in_flight.PartInFlight:
    """Part 1 of two, on stage 1, with all of F of slice 0 kept."""
    tokens = SliceableTensors.of_labels(torch.zeros(1, 6, dtype=torch.int64), 1)
    micro_batch = in_flight.MicroBatchInFlight(PLAN, MicroBatchShape(1, 6), tokens, tokens)
    batch = in_flight.BatchInFlight(build(schedule, 2, 1, 2, forward_only=not training), 1, training, [micro_batch])
    place = Place(1, is_first=is_first, is_last=is_last)
    slices = in_flight.PartInFlight(batch, place, mock.create_autospec(SliceStore, instance=True), sends, sends)
    slices.keep(Action(Kind.FORWARD, 0, 0), (torch.zeros(()),), torch.ones(()), torch.ones(()))
    return slices


def finish(slices: in_flight.PartInFlight, *kinds: Kind, slice_id: int = 0) -> None:
    for kind in kinds:
        slices.finish(Action(kind, 0, slice_id))


def test_a_slice_lives_from_its_forward_until_its_gradients_are_sent() -> None:
    slices = part()
    finish(slices, Kind.FORWARD, Kind.SEND_ACTIVATION)
    assert slices.batch.get(KEY).outputs is not None
    finish(slices, Kind.BACKWARD)
    kept = slices.batch.get(KEY)
    assert kept.outputs is None and kept.loss is None and len(kept.inputs) == 1
    finish(slices, Kind.SEND_GRAD)
    with pytest.raises(in_flight.InFlightError, match=r"slice 0\.0 is not live"):
        finish(slices, Kind.SEND_GRAD)


F, B, W, SA, SG = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.SEND_ACTIVATION, Kind.SEND_GRAD


@pytest.mark.parametrize(("options", "kinds"), [
    ({"schedule": "seq1f1b-zb"}, (F, B, SG, W)),
    ({"schedule": "seq1f1b-zb", "sends": False}, (F, B, W)),
    ({"is_last": True, "sends": False}, (F, B)),
    ({"training": False}, (F, SA)),
    ({"training": False, "sends": False}, (F,)),
])  # fmt: skip
def test_a_slice_ends_with_its_last_action(options: dict[str, Any], kinds: tuple[Kind, ...]) -> None:
    slices = part(**options)
    kept = slices.batch.get(KEY)
    assert (kept.outputs is None) == (kept.loss is not None) == ("is_last" in options)
    finish(slices, *kinds[:-1])
    assert KEY in slices.batch.slices and (slices.batch.get(KEY).inputs == ()) == (W in kinds)
    finish(slices, kinds[-1])
    assert slices.batch.slices == {}


def test_the_last_part_keeps_nothing_of_an_evaluation() -> None:
    assert part(training=False, is_last=True).batch.slices == {}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, True), (False, False)])
def test_inputs_labels_keys_and_values_of_a_micro_batch(training: bool, is_first: bool, is_last: bool) -> None:
    slices = part(training=training, is_first=is_first, is_last=is_last)
    [micro_batch] = slices.batch.micro_batches
    released = slices.store.release  # type: ignore[attr-defined]
    finish(slices, Kind.FORWARD)
    assert micro_batch.inputs is not None and micro_batch.labels is not None and not released.called
    slices.keep(Action(Kind.FORWARD, 0, 1), (), torch.ones(()), torch.ones(()))
    finish(slices, Kind.FORWARD, slice_id=1)
    assert (micro_batch.inputs is None, micro_batch.labels is None) == (is_first, is_last)
    assert released.called != training
    if training:
        finish(slices, Kind.BACKWARD, slice_id=1)
        assert not released.called
        finish(slices, Kind.BACKWARD)
    released.assert_called_once_with(1, 0)


def test_a_batch_keeps_slices_by_unit_and_ends_with_none() -> None:
    batch = part(training=True).batch
    a_slice = in_flight.SliceInFlight((), torch.zeros(()))
    with pytest.raises(in_flight.InFlightError, match=r"F0\.0 ran twice on stage 1"):
        batch.put(KEY, a_slice)
    batch.put((1, 0, 1), a_slice)
    assert batch.get((1, 0, 1)) is a_slice and batch.get(KEY) is not a_slice
    batch.drop((1, 0, 1))
    for missing in (batch.get, batch.drop):
        with pytest.raises(in_flight.InFlightError, match=r"slice 0\.1 is not live on stage 1"):
            missing((1, 0, 1))
    with pytest.raises(in_flight.InFlightError, match=r"stage 1 still holds slices \[\(1, 0, 0\)\]"):
        batch.assert_done(expected_peak=2)
    batch.drop(KEY)
    batch.put(KEY, a_slice)
    batch.drop(KEY)
    batch.assert_done(expected_peak=2)
    for wrong in (1, 3):
        with pytest.raises(in_flight.InFlightError, match=f"held 2 live slices at once, the schedule says {wrong}"):
            batch.assert_done(expected_peak=wrong)


def test_slices_join_until_a_rank_has_4096_rows() -> None:
    """Of two sequences of 4,096 tokens in slices of 1,024, which one, two or four ranks divide."""
    micro_batch = in_flight.MicroBatchInFlight(SlicePlan((1024,) * 4), MicroBatchShape(2, 4096))
    batch = in_flight.BatchInFlight(build("seq1f1b", 1, 1, 4), 0, True, [micro_batch])
    joined = [sorted(sorted(s for *_, s in group) for group in batch.weight_groups(ranks)) for ranks in (1, 2, 4)]
    assert joined == [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]]


def test_packed_rows_run_other_kernels() -> None:
    """Two batches that differ in nothing else: the first of each kind may load kernels, which waits for the device."""

    def kinds(starts: Any) -> Any:
        shape = MicroBatchShape(1, 6, starts)
        return in_flight.BatchInFlight(
            build("terapipe", 1, 1, PLAN.num_slices), 0, True, [in_flight.MicroBatchInFlight(PLAN, shape)]
        ).kinds()

    assert kinds(((0, 2),)) == kinds(((0, 3),)) != kinds(None)
