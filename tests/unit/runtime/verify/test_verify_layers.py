"""Every fault is found and told; healthy models pass; nothing is touched."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.loss_weights import weights_of
from terapipe_ds.runtime.layers.activation_checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients, accumulate_in_products
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.layer import LayerCheck, _is_updated_per_call
from terapipe_ds.runtime.verify.loss import LossCheck
from terapipe_ds.runtime.verify.named_layer import NamedLayer
from terapipe_ds.runtime.verify.stage import Finding, Findings, StageCheck
from terapipe_ds.runtime.verify.tokens import Activations, Same, Slicing, TokenDim, alone
from tests.small_models import faulty
from tests.small_models.faulty import LAYERS, WIDTH

PLAN = SlicePlan((8, 5, 7))
GPT3 = {"positions": "learned", "bias": True, "gated_mlp": False}
LENGTH, VOCAB = PLAN.sequence_length, 19


def data() -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which the first ten do not count."""
    text = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    labels = text[:, 1:].clone()
    labels[0, :10] = -100
    return text[:, :-1].contiguous(), labels


def verify(
    layers: Sequence[Any], tensors: tuple[Tensor, ...] | None = None, loss_fn: Any = None, labels: Tensor | None = None,
    reduction: str = "mean_valid", checkpoint: Callable[..., Any] | None = None,
    autocast: Callable[[], Any] = nullcontext, with_layers: bool = True, report: Callable[[], Any] = lambda: None,
    splits: bool | None = None, intercept: bool = True, everyone: Sequence[Tensor] = (), is_last: bool = True,
) -> Findings:  # fmt: skip
    module = nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)])
    if tensors is None:
        hidden = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        dtype = next(iter(module.parameters()), hidden).dtype
        tensors = (hidden.to(dtype).requires_grad_(),)
    layouts = tuple(TokenDim(1) if t.dim() > 1 and t.size(1) == LENGTH else Same() for t in tensors)
    tokens = SliceableTensors.of_labels(data()[1] if labels is None else labels, 1)
    config = TeraPipeConfig(enabled=True, loss_reduction=reduction)  # type: ignore[arg-type]
    slicing = Slicing(PLAN, weights_of(tokens, PLAN, config, loss_fn))
    last = SimpleNamespace(loss_fn=loss_fn, forward_funcs=layers)
    of_hidden = LossOfHidden.of(last, WeightGradients())
    weights = accumulate_in_products(module, None) if splits is not None else None
    if weights is not None:
        weights.is_watched = True  # as by DeepSpeed's optimizers
    check = StageCheck(
        module, slicing, Findings(with_layers), autocast, intercept=intercept, of_hidden=of_hidden, weights=weights,
        splits=bool(splits), is_last=is_last,
    )  # fmt: skip
    with untouched(module, with_gradients=False):
        named = [NamedLayer(i, layer, checkpoint) for i, layer in enumerate(layers)]
        outputs = check.check_layers(named, Activations(tensors, tuple if len(tensors) > 1 else alone, layouts))
        if loss_fn is not None and outputs is not None:
            loss = LossCheck(loss_fn, tokens, outputs, slicing, config, report)
            check.check_loss(loss, len(layers), [SliceableTensors.of_labels(each, 1) for each in everyone])
    return check.found


