"""Define experts with losses of their own: the code of docs/auxiliary_losses.md, run as printed, and plain formulas."""

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "auxiliary_losses.md"


def _code_of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


CODE = _code_of_the_page()
RoutedExperts, Beside, First, LossWithAdded = (
    CODE[name] for name in ("RoutedExperts", "Beside", "First", "LossWithAdded")
)
Reporting, with_shares, is_last = CODE["Reporting"], CODE["with_shares"], CODE["is_last"]
EXPERTS = 4


class ExpertsLayer(RoutedExperts):  # type: ignore[misc, valid-type]
    """Weigh its losses as much as the main loss."""

    def __init__(self, layer: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(layer, width, EXPERTS, balance=0.7, z=0.3)
        self.to(dtype)


def with_experts(specs: list[LayerSpec], which: list[int], width: int, dtype: torch.dtype) -> list[LayerSpec]:
    """Return the layers with experts in place of some; the others carry the losses along."""
    wrapped = [
        LayerSpec(Beside if index else First, spec.typename, *spec.module_args, **spec.module_kwargs)
        for index, spec in enumerate(specs)
    ]
    for index in which:
        wrapped[index] = LayerSpec(ExpertsLayer, index, width, dtype)
    return wrapped


def _plain_forward(self: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute each row's losses by their formulas, token by token and expert by expert, on whole rows."""
    hidden, added = inputs
    x = self.norm(hidden)
    logits = x @ self.router.weight.T
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = shares.argsort(-1, descending=True)[..., : self.top_k]
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        goes_there = (chosen == expert).any(-1, keepdim=True)
        out = out + goes_there * shares[..., expert, None] * (F.silu(x @ self.up[expert]) @ self.down[expert])
    balances = [
        EXPERTS * (torch.bincount(row.flatten(), minlength=EXPERTS).to(x) / row.numel() * of_row.mean(0)).sum()
        for row, of_row in zip(chosen, shares, strict=True)
    ]
    z = logits.exp().sum(-1).log().square().mean()
    loss = self.balance * torch.stack(balances).mean() + self.z * z
    return hidden + out, added + loss / added.numel()


def plain_experts() -> contextlib.AbstractContextManager[Any]:
    """Compute reference losses: without carried sums, and without tokens that hold the loss of others."""
    return mock.patch.object(RoutedExperts, "forward", _plain_forward)
