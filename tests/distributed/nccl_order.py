"""Train inside the ranks with NCCL's order emulated, and compare with the stock engine's training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.profiling import rounds
from terapipe_ds.schedule import CHUNKED_SCHEDULES
from tests.distributed import engines, tuple_models
from tests.distributed.nccl_emulator import emulated_nccl

LENGTH = 24
NUM_MICRO_BATCHES = 4


class Trained(NamedTuple):
    """Hold how far a training was from the stock engine's, and what was posted meanwhile."""

    differences: dict[str, float]
    evaluation_error: float
    messages: int
    connections: tuple[tuple[int, int, int], ...]
    synchronized_while_posted: tuple[str, ...]


def train_over_nccl(
    schedule: str,
    stages: int,
    slices: int | str | list[int],
    eager: bool,
    patience_s: float = 30.0,
    changes: dict[str, Any] | None = None,
    num_layers: int | None = None,
    mixed: bool = False,
    **options: Any,
) -> Trained:
    """Train three steps, with an evaluation before the second and the third, as the stock engine does in one stage.

    Args:
        changes: keys of the `terapipe` section. The first batch is verified unless they say otherwise.
        mixed: whether layers hand on tensors of several dtypes.
        options: those of `engines.build`.
    """
    chunks = {"chunks_per_stage": 2} if "interleaved" in schedule else {}
    section = engines.section(
        schedule=schedule,
        slices=slices,
        granularity_tokens=8,
        stall_timeout_s=60,
        **{"verify": "first_batch", **chunks, **(changes or {})},
    )
    num_layers = num_layers or max(4, stages * (2 if schedule in CHUNKED_SCHEDULES else 1))
    make = tuple_models.guided_layers if mixed else functools.partial(engines.gpt_layers, num_layers=num_layers)
    draw = tuple_models.guided_micro_batch if mixed else functools.partial(engines.micro_batch, length=LENGTH)
    data = [[draw(100 * step + index) for index in range(NUM_MICRO_BATCHES)] for step in range(3)]
    options = {"gradient_accumulation_steps": NUM_MICRO_BATCHES, **options}
    few_rounds = mock.patch.object(rounds, "MAX_ROUNDS", rounds.MIN_ROUNDS)  # what is measured is not looked at
    with emulated_nccl(eager, patience_s) as nccl, few_rounds:
        ours, evaluated = _train(make, section, data, stages=stages, **options)
        seen = tuple(nccl.synchronized_while_posted)
    options.pop("module", None)  # recomputing changes no number, and the stock engine cannot do so with an embedding
    stock, expected = _train(make, None, data, stages=1, **options)
    errors = engines.differences(ours, stock), engines.error_of(evaluated, expected)
    return Trained(*errors, nccl.messages, tuple(nccl.connections), seen)


def _train(
    layers: Callable[[], Sequence[Any]], section: dict[str, Any] | None, data: Sequence[engines.Batch], **options: Any
) -> tuple[engines.Run, list[float]]:
    evaluated: list[float] = []

    def evaluate(engine: PipelineEngine, step: int) -> None:
        if step:
            evaluated.append(float(engine.eval_batch(iter(data[0]))))

    return engines.run_training(layers, section, data, before_step=evaluate, **options), evaluated
