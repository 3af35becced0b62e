"""Test, in slices, what users of DeepSpeed's pipeline engine rely on: evaluation, shapes, data and reports.

The functions named `job_...` run on all ranks of a pool and return the values that the tests assert. The stock engine
runs in the same ranks with the same stages as ours; if it cannot run the tested case, it runs with one stage.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.dict_batches import flattened
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models import parts, tuples

UNEVEN = [5, 17, 1]
Errors = dict[str, float]
FP16_ZERO1 = {"fp16": {"enabled": True, "initial_scale_power": 8}, **engines.ZERO1}
BF16 = {"bf16": {"enabled": True}}


def on_ranks(job: Callable[..., Any], num_ranks: int = 2, **kwargs: Any) -> list[Any]:
    return rank_pool(num_ranks).run(job, **kwargs)


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
MEAN = engines.unchecked(slices=UNEVEN, loss_reduction="mean")
EVALUATED: dict[str, dict[str, Any]] = {
    "tokens": {"terapipe": engines.unchecked(slices=[5, 10, 7, 1])},
    "a model that gives its own loss": {"layers": tuples.own_loss_layers, "terapipe": MEAN, "loss_fn": None},
    "logits with rows and tokens in one dimension": {
        "layers": tuples.flat_layers,
        "terapipe": engines.unchecked(slices=UNEVEN),
        "loss_fn": tuples.flat_loss,
    },
}


def evaluate_in_training(engine: PipelineEngine, make: Callable[[int], engines.MicroBatch]) -> dict[str, Any]:
    """Make a step, all evaluations and a step; one iterator gives the data of both steps."""
    iterator = iter([make(seed) for seed in range(4)])
    engine.set_dataiterator(iterator)
    losses = [float(engine.train_batch())]
    results = {}
    for name, options in EVALUATIONS.items():
        engine.total_loss = None  # the stock engine adds logits to the last training loss, and fails
        data = iter([make(5000 + index) for index in range(options.get("num_micro_batches", 2))])
        results[name] = engine.eval_batch(data, **options)
    restored = engine.data_iterator is iterator
    losses.append(float(engine.train_batch()))
    parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return {"results": results, "restored": restored, "losses": losses, "parameters": parameters}


def job_evaluation(name: str) -> dict[str, Any]:
    make = tuples.own_loss_micro_batch if "own loss" in name else engines.micro_batch
    stock, ours = engines.both(functools.partial(evaluate_in_training, make=make), **EVALUATED[name])
    return {
        "errors": {name: engines.error_of(ours["results"][name], stock["results"][name]) for name in EVALUATIONS},
        "losses": engines.error_of(ours["losses"], stock["losses"]),
        "parameters": engines.error_of(ours["parameters"], stock["parameters"]),
        "restored": ours["restored"],
    }


def job_other_evaluations() -> list[float]:
    """Evaluate without labels, and other lengths and rows than in training and in inference mode."""

    def run(engine: PipelineEngine) -> list[Any]:
        unlabelled = [
            engine.eval_batch(iter([(engines.micro_batch(i)[0], labels) for i in range(2)]), compute_loss=False)
            for labels in (None, ())
        ]
        trained, evaluated = [], []
        for length, rows in ((engines.LENGTH, 2), (11, 3), (engines.LENGTH, 1)):
            engine.reset_activation_shape()  # the stock engine must be told
            trained.append(float(engine.train_batch(iter(engines.batches(1, length=length, rows=rows)[0]))))
            engine.reset_activation_shape()
            with torch.inference_mode():
                data = iter([engines.micro_batch(seed, length + 2, rows + 1) for seed in (7, 8)])
                evaluated.append(engine.eval_batch(data, bcast_loss=False))
        return [unlabelled, trained, evaluated]

    return [engines.error_of(ours, stock) for stock, ours in zip(*engines.both(run), strict=True)]


def job_failed_evaluation() -> list[str]:
    """Return the errors of an evaluation without data, of the training step after it, and of compiling with slices."""
    with engines.engine_of(engines.fp32_layers(), engines.unchecked()) as engine:
        engine.set_dataiterator(iter(engines.batches(1)[0]))
        calls: list[Callable[[], Any]] = [lambda: engine.eval_batch(iter(())), engine.train_batch, engine.compile]
        return [engines.raised_by(call)[0] for call in calls]


class TestEvaluation:
    def test_training_has_its_own_data_after_an_evaluation_that_fails(self) -> None:
        assert on_ranks(job_failed_evaluation) == [["StopIteration", "", "TeraPipeConfigError"]] * 2

    @pytest.mark.parametrize("name", EVALUATED)
    def test_results_equal_those_of_the_stock_engine_and_training_goes_on(self, name: str) -> None:
        for rank in on_ranks(job_evaluation, name=name):
            assert {name: error for name, error in rank["errors"].items() if not error <= engines.EXACT} == {}
            assert rank["restored"] is True
            assert rank["losses"] <= engines.FP32_SCALAR
            assert rank["parameters"] <= engines.EXACT

    def test_without_labels_and_with_other_shapes_than_in_training(self) -> None:
        for unlabelled, in_training, in_evaluation in on_ranks(job_other_evaluations):
            assert in_training <= engines.FP32_SCALAR
            assert max(unlabelled, in_evaluation) <= engines.EXACT


# -- shapes that change, and pipelines side by side ----------------------------------------------------------

MIXED: list[list[dict[str, int]]] = [
    [{"length": 12}, {"length": engines.LENGTH}, {"length": engines.LENGTH}],
    [{"length": engines.LENGTH}, {"length": 7, "rows": 3}, {"length": 12, "rows": 1}],
    [{"length": 12, "rows": 1}, {"length": 2}, {"length": 12, "rows": 1}],  # two tokens have no three slices
    [{"length": 2}, {"length": 2, "rows": 1}, {"length": 2, "rows": 3}],
]


def job_mixed_shapes() -> dict[str, Errors]:
    data = [[engines.micro_batch(10 * i + j, **shape) for j, shape in enumerate(b)] for i, b in enumerate(MIXED)]
    options = {"gradient_accumulation_steps": 3}
    stock = engines.run_training(engines.gpt_layers, None, data, stages=1, **options)
    return {
        schedule: engines.differences(
            engines.run_training(engines.gpt_layers, engines.unchecked(schedule=schedule), data, stages=3, **options),
            stock,
        )
        for schedule in ("terapipe", "seq1f1b")
    }


def job_short_first() -> list[str]:
    """Ask one stage alone for a plan, and begin with a batch that is too short for the slices."""
    kinds = []
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        if engine.is_last_stage():
            engine.slice_plan(12)  # type: ignore[attr-defined]
        for length in (2, 12, 2):
            data = [engines.micro_batch(seed, length=length) for seed in range(2)]
            kinds.append(engines.raised_by(functools.partial(engine.train_batch, iter(data)))[1])
    return kinds


def of_memory(step: int) -> engines.Batch:
    """Return a batch whose inputs have a passenger of another size in each step."""
    memory = torch.ones(2, 5 + 2 * step, parts.WIDTH, dtype=torch.float64)
    guided = [tuples.guided_micro_batch(2 * step + index) for index in range(2)]
    return [((*inputs, memory), labels) for inputs, labels in guided]


def job_other_passengers() -> Errors:
    """Say on one stage alone that other shapes come: the first one, then the last one."""
    data, given = [of_memory(step) for step in range(3)], {"loss_fn": parts.cross_entropy}
    stock = engines.run_training(tuples.guided_layers, None, data, stages=1, **given)

    def tell(engine: PipelineEngine, step: int) -> None:
        if engine.stage_id == step - 1:
            engine.reset_activation_shape()

    section = engines.unchecked(stall_timeout_s=20)
    ours = engines.run_training(tuples.guided_layers, section, data, before_step=tell, **given)
    return engines.differences(ours, stock)


def kinds_of_evaluations() -> list[bool]:
    """Evaluate, with logits on the last stage alone in the second batch; return what this stage knows of each."""
    kinds: list[bool] = []
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        links: Any = engine._stage.links  # type: ignore[attr-defined]
        begin = links.open_batch
        links.open_batch = lambda batch: (kinds.append(batch.micro_batches[0].shape.with_logits), begin(batch))
        for with_logits in (False, engine.is_last_stage(), False):
            engine.eval_batch(iter(engines.batches(1)[0]), return_logits=with_logits, bcast_loss=False)
    return kinds


def test_all_stages_learn_that_the_last_one_returns_logits() -> None:
    assert on_ranks(kinds_of_evaluations) == [[False, True, False]] * 2


def job_data_parallel() -> tuple[Errors, dict[str, float]]:
    """One stage, two pipelines with data of their own, of lengths of their own."""
    pipeline_id = torch.distributed.get_rank()
    seeds = range(100 * pipeline_id, 100 * pipeline_id + 3)
    data = [[engines.micro_batch(seed), engines.micro_batch(seed + 50, length=15 + 5 * pipeline_id)] for seed in seeds]

    def run(engine: PipelineEngine) -> tuple[engines.Run, dict[str, Any]]:
        result = engines.train(engine, data)
        return result, {
            "additional losses": {name: float(loss) for name, loss in engine.get_additional_losses().items()},
            "evaluation": engine.eval_batch(iter(data[0])),
            "logits": engine.eval_batch(iter(data[1]), return_logits=True, bcast_loss=False),
            "loss of the last micro-batch": engine.loss.detach(),
            "samples": engine.global_samples,
        }

    (stock, stock_results), (ours, results) = engines.both(
        run, terapipe=engines.unchecked(slices=4), stages=1, module_class=tuples.ReportingModule
    )
    return engines.differences(ours, stock), {
        name: engines.error_of(results[name], stock_results[name]) for name in results
    }


class TestShapes:
    def test_one_stage_says_that_other_shapes_come(self) -> None:
        assert engines.violations(on_ranks(job_other_passengers)) == {}

    def test_pipelines_side_by_side(self) -> None:
        errors, results = zip(*on_ranks(job_data_parallel), strict=True)
        assert engines.violations(errors) == {}
        for rank in results:
            assert {name: error for name, error in rank.items() if not error <= engines.EXACT} == {}

    def test_too_short_a_sequence_is_an_error_on_all_stages_before_longer_ones_alone(self) -> None:
        for first, *later in on_ranks(job_short_first):
            assert "3 slices cut at multiples of 1 tokens do not fit in a sequence of 2 tokens" in first
            assert later == ["", ""]

    def test_lengths_and_rows_change_between_micro_batches(self) -> None:
        results = on_ranks(job_mixed_shapes, 3)
        for schedule in results[0]:
            assert engines.violations([rank[schedule] for rank in results]) == {}, schedule


# -- data ----------------------------------------------------------------------------------------------------


def samples(count: int) -> list[dict[str, list[int]]]:
    """Documents of one length, so that the stock engine can train them as rows; some labels do not count."""
    drawn = [engines.micro_batch(seed, length=6, rows=1, masked=False) for seed in range(count)]
    return [
        {
            "input_ids": tokens[0].tolist(),
            "labels": [engines.IGNORE_INDEX] * (seed % 3) + tokens[0].tolist()[seed % 3 :],
        }
        for seed, (tokens, _) in enumerate(drawn)
    ]


def rows_of(documents: list[dict[str, list[int]]]) -> engines.MicroBatch:
    tokens = torch.tensor([document["input_ids"] for document in documents])
    labels = [[*document["labels"][1:], engines.IGNORE_INDEX] for document in documents]
    return tokens, torch.tensor(labels)


def job_flattened() -> dict[str, Any]:
    """Train flattened documents by DeepSpeed's own loader; the stock engine has one document in each row."""
    found = {}

    documents = engines.section(slices=[5, 6, 1], documents="position_ids", verify="first_batch")
    with mock.patch("deepspeed.runtime.dataloader.DataLoader", engines.loader_in_process), engines.logged() as said:
        for terapipe, collate in ((None, rows_of), (documents, flattened)):
            given = {"training_data": samples(8), "collate_fn": collate}
            with engines.engine_of(engines.gpt_layers(), terapipe, initialize=given) as engine:
                gradients: list[Any] = []
                engines.record_gradients(engine, gradients.append)
                losses = [float(engine.train_batch()) for _ in range(3)]  # longer than an epoch
                found[terapipe is None] = losses, gradients
    (losses, gradients), (stock_losses, stock_gradients) = found[False], found[True]
    return {
        "losses": engines.error_of(losses, stock_losses),
        "gradients": engines.error_of(gradients, stock_gradients),
        "said": sum("labels of dict batches are shifted here" in line for line in said),
    }


