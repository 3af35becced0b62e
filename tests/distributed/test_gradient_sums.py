"""Test that gradients go to the fp32 sums of `BF16_Optimizer` at once: how many numbers are added, by which code."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from terapipe_ds.runtime.layers.gradient_sums import GradientSums
from terapipe_ds.runtime.profiling import profiles
from tests.distributed.engines import ZERO1, batches, build, gpt_layers, section
from tests.distributed.harness import rank_pool

BF16: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **ZERO1}


def _counted(slices: int, schedule: str, immediate: bool) -> dict[str, float]:
    """Train a batch of two micro-batches; return numbers added per parameter and micro-batch, by who adds them."""
    settings = {**BF16, "bf16": {"enabled": True, "immediate_grad_update": immediate}}
    engine = build(gpt_layers("bfloat16", bias=True), section(slices=slices, schedule=schedule), stages=1, **settings)
    (batch,) = batches(1, length=32)
    engine.train_batch(iter(batch))  # the check of the first batch is over
    numbers: collections.Counter[str] = collections.Counter()
    real_add, real_collect, real_update = GradientSums.add, GradientSums.collect, BF16_Optimizer._update_hp_grad

    def add(self: Any, weight: Any, rows: Any, inputs: Any) -> None:
        numbers["products"] += weight.numel()
        real_add(self, weight, rows, inputs)

    def collect(self: Any, clear_lp_grads: bool = False) -> None:
        present = [p for p, _ in self._parameters if p.grad is not None]
        numbers["collected"] += sum(p.numel() for p in present)
        numbers["zeros"] += sum(p.numel() for p in present if not p.grad.any())
        real_collect(self, clear_lp_grads)

    def update(self: Any, parameter: Any, *place: Any, **options: Any) -> None:
        numbers["by DeepSpeed"] += 0 if parameter.grad is None else parameter.numel()
        real_update(self, parameter, *place, **options)

    sums = engine.weight_gradients.sums
    if not immediate:  # the optimizer has a reference to the unpatched method
        engine.optimizer.update_hp_grads = lambda clear_lp_grads=False: collect(sums)
    replaced = mock.patch.object(GradientSums, "add", add), mock.patch.object(BF16_Optimizer, "_update_hp_grad", update)
    with replaced[0], replaced[1]:
        engine.train_batch(iter(batch))
    linear = sum(layer.weight.numel() for layer in engine.module.modules() if type(layer) is nn.Linear)
    others = sum(p.numel() for p in engine.module.parameters()) - linear
    return {
        "products": numbers["products"] / linear / 2,
        "collected": numbers["collected"] / others / 2,
        "zeros": numbers["zeros"] / linear / 2,
        "by DeepSpeed": numbers["by DeepSpeed"] / others / 2,
    }


class TestNumbersAdded:
    @pytest.mark.parametrize("schedule", ["seq1f1b", "seq1f1b-zb"])
    @pytest.mark.parametrize("slices", [1, 4])
    def test_each_slice_adds_each_weight_once(self, slices: int, schedule: str) -> None:
        """DeepSpeed's own way adds weights that W owns twice with split backwards: zeros in B, gradients in W."""
        (found,) = rank_pool(1).run(_counted, slices=slices, schedule=schedule, immediate=False)
        assert found == {"products": slices, "collected": slices, "zeros": 0.0, "by DeepSpeed": 0.0}

    def test_hooks_of_immediate_updates_see_the_other_gradients_only(self) -> None:
        (found,) = rank_pool(1).run(_counted, slices=4, schedule="seq1f1b", immediate=True)
        assert found == {"products": 4.0, "collected": 0.0, "zeros": 0.0, "by DeepSpeed": 4.0}


def _measured() -> tuple[list[bool], list[bool]]:
    """Return for each measurement of slices whether the sums are zero after it, and for each product if it is one."""
    engine = build(gpt_layers("bfloat16"), section(slices="auto"), stages=1, **BF16)
    in_measurement: list[bool] = []
    clean: list[bool] = []
    real_add, real_measure = GradientSums.add, profiles.measure_parts

    def add(self: Any, *args: Any) -> None:
        in_measurement.append(bool(self._lent))
        real_add(self, *args)

    def measure(*args: Any, **options: Any) -> Any:
        found = real_measure(*args, **options)
        clean.append(not any(flat.any() for flat in engine.optimizer.fp32_groups_gradients_flat))
        return found

    with mock.patch.object(GradientSums, "add", add), mock.patch.object(profiles, "measure_parts", measure):
        engine.train_batch(iter(batches(1)[0]))
    return clean, in_measurement


def test_measured_slices_add_to_the_sums_and_leave_them_zero() -> None:
    ((clean, in_measurement),) = rank_pool(1).run(_measured)
    assert clean == [True]
    assert in_measurement[0] and not in_measurement[-1] and in_measurement == sorted(in_measurement, reverse=True)
