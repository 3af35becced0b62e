"""Model sizes against published numbers."""

import dataclasses

import pytest

from terapipe_ds.costs.model_sizes import Experts, ModelSizeError, model_size

# Published or counted from the released checkpoints.
LLAMA = {"llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496}
# TeraPipe's table 1: layers, hidden size, heads; and what the name promises, in billions.
GPT3 = {
    "gpt3-1b": (24, 2048, 16, 1.3),
    "gpt3-13b": (40, 5120, 40, 13.0),
    "gpt3-44b": (96, 6144, 48, 44.0),
    "gpt3-175b": (96, 12288, 96, 175.0),
}


@pytest.mark.parametrize("name", LLAMA)
def test_llama_parameters(name: str) -> None:
    assert model_size(name).num_parameters() == LLAMA[name]


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_table(name: str) -> None:
    layers, hidden, heads, billions = GPT3[name]
    size = model_size(name)
    assert (size.num_layers, size.hidden_size, size.num_heads, size.head_dim) == (layers, hidden, heads, 128)
    assert size.num_parameters() / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_closed_form(name: str) -> None:
    """12 l h^2 (1 + 13/(12 h)) + (V + s) h of Narayanan et al. (2104.04473), plus the final norm."""
    size = model_size(name)
    layers = size.num_layers * (12 * size.hidden_size**2 + 13 * size.hidden_size)
    assert size.num_parameters() == layers + (50257 + 2048) * size.hidden_size + 2 * size.hidden_size


# Billions of parameters, in total and active per token, from the models' reports: arXiv 2401.04088, 2505.09388,
# 2412.19437, and 2508.10925 (table 1, whose active parameters lack the embedding).
EXPERTS = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "gpt-oss-20b": (20.91, 3.61 + 0.58),
    "gpt-oss-120b": (116.83, 5.13 + 0.58),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_parameters_of_experts(name: str) -> None:
    size, (total, active) = model_size(name), EXPERTS[name]
    assert size.num_parameters() / 1e9 == pytest.approx(total, rel=0.002)
    assert size.active_parameters() / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("gemma-3-12b", 10.759), ("gemma-3-27b", 25.6)])
def test_parameters_of_gemma_3(name: str, billions: float) -> None:
    """Those outside the embedding, by table 1 of arXiv 2503.19786; five of six layers have a window."""
    size = model_size(name)
    assert (size.num_parameters() - size.embedding_parameters()) / 1e9 == pytest.approx(billions, rel=1e-4)
    assert size.windows[:7] == (*[1024] * 5, 0, 1024)


def test_impossible_experts() -> None:
    with pytest.raises(ModelSizeError, match="per_token from 1 to number"):
        Experts(8, 9)


def test_names() -> None:
    assert model_size("GPT3-175B") is model_size("gpt3-175b")
    with pytest.raises(
        ModelSizeError, match=r"unknown model size 'gpt3-157b'; did you mean 'gpt3-175b'\? Known: .*tiny"
    ):
        model_size("gpt3-157b")
    with pytest.raises(ModelSizeError, match="unknown model size 'qqq'; known: nano, tiny"):
        model_size("qqq")
    with pytest.raises(ModelSizeError):
        model_size(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_layers": 0}, "num_layers = 0"),
    ({"ffn_size": -4}, "ffn_size = -4"),
    ({"vocab_size": 3.5}, "vocab_size = 3.5"),
    ({"num_kv_heads": True}, "num_kv_heads = True"),
    ({"num_kv_heads": 3}, "does not divide by num_kv_heads = 3"),
    ({"positions": "alibi"}, "positions = 'alibi'"),
])  # fmt: skip
def test_impossible_sizes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelSizeError, match=f"model size 'tiny': .*{message}"):
        dataclasses.replace(model_size("tiny"), **changes)  # type: ignore[arg-type]
