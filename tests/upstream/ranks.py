"""Prepare each rank process of DeepSpeed's own tests before its test begins; `plugin` sends this to them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECTION = {"enabled": True, "schedule": "1f1b", "slices": 1}
STOCK = "TERAPIPE_UPSTREAM_STOCK"  # an environment variable; where it is set, the ranks run the stock engine
STAND_INS = Path(__file__).parent / "stand_ins"


def prepare_rank() -> None:
    """Make this process one whose `deepspeed.initialize` builds our engine for pipelines."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # DeepSpeed would compile this operator while the ranks meet, behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU without instructions for it; torch computes it on every CPU, only slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    _stand_in()
    if STOCK not in os.environ:
        _take_over()


def _stand_in() -> None:
    """Put in what the tests take for granted and what is not there, for any engine.

    That is torchvision, random states on `torch.cpu` as on other devices, and an attribute that DeepSpeed's engine no
    longer has though its tests compare it."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(STAND_INS))
    if not hasattr(torch.cpu, "get_rng_state"):
        torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
        torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    if "sparse_tensor_module_names" not in inspect.getsource(DeepSpeedEngine):
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def run_prepared(function: Callable[..., Any], *args: Any) -> Any:
    """Prepare this process, which was started for `function`, and run it."""
    prepare_rank()
    return function(*args)


def _take_over() -> None:
    """Put the section into each config of a pipeline, as a user would write it there."""
    import deepspeed

    import terapipe_ds

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
