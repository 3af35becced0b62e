"""Make one profile of all ranks' measurements, and keep profiles on disk, so that a second start measures nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from terapipe_ds.costs.profile import (
    CostSample,
    LayerProfile,
    LayerProfiles,
    LinkSample,
    Overhead,
    PartProfile,
    Profile,
    ProfileKey,
)
from terapipe_ds.files.atomic import write_text
from terapipe_ds.messages import logger
from terapipe_ds.planner import MemoryModel
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.runtime.profiling.all_parts import PartMeasured
from terapipe_ds.runtime.profiling.layer_times import LayerMeasured

_Sample = TypeVar("_Sample", CostSample, LinkSample)
_Times = TypeVar("_Times", CostSample, Overhead)


def combine(
    key: ProfileKey, costs: Sequence[PartMeasured], num_stages: int | None = None, state_ranks: int | None = None
) -> Profile:
    """Return one profile of parts on `num_stages` stages: the slowest tensor-parallel peer, the median of replicas.

    Peers meet inside the layers of a slice, so it takes as long as the slowest peer. Replicas meet once per step, so
    the median leaves out a replica that a busy machine disturbs.
    """
    by_part: dict[int, dict[int, list[PartMeasured]]] = {}
    for cost in sorted(costs, key=lambda cost: (cost.part_id, cost.replica_id)):
        by_part.setdefault(cost.part_id, {}).setdefault(cost.replica_id, []).append(cost)
    parts, links, layers = [], [], []
    # peers share each slice, replicas share the step
    for part_id, replicas in by_part.items():
        ranks = [rank for peers in replicas.values() for rank in peers]
        layers.append([[rank.layers for rank in peers] for peers in replicas.values()])
        # none has its bytes if a profiler ran on one rank
        memories = [dataclasses.asdict(rank.memory) for rank in ranks if rank.memory is not None]
        memory = max(memories, key=lambda numbers: numbers["static_bytes"], default=None)
        samples = _merged([[_with_messages(rank) for rank in peers] for peers in replicas.values()])
        # messages add time to the layers of a part, to F and B alike: the median of its ranks
        points = sorted(set.intersection(*(set(rank.message_s) for rank in ranks)))
        added = {tokens: statistics.median(rank.message_s[tokens] for rank in ranks) for tokens in points}
        overheads = tuple(Overhead(tokens, seconds, seconds) for tokens, seconds in added.items())
        parts.append(PartProfile(part_id, tuple(samples), None, memory, overheads))
        links += _merged([[rank.links for rank in peers] for peers in replicas.values()])
    all_links = _for_every_part(links, len(parts))
    return Profile(key, tuple(parts), all_links, num_stages, layers_of_parts(layers), state_ranks)


def layers_of_parts(parts: Sequence[Sequence[Sequence[Sequence[LayerMeasured] | None]]]) -> LayerProfiles | None:
    """Return the layers of all parts, with the median times of equal layers; None if one is unknown.

    `parts` has the layers of each part by replica and tensor-parallel peer.
    """
    seen: dict[str, list[list[LayerProfile]]] = {}  # of each kind of layer, the profiles of peers
    kind_of, bounds = list[str](), [0]
    for replicas in parts:
        for peers in replicas:
            known = [layers for layers in peers if layers is not None]
            if len(known) < len(peers):
                return None
            for same in zip(*known, strict=True):
                seen.setdefault(same[0].kind, []).append([layer.profile for layer in same])
        kind_of += [layer.kind for layer in known[0]]
        bounds.append(len(kind_of))
    medians = []
    for runs in seen.values():
        samples = tuple(_merged([[profile.samples for profile in peers] for peers in runs]))
        medians.append(dataclasses.replace(runs[0][0], samples=samples, memory=_memory([peers[0] for peers in runs])))
    kinds = list(seen)
    return LayerProfiles(tuple(medians), tuple(map(kinds.index, kind_of)), tuple(bounds))


def _memory(layers: Sequence[LayerProfile]) -> dict[str, float | None] | None:
    """Return the medians of the memory of equal layers; None if some layer has none."""
    known = [layer.memory for layer in layers if layer.memory is not None]
    if len(known) < len(layers):
        return None
    return {name: _of_all((numbers[name] for numbers in known), statistics.median) for name in known[0]}


def _of_all(values: Iterable[float | None], how: Callable[[Iterable[float]], float]) -> float | None:
    """Return what `how` makes of the values; None if one of them is not known."""
    known = [*values]
    return None if None in known else how(cast(list[float], known))


def with_own_time(profile: Profile, own_s: Mapping[int, tuple[float, float]]) -> Profile:
    """Add the engine's own time in an F and in a B, by part, to the slices of a profile and to its overheads."""
    parts = []
    for part in profile.parts:
        both = own_s.get(part.part_id, (0.0, 0.0))
        samples = tuple(_longer(sample, *both) for sample in part.samples)
        overheads = tuple(_longer(overhead, *both) for overhead in part.overheads)
        parts.append(dataclasses.replace(part, samples=samples, overheads=overheads))
    return dataclasses.replace(profile, parts=tuple(parts))


