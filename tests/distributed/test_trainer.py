"""Test that Trainer over stages gives what Trainer gives in one process."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")

from tests.distributed import trainer_jobs
from tests.distributed.harness import rank_pool
from tests.distributed.test_strategy_runs import written
from tests.distributed.trainer_classes import (
    Busy,
    OwnCounts,
    compare_of_class,
    compare_two_rates,
    losses_of_their_own,
    refusals,
    train_by_plugin,
    without_section,
)

EVALUATE = {"eval_strategy": "steps", "eval_steps": 3}
SAVE = {"save_strategy": "steps", "save_steps": 4}
IS_5 = version("transformers").startswith("5.")
BY_LENGTH = {"train_sampling_strategy": "group_by_length"} if IS_5 else {"group_by_length": True}
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
        "phases": ["save", "evaluate", "train", "predict", "save"],
    },
    "resumed": {"args": {**SAVE, "max_steps": 6}, "fp64": True, "phases": ["train", "resume"]},
    "largest logits": {"args": {**EVALUATE, "batch_eval_metrics": False}, "metrics": "largest"},
    "smoothed": {"args": {"label_smoothing_factor": 0.1, **EVALUATE}, "fp64": True},
    "by length": {"args": BY_LENGTH},
    "steps without labels": {
        "args": {"gradient_accumulation_steps": 1, "logging_steps": 3}, "blank": 5, "fp64": True,
    },
    "packed, with labels across the edges of texts": {
        "fp64": True, "packed": True, "model": {"use_cache": False}, "args": {"max_steps": 3, **EVALUATE},
        "section": {"documents": "position_ids", "slices": 3}, "phases": ["evaluate", "train", "evaluate"],
    },
    "stream": {"args": {"max_steps": 5, **EVALUATE}, "iterable": True, "metrics": "logits"},
    "stream, not dispatched": {
        "args": {"max_steps": 2, "accelerator_config": {"dispatch_batches": False}},
        "iterable": True, "phases": ["evaluate"],
    },
    "ZeRO-1": {
        "ds": {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}},
        "args": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
    },
    "tied": {"model": {"tie_word_embeddings": True}, "fp64": True},
    "recomputed": {"args": {"gradient_checkpointing": True}},
    "zbv": {"section": {"schedule": "zbv"}, "fp64": True},
    "interleaved": {"section": {"schedule": "interleaved", "chunks_per_stage": 2}, "fp64": True},
    "planned": {"section": {"schedule": "auto", "slices": "auto", "verify": "first_batch"}},
    "trained twice": {"phases": ["train", "train"], "fp64": True},
    "trained twice with another rate": {"phases": ["train", "other rate", "train"], "fp64": True},
}  # fmt: skip


USUAL = (
    "steps without labels", "evaluated and saved", "resumed", "stream", "stream, not dispatched",
    "packed, with labels across the edges of texts",
)  # fmt: skip


def usual(names: Sequence[str], settings: Iterable[str]) -> list[Any]:
    """Return the settings as parameters; only the full run takes those not in `names`; older versions refuse one."""
    known = [name for name in settings if IS_5 or name != "smoothed"]
    return [pytest.param(name, marks=() if name in names else pytest.mark.full) for name in known]


def check_same(found: Mapping[str, Any], limit: float) -> None:
    """Check that a run over stages differs from the one in one process by rounding alone."""
    assert found["weights"] <= limit, found
    for key in ("logs", "results", "best"):
        assert found[key] <= 1e-6, (key, found)
    assert not found["events"] and not found["files"] and not found["missing"] and found["ranks"], found


@pytest.mark.parametrize("name", usual(USUAL, SETTINGS))
def test_a_pipeline_trains_as_one_process(name: str, tmp_path: Path) -> None:
    found = rank_pool(2).run(trainer_jobs.compare, given=SETTINGS[name], folder=str(tmp_path))[0]
    check_same(found, 1e-12 if SETTINGS[name].get("fp64") else 1e-4)
    assert found["predictions"] <= 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_16_bits_are_resumed_bit_by_bit_from_the_newest_whole_checkpoint(kind: str, tmp_path: Path) -> None:
    for whole, resumed in rank_pool(2).run(trainer_jobs.resumed_in_16_bits, kind=kind, folder=str(tmp_path)):
        assert trainer_jobs.engines.error_of(resumed, whole) == 0.0 and all(len(each) >= 3 for each in whole.values())


def test_fp16_without_a_stage_of_zero_in_the_json_trains_as_fp32(tmp_path: Path) -> None:
    """DeepSpeed's stage 0 takes a first step without gradients, which changes the weights by 25 %."""
    given = {"args": {"fp16": True}, "one": {"fp16": False}, "ds": {"zero_optimization": {}}}
    found = rank_pool(2).run(trainer_jobs.compare, given=given, folder=str(tmp_path))[0]
    assert found["logs"] <= 2e-3 and found["weights"] <= 0.02, found


SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto", "total_num_steps": "auto"}}  # fmt: skip
SIZES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)


def test_the_json_may_hold_numbers_of_steps_and_auto_and_the_engine_may_start_early(tmp_path: Path) -> None:
    """Before a training run knows its steps; and ZeRO takes optimizers that DeepSpeed has not tested, as in Trainer."""
    numbers = {"params": {**SCHEDULER["params"], "warmup_num_steps": 3, "total_num_steps": 6}}
    zero = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    runs = []
    for scheduler, phases in ((SCHEDULER, ["train"]), (SCHEDULER | numbers, ["train"]), (SCHEDULER, ["save", "train"])):
        given = {"ds": {"scheduler": scheduler, **zero}, "args": {"warmup_steps": 3, "optim": "sgd"}, "phases": phases}
        job = {"given": given, "folder": str(tmp_path), "kind": trainer_jobs.PipelineTrainer}
        runs.append(rank_pool(2).run(trainer_jobs.play_alone, **job)[0]["logs"])
    assert runs[0] == runs[1] == runs[2]


def test_two_replicas_share_a_stream_as_without_stages(tmp_path: Path) -> None:
    """Rank 0 reads it for all, also as a run resumes within an epoch. No row of a last, shorter batch counts twice."""
    args = {**EVALUATE, "save_strategy": "steps", "save_steps": 3, "max_steps": 5, "gradient_accumulation_steps": 2}
    args["warmup_steps"] = 3
    stream = {"iterable": "by rank 0", "rows": 62, "ds": {"scheduler": SCHEDULER, **SIZES}}
    setting = {"args": args, **stream, "metrics": "logits", "phases": ["train", "resume earlier"]}
    kinds = {2: trainer_jobs.Trainer, 4: trainer_jobs.PipelineTrainer}
    rank_pool(2).close()  # its ranks may keep the grid of stages, which DeepSpeed alone would take
    (stock, _), staged = (
        rank_pool(ranks).run(trainer_jobs.play_alone, given=setting, folder=str(tmp_path / str(ranks)), kind=kind)
        for ranks, kind in kinds.items()
    )
    for log in (log for run in (stock, *staged) for log in run["logs"]):
        log.pop("grad_norm", None)  # DeepSpeed alone does not keep it in fp32
    for run in staged:
        found = trainer_jobs.differences(stock, run)
        assert max(found[key] for key in ("weights", "logs", "results")) <= 1e-4, found


def test_stages_share_what_rank_0_reads_of_a_stream(tmp_path: Path) -> None:
    runs = []
    for reader in (True, "by rank 0"):
        setting = {"args": {**EVALUATE, "max_steps": 3}, "iterable": reader, "phases": ["train", "evaluate"]}
        job = {"given": setting, "folder": str(tmp_path), "kind": trainer_jobs.PipelineTrainer}
        runs.append([(each["logs"], each["results"]) for each in rank_pool(2).run(trainer_jobs.play_alone, **job)])
    assert runs[0] == runs[1]


