"""Deliberate faults in windows, documents, caps, sinks and head dims: the comparison with the formula sees each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reach_cases import Case, error, run_formula, run_in_slices, small_blocks
from test_store_reach import evaluate, undefined_memory_is_nan

from terapipe_ds.attention import SliceStore, SliceStoreError, call, sliced
from terapipe_ds.attention.backends import fused, reference
from terapipe_ds.attention.backends.base import Queries
from terapipe_ds.attention.backends.blocks import BlockKernel
from terapipe_ds.attention.buffers import TokenBuffer
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.attention.reach import Reach
from terapipe_ds.attention.slice_store import SliceEntry

WINDOW = Case((9, 10, 1, 12), window=6)
CAPPED = dataclasses.replace(WINDOW, softcap=0.8)
DOCUMENTS = Case((9, 10, 1, 12), starts=((0, 3, 12, 22), (0, 14)))
SINKS = Case((9, 10, 1, 12), with_sinks=True)
WIDE = Case((9, 10, 1, 12), value_dim=5)

FAULTS: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {}


def fault(case: Case, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function that runs in place of `owner.name`, and takes the original before the arguments."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[function.__name__] = case, owner, name, function
        return function

    return enter


@fault(WINDOW, fused, "window_mask")
def window_one_token_longer(mask: Any, tokens: int, before: int, window: int, *rest: Any) -> Any:
    return mask(tokens, before, window + 1, *rest)


@fault(WINDOW, Reach, "_in_window")
def window_one_token_shorter(first: Any, self: Any, key: int, token: int) -> int:
    return min(token, first(self, key, token) + 1) if self.window is not None else first(self, key, token)


@fault(CAPPED, reference, "_scores")
def window_of_tiles_one_token_longer(scores: Any, queries: Any, *rest: Any) -> Any:
    return scores(queries._replace(window=None if queries.window is None else queries.window + 1), *rest)


@fault(WINDOW, Queries, "first_key")
def keys_without_the_first_one(first_key: Any, self: Any, row: int) -> int:
    return int(first_key(self, row) + (self.start + row > 0))


@fault(DOCUMENTS, Documents, "edges")
def edge_ignored_in_one_row(edges: Any, self: Any, row: int) -> Any:
    return edges(self, row)[:-1] if row == 0 else edges(self, row)


@fault(DOCUMENTS, Documents, "first_token")
def keys_of_the_document_before(first_token: Any, self: Any, row: int) -> int:
    starts = self.starts[row]
    return int(starts[max(0, starts.index(first_token(self, row)) - 1)])


@fault(dataclasses.replace(DOCUMENTS, starts=((0, 14), (0, 3))), SliceEntry, "add_grads")
def gradients_of_another_row(
    add: Any, self: Any, offset: int, dk: Any, dv: Any, again: bool = False, rows: Any = None
) -> None:
    add(self, offset, dk, dv, again, slice(0, 1) if rows == slice(1, 2) else rows)


@fault(WINDOW, SliceEntry, "add_grads")
def gradients_of_calls_overwritten(
    add: Any, self: Any, offset: int, dk: Any, dv: Any, again: bool = False, rows: Any = None
) -> None:
    for total, part in zip(self.grads.at(offset, offset + dk.shape[2]), (dk, dv), strict=True):
        total[rows or slice(None)] = part


@fault(WINDOW, SliceEntry, "make_room_for_grads")
def gradients_out_of_reach_not_zero(make_room: Any, self: Any, start: int, stop: int) -> None:
    first = self.reach.first_key(start)
    fresh = max(first, self.touched)
    make_room(self, start, stop)
    for total in self.grads.at(first, fresh):
        total.fill_(0.5)  # what the memory held before


@fault(WINDOW, TokenBuffer, "reserve")
def gradients_dropped_where_a_window_moves(reserve: Any, self: Any, first: int, room: int, kept: Any = (0, 0)) -> None:
    reserve(self, first, room, kept)
    for x in self.at(*kept) if kept[1] > kept[0] else ():
        x.zero_()


@fault(SINKS, sliced, "gradient_of_sinks")
def sink_without_gradient(gradient: Any, *args: Any) -> Any:
    return torch.zeros_like(gradient(*args))


@fault(SINKS, sliced, "gradient_of_sinks")
def sink_with_the_gradient_of_other_keys(gradient: Any, *args: Any) -> Any:
    return -gradient(*args)


@fault(SINKS, call, "with_sinks")
def sink_not_in_the_log_sum_exp(with_sinks: Any, out: Any, lse: Any, sinks: Any) -> Any:
    return with_sinks(out, lse, sinks)[0], lse


@fault(CAPPED, reference, "_scores")
def slope_of_the_cap_missing(scores: Any, *args: Any) -> Any:
    return scores(*args)[0], None


@fault(WIDE, BlockKernel, "attend")
def values_cut_at_the_wrong_end(attend: Any, self: Any, block: Any) -> Any:
    attended = attend(self, block._replace(v=torch.nn.functional.pad(block.v, (0, 3))))
    return attended._replace(out=attended.out[..., -block.v.shape[3] :])


@pytest.mark.parametrize(
    "case", [WINDOW, CAPPED, DOCUMENTS, SINKS, WIDE], ids=["window", "cap", "documents", "sinks", "wide"]
)
def test_nothing_is_found_where_nothing_is_broken(case: Case) -> None:
    with small_blocks(None, 4):
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, attribute, function = FAULTS[name]
    original, called = getattr(owner, attribute), []
    expected = run_formula(case)

    def broken(*args: Any, **options: Any) -> Any:
        called.append(1)
        return function(original, *args, **options)

    monkeypatch.setattr(owner, attribute, broken)
    with small_blocks(None, 4):
        assert error(run_in_slices(case), expected) > 1e-4
    assert called


def test_a_key_dropped_too_early_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = SliceEntry.make_room

    def early(self: SliceEntry, active: Any) -> None:
        reach, self.reach = self.reach, Reach(max(1, (self.reach.window or 1) - 1))
        make_room(self, active)
        self.reach = reach

    evaluate(WINDOW, SliceStore())
    monkeypatch.setattr(SliceEntry, "make_room", early)
    with undefined_memory_is_nan(), pytest.raises(SliceStoreError, match="are not kept; they are out of reach"):
        evaluate(WINDOW, SliceStore())
