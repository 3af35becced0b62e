"""Test losses without logits on two stages against the stock engine, which computes logits; and their peak of bytes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from studies.memory import live_bytes, measure_peak
from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload, build_engine, micro_batches
from terapipe_ds.costs.model_sizes import ModelSize, loss_chunk_tokens
from terapipe_ds.losses import LinearCrossEntropy, deferred, tied_logits
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel
from terapipe_ds.runtime.layers.sliceable import ModelChanges
from terapipe_ds.runtime.verify.stage import StageCheck
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay
from tests.distributed.engines import (
    IGNORE_INDEX,
    VOCAB_SIZE,
    ZERO1,
    batches,
    differences,
    engine_of,
    error_of,
    first_step_error,
    fp32_layers,
    gpt_layers,
    logged,
    micro_batch,
    raised_by,
    run_training,
    section,
    step_error,
    train,
    unchecked,
    violations,
    with_few_rounds,
)
from tests.distributed.harness import rank_pool
from tests.distributed.training import draw_weights
from tests.small_models import tuples

HIDDEN = 16


def with_head(**options: Any) -> list[Any]:
    """Return a decoder whose last layer is torch's own."""
    return [*gpt_layers()[:-1], LayerSpec(nn.Linear, HIDDEN, VOCAB_SIZE, dtype=torch.float64, **options)]


def with_tied_head() -> list[Any]:
    first, last = (
        TiedLayerSpec("tokens", nn.Embedding, VOCAB_SIZE, HIDDEN, forward_fn=forward_fn, dtype=torch.float64)
        for forward_fn in (None, tied_logits)
    )
    return [first, *gpt_layers()[1:-1], last]


def with_frozen_layers() -> list[Any]:
    return [*(LayerSpec(tuples.Frozen, spec) for spec in gpt_layers()[:-1]), *with_head()[-1:]]


class DoublingLinear(nn.Linear):
    """A head that the loss must leave alone: a class of its own, whose product doubles."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, VOCAB_SIZE, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def masked(seed: int) -> Any:
    """A mask beside the labels, and a first slice in which no label counts."""
    tokens, labels = micro_batch(seed)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels[:, :8] = IGNORE_INDEX
    return tokens, (labels, weights)


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a training, and whether its loss keeps logits."""

    layers: Callable[[], Sequence[Any]] = with_head
    loss_fn: Any = dataclasses.field(default_factory=LinearCrossEntropy)
    terapipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    make: Callable[[int], Any] = micro_batch
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    keeps_logits: bool = False


SHAPED = LinearCrossEntropy(ignore_index=IGNORE_INDEX, label_smoothing=0.1, scale=0.5, softcap=4.0)
JOBS = {
    "a layer of torch": Job(),
    "a mask, smoothed and capped": Job(loss_fn=SHAPED, make=masked),
    "tied": Job(with_tied_head),
    "the package's model": Job(gpt_layers, gpt.gpt_loss),
    "the package's model, tied and split": Job(
        lambda: gpt_layers(tied_embedding=True), gpt.gpt_loss, {"schedule": "zbv"}
    ),
    "split": Job(terapipe={"schedule": "seq1f1b-zb"}),
    "recomputed": Job(terapipe={"recompute": "full"}),
    "offloaded": Job(terapipe={"offload_activations": True}),
    "a head alone on the last stage": Job(terapipe={"partition": [0, 6, 7]}, engine={"wall_clock_breakdown": True}),
    "frozen layers before the head": Job(with_frozen_layers),
    "a layer of one's own": Job(lambda: [*gpt_layers()[:-1], LayerSpec(DoublingLinear)], keeps_logits=True),
}


def _draw(engine: PipelineEngine, step: int) -> None:
    if step == 0:
        draw_weights(engine.module.named_parameters())


