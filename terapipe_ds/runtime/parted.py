"""A ``PipelineModule`` whose stages hold several parts of the layers, as DeepSpeed's ``DualPipeVModule`` holds two.

DeepSpeed builds the layers of one part on each stage before any config is read. :func:`lay_out` cuts the module anew by
DeepSpeed's own partition methods and moves layers to the stages that hold them from then on, with the values they have:
whatever the layout is, the model starts from the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.copies import copies_of
from terapipe_ds.runtime.layout import Layout
from terapipe_ds.runtime.state_order import STOCK_BOUNDS, Name, name_of

PARTITION_METHOD = "_terapipe_partition_method"  # attribute of a module: how it was cut
_LAY_OUT_FIRST = "Call terapipe_ds.lay_out(module, ds_config) right after the PipelineModule is built, and"


@dataclass
class _Part:
    """The layers of one part on this stage, as ``PipelineModule`` keeps those of its only one."""

    start: int
    stop: int
    forward_funcs: list[Any]
    checkpointable: list[bool] = field(default_factory=list)
    fwd_map: dict[str, int] = field(default_factory=dict)


class PartedModule(PipelineModule):
    """The class of a module that was laid out, in front of its own; one part at a time is what ``forward`` runs."""

    terapipe_layout: Layout
    _held: list[_Part]  # by chunk
    _active_chunk: int

    def activate(self, chunk_id: int) -> None:
        """Let ``forward`` be that of the part at ``chunk_id``."""
        part = self._held[chunk_id]
        self._active_chunk = chunk_id
        self.forward_funcs, self.fwd_map = part.forward_funcs, part.fwd_map
        self.is_checkpointable_results = part.checkpointable
        self._set_bounds(part.start, part.stop)

    def forward(self, forward_input: Any) -> Any:
        """The layers of the part that is active, for an engine that says which.

        Raises:
            RuntimeError: called by anybody else: it would be some part of the layers.
        """
        if active_slice() is None:
            raise RuntimeError(
                "the layers of this module lie in several parts per stage, and nobody says which are meant: train and "
                "evaluate it by the engine that terapipe_ds.initialize() gives, with the same terapipe section"
            )
        return super().forward(forward_input)

    def each_part(self) -> Iterator[int]:
        """Activate one part after the other, and at the end the one that was active."""
        before = self._active_chunk
        try:
            for chunk_id in range(len(self._held)):
                self.activate(chunk_id)
                yield chunk_id
        finally:
            self.activate(before)

    def replace_layers(self, forward_funcs: list[Any]) -> None:
        """Let the active part run these functions in place of its layers."""
        self.forward_funcs = self._held[self._active_chunk].forward_funcs = forward_funcs

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that owns a layer; for tied layers."""
        return self.terapipe_layout.owner(_part_of(self.parts, layer_idx))

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        if not self.terapipe_layout.has_copies:
            return super()._index_tied_modules()
        return copies_of(self, self.terapipe_layout, _held_layers(self))

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """The weights that other stages hold as well, each with the group of these."""
        return [
            (self._recursive_getattr(comm["module"], name), comm["group"])
            for comm in self.tied_comms.values()
            for name in comm["weight_attr"]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        for weight, group in self.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad, group=group)

    def _precompute_checkpointable_values(self) -> None:
        for chunk_id in self.each_part():
            self.is_checkpointable_results_interval = None  # kept per interval, and not per part
            super()._precompute_checkpointable_values()
            self._held[chunk_id].checkpointable = self.is_checkpointable_results

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's file per layer; of a part with several places its own one writes."""
        for chunk_id in self.each_part():
            if self.terapipe_layout.homes(self._part_id(chunk_id))[0] == (self.stage_id, chunk_id):
                super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().load_state_dir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().compile(*args, **kwargs)

    def _part_id(self, chunk_id: int) -> int:
        return self.terapipe_layout.placement[self.stage_id, chunk_id]


def activate(module: Any, chunk_id: int) -> None:
    """Let ``module`` run the part of this stage at ``chunk_id``; where it holds one, it does so anyway."""
    if isinstance(module, PartedModule):
        module.activate(chunk_id)


def each_part(module: Any) -> Iterator[int]:
    """One part of this stage after the other, as what ``module`` runs; the only one where it holds one."""
    if isinstance(module, PartedModule):
        yield from module.each_part()
    else:
        yield 0


def module_of(layer: Any) -> nn.Module | None:
    """What has the parameters of an entry of ``forward_funcs``; None for a function."""
    if isinstance(layer, functools.partial):  # a tied layer with a forward of its own: (forward_fn, module)
        return next((each for each in layer.args if isinstance(each, nn.Module)), None)
    return layer if isinstance(layer, nn.Module) else None


