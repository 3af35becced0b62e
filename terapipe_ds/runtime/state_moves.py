"""Bring optimizer states from the stages that hold them in one order to those that hold them in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.runtime.state_forms import Content, Held, Piece, Shapes, StateForm
from terapipe_ds.runtime.state_order import Orders


@dataclass(frozen=True)
class _Move:
    """Elements of a source's piece that a target's piece needs."""

    source: Piece
    target: Piece
    start: int
    stop: int


@dataclass(frozen=True)
class Place:
    """A stage, and which partition of its states."""

    stage_id: int
    partition: int


def moved(
    form: StateForm,
    held: Held,
    before: Orders,
    after: Orders,
    shapes: Shapes,
    here: Place,
    rank_of: Callable[[Place], int],
    group: Any,
    owners: Mapping[str, int] = MappingProxyType({}),
) -> Held:
    """What this rank holds in the order ``after``, of what all hold in the order ``before``. A collective over the
    ranks of ``rank_of``.

    Args:
        group: on the CPU, of which these ranks are members.
        owners: of parameters with copies, the stage whose states count.
    """
    moves = _moves(form, before, after, shapes, owners)
    received: dict[Piece, list[tuple[_Move, Content]]] = {}
    for (source, target), pair in sorted(moves.items(), key=lambda item: _key(*item[0])):
        if here == source:
            contents = [_cut(held[move.source], move, apart=source != target) for move in pair]
            if source != target:
                torch_dist.send_object_list([contents], dst=rank_of(target), group=group)
        if here == target:
            if source != target:
                told: list[Any] = [None]
                torch_dist.recv_object_list(told, src=rank_of(source), group=group)
                contents = told[0]
            for move, content in zip(pair, contents, strict=True):
                received.setdefault(move.target, []).append((move, content))
    return {piece: _joined(parts) for piece, parts in received.items()}


def _key(source: Place, target: Place) -> tuple[int, ...]:
    return source.stage_id, source.partition, target.stage_id, target.partition


def _moves(
    form: StateForm, before: Orders, after: Orders, shapes: Shapes, owners: Mapping[str, int] = MappingProxyType({})
) -> dict[tuple[Place, Place], list[_Move]]:
    """From where to where; of a parameter that several stages hold, a stage takes that of its owner, or where it has
    none its own or that of the first."""
    sources: dict[tuple[str, int], list[tuple[Place, Piece]]] = {}
    holders: dict[str, list[int]] = {}
    for stage_id, groups in enumerate(before):
        for name in (name for names in groups for name in names):
            holders.setdefault(name, []).append(stage_id)
        for partition in range(form.num_partitions):
            for piece in form.pieces(groups, shapes, partition):
                sources.setdefault((piece.name, stage_id), []).append((Place(stage_id, partition), piece))
    moves: dict[tuple[Place, Place], list[_Move]] = {}
    for stage_id, groups in enumerate(after):
        for partition in range(form.num_partitions):
            for piece in form.pieces(groups, shapes, partition):
                stages = holders[piece.name]
                nearest = stage_id if stage_id in stages else stages[0]
                for place, source in sources[piece.name, owners.get(piece.name, nearest)]:
                    start, stop = max(piece.start, source.start), min(piece.stop, source.stop)
                    if start < stop:
                        move = _Move(source, piece, start, stop)
                        moves.setdefault((place, Place(stage_id, partition)), []).append(move)
    return moves


def _cut(content: Content, move: _Move, apart: bool) -> Content:
    """``apart``: tensors of their own, on the CPU, since a view would be sent with all that it is a view of."""
    found = {}
    for key, value in content.items():
        if torch.is_tensor(value):
            if value.dim() == 1 and value.numel() == move.source.stop - move.source.start:
                value = value[move.start - move.source.start : move.stop - move.source.start]
            value = value.detach().cpu().clone() if apart else value.detach()
        found[key] = value
    return found


def _joined(parts: list[tuple[_Move, Content]]) -> Content:
    parts = sorted(parts, key=lambda part: part[0].start)
    if len(parts) == 1:
        return parts[0][1]
    first = parts[0][1]
    return {
        key: torch.cat([content[key].cpu() for _, content in parts])
        if torch.is_tensor(value) and value.dim() == 1
        else value
        for key, value in first.items()
    }
