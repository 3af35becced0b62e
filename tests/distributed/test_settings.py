"""Test settings that DeepSpeed fails on, or ignores: values for Trainer to fill in, losses as a list, empty groups."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import engine as stock_engine
from torch import Tensor, nn

import terapipe_ds
from tests.distributed import engines
from tests.distributed.harness import rank_pool

# -- evaluation ------------------------------------------------------------------------------------------------


def job_evaluated(terapipe: dict[str, Any] | None, sends: bool, **monitors: Any) -> tuple[Any, Any]:
    """Return the losses of the micro-batches, or the error."""
    with engines.engine_of(engines.gpt_layers(), terapipe, **monitors) as engine:
        losses: list[Any] = []
        data = iter(engines.batches(1)[0])
        error = engines.raised_by(
            lambda: losses.extend(engine.eval_batch(data, reduce_output=None, bcast_loss=sends) or ())
        )
        return error, [float(loss) for loss in losses]


def test_losses_of_all_micro_batches(tmp_path: Any) -> None:
    ours, stock = (rank_pool(2).run(job_evaluated, terapipe=each, sends=False) for each in (engines.unchecked(), None))
    assert [rank[0] for rank in ours] == [("", "")] * 2
    assert ours[1][1] == pytest.approx(stock[1][1], rel=1e-10) and [len(losses) for _, losses in ours] == [0, 2]
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "here"}}
    for sends, more, word in ((True, {}, "bcast_loss=True"), (False, monitor, "a monitor that is enabled")):
        for (kind, text), _ in rank_pool(2).run(job_evaluated, terapipe=engines.unchecked(), sends=sends, **more):
            assert kind == "ValueError" and f"with {word}" in text and "Set bcast_loss=False" in text


# -- a group that is empty on one stage ------------------------------------------------------------------------


def job_groups(terapipe: dict[str, Any] | None, stages: int) -> engines.Run:
    """Give the embeddings, which are on the first stage, a learning rate of their own."""
    model, settings = engines.pipeline_module(engines.gpt_layers(), stages), engines.config()
    del settings["optimizer"]
    if terapipe is not None:
        settings["terapipe"] = terapipe
        terapipe_ds.lay_out(model, settings)
    named = list(model.named_parameters())
    others = [p for name, p in named if not name.startswith("0.")]
    groups = [{"params": [p for name, p in named if name.startswith("0.")], "lr": 3e-3}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    initialize = deepspeed.initialize if terapipe is None else terapipe_ds.initialize
    with engines.torch_attention() if terapipe is None else nullcontext():
        return trained(initialize(model=model, config=settings, optimizer=optimizer, lr_scheduler=scheduler)[0])


def trained(engine: Any) -> engines.Run:
    try:
        engines.reduce_in_fp64(engine)
        run = engines.train(engine, engines.batches(2))
        assert len(engine.get_lr()) == 2 and max(engine.get_lr()) < 1e-2
        for named in (run.parameters, *run.gradients):
            for name in [name for name in named if "nothing" in name]:  # the number that fills a group
                del named[name]
        return run
    finally:
        engine.destroy()


@functools.cache
def stock_of_groups() -> engines.Run:
    return rank_pool(1).run(job_groups, terapipe=None, stages=1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
def test_a_group_that_is_empty_on_one_stage_keeps_its_learning_rate(schedule: str) -> None:
    stock = stock_of_groups()
    ours = rank_pool(2).run(job_groups, terapipe=engines.unchecked(schedule=schedule), stages=2)
    assert engines.violations([engines.differences(rank, stock) for rank in ours]) == {}


def job_left_out(terapipe: dict[str, Any] | None, stages: int, **changes: Any) -> tuple[engines.Run, float]:
    """Leave out the group of the embeddings where it is empty; return the norm of the last step as well."""
    model = engines.pipeline_module(engines.fp32_layers(), stages)
    named = list(model.named_parameters())
    groups = [{"params": [p for name, p in named if name.startswith("0.") == first]} for first in (True, False)]
    initialize = {"model_parameters": [group for group in groups if group["params"]]}
    options = {"optimizer": engines.SMALL_STEPS, "gradient_clipping": 0.05, **engines.ZERO1, **changes}
    with engines.started(model, terapipe, initialize=initialize, **options) as engine:
        return engines.train(engine, engines.batches(2)), float(engine.get_global_grad_norm())


def test_stages_with_fewer_groups_join_in_the_norm_of_zero() -> None:
    """The stock engine hangs: each group's norm is a sum over the stages."""
    stock, norm = rank_pool(1).run(job_left_out, terapipe=None, stages=1)[0]
    ours = rank_pool(2).run(job_left_out, terapipe=engines.unchecked(), stages=2, timeout_s=60)
    assert engines.violations([engines.differences(run, stock) for run, _ in ours], 1e-5) == {}
    assert [ours_norm for _, ours_norm in ours] == pytest.approx([norm] * 2, rel=1e-5)


