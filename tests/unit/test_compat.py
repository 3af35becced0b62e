"""Versions, hooks and optional packages, with stand-ins for what is not installed."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from terapipe_ds import compat, hooks
from terapipe_ds.runtime import register

TESTED = dict(compat.TESTED_VERSIONS)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in front of ``sys.path``; what is imported from it is forgotten at the end."""
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


def test_the_tested_versions_give_no_warning() -> None:
    for python in ("3.11", "3.12"):
        assert compat.check_versions(TESTED, python) == []
        assert compat.check_versions({"torch": "2.13.0+cu130", "deepspeed": "0.19.8+1a2b3c"}, python) == []


def test_torch_from_the_oldest_to_the_newest_tested_one_gives_no_warning() -> None:
    for version in ("2.11.0", "2.11.0+cu130", "2.12.1", "2.13.0", "2.13.1", "2.14.0", "2.15.0", "2.15.7+cpu"):
        assert compat.check_versions({**TESTED, "torch": version}, "3.11") == []


def test_another_python() -> None:
    for version in ("3.10", "3.13"):
        (warning,) = compat.check_versions(TESTED, version)
        assert warning.startswith(f"python {version} is not a version that terapipe_ds is tested with (3.11, 3.12)")


ROOT = Path(compat.__file__).parents[1]


def test_the_readme_has_the_tested_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    torch = f"{' to '.join(compat.TESTED_RANGES['torch'])}; at every change {TESTED['torch']}"
    python = f"{', '.join(compat.TESTED_PYTHONS)}; at every change {compat.TESTED_PYTHONS[0]}"
    for name, version in {**TESTED, "torch": torch, "Python": python}.items():
        assert f"| {name} | {version} |" in readme


def test_the_package_asks_for_what_is_tested() -> None:
    setup = (ROOT / "setup.py").read_text()
    assert f'"torch>={compat.TESTED_RANGES["torch"][0]}"' in setup
    assert f'python_requires=">={compat.TESTED_PYTHONS[0]}"' in setup
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)
    assert tuple(named) == compat.TESTED_PYTHONS


def test_the_oldest_and_the_newest_are_those_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    ends = {name: re.findall(rf"^{name}_(?:OLDEST|NEWEST) \?= (?:python)?(\d+\.\d+)", makefile, re.MULTILINE)
            for name in ("TORCH", "PYTHON")}  # fmt: skip
    assert {name: tuple(found) for name, found in ends.items()} == {
        "TORCH": compat.TESTED_RANGES["torch"], "PYTHON": compat.TESTED_PYTHONS,
    }  # fmt: skip
    assert f"TORCH := {TESTED['torch']}\n" in makefile


def test_another_version_gives_one_warning_with_the_tested_one() -> None:
    (warning,) = compat.check_versions({**TESTED, "deepspeed": "0.20.0"}, "3.11")
    assert warning.startswith("deepspeed 0.20.0 is not a version that terapipe_ds is tested with (0.19.8)")
    assert warning.endswith("try deepspeed==0.19.8")
    for version in ("2.13.0rc1", "2.15.0.dev20260901", "2.10.1", "2.9.0", "2.16.0", "3.0.0", "not a version"):
        (warning,) = compat.check_versions({**TESTED, "torch": version}, "3.11")
        assert warning.startswith(f"torch {version} is not a version that terapipe_ds is tested with (2.11 to 2.15)")
        assert warning.endswith("try torch==2.13.0")
    assert len(compat.check_versions({"torch": "1.0", "deepspeed": "1.0", "megatron-core": "1.0"}, "3.11")) == 3


def test_a_missing_package() -> None:
    missing = ["deepspeed is not installed: pip install deepspeed==0.19.8"]
    assert compat.check_versions({"torch": "2.13.0"}, "3.11") == missing
    assert len(compat.check_versions({}, "3.11")) == 2  # megatron-core is optional


def test_the_installation_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "megatron-core":
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.13.0+cpu", "deepspeed": "9.9"}[name]

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    assert compat.installed_versions() == {"torch": "2.13.0+cpu", "deepspeed": "9.9"}
    assert [warning.split()[0] for warning in compat.check_versions(python="3.11")] == ["deepspeed"]


def test_warnings_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat, "check_versions", lambda: ["torch 1.0 is old", "deepspeed 1.0 is too"])
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


# --- hooks


def fake_initialize() -> object:
    return PipelineEngine()  # type: ignore[name-defined]  # noqa: F821


def fake_modules(hooks: Sequence[compat.Hook]) -> dict[str, ModuleType]:
    """As much of the third parties as the hooks ask for: modules with classes, functions and nothing else."""
    modules: dict[str, ModuleType] = {}
    for hook in hooks:
        parts = hook.module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            module = modules.setdefault(name, ModuleType(name))
            module.__path__ = []
    for hook in hooks:
        owner: Any = modules[hook.module]
        *owners, last = hook.path.split(".")
        for name in owners:
            if not isinstance(vars(owner).get(name), type):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        function: dict[str, Any] = {}
        exec(f"def function({', '.join(['self', *hook.parameters, '*more'])}): pass", function)
        if last not in vars(owner):
            setattr(owner, last, function["function"])
    return modules


