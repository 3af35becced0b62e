"""Test the gradient norm and the clipped update under tensor parallelism, against a formula over the whole gradients.

Divided parameters count on every tensor-parallel rank, replicated ones once, and a tied weight once, also if it is
divided. With plain SGD a wrong norm shows in the update; Adam would hide it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from tests.distributed import tensor_parallel as tp
from tests.distributed.checkpoint_states import trained_copy
from tests.distributed.engines import batches, engine_of, relative_error, section, train
from tests.distributed.harness import rank_pool
from tests.distributed.tensor_parallel import parallel

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


@contextlib.contextmanager
def _fused(wanted: bool) -> Iterator[None]:
    """DeepSpeed takes its fused fp16 optimizer for its own Adam only, which would have to be compiled."""
    import deepspeed.runtime.engine as stock

    usual = stock.FusedAdam
    stock.FusedAdam = torch.optim.SGD if wanted else usual
    try:
        yield
    finally:
        stock.FusedAdam = usual


def _norm_and_update(grid: tuple[int, int, int], kind: str) -> tuple[float, float, float, str]:
    """Return the relative errors of the norm and of the clipped update, the norm, and the optimizer's class."""
    dtype, changes, _ = KINDS[kind]
    options = {**parallel(grid), **SGD, **changes}
    data = batches(1)
    with _fused(kind == "fp16-fused"):
        with engine_of(tp.layers(dtype), section(), **options) as engine:
            (mine,) = train(engine, data).gradients
            whole = _whole_gradients(engine, mine)
        norm = float(torch.cat([gradient.flatten() for gradient in whole.values()]).norm())
        limit = norm / 4
        with engine_of(tp.layers(dtype), section(), **options, gradient_clipping=limit) as engine:
            before = _weights(engine)
            train(engine, data)
            after, found = _weights(engine), engine.get_global_grad_norm()
            name = type(engine.optimizer).__name__
            if found is not None and name == "FP16_UnfusedOptimizer":  # says the norm of the scaled gradients
                found /= engine.optimizer.loss_scale_config.cur_scale
    error = 0.0 if found is None else abs(float(found) / norm - 1)
    steps = torch.cat([(after[n] - before[n]).double().flatten() for n in mine])
    expected = torch.cat([-LEARNING_RATE * limit / norm * mine[n].double().flatten() for n in mine])
    return error, relative_error(steps, expected), norm, name


CASES = {
    **{("tp2-pp2", kind): (2, 1, 2) for kind in KINDS},
    ("tp2-dp2", "fp32-zero1"): (1, 2, 2),
    ("pp2-dp2", "fp16-unfused"): (2, 2, 1),
    ("pp4", "bf16"): (4, 1, 1),
}
BY_DEFAULT = {("tp2-pp2", "fp64"), ("tp2-pp2", "bf16"), ("tp2-dp2", "fp32-zero1"), ("pp2-dp2", "fp16-unfused")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case not in BY_DEFAULT)) for case in CASES], ids="-".join
)
def test_the_clipped_update_is_that_of_the_whole_gradient(case: tuple[str, str]) -> None:
    limit = KINDS[case[1]][2]
    for error, update, norm, name in rank_pool(4).run(_norm_and_update, grid=CASES[case], kind=case[1]):
        assert error <= limit and update <= 10 * limit, (error, update, norm, name)
