"""Read a DeepSpeed JSON as the engine would; report what will run, and what the engine refuses."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.doctor import Line
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson, read_json
from terapipe_ds.messages import show_key
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import ScheduleError, build, load
from terapipe_ds.schedule.placement import count_parts
from terapipe_ds.schedule.show import many

if TYPE_CHECKING:
    from terapipe_ds.config import TeraPipeConfig

File = tuple[Line, dict[str, Any]]  # the line on a config's file, and its content
_MOST_UNITS = 50_000  # they take a second or two


def read(path: str) -> File:
    """Read a config. Call it once: a pipe is empty then."""
    try:
        return Line("ok", "file", path), read_json(path, "--config")
    except CommandError as error:
        return Line("fail", "file", str(error)), {}
    except OSError as error:
        return Line("fail", "file", f"{path}: {error.strerror}", "give the path of a DeepSpeed JSON"), {}


def findings(file: File, stages: int | None, replicas: int | None, tokens: int | None = None) -> Iterator[Line]:
    """Yield the lines on a config; with None, the number of stages, replicas or tokens is not known."""
    from terapipe_ds.config.conflicts import without_auto
    from terapipe_ds.config.strategy_file import sizes_of

    of_file, content = file
    yield of_file
    if of_file.verdict == "fail":
        return
    given = without_auto(content)
    config = yield from _read_section(content, given)
    if config is None:
        return
    # a strategy has the sizes of a batch that the config leaves out
    keys = DeepSpeedJson(content if config.planned is None else content | sizes_of(config.planned))
    numbers = yield from _read_numbers(keys)
    wanted = numbers.pop("pipeline.stages", None)
    if None not in (stages, wanted) and stages != wanted:  # as the engine does
        yield Line("fail", "pipeline.stages", f"{wanted}, and the run has {stages}", "set it to that, or leave it out")
    stages = stages or wanted
    yield from _refused_by_deepspeed(given, stages)
    if len(numbers) == len(_BATCH):
        yield from _batch(numbers, replicas)
    yield from _cut(config, tokens)
    yield from _runs(config, keys, stages, _accumulation(numbers, replicas))
    yield from _layout(config, given, stages)
    yield from _profile(config)
    yield from _folders(config)
    text = "only a TeraPipeEngine reads the section: without register() DeepSpeed silently trains whole sequences"
    yield Line("ok", "register", text, "look for lines of terapipe_ds in the log, or print type(engine).__name__")


def _read_section(content: dict[str, Any], given: dict[str, Any]) -> Generator[Line, None, TeraPipeConfig | None]:
    """Yield what the engine refuses, and what DeepSpeed overlooks; return the section if it is enabled and valid."""
    from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
    from terapipe_ds.config.conflicts import problem_of_auto
    from terapipe_ds.config.unknown_keys import misspelt_keys

    try:
        config = TeraPipeConfig.from_deepspeed(given)
    except TeraPipeConfigError as error:
        for problem in error.problems:
            yield Line("fail", "refused", *_text_and_fix(problem))
        return None
    if not config.enabled:
        text = "there is none that is enabled: DeepSpeed's own engine trains whole sequences"
        yield Line("note", "section", text, 'set "terapipe": {"enabled": true}')
        return None
    if waiting := problem_of_auto(content):  # it trains with Trainer, and else fails
        yield Line("warning", "auto", *_text_and_fix(waiting))
    for problem in misspelt_keys(content):
        yield Line("warning", "misspelt", *_text_and_fix(problem))
    return config


def _read_numbers(keys: DeepSpeedJson) -> Generator[Line, None, dict[str, int | None]]:
    """Yield the numbers that are none, and return the others by their keys."""
    numbers = {}
    for name in (*_BATCH, "pipeline.stages"):
        try:
            numbers[name] = keys.number(name)
        except CommandError as error:
            yield Line("fail", name, *_text_and_fix(str(error)))
    return numbers


def _refused_by_deepspeed(content: dict[str, Any], stages: int | None) -> Iterator[Line]:
    """Let the installed DeepSpeed read its own keys, except for the sizes of a batch, and the engine what it read."""
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
        from pydantic import ValidationError

        from terapipe_ds.runtime.engine import deepspeed_faults as faults
    except Exception:  # the checks of the installation say why
        return
    others = {key: value for key, value in content.items() if key not in (*_BATCH, "sequence_parallel_size")}
    try:
        read = DeepSpeedConfig(others | {"train_micro_batch_size_per_gpu": 1})
    except Exception as error:
        found = error.errors() if isinstance(error, ValidationError) else ()
        text = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
        text = f"{getattr(error, 'title', '')}: {text}" if found else str(error)
        yield Line("fail", "DeepSpeed", f"it refuses this config: {text}", "change what it names, or take it out")
        return
    for check in (faults.problem_of_grad_scaler, faults.problem_of_curriculum):
        if stages is not None and (problem := check(read, stages)):
            yield Line("fail", "refused", *_text_and_fix(problem))


def _text_and_fix(problem: str) -> tuple[str, str]:
    """Split an error at its first ": " that is not inside the value it shows, such as a dict."""
    places = [found.start() for found in re.finditer(": ", problem)]
    text = next((problem[:at] for at in places if problem[:at].count("{") == problem[:at].count("}")), problem)
    return text, problem[len(text) + 2 :]


def _batch(sizes: dict[str, int | None], replicas: int | None) -> Iterator[Line]:
    """Check the sizes as DeepSpeed does, which fills in those that are missing."""
    rows, steps, batch = (sizes[name] for name in _BATCH)
    text = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None) or "no size is given"
    count = replicas or (max(1, batch // (rows * steps)) if rows and steps and batch else 1)
    product = (rows or 1) * (steps or 1) * count
    if batch is None and rows is None:
        text += ": DeepSpeed refuses that, unless Trainer fills in its own arguments"
        yield Line("warning", "batch", text, f"without Trainer, give two of {', '.join(_BATCH)}")
    elif batch and (batch % product or (rows and steps and batch != product)):
        factors = " x ".join([*(str(value) for value in (rows, steps) if value), many(count, "replica")])
        is_settled = rows and steps
        wrong = f"{text}, but {factors} is {product}" if is_settled else f"{text}, which is no multiple of {factors}"
        fix = f"set train_batch_size to {product if is_settled else f'a multiple of {product}'}, or leave it out"
        yield Line("fail", "batch", wrong, fix)
    else:
        yield Line("ok", "batch", text)


def _accumulation(sizes: dict[str, int | None], replicas: int | None) -> int | None:
    """Return the micro-batches of a step, as DeepSpeed fills them in; None where the config does not determine them."""
    rows, steps, batch = map(sizes.get, _BATCH)
    if rows and batch and not steps:
        return None if replicas is None else max(1, batch // (rows * replicas))
    return steps or (1 if rows or batch else None)


_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def _cut(config: TeraPipeConfig, sequence_length: int | None) -> Iterator[Line]:
    """Check what depends on the length of the sequences: the slices, and the granules at whose edges they end."""
    if sequence_length is None:
        return
    try:
        config.check_length(sequence_length)
        count = len(config.listed_slices) or 1
        plans = () if config.slices == "auto" else config.plans_for(sequence_length, count)
    except ValueError as error:
        text, fix = _text_and_fix(str(error))
        yield Line("fail", "slices", f"{sequence_length} tokens: {text}", fix)
        return
    text = "; ".join(str(list(plan.lengths)) for plan in plans) or "the planner cuts them when such a batch comes"
    yield Line("ok", "slices", f"{sequence_length} tokens: {show_key(text, 120)}")


def _precision(keys: DeepSpeedJson) -> Generator[Line, None, str]:
    """Return the name of the precision; yield a line on a section that is no object."""
    try:
        return keys.precision or ("the precision of Trainer or torch.autocast" if keys.leaves_precision else "fp32")
    except CommandError as error:
        yield Line("fail", "precision", *_text_and_fix(str(error)))
        return "an unknown precision"


def _runs(config: TeraPipeConfig, keys: DeepSpeedJson, stages: int | None, steps: int | None) -> Iterator[Line]:
    """Describe a step of `steps` micro-batches, and how long the stages would wait with equal parts and slices."""
    from terapipe_ds.simulator import UnitCosts, simulate

    name, precision = config.schedule, (yield from _precision(keys))
    slices = f"{config.slices} slices" if isinstance(config.slices, int) else f"slices {json.dumps(config.slices)}"
    yield Line("ok", "section", f"schedule {name}, {slices}, {precision}")
    if stages is None or name == "auto" or name.endswith(".csv"):
        return
    count = steps or 1
    numbers = [len(each) for each in config.listed_slices] or [config.slices if isinstance(config.slices, int) else 4]
    whole = (stages - 1) / (count + stages - 1)
    if is_long := (units := stages * config.chunks_per_stage * count * max(numbers)) > _MOST_UNITS:
        count, numbers = 1, [min(numbers[0], 4)]  # which show whether there is such a schedule
    per_micro_batch = [numbers[m % len(numbers)] for m in range(count)]
    options: dict[str, Any] = config.options_of(name)
    try:
        schedule = build(name, stages, count, per_micro_batch, chunks_per_stage=config.chunks_per_stage, **options)
    except ScheduleError as error:
        text = f"{name} on {many(stages, 'stage')}: {error.reason}"
        yield Line("fail", "schedule", text, "terapipe show --help lists all")
        return
    if steps is None:
        return
    if is_long:
        text = f"a step of {units} forwards is not simulated here; 1F1B of whole sequences has a bubble of {whole:.1%}"
        yield Line("note", "schedule", text, "give fewer gradient_accumulation_steps to see the schedule's own")
        return
    length = math.prod(set(per_micro_batch))
    plans = [SlicePlan.equal(length, number) for number in per_micro_batch]
    bubble = simulate(schedule, plans, UnitCosts(length)).bubble_fraction
    assumed = "with 4 slices, say, " if config.slices == "auto" else ""
    text = f"{assumed}bubble {bubble:.1%} with equal parts and slices; 1F1B of whole sequences {whole:.1%}"
    if bubble > whole + 1e-9:
        yield Line("warning", "schedule", text, "more slices, or another schedule: terapipe plan compares them")
    else:
        yield Line("ok", "schedule", text)


def _layout(config: TeraPipeConfig, content: dict[str, Any], stages: int | None) -> Iterator[Line]:
    """Compare the number of stages with an order from a file, a partition by hand, and stages that recompute."""
    from terapipe_ds.config import TeraPipeConfigError

    if stages is None:
        return
    try:
        config.recomputing_stages(stages, content)
    except TeraPipeConfigError as error:
        yield Line("fail", "recompute", *_text_and_fix(str(error)))
    name = config.schedule
    if name.endswith(".csv"):
        order = load(name)
        if order.num_stages != stages:
            text = f"{name} is for {order.num_stages} stages, and there are {stages}"
            yield Line("fail", "schedule", text, f"write one for {stages}")
            return
        parts = order.num_parts
    else:
        try:
            parts = count_parts("interleaved" if name == "auto" else name, stages, config.chunks_per_stage)
        except ScheduleError:  # `_runs` says so
            return
    if config.partition is not None and len(config.partition) - 1 != parts:
        has = many(len(config.partition) - 1, "part")
        text = f"{list(config.partition)} has {has}, and {name} on {many(stages, 'stage')} {parts}"
        yield Line("fail", "partition", text, f"give {parts + 1} numbers")


def _profile(config: TeraPipeConfig) -> Iterator[Line]:
    """Read the profile that a run would read instead of measuring."""
    from terapipe_ds.costs.profile import Profile, ProfileError

    if not config.needs_costs or config.planner.profile == "measure":
        return
    try:
        Profile.load(config.planner.profile)
    except ProfileError as error:
        yield Line("fail", "planner.profile", str(error), 'terapipe profile writes one; "measure" needs none')
        return
    yield Line("ok", "planner.profile", config.planner.profile)


def _folders(config: TeraPipeConfig) -> Iterator[Line]:
    """Check whether a run can write its files."""
    for key, folder in (("planner.cache_dir", config.planner.cache_dir), ("trace_dir", config.trace_dir)):
        if folder is None:
            continue
        existing = next((each for each in (Path(folder), *Path(folder).absolute().parents) if each.exists()), Path("/"))
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Line("ok", key, folder)
        else:
            yield Line("fail", key, f"{folder}: {existing} cannot be written", "give a folder that you may write")
    if config.needs_costs and config.planner.cache_dir is None and config.planner.profile == "measure":
        text = "none: slices are measured anew at each start"
        yield Line("note", "planner.cache_dir", text, 'set "planner": {"cache_dir": "plans"}')
