"""What the stages of a pipeline tell each other once per batch, before its first action.

DeepSpeed gives data only to the first and the last stage, so these draw all micro-batches first. Then one fixed-size
header of every stage goes round on the CPU: all learn whether this is training or evaluation, how many micro-batches
there are and how long each is, and whether some stage could not draw its data. A problem is raised on *every* stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as torch_dist

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


@dataclass(frozen=True)
class StageReport:
    """One stage's part of the header. ``shapes`` is None on stages that draw no labels."""

    training: bool
    num_micro_batches: int
    config_fingerprint: int
    shapes: tuple[MicroBatchShape, ...] | None
    error: BaseException | None = None

    @property
    def status(self) -> Status:
        return _status(self.error)

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
        ]
        return torch.tensor([int(i) for i in ints], dtype=torch.int64)


def raised_on_every_rank(error: BaseException) -> bool:
    """True for an error that the header exchange raised on all stages of the pipeline alike."""
    return getattr(error, "_terapipe_on_every_rank", False)


def on_every_rank(error: BaseException) -> BaseException:
    """Mark an error that all stages raise alike: nobody is left waiting, so the job need not be ended."""
    error._terapipe_on_every_rank = True  # type: ignore[attr-defined]
    return error


def exchange(report: StageReport, group: Any, num_stages: int) -> tuple[MicroBatchShape, ...]:
    """The shapes of the batch's micro-batches as the last stage sees them. A collective over the pipeline's stages.

    Args:
        group: the pipeline's control group (gloo), or None with one stage.

    Raises:
        BatchError, StopIteration: on every stage, when one of them could not draw its data or the stages disagree.
    """
    if num_stages == 1:
        if report.error is not None:
            raise on_every_rank(report.error)
        assert report.shapes is not None
        return report.shapes
    headers = [torch.empty_like(report.encode()) for _ in range(num_stages)]
    torch_dist.all_gather(headers, report.encode(), group=group)
    rows = [header.tolist() for header in headers]
    if any(row[0] != Status.OK for row in rows):
        _raise_everywhere(report, group, num_stages)
    _require_agreement(rows)
    *_, uniform, first_rows, first_length = rows[-1]
    if uniform:
        return (MicroBatchShape(first_rows, first_length),) * report.num_micro_batches
    return _broadcast_shapes(report, group, num_stages)


def agree_between_pipelines(error: BaseException | None, training: bool, everyone: Any) -> None:
    """Raise on every rank when one pipeline cannot go on: the others would wait for it in the reduction of gradients.

    A collective over ``everyone`` (gloo). Replicas whose data end at different steps all stop at the first end.

    Args:
        error: what :func:`exchange` raised in this pipeline.
    """
    numbers = torch.tensor([_status(error), int(training), -int(training)], dtype=torch.int64)
    torch_dist.all_reduce(numbers, op=torch_dist.ReduceOp.MAX, group=everyone)
    worst, some_train, none_evaluates = numbers.tolist()
    if worst == Status.OK and some_train == -none_evaluates:
        return
    texts: list[Any] = [None] * torch_dist.get_world_size()
    mine = None if error is None else (_status(error), f"{type(error).__name__}: {error}")
    torch_dist.all_gather_object(texts, mine, group=everyone)
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if not failed:
        raise on_every_rank(BatchError("some pipelines train, others evaluate: every rank must make the same calls"))
    if all(status == Status.EXHAUSTED for status, _ in failed.values()):
        raise on_every_rank(StopIteration())
    problems = sorted({text for status, text in failed.values() if status != Status.EXHAUSTED})
    raise on_every_rank(BatchError(f"another pipeline (ranks {sorted(failed)}) cannot go on: {'; '.join(problems)}"))


def _status(error: BaseException | None) -> Status:
    if error is None:
        return Status.OK
    return Status.EXHAUSTED if isinstance(error, StopIteration) else Status.FAILED


def _raise_everywhere(report: StageReport, group: Any, num_stages: int) -> None:
    texts: list[Any] = [None] * num_stages
    mine = None if report.error is None else (report.status, f"{type(report.error).__name__}: {report.error}")
    torch_dist.all_gather_object(texts, mine, group=group)
    failed = {stage: text for stage, text in enumerate(texts) if text is not None}
    exhausted = [stage for stage, (status, _) in failed.items() if status == Status.EXHAUSTED]
    if exhausted == [0, num_stages - 1]:  # all who draw: the ordinary end of the data
        raise on_every_rank(report.error or StopIteration())
    if report.status is Status.FAILED:
        assert report.error is not None
        raise on_every_rank(report.error)
    problems = [_failure_text(stage, status, error) for stage, (status, error) in failed.items()]
    raise on_every_rank(BatchError("; ".join(problems))) from report.error


def _failure_text(stage: int, status: Status, error: str) -> str:
    if status == Status.EXHAUSTED:
        return (
            f"the data iterator of stage {stage} is at its end, but not that of the others: give the first and the "
            "last stage iterators over the same micro-batches"
        )
    return f"stage {stage} failed to draw its data: {error}"


def _require_agreement(rows: list[list[int]]) -> None:
    names = {
        1: "training (1) or evaluation (0)",
        2: "the number of micro-batches",
        3: "the fingerprint of the terapipe section",
    }
    for index, name in names.items():
        values = [row[index] for row in rows]
        if len(set(values)) > 1:
            sides = ", ".join(f"stage {stage}: {value}" for stage, value in enumerate(values))
            raise on_every_rank(
                BatchError(
                    f"the stages disagree on {name}: {sides}. Every rank must make the same calls with the same config."
                )
            )


def _broadcast_shapes(report: StageReport, group: Any, num_stages: int) -> tuple[MicroBatchShape, ...]:
    shapes = torch.zeros(report.num_micro_batches, 2, dtype=torch.int64)
    if report.shapes is not None:
        shapes = torch.tensor([(s.rows, s.length) for s in report.shapes], dtype=torch.int64)
    torch_dist.broadcast(shapes, group=group, group_src=num_stages - 1)
    return tuple(MicroBatchShape(rows, length) for rows, length in shapes.tolist())
