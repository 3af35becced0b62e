"""Bring optimizer states from the stages that hold them in one order to those that hold them in another.

DeepSpeed saves optimizer states by stage, and in a stage by number, which another layout gives to another parameter.
Names stay: they are made of the number of the layer, or of its tied key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from terapipe_ds.runtime.checkpoints.optimizer_forms import (
    Content,
    Contents,
    Groups,
    Piece,
    Received,
    Shapes,
    Shard,
    StateForm,
)
from terapipe_ds.runtime.layout.layer_names import STOCK_BOUNDS, LayerName, layer_name, layer_of_parameter

Orders = tuple[Groups, ...]
"""The parameters of each stage, by group of its optimizer."""


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


def moved(
    contents: Contents,
    before: Shards,
    after: Shards,
    owners: Mapping[str, int],
    here: Holder,
    rank_of: Callable[[Holder], int],
    group: Any,
) -> Received:
    """Send the pieces that this rank has and others need, and return those that it needs. A collective.

    Args:
        owners: the stage whose states count, for parameters that have copies.
        group: on the CPU; all these ranks are members.
    """
    received: dict[str, list[tuple[Piece, Content]]] = {}
    for (source, target), pieces in sorted(routes_between(before, after, owners).items()):
        sent: list[Any] = [[(piece, contents[piece]) for piece in pieces]] if here == source else [None]
        if here == source != target:
            sent = [[(piece, content.on_cpu()) for piece, content in sent[0]]]
            torch_dist.send_object_list(sent, dst=rank_of(target), group=group)
        elif here == target != source:
            torch_dist.recv_object_list(sent, src=rank_of(source), group=group)
        for piece, content in sent[0] if here == target else ():
            received.setdefault(piece.name, []).append((piece, content))
    return received


def routes_between(
    before: Shards, after: Shards, owners: Mapping[str, int]
) -> dict[tuple[Holder, Holder], list[Piece]]:
    """Return which pieces go from where to where.

    A parameter comes from its owner; without one, from the target's own stage if that has it, else from the first stage
    that has it.
    """
    sources: dict[tuple[str, int], list[tuple[Holder, Piece]]] = {}
    first: dict[str, int] = {}
    for source, shard in before.items():
        for piece in shard.pieces:
            sources.setdefault((piece.name, source.stage_id), []).append((source, piece))
            first.setdefault(piece.name, source.stage_id)
    routes: dict[tuple[Holder, Holder], list[Piece]] = {}
    for target, shard in after.items():
        for wanted in shard.pieces:
            nearest = target.stage_id if (wanted.name, target.stage_id) in sources else first[wanted.name]
            for source, piece in sources[wanted.name, owners.get(wanted.name, nearest)]:
                if piece.overlap(wanted):
                    routes.setdefault((source, target), []).append(piece)
    return routes


def stock_orders(module: Any, shapes: Shapes, orders: Orders) -> Orders:
    """Return the orders in DeepSpeed's own engine, which cuts the module as it did at first: tied layers before others.

    Args:
        shapes: of all parameters, with those of each layer in the module's order.
        orders: those of this engine, which tell the group of each parameter.
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
