"""Draw the micro-batches of a batch, and agree on them with the other stages."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import BatchError, SliceableTensors, UncutLabels, as_tuple, check_found
from terapipe_ds.runtime.checksum import checksum, content_of
from terapipe_ds.runtime.header import (
    DataSums,
    MicroBatchShape,
    Shapes,
    StageReport,
    TensorPeers,
    agree_between_pipelines,
    exchange,
)
from terapipe_ds.runtime.layout import Layout

logger = logging.getLogger("terapipe_ds")


@dataclass
class DrawnMicroBatch:
    """As the data iterator gave it: the inputs on the first stage, the labels on the last (and wherever there are
    any). ``seen``: the shape of the labels, on both stages."""

    inputs: Any = None
    labels: SliceableTensors | None = None
    seen: MicroBatchShape | None = None


def _split(batch: Any, has_more: bool) -> tuple[Any, Any]:
    """``has_more``: the stock engine takes the first two elements of what there may be."""
    if not isinstance(batch, (tuple, list)) or not (len(batch) == 2 or (has_more and len(batch) > 2)):
        raise BatchError(
            f"the data iterator must give (inputs, labels), got {type(batch).__name__}"
            + (f" of {len(batch)} elements" if isinstance(batch, (tuple, list)) else "")
            + "; see DeepSpeed's train_batch()"
        )
    return batch[0], batch[1]


def _is_absent(labels: Any) -> bool:
    return labels is None or (isinstance(labels, (tuple, list)) and len(labels) == 0)


def _own(data: Any) -> Any:
    """A copy of the tensors in it: all micro-batches are drawn before the first one is used, and a data loader may
    reuse its memory."""
    if torch.is_tensor(data):
        return data.detach().clone()
    if isinstance(data, (tuple, list)) and all(torch.is_tensor(t) for t in data):
        return tuple(map(_own, data))
    return {key: _own(value) for key, value in data.items()} if type(data) is dict else data


def _has_dimension(labels: Any) -> bool:
    """True where something in labels of tensors could be cut."""
    tensors = (labels,) if torch.is_tensor(labels) else labels
    return isinstance(tensors, (tuple, list)) and any(not torch.is_tensor(t) or t.dim() > 0 for t in tensors)


def _length_of(inputs: Any, dim: int) -> int:
    """Of the first input that has the dimension; 1 where none has, as on a last stage that is given labels only."""
    tensors = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return next((max(1, t.size(dim)) for t in tensors if torch.is_tensor(t) and t.dim() > dim), 1)


def _shape_of(labels: SliceableTensors) -> MicroBatchShape:
    return MicroBatchShape(rows=labels.rows, length=labels.length)


def _content(labels: SliceableTensors) -> Iterable[torch.Tensor | str]:
    return content_of(labels.value) if isinstance(labels, UncutLabels) else labels.tensors


def _number_of(fingerprint: str) -> int:
    return int(fingerprint[:16], 16) & (2**62 - 1)


class BatchSource:
    """Draws batches for one stage.

    Args:
        next_batch: DeepSpeed's ``PipelineEngine._next_batch``.
        group: the control group of the pipeline, None with one stage.
        everyone: the control group of all ranks, None where there is no other pipeline.
        peers: the tensor-parallel ranks of this one, which must draw the same; None without tensor parallelism.
        length_multiple: sequences must be multiples of so many tokens.
        layout: of the parts; None: one for each stage.
        is_cut: whether sequences of a length are to be cut in slices; None: as the config says.
        tells: whether this rank writes to the log which inputs are cut.
        look_at: shown the labels of each micro-batch that is trained on; what it raises is raised on every rank.
        check: called before anything is drawn; what it raises is raised on every rank.
    """

    def __init__(
        self,
        config: TeraPipeConfig,
        next_batch: Callable[[], Any],
        stage_id: int,
        num_stages: int,
        group: Any,
        everyone: Any = None,
        peers: TensorPeers | None = None,
        length_multiple: int = 1,
        layout: Layout | None = None,
        is_cut: Callable[[int], bool] | None = None,
        tells: bool = True,
        look_at: Callable[[SliceableTensors], None] = lambda labels: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._next_batch = next_batch
        self._layout = Layout.plain(num_stages) if layout is None else layout
        self._is_first = stage_id in self._layout.stages_with_end(first=True)
        self._is_last = stage_id in self._layout.stages_with_end(first=False)
        self._group = group
        self._everyone = everyone
        self._peers = peers
        self._length_multiple = length_multiple
        self._is_cut = is_cut if is_cut is not None else lambda length: not config.is_one_slice
        self._tells = tells  # once
        self._look_at = look_at
        self._check = check
        self._agreements: dict[str, str] = {}
        self._fingerprint = _number_of(config.fingerprint())

    def also_agree_on(self, what: str, text: str) -> None:
        """What the ranks must have alike besides the config: the next header compares it, and shows it where they
        differ."""
        self._agreements[what] = text
        self._fingerprint = _number_of(hashlib.sha256(self._agreement().encode()).hexdigest())

    def _agreement(self) -> str:
        """For messages: everything that the fingerprint is made of."""
        parts = {"config": self._config.fingerprint(), **self._agreements}
        return ", ".join(f"{what} {text}" for what, text in parts.items())

    def draw(
        self, num_micro_batches: int, training: bool, needs_labels: bool = True
    ) -> tuple[list[DrawnMicroBatch], tuple[MicroBatchShape, ...]]:
        """All micro-batches of a batch, and their shapes as all stages know them. A collective over the pipeline.

        ``needs_labels``: False where no loss is computed. Where there are no labels then, the inputs tell the length.
        """
        drawn: list[DrawnMicroBatch] = []
        shapes: tuple[MicroBatchShape, ...] | None = None
        error: BaseException | None = None
        sums = DataSums()
        try:
            self._check()
            drawn = [self._draw_one(needs_labels) for _ in range(num_micro_batches)]
            if self._is_last:
                shapes = tuple(self._shape(d) for d in drawn)
                for each in drawn if training else ():
                    if each.labels is not None:
                        self._look_at(each.labels)
            if self._peers is not None:
                sums = self._sums(drawn)
        except Exception as caught:
            error = caught
        seen = tuple(each.seen for each in drawn if each.seen is not None)
        report = StageReport(
            training, num_micro_batches, self._fingerprint, shapes, error, self._agreement(), sums, seen
        )
        return drawn, self._agreed(report, partial(self._check_inputs, drawn))

    def _sums(self, drawn: list[DrawnMicroBatch]) -> DataSums:
        """Of what this stage uses: the inputs on the first, the labels on the last."""
        inputs = labels = None
        if self._is_first:
            inputs = checksum(tensor for each in drawn for tensor in as_tuple(each.inputs, "the inputs"))
        if self._is_last:
            known = [each.labels for each in drawn if each.labels is not None]
            labels = checksum(part for each in known for part in _content(each))
        return DataSums(inputs, labels)

    def _agreed(self, report: StageReport, check: Callable[[Shapes], None]) -> Shapes:
        """The shapes, when all stages of this pipeline and then all pipelines can go on; an error on all otherwise."""
        if self._everyone is None:
            return self._exchanged(report, check)
        shapes: tuple[MicroBatchShape, ...] = ()
        error: BaseException | None = None
        try:
            shapes = self._exchanged(report, check)
        except Exception as caught:
            error = caught
        agree_between_pipelines(error, report, self._everyone, self._peers)
        return shapes

    def _exchanged(self, report: StageReport, check: Callable[[Shapes], None]) -> Shapes:
        layout = self._layout
        return exchange(report, self._group, layout.num_stages, layout.loss_stage, layout.drawing_stages, check)

    def _check_inputs(self, drawn: Sequence[DrawnMicroBatch], shapes: Shapes) -> None:
        """Of micro-batches whose labels this stage was not given."""
        for each, shape in zip(drawn, shapes, strict=True):
            if self._is_first and each.seen is None:
                self._found(each.inputs, shape, self._is_cut(shape.length))

    def _draw_one(self, needs_labels: bool) -> DrawnMicroBatch:
        if not (self._is_first or self._is_last):
            return DrawnMicroBatch()
        batch = self._next_batch()
        if batch is None:
            raise BatchError(
                "there is no data: give train_batch() a data_iter, or deepspeed.initialize() training_data"
            )
        inputs, labels = _split(batch, has_more=self._config.is_stock_order)
        drawn = DrawnMicroBatch()
        if self._is_last:
            drawn.labels = self._labels(inputs, labels, needs_labels)
            drawn.seen = None if self._tells_nothing(labels) else _shape_of(drawn.labels)
        if self._is_first:
            drawn.inputs = _own(inputs)
            if not self._tells_nothing(labels):
                # Only a check, as early as possible: the last stage's labels decide.
                known = self._labels_of(labels)
                drawn.seen = _shape_of(known)
                self._found(drawn.inputs, drawn.seen, self._is_cut(known.length))
        return drawn

    def _tells_nothing(self, labels: Any) -> bool:
        """Of the sequences. In DeepSpeed's own order labels may be anything that ``loss_fn`` takes."""
        return not _has_dimension(labels) if self._config.is_stock_order else _is_absent(labels)

    def _labels(self, inputs: Any, labels: Any, needs_labels: bool) -> SliceableTensors:
        if self._config.is_stock_order and self._tells_nothing(labels):
            return UncutLabels.of(_own(labels), _length_of(inputs, self._config.sequence_dim))
        if not _is_absent(labels):
            return self._labels_of(_own(labels))
        if needs_labels:
            raise BatchError(
                "there are no labels, from which come the sequence length and the weights of the slices' losses. Give "
                "(inputs, labels); only eval_batch(compute_loss=False) goes without"
            )
        indices = self._config.sliced_inputs
        chosen = as_tuple(inputs, "the inputs")[0 if indices is None else indices[0] :]
        return self._labels_of(chosen)

    def _labels_of(self, labels: Any) -> SliceableTensors:
        """In DeepSpeed's own order labels may lack ``sequence_dim`` (one class per image): they are one slice as they
        are."""
        dim = self._config.sequence_dim
        if self._config.is_stock_order and not any(t.dim() > dim for t in as_tuple(labels, "the labels")):
            dim = 0
        return SliceableTensors.of_labels(labels, dim)

    def _shape(self, drawn: DrawnMicroBatch) -> MicroBatchShape:
        assert drawn.labels is not None
        length = drawn.labels.length
        if length == 0:
            raise BatchError(f"a batch with labels of shape {list(drawn.labels.deciding.shape)} has no tokens")
        if isinstance(drawn.labels, UncutLabels) and self._is_cut(length):
            raise BatchError(
                f"labels of type {type(drawn.labels.value).__name__} cannot be cut: give tensors, or set no slices by "
                "hand"
            )
        if length % self._length_multiple and not isinstance(drawn.labels, UncutLabels):
            raise BatchError(
                f"a sequence of {length} tokens: the model's slice_length_multiple is {self._length_multiple}, so that "
                "each slice divides over the ranks of sequence parallelism, and the whole sequence does not. Give "
                f"sequences of a multiple of it, such as {length + -length % self._length_multiple} tokens, or switch "
                "sequence parallelism off."
            )
        return _shape_of(drawn.labels)

    def slice_inputs(self, inputs: Any, shape: MicroBatchShape, plan: SlicePlan) -> SliceableTensors:
        """The inputs of a micro-batch of that shape, told which of them are cut by ``plan``."""
        found = self._found(inputs, shape, plan.num_slices > 1)
        if plan.num_slices > 1 and self._tells:
            self._tells = False
            logger.info("%s", found.describe())
        return found

    def _found(self, inputs: Any, shape: MicroBatchShape, is_cut: bool) -> SliceableTensors:
        dim, indices = self._config.sequence_dim, self._config.sliced_inputs
        is_whole = self._config.is_stock_order and not is_cut  # not with slices that were set by hand
        found = SliceableTensors.of_inputs(inputs, shape.length, dim, indices, is_whole)
        if is_cut and indices is None and shape.length > 1:
            check_found(found, shape.length, shape.rows)
        return found
