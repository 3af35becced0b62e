"""Test what an engine holds, and its end: memory of batches, pipelines beside each other, and calls at a wrong time."""

import contextlib
import dataclasses
import functools
import gc
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import distributed

import terapipe_ds
from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.models import gpt
from terapipe_ds.runtime.planning import plans as plans_module
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models.parts import VOCAB_SIZE


def job_other_thread(folder: str) -> list[Any]:
    """Between batches, within one, and by a thread that goes on with batches after the first one."""
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        seen = []

        def data() -> Any:
            seen.append(engines.in_thread(lambda: engine.save_checkpoint(folder)))
            seen.append(engines.in_thread(lambda: engine.train_batch(iter(engines.batches(1)[0]))))
            seen.append(engines.raised_by(engine.destroy))
            seen.append(engines.in_thread(engine.destroy))
            yield from engines.batches(1)[0]

        stages = data() if engine.is_first_stage() or engine.is_last_stage() else None
        expected = float(engine.train_batch(stages))
        seen.append(engines.in_thread(lambda: engine.save_checkpoint(folder)))
        seen.append(engines.in_thread(lambda: engine.load_checkpoint(folder)))
        engine.save_checkpoint(folder, tag="own")
        later = engines.in_thread(lambda: engine.train_batch(iter(engines.batches(1)[0])))
        return [seen, later, expected > 0, sorted(path.name for path in Path(folder).iterdir())]


def test_calls_of_another_thread_and_destroy_in_a_batch_are_errors(tmp_path: Path) -> None:
    for seen, later, is_trained, files in rank_pool(2).run(job_other_thread, folder=str(tmp_path)):
        whom = "thread 'saver', while the engine runs in thread 'MainThread'"
        calls = ["save_checkpoint()", "train_batch() or eval_batch()", "", "", "save_checkpoint()", "load_checkpoint()"]
        for call, (kind, text) in zip(calls, seen, strict=True):
            expected = f"{call} was called in {whom}" if call else "destroy() was called while the engine is running"
            assert kind == "RuntimeError" and expected in text, text
        assert later == ("", "") and is_trained and files == ["latest", "own"]


def job_batch_in_a_batch() -> tuple[list[tuple[str, str]], list[float]]:
    """Let the iterator of a batch begin a training and an evaluation; return their errors, and losses with and without.

    The iterator may save between micro-batches, but not the loss, whose stage runs an action.
    """
    seen: list[tuple[str, str]] = []

    def inner(engine: Any, draws: bool) -> Any:
        for act in (engine.train_batch, engine.eval_batch) if draws else (engine.save_checkpoint,):
            seen.append(engines.raised_by(lambda: act(iter(engines.batches(1)[0]))))  # noqa: B023
        yield from engines.batches(1)[0]

    losses = []
    for is_nested in (False, True):
        loss_fn = functools.partial(gpt.gpt_loss)  # of logits
        with engines.engine_of(engines.gpt_layers(), engines.unchecked(), loss_fn=loss_fn) as engine:
            if is_nested and engine.is_last_stage():
                stock = engine.module.loss_fn
                engine.module.loss_fn = lambda *given: (next(inner(engine, draws=False)), stock(*given))[1]  # noqa: B023
            losses += [float(engine.train_batch(inner(engine, True) if is_nested else iter(engines.batches(1)[0])))]
            losses += [float(engine.train_batch(iter(engines.batches(2)[1])))]
    return seen, losses


def test_a_batch_within_a_batch_is_an_error_that_changes_nothing() -> None:
    for rank, ((train, evaluate, *saves), losses) in enumerate(rank_pool(2).run(job_batch_in_a_batch)):
        for kind, text in (train, evaluate):
            assert kind == "RuntimeError" and "train_batch() or eval_batch() was called while the engine is" in text
            assert "running drawing data from the iterator: call it after that" in text
        assert bool(saves) == (rank == 1)  # the stage of the loss
        assert all("save_checkpoint() was called while the engine is running F" in text for _, text in saves)
        assert losses[:2] == losses[2:] and min(losses) > 1.0


