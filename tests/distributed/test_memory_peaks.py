"""Test peaks of tensor bytes in real steps against the planner's predictions before the first step."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import engine as pipe_engine
from torch import Tensor, nn

import terapipe_ds
from studies.levers import host_bytes
from studies.memory import counted_model, in_place_model, measure_peak
from studies.options import batches
from terapipe_ds.bench.ranks import USUAL_SETTINGS, Workload, build_engine
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.costs.profile import Profile
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import model_memory
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.schedule import build
from terapipe_ds.schedule.proofs import OUTSTANDING_SENDS
from terapipe_ds.simulator import Replay
from terapipe_ds.simulator.peak_memory import bytes_of_stage
from tests.distributed.engines import few_rounds
from tests.distributed.harness import RankPool

WORK = Workload(stages=2, accumulation=1, sequence_length=512, micro_batch=2, hidden=64, layers=4, heads=4)
CASES = [  # schedule, slices, micro-batches
    ("seq1f1b", (512,), 2),
    ("seq1f1b", (256, 128, 128), 3),
    ("terapipe", (64,) * 8, 2),
    ("1f1b", (128,) * 4, 3),
    ("seq1f1b-zb", (128,) * 4, 3),
]
BELOW, OVER = -0.02, 0.04  # tolerated errors of a peak, and of its part above parameters, gradients, optimizer states

Peak = tuple[int, int]  # measured, and of it static


def _measured(folder: str) -> tuple[list[Peak], MemoryModel, MemoryModel]:
    """Return this rank's peaks of all cases; and the models of all stages, counted and measured in place."""
    import torch.distributed as torch_dist

    section = {"enabled": True, "schedule": "seq1f1b", "slices": "auto", "planner": {"cache_dir": folder}}
    engine, data = build_engine(section, WORK), batches(WORK)
    try:
        engine.train_batch(data)  # measures
        torch_dist.barrier()
        models = counted_model(engine, WORK), in_place_model(Path(folder))
        peaks = []
        for schedule, lengths, micro_batches in CASES:
            engine.set_train_batch_size(WORK.micro_batch * micro_batches)
            engine.use_slice_plan(SlicePlan(lengths), schedule)
            peaks.append(measure_peak(engine, data))
    finally:
        engine.destroy()
    return peaks, *models


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Peak]], dict[str, MemoryModel]]:
    """Return per stage the peaks of all cases, and the models."""
    with contextlib.closing(RankPool(2)) as pool:  # of its own: the leftovers of other tests' engines would count
        ranks = pool.run(_measured, folder=str(tmp_path_factory.mktemp("profiles")))
    (_, counted, in_place), _ = ranks
    return [peaks for peaks, *_ in ranks], {"counted": counted, "in place": in_place}


def _errors(
    peaks: list[list[Peak]], model: MemoryModel, wrong: str | None = None, count: int | None = None
) -> list[tuple[float, float]]:
    """Return for each case and stage the error of the whole peak, and of its part above static memory. `wrong` and
    `count` are predicted in place of the schedule and its micro-batches."""
    found = []
    for case, (schedule, lengths, micro_batches) in enumerate(CASES):
        orders = build(wrong or schedule, 2, count or micro_batches, len(lengths))
        predicted = Replay.of(orders).peak_bytes(SlicePlan(lengths), model)
        for stage_id in range(2):
            measured, static = peaks[stage_id][case]
            found.append((predicted[stage_id] / measured - 1, (predicted[stage_id] - static) / (measured - static) - 1))
    return found


def _fits(errors: list[tuple[float, float]]) -> bool:
    return all(BELOW <= error <= OVER for pair in errors for error in pair)


@pytest.mark.parametrize("name", ["counted", "in place"])
def test_predicted_peaks_are_the_measured_ones(measured: Any, name: str) -> None:
    peaks, models = measured
    assert _fits(_errors(peaks, models[name])), _errors(peaks, models[name])


