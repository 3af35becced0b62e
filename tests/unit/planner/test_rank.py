"""All schedules over all cuts of the layers: against brute force over schedules and plans."""

import dataclasses
import pickle
from typing import Any

import pytest
from planner_cases import Costs, brute_force_s, every_plan, split_parts

from terapipe_ds import planner
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import TRY_SEQ1F1B
from terapipe_ds.planner.result import Ranking, Refusal
from terapipe_ds.schedule import SCHEDULE_NAMES, build
from terapipe_ds.simulator import UnitCosts, simulate
from tests.costs import constant

PARTS = {
    "gpipe": (1, 2), "1f1b": (1, 2), "terapipe": (1, 2), "seq1f1b": (1, 2), "zb-h1": (1, 2), "seq1f1b-zb": (1, 2),
    "interleaved": (2, 4), "seq1f1b-interleaved": (2, 4), "seq1f1b-interleaved-zb": (2, 4), "zbv": (2, 4),
    "chimera": (2, 2), "chimera-seq": (2, 2),
}  # fmt: skip
"""(chunks per stage, parts) on two stages; dapple is 1f1b."""


def cut_in(num_parts: int) -> list[Costs]:
    """Costs per part that depend on how many there are."""
    return list(split_parts(3, num_parts))


@pytest.mark.parametrize("m", [1, 3])
def test_each_schedule_has_its_best_plan(m: int) -> None:
    ranking = planner.rank_schedules(cut_in, 6, 2, m, 1)
    found = {result.schedule: result for result in ranking.results}
    assert found.keys() - {"search"} == PARTS.keys() == set(SCHEDULE_NAMES) - {"dapple"} and ranking.refused == ()
    check_orders(ranking)
    for name, (chunks, num_parts) in PARTS.items():
        best_s = brute_force_s(cut_in(num_parts), name, 2, 6, m, chunks)
        assert found[name].predicted_s == pytest.approx(best_s, rel=1e-9), name
        assert found[name].chunks_per_stage == chunks
    seconds = [result.predicted_s for result in ranking.results]
    assert seconds[0] <= min(seconds) * 1.001 and seconds[1:] == sorted(seconds[1:])
    assert ranking.best is ranking.results[0]


def check_orders(ranking: planner.Ranking) -> None:
    """An order is found for each placement that it can have, and is not slower than the named schedules there."""
    orders = {result.chunks_per_stage: result for result in ranking.results if result.order is not None}
    assert orders.keys() == {1, 2}
    named_s = {1: ("1f1b", "seq1f1b", "seq1f1b-zb", "zb-h1", "terapipe"), 2: ("zbv",)}
    for chunks, found in orders.items():
        timeline = simulate(found.build(), found.plans, cut_in(2 * chunks))
        assert timeline.makespan_s == pytest.approx(found.predicted_s, rel=1e-12) and found.schedule == "search"
        assert found.lower_bound_s <= found.predicted_s * (1 + 1e-12) >= found.order_bound_s
        for result in ranking.results:
            assert result.schedule not in named_s[chunks] or found.predicted_s <= result.predicted_s * (1 + 1e-9)


def test_slices_that_are_given() -> None:
    plan = SlicePlan((3, 2, 2))
    ranking = planner.rank_schedules(cut_in, 7, 2, 3, plan=plan)
    assert {result.schedule for result in ranking.results} == PARTS.keys() | {"search"}
    check_orders(ranking)
    for result in (one for one in ranking.results if one.order is None):
        chunks, num_parts = PARTS[result.schedule]
        schedule = build(result.schedule, 2, 3, 3, chunks_per_stage=chunks)
        timeline = simulate(schedule, plan, cut_in(num_parts))
        assert (result.predicted_s, result.plan) == (timeline.makespan_s, plan)
        assert result.bubble_fraction == pytest.approx(timeline.bubble_fraction)
        assert result.chunks_per_stage == chunks
    assert ranking.best.predicted_s == pytest.approx(min(r.predicted_s for r in ranking.results), rel=1e-3)


def halves(num_parts: int) -> UnitCosts:
    return UnitCosts(8, share=2 / num_parts)


def names(*arguments: object, **options: object) -> set[str]:
    """Return the schedules with a name, and check that the others have an order and a placement that it can have."""
    results = planner.rank_schedules(*arguments, **options).results  # type: ignore[arg-type]
    assert all(one.chunks_per_stage <= 2 for one in results if one.order is not None)
    return {one.schedule for one in results if one.order is None}


