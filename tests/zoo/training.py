"""Define layers that behave differently in training than in evaluation, or that keep something from call to call."""

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.small_models.parts import WIDTH, Weighted, scores_of
from tests.zoo.members import AFTER, BACKWARD, EARLY, layer

RARE = 1e-13  # dropout with this rate draws its random numbers and drops none
ONCE = "draws random numbers once per call"
LATE = 6  # calls: more than two steps of whole micro-batches make, and fewer than two steps of slices make


class Keeping(Weighted, inner=(WIDTH, WIDTH, 140)):
    """Compute x + use(layer, x) @ inner. `kept` are its attributes, made by functions; tensors become buffers."""

    def __init__(
        self, use: Callable[[Any, Tensor], Tensor], prepare: Callable[[Any], Any] = lambda _: None, **kept: Any
    ) -> None:
        super().__init__()
        self.use = use
        for name, value in ((name, value() if callable(value) else value) for name, value in kept.items()):
            if isinstance(value, Tensor):
                self.register_buffer(name, value.clone(), persistent=name != "unsaved")
            else:
                setattr(self, name, value)
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(self, x) @ self.inner


keeping = functools.partial(LayerSpec, Keeping)


def then(statement: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that runs a statement and returns x."""

    def use(it: Any, x: Tensor) -> Tensor:
        statement(it, x)
        return x

    return use


def count(owner: Any) -> Any:
    owner.calls = owner.calls + 1
    return owner.calls


def late(counted: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that does more after some calls; the check ends before."""
    return lambda it, x: x.tanh() if counted(it) > LATE else x


def average(it: Any, x: Tensor, name: str = "mean") -> Any:
    setattr(it, name, 0.9 * getattr(it, name) + 0.1 * x.detach().abs().mean())
    return getattr(it, name)


def clipped(gradient: Tensor, most: float = 1e-3) -> Tensor:
    return gradient * (most / gradient.norm()).clamp(max=1.0)


def hook_activations(_: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(clipped)
    return x


def attend_rarely(_: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    mixed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]
    return x + 1e-4 * mixed.transpose(1, 2).flatten(2)


def step(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.sub_(0.1 * parameter.grad)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def one_of(it: Any, x: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=x.dtype).bernoulli_(0.5, generator=it.own)


ZERO, COUNT = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long)

layer(EARLY)(
    BatchNormBesideDropout=keeping(
        lambda it, x: F.dropout((x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-3).sqrt() if it.training else x, RARE)
    ),
    MixingBesideDropout=keeping(
        lambda it, x: it.drop(x - x.mean(1, keepdim=True) if it.training else x), drop=lambda: nn.Dropout(RARE)
    ),
    AttentionWithDropout=keeping(
        lambda it, x: F.dropout(scores_of(x, x).softmax(-1), RARE, it.training) @ x if it.training else x
    ),
)
layer("buffer mean differs", "updated once for each slice")(
    RunningMeanOfLater=keeping(
        lambda it, x: x * average(it, x) if count(it) > LATE else then(average)(it, x), mean=ZERO, calls=COUNT
    ),
    RunningMeanBesideDropout=keeping(
        lambda it, x: F.dropout(x * (1.0 + average(it, x) * (count(it) > LATE)), RARE), mean=ZERO, calls=COUNT
    ),
)
layer("buffer calls differs")(WarmedUp=keeping(late(lambda it: it.calls.add_(1)), calls=COUNT))
layer("each call changes the buffer calls")(
    ScaledByABuffer=keeping(lambda it, x: x * it.calls.add_(1).clone(), calls=COUNT)
)
layer(AFTER)(EveryOtherCall=keeping(lambda it, x: x * (count(it) % 2), calls=0))
layer(ONCE)(
    DroppedLayer=keeping(lambda it, x: x * (torch.rand((), generator=it.own) < 0.5), own=generator),
    StochasticDepth=keeping(lambda it, x: x * one_of(it, x, len(x), 1, 1), own=generator),
    OneMaskForAllTokens=keeping(lambda it, x: x * one_of(it, x, len(x), 1, WIDTH), own=generator),
)
layer("inner differs")(
    ClippedWeightGradient=keeping(lambda _, x: x, lambda it: it.inner.register_hook(clipped)),
    ClampedInPlace=keeping(lambda _, x: x, lambda it: it.inner.register_hook(lambda g: g.clamp_(-1e-4, 1e-4))),
)
layer(BACKWARD)(ClippedActivations=keeping(hook_activations))
layer("raised PlainAttentionError: plain attention was called")(KernelThatHardlyCounts=keeping(attend_rarely))
layer("register_post_accumulate_grad_hook", "takes a step per slice", error="TeraPipeConfigError")(
    StepsInTheBackward=keeping(lambda _, x: x, lambda it: it.inner.register_post_accumulate_grad_hook(step))
)


DRAWN = "draws from a generator of Python or NumPy once per call"
COUNTED: dict[str, tuple[LayerSpec, str, str]] = {  # the name reported as lost after trials, and the check's text
    "attribute": (keeping(late(count), calls=0), "", "calls counts calls"),
    "table": (
        keeping(late(lambda it: it.table.update(n=it.table["n"] + 2) or it.table["n"] / 2), table=lambda: {"n": 0}),
        "",
        "table.n counts calls",
    ),
    "object": (
        keeping(late(lambda it: count(it.steps)), steps=lambda: SimpleNamespace(calls=0)),
        "",
        "steps.calls counts calls",
    ),
    "number": (
        keeping(then(lambda it, x: setattr(it, "mean", float(average(it, x)))), mean=0.0),
        "",
        "mean counts calls or is a mean",
    ),
    "tensor": (keeping(then(average), lambda it: setattr(it, "mean", ZERO)), "", "mean counts calls or is a mean"),
    "unsaved buffer": (
        keeping(then(functools.partial(average, name="unsaved")), unsaved=ZERO),
        "",
        "unsaved counts calls or is",
    ),
    "unsaved count": (keeping(late(lambda it: it.unsaved.add_(1)), unsaved=COUNT), "", "unsaved counts calls"),
    "own noise": (
        keeping(lambda it, x: x + torch.randn(x.shape, generator=it.own, dtype=x.dtype), own=generator),
        "",
        "",
    ),
    "list": (keeping(then(lambda it, x: it.history.append(len(x))), history=list), "", "history counts calls"),
    "dropped": (keeping(lambda it, x: x * (it.own.random() < 0.5), own=lambda: random.Random(3)), "", DRAWN),
    "iterator": (keeping(late(lambda it: next(it.numbers) + 1), numbers=itertools.count), "", ""),
    "cycle": (
        keeping(late(lambda it: next(it.numbers)), numbers=lambda: itertools.cycle(range(1, 10**4))),
        "",
        "",
    ),
    "generator": (
        keeping(late(lambda it: next(it.numbers)), numbers=lambda: iter(number for number in range(1, 10**4))),
        ".numbers",
        "",
    ),
}
