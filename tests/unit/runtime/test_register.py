"""What is bound to DeepSpeed's names while the plugin is registered, in one process and without an engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import terapipe_ds
from terapipe_ds import compat
from terapipe_ds.compat.unread_section import guarded
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import register
from terapipe_ds.runtime.engine.engine import TeraPipeEngine

ENABLED = {"terapipe": {"enabled": True, "slices": 2}}


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    terapipe_ds.unregister()
    yield
    terapipe_ds.unregister()


def test_it_is_reversible_and_idempotent() -> None:
    def bound() -> tuple[Any, ...]:
        methods = PipelineModule._partition_layers, DeepSpeedConfig._configure_train_batch_size
        return deepspeed.PipelineEngine, deepspeed.DualPipeVEngine, *methods

    stock = bound()
    assert stock[:2] == (PipelineEngine, DualPipeVEngine) and not register.is_registered()
    terapipe_ds.register()
    ours = bound()
    assert not set(ours) & set(stock)
    terapipe_ds.register()
    assert bound() == ours and register.is_registered()
    for _ in range(2):
        terapipe_ds.unregister()
        assert bound() == stock and not register.is_registered()
    terapipe_ds.register()
    assert bound() == ours


def test_a_class_that_a_program_has_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PipelineEngine):
        def __init__(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(deepspeed, "PipelineEngine", Mine)
    terapipe_ds.register()
    engine = deepspeed.PipelineEngine(config_class=SimpleNamespace(_param_dict={}))
    assert type(engine) is Mine and isinstance(engine, deepspeed.PipelineEngine)
    terapipe_ds.unregister()
    assert deepspeed.PipelineEngine is Mine


def test_dualpipev(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DualPipeVEngine, "__init__", lambda *args, **kwargs: None)
    terapipe_ds.register()
    engine = deepspeed.DualPipeVEngine(config_class=SimpleNamespace(_param_dict={}))
    assert type(engine) is DualPipeVEngine
    assert isinstance(engine, deepspeed.DualPipeVEngine) and isinstance(engine, deepspeed.PipelineEngine)
    with pytest.raises(TeraPipeConfigError, match="cannot be combined with a DualPipeVModule: .* to false"):
        deepspeed.DualPipeVEngine(config_class=SimpleNamespace(_param_dict=ENABLED))


def test_the_stand_in_looks_like_the_class() -> None:
    terapipe_ds.register()
    stand_in = deepspeed.PipelineEngine
    for name in ("__name__", "__module__", "__doc__", "train_batch"):
        assert getattr(stand_in, name) is getattr(PipelineEngine, name)
    for engine in (PipelineEngine, TeraPipeEngine, DualPipeVEngine, stand_in):
        assert issubclass(engine, stand_in)
    assert not issubclass(deepspeed.DeepSpeedEngine, stand_in)
    assert not isinstance(3, stand_in)


def test_initialize_registers_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def initialize(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs, register.is_registered()))
        return "result"

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(compat, "require_hooks", lambda: None)
    assert terapipe_ds.initialize(1, model=2) == "result"
    assert seen == [((1,), {"model": 2}, True)]
    assert not register.is_registered()
    terapipe_ds.register()
    terapipe_ds.initialize()
    assert register.is_registered(), "what was registered before stays so"


@pytest.mark.parametrize(("section", "rank", "warns"), [
    ({"slices": 2}, "0", True), ({"slices": 2}, "1", False), ({}, "0", False),
    ({"enabled": False, "slices": 2}, "0", False),
])  # fmt: skip
def test_a_section_that_nobody_has_enabled(
    section: dict[str, Any],
    rank: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)

    def build(engine: object, config_class: SimpleNamespace) -> None:
        assert config_class._param_dict["terapipe"] is section

    guarded(build, always=True)(object(), config_class=SimpleNamespace(_param_dict={"terapipe": section}))
    assert ('"terapipe" has no "enabled", so DeepSpeed\'s own engine trains' in caplog.text) == warns
