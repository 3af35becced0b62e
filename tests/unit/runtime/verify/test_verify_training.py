"""A layer is compared as it trains: with batch statistics and hooks, without its dropout, and by what it keeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import faulty_layers
from tests.distributed.faulty_layers import WIDTH
from tests.unit.runtime.verify.test_verify_layers import Findings, _checkpoint, verify

PER_CALL = "draws random numbers once per call"
BACKWARD = "outputs agree, so look at the backward"


class Calls(nn.Module):
    """Call a function with itself and the inputs of a linear layer's residual; keep what a table gives it."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.inner, self.use = faulty_layers.linear(WIDTH, WIDTH, 3), forward
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.use(self, x))


class Steps:
    """An object of the user's."""

    def __init__(self) -> None:
        self.taken = 0


def then(statement: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return x after a statement."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        statement(layer, x)
        return x

    return forward


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = Calls(lambda _, x: x)
        layer.inner.weight.register_hook(hook)
        return layer

    return build


def clipped(gradient: Tensor) -> Tensor:
    return gradient * (30.0 / gradient.norm()).clamp(max=1.0)


def hook_activations(_: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(clipped)
    return x


def hook_module() -> nn.Module:
    layer = Calls(lambda _, x: x)
    layer.inner.register_full_backward_hook(lambda _, gradients, __: tuple(map(clipped, gradients)))
    return layer


def set_mean(layer: Any, x: Tensor) -> None:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean()


def count(name: str) -> Callable[[Any, Tensor], None]:
    return lambda layer, x: setattr(layer, name, getattr(layer, name) + 1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm beside dropout": (
        lambda: Calls(lambda layer, x: F.dropout(x - x.mean((0, 1)) if layer.training else x, 0.1)),
        "early outputs change",
    ),
    "tokens mixed beside a module of dropout": (
        lambda: Calls(lambda layer, x: layer.drop(x.cumsum(1) if layer.training else x), drop=nn.Dropout(0.1)),
        "slices after the first differ",
    ),
    "running mean": (lambda: Calls(then(set_mean), mean=torch.zeros(())), "buffer mean differs"),
    "running mean beside dropout": (
        lambda: Calls(lambda layer, x: F.dropout(then(set_mean)(layer, x), 0.5), mean=torch.zeros(())),
        "buffer mean differs",
    ),
    "counting buffer": (
        lambda: Calls(then(lambda layer, x: layer.calls.add_(1)), calls=torch.zeros(())),
        "updated once",
    ),
    "every other call": (
        lambda: Calls(lambda layer, x: then(count("calls"))(layer, x) * (layer.calls % 2), calls=0),
        "slices after the first differ",
    ),
    "scaled by a buffer": (
        lambda: Calls(lambda layer, x: x * layer.calls.add_(1).clone(), calls=torch.ones(())),
        "each call changes the buffer calls",
    ),
    "layer drop": (lambda: Calls(lambda _, x: x * (torch.rand(()) < 0.9)), PER_CALL),
    "layer drop by Python": (lambda: Calls(lambda _, x: x if random.random() < 0.9 else 0 * x), PER_CALL),
    "layer drop by NumPy": (lambda: Calls(lambda _, x: x if np.random.rand() < 0.9 else 0 * x), PER_CALL),
    "layer drop by its own generator": (
        lambda: Calls(lambda layer, x: x * (torch.rand((), generator=layer.own) < 0.9), own=generator()),
        PER_CALL,
    ),
    "layer drop by its own Random": (
        lambda: Calls(lambda layer, x: x if layer.own.random() < 0.9 else 0 * x, own=random.Random(0)),
        PER_CALL,
    ),
    "layer drop by its own generator of NumPy": (
        lambda: Calls(lambda layer, x: x if layer.own.random() < 0.9 else 0 * x, own=np.random.default_rng(0)),
        PER_CALL,
    ),
    "rows dropped": (lambda: Calls(lambda _, x: x * torch.empty_like(x[:, :1, :1]).bernoulli_(0.9)), PER_CALL),
    "one mask for all tokens": (
        lambda: Calls(lambda _, x: F.dropout1d(x.transpose(1, 2), 0.1).transpose(1, 2)),
        PER_CALL,
    ),
    "clipped gradient of a weight": (hooked(clipped), BACKWARD),
    "clamped in place": (hooked(lambda gradient: gradient.clamp_(-9.0, 9.0)), BACKWARD),
    "clipped gradient of activations": (lambda: Calls(hook_activations), BACKWARD),
    "clipped gradient of a module": (hook_module, BACKWARD),
}


def verify_one(layer: nn.Module, **options: Any) -> Findings:
    return verify([faulty_layers.Base(0).double(), layer.double()], **options)


@pytest.mark.parametrize("checkpoint", [None, _checkpoint])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_training_is_found(fault: str, checkpoint: Any) -> None:
    build, says = FAULTS[fault]
    found = verify_one(build(), checkpoint=checkpoint)
    assert len(found.findings) == 1 and says in str(found.findings[0]), (found.findings, found.notes)


HEALTHY: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # whether it draws
    "dropout": (lambda: Calls(lambda _, x: F.dropout(x, 0.5)), True),
    "captured dropout": (lambda: Calls(lambda _, x: torch.dropout(x, 0.5, True)), True),
    "dropout of several widths": (  # by which a slice draws as many numbers at a time as the whole elsewhere
        lambda: Calls(lambda _, x: x * sum(F.dropout(x.new_ones(*x.shape[:2], n)).mean() for n in (14, 35, 40, 56))),
        True,
    ),
    "logs now and then": (lambda: Calls(then(lambda _, x: random.random() < 1e-9)), True),
    "alpha dropout": (lambda: Calls(lambda _, x: F.alpha_dropout(x, 0.5, True)), True),
    "noise": (lambda: Calls(lambda _, x: x + torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1)), True),
    "noise by its own generator": (
        lambda: Calls(lambda layer, x: x + torch.rand(x.shape, generator=layer.own), own=generator()),
        True,
    ),
    "choice by noise": (lambda: Calls(lambda _, x: x * F.gumbel_softmax(x, hard=True)), True),
    "chosen tokens": (lambda: Calls(lambda _, x: x * (1 + torch.randint_like(x, 3))), True),
    "leaky at random": (lambda: Calls(lambda layer, x: F.rrelu(x, training=layer.training)), False),
    "counted tokens": (lambda: Calls(then(lambda layer, x: layer.seen.add_(x.shape[1])), seen=torch.zeros(())), False),
    "masked gradient": (hooked(lambda gradient: gradient * (torch.arange(WIDTH) % 2)), False),
    "halved gradient": (lambda: Calls(then(lambda _, x: x.requires_grad and x.register_hook(lambda g: g / 2))), False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layer_passes(name: str, dtype: torch.dtype) -> None:
    build, draws = HEALTHY[name]
    if dtype is not torch.float64 and name == "noise by its own generator":
        dtype = torch.float64  # its noise is of torch's default dtype
    found = verify([build().to(dtype)])
    assert found.findings == [] and found.without_dropout == draws
    assert len(found.notes) == (name in ("leaky at random", "logs now and then")), found.notes


def test_what_cannot_be_made_constant_is_compared_in_evaluation_mode() -> None:
    [note] = verify_one(Calls(lambda layer, x: F.rrelu(x, training=layer.training))).notes
    assert "layer 1 (Calls): compared in evaluation mode, without what it does in training alone" in note


def test_attention_dropout_is_compared_with_every_key() -> None:
    class Dropping(faulty_layers.Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return faulty_layers.sliced_attention(q, k, v, self.index, dropout_p=0.2)

    found = verify_one(Dropping(1))
    assert (found.findings, found.notes, found.without_dropout) == ([], [], 1)


KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_a_kernel_that_is_called_directly_is_refused_though_its_outputs_hardly_count() -> None:
    class Rare(faulty_layers.Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return 1e-30 * KERNEL(q, k, v, 0.0, True)[0]

    [finding] = verify_one(Rare()).findings
    assert "raised PlainAttentionError: plain attention was called" in str(finding)


COUNTERS: dict[str, Callable[[], nn.Module]] = {
    "calls": lambda: Calls(then(count("calls")), calls=0),
    "table.calls": lambda: Calls(then(lambda it, x: it.table.update(calls=it.table["calls"] + 2)), table={"calls": 1}),
    "history": lambda: Calls(then(lambda layer, x: layer.history.append(len(x))), history=[]),
    "steps.taken": lambda: Calls(then(lambda layer, x: count("taken")(layer.steps, x)), steps=Steps()),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_numbers_that_count_calls_are_named(name: str) -> None:
    found = verify_one(COUNTERS[name]())
    assert found.findings == [] and len(found.notes) == 1
    assert f"layer 1 (Calls): {name} counts calls" in found.notes[0]


@pytest.mark.parametrize("kind", ["buffer", "attribute", "frozen"])
def test_statistics_in_tensors(kind: str) -> None:
    """What a checkpoint holds is refused, other tensors are named."""
    layer = Calls(then(lambda layer, x: layer.mean.mul_(0.9).add_(0.1 * x.detach().mean())))
    if kind == "buffer":
        layer.register_buffer("mean", torch.zeros(()), persistent=False)
    else:
        layer.mean = nn.Parameter(torch.zeros(()), requires_grad=False) if kind == "frozen" else torch.zeros(())
    found = verify_one(layer)
    [text] = found.notes or map(str, found.findings)
    assert text.startswith("layer 1 (Calls): " + "buffer " * (kind == "frozen") + "mean "), text


def test_a_number_that_counts_tokens_or_remembers_a_length_is_not_named() -> None:
    layer = Calls(
        then(lambda layer, x: (setattr(layer, "length", x.shape[1]), count_tokens(layer, x))), length=3, seen=0
    )
    found = verify_one(layer)
    assert (found.findings, found.notes) == ([], [])


def count_tokens(layer: Any, x: Tensor) -> None:
    layer.seen += x.shape[1]


def test_iterators_advance_no_finding() -> None:
    """What an iterator gives differs from call to call: the outputs show it."""
    layer = Calls(lambda layer, x: x * next(layer.numbers), numbers=itertools.count(1))
    assert len(verify_one(layer).findings) == 1
