"""What users of DeepSpeed's pipeline engine rely on, feature by feature, against that engine in the same ranks.

The functions named `job_...` run on all ranks of a pool and return what the tests assert. The stock engine has
the same stages as ours; where it cannot do what is tested, it runs with one stage.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import terapipe_ds
from terapipe_ds.models import gpt
from terapipe_ds.runtime.planning import batch_plans as plans_module
from tests.distributed import tuple_models
from tests.distributed.engines import (
    EXACT,
    FP32_SCALAR,
    IGNORE_INDEX,
    LENGTH,
    VOCAB_SIZE,
    Batch,
    MicroBatch,
    Run,
    batches,
    both,
    config,
    differences,
    engine_of,
    error_of,
    gpt_layers,
    micro_batch,
    run_training,
    section,
    train,
    violations,
)
from tests.distributed.harness import RankFailure, rank_pool

SCHEDULES = ("gpipe", "1f1b", "terapipe", "seq1f1b")
UNEVEN = [5, 17, 1]
Errors = dict[str, float]


def on_ranks(job: Callable[..., Any], num_ranks: int = 2, **kwargs: Any) -> list[Any]:
    """The results of `job(**kwargs)`, one for each rank."""
    return rank_pool(num_ranks).run(job, **kwargs)


def steps(make: Callable[[int], MicroBatch], num_batches: int = 2) -> list[Batch]:
    """Batches of two micro-batches `make(seed)`."""
    return [[make(100 * step + index) for index in range(2)] for step in range(num_batches)]


# -- evaluation ----------------------------------------------------------------------------------------------

EVALUATIONS: dict[str, dict[str, Any]] = {
    "loss on every rank": {},
    "loss on the last stage": {"bcast_loss": False},
    "losses of the micro-batches": {"bcast_loss": False, "reduce_output": None},
    "three micro-batches": {"bcast_loss": False, "num_micro_batches": 3},
    "one micro-batch": {"bcast_loss": False, "num_micro_batches": 1},
    "loss and logits": {"bcast_loss": False, "return_logits": True},
    "mean of the logits": {"compute_loss": False},
    "logits of the micro-batches": {"compute_loss": False, "reduce_output": None},
    "mean of the logits and logits": {"compute_loss": False, "return_logits": True},
}


def evaluate_all(engine: PipelineEngine, make: Callable[[int], MicroBatch] = micro_batch) -> dict[str, Any]:
    results = {}
    for name, options in EVALUATIONS.items():
        engine.total_loss = None  # the stock engine adds logits to the last training loss, and fails
        data = iter([make(5000 + index) for index in range(options.get("num_micro_batches", 2))])
        results[name] = engine.eval_batch(data, **options)
    return results


def evaluate_in_training(engine: PipelineEngine) -> dict[str, Any]:
    """Two steps, all evaluations, two steps; one iterator gives the data of all steps."""
    iterator = iter([micro for batch in batches(4) for micro in batch])
    engine.set_dataiterator(iterator)
    losses = [float(engine.train_batch()) for _ in range(2)]
    results = evaluate_all(engine)
    restored = engine.data_iterator is iterator
    losses += [float(engine.train_batch()) for _ in range(2)]
    parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return {"results": results, "restored": restored, "losses": losses, "parameters": parameters}


def job_evaluation() -> dict[str, Any]:
    stock, ours = both(evaluate_in_training, terapipe=section(slices=[5, 10, 7, 1]))
    undisturbed = run_training(gpt_layers, section(slices=[5, 10, 7, 1]), batches(4))
    logits = ours["results"]["loss and logits"][1]
    return {
        "errors": {name: error_of(ours["results"][name], stock["results"][name]) for name in EVALUATIONS},
        "losses": error_of(ours["losses"], stock["losses"]),
        "parameters": error_of(ours["parameters"], stock["parameters"]),
        "undisturbed": error_of(ours["parameters"], undisturbed.parameters),
        "restored": ours["restored"],
        "shape of the logits": None if logits is None else tuple(logits.shape),
        "number of losses": len(ours["results"]["losses of the micro-batches"] or []),
    }


def job_logits_without_labels() -> list[float]:
    def run(engine: PipelineEngine) -> list[Any]:
        return [
            engine.eval_batch(iter([(micro_batch(i)[0], labels) for i in range(2)]), compute_loss=False)
            for labels in (None, ())
        ]

    stock, ours = both(run)
    return [error_of(a, b) for a, b in zip(ours, stock, strict=True)]


@functools.cache
def evaluation() -> list[dict[str, Any]]:
    return on_ranks(job_evaluation)


class TestEvaluation:
    @pytest.mark.parametrize("name", EVALUATIONS)
    def test_results_equal_those_of_the_stock_engine(self, name: str) -> None:
        assert max(rank["errors"][name] for rank in evaluation()) <= EXACT

    def test_the_last_stage_has_whole_logits_and_single_losses(self) -> None:
        assert [rank["shape of the logits"] for rank in evaluation()] == [None, (2, LENGTH, VOCAB_SIZE)]
        assert [rank["number of losses"] for rank in evaluation()] == [0, 2]

    def test_logits_need_no_labels(self) -> None:
        assert max(error for errors in on_ranks(job_logits_without_labels) for error in errors) <= EXACT

    def test_training_goes_on_as_if_nothing_had_been_evaluated(self) -> None:
        for rank in evaluation():
            assert rank["restored"] is True
            assert rank["losses"] <= FP32_SCALAR
            assert rank["parameters"] <= EXACT
            assert rank["undisturbed"] == 0.0

    def test_a_model_that_gives_its_own_loss(self) -> None:
        for errors in on_ranks(job_evaluation_of_own_loss):
            assert {name: error for name, error in errors.items() if not error <= EXACT} == {}

    def test_logits_with_rows_and_tokens_in_one_dimension(self) -> None:
        for errors in on_ranks(job_evaluation_of_flat_logits):
            assert {name: error for name, error in errors.items() if not error <= EXACT} == {}

    def test_other_lengths_and_rows_than_in_training_and_inference_mode(self) -> None:
        for in_training, in_evaluation in on_ranks(job_evaluation_of_other_lengths):
            assert in_training <= FP32_SCALAR
            assert in_evaluation <= EXACT


def job_evaluation_of_own_loss() -> Errors:
    stock, ours = both(
        functools.partial(evaluate_all, make=tuple_models.own_loss_micro_batch),
        tuple_models.own_loss_layers,
        section(slices=UNEVEN, loss_reduction="mean"),
        loss_fn=None,
    )
    return {name: error_of(ours[name], stock[name]) for name in EVALUATIONS}


def job_evaluation_of_flat_logits() -> Errors:
    stock, ours = both(
        evaluate_all, tuple_models.flat_layers, section(slices=UNEVEN), stages=2, loss_fn=tuple_models.flat_loss
    )
    return {name: error_of(ours[name], stock[name]) for name in EVALUATIONS}


def job_evaluation_of_other_lengths() -> tuple[float, float]:
    def alternate(engine: PipelineEngine) -> tuple[list[float], list[Any]]:
        trained, evaluated = [], []
        for length, rows in ((LENGTH, 2), (11, 3), (LENGTH, 1)):
            engine.reset_activation_shape()  # the stock engine must be told
            trained.append(float(engine.train_batch(iter(batches(1, length=length, rows=rows)[0]))))
            engine.reset_activation_shape()
            with torch.inference_mode():
                data = iter([micro_batch(seed, length + 2, rows + 1) for seed in (7, 8)])
                evaluated.append(engine.eval_batch(data, bcast_loss=False))
        return trained, evaluated

    (stock_trained, stock_evaluated), (trained, evaluated) = both(alternate)
    return error_of(trained, stock_trained), error_of(evaluated, stock_evaluated)


# -- shapes that change, accumulation, data ------------------------------------------------------------------


def job_lengths_between_batches() -> Errors:
    data = [batches(1, first_seed=length, length=length)[0] for length in (LENGTH, 12, LENGTH, 40, 12)]

    def reset(engine: PipelineEngine, step: int) -> None:
        engine.reset_activation_shape()

    stock = run_training(gpt_layers, None, data, before_step=reset)
    return differences(run_training(gpt_layers, section(), data), stock)


MIXED: list[list[dict[str, int]]] = [
    [{"length": 12}, {"length": LENGTH}, {"length": LENGTH}],
    [{"length": LENGTH}, {"length": 7, "rows": 3}, {"length": 12, "rows": 1}],
    [{"length": 12, "rows": 1}, {"length": 12}, {"length": 12, "rows": 1}],
]


def job_mixed_shapes(stages: int) -> dict[str, Errors]:
    data = [[micro_batch(10 * i + j, **shape) for j, shape in enumerate(b)] for i, b in enumerate(MIXED)]
    options = {"gradient_accumulation_steps": 3}
    stock = run_training(gpt_layers, None, data, stages=1, **options)
    return {
        schedule: differences(
            run_training(gpt_layers, section(schedule=schedule), data, stages=stages, **options), stock
        )
        for schedule in SCHEDULES
    }


def job_batch_sizes() -> dict[str, Any]:
    data = [batches(1, count, first_seed=count)[0] for count in (1, 3, 3, 2)]

    def resize(engine: PipelineEngine, step: int) -> None:
        engine.set_train_batch_size(2 * len(data[step]))

    def run(engine: PipelineEngine) -> tuple[Run, list[Any]]:
        result = train(engine, data, lambda step: resize(engine, step))
        return result, [engine.global_samples, engine.global_steps, engine.train_batch_size()]

    (stock, stock_counts), (ours, counts) = both(run, gradient_accumulation_steps=1)
    return {"errors": differences(ours, stock), "counts": counts, "stock counts": stock_counts}


def job_whole_sequences() -> dict[str, Errors]:
    stock = run_training(fp32_layers, None, batches(3))
    return {
        schedule: differences(run_training(fp32_layers, section(slices=1, schedule=schedule), batches(3)), stock)
        for schedule in SCHEDULES
    }


def job_data_parallel() -> tuple[Errors, dict[str, float]]:
    """One stage, two pipelines with data of their own, of lengths of their own."""
    pipeline_id = torch.distributed.get_rank()
    seeds = range(100 * pipeline_id, 100 * pipeline_id + 3)
    data = [[micro_batch(seed), micro_batch(seed + 50, length=15 + 5 * pipeline_id)] for seed in seeds]

    def run(engine: PipelineEngine) -> tuple[Run, dict[str, Any]]:
        result = train(engine, data)
        return result, {
            "additional losses": {name: float(loss) for name, loss in engine.get_additional_losses().items()},
            "evaluation": engine.eval_batch(iter(data[0])),
            "logits": engine.eval_batch(iter(data[1]), return_logits=True, bcast_loss=False),
            "samples": engine.global_samples,
        }

    (stock, stock_results), (ours, results) = both(
        run, terapipe=section(slices=4), stages=1, module_class=tuple_models.ReportingModule
    )
    return differences(ours, stock), {name: error_of(results[name], stock_results[name]) for name in results}


class TestShapes:
    def test_one_slice_is_bit_for_bit_the_stock_engine(self) -> None:
        for rank in on_ranks(job_whole_sequences):
            assert rank == dict.fromkeys(SCHEDULES, dict.fromkeys(rank["gpipe"], 0.0))

    def test_pipelines_side_by_side(self) -> None:
        errors, results = zip(*on_ranks(job_data_parallel), strict=True)
        assert violations(errors) == {}
        for rank in results:
            assert {name: error for name, error in rank.items() if not error <= EXACT} == {}

    def test_the_sequence_length_changes_between_batches(self) -> None:
        assert violations(on_ranks(job_lengths_between_batches)) == {}

    @pytest.mark.parametrize("stages", [2, 3])
    def test_lengths_and_rows_change_between_micro_batches(self, stages: int) -> None:
        results = on_ranks(job_mixed_shapes, stages, stages=stages)
        for schedule in SCHEDULES:
            assert violations([rank[schedule] for rank in results]) == {}, schedule

    def test_the_batch_size_is_changed_during_training(self) -> None:
        results = on_ranks(job_batch_sizes)
        assert violations([rank["errors"] for rank in results]) == {}
        for rank in results:
            assert rank["counts"] == rank["stock counts"] == [18, 4, 4]


def dataset() -> Dataset[Any]:
    tokens, labels = zip(*(micro_batch(seed, rows=1) for seed in range(14)), strict=True)
    return TensorDataset(torch.cat(tokens), torch.cat(labels))


def job_training_data() -> Errors:
    """Data from `deepspeed.initialize(training_data=...)`, for longer than one epoch."""

    def run(engine: PipelineEngine) -> dict[str, Any]:
        losses = [float(engine.train_batch()) for _ in range(5)]
        return {"returned": losses, "parameter": dict(engine.module.named_parameters())}

    def loader(*args: Any, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(*args, **{**kwargs, "num_workers": 0})  # a rank may not have child processes

    with mock.patch("deepspeed.runtime.dataloader.DataLoader", loader):
        stock, ours = both(run, initialize={"training_data": dataset()})
    return {kind: error_of(ours[kind], stock[kind]) for kind in stock}


def train_without_iterator(engine: PipelineEngine) -> Run:
    """One step with the data of the iterator that the engine has."""
    run = Run(returned=[float(engine.train_batch())])
    if engine.is_last_stage():
        run.losses.append(float(engine.total_loss) / 2)
    run.parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return run


def job_interrupted_training() -> dict[str, Any]:
    """What a caller meets who goes on after an error in the data; in between the training of two good batches."""
    too_short = [(torch.zeros(2, 2, dtype=torch.long),) * 2] * 2
    unequal = [(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long))] * 2
    no_labels = [(torch.zeros(2, 5, dtype=torch.long), None)] * 2
    good = batches(2)
    errors: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[Any], Any], data: Sequence[Any] | None) -> None:
        try:
            action(None if data is None else iter(data))
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    with engine_of(gpt_layers(), section()) as engine:
        first = train(engine, good[:1])
        attempt("end of the data", engine.train_batch, good[0][:1])
        attempt("end again", engine.train_batch, None)
        attempt("too short", engine.train_batch, too_short)
        attempt("unequal lengths", engine.train_batch, unequal)
        attempt("no labels", engine.train_batch, no_labels)
        of_rows = [((tokens, torch.zeros(tokens.shape)), labels) for tokens, labels in batches(1)[0]]
        if engine.is_first_stage():
            of_rows = [(inputs, None) for inputs, _ in of_rows]
        attempt("labels on the last stage only", engine.train_batch, of_rows)
        attempt("evaluation", functools.partial(engine.eval_batch, return_logits=True), unequal)
        attempt("end in evaluation", engine.eval_batch, good[0][:1])
        attempt("no iterator in evaluation", engine.eval_batch, None)
        engine.set_dataiterator(iter(good[1]))
        attempt("before the second batch", functools.partial(engine.eval_batch, return_logits=True), unequal)
        keeps_logits = engine.eval_return_logits
        second = train_without_iterator(engine)
        live_bytes = engine.slice_store.live_bytes()
    with engine_of(gpt_layers(), section(slices=UNEVEN)) as engine:
        attempt("another sum", engine.train_batch, batches(1, length=20)[0])
    undisturbed = run_training(gpt_layers, section(), good)
    return {
        "errors": errors,
        "kept": (live_bytes, keeps_logits),
        "same": error_of(second.parameters, undisturbed.parameters),
        "losses": first.losses + second.losses == undisturbed.losses,
    }


def job_batch_fn() -> Errors:
    """A function of the caller makes lists of what the iterator gives."""

    def run(engine: PipelineEngine) -> Run:
        engine.set_batch_fn(lambda batch: [batch["tokens"], batch["labels"]])
        data: Any = [[dict(zip(("tokens", "labels"), each, strict=True)) for each in batch] for batch in batches(2)]
        return train(engine, data)

    stock, ours = both(run)
    return differences(ours, stock)


def job_after_an_error(kind: str) -> dict[str, Any]:
    """A single process, whose caller goes on after an error in the middle of a batch."""
    make = gpt_layers if kind == "fp64" else fp32_layers
    options = {"stages": 1, **HALF.get(kind, {})}

    def layers() -> list[Any]:
        return [*make(), LayerSpec(tuple_models.Faulty)]

    undisturbed = run_training(layers, section(), batches(2), **options)
    with engine_of(layers(), section(), **options) as engine:
        first = train(engine, batches(2)[:1])
        tuple_models.Faulty.countdown = 5  # in the second micro-batch, after some backwards of the first one
        try:
            engine.train_batch(iter(batches(1, first_seed=300)[0]))
        except MemoryError as error:
            message = str(error)
        live_bytes = engine.slice_store.live_bytes()
        second = train(engine, batches(2)[1:])
    return {
        "message": message,
        "live bytes": live_bytes,
        "returned": first.returned + second.returned == undisturbed.returned,
        "parameters": error_of(second.parameters, undisturbed.parameters),
    }


class TestData:
    def test_a_batch_fn_and_batches_in_lists(self) -> None:
        assert violations(on_ranks(job_batch_fn)) == {}

    @pytest.mark.parametrize("kind", ["fp64", "bf16", "fp16_zero1"])
    def test_nothing_of_a_failed_batch_stays(self, kind: str) -> None:
        """No gradients either, which the next step would add to its own."""
        [found] = on_ranks(job_after_an_error, 1, kind=kind)
        assert found == {"message": "out of memory", "live bytes": 0, "returned": True, "parameters": 0.0}

    def test_training_data_given_to_initialize(self) -> None:
        assert violations(on_ranks(job_training_data)) == {}

    def test_errors_in_the_data_are_raised_everywhere_and_do_no_harm(self) -> None:
        expected = {
            "end of the data": "StopIteration: ",
            "end again": "StopIteration: ",
            "too short": r"TeraPipeConfigError: terapipe.slices = 3: 3 slices .* a sequence of 2 tokens",
            "unequal lengths": r"BatchError: .*the labels have length 7 .* the inputs have shapes \[2, 5\]",
            "no labels": r"BatchError: .*there are no labels",
            "labels on the last stage only": r"BatchError: .*input 1 .*features of each row",
            "evaluation": r"BatchError: .*the labels have length 7",
            "end in evaluation": "StopIteration: ",
            "no iterator in evaluation": r"BatchError: .*there is no data",
            "before the second batch": r"BatchError: .*the labels have length 7",
            "another sum": r"TeraPipeConfigError: terapipe.slices = \[5, 17, 1\] adds up to 23 .* has 20",
        }
        for rank in on_ranks(job_interrupted_training):
            assert rank["errors"].keys() == expected.keys()
            for name, pattern in expected.items():
                assert re.match(pattern, rank["errors"][name]), (name, rank["errors"][name])
            assert rank["kept"] == (0, False)
            assert rank["same"] == 0.0
            assert rank["losses"] is True


# -- tuples between layers, frozen layers --------------------------------------------------------------------

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "off": {},
    "reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    "non_reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
}


def job_guided(stages: int) -> dict[str, Errors]:
    data = steps(tuple_models.guided_micro_batch)
    layers = tuple_models.guided_layers
    stock = run_training(layers, None, data, stages=1)
    return {
        kind: differences(run_training(layers, section(slices=UNEVEN), data, stages=stages, **options), stock)
        for kind, options in CHECKPOINTING.items()
    }


def job_sliced_inputs(sliced_inputs: list[int] | None) -> Errors:
    data = steps(functools.partial(tuple_models.guided_micro_batch, memory=True))
    layers = tuple_models.guided_layers
    stock = run_training(layers, None, data, stages=1)
    ours = section(sliced_inputs=sliced_inputs, verify="off")  # which would refuse what this looks at
    return differences(run_training(layers, ours, data), stock)


def job_scaled(use_at_the_end: bool) -> dict[str, Errors]:
    data = batches(2)
    layers = functools.partial(tuple_models.scaled_layers, use_at_the_end)
    stock = run_training(layers, None, data, stages=1)
    return {
        kind: differences(run_training(layers, section(), data, **options), stock)
        for kind, options in CHECKPOINTING.items()
    }


def job_frozen(kind: str) -> Errors:
    data = batches(2)
    layers = functools.partial(tuple_models.frozen_layers, kind)
    stock = run_training(layers, None, data, stages=1)
    return differences(run_training(layers, section(), data), stock)


def job_doubling() -> dict[str, Errors]:
    layers = tuple_models.doubling_layers
    stock = run_training(layers, None, batches(2), stages=1)
    return {
        kind: differences(run_training(layers, section(slices=UNEVEN), batches(2), **options), stock)
        for kind, options in CHECKPOINTING.items()
    }


def job_summing() -> tuple[dict[str, Errors], float]:
    data = batches(2, masked=False)
    layers, terapipe = tuple_models.summing_layers, section(slices=UNEVEN, loss_reduction="mean")
    loss = {"loss_fn": tuple_models.summed_loss}
    stock = run_training(layers, None, data, **loss)
    errors = {
        kind: differences(run_training(layers, terapipe, data, **loss, **options), stock)
        for kind, options in CHECKPOINTING.items()
    }
    evaluated = both(
        lambda engine: engine.eval_batch(iter(data[0]), return_logits=True, bcast_loss=False),
        layers,
        terapipe,
        **loss,
    )
    return errors, error_of(*evaluated)


class TestTuples:
    def test_one_tensor_twice_and_detached(self) -> None:
        results = on_ranks(job_doubling)
        for kind in CHECKPOINTING:
            assert violations([rank[kind] for rank in results]) == {}, kind

    def test_a_number_that_every_layer_adds_to(self) -> None:
        results, evaluated = zip(*on_ranks(job_summing), strict=True)
        for kind in CHECKPOINTING:
            assert violations([rank[kind] for rank in results]) == {}, kind
        assert max(evaluated) <= EXACT

    @pytest.mark.parametrize("stages", [2, 3])
    def test_passengers_of_all_kinds(self, stages: int) -> None:
        """Integers that are sliced, booleans and floats without a gradient that are handed whole; with three
        stages they pass through the middle one."""
        results = on_ranks(job_guided, stages, stages=stages)
        for kind in CHECKPOINTING:
            assert violations([rank[kind] for rank in results]) == {}, kind

    def test_sliced_inputs_says_what_is_sliced(self) -> None:
        assert violations(on_ranks(job_sliced_inputs, sliced_inputs=[0, 1])) == {}

    def test_without_sliced_inputs_the_size_decides(self) -> None:
        """The memory has the labels' length but no token of it belongs to a slice, which shows."""
        errors = on_ranks(job_sliced_inputs, sliced_inputs=None)
        assert min(rank["gradient"] for rank in errors) > 1e-3

    @pytest.mark.parametrize("use_at_the_end", [True, False])
    def test_a_second_float_with_a_gradient(self, use_at_the_end: bool) -> None:
        """Where the next stage leaves it unused, its gradient is sent as zeros."""
        results = on_ranks(job_scaled, use_at_the_end=use_at_the_end)
        for kind in CHECKPOINTING:
            assert violations([rank[kind] for rank in results]) == {}, kind

    @pytest.mark.parametrize("kind", ["embedding", "all but the scale", "whole stage"])
    def test_frozen_layers(self, kind: str) -> None:
        assert violations(on_ranks(job_frozen, kind=kind)) == {}

    def test_another_sequence_dim(self) -> None:
        errors, evaluation_error = zip(*on_ranks(job_transposed), strict=True)
        assert violations(errors) == {}
        assert max(evaluation_error) <= EXACT


