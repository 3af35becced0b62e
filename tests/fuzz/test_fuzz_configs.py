"""DeepSpeed configs, model files, device cards, results of benchmarks, caches of profiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from terapipe_ds.bench.report import ReportError, load_result, render_page
from terapipe_ds.bench.report.data import Result, Run, read_result
from terapipe_ds.commands.plan_setup import from_config
from terapipe_ds.commands.user_model import model_of
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.costs.devices import FILE, DeviceError, read_cards
from terapipe_ds.files.user_json import CommandError, read_json
from tests.fuzz.damage import json_files, spoilt, values
from tests.fuzz.outcome import accepted, cases
from tests.fuzz.test_fuzz_planning_files import KEY, PROFILE

SECTION = {
    "enabled": True, "schedule": "seq1f1b", "slices": [512, 384, 128], "sequence_dim": 1, "sliced_inputs": [0, 1],
    "granularity_tokens": 64, "loss_reduction": "mean_valid", "ignore_index": -100,
    "planner": {"profile": "measure", "cache_dir": None, "memory_limit_gb": 80.0}, "verify": "off",
    "checkpoints": {"allow_pickle": False}, "stall_timeout_s": 300.0, "data_timeout_s": 1800.0, "trace_dir": None,
}  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True}, "pipeline": {"activation_checkpoint_interval": 1}, "gradient_clipping": 1.0,
    "terapipe": SECTION,
}  # fmt: skip


def same(value: Any, given_value: Any) -> bool:
    """What a section says and what the config has: equal, a list as a tuple, an int where a float may stand."""
    if isinstance(given_value, list):
        return isinstance(value, tuple) and list(value) == given_value
    if isinstance(given_value, dict):
        return all(same(getattr(value, key), each) for key, each in given_value.items())
    return bool(value == given_value) and isinstance(value, bool) == isinstance(given_value, bool)


@cases(200, 5000)
@given(spoilt(DEEPSPEED) | spoilt({"terapipe": SECTION}) | values)
def test_configs(document: Any) -> None:
    config = accepted("config", TeraPipeConfigError, lambda: TeraPipeConfig.from_deepspeed(document))
    if config is None:
        return
    section = document.get("terapipe", {})
    assert same(config, section)
    assert config.enabled == (section.get("enabled") is True)
    assert TeraPipeConfig.from_deepspeed({"terapipe": config.model_dump(mode="json")}) == config
    config.fingerprint()
    plan = accepted("plan of a config", TeraPipeConfigError, lambda: config.plan_for(1024))
    assert plan is None or plan.sequence_length == 1024


@cases(100, 3000)
@given(json_files({**DEEPSPEED, "terapipe": {**SECTION, "enabled": False}}))
def test_config_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-ds.json"
    path.write_bytes(data)
    ours = (CommandError, TeraPipeConfigError)
    found = accepted("config file of plan", ours, lambda: from_config(str(path)), "")
    read = accepted("config file of profile", CommandError, lambda: read_json(str(path), "--config"), str(path))
    if found is not None:
        assert read is not None
        wanted = {"granularity": int, "micro_batches": int, "micro_batch_size": int, "zero_stage": int}
        assert all(type(found[name]) is kind and found[name] >= 0 for name, kind in wanted.items() if name in found)
        assert found.get("micro_batches") in (None, read.get("gradient_accumulation_steps"))


MODEL = {
    "vocab_size": 300, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "ffn_size": 96, "max_sequence_length": 128, "gated_mlp": True, "bias": False, "tied_embedding": False,
    "positions": "rope", "dropout": 0.0, "dtype": "float32", "seed": 3, "norm_eps": 1e-5, "rope_base": 1e4,
    "init_std": 0.02,
}  # fmt: skip


@cases(100, 4000)
@given(json_files(MODEL))
def test_model_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    from terapipe_ds.models.gpt import GPTConfigError, gpt_layers

    path = tmp_path_factory.getbasetemp() / "fuzzed-model.json"
    path.write_bytes(data)
    config = accepted("model file", (CommandError, GPTConfigError), lambda: model_of(str(path), "float32"), str(path))
    if config is None:
        return
    fields = json.loads(data)
    assert all(getattr(config, name) == value or value is None for name, value in fields.items())
    assert all(type(getattr(config, n)) is int for n in ("vocab_size", "hidden_size", "num_layers", "num_heads"))
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 <= config.dropout < 1
    assert len(gpt_layers(config)) >= config.num_layers


DEVICES = json.loads(FILE.read_text(encoding="utf-8"))
DEVICES = {**DEVICES, "devices": DEVICES["devices"][:2]}


@cases(60, 3000)
@given(json_files(DEVICES))
def test_device_cards(data: bytes) -> None:
    cards = accepted("device cards", DeviceError, lambda: read_cards(data))
    for card in (cards or {}).values():
        numbers = [value for value in dataclasses.astuple(card) if isinstance(value, int | float)]
        assert len(numbers) == 7 and not any(isinstance(value, bool) for value in numbers)
        assert all(0 < value < math.inf for value in numbers)
        assert card.resolve_dtype("auto") in card.dtypes
        assert all(peak > 0 for peak in card.peak_flops.values() if peak is not None)
        assert 0 < card.matmul_efficiency <= 1


def row(system: str, step_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "system": system, "schedule": "1f1b", "slices": [1024], "accumulation": 1, "stages": 2, "step_s": step_s,
        "step_s_all": [step_s, step_s * 1.1], "tokens_per_s": 1024.0, "bound_s": step_s * 0.9, "predicted_s": step_s,
        "bubble": 0.25, "peak_bytes": [2**30, 2**29], "predicted_peak_bytes": [2**30, None], "exposed_comm_s": 0.01,
        "loss": 10.5, "planned": False, "replayed": False, **changes,
    }  # fmt: skip


RESULT = {
    "machine": {"cpu": "Example", "memory_gib": 16, "versions": {"torch": "2.13.0"}},
    "preset": "cpu-2stage",
    "date": "2026-01-01",
    "command": "terapipe bench",
    "runs": [
        row("deepspeed", 2.0),
        row("terapipe", 1.5, schedule="seq1f1b", slices=[512, 512]),
        {"system": "torch", "schedule": "gpipe", "slices": [1024], "accumulation": 1, "stages": 2, "error": "no"},
    ],
}


def read(path: Path, data: bytes) -> tuple[Any, Result] | None:
    """Return what a file says, before and after it was checked; None where it was refused."""
    path.write_bytes(data)
    document = accepted("bench file", ReportError, lambda: load_result(path), str(path))
    result = None if document is None else accepted("bench", ReportError, lambda: read_result(document))
    return None if result is None else (document, result)


@cases(100, 5000)
@given(json_files(RESULT))
def test_results_of_benchmarks(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    document, result = read(tmp_path_factory.getbasetemp() / "fuzzed-bench.json", data) or (None, None)
    if result is None:
        return
    assert len(result.runs) == len(document["runs"])
    for run, raw in zip(result.runs, document["runs"], strict=True):
        assert (run.system, run.accumulation, run.stages) == (raw["system"], raw["accumulation"], raw["stages"])
        assert isinstance(run, Run) != ("error" in raw and raw["error"] is not None)
        assert not isinstance(run, Run) or (run.step_s == raw["step_s"] and list(run.slices) == raw["slices"])
    assert sum(len(group.runs) + len(group.failed) for group in result.groups) == len(result.runs)


@cases(4, 400)
@given(json_files(RESULT))
def test_pages_of_benchmarks(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """What the reader lets through can be drawn."""
    document, result = read(tmp_path_factory.getbasetemp() / "fuzzed-bench.json", data) or (None, None)
    assert result is None or render_page(document).encode().startswith(b"<!DOCTYPE html>")


MEMORY = {"static_bytes": 10**6, "slice_bytes_per_token": 1.5, "weight_bytes_per_token": None}


@cases(60, 2000)
@given(json_files(MEMORY))
def test_memory_figures_of_cached_profiles(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A cache is measured again when it is spoilt; it is no reason to stop."""
    from terapipe_ds.runtime.profiling.cache import memory_of, read_cache

    path: Path = tmp_path_factory.getbasetemp() / "profile-fuzzed.json"
    text = PROFILE.to_json().encode()
    path.write_bytes(text.replace(b'"memory": null', b'"memory": ' + data))
    profile = read_cache(path, KEY)
    assert profile is None or memory_of(profile) is not None
