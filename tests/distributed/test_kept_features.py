"""Test combinations that DeepSpeed's users have: offloaded optimizer states, parameters unused at times, two models."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.engines import (
    EXACT,
    FP32_SCALAR,
    SMALL_STEPS,
    ZERO1,
    Run,
    batches,
    both,
    differences,
    engine_of,
    fp32_layers,
    gpt_layers,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

BF16_ZERO1 = {"bf16": {"enabled": True}, **ZERO1}
OFFLOAD = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


class AtTimes(nn.Module):
    """Scale the hidden states, or leave its parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 1.5))
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype) if self.is_on else x


def layers_at_times() -> list[Any]:
    layers = fp32_layers()
    return [*layers[:2], AtTimes(), *layers[2:]]


def job_at_times() -> tuple[dict[str, float], dict[str, float]]:
    """Use the parameter in every other step, in bf16 with ZeRO-1; return how far both engines are from fp32."""

    def run(engine: Any) -> Run:
        def switch(step: int) -> None:
            for module in engine.module.modules():
                if isinstance(module, AtTimes):
                    module.is_on = step % 2 == 1

        return train(engine, batches(4), switch)

    with engine_of(layers_at_times(), None, optimizer=SMALL_STEPS) as engine:
        exact = run(engine)
    stock, ours = both(run, layers_at_times, optimizer=SMALL_STEPS, **BF16_ZERO1)
    return differences(ours, exact), differences(stock, exact)


def job_offloaded() -> dict[str, float]:
    stock, ours = both(lambda engine: train(engine, batches(2)), fp32_layers, **OFFLOAD)
    return differences(ours, stock)


def job_two_models() -> tuple[dict[str, float], list[float], list[float]]:
    """Train a policy beside a reference model that is evaluated in turns; return the losses of the reference too."""
    data, seen = batches(2), []
    with engine_of(gpt_layers(), None) as engine:
        alone = train(engine, data)
        fresh: list[float] = []
    with engine_of(gpt_layers(seed=7), None) as engine:
        fresh = [float(engine.eval_batch(iter(batch))) for batch in data]
    with engine_of(gpt_layers(), section()) as policy, engine_of(gpt_layers(seed=7), section(slices=2)) as reference:

        def evaluate(step: int) -> None:
            seen.append(float(reference.eval_batch(iter(data[step]))))

        return differences(train(policy, data, evaluate), alone), seen, fresh


class TestCombinations:
    def test_optimizer_states_on_the_host(self) -> None:
        errors = rank_pool(2).run(job_offloaded)
        assert violations(errors, limit=1e-5) == {}

    def test_parameters_that_a_step_does_not_use(self) -> None:
        for ours, stock in rank_pool(2).run(job_at_times):
            # both round to bf16, in another order: neither may be further from fp32 than the other by a half
            assert {name: (error, stock[name]) for name, error in ours.items() if error > 1.5 * stock[name]} == {}

    def test_a_policy_and_its_reference(self) -> None:
        for errors, seen, fresh in rank_pool(2).run(job_two_models):
            assert violations([errors], limit=EXACT) == {}
            assert max(abs(ours - stock) / stock for ours, stock in zip(seen, fresh, strict=True)) <= FP32_SCALAR
