"""`"compile": true` in the engine: the numbers of the stock engine, from two graphs per kind of layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from terapipe_ds.runtime.layers import compiled
from tests.distributed.engines import (
    Run,
    batches,
    differences,
    engine_of,
    gpt_layers,
    logged,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool


class CountedGraphs:
    """A backend of torch.compile that counts the graphs with operations in them, and adds none of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        has_operations = any(node.op.startswith("call_") for node in graph.graph.nodes)
        compiled = aot_eager(graph, inputs)  # which may have torch trace once more
        self.count += has_operations
        return compiled


@contextlib.contextmanager
def counted() -> Iterator[CountedGraphs]:
    """Layers are compiled by a backend that counts."""
    graphs = CountedGraphs()
    torch._dynamo.reset()
    with mock.patch.object(compiled, "DEFAULT_BACKEND", graphs):
        yield graphs
    torch._dynamo.reset()


@dataclass
class Trained:
    """What an engine gave on this rank, and the graphs that it compiled."""

    run: Run
    evaluated: list[float]
    graphs: int
    said: list[str] = field(default_factory=list)


def trained(layers: Callable[[], Any], terapipe: dict[str, Any] | None, lengths: list[int], **changes: Any) -> Trained:
    """Train a step on sequences of each length, evaluating after the second and the third."""
    data = [batches(1, 2, first_seed=seed, length=length)[0] for seed, length in enumerate(lengths)]
    evaluated: list[float] = []
    with counted() as graphs, logged() as said, engine_of(layers(), terapipe, **changes) as engine:

        def evaluate(step: int) -> None:
            if step in (2, 3):
                evaluated.append(float(engine.eval_batch(iter(data[0]))))

        run = train(engine, data, evaluate)
    return Trained(run, evaluated, graphs.count, said)


def job(dtype: str, terapipe: dict[str, Any], lengths: list[int]) -> tuple[dict[str, float], Trained]:
    def layers() -> Any:
        return gpt_layers(dtype)

    stock = trained(layers, None, lengths, stages=1)
    ours = trained(layers, section(compile=True, **terapipe), lengths)
    errors = differences(ours.run, stock.run)
    pairs = zip(ours.evaluated, stock.evaluated, strict=True)
    errors["evaluation"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return errors, ours


CASES = [
    ("float64", {"schedule": "terapipe", "slices": 3}, 1e-10),
    ("float64", {"schedule": "seq1f1b", "slices": [9, 8, 6], "recompute": "full"}, 1e-10),
    ("float32", {"schedule": "seq1f1b", "slices": 4, "offload_activations": True}, 1e-5),
]


@pytest.mark.parametrize(("dtype", "terapipe", "limit"), CASES, ids=["reverse", "recompute", "fp32"])
def test_compiled_layers_train_as_the_stock_engine(dtype: str, terapipe: dict[str, Any], limit: float) -> None:
    lengths = [23] * 4 if isinstance(terapipe["slices"], list) else [23, 23, 19, 31]
    results = rank_pool(2).run(job, dtype=dtype, terapipe=terapipe, lengths=lengths)
    assert not violations([errors for errors, _ in results], limit, evaluation=max(limit, 1e-6))
    kinds = ("DecoderLayer",), ("DecoderLayer", "FinalNorm")  # graphs of each: with gradients, and without
    for (_, ours), of_stage in zip(results, kinds, strict=True):
        assert 1 <= ours.graphs <= 2 * len(of_stage)
        assert any("compile: layers of " in line for line in ours.said)
