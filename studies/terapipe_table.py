"""The settings of TeraPipe's table beside the strategies that the planner finds: `python -m studies.terapipe_table`.

Li et al. (ICML 2021, arXiv 2102.07988) trained GPT-3 of four sizes on V100 (p3.16xlarge, eight to a node), each with
given numbers of stages, tensor ranks and replicas. Both columns are under the planner's counted costs; nothing here is
measured. A published setting has equal layers per stage, one sequence per micro-batch and the schedule that the paper
describes (all forwards, then all backwards), with the published slices where they are known and else the best equal
ones. It need not fit in memory. What the planner finds does fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from studies.options import study_parser
from studies.paper import FILE, parse_scheme
from terapipe_ds.costs.model_sizes import model_size
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import Cluster, Grid
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.strategy import Strategy, rank_strategies
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.space import Choices

_NODE_BYTES_PER_S = 25e9 / 8  # a p3.16xlarge has 25 Gb/s for its eight devices (AWS, EC2 P3 instances)
_SLICES = (1, 2, 4, 8, 16, 32)
"""Numbers of equal slices that are tried where the published ones are not known."""


@dataclass(frozen=True)
class PublishedSetting:
    """A row of the paper's table 1."""

    number: int
    model: str
    devices: int
    global_batch: int
    sequence_length: int
    grid: Grid
    slices: SlicePlan | None

    @property
    def cluster(self) -> Cluster:
        return Cluster("v100", self.devices // 8, 8, node_bytes_per_s=_NODE_BYTES_PER_S)

    @property
    def choices(self) -> Choices:
        """Return what of a strategy it fixes."""
        return Choices(self.grid.pipe, self.grid.model, self.grid.data)


@dataclass(frozen=True)
class Comparison:
    """A published setting and what was found, both in seconds under our costs."""

    setting: PublishedSetting
    published_s: float
    published_slices: int
    published_bytes: int
    best: Strategy
    ranked: Strategy | None
    """The best that was found with the degrees of the setting."""
    place: int
    """Of `ranked` among all that were ranked, from 1."""


def settings() -> list[PublishedSetting]:
    """Return the ten settings of the table."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    schemes = {row["setting"]: row["scheme_w"] for row in document["main_results"]}
    rows = []
    for row in document["table1_settings"]:
        scheme = schemes.get(row["setting"])
        rows.append(
            PublishedSetting(
                row["setting"],
                row["model"].lower(),
                row["n_gpus"],
                row["global_batch"],
                row["seq_len"],
                Grid(row["pipe"], row["data"], row["op"]),
                None if scheme is None else parse_scheme(scheme)[0],
            )
        )
    return rows


def published_time(setting: PublishedSetting) -> tuple[float, int, int]:
    """Return the seconds of a published setting, its slices and the most bytes of a device."""
    size, grid, cluster = model_size(setting.model), setting.grid, setting.cluster
    layers = CountedLayers(size, cluster)
    own = setting.global_batch // grid.data
    per_stage = size.num_layers // grid.pipe
    bounds = (0, *(1 + per_stage * stage for stage in range(1, grid.pipe)), size.num_layers + 2)
    plans: Sequence[SlicePlan]
    plans = (
        [SlicePlan.equal(setting.sequence_length, count) for count in _SLICES]
        if setting.slices is None
        else [setting.slices]
    )
    scores = []
    for axes in (("pipe", "data", "model"), ("data", "pipe", "model")):
        placed = dataclasses.replace(grid, axes=axes)
        priced = Priced(layers, cluster, setting.sequence_length, Candidate(placed, 1, own, 0))
        scores += [priced.score(bounds, "terapipe", plan, math.inf) for plan in plans]
    best = min((score for score in scores if score is not None), key=lambda score: score.seconds)
    return best.seconds, best.plan.num_slices, max(best.peak_bytes)


def compare(setting: PublishedSetting) -> Comparison:
    """Search the cluster of a setting, with its degrees among those that are ranked."""
    strategies = rank_strategies(
        setting.model,
        setting.cluster,
        global_batch_size=setting.global_batch,
        sequence_length=setting.sequence_length,
        include=[setting.choices],
    )
    degrees = {"pipe": setting.grid.pipe, "data": setting.grid.data, "model": setting.grid.model}
    places = [place for place, strategy in enumerate(strategies, 1) if strategy.grid == degrees]
    ranked = strategies[places[0] - 1] if places else None
    return Comparison(setting, *published_time(setting), strategies[0], ranked, places[0] if places else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_parser("terapipe_table", __doc__)
    parser.add_argument(
        "--setting", type=int, action="append", metavar="N", help="1 to 10, several times; default: all"
    )
    args = parser.parse_args(arguments)
    chosen = [setting for setting in settings() if args.setting is None or setting.number in args.setting]
    if not chosen:
        parser.error(f"--setting {args.setting}: give numbers from 1 to 10")
    if args.json:
        print(json.dumps([_as_dict(compare(setting)) for setting in chosen], indent=1))
        return
    for line in _table(chosen):
        print(line, flush=True)


def _as_dict(row: Comparison) -> dict[str, Any]:
    ranked = None if row.ranked is None else row.ranked.model_dump(mode="json")
    own = {name: getattr(row, name) for name in ("published_s", "published_slices", "published_bytes", "place")}
    names = {"setting": row.setting.number, "model": row.setting.model}
    return names | own | {"best": row.best.model_dump(mode="json"), "ranked": ranked}


def _table(chosen: Sequence[PublishedSetting]) -> Iterator[str]:
    yield "PP x DP x TP, slices; seconds under our costs\n"
    yield "| | model, batch | published | seconds | memory | same degrees | best found | seconds | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for setting in chosen:
        row = compare(setting)
        degrees = f"{setting.grid.pipe} x {setting.grid.data} x {setting.grid.model}, {row.published_slices}"
        sizes, best = row.best.grid, row.best
        found = f"{sizes['pipe']} x {sizes['data']} x {sizes['model']}, {len(best.slices)}"
        found += f", micro-batches of {best.micro_batch_size}" if best.micro_batch_size > 1 else ""
        planned = "none fits" if row.ranked is None else f"{row.ranked.predicted_s:.3f} s (place {row.place})"
        yield (
            f"| {setting.number} | {setting.model}, {setting.global_batch} | {degrees} | {row.published_s:.3f} | "
            f"{row.published_bytes / 1e9:.1f} GB | {planned} | {found} | {best.predicted_s:.3f} | "
            f"{row.published_s / best.predicted_s:.2f} |"
        )


if __name__ == "__main__":
    main()
