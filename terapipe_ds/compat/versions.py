"""Hold the tested versions of third-party packages, and detect which optional packages are installed.

The functions do all imports: planning works where none of these packages is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("terapipe_ds")

# Name of the distribution -> the version that all tests run with at every change; go back to it if another fails.
TESTED_VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.8", "megatron-core": "0.16.1", "transformers": "5.24.0"}
# Every version that passes all tests: torch at both ends and in between (`make test-versions`), the others exactly.
# transformers 4.57.6 passes the tests of the families without recurrent layers.
TESTED_RANGES = {
    "torch": ">=2.11,<2.16", "deepspeed": "==0.19.8", "megatron-core": "==0.16.1",
    "transformers": "==5.24.0 or ==5.23.0 or ==4.57.6"
}  # fmt: skip
# Version of transformers -> the names under which a model's forward takes its cache since then, the newest version
# first. The later names of an entry belong to models outside transformers. In 5.23 `cache` is something else (XLM).
CACHE_ARGUMENTS = {"5.24": ("cache", "past_key_values", "cache_params"), "4.57": ("past_key_values", "cache_params")}
TESTED_PYTHONS = ("3.11", "3.12", "3.13")
_OPTIONAL = ("megatron-core", "transformers")
# Optional package -> the module and the names in it that are used: of flash-attn those with the log-sum-exp. On PyPI
# apex is another package, without `FusedAdam`.
_USED = {
    "apex": ("apex.optimizers", "FusedAdam"),
    "flash_attn": (
        "flash_attn.flash_attn_interface",
        *(f"_flash_attn_{kind}{way}" for kind in ("", "varlen_") for way in ("forward", "backward")),
    ),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_func"),
    "flash_attn_4": ("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
    "transformer_engine": ("transformer_engine.pytorch", "DotProductAttention"),
}


class CompatError(RuntimeError):
    """Report that the installed third-party packages lack something that this package cannot work around."""


class MissingExtraError(CompatError, ImportError):
    """Report that an optional package is needed and not installed."""


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages in `TESTED_VERSIONS`, without importing any of them."""
    versions = {name: version_of(name) for name in TESTED_VERSIONS}
    return {name: version for name, version in versions.items() if version is not None}


def version_of(name: str) -> str | None:
    """Return the installed version of a distribution, without importing it; None where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def cache_arguments(transformers: str) -> tuple[str, ...]:
    """Return the names under which models take a cache in a version of transformers."""
    from packaging.version import Version

    release = Version(transformers).release
    return next((names for since, names in CACHE_ARGUMENTS.items() if release >= Version(since).release), ())


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with the defaults of its class; unchanged if transformers or the class is missing."""
    family = config.get("model_type")
    if not is_there("transformers"):
        return dict(config)
    from transformers import CONFIG_MAPPING

    return {**(CONFIG_MAPPING[family](**config).to_dict() if family in CONFIG_MAPPING else {}), **config}


def is_there(module: str) -> bool:
    """Return whether a top-level module exists, without importing it."""
    return importlib.util.find_spec(module) is not None


def check_versions(versions: Mapping[str, str] | None = None, python: str | None = None) -> list[str]:
    """Return one warning for each package, or Python itself, whose version is untested; none when all are tested.

    A local suffix ("2.13.0+cpu") makes no difference, an optional package may be absent, and a pre-release
    ("2.15.0rc1") counts as untested. None stands for the installed packages and the running Python.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    versions = installed_versions() if versions is None else versions
    python = f"{sys.version_info[0]}.{sys.version_info[1]}" if python is None else python
    lines = [
        f"{name} is not installed: pip install {name}=={tested}"
        for name, tested in TESTED_VERSIONS.items()
        if name not in versions and name not in _OPTIONAL
    ]
    untested = "{} {} is not a version that terapipe_ds is tested with ({}); if something fails, try {}"
    for name, version in versions.items():
        in_range = False
        with contextlib.suppress(InvalidVersion):
            ranges = map(SpecifierSet, TESTED_RANGES[name].split(" or "))
            in_range = any(each.contains(version, prereleases=False) for each in ranges)
        if not in_range:
            lines.append(untested.format(name, version, TESTED_RANGES[name], f"{name}=={TESTED_VERSIONS[name]}"))
    if python not in TESTED_PYTHONS:
        lines.append(untested.format("python", python, ", ".join(TESTED_PYTHONS), TESTED_PYTHONS[0]))
    return lines


@functools.cache
def warn_about_versions() -> None:
    """Log the findings of `check_versions` about this installation: one warning, once, on the first rank."""
    lines = check_versions()
    if lines and os.environ.get("RANK", "0") == "0":  # launchers set it long before ranks meet
        logger.warning("; ".join(lines))


def has_megatron() -> bool:
    """Return whether megatron-core is installed, without importing it; Megatron-LM's scripts alone do not count."""
    try:
        core = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return False
    folders = None if core is None else core.submodule_search_locations
    return any(Path(folder, "transformer").is_dir() for folder in folders or ())


def has(package: str) -> bool:
    """Return whether an optional package imports and has the names that are used; one that fails counts as absent."""
    module, *names = _USED[package]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    except Exception as error:  # compiled extensions fail in many ways
        logger.debug("%s is installed but cannot be imported: %s", module, error)
        return False
    return all(hasattr(loaded, name) for name in names)
