"""Run one layer on a whole sequence and on its slices as the engine does, and compare outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terapipe_ds.attention import push_slice
from terapipe_ds.runtime.batch.sliceable import Tensors, as_tuple
from terapipe_ds.runtime.layers.finite import layer_title
from terapipe_ds.runtime.layers.kept_state import KeptState
from terapipe_ds.runtime.layout.layer_names import module_of
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_tokens, compare_values
from terapipe_ds.runtime.verify.constant_draws import ConstantDraws
from terapipe_ds.runtime.verify.tokens import PerSlice, Same, Slicing, TensorLayout, TokenDim

_SEED = 20210718  # of the output gradients, equal on all ranks
_LARGE, _LARGE_IN_FP16 = 2.0**12, 2.0**4  # output gradients by which hooks that clip show
_TRIES = 64  # how often a layer draws anew to show whether what it does depends on that
_PER_CALL = (
    "it draws random numbers once per call and not per token (a dropped layer, stochastic depth, a mask for all "
    "tokens), so that each slice draws its own: draw per token, or set terapipe.slices to 1"
)
_LATER = "what depends on it changes after other steps than on whole sequences"
_Forward = tuple[Tensors, Any]  # the leaves that went into a forward, and what came out with its graph


class _SeesHooks(TorchFunctionMode):
    """Sees whether a forward registers hooks of its activations."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


