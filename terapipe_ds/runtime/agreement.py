"""Exchange values, results, errors and configs between ranks: the few functions that everything uses.

`gather`, `gather_results`, `everywhere`, `from_rank_0`, `refuse_everywhere` and `on_some_rank` are collectives over
`group`. None is for all ranks. If their backend works on devices, the functions then share a group on the CPU, since
DeepSpeed may not have chosen a device yet. For `exchange`, `largest` and `barrier` None is this rank alone. An error of
one rank becomes an error of all, so that no rank waits for one that has left. `require_equal_configs` compares configs
at the start, `batch.batch_agreement` again with each batch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import pickle
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as torch_dist

from terapipe_ds.compat import installed_versions
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.messages import describe, logger
from terapipe_ds.version import __version__

T = TypeVar("T")
_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.1
PATIENCE_S = 60.0  # the shortest wait for late ranks, which may still load a model
REMIND_S = 30.0  # after this time a rank logs once which ranks it waits for
_meetings = itertools.count(1)  # of this process; every rank builds its engines in the same order

# Keys that decide what is learned and saved, and the order and the size of collectives and messages. Monitors and
# printing may differ.
COMPARED_SECTIONS = (
    "terapipe", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16",
    "zero_optimization", "pipeline", "gradient_clipping", "prescale_gradients", "optimizer", "data_types",
    "activation_checkpointing", "communication_data_type", "scheduler", "gradient_predivide_factor",
    "gradient_allreduce_op", "bfloat16", "torch_autocast", "checkpoint", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "seq_parallel_communication_data_type",
)  # fmt: skip
_FILES = {"schedule": ".csv", "strategy": ".json"}  # keys of the section that may name a file; all ranks read it
VERSIONS = ("torch", "deepspeed", "megatron-core", "terapipe_ds", "python")


class RaisedEverywhere(Exception):
    """Carry an error that every rank of the job raises alike within a batch.

    No rank is left waiting, so the watch-dog lets the job go on. `ErrorsUnwrapped` hands `error` itself to the caller.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe(error))
        self.error = error


class ErrorsUnwrapped(AbstractContextManager[None]):
    """Replace a `RaisedEverywhere` by the error that it carries, so that users see ordinary errors."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RaisedEverywhere):
            raise error.error from error.error.__cause__


def gather(value: T, group: Any = None) -> list[T]:
    """Return the value of each rank of the group, in the order of the ranks."""
    values: list[Any] = [value] * torch_dist.get_world_size(group)
    if len(values) > 1:
        group = _on_the_host(torch_dist.group.WORLD) if group is None else group
        torch_dist.all_gather_object(values, value, group=group)
    return values


def exchange(value: T, group: Any) -> list[T]:
    """Return `gather`, but None for the group stands for this rank alone."""
    return [value] if group is None else gather(value, group)


@functools.lru_cache(maxsize=1)  # to make a group connects each rank to all others
def _on_the_host(world: Any) -> Any:
    """Return a group of all ranks on the CPU; None stands for `world`, the default group, if that is one."""
    return None if torch_dist.get_backend() == "gloo" else torch_dist.new_group(backend="gloo")


def gather_results(act: Callable[[], T] | None, group: Any = None) -> list[T | None]:
    """Return the result of `act` on each rank of the group, in the order of the ranks; None for a rank without `act`.

    If `act` fails, every rank raises the error of the first rank that failed, whatever its class.
    """
    value, own, problem = None, None, None
    try:
        value = None if act is None else act()
    except Exception as error:
        own, problem = error, (_readable(error), describe(error))
    everyone = gather((value, problem), group)
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            if own is not None and rank == torch_dist.get_rank(group):
                raise own
            told = problem[0] or RuntimeError(f"rank {rank}: {problem[1]}")
            told.add_note(f"on rank {rank}")
            raise told
    return [value for value, _ in everyone]


def everywhere(act: Callable[[], T], group: Any = None) -> T:
    """Return this rank's result of `act`; all ranks raise an exception that one rank raises. A collective."""
    kept: list[T] = []
    gather_results(lambda: kept.append(act()), group)
    return kept[0]


