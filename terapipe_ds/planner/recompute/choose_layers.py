"""Choose the layers that recompute on each stage, for one schedule and one plan.

Stages do not share memory, so each is decided by itself: it takes the fastest subset of its layers whose peak is within
the limit. The peak belongs to the very order that the stage runs (`bytes_of_stage`). So a stage near the end of the
pipeline, which holds fewer live slices, recomputes fewer layers. More time on one stage never makes a step shorter (a
replay only has sums and maxima), so the least time on every stage gives the least step. The forwards of a stage's
layers may grow differently with the prefix; then the least time is the least sum over all slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from terapipe_ds.costs.interface import Costs, method_of
from terapipe_ds.messages import limit_text
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.layer import Layer
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.planner.recompute.frontier import Subset, frontier
from terapipe_ds.schedule import Schedule
from terapipe_ds.schedule.proofs import budget_of_sends
from terapipe_ds.schedule.show import many
from terapipe_ds.simulator.peak_memory import bytes_of_stage


@dataclass(frozen=True)
class PartLayers:
    """Hold a part without recomputation, and its layers that may recompute, in their order."""

    costs: Costs
    memory: PartMemory
    layers: tuple[Layer, ...]

    def with_subset(self, subset: Subset, is_whole: bool) -> PartMemory:
        """Return the memory of the part where these layers recompute.

        While one of them does, the running slice has more than its kept bytes. The excess is added to the working
        bytes; the working bytes without recomputation count at both moments. The result is exact for sequences in one
        slice, if `is_whole`, else for cut ones; for the others it is an estimate.
        """
        memory, chosen = self.memory, [self.layers[index] for index in subset.layers]
        if not chosen:
            return memory
        # the other layers keep the same bytes as before; the chosen ones keep their inputs, and perhaps attention
        less = sum(layer.kept_bytes(is_whole=False) - layer.again_bytes for layer in chosen)
        whole = memory.whole_bytes_per_token
        if whole is not None:
            whole = max(0.0, whole - sum(layer.whole_bytes for layer in chosen))
        beyond, beyond_whole = (self._beyond_bytes(subset.layers, is_one) for is_one in (False, True))
        beyond = min(beyond, beyond_whole) if is_whole else beyond
        return dataclasses.replace(
            memory,
            slice_bytes_per_token=max(0.0, memory.slice_bytes_per_token - less),
            whole_bytes_per_token=whole,
            working_bytes_per_token=memory.working_bytes_per_token + beyond,
            working_whole_bytes_per_token=max(0.0, beyond_whole - beyond),
            joined_bytes_per_token=0,  # `WeightGradients.joins_unsplit`
        )

    def with_costs(self, layer_ids: Collection[int]) -> Costs:
        """Return the costs of the part where these layers of the model recompute."""
        again = [one.again for one in self.layers if one.layer_id in layer_ids]
        if not again:
            return self.costs
        kept = {name: method_of(self.costs, name) for name in ("send_s", "send_gradient_s", "step_s")}
        return PartCosts([self.costs], again, **kept)

    def again_s(self, plan: SlicePlan, num_micro_batches: int) -> list[float]:
        """Return the seconds that recomputing each layer takes in a step."""
        spans, kept = list(zip(plan.lengths, plan.starts, strict=True)), {}
        for layer in self.layers:  # equal layers share their costs
            if id(layer.again) not in kept:
                kept[id(layer.again)] = sum(float(layer.again.forward_s(*span)) for span in spans)
        return [num_micro_batches * kept[id(layer.again)] for layer in self.layers]

    def _beyond_bytes(self, chosen: Collection[int], is_whole: bool) -> float:
        """Return by how much a slice is briefly larger, in the backward of a layer that recomputes, than it waits."""
        most = after = 0.0  # bytes that the layers after it keep, which are gone by then
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            kept = layer.again_bytes if index in chosen else layer.kept_bytes(is_whole)
            most = max(most, layer.kept_bytes(is_whole) - kept - after)
            after += kept
        return most


def recomputable_parts(parts: MeasuredParts, bounds: Sequence[int]) -> list[PartLayers]:
    """Return the parts between `bounds` of a measured model. Layers without parameters never recompute.

    Raises PlannerError where layers or their memory were not measured.
    """
    num_parts = len(bounds) - 1
    costs, memory = parts.cut(num_parts, bounds), parts.memory(num_parts, bounds)
    # without the bytes of each layer nobody knows how much its recomputation frees
    if not parts.has_layers or costs is None or memory is None:
        lacks = "the memory of layers was not measured" if parts.has_layers else "layers were not timed one by one"
        raise PlannerError(
            f'recompute "auto": {lacks}; measure in the running job (planner.profile "measure", without a profiler), '
            'or name the stages that recompute, "recompute": [0, 1]'
        )
    # a stage has one part here, which may stand for its process
    with_process = [
        dataclasses.replace(one, static_bytes=one.static_bytes + memory.process_bytes) for one in memory.parts
    ]
    of_parts = zip(costs, with_process, parts.between(bounds), strict=True)
    return [
        PartLayers(cost, one, tuple(layer for layer in layers if layer.parameters)) for cost, one, layers in of_parts
    ]


@dataclass(frozen=True)
class RecomputeChoice:
    """Hold the layers that recompute, by part, and the resulting costs and memory of the parts."""

    layers: tuple[tuple[int, ...], ...]  # numbers of the model's layers
    costs: tuple[Costs, ...]
    memory: MemoryModel
    again_s: tuple[float, ...]  # of each part, in a step

    @classmethod
    def of(cls, parts: Sequence[PartLayers], subsets: Sequence[Subset], is_whole: bool) -> RecomputeChoice:
        both = list(zip(parts, subsets, strict=True))
        ids = tuple(tuple(part.layers[index].layer_id for index in one.layers) for part, one in both)
        memory = MemoryModel(tuple(part.with_subset(one, is_whole) for part, one in both))
        return cls(ids, tuple(costs_of(parts, ids)), memory, tuple(one.again_s for one in subsets))


def choose_layers(
    parts: Sequence[PartLayers], schedule: Schedule, plan: SlicePlan, limit_bytes: float
) -> RecomputeChoice:
    """Choose the layers that recompute, so that every stage fits in `limit_bytes` in the least time.

    Raises:
        MemoryLimitError: a stage does not fit, whichever layers it recomputes.
        PlannerError: the schedule does not have one part per stage.
    """
    if dict(schedule.placement) != {(stage_id, 0): stage_id for stage_id in range(len(parts))}:
        raise PlannerError(
            f'recompute "auto" with schedule {schedule.name!r}: it is for one part per stage; take a schedule with '
            'chunks_per_stage 1, or name the stages that recompute, "recompute": [0, 1]'
        )
    spans, outstanding = [plan.spans()] * schedule.num_micro_batches, budget_of_sends(schedule)
    is_whole, chosen = plan.num_slices == 1, []
    # stages share no memory, so the choice of one changes nothing for another
    for stage_id, part in enumerate(parts):
        again_s = part.again_s(plan, schedule.num_micro_batches)
        needs = []
        # subsets come by rising time: the first that fits is the fastest
        for subset in frontier(part.layers, again_s, is_whole):
            of_parts = [part.with_subset(subset, is_whole) if one is part else one.memory for one in parts]
            memory = MemoryModel(tuple(of_parts))
            need = max(bytes_of_stage(schedule, stage_id, spans, memory, outstanding))
            if need <= limit_bytes:
                chosen.append(subset)
                break
            needs.append(need)
        else:
            text = (
                f"no plan fits in {limit_text(limit_bytes)}: with schedule {schedule.name!r} and "
                f"{many(plan.num_slices, 'slice')} stage {stage_id} needs {limit_text(min(needs))} with all its layers "
                "recomputed; raise planner.memory_limit_gb where devices have more, or take more stages, a smaller "
                "micro-batch, or ZeRO-1"
            )
            raise MemoryLimitError(text, min(needs), stage_id)
    return RecomputeChoice.of(parts, chosen, is_whole)


def costs_of(parts: Sequence[PartLayers], layers: Sequence[Collection[int]]) -> list[Costs]:
    """Return the costs of the parts where these layers of the model recompute."""
    return [part.with_costs(ids) for part, ids in zip(parts, layers, strict=True)]


def recompute_everything(parts: Sequence[PartLayers], plan: SlicePlan, num_micro_batches: int) -> RecomputeChoice:
    """Return the choice in which every layer recomputes that keeps less when it does."""
    is_whole = plan.num_slices == 1
    lists = [frontier(part.layers, part.again_s(plan, num_micro_batches), is_whole) for part in parts]
    return RecomputeChoice.of(parts, [subsets[-1] for subsets in lists], is_whole)
