"""Groups that keep the order of what is posted: a stage has two wires in none of them, so that no schedule stops."""

from __future__ import annotations

import pytest

from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import wires_apart
from terapipe_ds.schedule import build


@pytest.mark.parametrize(("name", "stages", "most"), [("seq1f1b", 8, 2), ("zbv", 8, 4), ("chimera", 8, 4)])
def test_no_group_has_two_wires_of_a_stage(name: str, stages: int, most: int) -> None:
    layout = Layout(stages, build(name, stages, 16, 1).placement)
    rounds = wires_apart(layout)
    assert sorted(wire for wires in rounds for wire in wires) == sorted(layout.wires())
    for wires in rounds:
        ends = [stage for source, _, target, _ in wires for stage in (source, target)]
        assert len(ends) == len(set(ends))
    assert len(rounds) <= most


def test_one_stage_has_no_wires() -> None:
    assert wires_apart(Layout.plain(1)) == []
