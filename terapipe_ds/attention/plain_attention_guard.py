"""Intercept or refuse attention that would silently see only the tokens of its own slice.

A model that calls `F.scaled_dot_product_attention` or `nn.MultiheadAttention` would train without any error when its
sequence is cut in slices, and learn nothing across them. The engine holds the guard while slices run. It sends plain
causal self-attention to `sliced_attention`, unless the section says `"attention": "explicit"`, and refuses the rest.

The guard names the layer for `sliced_attention` by the module that runs and the number of the call in that run. So a
forward that is recomputed in a backward finds its own entries again.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from terapipe_ds.attention.active_slice import ActiveSlice, active_slice
from terapipe_ds.attention.sliced import sliced_attention

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of F.scaled_dot_product_attention
# torch's own functions, under whatever names callers use, and the token dimension of their queries and keys
_TOKEN_DIMS = {F.scaled_dot_product_attention: -2, F.multi_head_attention_forward: 0}
_KERNELS = ("scaled_dot", "flash_att", "efficient_attention", "cudnn_attention", "varlen_attn", "xformers_flash")
_RUNNERS = "deepspeed.runtime."  # the engine and the PipelineModule are modules that run layers, and no layers
_BACKENDS = "terapipe_ds.attention.backends"
_allowed = 0  # open allow_attention_within_slice() blocks, counted per process: autograd has threads of its own
_intercepted = 0  # running calls of torch's multi_head_attention_forward, whose own attention is intercepted


class PlainAttentionError(RuntimeError):
    """Plain self-attention was called on one slice of a sequence."""


@contextmanager
def allow_attention_within_slice() -> Iterator[None]:
    """Let plain attention pass the guard if it is meant to see only its arguments.

    Use it for attention over something other than tokens (heads, features, the patches of one token), or among the
    tokens of one slice on purpose. Open it in the forward of the layer, which a backward may recompute. Blocks may be
    nested. `"verify"` still compares the results of such a layer.
    """
    global _allowed
    _allowed += 1
    try:
        yield
    finally:
        _allowed -= 1


@contextmanager
def guard_plain_attention(intercept: bool = False) -> Iterator[None]:
    """Raise PlainAttentionError if plain self-attention is called on a slice that is not the whole sequence.

    With `intercept`, causal self-attention over the tokens of the slice goes to `sliced_attention` instead.

    The guard replaces `torch.nn.functional.scaled_dot_product_attention` and `multi_head_attention_forward`. It also
    switches off the shortcut of `nn.MultiheadAttention` around them in evaluation. Self-attention has as many queries
    as keys, whatever that number is: a layer may add registers, or make rows of windows. Guards may be nested.
    """
    # guards may be nested: the functions that are there now come back, whoever put them there
    attention, multi_head = F.scaled_dot_product_attention, F.multi_head_attention_forward
    fast_path, interception = torch.backends.mha.get_fastpath_enabled(), Interception() if intercept else None
    F.scaled_dot_product_attention = _guarded(attention, interception)
    F.multi_head_attention_forward = _guarded_multi_head(multi_head, intercept)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.multi_head_attention_forward = attention, multi_head
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if interception is not None:
            interception.close()


class UncompiledMode(TorchFunctionMode):
    """Be a mode whose own function torch's compiler does not compile.

    Where torch 2.13 gives a function up and runs it uncompiled, it compiles the mode's function instead, and then runs
    later operations with wrong arguments. Within the graph of a compiled function the mode's results are right.
    """

    def __enter__(self) -> Self:
        # whoever compiles functions has imported it, which takes seconds
        if (compiler := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            compiler.skip_code(type(self).__torch_function__.__code__)
        mode: Self = super().__enter__()
        return mode


class GuardCapturedNames(UncompiledMode):
    """Check torch's attention under whatever name it was imported.

    `from torch.nn.functional import scaled_dot_product_attention` binds the function before `guard_plain_attention`
    replaces it. A mode sees every torch function, at a small cost for each: the engine holds it for the first batch
    only. Kernels that are called as operators are torch functions, too. It does not see forwards that are recomputed
    inside a backward.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        token_dim = _TOKEN_DIMS.get(func)
        if token_dim is not None and not _intercepted:
            arguments = dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
            _check(arguments, token_dim, _CAPTURED if token_dim == -2 else "")
        elif _is_kernel(func) and not any(_module_of(frame).startswith(_BACKENDS) for frame in _callers()):
            given = [argument for argument in (*args, *(kwargs or {}).values()) if isinstance(argument, Tensor)][:2]
            token_dim = -2 if "dot_product" in str(func) else -3  # others take [B, T, H, D] or [T, H, D]
            if [x.dim() >= -token_dim for x in given] == [True, True]:  # flash-attn has norms among its operators
                _check(dict(zip(_ARGUMENTS, given, strict=False)), token_dim)
        return func(*args, **(kwargs or {}))


