"""Test the engine's own time in an F and a B: the second batch shows it, and slices are planned again with it."""

import time
from typing import Any
from unittest import mock

import pytest

from terapipe_ds.runtime.batch.in_flight import PartInFlight
from terapipe_ds.runtime.planning import measure_and_share
from tests.distributed import engines
from tests.distributed.harness import rank_pool

BUSY_S = 0.02
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SETTINGS: dict[str, dict[str, Any]] = {  # each with another of DeepSpeed's optimizers
    "fp64": {},
    "fp32 with ZeRO 1": engines.ZERO1,
    "bf16 with sums in fp32": {**BF16, **engines.ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
}


FINISH = PartInFlight.finish


def busy(self: PartInFlight, action: Any) -> None:
    """Compute for some time, as slow bookkeeping would."""
    end_s = time.thread_time() + BUSY_S
    while time.thread_time() < end_s:
        pass
    FINISH(self, action)


def job(settings: dict[str, Any], dtype: str, **changes: Any) -> tuple[list[float], list[str], list[list[int]]]:
    """Return own seconds, the log, and the slices of each of four steps."""
    terapipe, slices = engines.unchecked(**{"slices": "auto", "granularity_tokens": 4, **changes}), []
    with engines.logged() as lines, mock.patch.object(PartInFlight, "finish", busy):
        with engines.engine_of(engines.gpt_layers(dtype), terapipe, **settings) as engine:
            for batch in engines.batches(4):
                engines.train(engine, [batch])
                slices.append(list(engine.slice_plan(engines.LENGTH).lengths))
            found = [seconds for both in engine.own_time.of_parts().values() for seconds in both]
    return found, lines, slices


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.sample(1)
def test_it_is_measured_without_the_layers_and_makes_slices_longer(kind: str) -> None:
    settings = SETTINGS[kind]
    dtype = "bfloat16" if "bf16" in settings else "float32" if settings else "float64"
    ranks = rank_pool(2).run(engines.with_few_rounds, job=job, settings=settings, dtype=dtype)
    (first, lines, slices), (second, _, others) = ranks
    assert all(BUSY_S < own_s < 2 * BUSY_S for own_s in first + second), (first, second)
    assert any("the engine itself takes" in line for line in lines)
    assert sum(line.startswith("planned ") for line in lines) == 2
    assert slices == others and slices[0] == slices[1] and slices[2] == slices[3]
    assert len(slices[2]) <= len(slices[1])


def job_same_plan() -> list[str]:
    """Return the reports of a planner that finds the same plan with the engine's own time."""
    found: list[Any] = []
    plan = measure_and_share.best_without_moving

    def same(*arguments: Any) -> Any:
        found.append(found[0] if found else plan(*arguments))
        return found[0]

    with mock.patch.object(measure_and_share, "best_without_moving", same):
        _, lines, _ = job({}, "float64")
    return [line for line in lines if line.startswith("planned ")]


def test_a_plan_that_stays_is_one_line_of_the_log() -> None:
    first, again = rank_pool(2).run(engines.with_few_rounds, job=job_same_plan)[0]
    assert "\n" in first and "\n" not in again
    assert again.startswith("planned 23 tokens again with that time: slices and schedule stay, predicted ")


def job_lengths() -> list[str]:
    """Return the log of a step whose micro-batches have two lengths."""
    mixed = [*engines.batches(1, 1, length=31)[0], *engines.batches(1, 1)[0]]
    terapipe = engines.unchecked(slices="auto", granularity_tokens=4)
    with engines.logged() as lines, engines.engine_of(engines.gpt_layers(), terapipe) as engine:
        engines.train(engine, [mixed])
    return lines


def test_one_line_of_the_log_does_for_each_shorter_length() -> None:
    lines = rank_pool(2).run(engines.with_few_rounds, job=job_lengths)[0]
    longest, shorter = (line for line in lines if line.startswith("planned "))
    assert longest.startswith("planned 31 tokens for 2 stages") and "\n" in longest
    assert shorter.startswith("planned 23 tokens: seq1f1b, slices [") and "\n" not in shorter
    (runs,) = (line for line in lines if line.startswith("training runs"))
    assert runs.endswith(
        'no prediction: it needs measured costs ("slices": "auto" or "schedule": "auto")'
        " and sequences of one planned length in a step"
    )


def job_train() -> dict[str, float]:
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(slices="auto", granularity_tokens=4)) as engine:
        return engines.differences(engines.train(engine, engines.batches(4)), engines.stock_run(4))


def test_steps_are_those_of_the_stock_engine_before_and_after() -> None:
    assert not engines.violations(rank_pool(2).run(engines.with_few_rounds, job=job_train))