def test_what_can_be_had() -> None:
    assert names(halves, 4, 2, 2, 2) == PARTS.keys()
    looped = {"interleaved", "seq1f1b-interleaved"}
    split = {"seq1f1b-interleaved-zb"}
    assert names(halves, 4, 2, 2, 2, chunks_per_stage=3) == looped | split
    assert names(halves, 4, 2, 2, 2, chunks_per_stage=2) == {*looped, *split, "zbv", "chimera", "chimera-seq"}
    assert names(halves, 4, 3, 2, 2) == PARTS.keys() - {"chimera", "chimera-seq"}  # an odd number of stages
    few = names(lambda n: halves(n) if n <= 2 else None, 4, 2, 2, 2)  # fewer layers than 2 K parts
    assert few == PARTS.keys() - {*looped, *split, "zbv"}
    whole = {"gpipe", "1f1b", "terapipe", "seq1f1b"}

    class Unsplit:
        forward_s, backward_s = UnitCosts(4).forward_s, UnitCosts(4).backward_s

    assert names(lambda n: Unsplit(), 4, 2, 2, 2) == whole | looped | {"chimera", "chimera-seq"}
    with pytest.raises(planner.PlannerError, match="chunks_per_stage = 3: no schedule"):
        planner.rank_schedules(lambda n: None, 4, 2, 2, 2, chunks_per_stage=3)
    with pytest.raises(planner.PlannerError, match="memory_limit_bytes needs memory"):
        planner.rank_schedules(halves, 4, 2, 2, 2, memory_limit_bytes=1e9)


