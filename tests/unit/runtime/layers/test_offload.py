"""Saved tensors on the host: the same bits, views and strides; what stays; what is an error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.layers.offload import (
    ActivationOffload,
    HostBuffers,
    Lane,
    Offloaded,
    SavedTensorChangedError,
    explain_refusal,
)
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.schedule import Action, Kind, Schedule, build


@dataclass
class Batch:
    """What the offload asks of a batch."""

    schedule: Schedule = field(default_factory=lambda: build("gpipe", 1, 8, 1))
    stage_id: int = 0
    training: bool = True


class Block(nn.Module):
    """Products, a fused projection whose views are used, a transposition, a buffer and something small."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fused, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("scale", torch.rand(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.fused(x).chunk(3, dim=-1)
        mixed = torch.softmax(a @ b.transpose(0, 1), dim=-1) @ c
        return self.out(torch.nn.functional.gelu(mixed * self.scale)) * x.mean()


def computations(batch: Batch) -> list[Action]:
    return list(batch.schedule.orders[0])


def run(block: nn.Module, offload: ActivationOffload | None, batch: Batch) -> tuple[list[Tensor], list[int]]:
    """All F, then all B, of eight micro-batches of one slice; the gradients, and bytes left after each computation."""
    torch.manual_seed(2)
    inputs = [torch.randn(64, 32).requires_grad_() for _ in range(8)]
    outputs, left = {}, []
    if offload is not None:
        offload.open_batch(batch)  # type: ignore[arg-type]
    for action in computations(batch):
        with MemoryPeak() as peak:
            if offload is not None:
                offload.begin(action)
            if action.kind is Kind.FORWARD:
                saving: Any = torch.no_grad() if offload is None else offload.saving((0, *action.unit))
                with torch.enable_grad(), saving if offload is not None else torch.enable_grad():
                    outputs[action.unit] = block(inputs[action.micro_batch_id]).sum()
            else:
                outputs.pop(action.unit).backward()
        left.append(peak.left_bytes)
    gradients = [leaf.grad for leaf in (*block.parameters(), *inputs)]
    return [gradient for gradient in gradients if gradient is not None], left


def test_the_same_bits_in_less_memory() -> None:
    plain, left = run(Block(), None, Batch())
    offload = ActivationOffload(Block(), torch.device("cpu"))
    block = offload._module
    ours, left_ours = run(block, offload, Batch())
    assert len(plain) == len(ours) == 12 and all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    # of eight slices the first two and the last, or three ahead of their B and the one before, are there
    assert max_total(left_ours) < 0.6 * max_total(left)
    buffers = offload.buffers
    assert buffers.live_bytes == 0 < buffers.peak_bytes <= buffers.reserved_bytes
    before = buffers.reserved_bytes
    run(block, offload, Batch())
    assert buffers.reserved_bytes == before  # the next batch takes the same buffers


def test_the_device_waits_for_copies_and_the_host_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a device: each copy returns an event, and memory leaves after a wait of the stream for it."""
    offload, waited = ActivationOffload(Block(), torch.device("cpu")), list[object]()
    copy, leave = Lane.copy, Offloaded.leave
    events: list[object] = []

    def copied(lane: Lane, target: Tensor, source: Tensor) -> object:
        copy(lane, target, source)
        events.append(object())  # it has no method that the host could wait in
        return events[-1]

    def left(memory: Offloaded) -> None:
        leave(memory)
        assert memory._leaves is None or memory._leaves in waited  # else a copy may read what is no longer its memory

    monkeypatch.setattr(Lane, "copy", copied)
    monkeypatch.setattr(Offloaded, "leave", left)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append))
    plain, _ = run(Block(), None, Batch())
    ours, _ = run(offload._module, offload, Batch())
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert len(events) > 10 and set(map(id, waited)) == set(map(id, events))


def test_a_copy_waits_for_the_work_before_it_and_holds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls to a stand-in for CUDA."""
    calls = list[str]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def wait_stream(self, other: object) -> None:
            calls.append(f"wait for {other}")

        def record_event(self) -> str:
            calls.append("event")
            return "event"

    class Target(Tensor):
        is_cuda = True  # type: ignore[assignment]

        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
            calls.append(f"copy, the host {'goes on' if non_blocking else 'waits'}")
            return self

        def record_stream(self, stream: Any) -> None:
            assert isinstance(stream, Stream)
            calls.append("hold")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "computations")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lane = Lane(torch.device("cuda"))
    assert lane.copy(torch.zeros(4).as_subclass(Target), torch.ones(4)) == "event"
    assert calls == ["wait for computations", "copy, the host goes on", "hold", "event"]
    assert lane.buffers._is_pinned


