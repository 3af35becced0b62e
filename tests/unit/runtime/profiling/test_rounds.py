"""Which slices are measured, in which order, how often, and what is made of the times."""

import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from terapipe_ds.costs.profile import CostSample
from terapipe_ds.runtime.profiling import rounds
from terapipe_ds.runtime.profiling.rounds import (
    Taken,
    grid,
    groups_of,
    measure,
    noise_warning,
    shares,
    time_part,
    undisturbed,
)


@example(length=5, granularity=4, shortest=3)
@given(length=st.integers(1, 5000), granularity=st.integers(1, 300), shortest=st.integers(1, 4))
def test_the_grid_covers_what_a_plan_may_ask_for(length: int, granularity: int, shortest: int) -> None:
    points = grid(length, granularity, shortest)
    assert len(set(points)) == len(points)
    fewest = min(shortest, length)
    assert all(tokens >= fewest and prefix >= 0 and tokens + prefix <= length for tokens, prefix in points)
    bases = sorted(tokens for tokens, prefix in points if prefix == 0)
    assert bases[0] == min(max(granularity, shortest), length) and bases[-1] == length
    assert all(b <= 2 * a for a, b in itertools.pairwise(bases))  # no gap to fill in is large
    if length > max(granularity, shortest):  # there are plans of two slices, whose second one has a prefix
        assert any(tokens + prefix == length and prefix > 0 for tokens, prefix in points)
    assert sum(tokens for tokens, _ in points) <= 5 * length  # a round costs less than five sequences


class FakeStage:
    """A stage on a clock of its own: a forward takes tokens + prefix / 4 seconds, a backward twice as long."""

    def __init__(self, clock: list[float], slowness: float = 1.0) -> None:
        self.clock, self.slowness = clock, slowness
        self.order: list[str] = []
        self.live = self.most_live = 0

    def forward(self, tokens: int, prefix: int) -> tuple[float, Any]:
        seconds = (tokens + prefix / 4) * self.slowness
        self.clock[0] += seconds
        self.order.append(f"F{tokens}.{prefix}")
        self.live += tokens
        self.most_live = max(self.most_live, self.live)
        return seconds, (tokens, prefix)

    def backward(self, live: Any) -> tuple[float, float]:
        seconds = 2 * (live[0] + live[1] / 4) * self.slowness
        self.clock[0] += seconds
        self.order.append(f"B{live[0]}.{live[1]}")
        self.live -= live[0]
        return seconds, 0.0


def measured(stage: FakeStage, points: Any, length: int, stages: int = 1, **options: Any) -> rounds.Rounds:
    return measure(stage, points, length, rounds.LIMIT_STEPS * stages, **options)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now[0])
    return now


def test_samples_are_medians_of_each_point(clock: list[float]) -> None:
    stage = FakeStage(clock)
    result = measured(stage, grid(1024, 64), 1024, stages=2)
    assert {(s.tokens, s.prefix) for s in result.samples()} == set(grid(1024, 64))
    for sample in result.samples():
        assert sample.forward_s == sample.tokens + sample.prefix / 4
        assert sample.backward_s == 2 * sample.forward_s
        assert sample.forward_spread == 0.0 and sample.repeats >= rounds.MIN_ROUNDS
    assert stage.live == 0 and stage.most_live == 1024  # all forwards of a group before its backwards, no more live


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 4), (8, 1), (4, 16)])
@pytest.mark.parametrize("length", [1024, 2048, 131072])
def test_it_takes_at_most_20_unsliced_steps(clock: list[float], stages: int, micro_batches: int, length: int) -> None:
    step_s = (micro_batches + stages - 1) * 3 * length  # unsliced: forward 1, backward 2 seconds a token
    stage: Any = FakeStage(clock)
    stage.module, stage.sequence_length, stage.can_split, stage.leaving_weights = (
        nn.Identity(),
        length,
        False,
        nullcontext,
    )
    (whole,) = (sample for sample in time_part(stage, 64, stages, micro_batches) if sample.tokens == length)
    assert clock[0] <= 20 * step_s
    assert rounds.MIN_ROUNDS <= whole.repeats <= rounds.MAX_ROUNDS


def test_slices_share_a_joint_product_by_tokens() -> None:
    alone = {64: 5.0, 1024: 6.0, 4096: 16.0}
    assert shares(alone, 1000.0) == {64: 6.0 * 64 / 1024, 1024: 6.0, 4096: 16.0}
    assert shares(alone, 8192.0) == {64: 16.0 * 64 / 4096, 1024: 4.0, 4096: 16.0}, "the longest stands for longer ones"


def test_all_ranks_measure_as_often_as_the_slowest_can_afford(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, barriers = measured(FakeStage(clock), grid(1024, 64), 1024, stages=4), []
    # the others are a hundred times as slow, but for what a whole sequence takes
    monkeypatch.setattr(rounds, "largest", lambda value, group: value if value == 3 * 1024 else 100 * value)
    monkeypatch.setattr(rounds, "barrier", barriers.append)
    together = measured(FakeStage(clock), grid(1024, 64), 1024, stages=4, group="all")
    assert together.count == rounds.MIN_ROUNDS < alone.count
    assert barriers == ["all"] * 2 * (2 + together.count * sum(map(len, groups_of(grid(1024, 64), 1024))))


def test_runs_in_which_another_program_had_the_processor_do_not_count() -> None:
    runs = [Taken(1.02, 0.01), Taken(1.51, 0.50), Taken(1.00, 0.0), Taken(1.30, 0.29), Taken(1.01, 0.02)]
    assert undisturbed(runs) == [1.02, 1.00, 1.01]


def test_a_disturbed_round_is_not_in_the_costs_but_in_the_spread(clock: list[float]) -> None:
    class Disturbed(FakeStage):
        """In every second round something else has the processor for twice the time of each run."""

        processor_s, runs = 0.0, 0

        def forward(self, tokens: int, prefix: int) -> tuple[float, Any]:
            seconds, kept = super().forward(tokens, prefix)
            return self._lengthened(seconds), kept

        def backward(self, live: Any) -> tuple[float, float]:
            return self._lengthened(super().backward(live)[0]), 0.0

        def _lengthened(self, seconds: float) -> float:
            self.processor_s += seconds
            self.runs += 1
            return 3 * seconds if self.runs % 4 < 2 else seconds

    stage = Disturbed(clock)
    (sample,) = measured(stage, [(1024, 0)], 1024, stages=4, processor_s=lambda: stage.processor_s).samples()
    assert (sample.forward_s, sample.backward_s) == (1024, 2048)
    assert sample.forward_spread > rounds.WIDE_SPREAD


def test_a_busy_machine_is_told_by_its_worst_slice() -> None:
    quiet, busy = CostSample(64, 0, 1.0, 2.0, 0.1, 0.15, 3), CostSample(32, 64, 1.0, 2.0, 0.2, 0.4, 3)
    assert noise_warning([quiet, busy]) is None, "half of them is not most"
    text = noise_warning([quiet, busy, dataclasses.replace(busy, prefix=0, backward_spread=0.1)])
    assert text is not None
    assert "2 of 3 measured slices vary by more than 15% (the worst, 32 tokens after 64, by 40%)" in text
