"""Drawing micro-batches on one stage; the other stages are not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.dict_batch import BatchError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.agreement import ErrorsUnwrapped
from terapipe_ds.runtime.batch import source as data
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape, PlaceInJob, StageReport, TensorPeers
from terapipe_ds.runtime.batch.source import BatchSource, _require_rows
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.schedule import placement_for

TOKENS = torch.arange(24).reshape(2, 12)
SHAPE, PLAN = MicroBatchShape(2, 12), SlicePlan((5, 7))
WHOLE = {"slices": 1, "schedule": "1f1b"}  # DeepSpeed's own order


def config(**changes: Any) -> TeraPipeConfig:
    return TeraPipeConfig(enabled=True, **{"slices": 2, **changes})


class Source(BatchSource):
    """One part on each stage; raises what a user gets."""

    def __init__(self, config: TeraPipeConfig, next_batch: Callable[[], Any], place: PlaceInJob, **more: Any) -> None:
        is_cut = more.pop("is_cut", lambda length: not config.is_one_slice)
        layout = Layout(place.num_stages, placement_for("1f1b", place.num_stages, 1))
        super().__init__(config, next_batch, place, layout, is_cut, **more)

    def draw(self, *args: Any, **kwargs: Any) -> Any:
        with ErrorsUnwrapped():
            return super().draw(*args, **kwargs)


def at(stage_id: int, num_stages: int, **more: Any) -> PlaceInJob:
    return PlaceInJob(stage_id, num_stages, tuple(sorted({0, num_stages - 1})), num_stages - 1, **more)


def of(*batches: Any, **changes: Any) -> BatchSource:
    return Source(config(**changes), iter(batches).__next__, at(0, 1))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StageReport]:
    """What the stage would tell the others; they are taken to agree on two rows of twelve tokens."""
    told: list[StageReport] = []

    def agree(report: StageReport, place: PlaceInJob, *_: Any) -> tuple[MicroBatchShape, ...]:
        told.append(report)
        if report.error is not None:
            raise report.error
        return (MicroBatchShape(2, 12),) * report.num_micro_batches

    monkeypatch.setattr(data, "agree_on_batch", agree)
    return told


class TestDrawing:
    def test_what_is_no_sequence_is_refused_but_in_deepspeeds_own_order(self) -> None:
        images, classes, targets = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long), torch.zeros(4, 5)
        for other in ({}, {"slices": 1}):
            with pytest.raises(BatchError, match='no label tensor has dimension 1.*"slices": 1, "schedule": "1f1b"'):
                of((images, classes), **other).draw(1, training=True)
        one = of((images, targets), **WHOLE)
        assert one.draw(1, training=True)[1] == (MicroBatchShape(4, 5),)
        with pytest.raises(BatchError, match="no input tensor has the sequence"):
            one.slice_inputs(images, MicroBatchShape(4, 5), SlicePlan((2, 3)))  # set by hand

    def test_a_loader_may_reuse_its_memory(self) -> None:
        memory = torch.zeros(2, 12, dtype=torch.long)
        drawn, _ = Source(config(), lambda: ((memory.add_(1), memory), memory), at(0, 1)).draw(3, training=True)
        assert [int(each.inputs[0][0, 0]) for each in drawn] == [1, 2, 3]
        assert [int(each.labels.tensors[0][0, 0]) for each in drawn if each.labels is not None] == [1, 2, 3]

    @pytest.mark.parametrize("labels", [None, (), []])
    def test_without_a_loss_the_inputs_tell_the_length(self, labels: Any) -> None:
        _, shapes = of(((torch.zeros(3), TOKENS), labels)).draw(1, training=False, needs_labels=False)
        assert shapes == (MicroBatchShape(2, 12),)


class TestWhatSizesDoNotTell:
    """Inputs that have the labels' length and need not be tokens."""

    FLOATS, MASK = torch.ones(2, 12), torch.ones(2, 1, 12, 12, dtype=torch.bool)

    @pytest.mark.parametrize(("passenger", "told"), [(FLOATS, "features of each row"), (MASK, "two dimensions")])
    def test_they_are_refused_where_sequences_are_cut(self, passenger: torch.Tensor, told: str) -> None:
        batch = ((TOKENS, passenger), TOKENS)
        for cut in ({}, {"slices": [5, 7]}, {"slices": "auto"}):
            with pytest.raises(BatchError, match=f"input 1 .*{told}.*sliced_inputs = .0. hands it whole"):
                of(batch, **cut).draw(1, training=True)
        for whole in ({"slices": 1}, {"slices": [12]}, WHOLE):
            one = of(batch, **whole)
            (drawn,), (shape,) = one.draw(1, training=True)
            assert one.slice_inputs(drawn.inputs, shape, SlicePlan((12,))).tensors[1].shape == passenger.shape

    @pytest.mark.parametrize(("indices", "sliced"), [([0], (True, False)), ([0, 1], (True, True))])
    def test_not_where_the_config_names_what_is_cut(self, indices: list[int], sliced: tuple[bool, ...]) -> None:
        one = of(((TOKENS, self.FLOATS), TOKENS), sliced_inputs=indices)
        (drawn,), (shape,) = one.draw(1, training=True)
        assert one.slice_inputs(drawn.inputs, shape, PLAN).sliced == sliced


