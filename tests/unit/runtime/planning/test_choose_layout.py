"""What of a config and a module decides where the layers go first; the rest has real ranks in tests/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.runtime.planning.choose_layout import first_layout, micro_batches_of
from terapipe_ds.schedule import placement_for


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"gradient_accumulation_steps": 6}, 6),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, 8),  # over three replicas
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, 8),
        ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}, 1),
        ({"train_batch_size": 48}, 1),
        ({"gradient_accumulation_steps": True}, 1),
        ({}, 1),
    ],
)
def test_micro_batches(raw: dict[str, Any], expected: int) -> None:
    assert micro_batches_of(raw, SimpleNamespace(_grid=SimpleNamespace(data_parallel_size=3))) == expected


@pytest.mark.parametrize(
    ("section", "schedule", "chunks"),
    [
        ({"schedule": "zbv"}, "zbv", 2),
        ({"schedule": "auto"}, "1f1b", 1),
        ({"schedule": "auto", "chunks_per_stage": 3}, "interleaved", 3),
        ({"schedule": "auto", "chunks_per_stage": 2, "planner": {"profile": "none.json"}}, "interleaved", 2),
        ({"schedule": "seq1f1b", "planner": {"profile": "none.json"}}, "seq1f1b", 1),
    ],
)
def test_no_profile_is_read_where_it_decides_nothing(section: dict[str, Any], schedule: str, chunks: int) -> None:
    config = TeraPipeConfig.from_deepspeed({"terapipe": {"enabled": True, **section}})
    given = iter([1])
    layout, parameters = first_layout(config, {}, SimpleNamespace(num_stages=4), given)
    assert layout.placement == placement_for(schedule, 4, chunks) and parameters is given
