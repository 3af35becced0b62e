"""Let a failure of one rank inside DeepSpeed's save or load reach the others, which wait in its barriers.

States are taken before DeepSpeed's save begins. Errors of a load are kept until all ranks can be told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.agreement import gather_results
from terapipe_ds.runtime.checkpoints.save import replaced
from terapipe_ds.runtime.layout.parted_module import each_part

T = TypeVar("T")


def _owners_of(engine: PipelineEngine, method: str) -> list[Any]:
    """Return the optimizer, the scheduler of learning rates and the layers of this rank that have a method."""
    owners = [engine.optimizer, engine.lr_scheduler]
    for _ in each_part(engine.module):
        owners += engine.module.forward_funcs
    different = {id(owner): owner for owner in owners if hasattr(owner, "__dict__")}
    return [owner for owner in different.values() if callable(getattr(owner, method, None))]


@contextmanager
def states_taken(engine: PipelineEngine) -> Iterator[None]:
    """Take the states of this rank now, and let DeepSpeed save these."""
    with ExitStack() as stack:
        for owner in _owners_of(engine, "state_dict"):
            stack.enter_context(replaced(owner, "state_dict", _giving(owner.state_dict(), owner.state_dict)))
        yield


def _giving(state: Any, take: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `state_dict` that gives a copy of `state`: DeepSpeed leaves out what is frozen."""
    return lambda *args, **kwargs: take(*args, **kwargs) if args or kwargs else copy.copy(state)


def load_everywhere(engine: PipelineEngine, world: Any, load: Callable[[], T]) -> T:
    """Return what DeepSpeed's method `load` gives on this rank; what it raises on one rank is raised on all.

    The ranks agree before tied weights are sent, and at the end. Until then the first error of what loads its own state
    is kept. A collective over all ranks.
    """
    errors: list[Exception] = []
    loaded: list[T] = []
    is_told, send_tied_weights = False, engine.module._synchronize_tied_weights

    def raise_first() -> None:
        if errors:
            raise errors[0]

    def agree() -> None:
        nonlocal is_told
        is_told = True
        gather_results(raise_first, world)
        is_told = False

    def agree_then_send() -> None:
        agree()
        send_tied_weights()

    def keeping(load_state: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return load_state(*args, **kwargs)
            except Exception as error:
                errors.append(error)
                return None

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(engine.module, "_synchronize_tied_weights", agree_then_send))
        for owner in _owners_of(engine, "load_state_dict"):
            stack.enter_context(replaced(owner, "load_state_dict", keeping(owner.load_state_dict)))
        try:
            loaded.append(load())
        except Exception as error:
            if is_told:
                raise
            errors.append(error)
    agree()
    return loaded[0]
