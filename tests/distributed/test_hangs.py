"""Test that all other ranks soon name a rank that hangs or dies: by stage, by action, by place in the code."""

import ctypes
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch import distributed

from tests.distributed.engines import MicroBatch
from tests.distributed.failures.faults import Fault
from tests.distributed.failures.job import MICRO_BATCHES, PLAN, Job, batches, build_engine, run
from tests.distributed.harness import rank_pool
from tests.distributed.test_failures import end_pool
from tests.fuzz.outcome import FULL

CLOCK_STEP_S = 3600.0
PLACES = ("outside", "native", "data", "reduce")
_LISTENS = "0A"


def train_with_pauses(steps: int, stall_timeout_s: float) -> int:
    """Train while a rank pauses in every second step, at a random place, and the clock steps by hours.

    A pause may hold Python's lock, so that the watch-dog pauses, too. Returns how many steps were made.
    """
    choose, rank = random.Random(5), distributed.get_rank()
    engine = build_engine(Job(stall_timeout_s=stall_timeout_s, section={"data_timeout_s": stall_timeout_s}))
    native, wall_clock, shift_s = ctypes.PyDLL(None), time.time, 0.0

    def data(step: int, seconds: float) -> Iterator[MicroBatch]:
        for batch in batches(step):
            time.sleep(seconds)
            yield batch

    try:
        with mock.patch.object(time, "time", lambda: wall_clock() + shift_s):
            for step in range(1, steps + 1):
                place = choose.choice([*PLACES, *[""] * len(PLACES)])
                whose, seconds = choose.randrange(2), choose.uniform(0.0, 0.6 * stall_timeout_s)
                pauses_s = dict.fromkeys(PLACES, 0.0) | ({place: seconds} if whose == rank else {})
                shift_s += choose.choice([-CLOCK_STEP_S, 0.0, 0.0, CLOCK_STEP_S])
                engine.module.before_reduce = lambda _, pause_s=pauses_s["reduce"]: time.sleep(pause_s)
                time.sleep(pauses_s["outside"])
                native.usleep(int(1e6 * pauses_s["native"]))
                engine.train_batch(data(step, pauses_s["data"] / 2))
        return int(engine.global_steps)
    finally:
        engine.destroy()


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens, by the socket table of the kernel."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    own = {os.readlink(path) for path in paths if os.path.lexists(path)}  # the folder itself was open
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in own}


def train_among_strangers() -> tuple[set[int], set[int], list[float]]:
    """Train among idle or noisy connections to every port. Return ports before and with an engine; losses."""
    before, noise = listening_ports(), random.Random(distributed.get_rank())
    engine = build_engine(Job())
    strangers, losses = [], []
    try:
        after = listening_ports()
        for step in range(1, 4):
            for port in after:
                strangers += [socket.create_connection(("localhost", port)) for _ in range(2)]
                strangers[-1].sendall(noise.randbytes(1000))
            losses.append(float(engine.train_batch(batches(step))))
        return before, after, losses
    finally:
        engine.destroy()
        for stranger in strangers:
            stranger.close()


STALL_TIMEOUT_S = 1.0
REPORT_S = 10.0  # from the timeout to the last report: the promised limit
HANGS = [(3, Fault("hang", "F", 1)), (2, Fault("hang", "data", 0)), (2, Fault("hang", "reduce", 1))]


def drawn(seed: int, kind: str, stages: list[int], *places: str) -> tuple[int, Fault]:
    """Draw the number of stages and a fault. Only the stages at the ends draw data."""
    choose = random.Random(seed)
    number, place = choose.choice(stages), choose.choice(places)
    stage = choose.choice([0, number - 1]) if place == "data" else choose.randrange(number)
    unit = choose.randrange(MICRO_BATCHES), choose.randrange(len(PLAN))
    return number, Fault(kind, place, stage, step=choose.choice([1, 2]), unit=unit)


