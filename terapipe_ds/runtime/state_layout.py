"""Optimizer states in checkpoints stand as DeepSpeed's own engine would have them, whatever the layout of this one.

A stage that holds several parts has other layers than the stage of that number in DeepSpeed's own cut. Its states are
brought to where that has them while a checkpoint is saved, and back while one is loaded, by the names of parameters, of
which every checkpoint has a list. What cannot be brought there is saved so that only this package can read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import done_on_each_rank, raise_on_every_rank
from terapipe_ds.runtime.checkpoint_save import gathered
from terapipe_ds.runtime.checkpoints import read_states
from terapipe_ds.runtime.copies import owners_of
from terapipe_ds.runtime.state_forms import StateError, StateForm, form_of
from terapipe_ds.runtime.state_moves import Place, moved
from terapipe_ds.runtime.state_order import (
    Groups,
    Orders,
    StageParameters,
    layer_of,
    orders_of,
    shapes_of,
    stage_parameters,
    stock_orders,
)

LISTED = "terapipe_parameters"  # in the states of a rank: names of parameters by group of the optimizer
_GUARDED = "terapipe_states_of_this_layout"  # in place of optimizer states that DeepSpeed's own engine would mistake
OUR_KEYS = (LISTED, _GUARDED)
_UNLIKE = (StateError, KeyError, IndexError, TypeError, AttributeError, ValueError)  # a state is not of its form
_MODULE_ONLY = "Load the parameters alone, with load_module_only=True; moments begin anew"


@dataclass(frozen=True)
class States:
    """The optimizer states of this engine's pipeline.

    Args:
        stuck: why they cannot be brought into another order.
        stock_unknown: why nobody knows the order that DeepSpeed's own engine would have them in.
    """

    engine: Any
    form: StateForm | None
    stages: Sequence[StageParameters]
    stuck: str | None
    stock_unknown: str | None

    @property
    def orders(self) -> Orders:
        return orders_of(self.stages)

    @property
    def mine(self) -> Groups:
        return self.orders[self.engine.stage_id]

    def stock(self) -> Orders | None:
        """DeepSpeed's own order; None where nobody knows it."""
        if self.stock_unknown is not None:
            return None
        return self.orders if self.engine._layout.is_plain else stock_orders(self.engine.module, self.stages)

    @property
    def here(self) -> Place:
        assert self.form is not None
        cut = self.form.num_partitions > 1
        return Place(self.engine.stage_id, self.engine.grid.get_data_parallel_id() if cut else 0)

    def rank_of(self, place: Place) -> int:
        assert self.form is not None
        changes = {"data": place.partition} if self.form.num_partitions > 1 else {}
        return int(self.engine.grid.stage_to_global(place.stage_id, **changes))

    def owners(self) -> dict[str, int]:
        """The stage whose states of a parameter with copies are saved: the others' follow it but for rounding."""
        if not self.engine._layout.has_copies:
            return {}
        by_layer = owners_of(self.engine.module, self.engine._layout)
        return {name: by_layer[layer] for name in shapes_of(self.stages) if (layer := layer_of(name)) in by_layer}

    def reordered(
        self, state: Mapping[str, Any], before: Orders, after: Orders, owners: Mapping[str, int]
    ) -> dict[str, Any]:
        """``state`` of this rank in another order. A collective over all ranks.

        Raises:
            TeraPipeConfigError: on every rank, where a state is not what it should be.
        """
        assert self.form is not None
        shapes, here, problem, held = shapes_of(self.stages), self.here, None, {}
        try:
            held = self.form.take(state, before[here.stage_id], shapes, here.partition)
        except _UNLIKE as error:
            problem = f"the optimizer states are not of this model: {type(error).__name__}: {error}. {_MODULE_ONLY}"
        raise_on_every_rank(problem)
        held = moved(self.form, held, before, after, shapes, here, self.rank_of, self.engine._groups.world, owners)
        stage_id, partition = here.stage_id, here.partition
        return self.form.put(state, before[stage_id], after[stage_id], shapes, partition, held)


