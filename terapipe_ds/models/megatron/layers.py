"""Define the layers of a GPT as DeepSpeed's pipeline runs them: each takes and returns one tensor.

Hidden states are [T, B, hidden_size], Megatron's order; under sequence parallelism each tensor-parallel rank holds
T / tp of the tokens of a slice. Positions begin where the active slice begins.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.losses import Head, hand_on, hands_on_hidden
from terapipe_ds.losses.deferred import require_known
from terapipe_ds.losses.head import change_of
from terapipe_ds.models.megatron.attention import layer_specs
from terapipe_ds.models.megatron.kernels import norm_class, on_cpu
from terapipe_ds.models.megatron.linears import SplitBackwards, computes_as_megatron, split_backwards
from terapipe_ds.models.megatron.loss import VocabParallelLoss
from terapipe_ds.models.positions import check_learned_positions, document_places, first_position, longest_run, places
from terapipe_ds.models.rank_gradients import SummedGradient
from terapipe_ds.models.vocabulary_ranks import VocabularyRanks

ROTARY = ("rotary_percent", "rotary_base", "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor")
"""Fields of `Blueprint` for rotary positions, named as the arguments of megatron-core's `RotaryEmbedding`."""


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm, computed in fp32 at least: a GPU makes no copy of the logits' size for that."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).float()


@dataclass
class Blueprint:
    """Hold the settings of all layers of one model, named as the arguments of megatron-core's `GPTModel`.

    DeepSpeed makes the `groups` later. `gradient_norms` has the norm of the gradient of each slice's logits, if each
    rank has the whole vocabulary, and is None once the ranks have compared them.
    """

    config: TransformerConfig
    vocab_size: int
    max_sequence_length: int
    position_embedding_type: str = "learned_absolute"  # | "rope" | "none"
    share_embeddings_and_output_weights: bool = False
    parallel_output: bool = True
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    seed: int = 1234
    transformer_layer_spec: ModuleSpec | list[ModuleSpec] | None = None
    groups: ProcessGroupCollection = field(default=None, init=False, repr=False)
    gradient_norms: list[Tensor] | None = field(default_factory=list, init=False, repr=False)

    @functools.cached_property
    def rotary(self) -> RotaryEmbedding | None:
        """Return the rotary positions that the layers of this rank share, without parameters.

        Latent attention has its own positions in each layer.
        """
        if self.position_embedding_type != "rope" or self.config.multi_latent_attention:
            return None
        return RotaryEmbedding(
            kv_channels=self.config.kv_channels,
            rotary_interleaved=self.config.rotary_interleaved,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.groups.cp,
            **{name: getattr(self, name) for name in ROTARY},
        )

    @functools.cached_property
    def tied_projection(self) -> ColumnParallelLinear:
        """Return the output projection of tied embeddings, which has no weight of its own."""
        return self.projection(skip_weight_param_allocation=True)

    def projection(self, **options: Any) -> ColumnParallelLinear:
        """Return a new output projection, with a weight unless `options` say otherwise."""
        return ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=not self.parallel_output,
            tp_group=self.groups.tp,
            **options,
        )

    def logits(self, hidden: Tensor, projection: ColumnParallelLinear, **options: Any) -> Tensor:
        """Return logits [B, T, V / tp] (all of V with `parallel_output=False`), or `hidden` if the loss takes it."""
        if hands_on_hidden():
            return hand_on(hidden).transpose(0, 1)
        logits: Tensor = projection(hidden, **options)[0].transpose(0, 1)
        VocabParallelLoss.groups[logits.shape[-1]] = self.groups.tp if self.parallel_output else None
        norms = None if self.parallel_output or self.groups.tp.size() == 1 else self.gradient_norms
        active = active_slice()
        # a probe measures what later batches take, which compare nothing
        if norms is not None and logits.requires_grad and active is not None and active.mode != "probe":
            logits.register_hook(lambda gradient: norms.append(_norm(gradient)))
        return logits

    def head_of(self, projection: ColumnParallelLinear, weight: Tensor) -> Head | str:
        """Return an output projection as a loss takes it in place of logits, or why it cannot."""
        if type(projection) is not ColumnParallelLinear or not computes_as_megatron(projection):
            return "the output projection is not megatron-core's own ColumnParallelLinear"
        group = self.groups.tp
        ranks = VocabularyRanks(group, self.config.sequence_parallel) if group.size() > 1 else None
        return change_of(projection, "the output projection") or Head(weight, ranks=ranks)

    @contextlib.contextmanager
    def drawn(self, layer_index: int) -> Iterator[None]:
        """Draw the weights of a layer built in this context from the seed and `layer_index` alone.

        Afterwards all random states are as before. With `use_cpu_initialization` the whole matrix is drawn and cut, so
        that the weights are the same for every tensor-parallel size; without it they are the same for one size.
        """
        # split weights are drawn from the tracker, all others from torch's own state: both are seeded, and put back
        tracker, seed = tensor_parallel.get_cuda_rng_tracker(), self.seed + 1_000_003 * (layer_index + 1)
        states, seeds = tracker.get_states(), set(tracker.seeds_)
        with torch.random.fork_rng(devices=[] if on_cpu() else [get_accelerator().current_device()]):
            torch.manual_seed(seed)
            _seed_tracker(seed, self.groups.tp.rank())
            try:
                yield
            finally:
                tracker.set_states(states)
                tracker.seeds_ = seeds

    def random_numbers(self) -> Any:
        """Draw dropout and noise in this context: ranks that hold different tokens need different random numbers."""
        config = self.config
        if config.sequence_parallel and (
            config.hidden_dropout > 0 or config.attention_dropout > 0 or config.moe_input_jitter_eps is not None
        ):
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def gpt_layers(blueprint: Blueprint) -> list[LayerSpec]:
    """Return the model as `PipelineModule(layers=...)` takes it: tokens in, logits [B, T, V / tp] out."""
    first, last = LayerSpec(MegatronEmbedding, blueprint), LayerSpec(MegatronHead, blueprint)
    # the last stage's copy has no positions: they would be a table without gradients
    if blueprint.share_embeddings_and_output_weights:
        tied = functools.partial(
            TiedLayerSpec, "embedding", MegatronEmbedding, blueprint, tied_weight_attr=["word_embeddings.weight"]
        )
        first, last = tied(), tied(positions=False, forward_fn=TiedLogits(blueprint))
    specs = layer_specs(blueprint.config, blueprint.transformer_layer_spec)
    layers = [LayerSpec(MegatronLayer, blueprint, index, spec) for index, spec in enumerate(specs)]
    return [first, *layers, LayerSpec(MegatronFinalNorm, blueprint), last]


