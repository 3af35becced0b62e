"""Measure the parts of a running pipeline in place: the costs of their slices, their links and their memory.

This is a collective over all ranks. Parts learn from the part before which tensors they will receive. Stages measure
together, one part after the other if they hold several, and then try their links, pair by pair.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.attention import guard_plain_attention
from terapipe_ds.attention.slice_store import LayerBytes
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.profile import CostSample, LinkSample
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import DEEPSPEED_OPTIMIZERS, bytes_of_step
from terapipe_ds.runtime.agreement import barrier, largest
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.handed_inputs import HandedInputs
from terapipe_ds.runtime.batch.source import DrawnMicroBatch
from terapipe_ds.runtime.failures.trials import Trials
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.layout.layout import Layout, Place, rounds_of
from terapipe_ds.runtime.layout.parted_module import activate, parameters_of_part
from terapipe_ds.runtime.layout.sequence_axis import sequence_ranks_of, shortest_slice_on
from terapipe_ds.runtime.links.channel import ReceiveChannel, SendChannel, Wire
from terapipe_ds.runtime.links.compression import Packing
from terapipe_ds.runtime.links.groups import PipelineGroups, Wires
from terapipe_ds.runtime.links.specs import MessageSpec
from terapipe_ds.runtime.profiling.key import kinds_of_part
from terapipe_ds.runtime.profiling.layer_times import LayerMeasured, measure_layers
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.runtime.profiling.rounds import grid, time_part
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer
from terapipe_ds.schedule.proofs import OUTSTANDING_SENDS
from terapipe_ds.schedule.schedule import RECEIVE_AHEAD

Specs = dict[int, MessageSpec]  # what a part sends, by the tokens of a slice

_LINK_REPEATS = 5
_STATES = {"adagrad": 1, "lion": 1, "muon": 1, "rmsprop": 1, "asgd": 1, "sgd": 0}  # per parameter; Adam's kin have two
_MORE_STATES = ("amsgrad", "centered", "momentum")  # options of torch's optimizers that add one each


@dataclass(frozen=True)
class StageToPlan:
    """Hold the facts about this rank's stage for measuring, planning and the check of the first batch."""

    engine: PipelineEngine  # has its module, its optimizer and the sizes of its batches
    config: TeraPipeConfig
    layout: Layout
    groups: PipelineGroups
    token_multiple: int  # of the lengths of slices, for the layers


@dataclass(frozen=True)
class PartMeasured:
    """Hold the measurements of one rank for one of its parts."""

    part_id: int
    replica_id: int
    samples: tuple[CostSample, ...]
    memory: PartMemory | None  # None: a profiler ran on one of the ranks
    layers: tuple[LayerMeasured, ...] | None = None  # None: they were not timed one by one
    links: list[LinkSample] = field(default_factory=list)  # to the next part
    message_s: dict[int, float] = field(default_factory=dict)  # of a message from the stage, by tokens


def measure_parts(
    stage: StageToPlan,
    wires: Wires,
    micro_batch: DrawnMicroBatch,  # the longest of this pipeline, which is stretched if it is too short
    shape: MicroBatchShape,
    sequence_length: int,
    progress: Callable[[float], None],  # gets the finished share, between 0 and 1
) -> list[PartMeasured]:
    """Return the costs of this rank's parts, for slices of sequences of `sequence_length` tokens.

    A part at several places is measured at its home.
    """
    engine, layout = stage.engine, stage.layout
    # copies of a part cost the same, so its home alone is measured
    places = [p for p in layout.places(engine.stage_id) if layout.homes(p.part_id)[0] == (engine.stage_id, p.chunk_id)]
    with torch.inference_mode(False):  # a batch that was drawn for an evaluation may not be recorded otherwise
        timers = {place: _timer(stage, place, micro_batch, shape, sequence_length) for place in places}
    # every part runs the same lengths in the same order, because peers meet inside the layers
    points = grid(sequence_length, stage.config.granularity_for(sequence_length), shortest_slice_on(engine.module))
    lengths = sorted({tokens for tokens, _ in points})
    try:
        with (
            untouched(engine.module, engine.weight_gradients.sums),
            guard_plain_attention(stage.config.attention == "intercept"),
        ):
            specs = _exchange_specs(stage, timers, lengths)
            measured: list[PartMeasured] = []
            for place, timer in timers.items():
                of_part = stage, place, timer, specs[place.part_id]
                measured.append(_measure_part(*of_part, lambda share: progress((len(measured) + share) / len(timers))))
    finally:
        engine.slice_store.reset()
    # links come last: nothing else runs beside them, as on a quiet network
    _measure_links(stage, wires, {part.part_id: part for part in measured}, specs)
    return measured


