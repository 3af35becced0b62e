"""Define attention by hand, which sees the keys of the call, and positions that count from 0 in every call."""

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as captured_attention

from terapipe_ds.attention import active_slice
from tests.distributed.engines import VOCAB_SIZE
from tests.small_models.parts import (
    HEADS,
    LONG,
    WIDTH,
    Attention,
    Embedding,
    Head,
    Mlp,
    causal,
    later,
    scores_of,
    sliced_attention,
    using,
)
from tests.zoo.members import AFTER, BACKWARD, EARLY, FIRST, add, attend, layer, stack, update

PLAIN = "plain attention"


def lags(x: Tensor) -> Tensor:
    """Return [T, T]: by how many tokens the key comes before the query."""
    places = torch.arange(x.shape[-2])
    return (places[:, None] - places).to(x.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


attend(AFTER)(
    softmax_by_hand=causal,
    linear_attention=lambda q, k, v: (q @ k.transpose(-1, -2)).tril() @ v,
    retention=lambda q, k, v: (q @ k.transpose(-1, -2) * 0.9 ** lags(q).clamp(min=0)).tril() @ v,
    alibi_by_hand=lambda q, k, v: causal(q, k, v, -torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None] * lags(q)),
)
attend(FIRST)(
    sliding_window_by_hand=lambda q, k, v: causal(q, k, v, torch.zeros_like(lags(q)).masked_fill(lags(q) > 3, -1e30))
)
attend(EARLY)(
    bidirectional=lambda q, k, v: scores_of(q, k).softmax(-1) @ v,
    attention_to_pooled_keys=lambda q, k, v: F.scaled_dot_product_attention(
        q, *(F.adaptive_avg_pool2d(each, (3, each.shape[-1])) for each in (k, v))
    ),
)
attend(PLAIN)(
    plain_attention_by_another_name=lambda q, k, v: captured_attention(q, k, v, is_causal=True),
)


@attend(EARLY)
def prefix_language_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = later(q.shape[2])
    hidden[:, :12] = False
    return scores_of(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


@attend(PLAIN)
def attention_in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    padded = [F.pad(each, (0, 0, 0, -tokens % 6)).unflatten(2, (-1, 6)).flatten(0, 1) for each in (q, k, v)]
    windows = plain_attention(*[each.transpose(1, 2) for each in padded])
    return windows.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(2, 3)[:, :, :tokens]


@attend(PLAIN)
def attention_over_packed_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, _, tokens, _ = q.shape
    packed = [each.transpose(0, 1).flatten(1, 2)[None] for each in (q, k, v)]
    row_of = torch.arange(rows).repeat_interleave(tokens)
    seen = (row_of[:, None] == row_of) & ~later(rows * tokens)
    out = F.scaled_dot_product_attention(*packed, attn_mask=seen)
    return out[0].unflatten(1, (rows, tokens)).transpose(0, 1)


layer(PLAIN)(
    # torch's own, with a causal mask.
    MultiheadLayer=using(
        lambda it, x: x + it.attention(x, x, x, attn_mask=later(x.shape[1]), need_weights=False)[0],
        attention=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    ),
    # torch's own encoder layer, which looks both ways.
    TransformerLayer=using(
        lambda it, x: it.layer(x),
        layer=lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True),
    ),
)


@layer(PLAIN)
class RegisterTokens(Attention, registers=(1, 2, WIDTH, 40)):
    """Put two learned tokens before the sequence during attention."""

    attend = staticmethod(plain_attention)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.registers.expand(len(x), -1, -1), x], 1))[:, 2:]


@layer("gate differs")
class ClosedGate(Attention):
    """Close a gate before the first step: outputs are right."""

    attend = staticmethod(causal)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * super().forward(x)


