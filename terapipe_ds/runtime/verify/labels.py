"""Try every kind of label on `loss_fn`, to learn which ones it ignores, independently of the `terapipe` section."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terapipe_ds.attention import SliceStore
from terapipe_ds.compat.replaced import replaced
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.loss_weights import slice_counts, weights_of
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.verify.cut import Cut, num_rows
from terapipe_ds.runtime.verify.loss import LossCheck
from terapipe_ds.runtime.verify.tokens import PerSlice, TokenDim

_MOST_KINDS = 4096  # of a micro-batch: the most frequent ones
_TOKENS = 64  # in a call, each with one kind of label
_SHARE = 512  # with large vocabularies, later batches always contain new rare labels
_EVEN = 0.01  # if the slices' shares differ by less, rounding hides which mean it is
_NAMED = 8  # labels in a message
_FILLS = 0.25  # of a window: no word of a text is as frequent, but padding may be
_ANY = 2**31 - 1  # in place of labels that are neither negative nor as frequent


class LabelProbe:
    """Compare the losses of slices and of the whole on labels that get no gradient, or no weight.

    A kind of label is its value, and if it has masks, whether they are zero. Each kind is one token of a small call.
    Tokens that get a gradient and a weight are mixed unevenly with tokens that lack one of them. This reveals an
    `ignore_index`, reduction or `slice_weight` that does not fit `loss_fn`.
    """

    def __init__(self, check: LossCheck, tokens: int) -> None:
        store = SliceStore()  # this object stays with the engine, and the other store has the buffers of a window
        slicing = replace(check.slicing, plan=SlicePlan((tokens,)), weights=(1.0,), starts=None, store=store)
        self._device = check.outputs.tensors[0].device
        few = (
            layout.tokens_back(layout.tokens_first(each)[:tokens]) if isinstance(layout, TokenDim) else each
            for layout, each in zip(check.outputs.layouts, check.outputs.tensors, strict=True)
        )
        # on the host: the memory of the device is for training
        outputs = replace(check.outputs, tensors=tuple(each.detach().to("cpu", copy=True) for each in few))
        self._check = replace(check, outputs=outputs, slicing=slicing, head=None)
        self._tokens, self._rows, self._seen = tokens, num_rows(check.labels), np.empty(0, np.int64)
        # special labels that are spread unevenly over unequal slices tell the means apart
        self._plan = SlicePlan((tokens // 3, tokens - tokens // 3))
        self._regular: SliceableTensors | None = None  # one token that has a gradient and a weight
        pairs = zip(check.slicing.weights, check.slicing.plan.shares, strict=True)
        self._is_even = all(abs(weight - share) <= _EVEN for weight, share in pairs)  # all means agreed until now

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        return self._check.loss_fn

    @classmethod
    def of(cls, check: LossCheck) -> LabelProbe | None:
        """Return the probe, or None if a loss of a few tokens cannot be computed, or shows nothing."""
        layouts = [layout for layout in check.outputs.layouts if isinstance(layout, TokenDim)]
        tokens = min(_TOKENS, check.slicing.plan.sequence_length)
        is_told = hasattr(check.loss_fn, "slice_weight") or check.config.loss_reduction != "sum"
        can_ask = tokens >= 4 and bool(layouts) and all(layout.shared_by == 1 for layout in layouts)
        return cls(check, tokens) if is_told and can_ask else None

    def look(self, labels: SliceableTensors, is_later: bool = False) -> str | None:
        """Return the problem of kinds of labels that were not tried yet; of later batches try only frequent ones."""
        kinds = _kinds(labels)
        fresh = ~np.isin(kinds, self._seen)
        values, first, counts = np.unique(kinds[fresh], return_index=True, return_counts=True)
        # the most frequent first; a later batch may cost only one call
        order = np.argsort(-counts, kind="stable")[: self._tokens if is_later else _MOST_KINDS]
        order = order[counts[order] * _SHARE >= len(kinds)] if is_later else order
        # tensor-parallel ranks try the same labels, because loss_fn may communicate
        places = self._check.slicing.ranks.exchange(np.flatnonzero(fresh)[first[order]])[0]
        if not len(places):
            return None
        before, self._seen = self._seen, np.union1d(self._seen, values[order])
        holder = nn.Module()
        setattr(holder, "loss_fn", self._check.loss_fn)  # noqa: B010  # a module is registered, a function is kept
        on_device = replace(self._check, outputs=self._check.outputs.to(self._device))
        with replaced(self, "_check", on_device), untouched(holder, with_gradients=False):
            calls = (places[start : start + self._tokens] for start in range(0, len(places), self._tokens))
            problem = next(filter(None, (self._try(self._at(labels, each), is_later) for each in calls)), None)
            if problem is not None:
                self._seen = before  # a caller who goes on gets the error again
                if is_later and self._is_nan_anyway():
                    return None  # training names the slice
            return problem

    def _is_nan_anyway(self) -> bool:
        """Return whether `loss_fn` gives no finite losses even for a label that agreed before."""
        if self._regular is None:
            return False
        labels = self._regular.stretched(self._tokens)
        check = _with_labels(self._check, labels, self._plan)
        return not bool(torch.isfinite(check.losses(check.slicing).values).all())

    def _try(self, labels: SliceableTensors, is_later: bool) -> str | None:
        """Try one kind of label per token; if some lack a gradient or a weight, compare slices with the whole.

        Later batches are not compared window by window, so this compares their other kinds too: `loss_fn` may weigh
        them unlike the kinds of the first batch.
        """
        config, loss_fn = self._check.config, self._check.loss_fn
        num_kinds, ranks = labels.length, self._check.slicing.ranks
        # which kinds get a gradient; NaN, when all labels are ignored, is none
        whole = replace(self._check, labels=labels.stretched(self._tokens))
        losses = whole.losses(whole.slicing)
        norms = [each.reshape(self._tokens, -1).double().norm(dim=1) for each in losses.gradients if each.dim() > 0]
        is_trained = (torch.stack(norms).sum(0)[:num_kinds] > 0.0).cpu()
        is_trained = torch.stack(ranks.exchange(is_trained)).any(0)
        # which kinds have a weight
        is_counted = torch.ones(num_kinds, dtype=torch.bool, device="cpu")
        if hasattr(loss_fn, "slice_weight") or config.loss_reduction in ("mean_valid", "mean_of_step"):
            counts = slice_counts(labels, SlicePlan((1,) * num_kinds), config, loss_fn)
            is_counted = torch.tensor(counts, device="cpu") > 0.0
        regular, special = ((is_trained & is_counted) == wanted for wanted in (True, False))
        if self._regular is None and regular.any():
            self._regular = labels.picked(regular.nonzero().flatten()[:1])
        chosen = [special] if special.any() else []
        chosen += [regular] if is_later and regular.any() else []
        picked = (labels.picked(each.nonzero().flatten()) for each in chosen)
        problem = next(filter(None, map(self._compare, picked)), None)
        ignored, trained = (_named(labels, kinds) for kinds in (~is_trained & is_counted, is_trained & ~is_counted))
        return problem and problem + "".join(
            f"; loss_fn {does} label {values}, which {which} the section (ignore_index {config.ignore_index}): "
            "set terapipe.ignore_index to the label that loss_fn ignores, if it is one"
            for does, values, which in (("ignores", ignored, "counts by"), ("trains on", trained, "is ignored by"))
            if values
        )

    def _compare(self, special: SliceableTensors) -> str | None:
        """Compare two slices: one of tokens with a gradient and a weight, one with as many such tokens as others.

        The others are in the first row alone, because a mean over rows may follow a mean over the tokens of each.
        """
        plan, labels = self._plan, special.stretched(self._tokens)
        if self._regular is not None:
            labels = self._regular.stretched(self._tokens)
            others = special.stretched(-(-plan.lengths[1] // 2))
            for tensor, source, is_cut in zip(labels.tensors, others.tensors, labels.sliced, strict=True):
                if is_cut and tensor.dim() > 1:
                    _tokens_first(tensor, labels.dim)[plan.lengths[0] :: 2, 0] = _tokens_first(source, labels.dim)[:, 0]
        values = labels.deciding.flatten().unique().tolist() if not labels.deciding.is_floating_point() else []
        check = _with_labels(self._check, labels, plan, plan.shares if self._is_even else None)
        return replace(check, other_ignored=tuple(values)).run()

    def _at(self, labels: SliceableTensors, places: np.ndarray) -> SliceableTensors:
        """Return a sequence of the tokens at `places` of the flat [tokens, rows], each in all rows of the outputs."""
        rows = num_rows(labels)
        token_ids, row_ids = (torch.from_numpy(each) for each in np.divmod(places, rows))
        tensors = []
        for tensor, is_cut, whole in zip(labels.tensors, labels.sliced, self._check.labels.tensors, strict=True):
            if not is_cut:
                tensors.append(whole)
                continue
            tokens = _tokens_first(tensor, labels.dim)
            chosen = tokens[token_ids, row_ids % tokens.size(1)]
            if tensor.dim() > 1:
                own_rows = self._rows if tokens.size(1) == rows else tokens.size(1)
                chosen = chosen[:, None].expand(-1, own_rows, *chosen.shape[1:]).movedim(0, labels.dim).contiguous()
            tensors.append(chosen.to(self._device))
        return replace(labels, tensors=tuple(tensors))


def compare_everywhere(
    check: LossCheck, everyone: Sequence[SliceableTensors], note: Callable[[str], None]
) -> tuple[str | None, str]:
    """Compare the loss with the labels of all rows and tokens, window by window, each on the outputs of `check`.

    Return the difference, and the reason if nothing was compared, empty otherwise. The labels' worth depends on no
    setting here: a window without any loss is compared with no weight at all. The loss without logits is compared for
    the first window that has a loss, and for windows with new kinds of labels.
    """
    waits, not_finite, seen, head = "no label counts in this batch", "", set[int](), check.head
    own = (check, "") if check.has_counted_labels else None
    for here, where in filter(None, itertools.chain((own,), _windows(check, everyone, note))):
        # the last layer takes far longer than loss_fn, and shows the same for labels of the same kinds
        fresh = set[int]() if head is None else _kinds_that_run(here) - seen
        here.head = head if any(check.slicing.ranks.exchange(bool(fresh))) else None
        problem = here.run()
        seen |= fresh if here.is_finite else set()
        if problem is not None:
            return problem + where, ""
        if not here.is_finite:
            not_finite = not_finite or ("the loss of the whole is not finite" + where) * any(here.slicing.weights)
        elif here.has_counted_labels:
            waits = ""
    # if no loss is finite, this shows no fault of slices
    if not_finite and waits:
        return None, "the loss is not finite on whole sequences"
    return f"{not_finite}, though the terapipe section counts labels there" if not_finite else None, waits


def _windows(
    check: LossCheck, everyone: Sequence[SliceableTensors], note: Callable[[str], None]
) -> Iterator[tuple[LossCheck, str]]:
    """Return the check with the labels of each window, and the window's place."""
    # the outputs have the size of a window: labels from any place fit them
    rows, device, plan = num_rows(check.labels), check.outputs.tensors[0].device, check.slicing.plan
    for micro_batch_id, labels in enumerate(everyone):
        of_rows = num_rows(labels)
        if labels.length < plan.sequence_length or of_rows < rows:  # its form differs from the compared one
            continue
        firsts, starts = _firsts(of_rows, rows), _firsts(labels.length, plan.sequence_length)
        for first_row, start in itertools.product(firsts, starts):
            note(f"verifying the loss of micro-batch {micro_batch_id}, row {first_row}, token {start}")
            cut = Cut(plan, labels.length, start, None if rows == of_rows else rows, of_rows, first_row)
            where = f" (on {cut}, from row {first_row} on, of micro-batch {micro_batch_id})"
            yield _with_labels(check, cut.of(labels).to(device), plan), where


