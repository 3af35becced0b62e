"""Cut a `PipelineModule` into the parts of a layout, and move its layers to the stages that hold the parts.

DeepSpeed builds the layers of one part on each stage before it reads any config. `lay_out` cuts the module anew by
DeepSpeed's own partition methods, and moves layers with their values to the stages that hold them from then on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import TiedLayerSpec
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import gather, refuse_everywhere
from terapipe_ds.runtime.layout.layer_names import STOCK_BOUNDS, LayerName, layer_name, layers_by_name, part_of
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.parted_module import HeldPart, PartedModule
from terapipe_ds.runtime.layout.sequence_axis import group_of
from terapipe_ds.runtime.layout.tied_and_copied import join_copies
from terapipe_ds.runtime.log import show_log

PARTITION_METHOD = "_terapipe_partition_method"  # attribute of a module: the method that cut it
_LAY_OUT_FIRST = "Call terapipe_ds.lay_out(module, ds_config) right after the PipelineModule is built, and"


def lay_out(module: Any, layout: Layout, parameters: Any = None, optimizer: Any = None) -> Any:
    """Cut `module` into the parts of `layout` and move each layer to its stages. A collective over all ranks.

    A module that already has this layout does not change. `parameters` are the `model_parameters` of
    `deepspeed.initialize`, chosen before the layers move; this returns the ones for the layers afterwards. `optimizer`
    is the user's own one, or a function that makes one.

    Raises:
        TeraPipeConfigError: on every rank: there are fewer layers than parts; nothing tells how the module was cut, or
            which `parameters` there are afterwards; or the optimizer exists already, and would train parameters that no
            stage runs.
    """
    # a second engine on the same module finds its layers in place
    if isinstance(module, PartedModule):
        there = module.terapipe_layout
        same_cut = layout.bounds in (there.bounds, tuple(module.parts))
        if there.placement != layout.placement or not same_cut:
            raise TeraPipeConfigError(
                f"the module is laid out for {_described(there)}, and the terapipe section asks for "
                f"{_described(layout)}: build a new PipelineModule, or give the same schedule, chunks_per_stage and "
                "partition"
            )
        if there.has_copies:
            join_copies(module)
        return parameters
    # the config wants DeepSpeed's own cut: nothing moves
    if layout.is_plain and layout.bounds in (None, tuple(module.parts)):
        if layout.bounds is not None:
            _log_cut(module, "by hand", ", as the module is cut already")
        _refuse_empty(module.parts, getattr(module, PARTITION_METHOD, None))
        getattr(module, "laid_out", lambda: None)()  # layers have their stages, and nobody has needed weights yet
        return parameters
    # its parameters would belong to layers that leave this stage
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TeraPipeConfigError(
            "the optimizer was made before the layers move to the stages that hold them from now on. "
            f"{_LAY_OUT_FIRST} make it then; or give a function that makes one of parameters"
        )
    # remember the present layers, before this stage gets others
    ids_before, bounds_before = _parameter_ids(module), list(module.parts)
    method = _method_of(module, layout) if layout.bounds is None else None
    bounds = list(layout.bounds or ()) if method is None else bounds_by(module, method, layout.num_parts)
    setattr(module, STOCK_BOUNDS, bounds_before)
    built = layers_by_name(module, [(module._local_start, module.forward_funcs)])
    names = [layer_name(module._layer_specs, layer_id) for layer_id in range(len(module._layer_specs))]
    # building layers draws random numbers, which a script without stages would not have drawn
    with random_states_kept():
        module_class = _parted_class(type(module))  # type: ignore[arg-type]  # a class can be a key
        _cut(module, bounds, method)
        module.__class__ = module_class
        module.terapipe_layout = layout
        moves = _moves(module, bounds_before, names)
        _build(module, {name: built[name] for name in built if module.stage_id not in moves[name][1]}, names)
    _move_layers(module, moves, built)
    getattr(module, "laid_out", lambda: None)()
    # new layers are on the CPU, and tied weights need their groups again
    module.to(get_accelerator().device_name(module.local_rank))
    module.tied_comms = module._index_tied_modules()
    if layout.has_copies:
        join_copies(module)  # also the loss, which each rank has built
    module._synchronize_tied_weights()
    return _parameters_of(module, parameters, ids_before)


def _described(layout: Layout) -> str:
    return (
        f"parts {[layout.placement[place] for place in sorted(layout.placement)]} (stage by stage, chunk by chunk)"
        + ("" if layout.bounds is None else f" with the partition {list(layout.bounds)}")
    )


@functools.cache
def _parted_class(stock: type) -> type:
    """Make a class in front of the module's own, with its name: DeepSpeed goes by the names of some classes."""
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    if issubclass(stock, DualPipeVModule):
        raise TeraPipeConfigError("a DualPipeVModule has a layout of its own: build the model as a PipelineModule")
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (PartedModule, stock), names)


