"""Own the choice for each sequence length: slices that were set by hand, else planned from costs, else configured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import logger
from terapipe_ds.plan import PlanError, SlicePlan
from terapipe_ds.planner import ranked_schedules
from terapipe_ds.planner.result import PREFERENCE
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.source import DrawnMicroBatch
from terapipe_ds.runtime.layers.activation_checkpointing import recompute_layers
from terapipe_ds.runtime.layout.layout import placement_of
from terapipe_ds.runtime.layout.sequence_axis import problem_of_lengths, shortest_slice_on
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.planning.choice import Choice, ChoiceKey
from terapipe_ds.runtime.planning.measure_and_share import AutoPlanner
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.profiling.profiles import DrawnBatch
from terapipe_ds.schedule import SEARCH, Schedule, ScheduleError, build, build_forwards, fits, load, validate
from terapipe_ds.version import __version__

_SCHEDULES_KEPT = 64  # one for each combination of slice counts over the micro-batches


class Plans:
    """Choose the plans and the schedule of each batch of one engine; `note` gets a text about each measurement.

    A choice holds for a length and for micro-batches of one number and size, which a program may change between
    batches. Slices that were set by hand hold for micro-batches of any number and size.
    """

    def __init__(self, stage: StageToPlan, wires: Wires, note: Callable[[str], None]) -> None:
        self._layout, self._config, self._engine = stage.layout, stage.config, stage.engine
        self._token_multiple, self._is_first_rank = stage.token_multiple, stage.engine.global_rank == 0
        self._shortest = shortest_slice_on(stage.engine.module)
        self._planner = AutoPlanner(stage, wires, note) if self._config.needs_costs else None
        self._planned: dict[ChoiceKey, Choice] = {}  # the first around each multiple of the granularity
        self._choices: dict[ChoiceKey, Choice] = {}
        self._by_hand: dict[int, Choice] = {}
        self._ran: dict[int, Choice] = {}
        self._resumed: tuple[str, dict[str, Any], Any] = ("", {}, None)
        self.schedule = functools.lru_cache(_SCHEDULES_KEPT)(self._schedule)

    # -- choices -----------------------------------------------------------------------------------------------------

    def plan(self, length: int, micro_batch_id: int = 0) -> SlicePlan:
        """Return the slices of a sequence of `length` tokens.

        Raises:
            ValueError: the config does not fit that length; or it leaves the plan to the planner, and no batch with
                such sequences has come yet.
        """
        return self._choice(length).plan_of(micro_batch_id)

    def cuts(self, length: int) -> bool:
        """Return whether sequences of `length` tokens will be cut, as far as this is known before they have come."""
        by_hand = self._by_hand.get(length)
        return not self._config.is_one_slice if by_hand is None else by_hand.cuts

    @property
    def may_cut(self) -> bool:
        """Return whether the config or slices set by hand cut sequences, maybe of one length alone."""
        return not self._config.is_one_slice or any(choice.cuts for choice in self._by_hand.values())

    def _key(self, length: int) -> ChoiceKey:
        return length, self._engine.micro_batches, self._engine.train_micro_batch_size_per_gpu()

    def _known(self, length: int) -> Choice | None:
        return self._by_hand.get(length) or self._choices.get(self._key(length))

    def _choice(self, length: int) -> Choice:
        """Return the choice for sequences of `length` tokens; raise like `plan`."""
        choice = self._known(length)
        if choice is None and self._planner is not None:
            raise ValueError(f"slices of {length} tokens are planned when the first such batch comes; ask after it")
        if choice is None:
            count = len(self._config.listed_slices) or 1
            plans = self._config.plans_for(length, count, strict=False)
            plans = tuple(plan.joined(self._shortest) for plan in plans)
            choice = self._choices[self._key(length)] = Choice(plans, self._config.schedule)
            if self._is_first_rank:
                logger.info("slice plan for %d tokens: %s", length, choice.described()["slices"])
        return choice

    # -- choosing ----------------------------------------------------------------------------------------------------

    def use(self, plan: SlicePlan | Sequence[SlicePlan], schedule: str | None) -> str:
        """Use `plan` for its sequence length from now on. Return a text that must be equal on all ranks.

        This refuses a schedule that needs another layout of the layers: layers stay where they are.
        """
        # refuse slices that the layers cannot run
        plans = tuple(plan) if isinstance(plan, list | tuple) else (plan,)
        if not all(isinstance(one, SlicePlan) for one in plans):
            raise PlanError(f"use_slice_plan({plan!r}): give a SlicePlan, or one for each micro-batch")
        for one in plans:
            problem = problem_of_lengths("use_slice_plan", one.lengths, self._token_multiple, self._shortest)
            if problem is not None:
                raise PlanError(problem)
        count, lengths = self._engine.micro_batches, {plan.sequence_length for plan in plans}
        if len(plans) not in (1, count) or len(lengths) != 1:
            raise PlanError(
                f"use_slice_plan: {len(plans)} plans for sequences of {sorted(lengths)} tokens: give one plan, or one "
                f"for each of the {count} micro-batches of a step, all for one length"
            )
        if schedule == SEARCH:
            fix = "give a name, or the path of a CSV file, as `terapipe plan --schedule search --order FILE` writes it"
            raise PlanError(f"use_slice_plan: schedule {schedule!r} finds no order in the job; {fix}")
        # without a name take the schedule of the config, or the first choice among those that run on this layout
        layout, schedule = self._layout, schedule or self._config.schedule
        if schedule == "auto":
            shape = layout.num_stages, layout.chunks_per_stage, layout.num_parts
            schedule = min(ranked_schedules(*shape, placement=layout.placement), key=PREFERENCE.index)
        # layers stay where they are
        try:
            wanted = placement_of(schedule, layout.num_stages, layout.chunks_per_stage)
        except ScheduleError as error:
            raise PlanError(f"use_slice_plan: schedule {schedule!r}: {error.reason}") from None
        if wanted != layout.placement:
            raise PlanError(
                f"use_slice_plan: schedule {schedule!r} needs another layout of the layers; set "
                "terapipe.schedule and chunks_per_stage before the engine is built"
            )
        choice = Choice(plans, schedule)
        self._by_hand[choice.sequence_length] = choice
        return repr(sorted((length, str(one.described())) for length, one in self._by_hand.items()))

    def require(self, lengths: Sequence[int], training: bool) -> None:
        """Raise an error of the config if it has no slices or no schedule for micro-batches of these lengths.

        The stage that knows the loss calls this before the ranks agree on the batch: other replicas may have other
        lengths.
        """
        problem = self._config.problem_of_count(len(lengths)) if training else None
        if problem is not None and not self._by_hand.keys() >= set(lengths):
            raise TeraPipeConfigError(problem)
        if not (self._ran or self._by_hand or self._resumed[0]):  # later short sequences have as many slices as fit
            self._config.check_length(max(lengths))
        if self._planner is None:
            plans = [self.plan(length, m) for m, length in enumerate(lengths)]
            self.schedule(self._choice(max(lengths)).schedule, training, tuple(plan.num_slices for plan in plans))

    def for_batch(
        self, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]
    ) -> tuple[Choice, list[SlicePlan]]:
        """Return the choice for the longest micro-batch, and a plan for each micro-batch. A collective."""
        if self._planner is not None:
            self._plan_missing(self._planner, list(zip(drawn, shapes, strict=True)))
        plans = [self.plan(shape.length, m) for m, shape in enumerate(shapes)]
        # one schedule runs the whole batch: the schedule of its longest sequences
        how = self._choice(max(shape.length for shape in shapes))
        choices = [self._choice(length) for length in dict.fromkeys(shape.length for shape in shapes)]
        for choice in choices:
            self._note_run(replace(choice, schedule=how.schedule))
        if self._config.recompute == "auto":
            # all layers that any length needs, and with slices that were set by hand every layer: it takes less memory
            every = frozenset(range(len(self._engine.module._layer_specs)))
            chosen = (every if choice.recompute is None else choice.recompute for choice in choices)
            recompute_layers(self._engine.module, frozenset().union(*chosen))
        return how, plans

    def _plan_missing(self, planner: AutoPlanner, drawn: DrawnBatch) -> None:
        """Plan each length that has no choice yet, the longest first. A collective over all ranks.

        All ranks measure slices, rank 0 searches, and every rank gets its choice. Lengths around one multiple
        of the granularity share one search, because batches may bring thousands of lengths.
        """
        # plan again if slices are so short that the engine's own time counts
        before = {key: self._planned.pop(key) for key in planner.misjudged(self._planned)}
        for key in [key for key in self._choices if (planner.rounded(key[0]), *key[1:]) in before]:
            del self._choices[key]
        lengths = {shape.length for _, shape in drawn}
        while length := planner.longest(one for one in lengths if self._known(one) is None):
            key = self._key(planner.rounded(length))
            planned = self._planned.get(key)
            if planned is None or (planner.is_exact and planned.sequence_length < length):
                planned = self._planned[key] = planner.choose(length, drawn, before.get(key))
            self._choices[self._key(length)] = planned.of_length(length).joined(self._shortest)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return, for a checkpoint, the last choice for each length, the config, and the source of the plans."""
        config = self._config.model_dump(mode="json", include={"schedule", "schedule_options", "slices"})
        return {
            "terapipe_ds": __version__,
            "config": config,
            "plans": {str(length): choice.described() for length, choice in sorted(self._ran.items())},
            "profile": self._profile,
        }

    def resume(self, tag: str, described: Mapping[str, Any]) -> None:
        """Log at the first batch of each length whether its choice differs from the loaded checkpoint's."""
        plans = described.get("plans")
        self._resumed = (tag, dict(plans) if isinstance(plans, Mapping) else {}, described.get("profile"))

    @property
    def _profile(self) -> str | None:
        return None if self._planner is None else self._planner.profiles.fingerprint

    def _note_run(self, choice: Choice) -> None:
        length = choice.sequence_length
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

    # -- schedules ---------------------------------------------------------------------------------------------------

    def _schedule(self, name: str, training: bool, num_slices: tuple[int, ...]) -> Schedule:
        """Return the schedule for micro-batches of `num_slices` slices, proven to run.

        It holds a list of computations for each stage, such as F0.0, F0.1, B0.1, B0.0 (micro-batch, slice).
        """
        stages, chunks = self._layout.num_stages, self._layout.chunks_per_stage
        if not name.endswith(".csv"):
            options = self._config.options_of(name)
            schedule = build(
                name, stages, len(num_slices), num_slices, forward_only=not training, chunks_per_stage=chunks, **options
            )
        elif not training:
            schedule = build_forwards(name, dict(self._layout.placement), num_slices)
        else:
            schedule = load(name)
            problem = fits(schedule, stages, num_slices) or self._layout.problem_of(schedule)
            if problem is not None:
                raise TeraPipeConfigError(f"terapipe.schedule = {name!r}: {problem}")
        validate(schedule)
        return schedule
