"""Express AMP's measured runs in the planner's terms: the layers of its Megatron-LM, its cluster, its 52 strategies.

The costs are the planner's (`CountedLayers`, `Cluster`, `Priced`, schedule `1f1b`), adapted to AMP's published code
where it differs. Per layer, token and row, h hidden size, a heads, s tokens, t tensor ranks, 2 bytes a number:

  forward     runs twice. Attention is not fused: scores are written, masked, normalised, dropped and read, 17 a s / t
              bytes, in the backward 23. Biases and dropouts have their own kernels: 18 h + 24 h / t bytes, 8 launches
  kept        scores before and after the softmax, after the dropout, and its mask: 7 a s / t; masks of dropouts: 2 h
  loss        overwrites the fp32 logits, which saves 4 bytes per entry of the vocabulary
  reduction   sums the gradients in fp32
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.dapple_model import Array
from terapipe_ds.costs.analytic import AnalyticCosts
from terapipe_ds.costs.devices import DeviceCard, LinkCard
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.cuts import Bounds
from terapipe_ds.planner.layers.parts import Setting, Span, TiedCopy
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.strategy.candidate import Candidate, replay_of
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.simulator import ScheduleShape
from terapipe_ds.strategy import Grid

FILE = Path(__file__).with_name("amp_published.json")
_HALF = 2  # bytes
_FORWARD_SCORES, _BACKWARD_SCORES, _KEPT_SCORES = 17, 23, 7  # bytes per score
_KERNELS = 8  # of a layer's forward, beyond those that the planner counts


@dataclasses.dataclass(frozen=True)
class AmpRun:
    """Hold one strategy, with the seconds that AMP predicted and measured; None if it did not run."""

    layer_cuts: tuple[int, ...]
    micro_batch: int
    tensor: int
    data: int
    pipeline: int
    amp_predicted_s: float
    measured_s: float | None

    @property
    def bounds(self) -> Bounds | None:
        """Return the cut in embedding, decoder layers and head; None if a stage has none of these.

        The layer behind the embedding is a transposition, and the four of the head are one here.
        """
        last = self.layer_cuts[-1] - 4
        inner = (min(max(cut - 1, 1), last - 1) for cut in self.layer_cuts[1:-1])
        bounds = (0, *inner, last)
        return bounds if all(a < b for a, b in itertools.pairwise(bounds)) else None

    def candidate(self, global_batch: int) -> Candidate:
        """Return degrees and micro-batches; DeepSpeed had the axes in the order pipe, data, model."""
        own_batch = global_batch // self.data
        grid = Grid(self.pipeline, self.data, self.tensor)
        return Candidate(grid, self.micro_batch, own_batch // self.micro_batch, zero_stage=0)


@dataclasses.dataclass(frozen=True)
class Constants:
    """Hold the fitted constants: the shares of data sheets that device and network reach, with floors and latencies."""

    device: float = 1.0
    network: float = 1.0


@functools.cache
def published() -> dict[str, Any]:
    """Return the facts of `amp_published.json`."""
    facts: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return facts


@functools.cache
def published_runs() -> tuple[AmpRun, ...]:
    """Return the runs, in the order of AMP's predictions."""
    return tuple(AmpRun(**run | {"layer_cuts": tuple(run["layer_cuts"])}) for run in published()["runs"])


def amp_cluster(constants: Constants) -> Cluster:
    """Return the T4 machines. Shares of peaks, launch floor and latencies come from the package's V100 card."""
    facts, device = published()["cluster"], published()["device"]
    rate, count = constants.network * facts["node_bytes_per_s"], facts["devices_per_node"]
    card = DeviceCard(
        name=device["name"],
        title="NVIDIA T4",
        peak_flops={"fp32": constants.device * device["fp32_flops"], "fp16": constants.device * device["fp16_flops"]},
        memory_bandwidth_bytes_per_s=constants.device * device["memory_bandwidth_bytes_per_s"],
        memory_bytes=device["memory_bytes"],
        kernel_floor_s=6e-6 / constants.device,
        matmul_efficiency=0.55,
        attention_efficiency=0.25,
        bandwidth_efficiency=0.75,
        devices_per_node=count,
        node_link=LinkCard(rate, 1e-5 / constants.network),
        network_link=LinkCard(rate, 2e-5 / constants.network),
    )
    return Cluster(card, facts["nodes"], count, node_bytes_per_s=rate)


