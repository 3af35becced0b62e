"""Compute a cross entropy and all its gradients in the backward, in chunks of tokens, each with one product of logits.

The forward only keeps the hidden states. The backward knows the gradient of the loss (weights of slices, loss scale),
so each chunk's logits are computed once, become their own gradient in place, and are dropped. The loss has its value
when its backward has run.

docs/losses.md has the other ways, which were measured, or counted, and are worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe_ds.costs.model_sizes import loss_chunk_tokens
from terapipe_ds.losses.head import Head

Add = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Takes a weight, gradients of outputs [N, out] and inputs [N, in]; adds their product to a sum, or returns it."""

Watch = Callable[[slice, Tensor, Tensor], None]
"""Takes tokens of a chunk, the entropy of each over the vocabulary, and the label with its largest logit."""

_PARTS = 16


@dataclass(frozen=True)
class Tokens:
    """Hold the labels of N tokens, in [0, V) even for those that do not count, and the weight of each in the loss."""

    labels: Tensor  # int64
    weights: Tensor
    smoothing: float = 0.0
    add: Add | None = None  # of the gradient of the output matrix; None: autograd gets it
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # the work in the backward
    factors: Callable[[Tensor], Tensor] | None = None  # of the losses of tokens, given these; they count as constants
    watch: Watch | None = None


