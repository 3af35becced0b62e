"""Test slices under tensor parallelism: against the whole model on one rank, the data that ranks must share, and the
clipped update against a formula over the whole gradients.

Divided parameters count on every tensor-parallel rank in the norm, replicated ones once, and a tied weight once, also
if it is divided. With plain SGD a wrong norm shows in the update; Adam would hide it.
"""

from typing import Any
from unittest import mock

import deepspeed.runtime.engine as stock
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from tests.distributed import engines
from tests.distributed import tensor_parallel as tp
from tests.distributed.checkpoint_states import trained_copy
from tests.distributed.harness import rank_pool
from tests.distributed.tensor_parallel import parallel


def sharded(engine: PipelineEngine, run: engines.Run) -> engines.Run:
    """Return the results of a run of the whole model, cut down to the part of this tensor-parallel rank."""
    grid = engine.mpu
    rank, size = grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()
    dims = {n: p.partition_dim for n, p in engine.module.named_parameters() if hasattr(p, "partition_dim")}

    def part(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.chunk(size, dims[n])[rank] if n in dims else t for n, t in tensors.items()}

    return engines.Run(run.losses, run.returned, [part(g) for g in run.gradients], part(run.parameters))


def _against_the_whole(grid: tuple[int, int, int], terapipe: dict[str, Any]) -> dict[str, float]:
    """Compare with the stock engine on the whole model; each rank is a replica of it."""
    data = engines.batches(2)
    with engines.engine_of(tp.layers(), None, **parallel((1, torch.distributed.get_world_size(), 1))) as engine:
        reference = engines.train(engine, data)
    with engines.engine_of(tp.layers(), terapipe, **parallel(grid)) as engine:
        return engines.differences(engines.train(engine, data), sharded(engine, reference))


@pytest.mark.parametrize(
    ("grid", "terapipe"),
    [
        ((2, 1, 2), engines.section(slices=[9, 13, 1])),
        pytest.param((1, 2, 2), engines.section(schedule="terapipe"), marks=pytest.mark.full),
    ],
    ids=["tp2-pp2", "tp2-pp1-dp2"],
)
def test_a_step_is_that_of_the_whole_model(grid: tuple[int, int, int], terapipe: dict[str, Any]) -> None:
    assert engines.violations(rank_pool(4).run(_against_the_whole, grid=grid, terapipe=terapipe), engines.EXACT) == {}


# -- what the ranks must have alike --------------------------------------------------------------------------------

SEEDED = {
    "tp2-pp2": ((2, 1, 2), [[0, 1], [2, 3]]),
    "tp2-pp1-dp2": ((1, 2, 2), [[0, 1], [2, 3]]),
    "tp4-pp1": ((1, 1, 4), [[0, 1, 2, 3]]),
}


