"""Schedules with several parts per stage and with split backwards: times, memory, and the bound that none beats."""

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy import Cluster, LayerChain, rank_strategies, simulate_strategy
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, Candidate, owners_of
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.question import layers_of
from terapipe_ds.planner.strategy.rates import granule_of, least_of
from terapipe_ds.planner.strategy.search import Search
from terapipe_ds.planner.strategy.shapes import NAMES, WHOLE, Shape
from terapipe_ds.planner.strategy.space import Choices, Space
from terapipe_ds.schedule import build
from terapipe_ds.schedule.placement import LOOPED, V_SHAPED
from terapipe_ds.simulator.few import replay_few
from terapipe_ds.strategy import Grid
from tests.costs import CostsOf

CLUSTER = Cluster("v100", 2, 2)
SMALL: Any = {"global_batch_size": 4, "sequence_length": 512}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Costs that grow with the prefix, and of which a share is the weights' gradients."""

    floor_s: float
    per_token_s: float
    per_pair_s: float
    share: float

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.floor_s + self.per_token_s * tokens + self.per_pair_s * tokens * (prefix + tokens / 2)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 2 * self.forward_s(tokens, prefix)

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.share * self.per_token_s * tokens


def drawn_chain(rng: random.Random) -> LayerChain:
    count = rng.randint(4, 7)
    layers = [
        Layer(rng.uniform(0, 2e-4), rng.uniform(1e-6, 1e-5), rng.uniform(0, 1e-8), rng.random()) for _ in range(count)
    ]
    whole = [layer.forward_s(256, 0) for layer in layers]
    sizes = [[rng.uniform(0, most) for _ in range(count)] for most in (1e7, 1e9, 3e8)]
    return LayerChain(whole, [2 * s for s in whole], *sizes, costs=layers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_cut_or_slices_beat_the_bound(seed: int) -> None:
    """Random chains, links and limits: every score of every candidate is at least its bound, and that of its cut."""
    rng = random.Random(seed)
    rates = {"within_bytes_per_s": rng.uniform(1e9, 1e11), "between_bytes_per_s": rng.uniform(1e8, 1e10)}
    cluster = Cluster("v100", 2, 2, **rates)
    layers = layers_of(drawn_chain(rng), cluster, 256, "auto")
    limit = rng.choice([math.inf, rng.uniform(2e9, 2e10)])
    space = Space(layers, cluster, 4, 256, limit)
    search, scored = Search(space), 0
    for candidate in space.candidates():
        priced = Priced(layers, cluster, 256, candidate)
        bound_s = max(search._bound_s(priced), search._bound_s(priced, limit))
        for schedule in NAMES:
            chunks = 2 if schedule in ("interleaved", "seq1f1b-interleaved", "zbv") else 1
            parts = chunks * candidate.grid.pipe
            if parts > layers.num_layers or (candidate.grid.pipe == 1 and chunks > 1):
                continue
            for slices in (1, 4):
                inner = sorted(rng.sample(range(1, layers.num_layers), parts - 1))
                cuts = [(0, *inner, layers.num_layers), *priced.equal_cuts(slices, chunks)]
                for cut in cuts:
                    plan = SlicePlan.equal(256, slices)
                    score = priced.score(cut, Shape(schedule, chunks), plan, limit)
                    if score is not None:
                        scored += 1
                        assert score.seconds >= bound_s * (1 - 1e-9), (candidate, schedule, cut, slices)
    assert scored > (20 if limit == math.inf else 0)


@pytest.mark.parametrize("length", [65, 200, 1000])
def test_no_slices_that_a_search_tries_take_less_than_the_least(length: int) -> None:
    """Short slices are cheap here, and equal ones end at multiples of no granule."""
    work_s, first_s = least_of(CostsOf(lambda tokens, _: tokens**2, lambda tokens, _: 2 * tokens**2), length)
    for slices in itertools.takewhile(lambda count: count <= -(-length // 64), (1, 2, 4, 8, 16)):
        lengths = SlicePlan.equal(length, slices).lengths
        assert work_s <= 3 * sum(tokens**2 for tokens in lengths) and first_s <= lengths[0] ** 2


def test_planned_slices_end_at_the_granules_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    search, priced = equal_chain(4, 4, 8192)
    score = priced.score((0, 1, 2, 3, 4), Shape("seq1f1b"), SlicePlan.equal(8192, 128), math.inf)
    assert score is not None
    planned: list[int] = []

    def spy(*question: Any, **options: Any) -> Any:
        planned.append(question[4])
        return plan_slices(*question, **options)

    monkeypatch.setattr("terapipe_ds.planner.strategy.search.plan_slices", spy)
    search._plan_slices(priced, score)
    assert planned == [granule_of(8192)] == [128]


def equal_chain(num_layers: int, pipe: int, length: int = 4096) -> tuple[Search, Priced]:
    """Return a search over layers that cost the same, and its candidate of `pipe` stages and whole batches."""
    cluster, layer = Cluster("v100", 1, pipe), Layer(0.0, 1e-6, 0.0, 0.5)
    whole_s = layer.forward_s(length, 0)
    numbers = ([number] * num_layers for number in (whole_s, 2 * whole_s, 0.0, 0.0, 0.0))
    layers = layers_of(LayerChain(*numbers, costs=[layer] * num_layers), cluster, length, "auto")
    space = Space(layers, cluster, 1, length, math.inf)
    [candidate] = [
        each for each in space.candidates() if each.grid.pipe == pipe and not any(vars(each.levers).values())
    ]
    search = Search(space)
    return search, search.price(candidate)


def test_stages_of_several_parts_have_equal_work() -> None:
    """Three stages of three layers in two parts each: parts as equal as possible may leave a stage with four."""
    _, priced = equal_chain(9, 3)
    cuts = priced.equal_cuts(1, 2)
    sizes = [[stop - start for start, stop in itertools.pairwise(cut)] for cut in cuts]
    assert [3] * 3 in [[one + other for one, other in zip(of[:3], of[3:], strict=True)] for of in sizes]


def test_slices_are_halved_while_that_saves_time() -> None:
    """Without a cost per slice more slices are always better; planned slices are at most twice as many."""
    search, priced = equal_chain(4, 4)
    score = priced.score((0, 1, 2, 3, 4), Shape("seq1f1b"), SlicePlan.equal(4096, 2), math.inf)
    assert score is not None
    search.scores[priced.candidate, score.shape] = score
    search._improve({priced.candidate: priced})
    assert search.scores[priced.candidate, score.shape].plan.num_slices >= 32


def test_an_interrupt_in_the_last_replay_keeps_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    search, priced = equal_chain(4, 4)
    score = priced.score((0, 1, 2, 3, 4), Shape("seq1f1b"), SlicePlan.equal(4096, 2), math.inf)
    assert score is not None
    few = dataclasses.replace(score, is_final=False)
    search.scores[priced.candidate, score.shape] = few

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_next_finalist", lambda *_: None)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Priced, "score", interrupted)
        search._improve({priced.candidate: priced})
    assert list(search.scores.values()) == [few]
    search._improve({priced.candidate: priced})
    assert list(search.scores.values()) == [score]


@pytest.mark.parametrize(("most", "is_proven"), [(None, False), (None, True), (100, False)])
def test_a_score_is_final_if_it_is_proven_or_its_replay_has_a_limit(
    most: int | None, is_proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search replays the best score again until it is final."""
    _, priced = equal_chain(4, 4)
    monkeypatch.setattr(
        "terapipe_ds.planner.strategy.priced.replay_few",
        lambda *args, **options: dataclasses.replace(replay_few(*args, **options), is_proven=is_proven),
    )
    score = priced.score((0, 1, 2, 3, 4), Shape("seq1f1b"), SlicePlan.equal(4096, 2), math.inf, most)
    assert score is not None and score.is_final is (is_proven or most is not None)


def test_schedules_are_tried_for_all_candidates_that_may_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[tuple[Candidate, Shape]] = set()
    score = Priced.score

    def spy(self: Priced, bounds: Any, shape: Shape, *rest: Any) -> Any:
        tried.add((self.candidate, shape))
        return score(self, bounds, shape, *rest)

    monkeypatch.setattr(Priced, "score", spy)
    best = rank_strategies("mini", CLUSTER, global_batch_size=8, sequence_length=1024)[0]
    space = Space(layers_of("mini", CLUSTER, 1024, "auto"), CLUSTER, 8, 1024, math.inf)
    for candidate in space.candidates():
        if candidate.levers != NO_LEVERS:  # where everything fits they save no time
            continue
        for proposal in Search(space)._proposals_of(Search(space).price(candidate)):
            assert proposal.seconds >= best.predicted_s or (candidate, proposal.shape) in tried


@pytest.mark.sample(4)
@pytest.mark.parametrize("question", [
    {"schedule": "zbv"},
    {"schedule": "interleaved", "stages": 2},
    {"schedule": "seq1f1b-interleaved", "stages": 4},
    {"schedule": "seq1f1b-zb", "stages": 4},
    {"chunks_per_stage": 4, "stages": 2},
    {"schedule": "terapipe", "stages": 2},
    {},
], ids=str)  # fmt: skip
def test_the_prediction_is_the_simulation_with_its_ends(question: dict[str, Any]) -> None:
    best = rank_strategies("mini", CLUSTER, **SMALL, **question)[0]
    assert len(best.partition) - 1 == best.grid["pipe"] * best.chunks_per_stage
    if "schedule" in question:
        assert best.schedule == question["schedule"]
    timeline = simulate_strategy(best, "mini", CLUSTER)
    candidate = Candidate(best.layout, best.micro_batch_size, best.accumulation, best.zero_stage)
    priced = Priced(layers_of("mini", CLUSTER, 512, "auto"), CLUSTER, 512, candidate)
    stages = range(best.grid["pipe"])
    done_s = [max(e.end_s for e in timeline.events if e.stage_id == k and e.kind in "FBW") for k in stages]
    ends_s = priced.ends_s(tuple(best.partition), owners_of(best.schedule, len(stages), best.chunks_per_stage))
    assert best.predicted_s == pytest.approx(max(d + e for d, e in zip(done_s, ends_s, strict=True)), rel=1e-9)
    assert best.lower_bound_s <= best.predicted_s


def test_parts_of_a_stage_share_its_device_and_its_end() -> None:
    """By hand: on a V stage 0 has the first and the last part, no link in the middle, and both ends of the model."""
    candidate = Candidate(Grid(2, 2, 1), 1, 4, 0)
    priced = Priced(layers_of("mini", CLUSTER, 512, "auto"), CLUSTER, 512, candidate)
    bounds, owners = (0, 3, 5, 7, 10), owners_of("zbv", 2, 2)
    assert owners == (0, 1, 1, 0)
    parts = priced.parts(bounds, (False, False), owners)
    assert [part.send_s(512) > 0 for part in parts] == [True, False, True, False]
    apart = priced.ends_s(bounds[:2] + bounds[3:4] + bounds[4:], (0, 1, 0))
    together = priced.ends_s(bounds, owners)
    assert together == pytest.approx(apart)  # where a stage's layers are cut among its parts does not matter


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpipe", "terapipe")])
def test_live_slices_are_those_of_the_schedule(name: str) -> None:
    """The batch fills the pipeline. The formula is exact if slices and stages divide, and within one otherwise."""
    parts = (2,) if name in V_SHAPED else (2, 4) if name in LOOPED else (1,)
    for stages, slices, chunks in itertools.product((2, 4, 8), (1, 4, 6, 8), parts):
        shape = Shape(name, chunks)
        if slices > 1 and name in WHOLE:
            continue
        peaks = build(name, stages, 2 * stages, slices, chunks_per_stage=shape.chunks).peak_live_slices()
        live = [shape.live_slices(stages, stage_id, slices) for stage_id in range(stages)]
        exact = stages % slices == 0 or slices % stages == 0
        assert live == pytest.approx([peak / shape.chunks for peak in peaks], abs=1e-9 if exact else 1), (shape, slices)


@pytest.mark.sample(3)
@pytest.mark.parametrize("offloads", [False, True], ids=["on devices", "offloaded"])
@pytest.mark.parametrize(("shape", "least", "most"), [
    (Shape("seq1f1b"), 0.96, 1.05),
    (Shape("terapipe"), 0.97, 1.03),
    (Shape("seq1f1b-interleaved", 2), 0.85, 1.17),
    (Shape("seq1f1b-zb"), 0.96, 1.29),
], ids=str)  # fmt: skip
def test_estimated_bytes_are_near_those_of_a_replay(shape: Shape, least: float, most: float, offloads: bool) -> None:
    """Of llama-3-8b in bf16; the exact times between computations decide more where parts or split backwards mix.

    Errors are shares of the bytes of the stock engine, which keeps `.grad` as well.
    """
    cluster, length = Cluster("h100", 1, 8), 65536
    layers = layers_of("llama-3-8b", cluster, length, "auto")
    space = Space(layers, cluster, 8, length, math.inf, Choices(*[None] * 4, offloads, offload_optimizer=False))
    # which axis comes first changes no bytes
    first = [one for one in space.candidates() if one.grid.axes[0] == "pipe"]
    candidates = [one for one in first if one.grid.pipe > 1 and one.micro_batch == 1]
    shares = []
    for candidate, slices, again in itertools.product(candidates, (4, 32), layers.kinds):
        priced = Priced(layers, cluster, length, candidate)
        cut, owners = (
            priced.equal_cuts(slices, shape.chunks)[0],
            owners_of(shape.schedule, candidate.grid.pipe, shape.chunks),
        )
        plan, recompute = SlicePlan.equal(length, slices), [again] * candidate.grid.pipe
        peaks = priced.price(cut, shape, plan, recompute).peak_bytes
        parameters = layers._parameters(candidate.setting)
        of_stages = np.bincount(owners, [parameters[slice(*edges)].sum() for edges in itertools.pairwise(cut)])
        errors = priced._peaks_of(cut, owners, shape, slices, again) - peaks
        shares.append(1 + errors / (peaks + 2 * of_stages))
    assert len(shares) > 30 and np.concatenate(shares).min() > least and np.concatenate(shares).max() < most


@pytest.mark.parametrize("slices", [16, 64])
def test_estimated_bytes_of_split_backwards_have_the_copies_of_their_w(slices: int) -> None:
    """Several slices have one W, which copies the factors of a weight for all of them."""
    cluster, length, shape = Cluster("v100", 1, 4), 8192, Shape("seq1f1b-zb")
    layers = layers_of("mini", cluster, length, "float32")
    priced = Priced(layers, cluster, length, Candidate(Grid(4, 1, 1), 1, 8, 0))
    [cut], owners = priced.equal_cuts(slices, 1), owners_of(shape.schedule, 4, 1)
    for again in layers.kinds:
        peaks = priced.price(cut, shape, SlicePlan.equal(length, slices), [again] * 4).peak_bytes
        assert priced._peaks_of(cut, owners, shape, slices, again) == pytest.approx(peaks, rel=2e-3), again
