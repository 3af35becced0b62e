"""Divide the modules of a model over tensor-parallel ranks, by the plan that transformers has for its family.

`base_model_tp_plan` of a config says which linear layers of a decoder layer are divided by columns, and which by rows.
Embedding and output matrix are divided by the vocabulary. All else is whole on each rank: norms, routers, experts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from torch import Tensor, nn

from terapipe_ds.messages import in_short
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.forward.probe import Way, difference, draws, trial_of
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.hugging_face.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    SharedHeads,
    VocabEmbedding,
    copies_in,
)
from terapipe_ds.models.vocabulary_ranks import VocabularyRanks

_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_ALONE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input")  # their inputs and outputs are whole
_OF_ADAPTERS = re.compile(r"\.(base_layer|lora_A\.\w+|lora_B\.\w+)$")
_OF_HEADS = ("k_proj", "v_proj")
_DIFFERENCE = 1e-2  # relative, of gradients; whole ones and parts of sums differ by about 1


class TensorRanks(VocabularyRanks):
    """Divide modules over the ranks of one group, which have uneven shares of a vocabulary that does not divide."""

    def __init__(self, outline: Outline, group: Any, device: str) -> None:
        super().__init__(group, shares_tokens=False)
        self._outline, self.device = outline, device
        self._vocabulary = outline.module(outline.head).get_parameter("weight").shape[0]
        set_autotp_mode(training=True)  # DeepSpeed's layers would freeze their weights

    def divide(self, name: str, module: nn.Module) -> nn.Module:
        """Return the module `name` of the model with this rank's share of its weights. It may change `module`."""
        # weights without values keep none: each layer here only takes its part of their memory
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if name == self._outline.embedding:
                with contextlib.suppress(NotImplementedError):  # a forward of its own: whole on each rank
                    return VocabEmbedding(module, self.group) if isinstance(module, nn.Embedding) else module
                return module
            if name == self._outline.head:
                is_plain = type(module) is nn.Linear
                return ColumnLinear(module, self.group, gather_output=True) if is_plain else module
            for inner, style in _styles(self._outline, name, module):
                self._divide_layer(module, inner, style)
        return module

    def span(self, share: int) -> tuple[int, int]:
        """Return the first label of this rank's share, of `share` labels, and the number of all labels."""
        return sum(get_shard_size_list(self._vocabulary, self.size, AutoTPMeta())[: self.rank]), self._vocabulary

    def _divide_layer(self, module: nn.Module, inner: str, style: str) -> None:
        path, part = _split(inner)
        layer, owner = module.get_submodule(inner), module.get_submodule(path.rpartition(".")[0])
        if style == _SUMMED:
            layer.is_partial = True  # type: ignore[assignment]
            return
        if not isinstance(layer, nn.Linear):
            return
        new: nn.Module = layer
        # of low-rank factors, one lies within the ranks' shares, and the other has whole inputs and outputs
        if style == _COLUMNS and part != "lora_A":
            new = self._by_heads(layer, owner, path) or ColumnLinear(layer, self.group)
        elif style == _ROWS and part != "lora_B":
            new = RowLinear(layer, self.group)
        elif style == "rowwise_split_input" and not part.startswith("lora"):
            new = RowLinear(layer, self.group)
            new.splits_input = True
        elif style in _ALONE and not part.startswith("lora"):
            new = ColumnLinear(layer, self.group, gather_output=True)
        module.get_submodule(inner.rpartition(".")[0]).__setattr__(inner.rpartition(".")[2], new)

    def _by_heads(self, layer: nn.Linear, owner: nn.Module, path: str) -> nn.Module | None:
        """Return a layer of key or value heads that ranks share; None if each rank has heads of its own."""
        if not path.endswith(_OF_HEADS):
            return None
        size = int(getattr(owner, "head_dim", 0)) or self._outline.config.head_dim
        heads = layer.out_features // size
        if heads % self.size == 0:
            return None
        if self.size % heads:
            raise ModelRefusedError(
                f"its {heads} key and value heads do not divide by {self.size} tensor-parallel ranks, nor these by "
                "them: give a number of ranks that does"
            )
        groups = self._outline.config.num_attention_heads // heads
        if hasattr(owner, "num_key_value_groups"):
            owner.num_key_value_groups = groups * heads // self.size  # type: ignore[assignment]
        return SharedHeads(layer, self.group, heads)


def check(outline: Outline, size: int, adapter: Any) -> None:
    """Raise ModelRefusedError if the model cannot be divided over `size` tensor-parallel ranks."""
    over = f"over {size} tensor-parallel ranks"
    found = [
        (inner, style, layer.get_submodule(inner))
        for index, layer in enumerate(outline.layers)
        for inner, style in _styles(outline, outline.layer_name(index), layer)
    ]
    linears = {(inner, style) for inner, style, layer in found if isinstance(layer, nn.Linear)}
    if not linears:
        raise ModelRefusedError(
            f"its config has no plan for dividing its decoder layers {over} (base_model_tp_plan of transformers), and "
            "a topology without the axis 'model' needs none"
        )
    unknown = sorted(f"{inner}: {style!r}" for inner, style in linears if style not in (_COLUMNS, _ROWS, *_ALONE))
    if unknown:
        raise ModelRefusedError(f"its plan for dividing layers {over} has entries of another kind: {unknown[0]}")
    heads = outline.config.num_attention_heads
    has_heads = any(style == _COLUMNS and "att" in inner for inner, style in linears)
    if has_heads and heads % size:
        raise ModelRefusedError(f"its {heads} attention heads do not divide {over}: give a number of ranks that does")
    for module in (outline.model, *outline.layers):
        for text in _dropout_in(module):
            raise ModelRefusedError(
                f"{text}: {size} tensor-parallel ranks would draw it from random numbers of their own: set it to 0"
            )
    if adapter is not None and (adapter.lora_dropout or adapter.use_dora):
        raise ModelRefusedError(
            f"LoraConfig has lora_dropout or use_dora, which cannot be divided {over}: leave it out"
        )


