"""Arguments of Trainers over stages, in one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")

from transformers import Trainer

from terapipe_ds.integrations.trainer import PipelineTrainerMixin
from terapipe_ds.integrations.trainer.refusals import outer_arguments


class OtherOrder(PipelineTrainerMixin, Trainer):
    def __init__(self, args: Any, model: Any, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)


def test_a_class_may_take_its_arguments_in_another_order() -> None:
    """The mixin gets those of the classes after it."""
    given = outer_arguments(OtherOrder, PipelineTrainerMixin, ("model", "args"), {"callbacks": None})
    assert given == {"model": "model", "args": "args", "callbacks": None}
