"""Test the loss that keeps no logits against torch's own linear layer and cross entropy."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.losses import Head, LinearCrossEntropy, deferred, find_head, tied_logits
from terapipe_ds.losses.deferred import Tokens, deferred_cross_entropy, require_known
from terapipe_ds.losses.head import TiedLogits
from terapipe_ds.models.gpt import GPTConfig, LMHead
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

ROWS, TOKENS, HIDDEN, VOCABULARY = 2, 20, 16, 50
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 2e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 3.0},
    "logits whose exponentials overflow": {"scale": 4e3},
    "all": {"label_smoothing": 0.2, "scale": -2.0, "softcap": 5.0, "ignore_index": 7},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is a whole number of rows, and the last one is shorter."""
    monkeypatch.setattr(deferred, "loss_chunk_tokens", lambda vocabulary, on_cpu: 7)


def expected(logits: Tensor, labels: Any, *, label_smoothing: float = 0.0, scale: float = 1.0,
             softcap: float | None = None, ignore_index: int = -100) -> Tensor:  # fmt: skip
    """Compute the loss by torch's own functions."""
    targets, mask = labels if isinstance(labels, tuple) else (labels, torch.ones(labels.shape))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    mask = (mask * (targets != ignore_index)).flatten().to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def labels_of(kind: str, ignored: int) -> Any:
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS))
    labels[0, 3:9] = ignored
    return (labels, torch.rand(ROWS, TOKENS)) if kind == "masked" else labels


