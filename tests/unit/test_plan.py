"""SlicePlan: lengths, spans, equal cuts, JSON."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.plan import PlanError, SlicePlan

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def test_spans_starts_and_sizes() -> None:
    plan = SlicePlan((512, 384, 128))
    assert (plan.num_slices, plan.sequence_length) == (3, 1024)
    assert plan.starts == (0, 512, 896)
    assert plan.shares == (512 / 1024, 384 / 1024, 128 / 1024)
    assert plan.spans() == ((0, 512), (512, 896), (896, 1024))
    assert [plan.span(i) for i in range(3)] == list(plan.spans())
    for slice_id in (-1, 3):
        with pytest.raises(IndexError, match=f"slice_id {slice_id} of a plan of 3 slices"):
            plan.span(slice_id)


def test_plans_are_values() -> None:
    plan = SlicePlan([3, np.int64(4)])  # type: ignore[arg-type]
    assert plan == SlicePlan((3, 4))
    assert hash(plan) == hash(SlicePlan((3, 4)))
    assert [type(n) for n in plan.lengths] == [int, int]
    with pytest.raises(AttributeError):
        plan.lengths = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    "bad", [(), (0,), (-1,), (4, True), (4, 1.0), (4, "4"), (None,), "12", 12, None, (4, float("nan"))]
)
def test_impossible_lengths(bad: object) -> None:
    with pytest.raises(PlanError, match="give"):
        SlicePlan(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sequence_length", "num_slices", "granularity", "expected"), [
    (2048, 8, 64, (256,) * 8),
    (10, 3, 1, (4, 3, 3)),
    (640, 4, 64, (192, 192, 128, 128)),  # ten granules
    (100, 2, 64, (64, 36)),  # the last granule is partial
    (129, 3, 64, (64, 64, 1)),  # a single token last
    (1, 1, 1, (1,)),
])  # fmt: skip
def test_equal(sequence_length: int, num_slices: int, granularity: int, expected: tuple[int, ...]) -> None:
    assert SlicePlan.equal(sequence_length, num_slices, granularity).lengths == expected


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(1, 200))
def test_equal_properties(sequence_length: int, num_slices: int, granularity: int) -> None:
    granules = -(-sequence_length // granularity)
    if granularity > sequence_length:
        with pytest.raises(PlanError, match=f"give at most {sequence_length}"):
            SlicePlan.equal(sequence_length, num_slices, granularity)
        return
    if num_slices > granules:
        with pytest.raises(PlanError, match=f"give at most {granules},"):
            SlicePlan.equal(sequence_length, num_slices, granularity)
        return
    plan = SlicePlan.equal(sequence_length, num_slices, granularity)
    assert (plan.num_slices, plan.sequence_length) == (num_slices, sequence_length)
    assert all(start % granularity == 0 for start in plan.starts)
    counts = [-(-length // granularity) for length in plan.lengths]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "8", None])
def test_equal_names_the_argument(bad: object) -> None:
    for position, name in enumerate(("sequence_length", "num_slices", "granularity_tokens")):
        arguments: list[object] = [64, 1, 1]
        arguments[position] = bad
        with pytest.raises(PlanError, match=f"{name} = .*: give an integer >= 1"):
            SlicePlan.equal(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((2, 2, 1), (2, 3)), ((1, 1, 1, 1), (2, 2)), ((1, 4, 1, 3), (5, 4)), ((1,), (1,)), ((1, 1, 1), (3,))],
)
def test_slices_that_are_too_short_are_joined(lengths: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert SlicePlan(lengths).joined(2) == SlicePlan(expected)
    assert SlicePlan(lengths).joined(1) == SlicePlan(lengths)


@given(lengths)
def test_spans_cover_the_sequence_and_plans_come_back(values: list[int]) -> None:
    plan = SlicePlan(tuple(values))
    assert [token for start, stop in plan.spans() for token in range(start, stop)] == list(range(sum(values)))
    assert plan.starts == tuple(start for start, _ in plan.spans())
    assert plan == SlicePlan.from_json(plan.to_json()) == SlicePlan.from_json(plan.to_json().encode())


@pytest.mark.parametrize("text", [
    "", "null", "[512]", "{}", '{"version": 1}', '{"lengths": [1]}', '{"version": 2, "lengths": [1]}',
    '{"version": true, "lengths": [1]}', '{"version": 1, "lengths": []}', '{"version": 1, "lengths": "12"}',
    '{"version": 1, "lengths": [1, 2.0]}', '{"version": 1, "lengths": [1, true]}', '{"version": 1, "lengths": [NaN]}',
    '{"version": 1, "lengths": [1], "more": 0}', '{"version": 1, "lengths": [1], "lengths": [2]}', "[" * 100_000,
    '{"version": 1, "lengths": [' + "9" * 6000 + "]}", b"\xff\xfe\xff", None, 12,
])  # fmt: skip
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        SlicePlan.from_json(text)
    assert len(str(caught.value)) < 400
