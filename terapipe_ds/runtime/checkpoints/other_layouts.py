"""Keep optimizer states in checkpoints as DeepSpeed's own engine would have them, whatever the layout of this one.

A stage that holds several parts has other layers than the same stage in DeepSpeed's own cut. A save moves its states to
the stages where DeepSpeed has them, and a load moves them back, by the names of parameters that a checkpoint lists.
States that cannot be moved are saved in an envelope that only this package opens.

DeepSpeed saves optimizer states by stage, and in a stage by number. Another layout gives the number to another
parameter. Names do not change: they contain the number of the layer, or its tied key.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils._pytree import tree_map_only

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import everywhere, gather, gather_results, refuse_everywhere
from terapipe_ds.runtime.checkpoints.optimizer_forms import Content, Groups, Piece, Shapes, Shard, StateForm, form_of
from terapipe_ds.runtime.checkpoints.strict_pickles import read_states
from terapipe_ds.runtime.layout.layer_names import (
    NOTHING_TRAINED,
    STOCK_BOUNDS,
    LayerName,
    layer_name,
    layer_of_parameter,
)
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import owners_of

LISTED = "terapipe_parameters"  # in the states of a rank: names of parameters by group of the optimizer
ENVELOPE = "terapipe_states_of_this_layout"  # around optimizer states that DeepSpeed's own engine would mistake
_UNLIKE = (KeyError, IndexError, TypeError, AttributeError, ValueError)  # a state is not of its form
PARAMETERS_ALONE = (
    "Load the parameters alone, with load_module_only=True (in a Trainer: give the checkpoint's folder as its model, "
    "and do not resume)"
)
_MODULE_ONLY = f"{PARAMETERS_ALONE}; moments begin anew"


Orders = tuple[Groups, ...]  # the parameters of each stage, by group of its optimizer


@dataclass(frozen=True)
class OptimizerStates:
    """Know which optimizer states each stage of a pipeline holds, in which order, and move them."""

    engine: PipelineEngine
    world: Any  # a group of all ranks on the CPU
    form: StateForm | None  # None: we do not know it
    shapes: Shapes
    orders: Orders  # as the optimizers of the stages hold their parameters
    stock: Orders | str  # the same in DeepSpeed's own engine, or why we do not know it
    owners: Mapping[str, int]  # of parameters with copies, the stage whose states are saved
    here: Holder
    peers: Sequence[int]  # the ranks of this stage with the partitions of its states; without partitions this rank
    stuck: str | None  # why states cannot be brought into another order

    @contextmanager
    def saved_in_stock_order(self) -> Iterator[dict[str, Any]]:
        """Let the optimizer give its states as DeepSpeed's own engine would, and yield the values to save beside them.

        A collective over all ranks.
        """
        optimizer, stage_id = self.engine.optimizer, self.engine.stage_id
        # The layers are where DeepSpeed has them, so it saves the right states
        if self.stock == self.orders:
            yield {LISTED: self.orders[stage_id]}
            return
        state, stock = everywhere(optimizer.state_dict, self.world), self.stuck or self.stock
        if not isinstance(stock, str):
            try:
                state = self._reordered(state, self.orders, stock, self.owners)
            except TeraPipeConfigError as error:  # on every rank
                stock = str(error)
        # DeepSpeed asks the optimizer for its state while it saves. States that cannot be moved go into an envelope,
        # which DeepSpeed's own engine fails to load: it would give these states to other parameters
        with ExitStack() as stack:
            if isinstance(stock, str):
                state, listed = {ENVELOPE: state, "reason": stock}, {LISTED: self.orders[stage_id], ENVELOPE: stock}
            else:
                listed = {LISTED: stock[stage_id]}
                sizes = [OrderedDict((n, torch.Size(self.shapes[n])) for n in names) for names in stock[stage_id]]
                stack.enter_context(replaced(self.engine, "_get_zero_param_shapes", lambda: sizes))
            stack.enter_context(replaced(optimizer, "state_dict", lambda: state))
            yield listed

    @contextmanager
    def loaded_in_order_of(self, path: Path) -> Iterator[None]:
        """Let the optimizer take states in the order of the checkpoint file `path` of this rank. A collective.

        Raises:
            TeraPipeConfigError: on every rank, before anything is loaded: the states cannot be brought into this order.
            CheckpointError: on every rank: one of them cannot read its file.
        """
        everyone = gather_results(lambda: self._read_saved(path), self.world)
        of_ranks = [of_rank for of_rank in everyone if of_rank is not None]
        if len(of_ranks) < len(everyone):  # DeepSpeed says which file is missing
            yield
            return
        # One rank of each stage tells its order; without names, it is the order of DeepSpeed's own cut
        stages = range(self.engine.num_stages)
        saved = [of_ranks[self.engine.grid.stage_to_global(stage_id)] for stage_id in stages]
        listed = [of_stage.listed for of_stage in saved if of_stage.listed is not None]
        unlisted = self.orders if isinstance(self.stock, str) else self.stock
        orders = tuple(listed) if len(listed) == len(saved) else unlisted
        refuse_everywhere(saved[self.engine.stage_id].problem or self._problem_of(orders), self.world)
        in_envelope = any(of_stage.in_envelope for of_stage in saved)
        if orders == self.orders and not in_envelope:
            yield
            return
        load, partition = self.engine.optimizer.load_state_dict, self.here.partition

        def load_in_order(whole: Any = None, *args: Any, **kwargs: Any) -> Any:
            by_partition = kwargs.pop("state_dict_list", None)  # ZeRO's; a rank reads its own
            state = whole if by_partition is None else by_partition[partition]
            state = state[ENVELOPE] if in_envelope else state
            if orders != self.orders:
                state = self._reordered(state, orders, self.orders, {})
            if by_partition is None:
                return load(state, *args, **kwargs)
            every = [state if index == partition else other for index, other in enumerate(by_partition)]
            return load(*args, state_dict_list=every, **kwargs)

        with replaced(self.engine.optimizer, "load_state_dict", load_in_order):
            yield

    def _reordered(
        self, state: Mapping[str, Any], before: Orders, after: Orders, owners: Mapping[str, int]
    ) -> dict[str, Any]:
        """Bring `state` of this rank into another order, or refuse it on every rank. A collective over all ranks.

        For parameters with copies, `owners` are the stages whose states count.
        """
        assert self.form is not None
        here, contents = self.here, dict[Piece, Content]()
        # Without partitions all replicas hold the same states, and each replica moves its own
        pipelines = {ranks[here.stage_id]: ranks for ranks in self.engine.grid.topology().get_axis_comm_lists("pipe")}
        # A stage without parameters in a group has a number there, whose states begin anew
        named = (name for groups in itertools.chain(before, after) for name in itertools.chain(*groups))
        numbers = {name: (1,) for name in named if name.startswith(NOTHING_TRAINED)}
        sources, targets = (shards_of(self.form, orders, {**self.shapes, **numbers}) for orders in (before, after))

        def problem_of_taking() -> str | None:
            try:
                contents.update(sources[here].take(state))
            except _UNLIKE as error:
                return f"the optimizer states are not of this model: {type(error).__name__}: {error}. {_MODULE_ONLY}"
            return None

        # any other error is raised on every rank, too: one that left would miss the exchange below
        problem = everywhere(problem_of_taking, self.world)
        refuse_everywhere(problem, self.world)

        def rank_of(holder: Holder) -> int:
            return int(pipelines[self.peers[holder.partition]][holder.stage_id])

        # All ranks go through the routes in one order, so that no two wait for one another
        received: dict[str, list[tuple[Piece, Content]]] = {name: [] for name in numbers}
        for (source, target), pieces in sorted(routes_between(sources, targets, owners).items()):
            sent: list[Any] = [[(piece, contents[piece]) for piece in pieces]] if here == source else [None]
            if here == source != target:
                # without views: torch would send a view with its whole storage
                sent = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), sent)
                torch_dist.send_object_list(sent, dst=rank_of(target), group=self.world)
            elif here == target != source:
                torch_dist.recv_object_list(sent, src=rank_of(source), group=self.world)
            for piece, content in sent[0] if here == target else ():
                received.setdefault(piece.name, []).append((piece, content))
        return targets[here].put(state, received)

    def _read_saved(self, path: Path) -> _Saved | None:
        if not path.is_file():
            return None
        state = read_states(path)
        names = state.get(LISTED) or state.get("param_shapes")  # DeepSpeed's own engine lists them with ZeRO
        if names:
            return _Saved(tuple(map(tuple, names)), ENVELOPE in state, None)
        return _Saved(None, False, self._problem_of_unlisted(state.get("optimizer")))

    def _problem_of_unlisted(self, saved: Any) -> str | None:
        if isinstance(self.stock, str):
            return (
                f"{self.stock}, and the checkpoint was saved by DeepSpeed's own engine, which does not say "
                f"whose optimizer states it has saved. {_MODULE_ONLY}"
            )
        if self.form is None or self.form.num_partitions > 1 or not isinstance(saved, Mapping):
            return None
        try:
            Shard(self.form, self.stock[self.engine.stage_id], self.shapes, 0).take(saved)
        except _UNLIKE as error:
            return (
                "the optimizer states of the checkpoint are not those of the layers that DeepSpeed gives to this "
                f"stage: {error}. Build the PipelineModule with the partition_method of the run that saved it. Or: "
                f"{_MODULE_ONLY}"
            )
        return None

    def _problem_of(self, orders: Orders) -> str | None:
        if orders == self.orders:
            return None
        theirs, ours = (
            {n for groups in stages for names in groups for n in names if not n.startswith(NOTHING_TRAINED)}
            for stages in (orders, self.orders)
        )
        unknown, missing = sorted(theirs - set(self.shapes)), sorted(ours - theirs)
        if unknown:
            return (
                f"the checkpoint has optimizer states of {unknown[0]}, which is no parameter here: build the model "
                "that was saved"
            )
        if missing:
            return (
                f"the checkpoint has no optimizer states of {len(missing)} of the parameters that are trained here, "
                f"{missing[0]} among them. {_MODULE_ONLY}"
            )
        reason = self.stuck
        if reason is None and len(orders[0]) != len(self.orders[0]):
            reason = f"{len(orders[0])} groups of parameters there, {len(self.orders[0])} here"
        return reason and (
            "the checkpoint was saved by stages that hold other layers, and its optimizer states cannot be moved: "
            f"{reason}. Use the schedule, chunks_per_stage, partition and partition_method that it was saved with. Or: "
            f"{_MODULE_ONLY}"
        )


class _Saved(NamedTuple):
    """Describe the optimizer states in the file of a rank."""

    listed: Groups | None  # the names of their parameters; None: DeepSpeed's own engine, without ZeRO, does not say
    in_envelope: bool
    problem: str | None  # why they cannot be those of this stage in DeepSpeed's own cut


def optimizer_states(engine: PipelineEngine, layout: Layout, world: Any) -> OptimizerStates | None:
    """Learn which states the optimizers of all stages hold; None: no optimizer. A collective over all ranks."""
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        return None
    # All ranks end up with the same reasons against moving states, so they decide alike
    form, grid, stuck = form_of(engine.optimizer), engine.grid, None
    if form is None:
        stuck = f"{type(engine.optimizer).__name__} keeps states of another form"
    is_cut = hasattr(engine.optimizer, "partition_count")
    peers = torch_dist.get_process_group_ranks(engine.optimizer.dp_process_group) if is_cut else [engine.global_rank]
    here = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    # The stages exchange the names of their parameters, in the order of their optimizers
    everyone = gather((here, _groups_of(engine), stuck), world)
    stages = [everyone[grid.stage_to_global(stage_id)] for stage_id in range(engine.num_stages)]
    shapes = {name: shape for named, *_ in stages for name, shape in named.items()}
    orders = tuple(groups for _, groups, _ in stages)
    if len({len(groups) for groups in orders}) > 1:
        stuck = "stages have different numbers of groups"
    stuck = stuck or next((problem for *_, problem in everyone if problem is not None), None)
    for name in (name for groups in orders for names in groups for name in names if name.startswith("loss_fn.")):
        stuck = stuck or f"{name} is no parameter of a layer, and some stages have wrong states of it"
    # DeepSpeed's own order is known if nothing moved, or if the groups follow the module
    stock: Orders | str = orders
    if hasattr(engine.module, STOCK_BOUNDS):  # layers are not where DeepSpeed put them
        unknown = next(filter(None, (_problem_of_order(named, groups) for named, groups, _ in everyone)), None)
        stock = unknown or stock_orders(engine.module, shapes, orders)
        if not isinstance(stock, str) and not all(names for groups in stock for names in groups):
            stock = "DeepSpeed's own cut has a stage without parameters in a group of the optimizer"
    owners = {}
    if layout.has_copies:
        by_layer = owners_of(engine.module, layout)
        owners = {name: by_layer[layer] for name in shapes if (layer := layer_of_parameter(name)) in by_layer}
    holder = Holder(engine.stage_id, peers.index(engine.global_rank))
    return OptimizerStates(engine, world, form, shapes, orders, stock, owners, holder, peers, stuck)


def _groups_of(engine: PipelineEngine) -> Groups:
    """Name the parameters of the optimizer by group; DeepSpeed's wrappers keep them beside flat copies of their own."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups: Any = [group["params"] for group in engine.optimizer.param_groups]
    for attribute in ("fp16_groups", "bf16_groups", "round_robin_bit16_groups"):  # as ZeRO deals them out
        groups = getattr(engine.optimizer, attribute, groups)
    return tuple(tuple(names.get(id(p), f"not in the module: {i}") for i, p in enumerate(group)) for group in groups)


