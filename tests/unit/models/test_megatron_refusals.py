"""What cannot be trained in token slices is refused when the model is built, with the reason."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT
from terapipe_ds.models.megatron.refusals import check_config, window_of

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "hidden_dropout": 0.0}
MOE: dict[str, Any] = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}


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
    "sequence parallel": {**TP2, "sequence_parallel": True},
    "a fused softmax, which no slice uses": {"masked_softmax_fusion": True},
    "SwiGLU": {"gated_linear_unit": True, "add_bias_linear": False},
    "a window": {"window_size": (3, 0)},
    "a window of all tokens": {"window_size": (-1, -1)},
    "windows in some layers": {"window_size": [3, 0], "window_attn_skip_freq": [0, 1]},
    "a softmax off by one": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_type": "learnable"},
    "gates": {**TP2, "attention_output_gate": True, "num_query_groups": 2},
    "layers without rope": {"no_rope_freq": [0, 1]},
    "recompute block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "recompute uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    "a residual stream in the dtype of fp32 parameters": {"fp32_residual_connection": True},
    "experts": MOE,
    "experts, coefficients zero": {**MOE, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                                   "moe_aux_loss_coeff": [0.0, 0.0]},
    "coefficients without experts": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    "experts, sequence parallel": {**MOE, **TP2, "sequence_parallel": True},
}  # fmt: skip


def words(text: str) -> list[str]:
    return text.split()


SWITCHED_ON = words("""
    hybrid_context_parallel multi_latent_attention is_hybrid_model qk_clip log_max_attention_logit enable_cuda_graph
    tp_comm_overlap gradient_accumulation_fusion delay_wgrad_compute defer_embedding_wgrad_compute
    overlap_moe_expert_parallel_comm calculate_per_token_loss cpu_offloading fine_grained_activation_offloading
    distribute_saved_activations account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    enable_autocast moe_enable_routing_replay inference_rng_tracker
    use_inference_optimized_layers inference_fuse_tp_communication flash_decode mtp_standalone
    init_model_with_meta_device use_kitchen batch_invariant_mode apply_rope_fusion persist_layer_norm
