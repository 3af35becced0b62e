"""Sum the gradients of tied layers, and of parts that live at two places (Chimera), before the optimizer steps.

To DeepSpeed a layer with two places is a layer tied over them. Their gradients are summed together with the gradients
of tied layers, in few messages. One of the copies counts in norms and in numbers of parameters, and all make the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from terapipe_ds.runtime.agreement import gather, refuse_everywhere
from terapipe_ds.runtime.layout.layer_names import LayerName, layer_name, part_of
from terapipe_ds.runtime.layout.layout import Layout

LOSS = "(loss_fn)"  # a name among those of layers, which have no brackets: a loss module is with the last part
BUCKET_BYTES = 50 * 2**20  # the largest message, except for a single larger tensor


def copies_of(module: Any, layout: Layout, layers: Mapping[LayerName, Any]) -> dict[str, dict[str, Any]]:
    """Return an entry like those in `PipelineModule.tied_comms` for each layer that another stage holds as well.

    A collective over all ranks, which make all groups in one order. `layers` are the layers of this stage's parts.
    """
    groups: dict[tuple[int, ...], Any] = {}
    comms: dict[str, dict[str, Any]] = {}
    for name, (stages, _) in _holders(module, layout).items():
        for pipeline in module._grid.topology().get_axis_comm_lists("pipe"):
            ranks = tuple(pipeline[stage_id] for stage_id in stages)
            if ranks not in groups:
                groups[ranks] = torch_dist.new_group(list(ranks))
            layer = layers.get(name)
            if module.global_rank not in ranks or not isinstance(layer, nn.Module):
                continue
            names = [key for key, _ in layer.named_parameters()]
            comms[str(name)] = {"ranks": list(ranks), "group": groups[ranks], "weight_attr": names, "module": layer}
    return comms


def join_copies(module: Any, world: Any = None) -> None:
    """Let one of the copies of each parameter count in norms and in numbers of parameters, and give all its values.

    Layers may have got parameters since they were laid out: adapters, parametrizations. A collective over all ranks;
    `world` is their group on the CPU.

    Raises TeraPipeConfigError on every rank if the copies of a layer have different parameters.
    """
    layers = {key: comm["module"].named_parameters() for key, comm in module.tied_comms.items()}
    here = {key: {name: list(each.shape) for name, each in named} for key, named in layers.items()}
    everyone = gather(here, world)
    different = [k for k, comm in module.tied_comms.items() if any(everyone[r][k] != here[k] for r in comm["ranks"])]
    problem = "its copies on two stages have different parameters: change it on both"
    refuse_everywhere(f"layer {different[0]}: {problem}" if different else None, world)
    for comm in module.tied_comms.values():
        for parameter in comm["module"].parameters():
            parameter.ds_pipe_replicated = module.global_rank != comm["ranks"][0]
    take_owners_weights(module)


def _shared(module: Any) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Yield the entries of `tied_comms` with the weights that their stages share.

    These are all that a layer at two places has now, also frozen ones, which may be trained later. Each step determines
    the gradients to sum.
    """
    seen: set[int] = set()  # parameters: one that several layers share is summed once
    for key, comm in module.tied_comms.items():
        if getattr(getattr(module, "terapipe_layout", None), "has_copies", False):
            weights = [weight for weight in comm["module"].parameters() if id(weight) not in seen]
            seen.update(map(id, weights))
        else:
            weights = [module._recursive_getattr(comm["module"], name) for name in comm["weight_attr"]]
        yield key, comm, weights


def _holders(module: Any, layout: Layout) -> dict[LayerName, tuple[tuple[int, ...], int]]:
    """Return the stages that hold each layer, each tied layer or the loss, and the one among them that saves it."""
    holders: dict[LayerName, list[int]] = {}
    for part_id in range(layout.num_parts):
        stages = [stage_id for stage_id, _ in layout.homes(part_id)]  # its owner first
        for layer_id in range(module.parts[part_id], module.parts[part_id + 1]):
            holders.setdefault(layer_name(module._layer_specs, layer_id), []).extend(stages)
    holders[LOSS] = [stage_id for stage_id, _ in layout.homes(layout.num_parts - 1)]
    return {name: (tuple(sorted(set(stages))), stages[0]) for name, stages in holders.items()}


def owners_of(module: Any, layout: Layout) -> dict[LayerName, int]:
    return {name: owner for name, (_, owner) in _holders(module, layout).items()}


