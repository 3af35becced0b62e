"""`terapipe plan`: what it prints and writes, what it takes from files, and what it refuses in one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe_ds.cli import main
from terapipe_ds.commands.plan_options import PlanOptions
from terapipe_ds.commands.plan_setup import plan_setup
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.analytic import analytic_costs
from terapipe_ds.costs.devices import FILE, device_card
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import (
    CostSample,
    LayerProfile,
    LayerProfiles,
    LinkSample,
    PartProfile,
    Profile,
    ProfileKey,
)
from terapipe_ds.models.positions import rotary_turns
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.strategy import Cluster, check_limit, size_of
from terapipe_ds.schedule import SCHEDULE_NAMES, build, load
from terapipe_ds.simulator import simulate
from terapipe_ds.strategy import Grid
from tests.processes import run_python
from tests.unit.planner.layers.test_measured import profile as measured_profile
from tests.unit.test_cli import refused as refused_command
from tests.unit.test_cli import shown

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "gpt3-1b", "--device", "v100", "--stages", "4", "--micro-batches", "2", "--granularity", "128")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return shown(capsys, "plan", *arguments)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(capsys, *arguments, "--json"))
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused_command(capsys, "plan", *arguments)


def test_what_a_person_reads(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, *SMALL, "--max-slices", "4")
    assert text.startswith("gpt3-1b in fp16 on 4 x NVIDIA V100 SXM2 16 GB, costs counted\n4 stages, tensor")
    words = ("(chosen)", "predicted", "unsliced", "best equal slices", "bubble", "memory")
    assert all(word in text for word in (*words, "limit 14.40 GiB, 0.9 of the card's 16\n"))


def test_the_section_to_paste_is_valid_and_means_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--granularity", "512"), ("--schedule", "seq1f1b", "--max-slices", "3")):
        text = planned(capsys, *SMALL, *more)
        section = json.loads(text[text.index('"terapipe": ') :].removeprefix('"terapipe": '))
        config = TeraPipeConfig.from_deepspeed({"terapipe": section})
        found = as_json(capsys, *SMALL, *more)
        assert config.enabled
        assert config.schedule == found["schedule"]
        assert list(config.plan_for(2048).lengths) == found["plan"]


def test_the_numbers_are_those_of_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *SMALL, "--schedule", "1f1b", "--dtype", "fp32")
    costs = analytic_costs("gpt3-1b", "v100", num_stages=4, dtype="fp32")
    for seconds, lengths in ((found["predicted_s"], found["plan"]), (found["unsliced_s"], [2048])):
        timeline = simulate(build("1f1b", 4, 2, len(lengths)), SlicePlan(tuple(lengths)), costs)
        assert timeline.makespan_s == pytest.approx(seconds, rel=1e-9)
    assert found["predicted_s"] <= found["equal_s"] <= found["unsliced_s"]


def test_sequence_parallelism_divides_the_time_of_messages(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*SMALL, "--schedule", "1f1b", "--max-slices", "1", "--tensor-parallel", "2")
    found = as_json(capsys, *options, "--sequence-parallel")
    costs = analytic_costs("gpt3-1b", "v100", num_stages=4, tensor_parallel=2, splits_tokens=True)
    timeline = simulate(build("1f1b", 4, 2, 1), SlicePlan((2048,)), costs)
    assert found["predicted_s"] == pytest.approx(timeline.makespan_s, rel=1e-9)
    assert found["predicted_s"] < as_json(capsys, *options)["predicted_s"]


def test_files_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "step.svg"
    plan = as_json(capsys, *SMALL, "--schedule", "1f1b", "--out", str(out), "--picture", str(picture))
    assert list(SlicePlan.from_json(out.read_text()).lengths) == plan["plan"]
    assert "svg" in picture.read_text()[:300]
    assert sorted(tmp_path.iterdir()) == [out, picture]


def test_a_deepspeed_config_fills_what_is_not_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    section = {"enabled": True, "schedule": "1f1b", "granularity_tokens": 256, "planner": {"memory_limit_gb": 14.0}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "fp16": {"enabled": True}}
    zero = {"stage": 1}
    path.write_text(json.dumps({**config, "zero_optimization": zero, "terapipe": section}))
    options = ("--model", "gpt3-1b", "--device", "v100-32gb", "--stages", "4", "--data-parallel", "2")
    found = as_json(capsys, *options, "--config", str(path))
    same = "--micro-batch-size 2 --micro-batches 3 --dtype fp16 --zero-stage 1 --schedule 1f1b --granularity 256"
    by_options = as_json(capsys, *options, *same.split(), "--memory-limit-gb", "14")
    assert found.pop("terapipe") == {**by_options.pop("terapipe"), "planner": {"memory_limit_gb": 14.0}}
    assert found == by_options
    assert (found["schedule"], found["num_micro_batches"], found["memory_limit_bytes"]) == ("1f1b", 3, 14e9)
    assert as_json(capsys, *options, "--config", str(path), "--schedule", "gpipe")["schedule"] == "gpipe"
    # DeepSpeed counts the third number of a batch, and the engine's own recompute goes before DeepSpeed's
    batch: dict[str, Any] = {**config, "train_batch_size": 12, "pipeline": {"activation_checkpoint_interval": 1}}
    for left in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        kept = {name: value for name, value in batch.items() if name != left}
        path.write_text(json.dumps({**kept, "terapipe": {**section, "recompute": "off"}, "zero_optimization": zero}))
        again = as_json(capsys, *options, "--config", str(path))
        assert again.pop("terapipe")["recompute"] == "off" and again == found
    path.write_text(json.dumps({**config, "terapipe": {"recompute": "full"}}))
    full = as_json(capsys, *options, "--config", str(path), "--max-slices", "1")
    path.write_text(json.dumps(config))
    again = as_json(capsys, *options, "--config", str(path), "--max-slices", "1", "--activation-checkpointing")
    assert full == again and full["terapipe"]["recompute"] == "full"
    # the section to paste keeps what no plan decides; an option goes before the config
    kept = {"recompute": "off", "documents": 2, "stall_timeout_s": 77.0, "planner": {"memory_limit_gb": 30.0}}
    path.write_text(json.dumps({**config, "terapipe": {**kept, "enabled": False, "slices": 9, "partition": None}}))
    for more, recompute in (((), "off"), (("--activation-checkpointing",), "full")):
        section = as_json(capsys, *options, "--config", str(path), "--schedule", "1f1b", *more)["terapipe"]
        assert section["enabled"] and {name: section[name] for name in kept} == {**kept, "recompute": recompute}
        assert section["slices"] != 9 and TeraPipeConfig.from_deepspeed({"terapipe": section}).schedule == "1f1b"
    # whoever pastes the printed lines gets the same, also names with spaces
    path.write_text(json.dumps({**config, "terapipe": {"trace_dir": "a folder of traces " * 9}}))
    words = (*options, "--config", str(path), "--schedule", "1f1b", "--max-slices", "1")
    printed = shown(capsys, "plan", *words).split("in the DeepSpeed JSON:")[1]
    assert json.loads(f"{{{printed}}}") == {"terapipe": as_json(capsys, *words)["terapipe"]}
    path.write_text(json.dumps({**config, "terapipe": {**kept, "enabled": False, "slices": 9, "partition": None}}))
    limited = as_json(capsys, *options, "--config", str(path), "--schedule", "1f1b", "--memory-limit-gb", "20")
    assert limited["terapipe"]["planner"] == {"memory_limit_gb": 20.0}
    path.write_text(json.dumps({**config, "terapipe": {"enabled": True, "schedule": "1f1b", "compile": True}}))
    refused_plan = tmp_path / "refused.json"
    told = refused(capsys, *options, "--config", str(path), "--schedule", "zb-h1", "--out", str(refused_plan))
    assert "settings of --config do not go with this plan: terapipe.compile = True" in told
    assert not refused_plan.exists()
    of_another = {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2, "granularity_tokens": 256}
    path.write_text(json.dumps({**config, "terapipe": of_another}))
    section = as_json(capsys, *options, "--config", str(path), "--schedule", "1f1b", "--chunks-per-stage", "1")[
        "terapipe"
    ]
    assert "chunks_per_stage" not in section
    # ranks that divide layers, and messages in fewer bits, as `simulate` prices them
    path.write_text(json.dumps({**config, "tensor_parallel": {"autotp_size": 2}}))
    cut = as_json(capsys, *options, "--config", str(path), "--max-slices", "1")
    path.write_text(json.dumps(config))
    assert cut == as_json(capsys, *options, "--config", str(path), "--max-slices", "1", "--tensor-parallel", "2")
    path.write_text(json.dumps({**config, "pipeline": {"stages": 4}, "tensor_parallel": {"autotp_size": 2}}))
    unstaged = [word for word in options if word not in ("--stages", "4")]
    assert cut == as_json(capsys, *unstaged, "--config", str(path), "--max-slices", "1")
    words = "--model gpt3-1b --device v100-32gb --schedule 1f1b --stages 4 --micro-batches 3 --micro-batch-size 2"
    words = f"{words} --dtype fp32 --slices 1 --sequence-length 2048 --json"
    both, predicted = {"forward": "fp8", "backward": "bf16"}, []
    for links, more in (
        (both, ["--links=fp8,bf16"]),
        ({"forward": "bf16"}, ["--links=bf16"]),
        ({"backward": "bf16"}, ["--links=,bf16"]),
        ({**both, "exact_until_part": 1}, []),
    ):
        path.write_text(json.dumps({**config, "terapipe": {"schedule": "1f1b", "links": links}}))
        packed = as_json(capsys, *options, "--config", str(path), "--max-slices", "1", "--dtype", "fp32")
        simulated = json.loads(shown(capsys, "simulate", *words.split(), *more))
        assert packed["predicted_s"] == pytest.approx(simulated["makespan_s"])
        predicted.append(packed["predicted_s"])
        assert packed["terapipe"]["links"] == links
    assert len(set(predicted)) == 4
    path.write_text('{"sequence_parallel_size": 2, "terapipe": {"recompute": [0, 1], "keep_attention": true}}')
    told = refused(capsys, *options, "--config", str(path))
    assert "terapipe.recompute = [0, 1] and terapipe.keep_attention = True and sequence_parallel_size = 2 in" in told
    path.write_text('{"terapipe": {"offload_activations": true}}')
    assert "only `terapipe strategy` has that among its choices" in refused(capsys, *options, "--config", str(path))
    path.write_text('{"torch_autocast": {"enabled": true}}')
    assert "torch_autocast.enabled = True in --config: not among" in refused(capsys, *options, "--config", str(path))
    path.write_text('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}')
    assert "train_batch_size = 10 in --config is no multiple of 6" in refused(capsys, *options, "--config", str(path))
    path.write_text(json.dumps({**config, "terapipe": {"enabled": True, "strategy": "mine.json"}}))
    assert "terapipe.strategy = 'mine.json' in --config" in refused(capsys, *options, "--config", str(path))


@pytest.mark.parametrize(("precision", "dtype"), [
    ({"bfloat16": {"enabled": True}}, "bf16"), ({"bf16": {"enabled": 1}}, "bf16"),
    ({"fp16": {"enabled": "true"}}, "fp16"), ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
    ({}, "fp32"), ({"bf16": {"enabled": "auto"}}, "bf16 by the device"),  # as Trainer's file says
])  # fmt: skip
def test_a_precision_in_any_form_that_deepspeed_takes(
    precision: dict[str, Any], dtype: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(precision))
    # this device is made for the other one
    device = "v100" if dtype == "bf16" else "a100"
    options = ("--model", "gpt3-1b", "--device", device, "--stages", "8", "--schedule", "1f1b", "--config", str(path))
    if device == "a100":
        assert as_json(capsys, *options)["setup"].startswith(f"gpt3-1b in {dtype.split()[0]} on")
    else:
        assert "bf16" in refused(capsys, *options)  # a V100 has none
    if dtype not in ("bf16", "fp16"):
        return
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config

    read = get_bfloat16_config if dtype == "bf16" else get_float16_config
    assert read(precision).enabled


def test_compiled_layers_get_no_schedule_that_splits_backwards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The planner's best one was refused at the end, with the advice to give "auto"."""
    path = tmp_path / "ds.json"
    options = ("--model", "gpt3-1b", "--device", "v100", "--stages", "4", "--micro-batches", "4", "--config", str(path))
    listed = []
    for compiles in (False, True):
        path.write_text(json.dumps({"terapipe": {"enabled": True, "schedule": "auto", "compile": compiles}}))
        found = as_json(capsys, *options, "--granularity", "256")
        listed.append({row["schedule"] for row in found["ranking"]})
    assert listed[0] - listed[1] == {"zb-h1", "seq1f1b-zb", "zbv", "seq1f1b-interleaved-zb"}
    assert "compile = True with schedule = 'zbv'" in refused(capsys, *options, "--schedule", "zbv")
    order = tmp_path / "order.csv"
    found = as_json(capsys, *options, "--granularity", "256", "--schedule", "search", "--order", str(order))
    assert TeraPipeConfig.from_deepspeed({"terapipe": found["terapipe"]}).compile and "W" not in order.read_text()


