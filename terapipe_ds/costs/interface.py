"""Define the interface of costs for planner and simulator, whoever measured or counted them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from terapipe_ds.messages import show_value

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


class Costs(Protocol):
    """Give the seconds of a slice of a layer or a part.

    Costs may also have `weight_s(tokens, prefix)`, `send_s(tokens)`, `send_gradient_s(tokens)`, `step_s()` and a true
    `vectorized`. An absent method means that the time is unknown.
    """

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of F of `tokens` tokens after `prefix` tokens."""

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the whole B, W included."""


def know_weights(costs: Iterable[Costs]) -> bool:
    return all(method_of(one, "weight_s") for one in costs)


def method_of(costs: Costs, name: str) -> Callable[..., Any] | None:
    """Return an optional method of `costs`, or None where they lack it."""
    method = getattr(costs, name, None)
    return method if callable(method) else None


def costs_of_parts(costs: Any, num_parts: int, error: type[ValueError]) -> tuple[Any, ...]:
    """Return one object per part. Raise `error` where a list has another length."""
    parts = tuple(costs) if isinstance(costs, list | tuple) else (costs,) * num_parts
    if len(parts) != num_parts:
        raise error(
            f"{len(parts)} costs for {num_parts} parts: give one object for all parts, or a list with one per part"
        )
    return parts


def ask(
    costs: Costs,
    name: str,
    tokens: Sequence[int] | Counts,
    prefixes: Sequence[int] | Counts | None,
    error: type[ValueError],
    whose: str = "",
) -> Seconds:
    """Return one time per slice, or per message where `prefixes` is None, of the method `name`.

    The method gets ints, or arrays where the costs are vectorized; then it may give one number for all. Raise `error`
    for another number of answers, and for a time that is NaN, negative, infinite or no number.
    """
    method, arguments = getattr(costs, name), (tokens,) if prefixes is None else (tokens, prefixes)
    answers: Any
    if getattr(costs, "vectorized", False):
        try:
            answers = np.asarray(method(*map(np.asarray, arguments)))
        except ValueError as problem:
            if type(problem) is not ValueError:  # the costs' own refusal, which says what to do
                raise error(f"{whose}{name}: {problem}") from problem
            raise error(  # for example from `if tokens > 64`
                f"{whose}{name} of a vectorized costs object gave no array of one time per pair ({problem}): return "
                "one, or remove the attribute `vectorized`"
            ) from problem
        if answers.shape not in ((), (len(tokens),)):
            raise error(
                f"{whose}{name} of a vectorized costs object gave shape {answers.shape} for {len(tokens)} pairs: "
                "return one time per pair, or remove the attribute `vectorized`"
            )
        answers = np.broadcast_to(answers, len(tokens))
    else:
        answers = list(map(method, *arguments))
    seconds = _numbers(answers)
    if not (seconds.min() >= 0.0 and seconds.max() < np.inf):  # NaN fails both
        i = int(np.flatnonzero(~((seconds >= 0.0) & (seconds < np.inf)))[0])
        pair = f"tokens={tokens[i]}" + ("" if prefixes is None else f", prefix={prefixes[i]}")
        remedy = "times are finite seconds >= 0; measure this slice again, or correct the cost model there"
        raise error(f"{whose}{name}({pair}) = {show_value(np.asarray(answers[i]).tolist())}: {remedy}")
    return seconds


def _numbers(answers: Any) -> Seconds:
    """Return the answers as floats; anything but a number becomes NaN."""
    if isinstance(answers, np.ndarray) and answers.dtype.kind in "fiub":
        return answers.astype(float)
    try:
        return np.array(array("d", answers))  # refuses text, which numpy reads
    except (TypeError, OverflowError):
        return np.array([np.nan]) if len(answers) == 1 else np.concatenate([_numbers([one]) for one in answers])
