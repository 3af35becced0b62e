"""Test that monitors get for each step the figures of its trace, computed here from the trace files alone."""

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.distributed.engines import (
    LENGTH,
    VOCAB_SIZE,
    batches,
    build,
    engine_of,
    gpt_layers,
    logged,
    raised_by,
    train,
    unchecked,
)
from tests.distributed.harness import rank_pool

STEPS, MICRO_BATCHES, ROWS = 4, 3, 2
PEAK_TFLOPS = 0.05


def job_monitored(folder: str, terapipe: dict[str, Any], stages: int) -> list[str]:
    """Train with a monitor, which one of the cases configures on rank 0 alone; return what was logged."""
    is_here = terapipe["schedule"] != "zbv" or distributed.get_rank() == 0
    monitor = {"csv_monitor": {"enabled": is_here, "output_path": folder, "job_name": "run"}}
    changes = {"trace_dir": f"{folder}/traces", "peak_tflops": PEAK_TFLOPS, **terapipe}
    options: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "stages": stages, **monitor}
    with logged() as said, engine_of(gpt_layers(), unchecked(**changes), **options) as engine:
        train(engine, batches(STEPS, MICRO_BATCHES))
        for compute_loss in (False, True):  # is no step
            engine.eval_batch(iter(batches(1, MICRO_BATCHES)[0]), compute_loss=compute_loss)
    return said


def monitored(folder: Path) -> dict[str, list[float]]:
    """Return the values of each step by name, and check that samples are counted as DeepSpeed does."""
    found = {}
    for path in (folder / "run").glob("Train_TeraPipe_*.csv"):
        _, *rows = csv.reader(path.read_text().splitlines())
        found[path.stem.removeprefix("Train_TeraPipe_")] = [float(value) for _, value in rows]
        losses = list(csv.reader((folder / "run/Train_Samples_train_loss.csv").read_text().splitlines()))[1:]
        assert [row[0] for row in rows] == [row[0] for row in losses]
    return found


def events_of(folder: Path, step: int, ranks: range) -> list[dict[str, Any]]:
    names = [f"traces/timeline-step{step:06d}-rank{rank:04d}.json" for rank in ranks]
    return [event for name in names for event in json.loads((folder / name).read_text())["events"]]


def exposed_s(events: list[dict[str, Any]], part_at: dict[tuple[int, int], int]) -> float:
    """Return the seconds in which stages stood still with an input that another part had made already."""
    done = {(e["kind"], part_at[e["stage_id"], e["chunk_id"]], e["micro_batch_id"], e["slice_id"]): e["end_s"]
            for e in events}  # fmt: skip
    total, of_stages = 0.0, defaultdict(list)
    for event in events:
        of_stages[event["stage_id"]].append(event)
    for own in of_stages.values():
        own.sort(key=lambda event: event["start_s"])
        for before, event in zip([None, *own], own, strict=False):
            part = part_at[event["stage_id"], event["chunk_id"]]
            wanted = {"F": ("F", part - 1), "B": ("B", part + 1)}.get(event["kind"])
            ready = None if wanted is None else done.get((*wanted, event["micro_batch_id"], event["slice_id"]))
            if ready is not None:
                total += max(event["start_s"] - max(ready, before["end_s"] if before else ready), 0.0)
    return total


