"""Train small GPTs of megatron-core layers in any layout: megatron-core's own GPTModel in one process, and ours. Runs
inside the ranks.

The reference is plain: ``GPTModel`` from the local layer spec with Megatron's own ``DotProductAttention`` and torch's
norms, whole sequences, a loop over micro-batches, ``torch.optim.Adam``, torch's gradient clipping. Of terapipe_ds it
uses nothing but the stand-ins for CUDA and Transformer Engine, without which Megatron's code does not run here. The
loss is torch's ``cross_entropy`` (Megatron's own rounds to fp32), or Megatron's own where a case asks for it on both
sides.
"""

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.overrides import TorchFunctionMode

from terapipe_ds.models.megatron import MegatronGPT, VocabParallelLoss
from terapipe_ds.models.megatron.kernels import stand_in_for_cuda, stand_in_for_transformer_engine
from tests.distributed.checkpoint_states import MOMENTS, states_of
from tests.distributed.engines import record_gradients, section, start
from tests.distributed.megatron_cases import (
    ADAM_EPS,
    CLIP_NORM,
    LAYOUTS,
    LEARNING_RATE,
    LENGTH,
    MAX_LENGTH,
    NUM_STEPS,
    QUERY_GROUPS,
    ROWS,
    Case,
    Record,
    Weights,
    megatron_name,
    shard,
)

IGNORE_INDEX = -100
_GATED = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu}
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.0}
_FEED_FORWARD: dict[str, dict[str, Any]] = {
    "swiglu": {**_GATED, "add_bias_linear": False},
    "swiglu_biases": _GATED,
    "gelu": {"normalization": "LayerNorm", "activation_func": F.gelu, "add_qkv_bias": True},
    "moe": {
        **_GATED, **_EXPERTS, "add_bias_linear": False, "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp64",
    },
}  # fmt: skip
_BF16, _FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64.0}}
_ZERO1, _FP32_SUMS = {"zero_optimization": {"stage": 1}}, {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # of the model, and DeepSpeed's settings
    "fp64": (torch.float64, {}),
    "fp32": (torch.float32, {}),
    "fp32_megatron": (torch.float32, {}),
    "fp32_zero1": (torch.float32, _ZERO1),
    "bf16": (torch.bfloat16, _BF16),
    "bf16_zero1": (torch.bfloat16, {**_BF16, **_ZERO1, **_FP32_SUMS}),
    "bf16_immediate": (
        torch.bfloat16, {"bf16": {"enabled": True, "immediate_grad_update": True}, **_ZERO1, **_FP32_SUMS},
    ),
    "bf16_zero1_bf16": (torch.bfloat16, {**_BF16, **_ZERO1, "data_types": {"grad_accum_dtype": "bf16"}}),
    "fp16": (torch.float16, _FP16),
    "fp16_zero1": (torch.float16, {**_FP16, **_ZERO1}),
    "fp16_zero1_fp32": (torch.float16, {**_FP16, **_ZERO1, **_FP32_SUMS}),
}  # fmt: skip
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "off": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    **{
        name: {"recompute_granularity": "selective", "recompute_modules": [name]}
        for name in ("core_attn", "layernorm", "mlp", "mla_up_proj")
    },
}
_RECOMPUTE |= {"kept": {}, "kept, core_attn": _RECOMPUTE["core_attn"]}  # by DeepSpeed
_RECOMPUTE |= {f"offloaded, {name}": _RECOMPUTE[name] for name in ("layernorm", "mla_up_proj")}
_LATENT = {
    "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
    "original_max_position_embeddings": 16,
    "kv_channels": 6,  # by which megatron-core's own core attention knows the width of its results
}  # fmt: skip
_WINDOW, _SINKS = {"window_size": (4, 0)}, {"softmax_type": "learnable"}
_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": _WINDOW,
    "window 1": {"window_size": (0, 0)},
    "window, every second": {**_WINDOW, "window_attn_skip_freq": 2},
    "window, listed": {**_WINDOW, "window_attn_skip_freq": [0, 1, 1, 0]},
    "off-by-one": {"softmax_type": "off-by-one"},
    "sinks": _SINKS,
    "window, sinks": {**_WINDOW, "window_attn_skip_freq": 2, **_SINKS},
    "latent": {**_LATENT, "q_lora_rank": None, "rope_type": "rope"},
    "latent queries": {**_LATENT, "q_lora_rank": 10, "rope_type": "yarn", "mscale_all_dim": 0.5},
    "latent, window, sinks": {**_LATENT, "q_lora_rank": None, "rope_type": "yarn", **_WINDOW, **_SINKS},
}


