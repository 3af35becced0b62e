"""Measure the parts of a running pipeline in place: what their slices, their links and their memory cost.

A collective over all ranks. Parts hear from the part before what they will receive; stages measure together, one part
after the other where they hold several, and try their links, pair by pair.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.attention import SliceStore, guard_plain_attention
from terapipe_ds.costs.profile import CostSample, LayerShare, LinkSample
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.data import DrawnMicroBatch
from terapipe_ds.runtime.groups import PipelineGroups, Wires
from terapipe_ds.runtime.header import MicroBatchShape
from terapipe_ds.runtime.layer_times import layer_shares
from terapipe_ds.runtime.layout import Layout, Place, WireEnds, rounds_of
from terapipe_ds.runtime.link import MessageSpec, Wire
from terapipe_ds.runtime.own_time import own_seconds
from terapipe_ds.runtime.parted import activate, parameters_of_part
from terapipe_ds.runtime.probe import StageProbe, processor_clock, synchronize
from terapipe_ds.runtime.profiler import Alone, Peers, grid, measure, noise_warning, weights, with_weights
from terapipe_ds.runtime.trials import Trials
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.schedule.lower import RECEIVE_AHEAD

_LINK_REPEATS = 5
_STATES = {"adagrad": 1, "lion": 1, "sgd": 1, "muon": 1}  # tensors per parameter; Adam and its kin have two


@dataclass(frozen=True)
class PartCosts:
    """What one rank has measured of one of its parts."""

    part_id: int
    samples: tuple[CostSample, ...]
    links: tuple[LinkSample, ...]  # from this part to the next one
    message_s: tuple[tuple[int, float], ...]  # (tokens, seconds): what the messages of an F or B cost the stage itself
    memory: PartMemory
    warning: str | None
    seconds: float
    replica_id: int = 0
    layer_shares: tuple[LayerShare, ...] | None = None


class WorldPeers:
    """All ranks, by a group on the CPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def barrier(self) -> None:
        """Wait for every rank."""
        torch_dist.barrier(group=self._group)

    def largest(self, value: float) -> float:
        """The largest value that any rank has."""
        number = torch.tensor([value], dtype=torch.float64)
        torch_dist.all_reduce(number, op=torch_dist.ReduceOp.MAX, group=self._group)
        return float(number)


def measure_parts(
    engine: Any,
    drawn: Sequence[DrawnMicroBatch],
    shapes: Sequence[MicroBatchShape],
    sequence_length: int,
    groups: PipelineGroups,
    store: SliceStore,
    progress: Callable[[float], None],
) -> list[PartCosts]:
    """The costs of this rank's parts of ``engine``, for slices of sequences of ``sequence_length`` tokens. A part that
    stands at several places is measured at its own one.

    Args:
        drawn, shapes: micro-batches of this pipeline; the longest serves, stretched where it is too short.
        store: the engine's, so that its buffers are taken once; empty before and after.
    """
    layout, mine = engine._layout, engine.stage_id
    places = [place for place in layout.places(mine) if layout.homes(place.part_id)[0] == (mine, place.chunk_id)]
    with torch.inference_mode(False):  # a batch that was drawn for an evaluation may not be recorded otherwise
        probes = {place: _probe(engine, place, drawn, shapes, sequence_length, store) for place in places}
    peers: Peers = Alone() if groups.world is None else WorldPeers(groups.world)
    granularity = engine.terapipe_config.granularity_for(sequence_length)
    lengths = sorted({tokens for tokens, _ in grid(sequence_length, granularity)})
    specs: dict[int, _Specs] = {place.part_id: {} for place in places}
    try:
        with untouched(engine.module, _accumulates_in_fp32(engine)), guard_plain_attention():
            for tokens in lengths:
                _hear_and_tell(engine, probes, specs, tokens, groups)
            found = []
            for index, (place, probe) in enumerate(probes.items()):
                share = partial(_share, progress, index, len(probes))
                found.append(_measured(engine, place, probe, specs[place.part_id], peers, share))
    finally:
        store.reset()
    links, message_s = _links(specs, layout, groups, engine._wires, mine, peers)
    return [
        dataclasses.replace(costs, links=tuple(links[costs.part_id]), message_s=tuple(message_s[costs.part_id].items()))
        for costs in found
    ]


_Specs = dict[int, MessageSpec]
"""What a part hands on, by the tokens of a slice."""


def _share(progress: Callable[[float], None], index: int, count: int, share: float) -> None:
    progress((index + share) / count)


