"""The `terapipe` section: what is taken, what is refused, and what the refusal says."""

import copy
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError, conflicts
from terapipe_ds.config.unknown_keys import misspelt_keys
from terapipe_ds.files.user_json import DeepSpeedJson, says_nothing, with_new_names
from terapipe_ds.plan import PlanError, SlicePlan

DEFAULTS = {
    "enabled": False, "schedule": "seq1f1b", "chunks_per_stage": 1, "partition": None, "recompute": None,
    "keep_attention": False,
    "offload_activations": False, "strategy": None, "schedule_options": {}, "slices": "auto", "sequence_dim": 1,
    "sliced_inputs": None,
    "documents": "off", "granularity_tokens": 64, "loss_reduction": "mean_valid", "ignore_index": -100,
    "planner": {"profile": "measure", "cache_dir": None, "memory_limit_gb": None},
    "checkpoints": {"allow_pickle": False}, "links": {"forward": None, "backward": None, "exact_until_part": 0},
    "verify": None, "attention": "intercept", "compile": False, "check_finite": "off",
    "stall_timeout_s": 300, "data_timeout_s": 1800, "trace_dir": None, "peak_tflops": None,
}  # fmt: skip


def read(section: Any, **ds_config: Any) -> TeraPipeConfig:
    return TeraPipeConfig.from_deepspeed({"terapipe": section, **ds_config})


def problems(section: Any, **ds_config: Any) -> tuple[str, ...]:
    with pytest.raises(TeraPipeConfigError) as caught:
        read(section, **ds_config)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def problem(section: Any, **ds_config: Any) -> str:
    (only,) = problems(section, **ds_config)
    return only


# --- what is taken


def test_defaults_are_those_of_the_documentation() -> None:
    config = TeraPipeConfig.from_deepspeed({"train_batch_size": 8})
    assert config.model_dump() == DEFAULTS
    assert config == read({}) == read(copy.deepcopy(DEFAULTS))
    with pytest.raises(ValidationError):
        config.enabled = True  # type: ignore[misc]


def test_every_key() -> None:
    section = {
        "enabled": True, "schedule": "zbv", "chunks_per_stage": 2, "schedule_options": {"max_live_slices": 16},
        "partition": [0, 9, 17, 25, 34], "recompute": [1], "slices": [512, 384, 128], "sequence_dim": 0,
        "offload_activations": True, "keep_attention": True,
        "sliced_inputs": [0, 2], "documents": 2, "granularity_tokens": 128,
        "loss_reduction": "sum", "ignore_index": 0, "verify": "off", "attention": "explicit",
        "compile": False,
        "check_finite": "every_step",
        "planner": {"profile": "costs/h200.json", "cache_dir": "/tmp/plans", "memory_limit_gb": 80},
        "links": {"forward": "fp8", "backward": "bf16", "exact_until_part": 1},
        "checkpoints": {"allow_pickle": True}, "stall_timeout_s": 12.5, "data_timeout_s": 40, "trace_dir": "traces",
        "peak_tflops": 989.4,
    }  # fmt: skip
    config = read(copy.deepcopy(section))
    dumped = json.loads(config.model_dump_json())
    assert dumped == {**section, "strategy": None}  # a strategy says some of them itself: see test_strategy_file.py
    assert (config.slices, config.sliced_inputs) == ((512, 384, 128), (0, 2))
    assert config.planner.memory_limit_gb == 80.0


def test_an_ordered_dict_is_a_dict_and_stays_as_it_is() -> None:  # what hjson reads
    section = OrderedDict(enabled=True, slices=[2, 2], planner=OrderedDict(cache_dir="x"))
    before = copy.deepcopy(section)
    assert read(section).slices == (2, 2) and section == before


# --- what is refused