def test_a_granularity_that_nobody_set_gives_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--model", "gpt3-1b", "--device", "v100-32gb", "--stages", "2", "--schedule", "seq1f1b")
    path = tmp_path / "ds.json"
    path.write_text('{"terapipe": {"enabled": true}}')
    for more in ((), ("--config", str(path)), ("--tensor-parallel", "2", "--sequence-parallel")):
        assert as_json(capsys, *options, *more, "--sequence-length", "48")["plan"] == [48]
    path.write_text('{"terapipe": {"enabled": true, "granularity_tokens": 64}}')
    for more in (("--granularity", "64"), ("--config", str(path))):
        text = refused(capsys, *options, *more, "--sequence-length", "48")
        assert "--granularity 64 is larger than the sequence of 48" in text


def profile_of(num_parts: int) -> Profile:
    """Times that are linear in the tokens, with a floor and a share of the prefix."""
    key = ProfileKey("f" * 16, "my model", "a device", "bf16", 1, 1, num_parts, False, 1024, "flash", {})
    pairs = [(i, j) for i in (64, 256, 512, 1024) for j in (0, 256, 512, 768) if i + j <= 1024]
    samples = []
    for tokens, prefix in pairs:
        seconds = 1e-3 + 1e-5 * tokens + 1e-9 * tokens * prefix
        samples.append(CostSample(tokens, prefix, seconds, 2 * seconds, repeats=5))
    return Profile(key, tuple(PartProfile(part_id, tuple(samples)) for part_id in range(num_parts)))


