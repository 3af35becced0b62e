"""Random numbers: the same initial weights however the model is cut, and dropout that fits tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import random as megatron_random

_OFFSET = 2718  # of the tensor-parallel state against the default one, as in Megatron-LM


def seed_dropout(seed: int, grid: Any) -> None:
    """Seed this rank's random numbers: equal over tensor-parallel ranks but for the tracker's state, different over
    stages and replicas (the offsets are Megatron-LM's).

    Args:
        grid: DeepSpeed's ``PipelineParallelGrid``.
    """
    seed += 100 * grid.get_stage_id() + 10 * grid.get_data_parallel_rank()
    torch.manual_seed(seed)
    _seed_tracker(seed, grid.get_slice_parallel_rank())


def _seed_tracker(seed: int, tensor_rank: int) -> None:
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _OFFSET + tensor_rank)
    tracker.add(megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + tensor_rank)


@contextlib.contextmanager
def initial_weights(seed: int, layer_index: int, tensor_rank: int) -> Iterator[None]:
    """Draw the weights of one layer from (seed, layer_index) alone; afterwards all random states are as before.

    With ``use_cpu_initialization`` the whole matrix is drawn and cut, so that the weights are the same for every
    tensor-parallel size; without it they are the same for one size.
    """
    tracker = megatron_random.get_cuda_rng_tracker()
    states = tracker.get_states()
    seeds = set(getattr(tracker, "seeds_", ()))
    with _forked_default():
        torch.manual_seed(seed + 1_000_003 * (layer_index + 1))
        _seed_tracker(seed + 1_000_003 * (layer_index + 1), tensor_rank)
        try:
            yield
        finally:
            tracker.set_states(states)
            if hasattr(tracker, "seeds_"):
                tracker.seeds_ = seeds


def _forked_default() -> Any:
    if get_accelerator().device_name() == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[get_accelerator().current_device()])
