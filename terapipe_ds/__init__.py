"""Train with token-level pipeline parallelism (TeraPipe, arXiv 2102.07988) on DeepSpeed.

Each public name is imported at its first use (PEP 562). ``import terapipe_ds`` loads neither torch nor deepspeed,
so planning and the command line work on any machine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terapipe_ds import planner as planner
    from terapipe_ds import schedule as schedule
    from terapipe_ds.config import TeraPipeConfig as TeraPipeConfig
    from terapipe_ds.config import TeraPipeConfigError as TeraPipeConfigError
    from terapipe_ds.models.hugging_face import from_config as from_config
    from terapipe_ds.models.hugging_face import from_pretrained as from_pretrained
    from terapipe_ds.models.hugging_face import save_pretrained as save_pretrained
    from terapipe_ds.models.hugging_face import skeleton as skeleton
    from terapipe_ds.plan import SlicePlan as SlicePlan
    from terapipe_ds.planner import plan_slices as plan_slices
    from terapipe_ds.planner.strategy import Cluster as Cluster
    from terapipe_ds.planner.strategy import LayerChain as LayerChain
    from terapipe_ds.planner.strategy import plan_strategy as plan_strategy
    from terapipe_ds.runtime.layout.topology import topology_of as topology_of
    from terapipe_ds.runtime.register import initialize as initialize
    from terapipe_ds.runtime.register import lay_out as lay_out
    from terapipe_ds.runtime.register import register as register
    from terapipe_ds.runtime.register import unregister as unregister
    from terapipe_ds.simulator import simulate as simulate
    from terapipe_ds.strategy import Strategy as Strategy
    from terapipe_ds.timeline import Timeline as Timeline
    from terapipe_ds.version import __version__ as __version__

# Public name -> the module that has it.
_EXPORTS = {
    "Cluster": "terapipe_ds.planner.strategy",
    "LayerChain": "terapipe_ds.planner.strategy",
    "SlicePlan": "terapipe_ds.plan",
    "Strategy": "terapipe_ds.strategy",
    "TeraPipeConfig": "terapipe_ds.config",
    "TeraPipeConfigError": "terapipe_ds.config",
    "Timeline": "terapipe_ds.timeline",
    "from_config": "terapipe_ds.models.hugging_face",
    "from_pretrained": "terapipe_ds.models.hugging_face",
    "initialize": "terapipe_ds.runtime.register",
    "lay_out": "terapipe_ds.runtime.register",
    "plan_slices": "terapipe_ds.planner",
    "plan_strategy": "terapipe_ds.planner.strategy",
    "register": "terapipe_ds.runtime.register",
    "save_pretrained": "terapipe_ds.models.hugging_face",
    "skeleton": "terapipe_ds.models.hugging_face",
    "simulate": "terapipe_ds.simulator",
    "topology_of": "terapipe_ds.runtime.layout.topology",
    "unregister": "terapipe_ds.runtime.register",
    "__version__": "terapipe_ds.version",
}
_SUBPACKAGES = ("planner", "schedule")

__all__ = [*_EXPORTS, *_SUBPACKAGES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
