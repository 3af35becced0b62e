"""Cases drawn at random, the same ones in every run: what `single_process.py` is compared with.

No torch here: the process that collects tests does not need it.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import fields, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from tests.distributed.cases import CARRIED, MAX_LENGTH, OPTIONS, Case

COUNT = 200
SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != "dapple")
"""What is drawn: dapple is 1f1b by another name."""
BATCHES = ("tuple", "cu_seq_lens_q", "seq_idx")
NUM_LAYERS = 7  # of the model, with embedding, norm and head
_GRIDS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2))}  # (stages, data parallel) by the number of ranks


@st.composite
def slice_lengths(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """A list of up to five slice lengths."""
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
    """Up to four kinds of layers, in turn: the model's own, those with a state, attention with any options."""

    def kind() -> str:
        options = [name for name in OPTIONS if generator.random() < 0.4]
        return generator.choice(("attention", *CARRIED, *["+".join(options) or "attention"] * 5))

    return tuple(kind() for _ in range(generator.randint(1, 4)))


@functools.cache
def drawn() -> tuple[Case, ...]:
    """`COUNT` different configurations, sorted such that those of one number of ranks stand together."""
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
    """`count` of the drawn ones on two ranks which together have as many pairs of values as possible."""
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
    """What stands together in a configuration; numbers of tokens, the seed and the form do not matter."""
    values = {f.name: getattr(configuration, f.name) for f in fields(configuration)}
    listed = isinstance(values.pop("slices"), tuple)
    for name in ("length", "data_seed", "steps", "rows", "batch"):
        del values[name]
    mixers = sorted({part for kind in values.pop("mixers") for part in kind.split("+")})
    items = [*sorted({**values, "listed": listed}.items()), *(("mixer", part) for part in mixers)]
    return {(one, other) for index, one in enumerate(items) for other in items[:index]}
