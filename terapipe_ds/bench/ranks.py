"""Start ranks pinned to cores, build their models, describe the machine: benchmarks of whole steps share this code."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from terapipe_ds.files.atomic import write_text

_GRACE_S = 1.0  # from the first rank that fails to the end of all

USUAL_SETTINGS: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
    # DeepSpeed clips at 1.0 by default, and its stock norm counts the first stage only: the losses would differ
    "gradient_clipping": 0.0,
}
BF16_SETTINGS: dict[str, Any] = {
    **USUAL_SETTINGS,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}
"""The usual ones of accelerators, whose fused attention takes no fp32. DeepSpeed sums the gradients of bf16 weights in
fp32 under ZeRO 1 only; of one replica, as here, that parts nothing."""


@dataclass(frozen=True)
class Workload:
    """Describe the model and batch that every system trains."""

    stages: int
    accumulation: int
    sequence_length: int
    micro_batch: int
    hidden: int
    layers: int
    heads: int


class RankError(RuntimeError):
    """Report that ranks failed, with these exit codes; `first` is the first failed rank that was seen."""

    def __init__(self, first: int, exit_codes: dict[int, int]) -> None:
        super().__init__(f"rank {first} ended with exit code {exit_codes[first]}; see above")
        self.exit_codes = exit_codes


def spawn_ranks(target: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Run `target(rank, rendezvous_file, *arguments)` in a process per rank, and wait for all.

    Raises `RankError` when a rank fails, after ending the others; its traceback is on stderr. A rank that raises ends
    at once, whatever threads and messages it has: others may be waiting for it.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shared = (str(Path(folder) / "store"), *arguments)
        ranks = [context.Process(target=_end_at_once, args=(target, rank, *shared)) for rank in range(num_ranks)]
        # Ctrl-C ends this process, which ends the ranks: otherwise each would print a traceback of its own
        resource_tracker.ensure_running()  # now, because its start unblocks the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in ranks:
                process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            # in this order: if the last rank ended in between, there would be no rank to wait for
            while (running := [p.sentinel for p in ranks if p.exitcode is None]) and not any(p.exitcode for p in ranks):
                connection.wait(running)
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            if failed:
                raise RankError(failed[0], _exit_codes(ranks))
        finally:
            for process in (each for each in ranks if each.pid is not None):
                process.kill()
                process.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # also if a rank could not be started


def _exit_codes(ranks: Sequence[BaseProcess]) -> dict[int, int]:
    """Return the exit codes of failed ranks, after a moment in which others may fail with them."""
    deadline_s = time.monotonic() + _GRACE_S
    for process in ranks:
        process.join(max(0.0, deadline_s - time.monotonic()))
    return {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}


def _end_at_once(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(*arguments)
    except Exception:  # the interpreter's own end waits for threads, and torch's for messages
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _end_with_parent() -> None:
    """End this rank once the command is gone: SIGTERM, SIGHUP and SIGKILL leave it no time to end its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by spawn_ranks"
    parent.join()
    os._exit(1)


