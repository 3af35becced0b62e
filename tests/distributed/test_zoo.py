"""The zoo: small models and losses, each right in the stock engine. With the defaults each trains in slices as there,
or is refused before the first step, on every rank and with what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engines import EXACT, violations
from tests.distributed.harness import rank_pool
from tests.distributed.zoo_runs import Seen, look_at
from tests.zoo import ZOO, Member

WRONG = 1e-6  # by so much at least an unhealthy member differs where nothing checks it
SAMPLE = (
    "softmax_by_hand", "attention_over_packed_rows", "DetachedCache", "PositionedEmbedding", "token_shift",
    "torch_ConvTranspose1d", "without_mean", "LimitedExperts", "MaskOfTokensByTokens", "NormalisedWeightGradient",
    "by_root_of_count", "mask_in_a_tuple", "AsWideAsLong", "Checkpointed", "MaskedLoss", "MemoryByTorch",
    "long_label_smoothing", "mean_of_all_tokens", "shifting", "valid_called_mean", "advantages", "LossModule",
    "PooledState",
    "TokenConvolution", "FeatureConvolution", "AttentionOverHeadsRecomputed",
)  # fmt: skip
"""Of these `make test` makes sure; `make test-full` of all."""


def members(healthy: bool) -> list[Any]:
    names = [name for name, member in ZOO.items() if bool(member.says) != healthy]
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in names]


def seen_of(member: Member) -> list[Seen]:
    """On both ranks; first that the member belongs here."""
    seen = rank_pool(2).run(look_at, name=member.name)
    assert violations([each.stock for each in seen], EXACT) == {}, "two stages are not as one in the stock engine"
    return seen


def test_there_are_enough() -> None:
    assert len(members(healthy=False)) >= 60 and len(members(healthy=True)) >= 20
    assert set(SAMPLE) <= set(ZOO)


class TestTwoRanks:
    @pytest.mark.parametrize("name", members(healthy=False))
    def test_unhealthy_is_refused(self, name: str) -> None:
        member = ZOO[name]
        seen = seen_of(member)
        assert [each.sliced for each in seen] == [{}, {}], "trained on"
        for each in seen:
            assert each.error == member.error, each.text
            assert [words for words in member.says if words not in each.text] == [], each.text
            assert each.untouched
        assert member.stops or violations([each.unguarded for each in seen], WRONG) != {}, "nothing is wrong with it"

    @pytest.mark.parametrize("name", members(healthy=True))
    def test_healthy_trains_as_in_the_stock_engine(self, name: str) -> None:
        seen = seen_of(ZOO[name])
        assert [each.text for each in seen] == ["", ""]
        assert violations([each.sliced for each in seen], EXACT) == {}
