"""GPT's layers in slices as they run on CUDA, on tensors without values: devices, dtypes and shapes of every call.

A torch that was built without CUDA knows shapes on `meta` only; one that was built with it also of CUDA tensors, though
no gradients of them where there is no device.
"""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.attention.backends import flash_attn, fused
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.blocks import Block
from terapipe_ds.models import positions
from terapipe_ds.models.gpt import DecoderLayer, FinalNorm, GPTConfig, LMHead, TokenEmbedding, gpt_loss
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.loss import weighted_loss
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products

DEVICES = ["meta"] if "+cpu" in torch.__version__ else ["meta", "cuda"]
PLAN = SlicePlan((200, 300, 12))
MODELS: dict[str, dict[str, Any]] = {
    "all heads": {"num_kv_heads": 8},
    "grouped": {"num_kv_heads": 2},
    "GPT-3": {"num_kv_heads": 8, "bias": True, "positions": "learned", "gated_mlp": False},
}


@contextlib.contextmanager
def _pretended(device: str, one_call: bool) -> Any:
    """`cuda_flash` is what computes attention on `device`; autocast does not know `meta`."""
    asks, refusal = torch.is_autocast_enabled, fused.cuda_refusal

    def refuses(q: torch.Tensor, need: Need) -> str | None:
        return None if q.device.type == device and q.element_size() == 2 else refusal(q, need)

    with contextlib.ExitStack() as stack:
        for module, name, stand_in in (
            (fused, "cuda_capability", lambda: (9, 0)),
            (flash_attn, "has_flash_attn", lambda: False),
            (fused, "cuda_refusal", refuses),
            (fused, "_takes_slices", lambda *key: one_call),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        if device == "meta":
            off = mock.patch.object(torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and asks(kind))
            stack.enter_context(off)
            stack.enter_context(mock.patch.object(torch, "autocast", lambda *args, **options: contextlib.nullcontext()))
        else:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_call", [True, False], ids=["one call", "blocks"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_in_slices(model: str, dtype: str, one_call: bool, device: str) -> None:
    config = GPTConfig(
        hidden_size=512, num_heads=8, num_layers=1, max_sequence_length=512, dtype=dtype, **MODELS[model]
    )
    positions._tables.clear()
    calls: list[tuple[int, int]] = []
    run = fused.CudaFlash.run

    def watched(self: Any, block: Block) -> Any:
        calls.append((block.q.shape[2], block.k.shape[2]))
        return run(self, block)

    with _pretended(device, one_call), mock.patch.object(fused.CudaFlash, "run", watched):
        with torch.device(device):
            layers = nn.Sequential(TokenEmbedding(config), DecoderLayer(config, 0), FinalNorm(config), LMHead(config))
        accumulate_in_products(layers, None)
        store = SliceStore()
        losses = _forwards(layers, config, store, device)
        if device == "meta":
            for active, loss in reversed(losses):
                with push_slice(active.replace(mode="recompute")):
                    loss.backward()
            for name, parameter in layers.named_parameters():
                assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
                assert parameter.grad.shape == parameter.shape, name
        store.release(0, 0)
        store.assert_drained()
    positions._tables.clear()
    kv_heads, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
    blocks = [(200, 200), (300, 300), (300 * groups, 200), (12, 12), (12 * groups, 500)]
    assert kv_heads * groups == 8 and calls == ([(200, 200), (300, 500), (12, 512)] if one_call else blocks)


def _forwards(
    layers: nn.Module, config: GPTConfig, store: SliceStore, device: str
) -> list[tuple[ActiveSlice, torch.Tensor]]:
    """The loss of every slice, whose logits are on the device and in the model's dtype."""
    tokens = torch.zeros(2, 512, dtype=torch.int64, device=device)
    losses = []
    with contextlib.nullcontext() if device == "meta" else torch.no_grad():
        for slice_id in range(PLAN.num_slices):
            mode = "train" if device == "meta" else "eval"
            active = ActiveSlice(*PLAN.span(slice_id), 512, slice_id=slice_id, store=store, mode=mode)
            part = tokens[:, active.start : active.stop].contiguous()
            with push_slice(active):
                logits = layers(part)
                assert (logits.device.type, logits.dtype) == (device, config.torch_dtype)
                losses.append((active, weighted_loss(logits, part, 0.5, gpt_loss)))
    return losses
