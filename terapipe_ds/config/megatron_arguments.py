"""Translate Megatron-LM's arguments (megatron/training/arguments.py) into a DeepSpeed JSON with a `terapipe` section.

An argument becomes a key of the JSON or a part of the JSON's `scheduler`, stays with the training script, or has no
counterpart, with the reason.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from terapipe_ds.config.section import TeraPipeConfig
from terapipe_ds.config.values import TeraPipeConfigError
from terapipe_ds.messages import nearest


def _finite(text: str) -> float:
    """Return a number that JSON can hold; raise ValueError for another one."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(f"{text} is below 1")
    return number


def _switch(value: Any) -> Callable[[str], Any]:
    """Return the reading of an argument without a value: its presence means `value`."""

    def read(text: str) -> Any:
        if text:
            raise ValueError(f"{text} follows a switch")
        return value

    return read


IN_JSON: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--micro-batch-size": ("train_micro_batch_size_per_gpu", _count),
    "--global-batch-size": ("train_batch_size", _count),
    "--optimizer": ("optimizer.type", {"adam": "AdamW", "sgd": "SGD"}.__getitem__),
    "--lr": ("optimizer.params.lr", _finite),
    "--weight-decay": ("optimizer.params.weight_decay", _finite),
    "--adam-beta1": ("optimizer.params.betas.0", _finite),
    "--adam-beta2": ("optimizer.params.betas.1", _finite),
    "--adam-eps": ("optimizer.params.eps", _finite),
    "--sgd-momentum": ("optimizer.params.momentum", _finite),
    "--clip-grad": ("gradient_clipping", _finite),
    "--bf16": ("bf16.enabled", _switch(True)),
    "--fp16": ("fp16.enabled", _switch(True)),
    "--loss-scale": ("fp16.loss_scale", _finite),
    "--initial-loss-scale": ("fp16.initial_scale_power", lambda text: max(int(_finite(text)), 1).bit_length() - 1),
    "--min-loss-scale": ("fp16.min_loss_scale", _finite),
    "--loss-scale-window": ("fp16.loss_scale_window", _count),
    "--hysteresis": ("fp16.hysteresis", _count),
    "--accumulate-allreduce-grads-in-fp32": ("data_types.grad_accum_dtype", _switch("fp32")),
    "--grad-reduce-in-bf16": ("data_types.grad_accum_dtype", _switch("bf16")),
    "--use-distributed-optimizer": ("zero_optimization.stage", _switch(1)),
    "--zero-stage": ("zero_optimization.stage", int),
    "--num-virtual-stages-per-pipeline-rank": ("terapipe.chunks_per_stage", _count),
    "--calculate-per-token-loss": ("terapipe.loss_reduction", _switch("mean_of_step")),
    "--log-interval": ("steps_per_print", _count),
    "--tensorboard-dir": ("tensorboard.output_path", str),
    "--wandb-project": ("wandb.project", str),
}
"""Key of the JSON, with dots between its levels, and the reading of the value."""
SCHEDULER = ("--lr-decay-style", "--lr-decay-iters", "--lr-warmup-iters", "--lr-warmup-fraction", "--min-lr",
             "--lr-decay-samples", "--lr-warmup-samples")  # fmt: skip