def is_latent(case: Case) -> bool:
    return case.attention.startswith("latent")


def transformer_config(case: Case, **changes: Any) -> TransformerConfig:
    dtype, _ = PRECISIONS[case.precision]
    shape = {"num_layers": case.num_layers, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
    heads = {"num_query_groups": QUERY_GROUPS[case.heads], "qk_layernorm": case.qk_norm}
    positions = {"rotary_interleaved": case.positions == "rope_part"}
    types = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    types["fp16"] = dtype == torch.float16
    start = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.2, "use_cpu_initialization": True}
    fields = {
        **shape,
        **heads,
        **positions,
        **types,
        **start,
        **_FEED_FORWARD[case.block],
        **_ATTENTION[case.attention],
    }
    return (MLATransformerConfig if is_latent(case) else TransformerConfig)(
        **{"bias_dropout_fusion": False, **fields, **changes}
    )


def model_options(case: Case) -> dict[str, Any]:
    """Return the arguments that GPTModel and MegatronGPT take under the same names."""
    kind = "learned_absolute" if case.positions.startswith("learned") else "rope"
    positions = {"position_embedding_type": kind, "rotary_percent": 0.5 if case.positions == "rope_part" else 1.0}
    sizes = {"vocab_size": case.vocab_size, "max_sequence_length": MAX_LENGTH}
    return {**sizes, **positions, "share_embeddings_and_output_weights": case.tied}


# -- the data -------------------------------------------------------------------------------------------------


def micro_batch(case: Case, pipeline: int, step: int, index: int) -> tuple[Any, Any]:
    """Return inputs and labels as the data iterator yields them: tokens or (tokens, position ids), labels or (labels,
    mask)."""
    generator = torch.Generator().manual_seed(10_000 * pipeline + 10 * step + index)
    text = torch.randint(case.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    inputs: Any = text[:, :-1].contiguous()
    labels: Any = text[:, 1:].clone()
    if case.positions == "learned_given":  # positions begin again after a document's end, and not at 0
        inputs = (inputs, (torch.arange(LENGTH) % 9 + torch.tensor([[3], [7]])).contiguous())
    if case.documents:  # of nine tokens; the second row begins within one
        inputs = (text[:, :-1].contiguous(), (torch.arange(LENGTH) + torch.tensor([[0], [4]])) % 9)
    if case.labels == "ignored":  # the first two slices have no label in some micro-batches, the rows differ
        labels[0, : 16 if index % 2 == 0 else 3] = IGNORE_INDEX
        labels[1, : 15 if index % 2 == 0 else 21] = IGNORE_INDEX
    if case.labels == "mask":
        weight = torch.rand((ROWS, LENGTH), generator=generator)
        labels = (labels, weight * (weight > 0.4))
    return inputs, labels


# -- the reference --------------------------------------------------------------------------------------------


def job_reference(case: Case) -> list[Record]:
    """Train megatron-core's own model, unsliced, in this process alone; a record for each replica."""
    changes = {"window_size": None} if case.documents else {}  # with which its own attention would drop a mask
    with own_parallel_state(), windows_on_the_cpu():
        spec = get_gpt_layer_local_spec(
            num_experts=4 if case.block == "moe" else None,
            qk_layernorm=case.qk_norm,
            multi_latent_attention=is_latent(case),
            normalization=_FEED_FORWARD[case.block]["normalization"],
        )
        spec.submodules.self_attention.submodules.core_attention = _DotProductAttention
        model = GPTModel(transformer_config(case, **changes), spec, **model_options(case))
        model.to(PRECISIONS[case.precision][0])
        draw_weights(model)
        initial = _arrays(dict(model.named_parameters()))
        records = [Record(replica, 0, replica, "Megatron", initial=initial) for replica in range(case.data_parallel)]
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)
        for step in range(NUM_STEPS):
            gradients = _reference_step(model, optimizer, case, step, records)
            for record in records:
                record.gradients[step] = gradients
        for record in records:
            record.parameters = _arrays(dict(model.named_parameters()))
        return records