def test_measured_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of(3).save(path)
    found = as_json(capsys, "--profile", str(path), "--granularity", "64", "--micro-batches", "2")
    assert found["setup"].startswith("my model in bf16 on a device, costs measured\n3 stages, ")
    assert (sum(found["plan"]), found["num_stages"], found["peak_bytes"]) == (1024, 3, None)
    assert "fewer than" not in found["setup"]
    # `simulate` gives the last part the link of another one, too: its gradients are no messages without time
    links = tuple(LinkSample(tokens, 1e-3 * tokens, part_id) for tokens in (64, 1024) for part_id in (0, 1))
    dataclasses.replace(profile_of(3), links=links).save(path)
    words = f"--profile {path} --stages 3 --micro-batches 1 --schedule 1f1b --sequence-length 1024".split()
    whole = json.loads(shown(capsys, "simulate", *words, "--slices", "1", "--json"))["makespan_s"]
    assert whole == pytest.approx(as_json(capsys, *words, "--max-slices", "1")["predicted_s"])
    assert whole == pytest.approx(3 * 3 * (1e-3 + 1e-5 * 1024) + 4 * 1.024)
    profile_of(3).save(path)
    finer = as_json(capsys, "--profile", str(path), "--granularity", "32")
    assert "slices of fewer than 64 tokens were not measured" in finer["setup"]
    assert "has 3 parts" in refused(capsys, "--profile", str(path), "--stages", "4")
    for limit in ("--memory-limit-gb", "4"), ("--device", "v100"):
        assert "give --model as well" in refused(capsys, "--profile", str(path), *limit)
    profile_of(1).save(path)
    five = as_json(capsys, *words, "--stages", "5", "--max-slices", "1")  # one stage stands for all
    same = json.loads(shown(capsys, "simulate", *words, "--stages", "5", "--slices", "1", "--json"))
    assert same["makespan_s"] == five["predicted_s"] == pytest.approx(5 * 3 * (1e-3 + 1e-5 * 1024))
    assert "measure" in refused(capsys, "--profile", str(path), "--stages", "2", "--sequence-length", "4096")


def test_simulate_takes_measured_and_counted_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, schedule = tmp_path / "profile.json", "--schedule seq1f1b --stages 2 --slices 512,512"
    profile_of(2).save(path)
    model = "--model gpt3-13b --device v100 --tensor-parallel 8 --micro-batch-size 2"
    counted = analytic_costs("gpt3-13b", "v100", num_stages=2, tensor_parallel=8, micro_batch=2)
    for words, costs in ((f"--profile {path}", CostModel.from_profile(profile_of(2))), (model, counted)):
        found = json.loads(shown(capsys, "simulate", *f"{schedule} {words} --json".split()))["makespan_s"]
        assert found == simulate(build("seq1f1b", 2, 1, 2), SlicePlan((512, 512)), costs).makespan_s
    three = refused_command(capsys, "simulate", *f"{schedule} --stages 3 --profile {path}".split())
    assert "has 2 parts, and this schedule needs 3: give other --stages" in three
    longer = ("--slices", "2048,1", "--model", "gpt3-1b", "--device", "v100")
    assert "learned positions for 2048" in refused_command(capsys, "simulate", *schedule.split()[:4], *longer)


def test_parts_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where layers were not timed, parts are not divided; else there are never more parts than layers."""
    path, whole = tmp_path / "profile.json", profile_of(3)
    options = ("--profile", str(path), "--max-slices", "1")
    whole.save(path)
    found = as_json(capsys, *options)
    assert "layers were not timed: only the parts that were measured can be planned" in found["setup"]
    assert {one["chunks_per_stage"] for one in found["ranking"]} == {1}
    assert "--chunks-per-stage 2: " in refused(capsys, *options, "--chunks-per-stage", "2")
    for one in (profile_of(1), whole):
        parts = len(one.parts)
        kind = LayerProfile(one.parts[0].samples, 1, 1, 8.0)
        bounds = tuple(range(0, 2 * parts + 1, 2))
        dataclasses.replace(one, layers=LayerProfiles((kind,), (0,) * 2 * parts, bounds)).save(path)
        found = as_json(capsys, *options, "--stages", "3")
        assert "not timed" not in found["setup"]
        assert {one["chunks_per_stage"] for one in found["ranking"]} == {1, 2}
        assert "--chunks-per-stage 3: " in refused(capsys, *options, "--stages", "3", "--chunks-per-stage", "3")


NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(("keys", "bytes_per_parameter"), [
    ({"data_types": {"grad_accum_dtype": "fp32"}}, 2 + 4 + 12),
    ({}, 2 + 2 + 12),  # DeepSpeed sums in the dtype of the parameters
    ({"optimizer": {"type": "Lion"}}, 2 + 2 + 8),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 2 + 2 + 8),
    ({"optimizer": {"type": "SGD"}}, 2 + 2 + 4),
    ({"optimizer": {"type": "OneBitAdam"}}, 2 + 2 + 12),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 2 + 2),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}, 2 + 2 + 12),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, 2 + 2),
    ({"data_types": {"grad_accum_dtype": "torch.float32"}}, 2 + 4 + 12),
    ({"data_types": {"grad_accum_dtype": "float"}}, 2 + 4 + 12),
    ({"bf16": NARROW}, 2 + 2 + 6),  # copy and two states in bf16
    ({"bf16": NARROW, "data_types": {"grad_accum_dtype": "fp32"}}, 2 + 4 + 12),  # an optimizer that ignores it
])  # fmt: skip
def test_the_optimizer_of_a_config_decides_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, Any], bytes_per_parameter: int
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}} | keys))
    options = ("--model", "llama-2-7b", "--device", "h200", "--stages", "1", "--schedule", "1f1b", "--max-slices", "1")
    (text,) = refused(capsys, *options, "--config", str(tmp_path / "ds.json"), "--memory-limit-gb", "1").splitlines()
    static = float(text.split(" GiB of it are")[0].split()[-1]) * 2**30
    context = device_card("h200").context_bytes or 0
    assert static == pytest.approx(bytes_per_parameter * size_of("llama-2-7b").num_parameters() + context, rel=1e-3)


@pytest.mark.parametrize(("zero", "numbers"), [
    ({"reduce_bucket_size": 2e8}, 200_000_000), ({}, 500_000_000), ({"contiguous_gradients": False}, 0),
    ({"contiguous_gradients": "false"}, 0), ({"reduce_bucket_size": "auto"}, 4096**2),
])  # fmt: skip
@pytest.mark.parametrize("bucket_bytes", [2, 0])
def test_the_bucket_of_zero_1_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, zero: dict[str, Any], numbers: int, bucket_bytes: int
) -> None:
    """In bf16 only where sums are in bf16 too: with sums in fp32 DeepSpeed has an optimizer without a bucket."""
    sums = {} if bucket_bytes else {"data_types": {"grad_accum_dtype": "fp32"}}
    options = "--model llama-3-8b --device h200 --stages 4 --micro-batches 4 --schedule 1f1b --max-slices 1"
    peaks = []
    for more in (zero, {"contiguous_gradients": False}):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1} | more} | sums
        (tmp_path / "ds.json").write_text(json.dumps(config))
        found = as_json(capsys, *options.split(), "--config", str(tmp_path / "ds.json"))
        peaks.append(found["peak_bytes"])
    assert [a - b for a, b in zip(*peaks, strict=True)] == [bucket_bytes * numbers] * 4


def test_the_bucket_of_zero_1_counts_without_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """DeepSpeed's own bucket has 500 million numbers, here of fp16."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1, "contiguous_gradients": false}}')
    options = ("--model", "llama-3-8b", "--device", "h200", "--stages", "4", "--micro-batches", "4", "--dtype", "fp16")
    options = (*options, "--schedule", "1f1b", "--max-slices", "1")
    usual = as_json(capsys, *options, "--zero-stage", "1")["peak_bytes"]
    without = as_json(capsys, *options, "--config", str(tmp_path / "ds.json"))["peak_bytes"]
    assert [a - b for a, b in zip(usual, without, strict=True)] == [1_000_000_000] * 4