def job_transposed() -> tuple[Errors, float]:
    """Tokens and labels [L, B]; the logits of an evaluation are put together along that dimension as well."""

    def layers() -> list[LayerSpec]:
        return [LayerSpec(tuple_models.Transposed, layer) for layer in gpt_layers()]

    def make(seed: int) -> MicroBatch:
        tokens, labels = micro_batch(seed)
        return tokens.T.contiguous(), labels.T.contiguous()

    def run(engine: PipelineEngine) -> tuple[Run, Any]:
        logits = engine.eval_batch(iter([make(1), make(2)]), compute_loss=False)
        return train(engine, steps(make)), logits

    with engine_of(layers(), None, stages=1) as engine:
        stock, stock_logits = run(engine)
    with engine_of(layers(), section(slices=[2, 20, 1], sequence_dim=0)) as engine:
        ours, logits = run(engine)
    return differences(ours, stock), 0.0 if logits is None else error_of(logits, stock_logits)


# -- losses --------------------------------------------------------------------------------------------------


def job_reduction(reduction: str) -> Errors:
    loss_fn = {"mean": tuple_models.mean_square, "sum": tuple_models.sum_square}[reduction]
    stock = run_training(gpt_layers, None, batches(2), loss_fn=loss_fn)
    ours = section(slices=UNEVEN, loss_reduction=reduction)
    return differences(run_training(gpt_layers, ours, batches(2), loss_fn=loss_fn), stock)


