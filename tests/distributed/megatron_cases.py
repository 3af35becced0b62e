"""What is trained to compare our Megatron GPT with megatron-core's own: cases, and how weights are cut.

No torch here: the process that compares does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.distributed.cases import FULL, covering_set, product

Array = npt.NDArray[np.floating]
Weights = dict[str, Array]  # by megatron-core's names in an unsliced GPTModel

VOCAB_SIZE = 32
NUM_LAYERS = 4
MAX_LENGTH = 28
LENGTH = 24
ROWS = 2
NUM_STEPS = 5 if FULL else 2
LEARNING_RATE = 1e-3
# Some gradients are zero but for rounding (a key's bias shifts all scores of a query alike). With Adam's usual eps a
# step divides noise by noise there; this one is far above the noise in fp32 and far below the other gradients.
ADAM_EPS = 1e-4
CLIP_NORM = 0.2

LAYOUTS = {  # tensor parallel, stages, data parallel, sequence parallel
    "tp2_pp2": (2, 2, 1, False),
    "tp2_pp2_sp": (2, 2, 1, True),
    "pp2_dp2": (1, 2, 2, False),
    "tp2_dp2": (2, 1, 2, False),
    "tp2_pp2_dp2_sp": (2, 2, 2, True),
    "pp2": (1, 2, 1, False),
    "tp2_sp": (2, 1, 1, True),
    "one": (1, 1, 1, False),
}
PLANS: dict[str, int | list[int]] = {"whole": 1, "uneven": [5, 10, 2, 7]}
SEQUENCE_PARALLEL_PLAN = [6, 10, 2, 6]  # uneven as well, and in pairs of tokens
QUERY_GROUPS = {"mha": 4, "gqa": 2, "mqa": 1}  # of 4 heads; with 2 tensor-parallel ranks mqa shares one group


@dataclass(frozen=True)
class Case:
    """One training run. The readable id leaves most of the plain values out."""

    layout: str = "tp2_pp2"
    schedule: str = "seq1f1b"
    plan: str = "uneven"
    accumulation: int = 1
    clipping: bool = False
    recompute: str = "off"  # off | uniform | block | core_attn | layernorm | mlp
    precision: str = "fp64"  # fp64 | fp32 | fp32_megatron (Megatron's own cross entropy on both sides)
    block: str = "swiglu"  # swiglu (RMSNorm, no biases) | gelu (LayerNorm, biases) | moe
    heads: str = "mha"
    qk_norm: bool = False
    tied: bool = False
    positions: str = "rope"  # rope | rope_part (of a head, interleaved) | learned | learned_given (in the inputs)
    labels: str = "plain"  # plain | ignored (-100) | mask (a tuple with float weights)

    @property
    def data_parallel(self) -> int:
        return LAYOUTS[self.layout][2]

    @property
    def tensor_parallel(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def sequence_parallel(self) -> bool:
        return LAYOUTS[self.layout][3]

    @property
    def world_size(self) -> int:
        tensor, stages, data, _ = LAYOUTS[self.layout]
        return tensor * stages * data

    @property
    def slices(self) -> int | list[int]:
        uneven_pairs = self.plan == "uneven" and self.sequence_parallel
        return SEQUENCE_PARALLEL_PLAN if uneven_pairs else PLANS[self.plan]

    def reference(self) -> Case:
        """The unsliced run in one process that this one must equal: of the layout only the replicas' data count."""
        data = {1: "tp2_pp2", 2: "tp2_dp2"}[self.data_parallel]
        return replace(self, layout=data, schedule="none", plan="whole", recompute="off")

    def limits(self) -> dict[str, float]:
        """The largest relative error allowed, by kind. DeepSpeed clips by a norm in fp32."""
        limit = 1e-5
        if self.precision == "fp64":
            limit = 1e-6 if self.clipping else 1e-9
        return {"loss": limit, "gradient": limit, "parameter": limit}

    def __str__(self) -> str:
        words = [self.layout, self.schedule, self.plan, f"m{self.accumulation}", self.precision]
        words += [self.block, self.heads, self.positions, self.labels]
        words += ["clip"] * self.clipping + ["tied"] * self.tied + ["qknorm"] * self.qk_norm
        words += [f"re_{self.recompute}"] * (self.recompute != "off")
        return "-".join(words)


