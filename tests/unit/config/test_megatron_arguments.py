"""Megatron-LM's arguments as a DeepSpeed JSON: DeepSpeed and the section accept it, and it trains alike."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from terapipe_ds.cli import main
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.megatron_arguments import IN_JSON, LOST, SCHEDULER, WITH_SCRIPT, convert, translation

USUAL = "--micro-batch-size 2 --global-batch-size 8 --lr 3e-4 --train-iters 40"


def test_a_usual_command_line() -> None:
    text = f"{USUAL} --num-layers 24 --swiglu --bf16 --use-distributed-optimizer --adam-beta2 0.95"
    text += " --overlap-grad-reduce"
    result = convert(text.replace(" --bf16", " \\\n  --bf16"))
    found = result.ds_config
    assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"]) == (2, 8)
    assert found["optimizer"]["type"] == "AdamW" and found["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert found["bf16"] == {"enabled": True} and found["zero_optimization"] == {"stage": 1}
    assert found["gradient_clipping"] == 1.0  # Megatron-LM's default, which DeepSpeed does not have
    assert result.kept == ["--train-iters 40", "--num-layers 24", "--swiglu"]
    assert list(result.lost) == ["--overlap-grad-reduce", "--weight-decay"]
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}  # as Megatron-LM sets it with --bf16
    assert convert(f"{USUAL} --bf16").ds_config["zero_optimization"] == {"stage": 1}  # else DeepSpeed refuses them
    narrow = convert(f"{text} --grad-reduce-in-bf16 --weight-decay 0 --sgd-momentum 0.9")
    assert narrow.ds_config["data_types"] == {"grad_accum_dtype": "bf16"} and "--weight-decay" not in narrow.lost
    assert narrow.ds_config["optimizer"]["params"].keys() == {"lr", "weight_decay", "betas", "eps"}
    assert TeraPipeConfig.from_deepspeed(found).enabled


def test_deepspeed_reads_every_key() -> None:
    """DeepSpeed's own config class takes the result, with each of the values where the argument says."""
    runtime = pytest.importorskip("deepspeed.runtime.config")
    text = f"{USUAL} --fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 4"
    found = convert(f"{text} --log-interval 7 --clip-grad 0.5").ds_config
    config = runtime.DeepSpeedConfig({**found, "train_batch_size": 2})
    scale = config.float16_config
    assert (scale.initial_scale_power, scale.min_loss_scale) == (16, 2)
    assert (scale.loss_scale_window, scale.hysteresis) == (500, 4)
    assert config.gradient_clipping == 0.5 and config.steps_per_print == 7


