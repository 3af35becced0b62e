"""Compute sliced attention in plain torch: the backend that takes everything, attention dropout too."""

from __future__ import annotations

import math

import torch

from terapipe_ds.attention.backends.base import AddGrads, Attended, Queries, Tensor, fold_groups, unfold_groups


class Reference:
    """One block of scores [T, start + T] per slice: any device, dtype and head dim, and dropout.

    The dropout mask comes from a generator of its own, whose seed is drawn from torch's generator of the device: a
    recomputed forward, which finds that generator restored, draws the same seed and so the same mask. Half precision is
    computed in fp32.
    """

    name = "reference"

    def is_available(self) -> bool:
        return True

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        return None

    def forward(self, queries: Queries) -> Attended:
        q, keys, values, start, scale, dropout_p = queries
        heads, tokens, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
        rows, wide_keys, wide_values = (_widen(x) for x in (fold_groups(q, kv_heads), keys, values))
        scores = _scores(rows, wide_keys, tokens, start, scale)
        lse = scores.logsumexp(-1)
        probs = scores.sub_(lse.unsqueeze(-1)).exp_()
        seed = int(torch.randint(2**63 - 1, (), device=q.device)) if dropout_p > 0 else 0
        if dropout_p > 0:
            probs.mul_(dropout_factors(probs, seed, dropout_p))
        out = (probs @ wide_values).to(q.dtype)
        return Attended(unfold_groups(out, heads, tokens), unfold_groups(lse, heads, tokens), (seed,))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        q, keys, values, start, scale, dropout_p = queries
        heads, tokens, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
        d_out, rows, out = (_widen(fold_groups(x, kv_heads)) for x in (grad, q, attended.out))
        wide_keys, wide_values = _widen(keys), _widen(values)
        scores = _scores(rows, wide_keys, tokens, start, scale)
        probs = scores.sub_(attended.lse.reshape(rows.shape[:3]).unsqueeze(-1)).exp_()
        kept, d_probs = probs, d_out @ wide_values.mT
        if dropout_p > 0:
            factors = dropout_factors(probs, attended.state[0], dropout_p)
            kept = probs * factors
            d_probs.mul_(factors)
        d_scores = d_probs.sub_((d_out * out).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
        add_grads(0, d_scores.mT @ rows, kept.mT @ d_out)
        return unfold_groups((d_scores @ wide_keys).to(q.dtype), heads, tokens)


def dropout_factors(probs: Tensor, seed: int, dropout_p: float) -> Tensor:
    """Return factors 0 and 1 / (1 - p) of the shape and device of `probs`, the same for the same seed."""
    generator = torch.Generator(device=probs.device).manual_seed(seed)
    kept = torch.rand(probs.shape, generator=generator, device=probs.device) >= dropout_p
    return kept.to(probs.dtype).mul_(1.0 / (1.0 - dropout_p))


def _scores(queries: Tensor, keys: Tensor, tokens: int, start: int, scale: float) -> Tensor:
    """Return [B, H_kv, G * T, start + T]; above the diagonal of the last T keys, which come later, it is -inf."""
    scores = (queries @ keys.mT).mul_(scale)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu_(1)
    scores.unflatten(2, (-1, tokens))[..., start:].masked_fill_(later, -math.inf)
    return scores


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
