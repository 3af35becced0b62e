"""Give the rank processes of DeepSpeed's own tests our engine.

This is a pytest plugin. The tests start their ranks by `torch.multiprocessing`, under the name `mp` in
`unit/common.py`. The plugin puts a module there that prepares each process first; no file of the checkout is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  the installed one, before the tests' own configuration prefers the checkout's
from torch import multiprocessing

from tests.upstream.ranks import prepare_rank, run_prepared


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
