"""Deliberate faults for `tests/mutation_check.py`: each breaks one thing in the ranks while a configuration trains.

A fault replaces names of the package. Where such a name is gone the patch fails, and with it the check: mend the fault
then, so that it breaks the same thing in the new place. No torch at import, so that listing is cheap.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from tests.distributed import mutations
from tests.distributed.configurations import Configuration

UNEVEN = Configuration(slices=(5, 4, 3), masked=True, tied=True)
EQUAL = Configuration(slices=3, kv_heads=2)
ALL_FORWARD_FIRST = replace(EQUAL, schedule="gpipe")
SPLIT = replace(EQUAL, schedule="seq1f1b-zb")
CHECKPOINTED = replace(EQUAL, checkpointing="non_reentrant")
REPLICAS = Configuration(stages=1, data_parallel=2, slices=(5, 4, 3))
LEARNED = replace(UNEVEN, positions="learned")


@dataclass(frozen=True)
class Fault:
    """What is broken, and what is trained meanwhile."""

    name: str
    where: str  # attention | store | loss | engine | schedule | runtime | layer
    says: str
    configuration: Configuration
    broken: Callable[[], contextlib.AbstractContextManager[Any]]
    # A layer or a loss that is right on whole sequences and wrong on slices: the reference runs it as well, and the
    # slice-safety check (`"verify": "first_batch"`) must name it.
    in_layers: bool = False
    section: dict[str, Any] = field(default_factory=dict)  # changes of the `terapipe` section
    # What another's error says (torch's, on shapes) where it stops the fault. Any other error that is not one of ours
    # means that the fault itself does not work: the name that it patches is gone.
    stopped_by: str | None = None


FAULTS: dict[str, Fault] = {}


def fault(
    where: str, configuration: Configuration, says: str, **options: Any
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Enter a generator that holds the fault at its yield, by the name of the function."""

    def enter(broken: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name = broken.__name__
        FAULTS[name] = Fault(name, where, says, configuration, contextlib.contextmanager(broken), **options)
        return broken

    return enter


def known(name: str, where: str, configuration: Configuration, says: str, **options: Any) -> None:
    """Enter one of `mutations.py`."""
    FAULTS[name] = Fault(name, where, says, configuration, mutations.MUTATIONS[name], **options)


# -- attention -------------------------------------------------------------------------------------------------------


@fault("attention", UNEVEN, "the prefix begins at token 1")
def prefix_without_its_first_token() -> Iterator[None]:
    from terapipe_ds.attention.backends.blocks import BlockKernel

    forward, backward = BlockKernel.forward, BlockKernel.backward

    def shorter_forward(self: Any, q: Any, keys: Any, values: Any, start: int, *rest: Any) -> Any:
        cut = min(start, 1)
        return forward(self, q, keys[:, :, cut:], values[:, :, cut:], start - cut, *rest)

    def shorter_backward(
        self: Any,
        grad: Any,
        q: Any,
        keys: Any,
        values: Any,
        out: Any,
        lse: Any,
        start: int,
        scale: float,
        dropout_p: float,
        state: Any,
        add_grads: Any,
    ) -> Any:
        cut = min(start, 1)

        def add(offset: int, *parts: Any) -> None:
            add_grads(offset + cut, *parts)

        keys, values = keys[:, :, cut:], values[:, :, cut:]
        return backward(self, grad, q, keys, values, out, lse, start - cut, scale, dropout_p, state, add)

    with (
        mock.patch.object(BlockKernel, "forward", shorter_forward),
        mock.patch.object(BlockKernel, "backward", shorter_backward),
    ):
        yield


@fault("attention", UNEVEN, "tokens of a slice see its later tokens")
def diagonal_mask_missing() -> Iterator[None]:
    from terapipe_ds.attention.backends.fused import CpuFlash

    run, run_backward = CpuFlash.run, CpuFlash.run_backward

    def unmasked(self: Any, q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
        return run(self, q, k, v, False, scale)

    def unmasked_backward(self: Any, *tensors_and: Any) -> Any:
        *tensors, _, scale, state = tensors_and
        return run_backward(self, *tensors, False, scale, state)

    with mock.patch.object(CpuFlash, "run", unmasked), mock.patch.object(CpuFlash, "run_backward", unmasked_backward):
        yield


@fault("attention", UNEVEN, "prefix and diagonal weigh the same in the merged output")
def merged_by_halves() -> Iterator[None]:
    import torch

    from terapipe_ds.attention.backends import blocks

    def merge(first: Any, second: Any, target: Any) -> None:
        target[0].copy_((first[0] + second[0]) / 2)
        target[1].copy_(torch.logaddexp(first[1], second[1]))

    with mock.patch.object(blocks, "merge", merge):
        yield


@fault("attention", UNEVEN, "the merged log-sum-exp is that of the diagonal alone")
def log_sum_exp_not_merged() -> Iterator[None]:
    from terapipe_ds.attention.backends import blocks

    merge = blocks.merge

    def merge_outputs(first: Any, second: Any, target: Any) -> None:
        merge(first, second, target)
        target[1].copy_(first[1])

    with mock.patch.object(blocks, "merge", merge_outputs):
        yield


# -- the slice store -------------------------------------------------------------------------------------------------

known("dropped_kv_gradient", "store", UNEVEN, "dK and dV of the prefix are dropped")


@fault("store", UNEVEN, "dK and dV of the prefix are added twice")
def doubled_kv_gradient() -> Iterator[None]:
    from terapipe_ds.attention.slice_store import SliceEntry

    add_grads = SliceEntry.add_grads

    def add_twice(self: Any, offset: int, dk: Any, dv: Any, *args: Any, **kwargs: Any) -> None:
        factor = 2 if offset + dk.shape[2] <= self.frontier else 1  # the slice in backward begins at the frontier
        add_grads(self, offset, dk * factor, dv * factor, *args, **kwargs)

    with mock.patch.object(SliceEntry, "add_grads", add_twice):
        yield


@fault("store", UNEVEN, "dK is added to dV and dV to dK")
def swapped_kv_gradients() -> Iterator[None]:
    from terapipe_ds.attention.slice_store import SliceEntry

    add_grads = SliceEntry.add_grads

    def add_swapped(self: Any, offset: int, dk: Any, dv: Any, *args: Any, **kwargs: Any) -> None:
        add_grads(self, offset, dv, dk, *args, **kwargs)

    with mock.patch.object(SliceEntry, "add_grads", add_swapped):
        yield


@fault("store", UNEVEN, "from the second batch on the first slice finds the keys and values of the batch before")
def stale_keys_and_values() -> Iterator[None]:
    from terapipe_ds.attention.slice_store import SliceStore

    write, assert_drained = SliceStore.write, SliceStore.assert_drained
    batches = []

    def write_once(self: Any, active: Any, layer: Any, k: Any, v: Any) -> Any:
        if batches and active.start == 0:
            entry = self._lookup(active, layer, k)
            self._advance(entry, active)
            return entry
        return write(self, active, layer, k, v)

    def count(self: Any) -> None:
        batches.append(1)
        assert_drained(self)

    with mock.patch.object(SliceStore, "write", write_once), mock.patch.object(SliceStore, "assert_drained", count):
        yield


@fault("store", ALL_FORWARD_FIRST, "micro-batches share one store")
def one_store_for_all_micro_batches() -> Iterator[None]:
    from terapipe_ds.attention.slice_store import SliceStore

    write = SliceStore.write

    def write_shared(self: Any, active: Any, *rest: Any) -> Any:
        return write(self, active.replace(micro_batch_id=0), *rest)

    with mock.patch.object(SliceStore, "write", write_shared):
        yield


@fault("store", UNEVEN, "a micro-batch is never released")
def never_released() -> Iterator[None]:
    from terapipe_ds.attention.slice_store import SliceStore

    with mock.patch.object(SliceStore, "release"):
        yield


# -- the loss --------------------------------------------------------------------------------------------------------

known("unweighted_losses", "loss", UNEVEN, "slices weigh the same")


@fault("loss", UNEVEN, "slices weigh by tokens where they should by valid labels")
def weights_of_tokens() -> Iterator[None]:
    from terapipe_ds.runtime.engine import incoming_batch

    slice_weights = incoming_batch.slice_weights

    def by_tokens(*args: Any, **kwargs: Any) -> Any:
        return slice_weights(*args, **{**kwargs, "loss_reduction": "mean"})

    with mock.patch.object(incoming_batch, "slice_weights", by_tokens):
        yield


@fault("loss", EQUAL, "the loss is divided by the number of slices, as if they were micro-batches")
def slices_counted_as_micro_batches() -> Iterator[None]:
    from terapipe_ds.runtime.engine import incoming_batch

    slice_weights = incoming_batch.slice_weights

    def divided(*args: Any, **kwargs: Any) -> Any:
        weights = slice_weights(*args, **kwargs)
        return tuple(weight / len(weights) for weight in weights)

    with mock.patch.object(incoming_batch, "slice_weights", divided):
        yield


@fault("loss", replace(UNEVEN, data_seed=3), "a slice without a label is 0 * NaN")
def empty_slices_not_left_out() -> Iterator[None]:
    from terapipe_ds.runtime.engine import batch_results

    def weighted_loss(outputs: Any, labels: Any, weight: float, loss_fn: Any) -> Any:
        return loss_fn(outputs, labels) * weight

    with mock.patch.object(batch_results, "weighted_loss", weighted_loss):
        yield


@fault("loss", EQUAL, "the evaluation loss is that of the last slice")
def evaluation_of_the_last_slice() -> Iterator[None]:
    from terapipe_ds.runtime.engine import batch_results

    with mock.patch.object(batch_results, "sum_of_slices", lambda losses: losses[-1]):
        yield


@fault("loss", EQUAL, "labels are cut one token early")
def labels_one_token_early() -> Iterator[None]:
    from terapipe_ds.runtime.batch.sliceable import SliceableTensors

    part = SliceableTensors.part

    def early(self: Any, start: int, stop: int) -> Any:
        shift = min(start, 1)
        return part(self, start - shift, stop - shift)

    with mock.patch.object(SliceableTensors, "part", early):
        yield


# -- the engine ------------------------------------------------------------------------------------------------------


@fault("engine", EQUAL, "the first stage takes the tokens of a slice from one token too far left")
def span_off_by_one() -> Iterator[None]:
    with _first_stage_reads(lambda active: (active.start - min(active.start, 1), active.stop - min(active.start, 1))):
        yield


@fault("engine", EQUAL, "the first stage takes the first slice for the last, and the other way round")
def swapped_slices() -> Iterator[None]:
    def mirrored(active: Any) -> tuple[int, int]:
        return active.sequence_length - active.stop, active.sequence_length - active.start

    with _first_stage_reads(mirrored):
        yield


@contextlib.contextmanager
def _first_stage_reads(span: Callable[[Any], tuple[int, int]]) -> Iterator[None]:
    from terapipe_ds.runtime.engine.part_runner import PartRunner

    slice_inputs = PartRunner._slice_inputs

    def read(self: Any, action: Any, active: Any) -> Any:
        start, stop = span(active)
        return slice_inputs(self, action, active.replace(start=start, stop=stop))

    with mock.patch.object(PartRunner, "_slice_inputs", read):
        yield


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


@fault("engine", CHECKPOINTED, "layers are recomputed as if they ran the first slice")
def recomputed_with_the_first_slice() -> Iterator[None]:
    from terapipe_ds.runtime.engine.part_runner import PartRunner

    active_of = PartRunner._active

    def first(self: Any, action: Any, mode: str) -> Any:
        active = active_of(self, action, mode)
        return active.replace(start=0, stop=active.num_tokens) if mode == "recompute" else active

    with mock.patch.object(PartRunner, "_active", first):
        yield


@fault("engine", CHECKPOINTED, "layers are recomputed without a slice", stopped_by="mat1 and mat2 shapes")
def recomputed_without_a_slice() -> Iterator[None]:
    from terapipe_ds.runtime.engine import part_runner

    push_slice = part_runner.push_slice

    def push(active: Any) -> Any:
        return contextlib.nullcontext() if active.mode == "recompute" else push_slice(active)

    with mock.patch.object(part_runner, "push_slice", push):
        yield


@fault("engine", UNEVEN, "tied gradients are not summed")
def tied_gradients_not_reduced() -> Iterator[None]:
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    with mock.patch.object(TeraPipeEngine, "_exec_reduce_tied_grads", lambda self: None):
        yield


@fault("engine", UNEVEN, "tied gradients are summed twice")
def tied_gradients_reduced_twice() -> Iterator[None]:
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    reduce = TeraPipeEngine._exec_reduce_tied_grads

    def twice(self: Any) -> None:
        reduce(self)
        reduce(self)

    with mock.patch.object(TeraPipeEngine, "_exec_reduce_tied_grads", twice):
        yield


@fault("engine", REPLICAS, "gradients are not averaged over replicas")
def gradients_not_reduced() -> Iterator[None]:
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    with mock.patch.object(TeraPipeEngine, "_exec_reduce_grads", lambda self: None):
        yield


@fault("engine", replace(EQUAL, hook=True), "the module's hook before_reduce is not called")
def hook_not_called() -> Iterator[None]:
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine
    from terapipe_ds.schedule import Kind

    without = {Kind.REDUCE_TIED_GRADS: lambda self, action: self._exec_reduce_tied_grads()}
    with mock.patch.object(TeraPipeEngine, "_ACTIONS", {**TeraPipeEngine._ACTIONS, **without}):
        yield


@fault("engine", EQUAL, "a weight's gradient is that of the slice whose backward ran last")
def weight_gradients_overwritten() -> Iterator[None]:
    from terapipe_ds.runtime.layers import weight_gradients

    def overwrite(weight: Any, rows: Any, inputs: Any) -> Any:
        weight.grad = None
        return rows.t() @ inputs

    with mock.patch.object(weight_gradients, "_add_product", overwrite):
        yield


@fault("engine", EQUAL, "a weight's gradient counts twice from the second slice on")
def weight_gradients_added_twice() -> Iterator[None]:
    from terapipe_ds.runtime.layers import weight_gradients

    add_product = weight_gradients._add_product

    def add_twice(weight: Any, rows: Any, inputs: Any) -> Any:
        add_product(weight, rows, inputs)
        return rows.t() @ inputs

    with mock.patch.object(weight_gradients, "_add_product", add_twice):
        yield


@fault("engine", replace(EQUAL, clipping=True), "the clip norm leaves out later stages, as DeepSpeed's own does")
def norm_of_the_first_stage() -> Iterator[None]:
    from terapipe_ds.runtime.engine import build

    with mock.patch.object(build, "count_every_stage_in_norm"):
        yield


# -- schedule and lowering -------------------------------------------------------------------------------------------

known("backward_in_forward_order", "schedule", UNEVEN, "backwards begin with the first slice; validate() is skipped")
known("backward_in_forward_order_unnoticed", "schedule", UNEVEN, "the same, and the store does not check")


@contextlib.contextmanager
def _orders(change: Callable[[tuple[Any, ...]], tuple[Any, ...]], validated: bool) -> Iterator[None]:
    """Every stage's order changed after it was built."""
    from terapipe_ds.runtime.planning import batch_plans

    build = batch_plans.build

    def build_wrong(*args: Any, **kwargs: Any) -> Any:
        schedule = build(*args, **kwargs)
        return replace(schedule, orders=tuple(change(order) for order in schedule.orders))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(batch_plans, "build", build_wrong))
        if not validated:
            stack.enter_context(mock.patch.object(batch_plans, "validate"))
        yield


def _first_two_swapped(order: tuple[Any, ...]) -> tuple[Any, ...]:
    return (order[1], order[0], *order[2:])


def _without_the_last(order: tuple[Any, ...]) -> tuple[Any, ...]:
    return order[:-1]


@fault("schedule", ALL_FORWARD_FIRST, "the second slice runs before the first")
def forwards_swapped() -> Iterator[None]:
    with _orders(_first_two_swapped, validated=True):
        yield


@fault("schedule", ALL_FORWARD_FIRST, "the second slice runs before the first; validate() is skipped")
def forwards_swapped_unproven() -> Iterator[None]:
    with _orders(_first_two_swapped, validated=False):
        yield


@fault("schedule", EQUAL, "the last backward is missing; validate() is skipped")
def last_backward_missing() -> Iterator[None]:
    with _orders(_without_the_last, validated=False):
        yield


@contextlib.contextmanager
def _lowered_without(kinds: set[str]) -> Iterator[None]:
    module = importlib.import_module("terapipe_ds.schedule.lower")
    lower_stage = module._lower_stage

    def without(*args: Any) -> Iterator[Any]:
        return (action for action in lower_stage(*args) if action.kind.name not in kinds)

    with mock.patch.object(module, "_lower_stage", without):
        yield


@fault("schedule", EQUAL, "lowering forgets to send gradients")
def gradients_never_sent() -> Iterator[None]:
    with _lowered_without({"SEND_GRAD"}):
        yield


@fault("schedule", EQUAL, "lowering forgets the reduction of gradients")
def reduction_forgotten() -> Iterator[None]:
    with _lowered_without({"REDUCE_GRADS", "REDUCE_TIED_GRADS"}):
        yield


known("dropped_weight", "engine", SPLIT, "the W of one slice adds nothing")
known("weight_twice", "engine", SPLIT, "the W of one slice adds its gradients twice")
known("weight_before_backward", "schedule", SPLIT, "a W runs before its B; validate() is skipped")
known("weight_runs_twice", "schedule", SPLIT, "a W stands twice; validate() is skipped")
known("weight_never_runs", "schedule", SPLIT, "a W is missing; validate() is skipped")


# -- runtime ---------------------------------------------------------------------------------------------------------


@fault("runtime", EQUAL, "each message carries the tensors of the one before")
def messages_one_late() -> Iterator[None]:
    from terapipe_ds.runtime.links.channel import SendChannel

    send = SendChannel.send
    before: dict[int, Any] = {}

    def send_late(self: Any, tensors: Any, consumed_at: int) -> None:
        late = before.get(id(self), tensors)
        before[id(self)] = [t.detach().clone() for t in tensors]
        send(self, late, consumed_at)

    with mock.patch.object(SendChannel, "send", send_late):
        yield


@fault(
    "runtime",
    replace(EQUAL, mixed=True),
    "the shapes in the header are taken for those of the first batch",
    section={"stall_timeout_s": 5},
    stopped_by="split_with_sizes expects",
)
def stale_header() -> Iterator[None]:
    from terapipe_ds.runtime.batch import source

    agree = source.agree_on_batch
    first: list[Any] = []

    def agree_once(*args: Any) -> Any:
        first.append(agree(*args))
        return first[0]

    with mock.patch.object(source, "agree_on_batch", agree_once):
        yield


@fault(
    "runtime",
    EQUAL,
    "stages with different plans are not noticed by the header",
    section={"stall_timeout_s": 5},
    stopped_by="the active slice .* has 7 tokens",
)
def header_accepted_blindly() -> Iterator[None]:
    import torch.distributed as torch_dist

    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.runtime.batch import batch_agreement
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    train_batch = TeraPipeEngine.train_batch

    def train_otherwise(self: Any, *args: Any) -> Any:
        if torch_dist.get_rank() == 1:
            self.use_slice_plan(SlicePlan((7, 5)))
        return train_batch(self, *args)

    with (
        mock.patch.object(batch_agreement, "share", lambda *_: 0),
        mock.patch.object(TeraPipeEngine, "train_batch", train_otherwise),
    ):
        yield


@fault("runtime", EQUAL, "one stage has another plan", section={"stall_timeout_s": 5})
def plans_differ() -> Iterator[None]:
    import torch.distributed as torch_dist

    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    train_batch = TeraPipeEngine.train_batch

    def train_otherwise(self: Any, *args: Any) -> Any:
        if torch_dist.get_rank() == 1:
            self.use_slice_plan(SlicePlan((7, 5)))
        return train_batch(self, *args)

    with mock.patch.object(TeraPipeEngine, "train_batch", train_otherwise):
        yield


# -- layers: right on whole sequences, wrong on slices ---------------------------------------------------------------


@fault("layer", UNEVEN, "rotary positions count from 0 in every slice", in_layers=True)
def rotary_positions_not_offset() -> Iterator[None]:
    with mutations.missing_position_offset():
        yield


@fault("layer", LEARNED, "learned positions count from 0 in every slice", in_layers=True)
def learned_positions_not_offset() -> Iterator[None]:
    with mutations.missing_position_offset():
        yield


@fault("layer", UNEVEN, "attention by torch's own function, to the slice alone", in_layers=True)
def attention_not_sliced() -> Iterator[None]:
    from tests.distributed.engines import torch_attention

    with torch_attention():
        yield


@fault("layer", UNEVEN, "attention computed by hand, to the slice alone", in_layers=True)
def attention_by_hand() -> Iterator[None]:
    import torch

    from terapipe_ds.models import gpt

    def attention(q: Any, k: Any, v: Any, **_: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        return scores.softmax(-1) @ v

    with mock.patch.object(gpt, "sliced_attention", attention):
        yield


@fault("layer", UNEVEN, "a norm centres over the tokens", in_layers=True)
def norm_over_tokens() -> Iterator[None]:
    from terapipe_ds.models.gpt import FinalNorm

    forward = FinalNorm.forward

    def centred(self: Any, hidden: Any) -> Any:
        return forward(self, hidden - hidden.mean(dim=1, keepdim=True))

    with mock.patch.object(FinalNorm, "forward", centred):
        yield


@fault("layer", UNEVEN, "a convolution over tokens", in_layers=True)
def convolution_over_tokens() -> Iterator[None]:
    import torch.nn.functional as F

    from terapipe_ds.models.gpt import FeedForward

    forward = FeedForward.forward

    def mixed(self: Any, hidden: Any) -> Any:
        return forward(self, hidden + 0.5 * F.pad(hidden, (0, 0, 1, 0))[:, :-1])

    with mock.patch.object(FeedForward, "forward", mixed):
        yield


@fault("layer", EQUAL, "the loss shifts its labels itself", in_layers=True)
def loss_that_shifts() -> Iterator[None]:
    from tests.distributed import single_process

    loss = single_process._loss

    def shifting(logits: Any, labels: Any, reduction: str) -> Any:
        return loss(logits[:, :-1], labels[:, 1:], reduction)

    with mock.patch.object(single_process, "_loss", shifting):
        yield
