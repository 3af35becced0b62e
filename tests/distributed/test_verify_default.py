"""Test the check's default: it compares layers and losses that are not the package's own, on a cut of the first batch;
the loss always."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from tests.distributed.engines import (
    IGNORE_INDEX,
    Batch,
    batches,
    engine_of,
    gpt_layers,
    logged,
    micro_batch,
    of_rank_0,
    raised_by,
    section,
    step_error,
)
from tests.distributed.harness import rank_pool
from tests.small_models import faulty, tuples
from tests.small_models.parts import cross_entropy
from tests.zoo.losses import PAD, masked_mean, mean_of_all_tokens, padded, shifting, without_padding


class OnlyTrained(nn.Module):
    """Fail on sequences that are shorter than the training's."""

    def forward(self, x: Tensor) -> Tensor:
        active = active_slice()
        if active is None or active.sequence_length != 400:
            raise ValueError("it takes 400 tokens")
        return x


class WrongIfShort(nn.Module):
    """Be right on sequences as long as the training's, and wrong on a window."""

    def forward(self, x: Tensor) -> Tensor:
        active = active_slice()
        return x if active is None or active.sequence_length == 400 else x * x.shape[1]


class WeightOfFifty:
    """Declare the weight of slices of fifty tokens, and of no others."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return gpt.gpt_loss(logits, labels)

    def slice_weight(self, labels: Tensor) -> float:
        if labels.shape[1] != 50:
            raise ValueError("it takes 50 tokens")
        return float((labels != IGNORE_INDEX).sum())


class MeanSquare(nn.Module):
    """Compute a model's own loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Said(NamedTuple):
    """Hold the end of a training on a rank: type and text of an error, the log of the check, steps made."""

    kind: str
    text: str
    log: str
    steps: int


def said(
    data: list[Batch] | None = None,
    extra: tuple[type[nn.Module], ...] = (),
    loss_fn: Any = gpt.gpt_loss,
    dtype: str = "float64",
    **changes: Any,
) -> Said:
    """Train one step for each batch, with further layers in the middle of the model, until one is refused."""
    data = data or batches(1)
    layers = gpt_layers(dtype, max_sequence_length=512)
    layers[4:4] = [LayerSpec(each) for each in extra]
    if loss_fn is None:
        layers.append(LayerSpec(MeanSquare))
    rows = len(data[0][0][0])
    kind = text = ""
    with (
        logged() as lines,
        engine_of(layers, section(**changes), loss_fn=loss_fn, train_micro_batch_size_per_gpu=rows) as engine,
    ):
        for batch in data:
            kind, text = step_error(engine, batch)
            if kind:
                break
        steps = engine.global_steps
    return Said(kind, text, "\n".join(line for line in lines if line.startswith(("verify: ", "a micro-batch"))), steps)


def on_ranks(*batches_of: Batch, **options: Any) -> Said:
    """Return the report and the log of rank 0."""
    first, second = rank_pool(2).run(said, data=list(batches_of), **options)
    assert first[:2] == second[:2] or of_rank_0([first, second])
    return first


def long(masked_until: int = 0, **options: Any) -> Said:
    """Train five rows of 400 tokens in eight slices; their first labels do not count."""
    data = [micro_batch(seed, 400, 5, masked=False) for seed in range(2)]
    for _, labels in data:
        labels[:, :masked_until] = IGNORE_INDEX
    return on_ranks(data, **{"dtype": "float32", "slices": 8, **options})