""")  # the last two on a CPU
FUNCTIONS = words("finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func")
VALUES = {
    "context_parallel_size": 2, "mtp_num_layers": 1, "experimental_attention_variant": "dsa",
    "linear_attention_freq": 4, "window_size": (128, 1), "softmax_type": "other", "mrope_section": [2, 1, 1],
    "fp8": "hybrid", "fp4": "e2m1", "cuda_graph_impl": "local", "virtual_pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Et|tL", "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 1, "num_microbatches_with_partial_activation_checkpoints": 1,
    **dict.fromkeys(SWITCHED_ON, True), **dict.fromkeys(FUNCTIONS, print),
}  # fmt: skip
WITH_EXPERTS = {
    "moe_z_loss_coeff": 1e-3, "moe_expert_capacity_factor": 1.0, "moe_token_dropping": True,
    "moe_router_enable_expert_bias": True, "moe_router_force_load_balancing": True, "expert_model_parallel_size": 2,
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in VALUES.items()},
    **{name: {**MOE, name: value} for name, value in WITH_EXPERTS.items()},
    "moe_aux_loss_coeff": {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    r"moe_aux_loss_coeff=\[0.0, 0.001\]": {**MOE, "moe_router_load_balancing_type": ["aux_loss", "none"],
                               "moe_aux_loss_coeff": [0.0, 1e-3]},
    "window_attn_skip_freq=0": {"window_size": (3, 0), "window_attn_skip_freq": 0},
    r"window_attn_skip_freq=\[1\]": {"window_size": (3, 0), "window_attn_skip_freq": [1]},
    r"window_size=\(3, -1\)": {"window_size": (3, -1)},
    r"window_size=\(-2, 0\)": {"window_size": (-2, 0)},
    r"window_size=\(3,\)": {"window_size": (3,)},
    "sinkhorn": {**MOE, "moe_router_load_balancing_type": "sinkhorn"},
    "no sequence_parallel": {**MOE, **TP2},
    "expert_tensor_parallel_size": {**MOE, **TP2, "sequence_parallel": True, "expert_tensor_parallel_size": 4},
    "attention_output_gate=True with fewer": {**TP2, "attention_output_gate": True, "num_query_groups": 1},
    "each rank would add the whole bias": {**MOE, **TP2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
    "moe_token_dispatcher_type='flex'": {**MOE, "moe_token_dispatcher_type": "flex"},
    "moe_token_dispatcher_type='alltoall'": {**MOE, "moe_token_dispatcher_type": "alltoall"},  # on a CPU
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "uniform",
                             "recompute_num_layers": 2},
    "fp32_residual_connection": {"fp32_residual_connection": True, "params_dtype": torch.bfloat16},
    "inference_optimized": {"transformer_impl": "inference_optimized"},
    "instead of HeterogeneousTransformerConfig": {"heterogeneous_block_specs": True},
}  # fmt: skip


# Fields that the layers honour, slice by slice as in a whole sequence, and fields that say nothing here because what
# they belong to is refused or is not Megatron's to do. One that is in neither list nor above was never thought about.
HONOURED = words("""
    perform_initialization use_cpu_initialization fp16 bf16 params_dtype deterministic_mode use_te_rng_tracker
    num_layers hidden_size num_attention_heads softmax_scale num_query_groups ffn_hidden_size kv_channels
    hidden_dropout attention_dropout fp32_residual_connection apply_residual_connection_post_layernorm
    layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func
    activation_func_fp8_input_store glu_linear_offset activation_func_clamp_value rotary_interleaved normalization
    qk_layernorm qk_l2_norm attention_output_gate no_rope_freq init_method output_layer_init_method init_method_std
    embedding_init_method embedding_init_method_std apply_query_key_layer_scaling attention_softmax_in_fp32
    bias_activation_fusion bias_dropout_fusion memory_efficient_layer_norm use_fused_weighted_squared_relu
    use_te_activation_func recompute_granularity recompute_method recompute_num_layers recompute_modules
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq
    moe_ffn_hidden_size moe_router_topk moe_router_topk_limited_devices moe_router_padding_for_quantization
    moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_input_jitter_eps moe_layer_recompute moe_permute_fusion moe_router_fusion
    moe_apply_probs_on_input moe_latent_size clone_scatter_output_in_embedding disable_parameter_transpose_cache
    async_tensor_model_parallel_allreduce symmetric_ar_type tensor_model_parallel_size sequence_parallel
    pipeline_model_parallel_size
""")
WITHOUT_EFFECT = words("""
    pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank moe_extended_tp
    timers autocast_dtype tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    cross_entropy_loss_fusion cross_entropy_fusion_impl tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    tp_comm_bootstrap_backend ep_overlap_early_attn_memory_release pipeline_dtype variable_seq_lengths
    overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
    wgrad_deferral_limit overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage cpu_offloading_num_layers
    _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    barrier_with_L1_time mtp_loss_scaling_factor attention_backend qk_clip_alpha
    qk_clip_threshold test_mode dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads disable_bf16_reduced_precision_matmul masked_softmax_fusion
    fused_single_qkv_rope fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen_attention
    kitchen_attention_backend fp4_recipe fp4_param fp4_quantizer_factory moe_router_bias_update_rate
    moe_flex_dispatcher_backend moe_enable_deepep moe_per_layer_logging moe_pad_expert_input_to_capacity
    moe_token_drop_policy moe_deepep_num_sms moe_hybridep_num_sms cp_comm_type cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_scope config_logger_dir
    inference_sampling_seed mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    use_mamba_mem_eff_path mlp_chunks_for_prefill hetereogenous_dist_checkpoint quant_recipe offload_modules
    min_offloaded_tensor_size
