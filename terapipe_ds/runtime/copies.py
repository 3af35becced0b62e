"""Parts that stand at two places (Chimera): one model, whose gradients are summed before the optimizer steps.

To DeepSpeed a layer with two homes is a layer tied over them: their gradients are summed where those of tied layers
are (in few messages: a stage has hundreds of them), one of the copies counts in norms and in numbers of parameters, and
all of them make the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from terapipe_ds.runtime import buckets
from terapipe_ds.runtime.layout import Layout
from terapipe_ds.runtime.state_order import Name, name_of
from terapipe_ds.schedule.placement import BIDIRECTIONAL


def copies_of(module: Any, layout: Layout, layers: Mapping[Name, Any]) -> dict[str, dict[str, Any]]:
    """For each layer on this stage that another stage holds too, what ``PipelineModule.tied_comms`` has of a tied one.

    A collective over all ranks, which make all groups in one order.

    Args:
        layers: of the parts on this stage.
    """
    groups: dict[tuple[int, ...], Any] = {}
    comms: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()  # parameters: one that several layers share is summed once
    for name, (stages, owner) in _holders(module, layout).items():
        for ranks in _ranks_of(module, stages):
            if ranks not in groups:
                groups[ranks] = torch_dist.new_group(list(ranks))
            if module.global_rank in ranks and isinstance(layers.get(name), nn.Module):
                comm = _comm(module, layers[name], ranks, groups[ranks], seen)
                comms[str(name)] = {**comm, _OWNER: ranks[stages.index(owner)]}
    return comms


_OWNER = "terapipe_owner"  # beside what DeepSpeed has in tied_comms: the rank that saves the layer


def _comm(module: Any, layer: nn.Module, ranks: tuple[int, ...], group: Any, seen: set[int]) -> dict[str, Any]:
    for parameter in layer.parameters():
        parameter.ds_pipe_replicated = module.global_rank != ranks[0]  # type: ignore[attr-defined]
    # the frozen ones as well: they may be trained later, and what is to be summed is asked at each step
    new = [(name, parameter) for name, parameter in layer.named_parameters() if id(parameter) not in seen]
    seen |= {id(parameter) for _, parameter in new}
    return {"ranks": list(ranks), "group": group, "weight_attr": [name for name, _ in new], "module": layer}


def _holders(module: Any, layout: Layout) -> dict[Name, tuple[tuple[int, ...], int]]:
    """The stages that hold each layer, or each tied one, and the one among them that saves it. The first one counts in
    norms, as on DeepSpeed's first stage everything does."""
    holders: dict[Name, list[int]] = {}
    for part_id in range(layout.num_parts):
        stages = [stage_id for stage_id, _ in layout.homes(part_id)]  # its owner first
        for layer_id in range(module.parts[part_id], module.parts[part_id + 1]):
            holders.setdefault(name_of(module._layer_specs, layer_id), []).extend(stages)
    return {name: (tuple(sorted(set(stages))), stages[0]) for name, stages in holders.items()}


def owners_of(module: Any, layout: Layout) -> dict[Name, int]:
    """The stage that saves each layer."""
    return {name: owner for name, (_, owner) in _holders(module, layout).items()}


