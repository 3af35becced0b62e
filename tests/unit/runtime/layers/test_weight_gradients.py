"""Weight gradients that are added to `.grad` by the matrix product: the same numbers, and nobody left out."""

import copy
import functools
import gc
import operator
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.runtime.batch.in_flight import InFlightError
from terapipe_ds.runtime.layers import weight_gradients
from terapipe_ds.runtime.layers.gradient_sums import GradientSums, OwnSums
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients, accumulate_in_products, leave_to_autograd
from terapipe_ds.runtime.layout.tied_and_copied import Gradients
from tests.unit.runtime.layers.split_cases import Run, assert_same, unit

SLICES = ((0, 3), (3, 8), (8, 10))


def slice_of(start: int, stop: int) -> AbstractContextManager[ActiveSlice]:
    return push_slice(ActiveSlice(start, stop, 10))


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


def example(bias: bool = True, width: int = 6) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width, bias=bias), nn.Tanh(), nn.Linear(width, 5, bias=bias)).double()
    ours = copy.deepcopy(model)
    accumulate_in_products(ours, None)
    return model, ours, torch.randn(2, 10, 4, dtype=torch.float64)


@pytest.mark.parametrize("width", [6, 0])  # 0: no shared experts
@pytest.mark.parametrize("bias", [True, False])
def test_the_same_gradients_as_autograd_s(bias: bool, width: int, products: list[bool]) -> None:
    model, ours, inputs = example(bias, width)
    for mine, theirs in zip(backward(ours, inputs), backward(model, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    assert_same(ours, model)
    assert products == [False] * 2 + [True] * 4  # of the first slice there is nothing to add to


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu_": lambda y, x: F.relu_(y),
    "activation": lambda y, x: nn.SiLU(inplace=True)(y),  # which saves what it overwrites
    "dropout": lambda y, x: F.dropout(y, 1e-13, inplace=True).mul_(2.0),
    "+=": lambda y, x: operator.iadd(y, x),
    "part": lambda y, x: [y, y[..., :2].add_(x[..., 1:3]), y.unsqueeze(0).mul_(0.5)][0],
}


@contextmanager
def one_slice(gradients: WeightGradients, split: bool = True) -> Iterator[list[int]]:
    """Run F and B of a slice, and then its W where the backward is split. Yield how many gradients that W had."""
    gradients.open_batch([(0, 0, 0)] if split else ())
    computed: list[int] = []
    with unit(0, 0, 0), gradients.deferred((0, 0, 0)) if split else nullcontext():
        yield computed
    if split:
        computed.append(gradients.compute((0, 0, 0), nullcontext))


def assert_autograds(model: nn.Module, split: bool, train: Callable[[nn.Module], object]) -> list[int]:
    """Train a slice through a model and through a copy with products of its own; compare the gradients."""
    ours = copy.deepcopy(model)
    with one_slice(accumulate_in_products(ours, None), split) as computed:
        for each in (model, ours):
            train(each)
    assert_same(ours, model)
    return computed


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4), (2, 1, 5, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operation", IN_PLACE)
def test_what_layers_give_may_change_in_place(operation: str, bias: bool, shape: tuple[int, ...], split: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)).double()
    x, of_inputs = torch.randn(shape, dtype=torch.float64), []

    def train(model: nn.Module) -> None:
        inputs = x.clone().requires_grad_()
        y = IN_PLACE[operation](model[0](inputs), inputs)
        IN_PLACE[operation](model[1](y), y).square().sum().backward()
        of_inputs.append(inputs.grad)

    assert assert_autograds(model, split, train) == [2] * split
    torch.testing.assert_close(*of_inputs, rtol=1e-13, atol=1e-13)


