"""Slices that are run for their time alone, on a small decoder in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, SliceStore, active_slice
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.runtime.batch.sliceable import SliceableTensors
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.links.channel import MessageSpec, TensorSpec
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer

LENGTH, ROWS = 24, 2


class Watched(nn.Module):
    """Layers that note what slice they were run on."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.seen: list[ActiveSlice | None] = []
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(active_slice())
        self.shapes.append(tuple(x.shape))
        return self.layers(x)


def _layers() -> list[nn.Module]:
    config = GPTConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, max_sequence_length=64)
    return [spec.build() for spec in gpt_layers(config)]


def _tokens(seed: int) -> Tensor:
    return torch.randint(31, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def timer_of(layers: list[nn.Module], first: bool, last: bool) -> SliceTimer:
    module = Watched(layers)
    labels = SliceableTensors.of_labels(_tokens(1), 1)
    inputs = SliceableTensors.of_inputs(_tokens(0), LENGTH, 1)
    return SliceTimer(
        module,
        LENGTH,
        torch.device("cpu"),
        SliceStore(),
        inputs=inputs if first else None,
        labels=labels if last else None,
        is_last=last,
        loss_fn=gpt_loss,
    )


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)])
def timer(request: pytest.FixtureRequest) -> Iterator[SliceTimer]:
    first, last = request.param
    layers = _layers()
    timer = timer_of(layers[None if first else 1 : None if last else -2], first, last)
    if not first:
        for tokens in (4, 8, LENGTH):
            spec = TensorSpec((ROWS, tokens, 16), torch.float32, requires_grad=True)
            timer.receive(tokens, MessageSpec((spec,), is_tuple=False))
    with untouched(timer.module):
        yield timer


def test_any_slice_runs_in_any_order(timer: SliceTimer) -> None:
    for tokens in (4, 8, LENGTH):
        timer.output_spec(tokens)
    module = timer.module
    assert isinstance(module, Watched)
    for tokens, prefix in [(8, 16), (4, 0), (LENGTH, 0), (4, 12), (4, 12)]:
        seconds, live = timer.forward(tokens, prefix)
        assert seconds > 0 and timer.backward(live) > 0
        active = module.seen[-1]
        assert active is not None and (active.start, active.stop, active.mode) == (prefix, prefix + tokens, "probe")
        assert module.shapes[-1][:2] == (ROWS, tokens)
    assert all((p.grad is not None) and p.grad.abs().sum() > 0 for p in module.parameters())