def _firsts(length: int, window: int) -> list[int]:
    """Return the starts of windows that cover everything; the last window ends at the end."""
    return [*range(0, length - window, window), length - window]


def _tokens_first(tensor: Tensor, dim: int) -> Tensor:
    """Return labels as [tokens, rows, ...], with one row if there are none."""
    tokens = tensor.movedim(dim, 0)
    return tokens[:, None] if tokens.dim() == 1 else tokens


def _kinds(labels: SliceableTensors, are_joined: bool = False) -> np.ndarray:
    """Return a number for the kind of each label, flat over [tokens, rows]; `are_joined` makes common labels one."""
    kinds = torch.zeros(labels.length, num_rows(labels), dtype=torch.int64, device="cpu")
    for tensor in itertools.compress(labels.tensors, labels.sliced):
        tokens = _tokens_first(tensor.detach().cpu(), labels.dim)
        if tensor.is_floating_point() or tensor.dtype == torch.bool:  # a mask, weights, a distribution
            flat = tokens[..., None].flatten(2)
            kinds = kinds * 3 + (flat != 0).any(2) + flat.isnan().any(2)  # NaN may stand for a missing value
        elif tokens.dim() == 2:
            if are_joined:
                values, places, counts = tokens.long().unique(return_inverse=True, return_counts=True)
                is_common = (values >= 0) & (counts < _FILLS * tokens.numel())
                tokens = values.masked_fill(is_common, _ANY)[places]
            kinds = kinds * 2**31 + tokens.long()
    return kinds.flatten().numpy()


