"""Measuring for "auto" and the check of the first batch leave training as it is: the bits of the same plan by hand.

What they cannot put back is named in a warning.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from terapipe_ds.runtime.planning import schedule_choice
from tests.distributed.engines import engine_of, error_of, logged, section, train
from tests.distributed.harness import rank_pool
from tests.distributed.test_planning import _with_few_rounds, cut_anyway
from tests.zoo import ZOO
from tests.zoo.layers import Embedding, Head, Mlp
from tests.zoo.training import LATE, CountedInPython, Mixed

CALLS = 0


class ByClass(CountedInPython):
    """Counts in an attribute of its class."""

    counted: ClassVar[int] = 0

    def before(self, x: Tensor) -> Tensor:
        ByClass.counted += 1
        return x.tanh() if ByClass.counted > LATE else x


class Steps:
    def __init__(self) -> None:
        self.taken = 0


class ByObject(CountedInPython):
    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()

    def before(self, x: Tensor) -> Tensor:
        self.steps.taken += 1
        return x.tanh() if self.steps.taken > LATE else x


class OwnNoise(Mixed):
    """Noise for each token, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(4)

    def before(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.own, dtype=x.dtype)


class ByGlobal(CountedInPython):
    def before(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x.tanh() if CALLS > LATE else x


class ByIterator(CountedInPython):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def before(self, x: Tensor) -> Tensor:
        return x.tanh() if next(self.numbers) >= LATE else x


STATE: dict[type[Mixed], tuple[str, str]] = {  # what is named after the trials as lost, and by the check as a counter
    CountedInPython: ("", "calls counts calls"),
    ByClass: ("", "ByClass.counted counts calls"),
    ByObject: ("", "steps.taken counts calls"),
    OwnNoise: ("", ""),
    ByGlobal: ("global variable CALLS", ""),
    ByIterator: (".numbers", ""),
}
HEALTHY = (
    "Sliced", "Alibi", "GatedHeads", "TwiceSliced", "ParallelBlock", "Checkpointed", "WholeDecoder", "OwnCheckpoint",
    "Experts", "InPlace", "LearnedSlots", "MaskedWeights", "ScaledGradient", "NoisyExperts", "CountedTokens",
)  # fmt: skip


def models() -> list[Any]:
    return [
        *STATE,
        *(each if each == "NoisyExperts" else pytest.param(each, marks=pytest.mark.full) for each in HEALTHY),
    ]


def _by_the_engine_and_by_hand(model: type[Mixed] | str) -> tuple[list[int], float, list[str]]:
    """Return the plan, how far the two trainings are from each other, and the warnings of the first."""
    global CALLS
    member = ZOO[model] if isinstance(model, str) else None
    layers = member.layers if member else [LayerSpec(each) for each in (Embedding, Mlp, model, Head)]
    options = {"loss_fn": (member or ZOO["Sliced"]).loss_fn, **(member.engine if member else {})}
    data = [[ZOO["Sliced"].data(100 * step + index) for index in range(2)] for step in range(2)]
    runs, said, lengths = [], [], [9, 13, 1]
    for terapipe in ({"slices": "auto", "verify": "first_batch"}, {"slices": lengths, "verify": "off"}):
        torch.manual_seed(5)
        CALLS = ByClass.counted = 0
        cut = mock.patch.object(schedule_choice, "plan_slices", cut_anyway)
        with cut, logged() as lines, engine_of(layers, section(**terapipe), **options) as engine:
            runs.append([vars(train(engine, data)), torch.rand(1)])
            lengths = list(engine.slice_plan(23).lengths)
            said.append("\n".join(lines))
    return lengths, error_of(*runs), said


@pytest.mark.parametrize("model", models())
def test_the_bits_of_the_plan_by_hand_or_a_warning(model: type[Mixed] | str) -> None:
    lost, counter = ("", "") if isinstance(model, str) else STATE[model]
    seen = rank_pool(2).run(_with_few_rounds, job=_by_the_engine_and_by_hand, model=model)
    texts = "\n".join(said[0] for _, _, said in seen)
    assert [lengths for lengths, _, _ in seen] == [[9, 13, 1]] * 2
    assert ("cannot be put back" in texts) == bool(lost) and lost in texts, texts
    assert counter in texts and ("counts calls" in texts) == bool(counter), texts
    assert any(error > 0 for _, error, _ in seen) == bool(lost), "bits"