def _disagreements(grid: tuple[int, int, int]) -> tuple[dict[str, tuple[str, str]], float, float]:
    """Give some ranks other data than their peers; then train, against a run that was never refused a batch."""
    rank, data = torch.distributed.get_rank(), engines.batches(1, num_micro_batches=3)[0]
    is_odd, own = rank in (1, 3), engines.batches(1, first_seed=1000 * rank)[0]
    terapipe = engines.section(slices=[9, 13, 1], verify="off")
    with engines.engine_of(tp.layers(), terapipe, **parallel(grid)) as engine:
        undisturbed = engines.train(engine, engines.batches(2))
    with engines.engine_of(tp.layers(), terapipe, **parallel(grid)) as engine:
        found = {
            "samples": engines.step_error(engine, own),
            "order": engines.step_error(engine, data[::-1] if is_odd else data),
            "labels": engines.step_error(engine, [(x, y.roll(1, dims=0)) if is_odd else (x, y) for x, y in data]),
            "evaluation": engines.raised_by(lambda: engine.eval_batch(iter(own))),
        }
        if grid == (2, 1, 2):
            found["length"] = engines.step_error(engine, engines.batches(1, length=24)[0])
        engine.train()
        size = engine.train_batch_size()
        engine.set_train_batch_size(size + is_odd * size // 2)
        found["count"] = engines.step_error(engine, data)
        engine.set_train_batch_size(size)
        return found, engines.train(engine, engines.batches(2)).returned[1], undisturbed.returned[1]


def _lines(error: tuple[str, str]) -> list[str]:
    return [line.strip() for line in error[1].splitlines()[1:-1]]


@pytest.mark.parametrize(("grid", "peers"), SEEDED.values(), ids=list(SEEDED))
@pytest.mark.sample(1)
def test_peers_with_other_data_are_an_error_on_every_rank(grid: tuple[int, int, int], peers: list[list[int]]) -> None:
    results = rank_pool(4).run(_disagreements, grid=grid)
    for rank, (found, after, undisturbed) in enumerate(results):
        assert after == undisturbed, "nothing of the refused batches stays"
        kind, text = found.pop("length", ("", ""))
        refuses = "TeraPipeConfigError" if rank >= 2 else "BatchError"  # the stage of the loss tells the others
        assert kind == (refuses if grid == (2, 1, 2) else "")
        assert not kind or "adds up to 23 tokens, but a sequence has 24" in text
        assert {kind for kind, _ in found.values()} == {"BatchError"}
        for name in ("samples", "evaluation"):
            assert "seed and divide the sampler by the data-parallel rank" in found[name][1]
            assert all(f"tensor-parallel ranks {ranks}" in found[name][1] for ranks in peers)
        if grid == (2, 1, 2):
            inputs, labels = "inputs of tensor-parallel ranks [0, 1] (st", "labels of tensor-parallel ranks [2, 3] (st"
            assert [line[: len(inputs)] for line in _lines(found["order"])] == [inputs, labels]
            assert [line[: len(labels)] for line in _lines(found["labels"])] == [labels]
            count = "tensor-parallel ranks [0, 1] (stage 0, replica 0): ranks [0]: 2 micro-batches; ranks [1]: 3 mi"
            assert _lines(found["count"])[0].startswith(count)
    what = [line.split()[0] for line in _lines(results[0][0]["samples"])]
    assert what == (["inputs", "labels"] if grid[0] == 2 else ["inputs", "labels"] * grid[1])
    assert len({found["samples"] for found, *_ in results}) == 1, "all say the same"


def _planned_differently(different: list[int], grid: tuple[int, int, int]) -> str:
    with engines.engine_of(tp.layers(), engines.section(verify="off"), **parallel(grid)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        if engine.global_rank in different:
            engine.use_slice_plan(SlicePlan((9, 14)))
        kind, text = engines.step_error(engine)
        assert kind == "BatchError"
        return text


@pytest.mark.parametrize(
    ("different", "grid"),
    [([1, 3], (2, 1, 2)), ([1], (2, 1, 2)), ([2], (1, 2, 2)), ([2, 3], (1, 1, 4))],
    ids=["a-whole-pipeline", "one-rank", "one-rank-of-a-replica", "some-of-four"],
)
@pytest.mark.sample(1)
def test_a_plan_that_only_some_ranks_set_is_an_error_on_all(different: list[int], grid: tuple[int, int, int]) -> None:
    for error in rank_pool(4).run(_planned_differently, different=different, grid=grid):
        assert "disagree" in error and "[9, 14]" in error and "Every rank must make the same calls" in error
        shown = error.split("slices set by hand")
        assert len(shown) == 2, "one side has a plan, the other none"


# -- slices in multiples -----------------------------------------------------------------------------------------


def _in_multiples(terapipe: dict[str, Any], length: int, by_hand: list[int]) -> tuple[list[int], int, str, str]:
    """Return plan and granularity of slices in multiples of two, and the errors for odd sequences and slices."""
    with engines.engine_of(tp.layers(), terapipe, **parallel((2, 1, 2), tp.InMultiplesOfTwo)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        engines.train(engine, engines.batches(1, length=length))
        lengths = list(engine.slice_plan(length).lengths)
        _, odd = engines.step_error(engine, engines.batches(1, length=length - 1)[0])
        _, refused = engines.raised_by(lambda: engine.use_slice_plan(SlicePlan(tuple(by_hand))))
        assert "slice_length_multiple" in refused
        return lengths, engine.terapipe_config.granularity_for(length), odd, refused


@pytest.mark.parametrize(
    ("changes", "lengths", "granularity_tokens"),
    [
        ({"slices": 3, "granularity_tokens": 3}, [12, 6, 4], 6),  # 22 tokens are 4 granules of 6, the last one partial
        ({"slices": [2, 20]}, [2, 20], 2),
        ({"slices": "auto", "granularity_tokens": 5}, None, 10),
        ({"slices": 3}, [8, 8, 6], 2),
    ],
    ids=["lcm", "listed", "auto", "number"],
)
@pytest.mark.sample(1)
def test_slices_are_multiples_of_what_the_module_asks_for(
    changes: dict[str, Any], lengths: list[int] | None, granularity_tokens: int
) -> None:
    terapipe = engines.section(verify="off", **changes)
    results = rank_pool(4).run(
        engines.with_few_rounds, job=_in_multiples, terapipe=terapipe, length=22, by_hand=[7, 15]
    )
    assert len({tuple(found) for found, *_ in results}) == 1
    for found, granularity, odd, refused in results:
        assert granularity == granularity_tokens
        assert all(length % 2 == 0 for length in found) and sum(found) == 22
        assert found == (lengths or found)
        assert "a sequence of 21 tokens" in odd and "such as 22 tokens" in odd
        assert "use_slice_plan = [7, 15]: slices of 7, 15 tokens are no multiples of 2" in refused


# -- the gradient norm and the clipped update ------------------------------------------------------------------


LEARNING_RATE = 0.5
SGD = {"optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}}, "zero_allow_untested_optimizer": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BF16, ZERO_1 = {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}

KINDS: dict[str, tuple[str, dict[str, Any], float]] = {  # dtype, config, limit; DeepSpeed's norms are fp32
    "fp64": ("float64", {}, 1e-6),
    "fp32": ("float32", {}, 1e-5),
    "fp32-zero1": ("float32", ZERO_1, 1e-5),
    "bf16": ("bfloat16", BF16, 2e-3),
    "bf16-zero1": ("bfloat16", {**BF16, **ZERO_1}, 2e-3),
    "fp16-unfused": ("float16", FP16, 2e-3),
    "fp16-fused": ("float16", FP16, 2e-3),
    "fp16-zero1": ("float16", {**FP16, **ZERO_1}, 2e-3),
}


def _whole_gradients(engine: PipelineEngine, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return every gradient of the model, once: shares joined, replicated and tied ones taken from one rank."""
    grid = engine.mpu
    place = grid.get_stage_id(), grid.get_slice_parallel_rank(), grid.get_data_parallel_rank()
    dims = {n: getattr(p, "partition_dim", None) for n, p in engine.module.named_parameters()}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (place, {n: (g.double(), dims[n]) for n, g in mine.items()}))
    found: dict[str, list[tuple[int, Tensor, int | None]]] = {}
    for (_, rank, replica_id), gradients in sorted(everyone, key=lambda each: each[0]):
        for name, (gradient, dim) in gradients.items():
            places = found.setdefault(name, [])
            if replica_id == 0 and rank not in [other for other, *_ in places]:
                places.append((rank, gradient, dim))
    return {
        name: parts[0][1] if parts[0][2] is None else torch.cat([part for _, part, _ in parts], dim=parts[0][2])
        for name, parts in found.items()
    }


def _weights(engine: PipelineEngine) -> dict[str, Tensor]:
    """Return the weights as precisely as they are kept."""
    return {n: trained_copy(engine, p).detach().clone() for n, p in engine.module.named_parameters()}


def _norm_and_update(grid: tuple[int, int, int], kind: str) -> tuple[float, float, float, str]:
    """Return the relative errors of the norm and of the clipped update, the norm, and the optimizer's class."""
    dtype, changes, _ = KINDS[kind]
    options, terapipe = {**parallel(grid), **SGD, **changes}, engines.section(verify="off")
    data = engines.batches(1)
    # DeepSpeed takes its fused fp16 optimizer for its own Adam only, which would have to be compiled
    fused = torch.optim.SGD if kind == "fp16-fused" else stock.FusedAdam
    with mock.patch.object(stock, "FusedAdam", fused):
        with engines.engine_of(tp.layers(dtype), terapipe, **options) as engine:
            (mine,) = engines.train(engine, data).gradients
            whole = _whole_gradients(engine, mine)
        norm = float(torch.cat([gradient.flatten() for gradient in whole.values()]).norm())
        limit = norm / 4
        with engines.engine_of(tp.layers(dtype), terapipe, **options, gradient_clipping=limit) as engine:
            before = _weights(engine)
            engines.train(engine, data)
            after, found = _weights(engine), engine.get_global_grad_norm()
            name = type(engine.optimizer).__name__
    error = 0.0 if found is None else abs(float(found) / norm - 1)
    steps = torch.cat([(after[n] - before[n]).double().flatten() for n in mine])
    expected = torch.cat([-LEARNING_RATE * limit / norm * mine[n].double().flatten() for n in mine])
    return error, engines.relative_error(steps, expected), norm, name


CASES = {
    **{("tp2-pp2", kind): (2, 1, 2) for kind in KINDS},
    ("tp2-dp2", "fp32-zero1"): (1, 2, 2),
    ("pp2-dp2", "fp16-unfused"): (2, 2, 1),
    ("pp4", "bf16"): (4, 1, 1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_clipped_update_is_that_of_the_whole_gradient(case: tuple[str, str]) -> None:
    limit = KINDS[case[1]][2]
    for error, update, norm, name in rank_pool(4).run(_norm_and_update, grid=CASES[case], kind=case[1]):
        assert error <= limit and update <= 10 * limit, (error, update, norm, name)
