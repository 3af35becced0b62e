"""Test settings that every rank refuses while the engine is built, each with the values and the remedy."""

import functools
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from tests.distributed import engines
from tests.distributed.harness import rank_pool

LOOP = {"schedule": "interleaved", "chunks_per_stage": 4}
INTERVAL = {"module": {"activation_checkpoint_interval": 1}}
FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
FP16_TEXT = 'torch_autocast.dtype = "float16" with 2 stages'
TWO_RANKS = {"module": {"topology": PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)}, "stages": None}
_SAMPLER = {"enabled": True, "curriculum_metrics": {"seqlen": {
    "difficulty_type": "value", "clustering_type": "single_cluster", "min_difficulty": 8, "max_difficulty": 23,
    "schedule_type": "fixed_root", "schedule_config": {},
}}}  # fmt: skip
CURRICULUM = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": _SAMPLER}}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}


CASES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [  # the section, other options, texts of the error
    ({}, {"optimizer": ADAM}, ['optimizer.params.lr, optimizer.params.betas = "auto": only transformers']),
    ({}, {"data_efficiency": CURRICULUM}, [
        "data_efficiency.data_sampling.curriculum_learning.enabled = true with 2 stages",
        "order the data in your own loader",
    ]),
    # of the GradScalers of the stages, only the last one has a scale: DeepSpeed fails in the step of the others
    ({}, FP16, [FP16_TEXT]),
    ({}, {**FP16, **engines.ZERO1}, [FP16_TEXT]),
    ({}, {"flops_profiler": {"enabled": True, "recompute_fwd_factor": 1.0}}, ["recompute_fwd_factor = 1", "counted"]),
    ({}, {**TWO_RANKS, "tensor_parallel": {"autotp_size": 2}}, ["AutoTP would replace layers without knowing"]),
    ({}, {"pipeline": {"stages": 4}}, ["pipeline.stages = 4, but the module has 2 stages", "leave the key out"]),
    (LOOP, {"layers": {"num_layers": 2}}, ["5 layers cannot be cut in 8 parts"]),
    ({"schedule": "seq1f1b", "chunks_per_stage": 2}, {}, ["schedule 'seq1f1b' has one part per stage"]),
    ({"links": {"backward": "bf16", "exact_until_part": 1}}, {}, ["no link begins", "exact_until_part at most 0"]),
    ({"links": {"forward": "int8"}}, {"stages": 1}, ["all layers are on one stage", "leave the key out"]),
    ({"slices": [[9, 14], [23], [10, 13]]}, {}, ["3 lists for 2 micro-batches"]),
    ({"recompute": [0, 2, 5]}, {}, ["terapipe.recompute = [0, 2, 5]", "has 2 stages", "leave out [2, 5]"]),
    ({"recompute": "off"}, INTERVAL, ["recompute = 'off'", "the module has", "interval = 1", "leave one"]),
    ({"recompute": "full"}, {"module": {"activation_checkpoint_interval": 2}}, ["'full'", "interval = 2", "leave one"]),
    ({"recompute": [1]}, INTERVAL, ["recompute = [1]", "interval = 1", "leave one"]),
    ({"recompute": [1]}, engines.CHECKPOINTING["reentrant"], ["recompute = [1]", "section `pipeline`", "leave one"]),
    ({"keep_attention": True, "recompute": "off"}, {}, ['nothing recomputes; set recompute to "full"']),
    ({"keep_attention": True}, {}, ['no layer is recomputed by DeepSpeed; set terapipe.recompute to "full"']),
    ({"keep_attention": True, "recompute": "full", "compile": True}, {}, ["compiled layers run all of their forward"]),
]  # fmt: skip


def refusals() -> list[tuple[str, str]]:
    """Return the error of each case."""
    found = []
    for terapipe, options, _ in CASES:
        layers = engines.fp32_layers(**options.get("layers", {}))
        changes = {name: value for name, value in options.items() if name != "layers"}
        found.append(engines.raised_by(lambda: engines.build(layers, engines.unchecked(**terapipe), **changes)))  # noqa: B023
    return found


@functools.cache
def of_ranks() -> list[list[tuple[str, str]]]:
    return rank_pool(2).run(refusals)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case[-1][0] for case in CASES])
def test_a_setting_is_refused_on_every_rank(index: int) -> None:
    for kind, text in (rank[index] for rank in of_ranks()):
        assert kind == "TeraPipeConfigError" and all(said in text for said in CASES[index][-1]), text
