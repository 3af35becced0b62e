"""Compare attention in slices with fp64, values and gradients, by each kernel that can run."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, set_backend, sliced_attention
from terapipe_ds.attention.backends import available_backends
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.flash_attn import CudaFlash
from terapipe_ds.attention.document_edges import Documents, Starts
from tests.gpu_checks.checks import Check, Settings, at_most, equal, not_run

MOST_OVER_UNSLICED = 2.0
"""How many times the kernel's error on a whole sequence the error of slices may be; less than 1e-3 counts as 1e-3."""
FP32_ERROR = 1e-4
"""The largest error that is allowed in fp32; tf32 would give some 1e-3."""
SHAPES = {  # (batch, query heads, key heads, tokens, head dim): lengths of the slices
    (2, 4, 4, 1000, 64): (300, 500, 199, 1),
    (2, 8, 2, 1000, 64): (300, 500, 199, 1),
    (1, 8, 1, 1000, 128): (300, 500, 199, 1),
    (1, 4, 2, 777, 96): (1, 2, 3, 771),
    (1, 4, 2, 515, 192): (129, 128, 258),
    (1, 2, 2, 515, 256): (129, 128, 258),
    (1, 2, 1, 6000, 128): (5900, 60, 40),  # few queries, many keys: the kernel divides the keys
    (1, 1, 1, 6000, 64): (5900, 60, 40),
    (8, 32, 8, 1536, 128): (1024, 256, 256),
}
PACKED, LOGITS = ((0, 120, 500), (0, 340)), (0.5, -1.0, 2.0, 0.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 100}, "softcap": {"softcap": 5.0}, "sinks": {"sinks": LOGITS},
    "documents": {"starts": PACKED}, "narrow values": {"value_dim": 32},
    "softcap and all": {"window": 90, "softcap": 5.0, "sinks": LOGITS, "starts": PACKED, "value_dim": 32},
}  # fmt: skip
OPTIONS_ERROR = 0.02
"""The largest error of windows, caps, sinks and documents that is allowed in bf16, whose steps are 0.4 %."""
_OTHERS = ("flash_attn", "flash_attn_3", "flash_attn_4", "cudnn")
TINY = {(2, 4, 2, 40, 16): (10, 20, 9, 1), (1, 2, 2, 33, 64): (1, 2, 30)}


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the checks of every shape in bf16 and fp16; on a device one call must take each head dim."""
    on_device = settings.device == "cuda"
    kernel = "cuda_flash" if on_device else "cpu_flash"
    for dtype, (shape, lengths) in itertools.product(
        (torch.bfloat16, torch.float16), (TINY if settings.dry_run else SHAPES).items()
    ):
        name = f"{str(dtype)[6:]} {'x'.join(map(str, shape))}"
        inputs = _inputs(shape, dtype, settings.device)
        expected = in_fp64(*inputs)
        unsliced = _errors(_unsliced(inputs, on_device), expected)
        if on_device:
            for what, need in (("a slice", Need()), ("dropout", Need(dropout=True))):
                problem = CudaFlash().refusal(inputs[0], need)
                yield equal(f"{name}: {what} in one call", problem or "right", "right")
        for way in _ways(on_device):
            with _backend(way if way in _OTHERS else kernel):
                found = _errors(in_slices(*inputs, lengths), expected)
            worst = max(mine / max(whole, 1e-3) for mine, whole in zip(found, unsliced, strict=True))
            yield at_most(f"{name}: error of slices over unsliced, {way}", worst, MOST_OVER_UNSLICED)
    inputs = _inputs((2, 4, 2, 200, 32), torch.float32, settings.device)
    found = _errors(in_slices(*inputs, (70, 100, 30)), in_fp64(*inputs))
    yield at_most("fp32: error against fp64", max(found), FP32_ERROR)


def options(settings: Settings) -> Iterator[Check]:
    """Yield the checks of windows, caps, sinks and documents, by the chosen kernel and by flex, which is compiled."""
    on_device = settings.device == "cuda"
    for name, options in OPTIONS.items():
        # flex takes only calls that are more than plainly causal, and any backend merges sinks: alone they are no need
        for backend in (None, "flex") if on_device and name != "sinks" else (None,):
            yield _option_check(f"{name}, {backend or 'the chosen kernel'}", options, backend, settings.device)


def _ways(on_device: bool) -> tuple[str, ...]:
    """Return the ways to compute slices: by torch's FlashAttention kernel, and by others where they can run."""
    if not on_device:
        return ("blocks",)
    return ("one call", *(name for name in available_backends() if name in _OTHERS))


