"""Measure the costs of each layer of a part: its seconds at every point of the grid, and its share of the bytes.

Layers run one by one, each between two readings of the clock. On a device these readings make it wait for the host. So
the seconds of the layers are scaled until their sum equals the seconds of the part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from terapipe_ds.costs.profile import CostSample, LayerProfile
from terapipe_ds.messages import logger
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import LARGEST
from terapipe_ds.runtime.failures.trials import TrialFailure, Trials
from terapipe_ds.runtime.profiling.key import parameters_of_layer
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
    `trials` this is a collective of tensor-parallel peers, which all get None if one of them fails. TrialError says
    that this rank failed, and that peers wait for it inside of a layer.
    """
    functions = timer.module.forward_funcs
    if not functions:
        return None
    # twice, because other programs disturb some of the clock readings
    runs = []
    for _ in range(_RUNS):
        seconds, failure = _run(timer, of_part, trials or Trials())
        if failure is not None:
            problem = f"the layers of part {timer.part_id} cannot be timed one by one ({str(failure).splitlines()[0]})"
            logger.warning(f"{problem}; only schedules that leave the layers where they are can be planned")
            return None
        runs.append(seconds)
    # clock readings between layers cost time, so scale the layers to their part
    totals = [[sample.forward_s, sample.backward_s, sample.weight_s or 0.0] for sample in of_part]
    fastest = np.min(runs, axis=0)
    scaled = np.maximum(_LEAST_S, _shares(fastest[:, :3]) * np.array(totals)[..., None])
    # the part of each forward that is attention, which layers that recompute may keep
    attention = scaled[:, 0] * np.minimum(0.999, fastest[:, 3] / np.maximum(_LEAST_S, fastest[:, 0]))
    # the bytes come from one more slice, of a middle length
    lengths = sorted({sample.tokens for sample in of_part})
    tokens = lengths[len(lengths) // 2]
    kept = timer.layer_bytes(tokens, with_memory=memory is not None)
    counts = [parameters_of_layer(function) for function in functions]
    memories = [None] * len(kept) if memory is None else shares_of_memory(memory, kept, counts)
    layers = []
    for index, (kind, seen) in enumerate(zip(kinds, kept, strict=True)):
        samples = []
        of_layer = zip(of_part, scaled[..., index].tolist(), attention[:, index].tolist(), strict=True)
        for sample, (forward_s, backward_s, weight_s), attention_s in of_layer:
            w_s = None if sample.weight_s is None else min(weight_s, backward_s)
            times = {"forward_s": forward_s, "backward_s": backward_s, "weight_s": w_s}
            times["attention_s"] = attention_s if seen.attention else None
            samples.append(dataclasses.replace(sample, **times, repeats=_RUNS))
        attention_bytes = seen.attention / tokens
        profile = LayerProfile(tuple(samples), *counts[index], seen.sent / tokens, memories[index], attention_bytes)
        # layers with other attention windows are of other kinds, which their arguments need not show
        layers.append(LayerMeasured(f"{kind}{seen.windows}", profile))
    return tuple(layers)


def _run(
    timer: SliceTimer, points: Sequence[CostSample], trials: Trials
) -> tuple[list[list[list[float]]], TrialFailure | None]:
    """Return the seconds of F, B, W and attention of the layers at each of the points."""
    what, seconds = f"timing the layers of part {timer.part_id} one by one", []
    try:
        for point in points:
            by_layer = timer.layer_seconds(point.tokens, point.prefix)
            seconds.append([*map(list, zip(*by_layer, strict=True))])
    except Exception as error:  # of the model's own code, so of any kind
        timer.store.reset()
        return [], trials.failure(error, what, _WITHOUT)
    return seconds, trials.failure(None, what, _WITHOUT)


def _shares(values: Any) -> Any:
    """Divide by the sums over layers, the last axis; shares are equal where a sum is 0."""
    numbers = np.asarray(values, dtype=float)
    totals = numbers.sum(axis=-1, keepdims=True)
    return np.where(totals > 0, numbers / np.where(totals > 0, totals, 1.0), 1.0 / numbers.shape[-1])


def shares_of_memory(
    whole: PartMemory, kept: Sequence[LayerKept], counts: Sequence[tuple[int, int]]
) -> list[dict[str, float | None]]:
    """Return the memory of each layer, which together equals the part's; `counts` are numbers of parameters.

    Permanent bytes are divided by parameters. The bytes that slices keep are divided by the bytes that each layer was
    seen to keep. The working bytes are the maximum over layers, so each layer has the working bytes of the part.
    """
    by_parameters, by_trained = _shares(list(zip(*counts, strict=True))).tolist()
    of_trained = "gradient_bytes", "step_bytes", "weight_bytes_per_token", "joined_bytes_per_token"
    by = {"static_bytes": by_parameters, **dict.fromkeys(of_trained, by_trained)}
    by_stored, by_kept = _shares([[layer.stored for layer in kept], [layer.kept for layer in kept]]).tolist()
    memories: list[dict[str, float | None]] = [{} for _ in kept]
    for name, value in vars(whole).items():
        is_largest = name.startswith(LARGEST)
        shares = by.get(name, by_stored if "store" in name else by_kept)
        for numbers, share in zip(memories, shares, strict=True):
            numbers[name] = value if value is None or is_largest else share * value
    return memories
