"""What is compared when nobody asks: layers and losses that are not the package's own, on a cut of the first batch; the
loss always."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from tests.distributed import faulty_layers, lossy, tuple_models
from tests.distributed.engines import IGNORE_INDEX, batches, engine_of, gpt_layers, logged, micro_batch, section
from tests.distributed.harness import rank_pool


class OnlyTrained(nn.Module):
    """Cannot run on sequences that are shorter than those of the training."""

    def forward(self, x: Tensor) -> Tensor:
        from terapipe_ds.attention import active_slice

        active = active_slice()
        if active is None or active.sequence_length != 400:
            raise ValueError("it takes 400 tokens")
        return x


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class WrongIfShort(nn.Module):
    """Right on sequences as long as those of the training, and wrong on a window."""

    def forward(self, x: Tensor) -> Tensor:
        from terapipe_ds.attention import active_slice

        active = active_slice()
        return x if active is None or active.sequence_length == 400 else x * x.shape[1]


class WeightOfFifty:
    """Says what slices of fifty tokens weigh, and no others."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return gpt.gpt_loss(logits, labels)

    def slice_weight(self, labels: Tensor) -> float:
        if labels.shape[1] != 50:
            raise ValueError("it takes 50 tokens")
        return float((labels != IGNORE_INDEX).sum())


