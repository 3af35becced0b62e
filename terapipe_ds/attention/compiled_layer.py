"""Say which compiled layer runs, and number its calls of attention.

A call is named by the layer that runs and by its number in that run. torch's compiler reads the number while it traces,
so that each call has its own in the graph: equal calls are not merged, and a call keeps its name wherever it is moved.
"""

from __future__ import annotations


class _Running:
    """The compiled layer that runs now, and the calls of attention that were counted in this run."""

    name: str | None = None
    calls: int = 0


running = _Running()


def next_call() -> int:
    """Return the number of the next call of attention in this run of the layer."""
    number = running.calls
    running.calls = number + 1
    return number


class running_layer:
    """Name the compiled layer that runs for the body, and count its calls from 0."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = running.name, running.calls
        running.name, running.calls = self._name, 0

    def __exit__(self, *error: object) -> None:
        running.name, running.calls = self._before