def _parameter_ids(module: Any) -> tuple[set[int], set[int]]:
    """Return the ids of all parameters, and of those that are trained."""
    parameters = list(module.parameters())
    return {id(p) for p in parameters}, {id(p) for p in parameters if p.requires_grad}


def _parameters_of(module: Any, parameters: Any, before: tuple[set[int], set[int]]) -> Any:
    """Return the optimizer's parameters for a `model_parameters` that was made before the layers moved.

    An unread iterator yields the new parameters. `before` are the `_parameter_ids` that the module had. Groups, or a
    choice among the parameters, on some rank are an error on all: they have no meaning for other layers.
    """
    listed = None if parameters is None else list(parameters)
    # the same parameters in another order are still all of them
    ids = {id(each) for each in listed or () if isinstance(each, Tensor)}
    is_set = listed is not None and len(ids) == len(listed)
    is_current = listed is None or (is_set and ids in _parameter_ids(module))
    # a stage without frozen layers gives the same list for all and for those that are trained
    of_ranks = gather([is_current or (is_set and ids == given) for given in before])
    is_every, is_trained = map(all, zip(*of_ranks, strict=True))
    if not (is_every or is_trained):
        raise TeraPipeConfigError(
            "model_parameters was made before the layers moved to the stages that hold them now, and is not simply all "
            f"parameters, or all that are trained. {_LAY_OUT_FIRST} make the groups then"
        )
    if is_current:
        return listed
    return [parameter for parameter in module.parameters() if parameter.requires_grad or not is_trained]


def bounds_by(module: Any, method: str, num_parts: int) -> list[int]:
    """Return the first layer of every part, and the number of layers. DeepSpeed builds layers to count parameters."""
    cut = copy.copy(module)  # the module keeps its own cut
    cut.num_stages = num_parts
    is_silent = replaced(deepspeed_logger, "disabled", True)
    with is_silent, contextlib.redirect_stdout(io.StringIO()), random_states_kept():
        cut._partition_layers(method=method)
    return [int(bound) for bound in cut.parts]  # NumPy's integers are no seeds, with `seed_layers`


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy, the host and the current device at the end."""
    accelerator = get_accelerator()
    on_device, host = accelerator.get_rng_state(), torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        accelerator.set_rng_state(on_device)


def _method_of(module: Any, layout: Layout) -> str:
    if len(module._layer_specs) < layout.num_parts:
        raise TeraPipeConfigError(
            f"{len(module._layer_specs)} layers cannot be cut in {layout.num_parts} parts ({layout.num_stages} stages, "
            f"{layout.chunks_per_stage} chunks each): give fewer chunks_per_stage"
        )
    # nothing recorded the method if the module was built before `register`
    stock = list(getattr(module, STOCK_BOUNDS, module.parts))
    guessed = (each for each in ("parameters", "uniform") if bounds_by(module, each, len(stock) - 1) == stock)
    method = getattr(module, PARTITION_METHOD, None) or next(guessed, None)
    if method is None:
        raise TeraPipeConfigError(
            "stages with several parts need the partition_method of the PipelineModule, and nothing tells it: "
            f"neither 'parameters' nor 'uniform' gives the bounds {[*map(int, module.parts)]}. Call "
            "terapipe_ds.register() before the module is built"
        )
    return str(method)


def _cut(module: Any, bounds: list[int], method: str | None) -> None:
    """Set `module.parts` to the bounds of all parts, from the layout or from DeepSpeed's partition method."""
    _refuse_empty(bounds, method)
    module.parts = bounds
    if method is None:
        stock = getattr(module, PARTITION_METHOD, None) or "of the module"
        _log_cut(module, "by hand", f", instead of partition_method {stock!r}")
    else:
        _log_cut(module, f"by {method!r}")


