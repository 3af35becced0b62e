"""Every fault is found and named; healthy models pass; nothing is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.slice_store import SliceEntry, SliceStore
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.loss import slice_weights
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.check import compare_parameters
from terapipe_ds.runtime.verify.compare import Tolerance
from terapipe_ds.runtime.verify.layout import Same, TokenDim
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.report import Report, Told
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner, Values
from terapipe_ds.runtime.verify.stage import Inputs, StageFindings, check_loss, check_stage, look_at_loss
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
    autocast: Callable[[], Any] = nullcontext,
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
        stage = check_stage(Runner(module, plan, autocast=autocast), named, Inputs(inputs, layouts), weights)
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
    options = {k: changes.pop(k) for k in ("labels", "reduction", "checkpoint", "plan", "autocast") if k in changes}
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


def test_autocast_hides_them_and_fp32_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    healthy = verify_gpt("float32", autocast=autocast)
    assert healthy.findings == [] and healthy.in_fp32_too == healthy.num_layers == 5
    monkeypatch.setattr(gpt, "_first_position", lambda: 0)
    found = verify_gpt("float32", init_std=0.02, autocast=autocast).findings[0]
    assert str(found).startswith("layer 1 (DecoderLayer): ") and "(seen in fp32" in str(found)


class LargestFp64(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float64:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_large_gradients_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_NUMBERS", 1000)
    a, b = torch.randn(70, 90), torch.randn(70, 90)
    with LargestFp64() as saw:
        found, differs = compare.difference(a, b), compare_parameters({"w": a}, {"w": b}, Tolerance(1e-3, 0.1))
    assert saw.numbers == 1000
    apart, norm = (a.double() - b.double()), b.double().norm()
    assert found.largest == float(apart.abs().max()) and differs is not None
    assert found.relative == pytest.approx(float(apart.norm() / norm), rel=1e-12) == differs.apart.relative
    infinite = b.clone()
    infinite[60, 3] = -torch.inf
    assert compare.difference(infinite, b).relative == compare.difference(b, infinite).relative == torch.inf
    assert compare.difference(infinite, infinite).relative == compare.difference(b, b).relative == 0.0


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


class Counted(nn.Module):
    """Positions that nobody can shift from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([float(i) for i in range(x.size(1))])[:, None]


def test_nothing_is_advised_without_evidence() -> None:
    [finding] = verify([Counted()]).findings
    assert finding.cause == "it treats each token alone, but not as in the whole sequence"


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


def look(outputs: Values, loss_fn: Any, reduction: str = "mean", guessed: bool = False) -> StageFindings:
    """At the loss of outputs [rows, tokens, numbers] and numbers of the whole."""
    labels = SliceableTensors.of_labels(data()[1], 1)
    weights = slice_weights(labels, PLAN, loss_reduction=reduction, ignore_index=-100)
    layouts = [TokenDim(1) if t.dim() else Same() for t in outputs.tensors]
    stage = StageFindings(outputs=Inputs(outputs, layouts))

    def check(last: Inputs) -> LossCheck:
        return LossCheck(loss_fn, labels, PLAN, last.values, last.layouts, weights, reduction, -100)

    if guessed:
        look_at_loss(stage, check, 0, [layouts])
    else:
        check_loss(stage, check, 0)
    return stage


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, LENGTH, VOCAB] around zero."""
    x = torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (x - x.mean()).to(dtype)


class ByLength:
    """A sum over tokens by the length of the sequence, for which it asks in its forward and its backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str]] = []

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs.register_hook(self.see)
        return outputs.square().sum() / self.see(outputs)

    def see(self, _: Tensor) -> Any:
        active = active_slice()
        assert active is not None
        self.seen.append((active.start, active.stop, active.mode))
        return active.sequence_length if active.mode == "train" else None


def test_a_loss_runs_while_its_slice_is_active() -> None:
    loss_fn = ByLength()
    stage = look(Values((numbers(),), False), loss_fn, "sum")
    assert (stage.findings, stage.num_losses) == ([], 1)
    forwards = [(*PLAN.span(i), "train") for i in range(PLAN.num_slices)]
    backwards = [(*PLAN.span(i), "recompute") for i in reversed(range(PLAN.num_slices))]
    assert loss_fn.seen == [(0, LENGTH, "train"), (0, LENGTH, "recompute"), *forwards, *backwards]


def test_no_memory_for_the_loss_is_said() -> None:
    def too_large(outputs: Any, labels: Any) -> Tensor:
        raise torch.OutOfMemoryError

    stage = look(Values((numbers(),), False), too_large)
    assert (stage.findings, stage.error, stage.num_losses) == ([], None, 0)
    assert stage.notes == ["the loss was not compared: there is not enough memory beside what training needs"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_a_wrong_loss_and_fp32_shows_it(dtype: torch.dtype) -> None:
    def by_length(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.float().square().mean() * (1 + 0.01 / outputs.shape[1])

    [finding] = look(Values((numbers(dtype),), False), by_length).findings
    assert finding.problem.startswith("the loss, on outputs in fp32, differs by")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_for_half_precision_only(dtype: torch.dtype) -> None:
    def half_only(outputs: Tensor, labels: Tensor) -> Tensor:
        assert outputs.dtype == dtype
        return outputs.square().mean()

    def back_to_half(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.to(dtype).square().mean()

    for loss_fn in (half_only, back_to_half):
        stage = look(Values((numbers(dtype),), False), loss_fn)
        assert (stage.findings, stage.notes, stage.num_losses) == ([], [], 1)


@pytest.mark.parametrize(("size", "differs"), [(1e-2, True), (1e-5, False)])
def test_a_loss_is_measured_by_its_own_size_unless_its_terms_cancel_out(size: float, differs: bool) -> None:
    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.mean() + (size if outputs.shape[1] == LENGTH else size + 4e-5)

    assert bool(look(Values((numbers(),), False), loss_fn).findings) == differs


def test_an_output_without_tokens_where_layouts_are_guessed() -> None:
    def with_auxiliary(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return outputs[0].square().sum() + outputs[1]

    outputs = Values((numbers(), torch.ones(())), True)
    stage = look(outputs, with_auxiliary, "sum", guessed=True)
    assert (stage.findings, stage.num_losses) == ([], 0)
    assert stage.notes == ["the loss was not compared: output 1 of the last layer has no tokens"]
    assert look(outputs, with_auxiliary, "sum").findings  # layers that were compared tell what it is
    assert look(outputs, lambda out, labels: out[0].square().sum(), "sum", guessed=True).num_losses == 1


def test_a_loss_that_is_not_finite_waits() -> None:
    stage = look(Values((numbers(),), False), lambda out, labels: out.sum() * float("inf"))
    assert (stage.findings, stage.num_losses, stage.loss_waits) == ([], 0, True)
    reports = [Report.of([Told.of(one, None) for one in (stage, other)]) for other in (stage, StageFindings())]
    assert all(report.loss_waits for report in reports)
    assert not Report.of([Told.of(one, None) for one in (stage, StageFindings(num_losses=1))]).loss_waits


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
