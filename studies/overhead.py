"""What a step costs besides its layers: processor time per F + B of a slice, or of a whole micro-batch.

Two stages, a process each, train layers of almost no work with this engine, with DeepSpeed's own `PipelineEngine` and
with `Schedule1F1B` of `torch.distributed.pipelining`. All live in the same processes, each pinned to a core, and take
turns. A turn counts the processor time of the whole process, with all its threads, for steps of many micro-batches and
for steps of few. The difference over the F + B that the longer steps have more is the cost of one: the optimizer, the
start of a batch and all else that comes once per step is subtracted with the shorter ones, and shown as the rest.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from studies.options import study_parser
from terapipe_ds.bench.ranks import USUAL_SETTINGS, finish_rank, machine, prepare_rank, progress_bar, spawn_ranks

_EXAMPLES = """\
  python -m studies.overhead
  python -m studies.overhead --turns 15 --json
  python -m studies.overhead --profile seq1f1b      # where the time goes, by function"""

STAGES = 2
TORCH = "torch 1f1b"
_SAMPLE_S = 0.001  # of processor time, between two looks of a profile


@dataclass(frozen=True)
class System:
    """One competitor: this engine with a schedule, or one of the others (None). 0 slices: as many as the shape says."""

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
)


@dataclass(frozen=True)
class Shape:
    """What every system trains: `layers` linear layers of `hidden` numbers per token on each stage."""

    micro_batches: int = 8
    fewer: int = 2
    slices: int = 4
    tokens: int = 16
    hidden: int = 8
    layers: int = 1
    steps: int = 10


@dataclass(frozen=True)
class Reading:
    """Processor seconds of one stage for `steps` steps in one turn: with many micro-batches, and with few."""

    many_s: float
    few_s: float

    def unit_s(self, shape: Shape, units: int) -> float:
        """Return the processor time of one F + B, of `units` in a micro-batch."""
        return (self.many_s - self.few_s) / (shape.steps * units * (shape.micro_batches - shape.fewer))

    def rest_s(self, shape: Shape, units: int) -> float:
        """Return what a step takes besides its F + B."""
        return self.few_s / shape.steps - units * shape.fewer * self.unit_s(shape, units)


@dataclass(frozen=True)
class Row:
    """The figures of one system: medians over the turns, of the mean over the stages where none is named."""

    name: str
    units: int
    unit_s: float
    spread_s: tuple[float, float]
    stages_s: tuple[float, ...]
    rest_s: float
    ratio: float  # to torch's, of the same turn
    ratio_per_micro_batch: float

    @classmethod
    def of(cls, system: System, shape: Shape, readings: Sequence[Sequence[Reading]], torch_s: Sequence[float]) -> Row:
        """Return the row of `readings`, by turn and stage; `torch_s` are the times of torch in the same turns."""
        units = system.units(shape)
        by_turn = mean_unit_s(system, shape, readings)
        stages = tuple(statistics.median(r.unit_s(shape, units) for r in one) for one in zip(*readings, strict=True))
        rest_s = statistics.median(statistics.fmean(r.rest_s(shape, units) for r in turn) for turn in readings)
        ratio = statistics.median(own / other for own, other in zip(by_turn, torch_s, strict=True))
        spread = min(by_turn), max(by_turn)
        return cls(system.name, units, statistics.median(by_turn), spread, stages, rest_s, ratio, ratio * units)


def mean_unit_s(system: System, shape: Shape, readings: Sequence[Sequence[Reading]]) -> list[float]:
    """Return the mean over the stages of each turn."""
    units = system.units(shape)
    return [statistics.fmean(reading.unit_s(shape, units) for reading in turn) for turn in readings]


def rows_of(shape: Shape, readings: dict[str, list[list[Reading]]]) -> list[Row]:
    """Return a row per system from what each stage has read in each turn."""
    torch_s = mean_unit_s(next(s for s in SYSTEMS if s.name == TORCH), shape, readings[TORCH])
    return [Row.of(system, shape, readings[system.name], torch_s) for system in SYSTEMS if system.name in readings]


# -- in the ranks ---------------------------------------------------------------------------------------------------


class _Driver:
    """One system on one rank: `step(count)` trains one step of `count` micro-batches."""

    def __init__(self, step: Callable[[int], None], destroy: Callable[[], None] = lambda: None) -> None:
        self.step, self.destroy = step, destroy


def _loss(outputs: Any, labels: Any) -> Any:
    return (outputs - labels.unsqueeze(-1)).square().mean()


def _batches(shape: Shape, count: int) -> list[tuple[Any, Any]]:
    import torch

    drawn = torch.Generator().manual_seed(0)
    whole, labels = (1, shape.tokens, shape.hidden), (1, shape.tokens)
    return [(torch.randn(whole, generator=drawn), torch.randn(labels, generator=drawn)) for _ in range(count)]


