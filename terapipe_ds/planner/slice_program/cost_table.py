"""Build the cost table: ask a costs object once for every slice that a plan may use, and check its answers."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from terapipe_ds.costs.interface import Costs, ask, method_of
from terapipe_ds.messages import show_value
from terapipe_ds.plan import count_granules
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.slice_program.least_sums import NO_LIMITS, Band, Bools, Floats, least_tails, trace

Ints: TypeAlias = npt.NDArray[np.int64]

MAX_GRANULES = 16384  # of one sequence: a table of 2 GiB, and a search needs several


@dataclasses.dataclass(frozen=True, eq=False)
class CostTable:
    """Hold the seconds of every slice of one part, [n, n]: row j = granules before, column k = its granules less 1.

    A slice that would pass the end of the sequence has inf. The last granule may be partial.
    """

    forward_s: Floats
    backward_s: Floats
    send_s: Floats | None = None  # None without links
    send_gradient_s: Floats | None = None  # of the message back to the part before
    sends: dict[tuple[object, ...], float] = dataclasses.field(default_factory=dict)  # (method, tokens) -> seconds

    @property
    def num_granules(self) -> int:
        return len(self.forward_s)

    @functools.cached_property
    def total_s(self) -> Floats:
        """Return the seconds that a slice adds to its stage: forward + backward, [n, n]."""
        return self.forward_s + self.backward_s

    @functools.cached_property
    def band(self) -> Band:
        """Return all slices for the program of equal stages; its limits are on times with the transfer."""
        send_s, gradient_s = (0.0 if sent is None else sent for sent in (self.send_s, self.send_gradient_s))
        return Band(self.total_s, self.forward_s + send_s, self.backward_s + gradient_s)


def tabulate(costs: Costs, sequence_length: int, granularity_tokens: int) -> CostTable:
    """Ask `costs` for every slice cut at multiples of `granularity_tokens`, each (tokens, prefix) pair once.

    Raises:
        PlannerError: an impossible granularity, `costs` that lack a method, or a time that is NaN, negative, infinite
            or no number; the message names the pair and the value.
    """
    granules = count_granules(sequence_length, granularity_tokens, PlannerError)
    if granules > MAX_GRANULES:
        least = -(-sequence_length // MAX_GRANULES)
        raise PlannerError(
            f"granularity_tokens = {granularity_tokens} cuts {sequence_length} tokens in {granules} granules, and at "
            f"most {MAX_GRANULES} can be searched: give at least {least}"
        )
    check_methods(costs)
    # slices that would pass the end stay infinite, so that no program takes them
    starts = np.arange(granules) * granularity_tokens
    row = np.arange(granules)
    valid: Bools = row[:, None] + row[None, :] < granules
    forward_s, backward_s = np.full(valid.shape, np.inf), np.full(valid.shape, np.inf)
    forward_s[valid] = _ask_all(costs, "forward_s", starts, sequence_length)
    backward_s[valid] = _ask_all(costs, "backward_s", starts, sequence_length)
    # links depend on tokens alone: one time per size, not per pair
    whole = [*starts[1:].tolist(), sequence_length]  # tokens of a slice of whole granules, by its column
    last = (sequence_length - starts).tolist()  # of a slice that ends with the sequence, by its row
    sizes = sorted({*whole, *last})

    @functools.cache  # messages that take the same both ways share a table
    def table_of(seconds: tuple[float, ...]) -> Floats:
        of_size = dict(zip(sizes, seconds, strict=True))
        table = np.where(valid, [of_size[tokens] for tokens in whole], np.inf)
        table[row, row[::-1]] = [of_size[tokens] for tokens in last]
        return table

    names = [name for name in ("send_s", "send_gradient_s") if method_of(costs, name)]
    asked = {name: tuple(ask(costs, name, sizes, None, PlannerError).tolist()) for name in names}
    tables = {name: table_of(seconds) for name, seconds in asked.items()}
    sends: dict[tuple[object, ...], float] = {
        (name, size): sent_s for name in names for size, sent_s in zip(sizes, asked[name], strict=True)
    }
    both_ways = tables.get("send_s"), tables.get("send_gradient_s", tables.get("send_s"))
    return CostTable(forward_s, backward_s, *both_ways, sends)


def _ask_all(costs: Costs, name: str, starts: Ints, length: int) -> Floats:
    """Return the seconds of every slice, row by row; vectorized costs get all in one call."""
    counts = range(len(starts), 0, -1)  # slices in each row
    tokens = [np.append(starts[1:count], length - starts[-count]) for count in counts]
    if getattr(costs, "vectorized", False):
        return ask(costs, name, np.concatenate(tokens), np.repeat(starts, counts), PlannerError)
    # two million calls are most of the time of a large plan
    rows = zip(tokens, starts.tolist(), strict=True)
    return np.concatenate([ask(costs, name, i.tolist(), [prefix] * len(i), PlannerError) for i, prefix in rows])


def check_methods(costs: Costs) -> None:
    """Raise PlannerError where a costs object lacks a method that it must have."""
    for name in ("forward_s", "backward_s"):
        if method_of(costs, name) is None:
            raise PlannerError(f"costs {show_value(costs)} have no {name}(tokens, prefix): add it")


def equal_time(table: CostTable, num_slices: int) -> tuple[int, ...]:
    """Return 1 to `num_granules` slice lengths in granules whose largest f + b is least, then the sum."""
    # first the least largest slice, then the least sum among cuts that keep to it
    every = Band(table.total_s, table.total_s, table.total_s)
    largest = least_tails(every, num_slices=num_slices, exactly=True, largest=True)[0, -1, 0]
    band = every.keep(every.total <= largest)
    sums = least_tails(band, num_slices=num_slices, exactly=True)[0]
    return trace(band, sums, NO_LIMITS[0])