def _reference_step(model: Any, optimizer: Any, case: Case, step: int, records: list[Record]) -> Weights:
    optimizer.zero_grad()
    for record in records:
        total = 0.0
        for index in range(case.accumulation):
            loss = _reference_loss(model, case, *micro_batch(case, record.data_parallel_id, step, index))
            (loss / (case.accumulation * case.data_parallel)).backward()
            total += loss.item()
        record.losses.append(total / case.accumulation)
    if case.clipping:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    gradients = _arrays({name: p.grad for name, p in model.named_parameters()})
    optimizer.step()
    return gradients


def _reference_loss(model: Any, case: Case, inputs: Any, labels: Any) -> Tensor:
    tokens, positions = (inputs, torch.arange(LENGTH).expand(ROWS, -1)) if torch.is_tensor(inputs) else inputs
    targets, mask = (labels, labels != IGNORE_INDEX) if torch.is_tensor(labels) else labels
    targets = targets.clamp_min(0)
    hidden_from = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]  # its own default is made on CUDA
    if case.documents:
        document = (positions == 0).cumsum(1)
        hidden_from = hidden_from | (document[:, None, :, None] != document[:, None, None, :])
        if window := _ATTENTION[case.attention].get("window_size"):
            hidden_from = hidden_from | torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1 - window[0])
    if case.precision == "fp32_megatron":
        losses = model(tokens, positions, hidden_from, labels=targets)
    else:
        logits = model(tokens, positions, hidden_from)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


class _DotProductAttention(DotProductAttention):
    """Drop arguments that latent attention has for Transformer Engine; here the config's `kv_channels` says them."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if "device" in (kwargs or {}) else {})})


@contextlib.contextmanager
def windows_on_the_cpu() -> Iterator[None]:
    """Let megatron-core's own function make the mask of a window on the CPU, which it would make on CUDA."""
    made = fused_softmax.get_sliding_window_causal_mask

    def on_the_cpu(*sizes: Any) -> Tensor:
        with _OnTheCpu():
            return made(*sizes)

    with mock.patch.object(fused_softmax, "get_sliding_window_causal_mask", on_the_cpu):
        yield


@contextlib.contextmanager
def own_parallel_state(**sizes: Any) -> Iterator[None]:
    """Provide Megatron's groups as Megatron makes them, for the block."""
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
    """Draw weights from the parameter's name alone: large enough that tokens matter to later ones, and biases and
    norms that are not 0 and 1."""
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


def build_model(
    case: Case, model_class: type[MegatronGPT] = MegatronGPT, changes: dict[str, Any] | None = None, **options: Any
) -> MegatronGPT:
    """Return this rank's part of our model. `changes` go into the TransformerConfig, `options` to the model."""
    tensor, stages, data, sequence_parallel = LAYOUTS[case.layout]
    if case.layout.startswith("dp2_pp2"):
        options = {"topology": ProcessTopology(["data", "pipe", "model"], [data, stages, tensor]), **options}
    layout = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    fields = {**layout, "sequence_parallel": sequence_parallel, **_RECOMPUTE[case.recompute], **(changes or {})}
    cross_entropy = "megatron" if case.precision == "fp32_megatron" else "exact"
    options = {**model_options(case), "loss_fn": VocabParallelLoss(cross_entropy), **options}
    return model_class(transformer_config(case, **fields), **options)


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


def terapipe_section(case: Case) -> dict[str, Any]:
    again = {"recompute": "full", "keep_attention": True} if case.recompute.startswith("kept") else {}
    again |= {"offload_activations": True} if case.recompute.startswith("offloaded") else {}
    return section(schedule=case.schedule, slices=case.slices, documents=1 if case.documents else "off", **again)