def job_after_an_error(options: dict[str, Any]) -> dict[str, Any]:
    """Run a single process, whose caller goes on after an error in the middle of a batch."""
    make = engines.fp32_layers if options else engines.gpt_layers
    options = {"stages": 1, **options}

    def layers() -> list[Any]:
        return [*make(), LayerSpec(tuples.Faulty)]

    undisturbed = engines.run_training(layers, engines.unchecked(), engines.batches(2), **options)
    with engines.engine_of(layers(), engines.unchecked(), **options) as engine:
        first = engines.train(engine, engines.batches(2)[:1])
        tuples.Faulty.countdown = 5  # in the second micro-batch, after some backwards of the first one
        raised = engines.step_error(engine, engines.batches(1, first_seed=300)[0])
        live_bytes = engine.slice_store.pool.live_bytes
        second = engines.train(engine, engines.batches(2)[1:])
    return {
        "raised": raised,
        "live bytes": live_bytes,
        "returned": first.returned + second.returned == undisturbed.returned,
        "parameters": engines.error_of(second.parameters, undisturbed.parameters),
    }


class TestData:
    def test_flattened_documents_of_a_loader_equal_rows_of_the_stock_engine(self) -> None:
        """The check of the first batch runs as well."""
        results = on_ranks(job_flattened)
        for rank in results:
            assert rank["losses"] <= engines.FP32_SCALAR
            assert rank["gradients"] <= engines.EXACT
        assert sum(rank["said"] for rank in results) == 1

    @pytest.mark.parametrize("options", [{}, BF16, FP16_ZERO1], ids=["fp64", "bf16", "fp16_zero1"])
    def test_nothing_of_a_failed_batch_stays(self, options: dict[str, Any]) -> None:
        """No gradients either, which the next step would add to its own."""
        [found] = on_ranks(job_after_an_error, 1, options=options)
        raised = ("MemoryError", "out of memory")
        assert found == {"raised": raised, "live bytes": 0, "returned": True, "parameters": 0.0}


