"""Test that layers get their stage's received tensor itself, or a copy if they work in place on it."""

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import (
    batches,
    differences,
    engine_of,
    gpt_layers,
    run_training,
    section,
    train,
    violations,
)
from tests.distributed.harness import RankFailure, RankPool, rank_pool

PLAN = section(slices=[8, 9, 6])


class Scaled(nn.Module):
    """The first layer of stage 1: a product, in place or not."""

    writes = False
    was_handed: list[bool] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            Scaled.was_handed.append(hidden.is_leaf and hidden.requires_grad)
        return hidden.mul_(1.5) if Scaled.writes else hidden * 1.5


def layers() -> list[Any]:
    """0 embedding, 1 to 3 decoder | 4 `Scaled`, 5 decoder, 6 norm, 7 head."""
    embedding, *decoder, norm, head = gpt_layers()
    return [embedding, *decoder[:3], LayerSpec(Scaled), *decoder[3:], norm, head]


def job_train(writes: bool, terapipe: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, float], list[bool]]:
    """Return the errors against the stock engine with one stage, and whether each forward got the leaf."""
    Scaled.writes = writes
    data = batches(2)
    stock = run_training(layers, None, data, stages=1)
    Scaled.was_handed = []
    with engine_of(layers(), terapipe, **options) as engine:
        ours, handed = train(engine, data), Scaled.was_handed
        Scaled.was_handed = []
        return differences(ours, stock), handed


def job_write_later() -> None:
    Scaled.writes = False
    with engine_of(layers(), PLAN) as engine:
        train(engine, batches(1))
        Scaled.writes = True
        train(engine, batches(1))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slices": ({}, {}),
    "W apart": ({"schedule": "seq1f1b-zb"}, {}),
    "recomputed": ({}, {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}),
    "reentrant": ({}, {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("writes", [False, True])
def test_training_equals_the_stock_engine(writes: bool, name: str) -> None:
    """In place or not: the first micro-batch of a stage runs on copies, and later ones too where it was written to."""
    changes, options = SETTINGS[name]
    ranks = rank_pool(2).run(job_train, writes=writes, terapipe={**PLAN, **changes}, options=options)
    assert not violations([errors for errors, _ in ranks])
    handed = ranks[1][1]
    assert len(handed) >= 12 and not any(handed[:3])
    if name in ("slices", "W apart"):  # behind the runs of the check of the first batch
        assert handed[-12:] == [False] * 3 + [not writes] * 9


def test_a_layer_that_begins_to_work_in_place_ends_the_job_with_the_cause() -> None:
    pool = RankPool(2)  # of its own: its ranks end
    try:
        with pytest.raises(RankFailure) as raised:
            pool.run(job_write_later)
    finally:
        pool.close()
    said = str(raised.value)
    for rank in (0, 1):
        assert f"rank {rank} (stage {rank}) ends" in said
    assert "WrittenInputError: a layer changes its input in place" in said
    assert "change a copy in the layer (inputs = inputs.clone())" in said
