"""Run the layers of a stage, forward and backward, without leaving a trace of it.

Measurements use the very layers that train. Inside `untouched` the layers work on stand-ins: the same weights in
memory, but other `Parameter` objects, with gradients of their own and without the hooks by which optimizers gather
gradients. Buffers, other attributes and random numbers are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn

from terapipe_ds.messages import logger
from terapipe_ds.runtime.layers.activation_checkpointing import tracker_states_kept
from terapipe_ds.runtime.layers.gradient_sums import GradientSums
from terapipe_ds.runtime.layers.kept_state import KeptState
from terapipe_ds.runtime.layout.layers_to_parts import random_states_kept
from terapipe_ds.runtime.layout.parted_module import functions_of


@contextmanager
def untouched(module: nn.Module, sums: GradientSums | None = None, with_gradients: bool = True) -> Iterator[None]:
    """Put parameters, gradients, buffers and random numbers back after measurements on `module`.

    Autograd records inside, even if the caller evaluates without gradients: a measurement needs a backward.

    With `sums` each backward adds its gradients to these sums of the optimizer, as in training, and they are zeroed
    afterwards. With `with_gradients` they begin as zeros, to which a backward adds, like the backward of a later slice.
    Otherwise they begin as None, and hooks that change the gradient of a parameter do so here as well.
    """
    with torch.inference_mode(False), torch.enable_grad():
        trackers = ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())
        others = stand_ins(module, sums, with_gradients)
        with random_states_kept(), tracker_states_kept(trackers), _same_state(module), others:
            yield


@contextmanager
def _same_state(module: nn.Module) -> Iterator[None]:
    """Restore the state that layers, plain functions and the loss keep, such as a mask from the first forward."""
    hooks = (hook for parameter in module.parameters() for hook in (parameter._backward_hooks or {}).values())
    functions = [*hooks, *functions_of(module)]
    others = {f"function {i}": each for i, each in enumerate(functions) if not isinstance(each, nn.Module)}
    before = KeptState({"": module, **others})
    before.renew()
    if before.stuck:
        logger.debug(
            "trial runs use these attributes without a copy, since they are large or cannot be copied: %s",
            ", ".join(before.stuck),
        )
    module.train()
    try:
        yield
    finally:
        before.put_back()
        lost = before.lost()
        if lost:
            logger.warning(
                "layers ran on a trial, and %s changed by it, which cannot be put back: training begins with other "
                "values than without the trial. Keep such values in attributes of the layer (numbers, lists, dicts, "
                'tensors, generators), or give terapipe.slices as a list and set terapipe.verify to "off"',
                ", ".join(lost),
            )


@contextmanager
def stand_ins(
    module: nn.Module, sums: GradientSums | None = None, with_gradients: bool = True, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Replace the `Parameter` objects of `module` by others; with `dtype`, by copies of all floating numbers."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    others: dict[int, Tensor] = {id(p): _stand_in(p, sums, with_gradients, dtype) for p, _ in gradients}
    if dtype is not None:
        others |= {id(buffer): buffer.to(dtype) for buffer in module.buffers() if buffer.is_floating_point()}
    # change the modules' own dicts: a layer then reads a stand-in by any name
    registries: list[dict[str, Any]] = [r for part in module.modules() for r in (part._parameters, part._buffers)]
    originals = [(r, name, tensor) for r in registries for name, tensor in r.items() if id(tensor) in others]
    try:
        for parameter, _ in gradients:
            # restore the gradients of training, whatever the trial leaves
            parameter.grad = None  # a layer that keeps a reference of its own leaves its gradient here
        for registry, name, tensor in originals:
            registry[name] = others[id(tensor)]
        with nullcontext() if sums is None else sums.lent(others):
            yield
    finally:
        for registry, name, tensor in originals:
            registry[name] = tensor
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _stand_in(
    parameter: nn.Parameter, sums: GradientSums | None, with_gradients: bool, dtype: torch.dtype | None
) -> nn.Parameter:
    numbers = parameter.detach()
    numbers = numbers.to(dtype) if dtype is not None and parameter.is_floating_point() else numbers
    stand_in = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not torch.is_tensor(value):  # marks such as `model_parallel`; not a main gradient
            setattr(stand_in, name, value)
    if not parameter.requires_grad:
        return stand_in
    if not with_gradients:
        for hook in (parameter._backward_hooks or {}).values():  # they change gradients, but differently with slices
            stand_in.register_hook(hook)
    elif sums is not None and sums.has(parameter):
        stand_in.register_post_accumulate_grad_hook(sums.take)
    else:
        stand_in.grad = torch.zeros_like(parameter)
    return stand_in
