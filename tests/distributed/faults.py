"""Define faults for `tests/mutation_check.py`: each breaks one thing in the ranks while a configuration trains.

A fault replaces names of the package. If such a name is gone, the patch fails, and with it the check: fix the fault
then, so that it breaks the same thing in the new place. No torch at import, so that listing is cheap.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from tests.distributed.cases import Case, RankRecord

UNEVEN = Case(slices=(5, 4, 3), masked=True, tied=True)
EQUAL = Case(slices=3, kv_heads=2)
ALL_FORWARD_FIRST = replace(EQUAL, schedule="gpipe")
SPLIT = replace(EQUAL, schedule="seq1f1b-zb")
CHECKPOINTED = replace(EQUAL, checkpointing="non_reentrant")
REPLICAS = Case(stages=1, data_parallel=2, slices=(5, 4, 3))
LEARNED = replace(UNEVEN, positions="learned")
MIXED = replace(UNEVEN, tied=False, mixers=("attention", "gated_linear_attention"))
RETAINED = replace(ALL_FORWARD_FIRST, mixers=("attention", "retention"))
EXPERTS = Case(slices=(5, 4, 3), masked=True, mixers=("attention", "experts"), loss_reduction="sum")
SUNK = replace(UNEVEN, tied=False, mixers=("attention", "window+sinks"))
PACKED = replace(EQUAL, slices=(5, 4, 3), documents=True)
DICTS = replace(PACKED, batch="position_ids")


@dataclass(frozen=True)
class Fault:
    """Hold the broken part, and the training that runs with it."""

    name: str
    where: str  # attention | store | loss | engine | schedule | runtime | layer
    says: str
    configuration: Case
    broken: Callable[[], contextlib.AbstractContextManager[Any]]
    # A layer or a loss that is right on whole sequences and wrong on slices: the reference runs it as well, and the
    # slice-safety check (`"verify": "first_batch"`) must name it.
    in_layers: bool = False
    section: dict[str, Any] = field(default_factory=dict)  # changes of the `terapipe` section
    # Text of a foreign error (torch's, on shapes) that may stop the fault. Any other error that is not one of ours
    # means that the fault itself does not work: the name that it patches is gone.
    stopped_by: str | None = None


FAULTS: dict[str, Fault] = {}


def fault(
    where: str, configuration: Case, says: str, *targets: str, **options: Any
) -> Callable[..., Callable[..., Any]]:
    """Enter a fault under the name of a function, which is decorated or passed by keyword.

    With `targets` (f"{STORE}.write" of `terapipe_ds`) the function is called in place of each, and takes the original
    before the arguments. Without targets, the function holds the fault: a decorated function is a generator that does
    so at its yield, a function passed by keyword returns a context manager.
    """

    def enter(function: Any = None, /, **functions: Callable[..., Any]) -> Any:
        for name, each in (functions or {function.__name__: function}).items():
            if targets:
                hold = functools.partial(replaced, each, *targets)
            else:
                hold = each if functions else contextlib.contextmanager(each)
            FAULTS[name] = Fault(name, where, says, configuration, hold, **options)
        return function

    return enter


def nothing(*args: Any, **options: Any) -> None:
    """Do nothing."""


@contextlib.contextmanager
def replaced(function: Callable[..., Any], *targets: str) -> Iterator[None]:
    """Call `function(original, *args)` in place of each target for the block."""
    with contextlib.ExitStack() as patches:
        for target in targets:
            module, _, path = target.partition(":")
            owner: Any = importlib.import_module(f"terapipe_ds.{module}")
            *owners, name = path.split(".")
            for each in owners:
                owner = getattr(owner, each)
            original = getattr(owner, name)
            _check_arguments(function, original)
            patches.enter_context(mock.patch.object(owner, name, _calling(function, original)))
        yield


def _check_arguments(function: Callable[..., Any], original: Any) -> None:
    """Raise TypeError if `function` cannot take every argument of the original: it would break nothing but the call."""
    parameters = inspect.signature(original).parameters.values()
    in_order = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    by_name = {each.name: each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    inspect.signature(function).bind(original, *in_order, **by_name)


def _calling(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(original, *args, **kwargs)


STORE = "attention.slice_store:SliceStore"
STATE = "attention.carry.states:CarriedEntry"
STATES = "attention.carry.states:CarriedStates"
ENTRY = "attention.slice_store:SliceEntry"
ADD_GRADS = f"{ENTRY}.add_grads"
WEIGHTS = "runtime.engine.batches:weights_of"
LEAVES = "runtime.engine.part_runner:PartRunner._leaves"
ADD_PRODUCT = "runtime.layers.weight_gradients:_add_product"
FACTORS = "runtime.layers.weight_gradients:_factors"
COMPUTE = "runtime.layers.weight_gradients:WeightGradients.compute"
REDUCE_TIED = "runtime.engine.engine:sum_gradients"
TRAIN_BATCH = "runtime.engine.engine:TeraPipeEngine.train_batch"
BUILD = "runtime.planning.plans:build"
VALIDATE = "runtime.planning.plans:validate"
FIRST_POSITION = "models.gpt:first_position"
ROTARY_POSITION = "models.positions:first_position"
ATTENTION = "models.gpt:sliced_attention"
MERGE = "attention.backends.blocks:merge"
RUNNER = "runtime.engine.part_runner"
DICT_BATCH = "dict_batch"
REDUCE = "runtime.engine.engine:TeraPipeEngine._exec_reduce_grads"
CLIP_NORM = "runtime.engine.deepspeed_faults:clip_fp32"
LABELS_OF = "runtime.batch.cut_tensors:SliceableTensors.part"

# -- attention -------------------------------------------------------------------------------------------------------


@fault("attention", UNEVEN, "the prefix begins at token 1")
def prefix_without_its_first_token() -> Iterator[None]:
    def shorter(queries: Any, cut: int) -> Any:
        keys, values = (x[:, :, cut:] for x in (queries.keys, queries.values))
        return queries._replace(keys=keys, values=values, start=queries.start - cut)

    def shorter_forward(forward: Any, self: Any, queries: Any) -> Any:
        return forward(self, shorter(queries, min(queries.start, 1)))

    def shorter_backward(backward: Any, self: Any, grad: Any, queries: Any, attended: Any, add_grads: Any) -> Any:
        cut = min(queries.start, 1)

        def add(offset: int, *parts: Any) -> None:
            add_grads(offset + cut, *parts)

        return backward(self, grad, shorter(queries, cut), attended, add)

    kernel = "attention.backends.blocks:BlockKernel"
    with replaced(shorter_forward, f"{kernel}.forward"), replaced(shorter_backward, f"{kernel}.backward"):
        yield


@fault("attention", UNEVEN, "tokens of a slice see its later tokens")
def diagonal_mask_missing() -> Iterator[None]:
    def unmasked(run: Any, self: Any, block: Any) -> Any:
        return run(self, block._replace(is_causal=False))

    def unmasked_backward(run_backward: Any, self: Any, grad: Any, block: Any, attended: Any) -> Any:
        return run_backward(self, grad, block._replace(is_causal=False), attended)

    kernel = "attention.backends.fused:CpuFlash"
    with replaced(unmasked, f"{kernel}.run"), replaced(unmasked_backward, f"{kernel}.run_backward"):
        yield


@fault("attention", UNEVEN, "prefix and diagonal weigh the same in the merged output", MERGE)
def merged_by_halves(merge: Any, first: Any, second: Any, target: Any) -> None:
    import torch

    target[0].copy_((first[0] + second[0]) / 2)
    target[1].copy_(torch.logaddexp(first[1], second[1]))


@fault("attention", UNEVEN, "the merged log-sum-exp is that of the diagonal alone", MERGE)
def log_sum_exp_not_merged(merge: Any, first: Any, second: Any, target: Any) -> None:
    of_first = first[1].clone()  # the target may be its memory
    merge(first, second, target)
    target[1].copy_(of_first)


fault("attention", SUNK, "a window is one token longer", "attention.active_slice:ActiveSlice.reach")(
    window_of_one_token_more=lambda reach, active, window: reach(active, None if window is None else window + 1)
)
fault("attention", SUNK, "sinks get no gradient", "attention.sliced:gradient_of_sinks")(
    sinks_without_gradient=lambda gradient, *args: 0 * gradient(*args)
)

# -- the slice store -------------------------------------------------------------------------------------------------


@fault("store", UNEVEN, "dK and dV of the prefix are dropped", ADD_GRADS)
def dropped_kv_gradient(add_grads: Any, self: Any, offset: int, dk: Any, dv: Any, *args: Any, **kwargs: Any) -> None:
    dk, dv = dk.clone(), dv.clone()
    for tensor in (dk, dv):
        tensor[:, :, : max(0, self.frontier - offset)] = 0  # the slice in backward begins at the frontier
    add_grads(self, offset, dk, dv, *args, **kwargs)


@fault("store", UNEVEN, "dK and dV of the prefix are added twice", ADD_GRADS)
def doubled_kv_gradient(add_grads: Any, self: Any, offset: int, dk: Any, dv: Any, *args: Any, **kwargs: Any) -> None:
    factor = 2 if offset + dk.shape[2] <= self.frontier else 1  # the slice in backward begins at the frontier
    add_grads(self, offset, dk * factor, dv * factor, *args, **kwargs)


fault("store", UNEVEN, "dK is added to dV and dV to dK", ADD_GRADS)(
    swapped_kv_gradients=lambda add_grads, self, offset, dk, dv, *rest, **more: add_grads(
        self, offset, dv, dk, *rest, **more
    )
)


@fault("store", UNEVEN, "from the second batch on the first slice finds the keys and values of the batch before")
def stale_keys_and_values() -> Iterator[None]:
    batches = []

    def write_once(write: Any, self: Any, active: Any, layer: Any, k: Any, v: Any, window: Any = None) -> Any:
        if batches and active.start == 0:
            entry = self._lookup(active, layer, (k, v), active.reach(window))
            entry.advance(active)
            entry.make_room(active)
            return entry
        return write(self, active, layer, k, v, window)

    def count(assert_drained: Any, self: Any) -> None:
        batches.append(1)
        assert_drained(self)

    with replaced(write_once, f"{STORE}.write"), replaced(count, f"{STORE}.assert_drained"):
        yield


fault("store", ALL_FORWARD_FIRST, "micro-batches share one store", f"{STORE}.write")(
    one_store_for_all_micro_batches=lambda write, self, active, *rest: write(
        self, active.replace(micro_batch_id=0), *rest
    )
)
fault("store", UNEVEN, "a micro-batch is never released", f"{STORE}.release")(never_released=nothing)


# -- carried states ----------------------------------------------------------------------------------------------------


fault("store", MIXED, "a state's gradient does not reach the slice before", f"{STATE}.take_gradient")(
    dropped_state_gradient=lambda take, self, active: nothing(take(self, active))
)


@fault("store", replace(MIXED, checkpointing="reentrant"), "a state's gradient counts once more where it is recomputed")
def state_gradient_doubled_by_recompute() -> Iterator[None]:
    again = set()

    def noting_read(read: Any, self: Any, active: Any) -> Any:
        if active.mode == "recompute":
            again.add((id(self), active.start))
        return read(self, active)

    def doubled(take: Any, self: Any, active: Any) -> Any:
        gradient = take(self, active)
        return gradient if gradient is None or (id(self), active.stop) not in again else 2 * gradient

    with replaced(noting_read, f"{STATE}.read"), replaced(doubled, f"{STATE}.take_gradient"):
        yield


@fault("store", MIXED, "every slice reads the state of the first", f"{STATE}.read")
def state_of_the_first_slice(read: Any, self: Any, active: Any) -> Any:
    state = read(self, active)
    return state if state is None else self._kept[min(self._kept)].state


@fault("store", MIXED, "a slice's backward takes the gradient of the state that it has read", f"{STATE}.take_gradient")
def state_gradient_of_another_slice(take: Any, self: Any, active: Any) -> Any:
    own = self._kept.get(active.start)
    gradient = take(self, active)
    return gradient if own is None or own.state is None else own.state.grad


fault("store", RETAINED, "micro-batches share their states", f"{STATES}.write")(
    one_state_for_all_micro_batches=lambda write, self, active, *rest: write(
        self, active.replace(micro_batch_id=0), *rest
    )
)
fault("layer", MIXED, "a state is not handed on", "attention.carry:read", in_layers=True)(
    state_not_read=lambda read, layer, name: None
)
fault("layer", MIXED, "a kernel gives its last state without a gradient", "attention.carry:write", in_layers=True)(
    state_without_gradient=lambda write, layer, name, state, output: write(layer, name, state.detach(), output)
)
fault(
    "layer",
    replace(MIXED, mixers=("attention", "convolution")),
    "a convolution hands on the inputs of one token earlier",
    "attention.carry:write",
    in_layers=True,
)(
    convolution_state_of_a_token_earlier=lambda write, layer, name, state, output: write(
        layer, name, state.roll(1, 1), output
    )
)

# -- losses that layers add --------------------------------------------------------------------------------------------


fault(
    "layer", EXPERTS, "a balance loss has the counts of the last slice alone", "attention.carry:read", in_layers=True
)(balance_of_the_last_slice=lambda read, layer, name: None)
fault("layer", EXPERTS, "a balance loss trains on the last slice alone", "attention.carry:write", in_layers=True)(
    balance_without_gradient=lambda write, layer, name, state, output: write(layer, name, state.detach(), output)
)


@fault("layer", EXPERTS, "each slice has losses of its own, means over its tokens", in_layers=True)
def losses_of_each_slice() -> Iterator[None]:
    from tests.small_models.experts import CODE

    def alone() -> Any:
        active = original()
        tokens = active and active.num_tokens
        return active and active.replace(start=0, stop=tokens, sequence_length=tokens)

    original = CODE["active_slice"]
    with mock.patch.dict(CODE, active_slice=alone):
        yield


@fault("layer", replace(EXPERTS, checkpointing="reentrant"), "an added loss counts twice where it is recomputed")
def added_loss_doubled_by_recompute() -> Iterator[None]:
    from tests.small_models.experts import CODE, RoutedExperts

    def doubled(self: Any, inputs: Any) -> Any:
        hidden, added = forward(self, inputs)
        active = CODE["active_slice"]()
        is_again = active is not None and active.mode == "recompute"
        return hidden, 2 * added - added.detach() if is_again else added

    forward = RoutedExperts.forward
    with mock.patch.object(RoutedExperts, "forward", doubled):
        yield


@fault("loss", EXPERTS, "added losses are not divided by the accumulation steps")
def added_loss_of_each_micro_batch() -> Iterator[None]:
    from tests.small_models.experts import LossWithAdded

    def unscaled(self: Any, outputs: Any, labels: Any) -> Any:
        added = outputs[1].sum()
        return call(self, outputs, labels) + (EXPERTS.micro_batches - 1) * (added - added.detach())

    call = LossWithAdded.__call__
    with mock.patch.object(LossWithAdded, "__call__", unscaled):
        yield


fault("engine", EXPERTS, "only the first tensor of a tuple gets a gradient", f"{RUNNER}:PartRunner._input_gradients")(
    gradient_of_one_tensor_alone=lambda gradients, self, action: tuple(
        0 * gradient if index else gradient for index, gradient in enumerate(gradients(self, action))
    )
)

# -- packed rows -------------------------------------------------------------------------------------------------------


fault("engine", PACKED, "the edges of one row are ignored", f"{RUNNER}:Documents")(
    edges_of_one_row_ignored=lambda documents, starts, *span: documents(((0,), *starts[1:]), *span)
)
fault("engine", PACKED, "a micro-batch has the edges of another", "runtime.batch.batch_agreement:_from_stage")(
    edges_of_another_micro_batch=lambda from_stage, *args: from_stage(*args)[::-1]
)


@fault(
    "engine", replace(PACKED, checkpointing="non_reentrant"), "no edges in recompute", f"{RUNNER}:PartRunner._active"
)
def no_edges_in_recompute(active: Any, self: Any, action: Any, mode: str) -> Any:
    return active(self, action, mode).replace(**{"documents": None} if mode == "recompute" else {})


fault("engine", DICTS, "labels of a dict are not shifted", f"{DICT_BATCH}:_shifted")(
    labels_of_a_dict_as_they_are=lambda shifted, labels, starts, ignore_index: labels
)
fault("engine", DICTS, "the last of a document is trained on the next one's first", f"{DICT_BATCH}:_shifted")(
    labels_over_edges=lambda shifted, labels, starts, ignore_index: shifted(labels, ((0,),) * len(starts), ignore_index)
)
fault("engine", DICTS, "labels of padding count", f"{DICT_BATCH}:_without_padding")(
    labels_of_padding=lambda without, labels, lengths, ignore_index: labels
)
fault("engine", replace(DICTS, batch="seq_idx"), "the documents of a dict are lost", f"{DICT_BATCH}:have_edges")(
    edges_of_a_dict_ignored=lambda have_edges, starts: False
)


# -- the loss --------------------------------------------------------------------------------------------------------


@fault("loss", UNEVEN, "slices weigh the same, those without a label left out", WEIGHTS)
def unweighted_losses(weights_of: Any, *args: Any) -> Any:
    weights = weights_of(*args)
    counted = sum(weight > 0 for weight in weights)
    return tuple(1.0 / counted if weight > 0 else 0.0 for weight in weights)


fault("loss", UNEVEN, "slices weigh by tokens where they should by valid labels", WEIGHTS)(
    weights_of_tokens=lambda weights_of, *args: weights_of(*args, "mean")
)


@fault("loss", EQUAL, "the loss is divided by the number of slices, as if they were micro-batches", WEIGHTS)
def slices_counted_as_micro_batches(weights_of: Any, *args: Any) -> Any:
    weights = weights_of(*args)
    return tuple(weight / len(weights) for weight in weights)


fault(
    "loss",
    replace(UNEVEN, data_seed=3),
    "a slice without a label is 0 * NaN",
    "runtime.engine.batch_results:weighted_loss",
)(empty_slices_not_left_out=lambda share, outputs, labels, weight, *rest: share(outputs, labels, 1.0, *rest) * weight)
fault("loss", EQUAL, "the evaluation loss is that of the last slice", "runtime.engine.batch_results:sum_of_slices")(
    evaluation_of_the_last_slice=lambda _, losses: losses[-1]
)


@fault("loss", EQUAL, "labels are cut one token early", LABELS_OF)
def labels_one_token_early(part: Any, self: Any, start: int, stop: int) -> Any:
    shift = min(start, 1)
    return part(self, start - shift, stop - shift)


# -- the engine ------------------------------------------------------------------------------------------------------


@fault("engine", EQUAL, "the first stage takes the tokens of a slice from one token too far left", LEAVES)
def span_off_by_one(leaves: Any, self: Any, action: Any, active: Any) -> Any:
    shift = min(active.start, 1)
    return leaves(self, action, active.replace(start=active.start - shift, stop=active.stop - shift))


@fault("engine", EQUAL, "the first stage takes the first slice for the last, and the other way round", LEAVES)
def swapped_slices(leaves: Any, self: Any, action: Any, active: Any) -> Any:
    length = active.sequence_length
    return leaves(self, action, active.replace(start=length - active.stop, stop=length - active.start))


@fault("engine", ALL_FORWARD_FIRST, "the second micro-batch sends the gradients of the first")
def gradients_of_another_micro_batch() -> Iterator[None]:
    from terapipe_ds.runtime.engine import engine
    from terapipe_ds.runtime.engine.part_runner import PartRunner
    from terapipe_ds.schedule import Kind

    send_gradients = PartRunner.send_gradients
    kept: dict[int, Any] = {}

    def send_first(self: Any, action: Any) -> None:
        [leaf] = self._open().get(action).inputs
        if action.micro_batch_id == 0:
            kept[action.slice_id] = leaf.grad
        leaf.grad = kept[action.slice_id]
        send_gradients(self, action)

    sends = {Kind.SEND_GRAD: engine._on_its_part(send_first)}
    with mock.patch.dict(engine.TeraPipeEngine._ACTIONS, sends):
        yield


@fault("engine", CHECKPOINTED, "layers are recomputed as if they ran the first slice", f"{RUNNER}:PartRunner._active")
def recomputed_with_the_first_slice(active_of: Any, self: Any, action: Any, mode: str) -> Any:
    active = active_of(self, action, mode)
    return active.replace(start=0, stop=active.num_tokens) if mode == "recompute" else active


fault(
    "engine",
    CHECKPOINTED,
    "layers are recomputed without a slice",
    f"{RUNNER}:push_slice",
    stopped_by="is invalid for input of size",
)(
    recomputed_without_a_slice=lambda push, active: (
        contextlib.nullcontext() if active.mode == "recompute" else push(active)
    )
)
fault("engine", UNEVEN, "tied gradients are not summed", REDUCE_TIED)(tied_gradients_not_reduced=nothing)
fault("engine", REPLICAS, "gradients are not averaged over replicas", REDUCE)(gradients_not_reduced=nothing)


@fault(
    "engine", replace(EQUAL, clipping=True), "the clip norm leaves out later stages, as DeepSpeed's own does", CLIP_NORM
)
def norm_of_the_first_stage(clip: Any, module: Any, grid: Any, limit: float) -> Any:
    from deepspeed.runtime.utils import clip_grad_norm_

    return clip_grad_norm_(module.parameters(), limit, mpu=grid)


@fault("engine", UNEVEN, "tied gradients are summed twice", REDUCE_TIED)
def tied_gradients_reduced_twice(reduce: Any, *tied: Any) -> None:
    reduce(*tied)
    reduce(*tied)


@fault("engine", replace(EQUAL, hook=True), "the module's hook before_reduce is not called")
def hook_not_called() -> Iterator[None]:
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine, sum_gradients
    from terapipe_ds.schedule import Kind

    without = {Kind.REDUCE_TIED_GRADS: lambda self, action: sum_gradients(self.module, self.optimizer)}
    with mock.patch.object(TeraPipeEngine, "_ACTIONS", {**TeraPipeEngine._ACTIONS, **without}):
        yield


@fault("engine", EQUAL, "a weight's gradient is that of the slice whose backward ran last", ADD_PRODUCT)
def weight_gradients_overwritten(_: Any, weight: Any, rows: Any, inputs: Any) -> Any:
    weight.grad = None
    return rows.t() @ inputs


@fault("engine", EQUAL, "a weight's gradient counts twice from the second slice on", ADD_PRODUCT)
def weight_gradients_added_twice(add_product: Any, weight: Any, rows: Any, inputs: Any) -> Any:
    add_product(weight, rows, inputs)
    return rows.t() @ inputs


@fault("engine", SPLIT, "the W of one slice adds nothing", COMPUTE)
def dropped_weight(compute: Any, self: Any, unit: tuple[int, int, int], around: Any) -> int:
    count = len(self.waiting[unit])
    if unit[1:] == (1, 2):
        self.waiting[unit].clear()
    compute(self, unit, around)
    return count


fault("engine", SPLIT, "the product of several slices leaves one out", FACTORS)(
    dropped_factors=lambda factors, products: factors(products[:-1] or products)
)


@fault("engine", SPLIT, "the W of one slice adds its gradients twice", COMPUTE)
def weight_twice(compute: Any, self: Any, unit: tuple[int, int, int], around: Any) -> int:
    if unit[1:] == (1, 2):
        kept = list(self.waiting[unit])
        compute(self, unit, around)
        self.waiting[unit] = kept
    return int(compute(self, unit, around))


# -- schedule and lowering -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unproven(function: Callable[..., Any], target: str) -> Iterator[None]:
    """Replace the target, and skip the proof that would refuse the result."""
    with replaced(function, target), replaced(lambda *_: None, VALIDATE):
        yield


def _slices_ascending(order: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same order, with the backwards of each micro-batch in the order of their slices."""
    from terapipe_ds.schedule import Kind

    changed = list(order)
    for micro_batch_id in {action.micro_batch_id for action in order}:
        places = [i for i, a in enumerate(order) if a.kind is Kind.BACKWARD and a.micro_batch_id == micro_batch_id]
        actions = sorted((order[place] for place in places), key=lambda action: action.slice_id)
        for place, action in zip(places, actions, strict=True):
            changed[place] = action
    return tuple(changed)


