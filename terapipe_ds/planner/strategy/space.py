"""Yield the candidates of a question, or tell why there is none and which nearest question has one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from terapipe_ds.messages import bytes_of_gb, gib, limit_text, show_value
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.parts import Layers, Span
from terapipe_ds.planner.strategy.candidate import USABLE, Candidate, Levers
from terapipe_ds.planner.strategy.shapes import usual_chunks
from terapipe_ds.schedule.show import many
from terapipe_ds.strategy import DATA_FIRST, PIPE_FIRST, Grid

_AXES = {"stages": "pipe", "data_parallel": "data", "tensor_parallel": "model", "sequence_parallel": "sequence"}
_BATCH = {"micro_batch_size": "micro_batch", "accumulation": "accumulation"}


@dataclass(frozen=True)
class Choices:
    """Hold the fixed choices; the search chooses a None."""

    stages: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    sequence_parallel: int | None = None
    offload_activations: bool | None = None
    offload_optimizer: bool | None = None
    schedule: str | None = None
    chunks_per_stage: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    zero_stage: int | None = None


@dataclass(frozen=True, eq=False)
class Space:
    """Hold a question: a model on a cluster, the batch, the memory of a device, and the fixed choices."""

    layers: Layers
    cluster: Cluster
    global_batch_size: int
    sequence_length: int
    limit_bytes: float
    choices: Choices = Choices()

    def candidates(self) -> Iterator[Candidate]:
        """Yield every candidate: degrees that multiply to the devices, micro-batches that make up the global batch."""
        devices, choices = self.cluster.num_devices, self.choices
        for tensor, sequence in self._inner_ranks():
            inner = tensor * sequence
            for pipe in _divisors(devices // inner):
                data = devices // inner // pipe
                is_wanted = pipe == (choices.stages or pipe) and data == (choices.data_parallel or data)
                chunks = usual_chunks(choices.schedule, choices.chunks_per_stage)
                is_wanted &= pipe * chunks <= self.layers.num_layers and (pipe > 1 or chunks == 1)
                if not is_wanted or self.global_batch_size % data:
                    continue
                # where neither axis is 1, the order of the axes decides which ranks share a node
                orders = (PIPE_FIRST, DATA_FIRST) if pipe > 1 and data > 1 else (PIPE_FIRST,)
                axes = [(one, two, "sequence" if sequence > 1 else "model") for one, two, _ in orders]
                own_batch = self.global_batch_size // data
                sizes = [rows for rows in _divisors(own_batch) if self.layers.refuse_micro_batch(tensor, rows) is None]
                sizes = [n for n in sizes if n == (choices.micro_batch_size or n)]
                sizes = [n for n in sizes if own_batch == n * (choices.accumulation or own_batch // n)]
                for levers, micro_batch, order in itertools.product(self._levers(), sizes, axes):
                    grid = Grid(pipe, data, tensor, order, sequence)
                    for zero in self._zeros(data * sequence, levers.offload_optimizer):
                        yield Candidate(grid, micro_batch, own_batch // micro_batch, zero, levers)

    def _inner_ranks(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of tensor and of sequence ranks; the engine has no stage with both."""
        for inner in _divisors(self.cluster.devices_per_node):
            for tensor, sequence in dict.fromkeys(((inner, 1), (1, inner))):
                fixed = self.choices.tensor_parallel or tensor, self.choices.sequence_parallel or sequence
                is_refused = self.layers.refuse_tensor(tensor) or self.layers.refuse_sequence(sequence)
                if (tensor, sequence) == fixed and not is_refused and self.sequence_length % sequence == 0:
                    yield tensor, sequence

    def _levers(self) -> list[Levers]:
        """Return the levers that are known and allowed, those first that take no time."""
        allowed = []
        for name in (field.name for field in dataclasses.fields(Levers)):
            fixed = getattr(self.choices, name) if name in self.layers.levers else False
            allowed.append((False, True) if fixed is None else (fixed,))
        return [Levers(*values) for values in itertools.product(*allowed)]

    def least_need(self) -> tuple[float, Candidate | None]:
        """Return bytes that no device gets by with, whatever the strategy, and its candidate, without a search.

        A stage has at least the mean of all: parameters, states, one micro-batch's keys, values and kept tensors, and
        buffers of gradients.
        """
        least: tuple[float, Candidate | None] = (math.inf, None)
        seen: set[object] = set()
        for candidate in self.candidates():
            grid, levers = candidate.grid, candidate.levers
            key = grid.pipe, grid.data, grid.model, grid.sequence, levers, candidate.zero_stage
            if key in seen:  # the first has the fewest sequences
                continue
            seen.add(key)
            least = min(least, (self.mean_need(candidate), candidate), key=lambda one: one[0])
        return least

    def mean_need(self, candidate: Candidate) -> float:
        """Return bytes that the fullest stage of a candidate has at least, whatever the cut."""
        (whole,) = self.layers.memory_of_spans(candidate.setting, [Span(0, self.layers.num_layers, True)])
        kept = 0.0 if candidate.levers.offload_activations else whole.slice_bytes_per_token
        if whole.whole_bytes_per_token is None:  # with recomputation a sequence in one slice keeps no keys and values
            kept += whole.store_bytes_per_token
        off, full = (
            self.layers.memory_of_spans(
                candidate.setting, [Span(layer, layer + 1, again) for layer in range(self.layers.num_layers)]
            )
            for again in (False, True)
        )
        # a layer may save less than the input that it keeps where it runs again
        more = (b.slice_bytes_per_token - a.slice_bytes_per_token for a, b in zip(off, full, strict=True))
        kept = max(0.0, kept - sum(size for size in more if size > 0))
        # every stage needs the working bytes of some layer, and one stage has the layer that needs most
        working = [part.working_bytes for part in full]
        running = max(working) - min(working)
        mean = (whole.static_bytes + self.sequence_length * kept + running) / candidate.grid.pipe
        return mean + min(working) + self.cluster.process_bytes(candidate.grid)

    def check_need(self) -> None:
        """Raise MemoryLimitError where no strategy can fit, with the number of devices that would do."""
        need, candidate = self.least_need()
        if need <= self.limit_bytes or candidate is None:
            return
        for times in (2, 4, 8, 16, 32, 64, 128):
            cluster = dataclasses.replace(self.cluster, nodes=times * self.cluster.nodes)
            free = dict.fromkeys((*_AXES, *_BATCH, "schedule", "chunks_per_stage"))
            larger = dataclasses.replace(
                self,
                cluster=cluster,
                choices=dataclasses.replace(self.choices, **free),
                global_batch_size=math.lcm(times * 2**10, self.global_batch_size),
            )
            if larger.least_need()[0] <= self.limit_bytes:
                devices = f", or more devices; from about {cluster.num_devices} of these devices on it can fit"
                raise self.memory_error(math.ceil(need), candidate, devices, is_bound=True)
        devices = "; more of these devices do not help: a stage has a layer at least"
        raise self.memory_error(math.ceil(need), candidate, devices, is_bound=True)

    def _zeros(self, data: int, offloads_optimizer: bool) -> tuple[int, ...]:
        """Return the ZeRO stages that differ: DeepSpeed sums gradients of bfloat16 in fp32 under ZeRO-1 alone."""
        possible = (1,) if offloads_optimizer or self.layers.dtype == "bfloat16" else (0, 1)
        if (fixed := self.choices.zero_stage) is not None:
            return (fixed,) if fixed in possible else ()
        return possible if data > 1 else possible[:1]

    def why_none(self) -> str:
        """Return why there is no candidate, with the nearest question that has one."""
        cluster = self.cluster
        asked = f"{cluster.nodes} x {cluster.devices_per_node} devices, global_batch_size = {self.global_batch_size}"
        if not self._zeros(1, bool(self.choices.offload_optimizer)):
            why = "an optimizer on the host" if self.choices.offload_optimizer else self.layers.dtype
            return f"{asked}: no strategy with {why} has zero_stage = {self.choices.zero_stage}; give 1"
        return self._why_no_degrees(asked)

    def _other_value(self, asked: str, names: Mapping[str, str]) -> str | None:
        """Return the error about the first of these choices that has strategies with another value; None if none has.

        Args:
            names: the attribute of a candidate that has the value of each choice.
        """
        for name, attribute in names.items():
            if (value := getattr(self.choices, name)) is not None:
                free = dataclasses.replace(self, choices=dataclasses.replace(self.choices, **{name: None}))
                others = set(map(operator.attrgetter(attribute), free.candidates()))
                if others:
                    nearest = min(others, key=lambda other: (abs(other - value), other))
                    return f"{asked}: no strategy has {name} = {value}; give {nearest}, the nearest that works"
        return None

    def _why_no_degrees(self, asked: str) -> str:
        cluster, batch = self.cluster, self.global_batch_size
        # a number of tensor ranks that no layer, or no node, can have
        tensor = self.choices.tensor_parallel
        why = None if tensor is None else self.layers.refuse_tensor(tensor)
        if tensor is not None and why is None and cluster.devices_per_node % tensor:
            why = f"tensor_parallel = {tensor} does not divide the {cluster.devices_per_node} devices of a node"
        if tensor is not None and why is not None:
            free = dataclasses.replace(self, choices=dataclasses.replace(self.choices, tensor_parallel=None))
            fits = {candidate.grid.model for candidate in free.candidates()}
            # where the other choices go with no number, one that suits the layers and a node
            fits = fits or {t for t in _divisors(cluster.devices_per_node) if self.layers.refuse_tensor(t) is None}
            nearest = min(fits, key=lambda degree: (abs(degree - tensor), degree), default=1)
            return f"{asked}: {why}. Give tensor_parallel = {nearest}, the nearest that works here"
        if (error := self._other_value(asked, _BATCH)) is not None:
            return error
        # a batch near this one that has a strategy
        why_not = f"no stages x replicas x tensor ranks with at most {self.layers.num_layers} stages divide both"
        of_batch = {name: getattr(self.choices, name) for name in _BATCH}
        if shown := " and ".join(f"{name} = {value}" for name, value in of_batch.items() if value is not None):
            why_not = f"no number of replicas goes with {shown}"
        for distance in range(1, 4097):
            for other in (batch - distance, batch + distance):
                if (
                    other >= 1
                    and next(dataclasses.replace(self, global_batch_size=other).candidates(), None) is not None
                ):
                    why = self.layers.refuse_micro_batch(tensor or 1, 1) or why_not
                    return f"{asked}: {why}; give global_batch_size = {other}, the nearest that works"
        of_grid = {name: f"grid.{attribute}" for name, attribute in _AXES.items()}
        if (error := self._other_value(asked, of_grid)) is not None:
            return error
        fixed = ", ".join(f"{name} = {value}" for name, value in vars(self.choices).items() if value is not None)
        return f"{asked}: no strategy has {fixed or 'such degrees'}; leave one of them out, or change the devices"

    def host_memory_error(self) -> PlannerError:
        """Return the error where devices have room, and their hosts lack it."""
        host_bytes = self.cluster.card.host_memory_bytes or math.inf
        fixed = [name for name in ("offload_activations", "offload_optimizer") if getattr(self.choices, name)]
        # where nobody asked to offload, nothing else fits in the devices
        way_out = f"leave out {' and '.join(fixed)}" if fixed else "give more devices, a larger memory_limit_gb"
        return PlannerError(
            f"no strategy fits in the memory of a node's host ({gib(USABLE * host_bytes)}, {USABLE:g} of "
            f"host_memory_bytes in the device's file): {way_out}, or give more host memory"
        )

    def memory_error(
        self, need: int, candidate: Candidate, more_devices: str = ", or more devices", *, is_bound: bool = False
    ) -> MemoryLimitError:
        """Return the error where nothing fits: the least need, its candidate, and whether more devices would do.

        A need that `is_bound` is below the need of every strategy, so that a limit of as much does not suffice.
        """
        needs, least, rank = "the least need found is", ">=", ""
        if is_bound:
            needs, least, rank = "all need more than", "above", "the least "
        grid, inner = candidate.grid, "sequence rank" if candidate.grid.sequence > 1 else "tensor rank"
        return MemoryLimitError(
            f"no strategy fits in {limit_text(self.limit_bytes)} per device: {needs} {gib(need)}, {rank}with "
            f"{many(grid.pipe, 'stage')}, {many(grid.data, 'replica')}, {many(grid.dims[2], inner)}, ZeRO "
            f"{candidate.zero_stage}, {many(candidate.accumulation, 'micro-batch')} of "
            f"{many(candidate.micro_batch, 'sequence')} and all that can be recomputed; give "
            f"memory_limit_gb {least} {math.ceil(need / 1e7) / 100:g} where devices have that{more_devices}",
            need,
        )


def _divisors(number: int) -> list[int]:
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]


def check_limit(memory_limit_gb: Any, cluster: Cluster) -> float:
    """Return the bytes that a device may hold. Raises PlannerError for anything but a number > 0."""
    if memory_limit_gb is None:
        return USABLE * cluster.card.memory_bytes
    is_number = isinstance(memory_limit_gb, int | float) and not isinstance(memory_limit_gb, bool)
    if not (is_number and math.isfinite(memory_limit_gb) and memory_limit_gb > 0):
        raise PlannerError(f"memory_limit_gb = {show_value(memory_limit_gb)}: give a number > 0")
    return bytes_of_gb(memory_limit_gb)
