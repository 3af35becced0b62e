"""Give the rank processes of DeepSpeed's own tests our engine, as a pytest plugin; no file of the checkout is touched.

The tests start their ranks by `torch.multiprocessing`, under the name `mp` in `unit/common.py`. The plugin puts a
module there that prepares each process first.
"""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # the installed one, before the tests' own configuration prefers the checkout's
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import multiprocessing

import terapipe_ds
from tests.upstream.deepspeed_tests import STOCK

SECTION = {"enabled": True, "schedule": "1f1b", "slices": 1}
_REFUSED = tuple(f"TestPipeDynamicShape::test_pipe_base[topo_config{number}]" for number in (1, 2))


def prepare_rank() -> None:
    """Make this process one whose `deepspeed.initialize` builds our engine for pipelines.

    For any engine, put in what the tests take for granted and what is not there: torchvision, random states on
    `torch.cpu` as on other devices, and an attribute that DeepSpeed's engine no longer has though its tests compare it.
    """
    torch.set_num_threads(1)
    # DeepSpeed would compile this operator while the ranks meet, behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU without instructions for it; torch computes it on every CPU, only slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(Path(__file__).parent / "stand_ins"))
    if not hasattr(torch.cpu, "get_rng_state"):
        torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
        torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    if "sparse_tensor_module_names" not in inspect.getsource(DeepSpeedEngine):
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()
    if STOCK not in os.environ:
        _take_over()


def _take_over() -> None:
    """Put the section into each config of a pipeline, as a user would write it there."""
    terapipe_ds.register()
    stock = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if isinstance(kwargs.get("model"), deepspeed.PipelineModule):
            assert isinstance(config, dict), f"the config of a pipeline is {config!r}: teach `ranks` to add to it"
            kwargs["config"] = {**config, "terapipe": SECTION}
        built = stock(*args, **kwargs)
        assert ("terapipe" in (kwargs.get("config") or {})) == (type(built[0]).__name__ == "TeraPipeEngine")
        return built

    deepspeed.initialize = initialize


def run_prepared(function: Callable[..., Any], *args: Any) -> Any:
    """Prepare this process, which was started for `function`, and run it."""
    prepare_rank()
    return function(*args)


class PreparedProcesses:
    """Replace `torch.multiprocessing` by one whose processes are prepared ranks."""

    def Pool(self, processes: int) -> Any:
        return multiprocessing.Pool(processes, initializer=prepare_rank)

    def Process(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return multiprocessing.Process(target=run_prepared, args=(target, *args))

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Prepare ranks from here on, when all is imported, so that they find only the installed DeepSpeed."""
    for item in items if STOCK not in os.environ else ():
        if item.nodeid.endswith(_REFUSED):
            item.add_marker(
                pytest.mark.xfail(reason="each rank draws other labels, which this engine refuses", strict=True)
            )
    import unit.common  # of the checkout

    unit.common.mp = PreparedProcesses()
    checkout = Path(unit.common.__file__).parents[2]
    sys.path[:] = [entry for entry in sys.path if entry == "" or Path(entry).resolve() != checkout.resolve()]
