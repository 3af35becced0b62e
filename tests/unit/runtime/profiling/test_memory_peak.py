"""Tensor bytes on a CPU, counted by hand."""

from __future__ import annotations

import pytest
import torch

from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

MIB = 2**20


def test_the_peak_is_the_largest_total_and_not_the_sum() -> None:
    with MemoryPeak() as peak:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(3 * MIB, dtype=torch.uint8)
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del third
        fourth = torch.empty(MIB, dtype=torch.uint8)
    assert (peak.grown_bytes, peak.left_bytes) == (5 * MIB, 4 * MIB)
    del second, fourth


def test_temporaries_inside_of_a_kernel_and_backwards_count() -> None:
    """x and its copy in fp64, kept by no one; the gradient of x stays."""
    x = torch.ones(MIB // 4, requires_grad=True)
    with MemoryPeak() as peak:
        (x.double() * 2).sum().backward()
    assert 4 * MIB <= peak.grown_bytes < 5 * MIB
    assert x.grad is not None and peak.left_bytes == pytest.approx(MIB, abs=64)


def test_a_second_recorder_is_refused_and_the_first_one_goes_on() -> None:
    with MemoryPeak() as peak:
        assert not MemoryPeak.is_available()
        with pytest.raises(RuntimeError, match="end the profiler that runs"), MemoryPeak():
            pass
        tensor = torch.empty(MIB, dtype=torch.uint8)
    assert MemoryPeak.is_available() and peak.left_bytes == tensor.nbytes
