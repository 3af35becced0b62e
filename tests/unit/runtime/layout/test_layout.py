"""Where parts are, and which wires follow from it."""

from types import SimpleNamespace

import pytest

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.runtime.layout.layout import Layout, Place, layout_of
from terapipe_ds.runtime.links.groups import wires_apart
from terapipe_ds.schedule import build, placement_for
from terapipe_ds.schedule.action import Action


def layout(schedule: str, num_stages: int, chunks: int = 1) -> Layout:
    config = TeraPipeConfig(enabled=True, schedule=schedule, chunks_per_stage=chunks, slices=2)
    return layout_of(config, SimpleNamespace(num_stages=num_stages))


def test_a_plain_stage_holds_the_part_of_its_number() -> None:
    plain = Layout(3, placement_for("1f1b", 3, 1))
    assert plain.is_plain and not plain.has_copies and plain.num_parts == 3
    assert plain.places(1) == (Place(1, 0, False, False),)
    assert plain.loss_stage == 2 and plain.drawing_stages == (0, 2)


def test_with_chimera_every_part_is_at_two_places_and_saved_at_its_home() -> None:
    both = layout("chimera", 4)
    assert both.has_copies and both.num_parts == 4
    assert both.homes(1) == [(1, 0), (2, 1)] and both.owner(3) == 3
    assert both.places(0) == (Place(0, 0, True, False), Place(3, 1, False, True))
    assert both.stages_with_end(first=True) == both.stages_with_end(first=False) == both.drawing_stages == (0, 3)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "chunks"),
    [("seq1f1b", 3, 1), ("interleaved", 2, 2), ("seq1f1b-interleaved", 3, 3), ("chimera", 4, 1), ("chimera", 2, 2)],
)
def test_the_wires_are_those_that_schedules_send_over(schedule: str, num_stages: int, chunks: int) -> None:
    built = build(schedule, num_stages, 2 * num_stages, 2, chunks_per_stage=chunks)
    chunk_of = {(stage, part): chunk for (stage, chunk), part in built.placement.items()}

    def wire(stage_id: int, action: Action) -> tuple[int, int, int, int]:
        return stage_id, action.chunk_id, action.peer_stage_id, chunk_of[action.peer_stage_id, action.peer_part_id]

    sent = {
        wire(stage_id, action)
        for stage_id in range(num_stages)
        for action in built.for_stage(stage_id).actions
        if action.kind.value == "SA"
    }
    assert sent == set(layout(schedule, num_stages, chunks).wires())


@pytest.mark.parametrize(("schedule", "chunks"), [("seq1f1b", 2), ("1f1b", 3), ("chimera", 3)])
def test_a_schedule_that_cannot_have_so_many_chunks(schedule: str, chunks: int) -> None:
    with pytest.raises(TeraPipeConfigError, match=rf"chunks_per_stage is {chunks}: schedule '{schedule}'"):
        layout(schedule, 2, chunks)
    with pytest.raises(TeraPipeConfigError, match="even number of stages"):
        layout("chimera", 3)


def test_auto_leaves_the_choice_among_those_of_the_layout() -> None:
    assert layout("auto", 2).is_plain
    assert layout("auto", 2, 2).placement == layout("interleaved", 2, 2).placement


@pytest.mark.parametrize(("name", "stages", "most"), [("seq1f1b", 8, 2), ("zbv", 8, 4), ("chimera", 8, 4)])
def test_groups_that_keep_an_order_have_no_two_wires_of_a_stage(name: str, stages: int, most: int) -> None:
    """Or receives that are posted ahead would wait for one another in a circle."""
    of_schedule = Layout(stages, build(name, stages, 16, 1).placement)
    rounds = wires_apart(of_schedule)
    assert sorted(wire for wires in rounds for wire in wires) == sorted(of_schedule.wires())
    for wires in rounds:
        ends = [stage for source, _, target, _ in wires for stage in (source, target)]
        assert len(ends) == len(set(ends))
    assert len(rounds) <= most
