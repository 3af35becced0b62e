"""Run `terapipe bench`: compare token slices with stock schedules on this machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terapipe_ds.commands.options import (
    JsonOutput,
    Names,
    Numbers,
    Options,
    Output,
    Text,
    flag,
    json_option,
    option,
    switch,
    write_json,
)
from terapipe_ds.commands.user_model import model_of, read_config
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson
from terapipe_ds.messages import show_value
from terapipe_ds.schedule import SCHEDULE_NAMES, SEARCH

if TYPE_CHECKING:
    from terapipe_ds.bench.cases import Case, Job
    from terapipe_ds.bench.ranks import Workload

HELP = "train side by side: DeepSpeed's stock engine, token slices, torch's pipelines"
DESCRIPTION = (
    "Train the same model on the same data from the same weights with DeepSpeed's own engines, token slices and "
    "torch.distributed.pipelining: in one run, in turns, one process per stage, each pinned to its core. Ends with a "
    "table of step times, their bounds and predictions, bubbles, peaks of memory and losses, which must agree."
)
EXAMPLES = """\
  terapipe bench                                         # two stages on two cores, 12 minutes
  terapipe bench --json bench.json --html bench.html     # all figures, and a report to browse
  terapipe bench cpu-2stage --full --accumulation 8      # every system, eight micro-batches
  terapipe bench --accumulation 1 --slices 4,8,16,plan   # step time against slices
  # the planner's best, and its best of at most 4 and 8 slices
  terapipe bench --accumulation 1 --slices plan,plan:4,plan:8
  # lengths in tokens
  terapipe bench --schedules seq1f1b --slices 344,304,272,256,240,224,208,200
  terapipe bench cpu-8stage --pairs 1          # fewer cores than stages: it replays the times
  terapipe bench --config ds.json --model mini --stages 2   # your config and model
  terapipe bench --from bench.json --html bench.html        # the report of a kept result

Schedules of each system:
  deepspeed: 1f1b, dualpipev
  torch: gpipe, 1f1b, interleaved1f1b, zbv
