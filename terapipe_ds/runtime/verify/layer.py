"""Run one layer on a whole sequence and on its slices as the engine does, and compare outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terapipe_ds.attention import push_slice
from terapipe_ds.runtime.batch.cut_tensors import Tensors, as_tuple
from terapipe_ds.runtime.layers.kept_state import KeptState, is_the_users
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_values, first_sentence
from terapipe_ds.runtime.verify.constant_draws import ConstantDraws, Draws, drawn_per_call, random_states
from terapipe_ds.runtime.verify.named_layer import NamedLayer
from terapipe_ds.runtime.verify.tokens import Activations, Slicing

_SEED = 20210718  # of the output gradients, equal on all ranks
_LARGE, _LARGE_FP16 = 2.0**12, 2.0**4  # output gradients by which hooks that clip show
_ADDS_A_LOSS = "MoEAuxLossAutoScaler"  # Megatron's
_NOTHING = 1e-9  # of the largest gradient: without output gradients, less than that is rounding
_DRAWN_PER_CALL = (
    "it draws random numbers once per call and not per token (a dropped layer, stochastic depth, a mask for all "
    "tokens), so that each slice draws its own: draw per token, or set terapipe.slices to 1"
)
_T = TypeVar("_T")
_Gradients = tuple[list[Tensor], dict[str, Tensor]]  # of the inputs, with tokens first, and of the parameters by name
_Forward = tuple[Tensors, Any]  # the leaves that went into a forward, and what came out with its graph


class _Sees(TorchFunctionMode):
    """Sees whether a forward registers hooks of its activations, and whether it makes fp32 of what is fp64."""

    hooks = narrows = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.hooks |= func is Tensor.register_hook
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dtype == torch.float32:
            given = (*args, *(kwargs or {}).values())
            self.narrows |= any(torch.is_tensor(each) and each.dtype == torch.float64 for each in given)
        return result


class UncutOutput(ValueError):
    """Say that a layer gives tensors that cannot be cut in slices, so that it is compared with the next one."""


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
    draws: bool = False  # it draws random numbers, constants in their place
    outputs: Activations | None = None  # of the whole sequence
    has_fp32_inside: bool = False  # on whole sequences it computes something in fp32 of what is fp64
    may_clip: bool = False  # gradients of activations pass through code of the user
    scale: float = 1.0  # of the output gradients
    adds_loss: bool = False  # what differs is a gradient that the layer gives without any of its outputs
    faults: list[str] = field(default_factory=list)  # what the layer keeps or draws otherwise than on whole sequences
    counters: list[str] = field(default_factory=list)  # what no checkpoint holds and is updated once per call
    may_drop: bool = False  # it draws once per call where only Python shows it
    unable: list[str] = field(default_factory=list)  # what torch has no operator to compare with
    is_running: bool = False  # the layer itself, or its backward
    _rounding: dict[str, float] = field(default_factory=dict)  # measured, of each result, relative
    expected: _Gradients | None = None  # of the whole sequence
    _constant: ConstantDraws = field(default_factory=ConstantDraws)
    _kept: KeptState = field(init=False)
    _largest: float = 0.0  # number in the gradients of the first comparison

    def run(self) -> Difference | None:
        """Return the first difference: of the outputs, of the input gradients, or of the parameters' gradients.

        A layer whose gradients pass through code of the user is compared once more without output gradients, where all
        that is left is a loss that it adds itself, and which may be too small to show beside others. If that agrees, it
        is compared on large gradients as well, which that code may clip.
        """
        self.keep()
        difference = self.compare_all()
        if difference is not None and self.with_gradients:
            difference = self._beyond_rounding(difference)
        outputs_differ = difference is not None and difference.what.startswith("output")
        if not self.with_gradients or outputs_differ or self.slicing.ranks.first(self._may_clip() or None) is None:
            return difference
        self.adds_loss = (added := self._compare_again(0.0)) is not None
        return added or difference or self._compare_again(_LARGE_FP16 if torch.float16 in self._dtypes(()) else _LARGE)

    def keep(self) -> None:
        self._kept = KeptState({"": self.layer.module, "function": self.layer.function})

    def _beyond_rounding(self, difference: Difference) -> Difference | None:
        return difference

    def _compare_again(self, scale: float) -> Difference | None:
        self._begin_anew()
        self.scale, self.outputs, self.faults, self.counters, self.unable = scale, None, [], [], []
        return self.compare_all()

    def compare_all(self) -> Difference | None:
        """Compare. The slices begin with what the layer kept before the whole ran, its counters and running means."""
        ranks, before = self.slicing.ranks, self._kept.values()
        whole, drawn, gradients, expected = self._whole()
        self.expected = expected
        of_whole = self._kept.values()
        self._begin_anew()
        parts, drawn_by_slices = self._forwards(self.slicing)
        self.outputs, difference = self._compare_outputs(whole[1], [part for _, part in parts])
        if self.is_random:
            return None
        by_torch, self.may_drop = drawn_per_call(drawn, drawn_by_slices)
        self.faults += [_DRAWN_PER_CALL] * by_torch
        difference = ranks.first(difference)
        if difference is None and expected is not None:
            found = self._backwards(self.slicing, parts, gradients)
            sizes = [self._compared("the largest gradient", compare.largest_of, *each) for each in (expected, found)]
            largest = max(filter(None, sizes), default=0.0)
            self._largest = self._largest or largest
            if self.scale or _NOTHING * self._largest < largest < math.inf:
                difference = self._compare_gradients(found, expected)
            difference = ranks.first(difference)
        self._compare_kept(before, of_whole, difference)
        return difference

    def _whole(self) -> tuple[_Forward, Draws, dict[int, Tensor], _Gradients | None]:
        """Run the whole sequence; return with it the gradients of its outputs, and what comes of them."""
        whole, drawn = self._run_whole()
        outputs = as_tuple(whole[1], "the outputs of a layer")
        uncut = next((each for each in outputs if each.layout is not torch.strided or each.is_quantized), None)
        if uncut is not None or any(each.is_nested for each in outputs):
            raise UncutOutput("it returns nested, sparse or quantized tensors, which the check cannot cut")
        gradients = {i: self._random_gradient(i, t) for i, t in enumerate(outputs) if t.requires_grad}
        is_compared = self.with_gradients and bool(gradients) and not self.is_random
        expected = self._backwards(self.slicing.whole(), [whole], gradients) if is_compared else None
        return whole, drawn, gradients, expected

    def _compared(self, what: str, comparison: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return what a comparison finds; None with a warning where torch has no operator for such tensors."""
        try:
            return comparison(*arguments)
        except NotImplementedError as error:
            self.unable.append(f"{what} was not compared: {first_sentence(error)}")
            return None

    def _may_clip(self) -> bool:
        """Return whether gradients of activations, of modules or of parameters pass through code of the user."""
        if self.layer.checkpoint is not None and not self.may_clip:  # reentrant checkpointing hides functions
            layer, self.layer = self.layer, replace(self.layer, checkpoint=None)
            self._begin_anew()
            self._forwards(self.slicing.whole())
            self.layer = layer
        module = self.layer.module
        hooked = [] if module is None else [*module.modules(), *module.parameters()]
        return self.may_clip or any(
            bool(getattr(each, name, None)) for each in hooked for name in ("_backward_hooks", "_backward_pre_hooks")
        )

    def _run_whole(self) -> tuple[_Forward, Draws]:
        """Run the whole sequence; in evaluation mode where the layer draws in a way that is not known."""
        before = random_states(self.stage)
        [run], [drawn] = self._forwards(self.slicing.whole())
        has_moved = not all(map(torch.equal, before, random_states(self.stage)))
        self.draws = bool(drawn.sizes) or any(drawn.moved)
        has_unknown = bool(self._constant.unknown) and (has_moved or any(drawn.moved))
        is_random = has_unknown or (has_moved and not drawn.sizes)
        self.is_random = any(self.slicing.ranks.exchange(is_random))
        if not self.is_random or self.in_evaluation_mode or self.layer.module is None:
            return run, drawn
        self._constant, self.in_evaluation_mode = ConstantDraws(), True
        self._begin_anew()
        return self._run_whole()

    def _begin_anew(self) -> None:
        """Let the layer forget what it was run for."""
        self.slicing.store.reset()
        self._kept.put_back()
        if self.in_evaluation_mode and self.layer.module is not None:
            self.layer.module.eval()

    def _forwards(self, slicing: Slicing) -> tuple[list[_Forward], list[Draws]]:
        """Return the forwards of all slices, and what each has drawn."""
        runs, drawn = [], []
        for slice_id in range(slicing.plan.num_slices):
            pairs = zip(self.inputs.layouts, self.inputs.tensors, strict=True)
            leaves = tuple(slicing.cut(*pair, slice_id) for pair in pairs)
            self._kept.rewind_generators()
            states, sees = self._kept.generator_states(), _Sees()
            constant = self._constant if self.draws or slicing.plan.num_slices == 1 else nullcontext()
            with push_slice(slicing.active(slice_id)), self.autocast(), constant, sees:
                copies = tuple(leaf.clone() for leaf in leaves)  # a layer may work in place
                self.is_running = True
                outputs = self.layer(copies, self.inputs.is_tuple)
                self.is_running = False
            runs.append((leaves, outputs))
            self.has_fp32_inside |= sees.narrows and slicing.plan.num_slices == 1
            self.may_clip |= sees.hooks or _has_functions(as_tuple(outputs, "the outputs of a layer"))
            drawn.append(self._constant.take(states, self._kept.generator_states()))
        return runs, drawn

    def _compare_kept(
        self, before: Mapping[str, Any], of_whole: Mapping[str, Any], difference: Difference | None
    ) -> None:
        """Find what has another value after the slices than after the whole: a fault if a checkpoint holds it."""
        of_slices, tolerance, plan = self._kept.values(), self._tolerance(()), self.slicing.plan
        saved = {} if self.layer.module is None else self.layer.module.state_dict(keep_vars=True)
        outputs_differ = difference is not None and difference.what.startswith("output")
        for name, old in sorted(before.items()):
            whole, sliced = of_whole[name], of_slices[name]
            if name not in saved or not all(map(torch.is_tensor, (whole, sliced))):
                if not outputs_differ and _is_updated_per_call(old, whole, sliced, plan.num_slices, tolerance):
                    self.counters.append(name)
            elif outputs_differ and not torch.equal(old, whole):
                self.faults.append(f"each call changes the buffer {name}, which later slices see")
            elif not outputs_differ:
                allowed = tolerance if whole.is_floating_point() else compare.EXACT
                apart = compare_values(f"buffer {name}", sliced, whole, allowed)
                if apart is not None:
                    self.faults.append(f"{apart}: it is updated once for each slice (a running mean, a counter)")

    def _random_gradient(self, index: int, output: Tensor) -> Tensor:
        """Return a random gradient of an output, so that each token and each number counts."""
        generator = torch.Generator(device=output.device).manual_seed(_SEED + index)
        dtype = torch.complex64 if output.is_complex() else None
        drawn = torch.randn(output.shape, generator=generator, device=output.device, dtype=dtype)
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
                with push_slice(slicing.active(slice_id, "recompute")), self._constant if self.draws else nullcontext():
                    self.is_running = True
                    torch.autograd.backward([tensors[i] for i in used], shares)
                    self.is_running = False
            of_leaves.insert(0, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves])
        of_inputs = map(slicing.joined_gradients, self.inputs.layouts, zip(*of_leaves, strict=True))
        return list(of_inputs), self._take_gradients()

    def _take_gradients(self) -> dict[str, Tensor]:
        """Take the parameters' gradients, summed over tensor-parallel ranks: each may have a share of the tokens."""
        gradients = {}
        for name, parameter in self.stage.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()  # of an embedding it may be sparse
                gradients[name] = gradient if gradient.layout is torch.strided else gradient.to_dense()
                parameter.grad = None
        ranks = self.slicing.ranks
        if ranks.size == 1 or len({tuple(names) for names in ranks.exchange(sorted(gradients))}) > 1:
            return gradients
        return {name: ranks.gather(gradients[name][None]).sum(0) for name in sorted(gradients)}

    def _dtypes(self, outputs: Sequence[Tensor]) -> set[torch.dtype]:
        """Return the dtypes that a layer computes with."""
        parameters = () if self.layer.module is None else self.layer.module.parameters()
        dtypes = {tensor.dtype for tensor in (*self.inputs.tensors, *outputs, *parameters)}
        dtypes |= {torch.float32} if self.has_fp32_inside else set()
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
            tolerance = self._tolerance(tensors) if compare.is_real(tensor) else compare.EXACT
            tolerance = compare.allowed(f"output {index}", tolerance, self._rounding)
            pairs.append(self._compared("output", compare.compare_output, tensor, of_slices, tolerance, self.slicing))
        layouts, differences = zip(*pairs, strict=True)
        return Activations(tensors, not torch.is_tensor(whole), layouts), next(filter(None, differences), None)

    def _compare_gradients(
        self, sliced: tuple[list[Tensor], dict[str, Tensor]], whole: tuple[list[Tensor], dict[str, Tensor]]
    ) -> Difference | None:
        assert self.outputs is not None
        tolerance, differences = self._tolerance(self.outputs.tensors), []
        pairs = zip(self.inputs.layouts, self.inputs.tensors, sliced[0], whole[0], strict=True)
        for index, (layout, tensor, a, b) in enumerate(pairs):
            if tensor.requires_grad:
                allowed = compare.allowed(f"input gradient {index}", tolerance, self._rounding)
                comparison = compare.compare_kind(layout)
                differences.append(self._compared("input gradient", comparison, "input gradient", a, b, allowed))
        parameters = sliced[1], whole[1], tolerance, self._rounding
        of_parameters = self._compared("a parameter's gradient", compare.compare_parameters, *parameters) or []
        differences.append(max(of_parameters, key=lambda difference: difference.relative, default=None))
        return next(filter(None, differences), None)


