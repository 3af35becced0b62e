"""Count by torch's profiler how often the optimizer's sums are passed over in a step of 1, 4 and 16 slices.

In bf16 with ZeRO-1 each weight of a linear layer adds to its fp32 sum in the product itself. So kernels that add or
cast gradients must not grow with the slices, except for norms, biases and embeddings.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload
from tests.gpu_checks.checks import Check, Settings, not_run

SLICES = (1, 4, 16)
WORK, TINY = Workload(1, 1, 8192, 1, 2048, 4, 16), Workload(1, 1, 64, 1, 32, 1, 1)
_ADDS = ("aten::add_", "aten::_foreach_add_", "aten::copy_", "aten::zero_", "aten::fill_")
MOST_GROWTH = 1.5
"""How many times the bytes of one slice's step those of 16 slices may be; one pass per slice would be 16 times."""


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the bytes for each number of slices, and their growth."""
    from terapipe_ds.bench.ranks import spawn_ranks

    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn_ranks(_rank_main, 1, settings.device, settings.dry_run, folder)
        except RuntimeError as error:
            yield not_run("bytes beside the layers", str(error))
            return
        found = json.loads(Path(folder, "found.json").read_text())
    for slices, num_bytes in found.items():
        yield Check(f"{slices} slices: bytes that adds, casts and zeros write, per parameter", num_bytes)
    growth = found[str(SLICES[-1])] / max(found[str(SLICES[0])], 1e-9)
    yield settings.timed(f"{SLICES[-1]} slices over one: bytes", growth, MOST_GROWTH)


def _rank_main(rank: int, rendezvous: str, device: str, is_tiny: bool, folder: str) -> None:
    from terapipe_ds.bench.ranks import build_engine, finish_rank, micro_batches, prepare_rank

    prepare_rank(rank, 1, rendezvous, device)
    from terapipe_ds.plan import SlicePlan

    work = TINY if is_tiny else WORK
    section = {"enabled": True, "schedule": "seq1f1b", "slices": 1, "granularity_tokens": 1}
    engine = build_engine(section, work, ds_config=BF16_SETTINGS, gpt={"dtype": "bfloat16"})
    data, found = micro_batches(work, 1), {}
    count = sum(p.numel() for p in engine.module.parameters())
    for slices in SLICES:
        engine.use_slice_plan(SlicePlan.equal(work.sequence_length, slices), "seq1f1b")
        engine.train_batch(iter(data))
        found[slices] = _written(lambda: engine.train_batch(iter(data)), least=work.hidden**2) / count
    Path(folder, "found.json").write_text(json.dumps(found))
    finish_rank([engine])


def _written(step: Any, least: int) -> float:
    """Return the bytes of a step's adds, casts and zeros of at least so many numbers, by the profiler's shapes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    total = 0
    for event in profiler.events():
        sizes = [torch.Size(shape).numel() for shape in event.input_shapes or () if shape and isinstance(shape[0], int)]
        if event.name in _ADDS and sizes and sizes[0] >= least:
            total += 4 * sizes[0]
    return float(total)
