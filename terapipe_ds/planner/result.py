"""Hold the results of a search, for one schedule and for several, and choose among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import TRY_SEQ1F1B, MemoryLimitError, PlannerError
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.schedule import Schedule, build, to_csv
from terapipe_ds.simulator import Replay

PREFERENCE = (
    *("seq1f1b", "1f1b", "seq1f1b-zb", "zb-h1", "terapipe", "gpipe"),
    *("seq1f1b-interleaved", "interleaved", "seq1f1b-interleaved-zb", "zbv", "chimera-seq", "chimera", "search"),
)
"""Which schedule wins where time and memory are the same."""

_TIE = 1e-3  # a difference in time below the noise of any measurement


@dataclass(frozen=True)
class Prediction:
    """Describe the time of a step from its first forward to its last backward, without reduce and optimizer step."""

    predicted_s: float
    unsliced_s: float  # of whole sequences in the same schedule


@dataclass(frozen=True)
class PlanResult:
    """Hold plans and their predictions; seconds are for one batch without reduce and optimizer step.

    `plans` has one per micro-batch. `order` is the result of "search", and None for a schedule that `build` knows.
    """

    plans: tuple[SlicePlan, ...]
    schedule: str
    predicted_s: float
    optimal: bool  # proven: no plan with this schedule, granularity and limits takes less
    lower_bound_s: float  # proven: no plan takes less than this
    num_stages: int
    num_micro_batches: int
    unsliced_s: float
    equal_plan: SlicePlan  # the best of the equal plans that fit; of given slices, as many equal ones
    equal_s: float
    bubble_fraction: float
    peak_bytes: tuple[int, ...] | None  # per stage
    memory_limit_bytes: float | None
    num_candidates: int
    chunks_per_stage: int = 1  # parts that a stage holds
    extra_s: float | None = 0.0  # on top of predicted_s; 0 unless parts have two places, None: not known
    recompute: tuple[tuple[int, ...], ...] | None = None  # layers, per stage, where the planner has chosen them too
    recompute_s: tuple[float, ...] | None = None  # their seconds on each stage
    keeps_attention: bool = False  # of these layers, as they were measured

    order: Schedule | None = None
    order_bound_s: float = 0.0  # proven: no order of these plans takes less; 0 for a schedule with a name

    @classmethod
    def of_replay(
        cls,
        schedule: Schedule,
        plans: Sequence[SlicePlan],
        costs: Any,
        memory: MemoryModel | None,
        memory_limit_bytes: float | None,
        options: Mapping[str, object] = MappingProxyType({}),
        **more: Any,
    ) -> PlanResult:
        """Return the prediction for given plans; `more` has fields that replace those set here.

        Args:
            options: of the named schedule, to build it again for unsliced sequences.
        """
        # the very schedule that the engine would run is replayed, with its memory
        timeline = Replay.of(schedule).run(plans, costs, memory=memory)
        if "unsliced_s" not in more:
            named: dict[str, Any] = {"chunks_per_stage": schedule.chunks_per_stage, **options}
            unsliced = build(schedule.name, schedule.num_stages, schedule.num_micro_batches, 1, **named)
            whole = SlicePlan.equal(plans[0].sequence_length, 1)
            more["unsliced_s"] = Replay.of(unsliced).makespan(whole, costs)
        if "equal_s" not in more:  # as many slices
            equals = [SlicePlan.equal(plan.sequence_length, plan.num_slices) for plan in plans]
            more["equal_plan"] = max(equals, key=lambda plan: plan.num_slices)
            more["equal_s"] = Replay.of(schedule).makespan(equals, costs)
        fields: dict[str, Any] = {
            "plans": tuple(plans),
            "schedule": schedule.name,
            "predicted_s": timeline.makespan_s,
            "optimal": False,
            "lower_bound_s": 0.0,
            "num_stages": schedule.num_stages,
            "num_micro_batches": schedule.num_micro_batches,
            "bubble_fraction": timeline.bubble_fraction,
            "peak_bytes": timeline.peak_bytes,
            "memory_limit_bytes": memory_limit_bytes,
            "num_candidates": 1,
            "chunks_per_stage": schedule.chunks_per_stage,
        }
        return cls(**fields | more)

    @property
    def plan(self) -> SlicePlan | None:
        """Return the one plan of all micro-batches; None where they differ."""
        return self.plans[0] if len(set(self.plans)) == 1 else None

    @property
    def num_slices(self) -> tuple[int, ...]:
        return tuple(plan.num_slices for plan in self.plans)

    def build(self, **options: Any) -> Schedule:
        """Return the schedule to run; `options` belong to a schedule with a name."""
        if self.order is not None:
            return self.order
        counts = self.num_stages, self.num_micro_batches, self.num_slices
        return build(self.schedule, *counts, chunks_per_stage=self.chunks_per_stage, **options)

    @property
    def total_s(self) -> float:
        """Return the seconds that compare schedules: with `extra_s`, where it is known."""
        return self.predicted_s + (self.extra_s or 0.0)

    @property
    def gap(self) -> float:
        """Return the distance of the prediction above the proven bound: 0.02 for 2 %."""
        return max(self.predicted_s / self.lower_bound_s - 1.0, 0.0) if self.lower_bound_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for JSON."""
        known = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        plans = {"plans": [list(plan.lengths) for plan in self.plans], "equal_plan": list(self.equal_plan.lengths)}
        order = {"order": None if self.order is None else to_csv(self.order)}
        plan = {"plan": None if self.plan is None else list(self.plan.lengths)}
        return known | plan | plans | order | {"gap": self.gap}