class TestLayers:
    def test_a_layer_of_ones_own_is_compared_and_refused(self) -> None:
        kind, text, *_ = on_ranks(extra=(faulty.HiddenPlainAttention,), dtype="float32")
        assert kind == "VerifyError" and "\n  layer 4 (HiddenPlainAttention): output of tokens 8.. differs" in text

    def test_off_trains_on_and_says_so(self) -> None:
        case = {"extra": (faulty.RunningSum,), "dtype": "float32", "verify": "off"}
        kind, _, log, steps = on_ranks(*batches(2), **case)
        assert (kind, steps) == ("", 2)
        assert log.startswith("verify: the loss agrees on 3 slices (8 + 8 + 7) of a sequence of 23 tokens with the ")
        assert log.endswith("layers were not compared") and log.count("verify: ") == 1  # once, not in each step

    def test_the_package_s_own_are_trusted(self) -> None:
        kind, _, log, _ = on_ranks()
        assert kind == "" and log.startswith("verify: the loss agrees") and log.endswith("layers were not compared")

    def test_but_not_with_a_loss_of_ones_own(self) -> None:
        kind, _, log, _ = on_ranks(loss_fn=cross_entropy)
        assert kind == "" and log.startswith("verify: 7 layers and the loss agree")

    def test_a_model_that_computes_its_loss_itself(self) -> None:
        kind, _, log, _ = on_ranks(*batches(1, masked=False), loss_fn=None, verify="off")
        assert kind == ""
        assert log.endswith("layers were not compared; the loss was not compared: the model computes it itself")


def evaluated_tuples() -> str:
    data = [tuples.weighted_micro_batch(seed) for seed in range(2)]
    with engine_of(gpt_layers(), section(), loss_fn=masked_mean) as engine:
        engine.eval_batch(iter(data), compute_loss=False)  # needs no labels
        return raised_by(lambda: engine.eval_batch(iter(data)))[0]


class TestLosses:
    def test_tuples_of_labels_are_refused_in_evaluation(self) -> None:
        assert rank_pool(2).run(evaluated_tuples) == ["TeraPipeConfigError"] * 2

    def test_a_reduction_that_is_said_is_compared(self) -> None:
        data = [tuples.weighted_micro_batch(seed) for seed in range(2)]
        kind, text, *_ = on_ranks(data, loss_fn=masked_mean, loss_reduction="mean_valid")
        assert kind == "VerifyError" and "no terapipe.loss_reduction" in text


def two_replicas(extra: type[nn.Module], short: int) -> tuple[str, str]:
    """Replica `short` begins with sequences that run in one slice, the other with sequences of three."""
    layers = gpt_layers("float32")
    layers.insert(4, LayerSpec(extra))
    with engine_of(layers, section(), stages=2) as engine:
        engine.use_slice_plan(SlicePlan((12,)))
        length = 12 if engine.grid.get_data_parallel_rank() == short else 23
        return step_error(engine, [micro_batch(seed, length, masked=False) for seed in range(2)])


class TestReplicas:
    @pytest.mark.parametrize("short", [0, 1])
    def test_one_has_sequences_in_one_slice_only(self, short: int) -> None:
        kind, text = of_rank_0(rank_pool(4).run(two_replicas, extra=faulty.RunningSum, short=short))
        assert kind == "VerifyError" and "\n  layer 4 (RunningSum): output of tokens 8.. differs" in text
        assert rank_pool(4).run(two_replicas, extra=nn.Identity, short=short) == [("", "")] * 4


class TestCut:
    def test_rows_and_tokens_are_few(self) -> None:
        kind, _, log, _ = long(verify="first_batch")
        assert kind == ""
        assert "on 3 slices (50 + 25 + 50) of tokens 0 to 125 of 400 in 2 of 5 rows with the whole, " in log

    def test_the_window_lies_where_labels_begin_to_count(self) -> None:
        """A mean over all tokens agrees with one over valid labels wherever all are valid, or none is."""
        kind, text, *_ = long(masked_until=250, loss_reduction="mean")
        assert kind == "VerifyError" and 'set terapipe.loss_reduction to "mean_valid"' in text
        assert long(masked_until=250).kind == ""

    def test_a_layer_that_cannot_run_on_a_cut_runs_on_the_whole(self) -> None:
        kind, _, log, _ = long(extra=(OnlyTrained,))
        assert kind == "" and "on 8 slices of a sequence of 400 tokens with the whole" in log

    def test_what_differs_on_a_cut_counts_though_another_layer_cannot_run_on_it(self) -> None:
        kind, text, *_ = long(extra=(WrongIfShort, OnlyTrained))
        assert kind == "VerifyError" and "layer 4 (WrongIfShort): output" in text and "of tokens 0 to 125 of" in text

    def test_a_slice_weight_that_cannot_tell_of_a_cut(self) -> None:
        kind, _, log, _ = long(loss_fn=WeightOfFifty())
        assert kind == "" and "the loss agree on 8 slices of a sequence of 400 tokens with the whole" in log


