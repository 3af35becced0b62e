import dataclasses
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds import plan_slices, simulate
from terapipe_ds.costs.fitted import CostModel, CostModelError
from terapipe_ds.costs.profile import CostSample, LinkSample, PartProfile, Profile, ProfileKey
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build

# Seconds without prefix, measured with a launch floor and a kink; and (a0, a1, a2, a3) of forward and backward.
BASE = {64: 1.0e-3, 128: 1.02e-3, 256: 1.7e-3, 512: 3.2e-3, 1024: 6.6e-3, 2048: 14.1e-3}
FORWARD = (5e-5, 2e-8, 3e-8, 2.5e-9)
BACKWARD = (9e-5, 3e-8, 8e-8, 6e-9)
BEND = FORWARD[3] / 2  # i tokens attend to i^2 / 2 pairs among themselves
GRID = [(64, 1984), (128, 1024), (256, 256), (256, 1792), (512, 512), (512, 1536), (1024, 1024)]


KEY = ProfileKey("f", "m", "cpu", "fp32", 1, 1, 2, False, 2048, "flash")


def context(terms: Sequence[float], i: float, j: float) -> float:
    a0, a1, a2, a3 = terms
    return a0 + a1 * i + a2 * j + a3 * i * j if j else 0.0


def sample(i: int, j: int, noise: Callable[[], float] = lambda: 1.0) -> CostSample:
    forward = BASE[i] + context(FORWARD, i, j)
    backward = 2 * BASE[i] + context(BACKWARD, i, j)
    return CostSample(i, j, forward * noise(), backward * noise(), weight_s=BASE[i] * 0.7)


def samples(pairs: Sequence[tuple[int, int]] = GRID, noise: Callable[[], float] = lambda: 1.0) -> list[CostSample]:
    return [sample(i, 0, noise) for i in BASE] + [sample(i, j, noise) for i, j in pairs]


def test_the_form_of_the_paper_is_found_exactly() -> None:
    model = CostModel(samples())
    assert model.forward_curve.terms == pytest.approx((*FORWARD, 0), rel=1e-6)
    assert model.backward_curve.terms == pytest.approx((*BACKWARD, 0), rel=1e-6)
    for i, j in [(64, 640), (128, 1), (512, 1000), (2048, 0), (1024, 512)]:
        assert model.forward_s(i, j) == pytest.approx(BASE[i] + context(FORWARD, i, j), rel=1e-7)
        assert model.backward_s(i, j) == pytest.approx(2 * BASE[i] + context(BACKWARD, i, j), rel=1e-7)
    assert max(model.errors("forward").held_out) < 1e-7


def test_between_and_below_the_measured_points() -> None:
    model = CostModel(samples())
    # a chord of i^2 runs (x - a) (b - x) above it
    assert model.forward_s(384, 0) == pytest.approx((1.7e-3 + 3.2e-3) / 2 - BEND * 128 * 128)  # from 256 to 512
    assert model.forward_s(160, 0) == pytest.approx(1.02e-3 + (1.7e-3 - 1.02e-3) / 4 - BEND * 32 * 96)
    assert model.forward_s(1, 0) == model.forward_s(63, 0) == 1.0e-3  # launches take what they take
    for i in (64, 256, 1024):  # a jump at the first token of prefix, by what the samples say
        assert model.forward_s(i, 1) - model.forward_s(i, 0) == pytest.approx(context(FORWARD, i, 1), rel=1e-6)


def test_arrays_and_numbers_agree() -> None:
    model = CostModel(samples(), links=[LinkSample(64, 1e-4), LinkSample(1024, 5e-4)])
    i, j = np.arange(1, 1025, 73)[:, None], np.arange(0, 1025, 128)[None, :]
    for name in ("forward_s", "backward_s", "weight_s"):
        table = getattr(model, name)(i, j)
        assert table.shape == (15, 9) and table.dtype == np.float64
        one_by_one = [[getattr(model, name)(int(a), int(b)) for b in j[0]] for a in i[:, 0]]
        assert table.tolist() == one_by_one
    assert type(model.forward_s(5, 7)) is float and type(model.send_s(5)) is float
    assert model.forward_s(np.array([5, 6]), 7).shape == (2,) and model.send_s(np.array([5, 6])).shape == (2,)
    assert model.vectorized is True


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 600), st.floats(1e-7, 10)), min_size=1, max_size=12))
def test_any_data_gives_positive_times_never_below_no_prefix(rows: list[tuple[int, int, float]]) -> None:
    unique = {(i, j): t for i, j, t in rows}
    for i, _ in list(unique):
        unique.setdefault((i, 0), 0.5)
    model = CostModel([CostSample(i, j, t, 2 * t) for (i, j), t in unique.items()], allow_extrapolation=True)
    i, j = np.meshgrid([1, 2, 50, 399, 400, 3000], [0, 1, 100, 600, 5000])
    forward = model.forward_s(i, j)
    assert np.isfinite(forward).all() and (forward > 0).all()
    assert (forward >= model.forward_s(i, 0)).all()
    assert model.report.startswith("part 0, forward: ")


