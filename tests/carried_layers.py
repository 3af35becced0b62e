"""Layers with carried states: those of docs/carried_states.md, run as printed, and a gated delta rule.

Each of `MIXERS` takes (layer, width, heads) and maps [B, T, width] to the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import carry

PAGE = Path(__file__).parents[1] / "docs" / "carried_states.md"


def _layers_of_the_page() -> dict[str, Any]:
    """Run the blocks of the page, but for the first one, which only shows the calls."""
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


_PAGE = _layers_of_the_page()
places: Callable[[Tensor], Tensor] = _PAGE["places"]
Ahead, AheadLoss, CausalConvolution = _PAGE["Ahead"], _PAGE["AheadLoss"], _PAGE["CausalConvolution"]


class GatedDeltaRule(nn.Module):
    """S_t = g_t (S_(t-1) - b_t k_t k_t^T S_(t-1)) + b_t k_t v_t^T, token by token (Yang et al., arXiv 2412.06464)."""

    def __init__(self, layer: int, width: int, heads: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gates = nn.Linear(width, 2 * heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay, rate = (each.sigmoid()[..., None, None] for each in self.gates(x).chunk(2, -1))
        state = carry.read(self.layer, "recurrent")
        if state is None:
            state = x.new_zeros(len(x), self.heads, k.shape[-1], v.shape[-1])
        begins = places(x) == 0
        begins[:, 0] = False  # there the state is zero already
        outs = []
        for t in range(x.shape[1]):
            key, new = k[:, t, :, :, None], v[:, t, :, None]
            state = state * ~begins[:, t, None, None, None] * decay[:, t]
            state = state + rate[:, t] * key * (new - key.transpose(-1, -2) @ state)
            outs.append((q[:, t, :, None] @ state).flatten(1))
        out = carry.write(self.layer, "recurrent", state, torch.stack(outs, 1))
        return x + self.out(out)


def retention(layer: int, width: int, heads: int) -> nn.Module:
    """The page's, but tokens whose query and key are almost orthogonal do not blow rounding up: fp32 is compared."""
    module: nn.Module = _PAGE["Retention"](layer, width, heads)
    module.norm.eps = 1.0
    return module


MIXERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "gated_linear_attention": _PAGE["GatedLinearAttention"],
    "retention": retention,
    "convolution": lambda layer, width, heads: CausalConvolution(layer, width),
    "gated_delta_rule": GatedDeltaRule,
}


class MixerLayer(nn.Module):
    """One of `MIXERS` as a layer of a pipeline, after a norm as in any decoder."""

    def __init__(self, kind: str, layer: int, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.mixer = MIXERS[kind](layer, width, heads).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(x))
        return x + mixed
