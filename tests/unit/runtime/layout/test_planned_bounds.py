"""Where a strategy that was planned by the size of a model cuts the layers of a module."""

from typing import Any

import pytest
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from terapipe_ds.models.gpt import GPTConfig, gpt_layers
from terapipe_ds.planner.strategy import Cluster, plan_strategy
from terapipe_ds.runtime.layout.layout import bounds_in


def bounds(layers: list[Any], partition: list[int]) -> tuple[int, ...] | None:
    return bounds_in(layers, partition)


@pytest.mark.parametrize(("changes", "partition", "expected"), [
    ({}, [0, 3, 6], (0, 3, 7)),  # the norm goes with the head
    ({"positions": "learned"}, [0, 3, 6], (0, 4, 8)),  # and the positions with the embedding
    ({"positions": "learned", "tied_embedding": True}, [0, 1, 5, 6], (0, 2, 6, 8)),  # each end alone
    ({}, [0, 3, 7], (0, 3, 7)),  # planned for the layers that there are
    ({}, [0, 3, 5], None),
    ({}, [0, 3, 8], None),
    ({"num_layers": 5}, [0, 3, 6], None),
])  # fmt: skip
def test_what_a_module_has_besides_goes_with_its_ends(
    changes: dict[str, Any], partition: list[int], expected: tuple[int, ...] | None
) -> None:
    assert bounds(gpt_layers(GPTConfig(**{"num_layers": 4, **changes})), partition) == expected


def test_layers_without_ends_are_taken_as_they_are_or_not_at_all() -> None:
    alike = [LayerSpec(nn.Linear, 4, 4)] * 4
    tied = [TiedLayerSpec("a", nn.Linear, 4, 4), nn.ReLU(), *[LayerSpec(nn.Conv1d, 4, 4, 1)] * 3, nn.ReLU()]
    assert bounds(alike, [0, 2, 4]) == (0, 2, 4) and bounds(alike, [0, 2, 6]) is None
    assert bounds(tied, [0, 2, 5]) == (0, 3, 6)


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_a_strategy_for_a_size_fits_the_model_of_that_size(name: str) -> None:
    strategy = plan_strategy(name, Cluster("v100", 1, 2), global_batch_size=8, sequence_length=256)
    module_bounds = bounds(gpt_layers(GPTConfig.from_name(name)), strategy.partition)
    assert module_bounds is not None and module_bounds[-1] == len(gpt_layers(GPTConfig.from_name(name)))