def test_weight_gradients_never_take_more_than_their_backward() -> None:
    # a layer without gradients of its input: W is all of the backward, but for noise
    rng = np.random.default_rng(0)
    weights = {i: BASE[i] * rng.normal(1, 0.03) for i in BASE}
    rows = []
    for one in samples():
        backward_s = BASE[one.tokens] * rng.normal(1, 0.03)
        weight_s = min(weights[one.tokens], backward_s)
        rows.append(dataclasses.replace(one, backward_s=backward_s, weight_s=weight_s))
    model = CostModel(rows)
    for tokens in range(64, 2049, 64):
        prefixes = np.arange(0, 2049 - tokens, 64)
        assert (model.weight_s(tokens, prefixes) <= model.backward_s(tokens, prefixes)).all()
    plan, schedule = SlicePlan.equal(2048, 32), build("zb-h1", 2, 2, 32)
    assert simulate(schedule, plan, model).makespan_s > 0  # refuses a W that takes more than its backward


def test_left_out_means_left_out() -> None:
    """One wild point is predicted by the others, so its error is its distance from their exact form."""
    data = samples()
    wild = data[-1]
    data[-1] = CostSample(wild.tokens, wild.prefix, 2 * wild.forward_s, wild.backward_s)
    model = CostModel(data)
    assert model.errors("forward").held_out[-1] == pytest.approx(0.5, rel=1e-6)
    assert model.errors("forward").in_sample[-1] < 0.45  # the fit leans to it
    assert max(model.errors("backward").held_out) < 1e-6
    # interior base points, by hand: 128, of which no other sample depends here, lies between 64 and 256
    without = CostModel(samples([(i, j) for i, j in GRID if i != 128]))
    expected = abs((1.0e-3 + (1.7e-3 - 1.0e-3) / 3 - BEND * 64 * 128) / 1.02e-3 - 1)
    assert without.errors("forward").held_out_base[0] == pytest.approx(expected, rel=1e-6)
    assert "part 0, forward: error at fitted points at most" in model.report
    assert "left out of the fit at most 50.00%" in model.report


@pytest.mark.parametrize(("pairs", "kept"), [
    ([(256, 512)], (3,)),  # one point: attention to the prefix alone
    ([(256, 512), (256, 1024)], (0, 3)),  # one size of slice: nothing tells i from 1 nor j from i j
    ([(256, 512), (512, 512)], (0, 3)),
    ([(256, 512), (256, 1024), (512, 512)], (0, 2, 3)),
    ([(256, 512), (256, 1024), (512, 512), (512, 1024)], (0, 1, 2, 3)),
])  # fmt: skip
def test_few_samples_give_a_reduced_form_that_meets_them(pairs: list[tuple[int, int]], kept: tuple[int, ...]) -> None:
    model = CostModel(samples(pairs))
    terms = model.forward_curve.terms
    assert terms is not None and tuple(n for n in range(4) if terms[n]) == kept
    for i, j in pairs:
        assert model.forward_s(i, j) == pytest.approx(BASE[i] + context(FORWARD, i, j), rel=1e-9)


def test_no_sample_with_a_prefix() -> None:
    model = CostModel(samples([]))
    assert model.forward_s(512, 0) == 3.2e-3
    with pytest.raises(CostModelError, match="no slice with a prefix was measured; measure that far, give"):
        model.forward_s(512, 1)
    allowed = CostModel(samples([]), allow_extrapolation=True)
    assert allowed.forward_s(512, 100) == 3.2e-3
    assert "no points" in model.report