"""Together they are the JSON's `scheduler`; --train-iters stands in for --lr-decay-iters, as in Megatron-LM."""
IN_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")
"""They count samples in place of steps, which the JSON and the script have."""
_NAMES_WITH_SCRIPT = """
num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels seq-length
max-position-embeddings position-embedding-type use-rotary-position-embeddings rotary-base rotary-percent normalization
norm-epsilon swiglu disable-bias-linear qk-layernorm init-method-std untie-embeddings-and-output-weights vocab-size
make-vocab-size-divisible-by hidden-dropout attention-dropout transformer-impl use-cpu-initialization
tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel recompute-granularity recompute-method
recompute-num-layers recompute-modules num-experts moe-router-topk moe-ffn-hidden-size seed train-iters eval-interval
eval-iters save save-interval load finetune data-path data-cache-path split reset-position-ids reset-attention-mask
eod-mask-loss num-workers tokenizer-type tokenizer-model vocab-file merge-file mock-data tiktoken-pattern
no-mmap-bin-files no-create-attention-mask-in-dataloader no-load-optim no-load-rng exit-duration-in-mins manual-gc
empty-unused-memory-level log-throughput profile profile-step-start profile-step-end wandb-exp-name
no-position-embedding use-rope-scaling apply-layernorm-1p attention-softmax-in-fp32 no-masked-softmax-fusion
no-rope-fusion cross-entropy-loss-fusion moe-router-load-balancing-type moe-router-score-function moe-router-dtype
moe-token-dispatcher-type moe-token-drop-policy moe-grouped-gemm moe-permute-fusion moe-layer-freq
moe-shared-expert-intermediate-size multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim
v-head-dim
"""
WITH_SCRIPT = tuple(f"--{name}" for name in _NAMES_WITH_SCRIPT.split())
"""The script gives them to `TransformerConfig`, `MegatronGPT`, or its own data and loop, under the same names."""
LOST = {
    "--context-parallel-size": "give 1: slices divide long sequences, and these layers take no sequence ranks",
    "--expert-model-parallel-size": "give 1: each tensor-parallel rank holds all experts",
    "--num-layers-per-virtual-pipeline-stage": "set terapipe.chunks_per_stage: the parts that a stage holds",
    "--pipeline-model-parallel-layout": "set terapipe.partition: the first layer of each part, and the end",
    "--decoder-first-pipeline-num-layers": "set terapipe.partition",
    "--decoder-last-pipeline-num-layers": "set terapipe.partition",
    "--rampup-batch-size": "call engine.set_train_batch_size before each step; `terapipe convert` prints the call",
    "--overlap-grad-reduce": "DeepSpeed reduces once per step, after the last backward",
    "--overlap-param-gather": "DeepSpeed gathers once per step",
    "--overlap-p2p-communication": "messages between stages always overlap with computation",
    "--no-overlap-p2p-communication": "messages between stages always overlap with computation",
    "--use-flash-attn": "a measurement at first use chooses the kernel of attention, and the log names it",
    "--attention-backend": "a measurement at first use chooses the kernel of attention, and the log names it",
    "--gradient-accumulation-fusion": "the engine adds weight gradients to the optimizer's sums itself",
    "--no-gradient-accumulation-fusion": "the engine adds weight gradients to the optimizer's sums itself",
    "--use-mcore-models": "always so",
    "--use-torch-fsdp2": "use ZeRO-1: pipeline stages and FSDP do not go together here",
    "--recompute-activations": "give --recompute-granularity selective",
    "--tp-comm-overlap": "not available in slices: docs/megatron.md",
    "--moe-aux-loss-coeff": "give 0: not available in slices, docs/megatron.md",
    "--moe-z-loss-coeff": "give 0: not available in slices, docs/megatron.md",
    "--moe-expert-capacity-factor": "not available in slices: docs/megatron.md",
    "--fp8-format": "set fp8 and fp8_recipe (mxfp8 or blockwise) of TransformerConfig: docs/megatron.md",
    "--fp8-amax-history-len": "these layers have no delayed scaling: see --fp8-format",
    "--fp8-amax-compute-algo": "these layers have no delayed scaling: see --fp8-format",
    "--fp8-param-gather": "weights stay in bf16, and each forward converts them: docs/megatron.md",
    "--decoupled-lr": "give embedding and output matrix to initialize as a group of parameters with a rate of its own",
    "--decoupled-min-lr": "give embedding and output matrix to initialize as a group of parameters of its own",
    "--distributed-timeout-minutes": "give timeout to deepspeed.init_distributed",
    "--use-checkpoint-args": "give the arguments of the model",
    "--ckpt-format": "checkpoints are DeepSpeed's: docs/checkpoints.md",
    "--distributed-backend": "DeepSpeed's accelerator decides",
    "--train-samples": "give --train-iters, which `terapipe convert` counts",
    "--no-pipeline-parallel": "leave it out: layers run under DeepSpeed's pipeline engine, on one stage or several",
    "--deepspeed-activation-checkpointing": "set terapipe.recompute",
    "--ds-sequence-parallel-size": "give 1: these layers take no sequence ranks, and slices divide long sequences",
}
"""Nothing in the JSON or the script corresponds to them; the text says what to do, or what happens anyway."""
KNOWN = (*IN_JSON, *SCHEDULER, *WITH_SCRIPT, *LOST)
_USUAL = {"give 0": ("0", "0.0"), "give 1": ("1",)}
"""Values that lose nothing, by how the text begins. Others than 1 are errors: a job would run without such ranks."""
DEFAULTS = {"--optimizer": "adam", "--weight-decay": "0.01", "--adam-beta1": "0.9", "--adam-beta2": "0.999",
            "--adam-eps": "1e-8", "--clip-grad": "1.0", "--lr-decay-style": "linear", "--min-lr": "0"}  # fmt: skip
"""Megatron-LM's values of arguments that change the training where DeepSpeed's own defaults differ."""


@dataclass
class Conversion:
    """Hold the JSON and what became of the arguments that it does not have."""

    ds_config: dict[str, Any]
    kept: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)


