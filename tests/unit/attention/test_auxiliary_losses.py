"""The balance loss and the z-loss of docs/auxiliary_losses.md on slices of packed rows, as of each document alone."""

import itertools

import torch
from attention_cases import slices_of
from carry_cases import draw_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terapipe_ds.attention import SliceStore, push_slice
from terapipe_ds.attention.document_edges import Starts
from tests.small_models.experts import ExpertsLayer, plain_experts

ROWS, LENGTH, WIDTH = 2, 11, 6
EDGES = st.sets(st.integers(1, LENGTH - 1), max_size=4).map(sorted)


def experts() -> ExpertsLayer:
    layer = ExpertsLayer(3, WIDTH, torch.float64)
    draw_parameters(layer)
    return layer


def loss_of(hidden: Tensor, added: Tensor) -> Tensor:
    return hidden.sin().sum() + added.sum()


def by_slices(layer: ExpertsLayer, x: Tensor, cuts: list[int], starts: Starts | None) -> list[Tensor]:
    store, runs, total = SliceStore(), [], torch.zeros((), dtype=x.dtype)
    lengths = [stop - start for start, stop in itertools.pairwise([0, *cuts, LENGTH])]
    for active in slices_of(lengths, store, starts):
        with push_slice(active):
            part = x[:, active.start : active.stop]
            runs.append((active, loss_of(*layer((part, part.new_zeros(part.shape[:2]))))))
        total = total + runs[-1][1].detach()
    for active, loss in reversed(runs):
        with push_slice(active.replace(mode="recompute")):
            loss.backward(retain_graph=True)
    store.release(0, 0)
    return [total]


def by_documents(layer: ExpertsLayer, x: Tensor, starts: Starts | None) -> list[Tensor]:
    """Each document's own losses, which weigh by its tokens."""
    total = torch.zeros((), dtype=x.dtype)
    with plain_experts():
        for row, edges in zip(x, starts or ((0,),) * ROWS, strict=True):
            for start, stop in itertools.pairwise([*edges, LENGTH]):
                hidden, added = layer((row[None, start:stop], row.new_zeros(1, stop - start)))
                total = total + hidden.sin().sum() + added.sum() * (stop - start) / (ROWS * LENGTH)
    total.backward()
    return [total.detach()]


@settings(max_examples=40, deadline=None)
@given(cuts=EDGES, edges=st.none() | st.tuples(EDGES, EDGES), seed=st.integers(0, 99))
def test_slices_give_what_each_document_gives(cuts: list[int], edges: tuple[list[int], ...] | None, seed: int) -> None:
    starts = edges and tuple((0, *row) for row in edges)
    results = []
    for run in (lambda *args: by_slices(*args, cuts, starts), lambda *args: by_documents(*args, starts)):
        layer = experts()
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        total = run(layer, x.requires_grad_())
        results.append([*total, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, expected in zip(*results, strict=True):
        assert ours is not None and expected is not None
        assert float((ours - expected).norm() / expected.norm()) <= 1e-10
