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


def _over_gloo(rank: int, rendezvous: str, given: dict[str, Any]) -> None:
    """Two stages on one device, which NCCL refuses: a message there and a sum back."""
    from torch import distributed

    from terapipe_ds.runtime.link import MessageSpec, ReceiveChannel, SendChannel, TensorSpec
    from terapipe_ds.runtime.staging import needs_staging

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    device = torch.device("cuda", 0)
    assert needs_staging(None, device)
    made = groups.PipelineGroups((0, 1), distributed.group.WORLD, distributed.group.WORLD, distributed.group.WORLD)
    made.connect(rank, device)
    spec = MessageSpec((TensorSpec((4, 8), torch.bfloat16, True),), is_tuple=False)
    wire = made.wire("activations", 1 - rank, towards=rank == 0, device=device)
    values = torch.arange(32, device=device, dtype=torch.bfloat16).view(4, 8)
    if rank == 0:
        sending = SendChannel(wire)
        sending.send([values], consumed_at=0)
        sending.flush()
    else:
        receiving = ReceiveChannel(wire, lambda unit: spec, lambda unit: None)
        receiving.post((0, 0))
        _, (came,) = receiving.wait((0, 0))
        assert came.device == device and torch.equal(came, values)
    distributed.barrier()


@pytest.mark.gpu
def test_two_ranks_share_a_device_over_gloo() -> None:
    from terapipe_ds.bench.ranks import spawn_ranks

    spawn_ranks(_over_gloo, 2, {})