def test_settings_of_a_config_that_nobody_counts_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"optimizer": {"type": "Muon"}, "pipeline": {"activation_checkpoint_interval": 2}}
    config["activation_checkpointing"] = {"cpu_checkpointing": True, "partition_activations": "false"}
    config["data_types"] = {"keep_in_fp32_modules": ["norm"]}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = as_json(capsys, *SMALL, "--schedule", "1f1b", "--max-slices", "1", "--config", str(tmp_path / "ds.json"))
    others = "optimizer.type = 'Muon' (as Adam), data_types.keep_in_fp32_modules = ['norm'] (as none)"
    others += ", pipeline.activation_checkpoint_interval = 2 (as 1)"
    cpu = "activation_checkpointing.cpu_checkpointing = True (as false)"
    assert found["setup"].splitlines()[-1] == f"counted otherwise: {others}, {cpu}"
    told = refused(capsys, *SMALL, "--sequence-parallel")
    assert "--sequence-parallel divides tokens over tensor ranks, and there is one: give --tensor-parallel" in told
    # a job with the plan would refuse this one
    words, config = (*SMALL, "--config", str(tmp_path / "ds.json")), {"compile": {"deepcompile": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"terapipe": {"enabled": True}}))
    told = refused(capsys, *words)
    assert "compile.deepcompile = True cannot be combined" in told and "set it to false" in told
    (tmp_path / "ds.json").write_text(json.dumps(config))
    named = as_json(capsys, *words)["setup"].splitlines()[-1]
    assert named.startswith("to train with this plan: compile.deepcompile = True cannot be combined")
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "terapipe": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert "zero_optimization.stage = 3 cannot" in refused(capsys, *words)
    assert "cannot" not in as_json(capsys, *words, "--zero-stage", "1")["setup"]


def test_a_profile_does_not_tell_how_the_optimizer_was_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, profile_path = tmp_path / "ds.json", tmp_path / "profile.json"
    measured_profile().save(profile_path)
    words = ("--profile", str(profile_path), "--schedule", "1f1b", "--max-slices", "1", "--config", str(path))
    zero = {"stage": 1, "contiguous_gradients": True, "reduce_bucket_size": 9}
    section = {"recompute": [0], "keep_attention": False, "links": {"forward": "bf16"}}
    path.write_text(json.dumps({"optimizer": {"type": "Muon"}, "zero_optimization": zero, "terapipe": section}))
    named = "optimizer.type = 'Muon', terapipe.links.forward = 'bf16', zero_optimization.stage = 1, "
    named += "zero_optimization.reduce_bucket_size = 9, terapipe.recompute = [0]"
    line = f"not these keys of --config: {named}"
    assert as_json(capsys, *words)["setup"].splitlines()[-1] == f"the profile decides the times and memory, {line}"
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 1, "intermediate_size": 4, "vocab_size": 8}
    shape = {"model_type": "llama", "max_position_embeddings": 4096, "hidden_size": 10, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    counted = as_json(capsys, *words, "--model", str(tmp_path / "config.json"), "--device", "a100")["setup"]
    assert counted.splitlines()[-2:] == [
        "counted otherwise: optimizer.type = 'Muon' (as Adam)",
        f"the profile decides the times, {line}",
    ]
    path.write_text('{"zero_optimization": {"stage": 0, "contiguous_gradients": true}, "optimizer": {"type": "auto"}}')
    assert "the profile decides" not in as_json(capsys, *words)["setup"]
    measured_profile(tensor_parallel=2, links=False).save(profile_path)
    told = as_json(capsys, *words, "--sequence-parallel")["setup"]
    alone = "--sequence-parallel only decides the multiples of slice lengths"
    assert told.endswith(f"\nthe profile decides the times and memory: {alone}")


def test_settings_that_a_plan_does_not_take_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, words = tmp_path / "ds.json", (*SMALL[:-4], "--schedule", "1f1b", "--max-slices", "1", "--dtype", "fp16")
    words = (*words, "--config", str(path))
    section = {"slices": 3, "schedule": "zbv", "schedule_options": {"max_live_slices": 9}}
    path.write_text(json.dumps({"terapipe": section | {"planner": {"profile": "mine.json"}}}))
    named = "terapipe.slices = 3, terapipe.planner.profile = 'mine.json', terapipe.schedule_options.max_live_slices = 9"
    assert as_json(capsys, *words)["setup"].splitlines()[-1] == f"not taken from --config: {named}"
    section["slices"] = "auto"
    path.write_text(json.dumps({"terapipe": section | {"planner": {"profile": "measure"}}}))
    assert "not taken" not in as_json(capsys, *words[:6], *words[8:], "--schedule", "zbv")["setup"]
    # the third number of a batch is that of replicas, unless options are for another batch
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    path.write_text(json.dumps(batch))
    assert "data parallel 4, 1 micro-batch of 2 x" in as_json(capsys, *words)["setup"]
    for more in (("--data-parallel", "2"), ("--micro-batches", "3")):
        assert as_json(capsys, *words, *more)["setup"].endswith("\nnot taken from --config: train_batch_size = 8")
    path.write_text(json.dumps(batch | {"train_batch_size": 9}))
    assert "train_batch_size = 9 in --config is no multiple of 2" in refused(capsys, *words)
    path.write_text('{"gradient_acumulation_steps": 4}')
    assert main(["plan", *words]) == 0
    told = capsys.readouterr().err
    assert told.endswith(
        "gradient_acumulation_steps: DeepSpeed ignores this key; did you mean gradient_accumulation_steps?\n"
    )


def test_tensor_ranks_of_experts_and_latent_attention_have_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model deepseek-v3 --device h200 --stages 61 --schedule 1f1b --max-slices 1 --memory-limit-gb 9e4"
    notes = [as_json(capsys, *words.split(), "--tensor-parallel", degree)["setup"] for degree in ("1", "8")]
    assert ["latent attention and experts counted as divided" in note for note in notes] == [False, True]


def test_an_offloaded_optimizer_has_its_bucket_in_any_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """DeepSpeed turns `contiguous_gradients` on for it."""
    peaks, zero = [], {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    for more in ({}, {"contiguous_gradients": False}):
        (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero | more}))
        options = ("--model", "llama-3-8b", "--device", "h200", "--stages", "4", "--micro-batches", "4")
        found = as_json(
            capsys, *options, "--schedule", "1f1b", "--max-slices", "1", "--config", str(tmp_path / "ds.json")
        )
        peaks.append(found["peak_bytes"])
    assert peaks[0] == peaks[1]


