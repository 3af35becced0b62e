"""``terapipe bench``: what token slices give against stock schedules, on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import CommandError, check_output, read_json
from terapipe_ds.messages import show_value
from terapipe_ds.schedule import SCHEDULE_NAMES

if TYPE_CHECKING:
    from terapipe_ds.bench.cases import Job

HELP = "train side by side: DeepSpeed's stock engine, token slices, torch's pipelines"
DESCRIPTION = (
    "Train the same model on the same data from the same weights with DeepSpeed's own engines, token slices and "
    "torch.distributed.pipelining: in one run, in turns, one process per stage, each pinned to its core. Ends with a "
    "table of step times, their bounds and predictions, bubbles, peaks of memory and losses, which must agree."
)
EXAMPLES = """\
  terapipe bench                                              two stages on two cores, at most 12 minutes
  terapipe bench --json bench.json --html bench.html          with all figures, and a report for a browser
  terapipe bench cpu-2stage --full --accumulation 8           every system, eight micro-batches
  terapipe bench --accumulation 1 --slices 4,8,16,plan        step time against slices
  terapipe bench --accumulation 1 --slices plan,plan:4,plan:8 the planner's best, and of at most 4 and 8 slices
  terapipe bench --schedules seq1f1b --slices 344,304,272,256,240,224,208,200    (lengths in tokens)
  terapipe bench cpu-8stage --pairs 1                         with fewer cores than stages, times are replayed
  terapipe bench --check-replay --accumulation 1              replayed against measured, within 5%
  terapipe bench --config ds.json --model mini --stages 2     a config and a model of your own
  terapipe bench --from bench.json --html bench.html          the report of a result that was kept

Schedules of each system:
  deepspeed: 1f1b, dualpipev
  torch: gpipe, 1f1b, interleaved1f1b, zbv
