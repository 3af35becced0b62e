"""Hand layers what their part received, or copies of it where they work in place.

A received tensor that needs a gradient is a leaf of its slice's graph, and torch lets no layer write to a leaf. Layers
that do get copies: a hidden state more of memory for each live slice, and the time of the copy and its backward. The
first forward of training runs on copies, whose versions tell whether layers write to them.
"""

from __future__ import annotations

from terapipe_ds.runtime.batch.sliceable import Tensors


class WrittenInputError(RuntimeError):
    """A layer works in place on its input, and did not in the first forward."""


class HandedInputs:
    """Decide, for each input of a part, whether its layers get the leaf itself.

    Leaves that need no gradient are copied always: nothing would be said of a layer that writes to them.

    Args:
        may_hand: the leaves are this part's alone. Where the part before on the same stage, a batch or another owner
            has the same memory, layers get copies.
    """

    def __init__(self, may_hand: bool) -> None:
        self._handed: frozenset[int] = frozenset()
        self._is_known = not may_hand

    def inputs(self, leaves: Tensors) -> Tensors:
        """Return what the layers get for the leaves of a slice."""
        if not self._handed:
            return tuple([leaf.clone() for leaf in leaves])
        return tuple(
            [leaf if i in self._handed and leaf.requires_grad else leaf.clone() for i, leaf in enumerate(leaves)]
        )

    def look(self, leaves: Tensors, inputs: Tensors) -> None:
        """See, after a forward with a graph, which `inputs` the layers have written to; only the first call looks.

        A tensor whose memory was exchanged (`.data`, as DeepSpeed's checkpointing does to divide or to offload inputs)
        counts as written.
        """
        if self._is_known:
            return
        self._is_known = True
        both = enumerate(zip(leaves, inputs, strict=True))
        self._handed = frozenset(
            i for i, (leaf, copy) in both if copy._version == 0 and copy.nbytes == leaf.nbytes and leaf.requires_grad
        )

    def explain(self, error: RuntimeError) -> None:
        """Raise WrittenInputError where layers have failed with `error` because they have no copy."""
        if self._handed and "leaf Variable that requires grad" in str(error):
            raise WrittenInputError(
                "a layer works in place on its input, and did not in the first training forward, so that it has no "
                "copy: let it work on one (inputs = inputs.clone())"
            ) from error
