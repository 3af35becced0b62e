"""Run one layer on a whole sequence and on its slices as the engine does, and compare outputs and gradients.

To tell faults from rounding, run it in a wider dtype as well, and measure the rounding of its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from terapipe_ds.attention import UncompiledMode, push_slice
from terapipe_ds.messages import logger
from terapipe_ds.runtime.batch.cut_tensors import Tensors
from terapipe_ds.runtime.layers.kept_state import KeptState, is_the_users, same
from terapipe_ds.runtime.layers.untouched import stand_ins
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.compare import Difference, Tolerance
from terapipe_ds.runtime.verify.constant_draws import ConstantDraws, Draws, drawn_per_call, random_states
from terapipe_ds.runtime.verify.named_layer import NamedLayer
from terapipe_ds.runtime.verify.tokens import Activations, Slicing, TensorLayout, TokenDim, held_as

HALF = {torch.float16, torch.bfloat16}
_SCALES = (1.0, 1.1, 1.3, 1.7)  # of gradients by which rounding is measured: a single number may be right by luck
_SEED = 20210718  # of the output gradients, equal on all ranks
_MAY_ADD = ("MoEAuxLossAutoScaler", "CheckpointFunction")  # Megatron's, and the one that hides the functions within
_DRAWN_PER_CALL = (
    "it draws random numbers once per call and not per token (a dropped layer, stochastic depth, a mask for all "
    "tokens), so that each slice draws its own: draw per token, or set terapipe.slices to 1"
)


class Forward(NamedTuple):
    """Hold the inputs of a forward, and its outputs with their graph."""

    leaves: Tensors
    outputs: Tensors
    formed: Callable[[Sequence[Tensor]], Any]  # as of `Activations`


class SeesDtypes(UncompiledMode):
    """Collect the dtypes of the results that `counts` chooses by their operands; with `nudges` round some otherwise."""

    def __init__(self, counts: Callable[[Tensor, list[Tensor]], bool], nudges: torch.Generator | None = None) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self._counts, self._nudges = counts, nudges

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [each for each in (*args, *(kwargs or {}).values()) if torch.is_tensor(each)]
        if torch.is_tensor(result) and result.is_floating_point() and self._counts(result, operands):
            self.dtypes.add(result.dtype)
            if self._nudges is not None and not any(result is each for each in operands):
                signs = torch.randint(-1, 2, result.shape, generator=self._nudges, device=result.device)
                result = result * (1 + torch.finfo(result.dtype).eps * signs).to(result.dtype)
        return result


def _is_rounded(result: Tensor, operands: list[Tensor]) -> bool:
    """Return whether numbers of a wider dtype were rounded."""
    return any(each.is_floating_point() and each.itemsize > result.itemsize for each in operands)


class UncutOutput(ValueError):
    """Say that a layer returns tensors that cannot be cut into slices, so that it is compared with the next one."""


class OtherOutput(ValueError):
    """Say the same of a layer that returns something else than tensors and None: a number, an object."""


@dataclass
class LayerCheck:
    """Check one layer of `stage`. Use it inside `untouched(stage)`.

    If the tolerance of the layer's dtype is too small, its results may differ by their measured rounding.
    """

    layer: NamedLayer
    inputs: Activations
    slicing: Slicing
    stage: nn.Module
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the engine runs layers
    with_gradients: bool = True  # False compares only the outputs
    weights: WeightGradients | None = None  # if slices leave their weight gradients to W, or to the last one's B
    splits: bool = True  # they leave them to W
    is_random: bool = False  # the layer draws in an unknown way, even in evaluation mode: not compared
    in_evaluation_mode: bool = False
    draws: bool = False  # it draws random numbers, constants in their place
    repeats: bool | None = None  # each call draws the same numbers, from a seed of its own: no constants; None: unknown
    outputs: Activations | None = None  # of the whole sequence
    gradients: dict[str, Tensor] | None = None  # of the whole sequence: of the inputs and of the parameters
    adds_loss: bool = False  # the difference is in a gradient that the layer adds without any of its outputs
    faults: list[str] = field(default_factory=list)  # state or draws of the layer that differ from whole sequences
    counters: list[str] = field(default_factory=list)  # state that no checkpoint holds and each call updates
    may_drop: bool = False  # it draws once per call, but only from Python's generators
    unable: list[str] = field(default_factory=list)  # results that torch has no operator to compare
    is_running: bool = False  # the layer itself, or its backward
    _may_add: bool = False  # functions of the user are in its graph
    _scale: float = 1.0  # of the output gradients
    inside: frozenset[torch.dtype] = frozenset()  # to which it rounds on whole sequences
    _nudge: int | None = None  # the seed of nudges to numbers that it rounds within, while rounding is measured
    _rounding: dict[str, float] = field(default_factory=dict)  # measured, of each result, relative
    _constant: ConstantDraws = field(default_factory=ConstantDraws)
    _kept: KeptState = field(init=False)

    def run(self) -> Difference | None:
        """Return the first difference: of the outputs, of the input gradients, or of the parameters' gradients.

        A layer that may add a loss in its backward is compared once more without output gradients. Then only this loss
        is left: beside other gradients it may be too small to show.
        """
        self.keep()
        difference = self.compare_all()
        if difference is not None and self.with_gradients:
            difference = self._beyond_rounding(difference)
        outputs_differ = difference is not None and difference.is_of_outputs
        if not self.with_gradients or outputs_differ or not any(self.slicing.ranks.exchange(self._may_add)):
            return difference
        # without output gradients only its own loss has a gradient
        added = self._compare_again(0.0)
        self.adds_loss = added is not None and added.largest < math.inf
        return added if self.adds_loss else difference

    def keep(self) -> None:
        self._kept = KeptState({"": self.layer.module, "function": self.layer.function})
        self._kept.renew()

    def _beyond_rounding(self, difference: Difference) -> Difference | None:
        """Return a difference that is more than rounding; None if a wider dtype has none, and rounding explains it.

        Gradients may cancel out, and then the rest is mostly rounding. The whole sequence shows the size of this
        rounding, in the layer's own dtype against the wider one. A layer that cannot run in a wider dtype keeps its
        difference.
        """
        reference, in_wider = self.in_wider_dtype(lambda check: check.compare_all())
        if reference is None:
            return difference
        agrees = all(self.slicing.ranks.exchange(in_wider is None))
        if not agrees and not any(self.slicing.ranks.exchange(bool(reference.inside & HALF))):
            return difference
        # the wider dtype shows no difference, or rounds within as well, to half precision for a kernel: measure how
        # much of this difference is rounding
        given = self.inputs
        for number, scale in enumerate(_SCALES):
            self.inputs = nudged(given, number) if number else given
            self._nudge = None if agrees else number
            self._measure(reference, scale)
        self.inputs, self._nudge = given, None
        return self._compare_again(1.0)

    def in_wider_dtype(self, run: Callable[[Self], Difference | None]) -> tuple[Self | None, Difference | None]:
        """Return this check in a wider dtype with the difference there; None if it cannot run, as always in fp64."""
        dtype = wider(self._own_dtypes(())) or (torch.float64 if self.inside else None)
        if dtype is None:
            return None, None
        self._begin_anew()
        inputs = self.inputs.changed(
            lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
        )
        other = replace(self, inputs=inputs, autocast=nullcontext, faults=[], inside=frozenset())
        difference = caught = None
        try:
            with stand_ins(self.layer.module or nn.Module(), with_gradients=False, dtype=dtype):
                other.keep()
                difference = run(other)
        except Exception as error:  # kernels that know no other dtype, too little memory
            caught = error
            logger.debug("%s does not run in %s", self.layer, dtype, exc_info=True)
        # a tensor-parallel peer may wait in the layer for the rank that raised
        failure = self.slicing.ranks.trials.failure(caught, f"{self.layer} in {dtype}")
        return (other if failure is None else None), difference

    def _measure(self, reference: LayerCheck, scale: float) -> None:
        """Measure how much rounding changes the results of the whole sequence, with gradients of this scale."""
        assert reference.outputs is not None
        self._begin_anew()
        self._scale, self.outputs = scale, None
        run, *_ = self.run_whole()
        layouts, nothing = reference.outputs.layouts, Tolerance(0.0, self._tolerance(()).floor)
        results, expected = (
            {f"output {i}": self.slicing.whole().joined(layouts[i], [t.detach()]) for i, t in enumerate(outputs)}
            for outputs in (run.outputs, reference.outputs.tensors)
        )
        if self.gradients is not None and reference.gradients is not None:
            results |= {name: gradient.double() / scale for name, gradient in self.gradients.items()}
            expected |= reference.gradients
        by_token = self.names_by_token("output", reference.outputs)
        by_token |= self.names_by_token("input gradient", self.inputs)
        for each in compare.compare_results(results, expected, nothing, by_token, {}, []):
            if math.isfinite(each.relative):
                self._rounding[each.what] = max(self._rounding.get(each.what, 0.0), each.relative)

    def _compare_again(self, scale: float) -> Difference | None:
        self._begin_anew()
        self._scale, self.outputs, self.faults, self.counters, self.unable = scale, None, [], [], []
        return self.compare_all()

    def compare_all(self) -> Difference | None:
        """Compare. The slices begin with the layer's state before the whole ran: its counters and running means."""
        ranks, before = self.slicing.ranks, self._kept.values()
        whole, drawn, of_outputs = self.run_whole()
        of_whole = self._kept.values()
        # slices: all forwards, then the backwards in reverse, as training has them
        self._begin_anew()
        parts, drawn_by_slices = self._forwards(self.slicing)
        if any(self.slicing.ranks.exchange(any(part.formed != whole.formed for part in parts))):
            raise OtherOutput("its slices return tensors in other containers than whole sequences")
        self.outputs, difference = self._compare_outputs(whole, [part.outputs for part in parts])
        if self.is_random:
            return None
        by_torch, self.may_drop = drawn_per_call(drawn, drawn_by_slices)
        self.faults += [_DRAWN_PER_CALL] * by_torch
        difference = ranks.first(difference)
        if difference is None and self.gradients is not None:
            difference = ranks.first(self._compare_gradients(self._backwards(self.slicing, parts, of_outputs)))
        self._compare_kept(before, of_whole, difference)
        return difference

    def run_whole(self) -> tuple[Forward, Draws, dict[int, Tensor]]:
        """Run the whole sequence forward and backward; return the gradients of its outputs as well."""
        whole, drawn = self._forward_whole()
        uncut = (each.layout is not torch.strided or each.is_quantized or each.is_nested for each in whole.outputs)
        if any(uncut):
            raise UncutOutput("it returns nested, sparse or quantized tensors, which the check cannot cut")
        of_outputs = {i: self._random_gradient(i, t) for i, t in enumerate(whole.outputs) if t.requires_grad}
        is_compared = self.with_gradients and bool(of_outputs) and not self.is_random
        self.gradients = self._backwards(self.slicing.whole(), [whole], of_outputs) if is_compared else None
        return whole, drawn, of_outputs

    def _forward_whole(self) -> tuple[Forward, Draws]:
        """Run the whole sequence; in evaluation mode if the layer draws in an unknown way."""
        # if generators move without a known operation, some kernel draws
        before = random_states(self.stage)
        [run], [drawn] = self._forwards(self.slicing.whole())
        has_moved = not all(map(torch.equal, before, random_states(self.stage)))
        # if no generator has moved, it may draw from one of its own, or from a seed that it puts back
        is_seeded = bool(drawn.sizes) and not has_moved and not any(drawn.moved)
        if self.repeats is None and any(self.slicing.ranks.exchange(is_seeded)):
            return self._from_own_seed()
        self.draws = bool(drawn.sizes) or any(drawn.moved)
        has_unknown = bool(self._constant.unknown) and (has_moved or any(drawn.moved))
        is_random = has_unknown or (has_moved and not drawn.sizes)
        self.is_random = any(self.slicing.ranks.exchange(is_random))
        # in evaluation mode it may draw nothing at all
        if not self.is_random or self.in_evaluation_mode or self.layer.module is None:
            return run, drawn
        self._constant, self.in_evaluation_mode = ConstantDraws(), True
        self._begin_anew()
        return self._forward_whole()

    def _from_own_seed(self) -> tuple[Forward, Draws]:
        """Run the whole sequence, with the own numbers of a layer that draws the same in each call."""
        numbers: list[list[Any]] = []
        for _ in range(2):
            self._begin_anew()
            self._constant.numbers = []
            self._forwards(self.slicing.whole())
            numbers.append(self._constant.numbers)
        self._constant.numbers = None
        is_same = len(numbers[0]) == len(numbers[1]) and all(map(same, *numbers))
        self.repeats = all(self.slicing.ranks.exchange(is_same))
        self._begin_anew()
        return self._forward_whole()

    def _begin_anew(self) -> None:
        """Restore the layer's state before another run."""
        self.slicing.store.reset()
        self._kept.renew()
        if self.in_evaluation_mode and self.layer.module is not None:
            self.layer.module.eval()

    def _forwards(self, slicing: Slicing, inputs: Activations | None = None) -> tuple[list[Forward], list[Draws]]:
        """Return the forwards of all slices, of other `inputs` if there are any, and the draws of each."""
        runs, drawn, inputs = [], [], inputs or self.inputs
        if self.weights is not None:
            keys = [(slicing.part_id, 0, slice_id) for slice_id in range(slicing.plan.num_slices)]
            self.weights.open_batch(keys if len(keys) > 1 else (), is_trial=not self.splits)
        for slice_id in range(slicing.plan.num_slices):
            leaves = inputs.cut(slicing, slice_id)
            # each slice draws the first numbers of the whole: equal numbers of draws show draws per call
            self._kept.rewind_generators()
            nudges = None if self._nudge is None else torch.Generator(leaves[0].device).manual_seed(self._nudge)
            states, sees = self._kept.generator_states(), SeesDtypes(_is_rounded, nudges)
            replaced = (self.draws or slicing.plan.num_slices == 1) and not self.repeats
            constant = self._constant if replaced else nullcontext()
            with push_slice(slicing.active(slice_id)), self.autocast(), constant, sees:
                copies = tuple(leaf.clone() for leaf in leaves)  # a layer may work in place
                self.is_running = True
                outputs = self.layer(inputs.formed(copies))
                self.is_running = False
            held = [each for each in tree_leaves(outputs) if each is not None]
            if not held or not all(map(torch.is_tensor, held)):
                kinds = ", ".join(sorted({type(each).__name__ for each in held if not torch.is_tensor(each)}))
                raise OtherOutput(f"it returns {kinds or 'no tensor'}, whose value may differ between slices")
            runs.append(Forward(leaves, tuple(held), held_as(outputs)))
            self._may_add |= _has_functions(runs[-1].outputs)
            self.inside |= sees.dtypes if slicing.plan.num_slices == 1 else frozenset()
            drawn.append(self._constant.take(states, self._kept.generator_states()))
        return runs, drawn

    def _compare_kept(
        self, before: Mapping[str, Any], of_whole: Mapping[str, Any], difference: Difference | None
    ) -> None:
        """Find state whose value after the slices differs from the whole's: a fault if a checkpoint holds it."""
        of_slices, tolerance, plan = self._kept.values(), self._tolerance(()), self.slicing.plan
        saved = {} if self.layer.module is None else self.layer.module.state_dict(keep_vars=True)
        outputs_differ = difference is not None and difference.is_of_outputs
        for name in sorted(before.keys() & of_whole.keys() & of_slices.keys()):
            old, whole, sliced = before[name], of_whole[name], of_slices[name]
            # a checkpoint does not hold it: this may be intended
            if name not in saved or not all(map(torch.is_tensor, (whole, sliced))):
                if not outputs_differ and _is_updated_per_call(old, whole, sliced, plan.num_slices, tolerance):
                    self.counters.append(name)
            elif outputs_differ and not same(old, whole):
                self.faults.append(f"each call changes the buffer {name}, which later slices see")
            elif not (outputs_differ or same(whole, sliced)):  # a constant may be NaN
                allowed = tolerance if whole.is_floating_point() else compare.EXACT
                apart = compare.compare(f"buffer {name}", sliced, whole, allowed)
                if apart is not None:
                    self.faults.append(f"{apart}: it is updated once for each slice (a running mean, a counter)")

    def _random_gradient(self, index: int, output: Tensor) -> Tensor:
        """Return a random gradient of an output, so that each token and each number counts."""
        generator = torch.Generator(device=output.device).manual_seed(_SEED + index)
        dtype = torch.complex64 if output.is_complex() else None
        drawn = torch.randn(output.shape, generator=generator, device=output.device, dtype=dtype)
        return (drawn * self._scale / self.slicing.plan.sequence_length**0.5).to(output.dtype)

    def _backwards(self, slicing: Slicing, runs: list[Forward], of_outputs: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the inputs, with tokens first, and of the parameters; slices run in reverse."""
        self._take_gradients()
        of_slices: list[Tensors] = []
        weights = self.weights or WeightGradients()
        while runs:
            leaves, outputs, _ = runs.pop()
            slice_id = len(runs)
            used = [index for index in of_outputs if outputs[index].requires_grad]
            if used:
                shares = [of_outputs[i] for i in used]
                if self.outputs is not None:  # with their layouts
                    shares = [slicing.share_of_gradient(self.outputs.layouts[i], of_outputs[i], slice_id) for i in used]
                constant = self._constant if self.draws else nullcontext()
                with (
                    push_slice(slicing.active(slice_id, "recompute")),
                    constant,
                    weights.deferred((slicing.part_id, 0, slice_id)),
                ):
                    self.is_running = True
                    torch.autograd.backward([outputs[i] for i in used], shares)
                    self.is_running = False
            of_slices.insert(0, leaves)
        # W comes as late as possible
        for key in list(weights.waiting):
            with push_slice(slicing.active(key[-1], "weight")):
                weights.compute(key, nullcontext)
        of_inputs = self.inputs.gradients(slicing, of_slices)
        return {f"input gradient {i}": each for i, each in enumerate(of_inputs)} | self._take_gradients()

    def _take_gradients(self) -> dict[str, Tensor]:
        """Take the parameters' gradients, summed over tensor-parallel ranks: each may have a share of the tokens."""
        # of all layers of the stage: a tied layer may have its weight elsewhere
        gradients = {}
        for name, parameter in self.stage.named_parameters():
            if parameter.grad is not None:
                gradients[f"gradient of {name}"] = parameter.grad.detach().to_dense()  # an embedding's may be sparse
                parameter.grad = None
        ranks = self.slicing.ranks
        shapes = ranks.exchange({name: tuple(gradients[name].shape) for name in sorted(gradients)})
        if ranks.size == 1 or any(of_rank.keys() != shapes[0].keys() for of_rank in shapes):
            return gradients
        # uneven shares of a vocabulary are no parts of one sum
        even = [name for name, shape in shapes[0].items() if all(of_rank[name] == shape for of_rank in shapes)]
        return gradients | {name: ranks.gather(gradients[name][None]).sum(0) for name in even}

    def _dtypes(self, outputs: Sequence[Tensor]) -> set[torch.dtype]:
        """Return the dtypes that a layer computes with, without half precision within: that rounding is measured."""
        return self._own_dtypes(outputs) | (self.inside - HALF)

    def _own_dtypes(self, outputs: Sequence[Tensor]) -> set[torch.dtype]:
        """Return the dtypes of what a layer gets and has, and of its `outputs`."""
        parameters = () if self.layer.module is None else self.layer.module.parameters()
        dtypes = {tensor.dtype for tensor in (*self.inputs.tensors, *outputs, *parameters)}
        device = self.inputs.tensors[0].device.type
        with self.autocast():
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))
        return dtypes

    def _tolerance(self, outputs: Sequence[Tensor]) -> Tolerance:
        dtypes, device = self._dtypes(outputs), self.inputs.tensors[0].device.type
        return compare.tolerance_of(dtypes, tf32=device == "cuda" and compare.multiplies_in_tf32())

    def _compare_outputs(self, whole: Forward, parts: list[Tensors]) -> tuple[Activations, Difference | None]:
        """Return the outputs of the whole with their layouts, and the first output that differs."""
        tensors = tuple(t.detach().requires_grad_(t.requires_grad) for t in whole.outputs)
        layouts: list[TensorLayout] = []
        differences = []
        for index, tensor in enumerate(tensors):
            of_slices = [part[index].detach() if index < len(part) else tensor.new_empty(0) for part in parts]
            tolerance = self._tolerance(tensors) if compare.is_real(tensor) else compare.EXACT
            tolerance = compare.allowed(f"output {index}", tolerance, self._rounding)
            layout, difference = compare.compare_output(tensor, of_slices, tolerance, self.slicing, self.unable)
            layouts.append(layout)
            differences.append(difference)
        return Activations(tensors, whole.formed, tuple(layouts)), next(filter(None, differences), None)

    def _compare_gradients(self, of_slices: dict[str, Tensor]) -> Difference | None:
        assert self.outputs is not None and self.gradients is not None
        tolerance = self._tolerance(self.outputs.tensors)
        untrained = {f"input gradient {i}" for i, each in enumerate(self.inputs.tensors) if not each.requires_grad}
        a, b = ({k: v for k, v in each.items() if k not in untrained} for each in (of_slices, self.gradients))
        by_token = self.names_by_token("input gradient", self.inputs)
        differences = compare.compare_results(a, b, tolerance, by_token, self._rounding, self.unable)
        of_inputs = (replace(each, what="input gradient") for each in differences if each.what.startswith("input"))
        return next(of_inputs, max(differences, key=lambda difference: difference.relative, default=None))

    @staticmethod
    def names_by_token(what: str, tensors: Activations) -> set[str]:
        """Return the names of the results that are compared token by token."""
        return {f"{what} {i}" for i, layout in enumerate(tensors.layouts) if isinstance(layout, TokenDim)}


