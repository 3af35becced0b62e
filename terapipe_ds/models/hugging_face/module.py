"""Define `HuggingFaceModule`: a causal language model of transformers as a DeepSpeed `PipelineModule`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from terapipe_ds.attention.document_edges import Documents, Starts
from terapipe_ds.compat.tied_groups import index_tied_modules
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.dict_batch import BatchError, read_dict
from terapipe_ds.messages import check_count
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.models.hugging_face.layers import Blueprint, DecoderLayer, Piece, check_positions, layers_of
from terapipe_ds.models.hugging_face.refusals import (
    ModelRefusedError,
    gathered,
    refuse_other_ranks,
    refused_on_all_ranks,
)
from terapipe_ds.models.hugging_face.tensor_parallel.divide import TensorRanks, check
from terapipe_ds.models.hugging_face.tensor_parallel.layers import universal_checkpoint_info
from terapipe_ds.models.hugging_face.weights.quantized import refuse_quantized
from terapipe_ds.models.hugging_face.weights.stored import HeldWeights, StoredWeights
from terapipe_ds.models.hugging_face.weights.unread import Unread, is_unread, read
from terapipe_ds.models.positions import longest_run
from terapipe_ds.models.rank_gradients import TensorParallelModule

_ADVICE = (
    "Either the ranks were given different samples: then seed and divide the sampler by the data-parallel rank. Or the "
    "layer computes otherwise in training: then leave out the axis 'model'"
)
_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # whatever dtype the rest has
Loss = Callable[[Tensor, Any], Tensor]
TupleBatch = tuple[Tensor | tuple[Tensor, Tensor], Tensor]


def to_tuple(batch: Mapping[str, Any]) -> TupleBatch:
    """Convert a batch of a Hugging Face collator into the tuple that the engines take: inputs, and shifted labels.

    labels[:, t] is `batch["labels"][:, t + 1]`, and the last label of a row or document is ignored. "shift_labels"
    are used unchanged. Position ids say where documents start, in whatever form the batch says it.

    Raises:
        BatchError: for left padding, labels that are missing, an entry that nothing reads.
    """
    # a packed batch without position ids gets them from its edges
    is_packed = any(batch.get(key) is not None for key in ("position_ids", "cu_seq_lens_q", "seq_idx"))
    read = read_dict(batch, TeraPipeConfig(enabled=True, documents="position_ids" if is_packed else "off"))
    if read.labels is None:
        raise BatchError("a dict batch has neither labels nor shift_labels: give labels, or the input_ids as labels")
    if read.starts is None or isinstance(read.inputs, tuple):
        return read.inputs, read.labels
    return (read.inputs, places_of_rows(read.inputs, read.starts)), read.labels


def places_of_rows(tokens: Tensor, starts: Starts | None) -> Tensor:
    """Return each token's place in its document, int64 [B, L], for whole rows."""
    rows, length = tokens.shape
    return Documents(starts or ((0,),) * rows, 0, length).position_ids().to(tokens.device)


