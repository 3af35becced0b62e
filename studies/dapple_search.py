"""Search for plans under DAPPLE's costs: a dynamic program over layers and devices, with DAPPLE's three placements.

For a limit W on the seconds of F and B of any stage, it minimises

    sum of all F + max over stages x of (sum of the B from x on + all-reduce of x)

over all cuts, all numbers of devices per stage and the three placements of each. A step takes (M - 1) W longer, or less
if other stages wait during that time, so that this is an estimate. For some values of W, the search times the best plan
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from studies.dapple_model import Array, Chain, DappleCluster, PipelinePlan, plan_s

PLACEMENTS = ("fresh first", "append first", "scatter first")
LIMITS = 24

Used = tuple[int, ...]
"""Devices in use per machine, the most first."""
Shares = tuple[float, ...]
"""Per machine, which part of the devices of the last stage it has; 0 where no device is left."""
State = tuple[Used, Shares]
Integers = NDArray[np.int64]


def place(used: Sequence[int], count: int, placement: str, devices_per_machine: int) -> tuple[int, ...]:
    """Return how many devices of each machine the next stage takes.

    "fresh first" fills machines without a device in use, then the others; "append first" those with one in use, then
    the others; "scatter first" takes one device of each machine in use in turns, then of the others.
    """
    free = [devices_per_machine - busy for busy in used]
    begun = [m for m, busy in enumerate(used) if busy]
    fresh = [m for m, busy in enumerate(used) if not busy]
    taken = [0] * len(used)
    for group in (fresh, begun) if placement == "fresh first" else (begun, fresh):
        if placement == "scatter first":
            while count and any(taken[m] < free[m] for m in group):
                for m in group:
                    step = min(count, taken[m] < free[m])
                    taken[m], count = taken[m] + step, count - step
        else:
            for m in group:
                taken[m] = min(count, free[m])
                count -= taken[m]
    return tuple(taken)


@dataclass(frozen=True)
class _Step:
    """Hold one way to place the next stage, and the state that it leads to."""

    taken: tuple[int, ...]
    used: Used
    shares: Shares
    order: tuple[int, ...]  # the machines of the next state, as places in this one


@lru_cache(maxsize=4)
def _steps(machines: int, devices_per_machine: int) -> dict[Used, tuple[list[_Step], list[Shares]]]:
    """Return the steps out of every reachable set of used devices, and the shares with which it is reached.

    Machines are equal, so that only sorted numbers count. More devices in use come first: those sets are solved first.
    """
    shares_of: dict[Used, dict[Shares, None]] = {(0,) * machines: {(0.0,) * machines: None}}
    steps_of: dict[Used, list[_Step]] = {}
    for total in range(machines * devices_per_machine + 1):
        for used in [used for used in shares_of if sum(used) == total]:
            left = machines * devices_per_machine - total
            choices = [(count, name) for count in range(1, left + 1) for name in PLACEMENTS]
            ways = dict.fromkeys(place(used, count, name, devices_per_machine) for count, name in choices)
            steps_of[used] = [_step(used, taken, devices_per_machine) for taken in ways]
            for step in steps_of[used]:
                shares_of.setdefault(step.used, {})[step.shares] = None
    ordered = sorted(steps_of, key=sum, reverse=True)
    return {used: (steps_of[used], list(shares_of[used])) for used in ordered}


def _step(used: Used, taken: tuple[int, ...], devices_per_machine: int) -> _Step:
    after = [busy + more for busy, more in zip(used, taken, strict=True)]
    shares = [more / sum(taken) if busy < devices_per_machine else 0.0 for busy, more in zip(after, taken, strict=True)]
    order = sorted(range(len(used)), key=lambda m: (-after[m], -shares[m]))
    return _Step(taken, tuple(after[m] for m in order), tuple(shares[m] for m in order), tuple(order))


@dataclass(frozen=True)
class _Rest:
    """Hold the best placement of the layers from j on, per j: sum of F, max of the module, the next step, its stop."""

    forward_s: Array
    tail_s: Array
    step: Integers
    stop: Integers


class Search:
    """Run the dynamic program of one chain on one cluster."""

    def __init__(self, chain: Chain, cluster: DappleCluster) -> None:
        self.chain, self.cluster = chain, cluster
        self.steps = _steps(cluster.machines, cluster.devices_per_machine)
        stops_behind = np.triu(np.ones_like(chain.stage_s), 1) > 0
        self.stage_s = np.where(stops_behind, chain.stage_s, np.inf)
        self.sent_bytes = np.array([0.0, *chain.output_bytes])

    def best(self, limits: int = LIMITS) -> PipelinePlan:
        """Return the fastest of the plan without a limit and the plans with this number of limits.

        A stage that takes W makes a step of at least M W, so that no plan above the first one's time over M is missed.
        """
        first = self.plan(math.inf)
        least_s = sum(self.chain.layer_s) / self.cluster.machines / self.cluster.devices_per_machine
        most_s = max(least_s, self.seconds(first) / self.chain.num_micro_batches)
        plans = [first, *(self.plan(float(limit_s)) for limit_s in np.geomspace(least_s, most_s, limits))]
        return min(dict.fromkeys(plans), key=self.seconds)

    def seconds(self, plan: PipelinePlan) -> float:
        """Return the exact time of a plan."""
        return plan_s(self.chain, self.cluster, plan)

    def plan(self, limit_s: float) -> PipelinePlan:
        """Return the plan with the least estimate in which no stage takes more than `limit_s`, F and B together."""
        limit_s *= 1 + 1e-12
        counts = np.arange(1, 1 + self.cluster.machines * self.cluster.devices_per_machine)
        half_s = self.stage_s / np.array([1, *counts])[:, None, None] / 2  # per number of devices
        half_s[2 * half_s > limit_s] = np.inf
        rests: dict[State, _Rest] = {}
        for used, (steps, shares_of_last) in self.steps.items():
            next_stages = self._next_stages(steps, rests, half_s)
            for shares in shares_of_last:
                rests[used, shares] = self._rest(steps, shares, next_stages, limit_s)
        return self._read(rests)

    def _next_stages(self, steps: Sequence[_Step], rests: Mapping[State, _Rest], half_s: Array) -> _Rest:
        """Return, per step and j, the best stage from j on with that step, whatever stage sends its input."""
        if not steps:
            none = np.full((1, len(self.sent_bytes)), np.inf)
            return _Rest(none, none, np.zeros(none.shape, int), np.zeros(none.shape, int))
        counts = [sum(step.taken) for step in steps]
        machines = [sum(count > 0 for count in step.taken) for step in steps]
        reduces_s = list(map(self.cluster.reduce_of, counts, machines))
        after = [rests[step.used, step.shares] for step in steps]
        forward_s = half_s[counts]
        forward_s += np.array([rest.forward_s for rest in after])[:, None]
        own_tail_s = self.chain.stage_bytes * np.array(reduces_s)[:, None, None]
        own_tail_s += forward_s
        tail_s = np.maximum(own_tail_s, np.array([rest.tail_s for rest in after])[:, None], out=own_tail_s)
        stop = np.argmin(forward_s + tail_s, axis=2)
        at = (*np.ogrid[: stop.shape[0], : stop.shape[1]], stop)
        return _Rest(forward_s[at], tail_s[at], np.zeros_like(stop), stop)

    def _rest(self, steps: Sequence[_Step], shares: Shares, stages: _Rest, limit_s: float) -> _Rest:
        """Choose the step, per j, with the communication into its stage from the last one, which has these shares."""
        bytes_s = np.array([self._transfer_s(step.taken, shares) for step in steps] or [0.0])
        sent_s = self.sent_bytes * bytes_s[:, None]
        sent_s[2 * sent_s > limit_s] = np.inf
        forward_s = stages.forward_s + sent_s
        step = np.argmin(forward_s + stages.tail_s, axis=0)
        at = step, np.arange(len(step))
        rest = _Rest(forward_s[at], stages.tail_s[at], step, stages.stop[at])
        rest.forward_s[-1] = rest.tail_s[-1] = 0.0  # no layers are left
        return rest

    def _transfer_s(self, taken: Sequence[int], shares: Shares) -> float:
        receivers = [m for m, count in enumerate(taken) if count]
        return self.cluster.transfer_of(1 - sum(shares[m] for m in receivers), len(receivers))

    def _read(self, rests: Mapping[State, _Rest]) -> PipelinePlan:
        """Return the plan behind the first state."""
        state: State = ((0,) * self.cluster.machines, (0.0,) * self.cluster.machines)
        machines = list(range(self.cluster.machines))
        size = self.cluster.devices_per_machine
        cuts, devices = [0], []
        while cuts[-1] < len(self.chain.layer_s):
            rest, j = rests[state], cuts[-1]
            step = self.steps[state[0]][0][rest.step[j]]
            rows = zip(machines, state[0], step.taken, strict=True)
            devices.append(tuple(sorted(m * size + busy + i for m, busy, count in rows for i in range(count))))
            cuts.append(int(rest.stop[j]))
            machines = [machines[place] for place in step.order]
            state = step.used, step.shares
        return PipelinePlan(tuple(cuts), tuple(devices))
