"""Where to cut a sequence: the one owner of slice arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Iterable
from typing import Any

JSON_VERSION = 1


class PlanError(ValueError):
    """A plan that no sequence can be cut by, or text that is not a plan."""


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """The slices of one sequence: ``lengths[i]`` tokens in slice ``i``, in the order of the sequence.

    Any iterable of integers is taken and kept as a tuple of ints.

    Raises:
        PlanError: no slice at all, or a length that is not an integer >= 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = self.lengths
        if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
            raise PlanError(f"lengths = {show_value(lengths)}: give slice lengths in tokens, as (512, 384, 128)")
        checked = tuple(_length(f"lengths[{i}]", value) for i, value in enumerate(lengths))
        if not checked:
            raise PlanError("a plan has no slices: give at least one length, for example (2048,)")
        object.__setattr__(self, "lengths", checked)

    @classmethod
    def equal(cls, sequence_length: int, num_slices: int, granularity_tokens: int = 1) -> SlicePlan:
        """``num_slices`` slices, as equal as cuts at multiples of ``granularity_tokens`` allow, larger first.

        The last slice ends with the sequence, which need not be such a multiple.

        Raises:
            PlanError: an argument is not an integer >= 1, the granularity is larger than the sequence, or
                more slices are asked for than there are granules.
        """
        sequence_length = _length("sequence_length", sequence_length)
        num_slices = _length("num_slices", num_slices)
        granularity_tokens = _length("granularity_tokens", granularity_tokens)
        if granularity_tokens > sequence_length:
            raise PlanError(
                f"granularity_tokens = {granularity_tokens} is larger than the sequence of {sequence_length} "
                f"tokens: give at most {sequence_length}"
            )
        granules = -(-sequence_length // granularity_tokens)
        if num_slices > granules:
            raise PlanError(
                f"{num_slices} slices cut at multiples of {granularity_tokens} tokens do not fit in a "
                f"sequence of {sequence_length} tokens: give at most {granules}, or a smaller granularity"
            )
        fewest, larger = divmod(granules, num_slices)
        lengths = [(fewest + (i < larger)) * granularity_tokens for i in range(num_slices)]
        lengths[-1] -= granules * granularity_tokens - sequence_length  # the last may be partial
        return cls(tuple(lengths))

    @property
    def num_slices(self) -> int:
        """How many slices there are; at least 1."""
        return len(self.lengths)

    @property
    def sequence_length(self) -> int:
        """Tokens in the whole sequence."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each slice, which is also the number of tokens before it (its prefix)."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))

    def span(self, slice_id: int) -> tuple[int, int]:
        """``(start, stop)`` of a slice, in tokens. Raises IndexError where there is no such slice."""
        if not 0 <= slice_id < self.num_slices:
            raise IndexError(f"slice_id {slice_id} of a plan of {self.num_slices} slices")
        start = sum(self.lengths[:slice_id])
        return start, start + self.lengths[slice_id]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of every slice; they cover ``[0, sequence_length)`` without gap or overlap."""
        return tuple((start, start + length) for start, length in zip(self.starts, self.lengths, strict=True))

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back to an equal plan."""
        return json.dumps({"version": JSON_VERSION, "lengths": list(self.lengths)})

    @classmethod
    def from_json(cls, text: str | bytes) -> SlicePlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            PlanError: whatever else ``text`` is.
        """
        document = _parse_json(text)
        if not isinstance(document, dict) or set(document) != {"version", "lengths"}:
            raise PlanError(f"not a slice plan: {show_value(text)}; expected {cls((512, 512)).to_json()}")
        version, lengths = document["version"], document["lengths"]
        if type(version) is not int or version != JSON_VERSION:
            raise PlanError(f"slice plan of version {show_value(version)}: give one of version {JSON_VERSION}")
        if not isinstance(lengths, list):
            raise PlanError(f"lengths = {show_value(lengths)}: give a list of slice lengths in tokens")
        return cls(tuple(lengths))


def _length(what: str, value: Any) -> int:
    """``value`` as an int >= 1; numpy's integers are welcome, bool and float are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise PlanError(f"{what} = {show_value(value)}: give an integer >= 1")
    return number


def _parse_json(text: Any) -> Any:
    if not isinstance(text, str | bytes | bytearray):
        raise PlanError(f"not a slice plan: {show_value(text)}; give the text that to_json() wrote")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, thousands of digits, endless nesting
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise PlanError(
            f"not a slice plan: {show_value(text)} is not JSON ({reason}); give what to_json() wrote"
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise PlanError(f"not a slice plan: a key stands twice in {show_value(pairs)}; give every key once")
    return document


def show_value(value: Any, limit: int = 80) -> str:
    """``repr`` for messages: cut short, and safe for what has none (an int of thousands of digits)."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
