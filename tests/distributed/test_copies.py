"""Test, beyond the transparency set, that parts at two places (Chimera) train as one model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import terapipe_ds
from terapipe_ds.runtime.layout import tied_and_copied
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models.parts import Embedding
from tests.zoo.healthy import MaskedWeights

BOTH_WAYS = engines.unchecked(schedule="chimera-seq")


# -- messages ------------------------------------------------------------------------------------------------


@contextmanager
def counted(groups: list[Any]) -> Iterator[list[int]]:
    """Record how many numbers each sum over one of these groups has."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get("group") is group for group in groups):
            sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", count):
        yield sizes


def job_messages(limit_bytes: int) -> tuple[list[int], list[int], dict[str, float]]:
    """Return the sums of a step, the sizes of the summed tensors, and the differences from the stock engine."""
    data = engines.batches(2)
    with mock.patch.object(tied_and_copied, "BUCKET_BYTES", limit_bytes):
        with engines.engine_of(engines.gpt_layers(tied_embedding=True), BOTH_WAYS) as engine:
            tied = [*tied_and_copied.weights_by_group(engine.module)]
            with counted([group for group, _ in tied]) as messages:
                ours = engines.train(engine, data)
            sizes = [weight.numel() for _, weights in tied for weight in weights]
    return messages, sizes, engines.differences(ours, engines.stock_run(tied_embedding=True))


