"""Give the rank processes of DeepSpeed's own tests our engine, and hold listed exceptions to what is known of them.

This is a pytest plugin. The tests start their ranks by `torch.multiprocessing`, under the name `mp` in
`unit/common.py`. The plugin puts a module there that prepares each process first; no file of the checkout is touched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  the installed one, before the tests' own configuration prefers the checkout's
import pytest
from torch import multiprocessing

from tests.upstream.exceptions import EXCEPTIONS
from tests.upstream.ranks import STOCK, prepare_rank, run_prepared


class PreparedProcesses:
    """Replace `torch.multiprocessing` by one whose processes are prepared ranks."""

    def Pool(self, processes: int) -> Any:
        return multiprocessing.Pool(processes, initializer=prepare_rank)

    def Process(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return multiprocessing.Process(target=run_prepared, args=(target, *args))

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


def pytest_collection_modifyitems() -> None:
    """Prepare ranks from here on, when all is imported, so that they find only the installed DeepSpeed."""
    import unit.common  # of the checkout

    unit.common.mp = PreparedProcesses()
    checkout = Path(unit.common.__file__).parents[2]
    sys.path[:] = [entry for entry in sys.path if entry == "" or Path(entry).resolve() != checkout.resolve()]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a list of exceptions that names tests which this checkout does not have: it is out of date."""
    gone = EXCEPTIONS.keys() - {item.nodeid for item in session.items}
    if gone and not session.config.option.keyword:
        raise pytest.UsageError(f"exceptions.py lists tests that this checkout does not have: {sorted(gone)}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Accept a listed test where it fails as listed; one that passes or fails otherwise is a failure."""
    outcome = yield
    report = outcome.get_result()
    known = None if STOCK in os.environ else EXCEPTIONS.get(item.nodeid)
    if known is None or report.when != "call" or report.skipped:
        return
    if report.passed:
        report.outcome, report.longrepr = "failed", f"listed as an exception ({known.reason}), but passes: unlist it"
    elif known.shows in str(report.longrepr):
        report.outcome, report.wasxfail = "skipped", known.reason
