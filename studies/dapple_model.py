"""Compute DAPPLE's own model of synchronous pipelines (Fan et al., PPoPP 2021, arXiv 2007.01045), as a check of ours.

A plan cuts a chain of layers into stages. A stage has any number of devices, and each computes its share of every
micro-batch. Between two stages stands their communication, a stage of its own with an F and a B of the same time.
With S stages of both kinds, stage x runs S - x micro-batches ahead:

    f(i, x) = max(b(i - (S - x), x), f(i - 1, x), f(i, x - 1)) + F_x
    b(i, x) = max(b(i, x + 1), b(i - 1, x), f(i + (S - x) - 1, x)) + B_x

A step ends when every stage of layers has run its last B and then has reduced its gradients. Nothing hides this.

In terms of this package that is the schedule `1f1b` of S stages without links, to the last bit of order: stage x of
`1f1b` runs S - x forwards, then one backward and one forward in turns, so that F of micro-batch i comes directly after
B of i - (S - x), and B of i directly after F of i + (S - x) - 1. Of K stages of layers, k is stage 2k of S = 2K - 1,
with 2(K - k) - 1 forwards ahead: the order of `dapple` with its policy "B". That schedule with `send_s` is not the same
thing, and never slower: there a link has one wire per direction, here both directions take turns on one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("dapple_published.json")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Hold layers in a row: seconds of forward and backward and bytes of output of one micro-batch on one device.

    `charges_borders_twice`: a stage is also charged for the first layer of the next one, time and parameters, as the
    published speed-ups of DAPPLE's plans are; otherwise each layer counts once.
    """

    layer_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    num_micro_batches: int
    charges_borders_twice: bool = False

    @cached_property
    def stage_s(self) -> Array:
        """Return the seconds of a stage on one device, forward and backward, as an array [start, stop]."""
        return self._sums(self.layer_s)

    @cached_property
    def stage_bytes(self) -> Array:
        """Return the bytes of the parameters of a stage, as an array [start, stop]."""
        return self._sums(self.parameter_bytes)

    def _sums(self, values: Sequence[float]) -> Array:
        sums = np.cumsum([0.0, *values])
        stops = np.arange(len(sums))
        if self.charges_borders_twice:
            stops = np.minimum(stops + 1, len(values))
        found: Array = sums[stops][None, :] - sums[:, None]
        return found


@dataclass(frozen=True)
class DappleCluster:
    """Describe machines with equal devices. Device d is in machine d // devices_per_machine."""

    machines: int
    devices_per_machine: int
    nvlink_bytes_per_s: float
    ethernet_p2p_bytes_per_s: float
    ethernet_collective_bytes_per_s: float

    def machine(self, device: int) -> int:
        """Return the machine of a device."""
        return device // self.devices_per_machine

    def reduce_s(self, devices: Sequence[int]) -> float:
        """Return the seconds that the all-reduce of one byte of gradients takes."""
        return self.reduce_of(len(devices), len({self.machine(device) for device in devices}))

    def reduce_of(self, count: int, machines: int) -> float:
        """Return `reduce_s` for these numbers of devices and machines."""
        if count == 1:
            return 0.0
        if machines == 1:
            return 2 * (count - 1) / count / self.nvlink_bytes_per_s / (count // 2)
        return 2 * (count - 1) / count / self.ethernet_collective_bytes_per_s

    def transfer_s(self, senders: Sequence[int], receivers: Sequence[int]) -> float:
        """Return the seconds that one byte of a micro-batch's output takes from one stage to the next."""
        targets = {self.machine(device) for device in receivers}
        outside = sum(self.machine(device) not in targets for device in senders)
        return self.transfer_of(outside / len(senders), len(targets))

    def transfer_of(self, share_outside: float, machines: int) -> float:
        """Return `transfer_s` to receivers in this number of machines; a share of the senders is outside of them."""
        if machines > 1:
            return 1 / self.ethernet_collective_bytes_per_s
        return share_outside / self.ethernet_p2p_bytes_per_s if share_outside else 1 / self.nvlink_bytes_per_s


@dataclass(frozen=True)
class PipelinePlan:
    """Hold a plan: stage k has the layers from `cuts[k]` up to, but without, `cuts[k + 1]`, and `devices[k]`.

    `replicas[k]` divides the work of stage k; None: the number of its devices.
    """

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...] | None = None

    @property
    def shape(self) -> str:
        """Return the number of layers and of devices of each stage: `20@31 5@1`."""
        spans = zip(self.cuts, self.cuts[1:], self.devices, strict=False)
        return " ".join(f"{stop - start}@{len(devices)}" for start, stop, devices in spans)