class MegatronEmbedding(LanguageModelEmbedding):
    """Tokens [B, T], or (tokens, position ids), int64 -> hidden states.

    Position ids are for learned positions: as in megatron-core's `GPTModel`, rotary ones follow from a token's place
    in the sequence. `positions=False`: the last stage's copy of a tied embedding.
    """

    def __init__(self, blueprint: Blueprint, positions: bool = True) -> None:
        kind = blueprint.position_embedding_type if positions else "none"
        with blueprint.drawn(0):
            super().__init__(
                config=blueprint.config,
                vocab_size=blueprint.vocab_size,
                max_sequence_length=blueprint.max_sequence_length,
                position_embedding_type=kind,
                tp_group=blueprint.groups.tp,
            )
        if self.add_position_embedding:
            self.position_embeddings.to(blueprint.config.params_dtype)
        self.blueprint = blueprint

    def defer_weight_gradients(self, gradients: SplitBackwards) -> None:
        """Leave the weight gradient of a tied output projection to W; lookups have their gradients in B."""
        if self.blueprint.share_embeddings_and_output_weights:
            split_backwards(self.blueprint.tied_projection, gradients)

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Raise ValueError for unknown tokens, and for too few learned positions, before the first slice runs."""
        tokens, position_ids = (inputs, None) if torch.is_tensor(inputs) else inputs
        require_known(tokens, self.vocab_size, "token")  # ranks that divide the vocabulary embed others as zeros
        if self.add_position_embedding:
            stop = longest_run(tokens, starts) if position_ids is None else int(position_ids.max()) + 1
            check_learned_positions(stop, self.max_sequence_length, ValueError)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]
        tokens, position_ids = (inputs, None) if torch.is_tensor(inputs) else inputs
        if self.add_position_embedding and position_ids is None:
            if document_places() is None:
                check_learned_positions(first_position() + tokens.shape[1], self.max_sequence_length, ValueError)
            position_ids = places(tokens)
        return super().forward(tokens, position_ids)


class MegatronLayer(nn.Module):
    """One decoder layer of megatron-core, hidden states -> the same; `index` counts from 0."""

    def __init__(self, blueprint: Blueprint, index: int, spec: ModuleSpec) -> None:
        super().__init__()
        self.blueprint, config = blueprint, blueprint.config
        with blueprint.drawn(1 + index):
            self.layer = build_module(spec, config=config, layer_number=1 + index, pg_collection=blueprint.groups)
        _begin_at_slices(self.layer, blueprint.groups.tp)
        for module in self.layer.modules() if config.fp8 else ():
            # weights kept in fp8 would have to be made anew when a step, a checkpoint or a measurement changes them
            if hasattr(module, "disable_parameter_transpose_cache"):
                module.disable_parameter_transpose_cache = True
        if getattr(self.layer, "recompute_mlp", False):
            self.layer.mlp.register_forward_hook(_copy_bias)
        self.recompute = config.recompute_granularity == "full" and config.recompute_method == "uniform"

    def defer_weight_gradients(self, gradients: SplitBackwards) -> None:
        """Leave the weight gradients of linear layers to W if the schedule has one; the engine calls this once."""
        split_backwards(self.layer, gradients)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.blueprint.config.recompute_granularity and torch.is_grad_enabled() and not hidden.requires_grad:
            # after frozen layers: Megatron's checkpoints have gradients only where an input has one
            hidden = hidden.detach().requires_grad_(any(weight.requires_grad for weight in self.layer.parameters()))
        if self.recompute and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(self._run, False, hidden)
        return self._run(hidden)

    def _run(self, hidden: Tensor) -> Tensor:
        positions = None
        if self.blueprint.rotary is not None:
            # under sequence parallelism a rank holds its share of the tokens, and attends to all of the slice
            shared_by = self.blueprint.groups.tp.size() if self.blueprint.config.sequence_parallel else 1
            positions = self.blueprint.rotary(hidden.shape[0] * shared_by, offset=first_position())
        config = self.blueprint.config
        in_fp8 = get_fp8_context(config, self.layer.layer_number - 1) if config.fp8 else contextlib.nullcontext()
        with self.blueprint.random_numbers(), in_fp8:
            hidden, _ = self.layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=positions)
        return hidden


def _copy_bias(module: nn.Module, args: Any, result: Any) -> Any:
    """Copy the last bias that megatron-core's MLP returns beside its output, for the sum with the residual stream.

    Without the copy, a checkpoint (0.16.1) would return the parameter itself as a result of its function, whose
    backward then calls itself forever.
    """
    if isinstance(result, tuple) and len(result) == 2 and torch.is_tensor(result[1]):
        return result[0], result[1].clone()
    return result


class MegatronFinalNorm(nn.Module):
    """The norm before the output projection, hidden states -> the same."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config = blueprint.config
        self.norm = norm_class(config)(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class MegatronHead(nn.Module):
    """Hidden states -> logits [B, T, V / tp] (all of V with `parallel_output=False`)."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self._blueprint = blueprint
        with blueprint.drawn(1 + blueprint.config.num_layers):
            self.output_layer = blueprint.projection()

    def defer_weight_gradients(self, gradients: SplitBackwards) -> None:
        """Leave the weight gradient of the head to W, as in `MegatronLayer`."""
        split_backwards(self.output_layer, gradients)

    def output_head(self) -> Head | str:
        """Return this rank's share of the output matrix for a loss that keeps no logits."""
        return self._blueprint.head_of(self.output_layer, self.output_layer.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._blueprint.logits(hidden, self.output_layer)


@dataclass
class TiedLogits:
    """Compute logits [B, T, V / tp] by the weights of the embedding: the `forward_fn` of the last layer, if tied."""

    blueprint: Blueprint

    def __call__(self, embedding: MegatronEmbedding, hidden: Tensor) -> Tensor:
        return self.blueprint.logits(hidden, self.blueprint.tied_projection, weight=embedding.word_embeddings.weight)

    def output_head(self, embedding: MegatronEmbedding) -> Head | str:
        return self.blueprint.head_of(self.blueprint.tied_projection, embedding.word_embeddings.weight)


def seed_dropout(seed: int, grid: PipelineParallelGrid) -> None:
    """Seed this rank with Megatron-LM's offsets by stage and replica; tensor-parallel ranks differ in the tracker."""
    seed += 100 * grid.get_stage_id() + 10 * grid.get_data_parallel_rank()
    torch.manual_seed(seed)
    _seed_tracker(seed, grid.get_slice_parallel_rank())


def _seed_tracker(seed: int, tensor_rank: int) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tensor_rank)
    tracker.add(megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + tensor_rank)


# --- multi-latent attention


def _begin_at_slices(layer: nn.Module, tensor_parallel: Any) -> None:
    """Have latent attention in a layer begin its positions at the active slice, on any number of ranks.

    `MLASelfAttention` computes its own rotary positions, from 0 on, and each of its heads reads the one rotary part of
    the keys. Hooks fix both; all else is megatron-core's code.
    """
    for attention in layer.modules():
        if not isinstance(attention, MLASelfAttention):
            continue
        attention.rotary_pos_emb.register_forward_pre_hook(_from_slice_start, with_kwargs=True)
        if tensor_parallel.size() > 1:
            sizes = [attention.config.kv_lora_rank, attention.config.qk_pos_emb_head_dim]
            shares_tokens = attention.config.sequence_parallel
            hook = functools.partial(_whole_latents, sizes=sizes, shares_tokens=shares_tokens, group=tensor_parallel)
            attention.linear_kv_down_proj.register_forward_hook(hook)


def _from_slice_start(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**options, "offset": first_position()}


def _whole_latents(
    module: nn.Module, args: Any, result: Any, *, sizes: list[int], shares_tokens: bool, group: Any
) -> tuple[Tensor, Any]:
    """Return the latents and the rotary keys whole, so that the keys' gradients of all ranks' heads are summed.

    megatron-core 0.16.1 gathers the parts of a column-parallel projection itself. It hands a rank back the gradient of
    its part; for the keys, that gradient counts only the rank's own heads. Under sequence parallelism it sums them
    where the projection returns a rank's tokens whole.
    """
    both, bias = result
    if both.shape[-1] != sum(sizes):
        both = gather_from_tensor_model_parallel_region(both, group)
        if shares_tokens:
            both = scatter_to_sequence_parallel_region(both, group)
    if not shares_tokens:
        latents, keys = both.split(sizes, dim=-1)
        both = torch.cat([latents, SummedGradient.apply(keys, group)], dim=-1)
    return both, bias