def _timer(
    stage: StageToPlan, place: Place, micro_batch: DrawnMicroBatch, shape: MicroBatchShape, length: int
) -> SliceTimer:
    engine, config, device = stage.engine, stage.config, torch.device(stage.engine.device)
    inputs = labels = None
    if place.is_first:
        own = SliceableTensors.of_inputs(micro_batch.inputs, shape.length, config.sequence_dim, config.sliced_inputs)
        inputs = own.stretched(length).to(device)
    if place.is_last and micro_batch.labels is not None:
        labels = micro_batch.labels.stretched(length).to(device)
    # the engine hands over tensors from a wire, and copies tensors from a part of its own stage
    autocast = partial(autocast_if_enabled, engine)
    activate(engine.module, place.chunk_id)
    of_hidden = LossOfHidden.of(engine.module, engine.weight_gradients, autocast) if labels is not None else None
    comes_by_wire = not place.is_first and stage.layout.owner(place.part_id - 1) != engine.stage_id
    return SliceTimer(
        engine.module,
        length,
        device,
        engine.slice_store,
        part_id=place.part_id,
        inputs=inputs,
        labels=labels,
        is_last=place.is_last,
        autocast=autocast,
        weights=engine.weight_gradients,
        clock=engine.slice_clock,
        sequence=sequence_ranks_of(engine.grid),
        can_split=not config.compile and getattr(engine.module, "split_backwards_problem", None) is None,
        rows=shape.rows,
        handed=HandedInputs(comes_by_wire and not config.offload_activations),
        of_hidden=of_hidden,
    )


def _exchange_specs(stage: StageToPlan, timers: Mapping[Place, SliceTimer], lengths: Sequence[int]) -> dict[int, Specs]:
    """Return the specs that this stage's parts, and the parts before them, send. Running them also warms slices up."""
    stage_id, layout, groups = stage.engine.stage_id, stage.layout, stage.groups
    specs: dict[int, Specs] = {part_id: {} for part_id in range(layout.num_parts)}
    for tokens in lengths:
        for place, timer in sorted(timers.items(), key=lambda item: item[0].part_id):
            part_id = place.part_id
            # this part receives the message of the part before
            if not place.is_first:
                source = layout.owner(part_id - 1)
                if source != stage_id:
                    announcement = MessageSpec.blank()
                    torch_dist.recv(announcement, groups.ranks[source], group=groups.control)
                    specs[part_id - 1][tokens] = MessageSpec.decode(announcement)
                timer.receive(tokens, specs[part_id - 1][tokens])
            activate(stage.engine.module, place.chunk_id)
            spec = specs[part_id][tokens] = timer.output_spec(tokens)
            if not place.is_last and layout.owner(part_id + 1) != stage_id:
                target = groups.ranks[layout.owner(part_id + 1)]
                torch_dist.send(spec.encode(), target, group=groups.control)
    return specs


