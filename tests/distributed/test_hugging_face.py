"""Test that models of transformers on stages and in slices train as the whole model does in a plain loop."""

import functools
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import distributed

import terapipe_ds
from terapipe_ds.losses import LinearCrossEntropy
from tests.distributed import engines
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.hugging_face_jobs import (
    bounds_of,
    dtypes_of_buffers,
    refusal_of,
    refusal_of_own_loss,
    train_family,
)
from tests.hugging_face_families import BY_CACHE, CONFIGS, DRAWING, IS_4, WITH_STATES, config_of, known


def both_ways(ways: list[list[str]]) -> set[str]:
    return {way.partition("+")[0] for rank in ways for way in rank}


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", known(*CONFIGS))
def test_a_family_on_two_stages_equals_the_whole_model(family: str) -> None:
    """Loss, gradients and parameters of two steps of two micro-batches in three slices of different lengths."""
    section = engines.section(slices=[7, 3, 6])
    if family in DRAWING:
        with pytest.raises(RankFailure, match="draws random numbers once per call"):
            rank_pool(2).run(train_family, family=family, terapipe=section)
        return
    errors, ways = zip(*rank_pool(2).run(train_family, family=family, terapipe=section), strict=True)
    assert not engines.violations(errors)
    assert ("slow" in both_ways(list(ways))) == (family in BY_CACHE)
    assert any("states" in way for rank in ways for way in rank) == (family in WITH_STATES)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"schedule": name} for name in ("zbv", "chimera-seq", "seq1f1b-zb")], ids=str)
@pytest.mark.parametrize("family", known("gpt2", "qwen3_next"))
def test_other_schedules(family: str, options: dict[str, Any]) -> None:
    """Tied embeddings beside learned positions, and carried states: where layers move and parts have copies."""
    section = engines.section(slices=[7, 3, 6], verify="off", **options)
    errors = [error for error, _ in rank_pool(2).run(train_family, family=family, terapipe=section)]
    assert not engines.violations(errors)


def test_the_way_of_attention_is_no_state_outside_the_layers() -> None:
    """The outline notes it in the config, which the module holds as well, and two stages compute the loss."""
    section = engines.section(slices=[7, 3, 6], schedule="chimera-seq")
    errors = [error for error, _ in rank_pool(2).run(train_family, family="gpt_neo", terapipe=section)]
    assert not engines.violations(errors)


@pytest.mark.sample(2)
@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("family", known("mistral", "falcon", "bamba"))
def test_recomputed_layers(family: str, checkpointing: str) -> None:
    """Under DeepSpeed's activation checkpointing; a partition by hand as well."""
    layers = 6 if family == "falcon" else 5  # tied embeddings have one more
    given = {"changes": engines.CHECKPOINTING[checkpointing], "partition": [0, 2, layers], "wide": False}
    section = engines.section(slices=[7, 3, 6], verify="off")
    errors = [error for error, _ in rank_pool(2).run(train_family, family=family, terapipe=section, **given)]
    assert not engines.violations(errors, 1e-8 if family == "bamba" else engines.EXACT)  # it has some fp32 inside


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", known("gemma", "mamba2", "olmo_hybrid"))
def test_the_check_of_the_first_batch_allows_for_fp32_inside(family: str) -> None:
    """The models are fp64, and some of what they compute is fp32 by their own code."""
    section = engines.section(slices=[7, 3, 6], verify="first_batch")
    errors = [error for error, _ in rank_pool(2).run(train_family, family=family, terapipe=section, wide=False)]
    assert not engines.violations(errors, 1e-5)


@pytest.mark.parametrize("family", ["mamba", "zamba2"])
def test_a_refusal_comes_on_all_ranks_at_once(family: str) -> None:
    for kind, text in rank_pool(2).run(refusal_of, family=family):
        assert (
            kind == "ModelRefusedError" and text.startswith(f"{family} cannot be trained") and "docs/models.md" in text
        )


def test_a_loss_of_the_owner_is_not_replaced_unsaid() -> None:
    """It trains by the loss that is given, whatever the class computes."""
    (refusal,) = rank_pool(1).run(refusal_of_own_loss)
    assert refusal[0] == "ModelRefusedError" and "give one as loss_fn=" in refusal[1]
    assert rank_pool(1).run(refusal_of_own_loss, loss_fn=LinearCrossEntropy()) == [("", "")]


def test_the_losses_of_trainers_stand_for_the_loss_of_the_owner() -> None:
    """TRL asks the model for its loss, and with smoothing Trainer computes one of its own."""
    pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")
    from terapipe_ds.integrations.trainer.token_loss import TokenLoss

    kinds = [rank_pool(1).run(refusal_of_own_loss, loss_fn=TokenLoss(rate))[0][0] for rate in (0.0, 0.1)]
    assert kinds == ["ModelRefusedError", ""]


