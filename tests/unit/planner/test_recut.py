"""Costs and memory of another cut: against sums over single layers, written apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.costs.profile import CostSample, LayerShare, PartProfile, Profile, ProfileKey
from terapipe_ds.planner import MemoryModel, PartMemory, PlannerError
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
    unknown = MemoryModel((PartMemory(1, 1.0), memory.parts[1]))
    assert recut_memory(unknown, shares, [0, 1, 3, 4]).parts[1].whole_bytes_per_token is None


def test_frozen_layers_weigh_nothing_in_a_cut_but_hold_memory() -> None:
    """Four layers of 100 parameters, of which the first two are frozen, in two parts."""
    layers = [LayerShare(0.25, 0.25, 100, trained) for trained in (0, 0, 100, 100)]
    parts = MeasuredParts([UnitCosts(8)], [layers], 400.0)
    assert parts.bounds(2) == [0, 3, 4]
    assert parts.memory(MemoryModel((PartMemory(400, 1.0),)), 2) == MemoryModel(
        (PartMemory(300, 0.75), PartMemory(100, 0.25))
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


def profile(shares: list[list[LayerShare] | None]) -> Profile:
    key = ProfileKey("f" * 16, "a model", "a device", "fp32", 1, 1, len(shares), False, 256, "math", {})
    sample = CostSample(256, 0, 1.0, 2.0)
    return Profile(key, tuple(PartProfile(n, (sample,), None, each and tuple(each)) for n, each in enumerate(shares)))


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
    assert [part.forward_s(8, 0) for part in four] == pytest.approx(
        [models[p].forward_s(8, 0) / 2 for p in (0, 0, 1, 1)]
    )
    assert one[0].backward_s(8, 4) == pytest.approx(sum(part.backward_s(8, 4) for part in models))
