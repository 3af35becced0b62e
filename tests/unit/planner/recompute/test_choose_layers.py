"""Which layers recompute: against every subset of small pipelines, and what the choice is made of."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, MemoryModel, PartMemory, PlannerError, describe
from terapipe_ds.planner.layers.layer import Layer
from terapipe_ds.planner.recompute import PartLayers, choose_layers, plan_with_recompute
from terapipe_ds.planner.recompute.choose_layers import recompute_everything
from terapipe_ds.planner.recompute.frontier import MOST_SUBSETS, frontier
from terapipe_ds.planner.search.candidates import compositions
from terapipe_ds.schedule import Schedule, build
from terapipe_ds.simulator import Replay


@dataclass(frozen=True)
class Costs:
    """`scale` times a curve that all layers share."""

    forward: float
    backward: float
    weight: float = 0.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.forward * (1 + tokens + 0.01 * tokens * prefix)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.backward * (1 + tokens + 0.01 * tokens * prefix)

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.weight * tokens


def layer_of(layer_id: int, costs: Costs, saved: float, received: float, whole: float = 0.0) -> Layer:
    """A layer by its bytes per token: kept of a slice, received, and kept besides of a whole sequence."""
    memory = PartMemory(0, saved, whole_bytes_per_token=whole)
    return Layer(costs, memory=memory, input_bytes=received, layer_id=layer_id)


def part_of(layers: Sequence[Layer], besides: float = 3.0, **memory: Any) -> PartLayers:
    forward = sum(layer.costs.forward for layer in layers)
    backward = sum(layer.costs.backward for layer in layers)
    whole = sum(layer.whole_bytes for layer in layers)
    kept = besides + sum(layer.kept_bytes(False) for layer in layers)
    known: dict[str, Any] = {
        "static_bytes": 50, "store_bytes_per_token": 2.0, "store_grad_bytes_per_token": 4.0, "working_bytes": 7,
        "working_bytes_per_token": 2.0, "gradient_bytes": 20, "whole_bytes_per_token": whole,
    }  # fmt: skip
    return PartLayers(Costs(forward, backward), PartMemory(slice_bytes_per_token=kept, **known | memory), tuple(layers))


def random_part(rng: random.Random, count: int, first: int, alike: bool, keeps: bool = False) -> PartLayers:
    shared = Costs(rng.randint(1, 9), rng.randint(1, 20)), rng.randint(2, 30), rng.randint(1, 9), rng.randint(0, 9)
    layers = []
    for index in range(count):
        own = Costs(rng.randint(1, 9), rng.randint(1, 20)), rng.randint(2, 30), rng.randint(1, 9), rng.randint(0, 9)
        layer = layer_of(first + index, *(shared if alike else own))
        if keeps:  # a second forward takes the results of attention, which need no time
            again = Costs(layer.costs.forward / 4, 0)
            layer = replace(layer, attention_bytes=1 + layer.input_bytes / 2, again_costs=again)
        layers.append(layer)
    return part_of(layers)


def every_memory(part: PartLayers, is_whole: bool) -> Iterator[tuple[tuple[int, ...], PartMemory]]:
    """All subsets, with the memory of the part by its definition."""
    memory, layers = part.memory, part.layers
    for count in range(len(layers) + 1):
        for chosen in itertools.combinations(range(len(layers)), count):
            own = [x.input_bytes + x.attention_bytes for x in layers]
            kept = [own[i] if i in chosen else x.kept_bytes(is_whole) for i, x in enumerate(layers)]
            besides = memory.slice_bytes_per_token - sum(layer.kept_bytes(False) for layer in layers)
            moments = [besides + sum(kept[:index]) + layers[index].kept_bytes(is_whole) for index in chosen]
            beyond = max([0.0, *(moment - besides - sum(kept) for moment in moments)])
            stays = [layer for index, layer in enumerate(layers) if index not in chosen]
            slices = besides + sum(layer.kept_bytes(False) for layer in stays)
            slices += sum(own[index] for index in chosen)
            rates = {"slice_bytes_per_token": slices, "whole_bytes_per_token": sum(x.whole_bytes for x in stays)}
            yield chosen, replace(memory, **rates, working_bytes_per_token=memory.working_bytes_per_token + beyond)


def fastest_by_hand(parts: Sequence[PartLayers], schedule: Schedule, plan: SlicePlan, limit: float) -> float | None:
    """The least makespan over all subsets of all stages at once that fit; None: none does."""
    replay, options = Replay.of(schedule), []
    for stage_id, part in enumerate(parts):
        fitting = []
        for chosen, memory in every_memory(part, plan.num_slices == 1):
            model = MemoryModel(tuple(memory if k == stage_id else other.memory for k, other in enumerate(parts)))
            if replay.peak_bytes(plan, model)[stage_id] <= limit:
                chosen_layers = [part.layers[index] for index in chosen]
                again = sum((layer.again_costs or layer.costs).forward for layer in chosen_layers)
                fitting.append(replace(part.costs, backward=part.costs.backward + again))
        options.append(list(dict.fromkeys(fitting)))
    return min((replay.makespan(plan, list(one)) for one in itertools.product(*options)), default=None)


CASES = [("seq1f1b", 2, 3), ("1f1b", 2, 2), ("terapipe", 2, 2), ("seq1f1b-zb", 2, 2), ("seq1f1b", 3, 2)]


@pytest.mark.sample(15)
@pytest.mark.parametrize(("name", "stages", "layers"), CASES)
@pytest.mark.parametrize("lengths", [(8,), (3, 5), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_no_subset_makes_a_shorter_step(
    name: str, stages: int, layers: int, lengths: tuple[int, ...], alike: bool, keeps: bool
) -> None:
    rng, plan, answers = random.Random(f"{name} {lengths} {alike}"), SlicePlan(lengths), set()
    schedule = build(name, stages, 3, len(lengths))
    for _ in range(6):
        parts = [random_part(rng, layers, stage_id * layers, alike, keeps) for stage_id in range(stages)]
        peaks = Replay.of(schedule).peak_bytes(plan, MemoryModel(tuple(part.memory for part in parts)))
        for share in (0.5, 0.7, 0.85, 1.0):
            limit = share * max(peaks)
            expected = fastest_by_hand(parts, schedule, plan, limit)
            if expected is None:
                with pytest.raises(MemoryLimitError, match=r"stage \d needs .* raise planner.memory_limit_gb"):
                    choose_layers(parts, schedule, plan, limit)
                continue
            choice = choose_layers(parts, schedule, plan, limit)
            timeline = Replay.of(schedule).run(plan, list(choice.costs), memory=choice.memory)
            assert timeline.makespan_s == pytest.approx(expected, rel=1e-9)
            assert timeline.peak_bytes is not None and max(timeline.peak_bytes) <= limit
            answers.add(choice.layers)
    assert len(answers) > 3  # limits that matter


EQUAL = [layer_of(layer_id, Costs(1.0, 2.0), 12.0, 2.0, 3.0) for layer_id in range(4)]


def test_of_equal_layers_the_first_recompute_because_the_last_are_done_before_them() -> None:
    subsets = frontier(EQUAL, [1.0] * 4, False)
    assert [one.layers for one in subsets] == [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert [one.kept / 1024 for one in subsets] == [48, 38, 28, 18, 8]
    assert [one.moment / 1024 for one in subsets] == [0, 12, 14, 16, 18]


def test_later_stages_recompute_less() -> None:
    parts = [part_of([replace(layer, layer_id=4 * k + layer.layer_id) for layer in EQUAL]) for k in range(4)]
    plan, schedule = SlicePlan((8, 8, 8)), build("seq1f1b", 4, 4, 3)
    peaks = Replay.of(schedule).peak_bytes(plan, MemoryModel(tuple(part.memory for part in parts)))
    assert list(peaks) == sorted(peaks, reverse=True)
    counts = [len(layers) for layers in choose_layers(parts, schedule, plan, peaks[3]).layers]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[3] == 0
    assert choose_layers(parts, schedule, plan, peaks[0]).layers == ((),) * 4


def test_a_layer_that_keeps_only_its_input_never_recomputes() -> None:
    parts = [part_of([layer_of(0, Costs(1.0, 1.0), 2.0, 2.0), layer_of(1, Costs(1.0, 1.0), 9.0, 2.0)])]
    plan, schedule = SlicePlan((4, 4)), build("seq1f1b", 1, 1, 2)
    with pytest.raises(MemoryLimitError):
        choose_layers(parts, schedule, plan, 1.0)
    need = Replay.of(schedule).peak_bytes(plan, MemoryModel((parts[0].memory,)))[0]
    assert choose_layers(parts, schedule, plan, need - 1).layers == ((1,),)


def test_many_different_layers_are_compared_in_bounded_time() -> None:
    rng = random.Random(1)
    layers = [layer_of(i, Costs(rng.random(), 1.0), 2 + 30 * rng.random(), rng.random()) for i in range(40)]
    subsets = frontier(layers, [rng.random() for _ in layers], False)
    assert len(subsets) <= MOST_SUBSETS
    assert subsets[0].layers == () and [one.again for one in subsets] == sorted(one.again for one in subsets)


def pipeline(costs: Costs = Costs(1.0, 2.0)) -> list[PartLayers]:
    layers = [layer_of(layer_id, costs, 12.0, 2.0, 3.0) for layer_id in range(4)]
    return [part_of([replace(layer, layer_id=4 * k + layer.layer_id) for layer in layers]) for k in range(4)]


def limit_of(parts: Sequence[PartLayers], schedule: str, plan: SlicePlan, share: float) -> float:
    model = MemoryModel(tuple(part.memory for part in parts))
    return share * max(Replay.of(build(schedule, 4, 4, plan.num_slices)).peak_bytes(plan, model))


@pytest.mark.parametrize("schedule", ["seq1f1b", pytest.param("auto", marks=pytest.mark.full)])
def test_slices_and_layers_are_found_together(schedule: str) -> None:
    parts, plan = pipeline(), SlicePlan.equal(32, 4, 2)
    limit = limit_of(parts, "seq1f1b", plan, 0.6)
    result = plan_with_recompute(parts, 32, 4, 2, schedule, limit)
    given = plan_with_recompute(parts, 32, 4, 2, schedule, limit, plan=plan)
    assert result.predicted_s <= given.predicted_s
    for each in (result, given):
        assert each.peak_bytes is not None and max(each.peak_bytes) <= limit
        choice = choose_layers(parts, build(each.schedule, 4, 4, each.plan.num_slices), each.plan, limit)
        replayed = Replay.of(build(each.schedule, 4, 4, each.plan.num_slices)).makespan(each.plan, list(choice.costs))
        assert each.predicted_s == pytest.approx(replayed) and choice.layers == each.recompute
    searched: list[str] = []
    again = plan_with_recompute(parts, 32, 4, 2, schedule, limit, progress=lambda name, *_: searched.append(name))
    assert again == result  # the same on every rank
    assert "seq1f1b" in searched  # the watch-dog of a job hears of each step
    text = "\n".join(describe(result))
    assert "recompute stage 0: layers 0" in text and "more" in text


@pytest.mark.parametrize("granules", [6, 14])  # all plans are judged, and some
def test_a_search_has_an_answer_where_some_slices_do(granules: int) -> None:
    rng = random.Random(granules)
    for _ in range(12):
        stages, micro_batches, schedule = rng.randint(1, 3), rng.randint(1, 4), rng.choice(("seq1f1b", "terapipe"))
        parts = [random_part(rng, 2, 2 * stage_id, alike=False) for stage_id in range(stages)]
        cuts = sorted(rng.sample(range(1, granules), rng.randint(1, min(7, granules - 1))))
        plan = SlicePlan(tuple(4 * (b - a) for a, b in itertools.pairwise((0, *cuts, granules))))
        order = build(schedule, stages, micro_batches, plan.num_slices)
        everything = recompute_everything(parts, plan, micro_batches)
        limit = max(Replay.of(order).peak_bytes(plan, everything.memory))
        result = plan_with_recompute(parts, 4 * granules, micro_batches, 4, schedule, limit)
        # the layers are the fastest ones of the slices that were found, and fit
        order = build(schedule, stages, micro_batches, result.num_slices)
        choice = choose_layers(parts, order, result.plans[0], limit)
        timeline = Replay.of(order).run(result.plans, list(choice.costs), memory=choice.memory)
        assert choice.layers == result.recompute and result.predicted_s == pytest.approx(timeline.makespan_s)
        assert result.peak_bytes == timeline.peak_bytes and max(timeline.peak_bytes or ()) <= limit


@pytest.mark.parametrize("seed", [83, 430])
def test_layers_that_leave_no_room_for_slices_hide_no_answer_of_others(seed: int) -> None:
    """Whole sequences fit with everything recomputed; the layers chosen for cut ones leave no room in one start."""
    rng, plan = random.Random(seed), SlicePlan((12,))
    stages, micro_batches = rng.randint(1, 3), rng.randint(1, 4)
    parts = [random_part(rng, 2, 2 * stage_id, alike=False) for stage_id in range(stages)]
    everything = recompute_everything(parts, plan, micro_batches)
    replay = Replay.of(build("1f1b", stages, micro_batches, 1))
    limit = max(replay.peak_bytes(plan, everything.memory))
    result = plan_with_recompute(parts, 12, micro_batches, 4, "1f1b", limit)
    assert result.predicted_s <= replay.makespan(plan, list(everything.costs)) * (1 + 1e-9)
    assert result.peak_bytes is not None and max(result.peak_bytes) <= limit


@pytest.mark.parametrize("seed", range(3))
def test_a_proof_holds_for_all_slices_and_layers(seed: int) -> None:
    rng, schedule, answers = random.Random(seed), "seq1f1b", set()
    for _ in range(12):
        granules, micro_batches = rng.randint(2, 4), rng.randint(1, 3)
        parts = [random_part(rng, 2, 2 * stage_id, alike=False) for stage_id in range(2)]
        plans = [SlicePlan.of_granules(one, 4 * granules, 4) for one in compositions(granules, granules)]
        orders = [build(schedule, 2, micro_batches, plan.num_slices) for plan in plans]
        least = min(
            max(Replay.of(order).peak_bytes(plan, recompute_everything(parts, plan, micro_batches).memory))
            for plan, order in zip(plans, orders, strict=True)
        )
        limit, times = rng.choice((1.0, 1.2, 1.5, 5.0)) * least, []
        for plan, order in zip(plans, orders, strict=True):
            with contextlib.suppress(MemoryLimitError):
                costs = list(choose_layers(parts, order, plan, limit).costs)
                times.append(Replay.of(order).makespan(plan, costs))
        result = plan_with_recompute(parts, 4 * granules, micro_batches, 4, schedule, limit)
        assert result.lower_bound_s <= min(times) * (1 + 1e-9)
        assert not result.optimal or result.predicted_s == pytest.approx(min(times), rel=1e-9)
        answers.add(result.optimal)
    assert answers == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_a_search_is_never_slower_than_equal_slices(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        parts, schedule = [random_part(rng, 2, 2 * stage_id, alike=False) for stage_id in range(2)], "seq1f1b"
        least = limit_of([*parts, *parts], schedule, SlicePlan.equal(32, 4), 1.0)
        limit, times = rng.uniform(0.2, 0.8) * least, []
        for count in (1, 2, 3, 4, 6, 8):
            with contextlib.suppress(MemoryLimitError):
                equal = SlicePlan.equal(32, count, 4)
                times.append(plan_with_recompute(parts, 32, 3, 4, schedule, limit, plan=equal).predicted_s)
        if times:
            result = plan_with_recompute(parts, 32, 3, 4, schedule, limit)
            assert result.predicted_s <= min(times) * (1 + 1e-9)


def test_without_need_nothing_recomputes() -> None:
    parts, plan = pipeline(), SlicePlan.equal(32, 4, 2)
    result = plan_with_recompute(parts, 32, 4, 2, "seq1f1b", limit_of(parts, "seq1f1b", plan, 9.0))
    assert result.lower_bound_s > 0  # of the search: layers for other slices have none
    assert result.recompute == ((),) * 4 and "recompute nothing: every stage fits without" in describe(result)


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="all its layers recomputed"):
        plan_with_recompute(pipeline(), 32, 4, 2, "auto", 60.0, plan=SlicePlan((16, 16)))
    with pytest.raises(PlannerError, match="one part per stage"):
        choose_layers(pipeline(), build("zbv", 2, 2, 2), SlicePlan((16, 16)), 1e9)
