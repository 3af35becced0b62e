"""Optimizer states in one order, brought to another: compared with states made in that order from the start."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from terapipe_ds.runtime.checkpoints.engine_methods import LoadOptions, _problem_of_form, refusing_other_optimizer
from terapipe_ds.runtime.checkpoints.optimizer_forms import Content, Groups, Piece, Shapes, Shard, StateError, StateForm
from terapipe_ds.runtime.checkpoints.other_layouts import Holder, Orders, routes_between, shards_of

STEP = 7


def value_of(name: str, key: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers that no other parameter or key has."""
    first = 1e6 * (1 + ["fp32", "exp_avg", "exp_avg_sq"].index(key)) + 1e3 * int(name)
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + first


def flat_state(groups: Groups, shapes: Shapes, count: int, index: int, strips: bool) -> dict[str, Any]:
    """What ZeRO saves, by its description: all parameters of a group in one vector, with zeros up to a multiple of
    2 * count, of which a replica has one of count equal parts."""
    states, masters, paddings, mappings = {}, [], [], []
    for number, names in enumerate(groups):
        size = sum(math.prod(shapes[name]) for name in names)
        zeros = -size % (2 * count)
        part = (size + zeros) // count
        owner = [(name, i) for name in names for i in range(math.prod(shapes[name]))] + [("", 0)] * zeros
        vectors = {
            key: torch.cat([*(value_of(name, key, shapes[name]).reshape(-1) for name in names), torch.zeros(zeros)])
            for key in ("fp32", "exp_avg", "exp_avg_sq")
        }
        mine = {key: vector.double()[index * part : (index + 1) * part] for key, vector in vectors.items()}
        here = [name for name, _ in owner[index * part : (index + 1) * part]]
        padding = here.count("")
        masters.append(mine["fp32"][: part - padding] if strips else mine["fp32"])
        paddings.append(padding if strips else zeros * (index == count - 1))
        found = {n: fragment_address(numel=here.count(n), start=here.index(n)) for n in dict.fromkeys(here) if n}
        mappings.append(found)
        states[number] = {"exp_avg": mine["exp_avg"], "exp_avg_sq": mine["exp_avg_sq"], "step": STEP}
    param_groups = [{"lr": number, "params": [number]} for number in range(len(groups))]
    return {
        "base_optimizer_state": {"state": states, "param_groups": param_groups},
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "param_slice_mappings": mappings,
        "kept": "as it is",
    }


def torch_state(groups: Groups, shapes: Shapes) -> dict[str, Any]:
    names = [name for group in groups for name in group]
    states = {
        i: {"step": torch.tensor(float(STEP))} | {k: value_of(name, k, shapes[name]) for k in ("exp_avg", "exp_avg_sq")}
        for i, name in enumerate(names)
    }
    numbers = iter(range(len(names)))
    param_groups = [{"lr": 0.1, "params": [next(numbers) for _ in group]} for group in groups]
    return {"state": states, "param_groups": param_groups}


def zero_form(count: int, strips: bool) -> StateForm:
    return StateForm(
        "base_optimizer_state", "single_partition_of_fp32_groups", is_flat=True, num_partitions=count,
        alignment=2 * count, lists_pieces=True, strips=strips,
    )  # fmt: skip


def brought(
    form: StateForm, states: dict[Holder, Any], before: Orders, after: Orders, shapes: Shapes
) -> dict[Holder, Any]:
    """What all have after their exchange, which takes place here without ranks."""
    sources, targets = (shards_of(form, orders, shapes) for orders in (before, after))
    held = {at: sources[at].take(state) for at, state in states.items()}
    received: dict[Holder, dict[str, list[tuple[Piece, Content]]]] = {at: {} for at in states}
    for (source, target), pieces in routes_between(sources, targets, {}).items():
        for piece in pieces:
            received[target].setdefault(piece.name, []).append((piece, held[source][piece]))
    return {at: targets[at].put(state, received[at]) for at, state in states.items()}


