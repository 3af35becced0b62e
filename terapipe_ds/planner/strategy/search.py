"""Search strategies: candidates by their proven bounds, cuts by programs, and the best by a replay of the schedule.

Without slices, and where a candidate has few cuts, the search replays every cut that its bound does not exclude: the
answer is exact among `1f1b` and `gpipe`. Elsewhere the programs propose a cut for each candidate, with the best number
of slices. The search replays the twelve best proposals, the best four of them also with other schedules, several parts
per stage and more slices, and the best of these with planned slices and moved layers. The bounds of all unsettled
candidates limit the answer's error.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.cuts import Bounds, all_cuts, moved_edges, num_cuts
from terapipe_ds.planner.search.candidates import slice_counts
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, Candidate, Score, owners_of
from terapipe_ds.planner.strategy.priced import MOST_WHOLE, Priced
from terapipe_ds.planner.strategy.rates import granule_of
from terapipe_ds.planner.strategy.shapes import UNSLICED, Shape, proposed, variants
from terapipe_ds.planner.strategy.space import Space
from terapipe_ds.schedule import SPLIT_SCHEDULES

Progress = Callable[[str, int, int], None]
"""Called now and then with (what, work done, of how much)."""

MOST_CUTS = 4096
"""Cuts of a candidate up to which all of them are replayed."""

REPLAYED = 12
"""Candidates that are replayed, each with its two best proposals."""

_FINALISTS = 4  # replays of other schedules take most of the search
_LIKELY = 4  # numbers of slices that are tried first
_MOST_SLICES = 256
_SHORT_TOKENS = 4096  # proposals of more than 64 slices have at least so long ones
_LEAST_TOKENS = 64
_NEAR = 1.02
_BUDGET = 60_000  # for the slices of the best, as `plan_slices` counts it
_MOVED = 400_000  # replayed computations while layers move


@dataclass
class Search:
    """Hold one question and the knowledge about its answer."""

    space: Space
    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    scores: dict[Candidate, Score] = field(default_factory=dict)  # the best of each
    open_s: float = math.inf  # the least bound of a candidate that is not settled
    is_complete: bool = True

    def run(self) -> list[Score]:
        """Return the best score of each replayed candidate, the best first.

        Raises:
            MemoryLimitError: nothing fits; it names the least need.
            PlannerError: no candidate, or the search was stopped before it had any strategy.
        """
        candidates = list(self.space.candidates())
        if not candidates:
            raise PlannerError(self.space.why_none())
        self.space.check_need()
        priced = {candidate: self.price(candidate) for candidate in candidates}
        if self.space.choices.schedule in SPLIT_SCHEDULES and not priced[candidates[0]].can_split:
            problem = f"schedule = {self.space.choices.schedule!r}: the costs do not tell what weight gradients take"
            raise PlannerError(f"{problem}; give a schedule with whole backwards")
        try:
            self._search(priced)
        except (_StoppedError, KeyboardInterrupt) as stopped:
            if not self.scores and isinstance(stopped, KeyboardInterrupt):
                raise
            self.is_complete = False
        if not self.scores:
            raise self._why_nothing(priced)
        return sorted(self.scores.values(), key=lambda score: score.rank)

    @property
    def lower_bound_s(self) -> float:
        """Return a time that no strategy of the search beats."""
        return min([self.open_s, *(score.seconds for score in self.scores.values())])

    def _search(self, priced: dict[Candidate, Priced]) -> None:
        num_layers, is_sliceable = self.space.layers.num_layers, self.space.layers.is_sliceable
        # the bounds give the order of the candidates, and exclude some of them
        bounds_s = {}
        for done, (candidate, costs) in enumerate(priced.items()):
            self._report("bounds", done, len(priced))
            # a cheap bound, where the search tightens it for those that come to be looked at
            if is_sliceable and self.space.mean_need(candidate) > self.space.limit_bytes:
                bounds_s[candidate] = math.inf
                continue
            same_s = bounds_s.get(dataclasses.replace(candidate, levers=NO_LEVERS), math.inf)  # levers take no time off
            if math.isinf(same_s):
                same_s = costs.chunked_bound_s() if is_sliceable else self._bound_s(costs)
            bounds_s[candidate] = same_s
        self.open_s = min(bounds_s.values())
        ordered = sorted(priced, key=lambda candidate: (bounds_s[candidate], candidate.rank))
        # the exact part: candidates without slices and with few cuts
        small = [c for c in ordered if not is_sliceable and num_cuts(num_layers, c.grid.pipe) <= MOST_CUTS]
        settled = set(small)
        others = [candidate for candidate in ordered if candidate not in settled]
        others_s = min((bounds_s[candidate] for candidate in others), default=math.inf)
        for done, candidate in enumerate(small):
            self._report("candidates", done, len(ordered))
            if bounds_s[candidate] < self._best_s:
                self._settle(priced[candidate])
            # the bounds ascend: among unsettled candidates the next one has the least
            self.open_s = min([others_s, *(bounds_s[c] for c in small[done + 1 : done + 2])])
        # the rest: replay the best proposals, and improve the best of these
        proposals = self._proposals(others, priced, bounds_s)
        for done, (_, _, candidate, counts) in enumerate(proposals):
            self._report("replays", done, len(proposals))
            self._replay(priced[candidate], counts)
        self._improve(priced)
        self.open_s = min((bounds_s[candidate] for candidate in others), default=math.inf)

    # --- replays

    def _settle(self, priced: Priced) -> None:
        """Replay every cut of a candidate that may be the best overall."""
        fixed = self.space.choices.schedule
        shapes = UNSLICED if fixed is None else (Shape(fixed),)
        cuts = all_cuts(self.space.layers.num_layers, priced.num_stages)
        for bound_s, bounds in sorted((priced.cut_bound_s(bounds), bounds) for bounds in cuts):
            if bound_s >= self._best_s:
                break
            for shape in shapes[:1] if priced.num_stages == 1 else shapes:
                self._score(priced, shape, bounds, 1, MOST_WHOLE)

    def _proposals(
        self, ordered: list[Candidate], priced: dict[Candidate, Priced], bounds_s: dict[Candidate, float]
    ) -> list[_Proposal]:
        """Return the best proposals, one per candidate, and raise the bounds of the examined candidates."""
        proposals: list[_Proposal] = []
        unhindered: set[Candidate] = set()  # fit with nothing recomputed
        near_s = math.inf
        possible = [candidate for candidate in ordered if math.isfinite(bounds_s[candidate])]
        self._answer_first(possible, priced)
        for bound_s, candidate in self._by_bounds(possible, priced, bounds_s):
            if bound_s >= near_s and len(proposals) >= REPLAYED:
                break
            if dataclasses.replace(candidate, levers=NO_LEVERS) in unhindered:  # nothing would be gained
                continue
            costs = priced[candidate]
            times = self._times_of_cuts(costs)
            if not times:
                continue
            counts = [slices for _, slices in sorted(times)[:2]]
            free = costs.propose(self._shapes(counts[0])[0], counts[0], math.inf)
            if free is not None and free[0] >= (1 - 1e-9) * min(times)[0]:
                unhindered.add(candidate)
            proposals.append((min(times)[0], candidate.rank, candidate, counts))
            near_s = min(near_s, 1.05 * min(times)[0])
        return sorted(proposals, key=lambda proposal: proposal[:2])[:REPLAYED]

    def _answer_first(self, possible: list[Candidate], priced: dict[Candidate, Priced]) -> None:
        """Replay the candidate with the least need of memory: from here on a stopped search has an answer."""
        if possible:
            safe = priced[min(possible, key=self.space.mean_need)]
            if times := self._times_of_cuts(safe):
                self._replay(safe, [min(times)[1]])

    def _by_bounds(
        self, possible: list[Candidate], priced: dict[Candidate, Priced], bounds_s: dict[Candidate, float]
    ) -> Iterator[tuple[float, Candidate]]:
        """Yield candidates by rising bounds; each bound is tightened when its candidate comes to be the first."""
        queue = [(bounds_s[candidate], place) for place, candidate in enumerate(possible)]
        tightened: set[int] = set()
        while queue:
            self._report("cuts", len(possible) - len(queue), len(possible))
            bound_s, place = heapq.heappop(queue)
            candidate = possible[place]
            if place in tightened:
                yield bound_s, candidate
                continue
            tightened.add(place)
            bounds_s[candidate] = max(bound_s, self._bound_s(priced[candidate], self.space.limit_bytes))
            if math.isfinite(bounds_s[candidate]):
                heapq.heappush(queue, (bounds_s[candidate], place))

    def _times_of_cuts(self, costs: Priced) -> list[tuple[float, int]]:
        """Return about the seconds of the best cut, for the numbers of slices that even stages would take least with.

        Where none of these has a cut that fits, the others are tried: with more slices less is live.
        """
        all_counts = self._slice_counts()
        ends = {all_counts[0], all_counts[-1]}
        if all(costs.least_bytes(self._shapes(n)[0], n) > self.space.limit_bytes for n in ends):
            return []
        counts = sorted(all_counts, key=costs.even_s)
        for some in (counts[:_LIKELY], counts[_LIKELY:]):
            times = [
                (proposal[0], slices)
                for slices in some
                if (proposal := costs.propose(self._shapes(slices)[0], slices, self.space.limit_bytes)) is not None
            ]
            if times:
                return times
        return []

    def _replay(self, priced: Priced, counts: list[int]) -> None:
        """Replay the best cuts for some numbers of slices, with each schedule that fits by the programs."""
        for slices in counts:
            for shape in self._shapes(slices):
                proposal = priced.propose(shape, slices, self.space.limit_bytes)
                if proposal is not None:
                    self._score(priced, shape, proposal[1], slices)

    def _score(
        self, priced: Priced, shape: Shape, bounds: Bounds, slices: int | SlicePlan, most: float | None = None
    ) -> None:
        """Replay a cut, and keep it where it is the best of its candidate."""
        plan = SlicePlan.equal(priced.length, slices) if isinstance(slices, int) else slices
        best = self.scores.get(priced.candidate)
        beat_s = math.inf if best is None else best.seconds
        score = priced.score(bounds, shape.schedule, plan, self.space.limit_bytes, shape.chunks, most, beat_s)
        if score is not None and (best is None or score.rank < best.rank):
            self.scores[priced.candidate] = score
        self._check_stop()

    def _improve(self, priced: dict[Candidate, Priced]) -> None:
        """Try other schedules and planned slices for the finalists, and move layers of the best; replay it whole."""
        finalists = sorted(self.scores.values(), key=lambda score: score.rank)[:_FINALISTS]
        for done, score in enumerate(finalists):
            self._report("finalists", done, len(finalists))
            costs = priced[score.candidate]
            if self.space.layers.is_sliceable and costs.num_stages > 1:
                self._try_variants(costs, score)
                self._halve_slices(costs)
        # planned slices and moved layers save little: they decide between the best
        near_s = _NEAR * self._best_s
        for score in sorted(self.scores.values(), key=lambda score: score.rank)[:_FINALISTS]:
            costs = priced[score.candidate]
            if score.seconds <= near_s and costs.num_stages > 1:
                if score.plan.num_slices > 1:
                    self._plan_slices(costs, score)
                self._move_layers(costs, score.candidate)
        # few micro-batches stood for many: replay the best score whole until the best is one replayed whole
        while self.scores and not (best := min(self.scores.values(), key=lambda score: score.rank)).is_final:
            del self.scores[best.candidate]
            shape = Shape(best.schedule, best.chunks_per_stage)
            self._score(priced[best.candidate], shape, best.bounds, best.plan, MOST_WHOLE)

    def _try_variants(self, priced: Priced, score: Score) -> None:
        """Replay a score with other schedules, and with several parts per stage."""
        choices, rows = self.space.choices, priced.num_micro_batches
        for slices in dict.fromkeys((score.plan.num_slices, max(1, score.plan.num_slices // 2))):
            for shape in variants(slices, choices.schedule, choices.chunks_per_stage):
                is_possible = not shape.is_split or priced.can_split
                if is_possible and shape.is_short(priced.num_stages, rows, slices):
                    for cut in [score.bounds] if shape.chunks == 1 else priced.chunked_cuts(slices, shape):
                        self._score(priced, shape, cut, slices)

    def _halve_slices(self, priced: Priced) -> None:
        """Replay a candidate's best score with twice as many slices, and so on while that makes the batch shorter."""
        best = None
        while self.scores[priced.candidate] is not best:
            best = self.scores[priced.candidate]
            shape, slices = Shape(best.schedule, best.chunks_per_stage), 2 * best.plan.num_slices
            is_short = shape.is_short(priced.num_stages, priced.num_micro_batches, slices)
            if slices > 2 and is_short and priced.length >= _LEAST_TOKENS * slices:
                self._score(priced, shape, best.bounds, slices)

    def _plan_slices(self, priced: Priced, score: Score) -> None:
        """Replay a score with slices by `plan_slices`, where some fit."""
        owners = owners_of(score.schedule, priced.num_stages, score.chunks_per_stage)
        filling = -(-2 * priced.num_stages // score.plan.num_slices) + 2  # micro-batches that fill, and some that drain
        try:
            result = plan_slices(
                priced.parts(score.bounds, score.recompute, owners),
                priced.length,
                priced.num_stages,
                min(priced.num_micro_batches, filling),
                min(granule_of(priced.length), max(64, priced.length // score.plan.num_slices)),
                score.schedule,
                chunks_per_stage=score.chunks_per_stage,
                max_slices=max(2 * score.plan.num_slices, 2),
                memory=priced.memory(score.bounds, score.recompute, owners),
                memory_limit_bytes=self.space.limit_bytes,
                budget=_BUDGET,
            )
        except MemoryLimitError:
            return
        self._score(priced, Shape(score.schedule, score.chunks_per_stage), score.bounds, result.plans[0])

    def _move_layers(self, priced: Priced, candidate: Candidate) -> None:
        """Move one layer over each edge while that makes the batch shorter; fewer moves where a replay is long."""
        tried: set[Bounds] = set()
        best = None
        while self.scores[candidate] is not best:
            best = self.scores[candidate]
            units = priced.num_micro_batches * best.plan.num_slices * best.chunks_per_stage
            most = _MOVED // (2 * priced.num_stages * units)
            moved = [cut for cut in moved_edges(best.bounds) if cut not in tried][: max(0, most - len(tried))]
            tried.update(moved)
            for cut in moved:
                self._score(priced, Shape(best.schedule, best.chunks_per_stage), cut, best.plan)

    # --- bounds and errors

    def _why_nothing(self, priced: dict[Candidate, Priced]) -> PlannerError:
        """Return the error where no strategy fits in memory, with the least need, or where there was no time."""
        if not self.is_complete:
            return PlannerError("the search was stopped before it had any strategy: give it more time")
        counts = self._slice_counts()
        shapes = {slices: self._shapes(slices)[0] for slices in {counts[0], counts[-1]}}
        needs = {
            candidate: costs.replayed_bytes or min(costs.least_bytes(shape, n) for n, shape in shapes.items())
            for candidate, costs in priced.items()
        }
        least = min(needs, key=lambda candidate: (needs[candidate], candidate.rank))
        return self.space.memory_error(math.ceil(needs[least]), least)

    @property
    def _best_s(self) -> float:
        return min((score.seconds for score in self.scores.values()), default=math.inf)

    def _bound_s(self, priced: Priced, limit_bytes: float = math.inf) -> float:
        """Return a lower bound on every schedule that the search tries for a candidate."""
        choices, counts = self.space.choices, self._slice_counts()
        tried = [shape for slices in (counts[0], counts[-1]) for shape in self._shapes(slices)]
        if self.space.layers.is_sliceable:
            tried += variants(counts[-1], choices.schedule, choices.chunks_per_stage)
        bound_s = priced.lower_bound_s(limit_bytes)
        if priced.num_stages == 1 or all(shape.has_own_bound for shape in tried):
            return bound_s
        return min(bound_s, priced.chunked_bound_s(limit_bytes))

    def _shapes(self, slices: int) -> tuple[Shape, ...]:
        """Return the shapes that replay a proposal of `num_slices`; the cut aims at the memory of the first."""
        return proposed(slices, self.space.choices.schedule, self.space.choices.chunks_per_stage)

    def _slice_counts(self) -> list[int]:
        if not self.space.layers.is_sliceable or self.space.choices.schedule in ("1f1b", "gpipe"):
            return [1]
        length = self.space.sequence_length
        most = min(_MOST_SLICES, -(-length // min(_LEAST_TOKENS, granule_of(length))), max(64, length // _SHORT_TOKENS))
        return [count for count in slice_counts(most) if count & (count - 1) == 0]

    def price(self, candidate: Candidate) -> Priced:
        return Priced(self.space.layers, self.space.cluster, self.space.sequence_length, candidate)

    def _report(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop is not None and self.stop():
            raise _StoppedError


_Proposal = tuple[float, tuple[object, ...], Candidate, list[int]]
"""About the seconds, a rank that decides a tie, the candidate, and its two best numbers of slices."""


class _StoppedError(Exception):
    """Leave the search; its scores and bounds stay."""
