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
Loss = Callable[[Any, Any], Tensor]


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
    """Register a function that attends, from [B, H, T, D] each to the same."""
    return _one(_attend, says, more)


def attend(*says: str, **more: Any) -> Callable[..., None]:
    """Register functions that attend, by their names: `attend(AFTER)(name=lambda q, k, v: ...)`."""
    return _many(_attend, says, more)


def updates(*says: str, **more: Any) -> Callable[[Update], Update]:
    """Register a function that gives what a residual layer adds, [B, T, WIDTH] to the same."""
    return _one(_update, says, more)


def update(*says: str, **more: Any) -> Callable[..., None]:
    """Register functions as `updates` does, by their names."""
    return _many(_update, says, more)


def loss(*says: str, **more: Any) -> Callable[[Loss], Loss]:
    """Register a function that is a loss of logits [B, T, VOCAB_SIZE] and labels."""
    return _one(_loss, says, more)


def losses(*says: str, **more: Any) -> Callable[..., None]:
    """Register losses by their names."""
    return _many(_loss, says, more)


def layer(*says: str, **more: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class that is a layer, [B, T, WIDTH] to the same. It is on the second stage."""
    return _one(_layer, says, more)


def layers(*says: str, **more: Any) -> Callable[..., None]:
    """Register specs of layers, by their names."""
    return _many(_layer, says, more)


def _attend(name: str, function: Attend, says: tuple[str, ...], **more: Any) -> None:
    add(name, lambda: stack(LayerSpec(Attention, function)), says, **more)


def _update(name: str, function: Update, says: tuple[str, ...], **more: Any) -> None:
    add(name, lambda: stack(LayerSpec(Residual, function)), says, **more)


def _loss(name: str, function: Loss, says: tuple[str, ...], **more: Any) -> None:
    add(name, stack, says, loss_fn=function, **more)


def _layer(name: str, module: Any, says: tuple[str, ...], **more: Any) -> None:
    spec = module if isinstance(module, LayerSpec) else LayerSpec(module)
    add(name, lambda: [LayerSpec(Embedding), LayerSpec(Mlp), spec, LayerSpec(Head)], says, **more)


def _one(register: Callable[..., None], says: tuple[str, ...], more: dict[str, Any]) -> Callable[[Any], Any]:
    def decorate(thing: Any) -> Any:
        register(thing.__name__, thing, says, **more)
        return thing

    return decorate


def _many(register: Callable[..., None], says: tuple[str, ...], more: dict[str, Any]) -> Callable[..., None]:
    def register_all(**things: Any) -> None:
        for name, thing in things.items():
            register(name, thing, says, **more)

    return register_all
