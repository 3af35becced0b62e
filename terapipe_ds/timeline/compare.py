"""Compare two timelines of one schedule: find where the measured step differs from the predicted one."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from terapipe_ds.timeline.timeline import COMPUTE_KINDS, Timeline, TimelineError, TimelineEvent

WORST = 10
"""So many actions of a kind of difference are shown."""


@dataclass(frozen=True)
class Quantity:
    """Hold one quantity as predicted and as measured.

    `what`: makespan_s and bubble_fraction of the step; busy_s, wait_s and bubble_fraction of a stage; duration_s,
    start_s and wait_s of an action. A wait of an action is the gap before it; starts count from the first one.
    """

    what: str
    predicted: float
    measured: float
    stage_id: int | None = None
    action: str | None = None
    kind: str | None = None

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted; None where nothing is predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None

    @property
    def difference(self) -> float:
        return self.measured - self.predicted

    @property
    def name(self) -> str:
        place = "" if self.stage_id is None else f"stage {self.stage_id} "
        quantity, unit = self.what.rpartition("_")[::2]
        what = self.action or f"{self.kind or quantity} {'%' if unit == 'fraction' else unit}"
        return place + what


@dataclass(frozen=True)
class Comparison:
    """Hold the table. `summary` has the step and its stages, `actions` 3 rows per computation in predicted order."""

    summary: tuple[Quantity, ...]
    actions: tuple[Quantity, ...]

    def of_actions(self, what: str, kind: str | None = None) -> list[Quantity]:
        """Return the rows of one quantity for all computations, or for one kind of them."""
        return [row for row in self.actions if row.what == what and kind in (None, row.kind)]

    def median_ratio(self, kind: str | None = None) -> float | None:
        """Return the median over the computations (of one kind) of measured over predicted duration."""
        ratios = [row.ratio for row in self.of_actions("duration_s", kind) if row.ratio is not None]
        return statistics.median(ratios) if ratios else None

    def median_drift_s(self) -> float:
        """Return the median of measured minus predicted start."""
        return statistics.median(row.difference for row in self.of_actions("start_s"))

    def sections(self) -> dict[str, list[Quantity]]:
        """Return the rows worth reading: the summary, and the actions that differ most in length, wait and start."""
        longer = [row for row in self.of_actions("wait_s") if row.difference > 0]
        return {
            "": list(self.summary),
            "durations that differ most": sorted(self.of_actions("duration_s"), key=_factor, reverse=True)[:WORST],
            "waits longer than predicted": sorted(longer, key=lambda row: -row.difference)[:WORST],
            "start that differs most": [max(self.of_actions("start_s"), key=lambda row: abs(row.difference))],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the table for `json.dumps`, with the actions that `sections` names instead of all of them."""
        rows = [row for section in self.sections().values() for row in section]
        return {
            "rows": [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows],
            "median_ratio": {kind or "all": self.median_ratio(kind) for kind in (None, *self._kinds())},
            "median_start_drift_s": self.median_drift_s(),
        }

    def render(self) -> str:
        lines = [f"{'':<22}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
        for title, rows in self.sections().items():
            if rows:
                lines += ["", title] if title else []
                lines += [_line(row, "  " * bool(title)) for row in rows]
        ratios = ", ".join(f"{kind} {_ratio(self.median_ratio(kind))}" for kind in self._kinds())
        lines += ["", f"median ratio of durations: {_ratio(self.median_ratio())} ({ratios})"]
        return "\n".join([*lines, f"median difference of starts: {self.median_drift_s():+.4g} s"])

    def _kinds(self) -> list[str]:
        return [kind for kind in COMPUTE_KINDS if any(row.kind == kind for row in self.actions)]


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Put two timelines of one schedule side by side. Only F, B and W count; their clocks need not agree.

    Raise TimelineError for other numbers of stages, other computations, or another order on a stage.
    """
    if predicted.num_stages != measured.num_stages:
        counts = f"{predicted.num_stages} stages predicted, {measured.num_stages} measured"
        raise TimelineError(f"not the same schedule: {counts}; simulate the schedule that ran")
    both = _by_stage(predicted, "predicted"), _by_stage(measured, "measured")
    _check_same(*both)
    summary = [
        Quantity("makespan_s", predicted.makespan_s, measured.makespan_s),
        Quantity("bubble_fraction", predicted.bubble_fraction, measured.bubble_fraction),
    ]
    actions: list[Quantity] = []
    zeros_s = [predicted.start_s, measured.start_s]
    for stage_id, bubbles in enumerate(zip(predicted.bubbles(), measured.bubbles(), strict=True)):
        rows = _rows_of(stage_id, [stages[stage_id] for stages in both], zeros_s)
        for kind in COMPUTE_KINDS:
            if durations := [row for row in rows if (row.what, row.kind) == ("duration_s", kind)]:
                summary.append(Quantity("busy_s", *_sums(durations), stage_id, kind=kind))
        summary.append(Quantity("wait_s", *_sums(row for row in rows if row.what == "wait_s"), stage_id))
        summary.append(Quantity("bubble_fraction", *bubbles, stage_id))
        actions += rows
    starts = {(row.stage_id, row.action): row.predicted for row in actions if row.what == "start_s"}
    actions.sort(key=lambda row: starts[row.stage_id, row.action])
    return Comparison(tuple(summary), tuple(actions))


def _by_stage(timeline: Timeline, which: str) -> list[dict[str, TimelineEvent]]:
    """Return per stage its computations by name, in the order in which they run."""
    stages: list[dict[str, TimelineEvent]] = [{} for _ in range(timeline.num_stages)]
    for event in sorted(timeline.computations(), key=lambda event: (event.start_s, event.end_s)):
        if event.action in stages[event.stage_id]:
            raise TimelineError(
                f"the {which} timeline has {event.action} on stage {event.stage_id} twice: give that of one step"
            )
        stages[event.stage_id][event.action] = event
    if not any(stages):
        raise TimelineError(f"the {which} timeline holds no F, B or W: there is nothing to compare; give another")
    return stages


def _check_same(predicted: list[dict[str, TimelineEvent]], measured: list[dict[str, TimelineEvent]]) -> None:
    problems = []
    for which, these, others in (("predicted", predicted, measured), ("measured", measured, predicted)):
        names = [f"stage {k} {name}" for k, stage in enumerate(these) for name in stage if name not in others[k]]
        if names:
            more = ", ..." if len(names) > 3 else ""
            problems.append(f"{len(names)} computations are only {which} ({', '.join(names[:3])}{more})")
    problems = problems or [
        f"computation {index} of stage {stage_id} is {one} as predicted, {other} as measured"
        for stage_id, stages in enumerate(zip(predicted, measured, strict=True))
        for index, (one, other) in enumerate(zip(*stages, strict=True))
        if one != other
    ]
    if problems:
        shown = "; ".join(problems[:2])
        raise TimelineError(f"not the same schedule: {shown}; simulate the schedule and the plan that ran")


def _rows_of(stage_id: int, both: list[dict[str, TimelineEvent]], zeros_s: list[float]) -> list[Quantity]:
    """Return duration, start and wait of every computation of a stage."""
    ends_s = list(zeros_s)
    rows = []
    for name, event in both[0].items():
        values = []
        for which, ran in enumerate(stage[name] for stage in both):
            wait_s = max(ran.start_s - ends_s[which], 0.0)
            values.append((ran.end_s - ran.start_s, ran.start_s - zeros_s[which], wait_s))
            ends_s[which] = max(ends_s[which], ran.end_s)
        for what, predicted, measured in zip(("duration_s", "start_s", "wait_s"), *values, strict=True):
            rows.append(Quantity(what, predicted, measured, stage_id, name, event.kind))
    return rows


def _sums(rows: Iterable[Quantity]) -> tuple[float, float]:
    rows = list(rows)
    return math.fsum(row.predicted for row in rows), math.fsum(row.measured for row in rows)


def _factor(row: Quantity) -> float:
    """Return the distance of a ratio from 1, on a scale where 2 and 1/2 are equally far."""
    if row.predicted == row.measured:
        return 0.0
    return abs(math.log(row.measured / row.predicted)) if min(row.predicted, row.measured) > 0 else math.inf


def _line(row: Quantity, indent: str) -> str:
    if row.what == "bubble_fraction":
        return f"{indent + row.name:<22}{100 * row.predicted:>12.1f}{100 * row.measured:>12.1f}"
    return f"{indent + row.name:<22}{row.predicted:>12.6g}{row.measured:>12.6g}{_ratio(row.ratio):>8}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
