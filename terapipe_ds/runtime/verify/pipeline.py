"""Before the first step every stage checks its own layers on a cut of the first batch, and the last one the loss.

A collective over all ranks. Parts go one after the other, because a part begins with what the one before gives for
the whole sequence; then all hear of all findings, and all raise or none does.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.agreement import gather as gather_objects
from terapipe_ds.runtime.buffers import MicroBatchInFlight
from terapipe_ds.runtime.checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.loss import slice_counts
from terapipe_ds.runtime.parted import activate
from terapipe_ds.runtime.trials import Trials
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify.cut import MOST_ROWS, Cut, Cuttable, choose_window, row_dim, window_plan
from terapipe_ds.runtime.verify.handing_on import first_inputs, hear, hear_notes, note, tell, tell_others
from terapipe_ds.runtime.verify.later_labels import LaterLabels, can_watch, is_even
from terapipe_ds.runtime.verify.layout import TensorPeersOf, likely_layouts
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.own import all_own
from terapipe_ds.runtime.verify.report import Report, Told, VerifyError
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner
from terapipe_ds.runtime.verify.stage import (
    Finding,
    Inputs,
    StageFindings,
    check_loss,
    check_stage,
    look_at_loss,
    run_stage,
)

logger = logging.getLogger("terapipe_ds")


def verify_first_batch(engine: Any, training: bool, micro_batches: Sequence[MicroBatchInFlight]) -> None:
    """Compare slices with whole sequences, once: on a cut of the first training batch that is sliced, the layers of
    ``engine`` where the config says so, and the loss in any case; where it has no value there, on a later batch.

    Parameters, gradients, buffers, random numbers and the data stay as they are.

    Raises:
        TeraPipeConfigError: on every rank, where nobody says how tuples of labels weigh the losses of slices.
        VerifyError: on every rank, where slices give another result than whole sequences on any of them.
        SystemExit: on every rank, with ``engine.verify_only`` (of ``terapipe_ds.run --verify``): 0, or 1 after a
            difference. The whole micro-batch is looked at then, with the plan that it is trained with.
    """
    if engine.verified or (not training and (engine.labels_agreed or not engine._compute_loss)):
        return
    sliced = next((one for one in micro_batches if one.plan.num_slices > 1), None)
    is_sliced, with_layers = _agreed(engine, sliced)
    again = engine.loss_waits
    with_layers = with_layers and not again
    engine.labels_agreed = is_sliced
    if not training or not (is_sliced or engine.verify_only):
        return
    report = replace(_report(engine, micro_batches, with_layers), only_loss=again)
    if engine.verify_only:
        if engine.global_rank == 0:
            print(report, flush=True)
        raise RaisedEverywhere(SystemExit(1 if report.findings else 0))
    if report.findings:  # a caller who goes on is told again
        raise RaisedEverywhere(VerifyError(str(report)))
    engine.verified, engine.loss_waits = not report.loss_waits, report.loss_waits
    if engine.global_rank == 0 and not (again and report.loss_waits):
        logger.log(logging.WARNING if report.fell_short else logging.INFO, "%s", report)


def _agreed(engine: Any, sliced: MicroBatchInFlight | None) -> tuple[bool, bool]:
    """Whether any pipeline has slices, and whether layers are compared: stages hold different ones."""
    groups, config = engine._groups, engine.terapipe_config
    if sliced is None and groups.everyone is None:  # all stages of the only pipeline have the same plans
        return False, True
    mine = (sliced is not None, not all_own(engine.module), sliced is not None and _is_unweighted(engine, sliced))
    flags = torch.tensor(mine, dtype=torch.int64)
    if groups.world is not None:
        torch_dist.all_reduce(flags, op=torch_dist.ReduceOp.MAX, group=groups.world)
    is_sliced, foreign, unweighted = map(bool, flags.tolist())
    if unweighted:
        raise RaisedEverywhere(TeraPipeConfigError(_UNWEIGHTED))
    return is_sliced, engine.verify_only or config.verify == "first_batch" or (config.verify is None and foreign)


_UNWEIGHTED = (
    "the labels are a tuple of tensors, and nobody says how much each slice counts in the loss of its sequence: with a "
    "mask or weights beside the labels, not every label counts alike. Give loss_fn a method slice_weight(labels) that "
    "returns what loss_fn divides its sum by (for (labels, loss_mask) the sum of the mask), or say in "
    'terapipe.loss_reduction that it is "mean_valid" (over labels of the first tensor other than ignore_index), "mean" '
    'or "sum"'
)


def _is_unweighted(engine: Any, micro_batch: MicroBatchInFlight) -> bool:
    labels, config = micro_batch.labels, engine.terapipe_config
    is_said = "loss_reduction" in config.model_fields_set or hasattr(engine.module.loss_fn, "slice_weight")
    return labels is not None and len(labels.tensors) > 1 and not is_said


def _report(engine: Any, micro_batches: Sequence[MicroBatchInFlight], with_layers: bool) -> Report:
    """What all ranks found, on a cut; and on the whole micro-batch where all that was found is that something cannot
    run on a cut, or where that is all that is asked for."""
    begin_s = time.monotonic()
    sliced = [one for one in micro_batches if one.plan.num_slices > 1]
    for whole in (True,) if engine.verify_only else (False, True):
        mine, cut = StageFindings(), None
        if sliced:
            which, cut, failed = _cut(engine, sliced, len(micro_batches), whole)
            mine.findings += failed
            if not failed:
                cut_out = replace(sliced[which], **_tensors_of(sliced[which], cut))
                mine = _check(engine, cut_out, cut, with_layers)
                mine.findings += _of_other_labels(engine, micro_batches)
        report = _gathered(engine, Told.of(mine, cut), with_layers, time.monotonic() - begin_s)
        if not report.findings or not all(finding.is_of_the_cut for finding in report.findings):
            break
    if not get_accelerator().is_synchronized_device():
        get_accelerator().empty_cache()  # training begins with the memory that it would have
    return report


def _gathered(engine: Any, told: Told, with_layers: bool, took_s: float) -> Report:
    """What all ranks found."""
    group = engine._groups.world
    everyone: list[Any] = [told]
    if group is not None:
        everyone = [None] * torch_dist.get_world_size()
        torch_dist.all_gather_object(everyone, told, group=group)
    return Report.of(everyone, engine._groups.num_replicas * _tensor_size(engine), with_layers, took_s)


def _tensor_size(engine: Any) -> int:
    return int(engine.grid.get_slice_parallel_world_size())


def _cut(
    engine: Any, sliced: Sequence[MicroBatchInFlight], num_micro_batches: int, whole: bool
) -> tuple[int, Cut, list[Finding]]:
    """Which micro-batch is looked at, and what of it: the first one in which labels count, if any. All stages say what
    may be cut of the tensors that they have; that of the last part, which has the labels, decides. What
    ``slice_weight`` raises there is found on all stages."""
    mine = [[Cuttable.of(b) for b in (one.inputs, one.labels) if b is not None] for one in sliced]
    groups, is_mine = engine._groups, engine.stage_id == engine._layout.loss_stage
    told: list[Any] = [mine]
    if groups.control is not None:
        told = [None] * len(groups.ranks)
        torch_dist.all_gather_object(told, mine, group=groups.control)
    chosen: list[Any] = [(0, _whole(sliced[0]), [])]
    for which, one in enumerate(sliced) if is_mine else ():
        try:
            cuttable = functools.reduce(Cuttable.both, itertools.chain(*(each[which] for each in told)))
            cut = _whole(one) if whole else _choose(engine, one, num_micro_batches, cuttable)
            cut = _weighted(engine, one, cut)
        except Exception as error:
            kind, who = type(error).__name__, "slice_weight of loss_fn"
            finding = Finding(engine.module._local_stop, who, f"raised {kind}: {error}", "", True, kind)
            chosen = [(which, _whole(one), [finding])]
            break
        if which == 0 or cut.has_labels:
            chosen = [(which, cut, [])]
        if cut.has_labels:
            break
    if groups.control is not None:
        torch_dist.broadcast_object_list(chosen, src=groups.ranks[engine._layout.loss_stage], group=groups.control)
    decided: tuple[int, Cut, list[Finding]] = chosen[0]
    return decided


def _whole(micro_batch: MicroBatchInFlight) -> Cut:
    return Cut(micro_batch.plan, micro_batch.plan.sequence_length)


def _choose(engine: Any, micro_batch: MicroBatchInFlight, num_micro_batches: int, cuttable: Cuttable) -> Cut:
    config, plan, labels = engine.terapipe_config, micro_batch.plan, micro_batch.labels
    assert labels is not None
    of_rows = cuttable.rows or 1
    rows = MOST_ROWS if of_rows > MOST_ROWS else None
    unit = engine.slice_length_multiple
    if cuttable.tokens:
        granularity, stages = config.granularity_for(plan.sequence_length), engine._layout.num_stages
        all_rows = labels.deciding.size(row_dim(labels)) if labels.deciding.dim() > 1 else 1
        plan, unit = window_plan(plan, granularity, unit, all_rows, num_micro_batches, stages, rows or all_rows)
    weight = getattr(engine.module.loss_fn, "slice_weight", None)
    counts = partial(slice_counts, ignore_index=config.ignore_index, slice_weight=weight)
    row, start, _ = choose_window(labels, plan, rows, unit, config.ignore_index, counts)
    return Cut(plan, labels.length, start, row, rows, of_rows)


def _weighted(engine: Any, micro_batch: MicroBatchInFlight, cut: Cut) -> Cut:
    """With the weights of the slices' losses; those of the tokens where no label counts."""
    labels, config = micro_batch.labels, engine.terapipe_config
    assert labels is not None
    weight = getattr(engine.module.loss_fn, "slice_weight", None)
    if sum(slice_counts(cut.of(labels), cut.plan, config.ignore_index, weight)) <= 0:
        shares = tuple(length / cut.plan.sequence_length for length in cut.plan.lengths)
        return replace(cut, weights=shares, has_labels=False)
    return replace(cut, weights=engine.weights_of_slices(cut.of(labels), cut.plan))