def early_backward_ends(forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int) -> list[float]:
    """Return when each stage ends its last backward, by the recurrence at the top.

    In round i every stage, from the first on, runs its forwards up to micro-batch i + (S - x) - 1. Then every stage,
    from the last on, runs the backward of i: each value that the recurrence needs is known by then.
    """
    num_stages = len(forward_s)
    f = [[0.0] * num_stages for _ in range(num_micro_batches)]
    b = [[0.0] * (num_stages + 1) for _ in range(num_micro_batches)]
    run = [0] * num_stages
    for i in range(num_micro_batches):
        for x in range(num_stages):
            lead = num_stages - x
            for j in range(run[x], min(i + lead, num_micro_batches)):
                before = b[j - lead][x] if j >= lead else 0.0
                previous = f[j - 1][x] if j else 0.0
                f[j][x] = max(before, previous, f[j][x - 1] if x else 0.0) + forward_s[x]
            run[x] = min(i + lead, num_micro_batches)
        for x in reversed(range(num_stages)):
            ahead = f[min(i + num_stages - x, num_micro_batches) - 1][x]
            b[i][x] = max(b[i][x + 1], b[i - 1][x] if i else 0.0, ahead) + backward_s[x]
    return b[-1][:num_stages]


def plan_s(chain: Chain, cluster: DappleCluster, plan: PipelinePlan) -> float:
    """Return the seconds of a step of any plan under DAPPLE's costs: stages, communications, all-reduces."""
    times_s = []
    for k, (start, stop) in enumerate(zip(plan.cuts, plan.cuts[1:], strict=False)):
        if k:
            sent_s = cluster.transfer_s(plan.devices[k - 1], plan.devices[k])
            times_s.append(chain.output_bytes[start - 1] * sent_s)
        times_s.append(float(chain.stage_s[start, stop]) / 2 / (plan.replicas or [*map(len, plan.devices)])[k])
    ends = early_backward_ends(times_s, times_s, chain.num_micro_batches)[::2]
    spans = zip(plan.cuts, plan.cuts[1:], plan.devices, ends, strict=False)
    return max(
        end + float(chain.stage_bytes[start, stop]) * cluster.reduce_s(devices) for start, stop, devices, end in spans
    )


def speedup(chain: Chain, cluster: DappleCluster, plan: PipelinePlan) -> float:
    """Return the time of a step on one device over the time of a plan's step."""
    return sum(chain.layer_s) * chain.num_micro_batches / plan_s(chain, cluster, plan)


@dataclass(frozen=True)
class PublishedModel:
    """Hold a profiled chain, plans for it by name, and the published speed-ups of these plans."""

    name: str
    chain: Chain
    plans: dict[str, PipelinePlan]
    speedups: dict[str, float]


def published() -> tuple[DappleCluster, list[PublishedModel]]:
    """Return the cluster of the published plans, and the models. The chains charge borders once."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return DappleCluster(**data["cluster"]), [_model(entry) for entry in data["models"]]


def _model(entry: dict[str, Any]) -> PublishedModel:
    """Take the profile at the size of a micro-batch, and the spans of layers as cuts.

    A published span has the index of its first entry and of its last one, and the next span begins with that same
    entry: the last span of VGG-19 ends at 24 of the entries 0 to 24.
    """
    share = entry["micro_batch"] / entry["profile_micro_batch"]
    scaled = {key: tuple(share * value for value in entry[key]) for key in ("forward_backward_s", "output_bytes")}
    chain = Chain(
        scaled["forward_backward_s"],
        tuple(entry["parameter_bytes"]),
        scaled["output_bytes"],
        entry["global_batch"] // entry["micro_batch"],
    )
    plans = {
        name: PipelinePlan(
            (*(first for first, _ in given["layers"]), given["layers"][-1][1] + 1),
            tuple(map(tuple, given["devices"])),
            tuple(given["replicas"]) if "replicas" in given else None,
        )
        for name, given in entry["plans"].items()
    }
    return PublishedModel(entry["name"], chain, plans, {name: g["speedup"] for name, g in entry["plans"].items()})
