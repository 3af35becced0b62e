"""Test split backwards with Megatron's layers: the same training, and W has each linear layer's weight gradient."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.models.megatron import MegatronGPT
from terapipe_ds.runtime.profiling import rounds
from tests.distributed.cases import violations
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_cases import NUM_LAYERS, NUM_STEPS, Case, megatron_name
from tests.distributed.megatron_models import build_engine, build_model, engine_of, micro_batch
from tests.distributed.test_megatron import errors_of, ours

LIMIT = 1e-10
GQA: dict[str, Any] = {"accumulation": 2, "heads": "gqa", "tied": True}
BIASES: dict[str, Any] = {"accumulation": 2, "block": "gelu", "positions": "learned"}
MOE = Case(layout="tp2_pp2_sp", schedule="seq1f1b-zb", block="moe", accumulation=2)
CASES = [
    Case(layout="tp2_pp2", schedule="seq1f1b-zb", **GQA, recompute="uniform"),
    Case(layout="tp2_pp2_sp", schedule="seq1f1b-zb", **BIASES, recompute="layernorm"),
    Case(layout="tp2_pp2", schedule="zbv", **BIASES, recompute="mlp"),
    Case(layout="tp2_pp2_sp", schedule="zbv", **GQA),
    Case(layout="pp2", schedule="seq1f1b-zb", **BIASES),
    Case(layout="pp2", schedule="zbv", **GQA, recompute="core_attn"),
    pytest.param(Case(layout="tp2_pp2_sp", schedule="zb-h1", **GQA, recompute="block"), marks=pytest.mark.full),
    pytest.param(Case(layout="tp2_pp2_sp", schedule="zb-h1", plan="whole", **BIASES), marks=pytest.mark.full),
    pytest.param(MOE, marks=pytest.mark.full),
]


def count_products(engine: Any) -> dict[str, Any]:
    """Count what B of `engine` leaves to W from now on, by parameter, and the gradients that W reports."""
    names = {id(p): megatron_name(name) for name, p in engine.module.named_parameters()}
    left: Counter[str] = Counter()
    seen: dict[str, Any] = {"left": left, "computed": 0, "units": 0, "parameters": sorted(names.values())}
    keep, compute = engine.weight_gradients.keep, engine.weight_gradients.compute

    def counted_keep(weight: Any, *args: Any) -> None:
        left[names.get(id(weight), "a stand-in while measuring")] += 1
        keep(weight, *args)

    def counted_compute(*args: Any) -> int:
        count: int = compute(*args)
        seen["computed"] += count
        seen["units"] += 1
        return count

    engine.weight_gradients.keep, engine.weight_gradients.compute = counted_keep, counted_compute
    return seen


_LINEAR = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_w_computes_every_linear_layer_s_gradient_and_training_is_the_same(case: Case) -> None:
    run = ours(case, watch=count_products)
    found = errors_of(run, case)
    assert not violations(found, dict.fromkeys(found, LIMIT))
    slices = len(case.slices) if isinstance(case.slices, list) else case.slices
    runs = NUM_STEPS * case.accumulation * slices  # of each layer
    for record in run:
        seen = record.watched
        # the loss computes all gradients of the output projection in B
        linear = [name for name in seen["parameters"] if name.endswith(_LINEAR)]
        assert seen["computed"] == sum(seen["left"].values()) > 0
        assert seen["units"] == runs * (2 if case.schedule == "zbv" else 1)
        if case.block != "moe":
            assert dict(seen["left"]) == dict.fromkeys(linear, runs)
    layers = {name.split(".")[2] for record in run for name in record.watched["left"] if "layers." in name}
    assert len(layers) == NUM_LAYERS


def job_never_split(case: Case) -> tuple[str, list[Any]]:
    """Refuse to split backwards as in fp8; return the refusal of a schedule that does, and the times of W of "auto"."""
    times: list[Any] = []
    auto = {"enabled": True, "schedule": "auto", "slices": "auto", "granularity_tokens": 12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronGPT, "split_backwards_problem", "these products give all gradients at once")
        with pytest.raises(TeraPipeConfigError) as refused:
            build_engine(build_model(case), case)
        patch.setattr(rounds, "MAX_ROUNDS", rounds.MIN_ROUNDS)
        patch.setattr(rounds.Rounds, "weight_s", lambda self: times.append(self) or {})
        with engine_of(case, terapipe=auto) as engine:
            seen = count_products(engine)
            engine.train_batch(iter([micro_batch(case, 0, 0, i) for i in range(case.accumulation)]))
    return str(refused.value), [*times, *(seen["left"].keys() - {"a stand-in while measuring"})]


def test_a_model_that_cannot_split_is_measured_and_planned_so() -> None:
    for refusal, of_w in rank_pool(2).run(job_never_split, case=Case(layout="pp2", schedule="zb-h1")):
        assert "terapipe.schedule = 'zb-h1': these products give all gradients at once" in refusal
        assert 'give "auto", or a schedule that does not split backwards' in refusal and not of_w
