"""Test the zoo: small models and losses, each right in the stock engine. With the defaults each trains in slices as
there, or every rank refuses it before the first step and names the problem."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.attention import allow_attention_within_slice
from terapipe_ds.runtime.batch import source as terapipe_data
from terapipe_ds.runtime.engine import build as engine_build
from terapipe_ds.runtime.layers.sliceable import OutsideLayers
from terapipe_ds.runtime.verify import FirstBatchCheck
from tests.distributed.engines import (
    EXACT,
    Batch,
    Run,
    differences,
    engine_of,
    of_rank_0,
    raised_by,
    run_training,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool
from tests.zoo import ZOO, Member

STEPS = 2
SLICES = {"slices": 4}  # more than the check looks at, which takes three of its own


@dataclass
class Seen:
    """Hold the results of one member, on one rank."""

    stock: dict[str, float]  # how far two stages of the stock engine are from one
    sliced: dict[str, float] = field(default_factory=dict)  # how far slices with the defaults are from stock
    unguarded: dict[str, float] = field(default_factory=dict)  # how far slices without any check are
    error: str = ""  # the class of the refusal
    text: str = ""
    untouched: bool = True  # no step was made, and the parameters are unchanged


def look_at(name: str) -> Seen:
    """Train the member; a refusal leaves this rank ready for the next one."""
    member = ZOO[name]
    data = [[member.data(100 * step + index) for index in range(2)] for step in range(STEPS)]
    one, two = (_trained(member, None, data, stages=stages) for stages in (1, 2))
    seen = Seen(differences(two, one))
    seen.error, seen.text = raised_by(lambda: _try_slices(member, data, one, seen))
    if member.says and not member.stops:
        with nothing_is_checked():
            ours = _trained(member, section(**{**SLICES, **member.terapipe}), data)
        seen.unguarded = differences(ours, one)
    return seen


def _try_slices(member: Member, data: list[Batch], stock: Run, seen: Seen) -> None:
    """Train with the section's defaults. One stock stage has the parameters that a rank has under any schedule."""
    options = {"loss_fn": copy.deepcopy(member.loss_fn), **member.engine}
    with engine_of(member.layers, section(**{**SLICES, **member.terapipe}), **options) as engine:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        try:
            seen.sliced = differences(train(engine, data), stock)
        finally:
            same = all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
            seen.untouched = same and engine.global_steps == 0


def _trained(member: Member, terapipe: dict[str, Any] | None, data: list[Batch], stages: int = 2) -> Run:
    options = {"loss_fn": copy.deepcopy(member.loss_fn), "stages": stages, **member.engine}
    return run_training(lambda: member.layers, terapipe, copy.deepcopy(data), **options)


@contextlib.contextmanager
def nothing_is_checked() -> Iterator[None]:
    """Run slices without checks: no layer is refused by its type, no attention by its shapes, no input by its size, and
    nothing is compared."""
    with (
        mock.patch.object(engine_build, "problem_of_layers", lambda *args: None),
        mock.patch.object(FirstBatchCheck, "run", lambda *arguments: None),
        mock.patch.object(OutsideLayers, "problem", lambda *arguments: None),
        mock.patch.object(terapipe_data, "check_sizes", lambda *arguments: None),
        allow_attention_within_slice(),
    ):
        yield


# -- the tests ----------------------------------------------------------------------------------------------------


WRONG = 1e-6  # by so much at least an unhealthy member differs where nothing checks it


def members(healthy: bool) -> list[str]:
    return [name for name, member in ZOO.items() if bool(member.says) != healthy]


def seen_of(member: Member) -> list[Seen]:
    """Return the results on both ranks; check first that the member belongs here."""
    seen = rank_pool(2).run(look_at, name=member.name)
    assert violations([each.stock for each in seen], EXACT) == {}, "two stages are not as one in the stock engine"
    return seen


def test_there_are_enough() -> None:
    assert len(members(healthy=False)) >= 80 and len(members(healthy=True)) >= 40


class TestTwoRanks:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("name", members(healthy=False))
    def test_unhealthy_is_refused(self, name: str) -> None:
        member = ZOO[name]
        seen = seen_of(member)
        assert [each.sliced for each in seen] == [{}, {}], "trained on"
        if member.error == "VerifyError":
            of_rank_0([(each.error, each.text) for each in seen])
        for each in seen[: 1 if member.error == "VerifyError" else None]:
            assert each.error == member.error, each.text
            assert [words for words in member.says if words not in each.text] == [], each.text
        assert all(each.untouched for each in seen)
        assert member.stops or violations([each.unguarded for each in seen], WRONG) != {}, "nothing is wrong with it"

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("name", members(healthy=True))
    def test_healthy_trains_as_in_the_stock_engine(self, name: str) -> None:
        seen = seen_of(ZOO[name])
        assert [(each.error, each.text) for each in seen] == [("", ""), ("", "")]
        assert all(each.sliced for each in seen) and violations([each.sliced for each in seen], ZOO[name].limit) == {}
