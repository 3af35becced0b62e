"""Send a model's own causal self-attention to `sliced_attention`, with a name for each call.

A name is the module that runs and the number of the call in that run. So a forward that is recomputed in a backward
finds what it wrote.
"""

from __future__ import annotations

import inspect
import weakref
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.attention.sliced import sliced_attention

_RUNNERS = "deepspeed.runtime."  # the engine and the PipelineModule are modules that run layers, and no layers


class CallName(NamedTuple):
    """Tell one call of attention from all others of a part."""

    module: nn.Module
    number: int

    def __repr__(self) -> str:
        return f"{type(self.module).__name__}, call {self.number}"


class Interception:
    """Names the calls while it is open, and forgets the modules when it is closed.

    Calls are counted from where a module's forward begins, which a hook tells once a module is known, and from where
    another slice begins. A module that runs twice in a slice gives its calls the same names, which the slice store
    refuses.
    """

    def __init__(self) -> None:
        self._calls: dict[nn.Module, tuple[weakref.ref[ActiveSlice], int]] = {}
        self._hooks: dict[nn.Module, RemovableHandle] = {}

    def close(self) -> None:
        """Take the hooks away from the modules."""
        for hook in self._hooks.values():
            hook.remove()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, active: ActiveSlice, dropout_p: float, scale: float | None
    ) -> Tensor | None:
        """Return the attention of the slice's tokens; None where no module runs whose name the call could have."""
        module = _running_module()
        if module is None:
            return None
        layer, without_heads = self._next_name(module, active), q.dim() == 3
        if without_heads:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        out = sliced_attention(q, k, v, layer, scale, dropout_p)
        return out.squeeze(1) if without_heads else out

    def _next_name(self, module: nn.Module, active: ActiveSlice) -> CallName:
        if module not in self._hooks:
            self._hooks[module] = module.register_forward_pre_hook(lambda *_: self._begin_run(module))
        of_slice, calls = self._calls.get(module, (None, 0))
        calls = calls if of_slice is not None and of_slice() is active else 0
        self._calls[module] = weakref.ref(active), calls + 1
        return CallName(module, calls)

    def _begin_run(self, module: nn.Module) -> None:
        """Count the calls of a module from 0 again."""
        self._calls.pop(module, None)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool, active: ActiveSlice
) -> str | None:
    """Say why a call is not plain causal self-attention over the slice's own tokens; None: it is."""
    if mask is not None:
        return "it has an attn_mask, which says nothing of the tokens before the slice: pass is_causal=True and no mask"
    if not is_causal:
        return "is_causal is False: a token would see the tokens after it"
    if q.dim() not in (3, 4) or q.shape[-2] != active.num_tokens:
        return f"the queries do not have {active.num_tokens} tokens in their last dimension but one"
    if k.shape[-2] != q.shape[-2]:
        return "is_causal is True, and there are more or fewer keys than queries"
    if q.dim() == 4 and not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        return "queries, keys and values differ in their heads: pass enable_gqa=True"
    return None


def _running_module() -> nn.Module | None:
    """Return the module whose method runs, the innermost one."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            of_runner = any(each.__module__.startswith(_RUNNERS) for each in type(owner).__mro__)
            return None if of_runner else owner
        frame = frame.f_back
    return None
