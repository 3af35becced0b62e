"""Test settings that DeepSpeed fails on, or ignores: values for Trainer to fill in, losses as a list, empty groups."""

from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch

import terapipe_ds
from tests.distributed.engines import (
    Run,
    batches,
    config,
    differences,
    engine_of,
    gpt_layers,
    pipeline_module,
    raised_by,
    reduce_in_fp64,
    section,
    torch_attention,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

# -- "auto" ----------------------------------------------------------------------------------------------------

AUTO: dict[str, dict[str, Any]] = {
    "train_micro_batch_size_per_gpu": {"train_micro_batch_size_per_gpu": "auto"},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": "auto"},
    "gradient_clipping": {"gradient_clipping": "auto"},
    "optimizer.params.lr, optimizer.params.betas": {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    },
    "scheduler.params.warmup_max_lr": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
    "fp16.enabled": {"fp16": {"enabled": "auto"}},
    "bf16.enabled": {"bf16": {"enabled": "auto"}},
    "zero_optimization.reduce_bucket_size": {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}},
}


def job_auto() -> dict[str, tuple[str, str]]:
    found = {}
    for name, values in AUTO.items():
        ds_config = {**config(terapipe=section()), **values}
        model = pipeline_module(gpt_layers("float32"))
        found[name] = raised_by(lambda: terapipe_ds.initialize(model=model, config=ds_config))  # noqa: B023
    with engine_of(gpt_layers("float32"), section(slices=3), pipeline={"stages": "auto"}) as engine:
        train(engine, batches(1))  # DeepSpeed's own key
    return found


def test_what_trainer_would_fill_in_is_named() -> None:
    for found in rank_pool(2).run(job_auto):
        assert {name: kind for name, (kind, _) in found.items()} == dict.fromkeys(AUTO, "TeraPipeConfigError")
        assert [name for name, (_, text) in found.items() if f'{name} = "auto": transformers' not in text] == []


# -- evaluation ------------------------------------------------------------------------------------------------


def job_evaluated(terapipe: dict[str, Any] | None, sends: bool, **monitors: Any) -> tuple[Any, Any]:
    """Return the losses of the micro-batches, or the error."""
    with engine_of(gpt_layers(), terapipe, **monitors) as engine:
        losses: list[Any] = []
        data = iter(batches(1)[0])
        error = raised_by(lambda: losses.extend(engine.eval_batch(data, reduce_output=None, bcast_loss=sends) or ()))
        return error, [float(loss) for loss in losses]


def test_losses_of_all_micro_batches(tmp_path: Any) -> None:
    ours, stock = (rank_pool(2).run(job_evaluated, terapipe=each, sends=False) for each in (section(), None))
    assert [rank[0] for rank in ours] == [("", "")] * 2
    assert ours[1][1] == pytest.approx(stock[1][1], rel=1e-10) and [len(losses) for _, losses in ours] == [0, 2]
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "here"}}
    for sends, more, word in ((True, {}, "bcast_loss=True"), (False, monitor, "a monitor that is enabled")):
        for (kind, text), _ in rank_pool(2).run(job_evaluated, terapipe=section(), sends=sends, **more):
            assert kind == "ValueError" and f"with {word}" in text and "Set bcast_loss=False" in text


# -- a group that is empty on one stage ------------------------------------------------------------------------


def job_groups(terapipe: dict[str, Any] | None, stages: int) -> Run:
    """Give the embeddings, which are on the first stage, a learning rate of their own."""
    model, settings = pipeline_module(gpt_layers(), stages), config()
    del settings["optimizer"]
    if terapipe is not None:
        settings["terapipe"] = terapipe
        terapipe_ds.lay_out(model, settings)
    named = list(model.named_parameters())
    others = [p for name, p in named if not name.startswith("0.")]
    groups = [{"params": [p for name, p in named if name.startswith("0.")], "lr": 3e-3}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    initialize = deepspeed.initialize if terapipe is None else terapipe_ds.initialize
    with torch_attention() if terapipe is None else nullcontext():
        return trained(initialize(model=model, config=settings, optimizer=optimizer, lr_scheduler=scheduler)[0])


def trained(engine: Any) -> Run:
    try:
        reduce_in_fp64(engine)
        run = train(engine, batches(3))
        assert len(engine.get_lr()) == 2 and max(engine.get_lr()) < 1e-2
        for named in (run.parameters, *run.gradients):
            for name in [name for name in named if "nothing" in name]:  # the number that fills a group
                del named[name]
        return run
    finally:
        engine.destroy()


@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
def test_a_group_that_is_empty_on_one_stage_keeps_its_learning_rate(schedule: str) -> None:
    stock = rank_pool(1).run(job_groups, terapipe=None, stages=1)[0]
    ours = rank_pool(2).run(job_groups, terapipe=section(schedule=schedule), stages=2)
    assert violations([differences(rank, stock) for rank in ours]) == {}
