"""``"verify": "first_batch"``: before the first step every stage checks its own layers on the first batch.

A collective over all ranks. Parts go one after the other, because a part begins with what the one before gives for
the whole sequence; then all hear of all findings, and all raise or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.buffers import MicroBatchInFlight
from terapipe_ds.runtime.checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.header import on_every_rank
from terapipe_ds.runtime.link import MessageSpec, TensorSpec
from terapipe_ds.runtime.parted import activate
from terapipe_ds.runtime.trials import Trials
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify.layout import Layout, PerSlice, Same, TensorPeersOf, TokenDim
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.report import Report, Told, VerifyError
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner, Values
from terapipe_ds.runtime.verify.stage import Inputs, StageFindings, check_loss, check_stage

logger = logging.getLogger("terapipe_ds")


def verify_first_batch(engine: Any, training: bool, micro_batches: Sequence[MicroBatchInFlight]) -> None:
    """Check the layers of ``engine`` once, on the first training batch, where the config says so.

    The first micro-batch that runs in several slices serves, with its inputs, labels and the weights of its losses.

    Parameters, gradients, buffers, random numbers and the data stay as they are.

    Raises:
        VerifyError: on every rank, where slices give another result than whole sequences on any of them.
        SystemExit: on every rank, with ``engine.verify_only`` (of ``terapipe_ds.run --verify``): 0, or 1 after a
            difference.
    """
    asked = engine.verify_only or engine.terapipe_config.verify == "first_batch"
    if not training or not asked or getattr(engine, "_verified", False):
        return
    sliced = next((one for one in micro_batches if one.plan.num_slices > 1), None)
    mine = StageFindings() if sliced is None else _check(engine, sliced)
    report = _reported(engine, mine, None if sliced is None else sliced.plan)
    engine._verified = sliced is not None and not report.findings  # a caller who goes on is told again
    if engine.verify_only:
        if engine.global_rank == 0:
            print(report, flush=True)
        raise on_every_rank(SystemExit(1 if report.findings else 0))
    if report.findings:
        raise on_every_rank(VerifyError(str(report))) from mine.error
    if engine.global_rank == 0:
        logger.info("%s", report)


def _reported(engine: Any, mine: StageFindings, plan: SlicePlan | None) -> Report:
    """What all ranks found."""
    group = engine._groups.world
    told = Told.of(mine, plan)
    everyone: list[Any] = [told]
    if group is not None:
        everyone = [None] * torch_dist.get_world_size()
        torch_dist.all_gather_object(everyone, told, group=group)
    return Report.of(everyone, copies=engine._groups.num_replicas * _tensor_size(engine))


def _tensor_size(engine: Any) -> int:
    return int(engine.grid.get_slice_parallel_world_size())


def _check(engine: Any, micro_batch: MicroBatchInFlight) -> StageFindings:
    """This rank's parts, each in its turn."""
    layout, mine, device = engine._layout, engine.stage_id, torch.device(engine.device)
    weights, peers, found = _weights(engine, micro_batch), _peers(engine), StageFindings()
    inputs: Inputs | None = None
    with untouched(engine.module):
        for part_id in range(layout.num_parts):
            (stage_id, chunk_id), next_id = layout.homes(part_id)[0], part_id + 1
            follows = layout.owner(next_id) if next_id < layout.num_parts else None
            if stage_id != mine:
                _hear_notes(engine, stage_id)
                if follows == mine:
                    inputs = _hear(engine, stage_id, device)
                continue
            if part_id == 0:
                inputs = _first_inputs(engine, micro_batch, device)
            part = StageFindings()
            if inputs is not None:
                activate(engine.module, chunk_id)
                part = _check_part(engine, micro_batch, part_id, inputs, weights, peers)
                found.add(part)
            _tell_others(engine, None)
            inputs = part.outputs
            if follows is not None and follows != mine:
                _tell(engine, follows, inputs)
    return found


def _check_part(
    engine: Any, micro_batch: MicroBatchInFlight, part_id: int, inputs: Inputs, weights: tuple[float, ...],
    peers: TensorPeersOf,
) -> StageFindings:  # fmt: skip
    module, plan = engine.module, micro_batch.plan
    runner = Runner(module, plan, part_id, autocast=partial(autocast_if_enabled, engine))
    found = check_stage(runner, layers_of(module), inputs, weights, peers, partial(_note, engine))
    is_last = part_id == engine._layout.num_parts - 1
    if is_last and found.outputs is not None and module.loss_fn is not None and micro_batch.labels is not None:
        labels, config = micro_batch.labels.to(torch.device(engine.device)), engine.terapipe_config
        check_loss(
            found,
            lambda last: LossCheck(
                module.loss_fn, labels, plan, last.values, last.layouts, weights, config.loss_reduction,
                config.ignore_index, peers,
            ),
            module._local_stop,
            peers,
        )  # fmt: skip
    return found


