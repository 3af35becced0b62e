"""Process groups of a pipeline: one per direction of traffic, and one on the CPU for headers and announcements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.runtime.header import TensorPeers
from terapipe_ds.runtime.link import Wire
from terapipe_ds.runtime.staging import needs_staging


@dataclass(frozen=True)
class PipelineGroups:
    """The groups of the pipeline this rank is in; the first three are None with one stage.

    Forward and backward traffic have groups of their own, so that an activation never waits behind a gradient.
    """

    ranks: tuple[int, ...]
    activations: Any = None
    gradients: Any = None
    control: Any = None
    everyone: Any = None  # all ranks, on the CPU; None where this pipeline is the only one
    peers: TensorPeers | None = None  # the tensor-parallel ranks of this one, itself among them; None where it is alone

    @property
    def num_replicas(self) -> int:
        """Pipelines with data of their own; tensor-parallel peers have the same and are one."""
        if self.peers is not None:
            return self.peers.num_replicas
        return 1 if self.everyone is None else torch_dist.get_world_size() // len(self.ranks)

    @property
    def world(self) -> Any:
        """A group of all ranks on the CPU; None for a single rank."""
        return self.everyone if self.everyone is not None else self.control

    def wire(self, what: str, stage_id: int, towards: bool, device: torch.device) -> Wire:
        """The wire of ``what`` ("activations" or "gradients") to (``towards``) or from ``stage_id``."""
        group = self.activations if what == "activations" else self.gradients
        name = f"{what} {'to' if towards else 'from'} stage {stage_id} (rank {self.ranks[stage_id]})"
        return Wire(self.ranks[stage_id], group, self.control, device, name, needs_staging(group, device))

    def connect(self, stage_id: int, device: torch.device) -> None:
        """Send one number over each link, in an order that cannot deadlock.

        NCCL connects two ranks when they first meet and blocks until both are there; in the middle of a batch one could
        wait on the activations and the other on the gradients.
        """
        for first in (0, 1):  # links 0-1, 2-3, ... and then 1-2, 3-4, ...: a stage has one of each
            upper = stage_id if stage_id % 2 == first else stage_id - 1
            if upper < 0 or upper + 1 >= len(self.ranks):
                continue
            for group, sender in ((self.activations, upper), (self.gradients, upper + 1)):
                number = torch.zeros(1, device="cpu" if needs_staging(group, device) else device)
                if stage_id == sender:
                    torch_dist.send(number, self.ranks[2 * upper + 1 - sender], group=group)
                else:
                    torch_dist.recv(number, self.ranks[sender], group=group)


def make_pipeline_groups(grid: Any) -> PipelineGroups:
    """Groups for every pipeline of DeepSpeed's ``grid``; a collective over all ranks, which make all groups in one
    order."""
    world = list(range(torch_dist.get_world_size()))
    everyone = torch_dist.new_group(world, backend="gloo") if len(world) > grid.pipe_parallel_size else None
    peers = _tensor_peers(grid)
    mine = PipelineGroups(ranks=(torch_dist.get_rank(),), everyone=everyone, peers=peers)
    if grid.pipe_parallel_size == 1:
        return mine
    for ranks in grid.topology().get_axis_comm_lists("pipe"):
        activations, gradients = torch_dist.new_group(ranks), torch_dist.new_group(ranks)
        control = torch_dist.new_group(ranks, backend="gloo")
        if torch_dist.get_rank() in ranks:
            mine = PipelineGroups(tuple(ranks), activations, gradients, control, everyone, peers)
    return mine


def _tensor_peers(grid: Any) -> TensorPeers | None:
    if grid.get_slice_parallel_world_size() == 1:
        return None
    replica_id, num_replicas = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    return TensorPeers(tuple(grid.slice_group), grid.get_stage_id(), replica_id, num_replicas)