@pytest.mark.parametrize(("key", "value"), [
    *(("enabled", value) for value in (1, "true", None)),
    *(("schedule", value) for value in ("gpip", ".csv", 1, "\ud800.csv")),
    *(("chunks_per_stage", value) for value in (0, True, 2.0)),
    *(
        ("partition", value)
        for value in (0, "uniform", True, [], [0], [1, 3], [0, 3, 3], [0, 4, 2], [0, True], [0, 2.0], [0, 10**30])
    ),
    *(("recompute", value) for value in (True, "on", "some", [], [-1], [1, 1], [True], {})),
    *(("offload_activations", value) for value in (None, 1, "true")),
    *(("keep_attention", value) for value in (None, 1, [0])),
    *(("strategy", value) for value in (3, "", ".json", "plan.yaml", {})),
    *(("slices", value) for value in (0, True, 8.0, "8", None, [], [512, 0], [512, True], {}, 10**30)),
    *(("slices", value) for value in ([[]], [[512], []], [[512], 512], [512, [512]], [[512, 0]], [[2, 2], [2, 1]])),
    ("sequence_dim", -1),
    *(("sliced_inputs", value) for value in ([], [-1], [1, 1], [True], "all")),
    *(("granularity_tokens", value) for value in (0, 64.0)),
    ("loss_reduction", "average"),
    *(("documents", value) for value in (-1, True, "", None, [1], 1.0)),
    *(("ignore_index", value) for value in ("none", True, 2**70)),
    *(("planner", value) for value in (None, "measure")),
    *(("checkpoints", value) for value in (None, True)),
    *(("links", value) for value in (None, "int8")),
    *(("verify", value) for value in (True, "on")),
    *(("attention", value) for value in (True, "sdpa")),
    ("check_finite", True),
    *(
        (key, value)
        for key in ("stall_timeout_s", "data_timeout_s")
        for value in (0, True, float("nan"), float("inf"), 1e300, "300")
    ),
    *(("trace_dir", value) for value in ("", 3, "\ud800", "off", "None")),
    *(("peak_tflops", value) for value in (0, -1, True, float("nan"), float("inf"), "989")),
], ids=ascii)  # fmt: skip
def test_a_wrong_value_is_one_problem_with_key_value_and_what_is_allowed(key: str, value: Any) -> None:
    message = problem({key: value})
    assert message.startswith(f"terapipe.{key} = ")
    description = str(TeraPipeConfig.model_fields[key].description)
    assert message.split(": must be ")[1].split("; did you mean ")[0] == description
    assert len(message) < 300


@pytest.mark.parametrize(("section", "key", "allowed", "values"), [
    ("planner", "profile", "", ["mesure", None, ".json"]), ("planner", "cache_dir", "", ["", 1, "off"]),
    ("planner", "memory_limit_gb", "", [0, -1.0, True, float("nan"), float("inf"), "80", 10**400]),
    ("checkpoints", "allow_pickle", "true or false", [1, "true", None]),
    ("links", "forward", 'null (exact), "bf16", "fp8" or "int8"', ["int4", "exact", True, 8]),
    ("links", "backward", 'null (exact) or "bf16"', ["int8", "fp8", True]),
    ("links", "exact_until_part", "an integer >= 0", [-1, True, 1.0, None]),
])  # fmt: skip
def test_a_wrong_value_of_a_section_inside(section: str, key: str, allowed: str, values: list[Any]) -> None:
    for value in values:
        message = problem({section: {key: value}})
        assert message.startswith(f"terapipe.{section}.{key} = ") and f": must be {allowed}" in message


def test_exact_links_have_no_links_to_leave_alone() -> None:
    message = problem({"links": {"exact_until_part": 2}})
    assert message.startswith("terapipe.links.exact_until_part = 2: all links are exact; give links.forward or")
    assert read({"links": {"backward": "bf16", "exact_until_part": 2}}).links.forward is None


def test_the_value_stands_in_the_message() -> None:
    assert problem({"granularity_tokens": True}) == "terapipe.granularity_tokens = True: must be an integer >= 1"
    assert '= [512, 0]: must be "auto", a number of equal slices' in problem({"slices": [512, 0]})
    assert "loss_reduction = 'average': must be one of mean_valid, mean, sum" in problem({"loss_reduction": "average"})
    assert "a value of type int" in problem({"slices": 10**5000})  # Python refuses to print it


@pytest.mark.parametrize(("section", "name", "nearest"), [
    ({"slcies": 8}, "terapipe.slcies = 8", "terapipe.slices"),
    ({"Enabled": True}, "terapipe.Enabled = True", "terapipe.enabled"),
    ({"chunk_per_stage": 2}, "terapipe.chunk_per_stage = 2", "terapipe.chunks_per_stage"),
    ({"granularity": 64}, "terapipe.granularity = 64", "terapipe.granularity_tokens"),
    ({"memory_limit_gb": 80}, "terapipe.memory_limit_gb = 80", "terapipe.planner.memory_limit_gb"),
    ({"planner": {"profil": 1}}, "terapipe.planner.profil = 1", "terapipe.planner.profile"),
    ({"planner": {"trace_dir": "x"}}, "terapipe.planner.trace_dir = 'x'", "terapipe.trace_dir"),
    (
        {"checkpoints": {"alow_pickle": True}},
        "terapipe.checkpoints.alow_pickle = True",
        "terapipe.checkpoints.allow_pickle",
    ),
])  # fmt: skip
def test_a_typo_gets_the_nearest_known_key(section: dict[str, Any], name: str, nearest: str) -> None:
    assert problem(section) == f"{name}: unknown key; did you mean {nearest}?"


