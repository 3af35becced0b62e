"""The study of one accelerator, on a pretended device: rows, table, report, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from studies import attention, gpu
from terapipe_ds.attention.backends import flash_attn
from terapipe_ds.bench.drivers import base
from terapipe_ds.bench.report import load_result
from terapipe_ds.bench.table import render
from terapipe_ds.cli import main
from terapipe_ds.costs.profile import CostSample, PartProfile, Profile, ProfileKey

measured_layer = gpu.measured_layer


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, and measurements that are made up: a slice takes a millisecond, the whole two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended device")
    monkeypatch.setattr(flash_attn, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(base, "available_backends", lambda: ("cuda_flash",))

    def measure(shape: attention.Shape, num_slices: int, repeats: int, device: str) -> attention.SlicingCost:
        assert device == "cuda" and shape.dtype == "bfloat16"
        return attention.SlicingCost(num_slices, 2e-3, 1e-3 * num_slices, num_slices / 2, 10**6)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "ATTENTION_LENGTHS", (512, 1024))
    monkeypatch.setattr(gpu, "ATTENTION_SLICES", (256, 512))
    monkeypatch.setattr(gpu, "measured_layer", made_up_profile)


def made_up_profile(sizes: tuple[Any, ...], length: int, device: str) -> Profile:
    """A layer that takes 1 us a token forward, 2 us backward, and up to half as much again for its prefix."""
    key = ProfileKey("f", "1 Layer", "a pretended device", "bfloat16", 1, 1, 1, False, length, "cuda_flash")
    spans = {(length // n, p) for n in (1, 2, 4, 8, 16, 32, 64) for p in (0, length // 2, length - length // n)}
    samples = tuple(
        CostSample(tokens, prefix, cost_s := 1e-6 * tokens * (1 + prefix / (2 * length)), 2 * cost_s)
        for tokens, prefix in sorted(spans) if tokens + prefix <= length
    )  # fmt: skip
    return Profile(key, (PartProfile(0, samples),))


@pytest.mark.parametrize("what", ["attention", "layer"])
def test_it_ends_with_json_table_and_report(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: str(tmp_path / f"gpu.{kind}") for kind in ("json", "html")}
    gpu.main([what, "--json", files["json"]])
    lines, result = capsys.readouterr().out.splitlines(), load_result(files["json"])
    assert lines == render(result).splitlines() and len(lines) == 2 + len(result["runs"]) > 5
    assert lines[0].startswith(f"gpu-{what}: 1 stages, 1 layers") and "a pretended device, " in lines[0]
    assert all(line.endswith("  -") for line in lines[2:])  # no loss
    assert main(["bench", "--from", files["json"], "--html", files["html"]]) == 0
    assert "a pretended device" in Path(files["html"]).read_text()


def test_rows_by_hand() -> None:
    result = gpu.run_on_gpu("attention", full=False)
    assert [len(row["slices"]) for row in result["runs"]] == [2, 1, 4, 2]
    row = result["runs"][2]
    assert (row["step_s"], row["bound_s"], row["ratio_to_stock"]) == (4e-3, 2e-3, 0.5)
    assert "4.000 ms  4.000-4.000 ms" in render(result)  # milliseconds, of which seconds would show nothing


def test_figures_are_kept_whatever_the_table_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_table(result: dict[str, Any]) -> str:
        raise KeyError("micro_batch")

    monkeypatch.setattr(gpu, "render", no_table)
    with pytest.raises(KeyError):
        gpu.main(["attention", "--json", str(tmp_path / "gpu.json")])
    assert len(json.loads((tmp_path / "gpu.json").read_text())["runs"]) == 4


def test_it_needs_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["layer"])
    assert "torch sees no CUDA device here" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="DeepSpeed measures on cpu, and cuda was asked for: unset DS_ACCELERATOR"):
        measured_layer((32, 2, 1, 16, 64, True), 64, "cuda")
