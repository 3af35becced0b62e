"""Run `terapipe plan`: choose the cuts of a model's sequences for a cluster, without the cluster."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands.options import Progress, write_json
from terapipe_ds.commands.plan_options import PlanOptions
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build, count_parts, to_csv
from terapipe_ds.timeline.picture import draw_timelines

if TYPE_CHECKING:
    from terapipe_ds.commands.plan_setup import PlanSetup
    from terapipe_ds.planner import PlanResult

HELP = "find the slices and the schedule that take the least time on given stages"
DESCRIPTION = (
    "Find where to cut the sequences, and which schedule runs them in the least time within the devices' memory. Costs "
    "are counted from the model's sizes and a device card, or measured (--profile). Nothing runs; no GPU is needed. "
    "`terapipe strategy` also finds stages, tensor and data parallelism for a cluster."
)
EXAMPLES = """\
  terapipe plan --model gpt3-13b --device v100 --stages 40 --tensor-parallel 8 \\
                --micro-batches 32 --sequence-length 2048
  terapipe plan --model llama-3-8b --device h100 --stages 8 --micro-batches 4 \\
                --sequence-length 32768 --activation-checkpointing --schedule seq1f1b \\
                --picture step.svg
  # measured costs
  terapipe plan --profile profile.json --stages 4 --micro-batches 8 --out plan.json
  # batch, dtype and limits of a DeepSpeed JSON
  terapipe plan --model llama-3-8b --device a100 --stages 8 --config ds.json --json
"""
_PLANNED = {"chunks_per_stage", "slices", "granularity_tokens", "partition", "schedule_options"}
"""Keys of the section that follow from the plan, beside `enabled` and `schedule`."""

_ORDER = "order.csv"  # in the printed section, where --order names no file


def run(options: PlanOptions) -> None:
    from terapipe_ds.commands.plan_setup import plan_setup, search_plan
    from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
    from terapipe_ds.costs.devices import device_card
    from terapipe_ds.planner import describe, describe_ranking

    setup = plan_setup(options)
    options = setup.options
    with Progress() as progress:
        result, ranking = search_plan(setup, progress.callback)
    if options.order:
        write_text(options.order, to_csv(result.build(**options.schedule_options)))
    section = _section(result, setup)
    try:  # reads the file of --order; a refused plan leaves no other file
        TeraPipeConfig.from_deepspeed({"terapipe": {} if section["schedule"] == _ORDER else section})
    except TeraPipeConfigError as error:
        raise CommandError(f"settings of --config do not go with this plan: {error}") from None
    if options.out:
        lists = {"version": 1, "plans": [list(plan.lengths) for plan in result.plans]}
        write_text(options.out, (json.dumps(lists) if result.plan is None else result.plan.to_json()) + "\n")
    if options.picture:
        _draw(result, setup, options.picture)
    rates = setup.utilisation(result.predicted_s)

    def as_json() -> str:
        ranked = {} if ranking is None else {"ranking": ranking.to_dicts()}
        document = result.to_dict() | {"setup": setup.title, "terapipe": section} | ranked
        return json.dumps(document | ({} if rates is None else rates.to_dict()), indent=1)

    if write_json(as_json, options.as_json):
        return
    card = device_card(options.device) if options.device else None
    card_bytes = None if card is None else card.memory_bytes
    lines = describe(
        result, schedule_chosen=ranking is not None, card_bytes=card_bytes, limit_gb=options.memory_limit_gb
    )
    if rates is not None and card is not None:
        rows = zip(("rate", "", ""), rates.lines(card), strict=False)
        lines += [f"{name:<9} {text}" for name, text in rows]
    if ranking is not None:
        lines += ["", *describe_ranking(ranking)]
    print("\n".join([setup.title, "", *(f"  {line}".rstrip() for line in lines), ""]))
    if section["schedule"] == _ORDER:
        print(f"  --order {_ORDER} writes the order to the file that follows")
    # lines break between keys, and not within their values
    items = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}".replace(" ", "\0") for key, value in section.items())
    wrap = textwrap.TextWrapper(96, "  ", " " * 15, break_long_words=False, break_on_hyphens=False)
    text = wrap.fill(f'"terapipe": {{{items}}}').replace("\0", " ")
    print(f"  in the DeepSpeed JSON:\n{text}")


def _section(result: PlanResult, setup: PlanSetup) -> dict[str, Any]:
    """Return the section of the DeepSpeed JSON that trains with this plan; equal slices are one number.

    It keeps the settings of `--config` that no plan decides. The order is the one in the file of `--order`; without it,
    the name of a file stands for an order of "search".
    """
    options, plan, granularity = setup.options, result.plan, setup.options.granule
    order = options.order or (result.schedule if result.order is None else _ORDER)
    section = _kept(setup, has_limit=result.recompute is not None) | {"enabled": True, "schedule": order}
    if result.chunks_per_stage > 1:
        section["chunks_per_stage"] = result.chunks_per_stage
    if plan is None:
        section["slices"] = [list(lengths.lengths) for lengths in result.plans]
    elif plan == SlicePlan.equal(plan.sequence_length, plan.num_slices, granularity):
        section |= {"slices": plan.num_slices, "granularity_tokens": granularity}
    else:
        section["slices"] = list(plan.lengths)
    if result.recompute is not None:
        section |= {"recompute": "auto"} | ({"keep_attention": True} if result.keeps_attention else {})
    elif options.given.get("activation_checkpointing"):  # an option goes before the config
        section["recompute"] = "full"
    num_parts = count_parts(result.schedule, result.num_stages, result.chunks_per_stage)
    if (bounds := setup.bounds_of(num_parts)) is not None:
        section["partition"] = list(bounds)
    if options.schedule_options and not options.order:
        section["schedule_options"] = options.schedule_options
    return section


def _kept(setup: PlanSetup, has_limit: bool) -> dict[str, Any]:
    """Return the settings of `--config` that no plan decides, with the limit of the memory that the plan keeps to."""
    section = {key: value for key, value in setup.section.items() if key not in _PLANNED}
    if has_limit or (setup.options.memory_limit_gb is not None and "planner" in section):
        section["planner"] = section.get("planner", {}) | {"memory_limit_gb": setup.options.memory_limit_gb}
    return section


def _draw(result: PlanResult, setup: PlanSetup, path: str) -> None:
    """Draw the step, and above it DeepSpeed's own order of whole sequences, if the layers have costs for it."""
    from terapipe_ds.simulator import simulate

    schedule = result.build(**setup.options.schedule_options)
    counts = " to ".join(map(str, dict.fromkeys((min(result.num_slices), max(result.num_slices)))))
    title = f"{result.schedule}, {counts} slices, simulated"
    timeline = simulate(schedule, result.plans, setup.costs_of_result(result))
    drawn = [(title, timeline)]
    if costs := setup.costs_of(result.num_stages):
        stock, whole = build("1f1b", result.num_stages, result.num_micro_batches, 1), SlicePlan((setup.shape[0],))
        drawn.insert(0, ("1f1b, whole sequences, as DeepSpeed runs them, simulated", simulate(stock, whole, costs)))
    draw_timelines(drawn, path)
