"""Prepare a rank before ``deepspeed.init_distributed``: its device, and on a CPU its threads and cores."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec

import deepspeed
import torch
from command_line import end_with
from deepspeed.accelerator import get_accelerator


def prepare_rank(pin: bool = True) -> None:
    """Choose this rank's device: the launcher's ``LOCAL_RANK``, which torchrun gives by the environment alone.

    On a CPU settle threads and cores, and leave out an operator that DeepSpeed would compile first.

    Args:
        pin: bind a CPU rank to cores of its own, one per thread, if the machine has enough for all local ranks.
    """
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        if (of_mpirun := os.environ.get(f"OMPI_COMM_WORLD_{name}")) is not None:
            os.environ.setdefault(name, of_mpirun)
    if "LOCAL_RANK" not in os.environ and find_spec("mpi4py") is None:  # which DeepSpeed would ask for the ranks
        end_with(f"no launcher started this process: deepspeed --num_gpus 2 {shlex.join(sys.argv)}")
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if get_accelerator().device_name() != "cpu":
        return
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    torch.set_num_threads(threads)
    if pin:
        _pin_to_cores(threads)
    # DeepSpeed 0.19.8 compiles this shared-memory all-reduce inside init_distributed, for a minute, and a
    # rank that is killed meanwhile leaves a lock at which every later start waits for ever. torch's gloo does
    # the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _pin_to_cores(threads: int) -> None:
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", 1))  # of DeepSpeed, of torchrun
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= local_size * threads:
        os.sched_setaffinity(0, cores[local_rank * threads : (local_rank + 1) * threads])
