"""Test that Trainer over stages gives what Trainer gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")

from tests.distributed.harness import rank_pool
from tests.distributed.trainer_jobs import compare, mean_of_step, refusal, sharded_by_rank

EVALUATE = {"eval_strategy": "steps", "eval_steps": 3}
SAVE = {"save_strategy": "steps", "save_steps": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"fp64": True},
    "exact, with Adam of DeepSpeed's config": {
        "fp64": True,
        "args": {"weight_decay": 0.0},
        "ds": {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                         "weight_decay": "auto", "torch_adam": True}},
               "gradient_clipping": "auto", "train_batch_size": 6},
    },
    "clipped": {"args": {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2}},
    "evaluated and saved": {
        "args": {**EVALUATE, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1,
                 "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_on_start": True},
        "metrics": "logits",
        "phases": ["evaluate", "train", "predict", "save"],
    },
    "resumed": {"args": {**SAVE, "max_steps": 6}, "fp64": True, "phases": ["train", "resume"]},
    "largest logits": {"args": {**EVALUATE, "batch_eval_metrics": False}, "metrics": "largest"},
    "smoothed": {"args": {"label_smoothing_factor": 0.1, **EVALUATE}},
    "by length": {"args": {"train_sampling_strategy": "group_by_length"}},
    "stream": {"args": {"max_steps": 5}, "iterable": True},
    "ZeRO-1": {"ds": {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}},
    "tied": {"model": {"tie_word_embeddings": True}, "fp64": True},
    "recomputed": {"args": {"gradient_checkpointing": True}},
    "zbv": {"section": {"schedule": "zbv"}, "fp64": True},
    "interleaved": {"section": {"schedule": "interleaved", "chunks_per_stage": 2}, "fp64": True},
    "planned": {"section": {"schedule": "auto", "slices": "auto", "verify": "first_batch"}},
    "trained twice": {"phases": ["train", "train"], "fp64": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pipeline_trains_as_one_process(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    found = rank_pool(2).run(compare, given=setting, folder=str(tmp_path))[0]
    limit = 1e-12 if setting.get("fp64") else 1e-6
    assert found["weights"] <= (limit if setting.get("fp64") else 1e-4), found
    for key in ("logs", "results", "best"):
        assert found[key] <= 1e-6, (key, found)
    assert found["predictions"] <= 1e-5
    assert not found["events"] and not found["files"] and not found["missing"] and found["ranks"], found


def test_two_replicas_of_two_stages_train_as_one_process(tmp_path: Path) -> None:
    """One process accumulates over the micro-batches of both replicas."""
    setting = {"args": EVALUATE, "rows": 24, "one": {"gradient_accumulation_steps": 6, "per_device_eval_batch_size": 8}}
    found = rank_pool(4).run(compare, given=setting, folder=str(tmp_path))[0]
    assert found["weights"] <= 1e-4 and found["logs"] <= 1e-6 and not found["events"] and found["ranks"], found


def test_labels_of_a_step_weigh_alike_without_trainer() -> None:
    for errors in rank_pool(4).run(mean_of_step):
        assert max(errors) <= 1e-10


def test_sabotage_is_seen(tmp_path: Path) -> None:
    """A mean of means trains other weights, and stages with data of their own are an error."""
    means = {"fp64": True, "section": {"loss_reduction": "mean_valid"}}
    found = rank_pool(2).run(compare, given=means, folder=str(tmp_path / "means"))[0]
    assert found["weights"] > 1e-3 and found["logs"] > 1e-4
    for text in rank_pool(2).run(sharded_by_rank, folder=str(tmp_path / "shards")):
        assert "the stages of a pipeline disagree on the token ids" in text


REFUSED: dict[str, dict[str, Any]] = {
    "neftune_noise_alpha: NEFTune": {"args": {"neftune_noise_alpha": 5}},
    "auto_find_batch_size: an error": {"args": {"auto_find_batch_size": True}},
    "average_tokens_across_devices=False": {"args": {"average_tokens_across_devices": False}},
    "torch_compile: set": {"args": {"torch_compile": True}},
    "bf16_full_eval: the engine": {"args": {"bf16_full_eval": True}},
    "pipeline.stages = 3": {"ds": {"pipeline": {"stages": 3}}},
    "did you mean terapipe.slices": {"section": {"slicess": 2}},
}


def test_arguments_are_refused_by_name(tmp_path: Path) -> None:
    for text, setting in REFUSED.items():
        for told in rank_pool(2).run(refusal, given=setting, folder=str(tmp_path)):
            assert text in told
