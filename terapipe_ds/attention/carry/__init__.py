"""Hand a layer's state from slice to slice, and the state's gradient back: what `sliced_attention` is for attention.

A recurrence, a convolution or a token shift needs of the tokens before a slice only what fits in one tensor:

    state = carry.read(layer, "recurrent")            # None on the first slice
    out, last = mixer(x, initial_state=state)
    out = carry.write(layer, "recurrent", last, out)  # the gradient of `last` arrives through `out`

Outside of sliced execution, and where one slice is the whole sequence, `read` gives None and `write` gives `output`.
"""

from __future__ import annotations

from terapipe_ds.attention.carry.calls import read, write

__all__ = ["read", "write"]