def _kinds_that_run(check: LossCheck) -> set[int]:
    """Return the kinds of labels in slices with a weight; without one, no loss of hidden states runs."""
    plan = check.slicing.plan
    has_weight = np.repeat(np.array(check.slicing.weights) != 0.0, plan.lengths)
    kinds = _kinds(check.labels, are_joined=True).reshape(plan.sequence_length, -1)
    return set(kinds[has_weight].flatten().tolist())


def _named(labels: SliceableTensors, kinds: Tensor) -> str:
    """Return the values of these kinds of labels."""
    tokens = labels.deciding.movedim(labels.dim, 0)[kinds.to(labels.deciding.device)]
    values = tokens.unique().tolist() if not tokens.is_floating_point() else []
    return ", ".join(map(str, values[:_NAMED])) + ", ..." * (len(values) > _NAMED)


def _with_labels(
    check: LossCheck, labels: SliceableTensors, plan: SlicePlan, shares: tuple[float, ...] | None = None
) -> LossCheck:
    """Return the check of other labels, whose slices weigh as in training.

    Values of slices, all different, combine to the values of the whole by these weights, or by `shares`.
    """
    # values per slice, all different, so that wrong weights show
    weights = weights_of(labels, plan, check.config, check.loss_fn)
    total = sum(weight * number for number, weight in enumerate(shares or weights, 1)) or 1.0
    parts = [number / total for number in range(1, plan.num_slices + 1)]
    layouts = tuple(
        PerSlice(tuple(whole.detach() * part for part in parts)) if isinstance(layout, PerSlice) else layout
        for layout, whole in zip(check.outputs.layouts, check.outputs.tensors, strict=True)
    )
    slicing = replace(check.slicing, plan=plan, weights=weights, starts=None)
    outputs = replace(check.outputs, layouts=layouts)
    return replace(check, labels=labels, outputs=outputs, slicing=slicing, at_start=None)
