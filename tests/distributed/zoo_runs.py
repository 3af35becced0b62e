"""One member of the zoo on the ranks: in the stock engine with one stage and two, then in slices with the defaults,
then in slices without any check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from terapipe_ds.attention import allow_attention_within_slice
from terapipe_ds.runtime.batch import source as terapipe_data
from terapipe_ds.runtime.engine import build as engine_build
from terapipe_ds.runtime.verify import FirstBatchCheck
from tests.distributed.engines import Batch, Run, build, differences, section, train
from tests.zoo import ZOO, Member
from tests.zoo.layers import torch_attention

STEPS = 2
SLICES = {"slices": 4}  # more than the check looks at, which takes three of its own


@dataclass
class Seen:
    """Of one member, on one rank."""

    stock: dict[str, float]  # how far two stages of the stock engine are from one
    sliced: dict[str, float] = field(default_factory=dict)  # how far slices with the defaults are from stock
    unguarded: dict[str, float] = field(default_factory=dict)  # how far slices without any check are
    error: str = ""  # the class of the refusal
    text: str = ""
    untouched: bool = True  # no step was made before the refusal, and the parameters are as they were
    warnings: tuple[str, ...] = ()


def look_at(name: str) -> Seen:
    """Train the member; a refusal leaves this rank ready for the next one."""
    member = ZOO[name]
    data = [[member.data(100 * step + index) for index in range(2)] for step in range(STEPS)]
    with torch_attention():
        one, two = (_trained(member, None, data, stages=stages) for stages in (1, 2))
    seen = Seen(differences(two, one))
    _try_slices(member, data, two, seen)
    if member.says and not member.stops:
        with nothing_is_checked():
            ours = _trained(member, section(**{**SLICES, **member.terapipe}), data)
        seen.unguarded = differences(ours, two)
    return seen


def _try_slices(member: Member, data: list[Batch], stock: Run, seen: Seen) -> None:
    """With the defaults of the section."""
    engine, before = None, {}
    try:
        engine = _build(member, section(**{**SLICES, **member.terapipe}))
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        seen.sliced = differences(train(engine, data), stock)
    except Exception as error:
        seen.error, seen.text = type(error).__name__, str(error)
        if engine is not None:
            same = all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
            seen.untouched = same and engine.global_steps == 0
    finally:
        if engine is not None:
            engine.destroy()


def _build(member: Member, terapipe: dict[str, Any] | None, stages: int = 2) -> Any:
    return build(member.layers, terapipe, stages=stages, loss_fn=member.loss_fn, **member.engine)


def _trained(member: Member, terapipe: dict[str, Any] | None, data: list[Batch], stages: int = 2) -> Run:
    engine = _build(member, terapipe, stages)
    try:
        return train(engine, data)
    finally:
        engine.destroy()


@contextlib.contextmanager
def nothing_is_checked() -> Iterator[None]:
    """Slices run whatever they give: no layer is refused by its type, no attention by its shapes, no input by its size,
    and nothing is compared."""
    with (
        mock.patch.object(engine_build, "problem_of_layers", lambda engine: None),
        mock.patch.object(FirstBatchCheck, "run", lambda *arguments: None),
        mock.patch.object(terapipe_data, "check_found", lambda *arguments: None),
        allow_attention_within_slice(),
    ):
        yield