def states_of(engine: Any) -> States | None:
    """A collective over all ranks. None where there is no optimizer."""
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        return None
    form, mine, stuck = form_of(engine.optimizer), stage_parameters(engine), None
    if engine.has_moe_layers or form is None:
        stuck = f"{type(engine.optimizer).__name__} keeps states of another form"
    elif form.num_partitions > 1 and form.num_partitions != engine.grid.data_parallel_size:
        stuck = f"states are cut in {form.num_partitions} for {engine.grid.data_parallel_size} replicas"
    told = gathered((mine, stuck))
    stages = [told[engine.grid.stage_to_global(stage_id)][0] for stage_id in range(engine.num_stages)]
    if len({len(stage.groups) for stage in stages}) > 1:
        stuck = "stages have different numbers of groups"
    stuck = stuck or next((each for _, each in told if each is not None), None)
    unknown = None if engine._layout.is_plain else next((each.problem for each, _ in told if each.problem), None)
    return States(engine, form, stages, stuck, unknown)


def described_layout(engine: Any) -> dict[str, Any]:
    """For the list of a checkpoint's files: where the layers of the run that saved it stood."""
    layout = engine._layout
    places = [[place.part_id for place in layout.places(stage_id)] for stage_id in range(layout.num_stages)]
    return {"parts_by_stage": places, "first_layers": [int(layer_id) for layer_id in engine.module.parts]}


# -- saving ------------------------------------------------------------------------------------------------------------


