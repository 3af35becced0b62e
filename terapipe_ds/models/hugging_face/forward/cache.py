"""Give models of transformers a cache whose contents go from slice to slice, with their gradients.

A model continues a sequence from a cache (chunked prefill): keys and values of the tokens before, the last inputs of
a convolution, the state of a recurrence. `SliceCache` keeps none of these itself. Keys and values are in the slice
store, states are carried (`terapipe_ds.attention.carry`). It reads its place from the active slice, so that one cache
serves all slices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache, CacheLayerMixin

from terapipe_ds.attention import active_slice, carry
from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.positions import first_position

try:  # transformers 5
    from transformers.cache_utils import LinearAttentionCacheLayerMixin as _States
except ImportError:  # 4.57 has a cache of its own for each recurrent family

    class _States:  # type: ignore[no-redef]
        """Stand in for a class that transformers 4.57 lacks."""


def name_of(layer_index: int) -> Hashable:
    """Return the name of a decoder layer in the slice store."""
    return ("decoder layer", layer_index)


class SliceCache(Cache):
    """Act as the cache of all decoder layers of a model.

    `gives_prefix`: whether layers get the keys and values of all tokens so far, for an attention of their own.
    Otherwise they get the keys and values of the slice, for `sliced_attention`.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(index, self) for index in range(num_layers)])
        self.gives_prefix = False
        self.states_written: set[str] = set()  # their names, for a caller that clears it before
        self._written: dict[tuple[Hashable, str], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it asks its cache for {name}, which only a cache of a kind of its own has")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values of a layer; for `sliced_attention`, only hand on the slice's, for any layer index."""
        if not self.gives_prefix:
            return key_states, value_states
        keys, values = self.layers[layer_idx].update(key_states, value_states, *others, **named)
        return keys, values

    def forget_written(self) -> None:
        """Forget the states of a layer that did not finish."""
        self._written.clear()

    def write(self, layer_index: int, name: str, state: Tensor) -> None:
        """Note a new state; `tied` hands it on. A second one takes its place."""
        self.states_written.add(name)
        _refuse_documents("states of a convolution or a recurrence")
        self._written[name_of(layer_index), name] = state

    def tied(self, out: Tensor) -> Tensor:
        """Hand on all states that were written since the last call; return `out`, tied to them."""
        written, self._written = self._written, {}
        for (layer, name), state in written.items():
            out = carry.write(layer, name, state, out)
        return out

    @property
    def is_linear(self) -> list[bool]:
        """Return that no layer is without keys: a mask may be asked for any of them."""
        return [False] * len(self.layers)


class _Started(dict[int, bool]):
    """Say for each state whether an earlier slice has run."""

    def __missing__(self, _: int) -> bool:
        return first_position() > 0

    def values(self) -> Any:
        return [self[0]]


class _Carried(dict[int, Tensor | None]):
    """Read the states of one kind, by their number."""

    def __init__(self, layer_index: int, kind: str) -> None:
        super().__init__()
        self._layer_index, self._kind = layer_index, kind

    def __missing__(self, number: int) -> Tensor | None:
        return carry.read(name_of(self._layer_index), f"{self._kind} {number}")


class _Layer(CacheLayerMixin, _States):
    """Show one decoder layer its part of the cache: keys, values, and states of any number and kind."""

    def __init__(self, index: int, cache: SliceCache) -> None:
        self._index, self._cache = index, cache
        self.is_initialized = True
        self.keys = self.values = None
        self.has_previous_state = _Started()
        self.conv_states, self.recurrent_states = _Carried(index, "convolution"), _Carried(index, "recurrent")

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: this cache has no memory of its own."""

    def get_seq_length(self, *_: Any) -> int:
        return first_position()

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # as transformers 4.57 calls it

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        tokens = query_length if isinstance(query_length, int) else len(query_length)  # 4.57 gives their places
        return first_position() + tokens, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values [B, H, T, D] of the slice to the store; return the whole prefix with them."""
        active = active_slice()
        _refuse_documents("attention by code of its own")
        if active is None or active.is_whole:
            return key_states, value_states
        keys, values = _WithPrefix.apply(key_states, value_states, active, name_of(self._index))
        return keys, values

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs [B, C, kernel] of a convolution; return the earlier inputs followed by the slice's."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        # the previous slice's inputs take the place that padding has on the first slice
        before = self.conv_states[state_idx]
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        if inputs.shape[-1] < size:
            inputs = torch.nn.functional.pad(inputs, (size - inputs.shape[-1], 0))
        self._cache.write(self._index, f"convolution {state_idx}", inputs[..., -size:])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self._cache.write(self._index, f"recurrent {state_idx}", recurrent_states)
        return recurrent_states


def _refuse_documents(what: str) -> None:
    active = active_slice()
    if active is not None and active.documents is not None:
        raise ModelRefusedError(
            f"a layer has {what}, which would mix the documents of packed rows: pack no rows for this model, or none "
            "with several documents"
        )


class _WithPrefix(torch.autograd.Function):
    """Append keys and values to the slice store; return the keys and values of all tokens so far."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, active: ActiveSlice, layer: Hashable) -> tuple[Tensor, Tensor]:
        assert active.store is not None
        # the model attends to these by itself; the store only appends, and gathers gradients
        entry = active.store.write(active, layer, k, v)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:  # else no node comes of this call
            entry.record(True)
        ctx.entry, ctx.active = entry, active
        keys, values = entry.keys_values(0, active.stop)
        return keys.clone(), values.clone()  # later slices write on in the same memory, and autograd keeps these

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_keys: Tensor, d_values: Tensor) -> tuple[Tensor | None, ...]:
        entry, active = ctx.entry, ctx.active
        entry.begin_backward(active.start, active.stop)
        entry.add_grads(0, d_keys, d_values)
        return *(entry.end_backward(active.start, active.stop) or (None, None)), None, None
