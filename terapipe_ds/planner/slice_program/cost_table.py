"""The cost table: every slice that a plan may use, asked once of a costs object and checked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from terapipe_ds.messages import show_value
from terapipe_ds.plan import count_granules
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.slice_program.dynamic_programs import Band, Bools, Floats

MAX_GRANULES = 16384  # of one sequence: a table of 2 GiB, and a search needs several


@dataclasses.dataclass(frozen=True, eq=False)
class CostTable:
    """Seconds of every slice of one part: row j = granules before the slice, column k = slices of k + 1 granules.

    `forward_s` and `backward_s` [n, n] are inf where a slice would pass the end of the sequence; `send_s` [n, n] is
    None without links. The last granule may be partial, so a slice that ends with the sequence has
    `sequence_length - j * granularity_tokens` tokens.
    """

    sequence_length: int
    granularity_tokens: int
    forward_s: Floats
    backward_s: Floats
    send_s: Floats | None = None
    sends: dict[int, float] = dataclasses.field(default_factory=dict)  # tokens -> seconds of a transfer

    @property
    def num_granules(self) -> int:
        return len(self.forward_s)

    @functools.cached_property
    def total_s(self) -> Floats:
        """What a slice adds to the time of its stage: forward + backward, [n, n]."""
        return self.forward_s + self.backward_s

    @functools.cached_property
    def forward_hop_s(self) -> Floats:
        """From the start of a forward to its arrival at the next stage, [n, n]."""
        return self.forward_s if self.send_s is None else self.forward_s + self.send_s

    @functools.cached_property
    def backward_hop_s(self) -> Floats:
        """From the start of a backward to the arrival of its gradient at the stage before, [n, n]."""
        return self.backward_s if self.send_s is None else self.backward_s + self.send_s

    @property
    def band(self) -> Band:
        """All slices of the table as the program of equal stages: limits are on times with the transfer."""
        return Band(self.total_s, self.forward_hop_s, self.backward_hop_s)


def tabulate(costs: Any, sequence_length: int, granularity_tokens: int) -> CostTable:
    """Ask `costs` for every slice cut at multiples of `granularity_tokens`, each (tokens, prefix) pair once.

    Python ints are passed, unless `costs.vectorized` is true: then one call gets int64 arrays of all pairs.

    Raises:
        PlannerError: the granularity is larger than the sequence or not a whole number of at least 1, `costs` lacks a
            method, or a time is NaN, negative, infinite or no number; the message names the pair and the value.
    """
    granules = count_granules(sequence_length, granularity_tokens, PlannerError)
    if granules > MAX_GRANULES:
        least = -(-sequence_length // MAX_GRANULES)
        raise PlannerError(
            f"granularity_tokens = {granularity_tokens} cuts {sequence_length} tokens in {granules} granules, and at "
            f"most {MAX_GRANULES} can be searched: give at least {least}"
        )
    check_methods(costs)
    grid = _Grid(sequence_length, granularity_tokens)
    ask = grid.ask_arrays if getattr(costs, "vectorized", False) else grid.ask_scalars
    forward_s, backward_s = ask(costs.forward_s, "forward_s"), ask(costs.backward_s, "backward_s")
    send = getattr(costs, "send_s", None)
    send_s, sends = (None, {}) if send is None else grid.ask_send(send)
    return CostTable(sequence_length, granularity_tokens, forward_s, backward_s, send_s, sends)


def check_methods(costs: Any) -> None:
    """Raise PlannerError where a costs object lacks a method that it must have."""
    for name in ("forward_s", "backward_s"):
        if not callable(getattr(costs, name, None)):
            raise PlannerError(f"costs {show_value(costs)} have no {name}(tokens, prefix): add it")


def check_seconds(name: str, tokens: int, prefix: int | None, seconds: float) -> float:
    """Return `seconds`, unless it is NaN, negative or infinite. `prefix` is None for a transfer."""
    if 0.0 <= seconds < np.inf:
        return seconds
    pair = f"tokens={tokens}" if prefix is None else f"tokens={tokens}, prefix={prefix}"
    raise PlannerError(
        f"{name}({pair}) = {float(seconds)}: times are finite seconds >= 0; measure this slice again, or mend the cost "
        f"model there"
    )


def _check_all(name: str, tokens: Any, prefixes: Any, seconds: Floats) -> None:
    """Raise PlannerError with the first pair whose time is NaN, negative or infinite."""
    if not (seconds.min() >= 0.0 and seconds.max() < np.inf):  # NaN fails both
        i = int(np.flatnonzero(~((seconds >= 0.0) & (seconds < np.inf)))[0])
        check_seconds(name, int(tokens[i]), int(prefixes[i]), seconds[i])


class _Grid:
    """The slices of one sequence at one granularity."""

    def __init__(self, sequence_length: int, granularity_tokens: int) -> None:
        self.sequence_length, self.granularity = sequence_length, granularity_tokens
        self.starts = list(range(0, sequence_length, granularity_tokens))
        self.num_granules = len(self.starts)
        self.full = [start + granularity_tokens for start in self.starts]  # tokens of slices of whole granules
        self.last_tokens = [sequence_length - start for start in self.starts]  # of the last slice, by its row
        row = np.arange(self.num_granules)
        self.valid: Bools = row[:, None] + row[None, :] < self.num_granules

    def ask_scalars(self, function: Callable[[int, int], float], name: str) -> Floats:
        # Two million calls are most of the time of a large plan: map() and fromiter() add next to nothing to them.
        table = np.full(self.valid.shape, np.inf)
        for row, prefix in enumerate(self.starts):
            tokens = [*self.full[: self.num_granules - row - 1], self.last_tokens[row]]
            try:
                seconds = np.fromiter(map(function, tokens, itertools.repeat(prefix)), np.float64, len(tokens))
            except TypeError as error:
                raise PlannerError(f"{name}(tokens, prefix={prefix}) gave no number of seconds ({error})") from error
            _check_all(name, tokens, [prefix] * len(tokens), seconds)
            table[row, : len(tokens)] = seconds
        return table

    def ask_arrays(self, function: Callable[[Any, Any], Any], name: str) -> Floats:
        rows, columns = np.nonzero(self.valid)
        prefix = rows * self.granularity
        tokens = np.minimum((columns + 1) * self.granularity, self.sequence_length - prefix)
        try:
            seconds = np.broadcast_to(np.asarray(function(tokens, prefix), np.float64), tokens.shape)
        except ValueError as error:
            raise PlannerError(
                f"{name} of a vectorized costs object gave no array of one time per slice ({error}): return an array "
                f"of the shape of tokens and prefix, or remove the attribute `vectorized`"
            ) from error
        _check_all(name, tokens, prefix, seconds)
        table = np.full(self.valid.shape, np.inf)
        table[self.valid] = seconds
        return table

    def ask_send(self, function: Callable[[int], float]) -> tuple[Floats, dict[int, float]]:
        """Return seconds per transfer, [n, n] and by tokens, on which alone the size of a transfer depends."""
        n = self.num_granules
        sizes = dict.fromkeys([*self.full[:-1], *self.last_tokens])
        seconds = {tokens: check_seconds("send_s", tokens, None, float(function(tokens))) for tokens in sizes}
        table = np.full((n, n), np.inf)
        table[:, :-1] = [seconds[tokens] for tokens in self.full[:-1]]
        table[~self.valid] = np.inf
        table[np.arange(n), np.arange(n - 1, -1, -1)] = [seconds[tokens] for tokens in self.last_tokens]
        return table, seconds
