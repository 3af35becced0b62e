"""The check compares the loss without logits, which training runs, with the loss of logits, and finds each fault."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.losses import Head, LinearCrossEntropy, deferred, hand_on, hands_on_hidden, tied_logits
from terapipe_ds.models import gpt
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.verify.loss import LossCheck
from terapipe_ds.runtime.verify.stage import StageCheck
from tests.small_models import faulty
from tests.small_models.faulty import WIDTH
from tests.unit.runtime.verify.test_verify_layers import LENGTH, VOCAB, _checkpoint, data, verify, verify_gpt

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPED = LinearCrossEntropy(label_smoothing=0.1, softcap=4.0, scale=0.5)


class Capped(nn.Module):
    """A user's last layer: a norm before the product, a bias, a scale and a soft cap after it."""

    def __init__(self, fault: Callable[[Head], Head] = lambda head: head) -> None:
        super().__init__()
        self.out, self.fault = nn.Linear(WIDTH, VOCAB), fault
        self.norm = nn.LayerNorm(WIDTH)

    def output_head(self) -> Head:
        return self.fault(Head(self.out.weight, self.out.bias, scale=0.7, softcap=3.0))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        return hand_on(hidden) if hands_on_hidden() else 3.0 * torch.tanh(0.7 * self.out(hidden) / 3.0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "loss_chunk_tokens", lambda vocabulary, on_cpu: 4)


