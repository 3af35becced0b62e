"""Test the memory that a stage holds for batches, and pipelines beside each other."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

import terapipe_ds
from terapipe_ds.runtime.planning import plans as plans_module
from tests.distributed.engines import (
    CHECKPOINTING,
    FP32_SCALAR,
    LENGTH,
    batches,
    engine_of,
    gpt_layers,
    micro_batch,
    raised_by,
    section,
    step_error,
    stock_run,
    train,
)
from tests.distributed.harness import rank_pool

# -- memory --------------------------------------------------------------------------------------------------


def predicted_peak(orders: Sequence[str], num_slices: int, kv_bytes: int, grad_bytes: int) -> int:
    """Keep keys and values from a micro-batch's first F to its last B, gradients from its first to its last B."""
    live_kv = live_grads = peak = 0
    for action in orders:
        kind, slice_id = action[0], int(action.split(".")[1])
        live_kv += kind == "F" and slice_id == 0
        live_grads += kind == "B" and slice_id == num_slices - 1
        peak = max(peak, live_kv * kv_bytes + live_grads * grad_bytes)
        live_kv -= kind == "B" and slice_id == 0
        live_grads -= kind == "B" and slice_id == 0
    return peak


def job_memory(schedule: str, stages: int, micro_batches: int, dtype: str, **options: Any) -> dict[str, Any]:
    options["gradient_accumulation_steps"] = micro_batches
    options["module"] = {"partition_method": "type:DecoderLayer"}
    terapipe = section(schedule=schedule)
    with engine_of(gpt_layers(dtype=dtype), terapipe, stages=stages, **options) as engine:
        store, reserved = engine.slice_store, []
        for batch in batches(3, micro_batches):
            engine.train_batch(iter(batch))
            reserved.append(store.pool.reserved_bytes)
            assert store.pool.live_bytes == 0
        layers = sum(type(layer).__name__ == "DecoderLayer" for layer in engine.module.forward_funcs)
        return {"peak": store.pool.peak_bytes, "reserved": reserved, "layers": layers, "stage": engine.stage_id}


MEMORY = [
    ("terapipe", 2, 3, "float64", {}),
    ("seq1f1b", 3, 4, "float64", {}),
    ("seq1f1b", 2, 3, "float32", {"bf16": {"enabled": True}, **CHECKPOINTING["reentrant"]}),
]


def job_lengths() -> tuple[list[int], int]:
    """Return the reserved bytes after batches of alternating lengths, and the peak of a whole sequence."""
    with engine_of(gpt_layers(), section()) as engine:
        reserved = []
        for length in (LENGTH, 12, 40) * 2:
            engine.train_batch(iter(batches(1, length=length)[0]))
            engine.eval_batch(iter(batches(1, length=length)[0]))
            reserved.append(engine.slice_store.pool.reserved_bytes)
    with engine_of(gpt_layers(), section(slices=1)) as engine:
        engine.train_batch(iter(batches(1)[0]))
        return reserved, engine.slice_store.pool.peak_bytes


def job_kept_schedules() -> list[int]:
    """Return how many schedules the links keep data of, after batches of one to four micro-batches."""
    kept = []
    with mock.patch.object(plans_module, "_SCHEDULES_KEPT", 2), engine_of(gpt_layers(), section()) as engine:
        for count in range(1, 5):
            engine.set_train_batch_size(2 * count)
            engine.train_batch(iter(batches(1, count)[0]))
            kept.append(len(engine._stage.links._of_schedules))
    return kept


def job_engines_left(**changes: Any) -> int:
    """Close engines without references, and count the engines that still exist."""

    def train_one() -> Any:
        with engine_of(gpt_layers(), section(**changes)) as engine:
            train(engine, batches(1))
            return weakref.ref(engine)

    left = [train_one() for _ in range(2)]
    gc.collect()
    return sum(ref() is not None for ref in left)


def job_falsified_peak(change: int) -> tuple[str, str]:
    with engine_of(gpt_layers(), section(), stages=1) as engine:
        true_schedule = engine._train_schedule

        def falsified() -> Any:
            schedule = true_schedule()
            return dataclasses.replace(schedule, peak_live_slices=schedule.peak_live_slices + change)

        engine._train_schedule = falsified
        return step_error(engine)