class _Draws(NamedTuple):
    """Hold how many numbers one forward drew at a time, in order, and the states of other generators that it moved."""

    sizes: tuple[int, ...]
    moved: tuple[bytes, ...]


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
    is_random: bool = False  # the layer draws in a way that is not known, in evaluation mode as well: not compared
    in_evaluation_mode: bool = False
    constant_draws: ConstantDraws | None = None  # what a layer that draws random numbers draws instead
    outputs: Activations | None = None  # of the whole sequence
    hooks_activations: bool = False
    scale: float = 1.0  # of the output gradients
    faults: list[str] = field(default_factory=list)  # what the layer keeps or draws otherwise than on whole sequences
    notes: list[str] = field(default_factory=list)  # what may be as meant

    def run(self) -> Difference | None:
        """Return the first difference: of the outputs, of the input gradients, or of the parameters' gradients.

        A layer whose gradients pass through hooks, which may clip them, is compared on large gradients as well.
        """
        kept = KeptState({"": self.layer.function, **self._modules()})
        difference = self._compare(kept)
        if difference is None and self.with_gradients and self.slicing.ranks.first(self._has_hooks() or None):
            self._begin_anew(kept)
            self.scale = _LARGE_IN_FP16 if torch.float16 in self._dtypes(()) else _LARGE
            self.outputs, self.faults, self.notes = None, [], []
            difference = self._compare(kept)
        return difference

    def _compare(self, kept: KeptState) -> Difference | None:
        """Compare. The slices begin with what the layer kept before the whole ran, its counters and running means."""
        ranks = self.slicing.ranks
        before = kept.numbers()
        whole, drawn = self._run_whole(kept)
        outputs = as_tuple(whole[1], "the outputs of a layer")
        gradients = {i: self._random_gradient(i, t) for i, t in enumerate(outputs) if t.requires_grad}
        is_compared = self.with_gradients and bool(gradients) and not self.is_random
        expected = self._backwards(self.slicing.whole(), [whole], gradients) if is_compared else None
        of_whole = kept.numbers()
        self._begin_anew(kept)
        parts, drawn_by_slices = self._forwards(self.slicing, kept)
        self.outputs, difference = self._compare_outputs(whole[1], [part for _, part in parts])
        if self.is_random:
            return None
        of_all = [*drawn, *drawn_by_slices] if len(drawn_by_slices) > 1 else []
        difference = ranks.first(difference)
        if difference is None and expected is not None:
            difference = ranks.first(self._compare_gradients(self._backwards(self.slicing, parts, gradients), expected))
        if difference is None or not difference.what.startswith("output"):
            self._compare_state(before, of_whole, kept.numbers())
        elif changed := [
            name for name in self._saved(before, of_whole) if not torch.equal(of_whole[name], before[name])
        ]:
            self.faults.append(f"each call changes the buffer {', '.join(changed)}, which later slices see")
        is_moved = ranks.first(_moved_per_call(of_all) or None)
        if _sizes_per_call(of_all) or (is_moved and self._depends_on_draws(kept, outputs)):
            self.faults.append(_PER_CALL)
        elif is_moved:
            self.notes.append(f"draws from a generator once per call, which changed no output in {_TRIES} trials")
        return difference

    def _depends_on_draws(self, kept: KeptState, expected: Tensors) -> bool:
        """Return whether the generators' next numbers ever give other outputs of the whole sequence."""
        for _ in range(_TRIES):
            self.slicing.store.reset()
            kept.put_back(rewinds=False)
            with torch.no_grad():
                [(_, whole)], _ = self._forwards(self.slicing.whole(), kept, rewinds=False)
            pairs = zip(as_tuple(whole, "the outputs of a layer"), expected, strict=True)
            if self.slicing.ranks.first(any(compare_values("", *p, self._tolerance(expected)) for p in pairs) or None):
                return True
        return False

    def _has_hooks(self) -> bool:
        """Return whether gradients of activations, of modules or of parameters pass through hooks."""
        hooked = [*self._modules().values(), *([] if self.layer.module is None else self.layer.module.parameters())]
        return self.hooks_activations or any(
            bool(getattr(each, name, None)) for each in hooked for name in ("_backward_hooks", "_backward_pre_hooks")
        )

    def _modules(self) -> dict[str, object]:
        return {} if self.layer.module is None else dict(self.layer.module.named_modules())

    def _run_whole(self, kept: KeptState) -> tuple[_Forward, list[_Draws]]:
        """Run the whole sequence; where the layer draws random numbers, which slices draw anew, with constants.

        Where it draws in a way that is not known, it runs in evaluation mode.
        """
        before = _random_states(self.stage), kept.generator_states()
        [run], drawn = self._forwards(self.slicing.whole(), kept)
        if self.constant_draws is not None:
            self.is_random = bool(self.constant_draws.unknown)
        else:
            same = all(map(torch.equal, before[0], _random_states(self.stage)))
            self.is_random = not same or before[1] != kept.generator_states()
        if not self.is_random or self.in_evaluation_mode:
            return run, drawn
        if self.constant_draws is None:
            self.constant_draws = ConstantDraws()
        elif self.layer.module is None:
            return run, drawn
        else:
            self.constant_draws, self.in_evaluation_mode = None, True
        self._begin_anew(kept)
        return self._run_whole(kept)

    def _begin_anew(self, kept: KeptState) -> None:
        """Let the layer forget what it was run for."""
        self.slicing.store.reset()
        kept.put_back()
        if self.in_evaluation_mode and self.layer.module is not None:
            self.layer.module.eval()

    def _forwards(self, slicing: Slicing, kept: KeptState, rewinds: bool = True) -> tuple[list[_Forward], list[_Draws]]:
        """Return the forwards of all slices, and what each has drawn."""
        runs, drawn = [], []
        for slice_id in range(slicing.plan.num_slices):
            pairs = zip(self.inputs.layouts, self.inputs.tensors, strict=True)
            leaves = tuple(slicing.cut(*pair, slice_id) for pair in pairs)
            if self.constant_draws is not None and rewinds:
                kept.rewind_generators()
            states = kept.generator_states()
            constant, hooks = self.constant_draws or nullcontext(), _SeesHooks()
            with push_slice(slicing.active(slice_id)), self.autocast(), constant, hooks:
                copies = tuple(leaf.clone() for leaf in leaves)  # a layer may work in place
                runs.append((leaves, self.layer(copies, self.inputs.is_tuple)))
            self.hooks_activations |= hooks.seen
            if self.constant_draws is not None:
                moved = [
                    after if after != before else b""
                    for before, after in zip(states, kept.generator_states(), strict=True)
                ]
                drawn.append(_Draws(tuple(self.constant_draws.take_sizes()), tuple(moved)))
        return runs, drawn

    def _saved(self, *numbers: Mapping[str, Any]) -> list[str]:
        """Return the names of what a checkpoint holds, of those that are tensors in all `numbers`."""
        saved = {} if self.layer.module is None else self.layer.module.state_dict(keep_vars=True)
        return sorted(name for name in saved if all(torch.is_tensor(each.get(name)) for each in numbers))

    def _compare_state(
        self, before: Mapping[str, Any], of_whole: Mapping[str, Any], of_slices: Mapping[str, Any]
    ) -> None:
        """Find tensors that have other values after the slices than after the whole, and numbers that count calls."""
        saved, tolerance = self._saved(before, of_whole, of_slices), self._tolerance(())
        for name, number in sorted(before.items()):
            whole, sliced = of_whole[name], of_slices[name]
            kinds = {type(each) for each in (number, whole, sliced)}
            if kinds == {Tensor}:
                allowed = tolerance if whole.is_floating_point() else compare.EXACT
                difference = compare_values(f"buffer {name}", sliced, whole, allowed)
                if difference is not None and name in saved:
                    self.faults.append(f"{difference}: it is updated once for each slice (a running mean, a counter)")
                elif difference is not None and sliced.shape == whole.shape == number.shape:
                    self.notes.append(f"{name} has other values after the slices than after the whole: {_LATER}")
            elif kinds <= {int, float} and sliced - number == (whole - number) * self.slicing.plan.num_slices != 0:
                self.notes.append(f"{name} counts calls, one for each slice: {_LATER}")

    def _random_gradient(self, index: int, output: Tensor) -> Tensor:
        """Return a random gradient of an output, so that each token and each number counts."""
        generator = torch.Generator(device=output.device).manual_seed(_SEED + index)
        drawn = torch.randn(output.shape, generator=generator, device=output.device)
        return (drawn * self.scale / self.slicing.plan.sequence_length**0.5).to(output.dtype)

    def _backwards(
        self, slicing: Slicing, runs: list[_Forward], gradients: dict[int, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradients of the inputs and the parameters; slices run in reverse order."""
        self._take_gradients()
        of_leaves: list[list[Tensor]] = []
        while runs:
            leaves, outputs = runs.pop()
            tensors, slice_id = as_tuple(outputs, "the outputs of a layer"), len(runs)
            used = [index for index in gradients if tensors[index].requires_grad]
            if used:
                shares = [gradients[i] for i in used]
                if self.outputs is not None:  # with their layouts
                    shares = [slicing.share_of_gradient(self.outputs.layouts[i], gradients[i], slice_id) for i in used]
                with push_slice(slicing.active(slice_id, "recompute")), self.constant_draws or nullcontext():
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

    def _dtypes(self, outputs: Sequence[Tensor]) -> set[torch.dtype]:
        """Return the dtypes that a layer computes with."""
        parameters = () if self.layer.module is None else self.layer.module.parameters()
        dtypes = {tensor.dtype for tensor in (*self.inputs.tensors, *outputs, *parameters)}
        device = self.inputs.tensors[0].device.type
        with self.autocast():
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))
        return dtypes

    def _tolerance(self, outputs: Sequence[Tensor]) -> Tolerance:
        dtypes, device = self._dtypes(outputs), self.inputs.tensors[0].device.type
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


def _sizes_per_call(of_all: Sequence[_Draws]) -> bool:
    """Return whether a draw has as many numbers in each slice as in the whole sequence, which has more tokens."""
    return any(sizes[0] and len(set(sizes)) == 1 for sizes in zip(*(draws.sizes for draws in of_all), strict=False))


def _moved_per_call(of_all: Sequence[_Draws]) -> bool:
    return any(states[0] and len(set(states)) == 1 for states in zip(*(draws.moved for draws in of_all), strict=True))


def _random_states(module: nn.Module) -> list[Tensor]:
    trackers = [ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())]
    states = [state for tracker in trackers for state in tracker.get_states().values() if torch.is_tensor(state)]
    if not get_accelerator().is_synchronized_device():
        states.append(get_accelerator().get_rng_state())
    return [state.cpu().clone() for state in (torch.get_rng_state(), *states)]