class TestDocuments:
    IDS = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    STARTS = ((0, 5), (0,))

    def test_they_are_found_where_position_ids_restart(self) -> None:
        whole = torch.arange(12).expand(2, 12)
        batches = [((TOKENS, ids), TOKENS) for ids in (self.IDS, whole, self.IDS.flip(0).int())]
        _, shapes = of(*batches, documents=1).draw(3, training=True)
        assert [shape.starts for shape in shapes] == [self.STARTS, None, self.STARTS[::-1]]
        assert of(batches[0]).draw(1, training=True)[1][0].starts is None

    def test_ids_of_few_bits_may_end_where_their_dtype_does(self) -> None:
        """Their number + 1 would be the 0 that the next document starts with."""
        ids = torch.cat([torch.arange(256), torch.arange(4)])[None].to(torch.uint8)
        _, (shape,) = of(((ids.long(), ids), ids.long()), documents=1).draw(1, training=True)
        assert shape.starts == ((0, 256),)

    def test_tokens_may_come_first(self) -> None:
        batch = (self.IDS.T, TOKENS.T), TOKENS.T
        _, (shape,) = of(batch, documents=0, sequence_dim=0).draw(1, training=True)
        assert shape.starts == self.STARTS


class TestDicts:
    """What becomes of the entries themselves is in `test_dict_batch.py`."""

    IDS, STARTS = TestDocuments.IDS, TestDocuments.STARTS
    SHIFTED = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], dim=1)

    @pytest.mark.parametrize("section", [{}, {"slices": 1}, WHOLE])
    def test_all_that_follows_sees_tuples(self, section: dict[str, Any]) -> None:
        memory = {"input_ids": TOKENS.clone(), "labels": TOKENS.clone(), "position_ids": self.IDS.clone()}
        one = of(memory, documents="position_ids", **section)
        (drawn,), (shape,) = one.draw(1, training=True)
        memory["input_ids"].zero_(), memory["labels"].zero_()  # which a loader may use again
        assert (shape.rows, shape.length, shape.starts) == (2, 12, self.STARTS)
        expected = self.SHIFTED.clone()
        expected[0, 4] = -100
        assert drawn.labels is not None and torch.equal(drawn.labels.part(0, 12), expected)
        inputs = one.slice_inputs(drawn.inputs, shape, PLAN if not section else SlicePlan((12,)))
        assert torch.equal(inputs.tensors[0], TOKENS) and torch.equal(inputs.tensors[1], self.IDS)
        assert inputs.sliced == (True, True)

    @pytest.mark.parametrize("section", [{}, WHOLE])
    def test_labels_are_needed_for_a_loss_alone(self, section: dict[str, Any]) -> None:
        with pytest.raises(BatchError, match="a dict batch has neither labels nor shift_labels"):
            of({"input_ids": TOKENS}, **section).draw(1, training=True)
        _, (shape,) = of({"input_ids": TOKENS}, **section).draw(1, training=False, needs_labels=False)
        assert shape.length == 12

    def test_the_shift_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        batch = {"input_ids": TOKENS, "labels": TOKENS}
        with caplog.at_level("INFO", "terapipe_ds"):
            of(*[{**batch, "shift_labels": TOKENS}] * 2).draw(2, training=True)
            assert "shifted" not in caplog.text
            of(*[batch] * 3).draw(3, training=True)
        assert caplog.text.count("labels of dict batches are shifted here") == 1

    @pytest.mark.parametrize("stage_id", [0, 2])
    def test_both_ends_see_the_documents(self, stage_id: int, reports: list[StageReport]) -> None:
        """The first stage tells them to all; the last one shifts its labels by its own copy."""
        numbers = (torch.arange(12) < torch.tensor([[5], [12]])).int()
        batch = {"input_ids": TOKENS, "labels": TOKENS, "seq_idx": numbers}
        source = Source(config(documents="position_ids"), iter([batch]).__next__, at(stage_id, 3))
        (drawn,), _ = source.draw(1, training=True)
        if stage_id == 0:
            assert reports[0].starts == (self.STARTS,) and torch.equal(drawn.inputs, TOKENS)
        else:
            assert drawn.labels is not None and drawn.labels.part(0, 12)[0, 4] == -100

    def test_tensor_parallel_ranks_compare_where_documents_start(self, reports: list[StageReport]) -> None:
        place = at(0, 2, peers=TensorPeers((0, 1), 0, 0, 1))
        for edge in (5, 5, 6):
            batch = {"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, edge, 12, 24])}
            Source(config(documents="position_ids"), iter([batch]).__next__, place).draw(1, training=True)
        one, same, other = (report.sums.inputs for report in reports)
        assert one == same != other


@pytest.mark.parametrize("stage_id", [0, 1])
def test_tensor_parallel_ranks_compare_what_their_stage_uses(reports: list[StageReport], stage_id: int) -> None:
    place = at(stage_id, 2, peers=TensorPeers((0, 1), stage_id, 0, 1))
    for inputs, labels in ((TOKENS, 3), (TOKENS + 1, 3), (TOKENS, 4)):
        Source(config(**WHOLE), iter([(inputs, labels)]).__next__, place).draw(1, training=True)
    first, other_inputs, other_labels = (report.sums for report in reports)
    assert (first.inputs is None, first.labels is None) == (stage_id == 1, stage_id == 0)
    assert (first != other_inputs, first != other_labels) == (stage_id == 0, stage_id == 1)


IDS = TestDocuments.IDS
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "there is no data: give train_batch.. a data_iter"),
    (TOKENS, {}, r"must give \(inputs, labels\), got Tensor"),
    ((TOKENS, TOKENS, TOKENS), {}, r"must give \(inputs, labels\), got tuple of 3 elements"),
    ({}, {}, "a dict batch needs input_ids, and has no entry"),
    ((TOKENS, None), {}, "there are no labels, from which come the sequence length.*compute_loss=False"),
    ((TOKENS[:, :5], TOKENS), {}, r"length 12 .* the inputs have shapes \[2, 5\]"),
    ((TOKENS[:, :0], TOKENS[:, :0]), {}, r"labels of shape \[2, 0\] has no tokens: leave it out"),
    ((TOKENS, TOKENS.flatten()), {}, "no label tensor has dimension 1"),
    (
        ((TOKENS, IDS), TOKENS),
        {"documents": "position_ids"},
        "names an entry of a dict, but .* 2 input tensors: give the index",
    ),
    (((TOKENS, IDS), TOKENS), {"documents": 2}, "documents = 2, but the batch has 2 input tensors"),
    (((TOKENS, IDS.double()), TOKENS), {"documents": 1}, r"integers \[rows, tokens\], .* tensor of float64 \[2, 12\]"),
    (((TOKENS, IDS[0]), TOKENS), {"documents": 1}, r"integers \[rows, tokens\], .* tensor of int64 \[12\]"),
    (((TOKENS, IDS[:1]), TOKENS), {"documents": 1}, "the other inputs have 2 rows: give position ids for each row"),
    (((TOKENS, IDS[:, :7]), TOKENS), {"documents": 1}, r"the position ids \[2, 7\] are not cut .* 12 in dimension 1"),
    (
        ((TOKENS, IDS), TOKENS),
        {"documents": 1, "sliced_inputs": [0]},
        "not cut with the tokens.*name them in terapipe.sliced_inp",
    ),
    ((TOKENS, TOKENS), {"documents": 0}, r"documents = 0, but the batch has 1 input tensors: give \(\(tokens, posi"),
    (
        ({"input_ids": TOKENS, "position_ids": IDS}, TOKENS),
        {"documents": "position_ids"},
        "a tensor or a tuple of tensors, got dict. Give the dict as the batch",
    ),
]


