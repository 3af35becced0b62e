"""The examples: what they do to text, what they write, and that the scripts start."""

import importlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.planner.strategy import size_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of examples/, whose scripts import each other as neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def text_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("text_data", monkeypatch)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    module = example("demo", monkeypatch)
    module.OUT.mkdir(parents=True)
    return module


# -- text ------------------------------------------------------------------------------------------------------

TOKENS = torch.arange(200, dtype=torch.uint8)  # a byte says where it stands


def starts(batches: Any, count: int) -> list[int]:
    return [int(row[0]) for inputs, _ in itertools.islice(batches, count) for row in inputs]


def test_labels_are_one_byte_ahead(text_data: ModuleType) -> None:
    training = text_data.training_batches(TOKENS, 16, 3, seed=1)
    for batches in (training, text_data.validation_batches(TOKENS, 16, 3, num_micro_batches=2)):
        inputs, labels = next(batches)
        assert inputs.shape == (3, 16) and inputs.dtype == torch.int64
        assert torch.equal(labels, inputs + 1)


def test_samples_follow_from_seed_and_number(text_data: ModuleType) -> None:
    def draw(seed: int, first: int = 0) -> list[int]:
        return starts(text_data.training_batches(TOKENS, 16, 2, seed=seed, first_micro_batch=first), 6)

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw(seed=1)[4:] == draw(seed=1, first=2)[:8]  # a resumed run
    assert max(starts(text_data.training_batches(TOKENS, 16, 2, seed=1), 2000)) == len(TOKENS) - 17


def test_replicas_share_out_the_samples(text_data: ModuleType) -> None:
    def draw(replica: int, replicas: int, rows: int) -> list[int]:
        batches = text_data.training_batches(TOKENS, 16, rows, seed=1, replica_id=replica, num_replicas=replicas)
        return starts(batches, 3)

    alone, first, second = draw(0, 1, rows=4), draw(0, 2, rows=2), draw(1, 2, rows=2)
    assert alone == [*first[:2], *second[:2], *first[2:4], *second[2:4], *first[4:], *second[4:]]


def test_validation_is_the_same_text_spread_over_all_of_it(text_data: ModuleType) -> None:
    def draw(replica: int, replicas: int) -> list[int]:
        batches = text_data.validation_batches(TOKENS, 16, 1, 4, replica_id=replica, num_replicas=replicas)
        return starts(batches, 100)

    assert draw(0, 1) == draw(0, 1) == [0, 46, 92, 138]
    assert sorted(draw(0, 2) + draw(1, 2)) == [23 * i for i in range(8)]


def test_split_is_disjoint_and_complete(text_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "numbers.txt"
    file.write_bytes(bytes(range(200)))
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("a file may be larger than the memory"))
    assert len(text_data.Corpus.load([str(file)], max_bytes=100).train) == 95
    corpus = text_data.Corpus.load([str(file)], max_bytes=1000, validation_fraction=0.25)
    assert corpus.train.tolist() == list(range(150))
    assert corpus.validation.tolist() == list(range(150, 200))


def test_unusable_text_says_what_to_give(text_data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="give files, or directories of them"):
        text_data.Corpus.load([str(tmp_path / "nothing")], max_bytes=10)
    with pytest.raises(ValueError, match="give --data text files"):
        text_data.Corpus.load([str(tmp_path / "empty")], max_bytes=10)
    with pytest.raises(ValueError, match="200 bytes of text are too few for sequences of 200"):
        next(text_data.training_batches(TOKENS, 200, 1, seed=0))


# -- metrics and pictures --------------------------------------------------------------------------------------


def test_metrics_keep_every_digit_and_earlier_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics, path = example("metrics", monkeypatch), tmp_path / "new" / "run.jsonl"
    file = metrics.MetricsFile(path, earlier=[{"step": 1, "loss": 2.5}])
    file.record(step=2, loss=1 / 3, seconds=math.pi)
    assert metrics.read_metrics(path) == file.entries
    assert metrics.read_metrics(path)[-1] == {"step": 2, "loss": 1 / 3, "seconds": math.pi}
    silent = metrics.MetricsFile(None)  # the ranks that do not write
    silent.record(step=1, loss=0.0)
    assert silent.entries == [{"step": 1, "loss": 0.0}]


# -- demo ------------------------------------------------------------------------------------------------------


def write_run(demo: ModuleType, name: str, losses: list[float], validation: float) -> Any:
    run = demo.Run(name, Path("unused.json"))
    entries = [{"step": i + 1, "loss": x, "seconds": 1.0} for i, x in enumerate(losses)]
    entries.append({"step": len(losses), "validation_loss": validation})
    run.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return run


