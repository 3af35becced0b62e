"""Measured profiles on disk, so that a second start measures nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from terapipe_ds.costs.profile import CostSample, LinkSample, PartProfile, Profile, ProfileError, ProfileKey
from terapipe_ds.files import write_text
from terapipe_ds.json_text import parse_json
from terapipe_ds.planner import MemoryModel
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.runtime.measuring import PartCosts

logger = logging.getLogger("terapipe_ds")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is known of the stages: times, and where it was measured here, memory."""

    profile: Profile
    memory: MemoryModel | None


def combine(key: ProfileKey, costs: Sequence[PartCosts], num_stages: int | None = None) -> Measured:
    """One profile of what all ranks have measured: of tensor-parallel peers the slowest, of replicas the median.

    Peers run the same slice together and meet inside its layers, so it takes what the slowest of them takes; a median
    would hide one that all others wait for. Replicas meet once per step: there the median is what is usual, and one
    that a busy machine disturbs does not count.

    Args:
        num_stages: that held the parts.
    """
    measured: dict[int, dict[int, list[PartCosts]]] = {}
    for cost in sorted(costs, key=lambda cost: (cost.part_id, cost.replica_id)):
        measured.setdefault(cost.part_id, {}).setdefault(cost.replica_id, []).append(cost)
    parts, links = [], []
    for part_id, replicas in measured.items():
        samples = [_slowest(map(_with_messages, peers), _SAMPLE) for peers in replicas.values()]
        ranks_shares = [peer.layer_shares for peers in replicas.values() for peer in peers]
        shares = None if None in ranks_shares else ranks_shares[0]
        parts.append(PartProfile(part_id, tuple(_usual(samples, _SAMPLE)), None, shares))
        links += _usual([_slowest((peer.links for peer in peers), _LINK) for peers in replicas.values()], _LINK)
    ranks = ([peer for peers in replicas.values() for peer in peers] for replicas in measured.values())
    memory = MemoryModel.measured(max((c.memory for c in same), key=lambda m: m.static_bytes) for same in ranks)
    return Measured(Profile(key, tuple(parts), _with_every_part(links, len(parts)), num_stages), memory)


def _with_messages(costs: PartCosts) -> list[CostSample]:
    """The samples, each with what its messages take of the stage's own time: an F and a B have as many."""
    if not costs.message_s:
        return list(costs.samples)
    tokens, seconds = zip(*costs.message_s, strict=True)
    own = [float(np.interp(sample.tokens, tokens, seconds)) for sample in costs.samples]
    return [
        dataclasses.replace(sample, forward_s=sample.forward_s + s, backward_s=sample.backward_s + s)
        for sample, s in zip(costs.samples, own, strict=True)
    ]


_SAMPLE = ("forward_s", "backward_s", "forward_spread", "backward_spread")
_LINK = ("send_s",)
_Sample = TypeVar("_Sample", CostSample, LinkSample)


def _slowest(peers: Iterable[Sequence[_Sample]], names: Sequence[str]) -> list[_Sample]:
    """Point by point, the largest of what tensor-parallel peers have measured."""
    return [_merged(same, names, max) for same in zip(*peers, strict=True)]


def _usual(replicas: Iterable[Sequence[_Sample]], names: Sequence[str]) -> list[_Sample]:
    """Point by point, the median over the replicas."""
    return [_merged(same, names, statistics.median) for same in zip(*replicas, strict=True)]


def _merged(same: Sequence[_Sample], names: Sequence[str], how: Callable[[Iterable[float]], float]) -> _Sample:
    numbers: dict[str, Any] = {name: how(getattr(sample, name) for sample in same) for name in names}
    weights = [weight_s for sample in same if (weight_s := getattr(sample, "weight_s", None)) is not None]
    if len(weights) == len(same):
        numbers["weight_s"] = min(how(weights), numbers["backward_s"])
    return dataclasses.replace(same[0], **numbers)


def _with_every_part(links: Sequence[LinkSample], num_parts: int) -> tuple[LinkSample, ...]:
    """The links; a part without one (the last, which sends gradients only, and one that hands on within its stage) as
    the part before it that has one, or the first that has."""
    if not links:
        return ()
    there = sorted({link.part_id or 0 for link in links})
    found = []
    for part_id in range(num_parts):
        source = max((part for part in there if part <= part_id), default=there[0])
        found += [dataclasses.replace(link, part_id=part_id) for link in links if link.part_id == source]
    return tuple(found)


def cache_path(folder: str, key: ProfileKey, run: Mapping[str, Any]) -> Path:
    """Where the profile of ``key`` is kept. ``run``: what else times, points and memory figures depend on."""
    text = json.dumps([dataclasses.asdict(key), dict(run)], sort_keys=True)
    return Path(folder) / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_cache(path: Path | None, key: ProfileKey) -> Measured | None:
    """What :func:`write_cache` kept, or None. A file that cannot be used is measured again, with a warning."""
    if path is None or not path.exists():
        return None
    try:
        profile = Profile.load(path)
        profile.require(key)
        parts = parse_json(_memory_path(path).read_bytes())
        measured = Measured(profile, MemoryModel.measured(PartMemory(**part) for part in parts))
    except (ProfileError, OSError, ValueError, TypeError) as error:
        logger.warning("the cached profile cannot be used and is measured again: %s", error)
        return None
    logger.info("slices are planned from the profile in %s; delete it to measure again", path)
    return measured


def write_cache(path: Path, measured: Measured) -> None:
    """Keep a profile, and the memory figures beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [] if measured.memory is None else [dataclasses.asdict(part) for part in measured.memory.parts]
    write_text(_memory_path(path), json.dumps(parts, indent=1))
    measured.profile.save(path)
    logger.info("the measured profile is kept in %s", path)


def _memory_path(path: Path) -> Path:
    return path.with_name(path.stem + ".memory.json")
