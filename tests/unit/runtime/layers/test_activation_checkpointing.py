"""Checkpointed ranges whose inputs need no gradient still train their parameters."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, push_slice, sliced_attention
from terapipe_ds.attention.kept import KeptCalls
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.layers.activation_checkpointing import (
    checkpoint_with_gradients,
    checkpointing_with_gradients,
    keeps_attention,
    set_recompute,
    warn_if_none_is_kept,
)
from terapipe_ds.runtime.verify.named_layer import layers_of
from terapipe_ds.runtime.verify.tokens import Slicing

TOKENS = torch.tensor([[1, 2], [0, 1]])


def run(checkpoint: Any) -> nn.Embedding:
    """An embedding in one range, a layer in the next one, both checkpointed."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(4, 3), nn.Linear(3, 3)
    checkpoint(layer, checkpoint(embedding, TOKENS)).sum().backward()
    assert layer.weight.grad is not None
    return embedding


def test_the_embedding_gets_its_gradient() -> None:
    reentrant = mock.Mock(wraps=ds_checkpointing.checkpoint)
    found = run(checkpoint_with_gradients(reentrant)).weight.grad
    expected = run(lambda function, *inputs: function(*inputs)).weight.grad
    assert found is not None and expected is not None
    assert torch.equal(found, expected)
    assert reentrant.call_count == 1, "the second range is checkpointed as it was asked for"
    with pytest.raises(RuntimeError, match="does not require grad"):  # if not, DeepSpeed has repaired it
        run(ds_checkpointing.checkpoint)


@pytest.mark.parametrize("offloads", [False, True])
def test_layers_that_return_other_than_tuples(offloads: bool) -> None:
    """A reentrant checkpoint cuts tensors in a list or a dict out of the graph without a word."""

    def gradient(checkpoint: Any, pack: Any) -> Tensor:
        x = torch.arange(6.0).requires_grad_()
        first, second = checkpoint(lambda x: pack([x * 2, x.sin()]), x)
        checkpoint(lambda a, b: (a * b).sum(), first, second).backward()
        assert x.grad is not None
        return x.grad

    checkpoint = checkpoint_with_gradients(ds_checkpointing.checkpoint, offloads)
    expected = gradient(lambda function, *inputs: function(*inputs), tuple)
    assert torch.equal(gradient(checkpoint, list), expected)
    assert torch.equal(gradient(checkpoint, tuple), expected)
    x = torch.ones(3, requires_grad=True)
    kept, others = checkpoint(lambda x: (x * 2, {"angle": x.detach()}), x)  # those that need no gradient may stay there
    assert torch.equal(others["angle"], x)
    kept.sum().backward()
    assert x.grad is not None
    with pytest.raises(TeraPipeConfigError, match="return a tensor or a flat tuple"):
        checkpoint(lambda x: (x * 2, {"angle": x.cos()}), x)[0].sum().backward()


@pytest.mark.parametrize("offloads", [False, True])
def test_a_parameter_that_a_layer_hands_on_is_trained(offloads: bool) -> None:
    """A reentrant checkpoint makes the parameter itself a result of its graph, which no optimizer then updates."""
    checkpoint = checkpoint_with_gradients(ds_checkpointing.checkpoint, offloads)
    x, weight = torch.arange(3.0).requires_grad_(), nn.Parameter(torch.ones(3))
    first, second = checkpoint(lambda x: (x.sin(), weight), x)
    assert weight.is_leaf, "else its next backward runs in a circle, without end"
    (first * second).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.arange(3.0).sin())


class Tracker:
    """Hold a random state of a model, apart from torch's, as Megatron's tracker does."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def get_states(self) -> dict[str, Any]:
        return {"own": self.generator.get_state()}

    def set_states(self, states: dict[str, Any]) -> None:
        self.generator.set_state(states["own"])


@pytest.mark.parametrize("offloads", [False, True])
def test_the_second_run_draws_the_numbers_of_the_first_one_from_trackers(offloads: bool) -> None:
    trackers, found = [Tracker(), Tracker()], []
    x = torch.ones(2, 50, requires_grad=True)

    def drop(x: Tensor, tracker: Tracker) -> Tensor:
        return x.sin() * (torch.rand(x.shape, generator=tracker.generator) < 0.5)

    for tracker in trackers:  # plain calls, then checkpoints, whose backward runs each again
        run = checkpoint_with_gradients(ds_checkpointing.checkpoint, offloads, rng_trackers=[tracker])
        call = run if found else lambda function, *inputs: function(*inputs)
        outputs = [call(functools.partial(drop, tracker=tracker), row) for row in x]
        for output in reversed(outputs):
            output.sum().backward()
        found.append((x.grad, torch.rand(3, generator=tracker.generator)))
        x.grad = None
    assert all(map(torch.equal, *found))


NON_REENTRANT = functools.partial(checkpoint, use_reentrant=False)


def module_of(function: Any) -> Any:
    """Return the part of a `PipelineModule` on which checkpointing depends."""
    fields = {"num_stages": 2, "stage_id": 0, "checkpointable_layers": None}
    return SimpleNamespace(activation_checkpoint_interval=0, activation_checkpoint_func=function, **fields)


@pytest.mark.parametrize("function", [ds_checkpointing.non_reentrant_checkpoint, NON_REENTRANT])
def test_non_reentrant_layers_do_not_keep_attention(function: Any) -> None:
    section = {"enabled": True, "recompute": "full", "keep_attention": True}
    config, module = TeraPipeConfig(**section), module_of(function)
    refused = "keep_attention = true: {}.*or leave keep_attention out"
    with pytest.raises(TeraPipeConfigError, match=refused.format("the module's activation_checkpoint_func")):
        set_recompute(module, config, {})
    module.activation_checkpoint_func = ds_checkpointing.checkpoint
    set_recompute(module, config, {"pipeline": {"use_reentrant": True}})
    with pytest.raises(TeraPipeConfigError, match=refused.format("pipeline.use_reentrant = false")):
        TeraPipeConfig.from_deepspeed({"pipeline": {"use_reentrant": False}, "terapipe": section})
    assert TeraPipeConfig.from_deepspeed({"pipeline": {"use_reentrant": True}, "terapipe": section}) == config


def kept_gradients(function: Any, layer: Any, lengths: Any = (8,), saving: Any = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [1, 2, 8, 4] through a checkpointed layer that keeps attention, and through SDPA."""
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    keeping, store, outputs = checkpoint_with_gradients(function, kept=KeptCalls()), SliceStore(), []
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    slices = [
        ActiveSlice(e - n, e, 8, slice_id=i, store=store, keeps_attention=True)
        for i, (e, n) in enumerate(zip(ends, lengths, strict=True))
    ]
    for active in slices:
        with push_slice(active), saving or nullcontext():
            outputs.append(keeping(layer, x[:, :, active.start : active.stop]))
    for active, output in reversed(list(zip(slices, outputs, strict=True))):
        with push_slice(active.replace(mode="recompute")):
            output.square().sum().backward()
    found, x.grad = x.grad, None
    F.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum().backward()
    assert found is not None and x.grad is not None
    return found, x.grad


