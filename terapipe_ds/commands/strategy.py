"""Run `terapipe strategy`: turn a model and a cluster into a strategy, a DeepSpeed JSON and the line that starts it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from terapipe_ds.commands.options import MAX_DEVICES, MAX_FORWARDS, Output, Progress, Text, option, write_json
from terapipe_ds.commands.plan_options import CostOptions
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import DTYPE_NAMES, CommandError, DeepSpeedJson, says_nothing
from terapipe_ds.messages import gib, in_runs, limit_text, show_value
from terapipe_ds.schedule.show import many

if TYPE_CHECKING:
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.planner.strategy import Cluster
    from terapipe_ds.strategy import Strategy

HELP = "find the strategy for a cluster that takes the least time"
DESCRIPTION = (
    "Find the whole strategy for a cluster: stages, tensor and data parallelism, placement, layer cuts, micro-batches, "
    "schedule, slices, recomputation and ZeRO. --stages, --tensor-parallel, --data-parallel, --chunks-per-stage and "
    "--schedule fix that choice. Costs are counted from the model's sizes and a device card, or measured (--profile). "
    "Nothing runs; no GPU is needed."
)
EXAMPLES = """\
  terapipe strategy --model llama-3-70b --device h100 --devices 64 --global-batch 256 \\
                    --sequence-length 32768 --out ds.json --picture strategy.svg
  terapipe strategy --model llama-3-8b --device a100 --devices 16 --global-batch 64 \\
                    --data-parallel 2 --json
