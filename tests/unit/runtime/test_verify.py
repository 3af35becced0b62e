"""Every fault is found and named; healthy models pass; nothing is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.attention.slice_store import SliceEntry, SliceStore
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.loss import slice_weights
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify.layout import Same, TokenDim
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner, Values
from terapipe_ds.runtime.verify.stage import Inputs, StageFindings, check_loss, check_stage
from tests.distributed import faulty_layers
from tests.distributed.faulty_layers import LAYERS, WIDTH
from tests.distributed.mutations import MUTATIONS

PLAN = SlicePlan((8, 5, 7))
GPT3 = {"positions": "learned", "bias": True, "gated_mlp": False}
LENGTH, VOCAB = PLAN.sequence_length, 19


def data(masked: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    if masked:
        labels[0, :10] = -100
    return text[:, :-1].contiguous(), labels


def verify(
    layers: Sequence[Any], inputs: Values | None = None, plan: SlicePlan = PLAN, loss_fn: Any = None,
    labels: Tensor | None = None, reduction: str = "mean_valid", checkpoint: Callable[..., Any] | None = None,
) -> StageFindings:  # fmt: skip
    module = nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)])
    if inputs is None:
        hidden = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        dtype = next(iter(module.parameters()), hidden).dtype
        inputs = Values((hidden.to(dtype).requires_grad_(),), False)
    tokens = SliceableTensors.of_labels(data()[1] if labels is None else labels, 1)
    weights = slice_weights(tokens, plan, loss_reduction=reduction, ignore_index=-100)
    layouts = [TokenDim(1) if t.dim() > 1 and t.size(1) == LENGTH else Same() for t in inputs.tensors]
    with untouched(module):
        named = [(NamedLayer(i, layer), checkpoint) for i, layer in enumerate(layers)]
        stage = check_stage(Runner(module, plan), named, Inputs(inputs, layouts), weights)
        if loss_fn is not None:
            check_loss(
                stage,
                lambda last: LossCheck(
                    loss_fn, tokens, plan, last.values, last.layouts, weights, reduction, -100
                ),
                len(layers),
            )
    return stage


def gpt_model(dtype: str = "float64", **changes: Any) -> list[nn.Module]:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24,
        "init_std": 0.3, "dtype": dtype, "max_sequence_length": 64, **changes,
    }  # fmt: skip
    return [spec.build() for spec in gpt.gpt_layers(gpt.GPTConfig(**fields))]


def verify_gpt(dtype: str = "float64", loss_fn: Any = gpt.gpt_loss, **changes: Any) -> StageFindings:
    options = {k: changes.pop(k) for k in ("labels", "reduction", "checkpoint", "plan") if k in changes}
    return verify(gpt_model(dtype, **changes), Values((data()[0],), False), loss_fn=loss_fn, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", LAYERS, ids=lambda f: f.__name__)
def test_a_fault_is_found_and_named(fault: type[nn.Module], dtype: torch.dtype) -> None:
    what, cause = LAYERS[fault]
    healthy = faulty_layers.Base(0)
    stage = verify([healthy.to(dtype), fault().to(dtype), faulty_layers.Base(1).to(dtype)])
    assert stage.findings, "nothing was found"
    text = str(stage.findings[0])
    assert text.startswith(f"layer 1 ({fault.__name__}): {what}"), text
    assert cause in text, text


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("init_std", [0.02, 0.3])
@pytest.mark.parametrize("changes", [{}, GPT3], ids=["llama", "gpt3"])
def test_healthy_models_pass(dtype: str, init_std: float, changes: dict[str, Any]) -> None:
    stage = verify_gpt(dtype, init_std=init_std, **changes)
    assert stage.findings == [] and stage.notes == [], stage
    assert stage.num_layers == (6 if changes else 5)
    assert stage.in_fp32_too == (stage.num_layers if dtype in ("bfloat16", "float16") else 0)


def test_half_precision_hides_wrong_positions_and_fp32_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small initial weights a layer adds little to its input: in bf16 less than the input's rounding."""
    monkeypatch.setattr(gpt, "_first_position", lambda: 0)
    stage = verify_gpt("bfloat16", init_std=0.02)
    assert str(stage.findings[0]).startswith("layer 1 (DecoderLayer): ")
    assert "positions are computed from the slice's own length" in str(stage.findings[0])


def test_learned_positions_from_the_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "_first_position", lambda: 0)
    stage = verify_gpt("float32", **GPT3)
    assert str(stage.findings[0]).startswith("layer 1 (PositionEmbedding): output of tokens 8.. differs by ")
    assert "positions are computed from the slice's own length" in str(stage.findings[0])
    assert len(stage.findings) == 1  # the others get the inputs of the whole run


