"""Profiles of the parts of a model, one after the other on one device."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import Tensor

from terapipe_ds.attention import active_slice
from terapipe_ds.cli import main
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile, ProfileKey
from terapipe_ds.models.gpt import DecoderLayer, GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.runtime.layout.tied_and_copied import Gradients
from terapipe_ds.runtime.profiling.key import describe_part
from terapipe_ds.runtime.profiling.one_device import OfflineJob, partition, profile_model, single_process
from tests.distributed.harness import rank_pool
from tests.processes import run_python

MODEL = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 6, "num_heads": 2, "ffn_size": 32, "max_sequence_length": 64,
}  # fmt: skip


def _files(folder: Path, **config: Any) -> list[str]:
    model, ds_config = folder / "model.json", folder / "ds.json"
    model.write_text(json.dumps(MODEL))
    section = {"enabled": True, "slices": "auto", "granularity_tokens": 8}
    ds_config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "terapipe": section, **config}))
    return ["--config", str(ds_config), "--model", str(model), "--out", str(folder / "profile.json")]


@pytest.mark.parametrize("fails", ["init_distributed", "init_process_group"])
def test_a_start_that_fails_leaves_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    whose = deepspeed if fails == "init_distributed" else torch.distributed
    with mock.patch.object(whose, fails, side_effect=OSError("no port is left")):
        with pytest.raises(OSError, match="no port"), single_process():
            pytest.fail("no group")
    assert not torch.distributed.is_initialized() and "LOCAL_RANK" not in os.environ
    with single_process():
        assert torch.distributed.get_world_size() == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.full
def test_the_command_writes_a_profile_that_costs_come_from(tmp_path: Path) -> None:
    arguments = [*_files(tmp_path), "--stages", "4", "--threads", "1", "--json"]
    done = run_python("-m", "terapipe_ds", "profile", *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    profile = Profile.load(tmp_path / "profile.json")
    assert Profile.from_json(done.stdout) == profile  # nothing else is on stdout
    key = profile.key
    assert profile.pipeline_stages == 4
    assert (key.num_stages, key.micro_batch, key.sequence_length, key.dtype) == (4, 2, 64, "float32")
    assert "6 DecoderLayer" in key.model and not key.activation_checkpointing
    bounds = partition(gpt_layers(GPTConfig(**MODEL)), 4)
    middles = [p for p in range(1, 3) if bounds[p + 1] - bounds[p] == bounds[2] - bounds[1]]
    for part in middles[1:]:  # alike, so measured once
        assert profile.parts[part].samples == profile.parts[middles[0]].samples
    assert profile.parts[0].samples != profile.parts[1].samples
    for costs in CostModel.from_profile(profile):
        assert costs.forward_s(8, 0) > 0 and costs.backward_s(8, 56) > 0
        assert not hasattr(costs, "send_s")  # there are no links on one device


def _cut_by_deepspeed() -> list[int]:
    from deepspeed.pipe import PipelineModule

    return list(PipelineModule(gpt_layers(GPTConfig(**MODEL)), num_stages=2).parts)


def test_parts_are_those_of_deepspeed() -> None:
    ours = partition(gpt_layers(GPTConfig(**MODEL)), 2)
    assert [ours, ours] == rank_pool(2).run(_cut_by_deepspeed)


@pytest.mark.parametrize(("changes", "message"), [
    ({"--model": "tinny"}, "did you mean 'tiny'"),
    ({"--model": "none.json"}, "No such file"),
    ({"--out": "no-such-folder/profile.json"}, "there is no such folder"),
    ({"--stages": "0"}, "--stages 0: give a number >= 1"),
    ({"--sequence-length": str(2**63)}, "--sequence-length 9223372036854775808: give a number <= 67108864"),
    ({"--threads": str(2**31)}, "--threads 2147483648: give a number <= 4096"),
    ({"--out": "."}, "--out '.' has no file name: give the name of a file"),
    ({"--stages": "12"}, "pipeline.stages in --config, is 12: the model has 9 layers; give between 1 and 9"),
])  # fmt: skip
def test_what_is_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, message: str) -> None:
    options = dict(zip(*[iter(_files(tmp_path))] * 2, strict=True)) | changes
    assert main(["profile", *(text for pair in options.items() for text in pair)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(("config", "message"), [
    ({"train_micro_batch_size_per_gpu": "auto"}, 'train_micro_batch_size_per_gpu = "auto"'),
    ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, "train_micro_batch_size_per_gpu is missing in"),
    ({"train_micro_batch_size_per_gpu": 10**20}, "is too much to measure: give at most"),
    ({"gradient_accumulation_steps": "auto"}, 'gradient_accumulation_steps = "auto"'),
    ({"fp16": True}, "fp16 = True in --config: give an object"),
    ({"terapipe": {"partition": [0, 4, 7]}}, "ends with 7, but the model has 9 layers"),
    ({"terapipe": {"partition": [0, 4, 9]}}, "has 2 parts, --stages is 1: give --stages 2"),
    ({"terapipe": {"partition": [0, 4, 8]}}, "has 2 parts, --stages is 1"),  # planned by size
    ({"pipeline": {"activation_checkpoint_interval": "all"}}, "activation_checkpoint_interval = 'all'"),
    ({"terapipe": {"recompute": "off"}, "pipeline": {"activation_checkpoint_interval": 1}}, "says otherwise"),
    ({"terapipe": {"recompute": "full", "keep_attention": True}}, 'set planner.profile to "measure"'),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled = True in --config: such layers are timed"),
    ({"terapipe": {"compile": True}}, "terapipe.compile = True in --config: such layers are timed"),
    ({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}, "parallel_size = 2 and tensor_para"),
    ({"terapipe": {"offload_activations": True, "documents": 2, "enabled": True}}, "documents = 2 and terapipe.off"),
    ({"pipeline": {"stages": 2}, "terapipe": {"partition": [0, 9]}}, "has 1 part, --stages is 2"),
])  # fmt: skip
def test_a_config_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, message: str) -> None:
    assert main(["profile", *_files(tmp_path, **config)]) == 2
    assert message in capsys.readouterr().err


def test_a_pipe_sees_how_far_the_measurement_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_: object, progress: Callable[[int, float], None], __: object) -> None:
        progress(0, 0.5)
        raise ValueError("stopped")

    monkeypatch.setattr("terapipe_ds.commands.options._LINE_EVERY_S", 0.0)
    monkeypatch.setattr("terapipe_ds.runtime.profiling.one_device.profile_model", half)
    assert main(["profile", *_files(tmp_path), "--stages", "2"]) == 2
    assert "terapipe: measuring, 25% of this phase" in capsys.readouterr().err


def _sums_of_a_profile() -> tuple[set[str], float | None]:
    """Profile one part in bf16; return the dtypes of the sums, and the seconds of W of the smallest slice."""
    config = GPTConfig(**{**MODEL, "num_layers": 1, "dtype": "bfloat16"})
    tokens = torch.zeros((2, 16), dtype=torch.long)
    dtypes, real = set[str](), Gradients.made

    def noted(gradients: Gradients, weight: Any) -> Tensor:
        total = real(gradients, weight)
        dtypes.add(str(total.dtype))
        return total

    with mock.patch.object(Gradients, "made", noted):
        job = OfflineJob(gpt_layers(config), gpt_loss, tokens, tokens, num_stages=1, granularity_tokens=8)
        profile = profile_model(job, lambda *_: None, lambda _: None)
    return dtypes, profile.parts[0].samples[0].weight_s


def test_a_profile_in_bf16_is_of_layers_that_deepspeed_casts() -> None:
    """A program builds fp32 layers, with weights of another seed, perhaps for longer sequences: they cost the same."""

    def described(**fields: Any) -> Any:
        config = GPTConfig(vocab_size=8, hidden_size=16, num_layers=1, num_heads=2, **fields)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        job = OfflineJob(gpt_layers(config), gpt_loss, tokens, tokens, num_stages=1)
        with single_process():
            return describe_part(job.build_part(0, len(job.layers)).to(torch.bfloat16))

    measured = described(dtype="bfloat16")
    assert measured == described(dtype="float32", seed=2, init_std=0.1, max_sequence_length=64)
    assert measured != described(dtype="bfloat16", rope_base=5.0)
    learned = described(positions="learned", max_sequence_length=8)
    assert learned != described(positions="learned", max_sequence_length=16)  # their table is in memory


def test_gradients_of_a_profile_in_bf16_are_summed_in_fp32() -> None:
    """As by DeepSpeed's optimizer: the addition is part of the measured seconds."""
    ((dtypes, weight_s),) = rank_pool(1).run(_sums_of_a_profile)
    assert dtypes == {"torch.float32"} and weight_s is not None and weight_s > 0


