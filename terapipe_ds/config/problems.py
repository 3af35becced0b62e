"""Put into words what is wrong with a `terapipe` section: unknown keys, wrong values, impossible schedules."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from terapipe_ds.config.values import SECTION, LinksConfig, TeraPipeConfigError, shown_value
from terapipe_ds.messages import show_key, show_value
from terapipe_ds.schedule import SCHEDULE_NAMES, SEARCH, SPLIT_SCHEDULES, Kind, ScheduleError, load, placement_for
from terapipe_ds.schedule.generate import check_options

Path = tuple[Any, ...]  # of a key, which need not be a word
Models = Mapping[Path, type[BaseModel]]
_RECOMPUTE_NEEDS = {"chunks_per_stage": 1, "schedule": "seq1f1b", "slices": "auto"}


def refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed would pass over: the run would go on, unsliced, without a word."""
    for key, value in ds_config.items():
        is_other = isinstance(key, str) and key != SECTION and isinstance(value, dict)
        if is_other and difflib.get_close_matches(key.strip().lower(), [SECTION], cutoff=0.8):
            shown = f"{show_key(key)} = {show_value(value)}"
            raise TeraPipeConfigError(f"{shown}: unknown section; did you mean {SECTION}?")


@functools.cache
def models_of(root: type[BaseModel]) -> Models:
    """Return the model of the section and those of its objects, by the path of their key."""
    objects = {(name,): field.annotation for name, field in root.model_fields.items()}
    inner = {path: type_ for path, type_ in objects.items() if isinstance(type_, type) and issubclass(type_, BaseModel)}
    return {(): root} | inner


def take_known(section: dict[Any, Any], models: Models, problems: dict[Path, str], path: Path = ()) -> dict[str, Any]:
    """Return `section` without its unknown keys, which become `problems`. Keys need not be words."""
    known: dict[str, Any] = {}
    for key, value in section.items():
        if key not in models[path].model_fields:
            problems[*path, key] = unknown_key((*path, key), value, models)
        else:
            is_model = (*path, key) in models and isinstance(value, dict)
            known[key] = take_known(value, models, problems, (*path, key)) if is_model else value
    return known


def problems_of(error: ValidationError, section: Any, models: Models) -> dict[Path, str]:
    """Return pydantic's errors, one per key: a union fails once per member, a list once per entry."""
    problems = {}
    for detail in error.errors(include_input=False, include_context=False, include_url=False):
        location = detail["loc"]
        path = location[:2] if location[:1] in models and len(location) > 1 else location[:1]
        value = functools.reduce(operator.getitem, path, section)
        allowed = models[path[:-1]].model_fields[str(path[-1])].description
        problems[path] = f"{shown_value(value, *path)}: must be {allowed}"
    return problems


def unknown_key(path: Path, value: Any, models: Models) -> str:
    """Return the problem of a key that no model has, with the nearest that one has."""
    known = {key: (*parent, key) for parent, model in models.items() for key in model.model_fields}
    nearest = difflib.get_close_matches(show_key(path[-1]).strip().lower(), known, n=1)
    hint = f"known keys: {', '.join(models[path[:-1]].model_fields)}"
    if nearest:
        hint = f"did you mean {'.'.join([SECTION, *known[nearest[0]]])}?"
    return f"{shown_value(value, *map(show_key, path))}: unknown key; {hint}"


