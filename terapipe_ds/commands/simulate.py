"""``terapipe simulate``: how long a schedule takes with given costs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError, check_output

if TYPE_CHECKING:
    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.schedule import Schedule
    from terapipe_ds.timeline import Timeline

HELP = "predict the times of a schedule"
DESCRIPTION = "Replay a schedule with given costs: makespan, bubble, live slices, and what the time is spent on."
EXAMPLES = """\
  terapipe simulate --schedule seq1f1b --stages 4 --micro-batches 2 --slices 512,384,128 --unit
  terapipe simulate --schedule seq1f1b --stages 4 --micro-batches 2 --slices 8 --sequence-length 2048 --unit --json
  terapipe simulate --schedule terapipe --stages 4 --slices 3,1 --unit --unit-send 0.1 --trace trace.json
  terapipe simulate --schedule gpipe --stages 2 --micro-batches 2 --slices 5,3 --slices 4,4 --unit   (a plan each)
  terapipe simulate --schedule 1f1b --stages 8 --micro-batches 8 --slices 8 --sequence-length 2048 --unit \
--picture 1f1b.svg
  terapipe simulate --schedule seq1f1b --stages 2 --micro-batches 4 --slices 4 --sequence-length 2048 \
--profile profile.json --timeline predicted.json
  terapipe simulate --schedule terapipe --stages 40 --slices 16 --sequence-length 2048 \
--model gpt3-13b --device v100 --tensor-parallel 8

