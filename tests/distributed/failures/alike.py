"""Test faults that every rank meets alike: an exception everywhere, no rank waits forever, and training can go on.

Run by the ranks of `harness.RankPool`; many in one job, because the ranks survive them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed

import terapipe_ds
from terapipe_ds.runtime import agreement
from tests.distributed.engines import raised_by
from tests.distributed.failures.job import (
    MICRO_BATCHES,
    PLAN,
    Batch,
    Job,
    batches,
    build_engine,
    build_model,
    deepspeed_config,
)


class Raised(NamedTuple):
    """Hold an exception, and how long it took. `kind` is empty if nothing was raised."""

    kind: str
    text: str
    seconds: float


def provoke(act: Callable[[], Any]) -> Raised:
    start = time.monotonic()
    return Raised(*raised_by(act), time.monotonic() - start)


# -- data and calls ------------------------------------------------------------------------------------------


def suffer(stages: int, names: list[str]) -> tuple[dict[str, Raised], list[float]]:
    """Return the error of each fault of `names` on this rank, and the losses before, between and after them."""
    engine = build_engine(Job(stages=stages))
    try:
        losses = [float(engine.train_batch(batches(1)))]
        raised = {name: provoke(lambda name=name: FAULTS[name](engine)) for name in names}  # type: ignore[misc]
        assert engine.slice_store.pool.live_bytes == 0 and not engine.eval_return_logits
        losses += [float(engine.train_batch(batches(step))) for step in (2, 3)]
        losses.append(float(engine.eval_batch(batches(4))))
        return raised, losses
    finally:
        engine.destroy()


def _on(engine: PipelineEngine, stage_id: int, there: Iterator[Batch], elsewhere: Iterator[Batch]) -> None:
    engine.train_batch(there if engine.stage_id == stage_id else elsewhere)


def _last(engine: PipelineEngine) -> int:
    return engine.num_stages - 1


def _changed(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Iterator[Any]:
    """Return the usual micro-batches, the second one changed."""
    first, second = batches(2)
    return iter([first, change(*second)])


def _mask_of(tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    return torch.ones(rows, 1, length, length, dtype=torch.bool).tril()


def _broken_iterator() -> Iterator[Batch]:
    yield next(batches(2))
    raise OSError("the disk is gone")


def _other_accumulation(engine: PipelineEngine) -> None:
    usual = engine.train_batch_size()
    try:
        if engine.is_last_stage():
            engine.set_train_batch_size(2 * usual)
        engine.train_batch(iter([*batches(2), *batches(3)]))
    finally:
        engine.set_train_batch_size(usual)


def _one_evaluates(engine: PipelineEngine) -> None:
    run_batch = engine.eval_batch if engine.is_first_stage() else engine.train_batch
    run_batch(batches(2))


FAULTS: dict[str, Callable[[PipelineEngine], Any]] = {
    "no data left": lambda engine: engine.train_batch(iter([])),
    "data for half a batch": lambda engine: engine.train_batch(iter([next(batches(2))])),
    "no data in evaluation": lambda engine: engine.eval_batch(None),
    "no data left in evaluation": lambda engine: engine.eval_batch(iter([]), return_logits=True),
    "no data left on the first stage": lambda engine: _on(engine, 0, iter([]), batches(2)),
    "no data left on the last stage": lambda engine: _on(engine, _last(engine), iter([]), batches(2)),
    "data raises on the first stage": lambda engine: _on(engine, 0, _broken_iterator(), batches(2)),
    "data raises on the last stage": lambda engine: _on(engine, _last(engine), _broken_iterator(), batches(2)),
    "data ends here, raises there": lambda engine: _on(engine, 0, iter([]), _broken_iterator()),
    "labels without a sequence": lambda engine: engine.train_batch(_changed(lambda x, y: (x, y[:, 0]))),
    "no labels": lambda engine: engine.train_batch(_changed(lambda x, y: (x, None))),
    "labels on the last stage only": lambda engine: engine.train_batch(
        iter([((x, x.float()), y if engine.is_last_stage() else None) for x, y in batches(2)])
    ),
    "inputs without a sequence": lambda engine: engine.train_batch(_changed(lambda x, y: ((x[:, 0], x[:, :3]), y))),
    "floats of the labels' length": lambda engine: engine.train_batch(_changed(lambda x, y: ((x, x.float()), y))),
    "a mask of all tokens": lambda engine: engine.train_batch(_changed(lambda x, y: ((x, _mask_of(x)), y))),
    "inputs shorter than labels": lambda engine: engine.train_batch(_changed(lambda x, y: (x[:, :-1], y))),
    "empty sequences": lambda engine: engine.train_batch(_changed(lambda x, y: (x[:, :0], y[:, :0]))),
    "not a pair": lambda engine: engine.train_batch(_changed(lambda x, y: (x,))),
    "an unknown entry": lambda engine: engine.train_batch(_changed(lambda x, y: {"tokens": x, "labels": y})),
    "another length than the plan": lambda engine: engine.train_batch(  # in one replica
        batches(2, length=sum(PLAN) if engine.grid.get_data_parallel_id() else sum(PLAN) - 4)
    ),
    "other length on the last stage": lambda engine: _on(engine, _last(engine), batches(2, length=8), batches(2)),
    "one stage evaluates": _one_evaluates,
    "other number of micro-batches": lambda engine: engine.eval_batch(
        batches(2), num_micro_batches=1 if engine.is_first_stage() else MICRO_BATCHES
    ),
    "one stage accumulates more": _other_accumulation,
}


# -- configs -------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "other slices": {"terapipe": {"enabled": True, "slices": [8, 8]}},
    "switched off": {"terapipe": {"enabled": False}},
    "absent": {"terapipe": None},
    "other accumulation": {"gradient_accumulation_steps": MICRO_BATCHES + 1},
    "misspelt": {"terapipe": {"enabled": True, "slice": PLAN}},
}


def disagree(names: list[str]) -> dict[str, Raised]:
    """Return the error that `deepspeed.initialize` raises on this rank when the last rank has another config."""
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return {
        name: provoke(lambda name=name: build_engine(Job(), CONFIGS[name] if is_last else None))  # type: ignore[misc]
        for name in names
    }


def one_rank_is_not_registered(patience_s: float) -> Raised:
    """Let the last rank build its model and then do something else: it never comes to compare configs."""
    job = Job(stall_timeout_s=patience_s)
    model = build_model(job)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        next(agreement._meetings)  # the ranks of the pool go on together
        return Raised("", "", 0.0)
    usual, agreement.PATIENCE_S = agreement.PATIENCE_S, patience_s
    try:
        return provoke(
            lambda: terapipe_ds.initialize(
                model=model, model_parameters=list(model.parameters()), config=deepspeed_config(job)
            )
        )
    finally:
        agreement.PATIENCE_S = usual
