"""Emulate on CPU ranks over gloo how calls wait for each other over NCCL, so that deadlocks show without a device.

Within `emulated_nccl`, groups behave in point-to-point calls as `ProcessGroupNCCL` (torch 2.11 to 2.15) does on a
device. This holds for the default group and for every group that is not made with the backend gloo:

- The first message from one rank to another in a group connects them. The call that posts it blocks the host until both
  ends have posted it. Without a bound device, each pair has a communicator of its own, which `ncclCommInitRank` makes.
  With one, `ncclSend` and `ncclRecv` set their transport up, one per direction.
- With a bound device `new_group` splits the communicator of all ranks, and every rank takes part: members of a group
  over NCCL with its ranks as the color, ranks outside of any group, even of one over gloo, without a color. Members of
  a group over gloo split nothing. A split blocks until all ranks have come to theirs of the same number.
- A dtype that NCCL lacks is an error. So is a collective of objects before the rank has chosen its device: torch takes
  the objects to the current one, which is the first one for all ranks.
- The operations of a rank run on one stream of the communicator, in the order in which they were posted. The whole
group has one communicator if a device is bound to it (`eager`, which DeepSpeed's start does); otherwise each pair has.
- A send ends when the peer's receive has begun. NCCL buffers some bytes, which a large message exceeds.
- Waiting for the whole device waits for every operation that this rank has posted, receives among them.

A `wait` blocks the host here; over NCCL it blocks the current stream. The host's next work would be queued behind that
wait. This includes messages, since an operation begins when the current stream has reached the place of its post.
The dependencies are therefore the same. Collectives are gloo's own. The emulation does not show how long anything
takes.
"""

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from terapipe_ds.models.hugging_face.refusals import _over_gloo
from terapipe_ds.runtime.agreement import _on_the_host

PATIENCE_S = 30.0
_REAL = {name: getattr(torch_dist, name) for name in ("send", "recv", "isend", "irecv", "all_gather_object")}

# of ncclDataType_t; torch sends complex numbers as pairs of real ones, and booleans as bytes in collectives only
DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip

Way = tuple[int, int, int]
"""The number of a group, the rank that sends, and the rank that receives."""


class NcclDeadlockError(RuntimeError):
    """Report a wait that would never end over NCCL."""


