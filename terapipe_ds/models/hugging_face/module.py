"""`HuggingFaceModule`: a causal language model of transformers as a DeepSpeed `PipelineModule`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from terapipe_ds.attention.documents import Documents, Starts
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.dict_batch import BatchError, read_dict
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import parse_json
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.models.hugging_face.outline import Outline
from terapipe_ds.models.hugging_face.pieces import Blueprint, DecoderLayer, Piece, check_positions, layers_of
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError, check_config, gathered, refused_on_all_ranks
from terapipe_ds.models.hugging_face.unread import is_unread, read
from terapipe_ds.models.hugging_face.weights import ADAPTER_CONFIG, DrawnWeights, HeldWeights, StoredWeights

SMALL = 1024
if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from terapipe_ds.models.hugging_face.adapters import Adapters

Loss = Callable[[Tensor, Any], Tensor]
Adapter: TypeAlias = "PeftConfig | PeftModel | str | os.PathLike[str] | None"
TupleBatch = tuple[Tensor | tuple[Tensor, Tensor], Tensor]


class HuggingFaceModule(PipelineModule):
    """A causal language model of transformers, cut into stages by DeepSpeed; `from_config` makes one.

    Args:
        blueprint: the model's forward and the seed of its weights.
        num_stages: where there is no `topology`.
        partition: the first pipeline layer of each part, and their number at the end; None: each stage gets as many
            decoder layers.
        options: other arguments of `PipelineModule`.

    Raises:
        ModelRefusedError: on every rank, where a decoder layer of some stage cannot run in slices.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        num_stages: int | None,
        topology: ProcessTopology | None = None,
        partition: Sequence[int] | None = None,
        loss_fn: Loss | None = None,
        **options: Any,
    ) -> None:
        layers = layers_of(blueprint)
        self._is_built, self._is_stored = False, isinstance(blueprint.weights, StoredWeights)
        self.source: Path | None = None  # the folder of the weights
        self.blueprint = blueprint  # before the base class begins: its constructor builds the layers
        self.config = blueprint.outline.model.config
        self.partition = None if partition is None else _checked(partition, len(layers))
        super().__init__(
            layers=layers,
            num_stages=None if topology is not None else num_stages,
            topology=topology,
            loss_fn=gpt_loss if loss_fn is None else loss_fn,
            **{"partition_method": "type:^DecoderLayer$", "checkpointable_layers": ["DecoderLayer"], **options},
        )
        self._is_built = True
        with refused_on_all_ranks():
            self._try_layers()
        self._agree()

    def laid_out(self) -> None:
        """Read the weights of this stage, and try decoder layers that are new on it in slices.

        The engine calls this when layers have their stages. Under DeepSpeed's own weights are read as its engine looks
        at them (`unread`).
        """
        with refused_on_all_ranks():
            read(self.parameters())
            self._try_layers()
        self._agree()

    def _try_layers(self) -> None:
        ways = {layer.index: layer.find_way() for layer in self.modules() if isinstance(layer, DecoderLayer)}
        self._mixing = next((f"decoder layer {k} has {way.mixing}" for k, way in ways.items() if way.mixing), "")
        self.shortest_slice = max((way.shortest_slice for way in ways.values()), default=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Leave weights unread where the base class brings them to a device as it builds the module."""
        return super()._apply(fn, recurse) if self._is_built or not is_unread(self) else self

    def _synchronize_tied_weights(self) -> None:
        """Send tied weights to the other stages that hold them; all read the same where they are read from a folder."""
        if self._is_built or not self._is_stored:
            super()._synchronize_tied_weights()

    def _agree(self) -> None:
        """Let all stages know what the layers of some do not take."""
        mixing, shortest = zip(*gathered((self._mixing, self.shortest_slice)), strict=True)
        self._mixing, self.shortest_slice = next(filter(None, mixing), ""), max(shortest)

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Raise ModelRefusedError for inputs that layers would not respect; the engine shows those of whole rows.

        `starts` says where documents start in them.
        """
        if starts is not None and self._mixing:
            raise ModelRefusedError(
                f"the rows hold several documents, and {self._mixing}, which would mix them: give each document a row "
                "of its own"
            )
        if not torch.is_tensor(inputs):
            check_positions(inputs, places_of_rows(inputs[0], starts))

    def to_tuple(self, batch: Mapping[str, Any]) -> TupleBatch:
        """Return what the engines take for a batch of a Hugging Face collator: inputs, and labels that are shifted.

        labels[:, t] is `batch["labels"][:, t + 1]`, and the last one of a row or document is ignored. "shift_labels"
        are taken as they are. Position ids say where documents start, however the batch says it.

        Raises:
            BatchError: for left padding, labels that are missing, an entry that nothing reads.
        """
        return to_tuple(batch)

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

    def _partition_layers(self, method: str = "uniform") -> None:
        self._terapipe_partition_method = method  # for an engine that cuts the layers into more parts
        if self.partition is None:
            super()._partition_layers(method)
            return
        chunks, rest = divmod(len(self.partition) - 1, self.num_stages)
        if rest:
            raise ValueError(
                f"partition {self.partition} has {len(self.partition) - 1} parts, and the model has {self.num_stages} "
                "stages: give a multiple"
            )
        self.parts = list(self.partition[::chunks])
        stage_id = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage_id], stop=self.parts[stage_id + 1])


