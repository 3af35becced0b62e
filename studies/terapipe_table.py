"""TeraPipe's ten settings beside the strategies that the planner finds: `python -m studies.terapipe_table`.

Li et al., "TeraPipe" (ICML 2021, arXiv 2102.07988) chose stages, tensor ranks and replicas by hand for each model,
number of V100 and batch. Each of these ten settings is ranked among the strategies of its question, all under this
package's costs: counted layers, nodes of 8 V100 with 16 GB, and 25 Gb/s for a node's devices together (p3.16xlarge).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from studies.options import study_parser
from studies.paper import FILE, parse_scheme
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.strategy import Cluster, Strategy, rank_strategies
from terapipe_ds.planner.strategy.candidate import Score
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.question import layers_of
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.planner.strategy.space import Choices, Space

DEVICE, DEVICES_PER_NODE = "v100-16gb", 8
NODE_BYTES_PER_S = 25e9 / 8
UNKNOWN = (1, 2, 4, 8, 16, 32)  # equal slices to try if the published ones are not known
KNOWN = {2: (1,), 3: (1,), 10: (16,)}
"""Setting -> slices that are known from elsewhere: only the batch is sliced, or, of (10), in the authors' code."""


@dataclass(frozen=True)
class PublishedSetting:
    """Hold a row of the paper's table 1, with the seconds measured in slices; None: not published as a number."""

    setting: int
    model: str
    devices: int
    global_batch: int
    sequence_length: int
    stages: int
    tensor: int
    data: int
    slices: tuple[int | tuple[int, ...], ...]  # several if they are not known
    measured_s: float | None

    @property
    def question(self) -> tuple[str, int, int, int]:
        """Return the question for the search: settings with the same question share the search."""
        return self.model, self.devices, self.global_batch, self.sequence_length

    @property
    def plans(self) -> list[SlicePlan]:
        """Return the slices to try."""
        length = self.sequence_length
        return [SlicePlan.equal(length, one) if isinstance(one, int) else SlicePlan(one) for one in self.slices]

    def price(self, cluster: Cluster) -> Score:
        """Return the best strategy that the setting allows, with the best cut, placement and ZeRO of the search.

        Micro-batches have one sequence, as in the authors' code. The schedule is this package's for that number of
        slices, or the paper's (all forwards, then all backwards) if that fits in memory.
        """
        layers = layers_of(self.model, cluster, self.sequence_length, "auto")
        limit, choices = float(cluster.card.memory_bytes), Choices(self.stages, self.tensor, self.data)
        space = Space(layers, cluster, self.global_batch, self.sequence_length, limit, choices)
        scores = []
        for candidate in space.candidates():
            priced = Priced(layers, cluster, self.sequence_length, candidate)
            for plan in self.plans if candidate.micro_batch == 1 else ():
                for name in ("1f1b" if plan.num_slices == 1 else "seq1f1b", "terapipe"):
                    proposals = priced.propose(Shape(name), plan.num_slices, limit)
                    scores += [priced.score(cut, Shape(name), plan, limit) for _, cut in proposals]
        return min((score for score in scores if score is not None), key=attrgetter("rank"))


def published_settings() -> list[PublishedSetting]:
    """Return the ten settings of `published.json`."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    results = {row["setting"]: row for row in document["main_results"]}
    return [_setting(row, results[row["setting"]]) for row in document["table1_settings"]]


def _setting(row: dict[str, Any], result: dict[str, Any]) -> PublishedSetting:
    known: tuple[int | tuple[int, ...], ...] = KNOWN.get(row["setting"], UNKNOWN)
    if result["scheme_w"] is not None:
        known = (parse_scheme(result["scheme_w"])[0].lengths,)
    return PublishedSetting(
        row["setting"],
        row["model"].lower(),
        row["n_gpus"],
        row["global_batch"],
        row["seq_len"],
        row["pipe"],
        row["op"],
        row["data"],
        known,
        result["latency_w_s"],
    )


@dataclass(frozen=True)
class Row:
    """Hold a setting beside the best strategy of its question. `rank`: the setting's, from 1 on, of `ranked`."""

    setting: PublishedSetting
    published: Score
    found: Strategy
    rank: int
    ranked: int

    @property
    def ratio(self) -> float:
        """Return the time of the published setting over the time of the best strategy."""
        return self.published.seconds / self.found.predicted_s