@pytest.mark.parametrize("name", ["counted", "in place"])
@pytest.mark.parametrize(
    "left_out",
    [
        {"store_bytes_per_token": 0.0},
        {"store_grad_bytes_per_token": 0.0},
        {"slice_bytes_per_token": 0.0},
        {"whole_bytes_per_token": 0.0},
        {"static_bytes": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_model_that_leaves_something_out_is_noticed(measured: Any, name: str, left_out: dict[str, float]) -> None:
    peaks, models = measured
    less = MemoryModel(tuple(replace(part, **left_out) for part in models[name].parts))
    assert not _fits(_errors(peaks, less))


def test_a_wrong_number_of_live_slices_is_noticed(measured: Any) -> None:
    """With one slice live at a time, or all of them until the end of the batch."""
    peaks, models = measured
    assert not _fits(_errors(peaks, models["counted"], count=1))
    assert not _fits(_errors(peaks, models["counted"], wrong="gpipe"))


SMALL = replace(WORK, sequence_length=256)
BUCKET = 4_000_000  # numbers that ZeRO-1 reduces at once; a usual bucket is much larger than the model
ZERO: dict[str, Any] = {"stage": 1, "reduce_bucket_size": BUCKET}
ON_HOST = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": ZERO | {"offload_optimizer": {"device": "cpu"}}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
AWAY = {"offload_activations": True, "recompute": "full"}
SETTINGS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "sums in bf16, states divided": (1, 4, BF16, {}),
    "fp32 copies, a bucket": (1, 4, {"zero_optimization": ZERO}, {}),
    "states on the host": (1, 4, BF16 | ON_HOST, {}),
    "gradients that wait": (1, 4, BF16 | {"zero_optimization": ZERO, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
    "activations on the host": (2, 8, {}, AWAY),
}
"""Stages, slices, DeepSpeed's settings and keys of the section, for two ranks."""


class Scale(nn.Module):
    """Multiply by the mean of a large weight. As for experts, autograd makes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400_000, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.mean()


def _with_scales(config: gpt.GPTConfig, make: Any = gpt.gpt_layers) -> list[Any]:
    embedding, *others = make(config)
    return [embedding, *(LayerSpec(Scale) for _ in range(4)), *others]


UNJOINED: dict[str, Any] = {"zero_optimization": {"stage": 1, "contiguous_gradients": False}}
NARROW: dict[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4}}
PIECES = "sums in fp32, reduced in pieces"
FP32_SUMS: dict[str, Any] = BF16 | UNJOINED | {"data_types": {"grad_accum_dtype": "fp32"}}
STEPS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "fp16": (2, 2, FP16, {}),
    "bf16": (2, 2, BF16, {}),
    "ZeRO-1 in fp32": (2, 2, UNJOINED, {}),
    "ZeRO-1 in bf16": (2, 2, BF16 | UNJOINED, {}),
    "copies and states in bf16": (2, 2, NARROW | UNJOINED, {}),
    "fp32": (2, 2, {}, {}),
    "sums in fp32 of two groups": (2, 2, FP32_SUMS, {}),
    PIECES: (2, 2, FP32_SUMS, {}),
}
"""The same, for short sequences: the peak is in the optimizer's step, or in the reduction before."""


INITIALIZE = terapipe_ds.initialize


def _in_two_groups(model: Any, model_parameters: list[nn.Parameter], config: dict[str, Any]) -> Any:
    """Initialize with vectors in a group of their own, as programs do that give them no weight decay."""
    groups = [{"params": [p for p in model_parameters if (p.ndim > 1) is is_matrix]} for is_matrix in (True, False)]
    return INITIALIZE(model=model, model_parameters=groups, config=config)


def _in_setting(name: str, folder: str) -> tuple[int, float]:
    """Return the stage, and the predicted peak over the measured one."""
    import torch.distributed as torch_dist

    stages, slices, settings, keys = (SETTINGS | STEPS)[name]
    count = 4 if keys else 1  # micro-batches; many would hide the optimizer's bytes
    # beside a CPU every recomputed layer of a slice keeps 5 KB of random state
    work = replace(SMALL, stages=stages, micro_batch=16 if keys else 2)
    if name in STEPS:
        work = replace(work, sequence_length=32, hidden=256, layers=16 if name == PIECES else 8, micro_batch=1)
    section = {"enabled": True, "schedule": "terapipe", "slices": "auto", "planner": {"cache_dir": folder}} | keys
    ds_config = USUAL_SETTINGS | {"zero_allow_untested_optimizer": True} | settings
    dtype = {"dtype": "bfloat16" if "bf16" in settings else "float16" if "fp16" in settings else "float32"}
    make = _with_scales if name == "gradients that wait" else gpt.gpt_layers
    numbers = 10_000 if name == PIECES else 500_000_000
    initialize = _in_two_groups if "groups" in name else terapipe_ds.initialize
    with (
        mock.patch.object(gpt, "gpt_layers", make),
        mock.patch.object(terapipe_ds, "initialize", initialize),
        mock.patch.object(pipe_engine, "MEMORY_OPT_ALLREDUCE_SIZE", numbers),
        mock.patch.object(model_memory, "_REDUCED_AT_ONCE", numbers),
        few_rounds(),
    ):
        engine, data = build_engine(section, work, ds_config=ds_config, gpt=dtype), batches(work)
        try:
            engine.train_batch(data)
            torch_dist.barrier()
            model = replace(in_place_model(Path(folder)), offloads="offload_activations" in keys)
            plan = SlicePlan.equal(work.sequence_length, slices)
            engine.set_train_batch_size(work.micro_batch * count * 2 // stages)
            engine.use_slice_plan(plan)
            peak = measure_peak(engine, data)[0] - host_bytes(engine, engine.zero_cpu_offload())
            predicted = Replay.of(build("terapipe", stages, count, slices)).peak_bytes(plan, model)
            return engine.stage_id, predicted[engine.stage_id] / peak
        finally:
            engine.destroy()


@pytest.mark.parametrize("name", SETTINGS | STEPS)
def test_measured_models_know_the_optimizer_and_the_host(name: str, tmp_path: Path) -> None:
    with contextlib.closing(RankPool(2)) as pool:
        ratios = [ratio for _, ratio in pool.run(_in_setting, name=name, folder=str(tmp_path))]
    assert all(0.95 <= ratio <= 1.07 for ratio in ratios), ratios
    (path,) = tmp_path.glob("profile-*.json")
    assert Profile.load(path).state_ranks == 2 // (SETTINGS | STEPS)[name][0]


def _gradients_of_tied_ends(schedule: str, dtype: str) -> tuple[int, int, int]:
    """Return the bytes of the gradients as a rank with both ends begins to step, those that are counted, and those of
    the tied matrix."""
    work = replace(WORK, stages=1, accumulation=2, sequence_length=64)
    section = {"enabled": True, "schedule": schedule, "chunks_per_stage": 2, "slices": 2, "verify": "off"}
    settings = USUAL_SETTINGS | ({"fp16": {"enabled": True}} if dtype == "float16" else {})
    engine = build_engine(section, work, ds_config=settings, gpt={"tied_embedding": True, "dtype": dtype})
    step, found = engine.optimizer.step, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad.untyped_storage() for p in engine.module.parameters() if p.grad is not None]
        found.append(sum({each.data_ptr(): each.nbytes() for each in gradients}.values()))
        return step(*args, **kwargs)

    layers = [layer for layer in engine.module.modules() if isinstance(layer, gpt.DecoderLayer)]
    try:
        with mock.patch.object(engine.optimizer, "step", counting):
            engine.train_batch(batches(work))
    finally:
        engine.destroy()
    of_head, width = layers[0].attention.head_dim, layers[0].feed_forward.down.in_features
    size = ModelSize("tied", work.layers, work.hidden, work.heads, work.heads, of_head, width, 256, 64,
                     tied_embedding=True)  # fmt: skip
    model = MemoryModel.of_model(size, num_stages=2, dtype=dtype, micro_batch=work.micro_batch, on_cpu=True)
    order, spans = build(schedule, 1, 2, 2, chunks_per_stage=2), [[(0, 32), (32, 64)]] * 2
    begin, *_, end = bytes_of_stage(order, 0, spans, model, OUTSTANDING_SENDS)
    return found[0], end - begin - model.step_bytes(0, 1), 256 * work.hidden * (2 if dtype == "float16" else 4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("schedule", ["seq1f1b-interleaved", "zbv"])
def test_the_gradient_of_a_tied_matrix_counts_once_where_a_stage_has_both_ends(schedule: str, dtype: str) -> None:
    with contextlib.closing(RankPool(1)) as pool:
        ((measured, counted, of_matrix),) = pool.run(_gradients_of_tied_ends, schedule=schedule, dtype=dtype)
    assert counted == measured > of_matrix
