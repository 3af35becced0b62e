"""Windows, caps, sinks, documents and head dims of values, alone and together: slices equal the formula."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import forced
from hypothesis import given, settings
from hypothesis import strategies as st
from reach_cases import Case, cases, error, run_formula, run_in_slices, run_whole, small_blocks, visible

from terapipe_ds.attention import (
    ActiveSlice,
    SliceStore,
    active_slice,
    documents,
    push_slice,
    sliced_attention,
)
from terapipe_ds.attention.backends import reference
from terapipe_ds.attention.backends.blocks import Block
from terapipe_ds.attention.backends.fused import CpuFlash
from terapipe_ds.attention.document_edges import Documents

BOUND, FP32_BOUND = 1e-10, 1e-5
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 4}, "documents": {"starts": ((0, 3, 12, 19), (0, 11))},
    "same documents in all rows": {"starts": ((0, 9, 14), (0, 9, 14))}, "softcap": {"softcap": 0.8},
    "sinks": {"with_sinks": True}, "wider values": {"value_dim": 12}, "narrower values": {"value_dim": 3},
    "all heads": {"kv_heads": 4}, "one key head": {"kv_heads": 1}, "recompute": {"recompute": True},
    "reentrant": {"recompute": True, "reentrant": True},
    "tokens": {"lengths": (1,) * 20}, "uneven slices": {"lengths": (1, 12, 2, 5)},
}  # fmt: skip
fewer = settings(max_examples=settings.default.max_examples // 4)
PAIRS = [*[(name,) for name in OPTIONS], *itertools.combinations(OPTIONS, 2)]


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_each_option_and_each_pair_equals_the_formula(names: tuple[str, ...]) -> None:
    case = Case(**{key: value for name in names for key, value in OPTIONS[name].items()})
    expected = run_formula(case)
    for backend in (None, "reference"):
        with small_blocks(None if case.softcap else backend, 4):
            assert error(run_in_slices(case), expected) <= BOUND


@fewer
@given(case=cases(), backend=st.sampled_from((None, "reference")), tokens=st.sampled_from((2, 3, 8, 512)))
def test_any_options_together_equal_the_formula(case: Case, backend: str | None, tokens: int) -> None:
    with small_blocks(backend, tokens):
        assert error(run_in_slices(case), run_formula(case)) <= BOUND


@fewer
@given(case=cases(), backend=st.sampled_from((None, "reference")))
def test_any_options_in_fp32(case: Case, backend: str | None) -> None:
    case = dataclasses.replace(case, dtype=torch.float32)
    with small_blocks(backend, 8):
        assert error(run_in_slices(case), run_formula(case)) <= FP32_BOUND


@fewer
@given(case=cases(), backend=st.sampled_from((None, "reference")), outside=st.booleans())
def test_a_whole_sequence_equals_the_formula(case: Case, backend: str | None, outside: bool) -> None:
    """With a slice that is the whole sequence, and without an active slice, where nothing is kept."""
    active = dataclasses.replace(case, lengths=(case.length,)).slices(store := SliceStore())[0]
    if outside and case.starts is None:
        active = None
    with small_blocks(backend, 4):
        assert error(run_whole(case, active), run_formula(case)) <= BOUND
    assert store.pool.reserved_bytes == 0


@pytest.mark.parametrize("backend", [None, "reference"])
def test_several_calls_and_tiles_of_the_real_sizes(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several causal blocks per slice, several pieces of the prefix, windows that are shorter and longer than a call's
    queries, a tile, a slice; two rows with other documents."""
    assert CpuFlash.causal_tokens is not None and CpuFlash.causal_tokens < 700
    monkeypatch.setattr(CpuFlash, "prefix_bytes", 512 * 2 * 8 * 8)
    for window, starts in ((None, None), (40, None), (700, ((0, 800), (0, 100, 1203))), (300, None)):
        case = Case((700, 513, 286, 1), batch=1 if starts is None else 2, window=window, starts=starts)
        q, k, v, grad = (x.detach() for x in case.inputs())
        with forced(backend):
            found = run_in_slices(case)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=visible(case), enable_gqa=True)
        assert error(found, [out.detach(), *torch.autograd.grad(out, leaves, grad)]) <= BOUND


