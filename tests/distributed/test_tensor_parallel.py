"""Slices under tensor parallelism: against the whole model on one rank, and what tensor-parallel ranks must have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import BatchError
from terapipe_ds.runtime.engine import TeraPipeEngine
from tests.distributed import tensor_parallel as tp
from tests.distributed.engines import (
    EXACT,
    Batch,
    Run,
    batches,
    differences,
    engine_of,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

GRIDS = {"tp2-pp2": (2, 1, 2), "tp2-pp1-dp2": (1, 2, 2)}  # pipe, data, model
FP32 = 1e-5


def sharded(engine: PipelineEngine, run: Run) -> Run:
    """What a run of the whole model gave, cut down to what this tensor-parallel rank holds."""
    grid = engine.mpu
    rank, size = grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()
    dims = {n: p.partition_dim for n, p in engine.module.named_parameters() if hasattr(p, "partition_dim")}

    def part(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.chunk(size, dims[n])[rank] if n in dims else t for n, t in tensors.items()}

    return Run(run.losses, run.returned, [part(g) for g in run.gradients], part(run.parameters))


def parallel(grid: tuple[int, int, int], module_class: Any = tp.TensorParallelModule) -> dict[str, Any]:
    """Options of `engine_of` for stages, replicas and tensor-parallel ranks."""
    return {
        "stages": grid[0], "module": {"topology": tp.topology(*grid)}, "module_class": module_class,
        "loss_fn": tp.vocabulary_parallel_loss,
    }  # fmt: skip


def whole(data: list[Batch], dtype: str = "float64", tied: bool = True, **changes: Any) -> tuple[Run, list[Any]]:
    """The stock engine on the whole model, and the gradient norms that it found; each rank is a replica."""
    options = {**parallel((1, torch.distributed.get_world_size(), 1)), **changes}
    with engine_of(tp.layers(dtype, tied), None, **options) as engine:
        return train(engine, data), [engine.get_global_grad_norm()]


def _against_the_whole(
    grid: tuple[int, int, int], terapipe: dict[str, Any], dtype: str, tied: bool, changes: dict[str, Any]
) -> dict[str, float]:
    data = batches(3)
    reference, norms = whole(data, dtype, tied, **changes)
    with engine_of(tp.layers(dtype, tied), terapipe, **parallel(grid), **changes) as engine:
        ours = train(engine, data)
        errors = differences(ours, sharded(engine, reference))
        found = engine.get_global_grad_norm()
    if found is not None and norms[0] is not None:
        errors["norm"] = abs(float(found) / float(norms[0]) - 1)
    return errors


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
@pytest.mark.parametrize("terapipe", [section(slices=[9, 13, 1]), section(schedule="terapipe")], ids=["uneven", "equal"])
def test_a_step_is_that_of_the_whole_model(grid: tuple[int, int, int], terapipe: dict[str, Any]) -> None:
    job = {"grid": grid, "terapipe": terapipe, "dtype": "float64", "tied": True, "changes": {}}
    assert violations(rank_pool(4).run(_against_the_whole, **job), EXACT) == {}
