"""Costs and memory of any cut of measured layers: against sums over single layers, written apart."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.costs.profile import (
    CostSample,
    LayerProfile,
    LayerProfiles,
    LinkSample,
    Overhead,
    PartProfile,
    Profile,
    ProfileKey,
)
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel, PartMemory, PlannerError
from terapipe_ds.planner.layers.both_ways import both_ways_s, gradient_itemsize, link_bytes_per_s
from terapipe_ds.planner.layers.cuts import balanced_bounds
from terapipe_ds.planner.layers.layer import Layer
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.schedule import build
from terapipe_ds.simulator import UnitCosts, simulate

SLICES = [(64, 0), (128, 0), (64, 192), (64, 64)]  # of 256 tokens, as measured
POINTS = [(256, 0), (128, 0), (64, 0), (64, 192), (64, 64)]
KEY = ProfileKey("f" * 16, "a model", "a device", "float16", 1, 1, 2, False, 256, "math", {})

Factors = tuple[float, float, int]
"""Of forward, of backward, and parameters."""


def seconds(factor: float, tokens: int, prefix: int) -> float:
    return factor * (3 + tokens + 1e-3 * tokens * prefix)


def samples(forward: float, backward: float) -> tuple[CostSample, ...]:
    both = [(seconds(forward, *point), seconds(backward, *point)) for point in POINTS]
    return tuple(CostSample(*point, f, b, weight_s=0.3 * b) for point, (f, b) in zip(POINTS, both, strict=True))


def kind(forward: float = 1.0, backward: float = 1.0, count: int = 1, trained: int | None = None) -> LayerProfile:
    return LayerProfile(samples(forward, backward), count, count if trained is None else trained, 16.0)


def layers_of(seed: int, count: int) -> list[Factors]:
    drawn = np.random.default_rng(seed).uniform(0.1, 3.0, (count, 3))
    return [(f, b, round(1000 * p)) for f, b, p in drawn.tolist()]


def profile(
    kinds: list[LayerProfile], bounds: tuple[int, ...], steps: tuple[float | None, ...] = (),
    overhead: tuple[Overhead, ...] = (), links: tuple[LinkSample, ...] = (),
) -> Profile:  # fmt: skip
    """Without kinds of layers only the parts were timed."""
    parts = len(bounds) - 1
    steps = steps or (None,) * parts
    measured = [PartProfile(n, samples(1 + n, 2 + n), step, None, overhead) for n, step in enumerate(steps)]
    layers = LayerProfiles(tuple(kinds), tuple(range(len(kinds))), bounds) if kinds else None
    return Profile(ProfileKey(**{**vars(KEY), "num_stages": parts}), tuple(measured), links, None, layers)


cuts = st.lists(st.integers(1, 8), max_size=5, unique=True).map(lambda inner: [0, *sorted(inner), 9])


@settings(max_examples=20)
@given(st.integers(0, 99), cuts, cuts)
def test_any_cut_is_the_sum_of_its_layers_and_what_each_part_has(
    seed: int, measured: list[int], wanted: list[int]
) -> None:
    layers = layers_of(seed, 9)
    beyond = (Overhead(64, 5.0, 7.0), Overhead(256, 6.0, 8.0))
    kinds, links = [kind(*layer) for layer in layers], (LinkSample(64, 4.0),)
    again = MeasuredParts.of_profile(profile(kinds, tuple(measured), (), beyond, links)).cut(len(wanted) - 1, wanted)
    assert again is not None and len(again) == len(wanted) - 1
    for (start, stop), costs in zip(itertools.pairwise(wanted), again, strict=True):
        forward, backward = (sum(layer[way] for layer in layers[start:stop]) for way in (0, 1))
        for tokens, prefix in SLICES:
            more, (f, b) = (tokens - 64) / 192, (seconds(way, tokens, prefix) for way in (forward, backward))
            assert costs.forward_s(tokens, prefix) == pytest.approx(f + 5 + more, rel=1e-6)
            assert costs.backward_s(tokens, prefix) == pytest.approx(b + 7 + more, rel=1e-6)
            assert costs.weight_s(tokens, prefix) == pytest.approx(0.3 * b, rel=1e-6)
        assert costs.send_s(64) == 4.0


def test_equal_parts_are_one_object() -> None:
    """The search counts parts that are one object together."""
    one = LayerProfiles((kind(),), (0,) * 8, (0, 8))
    key = ProfileKey(**{**vars(KEY), "num_stages": 1})
    parts = MeasuredParts.of_profile(Profile(key, (PartProfile(0, samples(8, 8)),), (), None, one))
    quarters = parts.cut(4)
    assert quarters is not None and all(part is quarters[0] for part in quarters)
    copies = parts.for_stages(3)
    assert copies.bounds_measured == (0, 8, 16, 24) and [one.layer_id for one in copies.layers] == list(range(24))
    # the whole model on one stage is cut, and of several parts none stands for the others
    on_one_stage = Profile(key, (PartProfile(0, samples(8, 8)),), (), 1, one)
    for measured in (on_one_stage, profile([kind()] * 8, (0, 4, 8))):
        whole = MeasuredParts.of_profile(measured)
        assert whole.for_stages(2) is whole and whole.bounds(2) == [0, 4, 8]


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_profile_of_another_run_has_no_bytes_and_the_windows_of_its_layers(is_timed: bool) -> None:
    def windowed(tokens: int, prefix: int) -> float:
        return 3 + tokens + 1e-3 * sum(min(end, 64) for end in range(prefix, prefix + tokens))

    timed = tuple(CostSample(*point, windowed(*point), windowed(*point)) for point in POINTS)
    memory = vars(PartMemory(1, 1.0, window_tokens=63.0))
    layer = LayerProfile(timed, 1, 1, 16.0, memory)
    layers = LayerProfiles((layer,), (0, 0), (0, 1, 2)) if is_timed else None
    both = Profile(KEY, tuple(PartProfile(n, timed, memory=memory) for n in range(2)), (), None, layers)
    own, other = (MeasuredParts.of_profile(both, of_this_run=is_own) for is_own in (True, False))
    assert own.memory(2) is not None and other.memory(2) is None
    for costs in (own.cut(2), other.cut(2)):
        assert costs is not None and costs[1].forward_s(64, 128) == pytest.approx(windowed(64, 128), rel=1e-3)


def test_what_was_not_measured_is_not_there() -> None:
    plain = MeasuredParts.of_profile(profile([kind()] * 4, (0, 2, 4)))
    (costs,) = plain.cut(1) or []
    assert not hasattr(costs, "send_s") and not hasattr(costs, "step_s") and hasattr(costs, "weight_s")
    (half,) = MeasuredParts([Layer(UnitCosts(8)), Layer(Whole())], (0, 1, 2)).cut(1) or []
    assert not hasattr(half, "weight_s")  # a part that cannot split must not look as if it could
    one_link = MeasuredParts.of_profile(profile([kind()] * 4, (0, 2, 4), links=(LinkSample(64, 6.0, 1),)))
    assert [part.send_s(64) for part in one_link.cut(2) or []] == [6.0, 6.0]  # of any link that was measured


def test_layers_that_train_nothing_are_cut_evenly() -> None:
    assert MeasuredParts.of_profile(profile([kind(trained=0)] * 6, (0, 6))).bounds(3) == [0, 2, 4, 6]


def test_gradients_go_back_over_the_link_before_their_part() -> None:
    links = tuple(LinkSample(64, seconds, part_id) for part_id, seconds in enumerate((6.0, 2.0)))
    parts = MeasuredParts.of_profile(profile([kind()] * 6, (0, 2, 4, 6), links=links))
    assert [(part.send_s(64), part.send_gradient_s(64)) for part in parts.cut(3) or []][1:] == [(2.0, 6.0), (6.0, 2.0)]
    step_s = simulate(build("1f1b", 3, 1, 1), SlicePlan((64,)), parts.cut(3)).makespan_s
    assert step_s == pytest.approx(2 * 6 * seconds(1.0, 64, 0) + 2 * (6 + 2))  # one after the other


class Whole:
    """Costs without W."""

    forward_s, backward_s = UnitCosts(8).forward_s, UnitCosts(8).backward_s


@pytest.mark.parametrize("bounds", [[0, 3], [1, 4], [0, 2, 2, 4], [0, 5, 4], []])
def test_bounds_that_are_no_cut(bounds: list[int]) -> None:
    parts = MeasuredParts([Layer(UnitCosts(8), memory=PartMemory(1, 1))] * 4, (0, 4))
    for ask in (parts.cut, parts.memory):
        with pytest.raises(PlannerError, match="rising layer numbers from 0 to 4"):
            ask(1, bounds)


# -- memory


def test_memory_by_hand() -> None:
    one = PartMemory(300, 10.0, 4.0, 2.0, 50, 7.0, 0.5, 60, 8.0, 6.0)
    other = PartMemory(100, 20.0, 8.0, 6.0, 90, 3.0, 0.1, 90, 4.0, 2.0, 5.0, 1.0, 0.5, 40.0)
    parts = MeasuredParts([Layer(UnitCosts(8), memory=each) for each in (one, other, one)], (0, 2, 3))
    first, second = (parts.memory(2, [0, 1, 3]) or MemoryModel((one,))).parts
    assert first == one
    assert second == PartMemory(400, 30.0, 12.0, 8.0, 90, 7.0, 0.5, 150, 12.0, 8.0, 5.0, 1.0, 0.5, 40.0)
    unknown = MeasuredParts([Layer(UnitCosts(8), memory=each) for each in (one, PartMemory(1, 1.0))], (0, 1, 2))
    assert (unknown.memory(1) or MemoryModel((one,))).parts[0].whole_bytes_per_token is None
    assert MeasuredParts([Layer(UnitCosts(8), memory=one), Layer(UnitCosts(8))], (0, 1, 2)).memory(1) is None


def test_frozen_layers_weigh_nothing_in_a_cut_but_hold_memory() -> None:
    """Four layers of 100 parameters, of which the first two are frozen, in two parts."""
    units = [Layer(UnitCosts(8), 100, trained, memory=PartMemory(100, 0.25)) for trained in (0, 0, 100, 100)]
    parts = MeasuredParts(units, (0, 4), True, 400.0)
    assert parts.bounds(2) == [0, 3, 4]
    assert parts.memory(2) == MemoryModel(
        tuple(PartMemory(100 * n, 0.25 * n, 0.0, 0.0, 0, 0, 0, 0, None, None, 0.0, 0.0, 0.0, 0) for n in (3, 1))
    )
    # copies sum the gradients of the trained ones alone: both stages 2 x 100 of 4 bytes, 400 bytes a second
    assert parts.both_ways_s(2) == 2.0


# -- cuts


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_the_heaviest_part_is_lightest(weights: list[int], num_parts: int) -> None:
    bounds = balanced_bounds(weights, num_parts)
    if num_parts > len(weights):
        assert bounds is None
        return
    assert bounds is not None
    every = [[0, *inner, len(weights)] for inner in itertools.combinations(range(1, len(weights)), num_parts - 1)]
    heaviest = {tuple(cut): max(sum(weights[a:b]) for a, b in itertools.pairwise(cut)) for cut in every}
    assert heaviest[tuple(bounds)] == min(heaviest.values())


def test_parts_of_a_profile_in_other_numbers() -> None:
    layers = layers_of(1, 5)
    known = MeasuredParts.of_profile(profile([kind(*layer) for layer in layers], (0, 3, 5)))
    assert known.bounds(2) == [0, 3, 5]
    five = known.cut(5)
    assert five is not None and len(five) == 5 and known.cut(6) is None
    total = math.fsum(seconds(layer[0], 64, 0) for layer in layers)
    assert sum(part.forward_s(64, 0) for part in five) == pytest.approx(total)


def test_parts_without_layers_are_joined_but_not_divided() -> None:
    unknown = MeasuredParts.of_profile(profile([], (0, 1, 2, 3, 4)))
    assert unknown.cut(8) is None and unknown.cut(3) is None and not unknown.has_memory
    two = unknown.cut(2)
    assert two is not None
    assert two[1].backward_s(64, 192) == pytest.approx(seconds(4 + 5, 64, 192))  # parts 2 and 3
    assert unknown.both_ways_s(2) is None


# -- both ways: worked out by hand


def test_the_pair_that_takes_longest() -> None:
    # stages 0 and 3 sum 100 + 300 bytes, stages 1 and 2 sum 250 + 250
    assert both_ways_s([100, 250, 250, 300], 50) == 10
    # with steps 1 + 4 after 8 s, and 2 + 2 after 10 s: 14 s; a plain pipeline waits 4 s for its last stage
    assert both_ways_s([100, 250, 250, 300], 50, [1, 2, 2, 4]) == 10
    # 1 + 6 after 8 s are longer than 2 + 2 after 10 s; a plain one waits 6 s
    assert both_ways_s([100, 250, 250, 300], 50, [1, 2, 2, 6]) == 9
    assert both_ways_s([10, 10], 5, [3, 3]) == 4 + 3  # equal parts: the sum, and the second part's step


def test_bytes_per_second_of_links() -> None:
    # 1 ms for any message and 1e-6 s per byte; the other link has twice that per byte
    fast = [LinkSample(n, 1e-3 + 1e-6 * 8 * n, 0, num_bytes=8 * n) for n in (64, 256, 1024)]
    slow = [LinkSample(n, 1e-3 + 2e-6 * 8 * n, 1, num_bytes=8 * n) for n in (64, 256, 1024)]
    assert link_bytes_per_s(fast) == pytest.approx(1e6)
    assert link_bytes_per_s([*slow, *fast]) == pytest.approx(5e5)
    assert link_bytes_per_s([LinkSample(64, 2e-3, num_bytes=512)]) == pytest.approx(256_000)
    falling = [LinkSample(64, 3e-3, num_bytes=512), LinkSample(128, 2e-3, num_bytes=1024)]
    assert link_bytes_per_s(falling) == pytest.approx(512_000)
    steep = [LinkSample(64, 1e-3, num_bytes=512), LinkSample(128, 4e-3, num_bytes=1024)]  # no message takes -2 ms
    assert link_bytes_per_s(steep) == pytest.approx(256_000)
    assert link_bytes_per_s([LinkSample(64, 2e-3)]) is None and link_bytes_per_s([]) is None


def test_bytes_of_a_gradient() -> None:
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 4}
    assert {dtype: gradient_itemsize(dtype) for dtype in sizes} == sizes


def test_both_ways_of_a_profile() -> None:
    counts = (300, 100, 200, 200)
    link = (LinkSample(256, 0.5, num_bytes=50),)
    measured = profile([kind(count=count) for count in counts], (0, 2, 4), (3.0, 5.0), links=link)
    parts = MeasuredParts.of_profile(measured)
    assert (parts.link_bytes_per_s, parts.gradient_itemsize) == (100.0, 2)
    # 400 + 400 parameters of 2 bytes over 100 bytes a second, then 3 + 5 s; a plain pipeline waits for the 5 s
    assert parts.both_ways_s(2) == pytest.approx(16 + 3)
    # four parts of 300, 100, 200, 200 parameters: stages 0 and 3 sum 1000 bytes, 1 and 2 sum 600. Steps go by
    # parameters: 2.25, 0.75, 2.5, 2.5 s, so that the first pair takes 10 + 4.75 s, and a plain pipeline waits for 2.5 s
    assert parts.both_ways_s(4) == pytest.approx(10 + 4.75 - 2.5)
    assert parts.both_ways_s(4, [0, 1, 2, 3, 4]) == pytest.approx(10 + 4.75 - 2.5)
    assert parts.both_ways_s(5) is None  # more parts than layers
    assert MeasuredParts.of_profile(profile([kind()] * 4, (0, 2, 4))).both_ways_s(2) is None
