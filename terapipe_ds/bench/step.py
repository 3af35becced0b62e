"""Step time of DeepSpeed's stock engine and of token slices, side by side.

``python -m terapipe_ds.bench.step`` starts one process per stage, each pinned to its own core, builds every system with
the same model, data and partition in the same processes, and runs their steps in turns (A B C A B C ...), so that
whatever else the machine does meets all of them alike. Printed: the median step, its spread, and the median of the
ratios of each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  python -m terapipe_ds.bench.step                              stock, slices: 1, and 8 slices; 2 stages, 2048 tokens
  python -m terapipe_ds.bench.step --slices 2,4,8,16 --schedule terapipe
  python -m terapipe_ds.bench.step --plan 344,304,272,256,240,224,208,200
  python -m terapipe_ds.bench.step --accumulation 4 --steps 5 --json step.json
"""


@dataclass(frozen=True)
class System:
    """One competitor: DeepSpeed's stock engine (``section`` None) or ours with a ``terapipe`` section."""

    name: str
    section: dict[str, Any] | None


@dataclass(frozen=True)
class Workload:
    """What every system trains."""

    stages: int
    accumulation: int
    sequence_length: int
    micro_batch: int
    hidden: int
    layers: int
    heads: int
    steps: int
    warmup: int


def bubble_bound(stages: int, accumulation: int, slices: int) -> float:
    """The best ratio that slices can give with equal stages and no overhead: both bubbles by the formula of the
    paper."""
    return (accumulation + stages - 1) / accumulation * (accumulation * slices) / (accumulation * slices + stages - 1)


def _systems(arguments: argparse.Namespace) -> list[System]:
    systems = [System("deepspeed 1f1b", None), System("terapipe 1f1b, slices 1", _section("1f1b", 1))]
    for count in arguments.slices:
        systems.append(System(f"terapipe {arguments.schedule}, slices {count}", _section(arguments.schedule, count)))
    for lengths in arguments.plan:
        name = f"terapipe {arguments.schedule}, plan of {len(lengths)}"
        systems.append(System(name, _section(arguments.schedule, lengths)))
    return systems


def _section(schedule: str, slices: int | list[int]) -> dict[str, Any]:
    return {"enabled": True, "schedule": schedule, "slices": slices, "granularity_tokens": 1}


# -- in each rank ----------------------------------------------------------------------------------------------------


def _rank_main(rank: int, rendezvous: str, work: Workload, systems: list[System], out: str) -> None:
    _prepare_rank(rank, work.stages)
    import deepspeed
    import torch
    import torch.distributed as torch_dist

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at start, for a minute
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=work.stages)
    deepspeed.init_distributed("gloo")
    engines = [_engine(system, work) for system in systems]
    data = _batches(work)
    times: list[list[float]] = [[] for _ in systems]
    losses: list[float] = [0.0 for _ in systems]
    for turn in range(work.warmup + work.steps):
        for index, engine in enumerate(engines):
            torch_dist.barrier()
            start = time.perf_counter()
            losses[index] = float(engine.train_batch(data))
            if turn >= work.warmup:
                times[index].append(time.perf_counter() - start)
        if rank == 0:
            print(f"\rturn {turn + 1} of {work.warmup + work.steps}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print("\r", end="", file=sys.stderr, flush=True)
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    torch_dist.barrier()
    for engine in engines:
        engine.destroy()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown


def _prepare_rank(rank: int, stages: int) -> None:
    os.environ.update(
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(stages),
        LOCAL_SIZE=str(stages), LOCAL_WORLD_SIZE=str(stages), DEEPSPEED_LOG_LEVEL="error",
    )  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process


def _engine(system: System, work: Workload) -> Any:
    from deepspeed.pipe import PipelineModule

    import terapipe_ds
    from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss

    config = GPTConfig(
        vocab_size=256, hidden_size=work.hidden, num_layers=work.layers, num_heads=work.heads,
        max_sequence_length=work.sequence_length,
    )  # fmt: skip
    module = PipelineModule(gpt_layers(config), num_stages=work.stages, loss_fn=gpt_loss, partition_method="parameters")
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        # DeepSpeed clips at 1.0 by default, and its stock norm counts the first stage only: the losses would differ
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if system.section is not None:
        ds_config["terapipe"] = system.section
    engine, *_ = terapipe_ds.initialize(model=module, model_parameters=list(module.parameters()), config=ds_config)
    return engine


def _batches(work: Workload) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (work.micro_batch, work.sequence_length + 1), generator=generator)
    while True:
        yield tokens[:, :-1], tokens[:, 1:]


# -- in the parent ---------------------------------------------------------------------------------------------------


def measure(work: Workload, systems: list[System]) -> dict[str, Any]:
    """Run all systems in turns; returns the times and losses by system, as rank 0 saw them."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "result.json")
        mp.spawn(_rank_main, args=(str(Path(folder) / "store"), work, systems, out), nprocs=work.stages, join=True)
        result: dict[str, Any] = json.loads(Path(out).read_text())
    return result


def _rows(work: Workload, systems: list[System], result: dict[str, Any]) -> list[dict[str, Any]]:
    stock = result["times"][0]
    rows = []
    for system, times, loss in zip(systems, result["times"], result["losses"], strict=True):
        given = 1 if system.section is None else system.section["slices"]
        slices = len(given) if isinstance(given, list) else given
        rows.append({
            "system": system.name,
            "section": system.section,
            "step_s": statistics.median(times),
            "step_s_all": times,
            "ratio": statistics.median(a / b for a, b in zip(stock, times, strict=True)),
            "bound": bubble_bound(work.stages, work.accumulation, slices),
            "loss": loss,
        })  # fmt: skip
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'system':<34}{'step':>9}{'spread':>17}{'stock/this':>12}{'bound':>8}{'loss':>11}")
    for row in rows:
        spread = f"{min(row['step_s_all']):.3f}-{max(row['step_s_all']):.3f} s"
        figures = f"{row['ratio']:>12.3f}{row['bound']:>8.3f}{row['loss']:>11.6f}"
        print(f"{row['system']:<34}{row['step_s']:>7.3f} s{spread:>17}{figures}")


def _machine() -> dict[str, Any]:
    from terapipe_ds.compat import installed_versions

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "versions": installed_versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m terapipe_ds.bench.step", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--schedule", default="seq1f1b", help="of the sliced runs (default: %(default)s)")
    parser.add_argument(
        "--slices", type=lambda text: [int(n) for n in text.split(",")], default=[8], metavar="N[,N...]",
        help="numbers of equal slices to run (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=lambda text: [int(n) for n in text.split(",")], default=[], action="append", metavar="N,N,...",
        help="slice lengths in tokens to run as well; may be given again. Later slices read a longer prefix, so equal "
        "times want longer slices first",
    )  # fmt: skip
    for name, default, what in (
        ("stages", 2, "pipeline stages, one process each"), ("accumulation", 1, "micro-batches per step"),
        ("sequence-length", 2048, "tokens"), ("micro-batch", 1, "sequences per micro-batch"),
        ("hidden", 512, "hidden size"),
        ("layers", 8, "decoder layers"), ("heads", 8, "attention heads"), ("steps", 11, "timed turns"),
        ("warmup", 2, "turns before"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write machine, workload and all times here")
    arguments = parser.parse_args(argv)
    fields = {name: getattr(arguments, name) for name in Workload.__dataclass_fields__}
    work, systems, machine = Workload(**fields), _systems(arguments), _machine()
    rows = _rows(work, systems, measure(work, systems))
    _print_table(rows)
    if arguments.json:
        report = {"machine": machine, "workload": asdict(work), "runs": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
