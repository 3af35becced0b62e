"""Run one layer on a whole sequence and on its slices as the engine does, and compare outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn

from terapipe_ds.attention import push_slice
from terapipe_ds.runtime.batch.sliceable import Tensors, as_tuple
from terapipe_ds.runtime.layers.finite import layer_title
from terapipe_ds.runtime.layout.layer_names import module_of
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_tokens, compare_values
from terapipe_ds.runtime.verify.tokens import PerSlice, Same, Slicing, TensorLayout, TokenDim

_SEED = 20210718  # of the output gradients, equal on all ranks
_Forward = tuple[Tensors, Any]  # the leaves that went into a forward, and what came out with its graph


@dataclass(frozen=True)
class Activations:
    """Hold what goes into or comes out of a layer on the whole sequence, detached, and how slices are cut from it."""

    tensors: Tensors
    is_tuple: bool
    layouts: tuple[TensorLayout, ...]

    def to(self, device: torch.device) -> Activations:
        """Return copies on `device`, which share memory with nothing."""
        moved = tuple(t.detach().to(device, copy=True).requires_grad_(t.requires_grad) for t in self.tensors)
        layouts = tuple(
            PerSlice(tuple(value.to(device) for value in layout.values)) if isinstance(layout, PerSlice) else layout
            for layout in self.layouts
        )
        return Activations(moved, self.is_tuple, layouts)


@dataclass(frozen=True)
class NamedLayer:
    """Name a layer by its number, with the activation checkpointing that training runs it under."""

    layer_id: int
    function: Callable[[Any], Any]
    checkpoint: Callable[..., Any] | None = None

    @property
    def module(self) -> nn.Module | None:
        """Return what holds its parameters; None for a plain function."""
        return module_of(self.function)

    def __call__(self, inputs: Tensors, is_tuple: bool) -> Any:
        if self.checkpoint is None:
            return self.function(inputs if is_tuple else inputs[0])
        return self.checkpoint(lambda *tensors: self.function(tensors[0] if len(tensors) == 1 else tensors), *inputs)

    def __str__(self) -> str:
        return layer_title(self.function, self.layer_id)


@dataclass
class LayerCheck:
    """Check one layer of `stage`. Use it inside `untouched(stage)`."""

    layer: NamedLayer
    inputs: Activations
    slicing: Slicing
    stage: nn.Module
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the engine runs layers
    with_gradients: bool = True  # False compares the outputs alone
    is_random: bool = False  # the layer draws random numbers in evaluation mode as well, and cannot be compared
    in_evaluation_mode: bool = False
    outputs: Activations | None = None  # of the whole sequence

    def run(self) -> Difference | None:
        """Return the first difference: of the outputs, of the input gradients, or of the parameters' gradients."""
        whole, slicing = self._run_whole(), self.slicing
        parts = self._forwards(slicing)
        self.outputs, difference = self._compare_outputs(whole[1], [outputs for _, outputs in parts])
        if self.is_random:
            return None
        difference = slicing.ranks.first(difference)
        gradients = {i: self._random_gradient(i, t) for i, t in enumerate(self.outputs.tensors) if t.requires_grad}
        if difference is not None or not self.with_gradients or not gradients:
            return difference
        expected = self._backwards(slicing.whole(), [whole], gradients)
        return slicing.ranks.first(self._compare_gradients(self._backwards(slicing, parts, gradients), expected))

    def _run_whole(self) -> _Forward:
        """Run the whole sequence; in evaluation mode if the layer draws random numbers, as slices draw other ones."""
        before = _random_states(self.stage)
        [run] = self._forwards(self.slicing.whole())
        self.is_random = not all(map(torch.equal, before, _random_states(self.stage)))
        if self.is_random and self.layer.module is not None and not self.in_evaluation_mode:
            self.layer.module.eval()
            self.in_evaluation_mode = True
            return self._run_whole()
        return run

    def _forwards(self, slicing: Slicing) -> list[_Forward]:
        runs = []
        for slice_id in range(slicing.plan.num_slices):
            pairs = zip(self.inputs.layouts, self.inputs.tensors, strict=True)
            leaves = tuple(slicing.cut(*pair, slice_id) for pair in pairs)
            with push_slice(slicing.active(slice_id)), self.autocast():
                copies = tuple(leaf.clone() for leaf in leaves)  # a layer may work in place
                runs.append((leaves, self.layer(copies, self.inputs.is_tuple)))
        return runs

    def _random_gradient(self, index: int, output: Tensor) -> Tensor:
        """Return a random gradient of an output, so that each token and each number counts."""
        generator = torch.Generator(device=output.device).manual_seed(_SEED + index)
        drawn = torch.randn(output.shape, generator=generator, device=output.device)
        return (drawn / self.slicing.plan.sequence_length**0.5).to(output.dtype)

    def _backwards(
        self, slicing: Slicing, runs: list[_Forward], gradients: dict[int, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradients of the inputs and the parameters; slices run in reverse order."""
        assert self.outputs is not None
        self._take_gradients()
        of_leaves: list[list[Tensor]] = []
        while runs:
            leaves, outputs = runs.pop()
            tensors, slice_id = as_tuple(outputs, "the outputs of a layer"), len(runs)
            used = [index for index in gradients if tensors[index].requires_grad]
            if used:
                layouts = self.outputs.layouts
                shares = [slicing.share_of_gradient(layouts[i], gradients[i], slice_id) for i in used]
                with push_slice(slicing.active(slice_id, "recompute")):
                    torch.autograd.backward([tensors[i] for i in used], shares)
            of_leaves.insert(0, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves])
        of_inputs = map(slicing.joined_gradients, self.inputs.layouts, zip(*of_leaves, strict=True))
        return list(of_inputs), self._take_gradients()

    def _take_gradients(self) -> dict[str, Tensor]:
        """Take the parameters' gradients, summed over tensor-parallel ranks: each may have a share of the tokens."""
        gradients = {}
        for name, parameter in self.stage.named_parameters():
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad.detach(), None
        ranks = self.slicing.ranks
        if ranks.size == 1 or len({tuple(names) for names in ranks.exchange(sorted(gradients))}) > 1:
            return gradients
        return {name: ranks.gather(gradients[name][None]).sum(0) for name in sorted(gradients)}

    def _tolerance(self, outputs: Sequence[Tensor]) -> Tolerance:
        parameters = () if self.layer.module is None else self.layer.module.parameters()
        dtypes = {tensor.dtype for tensor in (*self.inputs.tensors, *outputs, *parameters)}
        device = self.inputs.tensors[0].device.type
        with self.autocast():
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))
        return compare.tolerance_of(dtypes, tf32=device == "cuda" and torch.backends.cuda.matmul.allow_tf32)

    def _compare_outputs(self, whole: Any, parts: list[Any]) -> tuple[Activations, Difference | None]:
        """Return the outputs of the whole with their layouts, and the first one that differs."""
        tensors = tuple(t.detach().requires_grad_(t.requires_grad) for t in as_tuple(whole, "the outputs of a layer"))
        sliced = [as_tuple(part, "the outputs of a layer") for part in parts]
        pairs = []
        for index, tensor in enumerate(tensors):
            of_slices = [part[index].detach() if index < len(part) else tensor.new_empty(0) for part in sliced]
            tolerance = self._tolerance(tensors) if tensor.is_floating_point() else compare.EXACT
            pairs.append(_compare_output(tensor, of_slices, tolerance, self.slicing))
        layouts, differences = zip(*pairs, strict=True)
        return Activations(tensors, not torch.is_tensor(whole), layouts), next(filter(None, differences), None)

    def _compare_gradients(
        self, sliced: tuple[list[Tensor], dict[str, Tensor]], whole: tuple[list[Tensor], dict[str, Tensor]]
    ) -> Difference | None:
        assert self.outputs is not None
        tolerance, differences = self._tolerance(self.outputs.tensors), []
        for layout, tensor, a, b in zip(self.inputs.layouts, self.inputs.tensors, sliced[0], whole[0], strict=True):
            if tensor.requires_grad:
                compare_kind = compare_tokens if isinstance(layout, TokenDim) else compare_values
                differences.append(compare_kind("input gradient", a, b, tolerance))
        differences.append(compare.compare_parameters(sliced[1], whole[1], tolerance))
        return next(filter(None, differences), None)


