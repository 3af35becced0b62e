"""Which batches go by way of the host, where CUDA may load kernels while receives wait on the device."""

import random
from typing import Any
from unittest import mock

import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.links.stage_links import BATCHES_BY_HOST, StageLinks
from terapipe_ds.schedule import build, placement_for


def batch(
    lengths: list[int],
    training: bool = True,
    name: str = "seq1f1b",
    starts: Any = None,
    slices: int = 2,
    with_logits: bool = False,
) -> BatchInFlight:
    schedule = build(name, 1, len(lengths), slices, forward_only=not training)
    plans = [SlicePlan.equal(length, slices, 1) for length in lengths]
    shapes = [MicroBatchShape(2, length, starts, with_logits) for length in lengths]
    parts = [MicroBatchInFlight(plan, shape) for plan, shape in zip(plans, shapes, strict=True)]
    return BatchInFlight(schedule, 0, training, parts)


def by_host(links: StageLinks, *batches: BatchInFlight) -> list[bool]:
    went = []
    for each in batches:
        went.append(links.goes_by_host(each))
        links.open_batch(each)
        links.close_batch()
    return went


def links_on_device(**wires: bool) -> StageLinks:
    with mock.patch.object(Wires, "post_on_device", True):
        return StageLinks(Wires({}, **wires), Layout(1, placement_for("1f1b", 1, 1)), 0)


@pytest.fixture
def links() -> StageLinks:
    return links_on_device()


def test_other_lengths_are_no_other_kind(links: StageLinks) -> None:
    draw = random.Random(0)
    batches = [batch([draw.randint(16, 8192) for _ in range(4)]) for _ in range(1000)]
    went = by_host(links, *batches)
    assert went == [True] * BATCHES_BY_HOST + [False] * (1000 - BATCHES_BY_HOST)
    assert sum(went) / len(went) == links.host_share <= 0.01


@pytest.mark.parametrize(
    "other",
    [{"training": False}, {"name": "terapipe"}, {"starts": ((0, 4), (0, 6))}, {"slices": 1}, {"with_logits": True}],
)
def test_another_mode_schedule_packed_rows_whole_sequences_or_logits_are(
    links: StageLinks, other: dict[str, Any]
) -> None:
    assert by_host(links, *[batch([16])] * (BATCHES_BY_HOST + 1))[-1] is False
    assert by_host(links, *[batch([16], **other)] * (BATCHES_BY_HOST + 1)) == [True] * BATCHES_BY_HOST + [False]


def test_none_does_where_all_ranks_have_loaded_their_kernels_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_host(links_on_device(loads_at_start=True), batch([16])) == [False]
    links = links_on_device()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # of this rank alone
    assert by_host(links, batch([16])) == [True]


def test_without_a_device_there_is_no_share() -> None:
    assert StageLinks(Wires({}), Layout(1, placement_for("1f1b", 1, 1)), 0).host_share is None