def test_a_weight_that_two_layers_share(products: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    ours, inputs = copy.deepcopy(model), torch.randn(2, 10, 4, dtype=torch.float64)
    accumulate_in_products(ours, None)
    backward(ours, inputs)
    backward(model, inputs)
    assert_same(ours, model)
    assert any(products)


def test_layers_that_share_a_weight_have_biases_of_their_own() -> None:
    """Where gradients go to sums of the optimizer, the biases' do so with the joint product of the weight."""
    plain = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)).double()
    plain[2].weight, plain[3].weight = plain[1].weight, plain[0].weight
    ours, ids = copy.deepcopy(plain), torch.tensor([[1, 4, 2, 2, 0]])
    gradients = WeightGradients(is_watched=True, sums=(sums := OwnSums(ours)))
    ours[0].forward = partial(weight_gradients._forward_of, ours[0], gradients)
    for layer in ours[1:]:
        layer.forward = partial(weight_gradients._forward_of, layer, gradients)
    with one_slice(gradients) as computed:
        ours(ids).square().sum().backward()
    assert computed == [4]
    plain(ids).square().sum().backward()
    for own, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        total = sums.so_far(own)
        assert total is not None and own.grad is None
        torch.testing.assert_close(total.double(), theirs.grad, rtol=1e-5, atol=1e-5)  # the sums are fp32


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_of_other_kinds_keep_their_gradients(option: str) -> None:
    ours = nn.Sequential(nn.Embedding(5, 4, dtype=torch.float64, **{option: True}))
    plain, ids = copy.deepcopy(ours), torch.tensor([[1, 4, 2, 2, 0]])
    accumulate_in_products(ours, None)
    with slice_of(0, 5):
        ours(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    assert ours[0].weight.grad.layout == plain[0].weight.grad.layout
    torch.testing.assert_close(ours[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())


def test_another_engine_has_the_gradients_of_layers_that_had_one() -> None:
    """Otherwise they would go to the sums of the optimizer before it. A forward of the user's own stays."""
    model, ours, inputs = example()
    ours[2].forward = partial(model[2].forward)
    with one_slice(accumulate_in_products(ours, None)) as computed:
        ours(inputs.requires_grad_()).sum().backward()
    assert computed == [1] and model[2].weight.grad is not None


class Given(nn.Linear):
    """Ask the engine's object for each product, as docs/how-it-works.md shows."""

    gradients: Any = None

    def defer_weight_gradients(self, gradients: Any) -> None:
        self.gradients = gradients

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gradients.linear(inputs, self.weight, self.bias)


@pytest.mark.parametrize("end", ["engine has ended", "a later engine leaves them to autograd"])
def test_layers_of_an_earlier_engine_give_its_optimizer_nothing(end: str) -> None:
    plain = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)).double()
    ours, ids = copy.deepcopy(plain), torch.tensor([[1, 4, 2, 2, 0]])
    ours[2].__class__ = Given
    gradients = accumulate_in_products(ours, None)
    gradients.sums = sums = OwnSums(ours)
    gradients.open_batch([(0, 0, 0)])
    if end == "engine has ended":
        gradients.close()
    else:
        assert leave_to_autograd(ours).is_closed and not any("forward" in vars(layer) for layer in ours)
    with unit(0, 0, 0):
        ours(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    assert_same(ours, plain)
    assert all(sums.so_far(parameter) is None for parameter in ours.parameters())
    if end == "engine has ended":
        held = weakref.ref(sums)
        del sums
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_has_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    """A moving average or a reference of the layers in training does not train with them."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    accumulate_in_products(model, None)
    before = model(torch.tensor([3, 1]))
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(torch.tensor([3, 1])), before) and not torch.equal(model(torch.tensor([3, 1])), before)


class TwiceAWeight(Tensor):
    """Have a product of its own: twice that of the weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        inputs, weight, *bias = (each if each is None else each.as_subclass(Tensor) for each in args)
        return F.linear(inputs, 2.0 * weight, *bias)


@pytest.mark.parametrize("split", [False, True])
def test_weights_and_inputs_of_other_classes_keep_their_own_products(split: bool) -> None:
    weights, inputs = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    ours, plain = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2))
    with one_slice(accumulate_in_products(ours, None), split):
        for model in (ours, plain):
            model[0].weight = nn.Parameter(weights[0].clone().as_subclass(TwiceAWeight))
            model[1].weight = nn.Parameter(weights[1].clone())
            for part in (inputs, inputs.tanh()):
                rows = torch.nested.as_nested_tensor(list(model[0](part).as_subclass(Tensor)), layout=torch.jagged)
                torch.stack(model[1](rows).unbind()).square().sum().backward()
    assert_same(ours, plain)


