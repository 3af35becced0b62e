"""What of a batch the check compares, whose layers, which tokens belong together, and what counts as equal."""

import math
import re
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.verify.compare import Tolerance, compare, compare_results, tolerance_of
from terapipe_ds.runtime.verify.cut import Cut, cuttable, unit_of, window_plan
from terapipe_ds.runtime.verify.named_layer import all_own
from terapipe_ds.runtime.verify.tokens import PerSlice, Same, Slicing, TokenDim


@given(st.integers(64, 131072), st.sampled_from([1, 2, 16]), st.integers(1, 8192), st.sampled_from([4, 32]))
def test_a_window_is_short_and_its_slices_unequal(length: int, cut_rows: int, granularity: int, slices: int) -> None:
    granularity = min(granularity, length // 2)
    plan = SlicePlan.equal(length, min(slices, -(-length // granularity)), granularity)
    found = window_plan(plan, granularity, 1, 16, 8, 4, cut_rows)
    unit = math.gcd(*found.lengths[:-1])
    tokens, slices_found = found.sequence_length, found.num_slices
    assert tokens <= length
    if length > 1024:  # whatever the granularity is
        assert tokens <= 1024 and tokens * cut_rows <= 2048
    assert tokens >= min(length, 128, 2048 // cut_rows) - unit
    assert slices_found in (2, 3)
    if tokens > 3 * unit:
        assert (len(set(found.lengths)) > 1 and slices_found == 3) or found == plan


@pytest.mark.parametrize(("plan", "granularity", "multiple", "unit"), [
    ((1024,) * 16, 64, 1, 256),  # a multiple of the granularity that three slices fit with
    ((1024,) * 16, 1024, 1, 256),  # a divisor of it
    ((3072,) * 16, 3072, 3, 192),
    ((2000,) * 16, 2000, 16, 80),
    ((2000,) * 16, 2000, 2000, 2000),  # layers need as many
    ((320,) * 32, 64, 1, 320),  # what listed slices have in common
    ((500, 256, 15000), 64, 2, 4),  # not at the granularity
])  # fmt: skip
def test_what_the_slices_of_a_window_are_multiples_of(plan: Any, granularity: int, multiple: int, unit: int) -> None:
    found = window_plan(SlicePlan(plan), granularity, multiple, 8, 8, 4, 2)
    assert math.gcd(*found.lengths) % unit == 0 and found.num_slices == (2 if unit == 2000 else 3)


@pytest.mark.parametrize("rows", range(2, 16))
def test_the_slices_of_a_window_part_the_blocks_that_the_plan_parts(rows: int) -> None:
    found = window_plan(SlicePlan((16 * 7, 16 * 9, 10000)), 16, 1, rows, 8, 4, rows)  # begin at odd multiples of 16
    assert unit_of(found) == 16


@pytest.mark.parametrize("shortest", [64, 128])
def test_a_slice_of_a_window_is_as_short_as_one_of_the_plan(shortest: int) -> None:
    """A layer that carries tokens of the slice before alone may need more of them: with 200 it would pass."""
    found = window_plan(SlicePlan((4096, 2048, shortest, 1984)), 64, 1, 4, 8, 1, 2)
    assert unit_of(found) == shortest and found.sequence_length == 1024 and min(found.lengths[:-1]) <= shortest


def sliceable(*tensors: Tensor, sliced: Any = None, dim: int = 1) -> SliceableTensors:
    return SliceableTensors(tensors, sliced or tuple(t.dim() > dim for t in tensors), dim, len(tensors) > 1)


@pytest.mark.parametrize(("batch", "rows", "tokens"), [
    (sliceable(torch.zeros(4, 10), torch.zeros(4, 10, 3)), 4, True),
    (sliceable(torch.zeros(10, 4), torch.zeros(10, 4, 3), dim=0, sliced=(True, True)), 4, True),
    (sliceable(torch.zeros(4, 10), torch.zeros(1, 10)), None, True),  # positions, one row for all
    (sliceable(torch.zeros(4, 10), torch.zeros(4)), None, True),  # no sequence
    (sliceable(torch.zeros(4, 10), torch.zeros(4, 1, 10, 10), sliced=(True, False)), None, False),  # a mask
    (sliceable(torch.zeros(4, 10), torch.zeros(4, 10, 10)), 4, False),
    (sliceable(torch.zeros(10, 10)), 10, True),  # as many rows as tokens
])  # fmt: skip
def test_what_may_be_cut(batch: SliceableTensors, rows: int | None, tokens: bool) -> None:
    assert cuttable(batch) == (rows, tokens)


class Derived(gpt.DecoderLayer):
    pass


CONFIG = gpt.GPTConfig(vocab_size=8, hidden_size=16, num_layers=1, num_heads=2)


def own_layers() -> list[Any]:
    return [spec.build() for spec in gpt.gpt_layers(CONFIG)]


def are_own(functions: list[Any], loss_fn: Any = gpt.gpt_loss) -> bool:
    """As `all_own` says of a stage with these layers."""
    return all_own(SimpleNamespace(forward_funcs=functions, loss_fn=loss_fn))


def test_whose_layers_they_are() -> None:
    own = own_layers()
    assert are_own(own) and are_own(own, None) and are_own([partial(gpt.gpt_loss, own[0])])
    foreign = gpt.DecoderLayer(CONFIG, 0)
    foreign.mlp = Derived(CONFIG, 1)
    for layer in (Derived(CONFIG, 0), nn.Linear(2, 2), foreign, lambda x: x, partial(lambda layer, x: x, own[0])):
        assert not are_own([*own, layer])
    assert not are_own(own, wraps(gpt.gpt_loss)(lambda outputs, labels: outputs.mean()))  # it has the package's names
    assert not are_own(own, nn.CrossEntropyLoss()) and not are_own(own, lambda outputs, labels: outputs.mean())


def summed(layer: Any, x: Tensor) -> Tensor:
    return x.cumsum(1)


@torch.no_grad()
def lowered(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output - 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda layer: layer.feed_forward.register_forward_hook(lambda module, inputs, output: output - 1),
    "hook in a decorator of torch": lambda layer: layer.feed_forward.register_forward_hook(lowered),
    "hook of torch": lambda layer: nn.utils.spectral_norm(layer.feed_forward.down),
    "hook of all modules": lambda _: nn.modules.module.register_module_full_backward_hook(lambda *arguments: None),
    "parametrization": lambda layer: nn.utils.parametrizations.spectral_norm(layer.feed_forward.down),
    "forward": lambda layer: setattr(layer, "forward", partial(summed, layer)),
    "activation": lambda it: setattr(it.feed_forward, "activation", partial(lambda x, dim: x.softmax(dim), dim=1)),
    "forward of the class": lambda _: mock.patch.object(gpt.FeedForward, "forward", summed).start(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_of_the_package_that_somebody_changed(change: str) -> None:
    own = own_layers()
    added = CHANGES[change](own[1])
    is_seen = not are_own(own)
    if change == "hook of all modules":
        added.remove()
    mock.patch.stopall()
    assert is_seen and are_own(own_layers())


def test_what_measures_or_is_of_torch_changes_nothing() -> None:
    own = own_layers()
    code = (lambda *arguments: None).__code__
    own[1].register_forward_hook(FunctionType(code, {"__name__": "deepspeed.profiling.flops_profiler.profiler"}))
    own[1].feed_forward.activation = partial(nn.functional.silu, inplace=False)
    assert are_own(own)


def test_a_window_has_the_documents_of_its_rows_and_tokens() -> None:
    cut = Cut(SlicePlan((4, 2, 6)), 20, start=5, rows=2, of_rows=3)
    starts = cut.of_starts(((0, 3, 9), (0, 5, 16, 17), (0, 6)))
    assert starts == ((0, 4), (0, 11)) and cut.of_starts(None) is None
    slicing = Slicing(cut.plan, (1.0,) * 3, starts=starts)
    for each, tokens in ((slicing, (6, 12)), (slicing.whole(), (0, 12))):
        active = each.active(each.plan.num_slices - 1, "recompute")
        assert active.documents == Documents(starts, *tokens) and active.mode == "recompute"
    assert Slicing(cut.plan, (1.0,) * 3).active(0).documents is None


# -- where the tokens of a tensor are, and what counts as equal --------------------------------------------------------

PLAN = SlicePlan((4, 2, 6))
SLICING = Slicing(PLAN, (0.5, 0.25, 0.25))
FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # of [B, T, H], what a layer may make of it
    "batch first": lambda x: x,
    "tokens first": lambda x: x.transpose(0, 1),
    "tokens last": lambda x: x.transpose(1, 2),
    "flat, rows first": lambda x: x.flatten(0, 1),
    "flat, tokens first": lambda x: x.transpose(0, 1).flatten(0, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_are_found(form: str) -> None:
    x = torch.arange(3.0 * 12 * 5).view(3, 12, 5)
    whole, parts = FORMS[form](x), [FORMS[form](x[:, slice(*PLAN.span(i))]) for i in range(3)]
    fitting = []
    for layout in SLICING.layouts_of(whole, parts):
        if all(torch.equal(SLICING.cut(layout, whole, i), part) for i, part in enumerate(parts)):
            fitting.append(layout)
            joined = SLICING.joined(layout, parts)
            assert joined.shape[0] == 12
            assert torch.equal(joined, SLICING.whole().joined(layout, [whole]))
            assert torch.equal(layout.tokens_back(joined), whole)
    assert len(fitting) == 1


def test_a_size_that_happens_to_be_the_length_is_no_token_dimension() -> None:
    whole = torch.zeros(12, 12)
    assert SLICING.layouts_of(whole, [whole[:, :n] for n in PLAN.lengths]) == [TokenDim(1)]
    assert SLICING.layouts_of(whole, [whole] * 3) == SLICING.layouts_of(torch.zeros(()), [torch.zeros(())] * 3) == []


def test_slices_share_the_gradient_of_a_tensor_without_tokens() -> None:
    """By tokens where all have the same tensor, as a scale, and like their losses where each has a value of its own."""
    slicing, gradient = Slicing(SlicePlan((3, 1)), (0.2, 0.3)), torch.tensor([4.0])
    shares = ([slicing.share_of_gradient(each, gradient, i).item() for i in (0, 1)] for each in (Same(), PerSlice(())))
    assert [*map(pytest.approx, shares)] == [[3.0, 1.0], [0.8, 1.2]]
    joined = (slicing.joined_gradients(each, [gradient, gradient]).item() for each in (Same(), PerSlice(())))
    assert [*joined] == [8.0, 8.0 / 0.5], "a sum over slices has the weight one for each"


def test_the_page_has_the_tolerances() -> None:
    page = (Path(__file__).parents[4] / "docs/verify.md").read_text(encoding="utf-8")
    found = {
        name: Tolerance(*map(float, row)) for name, *row in re.findall(r"\| (\S+) .*\| (\S+) \| (0\.\d+) \|", page)
    }
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert found.keys() == dtypes.keys()
    for name, dtype in dtypes.items():
        assert found[name] == tolerance_of([dtype], tf32=name == "fp32")  # the second row of fp32 comes last


@pytest.mark.parametrize(("share", "is_found"), [(0.9, False), (1.1, True)])
def test_a_small_gradient_counts_by_a_share_of_the_largest(share: float, is_found: bool) -> None:
    tolerance = Tolerance(1e-3, 0.1)
    whole = {"gradient of a": torch.tensor([2.0]), "gradient of b": torch.tensor([1e-9]), "output": torch.ones(1)}
    wrong = whole["gradient of b"] + share * 1e-3 * 0.1 * 2.0
    found = compare_results({**whole, "gradient of b": wrong}, whole, tolerance, (), {}, [])
    assert [each.what for each in found] == ["gradient of b"] * is_found
    missing = {name: each for name, each in whole.items() if name != "gradient of a"}
    assert [each.what for each in compare_results(missing, whole, tolerance, (), {}, [])] == ["gradient of a"]


def test_one_wrong_token_does_not_drown() -> None:
    b = torch.ones(10_000, 4)
    a = b.clone()
    a[777] += 0.01
    assert compare("output", a, b, Tolerance(2e-4, 0.1)) is None  # over all tokens it would pass
    found = compare("output", a, b, Tolerance(2e-4, 0.1), by_token=True)
    assert found is not None and found.tokens is not None and found.tokens.nonzero().flatten().tolist() == [777]


def test_not_finite() -> None:
    b = torch.tensor([[1.0], [float("-inf")]])
    every = Tolerance(1.0, 1.0)
    assert compare("output", b, b, every) is compare("output", b, b, every, by_token=True) is None
    for a in (torch.ones(2, 1), torch.full((2, 1), math.nan)):
        found = compare("output", a, b, every, by_token=True)
        assert found is not None and "not comparable" in str(found)
        assert "not comparable" in str(compare("output", b, a, every))
