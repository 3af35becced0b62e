"""The benchmark measures what it says: both sides give the same gradients, and its output can be read by programs."""

from __future__ import annotations

import json

import pytest
import torch

from terapipe_ds.attention import available_backends
from terapipe_ds.attention.backends import backend_name, fused
from terapipe_ds.bench import attention as bench

SMALL = ["--sequence-length", "64", "--heads", "4", "--head-dim", "8", "--repeats", "2"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--kv-heads", "2", "--slices", "1", "4", "--dtype", "bfloat16", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert f"torch {torch.__version__}" in result["device"]
    assert result["shape"]["kv_heads"] == 2
    whole, sliced = result["rows"]
    assert (whole["num_slices"], whole["store_bytes"]) == (1, 0)
    assert sliced["store_bytes"] == 2 * 64 * 2 * 8 * (2 + 4)
    assert all(row[key] > 0 for row in (whole, sliced) for key in ("unsliced_s", "sliced_s", "ratio"))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--slices", "2", "--backend", "reference", "--clock", "cpu"])
    text = capsys.readouterr().out
    assert "1 thread(s)" in text and "L=64" in text and "ratio" in text
    assert text.splitlines()[-1].split()[0] == "2"
    assert "cpu_flash" in available_backends()
    assert backend_name(torch.empty(1, 1, 1, 8)) == "cpu_flash"  # what was forced is forced no more


def test_both_sides_compute_the_same() -> None:
    shape = bench.Shape(batch=2, heads=4, kv_heads=2, head_dim=8, sequence_length=32, dtype="float64")
    sides = bench.Sides(shape, num_slices=4, device="cpu")
    unsliced, sliced = sides.run_unsliced(), sides.run_sliced()
    for whole, parts in zip(unsliced, zip(*sliced, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_one_kernel_for_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would choose cuDNN's for whole sequences on Hopper."""
    monkeypatch.setattr(fused, "_cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(fused, "_has_flash_attn", lambda: True)
    cuda = torch.backends.cuda
    enabled = (
        cuda.flash_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled
    )  # fmt: skip
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
    with bench.one_attention("cpu", torch.float32, 8) as name:
        assert name == "cpu_flash"


def test_the_output_names_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--slices", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["attention"] == "cpu_flash"
    bench.main([*SMALL, "--slices", "2", "--backend", "reference"])
    assert "attention reference for slices, cpu_flash for whole sequences" in capsys.readouterr().out
