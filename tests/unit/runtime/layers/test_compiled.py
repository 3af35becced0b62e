"""Compare compiled layers on slices with the same layers uncompiled on whole sequences, and count their graphs."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, carry, opaque, push_slice, sliced_attention
from terapipe_ds.attention.document_edges import Documents, Starts
from terapipe_ds.attention.opaque import running
from terapipe_ds.models.gpt import DecoderLayer, GPTConfig
from terapipe_ds.runtime.layers import compiled
from terapipe_ds.runtime.layers.compiled import compile_layer, layers_as_they_are

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class CountedGraphs:
    """A backend of torch.compile that counts the graphs with operations in them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        has_operations = any(node.op.startswith("call_") for node in graph.graph.nodes)
        compiled = aot_eager(graph, inputs)  # which may have torch trace once more
        self.count += has_operations
        return compiled


class Recurrent(nn.Module):
    """A running sum that reads its state first and writes it last; its name is itself, no number in a graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        before = carry.read(self, "sum")
        sums = self.project(hidden).cumsum(1)
        if before is not None:
            sums = sums + before
        return carry.write(self, "sum", sums[:, -1:], hidden + sums.tanh())


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not opaque._calls and running.name is None


def stack(kind: str) -> nn.ModuleList:
    torch.manual_seed(1)
    if kind == "recurrent":
        return nn.ModuleList([Recurrent(32) for _ in range(2)])
    config = GPTConfig(hidden_size=32, num_heads=4, num_kv_heads=2, init_std=0.3)
    return nn.ModuleList([DecoderLayer(config, index) for index in range(2)])


def run(layers: nn.ModuleList, x: Tensor, recompute: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    return x


def gradients(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return [x.grad, *(p.grad for p in layers.parameters())]  # type: ignore[list-item]


def train_in_slices(
    layers: nn.ModuleList, x: Tensor, lengths: list[int], recompute: bool = False, starts: Starts | None = None
) -> Tensor:
    """Run forwards of all slices of two micro-batches, then the backwards in reverse; return the outputs."""
    store, total, outs, begun = SliceStore(), sum(lengths), [], []
    for micro_batch, rows in enumerate(x.split(len(x) // 2)):
        start = 0
        for length in lengths:
            edges = None if starts is None else Documents(starts, start, start + length)
            options = {"micro_batch_id": micro_batch, "store": store, "documents": edges}
            active = ActiveSlice(start, start + length, total, **options)  # type: ignore[arg-type]
            with push_slice(active):
                out = run(layers, rows[:, start : start + length].clone(), recompute)
            begun.append((active, out))
            start += length
        outs.append(torch.cat([out for _, out in begun[-len(lengths) :]], 1))
    for active, out in reversed(begun):
        with push_slice(active.replace(mode="recompute")):
            out.backward(weights_of(out, active))
    for micro_batch in range(2):
        store.release(0, micro_batch)
    return torch.cat(outs).detach()


def weights_of(out: Tensor, active: ActiveSlice) -> Tensor:
    return torch.arange(active.start, active.stop, dtype=out.dtype)[None, :, None].sin().expand_as(out)


def compile_all(layers: nn.ModuleList, backend: str | Callable[..., Any]) -> None:
    for index, layer in enumerate(layers):
        compile_layer(layer, f"layer {index}", backend)


def compare(kind: str, cuts: list[list[int]], backend: str | Callable[..., Any], recompute: bool = False) -> None:
    plain = stack(kind)
    layers = copy.deepcopy(plain)
    compile_all(layers, backend)
    for lengths in cuts:
        total = sum(lengths)
        x = torch.randn(4, total, 32)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = train_in_slices(layers, ours, lengths, recompute)
        expected = run(plain, theirs, False)
        expected.backward(weights_of(expected, ActiveSlice(0, total, total)))
        torch.testing.assert_close(out, expected.detach(), **TOLERANCE)
        # sums over all tokens of a batch: their size says what 1e-5 is
        for got, want in zip(gradients(layers, ours), gradients(plain, theirs), strict=True):
            assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
        for each in (layers, plain):
            each.zero_grad()


CUTS = [[8, 5, 3], [2, 9, 4, 6], [16], [3, 4]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt", "recurrent"])
def test_slices_of_any_length_and_all_layers_of_a_kind_share_two_graphs(kind: str) -> None:
    graphs = CountedGraphs()
    compare(kind, CUTS, graphs)
    compare(kind, CUTS[1:3], graphs, recompute=True)
    assert 1 <= graphs.count <= 2


class Repeated(nn.Module):
    """Calls attention twice with equal arguments, with whatever it has; and once for nothing, where it is compiled."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.project, self.sinks, self.options = nn.Linear(width, width), nn.Parameter(torch.randn(4)), options

    def forward(self, hidden: Tensor) -> Tensor:
        row, document = opaque.row_positions(hidden), opaque.position_ids(hidden, 0)
        places = (0.1 * row.double()).cos()[None, :, None] + (0.3 * document.double()).sin()[..., None]
        heads = (self.project(hidden) + places.to(hidden.dtype)).unflatten(-1, (4, -1)).transpose(1, 2)
        options = {"sinks": self.sinks, **self.options}
        first = sliced_attention(heads, heads, heads, (self, 0), **options)
        again = sliced_attention(heads, heads, heads, (self, 1), **options)
        if torch.compiler.is_compiling():  # else the store refuses a call whose backward never comes
            sliced_attention(heads, heads, heads, (self, 2), **{**options, "dropout_p": 0.0})
        return hidden + torch.cat([first, 2 * again], 3).transpose(1, 2).flatten(2).split(hidden.shape[2], 2)[0]


