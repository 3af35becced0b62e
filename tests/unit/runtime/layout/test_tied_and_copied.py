"""When copies of a part may come to differ by rounding, and whose values count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import LOSS, copies_may_differ, owners_of
from terapipe_ds.schedule.placement import placement_for

CHIMERA = Layout(4, placement_for("chimera", 4, 1))
PARAMETERS = [torch.nn.Parameter(torch.zeros(3))]


class Own(torch.optim.Adam):
    """Of somebody who rounds in a way of their own."""


@pytest.mark.parametrize(("layout", "optimizer", "num_replicas", "may_differ"), [
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 1, False),
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 2, False),  # two numbers have one sum
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 3, True),
    (CHIMERA, Own(PARAMETERS), 1, True),
    (CHIMERA, torch.optim.Adam(PARAMETERS, fused=True), 1, True),  # one update in some ten thousand was seen to
    (CHIMERA, None, 3, False),
    (Layout(4, placement_for("1f1b", 4, 1)), Own(PARAMETERS), 3, False),
])  # fmt: skip
def test_when_copies_may_differ(layout: Layout, optimizer: Any, num_replicas: int, may_differ: bool) -> None:
    assert copies_may_differ(layout, optimizer, num_replicas) == may_differ


def test_the_owner_of_a_tied_layer_is_that_of_its_first_part_and_of_the_loss_that_of_the_last() -> None:
    """Five layers in four parts, the first tied to the last."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied = [TiedLayerSpec("words", torch.nn.Linear, 2, 2) for _ in range(2)]
    specs = [tied[0], *(LayerSpec(torch.nn.Linear, 2, 2) for _ in range(3)), tied[1]]
    module = SimpleNamespace(parts=[0, 2, 3, 4, 5], _layer_specs=specs)
    assert owners_of(module, CHIMERA) == {"words": 0, 1: 0, 2: 1, 3: 2, LOSS: 3}
    swapped = Layout(2, {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 1})
    module.parts = [0, 3, 5]
    assert owners_of(module, swapped) == {"words": 1, 1: 1, 2: 1, 3: 0, LOSS: 0}
