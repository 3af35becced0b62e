"""One layer, whole against sliced: outputs, input gradients, parameter gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.runtime.verify.compare import Difference, Tolerance, difference, norm_of, tolerance_of, worst_rows
from terapipe_ds.runtime.verify.layout import (
    ALONE,
    Layout,
    PerSlice,
    Same,
    TensorPeersOf,
    TokenDim,
    alone,
    cut,
    share_of_gradient,
    stand_together,
    token_dims,
)
from terapipe_ds.runtime.verify.runner import (
    HALF,
    NOTHING,
    NamedLayer,
    ParameterGradients,
    Ran,
    Runner,
    Values,
    drew,
    random_state,
)

_EXACT = Tolerance(0.0, 0.0)  # of integers and booleans
_LOOKED_AT = 512  # tokens that differ, for the size of the difference
_SEED = 20210718  # of the output gradients, equal on all ranks


@dataclass(frozen=True)
class Differs:
    """What differs, and where: ``first_token`` and ``tokens`` (a mask) where it has tokens."""

    what: str  # "output" | "input gradient" | "gradient of NAME" | "loss"
    apart: Difference
    allowed: float
    tokens: Tensor | None = None

    @property
    def first_token(self) -> int | None:
        return None if self.tokens is None else int(self.tokens.nonzero()[0])

    def __str__(self) -> str:
        where = "" if self.tokens is None else f" of tokens {self.first_token}.."
        if self.apart.largest == float("inf"):
            return f"{self.what}{where} is not comparable (another shape, or not finite)"
        sizes = f"relative {self.apart.relative:.1g}, allowed {self.allowed:.1g}"
        return f"{self.what}{where} differs by {self.apart} ({sizes})"


@dataclass
class Gradients:
    """Of the inputs, as leaves have them, and of the parameters by name."""

    inputs: list[Tensor | None]
    parameters: dict[str, Tensor]


@dataclass
class LayerCheck:
    """The check of one layer with given inputs of the whole sequence.

    Args:
        weights: of the slices' losses, by which what a layer computes once per slice (an auxiliary loss) counts.
    """

    runner: Runner
    layer: NamedLayer
    inputs: Values
    layouts: Sequence[Layout]
    weights: Sequence[float]
    peers: TensorPeersOf = ALONE
    without_dropout: bool = False
    skipped: str = ""  # why there was nothing to compare
    outputs: Values = NOTHING
    output_layouts: list[Layout] = field(default_factory=list)

    # -- runs --------------------------------------------------------------------------------------------------------

    def slice_inputs(self, slice_id: int) -> Values:
        """What the layer gets for one slice of the very inputs that the whole run gets."""
        pairs = zip(self.layouts, self.inputs.tensors, strict=True)
        return self.inputs.with_tensors(
            [cut(layout, t, self.runner.plan, slice_id, self.peers) for layout, t in pairs]
        )

    def run_whole(self) -> Ran:
        return self.runner.forward(self.layer, self.inputs, self.runner.whole_sequence())

    def run_slices(self) -> list[Ran]:
        plan = self.runner.plan
        return [
            self.runner.forward(self.layer, self.slice_inputs(i), self.runner.slice(i)) for i in range(plan.num_slices)
        ]

    def gradients_of_outputs(self, whole: Ran) -> dict[int, Tensor]:
        """Random ones: each token and each number of an output counts."""
        gradients = {}
        for index, output in enumerate(whole.outputs):
            if output.requires_grad:
                generator = torch.Generator(device=output.device).manual_seed(_SEED + index)
                drawn = torch.randn(output.shape, generator=generator, device=output.device)
                gradients[index] = (drawn / self.runner.plan.sequence_length**0.5).to(output.dtype)
        return gradients

    def backward_whole(self, whole: Ran, gradients: dict[int, Tensor]) -> Gradients:
        with ParameterGradients(self.runner.module) as collected:
            return Gradients(list(self.runner.backward(whole, gradients)), self._summed(collected))

    def backward_slices(self, parts: list[Ran], gradients: dict[int, Tensor]) -> Gradients:
        """Slices in reverse order, as training runs them."""
        of_inputs: list[tuple[Tensor | None, ...]] = [()] * len(parts)
        with ParameterGradients(self.runner.module) as collected:
            for i in reversed(range(len(parts))):
                shares = {
                    j: share_of_gradient(self.output_layouts[j], g, self.runner.plan, i, self.weights, self.peers)
                    for j, g in gradients.items()
                }
                of_inputs[i] = self.runner.backward(parts[i], shares)
            return Gradients(self._together(of_inputs), self._summed(collected))

    def _summed(self, collected: ParameterGradients) -> dict[str, Tensor]:
        """Over tensor-parallel ranks: under sequence parallelism a rank has the share of its tokens, which are others
        in slices than in the whole."""
        gradients = collected.take()
        if self.peers.size == 1 or len(set(map(tuple, self.peers.exchange(sorted(gradients))))) > 1:
            return gradients
        return {name: self.peers.gather(gradients[name][None].contiguous()).sum(0) for name in sorted(gradients)}

    def _together(self, of_inputs: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
        together: list[Tensor | None] = []
        for j, (layout, tensor) in enumerate(zip(self.layouts, self.inputs.tensors, strict=True)):
            if not tensor.requires_grad:
                together.append(None)
                continue
            parts = [
                torch.zeros_like(cut(layout, tensor, self.runner.plan, i, self.peers)) if grads[j] is None else grads[j]
                for i, grads in enumerate(of_inputs)
            ]
            together.append(stand_together(layout, [p for p in parts if p is not None], None, self.peers))
        return together

    # -- comparisons -------------------------------------------------------------------------------------------------

    def tolerance(self) -> Tolerance:
        """Of the dtypes that the layer works in."""
        tensors = [*self.inputs.tensors, *self.outputs.tensors]
        if self.layer.module is not None:
            tensors += list(self.layer.module.parameters())
        device = tensors[0].device
        dtypes = {t.dtype for t in tensors}
        with self.runner.autocast():
            if torch.is_autocast_enabled(device.type):
                dtypes.add(torch.get_autocast_dtype(device.type))
        return tolerance_of(dtypes, device)

    def compare_outputs(self, whole: Ran, parts: list[Ran]) -> Differs | None:
        """The first output that differs. Learns the layouts of all."""
        self.outputs = whole.values()
        self.output_layouts, first = [], None
        for j, output in enumerate(self.outputs.tensors):
            sliced = [part.outputs[j].detach() if j < len(part.outputs) else output.new_empty(0) for part in parts]
            layout, differs = self._compare_output(output, sliced)
            self.output_layouts.append(layout)
            first = first or differs
        return first

    def _compare_output(self, whole: Tensor, parts: list[Tensor]) -> tuple[Layout, Differs | None]:
        tolerance = self.tolerance() if whole.is_floating_point() else _EXACT
        found: list[tuple[Layout, Differs | None]] = []
        for layout in token_dims(whole, parts, self.runner.plan, self.peers):  # all: tensor-parallel ranks do the same
            together = stand_together(layout, parts, self.weights, self.peers)
            expected = alone(layout, whole, self.peers)
            found.append((layout, compare_tokens("output", together, expected, tolerance)))
        if found:
            return next((pair for pair in found if pair[1] is None), found[0])
        if any(part.shape != whole.shape for part in parts):
            return PerSlice(tuple(parts)), Differs("output", Difference(float("inf"), float("inf")), 0.0)
        apart = [difference(part, whole) for part in parts]
        if all(each.relative <= tolerance.relative for each in apart):
            return Same(), None
        per_slice = PerSlice(tuple(parts))
        summed = difference(stand_together(per_slice, parts, self.weights, self.peers), whole)
        if summed.relative <= tolerance.relative:
            return per_slice, None
        return per_slice, Differs("output without tokens", summed, tolerance.relative)

    def compare_gradients(self, whole: Gradients, sliced: Gradients) -> Differs | None:
        """Of the inputs first, then of the parameters."""
        tolerance, found = self.tolerance(), []
        for layout, a, b in zip(self.layouts, sliced.inputs, whole.inputs, strict=True):
            if a is None:  # needs no gradient
                continue
            expected = torch.zeros_like(a) if b is None else alone(layout, b, self.peers)
            compare = compare_tokens if isinstance(layout, TokenDim) else compare_values
            found.append(compare("input gradient", a, expected, tolerance))
        found.append(compare_parameters(sliced.parameters, whole.parameters, tolerance))
        return next((differs for differs in found if differs is not None), None)


def compare_tokens(what: str, a: Tensor, b: Tensor, tolerance: Tolerance) -> Differs | None:
    """``a`` and ``b``: [tokens, ...]. None where every token is equal but for rounding."""
    wrong = worst_rows(a, b, tolerance)
    if not bool(wrong.any()):
        return None
    ones = wrong.nonzero().flatten()[:_LOOKED_AT]
    each = [difference(a[i], b[i]) for i in ones]
    apart = Difference(max(d.largest for d in each), max(d.relative for d in each))
    return Differs(what, apart, tolerance.relative, wrong.cpu())


def compare_values(
    what: str, a: Tensor, b: Tensor, tolerance: Tolerance, largest_norm: float = 0.0
) -> Differs | None:
    """Tensors without tokens. ``largest_norm``: of those beside it."""
    apart = difference(a, b, tolerance.floor * largest_norm)
    return None if apart.relative <= tolerance.relative else Differs(what, apart, tolerance.relative)


def compare_parameters(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: Tolerance) -> Differs | None:
    """The parameter gradient that differs most, if any; one that is missing counts as zero."""
    largest = max((norm_of(g) for g in [*a.values(), *b.values()]), default=0.0)
    found = []
    for name in sorted({*a, *b}):
        known = b.get(name, a.get(name))
        assert known is not None
        pair = a.get(name, torch.zeros_like(known)), b.get(name, torch.zeros_like(known))
        differs = compare_values(f"gradient of {name}", *pair, tolerance, largest)
        if differs is not None:
            found.append(differs)
    return max(found, key=lambda differs: differs.apart.relative, default=None)


# -- random numbers and precision ------------------------------------------------------------------------------------


def without_random_numbers(check: LayerCheck) -> Ran:
    """The whole run; where the layer draws random numbers, as dropout does, in evaluation mode. Slices draw other ones
    than a whole sequence does, so that the results could not be compared."""
    before = random_state(check.runner.module)
    ran = check.run_whole()
    if not drew(before, random_state(check.runner.module)):
        return ran
    if check.layer.module is not None:
        check.layer.module.eval()
        check.without_dropout = True
        before = random_state(check.runner.module)
        ran = check.run_whole()
    if drew(before, random_state(check.runner.module)):
        check.skipped = (
            "not checked: it draws random numbers in evaluation mode as well, other ones for slices than for a whole "
            "sequence"
        )
    return ran


class SawHalf(TorchDispatchMode):
    """Whether anything is computed in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.saw = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dtype in HALF:
                self.saw = True
        return out


