"""Slices that are run for their time alone, whole and layer by layer, on small parts in one process."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from terapipe_ds.attention import ActiveSlice, SliceStore, active_slice
from terapipe_ds.attention.call import Call
from terapipe_ds.attention.kept import KeptCalls
from terapipe_ds.costs.profile import CostSample
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.plan import weight_groups
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.links.specs import MessageSpec, TensorSpec
from terapipe_ds.runtime.profiling.layer_times import measure_layers, shares_of_memory
from terapipe_ds.runtime.profiling.slice_timer import LayerByLayer, LayerKept, SliceTimer
from tests.small_models.mixers import Attends

LENGTH, ROWS = 16, 2


class Named(NamedTuple):
    x: Tensor
    twice: Tensor


class Clock:
    """Seconds that pass only while a layer works: as many as the layer says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(torch.autograd.Function):
    """x + 1, at a price."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward_s: float, backward_s: float) -> Tensor:
        clock.now_s += forward_s
        ctx.price = clock, backward_s
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        clock, seconds = ctx.price
        clock.now_s += seconds
        return grad, None, None, None


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, 2 * x), lambda x: {"x": [x], "n": 3, "no": None}, lambda x: Named(x, 2 * x)]
)
def test_gradients_are_those_of_the_whole(wrap: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)

    def unwrap(value: Any) -> Any:
        return sum(leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf))

    functions: list[Any] = [lambda x: wrap(first(x)), lambda x: last(unwrap(x)).relu_() + 0, lambda x: x.mul_(2)]
    x, gradients = torch.randn(2, 4), []
    parameters, layers = [*first.parameters(), *last.parameters()], LayerByLayer(functions)
    for run in (lambda x: functions[2](functions[1](functions[0](x))), layers):
        run(x).square().sum().backward()
        assert run is not layers or len(layers.backward()) == 3
        gradients.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    for whole, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, whole)


# -- on a part


class Part(nn.Module):
    """As much of a PipelineModule as a timer asks for; notes what slices it was run on."""

    activation_checkpoint_interval = 0

    def __init__(self, functions: list[Any]) -> None:
        super().__init__()
        self.forward_funcs, self.loss_fn = functions, gpt_loss
        self.held = nn.ModuleList(each for each in functions if isinstance(each, nn.Module))
        self.seen: list[tuple[ActiveSlice | None, tuple[int, ...]]] = []

    def forward(self, x: Any) -> Any:
        self.seen.append((active_slice(), tuple(x.shape)))
        for function in self.forward_funcs:
            x = function(x)
        return x


def timer_of(functions: list[Any], first: bool, last: bool) -> SliceTimer:
    """Return a timer that knows slices of 2, 4 and LENGTH tokens."""
    tokens = torch.randint(31, (ROWS, LENGTH))
    timer = SliceTimer(
        Part(functions),
        LENGTH,
        torch.device("cpu"),
        SliceStore(),
        inputs=SliceableTensors.of_inputs(tokens, LENGTH, 1) if first else None,
        labels=SliceableTensors.of_labels(tokens, 1) if last else None,
        is_last=last,
    )
    for length in (2, 4, LENGTH):
        if not first:
            timer.receive(length, MessageSpec((TensorSpec((ROWS, length, 16), torch.float32, True),), False))
        timer.output_spec(length)
    return timer


@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, True), (False, False)])
def test_any_slice_runs_in_any_order(first: bool, last: bool) -> None:
    config = GPTConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, max_sequence_length=64)
    layers = [spec.build() for spec in gpt_layers(config)][None if first else 1 : None if last else -2]
    timer = timer_of(layers, first, last)
    assert isinstance(timer.module, Part)
    with untouched(timer.module):
        for tokens, prefix in [(2, 14), (4, 0), (LENGTH, 0), (4, 12), (4, 12)]:
            seconds, live = timer.forward(tokens, prefix)
            assert seconds > 0 and timer.backward(live)[0] > 0
            active, shape = timer.module.seen[-1]
            assert active is not None and (active.start, active.stop, active.mode) == (prefix, prefix + tokens, "probe")
            assert shape[:2] == (ROWS, tokens)
        assert all((p.grad is not None) and p.grad.abs().sum() > 0 for p in timer.module.parameters())


SAMPLES = (CostSample(4, 0, 10.0, 40.0, weight_s=6.0), CostSample(4, 12, 20.0, 50.0, weight_s=6.0))


def test_the_layers_of_a_part_take_together_what_it_takes() -> None:
    """Layers of 1 s and 3 s, both ways."""
    clock = Clock()
    linears = [nn.Linear(16, 16), nn.Linear(16, 16)]
    layers = [lambda x, w=w, s=s: Slow.apply(w(x), clock, s, s) for w, s in zip(linears, (1.0, 3.0), strict=True)]
    timer = timer_of(layers, False, False)
    timer.clock = clock
    timed = measure_layers(timer, ["one", "two"], SAMPLES)
    assert timed is not None
    found = [[(s.forward_s, s.backward_s, s.weight_s) for s in layer.profile.samples] for layer in timed]
    # W takes no time by this clock, so that both layers have half of it, but never more than their backwards
    assert found == [[(2.5, 10.0, 3.0), (5.0, 12.5, 3.0)], [(7.5, 30.0, 3.0), (15.0, 37.5, 3.0)]]


def test_bytes_of_layers_are_those_that_they_keep() -> None:
    timer = timer_of([nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64)], False, False)
    with untouched(timer.module):
        kept = timer.layer_bytes(4, with_memory=True)
    rows = ROWS * 4 * 4  # of 4 tokens, 4 bytes each
    assert [layer.sent for layer in kept] == [16 * rows, 16 * rows, 64 * rows]
    assert all(layer.kept >= layer.sent for layer in kept) and {layer.stored for layer in kept} == {0}
    counts = [(10, 0), (0, 0), (30, 30)]
    seen = [LayerKept(1, 2, 0), LayerKept(3, 0, 0), LayerKept(4, 6, 0)]
    whole = PartMemory(400, 80.0, 16.0, 8.0, working_bytes=5, gradient_bytes=60, window_tokens=7)
    one, two, three = map(PartMemory.of, shares_of_memory(whole, seen, counts))
    assert one == PartMemory(100, 10.0, 4.0, 2.0, working_bytes=5, window_tokens=7)
    assert two == PartMemory(0, 30.0, 0.0, 0.0, working_bytes=5, window_tokens=7)
    assert three == PartMemory(300, 40.0, 12.0, 6.0, working_bytes=5, gradient_bytes=60, window_tokens=7)


def test_frozen_parameters_are_counted_apart() -> None:
    layers = [nn.Linear(16, 16), nn.Linear(16, 16)]
    layers[0].requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    timed = measure_layers(timer_of([*layers, torch.relu], False, False), "abc", SAMPLES)
    assert timed is not None
    counts = [(layer.profile.parameters, layer.profile.trained_parameters) for layer in timed]
    assert counts == [(272, 0), (272, 256), (0, 0)] and [layer.kind[0] for layer in timed] == ["a", "b", "c"]


@pytest.mark.parametrize("interval", [0, 1])
def test_the_loss_is_in_the_last_layers_share(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    """Layers of 1 s and a head of 2 s each way, and a loss whose forward takes 4 s and its backward 12 s."""
    clock = Clock()
    monkeypatch.setattr(Part, "activation_checkpoint_interval", interval)
    linears = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 31)]
    layers = [lambda x, w=w, s=s: Slow.apply(w(x), clock, s, s) for w, s in zip(linears, (1.0, 1.0, 2.0), strict=True)]
    timer = timer_of(layers, False, True)
    timer.module.loss_fn = lambda y, labels: Slow.apply(
        F.cross_entropy(y.flatten(0, 1), labels.flatten()), clock, 4.0, 12.0
    )
    timer.clock = clock
    assert timer.forward(4, 0)[0] == 1 + 1 + 2 + 4
    again = (1.0, 1.0, 2.0) if interval else (0.0,) * 3
    backward = [s + more for s, more in zip((1.0, 1.0, 2.0 + 12.0), again, strict=True)]
    nothing = (0.0,) * 3
    assert timer.layer_seconds(4) == list(zip((1.0, 1.0, 6.0), backward, nothing, nothing, strict=True))


@pytest.mark.parametrize("interval", [0, 1])
def test_measured_slices_keep_attention_as_training_does(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    timer = timer_of([nn.Linear(16, 16)], False, False)
    monkeypatch.setattr(Part, "activation_checkpoint_interval", interval)
    monkeypatch.setattr(Part, "_terapipe_kept_calls", KeptCalls(), raising=False)
    timer.forward(4, 0)
    assert isinstance(timer.module, Part)
    active = timer.module.seen[-1][0]
    assert active is not None and active.keeps_attention is bool(interval)


@pytest.mark.parametrize(
    ("keeps", "interval", "again"), [(False, 1, 1.0 + 5.0), (True, 1, 1.0), (False, 0, 0.0), (True, 0, 0.0)]
)
def test_attention_that_is_kept_counts_once(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, interval: int, again: float
) -> None:
    """A layer of 1 s each way, beside kernels of attention that take 5 s forward."""
    clock, attend = Clock(), Call._attend
    attention = Attends("a", 16, 2)

    def slow(self: Call, *tensors: Any) -> Any:
        clock.now_s += 5.0
        return attend(self, *tensors)

    monkeypatch.setattr(Call, "_attend", slow)
    monkeypatch.setattr(Part, "activation_checkpoint_interval", interval)
    monkeypatch.setattr(Part, "_terapipe_kept_calls", KeptCalls() if keeps else None, raising=False)
    plain = nn.Linear(16, 16)
    timer = timer_of([lambda x: Slow.apply(attention(x), clock, 1.0, 1.0), plain], False, False)
    timer.clock = clock
    kept_s = 5.0 if keeps else 0.0
    assert timer.layer_seconds(4, 4) == [(1.0 + 5.0, 1.0 + again, 0.0, kept_s), (0.0,) * 4]
    # output [2 rows, 4 tokens, 16] and log-sum-exp [2 rows, 2 heads, 4 tokens] in fp32
    assert [one.attention for one in timer.layer_bytes(4, False)] == [2 * 4 * (16 + 2) * 4 if keeps else 0, 0]


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (4, 1), (4, 2)])
def test_slices_join_up_to_the_tokens_at_which_the_engine_ends_a_group(rows: int, ranks: int) -> None:
    timer = SliceTimer(module=None, sequence_length=LENGTH, device=None, store=None, rows=rows)  # type: ignore[arg-type]
    timer.sequence = dataclasses.replace(timer.sequence, size=ranks)
    groups = weight_groups([64] * 256, rows / ranks)
    assert {64 * len(group) for group in groups} == {timer.joined_tokens}