def layers_of(module: Any) -> list[tuple[NamedLayer, Any]]:
    """The layers of a stage, each with the checkpointing that ``PipelineModule.forward`` runs it under."""
    interval = module.activation_checkpoint_interval
    layers = []
    for index, function in enumerate(module.forward_funcs):
        checkpointed = interval > 0 and module.is_checkpointable_results[index // interval]
        checkpoint = checkpoint_with_gradients(module.activation_checkpoint_func) if checkpointed else None
        layers.append((NamedLayer(index + module._local_start, function), checkpoint))
    return layers


def _weights(engine: Any, micro_batch: MicroBatchInFlight) -> tuple[float, ...]:
    """Of the slices' losses, which the stage of the last part knows; on every stage."""
    told = [micro_batch.weights]
    if engine._groups.control is not None:
        source = engine._groups.ranks[engine._layout.loss_stage]
        torch_dist.broadcast_object_list(told, src=source, group=engine._groups.control)
    return told[0]


def _peers(engine: Any) -> TensorPeersOf:
    size = _tensor_size(engine)
    if size == 1:
        return TensorPeersOf()
    group = engine.grid.get_slice_parallel_group()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(tensor) for _ in range(size)]
        torch_dist.all_gather(everyone, tensor, group=group)
        return torch.cat(everyone)

    def exchange(mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * size
        torch_dist.all_gather_object(everyone, mine, group=group)
        return everyone

    return TensorPeersOf(size, int(engine.grid.get_slice_parallel_rank()), gather, exchange, Trials.of(engine))


# -- what stages hand on ---------------------------------------------------------------------------------------------


def _first_inputs(engine: Any, micro_batch: MicroBatchInFlight, device: torch.device) -> Inputs:
    assert micro_batch.inputs is not None
    batch = micro_batch.inputs.to(device)
    tensors = batch.tensors
    if engine.fp16_auto_cast():
        tensors = tuple(engine._cast_inputs_half(t) for t in tensors)
    return Inputs(Values(tensors, batch.is_tuple), layouts_of_batch(batch))


def layouts_of_batch(batch: SliceableTensors) -> list[Layout]:
    """Of the tensors that the first layer gets."""
    return [TokenDim(batch.dim) if is_cut else Same() for is_cut in batch.sliced]


def _tell(engine: Any, stage_id: int, outputs: Inputs | None) -> None:
    """Send what the whole sequence gives to the stage of the next part; None where there is nothing."""
    groups = engine._groups
    peer = groups.ranks[stage_id]
    if outputs is None:
        torch_dist.send_object_list([None], dst=peer, group=groups.control)
        return
    tensors = outputs.values.tensors
    spec = MessageSpec(tuple(TensorSpec.of(t) for t in tensors), outputs.values.is_tuple)
    layouts = [_on_host(layout) for layout in outputs.layouts]
    torch_dist.send_object_list([(spec, layouts)], dst=peer, group=groups.control)
    wire = groups.wire("activations", stage_id, towards=True, device=torch.device(engine.device))
    for tensor in tensors:
        torch_dist.send(wire.outgoing(tensor), peer, group=wire.group)


def _hear(engine: Any, stage_id: int, device: torch.device) -> Inputs | None:
    """What the stage of the part before sends by :func:`_tell`."""
    groups = engine._groups
    peer, told = groups.ranks[stage_id], [None]
    torch_dist.recv_object_list(told, src=peer, group=groups.control)
    message: Any = told[0]
    if message is None:
        return None
    spec, layouts = message
    wire = groups.wire("activations", stage_id, towards=False, device=device)
    tensors = []
    for each in spec.tensors:
        buffer = wire.buffer(each)
        torch_dist.recv(buffer, peer, group=wire.group)
        tensors.append(wire.incoming(buffer, each).requires_grad_(each.requires_grad))
    return Inputs(Values(tuple(tensors), spec.is_tuple), [_on_device(layout, device) for layout in layouts])


def _note(engine: Any, text: str) -> None:
    """Remember what goes on, here and on all other stages, which wait: a long check is no stall."""
    engine._watchdog.note(text)
    _tell_others(engine, text)


def _tell_others(engine: Any, text: str | None) -> None:
    """What this stage is busy with; None: it is done with its part."""
    groups = engine._groups
    for stage_id, peer in enumerate(groups.ranks):
        if stage_id != engine.stage_id:
            torch_dist.send_object_list([text], dst=peer, group=groups.control)


def _hear_notes(engine: Any, stage_id: int) -> None:
    """Until ``stage_id`` is done with its part."""
    groups, told = engine._groups, ["waiting for the part before"]
    while told[0] is not None:
        engine._watchdog.note(told[0])
        torch_dist.recv_object_list(told, src=groups.ranks[stage_id], group=groups.control)


def _on_host(layout: Layout) -> Layout:
    return PerSlice(tuple(v.detach().cpu() for v in layout.values)) if isinstance(layout, PerSlice) else layout


def _on_device(layout: Layout, device: torch.device) -> Layout:
    return PerSlice(tuple(v.to(device) for v in layout.values)) if isinstance(layout, PerSlice) else layout