"""
_LONGEST_ALARM_S = 1e8  # of what every timer takes
_SHOWN = 10  # strategies in the table
_STAGES_SHOWN = 8  # peaks of memory, one per stage; of more stages the least and the largest
_FIXED = (
    *("stages", "tensor_parallel", "data_parallel", "sequence_parallel", "chunks_per_stage"),
    *("offload_activations", "offload_optimizer"),
)
_ANSWERED = "train_batch_size", "terapipe.planner.memory_limit_gb"  # taken, or an option says another number
_KEYS = {
    **{"micro_batch_size": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"},
    "zero_stage": "zero_optimization.stage",
}
"""The keys of --config for choices without an option."""
_FIXED_BY_CONFIG = {"micro_batch_size": "micro_batch_size", "accumulation": "micro_batches", "zero_stage": "zero_stage"}

_cluster_option, _training, _output = (
    functools.partial(option, group=title) for title in ("cluster", "training", "output")
)


class StrategyOptions(CostOptions):
    helps: ClassVar[Mapping[str, str]] = {
        "profiles": "measured costs (JSON) in place of counted ones; one file per number of tensor ranks and sequences",
        "stages": "pipeline stages (searched)",
        "tensor_parallel": "ranks per stage (searched)",
        "data_parallel": "pipelines side by side (searched)",
        "chunks_per_stage": "parts that each stage holds (searched)",
        "out": "write a whole DeepSpeed JSON",
        "picture": "draw devices, layers and the simulated step to a .png, .svg or .pdf file",
    }

    devices: int = _cluster_option("number of devices in all", "N", 0, ge=1, le=MAX_DEVICES)
    devices_per_node: int = _cluster_option("devices of a node (default: the card's)", "N", 0, ge=1, le=MAX_DEVICES)
    global_batch: int = _training("sequences of a step, of all replicas", "N", 0, ge=1, le=MAX_FORWARDS)
    within_gb_per_s: float | None = _cluster_option(
        "a device's link to others of its node, one way (default: the card's)", "GB/S", gt=0, le=1e9
    )
    between_gb_per_s: float | None = _cluster_option(
        "a device's link to other nodes, one way (default: the card's)", "GB/S", gt=0, le=1e9
    )
    node_gb_per_s: float | None = _cluster_option(
        "all links of a node to other nodes together, if its devices share a network card", "GB/S", gt=0, le=1e9
    )
    sequence_parallel: int = option(
        "ranks that divide the tokens of each slice (searched)", "N", 1, group="model and devices", ge=1
    )
    offload_activations: bool | None = _training("keep what slices save on the host (searched)", "yes|no")
    offload_optimizer: bool | None = _training("keep the optimizer's states of ZeRO-1 on the host (searched)", "yes|no")
    time_limit: float | None = option("print the best strategy so far after S seconds", "S", group="search", gt=0)
    against: Text | None = _output("compare the best strategy with the one in this file", "FILE")
    strategy_out: Output | None = _output("write the strategy, for terapipe.strategy", "FILE")

    @classmethod
    def in_options(cls, text: str) -> str:
        for name, key in _KEYS.items():
            text = text.replace(f"{name} = ", f"{key} = ")
        return super().in_options(text)


class _Question(NamedTuple):
    """Hold the arguments of `rank_strategies`."""

    model: str | list[str]
    cluster: Cluster
    words: dict[str, Any]
    config: Mapping[str, Any]  # of --config


def run(options: StrategyOptions) -> None:
    from terapipe_ds.planner.strategy import TOO_SOON, check_limit, rank_strategies

    question = _question(options)
    other = _other(options, question)
    end_s = time.monotonic() + (options.time_limit or math.inf)
    try:
        with Progress("  (Ctrl-C: the best so far)") as progress, _ended_as_interrupted(options.time_limit):
            strategies = rank_strategies(
                question.model,
                question.cluster,
                progress=progress.callback,
                stop=lambda: time.monotonic() >= end_s,
                **question.words,
            )
    except KeyboardInterrupt:
        if time.monotonic() < end_s:
            raise
        raise CommandError(TOO_SOON) from None
    best = strategies[0]
    if not best.is_complete:
        print("terapipe strategy: the search was stopped; this is the best until then", file=sys.stderr)
    _print_differing(question.config, best)
    if options.out:
        write_text(options.out, json.dumps(best.to_deepspeed(), indent=2) + "\n")
    if options.strategy_out:
        write_text(options.strategy_out, best.to_json() + "\n")
    if options.picture:
        from terapipe_ds.commands.strategy_picture import draw_strategy

        draw_strategy(best, question.model, question.cluster, options.picture)
    if not write_json(lambda: _as_json(strategies, other, options), options.as_json):
        lines = [*_lines(strategies, question, options)]
        if other is not None:
            lines += ["", f"  the best strategy against {options.against}", *_ranking_lines([best, other])]
            limit = check_limit(question.words["memory_limit_gb"], question.cluster)
            lines += ["  2 does not fit in the limit"] if max(other.memory_bytes) > limit else []
        print("\n".join(lines))


@contextlib.contextmanager
def _ended_as_interrupted(time_limit_s: float | None) -> Iterator[None]:
    """Let SIGTERM and the time limit end a search as Ctrl-C does, in the middle of a long replay too."""
    try:
        before = {name: signal.signal(name, signal.default_int_handler) for name in (signal.SIGTERM, signal.SIGALRM)}
    except (ValueError, AttributeError):  # only the main thread has signals, and Windows no alarm
        yield
        return
    try:
        signal.setitimer(signal.ITIMER_REAL, min(time_limit_s or 0.0, _LONGEST_ALARM_S))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for name, handler in before.items():
            signal.signal(name, handler)


def _question(options: StrategyOptions) -> _Question:
    """Return the arguments of the search; raise CommandError that lists every missing option."""
    from terapipe_ds.commands.plan_setup import NO_COSTS, from_config, offloads_optimizer, unknown_names
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.planner.strategy import size_of

    if options.strategy_out and not options.strategy_out.endswith(".json"):
        raise CommandError(
            f"--strategy-out {options.strategy_out}: give a name that ends with .json, as terapipe.strategy needs"
        )
    configured = from_config(options.config, is_measured=bool(options.profiles))
    if "torch_autocast.enabled" in configured.get("unknown", {}) and "dtype" not in options.given:
        why = "the search counts parameters in one dtype, and no autocast"
        raise CommandError(f"torch_autocast.enabled = True in --config: {why}; give --dtype, or take it out")
    section, ds_config = configured.get("section", {}), configured.get("ds_config", {})
    fixed = {
        "global_batch": configured.get("train_batch_size"),
        "sequence_parallel": DeepSpeedJson(ds_config).number("sequence_parallel_size"),
        "offload_activations": section.get("offload_activations"),
        "offload_optimizer": offloads_optimizer(ds_config),
    }
    options = options.filled({name: value for name, value in fixed.items() if value is not None}, configured)
    if options.model and options.profiles:
        raise CommandError("--model and --profile: a profile says which model it is; give one of them")
    missing = [] if options.model or options.profiles else [NO_COSTS]
    if not options.device and (options.model or options.profiles):
        more = ": its memory and links between nodes are not in a profile" if options.profiles else ""
        missing.append(f"--device is missing: give a device card, for example h100{more}")
    if not options.global_batch:
        missing.append("--global-batch is missing: give the number of sequences of a step, of all replicas together")
    if not options.devices:
        missing.append("--devices is missing: give the number of all devices")
    missing += unknown_names(options)
    if missing:
        raise CommandError("; ".join(missing))
    profiles = [Profile.load(path) for path in options.profiles]
    usual = profiles[0].key.sequence_length if profiles else size_of(options.model).max_sequence_length
    words = {name: configured[key] for name, key in _FIXED_BY_CONFIG.items() if key in configured}
    words |= {name: options.given[name] for name in _FIXED if name in options.given} | {
        "global_batch_size": options.global_batch,
        "sequence_length": options.sequence_length or usual,
        "memory_limit_gb": options.memory_limit_gb,
        "dtype": DTYPE_NAMES.get(options.dtype, options.dtype) if options.profiles else options.dtype,
        "schedule": None if options.schedule == "auto" else options.schedule,
    }
    return _Question(list(options.profiles) or options.model, _cluster(options, profiles), words, ds_config)


def _print_differing(given: Mapping[str, Any], best: Strategy) -> None:
    """Print the keys of --config that the search did not take, so that nobody believes that it did."""
    from terapipe_ds.config import TeraPipeConfig

    answer = best.to_deepspeed()
    answer["terapipe"] = TeraPipeConfig(**answer["terapipe"]).model_dump(mode="json")  # with all defaults
    if shown := ", ".join(f"{key} = {show_value(value)}" for key, value in _differing(given, answer)):
        print(f"terapipe strategy: the answer neither keeps nor counts of --config: {shown}", file=sys.stderr)


def _differing(given: Mapping[str, Any], answer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a DeepSpeed JSON, with their values, that the JSON of a strategy lacks or sets otherwise."""
    for key, value in given.items():
        name, other = f"{path}{key}", answer.get(key) if isinstance(answer, dict) else None
        if isinstance(value, dict):
            yield from _differing(value, other, f"{name}.")
        elif not (value in (other, "auto", None) or name in _ANSWERED or (other is None and says_nothing(name, value))):
            yield name, value


