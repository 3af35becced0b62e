"""Start several gloo ranks on this machine once, and use them for many jobs.

    pool = rank_pool(4)
    results = pool.run(train_case, case=case)     # train_case(case=case) on each rank; results[rank]

A job is an importable function with picklable arguments. The first rank that raises, dies or does not answer
in time ends the job: the other ranks are killed (by process id), `RankFailure` shows what each rank said, and
the next `run` starts new ranks. Ranks are forked from a server that has imported torch and DeepSpeed once, so
a start is cheap. Results hold numpy arrays or plain Python, never tensors: the parent need not import torch.
"""

import atexit
import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection as mp_connection
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 120.0
GRACE_S = 1.0  # after the first failure: time for the other ranks to say why they fail too
LOG_TAIL_CHARS = 8000

# Modules that each rank would otherwise import itself, for a second: see there.
PRELOADED = ["tests.distributed.preloaded"]
# Inherited by the server, thus by every rank. One thread each: a fork with OpenMP threads alive would hang.
SERVER_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # and no compile workers
    "LOCAL_RANK": "0",
}


@dataclass
class RankReport:
    """Describe how a job ended on a rank: `status` is ok | raised | died | timed out | stopped (for another rank)."""

    rank: int
    status: str
    detail: str = ""
    output: str = ""
    ended_s: float = math.inf  # on the wall clock, when it answered or died

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.status}"
        for title, body in (("", self.detail), ("output", self.output)):
            if body.strip():
                text += f"\n{title and f'-- {title}:'}\n" + textwrap.indent(body.strip(), "    ")
        return text


class RankFailure(AssertionError):
    """Report a failed job; `.first` is the report of the rank that failed first, `.reports` has one per rank."""

    def __init__(self, job: str, first: RankReport, reports: list[RankReport]) -> None:
        self.first = first
        self.reports = reports
        super().__init__(
            f"{job} on {len(reports)} ranks: rank {first.rank} {first.status} first\n"
            + "\n".join(str(report) for report in reports)
        )


class RankPool:
    """Hold `world_size` processes in one gloo group, started at the first `run` and again after a failure."""

    def __init__(self, world_size: int, timeout_s: float = JOB_TIMEOUT_S) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._folder: Path | None = None
        self._processes: list[ForkServerProcess] = []
        self._connections: list[mp_connection.Connection] = []
        self._log_offsets: list[int] = []
        self._ended_s: dict[int, float] = {}

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `function(**kwargs)` on every rank; return results in the order of ranks. Raises `RankFailure`."""
        self.start()
        message = pickle.dumps((function, kwargs))
        self._log_offsets, self._ended_s = [path.stat().st_size for path in self._log_paths()], {}
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(function.__qualname__, self.timeout_s if timeout_s is None else timeout_s)

    def start(self) -> None:
        """Start the ranks and wait until they have met; do nothing if they run already."""
        if self.is_running:
            return
        ensure_server()
        context = multiprocessing.get_context("forkserver")
        self._folder = Path(tempfile.mkdtemp(prefix="terapipe-ranks-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe(duplex=True)
            log_path = self._folder / f"rank{rank}.log"
            log_path.touch()
            process = context.Process(
                target=rank_main,
                args=(theirs, rank, self.world_size, str(self._folder / "rendezvous"), str(log_path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._log_offsets = [0] * self.world_size
        self._collect("start", START_TIMEOUT_S)

    def close(self) -> None:
        """End the ranks, the friendly way first, and remove their folder."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._discard()

    def _collect(self, job: str, timeout_s: float) -> list[Any]:
        replies: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(replies) < self.world_size:
            arrived = self._next_replies(replies, deadline)
            if not arrived:
                raise self._failure(job, replies, f"no answer within {timeout_s:g} s")
            replies.update(arrived)
            if any(status != "ok" for status, _ in arrived.values()):
                raise self._failure(job, replies, "")
        return [replies[rank][1] for rank in range(self.world_size)]

    def _missing(self, replies: dict[int, tuple[str, Any]]) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in replies]

    def _next_replies(self, known: dict[int, tuple[str, Any]], deadline: float) -> dict[int, tuple[str, Any]]:
        """Return the next answers and deaths, by rank; empty when the time is over."""
        pending = self._missing(known)
        waitables: dict[Any, int] = {self._connections[rank]: rank for rank in pending}
        waitables.update({self._processes[rank].sentinel: rank for rank in pending})
        ready = mp_connection.wait(list(waitables), timeout=max(0.0, deadline - time.monotonic()))
        ranks = sorted({waitables[item] for item in ready})
        self._ended_s |= dict.fromkeys(ranks, time.time())
        return {rank: self._reply_of(rank) for rank in ranks}

    def _is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped the rank, if /proc tells: such a rank never answers."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _reply_of(self, rank: int) -> tuple[str, Any]:
        # A rank may answer and then die: its answer counts.
        with contextlib.suppress(EOFError, OSError):
            if self._connections[rank].poll():
                return pickle.loads(self._connections[rank].recv_bytes())
        self._processes[rank].join(GRACE_S)
        return "died", f"exit code {self._processes[rank].exitcode}"

    def _failure(self, job: str, replies: dict[int, tuple[str, Any]], timeout_text: str) -> RankFailure:
        failed = [rank for rank, (status, _) in replies.items() if status != "ok"]
        if failed:
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and not all(map(self._is_stopped, self._missing(replies))):
                replies = {**replies, **self._next_replies(replies, min(deadline, time.monotonic() + 0.1))}
        missing = self._missing(replies)
        self._dump_stacks(missing)
        self._kill()
        reports = []
        for rank, output in enumerate(self._outputs()):
            status, detail = replies.get(rank, ("stopped", "") if failed else ("timed out", timeout_text))
            detail, ended_s = detail if status != "ok" else "", self._ended_s.get(rank, math.inf)
            reports.append(RankReport(rank, status, detail, output, ended_s))
        first = failed[0] if failed else missing[0]
        self._discard()
        return RankFailure(job, reports[first], reports)

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Make hanging ranks write their stacks into their log."""
        for pid in (self.pids[rank] for rank in ranks if self._processes[rank].is_alive()):
            os.kill(pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.2)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _discard(self) -> None:
        self._kill()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._processes, self._connections = None, [], []

    def _log_paths(self) -> list[Path]:
        assert self._folder is not None
        return [self._folder / f"rank{rank}.log" for rank in range(self.world_size)]

    def _outputs(self) -> list[str]:
        texts = []
        for path, offset in zip(self._log_paths(), self._log_offsets, strict=True):
            text = path.read_bytes()[offset:].decode(errors="replace")
            texts.append(text if len(text) <= LOG_TAIL_CHARS else "...\n" + text[-LOG_TAIL_CHARS:])
        return texts


class PoolCache:
    """Hold pools by world size; close the least recently used ones before more than `max_ranks` are alive."""

    def __init__(self, max_ranks: int = 7) -> None:
        self.max_ranks = max_ranks
        self._pools: dict[int, RankPool] = {}  # in the order of their last use

    def get(self, world_size: int) -> RankPool:
        pool = self._pools.pop(world_size, None) or RankPool(world_size)
        for other in list(self._pools.values()):
            alive = sum(each.world_size for each in self._pools.values() if each.is_running)
            if alive + world_size > self.max_ranks:
                other.close()
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


_pools = PoolCache()
atexit.register(_pools.close)


def rank_pool(world_size: int) -> RankPool:
    """Return the pool that all test modules of this process share. It is closed when the process ends."""
    return _pools.get(world_size)


def ensure_server() -> None:
    """Start the fork server, with torch and DeepSpeed imported. A second call does nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        forkserver.ensure_running()