CASES: dict[str, tuple[dict[str, Any], int, dict[tuple[int, int], int]]] = {
    "planned": ({"schedule": "seq1f1b", "slices": "auto", "granularity_tokens": 8}, 2, {(0, 0): 0, (1, 0): 1}),
    "v": ({"schedule": "zbv", "slices": 3}, 2, {(0, 0): 0, (1, 0): 1, (1, 1): 2, (0, 1): 3}),
    "replicas": ({"schedule": "seq1f1b", "slices": 2}, 1, {(0, 0): 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_trace(name: str, tmp_path: Path) -> None:
    terapipe, stages, part_at = CASES[name]
    said, other = rank_pool(2).run(job_monitored, folder=str(tmp_path), terapipe=terapipe, stages=stages)
    values = monitored(tmp_path)
    assert {len(of_steps) for of_steps in values.values()} == {STEPS}
    assert len((tmp_path / "run/Train_Samples_eval_loss.csv").read_text().splitlines()) == 2  # a head, and one loss
    for index in range(STEPS):
        events = events_of(tmp_path, index + 1, range(stages))
        span_s = max(e["end_s"] for e in events) - min(e["start_s"] for e in events)
        busy_s = sum(e["end_s"] - e["start_s"] for e in events)
        told = {key: of_steps[index] for key, of_steps in values.items()}
        assert told["pipeline_seconds"] == pytest.approx(span_s, rel=0.01)
        assert told["bubble"] == pytest.approx(1 - busy_s / (stages * span_s), rel=0.01, abs=1e-6)
        exposed = exposed_s(events, part_at) / (stages * span_s)
        assert told["exposed_communication"] == pytest.approx(exposed, rel=0.01, abs=1e-6)
        assert span_s <= told["step_seconds"] < span_s + 30
        tokens = MICRO_BATCHES * ROWS * LENGTH * (2 // stages)
        assert told["tokens_per_second"] * told["step_seconds"] == pytest.approx(tokens, rel=1e-3)
        assert 0 < told["mfu"] < 1
    assert values["mfu"][1] * values["step_seconds"][1] == pytest.approx(model_flops(stages), rel=0.01)
    first = [line for line in said if line.startswith("training runs ")]
    assert len(first) == 1 and not any(line.startswith("training runs ") for line in other)
    assert f"{MICRO_BATCHES} micro-batches" in first[0] and terapipe["schedule"] in first[0]
    if name == "planned":
        (path,) = (tmp_path / "traces").glob("predicted-*.json")
        planned = [e for e in json.loads(path.read_text())["events"] if e["kind"] in "FBW"]
        predicted_s = max(e["end_s"] for e in planned) - min(e["start_s"] for e in planned)
        # the second batch measures the engine's own time, and the plan is made again with it
        assert values["predicted_seconds"][2:] == pytest.approx([predicted_s] * (STEPS - 2), rel=0.01)
        spans = zip(values["predicted_seconds"], values["pipeline_seconds"], strict=True)
        assert values["predicted_over_measured"] == pytest.approx([a / b for a, b in spans], rel=0.01)
        assert "it should take" in first[0] and "times as fast as whole sequences" in first[0]
    else:
        assert not {"predicted_seconds", "predicted_over_measured"} & values.keys()


def job_of_two_lengths(folder: str) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    section = unchecked(slices=2, peak_tflops=PEAK_TFLOPS)
    with engine_of(gpt_layers(), section, gradient_accumulation_steps=MICRO_BATCHES, **monitor) as engine:
        for length in (LENGTH, LENGTH // 2):
            train(engine, batches(1, MICRO_BATCHES, length=length))


def test_a_shorter_step_needs_fewer_operations(tmp_path: Path) -> None:
    """The first step is counted, and others have as many operations per token: without this they had as many."""
    rank_pool(2).run(job_of_two_lengths, folder=str(tmp_path))
    values = monitored(tmp_path)
    needed = [a * b for a, b in zip(values["mfu"], values["step_seconds"], strict=True)]
    assert needed == pytest.approx([model_flops(2), model_flops(2, LENGTH // 2)], rel=0.1)


def model_flops(stages: int, length: int = LENGTH) -> float:
    """Return FLOPs of a step over the peak of its devices, in seconds: products and causal scores of four layers."""
    hidden, heads, kv_heads, ffn, vocab = 16, 4, 2, 24, VOCAB_SIZE
    tokens, head_dim = ROWS * length, 4
    layer = hidden * heads * head_dim * 2 + hidden * kv_heads * head_dim * 2 + 3 * hidden * ffn
    scores = ROWS * heads * (length * (length + 1) // 2) * head_dim * 2
    forward = 4 * (2 * tokens * layer + 2 * scores) + 2 * tokens * hidden * vocab
    return 3 * forward * MICRO_BATCHES / (PEAK_TFLOPS * 1e12 * stages)


def job_without_a_folder(path: str) -> tuple[str, str]:
    """Give rank 0 alone a monitor, whose folder cannot be made."""
    monitor = {"enabled": distributed.get_rank() == 0, "output_path": path, "job_name": "run"}
    return raised_by(lambda: build(gpt_layers(), unchecked(), csv_monitor=monitor))


def test_a_monitor_that_rank_0_cannot_open_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """The other ranks waited for it in their first sum, for half an hour."""
    (path := tmp_path / "file").touch()
    raised = rank_pool(2).run(job_without_a_folder, path=str(path), timeout_s=30)
    assert all(kind == "NotADirectoryError" and str(path) in text for kind, text in raised), raised
