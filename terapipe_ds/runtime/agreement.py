"""What ranks tell one another: the few functions that everything uses.

Each function but `meet` is a collective. `group` is a group of ranks; None stands for all ranks, which then talk on the
CPU, because DeepSpeed may not have chosen a device yet. An error of one rank becomes an error of all of them, so that
no rank waits for one that has left.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfigError

T = TypeVar("T")
_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.1
_DIGEST_BYTES = 5


class RaisedEverywhere(Exception):
    """Carry an error that every rank of the job raises alike within a batch.

    No rank is left waiting, so the watch-dog lets the job go on. `ErrorsUnwrapped` hands `error` itself to the caller.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class ErrorsUnwrapped(AbstractContextManager[None]):
    """Raise the error that a `RaisedEverywhere` carries in its place: what a user calls raises ordinary errors."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RaisedEverywhere):
            raise error.error from error.error.__cause__


# -- values ----------------------------------------------------------------------------------------------------------


def gather(value: T, group: Any = None) -> list[T]:
    """Return the value of each rank of the group, in the order of the ranks."""
    if torch_dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * torch_dist.get_world_size(group)
    with _on_cpu(group) as talking:
        torch_dist.all_gather_object(values, value, group=talking)
    return values


def from_rank_0(ask: Callable[[], T], group: Any = None) -> T:
    """Return what `ask` gives on the first rank of the group. Only this rank calls it.

    Raises:
        Exception: on every rank, what `ask` raised.
    """
    if torch_dist.get_world_size(group) == 1:
        return ask()
    outcome, own = _Outcome(), None
    if torch_dist.get_rank(group) == 0:
        outcome, own = _outcome_of(ask)
    told = [outcome]
    with _on_cpu(group) as talking:
        torch_dist.broadcast_object_list(told, group=talking, group_src=0)
    return _value_of(told[0], 0, own)


def gather_results(act: Callable[[], T] | None, group: Any = None) -> list[T | None]:
    """Return what `act` gives on each rank of the group, in the order of the ranks; None where a rank gives no `act`.

    Raises:
        Exception: on every rank, what `act` raised on the first rank where it did. It may be of any class, because
            `act` runs code of others.
    """
    outcome, own = _Outcome(), None
    if act is not None:
        outcome, own = _outcome_of(act)
    rank = torch_dist.get_rank(group)
    return [_value_of(each, other, own if other == rank else None) for other, each in enumerate(gather(outcome, group))]


def refuse_everywhere(problem: str | None) -> None:
    """Raise `TeraPipeConfigError` on every rank when one of them has found a problem, in its layers for example."""
    everyone = gather(problem)
    found = {rank: text for rank, text in enumerate(everyone) if text is not None}
    if found:
        texts = "; ".join(sorted(set(found.values())))
        raise TeraPipeConfigError(texts if len(everyone) == 1 else f"on rank {min(found)}: {texts}")


class _Outcome(NamedTuple):
    """What a function returned or raised on one rank, in a form that others can read."""

    value: Any = None
    error: Exception | None = None
    text: str = ""


def _outcome_of(act: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    """Call `act`. Return the outcome to tell the other ranks, and the error as this rank raises it."""
    try:
        return _Outcome(act()), None
    except Exception as error:
        return _Outcome(error=_readable(error), text=f"{type(error).__name__}: {error}"), error


def _value_of(outcome: _Outcome, rank: int, own: Exception | None) -> Any:
    """Return the value of an outcome on `rank`, or raise its error; `own` is the error itself on that rank."""
    if own is not None:
        raise own
    if outcome.text:
        error = outcome.error or RuntimeError(f"rank {rank}: {outcome.text}")
        error.add_note(f"on rank {rank}")
        raise error
    return outcome.value


def _readable(error: Exception) -> Exception | None:
    """Return `error` if other ranks can read it. A class may not take its own arguments back."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else None
    except Exception:
        return None


@contextmanager
def _on_cpu(group: Any) -> Iterator[Any]:
    """Give `group`, or a group of all ranks on the CPU for None."""
    if group is not None or torch_dist.get_backend() == "gloo":
        yield group
        return
    temporary = torch_dist.new_group(backend="gloo")
    yield temporary
    torch_dist.destroy_process_group(temporary)


# -- comparisons -----------------------------------------------------------------------------------------------------


def digest(*parts: object) -> int:
    """Return a number in [0, 2^40) that tells plain values from others by their `repr`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:_DIGEST_BYTES], "big")


def share(number: int, index: int, count: int) -> int:
    """Return what a rank adds to a sum that tells whether `count` ranks have the same digest.

    The first rank adds its digest as often as there are other ranks. Each of the others subtracts its own digest once.
    Equal digests sum up to 0. Different ones do so by a chance of 1 in 2^40. Several sets of ranks may use one sum if
    each set's digests hold its name.
    """
    return number * (count - 1) if index == 0 else -number


def on_any_rank(flag: bool, group: Any) -> bool:
    """Return whether `flag` is true on some rank of a group on the CPU."""
    number = torch.tensor(int(flag))
    torch_dist.all_reduce(number, op=torch_dist.ReduceOp.MAX, group=group)
    return bool(number)


def by_text(texts: dict[int, str], places: str) -> str:
    """Return which places say what, as "stages [0]: 3 slices; stages [1, 2]: 4 slices"."""
    sides: dict[str, list[int]] = {}
    for place, text in texts.items():
        sides.setdefault(text, []).append(place)
    return "; ".join(f"{places} {who}: {text}" for text, who in sides.items())


# -- through the store -----------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store by which the ranks of the default group have found one another."""
    return torch_dist.distributed_c10d._get_default_store()


def meet(
    name: str,
    ranks: Sequence[int],
    rank: int,
    text: str,
    late: Callable[[float, Callable[[], list[int]]], None],
    store: Any = None,
) -> dict[int, str]:
    """Tell `ranks` a text and return what each of them told, once all have.

    This is no collective: a collective would wait for a missing rank until its group's timeout, and name no rank.

    Args:
        name: the same on all ranks, and used once.
        late: called again and again while ranks are missing, with the seconds waited and a function that gives the
            missing ranks. It may raise.
        store: for tests; the default store otherwise.
    """
    store = default_store() if store is None else store
    keys, counter = {each: f"terapipe_ds/{name}/{each}" for each in ranks}, f"terapipe_ds/{name}"
    store.set(keys[rank], text)
    store.add(counter, 1)
    begin_s, look_s = time.monotonic(), _LOOK_S
    while store.add(counter, 0) < len(keys):
        late(time.monotonic() - begin_s, lambda: [each for each, key in keys.items() if not store.check([key])])
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
    return dict(zip(keys, (told.decode() for told in store.multi_get(list(keys.values()))), strict=True))

