"""Measure costs and plan from them: rank 0 decides (`choose_plan`), and every rank gets its choice or its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.costs.profile import Profile
from terapipe_ds.messages import bytes_of_gb, logger
from terapipe_ds.planner import describe
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.runtime.agreement import largest
from terapipe_ds.runtime.layers.activation_checkpointing import recompute_layers
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.runtime.planning.choice import Choice, ChoiceKey
from terapipe_ds.runtime.planning.choose_plan import WORTH_CHANGING, best_with_recompute, best_without_moving
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.profiling.memory_peak import bytes_outside_allocator
from terapipe_ds.runtime.profiling.profiles import DrawnBatch, Profiles
from terapipe_ds.schedule import build
from terapipe_ds.schedule.show import many
from terapipe_ds.simulator import simulate


def warn_of_unread(config: TeraPipeConfig) -> None:
    """Log the keys of the planner that have no effect because the config leaves nothing to it."""
    given = {"memory_limit_gb": config.planner.memory_limit_gb is not None,
             "profile": config.planner.profile != "measure"}  # fmt: skip
    for key in [key for key, is_given in given.items() if is_given and not config.needs_costs]:
        why = "has no effect, because schedule, slices and recompute are given"
        logger.warning('terapipe.planner.%s %s; set one of them to "auto", or remove the key', key, why)


class AutoPlanner:
    """Choose the plan, and with "auto" the schedule, for one sequence length after the other.

    `note` gets a text about the current work, so that a long measurement does not look like a stall.
    """

    def __init__(self, stage: StageToPlan, wires: Wires, note: Callable[[str], None]) -> None:
        self._stage, self._note, self.profiles = stage, note, Profiles(stage, wires, note)
        self._engine, self._groups, self._config = stage.engine, stage.groups, stage.config
        self._longest: dict[tuple[int, bool], int] = {}  # length that the log has reported, in training and not

    def longest(self, lengths: Iterable[int]) -> int:
        """Return the longest of the lengths of all pipelines; 0 if none has any. A collective."""
        # the stages of a pipeline know the same lengths
        return int(largest(max(lengths, default=0), self._groups.everyone))

    def rounded(self, length: int) -> int:
        """Return a multiple of the granularity: lengths with the same one may share a plan.

        It is the nearest one, so that a last slice differs little from the planned one. It is the next one above where
        more tokens than planned would change the memory that a limit allows, or a given number of slices. Listed slices
        fit one length alone.
        """
        config = self._config
        granule = config.searched_granularity(length)
        if config.listed_slices or granule > length:
            return length
        above = -(-length // granule) * granule
        return above if self.is_exact else max((length + granule // 2) // granule * granule, granule)

    @property
    def is_exact(self) -> bool:
        """Return whether a plan may not have more tokens than it was planned for."""
        return self._config.planner.memory_limit_gb is not None or self._config.slices != "auto"

    def misjudged(self, choices: Mapping[ChoiceKey, Choice]) -> list[ChoiceKey]:
        """Return the choices to make again, once the engine's own time is known. A collective.

        These are the choices whose slices are so short that this time adds 1 % to the prediction.
        """
        own_s = self.profiles.add_own_time()
        return [
            key
            for key, choice in choices.items()
            if choice.predicted is not None
            and own_s * self._engine.micro_batches * choice.plan_of(0).num_slices
            > WORTH_CHANGING * choice.predicted.predicted_s
        ]

    def choose(self, length: int, drawn: DrawnBatch, before: Choice | None = None) -> Choice:
        """Measure costs that are not known yet, and plan sequences of `length` tokens. A collective.

        The log names the plan and the alternatives. One line does for a length below an earlier one, since batches
        may bring hundreds of lengths, and for a choice `before` that is still the best.
        """
        if self._config.recompute == "auto":  # measure layers without recompute
            recompute_layers(self._engine.module, ())
        ask = self.profiles.from_rank_0
        profile = self.profiles.get(length, drawn)
        self._note("the search for the best slices")
        choice, log = ask(lambda: self._plan(length, profile))
        kind = self._engine.micro_batches, self._engine.module.training
        self._longest[kind] = max(self._longest.get(kind, 0), length)
        if choice.predicted is not None and (choice == before or length < self._longest[kind]):
            again = "" if before is None else " again with that time"
            stays = f"{choice.schedule}, slices {choice.described()['slices']}"
            stays = "slices and schedule stay" if choice == before else stays
            log = f"planned {length} tokens{again}: {stays}, predicted {choice.predicted.predicted_s:.4g} s"
        if self._engine.global_rank == 0:
            logger.info("%s", log)
        return choice

    def _plan(self, length: int, profile: Profile) -> tuple[Choice, str]:
        engine, layout, config = self._engine, self._stage.layout, self._config
        limit_gb, is_measured = config.planner.memory_limit_gb, config.planner.profile == "measure"
        parts = MeasuredParts.of_profile(profile, of_this_run=is_measured)
        if limit_gb is not None and not parts.has_memory:
            raise TeraPipeConfigError(
                f"terapipe.planner.memory_limit_gb = {limit_gb}: memory was not measured, the profile is from a file "
                'or a profiler runs; set terapipe.planner.profile to "measure", start the profiler after the first '
                "batch, or remove the limit"
            )
        is_free = layout.bounds is None  # a partition in the config stays
        # all stages have about as much: rank 0 plans for them
        outside, offloads = bytes_outside_allocator(), config.offload_activations
        cuts = parts.running(
            engine.module.parts, length, has_other_cuts=is_free, offloads=offloads, process_bytes=outside
        )
        limit_bytes = None if limit_gb is None else bytes_of_gb(limit_gb)
        costs, more = cuts.cut(layout.num_parts), list[str]()

        def progress(schedule: str, done: int, of: int) -> None:
            # each step is an action for the watch-dog: with many stages a search takes minutes
            self._note(f"the search for the best slices of {schedule}")

        if config.recompute == "auto":
            result, costs = best_with_recompute(self._stage, cuts, length, limit_bytes, progress)
        else:
            result, more = best_without_moving(self._stage, cuts, length, limit_bytes, progress)
        of_what = f"{many(engine.num_stages, 'stage')} and {many(engine.micro_batches, 'micro-batch')}"
        lines = [f"planned {length} tokens for {of_what}:"]
        lines += [*describe(result, schedule_chosen=config.schedule == "auto", limit_gb=limit_gb), *more]
        choice = Choice.of(result)
        if config.trace_dir is not None:
            self._write_prediction(choice, costs, Path(config.trace_dir))
        return choice, "\n  ".join(lines)

    def _write_prediction(self, choice: Choice, costs: Any, folder: Path) -> None:
        """Write the predicted step beside the traces of measured ones: `terapipe timeline --against` compares them."""
        number, chunks = self._engine.micro_batches, self._stage.layout.chunks_per_stage
        plans, options = [choice.plan_of(m) for m in range(number)], self._config.options_of(choice.schedule)
        counts = self._engine.num_stages, number, [plan.num_slices for plan in plans]
        timeline = simulate(build(choice.schedule, *counts, chunks_per_stage=chunks, **options), plans, costs)
        name = f"predicted-{choice.sequence_length}-tokens-{number}-micro-batches.json"
        with Diagnostic(f"terapipe.trace_dir: cannot write {folder / name}").attempt():
            folder.mkdir(parents=True, exist_ok=True)
            timeline.save(folder / name)
