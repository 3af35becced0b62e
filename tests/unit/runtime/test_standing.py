"""Where a thread stands: own code, a collective, or the end of one that was begun earlier."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import pytest
from torch import distributed

from terapipe_ds.runtime.standing import collective_of, standing_of


class WorkThatNeverEnds(distributed.Work):
    """As ``async_op=True`` gives it."""

    def __init__(self, act: Callable[[], FrameType]) -> None:
        super().__init__()
        self.act = act

    def wait(self, *_: object) -> FrameType:
        return self.act()


def here() -> FrameType:
    return sys._getframe(1)


def module_with(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, module.__dict__)
    return module


COMM = module_with("torch.distributed.made_up", "def all_reduce(act):\n    return act()\n")
DEEPSPEED_COMM = module_with("deepspeed.comm.made_up", "def all_reduce(act, inner):\n    return inner(act)\n")


def inside() -> FrameType:
    """The frame of the module that called."""
    return sys._getframe(1)


def test_own_code_is_no_collective() -> None:
    assert collective_of(here()) == ""


def test_a_collective_is_named_with_its_caller() -> None:
    text = collective_of(COMM.all_reduce(inside))
    assert text.startswith("all_reduce, called in test_standing.py:")
    assert text.endswith("(test_a_collective_is_named_with_its_caller)")


def test_the_layers_of_deepspeed_are_seen_through() -> None:
    text = collective_of(DEEPSPEED_COMM.all_reduce(inside, COMM.all_reduce))
    assert text.endswith("(test_the_layers_of_deepspeed_are_seen_through)")


def test_a_call_that_is_wrapped_keeps_its_name() -> None:
    """As `torch.distributed` and `deepspeed.comm` wrap theirs."""
    wrapped = module_with(
        "torch.distributed.logging_made_up",
        "def decorate(function):\n    def wrapper(*args):\n        return function(*args)\n    return wrapper\n",
    ).decorate(COMM.all_reduce)
    assert collective_of(wrapped(inside)).startswith("all_reduce, called in test_standing.py:")


def test_user_code_called_by_a_collective_is_not_one() -> None:
    def reduce_hook() -> FrameType:
        return here()

    assert collective_of(COMM.all_reduce(reduce_hook)) == ""


@pytest.fixture
def waiting_thread() -> Iterator[Callable[[Callable[[threading.Event], None]], int]]:
    """Start a thread, and give the ident of it once it stands in its function."""
    end = threading.Event()
    threads: list[threading.Thread] = []

    def start(function: Callable[[threading.Event], None]) -> int:
        threads.append(threading.Thread(target=function, args=(end,)))
        threads[-1].start()
        ident = threads[-1].ident
        assert ident is not None
        for _ in range(1000):
            if f"in {function.__name__}" in standing_of(ident).stack:
                break
            end.wait(0.01)
        return ident

    yield start
    end.set()
    for thread in threads:
        thread.join()


def test_a_thread_that_waits_for_something_else(waiting_thread: Callable[..., int]) -> None:
    def wait_for_ever(end: threading.Event) -> None:
        end.wait()

    standing = standing_of(waiting_thread(wait_for_ever))
    assert "end.wait()" in standing.stack
    assert standing.collective == ""


def test_the_end_of_an_asynchronous_call() -> None:
    def wait_for_handle() -> str:
        handle = WorkThatNeverEnds(lambda: sys._getframe(2))
        return collective_of(handle.wait())

    text = wait_for_handle()
    assert text.startswith("the end of a call, called in test_standing.py:")
    assert "(wait_for_handle)" in text


def test_a_thread_that_is_gone() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert standing_of(thread.ident).stack == "" or thread.ident in sys._current_frames()
