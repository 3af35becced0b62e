"""Check that DeepSpeed and megatron-core have the names that this package overrides or replaces.

Few of these names are documented, and a new version that never calls an override would ignore it silently. A missing
name that this package only calls or reads fails by itself.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Mapping

from terapipe_ds.compat import versions

# module:class -> names, separated by blanks. A test compares the first two with the overrides of the runtime.
DEEPSPEED_HOOKS = {
    "deepspeed.runtime.pipe.engine:PipelineEngine": (
        "__getattr__ _aggregate_total_loss _backward_epilogue _backward_prologue _backward_prologue_per_tensor "
        "_bf16_reduce_grads _exec_optimizer_step _exec_reduce_grads _exec_schedule _inference_schedule "
        "_loss_stage_global_rank _next_batch _reduce_outputs _train_schedule autotp_size clip_fp32_gradients compile "
        "destroy eval_batch is_last_stage load_checkpoint load_module_state_dict module_state_dict "
        "reset_activation_shape save_16bit_model save_checkpoint set_dataiterator set_dataloader steps_per_print "
        "train_batch"
    ),
    "deepspeed.runtime.pipe.module:PipelineModule": (
        "_build _index_tied_modules _partition_layers _precompute_checkpointable_values _set_bounds "
        "_count_layer_params _get_frozen_parameter_names compile forward load_state_dir save_state_dict stage_owner"
    ),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": "get_grads_for_norm",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        "get_grad_norm_direct reduce_gradients scaled_global_norm"
    ),
    "deepspeed.runtime.config:DeepSpeedConfig": "_configure_train_batch_size _initialize_params",
    "deepspeed.runtime.engine:DeepSpeedEngine": "__init__",
    "deepspeed.runtime.engine": "MonitorMaster",
    "deepspeed.runtime.pipe.module": "PipelineParallelGrid",
    "deepspeed.runtime.pipe.p2p": "send recv",
    "deepspeed.comm.torch": "build_shm_op",
    "deepspeed": "DualPipeVEngine PipelineEngine initialize set_optimizer_flags",
}
MEGATRON_HOOKS = {
    "megatron.core.tensor_parallel:ColumnParallelLinear": "_forward_impl",
    "megatron.core.tensor_parallel:RowParallelLinear": "_forward_impl",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding": "forward",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding": "forward",
    "megatron.core.transformer.multi_latent_attention": "HAVE_TE MLASelfAttention TELinear",
    "megatron.core.transformer.utils": "is_layer_window_attention",
}


def require_hooks() -> None:
    """Raise CompatError, listing the missing names, unless the installed DeepSpeed has every overridden name."""
    try:
        import deepspeed
    except Exception as error:  # its dependencies fail in many ways
        tested = versions.TESTED_VERSIONS["deepspeed"]
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise versions.CompatError(
            f"deepspeed cannot be imported ({reason}); deepspeed {tested} has what terapipe_ds builds on: pip install "
            f"deepspeed=={tested}"
        ) from error
    missing = _missing(DEEPSPEED_HOOKS)
    code = getattr(inspect.unwrap(getattr(deepspeed, "initialize", len)), "__code__", None)
    if code is not None and "PipelineEngine" not in code.co_names:
        missing.append("the look-up of PipelineEngine as a global name in deepspeed.initialize")
    _refuse("deepspeed", missing)


def require_megatron(what: str) -> None:
    """Raise MissingExtraError unless megatron-core is installed, CompatError if it lacks a name; `what` needs it."""
    if not versions.has_megatron():
        raise versions.MissingExtraError(
            f"{what} needs megatron-core, which is not installed: pip install "
            f"megatron-core=={versions.TESTED_VERSIONS['megatron-core']}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
        _refuse("megatron-core", _missing(MEGATRON_HOOKS))


def require_transformers(what: str) -> None:
    """Raise MissingExtraError unless transformers is installed; `what` needs it."""
    if not all(map(versions.is_there, ("transformers", "safetensors"))):
        raise versions.MissingExtraError(
            f"{what} needs transformers, which is not installed: pip install "
            f"transformers=={versions.TESTED_VERSIONS['transformers']} safetensors peft"
        )


def require_trl(what: str) -> None:
    """Raise MissingExtraError unless TRL is installed; `what` needs it."""
    if not versions.is_there("trl"):
        raise versions.MissingExtraError(f"{what} needs TRL, which is not installed: pip install '.[trl]' in a clone")


def _missing(hooks: Mapping[str, str]) -> list[str]:
    missing = []
    for owner, names in hooks.items():
        path = owner.replace(":", ".")
        try:
            holder = pkgutil.resolve_name(owner)
            missing += [f"{path}.{name}" for name in names.split() if not hasattr(holder, name)]
        except Exception:  # another third party behind it may fail in any way
            missing.append(path)
    return missing


def _refuse(name: str, missing: list[str]) -> None:
    if missing:
        tested, installed = versions.TESTED_VERSIONS[name], versions.installed_versions().get(name)
        raise versions.CompatError(
            f"the installed {name} {installed or 'of unknown version'} lacks what terapipe_ds builds on: "
            f"{'; '.join(missing)}. {name} {tested} has it: pip install {name}=={tested}"
        )