def problem_of_shared_layers(module: Any, layout: Layout) -> str | None:
    """Return an error about a parameter that layers of several stages train without a tie; None if there is none.

    A program may give one object as several layers, or as an argument of several `LayerSpec`s. Each process then has it
    once, and no stage sums the gradients of another.
    """
    users: dict[int, dict[int, list[int]]] = {}  # layers with their stages, by the id of a parameter
    for layer_id, spec in enumerate(module._layer_specs):
        stages = sorted({stage for stage, _ in layout.homes(part_of(module.parts, layer_id))})
        # a function of torch, which may be a layer, has no attributes
        given = () if isinstance(spec, TiedLayerSpec) else (spec, *getattr(spec, "__dict__", {}).values())
        for parameter in (p for each in tree_leaves(given) if isinstance(each, nn.Module) for p in each.parameters()):
            if parameter.requires_grad:
                users.setdefault(id(parameter), {})[layer_id] = stages
    for layers in users.values():
        if len({tuple(stages) for stages in layers.values()}) > 1:
            places = ", ".join(f"layer {layer_id} on stage {stages[0]}" for layer_id, stages in layers.items())
            return (
                f"layers of several stages train one parameter: {places}. Each stage would train a copy of its own. "
                "Give each of these layers as a TiedLayerSpec with one key, which builds it, or put them on one stage "
                "(terapipe.partition)"
            )
    return None


def copies_may_differ(layout: Layout, optimizer: Any, num_replicas: int) -> bool:
    """Return whether two copies of a parameter may be updated to values that differ by rounding.

    Their gradients are equal to the last bit once they are summed over places. Then DeepSpeed averages them over
    replicas, for each stage by itself. The order in which three or more numbers are added depends on their places in
    its buffers, and on the network; two numbers have one sum. Torch's own optimizers treat numbers alike at any place
    in a flat buffer. Fused and other vectorized optimizers may round the last few differently.

    `optimizer` computes the updates, inside DeepSpeed's wrapper if there is one; `num_replicas` counts data replicas.
    """
    if not layout.has_copies or optimizer is None:
        return False
    is_plain = type(optimizer).__module__.startswith("torch.optim.")
    return num_replicas > 2 or not is_plain or any(group.get("fused") for group in optimizer.param_groups)


def tied_may_differ(module: Any, optimizer: Any) -> bool:
    """Return whether stages may update their copies of a tied weight to values that differ by more than rounding.

    ZeRO lays out all weights of a stage in one vector. Optimizers of bitsandbytes then round moments by blocks of it,
    and others scale updates by its norm. Torch's and DeepSpeed's usual ones treat each number by itself. No step
    changes frozen weights.
    """
    kind = type(optimizer)
    is_by_number = kind.__module__.partition(".")[0] in ("torch", "deepspeed", "apex", "transformer_engine")
    is_by_number &= not any(name in kind.__name__.lower() for name in ("adafactor", "muon", "lamb", "lbfgs"))
    if optimizer is None or is_by_number:
        return False
    return any(weight.requires_grad for _, _, weights in _shared(module) for weight in weights)


def problem_of_left_gradients(module: Any, layout: Layout, optimizer: Any) -> str | None:
    """Return an error about gradients that a program left in copies before a batch, where each copy adds its own."""
    if not layout.has_copies:
        return None
    # DeepSpeed's optimizers leave gradients that they do not step with
    kinds = (getattr(optimizer, name, None) for name in ("bit16_groups", "bf16_groups", "fp16_groups"))
    groups: Any = next(filter(None, kinds), None)
    groups = groups or [group["params"] for group in getattr(optimizer, "param_groups", ())]
    stepped = {id(weight) for group in groups for weight in group}
    shared = [weight for _, weights in weights_by_group(module) for weight in weights if id(weight) in stepped]
    if not any(map(Gradients.of(optimizer).is_there, shared)):
        return None
    return (
        "parameters at two places (chimera) have gradients before train_batch(), and these would count twice: call "
        "engine.zero_grad() first, or choose another schedule to add to them"
    )


def complete_gradients(module: Any, optimizer: Any) -> None:
    """Give a zero gradient to each parameter that has one only at another of its places, so that all step alike.

    If a parameter is trained at one place only, all ranks that hold it raise RuntimeError.
    """
    gradients = Gradients.of(optimizer)
    for group, weights in weights_by_group(module):
        here = [[gradients.is_there(weight), gradients.is_trained(weight)] for weight in weights]
        there = torch.tensor([[*flags, not flags[1]] for flags in here], dtype=torch.int32, device=weights[0].device)
        torch_dist.all_reduce(there, op=torch_dist.ReduceOp.MAX, group=group)
        for weight, (anywhere, trained, frozen) in zip(weights, there.tolist(), strict=True):
            # one copy would step and the other would not
            if trained and frozen:
                raise RuntimeError(
                    f"a parameter of shape {list(weight.shape)} at two places (chimera) is trained at one "
                    "and not at the other: freeze it, or leave it out of the optimizer, on both stages"
                )
            if anywhere:
                gradients.made(weight)


