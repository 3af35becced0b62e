"""Test that random configurations train as in a plain loop in one process: loss, gradients, parameters, evaluation.

The configurations are drawn by hypothesis with a fixed seed, so they are the same in every run; `training.py` has
no pipeline, no slices and no engine. Fourteen that cover most pairs of values run by default, all of them with
TERAPIPE_TEST_FULL=1.
"""

import functools
import itertools
import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from tests.distributed import cases
from tests.distributed.cases import CARRIED, CLIP_NORM, MAX_LENGTH, OPTIONS, Case, RankRecord
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.training import IGNORE_INDEX, micro_batches, train_alone, train_case

BLOCK = 20
COUNT = 200
SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != "dapple")
"""What is drawn: dapple is 1f1b by another name."""
BATCHES = ("tuple", "cu_seq_lens_q", "seq_idx")
NUM_LAYERS = 7  # of the model, with embedding, norm and head
_GRIDS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2))}  # (stages, data parallel) by the number of ranks


@st.composite
def slice_lengths(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Draw a list of up to five slice lengths."""
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=4))
    edges = [0, *sorted(cuts), length]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def _can_run(schedule: str, stages: int) -> bool:
    if schedule.startswith("chimera"):
        return stages % 2 == 0
    return 2 * stages <= NUM_LAYERS or schedule not in CHUNKED_SCHEDULES


@st.composite
def configurations(draw: st.DrawFn) -> Case:
    stages, data_parallel = draw(st.sampled_from(_GRIDS[draw(st.sampled_from(sorted(_GRIDS)))]))
    length = draw(st.integers(6, MAX_LENGTH))
    mixed = draw(st.booleans())
    slices = draw(st.integers(1, 3) if mixed else st.integers(1, 6) | slice_lengths(length))
    return Case(
        stages,
        data_parallel,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        length,
        mixed,
        slices,
        precision=draw(st.sampled_from(["fp64", "fp64", "fp32", "fp32_zero1"])),
        checkpointing=draw(st.sampled_from(["off", "reentrant", "non_reentrant"])),
        tied=draw(st.booleans()),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        gpt3=draw(st.booleans()),
        masked=draw(st.booleans()),
        loss_reduction=draw(st.sampled_from(["mean_valid", "mean_valid", "mean", "sum"])),
        clipping=draw(st.booleans()),
        hook=draw(st.booleans()),
        steps=draw(st.integers(2, 3)),
        data_seed=draw(st.integers(0, 2**20)),
    )


def _mixers(generator: random.Random) -> tuple[str, ...]:
    """Draw up to four kinds of layers, in turn: the model's own, layers with a state, attention with any options."""

    def kind() -> str:
        options = [name for name in OPTIONS if generator.random() < 0.4]
        return generator.choice(("attention", *CARRIED, *["+".join(options) or "attention"] * 5))

    return tuple(kind() for _ in range(generator.randint(1, 4)))


@functools.cache
def drawn() -> tuple[Case, ...]:
    """Return `COUNT` different configurations, grouped by their number of ranks."""
    found: dict[Case, None] = {}

    @seed(0)
    @settings(
        max_examples=COUNT + COUNT // 4,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def collect(configuration: Case) -> None:
        names = [name for name in SCHEDULES if _can_run(name, configuration.stages)]
        schedule = names[len(found) % len(names)]  # in turns: hypothesis likes the first values of a list best
        mixers, documents = _mixers(random.Random(len(found))), len(found) // 5 % 3 == 0
        one = replace(configuration, schedule=schedule, mixers=mixers, documents=documents)
        if documents and not one.mixed:  # short rows may have no document of two tokens, and so no label
            one = replace(one, batch=BATCHES[len(found) % len(BATCHES)])
        found[one] = None

    collect()
    assert len(found) >= COUNT, f"only {len(found)} different configurations"
    chosen = list(found)[-COUNT:]  # hypothesis begins with the simple ones
    return tuple(sorted(chosen, key=lambda each: (each.world_size, each.stages)))


def covering(count: int) -> tuple[Case, ...]:
    """Return `count` of the drawn ones on two ranks that together have as many pairs of values as possible."""
    waiting = [each for each in drawn() if each.world_size == 2]
    seen: set[Any] = set()
    chosen: list[Case] = []
    while len(chosen) < count:
        best = max(waiting, key=lambda each: len(_pairs(each) - seen))
        waiting.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return tuple(chosen)


def _pairs(configuration: Case) -> set[Any]:
    """Return the pairs of values in a configuration; numbers of tokens, the seed and the form do not matter."""
    values = {f.name: getattr(configuration, f.name) for f in fields(configuration)}
    listed = isinstance(values.pop("slices"), tuple)
    for name in ("length", "data_seed", "steps", "rows", "batch"):
        del values[name]
    mixers = sorted({part for kind in values.pop("mixers") for part in kind.split("+")})
    items = [*sorted({**values, "listed": listed}.items()), *(("mixer", part) for part in mixers)]
    return {(one, other) for index, one in enumerate(items) for other in items[:index]}


@functools.cache
def reference(case: Case) -> list[RankRecord]:
    return train_alone(case)


def problems(case: Case) -> list[str]:
    """Return the errors above the contract; empty if both trainings are the same."""
    run = rank_pool(case.world_size).run(train_case, case=case, **({"verify": None} if cases.FULL else {}))
    return cases.violations(cases.errors(run, reference(case)), cases.contract(case))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", covering(14), ids=lambda c: f"seed{c.data_seed}")
def test_training_equals_a_plain_loop(case: Case) -> None:
    assert not problems(case), str(case)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, COUNT, BLOCK))
