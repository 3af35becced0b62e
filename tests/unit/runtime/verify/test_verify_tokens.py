"""Where the tokens of a tensor are, found from the shapes of the whole and of its slices; what counts as equal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.verify.compare import Tolerance, compare_tokens, compare_values
from terapipe_ds.runtime.verify.tokens import Slicing, TensorRanks, TokenDim

PLAN = SlicePlan((4, 2, 6))
SLICING = Slicing(PLAN, (0.5, 0.25, 0.25))
FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # of [B, T, H], what a layer may make of it
    "batch first": lambda x: x,
    "tokens first": lambda x: x.transpose(0, 1),
    "tokens last": lambda x: x.transpose(1, 2),
    "flat, rows first": lambda x: x.flatten(0, 1),
    "flat, tokens first": lambda x: x.transpose(0, 1).flatten(0, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_are_found(form: str) -> None:
    x = torch.arange(3.0 * 12 * 5).view(3, 12, 5)
    whole, parts = FORMS[form](x), [FORMS[form](x[:, slice(*PLAN.span(i))]) for i in range(3)]
    fitting = []
    for layout in SLICING.layouts_of(whole, parts):
        if all(torch.equal(SLICING.cut(layout, whole, i), part) for i, part in enumerate(parts)):
            fitting.append(layout)
            joined = SLICING.joined(layout, parts)
            assert joined.shape[0] == 12
            assert torch.equal(joined, SLICING.whole().joined(layout, [whole]))
            assert torch.equal(layout.tokens_back(joined), whole)
    assert len(fitting) == 1


class RankOfTwo(TensorRanks):
    """Hears from the other rank what it would tell."""

    def gather(self, tensor: Tensor) -> Tensor:
        whole = torch.arange(12.0 * 3).view(12, 3)
        return whole if tensor.shape[0] == 6 else torch.cat([tensor, tensor])


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_that_two_ranks_share(rank: int) -> None:
    x, slicing = torch.arange(12.0 * 3).view(12, 3), Slicing(PLAN, SLICING.weights, RankOfTwo(2, rank))
    parts = [x[slice(*PLAN.span(i))].chunk(2)[rank] for i in range(3)]
    shard = x.chunk(2)[rank]
    assert slicing.layouts_of(shard, parts) == [TokenDim(0, shared_by=2)]
    for i in range(3):
        assert torch.equal(slicing.cut(TokenDim(0, shared_by=2), shard, i), parts[i])


def test_a_size_that_happens_to_be_the_length_is_no_token_dimension() -> None:
    whole = torch.zeros(12, 12)
    assert SLICING.layouts_of(whole, [whole[:, :n] for n in PLAN.lengths]) == [TokenDim(1)]
    assert SLICING.layouts_of(whole, [whole] * 3) == SLICING.layouts_of(torch.zeros(()), [torch.zeros(())] * 3) == []


def test_one_wrong_token_does_not_drown() -> None:
    b = torch.ones(10_000, 4)
    a = b.clone()
    a[777] += 0.01
    assert compare_values("output", a, b, Tolerance(2e-4, 0.1)) is None  # over all tokens it would pass
    found = compare_tokens("output", a, b, Tolerance(2e-4, 0.1))
    assert found is not None and found.tokens is not None and found.tokens.nonzero().flatten().tolist() == [777]


def test_not_finite() -> None:
    b = torch.tensor([[1.0], [float("-inf")]])
    every = Tolerance(1.0, 1.0)
    assert compare_tokens("output", b, b, every) is compare_values("output", b, b, every) is None
    for a in (torch.ones(2, 1), torch.full((2, 1), math.nan)):
        found = compare_tokens("output", a, b, every)
        assert found is not None and "not comparable" in str(found)
        assert "not comparable" in str(compare_values("output", b, a, every))