def from_rank_0(ask: Callable[[], T], group: Any = None) -> T:
    """Return the result of `ask` on the first rank of the group. Only that rank calls it; all ranks raise its error."""
    return cast(T, gather_results(ask if torch_dist.get_rank(group) == 0 else None, group)[0])


def refuse_everywhere(problem: str | None, group: Any = None) -> None:
    """Raise `TeraPipeConfigError` on every rank when one of them has found a problem, in its layers for example."""
    everyone = gather(problem, group)
    by_rank = {rank: text for rank, text in enumerate(everyone) if text is not None}
    if by_rank:
        texts = "; ".join(sorted(set(by_rank.values())))
        raise TeraPipeConfigError(texts if len(everyone) == 1 else f"on rank {min(by_rank)}: {texts}")


def refuse_in_batch(problem: str | None, world: Any, kind: type[Exception] = TeraPipeConfigError) -> None:
    """Raise `RaisedEverywhere` on every rank when one of them has found a problem within a batch."""
    told = [f"on rank {rank}: {text}" for rank, text in enumerate(gather(problem, world)) if text is not None]
    if told:
        raise RaisedEverywhere(kind(told[0]))


def _readable(error: Exception) -> Exception | None:
    """Return `error` if other ranks can unpickle it. Some classes do not accept their own arguments again."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else None
    except Exception:
        return None


def digest(*parts: object) -> int:
    """Return a number in [0, 2^40) that differs between plain values whose `repr` differs."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:5], "big")


def share(number: int, index: int, count: int) -> int:
    """Return the number that a rank adds to a sum that tells whether `count` ranks have the same digest.

    The first rank adds its digest once for each other rank, and each other rank subtracts its own. Equal digests sum up
    to 0. Different ones do so with a probability of 1 in 2^40. Several sets of ranks may use one sum if each set's
    digests hold its name.
    """
    return number * (count - 1) if index == 0 else -number


def largest(value: float, group: Any) -> float:
    """Return the largest value of the ranks of a group on the CPU; None stands for this rank alone."""
    number = torch.tensor(value, dtype=torch.float64, device="cpu")
    if group is not None:
        torch_dist.all_reduce(number, op=torch_dist.ReduceOp.MAX, group=group)
    return float(number)


def barrier(group: Any) -> None:
    """Wait for all ranks of a group on the CPU; None stands for this rank alone."""
    if group is not None:
        torch_dist.barrier(group=group)


def on_some_rank(flags: Sequence[bool], group: Any = None) -> list[bool]:
    """Return for each flag whether it is true on some rank."""
    group = _on_the_host(torch_dist.group.WORLD) if group is None else group
    numbers = torch.tensor(flags, dtype=torch.int32, device="cpu")
    torch_dist.all_reduce(numbers, op=torch_dist.ReduceOp.MAX, group=group)
    return list(map(bool, numbers.tolist()))


def by_text(texts: dict[int, str]) -> str:
    """Group ranks by their text, in the form "ranks [0]: 3 slices; ranks [1, 2]: 4 slices"."""
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    return "; ".join(f"ranks {who}: {text}" for text, who in sides.items())


def default_store() -> Any:
    """Return the store through which the ranks of the default group connected."""
    return torch_dist.distributed_c10d._get_default_store()


def meet(
    name: str, ranks: Sequence[int], rank: int, text: str, late: Callable[[float, Callable[[], list[int]]], None]
) -> dict[int, str]:
    """Send a text to `ranks`, and return the texts of all of them once they have arrived.

    This is no collective. A collective would wait for a missing rank until its group's timeout, and name no rank.

    Args:
        name: the same on all ranks, and used once.
        late: called repeatedly while ranks are missing, with the seconds waited and a function that returns the missing
            ranks. It may raise.
    """
    store = default_store()
    keys, counter = {each: f"terapipe_ds/{name}/{each}" for each in ranks}, f"terapipe_ds/{name}"
    store.set(keys[rank], text)
    store.add(counter, 1)
    begin_s, look_s = time.monotonic(), _LOOK_S
    while store.add(counter, 0) < len(keys):
        late(time.monotonic() - begin_s, lambda: [each for each, key in keys.items() if not store.check([key])])
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
    return dict(zip(keys, (told.decode() for told in store.multi_get(list(keys.values()))), strict=True))


