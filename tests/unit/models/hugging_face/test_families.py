"""The table of families: each trains in slices as a whole model does, the way it takes, or is refused with a reason."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.models.hugging_face import ModelRefusedError
from terapipe_ds.models.hugging_face.create import model_without_weights
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.weights.in_memory import changes_of
from tests.hugging_face_families import BY_CACHE, CONFIGS, IS_4, NOT_IN_FP64, REFUSED, WITH_STATES, config_of
from tests.hugging_face_table import documented, measured
from tests.unit.models.hugging_face.sliced_model import (
    Pipeline,
    errors,
    errors_of,
    in_fp64,
    rounding_errors,
    ways_of,
    whole_model,
)

FP32_INSIDE = 1e-6
# The models themselves are farther than that from the exact gradients: those of decays go through exponentials of sums
# of fp32 numbers. In 4.57 some of Apertus's parameters are bf16, whatever the model is.
ROUGH = {"lara_mini", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"} | ({"apertus"} if IS_4 else set())


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_trains_in_slices_as_a_whole(family: str) -> None:
    """First in fp64 throughout, then as the family computes: with fp32 inside where its code says so."""
    row = measured(family)
    assert ("cache" in row.way or row.way == "both") == (family in BY_CACHE)
    assert ("states" in row.way) == (family in WITH_STATES)
    assert row.exact <= 1e-10
    assert (row.as_it_computes is None) == (family in NOT_IN_FP64)
    if family in ROUGH:
        ours, theirs = rounding_errors(config_of(family))
        assert ours <= 1.1 * theirs and row.as_it_computes <= 2 * theirs
    else:
        assert row.as_it_computes is None or row.as_it_computes <= FP32_INSIDE
    assert documented()[family].startswith(row.way)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_that_nobody_has_changed_is_not_refused(family: str, tmp_path: Path) -> None:
    """As its class makes it, as it is read from a folder, and after a step and a generation."""
    model = AutoModelForCausalLM.from_config(config_of(family))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 60, (1, 8))
    used = AutoModelForCausalLM.from_pretrained(tmp_path)
    used(tokens, labels=tokens).loss.backward()
    used.generate(tokens, max_new_tokens=2, do_sample=False)
    with contextlib.suppress(ValueError, IndexError):  # mamba2 of transformers has no such outputs
        used(tokens, output_hidden_states=True, use_cache=False)
    if used.supports_gradient_checkpointing:
        used.gradient_checkpointing_enable()
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path), used):
        assert not changes_of(each, model_without_weights(each.config, each.dtype), None).values


def test_the_document_has_all_families() -> None:
    """And no other; those that one version has not, or refuses, are a dash or a word in its column."""
    rows = documented()
    assert {family for family, way in rows.items() if not way.startswith(("-", "refused"))} == set(CONFIGS)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_sliced_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(ModelRefusedError, match=REFUSED[family][1]):
        pipeline = Pipeline(config_of(family))
        ways_of(pipeline)


@pytest.mark.parametrize(("family", "field", "value", "named"), [
    ("opt", "layerdrop", 0.1, "layerdrop"),
    ("mixtral", "output_router_logits", True, "output_router_logits"),
    ("bamba", "z_loss_coefficient", 0.01, "z_loss_coefficient is 0.01"),
    ("llama", "return_dict", False, "return_dict is False.*Set it to True"),
])  # fmt: skip
def test_a_field_that_slices_cannot_follow_is_refused(family: str, field: str, value: Any, named: str) -> None:
    config = config_of(family)
    setattr(config, field, value)
    with pytest.raises(ModelRefusedError, match=named):
        Pipeline(config)


class _Before(nn.Module):
    """A decoder layer in a forward that changes its inputs."""

    def __init__(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "layer" else getattr(self.layer, name)

    def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
        return self.layer(self.change(hidden), *args, **named)


@pytest.mark.parametrize(("between", "at_end", "named"), [
    (lambda x, _: x, None, ""),
    (lambda x, _: x / 2, None, "changes the hidden states before decoder layer 1"),
    (lambda x, embedded: x + embedded, None, "changes the hidden states before decoder layer 1"),
    (lambda x, _: x, lambda x, embedded: x + embedded, "logits depend on more than the hidden states of the last"),
])  # fmt: skip
def test_a_forward_that_does_more_than_run_its_layers_is_refused(between: Any, at_end: Any, named: str) -> None:
    """Nobody would do between stages what it does between layers."""
    own = modeling_llama.LlamaModel.forward

    def forward(model: Any, *args: Any, **given: Any) -> Any:
        layers, embedded = model.layers, list[Tensor]()
        changes = [lambda x: embedded.append(x) or x, *[lambda x: between(x, *embedded)] * (len(layers) - 1)]  # type: ignore[func-returns-value]
        model.layers = nn.ModuleList(map(_Before, layers, changes))
        try:
            outputs = own(model, *args, **given)
        finally:
            model.layers = layers
        if at_end is not None:
            outputs.last_hidden_state = at_end(outputs.last_hidden_state, *embedded)
        return outputs

    refused = pytest.raises(ModelRefusedError, match=named) if named else contextlib.nullcontext()
    with mock.patch.object(modeling_llama.LlamaModel, "forward", forward), refused:
        Pipeline(config_of("llama"))


@pytest.mark.skipif(IS_4, reason="doge is refused with transformers 4.57")
def test_a_choice_of_tokens_by_weight_is_that_of_the_whole_row() -> None:
    """Where no two tokens of a row have equal weights: with repeated tokens or a new model's weights, they do."""
    config, lengths = config_of("doge"), (13, 2, 17, 9)
    config.keep_window_size = 6
    pipeline = Pipeline(config)
    with torch.no_grad():
        for name, parameter in pipeline.parameters.items():
            if name.endswith(".A"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
    model = whole_model(config, pipeline.parameters)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.stack([torch.randperm(config.vocab_size, generator=generator)[: sum(lengths)] for _ in range(2)])
    assert max(errors_of(pipeline, model, {"input_ids": tokens, "labels": tokens}, lengths)) <= 1e-10


def plain(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, cap: float | None = None, **_: Any
) -> Any:
    k, v = (modeling_llama.repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    scores = (q @ k.mT) * scaling
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (probabilities @ v).transpose(1, 2).contiguous(), None


def sharp(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    return plain(module, q, k, v, mask, 2 * scaling)


def capped(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    return plain(module, q, k, v, mask, scaling, cap=50.0)


def of_whole_rows(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    return plain(module, q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask, 2 * scaling)


def in_half_precision(module: nn.Module, q: Tensor, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"only fp16 and bf16, not {q.dtype}")


@functools.wraps(sdpa_attention_forward)
def sharp_sdpa(*inputs: Any, **options: Any) -> Any:
    return sharp(*inputs, **options)


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize(
    ("function", "way"), [(plain, "fast"), (sharp, "slow"), (sharp_sdpa, "slow"), (capped, "slow")]
)
def test_an_attention_of_the_owner_is_the_one_that_runs(function: Any, way: str, is_registered: bool) -> None:
    """Registered under a name, or the eager function of a class of one's own."""
    config, ways, mapping = config_of("llama"), list[str](), AttentionInterface._global_mapping
    config._attn_implementation = "mine" if is_registered else "eager"
    eager = modeling_llama.eager_attention_forward if is_registered else function
    with (
        in_fp64(),
        mock.patch.dict(mapping, {"mine": function}),
        mock.patch.object(modeling_llama, "eager_attention_forward", eager),
    ):
        assert max(errors(config, change=lambda pipeline: ways.extend(ways_of(pipeline)))) <= 1e-10
    assert ways == [way, way]


@pytest.mark.parametrize("function", [sharp, in_half_precision])
def test_an_eager_attention_that_the_owner_does_not_use_decides_nothing(function: Any) -> None:
    """The class has sdpa, by which its model computes."""
    pipeline = Pipeline(config_of("llama"))
    with mock.patch.object(modeling_llama, "eager_attention_forward", function):
        assert ways_of(pipeline) == ["fast", "fast"]


@pytest.mark.parametrize(("weight", "factor"), [
    ("o_proj", 0.0),  # training may start from zeros, as in LayerScale and µP
    ("layernorm", 0.01),  # all scores are alike, as in the first layers of pretrained models
    ("layernorm", 100.0),  # each token sees one other
    ("proj", 1e-30), ("proj", 1e30),
])  # fmt: skip
@pytest.mark.parametrize(("function", "way"), [(plain, "fast"), (sharp, "slow")])
def test_an_attention_decides_whatever_the_size_of_weights(function: Any, way: str, weight: str, factor: float) -> None:
    config = config_of("llama")
    config._attn_implementation = "mine"
    with mock.patch.dict(AttentionInterface._global_mapping, {"mine": function}):
        pipeline = Pipeline(config)
        changed = [parameter for name, parameter in pipeline.parameters.items() if weight in name]
        with torch.no_grad():
            torch._foreach_mul_(changed, factor)
        assert changed and ways_of(pipeline) == [way, way]


@pytest.mark.parametrize("factor", [1, 2])
def test_a_loss_without_logits_is_that_of_evaluation(factor: int) -> None:
    """Liger's kernel makes it of weights in training, without a call of the output matrix."""
    own = LlamaForCausalLM.forward

    def forward(model: Any, past_key_values: Any = None, labels: Any = None, **named: Any) -> Any:
        if model.training and labels is not None:
            return SimpleNamespace(loss=model.lm_head.weight.sum())
        outputs = own(model, past_key_values=past_key_values, labels=labels, **named)
        outputs.loss = None if outputs.loss is None else factor * outputs.loss
        return outputs

    refused = contextlib.nullcontext() if factor == 1 else pytest.raises(ModelRefusedError, match="gives the loss")
    with mock.patch.object(LlamaForCausalLM, "forward", forward), refused:
        outline = Outline(model_without_weights(config_of("llama"), torch.float32))
        outline.check_loss(gpt_loss)
        assert outline.model.training


@pytest.mark.parametrize("is_newer", [False, True])
def test_trials_multiply_in_fp32(is_newer: bool) -> None:
    """TF32 rounds so much that routers chose other experts, and one of twelve models with 64 experts was refused.

    `Trainer(tf32=True)` sets the newer names of the precision, after which torch refuses to read the older one.
    """
    products, seen = torch.backends.cuda.matmul, set[str]()

    def noted(*args: Any, **named: Any) -> Any:
        seen.add(products.fp32_precision)
        return plain(*args, **named)

    config, before = config_of("llama"), torch.get_float32_matmul_precision()
    config._attn_implementation = "mine"
    if is_newer:
        products.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.dict(AttentionInterface._global_mapping, {"mine": noted}):
            ways_of(Pipeline(config))
        assert (seen, products.fp32_precision) == ({"ieee"}, "tf32")
        assert is_newer or products.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_of_any_size_attend_alike(family: str) -> None:
    """Large ones magnify rounding, which differs between two ways of attention."""
    pipeline, generator = Pipeline(config_of(family), torch.float32), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pipeline.parameters.values():
            parameter.copy_(4 * torch.randn(parameter.shape, generator=generator))
    assert ways_of(pipeline) == ["fast", "fast"]


def test_layers_that_differ_in_no_plain_number_are_tried_one_by_one() -> None:
    """Numbers in a tuple: the first layer attends as usual, and the second does not."""
    config, ways, own = config_of("llama"), list[str](), modeling_llama.LlamaAttention.__init__
    config._attn_implementation = "eager"

    def set_up(layer: Any, config: Any, layer_idx: int) -> None:
        own(layer, config, layer_idx)
        layer.factors = (1 + layer_idx,)

    def scaled(module: Any, q: Tensor, *args: Any, **named: Any) -> Any:
        return plain(module, q * module.factors[0], *args, **named)

    with (
        in_fp64(),
        mock.patch.object(modeling_llama, "eager_attention_forward", scaled),
        mock.patch.object(modeling_llama.LlamaAttention, "__init__", set_up),
    ):
        assert max(errors(config, change=lambda pipeline: ways.extend(ways_of(pipeline)))) <= 1e-10
    assert ways == ["fast", "slow"]


@pytest.mark.parametrize(("function", "named"), [
    (of_whole_rows, "'mine' computes something else"),
    (in_half_precision, "'mine' cannot run a trial in fp32, RuntimeError: only fp16 .* Make the model with 'sdpa'"),
])  # fmt: skip
def test_an_attention_of_the_owner_that_slices_cannot_follow_is_refused(function: Any, named: str) -> None:
    config = config_of("llama")
    config._attn_implementation = "mine"
    with mock.patch.dict(AttentionInterface._global_mapping, {"mine": function}):
        with pytest.raises(ModelRefusedError, match=named):
            ways_of(Pipeline(config))