def test_a_key_like_no_other_gets_all_of_them() -> None:
    assert problem({"zzz": 1}).endswith(f"unknown key; known keys: {', '.join(DEFAULTS)}")
    assert problem({"planner": {"zzz": 1}}).endswith("unknown key; known keys: profile, cache_dir, memory_limit_gb")


@pytest.mark.parametrize(
    "key", [1, None, b"slices", "self", "model_config", "", "\ud800", "a" * 5000, "a\nb"], ids=ascii
)
def test_strange_keys(key: Any) -> None:
    message = problem({key: 1})
    assert "unknown key" in message and "\n" not in message
    assert "unknown key" in problem({"planner": {key: 1}})


def test_everything_wrong_is_reported_at_once() -> None:
    planner = {"profile": 3, "x": 1}
    section = {"enabled": True, "slices": 0, "schdule": "x", "planner": planner, "verify": "always", 7: 7}
    found = problems(section, zero_optimization={"stage": 3})
    names = sorted(line.split(" = ")[0] for line in found)
    ours = [f"terapipe.{key}" for key in ("7", "planner.profile", "planner.x", "schdule", "slices", "verify")]
    assert names == [*ours, "zero_optimization.stage"]
    with pytest.raises(TeraPipeConfigError, match="^7 problems with the DeepSpeed config:\n  - terapipe"):
        read(section, zero_optimization={"stage": 3})


@pytest.mark.parametrize("section", [None, True, "auto", []])
def test_a_section_that_is_no_object(section: Any) -> None:
    assert problem(section).startswith(f"terapipe = {section!r}: give an object")


@pytest.mark.parametrize("name", ["terapip", "TeraPipe", "terapipe_ds", " terapipe"])
def test_a_misspelt_section_is_not_passed_over(name: str) -> None:
    with pytest.raises(TeraPipeConfigError, match="unknown section; did you mean terapipe?"):
        TeraPipeConfig.from_deepspeed({name: {"enabled": True, "slices": 8}})


def test_other_sections_are_no_misspelling() -> None:
    others = ("pipeline", "tensorboard", "tensor_parallel", "fp16", "my_own")
    assert not TeraPipeConfig.from_deepspeed({name: {"enabled": True} for name in others} | {"terapip": 1}).enabled


def test_files_and_folders_may_be_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "order.csv").write_text("F0.0,B0.0\nF0.0,B0.0\n")
    section = {"schedule": "~/order.csv", "slices": 1, "strategy": "~/s.json", "planner": {"profile": "~/p.json"}}
    config = TeraPipeConfig(enabled=True, **section)
    files = config.schedule, config.strategy, config.planner.profile
    assert files == tuple(str(tmp_path / name) for name in ("order.csv", "s.json", "p.json"))
    monkeypatch.setenv("HOME", "/home/me")
    config = read({"trace_dir": "~/traces", "planner": {"cache_dir": "~/profiles"}})
    assert (config.trace_dir, config.planner.cache_dir) == ("/home/me/traces", "/home/me/profiles")


def test_keywords_are_checked_alike() -> None:
    assert TeraPipeConfig(enabled=True, slices=4).slices == 4
    with pytest.raises(TeraPipeConfigError, match=r"terapipe.slices = 0: must be"):
        TeraPipeConfig(slices=0)
    with pytest.raises(TeraPipeConfigError, match=r"terapipe.schedule = 'a.csv'"):
        TeraPipeConfig(enabled=True, schedule="a.csv")


def test_slices_and_schedule_may_be_left_to_the_planner() -> None:
    for section in ({"slices": "auto"}, {"schedule": "auto"}, {"slices": 4, "schedule": "auto"}):
        assert section.items() <= read({"enabled": True, **section}).model_dump().items()


def test_an_order_that_is_searched_is_run_from_a_file() -> None:
    message = problem({"enabled": True, "schedule": "search"})
    assert message.startswith("terapipe.schedule = 'search': ")
    assert "`terapipe plan --schedule search --order my.csv`" in message


# --- schedules from a file, and several chunks per stage


def test_a_schedule_from_a_file_is_read_once_it_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut long paths short
    path = Path("best.csv")
    section = {"enabled": True, "slices": 2, "schedule": str(path)}
    assert read(section | {"enabled": False}).schedule == str(path), "not read while switched off"
    missing = problem(section)
    assert missing.startswith(f"terapipe.schedule = {str(path)!r}: ") and "No such file" in missing
    path.write_text("F0.0,F0.1,B0.1,B0.0\nF0.0,F0.1,B0.0,B0.1\n")
    assert "B0.0 runs before B0.1: within a micro-batch B runs in reverse" in problem(section)
    path.write_text("F0.0,F0.1\nF0.0,F0.1\n")
    assert "forwards only; add the backward" in problem(section)
    path.write_text("F0.0,F0.1,B0.1,B0.0\nF0.0,F0.1,B0.1,B0.0\n")
    assert read(section).schedule == str(path)