def test_a_table_of_another_class_keeps_its_own_gradient() -> None:
    layer = nn.Embedding.from_pretrained(torch.ones(5, 4).as_subclass(TwiceAWeight), freeze=False)
    gradients = WeightGradients(is_watched=True, sums=OwnSums(layer))
    with one_slice(gradients) as computed:
        gradients.lookup(torch.tensor([[1, 4]]), layer.weight).sum().backward()
    assert computed == [0] and layer.weight.grad is not None


@pytest.mark.parametrize("padding_idx", [2, -3])
def test_a_padding_token_has_no_gradient_even_where_nan_comes_to_it(padding_idx: int) -> None:
    layer, ids = nn.Embedding(5, 4), torch.tensor([[1, 2, 4]])
    gradients = WeightGradients(is_watched=True, sums=(sums := OwnSums(layer)))
    with one_slice(gradients):
        for lookup in (gradients.lookup, F.embedding):
            lookup(ids, layer.weight, padding_idx).mul(torch.tensor([1.0, torch.nan, 3.0])[:, None]).sum().backward()
    totals = sums.so_far(layer.weight), layer.weight.grad
    assert totals[0] is not None and torch.equal(*totals) and totals[0].isfinite().all()


def test_hooks_on_a_weight_are_called_for_each_slice(products: list[bool]) -> None:
    _, ours, inputs = example()
    seen: list[str] = []
    ours[0].weight.register_hook(lambda grad: seen.append("gradient"))
    ours[2].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    backward(ours, inputs)
    assert sorted(seen) == ["accumulated"] * 3 + ["gradient"] * 3
    assert products == []


@pytest.mark.parametrize("own_hooks", [0, 1])
def test_a_hook_beside_those_of_the_optimizer_gets_the_gradient(own_hooks: int) -> None:
    layer, inputs = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    sums = GradientSums(Gradients("grad_accum", torch.float32), layer.parameters(), has_hooks=own_hooks > 0)
    for _ in range(own_hooks + 1):
        assert layer.weight.grad is None
        layer.weight.register_post_accumulate_grad_hook(lambda weight: None)
        with slice_of(0, 3):
            WeightGradients(is_watched=True, sums=sums).linear(inputs, layer.weight).sum().backward()
    assert layer.weight.grad is not None


def test_without_a_slice_with_the_whole_sequence_and_under_autocast_it_is_the_plain_layer(products: list[bool]) -> None:
    _, ours, inputs = example()
    ours, inputs = ours.float(), inputs.float()
    for _ in range(2):
        ours(inputs).sum().backward()
    backward(ours, inputs, ((0, 10), (0, 10)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(ours, inputs)
    with slice_of(0, 3), torch.no_grad():
        assert not ours(inputs[:, :3]).requires_grad
    assert products == []


def test_subclasses_and_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * 2

    adapted, patched = Adapted(3, 3), nn.Linear(3, 3)
    own = patched.forward = lambda inputs: inputs  # type: ignore[assignment]
    accumulate_in_products(nn.ModuleList([adapted, patched]), None)
    assert "forward" not in vars(adapted) and vars(patched)["forward"] is own


def test_a_gradient_of_another_dtype_is_left_to_autograd(products: list[bool]) -> None:
    _, ours, inputs = example(bias=False)
    for parameter in ours.float().parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float64)
    backward(ours, inputs.float())
    assert products and not any(products)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in ours.parameters())


def test_a_sparse_gradient_is_left_to_autograd() -> None:
    model, ours, inputs = example(bias=False)
    for layers in (model, ours):
        layers[0].weight.grad = torch.zeros(6, 4, dtype=torch.float64).to_sparse()  # of a tied embedding
        backward(layers, inputs)
    assert_same(ours, model)


# -- slices that share one product per weight

FIRST, LAST = (0, 0, 0), (0, 0, 1)


