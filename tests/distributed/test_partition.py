"""Test `terapipe.partition`: layers cut by hand, in other places than the module's own partition method cuts."""

from pathlib import Path
from typing import Any

import pytest
from deepspeed.pipe import LayerSpec
from torch import nn

import terapipe_ds
from terapipe_ds.runtime.layout.layers_to_parts import PARTITION_METHOD
from terapipe_ds.runtime.layout.parted_module import PartedModule
from tests.distributed.engines import (
    batches,
    build,
    config,
    differences,
    engine_of,
    gpt_layers,
    logged,
    pipeline_module,
    raised_by,
    stock_run,
    train,
    unchecked,
    violations,
    with_few_rounds,
)
from tests.distributed.harness import rank_pool

LOOP = {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2}
MEASURED = {"slices": "auto", "granularity_tokens": 4}


def job_train(stages: int, options: dict[str, Any], **changes: Any) -> tuple[dict[str, float], list[int], list[str]]:
    with logged() as lines, engine_of(gpt_layers(), unchecked(**changes), stages=stages, **options) as engine:
        ours, parts = train(engine, batches(2)), list(engine.module.parts)
        numbers = {name.split(".")[0] for name, _ in engine.module.named_parameters()}
    expected = {
        str(layer)
        for place in engine._layout.places(engine.stage_id)
        for layer in range(parts[place.part_id], parts[place.part_id + 1])
    }
    assert numbers <= expected | {"tied_modules"}
    return differences(ours, stock_run()), parts, [line for line in lines if line.startswith("partition by hand")]


@pytest.mark.parametrize(
    ("stages", "partition", "changes", "options"),
    [  # seven layers
        (2, [0, 5, 7], {}, {}),
        (2, [0, 1, 7], {"slices": 1, "schedule": "1f1b"}, {"partition_method": "parameters"}),
        (2, [0, 3, 4, 5, 7], LOOP, {}),
        (2, [0, 1, 2, 6, 7], {"schedule": "zbv"}, {"partition_method": "type:Decoder"}),
        (2, [0, 5, 7], {"schedule": "chimera-seq"}, {}),
        (2, [0, 5, 7], {"schedule": "auto", **MEASURED}, {}),
        (2, [0, 3, 4, 5, 7], {"schedule": "auto", "chunks_per_stage": 2, **MEASURED}, {}),
        (3, [0, 1, 2, 3, 5, 6, 7], LOOP, {}),
        (3, [0, 4, 5, 7], {}, {}),
    ],
    ids=lambda value: value.get("schedule", "") if isinstance(value, dict) else None,
)
@pytest.mark.sample(2)
def test_layers_cut_by_hand_train_as_ever(
    stages: int, partition: list[int], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    how = {"stages": stages, "options": options, "partition": partition, **changes}
    found = rank_pool(stages).run(with_few_rounds, job=job_train, **how)
    assert not violations([errors for errors, *_ in found])
    assert all(parts == partition for _, parts, _ in found)
    (line,) = found[0][2]
    assert str(partition) in line and "partition_method" in line
    assert not any(lines for *_, lines in found[1:])


def test_a_partition_that_counts_as_the_planner_does() -> None:
    """Count an embedding, four decoder layers and a head, of a module that also has a norm."""
    found = rank_pool(2).run(job_train, stages=2, options={}, partition=[0, 3, 6])
    assert not violations([errors for errors, *_ in found])
    assert all(parts == [0, 3, 7] for _, parts, _ in found) and "[0, 3, 7]" in found[0][2][0]


def job_same_cut() -> tuple[bool, dict[str, float], list[str]]:
    with logged() as lines, engine_of(gpt_layers(), unchecked(partition=[0, 4, 7])) as engine:  # as "uniform" cuts them
        errors = differences(train(engine, batches(2)), stock_run(stages=2))
        return isinstance(engine.module, PartedModule), errors, [line for line in lines if "partition by hand" in line]


def test_the_own_cut_of_the_module_moves_nothing() -> None:
    found = rank_pool(2).run(job_same_cut)
    assert not any(moved for moved, *_ in found) and not violations([errors for _, errors, _ in found])
    assert ["[0, 4, 7] (part 0 has layers 0 to 3" in line for line in found[0][2]] == [True] and not found[1][2]


def job_refused(own: list[int] | None = None, laid_out: list[int] | None = None, **changes: Any) -> tuple[str, str]:
    module = pipeline_module(gpt_layers())
    if own is not None:
        module.partition = own
    if laid_out is not None:
        terapipe_ds.lay_out(module, config(terapipe=unchecked(partition=laid_out)))
    return raised_by(lambda: terapipe_ds.initialize(model=module, config=config(terapipe=unchecked(**changes))))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"partition": [0, 4, 8]}, ["terapipe.partition = [0, 4, 8]", "the module has 7 layers", "end it with 7"]),
        ({"partition": [0, 2, 4, 7]}, ["[0, 2, 4, 7]", "has 3 parts", "needs 2 (2 stages, 1 chunks", "give 3 numbers"]),
        ({"partition": [0, 4, 7], **LOOP}, ["has 2 parts", "needs 4 (2 stages, 2 chunks each)", "give 5 numbers"]),
        ({"partition": [0, 4, 7], "own": [0, 3, 7]}, ["terapipe.partition = [0, 4, 7]", "partition=[0, 3, 7]"]),
        ({"partition": [0, 4, 7], "laid_out": [0, 3, 7]}, ["laid out for", "[0, 3, 7]", "[0, 4, 7]"]),
        ({"own": [0, 1, 2, 3, 7]}, ["[0, 1, 2, 3, 7]", "has 4 parts", "needs 2"]),
    ],
)
def test_a_partition_that_cannot_be(changes: dict[str, Any], messages: list[str]) -> None:
    for kind, text in rank_pool(2).run(job_refused, **changes):
        assert kind == "TeraPipeConfigError" and all(message in text for message in messages), text


