"""Test split backwards in the engine, beyond the cases of `zb-h1` and `seq1f1b-zb` in `tests/test_transparency.py`."""

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from terapipe_ds.plan import JOINED_ROWS
from tests.distributed import engines
from tests.distributed.harness import rank_pool

# -- the same bits -------------------------------------------------------------------------------------------


def job_bits(schedules: tuple[str, str], joined_rows: int) -> float:
    """Return how far the results of two schedules are from each other."""
    with mock.patch("terapipe_ds.plan.JOINED_ROWS", joined_rows):
        first, second = (
            engines.run_training(engines.gpt_layers, engines.unchecked(schedule=name), engines.batches(2, 3))
            for name in schedules
        )
    return engines.error_of(vars(first), vars(second))


@pytest.mark.parametrize("schedules", [("seq1f1b", "seq1f1b-zb"), ("1f1b", "zb-h1")], ids="-".join)
def test_the_same_bits_as_unsplit(schedules: tuple[str, str]) -> None:
    """A product over the rows of several slices adds in an order of its own; here each slice has enough rows."""
    assert rank_pool(2).run(job_bits, schedules=schedules, joined_rows=1) == [0.0, 0.0]


def test_joined_products_are_close_to_unsplit() -> None:
    assert max(rank_pool(2).run(job_bits, schedules=("1f1b", "zb-h1"), joined_rows=JOINED_ROWS)) <= 1e-10


# -- layers that leave nothing -------------------------------------------------------------------------------


class OwnLinear(torch.nn.Linear):
    """Be a linear layer of the user's own class: the engine may not guess its work."""


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = OwnLinear(16, 16, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


def job_nothing_deferred() -> tuple[dict[str, float], list[str]]:
    with engines.logged() as said:
        stock, ours = engines.both(
            lambda engine: engines.train(engine, engines.batches(2)), layers, engines.unchecked(schedule="zb-h1")
        )
    return engines.differences(ours, stock), [message for message in said if "leaves weight gradients" in message]


def layers() -> list[Any]:
    """The second of two stages has no plain linear layer: a tied head, and layers of the user's own."""
    decoder = engines.gpt_layers(num_layers=2, tied_embedding=True)
    return [*decoder[:3], *(LayerSpec(Scale) for _ in range(3)), *decoder[3:]]


def test_a_stage_that_defers_nothing_is_right_and_says_so_once() -> None:
    results = rank_pool(2).run(job_nothing_deferred)
    assert not engines.violations([errors for errors, _ in results], engines.EXACT)
    assert [len(said) for _, said in results] == [0, 1]
    assert results[1][1][0].startswith("stage 1, chunk 0: the schedule splits backwards, but no layer")
