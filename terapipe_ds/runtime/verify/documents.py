"""Check that layers keep to the documents of packed rows: earlier documents must not change the outputs of later ones.

A layer with an attention kernel of its own may know nothing of documents. It runs twice on the same rows, with other
tokens in the first documents of each row, and the outputs of the other documents must stay the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import Tensors
from terapipe_ds.runtime.batch.in_flight import MicroBatchInFlight
from terapipe_ds.runtime.verify import compare
from terapipe_ds.runtime.verify.compare import Difference, Tolerance
from terapipe_ds.runtime.verify.cut import Cut
from terapipe_ds.runtime.verify.layer import LayerCheck
from terapipe_ds.runtime.verify.tokens import Activations, TokenDim

_TOKENS = 127  # of a window: no other dimension is likely to be a multiple of this prime number
_SEED = 20210719  # of the tokens that replace others, equal on all ranks
_MOST_LAYOUTS = 8
_MIXES = (
    "{}, although only tokens of earlier documents in the row changed: the layer mixes documents, and the key "
    "terapipe.documents promises that each trains as a row of its own. Let the layer call sliced_attention, or let its "
    "own kernel keep to the edges in active_slice().documents (docs/models.md); or train on rows of one document"
)


def window_of_documents(micro_batch: MicroBatchInFlight, may_cut: tuple[int | None, bool], multiple: int) -> Cut:
    """Return the tokens around the start of a document, in one slice; whole rows if tokens must not be cut."""
    starts, length, (of_rows, may_cut_tokens) = micro_batch.shape.starts, micro_batch.plan.sequence_length, may_cut
    assert starts is not None
    row, edge = next((row, edges[1]) for row, edges in enumerate(starts) if len(edges) > 1)
    start, size = 0, -(-_TOKENS // multiple) * multiple
    if may_cut_tokens and size < length:
        start = max(min(edge - size // 2, length - size), 0) // multiple * multiple
    else:
        size = length
    rows, first_row = (1, row) if of_rows == len(starts) else (None, 0)
    return Cut(SlicePlan((size,)), length, start, rows, len(starts), first_row, weights=(1.0,))


@dataclass
class DocumentCheck(LayerCheck):
    """Check one layer of `stage` on rows of several documents, in one slice. Use it inside `untouched(stage)`."""

    with_gradients: bool = False

    def run(self) -> Difference | None:
        """Add a fault if tokens of earlier documents change the outputs of later ones."""
        self.keep()
        # every change counts: in half precision the attention of a fresh model is hardly more than rounding
        difference = self.changes(compare.EXACT)
        if difference is not None:
            other, in_wider = self.in_wider_dtype(lambda check: check.changes(None))
            difference = self.changes(None) if other is None else in_wider
        self.faults += [] if difference is None else [_MIXES.format(difference)]
        return None

    def changes(self, tolerance: Tolerance | None) -> Difference | None:
        """Return how outputs of later documents change; None for `tolerance` is the tolerance of the dtypes.

        If several dimensions have the size of the tokens, the change must show whichever holds them.
        """
        self._begin_anew()
        whole, *_ = self.run_whole()
        self.outputs, difference = self._compare_outputs(whole, [self._run_on(self.inputs)])
        if self.is_random:
            return None
        changed, ranks = list(itertools.islice(self._with_other_documents(), _MOST_LAYOUTS)), self.slicing.ranks
        if ranks.first(difference) is not None or not all(ranks.exchange(bool(changed))):
            self.unable.append("documents were not told apart: each call gives other outputs, or no input has tokens")
            return None
        tolerance = tolerance or self._tolerance(whole.outputs)
        for inputs in changed:
            pairs = zip(whole.outputs, self._run_on(inputs), strict=True)
            differences = [self._difference(before, after, tolerance) for before, after in pairs]
            difference = ranks.first(next(filter(None, differences), None))
            if difference is None:
                break
        return difference

    def _run_on(self, inputs: Activations) -> Tensors:
        """Return the outputs of the layer on other inputs."""
        self._begin_anew()
        [run], _ = self._forwards(self.slicing, inputs)
        return tuple(output.detach() for output in run.outputs)

    def _with_other_documents(self) -> Iterator[Activations]:
        """Yield the inputs with other tokens before the chosen edge of each row, once for each possible layout.

        Hidden states change alone, because integers beside them may say where documents are.
        """
        tensors = self.inputs.tensors
        kinds = [
            [i for i, each in enumerate(tensors) if each.is_floating_point() and each.requires_grad],
            [i for i, each in enumerate(tensors) if each.is_floating_point()],
            range(len(tensors)),
        ]
        layouts = [self._layouts_of(each) for each in tensors]
        chosen = next(filter(None, ([i for i in kind if layouts[i]] for kind in kinds)), [])
        for of_chosen in itertools.product(*(layouts[i] for i in chosen)) if chosen else ():
            other = dict(zip(chosen, of_chosen, strict=True))
            yield replace(
                self.inputs, tensors=tuple(self._other(t, other[i]) if i in other else t for i, t in enumerate(tensors))
            )

    def _layouts_of(self, tensor: Tensor) -> list[TokenDim]:
        """Return the possible layouts of a tensor that has the tokens of each row."""
        num_rows = len(self._starts)
        layouts = self.slicing.layouts_of(tensor, [tensor])
        return [each for each in layouts if num_rows == 1 or each.tokens_first(tensor).shape[1:2] == (num_rows,)]

    @property
    def _starts(self) -> Starts:
        assert self.slicing.starts is not None
        return self.slicing.starts

    def _edges(self) -> list[int]:
        """Return the edge of each row that is nearest to its middle; 0 in rows of one document."""
        length = self.slicing.plan.sequence_length
        return [min(row[1:], key=lambda edge: abs(2 * edge - length), default=0) for row in self._starts]

    def _other(self, tensor: Tensor, layout: TokenDim) -> Tensor:
        """Return a copy of `tensor` with other tokens in the documents before the edge of each row."""
        copy, is_real = tensor.detach().clone(), tensor.is_floating_point()
        tokens, generator = layout.tokens_first(copy), torch.Generator("cpu").manual_seed(_SEED)
        before = len(tokens) * self.slicing.ranks.rank if layout.shared_by > 1 else 0
        for row, (starts, edge) in enumerate(zip(self._starts, self._edges(), strict=True)):
            of_row = tokens if len(self._starts) == 1 else tokens[:, row]
            # the first and the last token of a document may mark its edges
            for start, stop in itertools.pairwise([*(s for s in starts if s < edge), edge]):
                first, last = (start, stop) if is_real else (start + 1, stop - 1)
                part = of_row[max(first - before, 0) : max(last - before, 0)]
                if is_real:
                    # equal tokens: a mean over random ones would be small
                    drawn = torch.randn(of_row.shape[1:], generator=generator, device="cpu").to(tensor)
                    part[:] = drawn * tensor.detach().std(correction=0)
                elif len(part):
                    part[:] = part[0].clone()
        return copy.requires_grad_(tensor.requires_grad)

    def _difference(self, before: Tensor, after: Tensor, tolerance: Tolerance) -> Difference | None:
        """Return the change of an output in the documents from the edge of each row on; None if any layout has none."""
        difference = None
        for layout in self._layouts_of(before):
            a, b = (self._later(self.slicing.joined(layout, [each.detach()])) for each in (after, before))
            difference = compare.compare("output", a, b, tolerance, by_token=True)
            if difference is None:
                break
        return difference

    def _later(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all rows, and zeros in place of those before the edge of each row."""
        tokens = tokens.clone()
        if compare.is_real(tokens):
            tokens.nan_to_num_()
        for row, edge in enumerate(self._edges()):
            # a row of one document changes with no other
            of_row = tokens if len(self._starts) == 1 else tokens[:, row]
            of_row[:edge] = 0
        return tokens
