"""Define `MegatronGPT`: a GPT of megatron-core layers as a DeepSpeed `PipelineModule`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed.utils import log_dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.messages import nearest
from terapipe_ds.models.megatron.groups import process_groups
from terapipe_ds.models.megatron.kernels import describe_kernels, stand_in_for_cuda, stand_in_for_transformer_engine
from terapipe_ds.models.megatron.layers import ROTARY, Blueprint, gpt_layers, seed_dropout
from terapipe_ds.models.megatron.loss import WHOLE_LOGITS, VocabParallelLoss
from terapipe_ds.models.megatron.refusals import HALF_RESIDUAL, MegatronConfigError, check_config
from terapipe_ds.models.megatron.weights import is_partial, mark_split_parameters, universal_checkpoint_info
from terapipe_ds.models.rank_gradients import TensorParallelModule

_ADVICE = (
    "Where a rank's gradient counts only its own tokens or heads, set parameter.sequence_parallel = True, so that it "
    "is summed; otherwise the ranks were given different samples or different random numbers for dropout "
    "(terapipe_ds.models.megatron.layers.seed_dropout)"
)
_SHARE = (
    "losses of the same batch ({}): each rank has the logits of its share of the vocabulary. Use VocabParallelLoss() "
    "or LinearCrossEntropy(), or build MegatronGPT with parallel_output=False, so that loss_fn gets all logits"
)
_WHOLE = (
    "gradients of the same logits (norms {}): with parallel_output=False each rank has all logits, and this loss takes "
    "them for a share, as megatron-core's vocab_parallel_cross_entropy does. Leave parallel_output on, or use "
    "VocabParallelLoss() or a loss of all logits"
)
_LARGEST_DIFFERENCE = 1e-3  # of the losses of ranks, relative
_BLOCK = 128  # tokens that share a scaling factor in fp8, or a multiple of them


class MegatronGPT(TensorParallelModule):
    """A GPT of megatron-core layers, cut into stages by DeepSpeed and into token slices by terapipe_ds.

    The data iterator yields (tokens, labels) or ((tokens, position_ids), (labels, loss_mask)), all [B, L].

    Args:
        config: megatron-core's `TransformerConfig`; settings that slices cannot serve are refused.
        vocab_size: padded, so that it divides by the tensor-parallel size.
        max_sequence_length: of learned positions.
        topology: DeepSpeed's; None: `config.pipeline_model_parallel_size` x data parallel x
            `config.tensor_model_parallel_size` over all ranks.
        loss_fn: None: `VocabParallelLoss()`.
        partition_method: DeepSpeed's; the default gives every stage the same number of decoder layers.
        options: the other fields of `Blueprint`, named as the arguments of megatron-core's `GPTModel`, and `seed`: of
            dropout and of the initial weights, which do not depend on the number of stages (nor, with
            `use_cpu_initialization`, on the tensor-parallel size).

    Raises:
        MegatronConfigError: on every rank, before any layer is built.
    """

    refusal = MegatronConfigError

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        topology: ProcessTopology | None = None,
        loss_fn: Any = None,
        partition_method: str = "type:MegatronLayer",
        activation_checkpoint_interval: int = 0,
        **options: Any,
    ) -> None:
        # on every rank alike, before anything is built
        check_config(config)
        names = [each.name for each in dataclasses.fields(Blueprint) if each.init]
        for name in options.keys() - names:
            raise TypeError(f"MegatronGPT has no argument {name}{nearest(name, names)}")
        blueprint = Blueprint(config, vocab_size, max_sequence_length, **options)
        _check_sizes(config, vocab_size, blueprint.position_embedding_type)
        _check_rotary(blueprint)
        stand_in_for_cuda()
        stand_in_for_transformer_engine()
        self.blueprint = blueprint  # before the base class begins: its constructor builds the layers
        self.autotp_size = config.tensor_model_parallel_size
        loss_fn = VocabParallelLoss() if loss_fn is None else loss_fn
        is_whole = not blueprint.parallel_output and self.autotp_size > 1
        if is_whole and isinstance(loss_fn, VocabParallelLoss) and loss_fn.cross_entropy == "megatron":
            raise MegatronConfigError(WHOLE_LOGITS)
        if isinstance(loss_fn, LinearCrossEntropy):
            blueprint.parallel_output = False  # it takes logits of the whole vocabulary, where somebody asks for logits
        super().__init__(
            layers=gpt_layers(blueprint),
            topology=topology or _topology(config),
            loss_fn=loss_fn,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            checkpointable_layers=["MegatronLayer"],
        )
        # the layers exist now
        log_dist(describe_kernels(config), ranks=[0])
        self.laid_out()
        seed_dropout(blueprint.seed, self._grid)

    def laid_out(self) -> None:
        """Mark and describe the layers of this stage; the engine calls this again when it has replaced them."""
        mark_split_parameters(self)
        self.universal_checkpoint_info = universal_checkpoint_info(self, self.blueprint, self._grid)

    def _partition_layers(self, method: str = "uniform") -> None:
        """Take DeepSpeed's groups, which exist now, before the first layer is built."""
        get_accelerator().set_device(self.local_rank)  # of layers and collectives, as DeepSpeed's engine does later
        if self.blueprint.groups is None:
            self.blueprint.groups = process_groups(self._grid, self.blueprint.config)
        self._terapipe_partition_method = method  # for an engine that cuts the layers into more parts
        super()._partition_layers(method)

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # autograd would warn of this broadcast of a parameter in the first backward
            super()._synchronize_tied_weights()

    def _build(self) -> None:
        super()._build()
        config = self.blueprint.config
        if (config.recompute_granularity, config.recompute_method) == ("full", "block"):
            layers = (layer for layer in self.forward_funcs if hasattr(layer, "recompute"))
            for index, layer in enumerate(layers):  # one that stays may have been a first one before
                layer.recompute = index < config.recompute_num_layers

    @property
    def slice_length_multiple(self) -> int:
        """Return the divisor of slice lengths: ranks share tokens in sequence parallelism, fp8 has blocks of them."""
        config = self.blueprint.config
        return (self.blueprint.groups.tp.size() if config.sequence_parallel else 1) * (_BLOCK if config.fp8 else 1)

    @property
    def split_backwards_problem(self) -> str | None:
        """Return why no schedule may split backwards, None where one may."""
        kernels = "in fp8 Transformer Engine computes weight gradients and input gradients together"
        return kernels if self.blueprint.config.fp8 else None

    @property
    def training_problem(self) -> str | None:
        """Return why the layers cannot run in the dtype that DeepSpeed's config gives them, None where they can."""
        if not self.blueprint.config.fp32_residual_connection:
            return None
        halves = {p.dtype for p in self.parameters() if p.is_floating_point()} & {torch.bfloat16, torch.float16}
        return HALF_RESIDUAL if halves else None

    @property
    def rng_trackers(self) -> list[Any]:
        """Return the random states other than torch's own, for recomputation and measuring (`"slices": "auto"`)."""
        return [get_cuda_rng_tracker()]

    def before_reduce(self, engine: PipelineEngine) -> None:
        """Sum partial gradients over tensor-parallel ranks; the engine calls it after the last backward of a batch.

        After the first batch whose gradients are finite, compare those that must be equal on all of these ranks.
        """
        group, config = self.blueprint.groups.tp, self.blueprint.config
        if group.size() > 1:
            if not self.are_compared and torch.is_tensor(engine.total_loss):
                _require_equal_losses(engine.total_loss, self.blueprint.gradient_norms or [], group)
            names = {name for name, parameter in self.named_parameters() if is_partial(name, parameter, config)}
            self.complete_gradients(names, engine.optimizer, group, _ADVICE)
            self.blueprint.gradient_norms = None if self.are_compared else []