def _refuse_empty(bounds: Sequence[int], method: str | None) -> None:
    """Refuse parts without layers, which no stage could run; uneven layers may leave some."""
    empty = [part_id for part_id, (start, stop) in enumerate(itertools.pairwise(bounds)) if start == stop]
    if empty:
        cut = "the cut" if method is None else f"partition_method {method!r}"
        raise TeraPipeConfigError(
            f"{cut} leaves parts {empty} of {len(bounds) - 1} without a layer: give fewer stages or chunks_per_stage, "
            "or another partition_method"
        )


def _log_cut(module: Any, by: str, more: str = "") -> None:
    if torch_dist.get_rank() != 0:
        return
    parts = ", ".join(
        f"part {i} has layers {a} to {b - 1}" for i, (a, b) in enumerate(itertools.pairwise(module.parts))
    )
    show_log(0)
    logger.info("partition %s: %s (%s)%s", by, [*map(int, module.parts)], parts, more)  # numpy's ints


Moves = dict[LayerName, tuple[int, list[int]]]
"""Of each layer: the stage that sends its values, and those that get them."""


def _moves(module: Any, bounds_before: Sequence[int], names: Sequence[LayerName]) -> Moves:
    """Return which layers move. DeepSpeed had built one part on each stage, and a tied layer once on each.

    A stage makes a tied layer from the first of its specs. If that is another one now, the layer may have more in it.
    """
    before: dict[LayerName, dict[int, int]] = defaultdict(dict)  # by stage: the first spec of the layer there
    now: dict[LayerName, dict[int, int]] = defaultdict(dict)
    for layer_id, name in enumerate(names):
        before[name].setdefault(part_of(bounds_before, layer_id), layer_id)
        for stage, _ in module.terapipe_layout.homes(part_of(module.parts, layer_id)):
            now[name].setdefault(stage, layer_id)
    sources = {name: min(before[name]) for name in before}
    return {
        name: (source, sorted(s for s, i in now[name].items() if s != source and before[name].get(s) != i))
        for name, source in sources.items()
    }


def _build(module: Any, built: Mapping[LayerName, Any], names: Sequence[LayerName]) -> None:
    """Build the layers that this stage's parts lack. `built` has the layers that stay here, by name."""
    specs = module._layer_specs
    for key in set(module.tied_modules) - set(built):
        del module.tied_modules[key]
    for name in built:
        module._modules.pop(str(name), None)
    # a built layer replaces its spec while DeepSpeed builds the new layers
    module._layer_specs = [
        spec if isinstance(spec, TiedLayerSpec) else built.get(layer_id, spec) for layer_id, spec in enumerate(specs)
    ]
    ids = [place.part_id for place in module.terapipe_layout.places(module.stage_id)]
    places = [(module.parts[part_id], module.parts[part_id + 1]) for part_id in ids]
    here = sorted(layer_id for start, stop in places for layer_id in range(start, stop))
    for layer_id in here:  # whatever the order of the parts: the first of a tied layer's specs makes it
        spec = specs[layer_id]
        if isinstance(spec, TiedLayerSpec) and spec.key not in module.tied_modules:
            module.tied_modules[spec.key] = spec.build()
            module.tied_weight_attrs[spec.key] = spec.tied_weight_attr
    module.held_parts = []
    for start, stop in places:
        module._set_bounds(start, stop)
        module.forward_funcs, module.fwd_map = [], {}
        module._build()
        module.held_parts.append(HeldPart(start, stop, module.forward_funcs, fwd_map=module.fwd_map))
    module._layer_specs = specs
    for key in set(module.tied_modules) - {names[layer_id] for layer_id in here}:
        del module.tied_modules[key]
    module.activate(0)


