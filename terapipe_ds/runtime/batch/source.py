"""Draw the micro-batches of a batch, and agree on them with the other ranks.

One sum over all ranks compares shapes, data, configs and what a program has set (`batch_agreement`). To it each rank
adds shares of its digests, which sum up to zero if all ranks have the same ones, and the stage with the loss adds rows
and length. If a sum differs from zero, or one rank has an error, the ranks exchange reports and raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_map_only

from terapipe_ds.attention.document_edges import Starts, are_position_ids, have_edges, starts_of
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.dict_batch import BatchError, ReadBatch, read_dict
from terapipe_ds.messages import logger
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import (
    DataSums,
    MicroBatchShape,
    PlaceInJob,
    Shapes,
    StageReport,
    agree_on_batch,
    checksum,
    contents_of,
)
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, UncutLabels, as_tuple, check_sizes
from terapipe_ds.runtime.layout.layout import Layout


@dataclass
class DrawnMicroBatch:
    """Hold one draw from the data iterator: inputs for the first part, labels for the last."""

    inputs: Any = None
    labels: SliceableTensors | None = None
    seen: MicroBatchShape | None = None  # of the labels
    starts: Starts | None = None  # where documents start in the rows of the inputs
    dicts: int = 0  # a checksum of the token ids of a dict
    contents: int = 0  # a checksum of the labels of a tuple


@dataclass
class BatchSource:
    """Draw batches for one rank."""

    config: TeraPipeConfig
    next_batch: Callable[[], Any]  # DeepSpeed's `PipelineEngine._next_batch`
    place: PlaceInJob
    layout: Layout
    is_cut: Callable[[int], bool]  # whether sequences of a length are to be cut into slices
    length_multiple: int = 1  # the number of tokens that must divide the length of sequences
    tells: bool = True  # this rank writes to the log which inputs are cut
    # called on the rank of the first part, with the inputs of each micro-batch and the starts of documents; may raise
    accept: Callable[[Any, Starts | None], None] = lambda inputs, starts: None
    # called with the labels of each micro-batch that is trained on; like `check`, it may raise
    look_at: Callable[[SliceableTensors], None] = lambda labels: None
    check: Callable[[], None] = lambda: None  # called before anything is drawn
    # called on the rank of the last part, with the lengths of the micro-batches and whether they are trained on; it
    # raises if nothing can run them
    require: Callable[[Sequence[int], bool], None] = lambda lengths, training: None
    of_stage: Callable[[], str] = lambda: ""  # all that must be equal on the ranks of one stage, as text
    # how the model of this rank differs from the batch before, as `StageReport` has it
    model_change: Callable[[], int] = lambda: 0
    # called on every rank if any model has changed, with whether that is for the first time
    when_changed: Callable[[bool], None] = lambda is_new: None

    def __post_init__(self) -> None:
        self._is_first = self.place.stage_id in self.layout.stages_with_end(first=True)
        self._is_last = self.place.stage_id in self.layout.stages_with_end(first=False)
        self._tells_of_labels = self.tells  # once each
        self._agreements = {"config": self.config.fingerprint()}

    def also_agree_on(self, what: str, text: str | None) -> None:
        """Let ranks compare `text` at the next batch, in addition to the config; an error shows it as `what`.

        None: no longer.
        """
        self._agreements.pop(what, None)
        self._agreements |= {} if text is None else {what: text}

    def draw(
        self, num_micro_batches: int, training: bool, needs_labels: bool = True, wants_logits: bool = False
    ) -> tuple[list[DrawnMicroBatch], Shapes]:
        """Draw all micro-batches of a batch. Return them with their shapes. A collective over all ranks.

        Without `needs_labels` no loss is computed. If there are no labels, the inputs tell the length. With
        `wants_logits` the caller evaluates with logits.
        """
        came: list[DrawnMicroBatch] = []
        drawn: list[DrawnMicroBatch] = []
        shapes: Shapes | None = None
        error: BaseException | None = None
        sums = DataSums()
        # an error here must not keep the other ranks waiting: they learn of it below
        try:
            self.check()
            for index in range(num_micro_batches):
                came.append(self._draw_one(index, needs_labels))
            drawn = came
            labels = [each.labels for each in drawn if each.labels is not None]
            if self._is_last:
                shapes = tuple(map(self._shape, labels))
                self.require([shape.length for shape in shapes], training)
            for each in labels if training else ():
                self.look_at(each)
            if self.place.peers is not None:
                sums = self._sums(drawn, labels)
        except StopIteration as end:
            of_how_many = f"the data end after {len(came)} of the {num_micro_batches} micro-batches of a batch"
            error = StopIteration(of_how_many) if came else end
        except (Exception, SystemExit) as caught:  # each rank may leave by the code that the data give it
            error = caught
        # report the data of this rank, and learn the shapes from the stage with the labels: one sum over all ranks
        seen = tuple(each.seen for each in drawn if each.seen is not None)
        agreement = ", ".join(f"{what} {text}" for what, text in self._agreements.items())
        starts = tuple(each.starts for each in drawn)
        by_kind = [each.dicts for each in drawn], [each.contents for each in drawn]
        dicts, contents = (checksum(each) if any(each) else 0 for each in by_kind)
        of_model = self.model_change(), self.of_stage()
        drawn_here = shapes, error, sums, seen, starts, dicts, contents
        report = StageReport(training, num_micro_batches, agreement, *drawn_here, *of_model, wants_logits)
        return drawn, agree_on_batch(report, self.place, partial(self._check_inputs, drawn), self.when_changed)

    def _sums(self, drawn: Sequence[DrawnMicroBatch], labels: Sequence[SliceableTensors]) -> DataSums:
        """Return the checksums of the data that this stage uses: the inputs on the first, the labels on the last."""
        values = [each.value if isinstance(each, UncutLabels) else each.tensors for each in labels]
        return DataSums(
            checksum([(as_tuple(each.inputs, "the inputs"), each.starts) for each in drawn])
            if self._is_first
            else None,
            checksum(values) if self._is_last else None,
        )

    def _check_inputs(self, drawn: Sequence[DrawnMicroBatch], shapes: Shapes) -> None:
        """Check the inputs of micro-batches whose labels this stage did not get."""
        for each, shape in zip(drawn, shapes, strict=True):
            if self._is_first and each.seen is None:
                self._sliceable(each.inputs, shape, self.is_cut(shape.length))

    def _draw_one(self, micro_batch_id: int, needs_labels: bool) -> DrawnMicroBatch:
        drawn = DrawnMicroBatch()
        if not (self._is_first or self._is_last):
            return drawn
        batch = self.next_batch()
        if batch is None:
            raise BatchError(
                "there is no data: give train_batch() a data_iter, or deepspeed.initialize() training_data"
            )
        # stages that draw compare all data that they got, though each uses only a part of it
        _require_rows(batch, micro_batch_id, row_dim=1 if self.config.sequence_dim == 0 else 0)
        inputs, labels, starts = self._read(batch, needs_labels)
        if len(self.place.drawing) > 1:
            is_dict = isinstance(batch, Mapping)
            drawn.dicts = checksum(batch["input_ids"]) if is_dict else 0
            drawn.contents = 0 if is_dict else contents_of(labels)
        # the last part needs the labels, which decide on the shapes
        if self._is_last:
            drawn.labels = self._labels(inputs, labels, needs_labels)
            drawn.seen = None if self._tells_nothing(labels) else MicroBatchShape.of(drawn.labels)
        # the first part needs the inputs, and checks them as early as it can
        if self._is_first:
            drawn.inputs, drawn.starts = _copied(inputs), starts
            self.accept(drawn.inputs, starts)
            if not self._tells_nothing(labels):  # only a check, as early as possible: the last stage's labels decide
                drawn.seen = MicroBatchShape.of(self._labels_of(labels))
                self._sliceable(drawn.inputs, drawn.seen, self.is_cut(drawn.seen.length))
        return drawn

    def _read(self, batch: Any, needs_labels: bool) -> ReadBatch:
        """Return the batch of the data iterator, a dict or a tuple, as inputs, labels, and where documents start."""
        documents = self.config.documents
        if not isinstance(batch, Mapping):
            inputs, labels = _split(batch, has_more=self.config.is_stock_order)
            has_starts = self._is_first and documents != "off"
            starts = _find_starts(inputs, documents, self.config.sequence_dim) if has_starts else None
            return ReadBatch(inputs, labels, starts)
        read = read_dict(batch, self.config)
        if read.labels is None and self._is_last and needs_labels:
            raise BatchError(
                "a dict batch has neither labels nor shift_labels: give labels, which may be the input_ids themselves; "
                "only eval_batch(compute_loss=False) goes without"
            )
        if self._tells_of_labels and read.labels is not None and batch.get("shift_labels") is None:
            self._tells_of_labels = False
            logger.info(
                "labels of dict batches are shifted here: each token learns the label of the next one, and the "
                "last token of a sequence or document learns none"
            )
        return read

    def _tells_nothing(self, labels: Any) -> bool:
        """Return whether labels do not show the sequences. In DeepSpeed's own order they may be of any kind."""
        if not self.config.is_stock_order:
            return _is_absent(labels)
        tensors = (labels,) if torch.is_tensor(labels) else labels if isinstance(labels, (tuple, list)) else ()
        return all(torch.is_tensor(t) and t.dim() == 0 for t in tensors)

    def _labels(self, inputs: Any, labels: Any, needs_labels: bool) -> SliceableTensors:
        if self.config.is_stock_order and self._tells_nothing(labels):
            tensors, dim = inputs if isinstance(inputs, (tuple, list)) else (inputs,), self.config.sequence_dim
            length = next((max(1, t.size(dim)) for t in tensors if torch.is_tensor(t) and t.dim() > dim), 1)
            return UncutLabels((), (), 0, False, _copied(labels), length)
        if not _is_absent(labels):
            return self._labels_of(_copied(labels))
        if needs_labels:
            raise BatchError(
                "there are no labels, from which come the sequence length and the weights of the slices' losses. Give "
                "(inputs, labels); only eval_batch(compute_loss=False) goes without"
            )
        indices = self.config.sliced_inputs or (0,)
        # one tensor of numbers that any loss takes for labels: slices may be measured with it
        like = self._labels_of(as_tuple(inputs, "the inputs")[indices[0] :]).deciding
        return self._labels_of(torch.zeros_like(like))

    def _labels_of(self, labels: Any) -> SliceableTensors:
        """Return labels to cut. In DeepSpeed's order, labels without `sequence_dim` (a class per image) are whole."""
        dim = self.config.sequence_dim
        if self.config.is_stock_order and not any(t.dim() > dim for t in as_tuple(labels, "the labels")):
            dim = 0
        return SliceableTensors.of_labels(labels, dim)

    def _shape(self, labels: SliceableTensors) -> MicroBatchShape:
        length = labels.length
        if length == 0:
            raise BatchError(f"a batch with labels of shape {list(labels.deciding.shape)} has no tokens: leave it out")
        if isinstance(labels, UncutLabels):
            if self.is_cut(length):
                kind = type(labels.value).__name__
                raise BatchError(f"labels of type {kind} cannot be cut: give tensors, or set no slices by hand")
        elif length % self.length_multiple:
            raise BatchError(
                f"a sequence of {length} tokens: the model's slice_length_multiple is {self.length_multiple}, so that "
                "each slice divides over the ranks of sequence parallelism, and the whole sequence does not. Give "
                f"sequences of a multiple of it, such as {length + -length % self.length_multiple} tokens (collators "
                "have pad_to_multiple_of), or switch sequence parallelism off."
            )
        return MicroBatchShape.of(labels)

    def slice_inputs(self, inputs: Any, shape: MicroBatchShape, plan: SlicePlan) -> SliceableTensors:
        """Return the inputs of a micro-batch, marked with which of them `plan` cuts."""
        sliceable = self._sliceable(inputs, shape, plan.num_slices > 1)
        if plan.num_slices > 1 and self.tells:
            self.tells = False
            logger.info("%s", sliceable.describe())
        return sliceable

    def _sliceable(self, inputs: Any, shape: MicroBatchShape, is_cut: bool) -> SliceableTensors:
        dim, indices = self.config.sequence_dim, self.config.sliced_inputs
        is_whole = self.config.is_stock_order and not is_cut  # not with slices that were set by hand
        sliceable = SliceableTensors.of_inputs(inputs, shape.length, dim, indices, is_whole)
        documents = self.config.documents
        if isinstance(documents, int) and not sliceable.sliced[documents]:
            ids = list(sliceable.tensors[documents].shape)
            raise BatchError(
                f"terapipe.documents = {documents}: the position ids {ids} are not cut with the tokens, which are "
                f"{shape.length} in dimension {dim} (terapipe.sequence_dim): give one id for each token, and name them "
                "in terapipe.sliced_inputs where that is set"
            )
        if is_cut and indices is None and shape.length > 1:
            check_sizes(sliceable, shape.length, shape.rows)
        return sliceable