def _problem_of_order(shapes: Shapes, groups: Groups) -> str | None:
    """Say why we do not know how DeepSpeed's own engine would order the parameters of a stage."""
    for group in groups:
        members = set(group)
        if group != tuple(name for name in shapes if name in members):
            return (
                "the groups of the optimizer are not in the order of module.named_parameters(), which a program can "
                "give them"
            )
    names = (name for name in itertools.chain(*groups) if not name.startswith(NOTHING_TRAINED))
    strange = next((name for name in names if layer_of_parameter(name) is None), None)
    return None if strange is None else f"{strange} is no parameter of a layer"


# -- routes of states --------------------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """Name a stage, and one partition of its states."""

    stage_id: int
    partition: int


Shards = Mapping[Holder, Shard]


def shards_of(form: StateForm, orders: Orders, shapes: Shapes) -> Shards:
    return {
        Holder(stage_id, partition): Shard(form, groups, shapes, partition)
        for stage_id, groups in enumerate(orders)
        for partition in range(form.num_partitions)
    }


def routes_between(
    before: Shards, after: Shards, owners: Mapping[str, int]
) -> dict[tuple[Holder, Holder], list[Piece]]:
    """Return the routes of pieces: from the owner, else the target's own stage, else the first stage that has them."""
    sources: dict[tuple[str, int], list[tuple[Holder, Piece]]] = {}
    first: dict[str, int] = {}
    for source, shard in before.items():
        for piece in shard.pieces:
            sources.setdefault((piece.name, source.stage_id), []).append((source, piece))
            first.setdefault(piece.name, source.stage_id)
    routes: dict[tuple[Holder, Holder], list[Piece]] = {}
    for target, shard in after.items():
        for wanted in (each for each in shard.pieces if not each.name.startswith(NOTHING_TRAINED)):
            nearest = target.stage_id if (wanted.name, target.stage_id) in sources else first[wanted.name]
            for source, piece in sources[wanted.name, owners.get(wanted.name, nearest)]:
                if piece.overlap(wanted):
                    routes.setdefault((source, target), []).append(piece)
    return routes


def stock_orders(module: Any, shapes: Shapes, orders: Orders) -> Orders:
    """Return the orders in DeepSpeed's own engine, which cuts the module as it did at first: tied layers before others.

    `shapes` has the parameters of each layer in the module's order. `orders` of this engine tells their groups.
    """
    by_layer: dict[LayerName | None, list[str]] = {}
    for name in shapes:
        by_layer.setdefault(layer_of_parameter(name), []).append(name)
    group_of = {name: index for groups in orders for index, names in enumerate(groups) for name in names}
    stock = []
    for start, stop in itertools.pairwise(getattr(module, STOCK_BOUNDS, module.parts)):
        layers = dict.fromkeys(layer_name(module._layer_specs, layer_id) for layer_id in range(start, stop))
        tied_first = sorted(layers, key=lambda layer: isinstance(layer, int))  # stable
        names = [name for layer in tied_first for name in by_layer.get(layer, ())]
        indices = range(max(map(len, orders)))
        stock.append(tuple(tuple(name for name in names if group_of.get(name) == index) for index in indices))
    return tuple(stock)