def test_one_size_only() -> None:
    model = CostModel([CostSample(256, 0, 0.1, 0.2)])
    assert (model.forward_s(1, 0), model.backward_s(256, 0)) == (0.1, 0.2)
    with pytest.raises(CostModelError, match="tokens = 257: slices without prefix up to 256 tokens"):
        model.forward_s(257, 0)
    assert CostModel([CostSample(256, 0, 0.1, 0.2)], allow_extrapolation=True).forward_s(512, 0) == 0.2


@pytest.mark.parametrize(("arguments", "message"), [
    ((2049, 0), "part 3: tokens = 2049: slices without .* up to 2048 tokens were measured; measure that far, give s"),
    ((64, 1985), r"tokens \+ prefix = 2049: with a prefix up to 2048 tokens together was measured"),
    ((np.array([1, 99]), np.array([0, 5000])), r"tokens \+ prefix = 5099.*allow_extrapolation=True"),
    ((0, 0), "tokens = 0: give at least 1 token"),
    ((math.nan, 0), "tokens = nan"),
    ((1, -1), "prefix = -1: give 0 or more"),
    ((1, math.nan), "prefix = nan"),
])  # fmt: skip
def test_questions_out_of_range(arguments: tuple[Any, Any], message: str) -> None:
    model = CostModel(samples(), part_id=3)
    for ask in (model.forward_s, model.backward_s, model.weight_s):
        with pytest.raises(CostModelError, match=message):
            ask(*arguments)


def test_the_base_rises_wherever_its_points_do() -> None:
    """A flat stretch leaves no room for the bend that the prefix suggests, and a fall none at all."""
    steep = [CostSample(i, j, s, s) for i, j, s in ((64, 64, 2.0), (128, 64, 3.0), (64, 128, 3.0), (128, 128, 5.0))]
    flat = CostModel([*steep, *(CostSample(i, 0, s, s) for i, s in ((64, 1.0), (128, 1.0), (256, 2.0)))])
    assert flat.forward_curve.terms is not None and flat.forward_curve.terms[3] > 0
    rising = flat.forward_s(np.arange(64, 257), 0)
    assert (np.diff(rising) >= -1e-12).all() and rising[32] == 1.0


def test_allowed_extrapolation_goes_on_as_the_last_segment() -> None:
    model = CostModel(samples(), allow_extrapolation=True)
    slope = (14.1e-3 - 6.6e-3 - BEND * (2048**2 - 1024**2)) / 1024
    assert model.forward_s(4096, 0) == pytest.approx(14.1e-3 + 2048 * slope + BEND * (4096**2 - 2048**2))
    assert model.forward_s(256, 8192) == pytest.approx(1.7e-3 + context(FORWARD, 256, 8192))
    with pytest.raises(CostModelError, match="at least 1 token"):
        model.forward_s(0, 0)
    falling = CostModel([CostSample(1, 0, 2.0, 1.0), CostSample(2, 0, 1.0, 1.0)], allow_extrapolation=True)
    assert falling.forward_s(100, 0) == 1.0  # never on to zero


def test_samples_that_nothing_can_be_fitted_to() -> None:
    with pytest.raises(CostModelError, match="none of 0 samples has prefix 0"):
        CostModel([])
    with pytest.raises(CostModelError, match="part 1: none of 1 samples has prefix 0; measure slices without"):
        CostModel([sample(64, 128)], part_id=1)
    with pytest.raises(CostModelError, match=r"\(64, 0\) occurs twice"):
        CostModel([sample(64, 0), sample(64, 0)])
    with pytest.raises(CostModelError, match=r"\(128, 64\) is longer than the longest without a prefix, 64 tokens"):
        CostModel([sample(64, 0), sample(128, 64)])


def test_optional_costs_are_there_only_where_measured() -> None:
    bare = CostModel([CostSample(64, 0, 0.1, 0.2)])
    assert not any(hasattr(bare, name) for name in ("send_s", "step_s", "weight_s"))
    partly = CostModel([CostSample(64, 0, 0.1, 0.2, weight_s=0.1), CostSample(128, 0, 0.1, 0.2)])
    assert not hasattr(partly, "weight_s")
    full = CostModel(samples(), links=[LinkSample(64, 1e-4)], step_s=0.25)
    assert full.step_s() == 0.25
    assert full.weight_s(384, 100) == pytest.approx(0.7 * 2.45e-3)
    copy = pickle.loads(pickle.dumps(full))
    assert copy.forward_s(64, 64) == full.forward_s(64, 64) and copy.send_s(1) == 1e-4


