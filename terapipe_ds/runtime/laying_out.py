"""Cutting a ``PipelineModule`` in the parts of a layout, on the stages where these stand.

DeepSpeed builds the layers of one part on each stage before any config is read. :func:`lay_out` cuts the module anew by
DeepSpeed's own partition methods and moves layers to the stages that hold them from then on, with the values they have:
whatever the layout is, the model starts from the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import gather
from terapipe_ds.runtime.layer_moves import move_layers
from terapipe_ds.runtime.layout import Layout
from terapipe_ds.runtime.parted import HeldPart, PartedModule, layers_by_name
from terapipe_ds.runtime.partition import PARTITION_METHOD, guessed_method, random_states_kept
from terapipe_ds.runtime.state_order import STOCK_BOUNDS, Name, name_of

_LAY_OUT_FIRST = "Call terapipe_ds.lay_out(module, ds_config) right after the PipelineModule is built, and"


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
    method = _method_of(module)
    before = list(module.parts)
    setattr(module, STOCK_BOUNDS, before)
    _check_kind(type(module))
    old = layers_by_name(module, [(module._local_start, module.forward_funcs)])
    with random_states_kept():
        _cut(module, layout, method)
        module.__class__ = _parted_class(type(module))  # type: ignore[arg-type]  # a class can be a key
        module.terapipe_layout = layout
        _build(module, old)
    move_layers(module, before, old)
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
        TeraPipeConfigError: on every rank: groups, or a choice among the parameters, on some rank: nobody knows what
            is meant for layers that were elsewhere.
    """
    listed = None if given is None else list(given)
    meant = gather(_meant(listed, module, before))
    if "choice" in meant or {"all", "trained"} <= set(meant):
        raise TeraPipeConfigError(
            "model_parameters was made before the layers moved to the stages that hold them now, and is not simply all "
            f"parameters, or all that are trained. {_LAY_OUT_FIRST} make the groups then"
        )
    if meant[torch_dist.get_rank()] == "as given":
        return listed
    frozen_too = "all" in meant  # a stage without frozen layers gives the same list in both cases
    return [parameter for parameter in module.parameters() if frozen_too or parameter.requires_grad]


def _meant(listed: list[Any] | None, module: Any, before: tuple[set[int], set[int]]) -> str:
    """What ``model_parameters`` stands for on this rank."""
    if listed is None:
        return "as given"
    tensors = {id(each) for each in listed if isinstance(each, Tensor)}
    if len(tensors) < len(listed):
        return "choice"
    if tensors in _ids(module):
        return "as given"
    if tensors not in before:
        return "choice"
    every, trained = before
    return "either" if every == trained else "all" if tensors == every else "trained"


def can_move(module: Any, parameters: Any, optimizer: Any) -> bool:
    """Whether :func:`lay_out` could move layers of this rank; ``parameters`` must not be an iterator.

    The method that cuts ``module`` is written down where it had to be guessed.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return False
    listed = None if parameters is None else list(parameters)
    if _meant(listed, module, _ids(module)) != "as given":
        return False
    try:
        setattr(module, PARTITION_METHOD, _method_of(module))
    except TeraPipeConfigError:
        return False
    return True


# -- cutting -----------------------------------------------------------------------------------------------------------


def _method_of(module: Any) -> str:
    method = getattr(module, PARTITION_METHOD, None) or guessed_method(module)
    if method is None:
        raise TeraPipeConfigError(
            "stages with several parts need the partition_method of the PipelineModule, and nothing tells it: "
            f"{list(module.parts)} is neither that of 'parameters' nor of 'uniform'. Call terapipe_ds.register() "
            "before the module is built"
        )
    return str(method)


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
        module.parts = [int(bound) for bound in module.parts]  # NumPy's integers are no seeds, with `seed_layers`
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
        module._held.append(HeldPart(start, stop, module.forward_funcs, fwd_map=module.fwd_map))
        here |= {name_of(specs, i) for i in range(start, stop)}
    module._layer_specs = specs
    for key in set(module.tied_modules) - here:
        del module.tied_modules[key]
    module._active_chunk = 0
    module.activate(0)
