"""Refuse to build a DeepSpeed engine that would ignore an enabled `terapipe` section."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.messages import logger

_GUARD = "terapipe_guard"  # attribute of the function
READS_SECTION = "reads_terapipe_section"  # attribute of an engine class
_NOT_ENABLED = (
    'the section "terapipe" has no "enabled", so DeepSpeed\'s own engine trains whole sequences: set it to true, or '
    "to false to end this warning"
)


def is_enabled(raw: Any) -> bool:
    """Return whether a DeepSpeed config has an enabled `terapipe` section."""
    section = raw.get("terapipe") if isinstance(raw, Mapping) else None
    return isinstance(section, Mapping) and section.get("enabled") is True


def guarded(stock: Callable[..., None], always: bool) -> Callable[..., None]:
    """Return DeepSpeed's `DeepSpeedEngine.__init__` with a check of the config before it.

    `always` means that `terapipe_ds.register()` was called. Without it the check covers only models of this package.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        raw, model = getattr(given.get("config_class"), "_param_dict", None), given.get("model")
        if not hasattr(type(self), READS_SECTION) and isinstance(raw, dict):
            if always:
                TeraPipeConfig.from_deepspeed(raw)  # misspelt keys, and an enabled section that is not valid
                if raw.get("terapipe") and "enabled" not in raw["terapipe"] and os.environ.get("RANK", "0") == "0":
                    logger.warning(_NOT_ENABLED)
            if is_enabled(raw) and (always or _is_of_this_package(model)):
                raise TeraPipeConfigError(_unread(type(self), model, always))
        stock(self, *args, **kwargs)

    setattr(init, _GUARD, True)
    return init


def guard_unregistered() -> None:
    """Make engines built without `terapipe_ds.register()` refuse models of this package with an enabled section.

    The packages of models call it; a second call changes nothing.
    """
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine
    except Exception:  # the code that needs DeepSpeed reports the fault
        return
    if not hasattr(DeepSpeedEngine.__init__, _GUARD):
        DeepSpeedEngine.__init__ = guarded(DeepSpeedEngine.__init__, always=False)


def _is_of_this_package(model: Any) -> bool:
    """Check the specs of a `PipelineModule`: all ranks see the same ones, though each stage builds only some."""
    specs = getattr(model, "_layer_specs", None)
    of_model = model.modules() if specs is None and hasattr(model, "modules") else [model, *(specs or ())]
    kinds = [getattr(each, "typename", type(each)) for each in of_model]
    bases = (base for kind in kinds if isinstance(kind, type) for base in kind.__mro__)
    return any(str(base.__module__).startswith("terapipe_ds.") for base in bases)


def _unread(engine: type, model: Any, is_registered: bool) -> str:
    from deepspeed.pipe import PipelineModule

    what = f"terapipe.enabled: true, and {engine.__module__}.{engine.__qualname__} does not read the section"
    if not is_registered:
        why = (
            "terapipe_ds.register() was not called: call it before deepspeed.initialize(), use "
            "terapipe_ds.initialize(), or start with deepspeed --module terapipe_ds.run"
        )
    elif not isinstance(model, PipelineModule):
        why = f"the model is a {type(model).__qualname__} and not a PipelineModule: build it as one"
    else:
        why = (
            "the program builds an engine class of its own: let deepspeed.initialize() build the engine, or derive the "
            "class from terapipe_ds.runtime.engine.engine.TeraPipeEngine"
        )
    return f"{what}: sequences would not be cut. {why[0].upper()}{why[1:]}; or set terapipe.enabled to false"
