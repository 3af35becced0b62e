"""Slices under tensor parallelism: against the whole model on one rank, and what such ranks must have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.sliceable import BatchError
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
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
SECTIONS = {"uneven": section(slices=[9, 13, 1]), "equal": section(schedule="terapipe")}


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
@pytest.mark.parametrize("terapipe", SECTIONS.values(), ids=list(SECTIONS))
def test_a_step_is_that_of_the_whole_model(grid: tuple[int, int, int], terapipe: dict[str, Any]) -> None:
    job = {"grid": grid, "terapipe": terapipe, "dtype": "float64", "tied": True, "changes": {}}
    assert violations(rank_pool(4).run(_against_the_whole, **job), EXACT) == {}


# -- what the ranks must have alike --------------------------------------------------------------------------------

SEEDED = {
    "tp2-pp2": ((2, 1, 2), [[0, 1], [2, 3]]),
    "tp2-pp1-dp2": ((1, 2, 2), [[0, 1], [2, 3]]),
    "tp4-pp1": ((1, 1, 4), [[0, 1, 2, 3]]),
}


def _seeded_by_global_rank(grid: tuple[int, int, int]) -> tuple[list[str], float, float]:
    """The errors of a step and of an evaluation with data that each rank draws for itself; and what training gives
    afterwards, against a run that never failed."""
    rank = torch.distributed.get_rank()
    own = batches(2, first_seed=1000 * rank)
    with engine_of(tp.layers(), section(), **parallel(grid)) as engine:
        undisturbed = train(engine, batches(2))
    errors = []
    with engine_of(tp.layers(), section(), **parallel(grid)) as engine:
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(BatchError) as caught:
                call(iter(own[0]))
            errors.append(str(caught.value))
        engine.train()
        run = train(engine, batches(2))
        return errors, run.returned[1], undisturbed.returned[1]


@pytest.mark.parametrize(("grid", "peers"), SEEDED.values(), ids=list(SEEDED))
@pytest.mark.sample(2)
def test_peers_that_draw_other_samples_are_an_error_on_every_rank(
    grid: tuple[int, int, int], peers: list[list[int]]
) -> None:
    results = rank_pool(4).run(_seeded_by_global_rank, grid=grid)
    for errors, after, undisturbed in results:
        assert after == undisturbed, "nothing of the refused batches stays"
        for error in errors:
            assert "seed and divide the sampler by the data-parallel rank" in error
            for ranks in peers:
                assert f"tensor-parallel ranks {ranks}" in error
    first = results[0][0][0]
    what = [line.split()[0] for line in first.splitlines()[1:-1]]
    stages = grid[0]
    assert what == (["inputs", "labels"] if stages == 2 else ["inputs", "labels"] * grid[1]), first
    assert len({errors[0] for errors, *_ in results}) == 1, "all say the same"


def _swapped(what: str) -> list[str]:
    """One tensor-parallel rank has the same samples, but another order, or another number of micro-batches."""
    with engine_of(tp.layers(), section(), **parallel((2, 1, 2))) as engine:
        data = batches(1, num_micro_batches=3)[0]
        if torch.distributed.get_rank() in (1, 3):
            data = data[::-1] if what == "order" else data
            if what == "labels":
                data = [(inputs, labels.roll(1, dims=0)) for inputs, labels in data]
            if what == "count":
                engine.set_train_batch_size(6)
        with pytest.raises(BatchError) as caught:
            engine.train_batch(iter(data))
        return str(caught.value).splitlines()[1:-1]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("order", ["inputs of tensor-parallel ranks [0, 1] (st", "labels of tensor-parallel ranks [2, 3] (st"]),
        ("labels", ["labels of tensor-parallel ranks [2, 3] (stage 1"]),
        ("count", ["tensor-parallel ranks [0, 1] (stage 0, replica 0): ranks [0]: 2 micro-batches; ranks [1]: 3 mi"]),
    ],
)
def test_the_order_and_each_side_count(what: str, found: list[str]) -> None:
    for lines in rank_pool(4).run(_swapped, what=what):
        for line, expected in zip(lines, found, strict=what != "count"):
            assert line.strip().startswith(expected), lines


def _planned_differently(different: list[int], grid: tuple[int, int, int]) -> str:
    with engine_of(tp.layers(), section(), **parallel(grid)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        if engine.global_rank in different:
            engine.use_slice_plan(SlicePlan((9, 14)))
        with pytest.raises(BatchError) as caught:
            engine.train_batch(iter(batches(1)[0]))
        return str(caught.value)


@pytest.mark.parametrize(
    ("different", "grid"),
    [([1, 3], (2, 1, 2)), ([1], (2, 1, 2)), ([2], (1, 2, 2)), ([2, 3], (1, 1, 4))],
    ids=["a-whole-pipeline", "one-rank", "one-rank-of-a-replica", "some-of-four"],
)
def test_a_plan_that_only_some_ranks_set_is_an_error_on_all(different: list[int], grid: tuple[int, int, int]) -> None:
    for error in rank_pool(4).run(_planned_differently, different=different, grid=grid):
        assert "disagree" in error and "(9, 14)" in error and "Every rank must make the same calls" in error
        shown = error.split("slices set by hand")
        assert len(shown) == 2, "one side has a plan, the other none"


# -- slices in multiples -----------------------------------------------------------------------------------------


def _in_multiples(terapipe: dict[str, Any], length: int, by_hand: list[int]) -> tuple[list[int], int, str, str]:
    """The plan and the granularity of slices in multiples of two, and what is said to odd sequences and odd slices."""
    with engine_of(tp.layers(), terapipe, **parallel((2, 1, 2), tp.InMultiplesOfTwo)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        train(engine, batches(1, length=length))
        lengths = list(engine.slice_plan(length).lengths)
        with pytest.raises(BatchError) as odd:
            engine.train_batch(iter(batches(1, length=length - 1)[0]))
        with pytest.raises(ValueError, match="slice_length_multiple") as refused:
            engine.use_slice_plan(SlicePlan(tuple(by_hand)))
        return lengths, engine.terapipe_config.granularity_tokens, str(odd.value), str(refused.value)


@pytest.mark.parametrize(
    ("changes", "lengths", "granularity_tokens"),
    [
        ({"slices": 3}, [8, 8, 6], 2),
        ({"slices": 3, "granularity_tokens": 3}, [12, 6, 4], 6),  # 22 tokens are 4 granules of 6, the last one partial
        ({"slices": [2, 20]}, [2, 20], 1),
        ({"slices": "auto", "granularity_tokens": 5}, None, 10),
    ],
    ids=["number", "lcm", "listed", "auto"],
)
def test_slices_are_multiples_of_what_the_module_asks_for(
    changes: dict[str, Any], lengths: list[int] | None, granularity_tokens: int
) -> None:
    results = rank_pool(4).run(_in_multiples, terapipe=section(**changes), length=22, by_hand=[7, 15])
    assert len({tuple(found) for found, *_ in results}) == 1
    for found, granularity, odd, refused in results:
        assert granularity == granularity_tokens
        assert all(length % 2 == 0 for length in found) and sum(found) == 22
        assert found == (lengths or found)
        assert "a sequence of 21 tokens" in odd and "such as 22 tokens" in odd
        assert "use_slice_plan = [7, 15]: slices of 7, 15 tokens are no multiples of 2" in refused


def _odd_slices_listed() -> str:
    with pytest.raises(TeraPipeConfigError) as caught:
        with engine_of(tp.layers(), section(slices=[8, 9, 5]), **parallel((2, 1, 2), tp.InMultiplesOfTwo)):
            pass
    return str(caught.value)


def test_listed_slices_that_are_no_multiples_are_refused_on_all_ranks() -> None:
    for error in rank_pool(4).run(_odd_slices_listed):
        assert "terapipe.slices = [8, 9, 5]: slices of 9, 5 tokens are no multiples of 2" in error


def _another_length_and_on(grid: tuple[int, int, int]) -> tuple[str, float, float]:
    """What listed slices say to a sequence of another length, and training after it against an undisturbed run."""
    returned = []
    message = ""
    for disturbed in (False, True):
        with engine_of(tp.layers(), section(slices=[9, 13, 1]), **parallel(grid)) as engine:
            if disturbed:
                with pytest.raises(TeraPipeConfigError) as caught:
                    engine.train_batch(iter(batches(1, length=24)[0]))
                message = str(caught.value)
            returned.append(train(engine, batches(1)).returned[0])
    return message, returned[0], returned[1]


def test_tensor_parallel_ranks_of_one_replica_raise_alike_and_go_on() -> None:
    for message, undisturbed, after in rank_pool(4).run(_another_length_and_on, grid=(2, 1, 2)):
        assert "adds up to 23 tokens, but a sequence has 24" in message
        assert after == undisturbed