def test_layers_are_cut_where_the_config_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, config, one = tmp_path / "profile.json", tmp_path / "ds.json", profile_of(2)
    config.write_text(json.dumps({"terapipe": {"partition": [0, 1, 8], "schedule": "seq1f1b"}}))
    options = ("--profile", str(path), "--max-slices", "1", "--config", str(config))
    one.save(path)
    assert "knows no such layers" in refused(capsys, *options)
    assert "counted costs" in refused(capsys, *SMALL, "--config", str(config))
    kind = LayerProfile(one.parts[0].samples, 1, 1, 8.0)
    dataclasses.replace(one, layers=LayerProfiles((kind,), (0,) * 8, (0, 4, 8))).save(path)
    found = as_json(capsys, *options)
    whole = sum(seconds[-1] for seconds in one_layer_s(one))
    assert found["predicted_s"] == pytest.approx(8 * whole, rel=1e-6)  # one after the other: nothing overlaps
    assert found["terapipe"]["partition"] == [0, 1, 8] and "layers cut at 0, 1, 8" in found["setup"]
    assert "cannot be cut in 4 parts" in refused(capsys, *options, "--schedule", "zbv")
    # the config of a strategy that was planned by the size of a model: the layer before the head goes with the head
    other = LayerProfile(kind.samples, 2, 2, 8.0)
    dataclasses.replace(one, layers=LayerProfiles((kind, other), (0, *[1] * 5, 0, 0), (0, 4, 8))).save(path)
    config.write_text(json.dumps({"terapipe": {"partition": [0, 3, 7], "schedule": "seq1f1b"}}))
    assert as_json(capsys, *options)["terapipe"]["partition"] == [0, 3, 8]
    # a profile was measured with the stages that recompute, if the config has some, and never with copies to the host
    config.write_text(json.dumps({"terapipe": {"recompute": [0], "offload_activations": True}}))
    assert "error: terapipe.offload_activations = True in --config" in refused(capsys, *options)
    # the module's own method of partition may cut elsewhere, with as little on the fullest part
    config.write_text(json.dumps({"terapipe": {"schedule": "seq1f1b"}}))
    assert "partition" not in as_json(capsys, *options)["terapipe"]
    assert as_json(capsys, *options, "--stages", "3")["terapipe"]["partition"] == [0, 3, 5, 8]
    chunks = ("--schedule", "interleaved", "--chunks-per-stage", "2")
    assert len(as_json(capsys, *options, *chunks)["terapipe"]["partition"]) == 5


def one_layer_s(profile: Profile) -> list[list[float]]:
    """Forward and backward of one layer on each measured number of tokens without a prefix, shortest first."""
    samples = sorted((s for s in profile.parts[0].samples if s.prefix == 0), key=lambda s: s.tokens)
    return [[s.forward_s for s in samples], [s.backward_s for s in samples]]


