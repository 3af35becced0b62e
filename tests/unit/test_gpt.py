"""The GPT of `terapipe_ds.models` against a plain implementation written here: numbers, sizes, initial weights."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.costs.model_sizes import MODEL_SIZES, ModelSize, ModelSizeError
from terapipe_ds.models import gpt
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.models.positions import rotary_turns, rotate

LENGTH = 23
LAYERS = {"hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40}
SMALL: dict[str, Any] = {"vocab_size": 31, "max_sequence_length": LENGTH, **LAYERS}
VARIANTS: dict[str, dict[str, Any]] = {
    "rope": {},
    "grouped-query": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1, "head_dim": 8},
    "learned": {"positions": "learned"},
    "tied": {"tied_embedding": True},
    "tied learned grouped": {"tied_embedding": True, "positions": "learned", "num_kv_heads": 2},
    "gpt3-like": {"gated_mlp": False, "bias": True, "positions": "learned", "tied_embedding": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and on busy cores the threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def config(request: pytest.FixtureRequest) -> GPTConfig:
    return GPTConfig(dtype="float64", **{**SMALL, **request.param})


class Model:
    """The layers of a config built in one process, as a PipelineModule with one stage builds them."""

    def __init__(self, config: GPTConfig) -> None:
        self.modules = nn.ModuleDict()
        self.functions: list[Callable[[Tensor], Tensor]] = []
        for index, spec in enumerate(gpt_layers(config)):
            name = spec.key if isinstance(spec, TiedLayerSpec) else str(index)
            if name not in self.modules:
                self.modules[name] = spec.build()
            module = self.modules[name]
            forward_fn = getattr(spec, "forward_fn", None)
            self.functions.append(functools.partial(forward_fn, module) if forward_fn else module)

    def __call__(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for function in self.functions:
            hidden = function(hidden)
        return hidden


def text(config: GPTConfig) -> Tensor:
    return torch.randint(config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


# -- against an implementation without any cleverness --------------------------------------------------------


def naive_rotation(x: Tensor, base: float, start: int = 0) -> Tensor:
    """x [T, D] of one head; pair by pair, position by position, with sine and cosine."""
    out = x.clone()
    for row in range(x.shape[0]):
        for pair in range(x.shape[1] // 2):
            angle = (start + row) / base ** (2 * pair / x.shape[1])
            a, b = x[row, 2 * pair], x[row, 2 * pair + 1]
            out[row, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            out[row, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def naive_norm(x: Tensor, module: nn.Module, config: GPTConfig) -> Tensor:
    if config.bias:
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, config.norm_eps)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * module.weight


def naive_attention(x: Tensor, module: gpt.CausalSelfAttention, config: GPTConfig) -> Tensor:
    """x [T, hidden]: each query head on its own, scores with a triangular mask."""
    width, heads = config.head_dim, []
    qkv = F.linear(x, module.qkv.weight, module.qkv.bias).split(width, dim=-1)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        q, k = qkv[head], qkv[config.num_heads + kv_head]
        v = qkv[config.num_heads + config.num_kv_heads + kv_head]
        if config.positions == "rope":
            q, k = naive_rotation(q, config.rope_base), naive_rotation(k, config.rope_base)
        scores = q @ k.T / math.sqrt(width)
        future = torch.triu(torch.ones_like(scores, dtype=torch.bool), diagonal=1)
        heads.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v)
    return F.linear(torch.cat(heads, dim=-1), module.out.weight, module.out.bias)


def naive_feed_forward(x: Tensor, module: gpt.FeedForward, config: GPTConfig) -> Tensor:
    wide = F.linear(x, module.up.weight, module.up.bias)
    inner = F.gelu(wide, approximate="tanh")
    if config.gated_mlp:
        inner = F.silu(wide[:, : config.ffn_size]) * wide[:, config.ffn_size :]
    return F.linear(inner, module.down.weight, module.down.bias)


def naive_logits(model: Model, config: GPTConfig, tokens: Tensor) -> Tensor:
    rows, modules = [], list(model.modules.values())
    embedding = modules[0].weight
    output = embedding if config.tied_embedding else modules[-1].out.weight
    for row in tokens:
        x = embedding[row]
        for layer in modules[1:]:
            if isinstance(layer, gpt.PositionEmbedding):
                x = x + layer.weight[: len(row)]
            elif isinstance(layer, gpt.DecoderLayer):
                x = x + naive_attention(naive_norm(x, layer.attention_norm, config), layer.attention, config)
                x = x + naive_feed_forward(naive_norm(x, layer.feed_forward_norm, config), layer.feed_forward, config)
            elif isinstance(layer, gpt.FinalNorm):
                x = naive_norm(x, layer.norm, config)
        rows.append(x @ output.T)
    return torch.stack(rows)


def shake(model: Model) -> None:
    """Larger weights than the initial ones (norms and biases included), so that every term counts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.modules.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)


