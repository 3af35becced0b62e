"""Which of several numbers that are not finite is the cause, and what is looked at."""

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, SliceStore, carry, push_slice
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.layers.finite import FiniteCheck, Look, NonFiniteError


class Stage:
    """What the check needs of a `PipelineModule`."""

    _local_start = 0

    def __init__(self, *layers: Any) -> None:
        self.forward_funcs = list(layers)

    def named_parameters(self) -> Any:
        return nn.ModuleList([layer for layer in self.forward_funcs if isinstance(layer, nn.Module)]).named_parameters()

    def parameters(self) -> Any:
        return (parameter for _, parameter in self.named_parameters())

    def __call__(self, inputs: Any) -> Any:
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs


def check_of(stage: Any, gradients: bool = True, collected: bool = False, store: SliceStore | None = None) -> Any:
    return FiniteCheck(stage, store or SliceStore(), 0, None, gradients, collected)


def on_slice(mode: str = "train") -> Any:
    return push_slice(ActiveSlice(4, 6, 8, micro_batch_id=3, slice_id=2, mode=mode))


def said(check: FiniteCheck) -> str:
    try:
        check.agree(step=7)
    except RaisedEverywhere as agreed:
        assert isinstance(agreed.error, NonFiniteError)
        return str(agreed.error)
    return ""


def look(part_id: int, micro_batch_id: int, slice_id: int, is_backward: bool) -> Look:
    active = ActiveSlice(0, 1, 8, micro_batch_id=micro_batch_id, slice_id=slice_id, part_id=part_id)
    return Look(active, "layer", "what", is_backward, (torch.zeros(()), torch.zeros(())))


def causes(one: Look, other: Look) -> bool:
    """Whether numbers flow from one to the other directly, by what a pipeline of slices does."""
    if one.active.micro_batch_id != other.active.micro_batch_id:
        return False
    step = other.active.part_id - one.active.part_id, other.active.slice_id - one.active.slice_id
    if not one.is_backward and not other.is_backward:  # to the next part; by keys and values to the next slice
        return step in ((1, 0), (0, 1))
    if one.is_backward and other.is_backward:  # the way back
        return step in ((-1, 0), (0, -1))
    return not one.is_backward and step == (0, 0)


def test_the_order_puts_causes_before_their_effects() -> None:
    places = [look(k, m, s, b) for k in range(3) for m in range(2) for s in range(3) for b in (False, True)]
    random.Random(1).shuffle(places)
    ordered = sorted(places, key=lambda each: each.order)
    assert sum(causes(a, b) for a in places for b in places) > 60
    assert not any(causes(later, earlier) for earlier, later in itertools.combinations(ordered, 2))


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite"), (3e38, "")]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_number_among_many_is_found(value: float, words: str, dtype: torch.dtype) -> None:
    tensor = torch.full((5, 40), 2.0, dtype=dtype)  # 3e38 is finite in all of these, and its square is not
    tensor[3, 17] = value
    check = check_of(Stage())
    with check.watching(), on_slice():
        check.look("layer 0 (Linear)", "its output", torch.empty(0, 3))
        check.look("layer 1 (Linear)", "its output", torch.ones(2, dtype=torch.float64))
        check.look("layer 2 (Linear)", "its output", tensor)
        text = said(check)
    assert (words in text) if words else text == ""
    if words:
        assert text.startswith("step 7 computed")
        assert "layer 2 (Linear), micro-batch 3, slice 2 (tokens [4, 6) of 8), forward: its output" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("collected", [False, True])
def test_sparse_gradients_are_looked_at(value: float, collected: bool) -> None:
    def spoils_gradients(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * value)  # after the one that looks at the input
        return x * 1

    stage = Stage(nn.Embedding(5, 2, sparse=True), spoils_gradients)
    text = run(stage, check_of(stage, collected=collected), torch.tensor([3, 1, 3]))
    assert ("layer 0 (Embedding)" in text and "the gradient of its parameter weight" in text) == (value != 1.0)


@pytest.mark.parametrize("number", [complex(math.nan, 1), complex(1, math.inf), complex(1, 1)])
def test_complex_numbers_are_looked_at(number: complex) -> None:
    factor = torch.tensor(number)
    stage = Stage(nn.Linear(3, 3), lambda x: (x * factor).conj(), lambda x: (x.conj() * factor).abs())
    text = run(stage, check_of(stage), torch.ones(2, 3))
    assert ("layer 1 (<lambda>)" in text and "forward: its output" in text) == (number != complex(1, 1))


