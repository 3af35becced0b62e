"""megatron-core's linear layers with their weight gradients in W: against torch's autograd, in one process."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from terapipe_ds.models.megatron import linears
from terapipe_ds.models.megatron.linears import split_backwards
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from tests.unit.runtime.layers.split_cases import Run, unit

UNITS = ((0, 0, 1), (0, 0, 0))
TOKENS, ROWS, IN, OUT = 5, 2, 6, 4


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Give this process a group of its own: megatron-core's functions do nothing without one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """Column-parallel, then row-parallel, as in an MLP; as our Megatron layers it hands the engine's object on."""

    def __init__(self, dtype: torch.dtype = torch.float64, **column: Any) -> None:
        super().__init__()
        sizes = {"num_layers": 1, "hidden_size": IN, "num_attention_heads": 1}
        config = TransformerConfig(**sizes, use_cpu_initialization=True, params_dtype=dtype)
        init = {"config": config, "init_method": nn.init.normal_, "tp_group": dist.group.WORLD}
        options = {"bias": True, "skip_bias_add": False, **column}
        self.up = ColumnParallelLinear(IN, OUT, gather_output=False, **init, **options)
        self.down = RowParallelLinear(OUT, IN, bias=True, input_is_parallel=True, skip_bias_add=False, **init)

    def defer_weight_gradients(self, gradients: Any) -> None:
        split_backwards(self, gradients)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.down(torch.tanh_(self.up(hidden)[0]))[0]
        return outputs.mul_(1.0)


def by_torch(layers: Layers, hidden: Tensor) -> Tensor:
    bias = None if layers.up.skip_bias_add else layers.up.bias
    return F.linear(torch.tanh(F.linear(hidden, layers.up.weight, bias)), layers.down.weight, layers.down.bias)


def run_of(
    layers: Layers | None = None, optimizer: Any = None, expected: Callable[[Any, Tensor], Tensor] = by_torch
) -> Run:
    torch.manual_seed(0)
    layers = Layers() if layers is None else layers
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    return Run(layers, (TOKENS, ROWS, IN), UNITS, optimizer, expected, shared=dist.group.WORLD)


@pytest.mark.parametrize("column", [{}, {"bias": False}], ids=["bias", "no bias"])
@pytest.mark.parametrize("optimizer", [None, DeepSpeedOptimizer()], ids=["plain", "watched"])
def test_b_has_all_but_the_weights_and_w_these(column: dict[str, Any], optimizer: Any) -> None:
    run = run_of(Layers(**column), optimizer)
    run.backward()
    assert run.deferred() == {"up.weight", "down.weight"}
    assert all(run.gradients.kept_bytes(unit) == 8 * TOKENS * ROWS * 2 * (IN + OUT) for unit in UNITS)
    assert run.weights() == [2, 2]
    run.assert_same()


def test_a_backward_that_is_not_split_is_megatron_s(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()
    run.gradients.open_batch(UNITS[:1])
    monkeypatch.setattr(linears._SplitLinear, "apply", lambda *_: pytest.fail("not Megatron's"))
    mine, theirs = (run.inputs[UNITS[1]].clone().requires_grad_() for _ in range(2))
    with unit(*UNITS[1]):
        run.layers(mine).square().sum().backward()
    by_torch(run.plain, theirs).square().sum().backward()
    run.assert_same()
    with torch.no_grad(), unit(*UNITS[0]):
        run.layers(mine)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layers: pickle.loads(pickle.dumps(layers))])
def test_a_copy_of_an_engine_s_layers_has_its_own_weights(copied: Callable[[Layers], Layers]) -> None:
    layers = Layers(bias=False)
    for each in (layers.up, layers.down):
        each.tp_group = None  # torch copies no group
        each._load_state_dict_pre_hooks.clear()  # megatron-core's own, which no pickle takes
    accumulate_in_products(layers, None)
    hidden = torch.randn(TOKENS, ROWS, IN, dtype=torch.float64)
    before = by_torch(layers, hidden)
    other = copied(layers)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
        for each in (other.up, other.down):
            each.tp_group = dist.group.WORLD
        torch.testing.assert_close(other(hidden), before)
        gradients = accumulate_in_products(other, None)  # another engine takes them
    assert other.up._forward_impl.args == (other.up, gradients)


def test_a_frozen_weight() -> None:
    layers = Layers(bias=False)  # megatron-core gives the bias of a frozen weight no gradient
    layers.up.weight.requires_grad_(False)
    run = run_of(layers)
    run.backward()
    assert run.weights() == [1, 1]
    run.assert_same()
    assert layers.up.weight.grad is None


class Adapted(Layers):
    """The weight is computed, as by an adapter of low rank that is added to it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden, weight=2 * self.up.weight)[0]))[0]


class Doubled(ColumnParallelLinear):
    """A product of its own."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.linear(input, 2 * weight, kwargs["bias"])


@pytest.mark.parametrize("how", ["computed", "class", "layer"])
def test_a_weight_or_a_product_that_is_not_megatron_s(how: str) -> None:
    layers = Adapted() if how == "computed" else Layers()
    if how == "class":
        layers.up.__class__ = Doubled
    elif how == "layer":
        layers.up._forward_impl = Doubled._forward_impl.__get__(layers.up)

    def expected(layers: Layers, hidden: Tensor) -> Tensor:
        inner = torch.tanh(F.linear(hidden, 2 * layers.up.weight, layers.up.bias))
        return F.linear(inner, layers.down.weight, layers.down.bias)

    run = run_of(layers, expected=expected)
    run.backward()
    assert run.deferred() == {"down.weight"}
    assert run.weights() == [1, 1]
    run.assert_same()


def test_autocast() -> None:
    layers = Layers(torch.float32)
    gradients = accumulate_in_products(layers, None)
    gradients.open_batch(UNITS)
    hidden = torch.randn(TOKENS, ROWS, IN, requires_grad=True)
    with unit(*UNITS[0]), gradients.deferred(UNITS[0]), torch.autocast("cpu", dtype=torch.bfloat16):
        layers(hidden).float().sum().backward()
    assert layers.up.weight.grad is not None and layers.down.weight.grad is not None
    assert gradients.compute(UNITS[0], nullcontext) == 0


def test_a_hook_on_a_weight_is_called_in_w_and_once() -> None:
    run, seen = run_of(), []
    run.layers.up.weight.register_hook(lambda gradient: seen.append(gradient.norm()) or 3 * gradient)
    run.backward()
    assert not seen
    run.weights()
    assert len(seen) == len(UNITS)
    torch.testing.assert_close(run.layers.up.weight.grad, 3 * run.plain.up.weight.grad)