def _measure_part(
    stage: StageToPlan, place: Place, timer: SliceTimer, specs: Specs, progress: Callable[[float], None]
) -> PartMeasured:
    """Return the costs of a part, whose links are still to be tried."""
    engine, config, world = stage.engine, stage.config, stage.groups.world
    activate(engine.module, place.chunk_id)
    granularity = config.granularity_for(timer.sequence_length)
    samples = time_part(timer, granularity, engine.num_stages, engine.micro_batches, group=world, progress=progress)
    # no rank counts bytes alone: its peers would run fewer slices
    everyone_counts = largest(not MemoryPeak.is_available(), world) == 0
    wire_format = config.links.forward if place.part_id >= config.links.exact_until_part else None
    memory = _part_memory(engine, timer, specs, wire_format) if everyone_counts else None
    layers = None
    # layers are for another cut: the ranking of all schedules, and readers of the profile's file
    if "auto" in (config.schedule, config.recompute) or config.planner.cache_dir is not None:
        kinds = kinds_of_part(engine.module, place.is_first, place.is_last)
        trials = Trials(stage.groups.peer_ranks, engine.global_rank, config.stall_timeout_s)
        layers = measure_layers(timer, kinds, samples, memory, trials)
    replica_id = engine.grid.get_data_parallel_rank()
    return PartMeasured(place.part_id, replica_id, samples, memory, layers)


# -- links -----------------------------------------------------------------------------------------------------------


def _measure_links(
    stage: StageToPlan, wires: Wires, measured: Mapping[int, PartMeasured], specs: Mapping[int, Specs]
) -> None:
    """Try each link with the smallest, a middle and the largest slice, one link of a stage at a time."""
    layout, stage_id = stage.layout, stage.engine.stage_id
    lengths = sorted(specs[next(iter(measured))])
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    for part in measured.values():
        part.message_s.update(dict.fromkeys(chosen, 0.0))
    homes = [layout.homes(part_id)[0] for part_id in range(layout.num_parts)]
    ways = ((part_id, (*ends[0], *ends[1])) for part_id, ends in enumerate(itertools.pairwise(homes)))
    between_stages = (way for way in ways if way[1][0] != way[1][2])
    # a stage that tries two links at once would share its time between them
    for links in rounds_of(between_stages, ends=lambda way: (way[1][0], way[1][2])):
        barrier(stage.groups.world)
        for part_id, ends in links:
            source, _, target, _ = ends
            if stage_id not in (source, target):
                continue
            sends = stage_id == source
            outgoing, incoming = wires.by_ends[ends] if sends else wires.by_ends[ends][::-1]
            for tokens in chosen:
                spec = specs[part_id][tokens]
                # the first trip loads kernels that pack; they would wait for a receive that is posted on the device
                out, back = (wire.by_host() if wire.streamed else wire for wire in (outgoing, incoming))
                _there_and_back(spec, out, back, sends)
                trips = [_there_and_back(spec, outgoing, incoming, sends) for _ in range(_LINK_REPEATS)]
                sent_s, own_s = map(statistics.median, zip(*trips, strict=True))
                measured[part_id if sends else part_id + 1].message_s[tokens] += own_s
                if sends:
                    both_ways = [*(outgoing.packing(spec) or spec).tensors, *(incoming.packing(spec) or spec).tensors]
                    num_bytes = sum(t.num_bytes for t in both_ways) // 2 or None
                    sample = LinkSample(tokens, sent_s, part_id, repeats=_LINK_REPEATS, num_bytes=num_bytes)
                    measured[part_id].links.append(sample)


def _there_and_back(spec: MessageSpec, outgoing: Wire, incoming: Wire, sends: bool) -> tuple[float, float]:
    """Return the seconds of one way, and the seconds of this stage's own time that one message takes.

    The wires and their directions are the same as in training: connecting other ends would keep a neighbour waiting. On
    a CPU the own time is all processor time of sending or receiving, on an accelerator only the time of the calls.
    """
    there = [torch.zeros(t.shape, dtype=t.dtype, device=outgoing.device) for t in spec.tensors]
    sender, receiver = SendChannel(outgoing), ReceiveChannel(incoming, lambda unit: spec)
    get_accelerator().synchronize()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    receiver.post((0, 0))
    called_s = time.perf_counter() - begin_s
    if not sends:
        receiver.wait((0, 0))
    again_s = time.perf_counter()
    sender.send(there, consumed_at=0, spec=spec)
    called_s += time.perf_counter() - again_s
    if sends:
        receiver.wait((0, 0))
    sender.keep_at_most(0)
    get_accelerator().synchronize()
    own_s = time.process_time() - begin_cpu_s if get_accelerator().is_synchronized_device() else called_s
    return (time.perf_counter() - begin_s) / 2, own_s / 2