def job_slice_weight() -> Errors:
    data = steps(tuple_models.weighted_micro_batch)
    stock = run_training(gpt_layers, None, data, loss_fn=tuple_models.WeightedLoss())
    ours = run_training(gpt_layers, section(slices=UNEVEN), data, loss_fn=tuple_models.WeightedLoss())
    return differences(ours, stock)


def job_own_loss() -> Errors:
    data = steps(tuple_models.own_loss_micro_batch)
    stock = run_training(tuple_models.own_loss_layers, None, data, loss_fn=None)
    ours = section(slices=UNEVEN, loss_reduction="mean")
    return differences(run_training(tuple_models.own_loss_layers, ours, data, loss_fn=None), stock)


def job_additional_losses() -> tuple[Errors, float, list[str]]:
    """The first slice has no label at all, so that its losses cannot be computed."""
    data = batches(2)
    for _, labels in itertools.chain(*data):
        labels[:, :6] = IGNORE_INDEX

    def run(engine: PipelineEngine) -> tuple[Run, list[dict[str, float]]]:
        reported, run = [], Run()
        for batch in data:
            run = train(engine, [batch])
            reported.append({name: float(value) for name, value in engine.get_additional_losses().items()})
        return run, reported

    (stock, stock_reported), (ours, reported) = both(
        run, terapipe=section(slices=UNEVEN), module_class=tuple_models.ReportingModule
    )
    return differences(ours, stock), error_of(reported, stock_reported), list(reported[0])