class MeanSquare(nn.Module):
    """A model's own loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def said(
    extra: Any = None,
    data: Any = None,
    steps: int = 1,
    loss_fn: Any = gpt.gpt_loss,
    dtype: str = "float64",
    **changes: Any,
) -> tuple[str, str, str]:
    """What `steps` steps end with on this rank: the type and text of an error, and what was logged of the check."""
    layers = gpt_layers(dtype, max_sequence_length=512)
    layers[4:4] = [LayerSpec(each) for each in (extra if isinstance(extra, tuple) else (extra,)) if each is not None]
    if loss_fn is None:
        layers.append(LayerSpec(MeanSquare))
    options = {"train_micro_batch_size_per_gpu": len((data or batches(1)[0])[0][0])}
    with logged() as lines, engine_of(layers, section(**changes), loss_fn=loss_fn, **options) as engine:
        kind = text = ""
        try:
            for _ in range(steps):
                engine.train_batch(iter(data or batches(1)[0]))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
    return kind, text, "\n".join(line for line in lines if line.startswith("verify: "))


def losses(name: str) -> tuple[str, str, str]:
    loss_fn, reduction, masked = {**lossy.REFUSED, **lossy.RIGHT}[name]
    changes = {"verify": "off"} | ({} if reduction is None else {"loss_reduction": reduction})
    if isinstance(loss_fn, tuple_models.WeightedLoss):
        data = [tuple_models.weighted_micro_batch(seed) for seed in range(2)]
    else:
        data = batches(1, masked=masked)[0]
    return said(None, data, loss_fn=loss_fn, slices=[9, 5, 9], **changes)


def right_loss(name: str) -> tuple[str, str, str]:
    return losses(name)


def tuples(loss: str, **changes: Any) -> tuple[str, str, str]:
    data = [tuple_models.weighted_micro_batch(seed) for seed in range(2)]
    return said(None, data, loss_fn=getattr(lossy, loss, None) or tuple_models.WeightedLoss(), **changes)


def evaluated_tuples() -> str:
    data = [tuple_models.weighted_micro_batch(seed) for seed in range(2)]
    with engine_of(gpt_layers(), section(), loss_fn=lossy.masked_loss) as engine:
        engine.eval_batch(iter(data), compute_loss=False)  # needs no labels
        try:
            engine.eval_batch(iter(data))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def long(masked_until: int = 0, **changes: Any) -> tuple[str, str, str]:
    """Five rows of 400 tokens, of which the first labels do not count, in eight slices."""
    data = []
    for seed in range(2):
        tokens, labels = micro_batch(seed, 400, 5, masked=False)
        labels[:, :masked_until] = IGNORE_INDEX
        data.append((tokens, labels))
    return said(data=data, dtype="float32", **{"slices": 8, **changes})


def long_with(extra: Any, verify: str | None = None, **more: Any) -> tuple[str, str, str]:
    data = [micro_batch(seed, 400, 5, masked=False) for seed in range(2)]
    return said(extra, data, dtype="float32", slices=8, verify=verify, **more)


def waiting(loss: str, reduction: str, verify: str | None) -> tuple[str, str, str, int]:
    """A batch without any label that counts, another one, and one in which all count; and the steps that were made."""
    loss_fn = getattr(lossy, loss, None) or gpt.gpt_loss
    first, second, third = batches(3, masked=False)
    for _, labels in (*first, *second):
        labels[:] = IGNORE_INDEX
    kind = text = ""
    changes = {"verify": verify, "loss_reduction": reduction}
    with logged() as lines, engine_of(gpt_layers(), section(**changes), loss_fn=loss_fn) as engine:
        try:
            for batch in (first, second, third):
                engine.train_batch(iter(batch))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        steps = engine.global_steps
    return kind, text, "\n".join(line for line in lines if line.startswith("verify: ")), steps


def _one(results: list[Any]) -> Any:
    """What all ranks say alike; of the log, what rank 0 says."""
    assert all(each[:2] == results[0][:2] for each in results)
    return results[0]


class TestLayers:
    def test_a_layer_of_ones_own_is_compared_and_refused(self) -> None:
        kind, text, _ = _one(rank_pool(2).run(said, extra=faulty_layers.HiddenPlainAttention, dtype="float32"))
        assert kind == "VerifyError" and "\n  layer 4 (HiddenPlainAttention): output of tokens 8.. differs" in text

    def test_off_trains_on_and_says_so(self) -> None:
        case = {"extra": faulty_layers.RunningSum, "dtype": "float32", "verify": "off", "steps": 2}
        kind, text, log = _one(rank_pool(2).run(said, **case))
        assert (kind, text) == ("", "")
        assert log.startswith("verify: the loss agrees on 3 slices (8 + 8 + 7) of a sequence of 23 tokens with the ")
        assert log.endswith("layers were not compared") and log.count("verify: ") == 1  # once, not in each step

    def test_the_package_s_own_are_trusted(self) -> None:
        kind, _, log = _one(rank_pool(2).run(said))
        assert kind == "" and log.startswith("verify: the loss agrees") and log.endswith("layers were not compared")

    def test_but_not_with_a_loss_of_ones_own(self) -> None:
        kind, _, log = _one(rank_pool(2).run(said, loss_fn=lossy.Plain()))
        assert kind == "" and log.startswith("verify: 7 layers and the loss agree")

    def test_a_model_that_computes_its_loss_itself(self) -> None:
        kind, text, log = _one(rank_pool(2).run(said, loss_fn=None, data=batches(1, masked=False)[0], verify="off"))
        assert (kind, text) == ("", "")
        assert log.endswith("layers were not compared; the loss was not compared: the model computes it itself")


class TestLosses:
    @pytest.mark.parametrize("name", lossy.REFUSED)
    def test_refused(self, name: str) -> None:
        kind, text, _ = _one(rank_pool(2).run(losses, name=name))
        assert kind == "VerifyError" and "\n  loss_fn: the " in text
        assert "slice_weight(labels)" in text
        suggested = 'set terapipe.loss_reduction to "' in text
        assert suggested == name.startswith("mean over"), text  # no advice that the gradients speak against

    @pytest.mark.parametrize("name", lossy.RIGHT)
    def test_right(self, name: str) -> None:
        kind, text, log = _one(rank_pool(2).run(right_loss, name=name))
        assert (kind, text) == ("", "") and log.startswith("verify: the loss agrees on 3 slices")

    def test_tuples_of_labels_are_refused_in_evaluation(self) -> None:
        assert {text.split(":")[0] for text in rank_pool(2).run(evaluated_tuples)} == {"TeraPipeConfigError"}

    def test_a_reduction_that_is_said_is_compared(self) -> None:
        kind, text, _ = _one(rank_pool(2).run(tuples, loss="masked_loss", loss_reduction="mean_valid"))
        assert kind == "VerifyError" and "no terapipe.loss_reduction" in text


def two_replicas(extra: Any, short: int) -> tuple[str, str]:
    """Replica `short` begins with sequences that run in one slice, the other with sequences of three."""
    layers = gpt_layers("float32")
    layers.insert(4, LayerSpec(extra))
    kind = text = ""
    with engine_of(layers, section(), stages=2) as engine:
        engine.use_slice_plan(SlicePlan((12,)))
        length = 12 if engine.grid.get_data_parallel_rank() == short else 23
        try:
            engine.train_batch(iter([micro_batch(seed, length, masked=False) for seed in range(2)]))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
    return kind, text


class TestReplicas:
    @pytest.mark.parametrize("short", [0, 1])
    def test_one_has_sequences_in_one_slice_only(self, short: int) -> None:
        for kind, text in rank_pool(4).run(two_replicas, extra=faulty_layers.RunningSum, short=short):
            assert kind == "VerifyError" and "\n  layer 4 (RunningSum): output of tokens 8.. differs" in text
        assert rank_pool(4).run(two_replicas, extra=Nothing, short=short) == [("", "")] * 4


class TestCut:
    def test_rows_and_tokens_are_few(self) -> None:
        kind, _, log = _one(rank_pool(2).run(long, verify="first_batch"))
        assert kind == ""
        assert "on 3 slices (50 + 25 + 50) of tokens 0 to 125 of 400 in 2 of 5 rows with the whole, " in log

    def test_the_window_lies_where_labels_begin_to_count(self) -> None:
        """A mean over all tokens agrees with one over valid labels wherever all are valid, or none is."""
        kind, text, _ = _one(rank_pool(2).run(long, masked_until=250, loss_reduction="mean"))
        assert kind == "VerifyError" and 'set terapipe.loss_reduction to "mean_valid"' in text
        assert _one(rank_pool(2).run(long, masked_until=250))[0] == ""

    def test_a_layer_that_cannot_run_on_a_cut_runs_on_the_whole(self) -> None:
        kind, text, log = _one(rank_pool(2).run(long_with, extra=OnlyTrained))
        assert (kind, text) == ("", "") and "on 8 slices of a sequence of 400 tokens with the whole" in log

    def test_what_differs_on_a_cut_counts_though_another_layer_cannot_run_on_it(self) -> None:
        kind, text, _ = _one(rank_pool(2).run(long_with, extra=(WrongIfShort, OnlyTrained)))
        assert kind == "VerifyError" and "layer 4 (WrongIfShort): output" in text and "of tokens 0 to 125 of" in text

    def test_a_slice_weight_that_cannot_tell_of_a_cut(self) -> None:
        kind, text, log = _one(rank_pool(2).run(long_with, extra=None, loss_fn=WeightOfFifty()))
        assert (kind, text) == ("", "")
        assert "the loss agree on 8 slices of a sequence of 400 tokens with the whole" in log


class TestBatchesWithoutLabels:
    def test_the_micro_batch_that_has_labels_is_looked_at(self) -> None:
        without, other = batches(1)[0]
        without[1][:] = IGNORE_INDEX
        kind, text, log = _one(rank_pool(2).run(said, data=[without, other]))
        assert (kind, text) == ("", "") and log.startswith("verify: the loss agrees on 3 slices")

    @pytest.mark.parametrize("verify", ["off", "first_batch"])
    @pytest.mark.parametrize(("loss", "reduction"), [("gpt_loss", "sum"), ("shifting_loss", "mean_valid")])
    def test_the_next_one_with_labels_is_looked_at(self, loss: str, reduction: str, verify: str) -> None:
        kind, text, log, steps = _one(rank_pool(2).run(waiting, loss=loss, reduction=reduction, verify=verify))
        assert (kind, steps) == ("VerifyError", 2) and "\n  loss_fn: the loss differs" in text
        assert log.count("verify: ") == 1 and log.endswith("; the loss was not compared: no label counts in this batch")

    @pytest.mark.parametrize("verify", ["off", "first_batch"])
    def test_the_right_one_trains_on(self, verify: str) -> None:
        kind, text, log, steps = _one(rank_pool(2).run(waiting, loss="gpt_loss", reduction="mean_valid", verify=verify))
        assert (kind, text, steps) == ("", "", 3)
        assert log.splitlines()[1].startswith("verify: the loss agrees on 3 slices") and log.count("verify: ") == 2


def masked_later(reduction: str | None, loss: str) -> tuple[str, str, str, bool]:
    """Two steps on labels that all count, then one on labels of which some do not; and whether that one was made."""
    loss_fn = getattr(lossy, loss, None) or gpt.gpt_loss
    changes = {} if reduction is None else {"loss_reduction": reduction}
    first, second, third = batches(3, masked=False)
    third = [micro_batch(7, masked=True), third[1]]
    kind = text = ""
    with logged() as lines, engine_of(gpt_layers(), section(**changes), loss_fn=loss_fn) as engine:
        for batch in (first, second):
            engine.train_batch(iter(batch))
        try:
            engine.train_batch(iter(third))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        steps = engine.global_steps
    return kind, text, "\n".join(line for line in lines if line.startswith("verify: ")), steps == 3


class TestLabelsThatAreIgnoredLater:
    """While all labels count, a mean over the valid ones and a mean over all are the same."""

    @pytest.mark.parametrize(
        ("reduction", "loss", "fits"), [(None, "mean_loss", "mean"), ("mean", "gpt_loss", "mean_valid")]
    )
    def test_a_reduction_that_is_not_the_losss(self, reduction: str | None, loss: str, fits: str) -> None:
        results = rank_pool(2).run(masked_later, reduction=reduction, loss=loss)
        assert [made for *_, made in results] == [False, False]
        kind, text, *_ = results[1]
        assert kind == "VerifyError" and "labels are ignored for the first time (ignore_index -100)" in text
        assert f'set terapipe.loss_reduction to "{fits}"' in text
        assert results[0][0] == "BatchError" and text in results[0][1]

    def test_another_micro_batch_of_the_first_batch(self) -> None:
        data = [micro_batch(0, masked=False), micro_batch(1, masked=True)]
        kind, text, _ = _one(rank_pool(2).run(said, data=data, loss_fn=lossy.mean_loss))
        assert kind == "VerifyError" and 'set terapipe.loss_reduction to "mean"' in text

    @pytest.mark.parametrize(("reduction", "loss"), [(None, "gpt_loss"), ("mean", "mean_loss")])
    def test_the_right_one_trains_on(self, reduction: str | None, loss: str) -> None:
        for kind, text, _, made in rank_pool(2).run(masked_later, reduction=reduction, loss=loss):
            assert (kind, text, made) == ("", "", True)