def run(stage: Stage, check: FiniteCheck, inputs: Tensor) -> str:
    with check.watching():
        with on_slice():
            outputs = stage(inputs)
        with on_slice(mode="recompute"):
            outputs.sum().backward()
            check.look_at_parameters()
        return said(check)


def test_infinities_of_masks_are_no_mistake() -> None:
    """A mask comes behind the hidden states, is handed on at any place, and needs no gradient."""
    mask = torch.full((2, 3), -math.inf)
    stage = Stage(nn.Linear(3, 3), lambda x: (x, mask), lambda both: both[::-1], lambda both: both[1])
    assert run(stage, check_of(stage), torch.ones(2, 3)) == ""
    made = Stage(nn.Linear(3, 3), lambda x: (x, x / 0.0), lambda both: both[0])  # no mask: it has a gradient
    assert "layer 1 (<lambda>)" in run(made, check_of(made), torch.ones(2, 3))


def test_nothing_is_left_behind() -> None:
    store, stage = SliceStore(), Stage(nn.Linear(3, 3), torch.tanh, nn.Linear(3, 3))
    layers = list(stage.forward_funcs)
    check = check_of(stage, collected=True, store=store)
    with pytest.raises(KeyError), check.watching():
        assert [mine is layer for mine, layer in zip(stage.forward_funcs, layers, strict=True)] == [True, False, True]
        assert layers[0]._forward_hooks and layers[0]._forward_pre_hooks and store.on_gradients is not None
        raise KeyError
    assert stage.forward_funcs == layers
    assert store.on_gradients is None
    assert not any(parameter._backward_hooks for _, parameter in stage.named_parameters())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (layers[0], layers[2]))


def test_a_module_at_two_places_is_named_by_both() -> None:
    shared = nn.Linear(3, 3)
    torch.nn.init.constant_(shared.weight, 1e20)  # finite after one use, infinite after two
    stage = Stage(shared, functools.partial(multiplied, nn.Linear(1, 1)), shared)
    text = run(stage, check_of(stage, gradients=False), torch.ones(2, 3, requires_grad=True))
    assert "layer 0 (Linear) or layer 2 (Linear)" in text and "forward: its output is infinite" in text
    stage.forward_funcs[1] = functools.partial(multiplied, nn.Linear(1, 1), factor=math.inf)
    text = run(stage, check_of(stage), torch.ones(2, 3, requires_grad=True))
    assert "layer 1 (multiplied)" in text and "forward: its output is infinite" in text


def multiplied(module: nn.Module, inputs: Tensor, factor: float = 1.0) -> Tensor:
    return inputs * factor


class OverflowingState(nn.Module):
    """The backward of a slice gives the state that it has read a gradient that is not finite, and no other."""

    def forward(self, x: Tensor) -> Tensor:
        before = carry.read(7, "recurrent")
        if before is not None:
            before.register_hook(lambda gradient: gradient / 0)
            x = x + before
        return carry.write(7, "recurrent", x[:, -1:] * 1, x)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_gradient_of_a_carried_state_is_a_place(gradients: bool) -> None:
    """It is the slice that gave it that is named, and not the one before, which takes it."""
    store, stage = SliceStore(), Stage(OverflowingState())
    check = check_of(stage, gradients, store=store)
    slices = [ActiveSlice(2 * i, 2 * i + 2, 4, slice_id=i, store=store) for i in range(2)]
    leaves = [torch.ones(1, 2, requires_grad=True) for _ in slices]
    with check.watching():
        outs = []
        for active, leaf in zip(slices, leaves, strict=True):
            with push_slice(active):
                outs.append(stage(leaf * 1))
        for active, out in reversed([*zip(slices, outs, strict=True)]):
            with push_slice(active.replace(mode="recompute")):
                out.sum().backward()
        text = said(check)
    words = "layer 7", "slice 1", "the gradient of the state 'recurrent' at token 2 is"
    assert all(each in text for each in words) if gradients else text == ""  # a dynamic loss scale lets it overflow
    assert store.carried.on_gradient is None
