"""Move the tensors that live slices saved for their backward to the host, and back before it.

The order of a stage says when the backward of each slice comes. The saved tensors of a slice go to the host if its B is
far enough away, and come back `OFFLOAD_AHEAD` computations before it (`simulator.offload`):

    computation   F2        ...  ...  ...      B5        B3        B2
    tensors       saved, on their way out, away, on their way back, used

Copies run on a stream of their own, in this order. A tensor's memory is freed once its copy out is done: at the end of
the computation after F at the latest, so that one computation hides the copy. On a CPU the same code copies at once.

A copy contains the memory under a tensor, once for all tensors of a slice that share it. So views come back unchanged,
strides included, and the backward has the same bits. These tensors stay: parameters and buffers of the module, which
are not the slice's own; small tensors; views of a much larger memory; conjugates, whose bit is not in their memory; the
memory that a layer empties itself, to compute it again; and keys and values, which are in the slice store and never
saved by slices. A tensor that is changed in place after it was saved is an error, as in torch.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import text_of
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, Key
from terapipe_ds.schedule.action import Action
from terapipe_ds.simulator.offload import offloaded_until

_SMALLEST_BYTES = 1024  # below this size, a copy takes longer than the memory is worth
_FILE_BYTES = 1 << 30  # a sparse file: the disk holds the written part
_MOST_BESIDES = 4.0  # times of a view's bytes; a larger memory has more in it than this slice's


class SavedTensorChangedError(RuntimeError):
    """Say that a layer has changed in place a tensor that autograd had saved for the backward."""


class HostBuffers:
    """Lend flat buffers of bytes: pinned memory beside an accelerator, a file beside a CPU.

    For a CPU a file is the memory outside its own, so that tests measure how much would leave a device. Buffers go back
    to a pool by their size, which is a power of two: torch rounds pinned memory up to these, and they serve several
    lengths.

    Pinning takes long, and may wait for the whole device, even for receives that wait for this rank. So it happens
    between batches: a batch that needs more buffers than before gets ordinary memory, where copies wait for their
    stream, and the next one begins with pinned memory in its place.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.live_bytes = self.peak_bytes = self.reserved_bytes = 0
        self._is_pinned = is_pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._mapped = np.empty(0, np.uint8)  # what no buffer has of the newest file
        self._ordinary: set[int] = set()  # ids of the pool's buffers that wait to be replaced by pinned ones

    def begin_batch(self) -> None:
        """Pin what the batch before lacked."""
        for num_bytes, free in self._free.items() if self._ordinary else ():
            free[:] = [self._new(num_bytes, is_pinned=True) if id(each) in self._ordinary else each for each in free]
        self._ordinary.clear()

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of `num_bytes` bytes or more."""
        num_bytes = 1 << (num_bytes - 1).bit_length()
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if free := self._free[num_bytes]:
            return free.pop()
        self.reserved_bytes += num_bytes
        buffer = self._new(num_bytes)
        if self._is_pinned:
            self._ordinary.add(id(buffer))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that `take` lent."""
        self.live_bytes -= buffer.numel()
        self._free[buffer.numel()].append(buffer)

    def _new(self, num_bytes: int, is_pinned: bool = False) -> Tensor:
        if self._is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
        # a mapping keeps a descriptor, and a long batch has more buffers than a process may open files
        if self._mapped.nbytes < num_bytes:
            with tempfile.TemporaryFile(prefix="terapipe-offload-") as file:  # it lives as long as its mapping
                self._mapped = np.memmap(file, np.uint8, "w+", shape=(max(num_bytes, _FILE_BYTES),))
        buffer, self._mapped = self._mapped[:num_bytes], self._mapped[num_bytes:]
        return torch.from_numpy(buffer)