DIMENSIONS: dict[str, Sequence[Any]] = {
    "layout": ("tp2_pp2", "tp2_pp2_sp", "pp2_dp2", "tp2_dp2"),
    "schedule": ("terapipe", "seq1f1b"),
    "plan": ("uneven", "whole"),
    "accumulation": (1, 4 if FULL else 2),
    "clipping": (False, True),
    "recompute": ("off", "uniform", "block", "core_attn", "layernorm", "mlp"),
    "precision": ("fp64", "fp32", "fp32_megatron"),
    "block": ("swiglu", "gelu"),
    "heads": ("mha", "gqa", "mqa"),
    "qk_norm": (False, True),
    "tied": (False, True),
    "positions": ("rope", "rope_part", "learned", "learned_given"),
    "labels": ("plain", "ignored", "mask"),
}
# What the composition with slices can get wrong: in fp64 the full run takes the product of these.
PRODUCT = ("layout", "schedule", "accumulation", "recompute", "heads", "tied")


def default_cases() -> list[Case]:
    """Every pair of values of all dimensions, and every layout with uneven slices in fp64."""
    plain = [
        {"layout": layout, "plan": "uneven", "precision": "fp64", "clipping": False} for layout in DIMENSIONS["layout"]
    ]
    return _sorted({Case(**assignment) for assignment in covering_set(DIMENSIONS, 2, start=plain)})


def all_cases() -> list[Case]:
    """The default cases, and the product of PRODUCT in fp64; the other dimensions take turns in it."""
    fixed = (*PRODUCT, "precision")
    others = covering_set({name: values for name, values in DIMENSIONS.items() if name not in fixed}, 2)
    chosen = product({name: DIMENSIONS[name] for name in PRODUCT})
    turns = {Case(**each, **others[index % len(others)]) for index, each in enumerate(chosen)}
    return _sorted({*turns, *default_cases()})


def _sorted(cases: set[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case.world_size, str(case.reference()), str(case)))


# -- how Megatron cuts weights over tensor-parallel ranks -----------------------------------------------------

_ROWS_CUT = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_GATED = ("linear_fc1.weight", "linear_fc1.bias")  # the gate's rows, then the others: each half is cut
_COLUMNS_CUT = ("linear_proj.weight", "linear_fc2.weight")


def shard(name: str, full: Array, rank: int, size: int, gated: bool) -> Array:
    """What tensor-parallel rank ``rank`` of ``size`` holds of the unsliced model's parameter ``name``.

    Rows of the QKV projection stand by query group, each group with its queries, its key and its value, so that a
    rank's rows are those of its groups.
    """
    if name.endswith(_COLUMNS_CUT):
        return np.split(full, size, axis=1)[rank]
    if name.endswith(_GATED) and gated:
        return np.concatenate([np.split(half, size)[rank] for half in np.split(full, 2)])
    if name.endswith(_ROWS_CUT + _GATED):
        return np.split(full, size)[rank]
    return full


def gather(name: str, shards: Sequence[Array], gated: bool) -> Array:
    """The unsliced parameter from the shards of all tensor-parallel ranks; of replicated ones the first copy."""
    if len(shards) == 1:
        return shards[0]
    if name.endswith(_COLUMNS_CUT):
        return np.concatenate(shards, axis=1)
    if name.endswith(_GATED) and gated:
        halves = [np.split(each, 2) for each in shards]
        return np.concatenate([each[0] for each in halves] + [each[1] for each in halves])
    if name.endswith(_ROWS_CUT + _GATED):
        return np.concatenate(shards)
    return shards[0]


def is_cut(name: str) -> bool:
    """True where tensor-parallel ranks hold parts, False where each has a copy."""
    return name.endswith(_ROWS_CUT + _GATED + _COLUMNS_CUT)