def problem_of_tied_gradients(module: Any, optimizer: Any, world: Any) -> str | None:
    """Return an error about a tied weight that is no parameter, or has a gradient on some stages only. A collective.

    Stages sum the tied gradients that they have, so that these stages would wait for the others for ever.
    """
    gradients, comms = Gradients.of(optimizer), module.tied_comms
    weights = {
        (key, name): weight
        for key, comm, shared in _shared(module)
        for name, weight in zip(comm["weight_attr"], shared, strict=True)
    }
    everyone = gather({key: each.is_leaf and gradients.is_there(each) for key, each in weights.items()}, world)
    for (key, name), weight in weights.items():
        if not weight.is_leaf:
            return (
                f"tied layer {key!r}: {name!r} is computed from other parameters, as by a parametrization or pruning, "
                "and stages would not sum their gradients: apply that to layers that are not tied"
            )
        if len({everyone[rank][key, name] for rank in comms[key]["ranks"]}) > 1:
            return (
                f"tied layer {key!r}: {name!r} is in tied_weight_attr, and only some of its stages use it. Stages "
                "sum the gradients of tied parameters, and those with one would wait for ever: leave the name out of "
                "tied_weight_attr, or use the parameter in the forward_fn of each stage"
            )
    return None


def sum_gradients(module: Any, optimizer: Any) -> None:
    """Sum the complete gradients of each parameter over its places, and of a tied parameter over its stages."""
    gradients = Gradients.of(optimizer)
    for group, weights in weights_by_group(module):
        summands = [gradients.to_sum(weight) for weight in weights]
        _in_place([each for each in summands if each is not None], partial(dist.all_reduce, group=group))


def take_owners_weights(module: Any) -> None:
    """Give each copy the values of the place that saves it: at the start, and after steps where `copies_may_differ`.

    The fp32 weights and the moments that an optimizer keeps beside these do not change. A copy's affect only its own
    next step, whose result is overwritten; the owner's are saved.
    """
    by_source: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
    shared = {key: weights for key, _, weights in _shared(module)}
    for name, (stages, owner) in _holders(module, module.terapipe_layout).items():
        comm = module.tied_comms.get(str(name))
        if comm is not None:
            source = comm["ranks"][stages.index(owner)]
            weights = [weight.data for weight in shared[str(name)]]
            weights += [buffer.data for buffer in comm["module"].buffers() if name == LOSS]
            by_source.setdefault((id(comm["group"]), source), (comm["group"], []))[1].extend(weights)
    # few large messages, in one order on all ranks
    for (_, source), (group, weights) in by_source.items():
        _in_place(weights, partial(dist.broadcast, src=source, group=group))


def restore_hooks(module: nn.Module) -> None:
    """Let the hooks of parameters run: torch forgets them where a parameter is first broadcast under autograd.

    DeepSpeed does so with tied weights, and with all weights at two places, when it has built them.
    """
    for parameter in module.parameters():
        if parameter._backward_hooks:
            parameter._backward_hooks = parameter._backward_hooks  # its setter enters them again


