"""Compare DeepSpeed's stock engine with ours on 1, 2 and 4 ranks: the cases of `tests/test_transparency.py` on devices.

With a device for each rank, messages go over NCCL. With fewer devices, all ranks share the first one, over gloo and the
host.
"""

import gc
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.distributed.cases import Case, default_cases
from tests.gpu_checks.checks import Check, Settings, at_most, not_run

WORLDS = (1, 2, 4)
SCHEDULES = ("seq1f1b", "seq1f1b-zb", "terapipe", "1f1b", "zbv", "seq1f1b-interleaved", "chimera-seq")
PATIENCE_S = 120.0
"""How long a rank that has finished or refused a case waits for the others."""
CHECKED = {"verify": "first_batch", "check_finite": "every_step"}


@dataclass(frozen=True)
class World:
    """Describe ranks that run cases one after the other, until it is too late to begin another one."""

    size: int
    device: str
    shared: bool
    cases: tuple[Case, ...]
    telling: int  # the number of first cases that must have run
    extra: dict[str, Any]  # keys of the `terapipe` section of all cases
    seconds: float
    binds: bool = True  # a device is bound to the group of all ranks

    @property
    def name(self) -> str:
        """Return the beginning of the names of its checks."""
        over = "over NCCL" if self.binds else "over NCCL, no bound device"
        where = "on CPUs" if self.device == "cpu" else "sharing a device, gloo" if self.shared else over
        offload = " that offload" if self.extra.get("offload_activations") else ""
        return f"{self.size} rank{'s' * (self.size > 1)}{offload} {where}"


def checks(settings: Settings) -> Iterator[Check]:
    """Yield checks of as many cases as the time allows, the most telling first; each number of ranks gets a share."""
    worlds = (1, 2) if settings.dry_run else WORLDS
    for place, size in enumerate(worlds):
        share_s = (settings.ends_s - time.monotonic()) / (len(worlds) - place)
        telling = telling_cases(size, settings.dry_run)
        more = () if settings.dry_run else [case for case in default_cases() if case.world_size == size]
        yield from run_world(world_of(settings, size, telling, {}, share_s, more))


def watched(settings: Settings) -> Iterator[Check]:
    """Check two ranks that verify the first batch, look for numbers that are not finite, and write timelines.

    Two more ranks offload activations, in a schedule whose backwards are far from their forwards.
    """
    folder = settings.folder / "traces"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    cases = telling_cases(2, dry_run=True)
    world = world_of(settings, 2, cases, {**CHECKED, "trace_dir": str(folder)}, 200.0)
    yield from run_world(world)
    if settings.device == "cuda" and not world.shared:
        yield from run_world(replace(world, binds=False, extra=CHECKED))
    far = replace(cases[0], schedule="gpipe", slices=6)
    yield from run_world(world_of(settings, 2, (far,), {"offload_activations": True}, 100.0))
    from terapipe_ds.timeline import Timeline

    files = sorted(folder.glob("timeline-step*-rank*.json"))
    events = [len(Timeline.load(file).events) for file in files]
    fewest = min(events, default=0)
    yield Check("files with timelines of steps", float(len(files)), ">= 4", len(files) >= 4)
    yield Check("computations in the shortest of them", float(fewest), ">= 2", fewest >= 2)


def telling_cases(size: int, dry_run: bool) -> tuple[Case, ...]:
    """Return cases for `size` ranks: every precision, every kind of schedule, recomputation."""
    layers = max(4, 2 * size - 3)  # and three beside them: two parts per stage have a layer each
    plain = Case(stages=size, micro_batches=2, kv_heads=2, decoder_layers=layers)
    if dry_run:
        return (replace(plain, precision="fp32"), replace(plain, precision="bf16_zero1"))
    found = [replace(plain, precision=p) for p in ("fp64", "fp32", "bf16", "bf16_zero1")]
    found += [
        replace(plain, slices=(14, 9, 1), schedule=schedule, precision=precision, masked=True)
        for schedule in SCHEDULES
        if not (schedule.startswith("chimera") and size % 2)
        for precision in ("fp32", "bf16_zero1")
    ]
    found += [
        replace(plain, checkpointing=how, precision="bf16_zero1", tied=True) for how in ("reentrant", "non_reentrant")
    ]
    if size == 4:
        found.append(replace(plain, stages=2, data_parallel=2, precision="bf16_zero1"))
    return tuple(found)