""" + textwrap.fill(
    f"  terapipe: {', '.join((*(name for name in SCHEDULE_NAMES if name != 'dapple'), SEARCH))}",
    118,
    subsequent_indent="    ",
    break_on_hyphens=False,
)

_SIZES = ("stages", "micro_batch", "sequence_length", "hidden", "layers", "heads")
_ABSOLUTE = re.compile(r"(?:^|(?<==))/.*", re.DOTALL)
"""Matches a word that is an absolute path, or the one of `--option=/path`."""
_runs, _sized, _output = (functools.partial(option, group=title) for title in ("what runs", "sizes", "output"))
_size = functools.partial(_sized, "in the place of the preset's", "N", ge=1)


class BenchOptions(Options):
    """Choose the runs, their sizes and the output files; None takes the value of the preset."""

    preset: Literal["cpu-2stage", "cpu-8stage"] = option(
        "cpu-2stage (default), cpu-8stage", None, "cpu-2stage", flags=("preset",), nargs="?"
    )
    full: bool = switch("every system that can run, and more accumulations")
    systems: Names | None = _runs("deepspeed, terapipe, torch", "NAME[,...]")
    schedules: Names | None = _runs("of any system; listed above", "NAME[,...]")
    slices: Names | None = _runs(
        "numbers of equal slices, 'plan' for the planner's, 'plan:N' for its best of at most N; or, where the numbers "
        "sum to the sequence length, one plan in tokens",
        "N[,...]",
    )
    accumulation: Numbers | None = _runs("micro-batches per step", "M[,...]")
    pairs: int | None = _runs("timed turns (cpu-2stage: 5)", "N", ge=1, flags=("--pairs", "--steps"))
    config: Text | None = _sized("a DeepSpeed config in the place of the usual one", "DS.json")
    model: Text | None = _sized("as `terapipe profile` takes it", "NAME_OR_JSON")
    stages: int | None = _size()
    micro_batch: int | None = _size()
    sequence_length: int | None = _size()
    hidden: int | None = _size()
    layers: int | None = _size()
    heads: int | None = _size()
    granularity: int = _sized("plans cut at multiples (default: the config's, or 64)", "N", default=64, ge=1)
    device: Literal["cpu", "cuda"] = _sized(
        "default: cpu. cuda trains in bf16, unless --config says otherwise: fused attention takes no fp32",
        "{cpu,cuda}",
        default="cpu",
    )
    share_device: bool = switch(
        "with --device cuda: all stages on the first device, over gloo and by way of the host. It shows that the "
        "pipeline runs where there is one device; its times are not those of stages with a device each",
        group="sizes",
    )
    peak_tflops: float | None = _output("dense peak of a device, for the MFU (default: of a GPU's card)", "P", gt=0)
    as_json: JsonOutput | None = json_option("machine and all figures", group="output")
    html: Output | None = _output("write a report for a browser, in one file", "FILE")
    interactive: bool = switch("with --html: timelines to zoom, hover and filter (2 MB more)", group="output")
    result: Text | None = _output(
        "write the report of this result, a file of --json or a bench.json.gz of a report, and run nothing",
        "RESULT",
        flags=("--from",),
    )


def run(options: BenchOptions) -> None:
    if options.result is not None:
        _report_of(options, options.result)
        return
    options.refuse_without("html", "interactive")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    if options.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as the ranks do; otherwise DeepSpeed logs its search
    from terapipe_ds.bench.report import check_packages, write_report
    from terapipe_ds.bench.run import run_benchmark
    from terapipe_ds.bench.table import render

    job = job_of(options)
    _check_devices(job)
    if options.html:  # before a run that may take hours
        check_packages()
    measured = run_benchmark(job, "config" if options.config or options.model else options.preset)
    result = {"command": command_line(options.words), **measured}
    # first, so that the figures are kept even if the table or the report fails
    if not write_json(lambda: json.dumps(result, indent=1, allow_nan=False), options.as_json):
        print(render(result))
    if options.html:
        write_report(result, options.html, options.interactive)
    _check_success(result)


def _report_of(options: BenchOptions, result: str) -> None:
    """Write the report of a kept result; refuse all other options, which belong to a run."""
    from terapipe_ds.bench.report import load_result, write_report

    given = [options.name_of(name) for name in options.given if name not in ("result", "html", "interactive")]
    if given or options.html is None:
        problem = f"runs nothing and does not use {', '.join(given)}" if given else "needs --html"
        raise CommandError(f"--from {problem}: give --from RESULT --html FILE alone")
    if os.path.realpath(options.html) == os.path.realpath(result):
        raise CommandError(f"--html {options.html} is the result itself: give another name")
    write_report(load_result(result), options.html, options.interactive)
    print(f"{options.html}: {Path(options.html).stat().st_size / 1024:.0f} KiB")


def job_of(options: BenchOptions) -> Job:
    """Return the settings from preset and options; refuse those that contradict one another or the model."""
    from terapipe_ds.bench.cases import PRESETS, Job, choose
    from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload
    from terapipe_ds.config import TeraPipeConfig

    preset = PRESETS[options.preset]
    ds_config, gpt, sizes = None, None, dict[str, int]()
    if options.config or options.model:
        ds_config, gpt, sizes = _own_model(options)
    elif options.device == "cuda":
        ds_config, gpt = BF16_SETTINGS, {"dtype": "bfloat16"}
    own = sizes.pop("accumulation", None)
    values = options.filled(sizes, dataclasses.asdict(preset.work), {"pairs": preset.pairs})
    work = Workload(accumulation=preset.work.accumulation, **{name: getattr(values, name) for name in _SIZES})
    _check_sizes(work, gpt)
    of_preset = preset.full_accumulations if options.full else preset.accumulations
    of_config = (own,) if own else ()
    accumulations = options.accumulation or ((*of_preset, *of_config) if options.full else of_config or of_preset)
    accumulations = tuple(dict.fromkeys(accumulations))
    slices = _slices(options.slices, work.sequence_length)
    cases = choose(preset, full=options.full, systems=options.systems, schedules=options.schedules, slices=slices)
    if slices is not None and not any(case.system == "terapipe" and case.slices in slices for case in cases):
        raise CommandError("--slices: none of these runs has slices; leave it out, or give --systems or --schedules")
    if ds_config is not None and options.slices is None and options.schedules is None:
        cases = tuple(dict.fromkeys((*cases, *_configured(ds_config, options.systems))))
    # A run at the preset's largest accumulation also runs at accumulations that the preset lacks.
    more, most = [m for m in accumulations if m not in preset.accumulations], max(preset.accumulations)
    cases = tuple(
        dataclasses.replace(case, accumulations=(*case.accumulations, *more)) if most in case.accumulations else case
        for case in cases
    )
    pairs, granularity = int(values.pairs or 0), values.granularity
    if "granularity" not in {**options.given, **sizes}:  # equal slices halve the default, as in training
        most = max([case.slices for case in cases if isinstance(case.slices, int)], default=1)
        section = TeraPipeConfig.from_deepspeed({"terapipe": {"slices": most}})
        granularity = section.granularity_for(work.sequence_length)
    granularity = min(granularity, work.sequence_length)
    replayed = options.device == "cpu" and len(os.sched_getaffinity(0)) < work.stages
    where = options.device, replayed, ds_config, gpt, options.share_device, options.peak_tflops
    return Job(work, cases, accumulations, pairs, granularity, *where)


def _check_sizes(work: Workload, gpt: dict[str, Any] | None) -> None:
    """Refuse in one line the settings that every rank would refuse seconds later."""
    from terapipe_ds.bench.cases import num_layers
    from terapipe_ds.bench.ranks import gpt_config
    from terapipe_ds.models.gpt import GPTConfigError

    try:
        gpt_config(work, gpt)
    except GPTConfigError as error:
        raise CommandError(f"--hidden {work.hidden} --heads {work.heads} --layers {work.layers}: {error}") from None
    layers = num_layers(work, gpt)
    if work.stages > layers:
        has = f"the model has {layers} layers, embedding, norm and head among them"
        raise CommandError(f"--stages {work.stages}: {has}; give at most {layers}")


def command_line(words: Sequence[str]) -> str:
    """Return the command as a shell would read it, without the folders of this machine."""
    named = shlex.join(["terapipe", *(_ABSOLUTE.sub(lambda path: Path(path[0]).name, word) for word in words)])
    return named.encode("utf-8", "replace").decode()  # names of files need not be text


def _own_config(path: str) -> dict[str, Any]:
    """Return the config of `--config`, with an optimizer; refuse values that nothing here fills in, and a strategy."""
    from terapipe_ds.bench.ranks import USUAL_SETTINGS
    from terapipe_ds.config.conflicts import problem_of_auto

    ds_config = read_config(path)
    if (waiting := problem_of_auto(ds_config)) is not None:
        raise CommandError(f"--config: {waiting}")
    section = ds_config.get("terapipe")
    if isinstance(section, dict) and section.get("strategy") is not None:
        given = f"--config: terapipe.strategy = {show_value(section['strategy'])}"
        raise CommandError(f"{given} has sizes and an order of its own: take it out, and give --schedules and --slices")
    for key in ("sequence_parallel_size", "tensor_parallel.autotp_size"):
        if (size := DeepSpeedJson(ds_config).number(key, least=0) or 1) > 1:
            raise CommandError(f"--config: {key} = {size}: here a stage is one rank; remove the key")
    if "optimizer" not in ds_config:  # which programs also pass to `initialize`
        print("terapipe bench: note: --config has no optimizer: all systems train with Adam", file=sys.stderr)
    return {"optimizer": USUAL_SETTINGS["optimizer"]} | ds_config


def _own_model(options: BenchOptions) -> tuple[dict[str, Any] | None, dict[str, Any], dict[str, int]]:
    """Return the config, the fields of the model, and the sizes that they give the workload."""
    from terapipe_ds.bench.ranks import BF16_SETTINGS

    if own := [name for name in options.given if name in ("hidden", "layers", "heads")]:
        raise CommandError(f"{flag(own[0])} does not go with --model, which has its own: leave it out")
    ds_config = _own_config(options.config) if options.config else None
    if options.model is None:
        raise CommandError("--config without --model: give a named size, or a JSON file with fields of GPTConfig")
    if ds_config is None and options.device == "cuda":
        ds_config = BF16_SETTINGS
    keys = DeepSpeedJson(ds_config or {})
    config = model_of(options.model, keys.dtype)
    if options.config is None and config.dtype != "bfloat16":  # by its own file
        ds_config = None
    sizes = {"hidden": config.hidden_size, "layers": config.num_layers, "heads": config.num_heads}
    sizes["sequence_length"] = config.max_sequence_length
    rows, batch = options.micro_batch or keys.micro_batch, keys.number("train_batch_size") or 0
    accumulation = keys.number("gradient_accumulation_steps")
    steps = accumulation or batch // rows  # of one replica, as here
    counts = not options.accumulation and not (accumulation and options.micro_batch)
    if batch and counts and (not steps or batch % (rows * steps)):
        fix = "give a multiple, or --accumulation"
        raise CommandError(f"train_batch_size = {batch} in --config: no multiple of {rows * max(steps, 1)}; {fix}")
    of_config = {
        "granularity": keys.number("terapipe.granularity_tokens"),
        "stages": keys.number("pipeline.stages"),
        "micro_batch": rows,
        "accumulation": steps,
    }
    sizes |= {name: number for name, number in of_config.items() if number is not None}
    if ds_config is not None and isinstance(pipeline := ds_config.get("pipeline"), dict):  # an option may say otherwise
        ds_config["pipeline"] = {key: value for key, value in pipeline.items() if key != "stages"}
    section = (ds_config or {}).get("terapipe")
    planner = (section.get("planner") if isinstance(section, dict) else None) or {}
    planner = {name: value for name, value in planner.items() if (name, value) != ("profile", "measure")}
    if passed := [f"terapipe.planner.{name} = {show_value(value)}" for name, value in planner.items()]:
        why = "costs are measured in this run and not kept, and plans have no limit of memory"
        print(f"terapipe bench: note: --config: not taken: {', '.join(passed)}: {why}", file=sys.stderr)
    longest = max(options.sequence_length or 0, config.max_sequence_length)
    return ds_config, {**config.model_dump(), "max_sequence_length": longest}, sizes


def _configured(ds_config: dict[str, Any], systems: tuple[str, ...] | None) -> list[Case]:
    """Return the run that the config's own section describes; refuse orders that the benchmark lacks."""
    from terapipe_ds.bench.cases import AUTO, PLAN, Case
    from terapipe_ds.config import TeraPipeConfig

    section = TeraPipeConfig.from_deepspeed(ds_config)
    if not section.enabled or (systems is not None and "terapipe" not in systems):
        return []
    given = f"--config: terapipe.schedule = {show_value(section.schedule)}"
    if section.schedule.endswith(".csv"):
        raise CommandError(f"{given}: here schedules run by name, not from files; name one, or give --schedules")
    if section.schedule == AUTO and section.chunks_per_stage != 1:
        given += f" with chunks_per_stage = {section.chunks_per_stage}: here it chooses among those with one part"
        raise CommandError(f"{given} per stage; remove chunks_per_stage, or name a schedule")
    if len(section.listed_slices) > 1:
        raise CommandError(
            "--config: terapipe.slices has a list for each micro-batch: here all have the same, but those of the "
            'schedule "search"; give one list, or --slices'
        )
    slices: Any = section.slices
    if not isinstance(slices, int):
        slices = PLAN if slices == "auto" else tuple(slices)
    case = Case("terapipe", section.schedule, slices, options=tuple(section.schedule_options.items()))
    if section.chunks_per_stage != case.chunks_per_stage:
        case = dataclasses.replace(case, given_chunks=section.chunks_per_stage)
    return [case]


