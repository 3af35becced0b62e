"""Which batches go by way of the host, where CUDA may load kernels while receives wait on the device."""

import random
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.attention.backends.first_use import builds_plans
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.links.queues import loads_kernels_at_start
from terapipe_ds.runtime.links.stage_links import BATCHES_BY_HOST, StageLinks
from terapipe_ds.schedule import build, placement_for


def batch(
    lengths: list[int], training: bool = True, name: str = "seq1f1b", starts: Any = None, slices: int = 2,
    with_logits: bool = False, rows: int = 2,
) -> BatchInFlight:  # fmt: skip
    schedule = build(name, 1, len(lengths), slices, forward_only=not training)
    plans = [SlicePlan.equal(length, slices, 1) for length in lengths]
    shapes = [MicroBatchShape(rows, length, starts, with_logits) for length in lengths]
    parts = [MicroBatchInFlight(plan, shape) for plan, shape in zip(plans, shapes, strict=True)]
    return BatchInFlight(schedule, 0, training, parts)


def by_host(links: StageLinks, *batches: BatchInFlight) -> list[bool]:
    went = []
    for each in batches:
        went.append(links.goes_by_host(each))
        links.open_batch(each)
        links.close_batch()
    return went


def links_on_device(compiles: bool = False, **wires: bool) -> StageLinks:
    with mock.patch.object(Wires, "post_on_device", True):
        return StageLinks(Wires({}, **wires), Layout(1, placement_for("1f1b", 1, 1)), 0, compiles=compiles)


@pytest.fixture
def links() -> StageLinks:
    return links_on_device()


def test_lengths_between_those_that_have_run_are_no_other_kind(links: StageLinks) -> None:
    draw = random.Random(0)
    lengths = [[draw.randint(16, 8192) for _ in range(4)] for _ in range(1000)]
    bounds = zip(accumulate(map(min, lengths), min), accumulate(map(max, lengths), max), strict=True)
    is_beyond = [min(now) < least or max(now) > most for now, (least, most) in zip(lengths[1:], bounds, strict=False)]
    went = by_host(links, *map(batch, lengths))
    beyond = [index < BATCHES_BY_HOST or each for index, each in enumerate([True, *is_beyond])]
    assert all(host >= needed for host, needed in zip(went, beyond, strict=True))
    assert sum(beyond) <= sum(went) and sum(went) / len(went) == links.host_share <= 0.01


def kept(links: StageLinks, *batches: BatchInFlight) -> list[str]:
    """Return for each batch who may build plans of cuDNN: this package, torch, both or none."""
    found = []
    for each in batches:
        links.open_batch(each)
        with links.plans_kept():
            who = {"here": builds_plans(), "torch": torch.backends.cuda.cudnn_sdp_enabled()}
        found.append(" ".join(name for name, may in who.items() if may))
        links.close_batch()
    assert builds_plans() and torch.backends.cuda.cudnn_sdp_enabled()
    return found


def test_cudnn_builds_no_plan_behind_receives(links: StageLinks) -> None:
    """The second size has none, and loads the kernels of all without; then each may have some in its time."""
    first, second, third, between = (batch([length]) for length in (8, 16, 8192, 100))
    assert kept(links, first, first, second, third) == ["here torch", "here torch", "", "here torch"]
    assert kept(links, first, second, third, between) == ["torch", "", "torch", ""]
    assert set(kept(links, *[first] * 500)) == {"torch"}
    assert kept(links, between, between, second, second) == ["here torch", "torch", "here torch", "torch"]
    assert kept(links, batch([101])) == [""]
    assert kept(links, batch([9000])) == ["here torch"]
    links.expect_new_kernels()
    assert kept(links, batch([101])) == ["here torch"]


def test_the_kernels_that_take_the_place_of_cudnn_load_in_a_batch_by_host(links: StageLinks) -> None:
    """The first batches may have the least and the largest sizes already: no later one is beyond them."""
    widest, between = batch([8, 32]), batch([16, 16])
    assert by_host(links, *[widest] * 3, between, batch([20, 20])) == [True] * 4 + [False]
    assert kept(links, between) == [""]


def test_sizes_with_plans_load_no_other_kernels_beside_sizes_without(links: StageLinks) -> None:
    """Slices of a shape that has a plan keep to cuDNN."""
    by_host(links, *[batch([8, 32])] * 3, *[batch([63], slices=1)] * 3)
    both = batch([8, 32, 32])
    both.micro_batches[0] = batch([65], slices=1).micro_batches[0]
    assert by_host(links, both, batch([16, 16])) == [True, True]


def test_a_batch_of_two_kinds_has_plans_for_both_or_none(links: StageLinks) -> None:
    kept(links, batch([64]), batch([640]), batch([63], slices=1))
    both = batch([64, 640])
    both.micro_batches[0] = batch([65], slices=1).micro_batches[0]
    assert kept(links, both, batch([640])) == ["", ""]


def test_without_receives_on_a_device_cudnn_builds_plans() -> None:
    links = StageLinks(Wires({}), Layout(1, placement_for("1f1b", 1, 1)), 0)
    assert set(kept(links, *[batch([16 * n]) for n in range(1, 9)])) == {"here torch"}


@pytest.mark.parametrize(
    "now",
    [
        {"lengths": [24]},
        {"lengths": [8]},
        {"lengths": [16], "slices": 4},
        {"lengths": [16], "rows": 1},
        {"lengths": [16], "rows": 3},
    ],
)
def test_sizes_beyond_those_are(links: StageLinks, now: dict[str, Any]) -> None:
    """A window that is as long as a sequence limits nothing: the first longer one has other kernels, compiled anew."""
    assert by_host(links, *[batch([16])] * BATCHES_BY_HOST, *[batch(**now)] * 2)[-2:] == [True, False]


@pytest.mark.parametrize(
    "other",
    [{"training": False}, {"name": "terapipe"}, {"starts": ((0, 4), (0, 6))}, {"slices": 1}, {"with_logits": True}],
)
def test_another_mode_schedule_packing_whole_sequences_or_logits_are(links: StageLinks, other: dict[str, Any]) -> None:
    assert by_host(links, *[batch([16])] * (BATCHES_BY_HOST + 1))[-1] is False
    assert by_host(links, *[batch([16], **other)] * (BATCHES_BY_HOST + 1)) == [True] * BATCHES_BY_HOST + [False]


def test_the_next_ones_do_after_a_change_of_the_model(links: StageLinks) -> None:
    assert by_host(links, *[batch([16])] * (BATCHES_BY_HOST + 1))[-1] is False
    links.expect_new_kernels()
    assert by_host(links, *[batch([16])] * (BATCHES_BY_HOST + 1)) == [True] * BATCHES_BY_HOST + [False]


def test_one_of_a_kind_does_where_all_ranks_have_loaded_kernels_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles the kernels that no process can load at its start."""
    eager = links_on_device(loads_at_start=True)
    assert by_host(eager, *[batch([16])] * 2, *[batch([24])] * 2) == [True, False, True, False]
    compiled = links_on_device(compiles=True, loads_at_start=True)  # in their second batch
    assert by_host(compiled, *[batch([16])] * 4) == [True] * BATCHES_BY_HOST + [False]
    links = links_on_device()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # of this rank alone
    assert by_host(links, *[batch([16])] * 2) == [True, True] and loads_kernels_at_start()


def test_without_a_device_there_is_no_share() -> None:
    assert StageLinks(Wires({}), Layout(1, placement_for("1f1b", 1, 1)), 0).host_share is None
