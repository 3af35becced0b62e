"""``terapipe plan``: where to cut the sequences of a model on a cluster, without the cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError, check_output, read_json
from terapipe_ds.commands.show import OPTION_HELP, read_options
from terapipe_ds.plan import show_value

if TYPE_CHECKING:
    from terapipe_ds.planner import MemoryModel, PlanResult

HELP = "find the slices and the schedule that take the least time"
DESCRIPTION = (
    "Find where to cut the sequences, and which schedule runs them in the least time within the devices' memory. Costs "
    "are counted from the model's sizes and a device card, or measured (--profile). Nothing runs; no GPU is needed."
)
EXAMPLES = """\
  terapipe plan --model gpt3-13b --device v100 --stages 40 --tensor-parallel 8 --micro-batches 32 --sequence-length 2048
  terapipe plan --model llama-3-8b --device h100 --stages 8 --micro-batches 4 --sequence-length 32768 \\
                --activation-checkpointing --schedule seq1f1b --picture step.svg
  terapipe plan --profile profile.json --stages 4 --micro-batches 8 --out plan.json     (measured costs)
  terapipe plan --model llama-3-8b --device a100 --stages 8 --config ds.json --json     (batch, dtype, limits of it)
"""


MAX_UNITS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. None stands for "not given", so that --config and --profile can fill it."""
    what = parser.add_argument_group("model and devices")
    what.add_argument("--model", metavar="NAME", help="a named size, for example gpt3-13b or llama-3-8b")
    what.add_argument("--device", metavar="NAME", help="a device card: v100, a100, h100, h200, ...")
    what.add_argument("--profile", metavar="FILE", help="measured costs (JSON) in the place of counted ones")
    what.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    what.add_argument("--tensor-parallel", type=int, metavar="T", help="ranks per stage (default 1)")
    what.add_argument("--sequence-parallel", action="store_true", help="Megatron's, over the tensor-parallel ranks")
    what.add_argument("--data-parallel", type=int, metavar="D", help="pipelines side by side (default 1)")
    batch = parser.add_argument_group("training")
    batch.add_argument("--sequence-length", type=int, metavar="L", help="tokens of a sequence (default: the model's)")
    batch.add_argument("--micro-batches", type=int, metavar="M", help="per step and pipeline (default 1)")
    batch.add_argument("--micro-batch-size", type=int, metavar="B", help="sequences per micro-batch (default 1)")
    batch.add_argument("--dtype", help="fp32, fp16, bf16 (default: what the device is made for)")
    batch.add_argument("--activation-checkpointing", action="store_true", default=None, help="of the decoder layers")
    batch.add_argument("--zero-stage", type=int, choices=(0, 1), help="default 0")
    batch.add_argument("--config", metavar="FILE", help="a DeepSpeed JSON for all of these that are not given")
    search = parser.add_argument_group("search")
    search.add_argument("--schedule", metavar="NAME",
                        help="seq1f1b, 1f1b, terapipe, gpipe, zb-h1, seq1f1b-zb, dapple or auto (default)")
    search.add_argument("--option", action="append", metavar="NAME=VALUE", help=OPTION_HELP)
    search.add_argument("--granularity", type=int, metavar="N", help="cut at multiples of N tokens (default 64)")
    search.add_argument("--max-slices", type=int, metavar="S", help="at most so many slices")
    search.add_argument("--memory-limit-gb", type=float, metavar="GB", help="per device (default: what it has)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print as JSON")
    output.add_argument("--out", metavar="FILE", help="write the plan as JSON")
    output.add_argument("--picture", metavar="FILE", help="draw the simulated step: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> None:
    """Plan, and print what a person or a program wants to know."""
    from terapipe_ds.planner import granularity_for, plan_slices

    if arguments.picture and Path(arguments.picture).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--picture {arguments.picture}: end the name in .png, .svg or .pdf")
    check_output(arguments.out, "--out")
    setup = _setup(arguments)
    options = read_options(arguments) or _options_in_config(arguments.config, setup.schedule)
    granularity = granularity_for(setup.granularity, setup.tensor_parallel, bool(arguments.sequence_parallel))
    result = plan_slices(
        setup.costs, setup.sequence_length, setup.stages, setup.micro_batches, granularity, setup.schedule,
        arguments.max_slices, setup.memory, setup.limit_bytes, progress=_progress if sys.stderr.isatty() else None,
        schedule_options=options,
    )  # fmt: skip
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if arguments.out:
        from terapipe_ds.files import write_text

        write_text(arguments.out, result.plan.to_json() + "\n")
    if arguments.picture:
        _draw(result, setup.costs, arguments.picture, options)
    section = _section(result, granularity) | ({"schedule_options": options} if options else {})
    if arguments.json:
        print(json.dumps(result.to_dict() | {"setup": setup.title, "terapipe": section}, indent=1))
    else:
        print("\n".join(_report(result, setup, section)))


@dataclass
class _Setup:
    """What is planned for, from the options, the profile and the config, in this order of precedence."""

    title: str
    costs: list[Any]
    memory: MemoryModel | None
    limit_bytes: float | None
    sequence_length: int
    stages: int
    micro_batches: int
    tensor_parallel: int
    granularity: int
    schedule: str


def _setup(arguments: argparse.Namespace) -> _Setup:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    profile = _profile(arguments.profile) if arguments.profile else None
    if profile is None and not (arguments.model and arguments.device):
        raise CommandError("no costs: give --model and --device, or --profile with measured costs")
    values: dict[str, Any] = {
        "tensor_parallel": 1, "data_parallel": 1, "micro_batches": 1, "micro_batch_size": 1, "zero_stage": 0,
        "dtype": "auto", "activation_checkpointing": False, "granularity": 64, "schedule": "auto",
    }  # fmt: skip
    asked = _from_config(arguments.config) | given
    if profile is not None:
        _refuse_other_costs(arguments.profile, _from_key(profile.key), asked)
        asked = _from_key(profile.key) | asked
    values |= asked
    if "stages" not in values:
        raise CommandError("--stages is missing: give the number of pipeline stages")
    for name in ("stages", "micro_batches", "micro_batch_size", "tensor_parallel", "data_parallel", "granularity"):
        if values[name] < 1:
            raise CommandError(f"{name.replace('_', '-')} = {values[name]}: give a number >= 1")
    if values["stages"] * values["micro_batches"] > MAX_UNITS:
        many = f"{values['stages']} stages with {values['micro_batches']} micro-batches"
        raise CommandError(f"{many} take too long to plan: ask for stages times micro-batches of at most {MAX_UNITS}")
    return _measured(values, profile) if profile is not None else _counted(values)


def _refuse_other_costs(path: str, measured: dict[str, Any], asked: dict[str, Any]) -> None:
    """Measured costs are those of one dtype and one micro-batch size: no option makes others of them."""
    for name in ("dtype", "micro_batch_size", "tensor_parallel", "activation_checkpointing"):
        wanted, has = (DTYPE_NAMES.get(str(found.get(name)), found.get(name)) for found in (asked, measured))
        if wanted not in (None, "auto", has):
            raise CommandError(
                f"{path} was measured with {name.replace('_', '-')} {has}, asked for is {wanted}: give the same, or "
                "measure again with `terapipe profile`"
            )


def _counted(values: dict[str, Any]) -> _Setup:
    from terapipe_ds.cost_analytic import analytic_costs
    from terapipe_ds.devices import device_card
    from terapipe_ds.model_sizes import model_size

    size, card = model_size(values["model"]), device_card(values["device"])
    costs = analytic_costs(
        size, card, num_stages=values["stages"], dtype=values["dtype"], micro_batch=values["micro_batch_size"],
        tensor_parallel=values["tensor_parallel"], activation_checkpointing=values["activation_checkpointing"],
    )  # fmt: skip
    values = {"sequence_length": size.max_sequence_length, "limit_bytes": card.memory_bytes} | values
    if size.positions == "learned" and values["sequence_length"] > size.max_sequence_length:
        raise CommandError(
            f"--sequence-length {values['sequence_length']}: {size.name} has learned positions for "
            f"{size.max_sequence_length} tokens; give at most that many"
        )
    dtype = card.resolve_dtype(values["dtype"])
    devices = values["stages"] * values["tensor_parallel"] * values["data_parallel"]
    title = f"{size.name} in {dtype} on {devices} x {card.title}, costs counted"
    return _finished(title, list(costs), _memory(values, dtype), values)


def _measured(values: dict[str, Any], profile: Any) -> _Setup:
    from terapipe_ds.cost_model import CostModel

    models: list[Any] = CostModel.from_profile(profile)
    if len(models) == 1:
        models *= values["stages"]
    if len(models) != values["stages"]:
        raise CommandError(
            f"--stages {values['stages']}: {values['profile']} has {len(models)} parts; give --stages {len(models)}"
        )
    title = f"{profile.key.model} in {profile.key.dtype} on {profile.key.device}, costs measured"
    smallest = max(model.min_tokens for model in models)
    if values["granularity"] < smallest:  # constant below: said, since no plan of shorter slices can then be trusted
        title += f"\nslices of fewer than {smallest} tokens were not measured and count as {smallest}"
    memory = _memory(values, profile.key.dtype) if values.get("model") else None
    if values.get("device"):
        from terapipe_ds.devices import device_card

        values = {"limit_bytes": device_card(values["device"]).memory_bytes} | values
    return _finished(title, models, memory, values)


def _memory(values: dict[str, Any], dtype: str) -> MemoryModel:
    from terapipe_ds.model_sizes import model_size
    from terapipe_ds.planner import MemoryModel

    return MemoryModel.of_model(
        model_size(values["model"]), num_stages=values["stages"], dtype=DTYPE_NAMES.get(dtype, dtype),
        micro_batch=values["micro_batch_size"], tensor_parallel=values["tensor_parallel"],
        data_parallel=values["data_parallel"], zero_stage=values["zero_stage"],
        activation_checkpointing=values["activation_checkpointing"],
        sequence_parallel=values["sequence_parallel"],
    )  # fmt: skip


def _finished(title: str, costs: list[Any], memory: MemoryModel | None, values: dict[str, Any]) -> _Setup:
    limit_gb = values.get("memory_limit_gb")
    if limit_gb is not None and memory is None:
        raise CommandError(f"--memory-limit-gb {limit_gb}: measured costs say nothing of memory; give --model as well")
    limit_bytes = values.get("limit_bytes") if limit_gb is None else limit_gb * 1e9
    parallel = f"{values['stages']} stages, tensor parallel {values['tensor_parallel']}"
    parallel += f", data parallel {values['data_parallel']}" if values["data_parallel"] > 1 else ""
    count, rows, length = values["micro_batches"], values["micro_batch_size"], values["sequence_length"]
    title += f"\n{parallel}, {count} micro-batch{'es' * (count != 1)} of {rows} x {length} tokens"
    return _Setup(
        title, costs, memory, limit_bytes if memory is not None else None, length, values["stages"], count,
        values["tensor_parallel"], values["granularity"], values["schedule"],
    )  # fmt: skip


def _profile(path: str) -> Any:
    from terapipe_ds.cost_profile import Profile

    return Profile.load(path)


def _from_key(key: Any) -> dict[str, Any]:
    found = {
        "stages": key.num_stages, "tensor_parallel": key.tensor_parallel, "micro_batch_size": key.micro_batch,
        "dtype": key.dtype, "activation_checkpointing": key.activation_checkpointing,
        "sequence_length": key.sequence_length,
    }  # fmt: skip
    return found


def _from_config(path: str | None) -> dict[str, Any]:
    """What a DeepSpeed JSON says; its terapipe section is validated as the engine does, enabled or not."""
    if path is None:
        return {}
    from terapipe_ds.config import TeraPipeConfig

    config = read_json(path, "--config")
    if not isinstance(config.get("terapipe", {}), dict):
        raise CommandError(f"{path}: terapipe = {show_value(config['terapipe'])}: give an object")
    section = TeraPipeConfig.from_deepspeed({"terapipe": config.get("terapipe", {}) | {"enabled": False}})
    found = {
        "micro_batches": _count(path, config, "gradient_accumulation_steps", 1),
        "micro_batch_size": _count(path, config, "train_micro_batch_size_per_gpu", 1),
        "zero_stage": _count(path, _object(path, config, "zero_optimization"), "stage", 0),
        "granularity": section.granularity_tokens,
        "memory_limit_gb": section.planner.memory_limit_gb,
        "schedule": section.schedule if "schedule" in config.get("terapipe", {}) else None,
        "dtype": next((name for name in ("bf16", "fp16") if _object(path, config, name).get("enabled") is True), None),
        "activation_checkpointing": _object(path, config, "pipeline").get("activation_checkpoint_interval", 0) != 0
        or None,
    }
    return {name: value for name, value in found.items() if value not in (None, "auto")}


def _options_in_config(path: str | None, schedule: str) -> dict[str, Any]:
    """Those of ``--config``, where they are for this schedule."""
    from terapipe_ds.config import TeraPipeConfig

    if path is None:
        return {}
    config = read_json(path, "--config")
    section = TeraPipeConfig.from_deepspeed({"terapipe": config.get("terapipe", {}) | {"enabled": False}})
    return section.options_of(schedule)


def _count(path: str, config: dict[str, Any], key: str, least: int) -> int | None:
    """None where it is not given, or "auto"."""
    value = config.get(key)
    if value in (None, "auto"):
        return None
    if type(value) is not int or value < least:
        raise CommandError(f"{path}: {key} = {show_value(value)}: give an integer >= {least}")
    return value


def _object(path: str, config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CommandError(f"{path}: {key} = {show_value(value)}: give an object")
    return value


def _section(result: PlanResult, granularity: int) -> dict[str, Any]:
    """What to put in the DeepSpeed JSON to train with this plan: a number where the slices are equal."""
    from terapipe_ds.plan import SlicePlan

    plan = result.plan
    head: dict[str, Any] = {"enabled": True, "schedule": result.schedule}
    if plan == SlicePlan.equal(plan.sequence_length, plan.num_slices, granularity):
        return head | {"slices": plan.num_slices, "granularity_tokens": granularity}
    return head | {"slices": list(plan.lengths)}


def _report(result: PlanResult, setup: _Setup, section: dict[str, Any]) -> list[str]:
    from terapipe_ds.planner.report import describe

    lines = describe(result, schedule_chosen=setup.schedule == "auto")
    paste = f'"terapipe": {json.dumps(section)}'
    return [setup.title, "", *(f"  {line}" for line in lines), "", "  in the DeepSpeed JSON:", f"  {paste}"]


def _draw(result: PlanResult, costs: list[Any], path: str, options: dict[str, Any]) -> None:
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import simulate

    count = result.plan.num_slices
    schedule = build(result.schedule, result.num_stages, result.num_micro_batches, count, **options)
    title = f"{result.schedule}, {count} slices, simulated"
    simulate(schedule, result.plan, costs).draw(path, title=title)


def _progress(what: str, done: int, of: int) -> None:
    share = min(done / of, 1.0) if of else 1.0
    print(f"\r\x1b[Kplanning {what} {share:4.0%}", end="", file=sys.stderr, flush=True)
