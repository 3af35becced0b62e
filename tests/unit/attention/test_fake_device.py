"""Every backend for CUDA on CUDA tensors without values: devices, dtypes and shapes of all its calls, no device.

A torch that was built without CUDA cannot index or copy such tensors, nor record a backward; `_Indexing` does the
former with operators, and `Call` runs the backward without autograd.
"""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import Tensor, forced, slices_of
from device_ops import FlashAttnPackage, flash_attn_installed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from terapipe_ds.attention import SliceStore, backends, push_slice
from terapipe_ds.attention.backends import first_use, flash_attn, flex, fused
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.blocks import Block
from terapipe_ds.attention.call import Options, prepare
from terapipe_ds.models import positions
from terapipe_ds.models.gpt import DecoderLayer, FinalNorm, GPTConfig, LMHead, TokenEmbedding, gpt_loss
from terapipe_ds.runtime.batch.loss_weights import weighted_loss
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products

LENGTHS = (300, 699, 1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 100}, "documents": {"starts": ((0, 120, 500), (0, 340))},
    "cap": {"softcap": 5.0}, "dropout": {"dropout_p": 0.1}, "sinks": {"sinks": True},
    "values": {"value_dim": 32}, "window, documents, sinks": {"window": 90, "starts": ((0, 400), (0,)), "sinks": True},
    "all": {"window": 90, "softcap": 5.0, "starts": ((0, 120, 500), (0, 340)), "sinks": True, "value_dim": 64},
}  # fmt: skip


class _Indexing(TorchFunctionMode):
    """Index and copy by operators that need no CUDA."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_cuda = args and torch.is_tensor(args[0]) and args[0].device.type == "cuda"
        if on_cuda and func is Tensor.__getitem__:
            return _at(*args)
        if on_cuda and func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].new_empty(args[0].shape)
        if on_cuda and func in (Tensor.copy_, Tensor.__setitem__):
            target = args[0] if func is Tensor.copy_ else _at(*args[:2])
            if torch.is_tensor(args[1 if func is Tensor.copy_ else 2]):
                assert args[-1].device == target.device and args[-1].expand(target.shape).shape == target.shape
            return target
        return func(*args, **(kwargs or {}))


def _at(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]` for an index of slices, numbers, None and one ellipsis."""
    index, dim = index if isinstance(index, tuple) else (index,), 0
    for item in index:
        if item is Ellipsis:
            dim = x.dim() - sum(isinstance(i, slice | int) for i in index[index.index(Ellipsis) :])
        elif item is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(item, slice):
            start, stop, _ = item.indices(x.shape[dim])
            x, dim = torch.narrow(x, dim, start, max(0, stop - start)), dim + 1
        else:
            x = torch.select(x, dim, item)
    return x