def schedule_problems(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a section that is switched on cannot have as schedule, although each value is valid by itself."""
    name, chunks = section.get("schedule", "seq1f1b"), section.get("chunks_per_stage", 1)
    options, file = section.get("schedule_options", {}), show_value(name)
    if name == SEARCH:
        fix = "find one with `terapipe plan --schedule search --order my.csv`, and put the section that it prints here"
        yield f"{shown_value(name, 'schedule')}: training runs no order that is found in the job; {fix}"
    elif name in SCHEDULE_NAMES:
        shown = shown_value(chunks, "chunks_per_stage")
        try:
            placement_for(name, 2, chunks)
            shown = shown_value(options, "schedule_options")
            check_options(name, 2, options, chunks)
        except ScheduleError as error:
            yield f"{shown}: {error.reason}"
    elif options:
        shown = shown_value(options, "schedule_options")
        yield f"{shown}: they go with the name of one schedule, not with {file}; leave them out"
    elif name != "auto":
        try:
            of_file = load(name).chunks_per_stage
        except ScheduleError as error:
            yield f"{shown_value(name, 'schedule')}: {error.reason}"
            return
        if section.get("slices", "auto") == "auto":
            fix = "give that number, or a list of lengths"
            yield f'terapipe.slices = "auto": the schedule in {file} is for a number of slices; {fix}'
        if chunks not in (1, of_file):
            shown = shown_value(chunks, "chunks_per_stage")
            yield f"{shown}: the schedule in {file} has {of_file} per stage; give that, or leave it at 1"


def compile_problems(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a section that is switched on cannot have beside `"compile": true`."""
    if section.get("compile") is not True:
        return
    name, planner = section.get("schedule", "seq1f1b"), section.get("planner", {})
    shown = shown_value(True, "compile")
    if name in SPLIT_SCHEDULES or _splits_in_file(name):
        why = "the backward of a compiled layer gives all its gradients at once, so that nothing is left for W"
        fix = 'give "auto", or a schedule that does not split backwards (seq1f1b), or set compile to false'
        yield f"{shown} with schedule = {show_value(name)}: {why}; {fix}"
    if not isinstance(planner, Mapping):
        planner = planner.model_dump()
    if planner.get("profile", "measure") != "measure":
        fix = 'set it to "measure", which measures the compiled layers in the job'
        yield f"{shown}: planner.profile names a file, with times of layers that run as they are; {fix}"


def _splits_in_file(name: str) -> bool:
    """Return whether the schedule in a file has a W; a file that cannot be read has its own message."""
    if not name.endswith(".csv"):
        return False
    try:
        orders = load(name).orders
    except ScheduleError:
        return False
    return any(action.kind is Kind.WEIGHT for actions in orders for action in actions)


def link_problems(links: LinksConfig) -> Iterator[str]:
    """Yield what `links` says of messages that travel exactly anyway."""
    if links.exact_until_part and links.is_exact:
        shown = shown_value(links.exact_until_part, "links", "exact_until_part")
        yield f"{shown}: all links are exact; give links.forward or links.backward a format, or leave this out"


def recompute_problems(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a section that is switched on cannot have beside `"recompute": "auto"`."""
    if section.get("recompute") != "auto":
        return
    shown, planner = 'terapipe.recompute = "auto"', section.get("planner", {})
    if not isinstance(planner, Mapping):
        planner = planner.model_dump()
    if section.get("offload_activations") is True:
        yield f"{shown}: it does not know of offload_activations; leave one of the two out"
    if planner.get("memory_limit_gb") is None:
        fix = "set terapipe.planner.memory_limit_gb to what a device may use"
        yield f'{shown}: no memory limit, so that nothing would recompute; {fix}, or recompute to "off"'
    if planner.get("profile", "measure") != "measure":
        fix = 'set it to "measure"'
        yield f"{shown}: the memory of layers is measured in the job, and planner.profile names a file; {fix}"
    chunks, schedule, slices = (section.get(key, default) for key, default in _RECOMPUTE_NEEDS.items())
    if isinstance(slices, list | tuple) and any(isinstance(each, list | tuple) for each in slices):
        yield f'{shown}: it chooses for micro-batches with the same slices; give one list of slices, or "auto"'
    several = schedule in SCHEDULE_NAMES and len(placement_for(schedule, 2, chunks)) > 2
    if several or chunks != 1 or schedule.endswith(".csv"):
        what = "is read from a file" if schedule.endswith(".csv") else "has several parts per stage"
        fix = 'take a schedule with one part per stage, or name the stages that recompute, "recompute": [0, 1]'
        yield f"{shown}: schedule {show_value(schedule)} {what}; {fix}"