@pytest.mark.parametrize(
    ("step", "factor", "agree"),
    [(3, 1 + 5e-5, True), (3, 1 + 2e-4, False), (10, 1 + 5e-4, True), (10, 1 + 2e-3, False), (7, math.nan, False)],
)
def test_demo_compares_losses(demo: ModuleType, step: int, factor: float, agree: bool) -> None:
    losses = [5.0 - 0.1 * i for i in range(20)]
    other = [loss * (factor if i == step - 1 else 1) for i, loss in enumerate(losses)]
    stock = write_run(demo, "stock", losses, validation=3.0)
    assert demo.compare_losses(stock, write_run(demo, "sliced", other, validation=3.0)) is agree
    assert not demo.compare_losses(stock, write_run(demo, "sliced", losses, validation=3.01))
    assert not demo.compare_losses(stock, write_run(demo, "sliced", losses[:-1], validation=3.0)), "steps are missing"


def test_demo_measures_whole_sequences_by_its_config(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.config import TeraPipeConfig

    Path("configs").symlink_to(ROOT / "configs")
    config = TeraPipeConfig.from_deepspeed(json.loads(demo.unsliced_config().read_text()))
    assert (config.enabled, config.schedule, config.slices) == (True, "1f1b", 1)
    sliced = TeraPipeConfig.from_deepspeed(json.loads(Path("configs/demo_sliced.json").read_text()))
    assert sliced.slices == demo.SLICES
    assert Path(sliced.trace_dir) == demo.OUT / "sliced"  # main() looks for the timelines there


# -- scripts ---------------------------------------------------------------------------------------------------


def test_every_model_option_is_a_field_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.models.gpt import GPTConfig, gpt_layers

    train_gpt = example("train_gpt", monkeypatch)
    given = {
        "num_layers": 3, "hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "ffn_size": 100,
        "positions": "learned", "dropout": 0.1, "attention_dropout": 0.2,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--deepspeed_config=x", "--tied-embedding", "--seed=7", *options])
    seen: dict[str, Any] = {}
    monkeypatch.setattr(train_gpt, "PipelineModule", lambda **kwargs: seen.update(kwargs))
    train_gpt.build_model(train_gpt.parse_arguments(), num_stages=2)
    sizes = {"vocab_size": 256, "max_sequence_length": 1024, "tied_embedding": True}
    expected = GPTConfig.from_name("tiny", **sizes, seed=7, **given)
    assert [str(spec) for spec in seen["layers"]] == [str(spec) for spec in gpt_layers(expected)]
    assert seen["num_stages"] == 2


@pytest.mark.parametrize(("options", "message"), [
    ("--eval-batches=0", "--steps and --eval-batches are 1 or more"),
    ("--validation-fraction=1.5", "--validation-fraction is a share between 0 and 1"),
    ("--data={} --sequence-length=100", "10 bytes of text are too few for sequences of 100"),
    ("--data={}/nothing", "does not exist: give files, or directories of them"),
])  # fmt: skip
def test_a_run_ends_before_its_first_step_rather_than_at_an_evaluation(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_gpt = example("train_gpt", monkeypatch)
    (tmp_path / "text").write_text("0123456789" * 20)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--deepspeed_config=x", *options.format(tmp_path).split()])
    with pytest.raises(SystemExit):
        train_gpt.load_text(train_gpt.parse_arguments())
    assert message in capsys.readouterr().err


def test_a_grid_with_sequence_ranks_is_there_before_tied_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_gpt, calls, config = example("train_gpt", monkeypatch), [], tmp_path / "ds.json"
    owners = {
        train_gpt: "prepare_rank load_text", train_gpt.terapipe_ds: "register",
        train_gpt.deepspeed: "init_distributed", train_gpt.deepspeed.comm: "get_rank get_world_size",
    }  # fmt: skip
    for owner, name in ((owner, name) for owner, names in owners.items() for name in names.split()):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: calls.append(name) or 4)
    monkeypatch.setattr(train_gpt, "PipelineModule", lambda topology, **_: sys.exit(f"{topology.get_dim('sequence')}"))
    config.write_text("{}")
    words = ["train_gpt.py", f"--deepspeed_config={config}", "--tied-embedding", "--sequence-parallel=2"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main()
    assert calls[-1] == "register"  # without it DeepSpeed's constructor waits for ever for the groups of tied layers
    monkeypatch.setattr(train_gpt, "planned_topology", lambda config: object())
    with pytest.raises(SystemExit):
        train_gpt.main()
    assert "leave --pipeline-stages and --sequence-parallel out" in capsys.readouterr().err


def test_commands_of_examples_name_models_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name for path in EXAMPLES.glob("*.py") for name in re.findall(r"--model ([a-z0-9.-]+)", path.read_text())}
    assert len([size_of(name) for name in named]) > 0


@pytest.mark.parametrize("launcher", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])  # DeepSpeed's, torchrun
def test_cpu_ranks_get_cores_of_their_own(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = example("ranks", monkeypatch)
    pinned: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 8}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(list(cores)), raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv(launcher, "2")
    for rank, threads in ((0, 1), (1, 1), (1, 2), (0, 3)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks._pin_to_cores(threads)
    assert pinned == [[2], [3], [5, 7]]  # six cores are not there


@pytest.mark.parametrize(("name", "needs"), [
    ("train_gpt", "torch"), ("same_as_whole", "torch"), ("finetune_hf", "transformers"),
    ("pretrain_hf", "transformers"), ("pretrain_gpt_megatron", "megatron.core"),
])  # fmt: skip
def test_each_rank_takes_its_own_device_under_every_launcher(
    name: str, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun gives LOCAL_RANK alone, no option; a rank without a device of its own would begin on the first one."""
    pytest.importorskip(needs)
    script, device = example(name, monkeypatch), Mock(**{"device_name.return_value": "cuda"})
    monkeypatch.setattr(sys.modules["ranks"], "get_accelerator", lambda: device)
    monkeypatch.setattr(script.deepspeed, "init_distributed", lambda: sys.exit("a device is chosen"))
    monkeypatch.setattr(sys, "argv", [name, "--deepspeed_config", str(ROOT / "configs/stock.json")])
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit, match="a device is chosen"):
        script.main()
    device.set_device.assert_called_once_with(3)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    with patch.dict(os.environ, OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2"):
        with pytest.raises(SystemExit, match="a device is chosen"):
            script.main()
        assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_SIZE"]) == ("1", "2")
    device.set_device.assert_called_with(1)
    monkeypatch.setattr(sys.modules["ranks"], "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert f"no launcher started this process: deepspeed --num_gpus 2 {name}" in capsys.readouterr().err


def test_the_quickstart_names_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    script = example("quickstart", monkeypatch)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="deepspeed --num_gpus 2 examples/quickstart.py"):
        script.main()


# -- another layout --------------------------------------------------------------------------------------------


def test_a_job_that_goes_on_elsewhere_has_a_config_that_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It trains on in fp32 whatever the device is made for, and no key contradicts the new strategy."""
    script = example("resume_elsewhere", monkeypatch)
    section = {"enabled": True, "recompute": "full", "keep_attention": True, "slices": 4, "verify": "off"}
    config = {"zero_optimization": {"stage": 1}, "terapipe": section}
    saved = script.Saved("a", tmp_path, config, {"pipe": 4, "data": 1, "model": 1}, batch=8, tokens=64)
    options = ["--model", "tiny", "--device", "a100", "--devices", "2", "--stages", "2"]
    strategy = script.plan(saved, options, tmp_path)
    made = script.new_config(saved, strategy, tmp_path / "strategy.json", is_universal=True)
    assert TeraPipeConfig.from_deepspeed(made).planned == strategy and strategy.dtype == "float32"
    assert made["terapipe"].keys() == {"enabled", "verify", "strategy"}
    # DeepSpeed keeps the path of a configuration that it was given as one
    path = tmp_path / "ds.json"
    with pytest.raises(SystemExit):
        script.config_of(str(path))
    path.write_text(json.dumps(config))
    assert script.config_of(str(path)) == config


@pytest.mark.parametrize("entry", [{}, {"sequence_ranks": 2}])  # checkpoints of older versions lack it
def test_sequence_ranks_of_a_checkpoint_are_no_replicas(
    entry: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = example("resume_elsewhere", monkeypatch)
    config = {
        "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    degrees = {"pp_degree": 2, "tp_degree": 1}
    states = {"ds_config": config, "checkpoint_parallel_dimensions": degrees, "dp_world_size": 6}
    monkeypatch.setattr(script, "choose_checkpoint", lambda *_: Mock(tag="a", read_as="a", note=None))
    monkeypatch.setattr(script.Manifest, "read", lambda _: Mock(training=entry))
    monkeypatch.setattr(script, "read_states", lambda _: states)
    saved = script.Saved.last(tmp_path)
    assert saved.grid == {"pipe": 2, "data": 3, "model": 1, "sequence": 2} and saved.batch == 6
