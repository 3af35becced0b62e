"""Measurements leave the module, its gradients and the random numbers as they were."""

from __future__ import annotations

import functools
import random
from argparse import Namespace
from collections import Counter, OrderedDict
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.runtime.layers.kept_state import KeptState
from terapipe_ds.runtime.layers.untouched import untouched


class Layer(nn.Module):
    """A linear with a tied second use, dropout, a buffer that counts, and a reference that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(()))
        self.hidden = [nn.Parameter(torch.ones(4))]
        self.hook_calls = 0
        self.first.weight.register_post_accumulate_grad_hook(self._count)
        self.micro_offset = 3

    def _count(self, _: Tensor) -> None:
        self.hook_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + x.detach().mean()  # another tensor in the place of the buffer
        self.micro_offset += 1
        x = nn.functional.dropout(self.second(self.first(x)), 0.5, self.training)
        return x * self.frozen + torch.rand(4) + random.random() + np.random.rand()


def _use(layer: Layer) -> Tensor:
    out = layer(torch.ones(2, 4))
    out.sum().backward()
    return out


def seed() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)


@pytest.mark.parametrize("had_gradients", [False, True])
def test_nothing_changes(had_gradients: bool) -> None:
    layer = Layer().eval()
    layer.first.training = True
    if had_gradients:
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in layer.named_parameters()}
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    seed()
    expected = torch.rand(1), random.random(), np.random.rand()
    seed()
    with untouched(layer):
        for _ in range(3):
            _use(layer)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    for name, parameter in layer.named_parameters():
        assert id(parameter) == identities[name] and parameter.grad is gradients[name]
        assert parameter.grad is None or (parameter.grad == 7.0).all()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer.hook_calls == 0 and layer.micro_offset == 3
    assert not layer.training and layer.first.training and not layer.second.training


def test_inside_it_trains_on_the_same_weights() -> None:
    layer = Layer().eval()
    layer.first.weight.model_parallel, layer.first.weight.main_grad = True, torch.zeros(4, 4)  # type: ignore[attr-defined]
    with untouched(layer):
        assert layer.training
        assert layer.first.weight is layer.second.weight  # tied parameters stay tied
        assert layer.first.weight.model_parallel and not hasattr(layer.first.weight, "main_grad")
        assert layer.first.weight.data_ptr() == dict(layer.named_parameters())["first.weight"].data_ptr()
        _use(layer)
        once = layer.first.weight.grad.clone()
        assert once.abs().sum() > 0
        _use(layer)
        assert (layer.first.weight.grad - once).abs().sum() > 0  # added up, as by a later slice
        assert layer.frozen.grad is None
    assert layer.first.weight.grad is None


def test_hooks_change_gradients_that_are_compared_and_not_those_that_are_measured() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(torch.zeros_like)
    for with_gradients in (False, True):
        with untouched(layer, with_gradients=with_gradients):
            layer(torch.ones(2, 4)).sum().backward()
            assert layer.weight.grad is not None and bool(layer.weight.grad.any()) == with_gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_runs_where_the_caller_evaluates(mode: Any) -> None:
    layer = Layer()
    with mode():
        with untouched(layer):
            _use(layer)
        assert not torch.is_grad_enabled() and torch.is_inference_mode_enabled() == (mode is torch.inference_mode)


class Progress:
    """An object of the user's, in which another one is."""

    def __init__(self, inner: Progress | Namespace | None = None) -> None:
        self.steps, self.inner = 0, inner

    def count(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.inner.steps += 1  # type: ignore[union-attr]
        return x


class Helper(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> None:
        self.calls += len(x)


class Remembering(nn.Module):
    """Keep what it computes, and count its calls, in every place where Python or torch keeps a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.helpers = nn.Linear(4, 4), [Helper()]  # the second one is no child
        self.length: int | None = None
        self.calls, self.lengths, self.pair = 2, [1, 2], ({3}, 4)
        self.masks: dict[int, list[Tensor]] = {0: []}
        self.total, self.array = torch.zeros(4), np.zeros(2)
        self.view = torch.zeros(1).expand(4)  # nothing may write here
        self.progress, self.space = Progress(Progress()), SimpleNamespace(calls=0)
        self.counted, self.ordered = Counter(calls=1), OrderedDict(old=1)
        self.own = [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)]
        self.older = np.random.RandomState(1)
        self.register_buffer("rotary", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.length is None:
            self.length, self.rotary, self.new = len(x), torch.ones(4), "new"
            self.register_buffer("mask", torch.ones(4))
            self.scale = nn.Parameter(torch.ones(4))
            self.helper = nn.Linear(4, 4)
        self.inner.seen = x
        self.masks[0].append(x)
        self.masks[len(x)] = [x]
        self.lengths.pop()
        self.pair[0].add(5)
        self.calls += 1
        self.total += 1
        self.array += 1
        self.progress.count(x)
        self.space.calls += 1
        self.counted["calls"] += 1
        self.ordered.pop("old", None)
        self.helpers[0](x)
        drawn = torch.rand(1, generator=self.own[0]), self.own[1].random(), self.own[2].random(), self.older.rand()
        return self.inner(x) * self.rotary * float(sum(drawn))

    def state(self) -> str:
        """Describe all that it keeps and counts, and what it would draw next."""
        generators = self.own[0].get_state().tolist(), self.own[1].getstate(), self.own[2].bit_generator.state
        names = sorted(vars(self)), list(self._parameters), list(self._modules), self._buffers, vars(self.inner).keys()
        values = self.length, self.calls, self.lengths, self.pair, self.masks, self.total, self.array, self.view
        inner: Any = self.progress.inner
        counts = self.progress.steps, inner.steps, self.space, vars(self.helpers[0]), self.counted, self.ordered
        return repr((generators, str(self.older.get_state()), names, values, counts))


def test_what_a_layer_remembers_of_a_measurement_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    layer = Remembering()
    layer.loss_fn = SimpleNamespace(calls=0)  # a loss that is no module
    before, total, masks = layer.state(), layer.total, layer.masks
    with pytest.raises(ZeroDivisionError), untouched(layer):
        for _ in range(2):
            layer(torch.ones(2, 4)).sum().backward()
        layer.total, layer.loss_fn.calls = layer.total + 1, 1
        assert layer.calls == 4 and layer.length == 2 and layer.state() != before
        raise ZeroDivisionError  # after an error as well
    assert layer.state() == before and layer.loss_fn.calls == 0 and not caplog.messages
    assert layer.total is total and layer.masks is masks


def test_what_is_copied_is_known_by_the_ids_of_living_objects_alone() -> None:
    """`deepcopy` keeps a list under the id of its memo; another object may get that id once the memo is gone."""
    value, memo = [[1]], dict[object, Any]()
    assert KeptState({})._copied("value", value, memo) == value
    assert {key for key in memo if isinstance(key, int)} == {id(value), id(value[0])}


class CountingOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(number for number in range(9))  # a generator, which nothing can copy

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.numbers)


def test_what_functions_are_bound_to_is_put_back_and_iterators_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(CountingOnce(), nn.Linear(4, 4))
    counters = [Progress(Namespace(steps=0)) for _ in range(3)]
    module.loss_fn = counters[0].count  # type: ignore[assignment]
    functions = [functools.partial(Progress.count, counters[1]), counters[2].count]
    module.held_parts = [SimpleNamespace(forward_funcs=[module[0], *functions])]  # type: ignore[assignment]
    with untouched(module, with_gradients=False):
        assert not caplog.messages
        for function in functions:
            function(module.loss_fn(torch.ones(1)))  # type: ignore[operator]
        module[1](module[0](torch.ones(2, 4))).sum().backward()
        assert [each.steps for each in counters] == [2, 1, 1]
    assert not any(each.steps or each.inner.steps for each in counters)  # type: ignore[union-attr]
    [text] = caplog.messages
    assert "and 0.numbers changed" in text and "Keep such values in attributes" in text


def test_what_modules_share_is_shared_in_the_copies() -> None:
    first, second = Helper(), Helper()
    first.shared = second.shared = shared = {"calls": 0}  # type: ignore[assignment]
    with untouched(nn.Sequential(first, second)):
        first.shared["calls"] += 1  # type: ignore[operator, index]
        assert second.shared == {"calls": 1} and first.shared is not shared
    assert first.shared is second.shared is shared and shared == {"calls": 0}


def test_parameters_that_layers_write_to(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer()
    with untouched(layer), torch.no_grad():
        layer.frozen.mul_(2)  # a running mean
        layer.second.bias.mul_(1)
    assert torch.equal(layer.frozen, torch.ones(4))
    assert "and second.bias changed" in caplog.text


def test_what_is_huge_or_cannot_be_copied_is_shared_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "terapipe_ds")
    layer = Layer()
    layer.tokens = [np.memmap(tmp_path / "tokens", np.int8, "w+", shape=2**34)]  # type: ignore[assignment]
    layer.reader = Namespace(ahead=[], reader=Thread())  # type: ignore[assignment]
    layer.model = [nn.Linear(1, 2**25, device="meta")]  # type: ignore[assignment]
    before = layer.tokens, layer.reader, layer.model
    with untouched(layer):
        _use(layer)
        assert before == (layer.tokens, layer.reader, layer.model)
    [text] = caplog.messages
    assert text.startswith("trial runs use these attributes") and text.endswith(": tokens, reader, model")
