"""Emulate what waits for what over NCCL, on CPU ranks over gloo: deadlocks without a device.

For as long as `emulated_nccl` lasts, every group that is not asked to be gloo, the default one among them, behaves in
point-to-point calls as one of `ProcessGroupNCCL` (torch 2.11 to 2.15) does on a device:

- The first message from a rank to another in a group connects them, and the call that posts it blocks the host until
  both ends have posted it: without a bound device each pair has a communicator of its own, which `ncclCommInitRank`
  makes, and with one `ncclSend` and `ncclRecv` set their transport up, one per direction.
- What a rank posts runs on one stream of the communicator, in the order in which it was posted: of the whole group
  where a device is bound to it (`eager`, what DeepSpeed's start does), otherwise of the pair.
- A send ends when the peer's receive has begun. NCCL buffers some bytes; a large message is more than that.
- Waiting for the whole device waits for every operation that this rank has posted, receives among them.

A `wait` blocks the host here and the current stream there. What the host does next would be queued behind that wait,
messages too, since an operation begins when the current stream has come to where it was posted: the same dependencies.
Collectives are gloo's own. Nothing here tells how long anything takes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

PATIENCE_S = 30.0
_REAL = {name: getattr(torch_dist, name) for name in ("send", "recv")}

Way = tuple[int, int, int]
"""The number of a group, the rank that sends and the one that receives."""


class NcclDeadlockError(RuntimeError):
    """What would never end over NCCL."""


@dataclass
class Work:
    """An operation on its way, as `isend` and `irecv` return it."""

    what: str
    patience_s: float
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done."""
        if not self.done.wait(self.patience_s):
            raise NcclDeadlockError(f"NCCL would hang: rank {torch_dist.get_rank()} waits for {self.what}")
        if self.error is not None:
            raise self.error
        return True


@dataclass(frozen=True)
class _Job:
    """One end of a message."""

    work: Work
    is_send: bool
    tensor: Tensor
    peer: int
    gloo: Any
    tag: int

    def run(self) -> None:
        """Meet the other end, then move the data."""
        token = torch.zeros(1, dtype=torch.uint8)
        meet, move = ("recv", "send") if self.is_send else ("send", "recv")
        try:
            _REAL[meet](token, self.peer, group=self.gloo, tag=self.tag)
            _REAL[move](self.tensor, self.peer, group=self.gloo, tag=self.tag + 1)
        except BaseException as error:
            self.work.error = error
        self.work.done.set()


