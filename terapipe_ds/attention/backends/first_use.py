"""Compare kernels with plain torch at their first use on a device, and time those that are right.

A wrong gradient is worse than a slow one: a kernel that differs, or raises, is passed over for such calls.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils import _python_dispatch

from terapipe_ds.attention.backends.base import Attended, Backend, Need, Queries, Tensor, expand_heads, sum_groups
from terapipe_ds.attention.backends.reference import Reference
from terapipe_ds.attention.reach import Span
from terapipe_ds.messages import logger

Forward = Callable[[Queries], Attended]
Backward = Callable[..., Tensor]  # of `Backend.backward`
Shape = tuple[int, int, int, int, int]
CHECKED = (
    (1, 4, 2, 300, 0), (1, 4, 2, 40, 88), (1, 4, 2, 40, 1000), (1, 4, 2, 1, 1000), (4, 64, 16, 64, 300),
    (2, 8, 8, 128, 129), (1, 4, 1, 2, 500),
)  # fmt: skip
"""(batch, query heads, key heads, queries, keys before them) for each way that torch's kernel has through a slice
(set_params_splitkv, num_splits_heuristic and mha_fwd of its flash_api.cpp): the first slice, with grouped heads; keys
that fill one block; few blocks of 64 queries before several blocks of keys, which are then divided over the processors
and merged; one query, whose group takes the place of queries; and enough blocks of queries that none is divided. Then
several rows without groups, and all queries with one key head.
"""
_WITH_DROPOUT, _DROPOUT_P = (2, 4, 2, 40, 300), 0.25  # with dropout kernels divide no keys and swap no heads
_MOST_ERROR = 0.02  # for bf16, whose steps are 0.4 %
_WINDOW, _SOFTCAP = 100, 5.0
_TIMED_TOKENS, _MOST_TIMED_HEADS, _TIMED_RUNS = 2048, 16, 7
_TIMED_PREFIX = 7 * _TIMED_TOKENS  # long enough that the device computes while the host calls
_builds_plans = True


@contextmanager
def plans_kept(here: bool = False, in_torch: bool = False) -> Iterator[None]:
    """Let cuDNN build no plans of kernels in the block, unless they are for calls from `here`, or from `in_torch`.

    A new plan loads kernels, and CUDA may then wait for all work of the device, whatever CUDA_MODULE_LOADING says. On a
    Hopper torch's `scaled_dot_product_attention` prefers cuDNN, and takes another kernel in such a block, unless the
    program admits no other.
    """
    global _builds_plans
    switches = torch.backends.cuda
    before, of_torch = _builds_plans, switches.cudnn_sdp_enabled()
    has_others = switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled() or switches.math_sdp_enabled()
    _builds_plans = here
    switches.enable_cudnn_sdp(of_torch and (in_torch or not has_others))
    try:
        yield
    finally:
        _builds_plans = before
        switches.enable_cudnn_sdp(of_torch)


def builds_plans() -> bool:
    """Return whether cuDNN may build plans for calls of this package now."""
    return _builds_plans


def wrong_kernel(kernel: Backend, q: Tensor, need: Need) -> str | None:
    """Return how a kernel differs from plain torch in calls like `q` with such a need; None where it does not."""
    checked = need._replace(value_dim=None, documents=need.documents and kernel.takes_documents)
    # a window is none for slices that it does not limit
    for kind in (checked, checked._replace(window=False)) if need.window else (checked,):
        key = q.device, q.dtype, widest_head(q, need), kind, torch.are_deterministic_algorithms_enabled()
        if (problem := wrong_result(kernel.forward, kernel.backward, *key)) is not None:
            options = str(kind).removeprefix(", ")
            return f"with {options} {problem}" if options else problem
    return None


def widest_head(q: Tensor, need: Need) -> int:
    """Return the larger of two head dims: of queries and keys, and of values."""
    return max(q.shape[-1], need.value_dim or 0)


@functools.cache
def wrong_result(
    forward: Forward,
    backward: Backward,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    need: Need,
    is_deterministic: bool,  # the kernel may have another backward then
) -> str | None:
    """Return the shape in which a kernel differs from plain torch, or the error that it raises; None if neither."""
    compare = _error_with_dropout if need.dropout else _error
    # each way through the kernel is tried once
    for shape in (_WITH_DROPOUT,) if need.dropout else CHECKED:
        try:
            with _as_outside(device):
                error = compare(forward, backward, *random_queries(shape, head_dim, device, dtype, need))
        except Exception as raised:  # compilers of kernels raise errors of many kinds
            return f"it raised: {raised}".split("\n")[0]
        if not error <= _MOST_ERROR:  # NaN compares false with everything
            _, heads, kv_heads, tokens, start = shape
            return f"it is {error:.1%} off for {tokens} tokens after {start}, {heads} query and {kv_heads} key heads"
    return None


@contextmanager
def _as_outside(device: torch.device) -> Iterator[None]:
    """Keep the state of random numbers, and suspend modes: the check of the first batch would replace the numbers.

    A kernel that is to be checked or timed must run.
    """
    devices = [device] if device.type == "cuda" else []
    with plans_kept(here=True), without_modes(), torch.random.fork_rng(devices), torch.no_grad():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspend modes that watch operations or functions; torch's compiler gives up, or fails, under most of them."""
    with ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_python_dispatch._disable_current_modes())
        yield