def train_again(layers: nn.ModuleList, lengths: list[int], documents: bool) -> list[Tensor]:
    """Train with the same inputs and random numbers each time; return the output and all gradients."""
    torch.manual_seed(3)
    x = torch.randn(4, sum(lengths), 32, dtype=torch.float64, requires_grad=True)
    starts = ((0, 3, 7), (0, 12)) if documents else None
    for parameter in layers.parameters():
        parameter.grad = None
    return [train_in_slices(layers, x, lengths, starts=starts), *gradients(layers, x)]


def compare_repeated(backend: str | Callable[..., Any]) -> None:
    """Compare with the same layers uncompiled: a window, sinks and dropout; rows of one document, and of several."""
    torch.manual_seed(1)
    options = {"window": 6, "softcap": 5.0, "dropout_p": 0.25}
    plain = nn.ModuleList(Repeated(32, **options) for _ in range(2)).double()
    layers = copy.deepcopy(plain)
    compile_all(layers, backend)
    for lengths, documents in (([8, 5, 3], False), ([4, 5, 7], True), ([16], True)):
        ours, theirs = (train_again(each, lengths, documents) for each in (layers, plain))
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_equal_calls_stay_two_and_unused_ones_do_no_harm() -> None:
    graphs = CountedGraphs()
    compare_repeated(graphs)
    assert 1 <= graphs.count <= 2


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("kind", ["gpt", "recurrent", "repeated"])
def test_inductor_gives_the_same(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if kind == "repeated":
        compare_repeated("inductor")
    else:
        compare(kind, CUTS[:2], "inductor", recompute=kind == "gpt")


class OutOfGraph(nn.Module):
    compile_safe = True

    @torch.compiler.disable
    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        return sliced_attention(heads, heads, heads, "attention").transpose(1, 2).flatten(2)


def test_attention_beside_the_graph_is_an_error() -> None:
    """It would have another name than the same call in a graph."""
    layer = OutOfGraph()
    compile_layer(layer, "layer", CountedGraphs())
    x, active = torch.randn(1, 8, 32), ActiveSlice(0, 8, 16, store=SliceStore())
    with push_slice(active), pytest.raises(SliceStoreError, match="TORCH_LOGS=graph_breaks"):
        layer(x)
    with push_slice(active), layers_as_they_are():
        assert layer(x).shape == x.shape


@pytest.mark.parametrize(("layers", "flops", "sequence", "told"), [
    ([OutOfGraph(), nn.Linear(2, 2)], False, False, None),
    ([nn.Linear(2, 2)], False, False, "no layer can be compiled, of Linear here"),
    ([OutOfGraph()], True, False, "flops_profiler"),
    ([OutOfGraph()], False, True, "'sequence' axis"),
], ids=["some", "none", "flops", "sequence"])  # fmt: skip
def test_what_cannot_be_compiled_is_refused(
    layers: list[nn.Module], flops: bool, sequence: bool, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "gather", lambda value: [value])
    module = nn.Sequential(*layers)
    module.forward_funcs = layers  # type: ignore[assignment]
    problem = compiled.problem_of_compile(module, flops, sequence)
    assert problem is None if told is None else told in str(problem)