class _Stream:
    """The stream of a communicator: works off what is posted, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def post(self, job: _Job | None) -> None:
        """Queue a job; None ends the stream."""
        self._jobs.put(job)

    def join(self) -> None:
        """Wait for the end, after what was posted before it."""
        self.post(None)
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class Emulator:
    """The point-to-point calls of one rank; see the module.

    Args:
        eager: a device is bound to the process group, so that a group has one communicator.
        patience_s: what takes longer is a deadlock.
    """

    def __init__(self, eager: bool, patience_s: float = PATIENCE_S) -> None:
        self.eager, self.patience_s = eager, patience_s
        self.connections: list[Way] = []
        self.messages = 0
        self.synchronized_while_posted: list[str] = []  # where the device was waited for meanwhile
        self._posted: list[Work] = []
        self._new_group: Callable[..., Any] = torch_dist.new_group
        self._groups: dict[int, tuple[Any, Any, int]] = {}  # by identity: itself, one of gloo, its number
        self._num_groups = 0
        self._counts: dict[Way, int] = {}
        self._streams: dict[Any, _Stream] = {}
        everyone = self._new_group(backend="gloo")
        store = torch_dist.distributed_c10d._get_default_store()
        self._store = torch_dist.PrefixStore(f"nccl-{everyone.group_name}", store)
        self._add(torch_dist.group.WORLD, everyone)

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams.values():
            stream.join()

    # -- groups ------------------------------------------------------------------------------------------------------

    def new_group(self, ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        """Make a group; one that is not asked to be gloo is emulated."""
        group = self._new_group(ranks, timeout=timeout, backend="gloo", **options)
        if backend is None:
            self._add(group, self._new_group(ranks, timeout=timeout, backend="gloo", **options))
        return group

    def _add(self, group: Any, gloo: Any) -> None:
        self._num_groups += 1  # all ranks make all groups in one order
        if group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
            self._groups[id(group)] = group, gloo, self._num_groups

    def get_backend(self, group: Any = None) -> str:
        """Tell NCCL's groups from gloo's."""
        return "nccl" if self._is_nccl(group) else "gloo"

    def _is_nccl(self, group: Any) -> bool:
        return id(torch_dist.group.WORLD if group is None else group) in self._groups

    # -- messages ----------------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """As torch's own."""
        return self._post(True, tensor, dst, group) if self._is_nccl(group) else _isend(tensor, dst, group, tag=tag)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """As torch's own."""
        return self._post(False, tensor, src, group) if self._is_nccl(group) else _irecv(tensor, src, group, tag=tag)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        """As torch's own, which over NCCL returns when the current stream waits."""
        self._post(True, tensor.clone(), dst, group) if self._is_nccl(group) else _REAL["send"](tensor, dst, group, tag)

    def recv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> int:
        """As torch's own."""
        if not self._is_nccl(group):
            return int(_REAL["recv"](tensor, src, group, tag))
        self._post(False, tensor, src, group).wait()
        return src

    def synchronize(self, *device: Any) -> None:
        """Wait for all that this rank has posted, as for a device."""
        self._posted = [work for work in self._posted if not work.done.is_set()]
        receives = [work for work in self._posted if work.what.startswith("the receive")]
        if receives:
            self.synchronized_while_posted.append("".join(traceback.format_stack(limit=4)[:-1]))
        for work in self._posted:
            if not work.done.wait(self.patience_s):
                raise NcclDeadlockError(f"NCCL would hang: a wait for the whole device waits for {work.what}")

    def _post(self, is_send: bool, tensor: Tensor, peer: int, group: Any) -> Work:
        _, gloo, number = self._groups[id(torch_dist.group.WORLD if group is None else group)]
        rank = torch_dist.get_rank()
        way = (number, rank, peer) if is_send else (number, peer, rank)
        if way not in self._counts:
            self._connect(way, is_send)
        count = self._counts[way] = self._counts.get(way, -1) + 1
        what = f"the {'send' if is_send else 'receive'} of message {count} {_described(way)}"
        work = Work(what, self.patience_s)
        communicator = number if self.eager else (number, *sorted((rank, peer)))
        if communicator not in self._streams:
            self._streams[communicator] = _Stream()
        self._streams[communicator].post(_Job(work, is_send, tensor, peer, gloo, 2 * count))
        self._posted = [each for each in self._posted if not each.done.is_set()] + [work]
        self.messages += 1
        return work

    def _connect(self, way: Way, is_send: bool) -> None:
        """Block until the other end has come to the same message."""
        self.connections.append(way)
        own, others = (f"{way} {end}" for end in (("sends", "receives") if is_send else ("receives", "sends")))
        self._store.set(own, "1")
        try:
            self._store.wait([others], timedelta(seconds=self.patience_s))
        except torch_dist.DistStoreError:
            raise NcclDeadlockError(
                f"NCCL would hang: rank {torch_dist.get_rank()} connects for a message {_described(way)}, and the "
                "other end does not come"
            ) from None


def _described(way: Way) -> str:
    number, source, target = way
    return f"from rank {source} to rank {target} in group {number}"


def _isend(tensor: Tensor, dst: int, group: Any, tag: int) -> Any:
    return torch_dist.distributed_c10d.isend(tensor, dst, group, tag)


def _irecv(tensor: Tensor, src: int, group: Any, tag: int) -> Any:
    return torch_dist.distributed_c10d.irecv(tensor, src, group, tag)


@contextlib.contextmanager
def emulated_nccl(eager: bool, patience_s: float = PATIENCE_S) -> Iterator[Emulator]:
    """Emulate NCCL for the block; a collective over all ranks. Groups and engines end with the block."""
    emulator = Emulator(eager, patience_s)
    calls = ("isend", "irecv", "send", "recv", "new_group", "get_backend")
    with contextlib.ExitStack() as patches:
        for name in calls:
            patches.enter_context(mock.patch.object(torch_dist, name, getattr(emulator, name)))
        patches.enter_context(mock.patch.object(get_accelerator(), "synchronize", emulator.synchronize))
        yield emulator
        emulator.close()
