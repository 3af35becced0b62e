"""Micro-batches and their slices: what is cut, what goes whole, what cannot be cut."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe_ds.dict_batch import BatchError
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, as_tuple, check_sizes

TOKENS = torch.arange(24).reshape(2, 12)
POSITIONS = torch.arange(12).repeat(2, 1)
MASK = torch.ones(2, 1, 1, 5, dtype=torch.bool)
WHOLE = torch.randn(2, 12, 3)


def of_inputs(inputs: Any, **options: Any) -> SliceableTensors:
    return SliceableTensors.of_inputs(inputs, 12, 1, **options)


def test_tensors_of_the_labels_length_are_sliced() -> None:
    inputs = of_inputs((TOKENS, MASK, POSITIONS))
    assert inputs.sliced == (True, False, True)
    tokens, mask, positions = inputs.span(5, 8)
    assert torch.equal(tokens, TOKENS[:, 5:8]) and torch.equal(positions, POSITIONS[:, 5:8]) and mask is MASK
    assert of_inputs((TOKENS, WHOLE)).sliced == (True, True)
    assert of_inputs((TOKENS, WHOLE), sliced_inputs=(0,)).sliced == (True, False), "indices override sizes"


def test_a_part_for_the_users_code_is_contiguous() -> None:
    """So that `labels.view(-1)` works as it does on whole labels."""
    assert torch.equal(SliceableTensors.of_labels(TOKENS, 1).part(3, 7).view(-1), TOKENS[:, 3:7].reshape(-1))
    labels, mask = SliceableTensors.of_labels((TOKENS, MASK), 1).part(3, 7)
    assert torch.equal(labels, TOKENS[:, 3:7]) and torch.equal(mask, MASK)


def test_measurements_repeat_tokens_from_the_start() -> None:
    tokens, mask = of_inputs((TOKENS, MASK)).stretched(29).tensors
    assert torch.equal(tokens, torch.cat([TOKENS, TOKENS, TOKENS[:, :5]], dim=1)) and torch.equal(mask, MASK)
    assert torch.equal(of_inputs(TOKENS).stretched(5).tensors[0], TOKENS[:, :5])


def test_the_first_label_tensor_with_the_dimension_gives_the_length() -> None:
    assert SliceableTensors.of_labels((torch.ones(7), TOKENS, WHOLE), 1).length == 12
    assert SliceableTensors.of_labels((torch.ones(7), TOKENS), 0).length == 7


WHOLE_BATCHES = 'images .* "slices": 1, "schedule": "1f1b"'


class TestErrors:
    def test_no_input_has_the_sequence(self) -> None:
        told = r"length 12 in dimension 1 .*shapes \[2, 11\], \[2, 1, 1, 5\].*"
        with pytest.raises(BatchError, match=told + WHOLE_BATCHES):
            of_inputs((TOKENS[:, 1:], MASK))

    def test_indices_that_cannot_be_sliced(self) -> None:
        with pytest.raises(BatchError, match="names input 2, but the batch has 2 input tensors: count from 0, or set"):
            of_inputs((TOKENS, POSITIONS), sliced_inputs=(0, 2))
        with pytest.raises(
            BatchError, match=r"names input 1 of shape \[2, 1, 1, 5\], which does not have .* 12 .*: leave 1 out"
        ):
            of_inputs((TOKENS, MASK), sliced_inputs=(0, 1))

    @pytest.mark.parametrize("tensors", [None, {"tokens": TOKENS}, (TOKENS, None), ()])
    def test_what_is_not_a_tensor_or_a_tuple_of_tensors(self, tensors: Any) -> None:
        with pytest.raises(BatchError, match="the labels of a batch must be a tensor or a tuple of tensors, got"):
            as_tuple(tensors, "the labels")


class TestWhatSizesDoNotTell:
    """Of sequences of twelve tokens, in two rows."""

    def check(self, *inputs: Tensor, rows: int = 2, dim: int = 1) -> None:
        check_sizes(SliceableTensors.of_inputs(inputs, 12, dim), 12, rows)

    def test_what_is_clear(self) -> None:
        self.check(TOKENS, POSITIONS, MASK)
        self.check(WHOLE)
        self.check(TOKENS, torch.ones(2, 12, dtype=torch.bool))  # padding
        for shape in ((2, 5), (12,), (2, 1, 1, 12), ()):
            self.check(TOKENS, torch.ones(shape))

    def test_floats_of_two_dimensions(self) -> None:
        with pytest.raises(BatchError) as caught:
            self.check(TOKENS, POSITIONS, torch.ones(2, 12, dtype=torch.bfloat16))
        message = str(caught.value)
        assert "input 2 (bfloat16 [2, 12]) has the labels' length 12 in dimension 1" in message
        assert "terapipe.sliced_inputs = [0, 1] hands it whole to each slice and [0, 1, 2] cuts it" in message

    @pytest.mark.parametrize(("shape", "ways"), [
        ((2, 12, 12), "[0] hands it whole to each slice and [0, 1] cuts it in dimension 1"),
        ((2, 1, 12, 12), "[0] hands it whole to each slice."),
        ((1, 4, 12, 12), "[0] hands it whole to each slice."),
        ((12, 12), "[0] hands it whole to each slice and [0, 1] cuts it in dimension 1"),
        ((2, 12, 3, 12), "[0] hands it whole to each slice and [0, 1] cuts it in dimension 1"),
    ])  # fmt: skip
    def test_the_length_twice(self, shape: tuple[int, ...], ways: str) -> None:
        with pytest.raises(BatchError) as caught:
            self.check(TOKENS, torch.ones(shape, dtype=torch.bool))
        message = str(caught.value)
        assert f"input 1 (bool {list(shape)}) has the sequence's length 12 in two dimensions" in message
        assert "sliced_attention is causal, so leave it out of the batch" in message and '"slices": 1' in message
        assert f"terapipe.sliced_inputs = {ways}" in message

    def test_as_many_rows_as_tokens(self) -> None:
        square = torch.zeros(12, 12, dtype=torch.long)
        self.check(square, square.bool(), torch.randn(12, 12, 3), rows=12)
        self.check(square, rows=12, dim=0)
        self.check(torch.zeros(12, 12, 3), rows=12, dim=0)
        for shape in ((12, 1, 12, 12), (12, 12, 12)):
            with pytest.raises(BatchError, match="input 1 .*in two dimensions"):
                self.check(square, torch.ones(shape), rows=12)
        with pytest.raises(BatchError, match=r"input 0 .*\[12, 12\].*features of each row"):
            self.check(torch.ones(12, 12), rows=12)

    def test_the_sequence_first(self) -> None:
        with pytest.raises(BatchError, match=r"input 1 .*\[12, 2\].*in dimension 0"):
            self.check(TOKENS.T, torch.ones(12, 2), dim=0)
        with pytest.raises(BatchError, match=r"input 1 .*\[12, 2, 12\].*in two dimensions"):
            self.check(TOKENS.T, torch.ones(12, 2, 12), dim=0)
