"""Layers with carried states: on slices they give what they give on each document alone, to 1e-10 in fp64."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import slices_of
from carry_cases import (
    CHECKPOINTS,
    draw_parameters,
    evaluate_sliced,
    gradients_of,
    largest_error,
    random_input,
    run_alone,
    run_sliced,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from terapipe_ds.attention import SliceStore, carry, push_slice
from tests.small_models.mixers import MIXERS, Ahead, AheadLoss

EXACT = 1e-10
HEADS, WIDTH = 2, 8


def mixer(kind: str, width: int = WIDTH, heads: int = HEADS) -> nn.Module:
    layer = MIXERS[kind](3, width, heads).double()
    draw_parameters(layer)
    return layer


@st.composite
def cuts(draw: st.DrawFn, length: int, most: int = 6) -> tuple[int, ...]:
    """Where a sequence is cut, with 0."""
    return (0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=most))))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    has_documents = draw(st.booleans())
    edges = [*draw(cuts(length)), length]
    heads = draw(st.sampled_from([1, 2]))
    return {
        "shape": (rows, length, heads * draw(st.sampled_from([2, 4]))),
        "heads": heads,
        "lengths": tuple(stop - start for start, stop in itertools.pairwise(edges)),
        "starts": tuple(draw(cuts(length, 3)) for _ in range(rows)) if has_documents else None,
        "recompute": draw(st.sampled_from(sorted(CHECKPOINTS))),
        "seed": draw(st.integers(0, 2**20)),
    }


@pytest.mark.parametrize("kind", MIXERS)
@settings(max_examples=settings().max_examples // 2)
@given(case=cases())
def test_slices_equal_each_document_alone(kind: str, case: dict[str, Any]) -> None:
    shape, lengths, starts = case["shape"], case["lengths"], case["starts"]
    layer = mixer(kind, shape[-1], case["heads"])
    x, grad = random_input(shape, case["seed"]), random_input(shape, case["seed"] + 1)
    expected = run_alone(layer, x, grad, starts)
    result = run_sliced(layer, x, grad, lengths, starts, case["recompute"])
    assert largest_error(result, expected) <= EXACT
    assert largest_error([evaluate_sliced(layer, x, lengths, starts)], expected[:1]) <= EXACT


# -- the layers themselves, against formulas of their own ------------------------------------------------------------


def by_tokens(layer: Any, x: Tensor, log_gates: Tensor, rotate: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """S_t = g_t S_(t-1) + k_t v_t^T and q_t S_t, one token after the other: [B, H, T, D]."""
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in layer.qkv(x).chunk(3, -1))
    q, k = rotate(q), rotate(k)
    state, outs = torch.zeros(len(x), HEADS, q.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = log_gates[:, :, t, None, None].exp() * state + torch.einsum("bhi,bhj->bhij", k[:, :, t], v[:, :, t])
        outs.append(torch.einsum("bhi,bhij->bhj", q[:, :, t], state))
    return torch.stack(outs, 2)


def gated_linear_attention(layer: Any, x: Tensor) -> Tensor:
    out = by_tokens(layer, x, layer.gate(x).sigmoid().log().transpose(1, 2))
    return x + layer.out(out.transpose(1, 2).flatten(2)) * (WIDTH // HEADS) ** -0.5


def retention(layer: Any, x: Tensor) -> Tensor:
    """With complex numbers in place of rotated pairs."""

    def rotate(y: Tensor) -> Tensor:
        half = y.shape[-1] // 2
        speeds = 10_000 ** -torch.linspace(0, 1, half, dtype=x.dtype)
        turned = torch.polar(torch.ones(x.shape[1], half, dtype=x.dtype), torch.arange(x.shape[1])[:, None] * speeds)
        pairs = torch.complex(y[..., :half].contiguous(), y[..., half:].contiguous()) * turned
        return torch.cat([pairs.real, pairs.imag], -1)

    gates = 1 - 2.0 ** (-5.0 - torch.arange(HEADS, dtype=x.dtype))
    log_gates = gates.log()[None, :, None].expand(len(x), -1, x.shape[1])
    out = by_tokens(layer, x, log_gates, rotate) * (WIDTH // HEADS) ** -0.5
    out = out / (out.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
    gate = layer.gate(x)
    return x + layer.out(out.transpose(1, 2).flatten(2) * gate * gate.sigmoid())


def convolution(layer: Any, x: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (layer.taps - 1, 0))
    return x + F.silu(layer.convolution(padded)).transpose(1, 2)


@pytest.mark.parametrize("formula", [gated_linear_attention, retention, convolution], ids=lambda f: f.__name__)
def test_the_layers_of_the_page_are_what_they_say(formula: Callable[[Any, Tensor], Tensor]) -> None:
    layer, x = mixer(formula.__name__), random_input((2, 11, WIDTH))
    assert largest_error([layer(x)], [formula(layer, x)]) <= 1e-12


# -- several states of a layer ---------------------------------------------------------------------------------------


class Lstm(nn.Module):
    """torch's own, whose state is two tensors, which stand in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states = [carry.read(self, name) for name in ("h", "c")]
        before = None if states[0] is None else tuple(state.transpose(0, 1).contiguous() for state in states)
        out, last = self.lstm(x, before)
        for name, state in zip(("h", "c"), last, strict=True):
            out = carry.write(self, name, state.transpose(0, 1), out)
        return out


