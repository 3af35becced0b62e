"""Define a tiny decoder whose layers are divided over tensor-parallel ranks, in plain torch. Runs inside the ranks.

Column and row parallel linears, vocabulary-parallel embedding (tied or not) and cross entropy, after Shoeybi et al.
2019 (arXiv 1909.08053). The same layers on one tensor-parallel rank are the whole model with the same weights: each
rank takes its share of the same draw.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from terapipe_ds.attention import sliced_attention

VOCAB_SIZE, HIDDEN, HEADS, FFN, NUM_LAYERS = 32, 16, 4, 24, 4
IGNORE_INDEX = -100


@dataclass(frozen=True)
class _Ranks:
    """Hold the tensor-parallel ranks that layers are being built for."""

    size: int = 1
    rank: int = 0
    group: Any = None


_building = _Ranks()


class TensorParallelModule(PipelineModule):
    """Build the layers for the tensor-parallel group of DeepSpeed's grid."""

    def _build(self) -> None:
        grid = self.mpu()
        group = getattr(grid, "slice_proc_group", None)
        ranks = _Ranks(grid.get_slice_parallel_world_size(), grid.get_slice_parallel_rank(), group)
        _last_built[0] = ranks
        with _built_for(ranks):
            super()._build()


class InMultiplesOfTwo(TensorParallelModule):
    """Act as if the layers divided the tokens of a slice over two ranks."""

    slice_length_multiple = 2


@contextmanager
def _built_for(ranks: _Ranks) -> Iterator[None]:
    global _building
    before, _building = _building, ranks
    try:
        yield
    finally:
        _building = before


def parallel(grid: tuple[int, int, int], module_class: type[PipelineModule] = TensorParallelModule) -> dict[str, Any]:
    """Return options of `engine_of` for stages, replicas and tensor-parallel ranks."""
    pipe, data, model = grid
    return {
        "stages": pipe,
        "module": {"topology": PipeModelDataParallelTopology(num_pp=pipe, num_dp=data, num_mp=model)},
        "module_class": module_class,
        "loss_fn": vocabulary_parallel_loss,
    }


def layers(dtype: str = "float64") -> list[Any]:
    """Return layers: token ids in, this rank's part of the logits [B, T, V / ranks] out."""
    middle = [LayerSpec(DecoderLayer, dtype, index) for index in range(NUM_LAYERS)]
    first, last = (TiedLayerSpec("embedding", Embedding, dtype, forward_fn=fn) for fn in (None, _tied_logits))
    return [first, *middle, LayerSpec(Norm, dtype), last]


def vocabulary_parallel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the valid labels of logits [B, T, V / ranks]; the same number on each rank."""
    ranks = _Ranks() if logits.shape[-1] == VOCAB_SIZE else _last_built[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(-1)
    if ranks.size > 1:
        torch_dist.all_reduce(largest, op=torch_dist.ReduceOp.MAX, group=ranks.group)
    shifted = logits - largest.unsqueeze(-1)
    first = ranks.rank * logits.shape[-1]
    valid = labels != IGNORE_INDEX
    here = valid & (labels >= first) & (labels < first + logits.shape[-1])
    target = shifted.gather(-1, torch.where(here, labels - first, 0).unsqueeze(-1)).squeeze(-1)
    target = _reduce(torch.where(here, target, 0.0), ranks)
    total = _reduce(shifted.exp().sum(-1), ranks)
    return ((total.log() - target) * valid).sum() / valid.sum()


_last_built = [_Ranks()]  # a loss function is no layer and gets no group


# -- what moves between tensor-parallel ranks --------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Copy forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        total = gradient.clone()
        torch_dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduce(torch.autograd.Function):
    """Sum over the ranks forward, copy backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        torch_dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def _copy(tensor: Tensor, ranks: _Ranks) -> Tensor:
    return tensor if ranks.size == 1 else _Copy.apply(tensor, ranks.group)


def _reduce(tensor: Tensor, ranks: _Ranks) -> Tensor:
    return tensor if ranks.size == 1 else _Reduce.apply(tensor, ranks.group)


# -- layers ------------------------------------------------------------------------------------------------------


def _drawn(seed: int, shape: Sequence[int], dtype: str, std: float = 0.3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(std).to(getattr(torch, dtype))


def _part(whole: Tensor, ranks: _Ranks, dim: int) -> nn.Parameter:
    """Return this rank's share along ``dim``, marked as Megatron marks it."""
    parameter = nn.Parameter(whole.chunk(ranks.size, dim)[ranks.rank].contiguous())
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    return parameter


class Embedding(nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.ranks = _building
        self.weight = _part(_drawn(1, (VOCAB_SIZE, HIDDEN), dtype), _building, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        first, count = self.ranks.rank * self.weight.shape[0], self.weight.shape[0]
        here = (tokens >= first) & (tokens < first + count)
        found = F.embedding(torch.where(here, tokens - first, 0), self.weight)
        return _reduce(found * here.unsqueeze(-1), self.ranks)


def _tied_logits(embedding: Embedding, hidden: Tensor) -> Tensor:
    return F.linear(_copy(hidden, embedding.ranks), embedding.weight)


class Norm(nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=getattr(torch, dtype)))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (HIDDEN,), self.weight, eps=1e-5)


class DecoderLayer(nn.Module):
    """Run pre-norm attention and feed-forward; the ranks divide heads and inner width."""

    def __init__(self, dtype: str, index: int) -> None:
        super().__init__()
        self.ranks, self.index = _building, index
        seed = 10 * (index + 1)
        self.attention_norm, self.feed_forward_norm = Norm(dtype), Norm(dtype)
        self.q = _part(_drawn(seed, (HIDDEN, HIDDEN), dtype), _building, 0)
        self.k = _part(_drawn(seed + 1, (HIDDEN, HIDDEN), dtype), _building, 0)
        self.v = _part(_drawn(seed + 2, (HIDDEN, HIDDEN), dtype), _building, 0)
        self.out = _part(_drawn(seed + 3, (HIDDEN, HIDDEN), dtype), _building, 1)
        self.out_bias = nn.Parameter(_drawn(seed + 4, (HIDDEN,), dtype))  # replicated
        self.up = _part(_drawn(seed + 5, (FFN, HIDDEN), dtype), _building, 0)
        self.down = _part(_drawn(seed + 6, (HIDDEN, FFN), dtype), _building, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        x = _copy(self.attention_norm(hidden), self.ranks)
        projected = (F.linear(x, weight) for weight in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for each in projected)
        attended = sliced_attention(q, k, v, layer=self.index).transpose(1, 2).flatten(2)
        hidden = hidden + _reduce(F.linear(attended, self.out), self.ranks) + self.out_bias
        x = _copy(self.feed_forward_norm(hidden), self.ranks)
        return hidden + _reduce(F.linear(F.gelu(F.linear(x, self.up)), self.down), self.ranks)
