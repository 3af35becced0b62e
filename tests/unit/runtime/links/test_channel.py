"""Links between two stages in one process: a stand-in for torch.distributed carries the messages."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.links import channel as link
from terapipe_ds.runtime.links.channel import AnnouncedChannel, MessageBuffers, ReceiveChannel, SendChannel, Wire
from terapipe_ds.runtime.links.specs import _DTYPES, LinkError, MessageSpec, TensorSpec
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.runtime.links.staging import host_buffer, needs_staging
from terapipe_ds.schedule.action import Action, Kind, SliceKey
from tests.distributed.nccl_emulator import DTYPES


@dataclass
class Work:
    """An operation on the way. Waiting for a receive moves the data."""

    finish: Callable[[], object] = lambda: None
    waited: bool = False
    limit: timedelta | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited, self.limit = True, timeout
        self.finish()


class Post:
    """Two ranks, any number of groups; messages of a group come in the order in which they were sent."""

    def __init__(self) -> None:
        self.mail: dict[Any, deque[Tensor]] = defaultdict(deque)
        self.sent: list[Work] = []
        self.posted: list[Work] = []

    def isend(self, tensor: Tensor, peer: int, group: Any, tag: int) -> Work:
        assert tensor.is_contiguous()
        assert tensor.dtype in DTYPES, f"NCCL lacks {tensor.dtype}"
        self.mail[group, tag].append(tensor.clone())
        self.sent.append(Work())
        return self.sent[-1]

    def irecv(self, tensor: Tensor, peer: int, group: Any, tag: int) -> Work:
        self.posted.append(Work(partial(self.recv, tensor, peer, group, tag)))
        return self.posted[-1]

    def recv(self, tensor: Tensor, peer: int, group: Any, tag: int) -> None:
        tensor.copy_(self.mail[group, tag].popleft())


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    monkeypatch.setattr(link, "torch_dist", post := Post())
    return post


def wire(name: str = "activations to stage 1") -> Wire:
    return Wire(peer=1, group="data", control="control", device=torch.device("cpu"), name=name)


def signature_of(unit: SliceKey) -> str:
    """Units of even micro-batches look alike, and so do those of odd ones."""
    return "odd" if unit[0] % 2 else "even"


def ends(streamed: bool = False) -> tuple[SendChannel, ReceiveChannel]:
    there, here = (replace(wire(f"activations {name}"), streamed=streamed) for name in ("to stage 1", "from stage 0"))
    return SendChannel(there), AnnouncedChannel(here, signature_of)


def send(channel: SendChannel, unit: SliceKey, *tensors: Tensor, at: int = 0) -> None:
    spec = MessageSpec(tuple(TensorSpec.of(t) for t in tensors), is_tuple=len(tensors) > 1)
    channel.announce(signature_of(unit), spec)
    channel.send(tensors, consumed_at=at)


class TestMessageSpec:
    @pytest.mark.parametrize("is_tuple", [True, False])
    def test_any_that_is_not_too_large_can_be_announced(self, is_tuple: bool) -> None:
        tensors = tuple(
            TensorSpec(shape, dtype, requires_grad=dtype.is_floating_point and len(shape) > 1)
            for dtype in _DTYPES
            for shape in ((), (0,), (2, 1, 7))
        )
        spec = MessageSpec(tensors, is_tuple)
        assert MessageSpec.decode(spec.encode()) == spec
        with pytest.raises(LinkError, match="hands on 200 tensors, more than one message can announce; pack them"):
            MessageSpec(tuple(TensorSpec((n, 1), torch.int64, False) for n in range(200)), True).encode()

    @pytest.mark.parametrize("kind", ["nested", "torch.sparse_coo", "quantized", "torch.float8_e4m3fn"])
    def test_a_tensor_that_no_message_carries_is_named(self, kind: str) -> None:
        x = torch.ones(2, 3)
        make: dict[str, Callable[[], Tensor]] = {
            "nested": lambda: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
            "torch.sparse_coo": x.to_sparse,
            "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            "torch.float8_e4m3fn": lambda: x.to(torch.float8_e4m3fn),
        }
        with pytest.raises(LinkError, match=rf"no message carries \({kind}\): convert it in the last layer"):
            MessageSpec.of([x, make[kind]()], True)


class TestMessages:
    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_all_kinds_of_tensors_arrive(self, post: Post, dtype: torch.dtype, streamed: bool) -> None:
        sender, receiver = ends(streamed)
        tensors = [torch.ones(shape).to(dtype).conj() for shape in ((), (0, 3), (2, 5))]
        tensors += [torch.arange(6).reshape(2, 3).T.to(dtype), torch.randn(2, 3, requires_grad=True) * 1]
        send(sender, (0, 0), *tensors)
        receiver.post((0, 0))
        spec, received = receiver.wait((0, 0))
        assert spec.is_tuple
        assert [s.requires_grad for s in spec.tensors] == [False, False, False, False, True]
        for arrived, sent in zip(received, tensors, strict=True):
            assert arrived.dtype == sent.dtype and torch.equal(arrived, sent)
            assert not arrived.requires_grad, "leaves are made by the engine"

    def test_a_signature_is_announced_once(self, post: Post) -> None:
        sender, receiver = ends()
        for micro_batch_id in range(4):
            send(sender, (micro_batch_id, 0), torch.full((1 + micro_batch_id % 2,), float(micro_batch_id)))
            receiver.post((micro_batch_id, 0))
        assert len(post.mail["control", 0]) == 2
        received = [receiver.wait((micro_batch_id, 0))[1][0].tolist() for micro_batch_id in range(4)]
        assert received == [[0], [1, 1], [2], [3, 3]]
        receiver.assert_empty()

    def test_receives_wait_behind_an_unknown_shape(self, post: Post) -> None:
        """In the order of the schedule: a known shape may not overtake an unknown one."""
        sender, receiver = ends()
        send(sender, (0, 0), torch.zeros(2))
        receiver.post((0, 0))
        receiver.wait((0, 0))
        for unit in ((2, 0), (1, 0), (4, 0)):
            receiver.post(unit)
        assert len(post.posted) == 2, "that of (2, 0) has begun, (4, 0) stands behind (1, 0)"
        for unit, value in (((2, 0), 2.0), ((1, 0), 1.0), ((4, 0), 4.0)):
            send(sender, unit, torch.full((2 + unit[0] % 2,), value))
        received = [receiver.wait(unit)[1][0].tolist() for unit in ((2, 0), (1, 0), (4, 0))]
        assert received == [[2.0] * 2, [1.0] * 3, [4.0] * 2]

    def test_another_message_than_the_next_one_and_one_that_is_left(self, post: Post) -> None:
        _, receiver = ends()
        with pytest.raises(LinkError, match=r"asked for the message of \(0, 0\), but the next one posted is nothing"):
            receiver.wait((0, 0))
        receiver.post((0, 1))
        with pytest.raises(LinkError, match=r"from stage 0: asked for .*\(0, 0\), but the next .* is \(0, 1\)"):
            receiver.wait((0, 0))
        with pytest.raises(LinkError, match=r"never used the message of \[\(0, 1\)\]"):
            receiver.assert_empty()

    def test_a_slice_that_looks_different_than_before(self, post: Post) -> None:
        sender = SendChannel(wire())
        send(sender, (0, 0), torch.zeros(2, 3))
        for other in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, requires_grad=True)):
            with pytest.raises(LinkError, match="to stage 1: the layers gave .* call engine.reset_activation_shape"):
                send(sender, (2, 0), other)


def test_the_memory_of_sends_is_given_back_when_they_have_arrived(post: Post) -> None:
    sender = SendChannel(wire())
    for index in (0, 2, 5, 6):
        send(sender, (0, index), torch.zeros(2), at=index)
    announcement, *works = post.sent
    sender.release(before=5)
    assert announcement.waited
    assert [work.waited for work in works] == [True, True, False, False]
    sender.keep_at_most(1)
    assert [work.waited for work in works] == [True, True, True, False]


def test_only_devices_beside_the_host_are_staged() -> None:
    """gloo carries CPU tensors itself; of CUDA tensors it knows nothing between two ranks, NCCL does."""

    def group(backend: str) -> Any:
        return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))

    assert not needs_staging(group("gloo"), torch.device("cpu"))
    assert needs_staging(group("gloo"), torch.device("cuda", 0))
    assert not needs_staging(group("nccl"), torch.device("cuda", 0))


@pytest.mark.parametrize("kind", [{}, {"streamed": True}, {"staged": True}], ids=str)
def test_an_output_without_a_gradient_is_copied_once(kind: dict[str, bool]) -> None:
    """Over NCCL the copy for the message suffices; over gloo there would be none."""
    path, output = replace(wire(), **kind), torch.ones(3)
    links = SimpleNamespace(_out={(Kind.FORWARD, 0): SimpleNamespace(wire=path)})
    stage = SimpleNamespace(copies_outputs=partial(StageLinks.copies_outputs, links))
    runner: Any = SimpleNamespace(place=SimpleNamespace(chunk_id=0), _stage=SimpleNamespace(links=stage))
    runner._open = lambda: SimpleNamespace(get=lambda action: SimpleNamespace(outputs=output))
    (handed,), _ = PartRunner._outputs(runner, Action(Kind.FORWARD, 0, 0))
    sent = path.outgoing(handed, MessageBuffers(path.device))
    assert len({tensor.data_ptr() for tensor in (output, handed, sent)}) == 2


class TestStreams:
    """Messages that are kernels in a stream, as over NCCL."""

    def test_one_receive_is_at_work_at_a_time(self, post: Post) -> None:
        sender, receiver = ends(streamed=True)
        for index in range(4):
            send(sender, (0, index), torch.full((2,), float(index)))
            receiver.post((0, index))
        began = []
        for index in range(4):
            assert receiver.wait((0, index))[1][0].tolist() == [index, index]
            began.append(len(post.posted))
        assert began == [2, 3, 4, 4]  # the next one begins when one is waited for

    def test_messages_get_no_new_memory_from_the_third_batch_on(self, post: Post) -> None:
        sender, receiver = ends(streamed=True)
        allocated = []
        for _ in range(5):
            live = []
            for index in range(3):
                send(sender, (0, index), torch.randn(2, 3), at=index)
                receiver.post((0, index))
            for index in range(3):
                live.append(receiver.wait((0, index))[1][0].requires_grad_() * 2)  # held by a graph
            sender.keep_at_most(0)
            post.posted.clear()  # which hold the buffers
            allocated.append((sender._buffers.num_allocated, receiver._buffers.num_allocated))
        assert allocated[1:] == [allocated[1]] * 4 and allocated[1] == (3, 3)

    @pytest.mark.parametrize("lengths", [(20, 16, 12), (5, 10, 2, 7)])
    @pytest.mark.parametrize("newest_first", [False, True])
    def test_uneven_slices_get_no_new_memory_either(self, lengths: tuple[int, ...], newest_first: bool) -> None:
        buffers, allocated = MessageBuffers(torch.device("cpu")), []
        for _ in range(4):
            live = deque(buffers.take((length, 8), torch.float32) for _ in range(3) for length in lengths)
            while live:
                live.pop() if newest_first else live.popleft()
            allocated.append(buffers.num_allocated)
        assert allocated == [3 * len(lengths)] * 4

    def test_memory_that_is_in_use_is_not_given_out(self) -> None:
        buffers = MessageBuffers(torch.device("cpu"))
        kept = buffers.take((2, 3), torch.float32).fill_(1.0)
        view = kept[1:]
        del kept
        assert buffers.take((2, 3), torch.float32).fill_(2.0).sum() == 12
        assert view.sum() == 3
        del view
        assert buffers.take((3,), torch.int16).fill_(1).sum() == 3 and buffers.num_allocated == 2
        buffers.take((100,), torch.float64)  # lengths have grown
        assert len(buffers._storages) == 1


def test_buffers_are_pinned_where_the_wire_has_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device of the message, whatever accelerator DeepSpeed was told to use."""
    asked = []
    monkeypatch.setattr(torch, "empty", lambda shape, **options: asked.append(options))
    for device in ("cpu", "cuda"):
        host_buffer((4, 8), torch.bfloat16, torch.device(device))
    assert [(options["device"], options["pin_memory"]) for options in asked] == [("cpu", False), ("cpu", True)]


@pytest.mark.parametrize(("streamed", "limit"), [(False, link.NO_LIMIT), (True, None)])
def test_a_wait_has_no_limit_and_over_nccl_none_that_blocks_the_host(streamed: bool, limit: timedelta | None) -> None:
    """gloo takes the limit that its group was made with; `Work.wait(timeout)` of NCCL waits on the host."""
    replace(wire(), streamed=streamed).wait(work := Work())
    assert (work.waited, work.limit) == (True, limit)