def attend(x: Tensor, name: str = "layer") -> Tensor:
    return sliced_attention(x * 1.0, x * 1.0, x * 1.0, name)


@pytest.mark.parametrize("lengths", [(8,), (5, 3)])
@pytest.mark.parametrize(("function", "layer"), [
    (ds_checkpointing.checkpoint, attend),
    (lambda *args: NON_REENTRANT(*args), attend),  # which nobody can tell by looking at it
    (ds_checkpointing.checkpoint, lambda x: NON_REENTRANT(attend, x)),  # whose second run finds nothing kept
])  # fmt: skip
def test_gradients_with_kept_attention(function: Any, layer: Any, lengths: tuple[int, ...]) -> None:
    found, expected = kept_gradients(function, layer, lengths)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_draws_after_kept_attention_are_those_of_the_first_run() -> None:
    """The second run draws no mask of attention."""
    drawn: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        out = sliced_attention(x * 1.0, x * 1.0, x * 1.0, "layer", dropout_p=0.5)
        drawn.append(torch.rand(4))
        return out

    kept_gradients(ds_checkpointing.checkpoint, layer)
    first, second = drawn
    assert torch.equal(first, second)


def test_two_kept_calls_need_two_names() -> None:
    reentrant = ds_checkpointing.checkpoint
    with pytest.raises(SliceStoreError, match=r"layer 'layer': two calls of .*: give each its own name"):
        kept_gradients(reentrant, lambda x: attend(x) + attend(2 * x))
    found, _ = kept_gradients(reentrant, lambda x: attend(x) + 0 * attend(2 * x, "other"))
    assert torch.allclose(found, kept_gradients(reentrant, attend)[1], rtol=1e-12, atol=1e-12)


def test_only_an_in_place_change_is_called_one() -> None:
    """Kept tensors may come back from the host, to a device without memory for them."""

    def fail(packed: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory for it")

    saving = torch.autograd.graph.saved_tensors_hooks(lambda x: x, fail)
    with pytest.raises(torch.OutOfMemoryError):
        kept_gradients(ds_checkpointing.checkpoint, attend, saving=saving)
    with pytest.raises(SliceStoreError, match=r"it changed the output of sliced_attention\(\) in place"):
        kept_gradients(ds_checkpointing.checkpoint, lambda x: attend(x).mul_(2.0))


def test_layers_that_keep_nothing_are_told_once_per_engine(caplog: pytest.LogCaptureFixture) -> None:
    config, module = (
        TeraPipeConfig(enabled=True, recompute="full", keep_attention=True),
        module_of(ds_checkpointing.checkpoint),
    )
    for layer, warnings in ((attend, 0), (lambda x: 2.0 * x, 1)):
        set_recompute(module, config, {})
        caplog.clear()
        x = torch.randn(1, 2, 8, 4, requires_grad=True)
        with checkpointing_with_gradients(module), push_slice(ActiveSlice(0, 8, 8, keeps_attention=True)):
            module.activation_checkpoint_func(layer, x)
        for _ in range(2):
            warn_if_none_is_kept(module, 1)
        assert caplog.text.count("stage 1: terapipe.keep_attention = true, but no layer here keeps") == warnings
    # a stage without checkpoints
    set_recompute(module, config.model_copy(update={"recompute": (1,)}), {})
    warn_if_none_is_kept(module, 0)
    assert "stage 0" not in caplog.text


def test_verification_keeps_attention_as_training_does() -> None:
    module = module_of(ds_checkpointing.checkpoint)
    set_recompute(module, TeraPipeConfig(enabled=True, recompute="full", keep_attention=True), {})
    module.forward_funcs, module.is_checkpointable_results = [lambda x: attend(x) + attend(2 * x)], [True]
    module._local_start, x = 0, torch.randn(1, 2, 8, 4, requires_grad=True)
    (layer,), slicing = layers_of(module), Slicing(SlicePlan((8,)), (1.0,), keeps_attention=keeps_attention(module))
    with push_slice(slicing.active(0)), pytest.raises(SliceStoreError, match="give each its own name"):
        layer(x)
