"""Versions, overridden names and optional packages, with stand-ins for what is not installed."""

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from terapipe_ds import compat
from terapipe_ds.compat import hooks, versions
from terapipe_ds.runtime import register
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.layout.parted_module import PartedModule
from tests.processes import run_python

TESTED = dict(versions.TESTED_VERSIONS)
ROOT = Path(register.__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in front of `sys.path`; what is imported from it is forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", "flash_attn", "transformer_engine", "megatron"):
            del sys.modules[name]


def write(site: Path, module: str, text: str = "") -> None:
    path = site.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- versions


@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.12.1", "2.13.1", "2.15.0", "2.15.7+cpu"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_tested_versions_give_no_warning(torch: str, python: str) -> None:
    assert versions.check_versions({**TESTED, "deepspeed": "0.19.8+1a2b3c", "torch": torch}, python) == []


@pytest.mark.parametrize(("name", "version", "tested"), [
    *(("deepspeed", version, "==0.19.8") for version in ("0.19.7", "0.19.9", "0.20.0")),
    *(("torch", version, ">=2.11,<2.16") for version in ("2.13.0rc1", "2.15.0.dev20260901", "2.10.1", "2.16.0")),
    ("torch", "not a version", ">=2.11,<2.16"),
    ("megatron-core", "0.17.0", "==0.16.1"),
])  # fmt: skip
def test_another_version_gives_one_warning_with_the_tested_one(name: str, version: str, tested: str) -> None:
    (warning,) = versions.check_versions({**TESTED, name: version}, "3.11")
    assert warning == (
        f"{name} {version} is not a version that terapipe_ds is tested with ({tested}); if something fails, try "
        f"{name}=={TESTED[name]}"
    )


def test_several_versions_of_a_package() -> None:
    assert versions.check_versions({**TESTED, "transformers": "4.57.6"}, "3.11") == []
    for version in ("4.57.5", "5.0.0", "5.25.0"):
        (warning,) = versions.check_versions({**TESTED, "transformers": version}, "3.11")
        assert "tested with (==5.24.0 or ==5.23.0 or ==4.57.6)" in warning


def test_another_python_and_missing_packages() -> None:
    for version in ("3.10", "3.14"):
        (warning,) = versions.check_versions(TESTED, version)
        assert warning.startswith(
            f"python {version} is not a version that terapipe_ds is tested with (3.11, 3.12, 3.13)"
        )
    missing = ["deepspeed is not installed: pip install deepspeed==0.19.8"]
    assert versions.check_versions({"torch": "2.13.0"}, "3.11") == missing
    assert len(versions.check_versions({}, "3.11")) == 2  # megatron-core is optional


def test_documents_and_packaging_have_the_tested_versions() -> None:
    readme, setup, makefile = ((ROOT / name).read_text() for name in ("README.md", "setup.py", "Makefile"))
    ends = dict(re.findall(r"^((?:TORCH|PYTHON)_(?:OLDEST|NEWEST)) \?= (?:python)?(\d+\.\d+)", makefile, re.MULTILINE))
    torch = f"{ends['TORCH_OLDEST']} to {ends['TORCH_NEWEST']}; at every change {TESTED['torch']}"
    python = f"{', '.join(versions.TESTED_PYTHONS)}; at every change {versions.TESTED_PYTHONS[0]}"
    transformers = f"{TESTED['transformers']}; 4.57.6 for families without recurrent layers"
    for name, version in {**TESTED, "torch": torch, "transformers": transformers, "Python": python}.items():
        assert f"| {name} | {version} |" in readme
    assert (ends["PYTHON_OLDEST"], ends["PYTHON_NEWEST"]) == (versions.TESTED_PYTHONS[0], versions.TESTED_PYTHONS[-1])
    for end in ("TORCH_OLDEST", "TORCH_NEWEST"):
        assert versions.check_versions({**TESTED, "torch": f"{ends[end]}.0"}, "3.11") == []
    oldest, newest = (int(ends[end].split(".")[1]) for end in ("TORCH_OLDEST", "TORCH_NEWEST"))
    assert versions.TESTED_RANGES["torch"] == f">=2.{oldest},<2.{newest + 1}"
    assert f"TORCH := {TESTED['torch']}\n" in makefile
    assert f'"torch>=2.{oldest}"' in setup
    assert f'"deepspeed>={TESTED["deepspeed"]},<0.20"' in setup
    assert f'python_requires=">={versions.TESTED_PYTHONS[0]}"' in setup
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)) == versions.TESTED_PYTHONS