def test_the_products_of_a_group_come_with_its_last_slice_whatever_that_has_left() -> None:
    layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 5)]).double()
    gradients, x = accumulate_in_products(layers, None), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    gradients.open_batch(groups=[(FIRST, LAST)])
    with unit(*LAST):
        loss = sum(layer(x).square().sum() for layer in layers)
    with unit(*LAST), gradients.deferred(LAST):
        loss.backward()
    assert gradients.kept_bytes(LAST) == 8 * 2 * (4 + 3 + 5), "both layers keep one input"
    assert not gradients.is_due(LAST) and gradients.compute(LAST, nullcontext) == 2
    with unit(*FIRST), gradients.deferred(FIRST):  # a forward that runs again in B keeps nothing
        layers[0](x).square().sum().backward()
    assert gradients.kept_bytes(FIRST) == 0 and layers[0].weight.grad is not None and layers[1].weight.grad is None
    assert gradients.is_due(FIRST) and gradients.compute(FIRST, nullcontext) == 0
    expected = copy.deepcopy(layers)
    expected.zero_grad()
    (sum(F.linear(x, each.weight, each.bias).square().sum() for each in expected)).backward()
    torch.testing.assert_close(layers[0].weight.grad, 2 * expected[0].weight.grad)
    torch.testing.assert_close(layers[1].weight.grad, expected[1].weight.grad)


def test_inputs_that_are_gathered_into_one_memory_join() -> None:
    """As Megatron gathers the tokens of sequence-parallel ranks."""
    weight, memory, gradients = nn.Parameter(torch.zeros(2, 3)), torch.empty(4, 3), WeightGradients()
    gradients.open_batch(groups=[(FIRST, LAST)])
    for key, number in ((LAST, 1.0), (FIRST, 2.0)):
        with gradients.deferred(key):
            gradients.keep(weight, torch.ones(4, 2), torch.tensor(number), lambda part: memory.fill_(part))
        gradients.compute(key, nullcontext)
    assert weight.grad is not None and weight.grad.tolist() == [[4 * 1.0 + 4 * 2.0] * 3] * 2


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("has_sums", [False, True])
def test_slices_whose_backward_is_whole_join_where_that_saves_time(is_watched: bool, has_sums: bool) -> None:
    """Gradients narrower than fp32 that autograd need not make, of layers that run once."""
    sums = OwnSums(nn.Linear(1, 1)) if has_sums else None
    for is_narrow in (False, True):
        gradients = WeightGradients(is_watched, sums, is_narrow=is_narrow)
        assert not gradients.joins_unsplit(checkpoints=True)
        assert gradients.joins_unsplit(checkpoints=False) == (is_narrow and (has_sums or not is_watched))


def test_rows_of_a_table_are_added_unless_a_hook_wants_the_gradient() -> None:
    gradients, table = WeightGradients(), nn.Parameter(torch.zeros(10, 2))
    with slice_of(0, 10):
        assert gradients.adder_of_rows(table) is None, "autograd does of a whole sequence"
    with slice_of(3, 8):
        add = gradients.adder_of_rows(table)
        assert add is not None
        add(3, torch.ones(5, 2))
        table.register_hook(lambda gradient: gradient)
        assert gradients.adder_of_rows(table) is None
    assert table.grad is not None and table.grad.sum(dim=1).tolist() == [0.0] * 3 + [2.0] * 5 + [0.0] * 2


# -- split backwards: W computes what B has left, and nothing else

UNITS = ((3, 0, 1), (3, 0, 0), (3, 1, 0))


def split_run(optimizer: Any = None) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5)).double()
    return Run(model, (2, 5, 4), UNITS, optimizer)


@pytest.mark.parametrize("whole", [False, True])
def test_b_has_all_but_the_weights_and_w_these(whole: bool) -> None:
    run = split_run()
    run.backward(whole=whole)
    assert run.deferred() == {"0.weight", "2.weight", "4.weight"}
    assert run.weights(around=lambda: pytest.fail("nobody watches")) == [3, 3, 3]
    run.gradients.assert_done()
    run.assert_same()


def test_who_watches_is_told_in_w() -> None:
    """Hooks of optimizers for half precision and ZeRO see each weight gradient when W adds it."""
    run, hooked = split_run(DeepSpeedOptimizer()), list[str]()
    for name, parameter in run.layers.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    run.backward()
    assert "0.bias" in hooked and "0.weight" not in hooked
    hooked.clear()
    run.weights(around=lambda: nullcontext(hooked.append("begin")))
    assert sorted(hooked[1:4]) == ["0.weight", "2.weight", "4.weight"]
    assert hooked[0] == hooked[4] == "begin" and len(hooked) == 12
    run.assert_same()


