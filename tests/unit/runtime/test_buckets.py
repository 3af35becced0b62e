"""Many tensors in few messages. One rank stands for all: what a collective would do is done to what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from terapipe_ds.runtime import buckets

KILO = torch.zeros(250)  # 1000 bytes


def sizes(tensors: list[Tensor], limit_bytes: int) -> list[list[int]]:
    return [[tensor.numel() for tensor in bucket] for bucket in buckets.buckets(tensors, limit_bytes)]


class TestBuckets:
    def test_as_many_as_fit(self) -> None:
        tensors = [torch.zeros(n) for n in (1, 2, 3, 4, 5)]  # of 4 bytes each number
        assert sizes(tensors, 24) == [[1, 2, 3], [4], [5]]
        assert sizes(tensors, 60) == [[1, 2, 3, 4, 5]]
        assert sizes(tensors, 1) == [[1], [2], [3], [4], [5]]

    def test_a_tensor_that_is_larger_is_alone(self) -> None:
        assert sizes([torch.zeros(1), torch.zeros(9), torch.zeros(2)], 12) == [[1], [9], [2]]

    def test_dtypes_do_not_mix(self) -> None:
        tensors = [torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)]
        found = list(buckets.buckets(tensors, 1000))
        assert [[tensor.dtype for tensor in bucket] for bucket in found] == [[torch.float32] * 2, [torch.bfloat16]]

    def test_the_limit_counts_bytes(self) -> None:
        assert sizes([torch.zeros(3, dtype=torch.bfloat16)] * 2, 12) == [[3, 3]]
        assert sizes([torch.zeros(3, dtype=torch.float64)] * 2, 24) == [[3], [3]]

    def test_sparse_tensors_are_alone(self) -> None:
        assert sizes([torch.zeros(4), torch.eye(2).to_sparse(), torch.zeros(4)], 1000) == [[4], [4, 4]]

    def test_hundreds_of_parameters_are_a_handful(self) -> None:
        found = list(buckets.buckets([KILO] * 400, 100_000))
        assert [len(bucket) for bucket in found] == [100] * 4


@pytest.fixture
def sent() -> Iterator[list[Tensor]]:
    """What was given to a collective, which doubles the numbers: another rank has the same ones."""
    messages: list[Tensor] = []

    def collective(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        messages.append(tensor.clone())
        tensor.mul_(2)

    with (
        mock.patch.object(buckets.dist, "all_reduce", collective),
        mock.patch.object(buckets.dist, "broadcast", collective),
    ):
        yield messages


CALLS: dict[str, Callable[..., None]] = {
    "all_reduce": lambda tensors: buckets.all_reduce(tensors, None),
    "broadcast": lambda tensors: buckets.broadcast(tensors, 0, None),
}


@pytest.mark.parametrize("call", CALLS)
class TestInPlace:
    def test_every_tensor_gets_its_own_numbers(self, call: str, sent: list[Tensor]) -> None:
        tensors = [torch.randn(3, 2), torch.randn(()), torch.randn(5).bfloat16(), torch.randn(0), torch.randn(4)]
        expected = [tensor * 2 for tensor in tensors]
        CALLS[call](tensors)
        assert [message.numel() for message in sent] == [11, 5]
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))

    def test_tensors_that_do_not_lie_in_one_piece(self, call: str, sent: list[Tensor]) -> None:
        whole, single = torch.arange(12.0).view(3, 4), torch.arange(6.0).view(2, 3)
        CALLS[call]([whole.t(), single[:, :2]])
        CALLS[call]([single.t()])
        assert torch.equal(whole, torch.arange(12.0).view(3, 4) * 2)
        assert single.tolist() == [[0.0, 4.0, 4.0], [12.0, 16.0, 10.0]]
        assert len(sent) == 2

    def test_parameters_keep_their_storage(self, call: str, sent: list[Tensor]) -> None:
        parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        before = [parameter.data_ptr() for parameter in parameters]
        CALLS[call](parameters)
        assert [parameter.data_ptr() for parameter in parameters] == before
        assert all(bool((parameter == 2).all()) and parameter.grad_fn is None for parameter in parameters)

    def test_nothing_is_no_message(self, call: str, sent: list[Tensor]) -> None:
        CALLS[call]([])
        assert not sent