def test_forward_equals_a_naive_implementation(config: GPTConfig) -> None:
    model = Model(config)
    shake(model)
    tokens = text(config)
    assert relative_error(model(tokens), naive_logits(model, config, tokens)) < 1e-13


@pytest.mark.parametrize(
    ("dtype", "loss_dtype", "of_loss", "of_gradient"),
    [(torch.float64, torch.float64, 1e-14, 1e-14), (torch.bfloat16, torch.float32, 1e-6, 4e-3)],  # rounded to bf16
)
def test_loss_is_a_mean_in_fp32(
    dtype: torch.dtype, loss_dtype: torch.dtype, of_loss: float, of_gradient: float
) -> None:
    logits = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    labels = torch.randint(50, (3, 40), generator=torch.Generator().manual_seed(4))
    labels[0, 5:20] = -100
    wide = logits.detach().double().requires_grad_()
    loss, valid = gpt_loss(logits, labels), labels != -100
    expected = -wide.log_softmax(-1)[valid].gather(-1, labels[valid].unsqueeze(-1)).mean()
    loss.backward()
    expected.backward()
    assert (loss.dtype, logits.grad.dtype) == (loss_dtype, dtype)  # type: ignore[union-attr]
    assert loss.item() == pytest.approx(expected.item(), rel=of_loss)
    assert relative_error(logits.grad.double(), wide.grad) < of_gradient  # type: ignore[union-attr]


# -- rotary positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 700, 5000])
def test_rotation_from_any_position(start: int) -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotated = rotate(x, rotary_turns(8, 10000.0, start, x))
    for row in range(2):
        torch.testing.assert_close(rotated[row, :, 1], naive_rotation(x[row, :, 1], 10000.0, start), rtol=0, atol=1e-11)


def test_a_table_first_used_in_inference_serves_training() -> None:
    x = torch.randn(1, 4, 1, 6, requires_grad=True)
    with torch.inference_mode():
        rotary_turns(6, 123.0, 0, x)
    rotate(x, rotary_turns(6, 123.0, 0, x)).sum().backward()
    assert x.grad is not None