def _cluster(options: StrategyOptions, profiles: Sequence[Profile]) -> Cluster:
    from terapipe_ds.costs.devices import device_card
    from terapipe_ds.planner.layers.measured import measured_cluster
    from terapipe_ds.planner.strategy import Cluster

    card = device_card(options.device)
    per_node = options.devices_per_node or min(options.devices, card.devices_per_node)
    if options.devices % per_node:
        fitting = [count for count in range(1, options.devices + 1) if options.devices % count == 0]
        nearest = min(fitting, key=lambda count: (abs(count - per_node), count))
        whole = per_node * max(1, round(options.devices / per_node))
        raise CommandError(
            f"--devices {options.devices}: nodes of {per_node} devices do not make up that many; give a multiple of "
            f"{per_node}, such as {whole}, or --devices-per-node {nearest}"
        )
    nodes = options.devices // per_node
    names = ("within", "between", "node")
    rates = {f"{name}_bytes_per_s": getattr(options, f"{name}_gb_per_s") for name in names}
    links = {name: 1e9 * rate for name, rate in rates.items() if rate is not None}
    for name in names:
        if f"{name}_bytes_per_s" in links and (per_node if name == "within" else nodes) == 1:
            where = "each node has one device" if name == "within" else "all devices are on one node"
            print(f"terapipe strategy: note: --{name}-gb-per-s has no effect: {where}", file=sys.stderr)
    if profiles:
        linked = [one for one in profiles if any(link.num_bytes is not None for link in one.links)]
        return measured_cluster((linked or profiles)[0], nodes, per_node, card, **links)
    return Cluster(card, nodes, per_node, **links)