def check_division(outline: Outline, index: int, layer: nn.Module, way: Way, ranks: TensorRanks) -> Way:
    """Return the way with the parameters whose gradients the ranks must sum. A collective.

    The plan names some of them, and norms or scales on shares of a layer have such gradients without it.

    Raises:
        ModelRefusedError: the ranks do not compute together as the whole decoder layer does: a layer may mix the heads
            of several ranks, its plan may be wrong, or its router may add noise.
    """
    trial, name = trial_of(outline, layer).to(ranks.device), outline.layer_name(index)
    shown, copies, sketches = f"decoder layer {index} ({type(layer).__name__})", dict[str, bool](), list[Tensor]()
    cannot = f"{shown} cannot be divided over {ranks.size} tensor-parallel ranks by its plan: "
    try:
        if draws(outline, index, trial, way):
            raise ModelRefusedError(
                f"{shown} draws random numbers in training, such as noise of a router: {ranks.size} tensor-parallel "
                "ranks would draw numbers of their own. Set its noise to 0, or leave out the axis 'model'"
            )
        problem, whole, here = difference(outline, index, trial, lambda: ranks.divide(name, trial), way)
        problem = problem and cannot + problem
        copies = {key: is_known for key, is_known in copies_in(trial).items() if key in here}
        sketches = [torch.stack([each[key] for key in copies]).cpu() for each in (whole, here) if copies]
    except ModelRefusedError as error:
        problem = str(error)
    except Exception as error:  # of the model's own code, which expects all heads
        problem = f"{cannot}{type(error).__name__}: {error}"
    # the ranks decide alike, by the numbers of all
    everyone: list[Any] = [None] * ranks.size
    torch_dist.all_gather_object(everyone, (problem, sketches), group=ranks.group)
    problem, partial = next((text for text, _ in everyone if text), ""), list[str]()
    if copies and not problem:
        partial, wrong = _sums(copies, everyone[0][1][0], torch.stack([both[1] for _, both in everyone]))
        if wrong:
            problem = f"{cannot}the ranks' gradients of {in_short(wrong)} are not whole, and their sum is neither"
    if problem:
        raise ModelRefusedError(problem)
    return way._replace(partial=tuple(partial))


def _sums(copies: Mapping[str, bool], whole: Tensor, everyone: Tensor) -> tuple[list[str], list[str]]:
    """Return the parameters whose gradient is the sum over the ranks, and those whose gradient is not even that.

    Args:
        copies: the parameters that each rank has, and whether their gradients are known to be sums.
        whole, everyone: sketches of their gradients, [copies, 64], and of each rank's.
    """
    # a gradient that is zero but for rounding tells nothing
    scale = whole.norm(dim=1)
    scale = scale.clamp_min(max(1e-4 * float(scale.max()), 1e-30))
    is_apart = (everyone - whole).norm(dim=2).amax(0) / scale > _DIFFERENCE
    is_no_sum = (everyone.sum(0) - whole).norm(dim=1) / scale > _DIFFERENCE
    either = zip(copies.items(), is_apart.tolist(), strict=True)
    partial = [key for (key, is_known), apart in either if is_known or apart]
    wrong = [key for key, no_sum in zip(copies, is_no_sum.tolist(), strict=True) if no_sum and key in partial]
    return partial, wrong


def _dropout_in(module: nn.Module) -> Iterator[str]:
    for part in module.modules():
        for key, value in vars(part).items():
            is_dropout = "drop" in key or (key == "p" and "Dropout" in type(part).__name__)
            if is_dropout and isinstance(value, float) and value > 0:
                yield f"{type(part).__name__} has {key} = {value:g}"


def _styles(outline: Outline, name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of parts of a module of the model that its plan names, and how it divides them."""
    plan: Mapping[str, str] = getattr(outline.config, "base_model_tp_plan", None) or {}
    prefix = f"{outline.model.base_model_prefix}."
    for inner, _ in list(module.named_modules()):
        words = f"{name}.{_split(inner)[0]}".removeprefix(prefix).split(".")
        style = plan.get(".".join("*" if word.isdigit() else word for word in words))
        if style is not None:
            yield inner, style


def _split(inner: str) -> tuple[str, str]:
    """Return the name that a part has without adapters, and which part of a layer with adapters it is."""
    found = _OF_ADAPTERS.search(inner)
    return (inner, "") if found is None else (inner[: found.start()], found[1].partition(".")[0])
