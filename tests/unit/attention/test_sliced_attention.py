"""Sliced attention equals plain causal attention: outputs and gradients, for every plan, backend and dtype."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    MicroBatch,
    Result,
    Tensor,
    forced,
    largest_error,
    random_inputs,
    run_plain,
    run_sliced,
)

from terapipe_ds.attention import (
    ActiveSlice,
    SliceStore,
    SliceStoreError,
    opaque,
    push_slice,
    running_layer,
    sliced_attention,
)
from terapipe_ds.attention.call import WholeSequence

ON_CPU = [None, "cpu_flash", "reference"]


def test_half_precision_is_merged_and_summed_in_fp32() -> None:
    """In bf16 the merged outputs of blocks are 3.8e-3 off, and the gradients of 16 slices 2.8e-3."""
    inputs = random_inputs((1, 4, 4, 512, 32), torch.bfloat16)
    both = zip(run_sliced(inputs, (32,) * 16), run_plain(inputs), strict=True)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in both]
    assert errors[0] <= 3e-3 and max(errors[1:]) <= 2.4e-3


def test_a_whole_sequence_sums_gradients_in_fp32() -> None:
    """Documents and windows call a kernel several times for the same keys."""
    keys = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    (entry := WholeSequence(keys, keys)).begin_backward(0, 2)
    for part in (1.0, *[2.0**-9] * 256):  # in bf16 each of these rounds away
        entry.add_grads(1, torch.full((1, 1, 1, 8), part), torch.full((1, 1, 1, 8), -part))
    assert [x[0, 0, :, 0].tolist() for x in entry.end_backward(0, 2)] == [[0.0, 1.5], [0.0, -1.5]]


@pytest.mark.parametrize("layout", ["tokens first", "fused", "head dim not last"])
def test_any_memory_layout(layout: str) -> None:
    inputs = random_inputs((2, 4, 4, 20, 8))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "tokens first":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if layout == "head dim not last":
            q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
        if layout == "fused":
            q, k, v = torch.cat((q, k, v), dim=-1).chunk(3, dim=-1)
        return sliced_attention(q, k, v, 0)

    assert largest_error(run_sliced(inputs, (9, 11), attend=attend), run_plain(inputs)) <= 1e-12


def test_the_merged_log_sum_exp_survives_extreme_scores() -> None:
    """Scores of +-1000: one of the two blocks has no weight at all in many rows."""
    inputs = random_inputs((1, 2, 2, 20, 8))
    inputs[0] *= 300
    with forced("cpu_flash"):
        assert largest_error(run_sliced(inputs, (9, 10, 1)), run_plain(inputs)) <= 1e-12


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("backend", ON_CPU)
def test_gradients_of_some_inputs_only(needs: tuple[int, ...], backend: str | None) -> None:
    inputs = random_inputs((2, 4, 2, 20, 8))
    expected = run_plain(inputs)
    store = SliceStore()
    with forced(backend):
        result = run_sliced(inputs, (9, 10, 1), store, needs_grad=[bool(n) for n in needs])
    for needed, got, want in zip((1, *needs), result, expected, strict=True):
        assert torch.allclose(got, want, atol=1e-12) if needed else not got.any()
    kv_bytes = 2 * 2 * 20 * 2 * 8 * 8
    assert store.pool.peak_bytes == (2 if any(needs[1:]) else 1) * kv_bytes


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_needs_no_node_and_gives_the_same(grad_mode: Callable[[], Any]) -> None:
    inputs = random_inputs()
    store = SliceStore()
    micro_batch = MicroBatch(inputs, (9, 10, 1), store, mode="eval")
    with grad_mode():
        outs = [micro_batch.forward(i) for i in range(3)]
    assert not any(out.requires_grad for out in outs)
    store.release(0, 0)
    store.assert_drained()
    torch.testing.assert_close(torch.cat(outs, 2), run_plain(inputs).out)
    in_the_same_buffers = run_sliced(inputs, (9, 10, 1), store)
    assert largest_error(in_the_same_buffers, run_plain(inputs)) <= 1e-12


def test_autocast_computes_as_the_plain_function_does() -> None:
    inputs = random_inputs((2, 4, 4, 20, 8), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = F.scaled_dot_product_attention(*inputs[:3], is_causal=True)
        result = run_sliced(inputs, (9, 11), SliceStore())
        wide = run_sliced([x.double() for x in inputs], (9, 11), SliceStore())
    assert result.out.dtype == plain.dtype == torch.bfloat16
    assert result.dq.dtype == torch.float32
    assert largest_error(result, run_plain(inputs)) <= 2e-2
    assert wide.out.dtype == torch.float64 and largest_error(wide, run_plain(inputs)) <= 1e-12


def test_a_compiler_may_use_the_memory_of_keys_and_values_again() -> None:
    """It plans memory by the tensors that the graph saves; inductor wrote another result there."""
    q, k, v, grad = inputs = random_inputs()
    expected = run_plain(inputs)
    with running_layer("layer"), push_slice(ActiveSlice(0, 20, 20)):
        out, lse, number = torch.ops.terapipe_ds.attend(q, k, v, None, None, 0.0, None, None, True, True, 0)
        for x in (k, v):
            x.zero_()
        gradients = torch.ops.terapipe_ds.attend_backward(grad, q, out, lse, number, None, 4)[:3]
    assert largest_error(Result(out, *gradients), expected) <= 1e-12


def test_double_backward_is_refused() -> None:
    inputs = random_inputs()
    micro_batch = MicroBatch(inputs, (9, 11), SliceStore())
    micro_batch.forward_all()
    out = micro_batch.outs[1]
    assert out is not None
    (dq,) = torch.autograd.grad(out.square().sum(), micro_batch.leaves[1][0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# -- input that cannot be right -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shapes", "message"), [
    (((1, 4, 6, 8), (1, 4, 5, 8), (1, 4, 5, 8)), r"5 tokens, so q must be \[B, H, 5, D\], got q \(1, 4, 6, 8\)"),
    (((4, 5, 8), (4, 5, 8), (4, 5, 8)), r"\[B, H, 5, D\]"),
    (((1, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)), r"k \(1, 4, 6, 8\)"),
    (((1, 4, 5, 8), (1, 4, 5, 8), (1, 2, 5, 8)), r"v \(1, 2, 5, 8\)"),
    (((1, 4, 5, 8), (1, 4, 5, 4), (1, 4, 5, 4)), r"k \[B, H_kv, T, D\] and v \[B, H_kv, T, D_v\]"),
    (((1, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)), r"k \(2, 4, 5, 8\)"),
    (((1, 4, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)), r"multiple of the key heads"),
])  # fmt: skip
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with push_slice(ActiveSlice(0, 5, 10, store=SliceStore())), pytest.raises(ValueError, match=message):
        sliced_attention(*(torch.zeros(shape) for shape in shapes), layer="block 3")


@pytest.mark.parametrize("is_active", [False, True])
def test_whole_sequences_refuse_keys_of_other_tokens(is_active: bool) -> None:
    """Torch's causal mask begins at the first key, so that the one query here would see only that."""
    q, keys = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 5, 8)
    context = push_slice(ActiveSlice(0, 1, 1)) if is_active else contextlib.nullcontext()
    with context, pytest.raises(ValueError, match=r"block 3.*k \[B, H_kv, T, D\].*k \(1, 2, 5, 8\)"):
        sliced_attention(q, keys, keys, "block 3")