def test_the_fused_kernel_computes_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores per head, of forwards and backwards: a window's, not those of the prefix; a document's, not the row's."""
    scores: list[int] = []
    run, run_backward = CpuFlash.run, CpuFlash.run_backward

    def count(block: Block) -> None:
        scores.append(block.q.shape[:3].numel() * block.k.shape[2])

    monkeypatch.setattr(CpuFlash, "run", lambda self, block: count(block) or run(self, block))
    monkeypatch.setattr(
        CpuFlash,
        "run_backward",
        lambda self, grad, block, *rest: count(block) or run_backward(self, grad, block, *rest),
    )
    edges = tuple(range(0, 2048, 128))
    for options, needed in (
        ({"window": 128}, 2048 * 128), ({"starts": (edges,)}, 2048 * 128), ({"window": 512}, 2048 * 512),
        ({"window": 64, "starts": (edges,)}, 2048 * 64), ({}, 2048 * 1024),
    ):  # fmt: skip
        scores.clear()
        case = Case(lengths=(512,) * 4, batch=1, heads=1, kv_heads=1, **options)
        run_in_slices(case)
        assert sum(scores) <= 2 * 1.5 * needed, options


def test_the_reference_keeps_no_row_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have at most 512 queries and 512 keys, and those out of reach are left out."""
    tiles: list[tuple[int, int]] = []

    def recorded(queries: Any, rows: Any, tile: Any, original: Any = reference._scores) -> Any:
        tiles.append((tile.row_stop - tile.row, tile.column_stop - tile.column))
        return original(queries, rows, tile)

    monkeypatch.setattr(reference, "_scores", recorded)
    plain, windowed = Case(lengths=(700, 1300), softcap=2.0), Case(lengths=(700, 1300), softcap=2.0, window=100)
    for case, most in ((plain, 2000 * 2001 / 2 * 1.5), (windowed, 2000 * (100 + 512))):
        tiles.clear()
        run_in_slices(dataclasses.replace(case, batch=1, heads=1, kv_heads=1))
        assert max(max(sizes) for sizes in tiles) <= 512
        assert sum(rows * columns for rows, columns in tiles) <= 2 * most  # forwards and backwards


ALL: dict[str, Any] = {"value_dim": 8, "window": 50, "with_sinks": True, "starts": ((0, 90), (0, 10, 130))}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("options", [{"value_dim": 16}, ALL], ids=["plain", "all"])
def test_error_of_16_bits(options: dict[str, Any], backend: str | None, dtype: torch.dtype, bound: float) -> None:
    case = Case((60, 70, 40, 30), dim=16, softcap=2.0 if backend else None, dtype=dtype, **options)
    with forced(backend):
        assert 0 < error(run_in_slices(case), run_formula(case)) <= bound


def test_gradients_of_sinks_alone() -> None:
    """The sinks of a layer whose input is frozen: nothing waits for gradients of keys and values."""
    case = Case(with_sinks=True, window=4)
    q, k, v, grad, sinks = case.inputs()
    store, sinks = SliceStore(), sinks.requires_grad_()
    outs = []
    for active in case.slices(store):
        with push_slice(active):
            outs.append(case.attend(*(x[:, :, active.start : active.stop] for x in (q, k, v)), sinks))
    for active, out in reversed(list(zip(case.slices(store), outs, strict=True))):
        out.backward(grad[:, :, active.start : active.stop])
    store.release(0, 0)
    assert sinks.grad is not None
    assert error([sinks.grad], run_formula(case)[4:]) <= BOUND


def test_sinks_of_another_dtype_than_the_queries() -> None:
    case = Case(with_sinks=True, dtype=torch.float32)
    q, k, v, *_ = case.inputs()
    for dtype in (torch.float64, torch.bfloat16):
        sinks = torch.ones(4, dtype=dtype, requires_grad=True)
        sliced_attention(q, k, v, 0, sinks=sinks).sum().backward()
        assert sinks.grad is not None and sinks.grad.dtype == dtype and sinks.grad.any()


# -- documents without an engine ------------------------------------------------------------------------------------


def test_documents_of_whole_rows() -> None:
    case = Case(starts=((0, 3, 12), (0, 11)))
    position_ids = Documents(case.starts or (), 0, case.length).position_ids()
    q, k, v, grad, *_ = (x.requires_grad_() for x in case.inputs())
    with documents(position_ids) as edges:
        active = active_slice()
        assert active is not None and active.documents is edges and active.is_whole and active.store is None
        assert edges == Documents(((0, 3, 12), (0, 11)), 0, 20)
        out = sliced_attention(q, k, v, "layer")
    assert active_slice() is None
    assert error([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)], run_formula(case)) <= BOUND


def test_rows_of_one_document_are_plain() -> None:
    q, k, v, *_ = Case().inputs()
    with documents(torch.arange(5, 25).expand(2, 20)):
        torch.testing.assert_close(sliced_attention(q, k, v, 0), sliced_attention(q, k, v, 0, window=20))
        whole = sliced_attention(q, k, v, 0)
    assert torch.equal(whole, sliced_attention(q, k, v, 0))


def test_documents_in_a_slice_of_the_engine() -> None:
    with (
        push_slice(ActiveSlice(0, 5, 10)),
        pytest.raises(RuntimeError, match=r"while slice \[0, 5\) of 10.*'documents'"),
    ):
        with documents(torch.zeros(1, 10, dtype=torch.int64)):
            pass


ZEROS = torch.zeros(1, 5)


@pytest.mark.parametrize("position_ids", [ZEROS[0].long(), ZEROS, ZEROS[:, :0].long(), ZEROS == 0, ZEROS * 1j])
def test_position_ids_that_are_none(position_ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"integers \[B, L\] and some, got \["):
        with documents(position_ids):
            pass


def test_position_ids_of_few_bits() -> None:
    """The number after the last one would be the 0 that the next document starts with."""
    with documents(torch.cat([torch.arange(256), torch.arange(4)])[None].to(torch.uint8)) as edges:
        assert edges.starts == ((0, 256),)


# -- values that cannot be right ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"window": 0}, "layer 'here': window must be a number of tokens >= 1.*got 0"),
    ({"window": 4.0}, "got 4.0"),
    ({"window": True}, "got True"),
    ({"softcap": 0.0}, "softcap must be a finite number > 0, or None, got 0.0"),
    ({"softcap": float("inf")}, "got inf"),
    ({"softcap": torch.tensor(2.0, requires_grad=True)}, "softcap must be.*got tensor.*would get no gradient"),
    ({"scale": torch.tensor(2.0, requires_grad=True), "window": 3}, "scale must be a finite number > 0, or None"),
    ({"scale": 0.0, "window": 3}, "scale must be.*got 0.0; multiply q by any other"),  # NaN on CPU
    ({"scale": -1.0, "window": 3}, "scale must be.*got -1.0"),
    ({"sinks": torch.zeros(3)}, r"one number per query head, \[4\], got \[3\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, "of torch.int64"),
    ({"sinks": torch.zeros(4, device="meta")}, "on the device of q, cpu, not on meta"),
])  # fmt: skip
def test_options_that_cannot_be_right(options: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 4, 5, 8)
    for active in (ActiveSlice(0, 5, 10, store=SliceStore()), ActiveSlice(0, 5, 5)):
        with push_slice(active), pytest.raises(ValueError, match=message):
            sliced_attention(x, x, x, "here", **options)
    with pytest.raises(ValueError, match=message):
        sliced_attention(x, x, x, "here", **options)


def test_documents_of_another_batch() -> None:
    x = torch.zeros(3, 4, 5, 8)
    with (
        documents(torch.zeros(2, 5, dtype=torch.int64)),
        pytest.raises(ValueError, match="those of 2 rows, but q has 3"),
    ):
        sliced_attention(x, x, x, 0)
    with documents(torch.zeros(3, 6, dtype=torch.int64)), pytest.raises(ValueError, match="has 6 tokens, so q must be"):
        sliced_attention(x, x, x, 0)