@pytest.mark.parametrize("recompute", CHECKPOINTS)
def test_a_layer_with_two_states(recompute: str) -> None:
    layer = Lstm().double()
    x, grad = random_input((2, 12, WIDTH)), random_input((2, 12, WIDTH), 1)
    result = run_sliced(layer, x, grad, (5, 1, 6), recompute=recompute)
    assert largest_error(result, run_alone(layer, x, grad)) <= EXACT


# -- predicting further ahead ----------------------------------------------------------------------------------------


@given(ahead=st.integers(1, 5), inner=cuts(12), recompute=st.sampled_from(sorted(CHECKPOINTS)))
def test_a_head_that_predicts_further_ahead(ahead: int, inner: tuple[int, ...], recompute: str) -> None:
    """The loss and its gradients are those of logits that are shifted whole, without anything carried."""
    vocabulary, rows, length = 7, 2, 12
    layer, loss_fn = Ahead(0, WIDTH, vocabulary, ahead).double(), AheadLoss(ahead)
    draw_parameters(layer)
    hidden = random_input((rows, length, WIDTH))
    labels = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    labels[0, 3:8] = -100
    leaf = hidden.clone().requires_grad_()
    early = layer.head(leaf + layer.predict(leaf))[:, :-ahead]  # position p predicts the label of p + ahead
    both = [(layer.head(leaf), labels), (early, labels[:, ahead:])]
    sums = [F.cross_entropy(a.flatten(0, 1), b.flatten(), ignore_index=-100, reduction="sum") for a, b in both]
    loss = (sums[0] + 0.3 * sums[1]) / int((labels != -100).sum())
    loss.backward()
    assert leaf.grad is not None
    expected = [loss.detach(), leaf.grad, *gradients_of(layer)]
    lengths = [stop - start for start, stop in itertools.pairwise([*inner, length])]
    assert largest_error(_sliced_loss(layer, loss_fn, hidden, labels, lengths, recompute), expected) <= EXACT


def _sliced_loss(
    layer: Any, loss_fn: Any, hidden: Tensor, labels: Tensor, lengths: Sequence[int], recompute: str
) -> list[Tensor]:
    store = SliceStore()
    slices = slices_of(lengths, store)
    leaves = [hidden[:, s.start : s.stop].clone().requires_grad_() for s in slices]
    valid, losses = (labels != -100).sum(), []
    for active, leaf in zip(slices, leaves, strict=True):
        with push_slice(active):
            outputs, own = CHECKPOINTS[recompute](layer, leaf), labels[:, active.start : active.stop]
            count = (own != -100).sum()
            losses.append(loss_fn(outputs, own) * count / valid if count else sum(each.sum() * 0 for each in outputs))
    total = torch.stack([each.detach() for each in losses]).sum()
    while losses:
        with push_slice(slices[len(losses) - 1].replace(mode="recompute")):
            losses.pop().backward()
    store.release(0, 0)
    return [total, torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None], 1), *gradients_of(layer)]
