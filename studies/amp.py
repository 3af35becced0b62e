"""Predicted and measured times of 52 DeepSpeed configurations: `python -m studies.amp`.

AMP (Li et al., NeurIPS 2022, arXiv 2210.07297) published what 52 ways to train a GPT-2 of 24 layers on 16 T4 took.
Here the planner prices the same ways: its counted layers, its links, its replay of 1F1B. What these runs did otherwise
than this project's own models is counted as they did it, from their published scripts: see `MegatronLayers`.

Two constants are fitted, to five of the 47 times: what share of the device's and of the network's data sheet is
reached. Nothing else is fitted to times. The five are the middle ones of each fifth of the published order, which is
AMP's ranking; `--rules` shows what other choices give.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from studies.options import study_parser
from terapipe_ds.costs.analytic import AnalyticCosts, Array
from terapipe_ds.costs.devices import DeviceCard, LinkCard
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import Cluster, Grid
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.parts import Floats, Setting, Span
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced

FILE = Path(__file__).parent / "amp_published.json"
FITTED = 5
USABLE = 0.74
"""The share of a device's memory above which a run is said not to fit.

It is chosen so that all five published failures are above it. The rest is what counted memory does not know: the
context of CUDA, buffers of NCCL, and the allocator's fragments.
"""
# Bytes per score and pass of kernels that are not fused (products, softmax, dropout with its mask of one byte).
_SCORE_BYTES_FORWARD, _SCORE_BYTES_BACKWARD = 13, 19
_FIRST_DECODER, _PIPELINE_LAYERS = 3, 30  # before them: cast, embedding, transpose; after: transpose, norm, head


@dataclass(frozen=True)
class Run:
    """One published configuration; `measured_s` is None where it did not run."""

    layer_cuts: tuple[int, ...]
    micro_batch: int
    tensor: int
    data: int
    pipeline: int
    amp_predicted_s: float
    measured_s: float | None

    def bounds(self, num_layers: int) -> tuple[int, ...]:
        """Return the cut as the planner counts layers: the embedding, the decoder layers, norm and head."""
        return tuple(_planner_layer(cut, num_layers) for cut in self.layer_cuts)


def _planner_layer(cut: int, num_layers: int) -> int:
    if cut == _PIPELINE_LAYERS:
        return num_layers + 2
    embedding = int(cut > 1)
    return embedding + min(max(cut - _FIRST_DECODER, 0), num_layers)


@dataclass(frozen=True)
class Fit:
    """Shares of the data sheets that are reached, and the indices of the runs that they were fitted to."""

    device: float
    network: float
    fitted: tuple[int, ...]


@functools.cache
def published() -> tuple[ModelSize, int, tuple[Run, ...]]:
    """Return the model, the global batch, and all runs in the published order."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    model = document["model"]
    hidden, heads = model["hidden_size"], model["num_heads"]
    size = ModelSize(
        name="gpt2-amp",
        num_layers=model["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        vocab_size=model["vocab_size"],
        max_sequence_length=model["sequence_length"],
        gated_mlp=False,
        bias=True,
        tied_embedding=True,
        positions="learned",
    )
    runs = (Run(**run | {"layer_cuts": tuple(run["layer_cuts"])}) for run in document["runs"])
    return size, document["global_batch"], tuple(runs)


def t4(efficiency: float) -> DeviceCard:
    """Return the card of a T4 on a g4dn.12xlarge, of which so much of the usual efficiencies is reached."""
    card: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["device"]
    for name in ("node_link", "network_link"):
        card[name] = LinkCard(**card[name])
    for name in ("matmul_efficiency", "attention_efficiency", "bandwidth_efficiency"):
        card[name] = min(1.0, efficiency * card[name])
    card["kernel_floor_s"] /= efficiency
    return DeviceCard(**card)


def cluster_of(device: float, network: float) -> Cluster:
    """Return the four machines of four devices, whose links reach so much of their data sheets."""
    card = t4(device)
    within, between = (link.bandwidth_bytes_per_s * network for link in (card.node_link, card.network_link))
    return Cluster(card, 4, 4, within_bytes_per_s=within, between_bytes_per_s=between, node_bytes_per_s=between)


@dataclass(frozen=True)
class _ScoredAttention(AnalyticCosts):
    """Attention of Megatron-LM 1.1.5 without its optional fused kernels, which writes all L x L scores."""

    def _attention_s(self, i: Array, j: Array, backward: bool = False) -> Array:
        pairs = self.micro_batch * self.model.num_heads / self.tensor_parallel * i * (i + j)
        flops = 4 * self.model.head_dim * pairs * (2 if backward else 1)
        products_s = self._roofline_s(flops, np.zeros_like(pairs), 4 if backward else 2, self.device.matmul_efficiency)
        moved = (_SCORE_BYTES_BACKWARD if backward else _SCORE_BYTES_FORWARD) * pairs
        return np.asarray(products_s + self._roofline_s(0.0, moved, 3))


class MegatronLayers(CountedLayers):
    """The layers of the published runs: scores are computed and kept, gradients are summed in fp32.

    Kept are 5 a s^2 b bytes of scores per layer: softmax, dropout's mask and its result (Korthikanti et al., 2022,
    equation 1). Gradients are summed in fp32 as the runs' DeepSpeed JSON says ("fp32_allreduce").
    """

    def layer_costs(self, setting: Setting, recompute: bool) -> Sequence[AnalyticCosts]:
        counted = super().layer_costs(setting, recompute)
        kinds = {
            id(c): _ScoredAttention(**{f.name: getattr(c, f.name) for f in dataclasses.fields(c)}) for c in counted
        }
        return [kinds[id(c)] for c in counted]

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        """Return the counted memory, and the scores."""
        size, parts = self.size, super().memory_of_spans(setting, spans)
        per_layer = 5 * size.num_heads / setting.tensor * size.max_sequence_length * setting.micro_batch
        kept = []
        for part, span in zip(parts, spans, strict=True):
            decoders = sum(0 < layer <= size.num_layers for layer in range(span.start, span.stop))
            per_token = part.slice_bytes_per_token + decoders * per_layer
            kept.append(dataclasses.replace(part, slice_bytes_per_token=per_token))
        return tuple(kept)

    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        summed, moved = super().end_bytes(setting)
        return 2 * summed, moved


def price(run: Run, cluster: Cluster) -> Priced:
    """Return the planner's own prices of a run on the cluster."""
    size, batch, _ = published()
    grid = Grid(run.pipeline, run.data, run.tensor)
    candidate = Candidate(grid, run.micro_batch, batch // run.data // run.micro_batch, 0)
    return Priced(MegatronLayers(size, cluster, "fp16"), cluster, size.max_sequence_length, candidate)


def predict(run: Run, cluster: Cluster) -> tuple[float, int]:
    """Return the seconds of a step, and the most bytes of a device."""
    size, _, _ = published()
    plan = SlicePlan((size.max_sequence_length,))
    score = price(run, cluster).score(run.bounds(size.num_layers), "1f1b", plan, math.inf)
    assert score is not None  # without a limit
    return score.seconds, max(score.peak_bytes)


def fit(runs: Sequence[Run], fitted: Sequence[int] | None = None) -> Fit:
    """Return the two shares with the least squared logarithms of predicted over measured, over five runs.

    A grid of shares is made finer three times around its best.
    """
    indices = tuple(middles(len(runs)) if fitted is None else fitted)
    chosen = [runs[index] for index in indices]

    @functools.cache
    def error(device: float, network: float) -> float:
        cluster = cluster_of(device, network)
        return sum(math.log(predict(run, cluster)[0] / (run.measured_s or math.nan)) ** 2 for run in chosen)

    best, step = (0.5, 0.5), 2.0
    for _ in range(5):
        factors = [step**power for power in (-2, -1, 0, 1, 2)]
        best = min(
            ((best[0] * a, best[1] * b) for a, b in itertools.product(factors, factors)), key=lambda at: error(*at)
        )
        step = math.sqrt(step)
    return Fit(*best, indices)


def middles(count: int) -> list[int]:
    """Return the index in the middle of each fifth."""
    return [(2 * k + 1) * count // (2 * FITTED) for k in range(FITTED)]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> Floats:
    array = np.asarray(values, float)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def report() -> dict[str, Any]:
    """Return the fit, both correlations, and a row per run."""
    _, _, runs = published()
    ran = [run for run in runs if run.measured_s is not None]
    found = fit(ran)
    cluster = cluster_of(found.device, found.network)
    predicted = {run: predict(run, cluster) for run in runs}
    others = [run for index, run in enumerate(ran) if index not in found.fitted]
    measured = [run.measured_s or math.nan for run in others]
    limit = USABLE * cluster.card.memory_bytes
    return {
        "device": found.device,
        "network": found.network,
        "spearman": spearman([predicted[run][0] for run in others], measured),
        "spearman_of_amp": spearman([run.amp_predicted_s for run in others], measured),
        "mean_error": float(
            np.mean([abs(math.log(predicted[run][0] / (run.measured_s or math.nan))) for run in others])
        ),
        "limit_bytes": limit,
        "runs": [
            dataclasses.asdict(run)
            | {"predicted_s": predicted[run][0], "memory_bytes": predicted[run][1]}
            | {"is_fitted": run in [ran[i] for i in found.fitted], "fits": predicted[run][1] <= limit}
            for run in runs
        ],
    }


def rules() -> Iterator[tuple[str, Fit, float]]:
    """Yield, for several ways to choose the five runs, the fit and the rank correlation with the other 42."""
    _, _, runs = published()
    ran = [run for run in runs if run.measured_s is not None]
    last = len(ran) - 1
    choices = {"the middle of each fifth": middles(len(ran)), "the first five": list(range(FITTED))}
    choices["evenly from the first to the last"] = [round(k * last / (FITTED - 1)) for k in range(FITTED)]
    choices |= {
        f"every ninth from number {start + 1}": list(range(start, start + 9 * FITTED, 9)) for start in (0, 2, 6, 8)
    }
    for name, chosen in choices.items():
        found = fit(ran, chosen)
        cluster = cluster_of(found.device, found.network)
        others = [run for index, run in enumerate(ran) if index not in found.fitted]
        times = [run.measured_s or math.nan for run in others]
        yield name, found, spearman([predict(run, cluster)[0] for run in others], times)


def main() -> None:
    parser = study_parser("amp", __doc__, examples="  python -m studies.amp\n  python -m studies.amp --rules")
    parser.add_argument("--rules", action="store_true", help="other ways to choose the five runs")
    arguments = parser.parse_args()
    if arguments.rules:
        print("| five runs | device | network | Spearman of the other 42 |\n|---|---|---|---|")
        for name, found, correlation in rules():
            print(f"| {name} | {found.device:.2f} | {found.network:.2f} | {correlation:.3f} |")
        return
    answer = report()
    print(json.dumps(answer, indent=1) if arguments.json else "\n".join(_table(answer)))


def _table(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"fitted: {found['device']:.3f} of the device's and {found['network']:.3f} of the network's rates. Spearman of "
        f"the other 42: {found['spearman']:.3f} (AMP's own predictions: {found['spearman_of_amp']:.3f}), mean error "
        f"{found['mean_error']:.1%}. Above {found['limit_bytes'] / 1e9:.2f} GB a run is said not to fit."
    )
    yield "\n| tensor x data x pipeline | micro-batch | measured | predicted | AMP | memory | |"
    yield "|---|---|---|---|---|---|---|"
    for run in found["runs"]:
        measured = "-" if run["measured_s"] is None else f"{run['measured_s']:.2f}"
        notes = ["fitted"] * run["is_fitted"] + ["said not to fit"] * (not run["fits"])
        degrees = f"{run['tensor']} x {run['data']} x {run['pipeline']}"
        times = f"{measured} | {run['predicted_s']:.2f} | {run['amp_predicted_s']:.2f}"
        memory = f"{run['memory_bytes'] / 1e9:.1f} GB"
        yield f"| {degrees} | {run['micro_batch']} | {times} | {memory} | {', '.join(notes)} |"


if __name__ == "__main__":
    main()