def _as_json(strategies: Sequence[Strategy], other: Strategy | None, options: StrategyOptions) -> str:
    def entry(strategy: Strategy) -> dict[str, Any]:
        fields = strategy.model_dump(mode="json") | {"grid": strategy.grid, "gap": strategy.gap}
        fields["sequence_length"] = strategy.plans[0].sequence_length
        return fields | ({"slices": strategy.equal_slices} if strategy.equal_slices else {})

    best = strategies[0]
    return json.dumps(
        {
            "strategy": entry(best),
            "deepspeed": best.to_deepspeed(),
            "launch_command": _launch(best, options),
            "placement": [[*coordinate, *place] for coordinate, place in sorted(best.placement.items())],
            "ranking": [entry(strategy) for strategy in strategies[:_SHOWN]],
        }
        | ({} if other is None else {"against": entry(other)}),
        indent=1,
    )


def _lines(strategies: Sequence[Strategy], question: _Question, options: StrategyOptions) -> Iterator[str]:
    best, cluster, words = strategies[0], question.cluster, question.words
    name = question.model if isinstance(question.model, str) else ", ".join(question.model)
    yield f"{name} in {best.dtype} on {cluster.nodes} x {cluster.devices_per_node} x {cluster.card.title}"
    batch, length = words["global_batch_size"], words["sequence_length"]
    source = "measured" if options.profiles else "counted"
    yield f"{many(batch, 'sequence')} of {length} tokens per step, costs {source}"
    yield ""
    yield from _best_lines(best, question)
    yield ""
    yield from _ranking_lines(strategies[:_SHOWN])
    yield ""
    sizes = best.grid
    if sizes["model"] > 1:
        yield f"  module: build it on terapipe_ds.topology_of(strategy), its layers for {sizes['model']} tensor ranks"
    if "sequence" in sizes:
        yield "  module: build it on terapipe_ds.topology_of(strategy), which has sequence ranks"
    elif sizes["model"] == 1 and best.axes[0] == "data" and sizes["pipe"] > 1 and sizes["data"] > 1:
        yield "  module: build it on terapipe_ds.topology_of(strategy), with its order of axes"
    yield "  start:  " + _launch(best, options)
    if options.out:
        yield f"  config: {options.out} (set optimizer and learning rate)"
    if options.strategy_out:
        yield f'  or in your own JSON: "terapipe": {{"enabled": true, "strategy": {json.dumps(options.strategy_out)}}}'
    if not (options.out or options.strategy_out):
        yield "  --out ds.json writes the DeepSpeed JSON, --strategy-out strategy.json the file of terapipe.strategy"


def _launch(best: Strategy, options: StrategyOptions) -> str:
    return best.launch_command("hostfile" if best.num_nodes > 1 else None, config=options.out or "ds.json")


