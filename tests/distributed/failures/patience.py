"""Let healthy ranks pause at any place, and strangers speak to every port."""

import ctypes
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from torch import distributed

from tests.distributed.failures.job import Batch, Job, batches, build_engine

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

    def data(step: int, seconds: float) -> Iterator[Batch]:
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