def job_viewing_loss() -> Errors:
    stock = run_training(gpt_layers, None, batches(2), loss_fn=tuple_models.viewing_loss)
    return differences(run_training(gpt_layers, section(), batches(2), loss_fn=tuple_models.viewing_loss), stock)


def job_without_labels() -> Errors:
    """A micro-batch of which no label counts."""
    data = batches(2)
    data[0][0][1][:] = IGNORE_INDEX
    stock = run_training(gpt_layers, None, data, loss_fn=tuple_models.patient_loss)
    return differences(run_training(gpt_layers, section(slices=UNEVEN), data), stock)


def job_before_reduce(tied: bool) -> tuple[list[tuple[int, bool]], float]:
    """The hook doubles all gradients; so does a loss that is doubled."""
    layers = functools.partial(gpt_layers, tied_embedding=tied)
    with engine_of(layers(), section(), module_class=tuple_models.HookedModule) as engine:
        hooked = train(engine, batches(3))
        engine.eval_batch(iter(batches(1)[0]))
        calls = engine.module.calls
    doubled = run_training(layers, None, batches(3), loss_fn=lambda logits, labels: 2 * gpt.gpt_loss(logits, labels))
    return calls, differences(hooked, doubled)["gradient"]


class TestLosses:
    def test_a_loss_function_that_needs_contiguous_labels(self) -> None:
        assert violations(on_ranks(job_viewing_loss)) == {}

    def test_a_micro_batch_without_a_label_counts_as_zero(self) -> None:
        assert violations(on_ranks(job_without_labels)) == {}

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_the_hook_before_the_reduction(self, tied: bool) -> None:
        for calls, error in on_ranks(job_before_reduce, tied=tied):
            assert calls == [(0, True), (1, True), (2, True)], "once per batch, when all gradients are there"
            assert error <= EXACT

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_loss_reduction(self, reduction: str) -> None:
        assert violations(on_ranks(job_reduction, reduction=reduction)) == {}

    def test_slice_weight_of_the_loss_function_and_labels_in_a_tuple(self) -> None:
        assert violations(on_ranks(job_slice_weight)) == {}

    def test_a_model_that_gives_its_own_loss(self) -> None:
        assert violations(on_ranks(job_own_loss)) == {}

    def test_additional_losses_are_reported(self) -> None:
        errors, reported, names = zip(*on_ranks(job_additional_losses), strict=True)
        assert violations(errors) == {}
        assert reported[0] <= FP32_SCALAR
        assert reported[1] <= EXACT
        assert names == (["language", "size"],) * 2


