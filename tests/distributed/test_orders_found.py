"""`"schedule": "search"`: an order that rank 0 finds for measured costs, run by all ranks as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds import SlicePlan
from terapipe_ds.schedule import to_csv
from tests.distributed.engines import (
    LENGTH,
    batches,
    differences,
    engine_of,
    gpt_layers,
    logged,
    raised_by,
    section,
    stock_run,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

Found = tuple[dict[str, float], list[str], str, str, float]


def job_train(micro_batches: int, **changes: Any) -> Found:
    terapipe = section(schedule="search", granularity_tokens=4, **{"slices": "auto", **changes})
    with logged() as lines, engine_of(gpt_layers(), terapipe, gradient_accumulation_steps=micro_batches) as engine:
        ours = train(engine, batches(2, micro_batches))
        (choice,) = engine._plans._planner._choices.values()
        order = choice.order
        five = [one for batch in batches(1, 5) for one in batch]
        evaluated = float(engine.eval_batch(iter(five), num_micro_batches=5))
        described = json.dumps(engine._plans.described()["plans"][str(LENGTH)])
    assert order is not None
    return differences(ours, stock_run(num_micro_batches=micro_batches)), lines, to_csv(order), described, evaluated


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"slices": 3, "chunks_per_stage": 2}, {"slices": [[9, 8, 6], [LENGTH], [4, 10, 9]]}],
    ids=["planned", "v", "given"],
)
def test_trains_as_the_stock_engine(changes: dict[str, Any]) -> None:
    found = rank_pool(2).run(job_train, micro_batches=3, **changes)
    assert not violations([errors for errors, *_ in found])
    assert len({(csv, described, evaluated) for _, _, csv, described, evaluated in found}) == 1, "all ranks agree"
    assert '"schedule": "search"' in found[0][3] and '"order": "' in found[0][3]
    (said,) = (line for line in found[0][1] if line.startswith(f"planned {LENGTH} tokens"))
    assert "schedule  search" in said and "which no order of these slices beats" in said


def test_a_second_start_searches_for_nothing(tmp_path: Path) -> None:
    kept = {"planner": {"cache_dir": str(tmp_path)}, "trace_dir": str(tmp_path / "traces")}
    (first, *_), (second, *_) = (rank_pool(2).run(job_train, micro_batches=2, **kept) for _ in range(2))
    (path,) = tmp_path.glob("order-*.json")
    assert (tmp_path / "traces" / f"predicted-{LENGTH}-tokens-2-micro-batches.json").exists()
    assert first[2:] == second[2:] and not violations([first[0], second[0]])
    told = [any("found before, kept in" in line for line in lines) for _, lines, *_ in (first, second)]
    assert told == [False, True]
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"order": "F0.0,B0.0"}))
    (again, *_) = rank_pool(2).run(job_train, micro_batches=2, **kept)
    assert again[2] == first[2] and any("holds no order" in line for line in again[1])
    assert json.loads(path.read_text()) == file


def job_mixed() -> tuple[dict[str, float], list[str]]:
    whole, shorter = batches(1)[0][0], batches(1, length=LENGTH - 7)[0][1]
    with logged() as lines, engine_of(gpt_layers(), section(schedule="search", slices=3)) as engine:
        assert (
            "finds orders for planned slices" in raised_by(lambda: engine.use_slice_plan(SlicePlan((9,)), "search"))[1]
        )
        engine.use_slice_plan(SlicePlan((LENGTH - 7,)))
        ours = train(engine, [[whole, shorter]])
    with engine_of(gpt_layers(), section(slices=1)) as engine:
        return differences(ours, train(engine, [[whole, shorter]])), lines


@pytest.mark.full
def test_a_batch_of_other_slices_runs_a_named_schedule() -> None:
    found = rank_pool(2).run(job_mixed)
    assert not violations([errors for errors, _ in found])
    assert any("found for other slices: seq1f1b-zb runs micro-batches of (3, 1) slices" in line for line in found[0][1])