@contextmanager
def _in_fp32(module: nn.Module) -> Iterator[None]:
    """Half-precision weights and buffers of one layer as fp32 copies."""
    replaced = []
    wide: dict[int, Tensor] = {}
    for part in module.modules():
        for owner in (part._parameters, part._buffers):
            for name, tensor in owner.items():
                if tensor is not None and tensor.dtype in HALF:
                    replaced.append((owner, name, tensor))
                    if id(tensor) not in wide:
                        copy = tensor.detach().float()
                        is_parameter = isinstance(tensor, nn.Parameter)
                        wide[id(tensor)] = (
                            nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy
                        )
                        for attribute, value in vars(tensor).items():
                            if not torch.is_tensor(value):
                                setattr(wide[id(tensor)], attribute, value)
    try:
        for owner, name, tensor in replaced:
            owner[name] = wide[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for owner, name, tensor in replaced:
            owner[name] = tensor  # type: ignore[assignment]


def _widened(values: Values) -> Values:
    return values.with_tensors(
        [t.detach().float().requires_grad_(t.requires_grad) if t.dtype in HALF else t for t in values.tensors]
    )


@contextmanager
def in_fp32(check: LayerCheck) -> Iterator[LayerCheck | None]:
    """The same check with the layer in fp32 and without autocast, where bf16 or fp16 would hide small faults in their
    rounding; None where the layer cannot run so, or computes in half precision all the same."""
    module = check.layer.module
    dtypes = {t.dtype for t in (*check.inputs.tensors, *(module.parameters() if module is not None else ()))}
    device = check.inputs.tensors[0].device.type
    with check.runner.autocast():
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    if module is None or not dtypes & set(HALF):
        yield None
        return
    layouts = [
        PerSlice(tuple(v.float() if v.dtype in HALF else v for v in layout.values))
        if isinstance(layout, PerSlice)
        else layout
        for layout in check.layouts
    ]
    runner = replace(check.runner, autocast=nullcontext)
    wide = replace(
        check, runner=runner, inputs=_widened(check.inputs), layouts=layouts, outputs=NOTHING, output_layouts=[]
    )
    with _in_fp32(module):
        saw, caught = SawHalf(), None
        try:
            with saw, torch.no_grad():
                wide.run_whole()
        except Exception as error:  # a kernel for half precision only
            caught = error
        failed = check.peers.trials.failure(caught, f"running {check.layer} in fp32")
        caught = None
        yield None if saw.saw or failed is not None else wide