# -- precision, loss scale, learning rate --------------------------------------------------------------------

HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16_immediate": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16_zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16_zero1": {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 1},
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 5},
}
SMALL_STEPS = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
fp32_layers = functools.partial(gpt_layers, dtype="float32")


def job_half(kind: str) -> dict[str, Any]:
    """How far the losses and gradients of both engines are from those in fp32."""

    def run(engine: PipelineEngine) -> tuple[Run, str]:
        return train(engine, batches(3)), str(next(engine.module.parameters()).dtype)

    with engine_of(fp32_layers(), None, optimizer=SMALL_STEPS) as engine:
        exact, _ = run(engine)
    (stock, stock_dtype), (ours, dtype) = both(run, fp32_layers, **{**HALF[kind], "optimizer": SMALL_STEPS})
    assert dtype == stock_dtype
    return {"ours": differences(ours, exact), "stock": differences(stock, exact), "dtype": dtype}


def job_fp16_gradients() -> dict[str, float]:
    exact = run_training(fp32_layers, None, batches(1))
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    stock, ours = both(functools.partial(train, data=batches(1)), fp32_layers, **fp16)
    return {"stock": differences(stock, exact)["gradient"], "ours": differences(ours, exact)["gradient"]}


def follow_loss_scale(engine: PipelineEngine) -> list[dict[str, Any]]:
    records = []
    for batch in batches(9):
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.train_batch(iter(batch))
        records.append(
            {
                "overflow": bool(engine.optimizer.overflow),
                "scale": float(engine._get_optimizer_loss_scale()),
                "skipped": engine.skipped_steps,
                "lr": [float(lr) for lr in engine.get_lr()],
                "steps": (engine.global_steps, engine.global_samples),
                "moved": any(not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)),
                "live bytes": engine.slice_store.live_bytes() if hasattr(engine, "slice_store") else 0,
            }
        )
    return records


def job_loss_scale(zero_stage: int) -> tuple[Any, Any]:
    """The stock engine with ZeRO-1: with ZeRO-0 it forgets to scale the loss, and never overflows."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 1000, "hysteresis": 1}
    options = {"fp16": fp16, "scheduler": WARMUP}
    with engine_of(fp32_layers(), None, zero_optimization={"stage": 1}, **options) as engine:
        stock = follow_loss_scale(engine)
    with engine_of(fp32_layers(), section(), zero_optimization={"stage": zero_stage}, **options) as engine:
        return follow_loss_scale(engine), stock


class TestPrecision:
    @pytest.mark.parametrize("kind", HALF)
    def test_half_precision_is_as_close_to_fp32_as_in_the_stock_engine(self, kind: str) -> None:
        for rank in on_ranks(job_half, kind=kind):
            for name in ("returned", "gradient", "parameter"):
                assert 0 < rank["stock"][name] < 0.1
                assert rank["ours"][name] <= 2 * rank["stock"][name] + 1e-3
            assert rank["dtype"] == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(kind[:4], "torch.float32")

    def test_fp16_without_zero_has_the_gradients_of_fp32(self) -> None:
        errors = on_ranks(job_fp16_gradients)
        assert max(rank["ours"] for rank in errors) < 3e-2

    def test_fp16_without_zero_is_wrong_in_the_stock_engine(self) -> None:
        """When this fails, DeepSpeed scales the loss itself: remove `missing_loss_scale`."""
        assert min(rank["stock"] for rank in on_ranks(job_fp16_gradients)) > 0.9

    @pytest.mark.parametrize("zero_stage", [0, 1])
    def test_an_overflow_skips_the_step_and_halves_the_scale(self, zero_stage: int) -> None:
        for ours, stock in on_ranks(job_loss_scale, zero_stage=zero_stage):
            assert ours == stock
            overflows = [record["overflow"] for record in ours]
            skipped = sum(overflows)
            assert 2 <= skipped <= len(ours) - 2, "some steps overflow, and training goes on after them"
            assert overflows == sorted(overflows, reverse=True)
            assert [record["scale"] for record in ours] == [
                2.0 ** (22 - min(step + 1, skipped)) for step in range(len(ours))
            ]
            assert [record["moved"] for record in ours[:skipped]] == [False] * skipped
            assert ours[-1]["moved"]
            assert ours[-1]["lr"][0] > 0
            assert {record["live bytes"] for record in ours} == {0}


def job_learning_rate(client: bool) -> tuple[Any, Any]:
    def run(engine: PipelineEngine) -> list[Any]:
        records = []
        for batch in batches(7):
            engine.train_batch(iter(batch))
            rates = [float(lr) for lr in engine.get_lr()]
            records.append((rates, engine.global_steps, engine.global_samples, engine.skipped_steps))
        return records

    if not client:
        return both(run, scheduler=WARMUP)
    decay = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    return both(run, initialize={"lr_scheduler": decay})


class TestLearningRate:
    @pytest.mark.parametrize("client", [False, True], ids=["WarmupLR", "a scheduler of the caller"])
    def test_rates_and_counters_equal_those_of_the_stock_engine(self, client: bool) -> None:
        for stock, ours in on_ranks(job_learning_rate, client=client):
            assert ours == stock
            assert len({rates[0] for rates, *_ in ours}) >= 5, "the rate does change"
            assert ours[-1][1:] == (7, 28, 0)


# -- monitors, timers, printed progress ----------------------------------------------------------------------


def job_monitor(folder: str) -> None:
    for name, terapipe in (("stock", None), ("ours", section())):
        monitor = {"enabled": True, "output_path": folder, "job_name": name}
        with engine_of(gpt_layers(), terapipe, csv_monitor=monitor, scheduler=WARMUP) as engine:
            for batch in batches(3):
                engine.train_batch(iter(batch))
                engine.eval_batch(iter(batches(1, first_seed=700)[0]), bcast_loss=False)


def monitored(folder: Path) -> dict[str, list[list[float]]]:
    """The rows (samples, value) of each file of the csv monitor."""
    return {
        path.name: [[float(cell) for cell in row] for row in list(csv.reader(path.open()))[1:]]
        for path in folder.glob("*.csv")
    }


def job_printed(terapipe: dict[str, Any] | None, **options: Any) -> tuple[str, Run]:
    printed = io.StringIO()
    with engine_of(fp32_layers(), terapipe, **options) as engine, contextlib.redirect_stdout(printed):
        run = train(engine, batches(4))
        engine.eval_batch(iter(batches(1)[0]))
    return printed.getvalue(), dataclasses.replace(run, gradients=[], parameters={})


class TestReporting:
    def test_the_monitor_gets_the_events_of_the_stock_engine(self, tmp_path: Path) -> None:
        on_ranks(job_monitor, folder=str(tmp_path))
        stock, ours = monitored(tmp_path / "stock"), monitored(tmp_path / "ours")
        names = {"Train_Samples_lr.csv", "Train_Samples_train_loss.csv", "Train_Samples_eval_loss.csv"}
        assert ours.keys() == stock.keys() == names
        assert error_of(ours, stock) <= FP32_SCALAR
        assert {name: len(rows) for name, rows in ours.items()} == dict.fromkeys(names, 3)

    def test_steps_per_print(self) -> None:
        (stock, _), _ = on_ranks(job_printed, terapipe=None, steps_per_print=2)
        (ours, _), (other, _) = on_ranks(job_printed, terapipe=section(), steps_per_print=2)
        progress = re.compile(r"steps: (\d+) loss: ([\d.]+) iter time \(s\): [\d.]+ samples/sec: [\d.]+")
        assert progress.findall(ours) == progress.findall(stock)
        assert [step for step, _ in progress.findall(ours)] == ["2", "4"]
        assert other == ""

    @pytest.mark.parametrize("kind", ["fp32", "bf16_zero1"])
    def test_wall_clock_breakdown(self, kind: str) -> None:
        """The stock engine cannot do this with two stages: its timers are started twice."""
        options = HALF.get(kind, {})
        timed = on_ranks(job_printed, terapipe=section(), wall_clock_breakdown=True, steps_per_print=2, **options)
        plain = on_ranks(job_printed, terapipe=section(), **options)
        assert [run for _, run in timed] == [run for _, run in plain], "timing changes nothing"
        micro = re.findall(r"fwd_microstep: ([\d.]+) \| bwd_microstep: ([\d.]+)", timed[0][0])
        whole = re.findall(r"fwd: ([\d.]+) \| bwd: ([\d.]+) .*\| step: ([\d.]+)", timed[0][0])
        assert len(micro) == len(whole) == 2, "once in two steps"
        waits = re.findall(r"pipe_send_output: [\d.]+ \| pipe_recv_grad: [\d.]+", timed[0][0])
        assert len(waits) == len(re.findall(r"batch_input: [\d.]+ \| fwd_microstep", timed[0][0])) == 2
        assert min(float(milliseconds) for row in micro + whole for milliseconds in row) > 0


# -- memory --------------------------------------------------------------------------------------------------


def predicted_peak(orders: Sequence[str], num_slices: int, kv_bytes: int, grad_bytes: int) -> int:
    """Keys and values from a micro-batch's first F to its last B, gradients from its first to its last B."""
    live_kv = live_grads = peak = 0
    for action in orders:
        kind, slice_id = action[0], int(action.split(".")[1])
        live_kv += kind == "F" and slice_id == 0
        live_grads += kind == "B" and slice_id == num_slices - 1
        peak = max(peak, live_kv * kv_bytes + live_grads * grad_bytes)
        live_kv -= kind == "B" and slice_id == 0
        live_grads -= kind == "B" and slice_id == 0
    return peak