def _require_rows(batch: Any, micro_batch_id: int, row_dim: int) -> None:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    tensors = [t for value in values for t in (value if isinstance(value, (tuple, list)) else (value,))]
    shapes = [list(t.shape) for t in tensors if torch.is_tensor(t) and t.dim() > row_dim]
    if shapes and not any(shape[row_dim] for shape in shapes):  # one may be empty: images of a text
        raise BatchError(
            f"micro-batch {micro_batch_id} has 0 rows (shapes {shapes}): a filter has removed all, or the data is at "
            "its end; skip such micro-batches in the data iterator"
        )


def _find_starts(inputs: Any, documents: int | str, dim: int) -> Starts | None:
    """Return where documents start in the rows of a micro-batch; None if each row is one document.

    inputs: as the data iterator gives them. `documents` is the key of the config; `dim` counts tokens.

    Raises BatchError if the entry holds no position ids of whole rows.
    """
    # find the entry that the config names
    tensors, what = as_tuple(inputs, "the inputs"), f"terapipe.documents = {documents!r}"
    if isinstance(documents, str):
        raise BatchError(
            f"{what} names an entry of a dict, but this batch is a tuple with {len(tensors)} input tensors: give the "
            "index of the position ids among them, or dict batches"
        )
    if documents >= len(tensors) or len(tensors) == 1:
        raise BatchError(
            f"{what}, but the batch has {len(tensors)} input tensors: give ((tokens, position_ids), labels), and the "
            "index of the position ids"
        )
    # it must hold positions, one for each token of each row
    ids = tensors[documents]
    kind = f"a tensor of {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
    if dim > 1 or not are_position_ids(ids):
        raise BatchError(f"{what}: position ids are integers [rows, tokens], and the input is {kind}")
    ids = ids.movedim(dim, 1)
    others = (t for i, t in enumerate(tensors) if i != documents and t.dim() > 1 and t.size(dim) == ids.shape[1])
    rows = next((t.size(1 - dim) for t in others), len(ids))
    if rows != len(ids):
        raise BatchError(f"{what} is {kind}, but the other inputs have {rows} rows: give position ids for each row")
    starts = starts_of(ids)
    return starts if have_edges(starts) else None


