"""Validate the `terapipe` section of a DeepSpeed config.

It is plain pydantic, strict: DeepSpeed's own base class for config sections imports torch and drops the value "auto".
Misspelt keys are refused by `unknown_keys`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from terapipe_ds.config.combinations import (
    INTERVAL,
    compile_problems,
    link_problems,
    problem_of_reentry,
    recompute_problems,
    schedule_problems,
)
from terapipe_ds.config.conflicts import conflicting_keys, problem_of_auto, problem_of_quotes
from terapipe_ds.config.strategy_file import contradictions, read_strategy, section_of
from terapipe_ds.config.unknown_keys import models_of, problems_of, refuse_misspelt_section, take_known, unknown_key
from terapipe_ds.config.values import (
    SECTION,
    TIMEOUT_FORM,
    Bounds,
    CheckpointsConfig,
    Folder,
    Index,
    Indices,
    Int64,
    Lengths,
    LengthsOfEach,
    LinksConfig,
    NonEmpty,
    PlannerConfig,
    Positive,
    Recompute,
    ScheduleName,
    StrategyFile,
    StrictModel,
    TeraPipeConfigError,
    Timeout,
    lists_to_tuples,
    shown_value,
    tuples_to_lists,
)
from terapipe_ds.files.user_json import value_at
from terapipe_ds.messages import show_value
from terapipe_ds.plan import PlanError, SlicePlan, coarsened
from terapipe_ds.schedule import SCHEDULE_NAMES
from terapipe_ds.strategy import Strategy


class TeraPipeConfig(StrictModel):
    """Hold the section; its keys are attributes. Build it with `from_deepspeed`.

    It raises TeraPipeConfigError with all mistakes at once, also when called with keywords.
    """

    enabled: bool = Field(False, description="true or false")
    schedule: ScheduleName = Field(
        "seq1f1b", description=f"one of {', '.join(SCHEDULE_NAMES)}, or auto, or a path that ends in .csv"
    )
    chunks_per_stage: Positive = Field(1, description="an integer >= 1: the parts that each stage holds")
    partition: Annotated[Bounds | None, BeforeValidator(lists_to_tuples)] = Field(
        None,
        description="null, or a list of two or more rising integers that begins with 0: the first layer of each part, "
        "and the number of layers",
    )
    recompute: Annotated[Recompute, BeforeValidator(lists_to_tuples)] = Field(
        None, description='null, "off", "full", "auto", or a list of different stage ids >= 0 with at least one entry'
    )
    keep_attention: bool = Field(False, description="true or false")
    offload_activations: bool = Field(False, description="true or false")
    strategy: StrategyFile | None = Field(None, description="null, or a path that ends in .json")
    schedule_options: dict[str, str | int | None] = Field(
        {},
        description='an object: for dapple {"policy": "A"} or "B", for seq1f1b-interleaved-zb and zbv '
        '{"max_live_slices": N}, null or "default", for others {}',
    )
    slices: Annotated[Literal["auto"] | Positive | Lengths | LengthsOfEach, BeforeValidator(lists_to_tuples)] = Field(
        "auto",
        description='"auto", a number of equal slices >= 1, or a list of slice lengths in tokens, each >= 1, or one '
        "such list for each micro-batch of a step, all with the same sum",
    )
    sequence_dim: Index = Field(1, description="an integer >= 0, counted from the front")
    sliced_inputs: Annotated[Indices | None, BeforeValidator(lists_to_tuples)] = Field(
        None, description="null, or a list of different integers >= 0 with at least one entry"
    )
    documents: Index | NonEmpty = Field(
        "off", description='"off", an index of a tuple of inputs >= 0, or the name of an entry of a dict of inputs'
    )
    granularity_tokens: Positive = Field(64, description="an integer >= 1")
    loss_reduction: Literal["mean_valid", "mean", "sum", "mean_of_step"] = Field(
        "mean_valid", description="one of mean_valid, mean, sum, mean_of_step"
    )
    ignore_index: Int64 = Field(-100, description="a 64-bit integer")
    planner: PlannerConfig = Field(
        PlannerConfig(), description=f"an object with the keys {', '.join(PlannerConfig.model_fields)}"
    )
    checkpoints: CheckpointsConfig = Field(
        CheckpointsConfig(), description=f"an object with the keys {', '.join(CheckpointsConfig.model_fields)}"
    )
    links: LinksConfig = Field(
        LinksConfig(), description=f"an object with the keys {', '.join(LinksConfig.model_fields)}"
    )
    verify: Literal["off", "first_batch"] | None = Field(
        None, description='"off" or "first_batch", or null: "first_batch" where a layer or loss_fn is your own'
    )
    attention: Literal["intercept", "explicit"] = Field("intercept", description='"intercept" or "explicit"')
    compile: bool = Field(False, description="true or false")
    check_finite: Literal["off", "every_step"] = Field("off", description='"off" or "every_step"')
    stall_timeout_s: Timeout = Field(300.0, description=TIMEOUT_FORM)
    data_timeout_s: Timeout = Field(1800.0, description=TIMEOUT_FORM)
    trace_dir: Folder | None = Field(None, description="the path of a directory, or null")
    peak_tflops: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="a number > 0, the dense peak of one device in 10^12 FLOP/s, or null"
    )
    _strategy: Strategy | None = PrivateAttr(None)
    _multiple: int = PrivateAttr(1)  # of the lengths of slices

    def __init__(self, /, **section: Any) -> None:
        problems: dict[tuple[Any, ...], str] = {}  # by the path of the key
        models = models_of(type(self))
        known = take_known(section, models, problems)
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems |= problems_of(error, section, models)
        wrong = {key for key, *_ in problems}
        if wrong:  # the other keys may exclude one another; wrong ones count as their defaults
            super().__init__(**{key: value for key, value in known.items() if key not in wrong})
        lines = [*problems.values(), *link_problems(self.links)]
        if self.enabled and not wrong & {"schedule", "schedule_options", "chunks_per_stage", "slices"}:
            lines += [*schedule_problems(self), *compile_problems(self)]
            lines += () if "planner" in wrong else recompute_problems(self)
        if lines:
            raise TeraPipeConfigError(*lines)

    @classmethod
    def from_deepspeed(cls, ds_config: dict[str, Any]) -> TeraPipeConfig:
        """Return the section of a DeepSpeed config; it is disabled where the config has none.

        Raise TeraPipeConfigError with all mistakes of the section, and of keys that exclude it where it is enabled.
        """
        if not isinstance(ds_config, dict):
            raise TeraPipeConfigError(f"the DeepSpeed config is {show_value(ds_config)}: give it as a dict")
        refuse_misspelt_section(ds_config)
        section = ds_config.get(SECTION, {})
        if not isinstance(section, dict):
            fix = "give an object, for example {} or remove the key"
            raise TeraPipeConfigError(f"{SECTION} = {show_value(section)}: {fix}")
        words = {key: value for key, value in section.items() if isinstance(key, str)}
        problems = [unknown_key((key,), value, models_of(cls)) for key, value in section.items() if key not in words]
        try:
            config = cls(**words)
        except TeraPipeConfigError as error:
            problems += error.problems
        if section.get("enabled") is True:
            problems += filter(None, (problem_of_auto(ds_config), problem_of_quotes(ds_config)))
            problems += conflicting_keys(ds_config)
            if section.get("keep_attention") is True and value_at(ds_config, "pipeline.use_reentrant") is False:
                problems.append(problem_of_reentry("pipeline.use_reentrant = false"))
            steps = ds_config.get("gradient_accumulation_steps")
            if not problems and type(steps) is int and (problem := config.problem_of_count(steps)):
                problems.append(problem)
        elif not problems and config.documents != "off":
            fix = f'set {SECTION}.enabled to true, or documents to "off"'
            problems.append(
                f"{shown_value(config.documents, 'documents')}: DeepSpeed's own engine mixes documents; {fix}"
            )
        if problems:
            raise TeraPipeConfigError(*problems)
        return config.with_strategy(ds_config) if config.enabled and config.strategy is not None else config

    def with_strategy(self, ds_config: Mapping[str, Any]) -> TeraPipeConfig:
        """Return the config with the values of the strategy's file. Raises TeraPipeConfigError, as `from_deepspeed`."""
        section, shown = self.model_dump(exclude_unset=True), shown_value(self.strategy, "strategy")
        try:
            strategy = read_strategy(str(self.strategy))
        except ValueError as error:
            raise TeraPipeConfigError(f"{shown}: {error}") from None
        if differing := list(contradictions(strategy, section, ds_config)):
            raise TeraPipeConfigError(*(f"{shown}: {line}" for line in differing))
        config = TeraPipeConfig(**section | section_of(strategy))
        config._strategy = strategy
        return config

    @property
    def planned(self) -> Strategy | None:
        """Return the strategy that the config names; None where it names none."""
        return self._strategy

    def plan_for(self, sequence_length: int, micro_batch_id: int = 0, *, strict: bool = True) -> SlicePlan:
        """Return the plan for sequences of `sequence_length` tokens.

        Where `slices` has a list for each micro-batch, an evaluation's micro-batches take the lists in turns. Raise
        TeraPipeConfigError where `slices` does not fit, or with `strict` `granularity_tokens`; without it a short
        sequence has as many slices as fit. Raise PlanError for a length that is no integer >= 1.
        """
        whole = SlicePlan.equal(sequence_length, 1)
        if self.slices == 1:  # nothing is cut
            return whole
        if self.slices == "auto":
            raise TeraPipeConfigError(
                'terapipe.slices = "auto": planned from measured costs while training runs; for a plan without them '
                "give a number of equal slices, for example 8, or a list of lengths such as [512, 384, 128]"
            )
        if self.listed_slices:
            lengths = self.listed_slices[micro_batch_id % len(self.listed_slices)]
            if (total := sum(lengths)) != sequence_length:
                raise TeraPipeConfigError(self._problem_of_sum(lengths, total, sequence_length))
            return SlicePlan(lengths)
        if strict:
            self.check_length(sequence_length)
        granularity, number = self.granularity_for(sequence_length), self.slices
        assert isinstance(number, int)
        return SlicePlan.equal(sequence_length, min(number, -(-sequence_length // granularity)), granularity)

    def plans_for(self, sequence_length: int, num_micro_batches: int, *, strict: bool = True) -> tuple[SlicePlan, ...]:
        """Return the plan of each micro-batch; raise as `plan_for`, or where `slices` lists another number of plans."""
        if problem := self.problem_of_count(num_micro_batches):
            raise TeraPipeConfigError(problem)
        return tuple(self.plan_for(sequence_length, m, strict=strict) for m in range(num_micro_batches))

    def _problem_of_sum(self, lengths: Sequence[int], total: int, sequence_length: int) -> str:
        problem = f"adds up to {total} tokens, but a sequence has {sequence_length}"
        fix = "give lengths that add up to that, or a number of equal slices"
        shown = shown_value(tuples_to_lists(self.slices), "slices")
        if self.has_plan_of_each:
            problem = problem.replace("adds", "each list adds", 1)
        if self.strategy is not None:
            shown = f"{shown_value(self.strategy, 'strategy')}: its plan {list(lengths)}"
            fix = f"train on sequences of {total} tokens, or plan again for {sequence_length}"
        return f"{shown} {problem}: {fix}"

    @property
    def listed_slices(self) -> tuple[tuple[int, ...], ...]:
        """Return the lists of lengths that `slices` has: one per micro-batch, or one for all; () for a number."""
        if not isinstance(self.slices, tuple):
            return ()
        return tuple(each for each in (self.slices if self.has_plan_of_each else (self.slices,)) if each)  # type: ignore[misc]

    @property
    def has_plan_of_each(self) -> bool:
        """Return whether `slices` has a list for each micro-batch of a step."""
        return isinstance(self.slices, tuple) and isinstance(self.slices[0], tuple)

    def problem_of_count(self, num_micro_batches: int) -> str | None:
        """Return why the config cannot cut steps of `num_micro_batches`; None where it can."""
        count = len(self.listed_slices)
        if not self.has_plan_of_each or count == num_micro_batches:
            return None
        return (
            f"{shown_value(tuples_to_lists(self.slices), 'slices')}: {count} list{'s' * (count > 1)} for "
            f"{num_micro_batches} micro-batches (gradient_accumulation_steps); give one list for each, or one for all, "
            "as [512, 384, 128]"
        )

    def granularity_for(self, sequence_length: int) -> int:
        """Return the tokens at whose multiples slices of such sequences end; at most the length of the sequence.

        Where the config does not set `granularity_tokens`, the default is halved until the number of slices fits.
        Listed slices may be shorter: the costs of all of them count.
        """
        granularity = math.lcm(self.granularity_tokens, self._multiple)
        if self.listed_slices:
            return min(granularity, sequence_length, *map(min, self.listed_slices))
        if "granularity_tokens" in self.model_fields_set:
            return min(granularity, sequence_length)
        fewest = self.slices if isinstance(self.slices, int) else 1
        while -(-sequence_length // granularity) < fewest and granularity % (2 * self._multiple) == 0:
            granularity //= 2
        return min(granularity, sequence_length)

    def searched_granularity(self, sequence_length: int) -> int:
        """Return the granularity for a search of slices: a default grows with the sequence."""
        granularity = self.granularity_for(sequence_length)
        is_given = self.slices != "auto" or "granularity_tokens" in self.model_fields_set
        return granularity if is_given else coarsened(granularity, sequence_length)

    def with_multiple(self, multiple: int) -> TeraPipeConfig:
        """Return the config for layers whose slices must be multiples of `multiple` tokens; listed slices stay."""
        config = self.model_copy()
        config._multiple = multiple  # noqa: SLF001 (of a copy of itself)
        return config

    def check_length(self, sequence_length: int) -> None:
        """Raise TeraPipeConfigError where such sequences are too short for the granule or the slices of the config."""
        if self.slices == 1 or self.listed_slices:
            return
        granularity = math.lcm(self.granularity_tokens, self._multiple)
        if "granularity_tokens" in self.model_fields_set and granularity > sequence_length:
            problem = f"larger than a sequence of {sequence_length} tokens"
            fix = f"give at most {sequence_length}, or longer sequences"
            raise TeraPipeConfigError(f"{shown_value(granularity, 'granularity_tokens')}: {problem}; {fix}")
        if isinstance(self.slices, int):
            try:
                SlicePlan.equal(sequence_length, self.slices, self.granularity_for(sequence_length))
            except PlanError as error:
                raise TeraPipeConfigError(f"{shown_value(self.slices, 'slices')}: {error}") from None

    @property
    def is_stock_order(self) -> bool:
        """Return whether this is `"slices": 1, "schedule": "1f1b"`, DeepSpeed's own order, which takes any batch."""
        return self.slices == 1 and self.schedule == "1f1b" and self.chunks_per_stage == 1

    @property
    def needs_costs(self) -> bool:
        """Return whether the planner needs costs, for slices, schedule or recomputed layers."""
        return "auto" in (self.slices, self.schedule, self.recompute)

    @property
    def is_one_slice(self) -> bool:
        """Return whether each sequence is one slice, in any order; False with "auto", which tries several."""
        return self.slices == 1 or bool(self.listed_slices and all(len(each) == 1 for each in self.listed_slices))

    def recomputing_stages(
        self, num_stages: int, ds_config: Mapping[str, Any] | None = None, own: int = 0, *, stands_for_all: bool = False
    ) -> frozenset[int] | None:
        """Return the stages that recompute each layer in its backward; None where the config leaves it to the module.

        With "auto" none does until the planner has chosen its layers. A stage that `stands_for_all` recomputes if some
        stage may. Raise TeraPipeConfigError for stages beyond `num_stages`, and where an interval of activation
        checkpointing says otherwise: the module's `own`, or the one in `ds_config`.
        """
        stages = self.recompute if isinstance(self.recompute, tuple) else ()
        if self.recompute is None:
            return None
        beyond = [] if stands_for_all else [stage_id for stage_id in stages if stage_id >= num_stages]
        if beyond:
            last = f"the pipeline has {num_stages} stages, the last is {num_stages - 1}"
            raise TeraPipeConfigError(f"{shown_value(list(stages), 'recompute')}: {last}; leave out {beyond}")
        # it is no error to set the same interval twice; if the number of stages is unknown, stages 0, 1, ... may be all
        number = len(stages) if stands_for_all else num_stages
        is_full = self.recompute == "full" or (stages and {*stages} == {*range(number)})
        intervals = {"the module": own, "the DeepSpeed section `pipeline`": value_at(ds_config or {}, INTERVAL)}
        for where, interval in intervals.items():
            if interval and not (interval == 1 and is_full):
                raise TeraPipeConfigError(
                    f"terapipe.recompute = {tuples_to_lists(self.recompute)!r}: {where} has "
                    f"activation_checkpoint_interval = {interval}, which says otherwise; leave one of the two out"
                )
        is_any = self.recompute != "off" if stands_for_all else self.recompute == "full"
        return frozenset(range(num_stages) if is_any else stages)

    def options_of(self, schedule: str) -> dict[str, Any]:
        """Return the options of this schedule for `schedule.build`: none, unless it is the schedule of the config."""
        return dict(self.schedule_options) if schedule == self.schedule else {}

    def fingerprint(self) -> str:
        """Return 16 hex digits; two configs share them exactly when every key has the same value."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