def job_memory(
    schedule: str, stages: int, micro_batches: int, num_batches: int, dtype: str, **options: Any
) -> dict[str, Any]:
    options["gradient_accumulation_steps"] = micro_batches
    options["module"] = {"partition_method": "type:DecoderLayer"}
    with engine_of(gpt_layers(dtype=dtype), section(schedule=schedule), stages=stages, **options) as engine:
        store, reserved = engine.slice_store, []
        for batch in batches(num_batches, micro_batches):
            engine.train_batch(iter(batch))
            reserved.append(store.reserved_bytes())
            assert store.live_bytes() == 0
        kinds = [type(layer).__name__ for layer in engine.module.forward_funcs]
        return {
            "peak": store.peak_bytes(),
            "reserved": reserved,
            "layers": kinds.count("DecoderLayer"),
            "stage": engine.stage_id,
        }


MEMORY = [
    ("terapipe", 2, 3, "float64", {}),
    ("seq1f1b", 2, 1, "float64", {}),
    ("seq1f1b", 2, 4, "float64", {}),
    ("1f1b", 2, 4, "float64", {}),
    ("seq1f1b", 3, 4, "float64", {}),
    ("terapipe", 2, 3, "float32", HALF["bf16"]),
    ("seq1f1b", 2, 3, "float32", {**HALF["bf16"], **CHECKPOINTING["reentrant"]}),
]


def job_kept_schedules() -> list[tuple[int, int]]:
    """Schedules, and what the links have worked out of them, after batches of one to four micro-batches."""
    kept = []
    with mock.patch.object(plans_module, "_SCHEDULES_KEPT", 2), engine_of(gpt_layers(), section()) as engine:
        for count in range(1, 5):
            engine.set_train_batch_size(2 * count)
            engine.train_batch(iter(batches(1, count)[0]))
            kept.append((len(engine._plans._schedules), len(engine._stage.links._places_of)))
    return kept


def job_engines_left(**changes: Any) -> int:
    """After engines are closed and nobody holds them: how many there are still."""

    def train_one() -> Any:
        with engine_of(gpt_layers(), section(**changes)) as engine:
            train(engine, batches(1))
            return weakref.ref(engine)

    left = [train_one() for _ in range(2)]
    gc.collect()
    return sum(ref() is not None for ref in left)


class TestMemory:
    @pytest.mark.parametrize("schedule", ["seq1f1b", "seq1f1b-zb"])
    def test_an_engine_that_nobody_holds_goes(self, schedule: str) -> None:
        """The last loss once held its graph, and that the engine: no collector sees through nodes of autograd."""
        assert rank_pool(2).run(job_engines_left, schedule=schedule) == [0, 0]

    @pytest.mark.parametrize(("schedule", "stages", "micro_batches", "dtype", "options"), MEMORY)
    def test_keys_values_and_gradients_take_what_the_schedule_says(
        self, schedule: str, stages: int, micro_batches: int, dtype: str, options: dict[str, Any]
    ) -> None:
        results = on_ranks(
            job_memory,
            stages,
            schedule=schedule,
            stages=stages,
            micro_batches=micro_batches,
            num_batches=3,
            dtype=dtype,
            **options,
        )
        rows, heads, head_dim = 2, 2, 4
        itemsize = 8 if dtype == "float64" else 2
        orders = terapipe_ds.schedule.build(schedule, stages, micro_batches, 3)
        for rank in results:
            numbers = 2 * rows * LENGTH * heads * head_dim * rank["layers"]
            order = orders.compute_order(rank["stage"])
            expected = predicted_peak(order, 3, numbers * itemsize, numbers * max(4, itemsize))
            assert rank["peak"] == expected
            assert rank["layers"] > 0
            assert set(rank["reserved"]) == {expected}

    def test_nothing_grows_over_many_batches(self) -> None:
        for rank in on_ranks(
            job_memory, schedule="seq1f1b", stages=2, micro_batches=2, num_batches=10, dtype="float64"
        ):
            assert len(rank["reserved"]) == 10
            assert len(set(rank["reserved"])) == 1

    def test_buffers_serve_all_lengths_that_alternate(self) -> None:
        for reserved in on_ranks(job_memory_of_lengths):
            assert len(set(reserved[3:])) == 1, "nothing new after every length has come once"

    def test_as_few_schedules_are_kept_as_the_engine_says(self) -> None:
        for kept in on_ranks(job_kept_schedules):
            assert kept == [(1, 1), (2, 2), (2, 2), (2, 2)]

    def test_a_whole_sequence_keeps_nothing(self) -> None:
        assert on_ranks(job_memory_unsliced) == [0, 0]

    @pytest.mark.parametrize(("stages", "change"), [(1, 1), (1, -1), (2, 1)])
    def test_live_slices_are_counted_in_every_batch(self, stages: int, change: int) -> None:
        """What runs must have the peak that the schedule promises."""
        on_ranks(job_falsified_peak, stages, stages=stages, change=0)
        with pytest.raises(RankFailure) as failure:
            on_ranks(job_falsified_peak, stages, stages=stages, change=change)
        found = re.search(
            r"InFlightError: stage \d held (\d) live slices at once, the schedule says (\d)", str(failure.value)
        )
        assert found is not None, str(failure.value)
        assert int(found[2]) - int(found[1]) == change


