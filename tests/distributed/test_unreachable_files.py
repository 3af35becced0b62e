"""Test saves and loads if one rank cannot stat, open or make a file: all ranks raise the same error, or all succeed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.distributed.engines import batches, engine_of, gpt_layers, raised_by, train, unchecked
from tests.distributed.failing_calls import LOOKS, WRITES, failing_at
from tests.distributed.harness import rank_pool

STALL_TIMEOUT_S = 5.0  # this detects a rank that waits alone

Outcome = tuple[str, int, str, tuple[str, str], float]  # what was done, which call failed, how it ended, in seconds


def save_and_load(folder: str, whose: int, step: int) -> list[Outcome]:
    """Let every `step`-th call of the rank `whose` fail, in a save over an older checkpoint and in a load of it."""
    outcomes: list[Outcome] = []
    with engine_of(gpt_layers(), unchecked(stall_timeout_s=STALL_TIMEOUT_S)) as engine:
        train(engine, batches(1))
        acts: dict[str, Callable[[], Any]] = {
            "save": lambda: engine.save_checkpoint(folder, tag="last"),
            "load": lambda: engine.load_checkpoint(folder),
        }
        acts["save"]()
        for name, act in acts.items():
            number, is_over = 0, [False]
            while not is_over[0]:
                begin_s = time.monotonic()
                at = number if distributed.get_rank() == whose else None
                with failing_at(at, "EACCES", "ESTALE", "EIO", calls=[*LOOKS, *WRITES], folder=folder) as tried:
                    raised = raised_by(act)
                failed = tried[number] if len(tried) > number else ""
                outcomes.append((name, number, failed, raised, time.monotonic() - begin_s))
                is_over = [len(tried) <= number]
                distributed.broadcast_object_list(is_over, src=whose)
                number += step
                if name == "load" and raised[0]:
                    act()  # until then, what is half loaded is refused
        train(engine, batches(1))
    return outcomes


@pytest.mark.parametrize("step", [14, pytest.param(1, marks=pytest.mark.full)], ids=["some", "every one"])
@pytest.mark.parametrize("whose", [0, 1], ids="rank {}".format)
def test_what_one_rank_cannot_reach_is_an_error_on_all_or_on_none(whose: int, step: int, tmp_path: Path) -> None:
    """The first calls of rank 1 are its looks at the folder, while rank 0 is in a collective already."""
    everyone = rank_pool(2).run(save_and_load, folder=str(tmp_path), whose=whose, step=step)
    for of_ranks in zip(*everyone, strict=True):
        (name, number, failed, *_) = of_ranks[whose]
        (one, text), (other, _) = (raised for *_, raised, _ in of_ranks)
        assert one == other, f"call {number} of a {name}, {failed}: rank 0 raises {one!r} ({text}), rank 1 {other!r}"
        assert max(seconds for *_, seconds in of_ranks) < STALL_TIMEOUT_S, (name, failed)
    outcomes = everyone[whose]
    assert sum(bool(raised[0]) for *_, raised, _ in outcomes) > len(outcomes) / 2 and len(outcomes) > 80 / step
    if whose == 1:
        looks = {name: raised for name, number, _, raised, _ in outcomes if number == 0}
        for kind, text in looks.values():
            assert kind == "CheckpointError" and "rank 1 cannot look at" in text and "Stale file handle" in text
