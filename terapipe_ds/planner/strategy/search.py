"""The search: candidates by their proven bounds, cuts by programs, and the best by replay of what will run.

Without slices, and where a candidate has few cuts, every cut that its bound does not exclude is replayed: the answer is
exact among the strategies of the module's list. Elsewhere the programs propose cuts for several numbers of slices, the
most promising are replayed, and the bounds of all candidates that were not settled say how far the answer may be off.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from terapipe_ds.messages import show_value
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import DATA_FIRST, PIPE_FIRST, Cluster, Grid
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.parts import Layers
from terapipe_ds.planner.search.candidates import slice_counts
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy.cuts import Bounds, all_cuts, num_cuts
from terapipe_ds.planner.strategy.priced import Candidate, Priced, Score, granule_of

Progress = Callable[[str, int, int], None]
"""Called now and then with (what, work done, of how much)."""

MOST_CUTS = 4096  # of a candidate that is settled by replaying its cuts
_MOST_EXPANDED = 160  # candidates whose layers are cut by the programs
_MOST_REPLAYED = 12  # proposals that are replayed
_MOST_SLICES = 64
_FINALISTS = 2
_BUDGET = 200_000  # of the slices of a finalist, as `plan_slices` counts it
_MOST_MOVES = 60  # of a layer from one part to another, tried by replay
_MOVED = 400_000  # computations of all of these replays
_UNSLICED = ("1f1b", "gpipe")
_MARGINS = (1.0, 0.94, 0.85)  # shares of the memory limit that the programs aim at, until what they cut fits


@dataclass(frozen=True)
class Choices:
    """What is already chosen; None is searched."""

    stages: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    schedule: str | None = None


@dataclass
class Search:
    """One question, and what is known of its answer."""

    layers: Layers
    cluster: Cluster
    global_batch_size: int
    sequence_length: int
    limit_bytes: float
    choices: Choices = Choices()
    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    include: tuple[Choices, ...] = ()
    scores: dict[Candidate, Score] = field(default_factory=dict)  # the best of each
    open_s: float = math.inf  # the least bound of a candidate that is not settled
    is_complete: bool = True

    def run(self) -> list[Score]:
        """Return the best of each candidate that was replayed, the best first."""
        candidates = list(self.candidates())
        if not candidates:
            raise PlannerError(self._why_none())
        try:
            self._search(candidates)
            for choices in self.include:
                self._search_within(choices, candidates)
        except _StoppedError:
            self.is_complete = False
        except KeyboardInterrupt:
            if not self.scores:
                raise
            self.is_complete = False
        if not self.scores:
            if not self.is_complete:
                raise PlannerError("the search was stopped before it had any strategy: give it more time")
            raise self._memory_error(candidates)
        return sorted(self.scores.values(), key=lambda score: score.rank)

    @property
    def lower_bound_s(self) -> float:
        """Return what no strategy that is searched takes less than."""
        return min([self.open_s, *(score.seconds for score in self.scores.values())])

    # --- candidates

    def candidates(self) -> Iterator[Candidate]:
        """Yield every candidate: degrees that multiply to the devices, micro-batches that make up the global batch."""
        devices, choices = self.cluster.num_devices, self.choices
        for tensor in _divisors(self.cluster.devices_per_node):
            if tensor != (choices.tensor_parallel or tensor) or self.layers.refuse_tensor(tensor) is not None:
                continue
            for pipe in _divisors(devices // tensor):
                data = devices // tensor // pipe
                is_wanted = pipe == (choices.stages or pipe) and data == (choices.data_parallel or data)
                if not is_wanted or pipe > self.layers.num_layers or self.global_batch_size % data:
                    continue
                axes = (PIPE_FIRST, DATA_FIRST) if pipe > 1 and data > 1 else (PIPE_FIRST,)
                own_batch = self.global_batch_size // data
                sizes = [rows for rows in _divisors(own_batch) if self.layers.refuse_micro_batch(tensor, rows) is None]
                for micro_batch, zero, order in itertools.product(sizes, self._zeros(data), axes):
                    grid = Grid(pipe, data, tensor, order)
                    yield Candidate(grid, micro_batch, own_batch // micro_batch, zero)

    def _zeros(self, data: int) -> tuple[int, ...]:
        """Return the ZeRO stages that differ: DeepSpeed divides the states of bfloat16 whatever the stage."""
        if data == 1:
            return (0,)
        return (1,) if self.layers.dtype == "bfloat16" else (0, 1)

    def _why_none(self) -> str:
        """Say why there is no candidate, with the nearest question that has one."""
        cluster, batch = self.cluster, self.global_batch_size
        asked = f"{cluster.nodes} x {cluster.devices_per_node} devices, global_batch_size = {batch}"
        tensor = self.choices.tensor_parallel
        if tensor is not None and (why := self.layers.refuse_tensor(tensor)) is not None:
            fits = [t for t in _divisors(cluster.devices_per_node) if self.layers.refuse_tensor(t) is None]
            nearest = min(fits, key=lambda degree: abs(degree - tensor), default=1)
            return f"{asked}: {why}. The nearest that works here is tensor_parallel = {nearest}"
        if tensor is not None and cluster.devices_per_node % tensor:
            fits = _divisors(cluster.devices_per_node)
            nearest = min(fits, key=lambda degree: abs(degree - tensor))
            return (
                f"{asked}: tensor_parallel = {tensor} does not divide the {cluster.devices_per_node} devices of a "
                f"node; the nearest that does is {nearest}"
            )
        for distance in range(1, 4097):
            for other in (batch - distance, batch + distance):
                if (
                    other >= 1
                    and next(Search(self.layers, self.cluster, other, *self._question[3:]).candidates(), None)
                    is not None
                ):
                    why = self.layers.refuse_micro_batch(tensor or 1, 1) or (
                        f"no stages x replicas x tensor ranks with at most {self.layers.num_layers} stages divide both"
                    )
                    return f"{asked}: {why}; the nearest that works is global_batch_size = {other}"
        for name, value in vars(self.choices).items():
            if value is not None and name != "schedule":
                free = Search(*self._question[:-1], dataclasses.replace(self.choices, **{name: None}))
                axis = {"stages": "pipe", "data_parallel": "data", "tensor_parallel": "model"}[name]
                others = {getattr(candidate.grid, axis) for candidate in free.candidates()}
                if others:
                    nearest = min(others, key=lambda other: (abs(other - value), other))
                    return f"{asked}: no strategy has {name} = {value}; the nearest that works is {nearest}"
        fixed = ", ".join(f"{name} = {value}" for name, value in vars(self.choices).items() if value is not None)
        return f"{asked}: no strategy has {fixed or 'such degrees'}; leave one of them out, or change the devices"

    @property
    def _question(self) -> tuple[Layers, Cluster, int, int, float, Choices]:
        return (
            *(self.layers, self.cluster, self.global_batch_size, self.sequence_length, self.limit_bytes),
            self.choices,
        )

    # --- the search

    def _search(self, candidates: list[Candidate]) -> None:
        priced = {candidate: self._price(candidate) for candidate in candidates}
        bounds_s = {}
        for done, (candidate, costs) in enumerate(priced.items()):
            self._report("bounds", done, len(candidates))
            bounds_s[candidate] = costs.lower_bound_s()
        self.open_s = min(bounds_s.values())
        ordered = sorted(candidates, key=lambda candidate: (bounds_s[candidate], candidate.rank))
        schedules = [self.choices.schedule] if self.choices.schedule else list(_UNSLICED)
        small = [c for c in ordered if num_cuts(self.layers.num_layers, c.grid.pipe) <= MOST_CUTS]
        if self.layers.is_sliceable:
            small = []
        for done, candidate in enumerate(small):
            self._report("candidates", done, len(ordered))
            if bounds_s[candidate] < self._best_s:
                self._settle(priced[candidate], schedules)
            self.open_s = min([bounds_s[c] for c in ordered if c not in set(small[: done + 1])], default=math.inf)
        self._propose([c for c in ordered if c not in set(small)], priced, bounds_s)

    def _search_within(self, choices: Choices, candidates: list[Candidate]) -> None:
        """Add the best of the candidates that have the choices, whatever their bounds."""
        fixed = {name: value for name, value in vars(self.choices).items() if value is not None}
        part = Search(*self._question[:-1], dataclasses.replace(choices, **fixed), stop=self.stop)
        wanted = set(part.candidates()) & set(candidates)
        if wanted:
            part._search([candidate for candidate in candidates if candidate in wanted])
        for score in part.scores.values():
            self._keep(score)

    def _settle(self, priced: Priced, schedules: list[str]) -> None:
        """Replay every cut of a candidate that may be the best of all."""
        plan = SlicePlan.equal(self.sequence_length, 1)
        cuts = all_cuts(self.layers.num_layers, priced.num_stages)
        for bound_s, bounds in sorted((priced.cut_bound_s(bounds), bounds) for bounds in cuts):
            if bound_s >= self._best_s:
                break
            for schedule in schedules[:1] if priced.num_stages == 1 else schedules:
                self._keep(priced.score(bounds, schedule, plan, self.limit_bytes))

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
            bounds_s[candidate] = max(bounds_s[candidate], priced[candidate].lower_bound_s(self.limit_bytes))
            if bounds_s[candidate] >= min(self._best_s, near_s):
                continue
            of_candidate = sorted(self._proposals(priced[candidate]))[:2]
            proposals += [(seconds, slices, candidate, cut) for seconds, slices, cut in of_candidate]
            if of_candidate:
                near_s = min(near_s, 1.05 * of_candidate[0][0])
        proposals.sort(key=lambda proposal: (*proposal[:2], proposal[2].rank, proposal[3]))
        for done, (_, slices, candidate, cut) in enumerate(proposals[:_MOST_REPLAYED]):
            self._report("replays", done, min(len(proposals), _MOST_REPLAYED))
            if bounds_s[candidate] < self._best_s:
                self._replay(priced[candidate], slices, cut)
        for _, slices, candidate, cut in proposals[_MOST_REPLAYED:]:
            if self.scores:
                break
            self._replay(priced[candidate], slices, cut)
        self._improve(priced)
        open_ones = [bound_s for candidate, bound_s in bounds_s.items() if candidate in set(ordered)]
        self.open_s = min(open_ones, default=math.inf)

    def _proposals(self, priced: Priced) -> Iterator[tuple[float, int, Bounds]]:
        """Yield (about the seconds, slices, cut): for each number of slices the best cut that fits in memory."""
        for slices in self._slice_counts(priced):
            yield from ((seconds, slices, cut) for seconds, cut in priced.estimates(slices, self.limit_bytes)[:1])

    def _replay(self, priced: Priced, slices: int, cut: Bounds) -> None:
        """Replay a proposal. The programs count memory roughly: where it does not fit, they aim at less."""
        plan, schedule = SlicePlan.equal(self.sequence_length, slices), self._schedule(slices)
        for margin in _MARGINS:
            cuts = [cut] if margin == 1 else [b for _, b in priced.estimates(slices, margin * self.limit_bytes)[:1]]
            for bounds in cuts:
                score = priced.score(bounds, schedule, plan, self.limit_bytes, whole=False)
                self._keep(score)
                if score is not None:
                    return

    def _slice_counts(self, priced: Priced) -> list[int]:
        if not self.layers.is_sliceable or self.choices.schedule in ("1f1b", "gpipe"):
            return [1]
        most = min(_MOST_SLICES, -(-self.sequence_length // granule_of(self.sequence_length)))
        return [count for count in slice_counts(most) if count & (count - 1) == 0]

    def _schedule(self, slices: int) -> str:
        return self.choices.schedule or ("1f1b" if slices == 1 else "seq1f1b")

    def _improve(self, priced: dict[Candidate, Priced]) -> None:
        """Replay the finalists whole, with slices of the slice planner and with layers moved."""
        finalists = sorted(self.scores.values(), key=lambda score: score.rank)[:_FINALISTS]
        for done, score in enumerate(finalists):
            self._report("finalists", done, len(finalists))
            costs = priced[score.candidate]
            if not score.is_whole:
                del self.scores[score.candidate]
                self._keep(costs.score(score.bounds, score.schedule, score.plan, self.limit_bytes))
            if self.layers.is_sliceable and score.plan.num_slices > 1 and costs.num_stages > 1:
                self._keep(self._planned(costs, score))
            self._move_layers(costs, self.scores.get(score.candidate))
        for candidate, score in list(self.scores.items()):  # what is returned was replayed whole, or is not the best
            if not score.is_whole and score.seconds < self._best_whole_s:
                del self.scores[candidate]
                self._keep(priced[candidate].score(score.bounds, score.schedule, score.plan, self.limit_bytes))

    def _planned(self, priced: Priced, score: Score) -> Score | None:
        """Return the score with slices by `plan_slices`."""
        parts = priced.parts(score.bounds, score.recompute)
        memory = priced.memory(score.bounds, score.recompute)
        few = min(priced.num_micro_batches, 2 * priced.num_stages)
        try:
            result = plan_slices(
                parts,
                self.sequence_length,
                priced.num_stages,
                few,
                granule_of(self.sequence_length),
                score.schedule,
                max_slices=max(2 * score.plan.num_slices, 2),
                memory=memory,
                memory_limit_bytes=self.limit_bytes,
                budget=_BUDGET,
            )
        except MemoryLimitError:
            return None
        return priced.score(score.bounds, score.schedule, result.plan, self.limit_bytes)

    def _move_layers(self, priced: Priced, best: Score | None) -> None:
        """Move one layer over each edge while that makes the batch shorter; fewer moves where a replay is long."""
        tried: set[Bounds] = set()
        while best is not None:
            computations = 2 * priced.num_stages * priced.num_micro_batches * best.plan.num_slices
            most = min(_MOST_MOVES, _MOVED // computations)
            moved = [cut for cut in _neighbours(best.bounds) if cut not in tried][: max(0, most - len(tried))]
            tried.update(moved)
            for cut in moved:
                self._keep(priced.score(cut, best.schedule, best.plan, self.limit_bytes))
            if self.scores[best.candidate] is best:
                return
            best = self.scores[best.candidate]

    # --- what is known

    @property
    def _best_s(self) -> float:
        return min((score.seconds for score in self.scores.values()), default=math.inf)

    @property
    def _best_whole_s(self) -> float:
        return min((score.seconds for score in self.scores.values() if score.is_whole), default=math.inf)

    def _keep(self, score: Score | None) -> None:
        best = None if score is None else self.scores.get(score.candidate)
        if score is not None and (best is None or score.rank < best.rank):
            self.scores[score.candidate] = score
        self._check_stop()

    def _price(self, candidate: Candidate) -> Priced:
        return Priced(self.layers, self.cluster, self.sequence_length, candidate)

    def _report(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop is not None and self.stop():
            raise _StoppedError

    def _memory_error(self, candidates: list[Candidate]) -> MemoryLimitError:
        """Return the error where nothing fits: the least need, and what has it."""
        needs = []
        for candidate in candidates:
            priced = self._price(candidate)
            counts = [1] if not self.layers.is_sliceable else [1, self._slice_counts(priced)[-1]]
            needs.append((min(priced.least_bytes(count) for count in counts), candidate.rank, candidate))
        need, _, candidate = min(needs, key=lambda entry: entry[:2])
        grid = candidate.grid
        return MemoryLimitError(
            f"no strategy fits in {self.limit_bytes / 1e9:.4g} GB per device: the least need found is about "
            f"{need / 1e9:.4g} GB, with {grid.pipe} stages, {grid.data} replicas, {grid.model} tensor ranks, ZeRO "
            f"{candidate.zero_stage}, micro-batches of {candidate.micro_batch} and all recomputed; give "
            f"memory_limit_gb >= {math.ceil(need / 1e7) / 100:g} where devices have that, or more devices",
            math.ceil(need),
        )


class _StoppedError(Exception):
    """Leaves the search; what is known stays."""


def _neighbours(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts with one edge moved by one layer."""
    for i in range(1, len(bounds) - 1):
        for step in (-1, 1):
            moved = bounds[i] + step
            if bounds[i - 1] < moved < bounds[i + 1]:
                yield (*bounds[:i], moved, *bounds[i + 1 :])


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def check_limit(memory_limit_gb: Any, cluster: Cluster) -> float:
    """Return the bytes that a device may hold. Raises PlannerError for what is no number > 0."""
    if memory_limit_gb is None:
        return float(cluster.card.memory_bytes)
    is_number = isinstance(memory_limit_gb, int | float) and not isinstance(memory_limit_gb, bool)
    if not (is_number and math.isfinite(memory_limit_gb) and memory_limit_gb > 0):
        raise PlannerError(f"memory_limit_gb = {show_value(memory_limit_gb)}: give a number > 0")
    return 1e9 * float(memory_limit_gb)
