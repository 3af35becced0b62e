"""Check what a call of sliced attention is given."""

from __future__ import annotations

import math
from collections.abc import Hashable
from numbers import Real
from typing import NamedTuple

from torch import Tensor

from terapipe_ds.attention.active_slice import ActiveSlice


class Options(NamedTuple):
    """The numbers of one call."""

    scale: float
    dropout_p: float
    window: int | None
    softcap: float | None


def check_inputs(q: Tensor, k: Tensor, v: Tensor, active: ActiveSlice, layer: Hashable, dropout_p: float) -> None:
    """Raise ValueError where shapes, dtypes or the rate of dropout do not fit the active slice."""
    tokens, shapes = active.num_tokens, f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or q.shape[2] != tokens:
        problem = (
            f"the active slice [{active.start}, {active.stop}) has {tokens} tokens, so q must be [B, H, {tokens}, D], "
            f"got {shapes}; pass the slice's own tokens, and no others"
        )
    elif (
        k.dim() != 4
        or v.dim() != 4
        or k.shape[:3] != v.shape[:3]
        or (k.shape[0], *k.shape[2:]) != (q.shape[0], tokens, q.shape[3])
    ):
        problem = f"q must be [B, H, T, D], k [B, H_kv, T, D] and v [B, H_kv, T, D_v], got {shapes}"
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        problem = f"the query heads must be a multiple of the key heads, got {shapes}"
    elif not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}"
        problem = f"q, k and v need one dtype and one device, got {kinds}"
    elif not 0.0 <= dropout_p < 1.0:
        problem = f"dropout_p must be in [0, 1), got {dropout_p}"
    else:
        return
    raise ValueError(f"layer {layer!r}: {problem}")


def check_options(q: Tensor, active: ActiveSlice, layer: Hashable, options: Options, sinks: Tensor | None) -> None:
    """Raise ValueError for numbers and sinks that attention cannot have."""
    scale, _, window, softcap = options
    rows = None if active.documents is None else len(active.documents.starts)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        problem = f"window must be a number of tokens >= 1, its own included, or None for all, got {window!r}"
    elif not _is_positive(scale):
        problem = f"scale must be a finite number > 0, or None, got {scale!r}; multiply q by any other"
    elif softcap is not None and not _is_positive(softcap):
        problem = f"softcap must be a finite number > 0, or None, got {softcap!r}; a tensor would get no gradient"
    elif sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        problem = f"sinks must be one number per query head, [{q.shape[1]}], got {list(sinks.shape)} of {sinks.dtype}"
    elif sinks is not None and sinks.device != q.device:
        problem = f"sinks must be on the device of q, {q.device}, not on {sinks.device}"
    elif rows is not None and rows != q.shape[0]:
        problem = f"the documents are those of {rows} rows, but q has {q.shape[0]}: {tuple(q.shape)}"
    else:
        return
    raise ValueError(f"layer {layer!r}: {problem}")


def _is_positive(x: float) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and 0.0 < x < math.inf