@pytest.fixture
def fake_deepspeed(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Stand-ins for all modules of DeepSpeed that have hooks."""
    register.unregister()
    modules = fake_modules([hook for hook in compat.HOOKS if hook.module.partition(".")[0] == "deepspeed"])
    modules["deepspeed"].initialize = fake_initialize  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def owner_of(hook: compat.Hook) -> tuple[Any, str]:
    value: Any = sys.modules[hook.module]
    *owners, last = hook.path.split(".")
    for name in owners:
        value = getattr(value, name)
    return value, last


def test_the_installed_deepspeed_has_every_hook() -> None:
    pytest.importorskip("deepspeed")
    compat.require_hooks()


def test_a_complete_stand_in_passes(fake_deepspeed: dict[str, ModuleType]) -> None:
    compat.require_hooks()


DEEPSPEED_HOOKS = [hook for hook in compat.HOOKS if hook.module.partition(".")[0] == "deepspeed"]


@pytest.mark.parametrize("hook", DEEPSPEED_HOOKS, ids=lambda hook: f"{hook.module}.{hook.path}")
def test_each_missing_hook_is_named_when_the_plugin_registers(
    fake_deepspeed: dict[str, ModuleType], hook: compat.Hook
) -> None:
    owner, name = owner_of(hook)
    delattr(owner, name)
    with pytest.raises(compat.CompatError) as caught:
        register.register()
    message = str(caught.value)
    assert f"{hook.module}.{hook.path} ({hook.use})" in message
    assert "\n" not in message
    assert message.endswith("deepspeed 0.19.8 has it: pip install deepspeed==0.19.8")
    assert not register.is_registered()


@pytest.mark.parametrize("hook", [h for h in DEEPSPEED_HOOKS if h.parameters], ids=lambda hook: hook.path)
def test_a_hook_with_other_parameters(fake_deepspeed: dict[str, ModuleType], hook: compat.Hook) -> None:
    owner, name = owner_of(hook)
    setattr(owner, name, lambda self, *, other: None)
    with pytest.raises(compat.CompatError, match=re.escape(f"{hook.module}.{hook.path} (")):
        compat.require_hooks()


def test_all_missing_hooks_come_in_one_error(fake_deepspeed: dict[str, ModuleType]) -> None:
    del fake_deepspeed["deepspeed.runtime.pipe.engine"].PipelineEngine._train_schedule
    del fake_deepspeed["deepspeed.runtime.engine"].DeepSpeedEngine._backward_epilogue
    with pytest.raises(compat.CompatError, match=r"_train_schedule .*; .*DeepSpeedEngine._backward_epilogue"):
        compat.require_hooks()


def test_a_torch_without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.overrides.TorchFunctionMode")
    with pytest.raises(compat.CompatError, match=r"^the installed torch .*TorchFunctionMode .*torch==2.13.0$"):
        compat.require_hooks()


REAL = [hook for hook in DEEPSPEED_HOOKS if hook.path.startswith(("PipelineEngine._", "DeepSpeedEngine._"))]


@pytest.mark.parametrize("hook", REAL, ids=lambda hook: hook.path)
def test_the_real_deepspeed_without_a_private_name(monkeypatch: pytest.MonkeyPatch, hook: compat.Hook) -> None:
    register.unregister()
    importlib.import_module(hook.module)
    owner, name = owner_of(hook)
    if not hasattr(owner, name):  # an attribute of instances: see below
        return
    for base in owner.__mro__:
        if name in vars(base):
            monkeypatch.delattr(base, name)
    monkeypatch.setattr(hooks, "_is_kept", lambda owner, name: False)
    with pytest.raises(compat.CompatError, match=re.escape(f"{hook.path} ({hook.use})")):
        register.register()


def test_attributes_of_instances_are_found_where_a_method_sets_or_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        read: Any
        called_only: Any

        def __init__(self) -> None:
            self.kept, self.pair = [self.read for _ in ()], 1

        def later(self) -> None:
            def inside() -> None:
                self.inner = 3

            inside()

    class Engine(Base):
        @property
        def shown(self) -> object:
            return self.called_only()

    module = ModuleType("some_module")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_module", module)
    for name in ("kept", "pair", "read", "inner", "shown", "later"):
        assert compat.Hook("some_module", f"Engine.{name}", "use").is_there()
    for path in ("Engine.gone", "Engine.called_only", "Engine.kept.more", "Other.kept", "gone"):
        assert not compat.Hook("some_module", path, "use").is_there()
    assert not compat.Hook("no_such_module", "Engine", "use").is_there()


def test_megatron_core_without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_megatron", lambda: True)
    modules = fake_modules(compat.MEGATRON_HOOKS)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    compat.require_megatron("a test")
    for hook in compat.MEGATRON_HOOKS:
        with monkeypatch.context() as inner:
            owner, name = owner_of(hook)
            inner.delattr(owner, name)
            with pytest.raises(compat.CompatError, match=rf"the installed megatron-core .*{re.escape(hook.path)} \("):
                compat.require_megatron("a test")


# --- the table has all that the code relies on

RUNTIME = Path(compat.__file__).parent / "runtime"


def known(module: str, name: str) -> bool:
    return any(
        hook.module == f"{module}.{name}" or (hook.module == module and hook.path.split(".")[0] == name)
        for hook in compat.HOOKS
    )


def test_every_import_from_deepspeed_is_a_hook() -> None:
    for path in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed"):
                for alias in node.names:
                    assert known(str(node.module), alias.name), f"{path.name}: {node.module}.{alias.name}"


def test_every_attribute_of_the_engine_that_is_not_ours_is_a_hook() -> None:
    """``self.NAME`` in the engine, ``engine.NAME`` beside it, and the methods that it overrides."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    mentioned = {name for f in hooks._functions(PipelineEngine) for code in hooks._codes(f) for name in code.co_names}
    stock = {*dir(PipelineEngine), *mentioned} - set(dir(object))
    of_engines = ("PipelineEngine.", "DeepSpeedEngine.")
    table = {hook.path.split(".")[1] for hook in compat.HOOKS if hook.path.startswith(of_engines)}
    for path in sorted(RUNTIME.rglob("*.py")):
        tree = ast.parse(path.read_text())
        mine = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "TeraPipeEngine"]
        used = {node.name for c in mine for node in c.body if isinstance(node, ast.FunctionDef)} - {"__init__"}
        engines = ("engine", "self._engine", "self") if mine else ("engine", "self._engine")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in engines:
                used.add(node.attr)
        assert used & stock <= table, f"{path.name}: {used & stock - table}"