""")
OF_LATENT_ATTENTION = words("""
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
""")


def test_every_field_of_the_config_was_looked_at() -> None:
    """A new version of megatron-core may bring a field that slices change or that nobody acts on."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    refused = {name for changes in REFUSED.values() for name in changes}
    known = {*HONOURED, *WITHOUT_EFFECT, *refused}
    assert fields - known == set(), "decide: refuse them, or say that they are honoured"
    assert known - fields == set(), "they are no longer there"
    assert not {*HONOURED} & {*WITHOUT_EFFECT}


@pytest.mark.parametrize("changes", SUPPORTED.values(), ids=SUPPORTED)
def test_what_is_supported_is_not_refused(changes: dict[str, Any]) -> None:
    check_config(config(**changes))


@pytest.mark.parametrize("named", REFUSED)
def test_refused_with_the_name_of_the_field(named: str) -> None:
    with pytest.raises(MegatronConfigError, match=named) as caught:
        check_config(config(**REFUSED[named]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2, "one problem, one line"


def test_latent_attention() -> None:
    both = MLATransformerConfig, TransformerConfig
    fields, common = ({field.name for field in dataclasses.fields(each)} for each in both)
    assert fields - common == {*OF_LATENT_ATTENTION, "cache_mla_latents"}
    check_config(MLATransformerConfig(**SIZES))
    with pytest.raises(MegatronConfigError, match="cache_mla_latents=True: it is for inference"):
        check_config(MLATransformerConfig(**SIZES, cache_mla_latents=True))
    with pytest.raises(MegatronConfigError, match="Build that instead of TransformerConfig"):
        check_config(config(multi_latent_attention=True))
    with pytest.raises(MegatronConfigError, match=r"rotary_base=5: .* of MLATransformerConfig instead"):
        MegatronGPT(MLATransformerConfig(**SIZES), vocab_size=8, max_sequence_length=8, rotary_base=5)


@pytest.mark.parametrize(("size", "frequency", "windows"), [
    (None, 2, [None, None, None]),
    ((3, 0), None, [4, 4, 4]),
    ((0, 0), None, [1, 1, 1]),
    ((-1, 0), None, [None, None, None]),
    ((3, 0), 2, [4, None, 4]),
    ((3, 0), 1, [None, None, None]),
    ((3, 0), [0, 1, 0], [None, 4, None]),
])  # fmt: skip
def test_windows_count_the_token_itself_where_megatron_has_them(
    size: Any, frequency: Any, windows: list[int | None]
) -> None:
    shape = config(window_size=size, window_attn_skip_freq=frequency)
    assert [window_of(shape, layer_number) for layer_number in (1, 2, 3)] == windows


def test_all_problems_at_once() -> None:
    with pytest.raises(MegatronConfigError, match=r"(?s)mtp_num_layers.*tp_comm_overlap.*fp8"):
        check_config(config(mtp_num_layers=1, fp8="hybrid", tp_comm_overlap=True))


def test_cuda_kernels_are_not_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.models.megatron import refusals

    monkeypatch.setattr(refusals, "on_cpu", lambda: False)
    check_config(config(apply_rope_fusion=True, persist_layer_norm=True, params_dtype=torch.bfloat16))
    check_config(config(**MOE, moe_token_dispatcher_type="alltoall"))
    with pytest.raises(MegatronConfigError, match="deterministic_mode=True: kernels of attention obey torch"):
        check_config(config(deterministic_mode=True))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_config(config(deterministic_mode=True))
    fused = MLATransformerConfig(**SIZES)
    fused.apply_rope_fusion = True
    with pytest.raises(MegatronConfigError, match="apply_rope_fusion=True with multi_latent_attention"):
        check_config(fused)


def test_a_misspelt_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="MegatronGPT has no argument rotary_bse; did you mean rotary_base?"):
        MegatronGPT(config(), vocab_size=64, max_sequence_length=64, rotary_bse=1)
