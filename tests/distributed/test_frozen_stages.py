"""Test that a PipelineModule with stages that train nothing trains with every schedule as on one stage.

DeepSpeed's own engine hangs there: a frozen stage gets no gradient to send.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

import terapipe_ds
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from terapipe_ds.schedule import SCHEDULE_NAMES
from tests.distributed import engines
from tests.distributed.cases import relative_error, worst_error
from tests.distributed.harness import rank_pool

CHUNKS = {"interleaved": 2, "seq1f1b-interleaved": 2}


class OneTrained(PipelineModule):
    """Freeze all layers but one while they are built."""

    trained = -1

    def _build(self) -> None:
        super()._build()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(f"{self.trained}."))


@functools.cache
def module_class(trained: int) -> type[PipelineModule]:
    return type("OneTrained", (OneTrained,), {"trained": trained})


def errors_of(trained: int, terapipe: dict[str, Any], stages: int, **changes: Any) -> dict[str, float]:
    """Return the largest errors on this rank against the stock engine with one stage."""
    given = {"module_class": module_class(trained), **changes}
    data = engines.batches(2)
    stock = engines.run_training(engines.gpt_layers, None, data, stages=1, **given)
    ours = engines.run_training(engines.gpt_layers, terapipe, data, stages=stages, **given)
    ours.parameters.pop(NOTHING_TRAINED, None)
    for ours_of_step, stock_of_step in zip(ours.gradients, stock.gradients, strict=True):
        ours_of_step.pop(NOTHING_TRAINED, None)
        assert set(ours_of_step) == {name for name in stock_of_step if name in ours.parameters}
    pairs = list(zip(ours.gradients, stock.gradients, strict=True))
    return {
        "returned": max(relative_error(a, b) for a, b in zip(ours.returned, stock.returned, strict=True)),
        "gradient": max(worst_error(a, b).error for a, b in pairs),
        "parameter": worst_error(ours.parameters, stock.parameters).error,
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("trained", [0, 1, 4, 5], ids="layer {}".format)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [(name, 2) for name in SCHEDULE_NAMES]
    + [(name, 3) for name in SCHEDULE_NAMES if not name.startswith("chimera")],  # which has an even number of stages
)
def test_one_layer_is_trained(schedule: str, trained: int, stages: int) -> None:
    changes = {"schedule": schedule, **({"chunks_per_stage": 2} if schedule in CHUNKS else {})}
    arguments = {"trained": trained, "terapipe": engines.unchecked(**changes), "stages": stages}
    errors = rank_pool(stages).run(errors_of, **arguments)
    assert not engines.violations(errors)


@pytest.mark.sample(1)
@pytest.mark.parametrize("trained", [0, 4], ids=["first stage", "last stage"])
def test_the_norm_is_that_of_the_trained_stage(trained: int) -> None:
    """Norms are fp32 in DeepSpeed."""
    arguments = {"trained": trained, "terapipe": engines.unchecked(), "stages": 2, "gradient_clipping": 0.01}
    errors = rank_pool(2).run(errors_of, **arguments)
    assert not engines.violations(errors, 1e-6)


def goes_on(folder: str, terapipe: dict[str, Any], **changes: Any) -> float:
    """Return the largest difference on this rank between two steps, and one step, a checkpoint, and another step."""
    data, given = engines.batches(2), {"module_class": module_class(4), **changes}
    layers = functools.partial(engines.gpt_layers, "float32")
    whole = engines.run_training(layers, terapipe, data, **given)
    with engines.engine_of(layers(), terapipe, **given) as engine:
        engines.train(engine, data[:1])
        engine.save_checkpoint(folder)
    with engines.engine_of(layers(), terapipe, **given) as engine:
        engine.load_checkpoint(folder)
        again = engines.train(engine, data[1:])
    pairs = ((again.parameters[name], value) for name, value in whole.parameters.items() if name != NOTHING_TRAINED)
    return max((float((a.float() - b.float()).abs().max()) for a, b in pairs), default=torch.inf)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("terapipe", "changes"),
    [({}, {}), ({"schedule": "zbv"}, {"bf16": {"enabled": True}, **engines.ZERO1})],
    ids=["fp32", "bf16 with ZeRO-1"],
)
def test_checkpoints_of_a_frozen_stage(terapipe: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "terapipe": engines.unchecked(**terapipe), **changes}
    assert rank_pool(2).run(goes_on, **arguments) == [0.0, 0.0]


def trained_by_hand(how: str) -> dict[str, float]:
    """Return the largest errors on this rank against model_parameters that are left to the engine."""
    changes: dict[str, Any] = {"bf16": {"enabled": True}, **engines.ZERO1} if how == "groups" else {}
    data, layers = engines.batches(2), functools.partial(engines.gpt_layers, "float32")
    expected = engines.run_training(layers, engines.unchecked(), data, module_class=module_class(4), **changes)
    module = engines.pipeline_module(layers(), module_class=module_class(4))
    config = engines.config(**changes) | {"terapipe": engines.unchecked()}
    optimizer = None
    if how == "optimizer":
        terapipe_ds.lay_out(module, config)
        values = config.pop("optimizer")["params"]
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=values["lr"])
    groups = [{"params": [p for p in module.parameters() if p.requires_grad]}] if how == "groups" else None
    engine = terapipe_ds.initialize(model=module, config=config, optimizer=optimizer, model_parameters=groups)[0]
    try:
        ours = engines.train(engine, data)
    finally:
        engine.destroy()
    return {"returned": max(relative_error(a, b) for a, b in zip(ours.returned, expected.returned, strict=True))}


@pytest.mark.parametrize("how", ["groups", "optimizer"])
def test_groups_and_an_own_optimizer_of_a_frozen_stage(how: str) -> None:
    errors = rank_pool(2).run(trained_by_hand, how=how)
    assert not engines.violations(errors, 1e-5)


def steps_with_a_frozen_table(**changes: Any) -> list[list[float]]:
    """Train a step with the tied embedding frozen after the start, and one with it; return its values before each."""
    found = []
    layers = engines.fp32_layers(tied_embedding=True)
    with engines.engine_of(layers, engines.unchecked(), **changes) as engine:
        table = engine.module.get_parameter("tied_modules.embedding.weight")
        for batch, trains in zip(engines.batches(2), (False, True), strict=True):
            found.append(table.flatten()[:9].tolist())
            table.requires_grad_(trains)
            engine.train_batch(iter(batch))
        return [*found, table.flatten()[:9].tolist()]


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_a_tied_weight_that_trains_later(dtype: str | None) -> None:
    """`BF16_Optimizer` had no gradient for it in the first step."""
    accumulated = {} if dtype is None else {"data_types": {"grad_accum_dtype": dtype}, **engines.ZERO1}
    one, other = rank_pool(2).run(steps_with_a_frozen_table, bf16={"enabled": True}, **accumulated)
    assert one == other and one[0] == one[1] != one[2]