# -- initial weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_weights_do_not_depend_on_the_stages(tied: bool, positions: str) -> None:
    config = GPTConfig(**{**SMALL, "tied_embedding": tied, "positions": positions})
    alone = [spec.build().state_dict() for spec in gpt_layers(config)]
    for first in (1, len(alone) // 2):  # the second stage of two, after other draws and in another order
        torch.rand(first)
        specs = gpt_layers(config)[first:]
        built = [spec.build().state_dict() for spec in reversed(specs)][::-1]
        for ours, theirs in zip(built, alone[first:], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    drawn = [(config.model_copy(update={"seed": seed}), index) for seed, index in ((0, 0), (0, 1), (9, 0))]
    first, *others = (gpt.DecoderLayer(*each).feed_forward.down.weight for each in drawn)
    assert not any(torch.equal(first, other) for other in others)


def test_initial_scale() -> None:
    layer = gpt.DecoderLayer(GPTConfig(hidden_size=256, num_layers=8, num_heads=4), 0)
    assert layer.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for residual in (layer.attention.out, layer.feed_forward.down):
        assert residual.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert torch.all(layer.attention_norm.weight == 1)


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-3-27b"])
def test_sizes_with_experts_or_windows_are_refused(name: str) -> None:
    with pytest.raises(ModelSizeError, match=f"{name} has experts, .* or windows.* build it with from_pretrained"):
        GPTConfig.from_name(name)


@pytest.mark.parametrize("name", [size.name for size in MODEL_SIZES.values() if not (size.experts or size.windows)])
def test_named_sizes_have_the_parameters_that_the_planner_counts(name: str) -> None:
    config = GPTConfig.from_name(name)
    with torch.device("meta"):
        total = sum(p.numel() for p in Model(config).modules.parameters())
    assert total == MODEL_SIZES[name].num_parameters()


def test_parameters_of_variants(config: GPTConfig) -> None:
    fields = {field.name for field in dataclasses.fields(ModelSize)} - {"name", "experts", "latent", "windows"}
    size = ModelSize(name="variant", **{name: getattr(config, name) for name in fields})
    model = Model(config)
    assert sum(p.numel() for p in model.modules.parameters()) == size.num_parameters()
    layer = next(m for m in model.modules.values() if isinstance(m, gpt.DecoderLayer))
    assert sum(p.numel() for p in layer.parameters()) == size.layer_parameters()


def test_from_name_lets_sizes_follow_what_is_replaced() -> None:
    named = GPTConfig.from_name("tiny")
    assert (named.num_heads, named.num_kv_heads, named.head_dim, named.ffn_size) == (4, 2, 32, 384)
    deeper = GPTConfig.from_name("tiny", num_layers=9, seed=3)
    assert deeper.model_copy(update={"num_layers": named.num_layers, "seed": named.seed}) == named
    wider = GPTConfig.from_name("tiny", hidden_size=256, num_heads=8)
    assert (wider.num_kv_heads, wider.head_dim, wider.ffn_size) == (8, 32, 704)
    given = GPTConfig.from_name("tiny", hidden_size=256, ffn_size=100, head_dim=16, num_kv_heads=1)
    assert (given.num_kv_heads, given.head_dim, given.ffn_size) == (1, 16, 100)
    with pytest.raises(ModelSizeError, match="tiny"):
        GPTConfig.from_name("tinny")


@pytest.mark.parametrize(("fields", "message"), [
    ({"hidden_size": 30, "num_heads": 4}, "change one of them or give head_dim"),
    ({"num_heads": 4, "num_kv_heads": 3}, r"give num_kv_heads one of \[1, 2, 4\]"),
    ({"hidden_size": 12, "num_heads": 4}, "give an even head_dim or positions"),
    ({"num_layers": 0}, "num_layers = 0: expected greater than or equal to 1"),
    ({"ffn_size": -1}, "ffn_size = -1: expected greater than or equal to 1"),
    ({"positions": "alibi"}, r"positions = 'alibi': expected 'rope' or 'learned'"),
    ({"num_heads": True}, "num_heads = True: expected a valid integer"),
    ({"heads": 3}, "the model has an unknown key 'heads'; give another value, or leave it out"),
    ({"dropout": 1.0}, "dropout = 1.0: expected less than 1"),
    ({"dtype": "int8"}, "dtype = 'int8': expected 'float32', 'float64', 'bfloat16' or 'float16'"),
], ids=str)  # fmt: skip
def test_impossible_sizes_end_with_the_fix(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_learned_positions_end() -> None:
    config = GPTConfig(**{**SMALL, "positions": "learned", "max_sequence_length": 20})
    model = Model(config)
    with pytest.raises(ValueError, match="give max_sequence_length >= 23"):
        model(text(config))
    with push_slice(ActiveSlice(16, 23, LENGTH, store=SliceStore())), pytest.raises(ValueError, match=">= 23"):
        model(text(config)[:, 16:])


# -- dropout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [{"dropout": 0.5, "attention_dropout": 0.0}, {"attention_dropout": 0.5}], ids=str)
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_dropout_is_active_in_training_only(positions: str, rates: dict[str, float]) -> None:
    plain = GPTConfig(**{**SMALL, "positions": positions})
    model, tokens = Model(plain.model_copy(update=rates)), text(plain)
    assert not torch.equal(model(tokens), model(tokens))
    model.modules.eval()
    assert torch.equal(model(tokens), Model(plain)(tokens))
    assert GPTConfig(dropout=0.1).attention_dropout == 0.1


# -- position ids beside the tokens ------------------------------------------------------------------------------------

EMBEDDING = gpt.TokenEmbedding(GPTConfig(**SMALL))
TOKENS, IDS = torch.zeros(2, 12, dtype=torch.int64), torch.arange(12).repeat(2, 1)
RESTARTED = torch.cat([IDS[:, :5], IDS[:, :7]], 1)


@pytest.mark.parametrize("span", [(0, 12), (0, 6), (5, 12)], ids=str)
def test_position_ids_that_count_anew_need_documents(span: tuple[int, int]) -> None:
    """Also where they do so with the slice. Else attention would see all of the row, without a word."""
    tokens, ids = TOKENS[:, slice(*span)], RESTARTED[:, slice(*span)]
    active = ActiveSlice(*span, 12, store=SliceStore())
    with push_slice(active), pytest.raises(ValueError, match=r"count anew within a row.*set terapipe.documents"):
        EMBEDDING((tokens, ids))
    edges = Documents(((0, 5),) * 2, *span)
    for known in (active.replace(documents=edges), active.replace(mode="probe")):
        with push_slice(known):
            assert torch.equal(EMBEDDING((tokens, ids)), EMBEDDING(tokens))
    with pytest.raises(ValueError, match="count anew") if span != (5, 12) else contextlib.nullcontext():
        EMBEDDING((tokens, ids))  # without the engine, a row that starts anywhere


@pytest.mark.parametrize("ids", [IDS, IDS + 7, IDS.int()])
def test_position_ids_of_one_document_per_row(ids: Tensor) -> None:
    assert torch.equal(EMBEDDING((TOKENS, ids)), EMBEDDING(TOKENS))
    with push_slice(ActiveSlice(4, 12, 12, store=SliceStore())):
        EMBEDDING((TOKENS[:, 4:], ids[:, 4:]))


def test_learned_positions_begin_at_0() -> None:
    """Those of a document that goes on from an earlier row do not."""
    embedding = gpt.TokenEmbedding(GPTConfig(**SMALL, positions="learned"))
    embedding.check_inputs((TOKENS, RESTARTED), ((0, 5),) * 2)
    embedding.check_inputs((TOKENS, IDS.clamp_max(9)), ((0, 10, 11),) * 2)  # padding
    for ids, starts in ((IDS + 7, None), (RESTARTED + 7 * (IDS > 4), ((0, 5),) * 2)):
        with pytest.raises(ValueError, match="begin at 7, and learned positions begin at 0: leave"):
            embedding.check_inputs((TOKENS, ids), starts)
    with pytest.raises(ValueError, match="begin at 7"):
        embedding((TOKENS, IDS + 7))
    padded = torch.cat([torch.ones(2, 3, dtype=torch.int64), IDS[:, :9]], 1)  # to leave these out would not be right
    embedding.check_inputs((TOKENS, padded), None)
    with push_slice(ActiveSlice(0, 12, 12, store=SliceStore())), pytest.raises(ValueError, match="count anew"):
        embedding((TOKENS, padded))


@pytest.mark.parametrize("others", [(), (IDS, IDS), (torch.ones_like(IDS),)])
def test_inputs_for_a_layer_before_the_embedding_are_no_concern_of_it(others: tuple[Tensor, ...]) -> None:
    """An engine lets each layer look at the inputs of the first one: a mask, for example, which does not come here."""
    embedding = gpt.TokenEmbedding(GPTConfig(**SMALL))
    embedding.check_inputs((TOKENS, *others), None)
    with push_slice(ActiveSlice(0, 12, 12, store=SliceStore())):
        embedding((TOKENS,))


@pytest.mark.parametrize("others", [(), (IDS, IDS), (IDS[:, :7],), (IDS.float(),), (IDS == 0,)])
def test_other_inputs_are_not_left_out_in_silence(others: tuple[Tensor, ...]) -> None:
    """Such as a mask."""
    says = "position ids, integers of that shape"
    with pytest.raises(ValueError, match=says) if others else contextlib.nullcontext():
        EMBEDDING((TOKENS, *others))
