"""Models with experts and latent attention against their own classes in transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from terapipe_ds.costs.analytic import analytic_costs
from terapipe_ds.costs.devices import device_card
from terapipe_ds.costs.model_sizes import Experts, ModelSize, model_size
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.config_json import size_of_config
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.planner.strategy import plan_strategy

transformers = pytest.importorskip("transformers")

LENGTH = 24
NARROW = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
RANKS = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 10}
OF_ONE = {"moe_intermediate_size": 16}
GROUPS = OF_ONE | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 2}
GROUPS |= {"first_k_dense_replace": 1}
MIXED = OF_ONE | {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 8}
KINDS = ["sparse", "dense", "sparse", "dense"]
INTERVALS = {"moe_layer_start_index": 2, "moe_layer_end_index": 6, "moe_layer_interval": 2, "num_hidden_layers": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    **{family: {"num_local_experts": 8} for family in ("phimoe", "granitemoe", "minimax_m2")},
    "olmoe": {"num_experts": 8},
    "flex_olmo": {"num_experts": 8, "pad_token_id": 0},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8, "sliding_window": LENGTH},
    "dots1": GROUPS | {"head_dim": 8},
    "solar_open": GROUPS | {"head_dim": 8, "first_k_dense_replace": 0},
    "glm4_moe_lite": RANKS | GROUPS | {"num_key_value_heads": 4, "first_k_dense_replace": 0, "mlp_layer_types": KINDS},
    "sarvam_mla": RANKS | GROUPS | {"num_key_value_heads": 4},
    "sarvam_moe": GROUPS | {"head_dim": 8},
    "exaone_moe": OF_ONE | {"num_experts": 8, "num_shared_experts": 2, "head_dim": 8},
    "granitemoeshared": {"num_local_experts": 8, "shared_intermediate_size": 40},
    "ernie4_5_moe": OF_ONE | INTERVALS | {"moe_num_experts": 8, "moe_k": 2, "head_dim": 8},
    "qwen2_moe": OF_ONE | {"num_experts": 8, "shared_expert_intermediate_size": 40},
    "qwen3_moe": MIXED,
    "glm4_moe": GROUPS | {"head_dim": 8},
    "deepseek_v2": RANKS | GROUPS | {"num_key_value_heads": 4, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": RANKS | GROUPS | {"num_key_value_heads": 4},
}


def model_of(family: str, folder: Path) -> tuple[Any, ModelSize]:
    """Return the family's own model, and the size that its config.json tells."""
    config = transformers.CONFIG_MAPPING[family](**NARROW | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    config.save_pretrained(folder)
    return model, size_of_config(str(folder / "config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_flops_of_the_class(family: str, tmp_path: Path) -> None:
    model, size = model_of(family, tmp_path)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias"))
    if family == "qwen2_moe":
        matrices -= size.num_layers * size.hidden_size  # the gate of its shared expert, which is not counted
    norms = (2 * size.num_layers + 1) * size.hidden_size
    assert size.num_parameters() == norms + matrices
    # a config may leave out whether matrices are tied
    document = json.loads((path := tmp_path / "config.json").read_text())
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "tie_word_embeddings"}))
    assert size_of_config(str(path)).tied_embedding == model.config.tie_word_embeddings
    # the products of a forward: matrices, and attention over whole squares
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(size.vocab_size, (1, LENGTH)))
    squares = size.num_layers * 4 * size.num_heads * size.mean_head_dim * LENGTH**2
    triangles = squares * (LENGTH + 1) / (2 * LENGTH)
    flops = counter.get_total_flops() - squares + triangles
    gate = 2 * LENGTH * size.num_layers * size.hidden_size if family == "qwen2_moe" else 0
    assert size.training_flops(LENGTH) == pytest.approx(3 * (flops - gate), rel=1e-9)


def test_the_published_deepseek_v3() -> None:
    config = transformers.CONFIG_MAPPING["deepseek_v3"]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    assert model_size("deepseek-v3").num_parameters() == pytest.approx(total, rel=1e-6)


def test_experts_take_memory_whole_and_time_by_share() -> None:
    """Of two models with as many active parameters, the one with more experts holds more and takes hardly longer."""
    size = model_size("mixtral-8x7b")
    many = dataclasses.replace(size, experts=Experts(64, 2))
    setting: dict[str, Any] = {"num_stages": 4, "dtype": "bfloat16", "micro_batch": 1, "zero_stage": 1}
    extra = 8 * 56 * 3 * 4096 * 14336 + 8 * 56 * 4096  # eight layers, 56 more experts, and their columns of the router
    for options, per_parameter in (
        ({}, 2 + 2 + 4 + 12),  # bf16 weight and gradient, fp32 sum, and the optimizer's copy and states
        ({"zero_stage": 0}, 2 + 2 + 2 + 12),  # the sum is in bf16
        ({"gradient_dtype": "bfloat16"}, 2 + 2 + 12),  # another optimizer, whose sum is the gradient
    ):
        held = [MemoryModel.of_model(one, **setting | options).parts[1].static_bytes for one in (size, many)]
        assert held[1] - held[0] == pytest.approx(per_parameter * extra, rel=1e-9)
    few, more = (analytic_costs(one, "h100", num_stages=4)[1].forward_s(65536, 0) for one in (size, many))
    assert few < more < 1.02 * few
    # a latent is narrow, but slices keep whole keys of 192 and values of 128 numbers for each of 128 heads
    latent = MemoryModel.of_model(model_size("deepseek-v3"), **setting).parts[1]
    layers = 15
    assert latent.store_bytes_per_token == layers * 2 * 128 * (192 + 128)


def test_a_plan_and_refusals(tmp_path: Path) -> None:
    cluster = Cluster(device_card("h200"), 2, 8)
    question: dict[str, Any] = {"global_batch_size": 32, "sequence_length": 4096, "schedule": "1f1b", "stages": 2}
    best = plan_strategy("qwen3-30b-a3b", cluster, **question)
    flops = 6 * (3.35e9 - 151936 * 2048) * 32 * 4096 + 48 * 3 * 4 * 32 * 128 * 4096**2 / 2 * 32
    assert best.model_flops_per_s * best.predicted_s * 16 == pytest.approx(flops, rel=0.02)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NARROW | {"model_type": "jetmoe", "num_local_experts": 8}))
    with pytest.raises(PlannerError, match="num_local_experts: experts are counted for deepseek_v2, .*mixtral"):
        size_of_config(str(path))
    path.write_text(json.dumps(NARROW | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": None}))
    with pytest.raises(PlannerError, match="lacks num_experts_per_tok"):
        size_of_config(str(path))


@pytest.mark.parametrize(("fields", "text"), [
    ({"mlp_only_layers": 5}, "mlp_only_layers is no list of int"),
    ({"mlp_only_layers": [[]]}, "mlp_only_layers is no list of int"),
    ({"architectures": 5}, "architectures is no list of str"),
    ({"num_hidden_layers": 10**12}, "1000000000000 layers are more than 10000"),
])  # fmt: skip
def test_fields_of_a_stranger(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NARROW | {"model_type": "qwen3_moe"} | MIXED | fields))
    with pytest.raises(PlannerError, match=text):
        size_of_config(str(path))