def _option_check(name: str, options: dict[str, Any], backend: str | None, device: str) -> Check:
    """Return the check of one call with options; one that raises costs no other check."""
    try:
        found = _errors(*_with_options(options, backend, device))
    except (RuntimeError, ValueError) as error:
        return not_run(name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return at_most(f"{name}: error against fp64", max(found), OPTIONS_ERROR)


def _with_options(options: dict[str, Any], backend: str | None, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of two packed rows in slices of bf16, and the same from all scores in fp64."""
    lengths, (q, k, v, grad) = (300, 250, 99, 1), _inputs((2, 4, 2, 650, 64), torch.bfloat16, device)
    value_dim = options.get("value_dim", 64)
    v, grad = v[..., :value_dim].contiguous(), grad[..., :value_dim].contiguous()
    starts, sinks = options.get("starts"), options.get("sinks")
    logits = None if sinks is None else torch.tensor(sinks, device=device)
    more = {"window": options.get("window"), "softcap": options.get("softcap"), "sinks": logits}
    with _backend(backend):
        found = in_slices(q, k, v, grad, lengths, starts, **more)
    place = torch.arange(650, device=device)
    ago = place[:, None] - place
    sees = ((ago >= 0) & (ago < (options.get("window") or 650))).expand(2, 1, -1, -1)
    if starts is not None:
        document = torch.stack([torch.bucketize(place, torch.tensor(row, device=device), right=True) for row in starts])
        sees = sees & (document[:, None, :, None] == document[:, None, None])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, dim=1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT / math.sqrt(64)
    if more["softcap"] is not None:
        scores = more["softcap"] * torch.tanh(scores / more["softcap"])
    scores = scores.masked_fill(~sees, -math.inf)
    if logits is not None:
        scores = torch.cat((scores, logits.double()[:, None, None].expand(*scores.shape[:3], 1)), -1)
    out = torch.softmax(scores, -1)[..., :650] @ values
    return found, [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of the output."""
    batch, heads, kv_heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(tokens + dim)
    q, k, v, grad = (
        torch.randn(batch, n, tokens, dim, generator=generator).to(device, dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    return q, k, v, grad


def in_fp64(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output, dQ, dK and dV from all scores, one row of the batch at a time."""
    rows = [_row_in_fp64(*(x[i : i + 1].double() for x in (q, k, v, grad))) for i in range(q.shape[0])]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def _row_in_fp64(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    out = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def in_slices(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: Sequence[int], starts: Starts | None = None, **options: Any
) -> list[Tensor]:
    """Return the same by `sliced_attention`, with forwards in order and backwards in reverse."""
    store, cuts = SliceStore(), [0, *itertools.accumulate(lengths)]
    slices = [
        ActiveSlice(*span, cuts[-1], slice_id=i, store=store, documents=starts and Documents(starts, *span))
        for i, span in enumerate(itertools.pairwise(cuts))
    ]
    parts = [[x[:, :, s.start : s.stop].clone().requires_grad_() for x in (q, k, v)] for s in slices]
    outs = []
    for active, inputs in zip(slices, parts, strict=True):
        with push_slice(active):
            outs.append(sliced_attention(*inputs, layer=0, **options))
    grads = []
    for i in reversed(range(len(slices))):
        with push_slice(slices[i].replace(mode="recompute")):
            grads.append(torch.autograd.grad(outs[i], parts[i], grad[:, :, slices[i].start : slices[i].stop]))
    store.release(0, 0)
    out = torch.cat([o.detach() for o in outs], 2)
    return [out, *(torch.cat(pieces[::-1], 2) for pieces in zip(*grads, strict=True))]


def _unsliced(inputs: Sequence[Tensor], on_device: bool) -> list[Tensor]:
    """Return the same by one call of torch on whole sequences, with the same kernel where there is a device."""
    *leaves, grad = (x.clone().requires_grad_() for x in inputs)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_device else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1]
        )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def _errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@contextlib.contextmanager
def _backend(name: str | None) -> Iterator[None]:
    set_backend(name)
    try:
        yield
    finally:
        set_backend(None)
