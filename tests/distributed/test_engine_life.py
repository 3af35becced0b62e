"""Test calls of an engine at a wrong time, and its end: an error on every rank, and nothing stays behind."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.distributed.engines import batches, engine_of, fp32_layers, gpt_layers, raised_by, section, train
from tests.distributed.harness import rank_pool


def in_thread(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that `act` raises in a thread of its own."""
    raised: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: raised.append(raised_by(act)), name="saver")
    thread.start()
    thread.join(20)
    return raised[0] if raised else ("", "it hangs")


def job_other_thread(folder: str) -> list[Any]:
    """Between batches, within one, and by a thread that goes on with batches after the first one."""
    with engine_of(gpt_layers(), section()) as engine:
        seen = []

        def data() -> Any:
            seen.append(in_thread(lambda: engine.save_checkpoint(folder)))
            seen.append(in_thread(lambda: engine.train_batch(iter(batches(1)[0]))))
            seen.append(raised_by(engine.destroy))
            seen.append(in_thread(engine.destroy))
            yield from batches(1)[0]

        stages = data() if engine.is_first_stage() or engine.is_last_stage() else None
        expected = float(engine.train_batch(stages))
        seen.append(in_thread(lambda: engine.save_checkpoint(folder)))
        seen.append(in_thread(lambda: engine.load_checkpoint(folder)))
        engine.save_checkpoint(folder, tag="own")
        later = in_thread(lambda: engine.train_batch(iter(batches(1)[0])))
        return [seen, later, expected > 0, sorted(path.name for path in Path(folder).iterdir())]


def test_calls_of_another_thread_and_destroy_in_a_batch_are_errors(tmp_path: Path) -> None:
    for seen, later, is_trained, files in rank_pool(2).run(job_other_thread, folder=str(tmp_path)):
        whom = "thread 'saver', while the engine runs in thread 'MainThread'"
        calls = ["save_checkpoint()", "train_batch() or eval_batch()", "", "", "save_checkpoint()", "load_checkpoint()"]
        for call, (kind, text) in zip(calls, seen, strict=True):
            expected = f"{call} was called in {whom}" if call else "destroy() was called while the engine is running"
            assert kind == "RuntimeError" and expected in text, text
        assert later == ("", "") and is_trained and files == ["latest", "own"]


def job_descriptors(ours: bool) -> int:
    """Return how many files two more engines keep open after their end, although references to them remain."""
    engines, counts = [], []
    for _ in range(3):
        with engine_of(fp32_layers(), section() if ours else None) as engine:
            train(engine, batches(1))
        engines.append(engine)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    distributed.barrier()
    assert not ours or raised_by(lambda: engines[0].train_batch())[1].startswith("this engine is destroyed")
    return counts[2] - counts[0]


def test_a_destroyed_engine_keeps_no_more_files_open_than_stock() -> None:
    stock, ours = (rank_pool(2).run(job_descriptors, ours=each) for each in (False, True))
    assert all(mine <= theirs for mine, theirs in zip(ours, stock, strict=True)), (ours, stock)


def job_rows(empty: int) -> tuple[str, str]:
    with engine_of(gpt_layers(), section()) as engine:
        data = [tuple(t[:0] for t in each) if i == empty else each for i, each in enumerate(batches(1)[0])]
        return raised_by(lambda: engine.train_batch(iter(data)))


def test_a_micro_batch_of_no_rows_is_named() -> None:
    for empty in (0, 1):
        for kind, text in rank_pool(2).run(job_rows, empty=empty):
            assert kind == "BatchError" and f"micro-batch {empty} has 0 rows (shapes [[0, 23], [0, 23]])" in text


def job_default_dtype(dtype: torch.dtype) -> list[float]:
    with engine_of(fp32_layers(), section()) as engine:
        torch.set_default_dtype(dtype)
        try:
            losses = [float(engine.train_batch(iter(batch))) for batch in batches(2)]
            losses.append(float(engine.eval_batch(iter(batches(1)[0]))))
            assert torch.get_default_dtype() == dtype
            return losses
        finally:
            torch.set_default_dtype(torch.float32)


def test_every_stage_returns_the_loss_whatever_the_default_dtype_is() -> None:
    first, *others = (rank_pool(2).run(job_default_dtype, dtype=d) for d in (torch.float32, torch.float64))
    assert first[0] == first[1] and min(first[0]) > 1.0 and others == [first]
