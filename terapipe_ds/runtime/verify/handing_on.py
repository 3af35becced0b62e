"""Exchange between stages what the whole sequence gives, and notes of what each stage is busy with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.buffers import MicroBatchInFlight
from terapipe_ds.runtime.verify.layout import Layout, Same, TokenDim
from terapipe_ds.runtime.verify.runner import Values
from terapipe_ds.runtime.verify.stage import Inputs


def first_inputs(engine: Any, micro_batch: MicroBatchInFlight, device: torch.device) -> Inputs:
    """Return the tensors that the first layer gets, in the precision of training, and their layouts."""
    assert micro_batch.inputs is not None
    batch = micro_batch.inputs.to(device)
    tensors = batch.tensors
    if engine.fp16_auto_cast():
        tensors = tuple(engine._cast_inputs_half(t) for t in tensors)
    return Inputs(Values(tensors, batch.is_tuple), layouts_of_batch(batch))


def layouts_of_batch(batch: SliceableTensors) -> list[Layout]:
    """Return the layouts of the tensors that the first layer gets."""
    return [TokenDim(batch.dim) if is_cut else Same() for is_cut in batch.sliced]


def tell(engine: Any, stage_id: int, outputs: Inputs | None) -> None:
    """Send what the whole sequence gives to the stage of the next part; None where there is nothing to send.

    The message goes through the host: it is small, is sent once, and needs no wire of the training.
    """
    groups = engine._groups
    told = None if outputs is None else outputs.to(torch.device("cpu"))
    torch_dist.send_object_list([told], dst=groups.ranks[stage_id], group=groups.control)


def hear(engine: Any, stage_id: int, device: torch.device) -> Inputs | None:
    """Receive what the stage of the previous part sends by `tell`."""
    groups, told = engine._groups, [None]
    torch_dist.recv_object_list(told, src=groups.ranks[stage_id], group=groups.control)
    message: Inputs | None = told[0]
    return None if message is None else message.to(device)


def note(engine: Any, text: str) -> None:
    """Note what is being checked, here and on all other stages, which wait: a long check is no stall."""
    engine._watchdog.note(text)
    tell_others(engine, text)


def tell_others(engine: Any, text: str | None) -> None:
    """Tell all other stages what this stage is busy with; None says that it is done with its part."""
    groups = engine._groups
    for stage_id, peer in enumerate(groups.ranks):
        if stage_id != engine.stage_id:
            torch_dist.send_object_list([text], dst=peer, group=groups.control)


def hear_notes(engine: Any, stage_id: int) -> None:
    """Take the notes of `stage_id` until it is done with its part."""
    groups, told = engine._groups, ["waiting for the part before"]
    while told[0] is not None:
        engine._watchdog.note(told[0])
        torch_dist.recv_object_list(told, src=groups.ranks[stage_id], group=groups.control)
