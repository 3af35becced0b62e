"""When copies of a part may come to differ by rounding, whose values count, and how they travel in few messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import copies_may_differ, owners_of
from terapipe_ds.schedule.placement import placement_for

CHIMERA = Layout(4, placement_for("chimera", 4, 1))
PARAMETERS = [torch.nn.Parameter(torch.zeros(3))]


class Own(torch.optim.Adam):
    """Of somebody who rounds in a way of their own."""


@pytest.mark.parametrize(
    ("layout", "optimizer", "num_replicas", "may_differ"),
    [
        (CHIMERA, torch.optim.AdamW(PARAMETERS), 1, False),
        (CHIMERA, torch.optim.AdamW(PARAMETERS), 2, False),  # two numbers have one sum
        (CHIMERA, torch.optim.AdamW(PARAMETERS), 3, True),
        (CHIMERA, Own(PARAMETERS), 1, True),
        (CHIMERA, torch.optim.Adam(PARAMETERS, fused=True), 1, True),  # one update in some ten thousand was seen to
        (CHIMERA, None, 3, False),
        (Layout.plain(4), Own(PARAMETERS), 3, False),
    ],
)
def test_when_copies_may_differ(layout: Layout, optimizer: Any, num_replicas: int, may_differ: bool) -> None:
    assert copies_may_differ(layout, optimizer, num_replicas) == may_differ


@pytest.mark.parametrize("seed", range(3))
def test_torch_rounds_alike_wherever_a_number_lies(seed: int) -> None:
    """What `copies_may_differ` relies on, with ends of every length that a vectorized loop may leave over."""
    numbers = torch.randn(5, 37, generator=torch.Generator().manual_seed(seed))
    gradients, start = numbers[:4], numbers[4]

    def updated(offset: int, kind: type[torch.optim.Optimizer], **options: bool) -> torch.Tensor:
        flat = torch.nn.Parameter(torch.cat([torch.zeros(offset), start]))
        optimizer = kind([flat], lr=1e-3, **options)  # type: ignore[call-arg]
        for gradient in gradients:
            flat.grad = torch.cat([torch.zeros(offset), gradient])
            optimizer.step()
        return flat.detach()[offset:]

    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        for options in ({}, {"foreach": True}):
            expected = updated(0, kind, **options)
            assert all(torch.equal(updated(offset, kind, **options), expected) for offset in range(1, 17))


def test_the_owner_of_a_tied_layer_is_that_of_its_first_part() -> None:
    """Five layers in four parts, the first tied to the last."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied = [TiedLayerSpec("words", torch.nn.Linear, 2, 2) for _ in range(2)]
    specs = [tied[0], *(LayerSpec(torch.nn.Linear, 2, 2) for _ in range(3)), tied[1]]
    module = SimpleNamespace(parts=[0, 2, 3, 4, 5], _layer_specs=specs)
    assert owners_of(module, CHIMERA) == {"words": 0, 1: 0, 2: 1, 3: 2}
    swapped = Layout(2, {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 1})
    assert owners_of(SimpleNamespace(parts=[0, 3, 5], _layer_specs=specs), swapped) == {"words": 1, 1: 1, 2: 1, 3: 0}
