"""What the engine itself takes of an F and a B: it is seen, it is added, and looking leaves nothing behind."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.engine.own_time import own_seconds
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.profiling import all_parts
from tests.distributed.engines import (
    ZERO1,
    batches,
    build,
    error_of,
    gpt_layers,
    raised_by,
    run_training,
    section,
    train,
)
from tests.distributed.harness import rank_pool

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SETTINGS: dict[str, dict[str, Any]] = {  # each with another of DeepSpeed's optimizers
    "fp64": {},
    "fp32 with ZeRO 1": ZERO1,
    "bf16": BF16,
    "bf16 with sums in fp32": {**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
}


def _dtype(settings: dict[str, Any]) -> str:
    return "bfloat16" if "bf16" in settings else "float32" if settings else "float64"


def _counted(settings: dict[str, Any]) -> tuple[float, float]:
    """By a clock that stands still but for two of DeepSpeed's wrappers: 3 s around layers, 5 s after a backward."""
    now_s = 0.0

    def lasts(seconds: float, call: Any) -> Any:
        def method(self: Any, *args: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return call(self, *args)

        return method

    engine = build(gpt_layers(_dtype(settings)), section(), **settings)
    wrappers = {"forward": 3.0, "_backward_epilogue": 5.0}
    wrapped = {name: lasts(seconds, getattr(DeepSpeedEngine, name)) for name, seconds in wrappers.items()}
    engine._stage.flops = engine._stage.finite = object()  # nothing may be asked of them
    before = dict(vars(engine))
    with mock.patch.multiple(DeepSpeedEngine, **wrapped), untouched(engine.module):
        found = own_seconds(engine, engine.is_last_stage(), lambda: None, 0.1, lambda: now_s)
    _assert_holds(engine, before)
    engine.destroy()
    return found


def _assert_holds(engine: Any, before: dict[str, Any]) -> None:
    """Not one attribute more or less, and each the same object."""
    after = vars(engine)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert engine._modules["module"] is before["module"]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.sample(2)
def test_what_the_engine_does_around_layers_is_its_own_time(kind: str) -> None:
    settings = SETTINGS[kind] | {"wall_clock_breakdown": True}
    assert rank_pool(2).run(_counted, settings=settings) == [(3.0, 5.0)] * 2


def test_where_nothing_listens_layers_run_without_the_wrappers() -> None:
    assert rank_pool(2).run(_counted, settings=SETTINGS["fp64"]) == [(0.0, 0.0)] * 2
    assert rank_pool(2).run(_counted, settings=SETTINGS["bf16"]) == [(3.0, 5.0)] * 2


def _interrupted(fails_in: str) -> bool:
    """Whether an error, inside of what is rehearsed, comes out and leaves the engine with all that it had."""
    engine = build(gpt_layers(), section(), wall_clock_breakdown=True)
    before, parameters, timed = dict(vars(engine)), list(engine.module.parameters()), _timed(engine)
    wrapped = mock.patch.object(DeepSpeedEngine, fails_in, side_effect=RuntimeError("in a rehearsal"))
    with wrapped, untouched(engine.module):
        _, said = raised_by(lambda: own_seconds(engine, engine.is_last_stage(), lambda: None, 0.1))
    _assert_holds(engine, before)
    assert all(mine is other for mine, other in zip(engine.module.parameters(), parameters, strict=True))
    assert not engine._running_engine_backward and _timed(engine) == timed
    engine.destroy()
    return said == "in a rehearsal"


def _timed(engine: Any) -> dict[str, float]:
    """What DeepSpeed's timers have counted so far."""
    return {name: timer.elapsed(reset=False) for name, timer in engine.timers.get_timers().items()}


@pytest.mark.parametrize("fails_in", ["forward", "_backward_prologue", "_backward_epilogue"])
def test_an_error_in_a_rehearsal_leaves_the_engine_as_it_was(fails_in: str) -> None:
    assert rank_pool(2).run(_interrupted, fails_in=fails_in) == [True] * 2


def _error_of_rehearsing(settings: dict[str, Any]) -> float:
    """How far a training with two rehearsals before each step is from one without."""
    runs = []
    for rehearsals in (2, 0):

        def rehearse(engine: Any, step: int, rehearsals: int = rehearsals) -> None:
            for _ in range(rehearsals):
                with untouched(engine.module):
                    own_seconds(engine, engine.is_last_stage(), lambda: None, 0.1)

        layers = functools.partial(gpt_layers, _dtype(settings))
        runs.append(run_training(layers, section(), batches(3), before_step=rehearse, **settings))
    return error_of(*map(vars, runs))


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.sample(2)
def test_a_rehearsal_leaves_nothing_behind(kind: str) -> None:
    assert rank_pool(2).run(_error_of_rehearsing, settings=SETTINGS[kind]) == [0.0, 0.0]


def _measured(own_s: float) -> list[tuple[float, float]]:
    """The shortest F and B that "auto" has measured, with ``own_s`` said to be the engine's."""
    found = []
    real = all_parts.measure_parts

    def watched(*args: Any) -> Any:
        costs = real(*args)
        found.extend((s.forward_s, s.backward_s) for part in costs for s in part.times.samples)
        return costs

    engine = build(gpt_layers(), section(slices="auto", granularity_tokens=4))
    told = mock.patch.object(TeraPipeEngine, "own_seconds", lambda *args: (own_s, 2 * own_s))
    with told, mock.patch("terapipe_ds.runtime.planning.auto_planner.measure_parts", watched):
        train(engine, batches(1))
    engine.destroy()
    return found


def test_slices_are_measured_with_it() -> None:
    for samples in rank_pool(2).run(_measured, own_s=1000.0):
        assert all(1000.0 < forward_s < 1100.0 and 2000.0 < backward_s < 2100.0 for forward_s, backward_s in samples)
