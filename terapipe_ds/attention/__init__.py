"""Compute causal attention of a token slice to itself and to the slices before it.

A model author needs `sliced_attention` and `active_slice`, `carry` for layers with a state, and now and then
`allow_attention_within_slice`. `documents` serves packed rows that run without the engine. The rest serves the engine,
tests and benchmarks.
"""

from __future__ import annotations

from terapipe_ds.attention import carry, opaque
from terapipe_ds.attention.active_slice import ActiveSlice, active_slice, documents, push_slice
from terapipe_ds.attention.backends import available_backends, set_backend
from terapipe_ds.attention.opaque import running_layer
from terapipe_ds.attention.plain_attention_guard import (
    GuardCapturedNames,
    PlainAttentionError,
    UncompiledMode,
    allow_attention_within_slice,
    guard_plain_attention,
)
from terapipe_ds.attention.slice_store import SliceStore, SliceStoreError
from terapipe_ds.attention.sliced import sliced_attention

__all__ = [
    "ActiveSlice",
    "GuardCapturedNames",
    "PlainAttentionError",
    "SliceStore",
    "SliceStoreError",
    "UncompiledMode",
    "active_slice",
    "allow_attention_within_slice",
    "available_backends",
    "carry",
    "documents",
    "guard_plain_attention",
    "opaque",
    "push_slice",
    "running_layer",
    "set_backend",
    "sliced_attention",
]
