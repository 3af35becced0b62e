"""DeepSpeed configs, model files, device cards, results of benchmarks, caches of profiles."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given

from terapipe_ds.bench.report import ReportError, load_result, render_page
from terapipe_ds.bench.report.data import Result, Run, read_result
from terapipe_ds.commands.plan_setup import from_config
from terapipe_ds.commands.user_model import model_of
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.costs.devices import FILE, DeviceError, device_card
from terapipe_ds.costs.profile import Profile
from terapipe_ds.files.user_json import CommandError, read_json
from terapipe_ds.models.gpt import GPTConfigError, gpt_layers
from terapipe_ds.runtime.profiling.cache import memory_of, read_cache
from tests.fuzz.damage import spoilt, values
from tests.fuzz.outcome import accepted, cases, files_of
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
        return isinstance(value, tuple) and len(value) == len(given_value) and all(map(same, value, given_value))
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


def both_readers(path: Path) -> tuple[Any, Any]:
    """Return what `plan` and what `profile` read."""
    read = accepted("config file of profile", CommandError, lambda: read_json(str(path), "--config"), str(path))
    return from_config(str(path), is_measured=False), read


DISABLED = {**DEEPSPEED, "terapipe": {**SECTION, "enabled": False}}


@files_of(DISABLED, (CommandError, TeraPipeConfigError), both_readers, 100, 3000, named=False)
def test_config_files(both: tuple[Any, Any], data: bytes) -> None:
    found, read = both
    numbers = ("granularity", "micro_batches", "micro_batch_size", "zero_stage")
    assert all(type(found[name]) is int and found[name] >= 0 for name in numbers if name in found)
    assert found.get("micro_batches") in (None, read.get("gradient_accumulation_steps"))


MODEL = {
    "vocab_size": 300, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "ffn_size": 96, "max_sequence_length": 128, "gated_mlp": True, "bias": False, "tied_embedding": False,
    "positions": "rope", "dropout": 0.0, "dtype": "float32", "seed": 3, "norm_eps": 1e-5, "rope_base": 1e4,
    "init_std": 0.02,
}  # fmt: skip


@files_of(MODEL, (CommandError, GPTConfigError), lambda path: model_of(str(path), "float32"), 100, 4000)
def test_model_files(config: Any, data: bytes) -> None:
    fields = json.loads(data)
    read = {name: (getattr(config, name), value) for name, value in fields.items() if value is not None}
    # a number takes the double that is nearest to a large integer
    assert all(got == (float(value) if isinstance(got, float) else value) for got, value in read.values())
    assert all(type(getattr(config, n)) is int for n in ("vocab_size", "hidden_size", "num_layers", "num_heads"))
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 <= config.dropout < 1
    assert len(gpt_layers(config)) >= config.num_layers


CARD = json.loads(FILE.read_text(encoding="utf-8"))["devices"][0]


@files_of(CARD, DeviceError, lambda path: device_card(str(path)), 60, 3000)
def test_device_cards(card: Any, data: bytes) -> None:
    numbers = [value for value in dataclasses.astuple(card) if isinstance(value, int | float)]
    optional = [card.host_memory_bytes, card.attention_backward_efficiency, card.context_bytes]
    assert len(numbers) == 10 - optional.count(None) and not any(isinstance(value, bool) for value in numbers)
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


def checked(path: Path) -> tuple[Any, Result | None]:
    """Return what a file says, before and after it was checked."""
    document = load_result(path)
    return document, accepted("bench", ReportError, lambda: read_result(document))


@files_of(RESULT, ReportError, checked, 100, 5000)
def test_results_of_benchmarks(both: tuple[Any, Result | None], data: bytes) -> None:
    document, result = both
    if result is None:
        return
    assert len(result.runs) == len(document["runs"])
    for run, raw in zip(result.runs, document["runs"], strict=True):
        assert (run.system, run.accumulation, run.stages) == (raw["system"], raw["accumulation"], raw["stages"])
        assert isinstance(run, Run) != ("error" in raw and raw["error"] is not None)
        assert not isinstance(run, Run) or (run.step_s == raw["step_s"] and list(run.slices) == raw["slices"])
    assert sum(len(group.runs) + len(group.failed) for group in result.groups) == len(result.runs)


@files_of(RESULT, ReportError, checked, 4, 400)
def test_pages_of_benchmarks(both: tuple[Any, Result | None], data: bytes) -> None:
    """What the reader lets through can be drawn."""
    assert both[1] is None or render_page(both[0]).encode().startswith(b"<!DOCTYPE html>")


MEMORY = {"static_bytes": 10**6, "slice_bytes_per_token": 1.5, "weight_bytes_per_token": None}


def cached(path: Path) -> tuple[Profile | None]:
    """Return the profile of a cache whose memory figures are what the file holds."""
    path.write_bytes(PROFILE.to_json().encode().replace(b'"memory": null', b'"memory": ' + path.read_bytes()))
    return (read_cache(path, KEY),)


@files_of(MEMORY, (), cached, 60, 2000)
def test_memory_figures_of_cached_profiles(profiles: tuple[Profile | None], data: bytes) -> None:
    """A cache is measured again when it is spoilt; it is no reason to stop."""
    assert profiles[0] is None or memory_of(profiles[0]) is not None