def _slices(given: tuple[str, ...] | None, length: int) -> list[Any] | None:
    """Return numbers of slices and plans; several numbers that sum to the sequence length are one plan."""
    if given is None:
        return None
    counts: list[Any] = []
    for text in given:
        known = re.fullmatch(r"plan(?::0*[1-9]\d{0,8})?|(0*[1-9]\d{0,8})", text, re.ASCII)
        if known is None:
            allowed = "numbers >= 1, 'plan', 'plan:N' with N >= 1"
            raise CommandError(f"--slices {text!r}: give {allowed}, or lengths that sum to {length} tokens")
        if known[1] and int(text) > length:
            raise CommandError(f"--slices {text}: more slices than the {length} tokens of a sequence; give fewer")
        counts.append(int(text) if known[1] else text)
    numbers = [n for n in counts if isinstance(n, int)]
    if len(numbers) > 1 and sum(numbers) == length:
        return [tuple(numbers), *(n for n in counts if not isinstance(n, int))]
    return counts


def _check_devices(job: Job) -> None:
    """Refuse to run unless each stage has a device, or several share one."""
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
    """Raise an error where every run, or every run with token slices, has failed."""
    ours = [row for row in result["runs"] if row["system"] == "terapipe"]
    for what, rows in (("", result["runs"]), (" of terapipe", ours)):
        if rows and all("error" in row for row in rows):
            raise CommandError(f"no run{what} could be made; the first one's error: {rows[0]['error']}")