def job_descriptors(ours: bool) -> int:
    """Return how many files two more engines keep open after their end, although references to them remain."""
    ended, counts = [], []
    for _ in range(3):
        with engines.engine_of(engines.fp32_layers(), engines.unchecked() if ours else None) as engine:
            engines.train(engine, engines.batches(1))
        ended.append(engine)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    distributed.barrier()
    assert not ours or engines.raised_by(lambda: ended[0].train_batch())[1].startswith("this engine is destroyed")
    return counts[2] - counts[0]


def test_a_destroyed_engine_keeps_no_more_files_open_than_stock() -> None:
    stock, ours = (rank_pool(2).run(job_descriptors, ours=each) for each in (False, True))
    assert all(mine <= theirs for mine, theirs in zip(ours, stock, strict=True)), (ours, stock)


def traces_of(module: Any) -> list[Any]:
    """Return the attributes of modules and of parameters, by name, and which layers are checkpointed."""
    named = [*module.named_modules(), *module.named_parameters()]
    found = {name: sorted(vars(each).keys() - {"interval_was_zero"}) for name, each in named}  # DeepSpeed's, unread
    return [found, module.activation_checkpoint_interval, module.is_checkpointable_results]


def job_given_back(terapipe: dict[str, Any] | None, is_frozen: bool = False, has_second: bool = False) -> list[Any]:
    """Return the traces that an engine leaves on a module with a plain linear layer at its end.

    With `has_second` another engine gets the module before the first is destroyed: return these of its life.
    """
    head = LayerSpec(torch.nn.Linear, 16, VOCAB_SIZE)
    module = engines.pipeline_module([*engines.fp32_layers()[:-1], head], loss_fn=LinearCrossEntropy())
    module.requires_grad_(not (is_frozen and module.stage_id == 0))
    later: Any = contextlib.nullcontext()
    with engines.started(module, terapipe) as engine:
        engines.train(engine, engines.batches(1))
        engine.eval_batch(iter(engines.batches(1)[0]))
        if has_second:
            later = engines.started(module, terapipe)
            later.__enter__()
            before = traces_of(module)
    if has_second:
        after = traces_of(module)
        later.__exit__(None, None, None)
        return [before, after]
    return traces_of(module)


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "keep_attention": True}, {"recompute": [1]}])
def test_a_destroyed_engine_leaves_a_module_as_stock_does(changes: dict[str, Any]) -> None:
    stock = rank_pool(2).run(job_given_back, terapipe=None)
    ours = rank_pool(2).run(job_given_back, terapipe=engines.unchecked(**changes))
    assert ours == stock
    for before, after in rank_pool(2).run(job_given_back, terapipe=engines.unchecked(**changes), has_second=True):
        assert before == after and before not in stock


def test_a_destroyed_engine_leaves_no_number_on_a_frozen_stage() -> None:
    for found, *_ in rank_pool(2).run(job_given_back, terapipe=engines.unchecked(), is_frozen=True):
        assert not any("terapipe" in name for name in found)


def job_defaults(dtype: torch.dtype, device: str) -> list[float]:
    # torch 2.11's Adam counts steps on the default device
    data, plain = engines.batches(2), {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}}
    with engines.engine_of(engines.fp32_layers(), engines.section(verify="first_batch"), **plain) as engine:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            losses = [float(engine.train_batch(iter(batch))) for batch in data]
            losses.append(float(engine.eval_batch(iter(data[0]))))
            assert torch.get_default_dtype() == dtype
            return losses
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)


