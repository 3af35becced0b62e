"""One slice of a stage, run and timed as training runs it.

The prefix of a probed slice never ran: its keys and values are made up, because only their number costs time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.runtime.batch import SliceableTensors, Tensors, as_tuple
from terapipe_ds.runtime.buffers import Key
from terapipe_ds.runtime.checkpointing import checkpointing_with_gradients
from terapipe_ds.runtime.layer_times import LayerByLayer
from terapipe_ds.runtime.link import MessageSpec, TensorSpec
from terapipe_ds.runtime.loss import weighted_loss
from terapipe_ds.runtime.tensor_peak import AcceleratorPeak, TensorPeak
from terapipe_ds.runtime.weight_gradients import WeightGradients

_HALF = 0.5  # any weight that is not 1: the weights of slices are not


@dataclass
class LiveProbe:
    """A probed slice between its F and its B."""

    active: ActiveSlice
    outputs: Any
    loss: Any


@dataclass(frozen=True)
class SliceBytes:
    """What a slice keeps from its F to its B, and what it needs beside that at the peak of either."""

    kept: int
    working: int


@dataclass
class StageProbe:
    """Times slices of ``sequence_length`` tokens on the layers of one stage. Use it inside ``untouched(module)``.

    Args:
        layers: what runs the stage: inputs, a tensor or a tuple, to outputs.
        inputs: of one micro-batch, on the first stage; None elsewhere, where :meth:`receive` says what comes.
        labels: of one micro-batch, on the last stage; None elsewhere.
        loss_fn: of the last stage, None where the model computes the loss itself.
        autocast: a context in which the engine runs the layers.
        weights: of the layers, where W is measured as well.
        clock: in the place of the wall's; processor time of this process where several of them share a core.
        own_s: what the engine itself takes of an F and a B (see ``own_time``): a processor does that besides, and a
            device runs meanwhile, unless it waits for the calls.
    """

    module: nn.Module
    layers: Callable[[Any], Any]
    sequence_length: int
    device: torch.device
    store: SliceStore
    part_id: int = 0
    inputs: SliceableTensors | None = None
    labels: SliceableTensors | None = None
    is_last: bool = False
    loss_fn: Callable[[Any, Any], Any] | None = None
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    weights: WeightGradients = field(default_factory=WeightGradients)
    clock: Callable[[], float] | None = None
    own_s: tuple[float, float] = (0.0, 0.0)
    _received: dict[int, tuple[MessageSpec, Tensors]] = field(default_factory=dict)
    _gradients: dict[int, Tensors] = field(default_factory=dict)

    def now_s(self) -> float:
        """Once the device has done what it was told; or what ``clock`` says, where there is one."""
        return _now_s() if self.clock is None else self.clock()

    def receive(self, tokens: int, spec: MessageSpec) -> None:
        """What the stage before hands on for slices of ``tokens`` tokens; the values are made up."""
        self._received[tokens] = spec, tuple(_made_up(t, self.device) for t in spec.tensors)

    def forward(self, tokens: int, prefix: int) -> tuple[float, LiveProbe]:
        """Seconds of F of the slice of ``tokens`` tokens after ``prefix`` tokens, and what its B needs."""
        begin_s = self.now_s()
        live = self.issue_forward(tokens, prefix)
        return self._seconds(begin_s, self.own_s[0]), live

    def backward(self, live: LiveProbe) -> float:
        """Seconds of B of a slice whose F has run."""
        begin_s = self.now_s()
        self.issue_backward(live)
        return self._seconds(begin_s, self.own_s[1])

    def _seconds(self, begin_s: float, own_s: float) -> float:
        """Since ``begin_s``, when F or B was called that has returned now, with what the engine does besides."""
        if self.clock is not None:
            return self.clock() - begin_s + own_s
        called_s = time.perf_counter() - begin_s
        return max(_now_s() - begin_s, called_s + own_s)

    def issue_forward(self, tokens: int, prefix: int) -> LiveProbe:
        """F without a clock; a device may still be at work afterwards."""
        active = self._active(tokens, prefix)
        return LiveProbe(active, *self._forward(active))

    def weight(self, tokens: int) -> float:
        """Seconds of W of a slice of ``tokens`` tokens, after its F and B."""
        with self._split_backward(tokens) as key:
            begin_s = self.now_s()
            self.weights.compute(key, nullcontext)
            return self.now_s() - begin_s

    def weight_bytes(self, tokens: int) -> int:
        """Bytes that such a slice keeps from its B to its W."""
        with self._split_backward(tokens) as key:
            kept = self.weights.kept_bytes(key)
            self.weights.compute(key, nullcontext)
            return kept

    @contextmanager
    def _split_backward(self, tokens: int) -> Iterator[Key]:
        """After F and a B that leaves weight gradients to W, as where the schedule splits backwards."""
        active = self._active(tokens, 0)
        key = active.part_id, active.micro_batch_id, active.slice_id
        self.weights.open_batch([key])
        try:
            live = LiveProbe(active, *self._forward(active))
            with self.weights.deferred(key):
                self.issue_backward(live)
            yield key
        finally:
            self.weights.open_batch(())

    def output_spec(self, tokens: int) -> MessageSpec:
        """What this stage hands on for a slice of ``tokens`` tokens. Runs it once, which warms it up as well."""
        active = self._active(tokens, self.sequence_length - tokens)
        outputs, loss = self._forward(active)
        tensors = () if self.is_last else as_tuple(outputs, "the outputs of a stage")
        spec = MessageSpec(tuple(TensorSpec.of(t) for t in tensors), is_tuple=not torch.is_tensor(outputs))
        self._gradients[tokens] = tuple(torch.randn_like(t) * 1e-3 for t in tensors if t.requires_grad)
        self.issue_backward(LiveProbe(active, outputs, loss))
        return spec

    def saved_bytes(self, tokens: int, prefix: int) -> int:
        """Bytes that a live slice keeps for its backward: neither parameters nor buffers, nor keys and values."""
        shared = {t.untyped_storage().data_ptr() for t in (*self.module.parameters(), *self.module.buffers())}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in shared:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        active = self._active(tokens, prefix)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs, loss = self._forward(active)
        kept = [] if self.is_last else list(as_tuple(outputs, "the outputs of a stage"))
        for tensor in kept:
            note(tensor)
        self.issue_backward(LiveProbe(active, outputs, loss))
        return sum(saved.values())

    def store_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values of the whole sequence on this stage, and of their gradients."""
        return self.store.bytes_of(self.part_id, 0)

    def tells_peaks(self) -> bool:
        """Whether :meth:`slice_bytes` can tell peaks on this rank now."""
        return _peak_recorder().is_available()

    def slice_bytes(self, tokens: int, prefix: int, with_peaks: bool | None = None) -> SliceBytes:
        """Of the slice of ``tokens`` tokens after ``prefix`` tokens, neither keys and values nor messages in it but the
        input that stays until B. Without peaks (None: where they cannot be told) working is 0, and the slice runs once
        instead of twice."""
        received, watch = self.received_bytes(tokens), _peak_recorder()
        if not (self.tells_peaks() if with_peaks is None else with_peaks):
            return SliceBytes(self.saved_bytes(tokens, prefix) + received, 0)
        self.backward(self.forward(tokens, prefix)[1])  # buffers of the store are taken
        with watch() as forward:
            _, live = self.forward(tokens, prefix)
        with watch() as backward:
            self.backward(live)
        kept = max(0, forward.left_bytes)
        return SliceBytes(kept + received, max(0, forward.grown_bytes - kept, backward.grown_bytes))

    def received_bytes(self, tokens: int) -> int:
        """Of the message that the stage before hands on for such a slice; 0 on the first stage."""
        return sum(t.num_bytes for t in self._received[tokens][0].tensors) if tokens in self._received else 0

    def _active(self, tokens: int, prefix: int) -> ActiveSlice:
        return ActiveSlice(
            start=prefix, stop=prefix + tokens, sequence_length=self.sequence_length, part_id=self.part_id,
            mode="probe", store=self.store,
        )  # fmt: skip

    def layer_seconds(self, tokens: int) -> list[tuple[float, float]]:
        """Seconds of F and B of every layer of a slice of ``tokens`` tokens without a prefix, each layer on its own:
        what it is given has no graph behind it. The loss counts with the last layer, its forward and its backward. With
        activation checkpointing a layer's B has its F in it, but not that of the loss."""
        active = self._active(tokens, 0)
        functions: Any = self.module.forward_funcs
        layers = LayerByLayer(functions, self.now_s)
        whole, self.layers = self.layers, layers
        try:
            live = LiveProbe(active, *self._forward(active))
        finally:
            self.layers = whole
        begin_s = self.now_s()
        self.issue_backward(live)
        loss = (begin_s - layers.ended_s, self.now_s() - begin_s) if self.is_last else (0.0, 0.0)
        with push_slice(active):
            seconds = layers.backward()
        again = getattr(self.module, "activation_checkpoint_interval", 0) > 0
        found = [(f, b + f if again else b) for f, b in seconds]
        return [*found[:-1], (found[-1][0] + loss[0], found[-1][1] + loss[1])] if found else []

    def _leaves(self, active: ActiveSlice) -> tuple[Tensors, bool]:
        if self.inputs is not None:
            return self.inputs.span(active.start, active.stop), self.inputs.is_tuple
        spec, tensors = self._received[active.num_tokens]
        leaves = tuple(
            t.detach().requires_grad_(s.requires_grad) for t, s in zip(tensors, spec.tensors, strict=True)
        )
        return leaves, spec.is_tuple

    def _forward(self, active: ActiveSlice) -> tuple[Any, Any]:
        """What the engine's F does, bookkeeping apart."""
        leaves, is_tuple = self._leaves(active)
        copies = tuple(leaf.clone() for leaf in leaves)
        with push_slice(active), checkpointing_with_gradients(self.module):
            if self.autocast is None:
                outputs = self.layers(copies if is_tuple else copies[0])
            else:
                with self.autocast():
                    outputs = self.layers(copies if is_tuple else copies[0])
            if not self.is_last:
                return outputs, None
            labels = None if self.labels is None else self.labels.part(active.start, active.stop)
            loss = weighted_loss(outputs, labels, _HALF, self.loss_fn)
            return None, loss if torch.is_tensor(loss) else sum(loss)

    def issue_backward(self, live: LiveProbe) -> None:
        """What the engine's B does, bookkeeping apart, without a clock."""
        with push_slice(live.active):
            if live.loss is not None:
                live.loss.backward()
            else:
                tensors = [t for t in as_tuple(live.outputs, "the outputs of a stage") if t.requires_grad]
                if tensors:
                    torch.autograd.backward(tensors, list(self._gradients[live.active.num_tokens]))
        live.outputs = live.loss = None


def _peak_recorder() -> type[AcceleratorPeak] | type[TensorPeak]:
    return AcceleratorPeak if not get_accelerator().is_synchronized_device() else TensorPeak


def _made_up(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Ordinary numbers, so that no arithmetic on them is slower or faster than on real ones."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.randn(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _now_s() -> float:
    synchronize()
    return time.perf_counter()


def processor_clock() -> Callable[[], float] | None:
    """The processor time of this process, with all its threads; None where a device computes beside the host."""
    return time.process_time if get_accelerator().is_synchronized_device() else None


def synchronize() -> None:
    """Wait for the device, where it runs behind the host."""
    if not get_accelerator().is_synchronized_device():
        get_accelerator().synchronize()