def test_parts_are_not_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four parts with links may be two on each of two stages; without links they are those of `terapipe profile`."""
    path, options = tmp_path / "profile.json", ("--max-slices", "1", "--schedule", "1f1b")
    linked = dataclasses.replace(profile_of(4), links=(LinkSample(1024, 1e-6),))
    linked.save(path)
    text = refused(capsys, "--profile", str(path), *options)
    assert "--stages is missing" in text and "has 4 parts" in text
    found = as_json(capsys, "--profile", str(path), *options, "--stages", "2")
    assert found["num_stages"] == 2 and "planned for 2 stages; the profile has 4 parts" in found["setup"]
    profile_of(4).save(path)
    assert as_json(capsys, "--profile", str(path), *options)["num_stages"] == 4
    for stages, said in ((2, "planned for 2 stages; the profile has 4 parts of 2 stages"), (4, "has 4 parts;")):
        dataclasses.replace(linked, pipeline_stages=stages).save(path)  # which the engine notes
        found = as_json(capsys, "--profile", str(path), *options)
        assert found["num_stages"] == stages and said in found["setup"]
    assert as_json(capsys, "--profile", str(path), *options, "--stages", "2")["num_stages"] == 2
    dataclasses.replace(profile_of(3), links=linked.links).save(path)
    assert as_json(capsys, "--profile", str(path), *options)["num_stages"] == 3


def test_every_schedule_is_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    few = (*SMALL, "--max-slices", "2", "--memory-limit-gb", "12.6")
    found = as_json(capsys, *few)
    ranking = {one["schedule"]: one for one in found["ranking"]}
    best = found["ranking"][0]
    assert ranking.keys() - {"search"} == set(SCHEDULE_NAMES) - {"dapple"} and best["schedule"] == found["schedule"]
    assert ranking["chimera"].keys() == {"schedule", "chunks_per_stage", "need_bytes"}  # both copies of 2 x 6 layers
    assert ranking["chimera"]["need_bytes"] > 12.6e9
    for one in [each for each in found["ranking"] if each["schedule"] != "search"][:4]:
        chunks, plan = one["chunks_per_stage"], SlicePlan(tuple(one["plan"]))
        schedule = build(one["schedule"], 4, 2, plan.num_slices, chunks_per_stage=chunks)
        costs = analytic_costs("gpt3-1b", "v100", num_stages=schedule.num_parts)
        assert simulate(schedule, plan, costs).makespan_s == pytest.approx(one["predicted_s"], rel=1e-9)
    assert found["terapipe"].get("chunks_per_stage", 1) == found["chunks_per_stage"] == best["chunks_per_stage"]
    text = planned(capsys, *few)
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.split()[:1]]
    assert [row for row in rows if row in ranking] == [one["schedule"] for one in found["ranking"]]
    assert f"needs {ranking['chimera']['need_bytes'] / 2**30:.2f} GiB" in text and "GiB (12.6 GB), " in text


def test_a_limit_may_be_met_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    """The float 2.041846432 times 1e9 is less than 2041846432."""
    options = "--model mini --device a100 --stages 3 --sequence-length 4900 --granularity 1000 --max-slices 3"
    options += " --schedule interleaved --chunks-per-stage 2 --memory-limit-gb 2.041846432 --zero-stage 1"
    found = as_json(capsys, *options.split())
    assert max(found["peak_bytes"]) == found["memory_limit_bytes"] == 2041846432
    assert check_limit(2.041846432, Cluster("v100", 1, 1)) == 2041846432


def test_an_order_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The section names the file of the order, with the slices of each micro-batch; both mean what is predicted."""
    path, out = tmp_path / "order.csv", tmp_path / "plan.json"
    few = (*SMALL[:-4], "--micro-batches", "3", "--granularity", "1024", "--schedule", "search")
    found = as_json(capsys, *few, "--order", str(path), "--out", str(out))
    plans = [SlicePlan(tuple(lengths)) for lengths in found["plans"]]
    config = TeraPipeConfig.from_deepspeed({"gradient_accumulation_steps": 3, "terapipe": found["terapipe"]})
    assert config.schedule == str(path) and config.plans_for(2048, 3) == tuple(plans) and len(plans) == 3
    costs = analytic_costs("gpt3-1b", "v100", num_stages=4)
    assert simulate(load(path), plans, costs).makespan_s == pytest.approx(found["predicted_s"], rel=1e-9)
    assert found["order"] == path.read_text() and found["order_bound_s"] <= found["predicted_s"]
    written = json.loads(out.read_text())
    assert written.get("plans", [written.get("lengths")] * 3) == found["plans"]
    answer = tmp_path / "answer.json"
    text = planned(capsys, *few, "--chunks-per-stage", "2", "--max-slices", "2", "--json", str(answer))
    assert '"schedule": "order.csv"' in text and "--order order.csv writes the order" in text
    assert "which no order of these slices beats" in text
    two = json.loads(answer.read_text())
    assert two["chunks_per_stage"] == 2 and max(len(lengths) for lengths in two["plans"]) <= 2


def test_parts_per_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = str(tmp_path / "step.svg")
    three = as_json(capsys, *SMALL, "--max-slices", "2", "--chunks-per-stage", "3", "--picture", picture)
    looped = {"interleaved", "seq1f1b-interleaved", "seq1f1b-interleaved-zb"}
    assert {one["schedule"] for one in three["ranking"]} == looped
    assert TeraPipeConfig.from_deepspeed({"terapipe": three["terapipe"]}).chunks_per_stage == 3
    named = as_json(capsys, *SMALL, "--max-slices", "2", "--schedule", "zbv", "--picture", picture)
    assert named["terapipe"]["chunks_per_stage"] == 2 and "ranking" not in named
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"terapipe": {"chunks_per_stage": 2}}))
    both = as_json(capsys, *SMALL, "--max-slices", "2", "--config", str(config))
    assert {one["chunks_per_stage"] for one in both["ranking"]} == {2}
    assert "no schedule can have the layers so" in refused(capsys, *SMALL, "--chunks-per-stage", "7")
    seven = ("--chunks-per-stage", "7", "--schedule", "interleaved")
    assert "cannot be cut in 28 parts" in refused(capsys, *SMALL, *seven)
    assert "has one part per stage" in refused(capsys, *SMALL, "--chunks-per-stage", "2", "--schedule", "1f1b")


def test_links_are_those_of_the_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """8 parts on 4 devices of one node: not the network between nodes of 8."""
    options = ("--tensor-parallel", "2", "--max-slices", "1", "--schedule", "zbv")
    found = as_json(capsys, *SMALL, *options)
    sizes = {"num_stages": 8, "tensor_parallel": 2}
    costs, far = analytic_costs("gpt3-1b", "v100", devices=8, **sizes), analytic_costs("gpt3-1b", "v100", **sizes)
    assert costs[0].link != far[0].link
    timeline = simulate(build("zbv", 4, 2, 1), SlicePlan((2048,)), costs)
    assert found["predicted_s"] == pytest.approx(timeline.makespan_s, rel=1e-9)
    words = ("simulate", *options[:2], *options[4:], "--slices", "1", "--sequence-length", "2048", "--json")
    assert json.loads(shown(capsys, *words, *SMALL[:-2]))["makespan_s"] == pytest.approx(found["predicted_s"], rel=1e-9)


@pytest.mark.parametrize(("name", "stages"), [("zbv", "1"), ("chimera-seq", "2"), ("seq1f1b-interleaved-zb", "4")])
def test_a_plan_and_its_simulation_agree(capsys: pytest.CaptureFixture[str], name: str, stages: str) -> None:
    words = ["--model", "gpt3-1b", "--device", "h100", "--stages", stages, "--micro-batches", "4", "--schedule", name]
    words += ["--sequence-length", "2048", "--chunks-per-stage", "2"]
    plan = as_json(capsys, *words, "--max-slices", "1")
    simulated = json.loads(shown(capsys, "simulate", *words, "--slices", "1", "--json"))
    assert simulated["makespan_s"] == pytest.approx(plan["predicted_s"], rel=1e-9)
    assert [stage["peak_bytes"] for stage in simulated["stages"]] == plan["peak_bytes"]