def from_config(
    config: PretrainedConfig,
    num_stages: int = 2,
    topology: ProcessTopology | None = None,
    partition: Sequence[int] | None = None,
    loss_fn: Loss | None = None,
    dtype: torch.dtype | None = None,
    *,
    adapter: Adapter = None,
    seed: int = 1234,
    **options: Any,
) -> HuggingFaceModule:
    """Return the causal language model of a config of transformers, with random weights, as a `PipelineModule`.

    Args:
        config: what `transformers.AutoModelForCausalLM.from_config` takes.
        topology: DeepSpeed's; in its absence `num_stages` stages, and the other ranks are data parallel.
        partition: the first pipeline layer of each part, and their number at the end. Layer 0 embeds tokens.
        loss_fn: of logits and shifted labels; the default is the mean cross entropy over labels that are not -100.
        dtype: of the weights; the default is the config's.
        adapter: a LoraConfig of peft, or a folder of adapters that are trained on. Adapters are trained in the place of
            all weights, and `save_pretrained` writes them.
        seed: of the initial weights, which do not depend on the number of stages.
        options: other arguments of `PipelineModule`, `activation_checkpoint_interval` among them.

    Raises:
        ModelRefusedError: the model cannot be cut into stages that run token slices; the message says why.
    """
    with _family_named(config):
        outline = Outline(model_without_weights(config, dtype))
    adapters = _adapters(adapter, config, dtype, outline, seed)
    with _family_named(config):
        blueprint = Blueprint(outline, DrawnWeights(outline, seed), adapters)
        return HuggingFaceModule(blueprint, num_stages, topology, partition, loss_fn, **options)


def from_pretrained(
    folder: str | os.PathLike[str] | PreTrainedModel | PeftModel,
    num_stages: int = 2,
    topology: ProcessTopology | None = None,
    partition: Sequence[int] | None = None,
    loss_fn: Loss | None = None,
    dtype: torch.dtype | None = None,
    *,
    adapter: Adapter = None,
    seed: int = 1234,
    **options: Any,
) -> HuggingFaceModule:
    """Return the causal language model in a folder as a `PipelineModule`; each stage reads the weights of its layers.

    Args:
        folder: with a config and safetensors, as `save_pretrained` of transformers writes them; or with adapters, as
            peft writes them, whose config names the folder of the model. A model in memory, with adapters of peft or
            without, is taken as well; then each rank has all of it.

    The other arguments are those of `from_config`.

    Raises:
        ModelRefusedError: the model cannot be cut into stages that run token slices, or the folder lacks weights.
    """
    options |= {"num_stages": num_stages, "topology": topology, "partition": partition, "loss_fn": loss_fn}
    if isinstance(folder, nn.Module):
        return _from_model(folder, dtype, adapter, seed, options)
    with refused_on_all_ranks():  # each may have a disk of its own
        folder, adapter = _folders(folder, adapter)
        config = AutoConfig.from_pretrained(folder)
        with _family_named(config):
            if getattr(config, "quantization_config", None) is not None:
                raise ModelRefusedError("its weights are quantized, and are not trained so. Give those of the original")
            outline = Outline(model_without_weights(config, dtype))
        with contextlib.suppress(OSError):  # most have one
            outline.model.generation_config = GenerationConfig.from_pretrained(folder)
        weights = StoredWeights(folder, model_without_weights(config, dtype), outline)
        blueprint = Blueprint(outline, weights, _adapters(adapter, config, dtype, outline, seed))
    with _family_named(config):
        module = HuggingFaceModule(blueprint, **options)
    module.source = folder
    return module