def _is_updated_per_call(before: Any, of_whole: Any, of_slices: Any, num_slices: int, tolerance: Tolerance) -> bool:
    """Return whether a number or tensor counts calls, or is a mean over calls; not if it remembers a length."""
    kinds = {(type(each), getattr(each, "shape", None)) for each in (before, of_whole, of_slices)}
    is_bool = getattr(before, "dtype", None) == torch.bool
    if len(kinds) > 1 or before is None or is_bool or same(before, of_whole):
        return False
    if isinstance(before, int):  # of any size, such as a seed
        return bool(of_slices - before == (of_whole - before) * num_slices)
    if isinstance(before, float) or before.is_floating_point():
        sliced, whole = (torch.as_tensor(each, dtype=torch.float64, device="cpu") for each in (of_slices, of_whole))
        return compare.compare("", sliced, whole, tolerance) is not None
    return torch.equal(of_slices - before, (of_whole - before) * num_slices)


def _has_functions(outputs: Sequence[Tensor]) -> bool:
    """Return whether the graph has an `autograd.Function` of the user, or another that may add a loss."""
    nodes, seen = [tensor.grad_fn for tensor in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            function = getattr(node, "_forward_cls", None)
            if function is not None and (is_the_users(function) or function.__name__ in _MAY_ADD):
                return True
            nodes += [following for following, _ in node.next_functions]
    return False


def wider(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which a layer that computes with `dtypes` rounds much less; None for fp64."""
    dtypes = set(dtypes)
    if dtypes & HALF:
        return torch.float32
    return torch.float64 if torch.float32 in dtypes else None


def nudged(inputs: Activations, seed: int) -> Activations:
    """Return copies of the inputs in which the last bit of two thirds of the hidden numbers is changed.

    Slices round otherwise than the whole, so that a router may send a token to another expert, and a ReLU may close.
    Changed inputs have the same effect, and show how much of a difference it explains. All numbers stay between the
    least and the largest one: a layer may refuse numbers beyond. Float8 does not change. Nor do numbers without
    gradients beside hidden states, which may be ids.
    """
    has_hidden = any(each.requires_grad for each in inputs.tensors)

    def nudge(tensor: Tensor) -> Tensor:
        is_hidden = tensor.requires_grad or not has_hidden
        if not (is_hidden and tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel()):
            return tensor
        generator = torch.Generator(tensor.device).manual_seed(seed)
        signs = torch.randint(-1, 2, tensor.shape, generator=generator, device=tensor.device)
        changed = (tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * signs)).to(tensor.dtype)
        return changed.clamp(*tensor.detach().aminmax()).requires_grad_(tensor.requires_grad)

    return inputs.changed(nudge)
