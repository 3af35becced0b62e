"""Layers on their way to other stages: the values of each go from the stage that had built it to those that hold it."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist
from torch import Tensor, nn

from terapipe_ds.runtime.parted import held_layers, part_of
from terapipe_ds.runtime.state_order import Name, name_of

_State = list[tuple[str, Tensor, bool]]


def move_layers(module: Any, bounds: list[int], old: dict[Name, Any]) -> None:
    """Send the values of every layer from the stage that had built it to those that have built it now, in one order on
    all stages."""
    specs, layout = module._layer_specs, module.terapipe_layout
    new = held_layers(module)
    places: dict[Name, list[int]] = {}
    for layer_id in range(len(specs)):
        places.setdefault(name_of(specs, layer_id), []).append(layer_id)
    group = _pipeline_group(module)
    for name, layer_ids in places.items():
        sources = {part_of(bounds, i) for i in layer_ids}
        targets = {stage for i in layer_ids for stage, _ in layout.homes(part_of(module.parts, i))} - sources
        for target in sorted(targets):
            if module.stage_id == min(sources):
                _send(module, group, target, old[name])
            elif module.stage_id == target:
                _receive(module, group, min(sources), new[name])


def _tensors(layer: Any) -> dict[str, Tensor]:
    if not isinstance(layer, nn.Module):
        return {}
    return {**dict(layer.named_parameters(remove_duplicate=False)), **dict(layer.named_buffers(remove_duplicate=False))}


def _pipeline_group(module: Any) -> Any:
    """On the CPU: DeepSpeed has not chosen this rank's device yet."""
    mine = None
    for ranks in module._grid.topology().get_axis_comm_lists("pipe"):
        group = torch_dist.new_group(ranks, backend="gloo")
        mine = group if module.global_rank in ranks else mine
    return mine


def _send(module: Any, group: Any, stage_id: int, layer: Any) -> None:
    state: _State = [(name, t.detach().cpu().clone(), t.requires_grad) for name, t in _tensors(layer).items()]
    torch_dist.send_object_list([state], dst=module._grid.pp_group[stage_id], group=group)


def _receive(module: Any, group: Any, stage_id: int, layer: Any) -> None:
    told = [None]
    torch_dist.recv_object_list(told, src=module._grid.pp_group[stage_id], group=group)
    state: Any = told[0]
    targets = _tensors(layer)
    for name, value, requires_grad in state:
        target = targets[name]
        target.data = value.to(target.device)  # in the dtype that the module was converted to meanwhile
        target.requires_grad_(requires_grad)