def _runs_of_a_profile(**options: Any) -> tuple[set[tuple[int, bool]], ProfileKey]:
    """Profile two parts; return for runs of decoder layers the part and if gradients were on; and the key."""
    config, tokens = GPTConfig(**{**MODEL, "num_layers": 2}), torch.zeros((2, 16), dtype=torch.long)
    runs, forward = set[tuple[int, bool]](), DecoderLayer.forward

    def noted(layer: DecoderLayer, hidden: Any) -> Any:
        runs.add((active_slice().part_id, torch.is_grad_enabled()))
        return forward(layer, hidden)

    with mock.patch.object(DecoderLayer, "forward", noted):
        shape: dict[str, Any] = {"num_stages": 2, "granularity_tokens": 8, "bounds": [0, 2, 5]}
        job = OfflineJob(gpt_layers(config), gpt_loss, tokens, tokens, **shape, **options)
        return runs, profile_model(job, lambda *_: None, lambda _: None).key


@pytest.mark.parametrize(
    ("options", "recomputing"),
    [({}, set()), ({"activation_checkpoint_interval": 1}, {0, 1}), ({"recomputing": frozenset({1})}, {1})],
    ids=str,
)
def test_layers_recompute_as_the_config_says(options: dict[str, Any], recomputing: set[int]) -> None:
    """Their first run, without a graph, and a second one in the backward; other layers run once, with a graph."""
    ((runs, key),) = rank_pool(1).run(_runs_of_a_profile, **options)
    assert runs == {(0, True), (1, True)} | {(part_id, False) for part_id in recomputing}
    assert key.activation_checkpointing == bool(recomputing)
