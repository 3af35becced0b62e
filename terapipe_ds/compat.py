"""Third-party versions and optional packages: the only module that looks at them.

Everything is imported inside the functions, so that planning works where nothing of this is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from terapipe_ds.hooks import HOOKS, MEGATRON_HOOKS, Hook

logger = logging.getLogger("terapipe_ds")

# Name of the distribution -> the version that all tests run with at every change, and to go back to if another fails.
TESTED_VERSIONS: dict[str, str] = {"torch": "2.13.0", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}
# The oldest and the newest that all tests pass with as well (`make test-versions`), and any release between these two.
TESTED_RANGES: dict[str, tuple[str, str]] = {"torch": ("2.11", "2.15")}
TESTED_PYTHONS = ("3.11", "3.12")
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


def check_versions(found: Mapping[str, str] | None = None, python: str | None = None) -> list[str]:
    """One warning for each package whose version is none of the tested ones; none when all is as tested.

    Args:
        found: distribution -> version; None asks the installation. A local suffix ("2.13.0+cpu") makes no
            difference, and an optional package may be absent. Of a package in `TESTED_RANGES` all releases of a
            version count as that version ("2.15.1" as "2.15"), and one before its release ("2.15.0rc1") as none.
        python: "3.11"; None asks the interpreter.
    """
    versions = installed_versions() if found is None else found
    lines = []
    for name, tested in TESTED_VERSIONS.items():
        version = versions.get(name)
        if version is None and name not in _OPTIONAL:
            lines.append(f"{name} is not installed: pip install {name}=={tested}")
        elif version is not None and not _is_tested(name, version):
            known = f"{' to '.join(TESTED_RANGES[name])}" if name in TESTED_RANGES else tested
            lines.append(
                f"{name} {version} is not a version that terapipe_ds is tested with ({known}); if something fails, "
                f"try {name}=={tested}"
            )
    running = f"{sys.version_info[0]}.{sys.version_info[1]}" if python is None else python
    if running not in TESTED_PYTHONS:
        known = ", ".join(TESTED_PYTHONS)
        lines.append(
            f"python {running} is not a version that terapipe_ds is tested with ({known}); if something fails, try "
            f"{TESTED_PYTHONS[0]}"
        )
    return lines


def _is_tested(name: str, version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return False
    if name not in TESTED_RANGES:
        return found.public == TESTED_VERSIONS[name]
    oldest, newest = (Version(end).release for end in TESTED_RANGES[name])
    return oldest <= found.release[:2] <= newest and not found.is_prerelease


@functools.cache
def warn_about_versions() -> None:
    """Log what :func:`check_versions` says about this installation: one warning, once, on the first rank."""
    lines = check_versions()
    if lines and os.environ.get("RANK", "0") == "0":  # set by launchers, long before ranks meet
        logger.warning("; ".join(lines))


def require_hooks() -> None:
    """Make sure that the installed DeepSpeed and torch have everything that the engine builds on.

    Raises:
        CompatError: one is not installed or lacks a hook; the message has all that is missing and the version that
            has it.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
    except Exception as error:  # its dependencies fail in many ways
        tested = TESTED_VERSIONS["deepspeed"]
        raise CompatError(
            f"deepspeed cannot be imported ({_first_line(error)}); deepspeed {tested} has it: pip install "
            f"deepspeed=={tested}"
        ) from error
    missing = [hook for hook in HOOKS if not hook.is_there()]
    if not missing and not _looks_up_pipeline_engine(deepspeed.initialize):
        missing = [Hook("deepspeed", "initialize", "with a look-up of the global name PipelineEngine")]
    _refuse(missing)


def _refuse(missing: Sequence[Hook]) -> None:
    """One line for all that is missing, by distribution."""
    if not missing:
        return  # before versions are read from files, for each engine
    found = installed_versions()
    lines = []
    for name, tested in TESTED_VERSIONS.items():
        mine = [hook for hook in missing if _distribution(hook) == name]
        if mine:
            listed = "; ".join(f"{hook.module}.{hook.path} ({hook.use})" for hook in mine)
            lines.append(
                f"the installed {name} {found.get(name, 'of unknown version')} lacks what terapipe_ds builds on: "
                f"{listed}. {name} {tested} has it: pip install {name}=={tested}"
            )
    if lines:
        raise CompatError(". ".join(lines))


def _distribution(hook: Hook) -> str:
    package = hook.module.partition(".")[0]
    return {"torch": "torch", "megatron": "megatron-core"}.get(package, "deepspeed")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
        CompatError: it is, and lacks what its models build on.
    """
    if not has_megatron():
        raise MissingExtraError(
            f"{what} needs megatron-core, which is not installed: pip install 'terapipe_ds[megatron]' "
            f"(megatron-core=={TESTED_VERSIONS['megatron-core']})"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        _refuse([hook for hook in MEGATRON_HOOKS if not hook.is_there()])


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