def error_of(ours: Tensor, other: Tensor) -> float:
    return float((ours.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("labels", ["plain", "masked"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_those_of_logits(name: str, bias: bool, labels: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options, linear = OPTIONS[name], nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    loss, given = LinearCrossEntropy(**options), labels_of(labels, options.get("ignore_index", -100))
    inputs = [torch.randn(ROWS, TOKENS, HIDDEN, dtype=dtype) for _ in range(1)] * 3
    plain, called, ours = (each.clone().requires_grad_() for each in inputs)
    wanted = expected(linear(plain), given, **options) * 0.3
    (wanted * 5.0).backward()
    gradients = [plain.grad, *(p.grad for p in linear.parameters())]
    # of logits, as any other engine calls it
    assert error_of(loss(linear(called), given) * 0.3, wanted) <= LIMITS[dtype]
    # of hidden states, with a gradient that is not 1
    linear.zero_grad()
    found = loss.of_hidden(ours, given, Head(linear.weight, linear.bias), 0.3)
    assert found.isnan()
    (found * 5.0).backward()
    pairs = zip([found, ours.grad, *(p.grad for p in linear.parameters())], [wanted, *gradients], strict=True)
    assert max(error_of(a, b) for a, b in pairs) <= LIMITS[dtype]
    with torch.no_grad():
        assert error_of(loss.of_hidden(ours, given, Head(linear.weight, linear.bias), 0.3), wanted) <= LIMITS[dtype]


def test_chunks_add_up_in_fp32() -> None:
    """In bf16 a sum of 500 equal chunks would stay at 256 of them."""
    linear = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.bfloat16)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    hidden, labels = torch.ones(1, 3500, HIDDEN, dtype=torch.bfloat16), torch.zeros(1, 3500, dtype=torch.long)
    LinearCrossEntropy().of_hidden(hidden, labels, Head(linear.weight, linear.bias)).backward()
    wanted = torch.full((VOCABULARY,), 1 / VOCABULARY)
    wanted[0] -= 1
    for gradient in (linear.weight.grad, linear.bias.grad):
        assert gradient is not None
        assert error_of(gradient, wanted.view(-1, *[1] * (gradient.dim() - 1)).expand_as(gradient)) <= 1e-2


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_factors_entropies_and_largest_logits_of_tokens(softcap: float | None) -> None:
    torch.manual_seed(0)
    linear, labels = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64), torch.randint(VOCABULARY, (ROWS * TOKENS,))
    hidden, weights = (
        torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.float64),
        torch.rand(len(labels), dtype=torch.float64),
    )
    plain, ours = (hidden.clone().requires_grad_() for _ in range(2))
    # by torch's own functions, on logits
    logits = linear(plain).flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits)
    log_probs = distribution.log_prob(labels)
    wanted = -(weights * log_probs * log_probs.exp().detach()).sum()
    (wanted * 5.0).backward()
    # of hidden states
    seen: list[tuple[slice, Tensor, Tensor]] = []
    tokens = Tokens(labels, weights, factors=lambda losses: torch.exp(-losses), watch=lambda *each: seen.append(each))
    found = deferred_cross_entropy(ours, Head(linear.weight, linear.bias, softcap=softcap), tokens)
    (found * 5.0).backward()
    assert plain.grad is not None and ours.grad is not None
    assert error_of(found, wanted) <= 1e-12 and error_of(ours.grad, plain.grad) <= 1e-12
    spans, entropies, top = zip(*seen, strict=True)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert error_of(torch.cat(entropies), distribution.entropy()) <= 1e-12
    assert torch.equal(torch.cat(top), logits.argmax(-1))


def test_frozen_weights_and_frozen_hidden_states() -> None:
    linear, labels = nn.Linear(HIDDEN, VOCABULARY), torch.randint(VOCABULARY, (ROWS, TOKENS))
    for frozen in ("weights", "hidden"):
        linear.requires_grad_(frozen != "weights")
        hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=frozen != "hidden")
        linear.zero_grad()
        LinearCrossEntropy().of_hidden(hidden, labels, Head(linear.weight, linear.bias)).backward()
        assert (hidden.grad is None, linear.weight.grad is None) == (frozen == "hidden", frozen == "weights")


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_memory_is_the_hidden_states_and_one_chunk(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden_size, vocabulary, chunk = 512, 32, 4096, 64
    monkeypatch.setattr(deferred, "loss_chunk_tokens", lambda numbers, on_cpu: chunk * vocabulary // numbers)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    hidden = torch.randn(1, tokens, hidden_size, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens))

    def add(weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.addmm_(rows.t(), inputs)

    with MemoryPeak() as forward:
        loss = LinearCrossEntropy().of_hidden(hidden, labels, Head(weight, softcap=softcap), 1.0, add)
    with MemoryPeak() as backward:
        loss.backward()
    assert forward.left_bytes <= 40 * tokens, "labels and weights of tokens"
    one_chunk = chunk * vocabulary * 4
    assert one_chunk <= backward.grown_bytes <= 1.05 * (one_chunk + tokens * hidden_size * 4)


def test_autocast_rounds_neither_the_loss_nor_the_weights_of_tokens() -> None:
    """A product of losses and weights by `@` would have 16 bits."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 11, 7, requires_grad=True), torch.randint(7, (2, 11))
    loss = LinearCrossEntropy()(logits, labels)
    with torch.autocast("cpu", torch.bfloat16):
        again = LinearCrossEntropy()(logits, labels)
        of_head = LinearCrossEntropy().of_hidden(logits.detach().bfloat16(), labels, Head(torch.eye(7)))
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(of_head, LinearCrossEntropy()(logits.detach().bfloat16(), labels))
    torch.testing.assert_close(torch.autograd.grad(again, logits), torch.autograd.grad(loss, logits))


def test_labels_of_eight_bits_count() -> None:
    assert LinearCrossEntropy().slice_weight(torch.tensor([[-100, -1]]).to(torch.uint8)) == 2


def test_labels_outside_of_the_vocabulary() -> None:
    head = Head(torch.randn(VOCABULARY, HIDDEN))
    for label in (VOCABULARY, -1):
        labels = torch.zeros(1, 4, dtype=torch.long)
        labels[0, 1] = label
        text = rf"labels outside of the vocabulary of 50: 1, first label {label}\. Mask them, or fix"
        with pytest.raises(ValueError, match=text):
            LinearCrossEntropy().of_hidden(torch.randn(1, 4, HIDDEN), labels, head)
        with pytest.raises(ValueError, match=text):
            LinearCrossEntropy()(torch.randn(1, 4, VOCABULARY), labels)


def test_small_integers_are_compared_with_large_vocabularies() -> None:
    """In uint8 a vocabulary of 300 would be one of 44, and in int16 one of 40,000 negative."""
    for dtype, vocabulary in ((torch.uint8, 300), (torch.int8, 256), (torch.int16, 40_000)):
        require_known(torch.tensor([100, 3], dtype=dtype), vocabulary)


def test_other_numbers_of_labels_than_tokens_are_an_error() -> None:
    head, hidden = Head(torch.randn(VOCABULARY, HIDDEN)), torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    for shape in ((ROWS, TOKENS + 1), (ROWS, TOKENS, 2), (ROWS, TOKENS - 1)):
        loss = LinearCrossEntropy().of_hidden(hidden, torch.zeros(shape, dtype=torch.long), head)
        with pytest.raises(ValueError, match=r"\d+ labels for the hidden states of 40 tokens"):
            loss.backward()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_token_that_does_not_count_may_have_any_numbers(label_smoothing: float) -> None:
    """Compare with torch. Padding that attends to no token has such hidden states."""
    linear, labels = nn.Linear(HIDDEN, VOCABULARY), torch.randint(VOCABULARY, (ROWS, TOKENS))
    hidden = torch.randn(ROWS, TOKENS, HIDDEN)
    hidden[0, 3], hidden[1, 5], labels[0, 3], labels[1, 5] = torch.nan, torch.inf, -100, -100
    with torch.no_grad():
        logits, loss = linear(hidden), LinearCrossEntropy(label_smoothing=label_smoothing)
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)
        found = loss.of_hidden(hidden, labels, Head(linear.weight, linear.bias))
        assert max(error_of(found, wanted), error_of(loss(logits, labels), wanted)) <= 1e-6


@pytest.mark.parametrize(("options", "text"), [
    ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
    ({"scale": 0.0}, "scale = 0.0"),
    ({"softcap": -1.0}, "softcap = -1.0"),
])  # fmt: skip
def test_impossible_options(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinearCrossEntropy(**options)  # type: ignore[arg-type]


def test_layer_and_loss_do_not_both_change_the_logits() -> None:
    hidden, labels = torch.randn(1, 4, HIDDEN), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="both change the logits"):
        LinearCrossEntropy(scale=2.0).of_hidden(hidden, labels, Head(torch.randn(VOCABULARY, HIDDEN), softcap=3.0))


class TestHeads:
    def test_a_linear_layer_hands_hidden_states_on_only_if_the_loss_takes_them(self) -> None:
        linear, hidden = nn.Linear(HIDDEN, VOCABULARY), torch.randn(1, 4, HIDDEN)
        logits = linear(hidden)
        accumulate_in_products(linear, None)  # an engine replaces its forward, which is no program's change
        for _ in range(2):  # a second engine, with the same module
            found = find_head(linear)
            assert callable(found) and isinstance(head := found(), Head) and head.weight is linear.weight
        assert torch.equal(linear(hidden), logits)
        with push_slice(ActiveSlice(0, 4, 8, wants_logits=False)):
            assert torch.equal(linear(hidden), hidden) and linear(hidden).grad_fn is not None
        with push_slice(ActiveSlice(0, 4, 8)):
            assert torch.equal(linear(hidden), logits)

    def test_layers_with_another_product_say_why_they_need_logits(self) -> None:
        hooked = nn.Linear(HIDDEN, VOCABULARY)
        hooked.register_forward_hook(lambda module, inputs, output: output * 2)
        assert "has hooks" in str(find_head(hooked))
        hooked = nn.Linear(HIDDEN, VOCABULARY)
        hooked.register_full_backward_hook(lambda module, inputs, outputs: None)
        assert "has hooks" in str(find_head(hooked))
        replaced = nn.Linear(HIDDEN, VOCABULARY)
        describe = find_head(replaced)
        assert callable(describe) and isinstance(describe(), Head)
        replaced.forward = lambda hidden, own=replaced.forward: own(hidden) * 2  # type: ignore[method-assign]
        assert "was replaced" in str(describe()) and "was replaced" in str(find_head(replaced))
        assert "is a Bilinear" in str(find_head(nn.Bilinear(2, 2, 2)))
        lowered = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, VOCABULARY))
        assert "not torch's own nn.Linear" in str(find_head(lowered))

    def test_a_class_that_adds_to_the_forward_of_the_one_with_output_head_needs_logits(self) -> None:
        head = LMHead(GPTConfig(hidden_size=HIDDEN, vocab_size=VOCABULARY))
        assert callable(find_head(head))
        capped = type("Capped", (LMHead,), {"forward": lambda self, hidden: LMHead.forward(self, hidden).tanh()})
        assert "has a forward() of its own" in str(find_head(capped(GPTConfig())))
        describe = lambda self: Head(next(self.parameters()))  # noqa: E731
        same = type("Same", (LMHead,), {"output_head": describe})
        assert callable(find_head(same(GPTConfig())))
        described = type("Described", (), {"output_head": describe})  # a mixin has no forward to add to
        assert callable(find_head(type("Mixed", (described, nn.Bilinear), {})(2, 2, 2)))
        tied = type(
            "Capped", (TiedLogits,), {"__call__": lambda self, *inputs: TiedLogits.__call__(self, *inputs).tanh()}
        )
        wrapped = LMHead(GPTConfig())
        wrapped.forward = functools.wraps(wrapped.forward)(lambda hidden: hidden)  # type: ignore[method-assign]
        assert "the forward of the last layer was replaced" in str(find_head(wrapped))
        embedding = nn.Embedding(VOCABULARY, HIDDEN)
        assert "has a __call__() of its own" in str(find_head(functools.partial(tied(), embedding)))
        assert callable(find_head(functools.partial(tied_logits, embedding)))

    def test_tied_logits(self) -> None:
        embedding, hidden = nn.Embedding(VOCABULARY, HIDDEN), torch.randn(1, 4, HIDDEN)
        assert torch.equal(tied_logits(embedding, hidden), F.linear(hidden, embedding.weight))
        assert tied_logits.output_head(embedding).weight is embedding.weight


def test_a_subclass_with_another_loss_of_logits_gets_logits() -> None:
    class Doubled(LinearCrossEntropy):
        def __call__(self, logits: Tensor, labels: Any) -> Tensor:
            return 2 * super().__call__(logits, labels)

    assert not LinearCrossEntropy().needs_logits
    assert "Doubled has a __call__() of its own" in Doubled().needs_logits
