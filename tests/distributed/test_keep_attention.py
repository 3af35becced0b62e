"""Test `terapipe.keep_attention`: layers that recompute do not attend a second time, and train with the same bits."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import terapipe_ds
from terapipe_ds.attention.call import Call
from tests.distributed.engines import (
    batches,
    config,
    differences,
    engine_of,
    gpt_layers,
    pipeline_module,
    raised_by,
    section,
    stock_run,
    train,
    violations,
)
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import train_family

SLICES = 3
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one stage": ({}, {"recompute": [1]}),
    "dropout": ({"dropout": 0.2}, {}),
    "offloaded": ({}, {"offload_activations": True, "schedule": "terapipe", "slices": 6}),
    "split": ({}, {"schedule": "seq1f1b-zb"}),
    "whole": ({}, {"slices": 1, "schedule": "1f1b"}),
}


def kernel_runs(layers: list[Any], terapipe: dict[str, Any], dtype: str = "float32") -> tuple[Any, int]:
    """Return two steps of training, and how often a kernel of sliced attention ran forward in the second one."""
    torch.manual_seed(3)
    data = batches(2)
    attend, runs = Call._attend, []

    def counted(self: Call, *tensors: Any) -> Any:
        runs.append(self.layer)
        return attend(self, *tensors)

    with engine_of(layers, terapipe) as engine, mock.patch.object(Call, "_attend", counted):
        first = train(engine, data[:1])
        runs.clear()
        second = train(engine, data[1:])
    return [first, second], len(runs)


def job(name: str) -> dict[str, Any]:
    model, changes = LAYERS[name]
    found = {}
    for kept in (False, True):
        terapipe = section(
            **{"slices": SLICES, "recompute": "full", "verify": "off", "partition": [0, 3, 7], **changes},
            keep_attention=kept,
        )
        found[kept] = kernel_runs(gpt_layers("float32", **model), terapipe)
    (full, runs), (ours, kept_runs) = found[False], found[True]
    pairs = [
        ([*one.gradients, one.parameters], [*other.gradients, other.parameters])
        for one, other in zip(full, ours, strict=True)
    ]
    # a whole sequence has torch's own function where nothing is kept
    is_same = torch.equal if name != "whole" else functools.partial(torch.allclose, rtol=1e-4, atol=1e-5)
    same = all(is_same(a[key], b[key]) for one, other in pairs for a, b in zip(one, other, strict=True) for key in a)
    losses = [[one.returned for one in runs_of] for runs_of in (full, ours)]
    if name == "whole":
        losses = [[[round(value, 5) for value in one] for one in runs_of] for runs_of in losses]
    with torch.random.fork_rng():
        wide = section(**{"slices": SLICES, "recompute": "full", **changes}, keep_attention=True)
        with engine_of(gpt_layers(), wide) as engine:
            errors = differences(train(engine, batches(2)), stock_run())
    return {"same": same and losses[0] == losses[1], "runs": (runs, kept_runs), "errors": errors}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(3)
def test_the_same_bits_with_half_of_the_kernels(name: str) -> None:
    ranks = rank_pool(2).run(job, name=name)
    slices = LAYERS[name][1].get("slices", SLICES)
    for stage_id, found in enumerate(ranks):
        assert found["same"], (name, stage_id)
        full, kept = found["runs"]
        assert kept == 2 * 2 * slices, "two layers of a stage, two micro-batches"
        is_again = (
            stage_id in LAYERS[name][1].get("recompute", [0, 1]) and name != "whole"
        )  # torch's own is not counted
        assert name == "whole" or full == (2 if is_again else 1) * kept
    assert not violations([found["errors"] for found in ranks])


def job_family() -> tuple[dict[str, float], list[str]]:
    return train_family("llama", section(slices=[7, 3, 6], recompute="full", keep_attention=True), wide=False)


def test_a_llama_of_transformers_equals_the_whole_model() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")
    assert not violations([errors for errors, _ in rank_pool(2).run(job_family)])


def refusal(**changes: Any) -> tuple[str, str]:
    module = pipeline_module(gpt_layers())
    return raised_by(lambda: terapipe_ds.initialize(model=module, config=config(terapipe=section(**changes))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": "off"}, 'nothing recomputes; set recompute to "full"'),
        ({}, 'no layer is recomputed by DeepSpeed; set terapipe.recompute to "full"'),
        ({"recompute": "full", "compile": True}, "compiled layers run all of their forward again"),
    ],
)
def test_a_setting_without_effect_is_refused(changes: dict[str, Any], message: str) -> None:
    for kind, text in rank_pool(2).run(refusal, keep_attention=True, **changes):
        assert kind == "TeraPipeConfigError" and message in text, text
