"""The allocator of a device in reports: retries, the memory of a rank that raises, and settings that split memory."""

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from terapipe_ds.runtime.failures.device_memory import allocator_retries, warning_of_allocator
from terapipe_ds.runtime.failures.last_words import LastWords
from terapipe_ds.runtime.failures.report import Doing, RankRecord, stall_report


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a GPU whose allocator has run out twice; return the snapshots that are written."""
    written: list[str] = []
    accelerator = get_accelerator()
    monkeypatch.setattr(accelerator, "is_synchronized_device", lambda: False)
    monkeypatch.setattr(accelerator, "memory_stats", lambda *_: {"num_alloc_retries": 2})
    monkeypatch.setattr(accelerator, "device_name", lambda *_: "cuda")
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    return written


@pytest.mark.parametrize("environment", [
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"},
])  # fmt: skip
def test_memory_that_can_grow_needs_no_warning(environment: dict[str, str], on_a_gpu: list[str]) -> None:
    assert warning_of_allocator(environment) is None
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in (warning_of_allocator({}) or "")
    with mock.patch.object(get_accelerator(), "device_name", lambda *_: "npu"):
        assert warning_of_allocator({}) is None, "the setting is CUDA's"


def test_a_stall_report_has_the_retries_from_before_the_batch(on_a_gpu: list[str]) -> None:
    record = RankRecord(1, 1)
    assert not record.full().alloc_retries  # its text has this line, from the stack
    record.enter(Doing("F0.0"))
    assert "allocator retries before this batch: 2" in stall_report({1: record.full()}, 1.0, True)
    with mock.patch.object(get_accelerator(), "memory_stats", lambda *_: pytest.fail("it may hold its lock")):
        record.full()  # what the watching thread calls


def test_only_the_thread_that_raises_asks_for_the_memory(on_a_gpu: list[str], tmp_path: Path) -> None:
    """The allocator may hold its lock, and the watching thread must end the process whatever it does."""

    def tell() -> None:
        words = LastWords(RankRecord(0, 0), str(tmp_path)) if threading.current_thread() is main else words_of_main
        words.tell(mock.Mock(failure=None), "out of memory")

    main, words_of_main = threading.current_thread(), LastWords(RankRecord(0, 0), str(tmp_path))
    watching = threading.Thread(target=tell)
    watching.start()
    watching.join()
    assert not on_a_gpu
    tell()
    assert on_a_gpu == [str(tmp_path / "memory-rank0000.pickle")]


def test_a_cpu_has_no_retries() -> None:
    assert allocator_retries() == 0