def convert(text: str) -> Conversion:
    """Return the DeepSpeed JSON of a Megatron-LM command line, or raise TeraPipeConfigError with all its mistakes."""
    given, problems = _read(text)
    ramp, wrong = _read_ramp(given)
    problems += [*wrong, *_count_steps(given, ramp)]
    values = DEFAULTS | given
    # of adam and sgd, only the chosen one has its values in the JSON
    if values["--optimizer"] == "sgd":
        values.setdefault("--sgd-momentum", "0.9")
    other = "--adam-" if values["--optimizer"] == "sgd" else "--sgd-"
    values = {name: value for name, value in values.items() if not name.startswith(other)}
    if "--bf16" in values and "--grad-reduce-in-bf16" not in values:
        values["--accumulate-allreduce-grads-in-fp32"] = ""  # as Megatron-LM; DeepSpeed's ZeRO sums in bf16
    # each argument to its place
    result = Conversion({}, [f"{name} {value}".rstrip() for name, value in values.items() if name in WITH_SCRIPT])
    lost = {n: LOST[n] for n in values if n in LOST and values[n] not in _USUAL.get(LOST[n][:6], ())}
    needed = [name for name, text in lost.items() if text.startswith("give 1")]
    problems += [f"{name} {values[name]}: {lost.pop(name)}" for name in needed]
    result.lost |= lost | ({"--rampup-batch-size": ramp.call} if ramp else {})
    if values["--weight-decay"] not in ("0", "0.0"):
        result.lost["--weight-decay"] = (
            "DeepSpeed applies it to biases and norms too; to spare them as Megatron-LM does, give their parameters to "
            "initialize as a group with weight_decay 0"
        )
    unknown = [name for name in values if name not in KNOWN]
    advice = "leave it out here if your script reads it"
    problems += [f"unknown argument {name}: {advice}{nearest(name, KNOWN)}" for name in unknown]
    for name in [name for name in IN_JSON if name in values]:
        key, read = IN_JSON[name]
        *above, last = key.split(".")
        place = functools.reduce(lambda within, level: within.setdefault(level, {}), above, result.ds_config)
        try:
            place[last] = read(values[name])
        except (ValueError, KeyError):
            problems.append(f"{name} {values[name]}: give a value that Megatron-LM takes")
    problems += _add_scheduler(result.ds_config, values)
    problems += ["--bf16 and --fp16: give one of them"] if {"--bf16", "--fp16"} <= values.keys() else []
    if problems:
        raise TeraPipeConfigError("; ".join(problems))
    params = result.ds_config["optimizer"]["params"]
    params |= {"betas": [*params["betas"].values()]} if "betas" in params else {}
    if "--accumulate-allreduce-grads-in-fp32" in values and {"--bf16", "--fp16"} & values.keys():
        zero = result.ds_config.setdefault("zero_optimization", {})
        zero["stage"] = zero.get("stage") or 1  # DeepSpeed has these sums under ZeRO alone
    # DeepSpeed's monitors have a switch each; several parts on a stage need a schedule that has them
    for section in result.ds_config.keys() & {"tensorboard", "wandb"}:
        result.ds_config[section]["enabled"] = True
    section = result.ds_config.pop("terapipe", {})
    schedule = "seq1f1b-interleaved" if "chunks_per_stage" in section else "auto"
    result.ds_config["terapipe"] = {"enabled": True, "schedule": schedule, **section, "slices": "auto"}
    TeraPipeConfig.from_deepspeed(result.ds_config)  # refuses what the engine would
    return result


def translation(name: str) -> str:
    """Return what becomes of one argument, for messages and the table of the documentation."""
    if name in IN_JSON:
        return f"set {IN_JSON[name][0].removesuffix('.0').removesuffix('.1')} in the DeepSpeed JSON"
    if name in SCHEDULER:
        return "set scheduler in the DeepSpeed JSON"
    if name in WITH_SCRIPT:
        return "this script does not read it"
    return LOST.get(name, f"unknown{nearest(name, KNOWN)}")


