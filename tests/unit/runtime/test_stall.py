"""Reports of stalls from states that are made up: who is to blame, and what is said of it. No process, no store."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from terapipe_ds.runtime.stall import (
    CLOSED,
    SHOWN_ACTIONS,
    SHOWN_RANKS,
    Doing,
    PastAction,
    RankState,
    Wait,
    culprits,
    past_actions,
    report_lines,
    save_last_actions,
    stall_report,
    verdict,
    waits_on,
    who_waits_for,
)

STACK = '  File "train.py", line 7, in forward\n    time.sleep(9)\n'


def running(rank: int, action: str = "F0.1", for_s: float = 3.0, **more: object) -> RankState:
    return replace(RankState(rank, rank, action, for_s=for_s, batch=4), **more)  # type: ignore[arg-type]


def waiting(rank: int, *ranks: int, action: str = "B0.0") -> RankState:
    return running(rank, action, waits_for=f"the gradients of {action}", waits_for_ranks=ranks)


def collective(rank: int, action: str = "ST", name: str = "all_reduce", **more: object) -> RankState:
    return running(rank, action, collective=name, **more)


def job(*states: RankState) -> dict[int, RankState]:
    return {state.rank: state for state in states}


class TestWhoWaits:
    def test_a_message_comes_from_one_rank(self) -> None:
        states = job(waiting(0, 1), running(1), waiting(2, 1))
        assert [waits_on(state, states) for state in states.values()] == [{1}, set(), {1}]

    def test_a_collective_waits_for_all_who_are_not_in_one(self) -> None:
        states = job(collective(0), collective(1), waiting(2, 3), running(3))
        assert waits_on(states[0], states) == {2, 3}

    def test_a_layer_waits_for_its_peers_only(self) -> None:
        states = job(
            collective(0, "F0.1", peers=(0, 1)), running(1, "F0.1", peers=(0, 1)), running(2, peers=(2, 3)),
            running(3, peers=(2, 3)),
        )  # fmt: skip
        assert waits_on(states[0], states) == {1}

    def test_after_the_layers_it_waits_for_everybody(self) -> None:
        states = job(collective(0, "ST", peers=(0, 1)), collective(1, "ST", peers=(0, 1)), running(2))
        assert waits_on(states[0], states) == {2}

    def test_a_rank_that_is_gone_waits_for_nobody(self) -> None:
        states = job(replace(waiting(0, 1), silent=True), waiting(1, 0), replace(collective(2), gone=CLOSED))
        assert [waits_on(state, states) for state in states.values()] == [set(), {0}, set()]

    def test_through_others(self) -> None:
        states = job(waiting(0, 1), waiting(1, 2), waiting(2, 3), running(3))
        assert who_waits_for(states) == {0: set(), 1: {0}, 2: {0, 1}, 3: {0, 1, 2}}


class TestCulprits:
    @pytest.mark.parametrize(
        ("states", "blamed"),
        [
            (job(waiting(0, 1), running(1)), [1]),
            (job(running(0), waiting(1, 0, action="F0.1")), [0]),
            (job(waiting(0, 1), waiting(1, 2), running(2), waiting(3, 2, action="F0.2")), [2]),
            # the optimizer of rank 1 hangs: the others reduce with it, or are already at the next batch
            (job(collective(0), running(1, "ST"), collective(2, "the start of a batch")), [1]),
            # a tensor-parallel peer does not come, and the stage before waits for the gradients
            (
                job(
                    waiting(0, 2), waiting(1, 3), collective(2, "F0.1", peers=(2, 3)),
                    running(3, "F0.1", peers=(2, 3)),
                ),
                [3],
            ),
            # the data loader hangs
            (job(running(0, "the start of a batch"), collective(1, "the start of a batch")), [0]),
            # killed: no answer, though it was last seen waiting
            (job(waiting(0, 1), replace(waiting(1, 0), silent=True)), [1]),
            # killed, and somebody else is at work
            (job(waiting(0, 1), replace(running(1), silent=True), running(2), waiting(3, 2)), [1]),
            # makes fewer steps than the others
            (job(collective(0, "the start of a batch"), running(1, "", gone=CLOSED)), [1]),
            (job(collective(0, "the start of a batch"), running(1, "")), [1]),
            # saves a checkpoint, waits for one that does not come
            (job(collective(0, "save_checkpoint", "barrier"), running(1, "save_checkpoint")), [1]),
            # one hangs, another only works: it has just begun
            (job(waiting(0, 1), running(1), running(2, for_s=0.1), waiting(3, 2)), [1]),
            # two hang
            (job(waiting(0, 1), running(1), running(2, for_s=2.9), waiting(3, 2)), [1, 2]),
            # it hangs before anybody waits for it
            (job(running(0), running(1, "")), [0]),
            # wait for each other; all in one collective
            (job(waiting(0, 1), waiting(1, 0)), []),
            (job(collective(0), collective(1)), []),
        ],
    )  # fmt: skip
    def test_by_hand(self, states: dict[int, RankState], blamed: list[int]) -> None:
        assert culprits(states) == blamed

    @pytest.mark.parametrize("seed", range(30))
    def test_one_rank_hangs_in_a_pipeline(self, seed: int) -> None:
        """Whoever hangs, whoever waits for whom: chains of neighbours end at it."""
        choose = random.Random(seed)
        stages = choose.randint(2, 9)
        hangs = choose.randrange(stages)
        towards = {rank: rank + (1 if rank < hangs else -1) for rank in range(stages) if rank != hangs}
        states = job(*(waiting(rank, towards[rank]) if rank != hangs else running(rank) for rank in range(stages)))
        assert culprits(states) == [hangs]
        assert who_waits_for(states)[hangs] == set(range(stages)) - {hangs}


class TestReport:
    def test_the_whole_report(self) -> None:
        recent = (
            PastAction("F0.0", "", 10.0, 0.0125), PastAction("RG0.0<1", "", 10.1, 0.0),
            PastAction("B0.0", "the gradients", 10.2, None),
        )  # fmt: skip
        states = job(replace(waiting(0, 1), recent=recent), running(1, "F0.2", stack=STACK))
        assert stall_report(states, 2.0, asynchronous=False).splitlines() == [
            "no progress for 2 s (terapipe.stall_timeout_s):",
            "  rank 0 (stage 0): at B0.0, waiting for the gradients of B0.0 for 3.0 s",
            "    before: F0.0 12.5 ms",
            "  rank 1 (stage 1): running F0.2 for 3.0 s",
            "Stage 1 (rank 1) is where it stands: it has been running F0.2 for 3.0 s and waits for no other rank; "
            "rank 0 waits for it.",
            "Rank 1 stands here:",
            *STACK.splitlines(),
            "If that stage is only slow, raise the limit.",
        ]

    def test_a_dead_rank_is_not_slow(self) -> None:
        states = job(waiting(0, 1), running(1, silent=True, stack=STACK, for_s=0.0), waiting(2, 1))
        text = stall_report(states, 2.0, asynchronous=False)
        what = "it does not answer: its process is gone or stopped; last seen running F0.1; ranks 0, 2 wait for it."
        assert f"Stage 1 (rank 1) is where it stands: {what}" in text
        assert STACK not in text and "slow" not in text

    def test_a_rank_that_left(self) -> None:
        lines = verdict(job(collective(0, "the start of a batch"), running(1, "", gone=CLOSED)))
        assert lines == ["Stage 1 (rank 1) is where it stands: it is done with its engine; rank 0 waits for it."]

    def test_a_rank_outside_says_how_many_batches_it_has_begun(self) -> None:
        (line,) = verdict(job(collective(0), running(1, "")))
        assert "it is outside a batch for 3.0 s (it has begun 4 batches)" in line

    def test_a_circle(self) -> None:
        (line,) = verdict(job(waiting(0, 1), waiting(1, 0), running(2, "")))
        assert line.startswith("Ranks 0, 1 wait for each other: they do not make the same calls")

    def test_different_collectives(self) -> None:
        (line,) = verdict(job(collective(0, "ST"), collective(1, "", "barrier")))
        assert line.startswith("Ranks 0, 1 wait for each other")

    def test_one_collective_that_never_ends(self) -> None:
        (line,) = verdict(job(collective(0), collective(1)))
        assert "a connection between two of them is broken" in line

    def test_without_the_store(self) -> None:
        text = stall_report({}, 2.0, asynchronous=False)
        assert "rank 0, which serves the watch-dog's store, does not answer" in text

    def test_on_a_device_that_runs_behind(self) -> None:
        assert "The device runs behind the host" in stall_report(job(running(0), waiting(1, 0)), 2.0, asynchronous=True)

    def test_only_the_last_actions_are_shown(self) -> None:
        recent = tuple(PastAction(f"F0.{index}", "", 0.0, 1.0) for index in range(3 * SHOWN_ACTIONS))
        _, line = report_lines([running(0, recent=recent)])
        assert line.count("F0.") == SHOWN_ACTIONS
        assert line.endswith(f"F0.{3 * SHOWN_ACTIONS - 2} 1.0 s"), "the last entry is what it does now"

    def test_of_a_large_job_those_that_wait_for_nobody_are_shown(self) -> None:
        states = job(*(waiting(rank, rank + 1) for rank in range(999)), running(999))
        lines = stall_report(states, 2.0, asynchronous=False).splitlines()
        assert len(lines) < 2 * SHOWN_RANKS
        assert any(line.startswith("  rank 999 (stage 999): running") for line in lines)
        assert f"  and {1000 - SHOWN_RANKS} more ranks, which wait" in lines
        assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and more wait for it." in lines[-2]

    def test_a_collective_is_shown(self) -> None:
        assert collective(0).describe() == "running ST, in a collective (all_reduce) for 3.0 s"


class TestValues:
    def test_the_ring_buffer_as_durations(self) -> None:
        waits = Doing("B0.0", Wait("the gradients", (1,)), since_s=1.5)
        ring = [Doing("F0.0", since_s=1.0), waits, Doing("", since_s=4.0)]
        assert past_actions(ring, now_s=5.0, wall_s=1005.0) == (
            PastAction("F0.0", "", 1001.0, 0.5),
            PastAction("B0.0", "the gradients", 1001.5, 2.5),
            PastAction("outside a batch", "", 1004.0, None),
        )

    def test_a_state_survives_json(self) -> None:
        state = waiting(2, 1, 3)
        state = replace(state, recent=(PastAction("F0.0", "", 1.5, None),), peers=(2, 3), gone="x", stack=STACK)
        assert RankState.from_json(state.to_json().encode()) == state

    def test_the_file(self, tmp_path: Path) -> None:
        state = running(3, "ST", recent=(PastAction("F0.0", "", 1.5, 0.25),), stack=STACK)
        save_last_actions(tmp_path / "new", state)
        (path,) = (tmp_path / "new").iterdir()
        assert path.name == "last-actions-rank0003.json"
        content = json.loads(path.read_text())
        assert content["now"] == "running ST for 3.0 s"
        assert content["recent"] == [{"action": "F0.0", "waited_for": "", "start_s": 1.5, "duration_s": 0.25}]
        assert content["stack"] == STACK.splitlines()
