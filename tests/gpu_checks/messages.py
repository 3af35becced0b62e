"""Send messages of 8 to 32 MB between two devices as the engine does, with 1, 8 and 32 hardware queues.

Each setting runs in processes of its own, since CUDA reads the number of queues at their start. The ranks train a
pipeline of two stages whose messages have that size, which shows hangs, wrong losses and the share of batches by way of
the host. Then a receive waits while its device multiplies matrices, which shows how many multiprocessors it holds.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload
from tests.gpu_checks.checks import Check, Settings, at_most, not_run

QUEUES = (1, 8, 32)
TOKENS = {8: 1024, 16: 2048, 32: 4096}
"""Megabytes of a message in bf16 at hidden size 4096: tokens of a slice."""
SLICES, BATCHES = 4, 40
MOST_HELD = 0.05
"""The largest share of the multiprocessors that a waiting receive may hold: four blocks, and the noise of a timing."""
LIMIT_S = 150.0


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the checks of each number of queues with a bound device, and of one without."""
    import torch

    if settings.device == "cuda" and torch.cuda.device_count() < 2:
        yield Check("messages between devices", "left out: this machine has one device")
        return
    ways = [(queues, True) for queues in QUEUES] + [(QUEUES[-1], False)]
    for queues, binds in ways[:1] if settings.dry_run else ways:
        name = f"{queues} queues, {'bound' if binds else 'no bound'} device"
        if settings.is_late(LIMIT_S / 4):
            yield not_run(name, "the part's time is over")
            continue
        found = _measured(settings, queues, binds)
        if isinstance(found, str):
            yield not_run(name, found)
            continue
        for size, row in found["sizes"].items():
            what = f"{name}, messages of {size} MB"
            yield at_most(f"{what}: loss over the loss of whole sequences", row["difference"], 1e-2)
            yield Check(f"{what}: step, ms", row["step_s"] * 1e3)
            yield at_most(f"{what}: batches by way of the host", row["host_share"] or 0.0, 3 / BATCHES)
        varied, what = found["varied"], f"{name}, {BATCHES} lengths"
        yield at_most(f"{what}: loss over the loss of whole sequences", varied["difference"], 1e-2)
        yield at_most(f"{what}: batches by way of the host", varied["host_share"] or 0.0, 20 / BATCHES)
        yield settings.timed(f"{name}: share of multiprocessors that a waiting receive holds", found["held"], MOST_HELD)


def _measured(settings: Settings, queues: int, binds: bool) -> dict[str, Any] | str:
    """Return what rank 0 has found, or why it has not."""
    from terapipe_ds.bench.ranks import spawn_ranks

    tokens = {1: 8} if settings.dry_run else TOKENS
    inherited = mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    with inherited, tempfile.TemporaryDirectory() as folder:
        try:
            spawn_ranks(_rank_main, 2, settings.device, binds, tokens, settings.dry_run, folder)
        except RuntimeError as error:
            return str(error)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def _rank_main(
    rank: int, rendezvous: str, device: str, binds: bool, tokens: dict[int, int], is_tiny: bool, folder: str
) -> None:
    from terapipe_ds.bench.ranks import finish_rank, prepare_rank

    prepare_rank(rank, 2, rendezvous, device, binds=binds)
    sizes = {size: _trained(device, count, is_tiny) for size, count in tokens.items()}
    varied = _trained(device, min(tokens.values()), is_tiny, varies=True)
    results = {"sizes": sizes, "varied": varied, "held": _held(rank, device)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(results))
    finish_rank([])


def _trained(device: str, tokens: int, is_tiny: bool, varies: bool = False) -> dict[str, Any]:
    """Train some batches, the first ones by way of the host, beside the same model on whole sequences.

    If it `varies`, each batch has another length, between the first two: libraries load kernels for many of them.
    """
    from terapipe_ds.bench.ranks import build_engine, micro_batches

    hidden, heads = (32, 2) if is_tiny else (4096, 32)
    work = Workload(2, 2, SLICES * tokens, 1, hidden, 2, heads)
    settings, gpt = (BF16_SETTINGS, {"dtype": "bfloat16"}) if device == "cuda" else (None, None)
    section = {"enabled": True, "schedule": "seq1f1b", "slices": SLICES, "granularity_tokens": 1, "stall_timeout_s": 60}
    engine = build_engine(section, work, ds_config=settings, gpt=gpt)
    whole = build_engine({**section, "slices": 1, "schedule": "1f1b"}, work, ds_config=settings, gpt=gpt)
    longest, count = work.sequence_length, 4 if is_tiny else BATCHES
    lengths = [longest, longest // 2, *range(longest - 1, 0, -1)] if varies else [longest] * count
    steps_s = []
    for length in lengths[:count]:
        data = micro_batches(replace(work, sequence_length=length), 2)
        begin_s = time.perf_counter()
        loss = float(engine.train_batch(iter(data)))
        steps_s.append(time.perf_counter() - begin_s)
        expected = float(whole.train_batch(iter(data)))
    share = engine._stage.links.host_share
    for each in (engine, whole):
        each.destroy()
    return {"difference": abs(loss / expected - 1), "step_s": statistics.median(steps_s), "host_share": share}


def _held(rank: int, device: str) -> float:
    """Return which share of its multiprocessors the second device lacks while a receive waits there."""
    import torch
    import torch.distributed as torch_dist

    from terapipe_ds.runtime.links import groups

    group = groups._wire_group()
    message, matrix = (torch.ones(size, size, device=device) for size in (1024, 4096 if device == "cuda" else 64))

    exchange = torch_dist.send if rank == 0 else torch_dist.recv
    exchange(message, 1 - rank, group=group)  # connects
    share = torch.zeros(1, device=device)
    if rank == 1:
        free_s = _product_s(matrix, device)
        waiting = torch_dist.irecv(message, 0, group=group)
        share += 1 - free_s / _product_s(matrix, device)
        waiting.wait()
        torch_dist.send(share, 0, group=group)
    else:
        time.sleep(2.0)  # the receive waits during this sleep
        torch_dist.send(message, 1, group=group)
        torch_dist.recv(share, 1, group=group)
    return max(0.0, float(share))


def _product_s(matrix: Any, device: str) -> float:
    """Return the median time of a product; a wait for the whole device would wait for the receive."""
    import torch

    times = []
    for _ in range(10):
        begin_s = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
