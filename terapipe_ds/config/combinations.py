"""Report keys of a `terapipe` section that exclude one another, although each is valid by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from terapipe_ds.config.values import LinksConfig, shown_value
from terapipe_ds.messages import show_value
from terapipe_ds.schedule import SCHEDULE_NAMES, SEARCH, SPLIT_SCHEDULES, Kind, ScheduleError, load, placement_for
from terapipe_ds.schedule.generate import check_options

if TYPE_CHECKING:
    from terapipe_ds.config import TeraPipeConfig

INTERVAL = "pipeline.activation_checkpoint_interval"  # DeepSpeed's own key that recomputes layers
UNSPLIT = 'give "auto", or a schedule that does not split backwards (seq1f1b)'


def schedule_problems(section: TeraPipeConfig) -> Iterator[str]:
    """Yield the schedule problems of an enabled section whose values are each valid by themselves."""
    name, chunks, options = section.schedule, section.chunks_per_stage, section.schedule_options
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
        yield f"{shown}: they go with the name of one schedule, not with {show_value(name)}; leave them out"
    elif name != "auto":
        yield from _file_problems(name, chunks, section.slices)


def _file_problems(name: str, chunks: int, slices: object) -> Iterator[str]:
    shown, file = shown_value(name, "schedule"), show_value(name)
    try:
        schedule = load(name)
    except ScheduleError as error:
        yield f"{shown}: {error.reason}"
        return
    of_file = schedule.chunks_per_stage
    if schedule.forward_only:
        yield f"{shown}: the file has forwards only; add the backward of each, B0.0 of F0.0"
    if slices == "auto":
        fix = "give that number, or a list of lengths"
        yield f'terapipe.slices = "auto": the schedule in {file} is for a number of slices; {fix}'
    if chunks not in (1, of_file):
        shown = shown_value(chunks, "chunks_per_stage")
        yield f"{shown}: the schedule in {file} has {of_file} per stage; give that, or leave it at 1"


def compile_problems(section: TeraPipeConfig) -> Iterator[str]:
    """Yield the values of an enabled section that exclude `"compile": true`."""
    if not section.compile:
        return
    name, shown = section.schedule, shown_value(True, "compile")
    if splits_backwards(name):
        why = "the backward of a compiled layer gives all its gradients at once, so that nothing is left for W"
        yield f"{shown} with schedule = {show_value(name)}: {why}; {UNSPLIT}, or set compile to false"
    if section.planner.profile != "measure":
        fix = 'set it to "measure", which measures the compiled layers in the job'
        yield f"{shown}: planner.profile names a file, with times of layers that run as they are; {fix}"


def splits_backwards(name: str) -> bool:
    """Return whether a schedule, or one in a file, has a W; a file that cannot be read has its own message."""
    if not name.endswith(".csv"):
        return name in SPLIT_SCHEDULES
    try:
        orders = load(name).orders
    except ScheduleError:
        return False
    return any(action.kind is Kind.WEIGHT for actions in orders for action in actions)


def link_problems(links: LinksConfig) -> Iterator[str]:
    """Yield the problem of an `exact_until_part` where all messages are exact anyway."""
    if links.exact_until_part and links.is_exact:
        shown = shown_value(links.exact_until_part, "links", "exact_until_part")
        yield f"{shown}: all links are exact; give links.forward or links.backward a format, or leave this out"


def recompute_problems(section: TeraPipeConfig) -> Iterator[str]:
    """Yield the values of an enabled section that exclude `"recompute": "auto"`, or `"keep_attention": true`."""
    yield from _keep_problems(section)
    if section.recompute != "auto":
        return
    shown, schedule = 'terapipe.recompute = "auto"', section.schedule
    if section.offload_activations:
        yield f"{shown}: it does not know of offload_activations; leave one of the two out"
    if section.planner.memory_limit_gb is None:
        fix = "set terapipe.planner.memory_limit_gb to what a device may use"
        yield f'{shown}: no memory limit, so that nothing would recompute; {fix}, or recompute to "off"'
    if section.planner.profile != "measure":
        fix = 'set it to "measure"'
        yield f"{shown}: the memory of layers is measured in the job, and planner.profile names a file; {fix}"
    if section.has_plan_of_each:
        yield f'{shown}: it chooses for micro-batches with the same slices; give one list of slices, or "auto"'
    several = schedule in SCHEDULE_NAMES and len(placement_for(schedule, 2, section.chunks_per_stage)) > 2
    if several or section.chunks_per_stage != 1 or schedule.endswith(".csv"):
        what = "is read from a file" if schedule.endswith(".csv") else "has several parts per stage"
        fix = 'take a schedule with one part per stage, or name the stages that recompute, "recompute": [0, 1]'
        yield f"{shown}: schedule {show_value(schedule)} {what}; {fix}"


def problem_of_reentry(where: str) -> str:
    """Return an error about `"keep_attention": true` where `where` sets checkpoints without reentry."""
    return (
        f"terapipe.keep_attention = true: {where} checkpoints without reentry, and such layers run all of their "
        "forward again; checkpoint with reentry (use_reentrant = true), or leave keep_attention out"
    )


def _keep_problems(section: TeraPipeConfig) -> Iterator[str]:
    if not section.keep_attention:
        return
    shown = shown_value(True, "keep_attention")
    if section.recompute == "off":
        yield f'{shown}: nothing recomputes; set recompute to "full" or to stages, or leave keep_attention out'
    if section.compile:
        yield f"{shown} with compile = true: compiled layers run all of their forward again; leave one of them out"
