"""Test that plain torch models train in slices as in the stock engine: the engine intercepts their attention."""

from typing import Any

import pytest

from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models.unmodified import layers_of

UNEVEN = (9, 8, 5, 1)  # of 23 tokens


def job_equal(block: str, interval: int, changes: dict[str, Any]) -> dict[str, float]:
    module = {"activation_checkpoint_interval": interval, "seed_layers": True}
    whole = {
        "seed_layers": True
    }  # the stock engine, which drops what a recomputed embedding learns, recomputes nothing
    ours = engines.run_training(
        lambda: layers_of(block), engines.section(slices=list(UNEVEN), **changes), engines.batches(2), module=module
    )
    stock = engines.run_training(lambda: layers_of(block), None, engines.batches(2), module=whole, stages=1)
    return engines.differences(ours, stock)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("block", "interval", "changes"),
    [
        ("sdpa", 1, {}),
        ("two calls", 2, {}),
        ("two calls", 0, {"schedule": "zbv"}),
        ("multihead", 1, {}),
        ("encoder", 1, {}),
    ],
)
def test_equal_to_stock(block: str, interval: int, changes: dict[str, Any]) -> None:
    errors = rank_pool(2).run(job_equal, block=block, interval=interval, changes=changes)
    assert not engines.violations(errors)


def job_refused(from_slice: bool, changes: dict[str, Any]) -> tuple[str, str, int]:
    with engines.engine_of(layers_of("sdpa", from_slice), engines.section(**changes)) as engine:
        return *engines.step_error(engine), engine.global_steps


def test_positions_from_zero_are_named_before_the_first_step() -> None:
    told = rank_pool(2).run(job_refused, from_slice=False, changes={})
    _, text, _ = engines.of_rank_0(told)
    assert [steps for _, _, steps in told] == [0, 0]
    assert "\n  layer 1 (Positions): output of tokens 8.. differs" in text
    assert "positions start at `active_slice().start`" in text and "layer 2" not in text


def test_explicit_refuses_the_call() -> None:
    kind, text, steps = engines.of_rank_0(
        rank_pool(2).run(job_refused, from_slice=True, changes={"attention": "explicit"})
    )
    assert (kind, steps) == ("VerifyError", 0) and "layer 2 (Block): raised PlainAttentionError" in text
