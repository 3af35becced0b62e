"""Process groups of a pipeline: for each direction of traffic, and one on the CPU for headers and announcements.

gloo matches messages by tags, whatever the order in which they were posted, and needs one group per direction. NCCL
knows no tags, and what a rank posts in one group it runs in the order in which it was posted (always so where a device
is bound to the process group, as DeepSpeed binds it). A send to the next stage would wait for receives that were posted
ahead from the stage before, and from four stages on some wait for one another in a circle. So there all wires of a
stage are in groups of their own; wires that have no stage in common share one, which makes two per direction on a line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.runtime.header import TensorPeers
from terapipe_ds.runtime.layout import Layout, rounds_of
from terapipe_ds.runtime.link import Wire
from terapipe_ds.runtime.staging import needs_staging

logger = logging.getLogger("terapipe_ds")


@dataclass(frozen=True)
class PipelineGroups:
    """The groups of the pipeline this rank is in; the first three are None with one stage.

    Forward and backward traffic have groups of their own, so that an activation never waits behind a gradient.
    ``by_wire``: those of each wire, (source stage, stage, tag), where the backend keeps the order of what is posted.
    """

    ranks: tuple[int, ...]
    activations: Any = None
    gradients: Any = None
    control: Any = None
    everyone: Any = None  # all ranks, on the CPU; None where this pipeline is the only one
    peers: TensorPeers | None = None  # the tensor-parallel ranks of this one, itself among them; None where it is alone
    by_wire: Mapping[tuple[int, int, int], tuple[Any, Any]] = field(default_factory=dict)

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

    def wire(self, what: str, stage_id: int, towards: bool, device: torch.device, tag: int | None = None) -> Wire:
        """The wire of ``what`` ("activations" or "gradients") to (``towards``) or from ``stage_id``.

        Args:
            tag: tells it from others between the same stages, see ``Layout.tag``; None: between any two stages, where
                nothing is posted ahead.
        """
        activations, gradients = self.activations, self.gradients
        if self.by_wire and tag is not None:
            own_id = self.ranks.index(torch_dist.get_rank())
            ends = (own_id, stage_id) if towards == (what == "activations") else (stage_id, own_id)
            activations, gradients = self.by_wire[(*ends, tag)]
        group = activations if what == "activations" else gradients
        name = f"{what} {'to' if towards else 'from'} stage {stage_id} (rank {self.ranks[stage_id]})"
        staged = needs_staging(group, device)
        return Wire(self.ranks[stage_id], group, self.control, device, name, staged, stage_id, tag or 0)

    def connect(self, layout: Layout, stage_id: int, device: torch.device) -> None:
        """Send one number over each link, all stages in one order, which cannot deadlock.

        NCCL connects two ranks when they first meet and blocks until both are there; in the middle of a batch one could
        wait on the activations and the other on the gradients.
        """
        if stage_id == 0:
            self._warn_of_one_queue(device)
        for source, source_chunk, target, target_chunk in sorted(layout.wires(), key=lambda wire: (wire[0] % 2, wire)):
            tag = layout.tag(source_chunk, target_chunk)
            for what, sender, receiver in (("activations", source, target), ("gradients", target, source)):
                if stage_id not in (sender, receiver):
                    continue
                wire = self.wire(what, receiver if stage_id == sender else sender, stage_id == sender, device, tag)
                number = torch.zeros(1, device="cpu" if wire.staged else device)
                exchange = torch_dist.send if stage_id == sender else torch_dist.recv
                exchange(number, wire.peer, group=wire.group, tag=tag)

    def _warn_of_one_queue(self, device: torch.device) -> None:
        if device.type != "cuda" or self.activations is None or needs_staging(self.activations, device):
            return
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            logger.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one queue of the device, so computations may wait "
                "behind receives that are posted ahead; unset it unless tensor parallelism needs it"
            )


def make_pipeline_groups(grid: Any, layout: Layout) -> PipelineGroups:
    """Groups for every pipeline of DeepSpeed's ``grid``; a collective over all ranks, which make all groups in one
    order."""
    world = list(range(torch_dist.get_world_size()))
    everyone = torch_dist.new_group(world, backend="gloo") if len(world) > grid.pipe_parallel_size else None
    peers = _tensor_peers(grid)
    mine = PipelineGroups(ranks=(torch_dist.get_rank(),), everyone=everyone, peers=peers)
    if grid.pipe_parallel_size == 1:
        return mine
    rounds = wires_apart(layout) if _keeps_order() else [[]]
    for ranks in grid.topology().get_axis_comm_lists("pipe"):
        groups = [(torch_dist.new_group(ranks), torch_dist.new_group(ranks)) for _ in rounds]
        control = torch_dist.new_group(ranks, backend="gloo")
        by_wire = {
            (source, target, layout.tag(source_chunk, target_chunk)): pair
            for wires, pair in zip(rounds, groups, strict=True)
            for source, source_chunk, target, target_chunk in wires
        }
        if torch_dist.get_rank() in ranks:
            mine = PipelineGroups(tuple(ranks), *groups[0], control, everyone, peers, by_wire)
    return mine


def _keeps_order() -> bool:
    """Whether the backend runs what is posted in a group in that order, since it knows no tags."""
    return torch_dist.get_backend() != "gloo"


def wires_apart(layout: Layout) -> list[list[tuple[int, int, int, int]]]:
    """The wires of a layout by groups that keep the order of all that a rank posts: none holds two of one stage."""
    return rounds_of(layout.wires(), ends=lambda wire: (wire[0], wire[2])) or [[]]


def _tensor_peers(grid: Any) -> TensorPeers | None:
    if grid.get_slice_parallel_world_size() == 1:
        return None
    replica_id, num_replicas = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    return TensorPeers(tuple(grid.slice_group), grid.get_stage_id(), replica_id, num_replicas)