def parameters_of_part(module: Any) -> list[nn.Parameter]:
    """Of the part that ``module`` runs."""
    if not isinstance(module, PartedModule):
        return list(module.parameters())
    layers = [module_of(layer) for layer in module.forward_funcs]
    return list(nn.ModuleList(layer for layer in layers if layer is not None).parameters())


def parameters_of_other_parts(module: Any) -> list[nn.Parameter]:
    """Of this stage's parts that ``module`` does not run now, as far as the one that it runs has no share in them."""
    if not isinstance(module, PartedModule):
        return []
    mine = {id(parameter) for parameter in parameters_of_part(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in mine]


def replace_layers(module: Any, forward_funcs: list[Any]) -> None:
    """Let the part that is active run these functions in place of its layers."""
    if isinstance(module, PartedModule):
        module.replace_layers(forward_funcs)
    else:
        module.forward_funcs = forward_funcs


def lay_out(module: Any, layout: Layout, parameters: Any = None, optimizer: Any = None) -> Any:
    """Cut ``module`` in the parts of ``layout`` and bring its layers there. A collective over all ranks; a module that
    is laid out so already stays as it is.

    Args:
        parameters: ``model_parameters`` of ``deepspeed.initialize``, chosen before the layers move.
        optimizer: the user's own one, made before the layers move, which would train what nobody runs; or a function
            that makes one.

    Returns:
        ``parameters`` as they are afterwards.

    Raises:
        TeraPipeConfigError: on every rank: fewer layers than parts, nobody knows how the module was cut, or what
            ``parameters`` are afterwards; or an optimizer that exists.
    """
    if isinstance(module, PartedModule):
        if module.terapipe_layout.placement != layout.placement:
            raise TeraPipeConfigError(
                f"the module is laid out for {_described(module.terapipe_layout)}, and the terapipe section asks for "
                f"{_described(layout)}: build a new PipelineModule, or give the same schedule and chunks_per_stage"
            )
        return parameters
    if layout.is_plain:
        return parameters
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TeraPipeConfigError(
            "the optimizer was made before the layers move to the stages that hold them from now on. "
            f"{_LAY_OUT_FIRST} make it then; or give a function that makes one of parameters"
        )
    parameters_before = _ids(module)
    method = getattr(module, PARTITION_METHOD, None) or _guessed_method(module)
    before = list(module.parts)
    setattr(module, STOCK_BOUNDS, before)
    _check_kind(type(module))
    old = _layers_by_name(module, [(module._local_start, module.forward_funcs)])
    with _random_states_kept():
        _cut(module, layout, method)
        module.__class__ = _parted_class(type(module))  # type: ignore[arg-type]  # a class can be a key
        module.terapipe_layout = layout
        _build(module, old)
    _move(module, before, old)
    module.to(get_accelerator().device_name(module.local_rank))
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()
    laid_out = getattr(module, "laid_out", None)
    if laid_out is not None:
        laid_out()
    return _parameters_of(module, parameters, parameters_before)


def _described(layout: Layout) -> str:
    return f"parts {[layout.placement[place] for place in sorted(layout.placement)]} (stage by stage, chunk by chunk)"


@functools.cache
def _parted_class(stock: type) -> type:
    """DeepSpeed goes by the names of some classes, so ours has that of the module's own."""
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (PartedModule, stock), names)


def _check_kind(stock: type) -> None:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    if issubclass(stock, DualPipeVModule):
        raise TeraPipeConfigError("a DualPipeVModule has a layout of its own: build the model as a PipelineModule")


def _ids(module: Any) -> tuple[set[int], set[int]]:
    """Of all parameters, and of those that are trained."""
    parameters = list(module.parameters())
    return {id(p) for p in parameters}, {id(p) for p in parameters if p.requires_grad}


def _parameters_of(module: Any, given: Any, before: tuple[set[int], set[int]]) -> Any:
    """What to hand to the optimizer where ``model_parameters`` was made before the layers moved.

    Args:
        given: ``model_parameters``: None, all parameters or all that are trained, as they were or, by an iterator that
            nobody has asked yet, as they are.
        before: what the module had, see :func:`_ids`.

    Raises:
        TeraPipeConfigError: groups, or a choice among the parameters: nobody knows what is meant for layers that were
            elsewhere.
    """
    if given is None:
        return None
    listed = list(given)
    tensors = {id(each) for each in listed if isinstance(each, Tensor)}
    if len(tensors) == len(listed):
        if tensors in _ids(module):
            return listed
        if tensors in before:
            return [parameter for parameter in module.parameters() if parameter.requires_grad]
    raise TeraPipeConfigError(
        "model_parameters was made before the layers moved to the stages that hold them now, and is not simply all "
        f"parameters that are trained. {_LAY_OUT_FIRST} make the groups then"
    )


# -- cutting -----------------------------------------------------------------------------------------------------------


