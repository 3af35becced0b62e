"""Let all ranks agree on a batch, and on their config, before its first action.

DeepSpeed gives data only to the first and the last stage, so these draw all micro-batches first. Then the ranks sum up
one fixed-size tensor on the CPU. The sums tell every rank how long each micro-batch is, and whether all ranks have
drawn their data and are about to do the same. If they are not, they gather the reports of all ranks, and every rank
raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as torch_dist
import xxhash

from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.dict_batch import BatchError
from terapipe_ds.messages import describe
from terapipe_ds.runtime.agreement import RaisedEverywhere, by_text, digest, exchange, largest, share
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors

T = TypeVar("T")

SAMPLE = 1 << 16  # stages compare at least this many elements of labels, if there are more
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SAME_CALLS = "Every rank must make the same calls, with the same config, between the same batches."
_SAME_DATA = "Give the first and the last stage iterators over the same micro-batches."
_SHUFFLED = (
    "Probably each rank shuffles with its own random numbers: give DataLoader(shuffle=True) a generator with the same "
    "seed on all ranks, or a DistributedSampler whose rank is the data-parallel one."
)
_OTHER_DATA = "ranks of one replica have drawn different data, though they run parts of the same layers or slices:"
_SAME_SAMPLES = (
    "Give them the same samples in the same order: seed and divide the sampler by the data-parallel rank "
    "(engine.mpu.get_data_parallel_rank() of engine.mpu.get_data_parallel_world_size()), not by the global rank."
)


@dataclass(frozen=True)
class MicroBatchShape:
    """Hold the shape of a micro-batch for every stage."""

    rows: int  # of its labels: all dimensions but the sequence
    length: int
    # where documents start in its rows, as the stage of the first part has it; None if each row is one document
    starts: Starts | None = field(default=None, compare=False, repr=False)
    # the caller on the stage of the loss wants the logits
    with_logits: bool = field(default=False, compare=False, repr=False)
    # some pipeline has rows of several documents in this batch
    is_any_packed: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def of(cls, labels: SliceableTensors) -> MicroBatchShape:
        return cls(labels.rows, labels.length)


Shapes = tuple[MicroBatchShape, ...]


class DataSums(NamedTuple):
    """Hold the checksums of the data that a rank has drawn of a batch; None for data that it does not draw."""

    inputs: int | None = None
    labels: int | None = None


@dataclass(frozen=True)
class TensorPeers:
    """Name the ranks of one stage and one replica that hold parts of the same layers (tensor parallelism) or slices."""

    ranks: tuple[int, ...]
    stage_id: int
    replica_id: int
    num_replicas: int
    kind: str = "tensor-parallel"  # or "sequence"


@dataclass(frozen=True)
class PlaceInJob:
    """Describe the place of a rank among those that agree on a batch; a tensor-parallel rank has its own pipeline."""

    stage_id: int = 0
    num_stages: int = 1
    drawing: tuple[int, ...] = (0,)  # the stages that draw data
    loss_stage: int = 0  # its labels decide on the shapes
    control: Any = None  # the group of the pipeline on the CPU; None with one stage
    world: Any = None  # the group of all ranks on the CPU; None for a single rank
    pipeline_id: int = 0
    num_pipelines: int = 1
    peers: TensorPeers | None = None
    first_stage: int = 0  # its inputs say where documents start


@dataclass(frozen=True)
class StageReport:
    """Report the view that one rank has of a batch."""

    training: bool
    num_micro_batches: int
    agreement: str  # the config and all else that must be equal on all ranks, as text
    shapes: Shapes | None  # of the micro-batches; None on stages that draw no labels
    error: BaseException | None = None
    sums: DataSums = field(default_factory=DataSums)
    seen: Shapes = ()  # of all labels that this rank got
    starts: tuple[Starts | None, ...] = ()  # where documents start, in micro-batches whose inputs this rank has
    dicts: int = 0  # a checksum of the token ids of dict batches, which are the same on each stage that draws
    contents: int = 0  # the same for labels of tuples; 0 if this rank draws none
    # 0 if the code and the trained parameters of the layers are as in the batch before, 1 if they are as in an earlier
    # batch or shapes are to be announced again, else 2
    model_change: int = 0
    of_stage: str = ""  # all that must be equal on the ranks of one stage, as text
    wants_logits: bool = False  # told by the rank of the loss: others may evaluate without


class _Header(NamedTuple):
    """Hold the numbers that the stages of a pipeline add up. Only the loss stage sets the fields after `has_edges`."""

    other_counts: int  # 0: all stages have the same number of micro-batches
    other_labels: int  # 0: the stages that draw got labels of the same shapes
    other_dicts: int  # 0: and dicts with the same token ids, or none
    other_contents: int  # 0: and the same labels in tuples
    without_contents: int  # stages that draw but have no such labels to compare
    without_labels: int  # stages that draw but got no labels
    has_edges: int = 0  # some rows have several documents; the stage of the first part says where these start
    wants_logits: int = 0
    is_uniform: int = 0  # all micro-batches have the shape that follows
    rows: int = 0
    length: int = 0


_PROBLEMS = 3  # the first numbers: failed ranks, other calls, other data
_SHARED = _PROBLEMS + 2  # the numbers before the headers: also ranks with a changed and with a new model


def agree_on_batch(
    report: StageReport,
    place: PlaceInJob,
    check: Callable[[Shapes], None],
    when_changed: Callable[[bool], None] = lambda is_new: None,
) -> Shapes:
    """Return the shapes of this pipeline's micro-batches, as the stage that knows the loss sees them.

    A collective over all ranks. If the data of replicas end at different steps, all replicas stop at the first end.

    If a stage that draws got no labels, `check` checks its inputs once the shapes are known. If the model of any rank
    has changed, `when_changed` is called on all of them, with whether any has not been like this before.

    Raises:
        RaisedEverywhere: on every rank, when one of them could not draw its data or when ranks disagree.
    """
    # one sum over all ranks tells whether anything is wrong, and if not, the shapes
    sums = _numbers(report, place)
    if place.world is not None:
        torch_dist.all_reduce(sums, group=place.world)
    numbers, width = sums.tolist(), len(_Header._fields)  # read once
    headers = [_Header(*numbers[start : start + width]) for start in range(_SHARED, len(numbers), width)]
    # compare labels only if all stages that draw got some
    other_labels = [each.other_labels and not each.without_labels for each in headers]
    other_contents = any(each.other_contents and not each.without_contents for each in headers)
    if other_labels[place.pipeline_id]:  # different labels cause errors in them
        report = replace(report, error=None)
    # then all ranks exchange their reports, and all raise the same error
    if (
        any(other_labels)
        or other_contents
        or any(each.other_counts or each.other_dicts for each in headers)
        or any(numbers[:_PROBLEMS])
    ):
        raise RaisedEverywhere(_problem(report, place))
    if numbers[_PROBLEMS]:
        when_changed(bool(numbers[_PROBLEMS + 1]))
    # the inputs of stages without labels can be checked only now
    is_any_packed = any(each.has_edges for each in headers)
    shapes = tuple(
        replace(shape, is_any_packed=is_any_packed) for shape in _shapes(report, place, headers[place.pipeline_id])
    )
    if any(each.without_labels for each in headers):
        try:
            check(shapes)
        except Exception as error:
            report = replace(report, error=error)
        if largest(report.error is not None, place.world):
            raise RaisedEverywhere(_problem(report, place))
    return shapes


def _numbers(report: StageReport, place: PlaceInJob) -> torch.Tensor:
    """Return the numbers that this rank adds to the sums over all ranks."""
    rank, num_ranks = (0, 1) if place.world is None else (torch_dist.get_rank(), torch_dist.get_world_size())
    draws = place.stage_id in place.drawing

    def of_drawing(number: int) -> int:
        return share(number, place.drawing.index(place.stage_id), len(place.drawing)) if draws else 0

    # shares of a checksum sum up to 0 if all ranks have the same one
    header = _Header(
        share(digest(place.pipeline_id, report.num_micro_batches), place.stage_id, place.num_stages),
        of_drawing(digest(report.seen)),
        of_drawing(digest(report.dicts)),
        of_drawing(digest(report.contents)),
        draws and not report.contents,
        draws and not report.seen,
        place.stage_id == place.first_stage and any(report.starts),
    )
    if place.stage_id == place.loss_stage:
        header = header._replace(wants_logits=report.wants_logits)
    # one shape is enough if micro-batches are alike; otherwise a second message has all shapes
    if place.stage_id == place.loss_stage and report.shapes:
        first = report.shapes[0]
        is_uniform = all(shape == first for shape in report.shapes)
        header = header._replace(is_uniform=is_uniform, rows=first.rows, length=first.length)
    # ranks compare their calls and configs with all others, and their data with their peers
    call, data, peers = share(digest(report.training, report.agreement), rank, num_ranks), 0, place.peers
    call += share(digest(place.stage_id, report.of_stage), place.pipeline_id, place.num_pipelines)
    if peers is not None:
        drawn = digest(peers.ranks, report.num_micro_batches, *report.sums)
        data = share(drawn, peers.ranks.index(rank), len(peers.ranks))
    shared = [report.error is not None, call, data, report.model_change > 0, report.model_change > 1]
    none = [0] * len(header)
    before, after = none * place.pipeline_id, none * (place.num_pipelines - place.pipeline_id - 1)
    return torch.tensor([*map(int, (*shared, *before, *header, *after))], dtype=torch.int64, device="cpu")


def _shapes(report: StageReport, place: PlaceInJob, header: _Header) -> Shapes:
    if header.is_uniform:
        shapes: Shapes = (MicroBatchShape(header.rows, header.length),) * report.num_micro_batches
    else:
        shapes = _from_stage(place.loss_stage, report.shapes or (), place)
    shapes = tuple(replace(shape, with_logits=bool(header.wants_logits)) for shape in shapes)
    # one message more if some rows have several documents
    if not header.has_edges:
        return shapes
    starts = _from_stage(place.first_stage, report.starts, place)
    return tuple(replace(shape, starts=each) for shape, each in zip(shapes, starts, strict=True))


def _from_stage(stage_id: int, value: T, place: PlaceInJob) -> T:
    """Return the value of a stage on all stages of the pipeline."""
    values = [value]
    if place.control is not None:
        torch_dist.broadcast_object_list(values, group=place.control, group_src=stage_id)
    return values[0]


class _Message(NamedTuple):
    """Tell the other ranks what is wrong; the error of this rank is text, "" without one, or at a usual end."""

    report: StageReport
    place: PlaceInJob
    problem: str = ""
    is_at_end: bool = False


def _problem(report: StageReport, place: PlaceInJob) -> BaseException:
    """Return the exception that this rank raises: its own error, or the problem of the others."""
    error, own = report.error, _Message(replace(report, error=None), replace(place, control=None, world=None))
    if error is not None:
        what = "refuses the batch" if isinstance(error, TeraPipeConfigError) else "failed to draw its data"
        is_at_end = isinstance(error, StopIteration)
        problem = str(error) if is_at_end else f"stage {place.stage_id} {what}: {describe(error)}"
        own = own._replace(problem=problem, is_at_end=is_at_end)
    messages = exchange(own, place.world)
    if error is not None and not own.is_at_end:
        return error
    failed = [message for message in messages if message.problem or message.is_at_end]
    if not failed:
        return _disagreement(messages)
    # an end of the data is an error only if not all stages of a pipeline have reached it
    ended = {(message.place.pipeline_id, message.place.stage_id) for message in failed if message.is_at_end}
    problems = {rank: one.problem for rank, one in enumerate(messages) if one.problem and not one.is_at_end}
    texts = ([by_text(problems)] if problems else []) + [
        f"the data iterator of stage {at.stage_id} is at its end, but not that of the others. {_SAME_DATA}"
        for at in (message.place for message in failed if message.is_at_end)
        if not ended.issuperset((at.pipeline_id, stage_id) for stage_id in at.drawing)
    ]
    if not texts:
        return error or StopIteration(failed[0].problem)  # the ordinary end of the data
    others = BatchError("; ".join(dict.fromkeys(texts)))
    others.__cause__ = error
    return others


def _disagreement(messages: Sequence[_Message]) -> BatchError:
    """Return an error that shows what differs among all ranks, tensor-parallel ranks, or the stages of a pipeline."""

    def differing(what: str, ranks: Iterable[int], text: Callable[[StageReport], str]) -> list[str]:
        texts = {rank: text(messages[rank].report) for rank in ranks}
        return [f"{what}: {by_text(texts)}"] if len(set(texts.values())) > 1 else []

    # a different call or config explains all differences that follow
    everyone = range(len(messages))
    lines = differing("training or evaluation", everyone, lambda one: "training" if one.training else "evaluation")
    lines += differing("config and plans", everyone, lambda one: one.agreement)
    for stage_id in range(messages[0].place.num_stages):
        replicas = [rank for rank in everyone if messages[rank].place.stage_id == stage_id]
        lines += differing(f"the settings of stage {stage_id}", replicas, lambda one: one.of_stage)
    if lines:
        return BatchError(f"the ranks disagree on {'; '.join(lines)}. {_SAME_CALLS}")
    # ranks that share layers or slices must have the same samples
    for peers in dict.fromkeys(one.place.peers for one in messages if one.place.peers is not None):
        who = f"{peers.kind} ranks {list(peers.ranks)} (stage {peers.stage_id}, replica {peers.replica_id})"
        lines += differing(who, peers.ranks, lambda one: f"{one.num_micro_batches} micro-batches") or [
            *differing(f"inputs of {who}", peers.ranks, lambda one: f"checksum {one.sums.inputs or 0:016x}"),
            *differing(f"labels of {who}", peers.ranks, lambda one: f"checksum {one.sums.labels or 0:016x}"),
        ]
    if lines:
        return BatchError("\n  ".join([_OTHER_DATA, *lines]) + f"\n{_SAME_SAMPLES}")
    # otherwise the first and the last stage of a pipeline have drawn different micro-batches
    cause = _SAME_CALLS
    for pipeline_id in range(messages[0].place.num_pipelines):
        stages = [rank for rank in everyone if messages[rank].place.pipeline_id == pipeline_id]
        labelled = [rank for rank in stages if messages[rank].report.seen]
        what = "the [rows, tokens] of the labels of each micro-batch"
        drawing = [rank for rank in stages if messages[rank].place.stage_id in messages[rank].place.drawing]
        contents = drawing if all(messages[rank].report.contents for rank in drawing) else ()
        other = differing("the token ids of dict batches", drawing, lambda one: f"checksum {one.dicts:016x}")
        other += differing("the labels of tuple batches", contents, lambda one: f"checksum {one.contents:016x}")
        cause = _SHUFFLED if other else cause
        lines += other
        lines += differing("the number of micro-batches", stages, lambda one: str(one.num_micro_batches))
        lines += differing(what, labelled, lambda one: str([[shape.rows, shape.length] for shape in one.seen]))
    return BatchError(f"the stages of a pipeline disagree on {'; '.join(lines)}. {cause} {_SAME_DATA}")


# -- checksums that show whether ranks have drawn different data -------------------------------------------------------


def checksum(value: Any) -> int:
    """Return a number in [0, 2^62) that depends on every bit, on the order, the shapes and the dtypes in `value`."""
    digest = xxhash.xxh3_64()
    for part in _content(value):
        digest.update(part)
    return digest.intdigest() >> 2


def contents_of(labels: Any) -> int:
    """Return a checksum of the first tensor of labels, or of a sample if it is large; 0 if it cannot be compared.

    A stage without the loss may get labels of one value in place of the labels that it does not need, and other tensors
    beside them. Whole numbers count by their values: a sample shows a shuffle as well as the whole tensor does.
    """
    tensors = [each for each in (labels if isinstance(labels, (tuple, list)) else (labels,)) if torch.is_tensor(each)]
    if not tensors or not tensors[0].numel():
        return 0
    # every n-th element, from the start to the end
    sample = tensors[0].detach().reshape(-1)[:: 1 + tensors[0].numel() // SAMPLE].cpu()
    sample = sample if sample.is_floating_point() or sample.is_complex() else sample.long()
    return 0 if bool((sample == sample[0]).all()) else checksum(sample)


def _content(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value, however deep. An object of unknown kind counts by its type: its text may vary."""
    if torch.is_tensor(value):
        yield f"{list(value.shape)} {value.dtype};".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        return
    text = f"{type(value).__module__}.{type(value).__qualname__} "
    inner: list[Any] = []
    if isinstance(value, _PLAIN):
        text += repr(value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{text}{value.dtype} {value.shape};".encode()
        yield value.tobytes()
        return
    elif isinstance(value, Mapping):
        inner = [each for item in value.items() for each in item]
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    yield f"{text} {len(inner)};".encode(errors="surrogatepass")
    for each in inner:
        yield from _content(each)