def test_w_before_b_w_twice_and_w_that_never_came() -> None:
    run, first = split_run(), UNITS[0]
    with unit(*first), pytest.raises(InFlightError, match="but not in its B"):
        run.layers(run.inputs[first].clone().requires_grad_()).sum().backward()
    with pytest.raises(InFlightError, match=r"W0\.1 of part 3 ran before its B, or a second time"):
        run.gradients.compute(first, nullcontext)
    run.backward([first])
    with pytest.raises(InFlightError, match=r"B0\.1 of part 3 ran twice before its W"):
        run.backward([first])
    with pytest.raises(InFlightError, match=r"the W of \[\(3, 0, 1\)\]"):
        run.gradients.assert_done()
    run.gradients.compute(first, nullcontext)
    with pytest.raises(InFlightError, match="a second time"):
        run.gradients.compute(first, nullcontext)
    run.gradients.assert_done()


def test_a_gradient_of_another_dtype_is_added_to() -> None:
    run = split_run()
    weight = run.layers.get_parameter("0.weight")
    weight.grad_dtype, weight.grad = None, torch.ones_like(weight, dtype=torch.float32)
    run.backward()
    run.weights()
    torch.testing.assert_close(weight.grad, run.plain.get_parameter("0.weight").grad + 1)


def test_what_is_kept_must_not_change() -> None:
    run, first = split_run(), UNITS[0]
    kept = run.inputs[first].requires_grad_()
    with unit(*first), run.gradients.deferred(first):
        run.layers(kept).square().sum().backward()
    with torch.no_grad():
        kept.zero_()
    with pytest.raises(InFlightError, match="changed in place after its B"):
        run.gradients.compute(first, nullcontext)


def test_other_dtypes_and_autocast_stay_in_b() -> None:
    run, first = split_run(), UNITS[0]
    model = run.layers.float()
    with unit(*first), run.gradients.deferred(first):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(run.inputs[first].float().requires_grad_()).float().square().sum()
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert run.gradients.compute(first, nullcontext) == 0


def test_a_layer_whose_input_has_no_gradient_stays_in_b() -> None:
    run = split_run()
    run.backward(input_needs_grad=False)
    assert run.weights() == [2, 2, 2]
    run.assert_same()


