"""What a dict batch becomes, by rows small enough to be written out."""

from collections import UserDict
from typing import Any

import pytest
import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.dict_batch import BatchError, ReadBatch, read_dict
from tests.dict_batches import flattened

TOKENS = torch.arange(10, 20).reshape(2, 5)
IDS = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 2, 3, 4]])  # documents of 1, 2 and 2 tokens; one of 5
STARTS = ((0, 1, 3), (0,))
CUMULATIVE = torch.tensor([0, 1, 3, 5, 10], dtype=torch.int32)
NUMBERS = torch.tensor([[3, 7, 7, 2, 2], [2, 2, 2, 2, 2]], dtype=torch.int32)
IGNORED = -100


def read(documents: int | str = "position_ids", section: dict[str, Any] | None = None, **batch: Any) -> ReadBatch:
    config = TeraPipeConfig(enabled=True, slices=2, documents=documents, **(section or {}))
    return read_dict({"input_ids": TOKENS, "labels": TOKENS, **batch}, config)


class TestLabels:
    def test_each_token_is_trained_on_the_next_one(self) -> None:
        found = read("off")
        assert found.inputs is TOKENS and found.starts is None
        assert found.labels.tolist() == [[11, 12, 13, 14, IGNORED], [16, 17, 18, 19, IGNORED]]

    def test_the_last_of_a_document_on_none(self) -> None:
        found = read(position_ids=IDS)
        assert found.starts == STARTS and found.inputs[0] is TOKENS and found.inputs[1] is IDS
        assert found.labels.tolist() == [[IGNORED, 12, IGNORED, 14, IGNORED], [16, 17, 18, 19, IGNORED]]

    def test_the_label_that_does_not_count_is_that_of_the_config(self) -> None:
        found = read("off", {"ignore_index": -1}, attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1] * 5]))
        assert found.labels.tolist() == [[11, 12, 13, -1, -1], [16, 17, 18, 19, -1]]

    def test_shifted_ones_are_taken_as_they_are(self) -> None:
        shifted = torch.full_like(TOKENS, 3)
        assert read(position_ids=IDS, shift_labels=shifted).labels is shifted

    @pytest.mark.parametrize("key", ["labels", "shift_labels"])
    def test_they_are_int64_with_and_without_padding(self, key: str) -> None:
        of_no_padding: dict[str, Any] = {key: TOKENS.int()}
        for entries in (of_no_padding, {**of_no_padding, "attention_mask": torch.ones_like(TOKENS).tril(3)}):
            assert read("off", **entries).labels.dtype == torch.int64

    def test_few_bits_hold_no_negative_label(self) -> None:
        assert read("off", labels=TOKENS.to(torch.uint8)).labels[:, -1].tolist() == [IGNORED] * 2

    def test_there_need_be_none(self) -> None:
        found = read(position_ids=IDS, labels=None)
        assert found.labels is None and found.starts == STARTS

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
    def test_those_of_padding_are_ignored(self, dtype: torch.dtype) -> None:
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=dtype)
        found = read("off", attention_mask=mask)
        assert found.inputs is TOKENS
        assert found.labels.tolist() == [[11, 12, *[IGNORED] * 3], [16, 17, 18, 19, IGNORED]]
        shifted = read("off", attention_mask=mask, shift_labels=TOKENS).labels
        assert shifted.tolist() == [[10, 11, 12, IGNORED, IGNORED], TOKENS[1].tolist()]

    def test_a_row_may_be_all_padding(self) -> None:
        mask = torch.tensor([[0] * 5, [1] * 5])
        assert read("off", attention_mask=mask).labels[0].tolist() == [IGNORED] * 5


