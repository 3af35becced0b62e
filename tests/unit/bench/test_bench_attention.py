"""Slices and whole sequences are measured by one kernel."""

import pytest
import torch

from terapipe_ds.attention.backends import backend_name, flash_attn, fused
from terapipe_ds.bench.drivers import base as bench


def test_one_kernel_for_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would choose cuDNN's for whole sequences on Hopper."""
    monkeypatch.setattr(fused, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(fused.Cudnn, "is_available", lambda self: False)
    monkeypatch.setattr(flash_attn, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attn, "has_flash_attn", lambda: True)
    cuda = torch.backends.cuda
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: True)
    enabled = (cuda.flash_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    before = [ask() for ask in enabled]
    with pytest.raises(RuntimeError, match="stop"), bench.one_attention("cuda", torch.bfloat16, 128) as name:
        assert name == backend_name(torch.empty(1, 1, 1, 128)) == "cuda_flash"
        assert [ask() for ask in enabled] == [True, False, False, False]
        raise RuntimeError("stop")
    assert backend_name(torch.empty(1, 1, 1, 128)) == "cpu_flash"
    assert [ask() for ask in enabled] == before
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 60)):
        with bench.one_attention("cuda", dtype, head_dim) as name:
            assert name == "reference for slices, torch's choice for whole sequences"
            assert cuda.cudnn_sdp_enabled() == before[1]
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: False)  # a build without the kernel
    with bench.one_attention("cuda", torch.bfloat16, 128) as name:
        assert name == "reference for slices, torch's choice for whole sequences"
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(flash_attn, "cuda_capability", lambda: (7, 5))  # a card without the kernel
    with bench.one_attention("cuda", torch.float16, 64) as name:
        assert name == "reference for slices, torch's choice for whole sequences"
    with bench.one_attention("cpu", torch.float32, 8) as name:
        assert name == "cpu_flash"


@pytest.mark.parametrize(("fastest", "by_torch"), [("cudnn", []), ("flash_attn_3", ["FA3"]), ("cuda_flash", [])])
def test_the_fastest_kernel_computes_both(fastest: str, by_torch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_backends", lambda: ("flash_attn_3", "cudnn", "cuda_flash"))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(bench, "backend_name", lambda q: fastest)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    monkeypatch.setattr(bench, "set_backend", (forced := list[str | None]()).append)
    active: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append, raising=False)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear, raising=False)
    with bench.one_attention("cuda", torch.bfloat16, 128) as name:
        assert name == fastest and active == by_torch
        assert torch.backends.cuda.cudnn_sdp_enabled() is (fastest == "cudnn")
        assert torch.backends.cuda.flash_sdp_enabled() is (fastest != "cudnn")
    assert forced == [fastest, None] and not active