@layer(EARLY)
class Linformer(Attention, down=(4, LONG, 42)):
    """Project keys and values to four, by a matrix over tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        down = self.down[:, : k.shape[2]]
        return scores_of(q, down @ k).softmax(-1) @ (down @ v)


@layer("keeps tensors with their graph", stops=True)
class CacheWithGraph(Attention):
    """Keep keys and values itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        active = active_slice()
        if active is None or active.start == 0:
            self.keys, self.values = k[:, :, :0], v[:, :, :0]
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        out = causal(q, self.keys, self.values)
        self.keys, self.values = self.kept(self.keys), self.kept(self.values)
        return out

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor


@layer(BACKWARD)
class DetachedCache(CacheWithGraph):
    def kept(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


@layer("layer 2 (SharedKeys): output of tokens")
class SharedKeys(nn.Module):
    """Let the second attention of a layer read the keys of the first one, which is sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(self.remember)
        self.second = Attention(self.reuse)

    def remember(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys, self.values = k, v
        return sliced_attention(q, k, v, "first")

    def reuse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, self.keys, self.values + v)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@layer(EARLY)
class SlicedBackwards(Attention):
    """Read from right to left, by sliced attention on the flipped sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, "flipped")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1)).flip(1)


# -- positions, scales and tables by the length of a layer's input ---------------------------------------------


layer(AFTER)(LearnedPositions=using(lambda it, x: x + it.table[torch.arange(x.size(1))], table=(LONG, WIDTH, 10)))


class PositionedEmbedding(Embedding, positions=(LONG, WIDTH, 11)):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.positions[torch.arange(tokens.size(1), device=tokens.device)]


class PairEmbedding(Embedding):
    """Read a token together with the one before it."""

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = (tokens * 7 + F.pad(tokens, (1, -1))) % VOCAB_SIZE
        return super().forward(tokens) + self.weight[pairs]


add("PositionedEmbedding", [PositionedEmbedding, Mlp, Mlp, Head], "layer 0 ", AFTER)
add("PairEmbedding", [PairEmbedding, Mlp, Mlp, Head], "layer 0 ", FIRST)


def turned(x: Tensor, first: int) -> Tensor:
    """Apply rotary positions to [B, H, T, D], from `first` on."""
    positions = first + torch.arange(x.shape[2], dtype=x.dtype)
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


attend(AFTER)(
    rotary_from_zero=lambda q, k, v: sliced_attention(turned(q, 0), turned(k, 0), v, "rotary"),
    biased_by_distance=lambda q, k, v: causal(q, k, v, -lags(q).clamp(0, 8).sqrt()),
)
attend(EARLY)(
    scaled_by_length=lambda q, k, v: sliced_attention(q * torch.tensor(q.shape[2] + 1.0).log(), k, v, "scaled")
)
update(EARLY)(
    relative_positions=lambda x: x * torch.linspace(0.0, 1.0, x.size(1), dtype=x.dtype)[:, None],
    divided_by_length=lambda x: x / x.shape[1],
)


class Sliced(Attention):
    """Run sliced attention, with positions that begin where the slice does."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = self.first_position()
        return sliced_attention(turned(q, first), turned(k, first), v, self.index)

    def first_position(self) -> int:
        active = active_slice()
        return 0 if active is None else active.start


SLICED = LayerSpec(Sliced, 0)


class CentredByTheModule(PipelineModule):  # type: ignore[misc]
    """Subtract a mean over tokens beside the layers: in the module's own forward."""

    def forward(self, forward_input: Any) -> Tensor:
        out: Tensor = super().forward(forward_input)
        return out - out.mean(1, keepdim=True) if self.stage_id == self.num_stages - 1 else out


class ScaledByAHook(PipelineModule):  # type: ignore[misc]
    """Scale the outputs in a hook of the module: each token on its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_forward_hook(lambda it, _, out: 1.5 * out if it.stage_id == it.num_stages - 1 else out)


AROUND = "with the forward and the hooks of the PipelineModule"
add("CentredByTheModule", stack(SLICED), AROUND, EARLY, engine={"module_class": CentredByTheModule})
add("ScaledByAHook", stack(SLICED), engine={"module_class": ScaledByAHook})