def _best_lines(best: Strategy, question: _Question) -> Iterator[str]:
    from terapipe_ds.planner.strategy import size_of

    sizes, words = best.grid, question.words
    tokens = words["global_batch_size"] * words["sequence_length"]
    chunks = f", {best.chunks_per_stage} parts per stage" if best.chunks_per_stage > 1 else ""
    near = "the replicas of a stage" if best.axes[0] == "pipe" else "the stages of a pipeline"
    side = f", {near} side by side" if sizes["pipe"] > 1 and sizes["data"] > 1 else ""
    inner = best.dims[2], f"{best.inner_axis} rank"
    degrees = ((sizes["pipe"], "stage"), (sizes["data"], "replica"), inner)
    parts = [stop - start for start, stop in itertools.pairwise(best.partition)]
    offloads = (("activations", best.offload_activations), ("optimizer", best.offload_optimizer))
    offloaded = " and ".join(name for name, is_on in offloads if is_on)
    offloaded += f", {best.host_memory_bytes / 2**30:,.0f} GiB on a node's host" if offloaded else ""
    slices = "1"
    if (count := len(best.slices)) > 1:  # 8 x 512 tokens, or 3: 768, 2 x 640 tokens
        slices = f"{in_runs(best.slices)} tokens"
        slices = f"{count}: {slices}" if len(set(best.slices)) > 1 else slices
    size = size_of(question.model) if isinstance(question.model, str) else None
    notes = {} if size is None else size.notes(sizes["model"])
    divided = notes.pop("tensor ranks", "")
    lines = [
        ("step", f"{best.predicted_s:.4g} s predicted, {tokens / best.predicted_s:,.0f} tokens/s"),
        ("", f"lower bound {best.lower_bound_s:.4g} s, gap {best.gap:.1%}"),
        *zip(("rate", "", ""), _rate_lines(best, question), strict=False),
        ("devices", " x ".join(many(size, noun) for size, noun in degrees)),
        *([("", divided)] if divided else []),
        ("placement", f"axes {', '.join(best.axes)}{side}, on {many(best.num_nodes, 'node')}"),
        ("batch", f"{many(best.accumulation, 'micro-batch')} of {many(best.micro_batch_size, 'sequence')} per replica"),
        ("ZeRO", str(best.zero_stage)),
        ("recompute", _again(best)),
        *([("offload", offloaded)] if offloaded else []),
        ("schedule", best.schedule + chunks),
        ("slices", slices),
        ("layers", f"{_part_runs(parts)} (embedding and head count as one each)"),
        *notes.items(),
        *zip(("memory", ""), _memory_lines(best, question), strict=False),
    ]
    yield from (f"  {name:11} {text}" for name, text in lines)


def _rate_lines(best: Strategy, question: _Question) -> list[str]:
    from terapipe_ds.costs.utilisation import Utilisation

    words, cluster = question.words, question.cluster
    per_device = words["global_batch_size"] * words["sequence_length"] / best.predicted_s / cluster.num_devices
    if not best.mfu:
        return [f"{per_device:,.0f} tokens/s per device"]
    return Utilisation(per_device, best.model_flops_per_s, best.mfu).lines(cluster.card)


def _memory_lines(best: Strategy, question: _Question) -> list[str]:
    """Return the peaks by stage beside the limit, and the kinds of bytes on the fullest stage."""
    from terapipe_ds.planner.strategy import check_limit

    given, cluster = question.words["memory_limit_gb"], question.cluster
    card, limit = cluster.card.memory_bytes, check_limit(given, cluster)
    shown = [f"{number / 2**30:.2f}" for number in best.memory_bytes]
    many_stages = len(set(shown)) > _STAGES_SHOWN
    peaks = f"{min(shown, key=float)} to {max(shown, key=float)}" if many_stages else in_runs(shown)
    shown_limit = gib(limit) if given is None else limit_text(limit)
    share = f"{limit / card:.2g} of the card's {card / 2**30:.4g}"
    fullest = best.memory_bytes.index(max(best.memory_bytes))
    kinds = {kind: of[fullest] for kind, of in best.memory_by_kind.items()}
    parts = ", ".join(f"{kind.replace('_', ' ')} {size / 2**30:.1f}" for kind, size in kinds.items() if size > 2**26)
    return [f"{peaks} GiB by stage; limit {shown_limit}, {share}", *([f"stage {fullest}: {parts}"] if parts else [])]


