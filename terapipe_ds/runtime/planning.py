"""Plan slices from measured costs, on all ranks alike.

Rank 0 reads or gathers the profile and plans; every rank gets the outcome, an error too. A collective over all ranks:
tensor-parallel peers and replicas measure in step and run the same plan.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.cost_model import CostModel
from terapipe_ds.cost_profile import Profile, ProfileKey
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlanResult, plan_slices
from terapipe_ds.planner.recut import MeasuredParts
from terapipe_ds.planner.report import describe
from terapipe_ds.runtime.agreement import RaisedEverywhere, from_rank_0, gather
from terapipe_ds.runtime.data import DrawnMicroBatch
from terapipe_ds.runtime.groups import PipelineGroups
from terapipe_ds.runtime.header import MicroBatchShape
from terapipe_ds.runtime.measuring import PartCosts, measure_parts
from terapipe_ds.runtime.parted import each_part
from terapipe_ds.runtime.profile_cache import Measured, cache_path, combine, read_cache, write_cache
from terapipe_ds.runtime.profile_key import describe_each_layer, describe_layers, profile_key
from terapipe_ds.runtime.schedule_choice import Cuts, best_where_layers_stand
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate

T = TypeVar("T")
logger = logging.getLogger("terapipe_ds")


@dataclass(frozen=True)
class Choice:
    """What runs for sequences of one length."""

    plan: SlicePlan
    schedule: str


class AutoPlanner:
    """Chooses the plan (and the schedule, where that is "auto") for each sequence length that comes.

    Args:
        engine: whose stages are measured; must know its module, its grid and its ``terapipe_config``.
        watched: told what is going on, so that a long measurement does not look like a stall.
    """

    def __init__(self, engine: Any, groups: PipelineGroups, watched: Callable[[str], None]) -> None:
        self._engine, self._groups, self._watched = engine, groups, watched
        self._config = engine.terapipe_config
        self._measured_by_size: dict[int, Measured] = {}  # by the size of a micro-batch
        self._choices: dict[tuple[int, int, int], Choice] = {}

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def known(self, length: int) -> Choice | None:
        """The choice for sequences of ``length`` tokens, if it was made for micro-batches of this number and size."""
        return self._choices.get(self._case(length))

    def _case(self, length: int) -> tuple[int, int, int]:
        """What a choice is made for; a program may change the last two between batches."""
        return length, self._engine.micro_batches, self._engine.train_micro_batch_size_per_gpu()

    @property
    def _measured(self) -> Measured | None:
        return self._measured_by_size.get(self._engine.train_micro_batch_size_per_gpu())

    @property
    def profile_fingerprint(self) -> str | None:
        """Of the measurements that plans come from; None before there are any."""
        if self._measured is None:
            return None
        return hashlib.sha256(self._measured.profile.to_json().encode()).hexdigest()[:16]

    def choose_all(
        self, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape], besides: Collection[int] = ()
    ) -> dict[int, Choice]:
        """The choice for each length in ``shapes`` but those in ``besides``; plans those that are new.

        A collective over all ranks.
        """
        lengths = {shape.length for shape in shapes}.difference(besides)
        wanted = self._wanted(lengths)
        while wanted:
            self._choices[self._case(wanted)] = self._choose(wanted, drawn, shapes)
            wanted = self._wanted(lengths)
        return {length: self._choices[self._case(length)] for length in lengths}

    def _wanted(self, lengths: Collection[int]) -> int:
        """The longest sequence of any pipeline that has no plan yet; 0 where all have."""
        wanted = max((length for length in lengths if self.known(length) is None), default=0)
        if self._groups.everyone is None:  # all stages of the one pipeline know the same shapes
            return wanted
        number = torch.tensor([wanted], dtype=torch.int64)
        torch_dist.all_reduce(number, op=torch_dist.ReduceOp.MAX, group=self._groups.everyone)
        return int(number)

    def _choose(self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]) -> Choice:
        try:
            self._config.check_granularity(length)
        except TeraPipeConfigError as error:
            raise RaisedEverywhere(error) from None
        known, size = self._measured, self._engine.train_micro_batch_size_per_gpu()
        if known is None or known.profile.key.sequence_length < length:
            self._measured_by_size[size] = self._measured_for(length, drawn, shapes)
        self._watched("the search for the best slices")
        outcome = self._from_rank_0(lambda: self._plan(length))
        if self._engine.global_rank == 0:
            logger.info("%s", outcome[1])
        return outcome[0]

    # -- the profile -------------------------------------------------------------------------------------------------

    def require_given(self) -> None:
        """Refuse the profile of something else that the config names, as far as is known before there is a batch.

        A collective over all ranks.

        Raises:
            ProfileError: on every rank.
        """
        path = self._config.planner.profile
        if path != "measure":
            key = self._key(length=1, rows=1)
            ignore = ("sequence_length", "micro_batch")
            from_rank_0(lambda: _of_this_run(path, key, ignore=ignore), self._groups.world)

    def _measured_for(
        self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]
    ) -> Measured:
        key = self._key(length, max(shape.rows for shape in shapes))
        planner = self._config.planner
        if planner.profile != "measure":
            return self._from_rank_0(lambda: _given(planner.profile, key, self._config.granularity_for(length)))
        path = None if planner.cache_dir is None else cache_path(planner.cache_dir, key, self._besides_key(length))
        cached = self._from_rank_0(lambda: read_cache(path, key))
        if cached is not None:
            return cached
        costs = self._measure(length, drawn, shapes)
        return self._from_rank_0(lambda: _combined(path, key, costs, self._engine.num_stages))

    def _measure(
        self, length: int, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape]
    ) -> list[PartCosts]:
        """What every rank has measured of its parts."""
        if self._engine.global_rank == 0:
            logger.info("measuring slices of sequences of %d tokens, to plan them", length)
        with _Progress(self._engine.global_rank == 0) as shown:

            def progress(share: float) -> None:
                self._watched(f"measuring slices ({share:.0%} done)")
                shown(share)

            mine = measure_parts(self._engine, drawn, shapes, length, self._groups, self._engine.slice_store, progress)
        if self._groups.world is None:
            return mine
        return [costs for each in gather(mine, self._groups.world) for costs in each]

    def _key(self, length: int, rows: int) -> ProfileKey:
        """What a profile must have been measured on. A collective over the stages, which know their own layers."""
        engine = self._engine
        module = engine.module
        described = {
            self._part_id(chunk_id): (describe_layers(module), describe_each_layer(module))
            for chunk_id in each_part(module)
        }
        if self._groups.control is not None:
            everyone = gather(described, self._groups.control)
            described = {part_id: layers for each in everyone for part_id, layers in each.items()}
        layers, each = zip(*(described[part_id] for part_id in sorted(described)), strict=True)
        device = torch.device(engine.device)
        with autocast_if_enabled(engine):
            autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return profile_key(
            layers, module=module, device=device, rows=rows, length=length,
            tensor_parallel=engine.grid.get_slice_parallel_world_size(), autocast=autocast,
            slice_length_multiple=engine.slice_length_multiple, each_layer=[layer for part in each for layer in part],
        )  # fmt: skip

    def _part_id(self, chunk_id: int) -> int:
        return int(self._engine._layout.placement[self._engine.stage_id, chunk_id])

    def _besides_key(self, length: int) -> dict[str, Any]:
        """What a profile in the cache depends on besides its key: which slices were measured, the loss, and what the
        memory figures beside it count."""
        engine, loss_fn = self._engine, self._engine.module.loss_fn
        return {
            "granularity_tokens": self._config.granularity_for(length),
            "loss": "none" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__),
            "optimizer": [type(engine.optimizer).__qualname__, engine.optimizer_name()],
            "zero_stage": engine.zero_optimization_stage(),
            "data_parallel": engine.dp_world_size,
            "weights": True,  # W is measured as well
            "layers": "with the loss, trained",  # and what each layer takes of its part, and how much of it is trained
            "message_bytes": True,  # and the bytes of messages are noted
            "stages": engine.num_stages,  # which the key does not tell: it counts parts
        }

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, length: int) -> tuple[Choice, str]:
        """On rank 0: the choice, and the block for the log."""
        assert self._measured is not None
        engine, limit_gb, memory = self._engine, self._config.planner.memory_limit_gb, self._measured.memory
        if limit_gb is not None and memory is None:
            raise TeraPipeConfigError(
                f"terapipe.planner.memory_limit_gb = {limit_gb}: a profile from a file has no memory figures; set "
                'terapipe.planner.profile to "measure", or remove the limit'
            )
        parts = MeasuredParts.of_profile(self._measured.profile, CostModel.from_profile(self._measured.profile))
        cuts = Cuts(engine.module, engine._layout, parts, memory)
        costs = cuts.costs(engine._layout.num_parts)
        limit_bytes = None if limit_gb is None else limit_gb * 1e9
        head = f"planned {length} tokens for {engine.num_stages} stages and {engine.micro_batches} micro-batches:"
        if self._config.schedule == "auto":
            result, more = best_where_layers_stand(engine, cuts, length, limit_bytes)
        else:
            result, more = self._search(costs, length, memory, limit_bytes), []
        lines = [*describe(result, schedule_chosen=self._config.schedule == "auto"), *more]
        self._write_prediction(result, costs)
        return Choice(result.plan, result.schedule), "\n  ".join([head, *lines])

    def _write_prediction(self, result: PlanResult, costs: Any) -> None:
        """The simulated step beside the traces of measured ones, for ``terapipe compare``."""
        if self._config.trace_dir is None:
            return
        schedule = build(
            result.schedule, result.num_stages, result.num_micro_batches, result.plan.num_slices,
            chunks_per_stage=self._engine._layout.chunks_per_stage, **self._config.options_of(result.schedule),
        )  # fmt: skip
        folder = Path(self._config.trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"predicted-{result.plan.sequence_length}-tokens-{result.num_micro_batches}-micro-batches.json"
        simulate(schedule, result.plan, costs).save(folder / name)

    def _search(self, costs: Any, length: int, memory: Any, limit_bytes: float | None) -> PlanResult:
        """The best plan for the schedule that the config names."""
        engine, config = self._engine, self._config
        return plan_slices(
            costs, length, engine.num_stages, engine.micro_batches, config.granularity_for(length), config.schedule,
            memory=memory, memory_limit_bytes=limit_bytes, chunks_per_stage=engine._layout.chunks_per_stage,
            placement=engine._layout.placement, schedule_options=config.schedule_options,
        )  # fmt: skip

    def _from_rank_0(self, ask: Callable[[], T]) -> T:
        """Return what rank 0 gets from `ask` within a batch, on every rank, which all raise its errors."""
        try:
            return from_rank_0(ask, self._groups.world)
        except Exception as error:
            raise RaisedEverywhere(error) from None


def require_profile(engine: Any, groups: PipelineGroups) -> None:
    """:meth:`AutoPlanner.require_given`, where ``engine`` plans."""
    if "auto" in (engine.terapipe_config.slices, engine.terapipe_config.schedule):
        AutoPlanner(engine, groups, lambda text: None).require_given()


def _of_this_run(path: str, key: ProfileKey, ignore: Sequence[str] = ()) -> Profile:
    profile = Profile.load(path)
    # costs of layers that were cut otherwise are told from the share that each has of its part
    layers = profile.key.layers_fingerprint
    can_be_recut = layers is not None and layers == key.layers_fingerprint
    can_be_recut = can_be_recut and all(part.layer_shares is not None for part in profile.parts)
    profile.require(key, [*ignore, *(("model_fingerprint", "num_stages") if can_be_recut else ())])
    return profile


def _given(path: str, key: ProfileKey, granularity: int) -> Measured:
    """The profile that the config names."""
    profile = _of_this_run(path, key)
    smallest = max(min(s.tokens for s in part.samples if s.prefix == 0) for part in profile.parts)
    if granularity < smallest:
        logger.warning(
            "terapipe.planner.profile = %s: slices of fewer than %d tokens were not measured and count as %d, but "
            "plans are cut at multiples of %d; measure again, or raise terapipe.granularity_tokens",
            path, smallest, smallest, granularity,
        )  # fmt: skip
    return Measured(profile, None)


def _combined(path: Path | None, key: ProfileKey, costs: Sequence[PartCosts], num_stages: int) -> Measured:
    """What all ranks measured, kept in the cache."""
    for warning in dict.fromkeys(cost.warning for cost in costs if cost.warning is not None):
        logger.warning("%s", warning)
    measured = combine(key, costs, num_stages)
    if path is not None:
        try:
            write_cache(path, measured)
        except OSError as error:
            raise TeraPipeConfigError(
                f"terapipe.planner.cache_dir: cannot write {path}: {error.strerror}; give a folder that rank 0 may "
                "write, or null"
            ) from error
    return measured


class _Progress:
    """A progress bar on rank 0, where somebody looks at a terminal."""

    def __init__(self, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=100, desc="measuring slices", unit="%", disable=None if shown else True, leave=False)

    def __enter__(self) -> Callable[[float], None]:
        return self._advance

    def _advance(self, share: float) -> None:
        self._bar.update(round(100 * share) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