# -- monitors, timers, printed progress ----------------------------------------------------------------------


def job_monitor(folder: str) -> None:
    for name, terapipe in (("stock", None), ("ours", engines.unchecked())):
        monitor = {"enabled": True, "output_path": folder, "job_name": name}
        with engines.engine_of(engines.gpt_layers(), terapipe, csv_monitor=monitor, scheduler=engines.WARMUP) as engine:
            for batch in engines.batches(3):
                engine.train_batch(iter(batch))
                engine.eval_batch(iter(engines.batches(1, first_seed=700)[0]), bcast_loss=False)


def monitored(folder: Path) -> dict[str, list[list[float]]]:
    """Return the rows (samples, value) of each file of the csv monitor."""
    return {
        path.name: [[float(cell) for cell in row] for row in list(csv.reader(path.open()))[1:]]
        for path in folder.glob("*.csv")
    }


def job_printed(terapipe: dict[str, Any] | None, **options: Any) -> tuple[str, engines.Run]:
    printed = io.StringIO()
    with engines.engine_of(engines.fp32_layers(), terapipe, **options) as engine, contextlib.redirect_stdout(printed):
        run = engines.train(engine, engines.batches(4))
        engine.eval_batch(iter(engines.batches(1)[0]))
    return printed.getvalue(), dataclasses.replace(run, gradients=[], parameters={})