def _checkpoint(function: Any, *inputs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


def test_a_fault_of_the_second_forward_under_checkpointing() -> None:
    layer = faulty_layers.RecomputeAppends().double()
    assert verify([layer]).findings == []
    [finding] = verify([layer], checkpoint=_checkpoint).findings
    assert finding.problem.startswith("input gradient") or finding.problem.startswith("gradient of")
    assert "it agrees without activation checkpointing" in finding.cause


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_doubled_gradients_of_keys_and_values(factor: float) -> None:
    layer = faulty_layers.WrongOwnBackward().double()
    layer.factor = factor
    [finding] = verify([layer]).findings
    assert finding.problem.startswith("input gradient of tokens 0..")
    assert "autograd.Function" in finding.cause


@pytest.mark.parametrize("checkpoint", [None, _checkpoint, checkpoint_with_gradients(_checkpoint)])
def test_healthy_with_checkpointing_and_dropout(checkpoint: Any) -> None:
    stage = verify_gpt("float32", dropout=0.3, checkpoint=checkpoint)
    assert stage.findings == [] and stage.notes == [] and stage.without_dropout == 3


class AlwaysNoisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_a_layer_that_cannot_be_compared_is_said() -> None:
    stage = verify([faulty_layers.Base(0), AlwaysNoisy(), faulty_layers.Bidirectional()])
    assert stage.notes == [
        "layer 1 (AlwaysNoisy): not checked: it draws random numbers in evaluation mode as well, other ones for slices "
        "than for a whole sequence"
    ]
    assert [f.layer_id for f in stage.findings] == [2]


class TooLarge(faulty_layers.Base):
    """Fits without its graph only."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return super().forward(x)


def test_a_layer_that_does_not_fit_is_said_and_passed_over() -> None:
    stage = verify([faulty_layers.Base(0), TooLarge(1), faulty_layers.Bidirectional()])
    assert stage.notes == ["layer 1 (TooLarge): not checked: there is not enough memory beside what training needs"]
    assert [f.layer_id for f in stage.findings] == [2] and stage.error is None


RECURRENCES = [faulty_layers.HandRecurrence, faulty_layers.HandShift]


@pytest.mark.parametrize("fault", RECURRENCES, ids=lambda f: f.__name__)
def test_a_recurrence_by_hand_is_not_told_positions_alone(fault: type[nn.Module]) -> None:
    [finding] = verify([fault().double()]).findings
    assert "such a layer cannot be sliced" in finding.cause, finding
    assert "positions" not in finding.cause or "a shift or a recurrence over tokens" in finding.cause


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_what_the_guard_refuses_is_refused_still() -> None:
    layer = faulty_layers.Base()
    layer.attend = _plain  # type: ignore[method-assign]
    stage = verify([faulty_layers.Base(0), layer, faulty_layers.Base(2)])
    assert type(stage.error).__name__ == "PlainAttentionError" and stage.outputs is None
    assert str(stage.findings[0]).startswith("layer 1 (Base): raised PlainAttentionError: plain attention was called")


def test_two_layers_with_one_name_for_keys_and_values() -> None:
    module = nn.Sequential(faulty_layers.Base(3), faulty_layers.Base(3))
    stage = verify([module])
    assert "share the name 3" in str(stage.findings[0])


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "labels", "cause"),
    [
        (faulty_layers.shifting_loss, "mean", "inputs", "loss_fn shifts the labels itself"),
        (faulty_layers.mean_loss, "mean_valid", "masked", 'set terapipe.loss_reduction to "mean"'),
        (gpt.gpt_loss, "mean", "masked", 'set terapipe.loss_reduction to "mean_valid"'),
        (gpt.gpt_loss, "sum", "masked", 'set terapipe.loss_reduction to "mean_valid"'),
        (faulty_layers.root_loss, "mean_valid", "masked", "slice_weight(labels)"),
    ],
)
def test_losses(loss_fn: Any, reduction: str, labels: str, cause: str) -> None:
    given = data()[0] if labels == "inputs" else data()[1]
    stage = verify_gpt("float64", loss_fn, labels=given, reduction=reduction)
    assert [f.layer for f in stage.findings] == ["loss_fn"]
    assert cause in stage.findings[0].cause
    if labels == "inputs":
        assert "2 tokens at slice boundaries are lost (tokens 7, 12)" in stage.findings[0].cause


@pytest.mark.parametrize(
    ("loss_fn", "reduction"), [(faulty_layers.mean_loss, "mean"), (gpt.gpt_loss, "mean_valid")]
)
def test_right_losses_pass(loss_fn: Any, reduction: str) -> None:
    assert verify_gpt("float32", loss_fn, reduction=reduction).findings == []


MUTATED = {  # faults of the engine's own parts that act inside layers
    "missing_position_offset": "positions are computed from the slice's own length",
    "dropped_kv_gradient": "the gradient that later slices give to earlier tokens is lost",
}


@pytest.mark.parametrize("mutation", MUTATED)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_mutations_of_layers_are_caught(mutation: str, dtype: str) -> None:
    with MUTATIONS[mutation]():
        stage = verify_gpt(dtype)
    assert str(stage.findings[0]).startswith("layer 1 (DecoderLayer): ")
    assert MUTATED[mutation] in stage.findings[0].cause


def _stale_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the prefix are those of another batch."""
    keys_values = SliceEntry.keys_values
    monkeypatch.setattr(SliceEntry, "keys_values", lambda self, start, stop: tuple(
        torch.cat([0.5 * t[:, :, : stop // 2], t[:, :, stop // 2 :]], 2) for t in keys_values(self, start, stop)
    ))  # fmt: skip


def _span_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves the oldest token out."""
    keys_values = SliceEntry.keys_values
    monkeypatch.setattr(SliceEntry, "keys_values", lambda self, start, stop: tuple(
        torch.cat([t[:, :, 1:2], t[:, :, 1:]], 2) for t in keys_values(self, start, stop)
    ))  # fmt: skip


def _doubled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """dK and dV of a slice are handed back twice as large."""
    end_backward = SliceStore.end_backward
    monkeypatch.setattr(SliceStore, "end_backward", lambda self, *span: tuple(2 * g for g in end_backward(self, *span)))


@pytest.mark.parametrize("fault", [_stale_prefix, _span_off_by_one, _doubled_gradient])
def test_faults_of_the_slice_store_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    stage = verify_gpt("float32")
    assert [f.layer_id for f in stage.findings] == [1, 2]  # both decoder layers, and no other
