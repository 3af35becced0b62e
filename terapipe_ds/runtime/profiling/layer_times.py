"""What each layer of a part takes of the part's time, so that costs of another cut of the layers can be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from terapipe_ds.costs.profile import LayerShare
from terapipe_ds.runtime.failures.trials import Failure, Trials
from terapipe_ds.runtime.layout.layer_names import module_of

logger = logging.getLogger("terapipe_ds")

_QUARTER = 4  # a slice of a quarter of the sequence is long enough to tell layers apart
_RUNS = 2  # of it: forward and backward of both together take as long as one and a half unsliced forwards
_WITHOUT = (
    'name a schedule in place of "auto" and leave out terapipe.planner.cache_dir: layers are then not timed one by one'
)


class UnknownInputs(TypeError):
    """A layer hands on something that holds tensors where nobody sees them."""


class LayerByLayer:
    """Layers, each with a graph of its own: called like a part, then asked for the backward of one after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]], now_s: Callable[[], float] = time.perf_counter):
        self._functions, self._now_s = tuple(functions), now_s
        self._runs: list[tuple[list[torch.Tensor], list[torch.Tensor], float]] = []
        self._ends: list[torch.Tensor] = []
        self.ended_s = 0.0  # by the clock: when the last layer's outputs were handed over

    def __call__(self, inputs: Any) -> Any:
        """Outputs of the last layer, without the graph behind them.

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
        """Seconds of forward and backward by layer, after the backward of what was made of the outputs."""
        gradients = [leaf.grad for leaf in self._ends]
        found = []
        for leaves, outputs, forward_s in reversed(self._runs):
            pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad and g is not None]
            begin_s = self._now_s()
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            found.append((forward_s, self._now_s() - begin_s))
            gradients = [leaf.grad for leaf in leaves]
        self._runs.clear()
        return found[::-1]


def layer_shares(
    probe: Any, lengths: Sequence[int], trials: Trials | None = None
) -> tuple[LayerShare, ...] | None:
    """Of the layers of the part that ``probe`` runs; None where they cannot be told apart: shares are a hint, and what
    trains as a whole may fail layer by layer. Whatever fails is logged and leaves the probe's store empty.

    Of each layer the shorter of two runs of a slice of at most a quarter of the sequence, or of the shortest there is.

    Args:
        lengths: of slices that the probe has run, in tokens.
        trials: of the tensor-parallel peers, which all have no shares where one of them fails; a collective then.

    Raises:
        TrialError: this rank failed, and peers wait for it inside of a layer.
    """
    quarter = [tokens for tokens in lengths if _QUARTER * tokens <= probe.sequence_length]
    tokens = max(quarter, default=min(lengths))
    runs = []
    for _ in range(_RUNS if quarter else 1):
        seconds, failure = _run(probe, tokens, trials or Trials())
        if failure is not None:
            logger.warning(
                "the layers of part %d cannot be timed one by one (%s); plans for other cuts take them as alike",
                probe.part_id, str(failure).splitlines()[0],
            )  # fmt: skip
            return None
        runs.append(seconds)
    functions = probe.module.forward_funcs
    if not functions:
        return None
    forward_s = [min(run[n][0] for run in runs) for n in range(len(functions))]
    backward_s = [min(run[n][1] for run in runs) for n in range(len(functions))]
    counts, trained = zip(*map(parameters_of_layer, functions), strict=True)
    return tuple(map(LayerShare, _shares(forward_s), _shares(backward_s), counts, trained))


def _run(probe: Any, tokens: int, trials: Trials) -> tuple[list[tuple[float, float]], Failure | None]:
    """Seconds of forward and backward by layer, and what failed, here or on a peer."""
    seconds, caught = [], None
    try:
        seconds = probe.layer_seconds(tokens)
    except Exception as error:  # of the model's own code, so of any kind
        caught = error
        probe.store.reset()
    try:
        return seconds, trials.failure(caught, f"timing the layers of part {probe.part_id} one by one", _WITHOUT)
    finally:
        caught = None  # whose traceback holds this frame, and tensors of the layers


def _shares(seconds: Sequence[float]) -> list[float]:
    total = sum(seconds)
    return [each / total if total > 0 else 1 / len(seconds) for each in seconds]


def parameters_of_layer(function: Any) -> tuple[int, int]:
    """How many a layer has, and how many of them are trained."""
    module = module_of(function)
    parameters = [] if module is None else list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _apart(value: Any, leaves: list[torch.Tensor]) -> Any:
    """``value`` with its tensors as copies of leaves, which are noted: a layer may write its inputs in place."""
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


def _tensors_in(value: Any, found: list[torch.Tensor]) -> None:
    """In the order of `_apart`."""
    if torch.is_tensor(value):
        found.append(value)
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _tensors_in(each, found)
