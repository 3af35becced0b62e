"""`"compile": true` in the engine: the numbers of the stock engine, from two graphs per kind of layer."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.layers import compiled
from terapipe_ds.runtime.links import groups
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.nccl_emulator import emulated_nccl
from tests.unit.runtime.layers.test_compiled import CountedGraphs


@dataclass
class Trained:
    """Hold the differences from the stock engine on this rank, the number of new graphs, and the log."""

    errors: dict[str, float]
    graphs: int
    said: list[str]


def trained(terapipe: dict[str, Any] | None, lengths: Sequence[int], **changes: Any) -> tuple[engines.Run, list[float]]:
    """Train a step on sequences of each length, evaluating before the second and the third."""
    data = [engines.batches(1, 2, first_seed=seed, length=length)[0] for seed, length in enumerate(lengths)]
    evaluated: list[float] = []

    def evaluate(step: int) -> None:
        if step in (1, 2):
            evaluated.append(float(engine.eval_batch(iter(data[0]))))

    with engines.engine_of(engines.gpt_layers(num_layers=2), terapipe, **changes) as engine:
        run = engines.train(engine, data, evaluate)
    return run, evaluated


def job(cases: dict[str, Case]) -> dict[str, Trained]:
    """Train all cases with one backend, so that a graph of one serves the others."""
    graphs, results = CountedGraphs(), {}
    torch._dynamo.reset()
    stock = functools.cache(functools.partial(trained, None, stages=1))
    with mock.patch.object(compiled, "DEFAULT_BACKEND", graphs):
        for name, (terapipe, lengths, changes) in cases.items():
            before = graphs.count
            with engines.logged() as said:
                run, evaluated = trained(engines.unchecked(compile=True, **terapipe), lengths, **changes)
            expected, of_stock = stock(lengths)
            errors = engines.differences(run, expected)
            pairs = zip(evaluated, of_stock, strict=True)
            errors["evaluation"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
            results[name] = Trained(errors, graphs.count - before, said)
    torch._dynamo.reset()
    return results


Case = tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]  # the section, lengths of sequences, DeepSpeed's config
MIXED, SAME = (23, 23, 19, 31), (23, 23)
OFFLOADED = {"offload_activations": True, "verify": "first_batch"}
FINITE = {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2, "check_finite": "every_step"}
CASES: dict[str, Case] = {
    "reverse": ({"schedule": "terapipe", "slices": 3}, MIXED, {}),
    "offload, verify": ({"schedule": "seq1f1b", "slices": [9, 8, 5, 1], **OFFLOADED}, SAME, {}),
    "zero1, finite": ({**FINITE, "slices": 2}, SAME, engines.ZERO1),
    "auto": ({"schedule": "auto", "slices": "auto", "granularity_tokens": 6}, SAME, {}),
    "recompute": ({"schedule": "seq1f1b", "slices": [9, 8, 6], "recompute": "full"}, SAME, {}),
    "non-reentrant": ({"schedule": "seq1f1b", "slices": 3}, SAME, engines.CHECKPOINTING["non_reentrant"]),
}


@functools.cache
def results() -> list[dict[str, Trained]]:
    return rank_pool(2).run(engines.with_few_rounds, job=job, cases=CASES, timeout_s=600)


@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_train_as_the_stock_engine(name: str) -> None:
    check([rank[name] for rank in results()], name)


def check(ranks: list[Trained], name: str) -> None:
    limit = 1e-5 if "zero1" in name else 1e-10  # ZeRO sums gradients in fp32
    assert not engines.violations([rank.errors for rank in ranks], limit, evaluation=1e-6)
    assert all(any("compile: layers of " in line for line in rank.said) for rank in ranks)
    said = "\n".join(ranks[0].said)
    assert ("schedules that split backwards are left out" in said) == (name == "auto")
    assert not re.search("zbv|-zb|zb-", said)


def test_two_graphs_of_each_kind_serve_all_slices_lengths_and_steps() -> None:
    """Expect a graph with gradients, and one without; a third if training layers also run without, to be recomputed."""
    for rank, kinds in zip(results(), (1, 2), strict=True):  # of the second stage: with the norm
        first, *others, recompute, non_reentrant = (rank[name].graphs for name in CASES)
        assert 1 <= first <= 2 * kinds
        assert sum(others) <= 2 * kinds - first + (2 if kinds == 1 else 0), others  # the norm may move
        assert recompute <= kinds and non_reentrant == 0


def engines_in_turn(stages: int, compiles: Sequence[bool | None]) -> list[tuple[engines.Run, int]]:
    """Train one module by several engines; return the results and new graphs of each. The first one stays open."""
    torch._dynamo.reset()
    graphs, results = CountedGraphs(), []
    module = engines.pipeline_module(engines.gpt_layers(num_layers=1), stages)
    with mock.patch.object(compiled, "DEFAULT_BACKEND", graphs), contextlib.ExitStack() as first:
        for number, each in enumerate(compiles):
            terapipe, before = None if each is None else engines.unchecked(compile=each), graphs.count
            with engines.started(module, terapipe, **engines.ZERO1) if number else contextlib.nullcontext() as engine:
                engine = engine or first.enter_context(engines.started(module, terapipe, **engines.ZERO1))
                data = engines.batches(2, first_seed=10 * number)  # nothing is compiled in the first batch
                results.append((engines.train(engine, data), graphs.count - before))
    torch._dynamo.reset()
    return results


TURNS = (False, True, True, False)


def job_in_turn() -> list[tuple[dict[str, float], int]]:
    stock, ours = engines_in_turn(1, [None] * len(TURNS)), engines_in_turn(2, TURNS)
    return [(engines.differences(run, other), count) for (run, count), (other, _) in zip(ours, stock, strict=True)]


def test_another_engine_of_the_same_module_compiles_as_its_own_config_says() -> None:
    """Check that no layer keeps the compiled forward of the engine before it, or hands gradients to that engine."""
    for number, ranks in enumerate(zip(*rank_pool(2).run(job_in_turn, timeout_s=300), strict=True)):
        assert not engines.violations([errors for errors, _ in ranks], 1e-5), number
        assert all(graphs <= 3 if TURNS[number] else graphs == 0 for _, graphs in ranks), (number, ranks)
        assert number != 1 or all(graphs for _, graphs in ranks)


def job_of_loading() -> list[bool]:
    """Return whether engines count on kernels that were loaded at the start: with compiled layers, and without."""
    found = []
    with emulated_nccl(eager=True), mock.patch.object(groups, "loads_kernels_at_start", lambda: True):
        for compiles in (True, False):
            with engines.engine_of(engines.gpt_layers(num_layers=1), engines.unchecked(compile=compiles)) as engine:
                found.append(engine._stage.links._loads_at_start)
    return found


def test_no_engine_with_compiled_layers_counts_on_kernels_loaded_at_the_start() -> None:
    assert rank_pool(2).run(job_of_loading) == [[False, True]] * 2


def job_by_hand() -> list[str]:
    with engines.engine_of(engines.gpt_layers(num_layers=1), engines.unchecked(compile=True)) as engine:
        plan = SlicePlan((engines.LENGTH,))
        return [engines.raised_by(lambda each=each: engine.use_slice_plan(plan, each))[1] for each in ("zb-h1", None)]


def test_a_schedule_set_by_hand_leaves_backwards_whole_too() -> None:
    for split, whole in rank_pool(2).run(job_by_hand):
        assert re.search("use_slice_plan: .*compile = .*with schedule = 'zb-h1'.*nothing is left for W", split)
        assert not whole