def _tensors_of(micro_batch: MicroBatchInFlight, cut: Cut) -> dict[str, Any]:
    """What of a micro-batch is otherwise in a cut of it."""
    inputs, labels = (None if batch is None else cut.of(batch) for batch in (micro_batch.inputs, micro_batch.labels))
    return {"plan": cut.plan, "inputs": inputs, "labels": labels, "weights": cut.weights}


def _check(engine: Any, micro_batch: MicroBatchInFlight, cut: Cut, with_layers: bool) -> StageFindings:
    """This rank's parts, each in its turn."""
    layout, mine, device = engine._layout, engine.stage_id, torch.device(engine.device)
    peers, found = _peers(engine), StageFindings()
    inputs: Inputs | None = None
    with untouched(engine.module, with_gradients=False):
        for part_id in range(layout.num_parts):
            (stage_id, chunk_id), next_id = layout.homes(part_id)[0], part_id + 1
            follows = layout.owner(next_id) if next_id < layout.num_parts else None
            if stage_id != mine:
                hear_notes(engine, stage_id)
                if follows == mine:
                    inputs = hear(engine, stage_id, device)
                continue
            if part_id == 0:
                inputs = first_inputs(engine, micro_batch, device)
            part = StageFindings()
            if inputs is not None:
                activate(engine.module, chunk_id)
                part = _check_part(engine, micro_batch, part_id, inputs, peers, with_layers, cut)
                found.add(part)
            tell_others(engine, None)
            inputs = part.outputs
            if follows is not None and follows != mine:
                tell(engine, follows, inputs)
    return found