def deferred_cross_entropy(hidden: Tensor, head: Head, tokens: Tokens) -> Tensor:
    """Return the weighted sum of the tokens' cross entropies for hidden states [..., H] before the output matrix.

    If it needs a gradient, its value is NaN until its backward has run.

    Raises:
        ValueError: for unknown labels, on a CPU. A GPU reports them later, as an assertion.
    """
    require_known(tokens.labels, head.vocabulary)
    needs_gradient = any(t is not None and t.requires_grad for t in (hidden, head.weight, head.bias))
    if torch.is_grad_enabled() and needs_gradient:
        loss: Tensor = _Deferred.apply(hidden, head.weight, head.bias, head, tokens)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad():
        return _Pass(head, tokens).run(hidden)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of losses with weights; one without weight does not count even if it is NaN."""
    return (losses.where(weights != 0, 0.0) * weights).sum()  # a product by `@` would be in 16 bits under autocast


def require_known(ids: Tensor, vocabulary: int, kind: str = "label") -> None:
    """Raise ValueError for labels or tokens outside of the vocabulary; a GPU reports them later, as an assertion."""
    is_known = ((wide := ids.long()) >= 0) & (wide < vocabulary)  # in uint8 a vocabulary of 300 would be one of 44
    if not ids.is_cpu:  # do not wait for the device
        torch._assert_async(is_known.all())
    elif len(wrong := ids[~is_known]):
        raise ValueError(
            f"{kind}s outside of the vocabulary of {vocabulary}: {len(wrong)}, first {kind} {int(wrong[0])}. "
            f"{'Mask them' if kind == 'label' else 'Pad otherwise'}, or fix the tokenizer's or the model's vocabulary"
        )


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, tokens: Tokens) -> Tensor:
        ctx.save_for_backward(hidden)
        value = torch.full((), torch.nan, dtype=tokens.weights.dtype, device=hidden.device)
        ctx.head, ctx.tokens, ctx.value = head, tokens, value.detach()
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (hidden,), needs = ctx.saved_tensors, ctx.needs_input_grad
        with ctx.tokens.around():
            work = _Pass(ctx.head, ctx.tokens, grad, needs[:3])
            ctx.value.copy_(work.run(hidden))
        # autograd rounds them to the dtypes of their tensors
        return work.hidden_gradient, work.weight_gradient, work.bias_gradient, None, None


class _Pass:
    """Run all chunks; with `grad`, the gradient of the loss, compute the gradients that `needs` names as well."""

    hidden_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None

    def __init__(
        self, head: Head, tokens: Tokens, grad: Tensor | None = None, needs: tuple[bool, ...] = (False,) * 3
    ) -> None:
        self._head, self._tokens, self._grad, self._needs = head, tokens, grad, needs

    def run(self, hidden: Tensor) -> Tensor:
        head, ranks = self._head, self._head.ranks
        whole, num_ranks = (hidden, 1) if ranks is None else (ranks.gather(hidden), ranks.size)
        flat = whole.reshape(-1, whole.shape[-1])
        if len(flat) != len(self._tokens.labels):
            raise ValueError(
                f"{len(self._tokens.labels)} labels for the hidden states of {len(flat)} tokens before the last layer: "
                "give one label per token"
            )
        if self._needs[0]:
            self.hidden_gradient = torch.empty_like(flat)
        # autocast may ask for products in another dtype than the weight's
        matrix = head.weight.detach().to(flat.dtype)
        bias = None if head.bias is None else head.bias.detach().to(flat.dtype)
        loss = self._tokens.weights.new_zeros(())
        numbers = -(-head.vocabulary // num_ranks) * (1 if head.softcap is None else 2)  # a cap needs a copy of logits
        for span in _spans(len(flat), numbers, flat.is_cpu):
            losses, rows = self._chunk(F.linear(flat[span], matrix, bias), span)
            loss = loss + weighted_sum(losses, self._tokens.weights[span])
            if rows is not None:
                self._keep(rows.to(flat.dtype), flat[span], matrix, span)
            del rows  # before the next chunk has logits
        if self.hidden_gradient is not None:
            self.hidden_gradient = self.hidden_gradient.view(whole.shape)
            if ranks is not None:
                self.hidden_gradient = ranks.own_sum(self.hidden_gradient)
        return loss

    def _chunk(self, logits: Tensor, span: slice) -> tuple[Tensor, Tensor | None]:
        """Return the losses of a chunk, and the gradients of its products in the place of its logits."""
        head, tokens, ranks = self._head, self._tokens, self._head.ranks
        logits = logits.to(tokens.weights.dtype)
        capped = self._scale(logits)
        # the largest logit becomes 0, so that no exponential overflows
        largest = logits.amax(dim=-1, keepdim=True)
        if ranks is not None:
            ranks.largest(largest)
        logits.sub_(largest)
        # labels in this rank's share of the vocabulary
        labels, size, is_here = tokens.labels[span].unsqueeze(-1), logits.shape[-1], None
        if ranks is not None:
            labels = labels - ranks.span(size)[0]
            is_here = ((labels >= 0) & (labels < size)).to(logits.dtype)
            labels = labels.clamp(0, size - 1)
        of_label = _times(logits.gather(-1, labels), is_here)
        total = (logits.sum(dim=-1, keepdim=True),) if tokens.smoothing else ()
        top = None if tokens.watch is None else self._top(logits)
        exponentials = logits.exp_()
        sums: Sequence[Tensor] = exponentials.sum(dim=-1, keepdim=True), of_label, *total
        if ranks is not None:
            ranks.sum(together := torch.stack(tuple(sums)))
            sums = together.unbind()
        log_sum = sums[0].log()
        if top is not None:
            self._watch(span, exponentials, sums[0].squeeze(-1), top)
        losses = log_sum - (1 - tokens.smoothing) * sums[1]
        if tokens.smoothing:
            losses = losses - tokens.smoothing / head.vocabulary * sums[2]
        losses = losses.squeeze(-1)
        factors = None if tokens.factors is None else tokens.factors(losses)
        losses = _times(losses, factors)
        if self._grad is None:
            return losses, None
        # softmax minus the distribution of the label, times the gradient of the token's loss
        factor = (_times(self._grad * tokens.weights[span], factors) * head.scale).unsqueeze(-1)
        rows = exponentials.mul_(factor / sums[0])
        rows.scatter_add_(-1, labels, _times((tokens.smoothing - 1) * factor, is_here))
        if tokens.smoothing:
            rows.sub_(factor * (tokens.smoothing / head.vocabulary))
        if capped is not None:
            rows.mul_(capped.square_().neg_().add_(1.0))
        return losses, rows

    def _scale(self, logits: Tensor) -> Tensor | None:
        """Scale and cap logits in place; return what the gradient of the cap needs."""
        head, capped = self._head, None
        if head.scale != 1.0:
            logits.mul_(head.scale)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_()
            capped = logits.clone() if self._grad is not None else None
            logits.mul_(head.softcap)
        return capped

    def _top(self, logits: Tensor) -> Tensor:
        """Return the first label with the largest logit, which is 0, for each token."""
        ranks, top = self._head.ranks, logits.argmax(dim=-1)
        if ranks is not None:
            start, vocabulary = ranks.span(logits.shape[-1])
            top = -(top + start).where(logits.amax(dim=-1) == 0, vocabulary)
            ranks.largest(top)
            top.neg_()
        return top

    def _watch(self, span: slice, exponentials: Tensor, total: Tensor, top: Tensor) -> None:
        """Tell the entropies of a chunk; `total` is the sum of the exponentials over all ranks."""
        assert self._tokens.watch is not None
        # a temporary tensor of a part of the chunk, whose size is the limit of memory
        weighted = torch.cat([torch.special.entr(part).sum(dim=-1) for part in exponentials.chunk(_PARTS)])
        if self._head.ranks is not None:
            self._head.ranks.sum(weighted)
        self._tokens.watch(span, total.log() + weighted / total, top)

    def _keep(self, rows: Tensor, inputs: Tensor, matrix: Tensor, span: slice) -> None:
        """Add a chunk's share to the gradients."""
        add, weight = self._tokens.add, self._head.weight
        # the hidden states come first: the stage before waits for them
        if self.hidden_gradient is not None:
            torch.mm(rows, matrix, out=self.hidden_gradient[span])
        if self._needs[1]:
            total = self.weight_gradient
            if total is None:
                fresh = rows.t() @ inputs if add is None else add(weight, rows, inputs)
                # chunks add up in fp32 at least
                self.weight_gradient = None if fresh is None else fresh.to(self._tokens.weights.dtype)
            elif total.dtype == rows.dtype:
                total.addmm_(rows.t(), inputs)
            else:
                total.add_(rows.t() @ inputs)
        if self._needs[2]:
            of_chunk = rows.sum(dim=0, dtype=self._tokens.weights.dtype)
            self.bias_gradient = of_chunk if self.bias_gradient is None else self.bias_gradient + of_chunk


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _spans(num_tokens: int, numbers: int, is_cpu: bool) -> Iterator[slice]:
    """Cut tokens into chunks of about equal size; each token takes `numbers` fp32 numbers."""
    most = loss_chunk_tokens(numbers, on_cpu=is_cpu)
    count = -(-num_tokens // most)
    for index in range(count):
        yield slice(num_tokens * index // count, num_tokens * (index + 1) // count)
