"""The equality contract: how far apart two training runs are, and how far they may be.

A relative error is the maximum over tensors of ||a - b|| / max(||b||, 1e-3 * the largest ||b|| among tensors
of that kind): tensors that are nothing but rounding noise next to the others do not count. What is missing,
has another shape or is not finite has an infinite error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.distributed.cases import Case

KINDS = ("loss", "gradient", "parameter", "evaluation", "returned", "norm")
FLOOR = 1e-3
BF16_EPS = 2.0**-7
BF16_GRADIENT_CAP = 0.1


@dataclass
class RankRecord:
    """What one rank of a training run has seen. Parameter names count layers over the whole model."""

    rank: int
    stage_id: int
    data_parallel_id: int
    engine: str
    losses: list[float] = field(default_factory=list)  # of each step; last stage only
    evaluations: list[float] = field(default_factory=list)  # last stage only
    returned: list[float] = field(default_factory=list)  # what train_batch() returned
    norms: list[float] = field(default_factory=list)  # of the whole gradient, where the optimizer tells
    gradients: dict[int, dict[str, npt.NDArray[np.floating]]] = field(default_factory=dict)  # by step, name
    parameters: dict[str, npt.NDArray[np.floating]] = field(default_factory=dict)

    def tensors(self) -> dict[str, dict[str, npt.NDArray[np.floating]]]:
        """All values by kind, then by a name that is the same in every run of the same training."""
        pipeline = f"pipeline {self.data_parallel_id}"
        by_kind: dict[str, dict[str, npt.NDArray[np.floating]]] = {kind: {} for kind in KINDS}
        for kind, values, where in (
            ("loss", self.losses, pipeline),
            ("evaluation", self.evaluations, "all pipelines"),
            ("returned", self.returned, "all pipelines"),
            ("norm", self.norms, "all pipelines"),
        ):
            by_kind[kind] = {f"{where}, #{index + 1}": np.asarray(value) for index, value in enumerate(values)}
        by_kind["parameter"] = dict(self.parameters)
        for step, gradients in self.gradients.items():
            by_kind["gradient"].update({f"step {step}: {name}": value for name, value in gradients.items()})
        return by_kind


@dataclass(frozen=True)
class Worst:
    """The largest error of one kind, and where it is."""

    error: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return f"{self.error:.2e} ({self.where})"


def errors(run: Sequence[RankRecord], reference: Sequence[RankRecord], nothing: float = 0.0) -> dict[str, Worst]:
    """The worst error of each kind. Every rank's copy of a tensor is compared with the reference's."""
    expected: dict[str, dict[str, npt.NDArray[np.floating]]] = {kind: {} for kind in KINDS}
    for record in reference:
        for kind, tensors in record.tensors().items():
            expected[kind] = {**tensors, **expected[kind]}
    found: dict[str, Worst] = {}
    names: dict[str, set[str]] = defaultdict(set)
    for kind in KINDS:
        worst = [Worst()]
        for record in run:
            tensors = record.tensors()[kind]
            names[kind] |= set(tensors)
            error = worst_error(tensors, expected[kind], nothing)
            worst.append(Worst(error.error, f"rank {record.rank}, {error.where}"))
        lacking = sorted(set(expected[kind]) - names[kind])
        worst += [Worst(math.inf, f"no rank has {name}") for name in lacking]
        found[kind] = max(worst, key=lambda each: each.error)
    return found


def worst_error(tensors: Mapping[str, Any], expected: Mapping[str, Any], nothing: float = 0.0) -> Worst:
    """The worst error of tensors of one kind. `expected` may have more names: those of other ranks.

    What is below `nothing` times the largest norm is nothing but rounding, and is measured by the largest.
    """
    norms = {name: float(np.linalg.norm(_array(value))) for name, value in expected.items()}
    largest = max(norms.values(), default=0.0)
    worst = Worst()
    for name, value in tensors.items():
        error = math.inf
        if name in expected:
            error = relative_error(value, expected[name], largest * (1 if norms[name] < nothing * largest else FLOOR))
        if error > worst.error:
            worst = Worst(error, name)
    return worst


def relative_error(value: Any, expected: Any, floor: float = 0.0) -> float:
    """||a - b|| / max(||b||, floor) of arrays, tensors or numbers; infinite where shapes differ or one is infinite."""
    a, b = _array(value), _array(expected)
    if a.shape != b.shape:
        return math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        difference = float(np.linalg.norm(a - b))
    if not math.isfinite(difference):
        return math.inf
    return difference / max(float(np.linalg.norm(b)), floor, 1e-300) if difference else 0.0


def _array(value: Any) -> npt.NDArray[np.floating]:
    """Of torch's tensors too, without importing torch."""
    return value.detach().double().numpy() if hasattr(value, "detach") else np.asarray(value, np.float64)


def contract(case: Case) -> dict[str, float]:
    """The largest allowed error of each kind, in fp64 and fp32. `train_batch` itself returns fp32."""
    if case.dtype == "fp64":
        limit = 1e-6 if case.clipping else 1e-10
    else:
        assert case.dtype == "fp32", "bf16 is compared with what bf16 costs the stock engine"
        limit = 1e-5
    return {**dict.fromkeys(KINDS, limit), "returned": max(limit, 1e-6)}


def bf16_limits(stock: Mapping[str, Worst]) -> dict[str, float]:
    """What bf16 allows, against fp32: twice the stock engine's error in bf16 and one rounding, up to a cap.

    The rounding is for where the stock engine was lucky, as in the loss of a micro-batch with a single label.
    """
    caps = {**dict.fromkeys(KINDS, 2e-2), "gradient": BF16_GRADIENT_CAP}
    return {kind: min(caps[kind], 2 * stock[kind].error + BF16_EPS) for kind in KINDS}


def violations(found: Mapping[str, Worst], limits: Mapping[str, float]) -> list[str]:
    """One line for each kind whose error is above its limit; empty where the contract holds."""
    return [f"{kind}: {found[kind]} > {limits[kind]:.0e}" for kind in found if not found[kind].error <= limits[kind]]
