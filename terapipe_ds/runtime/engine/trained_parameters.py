"""Give the optimizer of a stage parameters, even if nothing is trained there, and know which ones it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED


def never_none_at_all(module: Any, parameters: Any) -> Any:
    """Return `parameters`; if nothing is trained on a stage or in a group, use a number that never gets a gradient.

    Optimizers accept no empty list, and ZeRO no empty group. The number is a parameter of the module, so that it has
    the dtype and the device of all others. It belongs to no layer, so that no checkpoint has it.
    """
    listed = list(module.parameters() if parameters is None else parameters)
    if any(isinstance(each, Mapping) for each in listed):
        return [_with_some(module, group, f"{NOTHING_TRAINED}_{index}") for index, group in enumerate(listed)]
    if any(each.requires_grad for each in listed):
        return parameters if parameters is None else listed
    # a program that lists frozen parameters may train them later; quantized ones it cannot
    later = [] if parameters is None else [each for each in listed if each.is_floating_point()]
    return [*later, _number(module, NOTHING_TRAINED)]


def fill_empty_groups(module: Any, optimizer: Any) -> None:
    """Put a number into each empty group of an optimizer: DeepSpeed would remove the group, and a scheduler counts it.

    The layers of a stage decide which groups are empty.
    """
    for index, group in enumerate(optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()):
        if not group["params"]:
            group["params"] = [_number(module, f"{NOTHING_TRAINED}_{index}")]


@contextmanager
def pass_over_absent(module: Any, optimizer: Any) -> Iterator[None]:
    """Let a stage load a universal checkpoint, which lacks its numbers if all stages that wrote it trained some.

    DeepSpeed (0.19.8) raises an IndexError on data-parallel ranks that have only the zeros at the end of a group.
    """
    numbers = {id(each) for name, each in module.named_parameters() if name.startswith(NOTHING_TRAINED)}
    groups: Any = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", ())
    with ExitStack() as stack:
        for first, *others in groups:
            if id(first) in numbers or all(vars(each)["_hp_mapping"] is None for each in (first, *others)):
                stack.enter_context(replaced(first, "_hp_mapping", SimpleNamespace(get_optim_state_keys=tuple)))
                stack.enter_context(replaced(first, "load_hp_checkpoint_state", lambda *_, **__: None))
        yield


def tensors_of(parameters: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of a list of parameters or of parameter groups."""
    nested = [each["params"] if isinstance(each, Mapping) else [each] for each in parameters]
    return [tensor for each in nested for tensor in ([each] if isinstance(each, torch.Tensor) else each)]


def remembering(optimizer: Any, trained: list[torch.Tensor]) -> Any:
    """Return `optimizer`, or a function that makes one. `trained` gets its tensors, before ZeRO flattens them."""
    if isinstance(optimizer, torch.optim.Optimizer):
        trained += tensors_of(optimizer.param_groups)
    elif callable(optimizer):

        def make(parameters: Any) -> Any:
            made = optimizer(parameters)
            trained.extend(tensors_of(made.param_groups))
            return made

        return make
    return optimizer


def problem_of_foreign_parameters(module: Any, trained: Iterable[torch.Tensor]) -> str | None:
    """Return an error about parameters that would be trained although the module lacks them; None without any.

    A loss function can bring them, or a layer that hides them in a list: no stage would sum their gradients.
    """
    own = {id(parameter) for parameter in module.parameters()}
    foreign = {id(tensor): tensor for tensor in trained if tensor.requires_grad and id(tensor) not in own}
    if not foreign:
        return None
    shapes = ", ".join(str(list(tensor.shape)) for tensor in list(foreign.values())[:4])
    return (
        f"the optimizer trains parameters that are not in the PipelineModule: {len(foreign)}, of shape {shapes}"
        f"{', ...' if len(foreign) > 4 else ''}. Stages would not sum their gradients, and no checkpoint would have "
        "them: move them into a layer, or make loss_fn an nn.Module that holds them"
    )


def _with_some(module: Any, group: Mapping[str, Any], name: str) -> dict[str, Any]:
    listed = tensors_of([group])
    is_trained = any(each.requires_grad for each in listed)
    return {**group, "params": listed if is_trained else [*listed, _number(module, name)]}


def _number(module: Any, name: str) -> torch.nn.Parameter:
    first = next((each for each in module.parameters() if each.is_floating_point()), None)  # not a quantized weight
    number = torch.nn.Parameter(torch.zeros(1, device="cpu") if first is None else first.detach().new_zeros(1))
    module.register_parameter(name, number)
    return number
