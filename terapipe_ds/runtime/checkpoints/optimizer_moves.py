"""Bring optimizer states from the stages that hold them in one order to those that hold them in another.

DeepSpeed saves optimizer states by stage, and in a stage by number, so that a number means another parameter where
another layout has cut the layers. Names do not: they are made of the number of the layer, or of its tied key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from terapipe_ds.runtime.checkpoints.optimizer_forms import (
    Content,
    Contents,
    Groups,
    Piece,
    Received,
    Shapes,
    StateForm,
)
from terapipe_ds.runtime.layer_names import STOCK_BOUNDS, LayerName, layer_name, layer_of_parameter

Orders = tuple[Groups, ...]
"""The parameters of each stage, by group of its optimizer."""


class Holder(NamedTuple):
    """A stage, and one partition of its states."""

    stage_id: int
    partition: int


def moved(
    form: StateForm,
    contents: Contents,
    before: Orders,
    after: Orders,
    shapes: Shapes,
    owners: Mapping[str, int],
    here: Holder,
    rank_of: Callable[[Holder], int],
    group: Any,
) -> Received:
    """Return what this rank needs in the order `after`. A collective over the ranks of `rank_of`.

    Args:
        contents: what this rank has in the order `before`.
        owners: the stage whose states count, for parameters that have copies.
        group: on the CPU; these ranks are members.
    """
    received: dict[str, list[tuple[Piece, Content]]] = {}
    for (source, target), pieces in sorted(transfers(form, before, after, shapes, owners).items()):
        sent: list[Any] = [[(piece, contents[piece]) for piece in pieces]] if here == source else [None]
        if here == source != target:
            sent = [[(piece, content.on_cpu()) for piece, content in sent[0]]]
            torch_dist.send_object_list(sent, dst=rank_of(target), group=group)
        elif here == target != source:
            torch_dist.recv_object_list(sent, src=rank_of(source), group=group)
        for piece, content in sent[0] if here == target else ():
            received.setdefault(piece.name, []).append((piece, content))
    return received


def transfers(
    form: StateForm, before: Orders, after: Orders, shapes: Shapes, owners: Mapping[str, int]
) -> dict[tuple[Holder, Holder], list[Piece]]:
    """Return which pieces go from where to where.

    If several stages hold a parameter, take it from its owner; without an owner, from the stage itself if it has the
    parameter, else from the first that has it.
    """
    sources: dict[tuple[str, int], list[tuple[Holder, Piece]]] = {}
    for source, piece in _held(form, before, shapes):
        sources.setdefault((piece.name, source.stage_id), []).append((source, piece))
    first: dict[str, int] = {}
    for name, stage_id in sources:
        first.setdefault(name, stage_id)
    routes: dict[tuple[Holder, Holder], list[Piece]] = {}
    for target, wanted in _held(form, after, shapes):
        nearest = target.stage_id if (wanted.name, target.stage_id) in sources else first[wanted.name]
        for source, piece in sources[wanted.name, owners.get(wanted.name, nearest)]:
            if piece.overlap(wanted):
                routes.setdefault((source, target), []).append(piece)
    return routes


def _held(form: StateForm, orders: Orders, shapes: Shapes) -> Iterator[tuple[Holder, Piece]]:
    for stage_id, groups in enumerate(orders):
        for partition in range(form.num_partitions):
            for piece in form.pieces(groups, shapes, partition):
                yield Holder(stage_id, partition), piece


def stock_orders(module: Any, shapes: Shapes, orders: Orders) -> Orders:
    """Return the orders in DeepSpeed's own engine, which cuts the module as it did at first.

    A stage has tied layers first, and then the others by number.

    Args:
        shapes: those of all parameters, with the parameters of each layer in the module's order.
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