def _split(batch: Any, has_more: bool) -> tuple[Any, Any]:
    """Return inputs and labels. With `has_more` the batch may have more elements, as in the stock engine."""
    if isinstance(batch, (tuple, list)) and (len(batch) == 2 or (has_more and len(batch) > 2)):
        return batch[0], batch[1]
    size = f" of {len(batch)} elements" if isinstance(batch, (tuple, list)) else ""
    raise BatchError(
        f"the data iterator must give (inputs, labels), got {type(batch).__name__}{size}; see DeepSpeed's "
        "train_batch(). Or a dict with input_ids and labels"
    )


def _is_absent(labels: Any) -> bool:
    return labels is None or (isinstance(labels, (tuple, list)) and len(labels) == 0)


def _copied(data: Any) -> Any:
    """Copy the tensors: all micro-batches are drawn before the first one is used, and a loader may reuse its memory.

    On an accelerator the copy is in pinned memory, from which the device takes it while the host goes on.
    """
    if torch.is_tensor(data):
        copy = data.detach().clone()
        return get_accelerator().pin_memory(copy) if copy.device.type == "cpu" else copy
    if isinstance(data, (tuple, list)) and all(torch.is_tensor(t) for t in data):
        return tuple(map(_copied, data))
    return tree_map_only(torch.Tensor, _copied, data)
