"""What of a batch the check looks at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.sliceable import SliceableTensors
from terapipe_ds.runtime.verify.cut import Cut, choose_window, cuttable, window_plan
from terapipe_ds.runtime.verify.first_batch import all_own


@pytest.mark.parametrize("length", [64, 127, 130, 512, 4096, 16384, 131072])
@pytest.mark.parametrize("cut_rows", [1, 2, 16])
def test_a_window_is_short_and_its_slices_are_unequal(length: int, cut_rows: int) -> None:
    for granularity, slices in itertools.product([1, 2, 64, 384, 1024, 8192], [4, 32]):
        check_window(length, cut_rows, min(granularity, length // 2), slices)


def check_window(length: int, cut_rows: int, granularity: int, slices: int) -> None:
    plan = SlicePlan.equal(length, min(slices, -(-length // granularity)), granularity)
    found, unit = window_plan(plan, granularity, 1, 16, 8, 4, cut_rows)
    tokens, slices_found = found.sequence_length, found.num_slices
    assert tokens <= length
    if length > 1024:  # whatever the granularity is
        assert tokens <= 1024 and tokens * cut_rows <= 2048
    assert tokens >= min(length, 128, 2048 // cut_rows) - unit
    assert slices_found in (2, 3)
    assert all(n % unit == 0 for n in found.lengths[:-1]) and (tokens == length or tokens % unit == 0)
    assert all(n % unit == 0 for n in plan.lengths[:-1])
    if tokens > 3 * unit:
        assert (len(set(found.lengths)) > 1 and slices_found == 3) or found == plan


@pytest.mark.parametrize(
    ("plan", "granularity", "multiple", "unit"),
    [
        ((1024,) * 16, 64, 1, 256),  # a multiple of the granularity that three slices fit with
        ((1024,) * 16, 1024, 1, 256),  # a divisor of it
        ((3072,) * 16, 3072, 3, 192),
        ((2000,) * 16, 2000, 16, 80),
        ((2000,) * 16, 2000, 2000, 2000),  # layers need as many
        ((320,) * 32, 64, 1, 320),  # what listed slices have in common
        ((500, 256, 15000), 64, 2, 4),  # not at the granularity
    ],
)
def test_what_the_slices_of_a_window_are_multiples_of(plan: Any, granularity: int, multiple: int, unit: int) -> None:
    found, of_window = window_plan(SlicePlan(plan), granularity, multiple, 8, 8, 4, 2)
    assert math.gcd(*found.lengths) % of_window == 0 and found.num_slices == (2 if unit == 2000 else 3)
    assert of_window == unit


def sliceable(*tensors: Tensor, sliced: Any = None, dim: int = 1) -> SliceableTensors:
    return SliceableTensors(tensors, sliced or tuple(t.dim() > dim for t in tensors), dim, len(tensors) > 1)


@pytest.mark.parametrize(
    ("batch", "rows", "tokens"),
    [
        (sliceable(torch.zeros(4, 10), torch.zeros(4, 10, 3)), 4, True),
        (sliceable(torch.zeros(10, 4), torch.zeros(10, 4, 3), dim=0, sliced=(True, True)), 4, True),
        (sliceable(torch.zeros(4, 10), torch.zeros(1, 10)), None, True),  # positions, one row for all
        (sliceable(torch.zeros(4, 10), torch.zeros(4)), None, True),  # no sequence
        (sliceable(torch.zeros(4, 10), torch.zeros(4, 1, 10, 10), sliced=(True, False)), None, False),  # a mask
        (sliceable(torch.zeros(4, 10), torch.zeros(4, 10, 10)), 4, False),
        (sliceable(torch.zeros(10, 10)), 10, True),  # as many rows as tokens
    ],
)
def test_what_may_be_cut(batch: SliceableTensors, rows: int | None, tokens: bool) -> None:
    assert cuttable(batch) == (rows, tokens)


def window(labels: Any, rows: int | None = 2, unit: int = 1, slice_weight: Any = None) -> range:
    """Return the tokens that are looked at."""
    plan = SlicePlan((6, 4, 10))
    cut = choose_window(Cut(plan, labels.length, rows=rows, of_rows=4), labels, unit, -100, slice_weight)
    return range(cut.start, cut.start + plan.sequence_length)


def test_the_window_is_where_some_labels_count_and_some_do_not() -> None:
    labels = torch.zeros(4, 300, dtype=torch.long)
    assert window(sliceable(labels)).start == 0  # the first one, where all count
    labels[:, :233] = -100
    assert {232, 233} < set(window(sliceable(labels)))
    assert window(sliceable(labels), unit=16).start % 16 == 0
    assert window(sliceable(torch.full((2, 300), -100))).start == 0


def test_a_loss_mask_beside_the_labels_counts() -> None:
    labels, mask = torch.zeros(2, 300, dtype=torch.long), torch.zeros(2, 300)
    mask[:, 100:160] = 1
    tokens = set(window(sliceable(labels, mask), None, slice_weight=lambda labels: labels[1].sum()))
    assert {99, 100} < tokens or {159, 160} < tokens


class Derived(gpt.DecoderLayer):
    pass


class Held:
    """What `all_own` looks at of a PipelineModule."""

    def __init__(self, functions: list[Any], loss_fn: Any = gpt.gpt_loss) -> None:
        self.forward_funcs, self.loss_fn = functions, loss_fn


CONFIG = gpt.GPTConfig(vocab_size=8, hidden_size=16, num_layers=1, num_heads=2)
SPECS: list[LayerSpec] = gpt.gpt_layers(CONFIG)


def _with_a_foreign_mlp() -> nn.Module:
    layer = gpt.DecoderLayer(CONFIG, 0)
    layer.mlp = Derived(CONFIG, 1)
    return layer


def test_whose_layers_they_are() -> None:
    own = [spec.build() for spec in SPECS]
    assert all_own(Held(own)) and all_own(Held(own, None)) and all_own(Held([partial(gpt.gpt_loss, own[0])]))
    assert not all_own(Held([*own, Derived(CONFIG, 0)]))
    assert not all_own(Held([nn.Linear(2, 2)]))  # torch's, but no layer of ours
    assert not all_own(Held([_with_a_foreign_mlp()]))
    assert not all_own(Held([lambda x: x]))
    assert not all_own(Held([partial(lambda layer, x: x, own[0])]))
    assert not all_own(Held(own, nn.CrossEntropyLoss()))
    assert not all_own(Held(own, lambda outputs, labels: outputs.mean()))


def _hooked(layer: nn.Module) -> None:
    layer.feed_forward.register_forward_hook(lambda module, inputs, output: output - output.mean(1, keepdim=True))


def _with_a_hook_of_torch(layer: nn.Module) -> None:
    nn.utils.spectral_norm(layer.feed_forward.down)


def _parametrized(layer: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(layer.feed_forward.down)


def _with_another_forward(layer: nn.Module) -> None:
    layer.forward = lambda x: x.cumsum(1)


def _with_another_activation(layer: nn.Module) -> None:
    layer.feed_forward.activation = partial(lambda x, dim: x.softmax(dim), dim=1)


@pytest.mark.parametrize(
    "change", [_hooked, _with_a_hook_of_torch, _parametrized, _with_another_forward, _with_another_activation]
)
def test_a_layer_of_the_package_that_somebody_changed(change: Callable[[nn.Module], None]) -> None:
    own = [spec.build() for spec in SPECS]
    change(own[1])
    assert not all_own(Held(own))


def test_what_measures_or_is_of_torch_changes_nothing() -> None:
    own = [spec.build() for spec in SPECS]
    hook = lambda *arguments: None  # noqa: E731
    hook.__module__ = "deepspeed.profiling.flops_profiler.profiler"
    own[1].register_forward_hook(hook)
    own[1].feed_forward.activation = partial(nn.functional.silu, inplace=False)
    assert all_own(Held(own))
