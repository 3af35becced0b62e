"""Define the cases that compare our engine with others: their dimensions, a covering set of them, and the equality
contract, which says how far apart two training runs are, and how far they may be.

A relative error is the maximum over tensors of ||a - b|| / max(||b||, 1e-3 * the largest ||b|| among tensors
of that kind): tensors that are only rounding noise next to the others do not count. A tensor that is missing,
has another shape or is not finite has an infinite error. No torch here: it takes seconds to import.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FULL = os.environ.get("TERAPIPE_TEST_FULL", "") not in ("", "0")  # make test-full

MAX_LENGTH = 24
CLIP_NORM = 0.05  # below the gradient norm of every step, so that clipping is at work in each


@dataclass(frozen=True)
class Case:
    """Describe one training run. A tuple of slices gives the length of the sequences."""

    stages: int = 2
    data_parallel: int = 1
    micro_batches: int = 2
    rows: int = 2
    length: int = 12  # of the sequences, in tokens
    mixed: bool = False  # shorter sequences in some micro-batches; only where `slices` is a number
    slices: int | tuple[int, ...] = 3
    schedule: str = "seq1f1b"
    precision: str = "fp64"  # fp64 | fp32 | bf16, with "_zero1" for ZeRO-1
    checkpointing: str = "off"  # off | reentrant | reentrant_all (the embedding too) | non_reentrant
    tied: bool = False
    kv_heads: int = 4  # of 4 heads
    positions: str = "rope"  # rope | learned
    gpt3: bool = False  # LayerNorm, GELU and biases for RMSNorm, SwiGLU and none
    masked: bool = False
    loss_reduction: str = "mean_valid"  # mean_valid | mean | sum
    clipping: bool = False
    hook: bool = False  # the module doubles its gradients in `before_reduce`
    steps: int = 2
    data_seed: int = 0
    decoder_layers: int = 4
    documents: bool = False  # rows hold several; position ids come with the tokens
    batch: str = "tuple"  # or one of `dict_batches.FORMS`, where all but "plain" come with `documents`
    mixers: tuple[str, ...] = (
        "attention",
    )  # decoder layers in turn: ours, "experts", or of tests/small_models/mixers.py

    def __post_init__(self) -> None:
        if isinstance(self.slices, tuple):
            object.__setattr__(self, "length", sum(self.slices))
        if self.batch == "flattened":
            object.__setattr__(self, "rows", 1)

    @property
    def world_size(self) -> int:
        return self.stages * self.data_parallel

    @property
    def dtype(self) -> str:
        return self.precision.removesuffix("_zero1")

    @property
    def zero_stage(self) -> int:
        return int(self.precision.endswith("_zero1"))

    def length_of(self, step: int, micro_batch_id: int) -> int:
        return self.length - (3 * (step + micro_batch_id) % 4 if self.mixed else 0)

    def __str__(self) -> str:
        return changed(self)

    def stock(self) -> Case:
        """Return the run of DeepSpeed's own engine that this one must equal: it knows neither slices nor schedule.

        The run avoids the stock engine's mistakes. With several stages its fp32 clip norm leaves out replicated
        parameters, and lengths may not change: both are compared with one stage. With reentrant checkpointing the
        embedding must stay outside.
        """
        return replace(
            self,
            slices=1,
            schedule="stock",
            stages=1 if self.clipping or self.mixed else self.stages,
            checkpointing=self.checkpointing.removesuffix("_all"),
        )


def changed(case: Any) -> str:
    """Return everything that differs from the defaults of a case."""
    pairs = [(f.name, getattr(case, f.name)) for f in fields(case) if getattr(case, f.name) != f.default]
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in pairs) or "defaults"


def case_key(case: Case) -> tuple[Any, ...]:
    """Return a sort key that groups cases by world size, then by stock run."""
    return (case.world_size, str(case.stock()), str(case))


# -- the dimensions ------------------------------------------------------------------------------------------

SCHEDULES = (
    "gpipe 1f1b terapipe seq1f1b zb-h1 seq1f1b-zb interleaved seq1f1b-interleaved seq1f1b-interleaved-zb zbv chimera "
    "chimera-seq"
)
DIMENSIONS: dict[str, Sequence[Any]] = {
    "parallel": ((1, 1), (2, 1), (3, 1), (2, 2)),  # stages, data parallel
    "micro_batches": (1, 2, 4),
    "slices": (3, (5, 10, 2, 7), (14, 9, 1)),
    "schedule": tuple(SCHEDULES.split()),
    "tied": (False, True),
    "checkpointing": ("off", "reentrant", "reentrant_all", "non_reentrant"),
    "masked": (False, True),
    "precision": ("fp64", "fp32", "fp32_zero1", "bf16", "bf16_zero1"),
    "clipping": (False, True),
    "kv_heads": (4, 2),
    "positions": ("rope", "learned"),
    "mixed": (False, True),
}
OF_ALL = {"length": 24, "steps": 3 if FULL else 2, "data_seed": 2}
# Dimensions that a slice engine can get wrong: in fp64 every pair of these by default, in the full run their product.
PRODUCT = ("parallel", "micro_batches", "slices", "schedule", "tied", "checkpointing", "masked")
CARRIED = ("gated_linear_attention", "retention", "convolution", "gated_delta_rule")
OPTIONS = ("window", "softcap", "sinks", "values", "grouped")
"""Layers of `tests/small_models/mixers.py`: with a carried state, and what attention may ask beyond the plain kind."""
LAYER_SCHEDULES = ("seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq")

Assignment = Mapping[str, Any]
Tuple = frozenset[tuple[str, Any]]  # values of a few dimensions: {("slices", 3), ("tied", True)}


def is_valid(assignment: Assignment) -> bool:
    """Clipping and mixed lengths are compared with one stage, which has the same data on one pipeline only; a
    list of slice lengths fits one sequence length only; pipelines that go both ways have an even number of stages.
    (All conditions are on pairs: `covering_set` needs that.)
    """
    one_pipeline = assignment.get("parallel", (1, 1))[1] == 1
    any_length = assignment.get("slices", 3) == 3
    mixed = assignment.get("mixed", False)
    both_ways = assignment.get("schedule", "").startswith("chimera")
    if both_ways and assignment.get("parallel", (2, 1))[0] % 2:
        return False
    return (one_pipeline or not assignment.get("clipping")) and (not mixed or (one_pipeline and any_length))


def to_case(assignment: Assignment) -> Case:
    values = dict(assignment)
    values["stages"], values["data_parallel"] = values.pop("parallel", (1, 1))
    return Case(**{**OF_ALL, **values})


def tuples_of(assignment: Assignment, strength: int) -> set[Tuple]:
    """Return all choices of `strength` of the assignment's values."""
    return {frozenset(items) for items in itertools.combinations(assignment.items(), strength)}


