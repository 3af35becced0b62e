"""Run one slice of a part as in training, and time it. Its prefix never ran: only the prefix length counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch.utils._pytree import tree_leaves, tree_map

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.plan import JOINED_ROWS
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, Tensors, as_tuple
from terapipe_ds.runtime.batch.handed_inputs import HandedInputs
from terapipe_ds.runtime.batch.in_flight import Key
from terapipe_ds.runtime.batch.loss_weights import weighted_loss
from terapipe_ds.runtime.layers.activation_checkpointing import (
    checkpointing_with_gradients,
    keeps_attention,
    kept_calls,
)
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.links.specs import MessageSpec, TensorSpec
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

_HALF = 0.5  # any weight that is not 1: the weights of slices are not


@dataclass
class LiveSlice:
    """Hold a slice between its F and its B."""

    active: ActiveSlice
    outputs: Any
    loss: Any


class SliceBytes(NamedTuple):
    """Hold the bytes that a slice keeps from its F to its B, and the extra bytes at the peak of either."""

    kept: int
    working: int


class LayerKept(NamedTuple):
    """Hold a layer's bytes of a slice: those kept from F to B, its keys and values, and its outputs."""

    kept: int
    stored: int  # for all tokens of the sequence
    sent: int
    windows: tuple[int | None, ...] = ()  # of the layers of its attention
    attention: int = 0  # results of attention, where layers may keep them


Handed = list[tuple[torch.Tensor, torch.Tensor]]  # tensors, and the leaves that a layer takes in their places


class LayerByLayer:
    """Run layers once, each with its own graph: call it like a part, then run one backward after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]], now_s: Callable[[], float] = time.perf_counter):
        self._functions, self._now_s = tuple(functions), now_s
        self._forward_s: list[float] = []
        self._handed: list[Handed] = [[]]  # to the first layer, between the layers, and out of the last one
        self.ended_s = 0.0  # by the clock: when the last layer's outputs were handed over

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of the last layer, without the graph behind them.

        Raise TypeError if a layer hands on anything but tensors in containers that torch knows.
        """
        values = _apart(inputs, self._handed[0])
        for function in self._functions:
            begin_s = self._now_s()
            outputs = function(values)
            self._forward_s.append(self._now_s() - begin_s)
            self._handed.append([])
            values = _apart(outputs, self._handed[-1])
        self.ended_s = self._now_s()
        return values

    def backward(
        self, around: Callable[[], AbstractContextManager[Any]] = nullcontext, after: Callable[[], float] = lambda: 0.0
    ) -> list[tuple[float, float, float]]:
        """Return the seconds of forward and backward by layer, after the backward of the value made of the outputs.

        Each backward runs in `around()`. Before the next one `after()` is called, whose seconds come with them.
        """
        seconds = []
        for forward_s in reversed(self._forward_s):
            # the leaf's gradient is the gradient of the tensor that the layer before made
            pairs = [(tensor, leaf.grad) for tensor, leaf in self._handed.pop() if tensor.requires_grad]
            pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
            with around():
                begin_s = self._now_s()
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                backward_s = self._now_s() - begin_s
            seconds.append((forward_s, backward_s, after()))
        return seconds[::-1]