With --model it shows the peak of each stage's memory as well: parameters, gradients, Adam's states in the dtype's usual
mixed precision, live slices, keys and values; without ZeRO or activation checkpointing (`terapipe plan` knows both).
--trace opens in ui.perfetto.dev; --timeline is what `terapipe timeline --against` reads.
"""

_MAX_FORWARDS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    _add_schedule(parser)
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument("--profile", metavar="FILE", help="costs fitted to a measured profile")
    costs.add_argument("--model", metavar="NAME", help="costs of a model size, computed; needs --device")
    costs.add_argument(
        "--unit", action="store_true", help="a stage's forward over the whole sequence takes 1 s, its backward 2 s"
    )
    parser.add_argument("--device", metavar="NAME", help="with --model: the device, as v100 or h100")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="with --model: ranks per stage (default 1)")
    parser.add_argument("--micro-batch-size", type=int, metavar="B", help="with --model: sequences (default 1)")
    parser.add_argument("--dtype", metavar="NAME", help="with --model: bf16, fp16 or fp32 (default: by the device)")
    parser.add_argument("--unit-send", type=float, metavar="S", help="with --unit: a whole sequence's message (0)")
    parser.add_argument("--no-overlap", action="store_true", help="a stage does nothing else while it sends")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (opens in ui.perfetto.dev)")
    parser.add_argument("--picture", metavar="FILE", help="draw to a .png, .svg or .pdf file")
    parser.add_argument("--csv", metavar="FILE", help="write the events as CSV")
    parser.add_argument("--timeline", metavar="FILE", help="write the timeline, for `terapipe timeline --against`")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    from terapipe_ds.commands.show import OPTION_HELP, SCHEDULE_HELP

    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=SCHEDULE_HELP)
    source.add_argument("--from-csv", metavar="FILE", help="read a schedule: a row per stage, cells such as F0.3")
    parser.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches per step (default 1)")
    parser.add_argument(
        "--slices",
        action="append",
        required=True,
        metavar="S",
        help="slice lengths in tokens as 512,384,128, or a number of equal slices with --sequence-length; once,"
        " or once per micro-batch",
    )
    parser.add_argument("--sequence-length", type=int, metavar="L", help="tokens of a sequence")
    parser.add_argument(
        "--granularity-tokens", type=int, metavar="G", help="a number of slices cuts at its multiples (default 1)"
    )
    parser.add_argument("--chunks-per-stage", type=int, metavar="V", help="parts that each stage holds (default 1)")
    parser.add_argument("--option", action="append", metavar="NAME=VALUE", help=OPTION_HELP)
    parser.add_argument("--forward-only", action="store_true", help="the schedule of an evaluation")


def run(arguments: argparse.Namespace) -> None:
    """Simulate, print, and write the files that are asked for."""
    from terapipe_ds.schedule import validate
    from terapipe_ds.simulator import simulate

    _check_options(arguments)
    schedule, plans = _schedule_and_plans(arguments)
    validate(schedule)
    costs, memory = _costs(arguments, schedule, plans), _memory(arguments, schedule)
    timeline = simulate(schedule, plans, costs, memory=memory, overlap=not arguments.no_overlap)
    _write_files(arguments, timeline)
    if arguments.json:
        print(json.dumps(to_dict(timeline, plans), indent=1, allow_nan=False))
    else:
        print("\n".join(_lines(timeline, plans)))


def to_dict(timeline: Timeline, plans: list[SlicePlan]) -> dict[str, Any]:
    """What the command prints with --json; seconds and bytes."""
    return {
        "schedule": timeline.name,
        "num_stages": timeline.num_stages,
        "plans": [list(plan.lengths) for plan in plans],
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "stages": [
            {
                "stage_id": stage_id,
                "busy_s": busy_s,
                "bubble_fraction": bubble,
                "peak_live_slices": timeline.peak_live_slices[stage_id] if timeline.peak_live_slices else None,
                "peak_bytes": timeline.peak_bytes[stage_id] if timeline.peak_bytes else None,
            }
            for stage_id, (busy_s, bubble) in enumerate(zip(timeline.busy_s(), timeline.bubbles(), strict=True))
        ],
        "critical_path": [
            {
                "stage_id": step.event.stage_id,
                "action": step.event.action,
                "start_s": step.event.start_s,
                "end_s": step.event.end_s,
                "waited_for": step.waited_for,
            }
            for step in timeline.critical_path or ()
        ],
    }


def _lines(timeline: Timeline, plans: list[SlicePlan]) -> list[str]:
    shown = " | ".join(",".join(map(str, plan.lengths)) for plan in dict.fromkeys(plans))
    lines = [
        f"{timeline.name}: {_many(timeline.num_stages)}, {_many(len(plans), 'micro-batch')}, slices {shown}",
        f"makespan {timeline.makespan_s:.6g} s, bubble {100 * timeline.bubble_fraction:.1f} %",
        "",
        f"{'stage':<6}{'busy s':>12}{'bubble %':>10}{'live slices':>13}" + "      peak GiB" * bool(timeline.peak_bytes),
    ]
    for stage_id, (busy_s, bubble) in enumerate(zip(timeline.busy_s(), timeline.bubbles(), strict=True)):
        live = timeline.peak_live_slices[stage_id] if timeline.peak_live_slices else "-"
        size = f"{timeline.peak_bytes[stage_id] / 2**30:>14.3f}" if timeline.peak_bytes else ""
        lines.append(f"{stage_id:<6}{busy_s:>12.6g}{100 * bubble:>10.1f}{live:>13}{size}")
    path = timeline.critical_path or ()
    by_kind: dict[str, float] = {}
    for step in path:
        kind = step.event.kind
        by_kind[kind] = by_kind.get(kind, 0.0) + step.event.end_s - step.event.start_s
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    names |= {"SA": "activations on links", "SG": "gradients on links"}
    shares = ", ".join(f"{names[kind]} {seconds:.6g} s" for kind, seconds in by_kind.items())
    stages = _many(len({step.event.stage_id for step in path}))
    return [*lines, "", f"critical path: {len(path)} steps on {stages}; {shares}"]


def _many(count: int, noun: str = "stage") -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def _check_options(arguments: argparse.Namespace) -> None:
    """Options that mean nothing without another one are refused rather than ignored."""
    for option in ("device", "tensor_parallel", "micro_batch_size", "dtype"):
        if getattr(arguments, option) is not None and arguments.model is None:
            raise CommandError(f"--{option.replace('_', '-')} goes with --model only: leave it out")
    if arguments.model is not None and arguments.device is None:
        raise CommandError("--model needs --device NAME: on which device shall it run?")
    if arguments.unit_send is not None and not arguments.unit:
        raise CommandError("--unit-send goes with --unit only: leave it out")
    for option in ("trace", "csv", "timeline"):
        check_output(getattr(arguments, option), f"--{option}")


def _schedule_and_plans(arguments: argparse.Namespace) -> tuple[Schedule, list[SlicePlan]]:
    from terapipe_ds.commands.show import MAX_STAGES, read_options, read_schedule
    from terapipe_ds.schedule import build

    given = [_plan(text, arguments) for text in arguments.slices]
    if arguments.from_csv:
        shape = argparse.Namespace(**vars(arguments) | {"slices": None})  # here they are lengths, not counts
        schedule = read_schedule(shape)
        return schedule, given * schedule.num_micro_batches if len(given) == 1 else given
    if arguments.stages is None:
        raise CommandError("--stages is missing: give the number of pipeline stages")
    num_micro_batches = arguments.micro_batches or (1 if arguments.micro_batches is None else 0)
    if arguments.stages > MAX_STAGES or num_micro_batches > _MAX_FORWARDS:
        many = f"{arguments.stages} stages with {num_micro_batches} micro-batches"
        raise CommandError(f"{many} are too many: ask for at most {MAX_STAGES} stages and {_MAX_FORWARDS} forwards")
    plans = given * num_micro_batches if len(given) == 1 else given
    if len(given) > 1 and len(given) != num_micro_batches:
        raise CommandError(
            f"--slices stands {len(given)} times for {num_micro_batches} micro-batches: give it once, or once for each"
        )
    counts = [plan.num_slices for plan in plans]
    chunks = 1 if arguments.chunks_per_stage is None else arguments.chunks_per_stage
    num_forwards = arguments.stages * sum(counts) * chunks
    if num_forwards > _MAX_FORWARDS:
        raise CommandError(f"{num_forwards} forwards are too many: ask for at most {_MAX_FORWARDS}")
    schedule = build(
        arguments.schedule,
        arguments.stages,
        num_micro_batches,
        counts,
        forward_only=arguments.forward_only,
        chunks_per_stage=chunks,
        **read_options(arguments),
    )
    return schedule, plans


def _plan(text: str, arguments: argparse.Namespace) -> SlicePlan:
    from terapipe_ds.plan import SlicePlan

    length, granularity = arguments.sequence_length, arguments.granularity_tokens
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise CommandError(f"--slices is {text!r}: give slice lengths as 512,384,128, or a number of slices") from None
    if len(numbers) > 1:
        if granularity is not None:
            raise CommandError("--granularity-tokens goes with a number of slices, not with their lengths")
        plan = SlicePlan(tuple(numbers))
        if length is not None and plan.sequence_length != length:
            raise CommandError(f"--slices {text} has {plan.sequence_length} tokens, --sequence-length is {length}")
        return plan
    if length is None:
        raise CommandError(
            f"--slices {text} is a number of slices: give --sequence-length too, or the lengths as 512,384,128"
        )
    if numbers[0] > _MAX_FORWARDS:
        raise CommandError(f"--slices {text}: too many to simulate; ask for at most {_MAX_FORWARDS} slices")
    return SlicePlan.equal(length, numbers[0], 1 if granularity is None else granularity)


def _costs(arguments: argparse.Namespace, schedule: Schedule, plans: list[SlicePlan]) -> Any:
    if arguments.profile is not None:
        from terapipe_ds.costs.fitted import CostModel
        from terapipe_ds.costs.profile import Profile

        return CostModel.from_profile(Profile.load(arguments.profile))
    if arguments.model is not None:
        from terapipe_ds.costs.analytic import analytic_costs

        return analytic_costs(
            arguments.model,
            arguments.device,
            dtype=arguments.dtype or "auto",
            num_stages=schedule.num_parts,
            micro_batch=1 if arguments.micro_batch_size is None else arguments.micro_batch_size,
            tensor_parallel=1 if arguments.tensor_parallel is None else arguments.tensor_parallel,
        )
    from terapipe_ds.simulator import UnitCosts

    tokens = max(plan.sequence_length for plan in plans)
    return UnitCosts(tokens, arguments.unit_send or 0.0, schedule.part_share)


def _memory(arguments: argparse.Namespace, schedule: Schedule) -> Any:
    """With --model: bytes counted from its sizes, for Adam, without ZeRO and activation checkpointing."""
    if arguments.model is None:
        return None
    from terapipe_ds.costs.devices import device_card
    from terapipe_ds.costs.model_sizes import model_size
    from terapipe_ds.planner.memory import MemoryModel

    dtype = device_card(arguments.device).resolve_dtype(arguments.dtype or "auto")
    return MemoryModel.of_model(
        model_size(arguments.model),
        num_stages=schedule.num_parts,
        dtype=DTYPE_NAMES.get(dtype, dtype),
        micro_batch=1 if arguments.micro_batch_size is None else arguments.micro_batch_size,
        tensor_parallel=1 if arguments.tensor_parallel is None else arguments.tensor_parallel,
    )


def _write_files(arguments: argparse.Namespace, timeline: Timeline) -> None:
    from terapipe_ds.files.atomic import write_text
    from terapipe_ds.timeline.export import to_chrome_trace, to_csv
    from terapipe_ds.timeline.picture import draw_timelines

    if arguments.picture:
        draw_timelines([(timeline.name, timeline)], arguments.picture)
    texts = ((arguments.trace, to_chrome_trace), (arguments.csv, to_csv), (arguments.timeline, type(timeline).to_json))
    for path, make in texts:
        if path:
            write_text(path, make(timeline))
