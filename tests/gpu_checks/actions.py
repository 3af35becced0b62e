"""Measure steps of one stage in more and more slices, beside the stock engine and beside what is predicted."""

import contextlib
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from terapipe_ds.bench.ranks import BF16_SETTINGS, Workload
from terapipe_ds.schedule.action import Action
from tests.gpu_checks.checks import Check, Settings, not_run

SIZES = {  # stages, micro-batches, tokens, rows, hidden, layers, heads
    "hidden 4096": Workload(1, 1, 8192, 1, 4096, 4, 32),
    "hidden 2048": Workload(1, 1, 8192, 1, 2048, 4, 16),
    "launch-bound": Workload(1, 1, 4096, 1, 256, 4, 4),
}
TINY = {"tiny": Workload(1, 1, 256, 1, 32, 1, 1)}
SLICES = (1, 2, 4, 8, 16, 32, 64)
MOST_OVER_STOCK = 1.02
"""The limit for the time of one slice in the stock order, over the stock engine's."""
PREDICTED = 0.10
"""The largest relative error of a prediction that is allowed."""
_PAIRS = 7
MOST_WRITTEN = 1.5
"""Most bytes of adds, casts and zeros of 16 slices, over one slice's; a pass per slice writes 16 times as many."""
_ADDS = ("aten::add_", "aten::copy_", "aten::zero_", "aten::fill_")


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the checks of every size, each measured in a process of its own."""
    from terapipe_ds.bench.ranks import spawn_ranks

    for name, work in (TINY if settings.dry_run else SIZES).items():
        if settings.is_late(settings.limit_s / 5):
            yield not_run(name, "the part's time is over")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn_ranks(_rank_main, 1, work, settings.device, SLICES[:3] if settings.dry_run else SLICES, folder)
            except RuntimeError as error:
                yield not_run(name, str(error))
                continue
            found = json.loads(Path(folder, "found.json").read_text())
        yield from _judged(settings, name, found)


def _judged(settings: Settings, name: str, found: dict[str, Any]) -> Iterator[Check]:
    yield Check(f"{name}: stock step, ms", found["stock_s"] * 1e3)
    yield settings.timed(f"{name}: one slice in the stock order over stock", found["over_stock"], MOST_OVER_STOCK)
    for row in found["rows"]:
        of_slice = row["step_s"] / row["slices"]
        yield Check(f"{name}, {row['slices']} slices: step per slice, ms", of_slice * 1e3)
        off = abs(row["predicted_s"] / row["step_s"] - 1)
        yield settings.timed(f"{name}, {row['slices']} slices: prediction is off by", off, PREDICTED)
    written = {row["slices"]: row["written_bytes"] for row in found["rows"]}
    if 16 in written and written[1]:
        yield settings.timed(f"{name}: 16 slices write into weights over one", written[16] / written[1], MOST_WRITTEN)


def _rank_main(rank: int, rendezvous: str, work: Workload, device: str, slices: tuple[int, ...], folder: str) -> None:
    from terapipe_ds.bench.ranks import build_engine, micro_batches, prepare_rank

    prepare_rank(rank, 1, rendezvous, device)
    from terapipe_ds.bench.drivers.base import one_attention
    from terapipe_ds.bench.ranks import finish_rank, gpt_config

    settings, gpt = (BF16_SETTINGS, {"dtype": "bfloat16"}) if device == "cuda" else (None, None)
    config, data = gpt_config(work, gpt), micro_batches(work, 1)
    granularity = max(1, work.sequence_length // max(slices))
    section = {"enabled": True, "schedule": "seq1f1b", "slices": "auto", "planner": {"cache_dir": folder}}
    section["granularity_tokens"] = granularity
    with one_attention(device, config.torch_dtype, config.head_dim):
        ours = build_engine(section, work, ds_config=settings, gpt=gpt)
        stock = build_engine(None, work, ds_config=settings, gpt=gpt)
        _step(ours, data)  # slices are measured
        found = _measured(ours, stock, data, work, slices, Path(folder))
        Path(folder, "found.json").write_text(json.dumps(found))
        finish_rank([ours, stock])


def _measured(
    ours: Any, stock: Any, data: Any, work: Workload, slices: tuple[int, ...], folder: Path
) -> dict[str, Any]:
    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import simulate

    (path,) = folder.glob("profile-*.json")
    costs = CostModel.from_profile(Profile.load(path))
    ours.use_slice_plan(SlicePlan((work.sequence_length,)), "1f1b")
    pairs = [(_step(stock, data), _step(ours, data)) for _ in range(2 + _PAIRS)][2:]
    rows = []
    for count in slices:
        plan = SlicePlan.equal(work.sequence_length, count)
        ours.use_slice_plan(plan, "seq1f1b")
        with closing_apart():
            steps = [(_step(ours, data), ours.closing_s) for _ in range(2 + _PAIRS)][2:]
        step_s, closing_s = (statistics.median(column) for column in zip(*steps, strict=True))
        makespan_s = float(simulate(build("seq1f1b", 1, 1, count), plan, costs).makespan_s)
        row = {"slices": count, "step_s": step_s, "predicted_s": makespan_s + closing_s}
        rows.append(row | {"written_bytes": _written(lambda: _step(ours, data), work.hidden**2)})
    stock_s, over_stock = statistics.median(s for s, _ in pairs), statistics.median(o / s for s, o in pairs)
    return {"stock_s": stock_s, "over_stock": over_stock, "rows": rows}


@contextlib.contextmanager
def closing_apart() -> Iterator[None]:
    """Wait for the device before and after the end of a batch, so that it is timed apart from the slices."""
    from deepspeed.accelerator import get_accelerator

    from terapipe_ds.runtime.engine.batches import CLOSING
    from terapipe_ds.runtime.engine.engine import TeraPipeEngine

    real, actions = TeraPipeEngine._exec_action, TeraPipeEngine._ACTIONS

    def apart(engine: TeraPipeEngine, action: Action) -> None:
        if action.kind in CLOSING:
            get_accelerator().synchronize()
        real(engine, action)

    def waited(execute: Callable[[Any, Action], None], engine: TeraPipeEngine, action: Action) -> None:
        execute(engine, action)
        get_accelerator().synchronize()

    closing = {kind: functools.partial(waited, actions[kind]) for kind in CLOSING}
    with mock.patch.object(TeraPipeEngine, "_exec_action", apart), mock.patch.dict(actions, closing):
        yield


def _step(engine: Any, data: Any) -> float:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    begin_s = time.perf_counter()
    engine.train_batch(iter(data))
    get_accelerator().synchronize()
    return time.perf_counter() - begin_s


def _written(step: Callable[[], object], least: int) -> int:
    """Return the bytes that a step adds, casts or clears in tensors of more numbers than `least`, by torch's profiler.

    These are the large weights and their sums, except where the product itself adds to them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    events = [(each.name, (each.input_shapes or [[]])[0]) for each in profiler.events()]
    sizes = [math.prod(shape) for name, shape in events if name in _ADDS and shape and isinstance(shape[0], int)]
    return 4 * sum(size for size in sizes if size > least)
