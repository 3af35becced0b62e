"""Test peaks of tensor bytes in real steps against the planner's predictions before the first step."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from studies.memory import counted_model, in_place_model, measure_peak
from studies.options import batches
from terapipe_ds.bench.ranks import Workload, build_engine
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay
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
