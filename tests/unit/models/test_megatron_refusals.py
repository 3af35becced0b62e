"""What cannot be trained in token slices is refused when the model is built, with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from terapipe_ds.models.megatron import MegatronConfigError
from terapipe_ds.models.megatron.refusals import check_config

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "hidden_dropout": 0.0}
MOE: dict[str, Any] = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}


def config(**changes: Any) -> TransformerConfig:
    """As a user would build it where the constructor lets him, and with fields set afterwards where it checks for
    things that do not matter here (devices, other packages)."""
    built = TransformerConfig(**SIZES)
    for name, value in changes.items():
        assert name in {field.name for field in dataclasses.fields(built)}
        setattr(built, name, value)
    return built


SUPPORTED = {
    "plain": {},
    "grouped queries": {"num_query_groups": 2},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "SwiGLU": {"gated_linear_unit": True, "add_bias_linear": False},
    "layers without rope": {"no_rope_freq": [0, 1]},
    "recompute block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "recompute uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    "experts": MOE,
    "experts, coefficients zero": {**MOE, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                                   "moe_aux_loss_coeff": [0.0, 0.0]},
    "coefficients without experts": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    "experts, sequence parallel": {**MOE, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "context_parallel_size": {"context_parallel_size": 2},
    "hybrid_context_parallel": {"hybrid_context_parallel": True},
    "mtp_num_layers": {"mtp_num_layers": 1},
    "multi_latent_attention": {"multi_latent_attention": True},
    "experimental_attention_variant": {"experimental_attention_variant": "dsa"},
    "linear_attention_freq": {"linear_attention_freq": 4},
    "is_hybrid_model": {"is_hybrid_model": True},
    "window_size": {"window_size": (128, 0)},
    "softmax_type": {"softmax_type": "learnable"},
    "mrope_section": {"mrope_section": [2, 1, 1]},
    "qk_clip": {"qk_clip": True},
    "log_max_attention_logit": {"log_max_attention_logit": True},
    "moe_aux_loss_coeff": {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "moe_aux_loss_coeff > 0": {**MOE, "moe_router_load_balancing_type": ["aux_loss", "none"],
                               "moe_aux_loss_coeff": [0.0, 1e-3]},
    "moe_z_loss_coeff": {**MOE, "moe_z_loss_coeff": 1e-3},
    "sinkhorn": {**MOE, "moe_router_load_balancing_type": "sinkhorn"},
    "moe_expert_capacity_factor": {**MOE, "moe_expert_capacity_factor": 1.0},
    "moe_token_dropping": {**MOE, "moe_token_dropping": True},
    "moe_router_enable_expert_bias": {**MOE, "moe_router_enable_expert_bias": True},
    "moe_router_force_load_balancing": {**MOE, "moe_router_force_load_balancing": True},
    "no sequence_parallel": {**MOE, "tensor_model_parallel_size": 2},
    "expert_model_parallel_size": {**MOE, "expert_model_parallel_size": 2},
    "expert_tensor_parallel_size": {**MOE, "tensor_model_parallel_size": 2, "sequence_parallel": True,
                                    "expert_tensor_parallel_size": 4},
    "moe_token_dispatcher_type='flex'": {**MOE, "moe_token_dispatcher_type": "flex"},
    "moe_token_dispatcher_type='alltoall'": {**MOE, "moe_token_dispatcher_type": "alltoall"},  # on a CPU
    "fp8": {"fp8": "hybrid"},
    "fp4": {"fp4": "e2m1"},
    "cuda_graph_impl": {"cuda_graph_impl": "local"},
    "CUDA graphs": {"enable_cuda_graph": True},
    "tp_comm_overlap": {"tp_comm_overlap": True},
    "gradient_accumulation_fusion": {"gradient_accumulation_fusion": True},
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "defer_embedding_wgrad_compute": {"defer_embedding_wgrad_compute": True},
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "calculate_per_token_loss": {"calculate_per_token_loss": True},
    "virtual_pipeline_model_parallel_size": {"virtual_pipeline_model_parallel_size": 2},
    "pipeline_model_parallel_layout": {"pipeline_model_parallel_layout": "Et|tL"},
    "cpu_offloading": {"cpu_offloading": True},
    "fine_grained_activation_offloading": {"fine_grained_activation_offloading": True},
    "distribute_saved_activations": {"distribute_saved_activations": True},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "uniform",
                             "recompute_num_layers": 2},
    "init_model_with_meta_device": {"init_model_with_meta_device": True},
    "inference_optimized": {"transformer_impl": "inference_optimized"},
    "use_kitchen": {"use_kitchen": True},
    "apply_rope_fusion": {"apply_rope_fusion": True},  # on a CPU
    "persist_layer_norm": {"persist_layer_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("changes", SUPPORTED.values(), ids=SUPPORTED)
def test_what_is_supported_is_not_refused(changes: dict[str, Any]) -> None:
    check_config(config(**changes))


@pytest.mark.parametrize("named", REFUSED)
def test_refused_with_the_name_of_the_field(named: str) -> None:
    with pytest.raises(MegatronConfigError, match=named.split(" >")[0].replace("(", r"\(")) as caught:
        check_config(config(**REFUSED[named]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2, "one problem, one line"


def test_latent_attention_is_refused_as_its_own_config_class_says_it() -> None:
    with pytest.raises(MegatronConfigError, match="multi_latent_attention"):
        check_config(MLATransformerConfig(**SIZES))


def test_all_problems_at_once() -> None:
    with pytest.raises(MegatronConfigError, match=r"(?s)mtp_num_layers.*fp8.*tp_comm_overlap"):
        check_config(config(mtp_num_layers=1, fp8="hybrid", tp_comm_overlap=True))


def test_cuda_kernels_are_not_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.models.megatron import refusals

    monkeypatch.setattr(refusals, "on_cpu", lambda: False)
    check_config(config(apply_rope_fusion=True, persist_layer_norm=True, params_dtype=torch.bfloat16))
    check_config(config(**MOE, moe_token_dispatcher_type="alltoall"))