@dataclass
class _KeptSeconds:
    """Time the attention of layers whose second run takes its results from the first one, and count these results."""

    now_s: Callable[[], float]
    by_layer: list[float] = field(default_factory=list)
    bytes_by_layer: list[int] = field(default_factory=list)

    def of(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a layer whose attention is added up from its start on."""

        def run(inputs: Any) -> Any:
            self.by_layer.append(0.0)
            self.bytes_by_layer.append(0)
            return function(inputs)

        return run

    def attend(self, layer: Hashable, dropout_p: float, call: Callable[[], Any], device: torch.device) -> Any:
        """Run the kernels of one call, as sliced attention asks (`ActiveSlice.kept`)."""
        begin_s = self.now_s()
        results = call()
        self.by_layer[-1] += self.now_s() - begin_s
        self.bytes_by_layer[-1] += sum(result.nbytes for result in results[:2])
        return results


@dataclass
class SliceTimer:
    """Time slices of `sequence_length` tokens on the layers of one part. Use it inside `untouched(module)`."""

    module: PipelineModule  # runs the part: inputs, a tensor or a tuple, to outputs, or losses without `loss_fn`
    sequence_length: int
    device: torch.device
    store: SliceStore
    part_id: int = 0
    inputs: SliceableTensors | None = None  # of one micro-batch, on the first part; `receive` sets those of others
    labels: SliceableTensors | None = None  # of one micro-batch, on the last part
    is_last: bool = False
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the engine runs the layers
    weights: WeightGradients = field(default_factory=WeightGradients)
    clock: Callable[[], float] | None = None  # in place of the wall clock: processor time if stages share a core
    sequence: SequenceRanks = field(default_factory=SequenceRanks)  # each runs its share of a slice at the same time
    can_split: bool = True  # backwards can leave weight gradients to W; compiled layers cannot
    rows: int = 1  # of a micro-batch
    handed: HandedInputs = field(default_factory=lambda: HandedInputs(may_hand=True))  # as the engine hands inputs
    of_hidden: LossOfHidden | None = None  # in place of `loss_fn`, if the last layer hands hidden states on
    _received: dict[int, tuple[MessageSpec, Tensors]] = field(default_factory=dict)
    _gradients: dict[int, Tensors] = field(default_factory=dict)

    def now_s(self) -> float:
        """Return the time once the device has done its issued work, or the time of `clock`, if there is one."""
        if self.clock is not None:
            return self.clock()
        get_accelerator().synchronize()
        return time.perf_counter()

    def receive(self, tokens: int, spec: MessageSpec) -> None:
        """Take `spec` as the message of the part before for slices of `tokens` tokens; the values are made up."""
        self._received[tokens] = spec, tuple(_made_up(t, self.device) for t in spec.tensors)

    @property
    def joined_tokens(self) -> float:
        """Return the tokens that slices join for one product per weight (`plan.weight_groups`)."""
        return JOINED_ROWS * self.sequence.size / self.rows

    @property
    def checkpoints(self) -> bool:
        """Return whether layers run a second time in B."""
        return getattr(self.module, "activation_checkpoint_interval", 0) > 0

    @property
    def joins_unsplit(self) -> bool:
        """Return whether slices whose backward is not split join their products, too."""
        return self.can_split and self.weights.joins_unsplit(self.checkpoints)

    @contextmanager
    def leaving_weights(self) -> Iterator[None]:
        """Let backwards leave weight gradients to W, which is timed apart; without `can_split` they compute these."""
        self.weights.open_batch([self._key] if self.can_split else ())
        try:
            yield
        finally:
            self.weights.open_batch()

    def forward(self, tokens: int, prefix: int) -> tuple[float, LiveSlice]:
        """Return the seconds of F of the slice of `tokens` tokens after `prefix` tokens, and the state for its B."""
        begin_s = self.now_s()
        live = self._forward(self._active(tokens, prefix))
        return self.now_s() - begin_s, live

    def backward(self, live: LiveSlice) -> tuple[float, float]:
        """Return the seconds of B, and of the W that it has left."""
        begin_s = self.now_s()
        self.issue_backward(live, keeps_weights=True)
        return self.now_s() - begin_s, self._weight()

    def _weight(self) -> float:
        """Return the seconds of W of the slice whose B was the last."""
        begin_s = self.now_s()
        self.weights.compute(self._key, nullcontext)
        return self.now_s() - begin_s

    def layer_seconds(self, tokens: int, prefix: int = 0) -> list[tuple[float, float, float, float]]:
        """Return the seconds of F, of B with W, of W alone and of attention that may be kept, of every layer.

        Each layer runs with inputs that have no graph. The loss counts with the last layer. With activation
        checkpointing a layer's B includes its F, but not the F of the loss, nor attention that is kept.
        """
        active = self._active(tokens, prefix)
        kernels = _KeptSeconds(self.now_s)
        # each layer has a graph of its own, so that its backward can be timed alone
        layers = LayerByLayer([kernels.of(function) for function in self.module.forward_funcs], self.now_s)
        with self.leaving_weights():
            live = self._forward(self._watched(active, kernels), layers)
            begin_s = self.now_s()
            self.issue_backward(live)
            loss = (begin_s - layers.ended_s, self.now_s() - begin_s) if self.is_last else (0.0, 0.0)
            with push_slice(active):
                seconds = layers.backward(lambda: self.weights.deferred(self._key), self._weight)
        # DeepSpeed runs a checkpointed layer again inside its backward
        both = zip(seconds, kernels.by_layer, strict=True)
        found = [(f, b + w + (f - kept_s if self.checkpoints else 0.0), w, kept_s) for (f, b, w), kept_s in both]
        return [*found[:-1], (found[-1][0] + loss[0], found[-1][1] + loss[1], *found[-1][2:])] if found else []

    def _watched(self, active: ActiveSlice, kernels: _KeptSeconds) -> ActiveSlice:
        """Return the slice, whose attention runs in `kernels` where layers keep it, or will once they recompute."""
        if kept_calls(self.module) is None:
            return active
        return active.replace(kept=kernels.attend, keeps_attention=True)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def weight_bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes that a slice keeps from its B to its W, and the bytes of its largest product's factors."""
        with self.leaving_weights():
            self.issue_backward(self._forward(self._active(tokens, 0)), keeps_weights=True)
            kept = self.weights.kept_bytes(self._key), self.weights.factor_bytes(self._key)
            self._weight()
        return kept

    def slice_bytes(self, tokens: int, prefix: int) -> SliceBytes:
        """Return the bytes of the slice of `tokens` tokens after `prefix` tokens; needs `MemoryPeak.is_available`.

        Keys, values and messages do not count, but the input that stays until B does.
        """
        self.backward(self.forward(tokens, prefix)[1])  # now the store has its buffers
        # the slice keeps the bytes that are left after F
        with MemoryPeak() as forward:
            _, live = self.forward(tokens, prefix)
        sums = self.weights.sums
        before = 0 if sums is None else sums.taken_bytes
        with MemoryPeak() as backward:
            self.backward(live)
        waiting = 0 if sums is None else sums.taken_bytes - before
        kept = max(0, forward.left_bytes)
        working = max(0, forward.grown_bytes - kept, backward.grown_bytes + waiting)
        return SliceBytes(kept + self.received_bytes(tokens), working)

    def received_bytes(self, tokens: int) -> int:
        """Return the bytes of the message that the part before sends for such a slice; 0 on the first part."""
        return sum(t.num_bytes for t in self._received[tokens][0].tensors) if tokens in self._received else 0

    def layer_bytes(self, tokens: int, with_memory: bool) -> list[LayerKept]:
        """Return the bytes that each layer keeps of a slice of `tokens` tokens.

        `with_memory` needs `MemoryPeak.is_available`. This empties the store, so that the keys and values that a layer
        adds are its own.
        """
        self.store.reset()
        found: list[LayerKept] = []
        kernels = _KeptSeconds(lambda: 0.0)

        def watched(function: Callable[[Any], Any], inputs: Any) -> Any:
            before = len(self.store.layers_of(self.part_id, 0))
            with MemoryPeak() if with_memory else nullcontext() as peak:
                outputs = function(inputs)
            stored = self.store.layers_of(self.part_id, 0)[before:]
            sent = sum(t.nbytes for t in tree_leaves(outputs) if torch.is_tensor(t))
            kept, keys_values = 0 if peak is None else max(0, peak.left_bytes), sum(one.keys_values for one in stored)
            found.append(LayerKept(kept, keys_values, sent, tuple(one.window for one in stored)))
            return outputs

        layers = LayerByLayer([kernels.of(partial(watched, function)) for function in self.module.forward_funcs])
        active = self._active(tokens, 0)
        self.issue_backward(self._forward(self._watched(active, kernels), layers))
        with push_slice(active):
            layers.backward()
        return [one._replace(attention=num) for one, num in zip(found, kernels.bytes_by_layer, strict=True)]

    # -- runs --------------------------------------------------------------------------------------------------------

    def issue_backward(self, live: LiveSlice, keeps_weights: bool = False) -> None:
        """Run the engine's B and W, without its bookkeeping and a clock; `keeps_weights` leaves W to the caller."""
        with push_slice(live.active), self.weights.deferred(self._key):
            if live.loss is not None:
                live.loss.backward()
            else:
                tensors = [t for t in self._outputs(live) if t.requires_grad]
                if tensors:
                    torch.autograd.backward(tensors, list(self._gradients[self._tokens(live.active)]))
        live.outputs = live.loss = None
        if not keeps_weights:
            self.weights.compute(self._key, nullcontext)

    def output_spec(self, tokens: int) -> MessageSpec:
        """Return the spec of this part's message for a slice of `tokens` tokens. Run the slice once, which warms it."""
        _, live = self.forward(tokens, self.sequence_length - tokens)
        tensors = self._outputs(live)
        spec = MessageSpec(tuple(TensorSpec.of(t) for t in tensors), is_tuple=not torch.is_tensor(live.outputs))
        self._gradients[tokens] = tuple(torch.randn_like(t) * 1e-3 for t in tensors if t.requires_grad)
        self.issue_backward(live)
        return spec

    @property
    def _key(self) -> Key:
        return self.part_id, 0, 0  # of every slice that runs here

    def _active(self, tokens: int, prefix: int) -> ActiveSlice:
        span, length = (prefix, prefix + tokens), self.sequence_length
        # a probe writes keys and values like any slice, but no code relies on them
        whole = ActiveSlice(*span, sequence_length=length, part_id=self.part_id, mode="probe", store=self.store)
        keeps = keeps_attention(self.module)
        return self.sequence.part_of(whole.replace(wants_logits=self.of_hidden is None, keeps_attention=keeps))

    def _tokens(self, active: ActiveSlice) -> int:
        """Return the number of tokens of a slice; each sequence rank has a share of them."""
        return active.num_tokens * self.sequence.size

    def _outputs(self, live: LiveSlice) -> Tensors:
        return () if self.is_last else as_tuple(live.outputs, "the outputs of a stage")

    def _forward(self, active: ActiveSlice, layers: Callable[[Any], Any] | None = None) -> LiveSlice:
        """Run the engine's F, without its bookkeeping, on the module or on `layers` in its place."""
        leaves, is_tuple = self._leaves(active)
        inputs = self.handed.leaves_or_copies(leaves, active.start == 0)
        with push_slice(active), checkpointing_with_gradients(self.module):
            with self.autocast():
                outputs = (layers or self.module)(inputs if is_tuple else inputs[0])
            self.handed.look(leaves, inputs, active.start == 0)
            if not self.is_last:
                return LiveSlice(active, outputs, None)
            labels = None if self.labels is None else self.labels.part(active.start, active.stop)
            if self.of_hidden is not None:
                return LiveSlice(active, None, self.of_hidden(outputs, labels, _HALF))
            return LiveSlice(active, None, weighted_loss(outputs, labels, _HALF, self.module.loss_fn))

    def _leaves(self, active: ActiveSlice) -> tuple[Tensors, bool]:
        if self.inputs is not None:
            return self.inputs.span(active.start, active.stop), self.inputs.is_tuple
        spec, tensors = self._received[self._tokens(active)]
        both = zip(tensors, spec.tensors, strict=True)
        return tuple(tensor.detach().requires_grad_(s.requires_grad) for tensor, s in both), spec.is_tuple


def _apart(value: Any, handed: Handed) -> Any:
    """Return `value` with copies of leaves in place of its tensors: a layer may write its inputs in place."""

    def copy_of(item: Any) -> Any:
        if torch.is_tensor(item):
            leaf = item.detach().requires_grad_(item.requires_grad)
            handed.append((item, leaf))
            return leaf.clone()
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise TypeError(f"a layer hands on a {type(item).__name__}, which may hold tensors unseen")

    return tree_map(copy_of, value)


def _made_up(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return ordinary numbers, so that no arithmetic on them is slower or faster than on real ones."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.randn(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