def _require_equal_losses(loss: Tensor, norms: list[Tensor], group: Any) -> None:
    """Raise MegatronConfigError on all ranks if their losses of a batch, or `norms` of logits' gradients, differ."""
    here = torch.stack([loss.detach().float().view(()), *norms])
    everyone = [torch.empty_like(here) for _ in range(group.size())]
    torch_dist.all_gather(everyone, here, group=group)
    values = torch.stack(everyone).t().tolist()
    for index, each in enumerate(values):
        if max(each) - min(each) > _LARGEST_DIFFERENCE * max(map(abs, each)):
            problem = (_WHOLE if index else _SHARE).format(each)
            raise MegatronConfigError(f"loss_fn gave the tensor-parallel ranks different {problem}")


def _topology(config: TransformerConfig) -> ProcessTopology:
    pipe, tensor = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    world = torch_dist.get_world_size()
    if world % (pipe * tensor):
        sizes = f"pipeline_model_parallel_size x tensor_model_parallel_size = {pipe} x {tensor}"
        raise MegatronConfigError(f"{world} ranks do not divide by {sizes}: start a multiple of {pipe * tensor} ranks")
    return PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=world // (pipe * tensor))


def _check_sizes(config: TransformerConfig, vocab_size: int, positions: str) -> None:
    tensor = config.tensor_model_parallel_size
    pad = f"pad it to {-(-vocab_size // tensor) * tensor} or more"
    sizes = {"vocab_size": (vocab_size, pad), "ffn_hidden_size": (config.ffn_hidden_size, "give a multiple")}
    for name, (size, fix) in sizes.items():
        if size % tensor:
            problem = f"{name}={size} does not divide by tensor_model_parallel_size={tensor}"
            raise MegatronConfigError(f"{problem}: {fix}")
    kinds = ("learned_absolute", "rope", "none")
    if positions not in kinds:
        raise MegatronConfigError(f"position_embedding_type={positions!r}: give one of {', '.join(kinds)}")


def _check_rotary(blueprint: Blueprint) -> None:
    """Refuse settings of rotary positions that latent attention would not read."""
    defaults = {field.name: field.default for field in dataclasses.fields(Blueprint)}
    for name in ROTARY if blueprint.config.multi_latent_attention else ():
        if (value := getattr(blueprint, name)) != defaults[name]:
            problem = f"{name}={value!r}: latent attention has its own rotary positions"
            fix = "rope_type, rotary_base, rotary_percent and rotary_scaling_factor"
            raise MegatronConfigError(f"{problem}. Set {fix} of MLATransformerConfig instead, as far as it has them")