def _read(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the value of each argument, "" for a switch, and the words that belong to none."""
    values: dict[str, str] = {}
    problems: list[str] = []
    name = ""
    text = re.sub(r"(?<=\S)#", "\0", text.replace("\\\n", "\n"))  # shlex takes it for a comment within a word too
    try:
        words = [word.replace("\0", "#") for word in shlex.split(text, comments=True)]
    except ValueError as error:
        problem = f"{str(error).lower()}: give the arguments as the shell takes them, with all marks closed"
        raise TeraPipeConfigError(problem) from error
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = value
        elif not name:
            problems.append(f"{word!r} belongs to no argument: begin with --NAME")
        else:
            values[name] = f"{values[name]} {word}".strip()
        if "$" in word or "`" in word:
            problems.append(f"{word}: give the value that the shell puts there")
    return values, problems


class _Ramp(NamedTuple):
    """Hold --rampup-batch-size: sequences of the first step, of one increase, and until the last increase.

    Source: `RampupBatchsizeNumMicroBatchesCalculator` of megatron/core/num_microbatches_calculator.py.
    """

    start: int
    increase: int
    samples: int
    batch: int  # of all later steps

    @property
    def _increases(self) -> int:
        return (self.batch - self.start) // self.increase

    @property
    def call(self) -> str:
        """Return the call that a script makes before each step."""
        size = f"min({self.batch}, {self.start} + {self.increase} * (seen * {self._increases} // {self.samples}))"
        return (
            f"before each step call engine.set_train_batch_size({size}), with seen = the sequences of all steps so "
            f"far; the learning rate follows steps, where Megatron-LM's follows samples"
        )

    def steps(self, samples: int) -> int:
        """Return the number of steps for a number of samples."""
        seen = steps = 0
        while seen < min(samples, self.samples + 1):
            seen += min(self.batch, self.start + self.increase * (seen * self._increases // self.samples))
            steps += 1
        return steps + max(samples - seen, 0) // self.batch


def _read_ramp(values: Mapping[str, str]) -> tuple[_Ramp | None, list[str]]:
    """Return the growth of the batch, if any, and problems."""
    if (text := values.get("--rampup-batch-size")) is None:
        return None, []
    try:
        start, increase, samples, batch = map(_count, [*text.split(), values.get("--global-batch-size", "")])
        if batch < start or (batch - start) % increase:
            raise ValueError
    except ValueError:
        shape = "give START INCREMENT SAMPLES, with --global-batch-size = START + a multiple of INCREMENT"
        return None, [f"--rampup-batch-size {text}: {shape}"]
    return _Ramp(start, increase, samples, batch), []


def _count_steps(values: dict[str, str], ramp: _Ramp | None) -> list[str]:
    """Add the arguments in steps to those in samples, and return problems."""
    batch, problems = values.get("--global-batch-size", "missing"), []
    for name in [name for name in IN_SAMPLES if name in values]:
        steps, fraction = (name.replace("samples", unit) for unit in ("iters", "fraction"))
        try:
            if int(values[name]) == 0:  # Megatron-LM's default
                continue
            if given := {steps, fraction} & values.keys():
                problems.append(f"{name} and {min(given)}: give one of them")
            samples, size = int(values[name]), _count(batch)
            values[steps] = str(ramp.steps(samples) if ramp else samples // size)
        except ValueError:
            problems.append(f"{name} {values[name]}: no number of samples, or --global-batch-size is {batch}")
    return problems


def _add_scheduler(document: dict[str, Any], values: Mapping[str, str]) -> list[str]:
    """Add DeepSpeed's scheduler for Megatron-LM's decay and warm-up, and return problems."""
    style, total = values["--lr-decay-style"], values.get("--lr-decay-iters") or values.get("--train-iters", "")
    if style not in ("constant", "linear", "cosine"):
        return [f"--lr-decay-style {style}: DeepSpeed has constant, linear and cosine"]
    try:
        steps = _count(total) if total else 0
        iters, fraction = int(values.get("--lr-warmup-iters", "0")), _finite(values.get("--lr-warmup-fraction", "0"))
        warmup = iters or int(steps * fraction)
        rate, least = _finite(values["--lr"]), _finite(values["--min-lr"])
    except KeyError:
        return ["--lr is missing: give the learning rate"]
    except ValueError as error:
        return [f"the learning rate's schedule: {error}"]
    wrong = {  # Megatron-LM refuses the first three as well
        "--lr-warmup-iters and --lr-warmup-fraction: give one of them": iters and fraction,
        f"a warm-up of {warmup} steps: give at least 0, and fewer than the {steps} of the decay": warmup < 0
        or 0 < steps <= warmup,
        f"--min-lr {least:g} and --lr {rate:g}: give 0 or more, and the larger one as --lr": not 0 <= least <= rate,
        f"--lr-decay-style {style} needs --lr-decay-iters or --train-iters: give one": style != "constant"
        and not steps,
        "--min-lr with --lr-decay-style linear: DeepSpeed's linear decay ends at 0; use cosine": style == "linear"
        and least,
    }
    if any(wrong.values()) or (style == "constant" and not warmup):
        return [problem for problem, is_there in wrong.items() if is_there]
    # DeepSpeed refuses 0 steps of warm-up: its linear decay has two at least, and joins Megatron-LM's line after them;
    # the one step of its cosine has the whole rate
    begin = {"warmup_num_steps": max(warmup, 1), "warmup_type": "linear"}
    top = rate if warmup else rate * max(steps - 2, 1) / steps
    to_rate = {"warmup_min_lr": 0.0, "warmup_max_lr": top, **begin}
    to_ratio = {"warmup_min_ratio": float(not warmup), "cos_min_ratio": least / rate if rate else 0.0, **begin}
    document["scheduler"] = {
        "constant": {"type": "WarmupLR", "params": to_rate},
        "linear": {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **to_rate}},
        "cosine": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, **to_ratio}},
    }[style]
    return []
