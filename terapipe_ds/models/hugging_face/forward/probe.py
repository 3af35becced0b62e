"""Find out how a decoder layer can run in slices, by running it: through `sliced_attention`, or by a cache.

A layer runs a few tokens whole, and again in two slices. If the outputs and the gradients of its inputs are equal, the
layer can be trained in this way. The trial knows nothing of families: only the layer's behaviour decides.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention.active_slice import ActiveSlice, push_slice
from terapipe_ds.attention.slice_store import SliceStore
from terapipe_ds.models.hugging_face.forward.outline import Outline, keeping_random_state
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

Tensors = tuple[Tensor, Tensor]
Sketches = dict[str, Tensor]
_LENGTHS = (4, 3)
_ROWS = 2
_TOLERANCE = 1e-4  # some layers compute in fp32 whatever their inputs are
_OF_OTHER = 1e-3  # between two attentions, which round otherwise
_ROUGH = 1e-2  # the same on a GPU, whose kernels differ more


class Way(NamedTuple):
    """Hold a layer's way through slices: `sliced_attention` (`is_fast`) or a cache, and whether it has states.

    `partial` names the parameters whose gradient is the sum over tensor-parallel ranks.
    """

    is_fast: bool
    has_states: bool
    partial: tuple[str, ...] = ()

    @property
    def mixing(self) -> str:
        """Return the part of the layer that mixes the documents of packed rows; empty if it keeps them apart."""
        if self.has_states:
            return "states of a convolution or a recurrence"
        return "" if self.is_fast else "attention by code of its own"

    @property
    def shortest_slice(self) -> int:
        """Return the fewest tokens of a slice: models take a single token after others for a step of generation."""
        return 1 if self.is_fast and not self.has_states else 2


def find_way(outline: Outline, index: int, layer: nn.Module) -> Way:
    """Return how a decoder layer with its weights runs in slices.

    Raises:
        ModelRefusedError: it does not; the message has the result of both ways.
    """
    problems: list[str] = []
    trial = trial_of(outline, layer)
    device = next((p.device for p in trial.parameters()), torch.device("cpu"))
    # the fast way first; code of its own, with a cache, where that gives other numbers
    for is_fast in (True, False) if outline.takes_patterns else (False,):
        with keeping_random_state(device), torch.enable_grad(), _whole_products():
            problem = _problem(outline, index, trial, outline.attention(is_fast))
            way = Way(is_fast, bool(outline.cache.states_written))
            problem = problem or _problem_of_attention(outline, index, trial, outline.attention(is_fast))
        if not problem:
            return way
        problems += [problem] if problem not in problems else []
    raise ModelRefusedError(
        f"decoder layer {index} ({type(layer).__name__}) cannot run in slices: {'; '.join(problems)}"
    )


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    """Multiply fp32 without TF32: its rounding lets a router choose other experts where attentions differ by less."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    own = [each.fp32_precision for each in products]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set newer names, as `Trainer(tf32=True)` does, and not the older one
        precision = "highest"
    torch.set_float32_matmul_precision("highest")  # torch refuses that its older and newer names differ
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for each, value in zip(products, own, strict=True):
            each.fp32_precision = value


def trial_of(outline: Outline, layer: nn.Module) -> nn.Module:
    """Return a copy of a decoder layer for trials, in fp32 at least; the model is in evaluation mode from now on.

    Its weights are of a usual size: training may start from any.
    """
    trial = outline.copy_of(layer).eval().requires_grad_(False)  # a backward gives gradients of inputs and states alone
    if any(parameter.dtype.itemsize < 4 for parameter in trial.parameters()):
        trial.float()
    for part in trial.modules():
        if hasattr(part, "compute_dtype"):  # a quantized layer, which casts its inputs
            part.compute_dtype = torch.float32  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    # zeros hide all that comes before them; small weights, of norms too, make all scores alike, and large ones magnify
    # rounding or let each token see one other, whatever an attention does with the scores
    for weight in (each for each in trial.parameters() if each.is_floating_point() and each.numel()):
        if not weight.any():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        weight.div_(weight.norm(math.inf))  # squares of very small or large numbers leave the range of fp32
        usual = 2 * (weight.numel() / weight.shape[-1]) ** 0.5 if weight.dim() > 1 else weight.numel() ** 0.5
        weight.mul_(usual / weight.norm())
    outline.model.eval()
    return trial


