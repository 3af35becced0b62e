"""Measure the costs of each layer of a part: its seconds at every point of the grid, and its share of the bytes.

Layers run one by one, each between two readings of the clock. On a device these readings make it wait for the host. So
the seconds of the layers are scaled until their sum equals the seconds of the part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terapipe_ds.costs.profile import CostSample, LayerProfile
from terapipe_ds.messages import logger
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import LARGEST
from terapipe_ds.runtime.failures.trials import TrialFailure, Trials
from terapipe_ds.runtime.profiling.key import parameters_of_layer
from terapipe_ds.runtime.profiling.rounds import Point
from terapipe_ds.runtime.profiling.slice_timer import LayerKept, SliceTimer

_RUNS = 2  # of each point; the shorter one counts
_LEAST_S = 1e-9  # a layer that does nothing
_WITHOUT = (
    'name a schedule in place of "auto" and leave out terapipe.planner.cache_dir: layers are then not timed one by one'
)


class LayerMeasured(NamedTuple):
    """Hold the measurements of one layer on one rank."""

    kind: str  # layers of the same kind have the same costs
    profile: LayerProfile


def measure_layers(
    timer: SliceTimer,
    kinds: Sequence[str],
    of_part: Sequence[CostSample],
    memory: PartMemory | None = None,
    trials: Trials | None = None,
) -> tuple[LayerMeasured, ...] | None:
    """Return the times of a part's layers at the points of its samples, and their share of its `memory`.

    A part that trains as a whole may fail layer by layer. Then this warns, and returns None and an empty store. With
    `trials` this is a collective of tensor-parallel peers, which all get None if one of them fails.

    Args:
        kinds: of the layers.

    Raises:
        TrialError: this rank failed, and peers wait for it inside of a layer.
    """
    # twice, because other programs disturb some of the clock readings
    functions, runs = timer.module.forward_funcs, []
    for _ in range(_RUNS):
        seconds, failure = _run(timer, [(s.tokens, s.prefix) for s in of_part], trials or Trials())
        if failure is not None:
            problem = f"the layers of part {timer.part_id} cannot be timed one by one ({str(failure).splitlines()[0]})"
            logger.warning(f"{problem}; only schedules that leave the layers where they are can be planned")
            return None
        runs.append(seconds)
    if not functions:
        return None
    # clock readings between layers cost time, so scale the layers to their part
    scaled = [_samples(sample, [run[sample.tokens, sample.prefix] for run in runs]) for sample in of_part]
    # the bytes come from one more slice, of a middle length
    lengths = sorted({sample.tokens for sample in of_part})
    tokens = lengths[len(lengths) // 2]
    kept = timer.layer_bytes(tokens, with_memory=memory is not None)
    counts = [parameters_of_layer(function) for function in functions]
    memories = [None] * len(kept) if memory is None else shares_of_memory(memory, kept, counts)
    layers = []
    for index, (kind, seen) in enumerate(zip(kinds, kept, strict=True)):
        samples = tuple(of_layers[index] for of_layers in scaled)
        profile = LayerProfile(samples, *counts[index], seen.sent / tokens, memories[index])
        # layers with other attention windows are of other kinds, which their arguments need not show
        layers.append(LayerMeasured(f"{kind}{seen.windows}", profile))
    return tuple(layers)


@dataclass(frozen=True)
class _Taken:
    """Hold the times of each layer at one point: F and B, and W, which no prefix changes."""

    both: list[tuple[float, float]]
    weights: list[float]


def _run(
    timer: SliceTimer, points: Sequence[Point], trials: Trials
) -> tuple[Mapping[Point, _Taken], TrialFailure | None]:
    what = f"timing the layers of part {timer.part_id} one by one"
    try:
        lengths = sorted({tokens for tokens, _ in points})
        weights = {tokens: timer.layer_weights(tokens) if timer.can_split else [] for tokens in lengths}
        taken = {point: _Taken(timer.layer_seconds(*point), weights[point[0]]) for point in points}
    except Exception as error:  # of the model's own code, so of any kind
        timer.store.reset()
        return {}, trials.failure(error, what, _WITHOUT)
    return taken, trials.failure(None, what, _WITHOUT)


def _samples(of_part: CostSample, runs: Sequence[_Taken]) -> list[CostSample]:
    """Return the sample of every layer at one point; together they equal the sample of the part."""
    forward_s, backward_s = (
        [min(values) for values in zip(*([both[way] for both in run.both] for run in runs), strict=True)]
        for way in (0, 1)
    )
    forward_s = _scaled(forward_s, of_part.forward_s)
    backward_s = _scaled(backward_s, of_part.backward_s)
    weight_s: list[float | None] = [None] * len(forward_s)
    if of_part.weight_s is not None:
        least = [min(values) for values in zip(*(run.weights for run in runs), strict=True)]
        weight_s = [min(w, b) for w, b in zip(_scaled(least, of_part.weight_s), backward_s, strict=True)]
    return [
        dataclasses.replace(of_part, forward_s=f, backward_s=b, weight_s=w, repeats=len(runs))
        for f, b, w in zip(forward_s, backward_s, weight_s, strict=True)
    ]


def _scaled(seconds: Sequence[float], total_s: float) -> list[float]:
    return [max(_LEAST_S, share * total_s) for share in _shares(seconds)]


def _shares(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total if total > 0 else 1 / len(values) for value in values]


def shares_of_memory(
    whole: PartMemory, kept: Sequence[LayerKept], counts: Sequence[tuple[int, int]]
) -> list[dict[str, float | None]]:
    """Return the memory of each layer, which together equals the part's; `counts` are numbers of parameters.

    Permanent bytes are divided by parameters. The bytes that slices keep are divided by the bytes that each layer was
    seen to keep. The working bytes are the maximum over layers, so each layer has the working bytes of the part.
    """
    by_parameters, by_trained = (_shares([count[which] for count in counts]) for which in (0, 1))
    of_trained = "gradient_bytes", "weight_bytes_per_token", "joined_bytes_per_token"
    by = {"static_bytes": by_parameters, **dict.fromkeys(of_trained, by_trained)}
    by_stored, by_kept = _shares([layer.stored for layer in kept]), _shares([layer.kept for layer in kept])
    memories: list[dict[str, float | None]] = [{} for _ in kept]
    for name, value in vars(whole).items():
        is_largest = name.startswith(LARGEST)
        shares = by.get(name, by_stored if "store" in name else by_kept)
        for numbers, share in zip(memories, shares, strict=True):
            numbers[name] = value if value is None or is_largest else share * value
    return memories