def test_chunks_of_a_file_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("placement,0/1\nF0.0,F0.0c1,B0.0c1,B0.0\n")
    section = {"enabled": True, "slices": 1, "schedule": str(path)}
    for chunks in (1, 2):
        assert read(section | {"chunks_per_stage": chunks}).chunks_per_stage == chunks
    message = problem(section | {"chunks_per_stage": 3})
    assert message.startswith("terapipe.chunks_per_stage = 3: ") and "has 2 per stage" in message


@pytest.mark.parametrize(("name", "chunks", "good"), [
    ("seq1f1b-interleaved-zb", 4, True),
    ("interleaved", 3, True), ("seq1f1b-interleaved", 1, True), ("zbv", 1, True), ("zbv", 2, True),
    ("chimera", 2, True), ("zbv", 3, False), ("seq1f1b", 2, False), ("chimera-seq", 4, False), ("auto", 2, True),
])  # fmt: skip
def test_chunks_that_a_schedule_takes(name: str, chunks: int, good: bool) -> None:
    section = {"enabled": True, "slices": 4, "schedule": name, "chunks_per_stage": chunks}
    if good:
        assert read(section).chunks_per_stage == chunks
    else:
        message = problem(section)
        assert message.startswith(f"terapipe.chunks_per_stage = {chunks}: ") and name in message


@pytest.mark.parametrize(("name", "options"), [
    ("dapple", {"policy": "A"}), ("dapple", {"policy": "B"}), ("dapple", {}), ("zbv", {"max_live_slices": 9}),
    ("zbv", {"max_live_slices": "default"}), ("seq1f1b-interleaved-zb", {"max_live_slices": None}),
    ("auto", {}), ("seq1f1b", {}),
])  # fmt: skip
def test_options_that_a_schedule_takes(name: str, options: dict[str, Any]) -> None:
    config = read({"enabled": True, "slices": 4, "schedule": name, "schedule_options": options})
    assert config.schedule_options == options
    assert config.options_of(name) == options and config.options_of("gpipe") == {}
    if options:
        assert config.fingerprint() != read({"enabled": True, "slices": 4, "schedule": name}).fingerprint()


@pytest.mark.parametrize(("name", "options", "message"), [
    ("dapple", {"policy": "C"}, "policy is 'C': give 'A' "),
    ("dapple", {"forward_only": "B"}, "takes no option 'forward_only'"),
    ("seq1f1b", {"policy": "B"}, "takes no option 'policy': leave it out"),
    ("zbv", {"slots": "4"}, "takes no option 'slots': leave it out; it takes max_live_slices"),
    ("zbv", {"max_live_slices": 1}, "max_live_slices is 1: a stage holds a whole micro-batch at once, 2 x 1 sl"),
    ("zbv", {"max_live_slices": "all"}, "max_live_slices is 'all': give a number of slices, None for no limit"),
    ("auto", {"policy": "B"}, "with the name of one schedule, not with 'auto'"),
    ("dapple", {1: "B"}, "must be an object"),
])  # fmt: skip
def test_options_that_it_does_not_take(name: str, options: Any, message: str) -> None:
    found = problem({"enabled": True, "slices": 4, "schedule": name, "schedule_options": options})
    assert found.startswith("terapipe.schedule_options = ") and message in found


# --- what DeepSpeed's own config may not have beside an enabled section