@dataclass
class Work:
    """Represent an operation under way, as `isend` and `irecv` return it."""

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
    """Move one end of a message."""

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
    """Run the operations posted to a communicator, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def post(self, job: _Job) -> None:
        self._jobs.put(job)

    def join(self) -> None:
        """Wait for the end, after all operations posted before it."""
        self._jobs.put(None)
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class Emulator:
    """Replace the point-to-point calls of one rank, as the module describes.

    Args:
        eager: whether a device is bound to the process group, so that a group has one communicator.
        patience_s: a wait that takes longer counts as a deadlock.
    """

    def __init__(self, eager: bool, patience_s: float = PATIENCE_S) -> None:
        self.eager, self.patience_s = eager, patience_s
        self._has_device = False
        self.connections: list[Way] = []
        self.messages = 0
        self.synchronized_while_posted: list[str] = []  # stacks of waits for the device while receives were posted
        self._posted: list[Work] = []
        self._new_group: Callable[..., Any] = torch_dist.new_group
        self._groups: dict[int, tuple[Any, Any, int]] = {}  # by id: the group, its gloo group, its number
        self._num_groups = self._num_splits = 0
        self._counts: dict[Way, int] = {}
        self._streams: dict[Any, _Stream] = {}
        everyone = self._new_group(backend="gloo")
        store = torch_dist.distributed_c10d._get_default_store()
        self._store = torch_dist.PrefixStore(f"nccl-{everyone.group_name}", store)
        self._add(torch_dist.group.WORLD, everyone)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.join()

    # -- groups ------------------------------------------------------------------------------------------------------

    def new_group(
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **options: Any
    ) -> Any:
        """Make a group; it is emulated unless another backend is given."""
        is_outside = ranks is not None and torch_dist.get_rank() not in ranks
        comes = not options.get("use_local_synchronization") if is_outside else backend in (None, "nccl")
        if self.eager and comes:
            self._split(None if is_outside else sorted(ranks or range(torch_dist.get_world_size())))
        group = self._new_group(ranks, timeout=timeout, backend="gloo", **options)
        if backend in (None, "nccl"):  # only torch with CUDA has the options of NCCL's groups
            self._add(group, self._new_group(ranks, timeout=timeout, backend="gloo", **options))
        return group

    def _split(self, color: list[int] | None) -> None:
        """Block until all ranks split as often as this one; all ranks of a color must have come with it."""
        number, rank, count = self._num_splits, torch_dist.get_rank(), torch_dist.get_world_size()
        self._num_splits += 1
        keys = [f"split {number} of {each}" for each in range(count)]
        self._store.set(keys[rank], repr(color))
        try:
            self._store.wait(keys, timedelta(seconds=self.patience_s))
        except torch_dist.DistStoreError:
            others = [each for each in range(count) if not self._store.check([keys[each]])]
            what = f"rank {rank} splits the communicator of all ranks (color {color})"
            raise NcclDeadlockError(f"NCCL would hang: {what}, and ranks {others} do not come") from None
        colors = [self._store.get(key).decode() for key in keys]
        assert color is None or all(colors[each] == repr(color) for each in color), f"split {number}: {colors}"

    def _add(self, group: Any, gloo: Any) -> None:
        self._num_groups += 1  # all ranks make all groups in one order
        if group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
            self._groups[id(group)] = group, gloo, self._num_groups

    def get_backend(self, group: Any = None) -> str:
        """Tell NCCL's groups from gloo's."""
        return "nccl" if self._is_nccl(group) else "gloo"

    def _is_nccl(self, group: Any) -> bool:
        return id(torch_dist.group.WORLD if group is None else group) in self._groups

    def set_device(self, *device: Any) -> None:
        """Choose the device of this rank."""
        self._has_device = True

    def all_gather_object(self, objects: list[Any], own: Any, group: Any = None) -> None:
        """Gather objects over gloo, or if the device of the rank is chosen."""
        if self._is_nccl(group) and not self._has_device:
            raise RuntimeError("NCCL: duplicate GPU detected: objects are gathered before a rank has chosen its device")
        _REAL["all_gather_object"](objects, own, group)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        *,
        src: int | None = None,
    ) -> Any:
        """Do as torch's function `name` does. A send returns when the current stream would wait for it."""
        peer = src if dst is None else dst
        if self._is_nccl(group) and tensor.dtype not in DTYPES:
            raise RuntimeError(f"NCCL cannot {name} {tensor.dtype}")
        if not self._is_nccl(group):
            return _REAL[name](tensor, peer, group, tag=tag)
        work = self._post(name.endswith("send"), tensor.clone() if name == "send" else tensor, peer, group)
        if name == "recv":
            work.wait()
        return {"send": None, "recv": peer}.get(name, work)

    send, recv = partialmethod(_call, "send"), partialmethod(_call, "recv")
    isend, irecv = partialmethod(_call, "isend"), partialmethod(_call, "irecv")

    def synchronize(self, *device: Any) -> None:
        """Wait for all operations that this rank has posted, as a wait for the whole device does."""
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
        work = Work(f"the {'send' if is_send else 'receive'} of message {count} {_described(way)}", self.patience_s)
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


@contextlib.contextmanager
def emulated_nccl(eager: bool, patience_s: float = PATIENCE_S) -> Iterator[Emulator]:
    """Emulate NCCL for the block; a collective over all ranks. Groups and engines end with the block."""
    emulator = Emulator(eager, patience_s)
    calls = ("isend", "irecv", "send", "recv", "new_group", "get_backend", "all_gather_object")
    with contextlib.ExitStack() as patches:
        for name in calls:
            patches.enter_context(mock.patch.object(torch_dist, name, getattr(emulator, name)))
        for name in ("synchronize", "set_device"):
            patches.enter_context(mock.patch.object(get_accelerator(), name, getattr(emulator, name)))
        for known in (_on_the_host, _over_gloo):  # they know the backend and the groups outside
            known.cache_clear()
            patches.callback(known.cache_clear)
        yield emulator
        emulator.close()
