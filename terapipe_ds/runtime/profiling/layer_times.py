"""Time each layer of a part, so that costs of another cut of the layers can be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from terapipe_ds.attention import SliceStore
from terapipe_ds.costs.profile import LayerShare
from terapipe_ds.runtime.failures.trials import TrialFailure, Trials
from terapipe_ds.runtime.layout.layer_names import module_of

logger = logging.getLogger("terapipe_ds")

_QUARTER = 4  # a slice of a quarter of the sequence is long enough to tell layers apart
_RUNS = 2  # of it: forward and backward of both together take as long as one and a half unsliced forwards
_WITHOUT = (
    'name a schedule in place of "auto" and leave out terapipe.planner.cache_dir: layers are then not timed one by one'
)


class LayerTimer(Protocol):
    """Time the layers of a part: `SliceTimer` does."""

    module: Any
    sequence_length: int
    store: SliceStore
    part_id: int

    def layer_seconds(self, tokens: int) -> list[tuple[float, float]]: ...


class UnknownInputs(TypeError):
    """Say that a layer hands on something that may hold tensors unseen."""


class LayerByLayer:
    """Run layers with a graph of its own each: called like a part, then asked for one backward after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]], now_s: Callable[[], float] = time.perf_counter):
        self._functions, self._now_s = tuple(functions), now_s
        self._runs: list[tuple[list[torch.Tensor], list[torch.Tensor], float]] = []
        self._ends: list[torch.Tensor] = []
        self.ended_s = 0.0  # by the clock: when the last layer's outputs were handed over

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of the last layer, without the graph behind them.

        Raises:
            UnknownInputs: a layer hands on something else than tensors, in lists, named or plain tuples, or dicts.
        """
        self._runs.clear()
        for function in self._functions:
            leaves: list[torch.Tensor] = []
            copies = _apart(inputs, leaves)
            begin_s = self._now_s()
            inputs = function(copies)
            seconds = self._now_s() - begin_s
            outputs: list[torch.Tensor] = []
            _tensors_in(inputs, outputs)
            self._runs.append((leaves, outputs, seconds))
        self._ends = []
        outputs_alone = _apart(inputs, self._ends)
        self.ended_s = self._now_s()
        return outputs_alone

    def backward(self) -> list[tuple[float, float]]:
        """Return the seconds of forward and backward by layer, after the backward of what was made of the outputs."""
        gradients = [leaf.grad for leaf in self._ends]
        seconds = []
        for leaves, outputs, forward_s in reversed(self._runs):
            pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad and g is not None]
            begin_s = self._now_s()
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            seconds.append((forward_s, self._now_s() - begin_s))
            gradients = [leaf.grad for leaf in leaves]
        self._runs.clear()
        return seconds[::-1]


def layer_shares(
    timer: LayerTimer, lengths: Sequence[int], trials: Trials | None = None
) -> tuple[LayerShare, ...] | None:
    """Return the shares of a part's layers: of each layer the shorter of two runs of a slice.

    The slice has at most a quarter of the sequence, or is the shortest of `lengths`, which the timer has run. Shares
    are a hint, and what trains as a whole may fail layer by layer: None then, with a warning, and an empty store.

    Args:
        trials: of the tensor-parallel peers, which all have no shares where one of them fails; a collective then.

    Raises:
        TrialError: this rank failed, and peers wait for it inside of a layer.
    """
    quarter = [tokens for tokens in lengths if _QUARTER * tokens <= timer.sequence_length]
    tokens = max(quarter, default=min(lengths))
    runs = []
    for _ in range(_RUNS if quarter else 1):
        seconds, failure = _run(timer, tokens, trials or Trials())
        if failure is not None:
            logger.warning(
                "the layers of part %d cannot be timed one by one (%s); plans for other cuts take them as alike",
                timer.part_id,
                str(failure).splitlines()[0],
            )
            return None
        runs.append(seconds)
    functions = timer.module.forward_funcs
    if not functions:
        return None
    by_layer = [[min(both) for both in zip(*same, strict=True)] for same in zip(*runs, strict=True)]
    forward_s, backward_s = zip(*by_layer, strict=True)
    counts, trained = zip(*map(parameters_of_layer, functions), strict=True)
    return tuple(map(LayerShare, _shares(forward_s), _shares(backward_s), counts, trained))


def _run(timer: LayerTimer, tokens: int, trials: Trials) -> tuple[list[tuple[float, float]], TrialFailure | None]:
    seconds, caught = [], None
    try:
        seconds = timer.layer_seconds(tokens)
    except Exception as error:  # of the model's own code, so of any kind
        caught = error
        timer.store.reset()
    try:
        return seconds, trials.failure(caught, f"timing the layers of part {timer.part_id} one by one", _WITHOUT)
    finally:
        caught = None  # whose traceback holds this frame, and tensors of the layers


def _shares(seconds: Sequence[float]) -> list[float]:
    total = sum(seconds)
    return [each / total if total > 0 else 1 / len(seconds) for each in seconds]


def parameters_of_layer(function: Any) -> tuple[int, int]:
    """Return how many parameters a layer has, and how many of them are trained."""
    module = module_of(function)
    parameters = [] if module is None else list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _apart(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Return `value` with its tensors as copies of leaves, which are noted: a layer may write its inputs in place."""
    if torch.is_tensor(value):
        leaf = value.detach().requires_grad_(value.requires_grad)
        leaves.append(leaf)
        return leaf.clone()
    if type(value) in (tuple, list):
        return type(value)(_apart(each, leaves) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        return value._make(_apart(each, leaves) for each in value)
    if type(value) is dict:  # one of another class may keep more than its items
        return {name: _apart(each, leaves) for name, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnknownInputs(type(value).__name__)


def _tensors_in(value: Any, tensors: list[torch.Tensor]) -> None:
    """Append the tensors in the order of `_apart`."""
    if torch.is_tensor(value):
        tensors.append(value)
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _tensors_in(each, tensors)