def _longer(one: _Times, forward_s: float, backward_s: float) -> _Times:
    return dataclasses.replace(one, forward_s=one.forward_s + forward_s, backward_s=one.backward_s + backward_s)


def memory_of(profile: Profile) -> MemoryModel | None:
    """Return the memory figures that were measured with the times; None if some part has none."""
    figures = [PartMemory.of(part.memory) for part in profile.parts]
    known = [memory for memory in figures if memory is not None]
    return MemoryModel(tuple(known)) if len(known) == len(figures) else None


def _with_messages(costs: PartMeasured) -> list[CostSample]:
    """Add to each sample the own time of the stage for its messages; F and B have equally many."""
    tokens, seconds = list(costs.message_s), list(costs.message_s.values())
    own_s = [float(np.interp(sample.tokens, tokens, seconds)) for sample in costs.samples]
    return [_longer(sample, each, each) for sample, each in zip(costs.samples, own_s, strict=True)]


def _merged(replicas: Iterable[Sequence[Sequence[_Sample]]]) -> list[_Sample]:
    """Return, point by point, the median over replicas of the slowest of their tensor-parallel peers."""
    slowest = [[_one(same, max) for same in zip(*peers, strict=True)] for peers in replicas]
    return [_one(same, statistics.median) for same in zip(*slowest, strict=True)]


def _one(same: Sequence[_Sample], how: Callable[[Iterable[float]], float]) -> _Sample:
    names = [field.name for field in dataclasses.fields(same[0]) if field.name.endswith(("_s", "_spread"))]
    # if one rank did not split a backward, no rank can plan to split it
    numbers: dict[str, Any] = {name: _of_all((getattr(each, name) for each in same), how) for name in names}
    if numbers.get("weight_s") is not None:
        numbers["weight_s"] = min(numbers["weight_s"], numbers["backward_s"])
    return dataclasses.replace(same[0], **numbers)


def _for_every_part(links: Sequence[LinkSample], num_parts: int) -> tuple[LinkSample, ...]:
    """Fill in missing links: a part without one gets the link of the nearest earlier part, or else the first one.

    The last part sends gradients only, and a part whose next part is on the same stage has no link either.
    """
    # a planner may put the parts elsewhere, where every part has a link
    measured = sorted({link.part_id or 0 for link in links})
    filled = []
    for part_id in range(num_parts) if measured else ():
        source = max((part for part in measured if part <= part_id), default=measured[0])
        filled += [dataclasses.replace(link, part_id=part_id) for link in links if link.part_id == source]
    return tuple(filled)


def cache_path(folder: str, key: ProfileKey, run: Mapping[str, Any]) -> Path:
    """Return the path of the profile of `key`; `run` has everything else that its numbers depend on."""
    text = json.dumps([dataclasses.asdict(key), dict(run)], sort_keys=True)
    return Path(folder) / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_cache(path: Path | None, key: ProfileKey) -> Profile | None:
    """Return the cached profile, or None. If the file cannot be used, warn: the caller measures again."""
    if path is None or not os.path.exists(path):  # Path.exists raises if a folder may not be searched
        return None
    # a file of another run, or half a file, costs a measurement and no job
    try:
        profile = Profile.load(path)
        profile.require(key)
        if memory_of(profile) is None:
            raise ValueError(f"{path} has no memory figures")
    except (ValueError, TypeError) as error:
        logger.warning("the cached profile cannot be used and is measured again: %s", error)
        return None
    logger.info("slices are planned from the profile in %s; delete it to measure again", path)
    return profile


def write_cache(path: Path | None, profile: Profile) -> None:
    """Keep a profile, if there is a path; a file that cannot be written is only a warning."""
    if path is not None:
        with Diagnostic(f"terapipe.planner.cache_dir: cannot write {path}").attempt():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, profile.to_json())
            logger.info("the measured profile is kept in %s", path)