def test_warnings_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "check_versions", lambda: ["torch 1.0 is old", "deepspeed 1.0 is too"])
    monkeypatch.delenv("RANK", raising=False)
    compat.warn_about_versions.cache_clear()
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        compat.warn_about_versions()
        compat.warn_about_versions()
    compat.warn_about_versions.cache_clear()
    assert [record.message for record in caplog.records] == ["torch 1.0 is old; deepspeed 1.0 is too"]
    caplog.clear()
    monkeypatch.setenv("RANK", "3")
    compat.warn_about_versions()
    compat.warn_about_versions.cache_clear()
    assert caplog.records == [], "the first rank says it for all"


# --- names that are overridden


@pytest.fixture
def unregistered() -> Iterator[None]:
    register.unregister()
    yield
    register.unregister()


@pytest.mark.parametrize(("ours", "stock", "owner"), [
    (TeraPipeEngine, PipelineEngine, "deepspeed.runtime.pipe.engine:PipelineEngine"),
    (PartedModule, PipelineModule, "deepspeed.runtime.pipe.module:PipelineModule"),
])  # fmt: skip
def test_every_override_is_listed(ours: type, stock: type, owner: str) -> None:
    classes = [cls for cls in ours.__mro__ if cls.__module__.startswith("terapipe_ds.")]

    class Empty:
        """Have the names of any class; Python 3.13 notes lines, too."""

    of_any_class = {*dir(object), *vars(Empty), "__annotations__"}
    written = {name for cls in classes for name in vars(cls)} - of_any_class
    assert written & set(dir(stock)) <= set(hooks.DEEPSPEED_HOOKS[owner].split())


@pytest.mark.parametrize(
    ("owner", "name"),
    [(o, n) for o, names in hooks.DEEPSPEED_HOOKS.items() for n in names.split() if n != "initialize"],
)
@pytest.mark.usefixtures("unregistered")
def test_each_missing_name_is_told_at_registration(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    holder = hooks.pkgutil.resolve_name(owner)
    for each in getattr(holder, "__mro__", [holder]):
        if name in vars(each) and each is not object:
            monkeypatch.delattr(each, name)
    if hasattr(holder, name):
        pytest.skip(f"{name} is an attribute of object as well")
    with pytest.raises(compat.CompatError) as caught:
        register.register()
    message = str(caught.value)
    assert f"{owner.replace(':', '.')}.{name}" in message and "\n" not in message
    assert message.endswith("deepspeed 0.19.8 has it: pip install deepspeed==0.19.8")
    assert not register.is_registered()


@pytest.mark.usefixtures("unregistered")
def test_all_that_is_missing_comes_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PipelineEngine, "_exec_reduce_grads")
    monkeypatch.delattr("deepspeed.runtime.bf16_optimizer.BF16_Optimizer")
    monkeypatch.setattr("deepspeed.initialize", lambda: None)
    parts = ("PipelineEngine._exec_reduce_grads", "bf16_optimizer.BF16_Optimizer", "look-up of PipelineEngine")
    with pytest.raises(compat.CompatError, match=".*; .*".join(parts)):
        compat.require_hooks()


def test_no_deepspeed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(compat.CompatError, match=r"cannot be imported .*pip install deepspeed==0.19.8"):
        compat.require_hooks()