def random_queries(
    shape: Shape,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    need: Need = Need(),  # noqa: B008
) -> tuple[Tensor, Queries]:
    """Return a gradient and random queries of (batch, query heads, key heads, queries, keys before them)."""
    batch, heads, kv_heads, tokens, start = shape
    generator = torch.Generator().manual_seed(0)  # a generator of its own, which leaves all other random numbers alone
    q_shape, k_shape = (batch, heads, tokens, head_dim), (batch, kv_heads, start + tokens, head_dim)
    grad, q, k, v = (
        torch.randn(size, generator=generator, device="cpu").to(device, dtype)
        for size in (q_shape, q_shape, k_shape, k_shape)
    )
    # two documents of each row: the second one begins in the slice, or just before it
    middle, stop = start + tokens // 2 - 10, start + tokens
    edges = ((0, start, middle), (middle, max(start, middle), stop)) if need.documents else ()
    return grad, Queries(
        q,
        k,
        v,
        start,
        head_dim**-0.5,
        dropout_p=_DROPOUT_P if need.dropout else 0.0,
        window=_WINDOW if need.window else None,
        softcap=_SOFTCAP if need.softcap else None,
        spans=tuple(Span(slice(0, batch), *edge) for edge in edges if edge[1] < edge[2]),
    )


def _error(forward: Forward, backward: Backward, grad: Tensor, queries: Queries) -> float:
    """Return the largest relative error of output, log-sum-exp and gradients, to plain torch in fp32."""
    plain = Reference()
    expected = _results(plain.forward, plain.backward, grad, queries, queries.spans)
    return _largest(_results(forward, backward, grad, queries), expected)


def _largest(results: list[Tensor], expected: list[Tensor]) -> float:
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(results, expected, strict=True)]
    return float(torch.stack(errors).nan_to_num(nan=math.inf).max())


def _results(
    forward: Forward, backward: Backward, grad: Tensor, queries: Queries, one_by_one: tuple[Span, ...] = ()
) -> list[Tensor]:
    """Return output, log-sum-exp, dQ, dK and dV of one call, or of a call for each document of `one_by_one`."""
    start, stop = queries.start, queries.start + queries.q.shape[2]
    totals, parts = [torch.zeros_like(x, dtype=torch.float32) for x in queries[1:3]], []
    for _, first_key, begin, end in one_by_one or (Span(slice(0), 0, start, stop),):
        own = slice(begin - start, end - start)
        keys, values = (x[:, :, first_key:end] for x in queries[1:3])
        call = queries._replace(q=queries.q[:, :, own], keys=keys, values=values, start=begin - first_key)
        call = call._replace(spans=()) if one_by_one else call
        attended, add = forward(call), functools.partial(_add, totals, first_key)
        parts.append((attended.out, attended.lse, backward(grad[:, :, own], call, attended, add)))
    return [*(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True)), *totals]


def _add(
    totals: list[Tensor], first: int, offset: int, dk: Tensor, dv: Tensor, again: bool = False, rows: Any = slice(None)
) -> None:
    for total, part in zip(totals, (dk, dv), strict=True):
        total[rows, :, first + offset : first + offset + part.shape[2]].add_(part)