class _Shapes(FlashAttnPackage):
    """The packages' functions on tensors without values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any, *rest: Any) -> Any:
        _check(q, k, v, lengths)
        self.calls.append("rows" if lengths is None else "packed")
        heads_first = q.transpose(-2, -3)
        return q.new_empty(q.shape), q.new_empty(heads_first.shape[:-1], dtype=torch.float32)

    @staticmethod
    def _seed(state: Tensor) -> int:
        return 0

    @staticmethod
    def _write(targets: Any, parts: Any) -> None:
        assert all(x.shape == part.shape and x.dtype == part.dtype for x, part in zip(targets, parts, strict=True))

    def gradients(self, *inputs: Any) -> Any:
        grad, q, k, v, out, lse, lengths, *_ = inputs
        _check(q, k, v, lengths)
        assert grad.shape == out.shape == q.shape and grad.dtype == out.dtype == q.dtype
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == q.transpose(-2, -3).shape[:-1]
        return [x.new_empty(x.shape) for x in (q, k, v)]


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, softcap: Tensor | None, scale: float) -> Any:
    """Return what torch's flex_attention does; its compiler needs a device."""
    assert k.shape[:3] == v.shape[:3] and {x.device.type for x in (q, k, v, mask.kv_num_blocks)} == {"cuda"}
    assert mask.seq_lengths == (q.shape[2], k.shape[2]) and (softcap is None or softcap.device.type == "cuda")
    assert mask.kv_indices.shape[2:] == (-(-q.shape[2] // 128), -(-k.shape[2] // 128))
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> None:
    assert {x.device.type for x in (q, k, v)} == {"cuda"} and {x.dtype for x in (q, k, v)} == {q.dtype}
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and k.shape == v.shape and q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[-2] % k.shape[-2] == 0
    for cumulative in (lengths or ())[:2]:
        assert cumulative.device.type == "cuda" and cumulative.dtype == torch.int32


@contextmanager
def _fake_cuda(backend: str) -> Iterator[None]:
    """Pretend a Hopper whose kernels are right at their first use."""
    with ExitStack() as stack:
        for module in (fused, flash_attn, flex):
            stack.enter_context(mock.patch.object(module, "cuda_capability", lambda: (9, 0)))
        stack.enter_context(mock.patch.object(first_use, "wrong_result", lambda *key: None))
        stack.enter_context(mock.patch.object(flex, "_compiled", lambda: _flex_attention))
        for name in ("has_flash_attn", "has_flash_attn_3", "has_flash_attn_4"):
            stack.enter_context(mock.patch.object(flash_attn, name, lambda: True))
        stack.enter_context(flash_attn_installed(_Shapes()))
        stack.enter_context(forced(backend))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Indexing())
        yield
    flex.block_mask.cache_clear()  # of tensors without values


REFUSED = {
    "flash_attn": "", "flash_attn_3": "dropout", "flash_attn_4": "dropout",
    "cudnn": "window; documents; cap; dropout; window, documents, sinks; all",
    "cuda_flash": "cap; all", "flex": "plain; dropout; sinks",
}  # fmt: skip


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", REFUSED)
@pytest.mark.sample(31)  # about one of each backend and option; no divisor of the number of cases
def test_every_call(backend: str, option: str, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    """Slices of a micro-batch: the first, a later one and one token."""
    narrow = backend == "flex" and min(dim, OPTIONS[option].get("value_dim", dim)) < 16
    with _fake_cuda(backend):
        if narrow or option in REFUSED[backend].split("; "):
            with pytest.raises(ValueError, match="was forced, but"):
                _run(backend, dtype, heads, dim, **OPTIONS[option])
        else:
            _run(backend, dtype, heads, dim, **OPTIONS[option])


def _run(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, starts: Any = None, sinks: bool = False,
    value_dim: int | None = None, dropout_p: float = 0.0, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """Run the forwards in order and the backwards in reverse, and check what comes out."""
    store, calls, values = SliceStore(), [], value_dim or dim
    logits = torch.empty(heads[0], device="cuda") if sinks else None
    for active in slices_of(LENGTHS, store, starts):
        sizes = (heads[0], dim), (heads[1], dim), (heads[1], values), (heads[0], values)
        q, k, v, grad = (torch.empty(2, h, active.num_tokens, d, dtype=dtype, device="cuda") for h, d in sizes)
        with push_slice(active):
            call, q, k, v = prepare(q, k, v, "layer", Options(None, dropout_p, window, softcap), logits)
            out, lse = call.forward(q, k, v, logits)
        call.record(True)
        assert out.shape == grad.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        assert out.dtype == dtype and out.device.type == lse.device.type == "cuda"
        calls.append((active, call, (q, k, v), (grad, q, out, lse)))
    if backend != "flex":  # its backward is autograd's
        for active, call, inputs, saved in reversed(calls):
            with push_slice(active.replace(mode="recompute")):
                gradients = call.backward(*saved)
            for x, gradient in zip(inputs, gradients, strict=True):
                assert gradient.shape == x.shape and gradient.dtype == dtype and gradient.device.type == "cuda"
        store.release(0, 0)
        store.assert_drained()


# -- GPT's layers, on tensors without values -------------------------------------------------------------------


MODELS: dict[str, dict[str, Any]] = {
    "all heads": {"num_kv_heads": 8}, "grouped": {"num_kv_heads": 2},
    "GPT-3": {"num_kv_heads": 8, "bias": True, "positions": "learned", "gated_mlp": False},
}  # fmt: skip


@contextmanager
def _pretended(kernel: type) -> Iterator[None]:
    """`kernel` is what computes attention on `meta`, which autocast does not know."""
    asks, refusal = torch.is_autocast_enabled, fused.cuda_refusal
    other = fused.Cudnn if kernel is flash_attn.CudaFlash else flash_attn.CudaFlash

    def refuses(q: torch.Tensor, need: Need) -> str | None:
        return None if q.device.type == "meta" and q.element_size() == 2 else refusal(q, need)

    with ExitStack() as stack:
        for module, name, stand_in in (
            *((module, "cuda_capability", lambda: (9, 0)) for module in (fused, flash_attn)),
            *((module, "cuda_refusal", refuses) for module in (fused, flash_attn)),
            (flash_attn, "has_flash_attn", lambda: False),
            (first_use, "wrong_result", lambda *key: None),
            (other, "is_available", lambda self: False),
            (backends, "_chosen", {}),
            (torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and asks(kind)),
            (torch, "autocast", lambda *args, **options: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


@pytest.mark.parametrize("kernel", [flash_attn.CudaFlash, fused.Cudnn], ids=["one call", "blocks"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_in_slices(model: str, dtype: str, kernel: Any) -> None:
    sizes = {"hidden_size": 512, "num_heads": 8, "num_layers": 1, "max_sequence_length": 512}
    config = GPTConfig(**sizes, dtype=dtype, **MODELS[model])
    positions._tables.clear()
    calls, run, store, losses = list[tuple[int, int]](), kernel.run, SliceStore(), []

    def watched(self: Any, inputs: Any, *rest: Any) -> Any:
        tokens = 2 if isinstance(inputs, Block) else 1
        calls.append((inputs[0].shape[tokens], inputs[1].shape[tokens]))
        return run(self, inputs, *rest)

    with _pretended(kernel), mock.patch.object(kernel, "run", watched):
        with torch.device("meta"):
            layers = nn.Sequential(TokenEmbedding(config), DecoderLayer(config, 0), FinalNorm(config), LMHead(config))
        accumulate_in_products(layers, None)
        for active in slices_of((200, 300, 12), store):
            tokens = torch.zeros(2, active.num_tokens, dtype=torch.int64, device="meta")
            with push_slice(active):
                logits = layers(tokens)
                losses.append((active, weighted_loss(logits, tokens, 0.5, gpt_loss)))
            assert (logits.device.type, logits.dtype) == ("meta", config.torch_dtype)
        for active, loss in reversed(losses):
            with push_slice(active.replace(mode="recompute")):
                loss.backward()
        for name, parameter in layers.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.shape == parameter.shape, name
        store.release(0, 0)
        store.assert_drained()
    positions._tables.clear()
    blocks = [(200, 200), (300, 300), (300, 200), (12, 12), (12, 500)]
    assert calls == (blocks if kernel is fused.Cudnn else [(200, 200), (300, 500), (12, 512)])