def _measured(
    engine: Any, place: Place, probe: StageProbe, specs: _Specs, peers: Peers, progress: Callable[[float], None]
) -> PartCosts:
    """Of one part, without its links; the other stages measure one of theirs."""
    activate(engine.module, place.chunk_id)
    length, lengths = probe.sequence_length, sorted(specs)
    smallest = lengths[0], 0
    probe.own_s = own_seconds(
        engine, place.is_last, lambda: probe.issue_backward(probe.issue_forward(*smallest)), lengths[0] / length,
        engine.slice_clock,
    )  # fmt: skip
    measured = measure(
        probe, grid(length, engine.terapipe_config.granularity_for(length)), length, num_stages=engine.num_stages,
        num_micro_batches=engine.micro_batches, peers=peers, processor_s=processor_clock(), progress=progress,
    )  # fmt: skip
    weight_s = weights(probe, lengths, peers)
    memory = _memory(engine, probe, lengths, specs, _all_tell_peaks(probe, peers))
    samples = with_weights(measured.samples(), weight_s)
    # a clock of one's own is for machines that are busy with the other stages
    warning = noise_warning(samples) if engine.slice_clock is None else None
    shares = layer_shares(probe, lengths, Trials.of(engine)) if _wants_shares(engine) else None
    return PartCosts(
        place.part_id, samples, (), (), memory, warning, measured.seconds,
        engine.grid.get_data_parallel_rank(), shares,
    )  # fmt: skip


def _wants_shares(engine: Any) -> bool:
    """Whether somebody asks for costs of another cut: the ranking of all schedules, or who reads the profile's file."""
    config = engine.terapipe_config
    return config.schedule == "auto" or config.planner.cache_dir is not None


def _all_tell_peaks(probe: StageProbe, peers: Peers) -> bool:
    """Whether every rank can tell peaks of memory, which one with a profiler cannot; the others do without them then.

    With and without peaks a slice runs another number of times, and tensor-parallel peers have to run it as often.
    """
    return peers.largest(0.0 if probe.tells_peaks() else 1.0) == 0.0


def _probe(
    engine: Any, place: Place, drawn: Sequence[DrawnMicroBatch], shapes: Sequence[MicroBatchShape], length: int,
    store: SliceStore,
) -> StageProbe:  # fmt: skip
    device, config = torch.device(engine.device), engine.terapipe_config
    own_length, longest = max(zip((shape.length for shape in shapes), drawn, strict=True), key=lambda pair: pair[0])
    inputs = labels = None
    if place.is_first:
        found = SliceableTensors.of_inputs(longest.inputs, own_length, config.sequence_dim, config.sliced_inputs)
        inputs = found.stretched(length).to(device)
    if place.is_last and longest.labels is not None:
        labels = longest.labels.stretched(length).to(device)
    return StageProbe(
        engine.module, engine.module, length, device, store, part_id=place.part_id, inputs=inputs, labels=labels,
        is_last=place.is_last, loss_fn=engine.module.loss_fn, autocast=partial(autocast_if_enabled, engine),
        weights=engine.weight_gradients, clock=engine.slice_clock,
    )  # fmt: skip


def _accumulates_in_fp32(engine: Any) -> bool:
    """DeepSpeed's BF16_Optimizer adds each gradient to one in fp32 as soon as it is there."""
    return bool(getattr(engine.optimizer, "immediate_grad_update", False))


def _hear_and_tell(
    engine: Any, probes: dict[Place, StageProbe], specs: dict[int, _Specs], tokens: int, groups: PipelineGroups
) -> None:
    """Fill in what parts hand on for slices of ``tokens`` tokens, part by part; warms the slices up."""
    layout, mine = engine._layout, engine.stage_id
    for place, probe in sorted(probes.items(), key=lambda item: item[0].part_id):
        if not place.is_first:
            before = layout.owner(place.part_id - 1)
            spec = specs[place.part_id - 1][tokens] if before == mine else _heard(groups, before)
            probe.receive(tokens, spec)
        activate(engine.module, place.chunk_id)
        spec = specs[place.part_id][tokens] = probe.output_spec(tokens)
        if not place.is_last and layout.owner(place.part_id + 1) != mine:
            torch_dist.send(spec.encode(), groups.ranks[layout.owner(place.part_id + 1)], group=groups.control)


def _heard(groups: PipelineGroups, stage_id: int) -> MessageSpec:
    announcement = MessageSpec.blank()
    torch_dist.recv(announcement, groups.ranks[stage_id], group=groups.control)
    return MessageSpec.decode(announcement)


def _links(
    specs: dict[int, _Specs], layout: Layout, groups: PipelineGroups, wires: Wires, stage_id: int, peers: Peers
) -> tuple[dict[int, list[LinkSample]], dict[int, dict[int, float]]]:
    """By part: the link to the next one, and what the messages of one F or B take of this stage's own time, for the
    smallest, a middle and the largest slice. A stage tries one link at a time."""
    lengths = sorted(next(iter(specs.values())))
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    samples: dict[int, list[LinkSample]] = {part_id: [] for part_id in specs}
    costs = {part_id: dict.fromkeys(chosen, 0.0) for part_id in specs}
    for links in _rounds(layout):
        peers.barrier()
        for part_id, ends in links:
            source, _, target, _ = ends
            if stage_id not in (source, target):
                continue
            sends = stage_id == source
            mine, other = (part_id, target) if sends else (part_id + 1, source)
            both = wires.activations(ends), wires.gradients(ends)
            outgoing, incoming = both if sends else both[::-1]
            for tokens in chosen:
                spec = _spec_over(specs[part_id][tokens] if sends else None, groups, other)
                trips = [_there_and_back(spec, outgoing, incoming, sends) for _ in range(1 + _LINK_REPEATS)][1:]
                costs[mine][tokens] += statistics.median(own_s for _, own_s in trips)
                if sends:
                    sent_s = statistics.median(seconds for seconds, _ in trips)
                    message_bytes = sum(t.num_bytes for t in spec.tensors) or None
                    samples[mine].append(
                        LinkSample(tokens, sent_s, part_id, repeats=_LINK_REPEATS, num_bytes=message_bytes)
                    )
    return samples, costs


