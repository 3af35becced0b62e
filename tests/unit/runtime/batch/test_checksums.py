"""The checksum by which ranks find out that they have drawn different data."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape, checksum, contents_of

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


@pytest.mark.parametrize(("one", "other"), [
    (TOKENS, TOKENS.reshape(3, 8)), (TOKENS, TOKENS.int()), (TOKENS, TOKENS.double()), ([TOKENS], [TOKENS, TOKENS]),
    ([TOKENS], [TOKENS[:1], TOKENS[1:]]), ([TOKENS], []), (3, 4), (None, 0),
    ("text", "next"), (1, True), (torch.tensor(1), torch.tensor(2)),
    (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)),
    (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()), (torch.ones(()).half(), torch.empty(0).half()),
    ({"a": TOKENS}, {"a": TOKENS + 1}), ({"a": TOKENS}, {"b": TOKENS}), ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
    ({"a": [1, 2], "b": []}, {"a": [1], "b": [2]}), (np.arange(3000), np.arange(3000)[::-1]),
    (MicroBatchShape(2, 12), MicroBatchShape(2, 13)),
])  # fmt: skip
def test_values_of_any_kind_count(one: Any, other: Any) -> None:
    """As labels may be in DeepSpeed's own order."""
    assert checksum([one]) == checksum([copy.deepcopy(one)]) != checksum([other])


def test_an_object_whose_text_names_its_address_is_no_false_alarm() -> None:
    assert checksum({"kept": object()}) == checksum({"kept": object()})


@pytest.mark.parametrize("number", [0, -100, -1, 7])
def test_labels_of_one_value_say_nothing(number: int) -> None:
    """A stage without the loss gives what it likes in their place."""
    assert contents_of(torch.full_like(TOKENS, number)) == 0 == contents_of(()) == contents_of(torch.empty(0))


def test_values_count_and_neither_their_dtype_nor_what_stands_beside_them() -> None:
    mask = torch.ones(2, 12)
    assert contents_of(TOKENS) == contents_of(TOKENS.int()) == contents_of((TOKENS, mask)) != 0
    assert contents_of(TOKENS) != contents_of(TOKENS.flip(0)) and contents_of(TOKENS) != contents_of(TOKENS + 1)
