"""Predicted against measured peaks of memory: does the planner's memory model hold?

`python -m studies.memory` trains on pipeline ranks with several schedules, plans and accumulations, and
records in each rank the largest total of tensor bytes within a step, exactly (`MemoryPeak`). Beside it stand
the peaks of the simulator's replay of the same schedule with two memory models: the one counted from model sizes, and
the one that the engine measures in place for `"slices": "auto"`. Every table has the error of the whole peak, and
that of the part above parameters, gradients and optimizer states, where it cannot hide behind them.

Cases in which every stage runs the same order (all schedules with one micro-batch) are measured once.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from studies.options import (
    add_step_options,
    automatic_section,
    batches,
    list_of,
    measure_in_ranks,
    study_parser,
    workload_of,
    write_report,
)
from terapipe_ds.bench.ranks import Workload, build_engine, finish_rank, machine, prepare_rank, progress_bar
from terapipe_ds.files.atomic import write_text

EXAMPLES = """  python -m studies.memory
  python -m studies.memory --schedules seq1f1b --accumulation 4 --slices 2,16
  python -m studies.memory --hidden 512 --sequence-length 1024 --json memory.json"""

STEPS_AT_MOST = 5  # that are recorded until all ranks have seen one whole


@dataclass(frozen=True)
class EqualCase:
    """Hold one schedule with equal slices and a number of micro-batches per step; `also`: schedules with its order."""

    schedule: str
    slices: int
    accumulation: int
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class PeakRow:
    """Hold the bytes of one case on one stage."""

    case: EqualCase
    stage_id: int
    measured: int
    static: int  # the part for parameters, their gradients and optimizer states, counted from the tensors
    counted: int
    in_place: int

    def error(self, predicted: int, above_static: bool = False) -> float:
        """Return predicted over measured, less one."""
        static = self.static if above_static else 0
        return (predicted - static) / (self.measured - static) - 1


def cases(arguments: argparse.Namespace) -> list[EqualCase]:
    """Return the cases to measure."""
    from terapipe_ds.schedule import build

    by_orders: dict[Any, EqualCase] = {}
    shapes = itertools.product(arguments.accumulation, arguments.schedules, arguments.slices)
    for accumulation, schedule, slices in shapes:
        orders = build(schedule, arguments.stages, accumulation, slices).orders
        known = by_orders.get(orders)
        new = EqualCase(schedule, slices, accumulation)
        by_orders[orders] = new if known is None else replace(known, also=(*known.also, schedule))
    return list(by_orders.values())


# -- in each rank ----------------------------------------------------------------------------------------------------


def _rank_main(rank: int, rendezvous: str, work: Workload, arguments: argparse.Namespace, out: str) -> None:
    prepare_rank(rank, work.stages, rendezvous)
    import torch.distributed as torch_dist

    section = automatic_section(arguments.granularity, Path(out).parent)
    engine, data = build_engine(section, work), batches(work)
    engine.train_batch(data)  # this call measures, for which it has to be the only one that records
    torch_dist.barrier()  # rank 0 has written the measurements
    models = {"counted": counted_model(engine, work), "in_place": in_place_model(Path(out).parent)}
    todo = cases(arguments)
    bar = progress_bar(rank, len(todo), "cases")
    rows = []
    for case in todo:
        rows.append(_measure(engine, work, data, case, models))
        bar.update()
    bar.close()
    everyone: list[Any] = [None] * work.stages
    torch_dist.all_gather_object(everyone, [asdict(row) for row in rows])
    if rank == 0:
        write_text(out, json.dumps([row for same in zip(*everyone, strict=True) for row in same]))
    finish_rank([engine])


def counted_model(engine: Any, work: Workload) -> Any:
    """Return the memory model of the engine's GPT, from its sizes alone. A collective."""
    import torch.distributed as torch_dist

    from terapipe_ds.costs.model_sizes import ModelSize
    from terapipe_ds.models.gpt import DecoderLayer
    from terapipe_ds.planner import MemoryModel

    layers: list[Any] = [None] * work.stages
    mine = [part for part in engine.module.modules() if isinstance(part, DecoderLayer)]
    torch_dist.all_gather_object(layers, len(mine))
    head_dim = mine[0].attention.head_dim
    size = ModelSize(
        "benchmark",
        work.layers,
        work.hidden,
        work.heads,
        mine[0].attention.num_kv_heads,
        head_dim,
        mine[0].feed_forward.down.in_features,
        256,
        work.sequence_length,
    )
    return MemoryModel.of_model(
        size,
        num_stages=work.stages,
        dtype="float32",
        micro_batch=work.micro_batch,
        on_cpu=True,
        layers_per_part=layers,
    )


def in_place_model(folder: Path) -> Any:
    """Return the memory model in the cache of profiles that the engine has written to `folder`."""
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.runtime.profiling.cache import memory_of

    (path,) = folder.glob("profile-*.json")
    return memory_of(Profile.load(path))