def verify_gpt(dtype: str = "float64", loss_fn: Any = gpt.gpt_loss, **changes: Any) -> Findings:
    names = ("labels", "reduction", "checkpoint", "autocast", "with_layers", "splits")
    options = {name: changes.pop(name) for name in names if name in changes}
    fields = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24, "init_std": 0.3, "dtype": dtype}
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "max_sequence_length": 64}
    config = gpt.GPTConfig(**{**fields, **sizes, **changes})  # type: ignore[arg-type]
    layers = [spec.build() for spec in gpt.gpt_layers(config)]
    return verify(layers, (data()[0],), loss_fn, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", LAYERS, ids=lambda f: f.__name__)
def test_a_fault_is_found_and_told(fault: type[nn.Module], dtype: torch.dtype) -> None:
    what, shows = LAYERS[fault]
    found = verify([faulty.Base(0).to(dtype), fault().to(dtype), faulty.Base(1).to(dtype)])
    text = str(found.findings[0])
    assert text.startswith(f"layer 1 ({fault.__name__}): {what}") and shows in text, text


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("init_std", [0.02, 0.3])
@pytest.mark.parametrize("changes", [{"splits": True}, GPT3], ids=["llama", "gpt3"])
def test_healthy_models_pass(dtype: str, init_std: float, changes: dict[str, Any]) -> None:
    found = verify_gpt(dtype, init_std=init_std, **changes)
    assert (found.findings, found.notes) == ([], [])
    assert (found.num_layers, found.num_losses) == (6 if changes == GPT3 else 5, 1)


class NormInFp32(faulty.Base):
    """As Gemma's: the gradient of its weight is summed in fp32, over other tokens in slices than in the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def update(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight.float())
        return super().update(normed.to(x.dtype))


class FaultyInFp32(NormInFp32):
    """And its slices differ by a little more than rounding in fp32."""

    def update(self, x: Tensor) -> Tensor:
        return super().update(x) * (1.0 + 1e-3 * (x.shape[1] < LENGTH))


class FaultyByLittle(faulty.Base):
    """Its slices differ by as much as rounding in fp32, and it computes nothing in fp32."""

    def update(self, x: Tensor) -> Tensor:
        return super().update(x) * (1.0 + 1e-7 * (x.shape[1] < LENGTH))


class LeavesToW(faulty.Base):
    """Leave the weight gradient of a product to W, `times` of it."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.eye(WIDTH)), times
        self.gradients: WeightGradients | None = None

    def defer_weight_gradients(self, gradients: WeightGradients) -> None:
        self.gradients = gradients

    def update(self, x: Tensor) -> Tensor:
        take = None if self.gradients is None else self.gradients.taker(x, self.weight)
        if take is None:
            return super().update(torch.nn.functional.linear(x, self.weight))
        LEFT.append(1)
        return super().update(LeavingProduct.apply(x, self.weight.detach(), take, self.times))


LEFT: list[int] = []


class LeavingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, take: Any, times: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.take, ctx.times = take, times
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.take(grad.flatten(0, -2) * ctx.times, x.flatten(0, -2))
        return grad @ weight, None, None, None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weight_gradients_that_a_layer_leaves_to_w_are_compared(checkpointed: bool, dtype: torch.dtype) -> None:
    LEFT.clear()
    checkpoint = checkpoint_with_gradients(_checkpoint) if checkpointed else None
    for times in (1.0, 1.5):
        layers = [faulty.Base(0).to(dtype), LeavesToW(times).to(dtype)]
        found = verify(layers, checkpoint=checkpoint, splits=True).findings
        assert len(LEFT) >= PLAN.num_slices and bool(found) == (times != 1.0)
    assert str(found[0]).startswith("layer 1 (LeavesToW): gradient of ")
    assert "or a layer with defer_weight_gradients() leaves something else to W" in str(found[0])
    # without splits nothing is left to W
    assert not verify([LeavesToW(1.5)]).findings


class RunsAgain(torch.autograd.Function):
    """Run a module again in the backward, and ask for its gradients by name, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.parameters = module, parameters
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        of_x, *others = torch.autograd.grad(y, (x, *ctx.parameters), grad)
        return of_x, None, *others


class Reversible(faulty.Base):
    def update(self, x: Tensor) -> Tensor:
        added: Tensor = RunsAgain.apply(x, self.out, *self.out.parameters())
        return added


def test_a_layer_that_asks_for_the_gradients_of_its_linear_layers() -> None:
    """If slices join their products, forwards in the backward do not; with a W, autograd does not reach weights."""
    assert verify([Reversible().double()], splits=False).findings == []
    assert verify([faulty.Base().double()], checkpoint=_checkpoint, splits=False).findings == []
    [finding] = verify([Reversible().double()], splits=True).findings
    assert "derive a class of your own from nn.Linear" in finding.problem


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_a_layer_computes_in_fp32_is_compared_so(is_checkpointed: bool) -> None:
    """And only then: layers that are fp64 throughout are compared as closely as ever."""
    checkpoint = checkpoint_with_gradients(_checkpoint) if is_checkpointed else None
    assert verify([NormInFp32().double()], checkpoint=checkpoint).findings == []
    for fault in (FaultyInFp32, FaultyByLittle):
        found = verify([fault().double()], checkpoint=checkpoint)
        assert found.findings, fault


def _checkpoint(function: Any, *inputs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


@pytest.mark.parametrize("checkpoint", [None, _checkpoint, checkpoint_with_gradients(_checkpoint)])
def test_healthy_with_checkpointing_and_dropout(checkpoint: Any) -> None:
    found = verify_gpt("float32", dropout=0.3, checkpoint=checkpoint)
    assert (found.findings, found.notes, found.without_dropout) == ([], [], 3)


class FaintlyBalanced(faulty.BalancedExperts):
    """Its auxiliary loss counts so little that its gradient drowns in the others, as they come from a random loss."""

    def __init__(self, by_tokens: bool) -> None:
        super().__init__()
        self.by_tokens = by_tokens

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        share = 1e-5 / (x.shape[0] * (LENGTH if self.by_tokens else x.shape[1]))
        return faulty.AddAuxiliary.apply(x * logits.softmax(-1)[..., :1], share * logits.square().sum())


def _reentrant_checkpoint(function: Any, *inputs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=True)


@pytest.mark.parametrize("checkpoint", [None, _checkpoint, _reentrant_checkpoint])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_faint_loss_that_a_layer_adds_is_compared_by_itself(dtype: torch.dtype, checkpoint: Any) -> None:
    """A mean over the tokens of a forward pass is refused, a sum that is divided by the sequence's length passes."""
    [found] = verify([FaintlyBalanced(by_tokens=False).to(dtype)], checkpoint=checkpoint).findings
    assert "adds a loss of its own in the backward, of the tokens of one forward pass" in found.problem
    assert not verify([FaintlyBalanced(by_tokens=True).to(dtype)], checkpoint=checkpoint).findings


def test_a_faint_loss_that_megatron_adds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    megatrons = type("MoEAuxLossAutoScaler", (faulty.AddAuxiliary,), {"__module__": "megatron.core.moe"})
    monkeypatch.setattr(faulty, "AddAuxiliary", megatrons)
    [found] = verify([FaintlyBalanced(by_tokens=False).bfloat16()]).findings
    assert "adds a loss of its own in the backward" in found.problem


class AlwaysNoisy(nn.Module):
    """Draws by an operation that is not known."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.rrelu(x, training=True)


class TooLarge(faulty.Base):
    """Fits without its graph only."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "note"),
    [(AlwaysNoisy(), "draws random numbers in evaluation mode as well"), (TooLarge(1), "there is not enough memory")],
)
def test_a_layer_that_cannot_be_compared_is_told_and_passed_over(layer: nn.Module, note: str) -> None:
    found = verify([faulty.Base(0), layer, faulty.Bidirectional()])
    assert len(found.notes) == 1 and note in found.notes[0]
    assert found.notes[0].startswith(f"layer 1 ({type(layer).__name__}): not checked: ")
    assert ([f.layer_id for f in found.findings], found.num_layers) == ([2], 2)
    assert re.search(r" \(the class: .*faulty\w*\.py:\d+\)$", found.findings[0].problem), "where the class is"


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_what_the_guard_refuses_is_refused_still() -> None:
    layer = faulty.Base()
    layer.attend = _plain  # type: ignore[method-assign]
    [finding] = verify([faulty.Base(0), layer, faulty.Base(2)]).findings
    assert str(finding).startswith("layer 1 (Base): raised PlainAttentionError: plain attention was called")
    assert not finding.is_of_the_cut
    assert " (in " not in str(finding), "the text names the user's line already"


