"""Attention by hand: it sees the keys of the call, which are those of a slice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as captured_attention

from terapipe_ds.attention import active_slice
from tests.zoo.layers import HEADS, LONG, WIDTH, Attention, Weighted, later, scores_of, seeded, sliced_attention, weight
from tests.zoo.members import AFTER, BACKWARD, EARLY, FIRST, attend, attends, layer, update

PLAIN = "plain attention"


@attends(AFTER)
def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(later(q.shape[2]), float("-inf")).softmax(-1) @ v


@attends(AFTER)
def softmax_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(later(q.shape[2]), -1e30)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


@attends(AFTER)
def softmax_by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponentials = scores_of(q, k).exp().tril()
    return exponentials @ v / exponentials.sum(-1, keepdim=True)


@attends(AFTER)
def softmax_by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k).masked_fill(later(q.shape[2]), float("-inf"))
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


attend(AFTER)(
    linear_attention=lambda q, k, v: (q @ k.transpose(-1, -2)).tril() @ v,
    relu_attention=lambda q, k, v: scores_of(q, k).relu().tril() @ v,
)


@attends(AFTER)
def linear_attention_by_running_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    return torch.einsum("bhtd,bhtde->bhte", q, states) / (q * k.cumsum(2)).sum(-1, keepdim=True)


attend(EARLY)(
    linear_attention_both_ways=lambda q, k, v: q.softmax(-1) @ (k.exp().transpose(-1, -2) @ v),
    bidirectional=lambda q, k, v: scores_of(q, k).softmax(-1) @ v,
)


@attends(AFTER)
def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    decay = (0.9 ** distance.clamp(min=0)).masked_fill(distance < 0, 0.0).to(q.dtype)
    return (q @ k.transpose(-1, -2) * decay) @ v


@attends(AFTER)
def alibi_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).to(q.dtype)
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    return (scores_of(q, k) - slopes * distance).masked_fill(later(tokens), float("-inf")).softmax(-1) @ v


@attends(FIRST)
def sliding_window_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out_of_reach = later(q.shape[2]) | later(q.shape[2]).logical_not().tril(-4)
    return scores_of(q, k).masked_fill(out_of_reach, float("-inf")).softmax(-1) @ v


@attends(FIRST)
def sliding_window_by_unfold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (F.pad(each, (0, 0, 3, 0)).unfold(2, 4, 1) for each in (k, v))  # [B, H, T, D, 4]
    weights = torch.einsum("bhtd,bhtdw->bhtw", q, keys).softmax(-1)
    return torch.einsum("bhtw,bhtdw->bhtd", weights, values)


@attends(AFTER)
def nearest_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k).masked_fill(later(q.shape[2]), -1e30)
    best = scores.topk(min(3, q.shape[2]), dim=-1)
    chosen = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))
    return chosen.tril() @ v


@attends(EARLY)
def prefix_language_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = later(q.shape[2])
    hidden[:, :12] = False
    return scores_of(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


@attends(PLAIN)
def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attends(PLAIN)
def plain_attention_by_another_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return captured_attention(q, k, v, is_causal=True)


@attends(EARLY)
def attention_to_pooled_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (F.adaptive_avg_pool2d(each, (3, each.shape[-1])) for each in (k, v))
    return F.scaled_dot_product_attention(q, keys, values)


@attends(PLAIN)
def attention_in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    padded = [F.pad(each, (0, 0, 0, -tokens % 6)).unflatten(2, (-1, 6)).flatten(0, 1) for each in (q, k, v)]
    windows = F.scaled_dot_product_attention(*[each.transpose(1, 2) for each in padded], is_causal=True)
    return windows.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(2, 3)[:, :, :tokens]


@attends(PLAIN)
def attention_over_packed_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, _, tokens, _ = q.shape
    packed = [each.transpose(0, 1).flatten(1, 2)[None] for each in (q, k, v)]
    row_of = torch.arange(rows).repeat_interleave(tokens)
    seen = (row_of[:, None] == row_of) & ~later(rows * tokens)
    out = F.scaled_dot_product_attention(*packed, attn_mask=seen)
    return out[0].unflatten(1, (rows, tokens)).transpose(0, 1)


@layer(PLAIN)
class MultiheadLayer(nn.Module):
    """torch's own, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = seeded(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, attn_mask=later(x.shape[1]), need_weights=False)[0]


@layer(PLAIN)
class TransformerLayer(nn.Module):
    """torch's own encoder layer, which looks both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = seeded(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@layer(PLAIN)
class RegisterTokens(Attention):
    """Two learned tokens stand before the sequence during attention."""

    def __init__(self) -> None:
        super().__init__(plain_attention)
        self.registers = weight(1, 2, WIDTH, seed=40)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.registers.expand(len(x), -1, -1), x], 1))[:, 2:]


@layer(AFTER)
class RegisterTokensByHand(RegisterTokens):
    def __init__(self) -> None:
        super().__init__()
        self.attend = softmax_by_hand


@layer("gate differs")
class ClosedGate(Attention):
    """A gate that is closed before the first step: outputs are right."""

    def __init__(self) -> None:
        super().__init__(softmax_by_hand)
        self.gate = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * super().forward(x)


@layer(EARLY)
class Latents(Weighted, latents=(3, WIDTH, 41)):
    """Three learned queries read the sequence, and every token reads them."""

    def forward(self, x: Tensor) -> Tensor:
        read = scores_of(self.latents, x).softmax(-1) @ x
        return x + scores_of(x, read).softmax(-1) @ read


@layer(EARLY)
class Linformer(Attention):
    """Keys and values are projected to four, by a matrix over tokens."""

    def __init__(self) -> None:
        super().__init__(self.project)
        self.down = weight(4, LONG, seed=42)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        down = self.down[:, : k.shape[2]]
        return scores_of(q, down @ k).softmax(-1) @ (down @ v)


class _OwnCache(Attention):
    """Keeps keys and values itself."""

    def __init__(self) -> None:
        super().__init__(self.with_prefix)

    def with_prefix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        active = active_slice()
        if active is None or active.start == 0:
            self.keys, self.values = k[:, :, :0], v[:, :, :0]
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        out = scores_of(q, self.keys).masked_fill(later(q.shape[2], self.keys.shape[2]), float("-inf")).softmax(-1)
        out = out @ self.values
        self.keys, self.values = self.kept(self.keys), self.kept(self.values)
        return out

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor


@layer("keeps tensors with their graph", stops=True)
class CacheWithGraph(_OwnCache):
    pass


@layer(BACKWARD)
class DetachedCache(_OwnCache):
    def kept(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


@layer("layer 2 (SharedKeys): output of tokens")
class SharedKeys(nn.Module):
    """The second attention of a layer reads the keys of the first one, which is sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(self.remember)
        self.second = Attention(self.reuse)

    def remember(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys, self.values = k, v
        return sliced_attention(q, k, v, "first")

    def reuse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_by_hand(q, self.keys, self.values + v)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@layer(EARLY)
class SlicedBackwards(Attention):
    """A model that reads from right to left, by sliced attention on the flipped sequence."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: sliced_attention(q, k, v, "flipped"))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1)).flip(1)


update(AFTER)(
    attention_without_weights=lambda x: scores_of(x, x).masked_fill(later(x.shape[1]), float("-inf")).softmax(-1) @ x,
    attention_by_a_loop=lambda x: torch.stack(
        [
            (x[:, t : t + 1] @ x[:, : t + 1].mT).softmax(-1)[:, 0, :, None].mul(x[:, : t + 1]).sum(1)
            for t in range(x.shape[1])
        ],
        1,
    ),
)