def weights_by_group(module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each group of stages with the weights that all of them hold, in one order on all ranks."""
    by_group: dict[int, tuple[Any, list[Any]]] = {}
    for _, comm, weights in _shared(module):
        by_group.setdefault(id(comm["group"]), (comm["group"], []))[1].extend(weights)
    yield from by_group.values()


class Gradients:
    """Find the gradients of a step: in the attribute `name` of the parameters, `grad` or ZeRO's `grad_accum`.

    ZeRO has gradients in another dtype than the parameters there, where DeepSpeed's own sum of tied ones does not look.
    """

    def __init__(self, name: str = "grad", dtype: torch.dtype | None = None) -> None:
        self._name, self._dtype = name, dtype

    @staticmethod
    def of(optimizer: Any) -> Gradients:
        if isinstance(optimizer, BF16_Optimizer):
            return _InBuffers(optimizer)
        if getattr(optimizer, "use_grad_accum_attribute", False):
            return Gradients("grad_accum", optimizer.gradient_accumulation_dtype)
        return Gradients()

    def is_trained(self, weight: Any) -> bool:
        """Return whether `weight` will have gradients, as far as this rank knows."""
        return bool(weight.requires_grad)

    def is_there(self, weight: Any) -> bool:
        return weight.grad is not None or getattr(weight, "grad_accum", None) is not None

    def present(self, weight: Any) -> Tensor | None:
        """Return the gradient; None if there is none in this step."""
        return getattr(weight, self._name, None)

    def made(self, weight: Any) -> Tensor:
        """Return the gradient, zeros if there was none: from now on there is one in this step."""
        if self.present(weight) is None:
            setattr(weight, self._name, torch.zeros_like(weight, dtype=self._dtype))
        total: Tensor = getattr(weight, self._name)
        return total

    def clear(self, weight: Any) -> None:
        setattr(weight, self._name, None)

    def to_sum(self, weight: Any) -> Tensor | None:
        """Return the gradient to sum; None if no stage has one.

        A sparse gradient becomes dense: a stage cannot know whether another stage's is sparse, absent (the other
        direction of chimera had no micro-batch) or dense (a head that is tied to an embedding), and a sum needs one
        layout.
        """
        if weight.grad is not None and weight.grad.layout != torch.strided:
            weight.grad = weight.grad.to_dense()
        return self.present(weight)


class _InBuffers(Gradients):
    """Find them in `BF16_Optimizer`, whose buffers exist, and are empty, before any backward, for what it trains."""

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        super().__init__()
        self._optimizer, groups = optimizer, enumerate(optimizer.bf16_groups)
        self._places = {id(weight): (i, j) for i, group in groups for j, weight in enumerate(group)}

    def _buffer(self, weight: Any) -> Tensor | None:
        i, j = self._places.get(id(weight), (None, None))
        return None if i is None else self._optimizer.fp32_groups_gradients[i][j]

    def _mark(self, weight: Any, has_gradient: bool) -> None:
        i, j = self._places[id(weight)]
        self._optimizer.fp32_groups_has_gradients[i][j] = has_gradient  # DeepSpeed leaves out what had no gradient

    def is_trained(self, weight: Any) -> bool:
        return bool(weight.requires_grad) and id(weight) in self._places

    def is_there(self, weight: Any) -> bool:
        i, j = self._places.get(id(weight), (None, None))
        return i is not None and bool(self._optimizer.fp32_groups_has_gradients[i][j])

    def present(self, weight: Any) -> Tensor | None:
        return self._buffer(weight) if self.is_there(weight) else None

    def made(self, weight: Any) -> Tensor:
        total = self._buffer(weight)
        assert total is not None
        if not self.is_there(weight):
            self._mark(weight, True)
            weight._hp_grad = total
        return total

    def clear(self, weight: Any) -> None:
        self.made(weight).zero_()
        self._mark(weight, False)

    def to_sum(self, weight: Any) -> Tensor | None:
        super().to_sum(weight)
        return self._buffer(weight)


@torch.no_grad()
def _in_place(tensors: list[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Sum tensors, or broadcast them, in place. All ranks pass the same shapes and dtypes in one order."""
    for bucket in _take_tensors(tensors, BUCKET_BYTES):  # of one dtype and device
        if len(bucket) == 1 and bucket[0].is_contiguous():
            collective(bucket[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        collective(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])


def sum_over_places(
    booked: tuple[Any, ...], layout: Layout, stage_id: int, ranks: Sequence[int], control: Any, device: Any
) -> tuple[Any, ...]:
    """Return, on the stage that sends the loss to all ranks, the sums over the places of the last part.

    Any other stage gets back its own bookings: for each kind of loss None, a loss, a list of losses, or a dict of them.
    `ranks` are the ranks of the stages, `control` is their group on the CPU.
    """
    stages = [stage_id for stage_id, _ in layout.homes(layout.num_parts - 1)]
    # the loss of a batch is known where its last part ran, in either direction
    if stage_id in stages[1:]:
        on_host = tree_map_only(Tensor, lambda loss: loss.detach().cpu(), list(booked))
        torch_dist.send_object_list(on_host, dst=ranks[layout.loss_stage], group=control)
    for other in stages[1:] if stage_id == stages[0] else ():
        theirs: list[Any] = [None] * len(booked)
        torch_dist.recv_object_list(theirs, src=ranks[other], group=control)
        theirs = tree_map_only(Tensor, lambda loss: loss.to(device), theirs)
        booked = tuple(_sum(*pair) for pair in zip(booked, theirs, strict=True))
    return booked


def _sum(here: Any, there: Any) -> Any:
    """Add two bookings of one form; None: nothing is booked."""
    if here is None or there is None:
        return there if here is None else here
    if isinstance(there, dict):
        return type(there)({name: _sum(here.get(name), there.get(name)) for name in {**here, **there}})
    return here + there if torch.is_tensor(there) else [_sum(*pair) for pair in zip(here, there, strict=True)]