@pytest.mark.parametrize("backend", ON_CPU)
def test_what_it_gives_must_not_change_in_place_as_with_torch_s_kernel(backend: str | None) -> None:
    """Torch's fused kernels save what they give, too; here the error names the layer."""
    q, k, v = (x.requires_grad_() for x in random_inputs((1, 2, 2, 10, 8))[:3])
    with forced(backend), push_slice(ActiveSlice(0, 5, 10, store=SliceStore())):
        given = sliced_attention(*(x[:, :, :5] for x in (q, k, v)), "layer 3")
        given *= 2.0
        with pytest.raises(SliceStoreError, match=r"layer 'layer 3': an input or output .* changed in place"):
            given.sum().backward()
    stock = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    stock *= 2.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stock.sum().backward()


def test_other_bad_input() -> None:
    x = torch.zeros(1, 2, 5, 8)
    with push_slice(ActiveSlice(0, 5, 10, store=SliceStore())):
        with pytest.raises(ValueError, match="one dtype.*float32.*float64"):
            sliced_attention(x, x.double(), x.double(), 0)
        with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.0"):
            sliced_attention(x, x, x, 0, dropout_p=1.0)
    with push_slice(ActiveSlice(0, 5, 10)), pytest.raises(SliceStoreError, match=r"needs a slice store.*SliceStore\("):
        sliced_attention(x, x, x, 0)


def test_a_call_of_a_compiled_layer_has_a_name_and_one_backward() -> None:
    q, k, v, grad = random_inputs((1, 4, 2, 5, 8))
    inputs: Any = q, k, v, None, None, 0.0, None, None, True, True, 0
    with push_slice(ActiveSlice(0, 5, 5)):
        with pytest.raises(SliceStoreError, match="compiled outside of the engine, so that its name is not known"):
            opaque.attend(*inputs)
        with running_layer("layer 3"):
            out, lse, number = opaque.attend(*inputs)
        d_q, d_k, d_v, _ = opaque.attend_backward(grad, q, out, lse, number, None, 2)
        assert largest_error(Result(out, d_q, d_k, d_v), run_plain((q, k, v, grad))) <= 1e-12
        with pytest.raises(SliceStoreError, match="ran its backward twice"):
            opaque.attend_backward(grad, q, out, lse, number, None, 2)