class TestDocuments:
    @pytest.mark.parametrize("entries", [
        {"cu_seq_lens_q": CUMULATIVE},
        {"cu_seq_lens_q": CUMULATIVE[None]},
        {"cu_seq_lens_q": torch.tensor([0, 1, 1, 3, 5, 10, 10])},  # documents without a token are none
        {"seq_idx": NUMBERS},
        {"seq_idx": NUMBERS, "cu_seq_lens_q": CUMULATIVE, "cu_seq_lens_k": CUMULATIVE[None].long()},
        {"cu_seq_lens_q": CUMULATIVE, "max_length_q": 5, "max_length_k": torch.tensor(8)},
        {"position_ids": IDS, "seq_idx": NUMBERS, "cu_seq_lens_q": CUMULATIVE, "seq_idx_": None},
        {"position_ids": IDS + 2},  # as those of RoBERTa
    ])  # fmt: skip
    def test_each_entry_tells_them(self, entries: dict[str, Any]) -> None:
        found = read(**entries)
        assert found.starts == STARTS
        assert isinstance(found.inputs, tuple) == ("position_ids" in entries)
        assert found.labels[0].tolist() == [IGNORED, 12, IGNORED, 14, IGNORED]

    def test_the_position_ids_may_have_another_name(self) -> None:
        assert read("places", places=IDS).starts == STARTS
        with pytest.raises(BatchError, match=r"entry position_ids .* nothing reads it.*entries are places, input_ids"):
            read("places", position_ids=IDS)

    def test_rows_of_one_document_each(self) -> None:
        assert read(position_ids=torch.arange(5).expand(2, 5)).starts is None
        edges = {"cu_seq_lens_q": torch.tensor([0, 5, 10]), "seq_idx": torch.tensor([[0] * 5, [1] * 5])}
        assert read("off", **edges).starts is None

    def test_edges_within_padding_do_not_count(self) -> None:
        """Collators fill it with ones, or begin a document there."""
        mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
        ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 3, 4]])
        found = read(position_ids=ids, seq_idx=NUMBERS, attention_mask=mask)
        assert found.starts == ((0, 1), (0,))
        assert found.labels[0].tolist() == [IGNORED, 12, *[IGNORED] * 3]
        assert read("off", position_ids=torch.tensor([[0, 1, 2, 1, 1], [0, 1, 2, 3, 4]]), attention_mask=mask)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
    def test_position_ids_go_on_through_padding(self, dtype: torch.dtype) -> None:
        """Layers that count positions themselves compare theirs with the ids, and would refuse those of padding."""
        mask = torch.tensor([[1, 1, 1, 0, 0], [0] * 5, [1] * 5])
        ids = torch.tensor([[0, 0, 1, 0, 0], [1] * 5, [0, 1, 0, 1, 2]], dtype=dtype)
        for config in ({"documents": "position_ids"}, {"documents": "ids"}):
            batch = {"input_ids": ids, config["documents"]: ids, "attention_mask": mask}
            _, found = read_dict(batch, TeraPipeConfig(enabled=True, slices=2, **config)).inputs
            assert found.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]] and found.dtype == dtype
        assert read("position_ids", position_ids=ids[:2], attention_mask=mask[[0, 2]]).inputs[1][1].tolist() == [1] * 5

    def test_position_ids_go_on_within_padding(self) -> None:
        """Collators fill it with ones, or count on as if a document began."""
        mask = torch.tensor([[1, 1, 1, 0, 0], [0] * 5])
        ids = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], dtype=torch.int32)
        for documents in ("position_ids", "off"):
            given = ids if documents != "off" else torch.tensor([[0, 1, 2, 1, 1], [1] * 5])
            found = read(documents, position_ids=given, attention_mask=mask).inputs[1].tolist()
            assert found == [[0, 0, 1, 2, 3] if documents != "off" else [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]

    def test_what_a_collator_flattens(self) -> None:
        samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4], "labels": [IGNORED, 4]}]
        samples[0]["labels"], samples[1]["labels"] = [IGNORED, 6, 7], [8]
        batch: Any = UserDict(flattened(samples))  # as transformers' BatchEncoding
        found = read_dict(batch, TeraPipeConfig(enabled=True, slices=2, documents="position_ids"))
        assert found.starts == ((0, 3, 4),)
        assert found.labels.tolist() == [[6, 7, IGNORED, IGNORED, 4, IGNORED]]
        assert found.inputs[0].tolist() == [[5, 6, 7, 8, 9, 4]]

    @pytest.mark.parametrize(("other", "message"), [
        (
            {"cu_seq_lens_q": torch.tensor([0, 1, 5, 10])},
            "position_ids and cu_seq_lens_q .* token 3 of row 0, .* by position_ids and none by cu_seq_lens_q",
        ),
        (
            {"seq_idx": torch.tensor([[3, 7, 7, 2, 2], [2, 2, 2, 4, 4]])},
            "position_ids and seq_idx .* token 3 of row 1, .* by seq_idx and none by position_ids",
        ),
    ])  # fmt: skip
    def test_entries_that_differ(self, other: dict[str, Any], message: str) -> None:
        with pytest.raises(BatchError, match=message):
            read(position_ids=IDS, **other)

    @pytest.mark.parametrize("entry", [{"cu_seq_lens_q": CUMULATIVE}, {"seq_idx": NUMBERS}, {"position_ids": IDS}])
    def test_rows_that_are_packed_need_the_key(self, entry: dict[str, Any]) -> None:
        [key] = entry
        with pytest.raises(BatchError, match=f"{key} .*at token 1 of row 0.*set terapipe.documents to .position_ids"):
            read("off", **entry)

    def test_ids_may_skip_where_documents_are_off(self) -> None:
        ids = torch.tensor([[0, 1, 7, 8, 9], [0, 4, 5, 6, 7]])
        assert read("off", position_ids=ids).starts is None


