"""Run `terapipe simulate`: compute the seconds of a schedule from the costs of its slices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from terapipe_ds.commands.options import (
    MAX_FORWARDS,
    JsonOutput,
    OrderFile,
    Output,
    Picture,
    ScheduleOptions,
    Text,
    json_option,
    option,
    switch,
    write_json,
)
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.messages import in_runs
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import SEARCH, Schedule, placement_for, validate
from terapipe_ds.schedule import to_csv as csv_of
from terapipe_ds.schedule.show import many
from terapipe_ds.timeline import Timeline
from terapipe_ds.timeline.export import to_chrome_trace, to_csv
from terapipe_ds.timeline.picture import draw_timelines

if TYPE_CHECKING:
    from terapipe_ds.commands.plan_setup import PlanSetup
    from terapipe_ds.costs.utilisation import Utilisation
    from terapipe_ds.planner import MemoryModel

HELP = "predict the times of a schedule"
DESCRIPTION = "Replay a schedule with given costs: makespan, bubble, live slices, and what the time is spent on."
EXAMPLES = """\
  terapipe simulate --schedule seq1f1b --stages 4 --micro-batches 2 --slices 512,384,128 --unit
  terapipe simulate --schedule seq1f1b --stages 4 --micro-batches 2 --slices 8 \\
                    --sequence-length 2048 --unit --json
  terapipe simulate --schedule terapipe --stages 4 --slices 3,1 --unit --unit-send 0.1 \\
                    --trace trace.json
  # a plan for each micro-batch
  terapipe simulate --schedule gpipe --stages 2 --micro-batches 2 \\
                    --slices 5,3 --slices 4,4 --unit
  terapipe simulate --schedule 1f1b --stages 8 --micro-batches 8 --slices 8 \\
                    --sequence-length 2048 --unit --picture 1f1b.svg
  terapipe simulate --schedule seq1f1b --stages 2 --micro-batches 4 --slices 4 \\
                    --sequence-length 2048 --profile profile.json --timeline predicted.json
  terapipe simulate --schedule terapipe --stages 40 --slices 16 --sequence-length 2048 \\
                    --model gpt3-13b --device v100 --tensor-parallel 8
  # an order found for these costs
  terapipe simulate --schedule search --stages 4 --micro-batches 8 --slices 4 \\
                    --sequence-length 2048 --unit --unit-send 0.05 --order found.csv

