"""What is bound to DeepSpeed's names while the plugin is registered, in one process and without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import terapipe_ds
from terapipe_ds import compat
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import register
from terapipe_ds.runtime.engine.engine import TeraPipeEngine

ENABLED = {"terapipe": {"enabled": True, "slices": 2}}


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    terapipe_ds.unregister()
    yield
    terapipe_ds.unregister()


class FakeConfig:
    """A DeepSpeedConfig as the engines get it."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._param_dict = raw


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which engine classes were built; their constructors do nothing else."""
    names: list[str] = []
    for engine in (PipelineEngine, TeraPipeEngine, DualPipeVEngine):

        def init(self: Any, *args: Any, name: str = engine.__name__, **kwargs: Any) -> None:
            names.append(name)

        monkeypatch.setattr(engine, "__init__", init)
    return names


def test_it_is_reversible_and_idempotent() -> None:
    assert not register.is_registered()
    terapipe_ds.register()
    stand_ins = deepspeed.PipelineEngine, deepspeed.DualPipeVEngine
    assert stand_ins[0] is not PipelineEngine
    assert stand_ins[1] is not DualPipeVEngine
    terapipe_ds.register()
    assert (deepspeed.PipelineEngine, deepspeed.DualPipeVEngine) == stand_ins
    assert register.is_registered()
    for _ in range(2):
        terapipe_ds.unregister()
        assert deepspeed.PipelineEngine is PipelineEngine
        assert deepspeed.DualPipeVEngine is DualPipeVEngine
        assert not register.is_registered()
    terapipe_ds.register()
    assert deepspeed.PipelineEngine is stand_ins[0]


def test_dualpipev(built: list[str]) -> None:
    terapipe_ds.register()
    engine = deepspeed.DualPipeVEngine(config_class=FakeConfig({}))
    assert built == ["DualPipeVEngine"]
    assert isinstance(engine, deepspeed.DualPipeVEngine)
    assert isinstance(engine, deepspeed.PipelineEngine)
    with pytest.raises(TeraPipeConfigError, match="cannot be combined with a DualPipeVModule: .* to false"):
        deepspeed.DualPipeVEngine(config_class=FakeConfig(ENABLED))


def test_the_stand_in_looks_like_the_class() -> None:
    terapipe_ds.register()
    stand_in = deepspeed.PipelineEngine
    assert (stand_in.__name__, stand_in.__module__) == ("PipelineEngine", PipelineEngine.__module__)
    assert stand_in.__doc__ == PipelineEngine.__doc__
    assert stand_in.train_batch is PipelineEngine.train_batch
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
