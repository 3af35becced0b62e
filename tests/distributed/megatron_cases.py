"""Define the cases that compare our Megatron GPT with megatron-core's own, and how weights are cut.

No torch here: the process that compares does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.distributed import cases
from tests.distributed.cases import FULL, KINDS, RankRecord, Worst, changed, covering_set, product

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
    "dp2_pp2": (1, 2, 2, False),  # with dp before, a pipeline has neighbouring ranks
    "dp2_pp2_tp2_sp": (2, 2, 2, True),
    "tp2_dp2": (2, 1, 2, False),
    "tp2_pp2_dp2_sp": (2, 2, 2, True),
    "pp2": (1, 2, 1, False),
    "tp2": (2, 1, 1, False),
    "tp2_sp": (2, 1, 1, True),
    "tp4": (4, 1, 1, False),
    "dp4": (1, 1, 4, False),
    "one": (1, 1, 1, False),
}
PLANS: dict[str, int | list[int]] = {"whole": 1, "equal": 2, "uneven": [5, 10, 2, 7]}
SEQUENCE_PARALLEL_PLAN = [6, 10, 2, 6]  # uneven as well, and in pairs of tokens
QUERY_GROUPS = {"mha": 4, "gqa": 2, "mqa": 1}  # of 4 heads; with 2 tensor-parallel ranks mqa shares one group


@dataclass(frozen=True)
class Case:
    """Describe one training run."""

    layout: str = "tp2_pp2"
    schedule: str = "seq1f1b"
    plan: str = "uneven"
    accumulation: int = 1
    clipping: bool = False
    recompute: str = "off"  # off | uniform | block | core_attn | layernorm | mlp | mla_up_proj | kept | offloaded, ...
    precision: str = "fp64"  # fp32_megatron: Megatron's own cross entropy on both sides; more in megatron_models.py
    block: str = "swiglu"  # swiglu (RMSNorm, no biases) | swiglu_biases | gelu (LayerNorm, biases) | moe
    heads: str = "mha"
    qk_norm: bool = False
    tied: bool = False
    attention: str = "plain"  # more in megatron_models.py
    positions: str = "rope"  # rope | rope_part (of a head, interleaved) | learned | learned_given (in the inputs)
    documents: bool = False  # several in a row; position ids come with the tokens
    labels: str = "plain"  # plain | ignored (-100) | mask (a tuple with float weights)
    num_layers: int = NUM_LAYERS
    vocab_size: int = VOCAB_SIZE

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
        """Return the unsliced run in one process that this one must equal; its layout only decides replicas' data."""
        data = {1: "tp2_pp2", 2: "tp2_dp2"}[self.data_parallel]
        return replace(self, layout=data, schedule="none", plan="whole", recompute="off")

    def limits(self) -> dict[str, float]:
        """Return the largest relative error allowed, by kind. DeepSpeed clips by a norm in fp32."""
        limit = 1e-5
        if self.precision == "fp64":
            limit = 1e-6 if self.clipping else 1e-9
        return dict.fromkeys(KINDS, limit)

    def __str__(self) -> str:
        return changed(self)


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
# Dimensions that the composition with slices can get wrong: in fp64 the full run takes the product of these.
PRODUCT = ("layout", "schedule", "accumulation", "recompute", "heads", "tied")


def default_cases() -> list[Case]:
    """Return every pair of values of all dimensions, and every layout with uneven slices in fp64."""
    plain = [
        {"layout": layout, "plan": "uneven", "precision": "fp64", "clipping": False} for layout in DIMENSIONS["layout"]
    ]
    return _sorted({Case(**assignment) for assignment in covering_set(DIMENSIONS, 2, start=plain)})


def all_cases() -> list[Case]:
    """Return the default cases, and the product of PRODUCT in fp64; the other dimensions take turns in it."""
    fixed = (*PRODUCT, "precision")
    others = covering_set({name: values for name, values in DIMENSIONS.items() if name not in fixed}, 2)
    chosen = product({name: DIMENSIONS[name] for name in PRODUCT})
    turns = {Case(**each, **others[index % len(others)]) for index, each in enumerate(chosen)}
    return _sorted({*turns, *default_cases()})


def _sorted(cases: set[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case.world_size, str(case.reference()), str(case)))