def job_adagrad() -> tuple[str, str]:
    adagrad = {"type": "Adagrad", "params": {"lr": 1e-2}}
    return engines.raised_by(
        lambda: job_left_out(engines.unchecked(), 1, optimizer=adagrad, zero_allow_untested_optimizer=True)
    )


def test_groups_of_adagrad_under_zero_are_refused() -> None:
    for kind, text in rank_pool(2).run(job_adagrad, timeout_s=60):
        assert kind == "TeraPipeConfigError" and "Adagrad has 2 parameter groups" in text


def losses_around_a_save(folder: str, **options: Any) -> list[list[float]]:
    """Return the losses of two steps after a save, and of the same steps after its load."""
    adagrad = {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}
    losses = []
    for is_loaded in (False, True):
        with engines.engine_of(engines.fp32_layers(), engines.unchecked(), **adagrad, **options) as engine:
            engines.train(engine, engines.batches(1 + is_loaded))
            if is_loaded:
                engine.load_checkpoint(folder)
            else:
                engine.save_checkpoint(folder)
            losses.append(engines.train(engine, engines.batches(2, first_seed=700)).returned)
    return losses


def adagrad_makes_states_anew() -> bool:
    """Return whether torch's Adagrad takes other parameters than it was built with, as DeepSpeed gives it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad, adagrad = torch.zeros(1), torch.optim.Adagrad([parameter])
    adagrad.state.clear()
    try:
        adagrad.step()
    except KeyError:
        return False
    return True


@pytest.mark.skipif(not adagrad_makes_states_anew(), reason="the stock engine cannot train it with this torch either")
@pytest.mark.parametrize("options", [
    {"fp16": {"enabled": True, "initial_scale_power": 6}},
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
], ids=["fp16", "bf16_zero1"])  # fmt: skip
def test_adagrad_is_saved_in_half_precision(options: dict[str, Any], tmp_path: Path) -> None:
    """The stock engine cannot save: Adagrad has states of the parameters that fp32 copies have replaced."""
    for saved, loaded in rank_pool(2).run(losses_around_a_save, folder=str(tmp_path), **options):
        assert saved == loaded


def job_built_in_16_bits(stage: int) -> tuple[list[str], set[float]]:
    """Return the log of an engine's start, and the steps that its optimizer has counted."""
    fp16 = {"fp16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    with engines.logged() as lines, engines.engine_of(engines.fp32_layers(), engines.unchecked(), **fp16) as engine:
        return lines, {float(state["step"]) for state in engine.basic_optimizer.state.values()}


def test_a_step_of_deepspeeds_optimizer_before_the_first_is_told() -> None:
    """Without ZeRO in fp16. If no step is counted any more, DeepSpeed has repaired it."""
    for stage, steps in ((0, {1.0}), (1, set())):
        results = rank_pool(2).run(job_built_in_16_bits, stage=stage)
        assert [counted for _, counted in results] == [steps] * 2
        told = [any("takes a step without gradients" in line for line in lines) for lines, _ in results]
        assert told == [stage == 0, False]


def job_misspelt() -> list[str]:
    layers = engines.fp32_layers()
    with engines.logged() as lines, engines.engine_of(layers, engines.unchecked(), pipelin={"stages": 2}):
        return [line for line in lines if "pipelin" in line]


def test_a_misspelt_key_of_deepspeed_is_told_at_the_start() -> None:
    assert rank_pool(2).run(job_misspelt) == [["pipelin: DeepSpeed ignores this key; did you mean pipeline?"], []]


def job_left_out_in_fp16() -> tuple[str, str]:
    sgd = {"type": "SGD", "params": {"lr": 1e-2}}
    changes = {"fp16": {"enabled": True}, "optimizer": sgd, "zero_optimization": {"stage": 0}}
    return engines.raised_by(lambda: job_left_out(engines.unchecked(), 2, **changes))


def test_fewer_groups_without_zero_in_fp16_are_refused() -> None:
    for kind, text in rank_pool(2).run(job_left_out_in_fp16, timeout_s=60):
        assert kind == "TeraPipeConfigError" and "have 1 to 2 parameter groups" in text


def job_clipped(is_sparse: bool, terapipe: dict[str, Any] | None, stages: int) -> engines.Run:
    torch.manual_seed(0)
    table, sgd = nn.Embedding(engines.VOCAB_SIZE, 16, sparse=is_sparse), {"type": "SGD", "params": {"lr": 1.0}}
    module = engines.pipeline_module([table, *engines.fp32_layers()[1:]], stages)
    with engines.started(module, terapipe, optimizer=sgd, gradient_clipping=0.3) as engine:
        run = engines.train(engine, engines.batches(3))
        gradients = [{name: each.to_dense() for name, each in step.items()} for step in run.gradients]
        return dataclasses.replace(run, gradients=gradients)


def test_gradients_of_sparse_embeddings_are_clipped() -> None:
    """The stock engine clips none: the reference has a dense one."""
    dense = rank_pool(1).run(job_clipped, is_sparse=False, terapipe=None, stages=1)[0]
    ours = rank_pool(2).run(job_clipped, is_sparse=True, terapipe=engines.unchecked(), stages=2)
    assert engines.violations([engines.differences(run, dense) for run in ours], 1e-5) == {}


# -- combinations that users of DeepSpeed have -----------------------------------------------------------------


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_ZERO1 = {"bf16": {"enabled": True}, **engines.ZERO1}
OFFLOAD = {
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
OFFLOAD_BF16 = {**BF16_ZERO1, **OFFLOAD, "optimizer": engines.SMALL_STEPS, **FP32_SUMS}


class AtTimes(nn.Module):
    """Scale the hidden states, or leave its parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 1.5))
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype) if self.is_on else x


def layers_at_times() -> list[Any]:
    layers = engines.fp32_layers()
    return [*layers[:2], AtTimes(), *layers[2:]]


def from_fp32(
    run: Callable[[Any], engines.Run], layers: Callable[[], list[Any]], **options: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how far ours and the stock engine are from fp32."""
    with engines.engine_of(layers(), None, optimizer=engines.SMALL_STEPS) as engine:
        exact = run(engine)
    stock, ours = engines.both(run, layers, **options)
    return engines.differences(ours, exact), engines.differences(stock, exact)


def job_at_times() -> tuple[dict[str, float], dict[str, float]]:
    """Use the parameter in every other step, in bf16 with ZeRO-1."""

    def run(engine: Any) -> engines.Run:
        def switch(step: int) -> None:
            for module in engine.module.modules():
                if isinstance(module, AtTimes):
                    module.is_on = step % 2 == 1

        return engines.train(engine, engines.batches(4), switch)

    return from_fp32(run, layers_at_times, optimizer=engines.SMALL_STEPS, **BF16_ZERO1)


def job_offloaded() -> dict[str, float]:
    stock, ours = engines.both(lambda engine: engines.train(engine, engines.batches(2)), engines.fp32_layers, **OFFLOAD)
    return engines.differences(ours, stock)


def job_offloaded_in_bf16() -> tuple[dict[str, float], dict[str, float]]:
    """Sum gradients in fp32, as planned strategies ask."""
    return from_fp32(lambda engine: engines.train(engine, engines.batches(2)), engines.fp32_layers, **OFFLOAD_BF16)


def job_two_models() -> tuple[dict[str, float], list[float], list[float]]:
    """Train a policy beside a reference model that is evaluated in turns; return the losses of the reference too."""
    data, seen = engines.batches(2), []
    with engines.engine_of(engines.gpt_layers(), None) as engine:
        alone = engines.train(engine, data)
        fresh: list[float] = []
    with engines.engine_of(engines.gpt_layers(seed=7), None) as engine:
        fresh = [float(engine.eval_batch(iter(batch))) for batch in data]
    with (
        engines.engine_of(engines.gpt_layers(), engines.unchecked(), pipeline={"stages": "auto"}) as policy,
        engines.engine_of(engines.gpt_layers(seed=7), engines.unchecked(slices=2)) as reference,
    ):

        def evaluate(step: int) -> None:
            seen.append(float(reference.eval_batch(iter(data[step]))))

        return engines.differences(engines.train(policy, data, evaluate), alone), seen, fresh


def job_in_pieces() -> list[float]:
    """Return the stock engine's norm of the gradients of two replicas, and ours."""
    [data], norms = engines.batches(1, first_seed=1000 * torch.distributed.get_rank()), []
    options: dict[str, Any] = {"stages": 1, "bf16": {"enabled": True}, "optimizer": engines.SMALL_STEPS}
    for terapipe in (None, engines.unchecked()):
        with (
            mock.patch.object(stock_engine, "MEMORY_OPT_ALLREDUCE_SIZE", 100),
            engines.engine_of(engines.fp32_layers(), terapipe, **options) as engine,
        ):
            engine.train_batch(iter(data))
            norms.append(float(engine.get_global_grad_norm()))
    return norms


class TestCombinations:
    def test_replicas_sum_all_pieces_of_their_gradients(self) -> None:
        for stock, ours in rank_pool(2).run(job_in_pieces):
            assert ours == pytest.approx(stock, rel=0.02)  # bf16

    def test_optimizer_states_on_the_host(self) -> None:
        errors = rank_pool(2).run(job_offloaded)
        assert engines.violations(errors, limit=1e-5) == {}

    @pytest.mark.parametrize("job", [job_at_times, job_offloaded_in_bf16], ids=["unused parameters", "on the host"])
    def test_bf16_is_as_near_to_fp32_as_stock(
        self, job: Callable[[], tuple[dict[str, float], dict[str, float]]]
    ) -> None:
        for ours, stock in rank_pool(2).run(job):
            # both round to bf16, in another order: neither may be further from fp32 than the other by a half
            assert {name: (error, stock[name]) for name, error in ours.items() if error > 1.5 * stock[name]} == {}

    def test_a_policy_and_its_reference(self) -> None:
        for errors, seen, fresh in rank_pool(2).run(job_two_models):
            assert engines.violations([errors], limit=engines.EXACT) == {}
            assert (
                max(abs(ours - stock) / stock for ours, stock in zip(seen, fresh, strict=True)) <= engines.FP32_SCALAR
            )