class TestBatchesWithoutLabels:
    def test_the_micro_batch_that_has_labels_is_looked_at(self) -> None:
        without, other = batches(1)[0]
        without[1][:] = IGNORE_INDEX
        first, last = rank_pool(2).run(said, data=[[without, other]])
        assert first.kind == last.kind == "" and first.log.startswith("verify: the loss agrees on 3 slices")
        assert "a micro-batch has no valid label at all" in last.log

    @pytest.mark.parametrize("verify", ["off", "first_batch"])
    @pytest.mark.parametrize(
        ("loss", "reduction", "is_right"),
        [(mean_of_all_tokens, "sum", False), (shifting, "mean_valid", False), (gpt.gpt_loss, "mean_valid", True)],
    )
    def test_the_next_batch_with_labels_is_looked_at(
        self, loss: Any, reduction: str, is_right: bool, verify: str
    ) -> None:
        first, second, third = batches(3, masked=False)
        for _, labels in (*first, *second):
            labels[:] = IGNORE_INDEX
        kind, text, log, steps = on_ranks(
            first, second, third, loss_fn=loss, loss_reduction=reduction, verify=verify, dtype="float64"
        )
        without, *later = log.splitlines()
        assert without.endswith("; the loss was not compared: no label counts in this batch")
        if is_right:
            assert (kind, steps) == ("", 3)
            assert len(later) == 1 and later[0].startswith("verify: the loss agrees on 3 slices")
        else:
            assert (kind, steps, later) == ("VerifyError", 2, []) and "\n  loss_fn: the loss differs" in text


class TestLabelsThatAreIgnoredLater:
    """While all labels count, a mean over the valid ones and a mean over all are the same."""

    @pytest.mark.parametrize(
        ("changes", "loss", "fits"),
        [
            ({}, mean_of_all_tokens, "mean"),
            ({"loss_reduction": "mean"}, gpt.gpt_loss, "mean_valid"),
            ({}, gpt.gpt_loss, None),
            ({"loss_reduction": "mean"}, mean_of_all_tokens, None),
        ],
    )
    def test_a_reduction_is_compared_again_in_the_third_step(
        self, changes: dict[str, str], loss: Any, fits: str | None
    ) -> None:
        first, second, third = batches(3, masked=False)
        data = [first, second, [micro_batch(7, masked=True), third[1]]]
        others, last = rank_pool(2).run(said, data=data, loss_fn=loss, **changes)
        if fits is None:
            assert (others.kind, last.kind, others.steps, last.steps) == ("", "", 3, 3)
            return
        assert (others.kind, last.kind, others.steps, last.steps) == ("BatchError", "VerifyError", 2, 2)
        assert "labels are ignored for the first time (ignore_index -100)" in last.text and last.text in others.text
        assert f'set terapipe.loss_reduction to "{fits}"' in last.text

    def test_a_label_that_loss_fn_ignores_comes_later(self) -> None:
        """Whatever `ignore_index` says: padding by a label of its own, half of it in each slice."""
        first, second = batches(2, masked=False)
        for _, labels in first:
            labels[labels == PAD] = PAD + 1
        padding = [padded(7), second[1]]
        others, last = rank_pool(2).run(said, data=[first, padding], loss_fn=without_padding)
        assert (others.kind, last.kind, last.steps) == ("BatchError", "VerifyError", 1)
        assert f"set terapipe.ignore_index to {PAD}" in last.text
        assert on_ranks(first, padding, loss_fn=without_padding, ignore_index=PAD)[::3] == ("", 2)

    def test_another_micro_batch_of_the_first_batch(self) -> None:
        data = [micro_batch(0, masked=False), micro_batch(1, masked=True)]
        kind, text, *_ = on_ranks(data, loss_fn=mean_of_all_tokens)
        assert kind == "VerifyError" and 'set terapipe.loss_reduction to "mean"' in text