def build_engine(model: MegatronGPT, case: Case, **changes: Any) -> Any:
    """Return an engine of ours, or of DeepSpeed's own for `terapipe=None`. `changes` go into DeepSpeed's config."""
    adam = {"lr": LEARNING_RATE, "eps": ADAM_EPS, "torch_adam": True, "adam_w_mode": False}
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "Adam", "params": adam},
        "gradient_clipping": CLIP_NORM if case.clipping else 0.0,
        **PRECISIONS[case.precision][1],
        "terapipe": terapipe_section(case),
        "tensor_parallel": {"autotp_size": model.autotp_size if changes.get("terapipe", case) is not None else 0},
        **changes,
    }
    return start(model, initialize={"model_parameters": list(model.parameters())}, **ds_config)


@contextlib.contextmanager
def engine_of(
    case: Case, changes: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **ds_config: Any
) -> Iterator[Any]:
    """Yield a model, built as by `build_model` from its own initial weights, and its engine, for the block."""
    engine = build_engine(build_model(case, changes=changes, **(options or {})), case, **ds_config)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, case: Case, steps: Iterable[int], replica: int = 0) -> list[float]:
    """Make one optimizer step on the data of each of `steps`; return the losses on the last stage.

    All replicas get the same data by default, so that every layout trains alike.
    """
    losses = []
    for step in steps:
        engine.train_batch(iter([micro_batch(case, replica, step, index) for index in range(case.accumulation)]))
        if engine.is_last_stage():
            losses.append(float(engine.total_loss) / case.accumulation)
    return losses


def job_ours(
    case: Case, weights: Weights, prepare: Callable[[], Any] | None = None, watch: Callable[[Any], Any] | None = None
) -> Record:
    """Train our model in token slices. ``prepare()`` may return a context manager for the training; it yields a list of
    errors for the record. ``watch(engine)`` returns an object that fills up during the training."""
    with contextlib.nullcontext() if prepare is None else prepare() as caught:
        model = build_model(case)
        load_weights(model, weights, case)
        engine = build_engine(model, case)
        watched = None if watch is None else watch(engine)
        try:
            record = _train(engine, case)
        finally:
            engine.destroy()
    record.caught, record.watched = list(caught or []), watched
    return record


def job_build(case: Case) -> tuple[Record, dict[str, tuple[bool, int]]]:
    """Build our model alone; return its initial weights, and each parameter's marks of Megatron (cut or not, which
    dimension)."""
    model = build_model(case)
    record = _place(model.mpu())
    record.initial = _parameters_of(model)
    marks = {
        megatron_name(name): (getattr(p, "tensor_model_parallel", False), getattr(p, "partition_dim", -1))
        for name, p in model.named_parameters()
    }
    return record, marks


def _train(engine: Any, case: Case) -> Record:
    record = _place(engine.grid)
    record.initial = _parameters_of(engine.module)
    steps = itertools.count()

    def keep(gradients: dict[str, Tensor]) -> None:
        record.gradients[next(steps)] = _arrays({megatron_name(name): g for name, g in gradients.items()})

    record_gradients(engine, keep)
    record.losses = train(engine, case, range(NUM_STEPS), record.data_parallel_id)
    record.parameters = _parameters_of(engine.module)
    missing = [name for name in record.parameters if name not in record.gradients[0]]
    assert not missing, f"no gradient for {missing}"
    return record


def held_by(engine: Any) -> Record:
    """Return what this rank holds between two steps: parameters and the optimizer's states of them, in fp32."""
    record, states = _place(engine.grid), states_of(engine)
    record.states = {
        kind: {name: state[kind].float().numpy() for name, state in states.items()}
        for kind in ("value", "copy", *MOMENTS)
    }
    return record


def _place(grid: Any) -> Record:
    rank, replica = torch.distributed.get_rank(), grid.get_data_parallel_id()
    return Record(rank, grid.get_stage_id(), replica, "ours", tensor_rank=grid.get_slice_parallel_rank())


def _parameters_of(module: torch.nn.Module) -> Weights:
    return _arrays({megatron_name(name): p for name, p in module.named_parameters()})


def _arrays(tensors: dict[str, Tensor]) -> Weights:
    return {name: t.detach().double().numpy().copy() for name, t in tensors.items()}