def _error_with_dropout(forward: Forward, backward: Backward, grad: Tensor, queries: Queries) -> float:
    """Return the largest relative error to plain torch with the probabilities that the kernel's forward has kept.

    Their share counts as a result, too. A kernel draws the same numbers after the same seed: with values that pick one
    key each, its output shows the probabilities themselves.
    """
    q, keys, values = queries[:3]
    seed = torch.cuda.manual_seed if q.is_cuda else torch.default_generator.manual_seed
    kept, dim = [], values.shape[3]
    for column, stop in itertools.pairwise([*range(0, keys.shape[2], dim), keys.shape[2]]):
        picks = torch.zeros_like(values)
        picks[:, :, column:stop, : stop - column] = torch.eye(stop - column, dtype=values.dtype, device=q.device)
        seed(0)
        kept.append(forward(queries._replace(values=picks)).out[..., : stop - column] > 0)
    seed(0)
    results = _results(forward, backward, grad, queries)
    # the same from all probabilities; autograd would record into the graph of a layer that is recomputed
    keeps, visible = torch.cat(kept, -1), _visible(queries)
    wide_q, wide_k, wide_v, wide_grad = (expand_heads(x.float(), q.shape[1]) for x in (q, keys, values, grad))
    scores, slope = wide_q @ wide_k.mT * queries.scale, torch.ones((), device="cpu")
    if queries.softcap is not None:
        scores = queries.softcap * torch.tanh(scores / queries.softcap)
        slope = 1 - (scores / queries.softcap).square()
    scores = scores.masked_fill(~visible, -math.inf)
    probs, factors = scores.softmax(-1), keeps / (1 - queries.dropout_p)
    d_probs = wide_grad @ wide_v.mT * factors
    d_scores = (probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True))) * queries.scale
    d_scores = torch.where(visible, d_scores * slope, 0.0)
    dk, dv = (sum_groups(x, keys.shape[1]) for x in (d_scores.mT @ wide_q, (probs * factors).mT @ wide_grad))
    expected = [(probs * factors) @ wide_v, scores.logsumexp(-1), d_scores @ wide_k, dk, dv]
    share = keeps.sum() / (visible.expand_as(keeps).sum() * (1 - queries.dropout_p))
    return _largest([share, *results], [torch.ones_like(share), *expected])


def _visible(queries: Queries) -> Tensor:
    """Return which keys a query sees, [T, keys]."""
    num_keys = queries.keys.shape[2]
    place = torch.arange(num_keys, device=queries.q.device)
    ago = place[queries.start :, None] - place
    visible = (ago >= 0) & (ago < (queries.window or num_keys))
    for span in queries.spans:
        visible[span.start - queries.start : span.stop - queries.start, : span.first_key] = False
    return visible


def fastest(kernels: tuple[Backend, ...], q: Tensor, need: Need) -> dict[str, float]:
    """Return the milliseconds of the kernels, measured once for each kind of queries; infinite if one raises."""
    heads = min(q.shape[1], _MOST_TIMED_HEADS)
    return times_ms(kernels, q.device, q.dtype, heads, widest_head(q, need))


@functools.cache
def times_ms(
    kernels: tuple[Backend, ...], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> dict[str, float]:
    """Return the median milliseconds of a slice's forward and backward by each kernel, in turns. Log them."""
    shape = 1, heads, heads, _TIMED_TOKENS, _TIMED_PREFIX
    try:
        grad, queries = random_queries(shape, head_dim, device, dtype)
    except RuntimeError as error:  # too little memory beside the model, say
        logger.info("sliced attention: kernels could not be timed: %s", str(error).split("\n")[0])
        return {kernel.name: math.inf for kernel in kernels}

    def once(kernel: Backend) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel.backward(grad, queries, kernel.forward(queries), lambda offset, dk, dv, again=False: None)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    runs: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    with _as_outside(device):
        # in turns: the clock of a device drifts while it warms up
        for _, kernel in itertools.product(range(2 + _TIMED_RUNS), kernels):
            try:
                runs[kernel.name].append(once(kernel))
            except Exception:  # of any kind, as in `wrong_result`
                runs[kernel.name].append(math.inf)
    found = {name: statistics.median(times[2:]) for name, times in runs.items()}
    shown = ", ".join(f"{ms:.3f} ms by {name}" for name, ms in found.items())
    message = "sliced attention: a slice of %d tokens after %d takes %s (%s, %d heads of %d)"
    logger.info(message, _TIMED_TOKENS, _TIMED_PREFIX, shown, dtype, heads, head_dim)
    return found
