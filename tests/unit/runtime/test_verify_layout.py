"""Where the tokens of a tensor are, found from the shapes of the whole and of its slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.verify.compare import Tolerance, difference, worst_rows
from terapipe_ds.runtime.verify.layout import (
    ALONE,
    PerSlice,
    Same,
    TensorPeersOf,
    TokenDim,
    cut,
    share_of_gradient,
    stand_together,
    token_dims,
)

PLAN = SlicePlan((4, 2, 6))
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
    for layout in token_dims(whole, parts, PLAN, ALONE):
        if all(torch.equal(cut(layout, whole, PLAN, i, ALONE), part) for i, part in enumerate(parts)):
            fitting.append(layout)
            together = stand_together(layout, parts, None, ALONE)
            assert together.shape[0] == 12
            assert torch.equal(together, layout.tokens_first(whole))
            assert torch.equal(layout.back(together), whole)
    assert len(fitting) == 1


def test_tokens_that_two_ranks_share() -> None:
    x = torch.arange(12.0 * 3).view(12, 3)
    shards = x.chunk(2)

    def peers(rank: int) -> TensorPeersOf:
        return TensorPeersOf(2, rank, gather=lambda own: x if own.shape[0] == 6 else torch.cat([own, own]))

    for rank in range(2):
        parts = [x[slice(*PLAN.span(i))].chunk(2)[rank] for i in range(3)]
        layout, *others = token_dims(shards[rank], parts, PLAN, peers(rank))
        assert not others and layout == TokenDim(0, shared_by=2)
        for i in range(3):
            assert torch.equal(cut(layout, shards[rank], PLAN, i, peers(rank)), parts[i])


def test_a_size_that_happens_to_be_the_length_is_no_token_dimension() -> None:
    whole = torch.zeros(12, 12)
    assert token_dims(whole, [whole[:, :n] for n in PLAN.lengths], PLAN, ALONE) == [TokenDim(1)]
    assert token_dims(whole, [whole] * 3, PLAN, ALONE) == []


def test_values_without_tokens() -> None:
    parts = [torch.tensor(2.0), torch.tensor(4.0), torch.tensor(6.0)]
    per_slice = PerSlice(tuple(parts))
    assert float(stand_together(per_slice, parts, (0.5, 0.25, 0.25), ALONE)) == 3.5
    assert float(stand_together(per_slice, parts, None, ALONE)) == 12.0
    gradient = torch.tensor(8.0)
    assert float(share_of_gradient(per_slice, gradient, PLAN, 1, (0.5, 0.25, 0.25), ALONE)) == 2.0
    shares = [float(share_of_gradient(Same(), gradient, PLAN, i, (0.0,) * 3, ALONE)) for i in range(3)]
    assert sum(shares) == pytest.approx(8.0)
    assert float(cut(per_slice, torch.tensor(3.5), PLAN, 2, ALONE)) == 6.0


def test_one_wrong_token_does_not_drown() -> None:
    b = torch.ones(10_000, 4)
    a = b.clone()
    a[777] += 0.01
    assert difference(a, b).relative < 2e-4  # over all tokens it would pass
    assert worst_rows(a, b, Tolerance(2e-4, 0.1)).nonzero().flatten().tolist() == [777]


def test_not_finite() -> None:
    b = torch.tensor([[1.0], [float("-inf")]])
    assert difference(b, b).relative == 0.0
    assert difference(b, torch.ones(2, 1)).relative == float("inf")
    assert worst_rows(torch.tensor([[float("nan")], [1.0]]), torch.ones(2, 1), Tolerance(1.0, 1.0)).tolist() == [
        True, False
    ]  # fmt: skip
