"""Check the layers of every stage on a cut of the first batch, and the loss on the last stage, before the first step.

This is a collective over all ranks. Parts go one after the other, because a part begins with the outputs of the part
before it. Then all ranks get all findings, and either all raise or none does.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import logger
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.agreement import RaisedEverywhere, exchange
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.batch.loss_weights import LossKindError, SliceLossError, slice_counts, weights_of
from terapipe_ds.runtime.failures.trials import Trials
from terapipe_ds.runtime.layers.activation_checkpointing import keeps_attention
from terapipe_ds.runtime.layers.compiled import layers_as_they_are
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.sliceable import kind_of_loss, problem_of_gradient_hooks
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.layout.parted_module import activate
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.verify.cut import MOST_ROWS, Cut, cuttable, num_rows, unit_of, window_plan
from terapipe_ds.runtime.verify.documents import DocumentCheck, window_of_documents
from terapipe_ds.runtime.verify.labels import LabelProbe
from terapipe_ds.runtime.verify.layer import LayerCheck
from terapipe_ds.runtime.verify.loss import LossCheck, reported_so_far
from terapipe_ds.runtime.verify.named_layer import all_own, layers_of
from terapipe_ds.runtime.verify.stage import Finding, Findings, StageCheck, VerifyError, inputs_of
from terapipe_ds.runtime.verify.tokens import Activations, Slicing, TensorRanks

_UNWEIGHTED = (
    "the labels are a tuple of tensors, and it is unknown how much each slice counts in the loss of its sequence: with "
    "a mask or weights beside them, not every label counts alike. Give loss_fn a method slice_weight(labels) that "
    "returns what loss_fn divides its sum by (for (labels, loss_mask) the sum of the mask), or say in "
    'terapipe.loss_reduction that it is "mean_valid" (over labels of the first tensor other than ignore_index), "mean" '
    'or "sum"'
)
_ELSEWHERE = (
    "verify: slices do not give what the whole sequence gives, first in {}; the error of rank 0 names the layers"
)
_NOT_YET = (
    "verify: an evaluation compares no layers, and no training batch has yet. Layers that mix tokens themselves give "
    "wrong results in slices, and nothing shows it: train on a batch first, or evaluate with terapipe.slices 1"
)
_GROWTH = 1.5  # a curriculum of lengths causes few checks


class FirstBatchCheck:
    """Compare slices with whole sequences: on a cut of the first training batch that is sliced.

    It compares layers if the config says so, and always the loss; if the loss has no value on the first batch, it uses
    a later batch. The check runs again when sequences have become half as long again, when micro-batches with
    several rows follow those with one, when slices begin within blocks of tokens that were whole before, and after
    `renew`, when the model has changed. It does not change parameters, gradients, buffers, random numbers and the data.
    """

    def __init__(self, stage: StageToPlan, note: Callable[[str], None]) -> None:
        self._groups, self._config, self._layout = stage.groups, stage.config, stage.layout
        self._engine, self._module, self._token_multiple = stage.engine, stage.engine.module, stage.token_multiple
        self._device = torch.device(stage.engine.device)
        self._note = note  # tells the watch-dog the current work of this rank
        trials = Trials(stage.groups.peer_ranks, stage.engine.global_rank, stage.config.stall_timeout_s)
        self._tensor_ranks = TensorRanks.of(stage.engine.grid, trials)
        self._slice_weight = getattr(self._module.loss_fn, "slice_weight", None)
        peers = stage.groups.peers
        self._shares = len(stage.groups.peer_ranks) if peers is not None and peers.kind == "sequence" else 1
        self._weights: WeightGradients | None = None  # if slices of the first batch leave weight gradients
        self._splits = False  # they leave them to W, not to the B of another slice
        self._had_one_row = False  # the loss agreed on one row: a mean of means over rows looks like any other mean
        self._num_micro_batches = 0  # of the first batch
        self._labels: list[SliceableTensors] = []  # of all micro-batches of the first batch
        self._probe: LabelProbe | None = None  # tries labels that first appear later
        self._warns = self._config.verify != "off"  # of an evaluation in slices: no batch has compared layers yet
        self.renew()

    def renew(self) -> None:
        """Check the next training batch as the first one. Every rank must call this between the same batches."""
        self._is_done = False
        self._is_evaluated = False  # the loss agreed in an evaluation, before the first training batch
        self._are_documents_apart = self._config.documents == "off" or self._config.verify == "off"
        self._longest = 0  # tokens of the longest sequence whose layers agreed
        self._unit = 0  # layers agreed on slices that begin at multiples of this; 0: they were not compared
        self._loss_waits = False  # layers agree, and the loss is compared on the next batch with a value

    def run(self, batch: BatchInFlight, needs_loss: bool, ends: bool) -> None:
        """Check the first batch, if this is it. With `ends`, check a whole micro-batch and then end the process.

        Raises:
            TeraPipeConfigError: on every rank, if it is unknown how tuples of labels weigh the losses of slices.
            VerifyError: on every rank, if slices give another result than whole sequences on any. Rank 0 has the
                report, the others name the first layer.
            SystemExit: on every rank, with `ends`: 0, or 1 after a difference.
        """
        micro_batches, training = batch.micro_batches, batch.training
        self._check_documents(micro_batches)
        # an evaluation before the first training batch, or with another loss, needs right weights of slices
        if not training and (self._is_done or (self._is_evaluated if needs_loss else not self._warns)):
            return
        sliced = self._that_show_more(micro_batches)
        if self._is_done and not sliced:
            return
        longest = max((one.plan.sequence_length for one in sliced), default=0)
        has_slices, has_foreign_layers, is_more = self._agree(sliced, needs_loss)
        if not (has_slices or (ends and training)):
            return
        if not training and self._warns and has_foreign_layers and torch_dist.get_rank() == 0:
            logger.warning("%s", _NOT_YET)
        self._warns &= training  # once
        if not (training or needs_loss):
            return
        # layers that agreed on an earlier batch are not compared again, if only the loss waits
        setting, ends = self._config.verify, ends and training
        again = not training or (self._loss_waits and not is_more)
        with_layers = (ends or setting == "first_batch" or (setting is None and has_foreign_layers)) and not again
        weights = self._engine.weight_gradients
        checkpoints = self._module.activation_checkpoint_interval > 0
        self._weights = weights if batch.split or weights.joins_unsplit(checkpoints) else None
        self._splits = bool(batch.split)
        begin_s = time.monotonic()
        # the check inspects each operation of a layer, runs it in fp64, and needs gradients in an evaluation as well
        with layers_as_they_are(), torch.inference_mode(False), torch.enable_grad():
            result = self._check(sliced, micro_batches, with_layers, ends)
        text = result.text(time.monotonic() - begin_s, only_loss=again)
        self._raise(result.findings, text, ends, training)
        if not training:
            self._is_evaluated = not result.loss_waits
            return
        if with_layers:
            self._warns = False
            self._longest = max(self._longest, longest)
            plans = [one.plan for one in one_per_plan(sliced)] + ([] if result.cut is None else [result.cut.plan])
            self._unit = math.gcd(self._unit, *map(unit_of, plans))
        self._had_one_row = bool(sliced) and sliced[0].shape.rows == 1
        self._is_done |= not result.loss_waits
        self._loss_waits = not self._is_done
        if torch_dist.get_rank() == 0 and not (again and result.loss_waits):
            logger.log(logging.WARNING if result.notes else logging.INFO, "%s", text)

    def _that_show_more(self, micro_batches: Sequence[MicroBatchInFlight]) -> list[MicroBatchInFlight]:
        """Return the micro-batches with slices, long ones and those with several rows first; later only what is new."""
        # the share of each sequence rank is a slice of its own: a layer whose tokens may lie on several ranks must meet
        # the same conditions; each rank checks all shares, without exchanges, because all of them draw whole sequences
        if self._shares > 1:
            micro_batches = [replace(one, plan=one.plan.divided(self._shares)) for one in micro_batches]
        sliced = [one for one in micro_batches if one.plan.num_slices > 1]
        sliced.sort(key=lambda one: (-one.plan.sequence_length, one.shape.rows == 1))
        if self._is_done and not (sliced and self._is_long(sliced[0])):
            rows_are_new = self._had_one_row
            return [one for one in sliced if (rows_are_new and one.shape.rows > 1) or _parts(self._unit, one.plan)]
        return sliced

    def _check_documents(self, micro_batches: Sequence[MicroBatchInFlight]) -> None:
        """Check the first rows of several documents. Other pipelines may have none in this batch, but may fail too."""
        if self._are_documents_apart or not micro_batches[0].shape.is_any_packed:
            return
        packed = next((one for one in micro_batches if one.shape.starts is not None), None)
        may_cut = None if packed is None or packed.inputs is None else cuttable(packed.inputs)
        everyone = exchange((packed is not None, all_own(self._module), may_cut), self._groups.world)
        num_packed = sum(is_packed for is_packed, *_ in everyone)
        self._are_documents_apart = True
        if self._config.verify is None and all(are_own for _, are_own, _ in everyone):
            return
        begin_s, first = time.monotonic(), self._groups.ranks[self._layout.owner(0)] if len(everyone) > 1 else 0
        # a second time for layers that cannot run on a few tokens
        for may_cut in (everyone[first][2], (None, False)):
            found = Findings() if packed is None else self._findings_of_documents(packed, may_cut or (None, False))
            result = Findings.of_all(exchange(found, self._groups.world), num_packed // self._layout.num_stages)
            if not any(finding.is_of_the_cut for finding in result.findings):
                break
        if result.findings:
            self._are_documents_apart = False  # a caller who goes on gets the error again
            counted = f" (tokens count from {result.cut.start} on)" if result.cut is not None else ""
            head = f"verify: layers do not keep to the documents of a row{counted}:"
            lines = [head, *map(str, result.findings)]
            raise RaisedEverywhere(VerifyError("\n  ".join(lines)))
        if torch_dist.get_rank() == 0:
            text = (
                f"verify: {result.num_layers} layers keep to the documents of a row, {time.monotonic() - begin_s:.2g} s"
            )
            logger.log(logging.WARNING if result.notes else logging.INFO, "%s", "; ".join([text, *result.notes]))

    def _findings_of_documents(self, micro_batch: MicroBatchInFlight, may_cut: tuple[int | None, bool]) -> Findings:
        """Return this rank's findings around the start of a document."""
        cut = window_of_documents(micro_batch, may_cut, max(self._token_multiple // self._shares, 1))
        found = Findings(cut=cut)
        with layers_as_they_are(), torch.inference_mode(False):
            self._check_parts(micro_batch, found, cut, DocumentCheck)
        get_accelerator().empty_cache()
        return found

    def _raise(self, findings: Sequence[Finding], text: str, ends: bool, training: bool) -> None:
        """Raise the error of this rank if there are findings, or SystemExit if the user wants only the check."""
        if ends:  # its report is the result of the process
            if torch_dist.get_rank() == 0:
                print(text, flush=True)
            raise RaisedEverywhere(SystemExit(1 if findings else 0))
        if not findings:
            return
        # a caller who goes on gets the error again
        if findings[0].raised == LossKindError.__name__:
            if training:  # an evaluation may ask for several losses, and refuses other kinds by itself
                raise RaisedEverywhere(SliceLossError(findings[0].problem.partition(": ")[2]))
        elif self._is_done and self._groups.everyone is not None:  # the other pipelines do not take part
            raise VerifyError(text)
        else:
            text = text if torch_dist.get_rank() == 0 else _ELSEWHERE.format(findings[0].layer)
            raise RaisedEverywhere(VerifyError(text))

    def look_at_labels(self, labels: SliceableTensors) -> None:
        """Raise VerifyError if new kinds of labels appear, and slices do not treat them like the whole."""
        # a new kind of loss is tried with its batch
        if self._probe is None or kind_of_loss(self._probe.loss_fn) != kind_of_loss(self._module.loss_fn):
            return
        try:
            problem = self._probe.look(labels, is_later=True)
        except Exception as error:
            self._probe, problem = None, None
            logger.warning("labels that appear for the first time are no longer tried on the loss: %s", error)
        if problem is not None:
            raise VerifyError(
                f"labels are ignored for the first time (ignore_index {self._config.ignore_index}), or appear for the "
                "first time, and the losses of slices differ from loss_fn on the whole sequence: " + problem
            )

    def _agree(self, sliced: Sequence[MicroBatchInFlight], needs_loss: bool) -> tuple[bool, bool, bool]:
        """Return whether any pipeline has slices, whether any stage has layers by other authors, and whether slices
        show more of layers than those on which they agreed."""
        if self._is_done:  # each pipeline for itself
            return True, self._longest > 0, True
        if not sliced and self._groups.everyone is None:  # all stages of the only pipeline have the same plans
            return False, True, False
        labels = sliced[0].labels if sliced else None
        is_weighted = "loss_reduction" in self._config.model_fields_set or self._slice_weight is not None
        is_unweighted = needs_loss and labels is not None and len(labels.tensors) > 1 and not is_weighted
        is_more = any(_parts(self._unit, one.plan) or self._is_long(one) for one in sliced)
        given = [bool(sliced), not all_own(self._module), is_more, is_unweighted]
        on_any_rank = [any(of_ranks) for of_ranks in zip(*exchange(given, self._groups.world), strict=True)]
        if on_any_rank[3]:
            raise RaisedEverywhere(TeraPipeConfigError(_UNWEIGHTED))
        return on_any_rank[0], on_any_rank[1], on_any_rank[2]

    def _is_long(self, one: MicroBatchInFlight) -> bool:
        return 0 < _GROWTH * self._longest <= one.plan.sequence_length

    def _check(
        self,
        sliced: Sequence[MicroBatchInFlight],
        micro_batches: Sequence[MicroBatchInFlight],
        with_layers: bool,
        ends: bool,
    ) -> Findings:
        """Return the findings of all ranks on a cut; on all tokens with `ends`, or if anything cannot run on a cut."""
        # layers may support the slices of one plan but not of another
        one_of_each, self._num_micro_batches = one_per_plan(sliced), len(micro_batches)
        self._labels = [one.labels for one in micro_batches if one.labels is not None and one.labels.tensors]
        for is_whole in (True,) if ends else (False, True):
            found = [self._check_plan(each, with_layers, is_whole) for each in one_of_each]
            copies, group = self._groups.num_replicas * self._tensor_ranks.size * self._shares, self._groups.world
            if self._is_done:  # each pipeline has lengths of its own
                copies, group = 1, self._groups.control
            found = found or [Findings(with_layers)]
            # plan by plan: other replicas may have fewer plans
            ranks_of_plans = itertools.zip_longest(*exchange(found, group))
            by_plan = ([one for one in ranks if one is not None] for ranks in ranks_of_plans)
            result = Findings.of_plans([Findings.of_all(ranks, copies) for ranks in by_plan])
            # try layers that cannot run on a few tokens on all tokens
            if not result.findings or not all(finding.is_of_the_cut for finding in result.findings):
                break
        self._labels = []
        get_accelerator().empty_cache()  # training begins with the memory that it would have without the check
        return result

    def _check_plan(self, micro_batch: MicroBatchInFlight, with_layers: bool, is_whole: bool) -> Findings:
        """Return this rank's findings on a cut of the micro-batch."""
        result = Findings(with_layers)
        result.cut, result.findings = self._choose_cut(micro_batch, is_whole)
        if not result.findings:
            self._check_parts(micro_batch, result, result.cut)
        return result

    def _choose_cut(self, micro_batch: MicroBatchInFlight, is_whole: bool) -> tuple[Cut, list[Finding]]:
        """Choose the cut of a micro-batch on the stage of the loss, which has the labels."""
        # the first stage has the inputs: whether rows and tokens may be cut depends on both
        tensors = [cuttable(each) for each in (micro_batch.inputs, micro_batch.labels) if each is not None]
        rows, tokens = zip(*itertools.chain(*exchange(tensors, self._groups.control)), strict=True)
        cut, findings = Cut(micro_batch.plan, micro_batch.plan.sequence_length), []
        if self._engine.stage_id == self._layout.loss_stage:
            may_cut = rows[0] if len(set(rows)) == 1 else None, all(tokens)
            try:
                cut = cut if is_whole else self._window(micro_batch, *may_cut)
                assert micro_batch.labels is not None
                of_cut = cut.of(micro_batch.labels), cut.plan, self._config, self._module.loss_fn
                # if no label counts, weigh by tokens
                cut = replace(cut, weights=weights_of(*of_cut) if any(slice_counts(*of_cut)) else cut.plan.shares)
            except Exception as error:
                kind, where = type(error).__name__, (self._module._local_stop, "slice_weight of loss_fn")
                findings = [Finding(*where, f"raised {kind}: {error}", kind)]
        everyone = exchange((cut, findings), self._groups.control)
        return everyone[self._layout.loss_stage if len(everyone) > 1 else 0]

    def _window(self, micro_batch: MicroBatchInFlight, of_rows: int | None, may_cut_tokens: bool) -> Cut:
        """Return the first tokens and rows; the loss check covers all others as well."""
        plan, labels, unit = micro_batch.plan, micro_batch.labels, max(self._token_multiple // self._shares, 1)
        assert labels is not None
        rows = MOST_ROWS if of_rows is not None and of_rows > MOST_ROWS else None
        if may_cut_tokens:
            granularity, all_rows = self._config.granularity_for(plan.sequence_length), num_rows(labels)
            step = self._num_micro_batches, self._layout.num_stages
            plan = window_plan(plan, granularity, unit, all_rows, *step, rows or all_rows)
        return Cut(plan, labels.length, rows=rows, of_rows=of_rows or 1)

    def _check_parts(
        self, micro_batch: MicroBatchInFlight, result: Findings, cut: Cut, kind: type[LayerCheck] = LayerCheck
    ) -> None:
        engine, module, layout, inputs = self._engine, self._module, self._layout, None
        if micro_batch.inputs is not None:
            batch = cut.of(micro_batch.inputs).to(self._device)
            if engine.fp16_auto_cast():
                batch = replace(batch, tensors=tuple(map(engine._cast_inputs_half, batch.tensors)))
            inputs = inputs_of(batch)
        # otherwise every layer would be measured with a hook that steps once for each slice
        # some are added after the engine was built; on one slice they are called as often as without slices
        problem = problem_of_gradient_hooks(module) if cut.plan.num_slices > 1 else None
        if problem is not None:
            result.findings.append(Finding(module._local_start, "hooks", problem))
        # the value before layers run shows which reports the layers write
        at_start = reported_so_far(module.get_additional_losses)
        with untouched(module, with_gradients=False):
            for part_id in range(layout.num_parts):
                owner, chunk_id = layout.homes(part_id)[0]
                outputs = None
                # one part after the other: a stage has the inputs only when its turn comes
                if owner == engine.stage_id and inputs is not None and problem is None:
                    activate(module, chunk_id)
                    starts = cut.of_starts(micro_batch.shape.starts)
                    keeps = keeps_attention(module)
                    slicing = Slicing(
                        cut.plan, cut.weights, self._tensor_ranks, part_id, starts=starts, keeps_attention=keeps
                    )
                    autocast = functools.partial(autocast_if_enabled, engine)
                    is_last, intercept = part_id + 1 == layout.num_parts, self._config.attention == "intercept"
                    of_hidden = LossOfHidden.of(module, engine.weight_gradients) if is_last else None
                    check = StageCheck(
                        module, slicing, result, autocast, self._note, intercept, of_hidden, self._weights,
                        self._splits, kind, is_last,
                    )  # fmt: skip
                    outputs = check.check_layers(layers_of(module), inputs)
                    if is_last and outputs is not None and kind is LayerCheck:
                        labels = None if micro_batch.labels is None else cut.of(micro_batch.labels).to(self._device)
                        self._check_loss(check, outputs, labels, at_start)
                if part_id + 1 < layout.num_parts:
                    inputs = self._hand_on(part_id, outputs)

    def _check_loss(
        self, check: StageCheck, outputs: Activations, labels: SliceableTensors | None, at_start: Mapping[str, float]
    ) -> None:
        loss_fn, result = self._module.loss_fn, check.found
        if loss_fn is None:
            result.notes += [] if result.with_layers else ["the loss was not compared: the model computes it itself"]
        elif labels is not None:
            layer_id, everyone, report = self._module._local_stop, self._labels, self._module.get_additional_losses
            loss = LossCheck(loss_fn, labels, outputs, check.slicing, self._config, report, at_start)
            # kinds of labels first: their message names the key to set
            probe = LabelProbe.of(loss)
            if probe is not None and not check.check_labels(probe, everyone, layer_id):
                return
            if check.check_loss(loss, layer_id, everyone):
                # tensor-parallel ranks, which draw later batches by themselves, must call together
                self._probe = None if self._tensor_ranks.size > 1 else probe

    def _hand_on(self, part_id: int, outputs: Activations | None) -> Activations | None:
        """Give the next part's stage these outputs, through the host; None on all other stages."""
        stage_id, ranks, group = self._engine.stage_id, self._groups.ranks, self._groups.control
        outputs = None if outputs is None else outputs.for_another_part()
        owner, follower = self._layout.owner(part_id), self._layout.owner(part_id + 1)
        if owner == follower or stage_id not in (owner, follower):
            return outputs
        self._note(f"waiting for the check of part {part_id}")  # in a report; the owner notes each layer
        message = [None if outputs is None else outputs.to(torch.device("cpu"))]
        if stage_id == owner:
            torch_dist.send_object_list(message, dst=ranks[follower], group=group)
            return None
        torch_dist.recv_object_list(message, src=ranks[owner], group=group)
        return None if message[0] is None else message[0].to(self._device)


def one_per_plan(micro_batches: Sequence[MicroBatchInFlight]) -> list[MicroBatchInFlight]:
    """Return the first micro-batch of each list of slices, of those with sequences as long as the first one's.

    Layers may support the slices of one list but not of another. Sequences of other lengths have dozens of plans, all
    of the same kind, unless their slices part blocks that those before leave whole.
    """
    by_plan: dict[tuple[int, ...], MicroBatchInFlight] = {}
    unit = 0
    for one in micro_batches:
        if one.plan.sequence_length == micro_batches[0].plan.sequence_length or _parts(unit, one.plan):
            by_plan.setdefault(one.plan.lengths, one)
            unit = math.gcd(unit, unit_of(one.plan))
    return list(by_plan.values())


def _parts(unit: int, plan: SlicePlan) -> bool:
    """Return whether slices part blocks of `unit` tokens: layers that work on such blocks see only a part then."""
    return unit > 0 and unit_of(plan) % unit > 0
