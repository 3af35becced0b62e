"""Test the check of the first batch in a pipeline: all ranks report a fault; without one, training is unaffected. By
default it compares layers and losses that are not the package's own, on a cut of the first batch; the loss always.
"""

import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models import faulty, tuples
from tests.small_models.parts import Calls, Head, cross_entropy
from tests.zoo.attentions import Sliced
from tests.zoo.losses import PAD, each, masked_mean, mean_of_all_tokens, padded, shifting, valid, without_padding
from tests.zoo.members import spec_of, stack

VERIFY = engines.section(verify="first_batch", slices=[9, 5, 9])
PLAIN = engines.section(slices=[9, 5, 9])


def one(told: list[tuple[str, str]]) -> str:
    """Return the report."""
    kind, text = engines.of_rank_0(told)
    assert kind == "VerifyError"
    return str(text)


def trainings(case: str) -> list[engines.Run]:
    """Make three steps with and without the check."""
    layers, options, data = CASES[case]
    runs = []
    for terapipe in (PLAIN, VERIFY):
        torch.manual_seed(17)
        with engines.engine_of(
            layers(), {**terapipe, **options.get("section", {})}, **options.get("engine", {})
        ) as engine:
            before = torch.get_rng_state()
            runs.append(engines.train(engine, data()))
            runs[-1].parameters["random state"] = torch.get_rng_state()
            assert not torch.equal(before, torch.get_rng_state()) or "dropout" not in case
            assert engine.slice_store.pool.live_bytes == 0
    return runs


def of_whole_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    return gpt.gpt_loss(logits, labels.long())


def labels_held_after_a_batch() -> int:
    """Return how many tensors of a batch's labels live on after it. The window that is compared has two rows."""
    options = {"stages": 1, "loss_fn": of_whole_numbers, "train_micro_batch_size_per_gpu": 3}
    with engines.engine_of(engines.gpt_layers(), VERIFY, **options) as engine:
        engine.train_batch(iter([(tokens, labels.int()) for tokens, labels in engines.batches(1, rows=3)[0]]))
        engine.set_dataiterator(iter(()))
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.dtype == torch.int32]
        return len([each for each in alive if each.shape == (3, engines.LENGTH)])


def test_the_check_keeps_no_labels_of_its_batch() -> None:
    assert rank_pool(1).run(labels_held_after_a_batch) == [0]


def scaled_from_thirty_tokens(x: Tensor) -> Tensor:
    """Scale long sequences by the length of the call, as rotary positions for long texts do."""
    return x * max(1.0, x.shape[1] / 30)


def mixed_in_blocks(x: Tensor) -> Tensor:
    """Mix the tokens of blocks of eight."""
    return torch.cat([block + block.mean(1, keepdim=True) for block in x.split(8, 1)], 1)


def errors_of_lengths(
    lengths: list[list[int]],
    layer: Callable[[Tensor], Tensor] = scaled_from_thirty_tokens,
    by_hand: tuple[int, ...] = (),
    loss_waits: bool = False,
) -> tuple[list[str], list[str], int]:
    """Train on micro-batches of these lengths, in turns; return texts of errors, the log of checks, and the steps.

    The slices `by_hand` hold from the second batch on. With `loss_waits` the first batch has no labels.
    """
    layers = [*stack(LayerSpec(Sliced, 0))[:-1], LayerSpec(Calls, layer), LayerSpec(Head)]
    with (
        engines.logged() as said,
        engines.engine_of([spec_of(each) for each in layers], engines.section(), loss_fn=cross_entropy) as engine,
    ):
        steps = ([engines.micro_batch(length, length=length) for length in each] for each in lengths)
        first = next(steps)
        if loss_waits:
            first = [(inputs, torch.full_like(labels, engines.IGNORE_INDEX)) for inputs, labels in first]
        told = [engines.step_error(engine, first)]
        if by_hand:
            engine.use_slice_plan(SlicePlan(by_hand))
        told += [engines.step_error(engine, batch) for batch in steps]
        return [text for _, text in told if text], [text for text in said if "agree on" in text], engine.global_steps


def _tuple_batches(draw: Any) -> Any:
    return lambda: [[draw(10 * step + i) for i in range(2)] for step in range(3)]


CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "dropout, checkpointing": (
        lambda: engines.gpt_layers("float32", dropout=0.2),
        {"engine": {"module": {"activation_checkpoint_interval": 1}}},
        lambda: engines.batches(3),
    ),
    "tied, bf16": (
        lambda: engines.gpt_layers("bfloat16", tied_embedding=True),
        {"engine": {"bf16": {"enabled": True}}},
        lambda: engines.batches(3),
    ),
    "passengers": (tuples.guided_layers, {}, _tuple_batches(tuples.guided_micro_batch)),
    "auxiliary loss on its way": (
        tuples.summing_layers,
        {"engine": {"loss_fn": tuples.summed_loss}, "section": {"loss_reduction": "mean"}},
        lambda: engines.batches(3, masked=False),
    ),
    "flat logits": (tuples.flat_layers, {"engine": {"loss_fn": tuples.flat_loss}}, lambda: engines.batches(3)),
    "frozen": (lambda: tuples.frozen_layers("whole stage"), {}, lambda: engines.batches(3)),
    "own loss": (
        tuples.own_loss_layers,
        {"engine": {"loss_fn": None}, "section": {"loss_reduction": "mean"}},
        _tuple_batches(tuples.own_loss_micro_batch),
    ),
}


class TestTwoRanks:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.sample(1)
    def test_training_is_bit_for_bit_what_it_is_without(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(trainings, case=case):
            assert engines.error_of(vars(verified), vars(plain)) == 0.0

    @pytest.mark.parametrize("later", [[40, 20], [20, 40]])
    def test_layers_are_compared_again_if_sequences_have_become_longer(self, later: list[int]) -> None:
        """The longest sequence of a batch is compared: a short one shows nothing."""
        lengths = [[16, 16], [20, 18], later]
        for errors, said, steps in rank_pool(2).run(errors_of_lengths, lengths=lengths):
            [error] = errors
            assert "of a sequence of 40 tokens" in error or error.endswith("the error of rank 0 names the layers")
            assert steps == 2 and all("of a sequence of 16 tokens" in text for text in said) and len(said) <= 1

    @pytest.mark.parametrize(
        ("lengths", "by_hand", "errs"),
        [([24, 30], (), True), ([24, 24], (5, 9, 10), True), ([24, 24], (16, 8), False), ([48, 24], (), False)],
    )
    def test_layers_are_compared_again_if_slices_part_blocks(
        self, lengths: list[int], by_hand: tuple[int, ...], errs: bool
    ) -> None:
        options = {"lengths": [[each] * 2 for each in lengths], "layer": mixed_in_blocks, "by_hand": by_hand}
        for errors, _, steps in rank_pool(2).run(errors_of_lengths, **options):
            assert (len(errors), steps) == ((1, 1) if errs else (0, 2))

    @pytest.mark.parametrize(
        ("lengths", "options"),
        [
            ([[24] * 2, [24] * 2], {"by_hand": (5, 9, 10), "layer": mixed_in_blocks}),
            ([[16] * 2, [40] * 2], {"layer": scaled_from_thirty_tokens}),
        ],
    )
    def test_they_are_also_while_the_loss_waits_for_labels(
        self, lengths: list[list[int]], options: dict[str, Any]
    ) -> None:
        for errors, _, steps in rank_pool(2).run(errors_of_lengths, lengths=lengths, loss_waits=True, **options):
            assert (len(errors), steps) == (1, 1)

    def test_other_lengths_of_a_batch_are_compared_if_their_slices_part_blocks(self) -> None:
        [errors, _, steps], _ = rank_pool(2).run(errors_of_lengths, lengths=[[24, 20]], layer=mixed_in_blocks)
        assert "(7 + 7 + 6) of a sequence of 20 tokens" in errors[0] and steps == 0

    def test_layers_are_not_compared_again_for_a_few_more_tokens(self) -> None:
        first, _ = rank_pool(2).run(errors_of_lengths, lengths=[[16, 16], [23, 16], [24, 16], [29, 16]])
        errors, said, steps = first
        assert (errors, steps) == ([], 4)
        assert [text.split(" tokens")[0].split()[-1] for text in said] == ["16", "24"]


# -- megatron-core layers, with tensor parallelism -------------------------------------------------------------------

MEGATRON = {
    "sequence parallel, mixture of experts": ("tp2_sp", {"block": "moe"}),
    "two stages, recompute": ("pp2", {"recompute": "uniform", "tied": True}),
    "sequence parallel": ("tp2_sp", {"positions": "learned", "block": "gelu"}),
}
SIZES = {"tp2_sp": (2, 1, 1, True), "pp2": (1, 2, 1, False)}


MegatronTraining = tuple[list[float], dict[str, torch.Tensor], tuple[str, str]]
"""Losses, parameters, and the check's objections."""


def megatron_trainings(case: str, checks: tuple[str, ...] = ("off", "first_batch")) -> list[MegatronTraining]:
    """Make two steps with and without the check."""
    from tests.distributed import megatron_models
    from tests.distributed.megatron_cases import LAYOUTS, Case

    layout, fields = MEGATRON[case]
    results = []
    with mock.patch.dict(LAYOUTS, SIZES):
        found = Case(layout=layout, **fields)
        for verify in checks:
            model = megatron_models.build_model(found)
            megatron_models.draw_weights(model)
            terapipe = {"enabled": True, "slices": [6, 10, 2, 6], "granularity_tokens": 1, "verify": verify}
            engine = megatron_models.build_engine(model, found, terapipe=terapipe)
            data = iter([megatron_models.micro_batch(found, 0, step, 0) for step in range(2)])
            losses: list[float] = []
            error = engines.raised_by(lambda: losses.extend(float(engine.train_batch(data)) for _ in range(2)))  # noqa: B023
            engine.destroy()
            results.append((losses, {n: p.detach().clone() for n, p in model.named_parameters()}, error))
    return results


def megatron_positions_from_zero(case: str) -> tuple[str, str]:
    from terapipe_ds.models import positions
    from terapipe_ds.models.megatron import layers

    of_layers, of_embedding = (mock.patch.object(each, "first_position", lambda: 0) for each in (layers, positions))
    with of_layers, of_embedding:
        return megatron_trainings(case, ("first_batch",))[0][2]


class TestMegatron:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("case", MEGATRON)
    def test_healthy(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(megatron_trainings, case=case):
            assert verified[2] == ("", "") and engines.error_of(verified, plain) == 0.0

    @pytest.mark.parametrize(
        ("case", "layer"),
        [("sequence parallel", "layer 0 (MegatronEmbedding)"), ("two stages, recompute", "layer 1 (MegatronLayer)")],
    )
    def test_positions_from_the_own_length(self, case: str, layer: str) -> None:
        text = one(rank_pool(2).run(megatron_positions_from_zero, case=case))
        assert f"\n  {layer}: output of tokens 6.. differs by " in text
        assert "their positions start at 0" in text


# -- the default -----------------------------------------------------------------------------------------------


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
        return float((labels != engines.IGNORE_INDEX).sum())


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
    data: list[engines.Batch] | None = None,
    extra: tuple[type[nn.Module], ...] = (),
    loss_fn: Any = gpt.gpt_loss,
    dtype: str = "float64",
    **changes: Any,
) -> Said:
    """Train one step for each batch, with further layers in the middle of the model, until one is refused."""
    data = data or engines.batches(1)
    layers = engines.gpt_layers(dtype, max_sequence_length=512)
    layers[4:4] = [LayerSpec(each) for each in extra]
    if loss_fn is None:
        layers.append(LayerSpec(MeanSquare))
    rows = len(data[0][0][0])
    kind = text = ""
    with (
        engines.logged() as lines,
        mock.patch.object(engines, "loss_is_checked", True),
        engines.engine_of(
            layers, engines.section(**changes), loss_fn=loss_fn, train_micro_batch_size_per_gpu=rows
        ) as engine,
    ):
        for batch in data:
            kind, text = engines.step_error(engine, batch)
            if kind:  # a caller who goes on gets the error again
                assert engines.step_error(engine, batch)[0] == kind
                break
        steps = engine.global_steps
    return Said(kind, text, "\n".join(line for line in lines if line.startswith(("verify: ", "a micro-batch"))), steps)


def on_ranks(*batches_of: engines.Batch, **options: Any) -> Said:
    """Return the report and the log of rank 0."""
    first, second = rank_pool(2).run(said, data=list(batches_of), **options)
    assert first[:2] == second[:2] or engines.of_rank_0([first, second])
    return first


def long(masked_until: int = 0, **options: Any) -> Said:
    """Train five rows of 400 tokens in eight slices; their first labels do not count."""
    data = [engines.micro_batch(seed, 400, 5, masked=False) for seed in range(2)]
    for _, labels in data:
        labels[:, :masked_until] = engines.IGNORE_INDEX
    return on_ranks(data, **{"dtype": "float32", "slices": 8, **options})


class TestLayers:
    def test_off_trains_on_and_says_so(self) -> None:
        case = {"extra": (faulty.RunningSum,), "dtype": "float32", "verify": "off"}
        kind, _, log, steps = on_ranks(*engines.batches(2), **case)
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
        kind, _, log, _ = on_ranks(*engines.batches(1, masked=False), loss_fn=None, verify="off")
        assert kind == ""
        assert log.endswith("layers were not compared; the loss was not compared: the model computes it itself")


def evaluated_tuples() -> str:
    data = [tuples.weighted_micro_batch(seed) for seed in range(2)]
    with engines.engine_of(engines.gpt_layers(), engines.section(), loss_fn=masked_mean) as engine:
        engine.eval_batch(iter(data), compute_loss=False)  # needs no labels
        return engines.raised_by(lambda: engine.eval_batch(iter(data)))[0]


def evaluated_first(**changes: Any) -> list[int]:
    """Return how many lines say that nothing has compared layers: after logits, and after all other calls."""
    [data] = engines.batches(1)
    layers = [*engines.gpt_layers(), LayerSpec(nn.Identity)]
    with engines.logged() as lines, engines.engine_of(layers, engines.section(**changes)) as engine:
        engine.eval_batch(iter(data), compute_loss=False)
        counts = [sum("compares no layers" in line for line in lines)]
        for act in (engine.eval_batch, engine.eval_batch, engine.train_batch):
            act(iter(data))
        engine.module.loss_fn = cross_entropy  # an evaluation may have another loss
        engine.eval_batch(iter(data))
    return [*counts, sum("compares no layers" in line for line in lines)]


class TestLosses:
    def test_tuples_of_labels_are_refused_in_evaluation(self) -> None:
        assert rank_pool(2).run(evaluated_tuples) == ["TeraPipeConfigError"] * 2

    def test_an_evaluation_of_layers_that_nothing_has_compared_is_told(self) -> None:
        assert rank_pool(2).run(evaluated_first) == [[1, 1], [0, 0]]
        assert rank_pool(2).run(evaluated_first, verify="off") == [[0, 0], [0, 0]]

    def test_a_reduction_that_is_said_is_compared(self) -> None:
        data = [tuples.weighted_micro_batch(seed) for seed in range(2)]
        kind, text, *_ = on_ranks(data, loss_fn=masked_mean, loss_reduction="mean_valid")
        assert kind == "VerifyError" and "no terapipe.loss_reduction" in text


def two_replicas(extra: type[nn.Module], short: int) -> tuple[str, str]:
    """Replica `short` begins with sequences that run in one slice, the other with sequences of three."""
    layers = engines.gpt_layers("float32")
    layers.insert(4, LayerSpec(extra))
    with engines.engine_of(layers, engines.section(), stages=2) as engine:
        engine.use_slice_plan(SlicePlan((12,)))
        length = 12 if engine.grid.get_data_parallel_rank() == short else 23
        return engines.step_error(engine, [engines.micro_batch(seed, length, masked=False) for seed in range(2)])


class TestReplicas:
    @pytest.mark.parametrize("short", [0, 1])
    def test_one_has_sequences_in_one_slice_only(self, short: int) -> None:
        kind, text = engines.of_rank_0(rank_pool(4).run(two_replicas, extra=faulty.RunningSum, short=short))
        assert kind == "VerifyError" and "\n  layer 4 (RunningSum): output of tokens 8.. differs" in text
        if short:
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
        without, other = engines.batches(1)[0]
        without[1][:] = engines.IGNORE_INDEX
        first, last = rank_pool(2).run(said, data=[[without, other]])
        assert first.kind == last.kind == "" and first.log.startswith("verify: the loss agrees on 3 slices")
        assert "a micro-batch has no valid label at all" in last.log

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("verify", ["off", "first_batch"])
    @pytest.mark.parametrize(
        ("loss", "reduction", "is_right"),
        [(mean_of_all_tokens, "sum", False), (shifting, "mean_valid", False), (gpt.gpt_loss, "mean_valid", True)],
    )
    def test_the_next_batch_with_labels_is_looked_at(
        self, loss: Any, reduction: str, is_right: bool, verify: str
    ) -> None:
        first, second, third = engines.batches(3, masked=False)
        for _, labels in (*first, *second):
            labels[:] = engines.IGNORE_INDEX
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


def twice_the_padding(logits: Tensor, labels: Tensor) -> Tensor:
    weights = 1.0 + (labels == PAD)
    return (each(logits, labels) * weights).sum() / weights.sum()


def mean_of_each_row(logits: Tensor, labels: Tensor) -> Tensor:
    return (each(logits, labels).sum(1) / valid(labels).sum(1).clamp(min=1)).mean()


def mean_of_present(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.mean(-1) - labels).square().nanmean()


LEFT: list[Tensor] = []


class LeavesInAList(nn.Module):
    """Leave a statistic of all tokens to the loss, in place of handing it on; `power` 1 is a mean over them."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        LEFT[:] = [x.detach().mean(1).pow(self.power).mean()]
        return 2.0 * x


def with_list(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + 0.5 * LEFT[0]


def left_in_a_list(power: int, dropout: float) -> tuple[str, str, int]:
    """Return the error of a step whose labels all count, and the number of steps."""
    layers = [*stack(LayerSpec(nn.Dropout, dropout))[:-1], LayerSpec(LeavesInAList, power), LayerSpec(Head)]
    with engines.engine_of([spec_of(each) for each in layers], PLAIN, loss_fn=with_list, stages=1) as engine:
        return *engines.step_error(engine, engines.batches(1, masked=False)[0]), engine.global_steps


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_what_layers_leave_to_the_loss_in_a_list_is_compared(dropout: float) -> None:
    """The mean over a sequence is the weighted mean of its slices', and the mean's square is not."""
    [(kind, text, steps)] = rank_pool(1).run(left_in_a_list, power=2, dropout=dropout)
    assert (kind, steps) == ("VerifyError", 0) and "loss_fn reads what layers leave elsewhere" in text
    assert rank_pool(1).run(left_in_a_list, power=1, dropout=dropout) == [("", "", 1)]


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
        first, second, third = engines.batches(3, masked=False)
        data = [first, second, [engines.micro_batch(7, masked=True), third[1]]]
        others, last = rank_pool(2).run(said, data=data, loss_fn=loss, **changes)
        if fits is None:
            assert (others.kind, last.kind, others.steps, last.steps) == ("", "", 3, 3)
            return
        assert (others.kind, last.kind, others.steps, last.steps) == ("BatchError", "VerifyError", 2, 2)
        assert "labels are ignored for the first time (ignore_index -100)" in last.text and last.text in others.text
        assert f'set terapipe.loss_reduction to "{fits}"' in last.text

    def test_a_label_that_loss_fn_ignores_comes_later(self) -> None:
        """Whatever `ignore_index` says: padding by a label of its own, half of it in each slice."""
        first, second = engines.batches(2, masked=False)
        for _, labels in first:
            labels[labels == PAD] = PAD + 1
        padding = [padded(7), second[1]]
        others, last = rank_pool(2).run(said, data=[first, padding], loss_fn=without_padding)
        assert (others.kind, last.kind, last.steps) == ("BatchError", "VerifyError", 1)
        assert f"set terapipe.ignore_index to {PAD}" in last.text
        assert on_ranks(first, padding, loss_fn=without_padding, ignore_index=PAD)[::3] == ("", 2)

    @pytest.mark.parametrize("loss", [twice_the_padding, mean_of_each_row, mean_of_present])
    def test_losses_that_differ_from_a_mean_on_later_labels(self, loss: Any) -> None:
        """Each is a mean over all tokens while no label is PAD, ignored or NaN."""
        first, second = engines.batches(2, masked=False)
        for _, labels in first:
            labels[labels == PAD] = PAD + 1
        later = [padded(7) if loss is twice_the_padding else engines.micro_batch(7), second[1]]
        if loss is mean_of_present:
            first, later = ([(tokens, labels.double()) for tokens, labels in batch] for batch in (first, later))
            later[0][1][0, :9] = math.nan
        others, last = rank_pool(2).run(said, data=[first, later], loss_fn=loss)
        assert (others.kind, last.kind, last.steps) == ("BatchError", "VerifyError", 1)
        assert "or appear for the first time, and the losses of slices differ" in last.text

    def test_a_mean_of_each_row_whose_rows_have_equally_many_labels(self) -> None:
        """On such labels, in each slice, it equals the mean over all; the trial of kinds of labels mixes them."""
        data = [engines.micro_batch(seed, masked=False) for seed in range(2)]
        for _, labels in data:
            labels[:, ::2] = engines.IGNORE_INDEX
        kind, text, *_ = on_ranks(data, loss_fn=mean_of_each_row)
        assert (
            kind == "VerifyError" and "no terapipe.loss_reduction (mean_valid, mean, sum) agrees with loss_fn" in text
        )

    def test_a_mean_of_each_row_where_the_first_batch_has_one(self) -> None:
        """It is compared again with the first micro-batch of several rows."""
        data = [engines.micro_batch(seed) for seed in range(4)]
        one_row = [(tokens[:1], labels[:1]) for tokens, labels in data[:2]]
        kind, text, _, steps = on_ranks(one_row, one_row, data[2:], loss_fn=mean_of_each_row)
        assert (kind, steps) == ("VerifyError", 2) and "the loss differs" in text

    def test_another_micro_batch_of_the_first_batch(self) -> None:
        data = [engines.micro_batch(0, masked=False), engines.micro_batch(1, masked=True)]
        kind, text, *_ = on_ranks(data, loss_fn=mean_of_all_tokens)
        assert kind == "VerifyError" and 'set terapipe.loss_reduction to "mean"' in text