# -- how Megatron cuts weights over tensor-parallel ranks -----------------------------------------------------

_ROWS_CUT = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "softmax_offset",
    "linear_q_proj.weight", "linear_q_down_proj.weight", "linear_q_up_proj.weight", "linear_kv_down_proj.weight",
    "linear_kv_up_proj.weight",
)  # fmt: skip
_GATED = ("linear_fc1.weight", "linear_fc1.bias")  # the gate's rows, then the others: each half is cut
_COLUMNS_CUT = ("linear_proj.weight", "linear_fc2.weight")


def shard(name: str, full: Array, rank: int, size: int, gated: bool) -> Array:
    """Return the part of the unsliced model's parameter ``name`` on tensor-parallel rank ``rank`` of ``size``.

    The QKV projection orders its rows by query group, each with its queries, its key and its value, so that a rank
    holds the rows of its groups.
    """
    if not is_cut(name):
        return full
    if name.endswith(_COLUMNS_CUT):
        return np.split(full, size, axis=1)[rank]
    halves = np.split(full, 2 if gated and name.endswith(_GATED) else 1)
    return np.concatenate([np.split(half, size)[rank] for half in halves])


def gather(name: str, shards: Sequence[Array], gated: bool) -> Array:
    """Return the unsliced parameter, which is a cut one, from the shards of all tensor-parallel ranks."""
    if name.endswith(_COLUMNS_CUT):
        return np.concatenate(shards, axis=1)
    halves = [np.split(each, 2 if gated and name.endswith(_GATED) else 1) for each in shards]
    return np.concatenate([part for same_half in zip(*halves, strict=True) for part in same_half])


def is_cut(name: str) -> bool:
    """Return True if tensor-parallel ranks hold parts, False if each has a copy."""
    return name.endswith(_ROWS_CUT + _GATED + _COLUMNS_CUT)


def megatron_name(name: str) -> str:
    """Return the name in megatron-core's ``GPTModel`` of a parameter of ours, which counts the pipeline's layers."""
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
class Record(RankRecord):
    """Hold the record of one rank (or one replica of the reference), by megatron-core's names."""

    tensor_rank: int = 0
    initial: Weights = field(default_factory=dict)
    caught: list[str] = field(default_factory=list)  # errors that a test let pass
    watched: Any = None  # values that a test has requested
    states: dict[str, Weights] = field(default_factory=dict)  # by kind: the parameters, and their optimizer states


NOTHING = 1e-7


def errors(run: Sequence[Record], reference: Sequence[Record], gated: bool) -> dict[str, Worst]:
    """Return the worst error of each kind: of shards joined within each replica, and of every copy of uncut tensors."""
    whole = [
        replace(
            record,
            gradients={
                step: whole_of(run, record, lambda peer, step=step: peer.gradients[step], gated)
                for step in record.gradients
            },
            parameters=whole_of(run, record, lambda peer: peer.parameters, gated),
        )
        for record in run
    ]
    return cases.errors(whole, reference, NOTHING)


def whole_of(run: Sequence[Record], record: Record, tensors_of: Callable[[Record], Weights], gated: bool) -> Weights:
    """Return the tensors of a rank; cut ones are joined with the shards of its tensor-parallel peers."""
    place = record.stage_id, record.data_parallel_id
    peers = sorted(
        (peer for peer in run if (peer.stage_id, peer.data_parallel_id) == place), key=lambda peer: peer.tensor_rank
    )
    shards = [tensors_of(peer) for peer in peers]
    return {
        name: gather(name, [shard[name] for shard in shards], gated) if is_cut(name) else value
        for name, value in tensors_of(record).items()
    }


def merged(run: Sequence[Record], gated: bool) -> dict[str, Weights]:
    """Return the states of all ranks. Copies on several ranks must be equal bit by bit: of tied layers, of replicas."""
    found: dict[str, Weights] = {kind: {} for kind in run[0].states}
    for kind, tensors in found.items():
        for record in run:
            for name, value in whole_of(run, record, lambda peer, kind=kind: peer.states[kind], gated).items():
                assert np.array_equal(value, tensors.setdefault(name, value)), f"ranks differ in {kind} of {name}"
    return found
