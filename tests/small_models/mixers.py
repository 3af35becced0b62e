"""Define layers that mix tokens: the ones of docs/carried_states.md, run as printed; a gated delta rule; attention.

Each takes (layer, width, heads) and maps [B, T, width] to the same. The attention has options.
"""

import math
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import carry, sliced_attention

PAGE = Path(__file__).parents[2] / "docs" / "carried_states.md"


def _layers_of_the_page() -> dict[str, Any]:
    """Run the blocks of the page, except the first one, which only shows the calls."""
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


_PAGE = _layers_of_the_page()
places: Callable[[Tensor], Tensor] = _PAGE["places"]
Ahead, AheadLoss, CausalConvolution = _PAGE["Ahead"], _PAGE["AheadLoss"], _PAGE["CausalConvolution"]


# -- carried states ----------------------------------------------------------------------------------------------------


class GatedDeltaRule(nn.Module):
    """S_t = g_t (S_(t-1) - b_t k_t k_t^T S_(t-1)) + b_t k_t v_t^T, token by token (Yang et al., arXiv 2412.06464)."""

    def __init__(self, layer: int, width: int, heads: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.gates = nn.Linear(width, 2 * heads)
        self.out = nn.Linear(width, width)

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
    """Build the page's retention, but let almost orthogonal queries and keys not amplify rounding: fp32 is compared."""
    module: nn.Module = _PAGE["Retention"](layer, width, heads)
    module.norm.eps = 1.0
    return module


MIXERS: dict[str, Callable[[Any, int, int], nn.Module]] = {
    "gated_linear_attention": _PAGE["GatedLinearAttention"],
    "retention": retention,
    "convolution": lambda layer, width, heads: CausalConvolution(layer, width),
    "gated_delta_rule": GatedDeltaRule,
}

# -- attention ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 4},
    "softcap": {"softcap": 0.8},
    "sinks": {"with_sinks": True},
    "values": {"value_dim": 5},  # latent attention: queries and keys are 8 wide in `MixerLayer`s of width 32
    "grouped": {"kv_heads": 2},
}
"""What attention may ask; "window+sinks" is a layer that asks both."""


class Attends(nn.Module):
    """Attend with options beyond plain causal attention."""

    def __init__(
        self,
        layer: Hashable,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        with_sinks: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.layer, self.options, dim = layer, options, width // heads
        self.heads = heads, kv_heads or heads, kv_heads or heads
        self.sizes = [n * d for n, d in zip(self.heads, (dim, dim, value_dim or dim), strict=True)]
        self.qkv = nn.Linear(width, sum(self.sizes))
        self.out = nn.Linear(heads * (value_dim or dim), width)
        self.sinks = nn.Parameter(torch.zeros(heads)) if with_sinks else None

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.qkv(x).split(self.sizes, -1), self.heads, strict=True)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in parts)
        out = sliced_attention(q, k, v, self.layer, sinks=self.sinks, **self.options)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected


def attention_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    visible: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Return attention as in a textbook: all scores, a cap, a mask, a column of sinks, a softmax, dropout's factors.

    `visible` says which keys a query sees, in place of the window; `keep` has the factors.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ago = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    in_window = (ago >= 0) & (ago < (math.inf if window is None else window))
    scores = scores.masked_fill(~(in_window if visible is None else visible), -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] * (1 if keep is None else keep)) @ v


# -- both --------------------------------------------------------------------------------------------------------------


def mixer_of(kind: str, layer: Hashable, width: int, heads: int) -> nn.Module:
    """Return a layer of `MIXERS`, or attention with some of `OPTIONS`."""
    if kind in MIXERS:
        return MIXERS[kind](layer, width, heads)
    options: dict[str, Any] = {}
    for name in kind.split("+"):
        options |= OPTIONS[name]
    return Attends(layer, width, heads, **options)


class MixerLayer(nn.Module):
    """Wrap a layer that mixes tokens as a pipeline layer, after a norm as in any decoder."""

    def __init__(self, kind: str, layer: Hashable, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.mixer = mixer_of(kind, layer, width, heads).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(x))
        mixed += x
        return mixed