def test_two_layers_with_one_name_for_keys_and_values() -> None:
    [finding] = verify([nn.Sequential(faulty.Base(3), faulty.Base(3))]).findings
    assert "share the name 3" in str(finding) and finding.is_of_the_cut


def look(tensors: tuple[Tensor, ...], loss_fn: Any, with_layers: bool = True) -> Findings:
    """Verify the loss alone, of such outputs; it is a mean over tokens."""
    return verify([lambda x: x], tensors, loss_fn, reduction="mean", with_layers=with_layers)


class EmbedsNarrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.long())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_tokens_may_be_of_any_integers(dtype: torch.dtype) -> None:
    assert not verify([EmbedsNarrow()], (data()[0].to(dtype),)).findings


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, LENGTH, VOCAB] around zero."""
    x = torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (x - x.mean()).to(dtype)


def test_a_loss_runs_while_its_slice_is_active() -> None:
    seen: list[tuple[int, int, str]] = []

    def see(_: Any) -> Any:
        active = active_slice()
        assert active is not None
        seen.append((active.start, active.stop, active.mode))
        return active.num_tokens if active.mode == "train" else None

    def by_length(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs.register_hook(see)
        return outputs.square().sum() / see(outputs)

    found = look((numbers(),), by_length)
    assert (found.findings, found.num_losses) == ([], 1)
    forwards = [(*PLAN.span(i), "train") for i in range(PLAN.num_slices)]
    backwards = [(*PLAN.span(i), "recompute") for i in reversed(range(PLAN.num_slices))]
    assert seen == [(0, LENGTH, "train"), (0, LENGTH, "recompute"), *forwards, *backwards]


@pytest.mark.parametrize(("size", "differs"), [(1e-2, True), (1e-5, False)])
def test_a_loss_is_measured_by_its_own_size_unless_its_terms_cancel_out(size: float, differs: bool) -> None:
    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.mean() + (size if outputs.shape[1] == LENGTH else size + 4e-5)

    assert bool(look((numbers(),), loss_fn).findings) == differs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_half_precision_may_differ_by_rounding_alone(dtype: torch.dtype) -> None:
    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.square().mean() + 0.05 * (outputs.shape[1] < LENGTH)

    assert look((numbers(dtype),), loss_fn).findings


@pytest.mark.parametrize("look_aside", [lambda x: x.detach().bfloat16().mean(), lambda x: x.bfloat16()[:, 1:]])
def test_half_precision_beside_a_loss_allows_for_nothing(look_aside: Callable[[Tensor], Tensor]) -> None:
    """Neither a metric, nor a part of a tensor, sums in it."""

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        look_aside(outputs)
        return outputs.square().mean() + 0.01 * (outputs.shape[1] < LENGTH)

    assert look((numbers(),), loss_fn).findings


def problem_of_report(
    get: Callable[[], dict[str, Tensor]], at_start: dict[str, float] | None, loss_fn: Any = lambda out, _: out.mean()
) -> str | None:
    labels, config = SliceableTensors.of_labels(data()[1], 1), TeraPipeConfig(enabled=True, loss_reduction="mean")
    slicing = Slicing(PLAN, weights_of(labels, PLAN, config, None))
    outputs = Activations((numbers(),), alone, (TokenDim(1),))
    return LossCheck(loss_fn, labels, outputs, slicing, config, get, at_start).run()


@pytest.mark.filterwarnings("error")
def test_there_may_be_nothing_to_report_before_the_first_loss() -> None:
    losses: list[Tensor] = []

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        losses.append(outputs.square().mean())
        return losses[-1]

    assert problem_of_report(lambda: {"size": losses[-1]}, {}, loss_fn) is None


@pytest.mark.parametrize("at_start", [{"a": 0.5}, {"a": 0.25}, {}, None])
def test_a_report_that_no_loss_changes_is_refused_where_layers_changed_it(at_start: dict[str, float] | None) -> None:
    """Others are constants, which each slice may report. None: no layer has run."""
    problem = problem_of_report(lambda: {"a": torch.tensor(0.5)}, at_start)
    assert ("which loss_fn does not change" in (problem or "")) == (at_start in ({"a": 0.25}, {}))


def test_a_loss_that_is_not_finite_waits() -> None:
    found = look((numbers(),), lambda out, labels: out.sum() * float("inf"))
    assert (found.findings, found.num_losses, found.loss_waits) == ([], 0, True)
    assert all(Findings.of_all([found, other], 1).loss_waits for other in (found, Findings()))
    assert not Findings.of_all([found, Findings(num_losses=1)], 1).loss_waits


def test_counted_labels_without_a_finite_loss_are_told() -> None:
    """loss_fn ignores label 3 and agrees on label 1, but a micro-batch of label 3 alone has no mean."""

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=3)

    first, second = (torch.full((2, LENGTH), label) for label in (1, 3))
    [finding] = verify([lambda x: x], (numbers(),), loss_fn, labels=first, everyone=(first, second)).findings
    assert re.search(r"not finite \(.* of micro-batch 1\), though the terapipe section counts", str(finding))


def test_the_findings_of_all_ranks() -> None:
    first, last = Finding(1, "layer 1 (A)", "differs"), Finding(7, "loss_fn", "differs")
    peers = [Findings(num_layers=2, findings=[last]), Findings(num_layers=3, findings=[first, last], notes=["n"])]
    joined = Findings.of_all([*peers, *peers], copies=2)
    assert (joined.num_layers, joined.findings, joined.notes) == (5, [first, last], ["n"])


def test_a_constant_that_is_not_a_number_counts_no_calls() -> None:
    nan, tolerance = float("nan"), compare.tolerance_of({torch.float32}, tf32=False)
    assert not _is_updated_per_call(nan, nan, nan, 3, tolerance)
    assert _is_updated_per_call(0.0, 1.0, 3.0, 3, tolerance)


def test_tf32_is_read_however_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Trainer(tf32=True)` sets the newer attribute, after which torch refuses to read the older one."""
    on_cuda = SimpleNamespace(device=torch.device("cuda"))
    check: Any = SimpleNamespace(_dtypes=lambda _: {torch.float32}, inputs=SimpleNamespace(tensors=[on_cuda]))
    fp32, tf32 = (compare.tolerance_of({torch.float32}, tf32=is_on) for is_on in (False, True))
    assert LayerCheck._tolerance(check, ()) == fp32 != tf32
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends, "fp32_precision", "tf32")
        assert LayerCheck._tolerance(check, ()) == tf32
    torch.set_float32_matmul_precision("high")
    try:
        assert LayerCheck._tolerance(check, ()) == tf32
    finally:
        torch.set_float32_matmul_precision("highest")
