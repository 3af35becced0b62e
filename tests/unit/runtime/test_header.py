"""The header that the stages exchange, with the other stages played by a stand-in for torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import header
from terapipe_ds.runtime.batch import BatchError
from terapipe_ds.runtime.header import (
    DataSums,
    MicroBatchShape,
    StageReport,
    Status,
    TensorPeers,
    exchange,
    raised_on_every_rank,
)

SHAPES = (MicroBatchShape(2, 12), MicroBatchShape(2, 12))
MIXED = (MicroBatchShape(2, 12), MicroBatchShape(3, 7))


def report(**changes: Any) -> StageReport:
    fields: dict[str, Any] = {"training": True, "num_micro_batches": 2, "config_fingerprint": 77, "shapes": None}
    return StageReport(**{**fields, **changes})


class Stages:
    """Collectives over stages whose reports are all known."""

    def __init__(self, reports: list[StageReport]) -> None:
        self.reports = reports
        self.calls: list[str] = []

    def all_gather(self, headers: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        self.calls.append("all_gather")
        for empty, each in zip(headers, self.reports, strict=True):
            empty.copy_(each.encode())

    def all_gather_object(self, texts: list[Any], mine: Any, group: Any) -> None:
        self.calls.append("all_gather_object")
        texts[:] = [
            [[s.rows, s.length] for s in each.seen]
            if isinstance(mine, list)
            else each.agreement
            if isinstance(mine, str)
            else None
            if each.error is None
            else (each.status, each.problem)
            for each in self.reports
        ]
        assert mine in texts

    def broadcast(self, shapes: torch.Tensor, group: Any, group_src: int) -> None:
        self.calls.append("broadcast")
        source = self.reports[group_src].shapes
        assert source is not None
        shapes.copy_(torch.tensor([(s.rows, s.length) for s in source]))


def exchanged(monkeypatch: pytest.MonkeyPatch, reports: list[StageReport]) -> tuple[list[Any], Stages]:
    """What `exchange` gives or raises on each stage."""
    stages = Stages(reports)
    monkeypatch.setattr(header, "torch_dist", stages)
    results: list[Any] = []
    for each in reports:
        try:
            results.append(exchange(each, None, len(reports)))
        except Exception as error:
            results.append(error)
    return results, stages


class TestShapes:
    def test_every_stage_learns_those_of_the_last_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, stages = exchanged(monkeypatch, [report(), report(), report(shapes=SHAPES)])
        assert results == [SHAPES] * 3
        assert set(stages.calls) == {"all_gather"}, "micro-batches of one shape fit in the header"

    def test_mixed_shapes_take_a_second_message(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, stages = exchanged(monkeypatch, [report(), report(), report(shapes=MIXED)])
        assert results == [MIXED] * 3
        assert stages.calls == ["all_gather", "broadcast"] * 3

    def test_the_last_stage_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, _ = exchanged(monkeypatch, [report(shapes=MIXED), report(shapes=SHAPES)])
        assert results == [SHAPES] * 2

    def test_one_stage_needs_nobody(self) -> None:
        assert exchange(report(shapes=MIXED), None, 1) == MIXED

    def test_the_header_has_a_fixed_size(self) -> None:
        reports = [report(), report(shapes=MIXED), report(shapes=SHAPES * 50), report(error=ValueError("x"))]
        assert {tuple(each.encode().shape) for each in reports} == {(8,)}
        assert report(config_fingerprint=2**62 - 1).encode().tolist()[3] == 2**62 - 1


class TestErrors:
    def test_what_one_stage_could_not_draw(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = KeyError("tokens")
        results, _ = exchanged(monkeypatch, [report(error=own), report(), report(shapes=SHAPES)])
        assert results[0] is own
        for error in results[1:]:
            assert isinstance(error, BatchError)
            assert str(error) == "stage 0 failed to draw its data: KeyError: 'tokens'"
        assert all(raised_on_every_rank(error) for error in results)

    def test_what_one_stage_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = TeraPipeConfigError("CUDA_LAUNCH_BLOCKING=1")
        results, _ = exchanged(monkeypatch, [report(), report(error=own), report(shapes=SHAPES)])
        assert results[1] is own
        for error in results[::2]:
            assert isinstance(error, BatchError)
            assert str(error) == "stage 1 refuses the batch: TeraPipeConfigError: CUDA_LAUNCH_BLOCKING=1"
        assert all(raised_on_every_rank(error) for error in results)

    def test_the_end_of_the_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, _ = exchanged(monkeypatch, [report(error=StopIteration()), report(), report(error=StopIteration())])
        assert [type(error) for error in results] == [StopIteration] * 3
        assert all(raised_on_every_rank(error) for error in results)

    def test_the_end_of_the_data_on_one_side_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not an ordinary end: one side has drawn data that the other one does not have."""
        results, _ = exchanged(monkeypatch, [report(error=StopIteration()), report(), report(shapes=SHAPES)])
        for error in results:
            assert isinstance(error, BatchError)
            assert "iterator of stage 0 is at its end, but not that of the others" in str(error)
            assert raised_on_every_rank(error)

    def test_the_end_of_the_data_on_one_side_and_an_error_on_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = [report(error=StopIteration()), report(), report(error=ValueError("bad"))]
        results, _ = exchanged(monkeypatch, failed)
        assert [type(error) for error in results] == [BatchError, BatchError, ValueError]
        assert "stage 0 is at its end" in str(results[1])
        assert "stage 2 failed to draw its data: ValueError: bad" in str(results[1])

    def test_labels_of_other_shapes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, _ = exchanged(monkeypatch, [report(seen=MIXED), report(), report(shapes=SHAPES, seen=SHAPES)])
        for error in results:
            assert isinstance(error, BatchError)
            assert "stages [0]: [[2, 12], [3, 7]]; stages [2]: [[2, 12], [2, 12]]. Give" in str(error)
            assert raised_on_every_rank(error)

    def test_labels_of_the_same_shapes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results, _ = exchanged(monkeypatch, [report(seen=SHAPES), report(), report(shapes=SHAPES, seen=SHAPES)])
        assert results == [SHAPES] * 3

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"training": False}, r"training \(1\) or evaluation \(0\): stage 0: 0, stage 1: 1"),
            ({"num_micro_batches": 3}, "the number of micro-batches: stage 0: 3, stage 1: 2"),
            (
                {"config_fingerprint": 5, "agreement": "three slices"},
                r"disagree on stages \[0\]: three slices; stages \[1\]: two slices",
            ),
        ],
    )
    def test_stages_that_disagree(self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
        results, _ = exchanged(monkeypatch, [report(**changes), report(shapes=SHAPES, agreement="two slices")])
        for error in results:
            assert raised_on_every_rank(error)
            with pytest.raises(BatchError, match=message):
                raise error

    def test_one_stage_raises_its_own_error(self) -> None:
        with pytest.raises(KeyError) as caught:
            exchange(report(error=KeyError("tokens")), None, 1)
        assert raised_on_every_rank(caught.value)

    def test_other_errors_are_not_everywhere(self) -> None:
        assert not raised_on_every_rank(ValueError())

    @pytest.mark.parametrize(
        ("error", "status"),
        [(None, Status.OK), (StopIteration(), Status.EXHAUSTED), (ValueError(), Status.FAILED)],
    )
    def test_status(self, error: BaseException | None, status: Status) -> None:
        assert report(error=error).status is status


class Pipelines:
    """Collectives over ranks that are pipelines of one stage each. Every rank has to make the same calls, so one rank
    after the other says what it has, and then all are told the outcome."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, num_ranks: int) -> None:
        self.numbers: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.num_ranks = num_ranks

    def all_reduce(self, numbers: torch.Tensor, op: Any, group: Any) -> None:
        assert op == self.ReduceOp.MAX
        if len(self.numbers) < self.num_ranks:
            self.numbers.append(numbers.clone())
            raise Collected
        numbers.copy_(torch.stack(self.numbers).amax(dim=0))

    def get_world_size(self) -> int:
        return self.num_ranks

    def all_gather_object(self, texts: list[Any], mine: Any, group: Any) -> None:
        if len(self.objects) < self.num_ranks:
            self.objects.append(mine)
            raise Collected
        texts[:] = self.objects


class Collected(BaseException):
    """This rank has said what it has to say."""


Ranks = list[tuple[BaseException | None, StageReport, TensorPeers | None]]


def said(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, expected_numbers: int | None = None
) -> list[BaseException | None]:
    """What `agree_between_pipelines` raises on each rank."""
    pipelines = Pipelines(len(ranks))
    monkeypatch.setattr(header, "torch_dist", pipelines)
    raised: list[BaseException | None] = []
    for _ in ("the numbers", "the objects, if any are asked for", "the outcome"):
        raised = []
        for error, mine, peers in ranks:
            try:
                header.agree_between_pipelines(error, mine, None, peers)
            except Exception as caught:
                raised.append(caught)
            except Collected:
                raised.append(None)
            else:
                raised.append(None)
    assert len(pipelines.numbers) == len(ranks)
    assert len({len(numbers) for numbers in pipelines.numbers}) == 1, "one size, whoever failed"
    assert (not pipelines.objects) == all(each is None for each in raised), "one small message where all is well"
    if expected_numbers is not None:
        assert len(pipelines.numbers[0]) == expected_numbers
    return raised


def agreed(
    monkeypatch: pytest.MonkeyPatch, errors: list[BaseException | None], training: list[bool] | None = None
) -> list[BaseException | None]:
    """The same for replicas that differ in their errors and modes alone."""
    modes = training or [True] * len(errors)
    ranks: Ranks = [(error, report(training=mode), None) for error, mode in zip(errors, modes, strict=True)]
    return said(monkeypatch, ranks, expected_numbers=5)


class TestPipelines:
    @pytest.mark.parametrize("mode", [True, False])
    def test_all_is_well(self, monkeypatch: pytest.MonkeyPatch, mode: bool) -> None:
        assert agreed(monkeypatch, [None] * 3, [mode] * 3) == [None] * 3

    def test_all_stop_at_the_first_end_of_the_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = header.on_every_rank(StopIteration())
        raised = agreed(monkeypatch, [None, own, None])
        assert raised[1] is own
        assert [type(error) for error in raised] == [StopIteration] * 3
        assert all(error is not None and raised_on_every_rank(error) for error in raised)

    def test_an_error_in_one_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = header.on_every_rank(BatchError("bad"))
        raised = agreed(monkeypatch, [None, own, header.on_every_rank(StopIteration())])
        assert raised[1] is own
        assert isinstance(raised[2], StopIteration)
        assert str(raised[0]) == "another pipeline (ranks [1, 2]) cannot go on: BatchError: bad"

    def test_some_train_and_others_evaluate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for error in agreed(monkeypatch, [None, None], [True, False]):
            assert isinstance(error, BatchError)
            assert "some pipelines train, others evaluate" in str(error)
            assert raised_on_every_rank(error)

    def test_ranks_that_set_other_plans_see_both_sides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plans = ["(9, 14)", "none", "(9, 14)"]
        ranks: Ranks = [(None, report(config_fingerprint=len(text), agreement=text), None) for text in plans]
        for error in said(monkeypatch, ranks):
            assert isinstance(error, BatchError) and raised_on_every_rank(error)
            assert "ranks [0, 2]: (9, 14); ranks [1]: none" in str(error)


PEERS = [TensorPeers((0, 1), 0, 0, 2), TensorPeers((2, 3), 0, 1, 2)]  # two replicas of two tensor-parallel ranks


def drawn(sums: list[tuple[int | None, int | None]], **last: Any) -> Ranks:
    """Four ranks that have drawn data with these checksums; ``last``: how the last one's report is another one."""
    reports = [report(sums=DataSums(*each)) for each in sums[:-1]] + [report(sums=DataSums(*sums[-1]), **last)]
    return [(None, each, PEERS[rank // 2]) for rank, each in enumerate(reports)]


class TestTensorPeers:
    def test_peers_with_the_same_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replicas have other data, and that is right; 0 and the largest sum are ordinary ones."""
        ranks = drawn([(0, 5), (0, 5), (2**62 - 1, 6), (2**62 - 1, 6)])
        assert said(monkeypatch, ranks, expected_numbers=5 + 2 * 6) == [None] * 4

    @pytest.mark.parametrize("sums", [(None, 3), (4, None), (None, None)])
    def test_what_a_stage_does_not_draw_is_not_compared(
        self, monkeypatch: pytest.MonkeyPatch, sums: tuple[int | None, int | None]
    ) -> None:
        assert said(monkeypatch, drawn([sums] * 4)) == [None] * 4

    @pytest.mark.parametrize(("index", "what"), [(0, "inputs"), (1, "labels")])
    def test_peers_with_other_data(self, monkeypatch: pytest.MonkeyPatch, index: int, what: str) -> None:
        other = (7, 9) if index == 0 else (8, 8)
        for error in said(monkeypatch, drawn([(1, 2), (1, 2), (8, 9), other])):
            assert isinstance(error, BatchError) and raised_on_every_rank(error)
            _, line, last = str(error).splitlines()
            assert line.strip().startswith(f"{what} of tensor-parallel ranks [2, 3] (stage 0, replica 1): ranks [2]")
            assert "data-parallel rank" in last

    def test_peers_with_other_numbers_of_micro_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for error in said(monkeypatch, drawn([(1, 2), (1, 2), (8, 9), (7, 9)], num_micro_batches=3)):
            assert "ranks [2]: 2 micro-batches; ranks [3]: 3 micro-batches" in str(error)

    def test_an_error_comes_before_a_comparison(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = header.on_every_rank(BatchError("bad"))
        ranks = drawn([(1, 2), (3, 2), (8, 9), (8, 9)])
        ranks[1] = (own, report(error=own), PEERS[0])
        raised = said(monkeypatch, ranks)
        assert raised[1] is own
        assert str(raised[0]) == "another pipeline (ranks [1]) cannot go on: BatchError: bad"