def trained(name: str) -> tuple[dict[str, float], int, str]:
    """Return the differences from the stock engine, the number of losses of hidden states, and the log."""
    job, calls = JOBS[name], []
    data = [[job.make(100 * step + index) for index in range(2)] for step in range(2)]
    options = {"loss_fn": job.loss_fn, **job.engine}
    stock = run_training(job.layers, None, data, stages=1, before_step=_draw, **options)
    apply = deferred._Deferred.apply

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return apply(*arguments)

    compare = StageCheck.compare_without_logits

    def uncounted(*arguments: Any) -> Any:
        """Run the check of the first batch, which has losses without logits of its own."""
        before, found = len(calls), compare(*arguments)
        assert len(calls) > before
        del calls[before:]
        return found

    patches = (
        mock.patch.object(deferred._Deferred, "apply", counted),
        mock.patch.object(StageCheck, "compare_without_logits", uncounted),
    )
    with patches[0], patches[1], logged() as lines:
        with engine_of(job.layers(), section(**{"slices": [8, 12, 3], **job.terapipe}), **options) as engine:
            found = differences(train(engine, data, functools.partial(_draw, engine)), stock)
    return found, len(calls), "\n".join(lines)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", JOBS)
def test_training_equals_that_of_the_stock_engine(name: str) -> None:
    """With logits there, and without them here: losses, gradients and parameters of two steps."""
    errors, calls, logs = zip(*rank_pool(2).run(trained, name=name), strict=True)
    job = JOBS[name]
    assert not violations(errors[1:] if job.layers is with_frozen_layers else errors)  # nothing there is trained
    # two steps of two micro-batches of three slices; with the mask the first slice has no label
    expected = 0 if job.keeps_logits else 8 if job.make is masked else 12
    assert sum(calls) == expected
    assert ("not torch's own nn.Linear" in "".join(logs)) == job.keeps_logits


def replace_forward(layers: list[Any]) -> None:
    layers[-1].forward = lambda hidden, own=layers[-1].forward: own(hidden).tanh()


def replace_layer(layers: list[Any]) -> None:
    layers[-1] = lambda hidden, own=layers[-1]: own(hidden).tanh()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda layers: layers[-1].register_forward_hook(lambda _, inputs, logits: logits.tanh()),
    "a hook on gradients": lambda layers: layers[-1].register_full_backward_hook(
        lambda _, inputs, outputs: (inputs[0] * outputs[0].abs().sum(-1, keepdim=True),)
    ),
    "another layer": replace_layer,
    "a forward": replace_forward,
}
"""Changes of the last layer by a program, which a loss of hidden states cannot follow."""


def changed(name: str, at: int, verify: str, make: Callable[[], list[Any]]) -> dict[str, float]:
    """Return the differences from the stock engine if a program changes the last layer before that step."""

    def change(engine: PipelineEngine, step: int) -> None:
        _draw(engine, step)
        if step == at and engine.is_last_stage():
            CHANGES[name](engine.module.forward_funcs)

    data, options = batches(3), {"loss_fn": LinearCrossEntropy()}
    stock = run_training(make, None, data, stages=1, before_step=change, **options)
    terapipe = section(slices=[8, 12, 3], verify=verify)
    return differences(run_training(make, terapipe, data, before_step=change, **options), stock)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_last_layer_that_a_program_changes_gets_its_logits(name: str) -> None:
    """Before the first step or between steps, whether layers are checked or not: as in the stock engine.

    The last layer is torch's own, or describes itself by output_head().
    """
    cases = (0, "off", with_head), (1, "first_batch", with_head), (2, "off", with_head), (0, "off", gpt_layers)
    for at, verify, make in cases:
        assert not violations(rank_pool(2).run(changed, name=name, at=at, verify=verify, make=make)), (at, verify, make)


def hooked_in_the_first_batch(compiles: bool) -> tuple[list[int], list[int]]:
    """Return, per step, the losses of hidden states, and how far the model has changed, if step 0 alone has a hook."""
    calls: list[int] = []
    seen: list[int] = []
    apply, since = deferred._Deferred.apply, ModelChanges.since_the_last_batch

    def counted(*arguments: Any) -> Any:
        calls[-1] += 1
        return apply(*arguments)

    def noted(changes: ModelChanges) -> int:
        seen.append(since(changes))
        return seen[-1]

    patches = (
        mock.patch.object(deferred._Deferred, "apply", counted),
        mock.patch.object(ModelChanges, "since_the_last_batch", noted),
    )
    terapipe = unchecked(slices=[8, 12, 3], compile=compiles)
    with patches[0], patches[1], engine_of(with_head(), terapipe, loss_fn=LinearCrossEntropy()) as engine:
        for step, batch in enumerate(batches(4)):
            calls.append(0)
            head = engine.module.forward_funcs[-1]
            hook = head.register_forward_hook(lambda *_: None) if step == 0 and not compiles else None
            engine.train_batch(iter(batch))
            if hook is not None:
                hook.remove()
    return calls, seen