@contextmanager
def saved_as_stock(engine: Any) -> Iterator[dict[str, Any]]:
    """While DeepSpeed saves, the optimizer gives its states as DeepSpeed's own engine would. A collective over all
    ranks.

    Yields:
        What to save with the client's state.
    """
    states = states_of(engine)
    if states is None:
        yield {}
        return
    stock, problem, made = states.stock(), states.stuck or states.stock_unknown, None
    if stock == states.orders:
        yield {LISTED: states.mine}
        return
    if stock is not None and problem is None:
        try:
            made = states.reordered(engine.optimizer.state_dict(), states.orders, stock, states.owners())
        except TeraPipeConfigError as error:  # on every rank
            problem = str(error)
    if stock is None or made is None:
        guarded = {_GUARDED: engine.optimizer.state_dict(), "reason": problem}
        with _replaced(engine.optimizer, "state_dict", lambda: guarded):
            yield {LISTED: states.mine, _GUARDED: problem}
        return
    mine, shapes = stock[engine.stage_id], shapes_of(states.stages)
    by_group = [OrderedDict((name, torch.Size(shapes[name])) for name in names) for names in mine]
    with (
        _replaced(engine.optimizer, "state_dict", lambda: made),
        _replaced(engine, "_get_zero_param_shapes", lambda: by_group),
    ):
        yield {LISTED: mine}


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """``function`` as the attribute ``name`` of one object."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """What the file of a rank says of the optimizer states that were saved with it.

    Args:
        listed: the names of their parameters; None: DeepSpeed's own engine, without ZeRO, does not say.
        guarded: why only an engine of the same layout can read them.
        problem: why they cannot be those of the parameters that DeepSpeed's own engine would have at this stage.
    """

    listed: Groups | None
    guarded: str | None
    problem: str | None


@contextmanager
def loaded_from(engine: Any, folder: Path | None) -> Iterator[None]:
    """While DeepSpeed loads, the optimizer takes states in the order of the checkpoint. A collective over all ranks.

    Args:
        folder: of the checkpoint; None: there is none, or no states of it are to be loaded.

    Raises:
        TeraPipeConfigError: on every rank, before anything is loaded: the states are in an order that cannot be brought
            into this engine's.
    """
    states = None if folder is None else states_of(engine)
    saved = None if folder is None or states is None else _saved(states, folder)
    if states is None or saved is None:
        yield
        return
    orders, guarded = _orders_of_checkpoint(states, saved), _guarded(saved)
    raise_on_every_rank(saved[engine.stage_id].problem or _problem(states, orders))
    if orders == states.orders and guarded is None:
        yield
        return
    load = engine.optimizer.load_state_dict

    def load_in_order(given: Any = None, *args: Any, **kwargs: Any) -> Any:
        by_replica = "state_dict_list" in kwargs  # ZeRO's, of which a rank reads its own
        number = engine.grid.get_data_parallel_id()
        state = kwargs["state_dict_list"][number] if by_replica else given
        made = state if guarded is None else state[_GUARDED]
        if orders != states.orders:
            made = states.reordered(made, orders, states.orders, {})
        if not by_replica:
            return load(made, *args, **kwargs)
        every = [made if i == number else each for i, each in enumerate(kwargs.pop("state_dict_list"))]
        return load(*args, state_dict_list=every, **kwargs)

    with _replaced(engine.optimizer, "load_state_dict", load_in_order):
        yield


def _saved(states: States, folder: Path) -> list[_Saved] | None:
    """By stage of this pipeline; None where a file is missing, which is for DeepSpeed to say. A collective over all
    ranks.

    Raises:
        CheckpointError: on every rank: one of them cannot read its file.
    """
    everyone = done_on_each_rank(lambda: _saved_of_rank(states, folder))
    found = [each for each in everyone if each is not None]
    if len(found) < len(everyone):
        return None
    return [found[states.engine.grid.stage_to_global(stage_id)] for stage_id in range(states.engine.num_stages)]


def _saved_of_rank(states: States, folder: Path) -> _Saved | None:
    engine = states.engine
    path = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
    if not path.is_file():
        return None

    def read() -> Any:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except RuntimeError:  # of a writer whose files cannot be mapped
            return engine.checkpoint_engine.load(str(path), map_location=torch.device("cpu"))

    state = read_states(path, read)
    listed = state.get(LISTED)
    if listed is None and state.get("param_shapes"):
        listed = [list(names) for names in state["param_shapes"]]
    problem = _problem_of_unlisted(states, state.get("optimizer")) if listed is None else None
    return _Saved(None if listed is None else tuple(map(tuple, listed)), state.get(_GUARDED), problem)


def _problem_of_unlisted(states: States, saved: Any) -> str | None:
    orders = states.stock()
    if orders is None:
        return (
            f"{states.stock_unknown}, and the checkpoint was saved by DeepSpeed's own engine, which does not say whose "
            f"optimizer states it has saved. Give the groups that order. Or: {_MODULE_ONLY}"
        )
    if states.form is None or states.form.num_partitions > 1 or not isinstance(saved, Mapping):
        return None
    try:
        states.form.take(saved, orders[states.engine.stage_id], shapes_of(states.stages), 0)
    except _UNLIKE as error:
        return (
            "the optimizer states of the checkpoint are not those of the layers that DeepSpeed gives to this stage: "
            f"{error}. Build the PipelineModule with the partition_method of the run that saved it. Or: {_MODULE_ONLY}"
        )
    return None


def _orders_of_checkpoint(states: States, saved: Sequence[_Saved]) -> Orders:
    """As listed there, or as DeepSpeed's own engine cuts this module."""
    listed = [each.listed for each in saved]
    if any(each is None for each in listed):
        return states.stock() or states.orders
    return tuple(each for each in listed if each is not None)


def _guarded(saved: Sequence[_Saved]) -> str | None:
    return next((each.guarded for each in saved if each.guarded is not None), None)


def _problem(states: States, orders: Orders) -> str | None:
    if orders == states.orders:
        return None
    theirs, ours = ({name for stage in each for names in stage for name in names} for each in (orders, states.orders))
    unknown = theirs - set(shapes_of(states.stages))
    if unknown:
        return (
            f"the checkpoint has optimizer states of {sorted(unknown)[0]}, which is no parameter here: build the model "
            "that was saved"
        )
    if ours - theirs:
        return (
            f"the checkpoint has no optimizer states of {sorted(ours - theirs)[0]} and {len(ours - theirs) - 1} other "
            f"parameters that are trained here. {_MODULE_ONLY}"
        )
    reason = states.stuck
    if reason is None and len(orders[0]) != len(states.orders[0]):
        reason = f"{len(orders[0])} groups of parameters there, {len(states.orders[0])} here"
    if reason is None:
        return None
    return (
        "the checkpoint was saved by stages that hold other layers, and its optimizer states cannot be moved: "
        f"{reason}. Use the schedule, chunks_per_stage and partition_method that it was saved with. Or: {_MODULE_ONLY}"
    )
