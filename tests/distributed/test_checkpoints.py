"""Checkpoints know nothing of slices: what one plan, schedule or engine has written, another one reads and goes on.

The engine that wrote a checkpoint trains on, and so does the one that read it; both must see the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from tests.distributed.engines import (
    ZERO1,
    batches,
    differences,
    engine_of,
    error_of,
    gpt_layers,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

STOCK = None
SEQ1F1B = section(slices=3)
TERAPIPE = section(slices=[5, 10, 7, 1], schedule="terapipe")
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 9}}
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp64": ("float64", {}),
    "fp32": ("float32", {}),
    "fp16": ("float32", {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}),
    "bf16_zero1": ("float32", {"bf16": {"enabled": True}, **ZERO1}),
    "fp32_zero1": ("float32", ZERO1),
}
LIMITS = {
    "fp64": {"limit": 1e-10},
    "fp32": {"limit": 1e-5},
    "fp32_zero1": {"limit": 1e-5},
    "fp16": {"limit": 1e-3, "gradient": 3e-2},  # single tensors of a tiny model, rounded after each layer
    "bf16_zero1": {"limit": 3e-3, "gradient": 1e-1},
}


@dataclass(frozen=True)
class RoundTrip:
    """Who writes, who reads."""

    writer: str
    reader: str
    precision: str = "fp64"
    tied: bool = False
    stages: int = 2

    def __str__(self) -> str:
        words = [f"{self.writer}-{self.reader}", self.precision] + ["tied"] * self.tied
        return "-".join([*words, f"K{self.stages}"])

    def layers(self) -> list[Any]:
        return gpt_layers(dtype=PRECISIONS[self.precision][0], tied_embedding=self.tied)

    def options(self) -> dict[str, Any]:
        return {"stages": self.stages, "scheduler": WARMUP, **PRECISIONS[self.precision][1]}


SYSTEMS: dict[str, dict[str, Any] | None] = {"stock": STOCK, "seq1f1b": SEQ1F1B, "terapipe": TERAPIPE}
ROUND_TRIPS = [
    RoundTrip("seq1f1b", "terapipe", "fp64"),
    RoundTrip("terapipe", "stock", "bf16_zero1"),
    RoundTrip("stock", "seq1f1b", "fp64", tied=True),
    RoundTrip("seq1f1b", "terapipe", "fp16"),
    RoundTrip("seq1f1b", "seq1f1b", "fp32", tied=True),
    RoundTrip("terapipe", "stock", "fp32_zero1", stages=1),
    RoundTrip("stock", "terapipe", "bf16_zero1"),
    RoundTrip("seq1f1b", "stock", "fp64"),
    RoundTrip("terapipe", "terapipe", "bf16_zero1"),
]


def state_of(engine: PipelineEngine) -> dict[str, Any]:
    """All that a checkpoint must bring back, as plain values and tensors."""
    scaler = getattr(engine.optimizer, "loss_scale_config", None)
    return {
        "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "optimizer": {place: t.clone() for place, t in tensors_in(engine.optimizer.state_dict())},
        "rates": [float(lr) for lr in engine.get_lr()],
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scheduler": engine.lr_scheduler.state_dict(),
        "loss scale": float(engine._get_optimizer_loss_scale() or 0.0) if engine.fp16_enabled() else 0.0,
        "good steps": scaler.cur_iter if engine.fp16_enabled() and scaler is not None else 0,
    }


def job_round_trip(case: RoundTrip, folder: str) -> dict[str, Any]:
    with engine_of(case.layers(), SYSTEMS[case.writer], **case.options()) as writer:
        before = train(writer, batches(3))
        writer.save_checkpoint(folder, client_state={"epoch": 7})
        saved = state_of(writer)
        goes_on = train(writer, batches(2, first_seed=900))
        moved = error_of(state_of(writer)["parameters"], saved["parameters"])
    with engine_of(case.layers(), SYSTEMS[case.reader], **case.options()) as reader:
        train(reader, batches(1, first_seed=400))  # other weights, moments and counters than those to come
        differed = error_of(state_of(reader)["parameters"], saved["parameters"])
        reader.load_checkpoint(folder, load_module_only=True)
        module_only = error_of(state_of(reader)["parameters"], saved["parameters"]), reader.global_steps
        path, client_state = reader.load_checkpoint(folder)
        loaded = state_of(reader)
        resumed = train(reader, batches(2, first_seed=900))
    return {
        "state": {name: error_of(loaded[name], saved[name]) for name in saved},
        "moments": sum("exp_avg_sq" in place for place in saved["optimizer"]),
        "module only": module_only,
        "differed": min(differed, moved),
        "resumed": differences(resumed, goes_on),
        "client": (path is not None, client_state["epoch"], saved["counters"], len(before.returned)),
    }


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (index >= 6)) for index, case in enumerate(ROUND_TRIPS)],
    ids=str,
)
def test_training_goes_on_from_a_checkpoint(case: RoundTrip, tmp_path: Path) -> None:
    results = rank_pool(2).run(job_round_trip, case=case, folder=str(tmp_path))
    for rank in results:
        assert rank["differed"] > 1e-4, "there is something to bring back"
        assert rank["module only"] == (0.0, 1)
        assert rank["state"] == dict.fromkeys(rank["state"], 0.0)
        assert rank["moments"] > 0
        path_found, epoch, counters, num_steps = rank["client"]
        samples = 4 * num_steps * (2 if case.stages == 1 else 1)
        assert (path_found, epoch, counters) == (True, 7, [3, samples, 0])
    limits = {"limit": 0.0} if case.writer == case.reader else LIMITS[case.precision]
    assert violations([rank["resumed"] for rank in results], **limits) == {}


def job_write(case: RoundTrip, folder: str) -> None:
    with engine_of(case.layers(), SYSTEMS[case.writer], **case.options()) as engine:
        train(engine, batches(1))
        engine.eval_batch(iter(batches(1)[0]))
        engine.save_checkpoint(folder, tag="tag")


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a loaded file, with where they stand."""
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_in(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors_in(each, f"{path}/{index}")
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), path)


def contents(folder: Path) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """File -> place -> (shape, dtype) of every tensor that was saved."""
    files = sorted(folder.rglob("*.pt"))
    return {
        file.name: {
            place: (tuple(tensor.shape), str(tensor.dtype))
            for place, tensor in tensors_in(torch.load(file, map_location="cpu", weights_only=False))
        }
        for file in files
    }


@pytest.mark.parametrize("precision", ["fp64", "bf16_zero1"])
def test_a_checkpoint_has_what_the_stock_engine_saves_and_nothing_else(precision: str, tmp_path: Path) -> None:
    saved = {}
    for name in SYSTEMS:
        case = RoundTrip(name, name, precision)
        rank_pool(2).run(job_write, case=case, folder=str(tmp_path / name))
        saved[name] = contents(tmp_path / name)
    assert saved["seq1f1b"] == saved["stock"]
    assert saved["terapipe"] == saved["stock"]
    layers = {file: tensors for file, tensors in saved["seq1f1b"].items() if file.startswith("layer_")}
    assert len(layers) == 7
    names = {place for tensors in layers.values() for place in tensors}
    assert {re.sub(r"attention_norm|feed_forward_norm", "norm", name) for name in names} == {
        "/weight",
        "/norm.weight",
        "/attention.qkv.weight",
        "/attention.out.weight",
        "/feed_forward.up.weight",
        "/feed_forward.down.weight",
        "/out.weight",
    }
