"""Test messages by way of the host's memory: emulated without a device, and real with one."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.pipe import p2p
from torch import Tensor

from terapipe_ds.runtime.links import channel, groups, staging
from terapipe_ds.schedule import placement_for
from tests.distributed.engines import Run, batches, gpt_layers, run_training, unchecked, with_few_rounds
from tests.distributed.harness import rank_pool


class GlooForDevices:
    """Pretend that all computed tensors lie on a device, and that gloo only moves tensors on the host.

    The host has the copies made by staging, the integers of headers and announcements, and the number by which staged
    wires connect.
    """

    def __init__(self) -> None:
        self.on_host: set[int] = set()  # ids of tensors that this keeps
        self.kept: list[Tensor] = []
        self.taken = 0

    def to_host(self, tensor: Tensor) -> Tensor:
        return self._note(tensor.detach().clone())

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._note(torch.empty(shape, dtype=dtype))

    def _note(self, tensor: Tensor) -> Tensor:
        self.on_host.add(id(tensor))
        self.kept.append(tensor)
        return tensor

    def takes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_connection = tensor.shape == (1,) and float(tensor) == 0.0
            if tensor.is_floating_point() and id(tensor) not in self.on_host and not is_connection:
                raise RuntimeError(f"gloo cannot {call.__name__} a CUDA tensor of shape {tuple(tensor.shape)}")
            self.taken += tensor.is_floating_point() and not is_connection
            return call(tensor, *args, **kwargs)

        return checked

    def refuses(self, name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"ProcessGroupGloo::{name}: unsupported device type cuda")

        return refused

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        from torch import distributed

        with contextlib.ExitStack() as stack:
            for module in (groups, staging):
                stack.enter_context(mock.patch.object(module, "needs_staging", lambda group, device: True))
            for module, name in itertools.product((channel, staging), ("to_host", "host_buffer")):
                stack.enter_context(mock.patch.object(module, name, getattr(self, name)))
            for name in ("send", "recv", "isend", "irecv"):
                stack.enter_context(mock.patch.object(distributed, name, self.takes(getattr(distributed, name))))
            for name in ("all_reduce_coalesced", "all_gather_coalesced"):  # gloo has them on the CPU only
                stack.enter_context(mock.patch.object(distributed, name, self.refuses(name)))
            yield


def _train_on_devices_over_gloo(
    stages: int, terapipe: dict[str, Any], stock_too: bool, changes: dict[str, Any]
) -> tuple[Run, Run, int]:
    """Train stock and ours; ours, or both, with all tensors on a device and messages over gloo."""
    data, gloo = batches(2), GlooForDevices()
    dtype = "float64" if not changes else "bfloat16"

    def run(kind: dict[str, Any] | None) -> Run:
        return run_training(lambda: gpt_layers(dtype), kind, data, stages=stages, **changes)

    with gloo.installed() if stock_too else contextlib.nullcontext(), staging.neighbours_staged():
        stock = run(None)
    with gloo.installed():
        ours = run(terapipe)
    assert (gloo.taken > 0) == (stages > 1)
    return stock, ours, gloo.taken


def _same(runs: list[tuple[Run, Run, int]], tolerance: float) -> None:
    """Compare losses and parameters of all stages together: a V has layers, and the loss, on other stages."""
    stock, ours = ([run[index] for run in runs] for index in (0, 1))
    losses = [next(run.losses for run in kind if run.losses) for kind in (stock, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    right, found = ({name: p for run in kind for name, p in run.parameters.items()} for kind in (stock, ours))
    for name, parameter in right.items():
        assert torch.allclose(found[name], parameter, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(
    "terapipe", [unchecked(), unchecked(slices="auto", schedule="auto", granularity_tokens=8)], ids=["fixed", "auto"]
)
def test_stages_that_share_a_device_start_and_train(terapipe: dict[str, Any]) -> None:
    """Test DeepSpeed's start, which sends a device tensor to the next stage; the stock engine sends all this way."""
    job = {"job": _train_on_devices_over_gloo, "stages": 2, "terapipe": terapipe, "stock_too": True, "changes": {}}
    _same(rank_pool(2).run(with_few_rounds, **job), 1e-9)


def test_deepspeeds_functions_are_given_back() -> None:
    before = p2p.send, p2p.recv
    with mock.patch.object(staging, "needs_staging", lambda group, device: True):
        with pytest.raises(RuntimeError, match="stop"), staging.neighbours_staged():
            assert p2p.send is not before[0] and p2p.recv is not before[1]
            raise RuntimeError("stop")
    assert (p2p.send, p2p.recv) == before
    with mock.patch.object(staging, "needs_staging", lambda group, device: False), staging.neighbours_staged():
        assert (p2p.send, p2p.recv) == before


def _exchange(device: torch.device) -> bool:
    """Send a message from rank 0 to rank 1 by way of the host; return also whether the buffers were pinned."""
    from torch import distributed

    from terapipe_ds.runtime.layout.layout import Layout
    from terapipe_ds.runtime.links.channel import ReceiveChannel, SendChannel
    from terapipe_ds.runtime.links.specs import MessageSpec, TensorSpec

    rank, everyone = distributed.get_rank(), distributed.group.WORLD
    layout = Layout(2, placement_for("1f1b", 2, 1))
    (ends,) = layout.wires()
    made = groups.PipelineGroups((0, 1), {ends: (everyone, everyone)}, everyone)
    wire, _ = made.connect(layout, rank, device).by_ends[ends]
    spec = MessageSpec((TensorSpec((4, 8), torch.bfloat16, True),), is_tuple=False)
    values = torch.arange(32, device=device, dtype=torch.bfloat16).view(4, 8)
    assert wire.staged
    if rank == 0:
        sending = SendChannel(wire)
        sending.send([values], consumed_at=0)
        sending.keep_at_most(0)
        pinned = wire.outgoing(values).is_pinned()
    else:
        receiving = ReceiveChannel(wire, lambda unit: spec)
        receiving.post((0, 0))
        _, (came,) = receiving.wait((0, 0))
        assert came.device == device and torch.equal(came, values)
        pinned = wire.buffer(spec.tensors[0]).is_pinned()
    distributed.barrier()
    return pinned


def _exchange_on_cpu() -> bool:
    with mock.patch.object(groups, "needs_staging", lambda group, device: True):
        return _exchange(torch.device("cpu"))


def test_a_message_by_way_of_the_host() -> None:
    assert rank_pool(2).run(_exchange_on_cpu) == [False, False]


def _over_gloo(rank: int, rendezvous: str, given: dict[str, Any]) -> None:
    """Run two stages on one device, which NCCL refuses."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    assert _exchange(torch.device("cuda", 0))


@pytest.mark.gpu
def test_two_ranks_share_a_device_over_gloo() -> None:
    from terapipe_ds.bench.ranks import spawn_ranks

    spawn_ranks(_over_gloo, 2, {})
