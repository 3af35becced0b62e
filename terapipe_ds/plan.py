"""Describe the cuts of a sequence: the one owner of slice arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, Field

from terapipe_ds.files.strict_json import STRICT, JsonError, parse_as
from terapipe_ds.messages import check_count, show_value


class PlanError(ValueError):
    """Refuse a plan that cannot cut any sequence, or text that is not a plan."""


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """Hold the slices of one sequence: `lengths[i]` tokens in slice `i`, in the order of the sequence.

    It takes any iterable of integers and keeps a tuple of ints.

    Raises:
        PlanError: no slice at all, or a length that is not an integer >= 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = self.lengths
        if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
            raise PlanError(f"lengths = {show_value(lengths)}: give slice lengths in tokens, as (512, 384, 128)")
        checked = tuple(check_count(f"lengths[{i}]", value, PlanError) for i, value in enumerate(lengths))
        if not checked:
            raise PlanError("a plan has no slices: give at least one length, for example (2048,)")
        object.__setattr__(self, "lengths", checked)

    @classmethod
    def equal(cls, sequence_length: int, num_slices: int, granularity_tokens: int = 1) -> SlicePlan:
        """Return slices that are as equal as cuts at multiples of `granularity_tokens` allow, larger first.

        The last slice ends with the sequence, whose length need not be such a multiple.

        Raises:
            PlanError: an argument is not an integer >= 1, the granularity is larger than the sequence, or there are
                fewer granules than slices.
        """
        num_slices = check_count("num_slices", num_slices, PlanError)
        granules = count_granules(sequence_length, granularity_tokens, PlanError)
        if num_slices > granules:
            raise PlanError(
                f"{num_slices} slices cut at multiples of {granularity_tokens} tokens do not fit in a "
                f"sequence of {sequence_length} tokens: give at most {granules}, or a smaller granularity"
            )
        return cls.of_granules(split_evenly(granules, num_slices), sequence_length, granularity_tokens)

    @classmethod
    def of_granules(cls, granules: Iterable[int], sequence_length: int, granularity_tokens: int) -> SlicePlan:
        """Return the plan from the number of granules in each slice; the last slice ends with the sequence."""
        lengths = [count * granularity_tokens for count in granules]
        lengths[-1] -= sum(lengths) - sequence_length  # the last granule may be partial
        return cls(tuple(lengths))

    def joined(self, fewest_tokens: int) -> SlicePlan:
        """Return the plan with each slice of fewer tokens joined to the next one, and the last to the one before."""
        lengths: list[int] = []
        for length in self.lengths:
            if lengths and lengths[-1] < fewest_tokens:
                lengths[-1] += length
            else:
                lengths.append(length)
        if len(lengths) > 1 and lengths[-1] < fewest_tokens:
            lengths[-2:] = [sum(lengths[-2:])]
        return SlicePlan(tuple(lengths))

    def divided(self, ranks: int) -> SlicePlan:
        """Return the shares of `ranks` in each slice as a plan; `ranks` divides all lengths."""
        return self if ranks == 1 else SlicePlan(tuple(n // ranks for n in self.lengths for _ in range(ranks)))

    @property
    def num_slices(self) -> int:
        """Return the number of slices; at least 1."""
        return len(self.lengths)

    @cached_property  # each action asks for it, so that a sum each time would take time quadratic in the slices
    def sequence_length(self) -> int:
        """Return the tokens in the whole sequence."""
        return sum(self.lengths)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of the sequence that each slice has."""
        return tuple(length / self.sequence_length for length in self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first token of each slice, which is also the number of tokens before it (its prefix)."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))

    def span(self, slice_id: int) -> tuple[int, int]:
        """Return `(start, stop)` of a slice, in tokens. Raises IndexError where there is no such slice."""
        if not 0 <= slice_id < self.num_slices:
            raise IndexError(f"slice_id {slice_id} of a plan of {self.num_slices} slices")
        start = self.starts[slice_id]
        return start, start + self.lengths[slice_id]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return `(start, stop)` of every slice; they cover `[0, sequence_length)` without gap or overlap."""
        return tuple((start, start + length) for start, length in zip(self.starts, self.lengths, strict=True))

    def to_json(self) -> str:
        """Return one line of JSON that `from_json` reads back to an equal plan."""
        return json.dumps({"version": 1, "lengths": list(self.lengths)})

    @classmethod
    def from_json(cls, text: str | bytes) -> SlicePlan:
        """Read the plan that `to_json` wrote.

        Raises:
            PlanError: `text` is anything else.
        """
        try:
            return cls(parse_as(_File, text).lengths)
        except (JsonError, TypeError) as error:
            given = cls((512, 512)).to_json()
            raise PlanError(f"not a slice plan: {show_value(text)}: {error}; give one as {given}") from None


class _File(BaseModel):
    model_config = STRICT

    version: Annotated[int, Field(ge=1, le=1)]  # `Literal[1]` would take true
    lengths: tuple[int, ...]


JOINED_ROWS = 4096
"""Rows of one product for weight gradients: from this number on, a GPU adds to fp32 sums in the time of the product."""


def weight_groups(lengths: Sequence[int], rows: float) -> list[list[int]]:
    """Return the slices of a micro-batch whose weight gradients are one product each, in the order of backwards.

    A group ends once it has `JOINED_ROWS` rows, so that the tensors that wait for a product do not grow with the
    sequence. A slice of `lengths[i]` tokens has `rows` times as many rows.
    """
    groups: list[list[int]] = []
    joined = float(JOINED_ROWS)
    for slice_id in reversed(range(len(lengths))):
        if joined >= JOINED_ROWS:
            groups.append([])
            joined = 0.0
        groups[-1].append(slice_id)
        joined += rows * lengths[slice_id]
    return groups


def split_evenly(total: int, count: int) -> tuple[int, ...]:
    """Return `count` numbers that add up to `total`, as equal as can be, larger first."""
    fewest, larger = divmod(total, count)
    return tuple(fewest + (i < larger) for i in range(count))


_MOST_GRANULES = 256  # finer cuts gain less than 0.3 % of a step, and the search for them takes minutes


def coarsened(granularity_tokens: int, sequence_length: int) -> int:
    """Return a default granularity, doubled until a sequence has at most 256 granules; at most the sequence."""
    while granularity_tokens * _MOST_GRANULES < sequence_length:
        granularity_tokens *= 2
    return min(granularity_tokens, sequence_length)


def count_granules(sequence_length: int, granularity_tokens: int, error: type[ValueError] = PlanError) -> int:
    """Return the number of granules in a sequence, the last perhaps partial; raise `error` where it has none."""
    sequence_length = check_count("sequence_length", sequence_length, error)
    granularity_tokens = check_count("granularity_tokens", granularity_tokens, error)
    if granularity_tokens > sequence_length:
        raise error(
            f"granularity_tokens = {granularity_tokens} is larger than the sequence of {sequence_length} tokens: "
            f"give at most {sequence_length}"
        )
    return -(-sequence_length // granularity_tokens)
