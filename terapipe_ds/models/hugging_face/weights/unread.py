"""Read the values of weights at their first use, so that a stage reads no layer that it does not keep.

Saved buffers count as weights here. DeepSpeed builds the layers of a stage before any config is read, and an engine may
give them to other stages. Until then they have memory that nothing has touched. Every engine reads the values while it
is built: ours requests all of them (`HuggingFaceModule.laid_out`), and DeepSpeed's own accesses each to cast it and to
move it to its device. Earlier accesses (a norm, a copy, a `state_dict`) get the values too.

Parameters on the device "meta" would not do: a user's change before the engine exists (`weight.mul_(2)`) would be
lost silently, and peft could not compute initial values from them. torch's `UninitializedParameter` has no shape,
but DeepSpeed needs one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Read = Callable[[Mapping[str, Tensor]], None]

_PROPERTIES = (
    "shape dtype device layout ndim is_leaf is_meta is_sparse is_cuda is_cpu is_quantized is_nested grad requires_grad "
    "grad_fn"
)
_METHODS = (
    "size dim numel nelement element_size ndimension stride is_floating_point is_complex is_contiguous get_device "
    "requires_grad_ __hash__ __len__"
)
_WITHOUT_VALUES = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)


class Unread(Tensor):
    """Be a tensor without values yet; the first operation that needs them reads the values of its whole module.

    Then it has its former class and is the same object, so that lists of parameters and optimizers stay valid.
    """

    is_unread = True  # for code that moves layers: there is nothing to send
    read: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WITHOUT_VALUES:
            read(tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        read([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        read([self])
        return self.__reduce_ex__(protocol)


class _UnreadParameter(Unread, nn.Parameter):
    """Be a parameter without values yet."""


def leave_unread(module: nn.Module, how: Read) -> None:
    """Have `how` fill the parameters and saved buffers of `module`, by their names, when one of them is needed."""
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    unread = {id(each): each for each in (*module.parameters(), *tensors.values())}.values()
    kinds = {id(each): type(each) for each in unread}  # quantized ones have a class of their own

    def read_all() -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            how(tensors)
        for each in unread:
            del each.read  # type: ignore[attr-defined]
            each.__class__ = kinds[id(each)]

    for each in unread:
        each.read = read_all  # type: ignore[attr-defined]
        each.__class__ = _UnreadParameter if isinstance(each, nn.Parameter) else Unread


def read(tensors: Iterable[Tensor]) -> None:
    """Read the values of the tensors that have none yet."""
    for tensor in tensors:
        if isinstance(tensor, Unread):
            tensor.read()


def is_unread(module: nn.Module) -> bool:
    """Return whether some parameter of the module has no values yet."""
    return any(isinstance(parameter, Unread) for parameter in module.parameters())
