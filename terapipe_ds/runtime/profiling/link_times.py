"""What messages between stages take: neighbours try their links, pair by pair, over the wires of training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from terapipe_ds.costs.profile import LinkSample
from terapipe_ds.runtime.layout.layout import Layout, WireEnds, rounds_of
from terapipe_ds.runtime.links.channel import MessageSpec, Wire
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.profiling.rounds import Peers
from terapipe_ds.runtime.profiling.slice_timer import synchronize

_REPEATS = 5

Specs = dict[int, MessageSpec]
"""What a part sends, by the tokens of a slice."""


@dataclass
class LinkTimes:
    """The links of one part: samples of the one to the next part, and tokens -> seconds of the stage's own time that
    the messages of one F or B take."""

    samples: list[LinkSample] = field(default_factory=list)
    message_s: dict[int, float] = field(default_factory=dict)


def measure_links(
    parts: Sequence[int], specs: Mapping[int, Specs], layout: Layout, wires: Wires, stage_id: int, peers: Peers
) -> dict[int, LinkTimes]:
    """Try each link with the smallest, a middle and the largest slice, one link of a stage at a time.

    Args:
        parts: of this stage.
        specs: by part, what it sends; those of this stage's parts and of the parts before them.
    """
    lengths = sorted(specs[parts[0]])
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    found = {part_id: LinkTimes([], dict.fromkeys(chosen, 0.0)) for part_id in parts}
    for links in _rounds(layout):
        peers.barrier()
        for part_id, ends in links:
            source, _, target, _ = ends
            if stage_id not in (source, target):
                continue
            sends = stage_id == source
            both = wires.activations(ends), wires.gradients(ends)
            outgoing, incoming = both if sends else both[::-1]
            for tokens in chosen:
                spec = specs[part_id][tokens]
                trips = [_there_and_back(spec, outgoing, incoming, sends) for _ in range(1 + _REPEATS)][1:]
                own_s = statistics.median(own_s for _, own_s in trips)
                found[part_id if sends else part_id + 1].message_s[tokens] += own_s
                if sends:
                    sent_s = statistics.median(seconds for seconds, _ in trips)
                    num_bytes = sum(t.num_bytes for t in spec.tensors) or None
                    sample = LinkSample(tokens, sent_s, part_id, repeats=_REPEATS, num_bytes=num_bytes)
                    found[part_id].samples.append(sample)
    return found


def _rounds(layout: Layout) -> list[list[tuple[int, WireEnds]]]:
    """Return the links between own places of parts, each with the part that sends activations, in rounds in which
    every stage has one at most."""
    links = ((part_id, layout.own_wire(part_id)) for part_id in range(layout.num_parts - 1))
    between_stages = (link for link in links if link[1][0] != link[1][2])
    return rounds_of(between_stages, ends=lambda link: (link[1][0], link[1][2]))


def _there_and_back(spec: MessageSpec, outgoing: Wire, incoming: Wire, sends: bool) -> tuple[float, float]:
    """Return the seconds of one way, and those of this stage's own time that one message takes.

    The wires are those of training, connected the way that they go: another pair of ends would have to connect first,
    and a stage that does so with one neighbour keeps the other one waiting.

    On a CPU that is all the processor time of sending or receiving, whichever thread carries the message: there is no
    other processor. On an accelerator it is the calls alone.
    """
    there = [torch.zeros(t.shape, dtype=t.dtype, device=outgoing.device) for t in spec.tensors]
    back = [incoming.buffer(t) for t in spec.tensors]
    synchronize()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    works: list[Any] = [incoming.irecv(buffer) for buffer in back]
    called_s = time.perf_counter() - begin_s
    if not sends:
        _wait(works)
        works = []
    again_s = time.perf_counter()
    ready = [outgoing.outgoing(tensor) for tensor in there]
    works += [outgoing.isend(tensor) for tensor in ready]
    called_s += time.perf_counter() - again_s
    _wait(works)
    for buffer, tensor in zip(back, spec.tensors, strict=True):
        incoming.incoming(buffer, tensor)
    synchronize()
    own_s = time.process_time() - begin_cpu_s if get_accelerator().is_synchronized_device() else called_s
    return (time.perf_counter() - begin_s) / 2, own_s / 2


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
