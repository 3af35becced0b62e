"""What one rank process does: set the stage for DeepSpeed on gloo, then run job after job.

The parent (`harness.RankPool`) talks to it through one duplex pipe. Messages are pickled bytes: a job is
`(function, kwargs)`, the answer `("ok", result)` or `("raised", traceback text)`. Results should hold numpy
arrays or plain Python, never tensors: the parent does not import torch.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 120.0


def rank_environment(rank: int, world_size: int) -> dict[str, str]:
    """What a launcher would set. The address is for DeepSpeed's check alone: ranks meet in a file."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size)}
    others = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return ranks | others


def rank_main(connection: Connection, rank: int, world_size: int, rendezvous: str, log_path: str) -> None:
    """Entry point of a rank process; returns when the parent says so or goes away."""
    _redirect_output(log_path)
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


def _redirect_output(log_path: str) -> None:
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
    share_gloo_thread()  # each group has one of its own otherwise, which wakes a hundred times a second
    torch.distributed.init_process_group(
        backend="gloo",
        store=_store(rank, rendezvous),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    gc.freeze()  # what is here now stays: the collection after each job need not look at it


def _store(rank: int, rendezvous: str) -> Any:
    """Where ranks meet, in each of the ten groups of an engine. Rank 0 serves it on a free port, which is written to
    the file `rendezvous`. (A store in a file is polled: each group would wait for it.)
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