def assert_same(ours: Any, expected: Any, where: str = "") -> None:
    if torch.is_tensor(expected):
        assert torch.equal(ours, expected), where
    elif isinstance(expected, dict):
        assert list(ours) == list(expected) if "mappings" in where else set(ours) == set(expected), where
        for key in expected:
            assert_same(ours[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(ours) == len(expected), where
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_same(a, b, f"{where}/{i}")
    else:
        assert ours == expected, where


@st.composite
def moves_to_make(draw: Any) -> tuple[Shapes, Orders, Orders]:
    """Parameters, and two ways of handing them to stages, some to several; each of one group or the other."""
    names = [str(i) for i in range(draw(st.integers(2, 9)))]
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=2)
    shapes = {name: tuple(draw(sizes)) for name in names}
    group_of = {name: i % 2 for i, name in enumerate(names)}
    num_stages = draw(st.integers(1, 3))
    orders = []
    for _ in range(2):
        mixed = draw(st.permutations(names))
        holders = {name: draw(st.sets(st.integers(0, num_stages - 1), min_size=1)) for name in names}
        orders.append(
            tuple(
                tuple(tuple(n for n in mixed if stage in holders[n] and group_of[n] == group) for group in range(2))
                for stage in range(num_stages)
            )
        )
    return shapes, orders[0], orders[1]


@given(case=moves_to_make(), count=st.integers(1, 3), strips=st.booleans())
def test_flat_states(case: tuple[Shapes, Orders, Orders], count: int, strips: bool) -> None:
    shapes, before, after = case
    form = zero_form(count, strips)
    places = [Holder(stage, index) for stage in range(len(before)) for index in range(count)]
    states, expected = (
        {at: flat_state(order[at.stage_id], shapes, count, at.partition, strips) for at in places}
        for order in (before, after)
    )
    ours = brought(form, states, before, after, shapes)
    for at in places:
        assert_same(ours[at], expected[at])


@given(case=moves_to_make())
def test_states_by_parameter(case: tuple[Shapes, Orders, Orders]) -> None:
    shapes, before, after = case
    states, expected = (
        {Holder(i, 0): torch_state(groups, shapes) for i, groups in enumerate(order)} for order in (before, after)
    )
    ours = brought(StateForm(), states, before, after, shapes)
    for at, state in expected.items():
        assert_same(ours[at], state)


def test_states_before_the_first_step_are_none() -> None:
    shapes, groups = {"0": (2,), "1": (3,)}, (("0", "1"),)
    state = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    ours = brought(StateForm(), {Holder(0, 0): state}, (groups,), ((("1", "0"),),), shapes)
    assert ours == {Holder(0, 0): state}


def test_the_momentum_of_a_sparse_embedding_moves_as_it_is() -> None:
    shapes = {"0": (4, 3), "1": (2,)}
    table, bias = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([table, bias], lr=0.1, momentum=0.9)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 3), (4, 3))
    bias.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    before, after = ((("0", "1"),),), ((("1", "0"),),)
    ours = brought(StateForm(), {Holder(0, 0): state}, before, after, shapes)[Holder(0, 0)]["state"]
    sparse, dense = ours[1]["momentum_buffer"], ours[0]["momentum_buffer"]
    assert sparse.is_sparse and torch.equal(sparse.to_dense(), state["state"][0]["momentum_buffer"].to_dense())
    assert torch.equal(dense, state["state"][1]["momentum_buffer"])
    with pytest.raises(StateError, match="momentum_buffer of 1 has shape"):
        Shard(StateForm(), after[0], shapes, 0).take(state)


SHAPES: Shapes = {"0": (2, 3), "1": (6,), "2": (4,)}


