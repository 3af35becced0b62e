"""Count the costs of a model on hardware that one does not have: work over the rates of a device card.

Each group of operations takes max(FLOPs / reachable FLOP/s, bytes / reachable bytes/s) (the roofline of Williams et
al., 2009), and each kernel its launch floor on top, so that small slices meet the floor of launches and of reading
the weights. Attention is counted exactly: a slice of i tokens after j attends to i*j + i*(i+1)/2 (query, key) pairs,
or to those within the window of its layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe_ds.costs.devices import ITEM_BYTES, DeviceCard, LinkCard, device_card
from terapipe_ds.costs.model_sizes import ModelSize, model_size
from terapipe_ds.costs.wire_formats import bytes_of_token
from terapipe_ds.messages import check_count
from terapipe_ds.plan import JOINED_ROWS

Array = npt.NDArray[np.float64]

# Kernels in one layer's forward: norms 2, qkv and rotary 3, K/V store 2, attention 2, out 1, MLP 3, residual 2.
LAYER_KERNELS = 15
EMBEDDING_KERNELS, HEAD_KERNELS = 2, 8
# A fused attention backward recomputes the scores: five matrix products instead of two (Dao, 2023, section 3.1).
ATTENTION_BACKWARD = 2.5
# Mixed-precision Adam: gradient, master weight, two moments read, the last three and the weight written; fp32 alike.
OPTIMIZER_BYTES_PER_PARAMETER = 28

# A sum of gradients in fp32, read and written. In fp32 without ZeRO the gradient itself is the sum.
SUM_BYTES = 8


class AnalyticCostError(ValueError):
    """Refuse a cut or a division that the model does not allow."""


@dataclass(frozen=True)
class AnalyticCosts:
    """Count the costs of one part of a model on one of `tensor_parallel` ranks, for planner and simulator.

    `tokens` and `prefix` are ints (results are floats) or arrays (elementwise, with broadcasting).
    """

    model: ModelSize
    device: DeviceCard
    dtype: str
    micro_batch: int  # rows
    num_layers: int  # of this part
    has_embedding: bool
    has_head: bool
    tensor_parallel: int
    activation_checkpointing: bool
    link: LinkCard  # to the next part
    peer_link: LinkCard  # among the tensor-parallel ranks
    wire_formats: tuple[str | None, str | None] = (None, None)  # of activations and gradients on `link`
    sequence_parallel: int = 1  # ranks that divide the tokens of a slice, and exchange them for heads in attention
    keeps_attention: bool = False  # activation checkpointing runs all of the forward again but attention
    fused_loss: bool = False  # `terapipe_ds.losses`: the head's products, chunk by chunk, are all in the backward
    splits_tokens: bool = False  # Megatron's sequence parallelism: tensor ranks divide norms, residuals and messages
    windows: tuple[tuple[int, int], ...] = ()  # tokens that a token sees, and how many of the layers have that window

    vectorized = True

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the forward of `tokens` tokens after `prefix` tokens."""
        i, j = _arguments(tokens, prefix)
        return _like(i, self._layers_forward_s(i, j) + self._ends_forward_s(i))

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the backward; activation checkpointing adds the forward of the layers."""
        i, j = _arguments(tokens, prefix)
        seconds = self._layers_backward_s(i, j) + self._ends_backward_s(i) + self._weight_s(i)
        if self.activation_checkpointing:
            seconds = seconds + self._layers_forward_s(i, j, again=True)
        return _like(i, seconds)

    def weight_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the weight gradients, a part of the backward; the prefix does not matter."""
        i, j = _arguments(tokens, prefix)
        return _like(i, self._weight_s(i) + 0.0 * j)

    def send_s(self, tokens: Any) -> Any:
        """Return the seconds of one message of activations between two parts."""
        return self._message_s(tokens, self.wire_formats[0])

    def send_gradient_s(self, tokens: Any) -> Any:
        """Return the seconds of the message with their gradient."""
        return self._message_s(tokens, self.wire_formats[1])

    def _message_s(self, tokens: Any, wire_format: str | None) -> Any:
        i, _ = _arguments(tokens, 0)
        of_token = bytes_of_token(wire_format, self.model.hidden_size, self._item)
        seconds = self.link.latency_s + self._rows(i) * of_token / self._sharing / self.link.bandwidth_bytes_per_s
        return _like(i, seconds)

    def step_s(self) -> float:
        """Return the seconds of an Adam step over the parameters on one rank, without data-parallel reduction."""
        moved = self.num_parameters() / self.tensor_parallel * OPTIMIZER_BYTES_PER_PARAMETER
        return moved / self.device.reachable_bytes_per_s

    def num_parameters(self) -> int:
        """Count the parameters of this part over all tensor-parallel ranks; both end parts hold a tied matrix."""
        size, total = self.model, self.num_layers * self.model.layer_parameters()
        total += size.embedding_parameters() if self.has_embedding else 0
        total += size.head_parameters() if self.has_head else 0
        has_copy = self.has_head and size.tied_embedding and not self.has_embedding
        return total + (size.vocab_size * size.hidden_size if has_copy else 0)

    def _layers_forward_s(self, i: Array, j: Array, again: bool = False) -> Array:
        layer = self._matmul_s(i) + self._exchange_s(i)
        if not (again and self.keeps_attention):
            layer = layer + self._attention_s(i, j)
        layer = layer + self._elementwise_s(i) + 2 * self._all_reduce_s(self._activation_bytes(i))
        return self.num_layers * layer

    def _layers_backward_s(self, i: Array, j: Array) -> Array:
        """Time all but the weight gradients, which are in `_weight_s`."""
        layer = self._matmul_s(i) + 2 * self._elementwise_s(i) + self._attention_s(i, j, backward=True)
        layer = layer + self._exchange_s(i)
        return self.num_layers * (layer + 2 * self._all_reduce_s(self._activation_bytes(i)))

    def _weight_s(self, i: Array) -> Array:
        """Time the weight gradients: FLOPs as in the forward, and their addition to the sums.

        A slice has its share of the products and additions that it has together with others (`plan.weight_groups`). It
        has its own if gradients are as wide as their sums, or if layers run a second time in the backward.
        """
        joins = self._has_sums and not self.activation_checkpointing
        joined = np.maximum(i, JOINED_ROWS * self.sequence_parallel / self.micro_batch) if joins else i
        seconds = self.num_layers * self._matmul_s(joined, adds=True)
        if self.has_head and not self.fused_loss:
            seconds = seconds + self._head_s(joined, adds=True)
        if self.has_embedding and self._has_sums:
            seconds = seconds + self._table_s()
        return np.asarray(seconds * i / joined)

    @property
    def _has_sums(self) -> bool:
        """Return whether the optimizer sums gradients in fp32, beside narrower ones."""
        return self._item < 4

    def _table_s(self) -> Array:
        """Time the gradient of an embedding's table: written, read, and added to the sum."""
        numbers = self._vocabulary() * self.model.hidden_size
        return self._roofline_s(0.0, np.asarray((2.0 * self._item + SUM_BYTES) * numbers), 2)

    def _product_s(
        self, i: Array, weights: float, numbers: Array, kernels: int, adds: bool, held: float | None = None
    ) -> Array:
        """Time matrix products that move `numbers`; with `adds` their results are added to sums.

        A product hides the addition if it has enough rows. One with fewer waits for the memory before or after. Of
        `held` weights a token passes `weights`.
        """
        flops = 2 * self._rows(i) * weights
        held = weights if held is None else held
        efficiency = self.device.matmul_efficiency
        if not adds:
            return self._roofline_s(flops, self._item * numbers, kernels, efficiency)
        is_hidden = self._rows(i) >= JOINED_ROWS
        moved = self._item * (numbers - held)
        sums = np.asarray(SUM_BYTES * held)
        hidden_s = self._roofline_s(flops, moved + sums, kernels, efficiency)
        apart_s = self._roofline_s(flops, moved, kernels, efficiency) + self._roofline_s(0.0, sums, 0)
        return np.where(is_hidden, hidden_s, apart_s)

    def _ends_forward_s(self, i: Array) -> Array:
        seconds, activation_bytes = np.zeros_like(i), self._activation_bytes(i)
        if self.has_embedding:
            gather_s = self._roofline_s(0.0, 2 * activation_bytes, EMBEDDING_KERNELS)
            seconds = seconds + gather_s + self._all_reduce_s(activation_bytes)
        if self.has_head and self.fused_loss:  # it only keeps the hidden states
            seconds = seconds + self._roofline_s(0.0, 2 * activation_bytes, 2)
        elif self.has_head:
            seconds = seconds + self._head_s(i) + self._loss_s(i) + self._vocabulary_sums_s(i)
        return seconds

    def _ends_backward_s(self, i: Array) -> Array:
        seconds, activation_bytes = np.zeros_like(i), self._activation_bytes(i)
        if self.has_embedding:
            seconds = seconds + self._roofline_s(0.0, 3 * activation_bytes, EMBEDDING_KERNELS)
            if not self._has_sums:  # autograd adds it for each slice
                seconds = seconds + self._table_s()
        if self.has_head:
            seconds = seconds + self._head_s(i) + self._loss_s(i) + self._all_reduce_s(activation_bytes)
        if self.has_head and self.fused_loss:  # logits, and both their gradients
            products_s = self._head_s(i) + self._head_s(i, adds=True)
            seconds = seconds + products_s + self._loss_s(i) + self._vocabulary_sums_s(i)
        return seconds

    # -- groups of operations on one rank

    def _vocabulary_sums_s(self, i: Array) -> Array:
        """Time a loss over a split vocabulary: maximum, sum and target's logit, one fp32 number per token each."""
        return 3 * self._all_reduce_s(4 * self._rows(i))

    def _matmul_s(self, i: Array, adds: bool = False) -> Array:
        """Time the matrix products of one layer, or of its weight gradients, which are added to sums."""
        size, rows, degree = self.model, self._rows(i), self.tensor_parallel
        query, key_value = size.num_heads // degree, self._kv_heads()
        widths = 2 * size.mean_head_dim * (query + key_value) + self._ffn()
        repeated = 2 * size.head_dim * (key_value - size.num_kv_heads / degree)  # key heads that several ranks have
        projections = size.attention_weights() / degree + repeated * size.hidden_size
        active, held = (projections + size.mlp_weights(active=of) / size.num_layers / degree for of in (True, False))
        inputs = 4 * size.hidden_size
        if size.experts is not None:  # tokens go to their experts and back
            inputs += 4 * size.experts.per_token * size.hidden_size
        numbers = held + rows * (widths + inputs)  # in and out
        return self._product_s(i, active, numbers, 5, adds, held)

    def _attention_s(self, i: Array, j: Array, backward: bool = False) -> Array:
        """Time Q K^T and P V of a layer, the mean of those that have windows and those that see the whole prefix."""
        without = self.num_layers - sum(count for _, count in self.windows)
        seconds = np.zeros_like(i)
        for window, count in ((math.inf, without), *self.windows) if self.num_layers else ():
            if count:
                seconds = seconds + count / self.num_layers * self._attention_of_s(i, j, window, backward)
        return seconds

    def _attention_of_s(self, i: Array, j: Array, window: float, backward: bool) -> Array:
        """Time 2 FLOPs each per pair, head and head dimension. K and V of the prefix in reach are read again."""
        size, heads = self.model, self.model.num_heads / self.tensor_parallel / self.sequence_parallel
        pairs = i * j + i * (i + 1) / 2  # a token sees the prefix and its slice up to itself
        if window < math.inf:
            pairs = _seen(i + j, window) - _seen(j, window)
        flops = 4 * self.micro_batch * heads * size.mean_head_dim * pairs
        reach = i + np.minimum(j, window - 1)
        numbers = 2 * heads * i + 2 * self._kv_heads(self.sequence_parallel) * reach
        moved = self._item * self.micro_batch * size.mean_head_dim * numbers
        if not backward:
            return self._roofline_s(flops, moved, 2, self.device.attention_efficiency)
        rate = self.device.attention_backward_efficiency or self.device.attention_efficiency
        return self._roofline_s(ATTENTION_BACKWARD * flops, 3 * moved, 4, rate)

    def _exchange_s(self, i: Array) -> Array:
        """Time tokens for heads and back: queries, keys and values to all sequence ranks, and the output from them."""
        ranks = self.sequence_parallel
        if ranks == 1:
            return np.zeros_like(i)
        heads = 2 * self.model.num_heads + 2 * ranks * self._kv_heads(ranks)
        moved = self._rows(i) * heads * self.model.mean_head_dim * self._item
        wires_s = (ranks - 1) / ranks * moved / self.peer_link.bandwidth_bytes_per_s + 2 * self.peer_link.latency_s
        return wires_s + self._roofline_s(0.0, 4 * moved, 4)  # each is packed and unpacked

    def _elementwise_s(self, i: Array) -> Array:
        """Time norms (read, write), residuals (two reads, write), activation, and the copy of K and V to the store."""
        numbers = (
            10 * self.model.hidden_size / self._sharing + self._ffn() + 4 * self._kv_heads() * self.model.mean_head_dim
        )
        return self._roofline_s(0.0, self._item * self._rows(i) * numbers, LAYER_KERNELS - 7)

    def _head_s(self, i: Array, adds: bool = False) -> Array:
        rows, hidden, vocabulary = self._rows(i), self.model.hidden_size, self._vocabulary()
        weights = hidden * vocabulary
        return self._product_s(i, weights, weights + rows * (hidden + vocabulary), 1, adds)

    def _loss_s(self, i: Array) -> Array:
        """Time the final norm, and the softmax over the vocabulary in fp32: read, exponentiated, summed."""
        moved = self._rows(i) * (2 * self.model.hidden_size * self._item + 3 * 4 * self._vocabulary())
        return self._roofline_s(0.0, moved, HEAD_KERNELS - 1)

    def _roofline_s(self, flops: Array | float, moved: Array, kernels: int, efficiency: float = 1.0) -> Array:
        peak = self.device.peak_flops[self.dtype]
        assert peak is not None  # resolve_dtype
        busy_s = np.maximum(flops / (peak * efficiency), moved / self.device.reachable_bytes_per_s)
        return np.asarray(busy_s + kernels * self.device.kernel_floor_s)

    def _all_reduce_s(self, message_bytes: Array) -> Array:
        """Time a ring over t ranks: 2 (t - 1) / t of the bytes cross each link."""
        t = self.tensor_parallel
        if t == 1:
            return np.zeros_like(message_bytes)
        return 2 * (t - 1) / t * message_bytes / self.peer_link.bandwidth_bytes_per_s + self.peer_link.latency_s

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.dtype]

    def _activation_bytes(self, i: Array) -> Array:
        return self._rows(i) * self.model.hidden_size * self._item

    def _rows(self, i: Array) -> Array:
        """Return the tokens of a slice on one rank, over all sequences."""
        return self.micro_batch * i / self.sequence_parallel

    @property
    def _sharing(self) -> int:
        """Return the tensor ranks that divide the tokens of the residual stream."""
        return self.tensor_parallel if self.splits_tokens else 1

    def _kv_heads(self, ranks: int = 1) -> int:
        """Return the key and value heads of a rank; with `ranks` sequence ranks, those that it attends to."""
        heads = max(1, self.model.num_kv_heads // self.tensor_parallel)
        return heads // math.gcd(heads, ranks)  # repeated, up to the least common multiple

    def _ffn(self) -> float:
        """Return the widths of the matrices of a token's MLPs on one rank."""
        return self.model.matrices_of_mlp * self.model.active_ffn() / self.tensor_parallel

    def _vocabulary(self) -> int:
        """Return the columns of the output matrix on one rank; a vocabulary that does not divide is padded."""
        return -(-self.model.vocab_size // self.tensor_parallel)


def analytic_costs(
    model: ModelSize | str,
    device: DeviceCard | str,
    *,
    num_stages: int,
    dtype: str = "auto",
    micro_batch: int = 1,
    tensor_parallel: int = 1,
    activation_checkpointing: bool = False,
    layers_per_part: Sequence[int] | None = None,
    wire_formats: tuple[str | None, str | None] = (None, None),
    fused_loss: bool = True,
    splits_tokens: bool = False,
    devices: int | None = None,
) -> list[AnalyticCosts]:
    """Return the costs of each part: embedding on the first, head and loss on the last; equal parts are one object.

    Layers are spread evenly, the larger parts first, unless `layers_per_part` says otherwise. All parts send over
    the network where the pipeline does not fit in one node; it has `devices`, or as many as parts with their ranks.
    `wire_formats` are the formats of `terapipe.links`, forward and backward. With `splits_tokens` the tensor ranks have
    Megatron's sequence parallelism. Raise AnalyticCostError for numbers by which the model cannot be cut.
    """
    size = model_size(model) if isinstance(model, str) else model
    card = device_card(device) if isinstance(device, str) else device
    # refuse impossible numbers before anything is counted
    for name, value in (("num_stages", num_stages), ("micro_batch", micro_batch), ("tensor_parallel", tensor_parallel)):
        check_count(name, value, AnalyticCostError)
    size.check_tensor_parallel(tensor_parallel, AnalyticCostError)
    layers = size.layers_of_parts(num_stages, layers_per_part, AnalyticCostError)

    def link_of(devices: int) -> LinkCard:
        return card.node_link if devices <= card.devices_per_node else card.network_link

    links = link_of(devices or num_stages * tensor_parallel), link_of(tensor_parallel)
    dtype = card.resolve_dtype(dtype)
    # equal parts are one object, so planner and simulator ask it once
    spans = (range(stop - count, stop) for count, stop in zip(layers, accumulate(layers), strict=True))
    keys = [
        (count, part_id == 0, part_id == num_stages - 1, size.windows_of(span))
        for part_id, (count, span) in enumerate(zip(layers, spans, strict=True))
    ]
    again, loss, tokens = activation_checkpointing, fused_loss, splits_tokens
    part = partial(AnalyticCosts, size, card, dtype, micro_batch, fused_loss=loss, splits_tokens=tokens)
    parts = {key: part(*key[:3], tensor_parallel, again, *links, wire_formats, windows=key[3]) for key in keys}
    return [parts[key] for key in keys]


def _seen(tokens: Array, window: float) -> Array:
    """Return the pairs of a query and a key in the first tokens of a sequence, within a window."""
    inside = np.minimum(tokens, window)
    seen: Array = inside * (inside + 1) / 2 + (tokens - inside) * window
    return seen


def _arguments(tokens: Any, prefix: Any) -> tuple[Array, Array]:
    i, j = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
    if not (np.all(i >= 1) and np.all(j >= 0)):
        raise AnalyticCostError("a slice without tokens or with a negative prefix: give tokens >= 1 and prefix >= 0")
    return i, j


def _like(i: Array, seconds: Any) -> Any:
    return float(seconds) if i.ndim == 0 else seconds