def memory_of(num_parts: int) -> planner.MemoryModel:
    """4000 bytes of parameters over all parts, and 5 per token of a live slice."""
    return planner.MemoryModel(tuple(planner.PartMemory(4000 // num_parts, 10 / num_parts) for _ in range(num_parts)))


@pytest.mark.parametrize("given", [False, True])
def test_a_limit_refuses_with_the_least_need(given: bool) -> None:
    def ranked(limit: float) -> object:
        plan = SlicePlan((4, 4)) if given else None
        return planner.rank_schedules(halves, 8, 2, 4, 4, plan=plan, memory_of=memory_of, memory_limit_bytes=limit)

    ranking = ranked(3000)
    refused = {one.schedule: one for one in ranking.refused}  # type: ignore[attr-defined]
    assert refused.keys() == {"chimera", "chimera-seq"}  # both parts on each stage
    assert len(ranking.results) == 10 + 2  # type: ignore[attr-defined]
    for name, one in refused.items():
        needs = [
            max(simulate(build(name, 2, 4, plan.num_slices), plan, halves(2), memory=memory_of(2)).peak_bytes or ())
            for plan in ([SlicePlan((4, 4))] if given else every_plan(8, 4))
        ]
        assert one.need_bytes == min(needs) > 4000
    nothing = ranked(1000)
    assert nothing.results == () and len(nothing.refused) == 12  # type: ignore[attr-defined]
    with pytest.raises(planner.MemoryLimitError) as caught:
        _ = nothing.best  # type: ignore[attr-defined]
    assert caught.value.need_bytes == min(one.need_bytes for one in nothing.refused)  # type: ignore[attr-defined]


def test_a_schedule_that_was_tried_is_no_advice() -> None:
    error = pickle.loads(pickle.dumps(planner.MemoryLimitError("nothing fits", 5, 1, (TRY_SEQ1F1B, "more stages"))))
    assert str(error) == f"nothing fits; try {TRY_SEQ1F1B}, more stages"
    with pytest.raises(planner.MemoryLimitError, match=r"^nothing fits; try more stages$") as caught:
        _ = Ranking.of((), [Refusal("gpipe", 1, error)]).best
    assert (caught.value.need_bytes, caught.value.stage_id) == (5, 1)


@pytest.mark.parametrize("given", [False, True])
def test_what_comes_on_top_counts(given: bool) -> None:
    """On two stages with F = 1, B = 2 per part of a micro-batch of one slice, m = 2: plain schedules take 3 m + 3 = 9,
    chimera, whose stages start together and each hold both parts, 6 or a little more."""

    def ranked(extra_s: float | None) -> planner.Ranking:
        options: dict[str, Any] = {"both_ways_s_of": {2: extra_s}.get}
        whole = lambda n: constant(1.0, 2.0) if n == 2 else None  # noqa: E731
        return planner.rank_schedules(whole, 4, 2, 2, 4, plan=SlicePlan((4,)) if given else None, **options)

    free = ranked(0.0)
    chimera_s = free.best.predicted_s
    assert free.best.schedule.startswith("chimera") and 6 <= chimera_s < 9
    for extra_s, schedules in ((8.9 - chimera_s, "chimera"), (9.1 - chimera_s, "1f1b")):
        ranking = ranked(extra_s)
        assert schedules in ranking.best.schedule
        found = {one.schedule: (one.predicted_s, one.extra_s, one.total_s) for one in ranking.results}
        assert found["chimera"] == (chimera_s, extra_s, chimera_s + extra_s) and found["1f1b"] == (9, 0, 9)
        assert {one["schedule"]: one["extra_s"] for one in ranking.to_dicts()}["chimera"] == extra_s
        ratios = {line.split()[0]: line.split("x ")[0].split()[-1] for line in planner.describe_ranking(ranking)[1:]}
        assert float(ratios["chimera"]) == pytest.approx((chimera_s + extra_s) / ranking.best.total_s, abs=1e-3)
    text = planner.describe(next(one for one in ranked(0.5).results if one.schedule == "chimera"))
    assert any("500.00 ms more to sum and step" in line for line in text)
    unknown = ranked(None).best
    assert unknown.extra_s is None and unknown.total_s == chimera_s
    assert any("an unknown time more to sum and step" in line for line in planner.describe(unknown))


def test_in_words() -> None:
    ranking = planner.rank_schedules(halves, 8, 2, 4, 4, memory_of=memory_of, memory_limit_bytes=3000)
    head, *lines = planner.describe_ranking(ranking)
    assert head.split() == ["schedule", "chunks", "slices", "predicted", "ratio", "bubble", "memory"]
    assert [line.split()[0] for line in lines] == [one.schedule for one in (*ranking.results, *ranking.refused)]
    assert "1.000x" in lines[0] and "needs" in lines[-1] and len(lines) == 12 + 2
    free = planner.describe_ranking(planner.rank_schedules(halves, 8, 2, 4, 4))
    assert "extra" in free[0] and all(("unknown" in line) == line.startswith("chimera") for line in free)
    two = next(one for one in ranking.results if one.schedule == "zbv")
    assert planner.describe(two)[0] == "schedule  zbv, 2 parts per stage"


def test_a_plan_in_words() -> None:
    memory = planner.MemoryModel((planner.PartMemory(10**6, 1000.0),) * 4)
    planned = planner.plan_slices(UnitCosts(64), 64, 4, 1, 8, "seq1f1b", memory=memory, memory_limit_bytes=10**9)
    text = "\n".join(planner.describe(planned))
    assert f"{planned.plan.num_slices} slices" in text and "schedule  seq1f1b" in text and "(chosen)" not in text
    assert f"({planned.unsliced_s / planned.predicted_s:.3f}x)" in text
    assert f"bubble    {planned.bubble_fraction:.1%}" in text
    assert "1.0 MiB on stage 0" in text and "limit 953.7 MiB" in text and "proof     optimal: proven" in text
    guessed = dataclasses.replace(planned, optimal=False, lower_bound_s=planned.predicted_s / 2)
    lines = planner.describe(guessed, card_bytes=2**31)
    assert f"proof     lower bound {guessed.lower_bound_s:.3f} s, gap 100.00%" in lines
    assert any(line.endswith("; limit 953.7 MiB, 0.47 of the card's 2") for line in lines)
    lines = planner.describe(planner.best_schedule(UnitCosts(64), SlicePlan((64,)), 4), schedule_chosen=True)
    assert any("1 slice:" in line for line in lines) and "(chosen)" in lines[0]
    assert not any("proof" in line or "memory" in line for line in lines)  # nothing is known of either
    given = planner.best_schedule(UnitCosts(64), [SlicePlan((48, 16)), SlicePlan((64,))], 4, 2)
    equal_s = simulate(given.build(), [SlicePlan((32, 32)), SlicePlan((64,))], UnitCosts(64)).makespan_s
    assert equal_s < given.predicted_s
    assert f"          {equal_s:.3f} s with as many equal slices, 2 ({equal_s / given.predicted_s:.3f}x)" in (
        planner.describe(given)
    )
