"""Find where documents start in the rows of a micro-batch, and write it as plain numbers that other stages can read.

Position ids of tuples show it. Dicts are read by `dict_batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from terapipe_ds.attention.documents import Starts, are_position_ids, have_edges, starts_of
from terapipe_ds.dict_batch import BatchError
from terapipe_ds.runtime.batch.cut_tensors import as_tuple


def find_starts(inputs: Any, documents: int | str, dim: int) -> Starts | None:
    """Return where documents start in the rows of a micro-batch; None if each row is one document.

    inputs: as the data iterator gives them. `documents` is the key of the config; `dim` counts tokens.

    Raises BatchError if the entry holds no position ids of whole rows.
    """
    # find the entry that the config names
    tensors, what = as_tuple(inputs, "the inputs"), f"terapipe.documents = {documents!r}"
    if isinstance(documents, str):
        raise BatchError(
            f"{what} names an entry of a dict, but this batch is a tuple with {len(tensors)} input tensors: give the "
            "index of the position ids among them, or dict batches"
        )
    if documents >= len(tensors) or len(tensors) == 1:
        raise BatchError(
            f"{what}, but the batch has {len(tensors)} input tensors: give ((tokens, position_ids), labels), and the "
            "index of the position ids"
        )
    # it must hold positions, one for each token of each row
    ids = tensors[documents]
    kind = f"a tensor of {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
    if dim > 1 or not are_position_ids(ids):
        raise BatchError(f"{what}: position ids are integers [rows, tokens], and the input is {kind}")
    ids = ids.movedim(dim, 1)
    others = (t for i, t in enumerate(tensors) if i != documents and t.dim() > 1 and t.size(dim) == ids.shape[1])
    rows = next((t.size(1 - dim) for t in others), len(ids))
    if rows != len(ids):
        raise BatchError(f"{what} is {kind}, but the other inputs have {rows} rows: give position ids for each row")
    starts = starts_of(ids)
    return starts if have_edges(starts) else None


def to_numbers(micro_batches: Iterable[Starts | None]) -> list[int]:
    """Write the documents of all micro-batches of a batch as one list; it is empty if no row has two documents.

    For each micro-batch it has the number of rows (0 for None), and for each row the number of starts, then the starts.
    """
    batch = list(micro_batches)
    if not any(batch):
        return []
    rows = [starts or () for starts in batch]
    return [n for each in rows for part in ((len(each),), *((len(row), *row) for row in each)) for n in part]


def from_numbers(numbers: Sequence[int]) -> list[Starts | None]:
    """Read the list that `to_numbers` has written."""
    left, batch = iter(numbers), []
    for rows in left:
        starts = tuple(tuple(next(left) for _ in range(next(left))) for _ in range(rows))
        batch.append(starts or None)
    return batch