def _is_kernel(func: Any) -> bool:
    """Return whether an operator is the forward of an attention kernel of torch, flash-attn or xformers."""
    if type(func).__module__ != "torch._ops" and not isinstance(func, BuiltinFunctionType):  # `torch._scaled_dot_...`
        return False
    name = str(func)
    return any(part in name for part in _KERNELS) and "backward" not in name


def _callers() -> Iterator[FrameType]:
    """Yield the frames that run now, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _guarded(attention: Callable[..., Any], interception: Interception | None) -> Callable[..., Any]:
    @functools.wraps(attention)
    def guarded(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # cross-attention and whole sequences are none of ours
        active = active_slice()
        is_plain = _sees_all(active, is_causal and attn_mask is None)
        may_cross = not is_causal or interception is None
        if active is None or is_plain or (may_cross and query.shape[-2] != key.shape[-2]):
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return attention(query, key, value, attn_mask, **options)  # type: ignore[no-any-return]
        if interception is None:
            raise _error(query, key, _CALL_OURS)
        cause = _problem_of(query, key, value, attn_mask, is_causal, enable_gqa, active)
        if cause is None:
            out = interception.attend(query, key, value, active, dropout_p, scale)
            if out is not None:
                return out
            cause = "no nn.Module runs that could name the call, but a function: make it the forward of a module"
        raise _error(query, key, cause)

    return guarded


_signature = functools.lru_cache(maxsize=8)(inspect.signature)


def _guarded_multi_head(multi_head: Callable[..., Any], intercept: bool) -> Callable[..., Any]:
    @functools.wraps(multi_head)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        global _intercepted
        # it has some 25 arguments, which callers give by place or by name
        bound = _signature(multi_head).bind(*args, **kwargs)
        bound.apply_defaults()
        query, key = bound.arguments["query"], bound.arguments["key"]
        if _sees_all(active_slice(), bound.arguments["is_causal"]) or query.shape[0] != key.shape[0]:
            return multi_head(*args, **kwargs)
        if not intercept:
            raise _error(query, key, _CALL_OURS)
        if bound.arguments["need_weights"]:
            raise _error(query, key, "it returns weights, and a slice has only a part of them: pass need_weights=False")
        if not bound.arguments["is_causal"]:
            raise _error(
                query, key, f"is_causal is False: pass is_causal=True beside the causal attn_mask. {_NOT_CAUSAL}"
            )
        _intercepted += 1
        try:  # it calls F.scaled_dot_product_attention, without the mask
            return multi_head(*args, **kwargs)
        finally:
            _intercepted -= 1

    return guarded


def _sees_all(active: ActiveSlice | None, is_causal: bool) -> bool:
    """Return whether plain attention sees what it should: not in a slice, nor in rows of documents if it only knows
    that it is causal."""
    if active is None or _allowed > 0:
        return True
    return active.is_whole and not (is_causal and active.reach(None).is_limited)


def _check(arguments: Mapping[str, Any], token_dim: int, advice: str = "") -> None:
    query, key = arguments["query"], arguments["key"]
    is_causal = token_dim == -2 and arguments.get("attn_mask") is None and bool(arguments.get("is_causal"))
    if not _sees_all(active_slice(), is_causal) and query.shape[token_dim] == key.shape[token_dim]:
        raise _error(query, key, advice or _CALL_OURS)


_NOT_CAUSAL = (
    'Attention that is not causal cannot be sliced: train such a model with "slices": 1 (sliced_attention would make '
    "it causal)"
)
_CALL_OURS = f"call terapipe_ds.attention.sliced_attention(q, k, v, layer) if it is causal. {_NOT_CAUSAL}"
_CAPTURED = (
    "its name was imported from torch.nn.functional, where the engine cannot replace it. Causal attention: call "
    "F.scaled_dot_product_attention, which the engine sends to sliced_attention if is_causal=True; or call "
    f"terapipe_ds.attention.sliced_attention(q, k, v, layer). {_NOT_CAUSAL}"
)


def _error(query: Tensor, key: Tensor, advice: str) -> PlainAttentionError:
    """Return the error of a call with the place in the user's code; `advice` is the cause and the change to make."""
    active = active_slice()
    assert active is not None
    return PlainAttentionError(
        f"plain attention was called on slice [{active.start}, {active.stop}) of a sequence of "
        f"{active.sequence_length} tokens{_place_of_call()}: it would see "
        f"{'other documents of its row' if active.is_whole else 'nothing of the tokens before the slice'}, "
        f"which has {active.num_tokens} (queries of shape {list(query.shape)}, keys of shape {list(key.shape)}). "
        f"Cause and fix: {advice}. Attention over something else than the tokens of the sequence "
        "(features, heads, a memory of as many entries), or among the tokens of one slice on purpose: call it inside "
        "`with terapipe_ds.attention.allow_attention_within_slice():`."
    )