class Offloaded:
    """Hold the memory of saved tensors of one slice, on the device, on the host, or on its way."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, lane: Lane) -> None:
        self.lane, self._device, self._size = lane, device, storage.nbytes()
        self._on_device: torch.UntypedStorage | None = storage
        self._buffer: Tensor | None = lane.buffers.take(self._size)
        self._leaves: Any = None
        self._back: Any = None

    def begin_to_leave(self) -> None:
        """Begin the copy out. The memory has to have its final content by now."""
        if self._buffer is not None and self._on_device is not None and not self._is_discarded():
            flat = torch.empty(0, dtype=torch.uint8, device=self._device)
            flat.set_(self._on_device)  # type: ignore[call-overload]
            self._leaves = self.lane.copy(self._buffer[: self._size], flat)

    def leave(self) -> None:
        """Free the memory of the device: work that is issued from now on begins when the copy is done."""
        # the device waits, not the host: the memory goes to the next work in its own stream, even if it is freed later
        if self._leaves is not None:
            torch.cuda.current_stream().wait_event(self._leaves)
        # a backward that came early has given the buffer back, and the memory stays
        if self._is_discarded():
            self._give_buffer()
        elif self._buffer is not None:
            self._on_device = None

    def come_back(self) -> None:
        """Begin to bring the memory back, if it is away."""
        if self._on_device is None and self._buffer is not None:
            flat = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._back = self.lane.copy(flat, self._buffer[: self._size])
            self._on_device = flat.untyped_storage()
        self._give_buffer()

    def view(self, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return a saved tensor over this memory, for the work that is issued next."""
        self.come_back()
        assert self._on_device is not None
        if self._back is not None:
            torch.cuda.current_stream().wait_event(self._back)
        made = torch.empty(0, dtype=dtype, device=self._device)
        return made.set_(self._on_device, offset, size, stride)  # type: ignore[call-overload, no-any-return]

    def _is_discarded(self) -> bool:
        """Return whether a layer has emptied the memory, to fill it again in the backward (Megatron's recompute)."""
        return self._on_device is not None and self._on_device.nbytes() != self._size

    def _give_buffer(self) -> None:
        # the next copy into it runs on the same stream after the one out of it
        if self._buffer is not None:
            self.lane.buffers.give(self._buffer)
            self._buffer = None

    def __del__(self) -> None:
        self._give_buffer()


class Lane:
    """Run copies on their own stream; on a CPU there is none, and a copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = HostBuffers(is_pinned=self._stream is not None)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after all work that was issued to the device so far; return the event of its end."""
        with torch.no_grad():
            if self._stream is None:
                target.copy_(source)
                return None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                if target.is_cuda:  # it may be freed before anything has waited for the copy
                    target.record_stream(self._stream)
                return self._stream.record_event()