def _check_part(
    engine: Any, micro_batch: MicroBatchInFlight, part_id: int, inputs: Inputs, peers: TensorPeersOf, with_layers: bool,
    cut: Cut,
) -> StageFindings:  # fmt: skip
    module, plan, weights = engine.module, micro_batch.plan, micro_batch.weights
    runner = Runner(module, plan, part_id, autocast=partial(autocast_if_enabled, engine))
    if with_layers:
        found = check_stage(runner, layers_of(module), inputs, weights, peers, partial(note, engine))
    else:
        found = run_stage(runner, layers_of(module), inputs, peers)
    is_last = part_id == engine._layout.num_parts - 1
    if is_last and module.loss_fn is None and not with_layers:
        found.notes.append("the loss was not compared: the model computes it itself")
    if not is_last or found.outputs is None or module.loss_fn is None or micro_batch.labels is None:
        return found
    _compare_loss(engine, found, micro_batch, peers, with_layers, cut, part_id)
    if is_even(weights, plan):
        engine.later_labels = _later_labels(engine, found, cut, part_id)
    return found


def _compare_loss(
    engine: Any, found: StageFindings, micro_batch: MicroBatchInFlight, peers: TensorPeersOf, with_layers: bool,
    cut: Cut, part_id: int,
) -> None:  # fmt: skip
    """Compare the loss on what the last layer gave; with layers that were not compared, how it is cut is guessed."""
    assert found.outputs is not None and micro_batch.labels is not None
    module, plan, config = engine.module, micro_batch.plan, engine.terapipe_config
    if not cut.has_labels:
        found.notes.append("the loss was not compared: no label counts in this batch")
        found.loss_waits = True
        return
    labels = micro_batch.labels.to(torch.device(engine.device))

    def check(last: Inputs) -> LossCheck:
        return LossCheck(
            module.loss_fn, labels, plan, last.values, last.layouts, micro_batch.weights, config.loss_reduction,
            config.ignore_index, peers, part_id,
        )  # fmt: skip

    if with_layers:
        check_loss(found, check, module._local_stop, peers)
    else:
        layouts = likely_layouts(found.outputs.values.tensors, plan, config.sequence_dim, peers)
        look_at_loss(found, check, module._local_stop, layouts, peers)


