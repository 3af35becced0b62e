"""Published runs against the planner's predictions: `python -m studies.published`.

`published_configurations.json` has the runs with their sources. Every strategy is priced as it was published, with the
shipped device cards: no constant is fitted to a run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from studies.options import study_parser
from terapipe_ds.costs.analytic import AnalyticCosts
from terapipe_ds.costs.model_sizes import Experts, ModelSize, model_size
from terapipe_ds.costs.utilisation import Utilisation
from terapipe_ds.plan import SlicePlan, split_evenly
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.parts import Again, Floats, Setting
from terapipe_ds.planner.strategy import Cluster, price_strategy
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.strategy import Grid, Strategy

FILE = Path(__file__).with_name("published_configurations.json")
_NODE = 8  # devices
_FIELDS = "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold a number that was reported, seconds or a ratio, beside the predicted one."""

    name: str
    reported: float
    predicted: float
    mfu: tuple[float, float] | None = None  # reported and predicted, by the planner's count of FLOPs

    @property
    def error(self) -> float:
        return self.predicted / self.reported - 1


def published() -> dict[str, Any]:
    """Return the published runs."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def runs() -> Iterator[Row]:
    """Yield the step time of every run of a large model."""
    for run in published()["runs"]:
        size, length = size_of_run(run["model"], run["sequence"]), run["sequence"]
        devices = run.get("context", 1) * run["grid"][0] * run["grid"][1] * run["grid"][2]
        cluster = Cluster(run["device"], max(1, devices // _NODE), _NODE)
        seconds = _context_s(run, size, cluster) if "context" in run else _priced(_strategy(run, size), size, cluster)
        reported = reported_s(run, size, devices)
        step = run["global_batch"], length
        used = [Utilisation.of(size, cluster.card, run["dtype"], step, s, devices).mfu for s in (reported, seconds)]
        yield Row(run["name"], reported, seconds, (used[0], used[1]))


def networks() -> Iterator[Row]:
    """Yield the step time of one pipeline on every network."""
    of = published()["networks"]
    size, stages = size_of_run(of["model"], of["sequence"]), of["stages"]
    run = of | {"grid": [stages, 1, 1], "micro_batch": 1, "global_batch": of["accumulation"], "recompute": "full"}
    strategy = _strategy(run | {"chunks": 1}, size, per_node=1, schedule="gpipe")
    for row in of["rows"]:
        rate, delay_s = row["bits_per_s"] / 8, row["delay_s"]
        cluster = Cluster(of["device"], stages, 1, between_bytes_per_s=rate, between_latency_s=delay_s)
        name = f"{row['bits_per_s'] / 1e9:g} Gb/s, {1e3 * delay_s:g} ms"
        yield Row(name, row["step_s"], _priced(strategy, size, cluster))


def schedules() -> Iterator[Row]:
    """Yield the speed of every schedule relative to 1F1B, for a model with experts on several ranks.

    A rank with its share of the experts computes with the tokens of all ranks: as many as if it had them all. Only
    their weights take less time and memory. Exchanged tokens are not counted.
    """
    of = published()["schedules"]
    whole = model_size(of["model"])
    assert whole.experts is not None
    size = dataclasses.replace(whole, experts=Experts(of["experts_per_rank"], whole.experts.per_token))
    grid = [of["stages"], of["replicas"], 1]
    run = of | {"grid": grid, "micro_batch": 1, "global_batch": of["accumulation"] * of["replicas"], "recompute": "off"}
    cluster = Cluster(of["device"], grid[0] * grid[1] // _NODE, _NODE)
    base_s = 0.0
    for row in of["rows"]:
        seconds = _priced(_strategy(run | row, size, schedule=row["schedule"]), size, cluster)
        base_s = base_s or seconds
        yield Row(row["published_name"], row["reported"], base_s / seconds)


@functools.cache
def tables_of_rows() -> dict[str, list[Row]]:
    """Return the rows of every table, by its name."""
    return {"runs": list(runs()), "networks": list(networks()), "schedules": list(schedules())}


def size_of_run(numbers: Sequence[int], length: int) -> ModelSize:
    """Return the model of a run: GPT-3's layers, or Llama's where key and value heads are fewer."""
    is_gpt = numbers[2] == numbers[3]
    fields: dict[str, Any] = dict(zip(_FIELDS, numbers, strict=True))
    if is_gpt:
        fields |= {"gated_mlp": False, "bias": True, "tied_embedding": True, "positions": "learned"}
    return ModelSize(name="published", max_sequence_length=length, **fields)


def reported_s(run: dict[str, Any], size: ModelSize, devices: int) -> float:
    """Return the seconds of a step, from a rate where the source has one."""
    reported, batch, length = run["reported"], run["global_batch"], run["sequence"]
    if "step_s" in reported:
        return float(reported["step_s"])
    if "tflops" in reported:
        return batch * size.training_flops(length) / (1e12 * reported["tflops"] * devices)
    # arXiv 2104.04473, equation 3: attention counts whole squares
    layers, hidden, vocabulary = size.num_layers, size.hidden_size, size.vocab_size
    more = length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96 * batch * length * layers * hidden**2 * (1 + more)
    return float(flops / (1e12 * reported["tflops_with_recomputation"] * devices))


def _strategy(run: dict[str, Any], size: ModelSize, *, per_node: int = _NODE, schedule: str = "") -> Strategy:
    stages, replicas, tensor = run["grid"]
    return Strategy(
        axes=["pipe", "data", "model"],
        dims=[stages, replicas, tensor],
        devices_per_node=per_node,
        partition=cuts(size.num_layers, stages * run["chunks"]),
        schedule=schedule or ("interleaved" if run["chunks"] > 1 else "1f1b"),
        chunks_per_stage=run["chunks"],
        slices=[run["sequence"]],
        micro_batch_size=run["micro_batch"],
        accumulation=run["global_batch"] // replicas // run["micro_batch"],
        recompute=run["recompute"],
        zero_stage=1 if run["dtype"] == "bfloat16" and replicas > 1 else 0,
        dtype=run["dtype"],
        predicted_s=0.0,
        lower_bound_s=0.0,
        memory_bytes=[],
    )


def cuts(layers: int, parts: int) -> list[int]:
    """Return equal numbers of decoder layers per part, with embedding and head beside the first and last of them.

    Where that does not come out even, embedding and head count as layers.
    """
    if layers % parts == 0:
        return [0, *(1 + layers // parts * part for part in range(1, parts)), layers + 2]
    return list(itertools.accumulate(split_evenly(layers + 2, parts), initial=0))


def _priced(strategy: Strategy, size: ModelSize, cluster: Cluster) -> float:
    return price_strategy(strategy, size, cluster).predicted_s


# --- ranks that divide a sequence, beside tensor ranks: the engine has no such stages


class _ContextCosts(AnalyticCosts):
    """Count the costs where ranks gather the keys and values of all tokens over the network."""

    def _exchange_s(self, i: Any) -> Any:
        moved = self.micro_batch * i * 2 * self._kv_heads() * self.model.head_dim * self._item
        ranks = self.sequence_parallel
        return (ranks - 1) / ranks * moved / self.link.bandwidth_bytes_per_s + self.link.latency_s


class _ContextLayers(CountedLayers):
    ranks = 1

    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[AnalyticCosts]:
        costs = super().layer_costs(setting, recompute)
        kinds = {id(cost): _ContextCosts(**vars(cost) | {"sequence_parallel": self.ranks}) for cost in costs}
        return [kinds[id(cost)] for cost in costs]

    def output_bytes(self, setting: Setting) -> Floats:
        return super().output_bytes(setting) / self.ranks


def _context_s(run: dict[str, Any], size: ModelSize, cluster: Cluster) -> float:
    """Return the seconds if `context` ranks divide a sequence, with the places and sums of replicas."""
    stages, replicas, tensor = run["grid"]
    layers = _ContextLayers(size, cluster, run["dtype"])
    layers.ranks = run["context"]
    grid = Grid(stages, replicas * run["context"], tensor)
    candidate = Candidate(grid, run["micro_batch"], run["global_batch"] // replicas // run["micro_batch"], 1)
    priced = Priced(layers, cluster, run["sequence"], candidate)
    parts, whole = cuts(size.num_layers, stages * run["chunks"]), SlicePlan((run["sequence"],))
    score = priced.price(tuple(parts), Shape("interleaved", run["chunks"]), whole, [Again.OFF] * stages)
    assert score is not None  # without a time to beat
    return score.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every run with its error."""
    options = study_parser("published", __doc__).parse_args(arguments)
    tables = tables_of_rows()
    if options.json:
        shown = {name: [dataclasses.asdict(row) | {"error": row.error} for row in of] for name, of in tables.items()}
        print(json.dumps(shown, indent=1))
        return
    heads = {"runs": "run | reported | predicted | error | MFU reported | predicted"}
    heads |= {"networks": "network | reported | predicted | error"}
    heads |= {"schedules": "schedule | reported | predicted | error"}
    for name, rows in tables.items():
        print(f"| {heads[name]} |\n|{'---|' * (heads[name].count('|') + 1)}")
        for row in rows:
            unit = "x" if name == "schedules" else " s"
            used = "".join(f" {share:.1%} |" for share in row.mfu or ())
            print(f"| {row.name} | {row.reported:.2f}{unit} | {row.predicted:.2f}{unit} | {row.error:+.1%} |{used}")
        errors = [abs(row.error) for row in rows]
        print(f"\nmedian of the errors {statistics.median(errors):.1%}, largest {max(errors):.1%}\n")


if __name__ == "__main__":
    main()
