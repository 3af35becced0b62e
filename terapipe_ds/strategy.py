"""Describe a strategy, everything above a plan: as a value, as a DeepSpeed JSON and as the command that starts it.

A placement is a map from the grid to devices. Ranks are numbered in the order of the hosts, so that rank r is device
r mod d of node r div d where nodes have d devices, and the order of the axes says which coordinates a rank has:

    fresh     pipe, data, model     the replicas of a stage fill whole nodes
    append    pipe, data, model     they are fewer than a node has devices: the next stage takes the devices left
    scatter   data, pipe, model     a pipeline lies in as few nodes as can be, and the replicas are spread over them

The tensor axis, or the axis of sequence ranks in its place, is always innermost: it never leaves a node.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from terapipe_ds.files.strict_json import STRICT, JsonError, parse_as
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import SCHEDULE_NAMES, ScheduleError, count_parts
from terapipe_ds.schedule.show import many

_Count = Annotated[int, Field(ge=1)]
_Lengths = Annotated[list[_Count], Field(min_length=1)]
_Seconds = Annotated[float, Field(ge=0)]
_Schedule = Annotated[str, Field(pattern=f"^({'|'.join(SCHEDULE_NAMES)})$")]
_Recompute = Literal["off", "full"] | list[Annotated[int, Field(ge=0)]]
REDUCE_BUCKET = 50_000_000
"""Numbers that ZeRO-1 of a strategy reduces at once, after the last backward."""

PIPE_FIRST, DATA_FIRST = ("pipe", "data", "model"), ("data", "pipe", "model")
"""Orders of the axes, the outermost first, as DeepSpeed's ProcessTopology takes them."""

Coordinate = tuple[int, int, int]
"""(pipe_id, data_id, and model_id or sequence_id)."""

_PRECISION: Mapping[str, dict[str, Any]] = {
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True}},
    "float32": {},
}
_FP32_SUMS: Mapping[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}  # plans count them


def _as_axes(axes: list[str]) -> list[str]:
    if axes[2:] not in (["model"], ["sequence"]) or tuple(axes[:2]) not in (PIPE_FIRST[:2], DATA_FIRST[:2]):
        raise ValueError("give pipe, data and model (or sequence) once each, model (or sequence) last")
    return axes


def _rising(bounds: list[int]) -> list[int]:
    if bounds[:1] != [0] or any(b <= a for a, b in itertools.pairwise(bounds)):
        raise ValueError("give rising numbers of layers from 0 on")
    return bounds


class StrategyError(ValueError):
    """Refuse text that is no strategy; the message says what to change."""