def _compare_output(
    whole: Tensor, parts: list[Tensor], tolerance: Tolerance, slicing: Slicing
) -> tuple[TensorLayout, Difference | None]:
    """Return the layout of an output (if several are possible, one without a difference), and the difference."""
    pairs: list[tuple[TensorLayout, Difference | None]] = []
    for layout in slicing.layouts_of(whole, parts):  # all: tensor-parallel ranks do the same
        joined, expected = slicing.joined(layout, parts), slicing.joined(layout, [whole])
        pairs.append((layout, compare_tokens("output", joined, expected, tolerance)))
    if pairs:
        return next((pair for pair in pairs if pair[1] is None), pairs[0])
    if not any(compare_values("output", part, whole, tolerance) for part in parts):
        return Same(), None
    per_slice, has_tokens = PerSlice(tuple(parts)), any(part.shape != whole.shape for part in parts)
    joined = whole.new_empty(0) if has_tokens else slicing.joined(per_slice, parts)
    return per_slice, compare_values("output without tokens", joined, whole, tolerance)


def _random_states(module: nn.Module) -> list[Tensor]:
    trackers = [ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())]
    states = [state for tracker in trackers for state in tracker.get_states().values() if torch.is_tensor(state)]
    if not get_accelerator().is_synchronized_device():
        states.append(get_accelerator().get_rng_state())
    return [state.cpu().clone() for state in (torch.get_rng_state(), *states)]
