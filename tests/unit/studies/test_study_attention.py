"""The study of attention: its output can be read by people and by programs."""

from __future__ import annotations

import json

import pytest
import torch

from studies import attention as study
from terapipe_ds.attention import available_backends
from terapipe_ds.attention.backends import backend_name

SMALL = ["--sequence-length", "64", "--heads", "4", "--head-dim", "8", "--repeats", "2"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    study.main([*SMALL, "--kv-heads", "2", "--slices", "1", "4", "--dtype", "bfloat16", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert f"torch {torch.__version__}" in result["device"]
    assert result["shape"]["kv_heads"] == 2
    whole, sliced = result["rows"]
    assert (whole["num_slices"], whole["store_bytes"]) == (1, 0)
    assert sliced["store_bytes"] == 2 * 64 * 2 * 8 * (2 + 4)
    assert all(row[key] > 0 for row in (whole, sliced) for key in ("unsliced_s", "sliced_s", "ratio"))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    study.main([*SMALL, "--slices", "2", "--backend", "reference", "--clock", "cpu"])
    text = capsys.readouterr().out
    assert "1 thread(s)" in text and "L=64" in text and "ratio" in text
    assert text.splitlines()[-1].split()[0] == "2"
    assert "cpu_flash" in available_backends()
    assert backend_name(torch.empty(1, 1, 1, 8)) == "cpu_flash"  # what was forced is forced no more