def job_memory_of_lengths() -> list[int]:
    with engine_of(gpt_layers(), section()) as engine:
        reserved = []
        for length in (LENGTH, 12, 40) * 3:
            engine.train_batch(iter(batches(1, length=length)[0]))
            engine.eval_batch(iter(batches(1, length=length)[0]))
            reserved.append(engine.slice_store.reserved_bytes())
        return reserved


def job_memory_unsliced() -> int:
    with engine_of(gpt_layers(), section(slices=1)) as engine:
        engine.train_batch(iter(batches(1)[0]))
        return engine.slice_store.peak_bytes()


def job_falsified_peak(stages: int, change: int) -> None:
    with engine_of(gpt_layers(), section(), stages=stages) as engine:
        true_schedule = engine._train_schedule

        def falsified() -> Any:
            schedule = true_schedule()
            return dataclasses.replace(schedule, peak_live_slices=schedule.peak_live_slices + change)

        engine._train_schedule = falsified
        engine.train_batch(iter(batches(1)[0]))


# -- activation checkpointing and dropout --------------------------------------------------------------------


def job_checkpointing(tied: bool) -> dict[str, Errors]:
    """Every layer is checkpointed, the embedding too; the stock engine can do that with one kind only."""
    layers = functools.partial(gpt_layers, tied_embedding=tied)
    stock = run_training(layers, None, batches(2))
    return {
        kind: differences(run_training(layers, section(slices=UNEVEN), batches(2), **options), stock)
        for kind, options in CHECKPOINTING.items()
    }


def job_checkpointing_and_autocast() -> tuple[dict[str, Errors], list[Errors]]:
    """Under autocast: each kind of checkpointing against none, and this and the stock engine's one against fp32."""
    autocast = {**HALF["autocast"], "optimizer": SMALL_STEPS}
    options = {**autocast, **CHECKPOINTING["reentrant"], "module": {"checkpointable_layers": ["DecoderLayer"]}}
    run = functools.partial(run_training, fp32_layers, data=batches(2))
    exact, plain = run(terapipe=None, optimizer=SMALL_STEPS), run(terapipe=section(), **autocast)
    kinds = {
        kind: differences(run(terapipe=section(), **autocast, **CHECKPOINTING[kind]), plain) for kind in CHECKPOINTING
    }
    return kinds, [differences(run(terapipe=terapipe, **options), exact) for terapipe in (section(), None)]


def job_dropout() -> dict[str, Any]:
    """Trainings of a model with dropout, by seed and kind of checkpointing."""
    layers = functools.partial(gpt_layers, dropout=0.2)

    def run(seed: int, kind: str = "off") -> Run:
        with engine_of(layers(), section(), **CHECKPOINTING[kind]) as engine:
            torch.manual_seed(seed)
            return train(engine, batches(3))

    first = run(1)
    plain = run_training(gpt_layers, section(), batches(3))
    with engine_of(layers(), section()) as engine:
        evaluated = [engine.eval_batch(iter(batches(1)[0]), return_logits=True) for _ in range(2)]
    with engine_of(gpt_layers(), section()) as engine:
        evaluated.append(engine.eval_batch(iter(batches(1)[0]), return_logits=True))
    return {
        "same seed": error_of(vars(run(1)), vars(first)),
        "other seed": differences(run(2), first),
        "without dropout": differences(plain, first),
        "recomputed": [differences(run(1, kind), first) for kind in ("reentrant", "non_reentrant")],
        "evaluation": [error_of(each, evaluated[0]) for each in evaluated[1:]],
    }


class TestCheckpointingAndDropout:
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_activation_checkpointing_of_every_layer(self, tied: bool) -> None:
        results = on_ranks(job_checkpointing, tied=tied)
        for kind in CHECKPOINTING:
            assert violations([rank[kind] for rank in results]) == {}, kind

    def test_a_forward_under_autocast_is_recomputed_under_it(self) -> None:
        for kinds, (ours, stock) in on_ranks(job_checkpointing_and_autocast):
            assert {kind: errors for kind, errors in kinds.items() if max(errors.values()) > 0.0} == {}
            for name in ("returned", "gradient", "parameter"):
                assert 0 < ours[name] <= 2 * stock[name] + 1e-3

    def test_dropout(self) -> None:
        results = on_ranks(job_dropout)
        for rank in results:
            assert rank["same seed"] == 0.0
            for other in ("other seed", "without dropout"):
                assert rank[other]["returned"] > 1e-3
            assert rank["evaluation"] == [0.0, 0.0], "dropout is for training"
        for kind in (0, 1):
            assert violations([rank["recomputed"][kind] for rank in results]) == {}, "the same masks again"


# -- registration --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def registered() -> Iterator[None]:
    terapipe_ds.register()
    try:
        yield
    finally:
        terapipe_ds.unregister()


class CallersEngine(deepspeed.PipelineEngine):  # type: ignore[misc]
    """A subclass as users write it."""

    def train_batch(self, data_iter: Any = None) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().train_batch(data_iter)


def pipeline_module(layers: Any = None, **options: Any) -> PipelineModule:
    return PipelineModule(
        layers=layers or fp32_layers(), num_stages=2, loss_fn=gpt.gpt_loss, partition_method="uniform", **options
    )


def initialize(model: torch.nn.Module, ds_config: dict[str, Any]) -> Any:
    """The engine that `deepspeed.initialize` builds, which knows nothing of us."""
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