With --model it shows the peak of each stage's memory as well: parameters, gradients, Adam's
states in the dtype's usual mixed precision, live slices, keys and values; without ZeRO or
activation checkpointing (`terapipe plan` knows both). --trace opens in ui.perfetto.dev;
`terapipe timeline --against` reads the file of --timeline.
"""


class SimulateOptions(ScheduleOptions):
    exclusive: ClassVar[Mapping[str, bool]] = {"source": True, "costs": True}

    slices: tuple[Text, ...] = option(
        "slice lengths in tokens as 512,384,128, or a number of equal slices with --sequence-length; once, or once per"
        " micro-batch",
        "S",
        action="append",
        required=True,
    )
    sequence_length: int | None = option("tokens of a sequence", "L", ge=1)
    granularity_tokens: int = option("a number of slices cuts at its multiples (default 1)", "G", default=1, ge=1)
    profile: Text | None = option("costs fitted to a measured profile", "FILE", group="costs")
    model: Text | None = option("costs of a model size, computed; needs --device", "NAME", group="costs")
    unit: bool = switch("a stage's forward over the whole sequence takes 1 s, its backward 2 s", group="costs")
    device: Text | None = option("with --model: the device, as v100 or h100", "NAME")
    tensor_parallel: int = option("with --model: ranks per stage (default 1)", "N", default=1, ge=1)
    micro_batch_size: int = option("with --model: sequences (default 1)", "B", default=1, ge=1)
    dtype: Text = option("with --model: bf16, fp16 or fp32 (default: by the device)", "NAME", default="auto")
    links: Text | None = option("with --model: terapipe.links, as fp8 or int8,bf16 (forward, backward)", "F[,B]")
    unit_send: float = option("with --unit: a whole sequence's message (0)", "S", default=0.0, ge=0)
    no_overlap: bool = switch("a stage does nothing else while it sends")
    as_json: JsonOutput | None = json_option()
    trace: Output | None = option("write a Chrome trace (opens in ui.perfetto.dev)", "FILE")
    picture: Picture | None = option("draw to a .png, .svg or .pdf file", "FILE")
    csv: Output | None = option("write the events as CSV", "FILE")
    live_slices: int | None = option(
        "with --schedule search: at most so many live slices on each stage (default: the tokens of unsliced 1F1B)",
        "N",
        ge=1,
    )
    order: OrderFile | None = option("write the order as CSV, for --from-csv and the key terapipe.schedule", "FILE")
    timeline: Output | None = option("write the timeline, for `terapipe timeline --against`", "FILE")


def run(options: SimulateOptions) -> None:
    from terapipe_ds.simulator import simulate

    options.refuse_without("model", "device", "tensor_parallel", "micro_batch_size", "dtype", "links")
    options.refuse_without("unit", "unit_send")
    if options.model is not None and options.device is None:
        raise CommandError("--model needs --device NAME: on which device shall it run?")
    if options.live_slices is not None and options.schedule != SEARCH:
        raise CommandError("--live-slices goes with --schedule search only: give it, or leave it out")
    found: dict[str, Any] = {}
    if options.schedule == SEARCH:
        schedule, plans, costs, memory, found = _search(options)
    else:
        if options.from_csv is None:
            plans = _plans(options, options.micro_batches)
            schedule = options.build([plan.num_slices for plan in plans])
        else:
            schedule = options.load(options.from_csv)
            plans = _plans(options, schedule.num_micro_batches)
        validate(schedule)
        costs, memory = _costs(options, schedule.num_stages, schedule.num_parts, plans)
    timeline = simulate(schedule, plans, costs, memory=memory, overlap=not options.no_overlap)
    _write(options, schedule, timeline)
    rates = None if schedule.forward_only else _utilisation(options, timeline, plans)

    def as_json() -> str:
        told = to_dict(timeline, plans) | found | ({} if rates is None else rates.to_dict())
        return json.dumps(told, indent=1, allow_nan=False)

    if not write_json(as_json, options.as_json):
        from terapipe_ds.costs.devices import device_card

        shown = [] if rates is None else rates.lines(device_card(str(options.device)))
        print("\n".join([*_lines(timeline, plans), *shown, *_found_lines(found, timeline.makespan_s)]))


def _utilisation(options: SimulateOptions, timeline: Timeline, plans: list[SlicePlan]) -> Utilisation | None:
    """Return model FLOP/s and MFU of a training step of a counted model, whose sequences have one length."""
    if options.model is None or len({plan.sequence_length for plan in plans}) > 1:
        return None
    return _counted(options, timeline.num_stages, plans).utilisation(timeline.makespan_s)


def _write(options: SimulateOptions, schedule: Schedule, timeline: Timeline) -> None:
    if options.order:
        write_text(options.order, csv_of(schedule))
    if options.picture:
        draw_timelines([(timeline.name, timeline)], options.picture)
    texts = ((options.trace, to_chrome_trace), (options.csv, to_csv), (options.timeline, type(timeline).to_json))
    for path, make in texts:
        if path:
            write_text(path, make(timeline))


def _search(options: SimulateOptions) -> tuple[Schedule, list[SlicePlan], Any, Any, dict[str, Any]]:
    """Search an order for the costs; return it with its plans, costs and memory, and the line that reports it."""
    from terapipe_ds.planner.orders.find import find_order

    if options.forward_only or options.schedule_options or options.no_overlap:
        what = "--schedule search finds orders of a training step with overlap"
        raise CommandError(f"{what}: leave out --forward-only, --option and --no-overlap")
    plans, chunks = _plans(options, options.micro_batches), options.chunks_per_stage
    stages = options.checked_stages(sum(plan.num_slices for plan in plans))
    costs, memory = _costs(options, stages, len(placement_for(SEARCH, stages, chunks)), plans)
    found = find_order(costs, plans, stages, options.micro_batches, options.live_slices, chunks_per_stage=chunks)
    told = {"order_bound_s": found.lower_bound_s, "named_s": found.named_s, "evaluations": found.evaluations}
    return found.schedule, plans, costs, memory, told


def _found_lines(found: dict[str, Any], makespan_s: float) -> list[str]:
    if not found:
        return []
    bound_s = found["order_bound_s"]
    below = f", {1 - bound_s / makespan_s:.2%} below this makespan" if bound_s > 0 else ""
    named = ", ".join(f"{name} {seconds:.6g} s" for name, seconds in found["named_s"].items()) or "none"
    return [
        f"no order of these slices takes less than {bound_s:.6g} s{below}",
        f"named schedules within the limit: {named}",
    ]


def to_dict(timeline: Timeline, plans: list[SlicePlan]) -> dict[str, Any]:
    """Return the content of --json, in seconds and bytes."""
    names, path = ("stage_id", "action", "start_s", "end_s"), timeline.critical_path or ()
    return {
        "schedule": timeline.name,
        "num_stages": timeline.num_stages,
        "plans": [list(plan.lengths) for plan in plans],
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "stages": _stages(timeline),
        "critical_path": [
            {name: getattr(step.event, name) for name in names} | {"waited_for": step.waited_for} for step in path
        ],
    }


def _stages(timeline: Timeline) -> list[dict[str, Any]]:
    unknown = (None,) * timeline.num_stages
    live, peaks = timeline.peak_live_slices or unknown, timeline.peak_bytes or unknown
    names = ("stage_id", "busy_s", "bubble_fraction", "peak_live_slices", "peak_bytes")
    rows = zip(range(timeline.num_stages), timeline.busy_s(), timeline.bubbles(), live, peaks, strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _lines(timeline: Timeline, plans: list[SlicePlan]) -> list[str]:
    slices = " | ".join(in_runs(plan.lengths) for plan in dict.fromkeys(plans))
    sizes = f"{many(timeline.num_stages, 'stage')}, {many(len(plans), 'micro-batch')}"
    lines = [
        f"{timeline.name}: {sizes}, slices {slices} tokens",
        f"makespan {timeline.makespan_s:.6g} s, bubble {100 * timeline.bubble_fraction:.1f} %",
        "",
        f"{'stage':<6}{'busy s':>12}{'bubble %':>10}{'live slices':>13}" + "      peak GiB" * bool(timeline.peak_bytes),
    ]
    for stage in _stages(timeline):
        live = "-" if stage["peak_live_slices"] is None else stage["peak_live_slices"]
        size = "" if stage["peak_bytes"] is None else f"{stage['peak_bytes'] / 2**30:>14.3f}"
        bubble = 100 * stage["bubble_fraction"]
        lines.append(f"{stage['stage_id']:<6}{stage['busy_s']:>12.6g}{bubble:>10.1f}{live:>13}{size}")
    return [*lines, "", _critical_path(timeline)]


def _critical_path(timeline: Timeline) -> str:
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    names |= {"SA": "activations on links", "SG": "gradients on links"}
    events = [step.event for step in timeline.critical_path or ()]
    by_kind: dict[str, float] = {}
    for event in events:
        by_kind[event.kind] = by_kind.get(event.kind, 0.0) + event.end_s - event.start_s
    shares = ", ".join(f"{names[kind]} {seconds:.6g} s" for kind, seconds in by_kind.items())
    stages = many(len({event.stage_id for event in events}), "stage")
    return f"critical path: {len(events)} steps on {stages}; {shares}"


def _plans(options: SimulateOptions, num_micro_batches: int) -> list[SlicePlan]:
    plans = [_plan(text, options) for text in options.slices]
    if len(plans) not in (1, num_micro_batches):
        given = f"--slices is given {len(plans)} times for {num_micro_batches} micro-batches"
        raise CommandError(f"{given}: give it once, or once for each")
    return plans * num_micro_batches if len(plans) == 1 else plans


def _plan(text: str, options: SimulateOptions) -> SlicePlan:
    length = options.sequence_length
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        raise CommandError(f"--slices {text!r}: give slice lengths as 512,384,128, or a number of slices") from None
    if len(numbers) > 1:
        if "granularity_tokens" in options.given:
            raise CommandError("--granularity-tokens goes with a number of slices only: leave it out")
        plan = SlicePlan(numbers)
        if length not in (None, plan.sequence_length):
            has = f"--slices {text} has {plan.sequence_length} tokens"
            raise CommandError(f"{has}, --sequence-length is {length}: give the same")
        return plan
    if length is None:
        fix = "give --sequence-length too, or the lengths as 512,384,128"
        raise CommandError(f"--slices {text} is a number of slices: {fix}")
    if numbers[0] > MAX_FORWARDS:
        raise CommandError(f"--slices {text}: too many to simulate; ask for at most {MAX_FORWARDS} slices")
    return SlicePlan.equal(length, numbers[0], options.granularity_tokens)


def _wire_formats(text: str | None) -> tuple[str | None, str | None]:
    from terapipe_ds.costs.wire_formats import FORMATS

    forward, _, backward = (text or "").partition(",")
    if forward not in ("", *FORMATS) or backward not in ("", "bf16"):
        raise CommandError(
            f"--links {text!r}: give {', '.join(FORMATS)} for activations, then ,bf16 for gradients or not"
        )
    return forward or None, backward or None


def _costs(
    options: SimulateOptions, num_stages: int, num_parts: int, plans: list[SlicePlan]
) -> tuple[Any, MemoryModel | None]:
    """Return the costs; with `--model` also bytes, counted for Adam without ZeRO or checkpointed activations."""
    if options.profile is not None:
        from terapipe_ds.costs.profile import Profile
        from terapipe_ds.planner.layers.measured_parts import MeasuredParts

        profile = Profile.load(options.profile)
        measured = MeasuredParts.of_profile(profile).for_stages(num_stages).cut(num_parts)
        if measured is None:
            has = f"--profile {options.profile} has {len(profile.parts)} parts"
            raise CommandError(f"{has}, and this schedule needs {num_parts}: give other --stages, or another profile")
        return measured, None
    if options.model is None:
        from terapipe_ds.simulator import UnitCosts

        length, share = max(plan.sequence_length for plan in plans), num_stages / num_parts  # of a stage's layers
        return UnitCosts(length, options.unit_send, share), None
    setup = _counted(options, num_stages, plans)
    assert setup.size is not None and setup.memory_of is not None, "the model is counted"
    if (costs := setup.costs_of(num_parts)) is None:
        has = f"{options.model} has {many(setup.size.num_layers, 'layer')}"
        raise CommandError(f"{has}, and this schedule needs {num_parts} parts: give fewer --stages")
    return costs, setup.memory_of(num_parts)


def _counted(options: SimulateOptions, num_stages: int, plans: list[SlicePlan]) -> PlanSetup:
    """Return the model of `--model` as `terapipe plan` counts it."""
    from terapipe_ds.commands.plan_options import PlanOptions
    from terapipe_ds.commands.plan_setup import counted_setup

    names = ("model", "device", "tensor_parallel", "micro_batch_size", "dtype")
    run: dict[str, Any] = {"stages": num_stages, "micro_batches": len(plans)}
    run |= {"sequence_length": max(plan.sequence_length for plan in plans)}
    formats = _wire_formats(options.links)
    return counted_setup(PlanOptions(**run, **{name: getattr(options, name) for name in names}), formats)
