"""List the competitors of `terapipe bench` and its presets, and say what cannot run with which sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.bench.ranks import Workload
from terapipe_ds.compat.versions import version_of
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from terapipe_ds.schedule.placement import BIDIRECTIONAL, LOOPED, SEARCH, V_SHAPED

PLAN = "plan"
"""Slices as the planner cuts them by the costs that this run has measured; `plan:8`: at most eight of them."""

AUTO = "auto"  # the planner's choice of a schedule with a name, here among those with one part per stage

DEEPSPEED = ("1f1b", "dualpipev")
TERAPIPE = (*(name for name in SCHEDULE_NAMES if name != "dapple"), SEARCH)  # dapple is 1f1b by another name
TORCH = ("gpipe", "1f1b", "interleaved1f1b", "zbv")
SCHEDULES = {"deepspeed": DEEPSPEED, "terapipe": TERAPIPE, "torch": TORCH}
"""What each system can run, by the names used here."""
_EVERY_SCHEDULE = tuple(dict.fromkeys(itertools.chain.from_iterable(SCHEDULES.values())))
TWO_PARTS = ("dualpipev", "interleaved1f1b", *LOOPED, *V_SHAPED)
"""Two parts of the layers on each stage, half as large as those of the others."""
WHOLE = ("1f1b", "zb-h1", "interleaved", "chimera")
"""Ours that run micro-batch after micro-batch, so that slices gain little: one slice unless asked for."""

CUTS = {"halves": (*LOOPED, *V_SHAPED), "whole stages": ("seq1f1b",)}
"""Which schedules of ours run the same parts; the last one measures them. All others run whole stages."""

Slices = int | str | tuple[int, ...]  # a number of equal slices, `PLAN` with or without a limit, or lengths in tokens


def num_layers(work: Workload, gpt: dict[str, Any] | None = None) -> int:
    """Return the layers of the model as pipelines cut it: with embedding, learned positions, final norm and head."""
    return work.layers + 3 + ((gpt or {}).get("positions") == "learned")


@dataclass(frozen=True)
class Case:
    """Describe one competitor."""

    system: str
    schedule: str
    slices: Slices = 1
    accumulations: tuple[int, ...] = ()  # empty: all of the run
    given_chunks: int | None = None  # a config's `terapipe.chunks_per_stage`
    options: tuple[tuple[str, Any], ...] = ()  # a config's `terapipe.schedule_options`

    @property
    def label(self) -> str:
        if self.system != "terapipe":
            return f"{self.system} {self.schedule}"
        options = "".join(f" {key}={value}" for key, value in self.options)
        parts = "" if self.given_chunks is None else f", {self.given_chunks} parts per stage"
        slices = f"{self.slices} slice{'' if self.slices == 1 else 's'}"
        if isinstance(self.slices, tuple):
            slices = f"{len(self.slices)} given slices"
        elif self.planned:
            slices = "planned" + ("" if self.max_slices is None else f", <= {self.max_slices}")
        return f"terapipe {self.schedule}{options}{parts}, {slices}"

    @property
    def cut(self) -> str:
        """Return how our engine cuts the layers: a key of `CUTS`, or words for other numbers of parts."""
        if self.given_chunks is not None:
            return {1: "whole stages", 2: "halves"}.get(self.given_chunks, f"{self.given_chunks} parts per stage")
        return next((name for name, schedules in CUTS.items() if self.schedule in schedules), "whole stages")

    @property
    def chunks_per_stage(self) -> int:
        """Return our engine's `terapipe.chunks_per_stage`."""
        return self.given_chunks or (2 if self.schedule in CHUNKED_SCHEDULES and self.system == "terapipe" else 1)

    @property
    def planned(self) -> bool:
        return isinstance(self.slices, str)

    @property
    def needs_costs(self) -> bool:
        """Return whether the planner chooses slices or schedule from measured costs."""
        return self.system == "terapipe" and (self.planned or self.schedule in (AUTO, SEARCH))

    @property
    def max_slices(self) -> int | None:
        """Return the most slices of a plan; None: as many as the planner wants."""
        limit = self.slices.partition(":")[2] if isinstance(self.slices, str) else ""
        return int(limit) if limit else None

    def runs_at(self, accumulation: int) -> bool:
        return not self.accumulations or accumulation in self.accumulations

    def problem(self, work: Workload, accumulation: int, gpt: dict[str, Any] | None = None) -> str | None:
        """Return why the case cannot run with these sizes, or None; `gpt` is the field of `Job`."""
        stages, layers, schedule, length = work.stages, num_layers(work, gpt), self.schedule, work.sequence_length
        rounds = max(1, accumulation // stages)
        parts = stages * (self.given_chunks or (2 if schedule in TWO_PARTS else 1))
        if schedule == "dualpipev" and accumulation < 2 * stages:
            return f"DualPipeV needs accumulation >= {2 * stages} (two per stage), this is {accumulation}"
        if (self.system, schedule) == ("torch", "1f1b") and accumulation < stages:
            return f"torch's 1F1B needs accumulation >= {stages} (the stages), this is {accumulation}"
        if schedule == "interleaved1f1b" and accumulation % rounds:
            return f"interleaved 1F1B needs a multiple of {rounds} micro-batches, this is {accumulation}"
        if schedule in BIDIRECTIONAL and stages % 2:
            return f"{schedule} needs an even number of stages, this is {stages}"
        if isinstance(self.slices, int) and self.slices > length:
            return f"{self.slices} slices are more than the {length} tokens of a sequence; give fewer"
        if schedule == SEARCH and not self.planned:
            return f"{SEARCH} chooses slices and order together; give {PLAN}, or {PLAN}:8 for at most eight slices"
        return f"{schedule} cuts the model in {parts} parts, it has {layers} layers" if parts > layers else None


@dataclass(frozen=True)
class Job:
    """Describe a whole run, as every rank gets it."""

    work: Workload
    cases: tuple[Case, ...]
    accumulations: tuple[int, ...]
    pairs: int
    granularity: int = 64
    device: str = "cpu"
    replayed: bool = False  # fewer cores than stages, so that the wall clock means nothing
    ds_config: dict[str, Any] | None = None  # in place of the usual one
    gpt: dict[str, Any] | None = None  # fields of `GPTConfig`, in place of the usual ones
    share_device: bool = False  # all stages on the first device, over gloo
    peak_tflops: float | None = None  # of a device; None: of the card that a GPU's name identifies

    def device_of(self, rank: int) -> str:
        return self.device if self.device == "cpu" else f"{self.device}:{0 if self.share_device else rank}"

    @property
    def shortest(self) -> int:
        """Return the tokens of the shortest slice of plans, and of slices that a case names: they have predictions."""
        named = [case.slices for case in self.cases if isinstance(case.slices, int | tuple)]
        tokens = [self.work.sequence_length // each if isinstance(each, int) else min(each) for each in named]
        return min([self.granularity, *filter(None, tokens)])

    def problem(self, index: int, accumulation: int) -> str | None:
        """Return why a case does not run at an accumulation, or None."""
        case = self.cases[index]
        if self.share_device and (case.system == "torch" or case.schedule == "dualpipev"):
            return (
                f"{case.system} {case.schedule} sends from the device itself, which gloo cannot, and NCCL refuses "
                "stages that share one: give each stage a device, without --share-device"
            )
        release = tuple(map(int, (version_of("torch") or "9.9").split(".")[:2]))
        if (case.system, case.schedule, self.device) == ("torch", "zbv", "cpu") and release < (2, 12):
            return "up to torch 2.11 its ZBV sends messages to its own rank, which gloo cannot: use torch 2.12 or later"
        return case.problem(self.work, accumulation, self.gpt)


@dataclass(frozen=True)
class Preset:
    """Hold a workload with its accumulations and competitors; `full` ones with `--full`."""

    work: Workload
    accumulations: tuple[int, ...]
    pairs: int
    cases: tuple[Case, ...]
    full_accumulations: tuple[int, ...] = (1, 4, 8)


def all_cases(slices: Sequence[Slices]) -> tuple[Case, ...]:
    """Return every schedule of every system; ours in each of `slices`, or in one if they run whole micro-batches."""
    stock = [Case("deepspeed", name) for name in DEEPSPEED]
    sliced = [name for name in TERAPIPE if name == "1f1b" or name not in WHOLE]
    planned = [given for given in slices if isinstance(given, str)]  # an order is found for the slices that it has
    ours = [Case("terapipe", name, given) for name in sliced for given in (planned if name == SEARCH else slices)]
    whole = [Case("terapipe", name, 1) for name in WHOLE]
    return (*stock, *whole, *ours, *(Case("torch", name) for name in TORCH))


# 8 slices are about 256 tokens of two sequences: 512 rows. With 256 a core's matrix products are about 3 % slower, for
# they read and write as many weights and weight gradients per product; on accelerators slices have thousands of rows.
_TWO = Workload(stages=2, accumulation=1, sequence_length=2048, micro_batch=2, hidden=384, layers=4, heads=6)
_EIGHT = Workload(stages=8, accumulation=1, sequence_length=2048, micro_batch=1, hidden=256, layers=16, heads=4)
_STOCK = Case("deepspeed", "1f1b")
_USUAL = (_STOCK, Case("terapipe", "1f1b", 1))
PRESETS = {
    # From torch, the schedules that can be its best: one micro-batch has one order (and torch's 1F1B refuses fewer
    # micro-batches than stages); with several, ZBV has the smallest bubble. From ours, no schedule of halves: measuring
    # their costs takes a minute, and the schedules that go both ways were faster when both competed.
    "cpu-2stage": Preset(_TWO, (1, 4), 5, (
        *_USUAL,
        Case("terapipe", "seq1f1b", 8, (1,)),
        Case("terapipe", "seq1f1b", "plan:8", (1,)),
        Case("terapipe", "seq1f1b", PLAN),
        Case("terapipe", "seq1f1b-zb", PLAN),
        Case("terapipe", SEARCH, PLAN, (4,)),
        Case("terapipe", "chimera-seq", PLAN, (4,)),
        Case("torch", "gpipe", accumulations=(1,)),
        Case("torch", "zbv", accumulations=(4,)),
    )),
    "cpu-8stage": Preset(_EIGHT, (1, 8), 2, (
        *_USUAL,
        Case("terapipe", "seq1f1b", 8),
        Case("terapipe", "seq1f1b", 16, (1,)),
        Case("terapipe", "seq1f1b", PLAN),
        Case("torch", "gpipe", accumulations=(1,)),
        Case("torch", "1f1b", accumulations=(8,)),
    ), (1, 8, 16)),
}  # fmt: skip


_WHOLE_STAGES = (*_USUAL, Case("torch", "gpipe"))
"""Of each system, whole micro-batches through whole stages with any accumulation: bounds are made of one of them."""


def choose(
    preset: Preset,
    *,
    full: bool,
    systems: Sequence[str] | None,
    schedules: Sequence[str] | None,
    slices: Sequence[Slices] | None,
) -> tuple[Case, ...]:
    """Return the competitors that the options leave or add.

    The stock engine stays if its system does: ratios need it. Some unsliced case always runs, for the bounds.
    Raises `CommandError` on unknown names, and if nothing is left.
    """
    for option, names, known in (("--systems", systems, SCHEDULES), ("--schedules", schedules, _EVERY_SCHEDULE)):
        for name in names or ():
            if name not in known:
                raise CommandError(f"{option} {name!r}: known are {', '.join(known)}")

    def runs(case: Case) -> bool:
        is_kept = not schedules or case.schedule in schedules or case == _STOCK
        return is_kept and (systems is None or case.system in systems)

    chosen = [case for case in _candidates(preset, full or bool(schedules), slices) if runs(case)]
    if not chosen:
        raise CommandError("--systems, --schedules and --slices leave nothing to run: widen one of them")
    if unused := [name for name in schedules or () if name not in {case.schedule for case in chosen}]:
        raise CommandError(f"--schedules {unused[0]!r}: --systems and --slices leave no run of it; widen one of them")
    whole = [case for case in _WHOLE_STAGES if systems is None or case.system in systems]
    if not set(whole) & set(chosen):
        chosen = [whole[0], *chosen]
    return tuple(dict.fromkeys(chosen))


def _candidates(preset: Preset, every_schedule: bool, slices: Sequence[Slices] | None) -> Sequence[Case]:
    """Return the preset's cases, every case, or, if only slices differ, the cases of the schedules that it slices."""
    if every_schedule:
        return all_cases(slices or (8, PLAN))
    if not slices:
        return preset.cases
    few = [case for case in all_cases(slices) if case.schedule in ("1f1b", "seq1f1b")]
    return [case for case in few if case.schedule == "seq1f1b" or case.slices == 1]
