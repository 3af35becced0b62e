"""Choose the plan and the schedule of a batch: set by hand, planned from measured costs, or as configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terapipe_ds import __version__
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.plan import PlanError, SlicePlan
from terapipe_ds.planner import ranked_schedules
from terapipe_ds.planner.result import PREFERENCE
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.source import DrawnMicroBatch
from terapipe_ds.runtime.layout.layout import placement_of
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.planning.auto_planner import AutoPlanner, Choice
from terapipe_ds.runtime.planning.recompute_choice import recompute_for
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.refusals import problem_of_lengths, shortest_slice
from terapipe_ds.schedule import Schedule, ScheduleError, build, build_forwards, fits, load, validate

logger = logging.getLogger("terapipe_ds")

_SCHEDULES_KEPT = 64  # one for each combination of slice counts over the micro-batches; the oldest goes first


class Plans:
    """Keep the plans and schedules of one engine, per sequence length; `note` is told what a measurement does."""

    def __init__(self, stage: StageToPlan, wires: Wires, note: Callable[[str], None]) -> None:
        self._layout, self._config = stage.layout, stage.config
        self._token_multiple, self._is_first_rank = stage.token_multiple, stage.engine.global_rank == 0
        self._shortest = shortest_slice(stage.engine.module)
        self._module = stage.engine.module
        plans_itself = "auto" in (self._config.slices, self._config.schedule, self._config.recompute)
        self._planner = AutoPlanner(stage, wires, note) if plans_itself else None
        self._by_hand: dict[int, Choice] = {}
        self._configured: dict[int, SlicePlan] = {}
        self._ran: dict[int, Choice] = {}
        self._resumed: tuple[str, dict[str, Any], Any] = ("", {}, None)
        self._schedules: dict[tuple[str, bool, tuple[int, ...]], Schedule] = {}

    def plan(self, length: int) -> SlicePlan:
        """Return the slices of a sequence of `length` tokens.

        Raises:
            ValueError: the config does not fit that length; or it leaves the plan to the planner, and no batch with
                such sequences has come yet.
        """
        if length in self._by_hand:
            return self._by_hand[length].plan
        if self._planner is not None:
            choice = self._planner.known(length)
            if choice is None:
                raise ValueError(f"slices of {length} tokens are planned when the first such batch comes")
            return choice.plan.joined(self._shortest)
        if length not in self._configured:
            self._configured[length] = self._config.plan_for(length).joined(self._shortest)
            if self._is_first_rank:
                logger.info("slice plan for %d tokens: %s", length, list(self._configured[length].lengths))
        return self._configured[length]

    def cuts(self, length: int) -> bool:
        """Return whether sequences of `length` tokens are to be cut, as far as that is known before they have come."""
        by_hand = self._by_hand.get(length)
        return not self._config.is_one_slice if by_hand is None else by_hand.plan.num_slices > 1

    @property
    def cut_by_hand(self) -> bool:
        """Return whether sequences of any length are cut in slices that were set by hand."""
        return any(choice.plan.num_slices > 1 for choice in self._by_hand.values())

    def use(self, plan: SlicePlan, schedule: str | None) -> str:
        """Take `plan` for its sequence length from now on. Return what the ranks must have alike.

        A schedule that wants the layers at other places is refused: they stay where they are.
        """
        problem = problem_of_lengths("use_slice_plan", plan.lengths, self._token_multiple, self._shortest)
        if problem is not None:
            raise PlanError(problem)
        layout, schedule = self._layout, schedule or self._config.schedule
        if schedule == "auto":  # the first choice among the schedules that run on this layout
            shape = layout.num_stages, layout.chunks_per_stage, layout.num_parts
            schedule = min(ranked_schedules(*shape, placement=layout.placement), key=PREFERENCE.index)
        try:
            wanted = placement_of(schedule, layout.num_stages, layout.chunks_per_stage)
        except ScheduleError as error:
            raise PlanError(f"use_slice_plan: schedule {schedule!r}: {error.reason}") from None
        if wanted != layout.placement:
            raise PlanError(
                f"use_slice_plan: schedule {schedule!r} wants the layers at other places than they are; set "
                "terapipe.schedule and chunks_per_stage before the engine is built"
            )
        self._by_hand[plan.sequence_length] = Choice(plan, schedule)
        return repr(sorted((length, one.plan.lengths, one.schedule) for length, one in self._by_hand.items()))

    def require(self, lengths: Sequence[int], training: bool) -> None:
        """Raise an error of the config where it has no slices or no schedule for micro-batches of these lengths.

        For the stage that knows the loss, before the ranks agree on the batch: other replicas may have other lengths.
        """
        if self._planner is None:
            num_slices = tuple(self.plan(length).num_slices for length in lengths)
            self.schedule(self._schedule_for(max(lengths)), training, num_slices)

    def for_batch(
        self, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]
    ) -> tuple[str, list[SlicePlan]]:
        """Return the schedule of the longest micro-batch, and a plan for each micro-batch. A collective."""
        if self._planner is not None:
            self._planner.choose_all(drawn, shapes, besides=self._by_hand)
        plans = [self.plan(shape.length) for shape in shapes]
        name = self._schedule_for(max(shape.length for shape in shapes))
        choices = [Choice(plan, name, self._recompute_for(plan.sequence_length)) for plan in plans]
        for choice in choices:
            self._note_run(choice)
        if self._config.recompute == "auto":
            recompute_for(self._module, choices)
        return name, plans

    def _recompute_for(self, length: int) -> frozenset[int] | None:
        choice = self._by_hand.get(length) or (self._planner and self._planner.known(length))
        return choice.recompute if choice else None

    def _schedule_for(self, length: int) -> str:
        choice = self._by_hand.get(length) or (self._planner and self._planner.known(length))
        return choice.schedule if choice else self._config.schedule

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return, for a checkpoint, what ran last for each length, the config, and what the plans came from."""
        config = self._config.model_dump(mode="json", include={"schedule", "schedule_options", "slices"})
        return {
            "terapipe_ds": __version__,
            "config": config,
            "plans": {str(length): choice.described() for length, choice in sorted(self._ran.items())},
            "profile": self._profile,
        }

    def resume(self, tag: str, described: Mapping[str, Any]) -> None:
        """Log at the first batch of each length whether it runs in another way than in the loaded checkpoint."""
        plans = described.get("plans")
        self._resumed = (tag, dict(plans) if isinstance(plans, Mapping) else {}, described.get("profile"))

    @property
    def _profile(self) -> str | None:
        return None if self._planner is None else self._planner.profile_fingerprint

    def _note_run(self, choice: Choice) -> None:
        length = choice.plan.sequence_length
        self._ran[length] = choice
        tag, plans, profile = self._resumed
        before, now = plans.pop(str(length), None), choice.described()
        if not isinstance(before, dict) or before == now or not self._is_first_rank:
            return
        sources = "" if self._profile == profile else f" (profile {profile or 'none'}, now {self._profile or 'none'})"
        logger.info(
            f"resumed from {tag} under another plan for {length} tokens: slices {before.get('slices')} by "
            f"{before.get('schedule')} before, {now['slices']} by {choice.schedule} now{sources}; results are the same "
            "up to rounding"
        )

    def schedule(self, name: str, training: bool, num_slices: tuple[int, ...]) -> Schedule:
        """Return the schedule for micro-batches of `num_slices` slices, proven to run."""
        key = name, training, num_slices
        if key not in self._schedules:
            self._schedules[key] = self._built(*key)
            if len(self._schedules) > _SCHEDULES_KEPT:
                del self._schedules[next(iter(self._schedules))]
        return self._schedules[key]

    def _built(self, name: str, training: bool, num_slices: tuple[int, ...]) -> Schedule:
        stages, chunks = self._layout.num_stages, self._layout.chunks_per_stage
        if not name.endswith(".csv"):
            options = self._config.options_of(name)
            schedule = build(
                name, stages, len(num_slices), num_slices, forward_only=not training, chunks_per_stage=chunks, **options
            )
        elif training:
            schedule = load(name)
            problem = fits(schedule, stages, num_slices) or self._layout.problem_of(schedule)
            if problem is not None:
                raise TeraPipeConfigError(f"terapipe.schedule = {name!r}: {problem}")
        else:
            schedule = build_forwards(name, dict(self._layout.placement), num_slices)
        validate(schedule)
        return schedule