class TestMemory:
    @pytest.mark.parametrize("schedule", ["seq1f1b", "seq1f1b-zb"])
    def test_an_engine_that_nobody_holds_goes(self, schedule: str) -> None:
        """Check a former leak: the last loss held its graph, and the graph the engine, which no collector can see."""
        assert rank_pool(2).run(job_engines_left, schedule=schedule) == [0, 0]

    @pytest.mark.parametrize(("schedule", "stages", "micro_batches", "dtype", "options"), MEMORY)
    def test_keys_values_and_gradients_take_what_the_schedule_says(
        self, schedule: str, stages: int, micro_batches: int, dtype: str, options: dict[str, Any]
    ) -> None:
        shape = {"schedule": schedule, "stages": stages, "micro_batches": micro_batches}
        rows, heads, head_dim = 2, 2, 4
        itemsize = 8 if dtype == "float64" else 2
        orders = terapipe_ds.schedule.build(schedule, stages, micro_batches, 3)
        for rank in rank_pool(stages).run(job_memory, **shape, dtype=dtype, **options):
            numbers = 2 * rows * LENGTH * heads * head_dim * rank["layers"]
            order = orders.compute_order(rank["stage"])
            expected = predicted_peak(order, 3, numbers * itemsize, numbers * max(4, itemsize))
            assert rank["peak"] == expected > 0
            assert set(rank["reserved"]) == {expected}

    def test_buffers_serve_all_lengths_that_alternate_and_a_whole_sequence_keeps_nothing(self) -> None:
        for reserved, of_whole_sequences in rank_pool(2).run(job_lengths):
            assert len(set(reserved[3:])) == 1, "nothing new after every length has come once"
            assert of_whole_sequences == 0

    def test_as_few_schedules_are_kept_as_the_engine_says(self) -> None:
        assert rank_pool(2).run(job_kept_schedules) == [[1, 2, 2, 2]] * 2

    @pytest.mark.parametrize(("change", "says"), [(0, ""), (1, "the schedule says 4"), (-1, "the schedule says 2")])
    def test_live_slices_are_counted_in_every_batch(self, change: int, says: str) -> None:
        """Check that the run has the peak that the schedule promises, which is 3 on one stage."""
        [(kind, text)] = rank_pool(1).run(job_falsified_peak, change=change)
        assert kind == ("InFlightError" if change else "")
        assert says in text and ("stage 0 held 3 live slices at once" in text) == bool(change)


# -- pipelines beside each other -----------------------------------------------------------------------------


def _uneven_replicas() -> tuple[list[str], float, str]:
    """Train two pipelines; the data of the second one end a step earlier, later they are too short."""
    with engine_of(gpt_layers(), section()) as engine:
        replica = engine.grid.get_data_parallel_rank()
        data = iter([micro_batch(seed) for seed in range(2 * (3 - replica))])
        events = [raised_by(lambda: engine.train_batch(data))[0] for _ in range(3)]
        inputs, labels = micro_batch(0)
        _, refusal = step_error(engine, [(inputs[:, :-3] if replica == 1 else inputs, labels)] * 2)
        return events, float(engine.train_batch(iter(batches(1, first_seed=9)[0]))), refusal


def test_replicas_stop_at_the_first_end_of_data_and_at_bad_data_of_one() -> None:
    results = rank_pool(4).run(_uneven_replicas)
    assert [events for events, *_ in results] == [["", "", "StopIteration"]] * 4
    assert [loss for _, loss, _ in results] == pytest.approx([results[0][1]] * 4, rel=FP32_SCALAR)
    assert all("no input tensor has the sequence" in refusal for *_, refusal in results)


def _two_engines() -> list[tuple[float, float]]:
    """Make the steps of two sliced engines in one process in turns."""
    with engine_of(gpt_layers(), section()) as first, engine_of(gpt_layers(), section(slices=5)) as second:
        return [(float(first.train_batch(iter(batch))), float(second.train_batch(iter(batch)))) for batch in batches(2)]


def test_two_engines_in_one_process() -> None:
    alone = rank_pool(2).run(stock_run)[0].returned
    for turns in rank_pool(2).run(_two_engines):
        for losses in zip(*turns, strict=True):
            assert losses == pytest.approx(alone, rel=1e-6)