class TestReporting:
    def test_the_monitor_gets_the_events_of_the_stock_engine(self, tmp_path: Path) -> None:
        on_ranks(job_monitor, folder=str(tmp_path))
        stock, ours = monitored(tmp_path / "stock"), monitored(tmp_path / "ours")
        names = {"Train_Samples_lr.csv", "Train_Samples_train_loss.csv", "Train_Samples_eval_loss.csv"}
        assert stock.keys() == names
        ours = {name: rows for name, rows in ours.items() if not name.startswith("Train_TeraPipe_")}
        assert ours.keys() == names
        assert engines.error_of(ours, stock) <= engines.FP32_SCALAR
        assert {name: len(rows) for name, rows in ours.items()} == dict.fromkeys(names, 3)

    def test_steps_per_print(self) -> None:
        (stock, _), _ = on_ranks(job_printed, terapipe=None, steps_per_print=2)
        (ours, _), (other, _) = on_ranks(job_printed, terapipe=engines.unchecked(), steps_per_print=2)
        progress = re.compile(r"steps: (\d+) loss: ([\d.]+) iter time \(s\): [\d.]+ samples/sec: [\d.]+")
        assert progress.findall(ours) == progress.findall(stock)
        assert [step for step, _ in progress.findall(ours)] == ["2", "4"]
        assert other == ""

    @pytest.mark.parametrize("options", [{}, {**BF16, **engines.ZERO1}], ids=["fp32", "bf16_zero1"])
    @pytest.mark.sample(1)
    def test_wall_clock_breakdown(self, options: dict[str, Any]) -> None:
        """The stock engine cannot do this with two stages: its timers are started twice."""
        timed = on_ranks(
            job_printed, terapipe=engines.unchecked(), wall_clock_breakdown=True, steps_per_print=2, **options
        )
        plain = on_ranks(job_printed, terapipe=engines.unchecked(), **options)
        assert [run for _, run in timed] == [run for _, run in plain], "timing changes nothing"
        micro = re.findall(r"fwd_microstep: ([\d.]+) \| bwd_microstep: ([\d.]+)", timed[0][0])
        whole = re.findall(r"fwd: ([\d.]+) \| bwd: ([\d.]+) .*\| step: ([\d.]+)", timed[0][0])
        assert len(micro) == len(whole) == 2, "once in two steps"
        waits = re.findall(r"pipe_send_output: [\d.]+ \| pipe_recv_grad: [\d.]+", timed[0][0])
        assert len(waits) == len(re.findall(r"batch_input: [\d.]+ \| fwd_microstep", timed[0][0])) == 2
        assert min(float(milliseconds) for row in micro + whole for milliseconds in row) > 0