CONFLICTS: list[tuple[str, Any, Any]] = [  # key, a value that conflicts, one that does not
    ("zero_optimization.stage", 2, 1),
    ("zero_optimization.stage", 3, 0),
    ("zero_optimization.offload_param", {"device": "cpu"}, {"device": "none"}),
    ("zero_optimization.cpu_offload_param", True, False),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("compile.deepcompile", True, False),
    ("tensor_parallel", {"autotp_size": 2, "preset_model": "llama"}, {"autotp_size": 2}),
    ("pipeline", {"stagess": 2}, {"stages": 2, "use_reentrant": False, "seed_layers": True}),
    ("pipeline.activation_checkpoint_interval", -1, 0),
    ("pipeline.partition", [0, 3, 6], "best"),
    ("pipeline.partition", "type:transformer", "auto"),
    ("expert_parallel.enabled", True, False),
    ("hybrid_engine.enabled", True, False),
    ("data_efficiency.data_routing.random_ltd.enabled", True, False),
    ("progressive_layer_drop.enabled", True, False),
    ("sparse_attention", {"mode": "fixed"}, None),
    ("eigenvalue.enabled", True, False),
    ("autotuning.enabled", True, False),
    ("managed_gradient_accumulation", False, True),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize(("key", "bad", "good"), CONFLICTS)
def test_conflicts(key: str, bad: Any, good: Any) -> None:
    enabled = {"enabled": True, "slices": 4}
    message = problem(enabled, **nested(key, bad))
    assert message.startswith(f"{key} = {bad!r} cannot be combined with terapipe.enabled: ")
    assert message.count("; ") >= 1  # the reason; what to change
    assert read(enabled, **nested(key, good)).enabled
    assert not read({"enabled": False}, **nested(key, bad)).enabled
    assert not TeraPipeConfig.from_deepspeed(nested(key, bad)).enabled


def test_the_error_about_a_misspelt_key_advises_no_key_that_another_error_refuses() -> None:
    assert "stages, partition" not in problem({"enabled": True, "slices": 4}, pipeline={"stagess": 2})


QUOTED: list[tuple[str, Any, Any]] = [
    ("steps_per_print", "3", 3),
    ("gradient_clipping", "1.0", "auto"),
    ("gradient_clipping", None, 0.0),
    ("gradient_predivide_factor", "2", None),
    ("train_batch_size", "4", 4),
    ("gradient_accumulation_steps", "2", 2),
    ("wall_clock_breakdown", "false", False),
    ("prescale_gradients", "false", True),
    ("flops_profiler.enabled", "false", False),
    ("pipeline.activation_checkpoint_interval", "1", 1),
    ("optimizer.params.lr", "1e-3", 1e-3),
    ("optimizer.params.betas", ["0.9", 0.95], [0.9, 0.95]),
    ("scheduler.params.warmup_num_steps", "10", 10),
    ("scheduler.params.warmup_type", "3", "linear"),
]


@pytest.mark.parametrize(("key", "bad", "good"), QUOTED)
def test_numbers_in_quotes(key: str, bad: Any, good: Any) -> None:
    assert conflicts.problem_of_quotes(nested(key, good)) is None
    text = conflicts.problem_of_quotes(nested(key, bad))
    assert text is not None and text.startswith(f"{key} = {bad!r}: text or null,") and "without quotes" in text
    assert text in problem({"enabled": True, "slices": 4}, **nested(key, bad))
    assert not TeraPipeConfig.from_deepspeed(nested(key, bad)).enabled


@pytest.mark.parametrize(("path", "meant"), [
    ("terapip", "terapipe"), ("pipelin", "pipeline"), ("tensor_paralel", "tensor_parallel"),
    ("Zero_Optimisation", "zero_optimization"), ("data_types.grad_acum_dtype", "data_types.grad_accum_dtype"),
    ("scheduler.param", "scheduler.params"), ("mine", None), ("optimizer.mine", None),
    (" pipeline", "pipeline"), ("train_micro_batch_size",
    "train_micro_batch_size_per_gpu"), ("comment", None), ("_optimizer", None), ("//fp16", None), ("#fp16", None),
    ("checkpoint_dir", None), ("tensor_parallel_size", None), ("max_train_batch_size", None),
    ("float16", "fp16"), ("bfloat_16", "bf16"), ("bfloat16", None), ("bf16", None),
])  # fmt: skip
def test_misspelt_keys_of_deepspeed(path: str, meant: str | None) -> None:
    told = [] if meant is None else [f"{path}: DeepSpeed ignores this key; did you mean {meant}?"]
    assert list(misspelt_keys(nested(path, 1))) == told


@pytest.mark.parametrize("raw", [
    {"bfloat16": {"enabled": True}}, {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
    {"bf16": None, "bfloat16": {"enabled": True}}, {"zero_optimization": True}, {"zero_optimization": False},
    {"zero_optimization": {"stage": 1, "cpu_offload": True}}, {"zero_optimization": {"stage": 1, "cpu_offload": 0}},
    {"zero_optimization": {"cpu_offload": None}}, {"float16": {"enabled": True}},
])  # fmt: skip
def test_old_names_mean_what_deepspeed_reads(raw: dict[str, Any]) -> None:
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    ours, zero = DeepSpeedJson(with_new_names(raw)), get_zero_config(dict(raw))
    enabled = {"bf16": get_bfloat16_config(raw).enabled, "fp16": get_float16_config(raw).enabled}
    assert ours.precision == next((name for name, is_enabled in enabled.items() if is_enabled), None)
    assert (ours.number("zero_optimization.stage", least=0) or 0) == zero.stage
    offload = zero.offload_optimizer
    device = (ours.content.get("zero_optimization") or {}).get("offload_optimizer", {}).get("device", "none")
    assert device == ("none" if offload is None else offload.device)
    told = "bfloat16: DeepSpeed ignores this key beside bf16; leave one of them out"
    is_passed_over = raw.get("bfloat16") is not None and not enabled["bf16"]
    assert (told in misspelt_keys(raw)) == is_passed_over


def test_switches_that_are_on_are_those_of_deepspeed() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    for section, model in {
        "zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }.items():  # fmt: skip
        for name, field in model.model_fields.items():
            if isinstance(field.default, bool):
                assert says_nothing(f"{section}.{name}", field.default)
                assert not says_nothing(f"{section}.{name}", not field.default)


def test_no_key_of_deepspeed_is_called_misspelt() -> None:
    from deepspeed.runtime import constants

    names = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    names.remove("bfloat16")  # which it reads without `bf16` alone
    assert len(names) > 50 and not list(misspelt_keys(dict.fromkeys(names, 1)))


def test_the_conflicts_name_keys_that_deepspeed_has() -> None:
    """Spelled as in the installed DeepSpeed; three of them it knows only as removed."""
    assert {conflict.key for conflict in conflicts.CONFLICTS} == {key for key, _, _ in CONFLICTS}
    deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
    removed = {"progressive_layer_drop", "sparse_attention", "eigenvalue"}
    assert removed <= set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime import constants
    from deepspeed.runtime.data_pipeline import constants as data_constants
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert {"stage", "offload_param", "cpu_offload_param", "zenflow"} <= set(DeepSpeedZeroConfig.model_fields)
    assert "deepcompile" in CompileConfig.model_fields
    assert "autotp_size" in TPTrainingConfig.model_fields
    assert constants.MANAGED_GRADIENT_ACCUMULATION == "managed_gradient_accumulation"
    path = (data_constants.DATA_EFFICIENCY, data_constants.DATA_ROUTING, data_constants.RANDOM_LTD, "enabled")
    assert ".".join(path) == "data_efficiency.data_routing.random_ltd.enabled"
    assert deepspeed_config.EXPERT_PARALLEL == "expert_parallel"


def test_a_usual_deepspeed_config_has_no_conflicts() -> None:
    usual = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": True}, "fp16": {"enabled": False, "auto_cast": True}, "gradient_clipping": 1.0,
        "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}, "flops_profiler": {"enabled": True},
    }  # fmt: skip
    assert read({"enabled": True, "slices": 8}, **usual).enabled
    not_a_number = {"stage": "two"}  # which DeepSpeed itself refuses
    assert read({"enabled": True, "slices": 8}, zero_optimization=not_a_number).enabled


# --- plans, fingerprint, description


def test_plan_for_a_number() -> None:
    config = read({"enabled": True, "slices": 8})
    assert config.plan_for(2048) == SlicePlan((256,) * 8)
    assert config.plan_for(1000) == SlicePlan.equal(1000, 8, 64)
    assert read({"slices": 1, "granularity_tokens": 64}).plan_for(3) == SlicePlan((3,)), "one slice has no cut"


@pytest.mark.parametrize(("slices", "length", "lengths"), [
    (8, 256, (32,) * 8), (2, 63, (32, 31)), (5, 23, (8, 4, 4, 4, 3)), (3, 3, (1, 1, 1)), (4, 256, (64,) * 4),
    (4, 300, (128, 64, 64, 44)),
])  # fmt: skip
def test_a_granularity_that_nobody_set_gives_way(slices: int, length: int, lengths: tuple[int, ...]) -> None:
    assert read({"slices": slices}).plan_for(length) == SlicePlan(lengths)
    read({"slices": "auto"}).check_length(length)


def test_after_longer_sequences_a_short_one_has_as_many_slices_as_fit() -> None:
    config = read({"slices": 8, "granularity_tokens": 64})
    lengths = {256: (64,) * 4, 130: (64, 64, 2), 63: (63,), 1: (1,), 2048: (256,) * 8}
    assert {length: config.plan_for(length, strict=False).lengths for length in lengths} == lengths


@pytest.mark.parametrize(("multiple", "length", "lengths"), [(6, 48, (24, 24)), (6, 36, (24, 12)), (1, 36, (32, 4))])
def test_it_gives_way_to_multiples_only(multiple: int, length: int, lengths: tuple[int, ...]) -> None:
    config = read({"slices": 2}).with_multiple(multiple)
    assert config.plan_for(length) == SlicePlan(lengths)
    assert config.granularity_for(5 * 192) == math.lcm(64, multiple)
    given = read({"slices": 2, "granularity_tokens": 8}).with_multiple(multiple)
    assert given.granularity_for(48) == math.lcm(8, multiple)
    for listed in ({"slices": [96, 192]}, {"slices": [96, 192], "granularity_tokens": 64}):  # measured with it, too
        assert read(listed).with_multiple(multiple).granularity_for(288) % multiple == 0


@pytest.mark.parametrize(
    ("section", "length", "granule"),
    [
        ({}, 40, 40),
        ({}, 16384, 64),
        ({}, 16385, 128),
        ({}, 1_048_576, 4096),
        ({"granularity_tokens": 64}, 1_048_576, 64),
        ({"slices": 8}, 1_048_576, 64),
    ],
)
def test_a_search_has_at_most_256_granules_unless_the_config_says_so(
    section: dict[str, Any], length: int, granule: int
) -> None:
    assert read(section).searched_granularity(length) == granule


def test_plan_for_a_list() -> None:
    config = read({"slices": [512, 384, 128], "granularity_tokens": 4096})  # granularity is for numbers
    assert config.plan_for(1024) == SlicePlan((512, 384, 128))
    text = r"terapipe.slices = \[512, 384, 128\] adds up to 1024 tokens, but .* 1000"
    with pytest.raises(TeraPipeConfigError, match=text):
        config.plan_for(1000)


def test_a_list_for_each_micro_batch() -> None:
    config = read({"enabled": True, "slices": [[3, 2, 1], [4, 2]]}, gradient_accumulation_steps=2)
    assert config.plans_for(6, 2) == (SlicePlan((3, 2, 1)), SlicePlan((4, 2)))
    assert [config.plan_for(6, m).lengths for m in range(3)] == [(3, 2, 1), (4, 2), (3, 2, 1)], "in turns"
    assert not config.is_one_slice and read({"slices": [[6], [6]]}).is_one_slice
    with pytest.raises(
        TeraPipeConfigError, match=r"slices = \[\[3, 2, 1\], \[4, 2\]\] each list adds up to 6 .* has 7:"
    ):
        config.plan_for(7)
    with pytest.raises(TeraPipeConfigError, match="2 lists for 3 micro-batches .*gradient_accumulation_steps"):
        config.plans_for(6, 3)
    with pytest.raises(TeraPipeConfigError, match="2 lists for 4 micro-batches .* give one list for each, or one"):
        read({"enabled": True, "slices": [[3, 2, 1], [4, 2]]}, gradient_accumulation_steps=4)
    assert config.fingerprint() != read({"enabled": True, "slices": [[4, 2], [3, 2, 1]]}).fingerprint()


def test_plan_for_names_the_key_at_fault() -> None:
    config = read({"slices": 8, "granularity_tokens": 64})
    with pytest.raises(TeraPipeConfigError, match=r"^terapipe.slices = 8: .* give at most 4,"):
        config.plan_for(256)
    with pytest.raises(TeraPipeConfigError, match=r"^terapipe.granularity_tokens = 64: .* give at most 63, or"):
        config.plan_for(63)
    with pytest.raises(TeraPipeConfigError, match=r"^terapipe.slices = 8: .* give at most 7,"):
        read({"slices": 8}).plan_for(7)
    with pytest.raises(TeraPipeConfigError, match=r'terapipe.slices = "auto".* give a number'):
        read({}).plan_for(64)
    for bad in (0, -1, True, 2.0, None):
        with pytest.raises(PlanError, match="sequence_length"):
            config.plan_for(bad)  # type: ignore[arg-type]


def test_the_fingerprint_says_whether_two_configs_are_equal() -> None:
    base = {"enabled": True, "slices": 8}
    fingerprint = read(base).fingerprint()
    assert fingerprint == read({"slices": 8, "enabled": True, "stall_timeout_s": 300.0}).fingerprint()
    assert fingerprint == "e8910a825cde0da8"  # in every process
    changes: list[dict[str, Any]] = [
        {"slices": [8]}, {"slices": 4}, {"schedule": "gpipe"}, {"sequence_dim": 0}, {"sliced_inputs": [0]},
        {"documents": 1}, {"documents": "position_ids"}, {"offload_activations": True}, {"recompute": "full"},
        {"keep_attention": True},
        {"granularity_tokens": 1}, {"loss_reduction": "sum"}, {"ignore_index": 0},
        {"planner": {"cache_dir": "x"}}, {"checkpoints": {"allow_pickle": True}},
        {"stall_timeout_s": 1}, {"data_timeout_s": 1}, {"check_finite": "every_step"}, {"trace_dir": "x"},
        {"peak_tflops": 1.5}, {"attention": "explicit"}, {"enabled": False},
        {"links": {"forward": "fp8"}}, {"links": {"forward": "int8"}},
    ]  # fmt: skip
    others = {read({**base, **change}).fingerprint() for change in changes}
    assert len(others) == len(changes)
    assert fingerprint not in others


def test_documents_are_refused_where_nothing_would_keep_to_them() -> None:
    assert read({"enabled": True, "documents": "position_ids"}).documents == "position_ids"
    for section in ({"documents": 1}, {"enabled": False, "documents": 1}):
        assert problem(section) == (
            "terapipe.documents = 1: DeepSpeed's own engine mixes documents; "
            'set terapipe.enabled to true, or documents to "off"'
        )


@pytest.mark.parametrize(("others", "told"), [
    ({"schedule": "seq1f1b-zb"}, "nothing is left for W"),
    ({"planner": {"profile": "a.json"}}, "names a file"),
    ({}, None),
    ({"schedule": "auto", "slices": "auto"}, None),
], ids=["split", "profile", "unsplit", "auto"])  # fmt: skip
def test_compiled_layers_take_schedules_without_weight_passes(others: dict[str, str], told: str | None) -> None:
    section = {"enabled": True, "slices": 4, "compile": True, **others}
    if told is None:
        assert read(section).compile
        return
    with pytest.raises(TeraPipeConfigError, match=told):
        read(section)


@pytest.mark.parametrize(("section", "messages"), [
    ({}, ["no memory limit", "set terapipe.planner.memory_limit_gb"]),
    ({"planner": {"memory_limit_gb": 1, "profile": "a.json"}}, ["planner.profile names a file", '"measure"']),
    ({"planner": {"memory_limit_gb": 1}, "offload_activations": True}, ["does not know of offload_activations"]),
    ({"planner": {"memory_limit_gb": 1}, "schedule": "zbv"}, ["'zbv' has several parts per stage", "[0, 1]"]),
    ({"planner": {"memory_limit_gb": 1}, "schedule": "auto", "chunks_per_stage": 2}, ["several parts per stage"]),
])  # fmt: skip
def test_layers_are_chosen_under_a_limit_on_one_part_per_stage(section: dict[str, Any], messages: list[str]) -> None:
    text = problem({"enabled": True, "recompute": "auto", **section})
    assert text.startswith('terapipe.recompute = "auto": ') and all(message in text for message in messages)
    read({"enabled": False, "recompute": "auto", **section})
    read({"enabled": True, "recompute": "auto", "planner": {"memory_limit_gb": 1}})


def test_what_trainer_would_fill_in_is_named() -> None:
    filled = {"pipeline": {"stages": "auto"}, "tensorboard": {"job_name": "auto"}, "bf16": {"enabled": True}}
    filled["data_types"] = {"keep_in_fp32_modules": "auto"}  # DeepSpeed's own default
    TeraPipeConfig.from_deepspeed({"terapipe": {"enabled": True}, **filled})
    TeraPipeConfig.from_deepspeed({"terapipe": {"enabled": False}, "train_batch_size": "auto"})
    unfilled: dict[str, Any] = {
        "train_batch_size": "auto",
        "optimizer": {"params": {"lr": "auto", "betas": ["auto", 0.9]}},
        "pipeline": {"stages": 2, "activation_checkpoint_interval": "auto"},
        "wandb": {"enabled": "auto", "team": "auto"},
    }
    with pytest.raises(TeraPipeConfigError) as error:
        TeraPipeConfig.from_deepspeed({"terapipe": {"enabled": True}, **filled, **unfilled})
    keys = "pipeline.activation_checkpoint_interval, train_batch_size, optimizer.params.lr, optimizer.params.betas, "
    assert str(error.value).startswith(f'{keys}wandb.enabled = "auto": ')


@pytest.mark.parametrize(("section", "near"), [
    ({"schedule": "seq1f1"}, "seq1f1b"),
    ({"recompute": "ful"}, "full"),
    ({"verify": "first-batch"}, "first_batch"),
    ({"loss_reduction": "mean_vald"}, "mean_valid"),
    ({"links": {"forward": "bf1"}}, "bf16"),
    ({"slices": "Auto"}, "auto"),
    ({"planner": {"profile": "measur"}}, "measure"),
])  # fmt: skip
def test_the_nearest_value_is_named(section: dict[str, Any], near: str) -> None:
    assert problem(section).endswith(f"; did you mean {near}?")
    assert "did you mean" not in problem({next(iter(section)): "something else"})


@pytest.mark.parametrize("section", [{"strategy": "paths"}, {"compile": "false"}])
def test_words_that_describe_a_value_are_not_suggested(section: dict[str, Any]) -> None:
    assert "did you mean" not in problem(section)


@pytest.mark.parametrize(("others", "why"), [
    ({"recompute": "off"}, "nothing recomputes"),
    ({"recompute": "full", "compile": True, "slices": 2}, "compiled layers run all of their forward again"),
])  # fmt: skip
def test_attention_is_kept_where_named_stages_recompute(others: dict[str, Any], why: str) -> None:
    assert why in problem({"enabled": True, "keep_attention": True, **others})