def _measure(engine: Any, work: Workload, data: Any, case: EqualCase, models: dict[str, Any]) -> PeakRow:
    """Measure the peak of a step of a case, after one that warms it up with an empty pool of buffers."""
    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import Replay

    plan = SlicePlan.equal(work.sequence_length, case.slices)
    engine.set_train_batch_size(work.micro_batch * case.accumulation)
    engine.use_slice_plan(plan, case.schedule)
    measured, static = measure_peak(engine, data)
    replayed = Replay.of(build(case.schedule, work.stages, case.accumulation, case.slices))
    peaks = {name: replayed.peak_bytes(plan, model)[engine.stage_id] for name, model in models.items()}
    return PeakRow(case, engine.stage_id, measured, static, **peaks)


def measure_peak(engine: Any, data: Iterator[Any]) -> tuple[int, int]:
    """Return the most bytes of tensors within a step after the first one, and the bytes that stay from step to step.

    The latter are parameters, gradients and optimizer states. The buffers of earlier batches are dropped first, as if
    these steps were the only ones.
    """
    import torch
    import torch.distributed as torch_dist

    from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

    engine.slice_store.pool.drop_free()
    with MemoryPeak():  # the leftovers of this step are then counted when the next step drops them
        engine.train_batch(data)
    peaks: list[int] = []
    is_whole = torch.zeros(1)
    while not is_whole.item() and len(peaks) < STEPS_AT_MOST:
        torch_dist.barrier()
        before = live_bytes()
        with MemoryPeak() as peak:
            engine.train_batch(data)
        peaks.append(before + peak.grown_bytes)
        # a thread of gloo may free what it has reduced, where the recorder sees nothing: the step then seems larger
        is_whole.fill_(abs(live_bytes() - before - peak.left_bytes) < before // 100)
        torch_dist.all_reduce(is_whole, torch_dist.ReduceOp.MIN)
    parameters = list(engine.module.parameters())
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    gradients = [p for p in parameters if p.requires_grad]  # as large, and there for a part of the step
    static = sum(t.numel() * t.element_size() for t in (*parameters, *gradients, *states) if hasattr(t, "numel"))
    return min(peaks), static


def live_bytes() -> int:
    """Return the bytes of all tensors that this process can reach."""
    import torch
    from torch._subclasses import FakeTensor

    gc.collect()
    all_tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    # torch's compiler leaves tensors without memory
    tensors = [each for each in all_tensors if each.device.type == "cpu" and not issubclass(type(each), FakeTensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# -- in the parent ---------------------------------------------------------------------------------------------------


def run(work: Workload, arguments: argparse.Namespace) -> list[PeakRow]:
    """Measure all cases."""
    measured = measure_in_ranks(_rank_main, work, arguments)
    for row in measured:  # JSON knows lists only, and a case is a key
        case = row.pop("case")
        row["case"] = EqualCase(**case | {"also": tuple(case["also"])})
    return [PeakRow(**row) for row in measured]


def print_table(rows: list[PeakRow]) -> None:
    """Print one line per case and stage, and the worst errors."""
    print(f"{'':<27}{'peak of a step, MB':>31}{'error':>16}{'above static, MB':>19}{'error':>16}")
    columns = f"{'measured':>11}{'counted':>10}{'in place':>10}{'counted':>9}{'in place':>9}"
    print(f"{'schedule':<10}{'slices':>7}{'m':>3}{'stage':>6}{columns}{'measured':>16}{'counted':>10}{'in place':>9}")
    for row in rows:
        case = row.case
        head = f"{case.schedule:<10}{case.slices:>7}{case.accumulation:>3}{row.stage_id:>6}"
        peaks = f"{row.measured / 1e6:>11.1f}{row.counted / 1e6:>10.1f}{row.in_place / 1e6:>10.1f}"
        errors = f"{row.error(row.counted):>+9.1%}{row.error(row.in_place):>+9.1%}"
        above = f"{(row.measured - row.static) / 1e6:>16.1f}"
        above_errors = f"{row.error(row.counted, True):>+10.1%}{row.error(row.in_place, True):>+9.1%}"
        print(f"{head}{peaks}{errors}{above}{above_errors}")
    for case in dict.fromkeys(row.case for row in rows if row.case.also):
        others = ", ".join(case.also)
        print(f"{case.schedule}, slices {case.slices}, m {case.accumulation}: the same order as {others}")
    for name in ("counted", "in_place"):
        for above_static, what in ((False, "whole peak"), (True, "above static")):
            errors_of = [row.error(getattr(row, name), above_static) for row in rows]
            print(
                f"{name.replace('_', ' ')}, {what}: error {min(errors_of):+.1%} to {max(errors_of):+.1%}, "
                f"median {statistics.median(errors_of):+.1%}"
            )


def main(argv: list[str] | None = None) -> None:
    """Run the command line; see the module's text."""
    parser = study_parser("memory", __doc__, writes="machine, workload and all bytes", examples=EXAMPLES)
    names = ["terapipe", "seq1f1b", "1f1b"]
    parser.add_argument("--schedules", type=list_of(str), default=names, metavar="NAME[,NAME...]")
    add_step_options(parser, slices=[1, 4, 8], granularity=256)
    arguments = parser.parse_args(argv)
    work, this = workload_of(arguments), machine()
    rows = run(work, arguments)
    print_table(rows)
    write_report(arguments.json, machine=this, workload=asdict(work), runs=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
