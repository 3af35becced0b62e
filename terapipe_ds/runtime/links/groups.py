"""Make the process groups of a pipeline: for each direction of traffic, and one on the CPU for announcements.

gloo matches messages by tags, whatever the order in which they were posted, and needs one group per direction. NCCL
has no tags. The messages that a rank posts in one group run in the order of posting, at least if a device is bound to
the process group, as DeepSpeed binds it. A send to the next stage would wait for receives that were posted ahead from
the stage before, and from four stages on some wait for one another in a circle. So with NCCL no two wires of a stage
share a group. Wires that have no stage in common do, which makes two groups per direction on a line.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import gather
from terapipe_ds.runtime.batch.batch_agreement import PlaceInJob, TensorPeers
from terapipe_ds.runtime.layout.layout import Layout, WireEnds, rounds_of
from terapipe_ds.runtime.layout.sequence_axis import peers_of
from terapipe_ds.runtime.links.channel import NO_LIMIT, Wire
from terapipe_ds.runtime.links.queues import loads_kernels_at_start, queue_count
from terapipe_ds.runtime.links.staging import needs_staging

MOST_CTAS = 4
"""Blocks of a kernel that carries a message. NCCL takes up to 16 of them over NVLink, and each occupies a
multiprocessor for as long as a receive waits."""

MOST_STREAMS = 32
"""CUDA streams of one priority that torch hands out, in turn (c10/cuda/CUDAStream.cpp): further groups share them."""


@dataclass(frozen=True)
class Wires:
    """Hold the wires of one stage, by their ends in the layout; `PipelineGroups.connect` has sent a number on each."""

    by_ends: Mapping[WireEnds, tuple[Wire, Wire]]  # of activations, from the first end to the other; of gradients back
    num_queues: int | None = None  # hardware queues of the device with fewest; None without streamed wires
    loads_at_start: bool = False  # every rank has loaded all kernels, and both ends of a wire know it

    @property
    def post_on_device(self) -> bool:
        """Tell whether a receive that is posted ahead occupies the device while it waits for its message."""
        return any(wire.device.type != "cpu" and not wire.staged for both in self.by_ends.values() for wire in both)


@dataclass(frozen=True)
class PipelineGroups:
    """Hold the groups of this rank's pipeline."""

    ranks: tuple[int, ...]
    # for each wire the group of activations and the group of gradients, so that neither waits behind the other
    by_wire: Mapping[WireEnds, tuple[Any, Any]] = field(default_factory=dict)
    control: Any = None  # the group of the pipeline on the CPU; None with one stage
    everyone: Any = None  # the group of all ranks, on the CPU; None if this pipeline is the only one
    peers: TensorPeers | None = None  # the tensor-parallel or sequence ranks, with this one; None if it is alone
    index: int = 0  # the number of this pipeline among all `count` pipelines
    count: int = 1

    @property
    def num_replicas(self) -> int:
        """Return the number of pipelines with data of their own; tensor-parallel and sequence peers count as one."""
        if self.peers is not None:
            return self.peers.num_replicas
        return 1 if self.everyone is None else torch_dist.get_world_size() // len(self.ranks)

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """Return the tensor-parallel ranks of this rank, including itself; none if it is alone."""
        return () if self.peers is None else self.peers.ranks

    @property
    def world(self) -> Any:
        """Return a group of all ranks on the CPU; None for a single rank."""
        return self.everyone if self.everyone is not None else self.control

    def leave_hangs_to_watchdog(self) -> None:
        """Let no wait of these groups end by torch's own limit.

        A receive that is posted ahead waits from the first action of a batch on: over NCCL torch would end a job whose
        stages compute for 10 minutes before its message. Over gloo it would end a job that draws its data for half an
        hour, whatever `data_timeout_s` is.
        """
        for group in self._groups():
            for kind in group._device_types:  # noqa: SLF001 - as torch's own function, which knows no subclass of gloo's
                backend = group._get_backend(kind)
                backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
                if hasattr(backend, "_set_default_timeout"):  # others than NCCL and gloo may know no limit
                    backend._set_default_timeout(NO_LIMIT)  # noqa: SLF001

    def close(self) -> None:
        """Close the connections of gloo, which are files; connections of devices end with the process group."""
        for group in self._groups() if torch_dist.is_initialized() else ():
            if torch_dist.get_backend(group) == "gloo":
                torch_dist.destroy_process_group(group)

    def _groups(self) -> list[Any]:
        groups = self.control, self.everyone, *itertools.chain(*self.by_wire.values())
        return list({id(group): group for group in groups if group}.values())

    def place(self, layout: Layout, stage_id: int) -> PlaceInJob:
        """Return the place of this rank among those that agree on a batch."""
        stage = stage_id, len(self.ranks), layout.drawing_stages, layout.loss_stage
        return PlaceInJob(*stage, self.control, self.world, self.index, self.count, self.peers, layout.owner(0))

    def connect(self, layout: Layout, stage_id: int, device: torch.device) -> Wires:
        """Send one number over each wire, all stages in one order, which cannot deadlock; return this stage's wires.

        NCCL connects two ranks at the first message between them in a group, and blocks until both take part. In the
        middle of a batch one rank could wait on the activations and the other on the gradients.
        """
        connected: dict[WireEnds, tuple[Wire, Wire]] = {}
        # Wires of even stages first: two neighbours then never both send, or both receive, at the same time
        for ends in sorted(layout.wires(), key=lambda ends: (ends[0] % 2, ends)):
            source, _, target, _ = ends
            if stage_id not in (source, target):
                continue
            peer_id, tag = target if stage_id == source else source, layout.tag(ends)
            both = []
            # Activations go from the source, gradients from the target, each in a group of its own
            for what, sender, group in zip(
                ("activations", "gradients"), (source, target), self.by_wire[ends], strict=True
            ):
                sends, peer, staged = stage_id == sender, self.ranks[peer_id], needs_staging(group, device)
                name = f"{what} {'to' if sends else 'from'} stage {peer_id} (rank {peer})"
                streamed = torch_dist.get_backend(group) != "gloo" and not staged
                both.append(Wire(peer, group, self.control, device, name, staged, streamed, peer_id, tag))
                # The first message connects the two ranks, which blocks until both take part
                number = torch.zeros(1, device="cpu" if staged else device)
                exchange = torch_dist.send if sends else torch_dist.recv
                exchange(number, peer, group=group, tag=tag)
            connected[ends] = both[0], both[1]
        if not any(wire.streamed for both in connected.values() for wire in both):
            return Wires(connected)
        # Variables of the environment may differ between machines
        queues, at_start = zip(*gather((queue_count(), loads_kernels_at_start()), self.world), strict=True)
        return Wires(connected, min(queues), all(at_start))


