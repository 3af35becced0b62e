"""How the engine puts together what the slices of a micro-batch gave, and the faults of DeepSpeed it mends."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from terapipe_ds.attention import SliceStore
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.in_flight import MicroBatchInFlight
from terapipe_ds.runtime.batch.loss_weights import weighted_loss
from terapipe_ds.runtime.engine.batch_results import BatchResults, accumulated, joined, sum_of_slices
from terapipe_ds.runtime.engine.deepspeed_faults import count_nothing_as_zero, missing_loss_scale
from terapipe_ds.runtime.verify.tokens import Slicing

PLAN = SlicePlan((4, 2, 1))
WEIGHTS = (0.5, 0.0, 0.25)


@pytest.mark.parametrize("has_labels", [(True, True), (True, False), (False, False)])
def test_replicas_reduce_losses_of_one_dtype(has_labels: tuple[bool, bool]) -> None:
    """A slice without labels counts as a zero in fp32, one with labels has the dtype of `loss_fn`."""
    logits = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    losses = [weighted_loss(logits, None, 0.5 * has, lambda logits, _: logits.mean()) for has in has_labels]
    total = sum_of_slices(losses)
    assert (total.dtype, total.requires_grad) == (torch.float32, False)
    expected = 0.5 * logits.detach().mean().float() * sum(has_labels)
    torch.testing.assert_close(total, expected, rtol=2**-8, atol=0.0)


def test_a_slice_without_labels_changes_none_of_several_losses() -> None:
    two = [torch.tensor(1.0), torch.tensor(3.0)]
    assert sum_of_slices([torch.tensor(0.0), two, two]) == [2.0, 6.0] == sum_of_slices([two, torch.tensor(0.0), two])


def results_of(
    weights: tuple[float, ...], loss_fn: Any, training: bool = True, sums_outputs: bool = False, outputs: Any = None
) -> BatchResults:
    """One micro-batch whose slices all ran."""
    labels = SliceableTensors.of_labels(torch.tensor([[1, 2, 3, 4, 0, 0, 0]]), 1)
    module = SimpleNamespace(loss_fn=loss_fn, get_additional_losses=lambda: None)
    engine: Any = SimpleNamespace(module=module, eval_return_logits=False, _compute_loss=True, fwd_outputs=[])
    results, store = BatchResults(engine, 1, SequenceRanks(), sums_outputs), SliceStore()
    shape: Any = SimpleNamespace(rows=1)
    micro_batch = MicroBatchInFlight(PLAN, shape, None, labels, weights, weights)
    results.begin(SimpleNamespace(micro_batches=[micro_batch], training=training))  # type: ignore[arg-type]
    for slice_id in range(PLAN.num_slices):
        given = torch.randn(1, PLAN.lengths[slice_id], 5) if outputs is None else outputs
        results.add(Slicing(PLAN, weights, store=store).active(slice_id), given)
    return results


def without_zeros(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


@pytest.mark.parametrize("kind", [FP16_Optimizer, FP16_UnfusedOptimizer])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_set_by_a_program", [False, True])
def test_the_loss_scale_is_that_of_the_optimizers_own_backward(
    kind: Any, dtype: torch.dtype, is_set_by_a_program: bool
) -> None:
    optimizer, weight = object.__new__(kind), torch.ones((), requires_grad=True)
    optimizer.loss_scale_config = LossScaleConfig(dtype, False, 64.0, None)
    optimizer.custom_loss_scaler, optimizer.external_loss_scale = is_set_by_a_program, 8.0
    optimizer.backward(3.0 * weight)
    assert weight.grad is not None and weight.grad.item() == 3.0 * missing_loss_scale(optimizer)


class TestLossesOfNaN:
    def test_the_first_slice_that_counts_is_named(self) -> None:
        said = results_of((0.5, 0.25, 0.25), without_zeros).loss_of_nan()
        assert said is not None and "micro-batch 0, slice 1 (tokens [4, 6) of 7) is NaN" in said.problem
        assert "set ignore_index to the label" in said.problem

    def test_finite_outputs_show_that_the_loss_function_made_it(self) -> None:
        def said(loss_fn: Any, *values: float, sums_outputs: bool = True) -> bool:
            outputs = torch.tensor(values, dtype=torch.float16).expand(1, 3, 2)
            nan = results_of((0.5, 0.25, 0.25), loss_fn, True, sums_outputs, outputs).loss_of_nan()
            assert nan is not None and ("outputs of the last layer are finite" in nan.problem) == nan.is_of_loss_fn
            return nan.is_of_loss_fn

        assert said(lambda logits, _: logits.sum() * math.nan, 65504.0, 65504.0), "a sum in fp16 would be infinite"
        assert not said(lambda logits, _: logits.sum() * math.nan, 65504.0, 1.0, sums_outputs=False)
        assert not said(lambda logits, _: logits.sum(), math.inf, -math.inf)
        assert not said(lambda logits, _: logits.sum(), 1.0, math.nan)

    def test_slices_that_do_not_count_and_evaluation_have_none(self) -> None:
        assert results_of((1.0, 0.0, 0.0), without_zeros).loss_of_nan() is None
        assert results_of((0.5, 0.25, 0.25), without_zeros, training=False).loss_of_nan() is None
        assert results_of((0.5, 0.25, 0.25), lambda logits, _: logits.sum() * math.inf).loss_of_nan() is None


class TestJoined:
    @pytest.mark.parametrize(("shape", "dim"), [((2, 7, 5), 1), ((7, 2, 5), 0), ((2, 3, 7), 2)])
    def test_along_the_dimension_of_the_tokens(self, shape: tuple[int, ...], dim: int) -> None:
        whole = torch.randn(shape)
        assert torch.equal(joined(list(whole.split(PLAN.lengths, dim)), PLAN, WEIGHTS, 2, 1), whole)

    @pytest.mark.parametrize(("shape", "dim"), [((2, 4, 3), 1), ((4, 2, 3), 0)])
    def test_the_sequence_dimension_comes_first(self, shape: tuple[int, ...], dim: int) -> None:
        """Rows that are as many as the tokens of every slice do not deceive it."""
        whole = torch.randn(shape)
        assert torch.equal(joined(list(whole.split(2, dim)), SlicePlan((2, 2)), (1.0, 1.0), 2, dim), whole)

    @pytest.mark.parametrize("lengths", [(4, 2, 1), (2, 2, 2)])
    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_rows_and_tokens_in_one_dimension(self, lengths: tuple[int, ...], rows: int) -> None:
        """As the last layer gives them that ends with `logits.flatten(0, 1)`."""
        plan = SlicePlan(lengths)
        whole = torch.randn(rows, plan.sequence_length, 5)
        flat = [part.flatten(0, 1) for part in whole.split(list(lengths), dim=1)]
        assert torch.equal(joined(flat, plan, (1.0,) * len(lengths), rows, 1), whole.flatten(0, 1))

    def test_tuples_part_by_part(self) -> None:
        logits, mask = torch.randn(2, 7, 5), torch.ones(2, 1, 1, 3)
        losses = [torch.tensor(value) for value in (1.0, float("nan"), 1.0)]  # the second one weighs nothing
        outputs = [(part, mask, loss) for part, loss in zip(logits.split(PLAN.lengths, 1), losses, strict=True)]
        whole = joined(outputs, PLAN, WEIGHTS, 2, 1)
        assert torch.equal(whole[0], logits)
        assert whole[1] is mask
        assert float(whole[2]) == 0.75


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_losses_are_accumulated_wide_and_without_a_graph(dtype: torch.dtype, wide: torch.dtype) -> None:
    total: Any = None
    for _ in range(300):
        total = accumulated(total, torch.ones((), dtype=dtype, requires_grad=True) * 1)
    assert float(total) == 300.0, "bf16 would stop at 256"
    assert total.dtype == wide and not total.requires_grad


def test_a_rank_whose_gradients_do_not_count_has_a_norm_of_zero() -> None:
    optimizer = BF16_Optimizer.__new__(BF16_Optimizer)
    counted: list[torch.Tensor] = []
    optimizer.get_grads_for_norm = lambda for_clipping=False: counted if for_clipping else (counted, {})
    count_nothing_as_zero(optimizer)
    (zero,), experts = optimizer.get_grads_for_norm()
    assert float(zero.norm()) == 0.0 and experts == {}
    assert optimizer.get_grads_for_norm(for_clipping=True) == []
    counted.append(torch.ones(3))
    assert optimizer.get_grads_for_norm()[0] is counted