class Position:
    """Keep a note of this rank's current work in a file that outlives the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"position{rank}.json"
        self._what = ""

    def at(self, what: str = "") -> None:
        """Note the work that begins: of one system, or (no argument) for all."""
        self._what = what
        self._write(what=what)

    def failed(self, error: BaseException) -> None:
        """Write down why this rank ends, and when."""
        text = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self._write(what=self._what, reason=reason, time_s=time.monotonic())  # a clock that all processes share

    def _write(self, **noted: str | float) -> None:
        write_text(self._path, json.dumps(noted))  # whole: this rank may be killed in any line

    def read(self) -> dict[str, Any]:
        """Return the last note, by this rank or by one that has ended."""
        return dict(json.loads(self._path.read_text(encoding="utf-8"))) if self._path.exists() else {}


def problem_of_any_rank(own: str | None, step: str, patience_s: float = 60.0) -> str | None:
    """Return the problem of the first rank that has one with a joint step, or None. A collective.

    A rank that failed waits `patience_s` for others. It raises `RuntimeError` if they do not come, because they wait
    for it in a collective of the step, where no other collective would reach them.
    """
    import torch.distributed as torch_dist

    from terapipe_ds.runtime.agreement import meet

    rank = torch_dist.get_rank()

    def late(waited_s: float, missing: Callable[[], list[int]]) -> None:
        if own and waited_s > patience_s and missing():
            why = f"and may wait for rank {rank}, which failed: {own}"
            raise RuntimeError(f"{step}: others have not come in {patience_s:g} s, {why}")

    problems = meet(f"bench/{step}", range(torch_dist.get_world_size()), rank, own or "", late)
    return next(filter(None, problems.values()), None)


def keep_memory() -> None:
    """Have glibc keep the memory that later started ranks free.

    Otherwise glibc returns large blocks to the system and faults them in again page by page, which takes up to a sixth
    of a step on a CPU. Allocators of accelerators keep memory anyway.
    """
    os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**40))


def prepare_rank(
    rank: int,
    stages: int,
    rendezvous: str,
    device: str = "cpu",
    share_device: bool = False,  # all are on the first device and talk over gloo, by way of the host
    binds: bool = True,  # bind the group of all ranks to the device, as DeepSpeed's launcher does
    pin: bool = True,
) -> None:
    """Pin this process to its core or device, with one thread, and meet the others. Call it before importing torch."""
    index = 0 if share_device else rank
    os.environ.update(
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(stages)),
        RANK=str(rank),
        LOCAL_RANK=str(index),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR=device,
        DEEPSPEED_LOG_LEVEL="error",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    if device == "cpu" and pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    logging.getLogger("terapipe_ds").setLevel(logging.WARNING)  # plans are in the table
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process; the parent prints
    import deepspeed
    import torch
    import torch.distributed as torch_dist
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared between processes and would outlive this one
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at start, for a minute
    over_gloo = device == "cpu" or share_device
    if device != "cpu":
        torch.cuda.set_device(index)
    share_gloo_thread()
    backend = "gloo" if over_gloo else "cpu:gloo,cuda:nccl"
    options: dict[str, Any] = {"device_id": torch.device(device, index)} if binds and not over_gloo else {}
    meeting: dict[str, Any] = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": stages}
    torch_dist.init_process_group(backend, **meeting, **options)
    deepspeed.init_distributed("gloo" if over_gloo else "nccl")


def share_gloo_thread() -> None:
    """Have all gloo groups of this process share one thread that moves their messages, instead of one thread each.

    Such a thread wakes a hundred times a second whether there is a message or not. An engine has ten groups, so the
    idle engines of a benchmark would take 5 to 8 % of the core from the one that works. If this torch cannot share,
    each group has its own thread.
    """
    from torch.distributed import distributed_c10d

    plain: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not hasattr(plain, "_Options") or not hasattr(plain, "create_default_device"):
        return
    device = plain.create_default_device()

    class SharedGloo(plain):  # type: ignore[misc]
        """A class, because torch asks groups for it."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
            options = plain._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            for name, value in others.items():  # which torch names since 2.15
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedGloo  # type: ignore[misc]


def progress_bar(rank: int, total: int, what: str) -> Any:
    """Return a progress bar, shown by rank 0 on a terminal; call `update()` after each of `total`."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, disable=None if rank == 0 else True, leave=False)


def finish_rank(engines: Sequence[Any]) -> None:
    """End the process once all ranks are done."""
    import torch.distributed as torch_dist

    torch_dist.barrier()
    for engine in engines:
        engine.destroy()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown


def gpt_config(work: Workload, gpt: dict[str, Any] | None = None) -> Any:
    """Return the model of a workload; `gpt`: further fields of `GPTConfig`, beyond the workload's."""
    from terapipe_ds.models.gpt import GPTConfig

    sizes = {"hidden_size": work.hidden, "num_layers": work.layers, "num_heads": work.heads}
    return GPTConfig(**{"vocab_size": 256, "max_sequence_length": work.sequence_length, **sizes, **(gpt or {})})


def build_engine(
    section: dict[str, Any] | None,
    work: Workload,
    *,
    ds_config: dict[str, Any] | None = None,  # in place of the usual settings, but for batch sizes and the section
    gpt: dict[str, Any] | None = None,  # further fields of `GPTConfig`, beyond the workload's
    dualpipe: bool = False,  # DeepSpeed's DualPipeV, which needs two micro-batches per stage
) -> Any:
    """Return DeepSpeed's own engine (`section` None) or ours with a `terapipe` section."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    import terapipe_ds
    from terapipe_ds.models.gpt import gpt_layers, gpt_loss

    layers = gpt_layers(gpt_config(work, gpt))
    kind = DualPipeVModule if dualpipe else PipelineModule
    module = kind(layers, num_stages=work.stages, loss_fn=gpt_loss, partition_method="parameters")
    given = USUAL_SETTINGS if ds_config is None else ds_config
    settings = {key: value for key, value in given.items() if key not in ("train_batch_size", "terapipe")}
    sizes = {"train_micro_batch_size_per_gpu": work.micro_batch, "gradient_accumulation_steps": work.accumulation}
    settings |= {**sizes, "steps_per_print": 10**9} | ({} if section is None else {"terapipe": section})
    initialize = deepspeed.initialize if section is None else terapipe_ds.initialize
    return initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def micro_batches(work: Workload, count: int, vocab_size: int = 256) -> list[tuple[Any, Any]]:
    """Return different random tokens and the tokens that follow: every system trains on them in every step."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (work.micro_batch, work.sequence_length + 1)
    drawn = [torch.randint(0, vocab_size, shape, generator=generator) for _ in range(count)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]


def machine() -> dict[str, Any]:
    """Return the facts about this machine that belong with every figure measured on it."""
    from terapipe_ds.compat import installed_versions
    from terapipe_ds.runtime.profiling.key import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "versions": installed_versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