def difference(
    outline: Outline, index: int, layer: nn.Module, change: Callable[[], nn.Module], way: Way
) -> tuple[str, Sketches, Sketches]:
    """Return how a decoder layer and the layer that `change` makes of it differ on a sequence; empty if not.

    Also return a sketch of the gradient of each parameter, of both.
    """
    inputs, attention = _inputs(outline, index, layer), outline.attention(way.is_fast)
    with keeping_random_state(inputs[0].device), torch.enable_grad():
        # one after the other: both need not be in memory
        with _sketches(layer) as of_whole:
            wanted = _run_slices(outline, index, layer, attention, (sum(_LENGTHS),), inputs)
        with _sketches(change()) as of_changed:
            ours = _run_slices(outline, index, layer, attention, (sum(_LENGTHS),), inputs)
    outline.cache.forget_written()
    error = _error(ours, wanted, inputs)
    problem = f"it does not compute what the whole layer does (relative error {error:.0e})"
    return "" if error <= _TOLERANCE else problem, of_whole, of_changed


@contextlib.contextmanager
def _sketches(layer: nn.Module) -> Iterator[Sketches]:
    """Sketch the gradients of the parameters by 64 sums with random signs; the gradients are not kept.

    The sketch of a sum is the sum of the sketches.
    """
    sketches: Sketches = {}
    with contextlib.ExitStack() as hooks:
        for name, parameter in layer.named_parameters():
            if parameter.is_floating_point():
                sketches[name] = torch.zeros(64, device=parameter.device)
                note = functools.partial(_note, sketches[name])
                hooks.enter_context(parameter.requires_grad_().register_post_accumulate_grad_hook(note))
        yield sketches


def _note(sketch: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    flat, parameter.grad = parameter.grad.float().flatten(), None
    # plain sums miss gradients whose sum is zero, such as a router's: its softmax ignores a common shift
    generator = torch.Generator(flat.device).manual_seed(0)
    signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8, device=flat.device)
    flat = flat * (2 * signs - 1)
    sketch += F.pad(flat, (0, -len(flat) % len(sketch))).view(-1, len(sketch)).sum(0)


def draws(outline: Outline, index: int, layer: nn.Module, way: Way) -> bool:
    """Return whether a decoder layer draws random numbers in training, as a router with noise does."""
    inputs = _inputs(outline, index, layer)
    device = inputs[0].device
    state = getattr(torch, device.type).get_rng_state if device.type != "cpu" else lambda _: torch.get_rng_state()
    with keeping_random_state(device), torch.enable_grad():
        before = state(device)
        _run_slices(outline, index, layer.train(), outline.attention(way.is_fast), (sum(_LENGTHS),), inputs)
        layer.eval()
        outline.cache.forget_written()
        return not torch.equal(before, state(device))


def _problem(outline: Outline, index: int, layer: nn.Module, attention: str) -> str:
    """Return why the layer cannot run in slices this way; empty if it can."""
    outline.cache.states_written.clear()
    problem, before = "", _tensors_in_attributes(layer)
    try:
        inputs = _inputs(outline, index, layer)
        # the same layer is its own reference: no formula of a family is needed
        whole = _run_slices(outline, index, layer, attention, (sum(_LENGTHS),), inputs)
        sliced = _run_slices(outline, index, layer, attention, _LENGTHS, inputs)
        error = _error(sliced, whole, inputs)
    except Exception as raised:  # of the model's own code: it was made for other masks or caches
        problem = str(raised) if isinstance(raised, ModelRefusedError) else f"{type(raised).__name__}: {raised}"
    else:
        if not error <= _TOLERANCE:
            problem = f"on slices it computes something else than on the whole sequence (relative error {error:.0e})"
    outline.cache.forget_written()
    # a state that the layer keeps by itself would mix micro-batches
    after = _tensors_in_attributes(layer)
    kept = [name for name in sorted(after) if name not in before or not torch.equal(before[name], after[name])]
    return f"it keeps a state of its own between calls ({', '.join(kept)})" if kept else problem


