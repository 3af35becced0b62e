"""Every name of DeepSpeed, torch and megatron-core that this package overrides, calls or reads, in one table.

Few of these names are documented. They are looked up when the plugin registers (megatron-core's: when its models are
imported), so that a version without one is an error then, with the name, and no AttributeError hours later.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Hook:
    """One name: ``path``, dotted, inside ``module``; ``use`` says what for.

    The last name of a path that starts with a class may be an attribute that its instances get: then some method of
    the class or of a base must set or read it. ``parameters``: what a function must take by these names, in this order.
    """

    module: str
    path: str
    use: str
    parameters: tuple[str, ...] = ()

    def is_there(self) -> bool:
        """True when the name can be looked up and takes ``parameters``."""
        try:
            value: Any = importlib.import_module(self.module)
        except Exception:  # another third party behind it may fail in any way
            return False
        owners, last = self.path.split(".")[:-1], self.path.split(".")[-1]
        for name in owners:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        if hasattr(value, last):
            return not self.parameters or _takes(getattr(value, last), self.parameters)
        return inspect.isclass(value) and _is_kept(value, last) and not self.parameters


def _takes(function: Any, parameters: tuple[str, ...]) -> bool:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return True  # compiled code does not say
    return tuple(names[: len(parameters)]) == parameters


def _is_kept(owner: type, name: str) -> bool:
    """Whether a method of a class or of its bases sets or reads an attribute of this name. Those that call it say
    nothing: what calls a method is still there when the method is gone."""
    return any(_keeps(code, name) for function in _functions(owner) for code in _codes(function))


def _functions(owner: type) -> Iterator[CodeType]:
    for value in (value for base in owner.__mro__ for value in vars(base).values()):
        found = getattr(value, "fget", None) or inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(code := getattr(found, "__code__", None), CodeType):
            yield code


def _keeps(code: CodeType, name: str) -> bool:
    return name in code.co_names and name in _kept_names(code)


@functools.cache
def _kept_names(code: CodeType) -> frozenset[str]:
    """The attributes that this code sets or reads. Kept by code, which never changes: reading it takes long, a third
    of a second for all hooks, and ``terapipe_ds.initialize`` looks at them for each engine."""
    return frozenset(
        step.argval
        for step in dis.get_instructions(code)  # a call is LOAD_METHOD, from Python 3.12 on LOAD_ATTR with a NULL
        if step.opname in ("STORE_ATTR", "LOAD_ATTR") and "NULL" not in step.argrepr
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _hooks(module: str, owner: str, uses: dict[str, str]) -> tuple[Hook, ...]:
    """Use -> names between blanks, each of them a hook."""
    prefix = f"{owner}." if owner else ""
    return tuple(Hook(module, prefix + name, use) for use, names in uses.items() for name in names.split())


_PIPELINE, _ENGINE = "deepspeed.runtime.pipe.engine", "deepspeed.runtime.engine"

HOOKS: tuple[Hook, ...] = (
    *_hooks("deepspeed", "", {
        "what deepspeed.initialize() builds, rebound by register()": "PipelineEngine",
        "the name that deepspeed.initialize() looks up for a DualPipeVModule": "DualPipeVEngine",
        "builds the engine": "initialize",
        "starts the process group of a profile": "init_distributed",
        "says which operators are compiled": "ops.__compatible_ops__",
        "sums what parts at several places have": "comm.all_reduce",
        "gives copies the weights of their owner": "comm.broadcast",
    }),
    *_hooks(_PIPELINE, "PipelineEngine", {
        "gives the schedule of a training batch": "_train_schedule",
        "says which method runs an action": "_INSTRUCTION_MAP",
        "sums tied gradients over stages": "_exec_reduce_tied_grads",
        "averages gradients over replicas": "_exec_reduce_grads",
        "steps the optimizer": "_exec_optimizer_step",
        "hands the loss to all stages": "_aggregate_total_loss",
        "averages the outputs of an evaluation": "_reduce_outputs",
        "draws a micro-batch": "_next_batch",
        "gives the data of the next batches back after an evaluation": "set_dataiterator data_iterator",
        "takes the data": "set_dataloader training_dataloader",
        "says where a stage stands": "is_first_stage is_last_stage stage_id num_stages grid",
        "says how many micro-batches a step has": "micro_batches",
        "says what an evaluation returns": "eval_return_logits _compute_loss outputs fwd_outputs",
        "keeps the loss of a batch": "loss total_loss total_additional_losses",
        "says which stage knows the loss": "_loss_stage_global_rank",
        "divides the gradient of a loss by the micro-batches": "_backward_prologue_per_tensor",
        "forgets the shapes of messages": "reset_activation_shape",
    }),
    Hook(_PIPELINE, "PipelineEngine._inference_schedule", "gives the schedule of an evaluation batch",
         ("micro_batches",)),
    Hook(_PIPELINE, "PipelineEngine._exec_schedule", "runs the actions", ("pipe_schedule",)),
    Hook(_PIPELINE, "PipelineEngine.train_batch", "runs a step", ("data_iter",)),
    Hook(_PIPELINE, "PipelineEngine.eval_batch", "runs an evaluation", ("data_iter",)),
    Hook(_ENGINE, "DeepSpeedEngine.compile", "compiles the layers, which slices do without"),
    *_hooks(_PIPELINE, "", {
        "times what a stage does": "BATCH_INPUT_TIMER PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_SEND_GRAD_TIMER "
        "PIPE_SEND_OUTPUT_TIMER",
    }),
    Hook("deepspeed.runtime.pipe.p2p", "send", "sends between stages", ("tensor", "dest_stage", "async_op")),
    Hook("deepspeed.runtime.pipe.p2p", "recv", "receives between stages", ("tensor", "src_stage", "async_op")),
    *_hooks("deepspeed.runtime.pipe.dualpipev", "", {
        "DeepSpeed's other engine, left as it is": "DualPipeVEngine DualPipeVModule",
    }),
    *_hooks(_ENGINE, "DeepSpeedEngine", {
        "runs the layers of a stage": "forward",
        "scales the loss and runs its backward pass": "backward",
        "prepares the optimizer for a backward pass": "_backward_prologue",
        "hands gradients to the optimizer": "_backward_epilogue",
        "tells the engine's own backward pass from a user's": "_running_engine_backward",
        "clips, steps and advances the learning rate": "_take_model_step",
        "averages losses over micro-batches": "_scale_loss_by_gas",
        "clips in fp32": "clip_fp32_gradients",
        "drops the gradients of a batch that failed": "zero_grad",
        "says what an engine has": "module optimizer basic_optimizer device global_rank global_steps dp_world_size "
        "has_moe_layers",
        "says how an engine is configured": "zero_optimization zero_optimization_stage optimizer_name "
        "bfloat16_enabled train_micro_batch_size_per_gpu load_universal_checkpoint gradient_clipping _config",
        "reads and writes checkpoints": "checkpoint_engine save_checkpoint use_node_local_storage local_rank "
        "_get_ckpt_name",
        "scales losses": "fp16_enabled dynamic_loss_scale torch_autocast_z0_gradscaler",
        "times actions": "timers wall_clock_breakdown",
        "casts the inputs of a check as those of a step": "fp16_auto_cast _cast_inputs_half",
        "says what to profile": "flops_profiler flops_profiler_enabled flops_profiler_profile_step "
        "flops_profiler_module_depth flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file "
        "flops_profiler_recompute_fwd_factor",
        "gives back what an engine holds": "destroy",
    }),
    Hook(_ENGINE, "DeepSpeedEngine.load_checkpoint", "loads checkpoints", (
        "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
        "load_module_only", "custom_load_fn",
    )),
    *_hooks("deepspeed.runtime.config", "DeepSpeedConfig", {"has the user's config as it was given": "_param_dict"}),
    *_hooks("deepspeed.pipe", "", {"what a pipeline's layers are given in": "PipelineModule LayerSpec TiedLayerSpec"}),
    *_hooks("deepspeed.runtime.pipe.module", "PipelineModule", {
        "says what a stage computes": "forward_funcs fwd_map loss_fn _layer_specs _local_start _local_stop",
        "cuts layers into parts and builds those of a stage": "_partition_layers _build _set_bounds parts num_stages "
        "stage_id stage_owner local_rank _grid",
        "sums tied layers over stages": "tied_modules tied_comms _index_tied_modules _synchronize_tied_weights "
        "get_tied_weights_and_groups allreduce_tied_weight_gradients _recursive_getattr",
        "writes and reads layers": "save_state_dict load_state_dir",
        "recomputes layers": "activation_checkpoint_func activation_checkpoint_interval is_checkpointable_results "
        "is_checkpointable_results_interval _precompute_checkpointable_values",
        "reports further losses": "get_additional_losses",
        "says that shapes differ from message to message": "dynamic_shape",
    }),
    *_hooks("deepspeed.runtime.pipe.topology", "PipelineParallelGrid", {
        "says which ranks make a pipeline": "pipe_parallel_size get_pipe_parallel_world_size get_stage_id topology "
        "get_data_parallel_rank get_data_parallel_world_size get_slice_parallel_rank get_slice_parallel_world_size "
        "slice_group",
    }),
    *_hooks("deepspeed.runtime.pipe.topology", "ProcessTopology", {
        "lists the ranks of every pipeline": "get_axis_comm_lists",
    }),
    *_hooks("deepspeed.utils.timer", "SynchronizedWallClockTimer", {"stops timers after an error": "get_timers"}),
    *_hooks("deepspeed.runtime.activation_checkpointing", "checkpointing", {
        "recomputes layers": "non_reentrant_checkpoint",
        "forgets what an evaluation would recompute": "reset",
        "says how activations are checkpointed": "PARTITION_ACTIVATIONS CONTIGUOUS_CHECKPOINTING "
        "SYNCHRONIZE",
        "keeps random states": "get_cuda_rng_tracker",
    }),
    *_hooks("deepspeed.accelerator", "", {"names the device": "get_accelerator"}),
    *_hooks("deepspeed.accelerator.abstract_accelerator", "DeepSpeedAccelerator", {
        "names the device": "device_name current_device_name is_synchronized_device synchronize",
    }),
    *_hooks("deepspeed.checkpoint", "constants", {
        "says which layout saved a checkpoint": "CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE "
        "UNIVERSAL_CHECKPOINT_INFO",
    }),
    *_hooks("deepspeed.runtime", "utils", {
        "cuts layers into parts": "partition_uniform partition_balanced",
        "counts a parameter in the norm of gradients": "is_model_parallel_parameter",
    }),
    *_hooks("deepspeed.runtime.torch_autocast", "", {"casts as the engine does": "autocast_if_enabled"}),
    Hook("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer", "tells DeepSpeed's optimizers from torch's"),
    *_hooks("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer", {
        "counts gradients in the norm": "get_grads_for_norm",
        "says when gradients are added up": "immediate_grad_update",
        "renews fp32 copies after a load": "refresh_fp32_params",
        "says how its states are divided": "partition_count nccl_start_alignment_factor using_real_optimizer",
        "keeps the gradients of a batch": "bf16_groups fp32_groups_gradients fp32_groups_has_gradients",
    }),
    *_hooks("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", {
        "says how its states are divided": "partition_count nccl_start_alignment_factor elastic_checkpoint "
        "round_robin_gradients has_moe_layers",
    }),
    *_hooks("deepspeed.utils", "", {"says how layers are partitioned": "logger"}),
    *_hooks("deepspeed.utils.tensor_fragment", "", {
        "says where a parameter lies in a flat tensor": "fragment_address",
    }),
    *_hooks("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer", {
        "scales losses": "custom_loss_scaler external_loss_scale loss_scale_config",
        "renews fp32 copies after a load": "refresh_fp32_params",
    }),
    *_hooks("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", {
        "scales losses": "custom_loss_scaler external_loss_scale loss_scale_config",
        "renews fp32 copies after a load": "refresh_fp32_params",
    }),
    *_hooks("deepspeed.profiling.flops_profiler.profiler", "", {
        "counts operations": "FlopsProfiler.start_profile FlopsProfiler.stop_profile FlopsProfiler.end_profile "
        "FlopsProfiler.print_model_profile module_flop_count module_mac_count",
    }),
    *_hooks("deepspeed.comm.comm", "", {"waits for the device after each operation": "comms_logger"}),
    *_hooks("torch.autograd", "", {
        "measures tensor bytes": "ProfilerConfig ProfilerState",
        "defines sliced attention": "Function function.once_differentiable",
        "measures what a slice keeps": "graph.saved_tensors_hooks",
    }),
    *_hooks("torch.overrides", "", {"finds attention that is not slice-aware": "TorchFunctionMode"}),
    *_hooks("torch.distributed", "", {
        "connects stages": "new_group isend irecv",
        "carries the watch-dog's reports": "TCPStore",
        "starts the process group of a profile": "HashStore",
    }),
)  # fmt: skip
"""What ``register()`` looks up."""

_CORE = "megatron.core"
MEGATRON_HOOKS: tuple[Hook, ...] = (
    *_hooks(_CORE, "parallel_state", {
        "holds Megatron's groups": "initialize_model_parallel",
        "holds gathered tokens": "get_global_memory_buffer",
    }),
    *_hooks(f"{_CORE}.process_groups_config", "", {"hands groups to layers": "ProcessGroupCollection"}),
    *_hooks(f"{_CORE}.tensor_parallel", "", {
        "computes layers over tensor-parallel ranks": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding "
        "get_cuda_rng_tracker random layers.set_tensor_model_parallel_attributes",
        "multiplies by a weight": "ColumnParallelLinear._forward_impl RowParallelLinear._forward_impl",
    }),
    *_hooks(f"{_CORE}.transformer", "", {"describes layers": "ModuleSpec TransformerConfig"}),
    Hook(f"{_CORE}.transformer.attention", "SelfAttention", "is where sliced attention goes in"),
    Hook(f"{_CORE}.transformer.identity_op", "IdentityOp", "stands for what a layer leaves out"),
    Hook(f"{_CORE}.transformer.module", "MegatronModule", "is the base of layers"),
    Hook(f"{_CORE}.transformer.moe", "moe_utils", "reports the losses of routers"),
    Hook(f"{_CORE}.transformer.spec_utils", "build_module", "builds layers"),
    Hook(f"{_CORE}.transformer.torch_norm", "WrappedTorchNorm", "normalises"),
    Hook(f"{_CORE}.transformer.transformer_layer", "TransformerLayer", "is a layer of a stage"),
    Hook(f"{_CORE}.models.common.embeddings.language_model_embedding", "LanguageModelEmbedding", "embeds tokens"),
    Hook(f"{_CORE}.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.forward",
         "gives positions from the start of a slice on", ("max_seq_len", "offset")),
    Hook(f"{_CORE}.models.gpt.gpt_layer_specs", "get_gpt_decoder_layer_specs", "describes GPT's layers"),
)  # fmt: skip
"""What ``terapipe_ds.models.megatron`` looks up. What is optional there (Transformer Engine, apex) is not in it."""
