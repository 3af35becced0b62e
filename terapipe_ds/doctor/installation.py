"""Check Python and the packages: tested versions, extras, and other optional packages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from terapipe_ds.compat import require_hooks, versions
from terapipe_ds.doctor import Check, Line, import_problem

# Extra -> its purpose, and its packages.
EXTRAS = {
    "hf": ("Hugging Face models", ("transformers", "safetensors", "peft")),
    "megatron": ("Megatron's layers", ("megatron-core",)),
    "plot": ("pictures and reports", ("matplotlib", "jinja2", "plotly")),
}


def python() -> Iterator[Line]:
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    tested = versions.TESTED_PYTHONS
    if running in tested:
        yield Line("ok", "python", f"{sys.version.split()[0]}, {sys.executable}")
    else:
        yield Line("warning", "python", f"{running} is not tested ({', '.join(tested)})", f"use Python {tested[0]}")


def required() -> Iterator[Line]:
    """Report whether torch and DeepSpeed are installed, can be imported, and have tested versions."""
    wrong = versions.check_versions(python=versions.TESTED_PYTHONS[0])
    is_usable = True  # so far: DeepSpeed imports torch
    for name in ("torch", "deepspeed"):
        installed, tested = versions.version_of(name), versions.TESTED_VERSIONS[name]
        problem = import_problem(name) if installed is not None and is_usable else ""
        is_usable = is_usable and installed is not None and not problem
        if installed is None:
            yield Line("fail", name, "not installed", f"pip install {name}=={tested}")
        elif problem:
            fix = f"python -c 'import {name}' shows the whole error; a tested version: pip install {name}=={tested}"
            yield Line("fail", name, f"{installed} cannot be imported: {problem}", fix)
        elif any(line.startswith(f"{name} ") for line in wrong):
            untested = f"{installed} is not tested ({versions.TESTED_RANGES[name]})"
            yield Line("warning", name, untested, f"if something fails: pip install {name}=={tested}")
        else:
            yield Line("ok", name, installed)


def hooks() -> Iterator[Line]:
    """Report whether DeepSpeed has the undocumented names that the engine overrides."""
    try:
        require_hooks()
    except versions.CompatError as error:
        text, _, fix = str(error).rpartition(": ")
        yield Line("fail", "overrides", text, fix)
    else:
        yield Line("ok", "overrides", "the installed DeepSpeed has all that the engine overrides")


def extras() -> Iterator[Line]:
    wrong = versions.check_versions(python=versions.TESTED_PYTHONS[0])
    for extra, (what, packages) in EXTRAS.items():
        found = {name: versions.version_of(name) for name in packages}
        there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
        missing = [name for name, version in found.items() if version is None]
        tested = versions.TESTED_VERSIONS
        fix = f"pip install {' '.join(f'{name}=={tested[name]}' if name in tested else name for name in packages)}"
        untested = [line for line in wrong if line.split()[0] in found and found[line.split()[0]]]
        if missing:
            text = f"{what}: not installed: {', '.join(missing)}" + (f"; {there}" if there else "")
            yield Line("note", extra, text, fix)
        elif untested:
            yield Line("warning", extra, f"{what}: {'; '.join(untested)}", fix)
        else:
            yield Line("ok", extra, f"{what}: {there}")


def apex() -> Iterator[Line]:
    """Report whether NVIDIA's apex is installed, or the other package of that name."""
    if versions.has("apex"):
        yield Line("ok", "apex", "NVIDIA's, with FusedAdam")
    elif versions.is_there("apex"):
        yield Line("warning", "apex", "the package of this name here is not NVIDIA's", "pip uninstall apex")
    else:
        yield Line("note", "apex", "not installed: DeepSpeed's and torch's optimizers run")


def optional(name: str, packages: Iterable[str], without: str) -> Check:
    """Return the check of a package that the engine uses where it is installed."""
    module = name.replace("-", "_")

    def check() -> Iterator[Line]:
        if any(map(versions.has, packages)):
            yield Line("ok", name, versions.version_of(name) or "installed")
        elif versions.is_there(module):
            broken = f"installed, but it does not import, or lacks functions that are used: {without}"
            yield Line("warning", name, broken, f"python -c 'import {module}' says why")
        else:
            yield Line("note", name, f"not installed: {without}")

    return Check(name, check, ("torch",))


_WITHOUT_TE = "Megatron's layers run with torch's operations"
CHECKS = (
    Check("python", python),
    Check("packages", required),
    Check("overrides", hooks, ("torch", "deepspeed")),
    Check("extras", extras),
    Check("apex", apex),
    optional("flash-attn", ("flash_attn", "flash_attn_3", "flash_attn_4"), "torch's own kernels compute attention"),
    optional("transformer-engine", ("transformer_engine",), _WITHOUT_TE),
)