def test_memory_on_a_cpu_has_its_norms_of_plain_operations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Input and normalised input in fp32 and one number, beside the output, in place of input and two numbers."""
    known = next(card for card in json.loads(FILE.read_text())["devices"] if card["name"] == "cpu-core")
    (tmp_path / "gpu.json").write_text(json.dumps(known | {"name": "gpu", "aliases": []}))
    words = ["--model", "mini", "--stages", "1", "--sequence-length", "1024", "--schedule", "1f1b", "--device"]
    peaks = []
    for device in ("cpu", str(tmp_path / "gpu.json")):
        plan = as_json(capsys, *words, device, "--max-slices", "1")
        simulated = json.loads(shown(capsys, "simulate", *words, device, "--slices", "1", "--json"))
        peaks += [plan["peak_bytes"], [stage["peak_bytes"] for stage in simulated["stages"]]]
    # 8 layers have two each; the one before the head is done when their backwards run
    more = 1024 * 2 * 8 * (4 * 512 + 4 - 8)
    assert peaks == [[peak + more for peak in peaks[2]]] * 2 + [peaks[2]] * 2


def test_the_table_of_turns_has_the_positions_of_the_sequence() -> None:
    """`nano` has 4,096 positions; its layers make a longer table where sequences are longer."""
    working, tables = [], []
    for length in (4096, 65536):
        setup = plan_setup(PlanOptions(model="nano", device="cpu", stages=2, sequence_length=length))
        assert setup.memory_of is not None
        working.append(setup.memory_of(2).parts[1].working_bytes)
        turns = rotary_turns(32, float(length), 0, torch.empty(1, length, 1))  # a base of its own: tables are kept
        tables.append(turns.untyped_storage().nbytes())
    assert working[1] - working[0] == tables[1] - tables[0] > 0


def test_measured_costs_are_those_of_one_setup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, config = tmp_path / "profile.json", tmp_path / "ds.json"
    profile_of(2).save(path)
    measured = ("--profile", str(path))
    assert as_json(capsys, *measured, "--dtype", "bf16", "--micro-batch-size", "1")["num_stages"] == 2
    assert "dtype bfloat16, asked for is float16" in refused(capsys, *measured, "--dtype", "fp16")
    assert "micro-batch-size 1, asked for is 4" in refused(capsys, *measured, "--micro-batch-size", "4")
    assert "tensor-parallel 1, asked for is 2" in refused(capsys, *measured, "--tensor-parallel", "2")
    assert "measure again" in refused(capsys, *measured, "--activation-checkpointing")
    assert "have the bytes of the job that measured them" in refused(capsys, *measured, "--zero-stage", "1")
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3}))
    assert "asked for is 3" in refused(capsys, *measured, "--config", str(config))
    config.write_text(json.dumps({"pipeline": {"activation_checkpoint_interval": 1}}))
    assert "activation-checkpointing False" in refused(capsys, *measured, "--config", str(config))


OF_LLAMA = "--model llama-3-8b --device h100 --stages 4 --sequence-length 100000000 --granularity 1"


@pytest.mark.parametrize(
    ("words", "message"),
    {
        OF_LLAMA: "--granularity 1 cuts 100000000 tokens in 100000000 granules",
        "": "give --model and --device, or --profile",
        "--model gpt3-1b --device v100": "--stages is missing",
        "--model gpt3-2b --device v100 --stages 4": "did you mean",
        "--model gpt3-1b --device v10 --stages 4": "unknown device",
        "SMALL --out no-such-folder/plan.json": "no-such-folder/plan.json: there is no such folder; give a",
        "SMALL --out=--": "--out: expected one argument, not --",
        "SMALL --dtype bf16": "no such arithmetic",
        "SMALL --schedule zigzag": "--schedule 'zigzag': the planner knows",
        "SMALL --schedule seq1f": "; did you mean seq1f1b?",
        "SMALL --granularity 4096": "larger than the sequence",
        "SMALL --sequence-length 4096": "learned positions for 2048 tokens",
        "SMALL --stages 25": "error: --stages 25: gpt3-1b has 24 layers; give at most",
        "SMALL --tensor-parallel 3": "error: --tensor-parallel 3: num_heads",
        "SMALL --tensor-parallel 2 --sequence-parallel --sequence-length 1025": "2 ranks; give a multiple of 2",
        "SMALL --memory-limit-gb 1e308": "1e308: give a number <= 1000000000.0",  # inf bytes are no JSON
        "SMALL --schedule 1f1b --memory-limit-gb 0.5": "no plan fits in 0.4657 GiB (0.5 GB)",
        "SMALL --dtype fp32 --memory-limit-gb 10": "NCCL; try activation checkpointing, more",  # of all
        "SMALL --dtype fp32 --memory-limit-gb 10 --micro-batch-size 4 --activation-checkpointing": "; try a smaller",
        "SMALL --config no-such-file.json": "no-such-file.json: No such file",
        "SMALL --profile no-such-file.json": "no-such-file.json",
        "SMALL --picture step.bmp": ".png, .svg or .pdf",
    }.items(),
)
def test_refused_in_one_line(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert message in refused(capsys, *words.replace("SMALL", " ".join(SMALL)).split())


def test_a_config_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for text, message in (
        ("{", "is no JSON"),
        ("[]", "holds []: give an object"),
        ('{"terapipe": {"slicess": 4}}', "slices"),
        ('{"fp16": true}', "fp16 = True"),
        ('{"zero_optimization": [1]}', "give an object"),
    ):
        path.write_text(text)
        assert message in refused(capsys, *SMALL, "--config", str(path))


def test_without_torch() -> None:
    """As on a laptop: the modules of the deep learning stack cannot even be found."""
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'matplotlib')))"
    source = f"{block}; from terapipe_ds.cli import main; sys.exit(main({['plan', *SMALL]!r}))"
    done = run_python("-c", source)
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted" in done.stdout


def test_what_chimera_takes_besides_its_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand for gpt3-1b in fp16: bytes of two parts over the link, their reduction over two replicas, which
    is as long again, and Adam on both."""
    options = (*SMALL, "--device", "v100-32gb", "--granularity", "512", "--data-parallel", "2")
    found = as_json(capsys, *options)
    card = device_card("v100-32gb")
    counts = [part.num_parameters() for part in analytic_costs("gpt3-1b", card, num_stages=4, dtype="fp16")]
    adam_s = [part.step_s() for part in analytic_costs("gpt3-1b", card, num_stages=4, dtype="fp16")]
    link_s = [2 * count / card.node_link.bandwidth_bytes_per_s for count in counts]
    pair_s = max(2 * (link_s[k] + link_s[3 - k]) + adam_s[k] + adam_s[3 - k] for k in range(4))
    expected_s = pair_s - max(map(sum, zip(link_s, adam_s, strict=True)))
    extras = {one["schedule"]: one["extra_s"] for one in found["ranking"] if "extra_s" in one}
    assert extras["chimera"] == extras["chimera-seq"] == pytest.approx(expected_s, rel=1e-9)
    assert set(extras.values()) == {0.0, extras["chimera"]}
    alone = as_json(capsys, *options, "--schedule", "chimera")
    assert alone["extra_s"] == pytest.approx(expected_s, rel=1e-9)
    # replicas divide the states of ZeRO-1, and of bfloat16 always, and then gather the parameters; with ZeRO-1 the
    # gradients of bfloat16 accumulate in fp32, and two stages sum them so
    for device, zero_stage, gradient, summed in (("v100-32gb", "1", 2, 3), ("a100", "1", 4, 3), ("a100", "0", 2, 3)):
        card = device_card(device)
        link_s = [count / card.node_link.bandwidth_bytes_per_s for count in counts]
        adam_s = [part.step_s() / 2 for part in analytic_costs("gpt3-1b", card, num_stages=4)]
        ends_s = [summed * one + adam for one, adam in zip(link_s, adam_s, strict=True)]
        pair_s = max(gradient * (link_s[k] + link_s[3 - k]) + ends_s[k] + ends_s[3 - k] for k in range(4))
        words = (*options, "--device", device, "--zero-stage", zero_stage, "--schedule", "chimera")
        assert as_json(capsys, *words)["extra_s"] == pytest.approx(pair_s - max(ends_s), rel=1e-9)


