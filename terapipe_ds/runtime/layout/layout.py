"""Place each part of the layers on a stage: the layout of a pipeline, as the schedule of its batches needs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.schedule import Schedule, ScheduleError, load, placement_for
from terapipe_ds.schedule.placement import Placement
from terapipe_ds.strategy import bounds_among, decoder_layers

WireEnds = tuple[int, int, int, int]
"""`(source stage, source chunk, stage, chunk)` of a way of activations between two stages; gradients go back."""


@dataclass(frozen=True)
class Place:
    """Describe the place of a part on a stage: its number, its chunk, and whether it is an end of the model."""

    part_id: int
    chunk_id: int = 0
    is_first: bool = False
    is_last: bool = False


@dataclass(frozen=True)
class Layout:
    """Map places to parts with `placement[(stage_id, chunk_id)]`, as in `Schedule.placement`.

    A part has several places if a pipeline goes both ways (Chimera). The place with the lowest chunk is its home: there
    the part is saved, and there evaluation runs it.

    `bounds` are the bounds of a partition by hand: the first layer of each part, and the end. None: the module's own
    method of partition gives them.
    """

    num_stages: int
    placement: Mapping[tuple[int, int], int] = field(hash=False)
    bounds: tuple[int, ...] | None = None

    @property
    def chunks_per_stage(self) -> int:
        return len(self.placement) // self.num_stages

    @cached_property
    def num_parts(self) -> int:
        return len(set(self.placement.values()))

    @property
    def is_plain(self) -> bool:
        """Return whether stage k holds part k and nothing else, as with DeepSpeed's own engine."""
        return all(stage_id == part_id and chunk_id == 0 for (stage_id, chunk_id), part_id in self.placement.items())

    @property
    def has_copies(self) -> bool:
        """Return whether parts live at several places."""
        return self.num_parts < len(self.placement)

    def places(self, stage_id: int) -> tuple[Place, ...]:
        """Return the places of a stage, by chunk."""
        parts = [self.placement[stage_id, chunk_id] for chunk_id in range(self.chunks_per_stage)]
        return tuple(Place(p, chunk_id, p == 0, p == self.num_parts - 1) for chunk_id, p in enumerate(parts))

    def homes(self, part_id: int) -> list[tuple[int, int]]:
        """Return the places (stage, chunk) of a part, its home first."""
        return sorted((place for place, part in self.placement.items() if part == part_id), key=lambda at: at[::-1])

    def owner(self, part_id: int) -> int:
        """Return the stage that saves the part."""
        return self.homes(part_id)[0][0]

    @cached_property
    def loss_stage(self) -> int:
        """Return the stage that knows the loss of a batch: the owner of the last part."""
        return self.owner(self.num_parts - 1)

    def stages_with_end(self, first: bool) -> tuple[int, ...]:
        """Return the stages that hold the first part, or the last one: they draw inputs, or labels."""
        return tuple(sorted(stage_id for stage_id, _ in self.homes(0 if first else self.num_parts - 1)))

    @cached_property
    def drawing_stages(self) -> tuple[int, ...]:
        return tuple(sorted({*self.stages_with_end(True), *self.stages_with_end(False)}))

    def problem_of(self, schedule: Schedule) -> str | None:
        """Say why the links of this layout cannot carry a schedule; None: they can."""
        chunks: dict[int, int] = {}
        for action in itertools.chain.from_iterable(schedule.orders) if self.has_copies else ():
            if chunks.setdefault(action.micro_batch_id, action.chunk_id) != action.chunk_id:
                return (
                    f"schedule {schedule.name!r}: micro-batch {action.micro_batch_id} changes between chunks; where "
                    "parts are at several places, a micro-batch must stay in one chunk from the first part to the last"
                )
        return None

    def wires(self) -> list[WireEnds]:
        """Return the ends of all activation wires. A copy of a part sends to the next part's copy with its chunk."""
        wires = []
        for part_id in range(self.num_parts - 1):
            targets = self.homes(part_id + 1)
            for source in self.homes(part_id):
                # a micro-batch stays in its direction, so copies only talk to the copy beside them
                same = [target for target in targets if target[1] == source[1]] if self.has_copies else []
                wires += [(*source, *target) for target in same or targets if source[0] != target[0]]
        return wires

    def tag(self, ends: WireEnds) -> int:
        """Return a tag that tells a wire's messages from others between the same two stages, in the same direction."""
        _, source_chunk, _, target_chunk = ends
        return source_chunk * self.chunks_per_stage + target_chunk


_Way = TypeVar("_Way")


def rounds_of(ways: Iterable[_Way], ends: Callable[[_Way], tuple[int, int]]) -> list[list[_Way]]:
    """Group ways between stages into rounds with at most one way per stage; `ends` gives the stages of a way."""
    rounds: list[list[_Way]] = []
    for way in ways:
        # a stage in two ways of one round would keep both partners waiting
        apart = (members for members in rounds if all(set(ends(other)).isdisjoint(ends(way)) for other in members))
        members = next(apart, None)
        if members is None:
            rounds.append([way])
        else:
            members.append(way)
    return rounds