def choose(results: Iterable[PlanResult]) -> PlanResult:
    """Return the fastest result; within 0.1 % of it the one with the least memory, then the preferred schedule."""
    results = list(results)
    if not results:
        raise PlannerError("no results to choose from: give at least one")
    # no measurement tells such times apart, so memory decides
    least_s = min(result.total_s for result in results)
    near = [result for result in results if result.total_s <= least_s * (1 + _TIE)]
    return min(near, key=_memory_and_preference)


def _memory_and_preference(result: PlanResult) -> tuple[int, int]:
    """Return the key that decides between equal times: the bytes of the fullest stage, then the preferred schedule."""
    return max(result.peak_bytes or (0,)), (*PREFERENCE, result.schedule).index(result.schedule)


@dataclass(frozen=True)
class Refusal:
    """Hold a schedule without a plan that fits in memory; the error names the least need."""

    schedule: str
    chunks_per_stage: int
    error: MemoryLimitError

    @property
    def need_bytes(self) -> int:
        return self.error.need_bytes


@dataclass(frozen=True)
class Ranking:
    """Hold compared schedules: `results` with the best first (see `choose`), then by time; `refused` by least need."""

    results: tuple[PlanResult, ...]
    refused: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, results: Iterable[PlanResult], refused: Iterable[Refusal]) -> Ranking:
        """Return results and refusals in order."""
        # the best comes first, even where a tie gave it a little more time
        ordered = sorted(results, key=lambda result: (result.total_s, *_memory_and_preference(result)))
        if ordered:
            best = choose(ordered)
            ordered = [best, *(result for result in ordered if result is not best)]
        return cls(tuple(ordered), tuple(sorted(refused, key=lambda refusal: refusal.need_bytes)))

    @property
    def best(self) -> PlanResult:
        """Return the best result. Raises MemoryLimitError where the limit refuses every schedule."""
        if not self.results:
            raise self.refused[0].error.without(TRY_SEQ1F1B)
        return self.results[0]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per schedule, for JSON, in order; a refused one has `need_bytes`, no plan, no times."""
        names = ("schedule", "chunks_per_stage", "plan", "predicted_s", "extra_s", "bubble_fraction", "peak_bytes")
        rows = []
        for result in self.results:
            known = result.to_dict()
            peaks = {"peak_bytes": result.peak_bytes and list(result.peak_bytes)}
            plans = {"plans": known["plans"]} if result.plan is None else {}
            rows.append({name: known[name] for name in names} | peaks | plans)
        return rows + [
            {name: getattr(refusal, name) for name in (*names[:2], "need_bytes")} for refusal in self.refused
        ]
