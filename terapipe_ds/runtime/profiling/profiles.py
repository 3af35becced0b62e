"""Get the costs for plans: measured here, cached in `planner.cache_dir`, or from the file of the config.

This is a collective over all ranks: all measure in step, rank 0 reads or gathers the profile, and every rank gets it,
or the error.
"""

from __future__ import annotations

import errno
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from tqdm import tqdm

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.costs.profile import VERSION, Profile, ProfileKey
from terapipe_ds.files.atomic import check_writable
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import RaisedEverywhere, from_rank_0, gather
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.source import DrawnMicroBatch
from terapipe_ds.runtime.layout.parted_module import each_part
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.profiling.all_parts import PartMeasured, StageToPlan, measure_parts, state_ranks, state_size
from terapipe_ds.runtime.profiling.cache import cache_path, combine, read_cache, with_own_time, write_cache
from terapipe_ds.runtime.profiling.key import describe_part, device_and_threads, profile_key
from terapipe_ds.runtime.profiling.rounds import noise_warning

T = TypeVar("T")
DrawnBatch = Sequence[tuple[DrawnMicroBatch, MicroBatchShape]]


class Profiles:
    """Hold the profiles of one engine, by the size of a micro-batch."""

    def __init__(self, stage: StageToPlan, wires: Wires, note: Callable[[str], None]) -> None:
        self._stage, self._wires, self._note = stage, wires, note
        self._engine, self._groups, self._config = stage.engine, stage.groups, stage.config
        self._known: dict[int, Profile] = {}
        self._measured_last: tuple[int, Path | None] | None = None  # without the engine's own time: size, file

    def get(self, length: int, drawn: DrawnBatch) -> Profile:
        """Return the costs of sequences of up to `length` tokens. A collective."""
        size = self._engine.train_micro_batch_size_per_gpu()
        profile = self._known.get(size)
        if profile is None or profile.key.sequence_length < length:
            profile = self._known[size] = self._profile_for(length, drawn)
        return profile

    @property
    def fingerprint(self) -> str | None:
        """Return a checksum of the measurements that plans come from; None before there are any."""
        profile = self._known.get(self._engine.train_micro_batch_size_per_gpu())
        return None if profile is None else hashlib.sha256(profile.to_json().encode()).hexdigest()[:16]

    def add_own_time(self) -> float:
        """Add the engine's own time to a profile that was measured here, once this time is known. A collective.

        Return the largest own time in the F and B of a slice, in seconds; 0.0 if there is nothing to add.
        """
        taken = self._engine.own_time.of_parts()
        if self._measured_last is None or taken is None:
            return 0.0
        (size, path), self._measured_last = self._measured_last, None
        # ranks that run the same part differ little: any of them will do
        own_s = {part_id: seconds for rank in gather(taken, self._groups.world) for part_id, seconds in rank.items()}
        if not own_s:  # beside devices
            return 0.0
        profile = self._known[size] = with_own_time(self._known[size], own_s)
        most_s = max(forward_s + backward_s for forward_s, backward_s in own_s.values())
        if self._engine.global_rank == 0:
            logger.info("the engine itself takes %.3g ms of the F and B of a slice", 1e3 * most_s)
            write_cache(path, profile)
        return most_s

    def from_rank_0(self, ask: Callable[[], T]) -> T:
        """Return rank 0's result of `ask` within a batch, on every rank; all raise its errors."""
        try:
            return from_rank_0(ask, self._groups.world)
        except Exception as error:
            raise RaisedEverywhere(error) from None

    def _profile_for(self, length: int, drawn: DrawnBatch) -> Profile:
        key = key_of(self._stage, length, max(shape.rows for _, shape in drawn))
        planner = self._config.planner
        if planner.profile != "measure":
            granularity = self._config.searched_granularity(length)
            return self.from_rank_0(lambda: _read_profile(planner.profile, key, granularity))
        path = None if planner.cache_dir is None else cache_path(planner.cache_dir, key, self._not_in_key(length))
        cached = self.from_rank_0(lambda: _cached(path, key))
        if cached is not None:
            return cached
        costs = self._measure(length, drawn)
        self._measured_last = self._engine.train_micro_batch_size_per_gpu(), path

        def combined() -> Profile:
            profile = combine(key, costs, self._engine.num_stages, state_ranks(self._engine))
            write_cache(path, profile)
            return profile

        return self.from_rank_0(combined)

    def _measure(self, length: int, drawn: DrawnBatch) -> list[PartMeasured]:
        is_first_rank = self._engine.global_rank == 0
        if is_first_rank:
            logger.info("measuring slices of sequences of %d tokens, to plan them", length)
        hidden = None if is_first_rank else True  # None: on a terminal
        with tqdm(total=100, desc="measuring slices", unit="%", disable=hidden, leave=False) as bar:

            def progress(share: float) -> None:
                self._note(f"measuring slices ({share:.0%} done)")
                bar.update(round(100 * share) - bar.n)

            longest = max(drawn, key=lambda pair: pair[1].length)
            own = measure_parts(self._stage, self._wires, *longest, length, progress)
        everyone = [costs for rank in gather(own, self._groups.world) for costs in rank]
        # a clock other than the wall's is for machines that are busy with the other stages
        if is_first_rank and self._engine.slice_clock is None:
            for warning in filter(None, dict.fromkeys(noise_warning(costs.samples) for costs in everyone)):
                logger.warning("%s", warning)
        return everyone

    def _not_in_key(self, length: int) -> dict[str, Any]:
        """Return all that a cached profile depends on, except its key: points, loss, scope of the memory. A collective.

        Links of ranks on other machines are other links, whatever the names of these machines are.
        """
        engine, loss_fn = self._engine, self._engine.module.loss_fn
        names = gather((platform.node(), device_and_threads(torch.device(engine.device))), self._groups.world)
        nodes = list(dict.fromkeys(node for node, *_ in names))
        return {
            "granularity_tokens": self._config.granularity_for(length),
            "loss": "none" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__),
            "optimizer": [type(engine.optimizer).__qualname__, engine.optimizer_name()],
            "states": state_size(engine),
            "zero_stage": engine.zero_optimization_stage(),
            "gradients": [str(engine.get_data_types()[1]), engine.zero_cpu_offload(), engine.zero_reduce_bucket_size()],
            "contiguous_gradients": engine.zero_contiguous_gradients(),
            "data_parallel": engine.seq_dp_world_size,
            "stages": engine.num_stages,
            "contents": VERSION,  # grows when more is measured
            "ranks": [[nodes.index(node), *of_rank] for node, *of_rank in names],
            "offload_activations": self._config.offload_activations,
            **({"keeps_logits": False} if hasattr(loss_fn, "of_hidden") else {}),
            **({"compile": True} if self._config.compile else {}),
            **({"keep_attention": True} if self._config.keep_attention else {}),
            **({} if self._config.links.is_exact else {"links": self._config.links.model_dump()}),
        }


