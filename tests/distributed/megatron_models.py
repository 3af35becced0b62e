"""The two trainings that are compared: megatron-core's own GPTModel in one process, and ours. Runs inside the ranks.

The reference is plain: ``GPTModel`` from the local layer spec with Megatron's own ``DotProductAttention`` and torch's
norms, whole sequences, a loop over micro-batches, ``torch.optim.Adam``, torch's gradient clipping. Of terapipe_ds it
uses nothing but the stand-ins for CUDA and Transformer Engine, without which Megatron's code does not run here. The
loss is torch's ``cross_entropy`` (Megatron's own rounds to fp32), or Megatron's own where a case asks for it on both
sides.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import terapipe_ds
from terapipe_ds.models.megatron import MegatronGPT, VocabParallelLoss
from terapipe_ds.models.megatron.kernels import stand_in_for_cuda, stand_in_for_transformer_engine
from tests.distributed.engines import reduce_in_fp64
from tests.distributed.megatron_cases import (
    ADAM_EPS,
    CLIP_NORM,
    LAYOUTS,
    LEARNING_RATE,
    LENGTH,
    MAX_LENGTH,
    NUM_LAYERS,
    NUM_STEPS,
    QUERY_GROUPS,
    ROWS,
    VOCAB_SIZE,
    Case,
    Record,
    Weights,
    megatron_name,
    shard,
)

IGNORE_INDEX = -100
_GATED = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
_FEED_FORWARD: dict[str, dict[str, Any]] = {
    "swiglu": _GATED,
    "gelu": {"normalization": "LayerNorm", "activation_func": F.gelu, "add_qkv_bias": True},
    "moe": {
        **_GATED, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none", "moe_router_dtype": "fp64",
    },
}  # fmt: skip
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "off": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    **{
        name: {"recompute_granularity": "selective", "recompute_modules": [name]}
        for name in ("core_attn", "layernorm", "mlp")
    },
}


def dtype_of(case: Case) -> torch.dtype:
    return {"fp64": torch.float64, "bf16": torch.bfloat16}.get(case.precision, torch.float32)


def transformer_config(case: Case, **layout: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=QUERY_GROUPS[case.heads],
        ffn_hidden_size=48,
        qk_layernorm=case.qk_norm,
        rotary_interleaved=case.positions == "rope_part",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype_of(case),
        pipeline_dtype=dtype_of(case),
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        **_FEED_FORWARD[case.block],
        **layout,
    )


def model_options(case: Case) -> dict[str, Any]:
    """What GPTModel and MegatronGPT take by the same names."""
    return {
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": MAX_LENGTH,
        "position_embedding_type": "learned_absolute" if case.positions.startswith("learned") else "rope",
        "rotary_percent": 0.5 if case.positions == "rope_part" else 1.0,
        "share_embeddings_and_output_weights": case.tied,
    }


# -- the data -------------------------------------------------------------------------------------------------


def micro_batch(case: Case, pipeline: int, step: int, index: int) -> tuple[Any, Any]:
    """Inputs and labels as the data iterator gives them: tokens or (tokens, position ids), labels or (labels,
    mask)."""
    generator = torch.Generator().manual_seed(10_000 * pipeline + 10 * step + index)
    text = torch.randint(VOCAB_SIZE, (ROWS, LENGTH + 1), generator=generator)
    inputs: Any = text[:, :-1].contiguous()
    labels: Any = text[:, 1:].clone()
    if case.positions == "learned_given":  # positions begin again after a document's end, and not at 0
        inputs = (inputs, (torch.arange(LENGTH) % 9 + torch.tensor([[3], [7]])).contiguous())
    if case.labels == "ignored":  # the first two slices have no label in some micro-batches, the rows differ
        labels[0, : 16 if index % 2 == 0 else 3] = IGNORE_INDEX
        labels[1, : 15 if index % 2 == 0 else 21] = IGNORE_INDEX
    if case.labels == "mask":
        weight = torch.rand((ROWS, LENGTH), generator=generator)
        labels = (labels, weight * (weight > 0.4))
    return inputs, labels


# -- the reference --------------------------------------------------------------------------------------------


def job_reference(case: Case) -> Record:
    """Train megatron-core's own model, unsliced, in this process alone."""
    with own_parallel_state():
        model = GPTModel(
            transformer_config(case),
            get_gpt_layer_local_spec(
                num_experts=4 if case.block == "moe" else None,
                qk_layernorm=case.qk_norm,
                normalization=_FEED_FORWARD[case.block]["normalization"],
            ),
            **model_options(case),
        ).to(dtype_of(case))
        draw_weights(model)
        record = Record(initial=_arrays(dict(model.named_parameters())))
        record.losses = {pipeline: [] for pipeline in range(case.data_parallel)}
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)
        for step in range(NUM_STEPS):
            _reference_step(model, optimizer, case, step, record)
        record.parameters = _arrays(dict(model.named_parameters()))
        return record


def _reference_step(model: Any, optimizer: Any, case: Case, step: int, record: Record) -> None:
    optimizer.zero_grad()
    for pipeline in range(case.data_parallel):
        total = 0.0
        for index in range(case.accumulation):
            loss = _reference_loss(model, case, *micro_batch(case, pipeline, step, index))
            (loss / (case.accumulation * case.data_parallel)).backward()
            total += loss.item()
        record.losses[pipeline].append(total / case.accumulation)
    if case.clipping:
        gradients = [p.grad for p in model.parameters()]
        record.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    record.gradients.append(_arrays({name: p.grad for name, p in model.named_parameters()}))
    optimizer.step()