class TestHangs:
    @pytest.mark.parametrize(("stages", "fault"), HANGS, ids=lambda value: getattr(value, "place", None))
    def test_the_stage_is_named(
        self, stages: int, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every rank ends, with exit code 1, blames this stage and no other, and leaves its last actions."""
        section = {"trace_dir": str(tmp_path), "data_timeout_s": STALL_TIMEOUT_S}
        job = Job(stages, stall_timeout_s=STALL_TIMEOUT_S, section=section, fault=fault)
        ended, everyone, stage = end_pool(stages, job, monkeypatch), list(range(stages)), fault.stage
        ended.assert_all_told(
            r"no progress for 1 s \(terapipe.(stall|data)_timeout_s\)",
            rf"Stage {stage} \(rank {stage}\) holds up the job",
            "in wait_for_ever",
            survivors=everyone,
        )
        for other in set(everyone) - {stage}:
            assert not any(f"Stage {other} (rank {other}) holds up" in output for output in ended.outputs)
            if (stages, fault) == HANGS[0]:
                state = rf"rank {other} \(stage {other}\): at [FB]\d\.\d, waiting for .* stage \d"
                ended.assert_all_told("running F1.2", "raise the limit", state, survivors=everyone)
        assert ended.exit_codes == [1] * stages
        assert ended.seconds_after_fault < STALL_TIMEOUT_S + REPORT_S
        contents = [json.loads((tmp_path / f"last-actions-rank{rank:04d}.json").read_text()) for rank in everyone]
        assert [content["stage_id"] for content in contents] == everyone
        assert any("in wait_for_ever" in line for line in contents[stage]["stack"])
        assert fault.step == 1 or all(len(content["recent"]) > 10 for content in contents)
        starts = [entry["start_s"] for entry in contents[stage]["recent"]]
        assert starts == sorted(starts)

    @pytest.mark.full
    @pytest.mark.parametrize("seed", range(20))
    def test_twenty_random_hangs(self, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stages, fault = drawn(seed, "hang", [2, 4], "before F", "F", "B", "send", "step", "reduce", "data")
        self.test_the_stage_is_named(stages, fault, tmp_path, monkeypatch)


class TestLosses:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("seed", range(100))
    def test_a_rank_is_killed_at_any_moment(self, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its data loader's workers live on for a while, with copies of its connections."""
        places = ("between", "data", "before F", "send", "reduce", "step", "save")
        (stages, fault), workers = drawn(seed, "kill", [2, 2, 3], *places), (seed + seed // 25) % 5
        job = Job(stages, 3, fault, stall_timeout_s=2.0, folder=str(tmp_path), saves=(1, 2), workers=workers)
        ended, stage = end_pool(job.stages, job, monkeypatch), fault.stage
        survivors = [rank for rank in range(stages) if rank != stage]
        named = rf"Stage {stage} \(rank {stage}\) holds up the job: does not answer"
        named += rf"|Rank {stage} \(stage {stage}\): does not answer"
        named += rf"|lost the connection to another rank while waiting for .* stage {stage} "
        named += "|(is gone|the store of the job does not answer)" if stage == 0 else ""  # with its store
        ended.assert_all_told(named, survivors=survivors)
        assert [ended.exit_codes[rank] for rank in survivors] == [1] * len(survivors)
        assert ended.seconds_after_fault < job.stall_timeout_s + 5.0


class TestHealthyRanks:
    def test_pauses_within_the_limits_end_nothing(self) -> None:
        steps = 1000 if FULL else 12
        found = rank_pool(2).run(train_with_pauses, steps=steps, stall_timeout_s=2.0, timeout_s=1800.0)
        assert found == [steps] * 2  # with 0.8 s to spare, for a machine that is busy

    def test_strangers_on_the_ports_change_nothing(self) -> None:
        """There are no ports but torch's; neither idle connections to them nor random bytes disturb the training."""
        undisturbed = rank_pool(2).run(run, job=Job(steps=3))
        for (before, after, losses), expected in zip(rank_pool(2).run(train_among_strangers), undisturbed, strict=True):
            assert after == before and sum(map(len, rank_pool(2).run(listening_ports))) > 0
            assert losses == expected
