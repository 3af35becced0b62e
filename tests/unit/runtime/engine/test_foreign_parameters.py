"""An optimizer that trains what is not in the module is refused."""

import torch
from torch import nn

from terapipe_ds.runtime.engine.trained_parameters import problem_of_foreign_parameters, remembering, tensors_of

MODULE = nn.Linear(2, 3)
FOREIGN = nn.Parameter(torch.zeros(5, 7))
FROZEN = nn.Parameter(torch.zeros(11), requires_grad=False)


def problem(*trained: torch.Tensor) -> str:
    return problem_of_foreign_parameters(MODULE, trained) or ""


class TestForeignParameters:
    def test_one_is_refused_with_its_shape(self) -> None:
        text = problem(*MODULE.parameters(), FOREIGN)
        assert "not in the PipelineModule: 1, of shape [5, 7]." in text and "make loss_fn an nn.Module" in text

    def test_the_modules_own_and_what_is_frozen_are_not(self) -> None:
        assert problem() == problem(*MODULE.parameters(), FROZEN) == ""

    def test_those_of_lists_and_groups(self) -> None:
        assert tensors_of([FOREIGN, FROZEN]) == [FOREIGN, FROZEN]
        assert tensors_of([{"params": FOREIGN}, {"params": [FROZEN]}]) == [FOREIGN, FROZEN]

    def test_those_of_an_optimizer_and_of_a_function_that_makes_one(self) -> None:
        for optimizer in (torch.optim.SGD([FOREIGN], lr=1.0), lambda _: torch.optim.SGD([FOREIGN], lr=1.0)):
            trained: list[torch.Tensor] = []
            kept = remembering(optimizer, trained)
            if not isinstance(kept, torch.optim.Optimizer):
                kept = kept([])
            kept.param_groups[0]["params"] = []  # as ZeRO flattens them
            assert trained == [FOREIGN]
        assert remembering(None, trained) is None
