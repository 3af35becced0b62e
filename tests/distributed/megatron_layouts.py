"""Small GPTs of megatron-core layers in any layout of TP x PP x DP, and their whole state. Runs inside the ranks.

All replicas are fed the same data, so that every layout trains alike.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

import terapipe_ds
from tests.distributed.engines import Batch, batches, config, section
from tests.distributed.megatron_cases import gather
from tests.distributed.test_checkpoints import tensors_in

VOCAB_SIZE = 32
LENGTH = 24
SLICES = (8, 10, 6)  # even: sequence parallelism halves each
STATES = ("fp32", "exp_avg", "exp_avg_sq")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32_zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_zero1": {
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16_immediate": {
        "bf16": {"enabled": True, "immediate_grad_update": True}, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16_zero1_bf16": {
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"},
    },
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "fp16_zero1": {"fp16": {"enabled": True, "loss_scale": 64.0}, "zero_optimization": {"stage": 1}},
    "fp16_zero1_fp32": {
        "fp16": {"enabled": True, "loss_scale": 64.0}, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. What is left of the ranks is data parallel."""

    tensor: int = 1
    stages: int = 1
    sequence_parallel: bool = False

    def __str__(self) -> str:
        return f"TP{self.tensor}xPP{self.stages}" + "sp" * self.sequence_parallel


@dataclass(frozen=True)
class Training:
    """What is trained, in which precision, and how it is sliced."""

    precision: str = "fp32_zero1"
    tied: bool = False
    gated: bool = True
    positions: str = "rope"
    vocab_size: int = VOCAB_SIZE
    schedule: str = "seq1f1b"
    slices: tuple[int, ...] = SLICES
    universal: bool = False
    experts: int = 0

    def __str__(self) -> str:
        words = [self.precision] + ["experts"] * bool(self.experts) + ["tied"] * self.tied
        return "-".join([*words, *["gelu"] * (not self.gated), self.positions])


@contextlib.contextmanager
def engine_of(layout: Layout, training: Training, **changes: Any) -> Iterator[PipelineEngine]:
    """An engine for the block. `changes` go into DeepSpeed's config."""
    engine = build(layout, training, **changes)
    try:
        yield engine
    finally:
        engine.destroy()


def build(layout: Layout, training: Training, **changes: Any) -> PipelineEngine:
    from terapipe_ds.models.megatron import MegatronGPT

    replicas = torch_dist.get_world_size() // (layout.tensor * layout.stages)
    model = MegatronGPT(
        transformer_config(layout, training),
        vocab_size=training.vocab_size,
        max_sequence_length=LENGTH,
        position_embedding_type=training.positions,
        share_embeddings_and_output_weights=training.tied,
        topology=PipeModelDataParallelTopology(layout.stages, layout.tensor, replicas),
    )
    ds_config = config(**PRECISIONS[training.precision], **changes)
    ds_config["terapipe"] = section(schedule=training.schedule, slices=list(training.slices))
    ds_config["checkpoint"] = {"load_universal": training.universal}
    return terapipe_ds.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


def transformer_config(layout: Layout, training: Training) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = DTYPES[training.precision.split("_")[0]]
    gated: dict[str, Any] = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    experts: dict[str, Any] = {
        "num_moe_experts": training.experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": 24, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False,
    }  # fmt: skip
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        qk_layernorm=True,
        normalization="RMSNorm" if training.gated else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        pipeline_dtype=dtype,
        **(gated if training.gated else {}),
        **(experts if training.experts else {}),
    )


def data(num_steps: int, first_seed: int = 0) -> list[Batch]:
    return batches(num_steps, first_seed=first_seed, length=LENGTH)


def train(engine: PipelineEngine, steps: list[Batch]) -> list[float]:
    """One optimizer step for each batch; the losses where the last stage is."""
    losses = []
    for batch in steps:
        engine.train_batch(iter(batch))
        if engine.is_last_stage():
            losses.append(float(engine.total_loss) / len(batch))
    return losses