def _engine_driver(system: System, shape: Shape) -> _Driver:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch import nn

    import terapipe_ds

    layers = [LayerSpec(nn.Linear, shape.hidden, shape.hidden) for _ in range(STAGES * shape.layers)]
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
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = nn.Sequential(*(nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.layers)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
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


def _read(driver: _Driver, shape: Shape, count: int) -> float:
    import torch.distributed as torch_dist

    driver.step(count)  # the plan and the sizes of this count
    torch_dist.barrier()
    begin_s = time.process_time()
    for _ in range(shape.steps):
        driver.step(count)
    return time.process_time() - begin_s


def _rank_main(rank: int, rendezvous: str, shape: Shape, names: Sequence[str], turns: int, folder: str) -> None:
    prepare_rank(rank, STAGES, rendezvous)
    systems = [system for system in SYSTEMS if system.name in names]
    drivers = {s.name: _torch_driver(shape, rank) if s.name == TORCH else _engine_driver(s, shape) for s in systems}
    for driver in drivers.values():  # first steps plan, check and connect
        _read(driver, shape, shape.micro_batches)
    readings: dict[str, list[Reading]] = {name: [] for name in drivers}
    bar = progress_bar(rank, turns, "turns")
    for turn in range(turns):
        for name in drivers if turn % 2 == 0 else reversed(drivers):
            both = [_read(drivers[name], shape, count) for count in (shape.micro_batches, shape.fewer)]
            readings[name].append(Reading(*both))
        bar.update()
    told = {name: [asdict(reading) for reading in each] for name, each in readings.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    finish_rank(list(drivers.values()))


def _profile_main(rank: int, rendezvous: str, shape: Shape, name: str, folder: str) -> None:
    import signal

    prepare_rank(rank, STAGES, rendezvous)
    system = next(system for system in SYSTEMS if system.name == name)
    driver = _torch_driver(shape, rank) if name == TORCH else _engine_driver(system, shape)
    _read(driver, shape, shape.micro_batches)
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
    _read(driver, shape, shape.micro_batches)
    taken_s = time.process_time() - begin_s
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    unit_us = 1e6 * taken_s / ((shape.steps + 1) * shape.micro_batches * system.units(shape))
    lines = [f"stage {rank}: {unit_us:.0f} us per F + B, optimizer and all", "  own us  with callees  function"]
    share_us = unit_us / max(1, own.total())
    lines += [
        f"{own[name] * share_us:>8.1f}{below[name] * share_us:>14.1f}  {name}" for name, _ in below.most_common(70)
    ]
    Path(folder, f"{rank}.txt").write_text("\n".join(lines) + "\n")
    finish_rank([driver])


# -- in the parent --------------------------------------------------------------------------------------------------


def measure(shape: Shape, names: Sequence[str], turns: int) -> dict[str, list[list[Reading]]]:
    """Return what each system has taken, by turn and stage."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(_rank_main, STAGES, shape, list(names), turns, folder)
        stages = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(STAGES)]
    return {
        name: [[Reading(**one) for one in turn] for turn in zip(*(s[name] for s in stages), strict=True)]
        for name in names
    }


def profiled(shape: Shape, name: str) -> list[str]:
    """Return the functions of each stage that take most of the steps of a system."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(_profile_main, STAGES, shape, name, folder)
        return [Path(folder, f"{rank}.txt").read_text() for rank in range(STAGES)]


def table(rows: Sequence[Row]) -> str:
    """Return a line per system."""
    lines = [
        f"{'system':<22}{'F + B of':>14}{'CPU each':>11}{'spread':>15}{'by stage':>17}{'rest/step':>11}{'/torch':>8}"
    ]
    for row in rows:
        what = "a slice" if row.units > 1 else "a micro-batch"
        spread = "-".join(f"{1e3 * each:.2f}" for each in row.spread_s)
        stages = " ".join(f"{1e3 * each:.3f}" for each in row.stages_s)
        lines.append(
            f"{row.name:<22}{what:>14}{1e3 * row.unit_s:>8.3f} ms{spread:>12} ms{stages:>14} ms"
            f"{1e3 * row.rest_s:>8.1f} ms{row.ratio:>8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or a profile of one system."""
    parser = study_parser("overhead", __doc__, examples=_EXAMPLES)
    for name, what in (
        ("micro_batches", "of the longer steps"),
        ("fewer", "micro-batches of the shorter steps, which are subtracted: at least 2, as many as torch needs"),
        ("slices", "of a micro-batch"),
        ("tokens", "of a micro-batch"),
        ("layers", "linear layers on each stage"),
        ("steps", "in a turn, of each kind"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(Shape, name)
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--turns", type=int, default=11, help="medians are over so many (default: 11)")
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--profile", metavar="SYSTEM", choices=names, help="print a profile of: " + ", ".join(names))
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in vars(Shape()) if hasattr(options, name)}
    shape = Shape(**given)
    if not STAGES <= shape.fewer < shape.micro_batches:
        parser.error(f"--fewer {shape.fewer}: at least {STAGES}, and less than --micro-batches {shape.micro_batches}")
    if options.profile:
        print("\n".join(profiled(shape, options.profile)))
        return
    about = machine()
    rows = rows_of(shape, measure(shape, names, options.turns))
    if options.json:
        shown = {
            "machine": about,
            "shape": asdict(shape),
            "turns": options.turns,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(shown))
        return
    steps = f"steps of {shape.micro_batches} micro-batches less steps of {shape.fewer}, {shape.slices} slices each"
    where = f"{about['cpu']}, {about['cores']} cores, load {about['load_before']:.1f} before, {about['date']}"
    print(f"{steps}; {options.turns} turns of {shape.steps} steps; {where}")
    print(table(rows))


if __name__ == "__main__":
    main()