def test_a_profile_with_the_memory_of_another_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, model = tmp_path / "layers.json", tmp_path / "config.json"
    measured_profile().save(path)
    given = ("--profile", str(path), "--schedule", "1f1b", "--device", "a100", "--model")
    told = refused(capsys, *given, "gpt3-1b")
    assert "--model gpt3-1b has 1,31" in told and "give the model that was measured" in told
    assert f"--stages 9: {path} has 6 layers; give at most --stages 6" in refused(capsys, *given[:2], "--stages", "9")
    layers = measured_profile().layers
    assert layers is not None
    wanted = sum(layers.kinds[kind].parameters for kind in layers.kind_of)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 1, "intermediate_size": 4, "vocab_size": 8}
    shape = {"model_type": "llama", "max_position_embeddings": 4096, **sizes}
    # the width whose model has about as many parameters
    for width in range(2, 512, 2):
        model.write_text(json.dumps({**shape, "hidden_size": width}))
        if size_of(str(model)).num_parameters() > wanted:
            break
    bytes_counted = as_json(capsys, *given, str(model))["peak_bytes"]
    assert bytes_counted
    for products in ("products in tf32", "autocast bfloat16"):  # parameters have the bytes of their own dtype
        profile = measured_profile()
        key = dataclasses.replace(profile.key, dtype=f"{profile.key.dtype} ({products})")
        dataclasses.replace(profile, key=key).save(path)
        rounded = as_json(capsys, *given, str(model), "--dtype", profile.key.dtype)
        assert rounded["peak_bytes"] == bytes_counted and products in rounded["setup"]
    without = as_json(capsys, *given[:4], "--model", str(model))
    assert "memory counted as on a GPU" in without["setup"] and without["memory_limit_bytes"] is None


def with_attention(layers: Any) -> Any:
    """Return the layers of a profile, whose attention takes 3/4 of their forward and keeps no bytes."""
    kinds = [
        dataclasses.replace(
            kind, samples=tuple(dataclasses.replace(one, attention_s=0.75 * one.forward_s) for one in kind.samples)
        )
        for kind in layers.kinds
    ]
    return dataclasses.replace(layers, kinds=tuple(kinds))


def test_a_measured_plan_says_which_layers_recompute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "layers.json", ("--choose-recompute", "--granularity", "64", "--micro-batches", "4")
    measured_profile().save(path)
    given = "--profile", str(path), "--schedule", "seq1f1b", *options
    assert "--memory-limit-gb" in refused(capsys, *given)
    roomy = as_json(capsys, *given, "--memory-limit-gb", "1")
    assert roomy["recompute"] == [[], []] and roomy["terapipe"]["recompute"] == "auto"
    one = (*given, "--micro-batches", "1", "--memory-limit-gb", "1")
    assert [len(as_json(capsys, *one, "--max-slices", n)["plan"]) for n in ("2", "1")] == [2, 1]
    limit = 0.95 * max(roomy["peak_bytes"]) / 1e9
    drawn: list[Any] = []
    monkeypatch.setattr("terapipe_ds.commands.plan.draw_timelines", lambda titled, path: drawn.extend(titled))
    tight = as_json(capsys, *given, "--memory-limit-gb", f"{limit:.9f}", "--picture", str(tmp_path / "step.svg"))
    assert any(tight["recompute"]) and max(tight["peak_bytes"]) <= limit * 1e9 and sum(tight["recompute_s"]) > 0
    assert drawn[-1][1].makespan_s == pytest.approx(tight["predicted_s"])
    # the limit counts without it too, where memory was measured
    without = "--profile", str(path), *options[1:], "--schedule", "seq1f1b", "--max-slices", "1", "--memory-limit-gb"
    assert as_json(capsys, *without, "1")["peak_bytes"] == as_json(capsys, *given, *without[-3:], "1")["peak_bytes"]
    assert "no plan fits in" in refused(capsys, *without, "0.00005")
    # layers that keep their attention take it from the first forward: the profile has the seconds
    kept = dataclasses.replace(measured := measured_profile(), layers=with_attention(measured.layers))
    kept.save(tmp_path / "kept.json")
    words = ("--profile", str(tmp_path / "kept.json"), *given[2:], "--memory-limit-gb", f"{limit:.9f}")
    again = as_json(capsys, *words, "--max-slices", "1")
    full = as_json(capsys, *given, "--memory-limit-gb", f"{limit:.9f}", "--max-slices", "1")
    assert again["recompute"] == full["recompute"] and any(full["recompute"])
    assert again["recompute_s"] == pytest.approx([seconds / 4 for seconds in full["recompute_s"]])
    assert again["terapipe"]["keep_attention"] is True and "keep_attention" not in full["terapipe"]
    assert ", attention kept, " in shown(capsys, "plan", *words)
    (tmp_path / "ds.json").write_text('{"terapipe": {"keep_attention": true}}')
    key = dataclasses.replace(measured.key, activation_checkpointing=True)
    dataclasses.replace(measured, key=key).save(tmp_path / "again.json")
    words = ("--profile", str(tmp_path / "again.json"), *given[2:], "--memory-limit-gb", "1")
    assert "layers recompute already; measure without" in refused(capsys, *words)
    told = refused(capsys, *given, "--memory-limit-gb", "1", "--config", str(tmp_path / "ds.json"))
    assert "nobody timed that" in told and "leave it out" in told
    # a process has CUDA's context and NCCL's buffers as well
    more = as_json(capsys, *given, "--memory-limit-gb", "4", "--device", "v100")
    context = {a - b for a, b in zip(more["peak_bytes"], roomy["peak_bytes"], strict=True)}
    assert context == {Cluster("v100", 1, 1).process_bytes(Grid(2, 1, 1))}
    beside = as_json(capsys, *given, "--memory-limit-gb", "1", "--data-parallel", "2")
    assert beside["peak_bytes"] == roomy["peak_bytes"] and "bytes of the job that was measured" in beside["setup"]
    assert tight["terapipe"]["planner"] == {"memory_limit_gb": pytest.approx(limit)}
    order = f"--order {tmp_path / 'o.csv'}"
    for words in ("--chunks-per-stage 2", "--schedule zbv", "--schedule search", order):
        told = refused(capsys, *given, "--memory-limit-gb", "1", *words.split())
        assert f"{'--order' if words == order else words}: --choose-recompute is for a schedule by its name" in told
    assert "it goes with one schedule" in refused(capsys, *given, "--schedule", "auto", "--option", "policy=B")
    assert "give --profile" in refused(capsys, *options, "--model", "gpt3-1b", "--device", "v100", "--stages", "2")
