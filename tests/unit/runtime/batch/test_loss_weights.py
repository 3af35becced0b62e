"""Losses of slices add up to the loss of the whole; slices without a label count nothing, and never give NaN."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.loss_weights import (
    LossKindError,
    SliceLossError,
    exact_zero,
    require_graph,
    weighted_loss,
    weights_of,
)

VOCAB_SIZE = 5
LABELS = torch.tensor([[1, -100, -100, 2, -100, 3], [-100, -100, -100, 0, 1, 2]])
PLAN = SlicePlan((1, 2, 3))


def weigh(labels: Any, plan: SlicePlan = PLAN, loss_fn: Any = None, **options: Any) -> tuple[float, ...]:
    return weights_of(SliceableTensors.of_labels(labels, 1), plan, TeraPipeConfig(**options), loss_fn)


class TestSliceWeights:
    def test_another_ignore_index(self) -> None:
        assert weigh(LABELS, ignore_index=2) == pytest.approx((2 / 10, 4 / 10, 4 / 10))
        for dtype in (torch.uint8, torch.uint16):  # in few bits -100 is a label like others
            assert weigh(LABELS.to(dtype)) == pytest.approx(PLAN.shares)

    def test_the_loss_function_has_the_last_word(self) -> None:
        seen = []

        def slice_weight(labels: Any) -> Tensor:
            seen.append(labels)
            return labels[1].sum()

        given_weights = torch.tensor([[1.0, 0, 0, 2, 0, 3]] * 2)
        loss_fn = SimpleNamespace(slice_weight=slice_weight)
        found = weigh((LABELS, given_weights), loss_fn=loss_fn, loss_reduction="sum")
        assert found == pytest.approx((1 / 6, 0.0, 5 / 6))
        assert [tuple(labels.shape) for labels, _ in seen] == [(2, 1), (2, 2), (2, 3)]
        assert all(labels.is_contiguous() for labels, _ in seen)

    @pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0])
    def test_a_weight_that_is_none_is_refused(self, weight: float) -> None:
        """NaN would be in every parameter after the step; two weights below 0 would hide in their sum."""
        weights = iter((1.0, weight, weight))
        with pytest.raises(SliceLossError, match=rf"gives {weight:g} for slice 1 \(tokens \[1, 3\]\).* finite"):
            weigh(LABELS, loss_fn=SimpleNamespace(slice_weight=lambda labels: torch.tensor(next(weights))))

    def test_no_label_at_all(self) -> None:
        assert weigh(torch.full_like(LABELS, -100)) == (0.0, 0.0, 0.0)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_valid": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "mean": lambda logits, labels: (logits.sum(-1) - labels).square().mean(),
    "sum": lambda logits, labels: (logits.sum(-1) - labels).square().sum(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_share_of_a_loss_in_half_precision_is_not_rounded_again(dtype: torch.dtype) -> None:
    loss = torch.tensor(4.1875, dtype=dtype, requires_grad=True)
    share = weighted_loss(loss, None, 1 / 3, None)
    assert share.item() == pytest.approx(4.1875 / 3, rel=1e-6)
    share.backward()
    assert loss.grad == torch.tensor(1 / 3, dtype=dtype)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    masked=st.floats(0.0, 1.0),
    seed=st.integers(0, 10**6),
    reduction=st.sampled_from(sorted(LOSSES)),
)
def test_losses_and_gradients_add_up(lengths: list[int], rows: int, masked: float, seed: int, reduction: str) -> None:
    """Whatever is masked, also whole slices; gradients of what has no label are exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    plan = SlicePlan(tuple(lengths))
    logits = torch.randn(rows, sum(lengths), VOCAB_SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB_SIZE, (rows, sum(lengths)), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < masked] = -100
    whole, sliced = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    weights = weigh(labels, plan, loss_reduction=reduction)
    parts = [
        weighted_loss(sliced[:, start:stop], labels[:, start:stop], weight, LOSSES[reduction])
        for weight, (start, stop) in zip(weights, plan.spans(), strict=True)
    ]
    found = torch.stack(parts).sum()
    found.backward()
    if reduction == "mean_valid" and (labels == -100).all():
        assert float(found.detach()) == 0.0 and sliced.grad is not None
        assert float(sliced.grad.abs().max()) == 0.0
        return
    expected = LOSSES[reduction](whole, labels)
    expected.backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sliced.grad, whole.grad, rtol=1e-12, atol=1e-12)


class TestWeightedLoss:
    def test_a_slice_without_weight_is_not_computed(self) -> None:
        logits = torch.full((1, 2, 3), float("nan"), requires_grad=True)
        loss = weighted_loss(logits, torch.full((1, 2), -100), 0.0, pytest.fail)
        loss.backward()
        assert float(loss.detach()) == 0.0 and logits.grad is not None
        assert torch.equal(logits.grad, torch.zeros(1, 2, 3)), "0 * NaN would be NaN"

    def test_the_loss_that_the_model_returns_cannot_be_left_out(self) -> None:
        with pytest.raises(SliceLossError, match="Give PipelineModule a loss_fn"):
            weighted_loss(torch.tensor(float("nan")), None, 0.0, None)

    def test_a_loss_needs_a_graph_if_outputs_wait_for_gradients(self) -> None:
        logits, nested = torch.ones(2, requires_grad=True), {"logits": torch.ones(2, requires_grad=True)}
        require_graph(logits.sum(), object(), None)  # whatever the outputs are
        require_graph(torch.ones(()), (torch.ones(2),), None)
        for outputs in (logits, (None, logits), nested):
            with pytest.raises(LossKindError, match="without a graph"):
                require_graph(torch.ones(()), outputs, None)

    @pytest.mark.parametrize(("loss", "told"), [
        (torch.ones(2, 3), r"returned shape \[2, 3\], .* a scalar tensor: reduce it in loss_fn"),
        ({"loss": torch.ones(())}, r'returned a dict with loss, .* a scalar tensor: .*, such as result\["loss"\]'),
        (None, "returned a NoneType, but"), (3, "returned a int, but"), (np.float64(3), "returned a float64, but"),
    ])  # fmt: skip
    def test_a_loss_that_is_no_scalar_tensor(self, loss: Any, told: str) -> None:
        with pytest.raises(SliceLossError, match=told):
            weighted_loss(None, None, 0.5, lambda outputs, labels: loss)

    def test_only_an_evaluation_may_have_several_losses(self) -> None:
        """The stock engine has no backward for them, and returns them from an evaluation."""

        def two_losses(outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
            return torch.tensor(2.0), torch.tensor(6.0)

        assert weighted_loss(None, None, 0.5, two_losses, takes_several=True) == [torch.tensor(1.0), torch.tensor(3.0)]
        with pytest.raises(SliceLossError, match=r"two_losses\) returned a tuple of 2, but .*, such as result\[0\]"):
            weighted_loss(None, None, 0.5, two_losses)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_every_output_that_can_gets_a_gradient_of_zeros(dtype: torch.dtype, wide: torch.dtype) -> None:
    logits, scale = torch.ones(2, 3, dtype=dtype, requires_grad=True), torch.ones(1, requires_grad=True)
    zero = exact_zero({"logits": logits * 2, "others": (torch.ones(2, dtype=torch.bool), None, scale * 3)})
    zero.backward()
    assert zero.dtype == wide, "as wide as a loss"
    assert torch.equal(logits.grad, torch.zeros(2, 3, dtype=dtype))  # type: ignore[arg-type]
    assert torch.equal(scale.grad, torch.zeros(1))  # type: ignore[arg-type]