# -- the process of a rank --------------------------------------------------------------------------------------------
COLLECTIVE_TIMEOUT_S = 120.0


def rank_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment of a launcher. The address only serves DeepSpeed's check: ranks meet in a file."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size)}
    others = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return ranks | others


def rank_main(connection: Connection, rank: int, world_size: int, rendezvous: str, log_path: str) -> None:
    """Run a rank process; return when the parent says so or goes away."""
    redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks where a rank hangs
    os.environ.update(rank_environment(rank, world_size))
    try:
        _join(rank, world_size, rendezvous)
        connection.send_bytes(pickle.dumps(("ok", os.getpid())))
    except BaseException:
        connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
        return
    _serve(connection)
    # Daemon threads of gloo or of an engine must not get a say in how long the exit takes.
    sys.stdout.flush()
    os._exit(0)


def redirect_output(log_path: str) -> None:
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _join(rank: int, world_size: int, rendezvous: str) -> None:
    import torch

    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import logger

    from terapipe_ds.bench.ranks import share_gloo_thread

    logger.setLevel("ERROR")
    # DeepSpeed would compile this operator here, for a minute and behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU without instructions for it. torch computes it on every CPU, only slowly, and
    # these ranks stand in for devices that have it.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    share_gloo_thread()  # otherwise each group has a thread of its own, which wakes a hundred times a second
    torch.distributed.init_process_group(
        backend="gloo",
        store=_store(rank, rendezvous),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    gc.freeze()  # the present objects stay: the collection after each job need not look at them


def _store(rank: int, rendezvous: str) -> Any:
    """Return the store where ranks meet, in each of the ten groups of an engine. Rank 0 serves it on a free port, which
    it writes to the file `rendezvous`. (A store in a file is polled: each group would wait for it.)
    """
    import torch

    path, options = Path(rendezvous), {"wait_for_workers": False, "timeout": timedelta(seconds=COLLECTIVE_TIMEOUT_S)}
    if rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, **options)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, "rank 0 serves no store"
        time.sleep(0.002)
    return torch.distributed.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, **options)


def _serve(connection: Connection) -> None:
    from torch import distributed

    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if message is None:
            return
        function, kwargs = message
        groups = _process_groups()
        try:
            reply = pickle.dumps(("ok", function(**kwargs)))
        except BaseException:
            traceback.print_exc()
            connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
            return  # the parent starts new ranks: what a failed job has left in this one is unknown
        connection.send_bytes(reply)
        # After the answer, so that a rank which waits here for one that hangs does not look like it hangs
        # itself.
        gc.collect()  # an engine is a ring of references
        distributed.barrier()  # no rank may close a group that another still uses
        _destroy_process_groups(except_for=groups)


def _process_groups() -> list[object]:
    """Return the groups in the order in which they were made, which is one order on all ranks."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def _destroy_process_groups(except_for: list[object]) -> None:
    """Close the groups that a job has made. A PipelineModule makes about ten and closes none of them: a gloo
    group holds a thread and sockets, and a run of hundreds of engines in one process would use them up.
    """
    from deepspeed.utils import groups as deepspeed_groups
    from torch import distributed

    kept = [value for name, value in vars(deepspeed_groups).items() if name.isupper() or name.startswith("_")]
    for group in _process_groups():
        if not any(group is other for other in (*except_for, *kept)):
            distributed.destroy_process_group(group)
