"""Weight gradients that are added to `.grad` by the matrix product: the same numbers, and nobody left out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.runtime import weight_gradients
from terapipe_ds.runtime.weight_gradients import accumulate_in_products

SLICES = ((0, 3), (3, 8), (8, 10))


@contextmanager
def slice_of(start: int, stop: int) -> Iterator[None]:
    active = ActiveSlice(
        start=start, stop=stop, sequence_length=10, micro_batch_id=0, slice_id=0, part_id=0, mode="train", store=None
    )
    with push_slice(active):
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each weight gradient: whether it was added by the product."""
    added: list[bool] = []
    plain = weight_gradients._add_product

    def watched(*args: Any) -> Tensor | None:
        returned = plain(*args)
        added.append(returned is None)
        return returned

    monkeypatch.setattr(weight_gradients, "_add_product", watched)
    return added


def backward(model: nn.Module, inputs: Tensor, slices: tuple[tuple[int, int], ...] = SLICES) -> list[Tensor]:
    """The gradients of the inputs; those of the parameters are in `.grad`, added up over slices."""
    gradients = []
    for start, stop in slices:
        part = inputs[:, start:stop].clone().requires_grad_()
        with slice_of(start, stop):
            model(part).square().sum().backward()
        assert part.grad is not None
        gradients.append(part.grad)
    return gradients


def example(bias: bool = True) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 5, bias=bias)).double()
    ours = copy.deepcopy(model)
    accumulate_in_products(ours, None)
    return model, ours, torch.randn(2, 10, 4, dtype=torch.float64)


def assert_same(ours: nn.Module, model: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_gradients_as_autograd_s(bias: bool, products: list[bool]) -> None:
    model, ours, inputs = example(bias)
    for mine, theirs in zip(backward(ours, inputs), backward(model, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    assert_same(ours, model)
    assert products == [False] * 2 + [True] * 4  # of the first slice there is nothing to add to


def test_a_weight_that_two_layers_share(products: list[bool]) -> None:
    model, _, inputs = example(bias=False)
    model = nn.Sequential(*model, nn.Linear(5, 5, bias=False, dtype=torch.float64))
    model.append(nn.Linear(5, 5, bias=False, dtype=torch.float64))
    model[4].weight = model[3].weight
    ours = copy.deepcopy(model)
    accumulate_in_products(ours, None)
    backward(ours, inputs)
    backward(model, inputs)
    assert_same(ours, model)
    assert any(products)


def test_frozen_weights_and_frozen_biases_stay_without_a_gradient(products: list[bool]) -> None:
    model, ours, inputs = example()
    for each in (model, ours):
        each[0].weight.requires_grad_(False)
        each[2].bias.requires_grad_(False)
        backward(each, inputs)
    assert_same(ours, model)
    assert len(products) == len(SLICES)  # of the other layer


def test_recomputed_layers(products: list[bool]) -> None:
    from torch.utils.checkpoint import checkpoint

    model, ours, inputs = example()
    for start, stop in SLICES:
        part = inputs[:, start:stop].clone().requires_grad_()
        with slice_of(start, stop):
            checkpoint(ours, part, use_reentrant=False).square().sum().backward()
    backward(model, inputs)
    assert_same(ours, model)
    assert products.count(True) == 4


class TestNobodyIsLeftOut:
    def test_hooks_on_a_weight_are_called_for_each_slice(self, products: list[bool]) -> None:
        _, ours, inputs = example()
        seen: list[str] = []
        ours[0].weight.register_hook(lambda grad: seen.append("gradient"))
        ours[2].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
        backward(ours, inputs)
        assert sorted(seen) == ["accumulated"] * 3 + ["gradient"] * 3
        assert products == []

    def test_optimizers_that_collect_gradients_by_hooks_keep_autograd_s(self) -> None:
        model, ours, _ = example()
        optimizer = object.__new__(DeepSpeedOptimizer)
        accumulate_in_products(model, optimizer)
        assert "forward" not in vars(model[0]) and "forward" in vars(ours[0])

    @pytest.mark.parametrize("how", ["no slice", "the whole sequence", "no gradients", "autocast"])
    def test_elsewhere_it_is_the_plain_layer(self, how: str, products: list[bool]) -> None:
        _, ours, inputs = example()
        ours, inputs = ours.float(), inputs.float()
        if how == "no slice":
            for _ in range(2):
                ours(inputs).sum().backward()
        elif how == "the whole sequence":
            backward(ours, inputs, ((0, 10), (0, 10)))
        elif how == "no gradients":
            with slice_of(0, 3), torch.no_grad():
                assert not ours(inputs[:, :3]).requires_grad
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                backward(ours, inputs)
        assert products == []

    def test_subclasses_and_layers_with_a_forward_of_their_own_are_left_alone(self) -> None:
        class Adapted(nn.Linear):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs) * 2

        adapted, patched = Adapted(3, 3), nn.Linear(3, 3)
        mine = patched.forward = lambda inputs: inputs  # type: ignore[assignment]
        accumulate_in_products(nn.ModuleList([adapted, patched]), None)
        assert "forward" not in vars(adapted) and vars(patched)["forward"] is mine


def test_a_gradient_of_another_dtype_is_left_to_autograd(products: list[bool]) -> None:
    _, ours, inputs = example(bias=False)
    ours = ours.float()
    for parameter in ours.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float64)
    backward(ours, inputs.float())
    assert products and not any(products)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in ours.parameters())
