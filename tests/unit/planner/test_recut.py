"""Costs and memory of another cut: against sums over single layers, written apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.costs.profile import CostSample, LayerShare, LinkSample, PartProfile, Profile, ProfileKey
from terapipe_ds.planner import MemoryModel, PartMemory, PlannerError
from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize, link_bytes_per_s
from terapipe_ds.planner.ranking.recut import MeasuredParts, balanced_bounds, recut_costs, recut_memory
from terapipe_ds.simulator import UnitCosts

SLICES = [(1, 0), (64, 0), (64, 192), (200, 56)]


class Layers:
    """Layers that grow alike with tokens and prefix, each with factors of its own, as one part."""

    vectorized = False

    def __init__(self, factors: list[tuple[float, float, float]], send: float | None = None) -> None:
        self.factors = factors
        if send is not None:
            self.send_s = lambda tokens: send * tokens

    def _sum(self, index: int, tokens: int, prefix: int) -> float:
        return sum(factor[index] for factor in self.factors) * (3 + tokens + 1e-3 * tokens * prefix)

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self._sum(0, tokens, prefix)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self._sum(1, tokens, prefix)

    def weight_s(self, tokens: int, prefix: int) -> float:
        return 0.3 * self._sum(1, tokens, prefix)

    def shares(self) -> list[LayerShare]:
        forward, backward = (sum(factor[index] for factor in self.factors) for index in range(2))
        return [LayerShare(f / forward, b / backward, round(p)) for f, b, p in self.factors]


def layers_of(seed: int, count: int) -> list[tuple[float, float, float]]:
    drawn = np.random.default_rng(seed).uniform(0.1, 3.0, (count, 3))
    return [(f, b, float(round(1000 * p))) for f, b, p in drawn.tolist()]


cuts = st.lists(st.integers(1, 8), max_size=5, unique=True).map(lambda inner: [0, *sorted(inner), 9])


@given(st.integers(0, 99), cuts, cuts)
def test_any_cut_is_the_sum_of_its_layers(seed: int, measured: list[int], wanted: list[int]) -> None:
    layers = layers_of(seed, 9)
    parts = [Layers(layers[a:b], send=0.5) for a, b in itertools.pairwise(measured)]
    again = recut_costs(parts, [part.shares() for part in parts], wanted)
    assert len(again) == len(wanted) - 1
    for (start, stop), costs in zip(itertools.pairwise(wanted), again, strict=True):
        alone = Layers(layers[start:stop])
        for span in SLICES:
            for name in ("forward_s", "backward_s", "weight_s"):
                assert getattr(costs, name)(*span) == pytest.approx(getattr(alone, name)(*span), rel=1e-9)
        assert costs.send_s(8) == 4.0


def test_what_was_measured_stays_the_same_object() -> None:
    parts = [Layers(layers_of(1, 2)), Layers(layers_of(2, 3))]
    same = recut_costs(parts, [part.shares() for part in parts], [0, 2, 5])
    assert same[0] is parts[0] and same[1] is parts[1]
    one = Layers([(1.0, 1.0, 1.0)] * 4)
    halves = recut_costs([one, one], [one.shares()] * 2, [0, 2, 4, 6, 8])
    assert all(part is halves[0] for part in halves)  # equal parts are one kind, which the search makes use of


def test_what_was_not_measured_is_not_there() -> None:
    class NoWeights(Layers):
        weight_s = None  # type: ignore[assignment]

    plain = Layers(layers_of(1, 2))
    (costs,) = recut_costs([plain, plain], [plain.shares()] * 2, [0, 4])
    assert not hasattr(costs, "send_s") and not hasattr(costs, "step_s") and hasattr(costs, "weight_s")
    linked = Layers(layers_of(1, 2), send=2.0)
    first, second = recut_costs([linked, plain], [plain.shares()] * 2, [0, 1, 4])
    assert first.send_s(3) == second.send_s(3) == 6.0  # of any link that was measured


@pytest.mark.parametrize("bounds", [[0, 3], [1, 4], [0, 2, 2, 4], [0, 5, 4], []])
def test_bounds_that_are_no_cut(bounds: list[int]) -> None:
    part = Layers(layers_of(1, 4))
    with pytest.raises(PlannerError, match="rising layer numbers from 0 to 4"):
        recut_costs([part], [part.shares()], bounds)
    with pytest.raises(PlannerError, match="rising layer numbers from 0 to 4"):
        recut_memory(MemoryModel((PartMemory(1, 1),)), [part.shares()], bounds)


# -- memory


def test_memory_by_hand() -> None:
    one = PartMemory(1000, 10.0, 4.0, 2.0, 50, 7.0, 0.5, 600, 8.0, 6.0)
    memory = MemoryModel((one, PartMemory(3000, 20.0, 8.0, 6.0, 90, 3.0, 0.1, 900, 4.0, 2.0)))
    ones = [LayerShare(0.25, 0.1, 300), LayerShare(0.75, 0.9, 100)]
    shares = [ones, [LayerShare(0.5, 0.6, 0), LayerShare(0.5, 0.4, 200)]]
    first, middle, last = recut_memory(memory, shares, [0, 1, 3, 4]).parts
    assert (first.static_bytes, middle.static_bytes, last.static_bytes) == (750, 250, 3000)
    assert (first.gradient_bytes, middle.gradient_bytes, last.gradient_bytes) == (450, 150, 900)
    assert middle.slice_bytes_per_token == 0.75 * 10 + 0.5 * 20
    assert (middle.store_bytes_per_token, middle.store_grad_bytes_per_token) == (7.0, 4.5)
    assert (middle.whole_bytes_per_token, middle.weight_bytes_per_token) == (8.0, 5.5)
    assert (middle.working_bytes, middle.working_bytes_per_token, middle.working_bytes_per_prefix_token) == (90, 7, 0.5)
    assert recut_memory(memory, shares, [0, 2, 4]) == memory
    windows = [
        replace(part, windowed_grad_bytes_per_token=1.0, window_tokens=part.static_bytes) for part in memory.parts
    ]
    middle = recut_memory(MemoryModel(tuple(windows)), shares, [0, 1, 3, 4]).parts[1]
    assert (middle.windowed_grad_bytes_per_token, middle.window_tokens) == (1.25, 3000)
    unknown = MemoryModel((PartMemory(1, 1.0), memory.parts[1]))
    assert recut_memory(unknown, shares, [0, 1, 3, 4]).parts[1].whole_bytes_per_token is None


def test_frozen_layers_weigh_nothing_in_a_cut_but_hold_memory() -> None:
    """Four layers of 100 parameters, of which the first two are frozen, in two parts."""
    layers = [LayerShare(0.25, 0.25, 100, trained) for trained in (0, 0, 100, 100)]
    parts = MeasuredParts([UnitCosts(8)], [layers], 400.0)
    assert parts.bounds(2) == [0, 3, 4]
    cut = MemoryModel((PartMemory(300, 0.75), PartMemory(100, 0.25)))
    assert parts.memory(MemoryModel((PartMemory(400, 1.0),)), 2) == cut
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


def profile(shares: Sequence[list[LayerShare] | None], num_bytes: int | None = None) -> Profile:
    key = ProfileKey("f" * 16, "a model", "a device", "float16", 1, 1, len(shares), False, 256, "math", {})
    sample, link = CostSample(256, 0, 1.0, 2.0), LinkSample(256, 0.5, num_bytes=num_bytes)
    parts = tuple(PartProfile(n, (sample,), None, each and tuple(each)) for n, each in enumerate(shares))
    return Profile(key, parts, (link,))


def test_parts_of_a_profile_in_other_numbers() -> None:
    models = [Layers(layers_of(1, 3)), Layers(layers_of(2, 2))]
    known = MeasuredParts.of_profile(profile([part.shares() for part in models]), models)
    assert known.cut(2) == models and known.bounds(2) == [0, 3, 5]
    five = known.cut(5)
    assert five is not None and len(five) == 5 and known.cut(6) is None
    assert sum(part.forward_s(8, 0) for part in five) == pytest.approx(sum(part.forward_s(8, 0) for part in models))
    memory = MemoryModel((PartMemory(1000, 1.0), PartMemory(2000, 1.0)))
    recut = known.memory(memory, 3)
    assert recut is not None and sum(part.static_bytes for part in recut.parts) == pytest.approx(3000, abs=2)


def test_parts_without_shares_are_halved_and_joined() -> None:
    models = [Layers(layers_of(1, 3)), Layers(layers_of(2, 2))]
    unknown = MeasuredParts.of_profile(profile([models[0].shares(), None]), models)
    four, one = unknown.cut(4), unknown.cut(1)
    assert four is not None and one is not None and unknown.cut(3) is None and unknown.bounds(4) is None
    halves = [models[p].forward_s(8, 0) / 2 for p in (0, 0, 1, 1)]
    assert [part.forward_s(8, 0) for part in four] == pytest.approx(halves)
    assert one[0].backward_s(8, 4) == pytest.approx(sum(part.backward_s(8, 4) for part in models))


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
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 4, "float32 (autocast bfloat16)": 4}
    assert {dtype: gradient_itemsize(dtype) for dtype in sizes} == sizes


LAYERS = [[LayerShare(0.5, 0.5, 300), LayerShare(0.5, 0.5, 100)], [LayerShare(0.5, 0.5, 200)] * 2]


def test_both_ways_of_a_profile() -> None:
    class Costs:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def step_s(self) -> float:
            return self.seconds

    parts = MeasuredParts.of_profile(profile(LAYERS, 50), [Costs(3.0), Costs(5.0)])
    assert (parts.link_bytes_per_s, parts.gradient_itemsize) == (100.0, 2)
    # 400 + 400 parameters of 2 bytes over 100 bytes a second, then 3 + 5 s; a plain pipeline waits for the 5 s
    assert parts.both_ways_s(2) == 16 + 3
    # four parts of 300, 100, 200, 200 parameters: stages 0 and 3 sum 1000 bytes, 1 and 2 sum 600; steps 1.5 and 2.5
    assert parts.both_ways_s(4) == 10 + 4 - 2.5
    assert parts.both_ways_s(4, [0, 1, 2, 3, 4]) == 10 + 4 - 2.5
    assert parts.both_ways_s(5) is None  # more parts than layers
    assert MeasuredParts.of_profile(profile(LAYERS), parts.costs).both_ways_s(2) is None
    assert MeasuredParts(parts.costs, None, 100.0).both_ways_s(2) is None
