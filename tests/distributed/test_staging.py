"""Messages by way of the host's memory: forced where there is no device, and for real where there is one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from terapipe_ds.runtime import groups, link
from tests.distributed.engines import EXACT, Run, batches, both, train
from tests.distributed.harness import rank_pool


def _train_staged() -> tuple[Run, Run, int]:
    """A stock run and one of ours whose messages are all staged, and how many were."""
    copies = []

    def counted(tensor: Tensor) -> Tensor:
        copies.append(tensor.numel())
        return tensor.clone()

    data = batches(2)
    always = mock.patch.object(groups, "needs_staging", lambda group, device: True)
    with always, mock.patch.object(link, "to_host", counted):
        stock, ours = both(lambda engine: train(engine, data))
    return stock, ours, len(copies)


def test_staged_messages_train_as_the_stock_engine_does() -> None:
    for stock, ours, copies in rank_pool(2).run(_train_staged):
        assert copies == 2 * 2 * 3  # steps, micro-batches, slices: one message each from either stage
        assert ours.losses == pytest.approx(stock.losses, rel=EXACT)
        for step, gradients in enumerate(stock.gradients):
            for name, gradient in gradients.items():
                assert torch.allclose(ours.gradients[step][name], gradient, rtol=1e-9, atol=1e-12), name


def _exchange(device: torch.device) -> bool:
    """A message from rank 0 to rank 1 by way of the host; whether the buffers were pinned."""
    from torch import distributed

    from terapipe_ds.runtime.layout import Layout
    from terapipe_ds.runtime.link import MessageSpec, ReceiveChannel, SendChannel, TensorSpec

    rank, everyone = distributed.get_rank(), distributed.group.WORLD
    layout = Layout.plain(2)
    (ends,) = layout.wires()
    made = groups.PipelineGroups((0, 1), {ends: (everyone, everyone)}, everyone)
    wire = made.connect(layout, rank, device).activations(ends)
    spec = MessageSpec((TensorSpec((4, 8), torch.bfloat16, True),), is_tuple=False)
    values = torch.arange(32, device=device, dtype=torch.bfloat16).view(4, 8)
    assert wire.staged
    if rank == 0:
        sending = SendChannel(wire)
        sending.send([values], consumed_at=0)
        sending.flush()
        pinned = wire.outgoing(values).is_pinned()
    else:
        receiving = ReceiveChannel(wire, lambda unit: spec, lambda unit: None)
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
    """Two stages on one device, which NCCL refuses."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    assert _exchange(torch.device("cuda", 0))


@pytest.mark.gpu
def test_two_ranks_share_a_device_over_gloo() -> None:
    from terapipe_ds.bench.ranks import spawn_ranks

    spawn_ranks(_over_gloo, 2, {})
