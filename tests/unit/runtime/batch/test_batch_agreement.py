"""What ranks agree on before a batch, with ranks that are threads."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.dict_batch import BatchError
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.batch import batch_agreement
from terapipe_ds.runtime.batch.batch_agreement import (
    SAMPLE,
    DataSums,
    MicroBatchShape,
    PlaceInJob,
    StageReport,
    TensorPeers,
    checksum,
    contents_of,
)
from tests.unit.runtime.rank_threads import Ranks

SHAPES = (MicroBatchShape(2, 12), MicroBatchShape(2, 12))
MIXED = (MicroBatchShape(2, 12), MicroBatchShape(3, 7))


def report(**changes: Any) -> StageReport:
    fields: dict[str, Any] = {"training": True, "num_micro_batches": 2, "agreement": "two slices", "shapes": None}
    return StageReport(**{**fields, **changes})


def last(**changes: Any) -> StageReport:
    return report(**{"shapes": SHAPES, "seen": SHAPES, **changes})


def places(stages: int, pipelines: int = 1, peers: int = 1) -> list[PlaceInJob]:
    """Those of all ranks: as in DeepSpeed, neighbouring ranks are of one stage and of pipelines side by side."""
    size = stages * pipelines
    in_job = []
    for rank in range(size):
        stage_id, pipeline_id = divmod(rank, pipelines)
        start = rank - rank % peers
        group = TensorPeers(tuple(range(start, start + peers)), stage_id, pipeline_id // peers, pipelines // peers)
        pipeline = None if stages == 1 else tuple(range(pipeline_id, size, pipelines))
        stage = stage_id, stages, tuple(sorted({0, stages - 1})), stages - 1
        everyone = tuple(range(size)), pipeline_id, pipelines
        in_job.append(PlaceInJob(*stage, pipeline, *everyone, group if peers > 1 else None))
    return in_job


def agreed(
    monkeypatch: pytest.MonkeyPatch, reports: list[StageReport], in_job: list[PlaceInJob] | None = None
) -> tuple[list[Any], Ranks]:
    """What each rank gets, or the error that all raise alike."""
    ranks, in_job = Ranks(len(reports)), in_job or places(len(reports))
    monkeypatch.setattr(batch_agreement, "torch_dist", ranks)
    monkeypatch.setattr(agreement, "torch_dist", ranks)
    act = batch_agreement.agree_on_batch
    results = ranks.run(lambda rank: act(reports[rank], in_job[rank], lambda shapes: None))
    if any(isinstance(each, Exception) for each in results):
        assert all(isinstance(each, RaisedEverywhere) for each in results), results
        results = [each.error for each in results]
    return results, ranks


@pytest.mark.parametrize("changes", [(0, 0, 0), (0, 1, 0), (1, 0, 2)])
def test_every_rank_learns_of_a_changed_model(changes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, in_job, heard = Ranks(3), places(3), []
    monkeypatch.setattr(batch_agreement, "torch_dist", ranks)
    reports = [report(seen=SHAPES), report(), last()]
    reports = [replace(each, model_change=change) for each, change in zip(reports, changes, strict=True)]
    act = batch_agreement.agree_on_batch
    results = ranks.run(lambda rank: act(reports[rank], in_job[rank], lambda shapes: None, heard.append))
    assert results == [SHAPES] * 3
    assert heard == [max(changes) > 1] * (3 if any(changes) else 0)


@pytest.mark.parametrize(("shapes", "messages"), [(SHAPES, ["all_reduce"]), (MIXED, ["all_reduce", "broadcast"])])
def test_all_stages_learn_the_last_shapes(shapes: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of one size, and a second one for shapes that differ."""
    results, ranks = agreed(monkeypatch, [report(seen=shapes), report(), last(shapes=shapes, seen=shapes)])
    assert results == [shapes] * 3 and ranks.calls == [messages] * 3


EDGES = (((0, 5), (0,)), None)