def job_registration() -> dict[str, Any]:
    """The type of the engine, and whether it trains as it does without the plugin."""
    found: dict[str, Any] = {}

    def run(terapipe: dict[str, Any] | None) -> dict[str, Any]:
        engine = initialize(pipeline_module(), config(**({} if terapipe is None else {"terapipe": terapipe})))
        losses = [float(engine.train_batch(iter(batch))) for batch in batches(2)]
        weights = [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        return {
            "type": f"{type(engine).__module__}.{type(engine).__name__}",
            "stock": type(engine) is PipelineEngine,
            "isinstance": isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine, PipelineEngine),
            "result": [losses, weights],
        }

    plain = run(None)
    found["without the plugin"] = run(section())
    with registered():
        found["enabled"] = run(section())
        found["no section"] = run(None)
        found["switched off"] = run(section(enabled=False))
        found["enabled again"] = run(section())
    found["after unregister()"] = run(section())
    for each in found.values():
        each["bit-identical"] = error_of(each.pop("result"), plain["result"])
    return found


def job_other_engines() -> dict[str, Any]:
    """Engines that ours must leave alone or refuse."""
    found: dict[str, Any] = {}
    enabled = config(terapipe=section())
    with registered():
        with mock.patch("deepspeed.utils.groups.mpu", None):  # left there by the pipeline of an earlier job
            engine = initialize(torch.nn.Linear(2, 2), enabled)
        found["no pipeline"] = type(engine) is deepspeed.DeepSpeedEngine
        engine.destroy()
        four_layers = [LayerSpec(torch.nn.Linear, 2, 2) for _ in range(4)]
        model = DualPipeVModule(layers=four_layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        found["DualPipeV"] = refusal(model, enabled)
        engine = initialize(model, config(gradient_accumulation_steps=4))
        found["DualPipeV without section"] = type(engine) is DualPipeVEngine
        engine.destroy()
        partition_activations = mock.patch.object(ds_checkpointing, "PARTITION_ACTIVATIONS", True)
        with partition_activations:
            found["partition_activations"] = refusal(pipeline_module(), enabled)
    with engine_of(fp32_layers(), section()) as engine, partition_activations:
        try:
            engine.train_batch(iter(batches(1)[0]))
        except terapipe_ds.TeraPipeConfigError as error:
            found["partition_activations later"] = str(error)
    return found


def refusal(model: PipelineModule, ds_config: dict[str, Any]) -> str:
    """What `deepspeed.initialize` says against it."""
    try:
        initialize(model, ds_config)
    except terapipe_ds.TeraPipeConfigError as error:
        return str(error)
    return ""


def job_callers_subclass() -> dict[str, Any]:
    """A subclass of the engine that was defined before, and one defined while the plugin is registered."""
    found = {}
    with registered():

        class Later(deepspeed.PipelineEngine):  # type: ignore[misc]
            def train_batch(self, data_iter: Any = None) -> Tensor:
                return super().train_batch(data_iter) * 1.0

        for subclass in (CallersEngine, Later):
            with mock.patch.object(deepspeed, "PipelineEngine", subclass):
                engine = initialize(pipeline_module(), config())
            losses = [float(engine.train_batch(iter(batch))) for batch in batches(2)]
            engine.destroy()
            found[subclass.__name__] = {
                "type": type(engine) is subclass,
                "isinstance": isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine, subclass),
                "losses": losses,
            }
    stock = run_training(fp32_layers, None, batches(2))
    return {"found": found, "stock": stock.returned, "after": [issubclass(Later, PipelineEngine)]}


class TestRegistration:
    def test_which_engine_deepspeed_initialize_builds(self) -> None:
        ours = "terapipe_ds.runtime.engine.engine.TeraPipeEngine"
        stock = "deepspeed.runtime.pipe.engine.PipelineEngine"
        for rank in on_ranks(job_registration):
            assert {name: each["type"] for name, each in rank.items()} == {
                "without the plugin": stock,
                "enabled": ours,
                "no section": stock,
                "switched off": stock,
                "enabled again": ours,
                "after unregister()": stock,
            }
            for each in rank.values():
                assert each["isinstance"] is True
                assert each["stock"] is (each["type"] == stock)
                assert each["bit-identical"] <= (0.0 if each["stock"] else 1e-4)

    def test_other_models_and_what_cannot_be_sliced(self) -> None:
        for rank in on_ranks(job_other_engines):
            assert rank["no pipeline"] is True
            assert rank["DualPipeV without section"] is True
            assert re.search("cannot be combined with a DualPipeVModule.*set terapipe.enabled", rank["DualPipeV"])
            for name in ("partition_activations", "partition_activations later"):
                assert re.search("partition_activations.*to false", rank[name])

    def test_subclasses_of_callers(self) -> None:
        for rank in on_ranks(job_callers_subclass):
            assert rank["found"].keys() == {"CallersEngine", "Later"}
            for each in rank["found"].values():
                assert each == {"type": True, "isinstance": True, "losses": rank["stock"]}
            assert rank["after"] == [True]


# -- the launcher --------------------------------------------------------------------------------------------

SCRIPT = """
    import argparse
    import json
    import os
    import sys

    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        parser.add_argument("--steps", type=int)
        parser.add_argument("--out")
        deepspeed.add_config_arguments(parser)
        args = parser.parse_args()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
        deepspeed.init_distributed("gloo")
        layers = gpt_layers(GPTConfig(vocab_size=16, hidden_size=16, num_layers=2, num_heads=2))
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=gpt_loss)
        engine = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))[0]
        tokens = torch.arange(2 * 25).reshape(2, 25) % 7
        losses = [
            engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])])).item() for _ in range(args.steps)
        ]
        report = {"engine": type(engine).__name__, "local_rank": args.local_rank, "losses": losses}
        report |= {"argv": sys.argv, "path": sys.path[0], "stock": isinstance(engine, deepspeed.PipelineEngine)}
        with open(os.path.join(args.out, f"rank{engine.global_rank}.json"), "w") as file:
            json.dump(report, file)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_to_the_end(command: list[str], environment: dict[str, str], folder: Path) -> tuple[str, int]:
    """Output and exit code. A launcher that hangs is killed with all that it has started."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, process.returncode


class TestLauncher:
    def test_an_unchanged_script_trains_in_slices(self, tmp_path: Path) -> None:
        script, ds_config = tmp_path / "train.py", tmp_path / "config.json"
        script.write_text(textwrap.dedent(SCRIPT))
        options = {"gradient_accumulation_steps": 1, "terapipe": section()}
        ds_config.write_text(json.dumps(config(**options)))
        arguments = ["--steps", "3", "--out", str(tmp_path), "--deepspeed_config", str(ds_config)]
        command = [
            sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_addr", "127.0.0.1",
            "--master_port", str(free_port()), "--module", "terapipe_ds.run", str(script), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        output, exit_code = run_to_the_end(command, environment, tmp_path)
        assert exit_code == 0, output[-4000:]
        reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
        for rank, report in enumerate(reports):
            assert report["engine"] == "TeraPipeEngine"
            assert report["stock"] is True
            assert report["local_rank"] == rank
            assert report["argv"] == [str(script), f"--local_rank={rank}", *arguments]
            assert report["path"] == str(tmp_path)
            assert report["losses"] == reports[0]["losses"]
            assert math.isfinite(report["losses"][-1])
            assert report["losses"][-1] < report["losses"][0]
