"""The zoo: small models and losses, each right in the stock engine. With the defaults each trains in slices as there,
or is refused before the first step, on every rank and with what is wrong with it."""

from __future__ import annotations

import pytest

from tests.distributed.engines import EXACT, violations
from tests.distributed.harness import rank_pool
from tests.distributed.zoo_runs import Seen, look_at
from tests.zoo import ZOO, Member

WRONG = 1e-6  # by so much at least an unhealthy member differs where nothing checks it


def seen_of(member: Member) -> list[Seen]:
    """On both ranks; first that the member belongs here."""
    seen = rank_pool(2).run(look_at, name=member.name)
    assert violations([each.stock for each in seen], EXACT) == {}, "two stages are not as one in the stock engine"
    return seen


class TestTwoRanks:
    @pytest.mark.parametrize("name", [name for name, member in ZOO.items() if member.says])
    def test_unhealthy_is_refused(self, name: str) -> None:
        member = ZOO[name]
        seen = seen_of(member)
        assert [each.sliced for each in seen] == [{}, {}], "trained on"
        assert {each.error for each in seen} == {member.error}, seen[0].text
        texts = {each.text for each in seen}
        assert len(texts) == 1
        text = texts.pop()
        assert [words for words in member.says if words not in text] == [], text
        assert all(each.untouched for each in seen)
        assert member.stops or violations([each.unguarded for each in seen], WRONG) != {}, "nothing is wrong with it"

    @pytest.mark.parametrize("name", [name for name, member in ZOO.items() if not member.says])
    def test_healthy_trains_as_in_the_stock_engine(self, name: str) -> None:
        seen = seen_of(ZOO[name])
        assert [each.text for each in seen] == ["", ""]
        assert violations([each.sliced for each in seen], EXACT) == {}