@pytest.mark.parametrize("text", [
    "--lr-decay-style cosine --min-lr 3e-5 --lr-warmup-iters 10", "--lr-decay-style cosine --lr-decay-iters 30",
    "--lr-warmup-fraction 0.25", "", "--lr-decay-style constant --lr-warmup-iters 8",
])  # fmt: skip
def test_the_learning_rate_is_that_of_megatron(text: str) -> None:
    """Each step's rate lies among the rates of Megatron's scheduler from two steps before to one step after.

    DeepSpeed's schedulers count from another step, the cosine has one step of warm-up at least, and the line two.
    """
    import torch

    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    words = dict(zip((both := f"--lr-decay-style linear {text}".split())[::2], both[1::2], strict=True))
    steps = int(words.get("--lr-decay-iters", 40))
    warmup = int(words.get("--lr-warmup-iters", 0)) or int(steps * float(words.get("--lr-warmup-fraction", 0)))
    least, style = float(words.get("--min-lr", 0)), words["--lr-decay-style"]
    groups = SimpleNamespace(param_groups=[])
    theirs = scheduler(groups, 0.0, 3e-4, least, warmup, steps, style, 0.0, 0.0, 1, "constant")
    made = convert(f"{USUAL} {text}").ds_config["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    ours = getattr(schedules, made["type"])(optimizer, **made["params"])
    for step in range(1, steps):
        ours.step()
        around = []
        for number in range(max(step - 2, 0), step + 2):
            theirs.num_steps = number
            around.append(theirs.get_lr({}))
        rate = optimizer.param_groups[0]["lr"]
        if warmup == 0 and style == "linear" and step < 3:
            continue
        assert min(around) - 1e-9 <= rate <= max(around) + 1e-9, (step, rate, around)


def test_what_is_given_decides_what_the_json_has() -> None:
    plain = convert("--lr 3e-4 --micro-batch-size 1 --lr-decay-style constant").ds_config
    assert plain["train_micro_batch_size_per_gpu"] == 1 and plain["terapipe"]["schedule"] == "auto"
    assert not plain.keys() & {"data_types", "zero_optimization", "scheduler"}
    warm = f"{USUAL} --lr-decay-style cosine --lr-warmup-iters 5"
    assert convert(f"{warm} --lr-warmup-samples 0 --moe-aux-loss-coeff 0") == convert(warm)
    parts = convert(f"{USUAL} --num-virtual-stages-per-pipeline-rank 2 --optimizer sgd").ds_config
    assert (parts["terapipe"]["schedule"], parts["terapipe"]["chunks_per_stage"]) == ("seq1f1b-interleaved", 2)
    assert parts["optimizer"] == {"type": "SGD", "params": {"lr": 3e-4, "weight_decay": 0.01, "momentum": 0.9}}


@pytest.mark.parametrize(("text", "problem"), [
    ("--lr '3e-4", "no closing quotation: give the arguments as the shell takes them"),
    ("pretrain_gpt.py --lr 3e-4", "'pretrain_gpt.py' belongs to no argument: begin with --NAME"),
    ("--lr 3e-4", "--lr-decay-style linear needs --lr-decay-iters or --train-iters"),
    ("--lr 3e-4 --train-iters 9 --min-lr 1e-5", "DeepSpeed's linear decay ends at 0; use cosine"),
    ("--train-iters 9", "--lr is missing"),
    (f"{USUAL} --train-samples 80", "--train-samples and --train-iters: give one of them"),
    (f"{USUAL} --rampup-batch-size 3 2 80", "--rampup-batch-size 3 2 80: give START INCREMENT SAMPLES"),
    (f"{USUAL} --rampup-batch-size 4 4", "--rampup-batch-size 4 4: give START INCREMENT SAMPLES"),
    (f"{USUAL} --lr-warmup-samples 80 --lr-warmup-fraction 0.1", "--lr-warmup-samples and --lr-warmup-fraction"),
    (f"{USUAL} --lr-warmup-iters 4 --lr-warmup-fraction 0.1", "--lr-warmup-iters and --lr-warmup-fraction: give one"),
    (f"{USUAL} --lr-warmup-iters 40", "a warm-up of 40 steps: give at least 0, and fewer than the 40 of the decay"),
    (f"{USUAL} --lr-decay-style cosine --min-lr 0.1", "--min-lr 0.1 and --lr 0.0003: give 0 or more"),
    (f"{USUAL} --bf16 False", "--bf16 False: give a value"),
    (f"{USUAL} --use-distributed-optimizer=false", "--use-distributed-optimizer false: give a value"),
    (f"{USUAL} --tensorboard-dir logs/`date`", "logs/`date`: give the value that the shell puts there"),
    (f"{USUAL} --zero-stage 2", "zero_optimization.stage = 2 cannot be combined with terapipe.enabled"),
])  # fmt: skip
def test_one_problem(text: str, problem: str) -> None:
    with pytest.raises(TeraPipeConfigError, match=re.escape(problem)):
        convert(text)


def test_a_comment_ends_with_its_line() -> None:
    """As in the shell, a # within a word or in quotes begins none."""
    text = "--save /runs/run#3 \\\n# --bf16 \\\n--tensorboard-dir 'a #b'  # --fp16 \\\n--clip-grad 0.5"
    result = convert(f"{USUAL} {text}")
    assert "--save /runs/run#3" in result.kept and result.ds_config["gradient_clipping"] == 0.5
    assert result.ds_config["tensorboard"]["output_path"] == "a #b"
    assert not {"bf16", "fp16"} & result.ds_config.keys()


def test_all_problems_at_once() -> None:
    with pytest.raises(TeraPipeConfigError) as raised:
        convert(
            "--num-layer 4 --nonsense --lr x $MORE --lr-decay-style WSD --fp16 --bf16 --initial-loss-scale inf "
            "--clip-grad nan --micro-batch-size 0 --context-parallel-size 8 --expert-model-parallel-size 4"
        )
    for value in ("--initial-loss-scale inf", "--clip-grad nan", "--micro-batch-size 0"):
        assert f"{value}: give a value" in str(raised.value)
    for part in (
        "--bf16 and --fp16: give one", "--num-layer: leave it out", "did you mean --num-layers?", "--nonsense",
        "--lr x",
        "WSD: DeepSpeed has", "$MORE: give", "--context-parallel-size 8: give 1",
        "--expert-model-parallel-size 4: give 1",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_arguments_of_megatron_lms_own_examples_have_a_place() -> None:
    """Take what examples/mixtral and examples/llama of Megatron-LM give beside the usual ones."""
    text = (
        "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-token-dispatcher-type allgather "
        "--mock-data --no-masked-softmax-fusion --no-position-embedding --no-load-optim --no-load-rng "
        "--apply-layernorm-1p --decoupled-lr 5e-4 --calculate-per-token-loss --manual-gc --fp8-amax-history-len 1024 "
        "--tiktoken-pattern v2 --distributed-timeout-minutes 60 --log-throughput --context-parallel-size 1"
    )
    result = convert(f"{USUAL} {text}")
    assert "--moe-router-load-balancing-type none" in result.kept and "--mock-data" in result.kept
    assert result.ds_config["terapipe"]["loss_reduction"] == "mean_of_step"
    assert result.ds_config["terapipe"]["schedule"] == "auto"


def test_counts_of_samples_become_steps() -> None:
    """Take the counts of examples/llama of Megatron-LM: its scheduler counts samples, DeepSpeed's counts steps."""
    shape = "--global-batch-size 8 --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5"
    samples = convert(f"{shape} --train-samples 320 --lr-decay-samples 240 --lr-warmup-samples 80")
    steps = convert(f"{shape} --train-iters 40 --lr-decay-iters 30 --lr-warmup-iters 10")
    assert samples.ds_config == steps.ds_config and samples.kept == steps.kept == ["--train-iters 40"]
    for wrong in ("--train-samples 320", "--global-batch-size 8 --train-samples x"):
        with pytest.raises(TeraPipeConfigError, match="no number of samples, or --global-batch-size is"):
            convert(f"--lr 3e-4 {wrong}")


@pytest.mark.parametrize(("start", "increase", "samples", "batch"), [(2, 2, 60, 8), (1, 3, 50, 10), (8, 1, 20, 8)])
def test_a_growing_batch_is_megatron_cores(start: int, increase: int, samples: int, batch: int) -> None:
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    text = f"--global-batch-size {batch} --lr 1 --rampup-batch-size {start} {increase} {samples}"
    result = convert(f"{text} --train-samples 200 --lr-decay-style constant")
    size = re.search(r"set_train_batch_size\((.*)\), with seen", result.lost["--rampup-batch-size"])
    assert size is not None
    if batch > start:  # megatron-core divides by 0 otherwise
        sizes = calculator.RampupBatchsizeNumMicroBatchesCalculator(batch, 1, 1, False, 0, start, increase, samples)
    seen = steps = 0
    while seen + batch <= 200:  # a last step of fewer sequences does not count
        expected = batch
        if batch > start:
            sizes.update(seen, consistency_check=False)
            expected = sizes.get_current_global_batch_size()
        assert eval(size[1], {"min": min, "seen": seen}) == expected
        seen, steps = seen + expected, steps + 1
    assert result.kept == [f"--train-iters {steps}"]


def test_an_argument_has_one_place() -> None:
    names = [*IN_JSON, *SCHEDULER, *WITH_SCRIPT, *LOST]
    assert len(names) == len(set(names))
    rows = [f"| `{name}` | {translation(name)} |" for name in (*IN_JSON, *SCHEDULER, *LOST)]
    table = "\n".join(["| argument of Megatron-LM | in this package |", "|---|---|", *rows])
    assert table in (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    assert main(["convert", "--megatron-args", f"{USUAL} --rampup-batch-size 2 2 8", "--out", str(path)]) == 0
    assert json.loads(path.read_text()) == convert(USUAL).ds_config
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--rampup-batch-size: before each step call engine.set_train_batch_size(min(8, 2 + 2 *" in captured.err
    assert main(["convert", "--megatron-args", "--nonsense 1"]) == 2
    capsys.readouterr()
    assert main(["convert", "--megatron-args", "--bf16"]) == 2  # one word, which argparse takes for an option
    assert "--lr is missing" in capsys.readouterr().err