def job_of_rank(partitions: list[list[int] | None]) -> tuple[str, str]:
    import torch.distributed

    own = partitions[torch.distributed.get_rank()]
    return raised_by(lambda: build(gpt_layers(), unchecked(partition=own)))


def test_ranks_with_different_partitions_do_not_hang() -> None:
    for kind, text in rank_pool(2).run(job_of_rank, partitions=[[0, 5, 7], None]):
        assert kind == "TeraPipeConfigError" and "partition" in text, text


def job_save(folder: str, **changes: Any) -> None:
    with engine_of(gpt_layers(), unchecked(**changes) if changes else None) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(folder)


def job_load(folder: str, **changes: Any) -> dict[str, float]:
    with engine_of(gpt_layers(), unchecked(**changes) if changes else None) as engine:
        engine.load_checkpoint(folder)
        ours = train(engine, batches(2)[1:])
    stock = stock_run()
    stock = type(stock)(stock.losses[1:], stock.returned[1:], stock.gradients[1:], stock.parameters)
    return differences(ours, stock)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"partition": [0, 5, 7]}, {"partition": [0, 1, 2, 6, 7], "schedule": "zbv"}),
        ({"partition": [0, 5, 7]}, {"partition": [0, 2, 7]}),
        ({"partition": [0, 2, 7]}, {"slices": 2}),
        ({}, {"partition": [0, 5, 7]}),  # saved by the stock engine
    ],
)
@pytest.mark.sample(1)
def test_a_checkpoint_goes_on_with_another_partition(
    saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
) -> None:
    rank_pool(2).run(job_save, folder=str(tmp_path), **saved)
    assert not violations(rank_pool(2).run(job_load, folder=str(tmp_path), **loaded))


class Odd(nn.Linear):
    """A layer that stock DeepSpeed cuts by a type."""


def job_stock_method() -> tuple[list[int], tuple[str, str]]:
    layers = [LayerSpec(Odd, 4, 4), LayerSpec(Odd, 4, 4), *(LayerSpec(nn.Linear, 4, 4) for _ in range(4))]
    module = pipeline_module(layers, partition_method="type:Odd")
    vars(module).pop(PARTITION_METHOD, None)  # an earlier job of this process may have called `register`
    terapipe_ds.lay_out(module, config(terapipe=unchecked()))
    return list(module.parts), raised_by(
        lambda: terapipe_ds.lay_out(module, config(terapipe=unchecked(schedule="zbv")))
    )


def test_without_a_partition_the_method_of_the_module_counts() -> None:
    """Nothing tells the method if the module was built before `register`; more parts need it."""
    for parts, (kind, text) in rank_pool(2).run(job_stock_method):
        assert parts == [0, 1, 6] and kind == "TeraPipeConfigError"
        assert "neither 'parameters' nor 'uniform' gives the bounds [0, 1, 6]" in text
        assert "terapipe_ds.register() before" in text
