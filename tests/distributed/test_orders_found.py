"""Test an order that the planner finds for costs: run it from its file, with the slices of the search."""

from pathlib import Path

import pytest

from terapipe_ds import SlicePlan
from terapipe_ds.planner.orders.find import find_order
from terapipe_ds.schedule import to_csv
from tests.costs import CostsOf
from tests.distributed import engines
from tests.distributed.harness import rank_pool

LISTS = [[9, 8, 6], [engines.LENGTH], [4, 10, 9]]


# A B takes twice as long as an F, half of it for W, and later tokens take longer.
COSTS = CostsOf(
    lambda tokens, prefix: tokens * (1.0 + prefix / engines.LENGTH),
    lambda tokens, prefix: 2 * tokens * (1.0 + prefix / engines.LENGTH),
    weight_s=lambda tokens, prefix: float(tokens),
)


def job_train(path: str, chunks: int) -> tuple[dict[str, float], list[str], str]:
    terapipe = engines.unchecked(schedule=path, slices=LISTS, chunks_per_stage=chunks)
    with engines.engine_of(engines.gpt_layers(), terapipe, gradient_accumulation_steps=3) as engine:
        searched = engines.raised_by(lambda: engine.use_slice_plan(SlicePlan((engines.LENGTH,)), "search"))[1]
        ours = engines.train(engine, engines.batches(2, 3))
        order = engine._plans.schedule(path, True, (3, 1, 3)).compute_order(engine.stage_id)
        five = [one for batch in engines.batches(1, 5) for one in batch]
        assert float(engine.eval_batch(iter(five), num_micro_batches=5)) > 0
    return engines.differences(ours, engines.stock_run(num_micro_batches=3)), order, searched


@pytest.mark.parametrize("chunks", [1, 2])
def test_trains_as_the_stock_engine(chunks: int, tmp_path: Path) -> None:
    found = find_order(COSTS, [SlicePlan(tuple(each)) for each in LISTS], 2, 3, chunks_per_stage=chunks).schedule
    path = tmp_path / "order.csv"
    path.write_text(to_csv(found))
    ranks = rank_pool(2).run(job_train, path=str(path), chunks=chunks)
    assert not engines.violations([errors for errors, *_ in ranks])
    for stage_id, (_, order, searched) in enumerate(ranks):
        assert order == found.compute_order(stage_id)
        assert "terapipe plan --schedule search --order FILE" in searched