def world_of(
    settings: Settings,
    size: int,
    telling: Sequence[Case],
    extra: dict[str, Any],
    seconds: float,
    more: Sequence[Case] = (),
) -> World:
    """Return `size` ranks, on a device each where there are enough. `more` are cases for the time that is left."""
    import torch

    shared = settings.device == "cuda" and torch.cuda.device_count() < size
    cases = tuple(case for case in dict.fromkeys([*telling, *more]) if case.stock().world_size == size)
    return World(size, settings.device, shared, cases, len(telling), extra, seconds)


def run_world(world: World) -> Iterator[Check]:
    """Yield a check per case: the worst error of losses, gradients, parameters and evaluations over what is allowed."""
    from terapipe_ds.bench.ranks import spawn_ranks

    with tempfile.TemporaryDirectory() as folder:
        problem = None
        try:
            spawn_ranks(_rank_main, world.size, world, folder)
        except RuntimeError as error:
            problem = str(error)
        path = Path(folder, "found.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    yield from (Check(**line) for line in found)
    if problem is not None:
        yield not_run(f"{world.name}: {world.cases[min(len(found), len(world.cases) - 1)]}", problem)
    ran, enough = f"{len(found)} of {len(world.cases)}", len(found) >= world.telling
    yield Check(f"{world.name}: cases run", ran, f">= {world.telling}", enough)


def _rank_main(rank: int, rendezvous: str, world: World, folder: str) -> None:
    from terapipe_ds.bench.ranks import finish_rank, prepare_rank

    prepare_rank(rank, world.size, rendezvous, world.device, world.shared, world.binds)
    import deepspeed
    import torch
    from torch import distributed

    from terapipe_ds.runtime.links.staging import neighbours_staged
    from tests.distributed import training

    if world.device == "cpu":
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    section = training.terapipe_section
    training.terapipe_section = lambda case: {**section(case), "verify": "off", **world.extra}
    control = distributed.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    ends_s = time.monotonic() + world.seconds
    runs = _Runs(control)
    with neighbours_staged():
        for case in world.cases:
            go = torch.tensor(int(time.monotonic() < ends_s))
            distributed.broadcast(go, 0, group=control)
            if not go:
                break
            try:
                check = _compared(case, runs, world.name)
            except RefusedError as error:
                check = not_run(f"{world.name}: {case}", str(error))
            if rank == 0:
                with open(Path(folder, "found.jsonl"), "a") as file:
                    file.write(json.dumps(asdict(check)) + "\n")
        finish_rank([])


class RefusedError(RuntimeError):
    """Report a case that all ranks refused; the next case can still run."""


def all_alike(everyone: Sequence[Any]) -> list[Any]:
    """Return the records of all ranks, where each has one.

    Raises:
        RefusedError: all ranks raised; their errors are given as text.
        RuntimeError: some ranks raised, so that the others cannot go on.
    """
    said = [one for one in everyone if isinstance(one, str)]
    if not said:
        return list(everyone)
    if len(said) < len(everyone):
        raise RuntimeError(f"{len(said)} of {len(everyone)} ranks raised: {said[0]}")
    raise RefusedError(said[0])


class _Runs:
    """Train cases on all ranks; a stock run that several cases are compared with is made once."""

    def __init__(self, control: Any) -> None:
        from tests.distributed import harness

        self._control, self._groups = control, harness._process_groups()
        self._stock: dict[Case, list[Any]] = {}

    def of(self, case: Case, system: Any) -> list[Any]:
        """Train a case and return the records of all ranks."""
        if system == "stock" and case in self._stock:
            return self._stock[case]
        from torch import distributed

        from tests.distributed import harness, training

        try:
            record: Any = training.train_case(case, system)
        except Exception as error:
            record = f"{type(error).__name__}: {error}"
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, record, group=self._control)
        gc.collect()
        distributed.barrier(group=self._control)
        harness._destroy_process_groups(except_for=self._groups)
        everyone = all_alike(everyone)
        if system == "stock":
            self._stock[case] = everyone
        return everyone


def _compared(case: Case, runs: _Runs, where: str) -> Check:
    from tests.distributed import cases

    ours = runs.of(case, "terapipe")
    if case.dtype == "bf16":  # the limits are what bf16 costs the stock engine
        exact = runs.of(replace(case, precision="fp32_zero1").stock(), "stock")
        limits = cases.bf16_limits(cases.errors(runs.of(case.stock(), "stock"), exact))
        found = cases.errors(ours, exact)
    else:
        limits = cases.contract(case)
        found = cases.errors(ours, runs.of(case.stock(), "stock"))
    share = max(found[kind].error / limit for kind, limit in limits.items() if limit)
    return at_most(f"{where}: {case}, error over what is allowed", share, 1.0)