def require_profile(stage: StageToPlan) -> None:
    """Raise ProfileError on every rank if the config names a profile that does not fit this run. A collective."""
    config, path = stage.config, stage.config.planner.profile
    if config.needs_costs and path != "measure":
        key = key_of(stage, length=1, rows=1)
        ignore = ("sequence_length", "micro_batch")
        from_rank_0(lambda: _of_this_run(path, key, ignore=ignore), stage.groups.world)


def key_of(stage: StageToPlan, length: int, rows: int) -> ProfileKey:
    """Return the key that a profile must have. A collective over the stages, which know their own layers."""
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
    # if layers were cut differently, the costs of parts are still the sums of their layers
    layers = profile.key.layers_fingerprint
    can_be_cut = layers is not None and layers == key.layers_fingerprint and profile.layers is not None
    profile.require(key, [*ignore, *(("model_fingerprint", "num_stages") if can_be_cut else ())])
    return profile


def _read_profile(path: str, key: ProfileKey, granularity: int) -> Profile:
    """Return the profile that the config names."""
    profile = _of_this_run(path, key)
    smallest = max(min(s.tokens for s in part.samples if s.prefix == 0) for part in profile.parts)
    if granularity < smallest:
        logger.warning(
            f"terapipe.planner.profile = {path}: slices of fewer than {smallest} tokens were not measured and count as "
            f"{smallest}, but plans are cut at multiples of {granularity}; measure again, or raise "
            "terapipe.granularity_tokens"
        )
    return profile


def _cached(path: Path | None, key: ProfileKey) -> Profile | None:
    """Return the cached profile. Without one, refuse a folder that can keep none, before anything is measured.

    A disk that fails or is full may recover during the measurement. It is no mistake of the config.
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