@pytest.mark.parametrize("claimed", [("0", "1"), ("1", "0", "2"), ("2", "0")])
def test_states_of_other_parameters_are_not_taken(claimed: tuple[str, ...]) -> None:
    saved: Groups = (("0", "2"),)
    with pytest.raises(StateError):
        Shard(StateForm(), (claimed,), SHAPES, 0).take(torch_state(saved, SHAPES))
    with pytest.raises(StateError):
        Shard(zero_form(2, strips=True), (claimed,), SHAPES, 1).take(flat_state(saved, SHAPES, 2, 1, True))
    # two of six elements: only the list of where they stand tells them apart, and DeepSpeed saves one
    with pytest.raises(StateError, match=r"0 is at None where \(0, 6\)"):
        Shard(zero_form(1, strips=True), (("0",),), SHAPES, 0).take(flat_state((("1",),), SHAPES, 1, 0, True))


@pytest.mark.parametrize("kept", [{"state1": torch.ones(6)}, [torch.ones(6)], torch.ones(6).to_sparse()])
def test_vectors_within_other_values_are_not_taken(kept: Any) -> None:
    """As bitsandbytes and LBFGS keep them: nobody can cut what belongs to one parameter."""
    state = flat_state((("1",),), SHAPES, 1, 0, True)
    state["base_optimizer_state"]["state"][0]["kept"] = kept
    with pytest.raises(StateError, match="kept of group 0"):
        Shard(zero_form(1, strips=True), (("1",),), SHAPES, 0).take(state)


def test_copies_are_saved_as_their_owner_has_them() -> None:
    """Two stages hold both parameters, with moments that differ by rounding: what counts is that of the owner."""
    shapes, both = {"1": (2,), "2": (2,)}, ((("1", "2"),), (("2", "1"),))
    after: Orders = ((("1",),), (("2",),))

    def moves(owners: dict[str, int]) -> set[tuple[int, int, str]]:
        found = routes_between(shards_of(StateForm(), both, shapes), shards_of(StateForm(), after, shapes), owners)
        return {(s.stage_id, t.stage_id, piece.name) for (s, t), pieces in found.items() for piece in pieces}

    assert moves({}) == {(0, 0, "1"), (1, 1, "2")}
    assert moves({"1": 1, "2": 0}) == {(1, 0, "1"), (0, 1, "2")}
    assert moves({"1": 0}) == {(0, 0, "1"), (1, 1, "2")}


class _Newer(torch.optim.SGD):
    """Have a setting that groups lack, and one that states of an older version lack."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.defaults["note"] = "own"
        for group in self.param_groups:
            group["newer"] = self.defaults["newer"] = 1


def test_a_load_of_the_same_optimizer_is_not_taken_for_another_one() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    saved, newer = torch.optim.SGD(parameters, lr=0.2), _Newer(parameters)
    with refusing_other_optimizer(newer):
        newer.load_state_dict(saved.state_dict())
    assert newer.param_groups[0]["lr"] == 0.2
    with refusing_other_optimizer(None):
        pass
    with pytest.raises(KeyError, match="lr"), refusing_other_optimizer(saved):  # of a scheduler, for example
        raise KeyError("lr")


@pytest.mark.parametrize(("old", "form"), [
    ({"zero_optimization": True}, "in fp32 with ZeRO stage 1"),
    ({"bfloat16": {"enabled": True}}, "in bf16 with ZeRO stage 0"),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}, "zero_optimization": True}, "in fp32 with ZeRO stage"),
])  # fmt: skip
def test_old_names_in_the_saved_config_tell_its_form(old: dict[str, Any], form: str) -> None:
    off: Any = dict.fromkeys(("bfloat16_enabled", "fp16_enabled", "zero_optimization"), lambda: False)
    engine: Any = SimpleNamespace(**off, zero_optimization_stage=lambda: 0, optimizer=object())
    saved = {"ds_config": old, "optimizer": {}}
    problem = _problem_of_form(engine, saved, Path(), LoadOptions(True, True, True, False, None))
    assert problem is not None and f"the checkpoint was saved {form}" in problem
