"""What the stages of a pipeline tell each other once per batch, before its first action.

DeepSpeed gives data only to the first and the last stage, so these draw all micro-batches first. Then one fixed-size
header of every stage goes round on the CPU: all learn whether this is training or evaluation, how many micro-batches
there are and how long each is, and whether some stage could not draw its data. A problem is raised on *every* stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.batch import BatchError


class Status(IntEnum):
    """How drawing the data went on one stage."""

    OK = 0
    FAILED = 1
    EXHAUSTED = 2  # the data iterator is at its end


@dataclass(frozen=True)
class MicroBatchShape:
    """What every stage must know of a micro-batch: label rows (all dimensions but the sequence) and tokens."""

    rows: int
    length: int


class DataSums(NamedTuple):
    """Checksums of what a rank has drawn of a batch; None for what it does not draw."""

    inputs: int | None = None
    labels: int | None = None


NOTHING_DRAWN = DataSums()


@dataclass(frozen=True)
class TensorPeers:
    """The tensor-parallel ranks of one stage and one replica, which hold parts of the same layers."""

    ranks: tuple[int, ...]
    stage_id: int
    replica_id: int
    num_replicas: int


@dataclass(frozen=True)
class StageReport:
    """One stage's part of the header. ``shapes`` is None on stages that draw no labels.

    ``agreement`` is what ``config_fingerprint`` was made of besides the config, for messages. ``seen``: the shapes of
    the labels that this stage was given, decisive or not; empty where it was given none.
    """

    training: bool
    num_micro_batches: int
    config_fingerprint: int
    shapes: tuple[MicroBatchShape, ...] | None
    error: BaseException | None = None
    agreement: str = ""
    sums: DataSums = NOTHING_DRAWN
    seen: tuple[MicroBatchShape, ...] = ()

    @property
    def status(self) -> Status:
        return _status(self.error)

    @property
    def problem(self) -> str:
        """What happened to the stage that has the error, as other stages tell it."""
        what = "refuses the batch" if isinstance(self.error, TeraPipeConfigError) else "failed to draw its data"
        return f"{what}: {type(self.error).__name__}: {self.error}"

    def encode(self) -> torch.Tensor:
        first = self.shapes[0] if self.shapes else MicroBatchShape(0, 0)
        uniform = self.shapes is not None and all(shape == first for shape in self.shapes)
        ints = [
            self.status,
            self.training,
            self.num_micro_batches,
            self.config_fingerprint,
            uniform,
            first.rows,
            first.length,
            _number_of(self.seen),
        ]
        return torch.tensor([int(i) for i in ints], dtype=torch.int64)


def raised_on_every_rank(error: BaseException) -> bool:
    """True for an error that the header exchange raised on all stages of the pipeline alike."""
    return getattr(error, "_terapipe_on_every_rank", False)


def on_every_rank(error: BaseException) -> BaseException:
    """Mark an error that all stages raise alike: nobody is left waiting, so the job need not be ended."""
    error._terapipe_on_every_rank = True  # type: ignore[attr-defined]
    return error


Shapes = tuple[MicroBatchShape, ...]


def exchange(
    report: StageReport, group: Any, num_stages: int, loss_stage: int = -1, drawing: tuple[int, ...] | None = None,
    check: Callable[[Shapes], None] | None = None,
) -> Shapes:  # fmt: skip
    """The shapes of the batch's micro-batches as the stage sees them that knows the loss. A collective over the
    pipeline's stages.

    Args:
        group: the pipeline's control group (gloo), or None with one stage.
        loss_stage: that stage; -1: the last one.
        drawing: the stages that draw data; None: the first and the last one.
        check: of what this stage has drawn, with the shapes; called where some stage that draws was given no labels,
            and could not look at its inputs before.

    Raises:
        BatchError, StopIteration: on every stage, when one of them could not draw its data or the stages disagree.
    """
    if num_stages == 1:
        if report.error is not None:
            raise on_every_rank(report.error)
        assert report.shapes is not None
        if check is not None and not report.seen:
            _checked(check, report.shapes)
        return report.shapes
    drawing = (0, num_stages - 1) if drawing is None else drawing
    headers = [torch.empty_like(report.encode()) for _ in range(num_stages)]
    torch_dist.all_gather(headers, report.encode(), group=group)
    rows = [header.tolist() for header in headers]
    if any(row[0] != Status.OK for row in rows):
        _raise_everywhere(report, group, num_stages, drawing)
    _require_agreement(rows, report, group)
    *_, uniform, first_rows, first_length, _ = rows[loss_stage]
    if uniform:
        shapes = (MicroBatchShape(first_rows, first_length),) * report.num_micro_batches
    else:
        shapes = _broadcast_shapes(report, group, loss_stage % num_stages)
    if check is not None and not all(rows[stage][-1] for stage in drawing):
        _check_on_every_stage(check, shapes, report, group, num_stages, drawing)
    return shapes


def _checked(check: Callable[[Shapes], None], shapes: Shapes) -> None:
    try:
        check(shapes)
    except Exception as error:
        raise on_every_rank(error) from None


def _check_on_every_stage(
    check: Callable[[Shapes], None], shapes: Shapes, report: StageReport, group: Any, num_stages: int,
    drawing: tuple[int, ...],
) -> None:  # fmt: skip
    """What ``check`` raises on one stage is raised on all."""
    try:
        check(shapes)
    except Exception as error:
        report = replace(report, error=error)
    failed = torch.tensor([report.error is not None], dtype=torch.int64)
    torch_dist.all_reduce(failed, op=torch_dist.ReduceOp.MAX, group=group)
    if bool(failed.item()):
        _raise_everywhere(report, group, num_stages, drawing)


def agree_between_pipelines(
    error: BaseException | None, report: StageReport, everyone: Any, peers: TensorPeers | None = None
) -> None:
    """Raise on every rank when one pipeline cannot go on: the others would wait for it in the reduction of gradients.

    A collective over ``everyone`` (gloo), the only one where all is well. Replicas whose data end at different steps
    all stop at the first end.

    Args:
        error: what :func:`exchange` raised in this pipeline.
        report: what this rank gave to it.
        peers: of this rank; None without tensor parallelism. Each of them is a pipeline of its own to DeepSpeed and
            draws its own data, which must be the same: their layers would mix different samples without a word.
    """
    pairs = [int(report.training), report.config_fingerprint, *_said_of_data(error, report, peers)]
    numbers = torch.tensor([_status(error), *(n for pair in pairs for n in _both_ways(pair))], dtype=torch.int64)
    torch_dist.all_reduce(numbers, op=torch_dist.ReduceOp.MAX, group=everyone)
    worst, *extremes = numbers.tolist()
    alike = [largest == -least for largest, least in zip(extremes[::2], extremes[1::2], strict=True)]
    nobody = [largest == _UNSAID for largest in extremes[::2]]
    if worst == Status.OK and all(same or none for same, none in zip(alike, nobody, strict=True)):
        return
    said: list[Any] = [None] * torch_dist.get_world_size()
    text = None if error is None else (_status(error), f"{type(error).__name__}: {error}")
    mine = _Said(text, report.training, report.agreement, report.num_micro_batches, report.sums, peers)
    torch_dist.all_gather_object(said, mine, group=everyone)
    if error is not None:
        raise error
    raise on_every_rank(_what_differs(said))


_SAME_CALLS = "Every rank must make the same calls between the same batches."
_UNSAID = -(2**62)  # below every number and every negated one: what a rank says that has nothing to say


def _both_ways(number: int | None) -> tuple[int, int]:
    """A number and its negation: where all ranks say the same, the largest ones are equal but for the sign."""
    return (_UNSAID, _UNSAID) if number is None else (number, -number)


def _said_of_data(error: BaseException | None, report: StageReport, peers: TensorPeers | None) -> list[int | None]:
    """For each replica: the number of micro-batches and the checksums; this rank knows those of its own replica."""
    if peers is None:
        return []
    said: list[int | None] = [None] * (3 * peers.num_replicas)
    if error is None:
        said[3 * peers.replica_id : 3 * peers.replica_id + 3] = [report.num_micro_batches, *report.sums]
    return said


class _Said(NamedTuple):
    """What a rank tells all others once something is wrong."""

    error: tuple[int, str] | None
    training: bool
    agreement: str
    num_micro_batches: int
    sums: DataSums
    peers: TensorPeers | None


def _what_differs(said: list[_Said]) -> BaseException:
    failed = {rank: one.error for rank, one in enumerate(said) if one.error is not None}
    if failed and all(status == Status.EXHAUSTED for status, _ in failed.values()):
        return StopIteration()
    if failed:
        problems = sorted({text for status, text in failed.values() if status != Status.EXHAUSTED})
        return BatchError(f"another pipeline (ranks {sorted(failed)}) cannot go on: {'; '.join(problems)}")
    if len({one.training for one in said}) > 1:
        return BatchError("some pipelines train, others evaluate: every rank must make the same calls")
    if len({one.agreement for one in said}) > 1:
        sides = _sides({rank: one.agreement for rank, one in enumerate(said)}, "ranks")
        return BatchError(f"the ranks disagree on {sides}. {_SAME_CALLS}")
    return _different_data(said)


def _sides(by_place: dict[int, str], places: str) -> str:
    """Who says what: "stages [0]: 3 slices; stages [1, 2]: 4 slices"."""
    sides: dict[str, list[int]] = {}
    for place, text in by_place.items():
        sides.setdefault(text, []).append(place)
    return "; ".join(f"{places} {who}: {text}" for text, who in sides.items())


def _different_data(said: list[_Said]) -> BatchError:
    """Names the tensor-parallel ranks whose data differ."""
    lines = []
    for peers in dict.fromkeys(one.peers for one in said if one.peers is not None):
        ones = {rank: said[rank] for rank in peers.ranks}
        where = f"(stage {peers.stage_id}, replica {peers.replica_id})"
        if len({one.num_micro_batches for one in ones.values()}) > 1:
            counts = {rank: f"{one.num_micro_batches} micro-batches" for rank, one in ones.items()}
            lines.append(f"tensor-parallel ranks {list(peers.ranks)} {where}: {_sides(counts, 'ranks')}")
            continue
        for what in DataSums._fields:
            sums = {rank: f"checksum {getattr(one.sums, what) or 0:016x}" for rank, one in ones.items()}
            if len(set(sums.values())) > 1:
                lines.append(f"{what} of tensor-parallel ranks {list(peers.ranks)} {where}: {_sides(sums, 'ranks')}")
    return BatchError(
        "tensor-parallel ranks have drawn different data, though they hold parts of the same layers:\n  "
        + "\n  ".join(lines)
        + "\nGive them the same samples in the same order: seed and divide the sampler by the data-parallel rank "
        "(engine.mpu.get_data_parallel_rank() of engine.mpu.get_data_parallel_world_size()), not by the global rank."
    )


def _status(error: BaseException | None) -> Status:
    if error is None:
        return Status.OK
    return Status.EXHAUSTED if isinstance(error, StopIteration) else Status.FAILED


def _raise_everywhere(report: StageReport, group: Any, num_stages: int, drawing: tuple[int, ...]) -> None:
    texts: list[Any] = [None] * num_stages
    mine = None if report.error is None else (report.status, report.problem)
    torch_dist.all_gather_object(texts, mine, group=group)
    failed = {stage: text for stage, text in enumerate(texts) if text is not None}
    exhausted = [stage for stage, (status, _) in failed.items() if status == Status.EXHAUSTED]
    if exhausted == list(drawing):  # all who draw: the ordinary end of the data
        raise on_every_rank(report.error or StopIteration())
    if report.status is Status.FAILED:
        assert report.error is not None
        raise on_every_rank(report.error)
    problems = [_failure_text(stage, status, problem) for stage, (status, problem) in failed.items()]
    raise on_every_rank(BatchError("; ".join(problems))) from report.error


def _failure_text(stage: int, status: Status, problem: str) -> str:
    if status == Status.EXHAUSTED:
        return (
            f"the data iterator of stage {stage} is at its end, but not that of the others: give the first and the "
            "last stage iterators over the same micro-batches"
        )
    return f"stage {stage} {problem}"


def _require_agreement(rows: list[list[int]], report: StageReport, group: Any) -> None:
    for index, name in ((1, "training (1) or evaluation (0)"), (2, "the number of micro-batches")):
        values = [row[index] for row in rows]
        if len(set(values)) > 1:
            sides = ", ".join(f"stage {stage}: {value}" for stage, value in enumerate(values))
            raise _disagree(f"{name}: {sides}. Every rank must make the same calls with the same config.")
    if len({row[3] for row in rows}) > 1:
        texts: list[Any] = [None] * len(rows)
        torch_dist.all_gather_object(texts, report.agreement, group=group)
        sides = _sides(dict(enumerate(texts)), "stages")
        raise _disagree(f"{sides}. {_SAME_CALLS}")
    if len({row[-1] for row in rows if row[-1]}) > 1:
        seen: list[Any] = [None] * len(rows)
        torch_dist.all_gather_object(seen, [[shape.rows, shape.length] for shape in report.seen], group=group)
        sides = _sides({stage: str(shapes) for stage, shapes in enumerate(seen) if shapes}, "stages")
        raise _disagree(
            f"the [rows, tokens] of the labels of each micro-batch: {sides}. Give the first and the last stage "
            "iterators over the same micro-batches"
        )


def _number_of(shapes: tuple[MicroBatchShape, ...]) -> int:
    """The same for the same shapes on every rank, 0 for none."""
    text = repr([(shape.rows, shape.length) for shape in shapes]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big") if shapes else 0


def _disagree(text: str) -> BaseException:
    return on_every_rank(BatchError(f"the stages disagree on {text}"))


def _broadcast_shapes(report: StageReport, group: Any, loss_stage: int) -> tuple[MicroBatchShape, ...]:
    shapes = torch.zeros(report.num_micro_batches, 2, dtype=torch.int64)
    if report.shapes is not None:
        shapes = torch.tensor([(s.rows, s.length) for s in report.shapes], dtype=torch.int64)
    torch_dist.broadcast(shapes, group=group, group_src=loss_stage)
    return tuple(MicroBatchShape(rows, length) for rows, length in shapes.tolist())
