"""Hand layers the tensors that their part received, or copies if the layers work in place.

A received tensor that needs a gradient is a leaf of its slice's graph, and torch lets no layer write to a leaf. Layers
that write to their inputs get copies. A copy takes the memory of one more hidden state for each live slice, and the
time of the copy and its backward. The forwards of the first micro-batch in training run on copies, whose versions tell
whether layers write to them. Some layers do so from the second slice on, when there is a state to add: later slices
run on copies up to the end of the first micro-batch that has any.
"""

from __future__ import annotations

from terapipe_ds.messages import text_of
from terapipe_ds.runtime.batch.cut_tensors import Tensors


class WrittenInputError(RuntimeError):
    """Say that a layer works in place on its input, which it did not do in the first micro-batch."""


_LATE = (
    "a layer changes its input in place, and did not in the first training forwards, so that it got no copy: change a "
    "copy in the layer (inputs = inputs.clone())"
)


class HandedInputs:
    """Decide, for each input of a part, whether its layers get the leaf itself.

    Leaves that need no gradient are always copied: torch raises no error for a layer that writes to them.

    Args:
        may_hand: the leaves belong to this part alone. If the part before on the same stage, a batch or another owner
            has the same memory, layers get copies.
    """

    def __init__(self, may_hand: bool) -> None:
        self._may_hand = may_hand
        self._written: dict[bool, set[int]] = {True: set(), False: set()}  # in first slices, and in later ones
        self.renew()

    def renew(self) -> None:
        """Learn again: a program has changed the model, and may change it back. Inputs once written to get copies."""
        self._handed: dict[bool, frozenset[int]] = {}

    def leaves_or_copies(self, leaves: Tensors, is_first: bool) -> Tensors:
        """Return the tensors that the layers get for the leaves of a slice, the first or a later one."""
        handed = self._handed.get(is_first, ())
        return tuple([leaf if i in handed and leaf.requires_grad else leaf.clone() for i, leaf in enumerate(leaves)])

    def look(self, leaves: Tensors, inputs: Tensors, is_first: bool, is_last: bool = True) -> None:
        """Learn after a forward with a graph which `inputs` the layers have written to, up to the slice that `is_last`.

        A tensor whose memory was exchanged (`.data`, as DeepSpeed's checkpointing does to divide or to offload inputs)
        counts as written. So does one that was detached in place: a leaf would lose all of its gradient.

        Raises WrittenInputError if layers have detached a leaf.
        """
        both = list(enumerate(zip(leaves, inputs, strict=True)))
        detached = {i for i, (leaf, copy) in both if (copy is leaf or leaf.requires_grad) and not copy.requires_grad}
        if any(inputs[i] is leaves[i] for i in detached):
            raise WrittenInputError(_LATE)
        if not self._may_hand or is_first in self._handed:
            return
        # each write raises the version of a tensor; copies begin at 0
        written = {i for i, (leaf, copy) in both if copy._version != 0 or copy.nbytes != leaf.nbytes}
        self._written[is_first] |= written | detached
        if is_first or is_last:
            self._handed[is_first] = frozenset(range(len(leaves))) - self._written[is_first]

    def explain(self, error: RuntimeError) -> None:
        """Raise WrittenInputError if layers have failed with `error` because they have no copy."""
        if any(self._handed.values()) and "leaf Variable that requires grad" in text_of(error):
            raise WrittenInputError(_LATE) from error
