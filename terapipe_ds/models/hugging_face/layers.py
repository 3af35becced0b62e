"""Make a model of transformers into the layers that a DeepSpeed `PipelineModule` takes.

    Embedding | DecoderLayer 0 | ... | DecoderLayer N - 1 | Norm | OutputMatrix

Each holds modules of the model with weights, and runs the model's own forward around them (`Outline`). If embedding
and output matrix are tied, the first layer holds only the shared weights, so that the last stage holds no more. The
other modules that run before the decoder layers (learned positions) are then a layer of their own, `BeforeLayers`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from transformers import PretrainedConfig

from terapipe_ds.attention import active_slice, allow_attention_within_slice
from terapipe_ds.losses import Head, hand_on, hands_on_hidden, head_of
from terapipe_ds.losses.head import change_of
from terapipe_ds.models.hugging_face.forward.outline import Outline, Run
from terapipe_ds.models.hugging_face.forward.probe import Way, find_way
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.hugging_face.tensor_parallel.divide import TensorRanks, check_division
from terapipe_ds.models.hugging_face.tensor_parallel.layers import ColumnLinear, Products, VocabEmbedding
from terapipe_ds.models.hugging_face.weights.quantized import take_scales, without_values
from terapipe_ds.models.hugging_face.weights.stored import Weights
from terapipe_ds.models.hugging_face.weights.unread import Unread, is_unread
from terapipe_ds.models.positions import places

if TYPE_CHECKING:  # peft takes seconds to import
    from terapipe_ds.models.hugging_face.weights.adapters import Adapters

TIED = "embedding"  # the key of the tied layers
_NOT_DESCRIBED = {*vars(nn.Module()), "layer_idx"}


def _without_paths(value: Any) -> Any:
    """Return nested dicts without private keys and folders: machines may have the same model in different places."""
    if not isinstance(value, dict):
        return value
    public = {name: each for key, each in value.items() if not (name := str(key)).startswith("_")}
    return {name: _without_paths(each) for name, each in public.items() if not name.endswith("name_or_path")}


class Blueprint:
    """Hold what all pieces of a model share: its outline, the source of weights, and the ways of its decoder layers."""

    def __init__(self, outline: Outline, weights: Weights, adapters: Adapters | None = None) -> None:
        self.outline, self.weights, self.adapters = outline, weights, adapters
        self.ranks: TensorRanks | None = None  # over which modules are divided; None: one rank
        self._ways: dict[tuple[str, str], Way] = {}

    def settings(self) -> dict[str, Any]:
        """Return what decides on the model, for ranks to compare: configs without paths, and a seed."""
        adapter = {} if self.adapters is None else _without_paths(self.adapters.config.to_dict())
        named = {f"adapter.{key}": value for key, value in adapter.items()}
        own = _without_paths(self.outline.model.config.to_dict())
        dtype = next(each.dtype for each in self.outline.module(self.outline.embedding).parameters())
        sources = {"weights": self.weights, "adapters": self.adapters}
        stored = {f"the checksum of stored {name}": getattr(each, "checksum", None) for name, each in sources.items()}
        return {**own, **named, **stored, "dtype": str(dtype), "seed": getattr(self.weights, "seed", None)}

    def way_of(self, index: int, layer: nn.Module) -> Way:
        """Return how a decoder layer runs in slices; layers of one kind are tried once, and unread ones by a copy.

        Raises ModelRefusedError if it cannot run in slices.
        """
        # one trial per kind: it costs several forwards and backwards of a few tokens
        kinds = getattr(self.outline.config, "layer_types", None) or [""] * (index + 1)
        name = self.outline.layer_name(index)
        kind = kinds[index], _described(layer).replace(f"{name}.", "")  # peft keeps names of modules
        if kind not in self._ways:
            if self.ranks is not None or is_unread(layer):
                layer = self.filled(name, is_whole=True)
            self._ways[kind] = find_way(self.outline, index, layer)
            if self.ranks is not None:
                self._ways[kind] = check_division(self.outline, index, layer, self._ways[kind], self.ranks)
        return self._ways[kind]

    def filled(self, name: str, is_whole: bool = False) -> nn.Module:
        """Return a copy of a module of the model, with weights of its own; without, on the device "meta".

        With tensor-parallel ranks it has this rank's share of the weights, unless `is_whole`.
        """
        module = self.outline.copy_of(self.outline.module(name))
        if torch.get_default_device().type == "meta":
            return module
        # parameters that modules share stay shared
        new: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for key, old in part._parameters.items():
                if old is not None:
                    part._parameters[key] = new.setdefault(id(old), without_values(old, part))
        self.weights.fill(name, module)
        module = module if self.adapters is None else self.adapters.put_into(name, module)
        return module if self.ranks is None or is_whole else self.ranks.divide(name, module)


def _described(layer: nn.Module) -> str:
    """Describe a layer by its modules, their sizes and numbers, so that layers with one description compute alike."""
    lines = [
        f"{name} {type(module)} {value}"
        for name, module in layer.named_modules()
        for value in sorted(
            f"{key}={value!r}"
            for key, value in {**vars(module), **module._buffers}.items()
            if key not in _NOT_DESCRIBED and not isinstance(value, PretrainedConfig | Unread)
        )
    ]
    return f"{layer!r}\n" + "\n".join(lines)


class Piece(nn.Module):
    """Hold modules of the model; `names` are their names in it."""

    def __init__(self, blueprint: Blueprint, names: Iterable[str]) -> None:
        super().__init__()
        self.blueprint, self.names = blueprint, tuple(names)
        self.held = nn.ModuleList(map(blueprint.filled, self.names))
        self._made_in = [p.dtype for name in self.names[:1] for p in blueprint.outline.module(name).parameters()][:1]

    @property
    def shared_by_copies(self) -> tuple[object, ...]:
        """Return the objects that copies have too: the outline says in the model's config how a layer attends."""
        outline = self.blueprint.outline
        return self.blueprint, outline.config, outline.model.config

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        """Copy the weights, for a moving average, and no other piece of the model."""
        memo |= {id(each): each for each in self.shared_by_copies}
        memo[id(self)] = copied = self.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_scales(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def defer_weight_gradients(self, gradients: Products) -> None:
        """Let the engine compute the weight gradients of linear layers that transformers defines itself."""
        for layer in self.modules():
            make = _LINEARS.get(type(layer).__name__) if type(layer).__module__.startswith("transformers.") else None
            replaced = vars(layer).get("forward")  # by an earlier engine, which does not matter, or by the user
            if make is not None and (replaced is None or getattr(replaced, "func", None) is make):
                layer.forward = functools.partial(make, gradients, layer)  # a copy of the layer has its own weights

    @property
    def outline(self) -> Outline:
        """Return the model's forward, in the mode of this piece."""
        outline = self.blueprint.outline
        # the outline has the modules that run around the held ones, such as dropout
        if outline.model.training != self.training:
            outline.model.train(self.training)
        # an engine casts the weights of all pieces alike
        outline.dtypes.update(zip(self._made_in, (p.dtype for p in self.parameters()), strict=False))
        return outline

    @property
    def runs(self) -> dict[str, nn.Module]:
        return dict(zip(self.names, self.held, strict=True))


class Embedding(Piece):
    """Token ids [B, T], or with position ids a tuple -> hidden states [B, T, H] of the first decoder layer."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        return self.outline.run_before(self.runs, tokens_of(inputs))


class TiedEmbedding(Piece):
    """Token ids, or with position ids a tuple -> their embeddings; the output matrix is the same weights."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        return self.held[0](tokens_of(inputs))


class BeforeLayers(Piece):
    """Embeddings of tokens -> hidden states of the first decoder layer; only in models with tied embeddings."""

    def forward(self, embedded: Tensor) -> Tensor:
        tokens = torch.zeros(embedded.shape[:2], dtype=torch.long, device=embedded.device)
        own: dict[str, Run] = {**self.runs, self.outline.embedding: lambda *_, **__: embedded}
        return self.outline.run_before(own, tokens)


class DecoderLayer(Piece):
    """One decoder layer, [B, T, H] -> the same."""

    slice_safe = True  # whatever it is made of: it was tried

    def __init__(self, blueprint: Blueprint, index: int) -> None:
        super().__init__(blueprint, [blueprint.outline.layer_name(index)])
        self.index = index
        self._way: Way | None = None

    def find_way(self) -> Way:
        """Return how the layer runs in slices. Raises ModelRefusedError if it cannot."""
        if self._way is None:
            self._way = self.blueprint.way_of(self.index, self.held[0])
        return self._way

    def compiled_parts(self) -> list[nn.Module]:
        """Return the modules for torch's compiler: the model's own layer, if its attention is `sliced_attention`.

        The model's code around its layers is not compiled: positions come to the layer as tensors.
        """
        way = self.find_way()
        is_plain = way.is_fast and not way.has_states and self.blueprint.adapters is None
        is_plain = is_plain and self.blueprint.ranks is None
        return [self.held[0]] if is_plain else []

    def forward(self, hidden: Tensor) -> Tensor:
        active, way = active_slice(), self.find_way()
        # models take a single token for a step of generation, with other code
        if active is not None and not active.is_whole and active.num_tokens < way.shortest_slice:
            raise ModelRefusedError(
                f"slice [{active.start}, {active.stop}) has {active.num_tokens} token, which decoder layer "
                f"{self.index} would take for a step of generation: give slices of {way.shortest_slice} tokens or more"
            )
        outline = self.outline
        with contextlib.nullcontext() if way.is_fast else allow_attention_within_slice():  # keys come from a cache
            return outline.run_layer(self.index, self.held[0], hidden, outline.attention(way.is_fast))


class Norm(Piece):
    """Run the modules between the decoder layers and the output matrix, [B, T, H] -> the same."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.outline.run_after(self.runs, hidden)


class OutputMatrix(Piece):
    """Apply the output matrix and the code that follows it (scales, caps), [B, T, H] -> logits [B, T, vocab_size]."""

    def output_head(self) -> Head | str:
        """Return the output matrix and the code after it for a loss that keeps no logits, or why it needs logits."""
        held = self.held[0]
        if not isinstance(held, ColumnLinear):
            return _with_scale_and_cap(head_of(held), self)
        head = Head(held.weight, held.bias, ranks=self.blueprint.ranks)
        return _with_scale_and_cap(change_of(held, "the output matrix") or head, self)

    def forward(self, hidden: Tensor) -> Tensor:
        if hands_on_hidden():
            return hand_on(hidden)
        return self.outline.run_head(self.held[0], hidden)


class TiedLogits:
    """Compute the logits by the weights of the embedding: the `forward_fn` of the last layer, if it is tied."""

    def __call__(self, embedding: TiedEmbedding, hidden: Tensor) -> Tensor:
        if hands_on_hidden():
            return hand_on(hidden)
        held = embedding.held[0]
        weight = held.get_parameter("weight")
        product = held.logits if isinstance(held, VocabEmbedding) else lambda x: F.linear(x, weight)
        return embedding.outline.run_head(product, hidden)

    def output_head(self, embedding: TiedEmbedding) -> Head | str:
        held = embedding.held[0]
        ranks = embedding.blueprint.ranks if isinstance(held, VocabEmbedding) else None
        return _with_scale_and_cap(Head(held.get_parameter("weight"), ranks=ranks), embedding)


def _with_scale_and_cap(head: Head | str, piece: Piece) -> Head | str:
    if isinstance(head, str):
        return head
    form = piece.outline.scale_and_cap(head.weight.dtype)
    return form if isinstance(form, str) else replace(head, scale=form[0], softcap=form[1])


def _conv1d(gradients: Products, layer: Any, inputs: Tensor) -> Tensor:
    return gradients.linear(inputs, layer.weight, layer.bias, is_transposed=True)


def _falcon(gradients: Products, layer: Any, inputs: Tensor) -> Tensor:
    outputs = gradients.linear(inputs, layer.weight)
    return outputs if layer.bias is None else outputs + layer.bias  # the layer rounds before it adds


_LINEARS = {"Conv1D": _conv1d, "FalconLinear": _falcon}


def layers_of(blueprint: Blueprint) -> list[LayerSpec]:
    """Return the model as `PipelineModule(layers=...)` takes it."""
    outline = blueprint.outline
    decoder = [LayerSpec(DecoderLayer, blueprint, index) for index in range(len(outline.layers))]
    norm = LayerSpec(Norm, blueprint, [name for name in outline.after if name != outline.head])
    if outline.tied is None:
        head = LayerSpec(OutputMatrix, blueprint, [outline.head])
        return [LayerSpec(Embedding, blueprint, outline.before), *decoder, norm, head]
    # DeepSpeed sums the gradients of layers with one key over their stages
    weight, names = "held.0.weight", [outline.embedding]
    first = TiedLayerSpec(TIED, TiedEmbedding, blueprint, names, tied_weight_attr=weight)
    last = TiedLayerSpec(TIED, TiedEmbedding, blueprint, names, forward_fn=TiedLogits(), tied_weight_attr=weight)
    others = [name for name in outline.before if name != outline.embedding]
    return [first, LayerSpec(BeforeLayers, blueprint, others), *decoder, norm, last]


def tokens_of(inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the token ids of inputs, whose position ids must be those that the decoder layers find.

    Raises ModelRefusedError if they differ. Within our engine `HuggingFaceModule.check_inputs` has already checked.
    """
    if not torch.is_tensor(inputs) and active_slice() is None:
        check_positions(inputs, places(inputs[0]))
    return inputs if torch.is_tensor(inputs) else inputs[0]


def check_positions(inputs: tuple[Tensor, ...], expected: Tensor) -> None:
    """Raise ModelRefusedError if inputs are not token ids with the position ids that the decoder layers find."""
    if len(inputs) > 2:
        raise ModelRefusedError(f"there are {len(inputs)} inputs: the model takes (input_ids, position_ids)")
    for ids in inputs[1:]:
        if not torch.equal(ids.to(expected), expected):
            raise ModelRefusedError(
                "the position ids are not 0, 1, 2, ... in each row, or in each of its documents. If they start again "
                'where a document does, let the terapipe section say so: {"documents": 1}, or {"documents": '
                '"position_ids"} where batches are dicts. Positions of another kind are not supported'
            )