def _guessed_method(module: Any) -> str:
    """For modules that were built before ``terapipe_ds.register()``: a method that gives the parts it has."""
    bounds, num_stages = list(module.parts), module.num_stages
    for method in ("parameters", "uniform"):
        try:
            with _random_states_kept(), contextlib.redirect_stdout(io.StringIO()):
                module._partition_layers(method=method)
            if list(module.parts) == bounds:
                return method
        finally:
            module.parts, module.num_stages = bounds, num_stages
            module._set_bounds(bounds[module.stage_id], bounds[module.stage_id + 1])
    raise TeraPipeConfigError(
        f"stages with several parts need the partition_method of the PipelineModule, and nothing tells it: {bounds} is "
        "neither that of 'parameters' nor of 'uniform'. Call terapipe_ds.register() before the module is built"
    )


def _cut(module: Any, layout: Layout, method: str) -> None:
    """Set ``module.parts`` to the bounds of all parts, and show them as DeepSpeed shows those of stages."""
    bounds, num_stages, num_parts, shown = list(module.parts), module.num_stages, layout.num_parts, io.StringIO()
    layers = len(module._layer_specs)
    if layers < num_parts:
        raise TeraPipeConfigError(
            f"{layers} layers cannot be cut in {num_parts} parts ({num_stages} stages, {layout.chunks_per_stage} "
            "chunks each): give fewer chunks_per_stage"
        )
    module.num_stages = num_parts
    try:
        with contextlib.redirect_stdout(shown):
            module._partition_layers(method=method)
    finally:
        module.num_stages = num_stages
    print(shown.getvalue().replace("stage=", "part="), end="")
    empty = [part for part in range(num_parts) if module.parts[part] == module.parts[part + 1]]
    if empty:
        module.parts = bounds
        module._set_bounds(bounds[module.stage_id], bounds[module.stage_id + 1])
        raise TeraPipeConfigError(
            f"partition_method {method!r} leaves parts {empty} of {num_parts} without a layer: give fewer "
            "chunks_per_stage, or another partition_method"
        )


def _build(module: Any, old: dict[Name, Any]) -> None:
    """Build the layers of this stage's parts; those in ``old`` are taken as they are."""
    specs = module._layer_specs
    for name in old:
        module._modules.pop(str(name), None)
    # a built layer stands for its spec while DeepSpeed builds what is new
    module._layer_specs = [
        spec if isinstance(spec, TiedLayerSpec) else old.get(layer_id, spec) for layer_id, spec in enumerate(specs)
    ]
    module._held, here = [], set()
    for place in module.terapipe_layout.places(module.stage_id):
        start, stop = module.parts[place.part_id], module.parts[place.part_id + 1]
        module._set_bounds(start, stop)
        module.forward_funcs, module.fwd_map = [], {}
        module._build()
        module._held.append(_Part(start, stop, module.forward_funcs, fwd_map=module.fwd_map))
        here |= {name_of(specs, i) for i in range(start, stop)}
    module._layer_specs = specs
    for key in set(module.tied_modules) - here:
        del module.tied_modules[key]
    module._active_chunk = 0
    module.activate(0)


# -- moving ------------------------------------------------------------------------------------------------------------

_State = list[tuple[str, Tensor, bool]]


def _layers_by_name(module: Any, held: list[tuple[int, list[Any]]]) -> dict[Name, Any]:
    """The layers that were built here; functions have nothing to move and are among them as they are."""
    found: dict[Name, Any] = dict(module.tied_modules.items())
    for start, functions in held:
        for layer_id, layer in enumerate(functions, start):
            if not isinstance(module._layer_specs[layer_id], TiedLayerSpec):
                found[layer_id] = layer
    return found


def _held_layers(module: PartedModule) -> dict[Name, Any]:
    return _layers_by_name(module, [(part.start, part.forward_funcs) for part in module._held])


def _move(module: Any, bounds: list[int], old: dict[Name, Any]) -> None:
    """Send the values of every layer from the stage that had built it to those that have built it now, in one order on
    all stages."""
    specs, layout = module._layer_specs, module.terapipe_layout
    new = _held_layers(module)
    places: dict[Name, list[int]] = {}
    for layer_id in range(len(specs)):
        places.setdefault(name_of(specs, layer_id), []).append(layer_id)
    group = _pipeline_group(module)
    for name, layer_ids in places.items():
        sources = {_part_of(bounds, i) for i in layer_ids}
        targets = {stage for i in layer_ids for stage, _ in layout.homes(_part_of(module.parts, i))} - sources
        for target in sorted(targets):
            if module.stage_id == min(sources):
                _send(module, group, target, old[name])
            elif module.stage_id == target:
                _receive(module, group, min(sources), new[name])


def _part_of(bounds: list[int], layer_id: int) -> int:
    return next(part for part in range(len(bounds) - 1) if bounds[part] <= layer_id < bounds[part + 1])


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


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Layers that are built only to be overwritten draw no numbers of the user's."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