def _reference_loss(model: Any, case: Case, inputs: Any, labels: Any) -> Tensor:
    tokens, positions = (inputs, torch.arange(LENGTH).expand(ROWS, -1)) if torch.is_tensor(inputs) else inputs
    targets, mask = (labels, labels != IGNORE_INDEX) if torch.is_tensor(labels) else labels
    targets = targets.clamp_min(0)
    hidden_from = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]  # its own default is made on CUDA
    if case.precision == "fp32_megatron":
        losses = model(tokens, positions, hidden_from, labels=targets)
    else:
        logits = model(tokens, positions, hidden_from)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


@contextlib.contextmanager
def own_parallel_state(**sizes: Any) -> Iterator[None]:
    """Megatron's groups as Megatron makes them, for as long as this lasts."""
    stand_in_for_cuda()
    stand_in_for_transformer_engine()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, 1)  # attention asks for it, at dropout 0 too
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def draw_weights(model: torch.nn.Module) -> None:
    """Weights from the parameter's name alone: large enough that tokens matter to later ones, and biases and norms
    that are not 0 and 1."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            drawn = 1.0 + 0.1 * drawn
        else:  # no larger: attention that is too sharp makes noise in fp32 grow from layer to layer
            drawn = 0.7 * drawn / drawn.shape[-1] ** 0.5 if drawn.dim() > 1 else 0.2 * drawn
        with torch.no_grad():
            parameter.copy_(drawn)


# -- ours -----------------------------------------------------------------------------------------------------


def build_model(case: Case, model_class: type[MegatronGPT] = MegatronGPT, **options: Any) -> MegatronGPT:
    tensor, stages, _, sequence_parallel = LAYOUTS[case.layout]
    config = transformer_config(
        case,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        sequence_parallel=sequence_parallel,
        **_RECOMPUTE[case.recompute],
    )
    cross_entropy = "megatron" if case.precision == "fp32_megatron" else "exact"
    return model_class(config, loss_fn=VocabParallelLoss(cross_entropy), **model_options(case), **options)


def load_weights(model: MegatronGPT, weights: Weights, case: Case) -> None:
    """Give this rank its shard of the reference's weights; every parameter must have its place there."""
    group = model.blueprint.groups.tp
    for name, parameter in model.named_parameters():
        theirs = megatron_name(name)
        part = shard(theirs, weights[theirs], group.rank(), group.size(), is_gated(case))
        assert part.shape == tuple(parameter.shape), f"{name} is {tuple(parameter.shape)}, the shard {part.shape}"
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(part.copy()))


def is_gated(case: Case) -> bool:
    return case.block != "gelu"


def build_engine(model: MegatronGPT, case: Case, **changes: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": LEARNING_RATE, "eps": ADAM_EPS, "torch_adam": True, "adam_w_mode": False},
        },
        "gradient_clipping": CLIP_NORM if case.clipping else 0.0,
        "steps_per_print": 10**9,
        "terapipe": {"enabled": True, "schedule": case.schedule, "slices": case.slices, "granularity_tokens": 1},
        **changes,
    }
    engine = terapipe_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    if case.precision == "fp64":
        reduce_in_fp64(engine)
    return engine


def job_ours(
    case: Case,
    weights: Weights,
    num_steps: int = NUM_STEPS,
    prepare: Callable[[], Any] | None = None,
    watch: Callable[[Any], Any] | None = None,
) -> Record:
    """Train our model in token slices. ``prepare()`` may return a context manager that holds meanwhile; what that
    gives is a list of errors for the record. ``watch(engine)`` returns what is filled in meanwhile."""
    with contextlib.nullcontext() if prepare is None else prepare() as caught:
        model = build_model(case)
        load_weights(model, weights, case)
        engine = build_engine(model, case)
        watched = None if watch is None else watch(engine)
        try:
            record = _train(engine, case, num_steps)
        finally:
            engine.destroy()
    record.caught, record.watched = list(caught or []), watched
    return record


def job_build(case: Case) -> tuple[Record, dict[str, tuple[bool, int]]]:
    """Build our model alone: its initial weights, and of each parameter Megatron's marks (cut or not, which
    dimension)."""
    model = build_model(case)
    grid = model.mpu()
    record = Record(grid.get_stage_id(), grid.get_slice_parallel_rank(), grid.get_data_parallel_id())
    record.initial = _parameters_of(model)
    marks = {
        megatron_name(name): (getattr(p, "tensor_model_parallel", False), getattr(p, "partition_dim", -1))
        for name, p in model.named_parameters()
    }
    return record, marks


def _train(engine: Any, case: Case, num_steps: int) -> Record:
    grid = engine.grid
    record = Record(grid.get_stage_id(), grid.get_slice_parallel_rank(), grid.get_data_parallel_id())
    record.initial = _parameters_of(engine.module)
    optimizer_step = engine.optimizer.step

    def step_and_record(*args: Any, **kwargs: Any) -> Any:
        gradients = {megatron_name(name): p.grad for name, p in engine.module.named_parameters()}
        record.gradients.append(_arrays(gradients))
        return optimizer_step(*args, **kwargs)

    engine.optimizer.step = step_and_record
    losses = []
    for step in range(num_steps):
        data = [micro_batch(case, record.pipeline, step, index) for index in range(case.accumulation)]
        engine.train_batch(iter(data))
        if engine.is_last_stage():
            losses.append(float(engine.total_loss) / case.accumulation)
    if losses:
        record.losses = {record.pipeline: losses}
    record.parameters = _parameters_of(engine.module)
    return record


def _parameters_of(module: torch.nn.Module) -> Weights:
    return _arrays({megatron_name(name): p for name, p in module.named_parameters()})


def _arrays(tensors: dict[str, Tensor | None]) -> Weights:
    missing = [name for name, tensor in tensors.items() if tensor is None]
    assert not missing, f"no gradient for {missing}"
    return {name: t.detach().double().numpy().copy() for name, t in tensors.items() if t is not None}
