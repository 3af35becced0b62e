"""What of a ``TransformerConfig`` cannot be trained in token slices, or not by DeepSpeed's pipeline engine.

Two kinds: computations that see more of a sequence than attention over the slice store gives them, and machinery of
Megatron-LM's own training loop that nobody would run here. Both are refused when the model is built, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from terapipe_ds.models.megatron.cpu import on_cpu


class MegatronConfigError(ValueError):
    """A model or a layout that cannot be trained in token slices; the message ends with what to change."""


def check_config(config: TransformerConfig) -> None:
    """Refuse what is not supported.

    Raises:
        MegatronConfigError: with every problem of the config, one per line.
    """
    table = _REFUSED + (_REFUSED_ON_CPU if on_cpu() else ())
    problems = [text for applies, text in table if applies(config)]
    if problems:
        raise MegatronConfigError(
            "this TransformerConfig cannot be trained in token slices:\n  " + "\n  ".join(problems)
        )


def _positive(value: Any) -> bool:
    """True for a coefficient, or one of a list of them, that is not zero."""
    return any(map(_positive, value)) if isinstance(value, (list, tuple)) else bool(value)


def _balances_by_batch(config: TransformerConfig) -> bool:
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return config.num_moe_experts is not None and "sinkhorn" in kinds


_MIXES = "it mixes tokens outside of the slice store"
_REFUSED: tuple[tuple[Callable[[TransformerConfig], Any], str], ...] = (
    # -- what sees more tokens than a slice has ----------------------------------------------------------------------
    (lambda c: c.context_parallel_size > 1,
     "context_parallel_size > 1: each rank would hold a part of every slice, and attention over the slice store knows "
     "whole slices only. Set it to 1; slices already divide a long sequence"),
    (lambda c: c.hybrid_context_parallel, "hybrid_context_parallel: as context_parallel_size > 1. Set it to False"),
    (lambda c: c.mtp_num_layers, "mtp_num_layers: multi-token prediction reads the embeddings of tokens that follow, "
     "across the end of a slice. Set it to None"),
    (lambda c: c.multi_latent_attention, "multi_latent_attention: the slice store keeps keys and values, not latents, "
     "and the positions of MLA's own attention begin at 0 in every slice. Use multi-head or grouped-query attention"),
    (lambda c: c.experimental_attention_variant is not None or c.linear_attention_freq is not None,
     f"experimental_attention_variant, linear_attention_freq: {_MIXES}. Set both to None"),
    (lambda c: c.is_hybrid_model, f"is_hybrid_model: a Mamba layer is a recurrence over tokens; {_MIXES}"),
    (lambda c: c.window_size is not None, "window_size: sliced attention sees the whole prefix; a sliding window is "
     "not there yet. Set it to None"),
    (lambda c: c.softmax_type != "vanilla", "softmax_type other than 'vanilla': attention sinks are not there yet"),
    (lambda c: c.mrope_section is not None, "mrope_section: multimodal positions do not follow from a slice's start"),
    (lambda c: c.qk_clip or c.log_max_attention_logit, "qk_clip, log_max_attention_logit: the largest score is a "
     "maximum over the whole sequence, which fused attention does not give. Set both to False"),
    # -- mixture of experts ------------------------------------------------------------------------------------------
    (lambda c: c.num_moe_experts is not None and _positive(c.moe_aux_loss_coeff),
     "moe_aux_loss_coeff > 0: the auxiliary loss is a product of means over the tokens of one forward pass, and slices "
     "change it. Set it to 0 and moe_router_load_balancing_type to 'none'"),
    (lambda c: c.num_moe_experts is not None and _positive(c.moe_z_loss_coeff),
     "moe_z_loss_coeff: the z-loss is a mean over the tokens of one forward pass, and slices change its weight. Set it "
     "to None"),
    (_balances_by_batch, "moe_router_load_balancing_type='sinkhorn': it assigns the tokens of one forward pass to one "
     "another's experts. Use 'none'"),
    (lambda c: c.num_moe_experts is not None and (c.moe_expert_capacity_factor is not None or c.moe_token_dropping),
     "moe_expert_capacity_factor, moe_token_dropping: capacity counts the tokens of one forward pass. Set them to None "
     "and False"),
    (lambda c: c.num_moe_experts is not None and c.moe_router_enable_expert_bias,
     "moe_router_enable_expert_bias: Megatron's own training loop updates the bias from token counts once per step, "
     "and DeepSpeed's does not. Set it to False"),
    (lambda c: c.num_moe_experts is not None and c.moe_router_force_load_balancing,
     "moe_router_force_load_balancing: routing by random numbers is for benchmarks, and slices change it"),
    (lambda c: c.expert_model_parallel_size > 1 or c.expert_tensor_parallel_size not in (None, 1,
                                                                                        c.tensor_model_parallel_size),
     "expert_model_parallel_size > 1 or another expert_tensor_parallel_size: DeepSpeed's grid has no expert axis. Keep "
     "all experts on every tensor-parallel rank"),
    (lambda c: c.num_moe_experts is not None and c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
     "num_moe_experts with tensor_model_parallel_size > 1 and no sequence_parallel: megatron-core refuses to train "
     "that. Set sequence_parallel to True"),
    (lambda c: c.moe_token_dispatcher_type == "flex" or c.moe_enable_deepep,
     "moe_token_dispatcher_type='flex', moe_enable_deepep: dispatch over expert-parallel ranks, of which there is one"),
    # -- what follows shapes or statistics of one forward pass -------------------------------------------------------
    (lambda c: c.fp8 or c.fp4, "fp8, fp4: scaling factors follow the largest value of one forward pass, so that slices "
     "change the result. Train in bf16"),
    (lambda c: c.enable_cuda_graph or c.external_cuda_graph or c.cuda_graph_impl != "none",
     "CUDA graphs: a graph has one slice length and one prefix. Set cuda_graph_impl to 'none'"),
    (lambda c: c.tp_comm_overlap, "tp_comm_overlap: Transformer Engine's user buffers have one fixed length. Set it to "
     "False"),
    # -- what only Megatron-LM's training loop can finish ------------------------------------------------------------
    (lambda c: c.gradient_accumulation_fusion, "gradient_accumulation_fusion: it adds to param.main_grad, which "
     "DeepSpeed's optimizers do not have. Set it to False"),
    (lambda c: c.delay_wgrad_compute or c.defer_embedding_wgrad_compute,
     "delay_wgrad_compute, defer_embedding_wgrad_compute: Megatron's own schedule runs the deferred products. Set both "
     "to False"),
    (lambda c: c.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm: needs Megatron's own schedule"),
    (lambda c: c.calculate_per_token_loss, "calculate_per_token_loss: Megatron's own training loop divides by the "
     "tokens of all micro-batches. Set it to False; the loss is the mean over each micro-batch's unmasked tokens"),
    (lambda c: c.virtual_pipeline_model_parallel_size is not None, "virtual_pipeline_model_parallel_size: stages are "
     "DeepSpeed's. Set it to None"),
    (lambda c: c.pipeline_model_parallel_layout is not None, "pipeline_model_parallel_layout: DeepSpeed cuts the "
     "layers into stages, by partition_method. Set it to None"),
    (lambda c: c.cpu_offloading or c.fine_grained_activation_offloading,
     "cpu_offloading, fine_grained_activation_offloading: they go by the order of forward passes, which slices "
     "interleave. Set both to False"),
    (lambda c: c.distribute_saved_activations, "distribute_saved_activations: saved inputs are cut by order and shape "
     "over tensor-parallel ranks. Set it to False; sequence_parallel saves the same memory"),
    (lambda c: c.recompute_granularity == "full" and c.recompute_method == "uniform" and c.recompute_num_layers != 1,
     "recompute_method='uniform' with recompute_num_layers > 1: layers are recomputed one by one. Set "
     "recompute_num_layers to 1, or use DeepSpeed's pipeline.activation_checkpoint_interval instead"),
    (lambda c: c.fp32_residual_connection and c.params_dtype in (torch.bfloat16, torch.float16),
     "fp32_residual_connection with parameters in half precision: megatron-core 0.16.1 rounds the residual stream at "
     "the first sum all the same, and its norms take one dtype. Set it to False"),
    (lambda c: c.init_model_with_meta_device, "init_model_with_meta_device: DeepSpeed's pipeline builds layers where "
     "they train. Set it to False"),
    (lambda c: c.num_layers_in_first_pipeline_stage is not None or c.num_layers_in_last_pipeline_stage is not None
     or c.account_for_embedding_in_pipeline_split or c.account_for_loss_in_pipeline_split,
     "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, account_for_embedding_in_pipeline_split, "
     "account_for_loss_in_pipeline_split: DeepSpeed cuts the layers into stages, by partition_method. Leave them out"),
    (lambda c: c.heterogeneous_block_specs, "heterogeneous_block_specs: each layer would need a config of its own, "
     "which TransformerBlock gives and DeepSpeed's pipeline does not. Set it to False"),
    (lambda c: c.enable_autocast, "enable_autocast: Megatron's own schedule switches it on. Set it to False and use "
     "bf16, or DeepSpeed's torch_autocast section"),
    (lambda c: c.finalize_model_grads_func is not None or c.grad_scale_func is not None
     or c.no_sync_func is not None or c.grad_sync_func is not None or c.param_sync_func is not None,
     "finalize_model_grads_func, grad_scale_func, no_sync_func, grad_sync_func, param_sync_func: Megatron's own "
     "schedule calls them, and nobody would here. Leave them out"),
    (lambda c: c.num_microbatches_with_partial_activation_checkpoints is not None,
     "num_microbatches_with_partial_activation_checkpoints: Megatron's own schedule counts them. Set it to None"),
    (lambda c: c.moe_enable_routing_replay, "moe_enable_routing_replay: it counts forward passes, which slices "
     "multiply. Set it to False"),
    (lambda c: c.inference_rng_tracker or c.use_inference_optimized_layers or c.inference_fuse_tp_communication
     or c.flash_decode or c.transformer_impl == "inference_optimized",
     "inference_rng_tracker, use_inference_optimized_layers, inference_fuse_tp_communication, flash_decode, "
     "transformer_impl='inference_optimized': they are for inference, not for training. Leave them out"),
    (lambda c: c.mtp_standalone, "mtp_standalone: there is no multi-token prediction. Set it to False"),
    (lambda c: c.use_kitchen or c.quant_recipe is not None, "use_kitchen, quant_recipe: quantized layers are not "
     "supported. Leave both out"),
)  # fmt: skip
_REFUSED_ON_CPU: tuple[tuple[Callable[[TransformerConfig], Any], str], ...] = (
    (lambda c: c.num_moe_experts is not None and c.moe_token_dispatcher_type == "alltoall",
     "moe_token_dispatcher_type='alltoall': megatron-core's needs CUDA streams, and this run is on a CPU. Use "
     "'allgather'"),
    (lambda c: c.apply_rope_fusion or c.fused_single_qkv_rope or c.persist_layer_norm or c.masked_softmax_fusion,
     "apply_rope_fusion, fused_single_qkv_rope, persist_layer_norm, masked_softmax_fusion: CUDA kernels, and this run "
     "is on a CPU. Set them to False"),
)  # fmt: skip
