"""Describe the machines, and time messages and collectives between their devices."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from terapipe_ds.costs.devices import DeviceCard, LinkCard, device_card
from terapipe_ds.messages import show_value
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.strategy import Grid

_NCCL_BUFFER_BYTES = 4 * 2**20
"""Of each channel to each peer: the default of NCCL_BUFFSIZE (NCCL user guide, environment variables)."""

_WIRE_CHANNELS, _RING_CHANNELS = 4, 32
"""Channels of a communicator: the limit that the engine gives to wires (`max_ctas`), and the most that NCCL takes."""

Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Describe equal nodes of equal devices. Each rate is for one device's link in one direction.

    Args:
        device: the name of a device card, or a card.
        nodes, devices_per_node: their numbers; rank r has device r % devices_per_node of node r // devices_per_node.
        within_bytes_per_s: between devices of a node; None: the card's.
        between_bytes_per_s: between devices of different nodes; None: the card's.
        node_bytes_per_s: of all links of a node to other nodes together, where its devices share a network card. A
            message shares it with the messages of the node's other replicas and tensor ranks, and a sum with all sums
            of the node's devices. None: each device has its own link.
        within_latency_s: of a message between devices of a node; None: the card's.
        between_latency_s: of a message between devices of different nodes; None: the card's.

    Raises:
        PlannerError: a number that no cluster has. DeviceError: an unknown device.
    """

    device: DeviceCard | str
    nodes: int
    devices_per_node: int
    _: KW_ONLY
    within_bytes_per_s: float | None = None
    between_bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None
    within_latency_s: float | None = None
    between_latency_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        rates = ("within_bytes_per_s", "between_bytes_per_s", "node_bytes_per_s")
        for name in (*rates, "within_latency_s", "between_latency_s"):
            value, is_rate = getattr(self, name), name.endswith("bytes_per_s")
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (is_rate and not value):
                least = "> 0" if is_rate else ">= 0"
                raise PlannerError(f"{name} = {show_value(value)}: give a finite number {least}")
        _ = self.card

    @cached_property
    def card(self) -> DeviceCard:
        return device_card(self.device) if isinstance(self.device, str) else self.device

    def shared(self, streams: int) -> LinkCard:
        """Return the link of one device to other nodes while `streams` devices of its node use theirs."""
        if self.node_bytes_per_s is None:
            return self.between
        rate = min(self.between.bandwidth_bytes_per_s, self.node_bytes_per_s / streams)
        return LinkCard(rate, self.between.latency_s)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def process_bytes(self, grid: Grid) -> int:
        """Return the bytes of a process outside of torch's allocator: CUDA's context and the buffers of NCCL.

        The context is the card's: for NVIDIA's cards 1,343 MiB, the measured bytes of a process with one small tensor
        (Hugging Face, documentation of transformers, "Model training anatomy"). A stage has two wires to each
        neighbour, a communicator each; the groups of replicas, and of tensor or sequence ranks, have another, with
        buffers towards both neighbours in a ring.
        """
        if self.card.context_bytes is None:
            return 0
        wires = 4 * _WIRE_CHANNELS * (grid.pipe > 1)
        rings = 2 * _RING_CHANNELS * ((grid.data > 1) + (max(grid.model, grid.sequence) > 1))
        return self.card.context_bytes + (wires + rings) * _NCCL_BUFFER_BYTES

    @cached_property
    def within(self) -> LinkCard:
        return _link(self.card.node_link, self.within_bytes_per_s, self.within_latency_s)

    @cached_property
    def between(self) -> LinkCard:
        return _link(self.card.network_link, self.between_bytes_per_s, self.between_latency_s)

    @cached_property
    def host_link(self) -> LinkCard:
        """Return the link of a device to its host; a card without one has PCIe 3.0 with 16 lanes."""
        return self.card.host_link or LinkCard(12e9, 10e-6, "PCIe 3.0 x16: 15.75 GB/s, about 12 reached")

    def link_between(self, grid: Grid, stage_id: int, to: int) -> LinkCard:
        """Return the slowest link between two stages, over all replicas."""
        nodes = self._nodes(grid)
        leaving = nodes[stage_id][nodes[stage_id] != nodes[to]]
        return self.shared(_most_alike(leaving)) if leaving.size else self.within

    def all_reduce_s(self, grid: Grid, num_bytes: float, stage_id: int) -> float:
        """Return the seconds of a sum over the replicas of a stage, each of `num_bytes`.

        As in NCCL, rings go through all n replicas. There are as many rings as a node has replicas, so that each
        device's link to other nodes carries one ring. Every hop carries 2 (n - 1) / n of the bytes, and the slowest hop
        sets the pace.
        """
        replicas = grid.data * grid.sequence
        if replicas == 1:
            return 0.0
        # groups that sum, by stage and tensor rank; sequence ranks have the same parameters
        places = self._nodes(grid).reshape(grid.pipe, replicas, grid.model)
        counts = Counter(places[stage_id, :, 0].tolist())
        hop = self.within
        if len(counts) > 1:
            streams = 1
            if self.node_bytes_per_s is not None:
                spread = (places != places[:, :1]).any(axis=1, keepdims=True)
                streams = _most_alike(places[np.broadcast_to(spread, places.shape)])
            one = self.shared(streams)
            rate = min(counts.values()) * one.bandwidth_bytes_per_s
            if max(counts.values()) > 1:
                rate = min(rate, self.within.bandwidth_bytes_per_s)
            hop = LinkCard(rate, one.latency_s)
        return 2 * (replicas - 1) * (num_bytes / replicas / hop.bandwidth_bytes_per_s + hop.latency_s)

    def fullest_node(self, grid: Grid, of_stages: Floats) -> float:
        """Return the largest sum over the ranks of a node, of a number that each rank of a stage has."""
        nodes = self._nodes(grid)
        weights = np.broadcast_to(of_stages[:, None, None], nodes.shape)
        return float(np.bincount(nodes.ravel(), weights.ravel()).max())

    def _nodes(self, grid: Grid) -> np.typing.NDArray[np.int64]:
        return grid.ranks // self.devices_per_node


def _most_alike(nodes: np.typing.NDArray[np.int64]) -> int:
    """Return the number of entries of the most frequent node."""
    return int(np.bincount(nodes.ravel()).max())


def _link(card: LinkCard, bytes_per_s: float | None, latency_s: float | None) -> LinkCard:
    """Return a card's link; a number that is not None replaces the card's."""
    rate = card.bandwidth_bytes_per_s if bytes_per_s is None else bytes_per_s
    return LinkCard(rate, card.latency_s if latency_s is None else latency_s)
