"""The search: candidates by their proven bounds, cuts by programs, and the best by replay of what will run.

Without slices, and where a candidate has few cuts, every cut that its bound does not exclude is replayed: the answer is
exact among `1f1b` and `gpipe`. Elsewhere the programs propose cuts for several numbers of slices, the most promising
are replayed, the best of these also with other schedules and several parts per stage, and the bounds of all candidates
that were not settled say how far the answer may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.search.candidates import slice_counts
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy.candidate import Candidate, Score, owners_of
from terapipe_ds.planner.strategy.cuts import Bounds, all_cuts, moved_edges, num_cuts
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.rates import granule_of
from terapipe_ds.planner.strategy.shapes import (
    UNSLICED,
    Shape,
    has_own_bound,
    is_extrapolated,
    is_short,
    proposed,
    variants,
)
from terapipe_ds.planner.strategy.space import Space
from terapipe_ds.schedule import SPLIT_SCHEDULES

Progress = Callable[[str, int, int], None]
"""Called now and then with (what, work done, of how much)."""

MOST_CUTS = 4096  # of a candidate that is settled by replaying its cuts
_MOST_EXPANDED = 160  # candidates whose layers are cut by the programs
_MOST_REPLAYED = 12  # proposals that are replayed
_MOST_SLICES = 64
_MOST_LEAN = 24  # candidates that are replayed where none of the proposals fits in memory
NUM_SHOWN = 10  # strategies that an answer has at least, where so many are possible
_FINALISTS = 2
_BUDGET = 60_000  # of the slices of a finalist, as `plan_slices` counts it
_MOST_MOVES = 60  # of a layer from one part to another, tried by replay
_MOVED = 400_000  # computations of all of these replays
_MARGINS = (1.0, 0.94, 0.85)  # shares of the memory limit that the programs aim at, until what they cut fits


@dataclass
class Search:
    """One question, and what is known of its answer."""

    space: Space
    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    scores: dict[Candidate, Score] = field(default_factory=dict)  # the best of each
    open_s: float = math.inf  # the least bound of a candidate that is not settled
    is_complete: bool = True

    def run(self) -> list[Score]:
        """Return the best of each candidate that was replayed, the best first."""
        candidates = list(self.space.candidates())
        if not candidates:
            raise PlannerError(self.space.why_none())
        if self.space.choices.schedule in SPLIT_SCHEDULES and not self._price(candidates[0]).can_split:
            problem = f"schedule = {self.space.choices.schedule!r}: the costs do not tell what weight gradients take"
            raise PlannerError(f"{problem}; give a schedule with whole backwards")
        try:
            self._search(candidates)
        except _StoppedError:
            self.is_complete = False
        except KeyboardInterrupt:
            if not self.scores:
                raise
            self.is_complete = False
        if not self.scores:
            if not self.is_complete:
                raise PlannerError("the search was stopped before it had any strategy: give it more time")
            least = self._replay_leanest(candidates)
            if not self.scores:
                raise self.space.memory_error(*least)
        return sorted(self.scores.values(), key=lambda score: score.rank)

    @property
    def lower_bound_s(self) -> float:
        """Return what no strategy that is searched takes less than."""
        return min([self.open_s, *(score.seconds for score in self.scores.values())])

    def _search(self, candidates: list[Candidate]) -> None:
        priced = {candidate: self._price(candidate) for candidate in candidates}
        bounds_s = {}
        for done, (candidate, costs) in enumerate(priced.items()):
            self._report("bounds", done, len(candidates))
            bounds_s[candidate] = self._bound_s(costs)
        self.open_s = min(bounds_s.values())
        ordered = sorted(candidates, key=lambda candidate: (bounds_s[candidate], candidate.rank))
        small = [c for c in ordered if num_cuts(self.space.layers.num_layers, c.grid.pipe) <= MOST_CUTS]
        if self.space.layers.is_sliceable:
            small = []
        settled = set(small)
        others = [candidate for candidate in ordered if candidate not in settled]
        others_s = min((bounds_s[candidate] for candidate in others), default=math.inf)
        for done, candidate in enumerate(small):
            self._report("candidates", done, len(ordered))
            if bounds_s[candidate] < self._best_s:
                self._settle(priced[candidate])
            # the bounds ascend: of those that are not settled yet, the next one has the least
            self.open_s = min([others_s, *(bounds_s[c] for c in small[done + 1 : done + 2])])
        self._propose(others, priced, bounds_s)

    # --- what is replayed

    def _settle(self, priced: Priced) -> None:
        """Replay every cut of a candidate that may be the best of all."""
        plan, fixed = SlicePlan.equal(self.space.sequence_length, 1), self.space.choices.schedule
        shapes = UNSLICED if fixed is None else (Shape(fixed),)
        cuts = all_cuts(self.space.layers.num_layers, priced.num_stages)
        for bound_s, bounds in sorted((priced.cut_bound_s(bounds), bounds) for bounds in cuts):
            if bound_s >= self._best_s:
                break
            for schedule, _ in shapes[:1] if priced.num_stages == 1 else shapes:
                self._keep(priced.score(bounds, schedule, plan, self.space.limit_bytes))

    def _propose(
        self, ordered: list[Candidate], priced: dict[Candidate, Priced], bounds_s: dict[Candidate, float]
    ) -> None:
        """Cut by the programs, replay the most promising, and improve the best of them."""
        proposals: list[tuple[float, int, Candidate, Bounds]] = []
        near_s = math.inf
        for done, candidate in enumerate(ordered):
            self._report("cuts", done, min(len(ordered), _MOST_EXPANDED))
            if bounds_s[candidate] >= min(self._best_s, near_s) or done >= _MOST_EXPANDED:
                break
            bounds_s[candidate] = max(bounds_s[candidate], self._bound_s(priced[candidate], self.space.limit_bytes))
            if bounds_s[candidate] >= min(self._best_s, near_s):
                continue
            of_candidate = sorted(self._proposals(priced[candidate]))[:2]
            proposals += [(seconds, slices, candidate, cut) for seconds, slices, cut in of_candidate]
            if of_candidate:
                near_s = min(near_s, 1.05 * of_candidate[0][0])
                if not self.scores:  # from here on a search that is stopped has an answer
                    self._replay(priced[candidate], *of_candidate[0][1:])
        proposals.sort(key=lambda proposal: (*proposal[:2], proposal[2].rank, proposal[3]))
        for done, (_, slices, candidate, cut) in enumerate(proposals[:_MOST_REPLAYED]):
            self._report("replays", done, min(len(proposals), _MOST_REPLAYED))
            if bounds_s[candidate] < self._best_s:
                self._replay(priced[candidate], slices, cut)
        for _, slices, candidate, cut in proposals[_MOST_REPLAYED:]:
            if self.scores:
                break
            self._replay(priced[candidate], slices, cut)
        self._fill(ordered, priced)
        self._improve(priced)
        self.open_s = min((bounds_s[candidate] for candidate in ordered), default=math.inf)

    def _fill(self, ordered: list[Candidate], priced: dict[Candidate, Priced]) -> None:
        """Replay the next candidates as well, until there are as many as are shown."""
        more = [candidate for candidate in ordered[:_MOST_EXPANDED] if candidate not in self.scores]
        for candidate in more:
            if len(self.scores) >= NUM_SHOWN:
                return
            for _, slices, cut in sorted(self._proposals(priced[candidate]))[:1]:
                self._replay(priced[candidate], slices, cut)

    def _replay_leanest(self, candidates: list[Candidate]) -> tuple[int, Candidate]:
        """Replay what needs the least memory, and return the least need with who has it.

        The programs count memory roughly: what they leave out may fit nevertheless.
        """
        counts, choices = self._slice_counts(), self.space.choices
        rough = [(self._price(c).least_bytes(n), c.rank, n, c) for c in candidates for n in {counts[0], counts[-1]}]
        needs = []
        for _, _, slices, candidate in sorted(rough, key=lambda entry: entry[:3])[:_MOST_LEAN]:
            priced, plan = self._price(candidate), SlicePlan.equal(self.space.sequence_length, slices)
            for schedule, chunks in proposed(slices, choices.schedule, choices.chunks_per_stage):
                if (lean := priced.leanest(schedule, slices, chunks)) is not None:
                    need, cut = lean
                    needs.append((need, candidate.rank, candidate))
                    self._keep(priced.score(cut, schedule, plan, self.space.limit_bytes, chunks_per_stage=chunks))
        need, _, candidate = min(needs, key=lambda entry: entry[:2])
        return need, candidate

    def _proposals(self, priced: Priced) -> Iterator[tuple[float, int, Bounds]]:
        """Yield (about the seconds, slices, cut): for each number of slices the best cut that fits in memory."""
        for slices in self._slice_counts():
            yield from ((seconds, slices, cut) for seconds, cut in priced.estimates(slices, self.space.limit_bytes)[:1])

    def _replay(self, priced: Priced, slices: int, cut: Bounds) -> None:
        """Replay a proposal. The programs count memory roughly: where it does not fit, they aim at less."""
        choices, limit = self.space.choices, self.space.limit_bytes
        for shape in proposed(slices, choices.schedule, choices.chunks_per_stage):
            if shape.chunks > 1:
                self._score(priced, shape, slices, priced.chunked_cuts(slices, shape.chunks)[:1])
                continue
            for margin in _MARGINS:
                cuts = [cut] if margin == 1 else [b for _, b in priced.estimates(slices, margin * limit)[:1]]
                if self._score(priced, shape, slices, cuts):
                    break

    def _score(self, priced: Priced, shape: Shape, slices: int, cuts: list[Bounds]) -> bool:
        """Replay cuts with equal slices; return whether one fits in memory."""
        plan, fits = SlicePlan.equal(self.space.sequence_length, slices), False
        is_long = not is_short(shape, priced.num_stages, priced.num_micro_batches, slices)
        if is_long and not is_extrapolated(shape) and self.space.choices.schedule is None:
            return False
        for bounds in cuts:
            score = priced.score(bounds, shape.schedule, plan, self.space.limit_bytes, False, shape.chunks)
            self._keep(score)
            fits |= score is not None
        return fits

    def _improve(self, priced: dict[Candidate, Priced]) -> None:
        """Try other schedules, planned slices and moved layers for the finalists; replay what is returned whole."""
        finalists = sorted(self.scores.values(), key=lambda score: score.rank)[:_FINALISTS]
        for done, score in enumerate(finalists):
            self._report("finalists", done, len(finalists))
            costs = priced[score.candidate]
            if self.space.layers.is_sliceable and costs.num_stages > 1:
                self._try_variants(costs, score)
                best = self.scores[score.candidate]
                if best.plan.num_slices > 1 and done == 0:
                    self._keep(self._with_planned_slices(costs, best))
            self._move_layers(costs, score.candidate)
        self._finish(priced)

    def _try_variants(self, priced: Priced, score: Score) -> None:
        """Replay a finalist with other schedules, and with several parts per stage."""
        choices = self.space.choices
        for slices in dict.fromkeys((score.plan.num_slices, max(1, score.plan.num_slices // 2))):
            for shape in variants(slices, choices.schedule, choices.chunks_per_stage):
                if shape.schedule in SPLIT_SCHEDULES and not priced.can_split:
                    continue
                cuts = [score.bounds] if shape.chunks == 1 else priced.chunked_cuts(slices, shape.chunks)[:1]
                self._score(priced, shape, slices, cuts)

    def _with_planned_slices(self, priced: Priced, score: Score) -> Score | None:
        """Return the score with slices by `plan_slices`; None where none fits."""
        owners = owners_of(score.schedule, priced.num_stages, score.chunks_per_stage)
        filling = -(-2 * priced.num_stages // score.plan.num_slices) + 2  # micro-batches, and what drains
        try:
            result = plan_slices(
                priced.parts(score.bounds, score.recompute, owners),
                priced.length,
                priced.num_stages,
                min(priced.num_micro_batches, filling),
                granule_of(priced.length),
                score.schedule,
                chunks_per_stage=score.chunks_per_stage,
                max_slices=max(2 * score.plan.num_slices, 2),
                memory=priced.memory(score.bounds, score.recompute, owners),
                memory_limit_bytes=self.space.limit_bytes,
                budget=_BUDGET,
            )
        except MemoryLimitError:
            return None
        how = score.bounds, score.schedule, result.plans[0], self.space.limit_bytes, False, score.chunks_per_stage
        return priced.score(*how)

    def _move_layers(self, priced: Priced, candidate: Candidate) -> None:
        """Move one layer over each edge while that makes the batch shorter; fewer moves where a replay is long."""
        tried: set[Bounds] = set()
        best = None
        while self.scores[candidate] is not best:
            best = self.scores[candidate]
            units = priced.num_micro_batches * best.plan.num_slices * best.chunks_per_stage
            most = min(_MOST_MOVES, _MOVED // (2 * priced.num_stages * units))
            moved = [cut for cut in moved_edges(best.bounds) if cut not in tried][: max(0, most - len(tried))]
            tried.update(moved)
            for cut in moved:
                how = cut, best.schedule, best.plan, self.space.limit_bytes, False, best.chunks_per_stage
                self._keep(priced.score(*how))

    def _finish(self, priced: dict[Candidate, Priced]) -> None:
        """Replay the best whole, until the best is one that was."""
        while self.scores:
            best = min(self.scores.values(), key=lambda score: score.rank)
            if best.is_whole:
                return
            how = best.bounds, best.schedule, best.plan, self.space.limit_bytes
            whole = priced[best.candidate].score(*how, chunks_per_stage=best.chunks_per_stage)
            if whole is None:
                del self.scores[best.candidate]
            else:
                self.scores[best.candidate] = whole
            self._check_stop()

    # --- what is known

    @property
    def _best_s(self) -> float:
        return min((score.seconds for score in self.scores.values()), default=math.inf)

    def _bound_s(self, priced: Priced, limit_bytes: float | None = None) -> float:
        """Return a time that nothing beats which is tried for a candidate."""
        choices, bound_s = self.space.choices, priced.lower_bound_s(limit_bytes)
        counts = self._slice_counts()
        tried = [s for n in (counts[0], counts[-1]) for s in proposed(n, choices.schedule, choices.chunks_per_stage)]
        if self.space.layers.is_sliceable:
            tried += variants(counts[-1], choices.schedule, choices.chunks_per_stage)
        if priced.num_stages == 1 or all(map(has_own_bound, tried)):
            return bound_s
        return min(bound_s, priced.chunked_bound_s(limit_bytes))

    def _slice_counts(self) -> list[int]:
        if not self.space.layers.is_sliceable or self.space.choices.schedule in ("1f1b", "gpipe"):
            return [1]
        length = self.space.sequence_length
        most = min(_MOST_SLICES, -(-length // granule_of(length)))
        return [count for count in slice_counts(most) if count & (count - 1) == 0]

    def _keep(self, score: Score | None) -> None:
        best = None if score is None else self.scores.get(score.candidate)
        if score is not None and (best is None or score.rank < best.rank):
            self.scores[score.candidate] = score
        self._check_stop()

    def _price(self, candidate: Candidate) -> Priced:
        return Priced(self.space.layers, self.space.cluster, self.space.sequence_length, candidate)

    def _report(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop is not None and self.stop():
            raise _StoppedError


class _StoppedError(Exception):
    """Leaves the search; what is known stays."""