@dataclass(frozen=True)
class Grid:
    """Hold the degrees of parallelism and the order of the axes on a cluster."""

    pipe: int
    data: int
    model: int
    axes: tuple[str, str, str] = PIPE_FIRST  # the last one may be "sequence"
    sequence: int = 1  # ranks that divide the tokens of a slice; model is 1 then

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the sizes of the axes, in their order."""
        return tuple(getattr(self, axis) for axis in self.axes)

    @property
    def ranks(self) -> np.typing.NDArray[np.int64]:
        """Return the rank of every coordinate [pipe, data, and model or sequence]."""
        ranks = np.arange(math.prod(self.dims)).reshape(self.dims)
        return ranks if self.axes[0] == "pipe" else ranks.transpose(1, 0, 2)

    def placement(self, devices_per_node: int) -> dict[Coordinate, tuple[int, int]]:
        """Return the (node, device) of every coordinate."""
        ranks = self.ranks
        return {(k, d, t): divmod(int(ranks[k, d, t]), devices_per_node) for k, d, t in np.ndindex(*ranks.shape)}


class Strategy(BaseModel):
    """Describe how to train a model on a cluster. `predicted_s` is for one step, with reduction and optimizer.

    `lower_bound_s` is proven: no strategy that the search covers takes less. `is_complete` is False where the search
    was stopped: then this is the best strategy until then.
    """

    model_config = STRICT | ConfigDict(frozen=True)

    format: Literal["terapipe_ds.strategy"] = "terapipe_ds.strategy"
    version: Literal[1] = 1
    axes: Annotated[list[str], AfterValidator(_as_axes)]
    dims: Annotated[list[_Count], Field(min_length=3, max_length=3)]
    devices_per_node: _Count
    partition: Annotated[list[int], Field(min_length=2), AfterValidator(_rising)]
    schedule: _Schedule
    chunks_per_stage: _Count = 1
    slices: Annotated[_Lengths | list[_Lengths], Field(min_length=1)]  # or a list for each micro-batch of a step
    micro_batch_size: _Count
    accumulation: _Count
    recompute: _Recompute
    zero_stage: Annotated[int, Field(ge=0, le=1)]
    dtype: Annotated[str, Field(pattern="^(float32|float16|bfloat16)$")]
    predicted_s: _Seconds
    lower_bound_s: _Seconds
    memory_bytes: list[int]  # the most of each stage
    model: str = ""
    is_complete: bool = True
    keep_attention: bool = False  # the stages that recompute keep the results of attention
    offload_activations: bool = False
    offload_optimizer: bool = False  # DeepSpeed's, to the host's memory
    memory_by_kind: dict[str, list[int]] = {}  # of `memory_bytes`: kind -> by stage, at its peak
    host_memory_bytes: int = 0  # of the fullest node
    model_flops_per_s: _Seconds = 0.0  # of a device, without recomputation
    mfu: _Seconds = 0.0  # share of the device's peak; 0: not known

    @property
    def grid(self) -> dict[str, int]:
        """Return the degrees: `{"pipe": K, "data": D, "model": T}`, and "sequence" where there is that axis."""
        sizes = {"pipe": 1, "data": 1, "model": 1} | dict(zip(self.axes, self.dims, strict=True))
        return {axis: sizes[axis] for axis in ("pipe", "data", "model", "sequence") if axis in sizes}

    @property
    def inner_axis(self) -> str:
        """Return the kind of the ranks on the last axis: tensor or sequence."""
        return "sequence" if self.axes[2] == "sequence" else "tensor"

    @property
    def placement(self) -> dict[Coordinate, tuple[int, int]]:
        """Return the (node, device) of each (pipe_id, data_id, model_id); ranks count up host by host."""
        return self.layout.placement(self.devices_per_node)

    @property
    def layout(self) -> Grid:
        """Return the degrees with the order of the axes."""
        sizes = self.grid
        axes = self.axes[0], self.axes[1], self.axes[2]
        return Grid(sizes["pipe"], sizes["data"], sizes["model"], axes, sizes.get("sequence", 1))

    @property
    def plans(self) -> tuple[SlicePlan, ...]:
        """Return the slices of each micro-batch of a step."""
        if isinstance(self.slices[0], list):
            return tuple(map(SlicePlan, self.slices))  # type: ignore[arg-type]
        return (SlicePlan(self.slices),) * self.accumulation  # type: ignore[arg-type]

    @property
    def plan(self) -> SlicePlan | None:
        """Return the one plan of all micro-batches; None where they differ."""
        return self.plans[0] if len(set(self.plans)) == 1 else None

    @property
    def equal_slices(self) -> int | None:
        """Return the number of slices where the engine cuts equal ones alike; None where lengths must be listed."""
        if self.plan is None:
            return None
        lengths = self.plan.lengths
        return len(lengths) if len(set(lengths)) == 1 and (len(lengths) == 1 or lengths[0] % 64 == 0) else None

    @property
    def gap(self) -> float:
        """Return how far the prediction is above the proven bound: 0.02 for 2 %."""
        return self.predicted_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0

    @property
    def num_nodes(self) -> int:
        return -(-math.prod(self.dims) // self.devices_per_node)

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a DeepSpeed config for this strategy; its learning rate is a placeholder to change."""
        data = self.grid["data"]
        section: dict[str, Any] = {"enabled": True, "schedule": self.schedule, "slices": copy.deepcopy(self.slices)}
        if self.equal_slices:
            section["slices"] = self.equal_slices
        if self.chunks_per_stage > 1:
            section["chunks_per_stage"] = self.chunks_per_stage
        section["partition"] = list(self.partition)
        section["recompute"] = self.recompute
        if self.keep_attention:
            section["keep_attention"] = True
        if self.offload_activations:
            section["offload_activations"] = True
        zero: dict[str, Any] = {"stage": self.zero_stage}
        if self.zero_stage:  # the default is two buffers of 500 million numbers
            zero |= {"reduce_bucket_size": REDUCE_BUCKET, "contiguous_gradients": self.offload_optimizer}
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        tensor, sequence = self.grid["model"], self.grid.get("sequence", 1)
        return {
            "pipeline": {"stages": self.grid["pipe"]},  # for Trainer, as the next two
            **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}),
            **({"sequence_parallel_size": sequence} if sequence > 1 else {}),
            "train_batch_size": self.micro_batch_size * self.accumulation * data,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            **_PRECISION[self.dtype],
            **(_FP32_SUMS if self.dtype == "bfloat16" and self.zero_stage == 1 else {}),
            "zero_optimization": zero,
            "terapipe": section,
        }

    def launch_command(self, hostfile: str | None, script: str = "train.py", config: str = "ds.json") -> str:
        """Return the line that starts a script on the hosts of a hostfile, in its order; None: on this machine."""
        hosts = [] if hostfile is None else ["--hostfile", hostfile, "--num_nodes", str(self.num_nodes)]
        devices = min(self.devices_per_node, math.prod(self.dims))
        words = ["deepspeed", *hosts, "--num_gpus", str(devices), "--module", "terapipe_ds.run"]  # registers
        return shlex.join([*words, script, "--deepspeed_config", config])

    def to_json(self) -> str:
        """Return JSON that `from_json` reads back to an equal strategy."""
        return json.dumps(self.model_dump(mode="json"), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Strategy:
        """Read the text of `to_json`. Raises StrategyError for anything else, or parts that do not fit one another."""
        try:
            strategy = parse_as(cls, text)
        except JsonError as error:
            wrote = "`terapipe strategy --strategy-out` or `to_json` wrote"
            raise StrategyError(f"strategy: {error}; give what {wrote}") from None
        stages, parts = strategy.grid["pipe"], len(strategy.partition) - 1
        if len(strategy.memory_bytes) != stages:
            given = len(strategy.memory_bytes)
            raise StrategyError(f"strategy: memory_bytes is for {given}, the grid has {stages}: plan again")
        try:
            wanted = count_parts(strategy.schedule, stages, strategy.chunks_per_stage)
        except ScheduleError as error:
            raise StrategyError(f"strategy: {error.reason}") from None
        if parts != wanted:
            raise StrategyError(f"strategy: partition is for {parts}, the grid has {wanted}: plan again")
        if len(strategy.plans) != strategy.accumulation or len({plan.sequence_length for plan in strategy.plans}) > 1:
            count = strategy.accumulation
            raise StrategyError(f"strategy: slices: give a list of lengths, or {count} with the same sum: plan again")
        again = strategy.recompute
        if isinstance(again, list) and (not again or sorted(again) != [k for k in range(stages) if k in again]):
            raise StrategyError(f'strategy: recompute = {again}: give stages below {stages}, each once, or "off"')
        return strategy

    def __str__(self) -> str:
        sizes = self.grid
        stopped = "" if self.is_complete else "; the search was stopped, this is the best until then"
        counts = sorted({plan.num_slices for plan in self.plans})
        slices = f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} slice{'s' * (counts[-1] > 1)}"
        return (
            f"{self.predicted_s:.4g} s per step (proven: none below {self.lower_bound_s:.4g} s): "
            f"{many(sizes['pipe'], 'stage')}, {many(sizes['data'], 'replica')}, "
            f"{many(self.dims[2], f'{self.inner_axis} rank')}, {many(self.accumulation, 'micro-batch')} of "
            f"{many(self.micro_batch_size, 'sequence')}, {self.schedule} with {slices}, "
            f"ZeRO {self.zero_stage}, recompute {self.recompute}{', attention kept' * self.keep_attention}{stopped}"
        )


def bounds_among(kinds: Sequence[object], partition: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first layer of each part of a module with layers of these kinds, and the end; None: they do not fit.

    A model that was planned by its size is an embedding, decoder layers, and a head. A module has more layers before
    and after its decoder layers, such as positions and the last norm: these go with the embedding and with the head.
    """
    bounds, layers = tuple(partition), len(kinds)
    if bounds[-1] == layers:
        return bounds
    first, count = decoder_layers(kinds)
    if bounds[-1] != count + 2 or not 0 < first < layers - count:
        return None
    return (0, *(first + bound - 1 for bound in bounds[1:-1]), layers)


def decoder_layers(kinds: Sequence[object]) -> tuple[int, int]:
    """Return the first and the number of the layers in the longest run of one kind."""
    runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), key=lambda index: kinds[index])]
    longest = max(runs, key=len)
    return longest[0], len(longest)
