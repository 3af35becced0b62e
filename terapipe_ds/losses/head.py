"""Describe the output matrix of a model, so that its loss can run it: the last layer then hands on its input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.compat.replaced import packages_of


class VocabularyRanks(Protocol):
    """Declare the joint work of ranks that divide the vocabulary, and perhaps the tokens of a slice as well."""

    size: int

    def span(self, share: int) -> tuple[int, int]:
        """Return the first label of this rank's share, of `share` labels, and the number of all labels."""

    def largest(self, of_tokens: Tensor) -> None:
        """Put the maximum over the ranks into `of_tokens`."""

    def sum(self, of_tokens: Tensor) -> None:
        """Put the sum over the ranks into `of_tokens`."""

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens [B, T, H], for this rank's."""

    def own_sum(self, gradient: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over the ranks of `gradient` [B, T, H]."""


@dataclass(frozen=True)
class Head:
    """Hold an output matrix: logits are softcap * tanh(scale * (hidden @ weight.T + bias) / softcap).

    Without `softcap` logits are scale * (hidden @ weight.T + bias). `ranks` hold shares of the rows of `weight`.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    ranks: VocabularyRanks | None = None

    @property
    def vocabulary(self) -> int:
        """Return the number of logits of a token, over all ranks."""
        share = self.weight.shape[0]
        return share if self.ranks is None else self.ranks.span(share)[1]


def hands_on_hidden() -> bool:
    """Return whether the last layer must return `hand_on(input)`, because the loss that runs next takes it."""
    active = active_slice()
    return active is not None and not active.wants_logits


def hand_on(hidden: Tensor) -> Tensor:
    """Return `hidden` with a graph, as logits have one: DeepSpeed begins a backward at a hook on the last output."""
    # the layers before may be frozen, or on another stage
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    # another tensor: DeepSpeed's checkpoints in parts empty the one that a layer gets
    return hidden.view_as(hidden)


def head_of(layer: nn.Module) -> Head | str:
    """Return torch's own linear layer as an output matrix, or the reason why its product cannot be left to a loss."""
    if type(layer) is not nn.Linear:
        return f"the output matrix is a {type(layer).__name__}, not torch's own nn.Linear"
    return change_of(layer, "the output matrix") or Head(layer.weight, layer.bias)


def change_of(layer: Any, name: str) -> str:
    """Return what a program has changed in a layer, which a loss that takes its product would leave out; else ""."""
    hooks = (getattr(layer, f"_{kind}_hooks", {}) for kind in ("forward", "forward_pre", "backward", "backward_pre"))
    if not all(_is_ours(hook) for each in hooks for hook in each.values()):
        return f"{name} has hooks"
    forward = getattr(layer, "__dict__", {}).get("forward")
    while isinstance(forward, HandsOn):
        forward = forward.plain
    is_usual = forward is None or getattr(forward, "__func__", None) is getattr(type(layer), "forward", None)
    return "" if is_usual or _is_ours(forward) else f"the forward of {name} was replaced"


def _is_ours(function: Any) -> bool:
    """Return whether a hook or a forward is this package's: engines look at layers, or replace their products."""
    return packages_of(function) == {"terapipe_ds"}


class TiedLogits:
    """Compute logits by the weights of an embedding: the `forward_fn` of a `TiedLayerSpec`."""

    def __call__(self, embedding: Any, hidden: Tensor) -> Tensor:
        """Return the logits; or `hidden`, if the loss takes it."""
        return hand_on(hidden) if hands_on_hidden() else F.linear(hidden, embedding.weight)

    def output_head(self, embedding: Any) -> Head:
        """Return the embedding's weights as an output matrix."""
        return Head(embedding.weight)


tied_logits = TiedLogits()


def find_head(layer: Any) -> Callable[[], Head | str] | str:
    """Return a function that describes the output matrix of a model's last layer, or the reason why there is none.

    The function returns a reason as well, if a program has changed the layer since. The layer is torch's nn.Linear,
    which from now on obeys `hands_on_hidden()`; or it, or the `forward_fn` of a tied layer, obeys by itself and has a
    method `output_head()` that returns the `Head`, or the reason.
    """
    if isinstance(layer, functools.partial) and hasattr(layer.func, "output_head"):
        return _described(layer.func, functools.partial(layer.func.output_head, *layer.args, **layer.keywords))
    if hasattr(layer, "output_head"):
        return _described(layer, layer.output_head)
    head = head_of(layer)
    if isinstance(head, str):
        return head
    if not isinstance(layer.forward, HandsOn):
        layer.forward = HandsOn(layer.forward)
    return lambda: head_of(layer)


class HandsOn:
    """Stand in for the forward of a linear layer, and return its input if the loss takes that."""

    def __init__(self, plain: Callable[[Tensor], Tensor]) -> None:
        self.plain = plain

    def __call__(self, hidden: Tensor) -> Tensor:
        return hand_on(hidden) if hands_on_hidden() else self.plain(hidden)


def _method(kind: type, name: str) -> Any:
    """Return a method of a class; `getattr` would also give the `__call__` of its metaclass, which makes objects."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _described(layer: Any, describe: Callable[[], Head | str]) -> Callable[[], Head | str] | str:
    """Return a function that calls `describe`; it, or this one, returns a reason if `layer` may do more than that."""

    def head() -> Head | str:
        described = next((kind for kind in type(layer).__mro__ if "output_head" in vars(kind)), type(layer))
        for method in ("forward", "__call__"):
            own, inherited = _method(type(layer), method), _method(described, method)
            if inherited not in (own, None, nn.Module.forward):
                return f"{type(layer).__name__} has a {method}() of its own and inherits output_head(): define both"
        return change_of(layer, "the last layer") or describe()

    found = head()
    return found if isinstance(found, str) else head
