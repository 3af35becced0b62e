"""Costs that remember what they were asked, so that no pair is asked twice in one search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe_ds.plan import show_value
from terapipe_ds.planner.errors import PlannerError

Floats = npt.NDArray[np.float64]


class AskedCosts:
    """A cost object behind tables: vectorized whatever the object is, each pair asked at most once, answers checked.

    Slices begin at multiples of the granularity, so that (granules, granules before) names a slice; the last granule
    of a sequence may be partial. Pairs that pass the end of the sequence are infinite and never asked.

    Raises:
        PlannerError: the object lacks ``forward_s`` or ``backward_s``, or answers with a time that cannot be.
    """

    vectorized = True

    def __init__(self, costs: Any, sequence_length: int, granularity_tokens: int) -> None:
        for name in ("forward_s", "backward_s"):
            if not callable(getattr(costs, name, None)):
                raise PlannerError(f"costs {show_value(costs)} have no {name}(tokens, prefix): add it")
        self._costs = costs
        self._length, self._granule = sequence_length, granularity_tokens
        self._is_vectorized = bool(getattr(costs, "vectorized", False))
        self.num_granules = -(-sequence_length // granularity_tokens)
        self._tables: dict[str, Floats] = {}
        self._sends: dict[int, float] = {}
        # a part without links or split backward must not look as if it had them
        if callable(getattr(costs, "send_s", None)):
            self.send_s = self._send_s
        if callable(getattr(costs, "weight_s", None)):
            self.weight_s: Callable[[Any, Any], Any] = lambda tokens, prefix: self._ask("weight_s", tokens, prefix)
        if callable(getattr(costs, "step_s", None)):
            self.step_s = costs.step_s

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of a forward; ints give a float, arrays an array."""
        return self._ask("forward_s", tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of a backward."""
        return self._ask("backward_s", tokens, prefix)

    def whole_table(self, name: str) -> Floats:
        """[n, n]: seconds of the slice of ``column + 1`` granules after ``row`` granules; inf past the end."""
        rows = np.arange(self.num_granules)
        prefix = rows[:, None] * self._granule
        tokens = np.minimum((rows[None, :] + 1) * self._granule, self._length - prefix)
        tokens = np.where(rows[:, None] + rows[None, :] < self.num_granules, tokens, self._length + 1)
        return np.asarray(self._ask(name, tokens, prefix), dtype=np.float64)

    def first_slice_tokens(self) -> npt.NDArray[np.int64]:
        """[n]: the tokens of the slices that begin the sequence."""
        return np.minimum(np.arange(1, self.num_granules + 1) * self._granule, self._length)

    def _ask(self, name: str, tokens: Any, prefix: Any) -> Any:
        if np.ndim(tokens) == 0 and np.ndim(prefix) == 0:
            return float(self._ask(name, np.array([tokens]), np.array([prefix]))[0])
        tokens, prefix = np.broadcast_arrays(np.asarray(tokens), np.asarray(prefix))
        table = self._tables.setdefault(name, np.full((self.num_granules, self.num_granules), np.nan))
        inside = tokens + prefix <= self._length
        rows = np.where(inside, prefix // self._granule, 0)
        columns = np.where(inside, -(-tokens // self._granule) - 1, 0)
        missing = inside & np.isnan(table[rows, columns])
        if missing.any():
            self._fill(name, table, rows[missing], columns[missing], tokens[missing], prefix[missing])
        return np.where(inside, table[rows, columns], np.inf)

    def _fill(self, name: str, table: Floats, rows: Any, columns: Any, tokens: Any, prefix: Any) -> None:
        places = np.unique(rows * self.num_granules + columns, return_index=True)[1]
        rows, columns, tokens, prefix = (x[places] for x in (rows, columns, tokens, prefix))
        method = getattr(self._costs, name)
        if self._is_vectorized:
            answers: Any = np.broadcast_to(method(tokens, prefix), tokens.shape)
        else:
            answers = [method(i, j) for i, j in zip(tokens.tolist(), prefix.tolist(), strict=True)]
        seconds = checked(name, answers, [tokens, prefix])
        table[rows, columns] = seconds

    def _send_s(self, tokens: Any) -> Any:
        wanted = np.asarray(tokens)
        for count in sorted(set(wanted.ravel().tolist()) - self._sends.keys()):
            answer = self._costs.send_s(np.array([count]) if self._is_vectorized else count)
            self._sends[count] = float(checked("send_s", np.ravel(answer)[:1], [np.array([count])])[0])
        seconds = np.array([self._sends[count] for count in wanted.ravel().tolist()]).reshape(wanted.shape)
        return float(seconds) if wanted.ndim == 0 else seconds


def checked(name: str, answers: Any, asked: Sequence[Any]) -> Floats:
    """``answers`` as floats. Raises PlannerError for the first that is no time."""
    try:
        seconds = np.asarray(answers, dtype=np.float64)
    except (TypeError, ValueError):
        seconds = np.array([_number(answer) for answer in answers])
    wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
    if wrong.size:
        place = int(wrong[0])
        question = ", ".join(f"{what}={int(x[place])}" for what, x in zip(("tokens", "prefix"), asked, strict=False))
        raise PlannerError(f"{name}({question}) = {show_value(answers[place])}: costs are finite seconds >= 0")
    return seconds


def _number(answer: Any) -> float:
    try:
        return float(answer)
    except (TypeError, ValueError):
        return float("nan")


def ask_parts(costs: Any, num_parts: int, sequence_length: int, granularity_tokens: int) -> tuple[AskedCosts, ...]:
    """One per part; parts that share an object share its tables.

    Raises:
        PlannerError: a list of another length.
    """
    parts = list(costs) if isinstance(costs, list | tuple) else [costs] * num_parts
    if len(parts) != num_parts:
        raise PlannerError(f"{len(parts)} costs for {num_parts} stages: give one object, or a list with one per stage")
    kept = {id(cost): cost for cost in parts}
    asked = {key: AskedCosts(cost, sequence_length, granularity_tokens) for key, cost in kept.items()}
    return tuple(asked[id(cost)] for cost in parts)
