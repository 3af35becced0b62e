"""Refuse a `TransformerConfig` that cannot be trained in token slices, or not by DeepSpeed's pipeline engine.

The check refuses computations that see more of a sequence than attention over the slice store gives them, and
machinery of Megatron-LM's own training loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from terapipe_ds.models.megatron.kernels import on_cpu, uses_transformer_engine


class MegatronConfigError(ValueError):
    """Report a model or a layout that cannot be trained in token slices; the message ends with the change to make."""


def check_config(config: TransformerConfig) -> None:
    """Raise MegatronConfigError with every problem of the config, one per line."""
    if problems := list(_problems(config)):
        raise MegatronConfigError("\n  ".join(["this TransformerConfig cannot be trained in token slices:", *problems]))


# Fields that must keep megatron-core's default, by the reason.
_ANYWHERE = {
    "each rank would hold a part of every slice, and slices already divide a long sequence":
        "context_parallel_size hybrid_context_parallel",
    "it mixes tokens outside of the slice store":
        "experimental_attention_variant linear_attention_freq is_hybrid_model",
    "it needs tokens of other slices, or their positions": "mtp_num_layers mtp_standalone mrope_section",
    "the largest score is a maximum over the whole sequence, which fused attention does not give":
        "qk_clip log_max_attention_logit",
    "scaling factors follow the largest value of one forward pass, so that slices change the result": "fp4",
    "attention in slices runs in the precision of its inputs": "fp8_dot_product_attention fp8_multi_head_attention",
    "DeepSpeed's optimizers have no parameters in fp8": "fp8_param",
    "a CUDA graph has one slice length and one prefix": "enable_cuda_graph external_cuda_graph cuda_graph_impl",
    "Transformer Engine's user buffers have one fixed length": "tp_comm_overlap",
    "DeepSpeed's grid has no expert axis: all experts are on every tensor-parallel rank":
        "expert_model_parallel_size moe_enable_deepep",
    "DeepSpeed's optimizers have no param.main_grad, to which it adds": "gradient_accumulation_fusion",
    "only Megatron's own training loop and schedule act on it":
        "delay_wgrad_compute defer_embedding_wgrad_compute overlap_moe_expert_parallel_comm calculate_per_token_loss "
        "enable_autocast finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
        "num_microbatches_with_partial_activation_checkpoints",
    "DeepSpeed cuts the layers into stages by partition_method, and builds them where they train":
        "virtual_pipeline_model_parallel_size pipeline_model_parallel_layout num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "init_model_with_meta_device",
    "it goes by the order, number or shape of forward passes, which slices change":
        "cpu_offloading fine_grained_activation_offloading distribute_saved_activations moe_enable_routing_replay",
    "it is for inference, not for training":
        "inference_rng_tracker use_inference_optimized_layers inference_fuse_tp_communication flash_decode",
    "quantized layers are not supported": "use_kitchen quant_recipe",
    "the kernel of attention depends on a measurement": "batch_invariant_mode",
}  # fmt: skip
_WITH_EXPERTS = {
    "it is a product of means over the tokens of one forward pass, and not a sum over slices": "moe_aux_loss_coeff",
    "each forward pass adds a mean over its tokens that knows no weights: slices would add several": "moe_z_loss_coeff",
    "capacity counts the tokens of one forward pass": "moe_expert_capacity_factor moe_token_dropping",
    "Megatron's own training loop updates the bias from token counts once per step": "moe_router_enable_expert_bias",
    "routing by random numbers is for benchmarks, and slices change it": "moe_router_force_load_balancing",
}
_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
_CUDA_KERNELS = "apply_rope_fusion fused_single_qkv_rope persist_layer_norm"
_ON_CPU = {"it is a CUDA kernel, and this run is on a CPU": _CUDA_KERNELS}

HALF_RESIDUAL = (
    "fp32_residual_connection with parameters in half precision: megatron-core 0.16.1 rounds the residual stream at "
    "the first sum all the same, and its norms take one dtype. Set it to False"
)
_Test = Callable[[TransformerConfig], Any]
_COMBINATIONS: tuple[tuple[_Test, str], ...] = (
    (lambda c: c.num_moe_experts and "sinkhorn" in _listed(c.moe_router_load_balancing_type),
     "moe_router_load_balancing_type='sinkhorn': it assigns the tokens of one forward pass to one another's experts. "
     "Use 'none'"),
    (lambda c: c.num_moe_experts and c.expert_tensor_parallel_size not in (None, c.tensor_model_parallel_size),
     "expert_tensor_parallel_size: experts are cut over all tensor-parallel ranks. Set it to "
     "tensor_model_parallel_size, and add_bias_linear to False: each rank would add the whole bias"),
    (lambda c: c.heterogeneous_block_specs,
     "heterogeneous_block_specs=True: all layers are built from one config. Build TransformerConfig instead of "
     "HeterogeneousTransformerConfig"),
    (lambda c: c.num_moe_experts and c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
     "num_moe_experts with tensor_model_parallel_size > 1 and no sequence_parallel: megatron-core refuses to train "
     "that. Set sequence_parallel to True"),
    (lambda c: c.moe_token_dispatcher_type == "flex",
     "moe_token_dispatcher_type='flex': it dispatches over expert-parallel ranks, of which there is one. Use "
     "'allgather'"),
    (lambda c: c.num_moe_experts and c.moe_token_dispatcher_type == "alltoall" and on_cpu(),
     "moe_token_dispatcher_type='alltoall': megatron-core's needs CUDA streams, and this run is on a CPU. Use "
     "'allgather'"),
    (lambda c: (c.recompute_granularity, c.recompute_method) == ("full", "uniform") and c.recompute_num_layers != 1,
     "recompute_method='uniform' with recompute_num_layers > 1: layers are recomputed one by one. Set "
     "recompute_num_layers to 1, or use DeepSpeed's pipeline.activation_checkpoint_interval instead"),
    (lambda c: c.fp32_residual_connection and c.params_dtype in (torch.bfloat16, torch.float16), HALF_RESIDUAL),
    (lambda c: c.attention_output_gate and (c.num_query_groups or 0) < c.tensor_model_parallel_size,
     "attention_output_gate=True with fewer num_query_groups than tensor-parallel ranks: megatron-core 0.16.1 leaves "
     "each rank the gates of other ranks' heads, and fails. Lower tensor_model_parallel_size, or set it to False"),
    (lambda c: c.multi_latent_attention and not isinstance(c, MLATransformerConfig),
     "multi_latent_attention=True: the sizes of its latents are fields of MLATransformerConfig. Build that instead of "
     "TransformerConfig"),
    (lambda c: getattr(c, "cache_mla_latents", False),
     "cache_mla_latents=True: it is for inference, not for training. Set it to False"),
    (lambda c: c.multi_latent_attention and c.apply_rope_fusion and not on_cpu(),
     "apply_rope_fusion=True with multi_latent_attention: that kernel turns tokens from the first position of the "
     "sequence on, and a slice begins later. Set it to False"),
    (lambda c: c.deterministic_mode and not on_cpu() and not torch.are_deterministic_algorithms_enabled(),
     "deterministic_mode=True: kernels of attention obey torch. Call torch.use_deterministic_algorithms(True) as well"),
    (lambda c: c.transformer_impl == "inference_optimized",
     "transformer_impl='inference_optimized': it is for inference, not for training. Use 'local' or "
     "'transformer_engine'"),
)  # fmt: skip


def _problems(config: TransformerConfig) -> Iterator[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    # a table applies where its machinery can be in use
    tables = [_ANYWHERE, *([_WITH_EXPERTS] if config.num_moe_experts else []), *([_ON_CPU] if on_cpu() else [])]
    for table in tables:
        for reason, names in table.items():
            for name in names.split():
                value, default = getattr(config, name), defaults[name]
                if value != default and (any(_listed(value)) or default):
                    yield f"{name}={value!r}: {reason}. Set it to {default!r}"
    yield from (text for applies, text in _COMBINATIONS if applies(config))
    yield from _problems_of_attention(config)
    if config.fp8:
        yield from _problems_of_fp8(config)


def _problems_of_fp8(config: TransformerConfig) -> Iterator[str]:
    """Yield what changes numbers in fp8 if a sequence comes in slices.

    A factor of "mxfp8" or "blockwise" belongs to 32 or 128 numbers of a token, or of one feature over as many tokens in
    a row. So slices of a multiple of 128 tokens have the blocks of the whole sequence.
    """
    named = f"fp8={config.fp8!r}"
    if not uses_transformer_engine(config):
        yield f"{named}: it needs Transformer Engine's layers on a GPU, and this run has none. Set it to None"
        return
    if config.fp8_recipe not in ("mxfp8", "blockwise"):
        recipe = f"{named} with fp8_recipe={getattr(config.fp8_recipe, 'value', config.fp8_recipe)!r}"
        why = "scaling factors follow the largest value of one forward pass, so that slices change the result"
        yield f"{recipe}: {why}. Set fp8_recipe to 'mxfp8' or 'blockwise', or fp8 to None"
    if config.num_moe_experts:
        why = "blocks are made of the tokens that come to an expert in one forward pass"
        yield f"{named} with num_moe_experts: {why}, so that slices change the result. Set fp8 to None"


def _problems_of_attention(config: TransformerConfig) -> Iterator[str]:
    window, frequency = config.window_size, config.window_attn_skip_freq
    if config.softmax_type not in _SOFTMAX_TYPES:
        yield f"softmax_type={config.softmax_type!r}: give one of {', '.join(_SOFTMAX_TYPES)}"
    if not window:
        return
    left, right = window if len(window) == 2 else (None, None)
    if not (isinstance(left, int) and left >= -1 and (right == 0 or (left, right) == (-1, -1))):
        after = "a token sees itself and the n tokens before it (-1: all), and none after it"
        yield f"window_size={window!r}: attention in slices is causal. Give (n, 0): {after}"
    try:
        for layer_number in range(1, 1 + config.num_layers):
            is_layer_window_attention(window, frequency, layer_number)
    except (ValueError, IndexError, ZeroDivisionError):
        form = f"a list with a 1 (window) or a 0 (none) for each of the num_layers={config.num_layers} layers"
        yield f"window_attn_skip_freq={frequency!r}: give {form}, or an integer >= 1"


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many tokens a token of the layer sees, with itself; None: all. Layers count from 1.

    megatron-core's `window_size` (left, right) counts the tokens before a token, without itself.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left = config.window_size[0]
    return None if left < 0 else left + 1


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