def _ordered(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[..., Any]:
    """Change every stage's order after it was built."""

    def build_wrong(build: Any, *args: Any, **kwargs: Any) -> Any:
        schedule = build(*args, **kwargs)
        return replace(schedule, orders=tuple(change(order) for order in schedule.orders))

    return build_wrong


fault("schedule", UNEVEN, "backwards begin with the first slice; validate() is skipped")(
    backward_in_forward_order=lambda: _unproven(_ordered(_slices_ascending), BUILD)
)


@fault("schedule", UNEVEN, "the same, and the store does not check")
def backward_in_forward_order_unnoticed() -> Iterator[None]:
    """Accumulators start at zero, as is usual where nothing guards the order, and micro-batches are released at the end
    of the batch."""

    def begin_with_zeros(begin_backward: Any, entry: Any, start: int, stop: int) -> None:
        if not entry.grads.is_taken:
            entry.grads.reserve(0, entry.sequence_length)
            entry.touched = 0
            for total in entry.grads.at(0, entry.sequence_length):
                total.zero_()
        entry.frontier = stop  # whatever the order
        begin_backward(entry, start, stop)

    def release_in_evaluation(release: Any, self: Any, part_id: int, micro_batch_id: int) -> None:
        if all(entry.mode != "train" for entry in self._entries[part_id, micro_batch_id].values()):
            release(self, part_id, micro_batch_id)

    with (
        _unproven(_ordered(_slices_ascending), BUILD),
        replaced(begin_with_zeros, f"{ENTRY}.begin_backward"),
        replaced(release_in_evaluation, f"{STORE}.release"),
        replaced(lambda _, store: store.reset(), f"{STORE}.assert_drained"),
    ):
        yield


def _first_two_swapped(order: tuple[Any, ...]) -> tuple[Any, ...]:
    return (order[1], order[0], *order[2:])


fault("schedule", ALL_FORWARD_FIRST, "the second slice runs before the first", BUILD)(
    forwards_swapped=_ordered(_first_two_swapped)
)
fault("schedule", ALL_FORWARD_FIRST, "the second slice runs before the first; validate() is skipped")(
    forwards_swapped_unproven=lambda: _unproven(_ordered(_first_two_swapped), BUILD)
)
fault("schedule", EQUAL, "the last backward is missing; validate() is skipped")(
    last_backward_missing=lambda: _unproven(_ordered(lambda order: order[:-1]), BUILD)
)


def _lowered_without(*kinds: str) -> Callable[..., Any]:
    def lowered(lower_stage: Any, *args: Any) -> Any:
        stage = lower_stage(*args)
        return replace(stage, actions=tuple(action for action in stage.actions if action.kind.name not in kinds))

    return lowered


LOWER = "schedule.schedule:lower_stage"
UNSENT: dict[str, Any] = {"section": {"stall_timeout_s": 5}, "stopped_by": "no progress for 5 s"}
fault("schedule", EQUAL, "lowering forgets to send gradients", LOWER, **UNSENT)(
    gradients_never_sent=_lowered_without("SEND_GRAD")
)
fault("schedule", REPLICAS, "lowering forgets the reduction of gradients", LOWER)(
    reduction_forgotten=_lowered_without("REDUCE_GRADS", "REDUCE_TIED_GRADS")
)


def _weights_changed(change: Callable[[list[Any], int], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Change the last W of every stage, at its index in the actions that the engine runs."""
    from terapipe_ds.schedule import Kind

    def changed(for_stage: Any, self: Any, stage_id: int) -> Any:
        stage = for_stage(self, stage_id)
        actions = list(stage.actions)
        places = [index for index, action in enumerate(actions) if action.kind is Kind.WEIGHT]
        return replace(stage, actions=tuple(change(actions, places[-1]) if places else actions))

    return _unproven(changed, "schedule:Schedule.for_stage")


def _before_its_backward(actions: list[Any], index: int) -> list[Any]:
    from terapipe_ds.schedule import Kind

    weight = actions.pop(index)
    backward = next(i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD and a.unit == weight.unit)
    return [*actions[:backward], weight, *actions[backward:]]


fault("schedule", SPLIT, "a W runs before its B; validate() is skipped")(
    weight_before_backward=lambda: _weights_changed(_before_its_backward)
)
fault("schedule", SPLIT, "a W runs twice; validate() is skipped")(
    weight_runs_twice=lambda: _weights_changed(lambda actions, index: [*actions[: index + 1], *actions[index:]])
)
fault("schedule", SPLIT, "a W is missing; validate() is skipped")(
    weight_never_runs=lambda: _weights_changed(lambda actions, index: actions[:index] + actions[index + 1 :])
)


# -- runtime ---------------------------------------------------------------------------------------------------------


@fault("runtime", EQUAL, "each message carries the tensors of the one before")
def messages_one_late() -> Iterator[None]:
    before: dict[int, Any] = {}

    def send_late(send: Any, self: Any, tensors: Any, *which: int) -> None:
        late = before.get(id(self), tensors)
        before[id(self)] = [t.detach().clone() for t in tensors]
        send(self, late, *which)

    with replaced(send_late, "runtime.links.channel:SendChannel.send"):
        yield


@fault(
    "runtime",
    replace(EQUAL, mixed=True),
    "the shapes in the header are taken for those of the first batch",
    section={"stall_timeout_s": 5},
    stopped_by="split_with_sizes expects",
)
def stale_header() -> Iterator[None]:
    first: list[Any] = []

    def agree_once(agree: Any, *args: Any) -> Any:
        first.append(agree(*args))
        return first[0]

    with replaced(agree_once, "runtime.batch.source:agree_on_batch"):
        yield


def _other_plan_on_rank_1(train_batch: Any, self: Any, *args: Any) -> Any:
    import torch.distributed as torch_dist

    from terapipe_ds.plan import SlicePlan

    if torch_dist.get_rank() == 1:
        self.use_slice_plan(SlicePlan((7, 5)))
    return train_batch(self, *args)


@fault(
    "runtime",
    EQUAL,
    "stages with different plans are not noticed by the header",
    section={"stall_timeout_s": 5},
    stopped_by="the active slice .* has 7 tokens",
)
def header_accepted_blindly() -> Iterator[None]:
    accept = replaced(lambda *_: 0, "runtime.batch.batch_agreement:share")
    with accept, replaced(_other_plan_on_rank_1, TRAIN_BATCH):
        yield


fault("runtime", EQUAL, "one stage has another plan", TRAIN_BATCH, section={"stall_timeout_s": 5})(
    plans_differ=_other_plan_on_rank_1
)


# -- layers: right on whole sequences, wrong on slices ---------------------------------------------------------------


fault("layer", UNEVEN, "rotary positions count from 0 in every slice", ROTARY_POSITION, in_layers=True)(
    rotary_positions_not_offset=lambda _: 0
)
fault("layer", LEARNED, "learned positions count from 0 in every slice", FIRST_POSITION, in_layers=True)(
    learned_positions_not_offset=lambda _: 0
)
fault("layer", UNEVEN, "a norm centres over the tokens", "models.gpt:FinalNorm.forward", in_layers=True)(
    norm_over_tokens=lambda forward, self, hidden: forward(self, hidden - hidden.mean(dim=1, keepdim=True))
)


@fault("attention", UNEVEN, "two intercepted calls have one name")
def intercepted_calls_share_a_name() -> Iterator[None]:
    from tests.distributed.engines import torch_attention

    with torch_attention(), replaced(lambda *_: "a name", "attention.plain_attention_guard:CallName"):
        yield


EXPLICIT = {"attention": "explicit"}


@fault("layer", UNEVEN, "attention by torch's own function, to the slice alone", in_layers=True, section=EXPLICIT)
def attention_not_sliced() -> Iterator[None]:
    from tests.distributed.engines import torch_attention

    with torch_attention():
        yield


@fault("layer", UNEVEN, "attention computed by hand, to the slice alone", ATTENTION, in_layers=True)
def attention_by_hand(_: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


@fault("layer", UNEVEN, "a convolution over tokens", "models.gpt:FeedForward.forward", in_layers=True)
def convolution_over_tokens(forward: Any, self: Any, hidden: Any) -> Any:
    import torch.nn.functional as F

    return forward(self, hidden + 0.5 * F.pad(hidden, (0, 0, 1, 0))[:, :-1])


@fault("layer", EQUAL, "the loss shifts its labels itself", in_layers=True)
def loss_that_shifts() -> Iterator[None]:
    from tests.distributed import training

    loss = training._loss

    def shifting(logits: Any, labels: Any, reduction: str) -> Any:
        return loss(logits[:, :-1], labels[:, 1:], reduction)

    with mock.patch.object(training, "_loss", shifting):
        yield


# -- against the stock engine ----------------------------------------------------------------------------------------


def train_broken(case: Case, fault: str | None) -> RankRecord:
    """Train a case by our broken engine, on every rank. The engine's own check of the first batch is off: it would
    refuse wrong weights, but here the comparison is under test."""
    from terapipe_ds.runtime.verify import FirstBatchCheck
    from tests.distributed.training import train_case

    with mock.patch.object(FirstBatchCheck, "run", lambda *arguments: None):
        return train_case(case, fault=fault)