def _move_layers(module: Any, moves: Moves, built: Mapping[LayerName, Any]) -> None:
    """Send each layer's values from the stage that built it to those that hold it now, in one order on all stages.

    Every rank refuses layers that the program has changed since they were built: only values can move.
    """
    held, grid = module.held_layers(), module._grid
    # on the CPU: DeepSpeed has not chosen this rank's device yet
    group = group_of(module.global_rank, grid.topology().get_axis_comm_lists("pipe"), backend="gloo")
    problem = None
    for name, (source, targets) in moves.items():
        for target in targets:
            if module.stage_id == source:
                # some have no values yet, and get them there (`module.laid_out`)
                values = [
                    (key, None if getattr(t, "is_unread", False) else t.detach().cpu().clone(), t.requires_grad)
                    for key, t in _tensors(built[name]).items()
                ]
                sent = [_form_of(built[name]), values]
                torch_dist.send_object_list(sent, dst=grid.pp_group[target], group=group)
            elif module.stage_id == target:
                tensors, received = _tensors(held[name]), list[Any]([None, None])
                torch_dist.recv_object_list(received, src=grid.pp_group[source], group=group)
                changed = [key for key, _ in sorted(received[0] ^ _form_of(held[name]))]
                if changed:
                    problem = problem or _problem_of_changes(name, changed)
                    continue
                for key, value, requires_grad in received[1]:
                    if value is not None:
                        tensors[key].data = value.to(tensors[key].device)  # in the present dtype of the module
                    tensors[key].requires_grad_(requires_grad)

    refuse_everywhere(problem)


def _problem_of_changes(name: LayerName, changed: Sequence[str]) -> str:
    places = ", ".join(dict.fromkeys(key or "the layer itself" for key in changed[:4]))
    return (
        f"layer {name} was changed after the PipelineModule was built ({places}: another class, a hook, a forward of "
        "its own, or another number). It moves to another stage, which builds it without the change. "
        f"{_LAY_OUT_FIRST} change the layers then"
    )


def _form_of(layer: Any) -> set[tuple[str, str]]:
    """Return the names of a layer's modules and tensors, each with what a stage that builds the layer may lack.

    That is the class, hooks, a forward set on the object, and floating-point settings such as a dropout's `p`.
    """
    if not isinstance(layer, nn.Module):
        return set()
    form = {(name, f"hooks: {_num_hooks(tensor)}") for name, tensor in _tensors(layer).items()}
    for name, each in layer.named_modules():
        own = vars(each)
        hooks = [(key, len(value)) for key, value in own.items() if key.endswith("_hooks") and value]
        numbers = [(key, value) for key, value in own.items() if isinstance(value, float)]
        form.add((name, f"{type(each).__qualname__} {hooks} {numbers} {'forward' in own}"))
    return form


def _num_hooks(tensor: Tensor) -> int:
    if getattr(tensor, "is_unread", False):  # any hook would have read it
        return 0
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def _tensors(layer: Any) -> dict[str, Tensor]:
    if not isinstance(layer, nn.Module):
        return {}
    return {**dict(layer.named_parameters(remove_duplicate=False)), **dict(layer.named_buffers(remove_duplicate=False))}