def _place_of_call() -> str:
    """Return the file, line and function of the innermost caller outside torch and this package; "" without one."""
    for frame in _callers():
        if _module_of(frame).partition(".")[0] not in ("torch", "terapipe_ds"):
            return f", at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
    return ""


# --- calls that are intercepted


class CallName(NamedTuple):
    """Tell one call of attention from all others of a part."""

    module: nn.Module
    number: int

    def __repr__(self) -> str:
        return f"{type(self.module).__name__}, call {self.number}"


class Interception:
    """Name the calls while it is open, and forget the modules when it is closed.

    Counting starts at 0 when a module's forward begins, which a hook reports once a module is known, and when another
    slice begins. If a module runs twice in a slice, its calls get the same names, and the slice store refuses them.
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
        """Return the attention of the slice's tokens; None if no module runs whose name the call could take."""
        module = _running_module()
        if module is None:
            return None
        layer, without_heads = self._next_name(module, active), q.dim() == 3
        if without_heads:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        out = sliced_attention(q, k, v, layer, scale, dropout_p)
        return out.squeeze(1) if without_heads else out

    def _next_name(self, module: nn.Module, active: ActiveSlice) -> CallName:
        # counting begins anew with each forward, so that a recomputed one finds its own names
        if module not in self._hooks:
            self._hooks[module] = module.register_forward_pre_hook(lambda *_: self._begin_run(module))
        of_slice, calls = self._calls.get(module, (None, 0))
        calls = calls if of_slice is not None and of_slice() is active else 0
        self._calls[module] = weakref.ref(active), calls + 1
        return CallName(module, calls)

    def _begin_run(self, module: nn.Module) -> None:
        """Count the calls of a module from 0 again."""
        self._calls.pop(module, None)


def _problem_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool, active: ActiveSlice
) -> str | None:
    """Say why a call is not plain causal self-attention over the slice's own tokens; None: it is."""
    if mask is not None:
        return (
            "it has an attn_mask, which does not cover the tokens before the slice. If the mask is causal, pass "
            f"is_causal=True and no mask; a window or documents: sliced_attention takes them. {_NOT_CAUSAL}"
        )
    if not is_causal:
        return f"is_causal is False: a token would see the tokens after it. {_NOT_CAUSAL}"
    if q.dim() not in (3, 4) or q.shape[-2] != active.num_tokens:
        return f"the queries do not have {active.num_tokens} tokens in their last dimension but one"
    if k.shape[-2] != q.shape[-2]:
        return "is_causal is True, and there are more or fewer keys than queries"
    if q.dim() == 4 and not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        return "queries, keys and values differ in their heads: pass enable_gqa=True"
    return None


def _running_module() -> nn.Module | None:
    """Return the module whose method runs, the innermost one."""
    for frame in _callers():
        # the first argument of a running method is its object
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            of_runner = any(base.__module__.startswith(_RUNNERS) for base in type(owner).__mro__)
            return None if of_runner else owner
    return None
