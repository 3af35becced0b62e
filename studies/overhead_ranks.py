"""Train layers of almost no work in ranks, and read the processor time, for `studies.overhead`.

This module does not import torch: a rank is pinned before it imports torch.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from terapipe_ds.bench.ranks import USUAL_SETTINGS, finish_rank, prepare_rank, progress_bar

STAGES = 2
TORCH, ALONE = "torch 1f1b", "layers alone"
LAYERS = ("scale", "linear")
_SAMPLE_S = 0.001  # of processor time, between two looks of a profile


@dataclass(frozen=True)
class System:
    """Describe one competitor: this engine with a schedule, or another (None). 0 slices: as many as the shape has."""

    name: str
    schedule: str | None
    slices: int = 1

    def units(self, shape: Shape) -> int:
        """Return the F + B of a micro-batch on each stage."""
        return self.slices or shape.slices


SYSTEMS = (
    System("terapipe seq1f1b", "seq1f1b", 0),
    System("terapipe seq1f1b-zb", "seq1f1b-zb", 0),
    System("terapipe 1f1b", "1f1b"),
    System("deepspeed 1f1b", None),
    System(TORCH, None),
    System(ALONE, None),
)


@dataclass(frozen=True)
class Shape:
    """Describe the common model: `layers` layers of `hidden` numbers per token on each stage."""

    micro_batches: int = 8
    fewer: int = 2
    slices: int = 4
    tokens: int = 16
    hidden: int = 8
    layers: int = 1
    layer: str = "scale"  # one of LAYERS
    steps: int = 10


@dataclass(frozen=True)
class Reading:
    """Hold processor seconds of one stage for `steps` steps in one turn: with many micro-batches, and with few."""

    steps: int
    many_s: float
    few_s: float

    def unit_s(self, shape: Shape, units: int) -> float:
        """Return the processor time of one F + B, of `units` in a micro-batch."""
        return (self.many_s - self.few_s) / (self.steps * units * (shape.micro_batches - shape.fewer))

    def rest_s(self, shape: Shape, units: int) -> float:
        """Return the seconds of a step beyond its F + B."""
        return self.few_s / self.steps - units * shape.fewer * self.unit_s(shape, units)


class _Driver:
    """Drive one system on one rank: `step(count)` trains one step of `count` micro-batches."""

    def __init__(self, step: Callable[[int], None], destroy: Callable[[], None] = lambda: None) -> None:
        self.step, self.destroy = step, destroy


def _loss(outputs: Any, labels: Any) -> Any:
    return (outputs - labels.unsqueeze(-1)).square().mean()


def _batches(shape: Shape, count: int) -> list[tuple[Any, Any]]:
    import torch

    drawn = torch.Generator().manual_seed(0)
    whole, labels = (1, shape.tokens, shape.hidden), (1, shape.tokens)
    return [(torch.randn(whole, generator=drawn), torch.randn(labels, generator=drawn)) for _ in range(count)]


def _layer(shape: Shape) -> tuple[Any, ...]:
    """Return the class of a layer, and its arguments."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        """Multiply each feature by a number: about the smallest trainable layer."""

        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.weight

    return (nn.Linear, shape.hidden, shape.hidden) if shape.layer == "linear" else (Scale, shape.hidden)


def _stage_of_layers(shape: Shape) -> tuple[Any, Any]:
    """Return the layers of a stage, and their optimizer, for systems without an engine of DeepSpeed."""
    import torch

    kind, *arguments = _layer(shape)
    module = torch.nn.Sequential(*(kind(*arguments) for _ in range(shape.layers)))
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def _engine_driver(system: System, shape: Shape) -> _Driver:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import terapipe_ds

    layers = [LayerSpec(*_layer(shape)) for _ in range(STAGES * shape.layers)]
    module = PipelineModule(layers, num_stages=STAGES, loss_fn=_loss, partition_method="uniform")
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": shape.micro_batches}
    settings: dict[str, Any] = {**USUAL_SETTINGS, **sizes, "steps_per_print": 10**9}
    initialize = deepspeed.initialize
    if system.schedule is not None:
        section = {"enabled": True, "schedule": system.schedule, "granularity_tokens": 1, "loss_reduction": "mean"}
        settings["terapipe"] = {**section, "slices": system.units(shape)}
        initialize = terapipe_ds.initialize
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    batches = _batches(shape, shape.micro_batches)

    def step(count: int) -> None:
        if engine.gradient_accumulation_steps() != count:
            engine.set_train_batch_size(count)
        engine.train_batch(iter(batches))

    return _Driver(step, engine.destroy)


def _torch_driver(shape: Shape, rank: int) -> _Driver:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module, optimizer = _stage_of_layers(shape)
    like = torch.empty(1, shape.tokens, shape.hidden, device="meta", requires_grad=rank > 0)
    outputs = torch.empty(1, shape.tokens, shape.hidden, device="meta", requires_grad=True)

    def pipeline(count: int) -> Any:
        stage = PipelineStage(module, rank, STAGES, torch.device("cpu"), input_args=like, output_args=outputs)
        return Schedule1F1B(stage, count, loss_fn=lambda *both: _loss(*both) / count, scale_grads=False)

    pipelines = {count: pipeline(count) for count in (shape.micro_batches, shape.fewer)}
    batches = _batches(shape, shape.micro_batches)

    def step(count: int) -> None:
        inputs, labels = (torch.cat(tensors) for tensors in zip(*batches[:count], strict=True))
        keywords: dict[str, Any] = {"target": labels, "losses": []} if rank == STAGES - 1 else {}
        pipelines[count].step(*((inputs,) if rank == 0 else ()), return_outputs=False, **keywords)
        optimizer.step()
        optimizer.zero_grad()

    return _Driver(step)


def _alone_driver(shape: Shape, rank: int) -> _Driver:
    import torch

    module, optimizer = _stage_of_layers(shape)
    batches = _batches(shape, shape.micro_batches)

    def step(count: int) -> None:
        for inputs, labels in batches[:count]:
            outputs = module(inputs.requires_grad_(rank > 0))
            if rank == STAGES - 1:
                (_loss(outputs, labels) / count).backward()
            else:
                torch.autograd.backward(outputs, inputs)
        optimizer.step()
        optimizer.zero_grad()

    return _Driver(step)


def _driver(system: System, shape: Shape, rank: int) -> _Driver:
    if system.name == ALONE:
        return _alone_driver(shape, rank)
    return _torch_driver(shape, rank) if system.name == TORCH else _engine_driver(system, shape)


def _read(driver: _Driver, steps: int, count: int) -> float:
    import torch.distributed as torch_dist

    driver.step(count)  # the plan and the sizes of this count
    torch_dist.barrier()
    begin_s = time.process_time()
    for _ in range(steps):
        driver.step(count)
    return time.process_time() - begin_s


def rank_main(rank: int, rendezvous: str, shape: Shape, names: Sequence[str], turns: int, folder: str) -> None:
    prepare_rank(rank, STAGES, rendezvous)
    systems = [system for system in SYSTEMS if system.name in names]
    drivers = {system.name: _driver(system, shape, rank) for system in systems}
    for driver in drivers.values():  # first steps plan, check and connect
        _read(driver, shape.steps, shape.micro_batches)
    readings: dict[str, list[Reading]] = {name: [] for name in drivers}
    bar = progress_bar(rank, turns, "turns")
    for turn in range(turns):
        for system in systems if turn % 2 == 0 else reversed(systems):
            steps = shape.steps * shape.slices // system.units(shape)  # the same number of F + B for all
            both = [_read(drivers[system.name], steps, count) for count in (shape.micro_batches, shape.fewer)]
            readings[system.name].append(Reading(steps, *both))
        bar.update()
    told = {name: [asdict(reading) for reading in each] for name, each in readings.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    finish_rank(list(drivers.values()))


def profile_main(rank: int, rendezvous: str, shape: Shape, name: str, folder: str) -> None:
    import signal

    prepare_rank(rank, STAGES, rendezvous)
    system = next(system for system in SYSTEMS if system.name == name)
    driver = _driver(system, shape, rank)
    _read(driver, shape.steps, shape.micro_batches)
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        seen = []
        while frame is not None:
            code = frame.f_code
            seen.append(f"{code.co_qualname}, {'/'.join(Path(code.co_filename).parts[-2:])}")
            frame = frame.f_back
        own.update(seen[:1])
        below.update(set(seen))

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
    begin_s = time.process_time()
    _read(driver, shape.steps, shape.micro_batches)
    taken_s = time.process_time() - begin_s
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    unit_us = 1e6 * taken_s / ((shape.steps + 1) * shape.micro_batches * system.units(shape))
    lines = [f"stage {rank}: {unit_us:.0f} us per F + B, optimizer and all", "  own us  with callees  function"]
    share_us = unit_us / max(1, own.total())
    lines += [
        f"{own[name] * share_us:>8.1f}{below[name] * share_us:>14.1f}  {name}" for name, _ in below.most_common(100)
    ]
    Path(folder, f"{rank}.txt").write_text("\n".join(lines) + "\n")
    finish_rank([driver])