def placement_of(schedule: str, num_stages: int, chunks_per_stage: int) -> Placement:
    """Return the placement of parts for a schedule, by its name or from its file. Raises ScheduleError."""
    if schedule.endswith(".csv"):
        return load(schedule).placement
    return placement_for(schedule, num_stages, chunks_per_stage)


def layout_of(config: TeraPipeConfig, module: Any) -> Layout:
    """Return the layout that `config` needs, with the bounds of a partition by hand if there is one.

    Raises:
        TeraPipeConfigError: the schedule has no layout on these stages, or the partition has another number of parts.
    """
    bounds, layout = _partition_by_hand(config, module), _layout_of_schedule(config, module.num_stages)
    # a partition sets the number of parts, and so does the schedule
    if bounds is not None and len(bounds) != layout.num_parts + 1:
        raise TeraPipeConfigError(
            f"partition = {list(bounds)}: has {len(bounds) - 1} parts, and the schedule needs "
            f"{layout.num_parts} ({layout.num_stages} stages, {layout.chunks_per_stage} chunks each"
            f"{', every part twice' if layout.has_copies else ''}): give {layout.num_parts + 1} numbers, or another "
            "schedule or chunks_per_stage"
        )
    return replace(layout, bounds=bounds)


def _layout_of_schedule(config: TeraPipeConfig, num_stages: int) -> Layout:
    what = f"terapipe.schedule = {config.schedule!r}"
    if config.schedule.endswith(".csv"):
        schedule = load(config.schedule)
        if schedule.num_stages != num_stages:
            raise TeraPipeConfigError(
                f"{what}: it is for {schedule.num_stages} stages, and the module has {num_stages}; write one for "
                f"{num_stages}"
            )
        layout = Layout(num_stages, schedule.placement)
        for stage_id in range(num_stages):
            if len({place.part_id for place in layout.places(stage_id)}) < layout.chunks_per_stage:
                raise TeraPipeConfigError(f"{what}: stage {stage_id} holds a part twice; place it there once")
        for chunk_id in range(layout.chunks_per_stage if layout.has_copies else 0):
            held = {layout.placement[stage_id, chunk_id] for stage_id in range(num_stages)}
            if missing := sorted({*layout.placement.values()} - held):
                raise TeraPipeConfigError(
                    f"{what}: parts are at several places, and chunk {chunk_id} lacks {missing}: a micro-batch stays "
                    "in one chunk from the first part to the last, so place every part once in each chunk"
                )
        return layout
    name = ("interleaved" if config.chunks_per_stage > 1 else "1f1b") if config.schedule == "auto" else config.schedule
    try:
        return Layout(num_stages, placement_for(name, num_stages, config.chunks_per_stage))
    except ScheduleError as error:
        raise TeraPipeConfigError(f"{what}: {error.reason}") from None


def _partition_by_hand(config: TeraPipeConfig, module: Any) -> tuple[int, ...] | None:
    """Return the partition that the section or the `partition` of `module` gives; None: neither does.

    Raises:
        TeraPipeConfigError: they contradict each other, or do not end with the number of layers (see `bounds_in`).
    """
    of_section, of_module = config.partition, getattr(module, "partition", None)
    own = tuple(of_module) if isinstance(of_module, (list, tuple)) else None
    given = None if of_section is None else bounds_in(module._layer_specs, of_section)
    if of_section is not None and given is None:
        num_layers, strategy = len(module._layer_specs), config.planned
        if strategy is not None:
            of_model = f" of {strategy.model}" if strategy.model else ""
            num_decoders = decoder_layers(_kinds(module._layer_specs))[1]
            raise TeraPipeConfigError(
                f"terapipe.strategy = {config.strategy!r}: it is for the {strategy.partition[-1]} layers{of_model}, "
                f"embedding and head among them, and the module has {num_layers}, {num_decoders} of them "
                "decoder layers: plan again for this model, or build the one that was planned for"
            )
        raise TeraPipeConfigError(
            f"terapipe.partition = {list(of_section)}: ends with {of_section[-1]}, and the module has {num_layers} "
            f"layers, embedding and head among them; end it with {num_layers}"
        )
    if given is not None and own is not None and given != own:
        raise TeraPipeConfigError(
            f"terapipe.partition = {list(given)}: the module was built with partition={list(own)}; give the same, or "
            "leave one of them out"
        )
    return own if given is None else given


def bounds_in(specs: Sequence[Any], partition: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first layer of each part of a module with these layers, and the end; None if they do not fit."""
    return bounds_among(_kinds(specs), partition)


def _kinds(specs: Sequence[Any]) -> list[type]:
    return [getattr(spec, "typename", type(spec)) for spec in specs]