def compare(settings: Iterable[PublishedSetting], is_shared: bool = True) -> Iterator[Row]:
    """Yield the settings in the order of their questions; each question is searched once.

    `is_shared`: the devices of a node share its link; otherwise each has the whole rate.
    """
    for question, group in groupby(sorted(settings, key=attrgetter("question")), key=attrgetter("question")):
        model, devices, batch, length = question
        cluster = Cluster(
            DEVICE,
            devices // DEVICES_PER_NODE,
            DEVICES_PER_NODE,
            between_bytes_per_s=NODE_BYTES_PER_S,
            node_bytes_per_s=NODE_BYTES_PER_S if is_shared else None,
        )
        ranked = rank_strategies(model, cluster, global_batch_size=batch, sequence_length=length)
        for setting in group:
            published = setting.price(cluster)
            faster = sum(strategy.predicted_s < published.seconds for strategy in ranked)
            yield Row(setting, published, ranked[0], faster + 1, len(ranked) + 1)


def shape(strategy: Strategy | Score) -> str:
    """Return stages x replicas x tensor ranks, the rows of a micro-batch, and the slices."""
    if isinstance(strategy, Score):
        grid, rows, lengths = strategy.candidate.grid, strategy.candidate.micro_batch, strategy.plan.lengths
    else:
        grid, rows, lengths = strategy.layout, strategy.micro_batch_size, strategy.plans[0].lengths
    count = len(lengths)
    equal = "" if count == 1 or max(lengths) - min(lengths) <= 1 else ", planned"
    degrees = f"{grid.pipe} x {grid.data} x {grid.model}"
    return f"{degrees}, {rows} row{'s' * (rows > 1)}, {count} sl.{equal}"


def table(rows: Iterable[Row]) -> str:
    """Return a line per setting."""
    lines = [
        "| | model, V100, batch | published: PP x DP x TP | s | found | s | ratio | rank | paper's s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.setting.setting):
        given = row.setting
        asked = f"{given.model}, {given.devices}, {given.global_batch}"
        times = f"{shape(row.published)} | {row.published.seconds:.3f} | {shape(row.found)}"
        ends = f"{row.found.predicted_s:.3f} | {row.ratio:.2f} | {row.rank} of {row.ranked}"
        paper = "" if given.measured_s is None else f"{given.measured_s:.3f}"
        lines.append(f"| ({given.setting}) | {asked} | {times} | {ends} | {paper} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = study_parser("terapipe_table", __doc__)
    parser.add_argument(
        "--setting", type=int, choices=range(1, 11), action="append", help="again for more; default: all"
    )
    parser.add_argument("--unshared", action="store_true", help="each device has the whole rate of its node")
    options = parser.parse_args(arguments)
    chosen = [one for one in published_settings() if one.setting in (options.setting or range(1, 11))]
    rows = []
    for row in compare(chosen, not options.unshared):
        print(f"setting {row.setting.setting}", file=sys.stderr, flush=True)
        rows.append(row)
    if options.json:
        print(json.dumps({"rows": [_as_json(row) for row in rows]}, indent=1))
        return
    print(table(rows))


def _as_json(row: Row) -> dict[str, Any]:
    score, found = row.published, row.found.model_dump(mode="json")
    published = {"predicted_s": score.seconds, "schedule": score.shape.schedule, "slices": list(score.plan.lengths)}
    published["partition"] = list(score.bounds)
    strategies = {"published": published, "found": found}
    return {"setting": asdict(row.setting), **strategies, "rank": row.rank, "ranked": row.ranked, "ratio": row.ratio}


if __name__ == "__main__":
    main()