def valid_tuples(dimensions: Mapping[str, Sequence[Any]], strength: int) -> set[Tuple]:
    found: set[Tuple] = set()
    for names in itertools.combinations(dimensions, strength):
        for assignment in product({name: dimensions[name] for name in names}):
            found |= tuples_of(assignment, strength)
    return found


def product(dimensions: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Return all valid assignments."""
    for values in itertools.product(*dimensions.values()):
        assignment = dict(zip(dimensions, values, strict=True))
        if is_valid(assignment):
            yield assignment


def covering_set(
    dimensions: Mapping[str, Sequence[Any]], strength: int, start: Sequence[Assignment] = (), tries: int = 10
) -> list[dict[str, Any]]:
    """Return full assignments such that at least one of them contains each valid tuple of `strength` values.

    Greedy: each of `start` (partial assignments, all of them kept), then each tuple that is not covered yet,
    is filled up dimension by dimension with the value that covers most new tuples; the best of a few orders
    is kept.
    """
    generator = random.Random(0)
    missing = valid_tuples(dimensions, strength)
    # sorted: the order of a set of strings differs from process to process
    waiting = [dict(each) for each in start] + [
        dict(each) for each in sorted(missing, key=lambda t: sorted(map(repr, t)))
    ]
    chosen: list[dict[str, Any]] = []
    for index, partial in enumerate(waiting):
        if index >= len(start) and frozenset(partial.items()) not in missing:
            continue
        filled = [_filled(partial, dimensions, missing, strength, generator) for _ in range(tries)]
        best = max(filled, key=lambda assignment: len(tuples_of(assignment, strength) & missing))
        missing -= tuples_of(best, strength)
        chosen.append(best)
    return chosen


def _filled(
    partial: Assignment,
    dimensions: Mapping[str, Sequence[Any]],
    missing: set[Tuple],
    strength: int,
    generator: random.Random,
) -> dict[str, Any]:
    assignment = dict(partial)
    names = [name for name in dimensions if name not in assignment]
    generator.shuffle(names)
    for name in names:
        values = [value for value in dimensions[name] if is_valid({**assignment, name: value})]
        generator.shuffle(values)
        news = [len(tuples_of({**assignment, name: value}, strength) & missing) for value in values]
        assignment[name] = values[max(range(len(values)), key=lambda i: news[i])]
    return {name: assignment[name] for name in dimensions}


def default_assignments() -> list[dict[str, Any]]:
    """Return every pair of values of all dimensions, the pairs of PRODUCT in fp64 as well."""
    exact = covering_set({name: DIMENSIONS[name] for name in PRODUCT}, 2)
    return covering_set(DIMENSIONS, 2, start=[{**each, "precision": "fp64", "clipping": False} for each in exact])


def default_cases() -> list[Case]:
    return _cases(default_assignments())


def all_cases() -> list[Case]:
    """Return the default cases and, in fp64, the whole product of PRODUCT; queries and positions take turns there."""
    everything = product({name: DIMENSIONS[name] for name in PRODUCT})
    turns = itertools.cycle(product({name: DIMENSIONS[name] for name in ("kv_heads", "positions")}))
    exact = [{**assignment, **turn} for assignment, turn in zip(everything, turns, strict=False)]
    return sorted({*_cases(exact), *default_cases()}, key=case_key)


def layer_cases(strength: int) -> list[Case]:
    """Return cases with every choice of `strength` values of what attention asks and how layers run, and of that and
    the kinds of carried states."""
    runs: dict[str, Sequence[Any]] = {
        "parallel": ((2, 1), (3, 1)),
        "schedule": LAYER_SCHEDULES,
        "checkpointing": ("off", "reentrant", "non_reentrant"),
    }
    asks = {**dict.fromkeys(("documents", *OPTIONS), (False, True)), "slices": ((7, 1, 4), (3, 1, 5, 1, 2))}
    found = []
    for each in covering_set({**runs, **asks}, strength, start=[dict.fromkeys(OPTIONS, True)]):
        kind = "+".join(name for name in OPTIONS if each.pop(name)) or "attention"
        found.append(to_case({**each, "mixers": (kind, "attention"), "masked": True, "steps": 2}))
    for each in covering_set({**runs, "mixers": [("attention", kind) for kind in CARRIED]}, strength):
        found.append(to_case({**each, "slices": (7, 1, 4), "masked": True, "steps": 2}))
    return list(dict.fromkeys(found))


def _cases(assignments: Sequence[Assignment]) -> list[Case]:
    return sorted({to_case(assignment) for assignment in assignments}, key=case_key)


# -- how far apart two runs may be ------------------------------------------------------------------------------------

KINDS = ("loss", "gradient", "parameter", "evaluation", "returned", "norm")
FLOOR = 1e-3
BF16_EPS = 2.0**-7
BF16_GRADIENT_CAP = 0.1


@dataclass
class RankRecord:
    """Hold what one rank of a training run has seen. Parameter names count layers over the whole model."""

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
        """Return all values by kind, then by a name that is the same in every run of the same training."""
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
    """Hold the largest error of one kind, and its place."""

    error: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return f"{self.error:.2e} ({self.where})"


def errors(run: Sequence[RankRecord], reference: Sequence[RankRecord], nothing: float = 0.0) -> dict[str, Worst]:
    """Return the worst error of each kind. Every rank's copy of a tensor is compared with the reference's."""
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
    """Return the worst error of tensors of one kind. `expected` may have more names, from other ranks.

    A tensor below `nothing` times the largest norm is only rounding, and its error is relative to the largest.
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
    """Return an array, of torch's tensors too, without importing torch."""
    return value.detach().double().numpy() if hasattr(value, "detach") else np.asarray(value, np.float64)


def contract(case: Case) -> dict[str, float]:
    """Return the largest allowed error of each kind, in fp64 and fp32. `train_batch` itself returns fp32."""
    if case.dtype == "fp64":
        limit = 1e-6 if case.clipping else 1e-10
    else:
        assert case.dtype == "fp32", "bf16 is compared with what bf16 costs the stock engine"
        limit = 1e-5
    return {**dict.fromkeys(KINDS, limit), "returned": max(limit, 1e-6)}


def bf16_limits(stock: Mapping[str, Worst]) -> dict[str, float]:
    """Return the limits of bf16 against fp32: twice the stock engine's error in bf16 plus one rounding, up to a cap.

    The rounding covers cases where the stock engine was lucky, as in the loss of a micro-batch with a single label.
    """
    caps = {**dict.fromkeys(KINDS, 2e-2), "gradient": BF16_GRADIENT_CAP}
    return {kind: min(caps[kind], 2 * stock[kind].error + BF16_EPS) for kind in KINDS}


def violations(found: Mapping[str, Worst], limits: Mapping[str, float]) -> list[str]:
    """Return one line for each kind whose error is above its limit; empty if the contract holds."""
    return [f"{kind}: {found[kind]} > {limits[kind]:.0e}" for kind in found if not found[kind].error <= limits[kind]]