def make_pipeline_groups(grid: Any, layout: Layout) -> PipelineGroups:
    """Make the groups of all pipelines of DeepSpeed's `grid`, in one order; return this rank's. A collective."""
    num_ranks, rank, peers = torch_dist.get_world_size(), torch_dist.get_rank(), None
    # gloo tells wires apart by tags. With NCCL no two wires of one stage may share a group, nor its stream
    rounds = wires_apart(layout) if _keeps_order() else [layout.wires()]
    if 2 * len(rounds) > MOST_STREAMS:
        raise TeraPipeConfigError(
            f"the parts of the stages ({layout.chunks_per_stage} each) need {2 * len(rounds)} groups of NCCL for their "
            f"messages, and torch has {MOST_STREAMS} streams for them: two groups would share one, and a message that "
            "waits there would hold back the other group's for ever. Give a smaller terapipe.chunks_per_stage"
        )
    # Every rank makes all groups in the same order, even those that it is not in: torch requires it
    everyone = torch_dist.new_group(backend="gloo") if num_ranks > grid.pipe_parallel_size else None
    if (of_replica := peers_of(grid)) is not None:
        replica_id, num_replicas = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
        kind = "tensor-parallel" if grid.get_slice_parallel_world_size() > 1 else "sequence"
        peers = TensorPeers(of_replica, grid.get_stage_id(), replica_id, num_replicas, kind)
    own = PipelineGroups((rank,), everyone=everyone, peers=peers, index=rank, count=num_ranks)
    if grid.pipe_parallel_size == 1:
        return own
    # pipelines may share a group: they have no rank in common, and where a device is bound, each group is a collective
    # over the whole job
    shared = [(_wire_group(), _wire_group()) for _ in rounds] if _keeps_order() else None
    pipelines = grid.topology().get_axis_comm_lists("pipe")
    # with a bound device ranks outside take part even in a group over gloo: each is outside of all pipelines but one.
    # No `use_local_synchronization`: torch (2.11 to 2.14) derives its names of groups from the number of a rank's
    # groups, which differs between ranks if tied layers or Megatron have groups of some ranks only
    for index, ranks in enumerate(pipelines):
        groups = shared or [(torch_dist.new_group(ranks), torch_dist.new_group(ranks))]
        control = torch_dist.new_group(ranks, backend="gloo")
        by_wire = {ends: pair for wires, pair in zip(rounds, groups, strict=True) for ends in wires}
        if rank in ranks:
            own = PipelineGroups(tuple(ranks), by_wire, control, everyone, peers, index, len(pipelines))
    return own


def _wire_group() -> Any:
    """Make a group of all ranks whose kernels start early and occupy few multiprocessors: a receive waits in one."""
    made = getattr(torch_dist, "ProcessGroupNCCL", None)
    if made is None or "nccl" not in torch_dist.get_backend():  # "cpu:gloo,cuda:nccl" has both
        return torch_dist.new_group()
    options = made.Options()
    options.is_high_priority_stream = True
    if "NCCL_MAX_CTAS" not in os.environ:  # keep a user's number
        options.config.max_ctas = MOST_CTAS
    return torch_dist.new_group(backend="nccl", pg_options=options)


def _keeps_order() -> bool:
    """Return whether the backend runs the messages of a group in the order of posting, since it has no tags."""
    return torch_dist.get_backend() != "gloo"


def wires_apart(layout: Layout) -> list[list[WireEnds]]:
    """Return the wires of a layout in groups; no group has two wires of one stage."""
    return rounds_of(layout.wires(), ends=lambda wire: (wire[0], wire[2]))
