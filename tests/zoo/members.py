"""Define the members of the zoo: a small model with its loss and data, and the required outcome with the defaults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import EXACT, MicroBatch, micro_batch
from tests.small_models.parts import Attention, Calls, Embedding, Head, Mlp, Residual, cross_entropy

EARLY = "early outputs change with later tokens, with how many there are, or from call to call"
AFTER = "slices after the first differ"
FIRST = "the first tokens of a slice differ"
ONE_VALUE = "one value for all tokens of a call"
ADDED = "the layer adds a loss of its own in the backward, of the tokens of one forward pass"
BACKWARD = "outputs agree, so look at the backward"


@dataclass(frozen=True)
class Member:
    """Hold one member of the zoo. It trains alike in the stock engine with one stage and with two.

    `says`: the text that the refusal must contain; empty: it trains in slices as in the stock engine.
    `error`: the class of the refusal. `stops`: in slices, without any check, it does not even run.
    `terapipe`, `engine`: keys of the section and options of the engine that the model needs.
    `limit`: how far slices may be from the stock engine; the difference is only rounding.
    """

    name: str
    layers: Sequence[Any]
    says: tuple[str, ...] = ()
    error: str = "VerifyError"
    loss_fn: Callable[[Any, Any], Tensor] | None = cross_entropy
    data: Callable[[int], MicroBatch] = micro_batch
    terapipe: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    stops: bool = False
    limit: float = EXACT


ZOO: dict[str, Member] = {}
"""All members by name; the modules of this folder add theirs."""


def add(name: str, layers: Sequence[Any], *says: str, **more: Any) -> None:
    """Add a model of layers, each of which is a spec, a class or a function."""
    assert name not in ZOO, name
    ZOO[name] = Member(name, [spec_of(each) for each in layers], says, **more)


def spec_of(layer: Any) -> LayerSpec:
    """Return the spec of a layer, which may be a spec, a class or a function."""
    if isinstance(layer, LayerSpec):
        return layer
    return LayerSpec(layer) if isinstance(layer, type) else LayerSpec(Calls, layer)


def stack(*mixers: Any) -> list[Any]:
    """Return a model of four layers and more: two stages share them in halves."""
    return [Embedding, *mixers, *[Mlp] * (3 - len(mixers)), Head]


def checkpointed(*kinds: type[nn.Module]) -> dict[str, Any]:
    """Return options of an engine that recomputes layers of these classes in the backward."""
    return {"module": {"activation_checkpoint_interval": 1, "checkpointable_layers": [kind.__name__ for kind in kinds]}}


def adding(member_of: Callable[[Any], dict[str, Any]]) -> Callable[..., Callable[..., Any]]:
    """Return a function that adds members made of one object each, which `member_of` turns into fields of `Member`.

    `added(*says, **fields)` decorates one object under its name, and takes several objects by keyword.
    """

    def added(*says: str, **more: Any) -> Callable[..., Any]:
        def enter(thing: Any = None, /, **things: Any) -> Any:
            for name, each in (things or {thing.__name__: thing}).items():
                fields = {**member_of(each), **more}
                add(name, fields.pop("layers"), *says, **fields)
            return thing

        return enter

    return added


attend = adding(lambda function: {"layers": stack(LayerSpec(Attention, function))})
"""Functions that attend, from [B, H, T, D] each to the same."""
update = adding(lambda function: {"layers": stack(LayerSpec(Residual, function))})
"""Functions that give what a residual layer adds, [B, T, WIDTH] to the same."""
loss = adding(lambda function: {"layers": stack(), "loss_fn": function})
"""Losses of logits [B, T, VOCAB_SIZE] and labels."""
layer = adding(lambda kind: {"layers": [Embedding, Mlp, kind, Head]})
"""Layers, [B, T, WIDTH] to the same, on the second stage."""