def test_lengths_that_change_pile_up_no_memory_of_the_host() -> None:
    offload = ActivationOffload(Block(), torch.device("cpu"))
    buffers = offload.buffers
    for batch in range(8):
        offload.open_batch(Batch())  # type: ignore[arg-type]
        lent = [buffers.take(4096 * size) for size in (1 + batch, 1 + batch, 20)]
        for buffer in lent:
            buffers.give(buffer)
    assert buffers.reserved_bytes == 4096 * (2 * (1 + 2 + 4 + 8) + 32)  # powers of two serve all lengths up to them


def max_total(changes: list[int]) -> int:
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return most


@contextmanager
def first_slice(offload: ActivationOffload) -> Iterator[Any]:
    """Have the offload take what the first slice of a batch saves, and then let it leave. Yield the hooks."""
    batch = Batch()
    offload.open_batch(batch)  # type: ignore[arg-type]
    first, *rest = computations(batch)
    offload.begin(first)
    with (hooks := offload.saving((0, *first.unit))):
        yield hooks
    for action in rest[:2]:
        offload.begin(action)


def packed(offload: ActivationOffload, tensor: Tensor) -> Tensor:
    """Save a tensor as autograd does, let it leave, and return it as the backward gets it."""
    with first_slice(offload) as hooks:
        saved = hooks.pack_hook(tensor)
    return hooks.unpack_hook(saved)


def test_layers_may_use_jvp_and_are_told_of_what_takes_no_hooks() -> None:
    """Tensors within a transform have no memory to move; torch.func.grad refuses to have them moved."""
    layer, x = nn.Linear(40, 40), torch.randn(64, 40)

    def gradient(offload: ActivationOffload | None) -> Tensor:
        own = x.clone().requires_grad_()
        with nullcontext() if offload is None else first_slice(offload):
            y, tangent = torch.func.jvp(lambda z: layer(z).tanh() * z, (own,), (torch.ones_like(own),))
        (y + tangent).square().sum().backward()
        assert own.grad is not None
        return own.grad

    offload = ActivationOffload(nn.Linear(1, 1), torch.device("cpu"))
    assert torch.equal(gradient(offload), gradient(None))
    with first_slice(offload), pytest.raises(TeraPipeConfigError, match="offload_activations = true"):
        try:
            torch.func.grad(lambda z: layer(z).sum())(x)
        except RuntimeError as error:
            explain_refusal(error)


class Compiled(Block):
    """A function under torch's compiler that runs without a graph, on slices of several lengths."""

    @torch.compile
    def looped(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()  # within a loop: torch runs the function itself
            x = x * torch.sigmoid(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.looped(self.fused(x[: 32 + 2 * int(10 * x[0, 0].abs())]))


def test_the_compiler_leaves_alone_what_runs_under_a_compiled_function() -> None:
    """It would trace the function that autograd calls for a saved tensor, and fail at lengths that change."""
    offload = ActivationOffload(Compiled(), torch.device("cpu"))
    ours, _ = run(offload._module, offload, Batch())
    plain, _ = run(Compiled(), None, Batch())
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)) and offload.buffers.peak_bytes > 0


def test_two_tensors_of_a_slice_may_have_had_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's selective recomputation empties outputs, and the allocator gives their addresses to other tensors."""
    offload, batch = ActivationOffload(nn.Module(), torch.device("cpu")), Batch()
    first, second = (torch.rand(64, 32).requires_grad_() for _ in range(2))
    owner = torch.rand(64, 32)
    offload.open_batch(batch)  # type: ignore[arg-type]
    offload.begin(computations(batch)[0])
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda _: 1)
    with offload.saving((0, 0, 0)):
        total = first.exp().sum() + (owner * second).sum()
    torch.testing.assert_close(torch.autograd.grad(total, second)[0], owner)


