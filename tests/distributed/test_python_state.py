"""Test that measuring for "auto" and the first batch's check do not change training: same bits as with a listed plan.

A warning names any state that they cannot restore.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.runtime.planning import schedule_choice
from tests.distributed.engines import engine_of, error_of, logged, section, train
from tests.distributed.harness import rank_pool
from tests.distributed.test_planning import _with_few_rounds, cut_anyway
from tests.small_models.parts import Embedding, Head, Mlp
from tests.zoo import ZOO
from tests.zoo.members import Member, spec_of
from tests.zoo.training import COUNTED

HEALTHY = (
    "Sliced", "Alibi", "GatedHeads", "TwiceSliced", "ParallelBlock", "Checkpointed", "WholeDecoder", "OwnCheckpoint",
    "Experts", "InPlace", "LearnedSlots", "MaskedWeights", "ScaledGradient", "NoisyExperts", "CountedTokens",
)  # fmt: skip


def models() -> list[Any]:
    rest = [each for each in HEALTHY if each != "NoisyExperts"]
    return [*COUNTED, "NoisyExperts", *(pytest.param(each, marks=pytest.mark.full) for each in rest)]


def _by_the_engine_and_by_hand(model: str) -> tuple[list[int], float, list[str]]:
    """Return the plan, how far the two trainings are from each other, and the warnings of the first."""
    counting = [spec_of(each) for each in (Embedding, Mlp, COUNTED[model][0], Head)] if model in COUNTED else []
    member = Member(model, counting) if counting else ZOO[model]
    data = [[ZOO["Sliced"].data(100 * step + index) for index in range(2)] for step in range(2)]
    options = {"loss_fn": member.loss_fn, **member.engine}
    runs, said, lengths = [], [], [9, 13, 1]
    for terapipe in ({"slices": "auto", "verify": "first_batch"}, {"slices": lengths, "verify": "off"}):
        torch.manual_seed(5)
        cut = mock.patch.object(schedule_choice, "plan_slices", cut_anyway)
        with cut, logged() as lines, engine_of(member.layers, section(**terapipe), **options) as engine:
            runs.append([vars(train(engine, data)), torch.rand(1)])
            lengths = list(engine.slice_plan(23).lengths)
            said.append("\n".join(lines))
    return lengths, error_of(*runs), said


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", models())
def test_the_bits_of_the_plan_by_hand_or_a_warning(model: str) -> None:
    _, lost, says = COUNTED.get(model, (None, "", ""))
    seen = rank_pool(2).run(_with_few_rounds, job=_by_the_engine_and_by_hand, model=model)
    texts = "\n".join(said[0] for _, _, said in seen)
    assert [lengths for lengths, _, _ in seen] == [[9, 13, 1]] * 2
    assert ("cannot be put back" in texts) == bool(lost) and lost in texts, texts
    assert says in texts and ("counts calls" in texts) == ("counts calls" in says), texts
    assert any(error > 0 for _, error, _ in seen) == bool(lost), "bits"
