"""Cache the answers of costs, so that one search asks for no pair twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from terapipe_ds.plan import count_granules
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.slice_program.cost_table import CostTable, check_methods, check_seconds, tabulate
from terapipe_ds.planner.slice_program.dynamic_programs import Floats

MAX_TABLE_ELEMENTS = 1 << 25  # over all different parts: 256 MiB for each of forward, backward and links


class CachedCosts:
    """Keep and check the answers of a cost object; the result is vectorized where it has a table.

    `table` holds every possible slice, or is None where the tables of all parts would be too large: then answers are
    kept pair by pair.
    """

    def __init__(self, costs: Any, sequence_length: int, granularity_tokens: int, with_table: bool = True) -> None:
        check_methods(costs)
        self._costs = costs
        self._granule = granularity_tokens
        self.table: CostTable | None = tabulate(costs, sequence_length, granularity_tokens) if with_table else None
        self.vectorized = with_table
        self._pairs: dict[tuple[str, int, int], float] = {}
        self._sends = {} if self.table is None else dict(self.table.sends)
        if callable(getattr(costs, "send_s", None)):  # a part without links must lack the method
            self.send_s = self._send_s
        if callable(getattr(costs, "weight_s", None)):  # likewise a part whose W was not measured
            self.weight_s = self._weight_s

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return self._ask("forward_s", tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self._ask("backward_s", tokens, prefix)

    def times(self, tokens: Any, prefix: Any) -> tuple[Floats, Floats, Floats]:
        """Return forward, backward and send seconds of slices in arrays."""
        sends = self._send_s(tokens) if hasattr(self, "send_s") else np.zeros(len(tokens))
        return self.forward_s(tokens, prefix), self.backward_s(tokens, prefix), sends

    def whole_s(self, sequence_length: int) -> float:
        """Return the seconds of forward and backward of a whole sequence."""
        return float(self.forward_s(sequence_length, 0) + self.backward_s(sequence_length, 0))

    def _ask(self, name: str, tokens: Any, prefix: Any) -> Any:
        if self.table is None:
            return self._ask_pairs(name, tokens, prefix)
        # a slice is named by its granules: only the last granule of the sequence can be partial
        row, granules = np.asarray(prefix) // self._granule, -(-np.asarray(tokens) // self._granule)
        seconds = getattr(self.table, name)[row, granules - 1]
        return float(seconds) if np.ndim(seconds) == 0 else seconds

    def _weight_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of W, which no table has; new pairs in one call where costs are vectorized."""
        if np.ndim(tokens) > 0 and getattr(self._costs, "vectorized", False):
            pairs = dict.fromkeys(("weight_s", int(i), int(j)) for i, j in zip(tokens, prefix, strict=True))
            if new := [pair for pair in pairs if pair not in self._pairs]:
                answers = self._costs.weight_s(*np.array([pair[1:] for pair in new]).T)
                for pair, answer in zip(new, np.broadcast_to(answers, len(new)).tolist(), strict=True):
                    self._pairs[pair] = check_seconds(*pair, answer)
        return self._ask_pairs("weight_s", tokens, prefix)

    def _ask_pairs(self, name: str, tokens: Any, prefix: Any) -> Any:
        if np.ndim(tokens) > 0:
            return np.array([self._ask_pairs(name, int(i), int(j)) for i, j in zip(tokens, prefix, strict=True)])
        pair = name, int(tokens), int(prefix)
        if pair not in self._pairs:
            self._pairs[pair] = check_seconds(*pair, float(getattr(self._costs, name)(*pair[1:])))
        return self._pairs[pair]

    def _send_s(self, tokens: Any) -> Any:
        counts = np.ravel(tokens).tolist()
        for count in counts:
            if count not in self._sends:
                self._sends[count] = check_seconds("send_s", count, None, float(self._costs.send_s(count)))
        seconds = [self._sends[count] for count in counts]
        return seconds[0] if np.ndim(tokens) == 0 else np.array(seconds).reshape(np.shape(tokens))


def costs_of_parts(costs: Any, num_parts: int) -> list[Any]:
    """Return an object per part. Raises PlannerError where a list has another length."""
    parts = list(costs) if isinstance(costs, list | tuple) else [costs] * num_parts
    if len(parts) != num_parts:
        raise PlannerError(f"{len(parts)} costs for {num_parts} parts: give one object, or a list with one per part")
    return parts


def cache_parts(costs: Any, num_parts: int, sequence_length: int, granularity_tokens: int) -> tuple[CachedCosts, ...]:
    """Return an object per part; equal parts share one. If tables are too large, only the slowest part has one."""
    parts = costs_of_parts(costs, num_parts)
    kinds = {id(cost): cost for cost in parts}
    num_granules = count_granules(sequence_length, granularity_tokens, PlannerError)
    with_tables = len(kinds) * num_granules**2 <= MAX_TABLE_ELEMENTS
    cached = {key: CachedCosts(cost, sequence_length, granularity_tokens, with_tables) for key, cost in kinds.items()}
    if not with_tables:
        slowest = max(cached, key=lambda key: cached[key].whole_s(sequence_length))
        cached[slowest] = CachedCosts(cached[slowest], sequence_length, granularity_tokens)
    return tuple(cached[id(cost)] for cost in parts)
