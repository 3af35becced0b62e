"""Third-party versions and optional packages: the only module that looks at them.

Everything is imported inside the functions, so that planning works where nothing of this is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("terapipe_ds")

# Name of the distribution -> the version that the tests ran with.
TESTED_VERSIONS: dict[str, str] = {"torch": "2.13.0", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}
_OPTIONAL = ("megatron-core",)


class CompatError(RuntimeError):
    """The installed third-party packages lack something that cannot be worked around."""


def installed_versions() -> dict[str, str]:
    """The installed versions of what :data:`TESTED_VERSIONS` lists, read without importing anything of it."""
    found = {}
    for name in TESTED_VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(found: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each package whose version is not the tested one; none when all is as tested.

    Args:
        found: distribution -> version; None asks the installation. A local suffix ("2.13.0+cpu") makes no
            difference, and an optional package may be absent.
    """
    versions = installed_versions() if found is None else found
    warnings = []
    for name, tested in TESTED_VERSIONS.items():
        version = versions.get(name)
        if version is None and name not in _OPTIONAL:
            warnings.append(f"{name} is not installed: pip install {name}=={tested}")
        elif version is not None and _public(version) != tested:
            warnings.append(
                f"{name} {version} is not the version that terapipe_ds is tested with; if something fails, "
                f"try {name}=={tested}"
            )
    return warnings


@functools.cache
def warn_about_versions() -> None:
    """Log what :func:`check_versions` says about this installation, once per process."""
    for warning in check_versions():
        logger.warning(warning)


def _public(version: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).public
    except InvalidVersion:
        return version


@dataclasses.dataclass(frozen=True)
class Hook:
    """A name in DeepSpeed that the engine overrides or calls."""

    module: str
    path: str  # dotted, inside the module
    use: str

    def is_there(self) -> bool:
        """True when the name can be looked up."""
        try:
            value: Any = importlib.import_module(self.module)
        except ImportError:
            return False
        for name in self.path.split("."):
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True


_PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine"
_ENGINE = "deepspeed.runtime.engine"
HOOKS: tuple[Hook, ...] = (
    Hook("deepspeed", "PipelineEngine", "what deepspeed.initialize() builds, rebound by register()"),
    Hook("deepspeed", "DualPipeVEngine", "the name that deepspeed.initialize() looks up for a DualPipeVModule"),
    Hook("deepspeed", "initialize", "builds the engine"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._train_schedule", "gives the schedule of a training batch"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._inference_schedule", "gives the schedule of an evaluation batch"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._exec_schedule", "runs the actions"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._INSTRUCTION_MAP", "says which method runs an action"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._exec_reduce_tied_grads", "sums tied gradients over stages"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._exec_reduce_grads", "averages gradients over replicas"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._exec_optimizer_step", "steps the optimizer"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._aggregate_total_loss", "hands the loss to all stages"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._reduce_outputs", "averages the outputs of an evaluation"),
    Hook(_PIPELINE_ENGINE, "PipelineEngine._next_batch", "draws a micro-batch"),
    Hook(_ENGINE, "DeepSpeedEngine.forward", "runs the layers of a stage"),
    Hook(_ENGINE, "DeepSpeedEngine.backward", "scales the loss and runs its backward pass"),
    Hook(_ENGINE, "DeepSpeedEngine._backward_prologue", "prepares the optimizer for a backward pass"),
    Hook(_ENGINE, "DeepSpeedEngine._backward_epilogue", "hands gradients to the optimizer"),
    Hook(_ENGINE, "DeepSpeedEngine._take_model_step", "clips, steps and advances the learning rate"),
    Hook(_ENGINE, "DeepSpeedEngine._scale_loss_by_gas", "averages losses over micro-batches"),
)


def require_hooks() -> None:
    """Make sure that the installed DeepSpeed has everything that the engine builds on.

    Raises:
        CompatError: it is not installed or lacks a hook; the message has all that is missing and the version
            that has it.
    """
    tested = TESTED_VERSIONS["deepspeed"]
    fix = f"deepspeed {tested} has it: pip install deepspeed=={tested}"
    found = installed_versions().get("deepspeed", "of unknown version")
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise CompatError(f"deepspeed cannot be imported ({error}); {fix}") from error
    missing = [f"{hook.module}.{hook.path} ({hook.use})" for hook in HOOKS if not hook.is_there()]
    if not missing and not _looks_up_pipeline_engine(deepspeed.initialize):
        missing = ["the look-up of the global name PipelineEngine in deepspeed.initialize()"]
    if missing:
        listed = "; ".join(missing)
        raise CompatError(f"the installed deepspeed {found} lacks what terapipe_ds builds on: {listed}. {fix}")


def _looks_up_pipeline_engine(initialize: Any) -> bool:
    code = getattr(inspect.unwrap(initialize), "__code__", None)
    return code is None or "PipelineEngine" in code.co_names


def has_apex() -> bool:
    """NVIDIA apex with its optimizers.

    A package on PyPI has the same name and nothing else in common with it, so that neither finding nor
    importing ``apex`` says anything; ``apex.optimizers.FusedAdam`` does.
    """
    return _has("apex.optimizers", "FusedAdam")


def has_flash_attn() -> bool:
    """flash-attn with the two functions that give and take the log-sum-exp."""
    return _has("flash_attn.flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward")


def has_transformer_engine() -> bool:
    """NVIDIA Transformer Engine for torch."""
    return _has("transformer_engine.pytorch", "DotProductAttention")


def has_megatron() -> bool:
    """megatron-core (extra ``megatron``); a ``megatron`` package without ``megatron.core`` does not count."""
    return _can_be_found("megatron.core.parallel_state") and _can_be_found("megatron.core.transformer")


class MissingExtraError(CompatError, ImportError):
    """An optional package that was asked for is not installed."""


def require_megatron(what: str) -> None:
    """Make sure that megatron-core is installed.

    Args:
        what: the name of what needs it, for the message.

    Raises:
        MissingExtraError: it is not; the message says which extra to install.
    """
    if not has_megatron():
        raise MissingExtraError(
            f"{what} needs megatron-core, which is not installed: pip install 'terapipe_ds[megatron]' "
            f"(megatron-core=={TESTED_VERSIONS['megatron-core']})"
        )


def is_installed(module: str) -> bool:
    """True where the top-level ``module`` could be imported; nothing is."""
    return _can_be_found(module)


def _has(module: str, *names: str) -> bool:
    """True when ``module`` imports and has ``names``; a package that fails on import counts as absent."""
    if not _can_be_found(module):
        return False
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # compiled extensions fail in many ways
        logger.debug("%s is installed but cannot be imported: %s", module, error)
        return False
    return all(hasattr(loaded, name) for name in names)


def _can_be_found(module: str) -> bool:
    """True when ``module`` is loaded or could be; unlike ``find_spec`` this runs none of its parents."""
    if module in sys.modules:
        return sys.modules[module] is not None  # None stands for "not to be imported"
    try:
        return _find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    parent, _, _ = module.rpartition(".")
    if not parent:
        return importlib.util.find_spec(module)
    loaded = sys.modules.get(parent)
    if loaded is not None:
        locations = getattr(loaded, "__path__", None)
    else:
        spec = _find_spec(parent)
        locations = None if spec is None else spec.submodule_search_locations
    return None if locations is None else importlib.machinery.PathFinder.find_spec(module, list(locations))
