"""Search strategies: candidates by their proven bounds, cuts by programs, and the best by a replay of the schedule.

Without slices, and where a candidate has few cuts, the search replays every cut that its bound does not exclude: the
answer is exact among `1f1b` and `gpipe`. Elsewhere the programs propose cuts for each candidate, schedule and number of
parts per stage, with the best numbers of slices and about the seconds of each. A candidate that takes clearly more with
equal stages has no proposals. The search replays proposals by rising estimates until an estimate exceeds the best
replay, so a fixed choice, which leaves proposals out, finds nothing faster if estimates are right. The best replays get
more slices, planned slices and moved layers. The bounds of all unsettled candidates limit the answer's error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.cuts import Bounds, all_cuts, moved_edges
from terapipe_ds.planner.search.candidates import slice_counts
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, Candidate, Score, owners_of
from terapipe_ds.planner.strategy.priced import MOST_WHOLE, Priced
from terapipe_ds.planner.strategy.rates import equal_plan, granule_of
from terapipe_ds.planner.strategy.shapes import UNSLICED, WHOLE, Shape, shapes_of
from terapipe_ds.planner.strategy.space import Space
from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.simulator import ScheduleShape

TOO_SOON = "the search was stopped before it had any strategy: give it more time"
"""The message where a search ends without an answer."""

MOST_CUTS = 4096
"""Cuts of a candidate up to which all of them are replayed."""

REPLAYED = 12
"""Candidates that are replayed at least, each with its best proposal."""

_WORK = 300_000  # replayed computations
_PROPOSING = 6_000  # computations whose replay takes as long as the proposals of a candidate
_POLISH = 100_000  # more of them, for more slices, planned slices and moved layers of the best
_FINALISTS = 2  # scores that are improved at least
_LIKELY = 4  # numbers of slices that are tried first, and candidates with all shapes
_BEST = 2  # numbers of slices of each shape that are tried first
_MOST_SLICES = 256
_SHORT_TOKENS = 4096  # proposals of more than 64 slices have at least so long ones
_LEAST_TOKENS = 64
_ERROR = 1.05  # estimates exceed replays by less, nearly always
_NEAR = 1.03  # more and planned slices and moved layers save less, nearly always
_EXAMINED = 1.05  # the search for proposals ends at a bound that exceeds the best estimate by more
_OVER = 1.05  # estimated bytes exceed the bytes of a replay by less, nearly always
_SURE = 0.5  # of the memory, where a candidate surely fits
_ROUGH = 1.1  # the best cut saves less than equal stages, nearly always
_BUDGET = 15_000  # for the slices of the best, as `plan_slices` counts it
_MOVED = 200_000  # replayed computations while layers move
_STOPPED = 500_000  # computations of a whole replay that a stopped search may still take: some seconds


@dataclass
class Search:
    """Hold one question and the knowledge about its answer."""

    space: Space
    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    scores: dict[tuple[Candidate, Shape], Score] = field(default_factory=dict)  # the best of each
    open_s: float = math.inf  # the least bound of a candidate that is not settled
    is_complete: bool = True
    work: int = 0  # replayed computations
    about: float = 1.0  # of the memory: proposals have at most that by their estimates

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
            if not self.scores:  # replays may still fit
                self.about = _OVER
                self._search(priced)
        except (_StoppedError, KeyboardInterrupt) as stopped:
            if not self.scores and isinstance(stopped, KeyboardInterrupt):
                raise
            self.is_complete, self.stop = False, None
            with contextlib.suppress(KeyboardInterrupt):  # a second one: the times so far are good enough
                self._replay_best(priced, _STOPPED)
        if not self.scores:
            raise self._why_nothing(priced)
        best: dict[Candidate, Score] = {}
        for score in self._ranked():
            best.setdefault(score.candidate, score)
        return list(best.values())

    @property
    def _about_bytes(self) -> float:
        return self.about * self.space.limit_bytes

    def _ranked(self) -> list[Score]:
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
        small = [c for c in ordered if not is_sliceable and math.comb(num_layers - 1, c.grid.pipe - 1) <= MOST_CUTS]
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
        self._replay(self._proposals(others, priced, bounds_s), priced)
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
        """Return the best proposal of the best candidates, and raise the bounds of the examined candidates."""
        proposals: list[_Proposal] = []
        unhindered: set[Candidate] = set()  # as fast as without a limit of memory
        near_s = math.inf
        possible = [candidate for candidate in ordered if math.isfinite(bounds_s[candidate])]
        self._answer_first(possible, priced)
        for bound_s, candidate in self._by_bounds(possible, priced, bounds_s):
            if bound_s >= near_s and len(proposals) >= REPLAYED:
                break
            if dataclasses.replace(candidate, levers=NO_LEVERS) in unhindered:  # nothing would be gained
                continue
            if len(proposals) >= REPLAYED and self._is_slow(priced[candidate], near_s):
                continue
            best = self._first_proposal(priced[candidate])
            if best is None:
                continue
            if candidate.levers == NO_LEVERS and self._is_unhindered(priced[candidate], best.slices):
                unhindered.add(candidate)
            proposals.append(best)
            if _EXAMINED * best.seconds < near_s:
                near_s = _EXAMINED * best.seconds
                self._score(priced[candidate], best.shape, best.bounds, best.slices)  # a search may be stopped soon
        return sorted(proposals, key=lambda proposal: proposal[:-1])

    def _is_slow(self, costs: Priced, seconds: float) -> bool:
        """Return whether a candidate with equal stages fits, and takes clearly more, with the least memory."""
        shapes = [(self._shapes(costs, slices)[0], slices) for slices in self._slice_counts()]
        likely = sorted(shapes, key=lambda one: costs.even_s(*one))[:_BEST]
        return _ROUGH * seconds <= min(costs.rough_s(*one, self._about_bytes) for one in likely) < math.inf

    def _is_unhindered(self, costs: Priced, slices: int) -> bool:
        """Return whether the limit of memory changes no estimate, for shapes with little and with much memory."""
        shapes = self._shapes(costs, slices)
        limits = math.inf, self._about_bytes
        free, limited = ([costs.propose(shape, slices, limit) for shape in (shapes[0], shapes[-1])] for limit in limits)
        return all(a and b and a[0][0] >= (1 - 1e-9) * b[0][0] for a, b in zip(free, limited, strict=True))

    def _answer_first(self, possible: list[Candidate], priced: dict[Candidate, Priced]) -> None:
        """Replay a candidate that surely fits, with the fewest stages: from here on a stopped search has an answer."""
        needs = {candidate: self.space.mean_need(candidate) for candidate in possible}
        sure = [candidate for candidate in possible if needs[candidate] <= _SURE * self.space.limit_bytes]
        tried = sorted(sure, key=lambda candidate: (candidate.grid.pipe, needs[candidate]))[:1]
        for candidate in (*tried, *sorted(possible, key=needs.__getitem__)[:1]):
            if not self.scores and (proposal := self._first_proposal(priced[candidate])) is not None:
                self._score(priced[candidate], proposal.shape, proposal.bounds, proposal.slices)

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

    def _first_proposal(self, costs: Priced) -> _Proposal | None:
        """Return the best proposal of a candidate with the shapes that hold the least memory; None where none fits."""
        counts = self._slice_counts()
        ends = {counts[0], counts[-1]}
        if all(costs.least_bytes(self._shapes(costs, n)[0], n) > self._about_bytes for n in ends):
            return None
        shapes = [(self._shapes(costs, slices)[0], slices) for slices in counts]
        return min(self._proposals_with(costs, shapes), default=None)

    def _proposals_with(self, costs: Priced, shapes: list[tuple[Shape, int]]) -> list[_Proposal]:
        """Return the proposals with some shapes and numbers of slices, of those that equal stages take least with.

        Where none of these has a cut that fits, the others are tried: with more slices less is live. Those that take
        too long even without a limit of memory are left out.
        """
        limit, latest_s = self._about_bytes, _ERROR * self._best_s
        even_s = {one: seconds for one in shapes if (seconds := costs.even_s(*one)) < latest_s}
        ordered = sorted(even_s, key=even_s.__getitem__)
        likely = sorted(ordered[:_LIKELY], key=lambda one: (costs.rough_s(one[0], one[1], limit), even_s[one]))
        ordered = likely + ordered[_LIKELY:]
        for some in (ordered[:_BEST], ordered[_BEST:]):
            proposals = [
                _Proposal(seconds, costs.candidate.rank, shape, bounds, slices, costs.candidate)
                for shape, slices in some
                for seconds, bounds in costs.propose(shape, slices, self._about_bytes)
            ]
            if proposals:
                return proposals
        return []

    def _replay(self, proposals: list[_Proposal], priced: dict[Candidate, Priced]) -> None:
        """Replay some candidates with their best proposal, and then all that may be the best, by rising estimates."""
        for done, (_, _, shape, bounds, slices, candidate) in enumerate(proposals[:REPLAYED]):
            self._report("replays", done, len(proposals))
            self._score(priced[candidate], shape, bounds, slices)
        self._try_shapes(priced)
        # a candidate comes with its least estimate of any shape, and brings the proposals of all shapes
        queue: list[tuple[float, int, Candidate, _Proposal | None]] = []
        for place, (seconds, *_, candidate) in enumerate(proposals):
            queue.append((min(seconds, self._rough_s(priced[candidate])), place, candidate, None))
        heapq.heapify(queue)
        added = len(queue)
        while queue and queue[0][0] < _ERROR * self._best_s and self.work < _WORK:
            self._report("replays", added - len(queue), added)
            _, _, candidate, one = heapq.heappop(queue)
            if one is not None:
                self._score(priced[candidate], one.shape, one.bounds, one.slices, near_s=_NEAR * self._best_s)
                continue
            self.work += _PROPOSING
            for each in self._proposals_of(priced[candidate]):
                heapq.heappush(queue, (each.seconds, added, candidate, each))
                added += 1

    def _try_shapes(self, priced: dict[Candidate, Priced]) -> None:
        """Replay the best with all shapes, in as many slices or half: estimates leave out waits for few slices."""
        for score in self._ranked()[:_LIKELY]:
            costs, most = priced[score.candidate], score.plan.num_slices
            for slices in dict.fromkeys((most, max(1, most // 2))):
                for shape in self._shapes(costs, slices):
                    for _, bounds in costs.propose(shape, slices, self._about_bytes):
                        self._score(costs, shape, bounds, slices, near_s=_NEAR * self._best_s)

    def _tried(self, costs: Priced) -> list[tuple[Shape, int]]:
        """Return the shapes of a candidate, each with every number of slices that it may have."""
        return [(shape, slices) for slices in self._slice_counts() for shape in self._shapes(costs, slices)]

    def _rough_s(self, costs: Priced) -> float:
        """Return about the least seconds of a candidate with equal stages, of any shape in its likeliest slices."""
        likely: dict[Shape, tuple[float, int]] = {}
        for shape, slices in self._tried(costs):
            likely[shape] = min(likely.get(shape, (math.inf, 0)), (costs.even_s(shape, slices), slices))
        return min(costs.rough_s(shape, slices, self._about_bytes) for shape, (_, slices) in likely.items())

    def _proposals_of(self, costs: Priced) -> list[_Proposal]:
        """Return the best proposals of a candidate for each shape."""
        tried = self._tried(costs)
        return [
            proposal
            for shape in dict.fromkeys(shape for shape, _ in tried)
            for proposal in self._proposals_with(costs, [one for one in tried if one[0] == shape])
        ]

    def _score(
        self,
        priced: Priced,
        shape: Shape,
        bounds: Bounds,
        slices: int | SlicePlan,
        most: float | None = None,
        near_s: float = math.inf,
    ) -> None:
        """Replay a cut, and keep it where it is the best of its candidate and shape, and takes at most `near_s`."""
        plan = equal_plan(priced.candidate.setting, priced.length, slices) if isinstance(slices, int) else slices
        best = self.scores.get((priced.candidate, shape))
        if best is not None and (best.bounds, best.plan) == (bounds, plan):
            return
        beat_s = near_s if best is None else min(near_s, best.seconds)
        score = priced.score(bounds, shape, plan, self.space.limit_bytes, most, beat_s)
        if score is not None and (best is None or score.rank < best.rank):
            self.scores[priced.candidate, shape] = score
        replayed = ScheduleShape(shape.schedule, priced.num_stages, plan.num_slices, shape.chunks)
        self.work += min(priced.num_micro_batches, replayed.filling) * replayed.num_computations
        self._check_stop()

    def _improve(self, priced: dict[Candidate, Priced]) -> None:
        """Try more and planned slices, and moved layers, for the scores near the best; replay the best whole."""
        improved: set[tuple[Candidate, Shape]] = set()
        while (score := self._next_finalist(improved)) is not None:
            self._report("finalists", len(improved), len(self.scores))
            improved.add((score.candidate, score.shape))
            costs = priced[score.candidate]
            if self.space.layers.is_sliceable:
                self._halve_slices(costs, score.shape)
            score = self.scores[score.candidate, score.shape]
            if score.plan.num_slices > 1:
                self._plan_slices(costs, score)
            self._move_layers(costs, score.shape)
        self._replay_best(priced, MOST_WHOLE)

    def _replay_best(self, priced: dict[Candidate, Priced], most: float) -> None:
        """Replay the best score whole, until the best is one replayed whole: few micro-batches stood for many."""
        while self.scores and not (best := self._ranked()[0]).is_final:
            costs, key = priced[best.candidate], (best.candidate, best.shape)
            # the earlier score stays until this long replay ends, which an interrupt may cut short
            whole = costs.score(best.bounds, best.shape, best.plan, self.space.limit_bytes, most, math.inf)
            if whole is None:
                del self.scores[key]
            else:
                self.scores[key] = whole
            self._check_stop()

    def _next_finalist(self, improved: set[tuple[Candidate, Shape]]) -> Score | None:
        """Return the best score near the best that is not improved yet, while there is work left, or few are."""
        near_s, has_work = _NEAR * self._best_s, self.work < _WORK + _POLISH or len(improved) < _FINALISTS
        left = [score for score in self._ranked() if (score.candidate, score.shape) not in improved]
        near = [score for score in left if score.seconds <= near_s and score.candidate.grid.pipe > 1]
        return near[0] if near and has_work else None

    def _halve_slices(self, priced: Priced, shape: Shape) -> None:
        """Replay a score with twice as many slices, and so on while that makes the batch shorter."""
        best = None
        while self.scores[priced.candidate, shape] is not best:
            best = self.scores[priced.candidate, shape]
            slices = 2 * best.plan.num_slices
            is_short = shape.is_short(priced.num_stages, priced.num_micro_batches, slices)
            if slices > 2 and is_short and priced.length >= _LEAST_TOKENS * slices:
                self._score(priced, shape, best.bounds, slices)

    def _plan_slices(self, priced: Priced, score: Score) -> None:
        """Replay a score with slices by `plan_slices`, where some fit."""
        owners = owners_of(score.shape.schedule, priced.num_stages, score.shape.chunks)
        self.work += _BUDGET
        granule = granule_of(priced.length)
        if self.space.layers.whole_is_least:  # other bounds are for multiples of the granule
            granule = min(granule, max(64, priced.length // score.plan.num_slices))
        granule = max(granule - granule % (ranks := priced.candidate.grid.sequence), ranks)
        filling = -(-2 * priced.num_stages // score.plan.num_slices) + 2  # micro-batches that fill, and some that drain
        try:
            result = plan_slices(
                priced.parts(score.bounds, score.recompute, owners),
                priced.length,
                priced.num_stages,
                min(priced.num_micro_batches, filling),
                granule,
                score.shape.schedule,
                chunks_per_stage=score.shape.chunks,
                max_slices=max(2 * score.plan.num_slices, 2),
                memory=priced.memory(score.bounds, score.recompute, owners),
                memory_limit_bytes=self.space.limit_bytes,
                budget=_BUDGET,
            )
        except MemoryLimitError:
            return
        self._score(priced, score.shape, score.bounds, result.plans[0])

    def _move_layers(self, priced: Priced, shape: Shape) -> None:
        """Move one layer over each edge while that makes the batch shorter; fewer moves where a replay is long."""
        tried: set[Bounds] = set()
        best = None
        while self.scores[priced.candidate, shape] is not best:
            best = self.scores[priced.candidate, shape]
            units = priced.num_micro_batches * best.plan.num_slices * shape.chunks
            most = _MOVED // (2 * priced.num_stages * units)
            moved = [cut for cut in moved_edges(best.bounds) if cut not in tried][: max(0, most - len(tried))]
            tried.update(moved)
            for cut in moved:
                self._score(priced, shape, cut, best.plan)

    # --- bounds and errors

    def _why_nothing(self, priced: dict[Candidate, Priced]) -> PlannerError:
        """Return the error where no strategy fits in memory, with the least need, or where there was no time."""
        if not self.is_complete:
            return PlannerError(TOO_SOON)
        counts = self._slice_counts()
        needs = {
            candidate: costs.replayed_bytes
            or min(costs.least_bytes(self._shapes(costs, n)[0], n) for n in (counts[0], counts[-1]))
            for candidate, costs in priced.items()
        }
        least = min(needs, key=lambda candidate: (needs[candidate], candidate.rank))
        # devices have room: the question wants offloading, and hosts lack the memory
        if needs[least] <= self.space.limit_bytes and self.space.cluster.card.host_memory_bytes:
            return self.space.host_memory_error()
        return self.space.memory_error(math.ceil(needs[least]), least)

    @property
    def _best_s(self) -> float:
        return min((score.seconds for score in self.scores.values()), default=math.inf)

    def _bound_s(self, priced: Priced, limit_bytes: float = math.inf) -> float:
        """Return a lower bound on every schedule that the search tries for a candidate."""
        counts = self._slice_counts()
        tried = {shape for slices in (counts[0], counts[-1]) for shape in self._shapes(priced, slices)}
        bound_s = priced.lower_bound_s(limit_bytes)
        if priced.num_stages == 1 or all(shape.has_own_bound for shape in tried):
            return bound_s
        return min(bound_s, priced.chunked_bound_s(limit_bytes))

    def _shapes(self, priced: Priced, slices: int) -> tuple[Shape, ...]:
        """Return the shapes that a candidate has in `slices`, the one with the least memory first."""
        choices, stages = self.space.choices, priced.num_stages
        shapes = shapes_of(slices, choices.schedule, choices.chunks_per_stage)
        if not self.space.layers.is_sliceable:
            return shapes if choices.schedule else UNSLICED
        if stages == 1:
            return shapes[:1]
        possible = [shape for shape in shapes if shape.chunks * stages <= self.space.layers.num_layers]
        if choices.schedule is None:
            rows = priced.num_micro_batches
            possible = [
                shape
                for shape in possible
                if shape.has_own_bound
                or ((priced.can_split or not shape.is_split) and shape.is_short(stages, rows, slices))
            ]
        return tuple(possible) or shapes[:1]

    def _slice_counts(self) -> list[int]:
        if not self.space.layers.is_sliceable or self.space.choices.schedule in WHOLE:
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


class _Proposal(NamedTuple):
    """Hold about the seconds of a cut, and what decides between proposals of as many."""

    seconds: float
    rank: tuple[object, ...]
    shape: Shape
    bounds: Bounds
    slices: int
    candidate: Candidate


class _StoppedError(Exception):
    """Leave the search; its scores and bounds stay."""
