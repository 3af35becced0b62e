"""Test the places of parts, their wires, the cuts of layers, and the copies that count."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.models.gpt import GPTConfig, gpt_layers
from terapipe_ds.planner.strategy import Cluster, plan_strategy
from terapipe_ds.runtime.layout.layout import Layout, Place, bounds_in, layout_of
from terapipe_ds.runtime.layout.tied_and_copied import LOSS, copies_may_differ, owners_of, tied_may_differ
from terapipe_ds.runtime.links.groups import wires_apart
from terapipe_ds.schedule import build, placement_for, to_csv
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


# -- where a strategy that was planned by the size of a model cuts the layers of a module ------------------------------


@pytest.mark.parametrize(("changes", "partition", "expected"), [
    ({}, [0, 3, 6], (0, 3, 7)),  # the norm goes with the head
    ({"positions": "learned"}, [0, 3, 6], (0, 4, 8)),  # and the positions with the embedding
    ({"positions": "learned", "tied_embedding": True}, [0, 1, 5, 6], (0, 2, 6, 8)),  # each end alone
    ({}, [0, 3, 7], (0, 3, 7)),  # planned for the layers that there are
    ({}, [0, 3, 5], None),
    ({}, [0, 3, 8], None),
    ({"num_layers": 5}, [0, 3, 6], None),
])  # fmt: skip
def test_what_a_module_has_besides_goes_with_its_ends(
    changes: dict[str, Any], partition: list[int], expected: tuple[int, ...] | None
) -> None:
    assert bounds_in(gpt_layers(GPTConfig(**{"num_layers": 4, **changes})), partition) == expected


def test_layers_without_ends_are_taken_as_they_are_or_not_at_all() -> None:
    alike = [LayerSpec(nn.Linear, 4, 4)] * 4
    tied = [TiedLayerSpec("a", nn.Linear, 4, 4), nn.ReLU(), *[LayerSpec(nn.Conv1d, 4, 4, 1)] * 3, nn.ReLU()]
    assert bounds_in(alike, [0, 2, 4]) == (0, 2, 4) and bounds_in(alike, [0, 2, 6]) is None
    assert bounds_in(tied, [0, 2, 5]) == (0, 3, 6)


def test_a_strategy_for_a_size_fits_the_model_of_that_size() -> None:
    strategy = plan_strategy("tiny", Cluster("v100", 1, 2), global_batch_size=8, sequence_length=256)
    layers = gpt_layers(GPTConfig.from_name("tiny"))
    module_bounds = bounds_in(layers, strategy.partition)
    assert module_bounds is not None and module_bounds[-1] == len(layers)


# -- when copies of a part may come to differ by rounding, and whose values count --------------------------------------

CHIMERA = Layout(4, placement_for("chimera", 4, 1))
PARAMETERS = [nn.Parameter(torch.zeros(3))]


class Own(torch.optim.Adam):
    """Of somebody who rounds in a way of their own."""


@pytest.mark.parametrize(("layout", "optimizer", "num_replicas", "may_differ"), [
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 1, False),
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 2, False),  # two numbers have one sum
    (CHIMERA, torch.optim.AdamW(PARAMETERS), 3, True),
    (CHIMERA, Own(PARAMETERS), 1, True),
    (CHIMERA, torch.optim.Adam(PARAMETERS, fused=True), 1, True),  # one update in some ten thousand was seen to
    (CHIMERA, None, 3, False),
    (Layout(4, placement_for("1f1b", 4, 1)), Own(PARAMETERS), 3, False),
])  # fmt: skip
def test_when_copies_may_differ(layout: Layout, optimizer: Any, num_replicas: int, may_differ: bool) -> None:
    assert copies_may_differ(layout, optimizer, num_replicas) == may_differ


def test_when_tied_weights_may_differ() -> None:
    weight = nn.Parameter(torch.zeros(3))
    comms = {"words": {"module": SimpleNamespace(weight=weight), "weight_attr": ["weight"]}}
    tied, alone = (SimpleNamespace(tied_comms=c, _recursive_getattr=getattr) for c in (comms, {}))
    usual = torch.optim.Adam(PARAMETERS, fused=True)
    assert not tied_may_differ(tied, usual) and not tied_may_differ(tied, None)
    for optimizer in (Own(PARAMETERS), torch.optim.Adafactor(PARAMETERS)):
        weight.requires_grad = True
        assert tied_may_differ(tied, optimizer) and not tied_may_differ(alone, optimizer)
        weight.requires_grad = False
        assert not tied_may_differ(tied, optimizer)  # under adapters there is nothing to send


def test_the_owner_of_a_tied_layer_is_that_of_its_first_part_and_of_the_loss_that_of_the_last() -> None:
    """Five layers in four parts, the first tied to the last."""
    tied = [TiedLayerSpec("words", nn.Linear, 2, 2) for _ in range(2)]
    specs = [tied[0], *(LayerSpec(nn.Linear, 2, 2) for _ in range(3)), tied[1]]
    module = SimpleNamespace(parts=[0, 2, 3, 4, 5], _layer_specs=specs)
    assert owners_of(module, CHIMERA) == {"words": 0, 1: 0, 2: 1, 3: 2, LOSS: 3}
    swapped = Layout(2, {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 1})
    module.parts = [0, 3, 5]
    assert owners_of(module, swapped) == {"words": 1, 1: 1, 2: 1, 3: 0, LOSS: 0}


def test_an_order_from_a_file_fits_the_stages_and_places_a_part_once_on_each(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(to_csv(build("chimera", 2, 2, 1)))
    assert layout(str(path), 2).has_copies
    with pytest.raises(TeraPipeConfigError, match="it is for 2 stages, and the module has 3; write one for 3"):
        layout(str(path), 3)
    path.write_text("placement,0/0,1/1\nF0.0c0,F1.0c1,B0.0c0,B1.0c1\nF0.0c0,B0.0c0,F1.0c1,B1.0c1\n")
    with pytest.raises(TeraPipeConfigError, match="stage 0 holds a part twice; place it there once"):
        layout(str(path), 2)
    # training stays in chunk 1, and an evaluation runs each part at its place in the lowest chunk
    path.write_text("placement,2/0,2/1,0/2\n" + "F0.0c1,B0.0c1\n" * 3)
    with pytest.raises(TeraPipeConfigError, match=r"chunk 0 lacks \[1\]: .*place every part once in each chunk"):
        layout(str(path), 3)