class HuggingFaceModule(TensorParallelModule):
    """A causal language model of transformers, cut into stages by DeepSpeed; `from_config` makes one.

    Args:
        blueprint: the model's forward and the seed of its weights.
        num_stages: if there is no `topology`; None is 2.
        partition: the first pipeline layer of each part, and their number at the end; None: every stage gets the same
        number of decoder layers.
        options: other arguments of `PipelineModule`.

    Raises:
        ModelRefusedError: on every rank, if a decoder layer of some stage cannot run in slices.
    """

    refusal = ModelRefusedError

    def __init__(
        self,
        blueprint: Blueprint,
        num_stages: int | None,
        topology: ProcessTopology | None = None,
        partition: Sequence[int] | None = None,
        loss_fn: Loss | None = None,
        **options: Any,
    ) -> None:
        # all refusals come before the base class makes groups and layers
        axes = {} if topology is None else dict(zip(topology.axes, topology.dims, strict=True))
        if partition is not None and "partition_method" in options:
            raise ValueError(
                f"partition = {list(partition)} and partition_method = {options['partition_method']!r} both say where "
                "the layers are cut: give one of them"
            )
        if topology is None:
            num_stages = check_count("num_stages", 2 if num_stages is None else num_stages)
        elif num_stages not in (None, axes.get("pipe")):
            raise ValueError(
                f"num_stages = {num_stages!r}, and the topology has pipe = {axes.get('pipe')}: leave out num_stages"
            )
        tensor_ranks = axes.get("model", 1)
        if tensor_ranks > 1:
            refuse_quantized(blueprint.outline.model.config, "divided")
            adapters = blueprint.adapters
            check(blueprint.outline, tensor_ranks, None if adapters is None else adapters.config)
        if loss_fn is None or getattr(loss_fn, "is_of_model", False):
            blueprint.outline.check_loss(gpt_loss)
        # attributes that methods below need while the base class runs its constructor
        layers = layers_of(blueprint)
        self.autotp_size = tensor_ranks
        self._is_built, self._is_stored = False, isinstance(blueprint.weights, StoredWeights)
        self.blueprint = blueprint  # before the base class begins: its constructor builds the layers
        self.config = blueprint.outline.model.config
        self.partition = None if partition is None else _checked(partition, len(layers))
        cut = {"num_stages": num_stages, "topology": axes, "partition": self.partition}
        refuse_other_ranks({**cut, **blueprint.settings()})
        super().__init__(
            layers=layers,
            num_stages=None if topology is not None else num_stages,
            topology=topology,
            loss_fn=gpt_loss if loss_fn is None else loss_fn,
            **{"partition_method": "type:^DecoderLayer$", "checkpointable_layers": ["DecoderLayer"], **options},
        )
        self._is_built = True
        for name in _IN_FP32:  # the names of buffers: DeepSpeed looks for them in the modules of an engine
            setattr(self, name, getattr(blueprint.outline.model, name, None))
        self._try_layers()

    def laid_out(self) -> None:
        """Read the weights of this stage, and try in slices the decoder layers that are new on it.

        The engine calls this when layers have their stages. Under DeepSpeed's own engine, weights are read at its first
        access (`unread`).
        """
        with refused_on_all_ranks():
            self._read()
        self._try_layers()
        if isinstance(self.blueprint.weights, HeldWeights):
            self.blueprint.weights.release()  # the stages hold them, and the program may delete its whole model
        self.universal_checkpoint_info = universal_checkpoint_info(self, self._grid)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse the copy, which would fail at the process groups of the pipeline."""
        raise TypeError(
            "a HuggingFaceModule is a stage of a pipeline, whose process groups cannot be copied: copy its layers, "
            "[copy.deepcopy(layer) for layer in module.forward_funcs], for a moving average, say; or make another "
            "module with terapipe_ds.from_pretrained or from_config"
        )

    def _read(self) -> None:
        """Read the weights that this stage lacks, layer by layer; a bar for each stage shows it."""
        unread = {id(parameter.read): parameter for parameter in self.parameters() if isinstance(parameter, Unread)}
        is_shown = transformers_logging.is_progress_bar_enabled() and self.mpu().get_data_parallel_rank() == 0
        place = f"stage {self.stage_id}: reading weights"
        for parameter in tqdm(unread.values(), place, disable=not (unread and is_shown), unit="layer"):
            read([parameter])

    def _try_layers(self) -> None:
        """Try the decoder layers of this stage in slices; tell all stages which inputs the layers of any refuse."""
        with refused_on_all_ranks():
            ways = {layer.index: layer.find_way() for layer in self.modules() if isinstance(layer, DecoderLayer)}
        own = next((f"decoder layer {k} has {way.mixing}" for k, way in ways.items() if way.mixing), "")
        # layers differ, and so do stages: the first stage checks the inputs for all
        everyone = gathered((own, max((way.shortest_slice for way in ways.values()), default=1)))
        mixing, shortest = zip(*everyone, strict=True)
        self._mixing, self.shortest_slice = next(filter(None, mixing), ""), max(shortest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Leave weights unread while the base class moves them to a device as it builds the module."""
        if is_unread(self):
            if not self._is_built:
                return self
            self._read()  # whole layers: quantized weights are moved by code of their own
        return super()._apply(fn, recurse)

    _index_tied_modules = index_tied_modules  # also before `register`

    def _synchronize_tied_weights(self) -> None:
        """Send tied weights to the other stages that hold them; stages that read a folder all read the same ones."""
        if self._is_built or not self._is_stored:
            super()._synchronize_tied_weights()

    def _get_frozen_parameter_names(self, layer: nn.Module) -> list[str]:
        """Return the names that a save without frozen weights leaves out: frozen weights and their scales."""
        frozen = super()._get_frozen_parameter_names(layer)
        scales = [key for key in layer.state_dict() if key.startswith(tuple(f"{name}." for name in frozen))]
        return [*frozen, *scales]

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Raise ModelRefusedError for inputs that layers would not respect; the engine passes the inputs of whole rows.

        `starts` says where documents start in them.
        """
        if starts is not None and self._mixing:
            raise ModelRefusedError(
                f"the rows hold several documents, and {self._mixing}, which would mix them: give each document a row "
                "of its own"
            )
        if not torch.is_tensor(inputs):
            check_positions(inputs, places_of_rows(inputs[0], starts))
        longest, most = longest_run(inputs, starts), self.blueprint.outline.num_positions
        if most is not None and longest > most:
            name = type(self.blueprint.outline.model).__name__
            raise ModelRefusedError(
                f"a {'sequence' if starts is None else 'document'} of {longest} tokens, and {name} has positions for "
                f"{most}: give shorter ones, or a model whose config has more (max_position_embeddings, or the factor "
                "of rotary angles that are neither 'dynamic' nor 'longrope')"
            )

    def before_reduce(self, engine: PipelineEngine) -> None:
        """Sum partial gradients over tensor-parallel ranks; the engine calls it after the last backward of a batch.

        After the first batch whose gradients are finite, compare those that must be equal on all of these ranks.
        """
        if self.blueprint.ranks is not None:
            layers = {name: each for name, each in self.named_modules() if isinstance(each, DecoderLayer)}
            partial = [f"{name}.held.0.{key}" for name, layer in layers.items() for key in layer.find_way().partial]
            self.complete_gradients(partial, engine.optimizer, self.blueprint.ranks.group, _ADVICE)

    to_tuple = staticmethod(to_tuple)

    def checkpoint_names(self) -> dict[str, str]:
        """Return for each parameter of this stage its key in the state dict of the Hugging Face model."""
        return {
            f"{prefix}.held.{index}.{key}": f"{name}.{key}"
            for prefix, piece in self.named_modules()
            if isinstance(piece, Piece)
            for index, name in enumerate(piece.names)
            for key, _ in piece.held[index].named_parameters()
        }

    def _count_layer_params(self) -> list[int]:
        """Count without memory: the base class builds each layer of the model on each rank."""
        with torch.device("meta"):
            return super()._count_layer_params()

    def _build(self) -> None:
        # a layer of one stage alone may have no weights
        with contextlib.nullcontext() if self._is_built else refused_on_all_ranks():
            super()._build()

    def _partition_layers(self, method: str = "uniform") -> None:
        get_accelerator().set_device(self.local_rank)  # of collectives; DeepSpeed's engine chooses the same one later
        if self.autotp_size > 1 and self.blueprint.ranks is None:  # DeepSpeed's groups exist now, and no layer does
            group, device = self._grid.get_slice_parallel_group(), get_accelerator().device_name(self.local_rank)
            self.blueprint.ranks = TensorRanks(self.blueprint.outline, group, device)
        self._terapipe_partition_method = method  # for an engine that cuts the layers into more parts
        if self.partition is None:
            super()._partition_layers(method)
            return
        # stages that hold several parts get whole runs of them here; the engine cuts these once more
        chunks, rest = divmod(len(self.partition) - 1, self.num_stages)
        if rest:
            raise ValueError(
                f"partition {self.partition} has {len(self.partition) - 1} parts, and the model has {self.num_stages} "
                "stages: give a multiple"
            )
        self.parts = list(self.partition[::chunks])
        stage_id = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage_id], stop=self.parts[stage_id + 1])


def _checked(partition: Sequence[int], num_layers: int) -> list[int]:
    bounds = list(partition)
    is_rising = all(type(bound) is int for bound in bounds) and bounds == sorted(set(bounds))
    if not is_rising or len(bounds) < 2 or (bounds[0], bounds[-1]) != (0, num_layers):
        raise ValueError(
            f"partition {bounds} is not a list of rising integers from 0 to {num_layers}, the number of pipeline "
            "layers with embedding, norm and output matrix"
        )
    return bounds
