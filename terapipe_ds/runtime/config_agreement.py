"""All ranks have the same config before it matters: a mismatch is an error that shows both sides, never a hang."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds import __version__
from terapipe_ds.compat import installed_versions
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.runtime.agreement import by_text, gather, meet

logger = logging.getLogger("terapipe_ds")

PATIENCE_S = 60.0  # at least, for ranks that come late: they may still load a model
REMIND_S = 30.0  # after which a rank says once for whom it waits
_meetings = itertools.count(1)  # of this process; every rank builds its engines in the same order

# What decides the order and the size of collectives and messages. Monitors and printing may differ.
COMPARED_SECTIONS = (
    "terapipe", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16",
    "zero_optimization", "pipeline", "gradient_clipping", "prescale_gradients", "optimizer", "data_types",
    "activation_checkpointing", "communication_data_type",
)  # fmt: skip
VERSIONS = ("torch", "deepspeed", "megatron-core", "terapipe_ds", "python")


def require_equal_configs(raw: Mapping[str, Any]) -> None:
    """Raise `TeraPipeConfigError` on every rank when the configs or the versions of ranks differ.

    A collective over all ranks. A rank that does not come, because `register()` was not called there, is an error on
    the others after `stall_timeout_s` (a minute at least). Ranks may differ where none has an enabled `terapipe`
    section.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    values, rank = _compared(raw), torch_dist.get_rank()
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    late = _remind_then_raise(rank, _timeout_s(values))
    digests = meet(f"configs/{next(_meetings)}", range(torch_dist.get_world_size()), rank, digest, late)
    if len(set(digests.values())) == 1:
        return
    everyone = gather(values)
    if any(map(_is_enabled, everyone)):
        raise TeraPipeConfigError(
            "the ranks have different DeepSpeed configs or versions; every rank must be given the same one:\n  "
            + "\n  ".join(_differences(everyone))
        )


def _compared(raw: Mapping[str, Any]) -> dict[str, str]:
    sections = {name: json.dumps(raw.get(name), sort_keys=True, default=str) for name in COMPARED_SECTIONS}
    return {**sections, "the schedule's file": _schedule_file(raw), **_versions()}


def _schedule_file(raw: Mapping[str, Any]) -> str:
    """Return a checksum of the file that `terapipe.schedule` names; "" where it names none."""
    section = raw.get("terapipe")
    name = section.get("schedule") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name.endswith(".csv"):
        return ""
    try:
        return f"checksum {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]}"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _versions() -> dict[str, str]:
    """Return the versions that all ranks must have alike. A patch release of Python may differ."""
    python = ".".join(platform.python_version_tuple()[:2])
    installed = {"terapipe_ds": __version__, "python": python, **installed_versions()}
    return {f"version of {name}": installed.get(name, "not installed") for name in VERSIONS}


def _is_enabled(values: Mapping[str, str]) -> bool:
    section = json.loads(values["terapipe"])
    return isinstance(section, dict) and section.get("enabled") is True


def _timeout_s(values: Mapping[str, str]) -> float:
    """Return how long this rank waits for others. Its section is not validated yet."""
    section = json.loads(values["terapipe"])
    given = section.get("stall_timeout_s") if isinstance(section, dict) else None
    usual = float(TeraPipeConfig().stall_timeout_s)
    return max(PATIENCE_S, float(given) if isinstance(given, (int, float)) else usual)


def _remind_then_raise(rank: int, timeout_s: float) -> Callable[[float, Callable[[], list[int]]], None]:
    """Return what a rank does while others are missing: it says so once, and gives up after `timeout_s`."""
    remind_s = min(REMIND_S, timeout_s)

    def late(waited_s: float, missing_ranks: Callable[[], list[int]]) -> None:
        nonlocal remind_s
        if waited_s < min(remind_s, timeout_s):
            return
        missing = missing_ranks()
        if missing and waited_s >= timeout_s:
            raise TeraPipeConfigError(_missing_text(rank, missing, waited_s))
        logger.warning("%s", _missing_text(rank, missing, waited_s))
        remind_s = math.inf  # once is enough

    return late


def _missing_text(rank: int, missing: list[int], waited_s: float) -> str:
    return (
        f"rank {rank} has waited {waited_s:.0f} s in deepspeed.initialize() to compare configs, and ranks {missing} "
        "have not come. Either they do not run terapipe_ds: call terapipe_ds.register() on every rank before "
        "deepspeed.initialize(), or start all with deepspeed --module terapipe_ds.run. Or they are still building "
        "their model, or have ended: their own output tells"
    )


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    """Return a line for each value that is not the same on all ranks."""
    lines = {name: {rank: values[name] for rank, values in enumerate(everyone)} for name in everyone[0]}
    return [f"{name}: {by_text(texts, 'ranks')}" for name, texts in lines.items() if len(set(texts.values())) > 1]