@pytest.mark.parametrize(("shapes", "broadcasts"), [(SHAPES, 1), (MIXED, 2)])
def test_all_stages_learn_where_documents_start(shapes: Any, broadcasts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one message more, from the stage of the first part alone."""
    in_job = [replace(place, first_stage=1) for place in places(3)]
    reports = [report(seen=shapes), report(starts=EDGES), last(shapes=shapes, seen=shapes, starts=(None, None))]
    results, ranks = agreed(monkeypatch, reports, in_job)
    assert [tuple(shape.starts for shape in each) for each in results] == [EDGES] * 3
    assert results == [shapes] * 3 and ranks.calls == [["all_reduce", *["broadcast"] * broadcasts]] * 3


class TestErrors:
    @pytest.mark.parametrize(("own", "what"), [
        (KeyError("tokens"), "ranks [0]: stage 0 failed to draw its data: KeyError: 'tokens'"),
        (TeraPipeConfigError("CUDA"), "ranks [0]: stage 0 refuses the batch: TeraPipeConfigError: CUDA"),
    ])  # fmt: skip
    def test_what_one_stage_could_not_draw(self, own: Exception, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for in_job in (None, places(1, pipelines=3)):
            reports = [report(error=own), last(), last()] if in_job else [report(error=own), report(), last()]
            results, _ = agreed(monkeypatch, reports, in_job)
            assert results[0] is own
            assert [(type(error), str(error)) for error in results[1:]] == [(BatchError, what)] * 2

    @pytest.mark.parametrize("changes", [{"training": False}, {"agreement": "none"}])
    def test_pipelines_that_disagree(self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
        results, _ = agreed(monkeypatch, [last(), last(**changes), last()], places(1, pipelines=3))
        for error in results:
            assert isinstance(error, BatchError) and "ranks [0, 2]: t" in str(error) and "ranks [1]: " in str(error)


class TestTensorPeers:
    """Four ranks, of one stage and two replicas, that have drawn data with some checksums."""

    def agreed(self, monkeypatch: pytest.MonkeyPatch, *sums: tuple[int | None, int | None]) -> list[Any]:
        return agreed(monkeypatch, [last(sums=DataSums(*each)) for each in sums], places(1, pipelines=4, peers=2))[0]

    @pytest.mark.parametrize("other", [(2**62 - 1, 6), (None, 3), (None, None)])
    def test_replicas_may_have_other_data(self, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
        assert self.agreed(monkeypatch, (1, 2), (1, 2), other, other) == [SHAPES] * 4

    @pytest.mark.parametrize(("other", "what"), [((7, 9), "inputs"), ((8, 8), "labels")])
    def test_peers_with_other_data(self, monkeypatch: pytest.MonkeyPatch, other: tuple[int, int], what: str) -> None:
        for error in self.agreed(monkeypatch, (1, 2), (1, 2), (8, 9), other):
            assert isinstance(error, BatchError)
            _, line, advice = str(error).splitlines()
            assert line.strip().startswith(f"{what} of tensor-parallel ranks [2, 3] (stage 0, replica 1): ranks [2]")
            assert "data-parallel rank" in advice

    def test_data_that_are_swapped_between_replicas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = self.agreed(monkeypatch, (1, 2), (8, 9), (8, 9), (1, 2))
        assert all(str(error).count("inputs of tensor-parallel ranks") == 2 for error in results)


# -- the checksum by which ranks find out that they have drawn different data ------------------------------------------

TOKENS = torch.arange(24).reshape(2, 12)


def test_the_same_values_in_other_memory() -> None:
    apart = torch.zeros(2, 24, dtype=torch.int64)[:, ::2]
    apart.copy_(TOKENS)
    assert checksum([TOKENS]) == checksum([apart]) == checksum([TOKENS.T.contiguous().T])
    assert 0 <= checksum([TOKENS]) < 2**62


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_any_change_shows(values: list[int], data: st.DataObject) -> None:
    """One bit of one value, or two values that change places: sums of the values would be the same."""
    before = checksum([torch.tensor(values)])
    place = data.draw(st.integers(0, len(values) - 1))
    changed = torch.tensor(values)
    changed[place] ^= 1 << data.draw(st.integers(0, 62))
    assert checksum([changed]) != before
    other = data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[place], swapped[other] = swapped[other], swapped[place]
    assert (checksum([torch.tensor(swapped)]) == before) == (swapped == values)


@pytest.mark.parametrize(("one", "other"), [
    (TOKENS, TOKENS.reshape(3, 8)), (TOKENS, TOKENS.int()), (TOKENS, TOKENS.double()), ([TOKENS], [TOKENS, TOKENS]),
    ([TOKENS], [TOKENS[:1], TOKENS[1:]]), ([TOKENS], []), (3, 4), (None, 0),
    ("text", "next"), (1, True), (torch.tensor(1), torch.tensor(2)),
    (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)),
    (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()), (torch.ones(()).half(), torch.empty(0).half()),
    ({"a": TOKENS}, {"a": TOKENS + 1}), ({"a": TOKENS}, {"b": TOKENS}), ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
    ({"a": [1, 2], "b": []}, {"a": [1], "b": [2]}), (np.arange(3000), np.arange(3000)[::-1]),
    (MicroBatchShape(2, 12), MicroBatchShape(2, 13)),
])  # fmt: skip
def test_values_of_any_kind_count(one: Any, other: Any) -> None:
    """As labels may be in DeepSpeed's own order."""
    assert checksum([one]) == checksum([copy.deepcopy(one)]) != checksum([other])


def test_an_object_whose_text_names_its_address_is_no_false_alarm() -> None:
    assert checksum({"kept": object()}) == checksum({"kept": object()})


@pytest.mark.parametrize("number", [0, -100, -1, 7])
def test_labels_of_one_value_say_nothing(number: int) -> None:
    """A stage without the loss gives what it likes in their place."""
    assert contents_of(torch.full_like(TOKENS, number)) == 0 == contents_of(()) == contents_of(torch.empty(0))


def test_values_count_and_neither_their_dtype_nor_what_stands_beside_them() -> None:
    mask = torch.ones(2, 12)
    assert contents_of(TOKENS) == contents_of(TOKENS.int()) == contents_of((TOKENS, mask)) != 0
    assert contents_of(TOKENS) != contents_of(TOKENS.flip(0)) and contents_of(TOKENS) != contents_of(TOKENS + 1)
    large = torch.arange(3 * SAMPLE)
    assert contents_of(large) != contents_of(torch.cat([large[: 2 * SAMPLE], large[2 * SAMPLE :].flip(0)]))