def amp_size() -> ModelSize:
    """Return the GPT-2 of the runs."""
    facts = published()["model"]
    hidden, heads = facts["hidden_size"], facts["num_heads"]
    return ModelSize(
        name="gpt2-amp",
        num_layers=facts["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        vocab_size=facts["vocab_size"],
        max_sequence_length=facts["sequence_length"],
        gated_mlp=False,
        bias=True,
        tied_embedding=True,
        positions="learned",
    )


@dataclasses.dataclass(frozen=True)
class DecoderCosts:
    """Cost a decoder layer of AMP's Megatron-LM: the planner's costs, plus the operations that are not fused."""

    counted: AnalyticCosts

    vectorized = True

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of both forwards."""
        return 2 * (self.counted.forward_s(tokens, prefix) + self._unfused_s(tokens, prefix, _FORWARD_SCORES, 1))

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.counted.backward_s(tokens, prefix) + self._unfused_s(tokens, prefix, _BACKWARD_SCORES, 2)

    def _unfused_s(self, tokens: Any, prefix: Any, per_score: int, times: int) -> Any:
        card, size, degree = self.counted.device, self.counted.model, self.counted.tensor_parallel
        scores = size.num_heads / degree * (tokens + prefix)
        elementwise = _HALF * (9 + 12 / degree) * size.hidden_size
        moved = self.counted.micro_batch * tokens * (per_score * scores + times * elementwise)
        reachable = card.memory_bandwidth_bytes_per_s * card.bandwidth_efficiency
        return moved / reachable + times * _KERNELS * card.kernel_floor_s


class AmpLayers(CountedLayers):
    """Cost the embedding, decoder layers and head of AMP's runs."""

    fused_loss = False

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(amp_size(), cluster, "fp16")

    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[Any]:
        embedding, layer, *_, head = super().layer_costs(setting, recompute)
        return [embedding, *[DecoderCosts(layer)] * self.size.num_layers, head]

    def end_bytes(self, setting: Setting) -> tuple[Array, Array]:
        summed, moved = super().end_bytes(setting)
        return 2 * summed, moved  # gradients are summed in fp32

    def tied_copy(self, setting: Setting) -> TiedCopy | None:
        copy = super().tied_copy(setting)
        return copy and copy._replace(summed=2 * copy.summed)

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        size, degree, rows = self.size, setting.tensor, setting.micro_batch
        scores = size.num_heads * size.max_sequence_length / degree
        per_layer = rows * (_KEPT_SCORES * scores + 2 * size.hidden_size)
        parts = []
        for span, part in zip(spans, super().memory_of_spans(setting, spans), strict=True):
            decoders = sum(self._is_decoder(layer) for layer in range(span.start, span.stop))
            in_place = rows * 4 * size.vocab_size / degree if span.stop == self.num_layers else 0.0
            parts.append(
                dataclasses.replace(
                    part,
                    slice_bytes_per_token=part.slice_bytes_per_token + decoders * per_layer,
                    working_bytes_per_token=max(part.working_bytes_per_token - in_place, 0.0),
                    joined_bytes_per_token=0,  # each micro-batch has its own products of weight gradients
                    joined_tokens=0,
                )
            )
        return tuple(parts)


class AmpModel:
    """Apply the planner's costs to AMP's runs, with the two constants."""

    def __init__(self, constants: Constants) -> None:
        self._cluster = amp_cluster(constants)
        self._layers = AmpLayers(self._cluster)
        self._plan = SlicePlan((published()["model"]["sequence_length"],))

    def seconds(self, run: AmpRun) -> float:
        """Return the seconds of a step: the replay of `1f1b`, and then reduction and optimizer of every stage."""
        priced, bounds = self._priced(run)
        parts = priced.parts(bounds, (False,) * run.pipeline, range(run.pipeline))
        replay = replay_of(ScheduleShape("1f1b", run.pipeline, 1), priced.num_micro_batches)
        ends = zip(replay.ends_of_stages(self._plan, parts), priced.ends_s(bounds, range(run.pipeline)), strict=True)
        return max(done_s + end_s for done_s, end_s in ends)

    def most_bytes(self, run: AmpRun) -> int:
        """Return the most bytes that any stage holds."""
        priced, bounds = self._priced(run)
        replay = replay_of(ScheduleShape("1f1b", run.pipeline, 1), priced.num_micro_batches)
        return max(replay.peak_bytes(self._plan, priced.memory(bounds, (False,) * run.pipeline, range(run.pipeline))))

    def _priced(self, run: AmpRun) -> tuple[Priced, Bounds]:
        bounds = run.bounds
        if bounds is None:
            raise ValueError(f"layer_cuts = {run.layer_cuts}: a stage has no parameters; give a run that has bounds")
        layers = self._layers
        candidate = run.candidate(published()["global_batch"])
        return Priced(layers, self._cluster, self._plan.sequence_length, candidate), bounds