def test_links() -> None:
    links = [LinkSample(1024, 9e-4), LinkSample(64, 1e-4), LinkSample(256, 3e-4)]
    model = CostModel(samples(), links=links)
    assert [model.send_s(n) for n in (1, 64, 160, 640)] == pytest.approx([1e-4, 1e-4, 2e-4, 6e-4])
    with pytest.raises(CostModelError, match="tokens = 1025: messages up to 1024 tokens were measured; measure"):
        model.send_s(1025)
    with pytest.raises(CostModelError, match="at least 1 token"):
        model.send_s(0)
    far = CostModel(samples(), links=links, allow_extrapolation=True)
    assert far.send_s(2048) == pytest.approx(9e-4 + 1024 * 6e-4 / 768)
    with pytest.raises(CostModelError, match="one size twice"):
        CostModel(samples(), links=[LinkSample(64, 1e-4, 0), LinkSample(64, 1e-4, 1)])


def test_one_model_per_part_of_a_profile() -> None:
    slower = [CostSample(s.tokens, s.prefix, 3 * s.forward_s, s.backward_s) for s in samples()]
    parts = (PartProfile(1, tuple(slower), step_s=0.5), PartProfile(0, tuple(samples())))
    profile = Profile(KEY, parts, (LinkSample(64, 1e-4), LinkSample(64, 5e-4, part_id=1)))
    first, second = CostModel.from_profile(Profile.from_json(profile.to_json()))
    assert (first.part_id, second.part_id) == (0, 1)
    assert second.forward_s(256, 256) == pytest.approx(3 * first.forward_s(256, 256))
    assert not hasattr(first, "step_s") and second.step_s() == 0.5
    assert (first.send_s(64), second.send_s(64)) == (1e-4, 5e-4)  # its own link, else the one for all
    assert second.send_gradient_s(64) == 1e-4  # over the link between the first part and this one
    own = dataclasses.replace(profile, links=(LinkSample(64, 2e-4, part_id=0),))  # as the engine measures two parts
    step = simulate(build("1f1b", 2, 1, 1), SlicePlan((64,)), models := CostModel.from_profile(own))
    assert step.makespan_s == pytest.approx(sum(m.forward_s(64, 0) + m.backward_s(64, 0) for m in models) + 4e-4)
    with pytest.raises(CostModelError, match="part 1: tokens = 4096"):
        second.forward_s(4096, 0)
    assert CostModel.from_profile(profile, allow_extrapolation=True)[0].forward_s(4096, 0) > 14.1e-3


# --- layers with a window


class Windowed:
    """Costs of a part, of whose attention a share has a window: by the pairs of tokens and what they see."""

    def __init__(self, window: int, share: float) -> None:
        self.window, self.share = window, share

    def forward_s(self, tokens: int, prefix: int) -> float:
        ends = np.arange(prefix, prefix + tokens) + 0.5
        pairs = self.share * np.minimum(ends, self.window).sum() + (1 - self.share) * ends.sum()
        return float(2e-4 + 1e-5 * tokens + 1e-7 * pairs)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 2 * self.forward_s(tokens, prefix)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("window", [128, 512, 1024])
def test_costs_that_end_to_grow_where_the_window_ends(window: int, share: float) -> None:
    """The fit is exact, so that the plan is no worse than any of equal slices; without the window it is not."""
    length, stages, part = 2048, 4, Windowed(window, share)
    pairs = [*((i, 0) for i in BASE), *GRID]
    measured = [CostSample(*pair, part.forward_s(*pair), part.backward_s(*pair)) for pair in pairs]
    profile = Profile(KEY, (PartProfile(0, tuple(measured), memory={"window_tokens": window - 1}),))
    (model,) = CostModel.from_profile(profile)
    for i, j in [(192, 64), (192, 640), (96, 1900), (700, 500), (1000, 0)]:
        assert model.forward_s(i, j) == pytest.approx(part.forward_s(i, j), rel=1e-9)
    assert max(model.errors("forward").in_sample) < 1e-9 < 1e-4 < max(CostModel(measured).errors("forward").in_sample)

    def seconds(plan: SlicePlan) -> float:
        return float(simulate(build("seq1f1b", stages, 1, plan.num_slices), plan, [part] * stages).makespan_s)

    planned = plan_slices([model] * stages, length, stages, granularity_tokens=64, schedule="seq1f1b")
    equal = min(seconds(SlicePlan.equal(length, count)) for count in (1, 2, 4, 8, 16, 32))
    assert seconds(planned.plan) <= 1.001 * equal
