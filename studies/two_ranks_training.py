"""Run the two processes of `studies.two_ranks`: measure, plan, and train each strategy in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.options import automatic_section
from terapipe_ds.bench.ranks import USUAL_SETTINGS, finish_rank, prepare_rank, progress_bar
from terapipe_ds.costs.devices import device_card
from terapipe_ds.costs.profile import Profile
from terapipe_ds.files.atomic import write_text
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.layers.measured import MeasuredLayers
from terapipe_ds.planner.strategy import Strategy, rank_strategies
from terapipe_ds.planner.strategy.candidate import Candidate, owners_of
from terapipe_ds.planner.strategy.priced import Priced

TIE = 0.03  # of the longer step: steps closer than this may come in either order
FIXED = {"PP2": "stages", "DP2": "data_parallel", "TP2": "tensor_parallel"}
_STEPS_TIMED = 5  # of the optimizer, after the steps that measure and warm up
_SUMS = (1 << 16, 1 << 27)  # bytes that the two ranks sum, to know the link: in caches, and as many as gradients
_REPEATS = 9
_DISTURBED = 0.02  # of the shortest step: a step that waited this much longer than the least disturbed does not count
_SETTINGS = {**USUAL_SETTINGS, "steps_per_print": 10**9}  # of any run; the strategy's say the rest


@dataclass(frozen=True)
class Shape:
    """Describe a model of megatron-core layers, and the batch that it trains."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step, over all replicas
    granularity: int = 64

    @property
    def small(self) -> Shape:
        """Return the same for a trial of the study itself."""
        length = max(32, self.length // 8)
        sizes: Any = {"hidden": self.hidden // 8, "heads": 4, "length": length, "vocab": self.vocab // 8}
        return dataclasses.replace(self, **sizes, granularity=min(length, 32))


@dataclass
class Step:
    """Hold the times of a step on the slower rank: the whole step, its end, processor time, and waiting for a core."""

    seconds: float
    ends_s: float
    busy_s: float
    lost_s: float


@dataclass
class Run:
    """Hold one strategy with its steps and prediction; `ends_s` is the part for sums of gradients and the optimizer."""

    name: str
    strategy: dict[str, Any]
    predicted_s: float
    predicted_ends_s: float
    steps: list[Step] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    @property
    def undisturbed(self) -> list[Step]:
        """Return the steps in which other programs had little more of the cores than in the best one."""
        most_s = min(step.lost_s for step in self.steps) + _DISTURBED * min(step.seconds for step in self.steps)
        return [step for step in self.steps if step.lost_s <= most_s]

    def median(self, name: str = "seconds") -> float:
        """Return the median of a field of the undisturbed steps."""
        return statistics.median(getattr(step, name) for step in self.undisturbed)

    @property
    def measured_s(self) -> float:
        """Return the median step."""
        return self.median()


@dataclass
class Outcome:
    """Hold the result of one model."""

    shape: Shape
    link: dict[str, float]
    runs: list[Run]

    @property
    def is_as_predicted(self) -> bool:
        """Return whether the predicted order is the measured one, except for ties."""
        ordered = sorted(self.runs, key=lambda run: run.predicted_s)
        return all(a.measured_s <= b.measured_s / (1 - TIE) for a, b in itertools.combinations(ordered, 2))


def rank_main(rank: int, rendezvous: str, shape: Shape, turns: int, folder: str) -> None:
    """Measure, plan and train on one of the two ranks; rank 0 leaves `outcome.json` in the folder."""
    prepare_rank(rank, 2, rendezvous)
    from terapipe_ds.runtime.agreement import from_rank_0

    profiles = [_measured(shape, Path(folder) / name, pipe, tensor) for name, pipe, tensor in _PROFILED]
    link = _measure_link()
    runs = from_rank_0(lambda: _strategies(shape, profiles, link))
    engines = [_engine(shape, run) for run in runs]
    bar = progress_bar(rank, (1 + turns) * len(runs), shape.name)
    for turn in range(1 + turns):
        for run, engine in zip(runs, engines, strict=True):
            _train(shape, run, engine, is_timed=turn > 0)
            bar.update()
    bar.close()
    if rank == 0:
        write_text(Path(folder) / "outcome.json", json.dumps(asdict(Outcome(shape, link, runs))))
    finish_rank(engines)


_PROFILED = (("tensor1", 2, 1), ("tensor2", 1, 2))
"""Folder, stages and tensor ranks of the runs that measure: both ranks are at work, as they are in training."""


def _measured(shape: Shape, folder: Path, pipe: int, tensor: int) -> Profile:
    """Let an engine measure the layers as `"slices": "auto"` does, then time the optimizer's step on each stage."""
    import torch.distributed as torch_dist

    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    section = automatic_section(shape.granularity, folder)
    engine = _built(shape, (pipe, 1, tensor), _SETTINGS | sizes | {"terapipe": section})
    data = _data(shape, 1, 0)
    for _ in range(2):
        engine.train_batch(data)
    own: list[Any] = [None, None]
    torch_dist.all_gather_object(own, (engine.stage_id, _step_s(engine, data)))
    engine.destroy()
    (path,) = folder.glob("profile-*.json")
    profile = Profile.load(path)
    steps_s = {stage_id: max(s for stage, s in own if stage == stage_id) for stage_id, _ in own}
    parts = [dataclasses.replace(part, step_s=steps_s[part.part_id]) for part in profile.parts]
    return dataclasses.replace(profile, parts=tuple(parts))


def _step_s(engine: Any, data: Iterator[Any]) -> float:
    """Return the seconds of sums over one replica and of the optimizer, on both ranks at once, as replicas step.

    On two stages one would step while the other is still at work, and would not share the memory's bandwidth with it.
    """
    import torch.distributed as torch_dist

    own_hook, waited_s = engine.module.before_reduce, [0.0]

    def wait_for_both(engine: Any) -> None:
        begin_s = time.perf_counter()
        torch_dist.barrier()
        waited_s[0] = time.perf_counter() - begin_s
        own_hook(engine)

    engine.module.before_reduce = wait_for_both
    taken = []
    for _ in range(_STEPS_TIMED):
        engine.train_batch(data)
        taken.append(engine.closing_s - waited_s[0])
    return min(taken)  # time that other programs took is not the optimizer's


def _measure_link() -> dict[str, float]:
    """Return rate and latency of a ring between the ranks, from an all-reduce of few and of many bytes."""
    import torch
    import torch.distributed as torch_dist

    seconds = []
    for num_bytes in _SUMS:
        tensor, taken = torch.ones(num_bytes // 4), []
        for _ in range(_REPEATS):
            torch_dist.barrier()
            begin_s = time.perf_counter()
            torch_dist.all_reduce(tensor)
            taken.append(time.perf_counter() - begin_s)
        slowest = torch.tensor(taken, dtype=torch.float64)
        torch_dist.all_reduce(slowest, op=torch_dist.ReduceOp.MAX)
        seconds.append(float(slowest.min()))  # time that other programs took is not the link's
    rate = (_SUMS[1] - _SUMS[0]) / (seconds[1] - seconds[0])  # a ring of two sends each byte once
    return {"within_bytes_per_s": rate, "within_latency_s": max(0.0, seconds[0] - _SUMS[0] / rate) / 2}


def _strategies(shape: Shape, profiles: Sequence[Profile], link: dict[str, float]) -> list[Run]:
    """Return the best strategy of each kind, with its predicted time."""
    cluster = Cluster(device_card("cpu"), 1, 2, **link)
    question: Any = {"global_batch_size": shape.batch, "sequence_length": shape.length}
    layers = MeasuredLayers(profiles, cluster, shape.length)
    runs = []
    for name, fixed in FIXED.items():
        choice: Any = {fixed: 2}
        best = rank_strategies(list(profiles), cluster, **question, **choice)[0]
        candidate = Candidate(best.layout, best.micro_batch_size, best.accumulation, best.zero_stage)
        owners = owners_of(best.schedule, best.grid["pipe"], best.chunks_per_stage)
        ends_s = max(Priced(layers, cluster, shape.length, candidate).ends_s(tuple(best.partition), owners))
        runs.append(Run(name, best.model_dump(mode="json"), best.predicted_s, ends_s))
    return runs


def _engine(shape: Shape, run: Run) -> Any:
    strategy = Strategy.from_json(json.dumps(run.strategy))
    return _built(shape, strategy.layout.dims, strategy.to_deepspeed() | _SETTINGS)


def _built(shape: Shape, dims: Sequence[int], ds_config: dict[str, Any]) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core.transformer import TransformerConfig

    import terapipe_ds
    from terapipe_ds.models.megatron import MegatronGPT

    pipe, data, tensor = dims
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        tensor_model_parallel_size=tensor,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # the same weights whatever the tensor ranks
        bias_dropout_fusion=False,
    )
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=data)
    module = MegatronGPT(config, vocab_size=shape.vocab, max_sequence_length=shape.length, topology=topology)
    return terapipe_ds.initialize(model=module, model_parameters=list(module.parameters()), config=ds_config)[0]


def _data(shape: Shape, replicas: int, replica_id: int) -> Iterator[Any]:
    """Yield the sequences of one replica, again and again; all replicas together have the same ones for any number."""
    import torch

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(shape.vocab, (shape.batch, 1, shape.length + 1), generator=generator)
    return itertools.cycle([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in text[replica_id::replicas]])


def _train(shape: Shape, run: Run, engine: Any, *, is_timed: bool) -> None:
    """Make a step, and note its times on the slower rank."""
    import torch
    import torch.distributed as torch_dist

    from terapipe_ds.models.megatron.groups import process_groups

    process_groups(engine.grid, engine.module.blueprint.config)  # megatron-core finds the groups of the last engine
    data = _data(shape, engine.dp_world_size, engine.grid.get_data_parallel_rank())
    torch_dist.barrier()
    begin = _clocks()
    loss = float(engine.train_batch(data))
    seconds, busy_s, lost_s = (now - before for now, before in zip(_clocks(), begin, strict=True))
    taken = torch.tensor([seconds, engine.closing_s, busy_s, lost_s], dtype=torch.float64)
    torch_dist.all_reduce(taken, op=torch_dist.ReduceOp.MAX)
    run.losses.append(loss)
    if is_timed:
        run.steps.append(Step(*taken.tolist()))


def _clocks() -> tuple[float, float, float]:
    """Return the time, the processor time of this process, and the time that its threads waited for a core."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            waited_ns += int(task.read_text().split()[1])
    return time.perf_counter(), time.process_time(), waited_ns / 1e9


def run_of(told: dict[str, Any]) -> Run:
    """Return the run that `asdict` has turned into `told`."""
    return Run(**told | {"steps": [Step(**step) for step in told["steps"]]})