def _later_labels(engine: Any, found: StageFindings, cut: Cut, part_id: int) -> LaterLabels | None:
    """What watches for labels that tell the reductions apart, where `loss_reduction` decides and the first batch did
    not. Not under tensor parallelism, whose ranks would have to compare together while each draws its data."""
    config, layouts = engine.terapipe_config, found.loss_layouts
    is_decided = hasattr(engine.module.loss_fn, "slice_weight") or config.loss_reduction == "sum"
    if is_decided or layouts is None or not can_watch(layouts) or _tensor_size(engine) > 1:
        return None
    assert found.outputs is not None
    return LaterLabels(Inputs(found.outputs.values, layouts), cut.rows, engine.module.loss_fn, config, part_id)


def _of_other_labels(engine: Any, micro_batches: Sequence[MicroBatchInFlight]) -> list[Finding]:
    """What the labels of the batch's other micro-batches tell of the loss, where those of the cut do not."""
    try:
        for micro_batch in micro_batches:
            if micro_batch.labels is not None:
                engine.look_at_labels(micro_batch.labels)
    except VerifyError as error:
        return [Finding(engine.module._local_stop, "loss_fn", str(error))]
    return []


def layers_of(module: Any) -> list[tuple[NamedLayer, Any]]:
    """The layers of a stage, each with the checkpointing that ``PipelineModule.forward`` runs it under."""
    interval = module.activation_checkpoint_interval
    layers = []
    for index, function in enumerate(module.forward_funcs):
        checkpointed = interval > 0 and module.is_checkpointable_results[index // interval]
        checkpoint = checkpoint_with_gradients(module.activation_checkpoint_func) if checkpointed else None
        layers.append((NamedLayer(index + module._local_start, function), checkpoint))
    return layers


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
        return gather_objects(mine, group)

    return TensorPeersOf(size, int(engine.grid.get_slice_parallel_rank()), gather, exchange, Trials.of(engine))
