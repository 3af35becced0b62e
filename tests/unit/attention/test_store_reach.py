"""What the slice store keeps where a window or documents limit the reach: memory, undefined contents, order."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reach_cases import Case, cases, error, formula, run_formula, run_in_slices

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, push_slice, sliced_attention
from terapipe_ds.attention.buffers import BufferPool
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.attention.slice_store import SliceEntry

BYTES_PER_TOKEN = 2 * 2 * (8 + 8) * 8  # of keys and values in fp64: B * H_kv * (D + D_v)
fewer = settings(max_examples=settings.default.max_examples // 4)


@contextmanager
def undefined_memory_is_nan() -> Iterator[None]:
    """Fill each buffer of the pool with NaN when it is lent: what is not written shows in all that reads it."""
    take = BufferPool.take

    def poisoned(self: BufferPool, *args: Any) -> torch.Tensor:
        return take(self, *args).fill_(math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferPool, "take", poisoned)
        yield


@contextmanager
def keys_out_of_reach_are_nan() -> Iterator[None]:
    """After each forward of a slice, spoil the keys and values that no later slice reaches."""
    write = SliceStore.write

    def spoiling(self: SliceStore, active: ActiveSlice, *args: Any) -> SliceEntry:
        entry = write(self, active, *args)
        first, kept = entry.reach.first_key(active.start), entry.kept
        for x in kept.at(kept.first, max(kept.first, first)):
            x.fill_(math.nan)
        return entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SliceStore, "write", spoiling)
        yield


def evaluate(case: Case, store: SliceStore) -> torch.Tensor:
    """The outputs of a micro-batch in evaluation."""
    q, k, v, _, *sinks = case.inputs()
    outs = []
    for active in case.slices(store, mode="eval"):
        with push_slice(active), torch.inference_mode():
            parts = (x[:, :, active.start : active.stop] for x in (q, k, v))
            outs.append(case.attend(*parts, sinks[0] if sinks else None))
    store.release(0, 0)
    return torch.cat(outs, dim=2)


@fewer
@given(case=cases())
def test_no_undefined_memory_is_read(case: Case) -> None:
    """Neither of keys that are not kept, nor of gradients that no slice has added to: those are 0."""
    with undefined_memory_is_nan():
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
        store = SliceStore()
        torch.testing.assert_close(evaluate(case, store), run_formula(case)[0])
        assert error(run_in_slices(case, store), run_formula(case)) <= 1e-10  # in the buffers of the evaluation


@fewer
@given(case=cases())
def test_keys_out_of_reach_are_not_read(case: Case) -> None:
    with keys_out_of_reach_are_nan():
        q, k, v, _, *sinks = case.inputs()
        assert error([evaluate(case, SliceStore())], [formula(case, q, k, v, *sinks)]) <= 1e-10
        store, outs = SliceStore(), []  # in training the keys stay where they are
        for active in case.slices(store):
            with push_slice(active):
                parts = (x[:, :, active.start : active.stop] for x in (q, k, v))
                outs.append(case.attend(*parts, sinks[0] if sinks else None))
        assert error([torch.cat(outs, 2)], [formula(case, q, k, v, *sinks)]) <= 1e-10


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple),
    window=st.integers(1, 40),
    documents=st.booleans(),
)
def test_evaluation_keeps_what_is_in_reach(lengths: tuple[int, ...], window: int, documents: bool) -> None:
    lengths, length = (*lengths, 1), sum(lengths) + 1
    starts = tuple((0, *range(row + 1, length, 7)) for row in range(2)) if documents else None
    case, store = Case(lengths=lengths, window=window, starts=starts), SliceStore()
    torch.testing.assert_close(evaluate(case, store), run_formula(case)[0])
    assert store.pool.peak_bytes <= (window - 1 + max(lengths)) * BYTES_PER_TOKEN
    evaluate(case, store)
    assert store.pool.reserved_bytes < 2 * (window + max(lengths)) * BYTES_PER_TOKEN


def test_what_is_not_kept_cannot_be_read() -> None:
    store = SliceStore()
    x = torch.zeros(1, 1, 5, 4)
    entries = [store.write(active, 0, x, x, 3) for active in Case((5, 5, 5)).slices(store, mode="eval")]
    assert entries[2].keys_values(8, 15)[0].shape[2] == 7
    with pytest.raises(SliceStoreError, match=r"layer 0 .*keys of tokens \[7, 15\) are not kept"):
        entries[2].keys_values(7, 15)


@pytest.mark.parametrize("lengths", [(8,) * 8, (20, 1, 1, 30, 2, 10), (1,) * 64])
def test_training_keeps_gradients_of_what_is_in_reach(lengths: tuple[int, ...]) -> None:
    case, store = Case(lengths=lengths, window=10), SliceStore()
    assert error(run_in_slices(case, store), run_formula(case)) <= 1e-10
    in_reach = max(min(stop, 9 + tokens) for tokens, stop in zip(lengths, itertools.accumulate(lengths), strict=True))
    assert store.pool.peak_bytes == (64 + in_reach) * BYTES_PER_TOKEN


def test_documents_are_dropped_where_all_rows_have_begun_later_ones() -> None:
    starts = ((0, 20, 40, 65, 80, 103), (0, 15, 41, 60, 79, 110))
    case, store = Case(lengths=(10,) * 12, starts=starts), SliceStore()
    torch.testing.assert_close(evaluate(case, store), run_formula(case)[0])
    assert store.pool.peak_bytes <= 60 * BYTES_PER_TOKEN  # of 120: two buffers for a moment, of 20 tokens and of 40
    store = SliceStore()
    assert error(run_in_slices(case, store), run_formula(case)) <= 1e-10
    assert store.pool.peak_bytes < (120 + 70) * BYTES_PER_TOKEN  # and of the gradients as well


def test_a_document_that_goes_on_is_not_copied_for_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = BufferPool.take
    monkeypatch.setattr(BufferPool, "take", lambda self, *args: taken.append(1) or take(self, *args))
    case = Case(lengths=(1,) * 64, starts=((0, 2), (0, 1)))
    torch.testing.assert_close(evaluate(case, SliceStore()), run_formula(case)[0])
    assert len(taken) <= 2 * 8  # 1, 2, 4, ... 64 tokens


def test_the_pool_lends_the_smallest_buffer_that_fits() -> None:
    pool, kind = BufferPool(), (torch.float32, torch.device("cpu"))
    lent = [pool.take((size,), *kind) for size in (64, 8, 16)]
    place_of = {len(each): each.data_ptr() for each in lent}
    for each in lent:
        pool.give(each)
    assert [pool.take((size,), *kind).data_ptr() for size in (8, 9)] == [place_of[8], place_of[16]]
    assert pool.reserved_bytes == 4 * (64 + 8 + 16)


def test_who_looks_at_gradients_sees_no_undefined_memory() -> None:
    seen: list[tuple[int, int]] = []

    def look(entry: SliceEntry, stop: int) -> None:
        start, gradients = entry.accumulated(stop)
        seen.append((start, stop))
        assert all(x.shape[2] == stop - start and x.isfinite().all() for x in gradients)

    store, case = SliceStore(), Case((9, 10, 1, 12), window=5)
    store.on_gradients = look
    with undefined_memory_is_nan():
        run_in_slices(case, store)
        run_in_slices(dataclasses.replace(case, window=None), store)
    assert seen == [(16, 32), (15, 20), (5, 19), (0, 9), (0, 32), (0, 20), (0, 19), (0, 9)]


# -- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"window": 5}, {"window": None}, {"starts": ((0, 7), (0,))}], ids=["window", "no window", "documents"]
)
def test_a_change_of_reach_within_a_micro_batch(change: dict[str, Any]) -> None:
    store, case = SliceStore(), Case((10, 10), window=4)
    x = torch.zeros(2, 2, 10, 8)
    store.write(case.slices(store)[0], "here", x, x, 4)
    other = dataclasses.replace(case, **change)
    with pytest.raises(SliceStoreError, match=r"layer 'here'.*slice \[10, 20\) comes with window.*began with 4, or"):
        store.write(other.slices(store)[1], "here", x, x, other.window)


def test_a_window_that_is_not_drained() -> None:
    store, case = SliceStore(), Case((8, 8, 4), window=3)
    x = torch.zeros(2, 2, 8, 8, requires_grad=True)
    outs = []
    for active in case.slices(store):
        part = x[:, :, : active.num_tokens]
        with push_slice(active):
            outs.append(sliced_attention(part, part, part, "here", window=3))
    outs[2].sum().backward(retain_graph=True)
    with pytest.raises(SliceStoreError, match=r"gradients of \[0, 16\) still waiting"):
        store.release(0, 0)
    with pytest.raises(SliceStoreError, match="the next one must end at token 16"):
        outs[0].sum().backward()


def test_a_probe_may_run_any_slice() -> None:
    """A measurement costs what training costs: all of a window is there, and gradients are added."""
    store = SliceStore()
    for start, stop in ((8, 12), (4, 8), (0, 4), (16, 20)):
        leaves = [torch.ones(1, 2, stop - start, 4).requires_grad_() for _ in range(3)]
        with push_slice(ActiveSlice(start, stop, 20, store=store, mode="probe")):
            out = sliced_attention(*leaves, layer=0, window=6)
            out.sum().backward()
        assert out.isfinite().all() and all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_what_documents_say_of_a_slice() -> None:
    documents = Documents(((0, 3, 12), (0, 10)), 10, 15)
    assert [documents.first_token(row) for row in (0, 1)] == [3, 10]
    assert [documents.edges(row) for row in (0, 1)] == [(12,), ()]
    assert documents.cu_seqlens(0).tolist() == [0, 2, 5] and documents.cu_seqlens(1).tolist() == [0, 5]
    assert documents.position_ids().tolist() == [[7, 8, 0, 1, 2], [0, 1, 2, 3, 4]]
