"""What a pipeline that goes both ways takes besides its makespan: worked out by hand."""

from __future__ import annotations

import pytest

from terapipe_ds.costs.profile import CostSample, LayerShare, LinkSample, PartProfile, Profile, ProfileKey
from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize, link_bytes_per_s
from terapipe_ds.planner.ranking.recut import MeasuredParts


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


def profile(num_bytes: int | None) -> Profile:
    key = ProfileKey("f" * 16, "a model", "a device", "float16", 1, 1, 2, False, 256, "math", {})
    layers = (LayerShare(0.5, 0.5, 300), LayerShare(0.5, 0.5, 100)), (LayerShare(0.5, 0.5, 200),) * 2
    samples = (CostSample(256, 0, 1.0, 2.0),)
    parts = tuple(PartProfile(n, samples, None, shares) for n, shares in enumerate(layers))
    return Profile(key, parts, (LinkSample(256, 0.5, num_bytes=num_bytes),))


def test_of_a_profile() -> None:
    class Costs:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def step_s(self) -> float:
            return self.seconds

    parts = MeasuredParts.of_profile(profile(50), [Costs(3.0), Costs(5.0)])
    assert (parts.link_bytes_per_s, parts.gradient_itemsize) == (100.0, 2)
    # 400 + 400 parameters of 2 bytes over 100 bytes a second, then 3 + 5 s; a plain pipeline waits for the 5 s
    assert parts.both_ways_s(2) == 16 + 3
    # four parts of 300, 100, 200, 200 parameters: stages 0 and 3 sum 1000 bytes, 1 and 2 sum 600; steps 1.5 and 2.5
    assert parts.both_ways_s(4) == 10 + 4 - 2.5
    assert parts.both_ways_s(4, [0, 1, 2, 3, 4]) == 10 + 4 - 2.5
    assert parts.both_ways_s(5) is None  # more parts than layers
    assert MeasuredParts.of_profile(profile(None), parts.costs).both_ways_s(2) is None
    assert MeasuredParts(parts.costs, None, 100.0).both_ways_s(2) is None