def layers_of(last: nn.Module, dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(1)
    return [faulty.Base(0).to(dtype), last.to(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_layers", [True, False])
@pytest.mark.parametrize(
    ("last", "loss"),
    [(lambda: nn.Linear(WIDTH, VOCAB), SHAPED), (Capped, LinearCrossEntropy(label_smoothing=0.2))],
    ids=["linear", "capped"],
)
def test_healthy_losses_pass(last: Any, loss: Any, with_layers: bool, dtype: torch.dtype) -> None:
    found = verify(layers_of(last(), dtype), None, loss, with_layers=with_layers)
    assert (found.findings, found.notes, found.num_losses) == ([], [], 1)


@pytest.mark.parametrize("options", [
    {"autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16)},
    {"with_layers": False},
    {"checkpoint": _checkpoint},
], ids=["autocast", "the loss alone", "checkpointed"])  # fmt: skip
def test_healthy_models_pass(options: dict[str, Any]) -> None:
    found = verify_gpt("float32", **options)
    assert (found.findings, found.notes, found.num_losses) == ([], [], 1)


def test_a_tied_output_matrix_passes() -> None:
    embedding = nn.Embedding(VOCAB, WIDTH)
    layers = [embedding, faulty.Base(0), functools.partial(tied_logits, embedding)]
    found = verify(layers, (data()[0],), LinearCrossEntropy())
    assert (found.findings, found.notes, found.num_losses) == ([], [], 1)


OF_HEAD: dict[str, Callable[[Head], Head]] = {
    "a wrong scale": lambda head: replace(head, scale=1.2),
    "no cap": lambda head: replace(head, softcap=None),
    "no bias": lambda head: replace(head, bias=None),
    "another weight": lambda head: replace(head, weight=head.weight.detach().clone()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_HEAD)
def test_a_head_that_leaves_something_out_is_found(name: str, dtype: torch.dtype) -> None:
    layers = layers_of(Capped(OF_HEAD[name]), dtype)
    nn.init.normal_(layers[-1].out.bias)
    [finding] = verify(layers, None, LinearCrossEntropy()).findings
    assert finding.layer == "loss_fn" and finding.problem.startswith("without logits, as in training, ")
    assert "output_head() of the last layer must describe" in finding.problem


def _drops_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = deferred._spans
    monkeypatch.setattr(deferred, "_spans", lambda *sizes: list(spans(*sizes))[:-1])


def _forgets_the_gradient_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    run = deferred._Pass.__init__

    def init(self: Any, head: Any, tokens: Any, grad: Any = None, needs: Any = (False,) * 3) -> None:
        run(self, head, tokens, None if grad is None else torch.ones_like(grad), needs)

    monkeypatch.setattr(deferred._Pass, "__init__", init)


def _keeps_the_last_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = deferred._Pass._keep

    def kept(self: Any, *arguments: Any) -> None:
        self.weight_gradient = None
        keep(self, *arguments)

    monkeypatch.setattr(deferred._Pass, "_keep", kept)


class OtherIgnored(LinearCrossEntropy):
    """Its loss of hidden states ignores another label."""

    def of_hidden(self, hidden: Tensor, labels: Any, *rest: Any) -> Tensor:
        labels = labels.where(labels >= 0, 1)
        return LinearCrossEntropy(ignore_index=3).of_hidden(hidden, labels, *rest)


class WithoutShare(LinearCrossEntropy):
    """Its loss of hidden states has the weight of a whole sequence."""

    def of_hidden(self, hidden: Tensor, labels: Any, head: Head, share: float = 1.0, *rest: Any) -> Tensor:
        return super().of_hidden(hidden, labels, head, 1.0, *rest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sabotage", "loss", "what"), [
    (_drops_a_chunk, LinearCrossEntropy(), "input gradient"),
    (_forgets_the_gradient_of_the_loss, LinearCrossEntropy(), "input gradient"),
    (_keeps_the_last_chunk_alone, LinearCrossEntropy(), "gradient of"),
    (nullcontext, OtherIgnored(), "input gradient"),
    (nullcontext, WithoutShare(), "input gradient"),
])  # fmt: skip
def test_a_loss_without_logits_that_differs_is_found(
    sabotage: Any, loss: Any, what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    [finding] = verify(layers_of(nn.Linear(WIDTH, VOCAB), dtype), None, loss).findings
    assert finding.problem.startswith(f"without logits, as in training, {what}"), finding


class Attends(Capped):
    """A block with plain causal attention before the head."""

    output_head = Capped.output_head

    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(hidden + mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("with_layers", [True, False])
@pytest.mark.parametrize("intercept", [True, False])
def test_plain_attention_of_the_last_layer_is_intercepted_as_in_training(intercept: bool, with_layers: bool) -> None:
    found = verify(layers_of(Attends()), None, LinearCrossEntropy(), with_layers=with_layers, intercept=intercept)
    if intercept:
        assert (found.findings, found.notes, found.num_losses) == ([], [], 1)
    else:
        assert "plain attention was called on slice" in "".join(map(str, [*found.findings, *found.notes]))
        assert found.num_losses == 0


class ThreeTimes(torch.autograd.Function):
    """Hand three times the gradient on."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3.0 * gradients[0]


class WrongForHidden(LinearCrossEntropy):
    """The hidden states alone get a wrong gradient."""

    def of_hidden(self, hidden: Tensor, *rest: Any) -> Tensor:
        loss: Tensor = super().of_hidden(ThreeTimes.apply(hidden), *rest)
        return loss


@pytest.mark.parametrize(
    ("loss", "frozen"), [(WrongForHidden(), False), (WrongForHidden(), True), (WithoutShare(), True)]
)
@pytest.mark.parametrize("before", [1, 0], ids=["after another layer", "alone in its part"])
def test_the_loss_alone_is_compared_with_its_gradient_of_hidden_states(loss: Any, frozen: bool, before: int) -> None:
    """The layers before it run without a graph, and a frozen head has no other gradient."""
    layers = layers_of(nn.Linear(WIDTH, VOCAB).requires_grad_(not frozen))
    hidden = (torch.randn(2, LENGTH, WIDTH),)
    [finding] = verify(layers[1 - before :], hidden, loss, with_layers=False).findings
    assert finding.problem.startswith("without logits, as in training, input gradient"), finding


WINDOWS = 12


def labels_of_all(kind: int | None = None) -> Tensor:
    """Labels of which no value is frequent; two late windows have `kind` as well, as ignored labels or as padding."""
    labels = (torch.arange(2 * WINDOWS * LENGTH) % (VOCAB - 4) + 4).view(2, -1)
    if kind is not None:
        labels[0, -2 * LENGTH :] = kind
    return labels


@pytest.mark.parametrize(("kind", "of_heads"), [(None, 1), (-100, 2), (0, 2)])
def test_a_head_runs_for_new_labels_alone(kind: int | None, of_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of logits is compared for all windows."""
    calls, compare, run = [], StageCheck.compare_without_logits, LossCheck.run
    monkeypatch.setattr(StageCheck, "compare_without_logits", lambda *args: (calls.append("head"), compare(*args))[1])
    monkeypatch.setattr(LossCheck, "run", lambda *args: (calls.append("loss"), run(*args))[1])
    labels, everyone = labels_of_all()[:, :LENGTH], [labels_of_all(kind)]
    found = verify(layers_of(Capped()), None, LinearCrossEntropy(), labels=labels, everyone=everyone)
    assert (found.findings, found.notes, found.num_losses) == ([], [], 1)
    assert (calls.count("head"), calls.count("loss")) == (of_heads, 1 + WINDOWS)


@pytest.mark.parametrize("first_ignored", [0, 8, LENGTH], ids=["no label", "a slice", "a window"])
def test_a_fault_of_ignored_labels_is_found_in_a_late_window(first_ignored: int) -> None:
    """Slices of ignored labels alone run no loss of hidden states, and do not show the fault."""
    labels, late = labels_of_all(), labels_of_all(-100)
    for each in (labels, late):
        each[:, :first_ignored] = -100
    first, loss = labels[:, :LENGTH], OtherIgnored()
    assert verify(layers_of(Capped()), None, loss, labels=first, everyone=[labels]).findings == []
    [finding] = verify(layers_of(Capped()), None, loss, labels=first, everyone=[late]).findings
    assert finding.problem.startswith("without logits, as in training, ") and "of micro-batch 0" in finding.problem


@functools.wraps(gpt.gpt_loss)
def penalized(logits: Tensor, labels: Tensor) -> Tensor:
    return gpt.gpt_loss(logits, labels) + 1e-6 * logits.logsumexp(-1).square()[labels >= 0].mean()


def test_a_loss_around_another_gets_logits() -> None:
    """What it adds may be too small for the check."""
    own = functools.wraps(penalized)(lambda logits, labels: penalized(logits, labels))
    vars(own)["of_hidden"] = LinearCrossEntropy().of_hidden  # which has the term as well
    losses = {loss: SimpleNamespace(loss_fn=loss, forward_funcs=[Capped()]) for loss in (penalized, gpt.gpt_loss, own)}
    runs = {loss: LossOfHidden.of(module, WeightGradients()) for loss, module in losses.items()}
    assert runs[penalized] is None and runs[gpt.gpt_loss] is not None and runs[own] is not None


def test_a_loss_that_says_why_it_needs_logits_is_not_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    _drops_a_chunk(monkeypatch)
    loss = type("Careful", (LinearCrossEntropy,), {"needs_logits": "tried"})()
    assert verify(layers_of(nn.Linear(WIDTH, VOCAB)), None, loss).findings == []
    assert verify_gpt("float32", with_layers=False, loss_fn=gpt.gpt_loss).findings