@pytest.mark.parametrize("first_has_gradient", [False, True])
def test_gradients_that_go_to_sums_are_autograds(first_has_gradient: bool) -> None:
    """Also of a first layer, whose output hangs on its weight alone."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5)).double()
    model, inputs = copy.deepcopy(plain), torch.randn(2, 5, 4, dtype=torch.float64)
    sums = OwnSums(model)
    for layer in (model[0], model[2]):
        layer.forward = partial(weight_gradients._forward_of, layer, WeightGradients(True, sums))
    for which in (1, 0):
        own = inputs.clone().requires_grad_(first_has_gradient)
        with unit(3, 0, which):
            model(own).square().sum().backward()
        plain(inputs).square().sum().backward()
    for weight, theirs in ((model[0].weight, plain[0].weight), (model[2].weight, plain[2].weight)):
        total = sums.so_far(weight)
        assert total is not None and weight.grad is None
        torch.testing.assert_close(total.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[2].bias.grad, plain[2].bias.grad)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", ["product", "sums", "split"])
def test_a_layer_may_ask_for_gradients_of_its_inputs(way: str, bias: bool, second_order: bool) -> None:
    """An energy whose gradient is a feature: the inner backward is no gradient of the weight."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            (slope,) = torch.autograd.grad(y.pow(2).sum(), x, retain_graph=True, create_graph=second_order)
            return self.last(y + 0.1 * slope)

    torch.manual_seed(0)
    plain = Energy().double()
    model, units = copy.deepcopy(plain), [(3, 0, 1), (3, 0, 0)]
    inputs, sums = torch.randn(2, 5, 4, dtype=torch.float64), OwnSums(model)
    gradients = WeightGradients(way == "sums", sums if way == "sums" else None)
    gradients.open_batch(units if way == "split" else ())
    for layer in (model.linear, model.last):
        layer.forward = partial(weight_gradients._forward_of, layer, gradients)
    for which in units:
        own, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        with unit(*which), gradients.deferred(which) if way == "split" else nullcontext():
            model(own).square().sum().backward()
        plain(theirs).square().sum().backward()
        torch.testing.assert_close(own.grad, theirs.grad)
        if way == "split":
            gradients.compute(which, nullcontext)
    if way != "sums":
        assert_same(model, plain)
        return
    for own, theirs in ((model.linear, plain.linear), (model.last, plain.last)):
        total, left = sums.so_far(own.weight), own.weight.grad  # what second derivatives bring is in `.grad`
        assert total is not None
        total = total.double() if left is None else total + left
        torch.testing.assert_close(total, theirs.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("asked", ["weight", "bias"])
@pytest.mark.parametrize("way", ["product", "sums"])
def test_a_layer_may_ask_for_gradients_of_its_parameters(way: str, asked: str, second_order: bool) -> None:
    """Fast weights, after a step of their own. Torch raised "A leaf node was passed to _will_engine_execute_node"."""

    class Fast(nn.Linear):
        def use(self, x: Tensor, first: Callable[[Tensor], Tensor]) -> Tensor:
            parameter = getattr(self, asked)
            (slope,) = torch.autograd.grad(
                first(x).pow(2).sum(), parameter, retain_graph=True, create_graph=second_order
            )
            return first(x) + F.linear(x, slope) if asked == "weight" else first(x) + slope

    torch.manual_seed(0)
    plain = Fast(4, 4).double()
    model, inputs = copy.deepcopy(plain), torch.randn(2, 5, 4, dtype=torch.float64)
    sums = OwnSums(model) if way == "sums" else None
    gradients = WeightGradients(sums is not None, sums)
    for which in (1, 0):
        with unit(3, 0, which):
            product = partial(gradients.linear, weight=model.weight, bias=model.bias)
            model.use(inputs.clone().requires_grad_(), product).square().sum().backward()
        plain.use(inputs.clone().requires_grad_(), plain).square().sum().backward()
    total, left = None if sums is None else sums.so_far(model.weight), model.weight.grad
    found = sum(each.double() for each in (total, left) if each is not None)
    torch.testing.assert_close(found, plain.weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(model.bias.grad, plain.bias.grad)


class SmallerWeights(TorchFunctionMode):
    """Multiply the weight of each linear operation, as tools for quantization change it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = args[0], args[1] * 0.9, *args[2:]
        return func(*args, **(kwargs or {}))


def smaller(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda inputs, weight, *others: function(inputs, weight * 0.9, *others)


def smaller_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight * 0.9, layer.bias)


REPLACED: dict[str, Callable[[], Any]] = {
    "forward of the class": lambda: mock.patch.object(nn.Linear, "forward", smaller_forward),
    "forward that torch has compiled": lambda: mock.patch.object(
        nn.Linear, "forward", torch.compile(smaller_forward, backend="eager")
    ),
    "forward with torch's name": lambda: mock.patch.object(
        nn.Linear, "forward", functools.wraps(nn.Linear.forward)(lambda layer, x: smaller_forward(layer, x))
    ),
    "function": lambda: mock.patch.object(F, "linear", smaller(F.linear)),
    "function mode": SmallerWeights,
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", REPLACED)
def test_what_a_program_replaces_has_its_own_gradient(how: str, split: bool) -> None:
    model, _, inputs = example()

    def train(model: nn.Module) -> None:
        with REPLACED[how]():
            model(inputs.clone().requires_grad_()).square().sum().backward()

    assert_autograds(model, split, train)


def test_an_embedding_whose_class_has_another_forward_or_whose_options_change() -> None:
    layer = nn.Embedding(5, 4)
    accumulate_in_products(layer, None)
    with mock.patch.object(nn.Embedding, "forward", lambda layer, ids: 2 * F.embedding(ids, layer.weight)):
        assert torch.equal(layer(torch.tensor([3])), 2 * layer.weight[[3]])
    layer.max_norm = 0.5
    assert layer(torch.tensor([3])).norm() <= 0.5


def test_layers_take_their_input_by_keyword() -> None:
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    accumulate_in_products(layers, None)
    with slice_of(0, 3):
        layers[1](input=layers[0](input=torch.tensor([3]))).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize("split", [False, True])
def test_complex_weights(split: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.complex128)
    inputs = torch.randn(2, 5, 4, dtype=torch.complex128)
    assert_autograds(model, split, lambda each: each(inputs.clone().requires_grad_()).abs().square().sum().backward())


OTHER_LAYOUTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "nested": lambda model, x: model(torch.nested.as_nested_tensor([x[0], x[1, :3]])).to_padded_tensor(0.0),
    "sparse": lambda model, x: model((x * (x > 0)).flatten(0, 1).to_sparse()),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_inputs_of_another_layout(layout: str, split: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    apply = OTHER_LAYOUTS[layout]
    assert_autograds(model, split, lambda each: apply(each, x.clone().requires_grad_()).square().sum().backward())


@pytest.mark.parametrize("split", [False, True])
def test_a_function_that_the_user_compiles_is_one_graph(split: bool) -> None:
    model, _, inputs = example()

    def train(model: nn.Module) -> None:
        run = torch.compile(lambda x: model(x).tanh(), backend="eager", fullgraph=True)
        run(inputs.clone().requires_grad_()).square().sum().backward()

    assert_autograds(model, split, train)


@pytest.mark.parametrize("split", [False, True])
def test_forward_mode_derivatives(split: bool) -> None:
    """A layer may compute one in its forward, and train through it."""
    model, _, inputs = example()

    def train(model: nn.Module) -> None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs.clone().requires_grad_(), torch.ones_like(inputs))
            forward_ad.unpack_dual(model(dual)).tangent.square().sum().backward()

    assert_autograds(model, split, train)


@pytest.mark.parametrize("watched", [False, True])
def test_the_layer_of_ones_own_in_the_documents_leaves_its_products_to_w(watched: bool) -> None:
    """`docs/how-it-works.md`, run as it is printed there."""
    text = (Path(__file__).parents[4] / "docs" / "how-it-works.md").read_text()
    code = text.split("### Layers of your own")[1].split("```python\n")[1].split("```")[0]
    names = {"nn": nn, "torch": torch, "F": F, "partial": partial, "once_differentiable": once_differentiable}
    exec(code, names)
    torch.manual_seed(0)
    model = nn.Sequential(names["Projection"](4), nn.Tanh(), names["Projection"](4)).double()
    run = Run(model, (2, 5, 4), ((0, 0, 1), (0, 0, 0)), DeepSpeedOptimizer() if watched else None)
    run.backward()
    assert run.deferred() == dict(model.named_parameters()).keys()
    assert run.weights() == [2, 2]
    run.assert_same()


class _OnCuda(Tensor):
    """Numbers that say they are on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_gpu_adds_a_product_of_half_precision_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product has fp32 results: elsewhere it is rounded to the dtype of its factors before it is added."""
    layer, passes = nn.Linear(64, 8, bias=False, dtype=torch.bfloat16), list[Tensor]()

    def addmm(total: Tensor, one: Tensor, other: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total and out_dtype == total.dtype == torch.float32
        passes.append(total)
        return total.addmm_(*(each.as_subclass(Tensor).float() for each in (one, other)))

    monkeypatch.setattr(torch, "addmm", addmm)
    rows, inputs = torch.randn(512, 8).bfloat16(), torch.randn(512, 64).bfloat16()
    exact = 2 * rows.double().t() @ inputs.double()
    off = []
    for kind in (_OnCuda, Tensor):
        sums = OwnSums(layer)
        for _ in range(2):
            sums.add(layer.weight, rows.as_subclass(kind), inputs)
        found = sums.so_far(layer.weight)
        assert found is not None
        off.append(float((found.double() - exact).norm() / exact.norm()))
        layer.weight.grad_accum = None  # type: ignore[attr-defined]
    assert len(passes) == 2 and off[0] < 1e-5 < 1e-4 < off[1]


def test_a_gpu_that_accumulates_in_fp16_rounds_a_product_before_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses fp32 results there (`gemm_internal<at::Half, float>` in its CUDABlas.cpp)."""

    def refused(*factors: Tensor, **options: object) -> None:
        raise RuntimeError("gemm input type at::Half and output type float is not supported")

    monkeypatch.setattr(torch, "addmm", refused)
    layer = nn.Linear(64, 8, bias=False, dtype=torch.float16)
    sums, rows, inputs = OwnSums(layer), torch.randn(512, 8).half(), torch.randn(512, 64).half()
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        for _ in range(2):
            sums.add(layer.weight, rows.as_subclass(_OnCuda), inputs)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    found, exact = sums.so_far(layer.weight), 2 * rows.double().t() @ inputs.double()
    assert found is not None and float((found.double() - exact).norm() / exact.norm()) < 1e-3


class Mixed(nn.Module):
    """Layers that share weights and biases as `ties` says; one weight is [in, out]."""

    def __init__(self, ties: list[str], bias: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=bias)
        self.a, self.b, self.pruned = (nn.Linear(4, 4, bias=bias) for _ in range(3))
        self.turned, self.multiply = nn.Linear(4, 4), lambda x, weight, bias, _: F.linear(x, weight.t(), bias)
        self.last.weight = self.table.weight if "table" in ties else self.last.weight
        self.b.weight = self.a.weight if "weight" in ties else self.b.weight
        self.b.bias = self.a.bias if "bias" in ties else self.b.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.a(self.table(ids)).relu()
        x = self.pruned(self.b(x) + x)
        return self.last(self.multiply(x, self.turned.weight, self.turned.bias, True).tanh())

    def checkpointed(self, ids: Tensor) -> Tensor:
        return checkpoint(self.forward, ids, use_reentrant=False)  # type: ignore[no-any-return]

    def change(self, frozen: list[str], hooked: list[str]) -> set[str]:
        """Do what a program may do when the engine is there; return the names of hooks that are called."""
        called = set[str]()

        def hook(grad: Tensor, name: str) -> Tensor:
            called.add(name)
            return 3.0 * grad

        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
            if name in hooked and parameter.requires_grad:
                parameter.register_hook(partial(hook, name=name))
        prune.custom_from_mask(self.pruned, "weight", torch.eye(4))
        return called


def backwards(
    model: Callable[[Tensor], Tensor], ids: Tensor, gradients: WeightGradients, split: list[Any], groups: list[Any]
) -> None:
    """Run the slices of `ids` forward, then backward in reverse, then what the schedule has split off."""
    keys = [(0, 0, slice_id) for slice_id in range(len(ids))]
    gradients.open_batch(split, groups)
    outputs = []
    for key in keys:
        with unit(*key):
            outputs.append(model(ids[key[2]]))
    for key in reversed(keys):
        with unit(*key), gradients.deferred(key):
            outputs.pop().square().sum().backward()
        if key not in split:
            gradients.compute(key, nullcontext)
    for key in split:
        gradients.compute(key, nullcontext)
    gradients.assert_done()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_shared_frozen_hooked_summed_split_or_joined(seed: int) -> None:
    """Each gradient is autograd's, and each hook that autograd calls is called."""
    drawn, keys = random.Random(seed), [(0, 0, slice_id) for slice_id in range(4)]
    torch.manual_seed(seed)
    plain = Mixed([each for each in ("table", "weight", "bias") if drawn.random() < 0.4], drawn.random() < 0.7).double()
    ours, names = copy.deepcopy(plain), [name for name, _ in plain.named_parameters()]
    gradients, sums = accumulate_in_products(ours, None), OwnSums(ours) if drawn.random() < 0.7 else None
    gradients.sums, gradients.is_watched = sums, sums is not None or drawn.random() < 0.5
    ours.multiply = gradients.linear  # type: ignore[assignment]
    frozen, hooked = ([name for name in names if drawn.random() < 0.15] for _ in range(2))
    called = [model.change(frozen, hooked) for model in (ours, plain)]
    split, groups = drawn.choice([[], keys]), drawn.choice([[], [keys[:2], keys[2:]]])
    ids = torch.randint(7, (4, 2, 5))
    backwards(drawn.choice([ours, ours.checkpointed]), ids, gradients, split, groups)
    plain(ids.flatten(0, 1)).square().sum().backward()
    assert called[0] == called[1]
    for (name, own), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        found = [each for each in (own.grad, None if sums is None else sums.so_far(own)) if each is not None]
        assert bool(found) == (theirs.grad is not None), name
        if theirs.grad is not None:  # the sums are fp32
            torch.testing.assert_close(sum(each.double() for each in found), theirs.grad, rtol=1e-4, atol=1e-4)
