"""Test that a run's memory does not grow with its steps: resident set, keys and values, tensors, Python objects."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from typing import Any, NamedTuple

import pytest
import torch

from terapipe_ds.plan import SlicePlan
from tests.conftest import FULL
from tests.distributed.engines import batches, build, config, gpt_layers, unchecked
from tests.distributed.harness import RankFailure, rank_pool

CASES = tuple((length, count) for length in (9, 16, 23) for count in (1, 2, 4))
CYCLE = 2 * len(CASES)
"""Steps after which lengths, plans, schedules and evaluations come round. What the last step left (its batch, its
outputs) is as large as its lengths ask for, so that only looks that are whole cycles apart can be compared."""
WARM_UP = CYCLE  # buffers, schedules and allocator have what they need
ONE_SCALAR = {"tensors": 1, "tensor_bytes": 8}
"""What a look may find above another one: now and then one scalar of the last step is let go of a moment later. What
grows with steps, or only with cycles, is more."""
CLEAR_TYPE_CACHE = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Python's cache of attributes (4,096 places) holds on to every name that C code spells out: it fills for hundreds of
steps, and has nothing to do with what a run holds. Its name is the former from Python 3.13 on."""
LEAKS = ("tensor", "object", "bytes", "store")


@dataclasses.dataclass(frozen=True)
class Held:
    """Hold the sizes of a rank's memory between two steps."""

    resident_bytes: int
    tensors: int
    tensor_bytes: int
    blocks: int  # of Python's allocator: objects of every kind
    store_live_bytes: int
    store_reserved_bytes: int

    @classmethod
    def now(cls, engine: Any) -> Held:
        tensors, tensor_bytes = min(_count_tensors() for _ in range(3))  # see ONE_SCALAR
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        store = engine.slice_store
        CLEAR_TYPE_CACHE()
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            tensors,
            tensor_bytes,
            sys.getallocatedblocks(),
            store.pool.live_bytes,
            store.pool.reserved_bytes,
        )


def _count_tensors() -> tuple[int, int]:
    """Return the number of tensors, and the bytes of their storages."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class Work(NamedTuple):
    """Hold everything that decides the sizes of a step's tensors."""

    length: int
    num_slices: int
    schedule: str
    evaluates: bool
    returns_logits: bool

    @classmethod
    def of_step(cls, step: int) -> Work:
        schedule, evaluates = "terapipe" if step % 2 else "seq1f1b", step % 3 == 0
        return cls(*CASES[step % len(CASES)], schedule, evaluates, evaluates and step % 2 == 0)


def look_steps(steps: int) -> tuple[int, int, int]:
    """Return the steps before which to measure: after the warm-up, in the middle, at the end."""
    return WARM_UP, WARM_UP + steps // 2, WARM_UP + steps


def train_and_look(steps: int, leak: str | None = None) -> tuple[Held, Held, Held]:
    """Return the memory of a rank after the warm-up, in the middle and at the end."""
    engine = build(gpt_layers(), unchecked(), **config())
    looks = []
    leaked: list[Any] = []
    for step in range(WARM_UP + steps):
        if step in look_steps(steps):
            looks.append(Held.now(engine))
        work = Work.of_step(step)
        engine.use_slice_plan(SlicePlan.equal(work.length, work.num_slices), work.schedule)
        (batch,) = batches(1, first_seed=step % 100, length=work.length)
        engine.train_batch(iter(batch))
        if work.evaluates:
            engine.eval_batch(iter(batch), return_logits=work.returns_logits)
        if leak is not None and step >= WARM_UP:
            leaked.append(_leak(leak, engine, step))
    looks.append(Held.now(engine))
    engine.slice_store.reset()
    engine.destroy()
    return looks[0], looks[1], looks[2]


def _leak(kind: str, engine: Any, step: int) -> Any:
    """Return an object that a mistake would leave behind at each step."""
    if kind == "tensor":
        return torch.zeros(4)
    if kind == "object":
        return {"step": [step]}, {"more": [step]}
    if kind == "bytes":
        return bytearray(os.urandom(1 << 17))  # seen by nobody but the operating system
    pool = engine.slice_store.pool
    return pool.take((4,), torch.float64, torch.device("cpu"))


def check(looks: tuple[Held, Held, Held], steps: int) -> None:
    """Raise if something grows. The same lengths come round, so that counts must be the same except for a scalar;
    Python's and the system's allocators may grow by their own caches and fragments."""
    start, middle, end = looks
    for name in ("tensors", "tensor_bytes", "store_live_bytes", "store_reserved_bytes"):
        assert getattr(end, name) <= getattr(start, name) + ONE_SCALAR.get(name, 0), f"{name} grow: {looks}"
    assert end.store_live_bytes == 0, looks
    assert end.blocks - middle.blocks < 50 + steps // 2, f"Python objects grow: {looks}"
    assert end.resident_bytes - start.resident_bytes < (2 << 20) + 8192 * steps, f"the resident set grows: {looks}"


STEPS = (28 if FULL else 2) * CYCLE  # 504, 36
LEAK_STEPS = 2 * CYCLE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
class TestMemoryGrowth:
    def test_nothing_grows(self) -> None:
        for looks in rank_pool(2).run(train_and_look, timeout_s=600 if FULL else None, steps=STEPS):
            check(looks, STEPS)

    @pytest.mark.parametrize("leak", LEAKS if FULL else LEAKS[:1])
    def test_a_leak_is_seen(self, leak: str) -> None:
        with pytest.raises(AssertionError, match="grow") as caught:
            for looks in rank_pool(2).run(train_and_look, steps=LEAK_STEPS, leak=leak):
                check(looks, LEAK_STEPS)
        assert not isinstance(caught.value, RankFailure)