""" + textwrap.fill(
    f"terapipe: {', '.join(name for name in SCHEDULE_NAMES if name != 'dapple')}",
    118,
    initial_indent="  ",
    subsequent_indent="    ",
)

PRESETS = ("cpu-2stage", "cpu-8stage", "gpu-attention", "gpu-layer")
REPLAY_TOLERANCE = 0.05
_GRANULARITY = 64


_NOT_ON_GPU = (
    "systems", "schedules", "slices", "accumulation", "pairs", "config", "model", "check_replay", "share_device",
)  # fmt: skip
_ABSOLUTE = re.compile(r"(?:^|(?<==))/.*", re.DOTALL)
"""A word that is an absolute path, or the one of --option=/path."""
_SIZES = ("stages", "micro_batch", "sequence_length", "hidden", "layers", "heads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. None stands for what the preset says."""
    parser.add_argument("preset", nargs="?", default="cpu-2stage", metavar="PRESET", help=f"{', '.join(PRESETS)}")
    parser.add_argument("--full", action="store_true", help="every system that can run, and more accumulations")
    narrow = parser.add_argument_group("what runs")
    narrow.add_argument("--systems", type=_names, metavar="NAME[,...]", help="deepspeed, terapipe, torch")
    narrow.add_argument("--schedules", type=_names, metavar="NAME[,...]", help="of any system; see below")
    narrow.add_argument(
        "--slices",
        type=_names,
        metavar="N[,...]",
        help="numbers of equal slices, 'plan' for the planner's, 'plan:N' for its best of at most N; or, where the "
        "numbers sum to the sequence length, one plan in tokens",
    )
    narrow.add_argument("--accumulation", type=_numbers, metavar="M[,...]", help="micro-batches per step")
    narrow.add_argument("--pairs", "--steps", type=int, metavar="N", help="timed turns (cpu-2stage: 5)")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--config", metavar="DS.json", help="a DeepSpeed config in the place of the usual one")
    sizes.add_argument("--model", metavar="NAME_OR_JSON", help="as `terapipe profile` takes it")
    for name in _SIZES:
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="in the place of the preset's")
    sizes.add_argument(
        "--granularity",
        type=int,
        default=_GRANULARITY,
        metavar="N",
        help="plans cut at multiples (default: %(default)s)",
    )
    sizes.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="default: %(default)s. cuda trains in bf16, unless --config says otherwise: fused attention takes no fp32",
    )
    sizes.add_argument(
        "--share-device",
        action="store_true",
        help="with --device cuda: all stages on the first device, over gloo and by way of the host. It shows that the "
        "pipeline runs where there is one device; its times are not those of stages with a device each",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write machine and all figures here")
    output.add_argument("--html", metavar="FILE", help="write a report for a browser, in one file")
    output.add_argument(
        "--from",
        dest="result",
        metavar="RESULT",
        help="write the report of this result, a file of --json or a bench.json.gz of a report, and run nothing",
    )
    output.add_argument(
        "--check-replay",
        action="store_true",
        help="fail unless replayed step times agree with measured ones within 5%%; needs a core for each stage",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    if arguments.result is not None:
        _report_of(arguments)
        return
    if arguments.preset not in PRESETS:
        raise CommandError(f"preset {arguments.preset!r}: known are {', '.join(PRESETS)}")
    for option in ("json", "html"):
        check_output(getattr(arguments, option), f"--{option}")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    if arguments.preset.startswith("gpu-"):
        _check_gpu_options(arguments)
        from terapipe_ds.bench.gpu import run_on_gpu

        result = run_on_gpu(arguments.preset, full=arguments.full)
    else:
        if arguments.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as in the ranks; else DeepSpeed says that it looked
        result = _train(arguments)
    result = {"command": command_line(arguments.words), **result}
    if arguments.json:  # first: whatever the table and the report come to, the figures are kept
        from terapipe_ds.files.atomic import write_text

        write_text(arguments.json, json.dumps(result, indent=1, allow_nan=False))
    from terapipe_ds.bench.table import render

    print(render(result))
    if arguments.html:
        from terapipe_ds.bench.report import write_report

        write_report(result, arguments.html)
    _check_success(result)
    if arguments.check_replay:
        _check_replay(result)


def _report_of(arguments: argparse.Namespace) -> None:
    """Write the report of a result that was kept. Other options are refused: they are those of a run."""
    from terapipe_ds.bench.report import load_result, write_report

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual = {name: value for name, value in vars(parser.parse_args([])).items() if name not in ("result", "html")}
    given = [name for name, value in usual.items() if getattr(arguments, name) != value]
    if given or arguments.html is None:
        named = ", ".join(name if name == "preset" else f"--{name.replace('_', '-')}" for name in given)
        problem = f"runs nothing and does not use {named}" if given else "needs --html"
        raise CommandError(f"--from {problem}: give --from RESULT --html FILE alone")
    check_output(arguments.html, "--html")
    if Path(arguments.html).resolve() == Path(arguments.result).resolve():
        raise CommandError(f"--html {arguments.html} is the result itself: give another name")
    write_report(load_result(arguments.result), arguments.html)
    print(f"{arguments.html}: {Path(arguments.html).stat().st_size / 1024:.0f} KiB")


def _check_gpu_options(arguments: argparse.Namespace) -> None:
    """Refuse what the presets for one device would not use."""
    values = {name: getattr(arguments, name) for name in (*_NOT_ON_GPU, *_SIZES)}
    given = [name for name, value in values.items() if value is not None and value is not False]
    given += ["granularity"] if arguments.granularity != _GRANULARITY else []
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(
            f"preset {arguments.preset} does not use {options}: its sizes are fixed, it takes --full, --json, --html"
        )


def job_of(arguments: argparse.Namespace) -> Job:
    """What the preset and the options ask for.

    Raises:
        ValueError: options that contradict each other or the model.
    """
    from terapipe_ds.bench.cases import PRESETS as ALL
    from terapipe_ds.bench.cases import Job, choose
    from terapipe_ds.bench.ranks import BF16_SETTINGS

    preset = ALL[arguments.preset]
    given = {name: getattr(arguments, name) for name in _SIZES}
    work = dataclasses.replace(preset.work, **{name: value for name, value in given.items() if value is not None})
    ds_config, gpt = None, None
    if arguments.config or arguments.model:
        ds_config, gpt, work = _own_model(arguments, work, given)
    elif arguments.device == "cuda":
        ds_config, gpt = BF16_SETTINGS, {"dtype": "bfloat16"}
    counts = {**dataclasses.asdict(work), "pairs": _pairs(arguments, preset), "granularity": arguments.granularity}
    _check_sizes(work, gpt, counts)
    accumulations = arguments.accumulation or (preset.full_accumulations if arguments.full else preset.accumulations)
    cases = choose(
        preset,
        full=arguments.full,
        systems=arguments.systems,
        schedules=arguments.schedules,
        slices=_slices(arguments.slices, work.sequence_length),
    )
    if ds_config is not None and arguments.slices is None and arguments.schedules is None:
        cases = tuple(dict.fromkeys((*cases, *_configured(ds_config, arguments.systems))))
    # a preset's competitor for some accumulations stands for all others as well
    known = set(preset.accumulations)
    cases = tuple(
        dataclasses.replace(c, accumulations=(*c.accumulations, *(m for m in accumulations if m not in known)))
        if c.accumulations and max(known) in c.accumulations
        else c
        for c in cases
    )
    replayed = arguments.device == "cpu" and len(os.sched_getaffinity(0)) < work.stages
    return Job(
        work,
        cases,
        tuple(accumulations),
        _pairs(arguments, preset),
        min(arguments.granularity, work.sequence_length),
        arguments.device,
        replayed,
        ds_config,
        gpt,
        arguments.share_device,
    )


def _check_sizes(work: Any, gpt: dict[str, Any] | None, counts: dict[str, int]) -> None:
    """Refuse in one line what ranks would find, each of them, after seconds."""
    for name, value in counts.items():
        if value < 1:
            raise CommandError(f"--{name.replace('_', '-')} {value}: give a number >= 1")
    from terapipe_ds.bench.cases import num_layers
    from terapipe_ds.bench.ranks import gpt_config
    from terapipe_ds.models.gpt import GPTConfigError

    try:
        gpt_config(work, gpt)
    except GPTConfigError as error:
        raise CommandError(f"--hidden {work.hidden} --heads {work.heads} --layers {work.layers}: {error}") from None
    layers = num_layers(work, gpt)
    if work.stages > layers:
        raise CommandError(
            f"--stages {work.stages}: the model has {layers} layers, embedding, norm and head among them; give at most "
            f"{layers}"
        )


def command_line(words: Sequence[str]) -> str:
    """The command as a shell would read it, without the folders of this machine."""
    named = shlex.join(["terapipe", *(_ABSOLUTE.sub(lambda path: Path(path[0]).name, word) for word in words)])
    return named.encode("utf-8", "replace").decode()  # names of files need not be text


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    from terapipe_ds.bench.run import run_benchmark

    job = job_of(arguments)
    if arguments.check_replay and job.device != "cpu":
        raise CommandError(f"--check-replay: replays take the CPU time of actions, which --device {job.device} has not")
    if arguments.check_replay and job.replayed:
        cores = len(os.sched_getaffinity(0))
        raise CommandError(
            f"--check-replay: {job.work.stages} stages on {cores} cores have no measured times; give fewer --stages"
        )
    _check_devices(job)
    return run_benchmark(job, "config" if arguments.config or arguments.model else arguments.preset)


def _own_model(
    arguments: argparse.Namespace, work: Any, given: dict[str, int | None]
) -> tuple[dict[str, Any] | None, dict[str, Any], Any]:
    """The config, the fields of the model, and the workload with its sizes."""
    from terapipe_ds.bench.ranks import BF16_SETTINGS
    from terapipe_ds.commands.user_model import dtype_of, model_of, number_of

    ds_config = read_json(arguments.config, "--config") if arguments.config else None
    if ds_config is None and arguments.device == "cuda":
        ds_config = BF16_SETTINGS
    if arguments.model is None:
        raise CommandError("--config without --model: give a named size, or a JSON file with fields of GPTConfig")
    config, _, _ = model_of(arguments.model, dtype_of(ds_config or {}))
    if arguments.config is None and config.dtype != "bfloat16":  # by its own file
        ds_config = None
    length = given["sequence_length"] or config.max_sequence_length
    gpt = {**config.model_dump(), "max_sequence_length": max(length, config.max_sequence_length)}
    work = dataclasses.replace(
        work,
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        sequence_length=length,
        micro_batch=given["micro_batch"] or number_of(ds_config or {}, "train_micro_batch_size_per_gpu"),
    )
    return ds_config, gpt, work


def _configured(ds_config: dict[str, Any], systems: list[str] | None) -> list[Any]:
    """What the config's own section says, as a competitor.

    Raises:
        CommandError: it asks for an order, or a choice, that the benchmark does not run.
    """
    from terapipe_ds.bench.cases import AUTO, PLAN, Case
    from terapipe_ds.config import TeraPipeConfig

    section = TeraPipeConfig.from_deepspeed(ds_config)
    if not section.enabled or (systems is not None and "terapipe" not in systems):
        return []
    given = f"--config: terapipe.schedule = {show_value(section.schedule)}"
    if section.schedule.endswith(".csv"):
        raise CommandError(f"{given}: here schedules run by name, not from files; name one, or give --schedules")
    if section.schedule == AUTO and section.chunks_per_stage != 1:
        raise CommandError(
            f"{given} with chunks_per_stage = {section.chunks_per_stage}: here it chooses among those with one part "
            "per stage; remove chunks_per_stage, or name a schedule"
        )
    slices: Any = section.slices
    if not isinstance(slices, int):
        slices = PLAN if slices == "auto" else tuple(slices)
    options = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in section.schedule_options.items())
    case = Case("terapipe", section.schedule, slices, options=options)
    if section.chunks_per_stage != case.chunks_per_stage:
        case = dataclasses.replace(case, given_chunks=section.chunks_per_stage)
    return [case]


def _pairs(arguments: argparse.Namespace, preset: Any) -> int:
    return preset.pairs if arguments.pairs is None else int(arguments.pairs)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give numbers >= 1")
    return numbers


def _slices(given: list[str] | None, length: int) -> list[Any] | None:
    """Numbers of slices and plans; several numbers that sum to the sequence length are one plan."""
    if given is None:
        return None
    found: list[Any] = []
    for text in given:
        known = re.fullmatch(r"(plan|plan:)?(0*[1-9][0-9]{0,8})?", text, re.ASCII)
        if known is None or text in ("", "plan:") or (known[1] == "plan" and known[2]):
            raise CommandError(
                f"--slices {text!r}: give numbers >= 1, 'plan', 'plan:N' with N >= 1, or lengths that sum to {length} "
                "tokens"
            )
        if not known[1] and int(text) > length:
            raise CommandError(f"--slices {text}: more slices than the {length} tokens of a sequence; give fewer")
        found.append(text if known[1] else int(text))
    numbers = [n for n in found if isinstance(n, int)]
    if len(numbers) > 1 and sum(numbers) == length:
        return [tuple(numbers), *(n for n in found if not isinstance(n, int))]
    return found


def _check_devices(job: Job) -> None:
    """A device for each stage, or one for all of several."""
    if job.share_device and (job.device == "cpu" or job.work.stages == 1):
        why = "--device cpu has no device to share" if job.device == "cpu" else "one stage shares with no other"
        raise CommandError(f"--share-device: {why}; give --device cuda and --stages 2 or more, or leave it out")
    if job.device == "cpu":
        return
    import torch

    stages, count = job.work.stages, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < (1 if job.share_device else stages):
        fix = "--share-device puts all stages on one" if count else "use the cpu"
        raise CommandError(f"--device cuda: {stages} stages need {stages} CUDA devices, here are {count}; {fix}")


def _check_success(result: dict[str, Any]) -> None:
    """A benchmark in which every run, or every run with token slices, failed is no success; what others gave is
    written."""
    ours = [row for row in result["runs"] if row["system"] == "terapipe"]
    for what, rows in (("", result["runs"]), (" of terapipe", ours)):
        if rows and all("error" in row for row in rows):
            raise CommandError(f"no run{what} could be made; the first one's error: {rows[0]['error']}")


def _check_replay(result: dict[str, Any]) -> None:
    """Replayed against measured, row by row."""
    worst = 0.0
    for row in result["runs"]:
        if "error" not in row:
            error = row["replayed_s"] / row["step_s"] - 1
            worst = max(worst, abs(error))
            print(f"replay: m={row['accumulation']} {row['label']:<36}{row['replayed_s']:>9.3f} s{error:>+8.1%}")
    if worst > REPLAY_TOLERANCE:
        raise CommandError(f"--check-replay: a replayed step is {worst:.1%} off the measured one, more than 5%")
