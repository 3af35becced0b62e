"""All ranks have the same config before it matters: a mismatch is an error that shows both sides, never a hang."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import pickle
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as torch_dist

from terapipe_ds import __version__
from terapipe_ds.compat import installed_versions
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError

logger = logging.getLogger("terapipe_ds")

T = TypeVar("T")
PATIENCE_S = 60.0  # at least, for ranks that come late: they load a model, say
REMIND_S = 30.0  # after which a rank says once for whom it waits
_LOOK_S = 0.05
_meetings = itertools.count(1)  # of this process; every rank builds its engines in the same order

# What decides the order and the size of collectives and messages. Monitors and printing may differ.
COMPARED_SECTIONS = (
    "terapipe", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16",
    "zero_optimization", "pipeline", "gradient_clipping", "prescale_gradients", "optimizer", "data_types",
    "activation_checkpointing", "communication_data_type",
)  # fmt: skip

VERSIONS = ("torch", "deepspeed", "megatron-core", "terapipe_ds", "python")


def _compared(raw: Mapping[str, Any]) -> dict[str, str]:
    sections = {name: json.dumps(raw.get(name), sort_keys=True, default=str) for name in COMPARED_SECTIONS}
    return {**sections, "the schedule's file": _schedule_file(raw), **_versions()}


def _schedule_file(raw: Mapping[str, Any]) -> str:
    """What tells one content of the file that ``terapipe.schedule`` names from another; "" where it names none."""
    section = raw.get("terapipe")
    name = section.get("schedule") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name.endswith(".csv"):
        return ""
    try:
        return f"checksum {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]}"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _versions() -> dict[str, str]:
    """What has to be of one version on all ranks; a patch release of Python changes nothing between them."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"terapipe_ds": __version__, "python": python, **installed_versions()}
    return {f"version of {name}": found.get(name, "not installed") for name in VERSIONS}


def _is_enabled(values: Mapping[str, str]) -> bool:
    section = json.loads(values["terapipe"])
    return isinstance(section, dict) and section.get("enabled") is True


def raise_on_every_rank(problem: str | None) -> None:
    """Raise ``TeraPipeConfigError`` on every rank when one of them has found a problem, in the layers of its stage say.

    A collective over all ranks.
    """
    everyone = gathered(problem)
    found = {rank: text for rank, text in enumerate(everyone) if text is not None}
    if found:
        texts = "; ".join(sorted(set(found.values())))
        raise TeraPipeConfigError(texts if len(everyone) == 1 else f"on rank {min(found)}: {texts}")


def gathered(mine: Any) -> list[Any]:
    """One object of each rank, in their order. A collective over all ranks.

    Exchanged on the CPU: DeepSpeed may not have chosen this rank's device yet.
    """
    if torch_dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    group = torch_dist.new_group(backend="gloo")
    torch_dist.all_gather_object(everyone, mine, group=group)
    torch_dist.destroy_process_group(group)
    return everyone


def done_on_each_rank(act: Callable[[], T] | None) -> list[T | None]:
    """What ``act`` gives on each rank, in their order; None: this rank has nothing to do. A collective over all ranks.

    Raises:
        Exception: on every rank, what it raised on the first rank where it did; of the same class where other ranks can
            read it. It is of any kind, for ``act`` runs code of others; unless all learn of it, they wait for ever.
    """
    own: Exception | None = None
    mine: tuple[T | None, Exception | None] = (None, None)
    try:
        mine = (None if act is None else act(), None)
    except Exception as error:
        own, mine = error, (None, portable(error, torch_dist.get_rank()))
    everyone = gathered(mine)
    for rank, (_, raised) in enumerate(everyone):
        if raised is not None:
            if rank == torch_dist.get_rank() and own is not None:
                raise own
            raised.add_note(f"on rank {rank}; this is rank {torch_dist.get_rank()}")
            raise raised
    return [value for value, _ in everyone]


def portable(error: Exception, rank: int) -> Exception:
    """``error``, or one that says the same where other ranks could not read it: a class may not take its own args."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else _told(error, rank)
    except Exception:
        return _told(error, rank)


def _told(error: Exception, rank: int) -> Exception:
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def require_equal_configs(raw: Mapping[str, Any]) -> None:
    """Raise ``TeraPipeConfigError`` on *every* rank when ranks differ in what their engines must agree on: configs and
    versions.

    A collective over all ranks. One that does not come, because ``register()`` was not called there, is an error on
    the others after ``stall_timeout_s`` (a minute at least). Nothing is compared where no rank has an enabled
    ``terapipe`` section.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    mine = _compared(raw)
    _meet(_timeout_s(mine))
    everyone = gathered(mine)
    if not any(_is_enabled(values) for values in everyone):
        return
    differences = list(_differences(everyone))
    if differences:
        raise TeraPipeConfigError(
            "the ranks have different DeepSpeed configs or versions; every rank must be given the same one:\n  "
            + "\n  ".join(differences)
        )


def _timeout_s(mine: Mapping[str, str]) -> float:
    """Of this rank's section, which nobody has validated yet."""
    section = json.loads(mine["terapipe"])
    given = section.get("stall_timeout_s") if isinstance(section, dict) else None
    usual = float(TeraPipeConfig().stall_timeout_s)
    return max(PATIENCE_S, float(given) if isinstance(given, (int, float)) else usual)


def _meet(timeout_s: float) -> None:
    """Wait until every rank is here, in the store of the default group: a collective with one that never comes would
    end with the group's timeout, half an hour later, and name nobody.
    """
    store = torch_dist.distributed_c10d._get_default_store()
    rank, world_size, meeting = torch_dist.get_rank(), torch_dist.get_world_size(), next(_meetings)
    keys = [f"terapipe_ds/meeting/{meeting}/{each}" for each in range(world_size)]
    store.set(keys[rank], "here")
    store.add(f"terapipe_ds/meeting/{meeting}", 1)
    begin_s, look_s, remind_s = time.monotonic(), _LOOK_S, min(REMIND_S, timeout_s)
    while store.add(f"terapipe_ds/meeting/{meeting}", 0) < world_size:
        waited_s = time.monotonic() - begin_s
        if waited_s >= min(remind_s, timeout_s):
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            if missing and waited_s >= timeout_s:
                raise TeraPipeConfigError(_nobody_came(rank, missing, waited_s))
            logger.warning("%s", _nobody_came(rank, missing, waited_s))
            remind_s = math.inf  # once is enough
        time.sleep(look_s)
        look_s = min(1.2 * look_s, _LOOK_S * 20)


def _nobody_came(rank: int, missing: list[int], waited_s: float) -> str:
    return (
        f"rank {rank} has waited {waited_s:.0f} s in deepspeed.initialize() to compare configs, and ranks {missing} "
        "have not come. Either they do not run terapipe_ds: call terapipe_ds.register() on every rank before "
        "deepspeed.initialize(), or start all with deepspeed --module terapipe_ds.run. Or they are still building "
        "their model, or have ended: their own output tells"
    )


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    lines = []
    for name in everyone[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks_by_value.setdefault(values[name], []).append(rank)
        if len(ranks_by_value) > 1:
            sides = "; ".join(f"ranks {ranks}: {value}" for value, ranks in ranks_by_value.items())
            lines.append(f"{name}: {sides}")
    return lines
