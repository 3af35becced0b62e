"""What the engine itself takes of an F and a B: it is seen, it is added, and looking leaves nothing behind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from terapipe_ds.runtime import measuring
from terapipe_ds.runtime.own_time import own_seconds
from terapipe_ds.runtime.untouched import untouched
from tests.distributed.engines import Run, batches, build, gpt_layers, section, train
from tests.distributed.harness import rank_pool

SETTINGS: dict[str, dict[str, Any]] = {  # each with another of DeepSpeed's optimizers
    "fp64": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 with sums in fp32": {
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp32 with ZeRO 1": {"zero_optimization": {"stage": 1}},
}  # fmt: skip


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
    engine._flops = engine._finite = object()  # of which nothing may be asked
    before = engine.module, engine.optimizer, engine._flops, engine._finite
    with mock.patch.multiple(DeepSpeedEngine, **wrapped), untouched(engine.module):
        found = own_seconds(engine, engine.is_last_stage(), lambda: None, 0.1, lambda: now_s)
    assert (engine.module, engine.optimizer, engine._flops, engine._finite) == before
    engine.destroy()
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_the_engine_does_around_layers_is_its_own_time(kind: str) -> None:
    assert rank_pool(2).run(_counted, settings=SETTINGS[kind]) == [(3.0, 5.0)] * 2


def _trained(settings: dict[str, Any], rehearsals: int) -> Run:
    engine = build(gpt_layers(_dtype(settings)), section(), **settings)

    def rehearse(step: int) -> None:
        for _ in range(rehearsals):
            with untouched(engine.module):
                own_seconds(engine, engine.is_last_stage(), lambda: None, 0.1)

    run = train(engine, batches(3), rehearse)
    engine.destroy()
    return run


def _with_and_without(settings: dict[str, Any]) -> tuple[Run, Run]:
    return _trained(settings, 2), _trained(settings, 0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_rehearsal_leaves_nothing_behind(kind: str) -> None:
    for rehearsed, plain in rank_pool(2).run(_with_and_without, settings=SETTINGS[kind]):
        assert rehearsed.losses == plain.losses and rehearsed.returned == plain.returned
        for name, parameter in plain.parameters.items():
            assert torch.equal(rehearsed.parameters[name], parameter), name
        for mine, other in zip(rehearsed.gradients, plain.gradients, strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in other.items())


def _measured(own_s: float) -> list[tuple[float, float]]:
    """The shortest F and B that "auto" has measured, with ``own_s`` said to be the engine's."""
    found = []
    real = measuring.measure_parts

    def watched(*args: Any) -> Any:
        costs = real(*args)
        found.extend((s.forward_s, s.backward_s) for part in costs for s in part.samples)
        return costs

    engine = build(gpt_layers(), section(slices="auto", granularity_tokens=4))
    told = mock.patch.object(measuring, "own_seconds", lambda *args: (own_s, 2 * own_s))
    with told, mock.patch("terapipe_ds.runtime.planning.measure_parts", watched):
        train(engine, batches(1))
    engine.destroy()
    return found


def test_slices_are_measured_with_it() -> None:
    for samples in rank_pool(2).run(_measured, own_s=1000.0):
        assert all(1000.0 < forward_s < 1100.0 and 2000.0 < backward_s < 2100.0 for forward_s, backward_s in samples)