def test_every_stage_returns_the_loss_whatever_the_default_dtype_and_device_are() -> None:
    """The device has no memory, so that an operation of the engine on it fails."""
    first, *others = (
        rank_pool(2).run(job_defaults, dtype=dtype, device=device)
        for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta"))
    )
    assert first[0] == first[1] and min(first[0]) > 1.0 and others == [first, first]


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
    terapipe = engines.unchecked(schedule=schedule)
    with engines.engine_of(engines.gpt_layers(dtype=dtype), terapipe, stages=stages, **options) as engine:
        store, reserved = engine.slice_store, []
        for batch in engines.batches(3, micro_batches):
            engine.train_batch(iter(batch))
            reserved.append(store.pool.reserved_bytes)
            assert store.pool.live_bytes == 0
        layers = sum(type(layer).__name__ == "DecoderLayer" for layer in engine.module.forward_funcs)
        return {"peak": store.pool.peak_bytes, "reserved": reserved, "layers": layers, "stage": engine.stage_id}


MEMORY = [
    ("terapipe", 2, 3, "float64", {}),
    ("seq1f1b", 3, 4, "float64", {}),
    ("seq1f1b", 2, 3, "float32", {"bf16": {"enabled": True}, **engines.CHECKPOINTING["reentrant"]}),
]


def job_lengths() -> tuple[list[int], int]:
    """Return the reserved bytes after batches of alternating lengths, and the peak of a whole sequence."""
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        reserved = []
        for length in (engines.LENGTH, 12, 40) * 2:
            engine.train_batch(iter(engines.batches(1, length=length)[0]))
            engine.eval_batch(iter(engines.batches(1, length=length)[0]))
            reserved.append(engine.slice_store.pool.reserved_bytes)
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(slices=1)) as engine:
        engine.train_batch(iter(engines.batches(1)[0]))
        return reserved, engine.slice_store.pool.peak_bytes


def job_kept_schedules() -> list[int]:
    """Return how many schedules the links keep data of, after batches of one to four micro-batches."""
    kept = []
    with (
        mock.patch.object(plans_module, "_SCHEDULES_KEPT", 2),
        engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine,
    ):
        for count in range(1, 5):
            engine.set_train_batch_size(2 * count)
            engine.train_batch(iter(engines.batches(1, count)[0]))
            kept.append(len(engine._stage.links._budgets))
    return kept


def job_engines_left(**changes: Any) -> int:
    """Close engines without references, and count the engines that still exist."""

    def train_one() -> Any:
        with engines.engine_of(engines.gpt_layers(), engines.unchecked(**changes)) as engine:
            engines.train(engine, engines.batches(1))
            return weakref.ref(engine)

    left = [train_one() for _ in range(2)]
    gc.collect()
    return sum(ref() is not None for ref in left)


def job_falsified_peak(change: int) -> tuple[str, str]:
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(), stages=1) as engine:
        true_schedule = engine._train_schedule

        def falsified() -> Any:
            schedule = true_schedule()
            return dataclasses.replace(schedule, peak_live_slices=schedule.peak_live_slices + change)

        engine._train_schedule = falsified
        return engines.step_error(engine)


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
            numbers = 2 * rows * engines.LENGTH * heads * head_dim * rank["layers"]
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
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        replica = engine.grid.get_data_parallel_rank()
        data = iter([engines.micro_batch(seed) for seed in range(2 * (3 - replica))])
        events = [engines.raised_by(lambda: engine.train_batch(data))[0] for _ in range(3)]
        inputs, labels = engines.micro_batch(0)
        _, refusal = engines.step_error(engine, [(inputs[:, :-3] if replica == 1 else inputs, labels)] * 2)
        return events, float(engine.train_batch(iter(engines.batches(1, first_seed=9)[0]))), refusal


def test_replicas_stop_at_the_first_end_of_data_and_at_bad_data_of_one() -> None:
    results = rank_pool(4).run(_uneven_replicas)
    assert [events for events, *_ in results] == [["", "", "StopIteration"]] * 4
    assert [loss for _, loss, _ in results] == pytest.approx([results[0][1]] * 4, rel=engines.FP32_SCALAR)
    assert all("no input tensor has the sequence" in refusal for *_, refusal in results)