def test_a_hook_of_the_first_batch_alone_costs_logits_there_alone() -> None:
    assert rank_pool(2).run(hooked_in_the_first_batch, compiles=False)[1][0] == [0, 6, 6, 6]


def test_a_loss_without_logits_does_not_count_as_a_change_of_the_model() -> None:
    """The engine's own forward of the head did: batch 1 was checked and guarded again, and ran without compiling."""
    assert [seen for _, seen in rank_pool(2).run(hooked_in_the_first_batch, compiles=True)] == [[2, 0, 0, 0]] * 2


def half_of_the_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * gpt.gpt_loss(logits, labels)


OTHERS: dict[str, Any] = {
    "of hidden states": LinearCrossEntropy(),
    "smoothed": LinearCrossEntropy(label_smoothing=0.3),
    "of logits": half_of_the_loss,
}


def loss_replaced(first: str, then: str) -> dict[str, float]:
    """Return the differences from the stock engine if a program gives the module another loss before a step."""

    def change(engine: PipelineEngine, step: int) -> None:
        _draw(engine, step)
        if step == 1:
            engine.module.loss_fn = OTHERS[then]

    data, options = batches(3), {"loss_fn": OTHERS[first], "before_step": change}
    stock = run_training(with_head, None, data, stages=1, **options)
    return differences(run_training(with_head, unchecked(slices=[8, 12, 3]), data, **options), stock)


@pytest.mark.parametrize(("first", "then"), itertools.permutations(OTHERS, 2))
def test_a_loss_that_a_program_replaces_counts_no_longer(first: str, then: str) -> None:
    """The loss of hidden states that the engine was built with went on to train, without a word."""
    assert not violations(rank_pool(2).run(loss_replaced, first=first, then=then))


def logits_with_and_without_labels(slices: Any, reduction: str) -> float:
    """Return how far logits without labels, in the engine's first batch, are from those beside labels."""
    inputs, labels = micro_batch(1)
    options = {"compute_loss": False, "reduce_output": None, "num_micro_batches": 1}
    terapipe = section(slices=slices, loss_reduction=reduction)
    with engine_of(with_head(), terapipe, loss_fn=LinearCrossEntropy()) as engine:
        alone, beside = (engine.eval_batch(iter([(inputs, each)]), **options) for each in (None, labels))
        return error_of(alone, beside) if engine.is_last_stage() else 0.0


@pytest.mark.parametrize(
    ("slices", "reduction"), [([8, 12, 3], "mean_valid"), ([8, 12, 3], "mean_of_step"), ("auto", "mean_valid")]
)
def test_logits_need_no_labels(slices: Any, reduction: str) -> None:
    """Though the loss counts labels by its `slice_weight`, and slices are measured with the loss."""
    errors = rank_pool(2).run(with_few_rounds, job=logits_with_and_without_labels, slices=slices, reduction=reduction)
    assert max(errors) <= 1e-12


def two_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = gpt.gpt_loss(logits, labels)
    return loss, loss.detach()


def no_loss(logits: Tensor, labels: Tensor) -> None:
    return None


def without_graph(logits: Tensor, labels: Tensor) -> Tensor:
    return gpt.gpt_loss(logits, labels).detach()


def loss_of_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return gpt.gpt_loss(logits, labels), logits[:, 0, 0]


def errors_of_other_losses() -> list[tuple[str, str]]:
    """Return the errors of losses without a graph, of several, of none, and of one that no sum of slices gives."""
    without = [first_step_error(gpt_layers(num_layers=1), section(slices=n), loss_fn=without_graph) for n in (3, 1)]
    each: dict[str, Any] = {"reduce_output": None, "bcast_loss": False}
    with engine_of(gpt_layers(num_layers=1), section(), loss_fn=loss_of_rows) as engine:
        of_rows = raised_by(lambda: engine.eval_batch(iter(batches(1)[0]), **each))
    for loss, slices in ((two_losses, 3), (no_loss, 1)):  # other kinds are in test_loss_weights.py
        with engine_of(gpt_layers(num_layers=1), section(slices=slices), loss_fn=loss) as engine:
            for run in (engine.eval_batch, engine.train_batch):
                first, again = (raised_by(lambda run=run: run(iter(batches(1)[0]))) for _ in range(2))  # type: ignore[misc]
                assert first == again
                without.append(first)
    return [*without, of_rows]


