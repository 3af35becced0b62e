"""Plan slices from measured costs, on all ranks alike.

This is a collective over all ranks: all measure in step, rank 0 reads or gathers the profile and plans, and every rank
gets the outcome, an error too.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.costs.profile import VERSION, Profile, ProfileKey
from terapipe_ds.files.atomic import check_writable
from terapipe_ds.planner import describe
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.planner.result import Prediction
from terapipe_ds.runtime.agreement import RaisedEverywhere, from_rank_0, gather
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.source import DrawnMicroBatch
from terapipe_ds.runtime.layers.activation_checkpointing import recompute_layers
from terapipe_ds.runtime.layout.parted_module import each_part
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.runtime.planning.apply_recompute import best_with_recompute
from terapipe_ds.runtime.planning.choice import Choice
from terapipe_ds.runtime.planning.kept_orders import KeptOrder
from terapipe_ds.runtime.planning.schedule_choice import best_without_moving
from terapipe_ds.runtime.profiling.all_parts import PartMeasured, StageToPlan, measure_parts
from terapipe_ds.runtime.profiling.cache import cache_path, combine, read_cache, write_cache
from terapipe_ds.runtime.profiling.key import describe_part, profile_key
from terapipe_ds.runtime.profiling.rounds import Peers
from terapipe_ds.schedule import SEARCH, build
from terapipe_ds.simulator import simulate
from terapipe_ds.version import __version__

T = TypeVar("T")
logger = logging.getLogger("terapipe_ds")


class AutoPlanner:
    """Choose the plan (and the schedule, where that is "auto") for each sequence length that comes.

    `note` is told what is going on, so that a long measurement does not look like a stall.
    """

    def __init__(self, stage: StageToPlan, wires: Wires, note: Callable[[str], None]) -> None:
        self._stage, self._wires, self._note = stage, wires, note
        self._engine, self._groups, self._config = stage.engine, stage.groups, stage.config
        self._profiles: dict[int, Profile] = {}  # by the size of a micro-batch
        self._choices: dict[tuple[int, int, int], Choice] = {}

    def known(self, length: int) -> Choice | None:
        """Return the choice for `length` tokens, if it was made for micro-batches of this number and size."""
        return self._choices.get(self._key(length))

    def _key(self, length: int) -> tuple[int, int, int]:
        """Return what a choice is made for; a program may change the last two between batches."""
        return length, self._engine.micro_batches, self._engine.train_micro_batch_size_per_gpu()

    @property
    def profile_fingerprint(self) -> str | None:
        """Return a checksum of the measurements that plans come from; None before there are any."""
        profile = self._profiles.get(self._engine.train_micro_batch_size_per_gpu())
        return None if profile is None else hashlib.sha256(profile.to_json().encode()).hexdigest()[:16]

    @property
    def orders_found(self) -> str:
        """Return checksums of the orders that were found; the same on all ranks."""
        return " ".join(sorted({choice.order_digest for choice in self._choices.values()} - {""}))

    def choose_all(
        self, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape], besides: Collection[int]
    ) -> None:
        """Plan each length in `shapes` that has no choice and is not in `besides`. A collective."""
        lengths = {shape.length for shape in shapes}.difference(besides)
        while length := self._longest_without_choice(lengths):
            self._choices[self._key(length)] = self._choose(length, drawn, shapes)

    def _longest_without_choice(self, lengths: Collection[int]) -> int:
        """Return the longest sequence of any pipeline that has no plan yet; 0 where all have."""
        longest = max((length for length in lengths if self.known(length) is None), default=0)
        return int(Peers(self._groups.everyone).largest(longest))  # the stages of a pipeline know the same shapes

    def _choose(self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]) -> Choice:
        if self._config.recompute == "auto":  # layers are measured as they are without
            recompute_layers(self._engine.module, ())
        self._from_rank_0(lambda: self._config.check_granularity(length))
        size = self._engine.train_micro_batch_size_per_gpu()
        profile = self._profiles.get(size)
        if profile is None or profile.key.sequence_length < length:
            profile = self._profiles[size] = self._profile_for(length, drawn, shapes)
        self._note("the search for the best slices")
        choice, log = self._from_rank_0(lambda: self._plan(length, profile))
        if self._engine.global_rank == 0:
            logger.info("%s", log)
        return choice

    # -- the profile -------------------------------------------------------------------------------------------------

    def _profile_for(self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]) -> Profile:
        key = key_of(self._stage, length, max(shape.rows for shape in shapes))
        planner = self._config.planner
        if planner.profile != "measure":
            granularity = self._config.granularity_for(length)
            return self._from_rank_0(lambda: _read_profile(planner.profile, key, granularity))
        path = None if planner.cache_dir is None else cache_path(planner.cache_dir, key, self._not_in_key(length))
        cached = self._from_rank_0(lambda: _cached(path, key))
        if cached is not None:
            return cached
        costs = self._measure(length, drawn, shapes)
        return self._from_rank_0(lambda: _combined(path, key, costs, self._engine.num_stages))

    def _measure(
        self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]
    ) -> list[PartMeasured]:
        from tqdm import tqdm

        is_first_rank = self._engine.global_rank == 0
        if is_first_rank:
            logger.info("measuring slices of sequences of %d tokens, to plan them", length)
        hidden = None if is_first_rank else True  # None: on a terminal
        with tqdm(total=100, desc="measuring slices", unit="%", disable=hidden, leave=False) as bar:

            def progress(share: float) -> None:
                self._note(f"measuring slices ({share:.0%} done)")
                bar.update(round(100 * share) - bar.n)

            longest = max(zip(drawn, shapes, strict=True), key=lambda pair: pair[1].length)
            own = measure_parts(self._stage, self._wires, *longest, length, progress)
        return [costs for rank in gather(own, self._groups.world) for costs in rank]

    def _not_in_key(self, length: int) -> dict[str, Any]:
        """Return what a cached profile depends on besides its key: its points, the loss, what the memory counts."""
        engine, loss_fn = self._engine, self._engine.module.loss_fn
        return {
            "granularity_tokens": self._config.granularity_for(length),
            "loss": "none" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__),
            "optimizer": [type(engine.optimizer).__qualname__, engine.optimizer_name()],
            "zero_stage": engine.zero_optimization_stage(),
            "data_parallel": engine.seq_dp_world_size,
            "stages": engine.num_stages,
            "contents": VERSION,  # grows when more is measured
            **({"compile": True} if self._config.compile else {}),
            **({} if self._config.links.is_exact else {"links": self._config.links.model_dump()}),
        }

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, length: int, profile: Profile) -> tuple[Choice, str]:
        engine, layout, config = self._engine, self._stage.layout, self._config
        limit_gb, parts = config.planner.memory_limit_gb, MeasuredParts.of_profile(profile)
        if limit_gb is not None and not parts.has_memory:
            raise TeraPipeConfigError(
                f"terapipe.planner.memory_limit_gb = {limit_gb}: memory was not measured, the profile is from a file "
                'or a profiler runs; set terapipe.planner.profile to "measure", start the profiler after the first '
                "batch, or remove the limit"
            )
        is_free = layout.bounds is None  # a partition of the config stays
        offloads = config.offload_activations
        cuts = parts.running(engine.module.parts, length, has_other_cuts=is_free, offloads=offloads)
        limit_bytes = None if limit_gb is None else limit_gb * 1e9
        head = f"planned {length} tokens for {engine.num_stages} stages and {engine.micro_batches} micro-batches:"
        kept = self._kept_order(length, profile, limit_bytes) if config.schedule == SEARCH else None
        known = None if kept is None else kept.read()
        costs, more = cuts.cut(layout.num_parts), list[str]()
        if known is not None and kept is not None:
            choice, lines = known
            lines = [*lines, f"          found before, kept in {kept.path}"]
        else:
            if config.recompute == "auto":
                result, costs = best_with_recompute(self._stage, cuts, length, limit_bytes)
            else:
                result, more = best_without_moving(self._stage, cuts, length, limit_bytes)
            lines = [*describe(result, schedule_chosen=config.schedule == "auto"), *more]
            choice = Choice.of(result)
            if kept is not None:
                kept.write(choice, [list(plan.lengths) for plan in result.plans], lines)
        return self._predicted(choice, costs), "\n  ".join([head, *lines])

    def _kept_order(self, length: int, profile: Profile, limit_bytes: float | None) -> KeptOrder | None:
        """Return where an order for this question is kept."""
        engine, layout, config = self._engine, self._stage.layout, self._config
        question = {
            "profile": hashlib.sha256(profile.to_json().encode()).hexdigest(),
            "tokens": length,
            "micro_batches": engine.micro_batches,
            "placement": sorted((*place, part) for place, part in layout.placement.items()),
            "partition": list(engine.module.parts),
            "slices": config.slices,
            "granularity_tokens": config.granularity_for(length),
            "limit_bytes": limit_bytes,
            "terapipe_ds": __version__,
        }
        return KeptOrder.of(config.planner.cache_dir, question)

    def _from_rank_0(self, ask: Callable[[], T]) -> T:
        """Return what rank 0 gets from `ask` within a batch, on every rank; all raise its errors."""
        try:
            return from_rank_0(ask, self._groups.world)
        except Exception as error:
            raise RaisedEverywhere(error) from None

    def _predicted(self, choice: Choice, costs: Any) -> Choice:
        """Return the choice with its predicted step, which is also written beside the traces of measured ones.

        `terapipe timeline --against` compares them.
        """
        if choice.predicted is not None and self._config.trace_dir is None:
            return choice
        number, chunks = self._engine.micro_batches, self._stage.layout.chunks_per_stage
        plans, schedule = [choice.plan_of(m) for m in range(number)], choice.order
        if schedule is None:
            options, slices = self._config.options_of(choice.schedule), [plan.num_slices for plan in plans]
            counts = self._engine.num_stages, number, slices
            schedule = build(choice.schedule, *counts, chunks_per_stage=chunks, **options)
        timeline = simulate(schedule, plans, costs)
        if self._config.trace_dir is not None:
            folder = Path(self._config.trace_dir)
            name = f"predicted-{choice.sequence_length}-tokens-{number}-micro-batches.json"
            with Diagnostic(f"terapipe.trace_dir: cannot write {folder / name}").attempt():
                folder.mkdir(parents=True, exist_ok=True)
                timeline.save(folder / name)
        return choice if choice.predicted else dataclasses.replace(choice, predicted=Prediction(timeline.makespan_s))


def require_profile(stage: StageToPlan) -> None:
    """Raise ProfileError on every rank where the config names the profile of something else. A collective."""
    config, path = stage.config, stage.config.planner.profile
    if config.needs_costs and path != "measure":
        key = key_of(stage, length=1, rows=1)
        ignore = ("sequence_length", "micro_batch")
        from_rank_0(lambda: _of_this_run(path, key, ignore=ignore), stage.groups.world)


def key_of(stage: StageToPlan, length: int, rows: int) -> ProfileKey:
    """Return what a profile must have been measured on. A collective over the stages, which know their own layers."""
    engine, module, placement = stage.engine, stage.engine.module, stage.layout.placement
    described = {int(placement[engine.stage_id, chunk_id]): describe_part(module) for chunk_id in each_part(module)}
    if stage.groups.control is not None:
        stages = gather(described, stage.groups.control)
        described = {part_id: layers for one in stages for part_id, layers in one.items()}
    device = torch.device(engine.device)
    with autocast_if_enabled(engine):
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return profile_key(
        [described[part_id] for part_id in sorted(described)],
        module=module,
        device=device,
        rows=rows,
        length=length,
        tensor_parallel=engine.grid.get_slice_parallel_world_size(),
        autocast=autocast,
        slice_length_multiple=stage.token_multiple,
    )


def _of_this_run(path: str, key: ProfileKey, ignore: Sequence[str] = ()) -> Profile:
    profile = Profile.load(path)
    # if layers were cut otherwise, the costs of parts are still the sums of their layers
    layers = profile.key.layers_fingerprint
    can_be_cut = layers is not None and layers == key.layers_fingerprint and profile.layers is not None
    profile.require(key, [*ignore, *(("model_fingerprint", "num_stages") if can_be_cut else ())])
    return profile


def _read_profile(path: str, key: ProfileKey, granularity: int) -> Profile:
    """Return the profile that the config names, without memory figures: these may be of another optimizer."""
    profile = _of_this_run(path, key)
    smallest = max(min(s.tokens for s in part.samples if s.prefix == 0) for part in profile.parts)
    if granularity < smallest:
        logger.warning(
            f"terapipe.planner.profile = {path}: slices of fewer than {smallest} tokens were not measured and count as "
            f"{smallest}, but plans are cut at multiples of {granularity}; measure again, or raise "
            "terapipe.granularity_tokens"
        )
    return _without_memory(profile)


def _without_memory(profile: Profile) -> Profile:
    parts = tuple(dataclasses.replace(part, memory=None) for part in profile.parts)
    layers = profile.layers
    if layers is not None:
        layers = dataclasses.replace(layers, kinds=tuple(dataclasses.replace(k, memory=None) for k in layers.kinds))
    return dataclasses.replace(profile, parts=parts, layers=layers)


def _cached(path: Path | None, key: ProfileKey) -> Profile | None:
    """Return the profile that is kept. Without one, refuse a folder that can keep none: nothing is measured yet.

    A disk that fails or is full may recover meanwhile. It is no mistake of the config.
    """
    profile = read_cache(path, key)
    if profile is None and path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise TeraPipeConfigError(
                    f"terapipe.planner.cache_dir: cannot write {path}: {error.strerror}; give a folder that rank 0 may "
                    "write, or null"
                ) from error
    return profile


def _combined(path: Path | None, key: ProfileKey, costs: Sequence[PartMeasured], num_stages: int) -> Profile:
    for warning in dict.fromkeys(cost.times.warning for cost in costs if cost.times.warning is not None):
        logger.warning("%s", warning)
    profile = combine(key, costs, num_stages)
    if path is not None:
        with Diagnostic(f"terapipe.planner.cache_dir: cannot write {path}").attempt():
            write_cache(path, profile)
    return profile
