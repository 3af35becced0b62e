"""The exchange of tokens for heads: what each rank gets, its gradient, attention over slices, and what is refused."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, carry, push_slice, sliced_attention
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.attention.exchange import SequenceRanks, to_heads, to_tokens
from terapipe_ds.models.positions import first_position
from tests.distributed.harness import rank_pool

SIZE = 2


class Ranks:
    """Ranks as threads; their all-to-alls meet at a barrier, one after the other."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._sent = size, threading.Barrier(size, timeout=20), [torch.empty(0)] * size

    def all_to_all(self, rank: int, received: Tensor, sent: Tensor) -> None:
        self._sent[rank] = sent.clone()
        self._barrier.wait()
        received.copy_(torch.stack([self._sent[source][rank] for source in range(self.size)]))
        self._barrier.wait()

    def run(self, job: Callable[[SequenceRanks], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = job(SequenceRanks(self.size, rank, functools.partial(self.all_to_all, rank)))
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_all_tokens_of_its_heads_and_back(size: int) -> None:
    q, k = drawn(2, 6, 12, 4), drawn(2, 3, 12, 4, seed=1)

    def job(ranks: SequenceRanks) -> tuple[Tensor, ...]:
        own = [x.chunk(size, dim=2)[ranks.rank] for x in (q, k if size == 3 else q)]
        heads = to_heads(own, ranks)
        return *heads, to_tokens(heads[0], ranks)

    for rank, (heads, others, back) in enumerate(Ranks(size).run(job)):
        assert torch.equal(heads, q.chunk(size, dim=1)[rank])
        assert torch.equal(others, (k if size == 3 else q).chunk(size, dim=1)[rank])
        assert torch.equal(back, q.chunk(size, dim=2)[rank])


def test_gradient_is_the_inverse_exchange() -> None:
    """Each token's gradient is the weight that the rank with its head has given to it."""
    q, weights = drawn(1, 4, 6, 2), drawn(1, 4, 6, 2, seed=1)

    def job(ranks: SequenceRanks) -> Tensor:
        own = q.chunk(SIZE, dim=2)[ranks.rank].clone().requires_grad_()
        (heads,) = to_heads((own,), ranks)
        heads *= weights.chunk(SIZE, dim=1)[ranks.rank]  # in place, as layers may
        to_tokens(heads, ranks).mul_(1.0).sum().backward()
        assert own.grad is not None
        return own.grad

    gradients = torch.cat(Ranks(SIZE).run(job), dim=2)
    assert torch.equal(gradients, weights)


def test_spans_are_contiguous_and_uneven_slices_refused() -> None:
    assert [SequenceRanks(3, rank).span(6, 12) for rank in range(3)] == [(6, 8), (8, 10), (10, 12)]
    with pytest.raises(ValueError, match=r"slice \[6, 11\) has 5 tokens.*2 sequence ranks.*multiple of 2 tokens"):
        SequenceRanks(2, 0).span(6, 11)


def part(tokens: int = 4) -> ActiveSlice:
    """Rank 0 of two, with half the tokens of the first slice."""
    return SequenceRanks(2, 0).part_of(ActiveSlice(0, tokens, 8, store=SliceStore()))


def test_a_rank_knows_where_its_tokens_start() -> None:
    documents = Documents(((0, 5),), 4, 8)
    active = SequenceRanks(2, 1).part_of(ActiveSlice(4, 8, 8, documents=documents))
    assert (active.start, active.stop, active.is_whole) == (6, 8, False)
    assert active.documents is not None
    assert active.documents.position_ids().tolist() == [[1, 2]]
    with push_slice(active):
        assert first_position() == 6
    alone = ActiveSlice(4, 8, 8)
    assert SequenceRanks().part_of(alone) is alone


@pytest.mark.parametrize(("q", "k", "message"), [
    ((1, 3, 2, 4), (1, 3, 2, 4), "3 query heads cannot be divided over 2 sequence ranks"),
    ((1, 4, 4, 4), (1, 4, 4, 4), r"\[0, 2\) has 2 tokens on this sequence rank, so q must be \[B, H, 2, D\]"),
    ((1, 4, 2, 4), (1, 3, 2, 4), "query heads must be a multiple of the key heads"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(q: tuple[int, ...], k: tuple[int, ...], message: str) -> None:
    with push_slice(part()), pytest.raises(ValueError, match=message):
        sliced_attention(drawn(*q), drawn(*k), drawn(*k), "layer 0")


def test_autocast_gives_mixed_inputs_one_dtype() -> None:
    """Rotary angles in fp32 leave queries and keys in fp32 beside values in bf16."""
    q, k, v = (drawn(1, 4, 2, 4).to(dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    with push_slice(part()), torch.autocast("cpu", torch.bfloat16):
        assert sliced_attention(q, k, v, "layer 0").dtype == torch.bfloat16


def test_states_and_attention_of_their_own_are_refused() -> None:
    active, x = part(), drawn(1, 4, 2, 4)
    with push_slice(active):
        with pytest.raises(SliceStoreError, match="carried states cannot be combined with a 'sequence' axis"):
            carry.read("layer 0", "state")
        with pytest.raises(SliceStoreError, match="carried states cannot be combined with a 'sequence' axis"):
            carry.write("layer 0", "state", x, x)
    assert active.store is not None
    with pytest.raises(SliceStoreError, match="sees the tokens of one sequence rank only"):
        active.store.write(active, "layer 0", x, x)


def attend_divided() -> list[Tensor]:
    """Attend in two slices of tokens that four ranks divide; return the gradients that this rank knows."""
    store, ranks = SliceStore(), SequenceRanks(4, torch_dist.get_rank(), torch_dist.all_to_all_single)
    leaves, weights, outs = heads_and_sinks(), drawn(*SHAPE, seed=4), []
    for span in ((0, 8), (8, 12)):
        active = ranks.part_of(ActiveSlice(*span, SHAPE[2], store=store))
        own = slice(active.start, active.stop)
        with push_slice(active):
            out = sliced_attention(*(x[:, :, own] for x in leaves[:3]), "layer 0", sinks=leaves[3])
        outs.append((active, out, weights[:, :, own]))
    for active, out, weight in reversed(outs):
        with push_slice(active):
            out.backward(weight)
    return [x.grad for x in leaves if x.grad is not None]


SHAPE = 2, 8, 12, 4


def heads_and_sinks() -> list[Tensor]:
    k_shape = 2, 2, 12, 4
    return [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate((SHAPE, k_shape, k_shape, (8,)))]


def test_fewer_key_heads_than_ranks_and_sinks_are_those_of_all_heads() -> None:
    q, k, v, sinks = leaves = heads_and_sinks()
    wide_k, wide_v = (x[:, [0] * 4 + [1] * 4] for x in (k, v))
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    scores = (q @ wide_k.mT / 2).masked_fill(hidden, -torch.inf)
    probs = torch.cat([scores, sinks.view(1, 8, 1, 1).expand(2, 8, 12, 1)], 3).softmax(3)
    (probs[..., :-1] @ wide_v).backward(drawn(*SHAPE, seed=4))
    for leaf, *of_ranks in zip(leaves, *rank_pool(4).run(attend_divided), strict=True):
        torch.testing.assert_close(sum(of_ranks), leaf.grad, rtol=1e-10, atol=1e-10)
