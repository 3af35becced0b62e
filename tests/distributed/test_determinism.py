"""Two runs with one seed are equal to the last bit: losses, gradients and parameters, with dropout and recompute."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.planning import choose_plan
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.test_planning import cut_anyway
from tests.small_models.parts import Embedding, Head, Mlp
from tests.zoo import ZOO
from tests.zoo.members import Member, spec_of
from tests.zoo.training import COUNTED

PLAN = [8, 9, 6]
# attention's own dropout is done by the backend that replays its random state in the backward
DROPPING = functools.partial(engines.gpt_layers, "float32", dropout=0.1, attention_dropout=0.2)


def trained(seed: int, schedule: str, **options: Any) -> tuple[engines.Run, float]:
    """Two steps, with evaluations around the first; replicas have data and random numbers of their own."""
    with engines.engine_of(DROPPING(), engines.section(slices=PLAN, schedule=schedule), **options) as engine:
        replica = engine.grid.get_data_parallel_rank()
        torch.manual_seed(100 * seed + engine.global_rank)
        data = [[engines.micro_batch(1000 * replica + 10 * step + i) for i in range(2)] for step in range(2)]
        evaluated = evaluation_of(engine)
        first = engines.train(engine, data[:1])
        engine.eval_batch(iter(data[0]))
        run = engines.train(engine, data[1:])
    run.losses[:0], run.returned[:0] = first.losses, first.returned
    run.gradients[:0] = first.gradients
    return run, evaluated


def evaluation_of(engine: PipelineEngine) -> float:
    return float(engine.eval_batch(iter([engines.micro_batch(7), engines.micro_batch(8)])))


def job_twice(schedule: str, stages: int, recomputing: str, **options: Any) -> dict[str, Any]:
    kinds = {kind: {**options, **engines.CHECKPOINTING[kind], "stages": stages} for kind in ("off", recomputing)}
    first, second = ({kind: trained(1, schedule, **kinds[kind])[0] for kind in kinds} for _ in range(2))
    plain, (other, evaluated) = first["off"], trained(2, schedule, **kinds["off"])
    with engines.engine_of(engines.gpt_layers("float32"), engines.section(slices=PLAN), **kinds["off"]) as engine:
        undropped = evaluation_of(engine)
    return {
        "evaluation": evaluated - undropped,
        "twice": [engines.error_of(vars(first[kind]), vars(second[kind])) for kind in kinds],
        "recomputed": max(engines.differences(first[recomputing], plain).values()),
        "other seed": engines.differences(other, plain),
        "steps": [len(plain.returned), len(plain.gradients), len(plain.parameters) > 3],
    }


def check(ranks: list[dict[str, Any]], recomputed: float) -> None:
    for rank in ranks:
        assert rank["twice"] == [0.0, 0.0]
        assert rank["recomputed"] <= recomputed, "a recomputed forward drops what the first one dropped"
        assert rank["other seed"]["returned"] > 1e-4, "there is dropout"
        assert rank["evaluation"] == 0.0, "dropout is for training"
        assert rank["steps"] == [2, 2, True]


@pytest.mark.parametrize("recomputing", [pytest.param("reentrant", marks=pytest.mark.full), "non_reentrant"])
def test_two_stages(recomputing: str) -> None:
    ranks = rank_pool(2).run(job_twice, schedule="seq1f1b", stages=2, recomputing=recomputing)
    check(ranks, recomputed=1e-5)


# -- measuring for "auto" and the check of the first batch change no bit ---------------------------------------


HEALTHY = (
    "Sliced", "Alibi", "GatedHeads", "TwiceSliced", "ParallelBlock", "Checkpointed", "WholeDecoder", "OwnCheckpoint",
    "Experts", "InPlace", "LearnedSlots", "MaskedWeights", "ScaledGradient", "NoisyExperts", "CountedTokens",
)  # fmt: skip


def models() -> list[Any]:
    rest = [each for each in HEALTHY if each != "NoisyExperts"]
    return [*COUNTED, "NoisyExperts", *(pytest.param(each, marks=pytest.mark.full) for each in rest)]


def _by_the_engine_and_by_hand(model: str) -> tuple[list[int], float, list[str]]:
    """Return the plan, how far the two trainings are from each other, and the warnings of the first."""
    counting = [spec_of(each) for each in (Embedding, Mlp, COUNTED[model][0], Head)] if model in COUNTED else []
    member = Member(model, counting) if counting else ZOO[model]
    data = [[ZOO["Sliced"].data(100 * step + index) for index in range(2)] for step in range(2)]
    options = {"loss_fn": member.loss_fn, **member.engine}
    runs, said, lengths = [], [], [9, 13, 1]
    for terapipe in ({"slices": "auto", "verify": "first_batch"}, {"slices": lengths, "verify": "off"}):
        torch.manual_seed(5)
        cut = mock.patch.object(choose_plan, "plan_slices", cut_anyway)
        with (
            cut,
            engines.logged() as lines,
            engines.engine_of(member.layers, engines.section(**terapipe), **options) as engine,
        ):
            runs.append([vars(engines.train(engine, data)), torch.rand(1)])
            lengths = list(engine.slice_plan(23).lengths)
            said.append("\n".join(lines))
    return lengths, engines.error_of(*runs), said


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", models())
def test_the_bits_of_the_plan_by_hand_or_a_warning(model: str) -> None:
    _, lost, says = COUNTED.get(model, (None, "", ""))
    seen = rank_pool(2).run(engines.with_few_rounds, job=_by_the_engine_and_by_hand, model=model)
    texts = "\n".join(said[0] for _, _, said in seen)
    assert [lengths for lengths, _, _ in seen] == [[9, 13, 1]] * 2
    assert ("cannot be put back" in texts) == bool(lost) and lost in texts, texts
    assert says in texts and ("counts calls" in texts) == ("counts calls" in says), texts
    assert any(error > 0 for _, error, _ in seen) == bool(lost), "bits"