def test_noise_that_an_operator_writes_after_autograd_has_saved_it() -> None:
    """Autograd saves the noise of `rrelu` empty, and the operator then draws it: a copy must not begin before."""
    offload, x = ActivationOffload(nn.Linear(1, 1), torch.device("cpu")), torch.full((64, 40), -1.0, requires_grad=True)
    with first_slice(offload):
        y = nn.functional.rrelu(x, training=True)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, -y) and offload.buffers.peak_bytes > 0


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 20:],
    "int64": lambda x: (100 * x).long(),
    "bool": lambda x: x > 0,
    "strided": lambda x: x.view(16, 4, 40)[:, 1:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_as_they_were(name: str) -> None:
    offload = ActivationOffload(nn.Linear(1, 1), torch.device("cpu"))
    tensor = VIEWS[name](torch.randn(64, 40))
    expected, stride, address = tensor.clone(), tensor.stride(), tensor.untyped_storage().data_ptr()
    back = packed(offload, tensor)
    assert torch.equal(back, expected) and back.stride() == stride and back.dtype == expected.dtype
    assert back.untyped_storage().data_ptr() != address and offload.buffers.peak_bytes > 0


STAYING = ["parameter", "its transposition", "buffer", "small", "part of a larger memory", "conjugated", "negated"]


@pytest.mark.parametrize("name", STAYING)
def test_what_is_not_the_slices_own_stays(name: str) -> None:
    block, large = Block(), torch.randn(64, 400)
    tensor = {
        "parameter": block.fused.weight, "its transposition": block.fused.weight.t(), "buffer": block.scale,
        "small": torch.randn(4), "part of a larger memory": large[:, :40],
        "conjugated": torch.complex(large, large).conj(), "negated": torch.complex(large, large).conj().imag,
    }[name]  # fmt: skip
    offload = ActivationOffload(block, torch.device("cpu"))
    assert packed(offload, tensor) is tensor and offload.buffers.peak_bytes == 0


@pytest.mark.parametrize("shape", [(64, 40), (4,)])
def test_a_tensor_that_changes_after_it_was_saved_is_an_error(shape: tuple[int, ...]) -> None:
    """Whether it goes or stays."""
    offload, tensor = ActivationOffload(nn.Linear(1, 1), torch.device("cpu")), torch.randn(shape)
    with pytest.raises(SavedTensorChangedError, match="was changed in place"):
        with first_slice(offload) as hooks:
            saved = hooks.pack_hook(tensor)
            tensor.add_(1)
        hooks.unpack_hook(saved)


def test_an_evaluation_and_slices_whose_backward_is_near_save_as_ever() -> None:
    offload = ActivationOffload(nn.Linear(1, 1), torch.device("cpu"))
    for batch in (Batch(training=False), Batch(build("1f1b", 1, 4, 1))):
        offload.open_batch(batch)  # type: ignore[arg-type]
        for action in computations(batch):
            offload.begin(action)
            assert not hasattr(offload.saving((0, *action.unit)), "pack_hook")


def test_host_buffers_are_no_memory_of_the_device() -> None:
    buffers = HostBuffers(is_pinned=False)
    with MemoryPeak() as peak:
        one = buffers.take(1 << 20)
    one.fill_(7)
    assert peak.grown_bytes < 1 << 10 and buffers.live_bytes == 1 << 20
    buffers.give(one)
    num_open = len(os.listdir("/proc/self/fd"))
    assert buffers.take(1 << 20) is one
    more = [buffers.take(1 << 19), buffers.take(1 << 19)]
    assert [each.fill_(k).numel() for k, each in enumerate(more)] == [1 << 19] * 2 and one.eq(7).all()
    assert more[0].eq(0).all() and more[1].eq(1).all()
    assert [each.untyped_storage().nbytes() for each in more] == [1 << 19] * 2
    assert len(os.listdir("/proc/self/fd")) == num_open  # a long batch has more buffers than a process may have files


def test_memory_is_pinned_between_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning may wait for the whole device, even for receives that wait for this rank."""
    made: list[tuple[int, bool]] = []

    def new(buffers: HostBuffers, num_bytes: int, is_pinned: bool = False) -> Tensor:
        made.append((num_bytes, is_pinned))
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(HostBuffers, "_new", new)
    buffers = HostBuffers(is_pinned=True)

    def run_batch(*sizes: int) -> list[int]:
        buffers.begin_batch()
        taken = [buffers.take(size) for size in sizes]
        for each in taken:
            buffers.give(each)
        return [each.numel() for each in taken]

    assert run_batch(3000, 4096, 5000) == [4096, 4096, 8192] and made == [(4096, False)] * 2 + [(8192, False)]
    made.clear()
    buffers.begin_batch()
    assert made == [(4096, True)] * 2 + [(8192, True)]
    # the sizes of torch's own pinned memory, so that other lengths take the same buffers, and batches may alternate
    made.clear()
    assert run_batch(2500) == [4096] and run_batch(4096, 2049, 8000) == [4096, 4096, 8192] and not made
    assert buffers.reserved_bytes == 4096 * 2 + 8192 and buffers.live_bytes == 0