def test_each_rank_names_losses_that_slices_cannot_have() -> None:
    for told in rank_pool(2).run(errors_of_other_losses):
        assert {kind for kind, _ in told} == {"SliceLossError"}, told
        for _, text in told[:2]:
            assert "(without_graph) returned a tensor of torch.float64 without a graph, so that no layer" in text
        for _, text in told[2:4]:
            assert "loss_fn (two_losses) returned a tuple of 2, but the loss of a slice must be a scalar" in text
        for _, text in told[4:6]:
            assert "loss_fn (no_loss) returned a NoneType, but the loss of a slice must be a scalar" in text
        assert "(loss_of_rows) returned tensors of the shapes [[], [2]], but each loss of a slice" in told[6][1]


def each_of_two_losses() -> Any:
    with engine_of(gpt_layers(num_layers=1), section(), loss_fn=two_losses) as engine:
        found = engine.eval_batch(iter(batches(1)[0]), reduce_output=None, bcast_loss=False)
        return None if found is None else [[float(loss) for loss in losses] for losses in found]


def test_an_evaluation_that_returns_each_loss_takes_several() -> None:
    first, last = rank_pool(2).run(each_of_two_losses)
    assert first is None and len(last) == 2 and all(a == b > 0.0 for a, b in last)


def wrong_counts() -> tuple[str, str]:
    with engine_of(gpt_layers(num_layers=1), section(loss_reduction="mean_of_step")) as engine:
        engine.step_label_counts = [30.0]
        return step_error(engine)


def test_label_counts_of_another_number_of_micro_batches_are_refused_on_all_ranks() -> None:
    for _, text in rank_pool(2).run(wrong_counts):
        assert "engine.step_label_counts = [30.0]" in text and "for each of the 2 micro-batches" in text


class Matrices(TorchDispatchMode):
    """Name the operations that make a tensor as large as the output matrix."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.shape = list(engine.module.parameters())[-1].shape
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape and not func.is_view:
            self.names.append(str(func))
        return result


def matrices(num_labelled: int) -> list[str]:
    """Train on four slices, the last `num_labelled` with labels; return the operations that made such matrices."""
    with engine_of(fp32_layers(), unchecked(slices=4), **BF16_SETTINGS) as engine:
        batch = [micro_batch(index, length=24, masked=False) for index in range(2)]
        for _, labels in batch:
            labels[:, : 24 - 6 * num_labelled] = IGNORE_INDEX
        engine.train_batch(iter(batch))
        with Matrices(engine) as made:
            engine.train_batch(iter(batch))
        return made.names


def test_a_slice_without_labels_makes_no_gradient_of_the_output_matrix() -> None:
    """Autograd would write zeros, and add them to the sum: of long prompts, for nearly all slices."""
    ranks = [rank_pool(2).run(matrices, num_labelled=number) for number in (1, 3)]
    # each of two micro-batches makes one, and adds it to the sum
    assert [len(names) for _, names in ranks] == [2 * 2 * 1, 2 * 2 * 3]


def half_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * gpt.gpt_loss(logits, labels)


def without_labels_on_a_replica() -> dict[str, float]:
    """Return the differences from the stock engine, whose second replica has the other half of the first one's loss."""
    data, options = batches(2), {**ZERO1, "gradient_accumulation_steps": 2}
    stock = run_training(fp32_layers, None, data, loss_fn=half_loss, **options)
    is_second = torch_dist.get_rank() % 2 == 1
    own = [[(x, y.fill_(IGNORE_INDEX) if is_second else y) for x, y in batch] for batch in batches(2)]
    errors = differences(run_training(fp32_layers, unchecked(), own, **options), stock)
    return {kind: error for kind, error in errors.items() if kind != "loss"}  # each replica has its own, of its labels


def test_a_replica_without_labels_takes_part_in_the_sum_of_gradients() -> None:
    """ZeRO reduces the gradients that a rank has: without one of the output matrix, replicas would reduce others."""
    assert not violations(rank_pool(4).run(without_labels_on_a_replica), 1e-5)