# -- memory ----------------------------------------------------------------------------------------------------------


def _part_memory(engine: PipelineEngine, timer: SliceTimer, specs: Specs, wire_format: str | None) -> PartMemory:
    """Measure the bytes of a part: with a slice of a middle length, the smallest one and the whole sequence.

    If activations are packed in a `wire_format`, copies of them are on their way: as many as a link may have.
    """
    # four slices show which bytes grow with tokens, with the prefix, and not at all
    lengths, length = sorted(specs), timer.sequence_length
    smallest, tokens = lengths[0], lengths[len(lengths) // 2]
    points = [(tokens, length - tokens), (length, 0), (smallest, 0), (smallest, length - smallest)]
    middle, whole, small, late = (timer.slice_bytes(*point) for point in points)
    of_store = store_rates(timer.store.layers_of(timer.part_id, 0), length)
    rate = middle.kept / tokens
    # a sequence in one slice keeps its keys and values itself
    if tokens == length:
        rate = max(0.0, rate - of_store["store_bytes_per_token"])
    fixed, per_token, per_prefix = _line(small.working, late.working, whole.working, smallest, length)
    # messages ahead and one on its way; if the last stage has most bytes, one of its next two computations is a B
    received, sent = timer.received_bytes(tokens), sum(t.num_bytes for t in specs[tokens].tensors)
    links = (2 if timer.is_last else 1 + RECEIVE_AHEAD) * received + (1 + RECEIVE_AHEAD) * sent
    packing = Packing.of(wire_format, specs[tokens].tensors)
    links += 0 if packing is None else OUTSTANDING_SENDS * packing.num_bytes
    parameters = parameters_of_part(engine.module)
    trained = [p for p in parameters if p.requires_grad]
    # parameters wider than the dtype that the config has for sums keep their own
    sum_itemsize = engine.get_data_types()[1].itemsize
    gradients = sum(p.numel() * max(sum_itemsize, p.element_size()) for p in trained)
    drops = not (engine.zero_optimization() or engine.bfloat16_enabled())  # DeepSpeedEngine.zero_grad with each step
    # ZeRO-1's bucket, and if its states are on the host a buffer for a gradient that is cast to the dtype of its sum
    bucket = int(engine.zero_reduce_bucket_size()) if getattr(engine.optimizer, "contiguous_gradients", False) else 0
    largest = max((p.numel() for p in trained), default=0) if engine.zero_cpu_offload() else 0
    buffers = (bucket + largest) * sum_itemsize + largest * engine.get_data_types()[0].itemsize
    waiting, copied = (kept / tokens for kept in timer.weight_bytes(tokens))
    return PartMemory(
        static_bytes=_state_bytes(engine, parameters) + (0 if drops else gradients),
        slice_bytes_per_token=rate,
        # in the first backward the gradients of a layer come before all that it kept is gone
        working_bytes=fixed + (gradients // max(1, len(engine.module.forward_funcs)) if drops else buffers),
        working_bytes_per_token=per_token + links / tokens,
        working_bytes_per_prefix_token=per_prefix,
        staying_bytes_per_token=(received + sent) / tokens,
        working_sent_bytes_per_token=timer.received_bytes(length) / length,
        gradient_bytes=gradients if drops else 0,
        whole_bytes_per_token=max(0.0, whole.kept / length - rate),
        weight_bytes_per_token=waiting,
        joined_bytes_per_token=waiting if timer.joins_unsplit else 0,
        joined_tokens=timer.joined_tokens,
        working_copied_bytes_per_token=copied,
        step_bytes=_step_bytes(engine, sum(p.numel() for p in trained)),
        carried_bytes_per_slice=timer.store.carried.bytes_of(timer.part_id, 0),
        **of_store,
    )


def store_rates(layers: Sequence[LayerBytes], length: int) -> dict[str, float]:
    """Return the numbers of `PartMemory` for the bytes of the slice store with sequences of `length` tokens."""
    windowed = [(layer.window - 1, layer.keys_values, layer.grads) for layer in layers if layer.window is not None]
    keys_values, grads = (sum(layer[index] for layer in windowed) for index in (1, 2))
    return {
        "store_bytes_per_token": sum(layer.keys_values for layer in layers) / length,
        "store_grad_bytes_per_token": sum(layer.grads for layer in layers) / length,
        "windowed_store_bytes_per_token": keys_values / length,
        "windowed_grad_bytes_per_token": grads / length,
        "window_tokens": sum(tokens * num_bytes for tokens, num_bytes, _ in windowed) / max(1, keys_values),
    }


def _line(small: int, late: int, whole: int, smallest: int, length: int) -> tuple[int, float, float]:
    """Return fixed bytes, bytes per token and per token of prefix that reach three measured numbers of bytes.

    The three belong to the smallest slice at the start of the sequence, to the same slice at its end, where the
    gradients of the prefix show most, and to the whole sequence. Peaks are maxima of such lines, so peaks between these
    points lie below.
    """
    per_token = max(0.0, (whole - small) / (length - smallest)) if length > smallest else 0.0
    fixed = max(0.0, small - per_token * smallest)
    over = late - fixed - per_token * smallest
    return math.ceil(fixed), per_token, max(0.0, over / (length - smallest)) if length > smallest else 0.0


def _step_bytes(engine: PipelineEngine, trained: int) -> int:
    """Return `bytes_of_step`; an offloaded optimizer steps on the host."""
    if engine.optimizer is None or engine.zero_cpu_offload():
        return 0
    dtype, sum_dtype = (str(dtype).removeprefix("torch.") for dtype in engine.get_data_types())
    optimizer = DEEPSPEED_OPTIMIZERS.get(type(engine.optimizer).__name__, "")
    return bytes_of_step(trained, optimizer, dtype, sum_dtype, engine.seq_dp_world_size, is_narrow=_is_narrow(engine))


def _state_bytes(engine: PipelineEngine, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Count parameters, and the optimizer's states, which need not exist yet."""
    here = sum(p.numel() * p.element_size() for p in parameters)
    if engine.optimizer is None or engine.zero_cpu_offload():
        return here
    is_zero = engine.zero_optimization()  # which has fp32 copies of wide parameters too
    trained = [p for p in parameters if p.requires_grad]
    states, least = state_size(engine)
    master = least * sum(p.numel() for p in trained if is_zero or p.element_size() < 4)
    total = sum(p.numel() * max(least, p.element_size()) for p in trained) * states + master
    return here + total // state_ranks(engine)


def state_size(engine: PipelineEngine) -> tuple[int, int]:
    """Return how many states the optimizer keeps per parameter, and the least bytes of a number of them."""
    name = str(engine.optimizer_name() or "adam").lower()
    groups = [] if "muon" in name else getattr(engine.optimizer, "param_groups", [])  # its momentum is always there
    more = sum(any(group.get(option) for group in groups) for option in _MORE_STATES)
    states = more + next((tensors for known, tensors in _STATES.items() if known in name), 2)
    return states, 2 if _is_narrow(engine) else 4


def state_ranks(engine: PipelineEngine) -> int:
    """Return the ranks over which DeepSpeed divides the optimizer's states."""
    return engine.seq_dp_world_size if engine.zero_optimization() or engine.bfloat16_enabled() else 1


def _is_narrow(engine: PipelineEngine) -> bool:
    """Return whether the optimizer's copy of weights and its states have 16 bits (`bf16_master_weights_and_grads`)."""
    return getattr(engine.optimizer, "low_precision_master_weights_and_grads", False)