def test_a_partition_by_hand() -> None:
    assert rank_pool(2).run(bounds_of, partition=[0, 1, 5]) == [[0, 1, 5]] * 2
    assert rank_pool(2).run(bounds_of, partition=[0, 1, 2, 3, 5]) == [[0, 2, 5]] * 2  # two parts on each stage
    refused: dict[str, dict[str, Any]] = {
        "from 0 to 5, the number of pipeline layers": {"partition": [0, 3, 4]},
        "partition [0, 2.0, 5] is not a list of rising integers": {"partition": [0, 2.0, 5]},
        "partition_method = 'uniform' both say where": {"partition": [0, 1, 5], "partition_method": "uniform"},
        "3 parts, and the model has 2 stages": {"partition": [0, 1, 2, 5]},
    }
    for words, given in refused.items():
        for kind, text in rank_pool(2).run(engines.raised_by, act=functools.partial(bounds_of, **given)):
            assert kind == "ValueError" and words in text


def test_numbers_of_stages() -> None:
    """Without arguments there are two stages; a topology has a number of its own."""
    assert rank_pool(2).run(bounds_of) == [[0, 2, 5]] * 2
    assert rank_pool(2).run(bounds_of, dims=[1, 2]) == [[0, 5]] * 2
    for words, given in {
        "num_stages = 0: give an integer >= 1": {"num_stages": 0},
        "num_stages = '2': give an integer >= 1": {"num_stages": "2"},
        "num_stages = 2, and the topology has pipe = 1": {"num_stages": 2, "dims": [1, 2]},
    }.items():
        for kind, text in rank_pool(2).run(engines.raised_by, act=functools.partial(bounds_of, **given)):
            assert kind == "ValueError" and words in text


@pytest.mark.sample(2)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", known("gpt2", "bloom", "mamba2"))
def test_the_stock_engine_trains_them_too(family: str, stages: int) -> None:
    run = rank_pool(2).run(train_family, family=family, terapipe=None, stages=stages)
    assert not engines.violations([errors for errors, _ in run])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("argument", "of_section", "stages", "changes"),
    [
        (None, [0, 1, 2, 3, 5], 2, {"schedule": "zbv"}),
        ([0, 1, 2, 3, 5], [0, 1, 2, 3, 5], 2, {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2}),
        ([0, 3, 5], None, 2, {}),
        (None, [0, 1, 5], 2, {"schedule": "chimera-seq"}),
    ],
)
def test_a_partition_of_argument_or_section_trains(
    argument: list[int] | None, of_section: list[int] | None, stages: int, changes: dict[str, Any]
) -> None:
    section = engines.section(slices=[7, 3, 6], partition=of_section, verify="off", **changes)
    found = rank_pool(stages).run(train_family, family="llama", terapipe=section, stages=stages, partition=argument)
    assert not engines.violations([errors for errors, _ in found])


def test_an_argument_and_a_section_that_contradict_each_other() -> None:
    given: dict[str, Any] = {"terapipe": engines.section(partition=[0, 2, 5]), "partition": [0, 3, 5]}
    for _, text in rank_pool(2).run(engines.raised_by, act=functools.partial(train_family, "llama", **given)):
        assert re.search(r"terapipe.partition = \[0, 2, 5\].*partition=\[0, 3, 5\]", text)


def test_buffers_that_a_family_keeps_in_fp32_stay_so() -> None:
    """As in DeepSpeed's own engine, whatever `buffer_dtype` says: routers add them to scores."""
    ((ours, theirs),) = rank_pool(1).run(dtypes_of_buffers, family="deepseek_v3")
    assert ours == theirs and (torch.float32 in ours.values()) == (not IS_4)  # 4.57 keeps none


def refused_of_others() -> dict[str, str]:
    """Return the error of each setting that only the last of two tensor-parallel ranks has."""
    from peft import LoraConfig

    found, is_last = {}, distributed.get_rank() == 1
    topologies = [PipeModelDataParallelTopology(num_pp=pipe, num_mp=2 // pipe, num_dp=1) for pipe in (1, 2)]
    others: dict[str, dict[str, Any]] = {
        "seed": {"seed": 5}, "rms_norm_eps": {}, "dtype": {"dtype": torch.bfloat16},
        "topology": {"topology": topologies[1]},
        "adapter.lora_alpha": {"adapter": LoraConfig(lora_alpha=32, target_modules=["q_proj"])},
    }  # fmt: skip
    for name, other in others.items():
        config, given = config_of("llama", 2), {"topology": topologies[0], **(other if is_last else {})}
        config.name_or_path = f"/rank-{is_last:d}"  # where its machine has the model
        config.nested = {"_name_or_path": config.name_or_path}
        config.rms_norm_eps = 1e-2 if is_last and name == "rms_norm_eps" else config.rms_norm_eps
        if name == "adapter.lora_alpha":
            given.setdefault("adapter", LoraConfig(lora_alpha=8, target_modules=["q_proj"]))
        found[name] = engines.raised_by(lambda: terapipe_ds.from_config(config, **given))[1]  # noqa: B023
    return found


@pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra peft")
def test_a_rank_with_another_model_is_named_before_groups_are_made() -> None:
    for found in rank_pool(2).run(refused_of_others):
        for name, text in found.items():
            assert re.match(rf"the ranks build different models: {name} is .* on rank 0, and .* on rank 1\. Give", text)