def evaluated() -> tuple[float, bool, str]:
    """Evaluate without logits and with them; return the relative difference of the losses."""
    layers = gpt_layers(vocab_size=4096)
    with logged() as lines, engine_of(layers, section()) as engine:
        data = [micro_batch(index) for index in range(2)]
        loss = float(engine.eval_batch(iter(data)))
        with_logits, logits = engine.eval_batch(iter(data), return_logits=True)
        is_there = logits is not None and logits.shape[-1] == 4096
        return abs(loss / float(with_logits) - 1), is_there, "\n".join(lines)


def test_evaluation_computes_logits_only_for_those_who_ask() -> None:
    errors, are_there, logs = zip(*rank_pool(2).run(evaluated), strict=True)
    assert max(errors) <= 1e-12 and are_there[1]
    # 4096 logits of 8 bytes, for each of two rows
    assert "eval_batch(return_logits=True) takes the outputs of the last layer, 65,536 bytes per token" in logs[1]


def _user_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return gpt.gpt_loss(logits, labels)


def told() -> str:
    with logged() as lines, engine_of(gpt_layers(vocab_size=4096), section(), loss_fn=_user_loss) as engine:
        engine.train_batch(iter([micro_batch(0), micro_batch(1)]))
        return "\n".join(lines)


def test_a_loss_of_the_users_gets_logits_and_the_log_says_what_they_take() -> None:
    logs = rank_pool(2).run(told)
    assert "loss_fn takes the outputs of the last layer, 65,536 bytes per token of a slice" in logs[1]


VOCABULARY, SLICES = 32768, 16
PEAK = Workload(stages=2, accumulation=1, sequence_length=2048, micro_batch=1, hidden=96, layers=2, heads=2)


def peak_bytes(dtype: str, slices: int, accumulation: int) -> tuple[int, int, int]:
    """Return this rank's measured peak of a step, the counted one, and the static bytes that were counted."""
    section = {"enabled": True, "schedule": "seq1f1b", "slices": slices, "verify": "off"}
    work = dataclasses.replace(PEAK, accumulation=accumulation)
    others = live_bytes()  # tensors that earlier tests left in this process
    settings = BF16_SETTINGS if dtype == "bfloat16" else None
    engine = build_engine(section, work, ds_config=settings, gpt={"vocab_size": VOCABULARY})
    try:
        data = itertools.repeat(micro_batches(PEAK, 1, VOCABULARY)[0])
        engine.train_batch(data)
        # outputs for later labels stay on the host, which is the device here
        engine._incoming._first_batch._probe = None
        measured, _ = measure_peak(engine, data)
    finally:
        engine.destroy()
    fields = {"num_kv_heads": PEAK.heads, "head_dim": PEAK.hidden // PEAK.heads, "ffn_size": 256}
    size = ModelSize("peak", PEAK.layers, PEAK.hidden, PEAK.heads, vocab_size=VOCABULARY,
                     max_sequence_length=PEAK.sequence_length, **fields)  # fmt: skip
    zero = int(dtype == "bfloat16")
    training: dict[str, Any] = {"dtype": dtype, "micro_batch": 1, "zero_stage": zero, "fused_norm": False}
    model = MemoryModel.of_model(size, num_stages=2, on_cpu=True, **training)
    plan, stage_id = SlicePlan.equal(PEAK.sequence_length, slices), engine.stage_id
    counted = Replay.of(build("seq1f1b", 2, accumulation, slices)).peak_bytes(plan, model)[stage_id]
    return measured - others, counted, model.static_bytes(stage_id) + model.gradient_bytes(stage_id)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_the_last_stage(dtype: str) -> None:
    """16 slices that are all live: hidden states and one chunk of logits, where plain logits take 128 KiB per token.

    In bf16 a CPU makes two more tensors of the size of the output matrix, since it widens a product before it adds it.
    """
    _, (measured, counted, static) = rank_pool(2).run(peak_bytes, dtype=dtype, slices=SLICES, accumulation=1)
    assert measured - static == pytest.approx(counted - static, rel=0.03)
    item = 4 if dtype == "float32" else 2
    chunk = loss_chunk_tokens(VOCABULARY, on_cpu=True) * VOCABULARY * (4 if item == 4 else 4 + 2)
    fresh = 0 if item == 4 else VOCABULARY * PEAK.hidden * (2 + 4)
    of_tokens = (measured - static - chunk - fresh) / PEAK.sequence_length
    assert of_tokens <= 32 * PEAK.hidden * 4, "norms, attention, MLP and the hidden states"
    assert measured - static - fresh < PEAK.sequence_length * VOCABULARY * 4 / 6