@pytest.mark.parametrize(("batch", "section", "message"), [
    (
        {"token_type_ids": TOKENS},
        {},
        r"entry token_type_ids .*int64 \[2, 5\].* nothing reads it: call the tokenizer with",
    ),
    ({"num_items_in_batch": 7}, {}, "entry num_items_in_batch .* a mean over the labels of each micro-batch"),
    ({"pixel_values": torch.zeros(2, 3, 4, 4)}, {}, "entry pixel_values .*float32.* nothing reads it: leave it out"),
    ({7: "x"}, {}, "entry 7 of a dict batch .'x'.: nothing reads it"),
    ({"input_ids": None}, {}, "a dict batch needs input_ids, and has labels"),
    ({"input_ids": TOKENS[0]}, {}, r"entry input_ids .* integers \[rows, tokens\]"),
    ({"input_ids": [[1, 2]]}, {}, r"entry input_ids .* integers \[rows, tokens\]"),
    ({"input_ids": TOKENS[:, :0]}, {}, r"entry input_ids .* integers \[rows, tokens\]"),
    ({"labels": TOKENS.double()}, {}, r"entry labels .*float64.* integers \[rows, tokens\]"),
    ({"labels": TOKENS[:, 1:]}, {}, r"entry labels .*\[2, 4\].* the shape of input_ids, \[2, 5\]"),
    ({"shift_labels": TOKENS[:, 1:]}, {}, "entry shift_labels .* the shape of input_ids"),
    ({"position_ids": IDS[:1]}, {}, "entry position_ids .* the shape of input_ids"),
    ({"position_ids": IDS > 0}, {}, "entry position_ids .* integers"),
    ({"seq_idx": NUMBERS[:1]}, {}, "entry seq_idx .* the shape of input_ids"),
    ({"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}, {}, "entry attention_mask .* integers"),
    ({"attention_mask": TOKENS}, {}, "entry attention_mask .* 1 for each token and 0 for padding"),
    (
        {"attention_mask": torch.tensor([[1] * 5, [0, 1, 1, 1, 1]])},
        {},
        "entry attention_mask .* row 1 has padding before token 1.*at the end of rows",
    ),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 0], [1] * 5])}, {}, "row 0 has padding before token 3"),
    ({"cu_seq_lens_q": [0, 5]}, {}, r"entry cu_seq_lens_q .* integers \[documents \+ 1\]"),
    ({"cu_seq_lens_q": CUMULATIVE.repeat(2, 1)}, {}, r"entry cu_seq_lens_q .* integers \[documents \+ 1\]"),
    ({"cu_seq_lens_q": CUMULATIVE[:-1]}, {}, "entry cu_seq_lens_q .* from 0 to 10"),
    ({"cu_seq_lens_q": CUMULATIVE[1:]}, {}, "entry cu_seq_lens_q .* from 0 to 10"),
    ({"cu_seq_lens_q": torch.tensor([0, 5, 3, 10])}, {}, "entry cu_seq_lens_q .* ascending"),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 10])}, {}, "cu_seq_lens_q .* no document starts at 5, where row 1 does"),
    (
        {"cu_seq_lens_q": CUMULATIVE, "cu_seq_lens_k": torch.tensor([0, 5, 10])},
        {},
        "entry cu_seq_lens_k .* must equal cu_seq_lens_q",
    ),
    ({"cu_seq_lens_k": CUMULATIVE}, {}, "entry cu_seq_lens_k .* goes with cu_seq_lens_q"),
    ({"position_ids": IDS, "max_length_q": 2}, {}, "entry max_length_q .* .2.: it goes with cu_seq_lens_q"),
    ({"cu_seq_lens_q": CUMULATIVE, "max_length_k": 4}, {}, "entry max_length_k .* .4.: .* has 5 tokens"),
    ({"cu_seq_lens_q": CUMULATIVE, "max_length_q": "x"}, {}, "entry max_length_q .* .'x'.: .* has 5 tokens"),
    ({}, {"documents": "position_ids"}, "says nowhere where documents start: give position_ids, cu_seq_lens_q or"),
    ({}, {"documents": 1}, 'documents = 1 is an index of a tuple .* give the name .* "position_ids"'),
    ({}, {"documents": "seq_idx"}, 'documents = "seq_idx" must name the position ids'),
    ({}, {"sequence_dim": 0}, "sequence_dim = 0, but the entries .*rows, tokens"),
    ({}, {"sliced_inputs": [0, 1]}, r"sliced_inputs = \[0, 1\] are indices of a tuple .* remove the key"),
])  # fmt: skip
def test_bad_entries(batch: dict[Any, Any], section: dict[str, Any], message: str) -> None:
    tells = {"position_ids", "cu_seq_lens_q"} & batch.keys()
    documents = section.get("documents", "position_ids" if tells else "off")
    config = TeraPipeConfig(enabled=True, slices=2, **{"documents": documents, **section})
    with pytest.raises(BatchError, match=message):
        read_dict({"input_ids": TOKENS, "labels": TOKENS, **batch}, config)
