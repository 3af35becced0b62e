"""Answer a question: check a model and a cluster, search, and return strategies and their timelines."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from terapipe_ds.costs.model_sizes import ModelSize, ModelSizeError, model_size
from terapipe_ds.costs.profile import Profile, ProfileError, is_profile
from terapipe_ds.costs.utilisation import Utilisation
from terapipe_ds.messages import nearest, show_value
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.planner.layers.chain import LayerChain
from terapipe_ds.planner.layers.config_json import size_of_config
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.measured import MeasuredLayers
from terapipe_ds.planner.layers.parts import Again, Layers
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.planner.strategy.candidate import Candidate, Levers, Score, owners_of
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.search import Search
from terapipe_ds.planner.strategy.shapes import NAMES, NAMES_UNSLICED, Shape
from terapipe_ds.planner.strategy.space import Choices, Space, check_limit
from terapipe_ds.schedule import ScheduleError, build, count_parts
from terapipe_ds.schedule.show import many
from terapipe_ds.simulator import simulate
from terapipe_ds.strategy import Strategy
from terapipe_ds.timeline import Timeline


def plan_strategy(model: Any, cluster: Cluster, **question: Any) -> Strategy:
    """Return the best strategy that the search finds; `rank_strategies` explains `model`, `cluster` and `question`."""
    return rank_strategies(model, cluster, **question)[0]


def rank_strategies(
    model: Any,
    cluster: Cluster,
    *,
    global_batch_size: int,
    sequence_length: int,
    memory_limit_gb: float | None = None,
    dtype: str = "auto",
    stages: int | None = None,
    tensor_parallel: int | None = None,
    data_parallel: int | None = None,
    sequence_parallel: int | None = None,
    offload_activations: bool | None = None,
    offload_optimizer: bool | None = None,
    schedule: str | None = None,
    chunks_per_stage: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    zero_stage: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Strategy]:
    """Return strategies, the best first: for every replayed candidate the best one that the search met.

    Args:
        model: a name of `costs.model_sizes`, a `ModelSize`, a path to a Hugging Face `config.json`, a `LayerChain`, or
            measurements: a `Profile`, a path to one, or a list of these, one per number of tensor ranks and rows of a
            micro-batch.
        cluster: where the model trains.
        global_batch_size: sequences of a step, over all replicas.
        sequence_length: tokens of a sequence.
        memory_limit_gb: per device; None: 0.9 of the memory of the device card.
        dtype: of parameters and activations: "bfloat16", "float16", "float32", or "auto", the first of
            these that the device has.
        stages, tensor_parallel, data_parallel, sequence_parallel, offload_activations, offload_optimizer, schedule,
            chunks_per_stage, micro_batch_size, accumulation, zero_stage: fixed values; None: the search chooses.
        progress: called now and then with (what, work done, of how much).
        stop: called now and then; once it returns true, or with Ctrl-C, the answer is the best strategy so far, marked
            as incomplete.

    Raises:
        MemoryLimitError: nothing fits; it names the least need.
        PlannerError: any other question without an answer; it names the nearest question with one.
    """
    if not isinstance(cluster, Cluster):
        raise PlannerError(f"cluster = {show_value(cluster)}: give a Cluster(device, nodes, devices_per_node)")
    # the checked question: layers with costs, counts, and a schedule that strategies can have
    length = check_count("sequence_length", sequence_length)
    layers = layers_of(model, cluster, length, dtype)
    levers: dict[str, Any] = {"offload_activations": offload_activations, "offload_optimizer": offload_optimizer}
    _check_levers(layers, **levers)
    fixed = {"stages": stages, "tensor_parallel": tensor_parallel, "data_parallel": data_parallel}
    fixed |= {"sequence_parallel": sequence_parallel, "chunks_per_stage": chunks_per_stage}
    fixed |= {"micro_batch_size": micro_batch_size, "accumulation": accumulation}
    if zero_stage is not None and (type(zero_stage) is not int or zero_stage not in (0, 1)):
        raise PlannerError(f"zero_stage = {show_value(zero_stage)}: DeepSpeed's pipelines take 0 and 1; give one")
    counts: dict[str, Any] = {
        name: None if value is None else check_count(name, value) for name, value in fixed.items()
    }
    batch, limit_bytes = check_count("global_batch_size", global_batch_size), check_limit(memory_limit_gb, cluster)
    schedule = _checked_schedule(schedule, layers, counts["chunks_per_stage"])
    choices = Choices(**counts, **levers, schedule=schedule, zero_stage=zero_stage)
    space = Space(layers, cluster, batch, length, limit_bytes, choices)
    # the answers, the best first
    search = Search(space, progress, stop)
    scores = search.run()
    name = model if isinstance(model, str) else getattr(model, "name", "") or getattr(layers, "name", "")
    try:
        kinds = search.price(scores[0].candidate).peak_by_kind(scores[0])  # of the best alone: others take as long
    except KeyboardInterrupt:  # the strategies are known
        kinds = {}
    return [_strategy(score, search, name, {} if place else kinds) for place, score in enumerate(scores)]


def simulate_strategy(
    strategy: Strategy, model: Any, cluster: Cluster, *, num_micro_batches: int | None = None
) -> Timeline:
    """Return the timeline of one batch of a strategy, up to the reduction of gradients.

    Args:
        model, cluster: those that the strategy was planned for, as `rank_strategies` takes them.
        num_micro_batches: a smaller number than the batch has; None: all.

    Raises:
        PlannerError: as `rank_strategies` does for a model that it cannot read.
    """
    stages, chunks = strategy.grid["pipe"], strategy.chunks_per_stage
    priced, recompute = _priced(strategy, model, cluster), _recomputing(strategy)
    number = num_micro_batches or strategy.accumulation
    plans = [strategy.plans[m % strategy.accumulation] for m in range(number)]
    schedule = build(
        strategy.schedule, stages, len(plans), [plan.num_slices for plan in plans], chunks_per_stage=chunks
    )
    of_parts = tuple(strategy.partition), recompute, owners_of(strategy.schedule, stages, chunks)
    return simulate(schedule, plans, priced.parts(*of_parts), memory=priced.memory(*of_parts))


def price_strategy(strategy: Strategy, model: Any, cluster: Cluster) -> Strategy:
    """Return a strategy with the seconds and bytes that the planner predicts for it on this cluster.

    Raises:
        PlannerError: it is for another number of devices or layers, its tensor or sequence ranks leave a node or
            cannot share its slices equally, or it has a plan for each micro-batch.
    """
    priced, plan = _priced(strategy, model, cluster), strategy.plan
    devices, layers = math.prod(strategy.dims), priced.layers.num_layers
    if devices != cluster.num_devices:
        raise PlannerError(
            f"the strategy is for {devices} devices, the cluster has {cluster.num_devices}: give as many"
        )
    if strategy.partition[-1] != layers:
        raise PlannerError(
            f"the strategy is for {strategy.partition[-1]} layers, the model has {layers}: give its model"
        )
    if cluster.devices_per_node % strategy.dims[2]:
        raise PlannerError(
            f"the strategy has {many(strategy.dims[2], f'{strategy.inner_axis} rank')}, which do not divide the "
            f"{many(cluster.devices_per_node, 'device')} of a node: give nodes of {strategy.devices_per_node}"
        )
    if plan is None:
        raise PlannerError("the strategy has other slices for each micro-batch: give one list of lengths")
    ranks = strategy.grid.get("sequence", 1)
    if bad := [tokens for tokens in plan.lengths if tokens % ranks]:
        raise PlannerError(
            f"the strategy has slices of {bad[0]} tokens, which its {ranks} sequence ranks do not divide: plan again"
        )
    shape = Shape(strategy.schedule, strategy.chunks_per_stage)
    score = priced.price(tuple(strategy.partition), shape, plan, _recomputing(strategy))
    assert score is not None  # without a time to beat
    unknown = {"lower_bound_s": 0.0, "mfu": 0.0, "model_flops_per_s": 0.0}
    predicted = _predicted(score, priced, priced.peak_by_kind(score))
    return strategy.model_copy(update={**unknown, **predicted, "devices_per_node": cluster.devices_per_node})


def _priced(strategy: Strategy, model: Any, cluster: Cluster) -> Priced:
    levers = Levers(strategy.offload_activations, strategy.offload_optimizer)
    counts = strategy.micro_batch_size, strategy.accumulation, strategy.zero_stage
    length = strategy.plans[0].sequence_length
    layers = layers_of(model, cluster, length, strategy.dtype)
    _check_levers(layers, keep_attention=strategy.keep_attention, **dataclasses.asdict(levers))
    grid = strategy.layout
    why = layers.refuse_tensor(grid.model) or layers.refuse_sequence(grid.sequence)
    if why := why or layers.refuse_micro_batch(grid.model, strategy.micro_batch_size):
        raise PlannerError(f"this model has no price for the strategy ({why}): give another strategy or model")
    return Priced(layers, cluster, length, Candidate(grid, *counts, levers))


def _recomputing(strategy: Strategy) -> list[Again]:
    again, stages = strategy.recompute, range(strategy.grid["pipe"])
    kind = Again.KEEPS_ATTENTION if strategy.keep_attention else Again.FULL
    recomputing = [again == "full" or (isinstance(again, list) and stage_id in again) for stage_id in stages]
    return [kind if recomputes else Again.OFF for recomputes in recomputing]


def layers_of(model: Any, cluster: Cluster, sequence_length: int, dtype: str) -> Layers:
    if isinstance(model, LayerChain):
        return model.of_length(sequence_length)
    if (profiles := _profiles_of(model)) is not None:
        measured = MeasuredLayers(profiles, cluster, sequence_length)
        if dtype not in ("auto", measured.dtype):
            raise PlannerError(f"dtype = {show_value(dtype)}: the profile is of {measured.dtype}; give that, or auto")
        return measured
    return CountedLayers(size_for(model, sequence_length), cluster, dtype)


def size_for(model: object, sequence_length: int) -> ModelSize:
    """Return the size of `size_of`, whose table of positions has room for sequences of that length."""
    size = size_of(model)
    return dataclasses.replace(size, max_sequence_length=max(size.max_sequence_length, sequence_length))


def size_of(model: object) -> ModelSize:
    """Return the size for a name, or for a path to a `config.json` or its folder; return a size unchanged.

    Raises PlannerError for anything else, or a config without a size, and ModelSizeError for an unknown name.
    """
    if isinstance(model, os.PathLike) or (isinstance(model, str) and _is_path(model)):
        path = os.fspath(model)
        model = size_of_config(os.path.join(path, "config.json") if os.path.isdir(path) else path)
    try:
        size = model_size(model) if isinstance(model, str) else model
    except ModelSizeError as error:
        raise ModelSizeError(f"{error}; or the path of any decoder's config.json") from None
    if not isinstance(size, ModelSize):
        allowed = "the name of a model size, a path to a config.json or a profile, profiles, or a LayerChain"
        raise PlannerError(f"model = {show_value(model)}: give {allowed}")
    return size


def _is_path(name: str) -> bool:
    return name.endswith(".json") or os.sep in name or os.path.isfile(os.path.join(name, "config.json"))


def _profiles_of(model: Any) -> list[Profile] | None:
    """Return the profiles that `model` is or names; None where it is something else."""
    given = list(model) if isinstance(model, list | tuple) else [model]
    is_path = isinstance(model, str | os.PathLike) and os.path.isfile(model)
    if not isinstance(model, list | tuple | Profile) and not (is_path and is_profile(model)):
        return None
    try:
        return [one if isinstance(one, Profile) else Profile.load(one) for one in given]
    except (ProfileError, TypeError) as error:
        raise PlannerError(f"model = {show_value(model)}: {error}; give profiles, or paths to them") from None


def _checked_schedule(schedule: str | None, layers: Layers, chunks: int | None) -> str | None:
    """Return the schedule. Raise PlannerError where strategies lack it, or lack it with these parts per stage."""
    known = NAMES if layers.is_sliceable else NAMES_UNSLICED
    if schedule is not None and schedule not in known:
        advice = nearest(str(schedule), known) or "; give one of them"
        raise PlannerError(f"schedule = {show_value(schedule)}: strategies have {', '.join(known)}{advice}")
    if not layers.is_sliceable and chunks not in (None, 1):
        raise PlannerError(
            f"chunks_per_stage = {chunks}: layers without costs of slices have one part per stage; give 1"
        )
    if schedule is not None and chunks is not None:
        try:
            count_parts(schedule, 2, chunks)
        except ScheduleError as error:
            raise PlannerError(error.reason) from None
    return schedule


def _check_levers(layers: Layers, **levers: bool | None) -> None:
    """Raise PlannerError if a lever is fixed on, and its costs are unknown for these layers."""
    for name, value in levers.items():
        is_known = Again.KEEPS_ATTENTION in layers.kinds if name == "keep_attention" else name in layers.levers
        if value and not is_known:
            raise PlannerError(f"{name} = True: only counted models have its costs; give one, or leave it out")


def _predicted(score: Score, priced: Priced, kinds: dict[str, list[int]]) -> dict[str, Any]:
    """Return what a replay predicts; model FLOP/s and MFU of layers whose FLOPs somebody counts."""
    known = {"predicted_s": score.seconds, "memory_bytes": list(score.peak_bytes), "memory_by_kind": kinds}
    known["host_memory_bytes"] = score.host_bytes
    if not isinstance(layers := priced.layers, CountedLayers):
        return known
    candidate, cluster = score.candidate, priced.cluster
    step = candidate.micro_batch * candidate.accumulation * candidate.grid.data, priced.length
    rates = Utilisation.of(layers.size, cluster.card, layers.dtype, step, score.seconds, cluster.num_devices)
    return known | {"model_flops_per_s": rates.model_flops_per_s, "mfu": rates.mfu}


def _strategy(score: Score, search: Search, name: str, kinds: dict[str, list[int]]) -> Strategy:
    candidate, again = score.candidate, score.recompute
    stages = [stage_id for stage_id, recomputes in enumerate(again) if recomputes]
    return Strategy(
        axes=list(candidate.grid.axes),
        dims=list(candidate.grid.dims),
        devices_per_node=search.space.cluster.devices_per_node,
        partition=list(score.bounds),
        schedule=score.shape.schedule,
        chunks_per_stage=score.shape.chunks,
        slices=list(score.plan.lengths),
        micro_batch_size=candidate.micro_batch,
        accumulation=candidate.accumulation,
        recompute="full" if all(again) else stages if stages else "off",
        keep_attention=Again.KEEPS_ATTENTION in again,
        zero_stage=candidate.zero_stage,
        dtype=search.space.layers.dtype,
        lower_bound_s=min(search.lower_bound_s, score.seconds),
        model=str(name),
        is_complete=search.is_complete,
        **dataclasses.asdict(candidate.levers),
        **_predicted(score, search.price(candidate), kinds),
    )
