"""What a member of the zoo is: a small model with its loss and data, and what must become of it with the defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import MicroBatch, micro_batch
from tests.zoo.layers import Attention, Embedding, Head, Mlp, Residual, cross_entropy

EARLY = "early outputs change with later tokens, with how many there are, or from call to call"
AFTER = "slices after the first differ"
FIRST = "the first tokens of a slice differ"
ONE_VALUE = "one value for all tokens of a call"
BACKWARD = "outputs agree, so look at the backward"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Update = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Member:
    """One of the zoo. It trains alike in the stock engine with one stage and with two.

    `says`: what the refusal must contain; empty: it trains in slices as in the stock engine.
    `error`: the class of the refusal. `stops`: in slices, without any check, it does not even run.
    `terapipe`, `engine`: keys of the section and options of the engine that the model needs.
    """

    name: str
    layers: Callable[[], Sequence[LayerSpec]]
    says: tuple[str, ...] = ()
    error: str = "VerifyError"
    loss_fn: Callable[[Any, Any], Tensor] | None = cross_entropy
    data: Callable[[int], MicroBatch] = micro_batch
    terapipe: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    stops: bool = False


ZOO: dict[str, Member] = {}
"""All members by name; the modules of this folder add theirs."""


def add(name: str, layers: Callable[[], Sequence[LayerSpec]], says: str | tuple[str, ...], **more: Any) -> None:
    assert name not in ZOO, name
    ZOO[name] = Member(name, layers, (says,) if isinstance(says, str) else says, **more)


def stack(*mixers: LayerSpec) -> list[LayerSpec]:
    """A model of four layers and more: two stages share them in halves."""
    return [LayerSpec(Embedding), *mixers, *[LayerSpec(Mlp)] * (3 - len(mixers)), LayerSpec(Head)]


def checkpointed(*kinds: type[nn.Module]) -> dict[str, Any]:
    """Options of an engine that recomputes layers of these classes in the backward."""
    return {"module": {"activation_checkpoint_interval": 1, "checkpointable_layers": [kind.__name__ for kind in kinds]}}


def attends(*says: str, **more: Any) -> Callable[[Attend], Attend]:
    """The function attends, from [B, H, T, D] each to the same."""

    def register(attend: Attend) -> Attend:
        add(attend.__name__, lambda: stack(LayerSpec(Attention, attend)), says, **more)
        return attend

    return register


def updates(*says: str, **more: Any) -> Callable[[Update], Update]:
    """The function gives what a residual layer adds, [B, T, WIDTH] to the same."""

    def register(update: Update) -> Update:
        add(update.__name__, lambda: stack(LayerSpec(Residual, update)), says, **more)
        return update

    return register


def layer(*says: str, **more: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """The class is a layer, [B, T, WIDTH] to the same. It stands on the second stage."""

    def register(module: type[nn.Module]) -> type[nn.Module]:
        layers = [LayerSpec(Embedding), LayerSpec(Mlp), LayerSpec(module), LayerSpec(Head)]
        add(module.__name__, lambda: layers, says, **more)
        return module

    return register


def loss(*says: str, **more: Any) -> Callable[[Callable[[Any, Any], Tensor]], Callable[[Any, Any], Tensor]]:
    """The function is a loss of logits [B, T, VOCAB_SIZE] and labels."""

    def register(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        add(function.__name__, lambda: stack(), says, loss_fn=function, **more)
        return function

    return register
