"""Where does a measured step differ from the predicted one? Two timelines of one schedule, action by action."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

from terapipe_ds.timeline import COMPUTE_KINDS, Timeline, TimelineEvent

WORST = 10


class CompareError(ValueError):
    """Timelines that are not of the same schedule."""


@dataclass(frozen=True)
class Pair:
    """The same quantity as predicted and as measured."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing is predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None


@dataclass(frozen=True)
class ActionPair:
    """One computation in both timelines; times in seconds from the first start of each timeline."""

    stage_id: int
    action: str
    kind: str
    duration_s: Pair
    start_s: Pair
    wait_s: Pair  # between the end of the stage's computation before it (or the start of all) and its own start


@dataclass(frozen=True)
class StageComparison:
    """One stage; ``busy_s`` by kind (F, B, W) and ``wait_s``, all gaps before its last end."""

    stage_id: int
    busy_s: dict[str, Pair]
    bubble_fraction: Pair
    wait_s: Pair


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` finds. ``actions`` are in the order of their predicted starts."""

    makespan_s: Pair
    bubble_fraction: Pair
    stages: tuple[StageComparison, ...]
    actions: tuple[ActionPair, ...]

    def median_ratio(self, kind: str | None = None) -> float | None:
        """The median over the actions (of one kind) of measured over predicted duration."""
        pairs = (action.duration_s.ratio for action in self.actions if kind in (None, action.kind))
        ratios = [ratio for ratio in pairs if ratio is not None]
        return statistics.median(ratios) if ratios else None

    def worst(self, count: int = WORST) -> list[ActionPair]:
        """The actions whose durations differ by the largest factor, either way."""
        return sorted(self.actions, key=lambda action: -_factor(action.duration_s))[:count]

    def longest_waits(self, count: int = WORST) -> list[ActionPair]:
        """The actions before which the stage waits longest beyond what is predicted."""
        more = [action for action in self.actions if action.wait_s.measured > action.wait_s.predicted]
        return sorted(more, key=lambda action: action.wait_s.predicted - action.wait_s.measured)[:count]

    def largest_drift(self) -> ActionPair:
        """The action whose start is furthest from the predicted one."""
        return max(self.actions, key=lambda action: abs(_difference(action.start_s)))

    def median_drift_s(self) -> float:
        """The median of measured minus predicted start."""
        return statistics.median(_difference(action.start_s) for action in self.actions)

    def to_dict(self) -> dict[str, Any]:
        """Ready for ``json.dumps``; the ten worst instead of all actions."""
        kinds = sorted({action.kind for action in self.actions}, key=COMPUTE_KINDS.index)
        return {
            "makespan_s": _pair(self.makespan_s),
            "bubble_fraction": dataclasses.asdict(self.bubble_fraction),
            "stages": [
                {
                    "stage_id": stage.stage_id,
                    "busy_s": {kind: _pair(pair) for kind, pair in stage.busy_s.items()},
                    "bubble_fraction": dataclasses.asdict(stage.bubble_fraction),
                    "wait_s": dataclasses.asdict(stage.wait_s),
                }
                for stage in self.stages
            ],
            "durations": {
                "median_ratio": self.median_ratio(),
                "median_ratio_by_kind": {kind: self.median_ratio(kind) for kind in kinds},
                "worst": [_named(action) | _pair(action.duration_s) for action in self.worst()],
            },
            "start_drift_s": {
                "median": self.median_drift_s(),
                "largest": _named(self.largest_drift()) | dataclasses.asdict(self.largest_drift().start_s),
            },
            "longest_waits_s": [_named(a) | dataclasses.asdict(a.wait_s) for a in self.longest_waits()],
        }


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Put two timelines of one schedule side by side. Only F, B and W count; their clocks need not agree.

    Raises:
        CompareError: other numbers of stages, other computations, or another order on a stage.
    """
    if predicted.num_stages != measured.num_stages:
        raise CompareError(
            f"not the same schedule: {predicted.num_stages} stages predicted, {measured.num_stages} measured;"
            " simulate the schedule that ran"
        )
    first, second = _by_stage(predicted, "predicted"), _by_stage(measured, "measured")
    _check_same(first, second)
    zeros = _zero_s(first), _zero_s(second)
    stages = []
    actions: list[ActionPair] = []
    bubbles = zip(predicted.bubbles(), measured.bubbles(), strict=True)
    for stage_id, bubble in enumerate(bubbles):
        mine = _pair_up(first[stage_id], second[stage_id], zeros)
        actions += mine
        kinds = [kind for kind in COMPUTE_KINDS if any(action.kind == kind for action in mine)]
        busy_s = {kind: _sum([a.duration_s for a in mine if a.kind == kind]) for kind in kinds}
        stages.append(StageComparison(stage_id, busy_s, Pair(*bubble), _sum([a.wait_s for a in mine])))
    actions.sort(key=lambda action: action.start_s.predicted)
    return Comparison(
        Pair(predicted.makespan_s, measured.makespan_s), Pair(predicted.bubble_fraction, measured.bubble_fraction),
        tuple(stages), tuple(actions),
    )  # fmt: skip


def render(comparison: Comparison) -> str:
    """The comparison as a table for people."""
    makespan, bubble = comparison.makespan_s, comparison.bubble_fraction
    lines = [
        f"{'':<22}{'predicted':>12}{'measured':>12}{'ratio':>8}",
        _row("makespan s", makespan),
        f"{'bubble %':<22}{100 * bubble.predicted:>12.1f}{100 * bubble.measured:>12.1f}",
    ]
    for stage in comparison.stages:
        lines += [_row(f"stage {stage.stage_id} {kind} s", pair) for kind, pair in stage.busy_s.items()]
        lines.append(_row(f"stage {stage.stage_id} waits s", stage.wait_s))
    kinds = sorted({action.kind for action in comparison.actions}, key=COMPUTE_KINDS.index)
    ratios = ", ".join(f"{kind} {_ratio(comparison.median_ratio(kind))}" for kind in kinds)
    drift = comparison.largest_drift()
    lines += [
        "",
        f"median ratio of durations, measured over predicted: {_ratio(comparison.median_ratio())} ({ratios})",
        f"starts: median {comparison.median_drift_s():+.4g} s off, at most {_difference(drift.start_s):+.4g} s"
        f" ({_name(drift)})",
        "",
        "durations that differ most",
        *(_row("  " + _name(action), action.duration_s) for action in comparison.worst()),
    ]
    waits = comparison.longest_waits()
    if waits:
        lines += ["", "waits longer than predicted", *(_row("  " + _name(a), a.wait_s) for a in waits)]
    return "\n".join(lines)


def _by_stage(timeline: Timeline, which: str) -> list[dict[str, TimelineEvent]]:
    """Per stage its computations by name, in the order in which they run."""
    stages: list[dict[str, TimelineEvent]] = [{} for _ in range(timeline.num_stages)]
    for event in sorted(timeline.events, key=lambda event: (event.start_s, event.end_s)):
        if event.kind in COMPUTE_KINDS:
            if event.action in stages[event.stage_id]:
                raise CompareError(
                    f"the {which} timeline has {event.action} on stage {event.stage_id} twice: give that of one step"
                )
            stages[event.stage_id][event.action] = event
    if not any(stages):
        raise CompareError(f"the {which} timeline holds no F, B or W: there is nothing to compare")
    return stages


def _check_same(predicted: list[dict[str, TimelineEvent]], measured: list[dict[str, TimelineEvent]]) -> None:
    only = []
    for which, mine, theirs in (("predicted", predicted, measured), ("measured", measured, predicted)):
        names = [f"stage {k} {name}" for k, stage in enumerate(mine) for name in stage if name not in theirs[k]]
        if names:
            more = ", ..." if len(names) > 3 else ""
            only.append(f"{len(names)} computations are only {which} ({', '.join(names[:3])}{more})")
    if only:
        raise CompareError(f"not the same schedule: {'; '.join(only)}; simulate the schedule and the plan that ran")
    for stage_id, (ours, others) in enumerate(zip(predicted, measured, strict=True)):
        for index, (one, other) in enumerate(zip(ours, others, strict=True)):
            if one != other:
                raise CompareError(
                    f"not the same schedule: computation {index} of stage {stage_id} is {one} as predicted, {other} as"
                    " measured; simulate the schedule that ran"
                )


def _pair_up(
    predicted: dict[str, TimelineEvent], measured: dict[str, TimelineEvent], zeros: tuple[float, float]
) -> list[ActionPair]:
    ends = list(zeros)
    actions = []
    for name, event in predicted.items():
        both = event, measured[name]
        durations, starts, waits = [], [], []
        for which, one in enumerate(both):
            durations.append(one.end_s - one.start_s)
            starts.append(one.start_s - zeros[which])
            waits.append(max(one.start_s - ends[which], 0.0))
            ends[which] = max(ends[which], one.end_s)
        actions.append(ActionPair(event.stage_id, name, event.kind, Pair(*durations), Pair(*starts), Pair(*waits)))
    return actions


def _zero_s(stages: list[dict[str, TimelineEvent]]) -> float:
    return min(event.start_s for mine in stages for event in mine.values())


def _sum(pairs: list[Pair]) -> Pair:
    return Pair(math.fsum(pair.predicted for pair in pairs), math.fsum(pair.measured for pair in pairs))


def _difference(pair: Pair) -> float:
    return pair.measured - pair.predicted


def _factor(pair: Pair) -> float:
    """How far a ratio is from 1, on a scale on which twice and half are as far."""
    if pair.predicted == pair.measured:
        return 0.0
    return abs(math.log(pair.measured / pair.predicted)) if min(pair.predicted, pair.measured) > 0 else math.inf


def _pair(pair: Pair) -> dict[str, float | None]:
    return {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}


def _named(action: ActionPair) -> dict[str, Any]:
    return {"stage_id": action.stage_id, "action": action.action}


def _name(action: ActionPair) -> str:
    return f"stage {action.stage_id} {action.action}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _row(what: str, pair: Pair) -> str:
    return f"{what:<22}{pair.predicted:>12.6g}{pair.measured:>12.6g}{_ratio(pair.ratio):>8}"