TENSOR = {"ds": {"tensor_parallel": {"autotp_size": 2}}, "rows": 12}
TENSOR_RANKS: dict[str, dict[str, Any]] = {
    "exact, saved and resumed": {
        **TENSOR, "fp64": True, "args": {**EVALUATE, "save_strategy": "steps", "save_steps": 2, "max_steps": 3},
        "phases": ["evaluate", "train", "resume"],
    },
    "two replicas": {
        "args": EVALUATE, "rows": 24, "one": {"gradient_accumulation_steps": 6, "per_device_eval_batch_size": 8},
        "ds": {**TENSOR["ds"], "pipeline": {"stages": 1}},
    },
    "sequence ranks": {
        "ds": {"sequence_parallel_size": 2}, "section": {"slices": [8, 2, 6]}, "rows": 12, "fp64": True,
        "args": {**EVALUATE, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}, "metrics": "logits",
        "phases": ["evaluate", "train", "resume", "predict"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", usual(("exact, saved and resumed",), TENSOR_RANKS))
def test_stages_of_tensor_parallel_ranks_train_as_one_process(name: str, tmp_path: Path) -> None:
    setting = TENSOR_RANKS[name]
    found = rank_pool(4).run(trainer_jobs.compare, given=setting, folder=str(tmp_path))[0]
    check_same(found, 1e-12 if setting.get("fp64") else 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["model", "sequence"])
def test_a_strategy_brings_its_grid(axis: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"axes": ["pipe", "data", axis], "dims": [2, 1, 2], "devices_per_node": 4}
    path = written(tmp_path, **sizes, slices=[8, 2, 6], accumulation=3)
    args = {"gradient_checkpointing": True}  # the strategy says on which stages
    setting = {
        "rows": 12,
        "args": args,
        "model": {"num_hidden_layers": 4},
        "ds": {"terapipe": {"enabled": True, "strategy": path, "granularity_tokens": 1}},
    }
    check_same(rank_pool(4).run(trainer_jobs.compare, given=setting, folder=str(tmp_path))[0], 1e-4)


def test_dropout_differs_between_sequence_ranks(tmp_path: Path) -> None:
    """Seeds of CPUs stay the same: samplers draw by them."""
    first, second = rank_pool(2).run(trainer_jobs.seeds_of_devices, folder=str(tmp_path))
    assert not first and [seed - given for seed, given in second] == [1]


def test_labels_of_a_step_weigh_alike_without_trainer() -> None:
    for errors in rank_pool(4).run(trainer_jobs.mean_of_step):
        assert max(errors) <= 1e-10


def test_stages_with_data_of_their_own_are_refused(tmp_path: Path) -> None:
    for text in rank_pool(2).run(trainer_jobs.sharded_by_rank, folder=str(tmp_path)):
        assert "the stages of a pipeline disagree on the token ids" in text


FAULTS = [
    ("train", "labels", "BatchError", "labels at padding"),
    ("evaluate", "labels", "BatchError", "labels at padding"),
    ("evaluate", "logits", "LookupError", "no such label, with logits of [4, 16, 48]"),
    ("save", "disk", "OSError", "No space left on device"),
]


@pytest.mark.parametrize(("phase", "fault", "kind", "text"), FAULTS)
def test_all_ranks_raise_the_error_of_one(phase: str, fault: str, kind: str, text: str, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "phase": phase, "fault": fault}
    for raised in rank_pool(2).run(trainer_jobs.error_of_one_rank, **job, timeout_s=60):
        assert raised[0] == kind and text in raised[1], raised


def test_replicas_need_not_end_an_epoch_together(tmp_path: Path) -> None:
    """Ranks join the flags of callbacks after steps, not at the end of an epoch: one that stops there takes a step."""
    for stops_after, steps in ((9, 5), (2, 3)):
        job = {"folder": str(tmp_path / str(steps)), "stops_after": stops_after}
        for taken, refused in rank_pool(2).run(trainer_jobs.steps_of_uneven_epochs, **job, timeout_s=60):
            assert taken == steps
            assert "the number of batches is 2 on rank 0, and 1 on rank 1. Give every rank the same" in refused


def test_arguments_and_data_of_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    """Stages would train with other rates, or wait for half an hour. Paths, logs and workers may differ."""
    for raised in rank_pool(2).run(trainer_jobs.arguments_of_one_rank, folder=str(tmp_path), timeout_s=60):
        kind, text = raised.pop("trainer_state.json")
        assert kind == "ModelRefusedError" and re.match("on rank 1: .*trainer_state.json cannot be read", text), text
        assert len(raised) == len(trainer_jobs.OF_ONE_RANK) + 4
        for name, (kind, text) in raised.items():
            named = "the number of rows" if name == "rows" else name
            assert kind == "ValueError" and f"{named} is " in text and " on rank 0, and " in text, (name, kind, text)


def test_all_ranks_do_what_a_callback_of_one_asks_for(tmp_path: Path) -> None:
    """One whose clock says that the time is over stops the run, for example."""
    for found in rank_pool(2).run(trainer_jobs.asked_by_one_rank, folder=str(tmp_path), timeout_s=60):
        assert found == (4, ["checkpoint-1"], 2)


@pytest.mark.parametrize(("stages", "steps"), [(1, 2), (2, 3)])  # of an epoch
@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_begin", "on_substep_end", "on_epoch_end"])
def test_all_ranks_stop_where_a_callback_of_one_asks_outside_of_steps(
    stages: int, steps: int, event: str, tmp_path: Path
) -> None:
    """Within a step they stop at its end: no micro-batch of it has run before."""
    job = {"folder": str(tmp_path), "stages": stages, "event": event, "step": steps}
    first, second = rank_pool(2).run(trainer_jobs.stopped_by_one_rank, **job, timeout_s=60)
    assert first == second and first[0] == steps + (event != "on_epoch_end")


@pytest.mark.parametrize(
    ("event", "flag", "reached"),
    [
        # Trainer takes it back as the epoch begins, and all of them have seven micro-batches
        ("on_train_begin", "should_epoch_stop", (8, 2 + 6 / 7)),
        ("on_evaluate", "should_training_stop", (1, 3 / 7)),  # of the evaluation at the start
    ],
)
def test_flags_of_one_rank_before_the_first_step(event: str, flag: str, reached: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "stages": 2, "event": event, "step": 0, "flag": flag}
    assert rank_pool(2).run(trainer_jobs.stopped_by_one_rank, **job, timeout_s=60) == [reached] * 2


def test_a_started_trainer_refuses_other_arguments_and_tells_who_saves(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "timeout_s": 60}
    # a callback changes weights of one rank, and a refusal that others make is a BatchError
    of_ranks = rank_pool(2).run(trainer_jobs.mistakes_after_a_start, **job)
    for raised, of_callback in zip(of_ranks, ["ModelRefusedError", "BatchError"], strict=True):
        refused = "ModelRefusedError"  # on all ranks
        kinds = [refused, *["RuntimeError"] * 4, refused, refused, *[of_callback] * 4, refused]
        assert [name for name, _ in raised] == kinds
        _, late = raised.pop()
        hooked, also_hooked, frozen = (told for _, told in raised[-3:])
        (_, text), *without_weights, (_, lost), (_, lost_too), (_, norm) = raised[:-3]
        assert "max_grad_norm of the arguments: changed since" in norm
        assert all("Trainer.compute_loss_func: stages compute" in told for told in (lost, lost_too)), raised
        assert text.startswith("learning_rate, max_grad_norm of the arguments: changed")
        assert all("trainer.save_model(folder)" in told for _, told in without_weights)
        assert all("hooks of model.embed_tokens.weight" in told for told in (hooked, also_hooked)), raised
        for told in (frozen, late):
            assert "requires_grad of model.embed_tokens.weight has changed since the Trainer was built" in told, raised


def test_arguments_and_classes_are_refused_by_name(tmp_path: Path) -> None:
    """On all ranks, as the Trainer is made; a class that only delegates is taken."""
    for told in rank_pool(2).run(refusals, folder=str(tmp_path)):
        assert told.pop("") == ""
        assert not {words: text for words, text in told.items() if words not in text}


def test_losses_of_other_classes_are_refused_in_the_first_step(tmp_path: Path) -> None:
    for told in rank_pool(2).run(losses_of_their_own, folder=str(tmp_path)):
        assert told.pop("") == "" and not {words: text for words, text in told.items() if words not in text}


@pytest.mark.parametrize("kind", [Busy, OwnCounts])
def test_methods_that_stages_replace_change_batches_count_and_log(kind: type, tmp_path: Path) -> None:
    check_same(rank_pool(2).run(compare_of_class, kind=kind, folder=str(tmp_path))[0], 1e-4)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_optimizer_of_own_groups_is_made_once_for_a_training(stage: int, tmp_path: Path) -> None:
    """Of the weights of each stage by their names, though an evaluation has started the engine before."""
    found = rank_pool(2).run(compare_two_rates, folder=str(tmp_path), stage=stage)[0]
    check_same(found, 1e-4 if stage else 1e-12)


def test_a_framework_takes_the_class_from_the_plugin_in_the_docs(tmp_path: Path) -> None:
    page = str(Path(__file__).parents[2] / "docs/trainer.md")
    for trained in rank_pool(2).run(train_by_plugin, page=page, folder=str(tmp_path)):
        name, steps, files = trained
        assert (name, steps) == ("PipelineAxolotlTrainer", [1, 2, 2])
        assert files == {f"model-0000{stage}-of-00002.safetensors" for stage in (1, 2)}


def test_without_a_section_the_mixin_does_nothing(tmp_path: Path) -> None:
    assert rank_pool(2).run(without_section, folder=str(tmp_path)) == [(True, True)] * 2


@pytest.mark.full
def test_the_hub_gets_the_model_from_one_rank(tmp_path: Path) -> None:
    first, second = rank_pool(2).run(trainer_jobs.pushed, folder=str(tmp_path))
    assert second == [] and len(first) == 2
    wanted = {"config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "README.md"}
    assert all(wanted - {"README.md"} <= files for files in first) and wanted <= set().union(*first)


@pytest.mark.full
def test_dropout_and_lengths_leave_stages_with_the_same_data(tmp_path: Path) -> None:
    """Stages draw other numbers for dropout, and the same ones for the order of the data."""
    setting = {"model": {"attention_dropout": 0.3}}
    found = rank_pool(2).run(trainer_jobs.compare, given=setting, folder=str(tmp_path))[0]
    assert found["ranks"] and 1e-4 < found["logs"] < 1.0 and not found["events"]