def megatron_name(name: str) -> str:
    """The name in megatron-core's ``GPTModel`` of a parameter of ours, which counts the pipeline's layers."""
    if name.startswith("tied_modules.embedding."):
        return "embedding." + name.removeprefix("tied_modules.embedding.")
    index, rest = name.split(".", 1)
    if rest.startswith("layer."):
        return f"decoder.layers.{int(index) - 1}.{rest.removeprefix('layer.')}"
    if rest.startswith("norm."):
        return "decoder.final_layernorm." + rest.removeprefix("norm.")
    return rest if rest.startswith("output_layer.") else "embedding." + rest


# -- what a run gave ------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one rank (or the one process of the reference) has seen, by megatron-core's names."""

    stage: int = 0
    tensor_rank: int = 0
    pipeline: int = 0  # which replica
    losses: dict[int, list[float]] = field(default_factory=dict)  # of each step, by replica; last stage only
    gradients: list[Weights] = field(default_factory=list)  # of each step, as the optimizer meets them
    parameters: Weights = field(default_factory=dict)
    initial: Weights = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)  # of the gradient before clipping; the reference's alone
    caught: list[str] = field(default_factory=list)  # errors that a test let pass
    watched: Any = None  # what a test has asked for


FLOOR = 1e-3
NOTHING = 1e-7


def errors(run: Sequence[Record], reference: Record, gated: bool) -> dict[str, float]:
    """The largest relative error of each kind, as max over tensors of ||a-b|| / max(||b||, FLOOR * the largest).
    What is below NOTHING * the largest is measured by the largest.

    Each replica's shards are put together; each tensor-parallel copy of what is not cut is compared. What is missing
    is an infinite error.
    """
    found = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    losses: dict[int, list[list[float]]] = {}
    for record in run:
        for pipeline, values in record.losses.items():
            losses.setdefault(pipeline, []).append(values)
    if losses.keys() != reference.losses.keys():
        found["loss"] = float("inf")
    for pipeline, ranks in losses.items():
        for values in ranks:
            found["loss"] = max(found["loss"], _error(np.array(values), np.array(reference.losses[pipeline]), 0.0))
    for pipeline in reference.losses:
        mine = [record for record in run if record.pipeline == pipeline]
        for step, expected in enumerate(reference.gradients):
            whole = _whole([(record, record.gradients[step]) for record in mine], gated)
            found["gradient"] = max(found["gradient"], _worst(whole, expected))
        whole = _whole([(record, record.parameters) for record in mine], gated)
        found["parameter"] = max(found["parameter"], _worst(whole, reference.parameters))
    return found


def _whole(parts: Sequence[tuple[Record, Weights]], gated: bool) -> dict[str, list[Array]]:
    """Every version of each full tensor that the ranks of a replica hold: one per stage, times one per copy."""
    shards: dict[tuple[str, int], dict[int, Array]] = {}
    for record, tensors in parts:
        for name, value in tensors.items():
            shards.setdefault((name, record.stage), {})[record.tensor_rank] = value
    whole: dict[str, list[Array]] = {}
    for (name, _), by_rank in shards.items():
        in_order = [by_rank[rank] for rank in sorted(by_rank)]
        whole.setdefault(name, []).extend([gather(name, in_order, gated)] if is_cut(name) else in_order)
    return whole


def _worst(whole: dict[str, list[Array]], expected: Weights) -> float:
    if whole.keys() != expected.keys():
        return float("inf")
    largest = max(float(np.linalg.norm(value)) for value in expected.values())
    floors = {
        # zero but for rounding: a key's bias shifts all scores of a query alike
        name: largest if float(np.linalg.norm(value)) < NOTHING * largest else FLOOR * largest
        for name, value in expected.items()
    }
    return max(_error(value, expected[name], floors[name]) for name, values in whole.items() for value in values)


def _error(value: Array, expected: Array, floor: float) -> float:
    if value.shape != expected.shape or not np.isfinite(value).all():
        return float("inf")
    difference = float(np.linalg.norm(value - expected))
    return difference / max(float(np.linalg.norm(expected)), floor) if difference else 0.0


def violations(found: dict[str, float], limits: dict[str, float]) -> dict[str, float]:
    """What is above its limit, by kind; empty where two trainings are the same."""
    return {kind: error for kind, error in found.items() if not error <= limits[kind]}