def test_all_configurations(first: int) -> None:
    wrong = {}
    for case in drawn()[first : first + BLOCK]:
        try:
            found = problems(case)
        except RankFailure as failure:
            found = [str(failure)]
        if found:
            wrong[str(case)] = found
    assert not wrong


class TestConfigurations:
    """Test that the drawn configurations cover what the comparison claims."""

    def test_every_schedule_and_every_value_occurs_in_the_default_run_too(self) -> None:
        few, many = covering(14), drawn()
        assert len(set(many)) == COUNT and all(sum(c.world_size == n for c in many) >= COUNT // 4 for n in (2, 4))
        assert {each.schedule for each in few} == set(SCHEDULES)
        kinds = {part for each in few for kind in each.mixers for part in kind.split("+")}
        assert kinds == {"attention", *CARRIED, *OPTIONS} and any(len(set(each.mixers)) > 2 for each in few)
        numbers = {"stages", "micro_batches", "rows", "length", "slices", "schedule", "steps", "data_seed", "mixers"}
        for name in {field.name for field in fields(Case)} - numbers - {"decoder_layers"}:
            values = {getattr(each, name) for each in many if each.world_size == 2}
            assert {getattr(each, name) for each in few} == values and len(values) > 1, name

    def test_masks_leave_a_label_in_each_micro_batch_and_empty_some_slices(self) -> None:
        masked = [each for each in drawn() if each.masked and isinstance(each.slices, tuple)]
        empty = 0
        for each in masked:
            for _, labels in micro_batches(each, replica=0, step=1):
                parts = (labels != IGNORE_INDEX).split(list(each.slices), dim=1)
                counts = [int(part.sum()) for part in parts]
                assert sum(counts) > 0
                empty += counts.count(0)
        assert empty > len(masked)


class TestReference:
    def test_clipping_and_the_hook_are_at_work(self) -> None:
        plain = Case()
        clipped, doubled = replace(plain, clipping=True), replace(plain, hook=True)
        norms = [norm(reference(each)[0]) for each in (plain, clipped, doubled)]
        assert norms[0] > 2 * CLIP_NORM
        assert norms[1] == pytest.approx(CLIP_NORM, rel=1e-4)  # its eps is 1e-6
        assert norms[2] == pytest.approx(2 * norms[0])


def norm(record: RankRecord) -> float:
    return float(np.sqrt(sum((gradient**2).sum() for gradient in record.gradients[1].values())))
