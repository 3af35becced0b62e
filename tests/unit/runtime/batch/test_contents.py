"""What stages compare of tuple batches, and which micro-batches have no rows."""

from __future__ import annotations

import pytest
import torch

from terapipe_ds.runtime.batch.cut_tensors import BatchError
from terapipe_ds.runtime.batch.source import _require_rows, contents_of

LABELS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("number", [0, -100, -1, 7])
def test_labels_of_one_value_say_nothing(number: int) -> None:
    """A stage without the loss gives what it likes in their place."""
    assert contents_of(torch.full_like(LABELS, number)) == 0 == contents_of(()) == contents_of(torch.empty(0))


def test_values_count_and_neither_their_dtype_nor_what_stands_beside_them() -> None:
    mask = torch.ones(2, 6)
    assert contents_of(LABELS) == contents_of(LABELS.int()) == contents_of((LABELS, mask)) != 0
    assert contents_of(LABELS) != contents_of(LABELS.flip(0)) and contents_of(LABELS) != contents_of(LABELS + 1)


def test_a_batch_without_rows_is_refused_and_an_empty_side_input_is_none() -> None:
    ids, images = torch.ones(2, 6, dtype=torch.long), torch.empty(0, 3)
    _require_rows(((ids, images), LABELS), 0, row_dim=0)
    _require_rows({"input_ids": ids, "pixel_values": images, "labels": LABELS}, 0, row_dim=0)
    with pytest.raises(BatchError, match="micro-batch 3 has 0 rows"):
        _require_rows(((ids[:0], images), LABELS[:0]), 3, row_dim=0)
