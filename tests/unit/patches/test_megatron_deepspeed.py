"""The helpers that upstream's inserted lines call, against plain formulas in upstream's layout [T, B, H, D]."""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.plan import SlicePlan
from tests import mini_megatron  # noqa: F401 - puts patches/ on the path

import terapipe_patch as helpers  # isort: skip
from terapipe_patch import PatchError  # isort: skip

LENGTH, ROWS, HEADS, DIM = 13, 2, 3, 8
PLANS = [(13,), (5, 8), (4, 4, 4, 1), (1, 6, 6)]  # slices of one length as well: a table kept by length would be wrong


class Attention(nn.Module):
    """What `attend` reads of upstream's ParallelAttention."""

    def __init__(self, layer_number: int = 1, mask: str = "causal") -> None:
        super().__init__()
        self.layer_number, self.attn_mask_type = layer_number, SimpleNamespace(name=mask)


def angles(rotary_dim: int, length: int = LENGTH) -> Tensor:
    """[L, 1, 1, R] in upstream's form: the R/2 angles twice."""
    turns = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    half = torch.outer(torch.arange(length, dtype=torch.float64), turns)
    return torch.cat((half, half), -1)[:, None, None]


def rotated(x: Tensor, rotary_dim: int) -> Tensor:
    """Rotary positions of a whole sequence x [L, B, H, D], each pair (i, i + R/2) as one complex number."""
    half = rotary_dim // 2
    turns = torch.polar(torch.ones(1, dtype=torch.float64), angles(rotary_dim)[..., :half])
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turns
    return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:]), -1)


def plain(q: Tensor, k: Tensor, v: Tensor, rotary_dim: int) -> Tensor:
    """Causal attention of the whole sequence, [L, B, H, D] -> [L, B, H * D]."""
    if rotary_dim:
        q, k = rotated(q, rotary_dim), rotated(k, rotary_dim)
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) / math.sqrt(DIM)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2)


def drawn() -> list[Tensor]:
    """q, k, v of two layers, [L, B, H, D] each."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(LENGTH, ROWS, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(6)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, DIM, 4])
@pytest.mark.parametrize("form", ["angles", "cosines"])
def test_slices_give_what_the_whole_sequence_gives(plan: tuple[int, ...], rotary_dim: int, form: str) -> None:
    """Forward; `tests/distributed/test_megatron_patch.py` trains."""
    rotary: Any = None
    if rotary_dim:
        table = angles(rotary_dim)
        rotary = table if form == "angles" else [table.cos(), table.sin()]
    layers = [Attention(7), Attention(7)]  # upstream numbers its first two layers alike; the number scales nothing
    args, store, inputs = SimpleNamespace(attention_dropout=0.0), SliceStore(), drawn()
    for n, layer in enumerate(layers):
        q, k, v = inputs[3 * n : 3 * n + 3]
        whole = plain(q, k, v, rotary_dim)
        for index, (start, stop) in enumerate(map(SlicePlan(plan).span, range(len(plan)))):
            cut = (x[start:stop] for x in (q, k, v))
            with push_slice(ActiveSlice(start, stop, LENGTH, slice_id=index, store=store)):
                out = helpers.attend(layer, *cut, rotary, args, contextlib.nullcontext)
            torch.testing.assert_close(out, whole[start:stop], rtol=0, atol=1e-12)


def test_dropout_draws_from_the_random_state_of_the_rank() -> None:
    q, k, v = drawn()[:3]
    forks = []

    @contextlib.contextmanager
    def fork() -> Iterator[None]:
        forks.append(torch.get_rng_state())
        yield

    attention, args = Attention(), SimpleNamespace(attention_dropout=0.5)
    with push_slice(ActiveSlice(0, LENGTH, LENGTH)):
        dropped = helpers.attend(attention, q, k, v, None, args, fork)
        kept = helpers.attend(attention.eval(), q, k, v, None, args, fork)
    assert len(forks) == 1
    torch.testing.assert_close(kept, plain(q, k, v, 0))
    assert not torch.allclose(dropped, kept)


def attend(layer: nn.Module) -> None:
    with push_slice(ActiveSlice(0, LENGTH, LENGTH)):
        helpers.attend(layer, *drawn()[:3], None, SimpleNamespace(attention_dropout=0.0), contextlib.nullcontext)


def test_other_masks_and_tables_that_are_too_short_are_refused() -> None:
    with pytest.raises(PatchError, match="padding mask"):
        attend(Attention(mask="padding"))
    with pytest.raises(PatchError, match=r"\[6, 10\).*9 positions"):
        helpers.turn(torch.zeros(4, ROWS, HEADS, DIM), angles(DIM, length=9), 6)


def test_without_a_slice_upstream_goes_on() -> None:
    assert not helpers.slicing(SimpleNamespace(deepspeed_config_dict={}))
    assert not helpers.slicing(SimpleNamespace())
    with push_slice(ActiveSlice(0, 4, 8)):
        assert helpers.slicing(SimpleNamespace(deepspeed_config_dict={}))


def test_the_weight_of_a_slice_counts_its_mask() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    assert helpers.slice_weight((torch.zeros(2, 3), mask)) == 4.0


def test_an_attention_layer_that_no_slice_reached_stops_the_first_step() -> None:
    ParallelAttention = type("ParallelAttention", (Attention,), {})
    model = nn.Sequential(ParallelAttention(), ParallelAttention(), nn.Linear(2, 2))
    attend(model[0])
    with pytest.raises(PatchError, match=r"sliced attention: 1\. .*transformer\.py"):
        helpers.before_reduce(model, None)
    attend(model[1])
    helpers.before_reduce(model, None)