def _problem_of_attention(outline: Outline, index: int, layer: nn.Module, attention: str) -> str:
    """Return how the layer differs from what it computes with attention of its own; empty if it does not."""
    inputs, length, problems = _inputs(outline, index, layer), (sum(_LENGTHS),), list[str]()
    ours = _run_slices(outline, index, layer, attention, length, inputs)
    # sdpa may lack what the eager attention of a family has, and the eager one of a class may never run
    for name in outline.own_attentions:
        try:
            error = _error(ours, _run_slices(outline, index, layer, name, length, inputs), inputs)
        except Exception as raised:  # of the model's own code
            error, problem = math.inf, f"{type(raised).__name__}: {raised}"
            told = f"cannot run a trial in fp32, {problem}. Make the model with 'sdpa' if that computes the same"
        else:
            told = f"computes something else than plain attention (relative error {error:.0e})"
        finally:
            outline.cache.forget_written()
        if error <= (_OF_OTHER if inputs[0].is_cpu else _ROUGH):
            return ""
        problems.append(f"its attn_implementation {name!r} {told}")
    return problems[0]


def _inputs(outline: Outline, index: int, layer: nn.Module) -> Tensors:
    """Return hidden states, and a gradient of the outputs for them."""
    like = next(parameter for parameter in layer.parameters() if parameter.is_floating_point())
    generator = torch.Generator().manual_seed(index)
    shape = _ROWS, sum(_LENGTHS), outline.config.hidden_size
    hidden, grad = (torch.randn(*shape, generator=generator).to(like) for _ in range(2))
    return hidden, grad


def _error(ours: Tensors, theirs: Tensors, residuals: Tensors) -> float:
    # compare only the layer's addition, if it adds: the residual stream is equal in any case
    return max(
        float((a - b).norm() / (b - residual).norm().clamp_min(torch.finfo(b.dtype).tiny))
        for a, b, residual in zip(ours, theirs, residuals, strict=True)
    )


def _run_slices(
    outline: Outline, index: int, layer: nn.Module, attention: str, lengths: tuple[int, ...], inputs: Tensors
) -> Tensors:
    """Return the outputs of all slices and the gradient of their inputs."""
    (hidden, grad), store, runs, start, used = inputs, SliceStore(), [], 0, set[str]()
    store.carried.on_gradient = lambda entry, *_: used.add(entry.name)
    for slice_id, tokens in enumerate(lengths):
        stop = start + tokens
        active = ActiveSlice(start, stop, sum(lengths), slice_id=slice_id, store=store)
        leaf = hidden[:, start:stop].clone().requires_grad_()
        with push_slice(active):
            runs.append((active, leaf, outline.run_layer(index, layer, leaf * 1, attention)))
        start = stop
    for active, _, out in reversed(runs):
        with push_slice(active):
            out.backward(grad[:, active.start : active.stop])
    store.release(0, 0)
    unused = outline.cache.states_written - used
    if unused and len(lengths) > 1:
        raise ModelRefusedError(f"it goes on from a state only with one token at a time ({', '.join(sorted(unused))})")
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf, _ in runs]
    return torch.cat([out.detach() for *_, out in runs], 1), torch.cat(gradients, 1)


def _tensors_in_attributes(layer: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors in attributes that are neither parameters nor buffers, by names."""
    return {
        f"{type(module).__name__}.{name}": value.detach().cpu().clone()
        for module in layer.modules()
        for name, value in vars(module).items()
        if torch.is_tensor(value)
    }