@pytest.mark.parametrize("limit_bytes", [tied_and_copied.BUCKET_BYTES, 8000])
def test_gradients_are_summed_in_few_messages(limit_bytes: int) -> None:
    ranks = rank_pool(2).run(job_messages, limit_bytes=limit_bytes)
    assert not engines.violations([errors for *_, errors in ranks])
    for messages, sizes, _ in ranks:
        assert len(sizes) == 26
        assert sum(messages) == 2 * sum(sizes)  # two steps
        assert messages[: len(messages) // 2] == messages[len(messages) // 2 :]
        per_step = len(messages) // 2
        assert per_step == 1 if limit_bytes > 8 * sum(sizes) else 4 < per_step < len(sizes)


# -- frozen weights ------------------------------------------------------------------------------------------


def freeze(model: Any, frozen: bool = True) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(not frozen)


def job_unfrozen_later(terapipe: dict[str, Any] | None) -> dict[str, Tensor]:
    """Norms are frozen when the layers are laid out, and for a step; the optimizer has them from the start."""
    model = engines.pipeline_module(engines.gpt_layers(), 2 if terapipe else 1)
    freeze(model)
    with engines.started(model, terapipe, initialize={"model_parameters": list(model.parameters())}) as engine:
        before = engines.train(engine, engines.batches(1)).parameters
        freeze(engine.module, frozen=False)
        after = engines.train(engine, engines.batches(3, first_seed=7)).parameters
    norms = [name for name in after if "norm" in name]
    assert norms and not any(torch.equal(before[name], after[name]) for name in norms)
    return after


def job_frozen_after(one_place: bool = False) -> list[float]:
    """bf16, norms frozen once the layers have moved: by BF16_Optimizer, which knows what it trains alone."""
    model = engines.pipeline_module(engines.gpt_layers("float32"))
    terapipe_ds.lay_out(model, engines.config(**PRECISIONS["bf16"]) | {"terapipe": BOTH_WAYS})
    if not one_place or dist.get_rank() == 0:
        freeze(model)
    with engines.started(model, BOTH_WAYS, **PRECISIONS["bf16"]) as engine:
        return engines.train(engine, engines.batches(2)).returned


class TestFrozenWeights:
    def test_what_is_unfrozen_later_is_summed(self) -> None:
        ranks = rank_pool(2).run(job_unfrozen_later, terapipe=BOTH_WAYS)
        expected = rank_pool(1).run(job_unfrozen_later, terapipe=None)[0]
        assert not copies_that_differ(ranks)
        for name, value in ranks[0].items():
            assert engines.relative_error(value, expected[name]) < 1e-10, name

    def test_what_an_optimizer_does_not_know_is_left_alone(self) -> None:
        losses = rank_pool(2).run(job_frozen_after)
        assert losses[0] == losses[1] and len(losses[0]) == 2

    def test_frozen_at_one_place_alone_is_refused(self) -> None:
        with pytest.raises(AssertionError, match="trained at one and not at the other"):
            rank_pool(2).run(job_frozen_after, one_place=True)


# -- gradients from outside ----------------------------------------------------------------------------------


@contextmanager
def left_gradients(dtype: str, options: dict[str, Any]) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Leave gradients of a backward on one rank before a batch; yield the engine and the error of the batch."""
    with engines.engine_of(engines.gpt_layers(dtype), BOTH_WAYS, **options) as engine:
        if dist.get_rank() == 1:
            next(engine.module.parameters()).sum().backward()
        error = engines.step_error(engine, engines.batches(1)[0])
        engine.zero_grad()
        yield engine, error


def job_left_gradients() -> tuple[tuple[str, str], dict[str, float]]:
    """Train without the gradients after the error."""
    with left_gradients("float64", {}) as (engine, error):
        return error, engines.differences(engines.train(engine, engines.batches(2)), engines.stock_run())


def job_left_in_optimizer(precision: str) -> tuple[str, str]:
    options = PRECISIONS[precision]
    if precision == "bf16":  # otherwise the optimizer drops them
        options = options | {"bf16": {"enabled": True, "immediate_grad_update": True}}
    with left_gradients("float32", options) as (_, error):
        return error


def job_trained_in_part() -> list[float]:
    """ZeRO leaves gradients of the norms' weights, which its optimizer does not have."""
    model = engines.pipeline_module(engines.gpt_layers("float32"))
    terapipe_ds.lay_out(model, engines.config(**engines.ZERO1) | {"terapipe": BOTH_WAYS})
    trained = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    with engines.started(model, BOTH_WAYS, initialize={"model_parameters": trained}, **engines.ZERO1) as engine:
        return engines.train(engine, engines.batches(3)).returned


def test_gradients_that_each_copy_would_add_are_refused_before_the_batch() -> None:
    ranks = rank_pool(2).run(job_left_gradients)
    assert [error[0] for error, _ in ranks] == ["BatchError", "TeraPipeConfigError"]  # rank 0 names rank 1
    assert all("would count twice: call engine.zero_grad()" in error[1] for error, _ in ranks)
    assert not engines.violations([errors for _, errors in ranks])
    assert [len(losses) for losses in rank_pool(2).run(job_trained_in_part)] == [3, 3]


@pytest.mark.parametrize("precision", ["zero1", "bf16", "fp16"])
def test_a_gradient_that_an_optimizer_would_add_is_refused(precision: str) -> None:
    errors = rank_pool(2).run(job_left_in_optimizer, precision=precision)
    assert ["call engine.zero_grad()" in text for _, text in errors] == [True, True]


# -- added weights -------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """Add a product of two matrices to a weight. Each rank begins with random numbers of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.rand_like(weight[:2]))
        self.up = nn.Parameter(torch.zeros_like(weight[:, :2]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def job_added(terapipe: dict[str, Any] | None, down: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the factors `down` of adapters that are added to laid-out layers, at first and after three clipped steps.

    The stock engine takes `down` from the argument.
    """
    model = engines.pipeline_module(engines.gpt_layers(), 2 if terapipe else 1)
    options = {"gradient_clipping": 0.1}
    if terapipe:
        terapipe_ds.lay_out(model, engines.config(**options) | {"terapipe": terapipe})
    torch.manual_seed(dist.get_rank())
    for layer in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        register_parametrization(layer, "weight", Adapter(layer.weight.detach()))
    model.load_state_dict(down, strict=False)
    with engines.started(model, terapipe, **options) as engine:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters() if name.endswith("down")}
        return before, engines.train(engine, engines.batches(3)).parameters


def job_added_once() -> tuple[str, str]:
    """Return the error of a start after one stage alone has added an adapter."""
    model = engines.pipeline_module(engines.gpt_layers())
    terapipe_ds.lay_out(model, engines.config() | {"terapipe": BOTH_WAYS})
    for layer in [each for each in model.modules() if isinstance(each, nn.Linear)] if dist.get_rank() == 0 else ():
        register_parametrization(layer, "weight", Adapter(layer.weight.detach()))
    return engines.raised_by(lambda: engines.start(model, BOTH_WAYS))


class TestAddedWeights:
    def test_added_on_one_stage_alone_they_are_refused(self) -> None:
        for kind, text in rank_pool(2).run(job_added_once):
            assert kind == "TeraPipeConfigError"
            assert "its copies on two stages have different parameters: change it on both" in text

    def test_adapters_of_laid_out_layers_train_as_one(self) -> None:
        (before, ours), (_, theirs) = rank_pool(2).run(job_added, terapipe=BOTH_WAYS, down={})
        assert not copies_that_differ([ours, theirs])
        _, expected = rank_pool(1).run(job_added, terapipe=None, down=before)[0]
        assert any(name.endswith("down") for name in ours)
        for name, value in ours.items():
            assert engines.relative_error(value, expected[name]) < 1e-6, name  # DeepSpeed's norm is in fp32


# -- hooks of parameters -------------------------------------------------------------------------------------


class HalfTrained(Embedding):
    """Leave every other word as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.register_hook(lambda grad: grad * (torch.arange(len(grad)) % 2).unsqueeze(1))


def hooked_layers() -> list[LayerSpec]:
    last = TiedLayerSpec("words", HalfTrained, forward_fn=lambda words, hidden: hidden @ words.weight.T)
    return [TiedLayerSpec("words", HalfTrained), LayerSpec(MaskedWeights), LayerSpec(MaskedWeights), last]


def job_hooks(terapipe: dict[str, Any], folder: str) -> dict[str, float]:
    """Return the differences from the stock engine with one stage, which does not resume between its two steps."""
    first, second = engines.batches(2)
    stock = engines.run_training(hooked_layers, None, [first, second], stages=1)
    with engines.engine_of(hooked_layers(), terapipe) as engine:
        before = engines.train(engine, [first])
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        after = engines.train(engine, [second])
    joined = (getattr(before, name) + getattr(after, name) for name in ("losses", "returned", "gradients"))
    return engines.differences(engines.Run(*joined, after.parameters), stock)


@pytest.mark.parametrize("schedule", ["seq1f1b", "chimera-seq"])
def test_hooks_of_weights_run_that_stages_share(schedule: str, tmp_path: Path) -> None:
    """Torch forgot them when DeepSpeed sent the weights to the other stages; a load sends them again."""
    terapipe = engines.section(schedule=schedule)
    assert not engines.violations(rank_pool(2).run(job_hooks, terapipe=terapipe, folder=str(tmp_path)))


# -- the same weights ----------------------------------------------------------------------------------------

REPLICAS = 3
NUM_STEPS = 2

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "zero1": engines.ZERO1,
    "bf16": {"bf16": {"enabled": True}, **engines.ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16, sums in fp32": {
        "fp16": {"enabled": True, "initial_scale_power": 8}, **engines.ZERO1,
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip
OPTIONS = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}}}


class Unused(nn.Module):
    """Have no effect; the layer's weights must stay unchanged at both places."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=not frozen)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def job_replicas(precision: str, terapipe: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights of this rank after some steps, each replica with data of its own. The last step has one micro-batch,
    which goes down alone: the copies of the way up have no gradients of their own."""
    options = {**PRECISIONS[precision], **OPTIONS}
    layers = engines.gpt_layers(dtype="float32")
    layers[-2:-2] = [LayerSpec(Unused, frozen) for frozen in (False, True)]
    with engines.engine_of(layers, terapipe, **options) as engine:
        first_seed = 1000 * engine.grid.get_data_parallel_id()
        data = [*engines.batches(NUM_STEPS, first_seed=first_seed), *engines.batches(1, 1, first_seed=first_seed + 500)]
        return engines.train(
            engine, data, lambda step: engine.set_train_batch_size(2 * REPLICAS * len(data[step]))
        ).parameters


def copies_that_differ(ranks: Sequence[dict[str, Tensor]]) -> list[str]:
    first = ranks[0]
    assert all(rank.keys() == first.keys() for rank in ranks)
    return [name for name in first if not all(torch.equal(rank[name], first[name]) for rank in ranks)]


class TestThreeReplicas:
    """DeepSpeed averages over replicas stage by stage: the sum of three numbers depends on where they lie."""

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.sample(1)
    def test_copies_are_the_same_to_the_last_bit(self, precision: str) -> None:
        pool = rank_pool(2 * REPLICAS)
        ranks = pool.run(job_replicas, precision=precision, terapipe=BOTH_WAYS)
        assert not copies_that_differ(ranks)
        if precision not in ("fp32", "zero1"):
            return  # rounding there hides more than this test could show
        expected: dict[str, Tensor] = {}
        for rank in pool.run(job_replicas, precision=precision, terapipe=None):
            expected |= rank
        for rank in ranks:
            assert rank.keys() == expected.keys()
            assert max(engines.relative_error(value, expected[name]) for name, value in rank.items()) < 1e-5