def _ranking_lines(strategies: Sequence[Strategy]) -> list[str]:
    """Return the table: a column for the time, for the memory, and for each choice in which strategies differ."""
    choices = [_choices(strategy) for strategy in strategies]
    columns = [name for name in choices[0] if len({of[name] for of in choices}) > 1]
    rows = [["", "step", "ratio", "GiB", *columns]]
    for place, (strategy, of) in enumerate(zip(strategies, choices, strict=True), 1):
        ratio = strategy.predicted_s / strategies[0].predicted_s
        memory = f"{max(strategy.memory_bytes) / 2**30:.2f}"
        rows.append(
            [str(place), f"{strategy.predicted_s:.4g} s", f"{ratio:.3f}x", memory, *(of[name] for name in columns)]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _again(strategy: Strategy) -> str:
    from terapipe_ds.planner.ranking.report import shown_runs

    again = strategy.recompute
    stages = again if isinstance(again, str) else f"stages {shown_runs(sorted(again))}"
    return stages + ", attention kept" * strategy.keep_attention


def _choices(strategy: Strategy) -> dict[str, str]:
    sizes = strategy.grid
    offloaded = "a" * strategy.offload_activations + "o" * strategy.offload_optimizer
    return {
        "PP": str(sizes["pipe"]),
        "DP": str(sizes["data"]),
        "TP": str(sizes["model"]),
        "SP": str(sizes.get("sequence", 1)),
        "first axis": strategy.axes[0],
        "batch": f"{strategy.accumulation}x{strategy.micro_batch_size}",
        "ZeRO": str(strategy.zero_stage),
        "recompute": _again(strategy),
        "offload": offloaded or "-",
        "schedule": strategy.schedule,
        "parts": str(strategy.chunks_per_stage),
        "slices": str(strategy.plans[0].num_slices),
    }


def _other(options: StrategyOptions, question: _Question) -> Strategy | None:
    """Return the strategy of --against with its predicted time and memory, before a long search begins."""
    if options.against is None:
        return None
    from terapipe_ds.config.strategy_file import read_strategy
    from terapipe_ds.planner.strategy import price_strategy

    try:
        strategy = read_strategy(options.against)
        _check_same_step(strategy, question.words)
        return price_strategy(strategy, question.model, question.cluster)
    except ValueError as error:
        raise CommandError(f"--against {options.against}: {error}") from None


def _check_same_step(strategy: Strategy, words: Mapping[str, Any]) -> None:
    """Refuse a strategy whose step has another number of sequences, or other lengths: their times do not compare."""
    batch = strategy.micro_batch_size * strategy.accumulation * strategy.grid["data"]
    length = strategy.plans[0].sequence_length
    if (batch, length) != (words["global_batch_size"], words["sequence_length"]):
        asked = f"{many(words['global_batch_size'], 'sequence')} of {words['sequence_length']} tokens"
        raise CommandError(
            f"its step has {many(batch, 'sequence')} of {length} tokens, not {asked}; give --global-batch {batch} "
            f"--sequence-length {length}"
        )


def _part_runs(layers: Sequence[int]) -> str:
    """Return the layers of the parts, with equal neighbours written once: `one part of 3 layers, then 13 of 2`."""
    counts = [(size, len(list(group))) for size, group in itertools.groupby(layers)]
    words = [f"{'one' if count == 1 else count} of {size}" for size, count in counts]
    size, count = counts[0]
    words[0] = f"{'one part' if count == 1 else f'{count} parts'} of {many(size, 'layer')}"
    return ", then ".join(words)
