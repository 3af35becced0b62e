"""Versions, hooks and optional packages, with stand-ins for what is not installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from terapipe_ds import compat

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
    assert compat.check_versions(TESTED) == []
    assert compat.check_versions({"torch": "2.13.0+cu130", "deepspeed": "0.19.8+1a2b3c"}) == []


def test_another_version_gives_one_warning_with_the_tested_one() -> None:
    (warning,) = compat.check_versions({**TESTED, "deepspeed": "0.20.0"})
    assert warning.startswith("deepspeed 0.20.0 is not the version")
    assert warning.endswith("try deepspeed==0.19.8")
    for version in ("2.13.0rc1", "2.13.0.post1", "2.13.1", "2.9.0", "not a version"):
        (warning,) = compat.check_versions({**TESTED, "torch": version})
        assert f"torch {version}" in warning
    assert len(compat.check_versions({"torch": "1.0", "deepspeed": "1.0", "megatron-core": "1.0"})) == 3


def test_a_missing_package() -> None:
    assert compat.check_versions({"torch": "2.13.0"}) == ["deepspeed is not installed: pip install deepspeed==0.19.8"]
    assert len(compat.check_versions({})) == 2  # megatron-core is optional


def test_the_installation_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "megatron-core":
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.13.0+cpu", "deepspeed": "9.9"}[name]

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    assert compat.installed_versions() == {"torch": "2.13.0+cpu", "deepspeed": "9.9"}
    assert [warning.split()[0] for warning in compat.check_versions()] == ["deepspeed"]


def test_warnings_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat, "check_versions", lambda: ["torch 1.0 is old"])
    compat.warn_about_versions.cache_clear()
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        compat.warn_about_versions()
        compat.warn_about_versions()
    compat.warn_about_versions.cache_clear()
    assert [record.message for record in caplog.records] == ["torch 1.0 is old"]


# --- hooks


class FakeDeepSpeedEngine:
    """As much of DeepSpeed's engine as the hooks ask for."""

    forward = backward = _backward_prologue = _backward_epilogue = _take_model_step = _scale_loss_by_gas = None


class FakePipelineEngine(FakeDeepSpeedEngine):
    """As much of DeepSpeed's pipeline engine as the hooks ask for."""

    _INSTRUCTION_MAP: dict[type, object] = {}
    _train_schedule = _inference_schedule = _exec_schedule = _exec_reduce_tied_grads = _exec_reduce_grads = None
    _exec_optimizer_step = _aggregate_total_loss = _reduce_outputs = _next_batch = None


def fake_initialize() -> object:
    return PipelineEngine()  # type: ignore[name-defined]  # noqa: F821


@pytest.fixture
def fake_deepspeed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for the three modules that have the hooks, one fresh class each."""
    base = type("DeepSpeedEngine", (), dict(vars(FakeDeepSpeedEngine)))
    pipeline = type("PipelineEngine", (base,), dict(vars(FakePipelineEngine)))
    contents = {
        "deepspeed": {
            "PipelineEngine": pipeline,
            "DualPipeVEngine": type("DualPipeVEngine", (), {}),
            "initialize": fake_initialize,
        },
        "deepspeed.runtime": {},
        "deepspeed.runtime.pipe": {},
        "deepspeed.runtime.pipe.engine": {"PipelineEngine": pipeline},
        "deepspeed.runtime.engine": {"DeepSpeedEngine": base},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(module=sys.modules["deepspeed"], base=base, pipeline=pipeline)


def test_the_installed_deepspeed_has_every_hook() -> None:
    pytest.importorskip("deepspeed")
    compat.require_hooks()


def test_a_complete_stand_in_passes(fake_deepspeed: SimpleNamespace) -> None:
    compat.require_hooks()


@pytest.mark.parametrize("hook", compat.HOOKS, ids=lambda hook: f"{hook.module}.{hook.path}")
def test_each_missing_hook_is_named(fake_deepspeed: SimpleNamespace, hook: compat.Hook) -> None:
    owner, _, name = hook.path.rpartition(".")
    target = {
        "": fake_deepspeed.module,
        "PipelineEngine": fake_deepspeed.pipeline,
        "DeepSpeedEngine": fake_deepspeed.base,
    }[owner]
    delattr(target, name)
    with pytest.raises(compat.CompatError) as caught:
        compat.require_hooks()
    message = str(caught.value)
    assert f"{hook.module}.{hook.path} ({hook.use})" in message
    assert message.count(" (") == 1
    assert message.endswith("deepspeed 0.19.8 has it: pip install deepspeed==0.19.8")


def test_all_missing_hooks_come_in_one_error(fake_deepspeed: SimpleNamespace) -> None:
    del fake_deepspeed.pipeline._train_schedule, fake_deepspeed.base._backward_epilogue
    with pytest.raises(compat.CompatError, match=r"_train_schedule .*; .*DeepSpeedEngine._backward_epilogue"):
        compat.require_hooks()


def test_an_initialize_that_does_not_look_the_engine_up(fake_deepspeed: SimpleNamespace) -> None:
    fake_deepspeed.module.initialize = lambda: None
    with pytest.raises(compat.CompatError, match="look-up of the global name PipelineEngine"):
        compat.require_hooks()


def test_a_wrapped_initialize_is_looked_through(fake_deepspeed: SimpleNamespace) -> None:
    wrapper = lambda: None  # noqa: E731
    wrapper.__wrapped__ = fake_initialize  # type: ignore[attr-defined]
    fake_deepspeed.module.initialize = wrapper
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
