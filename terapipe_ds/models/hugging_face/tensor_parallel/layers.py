"""Define layers that hold a share of a weight: DeepSpeed's AutoTP layers, on the host and with split backwards.

They take and return the same tensors as the layers that they replace. DeepSpeed's collectives sum or gather them.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from deepspeed.checkpoint import constants
from deepspeed.module_inject import layers as autotp
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor, nn

from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.losses.deferred import require_known
from terapipe_ds.models.rank_gradients import SummedGradient, is_split, of_all_stages


class Products(Protocol):
    """Declare the object that an engine passes to `defer_weight_gradients`."""

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, is_transposed: bool = False) -> Tensor:
        """Return the product, with care of the weight's gradient."""


class _Share(autotp.TensorParallel_Layer):
    """Hold a share of a weight, by rank and along `dim`."""

    dim = 0
    products: Products | None = None

    def move(self, tensor: Tensor) -> Tensor:
        """Copy a share out of the whole weight; it stays where it is, for DeepSpeed has not chosen a device yet."""
        return tensor.clone()

    def share(self, whole: Tensor) -> Tensor:
        return whole.split(self._partition_sizes, self.dim)[self.tp_index]

    def gather(self) -> None:
        """Take the whole weight, in place of the share; a collective, after which the layer only stores."""
        for parameter in self.parameters(recurse=False):
            if parameter is self.weight or self.dim == 0:
                parameter.data = self._all_gather_shards(parameter.detach(), self._partition_sizes, self.dim)

    def defer_weight_gradients(self, products: Products) -> None:
        self.products = products

    def multiply(self, inputs: Tensor) -> Tensor:
        linear = F.linear if self.products is None else self.products.linear
        return linear(inputs, self.weight, self.bias if self.dim == 0 else None)


class ColumnLinear(_Share, autotp.LinearLayer):
    """Compute a share of the outputs from all inputs, or all outputs with `gather_output`."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.multiply(SummedGradient.apply(inputs, self.mp_group))
        if self.gather_output:
            out = autotp.GatherFromTensorParallelRegion.apply(self.mp_group, out, self._partition_sizes)
        return out


class RowLinear(_Share, autotp.LinearAllreduce):
    """Compute all outputs from a share of the inputs, which it takes out of all inputs if `splits_input`."""

    dim = 1
    splits_input = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.splits_input:
            args = (self.mp_group, inputs, self._partition_sizes, self.tp_index)
            inputs = autotp.ScatterToTensorParallelRegion.apply(*args)
        out: Tensor = autotp.RowParallel.apply(self.mp_group, self.multiply(inputs), False)
        return out if self.bias is None else out + self.bias


class VocabEmbedding(_Share, autotp.VocabParallelEmbedding):
    """Embed tokens by a share of the vocabulary; the ranks sum their embeddings."""

    def check_inputs(self, inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> None:
        """Raise ValueError for tokens that no rank has, whose embeddings would be zeros."""
        require_known(inputs if torch.is_tensor(inputs) else inputs[0], self.vocab_size, "token")

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, where the output matrix is this one."""
        out = F.linear(SummedGradient.apply(inputs, self.mp_group), self.weight)
        whole: Tensor = autotp.GatherFromTensorParallelRegion.apply(self.mp_group, out, self._partition_sizes)
        return whole


class SharedHeads(nn.Linear):
    """Compute one head of several; every rank has all weights, for there are fewer heads than ranks.

    The gradient of the weights is partial: `is_partial`.
    """

    is_partial = True

    def __init__(self, linear: nn.Linear, group: Any, heads: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features // heads
        self.weight, self.bias = linear.weight, linear.bias
        head = torch_dist.get_rank(group) * heads // torch_dist.get_world_size(group)
        self._rows = slice(head * self.out_features, (head + 1) * self.out_features)
        self._summed = lambda inputs: SummedGradient.apply(inputs, group)  # a group cannot be copied, this can

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self._rows]
        return F.linear(self._summed(inputs), self.weight[self._rows], bias)


def share_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return the share of `whole` that `parameter` holds: all of it if no layer here has it."""
    layer = getattr(getattr(parameter, "gather_params", None), "__self__", None)
    return layer.share(whole) if isinstance(layer, _Share) else whole


def copies_in(module: nn.Module) -> dict[str, bool]:
    """Return the names of the parameters that each rank has whole, and whether their gradients are known to be sums."""
    marked = {id(p) for layer in module.modules() if getattr(layer, "is_partial", False) for p in layer.parameters()}
    return {name: id(p) in marked for name, p in module.named_parameters() if not is_split(p)}


def gathered_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which each divided layer has its whole weight. A collective over the group."""
    if not any(isinstance(layer, _Share) for layer in module.modules()):
        return module
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for layer in copied.modules():
            if isinstance(layer, _Share):
                layer.gather()
    return copied


def universal_checkpoint_info(module: nn.Module, grid: PipelineParallelGrid) -> dict[str, Any]:
    """Describe the parameters of all stages for DeepSpeed's universal checkpoints, which hold each of them whole.

    A collective over the pipeline.
    """
    maps = autotp.collect_autotp_universal_checkpoint_info(module).get(constants.AFFINE_MAP, {})
    known: dict[str, Any] = maps.get(constants.AFFINE_MAP_PARAMS, {})
    # DeepSpeed's converter refuses patterns that name nothing, and frozen parameters have no optimizer states
    trained = {rf"^{re.escape(name)}$": p for name, p in module.named_parameters() if p.requires_grad}
    here = {pattern: known[pattern] if is_split(p) else None for pattern, p in trained.items()}
    layouts = of_all_stages(here, grid)
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # copies are equal but for rounding, and those that DeepSpeed calls replicated must be equal bit by bit
        constants.PARAMETER_TO_AVERAGE_PATTERNS: [pattern for pattern, layout in layouts.items() if layout is None],
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [p for p in layouts if p.startswith(r"^tied_modules\.")],
        constants.AFFINE_MAP: {
            constants.AFFINE_MAP_VERSION: maps.get(constants.AFFINE_MAP_VERSION, 1),
            constants.AFFINE_MAP_PARAMS: {p: layout for p, layout in layouts.items() if layout is not None},
        },
    }