def test_an_initialize_that_does_not_look_the_engine_up(fake_deepspeed: dict[str, ModuleType]) -> None:
    fake_deepspeed["deepspeed"].initialize = lambda: None
    with pytest.raises(compat.CompatError, match=r"initialize \(with a look-up of the global name PipelineEngine\)"):
        compat.require_hooks()


def test_a_wrapped_initialize_is_looked_through(fake_deepspeed: dict[str, ModuleType]) -> None:
    wrapper = lambda: None  # noqa: E731
    wrapper.__wrapped__ = fake_initialize  # type: ignore[attr-defined]
    fake_deepspeed["deepspeed"].initialize = wrapper
    compat.require_hooks()


def test_no_deepspeed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(compat.CompatError, match=r"cannot be imported .*pip install deepspeed==0.19.8"):
        compat.require_hooks()


# --- optional packages

OPTIONAL = {
    "apex": (compat.has_apex, "apex.optimizers", "FusedAdam = object"),
    "flash_attn": (
        compat.has_flash_attn,
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward = _flash_attn_backward = None",
    ),
    "transformer_engine": (
        compat.has_transformer_engine,
        "transformer_engine.pytorch",
        "DotProductAttention = object",
    ),
}


@pytest.mark.parametrize("package", OPTIONAL)
def test_an_optional_package_that_is_there(site: Path, package: str) -> None:
    has, module, text = OPTIONAL[package]
    write(site, f"{package}.__init__")
    write(site, module, text)
    assert has()
    assert has()  # found again, now among the loaded modules


@pytest.mark.parametrize("package", OPTIONAL)
def test_an_optional_package_that_is_absent(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    has, module, _ = OPTIONAL[package]
    for name in (package, module):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert not has()


@pytest.mark.parametrize("package", OPTIONAL)
def test_an_optional_package_without_what_is_needed(site: Path, package: str) -> None:
    has, module, _ = OPTIONAL[package]
    write(site, f"{package}.__init__")
    write(site, module)
    assert not has()


@pytest.mark.parametrize("package", OPTIONAL)
@pytest.mark.parametrize("failure", ["raise OSError('undefined symbol')", "raise ImportError('no CUDA')", "1/0"])
def test_an_optional_package_that_breaks_on_import(site: Path, package: str, failure: str) -> None:
    has, module, text = OPTIONAL[package]
    write(site, f"{package}.__init__")
    write(site, module, f"{text}\n{failure}")
    assert not has()


def test_the_other_apex_is_not_taken_for_nvidias(site: Path) -> None:
    """The web toolkit of that name: importable, and without ``apex.optimizers``. It is not even run."""
    write(site, "apex.__init__", "raise AssertionError('imported')")
    assert not compat.has_apex()
    assert "apex" not in sys.modules


def test_a_loaded_apex_without_a_path_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.delitem(sys.modules, "apex.optimizers", raising=False)
    assert not compat.has_apex()


def test_any_package_can_be_asked_for(site: Path) -> None:
    write(site, "some_tokenizers.__init__", "raise AssertionError('imported')")
    assert compat.is_installed("some_tokenizers")
    assert not compat.is_installed("no_tokenizers")


def test_megatron_core_is_found_without_running_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    write(site, "megatron.__init__")  # Megatron-LM's scripts alone
    write(site, "megatron.training")
    assert not compat.has_megatron()
    for module in ("core.__init__", "core.parallel_state", "core.transformer.__init__"):
        write(site, f"megatron.{module}", "raise AssertionError('imported')")
    compat.importlib.invalidate_caches()
    assert compat.has_megatron()
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