def _from_model(
    model: PreTrainedModel | PeftModel, dtype: torch.dtype | None, adapter: Adapter, seed: int, options: dict[str, Any]
) -> HuggingFaceModule:
    config, state, dtype = model.config, model.state_dict(), dtype or model.dtype
    if hasattr(model, "peft_config"):
        from terapipe_ds.models.hugging_face.adapters import without_adapters  # peft takes seconds to import

        if adapter is not None:
            raise ModelRefusedError("the model has adapters, and others are given: leave out adapter=")
        state, adapter = without_adapters(model), model
    with _family_named(config):
        outline = Outline(model_without_weights(config, dtype))
    outline.model.generation_config = model.generation_config
    blueprint = Blueprint(outline, HeldWeights(state), _adapters(adapter, config, dtype, outline, seed))
    with _family_named(config):
        return HuggingFaceModule(blueprint, **options)


def _folders(folder: str | os.PathLike[str], adapter: Adapter) -> tuple[Path, Adapter]:
    """Return the folder of the model, and the adapters. Raises ModelRefusedError where there is no such folder."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelRefusedError(f"{folder} is no folder: download the model first, and give the folder it is in")
    if adapter is not None or not (path / ADAPTER_CONFIG).is_file() or (path / "config.json").is_file():
        return path, adapter
    base = parse_json(read_bytes(path / ADAPTER_CONFIG)).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ModelRefusedError(
            f"{path} has adapters for the model {base!r}, which is no folder here: give the folder of the model, and "
            f"adapter={str(path)!r}"
        )
    return Path(base), path


def _adapters(
    adapter: Adapter, config: PretrainedConfig, dtype: torch.dtype | None, outline: Outline, seed: int
) -> Adapters | None:
    if adapter is None:
        return None
    from terapipe_ds.models.hugging_face.adapters import Adapters  # peft takes seconds to import

    return Adapters(adapter, model_without_weights(config, dtype), outline, seed)


@contextlib.contextmanager
def _family_named(config: PretrainedConfig) -> Iterator[None]:
    """Check the config; name the family in all that refuses it."""
    try:
        check_config(config)
        yield
    except ModelRefusedError as error:
        raise ModelRefusedError(
            f"{config.model_type} cannot be trained in stages and token slices: {error}. Write its layers as a "
            "PipelineModule (docs/models.md), or train it on one device"
        ) from error


def model_without_weights(config: PretrainedConfig, dtype: torch.dtype | None) -> Any:
    """Return the model with real buffers, and with parameters on the device "meta"."""
    given = {} if dtype is None else {"dtype": dtype}
    with _parameters_on_meta():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **given)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        without = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        if parameter.numel() <= SMALL:  # some families set a few numbers as they build the module, and never again
            without.initial = parameter.detach()  # type: ignore[attr-defined]
        return without

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def to_tuple(batch: Mapping[str, Any]) -> TupleBatch:
    """Return inputs and shifted labels of a batch; see `HuggingFaceModule.to_tuple`."""
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


def _checked(partition: Sequence[int], num_layers: int) -> list[int]:
    bounds = list(partition)
    if (
        len(bounds) < 2
        or bounds[0] != 0
        or bounds[-1] != num_layers
        or any(a >= b for a, b in itertools.pairwise(bounds))
    ):
        raise ValueError(
            f"partition {bounds} is not a list of rising bounds from 0 to {num_layers}, the number of pipeline layers "
            "with embedding, norm and output matrix"
        )
    return bounds