def _ranks_of(module: Any, stages: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ranks at these stages of every pipeline."""
    grid = module._grid
    tensor = grid.get_slice_parallel_world_size()
    places = [
        {"data": data, "model": model} if tensor > 1 else {"data": data}
        for data in range(grid.data_parallel_size)
        for model in range(tensor)
    ]
    return [tuple(grid.stage_to_global(stage_id=stage, **place) for stage in stages) for place in places]


def problem_of_copies(layout: Layout, optimizer: Any) -> str | None:
    """Why this optimizer cannot train parts that stand at two places; None where it can."""
    if layout.has_copies and not can_have_copies(optimizer):
        return (
            "parts that stand at two places (chimera) cannot be trained by ZeRO with gradients in another dtype than "
            "the parameters: DeepSpeed keeps these where it does not sum what several stages hold. Remove "
            "data_types.grad_accum_dtype, or take another schedule"
        )
    return None


def can_have_copies(optimizer: Any = None, raw: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether parts can stand at two places with this optimizer or, before there is one, with this DeepSpeed config,
    of which any ``grad_accum_dtype`` counts."""
    types = raw.get("data_types")
    other_dtype = isinstance(types, Mapping) and types.get("grad_accum_dtype") is not None
    return not other_dtype and not getattr(optimizer, "use_grad_accum_attribute", False)


def can_have(schedule: str, optimizer: Any = None, raw: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether the engine would train by this schedule: what is chosen, and what is recommended."""
    return schedule not in BIDIRECTIONAL or can_have_copies(optimizer, raw)


def complete_gradients(module: Any, optimizer: Any) -> None:
    """Give a gradient of zero to each parameter that has one at another of its places and none here, so that all of
    them sum and step alike: a direction may have no micro-batch.

    Raises:
        RuntimeError: on all ranks that hold it: a parameter is trained at one of its places and not at another.
    """
    gradients = _Gradients(optimizer)
    for group, weights in _by_group(module.get_tied_weights_and_groups()):
        here = [[gradients.is_there(weight), gradients.is_trained(weight)] for weight in weights]
        there = torch.tensor([[*flags, not flags[1]] for flags in here], dtype=torch.int32, device=weights[0].device)
        torch_dist.all_reduce(there, op=torch_dist.ReduceOp.MAX, group=group)
        for weight, (anywhere, trained, frozen) in zip(weights, there.tolist(), strict=True):
            if trained and frozen:
                raise RuntimeError(
                    f"a parameter of shape {list(weight.shape)} that stands at two places (chimera) is trained at one "
                    "and not at the other: freeze it, or leave it out of the optimizer, on both stages"
                )
            gradients.complete(weight, anywhere=bool(anywhere))


def sum_gradients(module: Any, optimizer: Any) -> None:
    """Sum the gradients of each parameter over its places, and of a tied one over its stages. They must be complete."""
    gradients = _Gradients(optimizer)
    for group, weights in _by_group(module.get_tied_weights_and_groups()):
        found = [gradients.of(weight) for weight in weights]
        buckets.all_reduce([gradient for gradient in found if gradient is not None], group)


def copies_may_differ(layout: Layout, optimizer: Any, num_replicas: int) -> bool:
    """Whether two copies of a parameter may be updated to values that differ by rounding.

    Their gradients are equal to the last bit once they are summed over places. But then DeepSpeed averages them over
    replicas, for each stage by itself: three numbers or more are added in an order that depends on where they lie in
    its buffers, and on the network, and a stage has its parts in another order than the other one. Two numbers have
    one sum. And of what an optimizer does with numbers that lie elsewhere in a flat buffer, all that is known is that
    torch's own treat them all alike; vectorized ones may round the last few of a buffer in another way.

    Args:
        optimizer: which computes the updates: inside DeepSpeed's wrapper, if there is one.
        num_replicas: the size of data parallelism.
    """
    if not layout.has_copies or optimizer is None:
        return False
    return num_replicas > 2 or not type(optimizer).__module__.startswith("torch.optim.")


def take_owners_weights(module: Any) -> None:
    """After a step: give each copy the values of the place that saves it, to the last bit. For where
    :func:`copies_may_differ`.

    To sum over places what DeepSpeed has averaged already would not do: ZeRO-1 keeps averages in partitions that are
    cut elsewhere on each stage. The fp32 weights and the moments that an optimizer keeps beside these are left alone:
    nobody reads those of a copy but its own next step, whose result is overwritten; those of the owner are saved.
    """
    by_source: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
    for comm in module.tied_comms.values():
        weights = [module._recursive_getattr(comm["module"], name).data for name in comm["weight_attr"]]
        by_source.setdefault((id(comm["group"]), comm[_OWNER]), (comm["group"], []))[1].extend(weights)
    for (_, source), (group, weights) in by_source.items():
        buckets.broadcast(weights, source, group)


def _by_group(tied: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """The weights of each group. All ranks have the groups in one order, so that no two wait for each other."""
    by_group: dict[int, tuple[Any, list[Any]]] = {}
    for weight, group in tied:
        by_group.setdefault(id(group), (group, []))[1].append(weight)
    yield from by_group.values()


class _Gradients:
    """Where the gradients of a batch are that DeepSpeed sums over stages: in ``.grad``, or in buffers of its
    ``BF16_Optimizer``, which are there, and empty, before any backward, for what it was given to train."""

    def __init__(self, optimizer: Any) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._optimizer = optimizer if isinstance(optimizer, BF16_Optimizer) else None
        if self._optimizer is not None:
            groups = enumerate(self._optimizer.bf16_groups)
            self._places = {id(weight): (i, j) for i, group in groups for j, weight in enumerate(group)}

    def is_trained(self, weight: Any) -> bool:
        """Whether it will have gradients, as far as that can be told here."""
        return bool(weight.requires_grad) and (self._optimizer is None or id(weight) in self._places)

    def is_there(self, weight: Any) -> bool:
        if self._optimizer is None:
            return weight.grad is not None
        if id(weight) not in self._places:
            return False
        i, j = self._places[id(weight)]
        return bool(self._optimizer.fp32_groups_has_gradients[i][j])

    def of(self, weight: Any) -> Tensor | None:
        """What is summed; None where nobody has any."""
        if self._optimizer is not None and id(weight) not in self._places:
            return None
        gradient: Tensor | None = weight.grad if self._optimizer is None else weight._hp_grad
        return gradient

    def complete(self, weight: Any, anywhere: bool) -> None:
        if self._optimizer is not None:
            if id(weight) not in self._places:
                return
            i, j = self._places[id(weight)]
            weight._hp_grad = self._optimizer.fp32_groups_gradients[i][j]
            self._optimizer.fp32_groups_has_gradients[i][j] = anywhere
        elif anywhere and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def sum_losses(engine: Any, layout: Layout, groups: Any) -> None:
    """Bring what the last part has booked at its other places to the stage that tells all ranks of the loss."""
    stages = [stage_id for stage_id, _ in layout.homes(layout.num_parts - 1)]
    if engine.stage_id not in stages:
        return
    booked = [_on_the_host(engine.total_loss), _on_the_host(engine.total_additional_losses)]
    if engine.stage_id != layout.loss_stage:
        torch_dist.send_object_list(booked, dst=groups.ranks[layout.loss_stage], group=groups.control)
        return
    for stage_id in stages[1:]:
        theirs: list[Any] = [None, None]
        torch_dist.recv_object_list(theirs, src=groups.ranks[stage_id], group=groups.control)
        engine.total_loss = _sum(engine.total_loss, theirs[0], engine.device)
        engine.total_additional_losses = _sum(engine.total_additional_losses, theirs[1], engine.device)


def _on_the_host(booked: Any) -> Any:
    """A loss, a list of losses, or a dict of them, without graph."""
    if torch.is_tensor(booked):
        return booked.detach().cpu()
    if isinstance(booked, dict):
        return {name: _on_the_host(loss) for name, loss in booked.items()}
    return booked if booked is None else [_on_the_host(loss) for loss in booked]


def _sum(mine: Any, theirs: Any, device: Any) -> Any:
    """Of two bookings of one form; None is nothing booked."""
    if theirs is None:
        return mine
    if torch.is_tensor(theirs):
        return theirs.to(device) if mine is None else mine + theirs.to(device)
    if isinstance(theirs, dict):
        mine = mine or {}
        return type(theirs)({name: _sum(mine.get(name), theirs.get(name), device) for name in {**mine, **theirs}})
    return [_sum(None if mine is None else mine[i], loss, device) for i, loss in enumerate(theirs)]
