"""The checksum by which ranks find out that they have drawn different data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.runtime.batch import source as module
from terapipe_ds.runtime.batch.source import checksum

TOKENS = torch.arange(24).reshape(2, 12)


def test_the_same_values_in_other_memory() -> None:
    apart = torch.zeros(2, 24, dtype=torch.int64)[:, ::2]
    apart.copy_(TOKENS)
    assert checksum([TOKENS]) == checksum([apart]) == checksum([TOKENS.T.contiguous().T])
    assert 0 <= checksum([TOKENS]) < 2**62


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_any_change_shows(values: list[int], data: st.DataObject) -> None:
    """One bit of one value, or two values that change places: sums of the values would be the same."""
    before = checksum([torch.tensor(values)])
    place = data.draw(st.integers(0, len(values) - 1))
    changed = torch.tensor(values)
    changed[place] ^= 1 << data.draw(st.integers(0, 62))
    assert checksum([changed]) != before
    other = data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[place], swapped[other] = swapped[other], swapped[place]
    assert (checksum([torch.tensor(swapped)]) == before) == (swapped == values)


@pytest.mark.parametrize(
    "other",
    [
        [TOKENS.reshape(3, 8)], [TOKENS, TOKENS], [TOKENS[:1], TOKENS[1:]], [TOKENS.int()], [TOKENS.double()], [],
    ],
    ids=["shape", "twice", "in-two", "int32", "float", "nothing"],
)  # fmt: skip
def test_shapes_dtypes_and_numbers_of_tensors_show(other: list[torch.Tensor]) -> None:
    assert checksum(other) != checksum([TOKENS])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_has_one(dtype: torch.dtype) -> None:
    ones = torch.ones(3, 4, dtype=dtype)
    assert checksum([ones]) != checksum([ones - ones if dtype != torch.bool else ~ones])
    assert checksum([torch.tensor(1).to(dtype)]) != checksum([torch.empty(0, dtype=dtype)])


def test_of_huge_tensors_the_beginning_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 16)
    assert checksum([torch.tensor([1, 2, 3])]) == checksum([torch.tensor([1, 2, 4])])
    assert checksum([torch.tensor([1, 2, 3])]) != checksum([torch.tensor([1, 3, 3])])
