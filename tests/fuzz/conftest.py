"""After a full run: how many inputs of each format were accepted and refused."""

from typing import Any

from tests.fuzz.outcome import FULL, counts


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FULL and counts:
        terminalreporter.section("inputs")
        for name, number in sorted(counts.items()):
            terminalreporter.line(f"{number:7d}  {name}")
