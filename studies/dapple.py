"""Plans for four profiled models on 4 x 8 devices under DAPPLE's costs: `python -m studies.dapple`.

DAPPLE's and PipeDream's published plans, beside those that searches find. Every model comes twice: with the arithmetic
of the published speed-ups, which charges the layer at a border to both stages, and with each layer charged once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from studies.dapple_model import Chain, DappleCluster, PipelinePlan, PublishedModel, plan_s, published, speedup
from studies.dapple_search import LIMITS, Search
from studies.options import study_parser
from terapipe_ds.bench.ranks import progress_bar
from terapipe_ds.costs.devices import device_card
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.layers.chain import LayerChain
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.strategy import DATA_FIRST, PIPE_FIRST, Grid

Finder = Callable[[Chain, DappleCluster], PipelinePlan]
"""What finds a plan. `speedup` and `plan_s` time any plan, also one that another program has found."""


def find_unequal(chain: Chain, cluster: DappleCluster, limits: int = LIMITS) -> PipelinePlan:
    """Return the plan of the check's own search: any number of devices per stage, DAPPLE's three placements."""
    return Search(chain, cluster).best(limits)


def find_uniform(chain: Chain, cluster: DappleCluster) -> PipelinePlan:
    """Return the best plan with equal numbers of devices per stage that the product's programs propose.

    They cut the layers for every number of stages and both placements, with DAPPLE's micro-batches and one rate per
    link; their proposals are then timed under DAPPLE's costs.
    """
    devices = cluster.machines * cluster.devices_per_machine
    card = replace(device_card("v100"), memory_bandwidth_bytes_per_s=1e18)  # DAPPLE's step of the optimizer is free
    own = Cluster(
        card,
        cluster.machines,
        cluster.devices_per_machine,
        within_bytes_per_s=cluster.nvlink_bytes_per_s,
        between_bytes_per_s=cluster.ethernet_p2p_bytes_per_s,
        node_bytes_per_s=cluster.ethernet_collective_bytes_per_s,
        within_latency_s=0,
        between_latency_s=0,
    )
    shares = [[value / devices for value in values] for values in (chain.layer_s, chain.output_bytes)]
    half_s, nothing = [seconds / 2 for seconds in shares[0]], [0.0] * len(chain.layer_s)
    layers = LayerChain(half_s, half_s, shares[1], nothing, chain.parameter_bytes).of_length(1)
    plans = []
    for stages in (count for count in range(1, devices + 1) if devices % count == 0 and count <= layers.num_layers):
        replicas = devices // stages
        for axes in (PIPE_FIRST, DATA_FIRST) if 1 < stages < devices else (PIPE_FIRST,):
            grid = Grid(stages, replicas, 1, axes)
            priced = Priced(layers, own, 1, Candidate(grid, devices // replicas, chain.num_micro_batches, 0))
            of_stages = _devices_of(grid, cluster.devices_per_machine)
            plans += [PipelinePlan(bounds, of_stages) for _, bounds in priced.estimates(1, math.inf)]
    return min(plans, key=lambda plan: plan_s(chain, cluster, plan))


def _devices_of(grid: Grid, per_machine: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage, counted over all machines."""
    places = {at: node * per_machine + device for at, (node, device) in grid.placement(per_machine).items()}
    return tuple(tuple(places[k, replica, 0] for replica in range(grid.data)) for k in range(grid.pipe))


FINDERS: dict[str, Finder] = {"unequal": find_unequal, "uniform": find_uniform}
"""The searches of the table by name, each a row per model and counting: add one to see it beside the others."""


@dataclass(frozen=True)
class PlanRow:
    """Hold a plan of a model. `search_s`: seconds of the search for it; None for a published plan."""

    model: str
    borders: str
    origin: str
    speedup: float
    published: float | None
    search_s: float | None
    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    shape: str


def rows_of(model: PublishedModel, cluster: DappleCluster, finders: dict[str, Finder]) -> Iterator[PlanRow]:
    """Yield the rows of a model, with the published arithmetic first."""
    for borders in ("twice", "once"):
        chain = replace(model.chain, charges_borders_twice=borders == "twice")
        for origin, plan in model.plans.items():
            timed = plan if borders == "twice" else replace(plan, replicas=None)
            number = model.speedups[origin] if borders == "twice" else None
            yield _row(model.name, borders, origin, chain, cluster, timed, number, None)
        for origin, find in finders.items():
            start_s = time.process_time()
            plan = find(chain, cluster)
            yield _row(model.name, borders, origin, chain, cluster, plan, None, time.process_time() - start_s)


def _row(
    model: str,
    borders: str,
    origin: str,
    chain: Chain,
    cluster: DappleCluster,
    plan: PipelinePlan,
    number: float | None,
    search_s: float | None,
) -> PlanRow:
    reached = speedup(chain, cluster, plan)
    return PlanRow(model, borders, origin, reached, number, search_s, plan.cuts, plan.devices, plan.shape)


def markdown(rows: Sequence[PlanRow]) -> str:
    """Return the table, a line per model, counting and origin; long plans are shortened."""
    lines = ["| model | borders | plan of | speed-up | published | layers@devices |", "|---|---|---|---|---|---|"]
    for row in rows:
        number = "" if row.published is None else f"{row.published:.3f}"
        shape = row.shape if len(row.shape) <= 60 else f"{row.shape[:50].rpartition(' ')[0]} ... ({len(row.devices)})"
        lines.append(f"| {row.model} | {row.borders} | {row.origin} | {row.speedup:.3f} | {number} | {shape} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = study_parser("dapple", __doc__)
    cluster, models = published()
    names = [model.name for model in models]
    parser.add_argument("--model", choices=names, action="append", help="one of them, again for more (default: all)")
    parser.add_argument("--limits", type=int, default=LIMITS, metavar="N", help="of the search (default: %(default)s)")
    options = parser.parse_args(arguments)
    finders = FINDERS | {"unequal": partial(find_unequal, limits=options.limits)}
    chosen = [model for model in models if model.name in (options.model or names)]
    rows: list[PlanRow] = []
    with progress_bar(0, sum(2 * len([*model.plans, *finders]) for model in chosen), "plans") as bar:
        for model in chosen:
            for row in rows_of(model, cluster, finders):
                rows.append(row)
                bar.update()
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(markdown(rows))
    for model in chosen:
        taken_s = [row.search_s for row in rows if row.model == model.name and row.search_s is not None]
        print(f"\n{model.name}: {' + '.join(f'{seconds:.1f}' for seconds in taken_s)} s of one core", end="")
    print()


if __name__ == "__main__":
    main()
