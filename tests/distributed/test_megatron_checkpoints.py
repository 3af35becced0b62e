"""Checkpoints of GPTs of megatron-core layers: the same layout, another plan and schedule, another TP x PP x DP.

Who wrote a checkpoint trains on, and so does who read it; both must see the same. States are compared whole, put
together over tensor-parallel ranks by what megatron-core says of its layers, not by what the converter is told.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch.distributed as torch_dist

from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.megatron_layouts import (
    Layout,
    Training,
    convert,
    data,
    engine_of,
    merged,
    saved_state,
    train,
    whole_state,
    worst_errors,
)

TENSOR_STAGES = Layout(tensor=2, stages=2, sequence_parallel=True)
LAYOUTS = [Layout(1, 2), Layout(2, 1), Layout(1, 1)]  # of four ranks: two, two and four replicas
OTHER_PLAN = {"schedule": "terapipe", "slices": (6, 12, 2, 4)}
# what four roundings of bf16 in another order do to losses; moments of single tensors differ by up to 0.03 per step
LIMITS = {"fp32": 1e-5, "bf16": 3e-3}


def limit_of(training: Training) -> float:
    return LIMITS[training.precision.split("_")[0]]


# -- jobs ----------------------------------------------------------------------------------------------------


def job_write(layout: Layout, training: Training, folder: str, converted: bool = False) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps more; what was saved and how it went on."""
    with engine_of(layout, training) as engine:
        train(engine, data(2))
        engine.save_checkpoint(folder, tag="two", client_state={"epoch": 7})
        found: dict[str, Any] = {"saved": saved_state(engine), "whole": whole_state(engine)}
        found["losses"] = train(engine, data(2, first_seed=900))
        found["later"] = saved_state(engine)
        found["whole later"] = whole_state(engine)
    if converted:
        if torch_dist.get_rank() == 0:
            convert(folder, "two")
        torch_dist.barrier()
    return found


def job_read(layout: Layout, training: Training, folder: str, tag: str | None = None, **options: Any) -> dict[str, Any]:
    """One step, so that there is something to overwrite, then what was saved, then two steps."""
    with engine_of(layout, training) as engine:
        train(engine, data(1, first_seed=400))
        before = saved_state(engine)
        _, client_state = engine.load_checkpoint(folder, tag=tag, **options)
        found: dict[str, Any] = {"before": before, "saved": saved_state(engine)}
        if training.universal:
            found["whole"] = whole_state(engine)
        found["steps"], found["epoch"] = engine.global_steps, client_state.get("epoch")
        found["losses"] = train(engine, data(2, first_seed=900))
        found["later"] = saved_state(engine)
        found["whole later"] = whole_state(engine) if training.universal else None
    return found


def losses(results: list[dict[str, Any]]) -> list[float]:
    """Of the last stages, all of which must tell the same."""
    told = [result["losses"] for result in results if result["losses"]]
    assert np.ptp(np.array(told), axis=0).max() == 0.0
    return told[0]


def errors_of(results: list[dict[str, Any]], expected: list[dict[str, Any]], when: str) -> dict[str, float]:
    whole = [merged([result[when] for result in each]) for each in (results, expected)]
    return worst_errors(whole[0], whole[1])


# -- the same layout -----------------------------------------------------------------------------------------


def assert_all_equal(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    "training",
    [
        Training("fp32", tied=True, positions="learned_absolute"),
        Training("fp32_zero1"),
        Training("bf16_zero1", tied=True),
        Training("bf16", gated=False),
    ],
    ids=str,
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(training: Training, tmp_path: Path) -> None:
    pool = rank_pool(4)
    written = pool.run(job_write, layout=TENSOR_STAGES, training=training, folder=str(tmp_path))
    read = pool.run(job_read, layout=TENSOR_STAGES, training=training, folder=str(tmp_path))
    for writer, reader in zip(written, read, strict=True):
        assert_all_equal(reader["saved"], writer["saved"])
        assert_all_equal(reader["later"], writer["later"])
        assert any(not np.array_equal(value, writer["saved"][name]) for name, value in reader["before"].items())
        assert (reader["steps"], reader["epoch"]) == (2, 7)
    assert losses(read) == losses(written)
    if training.tied:
        first, last = (read[rank]["saved"]["tied_modules.embedding.word_embeddings.weight"] for rank in (0, 2))
        np.testing.assert_array_equal(first, last)


def test_it_goes_on_under_another_plan_and_schedule(tmp_path: Path) -> None:
    pool, training = rank_pool(4), Training("fp32_zero1", tied=True)
    written = pool.run(job_write, layout=TENSOR_STAGES, training=training, folder=str(tmp_path))
    other = Training("fp32_zero1", tied=True, **OTHER_PLAN)
    read = pool.run(job_read, layout=TENSOR_STAGES, training=other, folder=str(tmp_path))
    for writer, reader in zip(written, read, strict=True):
        assert_all_equal(reader["saved"], writer["saved"])
    np.testing.assert_allclose(losses(read), losses(written), rtol=limit_of(training))


# -- another layout, through a universal checkpoint ----------------------------------------------------------

UNIVERSAL = [
    Training("fp32_zero1"),
    Training("bf16_zero1", tied=True, gated=False, positions="learned_absolute"),
]


@pytest.fixture(scope="module", params=UNIVERSAL, ids=str)
def universal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(training, folder, results) of a universal checkpoint that TP2 x PP2 wrote."""
    folder = tmp_path_factory.mktemp("universal")
    results = rank_pool(4).run(
        job_write, layout=TENSOR_STAGES, training=request.param, folder=str(folder), converted=True
    )
    return request.param, folder, results


def read_universal(layout: Layout, training: Training, folder: Path) -> list[dict[str, Any]]:
    changes = {**vars(training), "universal": True, **OTHER_PLAN}
    return rank_pool(4).run(job_read, layout=layout, training=Training(**changes), folder=str(folder))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_universal_checkpoint_is_loaded_by_another_layout(layout: Layout, universal: Any) -> None:
    training, folder, written = universal
    read = read_universal(layout, training, folder)
    assert errors_of(read, written, "whole") == {"lp": 0.0, "fp32": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    np.testing.assert_allclose(losses(read), losses(written), rtol=limit_of(training))
    assert {(result["steps"], result["epoch"]) for result in read} == {(2, 7)}
    if training.precision == "fp32_zero1":
        assert max(errors_of(read, written, "whole later").values()) <= 1e-5


def test_and_back(tmp_path: Path) -> None:
    """From four replicas, whose partitions cut through parameters, to TP2 x PP2."""
    training = Training("fp32_zero1", tied=True)
    written = rank_pool(4).run(
        job_write, layout=Layout(1, 1), training=training, folder=str(tmp_path), converted=True
    )
    read = read_universal(TENSOR_STAGES, training, tmp_path)
    assert errors_of(read, written, "whole") == {"lp": 0.0, "fp32": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    np.testing.assert_allclose(losses(read), losses(written), rtol=limit_of(training))