def _rounds(layout: Layout) -> list[list[tuple[int, WireEnds]]]:
    """Return the links between own places of parts, each with the part that sends activations, in rounds in which
    every stage has one at most."""
    links = ((part_id, layout.own_wire(part_id)) for part_id in range(layout.num_parts - 1))
    between_stages = (link for link in links if link[1][0] != link[1][2])
    return rounds_of(between_stages, ends=lambda link: (link[1][0], link[1][2]))


def _spec_over(mine: MessageSpec | None, groups: PipelineGroups, other: int) -> MessageSpec:
    """What goes over a link, on both of its ends; None on that which receives."""
    if mine is None:
        return _heard(groups, other)
    torch_dist.send(mine.encode(), groups.ranks[other], group=groups.control)
    return mine


def _there_and_back(
    spec: MessageSpec, outgoing: Wire, incoming: Wire, sends: bool
) -> tuple[float, float]:
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


def _memory(
    engine: Any, probe: StageProbe, lengths: Sequence[int], specs: dict[int, MessageSpec], with_peaks: bool
) -> PartMemory:
    """The bytes of this stage: from a slice in the middle of the lengths, the smallest one and the whole sequence."""
    length, smallest, tokens = probe.sequence_length, lengths[0], lengths[len(lengths) // 2]
    points = [(tokens, length - tokens), (length, 0), (smallest, 0), (smallest, length - smallest)]
    middle, whole, small, late = (probe.slice_bytes(*point, with_peaks) for point in points)
    keys_bytes, grads_bytes = probe.store_bytes()
    rate = middle.kept / tokens if tokens < length else max(0.0, whole.kept - keys_bytes) / length
    fixed, per_token, per_prefix = _line(small.working, late.working, whole.working, smallest, length)
    # messages ahead and one on its way; where the last stage has most bytes, one of its next two computations is a B
    links = (2 if probe.is_last else 1 + RECEIVE_AHEAD) * probe.received_bytes(tokens)
    links += (1 + RECEIVE_AHEAD) * sum(t.num_bytes for t in specs[tokens].tensors)
    parameters = parameters_of_part(engine.module)
    states, gradients = _state_bytes(engine, parameters), _gradient_bytes(parameters)
    drops = not (engine.zero_optimization() or engine.bfloat16_enabled())  # DeepSpeedEngine.zero_grad with each step
    return PartMemory(
        static_bytes=states + (0 if drops else gradients),
        slice_bytes_per_token=rate,
        store_bytes_per_token=keys_bytes / length,
        # and what is sent back of a micro-batch: the stage before may be behind by as much
        store_grad_bytes_per_token=(grads_bytes + probe.received_bytes(length)) / length,
        # in the first backward the gradients of a layer come before all that it kept is gone
        working_bytes=fixed + gradients // max(1, len(engine.module.forward_funcs)),
        working_bytes_per_token=per_token + links / tokens,
        working_bytes_per_prefix_token=per_prefix,
        gradient_bytes=gradients if drops else 0,
        whole_bytes_per_token=max(0.0, whole.kept / length - rate),
        weight_bytes_per_token=probe.weight_bytes(tokens) / tokens,
    )


def _line(small: int, late: int, whole: int, smallest: int, length: int) -> tuple[int, float, float]:
    """Fixed bytes, bytes per token and per token of prefix that reach three measured ones: of the smallest slice at the
    sequence's begin and at its end, where it has little to hide the prefix's gradients behind, and of the whole
    sequence. Peaks are maxima of such lines, so those between lie below."""
    per_token = max(0.0, (whole - small) / (length - smallest)) if length > smallest else 0.0
    fixed = max(0.0, small - per_token * smallest)
    over = late - fixed - per_token * smallest
    return math.ceil(fixed), per_token, max(0.0, over / (length - smallest)) if length > smallest else 0.0


def _state_bytes(engine: Any, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Parameters, and the optimizer's states, which need not exist yet."""
    here = sum(p.numel() * p.element_size() for p in parameters)
    if engine.optimizer is None:
        return here
    name = str(engine.optimizer_name() or "adam").lower()
    states = _STATES.get(next((known for known in _STATES if known in name), ""), 2)
    ranks = engine.dp_world_size if engine.zero_optimization() else 1
    trained = [p for p in parameters if p.requires_grad]
    master = 4 * sum(p.numel() for p in trained if p.element_size() < 4)
    return here + (sum(p.numel() * max(4, p.element_size()) * states for p in trained) + master) // ranks


def _gradient_bytes(parameters: Sequence[torch.nn.Parameter]) -> int:
    """Of the parameters; half precision is taken to accumulate in fp32."""
    return sum(p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad)