def test_megatron_core_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import RowParallelLinear

    monkeypatch.delattr(RowParallelLinear, "_forward_impl")
    says = r"megatron-core .*RowParallelLinear._forward_impl. megatron-core 0.16"
    with pytest.raises(compat.CompatError, match=says):
        compat.require_megatron("a test")


@pytest.mark.parametrize(("missing", "name"), [("transformers", "PipelineTrainer"), ("trl", "PipelineSFTTrainer")])
def test_a_trainer_without_its_extra(missing: str, name: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from terapipe_ds.integrations.trainer import {name}"
    done = run_python("-c", code)
    assert re.search(f"MissingExtraError: .* needs {missing}, which is not installed: pip install", done.stderr, re.I)


# --- optional packages

OPTIONAL = {
    "apex": ("apex.optimizers", "FusedAdam = object"),
    "flash_attn": ("flash_attn.flash_attn_interface",
                   "_flash_attn_forward = _flash_attn_backward = None\n"
                   "_flash_attn_varlen_forward = _flash_attn_varlen_backward = None"),
    "transformer_engine": ("transformer_engine.pytorch", "DotProductAttention = object"),
}  # fmt: skip


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages(site: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    module, text = OPTIONAL[package]
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, package, None)
        assert not compat.has(package)
    write(site, f"{package}.__init__")  # as the web toolkit that has the name of NVIDIA's apex
    assert not compat.has(package)
    write(site, module, text)
    versions.importlib.invalidate_caches()
    assert compat.has(package)
    assert compat.has(package)  # found again, now among the loaded modules


@pytest.mark.parametrize("package", OPTIONAL)
@pytest.mark.parametrize("failure", ["", "raise OSError('undefined symbol')", "raise ImportError('no CUDA')", "1/0"])
def test_an_optional_package_that_lacks_its_names_or_breaks_on_import(site: Path, package: str, failure: str) -> None:
    module, text = OPTIONAL[package]
    write(site, f"{package}.__init__")
    write(site, module, f"{text}\n{failure}" if failure else "")
    assert not compat.has(package)


def test_megatron_core_is_found_without_running_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    write(site, "megatron.__init__")  # Megatron-LM's scripts alone
    write(site, "megatron.training")
    assert not compat.has_megatron()
    for module in ("core.__init__", "core.parallel_state", "core.transformer.__init__"):
        write(site, f"megatron.{module}", "raise AssertionError('imported')")
    versions.importlib.invalidate_caches()
    assert compat.has_megatron()
    assert not any(name.startswith("megatron.core") for name in sys.modules)


def test_the_newest_versions_are_not_held_back() -> None:
    """Of transformers, peft, pydantic and all others: none is pinned, and installed ones give way. Not so of torch.

    The oldest transformers chooses its own packages, and leaves the others pinned.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}

    def printed(*arguments: str) -> str:
        command = ["make", "--dry-run", "--always-make", *arguments]  # also where environments exist
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout

    newest = printed("test-newest", f"PYTHON_NEWEST={sys.executable}", "TORCH_NEWEST=2.99")
    assert "rm -f .venv-newest/.installed" in newest  # newest is what is so today
    (suite,) = re.findall(r"suite VENV=(.*) PYTEST=", newest)
    installs = printed("venv", *shlex.split(f"VENV=nowhere/{suite}"))
    assert "{ grep -v '^torch==' /dev/null; echo \"torch==2.99\"; }" in installs
    assert re.search(r"install --quiet --upgrade --upgrade-strategy eager -c \S+ -e", installs)
    pinned = printed("venv", "VENV=nowhere")
    assert "grep -v '^torch==' constraints.txt" in pinned and "--upgrade" not in pinned
    older = printed("test-transformers")
    assert 'echo "transformers==4.57.6"' in older and "PINNED=.venv-transformers/pinned.txt" in older
    assert "^(transformers|tokenizers|huggingface_hub|datasets|fsspec)==" in older and "test_trainer*.py" in older
    assert "`make test-newest`" in (ROOT / "docs/releasing.md").read_text()
