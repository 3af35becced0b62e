"""Every strategy of a small chain, one by one: what a search must not be slower than.

Written from the documents, without the planner: the simulator's public functions, and formulas by hand. A step is the
latest end of a stage with its reduction and its optimizer step.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import terapipe_ds
from terapipe_ds.costs.devices import device_card
from terapipe_ds.planner import MemoryModel, PartMemory
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate
from tests.costs import constant

WITHIN, BETWEEN = 20e9, 2e9  # bytes per second
LATENCY_WITHIN, LATENCY_BETWEEN = 1e-5, 5e-5
LENGTH = 128


@dataclasses.dataclass
class Instance:
    """A chain, machines and a batch, all small."""

    forward_s: list[float]
    backward_s: list[float]
    output_bytes: list[float]
    saved_bytes: list[float]
    parameter_bytes: list[float]
    nodes: int
    devices_per_node: int
    global_batch: int
    limit_gb: float

    @classmethod
    def drawn(cls, seed: int) -> Instance:
        rng = random.Random(seed)
        layers = rng.randint(1, 8)
        nodes, devices = rng.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (1, 8), (2, 3), (2, 4)])
        forward = [rng.choice([0.001, 0.01, 0.02]) * rng.uniform(0.5, 2) for _ in range(layers)]
        backward, outputs = [f * rng.uniform(1, 3) for f in forward], [rng.uniform(0, 2e8) for _ in forward]
        saved = [rng.uniform(1e8, 2e9) for _ in forward]
        parameters = [rng.choice([0.0, 1e7, 4e8]) * rng.uniform(0.5, 2) for _ in forward]
        batch, limit_gb = nodes * devices * rng.choice([1, 2, 4]), rng.choice([8.0, 16.0, 32.0, 1000.0])
        return cls(forward, backward, outputs, saved, parameters, nodes, devices, batch, limit_gb)

    @property
    def chain(self) -> terapipe_ds.LayerChain:
        numbers = (self.forward_s, self.backward_s, self.output_bytes, self.saved_bytes, self.parameter_bytes)
        return terapipe_ds.LayerChain(*numbers)

    @property
    def cluster(self) -> terapipe_ds.Cluster:
        rates: Any = {"within_bytes_per_s": WITHIN, "between_bytes_per_s": BETWEEN}
        latencies: Any = {"within_latency_s": LATENCY_WITHIN, "between_latency_s": LATENCY_BETWEEN}
        card = dataclasses.replace(device_card("v100"), context_bytes=None)  # the brute force counts layers alone
        return terapipe_ds.Cluster(card, self.nodes, self.devices_per_node, **rates, **latencies)


def least_s(instance: Instance) -> float | None:
    """Return the least seconds of any strategy; None where none fits in memory."""
    times = [step_s(instance, *strategy) for strategy in strategies(instance)]
    return min((seconds for seconds in times if seconds is not None), default=None)


def strategies(instance: Instance) -> Iterator[tuple[Any, ...]]:
    layers, devices = len(instance.forward_s), instance.nodes * instance.devices_per_node
    for stages in range(1, min(layers, devices) + 1):
        replicas = devices // stages
        if stages * replicas != devices or instance.global_batch % replicas:
            continue
        own = instance.global_batch // replicas
        for size in range(1, own + 1):
            if own % size:
                continue
            for inner in itertools.combinations(range(1, layers), stages - 1):
                choices = itertools.product(("1f1b", "gpipe"), (0, 1) if replicas > 1 else (0,), (True, False))
                for schedule, zero, pipe_outside in choices:
                    yield (0, *inner, layers), replicas, size, own // size, schedule, zero, pipe_outside


def step_s(
    instance: Instance, cut: tuple[int, ...], replicas: int, size: int, count: int, schedule: str, zero: int,
    pipe_outside: bool,
) -> float | None:  # fmt: skip
    """Return the seconds of a step, with a recomputation on the stages that need one; None: it does not fit."""
    stages = len(cut) - 1
    order = build(schedule, stages, count, 1)
    plan = terapipe_ds.SlicePlan.equal(LENGTH, 1)
    limit, recomputes = instance.limit_gb * 1e9, [False] * stages
    for _ in range(2):
        peaks = peaks_of(instance, cut, replicas, size, zero, recomputes, order, plan)
        recomputes = [again or peak > limit for again, peak in zip(recomputes, peaks, strict=True)]
    if max(peaks) > limit:
        return None
    nodes = nodes_of(instance, stages, replicas, pipe_outside)
    sent = [wire_s(instance, nodes, k, size * instance.output_bytes[cut[k] - 1]) for k in range(1, stages)]
    wires = [0.0, *sent, 0.0]
    costs = []
    for k, (start, stop) in enumerate(itertools.pairwise(cut)):
        forward, backward = size * sum(instance.forward_s[start:stop]), size * sum(instance.backward_s[start:stop])
        costs.append(constant(forward, backward + recomputes[k] * forward, wires[k + 1], wires[k]))
    timeline = simulate(order, plan, costs)
    ends = [max(e.end_s for e in timeline.events if e.stage_id == k and e.kind in "FB") for k in range(stages)]
    return max(end + end_s(instance, cut, k, replicas, zero, nodes[k]) for k, end in enumerate(ends))


def peaks_of(
    instance: Instance, cut: Any, replicas: int, size: int, zero: int, recomputes: Any, order: Any, plan: Any
) -> Any:
    parts = []
    for again, (start, stop) in zip(recomputes, itertools.pairwise(cut), strict=True):
        parameters = sum(instance.parameter_bytes[start:stop])
        static = 2 * parameters + 3 * parameters / replicas if zero else 3 * parameters
        kept, working = sum(instance.saved_bytes[start:stop]), 0.0
        if again:
            kept, working = sum([0.0, *instance.output_bytes][start:stop]), max(instance.saved_bytes[start:stop])
        gradients = 0 if zero else round(parameters)
        rates = size * kept / LENGTH, 0, 0, 0, size * working / LENGTH
        parts.append(PartMemory(round(static), *rates, gradient_bytes=gradients))
    return simulate(order, plan, [constant(1, 1)] * len(parts), memory=MemoryModel(tuple(parts))).peak_bytes


def nodes_of(instance: Instance, stages: int, replicas: int, pipe_outside: bool) -> list[list[int]]:
    """Return, per stage, the nodes of its replicas."""
    ranks = [[k * replicas + d if pipe_outside else d * stages + k for d in range(replicas)] for k in range(stages)]
    return [[rank // instance.devices_per_node for rank in of_stage] for of_stage in ranks]


def wire_s(instance: Instance, nodes: list[list[int]], k: int, num_bytes: float) -> float:
    crosses = any(a != b for a, b in zip(nodes[k - 1], nodes[k], strict=True))
    return LATENCY_BETWEEN + num_bytes / BETWEEN if crosses else LATENCY_WITHIN + num_bytes / WITHIN


def end_s(instance: Instance, cut: Any, k: int, replicas: int, zero: int, nodes: list[int]) -> float:
    """Return the reduction by rings through all replicas, and Adam's step: 28 bytes per fp32 parameter.

    ZeRO-1 gathers the parameters after it, which takes half of a reduction's bytes.
    """
    parameters = sum(instance.parameter_bytes[cut[k] : cut[k + 1]])
    card = instance.cluster.card
    step = 7 * parameters / (replicas if zero else 1)
    seconds = step / (card.memory_bandwidth_bytes_per_s * card.bandwidth_efficiency)
    if replicas > 1:
        counts = [nodes.count(node) for node in set(nodes)]
        rates = [WITHIN] * (max(counts) > 1) + [min(counts) * BETWEEN] * (len(counts) > 1)
        latency = LATENCY_BETWEEN if len(counts) > 1 else LATENCY_WITHIN
        summed = (1.5 if zero else 1) * parameters
        seconds += 2 * (replicas - 1) / replicas * summed / min(rates) + 2 * (replicas - 1) * latency
    return seconds
