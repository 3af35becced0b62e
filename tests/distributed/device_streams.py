"""Order the accesses of a step on CPU ranks as the streams of a device would, and find those that nothing orders.

A CPU runs each call when it is made, so that no order is ever wrong. A device has three kinds of streams: its
computations, the messages of each communicator of NCCL, and the copies of offloading. They share memory, and only
events order them. Within `ordered_streams` every operation, message and copy of this rank is recorded with the memory
that it reads and writes, and every wait with the streams that it joins, by vector clocks. An error is

- an access to memory that another stream writes, or a write to memory that another stream reads, without a wait between
- memory that is freed while another stream may still use it. The allocator hands it to the next computation, unless the
  stream was recorded on it.

Use it inside `nccl_emulator`, whose messages are those of a device.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terapipe_ds.runtime.layers.offload import Lane
from terapipe_ds.runtime.links.channel import Wire
from tests.distributed import nccl_emulator

COMPUTE, COPIES = "computations", "copies"
Clock = dict[str, int]
"""How much of each stream has run: the number of its calls."""

_NO_KERNELS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
               "aten::set_", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}  # fmt: skip


@dataclass
class _Memory:
    """Hold the last write to a memory and the reads since, by stream; `is_held`: the allocator waits for streams."""

    alive: StorageWeakRef
    written: tuple[str, int, str] | None = None  # stream, number of the call, name
    read: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    is_held: bool = False

    def uses(self) -> list[tuple[str, int, str]]:
        return [*([self.written] if self.written else []), *self.read.values()]


class Streams(TorchDispatchMode):
    """Record the calls of one rank, the operations in the stream that is current."""

    def __init__(self) -> None:
        super().__init__()
        self.current = COMPUTE
        self.races: dict[str, None] = {}  # an ordered set
        self.num_calls: Clock = {}
        self._clocks: dict[str, Clock] = {}
        self._memories: dict[int, _Memory] = {}
        self._shared: dict[int, _Memory] = {}  # memories that a stream beside the computations has used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema, name = func._schema, func.name().split(".")[0]
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view or name in _NO_KERNELS or name.startswith("c10d::"):
            return result
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs]
        written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        self.call(self.current, name, [args, kwargs], [written, result])
        return result

    # -- what streams do ---------------------------------------------------------------------------------------------

    def call(self, stream: str, name: str, read: Any, written: Any) -> None:
        """Run a kernel in a stream."""
        self._look_for_freed()
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = self.num_calls[stream] = self.num_calls.get(stream, 0) + 1
        this = stream, clock[stream], name
        writes = {id(memory): memory for memory in self._memories_of(written, stream)}
        for memory in self._memories_of(read, stream):
            if id(memory) not in writes:
                self._check(this, [memory.written] if memory.written else [])
                memory.read[stream] = this
        for memory in writes.values():
            self._check(this, memory.uses())
            memory.written, memory.read = this, {}

    def event(self, stream: str) -> Clock:
        """Record an event at the present end of a stream."""
        self._look_for_freed()
        return dict(self._clocks.setdefault(stream, {}))

    def wait(self, stream: str, event: Clock) -> None:
        """Let a stream wait for an event."""
        self._look_for_freed()
        clock = self._clocks.setdefault(stream, {})
        for other, number in event.items():
            clock[other] = max(clock.get(other, 0), number)

    def hold(self, tensor: Tensor) -> None:
        """Let the allocator wait for all streams before it hands out the memory of a freed tensor (`record_stream`)."""
        for memory in self._memories_of(tensor, self.current):
            memory.is_held = True
            self._shared.pop(tensor.untyped_storage()._cdata, None)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _memories_of(self, values: Any, stream: str) -> Iterator[_Memory]:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes():
                known = self._memories.get(storage._cdata)
                if known is None:
                    known = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))
                if stream != COMPUTE and not known.is_held:
                    self._shared[storage._cdata] = known
                yield known

    def _check(self, this: tuple[str, int, str], others: Iterable[tuple[str, int, str]]) -> None:
        for stream, number, name in others:
            if self._clocks[this[0]].get(stream, 0) < number:
                self.races[f"{this[2]} in the stream of {this[0]} does not wait for {name} in that of {stream}"] = None

    def _look_for_freed(self) -> None:
        """Look for memory that the host has freed since the last call: a computation may get it next."""
        freed = [key for key, memory in self._shared.items() if memory.alive.expired()]
        for key in freed:
            self._check((COMPUTE, 0, "whatever gets freed memory"), self._shared.pop(key).uses())
        if freed or len(self._memories) > 10_000:
            self._memories = {key: each for key, each in self._memories.items() if not each.alive.expired()}


@dataclass(frozen=True)
class Stream:
    """Stand in for `torch.cuda.Stream`."""

    streams: Streams
    name: str

    def wait_stream(self, other: "Stream") -> None:
        self.streams.wait(self.name, self.streams.event(other.name))

    def wait_event(self, event: Clock) -> None:
        self.streams.wait(self.name, event)

    def record_event(self) -> Clock:
        return self.streams.event(self.name)


@contextlib.contextmanager
def ordered_streams() -> Iterator[Streams]:
    """Record for the block; raise AssertionError at its end if an order is missing."""
    streams = Streams()
    isend, irecv, waited, copy = Wire.isend, Wire.irecv, nccl_emulator.Work.wait, Lane.copy

    def message(post: Callable[[Wire, Tensor], Any], name: str, wire: Wire, tensor: Tensor) -> Any:
        if not wire.streamed:
            return post(wire, tensor)
        # NCCL's stream waits for the current one at the post, and works behind earlier messages of the group
        stream = f"messages of {wire.group.group_name}"
        streams.wait(stream, streams.event(streams.current))
        streams.call(stream, name, *((tensor, ()) if name == "a send" else ((), tensor)))
        work, event = post(wire, tensor), streams.event(stream)
        work.event = event
        return work

    def wait(work: Any, timeout: Any = None) -> bool:
        if hasattr(work, "event"):
            streams.wait(streams.current, work.event)
        return waited(work, timeout)

    @contextlib.contextmanager
    def switched(stream: Stream) -> Iterator[None]:
        before, streams.current = streams.current, stream.name
        yield
        streams.current = before

    def copied(lane: Lane, target: Tensor, source: Tensor) -> Any:
        lane._stream = Stream(streams, COPIES)  # type: ignore[assignment]
        # memory of the host is pinned, for which torch's allocator waits by itself
        host, on_device = (target, False) if target._is_view() else (source, True)
        streams.hold(host)
        on_cuda = mock.patch.object(Tensor, "is_cuda", on_device, create=True)
        with on_cuda, mock.patch.object(Tensor, "record_stream", lambda tensor, stream: streams.hold(tensor)):
            return copy(lane, target, source)

    stand_ins = {"current_stream": lambda *device: Stream(streams, streams.current), "stream": switched}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Wire, "isend", lambda *ends: message(isend, "a send", *ends)))
        patches.enter_context(mock.patch.object(Wire, "irecv", lambda *ends: message(irecv, "a receive", *ends)))
        patches.enter_context(mock.patch.object(nccl_emulator.Work, "wait", wait))
        patches.enter_context(mock.patch.object(Lane, "copy", copied))
        for name, value in stand_ins.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, value))
        with streams:
            yield streams
    assert not streams.races, "\n".join(streams.races)
