"""Tensor bytes on a CPU, counted by hand, and the line through measured working bytes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.runtime.profiling.all_parts import _line, _state_bytes
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak, bytes_outside_allocator

MIB = 2**20
BYTES = st.integers(0, 10**9)


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


def test_a_line_by_hand() -> None:
    """5 fixed, 2 per token and 3 per token of prefix, with slices of 4 tokens and sequences of 24."""
    assert _line(small=5 + 8, late=5 + 8 + 60, whole=5 + 48, smallest=4, length=24) == (5, 2.0, 3.0)


@given(BYTES, BYTES, BYTES, st.integers(1, 50), st.integers(0, 500))
def test_the_line_reaches_what_was_measured(small: int, late: int, whole: int, smallest: int, more: int) -> None:
    length = smallest + more
    whole = whole if more else small
    fixed, per_token, per_prefix = _line(small, late if more else small, whole, smallest, length)
    assert min(fixed, per_token, per_prefix) >= 0
    slack = 1e-6 * max(small, late, whole) + 1
    assert fixed + per_token * smallest >= small - slack
    assert fixed + per_token * length >= whole - slack
    if more:
        assert fixed + per_token * smallest + per_prefix * more >= late - slack


def test_bytes_outside_the_allocator_are_those_that_it_cannot_get(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_outside_allocator() == 0  # a CPU
    monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 25)
    assert bytes_outside_allocator() == 15


@pytest.mark.parametrize(("kind", "options"), [
    ("Adam", {}), ("AdamW", {}), ("Adagrad", {}), ("ASGD", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}),
    ("Adam", {"amsgrad": True}), ("RMSprop", {}), ("RMSprop", {"momentum": 0.9, "centered": True}),
])  # fmt: skip
def test_states_are_counted_before_the_optimizer_has_any(kind: str, options: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(7, 3)), torch.nn.Parameter(torch.ones(5), requires_grad=False)]
    optimizer = getattr(torch.optim, kind)(parameters[:1], lr=0.1, **options)
    engine: Any = SimpleNamespace(optimizer=optimizer, optimizer_name=lambda: kind.lower())
    for name in ("zero_cpu_offload", "zero_optimization", "bfloat16_enabled"):
        setattr(engine, name, lambda: False)
    counted = _state_bytes(engine, parameters)
    parameters[0].grad = torch.ones(7, 3)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    assert counted == sum(t.nbytes for t in [*parameters, *states])