@pytest.mark.parametrize(("batch", "changes", "message"), REFUSED)
def test_bad_batches(batch: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        of(batch, **changes).draw(1, training=True)


class TestStockOrder:
    """Labels that are no tensors go to `loss_fn` as they are; the inputs tell the length where there are any."""

    @pytest.mark.parametrize("labels", [3, (), {"a": 1}, torch.tensor(2.0)])
    def test_they_cannot_be_cut_by_slices_that_are_set_by_hand(self, labels: Any) -> None:
        one = Source(config(**WHOLE), lambda: (TOKENS, labels), at(0, 1), is_cut=lambda length: length == 12)
        with pytest.raises(BatchError, match="cannot be cut"):
            one.draw(1, training=True)

    def test_tensors_without_dimensions_go_to_the_device(self) -> None:
        drawn, _ = of((TOKENS, [torch.tensor(1), torch.tensor(2.0)]), **WHOLE).draw(1, training=True)
        assert drawn[0].labels is not None
        moved = drawn[0].labels.to(torch.device("meta")).part(0, 12)
        assert type(moved) is tuple  # as the stock engine makes of a list
        assert [(each.device.type, each.dtype) for each in moved] == [("meta", torch.int64), ("meta", torch.float32)]

    @pytest.mark.parametrize("inputs", [None, torch.zeros(2), torch.zeros(2, 0)])
    def test_a_last_stage_that_knows_no_length(self, inputs: Any, reports: list[StageReport]) -> None:
        source = Source(config(**WHOLE), iter([(inputs, 3)]).__next__, at(1, 2), length_multiple=4)
        source.draw(1, training=True)  # and sequence parallelism needs none
        assert reports[0].error is None and reports[0].shapes == (MicroBatchShape(1, 1),)

    def test_tensors_are_copied_however_deep_they_are(self) -> None:
        """A loader may reuse its memory for the next micro-batch."""
        labels = {"classes": torch.ones(2), "factors": [torch.ones(1)], "pair": ("of", torch.ones(1)), "name": "n"}
        drawn, _ = of((TOKENS, labels), **WHOLE).draw(1, training=True)
        labels["classes"].zero_(), labels["factors"][0].zero_(), labels["pair"][1].zero_()
        assert drawn[0].labels is not None
        kept = drawn[0].labels.part(0, 12)
        assert kept["classes"].sum() == 2 and kept["factors"][0].sum() == 1 and kept["name"] == "n"
        assert kept["pair"] == ("of", torch.ones(1))

    def test_more_elements_behind_inputs_and_labels_are_left_alone(self) -> None:
        drawn, _ = of((TOKENS, TOKENS + 1, "more"), **WHOLE).draw(1, training=True)
        assert drawn[0].labels is not None and torch.equal(drawn[0].labels.tensors[0], TOKENS + 1)


def test_a_batch_without_rows_is_refused_and_an_empty_side_input_is_none() -> None:
    labels = torch.arange(12).view(2, 6)
    ids, images = torch.ones(2, 6, dtype=torch.long), torch.empty(0, 3)
    _require_rows(((ids, images), labels), 0, row_dim=0)
    _require_rows({"input_ids": ids, "pixel_values": images, "labels": labels}, 0, row_dim=0)
    with pytest.raises(BatchError, match="micro-batch 3 has 0 rows"):
        _require_rows(((ids[:0], images), labels[:0]), 3, row_dim=0)