def whole_state(engine: PipelineEngine) -> dict[str, dict[str, Any]]:
    """Parameter -> "lp", "fp32", "exp_avg", "exp_avg_sq", "step" -> its whole tensor, put together over tensor-parallel
    ranks. A collective over all ranks; those of a stage get the same."""
    grid, gated = engine.grid, engine.module.blueprint.config.gated_linear_unit
    found = {}
    for name, parameter in engine.module.named_parameters():
        mine = {"lp": parameter.detach().clone(), **optimizer_state(engine, parameter)}
        parts: list[Any] = [None] * grid.get_slice_parallel_world_size()
        torch_dist.all_gather_object(parts, mine, group=grid.get_slice_parallel_group())
        found[name] = {kind: gather(name, [part[kind].float().numpy() for part in parts], gated) for kind in mine}
    return found


def optimizer_state(engine: PipelineEngine, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """In fp32, this tensor-parallel rank's part."""
    if not hasattr(parameter, "_hp_mapping"):  # without ZeRO
        master, states = parameter, engine.optimizer.state
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            masters = {half: full for group in pairs for half, full in zip(*group, strict=True)}
            master, states = masters[parameter], engine.optimizer.optimizer.state
        return {"fp32": master.detach().clone(), **{key: states[master][key].clone() for key in STATES[1:]}}
    full = {key: safe_get_full_optimizer_state(parameter, key) for key in STATES[1:]}
    return {"fp32": safe_get_full_fp32_param(parameter), **full}


def convert(folder: str, tag: str, workers: int = 1, strict: bool = True) -> None:
    """DeepSpeed's converter, in this process: `folder`/`tag` -> `folder`/`tag`_universal."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=f"{folder}/{tag}",
            output_folder=f"{folder}/{tag}_universal",
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=strict,
            inject_missing_state=False,
        )
    )


def saved_state(engine: PipelineEngine) -> dict[str, Any]:
    """This rank's parameters and its tensors of the optimizer, by name or place, in fp32."""
    places = tensors_in(engine.optimizer.state_dict(), "optimizer")
    named = [(name, p.detach()) for name, p in engine.module.named_parameters()]
    return {place: tensor.detach().float().clone().numpy() for place, tensor in [*named, *places]}


def moment_of_one_rank(engine: PipelineEngine) -> dict[str, Any]:
    """Parameter -> this rank's first moment, of the parameters that each tensor-parallel rank has a copy of."""
    from terapipe_ds.models.megatron.gradients import is_split

    copies = {name: p for name, p in engine.module.named_parameters() if not is_split(p)}
    return {name: optimizer_state(engine, p)["exp_avg"].float().numpy() for name, p in copies.items()}


# -- in the parent -------------------------------------------------------------------------------------------


def merged(states: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The parameters of all ranks. What several have must be equal bit by bit: copies of tied layers, replicas."""
    found: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, kinds in state.items():
            for kind, value in found.setdefault(name, kinds).items():
                assert np.array_equal(value, kinds[kind]), f"ranks differ in {kind} of {name}"
    return found


def worst_error(ours: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest ||a - b|| / max(||b||, 1e-3 of the largest norm), and where it is."""
    assert ours.keys() == expected.keys()
    floor = 1e-3 * max(float(np.linalg.norm(value)) for value in expected.values())
    errors = [(0.0, "")]
    for name, value in ours.items():
        assert value.shape == expected[name].shape, name
        error = float(np.linalg.norm(value - expected[name])) / max(float(np.linalg.norm(expected[name])), floor)
        errors.append((error if np.isfinite(error) else float("inf"), name))
    return max(errors)


def worst_errors(ours: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The largest error of each kind: parameters, moments."""
    kinds = next(iter(expected.values()))
    return {
        kind: worst_error({n: v[kind] for n, v in ours.items()}, {n: v[kind] for n, v in expected.items()})[0]
        for kind in kinds
    }
