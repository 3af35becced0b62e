"""Find slices and schedule together with the layers that recompute.

Fewer live bytes allow other slices, and other slices need other layers. So the search goes back and forth: it plans
slices for the layers that recompute now, then chooses the fastest layers for those slices, which never takes longer. It
starts from everything recomputed, and from the slices of a pipeline without a limit, and ends where nothing changes.
Then it tries equal slices with their own layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from terapipe_ds.costs.interface import know_weights
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.comparable import ranked_schedules
from terapipe_ds.planner.errors import MemoryLimitError
from terapipe_ds.planner.recompute.choose_layers import PartLayers, RecomputeChoice, choose_layers, recompute_everything
from terapipe_ds.planner.recompute.frontier import Subset
from terapipe_ds.planner.result import PlanResult, choose
from terapipe_ds.planner.search.candidates import slice_counts
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.planner.search.problem import BUDGET
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.schedule import Schedule, build
from terapipe_ds.simulator import Replay

_ROUNDS = 4  # of slices and layers; two are usual
_SHARE = 6  # a search here has 1/6 of the budget of one without recomputation


def plan_with_recompute(
    parts: Sequence[PartLayers],
    sequence_length: int,
    num_micro_batches: int,
    granularity_tokens: int,
    schedule: str,
    limit_bytes: float,
    *,
    plan: SlicePlan | None = None,
    schedule_options: Mapping[str, object] = MappingProxyType({}),
    max_slices: int | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Return the plan with the least predicted time in which every stage fits, with the layers that recompute.

    Args:
        parts: one per stage.
        schedule: a name, or "auto" for those that run on one part per stage.
        plan: the caller's slices; None: the planner's, at most `max_slices`.

    Raises:
        MemoryLimitError: nothing fits, although everything is recomputed; of several schedules the least need.
        PlannerError: as `plan_slices`, or a schedule with several parts per stage.
    """
    # schedules that split backwards need the seconds of W
    knows_weights = know_weights(part.costs for part in parts)
    names = ranked_schedules(len(parts), 1, len(parts), knows_weights) if schedule == "auto" else (schedule,)
    question = _Question(tuple(parts), num_micro_batches, limit_bytes, schedule_options, progress)
    results, refused = [], []
    # a schedule in which nothing fits is left out, unless none is left
    for name in names:
        try:
            if plan is not None:
                results.append(question.result(name, plan, question.layers(name, plan)))
            else:
                results.append(question.searched(name, sequence_length, granularity_tokens, max_slices))
        except MemoryLimitError as error:
            refused.append(error)
    if not results:
        raise min(refused, key=lambda error: error.need_bytes)
    keeps = any(layer.again_costs is not None for part in parts for layer in part.layers)
    return dataclasses.replace(choose(results), keeps_attention=keeps)


@dataclasses.dataclass(frozen=True)
class _Question:
    """Hold the arguments that are the same for all schedules, slices and layers."""

    parts: tuple[PartLayers, ...]
    num_micro_batches: int
    limit_bytes: float
    options: Mapping[str, Any]
    progress: Progress | None

    def searched(self, name: str, length: int, granularity: int, most: int | None) -> PlanResult:

        def slices(choice: RecomputeChoice, limit_bytes: float | None) -> PlanResult:
            return plan_slices(
                list(choice.costs), length, len(self.parts), self.num_micro_batches, granularity, name, most,
                choice.memory, limit_bytes, progress=self.progress, budget=BUDGET // _SHARE,
                schedule_options=self.options,
            )  # fmt: skip

        # from the slices of a pipeline without a limit, and from everything recomputed
        nothing = RecomputeChoice.of(self.parts, [Subset(0, 0, 0, ())] * len(self.parts), is_whole=False)
        free = slices(nothing, None)
        cut = SlicePlan.equal(length, min(2, -(-length // granularity)), granularity)
        found, starts, refused = [], [recompute_everything(self.parts, cut, self.num_micro_batches)], None
        with contextlib.suppress(MemoryLimitError):  # shorter slices may fit
            starts.insert(0, self.layers(name, free.plans[0]))
            found.append(self.result(name, free.plans[0], starts[0]))
        for choice in starts:
            tried = set[tuple[tuple[int, ...], ...]]()
            # slices for these layers, then layers for those slices, until nothing changes
            try:
                while choice.layers not in tried and len(tried) < _ROUNDS:
                    tried.add(choice.layers)
                    result = slices(choice, self.limit_bytes)
                    plan, before = result.plans[0], choice  # all micro-batches have the same
                    choice = self.layers(name, plan)
                    if choice.layers != before.layers:
                        found.append(self.result(name, plan, choice, num_candidates=result.num_candidates))
                        continue
                    # the proof of the search is for these layers alone; no layers make a step shorter than none
                    found.append(
                        dataclasses.replace(
                            result,
                            recompute=choice.layers,
                            recompute_s=choice.again_s,
                            lower_bound_s=min(free.lower_bound_s, result.predicted_s),
                            optimal=free.lower_bound_s >= result.predicted_s * (1 - 1e-9),
                        )
                    )
            except MemoryLimitError as error:  # these layers leave no room for the slices that the search met
                refused = error
        found += self._equal(name, length, granularity, most, nothing, found)
        if not found and refused is not None:
            raise refused
        return min(found, key=lambda one: (one.predicted_s, sum(map(len, one.recompute or ())), -one.lower_bound_s))

    def _equal(
        self, name: str, length: int, granularity: int, most: int | None, free: RecomputeChoice, found: list[PlanResult]
    ) -> Iterator[PlanResult]:
        """Yield equal slices with their own layers, where they may be faster than the plans found so far."""
        most_slices = min(most or length, -(-length // granularity))
        best_s = min((one.predicted_s for one in found), default=math.inf)
        for count in slice_counts(most_slices):
            plan = SlicePlan.equal(length, count, granularity)
            replay = Replay.of(self._schedule(name, count))
            # layers that recompute only add time
            if replay.makespan(plan, list(free.costs)) >= best_s:
                continue
            with contextlib.suppress(MemoryLimitError):
                choice = self.layers(name, plan)
                # a result has the memory and other plans to compare with, which take longer to find than its time
                if (seconds := replay.makespan(plan, list(choice.costs))) < best_s:
                    best_s = seconds
                    yield self.result(name, plan, choice)

    def layers(self, name: str, plan: SlicePlan) -> RecomputeChoice:
        """Return the layers that let one plan fit in the least time."""
        return choose_layers(self.parts, self._schedule(name, plan.num_slices), plan, self.limit_bytes)

    def _schedule(self, name: str, num_slices: int) -> Schedule:
        return build(name, len(self.parts), self.num_micro_batches, num_slices, **self.options)

    def result(self, name: str, plan: SlicePlan, choice: RecomputeChoice, **more: Any) -> PlanResult:
        """Return the prediction of one plan; `more` has fields of `PlanResult`."""
        return PlanResult.of_replay(
            self._schedule(name, plan.num_slices),
            (plan,) * self.num_micro_batches,
            list(choice.costs),
            choice.memory,
            self.limit_bytes,
            self.options,
            recompute=choice.layers,
            recompute_s=choice.again_s,
            **more,
        )