def require_equal_configs(raw: Mapping[str, Any]) -> None:
    """Raise `TeraPipeConfigError` on every rank when the configs or the versions of ranks differ.

    A collective over all ranks. A rank does not arrive if `register()` was not called there: the others then raise
    after `stall_timeout_s` (a minute at least). Ranks may differ if none of them has an enabled `terapipe` section.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    values, rank, section = _compared(raw), torch_dist.get_rank(), _section(raw)
    checksum = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    timeout_s = section.get("stall_timeout_s", TeraPipeConfig().stall_timeout_s)
    late = _remind_then_raise(rank, max(PATIENCE_S, timeout_s if isinstance(timeout_s, (int, float)) else 0.0))
    checksums = meet(f"configs/{next(_meetings)}", range(torch_dist.get_world_size()), rank, checksum, late)
    if len(set(checksums.values())) == 1:
        return
    everyone = gather((section.get("enabled") is True, values))
    if any(is_enabled for is_enabled, _ in everyone):
        lines = ["the ranks have different DeepSpeed configs, versions or default dtypes; all must have the same ones:"]
        for name in values:
            by_rank = {rank: of_rank[name] for rank, (_, of_rank) in enumerate(everyone)}
            lines += [f"{name}: {by_text(by_rank)}"] if len({*by_rank.values()}) > 1 else []
        raise TeraPipeConfigError("\n  ".join(lines))


def _section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `terapipe` section, which is not validated yet."""
    section = raw.get("terapipe")
    return section if isinstance(section, dict) else {}


def _compared(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return all values that must be equal on all ranks, as text. Patch releases of Python may differ."""
    sections = {name: json.dumps(raw.get(name), sort_keys=True, default=str) for name in COMPARED_SECTIONS}
    python = ".".join(platform.python_version_tuple()[:2])
    installed = {"terapipe_ds": __version__, "python": python, **installed_versions()}
    versions = {f"version of {name}": installed.get(name, "not installed") for name in VERSIONS}
    section = _section(raw)
    files = {f"the {key}'s file": _checksum(section.get(key), end) for key, end in _FILES.items()}
    # DeepSpeed makes the numbers that stages send one another in it
    return {**sections, **files, **versions, "torch.get_default_dtype()": str(torch.get_default_dtype())}


def _checksum(name: Any, end: str) -> str:
    """Return a checksum of the file that a key names; "" if it names none."""
    if not isinstance(name, str) or not name.endswith(end):
        return ""
    try:
        return f"checksum {hashlib.sha256(read_bytes(name)).hexdigest()[:16]}"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _remind_then_raise(rank: int, timeout_s: float) -> Callable[[float, Callable[[], list[int]]], None]:
    """Return a function to call while ranks are missing: it logs them once, and raises after `timeout_s`."""
    next_s = min(REMIND_S, timeout_s)

    def late(waited_s: float, missing_ranks: Callable[[], list[int]]) -> None:
        nonlocal next_s
        missing = missing_ranks() if waited_s >= next_s else []
        if not missing:
            return
        text = (
            f"rank {rank} has waited {waited_s:.0f} s in deepspeed.initialize() to compare configs, and ranks "
            f"{missing} have not come. Either they do not run terapipe_ds: call terapipe_ds.register() on every rank "
            "before deepspeed.initialize(), or start all with deepspeed --module terapipe_ds.run. Or they are still "
            "building their model, or have ended: their own output tells"
        )
        if waited_s >= timeout_s:
            raise TeraPipeConfigError(text)
        logger.warning("%s", text)
        next_s = timeout_s  # once is enough

    return late