def _is_updated_per_call(before: Any, of_whole: Any, of_slices: Any, num_slices: int, tolerance: Tolerance) -> bool:
    """Return whether a number or tensor counts calls, or is a mean over calls; not where it remembers a length."""
    values = before, of_whole, of_slices
    kinds = {(type(each), getattr(each, "shape", None)) for each in values}
    if len(kinds) > 1 or before is None or getattr(before, "dtype", None) == torch.bool:
        return False
    is_float = isinstance(before, float) or (torch.is_tensor(before) and before.is_floating_point())
    old, whole, sliced = (torch.as_tensor(each, dtype=torch.float64 if is_float else None) for each in values)
    is_other = compare_values("", sliced, whole, tolerance) is not None
    is_kept = bool(((old == whole) | (old != old) & (whole != whole)).all())  # a constant that is not a number as well
    return not is_kept and (is_other if is_float else torch.equal(sliced - old, (whole - old) * num_slices))


def _has_functions(outputs: Sequence[Tensor]) -> bool:
    """Return whether the graph has an `autograd.Function` of the user, or Megatron's that adds a loss."""
    nodes, seen = [tensor.grad_fn for tensor in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            function = getattr(node, "_forward_cls", None)
            if function is not None and (is_the_users(function) or function.__name__ == _ADDS_A_LOSS):
                return True
            nodes += [each for each, _ in node.next_functions]
    return False
