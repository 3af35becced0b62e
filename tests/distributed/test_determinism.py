"""Two runs with one seed are equal to the last bit: losses, gradients and parameters, with dropout and recompute."""

import functools
from typing import Any

import pytest
import torch

from tests.distributed.engines import (
    CHECKPOINTING,
    Run,
    differences,
    engine_of,
    error_of,
    gpt_layers,
    micro_batch,
    section,
    train,
)
from tests.distributed.harness import rank_pool

PLAN = [8, 9, 6]
# attention's own dropout is done by the backend that replays its random state in the backward
DROPPING = functools.partial(gpt_layers, "float32", dropout=0.1, attention_dropout=0.2)


def trained(seed: int, schedule: str, **options: Any) -> Run:
    """Three steps, with an evaluation between them; replicas have data and random numbers of their own."""
    with engine_of(DROPPING(), section(slices=PLAN, schedule=schedule), **options) as engine:
        replica = engine.grid.get_data_parallel_rank()
        torch.manual_seed(100 * seed + engine.global_rank)
        data = [[micro_batch(1000 * replica + 10 * step + i) for i in range(2)] for step in range(3)]
        first = train(engine, data[:1])
        engine.eval_batch(iter(data[0]))
        run = train(engine, data[1:])
    run.losses[:0], run.returned[:0] = first.losses, first.returned
    run.gradients[:0] = first.gradients
    return run


def job_twice(schedule: str, stages: int, recomputing: str, **options: Any) -> dict[str, Any]:
    kinds = {kind: {**options, **CHECKPOINTING[kind], "stages": stages} for kind in ("off", recomputing)}
    first, second = ({kind: trained(1, schedule, **kinds[kind]) for kind in kinds} for _ in range(2))
    plain = first["off"]
    with engine_of(gpt_layers("float32"), section(slices=PLAN), **kinds["off"]) as engine:
        undropped = float(engine.eval_batch(iter([micro_batch(7), micro_batch(8)])))
    with engine_of(DROPPING(), section(slices=PLAN), **kinds["off"]) as engine:
        evaluated = float(engine.eval_batch(iter([micro_batch(7), micro_batch(8)])))
    return {
        "evaluation": evaluated - undropped,
        "twice": [error_of(vars(first[kind]), vars(second[kind])) for kind in kinds],
        "recomputed": max(differences(first[recomputing], plain).values()),
        "other seed": differences(trained(2, schedule, **kinds["off"]), plain),
        "steps": [len(plain.returned), len(plain.gradients), len(plain.parameters) > 3],
    }


def check(ranks: list[dict[str, Any]], recomputed: float) -> None:
    for rank in ranks:
        assert rank["twice"] == [0.0, 0.0]
        assert rank["recomputed"] <= recomputed, "a recomputed forward drops what the first one dropped"
        assert rank["other seed"]["returned"] > 1e-4, "there is dropout"
        assert rank["evaluation"] == 0.0, "dropout is for training"
        assert rank["steps"] == [3, 3, True]


@pytest.mark.parametrize("recomputing", [pytest.param("reentrant", marks=pytest.mark.full), "non_reentrant"])
def test_two_stages(recomputing: str) -> None:
    ranks = rank_pool(2).run(job_twice, schedule="seq1f1b", stages=2, recomputing=recomputing)
    check(ranks, recomputed=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("recomputing", ["reentrant", "non_reentrant"])
def test_two_replicas_with_bf16_and_zero_1(recomputing: str) -> None:
    options = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    ranks = rank_pool(2).run(job_twice, schedule="terapipe", stages=1, recomputing=recomputing, **options)
    check(ranks, recomputed=0.0)