class ActivationOffload:
    """Offload the saved tensors of the slices of one stage, batch by batch."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._lane = module, Lane(device)
        self.buffers = self._lane.buffers  # of the host
        self.open_batch(None)

    def open_batch(self, batch: BatchInFlight | None) -> None:
        """Begin a batch; keep nothing of another one."""
        self._until: dict[Key, int] = {}
        self._due: dict[int, list[Key]] = {}
        self._step = -1  # of the order
        self._leaving: list[tuple[int, dict[tuple[int, int], tuple[Offloaded, Tensor]]]] = []
        self._away: dict[Key, list[weakref.ref[Offloaded]]] = {}
        self._fresh: list[Offloaded] = []  # of the node that autograd makes now
        self._node = -1  # its number
        self._fixed: frozenset[int] = frozenset()
        if batch is None or not batch.training:
            return
        self.buffers.begin_batch()
        # the order of the stage says when each slice is needed again, before anything runs
        order = batch.schedule.orders[batch.stage_id]
        for (part_id, unit), until in offloaded_until(order).items():
            self._until[part_id, *unit] = until
            self._due.setdefault(until, []).append((part_id, *unit))
        own = [*self._module.parameters(), *self._module.buffers()]
        self._fixed = frozenset(tensor.untyped_storage().data_ptr() for tensor in own)

    def begin(self, action: Action) -> None:
        """Free memory whose copy out had a whole computation to finish; begin to copy back the tensors needed next."""
        if not self._until:
            return
        self._step += 1
        self._node = -1  # the last one is complete as well
        self._begin_copies()
        # one whole computation has hidden the copies of the slice before
        while self._leaving and self._leaving[0][0] < self._step - 1:
            _, made = self._leaving.pop(0)
            for (_, version), (memory, tensor) in made.items():
                _check_version(tensor, version)
                memory.leave()
            made.clear()  # autograd keeps `pack` and all that it has made
        # early enough that this computation hides the copy back
        for key in self._due.get(self._step, ()):
            for reference in self._away.pop(key, ()):
                memory_back = reference()
                if memory_back is not None:
                    memory_back.come_back()

    def saving(self, key: Key) -> Any:
        """Return a context for the F of a slice, in which its saved tensors are copied to the host."""
        if key not in self._until:
            return _NOTHING
        made: dict[tuple[int, int], tuple[Offloaded, Tensor]] = {}
        self._leaving.append((self._step, made))
        away = self._away.setdefault(key, [])

        pack = functools.partial(self._pack, made, away)
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack())

    # a compiled function within a layer saves tensors too: torch's compiler would look into what runs under it
    @torch.compiler.disable(recursive=True)
    def _pack(
        self, made: dict[tuple[int, int], tuple[Offloaded, Tensor]], away: list[weakref.ref[Offloaded]], tensor: Tensor
    ) -> Callable[[], Tensor]:
        """Return a function that returns `tensor` in the backward; autograd calls this for each tensor to save."""
        self._begin_copies()
        if not self._goes(tensor):
            return functools.partial(_unchanged, tensor, tensor._version)
        storage = tensor.untyped_storage()
        # views of one memory are copied once; an address may be another memory's, if a layer has emptied this one
        of = storage._cdata, tensor._version
        if of not in made:
            made[of] = Offloaded(storage, tensor.device, self._lane), tensor.detach()
            away.append(weakref.ref(made[of][0]))
            self._fresh.append(made[of][0])
        offset, size, stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return functools.partial(made[of][0].view, tensor.dtype, offset, size, stride)

    def _begin_copies(self) -> None:
        """Copy the tensors of nodes that are complete.

        Autograd saves an operator's arguments before it runs, and it may write to one (rrelu writes the noise that it
        draws), so that copies begin with the next node.
        """
        node = torch._C._autograd._get_sequence_nr()
        if node != self._node:
            self._node = node
            for memory in self._fresh:
                memory.begin_to_leave()
            self._fresh.clear()

    def _goes(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return False
        is_lazy = tensor.is_conj() or tensor.is_neg()  # this bit is not in its memory
        if is_lazy or tensor.nbytes < _SMALLEST_BYTES:
            return False
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a tensor within jvp or vmap has no memory of its own
            return False
        return address not in self._fixed and storage.nbytes() <= _MOST_BESIDES * tensor.nbytes


def explain_refusal(error: RuntimeError) -> None:
    """Raise TeraPipeConfigError if a layer has failed with `error` because its saved tensors go to the host."""
    if "support saved tensor hooks" in text_of(error):
        raise TeraPipeConfigError(
            "terapipe.offload_activations = true: a layer calls torch.func.grad or one of its kind, which allow nobody "
            "to move the tensors that autograd saves. Set it to false, or call torch.autograd.grad there"
        ) from error


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor that was not moved, if it still has the version in which it was saved."""
    _check_version(tensor, version)
    return tensor


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise SavedTensorChangedError(
            f"a tensor {list(tensor.shape)} that autograd saved for the backward of a slice was changed in place "
            f"afterwards (version {tensor._version}, saved at {version}): let the layer work on a copy of it"
        )


_NOTHING = nullcontext()
